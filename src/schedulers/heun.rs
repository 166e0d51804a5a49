//! Heun's method on the probability-flow ODE (Karras et al., 2022, arXiv:2206.00364, algorithm 1 without churn).

use super::sigmas::{Sigmas, predicted_clean_at};
use super::value::{SAMPLE, Value};
use super::{PlanOptions, SamplingPlan, SchedulerConfig, SchedulerError, Step};

/// The plan of diffusers' `HeunDiscreteScheduler`.
///
/// A step is two runs of the model: Euler's step, then the step again from where it began with the mean of the
/// derivatives at both ends. The last step, to sigma 0, is Euler's alone.
///
/// # Errors
/// When the steps do not fit the schedule.
pub(super) fn heun(
    config: &SchedulerConfig,
    options: &PlanOptions,
) -> Result<SamplingPlan, SchedulerError> {
    let levels = Sigmas::new(config, options)?;
    let Sigmas { timesteps, sigmas } = &levels;
    let count = 2 * options.steps - 1;
    // The noise level at which a run is made: after the first, each level has the end of a step and the start of one.
    let level = |run: usize| run.div_ceil(2);
    let runs: Vec<f64> = (0..count).map(|run| timesteps[level(run)]).collect();
    let step = |run: usize| {
        let at = level(run);
        let sigma = sigmas[at];
        let clean = predicted_clean_at(config.prediction_type, sigma);
        let derivative = (SAMPLE - clean.clipped(config.clip_sample)) * (1.0 / sigma);
        let in_scale = 1.0 / sigma.hypot(1.0);
        if run.is_multiple_of(2) {
            let next = SAMPLE + derivative * (sigmas[at + 1] - sigma);
            Step::new(runs[run], in_scale, clean, [next, derivative, SAMPLE])
        } else {
            let [first, begin] = [0, 1].map(Value::remembered);
            let next = begin + (first + derivative) * (0.5 * (sigma - sigmas[at - 1]));
            Step::new(runs[run], in_scale, clean, [next])
        }
    };
    SamplingPlan::of_runs(
        options.runs(&runs, 2, config)?,
        count,
        levels.init_noise_sigma(config),
        |run| [1.0, sigmas[level(run)]],
        step,
    )
}
