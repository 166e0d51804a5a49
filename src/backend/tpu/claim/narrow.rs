//! Convolutions with few outputs.

use std::sync::Arc;

use crate::graph::{Builder, Op, Tensor};

use super::super::NarrowConvolution;
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
        let is_live = !self.users[i].is_empty() && !self.of_weights[i];
        let found = self.convolution_of_image(i).filter(|_| is_live)?;
        let &[_, height, width, _] = &self.node(found.image).shape.dims[..] else {
            return None;
        };
        let kernel = NarrowConvolution {
            height,
            width,
            features: self.features,
        };
        let takes = found.outputs <= NarrowConvolution::ROWS && kernel.fits(found.inputs);
        takes.then_some(Found {
            kernel,
            x: found.image,
            weights: found.weights,
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
        let weights = pad_to(b, weights, &[3, 3, NarrowConvolution::ROWS, inputs])?;
        let weights = b.reshape(weights, &[1, 9 * NarrowConvolution::ROWS, inputs])?;
        let weights = pad_to(b, weights, &[1, NarrowConvolution::WEIGHTS, inputs])?;
        let call = Op::CustomCall(Arc::new(found.kernel));
        let y = b.push(call, &[x, x, x, weights])?;
        let y = b.slice_dim(y, 1, 0, outputs)?;
        let y = b.reshape(y, &[batch, outputs, height, width])?;
        b.transpose(y, &[0, 2, 3, 1])
    }
}
