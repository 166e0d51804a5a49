//! Euler's method with ancestral noise: each step goes below the next noise level and adds noise up to it.

use super::sigmas::{Sigmas, predicted_clean_at};
use super::value::{FRESH, SAMPLE};
use super::{PlanOptions, SamplingPlan, SchedulerConfig, SchedulerError, Step};

/// The plan of diffusers' `EulerAncestralDiscreteScheduler`.
///
/// With `d = (x - clean) / sigma`, `x_next = x + (down - sigma) d + up noise`, where
/// `up = sqrt(next^2 (sigma^2 - next^2) / sigma^2)` and `down = sqrt(next^2 - up^2) = next^2 / sigma` (Karras et al.,
/// 2022, arXiv:2206.00364, in k-diffusion's `sample_euler_ancestral`).
///
/// # Errors
/// When the steps do not fit the schedule.
pub(super) fn euler_ancestral(
    config: &SchedulerConfig,
    options: &PlanOptions,
) -> Result<SamplingPlan, SchedulerError> {
    config.predicts_noise_or_velocity()?;
    let levels = Sigmas::new(config, options)?;
    let step = |i: usize| {
        let (sigma, next) = (levels.sigmas[i], levels.sigmas[i + 1]);
        let clean = predicted_clean_at(config.prediction_type, sigma);
        let derivative = (SAMPLE - clean) * (1.0 / sigma);
        let (down, up) = ancestral(sigma, next);
        let next = SAMPLE + derivative * (down - sigma) + FRESH * up;
        Step::new(levels.timesteps[i], 1.0 / sigma.hypot(1.0), clean, [next])
    };
    SamplingPlan::of_runs(
        options.runs(&levels.timesteps, 1, config)?,
        options.steps,
        levels.init_noise_sigma(config),
        |i| [1.0, levels.sigmas[i]],
        step,
    )
}

/// How far down an ancestral step goes, and the noise that it adds to be at `next`.
pub(super) fn ancestral(sigma: f64, next: f64) -> (f64, f64) {
    let down = next * next / sigma;
    (down, (next * next - down * down).max(0.0).sqrt())
}
