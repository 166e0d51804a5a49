//! DPM-Solver++ with earlier predictions (Lu et al., 2022, arXiv:2211.01095, algorithm 2 and appendix B).

use super::exponential::{Integrals, Path};
use super::sigmas::Sigmas;
use super::value::{FRESH, SAMPLE, Value, predicted_clean};
use super::{FinalSigmas, PlanOptions, SamplingPlan, SchedulerConfig, SchedulerError, Step};

/// The plan of diffusers' `DPMSolverMultistepScheduler`.
///
/// # Errors
/// When the steps do not fit the schedule, or `solver_order` is not 1 to 3.
pub(super) fn dpm_multistep(
    config: &SchedulerConfig,
    options: &PlanOptions,
) -> Result<SamplingPlan, SchedulerError> {
    let order = config.solver_order()?;
    let levels = Sigmas::new(config, options)?;
    let sigmas = &levels.sigmas;
    let path = Path::of(config);
    let runs = options.runs(&levels.timesteps, 1, config)?;
    let lower = config.lower_order_final && options.steps < 15;
    let step = |i: usize| {
        let lambda = |level: usize| path.lambda(sigmas[level]);
        let to_zero = config.final_sigmas_type == FinalSigmas::Zero;
        let most = match options.steps - i {
            1 if config.euler_at_final || lower || to_zero => 1,
            2 if lower => 2,
            _ => 3,
        };
        let [signal, deviation] = path.noised(sigmas[i]);
        let clean = predicted_clean(config.prediction_type, signal, deviation);
        let [before, earlier] = [0, 1].map(Value::remembered);
        let c = Integrals::new(config, sigmas[i], sigmas[i + 1]);
        let next = SAMPLE * c.sample + clean * c.clean + FRESH * c.noise;
        let next = match order.min(most).min(i - runs.start + 1) {
            1 => next,
            2 => {
                let slope = (clean - before) * (c.h / (lambda(i) - lambda(i - 1)));
                next + slope * c.slope
            }
            _ => {
                let r0 = (lambda(i) - lambda(i - 1)) / c.h;
                let r1 = (lambda(i - 1) - lambda(i - 2)) / c.h;
                let slope = (clean - before) * (1.0 / r0);
                let change = slope - (before - earlier) * (1.0 / r1);
                next + (slope + change * (r0 / (r0 + r1))) * c.first
                    + change * (c.second / (r0 + r1))
            }
        };
        Step::new(levels.timesteps[i], 1.0, clean, [next, clean, before])
    };
    SamplingPlan::of_runs(
        runs.clone(),
        options.steps,
        1.0,
        |i| path.noised(sigmas[i]),
        step,
    )
}
