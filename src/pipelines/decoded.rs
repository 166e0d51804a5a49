//! From decoded values to images of bytes.

use image::RgbImage;

use crate::host_tensor::HostTensor;

use super::PipelineError;
use super::pixels::{RGB, to_pixels};

/// Images of decoded `f32[batch, 3, height, width]` in [-1, 1].
pub(super) fn decoded_to_images(decoded: &HostTensor) -> Result<Vec<RgbImage>, PipelineError> {
    let &[_, RGB, height, width] = decoded.shape.dims.as_slice() else {
        return Err(PipelineError::Request(format!(
            "decoded images {}; expected [batch, 3, height, width]",
            decoded.shape
        )));
    };
    let values = decoded.to_f32_vec()?;
    let plane = height * width;
    values
        .chunks(RGB * plane)
        .map(|values| {
            let bytes = (0..plane)
                .flat_map(|at| (0..RGB).map(move |c| byte(values[c * plane + at])))
                .collect();
            image(width, height, bytes)
        })
        .collect()
}

/// Images from the samples of a pixel-space model, in [-1, 1], with `k x k` pixels in each position.
pub(super) fn pixels_to_images(
    sample: &HostTensor,
    k: usize,
) -> Result<Vec<RgbImage>, PipelineError> {
    let dims = &sample.shape.dims;
    if dims.len() != 4 || dims[1] != RGB * k * k || dims[2] != dims[3] {
        return Err(PipelineError::Request(format!(
            "the model's samples {} are not square RGB images (pixel_unshuffle={k})",
            sample.shape
        )));
    }
    check_samples(sample)?;
    let values = sample.to_f32_vec()?;
    let side = dims[2] * k;
    (0..dims[0])
        .map(|n| {
            let pixels = to_pixels(&values, n, side, k).into_iter();
            image(side, side, pixels.map(byte).collect())
        })
        .collect()
}

/// Refuses a sample with infinite or NaN values.
pub(super) fn check_samples(sample: &HostTensor) -> Result<(), PipelineError> {
    match sample.to_f32_vec()?.iter().all(|v| v.is_finite()) {
        true => Ok(()),
        false => Err(PipelineError::NotFinite),
    }
}

/// A value in [-1, 1] as a byte.
fn byte(value: f32) -> u8 {
    ((value + 1.0) * 127.5).round().clamp(0.0, 255.0) as u8
}

fn image(width: usize, height: usize, bytes: Vec<u8>) -> Result<RgbImage, PipelineError> {
    let found = bytes.len();
    RgbImage::from_raw(width as u32, height as u32, bytes).ok_or_else(|| {
        PipelineError::Request(format!(
            "{found} bytes for an image of {width} x {height} pixels"
        ))
    })
}
