//! DPM-Solver++ in blocks of steps (Lu et al., 2022, arXiv:2211.01095, algorithm 1 and appendix B).

use super::exponential::{Integrals, Path};
use super::sigmas::Sigmas;
use super::value::{FRESH, SAMPLE, Value, predicted_clean};
use super::{
    FinalSigmas, PlanOptions, SamplingPlan, SchedulerConfig, SchedulerError, SolverType, Step,
};

/// The plan of diffusers' `DPMSolverSinglestepScheduler`.
///
/// The steps are of order 1, 2, .., `solver_order`, 1, 2, ..: those above 1 begin where the last one of order 1 did.
///
/// # Errors
/// When the steps do not fit the schedule, or `solver_order` is not 1 to 3.
pub(super) fn dpm_singlestep(
    config: &SchedulerConfig,
    options: &PlanOptions,
) -> Result<SamplingPlan, SchedulerError> {
    let order = config.solver_order()?;
    let levels = Sigmas::new(config, options)?;
    let sigmas = &levels.sigmas;
    let path = Path::of(config);
    let runs = options.runs(&levels.timesteps, 1, config)?;
    let whole_blocks = options.steps.is_multiple_of(order);
    let to_zero = config.final_sigmas_type == FinalSigmas::Zero;
    // Where blocks do not fill the steps, the last one is shorter anyway.
    let lower = config.lower_order_final && whole_blocks;
    let order_at = |i: usize| match i + 1 == options.steps && (to_zero || lower) {
        true => 1,
        false => (i % order + 1).min(i - runs.start + 1),
    };
    let step = |i: usize| {
        let [signal, deviation] = path.noised(sigmas[i]);
        let clean = predicted_clean(config.prediction_type, signal, deviation);
        let [before, earlier, kept] = [0, 1, 2].map(Value::remembered);
        let order = order_at(i);
        let from = i + 1 - order;
        let c = Integrals::new(config, sigmas[from], sigmas[i + 1]);
        let lambda = |level: usize| path.lambda(sigmas[level]);
        let part = |level: usize| (lambda(level) - lambda(from)) / c.h;
        let begin = match order {
            1 => SAMPLE,
            _ => kept,
        };
        let next = begin * c.sample + FRESH * c.noise;
        let next = match order {
            1 => next + clean * c.clean,
            2 => next + before * c.clean + (clean - before) * (c.slope / part(i)),
            _ => {
                let (r0, r1) = (part(i), part(i - 1));
                let first = (before - earlier) * (1.0 / r1);
                let second = (clean - earlier) * (1.0 / r0);
                let next = next + earlier * c.clean;
                match config.solver_type {
                    SolverType::Heun => {
                        next + (first * r0 - second * r1) * (c.first / (r0 - r1))
                            + (second - first) * (2.0 * c.second / (r0 - r1))
                    }
                    SolverType::Midpoint
                    | SolverType::Logrho
                    | SolverType::Bh1
                    | SolverType::Bh2 => next + second * c.first,
                }
            }
        };
        Step::new(
            levels.timesteps[i],
            1.0,
            clean,
            [next, clean, before, begin],
        )
    };
    SamplingPlan::of_runs(
        runs.clone(),
        options.steps,
        1.0,
        |i| path.noised(sigmas[i]),
        step,
    )
}
