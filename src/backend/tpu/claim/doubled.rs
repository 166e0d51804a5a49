//! Convolutions of images whose pixels are repeated, which a kernel takes from the images themselves.

use std::collections::HashMap;
use std::sync::Arc;

use crate::dtype::DType;
use crate::graph::{Builder, Composite, ConvDims, Op, Tensor};
use crate::shape::Shape;

use super::super::DoubledConvolution;
use super::contracted::{ContractedDims, Scales};
use super::{Claims, Result};

/// The places of a kernel of three, added: of the result's even rows or columns those on both sides of the image before it is doubled,
/// then of its odd ones.
const ADDED: [(usize, usize); 4] = [(0, 1), (1, 3), (0, 2), (2, 3)];

/// A convolution with what belongs to it. Numbers are nodes.
pub(super) struct Found {
    kernel: DoubledConvolution,
    /// The node of the convolution alone.
    pub(super) contraction: usize,
    /// The image before it is doubled.
    x: u32,
    weights: u32,
    bias: Option<u32>,
    /// The shape of the result.
    shape: Shape,
}

impl Claims<'_> {
    /// The convolutions of doubled images that the kernel takes, by the node whose value it gives.
    pub(super) fn doubled_convolutions(&self) -> HashMap<usize, Found> {
        let nodes = 0..self.graph.nodes.len();
        let live = nodes.filter(|i| !self.users[*i].is_empty() && !self.of_weights[*i]);
        let found = live.filter_map(|i| {
            let found = self.doubled_convolution(i)?;
            let (bias, root) = self.bias_and_rounding(i)?;
            Some((root, Found { bias, ..found }))
        });
        found.collect()
    }

    fn doubled_convolution(&self, i: usize) -> Option<Found> {
        let node = &self.graph.nodes[i];
        let contracted = self.contracted(i)?;
        let ContractedDims::Convolution(dims) = contracted.dims else {
            return None;
        };
        let doubled = self.node(contracted.lhs);
        let Op::Composite {
            kind: Composite::UpsampleNearest2x,
            ..
        } = &doubled.op
        else {
            return None;
        };
        let x = *doubled.operands.first()?;
        let [image, weights] = [x, contracted.weights].map(|id| &self.node(id).shape);
        let &[_, height, width, inputs] = &image.dims[..] else {
            return None;
        };
        let outputs = *node.shape.dims.last()?;
        let kernel = DoubledConvolution {
            height,
            width,
            features: self.features,
        };
        let takes = self.is_split(&node.shape)
            && image.dtype == DType::BF16
            && contracted.scales == Scales::None
            // Their sums would be computed in every run.
            && !self.from_stored[contracted.weights as usize]
            && *dims == ConvDims::of_image(1, (1, 1))
            && weights.dims == [outputs, inputs, 3, 3]
            && kernel.columns(inputs, outputs).is_some();
        takes.then(|| Found {
            kernel,
            contraction: i,
            x,
            weights: contracted.weights,
            bias: None,
            shape: node.shape.clone(),
        })
    }

    /// The kernel's call in place of a convolution and what belongs to it.
    pub(super) fn doubled_convolution_call(
        &self,
        b: &Builder,
        found: &Found,
        copies: &[Tensor],
    ) -> Result<Tensor> {
        let copy = |id: u32| copies[id as usize];
        let x = copy(found.x);
        let [batch, height, width, inputs] = [0, 1, 2, 3].map(|d| b.dims(x)[d]);
        let outputs = found.shape.dims[3];
        let x = b.reshape(x, &[batch, height * width, inputs])?;
        let block = found.kernel.columns(inputs, outputs).unwrap_or(outputs);
        let weights = of_places(b, copy(found.weights), block)?;
        let of_biases = Shape::new(DType::F32, [batch, 1, outputs]);
        let biases = match found.bias {
            Some(bias) => {
                let bias = b.convert(copy(bias), DType::F32)?;
                b.broadcast_in_dim(bias, &[2], &of_biases.dims)?
            }
            None => b.full(&of_biases, 0.0)?,
        };
        let call = Op::CustomCall(Arc::new(found.kernel));
        let y = b.push(call, &[x, x, x, weights, biases])?;
        b.reshape(y, &found.shape.dims)
    }
}

/// The kernel `[outputs, inputs, 3, 3]` as [`DoubledConvolution`] has it, in blocks of `block` outputs.
fn of_places(b: &Builder, weights: Tensor, block: usize) -> Result<Tensor> {
    let [outputs, inputs] = [0, 1].map(|d| b.dims(weights)[d]);
    let wide = b.convert(weights, DType::F32)?;
    let added = added(b, added(b, wide, 2)?, 3)?;
    let x = b.convert(added, b.dtype(weights))?;
    let x = b.transpose(x, &[2, 3, 0, 1])?;
    let products = ADDED.len() * ADDED.len();
    let x = b.reshape(x, &[products, outputs / block, block, inputs])?;
    let x = b.transpose(x, &[1, 0, 2, 3])?;
    b.reshape(x, &[1, products * outputs, inputs])
}

/// The sums of a kernel's places along dimension `dim`, as [`ADDED`] has them.
fn added(b: &Builder, kernel: Tensor, dim: usize) -> Result<Tensor> {
    let sums = ADDED.map(|(first, end)| {
        let mut places = (first..end).map(|place| b.slice_dim(kernel, dim, place, place + 1));
        let first = places.next().unwrap_or(Ok(kernel));
        places.fold(first, |sum, place| b.add(sum?, place?))
    });
    let sums: Vec<Tensor> = sums.into_iter().collect::<Result<_>>()?;
    b.concatenate(&sums, dim)
}
