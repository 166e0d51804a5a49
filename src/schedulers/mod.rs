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

mod config;
mod ddim;
mod ddpm;
mod dpm_multistep;
mod dpm_singlestep;
mod euler;
mod euler_ancestral;
mod exponential;
mod flow_match_euler;
mod flow_match_heun;
mod heun;
mod kdpm2;
mod lcm;
mod lms;
mod noise;
mod options;
mod pndm;
mod sigmas;
mod tcd;
mod timesteps;
mod unipc;
mod value;

pub use config::{
    AlgorithmType, BetaSchedule, FinalSigmas, FlowShift, PredictionType, SchedulerConfig,
    SchedulerKind, SolverType, TimeShiftType, TimestepSpacing, TimestepType, VarianceType,
    scheduler_fields,
};
pub use flow_match_euler::training_sigmas;
pub use noise::{NoiseSchedule, betas};
pub use options::{FlowLevels, PlanOptions, Start};

use std::ops::Range;

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

/// Values of the sample's size that live from step to step: the sample, and [`HISTORY`] more.
pub const STATES: usize = 1 + HISTORY;

/// The memory of samplers: values computed from earlier outputs of the model, and the sample before an earlier run.
/// UniPC of order 3 needs all of it.
pub const HISTORY: usize = 4;

/// The coefficients of one new state: of each old state, then of the model's output, then of fresh unit normal noise.
pub type Row = [f32; STATES + 2];

/// The column of the model's output in a [`Row`].
pub const OUTPUT: usize = STATES;

/// The column of the noise in a [`Row`].
pub const NOISE: usize = STATES + 1;

/// One run of the model and the update after it: see the module's description.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// The model's timestep input, in training timesteps.
    pub timestep: f32,
    /// Scales the sample before it goes into the model.
    pub in_scale: f32,
    /// Coefficients of the sample and of the model's output in the predicted clean sample.
    pub clean: [f32; 2],
    /// The change of each new state for a unit that clipping adds to the predicted clean sample; 0 without clipping.
    pub clip: [f32; STATES],
    /// How each new state is made.
    pub update: [Row; STATES],
    /// Coefficients of a clean image and of unit normal noise whose sum has the noise level of the next sample, which
    /// masked inpainting puts in place of the part that is kept: diffusers' `add_noise` at the timestep of the next
    /// run. `[1, 0]` after the last step of the schedule, also where the schedule ends above the clean sample; a plan
    /// that stops earlier has the level of the run that would follow.
    pub noised: [f32; 2],
}

impl Step {
    /// Whether the step adds fresh noise.
    pub fn is_noisy(&self) -> bool {
        self.update.iter().any(|row| row[NOISE] != 0.0)
    }
}

/// The steps of one sampler, from noisy to clean.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingPlan {
    pub steps: Vec<Step>,
    /// Scales unit normal noise to the first sample of a plan that starts from nothing else.
    pub init_noise_sigma: f32,
    /// Coefficients of a clean image and of unit normal noise that make the first sample of a plan that starts from an
    /// image: diffusers' `add_noise` at the first timestep. `[sqrt(alpha), sqrt(1 - alpha)]` for samplers that keep the
    /// variance of training's noisy samples, `[1, sigma]` for those that scale them, `[1 - sigma, sigma]` for flow
    /// matching.
    pub noised: [f32; 2],
    /// Whether it starts where the schedule does, from nothing but noise.
    pub is_whole: bool,
}

impl SchedulerConfig {
    /// The numbers of every step that `options` asks for.
    ///
    /// # Errors
    /// When the steps do not fit the schedule, none of them is left to run, or a number would not be finite.
    pub fn plan(&self, options: &PlanOptions) -> Result<SamplingPlan, SchedulerError> {
        match self.kind {
            SchedulerKind::Ddim => ddim::ddim(self, options),
            SchedulerKind::Ddpm => ddpm::ddpm(self, options),
            SchedulerKind::Pndm => pndm::pndm(self, options),
            SchedulerKind::Euler => euler::euler(self, options),
            SchedulerKind::EulerAncestral => euler_ancestral::euler_ancestral(self, options),
            SchedulerKind::Heun => heun::heun(self, options),
            SchedulerKind::Kdpm2 | SchedulerKind::Kdpm2Ancestral => kdpm2::kdpm2(self, options),
            SchedulerKind::Lms => lms::lms(self, options),
            SchedulerKind::DpmMultistep => dpm_multistep::dpm_multistep(self, options),
            SchedulerKind::DpmSinglestep => dpm_singlestep::dpm_singlestep(self, options),
            SchedulerKind::UniPc => unipc::unipc(self, options),
            SchedulerKind::Lcm => lcm::lcm(self, options),
            SchedulerKind::Tcd => tcd::tcd(self, options),
            SchedulerKind::FlowMatchEuler | SchedulerKind::FlowMatchLcm => {
                flow_match_euler::flow_match_euler(self, options)
            }
            SchedulerKind::FlowMatchHeun => flow_match_heun::flow_match_heun(self, options),
        }
    }
}

impl SamplingPlan {
    /// The plan of those `runs` of the model, of all `count` of a schedule: `step` makes one of them, and `noised` its
    /// first sample from a clean image.
    ///
    /// # Errors
    /// When a number is not finite: every image would be NaN.
    fn of_runs(
        runs: Range<usize>,
        count: usize,
        init_noise_sigma: f64,
        noised: impl Fn(usize) -> [f64; 2],
        step: impl Fn(usize) -> Step,
    ) -> Result<Self, SchedulerError> {
        // At the end of the schedule a sample is clean.
        let noised_before = |i: usize| {
            if i < count {
                noised(i).map(|c| c as f32)
            } else {
                [1.0, 0.0]
            }
        };
        let steps: Vec<Step> = runs
            .clone()
            .map(|i| Step {
                noised: noised_before(i + 1),
                ..step(i)
            })
            .collect();
        let bad = steps.iter().find(|step| {
            let mut numbers = [step.timestep, step.in_scale]
                .into_iter()
                .chain(step.clean)
                .chain(step.clip)
                .chain(step.noised)
                .chain(step.update.into_iter().flatten());
            !numbers.all(f32::is_finite)
        });
        match bad {
            None => Ok(SamplingPlan {
                steps,
                init_noise_sigma: init_noise_sigma as f32,
                noised: noised_before(runs.start),
                is_whole: runs.start == 0,
            }),
            Some(step) => Err(SchedulerError::Invalid(format!(
                "the step at timestep {} divides by 0: there is no noise to remove (beta_start = 0), or the next step \
                 has the same noise level (too many steps); make beta_start larger than 0, take fewer steps or choose \
                 another timestep_spacing",
                step.timestep
            ))),
        }
    }
}

#[cfg(test)]
mod tests;
