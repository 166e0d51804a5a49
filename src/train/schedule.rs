//! The learning rate of each step, computed on the host and given to the program as an input.

use crate::util::named;

named! {
    /// The learning rate after warm-up.
    #[derive(Default)]
    pub enum Decay {
        Constant = "constant" (default),
        /// Half a cosine from the highest rate to 0.
        Cosine = "cosine",
        /// A straight line from the highest rate to 0.
        Linear = "linear",
    }
}

/// Linear warm-up to `peak` over `warmup_steps`, then `decay` until `total_steps`, then the last value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearningRate {
    pub peak: f64,
    pub warmup_steps: u64,
    pub total_steps: u64,
    pub decay: Decay,
}

impl LearningRate {
    /// The rate of step `step`, counted from 0. In the warm-up it is `peak * step / warmup_steps`, as in MaxDiffusion.
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return self.peak * step as f64 / self.warmup_steps as f64;
        }
        let span = self.total_steps.saturating_sub(self.warmup_steps).max(1);
        let done = ((step - self.warmup_steps) as f64 / span as f64).min(1.0);
        self.peak
            * match self.decay {
                Decay::Constant => 1.0,
                Decay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done).cos()),
                Decay::Linear => 1.0 - done,
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warms_up_and_decays() {
        let rate = |decay| LearningRate {
            peak: 2.0,
            warmup_steps: 4,
            total_steps: 12,
            decay,
        };
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
}
