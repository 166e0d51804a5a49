//! The second sampler of Karras et al. (2022, arXiv:2206.00364, equation 3 with alpha = 1/2) as k-diffusion's
//! `sample_dpm_2` has it: the midpoint method between the logarithms of two noise levels.

use super::euler_ancestral::ancestral;
use super::sigmas::{LogSigmas, Sigmas, predicted_clean_at};
use super::value::{FRESH, SAMPLE, Value};
use super::{PlanOptions, SamplingPlan, SchedulerConfig, SchedulerError, SchedulerKind, Step};

/// The plan of diffusers' `KDPM2DiscreteScheduler` and `KDPM2AncestralDiscreteScheduler`.
///
/// A step is two runs of the model: Euler's step to the geometric mean of two noise levels, then the whole step with
/// the derivative that is found there. The ancestral one goes below the next level and adds noise up to it. The last
/// step, to sigma 0, is Euler's alone.
///
/// In the middle of a step a sample has the noise of the middle, which [`Step::noised`] says; diffusers' `add_noise`
/// has that of the step's end.
///
/// # Errors
/// When the steps do not fit the schedule.
pub(super) fn kdpm2(
    config: &SchedulerConfig,
    options: &PlanOptions,
) -> Result<SamplingPlan, SchedulerError> {
    config.predicts_noise_or_velocity()?;
    let levels = Sigmas::new(config, options)?;
    let Sigmas { timesteps, sigmas } = &levels;
    let logs = LogSigmas::new(config)?;
    let count = 2 * options.steps - 1;
    // Where the step from a level ends before noise is added, that noise, and the level in the middle.
    let is_ancestral = config.kind == SchedulerKind::Kdpm2Ancestral;
    let end = |level: usize| match is_ancestral {
        true => ancestral(sigmas[level], sigmas[level + 1]),
        false => (sigmas[level + 1], 0.0),
    };
    let middle = |level: usize| f64::from((sigmas[level] * end(level).0).sqrt() as f32);
    let sigma_of = |run: usize| match run % 2 {
        0 => sigmas[run / 2],
        _ => middle(run / 2),
    };
    let runs: Vec<f64> = (0..count)
        .map(|run| match run % 2 {
            0 => timesteps[run / 2],
            _ => logs.timestep_of(sigma_of(run)),
        })
        .collect();
    let step = |run: usize| {
        let (level, sigma) = (run / 2, sigma_of(run));
        let clean = predicted_clean_at(config.prediction_type, sigma);
        let derivative = (SAMPLE - clean) * (1.0 / sigma);
        let in_scale = 1.0 / sigma.hypot(1.0);
        if run.is_multiple_of(2) {
            let next = SAMPLE + derivative * (middle(level) - sigma);
            Step::new(runs[run], in_scale, clean, [next, SAMPLE])
        } else {
            let (down, up) = end(level);
            let next = Value::remembered(0) + derivative * (down - sigmas[level]) + FRESH * up;
            Step::new(runs[run], in_scale, clean, [next])
        }
    };
    SamplingPlan::of_runs(
        options.runs(&runs, 2, config)?,
        count,
        levels.init_noise_sigma(config),
        |run| [1.0, sigma_of(run)],
        step,
    )
}
