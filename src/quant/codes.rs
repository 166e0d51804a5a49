//! Weights in the formats of other libraries, quantized on the host: llama.cpp's blocks, bitsandbytes' NF4, OCP's microscaling
//! formats and NVFP4. All is computed in `f32` unless a comment says otherwise.

use half::f16;
use rayon::prelude::*;

use crate::dtype::DType;
use crate::graph::{FP4, NF4, NumericsConvention, TensorFormat};
use crate::host_tensor::{HostTensor, float8, packed};
use crate::shape::Shape;

use super::minimums::{has_minimums, quantize_with_minimums};
use super::observer::Observer;
use super::weight::{
    QuantizedWeight, Scales, WeightQuantError, dims_of_scale, f32_elements, quantize_integers,
};

/// Runs that one thread quantizes at a time.
const TASK: usize = 1 << 9;

/// The codes of some elements with one scale.
struct Run {
    /// As the file has it: the bits of its type.
    scale: [u8; 4],
    /// The scale as a number, without what multiplies all scales.
    value: f32,
}

/// Quantizes a weight `[out, in, ..]` of finite `f32`, or for integers and AMD Quark's and Qwix's fp8 `bf16`, whose operations
/// all round to that type, as in the graph.
///
/// # Errors
/// When values are infinite, groups do not divide the input features, or there is no such format: of integers int8 and
/// int4, of fp8 AMD Quark's and Qwix's, and in `f32` those of this file, each rounded to nearest.
pub fn quantize_weight(
    weight: &HostTensor,
    format: TensorFormat,
) -> Result<QuantizedWeight, WeightQuantError> {
    quantize_observed(weight, format, Observer::default())
}

/// [`quantize_weight`] where `observer` decides the range of each scale of integers and of AMD Quark's and Qwix's fp8; the
/// other formats have ranges of their own.
///
/// # Errors
/// As [`quantize_weight`].
pub fn quantize_observed(
    weight: &HostTensor,
    format: TensorFormat,
    observer: Observer,
) -> Result<QuantizedWeight, WeightQuantError> {
    if has_minimums(format) {
        return quantize_with_minimums(weight, format, false);
    }
    let is_here = match (format.convention, format.element) {
        (NumericsConvention::Gguf, DType::S8 | DType::S4) => !format.zero_point,
        (NumericsConvention::Nf4 | NumericsConvention::Nv, DType::U4) => true,
        (NumericsConvention::Mx, DType::U4 | DType::F8E4M3Fn) => true,
        (NumericsConvention::MxE2M3 | NumericsConvention::MxE3M2, DType::F8E4M3Fn) => true,
        _ => false,
    };
    match is_here && weight.shape.dtype == DType::F32 {
        true => quantized(weight, format, dims_of_scale(weight, format)?),
        false => quantize_integers(weight, format, Scales::Found(observer)),
    }
}

/// Quantizes a weight of finite `f32` in runs that share a scale, in a format of one of these conventions; `scale_dims`
/// are the dimensions of its scales.
fn quantized(
    weight: &HostTensor,
    format: TensorFormat,
    scale_dims: Vec<usize>,
) -> Result<QuantizedWeight, WeightQuantError> {
    let elements = f32_elements(weight);
    let count = scale_dims.iter().product::<usize>();
    let run = (elements.len() / count.max(1)).max(1);
    // NVFP4's scales are fractions of this one, the largest scale that fp8 holds.
    let tensor_scale = format.has_tensor_scale().then(|| {
        let largest = elements
            .par_iter()
            .map(|x| x.abs())
            .reduce(|| 0.0, f32::max);
        match largest == 0.0 {
            true => 1.0,
            false => largest / (6.0 * float8::LARGEST),
        }
    });
    let scale_type = format.scale_type_in_files();
    let size = scale_type.storage_bytes(1);
    let mut codes = vec![0; elements.len()];
    let mut scales = vec![0; count * size];
    let mut values = vec![0.0; count];
    let parts = codes
        .par_chunks_mut(TASK * run)
        .zip(elements.par_chunks(TASK * run));
    let parts = parts
        .zip(scales.par_chunks_mut(TASK * size))
        .zip(values.par_chunks_mut(TASK));
    let sums = parts.map(|(((codes, elements), scales), values)| {
        let runs = codes.chunks_mut(run).zip(elements.chunks(run));
        let mut sums = [0.0; 2];
        for (((codes, elements), scale), value) in runs.zip(scales.chunks_mut(size)).zip(values) {
            let found = quantize_run(elements, codes, format, tensor_scale);
            scale.copy_from_slice(&found.scale[..size]);
            *value = found.value;
            let used = found.value * tensor_scale.unwrap_or(1.0);
            for (x, code) in elements.iter().zip(codes) {
                let error = f64::from(x - number(*code, format) * used);
                sums[0] += f64::from(*x) * f64::from(*x);
                sums[1] += error * error;
            }
        }
        sums
    });
    let [signal, noise] = sums.reduce(|| [0.0; 2], |a, b| [a[0] + b[0], a[1] + b[1]]);
    if values.iter().any(|value: &f32| !value.is_finite()) {
        return Err(WeightQuantError::Overflow { dtype: scale_type });
    }
    let used = |value: f32| value * tensor_scale.unwrap_or(1.0);
    Ok(QuantizedWeight {
        format,
        values: HostTensor {
            shape: weight.shape.with_dtype(format.element),
            data: match format.element.bits() {
                4 => packed(&codes),
                _ => codes,
            },
        },
        scale: HostTensor {
            shape: Shape::new(scale_type, scale_dims),
            data: scales,
        },
        zero_point: None,
        tensor_scale: tensor_scale.map(|scale| HostTensor {
            shape: Shape::scalar(DType::F32),
            data: scale.to_le_bytes().to_vec(),
        }),
        scale_range: [
            used(values.iter().copied().fold(f32::INFINITY, f32::min)),
            used(values.iter().copied().fold(f32::NEG_INFINITY, f32::max)),
        ],
        signal,
        noise,
    })
}

/// What a code stands for.
fn number(code: u8, format: TensorFormat) -> f32 {
    match (format.codebook(), format.element) {
        (Some(codebook), _) => codebook[usize::from(code)],
        (None, DType::F8E4M3Fn) => float8::decode(code),
        (None, DType::S4) => f32::from(((code << 4) as i8) >> 4),
        (None, _) => f32::from(code as i8),
    }
}

fn quantize_run(
    elements: &[f32],
    codes: &mut [u8],
    format: TensorFormat,
    tensor_scale: Option<f32>,
) -> Run {
    let absmax = elements.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
    let mut each = |code: &dyn Fn(f32) -> u8| {
        for (out, x) in codes.iter_mut().zip(elements) {
            *out = code(*x);
        }
    };
    let inverse = |scale: f32| if scale == 0.0 { 0.0 } else { 1.0 / scale };
    match format.convention {
        // `quantize_row_q4_0` and `quantize_row_q8_0`, as gguf-py computes them.
        NumericsConvention::Gguf if format.element == DType::S4 => {
            let largest = |most: f32, x: &f32| if x.abs() > most.abs() { *x } else { most };
            let scale = elements.iter().fold(0.0, largest) / -8.0;
            let inverse = f64::from(inverse(scale));
            // The lowest code is 0, and stands for -8.
            each(&|x| {
                let y = (f64::from(x) * inverse + 8.5) as f32;
                ((y.trunc() as u8).min(15) ^ 8) & 0xf
            });
            half_run(scale)
        }
        NumericsConvention::Gguf => {
            let scale = absmax / 127.0;
            let inverse = inverse(scale);
            each(&|x| (x * inverse).round() as i8 as u8);
            half_run(scale)
        }
        NumericsConvention::Nf4 => {
            let inverse = 1.0 / absmax.max(1e-38);
            each(&|x| nearest_nf4((x * inverse).clamp(-1.0, 1.0)));
            Run {
                scale: absmax.to_le_bytes(),
                value: absmax,
            }
        }
        NumericsConvention::Nv => {
            let of_all = tensor_scale.unwrap_or(1.0);
            let quotient = absmax / 6.0 / of_all;
            let stored = float8::encode(quotient.clamp(-float8::LARGEST, float8::LARGEST));
            // A scale of nothing is 1, as Quark stores it: its codes are zeros either way.
            let stored = if stored == 0 {
                float8::encode(1.0)
            } else {
                stored
            };
            let value = float8::decode(stored);
            let scale = value * of_all;
            each(&|x| nearest_fp4(x / scale));
            Run {
                scale: [stored, 0, 0, 0],
                value,
            }
        }
        NumericsConvention::Mx
        | NumericsConvention::MxE2M3
        | NumericsConvention::MxE3M2
        | NumericsConvention::Aqt
        | NumericsConvention::Qwix
        | NumericsConvention::Quark
        | NumericsConvention::Narrow => {
            let is_fp4 = format.element == DType::U4;
            // The exponent of the largest number, and bits of the mantissa.
            let (largest, mantissa) = match format.float6() {
                Some(float6) => (float6.largest_exponent(), float6.mantissa_bits()),
                None if is_fp4 => (2, 1),
                None => (8, 3),
            };
            // The largest magnitude is rounded to the mantissa first: by its bits, since a power of two is wanted exactly.
            let rounded = absmax.to_bits() + (1 << (23 - mantissa - 1));
            let exponent = (rounded >> 23) as i32 - 127 - largest;
            // 2^-126 is the smallest that is no subnormal number; zeros have it.
            let code = (exponent.clamp(-126, 127) + 127) as u8;
            let scale = float8::decode_e8m0(code);
            match format.float6() {
                Some(float6) => each(&|x| {
                    // fp8 has the number.
                    float8::encode(float6.decode(float6.encode(x / scale)))
                }),
                None if is_fp4 => each(&|x| nearest_fp4(x / scale)),
                None => each(&|x| {
                    let y = x / scale;
                    float8::encode(y.clamp(-float8::LARGEST, float8::LARGEST))
                }),
            }
            Run {
                scale: [code, 0, 0, 0],
                value: scale,
            }
        }
    }
}

fn half_run(scale: f32) -> Run {
    let half = f16::from_f32(scale);
    let [low, high] = half.to_le_bytes();
    Run {
        scale: [low, high, 0, 0],
        value: half.to_f32(),
    }
}

/// The code of the nearest number of [`NF4`], of two the lower.
fn nearest_nf4(x: f32) -> u8 {
    let middles = NF4.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
    middles.filter(|middle| *middle < x).count() as u8
}

/// The code of the nearest number of [`FP4`], of two the one with an even code; the largest where there is none.
fn nearest_fp4(x: f32) -> u8 {
    let magnitude = x.abs();
    let middles = FP4[..8].windows(2).enumerate();
    let passed = middles.filter(|(code, pair)| {
        let middle = (pair[0] + pair[1]) / 2.0;
        match code % 2 {
            0 => magnitude > middle,
            _ => magnitude >= middle,
        }
    });
    // As Quark writes it, a zero has no sign.
    match passed.count() as u8 {
        0 => 0,
        code => code | u8::from(x < 0.0) << 3,
    }
}
