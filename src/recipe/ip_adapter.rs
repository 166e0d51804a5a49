//! The IP-Adapter of `generate`.

use std::path::{Path, PathBuf};

use image::GenericImageView;

use crate::config::Config;
use crate::models::clip::vision::ClipVisionConfig;
use crate::models::ip_adapter::{IMAGE_ENCODER, IpAdapterConfig, ROOT};
use crate::models::unet::UNet2DConditionConfig;
use crate::pipelines::image_prompt::{ImagePrompt, Middle, clip_pixels};
use crate::util::files;
use crate::weights::Checkpoint;

use super::{RecipeError, images};

/// An image is scaled by its shorter side, so this many times longer it would take this many times the memory.
const LONGEST: u32 = 16;

/// An adapter with its files.
pub struct Adapter {
    pub config: IpAdapterConfig,
    /// The file or folder of the weights under each root.
    pub files: Vec<(String, PathBuf)>,
}

/// Checks the names of the files that the configuration gives, without opening them.
///
/// # Errors
/// When the adapter is a pickle, or not there.
pub fn check_path(config: &Config) -> Result<(), RecipeError> {
    let path = &config.ip_adapter_path;
    if path.is_empty() {
        return Ok(());
    }
    let fail = |reason: String| {
        Err(RecipeError::Usage(format!(
            "ip_adapter_path={path}: {reason}"
        )))
    };
    let extension = Path::new(path).extension().unwrap_or_default();
    if extension != "safetensors" {
        return fail(match extension.to_str() {
            Some("bin" | "pt" | "pth" | "ckpt") => {
                "a pickle, which can run code when it is read; take the .safetensors of the same name".to_owned()
            }
            _ => "expected a .safetensors file, such as ip-adapter_sd15.safetensors".to_owned(),
        });
    }
    if !Path::new(path).is_file() {
        return fail("no such file".to_owned());
    }
    Ok(())
}

/// Opens the adapter for `unet`; `None` where the configuration names none.
///
/// # Errors
/// When a file is missing, or the adapter is another kind, for another UNet, or for another image encoder.
pub fn adapter(
    config: &Config,
    unet: &UNet2DConditionConfig,
) -> Result<Option<Adapter>, RecipeError> {
    check_path(config)?;
    if config.ip_adapter_path.is_empty() {
        return Ok(None);
    }
    let file = PathBuf::from(&config.ip_adapter_path);
    let folder = match config.ip_adapter_image_encoder.as_str() {
        "" => file.with_file_name(IMAGE_ENCODER),
        given => PathBuf::from(given),
    };
    let path = folder.join("config.json");
    let text = files::read_to_string(&path).map_err(|e| {
        RecipeError::Usage(format!(
            "{}: {e}; an IP-Adapter needs its image encoder: name the folder with ip_adapter_image_encoder",
            path.display()
        ))
    })?;
    let vision = ClipVisionConfig::from_json(&text).map_err(RecipeError::at(path.display()))?;
    let checkpoint = Checkpoint::open(&file).map_err(RecipeError::failed)?;
    let features = unet.cross_attention_dim.get(0).unwrap_or_default();
    let sizes = |name: &str| checkpoint.info(name).map(|shape| shape.dims.clone());
    let config =
        IpAdapterConfig::new(vision, features, &sizes).map_err(RecipeError::at(file.display()))?;
    Ok(Some(Adapter {
        config,
        files: vec![(ROOT.to_owned(), file), (IMAGE_ENCODER.to_owned(), folder)],
    }))
}

/// Reads the image for the adapter of the model, if it has one. `name` is what the model is called in errors.
///
/// # Errors
/// When the file is no image that can be read, or the model takes no adapter.
pub fn image_prompt(
    config: &Config,
    adapter: Option<&IpAdapterConfig>,
    name: &str,
) -> Result<Option<ImagePrompt>, RecipeError> {
    let Some(adapter) = adapter else {
        return match config.ip_adapter_path.is_empty() {
            true => Ok(None),
            false => Err(RecipeError::Usage(format!(
                "ip_adapter_path has no effect: {name} takes no IP-Adapter; Stable Diffusion 1.5 and SDXL's base model do"
            ))),
        };
    };
    let image = images::decode("ip_adapter_image", &config.ip_adapter_image)?;
    let (width, height) = image.dimensions();
    if width.max(height) / width.min(height).max(1) >= LONGEST {
        return Err(RecipeError::Usage(format!(
            "ip_adapter_image={}: {width} x {height} pixels; expected sides of less than 1 to {LONGEST}: only the square in \
             the middle is seen",
            config.ip_adapter_image
        )));
    }
    let side = adapter.vision.image_size;
    let pixels = clip_pixels(&image, side, Middle::Transformers).map_err(RecipeError::failed)?;
    Ok(Some(ImagePrompt {
        pixels,
        scale: config.ip_adapter_scale as f32,
    }))
}
