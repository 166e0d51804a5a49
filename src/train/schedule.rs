//! The learning rate of each step, computed on the host and given to the program as an input.

use crate::util::named;

named! {
    /// The learning rate after warm-up, by diffusers' names.
    #[derive(Default)]
    pub enum Decay {
        Constant = "constant" | "constant_with_warmup" (default),
        /// Half a cosine from the highest rate to 0.
        Cosine = "cosine",
        /// The same, `lr_num_cycles` times.
        CosineWithRestarts = "cosine_with_restarts",
        /// A straight line from the highest rate to 0.
        Linear = "linear",
        /// The share of the steps that is left to the power of `lr_power`, down to 1e-7.
        Polynomial = "polynomial",
        /// Chen et al., "REX: revisiting budgeted training with an improved schedule", 2021.
        Rex = "rex",
    }
}

/// Where a polynomial ends, in diffusers.
const POLYNOMIAL_END: f64 = 1e-7;

/// Linear warm-up to `peak` over `warmup_steps`, then `decay` until `total_steps`, then the last value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearningRate {
    pub peak: f64,
    pub warmup_steps: u64,
    pub total_steps: u64,
    pub decay: Decay,
    /// Cosines of [`Decay::CosineWithRestarts`].
    pub num_cycles: u64,
    /// The exponent of [`Decay::Polynomial`].
    pub power: f64,
}

impl LearningRate {
    /// The rate of step `step`, counted from 0. In the warm-up it is `peak * step / warmup_steps`, as in MaxDiffusion and
    /// diffusers.
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return self.peak * step as f64 / self.warmup_steps as f64;
        }
        let span = self.total_steps.saturating_sub(self.warmup_steps).max(1);
        let done = ((step - self.warmup_steps) as f64 / span as f64).min(1.0);
        let left = 1.0 - done;
        let half_cosine = |done: f64| 0.5 * (1.0 + (std::f64::consts::PI * done).cos());
        let end = POLYNOMIAL_END.min(self.peak);
        match self.decay {
            Decay::Constant => self.peak,
            Decay::Cosine => self.peak * half_cosine(done),
            Decay::CosineWithRestarts if done < 1.0 => {
                self.peak * half_cosine((self.num_cycles as f64 * done).fract())
            }
            Decay::CosineWithRestarts => 0.0,
            Decay::Linear => self.peak * left,
            Decay::Polynomial => (self.peak - end) * left.powf(self.power) + end,
            Decay::Rex => self.peak * left / (0.5 + 0.5 * left),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(decay: Decay) -> LearningRate {
        LearningRate {
            peak: 2.0,
            warmup_steps: 4,
            total_steps: 12,
            decay,
            num_cycles: 2,
            power: 2.0,
        }
    }

    #[test]
    fn warms_up_and_decays() {
        let constant = rate(Decay::Constant);
        assert_eq!([0, 2, 4, 100].map(|s| constant.at(s)), [0.0, 1.0, 2.0, 2.0]);
        let linear = rate(Decay::Linear);
        assert_eq!([4, 8, 12, 99].map(|s| linear.at(s)), [2.0, 1.0, 0.0, 0.0]);
        let cosine = rate(Decay::Cosine);
        assert_eq!(cosine.at(4), 2.0);
        assert!((cosine.at(8) - 1.0).abs() < 1e-12);
        assert!(cosine.at(12).abs() < 1e-12);
        let none = LearningRate {
            warmup_steps: 0,
            ..constant
        };
        assert_eq!(none.at(0), 2.0);
    }

    /// The paper's formula, `(1 - z) / (1/2 + (1 - z) / 2)`: halfway 2/3 are left.
    #[test]
    fn rex_keeps_more_than_a_line_and_ends_at_zero() {
        let rex = rate(Decay::Rex);
        assert_eq!([4, 12].map(|s| rex.at(s)), [2.0, 0.0]);
        assert!((rex.at(8) - 2.0 * 2.0 / 3.0).abs() < 1e-12);
    }
}
