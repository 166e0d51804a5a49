//! Latent consistency models (Luo et al., 2023, arXiv:2310.04378).

use super::noise::Alphas;
use super::value::{FRESH, SAMPLE, predicted_clean};
use super::{PlanOptions, SamplingPlan, SchedulerConfig, SchedulerError, Step};

/// The deviation of clean samples in the boundary condition of consistency models.
const SIGMA_DATA: f64 = 0.5;

/// The plan of diffusers' `LCMScheduler`: each step goes to the clean sample and adds noise up to the next timestep.
///
/// The clean sample is `c_out clean + c_skip x`, the boundary condition of a consistency model (its formula 7 and
/// appendix C), with `c_skip = 1/4 / (s^2 + 1/4)`, `c_out = s / sqrt(s^2 + 1/4)` and `s = timestep_scaling t`.
///
/// # Errors
/// When the steps do not fit the schedule, or noise is to be predicted where nothing else is left
/// (`rescale_betas_zero_snr` with `epsilon`).
pub(super) fn lcm(
    config: &SchedulerConfig,
    options: &PlanOptions,
) -> Result<SamplingPlan, SchedulerError> {
    let timesteps = config.distilled_timesteps(options.steps)?;
    let alphas = Alphas::new(config, &timesteps, true)?;
    let step = |i: usize| {
        let t = timesteps[i];
        let [signal, deviation] = alphas.noised(t);
        let clean = predicted_clean(config.prediction_type, signal, deviation);
        let scaled = t * config.timestep_scaling;
        let size = scaled.hypot(SIGMA_DATA);
        let denoised = clean.clipped(config.clip_sample) * (scaled / size)
            + SAMPLE * (SIGMA_DATA / size).powi(2);
        let next = match timesteps.get(i + 1) {
            Some(&next) => {
                let [signal, deviation] = alphas.noised(next);
                denoised * signal + FRESH * deviation
            }
            None => denoised,
        };
        Step::new(t, 1.0, clean, [next])
    };
    SamplingPlan::of_runs(
        options.runs(&timesteps, 1, config)?,
        timesteps.len(),
        1.0,
        |i| alphas.noised(timesteps[i]),
        step,
    )
}
