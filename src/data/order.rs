//! The shuffled order of samples, computed from the step alone.

use super::rng::{KeyedRng, Stream};

/// Rounds of the Feistel network; 4 suffice for a pseudo-random permutation (Luby and Rackoff,
/// "How to construct pseudorandom permutations from pseudorandom functions", 1988), the rest is
/// margin for the small halves of small datasets.
const ROUNDS: usize = 8;

/// One epoch's permutation of `0..len`, with random access and no table.
///
/// A balanced Feistel network permutes `0..4^k`, the smallest such range that holds `len`;
/// positions that land outside `0..len` walk on along their cycle until they land inside, which
/// makes the restriction a permutation again.
#[derive(Clone, Debug)]
pub struct Permutation {
    len: u64,
    half_bits: u32,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// The permutation of epoch `epoch` under `seed` for the `len` samples of `group`.
    pub fn new(seed: u64, epoch: u64, group: u64, len: usize) -> Self {
        Permutation::drawn(KeyedRng::new(seed, Stream::Order, epoch, group), len)
    }

    /// The order in which groups of samples take turns in the `len` batches of epoch `epoch`.
    pub(super) fn of_turns(seed: u64, epoch: u64, len: usize) -> Self {
        Permutation::drawn(KeyedRng::new(seed, Stream::Turns, epoch, 0), len)
    }

    fn drawn(mut rng: KeyedRng, len: usize) -> Self {
        let len = len as u64;
        let bits = 64 - len.saturating_sub(1).leading_zeros();
        Self {
            len,
            half_bits: bits.div_ceil(2).max(1),
            keys: std::array::from_fn(|_| rng.next_u64()),
        }
    }

    /// The sample at `position`, for a position below the length of a dataset that is not empty;
    /// positions past the end wrap around.
    pub fn index(&self, position: usize) -> usize {
        if self.len <= 1 {
            return 0;
        }
        let mut value = position as u64 % self.len;
        loop {
            value = self.encrypt(value);
            if value < self.len {
                return value as usize;
            }
        }
    }

    fn encrypt(&self, value: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for &key in &self.keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        (left << self.half_bits) | right
    }
}

/// The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
/// generators", 2014).
fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_epoch_visits_every_sample_once() {
        for len in [1usize, 2, 3, 4, 5, 16, 17, 100, 1000, 4097] {
            for epoch in 0..3 {
                let permutation = Permutation::new(9, epoch, 0, len);
                let mut seen = vec![false; len];
                for position in 0..len {
                    let index = permutation.index(position);
                    assert!(!seen[index], "len {len}: {index} twice");
                    seen[index] = true;
                }
            }
        }
    }

    #[test]
    fn order_differs_by_epoch_and_seed_and_is_shuffled() {
        let list = |seed, epoch| -> Vec<usize> {
            let permutation = Permutation::new(seed, epoch, 0, 1000);
            (0..1000).map(|p| permutation.index(p)).collect()
        };
        let base = list(1, 0);
        assert_eq!(base, list(1, 0));
        assert_ne!(base, list(1, 1));
        assert_ne!(base, list(2, 0));
        let fixed = base.iter().enumerate().filter(|(p, i)| p == *i).count();
        // A uniform permutation has one fixed point on average; more than 10 has odds of 1e-8.
        assert!(fixed <= 10, "{fixed} of 1000 not moved");
        let ascents = base.windows(2).filter(|w| w[1] > w[0]).count();
        // Mean 499.5, standard deviation 9.1 for a uniform permutation: 6 sigma.
        assert!((445..=554).contains(&ascents), "{ascents} ascents");
    }
}
