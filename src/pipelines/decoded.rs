//! From decoded values to an image of bytes.

use image::RgbImage;

use crate::host_tensor::HostTensor;

use super::PipelineError;
use super::pixels::{RGB, to_pixels};

/// The image of decoded `f32[1, 3, height, width]` in [-1, 1].
pub(super) fn decoded_to_image(decoded: &HostTensor) -> Result<RgbImage, PipelineError> {
    let &[1, RGB, height, width] = decoded.shape.dims.as_slice() else {
        return Err(PipelineError::Request(format!(
            "a decoded image {}; expected [1, 3, height, width]",
            decoded.shape
        )));
    };
    let values = decoded.to_f32_vec()?;
    let plane = height * width;
    let bytes = (0..plane).flat_map(|at| (0..RGB).map(move |channel| channel * plane + at));
    image(width, height, bytes.map(|at| byte(values[at])).collect())
}

/// The image of one sample of a pixel-space model, in [-1, 1], with `k x k` pixels in each position.
pub(super) fn pixels_to_image(sample: &HostTensor, k: usize) -> Result<RgbImage, PipelineError> {
    let dims = &sample.shape.dims;
    if dims.len() != 4 || dims[1] != RGB * k * k || dims[2] != dims[3] {
        return Err(PipelineError::Request(format!(
            "the model's samples {} are not square RGB images (pixel_unshuffle={k})",
            sample.shape
        )));
    }
    check_samples(sample)?;
    let side = dims[2] * k;
    let pixels = to_pixels(&sample.to_f32_vec()?, 0, side, k).into_iter();
    image(side, side, pixels.map(byte).collect())
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
