//! Pictures that `generate` is given: the one to start from, its mask, and what steers a ControlNet.

use std::path::Path;

use image::imageops::FilterType;
use image::{DynamicImage, ImageReader, Limits};

use crate::config::{Config, OneOrMore};
use crate::host_tensor::HostTensor;
use crate::models::{DiffusionModel, MicroConditioning};
use crate::pipelines::canny::{THRESHOLDS, canny};
use crate::pipelines::denoiser::ControlImage;

use super::RecipeError;

/// Longest side of a picture that is read, in pixels.
const LONGEST_SIDE: u32 = 16384;
/// Most memory that decoding one may take, in bytes.
const MOST_MEMORY: u64 = 1 << 30;

/// What drawing starts from.
pub struct InitImage {
    /// `f32[1, 3, height, width]` in [-1, 1].
    pub image: HostTensor,
    /// `f32[1, 1, height, width]`: 1 where the picture is drawn anew, 0 where it is kept.
    pub mask: Option<HostTensor>,
}

/// Reads `image` and `mask_image`, scaled to the size of the model's pictures; `None` without them. `name` is what the
/// model is called in errors.
///
/// # Errors
/// When the model has no VAE, or needs a picture or a mask that is not given, or a file is no picture that can be read.
pub fn read(
    config: &Config,
    model: &DiffusionModel,
    name: &str,
) -> Result<Option<InitImage>, RecipeError> {
    if model.is_inpainting() && (config.image.is_empty() || config.mask_image.is_empty()) {
        return Err(RecipeError::Usage(format!(
            "{name}: a model for inpainting (its UNet takes nine channels: sample, mask and masked picture) draws in a \
             picture: give image=FILE and mask_image=FILE, white where it shall draw; found image='{}', mask_image='{}'",
            config.image, config.mask_image
        )));
    }
    let scored = matches!(
        model.micro_conditioning,
        MicroConditioning::AestheticScore { .. }
    );
    if scored && config.image.is_empty() {
        return Err(RecipeError::Usage(format!(
            "{name}: SDXL's refiner goes on from a picture: give image=FILE and a strength such as 0.3, or name a base model \
             and this one as refiner_model_name_or_path"
        )));
    }
    if config.image.is_empty() {
        return Ok(None);
    }
    if model.vae.is_none() {
        return Err(RecipeError::Usage(format!(
            "image={}: a model of pixels starts from noise alone; name a model of latents",
            config.image
        )));
    }
    let picture = open("image", &config.image, model)?.to_rgb8();
    let image = planes(&picture, model.image_size, |byte| byte / 127.5 - 1.0)?;
    let mask = match config.mask_image.as_str() {
        "" => None,
        path => {
            let [height, width] = model.image_size;
            let values: Vec<f32> = open("mask_image", path, model)?
                .to_rgb8()
                .pixels()
                .map(|pixel| if is_white(pixel.0) { 1.0 } else { 0.0 })
                .collect();
            Some(
                HostTensor::from_f32([1, 1, height, width], &values)
                    .map_err(RecipeError::failed)?,
            )
        }
    };
    Ok(Some(InitImage { image, mask }))
}

/// Whether a pixel of a mask is nearer to white: its grey by ITU-R 601, in the whole numbers of Pillow's `convert("L")`,
/// is at least half, as diffusers rounds masks.
fn is_white([red, green, blue]: [u8; 3]) -> bool {
    let weighted = 19595 * u32::from(red) + 38470 * u32::from(green) + 7471 * u32::from(blue);
    (weighted + 0x8000) >> 16 >= 128
}

/// Reads what steers each ControlNet, scaled to the size of the pictures; nothing without `use_controlnet`.
///
/// # Errors
/// When the model has no ControlNets, a file is no picture that can be read, or a range is empty.
pub fn read_controls(
    config: &Config,
    model: &DiffusionModel,
) -> Result<Vec<ControlImage>, RecipeError> {
    if !config.use_controlnet {
        return Ok(Vec::new());
    }
    if model.controlnets.is_empty() {
        return Err(RecipeError::Usage(
            "use_controlnet=True: only models of latents that are read from files take a ControlNet, and not SDXL's refiner"
                .to_string(),
        ));
    }
    (0..model.controlnets.len())
        .map(|which| read_control(config, model, which))
        .collect()
}

/// What steers ControlNet `which`.
fn read_control(
    config: &Config,
    model: &DiffusionModel,
    which: usize,
) -> Result<ControlImage, RecipeError> {
    let missing = || RecipeError::Usage(format!("there are no settings for ControlNet {which}"));
    let number = |values: &OneOrMore<f64>| values.get(which).copied().ok_or_else(missing);
    let range = [
        number(&config.control_guidance_start)?,
        number(&config.control_guidance_end)?,
    ];
    if range[0] >= range[1] {
        return Err(RecipeError::Usage(format!(
            "control_guidance_start={} is not below control_guidance_end={}: the ControlNet would never steer",
            range[0], range[1]
        )));
    }
    let path = config.controlnet_image.get(which).ok_or_else(missing)?;
    let picture = open("controlnet_image", path, model)?.to_rgb8().into_raw();
    let picture = match config.controlnet_canny.get(which) {
        Some(true) => canny(&picture, model.image_size, THRESHOLDS).map_err(RecipeError::failed)?,
        Some(false) | None => picture,
    };
    Ok(ControlImage {
        image: planes(&picture, model.image_size, |byte| byte / 255.0)?,
        scale: number(&config.controlnet_conditioning_scale)? as f32,
        range,
    })
}

/// `f32[1, 3, height, width]` of RGB bytes, each through `value`.
fn planes(
    rgb: &[u8],
    [height, width]: [usize; 2],
    value: impl Fn(f32) -> f32,
) -> Result<HostTensor, RecipeError> {
    let plane = height * width;
    let mut values = vec![0.0; 3 * plane];
    for (at, pixel) in rgb.chunks_exact(3).enumerate() {
        for (channel, byte) in pixel.iter().enumerate() {
            values[channel * plane + at] = value(f32::from(*byte));
        }
    }
    HostTensor::from_f32([1, 3, height, width], &values).map_err(RecipeError::failed)
}

/// The picture at `path`, scaled to the size of the model's pictures as diffusers' `VaeImageProcessor` does it.
fn open(key: &str, path: &str, model: &DiffusionModel) -> Result<DynamicImage, RecipeError> {
    let failed = |reason: String| RecipeError::Usage(format!("{key}={path}: {reason}"));
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

#[cfg(test)]
mod tests {
    use super::is_white;

    /// Greys by Pillow 12: (127, 127, 127) is 127, (0, 218, 0) is 128, (0, 217, 0) is 127, (255, 87, 0) is 127,
    /// (255, 88, 0) is 128, (128, 128, 128) is 128.
    #[test]
    fn colours_of_masks_are_rounded_as_pillow_does() {
        for (pixel, white) in [
            ([127, 127, 127], false),
            ([128, 128, 128], true),
            ([0, 217, 0], false),
            ([0, 218, 0], true),
            ([255, 87, 0], false),
            ([255, 88, 0], true),
            ([0, 0, 255], false),
        ] {
            assert_eq!(is_white(pixel), white, "{pixel:?}");
        }
    }
}
