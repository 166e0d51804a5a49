//! Euler's method on the probability-flow ODE (Karras et al., 2022, arXiv:2206.00364, algorithm 2 without churn).

use super::sigmas::{Sigmas, predicted_clean_at};
use super::value::SAMPLE;
use super::{PlanOptions, SamplingPlan, SchedulerConfig, SchedulerError, Step};

/// The plan of diffusers' `EulerDiscreteScheduler`: `x_next = x + (next - sigma) d` with `d = (x - clean) / sigma`.
///
/// # Errors
/// When the steps do not fit the schedule.
pub(super) fn euler(
    config: &SchedulerConfig,
    options: &PlanOptions,
) -> Result<SamplingPlan, SchedulerError> {
    let levels = Sigmas::new(config, options)?;
    let runs = options.runs(&levels.timesteps, 1, config)?;
    let step = |i: usize| {
        let (sigma, next) = (levels.sigmas[i], levels.sigmas[i + 1]);
        let clean = predicted_clean_at(config.prediction_type, sigma);
        let derivative = (SAMPLE - clean) * (1.0 / sigma);
        let next = SAMPLE + derivative * (next - sigma);
        Step::new(levels.timesteps[i], 1.0 / sigma.hypot(1.0), clean, [next])
    };
    SamplingPlan::of_runs(
        runs,
        options.steps,
        levels.init_noise_sigma(config),
        |i| [1.0, levels.sigmas[i]],
        step,
    )
}
