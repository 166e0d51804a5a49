//! AWQ (Lin et al. 2024, section 3.2): features of large activations are rounded finer, because the weight is multiplied by a factor
//! for each feature before it is rounded, and the activation is divided by it.

use crate::dtype::DType;
use crate::graph::TensorFormat;
use crate::host_tensor::{HostTensor, float_bytes};
use crate::shape::Shape;

use super::codes::quantize_observed;
use super::observer::Observer;
use super::weight::WeightQuantError;

/// Powers of the activations' magnitudes that are tried: 0, 1/20 to 19/20, as in AWQ's code.
const POWERS: u32 = 20;
/// The least magnitude, as in AWQ's code.
const LEAST: f32 = 1e-4;

/// A linear layer's weight.
#[derive(Clone, Debug)]
pub struct AwqWeight {
    /// `f32[out, in]`, row by row.
    pub values: Vec<f32>,
    pub format: TensorFormat,
    /// The type in which it is quantized, `f32` or `bf16`.
    pub dtype: DType,
    /// What decides the range of each scale.
    pub observer: Observer,
}

/// The factors of features for layers that read the same activation, and the power of `magnitudes` that they are. Of each feature
/// `magnitudes` has the mean magnitude and `squares` the mean square. Of the powers that are tried that one is taken whose factors
/// leave the smallest error of what the layers compute, if errors of features are independent.
///
/// # Errors
/// As [`quantize_observed`].
pub fn awq_factors(
    weights: &[AwqWeight],
    magnitudes: &[f32],
    squares: &[f32],
) -> Result<(Vec<f32>, f64), WeightQuantError> {
    let mut best: Option<(f64, Vec<f32>, f64)> = None;
    for at in 0..POWERS {
        let power = f64::from(at) / f64::from(POWERS);
        let factors = factors(magnitudes, power);
        let mut error = 0.0;
        for weight in weights {
            error += weight.error(&factors, squares)?;
        }
        if best.as_ref().is_none_or(|(least, _, _)| error < *least) {
            best = Some((error, factors, power));
        }
    }
    let (_, factors, power) = best.ok_or(WeightQuantError::Scalar)?;
    Ok((factors, power))
}

/// `magnitude^power`, of which the largest is as far above 1 as the smallest is below.
fn factors(magnitudes: &[f32], power: f64) -> Vec<f32> {
    let raised = |magnitude: &f32| magnitude.max(LEAST).powf(power as f32).max(LEAST);
    let raised: Vec<f32> = magnitudes.iter().map(raised).collect();
    let largest = raised.iter().copied().fold(0.0, f32::max);
    let smallest = raised.iter().copied().fold(f32::INFINITY, f32::min);
    let middle = (largest * smallest).sqrt();
    raised.into_iter().map(|factor| factor / middle).collect()
}

impl AwqWeight {
    /// The squared error of what the layer computes.
    fn error(&self, factors: &[f32], squares: &[f32]) -> Result<f64, WeightQuantError> {
        let inputs = factors.len();
        let taken = self
            .values
            .chunks(inputs)
            .flat_map(|row| row.iter().zip(factors).map(|(w, f)| w * f));
        let dims = [self.values.len() / inputs.max(1), inputs];
        let tensor = HostTensor {
            shape: Shape::new(self.dtype, dims),
            data: float_bytes(self.dtype, taken),
        };
        let quantized = quantize_observed(&tensor, self.format, self.observer)?;
        let dtype = self.dtype;
        let left = quantized
            .dequantized()
            .map_err(|_| WeightQuantError::Unsupported { dtype })?;
        let rows = self.values.chunks(inputs).zip(left.chunks(inputs));
        let of_row = |(row, left): (&[f32], &[f32])| {
            let features = row.iter().zip(left).zip(factors.iter().zip(squares));
            let errors = features.map(|((w, left), (factor, square))| {
                f64::from((w - left / factor).powi(2) * square)
            });
            errors.sum::<f64>()
        };
        Ok(rows.map(of_row).sum())
    }
}
