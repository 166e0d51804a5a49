//! Weights as `code * scale + minimum`: llama.cpp's Q4_1, and HQQ (Badri and Shaji 2023), which chooses the minimum for what rounding
//! leaves. Scale and minimum are stored in f16; all else is computed in `f32`.

use half::f16;
use rayon::prelude::*;

use crate::dtype::DType;
use crate::graph::{NumericsConvention, TensorFormat};
use crate::host_tensor::{HostTensor, packed};
use crate::shape::Shape;

use super::weight::{QuantizedWeight, WeightQuantError, dims_of_scale, f32_elements};

/// Runs that one thread quantizes at a time.
const TASK: usize = 1 << 9;
/// HQQ's settings, those of its code: the norm `l_p` of errors that is kept small, the weight of the other term, what that grows by,
/// and how often both terms are made smaller in turn.
const NORM: f32 = 0.7;
const BETA: f32 = 10.0;
const GROWTH: f32 = 1.01;
const ITERATIONS: usize = 20;

/// Whether a format has a minimum beside each scale.
pub fn has_minimums(format: TensorFormat) -> bool {
    format.convention == NumericsConvention::Gguf && format.zero_point
}

/// Codes with one scale and one minimum.
#[derive(Clone, Copy)]
struct Line {
    scale: f32,
    minimum: f32,
}

/// Quantizes a weight `[out, in, ..]` of finite `f32` to codes with minimums. With `is_fitted` minimums are HQQ's, otherwise the lowest
/// number of each run.
///
/// # Errors
/// When a scale is too large for f16, groups do not divide the input features, or the type or the format is another.
pub(super) fn quantize_with_minimums(
    weight: &HostTensor,
    format: TensorFormat,
    is_fitted: bool,
) -> Result<QuantizedWeight, WeightQuantError> {
    let dtype = weight.shape.dtype;
    let is_here = has_minimums(format) && matches!(format.element, DType::U4 | DType::S8);
    if dtype != DType::F32 || !is_here {
        return Err(WeightQuantError::Unsupported { dtype });
    }
    let scale_dims = dims_of_scale(weight, format)?;
    let elements = f32_elements(weight);
    let count = scale_dims.iter().product::<usize>();
    let run = (elements.len() / count.max(1)).max(1);
    let (lowest, highest) = format.element.integer_range();
    let range = [lowest as f32, highest as f32];
    let mut codes = vec![0; elements.len()];
    let mut lines = vec![
        Line {
            scale: 0.0,
            minimum: 0.0
        };
        count
    ];
    let parts = codes
        .par_chunks_mut(TASK * run)
        .zip(elements.par_chunks(TASK * run));
    let sums = parts
        .zip(lines.par_chunks_mut(TASK))
        .map(|((codes, elements), lines)| {
            let runs = codes.chunks_mut(run).zip(elements.chunks(run));
            let mut sums = [0.0; 2];
            for ((codes, elements), line) in runs.zip(lines) {
                *line = quantize_run(elements, codes, range, is_fitted);
                for (x, code) in elements.iter().zip(codes) {
                    let code = match format.element {
                        DType::S8 => f32::from(*code as i8),
                        _ => f32::from(*code),
                    };
                    let error = f64::from(x - (code * line.scale + line.minimum));
                    sums[0] += f64::from(*x).powi(2);
                    sums[1] += error * error;
                }
            }
            sums
        });
    let [signal, noise] = sums.reduce(|| [0.0; 2], |a, b| [a[0] + b[0], a[1] + b[1]]);
    if lines
        .iter()
        .any(|line| !line.scale.is_finite() || !line.minimum.is_finite())
    {
        return Err(WeightQuantError::Overflow { dtype: DType::F16 });
    }
    let halves = |value: &dyn Fn(&Line) -> f32| HostTensor {
        data: lines
            .iter()
            .flat_map(|line| f16::from_f32(value(line)).to_le_bytes())
            .collect(),
        shape: Shape::new(DType::F16, scale_dims.clone()),
    };
    let scales = || lines.iter().map(|line| line.scale);
    Ok(QuantizedWeight {
        format: format.stored(DType::F16),
        values: HostTensor {
            shape: weight.shape.with_dtype(format.element),
            data: match format.element {
                DType::U4 => packed(&codes),
                _ => codes,
            },
        },
        scale: halves(&|line| line.scale),
        zero_point: Some(halves(&|line| line.minimum)),
        tensor_scale: None,
        scale_range: [
            scales().fold(f32::INFINITY, f32::min),
            scales().fold(0.0, f32::max),
        ],
        signal,
        noise,
    })
}

/// The codes of elements that share a scale, between the lowest and the highest.
fn quantize_run(
    elements: &[f32],
    codes: &mut [u8],
    [lowest, highest]: [f32; 2],
    is_fitted: bool,
) -> Line {
    let least = elements.iter().copied().fold(f32::INFINITY, f32::min);
    let most = elements.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let scale = (most - least) / (highest - lowest);
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let stored = |value: f32| f16::from_f32(value).to_f32();
    if !is_fitted || scale == 0.0 {
        // `quantize_blocks` of gguf-py's Q4_1: its codes are those of the scale before it is rounded.
        for (code, x) in codes.iter_mut().zip(elements) {
            let step = ((x - least) * inverse + 0.5).trunc();
            *code = (step + lowest).clamp(lowest, highest) as i32 as u8;
        }
        return Line {
            scale: stored(scale),
            minimum: stored(least - lowest * scale),
        };
    }
    let zero = fitted_zero(
        elements,
        inverse,
        lowest - least * inverse,
        [lowest, highest],
    );
    let line = Line {
        scale: stored(scale),
        minimum: stored(-zero * scale),
    };
    for (code, x) in codes.iter_mut().zip(elements) {
        let step = (x * inverse + zero).round_ties_even();
        *code = step.clamp(lowest, highest) as i32 as u8;
    }
    line
}

/// HQQ: the zero point `z`, a float, that keeps `|W - (q - z) / inverse|^p` small for the codes `q = round(W * inverse + z)`. In turn
/// errors `e` are shrunk to what is no outlier, `sign(e) max(|e| - |e|^(p-1) / beta, 0)` taken from them, and `z` becomes the mean of
/// `q - (W - e) * inverse`. The best `z` by the mean magnitude of errors is kept; it ends when that no longer falls.
fn fitted_zero(elements: &[f32], inverse: f32, first: f32, [lowest, highest]: [f32; 2]) -> f32 {
    let (mut zero, mut best, mut least, mut beta) = (first, first, f64::INFINITY, BETA);
    for _ in 0..ITERATIONS {
        let (mut next, mut error) = (0.0f64, 0.0f64);
        for x in elements {
            let code = (x * inverse + zero)
                .round_ties_even()
                .clamp(lowest, highest);
            let left = x - (code - zero) / inverse;
            let size = left.abs();
            let shrunk = match size == 0.0 {
                true => 0.0,
                false => left.signum() * (size - size.powf(NORM - 1.0) / beta).max(0.0),
            };
            next += f64::from(code - (x - shrunk) * inverse);
            error += f64::from(size);
        }
        if error >= least {
            break;
        }
        (best, least) = (zero, error);
        zero = (next / elements.len() as f64) as f32;
        beta *= GROWTH;
    }
    best
}
