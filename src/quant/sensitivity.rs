//! What an error in one layer does: to what the layer computes, and to what a denoising step leaves of a sample.
//!
//! The second takes a derivative. An error `e` of a layer's result changes the step's result by `J e` to first order. With
//! random signs `s` the mean square of each number of `J^T s` is the sum of squares of the step's result that a unit of error at
//! that place makes (Hutchinson 1990): one derivative of `s^T result` tells it for all layers. `docs/quantization.md` has the
//! formulas.

use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use crate::dtype::DType;
use crate::graph::{Builder, GraphError, Op, Tensor, TensorFormat, vjp};
use crate::host_tensor::{HostTensor, HostTensorError};
use crate::shape::Shape;

/// Names of the results.
mod names {
    /// `f32[layers]`: the mean square of what each computes.
    pub const OUTPUTS: &str = "statistics/outputs";
    /// `f32[output features of all layers]`: see [`super::LayerActivity::gains`].
    pub const GAINS: &str = "statistics/gains";
}

/// A layer of which a program tells what it computes.
#[derive(Clone, Debug)]
pub(super) struct WatchedLayer {
    pub path: String,
    /// Its output features.
    pub features: usize,
}

/// What calibration saw of a layer, for each step of the sampler; without gains for all steps together.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerActivity {
    /// The mean square of each input feature.
    pub squares: Vec<Vec<f32>>,
    /// The mean square of what it computes, before its bias.
    pub outputs: Vec<f64>,
    /// Of each output feature the sum of squares that independent errors of power 1 in all its places make of the step's result,
    /// relative to that of the result itself. Empty where the program was not differentiated.
    pub gains: Vec<Vec<f32>>,
    /// Of formats that its activation may be rounded to at run time the mean square of what that leaves of each input feature.
    pub roundings: Vec<(TensorFormat, Vec<Vec<f32>>)>,
}

/// An activation that is rounded at run time, and the weight `[out, in, ..]` that it is multiplied with.
#[derive(Clone, Copy)]
pub struct RoundedActivation<'a> {
    pub format: TensorFormat,
    pub weight: &'a [f32],
}

/// What rounding a layer's weight, and maybe its activation, does, to first order and with the errors of features independent of each other.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerErrors {
    /// For each step, the power of the error of what the layer computes of what it reads without errors before it, relative to
    /// that of what it computes.
    pub of_layer: Vec<f64>,
    /// For each step, the power of the error of what the step leaves of a sample, relative to that of the sample. Empty without
    /// gains.
    pub of_result: Vec<f64>,
    /// The ratio of powers of what the layer computes and its error over all steps, in decibels.
    pub sqnr_db: f64,
}

impl LayerErrors {
    /// The errors of the steps' results as one number: the root of the mean over steps of their relative powers. `None` without
    /// gains.
    pub fn drift(&self) -> Option<f64> {
        let steps = self.of_result.len();
        (steps > 0).then(|| (self.of_result.iter().sum::<f64>() / steps as f64).sqrt())
    }
}

/// Adds what layers compute, and with `gains` what an error of theirs does to the first result, to the results of a program.
/// `layers` are their paths, their contractions and which of the operands is the activation.
pub(super) fn layer_results(
    b: &Builder,
    layers: &[(String, u32, usize)],
    gains: bool,
) -> Result<Vec<WatchedLayer>, GraphError> {
    let feature = |node: u32, at: usize| {
        b.with_graph(|g| match &g.nodes[node as usize].op {
            Op::Convolution { dims, .. } => dims.out.feature,
            // The weight's features come after those of the activation.
            _ if at == 0 => g.nodes[node as usize].shape.rank().saturating_sub(1),
            _ => 0,
        })
    };
    let outputs = layers
        .iter()
        .map(|(_, node, _)| mean_square(b, b.tensor(*node)));
    let outputs = outputs.collect::<Result<Vec<_>, _>>()?;
    b.output(names::OUTPUTS, b.concatenate(&outputs, 0)?, None)?;
    let watched = layers.iter().map(|(path, node, at)| WatchedLayer {
        path: path.clone(),
        features: b.dims(b.tensor(*node))[feature(*node, *at)],
    });
    let watched: Vec<WatchedLayer> = watched.collect();
    let first = b.with_graph(|g| g.outputs.first().map(|output| output.node));
    let (true, Some(result)) = (gains, first.map(|node| b.tensor(node))) else {
        return Ok(watched);
    };
    let signs = signs(&b.dims(result)).map_err(|e| b.invalid(e.to_string()))?;
    let signs = b.convert(b.constant(signs)?, b.dtype(result))?;
    let each: Vec<Tensor> = layers.iter().map(|(_, node, _)| b.tensor(*node)).collect();
    let cotangents = vjp(b, &[(result, signs)], &each)?;
    let power = b.reshape(b.sum(square(b, result)?, &all(b, result))?, &[1])?;
    let gains = cotangents
        .iter()
        .zip(layers)
        .map(|(cotangent, (_, node, at))| {
            let own = feature(*node, *at);
            let others: Vec<usize> = all(b, *cotangent)
                .into_iter()
                .filter(|d| *d != own)
                .collect();
            b.sum(square(b, *cotangent)?, &others)
        });
    let gains = gains.collect::<Result<Vec<_>, _>>()?;
    let gains = b.concatenate(&gains, 0)?;
    let gains = b.div(gains, b.broadcast_to(power, &b.dims(gains))?)?;
    b.output(names::GAINS, gains, None)?;
    Ok(watched)
}

fn all(b: &Builder, x: Tensor) -> Vec<usize> {
    (0..b.dims(x).len()).collect()
}

fn square(b: &Builder, x: Tensor) -> Result<Tensor, GraphError> {
    b.square(b.convert(x, DType::F32)?)
}

/// `f32[1]`
fn mean_square(b: &Builder, x: Tensor) -> Result<Tensor, GraphError> {
    let count = b.shape(x).count();
    let sum = b.sum(square(b, x)?, &all(b, x))?;
    b.reshape(b.mul_scalar(sum, 1.0 / count as f64)?, &[1])
}

/// Numbers 1 and -1, the same in every run: what the network computes is another in each step.
fn signs(dims: &[usize]) -> Result<HostTensor, HostTensorError> {
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let count = dims.iter().product::<usize>();
    let signs = (0..count).flat_map(|_| {
        let sign = if rng.next_u32() & 1 == 0 {
            1.0f32
        } else {
            -1.0
        };
        sign.to_le_bytes()
    });
    HostTensor::new(Shape::new(DType::F32, dims.to_vec()), signs.collect())
}

impl LayerActivity {
    /// What it does that `left` stands in place of the weight `float`, both `[out, in, ..]`, and that the activation is `rounded`. Of
    /// one whose format was not watched nothing is known: it counts as exact.
    pub fn errors(
        &self,
        float: &[f32],
        left: &[f32],
        dims: &[usize],
        rounded: Option<RoundedActivation<'_>>,
    ) -> LayerErrors {
        let watched = |rounded: RoundedActivation<'_>| {
            let known = self
                .roundings
                .iter()
                .find(|(format, _)| *format == rounded.format);
            known.map(|(_, of_steps)| of_steps)
        };
        let of_rounding = rounded.and_then(watched);
        let multiplied = rounded.map_or(&[][..], |rounded| rounded.weight);
        let positions = dims.iter().skip(2).product::<usize>().max(1);
        let inputs = dims.get(1).copied().unwrap_or(1).max(1);
        let out = dims.first().copied().unwrap_or(1).max(1);
        let row = inputs * positions;
        let steps = self.squares.len();
        // For each step the sums over output features of the error's power, and of that times the gain.
        let rows = float.par_chunks(row).zip(left.par_chunks(row));
        let sums = rows.enumerate().map(|(at, (float, left))| {
            let errors = float.chunks(positions).zip(left.chunks(positions));
            let errors: Vec<f32> = errors
                .map(|(x, y)| x.iter().zip(y).map(|(x, y)| (x - y).powi(2)).sum())
                .collect();
            let of_step = |step: usize| {
                let squares = errors.iter().zip(&self.squares[step]);
                let mut power: f64 = squares.map(|(e, s)| f64::from(e * s)).sum();
                if let Some(of_steps) = of_rounding {
                    // What is left of a feature is as likely above as below, whatever the weight's error.
                    let weights = multiplied[at * row..][..row].chunks(positions);
                    let each = weights.zip(&of_steps[step]).map(|(w, left)| {
                        let weight: f32 = w.iter().map(|w| w * w).sum();
                        f64::from(weight * left)
                    });
                    power += each.sum::<f64>();
                }
                let gain = self
                    .gains
                    .get(step)
                    .map_or(0.0, |gains| f64::from(gains[at]));
                [power, power * gain]
            };
            (0..steps).map(of_step).collect::<Vec<_>>()
        });
        // In order: a sum in another one is another number.
        let rows: Vec<Vec<[f64; 2]>> = sums.collect();
        let mut sums = vec![[0.0; 2]; steps];
        for row in rows {
            for (sum, [power, result]) in sums.iter_mut().zip(row) {
                *sum = [sum[0] + power, sum[1] + result];
            }
        }
        let powers = || {
            sums.iter()
                .zip(&self.outputs)
                .map(|([power, _], output)| (power / out as f64, *output))
        };
        let [signal, noise] = powers().fold([0.0; 2], |[signal, noise], (power, output)| {
            [signal + output, noise + power]
        });
        LayerErrors {
            of_layer: powers()
                .map(|(power, output)| if power == 0.0 { 0.0 } else { power / output })
                .collect(),
            of_result: match self.gains.is_empty() {
                true => Vec::new(),
                false => sums.iter().map(|[_, result]| *result).collect(),
            },
            sqnr_db: match noise == 0.0 {
                true => f64::INFINITY,
                false => 10.0 * (signal / noise).log10(),
            },
        }
    }
}
