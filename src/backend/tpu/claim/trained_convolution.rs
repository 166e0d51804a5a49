//! Convolutions of training steps, and their derivatives.

use std::collections::HashMap;
use std::sync::Arc;

use crate::backend::follow;
use crate::backend::rounding::Rounded;
use crate::dtype::DType;
use crate::graph::patches::ordered;
use crate::graph::{Builder, Composite, Contraction, ConvDims, Graph, Op, Reduction, Tensor};
use crate::shape::Shape;

use super::super::mosaic::LANES;
use super::super::{Added, Arithmetic, Convolution, ConvolutionGradient, Features, Weights};
use super::convolution::inverse_scale;
use super::{Result, is_split, pad_to};

/// Places of a kernel.
const PLACES: usize = 9;

/// Whether kernels are faster than products of patches: where one part of the batch has all images, and for images that have as many
/// places as features, or more. Milliseconds in bf16 of a convolution of 1,280 features and its derivatives, simulated on a v5e, in
/// kernels and by the compiler, which copies each image nine times: 0.27 and 0.57 for 16x32 places, 0.51 and 0.73 for 32x32. Pods
/// gain less, and SDXL's step for them takes a quarter longer to compile with kernels for 32x32 places.
fn pays(places: usize, [inputs, outputs]: [usize; 2], parts: usize, narrowest: usize) -> bool {
    inputs.min(outputs) >= narrowest && (parts == 1 || places >= inputs.max(outputs))
}

/// The convolution of an image, or the derivative of one, with the bias behind it. Numbers are nodes.
pub(super) struct Image<'a> {
    kernel: Convolution,
    /// Before it is rounded.
    x: u32,
    /// The scales of images and of outputs, in int8.
    scales: Option<[u32; 2]>,
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
        let rows = [batch, 1, outputs];
        let row = |id: u32, dim: usize| {
            let wide = b.convert(copies[id as usize], DType::F32)?;
            b.broadcast_in_dim(wide, &[dim], &rows)
        };
        let mut of_columns = match self.bias {
            Some(bias) => row(bias, 2)?,
            None => b.full(&Shape::new(DType::F32, rows), 0.0)?,
        };
        let mut operands = vec![x; 3];
        operands.extend([weights; PLACES]);
        if let Some([of_images, of_outputs]) = self.scales {
            let inverse = inverse_scale(b, copies[of_images as usize])?;
            operands.push(b.broadcast_in_dim(inverse, &[0], &[batch, 1, inputs])?);
            let rows = [row(of_images, 0)?, row(of_outputs, 2)?, of_columns];
            of_columns = b.concatenate(&rows, 1)?;
        }
        operands.push(of_columns);
        let call = Op::CustomCall(Arc::new(self.kernel));
        let y = b.push(call, &operands)?;
        b.reshape(y, &self.shape.dims)
    }
}

/// The convolutions of images and of their derivatives that pay ([`pays`]), by the node whose value the kernel gives; in int8, if the
/// chip multiplies that, all: the compiler moves the integers of nine patches, the kernel rounds inside.
pub(super) fn images<'a>(
    graph: &'a Graph,
    users: &[Vec<Option<usize>>],
    features: Features,
    parts: usize,
    narrowest: usize,
) -> HashMap<usize, Image<'a>> {
    let nodes = 0..graph.nodes.len();
    let live = nodes.filter(|i| !users[*i].is_empty());
    let found = live.filter_map(|i| {
        let followed = follow::bias_and_rounding(graph, users, i);
        let image = image(graph, i, &followed, features, parts, narrowest)?;
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
    features: Features,
    parts: usize,
    narrowest: usize,
) -> Option<Image<'a>> {
    let node = &graph.nodes[i];
    let (dims, x, kernel, scales) = match (&node.op, &node.operands[..]) {
        (Op::Convolution { dims, .. }, &[x, kernel]) => (&**dims, x, kernel, None),
        (
            Op::Composite {
                kind:
                    Composite::ScaledContraction {
                        contraction: Contraction::Convolution(dims),
                        lhs_scale: true,
                        rhs_scale: true,
                    },
                ..
            },
            &[x, kernel, of_image, of_outputs],
        ) if features.int8 => {
            let image = Rounded::to(graph, x, of_image, &[0])?;
            image.noise.is_none().then_some(())?;
            (&**dims, image.x, kernel, Some([of_image, of_outputs]))
        }
        _ => return None,
    };
    let arithmetic = match scales {
        None => Arithmetic::Bf16,
        Some(_) => Arithmetic::Int8,
    };
    let shapes = [x, kernel].map(|id| &graph.nodes[id as usize].shape);
    let [image, of_kernel] = shapes;
    let result = &graph.nodes[followed.root].shape;
    let takes = [image, result].iter().all(|of| of.dtype == DType::BF16)
        && of_kernel.dtype == arithmetic.operand()
        && of_kernel.dims[2..] == [3, 3];
    let (weights, layout) = weights(graph, dims, kernel).filter(|_| takes)?;
    let [height, width, inputs] = [1, 2, 3].map(|d| image.dims[d]);
    let outputs = result.dims[3];
    let kernel = Convolution {
        arithmetic,
        height,
        width,
        side: 3,
        weights: layout,
        added: Added::Nothing,
        features,
    };
    let found = Image {
        kernel,
        x,
        scales,
        weights,
        bias: followed.bias,
        shape: result,
    };
    let takes = match scales {
        None => pays(height * width, [inputs, outputs], parts, narrowest),
        Some(_) => inputs.min(outputs) >= narrowest,
    };
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

/// A convolution that may be the derivative of a kernel.
pub(super) struct OfKernel<'a> {
    pub dims: &'a ConvDims,
    pub result: &'a Shape,
    /// Whether only the result's rounding to bf16 reads it.
    pub is_rounded: bool,
}

/// The kernel's call for the derivative of a kernel; `None` for other convolutions, and where the kernel does not take it.
pub(super) fn gradient_of_kernel(
    b: &Builder,
    [image, gradient]: [Tensor; 2],
    OfKernel {
        dims,
        result,
        is_rounded,
    }: OfKernel<'_>,
    features: Features,
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
        result: match is_rounded {
            true => DType::BF16,
            false => result.dtype,
        },
        features,
    };
    let takes = *dims == derivative
        && result.dims[2..] == [3, 3]
        && [x.dtype, dy.dtype] == [DType::BF16; 2]
        && [DType::BF16, DType::F32].contains(&call.result)
        && is_split(&x, parts)
        && pays(height * width, [inputs, outputs], parts, narrowest);
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
    let gradient = ordered(b, places, &[2, 3, 0, 1])?;
    b.convert(gradient, result.dtype).map(Some)
}
