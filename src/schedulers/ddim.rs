//! DDIM (Song et al., 2020, arXiv:2010.02502).

use super::{NoiseSchedule, PredictionType, SamplingPlan, SchedulerConfig, SchedulerError, Step};

/// The plan of a DDIM sampler. `eta` 0 is deterministic, 1 adds DDPM's noise.
///
/// Formula (12) with `a` and `p` the cumulative alphas of this and the next timestep and `m` the model's output:
/// `x_next = sqrt(p) x0 + d eps + s noise`, where `s = eta sqrt((1-p)/(1-a)) sqrt(1-a/p)`, formula (16), and
/// `d = sqrt(1 - p - s^2)`. `x0` and `eps` are linear in `x` and `m`:
///
/// | prediction   | `x0`                          | `eps`                         |
/// |--------------|-------------------------------|-------------------------------|
/// | epsilon      | `(x - sqrt(1-a) m) / sqrt(a)` | `m`                           |
/// | sample       | `m`                           | `(x - sqrt(a) m) / sqrt(1-a)` |
/// | v_prediction | `sqrt(a) x - sqrt(1-a) m`     | `sqrt(1-a) x + sqrt(a) m`     |
///
/// which gives the coefficients of `x` and `m`. `use_clipped_model_output` is diffusers' argument of that name: where
/// `x0` is clipped, `eps` is what remains of `x` beside the clipped `x0`, `(x - sqrt(a) x0) / sqrt(1-a)`. Without it a
/// clipped `x0` and an `eps` of the unclipped one do not add up to `x`, which strong guidance turns into inverted
/// pictures.
///
/// # Errors
/// When `steps` does not fit the schedule, `eta` is outside [0, 1], or noise is to be predicted where nothing else
/// is left (`rescale_betas_zero_snr` with `epsilon`).
pub fn ddim(
    config: &SchedulerConfig,
    steps: usize,
    eta: f64,
    use_clipped_model_output: bool,
) -> Result<SamplingPlan, SchedulerError> {
    if !(0.0..=1.0).contains(&eta) {
        return Err(SchedulerError::Invalid(format!(
            "eta = {eta}; expected 0 to 1"
        )));
    }
    let schedule = NoiseSchedule::new(config)?;
    let alphas = &schedule.alphas_cumprod;
    let timesteps = config.timesteps(steps, true)?;
    // diffusers steps back by this integer under every spacing.
    let stride = config.num_train_timesteps / steps;
    let last_alpha = if config.set_alpha_to_one {
        1.0
    } else {
        f64::from(alphas[0])
    };

    let mut rows = Vec::with_capacity(steps);
    for &timestep in &timesteps {
        let index = timestep as usize;
        let a = f64::from(alphas[index]);
        let p = index
            .checked_sub(stride)
            .map_or(last_alpha, |previous| f64::from(alphas[previous]));
        let (signal, noise) = (a.sqrt(), (1.0 - a).sqrt());
        if config.prediction_type == PredictionType::Epsilon && a == 0.0 {
            return Err(SchedulerError::Invalid(format!(
                "timestep {timestep} has no signal (rescale_betas_zero_snr), so epsilon says nothing about the \
                 sample; use v_prediction"
            )));
        }
        let variance = ((1.0 - p) / (1.0 - a) * (1.0 - a / p)).max(0.0);
        let deviation = eta * variance.sqrt();
        let direction = (1.0 - p - deviation * deviation).max(0.0).sqrt();
        let target = p.sqrt();
        let (x, model) = match config.prediction_type {
            PredictionType::Epsilon => (target / signal, direction - target * noise / signal),
            PredictionType::Sample => (direction / noise, target - direction * signal / noise),
            PredictionType::VPrediction => (
                target * signal + direction * noise,
                direction * signal - target * noise,
            ),
        };
        let (clean_x, clean_model) = match config.prediction_type {
            PredictionType::Epsilon => (1.0 / signal, -noise / signal),
            PredictionType::Sample => (0.0, 1.0),
            PredictionType::VPrediction => (signal, -noise),
        };
        let clean = if use_clipped_model_output {
            target - direction * signal / noise
        } else {
            target
        };
        let mut step = Step::memoryless(timestep as f32, 1.0, [x, model, deviation]);
        step.clean = [clean_x as f32, clean_model as f32];
        step.clip[0] = clean as f32;
        rows.push(step);
    }
    SamplingPlan {
        steps: rows,
        init_noise_sigma: 1.0,
    }
    .finite()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedulers::{NOISE, OUTPUT, TimestepSpacing};

    #[test]
    fn a_timestep_without_noise_is_refused() {
        let config = SchedulerConfig {
            beta_start: 0.0,
            prediction_type: PredictionType::Sample,
            timestep_spacing: TimestepSpacing::Linspace,
            ..SchedulerConfig::default()
        };
        let error = ddim(&config, 10, 0.0, true).unwrap_err().to_string();
        assert!(error.contains("no noise at timestep 0"), "{error}");
    }

    /// With the right prediction every step stays on the straight line of one sample and one noise.
    #[test]
    fn a_perfect_model_follows_its_trajectory() {
        for prediction_type in [
            PredictionType::Epsilon,
            PredictionType::Sample,
            PredictionType::VPrediction,
        ] {
            let config = SchedulerConfig {
                prediction_type,
                timestep_spacing: TimestepSpacing::Leading,
                ..SchedulerConfig::default()
            };
            let schedule = NoiseSchedule::new(&config).unwrap();
            let plan = ddim(&config, 10, 0.0, false).unwrap();
            let (sample, noise) = (0.7f64, -1.3f64);
            for (i, step) in plan.steps.iter().enumerate() {
                let t = step.timestep as usize;
                let (s, n) = schedule.noise_coefficients(t).unwrap();
                let x = f64::from(s) * sample + f64::from(n) * noise;
                let (s, n) = schedule.target_coefficients(t).unwrap();
                let model = f64::from(s) * sample + f64::from(n) * noise;
                let found =
                    f64::from(step.update[0][0]) * x + f64::from(step.update[0][OUTPUT]) * model;
                let next = plan
                    .steps
                    .get(i + 1)
                    .map_or(0, |next| next.timestep as usize);
                let (s, n) = schedule.noise_coefficients(next).unwrap();
                let expected = f64::from(s) * sample + f64::from(n) * noise;
                // Two roundings of coefficients to f32, of values around 1 to 10.
                assert!(
                    (found - expected).abs() < 2e-6,
                    "{prediction_type:?} {t}: {found} {expected}"
                );
            }
        }
    }

    /// Noise that is kept and noise that is added make up what the next timestep has.
    #[test]
    fn eta_1_has_the_next_timesteps_variance() {
        let config = SchedulerConfig::default();
        let schedule = NoiseSchedule::new(&config).unwrap();
        let plan = ddim(&config, 20, 1.0, false).unwrap();
        for (i, step) in plan.steps.iter().enumerate() {
            let (signal, noise) = schedule.noise_coefficients(step.timestep as usize).unwrap();
            let next = plan
                .steps
                .get(i + 1)
                .map_or(0, |next| next.timestep as usize);
            let (next_signal, next_noise) = schedule.noise_coefficients(next).unwrap();
            let (kept, model, added) = (
                step.update[0][0],
                step.update[0][OUTPUT],
                step.update[0][NOISE],
            );
            assert!(added > 0.0);
            assert!((kept * signal - next_signal).abs() < 1e-6);
            let variance = (kept * noise + model).powi(2) + added.powi(2);
            assert!(
                (variance - next_noise.powi(2)).abs() < 1e-6,
                "{variance} {next_noise}"
            );
        }
        assert!(ddim(&config, 20, 1.5, false).is_err());
    }

    #[test]
    fn epsilon_cannot_start_from_pure_noise() {
        let config = SchedulerConfig {
            rescale_betas_zero_snr: true,
            timestep_spacing: TimestepSpacing::Trailing,
            ..SchedulerConfig::default()
        };
        assert!(ddim(&config, 10, 0.0, false).is_err());
        let config = SchedulerConfig {
            prediction_type: PredictionType::VPrediction,
            ..config
        };
        let plan = ddim(&config, 10, 0.0, false).unwrap();
        assert!(plan.steps.iter().all(|s| s.update[0][0].is_finite()));
    }
}
