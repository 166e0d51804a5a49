//! Euler's method for flow matching (Lipman et al., 2022, arXiv:2210.02747): a noisy sample is
//! `(1 - sigma) clean + sigma noise`, and the model predicts `noise - clean`, its derivative by sigma.

use super::timesteps::check_steps;
use super::value::{FRESH, MODEL, SAMPLE, predicted_clean};
use super::{
    FlowLevels, FlowShift, PlanOptions, SamplingPlan, SchedulerConfig, SchedulerError, Step,
    TimeShiftType,
};

/// The plan of diffusers' `FlowMatchEulerDiscreteScheduler` for the noise levels that `options` says; with fresh noise in
/// each step also that of its `FlowMatchLCMScheduler`.
///
/// # Errors
/// When the steps do not fit the schedule, or the noise levels cannot be shifted as the configuration says.
pub(super) fn flow_match_euler(
    config: &SchedulerConfig,
    options: &PlanOptions,
) -> Result<SamplingPlan, SchedulerError> {
    let train = config.num_train_timesteps;
    let levels = sigmas(config, options)?;
    let timesteps: Vec<f64> = levels.iter().map(|s| f64::from(s * train as f32)).collect();
    let sigma = |i: usize| levels.get(i).copied().map_or(0.0, f64::from);
    let step = |i: usize| {
        let (sigma, next) = (sigma(i), sigma(i + 1));
        let clean = predicted_clean(config.prediction_type, 1.0 - sigma, sigma);
        let next = match config.flow.stochastic_sampling {
            true => clean * (1.0 - next) + FRESH * next,
            false => SAMPLE + MODEL * (next - sigma),
        };
        Step::new(timesteps[i], 1.0, clean, [next])
    };
    SamplingPlan::of_runs(
        options.runs(&timesteps, 1, config)?,
        options.steps,
        1.0,
        |i| [1.0 - sigma(i), sigma(i)],
        step,
    )
}

/// The noise level of each step: `steps` of them, evenly from 1 to the last that the options say, then shifted.
pub(super) fn sigmas(
    config: &SchedulerConfig,
    options: &PlanOptions,
) -> Result<Vec<f32>, SchedulerError> {
    let steps = options.steps;
    check_steps(steps, "num_train_timesteps", config.num_train_timesteps)?;
    let factor = shift_factor(&config.flow, options.image_seq_len)?;
    let slope = match options.flow_levels {
        FlowLevels::OfSteps => 1.0 / steps as f64,
        FlowLevels::OfTraining if steps == 1 => 0.0,
        FlowLevels::OfTraining => (1.0 - f64::from(training_sigma(config, 0))) / (steps - 1) as f64,
    };
    let level = |i: usize| {
        let even = 1.0 - i as f64 * slope;
        factor / (factor + (1.0 / even - 1.0))
    };
    let mut sigmas: Vec<f64> = (0..steps).map(level).collect();
    if let Some(terminal) = config.flow.shift_terminal {
        stretch(&mut sigmas, terminal)?;
    }
    if let Some(space) = config.sigma_spacing() {
        sigmas = space(sigmas[0], sigmas[steps - 1], steps);
    }
    Ok(sigmas.into_iter().map(|sigma| sigma as f32).collect())
}

/// The noise levels that a model of flow matching is trained at, from the lowest to 1: those of diffusers'
/// `FlowMatchEulerDiscreteScheduler` before it is given steps, in float32. They are shifted where the shift does not
/// depend on the image. Times `num_train_timesteps` they are what the model is told.
///
/// # Errors
/// When the scheduler is one for models with betas, or there are no timesteps or absurdly many.
pub fn training_sigmas(config: &SchedulerConfig) -> Result<Vec<f32>, SchedulerError> {
    if !config.is_flow() {
        return Err(SchedulerError::Unsupported {
            field: "_class_name".to_string(),
            found: config.kind.class_name().to_string(),
            expected: "a scheduler of flow matching, such as FlowMatchEulerDiscreteScheduler"
                .to_string(),
        });
    }
    let count = config.num_train_timesteps;
    if !(1..=1_000_000).contains(&count) {
        return Err(SchedulerError::Invalid(format!(
            "num_train_timesteps = {count}; expected 1 to 1000000"
        )));
    }
    Ok((0..count).map(|t| training_sigma(config, t)).collect())
}

/// The noise level of training at a timestep, in diffusers' arithmetic.
fn training_sigma(config: &SchedulerConfig, timestep: usize) -> f32 {
    let even = (timestep + 1) as f32 / config.num_train_timesteps as f32;
    let shift = config.flow.shift;
    match config.flow.use_dynamic_shifting {
        true => even,
        false => shift as f32 * even / (1.0 + (shift - 1.0) as f32 * even),
    }
}

/// What `sigma / (1 - sigma)` is multiplied with.
pub(super) fn shift_factor(
    flow: &FlowShift,
    image_seq_len: Option<usize>,
) -> Result<f64, SchedulerError> {
    let (base, most) = (flow.base_image_seq_len, flow.max_image_seq_len);
    let factor = match (flow.use_dynamic_shifting, image_seq_len) {
        (false, _) => flow.shift,
        (true, None) => {
            return Err(SchedulerError::Invalid(
                "use_dynamic_shifting is true, and the number of the image's tokens is not known"
                    .to_string(),
            ));
        }
        (true, Some(_)) if most <= base => {
            return Err(SchedulerError::Invalid(format!(
                "max_image_seq_len = {most} is not above base_image_seq_len = {base}"
            )));
        }
        (true, Some(tokens)) => {
            let slope = (flow.max_shift - flow.base_shift) / (most - base) as f64;
            let mu = flow.base_shift + slope * (tokens as f64 - base as f64);
            match flow.time_shift_type {
                TimeShiftType::Exponential => mu.exp(),
                TimeShiftType::Linear => mu,
            }
        }
    };
    match factor > 0.0 && factor.is_finite() {
        true => Ok(factor),
        false => Err(SchedulerError::Invalid(format!(
            "noise levels shifted by a factor of {factor}; expected one above 0: look at shift, base_shift and max_shift"
        ))),
    }
}

/// Stretches the distances from 1 so that the last level is `terminal`.
pub(super) fn stretch(sigmas: &mut [f64], terminal: f64) -> Result<(), SchedulerError> {
    let distance = sigmas.last().map_or(0.0, |last| 1.0 - last);
    if !(0.0..1.0).contains(&terminal) || distance <= 0.0 {
        return Err(SchedulerError::Invalid(format!(
            "shift_terminal = {terminal} with {} steps; expected a number from 0 to 1, and more than one step",
            sigmas.len()
        )));
    }
    // In diffusers' order: samplers that cut timesteps to whole numbers show the last bit.
    let scale = distance / (1.0 - terminal);
    for sigma in sigmas {
        *sigma = 1.0 - (1.0 - *sigma) / scale;
    }
    Ok(())
}
