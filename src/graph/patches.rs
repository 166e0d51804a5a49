//! Convolutions of small kernels as products of patches: of every place of the image under each place of the kernel, side by
//! side.

use super::{Builder, ConvDims, DotDims, GraphError, PadDim, QuantDot, Tensor};
use crate::shape::Shape;

type Result<T> = std::result::Result<T, GraphError>;

/// Places of a kernel, or of a weight's gradient, that are taken side by side, at most.
const MOST_PLACES: usize = 16;

/// What lies side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Places {
    /// The places of a small kernel: a convolution, or the derivative of its image. They are terms of the product.
    Kernel,
    /// The places of a small result, under which the kernel is an image: the derivative of a kernel. They are rows.
    Result,
}

/// A convolution whose product of patches is made.
pub(crate) struct Patches<'a> {
    pub dims: &'a ConvDims,
    /// Of the image and the kernel.
    pub shapes: &'a [Shape; 2],
    pub result: &'a Shape,
    pub places: Places,
    /// Whether the kernel's places are in reverse: the last one sees what the first of the others would see.
    pub reversed: bool,
}

impl<'a> Patches<'a> {
    /// `None` where the places are too many, and for groups and other than two spatial dimensions.
    pub fn of(
        dims: &'a ConvDims,
        shapes: &'a [Shape; 2],
        result: &'a Shape,
    ) -> Option<Patches<'a>> {
        let of = |places| Patches::at(places, dims, shapes, result);
        of(Places::Kernel).or_else(|| of(Places::Result))
    }

    /// The same with these places side by side.
    pub fn at(
        places: Places,
        dims: &'a ConvDims,
        shapes: &'a [Shape; 2],
        result: &'a Shape,
    ) -> Option<Patches<'a>> {
        let (shape, spatial) = match places {
            Places::Kernel => (&shapes[1], &dims.rhs.spatial),
            Places::Result => (result, &dims.out.spatial),
        };
        let count: usize = spatial.iter().map(|d| shape.dims[*d]).product();
        let is_plain = dims.feature_groups == 1 && dims.batch_groups == 1;
        let fits = (1..=MOST_PLACES).contains(&count) && is_plain && spatial.len() == 2;
        fits.then_some(Patches {
            dims,
            shapes,
            result,
            places,
            reversed: false,
        })
    }

    /// The product. Where `quant` gives its operands formats, the gradient is its lhs, as in dots of a derivative: the image of an
    /// image's derivative, the kernel of a kernel's.
    pub fn product(
        &self,
        b: &Builder,
        [image, kernel]: [Tensor; 2],
        quant: Option<QuantDot>,
    ) -> Result<Tensor> {
        let patches = self.patches(b, image)?;
        match self.places {
            Places::Kernel => self.of_kernel(b, patches, kernel, quant),
            Places::Result => self.of_result(b, patches, kernel, quant),
        }
    }

    fn of_kernel(
        &self,
        b: &Builder,
        patches: Tensor,
        kernel: Tensor,
        quant: Option<QuantDot>,
    ) -> Result<Tensor> {
        let dims = self.dims;
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
        let result = self.result.dtype;
        let product = b.dot_general_quant(patches, kernel, contract, result, quant)?;
        ordered(b, product, &self.order_of_product())
    }

    fn of_result(
        &self,
        b: &Builder,
        patches: Tensor,
        kernel: Tensor,
        quant: Option<QuantDot>,
    ) -> Result<Tensor> {
        let dims = self.dims;
        let of_image = [&[dims.lhs.feature], &dims.lhs.spatial[..]].concat();
        let of_kernel = [&[dims.rhs.feature], &dims.rhs.spatial[..]].concat();
        let [rows, columns] = [dims.out.spatial[0], dims.out.spatial[1]];
        let result = self.result.dtype;
        let contract = DotDims {
            lhs_contract: of_kernel,
            rhs_contract: of_image,
            ..DotDims::default()
        };
        let product = b.dot_general_quant(kernel, patches, contract, result, quant)?;
        // The image's features last, as in the weights of a checkpoint: what updates them then reads both in one order.
        let order = [dims.out.feature, rows, columns, dims.out.batch];
        let sizes = order.map(|d| self.result.dims[d]);
        ordered(b, b.reshape(product, &sizes)?, &order)
    }

    /// The dimensions of the result in the order of a product of the image: what is left of the image, then the outputs.
    pub fn order_of_product(&self) -> Vec<usize> {
        let left = (0..4).filter(|d| *d != self.dims.lhs.feature);
        let mut order: Vec<usize> = left.map(|d| self.place_in_result(d)).collect();
        order.push(self.dims.out.feature);
        order
    }

    /// The dimension of the result that a batch or spatial dimension of the image becomes.
    fn place_in_result(&self, d: usize) -> usize {
        let spatial = self.dims.lhs.spatial.iter().position(|s| *s == d);
        spatial.map_or(self.dims.out.batch, |at| self.dims.out.spatial[at])
    }

    /// The image with its padding, and with what lies between its places.
    pub fn padded(&self, b: &Builder, image: Tensor) -> Result<Tensor> {
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
        match around.iter().all(|dim| *dim == PadDim::default()) {
            true => Ok(image),
            false => b.pad(image, 0.0, &around),
        }
    }

    /// The image as each place sees it, places side by side along its features or its batch.
    fn patches(&self, b: &Builder, image: Tensor) -> Result<Tensor> {
        let dims = self.dims;
        let padded = self.padded(b, image)?;
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
        if self.reversed {
            views.reverse();
        }
        b.concatenate(&views, side)
    }
}

/// The result whose dimension `order[i]` is dimension `i` of `product`.
pub(crate) fn ordered(b: &Builder, product: Tensor, order: &[usize]) -> Result<Tensor> {
    let mut perm = vec![0; order.len()];
    for (from, to) in order.iter().enumerate() {
        perm[*to] = from;
    }
    match perm.iter().copied().eq(0..perm.len()) {
        true => Ok(product),
        false => b.transpose(product, &perm),
    }
}
