//! DDIM (Song et al., 2020, arXiv:2010.02502).

use super::noise::Alphas;
use super::timesteps::Grid;
use super::value::{FRESH, SAMPLE, predicted_clean, predicted_noise};
use super::{PlanOptions, SamplingPlan, SchedulerConfig, SchedulerError, Step};

/// The plan of diffusers' `DDIMScheduler`.
///
/// Formula (12) with `a` and `p` the cumulative alphas of this and the next timestep:
/// `x_next = sqrt(p) clean + sqrt(1 - p - s^2) eps + s noise`, where `s = eta sqrt((1-p)/(1-a)) sqrt(1-a/p)`, formula
/// (16). With [`PlanOptions::use_clipped_model_output`], `eps` is what remains of `x` beside the clipped prediction,
/// `(x - sqrt(a) clean) / sqrt(1-a)`. Without it a clipped prediction and an `eps` of the unclipped one do not add up
/// to `x`, which strong guidance turns into inverted images.
///
/// # Errors
/// When the steps do not fit the schedule, `eta` is outside [0, 1], or noise is to be predicted where nothing else
/// is left (`rescale_betas_zero_snr` with `epsilon`).
pub(super) fn ddim(
    config: &SchedulerConfig,
    options: &PlanOptions,
) -> Result<SamplingPlan, SchedulerError> {
    let timesteps = config.timesteps(options.steps, Grid::Points, true)?;
    let alphas = Alphas::new(config, &timesteps, config.set_alpha_to_one)?;
    let eta = options.eta()?;
    // diffusers steps back by this integer under every spacing.
    let stride = (config.num_train_timesteps / options.steps) as f64;
    let step = |i: usize| {
        let (t, kind) = (timesteps[i], config.prediction_type);
        let (a, p) = (alphas.at(t), alphas.at(t - stride));
        let (signal, deviation) = (a.sqrt(), (1.0 - a).sqrt());
        let clean = predicted_clean(kind, signal, deviation);
        let clipped = clean.clipped(config.clip_sample);
        let eps = match config.clip_sample && options.use_clipped_model_output {
            true => (SAMPLE - clipped * signal) * (1.0 / deviation),
            false => predicted_noise(kind, signal, deviation),
        };
        let variance = ((1.0 - p) / (1.0 - a) * (1.0 - a / p)).max(0.0);
        let added = eta * variance.sqrt();
        let direction = (1.0 - p - added * added).max(0.0).sqrt();
        let next = clipped * p.sqrt() + eps * direction + FRESH * added;
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
