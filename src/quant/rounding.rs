//! How values become integers of a format, as operations of a graph: scales, rounding and zero points.
//! [`super::weight`] has the same on the host.

use crate::dtype::DType;
use crate::graph::scopes::RANGE_FINDING;
use crate::graph::{
    Binary, Builder, Comparison, Composite, GraphError, NumericsConvention, Range, Reduction,
    Rounding, Tensor, TensorFormat, Unary,
};

use super::weight::{NARROW_SMALLEST, QUARK_SMALLEST};

type Result<T> = std::result::Result<T, GraphError>;

/// Where stochastic rounding takes its noise from.
///
/// It gets a builder at the contraction's scope and the sizes of what is rounded, and gives `f32` of those sizes,
/// uniform in [-0.5, 0.5).
pub type NoiseSource<'a> = dyn FnMut(&Builder, &[usize]) -> Result<Tensor> + 'a;

/// The scale of `x` with one value for each index of `kept`, over all other dimensions, in the type of `x`.
///
/// Every line of `docs/quantization.md` is one operation here and rounds to `x`'s element type where it says so. Where
/// XLA would turn a division into a product with a reciprocal, the product is written: the graph then means the same
/// on the host and on every device.
pub(super) fn find_scale(
    b: &Builder,
    x: Tensor,
    kept: &[usize],
    format: TensorFormat,
) -> Result<Tensor> {
    let kind = Composite::FindScale {
        kept: kept.to_vec(),
        format,
    };
    b.composite(kind, &[x], |b, operands| {
        let x = operands[0];
        let shape = b.shape(x);
        let reduced: Vec<usize> = (0..shape.rank()).filter(|d| !kept.contains(d)).collect();
        let absmax = match format.range {
            Range::Dynamic => absmax(b, x, &reduced)?,
            Range::Static(bits) => {
                let sizes: Vec<usize> = kept.iter().map(|d| shape.dims[*d]).collect();
                b.full(&shape.with_dims(sizes), f64::from(f32::from_bits(bits)))?
            }
            Range::Stored(_) => {
                return Err(b.invalid("a scale that is stored with its weight is not found again"));
            }
        };
        scale_of(b, absmax, format)
    })
}

/// The largest magnitudes of `x` over these dimensions, in its type.
///
/// # Errors
/// When `x` has no such dimensions.
pub fn absmax(b: &Builder, x: Tensor, over: &[usize]) -> Result<Tensor> {
    let range = b.at(format!("{}/{RANGE_FINDING}", b.path()));
    range.reduce(Reduction::Max, range.abs(x)?, over)
}

/// The scale that belongs to the largest magnitudes `absmax`, in their type.
pub fn scale_of(b: &Builder, absmax: Tensor, format: TensorFormat) -> Result<Tensor> {
    let shape = b.shape(absmax);
    let one = b.full(&shape, 1.0)?;
    let absmax = match format.convention {
        NumericsConvention::Aqt => {
            let zero = b.full(&shape, 0.0)?;
            let empty = b.compare(Comparison::Eq, absmax, zero)?;
            b.select(empty, one, absmax)?
        }
        NumericsConvention::Qwix | NumericsConvention::Quark | NumericsConvention::Narrow => absmax,
        NumericsConvention::Gguf
        | NumericsConvention::Nf4
        | NumericsConvention::Mx
        | NumericsConvention::MxE2M3
        | NumericsConvention::MxE3M2
        | NumericsConvention::Nv => {
            return Err(on_host(b, format));
        }
    };
    let bound = format.bound();
    let scale = match format.convention {
        NumericsConvention::Aqt | NumericsConvention::Qwix => {
            b.mul_scalar(b.convert(absmax, DType::F32)?, 1.0 / bound)?
        }
        NumericsConvention::Quark | NumericsConvention::Narrow => divided(b, absmax, bound)?,
        NumericsConvention::Gguf
        | NumericsConvention::Nf4
        | NumericsConvention::Mx
        | NumericsConvention::MxE2M3
        | NumericsConvention::MxE3M2
        | NumericsConvention::Nv => {
            return Err(on_host(b, format));
        }
    };
    let scale = b.convert(scale, shape.dtype)?;
    match format.convention {
        NumericsConvention::Aqt => Ok(scale),
        NumericsConvention::Quark if format.element.is_float() => {
            let zero = b.compare(Comparison::Eq, scale, b.full(&shape, 0.0)?)?;
            b.select(zero, b.full(&shape, QUARK_SMALLEST)?, scale)
        }
        NumericsConvention::Quark => b.max(scale, b.full(&shape, QUARK_SMALLEST)?),
        NumericsConvention::Qwix => {
            // Qwix takes 1 where the scale is below the square root of the smallest normal number.
            let smallest = smallest_normal(shape.dtype).sqrt();
            let tiny = b.compare(Comparison::Lt, scale, b.full(&shape, smallest)?)?;
            b.select(tiny, one, scale)
        }
        NumericsConvention::Narrow => {
            let tiny = b.compare(Comparison::Lt, scale, b.full(&shape, NARROW_SMALLEST)?)?;
            b.select(tiny, one, scale)
        }
        NumericsConvention::Gguf
        | NumericsConvention::Nf4
        | NumericsConvention::Mx
        | NumericsConvention::MxE2M3
        | NumericsConvention::MxE3M2
        | NumericsConvention::Nv => Err(on_host(b, format)),
    }
}

/// The error of a convention whose weights are quantized on the host alone.
fn on_host(b: &Builder, format: TensorFormat) -> GraphError {
    b.invalid(format!(
        "weights in {}'s numerics are quantized by `maxdiff-rs quantize` alone: give it this mode, and run what it writes",
        format.convention
    ))
}

/// `x / divisor` rounded to `f32`, of `x` in `f32` or less. XLA makes a product of a division by a constant; in `f64` the
/// product with the reciprocal rounds to the same `f32`, because no such quotient is near a tie.
fn divided(b: &Builder, x: Tensor, divisor: f64) -> Result<Tensor> {
    let wide = b.mul_scalar(b.convert(x, DType::F64)?, 1.0 / divisor)?;
    b.convert(wide, DType::F32)
}

/// `x` as integers of `format`, by its scale along `kept`.
pub(super) fn quantize(
    b: &Builder,
    x: Tensor,
    scale: Tensor,
    kept: &[usize],
    format: TensorFormat,
    noise: &mut NoiseSource<'_>,
) -> Result<Tensor> {
    let kind = Composite::Quantize {
        kept: kept.to_vec(),
        format,
    };
    let mut operands = vec![x, scale];
    if format.rounding == Rounding::Stochastic {
        operands.push(noise(b, &b.dims(x))?);
    }
    b.composite(kind, &operands, |b, operands| {
        let mut scaled = scaled_values(b, operands[0], operands[1], kept, format)?;
        if let Some(noise) = operands.get(2) {
            let noisy = b.add(b.convert(scaled, DType::F32)?, *noise)?;
            scaled = b.convert(noisy, b.dtype(operands[0]))?;
        }
        rounded(b, scaled, format)
    })
}

/// `x / scale`, in the type of `x`, of AMD Quark's and of narrow integers in `f32`.
fn scaled_values(
    b: &Builder,
    x: Tensor,
    scale: Tensor,
    kept: &[usize],
    format: TensorFormat,
) -> Result<Tensor> {
    let shape = b.shape(x);
    let one = |t: Tensor| b.full(&b.shape(t), 1.0);
    match format.convention {
        NumericsConvention::Aqt => {
            let one = one(scale)?;
            let inverse = b.div(one, scale)?;
            let infinity = b.full(&b.shape(inverse), f64::INFINITY)?;
            let overflown = b.compare(Comparison::Eq, inverse, infinity)?;
            let inverse = b.select(overflown, one, inverse)?;
            b.mul(x, b.broadcast_in_dim(inverse, kept, &shape.dims)?)
        }
        // By the scale of an activation, which is stored, every step rounds: not so.
        NumericsConvention::Quark if format.element.is_float() && !format.has_stored_scale() => {
            b.convert(quotient(b, x, scale, kept)?, shape.dtype)
        }
        NumericsConvention::Narrow if !format.has_stored_scale() => quotient(b, x, scale, kept),
        NumericsConvention::Qwix | NumericsConvention::Quark | NumericsConvention::Narrow => {
            let wide = b.convert(scale, DType::F32)?;
            let inverse = b.div(one(wide)?, wide)?;
            let inverse = b.broadcast_in_dim(inverse, kept, &shape.dims)?;
            let scaled = b.mul(b.convert(x, DType::F32)?, inverse)?;
            let is_typed =
                format.convention == NumericsConvention::Qwix || format.element.is_float();
            match is_typed {
                true => b.convert(scaled, shape.dtype),
                false => Ok(scaled),
            }
        }
        NumericsConvention::Gguf
        | NumericsConvention::Nf4
        | NumericsConvention::Mx
        | NumericsConvention::MxE2M3
        | NumericsConvention::MxE3M2
        | NumericsConvention::Nv => Err(on_host(b, format)),
    }
}

/// `x / scale` rounded to `f32`, by its scale along `kept`. A quotient in `f64`, which XLA makes a product with the reciprocal,
/// rounds to the same `f32` as the division: none is near a tie.
fn quotient(b: &Builder, x: Tensor, scale: Tensor, kept: &[usize]) -> Result<Tensor> {
    let scale = b.convert(scale, DType::F64)?;
    let scale = b.broadcast_in_dim(scale, kept, &b.dims(x))?;
    let quotient = b.div(b.convert(x, DType::F64)?, scale)?;
    b.convert(quotient, DType::F32)
}

fn rounded(b: &Builder, scaled: Tensor, format: TensorFormat) -> Result<Tensor> {
    if format.element.is_float() {
        // XLA's conversion rounds to nearest, and gives NaN for what is beyond the largest number.
        let bound = format.bound();
        return b.convert(b.clamp(scaled, -bound, bound)?, format.element);
    }
    let [lowest, highest] = format.ends();
    let rounded = match format.convention {
        NumericsConvention::Aqt => {
            b.unary(Unary::RoundNearestEven, b.clamp(scaled, lowest, highest)?)?
        }
        NumericsConvention::Qwix | NumericsConvention::Quark | NumericsConvention::Narrow => {
            b.clamp(b.unary(Unary::RoundNearestEven, scaled)?, lowest, highest)?
        }
        NumericsConvention::Gguf
        | NumericsConvention::Nf4
        | NumericsConvention::Mx
        | NumericsConvention::MxE2M3
        | NumericsConvention::MxE3M2
        | NumericsConvention::Nv => {
            return Err(on_host(b, format));
        }
    };
    b.convert(rounded, format.element)
}

/// Scale and zero point of values between their lowest and highest: `scale = (highest - lowest) / (qmax - qmin)`, at
/// least 2^-23, in the type of the values, and `zero_point = clamp(qmin - round(lowest / scale))`, an int8, where zero is
/// always among the values (AMD Quark's asymmetric integers).
pub(super) struct Affine {
    pub scale: Tensor,
    pub zero_point: Tensor,
}

impl Affine {
    pub fn new(b: &Builder, x: Tensor, kept: &[usize], format: TensorFormat) -> Result<Affine> {
        if format.convention != NumericsConvention::Quark {
            return Err(b.invalid(format!(
                "{} has no zero points; take AMD Quark's numerics",
                format.convention
            )));
        }
        if format.range != Range::Dynamic {
            return Err(b.invalid(
                "a recorded largest magnitude gives no zero point; take a symmetric format, or a dynamic range",
            ));
        }
        let (qmin, qmax) = format.element.integer_range();
        let rank = b.dims(x).len();
        let reduced: Vec<usize> = (0..rank).filter(|d| !kept.contains(d)).collect();
        let range = &b.at(format!("{}/{RANGE_FINDING}", b.path()));
        let lowest = range.reduce(Reduction::Min, x, &reduced)?;
        let highest = range.reduce(Reduction::Max, x, &reduced)?;
        let shape = b.shape(lowest);
        let zero = b.full(&shape, 0.0)?;
        let lowest = b.binary(Binary::Min, lowest, zero)?;
        let highest = b.max(highest, zero)?;
        let scale = divided(b, b.sub(highest, lowest)?, qmax - qmin)?;
        let scale = b.convert(scale, shape.dtype)?;
        let scale = b.max(scale, b.full(&shape, QUARK_SMALLEST)?)?;
        let wide = |t: Tensor| b.convert(t, DType::F32);
        let quotient = b.div(wide(lowest)?, wide(scale)?)?;
        // PyTorch promotes numbers with no dimensions.
        let quotient = match kept.is_empty() {
            true => quotient,
            false => wide(b.convert(quotient, shape.dtype)?)?,
        };
        let steps = b.unary(Unary::RoundNearestEven, quotient)?;
        let zero_point = b.sub(b.full(&b.shape(steps), qmin)?, steps)?;
        Ok(Affine {
            scale,
            zero_point: b.convert(b.clamp(zero_point, qmin, qmax)?, DType::S8)?,
        })
    }

    /// `clamp(round(x / scale) + zero_point)`
    pub fn quantize(
        &self,
        b: &Builder,
        x: Tensor,
        kept: &[usize],
        element: DType,
    ) -> Result<Tensor> {
        let dims = b.dims(x);
        let spread = |t: Tensor| b.broadcast_in_dim(t, kept, &dims);
        let (qmin, qmax) = element.integer_range();
        let scale = b.convert(self.scale, DType::F32)?;
        let inverse = b.div(b.full(&b.shape(scale), 1.0)?, scale)?;
        let scaled = b.mul(b.convert(x, DType::F32)?, spread(inverse)?)?;
        let steps = b.unary(Unary::RoundNearestEven, scaled)?;
        let zero_point = b.convert(self.zero_point, DType::F32)?;
        let shifted = b.add(steps, spread(zero_point)?)?;
        b.convert(b.clamp(shifted, qmin, qmax)?, element)
    }
}

fn smallest_normal(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2f64.powi(-14),
        _ => f64::from(f32::MIN_POSITIVE),
    }
}
