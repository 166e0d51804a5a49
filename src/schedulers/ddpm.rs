//! DDPM (Ho et al., 2020, arXiv:2006.11239).

use super::noise::Alphas;
use super::timesteps::Grid;
use super::value::{FRESH, SAMPLE, predicted_clean};
use super::{PlanOptions, SamplingPlan, SchedulerConfig, SchedulerError, Step, VarianceType};

/// The plan of diffusers' `DDPMScheduler`: formula (7) with the predicted clean sample, over the steps between the
/// visited timesteps. With `a` and `p` the cumulative alphas of this and the next timestep and `b = 1 - a/p`,
/// `x_next = sqrt(p) b / (1-a) clean + sqrt(a/p) (1-p) / (1-a) x + s noise`, where `s^2` is `b (1-p) / (1-a)` or `b`.
///
/// # Errors
/// When the steps do not fit the schedule, or noise is to be predicted where nothing else is left
/// (`rescale_betas_zero_snr` with `epsilon`).
pub(super) fn ddpm(
    config: &SchedulerConfig,
    options: &PlanOptions,
) -> Result<SamplingPlan, SchedulerError> {
    let timesteps = config.timesteps(options.steps, Grid::Points, true)?;
    let alphas = Alphas::new(config, &timesteps, true)?;
    let step = |i: usize| {
        let t = timesteps[i];
        let (a, p) = (alphas.at(t), alphas.after(&timesteps, i));
        let clean = predicted_clean(config.prediction_type, a.sqrt(), (1.0 - a).sqrt());
        let beta = 1.0 - a / p;
        let small = (1.0 - p) / (1.0 - a) * beta;
        let variance = match config.variance_type {
            _ if t == 0.0 => 0.0,
            VarianceType::FixedSmall | VarianceType::FixedSmallLog => small,
            VarianceType::FixedLarge => beta,
        };
        let next = clean.clipped(config.clip_sample) * (p.sqrt() * beta / (1.0 - a))
            + SAMPLE * ((a / p).sqrt() * (1.0 - p) / (1.0 - a))
            + FRESH * variance.sqrt();
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
