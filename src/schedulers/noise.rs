//! The forward process: how much of a sample and how much noise there is at each training timestep.

use super::{BetaSchedule, PredictionType, SchedulerConfig, SchedulerError};

/// Cumulative products of `1 - beta`, and what follows from them.
///
/// Values are rounded to `f32` where diffusers rounds them, so that a checkpoint sees the noise levels it was
/// trained with.
#[derive(Clone, Debug, PartialEq)]
pub struct NoiseSchedule {
    /// The share of the sample's variance at each training timestep.
    pub alphas_cumprod: Vec<f32>,
    pub prediction_type: PredictionType,
}

impl NoiseSchedule {
    /// The schedule of `config`.
    ///
    /// # Errors
    /// When there are no timesteps or absurdly many, a beta is outside [0, 1], or the scheduler is one of flow matching,
    /// which has no betas.
    pub fn new(config: &SchedulerConfig) -> Result<Self, SchedulerError> {
        if config.is_flow() {
            return Err(SchedulerError::Unsupported {
                field: "_class_name".to_string(),
                found: config.kind.class_name().to_string(),
                expected: "a scheduler with betas, such as DDPMScheduler".to_string(),
            });
        }
        let alphas: Vec<f32> = betas(config)?.iter().map(|beta| 1.0 - beta).collect();
        Ok(NoiseSchedule {
            alphas_cumprod: cumulative_product(&alphas),
            prediction_type: config.prediction_type,
        })
    }

    /// Coefficients of sample and noise in a noisy sample at `timestep`: `(sqrt(alpha), sqrt(1 - alpha))`.
    ///
    /// # Errors
    /// When there is no such timestep.
    pub fn noise_coefficients(&self, timestep: usize) -> Result<(f32, f32), SchedulerError> {
        let alpha = self.alpha(timestep)?;
        Ok((alpha.sqrt(), (1.0 - alpha).sqrt()))
    }

    /// Coefficients of sample and noise in what the model should predict at `timestep`.
    ///
    /// The velocity is `sqrt(alpha) * noise - sqrt(1 - alpha) * sample`.
    ///
    /// # Errors
    /// When there is no such timestep.
    pub fn target_coefficients(&self, timestep: usize) -> Result<(f32, f32), SchedulerError> {
        let (sample, noise) = self.noise_coefficients(timestep)?;
        Ok(match self.prediction_type {
            PredictionType::Epsilon => (0.0, 1.0),
            PredictionType::Sample => (1.0, 0.0),
            PredictionType::VPrediction => (-noise, sample),
            PredictionType::FlowPrediction => (-1.0, 1.0),
        })
    }

    fn alpha(&self, timestep: usize) -> Result<f32, SchedulerError> {
        self.alphas_cumprod.get(timestep).copied().ok_or_else(|| {
            SchedulerError::Invalid(format!(
                "timestep {timestep} is not among the {} of training",
                self.alphas_cumprod.len()
            ))
        })
    }
}

/// The share of the sample's variance at the timesteps of samplers that keep the variance of training's noisy samples.
pub(super) struct Alphas {
    training: Vec<f32>,
    /// Before the first timestep of training.
    last: f64,
}

impl Alphas {
    /// Those of `config` for a sampler that visits whole `timesteps`. After the last of them comes the clean sample, or
    /// without `to_one` the first training timestep.
    ///
    /// # Errors
    /// As for [`NoiseSchedule::new`], and when noise is to be predicted where there is nothing else.
    pub fn new(
        config: &SchedulerConfig,
        timesteps: &[f64],
        to_one: bool,
    ) -> Result<Alphas, SchedulerError> {
        let training = NoiseSchedule::new(config)?.alphas_cumprod;
        let last = match to_one {
            true => 1.0,
            false => f64::from(training[0]),
        };
        let alphas = Alphas { training, last };
        let silent = timesteps.iter().find(|&&t| alphas.at(t) == 0.0);
        if let (PredictionType::Epsilon, Some(timestep)) = (config.prediction_type, silent) {
            return Err(SchedulerError::Invalid(format!(
                "timestep {timestep} has no signal (rescale_betas_zero_snr), so epsilon says nothing about the \
                 sample; use v_prediction"
            )));
        }
        Ok(alphas)
    }

    /// At a whole timestep, which may be negative.
    pub fn at(&self, timestep: f64) -> f64 {
        match timestep < 0.0 {
            true => self.last,
            false => self
                .training
                .get(timestep as usize)
                .map_or(0.0, |&a| f64::from(a)),
        }
    }

    /// At the timestep after the one of this index, where the last is followed by what follows training's.
    pub fn after(&self, timesteps: &[f64], index: usize) -> f64 {
        timesteps.get(index + 1).map_or(self.last, |&t| self.at(t))
    }

    /// Coefficients of a clean sample and of noise in a noisy one at a timestep.
    pub fn noised(&self, timestep: f64) -> [f64; 2] {
        let alpha = self.at(timestep);
        [alpha.sqrt(), (1.0 - alpha).sqrt()]
    }
}

/// The variance added at each training timestep.
///
/// # Errors
/// When there are no timesteps or absurdly many, or a beta is outside [0, 1].
pub fn betas(config: &SchedulerConfig) -> Result<Vec<f32>, SchedulerError> {
    let count = config.num_train_timesteps;
    if !(1..=1_000_000).contains(&count) {
        return Err(SchedulerError::Invalid(format!(
            "num_train_timesteps = {count}; expected 1 to 1000000"
        )));
    }
    let (start, end) = (config.beta_start, config.beta_end);
    if config.beta_schedule != BetaSchedule::SquaredcosCapV2
        && !(0.0 <= start && start <= end && end < 1.0)
    {
        return Err(SchedulerError::Invalid(format!(
            "beta_start = {start} and beta_end = {end}; expected 0 <= beta_start <= beta_end < 1"
        )));
    }
    let mut betas = match config.beta_schedule {
        BetaSchedule::Linear => linspace(start, end, count),
        BetaSchedule::ScaledLinear => linspace(start.sqrt(), end.sqrt(), count)
            .into_iter()
            .map(|root| root * root)
            .collect(),
        BetaSchedule::SquaredcosCapV2 => {
            let alpha_bar = |t: f64| {
                ((t + 0.008) / 1.008 * std::f64::consts::FRAC_PI_2)
                    .cos()
                    .powi(2)
            };
            let at = |i: usize| alpha_bar(i as f64 / count as f64);
            (0..count)
                .map(|i| (1.0 - at(i + 1) / at(i)).min(0.999) as f32)
                .collect()
        }
    };
    if config.rescale_betas_zero_snr {
        rescale_zero_terminal_snr(&mut betas);
    }
    Ok(betas)
}

/// `count` values from `start` to `end` in `f32`, counted from the nearer end, as `torch.linspace` does.
fn linspace(start: f64, end: f64, count: usize) -> Vec<f32> {
    let (start, end) = (start as f32, end as f32);
    if count == 1 {
        return vec![start];
    }
    let step = (end - start) / (count - 1) as f32;
    (0..count)
        .map(|i| {
            if i < count / 2 {
                step.mul_add(i as f32, start)
            } else {
                (-step).mul_add((count - 1 - i) as f32, end)
            }
        })
        .collect()
}

/// Products of all values up to each, accumulated in `f64` as PyTorch does on the host.
fn cumulative_product(values: &[f32]) -> Vec<f32> {
    let mut product = 1.0f64;
    values
        .iter()
        .map(|&v| {
            product *= f64::from(v);
            product as f32
        })
        .collect()
}

/// Shifts and scales `sqrt(alphas_cumprod)` so that the first value stays and the last is 0 (Lin et al., 2023,
/// algorithm 1).
fn rescale_zero_terminal_snr(betas: &mut [f32]) {
    let alphas: Vec<f32> = betas.iter().map(|beta| 1.0 - beta).collect();
    let roots: Vec<f32> = cumulative_product(&alphas)
        .iter()
        .map(|a| a.sqrt())
        .collect();
    let (first, last) = (roots[0], roots[roots.len() - 1]);
    if first == last {
        return;
    }
    let mut previous = 1.0f32;
    for (beta, root) in betas.iter_mut().zip(roots) {
        let rescaled = (root - last) * (first / (first - last));
        let alpha_bar = rescaled * rescaled;
        *beta = 1.0 - alpha_bar / previous;
        previous = alpha_bar;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedulers::SchedulerKind;

    fn sd() -> SchedulerConfig {
        SchedulerConfig::stable_diffusion(SchedulerKind::Ddim)
    }

    #[test]
    fn stable_diffusions_ends_are_the_published_ones() {
        let schedule = NoiseSchedule::new(&sd()).unwrap();
        let a = &schedule.alphas_cumprod;
        assert_eq!(a.len(), 1000);
        assert!((a[0] - 0.99915).abs() < 1e-7, "{}", a[0]);
        // diffusers' alphas_cumprod[999] for this schedule is 0.0046600.
        assert!((a[999] - 0.004_66).abs() < 1e-6, "{}", a[999]);
        assert!(a.windows(2).all(|w| w[0] > w[1]));
    }

    #[test]
    fn zero_terminal_snr_ends_in_pure_noise() {
        let config = SchedulerConfig {
            rescale_betas_zero_snr: true,
            ..sd()
        };
        let schedule = NoiseSchedule::new(&config).unwrap();
        assert_eq!(schedule.alphas_cumprod[999], 0.0);
        assert!((schedule.alphas_cumprod[0] - 0.99915).abs() < 1e-6);
    }

    #[test]
    fn targets_follow_the_prediction_type() {
        let target = |prediction_type| {
            let config = SchedulerConfig {
                prediction_type,
                ..sd()
            };
            NoiseSchedule::new(&config)
                .unwrap()
                .target_coefficients(500)
                .unwrap()
        };
        assert_eq!(target(PredictionType::Epsilon), (0.0, 1.0));
        assert_eq!(target(PredictionType::Sample), (1.0, 0.0));
        let (sample, noise) = target(PredictionType::VPrediction);
        assert!(sample < 0.0 && noise > 0.0);
        assert!((sample * sample + noise * noise - 1.0).abs() < 1e-6);
    }

    #[test]
    fn bad_betas_and_timesteps_are_refused() {
        let config = SchedulerConfig {
            beta_start: 0.5,
            beta_end: 0.1,
            ..sd()
        };
        assert!(NoiseSchedule::new(&config).is_err());
        let schedule = NoiseSchedule::new(&sd()).unwrap();
        let error = schedule.noise_coefficients(1000).unwrap_err();
        assert!(error.to_string().contains("timestep 1000"), "{error}");
    }
}
