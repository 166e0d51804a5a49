//! The options of a plan: how many steps, and which part of them runs.

use std::ops::Range;

use super::{SchedulerConfig, SchedulerError};

/// Where in its schedule a sampler starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Start {
    /// So that this share of the steps is run, rounded down, by samplers of flow matching rounded up, as diffusers'
    /// pipelines do: image-to-image's `strength`. 1 runs all of them.
    Strength(f64),
    /// After this share of the training timesteps: diffusers' `denoising_start`, for a model that continues where
    /// another stopped.
    After(f64),
}

/// The options of a plan, beside the schedule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlanOptions {
    /// Steps of the whole schedule, from pure noise to the clean sample: diffusers' `num_inference_steps`. Samplers of
    /// second order run the model twice in all of them but the last.
    pub steps: usize,
    pub start: Start,
    /// Stop after this share of the training timesteps: diffusers' `denoising_end`.
    pub end: Option<f64>,
    /// How much noise DDIM and TCD add, 0 to 1. 0 is deterministic; the other samplers do not read it.
    pub eta: f64,
    /// DDIM: where the predicted clean sample is clipped, whether the noise is derived from the clipped one.
    pub use_clipped_model_output: bool,
    /// Tokens of an image, for a schedule that depends on them (`use_dynamic_shifting`).
    pub image_seq_len: Option<usize>,
    pub flow_levels: FlowLevels,
}

/// The noise levels of flow matching before they are shifted: evenly from 1 to the last, before the clean sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FlowLevels {
    /// That is the share of a step, `1 / steps`: what `FluxPipeline` gives its scheduler.
    #[default]
    OfSteps,
    /// That is the lowest of training, shifted: what `FlowMatchEulerDiscreteScheduler` takes where it is given none.
    OfTraining,
}

impl PlanOptions {
    /// All of a schedule of `steps` steps, with the defaults of diffusers' pipelines.
    pub fn new(steps: usize) -> Self {
        PlanOptions {
            steps,
            start: Start::Strength(1.0),
            end: None,
            eta: 0.0,
            use_clipped_model_output: false,
            image_seq_len: None,
            flow_levels: FlowLevels::default(),
        }
    }

    /// [`PlanOptions::eta`], checked.
    pub(super) fn eta(&self) -> Result<f64, SchedulerError> {
        share("eta", self.eta)
    }

    /// Which of the runs of the model are made, of those at `timesteps`. A step is `order` runs, but the last, which is
    /// one; `config` is the sampler's.
    ///
    /// As in diffusers, a run is before a share of the training timesteps when its own timestep is.
    pub(super) fn runs(
        &self,
        timesteps: &[f64],
        order: usize,
        config: &SchedulerConfig,
    ) -> Result<Range<usize>, SchedulerError> {
        let train = config.num_train_timesteps as f64;
        let cutoff = |share: f64| (train - share * train).round_ties_even();
        let start = match self.start {
            Start::Strength(strength) => {
                let steps = self.steps as f64;
                let kept = steps * share("strength", strength)?;
                let first = match config.is_flow() {
                    true => (steps - kept) as usize,
                    false => self.steps - (kept as usize).min(self.steps),
                };
                first * order
            }
            Start::After(after) => {
                let cutoff = cutoff(share("the start", after)?);
                let mut kept = timesteps.iter().filter(|&&t| t < cutoff).count();
                if order == 2 && kept % 2 == 0 {
                    // A start between the two runs of a step goes back to the first of them.
                    kept += 1;
                }
                timesteps.len().saturating_sub(kept)
            }
        };
        let rest = timesteps.get(start..).unwrap_or_default();
        let kept = match self.end {
            None => rest.len(),
            Some(end) => {
                let cutoff = cutoff(share("the end", end)?);
                rest.iter().filter(|&&t| t >= cutoff).count()
            }
        };
        if kept == 0 {
            let start = match self.start {
                Start::Strength(strength) => format!("a strength of {strength}"),
                Start::After(after) => format!("a start at {after}"),
            };
            let end = self
                .end
                .map_or(String::new(), |end| format!(" with an end at {end}"));
            return Err(SchedulerError::Invalid(format!(
                "{start}{end} leaves none of {} steps to run; take more steps or a larger part of them",
                self.steps
            )));
        }
        Ok(start..start + kept)
    }
}

/// A number from 0 to 1.
fn share(what: &str, value: f64) -> Result<f64, SchedulerError> {
    match (0.0..=1.0).contains(&value) {
        true => Ok(value),
        false => Err(SchedulerError::Invalid(format!(
            "{what} = {value}; expected 0 to 1"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedulers::SchedulerKind;

    /// Five steps, with their timesteps.
    const TIMESTEPS: [f64; 5] = [801.0, 601.0, 401.0, 201.0, 1.0];

    fn runs(start: Start, end: Option<f64>) -> Result<Range<usize>, SchedulerError> {
        let options = PlanOptions {
            start,
            end,
            ..PlanOptions::new(5)
        };
        options.runs(&TIMESTEPS, 1, &SchedulerConfig::new(SchedulerKind::Ddim))
    }

    #[test]
    fn strength_keeps_the_last_steps_and_shares_cut_at_timesteps() {
        assert_eq!(runs(Start::Strength(1.0), None).unwrap(), 0..5);
        assert_eq!(runs(Start::Strength(0.5), None).unwrap(), 3..5);
        assert_eq!(runs(Start::After(0.0), None).unwrap(), 0..5);
        // Timestep 601 is not before 600: one model stops after it and the other continues at 401.
        assert_eq!(runs(Start::Strength(1.0), Some(0.4)).unwrap(), 0..2);
        assert_eq!(runs(Start::After(0.4), None).unwrap(), 2..5);
        assert_eq!(runs(Start::After(0.4), Some(0.8)).unwrap(), 2..4);
    }

    #[test]
    fn steps_of_two_runs_are_not_cut() {
        // Three steps, as Heun runs them.
        let timesteps = [999.0, 500.0, 500.0, 0.0, 0.0];
        let runs = |start| {
            let options = PlanOptions {
                start,
                ..PlanOptions::new(3)
            };
            let config = SchedulerConfig::new(SchedulerKind::Heun);
            options.runs(&timesteps, 2, &config).unwrap()
        };
        assert_eq!(runs(Start::Strength(0.7)), 2..5);
        assert_eq!(runs(Start::After(0.6)), 2..5);
        assert_eq!(runs(Start::After(0.2)), 0..5);
    }

    /// diffusers' `get_timesteps` for flow matching: `int(max(steps - steps * strength, 0))` is left out.
    #[test]
    fn flow_matching_takes_the_step_that_strength_cuts() {
        let config = SchedulerConfig::new(SchedulerKind::FlowMatchEuler);
        for (strength, first) in [(1.0, 0), (0.8, 1), (0.7, 1), (0.5, 2), (0.1, 4)] {
            let options = PlanOptions {
                start: Start::Strength(strength),
                ..PlanOptions::new(5)
            };
            let runs = options.runs(&TIMESTEPS, 1, &config).unwrap();
            assert_eq!(runs, first..5, "{strength}");
        }
    }

    #[test]
    fn nothing_to_run_is_an_error() {
        for (start, end) in [
            (Start::Strength(0.1), None),
            (Start::After(1.0), None),
            (Start::After(0.8), Some(0.4)),
            (Start::Strength(1.0), Some(0.1)),
        ] {
            let error = runs(start, end).unwrap_err().to_string();
            assert!(error.contains("none of 5 steps"), "{error}");
        }
        let error = runs(Start::Strength(1.5), None).unwrap_err().to_string();
        assert!(error.contains("strength = 1.5"), "{error}");
    }
}
