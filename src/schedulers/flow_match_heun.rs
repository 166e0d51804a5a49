//! Heun's method for flow matching: the model predicts the derivative of the sample by its noise level.

use super::flow_match_euler::sigmas;
use super::value::{MODEL, SAMPLE, Value, predicted_clean};
use super::{PlanOptions, SamplingPlan, SchedulerConfig, SchedulerError, Step};

/// The plan of diffusers' `FlowMatchHeunDiscreteScheduler`, for the noise levels that `options` says.
///
/// A step is two runs of the model: Euler's step, then the step again from where it began with the mean of the
/// derivatives at both ends. The last step, to the clean sample, is Euler's alone.
///
/// # Errors
/// When the steps do not fit the schedule.
pub(super) fn flow_match_heun(
    config: &SchedulerConfig,
    options: &PlanOptions,
) -> Result<SamplingPlan, SchedulerError> {
    let levels = sigmas(config, options)?;
    let count = 2 * options.steps - 1;
    // The noise level at which a run is made: after the first, each level has the end of a step and the start of one.
    let level = |run: usize| run.div_ceil(2);
    let sigma = |level: usize| levels.get(level).copied().map_or(0.0, f64::from);
    let train = config.num_train_timesteps as f32;
    let timestep = |run: usize| f64::from(levels[level(run)] * train);
    let runs: Vec<f64> = (0..count).map(timestep).collect();
    let step = |run: usize| {
        let at = level(run);
        let clean = predicted_clean(config.prediction_type, 1.0 - sigma(at), sigma(at));
        if run.is_multiple_of(2) {
            let next = SAMPLE + MODEL * (sigma(at + 1) - sigma(at));
            Step::new(runs[run], 1.0, clean, [next, MODEL, SAMPLE])
        } else {
            let [first, begin] = [0, 1].map(Value::remembered);
            let next = begin + (first + MODEL) * (0.5 * (sigma(at) - sigma(at - 1)));
            Step::new(runs[run], 1.0, clean, [next])
        }
    };
    SamplingPlan::of_runs(
        options.runs(&runs, 2, config)?,
        count,
        1.0,
        |run| [1.0 - sigma(level(run)), sigma(level(run))],
        step,
    )
}
