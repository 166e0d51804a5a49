//! Linear multistep (Adams-Bashforth) on the probability-flow ODE, as k-diffusion's `sample_lms` has it.

use super::sigmas::{Sigmas, predicted_clean_at};
use super::value::{SAMPLE, Value};
use super::{PlanOptions, SamplingPlan, SchedulerConfig, SchedulerError, Step};

/// The most derivatives that a step combines.
const ORDER: usize = 4;

/// The plan of diffusers' `LMSDiscreteScheduler`: the step integrates the polynomial through the last four derivatives
/// `(x - clean) / sigma`.
///
/// A plan that starts in the middle begins with one derivative, as one that starts at the first step does. diffusers
/// takes the coefficients of four there for the one that it has, and overshoots.
///
/// # Errors
/// When the steps do not fit the schedule.
pub(super) fn lms(
    config: &SchedulerConfig,
    options: &PlanOptions,
) -> Result<SamplingPlan, SchedulerError> {
    let levels = Sigmas::new(config, options)?;
    let runs = options.runs(&levels.timesteps, 1, config)?;
    let step = |i: usize| {
        let sigma = levels.sigmas[i];
        let clean = predicted_clean_at(config.prediction_type, sigma);
        let derivative = (SAMPLE - clean) * (1.0 / sigma);
        let [first, second, third] = [0, 1, 2].map(Value::remembered);
        let derivatives = [derivative, first, second, third];
        let known = (i - runs.start + 1).min(ORDER);
        // From the newest to the oldest.
        let sigmas: Vec<f64> = (0..known).map(|k| levels.sigmas[i - k]).collect();
        let next = coefficients(&sigmas, levels.sigmas[i + 1])
            .into_iter()
            .zip(derivatives)
            .fold(SAMPLE, |sum, (c, derivative)| sum + derivative * c);
        let states = [next, derivative, first, second];
        Step::new(levels.timesteps[i], 1.0 / sigma.hypot(1.0), clean, states)
    };
    SamplingPlan::of_runs(
        runs.clone(),
        options.steps,
        levels.init_noise_sigma(config),
        |i| [1.0, levels.sigmas[i]],
        step,
    )
}

/// Integrals from `sigmas[0]` to `next` of the Lagrange polynomials through `sigmas`. Their degree is at most 3, for
/// which Gauss's rule with two points is exact.
fn coefficients(sigmas: &[f64], next: f64) -> Vec<f64> {
    let (middle, half) = ((next + sigmas[0]) / 2.0, (next - sigmas[0]) / 2.0);
    let points = [-1.0, 1.0].map(|sign| middle + sign * half / 3f64.sqrt());
    let lagrange = |j: usize, at: f64| -> f64 {
        let others = sigmas.iter().enumerate().filter(|(k, _)| *k != j);
        others
            .map(|(_, &other)| (at - other) / (sigmas[j] - other))
            .product()
    };
    (0..sigmas.len())
        .map(|j| half * points.map(|at| lagrange(j, at)).iter().sum::<f64>())
        .collect()
}
