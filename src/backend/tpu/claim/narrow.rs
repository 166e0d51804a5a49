//! Convolutions with few outputs.

use std::sync::Arc;

use crate::dtype::DType;
use crate::graph::{Builder, ConvDims, Op, Tensor};

use super::super::{NARROW_ROWS, NARROW_WEIGHTS, NarrowConvolution};
use super::contracted::{ContractedDims, Scales};
use super::{Claims, Result, pad_to};

/// A convolution. Numbers are nodes.
pub(super) struct Found {
    kernel: NarrowConvolution,
    x: u32,
    weights: u32,
}

impl Claims<'_> {
    /// Node `i` as a convolution of an image with weights that give a few outputs.
    pub(super) fn narrow_convolution(&self, i: usize) -> Option<Found> {
        let node = &self.graph.nodes[i];
        let is_live = !self.users[i].is_empty() && !self.of_weights[i];
        let contracted = self.contracted(i).filter(|_| is_live)?;
        let ContractedDims::Convolution(dims) = contracted.dims else {
            return None;
        };
        let [image, weights] = [contracted.lhs, contracted.weights].map(|id| &self.node(id).shape);
        let &[_, height, width, inputs] = &image.dims[..] else {
            return None;
        };
        let outputs = *node.shape.dims.last()?;
        let kernel = NarrowConvolution {
            height,
            width,
            features: self.features,
        };
        let takes = self.is_split(&node.shape)
            && image.dtype == DType::BF16
            && contracted.scales == Scales::None
            // They would be laid out in every run.
            && !self.from_stored[contracted.weights as usize]
            && *dims == ConvDims::of_image(1, (1, 1))
            && weights.dims == [outputs, inputs, 3, 3]
            && outputs <= NARROW_ROWS
            && kernel.fits(inputs);
        takes.then_some(Found {
            kernel,
            x: contracted.lhs,
            weights: contracted.weights,
        })
    }

    /// The kernel's call in place of a convolution.
    pub(super) fn narrow_convolution_call(
        &self,
        b: &Builder,
        found: &Found,
        copies: &[Tensor],
    ) -> Result<Tensor> {
        let [x, weights] = [found.x, found.weights].map(|id| copies[id as usize]);
        let [batch, height, width, inputs] = [0, 1, 2, 3].map(|d| b.dims(x)[d]);
        let outputs = b.dims(weights)[0];
        let x = b.reshape(x, &[batch, height * width, inputs])?;
        let weights = b.transpose(weights, &[2, 3, 0, 1])?;
        let weights = pad_to(b, weights, &[3, 3, NARROW_ROWS, inputs])?;
        let weights = b.reshape(weights, &[1, 9 * NARROW_ROWS, inputs])?;
        let weights = pad_to(b, weights, &[1, NARROW_WEIGHTS, inputs])?;
        let call = Op::CustomCall(Arc::new(found.kernel));
        let y = b.push(call, &[x, x, x, weights])?;
        let y = b.slice_dim(y, 1, 0, outputs)?;
        let y = b.reshape(y, &[batch, outputs, height, width])?;
        b.transpose(y, &[0, 2, 3, 1])
    }
}
