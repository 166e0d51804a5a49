//! The noise that images start from: PyTorch's on a CPU, so that a seed gives the image that diffusers gives for
//! `torch.Generator("cpu").manual_seed(seed)`.

use std::f64::consts::TAU;

/// The state of MT19937 (Matsumoto and Nishimura, 1998), 32 bits wide.
const WORDS: usize = 624;

/// Values that PyTorch transforms together: eight pairs.
const BLOCK: usize = 16;

/// A stream of unit normal noise.
#[derive(Clone, Debug)]
pub struct NoiseGenerator {
    state: [u32; WORDS],
    next: usize,
}

impl NoiseGenerator {
    /// The stream of `torch.Generator("cpu").manual_seed(seed)`, which looks at the seed's low 32 bits only.
    pub fn new(seed: u64) -> Self {
        let mut state = [0; WORDS];
        state[0] = seed as u32;
        for i in 1..WORDS {
            let previous = state[i - 1];
            state[i] = (previous ^ (previous >> 30))
                .wrapping_mul(1_812_433_253)
                .wrapping_add(i as u32);
        }
        NoiseGenerator { state, next: WORDS }
    }

    fn twist(&mut self) {
        for i in 0..WORDS {
            let upper = self.state[i] & 0x8000_0000;
            let lower = self.state[(i + 1) % WORDS] & 0x7fff_ffff;
            let mixed = (upper | lower) >> 1;
            let odd = if lower & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[i] = self.state[(i + 397) % WORDS] ^ mixed ^ odd;
        }
        self.next = 0;
    }

    fn word(&mut self) -> u32 {
        if self.next == WORDS {
            self.twist();
        }
        let mut y = self.state[self.next];
        self.next += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    /// Uniform in [0, 1) with 24 bits.
    fn uniform(&mut self) -> f32 {
        (self.word() & 0x00ff_ffff) as f32 / (1 << 24) as f32
    }

    /// The numbers below `count` in the order of `numpy.random.RandomState(seed).permutation(count)`, of a stream that is new.
    pub fn permutation(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for last in (1..count).rev() {
            let mask = usize::MAX >> last.leading_zeros();
            // Words that are too large are drawn again.
            let place = loop {
                let place = self.word() as usize & mask;
                if place <= last {
                    break place;
                }
            };
            order.swap(last, place);
        }
        order
    }

    /// The next `count` values of `torch.randn(count, generator=..)`, to a few units in the last place: PyTorch's
    /// vectorized logarithm and cosine are not the mathematical ones.
    ///
    /// Uniform values become normal ones eight pairs at a time (Box and Muller, 1958); a last block that is not full
    /// is drawn anew over the last sixteen values. PyTorch has another transform for fewer than sixteen values, which
    /// no model asks for: the first of sixteen stand for them here.
    pub fn normal(&mut self, count: usize) -> Vec<f32> {
        let size = count.max(BLOCK);
        let mut values: Vec<f32> = (0..size).map(|_| self.uniform()).collect();
        for block in values.chunks_exact_mut(BLOCK) {
            transform(block);
        }
        if !size.is_multiple_of(BLOCK) {
            let last = &mut values[size - BLOCK..];
            last.fill_with(|| self.uniform());
            transform(last);
        }
        values.truncate(count);
        values
    }
}

/// Sixteen uniform values to normal ones.
fn transform(block: &mut [f32]) {
    let (first, second) = block.split_at_mut(BLOCK / 2);
    for (a, b) in first.iter_mut().zip(second) {
        let radius = (-2.0 * f64::from(1.0 - *a).ln()).sqrt();
        let angle = TAU * f64::from(*b);
        *a = (radius * angle.cos()) as f32;
        *b = (radius * angle.sin()) as f32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// First and last values, and those of the next draw, of torch 2.15.
    #[test]
    fn a_seed_gives_pytorchs_noise() {
        let cases = [
            (
                0_u64,
                256,
                [-1.125_839_8_f32, -1.152_360_2, -0.250_578_58],
                [1.902_856_5_f32, 0.390_395_8],
                [-0.039_372_54_f32, -0.801_472_2],
            ),
            (
                1_234_567_890_123,
                24,
                [-0.568_541_5, -0.199_217_04, 1.039_984_5],
                [1.038_602_2, -0.078_400_41],
                [-0.226_420_57, 0.813_162_6],
            ),
            (
                42,
                17,
                [1.926_915_3, -0.159_597_47, -0.497_397_54],
                [0.859_858_5, -0.309_726_8],
                [-0.871_236_1, 0.078_023_87],
            ),
        ];
        for (seed, count, first, last, following) in cases {
            let mut generator = NoiseGenerator::new(seed);
            let values = generator.normal(count);
            let close = |found: &[f32], expected: &[f32]| {
                for (f, e) in found.iter().zip(expected) {
                    assert!((f - e).abs() < 1e-6, "seed {seed}: {found:?} {expected:?}");
                }
            };
            assert_eq!(values.len(), count);
            close(&values[..3], &first);
            close(&values[count - 2..], &last);
            close(&generator.normal(count)[..2], &following);
        }
    }

    /// Those of numpy 2.5.
    #[test]
    fn permutations_are_numpys() {
        let order = NoiseGenerator::new(2020).permutation(12);
        assert_eq!(order, [2, 1, 11, 4, 10, 5, 7, 9, 6, 3, 8, 0]);
        assert!(NoiseGenerator::new(1).permutation(0).is_empty());
    }

    #[test]
    fn short_draws_have_their_length() {
        assert_eq!(NoiseGenerator::new(1).normal(3).len(), 3);
    }
}
