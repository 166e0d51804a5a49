//! Samples at another size: `torch.nn.functional.interpolate` with `size`, without `align_corners` or `antialias`.

use crate::host_tensor::HostTensor;

use super::PipelineError;

/// How values between places are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interpolation {
    Nearest,
    Bilinear,
    Bicubic,
}

/// Places of the input and their weights, of one place of the output.
type Taps = Vec<(usize, f32)>;

impl Interpolation {
    /// What each of `to` places takes of `from` places, computed in f32 as PyTorch does.
    fn taps(self, from: usize, to: usize) -> Vec<Taps> {
        let scale = from as f32 / to as f32;
        let last = from.saturating_sub(1);
        let middle = |place: usize| (place as f32 + 0.5) * scale - 0.5;
        (0..to)
            .map(|place| match self {
                Interpolation::Nearest => {
                    let source = (place as f32 * scale).floor() as usize;
                    vec![(source.min(last), 1.0)]
                }
                Interpolation::Bilinear => {
                    let source = middle(place).max(0.0);
                    let low = (source as usize).min(last);
                    let share = source - low as f32;
                    vec![(low, 1.0 - share), ((low + 1).min(last), share)]
                }
                Interpolation::Bicubic => {
                    let source = middle(place);
                    let low = source.floor();
                    let weights = cubic(source - low);
                    let at = |tap: usize| (low as i64 + tap as i64 - 1).clamp(0, last as i64);
                    let taps = weights.into_iter().enumerate();
                    taps.map(|(tap, weight)| (at(tap) as usize, weight))
                        .collect()
                }
            })
            .collect()
    }
}

/// The weights of four neighbours for a place `share` of the way from the second to the third: the cubic convolution of
/// Keys (1981) with PyTorch's -0.75.
fn cubic(share: f32) -> [f32; 4] {
    const A: f32 = -0.75;
    let near = |x: f32| ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0;
    let far = |x: f32| ((A * x - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A;
    let rest = 1.0 - share;
    [far(share + 1.0), near(share), near(rest), far(rest + 1.0)]
}

/// `samples` `f32[batch, channels, height, width]` with another height and width.
///
/// # Errors
/// When `samples` have other dimensions.
pub fn interpolate(
    samples: &HostTensor,
    [rows, columns]: [usize; 2],
    interpolation: Interpolation,
) -> Result<HostTensor, PipelineError> {
    let &[batch, channels, height, width] = samples.shape.dims.as_slice() else {
        return Err(PipelineError::Request(format!(
            "samples {} to enlarge; expected [batch, channels, height, width]",
            samples.shape
        )));
    };
    let across = interpolation.taps(width, columns);
    let down = interpolation.taps(height, rows);
    let mut resized = Vec::with_capacity(batch * channels * rows * columns);
    for plane in samples.to_f32_vec()?.chunks_exact((height * width).max(1)) {
        let wide: Vec<Vec<f32>> = plane
            .chunks_exact(width)
            .map(|row| across.iter().map(|taps| sum(taps, |at| row[at])).collect())
            .collect();
        for taps in &down {
            resized.extend((0..columns).map(|column| sum(taps, |at| wide[at][column])));
        }
    }
    let dims = [batch, channels, rows, columns];
    Ok(HostTensor::from_f32(dims, &resized)?)
}

/// `images` `f32[batch, channels, height, width]` at another size: scaled by the least that covers it, then the middle cut out,
/// as diffusers' `PixArtImageProcessor.resize_and_crop_tensor` does it.
///
/// # Errors
/// When `images` have other dimensions.
pub fn resize_and_crop(
    images: &HostTensor,
    [rows, columns]: [usize; 2],
) -> Result<HostTensor, PipelineError> {
    let &[batch, channels, height, width] = images.shape.dims.as_slice() else {
        return Err(PipelineError::Request(format!(
            "images {} to scale; expected [batch, channels, height, width]",
            images.shape
        )));
    };
    if [height, width] == [rows, columns] {
        return Ok(images.clone());
    }
    let scale = f64::max(rows as f64 / height as f64, columns as f64 / width as f64);
    let larger = |side: usize, least: usize| ((side as f64 * scale) as usize).max(least);
    let [tall, wide] = [larger(height, rows), larger(width, columns)];
    let scaled = interpolate(images, [tall, wide], Interpolation::Bilinear)?.to_f32_vec()?;
    let [top, left] = [(tall - rows) / 2, (wide - columns) / 2];
    let mut values = Vec::with_capacity(batch * channels * rows * columns);
    for plane in scaled.chunks_exact(tall * wide) {
        for row in plane.chunks_exact(wide).skip(top).take(rows) {
            values.extend_from_slice(&row[left..left + columns]);
        }
    }
    let dims = [batch, channels, rows, columns];
    Ok(HostTensor::from_f32(dims, &values)?)
}

fn sum(taps: &Taps, value: impl Fn(usize) -> f32) -> f32 {
    taps.iter().map(|(at, weight)| weight * value(*at)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPECTED: [(Interpolation, [f32; 15]); 3] = [
        (
            Interpolation::Nearest,
            [
                0.0, 0.0, 1.0, 1.0, 4.0, 0.0, 0.0, 1.0, 1.0, 4.0, 9.0, 9.0, 16.0, 16.0, 25.0,
            ],
        ),
        (
            Interpolation::Bilinear,
            [
                0.0, 0.4, 1.0, 2.8, 4.0, 4.5, 6.1, 8.5, 12.1, 14.5, 9.0, 11.8, 16.0, 21.4, 25.0,
            ],
        ),
        (
            Interpolation::Bicubic,
            [
                -0.82725, -0.773_833, -0.302_083, 1.249_667, 2.415_084, 4.116, 5.620_002, 8.5,
                12.46, 15.076_001, 9.059_25, 12.013_836, 17.302_082, 23.670_334, 27.736_916,
            ],
        ),
    ];

    /// `torch.nn.functional.interpolate(x, size=(3, 5), mode=..)` of torch 2.15 for `x = [[0, 1, 4], [9, 16, 25]]`.
    #[test]
    fn values_are_those_of_pytorch() {
        let x = HostTensor::from_f32([1, 1, 2, 3], &[0.0, 1.0, 4.0, 9.0, 16.0, 25.0]).unwrap();
        for (interpolation, expected) in EXPECTED {
            let found = interpolate(&x, [3, 5], interpolation).unwrap();
            assert_eq!(found.shape.dims, [1, 1, 3, 5]);
            let found = found.to_f32_vec().unwrap();
            for (found, expected) in found.iter().zip(expected) {
                assert!(
                    (found - expected).abs() < 2e-5,
                    "{interpolation:?}: {found} {expected}"
                );
            }
        }
    }

    /// diffusers 0.42's `PixArtImageProcessor.resize_and_crop_tensor` of a channel whose values are the squares of 0 to 11
    /// over 100.
    #[test]
    fn the_middle_is_cut_out_of_what_covers_it() {
        const WIDE: [f32; 10] = [
            0.0, 0.007, 0.025, 0.055, 0.09, 0.16, 0.223, 0.305, 0.399, 0.49,
        ];
        const TALL: [f32; 15] = [
            0.005, 0.015, 0.035, 0.085, 0.116_333, 0.157_667, 0.205, 0.268_333, 0.341_667, 0.517,
            0.612_333, 0.717_667, 0.725, 0.841_667, 0.968_333,
        ];
        let squares: Vec<f32> = (0..12).map(|i| (i * i) as f32 / 100.0).collect();
        let x = HostTensor::from_f32([1, 1, 3, 4], &squares).unwrap();
        for (size, expected) in [([2, 5], &WIDE[..]), ([5, 3], &TALL), ([3, 4], &squares)] {
            let found = resize_and_crop(&x, size).unwrap();
            assert_eq!(found.shape.dims[2..], size);
            for (found, expected) in found.to_f32_vec().unwrap().iter().zip(expected) {
                assert!((found - expected).abs() < 2e-6, "{found} {expected}");
            }
        }
    }
}
