//! Convolution and resampling of images `[batch, height, width, channels]`.

use crate::dtype::DType;
use crate::graph::{Builder, ConvDims, ConvLayout, Tensor};
use crate::shape::Shape;

use super::linear::{add_bias, uniform_fan_in};
use super::{Precision, Result, dims};

/// Attributes of [`conv2d`].
#[derive(Clone, Copy, Debug)]
pub struct Conv2d {
    pub out_channels: usize,
    /// Height and width of the square kernel.
    pub kernel: usize,
    pub stride: usize,
    /// Low and high padding of height and of width.
    pub padding: (i64, i64),
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
        }
    }
}

/// Convolves an image with `weight` `[out, in, kernel, kernel]` and adds `bias` `[out]`.
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
    } = layer;
    let init = uniform_fan_in(in_channels * kernel * kernel);
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
    let y = b.convolution(
        x,
        weight,
        ConvDims {
            lhs: ConvLayout::channels_last(2),
            rhs: ConvLayout::channels_first(2),
            out: ConvLayout::channels_last(2),
            strides: vec![stride; 2],
            padding: vec![padding; 2],
            lhs_dilation: vec![1; 2],
            rhs_dilation: vec![1; 2],
            feature_groups: 1,
            batch_groups: 1,
        },
        DType::F32,
    )?;
    let y = add_bias(b, y, out_channels, init, precision)?;
    b.convert(y, precision.activations)
}

/// Doubles height and width by repeating every pixel.
///
/// # Errors
/// When `x` is not of rank 4.
pub fn upsample_nearest_2x(b: &Builder, x: Tensor) -> Result<Tensor> {
    let [n, h, w, c] = dims(b, "upsample", x)?;
    let repeated = b.broadcast_in_dim(x, &[0, 1, 3, 5], &[n, h, 2, w, 2, c])?;
    b.reshape(repeated, &[n, 2 * h, 2 * w, c])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::tests::{input, weights};

    #[test]
    fn same_padding_keeps_the_size_and_stride_2_halves_it() {
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
        let down = Conv2d {
            stride: 2,
            ..Conv2d::same(5, 3)
        };
        let y = conv2d(&b.root("m").scope("down"), y, down, Precision::F32).unwrap();
        assert_eq!(b.dims(y), [2, 4, 3, 5]);
        assert_eq!(
            weights(&b)[0],
            ("m/same.weight".to_string(), vec![4, 3, 3, 3])
        );
        let y = upsample_nearest_2x(&b, y).unwrap();
        assert_eq!(b.dims(y), [2, 8, 6, 5]);
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
