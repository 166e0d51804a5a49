//! Trajectory consistency distillation (Zheng et al., 2024, arXiv:2402.19159).

use super::noise::Alphas;
use super::value::{FRESH, predicted_clean, predicted_noise};
use super::{PlanOptions, SamplingPlan, SchedulerConfig, SchedulerError, Step};

/// The plan of diffusers' `TCDScheduler`: strategic stochastic sampling, the paper's algorithm 4, with `eta` its gamma.
///
/// Each step goes along the trajectory to the timestep `floor((1 - eta) next)`, then adds noise up to the next one.
///
/// # Errors
/// When the steps do not fit the schedule, `eta` is outside [0, 1], or noise is to be predicted where nothing else is
/// left (`rescale_betas_zero_snr` with `epsilon`).
pub(super) fn tcd(
    config: &SchedulerConfig,
    options: &PlanOptions,
) -> Result<SamplingPlan, SchedulerError> {
    let timesteps = config.distilled_timesteps(options.steps)?;
    let alphas = Alphas::new(config, &timesteps, true)?;
    let eta = options.eta()?;
    let step = |i: usize| {
        let [signal, deviation] = alphas.noised(timesteps[i]);
        let clean = predicted_clean(config.prediction_type, signal, deviation);
        let noise = predicted_noise(config.prediction_type, signal, deviation);
        let next = timesteps.get(i + 1).copied().unwrap_or(0.0);
        // diffusers multiplies these in f32.
        let target = f64::from(((1.0 - eta) as f32 * next as f32).floor());
        let [signal, deviation] = alphas.noised(target);
        let kept = alphas.at(next) / alphas.at(target);
        let next = (clean * signal + noise * deviation) * kept.sqrt()
            + FRESH * (1.0 - kept).max(0.0).sqrt();
        Step::new(timesteps[i], 1.0, clean, [next])
    };
    SamplingPlan::of_runs(
        options.runs(&timesteps, 1, config)?,
        timesteps.len(),
        1.0,
        |i| alphas.noised(timesteps[i]),
        step,
    )
}
