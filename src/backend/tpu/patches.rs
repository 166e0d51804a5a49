//! Convolutions of a training step as products.
//!
//! libtpu works 60 to 100 s on a single 3x3 convolution, and a training step of Stable Diffusion XL has three of each of about
//! twenty shapes; nine 1x1 convolutions were 37 % of the code generation of one level. Products compile in seconds. What a
//! product needs is every place of the image under each place of the kernel, side by side: patches, of 3x3 places nine
//! times the image for a moment.
//!
//! Of wide images patches take longer than their product: nine views of 64x64 places and 320 features are predicted at 0.26 ms on
//! a v5e, the product at 0.05. So a convolution of these is a loop over the kernel's places, which adds one product in each
//! trip. Nine products without a loop are as fast, but are compiled nine times.

use crate::dtype::DType;
use crate::graph::patches::{Patches, Places, ordered};
use crate::graph::{Binary, Builder, Comparison, DotDims, Graph, GraphError, Op, Tensor};
use crate::shape::Shape;

use super::mosaic::LANES;

type Result<T> = std::result::Result<T, GraphError>;

/// The graph with products of patches in place of its convolutions, forward and both derivatives. Sums have another order;
/// element types stay.
///
/// # Errors
/// When the graph is ill-typed.
pub fn products_of_patches(graph: &Graph) -> Result<Graph> {
    products(graph, LANES)
}

/// The same with loops for convolutions whose images have `narrowest` features and more.
fn products(graph: &Graph, narrowest: usize) -> Result<Graph> {
    graph.substitute(&mut |b, i, copies| {
        let node = &graph.nodes[i];
        let (Op::Convolution { dims, .. }, &[image, kernel]) = (&node.op, &node.operands[..])
        else {
            return Ok(None);
        };
        let shapes = [image, kernel].map(|id| graph.nodes[id as usize].shape.clone());
        let Some(patches) = Patches::of(dims, &shapes, &node.shape) else {
            return Ok(None);
        };
        // Places are reversed by the order of the patches, and no weight moves.
        let (kernel, reversed) = match reversed(graph, kernel, &dims.rhs.spatial) {
            Some(kernel) if patches.places == Places::Kernel => (kernel, true),
            _ => (kernel, false),
        };
        let patches = Patches {
            reversed,
            ..patches
        };
        let operands = [image, kernel].map(|id| copies[id as usize]);
        let product = match is_loop(&patches, narrowest) {
            true => Loop(&patches).sum_of_products(b, operands),
            false => patches.product(b, operands, None),
        };
        product.map(Some)
    })
}

/// What node `kernel` is the reverse of along all of `spatial`, if it is one.
fn reversed(graph: &Graph, kernel: u32, spatial: &[usize]) -> Option<u32> {
    let node = &graph.nodes[kernel as usize];
    match &node.op {
        Op::Reverse(dims) if dims[..] == *spatial => node.operands.first().copied(),
        _ => None,
    }
}

/// Whether a loop over the places is faster: several, which see all of an image that has far more places than features, so
/// that patches are larger than weights. On a v5e a loop was predicted at 0.4 times the cycles of patches with 64x64 places
/// and 320 features, and at 1.2 times with 32x32 and 1,280. Sums are in float32, so not of integers.
fn is_loop(patches: &Patches<'_>, narrowest: usize) -> bool {
    let dims = patches.dims;
    let count = |shape: &Shape, spatial: &[usize]| -> usize {
        spatial.iter().map(|d| shape.dims[*d]).product()
    };
    let [inputs, outputs] = [
        patches.shapes[0].dims[dims.lhs.feature],
        patches.result.dims[dims.out.feature],
    ];
    patches.places == Places::Kernel
        && patches.result.dtype.is_float()
        && count(&patches.shapes[1], &dims.rhs.spatial) > 1
        && dims.strides.iter().all(|stride| *stride == 1)
        && inputs.min(outputs) >= narrowest
        && count(patches.result, &dims.out.spatial) >= 4 * inputs.max(outputs)
}

/// A convolution as a loop over the kernel's places.
struct Loop<'a>(&'a Patches<'a>);

impl Loop<'_> {
    /// The sum over the kernel's places, in a loop, of what each sees of the image times its weights.
    fn sum_of_products(&self, b: &Builder, [image, kernel]: [Tensor; 2]) -> Result<Tensor> {
        let dims = self.0.dims;
        let [rows, columns] = [dims.rhs.spatial[0], dims.rhs.spatial[1]];
        let kernel = b.transpose(kernel, &[rows, columns, dims.rhs.feature, dims.rhs.batch])?;
        let [inputs, outputs] = [2, 3].map(|d| b.dims(kernel)[d]);
        let count = b.shape(kernel).count() / (inputs * outputs);
        let kernel = b.reshape(kernel, &[count, inputs, outputs])?;
        // All of it before the loop: each trip would wait for its part from other devices.
        let kernel = b.constrain(kernel, &[None; 3])?;
        let padded = self.0.padded(b, image)?;
        let order = self.0.order_of_product();
        let sums: Vec<usize> = order.iter().map(|d| self.0.result.dims[*d]).collect();
        let sum = b.full(&Shape::new(DType::F32, sums), 0.0)?;
        let first = b.scalar(DType::S32, 0.0)?;
        let holds = |r: &Builder, carry: &[Tensor]| {
            let end = r.scalar(DType::S32, count as f64)?;
            r.compare(Comparison::Lt, carry[0], end)
        };
        let body = |r: &Builder, carry: &[Tensor]| {
            let &[place, padded, kernel, sum] = carry else {
                return Err(r.invalid("the loop has four values"));
            };
            let seen = match self.0.reversed {
                false => self.seen_from(r, padded, place)?,
                true => {
                    let last = r.scalar(DType::S32, (count - 1) as f64)?;
                    self.seen_from(r, padded, r.sub(last, place)?)?
                }
            };
            let zero = r.scalar(DType::S32, 0.0)?;
            let sizes = [1, inputs, outputs];
            let weights = r.dynamic_slice(kernel, &[place, zero, zero], &sizes)?;
            let weights = r.reshape(weights, &sizes[1..])?;
            let contract = DotDims {
                lhs_contract: vec![dims.lhs.feature],
                rhs_contract: vec![0],
                ..DotDims::default()
            };
            let product = r.dot_general(seen, weights, contract, DType::F32)?;
            let next = r.add(place, r.scalar(DType::S32, 1.0)?)?;
            Ok(vec![next, padded, kernel, r.add(sum, product)?])
        };
        let results = b.while_loop(&[first, padded, kernel, sum], holds, body)?;
        let sum = b.convert(results[3], self.0.result.dtype)?;
        ordered(b, sum, &order)
    }

    /// What the kernel's place `place`, counted row by row, sees of the padded image.
    fn seen_from(&self, b: &Builder, padded: Tensor, place: Tensor) -> Result<Tensor> {
        let dims = self.0.dims;
        let columns = self.0.shapes[1].dims[dims.rhs.spatial[1]];
        let columns = b.scalar(DType::S32, columns as f64)?;
        let mut start = vec![b.scalar(DType::S32, 0.0)?; 4];
        let mut sizes = b.dims(padded);
        for (at, kind) in [Binary::Div, Binary::Rem].into_iter().enumerate() {
            let d = dims.lhs.spatial[at];
            let step = b.scalar(DType::S32, dims.rhs_dilation[at] as f64)?;
            start[d] = b.mul(b.binary(kind, place, columns)?, step)?;
            sizes[d] = self.0.result.dims[dims.out.spatial[at]];
        }
        b.dynamic_slice(padded, &start, &sizes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{ConvDims, Reduction, evaluate, grad};
    use crate::host_tensor::HostTensor;

    /// A convolution with this side of its kernel and stride and both derivatives of its squares' sum, as they are and as
    /// products.
    fn compared(
        [inputs, outputs]: [usize; 2],
        side: usize,
        stride: usize,
        padding: (i64, i64),
        loops: usize,
    ) {
        let image = [2, 8, 6, inputs];
        let weights = [outputs, inputs, side, side];
        let b = Builder::new();
        let x = b.input("x", Shape::new(DType::F32, image), &[]).unwrap();
        let w = b.input("w", Shape::new(DType::F32, weights), &[]).unwrap();
        let dims = ConvDims::of_image(stride, padding);
        let y = b.convolution(x, w, dims, DType::F32).unwrap();
        let squares = b.square(y).unwrap();
        let loss = b.reduce(Reduction::Sum, squares, &[0, 1, 2, 3]).unwrap();
        let gradients = grad(&b, loss, &[x, w]).unwrap();
        for (name, value) in [("y", y), ("dx", gradients[0]), ("dw", gradients[1])] {
            b.output(name, value, None).unwrap();
        }
        let graph = b.finish();
        // An image of 48 places is wide for 4 features.
        let products = products(&graph, 4).unwrap();
        let live = products.nodes.iter().zip(products.live_nodes());
        let mut ops = live.filter(|(_, live)| *live).map(|(node, _)| &node.op);
        assert!(!ops.any(|op| matches!(op, Op::Convolution { .. } | Op::Reverse(_))));
        let ops = products.nodes.iter().map(|node| &node.op);
        let found = ops.filter(|op| matches!(op, Op::While { .. })).count();
        assert_eq!(
            found, loops,
            "{inputs} to {outputs}, {side}x{side}, stride {stride}"
        );
        // Small integers: sums are exact in any order.
        let values = |dims: &[usize]| {
            let count: usize = dims.iter().product();
            let values: Vec<f32> = (0..count).map(|i| (i * 7 % 5) as f32 - 2.0).collect();
            HostTensor::from_f32(dims, &values).unwrap()
        };
        let inputs = [values(&image), values(&weights)];
        let [expected, found] = [&graph, &products].map(|g| evaluate(g, &inputs).unwrap());
        for ((expected, found), output) in expected.iter().zip(&found).zip(&graph.outputs) {
            assert_eq!(
                expected, found,
                "{} of {side}x{side} with stride {stride}",
                output.name
            );
        }
    }

    #[test]
    fn products_are_the_convolution_and_its_derivatives() {
        compared([3, 5], 3, 1, (1, 1), 0);
        // As diffusers' UNets and VAEs make images smaller.
        compared([3, 5], 3, 2, (1, 1), 0);
        compared([3, 5], 3, 2, (0, 1), 0);
        // Shortcuts and projections.
        compared([3, 5], 1, 1, (0, 0), 0);
        compared([3, 5], 1, 2, (0, 0), 0);
    }

    /// The convolution and the derivative of its image, but no strided one, and none of a small image.
    #[test]
    fn convolutions_of_wide_images_are_loops() {
        compared([4, 6], 3, 1, (1, 1), 2);
        compared([5, 4], 3, 2, (1, 1), 1);
        compared([4, 6], 1, 1, (0, 0), 0);
        compared([4, 13], 3, 1, (1, 1), 0);
    }
}
