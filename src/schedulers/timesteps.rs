//! Which training timesteps a sampler visits.

use super::{SchedulerConfig, SchedulerError, SchedulerKind, TimestepSpacing};

/// The divisor of the training timesteps that gives the visited ones.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Grid {
    /// Themselves: the last of them is the first of training (and the offset).
    Points,
    /// Steps between them: where the last step goes is a point too, which is not visited.
    Steps,
}

impl SchedulerConfig {
    /// The training timesteps that a sampler of `steps` steps visits, from noisy to clean.
    ///
    /// They are whole numbers, but for [`TimestepSpacing::Linspace`] where `whole` is false.
    pub(super) fn timesteps(
        &self,
        steps: usize,
        grid: Grid,
        whole: bool,
    ) -> Result<Vec<f64>, SchedulerError> {
        let train = self.num_train_timesteps;
        check_steps(steps, "num_train_timesteps", train)?;
        let skipped = usize::from(grid == Grid::Steps);
        let points = steps + skipped;
        let last = (train - 1) as f64;
        let spacing = match self.kind {
            // The class has no such field.
            SchedulerKind::DpmSinglestep => TimestepSpacing::Linspace,
            _ => self.timestep_spacing,
        };
        let timesteps: Vec<f64> = match spacing {
            TimestepSpacing::Linspace => {
                let stride = last / (points - 1).max(1) as f64;
                let value = |i: usize| {
                    let value = match i + 1 == points && points > 1 {
                        true => last,
                        false => i as f64 * stride,
                    };
                    match whole {
                        true => value.round_ties_even(),
                        false => value,
                    }
                };
                (skipped..points).rev().map(value).collect()
            }
            TimestepSpacing::Leading => {
                let ratio = train / points;
                (skipped..points)
                    .rev()
                    .map(|i| (i * ratio + self.steps_offset) as f64)
                    .collect()
            }
            TimestepSpacing::Trailing => {
                let train = train as f64;
                // NumPy's arange adds the difference of its first two values.
                let stride = (train - train / steps as f64) - train;
                (0..steps)
                    .map(|i| (train + i as f64 * stride).round_ties_even() - 1.0)
                    .collect()
            }
        };
        if timesteps[0] > last {
            return Err(SchedulerError::Invalid(format!(
                "steps_offset = {} with {steps} steps starts at timestep {}; the last training timestep is {last}",
                self.steps_offset, timesteps[0]
            )));
        }
        Ok(timesteps)
    }

    /// The whole timesteps that a sampler of a consistency model visits: `steps` of the
    /// [`SchedulerConfig::original_inference_steps`] that it was distilled with.
    pub(super) fn distilled_timesteps(&self, steps: usize) -> Result<Vec<f64>, SchedulerError> {
        let (train, original) = (self.num_train_timesteps, self.original_inference_steps);
        if original == 0 || original > train {
            return Err(SchedulerError::Invalid(format!(
                "original_inference_steps = {original}; expected 1 to num_train_timesteps = {train}"
            )));
        }
        check_steps(steps, "original_inference_steps", original)?;
        let ratio = train / original;
        let stride = original as f64 / steps as f64;
        Ok((0..steps)
            .map(|i| ((original - (i as f64 * stride) as usize) * ratio) as f64 - 1.0)
            .collect())
    }
}

/// Refuses a number of steps that is not 1 to that of another field.
pub(super) fn check_steps(steps: usize, field: &str, most: usize) -> Result<(), SchedulerError> {
    match (1..=most).contains(&steps) {
        true => Ok(()),
        false => Err(SchedulerError::Invalid(format!(
            "{steps} inference steps; expected 1 to {field} = {most}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(timestep_spacing: TimestepSpacing) -> SchedulerConfig {
        SchedulerConfig {
            timestep_spacing,
            ..SchedulerConfig::stable_diffusion(SchedulerKind::Ddim)
        }
    }

    #[test]
    fn spacings_follow_their_definitions() {
        use TimestepSpacing::{Leading, Linspace, Trailing};
        let steps = |spacing, n, grid| config(spacing).timesteps(n, grid, true).unwrap();
        let points = |spacing, n| steps(spacing, n, Grid::Points);
        assert_eq!(points(Leading, 4), [751.0, 501.0, 251.0, 1.0]);
        assert_eq!(points(Trailing, 4), [999.0, 749.0, 499.0, 249.0]);
        assert_eq!(points(Linspace, 4), [999.0, 666.0, 333.0, 0.0]);
        assert_eq!(points(Linspace, 1), [0.0]);
        assert_eq!(points(Trailing, 3), [999.0, 666.0, 332.0]);
        assert_eq!(steps(Leading, 4, Grid::Steps), [801.0, 601.0, 401.0, 201.0]);
        assert_eq!(steps(Linspace, 3, Grid::Steps), [999.0, 666.0, 333.0]);
        assert_eq!(steps(Linspace, 1, Grid::Steps), [999.0]);
        assert_eq!(steps(Trailing, 3, Grid::Steps), [999.0, 666.0, 332.0]);
    }

    #[test]
    fn step_counts_are_checked() {
        let leading = |steps| config(TimestepSpacing::Leading).timesteps(steps, Grid::Points, true);
        for steps in [0, 1001] {
            let error = leading(steps).unwrap_err().to_string();
            assert!(
                error.contains("expected 1 to num_train_timesteps = 1000"),
                "{error}"
            );
        }
        // 1000 steps from offset 1 would start one past the last timestep.
        let error = leading(1000).unwrap_err().to_string();
        assert!(error.contains("starts at timestep 1000"), "{error}");
    }
}
