//! What a step draws, and what the model is to predict of it.

use std::f64::consts::PI;

use crate::graph::{Builder, GraphError, Tensor};
use crate::schedulers::{NoiseSchedule, PredictionType, SchedulerConfig, training_sigmas};

use super::StepError;

/// The objective of a training step, by the model's noise process.
#[derive(Clone, Debug, PartialEq)]
pub enum Objective {
    /// A model with a schedule of betas predicts noise, velocity or sample (Ho et al. 2020, equation 14).
    Ddpm(DdpmObjective),
    /// A model of flow matching predicts the noise less the clean sample (Esser et al. 2024, arXiv:2403.03206).
    FlowMatching(FlowMatching),
}

/// The objective of a model with a schedule of betas.
#[derive(Clone, Debug, PartialEq)]
pub struct DdpmObjective {
    pub timesteps: Timesteps,
    pub loss_weighting: LossWeighting,
    /// The deviation of a constant that is added to the noise of each channel.
    pub noise_offset: f64,
    /// The deviation of noise that is added to the noise in the model's input alone.
    pub input_perturbation: f64,
}

impl Default for DdpmObjective {
    fn default() -> Self {
        DdpmObjective {
            timesteps: Timesteps::Uniform,
            loss_weighting: LossWeighting::None,
            noise_offset: 0.0,
            input_perturbation: 0.0,
        }
    }
}

/// The objective of a model of flow matching: a noisy sample is `(1 - sigma) clean + sigma noise`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlowMatching {
    pub weighting: WeightingScheme,
    /// Whether the error is that of the clean sample, which is `sigma` times that of the prediction: diffusers'
    /// `precondition_outputs`.
    pub precondition_outputs: bool,
}

/// Which timesteps training draws.
#[derive(Clone, Debug, PartialEq)]
pub enum Timesteps {
    /// All alike.
    Uniform,
    /// Timestep `t` with probability `weights[t] / sum(weights)`.
    Weighted(Vec<f64>),
}

/// The weight of a sample's error at its timestep.
///
/// Weights are of the squared error of the clean sample; that of another prediction is the clean sample's times `SNR`
/// (noise), `SNR + 1` (velocity) or `(sqrt(SNR) + 1)^2` (velocity of flow matching), with
/// `SNR = alphas_cumprod / (1 - alphas_cumprod)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LossWeighting {
    /// The squared error of what the model predicts, as it is.
    None,
    /// `min(SNR, gamma)`: Hang et al. 2023, section 3.4.
    MinSnr { gamma: f64 },
    /// `min(SNR, gamma) + 1`: the error of the velocity (Salimans and Ho 2022, section 4, "SNR+1"), capped alike. At
    /// high noise it does not vanish, as min-SNR's does.
    SnrPlusOne { gamma: f64 },
    /// The error of the noise times `1 / sqrt(SNR)`, that of the velocity times `1 / (SNR + 1)`, with the ratio capped at
    /// 1000: kohya's `debiased_estimation_loss`, after Yu et al., "Unmasking bias in diffusion model training", 2024.
    Debiased,
}

/// The cap of the ratio in [`LossWeighting::Debiased`].
const DEBIASED_CAP: f64 = 1000.0;

impl LossWeighting {
    /// The factor of the prediction's squared error where the schedule has `alpha_cumprod`; `None` for no weighting.
    fn factor(self, prediction: PredictionType, alpha_cumprod: f64) -> Option<f64> {
        let snr = alpha_cumprod / (1.0 - alpha_cumprod);
        let clean = match self {
            LossWeighting::None => return None,
            LossWeighting::MinSnr { gamma } => snr.min(gamma),
            LossWeighting::SnrPlusOne { gamma } => snr.min(gamma) + 1.0,
            LossWeighting::Debiased => {
                let snr = snr.min(DEBIASED_CAP);
                return Some(match prediction {
                    PredictionType::Epsilon => 1.0 / snr.sqrt(),
                    PredictionType::VPrediction => 1.0 / (snr + 1.0),
                    PredictionType::Sample | PredictionType::FlowPrediction => f64::NAN,
                });
            }
        };
        Some(match prediction {
            PredictionType::Sample => clean,
            // min(SNR, gamma) / SNR is 1 where SNR is 0; SnrPlusOne has no limit there.
            PredictionType::Epsilon if snr == 0.0 && clean == 0.0 => 1.0,
            PredictionType::Epsilon => clean / snr,
            PredictionType::VPrediction => clean / (snr + 1.0),
            PredictionType::FlowPrediction => clean / (snr.sqrt() + 1.0).powi(2),
        })
    }
}

/// Which noise levels a model of flow matching sees how often, and how much each counts: diffusers'
/// `compute_density_for_timestep_sampling` and `compute_loss_weighting_for_sd3`, after Esser et al. 2024, section 3.1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WeightingScheme {
    /// All alike.
    None,
    /// All alike, and errors count `1 / sigma^2` times.
    SigmaSqrt,
    /// The logistic function of a normal draw: levels in the middle more often.
    LogitNormal { mean: f64, std: f64 },
    /// `1 - u - scale (cos^2(pi u / 2) - 1 + u)` of a uniform draw `u`.
    Mode { scale: f64 },
    /// All alike, and errors count `2 / (pi (1 - 2 sigma + 2 sigma^2))` times.
    Cosmap,
}

impl WeightingScheme {
    /// Whether it makes levels of unit normal draws, and not of uniform ones.
    pub fn is_normal(self) -> bool {
        match self {
            WeightingScheme::LogitNormal { .. } => true,
            WeightingScheme::None
            | WeightingScheme::SigmaSqrt
            | WeightingScheme::Mode { .. }
            | WeightingScheme::Cosmap => false,
        }
    }

    /// Places in training's noise levels, 0 for the highest and 1 for the lowest, of `draws` `f32[batch]`.
    ///
    /// # Errors
    /// None: the shapes are those of the draws.
    pub fn density(self, b: &Builder, draws: Tensor) -> Result<Tensor, GraphError> {
        match self {
            WeightingScheme::None | WeightingScheme::SigmaSqrt | WeightingScheme::Cosmap => {
                Ok(draws)
            }
            WeightingScheme::LogitNormal { mean, std } => {
                b.logistic(b.add_scalar(b.mul_scalar(draws, std)?, mean)?)
            }
            WeightingScheme::Mode { scale } => {
                let angle = b.mul_scalar(b.mul_scalar(draws, PI)?, 0.5)?;
                let curve = b.add_scalar(b.square(b.cos(angle)?)?, -1.0)?;
                let curve = b.mul_scalar(b.add(curve, draws)?, scale)?;
                let even = b.add_scalar(b.neg(draws)?, 1.0)?;
                b.sub(even, curve)
            }
        }
    }

    /// The factor of the prediction's squared error at a noise level; `None` where all count alike.
    pub fn loss_weight(self, sigma: f64) -> Option<f64> {
        match self {
            WeightingScheme::SigmaSqrt => Some(sigma.powi(-2)),
            WeightingScheme::Cosmap => Some(2.0 / (PI * (1.0 - 2.0 * sigma + 2.0 * sigma * sigma))),
            WeightingScheme::None
            | WeightingScheme::LogitNormal { .. }
            | WeightingScheme::Mode { .. } => None,
        }
    }
}

/// What each timestep stands for.
pub(super) struct Levels {
    /// The coefficients of the clean sample and of the noise in the model's input.
    pub input: [Vec<f32>; 2],
    /// The same in what the model is to predict.
    pub target: [Vec<f32>; 2],
    /// The factors of the squared error, where it has any.
    pub weights: Option<Vec<f32>>,
    /// What the model is told, where that is not the timestep itself.
    pub told: Option<Vec<f32>>,
}

impl Objective {
    /// The same without weights, and without what else changes noise.
    pub(super) fn plain(&self) -> Objective {
        match self {
            Objective::Ddpm(_) => Objective::Ddpm(DdpmObjective::default()),
            Objective::FlowMatching(_) => Objective::FlowMatching(FlowMatching {
                weighting: WeightingScheme::None,
                precondition_outputs: false,
            }),
        }
    }

    /// All timesteps of `scheduler`, from little noise to much.
    ///
    /// # Errors
    /// When the scheduler is of another noise process, or a timestep has no finite weight.
    pub(super) fn levels(&self, scheduler: &SchedulerConfig) -> Result<Levels, StepError> {
        match self {
            Objective::Ddpm(objective) => objective.levels(scheduler),
            Objective::FlowMatching(objective) => objective.levels(scheduler),
        }
    }
}

impl DdpmObjective {
    fn levels(&self, scheduler: &SchedulerConfig) -> Result<Levels, StepError> {
        let prediction = scheduler.prediction_type;
        if self.loss_weighting == LossWeighting::Debiased
            && !matches!(
                prediction,
                PredictionType::Epsilon | PredictionType::VPrediction
            )
        {
            return Err(StepError::Debiased(prediction));
        }
        let schedule = NoiseSchedule::new(scheduler)?;
        let mut columns: [Vec<f32>; 4] = Default::default();
        let mut weights = Vec::new();
        for (t, alpha_cumprod) in schedule.alphas_cumprod.iter().enumerate() {
            let alpha_cumprod = f64::from(*alpha_cumprod);
            if let Some(weight) = self.loss_weighting.factor(prediction, alpha_cumprod) {
                if !weight.is_finite() {
                    return Err(StepError::LossWeight { timestep: t });
                }
                weights.push(weight as f32);
            }
            let (sample, noise) = schedule.noise_coefficients(t)?;
            let (target_sample, target_noise) = schedule.target_coefficients(t)?;
            for (column, value) in
                columns
                    .iter_mut()
                    .zip([sample, noise, target_sample, target_noise])
            {
                column.push(value);
            }
        }
        let [sample, noise, target_sample, target_noise] = columns;
        Ok(Levels {
            input: [sample, noise],
            target: [target_sample, target_noise],
            weights: (!weights.is_empty()).then_some(weights),
            told: None,
        })
    }
}

impl FlowMatching {
    fn levels(&self, scheduler: &SchedulerConfig) -> Result<Levels, StepError> {
        let sigmas = training_sigmas(scheduler)?;
        let weight = |sigma: &f32| {
            let sigma = f64::from(*sigma);
            let scheme = self.weighting.loss_weight(sigma);
            match self.precondition_outputs {
                true => Some(scheme.unwrap_or(1.0) * sigma * sigma),
                false => scheme,
            }
        };
        let weights: Option<Vec<f32>> =
            sigmas.iter().map(|s| weight(s).map(|w| w as f32)).collect();
        let steps = scheduler.num_train_timesteps as f32;
        Ok(Levels {
            input: [sigmas.iter().map(|s| 1.0 - s).collect(), sigmas.clone()],
            target: [vec![-1.0; sigmas.len()], vec![1.0; sigmas.len()]],
            weights,
            told: Some(sigmas.iter().map(|s| s * steps).collect()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::LossWeighting::{MinSnr, None as Unweighted, SnrPlusOne};
    use super::PredictionType::{Epsilon, Sample, VPrediction};

    /// The factors turn the error of any prediction into the same weighted error of the clean sample: with
    /// `x_t = a x + s n`, an error `e` of the sample is one of `e a / s` of the noise and of `e / s` of the velocity.
    #[test]
    fn weights_mean_the_same_for_every_prediction() {
        for alpha_cumprod in [0.01, 0.3, 0.5, 0.9, 0.999] {
            let snr: f64 = alpha_cumprod / (1.0 - alpha_cumprod);
            for weighting in [MinSnr { gamma: 5.0 }, SnrPlusOne { gamma: 5.0 }] {
                let of = |prediction| weighting.factor(prediction, alpha_cumprod).unwrap();
                let clean = of(Sample);
                assert!((of(Epsilon) * snr - clean).abs() < 1e-12);
                assert!((of(VPrediction) * (snr + 1.0) - clean).abs() < 1e-12);
            }
            let of = |weighting: super::LossWeighting| weighting.factor(Sample, alpha_cumprod);
            assert_eq!(of(Unweighted), None);
            assert_eq!(of(MinSnr { gamma: 5.0 }), Some(snr.min(5.0)));
            assert_eq!(of(SnrPlusOne { gamma: 5.0 }), Some(snr.min(5.0) + 1.0));
        }
        // Uncapped, SNR + 1 is the plain error of the velocity.
        let uncapped = SnrPlusOne {
            gamma: f64::INFINITY,
        };
        assert!((uncapped.factor(VPrediction, 0.9).unwrap() - 1.0).abs() < 1e-12);
        // kohya's apply_debiased_estimation.
        let debiased = |prediction, alpha| super::LossWeighting::Debiased.factor(prediction, alpha);
        assert!((debiased(Epsilon, 0.8).unwrap() - 0.5).abs() < 1e-12);
        assert!((debiased(VPrediction, 0.8).unwrap() - 0.2).abs() < 1e-12);
        assert_eq!(debiased(Epsilon, 1.0), Some(1.0 / 1000f64.sqrt()));
        assert!(!debiased(Epsilon, 0.0).unwrap().is_finite());
        // Pure noise: min-SNR has a limit for a prediction of the noise, SNR + 1 has none.
        assert_eq!(MinSnr { gamma: 5.0 }.factor(Epsilon, 0.0), Some(1.0));
        assert!(!uncapped.factor(Epsilon, 0.0).unwrap().is_finite());
    }
}
