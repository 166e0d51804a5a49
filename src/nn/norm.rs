//! Normalizations, with `f32` statistics.

use crate::dtype::DType;
use crate::graph::{Builder, Composite, Init, Reduction, Tensor};
use crate::shape::Shape;

use super::{Activation, Precision, Result, dims};

/// Attributes of [`group_norm`].
#[derive(Clone, Copy, Debug)]
pub struct GroupNorm {
    /// Groups of neighbouring channels that are normalized together.
    pub groups: usize,
    pub epsilon: f64,
    /// The operation after the norm.
    pub activation: Option<Activation>,
}

/// Normalizes each group of channels of an image `[batch, height, width, channels]` over its channels and pixels, then
/// applies `weight` and `bias`, both `[channels]`, and the activation.
///
/// Sums are taken per channel first and per group after, on `[batch, channels]`; the image itself is read by one
/// pass of reductions and one of `x * scale + shift`, in the derivative too. The variance is `E[x^2] - E[x]^2`.
///
/// # Errors
/// When `x` is not of rank 4, or `groups` does not divide the channels.
pub fn group_norm(
    b: &Builder,
    x: Tensor,
    layer: GroupNorm,
    precision: Precision,
) -> Result<Tensor> {
    let GroupNorm {
        groups,
        epsilon,
        activation,
    } = layer;
    let [_, _, _, c] = dims(b, "group_norm", x)?;
    if groups == 0 || !c.is_multiple_of(groups) {
        return Err(b.invalid(format!(
            "group_norm: {groups} groups do not divide {c} channels"
        )));
    }
    let (weight, bias) = affine(b, c, precision)?;
    let silu = activation == Some(Activation::Silu);
    let kind = Composite::GroupNorm {
        groups,
        epsilon,
        silu,
    };
    let y = b.composite(kind, &[x, weight, bias], |b, operands| {
        let y = normalize_groups(b, operands, groups, epsilon)?;
        let y = b.convert(y, precision.activations)?;
        if silu {
            Activation::Silu.apply(b, y)
        } else {
            Ok(y)
        }
    })?;
    match activation {
        None | Some(Activation::Silu) => Ok(y),
        Some(other) => other.apply(b, y),
    }
}

/// The norm of `[x, weight, bias]` in `f32`.
fn normalize_groups(
    b: &Builder,
    operands: &[Tensor],
    groups: usize,
    epsilon: f64,
) -> Result<Tensor> {
    let &[x, weight, bias] = operands else {
        return Err(b.invalid("group_norm: takes an image, a weight and a bias"));
    };
    let image: [usize; 4] = dims(b, "group_norm", x)?;
    let [n, h, w, c] = image;
    let size = c / groups;
    let x = b.convert(x, DType::F32)?;
    let squares = b.square(x)?;
    let group_mean = |values: Tensor| -> Result<Tensor> {
        let per_channel = b.sum(values, &[1, 2])?;
        let grouped = b.reshape(per_channel, &[n, groups, size])?;
        let per_group = b.sum(grouped, &[2])?;
        b.mul_scalar(per_group, 1.0 / (h * w * size) as f64)
    };
    let mean = group_mean(x)?;
    let mean_of_squares = group_mean(squares)?;
    let inverse = inverse_deviation(b, mean, mean_of_squares, epsilon)?;

    let per_channel = |values: Tensor| -> Result<Tensor> {
        let spread = b.broadcast_in_dim(values, &[0, 1], &[n, groups, size])?;
        b.reshape(spread, &[n, c])
    };
    let inverse = per_channel(inverse)?;
    let mean = per_channel(mean)?;
    let scale = b.mul(inverse, weight)?;
    let offset = b.mul(mean, scale)?;
    let shift = b.sub(bias, offset)?;

    let scale = b.broadcast_in_dim(scale, &[0, 3], &image)?;
    let shift = b.broadcast_in_dim(shift, &[0, 3], &image)?;
    let y = b.mul(x, scale)?;
    b.add(y, shift)
}

/// Normalizes over the last dimension, then applies `weight` and `bias`, both `[features]`.
///
/// # Errors
/// When `x` is a scalar.
pub fn layer_norm(b: &Builder, x: Tensor, epsilon: f64, precision: Precision) -> Result<Tensor> {
    let features = features(b, "layer_norm", x)?;
    let weights = affine(b, features, precision)?;
    normalize(b, x, weights, epsilon, precision)
}

/// Normalizes over the last dimension, without weights.
///
/// # Errors
/// When `x` is a scalar.
pub fn plain_layer_norm(
    b: &Builder,
    x: Tensor,
    epsilon: f64,
    precision: Precision,
) -> Result<Tensor> {
    let shape = Shape::new(DType::F32, [features(b, "layer_norm", x)?]);
    let weights = (b.full(&shape, 1.0)?, b.full(&shape, 0.0)?);
    normalize(b, x, weights, epsilon, precision)
}

fn normalize(
    b: &Builder,
    x: Tensor,
    (weight, bias): (Tensor, Tensor),
    epsilon: f64,
    precision: Precision,
) -> Result<Tensor> {
    let kind = Composite::LayerNorm { epsilon };
    b.composite(kind, &[x, weight, bias], |b, operands| {
        let y = normalize_features(b, operands, epsilon)?;
        b.convert(y, precision.activations)
    })
}

/// Divides by the root of the mean square over the last dimension, then multiplies by `weight` `[features]` (Zhang and
/// Sennrich, 2019, arXiv:1910.07467). Computes in `f32`, whatever the type of `x`.
///
/// # Errors
/// When `x` is a scalar.
pub fn rms_norm(b: &Builder, x: Tensor, epsilon: f64, precision: Precision) -> Result<Tensor> {
    let features = features(b, "rms_norm", x)?;
    let shape = Shape::new(precision.weights, [features]);
    let weight = b.param("weight", shape, Init::Ones, &[Some("norm")])?;
    let weight = b.convert(weight, DType::F32)?;
    b.composite(
        Composite::RmsNorm { epsilon },
        &[x, weight],
        |b, operands| {
            let x = b.convert(operands[0], DType::F32)?;
            let last = b.dims(x).len() - 1;
            let sum = b.reduce_keep(Reduction::Sum, b.square(x)?, &[last])?;
            let mean = b.mul_scalar(sum, 1.0 / features as f64)?;
            let inverse = b.rsqrt(b.add_scalar(mean, epsilon)?)?;
            let y = b.mul(b.mul(x, inverse)?, operands[1])?;
            b.convert(y, precision.activations)
        },
    )
}

/// The size of the last dimension, which `layer` normalizes over.
fn features(b: &Builder, layer: &str, x: Tensor) -> Result<usize> {
    let last = b.dims(x).last().copied();
    last.ok_or_else(|| b.invalid(format!("{layer}: a scalar has no feature dimension")))
}

/// The norm of `[x, weight, bias]` in `f32`.
fn normalize_features(b: &Builder, operands: &[Tensor], epsilon: f64) -> Result<Tensor> {
    let &[x, weight, bias] = operands else {
        return Err(b.invalid("layer_norm: takes a tensor, a weight and a bias"));
    };
    let sizes = b.dims(x);
    let last = sizes.len() - 1;
    let x = b.convert(x, DType::F32)?;
    let squares = b.square(x)?;
    let mean_over_features = |values: Tensor| -> Result<Tensor> {
        let sum = b.sum(values, &[last])?;
        b.mul_scalar(sum, 1.0 / sizes[last] as f64)
    };
    let mean = mean_over_features(x)?;
    let mean_of_squares = mean_over_features(squares)?;
    let inverse = inverse_deviation(b, mean, mean_of_squares, epsilon)?;

    let rows: Vec<usize> = (0..last).collect();
    let mean = b.broadcast_in_dim(mean, &rows, &sizes)?;
    let inverse = b.broadcast_in_dim(inverse, &rows, &sizes)?;
    let y = b.sub(x, mean)?;
    let y = b.mul(y, inverse)?;
    let y = b.mul(y, weight)?;
    b.add(y, bias)
}

/// torch's `BatchNorm2d` in evaluation: normalizes each channel of an image `[batch, height, width, channels]` by the mean and
/// variance of training (`running_mean`, `running_var`), then applies `weight` and `bias`, all `[channels]`. In `f32`.
///
/// # Errors
/// When `x` is not of rank 4.
pub fn batch_norm(b: &Builder, x: Tensor, epsilon: f64, precision: Precision) -> Result<Tensor> {
    let [_, _, _, channels] = dims(b, "batch_norm", x)?;
    let (weight, bias) = affine(b, channels, precision)?;
    let statistic = |name: &str, init: Init| {
        let shape = Shape::new(precision.weights, [channels]);
        let x = b.param(name, shape, init, &[Some("norm")])?;
        b.convert(x, DType::F32)
    };
    let mean = statistic("running_mean", Init::Zeros)?;
    let variance = statistic("running_var", Init::Ones)?;
    let inverse = b.rsqrt(b.add_scalar(variance, epsilon)?)?;
    let scale = b.mul(inverse, weight)?;
    let shift = b.sub(bias, b.mul(mean, scale)?)?;
    let y = b.mul(b.convert(x, DType::F32)?, scale)?;
    b.convert(b.add(y, shift)?, precision.activations)
}

/// `weight` (ones) and `bias` (zeros) of this scope, as `f32`.
fn affine(b: &Builder, features: usize, precision: Precision) -> Result<(Tensor, Tensor)> {
    let shape = Shape::new(precision.weights, [features]);
    let weight = b.param("weight", shape.clone(), Init::Ones, &[Some("norm")])?;
    let bias = b.param("bias", shape, Init::Zeros, &[Some("norm")])?;
    Ok((b.convert(weight, DType::F32)?, b.convert(bias, DType::F32)?))
}

/// `1 / sqrt(variance + epsilon)`. Rounding can make `E[x^2] - E[x]^2` negative; it is taken as 0 then.
fn inverse_deviation(
    b: &Builder,
    mean: Tensor,
    mean_of_squares: Tensor,
    epsilon: f64,
) -> Result<Tensor> {
    let square_of_mean = b.square(mean)?;
    let variance = b.sub(mean_of_squares, square_of_mean)?;
    let zero = b.scalar(DType::F32, 0.0)?;
    let variance = b.max(variance, zero)?;
    let variance = b.add_scalar(variance, epsilon)?;
    b.rsqrt(variance)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::tests::{input, weights};

    fn of_groups(groups: usize) -> GroupNorm {
        GroupNorm {
            groups,
            epsilon: 1e-5,
            activation: None,
        }
    }

    #[test]
    fn groups_must_divide_channels() {
        let b = Builder::new();
        let x = input(&b, "x", &[1, 2, 2, 48]);
        let norm1 = b.root("unet").scope("norm1");
        let error = group_norm(&norm1, x, of_groups(32), Precision::F32).unwrap_err();
        assert_eq!(
            error.to_string(),
            "unet/norm1: group_norm: 32 groups do not divide 48 channels"
        );
    }

    #[test]
    fn norms_keep_the_shape_and_compute_in_f32() {
        let b = Builder::new();
        let precision = Precision {
            weights: DType::BF16,
            activations: DType::BF16,
        };
        let x = b
            .input("x", Shape::new(DType::BF16, [2, 4, 4, 8]), &[])
            .unwrap();
        let y = group_norm(&b.root("m").scope("a"), x, of_groups(4), precision).unwrap();
        let z = layer_norm(&b.root("m").scope("b"), y, 1e-5, precision).unwrap();
        assert_eq!(b.shape(z), b.shape(x));
        assert_eq!(weights(&b).len(), 4);
        b.output("z", z, None).unwrap();
        b.with_graph(|g| {
            let g = g.inline_composites(&|_, _| true);
            let reductions: Vec<_> = g.nodes.iter().filter(|n| n.op.name() == "reduce").collect();
            assert_eq!(reductions.len(), 6);
            assert!(reductions.iter().all(|n| n.shape.dtype == DType::F32));
        });
    }
}
