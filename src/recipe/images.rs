//! Input images of `generate`: the initial image, its mask, and the conditioning images of ControlNets.

use std::io::BufReader;
use std::path::Path;

use image::{DynamicImage, ImageReader, Limits, RgbImage};

use crate::config::{Config, OneOrMore};
use crate::host_tensor::HostTensor;
use crate::models::{ControlNet, DenoiserKind, DiffusionModel, MicroConditioning, SeenImage};
use crate::pipelines::canny::{THRESHOLDS, canny};
use crate::pipelines::denoiser::ControlImage;
use crate::pipelines::init_image::{InitImages, scaled, signed_planes, unit_planes};
use crate::util::files;

use super::RecipeError;

/// Longest side of an image that is read, in pixels.
const LONGEST_SIDE: u32 = 16384;
/// Most memory that decoding one may take, in bytes.
const MOST_MEMORY: u64 = 1 << 30;

/// Reads every `image`, and `mask_image`, scaled to the size of the model's images; `None` without them. `name` is what
/// the model is called in errors.
///
/// # Errors
/// When the model has no VAE, or needs an image or a mask that is not given, or a file is no image that can be read.
pub fn read(
    config: &Config,
    model: &DiffusionModel,
    name: &str,
) -> Result<Option<InitImages>, RecipeError> {
    let paths = config.input_images();
    if model.is_inpainting() && (paths.is_empty() || config.mask_image.is_empty()) {
        return Err(RecipeError::Usage(format!(
            "{name}: an inpainting model (its {} takes mask and masked image beside the sample) needs an image: give image=FILE and mask_image=FILE, white where it should change; found image='{}', mask_image='{}'",
            model.denoiser.part(),
            paths.join(", "),
            config.mask_image
        )));
    }
    let scored = matches!(
        model.micro_conditioning,
        MicroConditioning::AestheticScore { .. }
    );
    if scored && paths.is_empty() {
        return Err(RecipeError::Usage(format!(
            "{name}: SDXL's refiner starts from an image: give image=FILE and a strength such as 0.3, or name a base model \
             and this one as refiner_model_name_or_path"
        )));
    }
    if paths.is_empty() {
        return Ok(None);
    }
    if model.vae.is_none() {
        return Err(RecipeError::Usage(format!(
            "image={}: a pixel-space model starts from noise alone; name a latent model",
            paths.join(", ")
        )));
    }
    let images = paths.iter().map(|path| open("image", path, model));
    let images = images.collect::<Result<Vec<_>, _>>()?;
    let mask = match config.mask_image.as_str() {
        "" => None,
        path => Some(open("mask_image", path, model)?),
    };
    let inits = InitImages::new(&images, mask.as_ref()).map_err(RecipeError::failed)?;
    Ok(Some(inits))
}

/// Opens the files of images that the configuration names, without reading them.
///
/// # Errors
/// When one is not there, or is no file.
pub fn check_files(config: &Config) -> Result<(), RecipeError> {
    let controls = config.controlnet_image.0.iter();
    let controls = controls.filter(|_| config.use_controlnet);
    let images = config.input_images().iter().map(|path| ("image", path));
    let named = images
        .chain([
            ("mask_image", &config.mask_image),
            ("ip_adapter_image", &config.ip_adapter_image),
        ])
        .chain(controls.map(|path| ("controlnet_image", path)));
    for (key, path) in named.filter(|(_, path)| !path.is_empty()) {
        files::open(Path::new(path))
            .map_err(|e| RecipeError::Usage(format!("{key}={path}: {e}")))?;
    }
    Ok(())
}

/// Reads the image that steers a model that sees one, scaled to the size of its images: `f32[1, 3, height, width]` in [-1, 1].
///
/// # Errors
/// When the model needs one that is not given, or takes none that is, or the file is no image that can be read.
pub fn read_control_image(
    config: &Config,
    model: &DiffusionModel,
    name: &str,
) -> Result<Option<HostTensor>, RecipeError> {
    let path = config
        .controlnet_image
        .get(0)
        .filter(|path| !path.is_empty());
    match (model.denoiser.seen_image(), path) {
        (Some(SeenImage::Control), Some(path)) => {
            let image = open("controlnet_image", path, model)?;
            let image = match config.controlnet_canny.get(0) {
                Some(true) => edges(&image)?,
                Some(false) | None => image,
            };
            Ok(Some(signed_planes(&image).map_err(RecipeError::failed)?))
        }
        (Some(SeenImage::Control), None) => Err(RecipeError::Usage(format!(
            "{name}: its transformer takes an image that steers beside the sample: give controlnet_image=FILE, with \
             controlnet_canny=True if its edges are to be found"
        ))),
        (_, Some(path))
            if model.denoiser.kind() == DenoiserKind::Flux && !config.use_controlnet =>
        {
            Err(RecipeError::Usage(format!(
                "controlnet_image={path} has no effect: {name} takes no image that steers; FLUX.1 Canny and Depth do, and \
                 ControlNets (use_controlnet=True)"
            )))
        }
        _ => Ok(None),
    }
}

/// Reads what steers each ControlNet, scaled to the size of the images; nothing without `use_controlnet`.
///
/// # Errors
/// When the model has no ControlNets, a file is no image that can be read, or a range is empty.
pub fn read_controls(
    config: &Config,
    model: &DiffusionModel,
) -> Result<Vec<ControlImage>, RecipeError> {
    if !config.use_controlnet {
        return Ok(Vec::new());
    }
    if model.controlnets.is_empty() {
        return Err(RecipeError::Usage(
            "use_controlnet=True: only latent models that are read from files take a ControlNet, and SDXL's refiner takes none"
                .to_string(),
        ));
    }
    if config.true_cfg_scale > 1.0 && model.denoiser.kind() == DenoiserKind::Flux {
        return Err(RecipeError::Usage(format!(
            "true_cfg_scale={} with use_controlnet=True is not built for {}; leave one of the two out",
            config.true_cfg_scale,
            model.family.title()
        )));
    }
    if model.denoiser.seen_image().is_some() && model.denoiser.kind() == DenoiserKind::Flux {
        return Err(RecipeError::Usage(format!(
            "use_controlnet=True is not built for models of {} that see an image beside the sample; leave it out",
            model.family.title()
        )));
    }
    let nets = model.controlnets.iter().enumerate();
    nets.map(|(which, net)| read_control(config, model, net, which))
        .collect()
}

/// The conditioning image of ControlNet `which`.
fn read_control(
    config: &Config,
    model: &DiffusionModel,
    net: &ControlNet,
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
            "control_guidance_start={} is not below control_guidance_end={}: the ControlNet would never act",
            range[0], range[1]
        )));
    }
    let path = config.controlnet_image.get(which).ok_or_else(missing)?;
    let image = open("controlnet_image", path, model)?;
    let image = match config.controlnet_canny.get(which) {
        Some(true) => edges(&image)?,
        Some(false) | None => image,
    };
    let image = match net.sees_latents() {
        true => signed_planes(&image),
        false => unit_planes(&image),
    };
    Ok(ControlImage {
        image: image.map_err(RecipeError::failed)?,
        mode: control_mode(config, net, which)?,
        scale: number(&config.controlnet_conditioning_scale)? as f32,
        range,
    })
}

/// The kind of the image that ControlNet `which` sees.
fn control_mode(
    config: &Config,
    net: &ControlNet,
    which: usize,
) -> Result<Option<i32>, RecipeError> {
    let name = config.controlnet_model_name_or_path.get(which);
    let name = name.map_or("", String::as_str);
    let given = config.control_mode.get(which).filter(|mode| **mode != -1);
    let refuse = |message: String| Err(RecipeError::Usage(message));
    match (net.modes(), given) {
        (None, None) => Ok(None),
        (Some(modes), Some(mode)) if (0..modes as i64).contains(mode) => Ok(Some(*mode as i32)),
        (Some(modes), Some(mode)) => refuse(format!(
            "control_mode={mode}: {name} knows {modes} kinds of images, from 0 to {}",
            modes - 1
        )),
        (Some(modes), None) => refuse(format!(
            "{name} knows {modes} kinds of images: say with control_mode=NUMBER which one controlnet_image is; its model card \
             has the numbers"
        )),
        (None, Some(mode)) => refuse(format!(
            "control_mode={mode} has no effect: {name} knows one kind of images; leave it out"
        )),
    }
}

/// The edges of an image, for ControlNets that are trained on them.
fn edges(image: &RgbImage) -> Result<RgbImage, RecipeError> {
    let (width, height) = image.dimensions();
    let size = [height as usize, width as usize];
    let edges = canny(image.as_raw(), size, THRESHOLDS).map_err(RecipeError::failed)?;
    RgbImage::from_raw(width, height, edges)
        .ok_or_else(|| RecipeError::failed("edges with another size than their image"))
}

/// The image at `path`, scaled to the size of the model's images as diffusers' `VaeImageProcessor` does it.
fn open(key: &str, path: &str, model: &DiffusionModel) -> Result<RgbImage, RecipeError> {
    Ok(scaled(&decode(key, path)?, model.image_size))
}

/// The image at `path`.
///
/// # Errors
/// When the file is no image that can be read, or a larger one than any here.
pub(super) fn decode(key: &str, path: &str) -> Result<DynamicImage, RecipeError> {
    let failed = |reason: String| RecipeError::Usage(format!("{key}={path}: {reason}"));
    let mut reader = files::open(Path::new(path))
        .and_then(|file| ImageReader::new(BufReader::new(file)).with_guessed_format())
        .map_err(|e| failed(e.to_string()))?;
    let mut limits = Limits::default();
    limits.max_image_width = Some(LONGEST_SIDE);
    limits.max_image_height = Some(LONGEST_SIDE);
    limits.max_alloc = Some(MOST_MEMORY);
    reader.limits(limits);
    reader.decode().map_err(|e| {
        failed(format!(
            "not an image that can be read (PNG, JPEG or WebP), or a damaged one: {e}"
        ))
    })
}
