//! Noise levels: sigma is the deviation of the noise beside a clean sample of scale 1, `sqrt((1 - alpha) / alpha)`.

use super::flow_match_euler::{shift_factor, stretch};
use super::timesteps::{Grid, check_steps};
use super::value::{MODEL, SAMPLE, Value};
use super::{
    BetaSchedule, FinalSigmas, NoiseSchedule, PlanOptions, PredictionType, SchedulerConfig,
    SchedulerError, SchedulerKind, TimestepSpacing, TimestepType,
};

/// The noise levels that a sampler goes through.
pub(super) struct Sigmas {
    /// The timesteps that the model gets at each of them but the last.
    pub timesteps: Vec<f64>,
    /// From noisy to clean, with the one that the last step goes to. Rounded to `f32`, as diffusers keeps them.
    pub sigmas: Vec<f64>,
}

impl Sigmas {
    /// The levels of the steps that `options` asks for.
    ///
    /// # Errors
    /// When their number does not fit the schedule.
    pub fn new(config: &SchedulerConfig, options: &PlanOptions) -> Result<Sigmas, SchedulerError> {
        use SchedulerKind::{DpmMultistep, DpmSinglestep, UniPc};
        if config.flow.use_flow_sigmas {
            return Sigmas::of_flow(config, options);
        }
        let steps = options.steps;
        let training = training_sigmas(config)?;
        let between_steps = matches!(config.kind, DpmMultistep | DpmSinglestep | UniPc);
        let mut timesteps = match between_steps {
            true => config.timesteps(steps, Grid::Steps, true)?,
            false => config.timesteps(steps, Grid::Points, false)?,
        };
        let mut sigmas: Vec<f64> = timesteps
            .iter()
            .map(|&t| interpolate(&training, rounded(t)))
            .collect();
        let mut end = training[0];
        if let Some(space) = config.sigma_spacing() {
            let (first, last) = match between_steps {
                true => (training[training.len() - 1], training[0]),
                false => (sigmas[0], sigmas[steps - 1]),
            };
            let first = config.sigma_max.unwrap_or(first);
            let last = config.sigma_min.unwrap_or(last);
            if !(0.0 < last && last <= first) {
                return Err(SchedulerError::Invalid(format!(
                    "noise levels from sigma_max = {first} to sigma_min = {last}; expected the second above 0 and not \
                     above the first"
                )));
            }
            sigmas = space(first, last, steps);
            let logs = LogSigmas::of(&training);
            let round = rounding(config);
            timesteps = sigmas.iter().map(|&s| round(logs.timestep_of(s))).collect();
            if config.kind == UniPc {
                end = sigmas[steps - 1];
            }
        }
        sigmas.push(match config.final_sigmas_type {
            FinalSigmas::Zero => 0.0,
            FinalSigmas::SigmaMin => end,
        });
        let sigmas: Vec<f64> = sigmas.into_iter().map(rounded).collect();
        if config.timestep_type == TimestepType::Continuous
            && config.prediction_type == PredictionType::VPrediction
        {
            timesteps = sigmas[..steps].iter().map(|s| 0.25 * s.ln()).collect();
        }
        let timesteps = timesteps.into_iter().map(rounded).collect();
        Ok(Sigmas { timesteps, sigmas })
    }

    /// The levels of flow matching that samplers for models with betas make: evenly from 1 (UniPC) or from the level
    /// before it, and without a last one, then shifted.
    fn of_flow(config: &SchedulerConfig, options: &PlanOptions) -> Result<Sigmas, SchedulerError> {
        /// UniPC does not start at 1, where there is no signal to take the logarithm of.
        const BELOW_ONE: f64 = 1e-6;
        let (steps, train) = (options.steps, config.num_train_timesteps);
        check_steps(steps, "num_train_timesteps", train)?;
        let factor = shift_factor(&config.flow, options.image_seq_len)?;
        let (lowest, is_unipc) = (1.0 / train as f64, config.kind == SchedulerKind::UniPc);
        let level = |i: usize| {
            let passed = i as f64 / steps as f64 * (1.0 - lowest);
            let even = match is_unipc {
                true => 1.0 - passed,
                false => 1.0 - lowest - passed,
            };
            factor * even / (1.0 + (factor - 1.0) * even)
        };
        let mut sigmas: Vec<f64> = (0..steps).map(level).collect();
        if let Some(terminal) = config.flow.shift_terminal {
            stretch(&mut sigmas, terminal)?;
        }
        if is_unipc && 1.0 - sigmas[0] < BELOW_ONE {
            sigmas[0] -= BELOW_ONE;
        }
        let timesteps = sigmas.iter().map(|s| (s * train as f64).trunc()).collect();
        sigmas.push(match config.final_sigmas_type {
            FinalSigmas::Zero => 0.0,
            FinalSigmas::SigmaMin if is_unipc => sigmas[steps - 1],
            FinalSigmas::SigmaMin => {
                return Err(SchedulerError::Unsupported {
                    field: "final_sigmas_type".to_string(),
                    found: "sigma_min".to_string(),
                    expected:
                        "zero: the lowest level of a schedule of betas is none of flow matching"
                            .to_string(),
                });
            }
        });
        let sigmas = sigmas.into_iter().map(rounded).collect();
        Ok(Sigmas { timesteps, sigmas })
    }

    /// Scales unit normal noise to the first sample of a sampler whose samples are `clean + sigma * noise`.
    pub fn init_noise_sigma(&self, config: &SchedulerConfig) -> f64 {
        let largest = self.sigmas.iter().copied().fold(0.0, f64::max);
        match config.timestep_spacing {
            TimestepSpacing::Linspace | TimestepSpacing::Trailing => largest,
            TimestepSpacing::Leading => largest.hypot(1.0),
        }
    }
}

/// How a sampler makes the timesteps of noise levels that are not training's.
fn rounding(config: &SchedulerConfig) -> fn(f64) -> f64 {
    use SchedulerKind::{DpmMultistep, DpmSinglestep, Kdpm2, Kdpm2Ancestral, UniPc};
    let cosine = config.beta_schedule == BetaSchedule::SquaredcosCapV2;
    match (config.kind, config.use_karras_sigmas) {
        (DpmMultistep, true) if cosine => f64::trunc,
        (DpmMultistep | DpmSinglestep | UniPc, true) => f64::round_ties_even,
        (DpmMultistep | DpmSinglestep | UniPc, false) => f64::trunc,
        (Kdpm2 | Kdpm2Ancestral, true) => f64::round_ties_even,
        _ => |timestep| timestep,
    }
}

/// The nearest `f32`.
fn rounded(value: f64) -> f64 {
    f64::from(value as f32)
}

/// Sigma at each training timestep.
fn training_sigmas(config: &SchedulerConfig) -> Result<Vec<f64>, SchedulerError> {
    let mut alphas = NoiseSchedule::new(config)?.alphas_cumprod;
    if let (true, Some(last)) = (config.rescale_betas_zero_snr, alphas.last_mut()) {
        // diffusers' stand-in for 0, half precision's smallest number, so that sigma is finite.
        *last = 2f32.powi(-24);
    }
    let sigma = |a: f32| f64::from(((1.0 - a) / a).sqrt());
    Ok(alphas.into_iter().map(sigma).collect())
}

/// `values` at the fractional index `at`.
fn interpolate(values: &[f64], at: f64) -> f64 {
    let low = (at as usize).min(values.len() - 1);
    let high = (low + 1).min(values.len() - 1);
    let weight = at - low as f64;
    values[low] + (values[high] - values[low]) * weight
}

/// Logarithms of training's noise levels, which grow.
pub(super) struct LogSigmas(Vec<f64>);

impl LogSigmas {
    /// # Errors
    /// When the schedule is not valid.
    pub fn new(config: &SchedulerConfig) -> Result<LogSigmas, SchedulerError> {
        Ok(Self::of(&training_sigmas(config)?))
    }

    fn of(training: &[f64]) -> LogSigmas {
        LogSigmas(training.iter().map(|s| rounded(s.ln())).collect())
    }

    /// The fractional training timestep of a noise level.
    pub fn timestep_of(&self, sigma: f64) -> f64 {
        let LogSigmas(logs) = self;
        let log = sigma.max(1e-10).ln();
        let below = logs.partition_point(|&l| l <= log);
        let low = below.saturating_sub(1).min(logs.len().saturating_sub(2));
        let high = (low + 1).min(logs.len() - 1);
        let weight = ((logs[low] - log) / (logs[low] - logs[high])).clamp(0.0, 1.0);
        (1.0 - weight) * low as f64 + weight * high as f64
    }
}

/// So many noise levels from the first to the last.
pub(super) type Spacing = fn(f64, f64, usize) -> Vec<f64>;

impl SchedulerConfig {
    /// The spacing of the noise levels, from the first to the last, if it is not that of the timesteps.
    pub(super) fn sigma_spacing(&self) -> Option<Spacing> {
        if self.use_karras_sigmas {
            Some(karras)
        } else if self.use_exponential_sigmas {
            Some(exponential)
        } else if self.use_beta_sigmas {
            Some(beta)
        } else {
            None
        }
    }
}

/// `count` values from `first` to `last`.
fn linspace(first: f64, last: f64, count: usize) -> impl Iterator<Item = f64> {
    let stride = (last - first) / (count.max(2) - 1) as f64;
    (0..count).map(move |i| match i + 1 == count && count > 1 {
        true => last,
        false => first + i as f64 * stride,
    })
}

/// Karras et al., 2022, arXiv:2206.00364, equation (5) with rho = 7.
fn karras(first: f64, last: f64, count: usize) -> Vec<f64> {
    const RHO: f64 = 7.0;
    let (first, last) = (first.powf(1.0 / RHO), last.powf(1.0 / RHO));
    linspace(0.0, 1.0, count)
        .map(|ramp| (first + ramp * (last - first)).powf(RHO))
        .collect()
}

/// Equal steps of the logarithm.
fn exponential(first: f64, last: f64, count: usize) -> Vec<f64> {
    linspace(first.ln(), last.ln(), count)
        .map(f64::exp)
        .collect()
}

/// Quantiles of the beta distribution with both parameters 0.6 (Lee et al., 2024, arXiv:2407.12173), from the last.
fn beta(first: f64, last: f64, count: usize) -> Vec<f64> {
    linspace(0.0, 1.0, count)
        .map(|ramp| last + beta_quantile(1.0 - ramp) * (first - last))
        .collect()
}

/// The value below which the beta distribution with both parameters 0.6 has this probability.
fn beta_quantile(probability: f64) -> f64 {
    const A: f64 = 0.6;
    if probability > 0.5 {
        return 1.0 - beta_quantile(1.0 - probability);
    }
    // The integral of (t (1 - t))^(A - 1) from 0 to x: the binomial series of its second factor, which more than halves
    // from term to term below 1/2.
    let integral = |x: f64| {
        let (mut coefficient, mut sum) = (1.0, 0.0);
        for k in 0..60 {
            let k = f64::from(k);
            sum += coefficient / (A + k);
            coefficient *= x * (k + 1.0 - A) / (k + 1.0);
        }
        x.powf(A) * sum
    };
    let target = 2.0 * probability * integral(0.5);
    let (mut low, mut high) = (0.0, 0.5);
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        match integral(middle) < target {
            true => low = middle,
            false => high = middle,
        }
    }
    (low + high) / 2.0
}

/// The clean sample that a model of this kind predicts from `clean + sigma * noise`, of which it is given
/// `1 / sqrt(sigma^2 + 1)`.
pub(super) fn predicted_clean_at(kind: PredictionType, sigma: f64) -> Value {
    let scale = sigma.hypot(1.0);
    match kind {
        PredictionType::Epsilon => SAMPLE - MODEL * sigma,
        PredictionType::Sample => MODEL,
        PredictionType::VPrediction => SAMPLE * (1.0 / (scale * scale)) - MODEL * (sigma / scale),
        PredictionType::FlowPrediction => (SAMPLE - MODEL * sigma) * (1.0 / (1.0 + sigma)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_the_beta_distribution_are_scipys() {
        // scipy.stats.beta.ppf(probability, 0.6, 0.6)
        for (probability, expected) in [
            (0.0, 0.0),
            (0.001, 1.855873851745199e-05),
            (0.1, 0.03958440558878085),
            (0.25, 0.17568037865269498),
            (0.4999, 0.49986127490549975),
            (0.5, 0.5),
            (0.75, 0.824319621347305),
            (0.9, 0.9604155944112192),
            (1.0, 1.0),
        ] {
            let found = beta_quantile(probability);
            assert!(
                (found - expected).abs() < 1e-12,
                "{probability}: {found} {expected}"
            );
        }
    }
}
