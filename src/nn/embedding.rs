//! Embeddings of token ids and of timesteps.

use crate::dtype::DType;
use crate::graph::{Builder, Init, Tensor};
use crate::host_tensor::HostTensor;
use crate::shape::Shape;

use super::{Activation, Linear, Precision, Result, dims, linear};

/// Rows of `weight` `[vocabulary, features]` for integer `ids` of any shape.
///
/// # Errors
/// When `ids` are not integers, or the weight was declared with another shape.
pub fn embedding(
    b: &Builder,
    ids: Tensor,
    vocabulary: usize,
    features: usize,
    init: Init,
    precision: Precision,
) -> Result<Tensor> {
    let table = embedding_table(b, vocabulary, features, init, precision)?;
    let rows = b.take(table, ids)?;
    b.convert(rows, precision.activations)
}

/// The weight of [`embedding`] itself, in the type it is declared in.
pub(crate) fn embedding_table(
    b: &Builder,
    rows: usize,
    features: usize,
    init: Init,
    precision: Precision,
) -> Result<Tensor> {
    b.param(
        "weight",
        Shape::new(precision.weights, [rows, features]),
        init,
        &[Some("vocab"), Some("embed")],
    )
}

/// Sines and cosines of `timesteps` `[n]` at geometric frequencies: `[n, features]` in `f32`.
///
/// Frequency `i` of `features / 2` is `10000^(-i / (features / 2 - freq_shift))`, as in Denoising Diffusion
/// Probabilistic Models (Ho et al., 2020). `flip_sin_to_cos` puts cosines first.
///
/// # Errors
/// When `timesteps` is not of rank 1, `features` is odd, or `freq_shift` leaves no range of frequencies.
pub fn sinusoidal_embedding(
    b: &Builder,
    timesteps: Tensor,
    features: usize,
    flip_sin_to_cos: bool,
    freq_shift: f64,
) -> Result<Tensor> {
    let [n] = dims(b, "timesteps", timesteps)?;
    let half = features / 2;
    let range = half as f64 - freq_shift;
    if features == 0 || !features.is_multiple_of(2) || range <= 0.0 {
        return Err(b.invalid(format!(
            "sinusoidal embedding: {features} features with freq_shift {freq_shift} leave no frequencies; \
             expected an even number above twice the shift"
        )));
    }
    // The exponent is rounded to f32 at each step as PyTorch does: at t = 1000 one unit in the last place of a
    // frequency moves its angle by 1e-4.
    let log_period = -(10000f64.ln() as f32);
    let frequencies: Vec<f32> = (0..half)
        .map(|i| f64::from(log_period * i as f32 / range as f32).exp() as f32)
        .collect();
    let frequencies = b.constant(HostTensor::from_f32([half], &frequencies)?)?;
    let timesteps = b.convert(timesteps, DType::F32)?;
    let column = b.reshape(timesteps, &[n, 1])?;
    let angles = b.mul(column, frequencies)?;
    let (sin, cos) = (b.sin(angles)?, b.cos(angles)?);
    b.concatenate(
        &if flip_sin_to_cos {
            [cos, sin]
        } else {
            [sin, cos]
        },
        1,
    )
}

/// The two linear layers that turn a conditioning vector into a time embedding.
#[derive(Clone, Copy, Debug)]
pub struct TimestepEmbedding {
    pub features: usize,
    pub activation: Activation,
}

impl TimestepEmbedding {
    /// `linear_2(activation(linear_1(x)))` for `x` `[n, in]`.
    ///
    /// # Errors
    /// As for [`linear`].
    pub fn apply(self, b: &Builder, x: Tensor, precision: Precision) -> Result<Tensor> {
        let layer = Linear::replicated(self.features);
        let hidden = linear(&b.scope("linear_1"), x, layer, precision)?;
        let hidden = self.activation.apply(b, hidden)?;
        linear(&b.scope("linear_2"), hidden, layer, precision)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::tests::input;

    #[test]
    fn frequencies_fall_from_1_to_the_period() {
        let b = Builder::new();
        let t = input(&b, "t", &[3]);
        let y = sinusoidal_embedding(&b, t, 8, true, 0.0).unwrap();
        assert_eq!(b.dims(y), [3, 8]);
        let graph = b.finish();
        let table = graph
            .nodes
            .iter()
            .find_map(|n| match &n.op {
                crate::graph::Op::Constant(value) => Some(value.to_f32_vec().unwrap()),
                _ => None,
            })
            .unwrap();
        // 10000^(-i/4): one, a tenth, a hundredth, a thousandth, to f32 rounding of the exponent.
        for (found, expected) in table.iter().zip([1.0, 0.1, 0.01, 0.001f32]) {
            assert!((found / expected - 1.0).abs() < 1e-6, "{table:?}");
        }
    }

    #[test]
    fn odd_sizes_are_refused() {
        let b = Builder::new();
        let t = input(&b, "t", &[3]);
        assert!(sinusoidal_embedding(&b, t, 7, true, 0.0).is_err());
        assert!(sinusoidal_embedding(&b, t, 2, true, 1.0).is_err());
    }
}
