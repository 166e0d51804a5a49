//! What the kernels compute of images `[batch, height, width, channels]`: ranges, upsampling.

use std::sync::Arc;

use crate::dtype::DType;
use crate::graph::{Builder, Composite, Graph, Node, Op, Reduction, Tensor, TensorFormat};
use crate::quant::scale_of;

use super::super::{OfChannels, SideBySide, Upsample};
use super::{Result, is_split};

/// The scales of the images `x` in `format`; `None` where no kernel finds their largest magnitudes.
pub(super) fn scale_of_images(
    b: &Builder,
    x: Tensor,
    format: TensorFormat,
) -> Result<Option<Tensor>> {
    let Some(dims) = of_bf16(b, x) else {
        return Ok(None);
    };
    let Some(highest) = of_channels(b, x, dims, OfChannels::AbsMax)? else {
        return Ok(None);
    };
    let highest = b.reduce(Reduction::Max, highest, &[1, 2])?;
    let highest = b.convert(highest, DType::BF16)?;
    scale_of(b, highest, format).map(Some)
}

/// The image `x` with every pixel twice in both directions; `None` where the kernel does not take it.
pub(super) fn upsample(b: &Builder, x: Tensor) -> Result<Option<Tensor>> {
    let Some([batch, height, width, channels]) = of_bf16(b, x) else {
        return Ok(None);
    };
    let kernel = Upsample {
        width,
        derivative: false,
    };
    if !kernel.fits(channels) || height == 0 {
        return Ok(None);
    }
    let dims = [batch, 2 * height, 2 * width, channels];
    upsampled(b, kernel, x, &dims).map(Some)
}

/// What the kernel makes of an image, of the dimensions `dims`.
fn upsampled(b: &Builder, kernel: Upsample, x: Tensor, dims: &[usize]) -> Result<Tensor> {
    let y = b.push(Op::CustomCall(Arc::new(kernel)), &[pixels(b, x)?])?;
    b.reshape(y, dims)
}

/// Whether [`super::claim_training`] may take a composite: the upsampling of an image in bf16 whose rows make whole tiles, and its
/// derivative.
pub(super) fn is_upsampling(kind: &Composite, body: &Graph) -> bool {
    let Some(x) = body.inputs.first().map(|input| &input.shape) else {
        return false;
    };
    let &[_, height, width, channels] = &x.dims[..] else {
        return false;
    };
    let fits = [false, true].map(|derivative| Upsample { width, derivative }.fits(channels));
    matches!(kind.layer().0, Composite::UpsampleNearest2x)
        && x.dtype == DType::BF16
        && height > 0
        && fits == [true; 2]
}

/// The kernel of what [`is_upsampling`] says yes to, where the devices compute `parts` parts of the batch; `None` where there is none.
pub(super) fn upsampling(
    b: &Builder,
    node: &Node,
    kind: &Composite,
    copies: &[Tensor],
    parts: usize,
) -> Result<Option<Tensor>> {
    // The image, or of the derivative the gradient of the doubled one.
    let x = node.operands.last().map(|id| copies[*id as usize]);
    let Some(x) = x.filter(|_| is_split(&node.shape, parts)) else {
        return Ok(None);
    };
    if kind.layer().1.is_none() {
        return upsample(b, x);
    }
    let kernel = Upsample {
        width: node.shape.dims[2],
        derivative: true,
    };
    upsampled(b, kernel, x, &node.shape.dims).map(Some)
}

/// The images `a` and `c` along dimension `dim`; `None` where the kernel does not take them: channels alone, the first of
/// which fill registers.
pub(super) fn concatenate(b: &Builder, images: [Tensor; 2], dim: usize) -> Result<Option<Tensor>> {
    let [Some(first), Some(second)] = images.map(|x| of_bf16(b, x)) else {
        return Ok(None);
    };
    let [batch, height, width, channels] = first;
    if dim != 3 || !SideBySide::fits(height * width, [channels, second[3]]) {
        return Ok(None);
    }
    let operands = [pixels(b, images[0])?, pixels(b, images[1])?];
    let y = b.push(Op::CustomCall(Arc::new(SideBySide)), &operands)?;
    b.reshape(y, &[batch, height, width, channels + second[3]])
        .map(Some)
}

/// The dimensions of an image of bf16.
pub(super) fn of_bf16(b: &Builder, x: Tensor) -> Option<[usize; 4]> {
    let shape = b.shape(x);
    let dims: [usize; 4] = shape.dims[..].try_into().ok()?;
    (shape.dtype == DType::BF16).then_some(dims)
}

pub(super) fn of_channels(
    b: &Builder,
    x: Tensor,
    [_, height, width, channels]: [usize; 4],
    found: OfChannels,
) -> Result<Option<Tensor>> {
    if !OfChannels::fits(height * width, channels) {
        return Ok(None);
    }
    b.push(Op::CustomCall(Arc::new(found)), &[pixels(b, x)?])
        .map(Some)
}

/// An image as rows of channels.
pub(super) fn pixels(b: &Builder, x: Tensor) -> Result<Tensor> {
    let [batch, height, width, channels] = [0, 1, 2, 3].map(|d| b.dims(x)[d]);
    b.reshape(x, &[batch, height * width, channels])
}
