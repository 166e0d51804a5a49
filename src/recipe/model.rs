//! A model that the configuration alone describes.

use std::path::Path;

use serde_json::{Map, Value};

use crate::config::{Config, ModelConfig};
use crate::data::Tokenizer;
use crate::models::pixart::resolution_bin;
use crate::models::spec::Signs;
use crate::models::vae::{Autoencoder, AutoencoderKlConfig};
use crate::models::{
    Denoiser, DiffusionModel, Family, MicroConditioning, Part, SampleSpace, TextEncoder,
    TextEncoderConfig, TextEncoderKind,
};

use super::RecipeError;
use super::formats::precision;
use super::scheduler::described_scheduler;

/// Tokens of a prompt where no text encoder says otherwise: CLIP's.
pub const CLIP_TOKENS: usize = 77;

/// The part of SDXL's time ids after size and crop.
pub fn micro_conditioning(config: &Config, requires_aesthetics_score: bool) -> MicroConditioning {
    match requires_aesthetics_score {
        true => MicroConditioning::AestheticScore {
            score: config.aesthetic_score as f32,
            negative: config.negative_aesthetic_score as f32,
        },
        false => MicroConditioning::TargetSize,
    }
}

/// The whole model. A text encoder that does not state `vocab_size` or `eos_token_id` takes the tokenizer's.
pub fn model(
    config: &Config,
    tokenizer: Option<&Tokenizer>,
) -> Result<DiffusionModel, RecipeError> {
    let fields = config.denoiser_config_json()?;
    let family = family(config, &fields);
    let denoiser = Denoiser::from_map(family.spec().denoiser, fields)
        .map_err(RecipeError::at(config.denoiser_config_place()))?;
    let encoder = family.spec().text_encoders.iter();
    let encoder = encoder.copied().find(|e| e.part == Part::TextEncoder);
    let text_encoder = match encoder.zip(config.text_encoder_config_json()?) {
        None => None,
        Some((encoder, mut fields)) => {
            if let (TextEncoderKind::Clip, Some(tokenizer)) = (encoder.kind, tokenizer) {
                let mut or_insert = |field: &str, value: serde_json::Value| {
                    fields.entry(field).or_insert(value);
                };
                or_insert("vocab_size", tokenizer.vocabulary_size().into());
                or_insert("eos_token_id", tokenizer.end_id().into());
            }
            let text = TextEncoderConfig::from_map(encoder.kind, fields)
                .map_err(RecipeError::at(config.text_encoder_config_place()))?;
            Some(text)
        }
    };
    if let (Some(text), Some(tokenizer)) = (&text_encoder, tokenizer) {
        check_tokenizer(text, tokenizer)?;
    }
    let space = space(config, family)?;
    space.check(&denoiser).map_err(RecipeError::usage)?;
    let multiple = space.factor() * denoiser.kind().patch();
    let image_size = match family.spec().published {
        Some(_) => image_size(config, multiple)?,
        None => [image_side("resolution", config.resolution, multiple)?; 2],
    };
    check_positions(&denoiser, space.factor(), image_size)?;
    let clip = text_encoder.as_ref().and_then(TextEncoderConfig::clip);
    let tokens = prompt_tokens(
        config,
        family,
        clip.map(|clip| clip.max_position_embeddings),
    )?;
    Ok(DiffusionModel {
        family,
        tokens: tokens.all,
        denoiser,
        text_encoders: encoder
            .zip(text_encoder.clone())
            .map(|(encoder, config)| TextEncoder {
                part: encoder.part,
                tokens: match encoder.kind {
                    TextEncoderKind::Clip => tokens.clip,
                    TextEncoderKind::T5 { .. } => tokens.t5,
                },
                config,
                hidden: encoder.hidden,
                place: encoder.place,
                masked: encoder.masked,
            })
            .into_iter()
            .collect(),
        vae: None,
        preview_vae: None,
        controlnets: Vec::new(),
        ip_adapter: None,
        precision: precision(config),
        remat: config.remat_policy,
        scan_layers: config.scan_layers,
        scheduler: described_scheduler(config, family)?,
        sample_size: image_size.map(|side| side / space.factor()),
        image_size,
        micro_conditioning: micro_conditioning(config, family.spec().aesthetic_score),
        decode_tile: None,
    })
}

/// Tokens of a prompt of one chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct PromptTokens {
    /// For a CLIP.
    pub clip: usize,
    /// For T5.
    pub t5: usize,
    /// Those that the denoiser attends to.
    pub all: usize,
}

/// Tokens of a prompt for a model of `family`; `clip` is how many CLIP takes, where that is known.
///
/// # Errors
/// When the configuration asks for more than the family takes.
pub(super) fn prompt_tokens(
    config: &Config,
    family: Family,
    clip: Option<usize>,
) -> Result<PromptTokens, RecipeError> {
    let spec = family.spec();
    let clip = clip.unwrap_or(CLIP_TOKENS);
    let Some([tokens, most]) = spec.prompt_lengths() else {
        return Ok(PromptTokens {
            clip,
            t5: 0,
            all: spec.text_tokens(clip, 0),
        });
    };
    let with = |t5: usize| PromptTokens {
        clip,
        t5,
        all: spec.text_tokens(clip, t5),
    };
    match config.max_sequence_length {
        None => Ok(with(tokens)),
        Some(asked) if asked <= most as u64 => Ok(with(asked as usize)),
        Some(asked) => Err(RecipeError::Usage(format!(
            "max_sequence_length={asked}: {} takes prompts of at most {most} tokens",
            family.title()
        ))),
    }
}

/// Whether the configuration says the architecture of the model: by `unet_config`, a folder, or the name of a known
/// model.
pub fn is_described(config: &Config) -> bool {
    let name = &config.pretrained_model_name_or_path;
    config.unet_config.0 != ModelConfig::Unset
        || config.folder_denoiser_config().is_some()
        || Family::of_repository(name).is_some()
}

/// Whether training is that of a model of pixels, which the configuration describes.
pub fn trains_pixels(config: &Config) -> bool {
    config.train_new_unet || config.unet_config.0 != ModelConfig::Unset
}

/// The family of the model: the one that the configuration names, else that of the published model, folder or denoiser.
fn family(config: &Config, denoiser: &Map<String, Value>) -> Family {
    let name = &config.pretrained_model_name_or_path;
    let own = config.unet_config.0 != ModelConfig::Unset;
    if let Some(family) = config.model_family {
        return family;
    }
    if config.pixel_unshuffle > 1 {
        return Family::Pixels;
    }
    match Family::of_repository(name) {
        Some((family, _)) if !own => family,
        _ => Family::of_folder(&Signs {
            denoiser,
            has: &|part| match own {
                // A UNet of the recipe's own comes with nothing but a text encoder to train beside it.
                true => [Part::Unet, Part::TextEncoder].contains(&part),
                false => Path::new(name).join(part.name()).is_dir(),
            },
        }),
    }
}

/// The samples of a model of `family`: latents of the autoencoder in the model's folder, else of the one that
/// its family is published with; or pixels.
fn space(config: &Config, family: Family) -> Result<SampleSpace, RecipeError> {
    let Some(published) = &family.spec().published else {
        return Ok(SampleSpace::Pixels {
            block: config.pixel_unshuffle as usize,
        });
    };
    if config.pixel_unshuffle > 1 {
        return Err(RecipeError::Usage(format!(
            "pixel_unshuffle={}: {} works on latents, not on pixels",
            config.pixel_unshuffle,
            family.title()
        )));
    }
    let vae = match config.vae_config_json()? {
        Some(fields) => Autoencoder::from_map(fields)
            .map_err(RecipeError::at(config.folder_config("vae").display()))?,
        None => AutoencoderKlConfig::from_json(published.vae)
            .map_err(RecipeError::usage)?
            .into(),
    };
    Ok(SampleSpace::latents(&vae))
}

/// Height and width of the images, of which `scale x scale` pixels are what the denoiser takes together.
///
/// # Errors
/// When a side is no multiple of `scale`, with the nearest.
pub(super) fn image_size(config: &Config, scale: usize) -> Result<[usize; 2], RecipeError> {
    let side = |key: &str, given: u64| match given {
        0 => image_side("resolution", config.resolution, scale),
        given => image_side(key, given, scale),
    };
    Ok([side("height", config.height)?, side("width", config.width)?])
}

/// Height and width that the configuration asks for.
pub(super) fn asked_size(config: &Config) -> [usize; 2] {
    [config.height, config.width].map(|side| match side {
        0 => config.resolution as usize,
        given => given as usize,
    })
}

/// Height and width of the images that `denoiser` makes: with `use_resolution_binning` those that it was trained with and
/// that are nearest in shape to what is asked for. `scale x scale` pixels are what it takes together.
///
/// # Errors
/// As for [`image_size`]; when it was trained with no table of sizes.
pub(super) fn drawn_size(
    config: &Config,
    denoiser: &Denoiser,
    scale: usize,
) -> Result<[usize; 2], RecipeError> {
    if !config.use_resolution_binning {
        return image_size(config, scale);
    }
    let Denoiser::PixArt(pixart) = denoiser else {
        return Err(RecipeError::Usage(format!(
            "use_resolution_binning has no effect: a {} was trained with no table of sizes, as PixArt was; leave it out",
            denoiser.class()
        )));
    };
    resolution_bin(pixart.sample_size, asked_size(config)).ok_or_else(|| {
        RecipeError::Usage(format!(
            "use_resolution_binning: there are tables for transformers of sample_size 32, 64, 128 and 256, and this one has \
             {}; leave it out",
            pixart.sample_size
        ))
    })
}

/// Refuses images with more rows or columns than the denoiser has positions for; `factor` pixels are one.
///
/// # Errors
/// Says the largest.
pub(super) fn check_positions(
    denoiser: &Denoiser,
    factor: usize,
    [height, width]: [usize; 2],
) -> Result<(), RecipeError> {
    match denoiser.largest_side().map(|side| side * factor) {
        Some(most) if height > most || width > most => Err(RecipeError::Usage(format!(
            "height={height} width={width}: the transformer has positions for at most {most} pixels a side \
             (pos_embed_max_size)"
        ))),
        Some(_) | None => Ok(()),
    }
}

/// `side`, the value of `key`, of an image of which `scale x scale` pixels are what the denoiser takes together.
fn image_side(key: &str, side: u64, scale: usize) -> Result<usize, RecipeError> {
    let side = side as usize;
    if side > 0 && side.is_multiple_of(scale) {
        return Ok(side);
    }
    let below = side / scale * scale;
    let near: Vec<String> = [below, below + scale]
        .into_iter()
        .filter(|side| *side > 0)
        .map(|side| side.to_string())
        .collect();
    Err(RecipeError::Usage(format!(
        "{key}={side} is not a multiple of {scale}, the side in pixels of one position of the model's sample; \
         nearest: {}",
        near.join(" and ")
    )))
}

/// Token ids beyond the embedding's rows would be read as its last row, and a wrong end token pools a wrong place: both
/// train, and mean nothing.
pub fn check_tokenizer(text: &TextEncoderConfig, tokenizer: &Tokenizer) -> Result<(), RecipeError> {
    let tokens = tokenizer.vocabulary_size();
    if text.vocab_size() < tokens {
        return Err(RecipeError::Usage(format!(
            "text_encoder_config.vocab_size={}, but the tokenizer has {tokens} tokens: leave vocab_size out, or give at \
             least that many",
            text.vocab_size()
        )));
    }
    let TextEncoderConfig::Clip(text) = text else {
        return Ok(());
    };
    // Checkpoints of CLIP state 2 and mean the highest id (`clip_text` says how).
    if ![tokenizer.end_id(), 2].contains(&text.eos_token_id) {
        return Err(RecipeError::Usage(format!(
            "text_encoder_config.eos_token_id={}, but the tokenizer ends a text with {}: leave eos_token_id out",
            text.eos_token_id,
            tokenizer.end_id()
        )));
    }
    Ok(())
}

/// Refuses a latent model: training, and generating from its checkpoints, work in pixel space.
///
/// # Errors
/// Names the family.
pub fn check_pixels(model: &DiffusionModel) -> Result<(), RecipeError> {
    match model.family.spec().published {
        None => Ok(()),
        Some(_) => Err(RecipeError::Usage(format!(
            "unet_config: {} is {}, which works on latents; training, and generating from a run's checkpoint, work on \
             pixels: give a UNet with in_channels=3, or 3 * pixel_unshuffle^2",
            match &model.denoiser {
                Denoiser::Unet(config) => format!("in_channels={}", config.in_channels),
                Denoiser::Flux(_) | Denoiser::Sd3(_) | Denoiser::PixArt(_) =>
                    model.denoiser.class().to_owned(),
            },
            model.family.title()
        ))),
    }
}
