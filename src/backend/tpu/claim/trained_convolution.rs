//! Convolutions of training steps, and their derivatives.

use std::collections::HashMap;
use std::sync::Arc;

use crate::backend::follow;
use crate::dtype::DType;
use crate::graph::patches::ordered;
use crate::graph::{Builder, ConvDims, Graph, Op, Reduction, Tensor};
use crate::shape::Shape;

use super::super::mosaic::LANES;
use super::super::{Added, Arithmetic, Convolution, ConvolutionGradient, Weights};
use super::{Result, is_split, pad_to};

/// Places of a kernel.
const PLACES: usize = 9;

/// Whether kernels are faster than products of patches: for images that have as many places as features, or more. Milliseconds
/// of a convolution and its derivatives, simulated on a v5e, in kernels and by the compiler: 0.08 and 0.18 for 32x32 places and
/// 320 features, 0.24 and 0.30 for 640, 0.92 and 0.74 for 1,280, and 1.08 and 1.82 for 64x64 places, 1,280 features and 640.
fn is_wide(places: usize, [inputs, outputs]: [usize; 2], narrowest: usize) -> bool {
    inputs.min(outputs) >= narrowest && places >= inputs.max(outputs)
}

/// The convolution of an image, or the derivative of one, with the bias behind it. Numbers are nodes.
pub(super) struct Image<'a> {
    kernel: Convolution,
    x: u32,
    /// `[outputs, inputs, 3, 3]` of the convolution, which the derivative reads in reverse.
    weights: u32,
    bias: Option<u32>,
    /// Of the result.
    shape: &'a Shape,
}

impl Image<'_> {
    pub(super) fn call(&self, b: &Builder, copies: &[Tensor]) -> Result<Tensor> {
        let x = copies[self.x as usize];
        let Convolution { height, width, .. } = self.kernel;
        let [batch, inputs] = [0, 3].map(|d| b.dims(x)[d]);
        let outputs = self.shape.dims[3];
        let x = b.reshape(x, &[batch, height * width, inputs])?;
        let weights = b.transpose(copies[self.weights as usize], &[2, 3, 0, 1])?;
        let sizes = b.dims(weights);
        let weights = b.reshape(weights, &[1, PLACES * sizes[2], sizes[3]])?;
        let biases = [batch, 1, outputs];
        let biases = match self.bias {
            Some(bias) => {
                let bias = b.convert(copies[bias as usize], DType::F32)?;
                b.broadcast_in_dim(bias, &[2], &biases)?
            }
            None => b.full(&Shape::new(DType::F32, biases), 0.0)?,
        };
        let call = Op::CustomCall(Arc::new(self.kernel));
        let mut operands = vec![x; 3];
        operands.extend([weights; PLACES]);
        operands.push(biases);
        let y = b.push(call, &operands)?;
        b.reshape(y, &self.shape.dims)
    }
}

/// The convolutions of wide images ([`is_wide`]), and the derivatives of such images, by the node whose value the kernel gives.
pub(super) fn images<'a>(
    graph: &'a Graph,
    users: &[Vec<Option<usize>>],
    parts: usize,
    narrowest: usize,
) -> HashMap<usize, Image<'a>> {
    let nodes = 0..graph.nodes.len();
    let live = nodes.filter(|i| !users[*i].is_empty());
    let found = live.filter_map(|i| {
        let followed = follow::bias_and_rounding(graph, users, i);
        let image = image(graph, i, &followed, narrowest)?;
        let is_split = is_split(image.shape, parts);
        is_split.then_some((followed.root, image))
    });
    found.collect()
}

/// Node `i` with what follows it as a convolution that the kernel takes.
fn image<'a>(
    graph: &'a Graph,
    i: usize,
    followed: &follow::Followed,
    narrowest: usize,
) -> Option<Image<'a>> {
    let node = &graph.nodes[i];
    let (Op::Convolution { dims, .. }, &[x, kernel]) = (&node.op, &node.operands[..]) else {
        return None;
    };
    let shapes = [x, kernel].map(|id| graph.nodes[id as usize].shape.clone());
    let [image, of_kernel] = &shapes;
    let result = &graph.nodes[followed.root].shape;
    let mut all = [image, of_kernel, result].into_iter();
    let takes = all.all(|shape| shape.dtype == DType::BF16) && of_kernel.dims[2..] == [3, 3];
    let (weights, layout) = weights(graph, dims, kernel).filter(|_| takes)?;
    let [height, width, inputs] = [1, 2, 3].map(|d| image.dims[d]);
    let outputs = result.dims[3];
    let kernel = Convolution {
        arithmetic: Arithmetic::Bf16,
        height,
        width,
        side: 3,
        weights: layout,
        added: Added::Nothing,
    };
    let found = Image {
        kernel,
        x,
        weights,
        bias: followed.bias,
        shape: result,
    };
    let takes = is_wide(height * width, [inputs, outputs], narrowest);
    (takes && kernel.fits(inputs, outputs)).then_some(found)
}

/// The weights of a convolution that keeps its image's size, and how it reads them.
fn weights(graph: &Graph, dims: &ConvDims, kernel: u32) -> Option<(u32, Weights)> {
    let forward = ConvDims::of_image(1, (1, 1));
    let derivative = ConvDims {
        rhs: forward.rhs.swapped(),
        ..forward.clone()
    };
    let node = &graph.nodes[kernel as usize];
    match &node.op {
        _ if *dims == forward => Some((kernel, Weights::Places)),
        Op::Reverse(reversed) if *dims == derivative && reversed[..] == [2, 3] => {
            Some((node.operands[0], Weights::Reversed))
        }
        _ => None,
    }
}

/// The kernel's call for the derivative of a kernel; `None` for other convolutions, and where the kernel does not take it.
pub(super) fn gradient_of_kernel(
    b: &Builder,
    [image, gradient]: [Tensor; 2],
    dims: &ConvDims,
    result: &Shape,
    parts: usize,
    narrowest: usize,
) -> Result<Option<Tensor>> {
    let of_image = ConvDims::of_image(1, (1, 1));
    let derivative = ConvDims {
        lhs: of_image.lhs.swapped(),
        rhs: of_image.out.swapped(),
        out: of_image.rhs.swapped(),
        ..of_image
    };
    let [x, dy] = [image, gradient].map(|operand| b.shape(operand));
    let (&[batch, height, width, inputs], &[_, _, _, outputs]) = (&x.dims[..], &dy.dims[..]) else {
        return Ok(None);
    };
    let call = ConvolutionGradient {
        height,
        width,
        images: batch / parts,
        result: result.dtype,
    };
    let takes = *dims == derivative
        && result.dims[2..] == [3, 3]
        && [x.dtype, dy.dtype] == [DType::BF16; 2]
        && [DType::BF16, DType::F32].contains(&call.result)
        && is_split(&x, parts)
        && is_wide(height * width, [inputs, outputs], narrowest);
    if !takes {
        return Ok(None);
    }
    // Inputs that fill no register are one block, which may be too large.
    let columns = [inputs, inputs.next_multiple_of(LANES)];
    let mut columns = columns
        .into_iter()
        .filter(|columns| call.fits(*columns, outputs));
    let Some(columns) = columns.next() else {
        return Ok(None);
    };
    let pixels = call.images * height * width;
    let x = b.reshape(image, &[parts, pixels, inputs])?;
    let x = pad_to(b, x, &[parts, pixels, columns])?;
    let dy = b.reshape(gradient, &[parts, pixels, outputs])?;
    let dy = b.transpose(dy, &[0, 2, 1])?;
    let sums = b.push(Op::CustomCall(Arc::new(call)), &[x, x, x, dy])?;
    let sum = match parts {
        1 => sums,
        _ => b.reduce(Reduction::Sum, sums, &[0])?,
    };
    let mut places = b.reshape(sum, &[3, 3, outputs, columns])?;
    if columns != inputs {
        places = b.slice_dim(places, 3, 0, inputs)?;
    }
    ordered(b, places, &[2, 3, 0, 1]).map(Some)
}
