//! Pillow's bicubic resampling (`src/libImaging/Resample.c`): a cubic with a = -0.5, stretched where the image gets smaller.

use image::RgbImage;

/// Pixels to each side that the filter sees where the size stays.
const SUPPORT: f64 = 2.0;
/// Bits of a weight's fraction where pixels are bytes: 32 without those of a byte and of a sign and a carry.
const FRACTION: u32 = 32 - 8 - 2;

/// What a pixel of the result sees of a line.
struct Window {
    first: usize,
    /// Their sum is 1.
    weights: Vec<f64>,
}

/// The image at another size, as Pillow's `Image.resize` of mode RGB: rounded to bytes between the two directions.
pub fn bicubic_bytes(image: &RgbImage, width: u32, height: u32) -> RgbImage {
    let mix = |pixels: &mut dyn Iterator<Item = (u8, f64)>| {
        let sum: i64 = pixels
            .map(|(pixel, weight)| i64::from(pixel) * fixed(weight))
            .sum();
        ((sum + (1 << (FRACTION - 1))) >> FRACTION).clamp(0, 255) as u8
    };
    let sizes = [image.height(), image.width()].map(|side| side as usize);
    let values = resample(
        image.as_raw(),
        sizes,
        [height as usize, width as usize],
        mix,
    );
    let mut result = RgbImage::new(width, height);
    result.copy_from_slice(&values);
    result
}

/// The image at another size, as Pillow's `Image.resize` of mode F for each channel: `[height, width, 3]` of about 0 to 255,
/// neither rounded nor clamped.
pub fn bicubic_floats(image: &RgbImage, width: u32, height: u32) -> Vec<f32> {
    let values: Vec<f32> = image.as_raw().iter().map(|byte| f32::from(*byte)).collect();
    let mix = |pixels: &mut dyn Iterator<Item = (f32, f64)>| {
        pixels
            .map(|(pixel, weight)| f64::from(pixel) * weight)
            .sum::<f64>() as f32
    };
    let sizes = [image.height(), image.width()].map(|side| side as usize);
    resample(&values, sizes, [height as usize, width as usize], mix)
}

/// A weight as a number of `1 / 2^FRACTION`, half away from zero.
fn fixed(weight: f64) -> i64 {
    (weight * f64::from(1 << FRACTION)).round() as i64
}

/// Lines first, then columns, each only if its size changes.
fn resample<T: Copy>(
    values: &[T],
    [rows, columns]: [usize; 2],
    [new_rows, new_columns]: [usize; 2],
    mix: impl Fn(&mut dyn Iterator<Item = (T, f64)>) -> T,
) -> Vec<T> {
    const CHANNELS: usize = 3;
    let mut values = values.to_vec();
    if columns != new_columns {
        let windows = windows(columns, new_columns);
        let lines = values.chunks_exact(columns * CHANNELS);
        values = lines
            .flat_map(|line| {
                let mix = &mix;
                windows.iter().flat_map(move |window| {
                    (0..CHANNELS).map(move |channel| {
                        let pixels = line[window.first * CHANNELS..].iter().skip(channel);
                        mix(&mut pixels
                            .step_by(CHANNELS)
                            .copied()
                            .zip(window.weights.iter().copied()))
                    })
                })
            })
            .collect();
    }
    if rows != new_rows {
        let width = new_columns * CHANNELS;
        values = windows(rows, new_rows)
            .iter()
            .flat_map(|window| {
                let (mix, values) = (&mix, &values);
                (0..width).map(move |at| {
                    let pixels = values[window.first * width + at..].iter().step_by(width);
                    mix(&mut pixels.copied().zip(window.weights.iter().copied()))
                })
            })
            .collect();
    }
    values
}

/// What each of `new` pixels sees of a line of `size`.
fn windows(size: usize, new: usize) -> Vec<Window> {
    let scale = size as f64 / new as f64;
    let stretch = scale.max(1.0);
    let support = SUPPORT * stretch;
    (0..new)
        .map(|at| {
            let center = (at as f64 + 0.5) * scale;
            let first = (center - support + 0.5).max(0.0) as usize;
            let end = ((center + support + 0.5) as usize).min(size);
            let weights = (first..end).map(|x| cubic((x as f64 - center + 0.5) / stretch));
            let mut weights: Vec<f64> = weights.collect();
            let sum: f64 = weights.iter().sum();
            for weight in &mut weights {
                *weight /= sum;
            }
            Window { first, weights }
        })
        .collect()
}

/// The cubic convolution kernel (Keys 1981) with a = -0.5.
fn cubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}
