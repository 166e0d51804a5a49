//! Convolutions of a training step as products.
//!
//! libtpu works 60 to 100 s on a single 3x3 convolution, and a training step of Stable Diffusion XL has three of each of about
//! twenty shapes; nine 1x1 convolutions were 37 % of the code generation of one level. Products compile in seconds. What a
//! product needs is every place of the image under each place of the kernel, side by side: patches, of 3x3 places nine
//! times the image for a moment.

use crate::graph::{Builder, ConvDims, DotDims, Graph, GraphError, Op, PadDim, Tensor};
use crate::shape::Shape;

type Result<T> = std::result::Result<T, GraphError>;

/// Places of a kernel, or of a weight's gradient, that are taken side by side, at most.
const MOST_PLACES: usize = 16;

/// The graph with products of patches in place of its convolutions, forward and both derivatives. Sums have another order;
/// element types stay.
///
/// # Errors
/// When the graph is ill-typed.
pub fn products_of_patches(graph: &Graph) -> Result<Graph> {
    graph.rewrite(&mut |b, node, operands| match &node.op {
        Op::Convolution { dims, .. } => {
            let shapes = [operands[0], operands[1]].map(|operand| b.shape(operand));
            match Patches::of(dims, &shapes, &node.shape) {
                Some(patches) => patches.product(b, [operands[0], operands[1]]).map(Some),
                None => Ok(None),
            }
        }
        _ => Ok(None),
    })
}

/// What lies side by side.
#[derive(Clone, Copy, PartialEq)]
enum Places {
    /// The places of a small kernel: a convolution, or the derivative of its image. They are terms of the product.
    Kernel,
    /// The places of a small result, under which the kernel is an image: the derivative of a kernel. They are rows.
    Result,
}

struct Patches<'a> {
    dims: &'a ConvDims,
    shapes: &'a [Shape; 2],
    result: &'a Shape,
    places: Places,
}

impl<'a> Patches<'a> {
    /// `None` where the places are too many, and for groups and other than two spatial dimensions.
    fn of(dims: &'a ConvDims, shapes: &'a [Shape; 2], result: &'a Shape) -> Option<Patches<'a>> {
        let count = |shape: &Shape, spatial: &[usize]| -> usize {
            spatial.iter().map(|d| shape.dims[*d]).product()
        };
        let kernel = count(&shapes[1], &dims.rhs.spatial);
        let of_result = count(result, &dims.out.spatial);
        let is_plain = dims.feature_groups == 1 && dims.batch_groups == 1;
        let places = match [kernel, of_result] {
            [1..=MOST_PLACES, _] => Places::Kernel,
            [kernel, 1..=MOST_PLACES] if kernel > MOST_PLACES => Places::Result,
            _ => return None,
        };
        (is_plain && dims.lhs.spatial.len() == 2).then_some(Patches {
            dims,
            shapes,
            result,
            places,
        })
    }

    fn product(&self, b: &Builder, [image, kernel]: [Tensor; 2]) -> Result<Tensor> {
        let patches = self.patches(b, image)?;
        let dims = self.dims;
        let (product, order) = match self.places {
            Places::Kernel => {
                // `[places, inputs, outputs]`, as the patches have them.
                let [rows, columns] = [dims.rhs.spatial[0], dims.rhs.spatial[1]];
                let perm = [rows, columns, dims.rhs.feature, dims.rhs.batch];
                let kernel = b.transpose(kernel, &perm)?;
                let outputs = b.dims(kernel)[3];
                let terms = b.shape(kernel).count() / outputs;
                let kernel = b.reshape(kernel, &[terms, outputs])?;
                let contract = DotDims {
                    lhs_contract: vec![dims.lhs.feature],
                    rhs_contract: vec![0],
                    ..DotDims::default()
                };
                let product = b.dot_general(patches, kernel, contract, self.result.dtype)?;
                // What is left of the image, in its order, then the outputs.
                let mut order: Vec<usize> = (0..4).filter(|d| *d != dims.lhs.feature).collect();
                order = order.into_iter().map(|d| self.place_in_result(d)).collect();
                order.push(dims.out.feature);
                (product, order)
            }
            Places::Result => {
                let contract = DotDims {
                    lhs_contract: [&[dims.lhs.feature], &dims.lhs.spatial[..]].concat(),
                    rhs_contract: [&[dims.rhs.feature], &dims.rhs.spatial[..]].concat(),
                    ..DotDims::default()
                };
                let product = b.dot_general(patches, kernel, contract, self.result.dtype)?;
                let of = |d: usize| self.result.dims[d];
                let [rows, columns] = [dims.out.spatial[0], dims.out.spatial[1]];
                let order = vec![rows, columns, dims.out.batch, dims.out.feature];
                let sizes: Vec<usize> = order.iter().map(|d| of(*d)).collect();
                (b.reshape(product, &sizes)?, order)
            }
        };
        // Dimension `order[i]` of the result is dimension `i` of the product.
        let mut perm = vec![0; order.len()];
        for (from, to) in order.into_iter().enumerate() {
            perm[to] = from;
        }
        match perm.iter().copied().eq(0..perm.len()) {
            true => Ok(product),
            false => b.transpose(product, &perm),
        }
    }

    /// The dimension of the result that a batch or spatial dimension of the image becomes.
    fn place_in_result(&self, d: usize) -> usize {
        let spatial = self.dims.lhs.spatial.iter().position(|s| *s == d);
        spatial.map_or(self.dims.out.batch, |at| self.dims.out.spatial[at])
    }

    /// The image as each place sees it, places side by side along its features or its batch.
    fn patches(&self, b: &Builder, image: Tensor) -> Result<Tensor> {
        let dims = self.dims;
        let mut around = vec![PadDim::default(); 4];
        for (at, d) in dims.lhs.spatial.iter().enumerate() {
            let (low, high) = dims.padding[at];
            let interior = dims.lhs_dilation[at] - 1;
            around[*d] = PadDim {
                low,
                high,
                interior,
            };
        }
        let padded = match around.iter().all(|dim| *dim == PadDim::default()) {
            true => image,
            false => b.pad(image, 0.0, &around)?,
        };
        let kernel = |at: usize| self.shapes[1].dims[dims.rhs.spatial[at]];
        let of_result = |at: usize| self.result.dims[dims.out.spatial[at]];
        // From place to place, and from one value that a place sees to the next.
        let (places, seen, steps, strides, side) = match self.places {
            Places::Kernel => (
                [kernel(0), kernel(1)],
                [of_result(0), of_result(1)],
                &dims.rhs_dilation,
                &dims.strides,
                dims.lhs.feature,
            ),
            Places::Result => (
                [of_result(0), of_result(1)],
                [kernel(0), kernel(1)],
                &dims.strides,
                &dims.rhs_dilation,
                dims.lhs.batch,
            ),
        };
        let sizes = b.dims(padded);
        let mut views = Vec::with_capacity(places[0] * places[1]);
        for row in 0..places[0] {
            for column in 0..places[1] {
                let (mut start, mut limit, mut stride) = (vec![0; 4], sizes.clone(), vec![1; 4]);
                for (at, place) in [row, column].into_iter().enumerate() {
                    let d = dims.lhs.spatial[at];
                    start[d] = place * steps[at];
                    limit[d] = start[d] + (seen[at] - 1) * strides[at] + 1;
                    stride[d] = strides[at];
                }
                views.push(b.slice(padded, &start, &limit, &stride)?);
            }
        }
        b.concatenate(&views, side)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::graph::{Reduction, evaluate, grad};
    use crate::host_tensor::HostTensor;

    /// A convolution with this side of its kernel and stride and both derivatives of its squares' sum, as they are and as
    /// products.
    fn compared(side: usize, stride: usize, padding: (i64, i64)) {
        let b = Builder::new();
        let x = b
            .input("x", Shape::new(DType::F32, [2, 6, 4, 3]), &[])
            .unwrap();
        let w = b
            .input("w", Shape::new(DType::F32, [5, 3, side, side]), &[])
            .unwrap();
        let dims = ConvDims::of_image(stride, padding);
        let y = b.convolution(x, w, dims, DType::F32).unwrap();
        let squares = b.square(y).unwrap();
        let loss = b.reduce(Reduction::Sum, squares, &[0, 1, 2, 3]).unwrap();
        let gradients = grad(&b, loss, &[x, w]).unwrap();
        for (name, value) in [("y", y), ("dx", gradients[0]), ("dw", gradients[1])] {
            b.output(name, value, None).unwrap();
        }
        let graph = b.finish();
        let products = products_of_patches(&graph).unwrap();
        let mut ops = products.nodes.iter().map(|node| &node.op);
        assert!(!ops.any(|op| matches!(op, Op::Convolution { .. })));
        // Small integers: sums are exact in any order.
        let values = |dims: &[usize]| {
            let count: usize = dims.iter().product();
            let values: Vec<f32> = (0..count).map(|i| (i * 7 % 5) as f32 - 2.0).collect();
            HostTensor::from_f32(dims, &values).unwrap()
        };
        let inputs = [values(&[2, 6, 4, 3]), values(&[5, 3, side, side])];
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
        compared(3, 1, (1, 1));
        // As diffusers' UNets and VAEs make images smaller.
        compared(3, 2, (1, 1));
        compared(3, 2, (0, 1));
        // Shortcuts and projections.
        compared(1, 1, (0, 0));
        compared(1, 2, (0, 0));
    }
}
