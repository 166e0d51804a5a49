//! The options of a training step.

use crate::config::{self, Config};
use crate::models::DiffusionModel;
use crate::train::LoraOptions;
use crate::train::optimizer::{AdamOptions, Optimizer, OptimizerOptions};
use crate::train::step::{CleanSamples, Draws, LossWeighting, StepOptions, Timesteps};

use super::RecipeError;
use super::formats::{Recorded, check_weights_alone, policy};
use super::model::check_pixels;

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

/// Refuses what fine-tuning cannot do yet, as far as the configuration alone tells.
///
/// # Errors
/// Names the key.
pub fn check_fine_tuning(config: &Config) -> Result<(), RecipeError> {
    let trains_token = !config.placeholder_token.is_empty();
    if (config.train_text_encoder || trains_token) && config.ema_decay > 0.0 {
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

/// The training step of `model` for `batch` samples over all devices.
pub fn step_options(
    config: &Config,
    model: &DiffusionModel,
    batch: usize,
    local_shards: usize,
) -> Result<StepOptions, RecipeError> {
    let quantization = policy(config, model.family.spec(), local_shards)?;
    check_weights_alone(quantization.as_ref(), Recorded::AreMissing)?;
    Ok(StepOptions {
        batch,
        clean: match model.family.spec().published {
            Some(_) => CleanSamples::Distributions,
            None => CleanSamples::Given,
        },
        draws: Draws::Program,
        lora: lora_options(config),
        // Its ids are those of a tokenizer.
        inversion: None,
        optimizer: optimizer(config),
        timesteps: timesteps(config, model.scheduler.num_train_timesteps),
        loss_weighting: loss_weighting(config),
        noise_offset: config.noise_offset,
        input_perturbation: config.input_perturbation,
        prior_loss_weight: config
            .with_prior_preservation
            .then_some(config.prior_loss_weight),
        train_text_encoder: config.train_text_encoder,
        quantization,
    })
}

/// The low-rank updates to train, if any.
pub fn lora_options(config: &Config) -> Option<LoraOptions> {
    let rank = config.lora_rank as usize;
    (rank > 0).then(|| LoraOptions {
        rank,
        alpha: match config.lora_alpha > 0.0 {
            true => config.lora_alpha,
            false => rank as f64,
        },
        target_modules: config.lora_target_modules.0.clone(),
        text_modules: match config.train_text_encoder {
            true => config.lora_text_encoder_target_modules.0.clone(),
            false => Vec::new(),
        },
    })
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

/// The timesteps that training draws: diffusers' `generate_timestep_weights`.
fn timesteps(config: &Config, steps: usize) -> Timesteps {
    let bias = &config.timestep_bias;
    let portion = (bias.portion * steps as f64) as usize;
    let biased = match bias.strategy {
        config::BiasStrategy::None => return Timesteps::Uniform,
        config::BiasStrategy::Earlier => 0..portion,
        config::BiasStrategy::Later => steps - portion..steps,
        config::BiasStrategy::Range => bias.begin as usize..bias.end as usize,
    };
    let weight = |t| match biased.contains(&t) {
        true => bias.multiplier,
        false => 1.0,
    };
    Timesteps::Weighted((0..steps).map(weight).collect())
}

/// How the loss weighs timesteps: `snr_gamma` alone is min-SNR, as in MaxDiffusion.
pub fn loss_weighting(config: &Config) -> LossWeighting {
    let gamma = config.snr_gamma;
    match config.loss_weighting {
        config::LossWeighting::SnrPlusOne => LossWeighting::SnrPlusOne { gamma },
        config::LossWeighting::Debiased => LossWeighting::Debiased,
        config::LossWeighting::None if gamma > 0.0 => LossWeighting::MinSnr { gamma },
        config::LossWeighting::None => LossWeighting::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::BiasStrategy;

    #[test]
    fn timesteps_are_biased_as_asked() {
        let mut config = Config::default();
        assert_eq!(timesteps(&config, 8), Timesteps::Uniform);
        config.timestep_bias.multiplier = 3.0;
        config.timestep_bias.begin = 2;
        config.timestep_bias.end = 4;
        for (strategy, biased) in [
            (BiasStrategy::Earlier, 0..2),
            (BiasStrategy::Later, 6..8),
            (BiasStrategy::Range, 2..4),
        ] {
            config.timestep_bias.strategy = strategy;
            let mut expected = vec![1.0; 8];
            expected[biased].fill(3.0);
            assert_eq!(timesteps(&config, 8), Timesteps::Weighted(expected));
        }
    }
}
