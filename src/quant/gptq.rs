//! GPTQ (Frantar et al. 2023, algorithm 1): columns of a weight are rounded one after the other, and those that are still floats
//! make up for the error that each leaves in what the layer computes.

use nalgebra::DMatrix;
use rayon::prelude::*;

use crate::dtype::DType;
use crate::graph::{Granularity, TensorFormat};
use crate::host_tensor::{HostTensor, packed};
use crate::shape::Shape;

use super::codes::quantize_observed;
use super::minimums::quantize_with_minimums;
use super::observer::{Extent, Observer};
use super::weight::{
    Element, QuantizedWeight, RunRounding, Scales, WeightQuantError, dims_of_scale,
    quantize_integers,
};

/// What is added to the diagonal, as a share of its mean: that of GPTQ's code and of AMD Quark.
const DAMPING: f64 = 0.01;
/// Rows that one thread rounds together, so that a row of the factor is read once for all of them.
const ROWS: usize = 32;

/// How weights are rounded.
#[derive(Clone, Copy, Debug)]
pub struct WeightRounding<'a> {
    /// What decides the range of each scale.
    pub observer: Observer,
    pub algorithm: RoundingAlgorithm<'a>,
}

/// How the numbers that share a scale become integers.
#[derive(Clone, Copy, Debug)]
pub enum RoundingAlgorithm<'a> {
    /// Each to the nearest.
    Nearest,
    /// Column by column. It reads `x^T x`, `[in, in]`, of what the layer reads, up to a factor.
    Gptq(&'a [f32]),
    /// Each to the nearest, with minimums that HQQ chooses.
    Hqq,
    /// Each to the nearest, by these scales, in the order of the numbers that have them.
    Given(&'a [f32]),
}

impl WeightRounding<'_> {
    /// Each element to the nearest number.
    pub fn nearest(observer: Observer) -> Self {
        WeightRounding {
            observer,
            algorithm: RoundingAlgorithm::Nearest,
        }
    }

    /// [`quantize_observed`], or another algorithm.
    ///
    /// # Errors
    /// As [`quantize_observed`]; when the algorithm does not take the format or the shape.
    pub fn quantize(
        &self,
        weight: &HostTensor,
        format: TensorFormat,
    ) -> Result<QuantizedWeight, WeightQuantError> {
        let hessian = match self.algorithm {
            RoundingAlgorithm::Nearest => return quantize_observed(weight, format, self.observer),
            RoundingAlgorithm::Hqq => return quantize_with_minimums(weight, format, true),
            RoundingAlgorithm::Given(scales) => {
                return quantize_integers(weight, format, Scales::Given(scales));
            }
            RoundingAlgorithm::Gptq(hessian) => hessian,
        };
        let dtype = weight.shape.dtype;
        if !takes(format) || weight.shape.rank() != 2 {
            return Err(WeightQuantError::Unsupported { dtype });
        }
        match dtype {
            DType::BF16 => quantized::<[u8; 2]>(weight, format, hessian),
            DType::F32 => quantized::<[u8; 4]>(weight, format, hessian),
            _ => Err(WeightQuantError::Unsupported { dtype }),
        }
    }
}

/// Whether GPTQ rounds to this format: to integers.
pub fn takes(format: TensorFormat) -> bool {
    format.convention.is_of_programs() && matches!(format.element, DType::S8 | DType::S4)
}

/// The upper triangle `U` with `U^T U = (H + damping)^-1`, row by row. Inputs that were always zero keep their weights' errors.
fn factor(hessian: &[f32], inputs: usize) -> Option<Vec<f32>> {
    let mut matrix = DMatrix::from_fn(inputs, inputs, |i, j| f64::from(hessian[i * inputs + j]));
    for i in 0..inputs {
        if matrix[(i, i)] == 0.0 {
            matrix[(i, i)] = 1.0;
        }
    }
    let damping = DAMPING * matrix.diagonal().mean();
    for i in 0..inputs {
        matrix[(i, i)] += damping;
    }
    let inverse = matrix.cholesky()?.inverse();
    let lower = inverse.cholesky()?.unpack();
    // Its columns are the rows of U.
    Some(lower.iter().map(|x| *x as f32).collect())
}

fn quantized<T: Element>(
    weight: &HostTensor,
    format: TensorFormat,
    hessian: &[f32],
) -> Result<QuantizedWeight, WeightQuantError> {
    let inputs = weight.shape.dims[1];
    let factor = factor(hessian, inputs).ok_or(WeightQuantError::Hessian)?;
    let scale_dims = dims_of_scale(weight, format)?;
    let exact: Vec<f32> = T::all(&weight.data).iter().map(|x| x.value()).collect();
    let group = match format.granularity {
        Granularity::Group(size) => size,
        Granularity::Tensor
        | Granularity::Channel
        | Granularity::Part(_)
        | Granularity::Feature => inputs,
    };
    let whole = match format.granularity {
        Granularity::Tensor => Some(rounding::<T>(&exact, format)),
        _ => None,
    };
    let mut left = exact.clone();
    let mut codes = vec![0; left.len()];
    let chunk = ROWS * inputs;
    let parts = left.par_chunks_mut(chunk).zip(codes.par_chunks_mut(chunk));
    let parameters: Vec<Vec<RunRounding>> = parts
        .map(|(rows, codes)| {
            let count = rows.len() / inputs;
            let mut found = vec![Vec::with_capacity(inputs / group); count];
            for column in 0..inputs {
                let of_factor = &factor[column * inputs..][..inputs];
                let rows = rows.chunks_mut(inputs).zip(codes.chunks_mut(inputs));
                for ((row, codes), found) in rows.zip(&mut found) {
                    if column % group == 0 {
                        let run = &row[column..column + group];
                        found.push(whole.unwrap_or_else(|| rounding::<T>(run, format)));
                    }
                    let (code, value) = found[column / group].one::<T>(row[column]);
                    codes[column] = code;
                    let error = (row[column] - value) / of_factor[column];
                    row[column] = value;
                    let after = row[column + 1..].iter_mut();
                    for (x, u) in after.zip(&of_factor[column + 1..]) {
                        *x -= error * u;
                    }
                }
            }
            found.into_iter().flatten().collect()
        })
        .collect();
    let mut parameters: Vec<RunRounding> = parameters.into_iter().flatten().collect();
    parameters.truncate(scale_dims.iter().product());
    let parameters: Vec<(f32, u8)> = parameters
        .into_iter()
        .map(RunRounding::parameters)
        .collect();
    let scales: Vec<f32> = parameters.iter().map(|(scale, _)| *scale).collect();
    if scales.iter().any(|scale| !scale.is_finite()) {
        return Err(WeightQuantError::Overflow {
            dtype: weight.shape.dtype,
        });
    }
    let square = |x: f32| f64::from(x).powi(2);
    let scale_shape = Shape::new(weight.shape.dtype, scale_dims);
    Ok(QuantizedWeight {
        format,
        values: HostTensor {
            shape: weight.shape.with_dtype(format.element),
            data: match format.element {
                DType::S4 => packed(&codes),
                _ => codes,
            },
        },
        zero_point: format.zero_point.then(|| HostTensor {
            shape: scale_shape.with_dtype(DType::S8),
            data: parameters
                .iter()
                .map(|(_, zero_point)| *zero_point)
                .collect(),
        }),
        scale: HostTensor {
            data: T::bytes(&scales),
            shape: scale_shape,
        },
        tensor_scale: None,
        scale_range: [
            scales.iter().copied().fold(f32::INFINITY, f32::min),
            scales.iter().copied().fold(0.0, f32::max),
        ],
        signal: exact.iter().map(|x| square(*x)).sum(),
        noise: exact.iter().zip(&left).map(|(x, y)| square(x - y)).sum(),
    })
}

/// The rounding of elements that share a scale.
fn rounding<T: Element>(run: &[f32], format: TensorFormat) -> RunRounding {
    let ends = run.iter().fold(Extent::default(), |ends, x| Extent {
        lowest: ends.lowest.min(T::rounded(*x)),
        highest: ends.highest.max(T::rounded(*x)),
    });
    RunRounding::new::<T>(ends.in_format(format), format)
}
