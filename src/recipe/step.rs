//! The options of a training step.

use crate::config::{self, Config, MaskedLoss};
use crate::dtype::DType;
use crate::models::{DenoiserKind, DiffusionModel, SeenImage};
use crate::train::optimizer::{AdamOptions, Optimizer, OptimizerOptions};
use crate::train::step::{CleanSamples, Draws, StepOptions};
use crate::train::{LoraOptions, default_targets};

use super::RecipeError;
use super::formats::{Recorded, check_weights_alone, policy};
use super::model::{check_pixels, trains_pixels};
use super::objective::{objective, train_guidance_scale};
use super::qat::fake_quantization;

/// Refuses a new model that cannot be trained.
///
/// # Errors
/// Says what is missing.
pub fn check_training(config: &Config, model: &DiffusionModel) -> Result<(), RecipeError> {
    if config.lora_rank > 0 {
        return Err(RecipeError::Usage(format!(
            "lora_rank={}: train_new_unet=True trains a new model from random weights, which has nothing to update; leave one of \
             the two out",
            config.lora_rank
        )));
    }
    if model.text_encoders.is_empty() || !config.train_text_encoder {
        return Err(RecipeError::Usage(
            "a new model works on prompts: give text_encoder_config and train_text_encoder=True"
                .to_string(),
        ));
    }
    check_pixels(model)
}

/// Refuses a model, or what is asked for of it, whose training is not built; `place` is where it is from.
///
/// # Errors
/// Names the family, and the key if one asks for it.
pub fn check_trainable(
    config: &Config,
    model: &DiffusionModel,
    place: &str,
) -> Result<(), RecipeError> {
    let title = model.family.title();
    let seen = match model.denoiser.seen_image() {
        None => None,
        Some(SeenImage::Masked | SeenImage::Filled { .. }) => Some("for inpainting"),
        Some(SeenImage::Control) => Some("with a control image"),
    };
    if let Some(seen) = seen {
        return Err(RecipeError::Usage(format!(
            "{place}: fine-tuning of models {seen} is not here yet; name the model that it was made from"
        )));
    }
    if config.train_text_encoder && model.denoiser.kind() != DenoiserKind::Unet {
        return Err(RecipeError::Usage(format!(
            "train_text_encoder=True: the text encoders of {title} stay as they are, because training them is not here yet; \
             leave it out"
        )));
    }
    let published = model.family.spec().published.as_ref();
    if config.lora_kohya && published.is_some_and(|published| published.kohya.is_none()) {
        return Err(RecipeError::Usage(format!(
            "lora_kohya=True: kohya's names for layers of {title} are not written; leave it out: ComfyUI and web interfaces \
             read the file with diffusers' names"
        )));
    }
    Ok(())
}

/// Refuses what fine-tuning cannot do yet, as far as the configuration alone tells.
///
/// # Errors
/// Names the key.
pub fn check_fine_tuning(config: &Config) -> Result<(), RecipeError> {
    if config.train_low_rank && trains_pixels(config) {
        return Err(RecipeError::Usage(
            "train_low_rank=True: training the low-rank factors of a model of pixels is not here yet: train low-rank updates \
             beside its stored weights with lora_rank=8"
                .to_string(),
        ));
    }
    let trains_token = !config.placeholder_token.is_empty();
    let trains_whole = config.lora_rank == 0 && !trains_token;
    if trains_pixels(config) {
        check_pixel_tuning(config, trains_whole)?;
    }
    let has_average = trains_whole && trains_pixels(config);
    if (config.train_text_encoder || trains_token) && config.ema_decay > 0.0 && !has_average {
        return Err(RecipeError::Usage(format!(
            "ema_decay={}: a moving average of published text encoders and of new tokens is not here yet: leave it out, or set \
             train_text_encoder=False without placeholder_token",
            config.ema_decay
        )));
    }
    if trains_token && config.train_text_encoder && config.lora_rank == 0 {
        return Err(RecipeError::Usage(format!(
            "placeholder_token={}: with a new token the model's own weights stay as they are: set train_text_encoder=False, or \
             train low-rank updates of the text encoders with lora_rank=16",
            config.placeholder_token
        )));
    }
    if !config.cache_latents_text_encoder_outputs {
        return Err(RecipeError::Usage(
            "cache_latents_text_encoder_outputs=False: encoding images and captions in every step is not here yet: leave it \
             out; captions can be dropped and images mirrored with what is kept"
                .to_string(),
        ));
    }
    Ok(())
}

/// Refuses what fine-tuning a model of pixels does not have.
fn check_pixel_tuning(config: &Config, trains_whole: bool) -> Result<(), RecipeError> {
    if trains_whole && !config.train_text_encoder {
        return Err(RecipeError::Usage(
            "train_text_encoder=False: a model of pixels is trained with its text encoder: leave it out, or train low-rank \
             updates with lora_rank=8"
                .to_string(),
        ));
    }
    for (key, is_given) in [
        ("lora_kohya", config.lora_kohya),
        ("enable_bucket", config.enable_bucket),
        ("validation_images", config.validation_images > 0),
        ("masked_loss", config.masked_loss != MaskedLoss::None),
        ("caption_shuffles", config.caption_shuffles > 0),
        ("checkpoint_copies", config.checkpoint_copies),
        (
            "dataset_save_location",
            !config.dataset_save_location.is_empty(),
        ),
    ] {
        if is_given {
            return Err(RecipeError::Usage(format!(
                "{key} has no effect on a model of pixels; leave it out"
            )));
        }
    }
    Ok(())
}

/// The training step of `model` for `batch` samples over all devices.
pub fn step_options(
    config: &Config,
    model: &DiffusionModel,
    batch: usize,
    local_shards: usize,
) -> Result<StepOptions, RecipeError> {
    let quantization = match config.train_low_rank {
        false => policy(config, model.family.spec(), local_shards)?,
        // That of the checkpoint, which has the factors, takes its place.
        true => None,
    };
    check_weights_alone(quantization.as_ref(), Recorded::AreInputs)?;
    let fake_quantization = fake_quantization(config, quantization.as_ref())?;
    Ok(StepOptions {
        batch,
        clean: match model.family.spec().published {
            Some(_) => CleanSamples::Distributions,
            None => CleanSamples::Given,
        },
        draws: Draws::Program,
        lora: lora_options(config, model.denoiser.kind()),
        // Its ids are those of a tokenizer.
        inversion: None,
        trains_low_rank: config.train_low_rank,
        optimizer: optimizer(config),
        gradient_reduce_dtype: config.gradient_reduce_dtype.map(DType::from),
        objective: objective(config, model)?,
        guidance_scale: train_guidance_scale(config),
        masked: config.masked_loss != MaskedLoss::None,
        prior_loss_weight: config
            .with_prior_preservation
            .then_some(config.prior_loss_weight),
        train_text_encoder: config.train_text_encoder,
        quantization,
        fake_quantization,
    })
}

/// The low-rank updates to train, if any.
pub fn lora_options(config: &Config, kind: DenoiserKind) -> Option<LoraOptions> {
    let rank = config.lora_rank as usize;
    (rank > 0).then(|| LoraOptions {
        rank,
        alpha: match config.lora_alpha > 0.0 {
            true => config.lora_alpha,
            false => rank as f64,
        },
        target_modules: lora_targets(config, kind),
        text_modules: match config.train_text_encoder {
            true => config.lora_text_encoder_target_modules.0.clone(),
            false => Vec::new(),
        },
        dropout: config.lora_dropout,
        plus_ratio: config.lora_plus_ratio,
    })
}

/// The patterns of the denoiser's layers that have an update.
pub fn lora_targets(config: &Config, kind: DenoiserKind) -> Vec<String> {
    match &config.lora_target_modules {
        Some(given) => given.0.clone(),
        None => default_targets(kind)
            .iter()
            .map(|layer| (*layer).to_owned())
            .collect(),
    }
}

/// The settings of the update.
pub fn optimizer(config: &Config) -> OptimizerOptions {
    let adam = AdamOptions {
        b1: config.adam_b1,
        b2: config.adam_b2,
        eps: config.adam_eps,
    };
    OptimizerOptions {
        optimizer: match config.optimizer_type {
            config::OptimizerType::AdamW => Optimizer::AdamW {
                adam,
                moments: config.optimizer_state_dtype.into(),
            },
            config::OptimizerType::AdamW8bit => Optimizer::AdamW8bit { adam },
            config::OptimizerType::Adafactor => Optimizer::Adafactor {
                scale_parameter: config.adafactor_scale_parameter,
            },
            config::OptimizerType::Lion => Optimizer::Lion {
                b1: adam.b1,
                b2: adam.b2,
                moment: config.optimizer_state_dtype.into(),
            },
            config::OptimizerType::Prodigy => Optimizer::Prodigy {
                adam,
                d_coef: config.prodigy_d_coef,
                use_bias_correction: config.prodigy_use_bias_correction,
                safeguard_warmup: config.prodigy_safeguard_warmup,
            },
        },
        weight_decay: config.adam_weight_decay,
        decays_vectors: config.decay_norms_and_biases,
        accumulated: config.gradient_accumulation_steps as usize,
        stochastic_rounding: config.stochastic_rounding,
        max_grad_value: config
            .opt_enable_grad_clipping
            .then_some(config.max_grad_value),
        max_grad_norm: config
            .opt_enable_grad_global_norm_clipping
            .then_some(config.max_grad_norm),
        ema_decay: (config.ema_decay > 0.0).then_some(config.ema_decay),
    }
}
