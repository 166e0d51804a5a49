//! PLMS: the linear multistep part of PNDM (Liu et al., 2022, arXiv:2202.09778).

use super::noise::Alphas;
use super::timesteps::Grid;
use super::value::{MODEL, SAMPLE, Value, predicted_clean};
use super::{PlanOptions, PredictionType, SamplingPlan, SchedulerConfig, SchedulerError, Step};

/// The plan of diffusers' `PNDMScheduler` with `skip_prk_steps`.
///
/// The model runs twice at the second timestep: the first step is made again from where it began, with the mean of the
/// outputs at both its ends. Then each step combines the last four outputs. With `a` and `p` the cumulative alphas of
/// this and the next timestep and `m` what is combined, as noise, formula (9) of the paper is
/// `x_next = sqrt(p/a) x - (p - a) m / (a sqrt(1-p) + sqrt(a (1-a) p))`.
///
/// A plan that starts in the middle begins the same way with the runs that are left, as diffusers does: the second of
/// them is taken for a repetition of the first, so that from then on the model gets the timestep of one step before.
///
/// # Errors
/// When the steps do not fit the schedule.
pub(super) fn pndm(
    config: &SchedulerConfig,
    options: &PlanOptions,
) -> Result<SamplingPlan, SchedulerError> {
    config.predicts_noise_or_velocity()?;
    let mut timesteps = config.timesteps(options.steps, Grid::Points, true)?;
    if let Some(&second) = timesteps.get(1) {
        timesteps.insert(2, second);
    }
    let alphas = Alphas::new(config, &timesteps, config.set_alpha_to_one)?;
    let stride = (config.num_train_timesteps / options.steps) as f64;
    let runs = options.runs(&timesteps, 1, config)?;
    let step = |i: usize| {
        let t = timesteps[i];
        let done = i - runs.start;
        let [first, second, third] = [0, 1, 2].map(Value::remembered);
        let (from, begin, output, remembered) = match done {
            // The second slot keeps the sample for the run after this.
            0 => (t, SAMPLE, MODEL, [MODEL, SAMPLE, second]),
            1 => (
                t + stride,
                second,
                (MODEL + first) * 0.5,
                [first, second, third],
            ),
            _ => {
                let output = match done {
                    2 => (MODEL * 3.0 - first) * (1.0 / 2.0),
                    3 => (MODEL * 23.0 - first * 16.0 + second * 5.0) * (1.0 / 12.0),
                    _ => (MODEL * 55.0 - first * 59.0 + second * 37.0 - third * 9.0) * (1.0 / 24.0),
                };
                (t, SAMPLE, output, [MODEL, first, second])
            }
        };
        let (a, p) = (alphas.at(from), alphas.at(from - stride));
        let noise = match config.prediction_type {
            PredictionType::VPrediction => output * a.sqrt() + begin * (1.0 - a).sqrt(),
            PredictionType::Epsilon | PredictionType::Sample | PredictionType::FlowPrediction => {
                output
            }
        };
        let divisor = a * (1.0 - p).sqrt() + (a * (1.0 - a) * p).sqrt();
        let next = begin * (p / a).sqrt() - noise * ((p - a) / divisor);
        let here = alphas.at(t);
        let clean = predicted_clean(config.prediction_type, here.sqrt(), (1.0 - here).sqrt());
        let [one, two, three] = remembered;
        Step::new(t, 1.0, clean, [next, one, two, three])
    };
    SamplingPlan::of_runs(
        runs.clone(),
        timesteps.len(),
        1.0,
        |i| alphas.noised(timesteps[i]),
        step,
    )
}
