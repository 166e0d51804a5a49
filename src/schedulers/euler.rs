//! Euler's method on the probability-flow ODE (Karras et al., 2022, arXiv:2206.00364, algorithm 2 without churn).

use super::{
    FinalSigmas, NoiseSchedule, PredictionType, SamplingPlan, SchedulerConfig, SchedulerError,
    Step, TimestepSpacing,
};

/// The plan of diffusers' `EulerDiscreteScheduler`.
///
/// The sample is scaled so that its noise has deviation `sigma = sqrt((1-alpha)/alpha)`, interpolated linearly
/// between training timesteps. With `h` the step to the next sigma and `m` the model's output,
/// `x_next = x + h (x - x0) / sigma`, where `x0` is
///
/// | prediction   | `x0`                                               |
/// |--------------|----------------------------------------------------|
/// | epsilon      | `x - sigma m`                                      |
/// | sample       | `m`                                                |
/// | v_prediction | `x / (sigma^2 + 1) - m sigma / sqrt(sigma^2 + 1)`  |
///
/// which gives the coefficients of `x` and `m`. The model sees `x / sqrt(sigma^2 + 1)`.
///
/// # Errors
/// When `steps` does not fit the schedule.
pub fn euler_discrete(
    config: &SchedulerConfig,
    steps: usize,
) -> Result<SamplingPlan, SchedulerError> {
    if config.clip_sample {
        return Err(SchedulerError::Unsupported {
            field: "clip_sample".to_string(),
            found: "true".to_string(),
            expected: "false: diffusers' Euler sampler clips nothing; use ddim".to_string(),
        });
    }
    let mut alphas = NoiseSchedule::new(config)?.alphas_cumprod;
    if let (true, Some(last)) = (config.rescale_betas_zero_snr, alphas.last_mut()) {
        // diffusers' stand-in for 0, half precision's smallest number, so that sigma is finite.
        *last = 2f32.powi(-24);
    }
    let training: Vec<f64> = alphas
        .iter()
        .map(|&a| f64::from(((1.0 - a) / a).sqrt()))
        .collect();
    let timesteps: Vec<f32> = config
        .timesteps(steps, false)?
        .into_iter()
        .map(|t| t as f32)
        .collect();
    let mut sigmas: Vec<f32> = timesteps
        .iter()
        .map(|&t| interpolate(&training, f64::from(t)) as f32)
        .collect();
    sigmas.push(match config.final_sigmas_type {
        FinalSigmas::Zero => 0.0,
        FinalSigmas::SigmaMin => training[0] as f32,
    });

    let rows = timesteps
        .iter()
        .zip(sigmas.windows(2))
        .map(|(&timestep, pair)| {
            let (sigma, next) = (f64::from(pair[0]), f64::from(pair[1]));
            let step = next - sigma;
            let norm = (sigma * sigma + 1.0).sqrt();
            let (x, model) = match config.prediction_type {
                PredictionType::Epsilon => (1.0, step),
                PredictionType::Sample => (next / sigma, -step / sigma),
                PredictionType::VPrediction => (1.0 + step * sigma / (norm * norm), step / norm),
            };
            let mut row = Step::memoryless(timestep, (1.0 / norm) as f32, [x, model, 0.0]);
            row.clean = match config.prediction_type {
                PredictionType::Epsilon => [1.0, -sigma],
                PredictionType::Sample => [0.0, 1.0],
                PredictionType::VPrediction => [1.0 / (norm * norm), -sigma / norm],
            }
            .map(|v| v as f32);
            row
        })
        .collect();
    let largest = sigmas.iter().copied().fold(0.0, f32::max);
    SamplingPlan {
        steps: rows,
        init_noise_sigma: match config.timestep_spacing {
            TimestepSpacing::Linspace | TimestepSpacing::Trailing => largest,
            TimestepSpacing::Leading => (largest * largest + 1.0).sqrt(),
        },
    }
    .finite()
}

/// `values` at the fractional index `at`.
fn interpolate(values: &[f64], at: f64) -> f64 {
    let low = (at as usize).min(values.len() - 1);
    let high = (low + 1).min(values.len() - 1);
    let weight = at - low as f64;
    values[low] + (values[high] - values[low]) * weight
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedulers::OUTPUT;

    /// With the right prediction every step moves along `sample + sigma * noise`.
    #[test]
    fn a_perfect_model_follows_its_trajectory() {
        for prediction_type in [
            PredictionType::Epsilon,
            PredictionType::Sample,
            PredictionType::VPrediction,
        ] {
            for timestep_spacing in [
                TimestepSpacing::Leading,
                TimestepSpacing::Linspace,
                TimestepSpacing::Trailing,
            ] {
                let config = SchedulerConfig {
                    prediction_type,
                    timestep_spacing,
                    ..SchedulerConfig::default()
                };
                let plan = euler_discrete(&config, 10).unwrap();
                let (sample, noise) = (0.7f64, -1.3f64);
                for (i, step) in plan.steps.iter().enumerate() {
                    let sigma = |step: &Step| {
                        (1.0 / f64::from(step.in_scale).powi(2) - 1.0)
                            .max(0.0)
                            .sqrt()
                    };
                    let now = sigma(step);
                    let next = plan.steps.get(i + 1).map_or(0.0, sigma);
                    let norm = (now * now + 1.0).sqrt();
                    let model = match prediction_type {
                        PredictionType::Epsilon => noise,
                        PredictionType::Sample => sample,
                        PredictionType::VPrediction => (noise - now * sample) / norm,
                    };
                    let x = sample + now * noise;
                    let found = f64::from(step.update[0][0]) * x
                        + f64::from(step.update[0][OUTPUT]) * model;
                    let expected = sample + next * noise;
                    // Sigma is recovered here from an f32 in_scale: 1e-7 / (2 sigma) of error, sigma above 0.03.
                    assert!(
                        (found - expected).abs() < 2e-5 * (1.0 + now),
                        "{prediction_type:?} {timestep_spacing:?} {i}: {found} {expected}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_first_sigma_is_stable_diffusions() {
        let config = SchedulerConfig {
            timestep_spacing: TimestepSpacing::Linspace,
            ..SchedulerConfig::default()
        };
        let plan = euler_discrete(&config, 30).unwrap();
        // 14.6146, the sigma_max of Stable Diffusion in k-diffusion.
        assert!(
            (plan.init_noise_sigma - 14.6146).abs() < 1e-4,
            "{}",
            plan.init_noise_sigma
        );
        assert_eq!(plan.steps[29].timestep, 0.0);
    }
}
