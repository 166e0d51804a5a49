//! Convolutions of images whose pixels are repeated, which a kernel takes from the images themselves.

use std::collections::HashMap;
use std::sync::Arc;

use crate::backend::doubled::{ADDED, added};
use crate::dtype::DType;
use crate::graph::{Builder, Composite, Op, Tensor};
use crate::shape::Shape;

use super::super::DoubledConvolution;
use super::{Claims, Result};

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
        let found = self.convolution_of_image(i)?;
        let doubled = self.node(found.image);
        let Op::Composite {
            kind: Composite::UpsampleNearest2x,
            ..
        } = &doubled.op
        else {
            return None;
        };
        let x = *doubled.operands.first()?;
        let &[_, height, width, _] = &self.node(x).shape.dims[..] else {
            return None;
        };
        let kernel = DoubledConvolution {
            height,
            width,
            features: self.features,
        };
        kernel.columns(found.inputs, found.outputs)?;
        Some(Found {
            kernel,
            contraction: i,
            x,
            weights: found.weights,
            bias: None,
            shape: self.graph.nodes[i].shape.clone(),
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
    let added = added(b, added(b, wide, 2, &ADDED)?, 3, &ADDED)?;
    let x = b.convert(added, b.dtype(weights))?;
    let x = b.transpose(x, &[2, 3, 0, 1])?;
    let products = ADDED.len() * ADDED.len();
    let x = b.reshape(x, &[products, outputs / block, block, inputs])?;
    let x = b.transpose(x, &[1, 0, 2, 3])?;
    b.reshape(x, &[1, products * outputs, inputs])
}
