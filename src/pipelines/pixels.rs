//! Conversion between images and the samples of a pixel-space model.
//!
//! A model may work on blocks of pixels instead of single ones: `pixel_unshuffle=k` turns each `k x k` block of an
//! image into `3 k k` channels of one position, PyTorch's `PixelUnshuffle`. The model's rows and columns are then a
//! `k`-th, which cuts its cost by about `k` squared (Hoogeboom et al. 2023, "Simple diffusion", section 3, patches).

pub use crate::models::RGB;

/// Where channel `c` of pixel (`y`, `x`) lies in a sample `[n, 3 k k, side / k, side / k]`.
fn place(n: usize, c: usize, y: usize, x: usize, side: usize, k: usize) -> usize {
    let small = side / k;
    let channel = (c * k + y % k) * k + x % k;
    ((n * RGB * k * k + channel) * small + y / k) * small + x / k
}

/// Samples `[batch, 3 k k, side / k, side / k]` of images `[batch, side, side, 3]`. `k` divides `side`.
pub fn to_samples(pixels: &[f32], batch: usize, side: usize, k: usize) -> Vec<f32> {
    let mut samples = vec![0.0; pixels.len()];
    let mut from = pixels.iter();
    for n in 0..batch {
        for y in 0..side {
            for x in 0..side {
                for c in 0..RGB {
                    if let Some(value) = from.next() {
                        samples[place(n, c, y, x, side, k)] = *value;
                    }
                }
            }
        }
    }
    samples
}

/// The image `[side, side, 3]` of sample `n`: the inverse of [`to_samples`].
pub fn to_pixels(samples: &[f32], n: usize, side: usize, k: usize) -> Vec<f32> {
    let mut pixels = Vec::with_capacity(side * side * RGB);
    for y in 0..side {
        for x in 0..side {
            for c in 0..RGB {
                pixels.push(samples[place(n, c, y, x, side, k)]);
            }
        }
    }
    pixels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_come_first() {
        // One image of 2x2 pixels: each pixel's three values in a row.
        let pixels: Vec<f32> = (0..12).map(|v| v as f32).collect();
        let plain = to_samples(&pixels, 1, 2, 1);
        assert_eq!(plain, [0., 3., 6., 9., 1., 4., 7., 10., 2., 5., 8., 11.]);
        // torch.nn.PixelUnshuffle(2): all four pixels of a channel become channels of one place.
        assert_eq!(to_samples(&pixels, 1, 2, 2), plain);
    }

    #[test]
    fn blocks_become_channels_and_come_back() {
        let pixels: Vec<f32> = (0..2 * 4 * 4 * 3).map(|v| v as f32).collect();
        let samples = to_samples(&pixels, 2, 4, 2);
        // Channel 1 of the first place is red of the pixel to the right of the corner.
        assert_eq!(samples[4], pixels[3]);
        for n in 0..2 {
            assert_eq!(to_pixels(&samples, n, 4, 2), pixels[n * 48..(n + 1) * 48]);
        }
    }
}
