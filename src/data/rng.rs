//! Random draws that depend on nothing but a key.
//!
//! Every draw of the data path is addressed by `(seed, stream, index, row)`, so that a run resumed
//! at a step makes the draws that the uninterrupted run would have made. The conversions to ranges
//! are written here because those of the `rand` crate may change between its versions.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// The purpose of a draw; two streams with the same seed are independent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    ShapesTrain = 1,
    ShapesValidation = 2,
    HeldOutPrompts = 3,
    Order = 4,
    CaptionDropout = 5,
    Flip = 6,
    Crop = 7,
    Caption = 8,
    Turns = 9,
    Tags = 10,
}

/// A ChaCha8 generator whose whole state is its address.
pub(crate) struct KeyedRng(ChaCha8Rng);

impl KeyedRng {
    pub(crate) fn new(seed: u64, stream: Stream, index: u64, row: u64) -> Self {
        let mut key = [0u8; 32];
        key[0..8].copy_from_slice(&seed.to_le_bytes());
        key[8..16].copy_from_slice(&(stream as u64).to_le_bytes());
        key[16..24].copy_from_slice(&index.to_le_bytes());
        key[24..32].copy_from_slice(&row.to_le_bytes());
        Self(ChaCha8Rng::from_seed(key))
    }

    pub(crate) fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Uniform in `0..bound`; the bias of the multiply-shift is below `bound / 2^64`.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next_u64()) * bound as u128) >> 64) as usize
    }

    /// Uniform in `[0, 1)` with 53 bits.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Uniform in `[low, high)`; `low` where the interval is empty.
    pub(crate) fn between(&mut self, low: f64, high: f64) -> f64 {
        low + self.unit() * (high - low).max(0.0)
    }

    /// One element of a slice that is not empty.
    pub(crate) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_the_address_matters() {
        let first = |seed, stream, index, row| KeyedRng::new(seed, stream, index, row).next_u64();
        let base = first(1, Stream::Order, 2, 3);
        assert_eq!(base, first(1, Stream::Order, 2, 3));
        for other in [
            first(2, Stream::Order, 2, 3),
            first(1, Stream::Flip, 2, 3),
            first(1, Stream::Order, 3, 3),
            first(1, Stream::Order, 2, 4),
        ] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn draws_are_uniform_and_in_range() {
        let mut rng = KeyedRng::new(7, Stream::Order, 0, 0);
        let mut counts = [0usize; 5];
        let mut sum = 0.0;
        for _ in 0..10_000 {
            counts[rng.below(5)] += 1;
            let unit = rng.unit();
            assert!((0.0..1.0).contains(&unit));
            sum += unit;
        }
        // 2000 expected with a standard deviation of 40: 5 sigma.
        assert!(
            counts.iter().all(|&c| (1800..=2200).contains(&c)),
            "{counts:?}"
        );
        // Standard deviation of the mean is 0.0029: 5 sigma.
        assert!((sum / 10_000.0 - 0.5).abs() < 0.015);
    }
}
