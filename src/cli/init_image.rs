//! Pictures that `generate` is given: the one to start from, its mask, and what steers a ControlNet.

use std::path::Path;

use image::imageops::FilterType;
use image::{DynamicImage, ImageReader, Limits};

use crate::config::Config;
use crate::host_tensor::HostTensor;
use crate::pipelines::canny::{THRESHOLDS, canny};
use crate::pipelines::model::DiffusionModel;
use crate::pipelines::text_to_image::ControlImage;

use super::CliError;

/// Longest side of a picture that is read, in pixels.
const LONGEST_SIDE: u32 = 16384;
/// Most memory that decoding one may take, in bytes.
const MOST_MEMORY: u64 = 1 << 30;

/// What drawing starts from.
pub struct InitImage {
    /// `f32[1, 3, height, width]` in [-1, 1].
    pub image: HostTensor,
    /// `f32[1, 1, rows, columns]` of latents: 1 where the picture is drawn anew, 0 where it is kept.
    pub mask: Option<HostTensor>,
}

/// Reads `image` and `mask_image`, scaled to the size of the model's pictures and latents; `None` without them.
///
/// # Errors
/// When the model has no VAE, or a file is no picture that can be read.
pub fn read(config: &Config, model: &DiffusionModel) -> Result<Option<InitImage>, CliError> {
    if config.image.is_empty() {
        return Ok(None);
    }
    if model.vae.is_none() {
        return Err(CliError::Usage(format!(
            "image={}: a model of pixels starts from noise alone; name a model of latents",
            config.image
        )));
    }
    let [height, width] = model.image_size;
    let picture = open("image", &config.image, model)?.to_rgb8();
    let image = planes(&picture, model.image_size, |byte| byte / 127.5 - 1.0)?;
    let mask = match config.mask_image.as_str() {
        "" => None,
        path => {
            let mask = open("mask_image", path, model)?.to_luma8();
            let [rows, columns] = model.sample_size;
            let (scale_y, scale_x) = (height / rows.max(1), width / columns.max(1));
            let values: Vec<f32> = (0..rows * columns)
                .map(|at| {
                    let (x, y) = (at % columns * scale_x, at / columns * scale_y);
                    let value = mask.get_pixel(x as u32, y as u32).0[0];
                    if value < 128 { 0.0 } else { 1.0 }
                })
                .collect();
            Some(HostTensor::from_f32([1, 1, rows, columns], &values).map_err(CliError::failed)?)
        }
    };
    Ok(Some(InitImage { image, mask }))
}

/// Reads `controlnet_image`, scaled to the size of the pictures; `None` without `use_controlnet`.
///
/// # Errors
/// When the model has no ControlNet, the file is no picture that can be read, or the range is empty.
pub fn read_control(
    config: &Config,
    model: &DiffusionModel,
) -> Result<Option<ControlImage>, CliError> {
    if !config.use_controlnet {
        return Ok(None);
    }
    if model.controlnet.is_none() {
        return Err(CliError::Usage(format!(
            "controlnet_image={}: only models of latents that are read from files take a ControlNet",
            config.controlnet_image
        )));
    }
    let range = [config.control_guidance_start, config.control_guidance_end];
    if range[0] >= range[1] {
        return Err(CliError::Usage(format!(
            "control_guidance_start={} is not below control_guidance_end={}: the ControlNet would never steer",
            range[0], range[1]
        )));
    }
    let picture = open("controlnet_image", &config.controlnet_image, model)?
        .to_rgb8()
        .into_raw();
    let picture = match config.controlnet_canny {
        true => canny(&picture, model.image_size, THRESHOLDS).map_err(CliError::failed)?,
        false => picture,
    };
    Ok(Some(ControlImage {
        image: planes(&picture, model.image_size, |byte| byte / 255.0)?,
        scale: config.controlnet_conditioning_scale as f32,
        range,
    }))
}

/// `f32[1, 3, height, width]` of RGB bytes, each through `value`.
fn planes(
    rgb: &[u8],
    [height, width]: [usize; 2],
    value: impl Fn(f32) -> f32,
) -> Result<HostTensor, CliError> {
    let plane = height * width;
    let mut values = vec![0.0; 3 * plane];
    for (at, pixel) in rgb.chunks_exact(3).enumerate() {
        for (channel, byte) in pixel.iter().enumerate() {
            values[channel * plane + at] = value(f32::from(*byte));
        }
    }
    HostTensor::from_f32([1, 3, height, width], &values).map_err(CliError::failed)
}

/// The picture at `path`, scaled to the size of the model's pictures as diffusers' `VaeImageProcessor` does it.
fn open(key: &str, path: &str, model: &DiffusionModel) -> Result<DynamicImage, CliError> {
    let failed = |reason: String| CliError::Usage(format!("{key}={path}: {reason}"));
    let mut reader = ImageReader::open(Path::new(path))
        .and_then(ImageReader::with_guessed_format)
        .map_err(|e| failed(e.to_string()))?;
    let mut limits = Limits::default();
    limits.max_image_width = Some(LONGEST_SIDE);
    limits.max_image_height = Some(LONGEST_SIDE);
    limits.max_alloc = Some(MOST_MEMORY);
    reader.limits(limits);
    let picture = reader.decode().map_err(|e| {
        failed(format!(
            "not a picture that can be read (PNG, JPEG or WebP), or a damaged one: {e}"
        ))
    })?;
    let [height, width] = model.image_size;
    Ok(picture.resize_exact(width as u32, height as u32, FilterType::Lanczos3))
}
