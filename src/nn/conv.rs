//! Convolution and resampling of images `[batch, height, width, channels]`.

use crate::dtype::DType;
use crate::graph::{Builder, Composite, ConvDims, Init, Tensor};
use crate::shape::Shape;

use super::linear::{add_bias, uniform_fan_in};
use super::{Precision, Result, constrain_image, dims};

/// Attributes of [`conv2d`].
#[derive(Clone, Copy, Debug)]
pub struct Conv2d {
    pub out_channels: usize,
    /// Height and width of the square kernel.
    pub kernel: usize,
    pub stride: usize,
    /// Low and high padding of height and of width.
    pub padding: (i64, i64),
    pub bias: bool,
    /// The initial distribution of weight and bias; `None` is PyTorch's: both uniform with bound 1/sqrt(fan_in).
    pub init: Option<Init>,
}

impl Conv2d {
    /// Stride 1, padded so that an odd kernel keeps height and width.
    pub fn same(out_channels: usize, kernel: usize) -> Self {
        let padding = (kernel.saturating_sub(1) / 2) as i64;
        Conv2d {
            out_channels,
            kernel,
            stride: 1,
            padding: (padding, padding),
            bias: true,
            init: None,
        }
    }

    pub fn without_bias(self) -> Self {
        Conv2d {
            bias: false,
            ..self
        }
    }

    pub fn with_init(self, init: Init) -> Self {
        Conv2d {
            init: Some(init),
            ..self
        }
    }
}

/// Convolves an image with `weight` `[out, in, kernel, kernel]` and adds `bias` `[out]`, if the layer has one.
///
/// # Errors
/// When `x` is not of rank 4, is smaller than the kernel, or the weights were declared with other shapes.
pub fn conv2d(b: &Builder, x: Tensor, layer: Conv2d, precision: Precision) -> Result<Tensor> {
    let [_, _, _, in_channels] = dims(b, "conv2d", x)?;
    let Conv2d {
        out_channels,
        kernel,
        stride,
        padding,
        bias,
        init,
    } = layer;
    let init = init.unwrap_or(uniform_fan_in(in_channels * kernel * kernel));
    let weight = b.param(
        "weight",
        Shape::new(
            precision.weights,
            [out_channels, in_channels, kernel, kernel],
        ),
        init,
        &[
            Some("conv_out"),
            Some("conv_in"),
            Some("keep_1"),
            Some("keep_2"),
        ],
    )?;
    let x = b.convert(x, precision.activations)?;
    let weight = b.convert(weight, precision.activations)?;
    let y = b.convolution(x, weight, ConvDims::of_image(stride, padding), DType::F32)?;
    let y = match bias {
        true => add_bias(b, y, out_channels, init, precision)?,
        false => y,
    };
    b.convert(y, precision.activations)
}

/// Halves height and width by the 3x3 convolution `conv`: diffusers' `Downsample2D`.
///
/// `padding` is above and on the left; below and on the right it is 1, which keeps the halving of even sizes exact.
///
/// # Errors
/// As for [`conv2d`].
pub fn downsample_2x(b: &Builder, x: Tensor, padding: i64, precision: Precision) -> Result<Tensor> {
    let [_, _, _, channels] = dims(b, "downsample", x)?;
    let conv = Conv2d {
        stride: 2,
        padding: (padding, 1),
        ..Conv2d::same(channels, 3)
    };
    let b = b.scope("conv");
    let y = conv2d(&b, x, conv, precision)?;
    constrain_image(&b, y)
}

/// Doubles height and width by repeating every pixel, then applies the 3x3 convolution `conv`: diffusers'
/// `Upsample2D`.
///
/// `size` is the height and width to have after doubling, one less than double where an odd size was halved: the last
/// row or column is then left out, which is what nearest interpolation to that size gives.
///
/// # Errors
/// When `size` is larger than double, and as for [`conv2d`].
pub fn upsample_2x(
    b: &Builder,
    x: Tensor,
    size: [usize; 2],
    precision: Precision,
) -> Result<Tensor> {
    let mut doubled = upsample_nearest_2x(b, x)?;
    let channels = b.dims(doubled)[3];
    for (dim, size) in [(1, size[0]), (2, size[1])] {
        if b.dims(doubled)[dim] != size {
            doubled = b.slice_dim(doubled, dim, 0, size)?;
        }
    }
    let b = b.scope("conv");
    let y = conv2d(&b, doubled, Conv2d::same(channels, 3), precision)?;
    constrain_image(&b, y)
}

/// Repeats every pixel of an image `[batch, height, width, channels]` twice in both directions.
///
/// # Errors
/// When `x` is not of rank 4.
pub fn upsample_nearest_2x(b: &Builder, x: Tensor) -> Result<Tensor> {
    let [n, h, w, c] = dims(b, "upsample", x)?;
    b.composite(Composite::UpsampleNearest2x, &[x], |b, operands| {
        let repeated = b.broadcast_in_dim(operands[0], &[0, 1, 3, 5], &[n, h, 2, w, 2, c])?;
        b.reshape(repeated, &[n, 2 * h, 2 * w, c])
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::tests::{input, weights};

    #[test]
    fn same_padding_keeps_the_size_and_resampling_halves_and_doubles_it() {
        let b = Builder::new();
        let x = input(&b, "x", &[2, 8, 6, 3]);
        let y = conv2d(
            &b.root("m").scope("same"),
            x,
            Conv2d::same(4, 3),
            Precision::F32,
        )
        .unwrap();
        assert_eq!(b.dims(y), [2, 8, 6, 4]);
        for padding in [0, 1] {
            let y = downsample_2x(&b.root("m").scope(0), y, padding, Precision::F32).unwrap();
            assert_eq!(b.dims(y), [2, 4, 3, 4]);
        }
        let doubled = upsample_2x(&b.root("m").scope(1), y, [16, 12], Precision::F32).unwrap();
        assert_eq!(b.dims(doubled), [2, 16, 12, 4]);
        let odd = upsample_2x(&b.root("m").scope(1), y, [15, 11], Precision::F32).unwrap();
        assert_eq!(b.dims(odd), [2, 15, 11, 4]);
        assert!(upsample_2x(&b.root("m").scope(1), y, [17, 12], Precision::F32).is_err());
        let weights: Vec<String> = weights(&b).into_iter().map(|(name, _)| name).collect();
        assert_eq!(weights[0], "m/same.weight");
        assert_eq!(weights[2], "m/0.conv.weight");
        assert_eq!(weights[4], "m/1.conv.weight");
    }

    #[test]
    fn a_sequence_is_not_an_image() {
        let b = Builder::new();
        let x = input(&b, "x", &[2, 8, 6]);
        let error = conv2d(
            &b.root("unet").scope("conv_in"),
            x,
            Conv2d::same(4, 3),
            Precision::F32,
        )
        .unwrap_err();
        assert_eq!(
            error.to_string(),
            "unet/conv_in: conv2d: expected rank 4, found sizes [2, 8, 6]"
        );
    }
}
