//! A model as the configuration alone describes it.

use crate::config::Config;
use crate::data::Tokenizer;
use crate::models::clip::ClipTextConfig;
use crate::models::unet::UNet2DConditionConfig;
use crate::models::{DiffusionModel, HiddenState, MicroConditioning, Part, TextEncoder};
use crate::pipelines::pixels::RGB;

use super::RecipeError;
use super::formats::precision;
use super::scheduler::scheduler;

/// Tokens of a prompt where no text encoder says otherwise: CLIP's.
pub const CLIP_TOKENS: usize = 77;

/// What SDXL's time ids say after size and crop.
pub fn micro_conditioning(config: &Config, requires_aesthetics_score: bool) -> MicroConditioning {
    match requires_aesthetics_score {
        true => MicroConditioning::AestheticScore {
            score: config.aesthetic_score as f32,
            negative: config.negative_aesthetic_score as f32,
        },
        false => MicroConditioning::TargetSize,
    }
}

/// The UNet as configured.
pub fn unet(config: &Config) -> Result<UNet2DConditionConfig, RecipeError> {
    UNet2DConditionConfig::from_map(config.unet_config_json()?).map_err(RecipeError::usage)
}

/// The whole model. A text encoder that does not state `vocab_size` or `eos_token_id` takes the tokenizer's.
pub fn model(
    config: &Config,
    tokenizer: Option<&Tokenizer>,
) -> Result<DiffusionModel, RecipeError> {
    let unet = unet(config)?;
    let text_encoder = match config.text_encoder_config_json()? {
        None => None,
        Some(mut fields) => {
            if let Some(tokenizer) = tokenizer {
                let mut or_insert = |field: &str, value: serde_json::Value| {
                    fields.entry(field).or_insert(value);
                };
                or_insert("vocab_size", tokenizer.vocabulary_size().into());
                or_insert("eos_token_id", tokenizer.end_id().into());
            }
            let text = ClipTextConfig::from_map(fields).map_err(RecipeError::usage)?;
            Some(text)
        }
    };
    if let (Some(text), Some(tokenizer)) = (&text_encoder, tokenizer) {
        check_tokenizer(text, tokenizer)?;
    }
    let side = config.sample_size(unet.in_channels as u64)? as usize;
    Ok(DiffusionModel {
        tokens: text_encoder
            .as_ref()
            .map_or(CLIP_TOKENS, |t| t.max_position_embeddings),
        unet,
        text_encoders: text_encoder
            .map(|config| TextEncoder {
                part: Part::TextEncoder,
                config,
                hidden: HiddenState::Normed { skip: 0 },
            })
            .into_iter()
            .collect(),
        vae: None,
        controlnets: Vec::new(),
        precision: precision(config),
        remat: config.remat_policy,
        scheduler: scheduler(config)?,
        sample_size: [side, side],
        image_size: [config.resolution as usize; 2],
        micro_conditioning: micro_conditioning(
            config,
            config
                .model_family
                .is_some_and(|family| family.spec().aesthetic_score),
        ),
        decode_tile: None,
    })
}

/// Token ids beyond the embedding's rows would be read as its last row, and a wrong end token pools a wrong place: both
/// train, and mean nothing.
pub fn check_tokenizer(text: &ClipTextConfig, tokenizer: &Tokenizer) -> Result<(), RecipeError> {
    let tokens = tokenizer.vocabulary_size();
    if text.vocab_size < tokens {
        return Err(RecipeError::Usage(format!(
            "text_encoder_config.vocab_size={}, but the tokenizer has {tokens} tokens: leave vocab_size out, or give at \
             least that many",
            text.vocab_size
        )));
    }
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

/// Refuses a UNet that does not work on the pixels of RGB images: what is trained here, and made with checkpoints of the run.
///
/// # Errors
/// Names the channels.
pub fn check_pixels(config: &Config, model: &DiffusionModel) -> Result<(), RecipeError> {
    let k = config.pixel_unshuffle as usize;
    let unet = &model.unet;
    let expected = RGB * k * k;
    if (unet.in_channels, unet.out_channels) == (expected, expected) {
        return Ok(());
    }
    Err(RecipeError::Usage(format!(
        "unet_config: in_channels={} and out_channels={}, but RGB images with pixel_unshuffle={k} have {expected}; a \
         model of latents comes with its VAE: name it in pretrained_model_name_or_path, without unet_config",
        unet.in_channels, unet.out_channels
    )))
}
