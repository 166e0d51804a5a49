//! Initial values of weights.

use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::util::hash::Hasher;

/// The distribution a weight starts from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    Zeros,
    Ones,
    /// Normal with mean 0.
    Normal {
        std: f32,
    },
    /// Uniform in [-bound, bound]; PyTorch's default for linear layers and convolutions has bound 1/sqrt(fan_in).
    Uniform {
        bound: f32,
    },
}

impl Init {
    /// `count` values that depend on `seed` and `name` alone, so that adding or reordering
    /// weights leaves every other weight as it was.
    pub fn sample(self, seed: u64, name: &str, count: usize) -> Vec<f32> {
        match self {
            Init::Zeros => vec![0.0; count],
            Init::Ones => vec![1.0; count],
            Init::Normal { std } => {
                let mut rng = stream(seed, name);
                let mut values = Vec::with_capacity(count + 1);
                while values.len() < count {
                    // Box-Muller; 1 - u lies in (0, 1], so the logarithm is finite.
                    let radius = (-2.0 * (1.0 - unit(&mut rng)).ln()).sqrt();
                    let angle = std::f64::consts::TAU * unit(&mut rng);
                    values.push((radius * angle.cos()) as f32 * std);
                    values.push((radius * angle.sin()) as f32 * std);
                }
                values.truncate(count);
                values
            }
            Init::Uniform { bound } => {
                let mut rng = stream(seed, name);
                (0..count)
                    .map(|_| ((2.0 * unit(&mut rng) - 1.0) as f32) * bound)
                    .collect()
            }
        }
    }
}

fn stream(seed: u64, name: &str) -> ChaCha8Rng {
    let mut hash = Hasher::default();
    hash.update(seed.to_le_bytes());
    hash.update(name.as_bytes());
    ChaCha8Rng::from_seed(*hash.finish().bytes())
}

/// Uniform in [0, 1) with 53 random bits.
fn unit(rng: &mut ChaCha8Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_has_the_asked_moments_and_depends_on_the_name() {
        let n = 100_000;
        let a = Init::Normal { std: 2.0 }.sample(7, "a", n);
        let mean = a.iter().sum::<f32>() / n as f32;
        let var = a.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / n as f32;
        // Standard errors at this size: mean 0.0063, variance 0.018; allow four of each.
        assert!(mean.abs() < 0.026, "{mean}");
        assert!((var - 4.0).abs() < 0.072, "{var}");
        assert_eq!(a, Init::Normal { std: 2.0 }.sample(7, "a", n));
        assert_ne!(a, Init::Normal { std: 2.0 }.sample(7, "b", n));
        assert_ne!(a, Init::Normal { std: 2.0 }.sample(8, "a", n));
    }

    #[test]
    fn uniform_stays_inside_its_bound() {
        let a = Init::Uniform { bound: 0.25 }.sample(1, "w", 10_000);
        assert!(a.iter().all(|v| v.abs() <= 0.25));
        assert!(a.iter().any(|v| *v > 0.24) && a.iter().any(|v| *v < -0.24));
    }
}
