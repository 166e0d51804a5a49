//! Noise schedules and samplers.
//!
//! Everything here runs on the host and makes tables of numbers. The program on the device does one step, whatever the
//! sampler, the number of steps and the schedule. With the states `s` (the sample first, then what multistep samplers
//! remember of earlier steps) it computes
//!
//! ```text
//! output = model(in_scale * s[0], timestep)
//! next   = update @ [s[0], .., s[STATES - 1], output, noise]
//! ```
//!
//! and, where the predicted clean sample is clipped (`clip_sample`),
//!
//! ```text
//! clean = clean[0] * s[0] + clean[1] * output
//! next += clip * (clamp(clean, -1, 1) - clean)
//! ```
//!
//! All samplers here are linear in these values, so that a [`Step`] is a run-time input, and none of these choices
//! compiles anything again.

mod ddim;
mod euler;
mod noise;

pub use ddim::ddim;
pub use euler::euler_discrete;
pub use noise::{NoiseSchedule, betas};

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value, json};

/// Why a schedule cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum SchedulerError {
    #[error("the scheduler's configuration is not valid: {0}")]
    Parse(#[from] serde_json::Error),
    #[error("scheduler: {field} = {found} is not supported; expected {expected}")]
    Unsupported {
        field: String,
        found: String,
        expected: String,
    },
    #[error("scheduler: {0}")]
    Invalid(String),
}

/// How betas grow over the training timesteps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BetaSchedule {
    /// Linear from `beta_start` to `beta_end`.
    Linear,
    /// The square of a linear ramp between the roots: Stable Diffusion's.
    ScaledLinear,
    /// From a squared cosine of the cumulative product (Nichol and Dhariwal, 2021), each beta at most 0.999.
    SquaredcosCapV2,
}

/// What the model predicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PredictionType {
    /// The noise.
    Epsilon,
    /// `sqrt(alpha) * noise - sqrt(1 - alpha) * sample` (Salimans and Ho, 2022).
    VPrediction,
    /// The clean sample.
    Sample,
}

/// Which training timesteps a sampler visits (Lin et al., 2023, table 2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TimestepSpacing {
    /// From the first to the last.
    Linspace,
    /// Multiples of an integer step, plus `steps_offset`.
    Leading,
    /// Back from the last by a fractional step.
    Trailing,
}

/// Euler's last noise level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinalSigmas {
    Zero,
    /// That of the first training timestep.
    SigmaMin,
}

/// Attributes of a schedule, with the names of diffusers' `scheduler_config.json`.
///
/// Defaults are Stable Diffusion's. Deserializing refuses by name the values of known fields that ask for something
/// that is not built here; fields of other schedulers are ignored, as diffusers does when it makes one scheduler
/// from the configuration of another.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self", default)]
pub struct SchedulerConfig {
    pub num_train_timesteps: usize,
    pub beta_start: f64,
    pub beta_end: f64,
    pub beta_schedule: BetaSchedule,
    pub prediction_type: PredictionType,
    pub timestep_spacing: TimestepSpacing,
    /// Added to the timesteps of [`TimestepSpacing::Leading`].
    pub steps_offset: usize,
    /// Whether betas are rescaled so that the last timestep is pure noise (Lin et al., 2023, algorithm 1).
    pub rescale_betas_zero_snr: bool,
    /// DDIM: whether the last step goes to the clean sample, or to the first training timestep.
    pub set_alpha_to_one: bool,
    /// Euler: where the last step goes.
    pub final_sigmas_type: FinalSigmas,
    /// DDIM: whether each step clips the predicted clean sample to [-1, 1], for models of pixels.
    pub clip_sample: bool,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        SchedulerConfig {
            num_train_timesteps: 1000,
            beta_start: 0.00085,
            beta_end: 0.012,
            beta_schedule: BetaSchedule::ScaledLinear,
            prediction_type: PredictionType::Epsilon,
            timestep_spacing: TimestepSpacing::Leading,
            steps_offset: 1,
            rescale_betas_zero_snr: false,
            set_alpha_to_one: false,
            final_sigmas_type: FinalSigmas::Zero,
            clip_sample: false,
        }
    }
}

impl SchedulerConfig {
    /// Reads and checks a `scheduler_config.json`.
    ///
    /// # Errors
    /// When it is not JSON of the expected types, or asks for something that is not built here.
    pub fn from_json(text: &str) -> Result<Self, SchedulerError> {
        Self::from_map(serde_json::from_str(text)?)
    }

    /// Reads and checks the fields of a `scheduler_config.json`.
    ///
    /// # Errors
    /// As for [`SchedulerConfig::from_json`].
    pub fn from_map(mut fields: Map<String, Value>) -> Result<Self, SchedulerError> {
        fields.retain(|_, value| !value.is_null());
        let fixed = [
            ("clip_sample_range", json!(1.0)),
            ("thresholding", json!(false)),
            ("use_karras_sigmas", json!(false)),
            ("use_exponential_sigmas", json!(false)),
            ("use_beta_sigmas", json!(false)),
            ("interpolation_type", json!("linear")),
            ("timestep_type", json!("discrete")),
            ("trained_betas", Value::Null),
            ("sigma_min", Value::Null),
            ("sigma_max", Value::Null),
        ];
        for (field, expected) in fixed {
            if let Some(found) = fields.get(field).filter(|found| **found != expected) {
                return Err(SchedulerError::Unsupported {
                    field: field.to_string(),
                    found: found.to_string(),
                    expected: expected.to_string(),
                });
            }
        }
        Ok(Self::deserialize(Value::Object(fields))?)
    }

    /// The integer training timesteps a sampler of `steps` steps visits, from noisy to clean; fractional for
    /// [`TimestepSpacing::Linspace`] unless `round`.
    fn timesteps(&self, steps: usize, round: bool) -> Result<Vec<f64>, SchedulerError> {
        let train = self.num_train_timesteps;
        if steps == 0 || steps > train {
            return Err(SchedulerError::Invalid(format!(
                "{steps} inference steps; expected 1 to num_train_timesteps = {train}"
            )));
        }
        let timesteps: Vec<f64> = match self.timestep_spacing {
            TimestepSpacing::Linspace => {
                let stride = if steps == 1 {
                    0.0
                } else {
                    (train - 1) as f64 / (steps - 1) as f64
                };
                let value = |i: usize| {
                    let value = if i + 1 == steps && steps > 1 {
                        (train - 1) as f64
                    } else {
                        i as f64 * stride
                    };
                    if round {
                        value.round_ties_even()
                    } else {
                        value
                    }
                };
                (0..steps).rev().map(value).collect()
            }
            TimestepSpacing::Leading => {
                let ratio = train / steps;
                (0..steps)
                    .rev()
                    .map(|i| (i * ratio + self.steps_offset) as f64)
                    .collect()
            }
            TimestepSpacing::Trailing => {
                let ratio = train as f64 / steps as f64;
                (0..steps)
                    .map(|i| (train as f64 - i as f64 * ratio).round_ties_even() - 1.0)
                    .collect()
            }
        };
        if timesteps[0] > (train - 1) as f64 {
            return Err(SchedulerError::Invalid(format!(
                "steps_offset = {} with {steps} steps starts at timestep {}; the last training timestep is {}",
                self.steps_offset,
                timesteps[0],
                train - 1
            )));
        }
        Ok(timesteps)
    }
}

impl<'de> Deserialize<'de> for SchedulerConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let fields = Map::deserialize(deserializer)?;
        Self::from_map(fields).map_err(serde::de::Error::custom)
    }
}

impl Serialize for SchedulerConfig {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Self::serialize(self, serializer)
    }
}

/// Values of the sample's size that live from step to step: the sample, and [`HISTORY`] more.
pub const STATES: usize = 1 + HISTORY;

/// What multistep samplers remember: earlier outputs of the model, or the sample before the last step.
pub const HISTORY: usize = 4;

/// The coefficients of one new state: of each old state, then of the model's output, then of fresh unit normal noise.
pub type Row = [f32; STATES + 2];

/// The column of the model's output in a [`Row`].
pub const OUTPUT: usize = STATES;

/// The column of the noise in a [`Row`].
pub const NOISE: usize = STATES + 1;

/// One run of the model and what is made of it: see the module's description.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// What the model is told, in training timesteps.
    pub timestep: f32,
    /// Scales the sample before it goes into the model.
    pub in_scale: f32,
    /// Coefficients of the sample and of the model's output in the predicted clean sample.
    pub clean: [f32; 2],
    /// What each new state gains by a unit that clipping adds to the predicted clean sample.
    pub clip: [f32; STATES],
    /// How each new state is made.
    pub update: [Row; STATES],
}

impl Step {
    /// A step of a sampler without memory: the next sample is `x` times the sample, `model` times the model's output
    /// and `noise` times fresh noise.
    pub(crate) fn memoryless(timestep: f32, in_scale: f32, [x, model, noise]: [f64; 3]) -> Step {
        let mut update = [[0.0; STATES + 2]; STATES];
        update[0][0] = x as f32;
        update[0][OUTPUT] = model as f32;
        update[0][NOISE] = noise as f32;
        Step {
            timestep,
            in_scale,
            clean: [0.0; 2],
            clip: [0.0; STATES],
            update,
        }
    }

    /// Whether the step adds fresh noise.
    pub fn is_noisy(&self) -> bool {
        self.update.iter().any(|row| row[NOISE] != 0.0)
    }
}

/// All steps of one sampler, from noisy to clean.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingPlan {
    pub steps: Vec<Step>,
    /// Scales unit normal noise to the first sample.
    pub init_noise_sigma: f32,
}

impl SamplingPlan {
    /// The plan, if all its numbers are finite: a schedule that adds no noise at a timestep divides by it there, and
    /// every picture would be NaN.
    fn finite(self) -> Result<Self, SchedulerError> {
        let bad = self.steps.iter().find(|step| {
            let mut numbers = [step.in_scale]
                .into_iter()
                .chain(step.clean)
                .chain(step.clip)
                .chain(step.update.into_iter().flatten());
            !numbers.all(f32::is_finite)
        });
        match bad {
            None => Ok(self),
            Some(step) => Err(SchedulerError::Invalid(format!(
                "the schedule has no noise at timestep {}, which the sampler's formula divides by; make beta_start \
                 larger than 0, or choose another timestep_spacing",
                step.timestep
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(spacing: TimestepSpacing) -> SchedulerConfig {
        SchedulerConfig {
            timestep_spacing: spacing,
            ..SchedulerConfig::default()
        }
    }

    #[test]
    fn spacings_follow_their_definitions() {
        let steps = |spacing, n| config(spacing).timesteps(n, true).unwrap();
        assert_eq!(
            steps(TimestepSpacing::Leading, 4),
            [751.0, 501.0, 251.0, 1.0]
        );
        assert_eq!(
            steps(TimestepSpacing::Trailing, 4),
            [999.0, 749.0, 499.0, 249.0]
        );
        assert_eq!(
            steps(TimestepSpacing::Linspace, 4),
            [999.0, 666.0, 333.0, 0.0]
        );
        assert_eq!(steps(TimestepSpacing::Linspace, 1), [0.0]);
        assert_eq!(steps(TimestepSpacing::Trailing, 3), [999.0, 666.0, 332.0]);
    }

    #[test]
    fn step_counts_are_checked() {
        for steps in [0, 1001] {
            assert!(
                config(TimestepSpacing::Leading)
                    .timesteps(steps, true)
                    .is_err()
            );
        }
        // 1000 steps from offset 1 would start one past the last timestep.
        let error = config(TimestepSpacing::Leading)
            .timesteps(1000, true)
            .unwrap_err();
        assert!(
            error.to_string().contains("starts at timestep 1000"),
            "{error}"
        );
    }

    #[test]
    fn reads_sdxls_configuration_and_refuses_what_is_not_built() {
        let text = r#"{"_class_name": "EulerDiscreteScheduler", "_diffusers_version": "0.19.0.dev0",
            "beta_end": 0.012, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "clip_sample": false,
            "interpolation_type": "linear", "num_train_timesteps": 1000, "prediction_type": "epsilon",
            "sample_max_value": 1.0, "set_alpha_to_one": false, "skip_prk_steps": true, "steps_offset": 1,
            "timestep_spacing": "leading", "trained_betas": null, "use_karras_sigmas": false}"#;
        assert_eq!(
            SchedulerConfig::from_json(text).unwrap(),
            SchedulerConfig::default()
        );
        let error = SchedulerConfig::from_json(r#"{"thresholding": true}"#).unwrap_err();
        assert_eq!(
            error.to_string(),
            "scheduler: thresholding = true is not supported; expected false"
        );
        assert!(SchedulerConfig::from_json(r#"{"beta_schedule": "sigmoid"}"#).is_err());
    }
}
