//! What training draws, and what the model is to predict, by the family's noise process.

use crate::config::{self, Config};
use crate::models::{DenoiserKind, DiffusionModel};
use crate::train::step::{
    DdpmObjective, FlowMatching, LossWeighting, Objective, Timesteps, WeightingScheme,
};

use super::RecipeError;

/// The objective of `model`.
///
/// # Errors
/// When its sampler is one of another noise process, or a key is given that has no meaning for the model's. Names the
/// key and the reason.
pub fn objective(config: &Config, model: &DiffusionModel) -> Result<Objective, RecipeError> {
    let kind = model.denoiser.kind();
    let title = model.family.title();
    let class = model.scheduler.kind.class_name();
    match (kind.is_flow(), model.scheduler.is_flow()) {
        (true, false) => {
            return Err(RecipeError::Usage(format!(
                "diffusion_scheduler_config: {title} is trained by flow matching, and {class} is for models with a schedule of betas: \
                 leave it out, or set _class_name: FlowMatchEulerDiscreteScheduler"
            )));
        }
        (false, true) => {
            return Err(RecipeError::Usage(format!(
                "diffusion_scheduler_config: {title} is trained with a schedule of betas, and {class} is for flow matching: leave it \
                 out, or set _class_name: DDIMScheduler"
            )));
        }
        (true, true) | (false, false) => {}
    }
    if config.train_guidance_scale.is_some() && !model.denoiser.takes_guidance() {
        return Err(RecipeError::Usage(format!(
            "train_guidance_scale has no effect: the guidance scale is no input of the denoiser of {title}; leave it out"
        )));
    }
    match kind.is_flow() {
        true => flow_matching(config, kind, title),
        false => ddpm(config, model),
    }
}

/// The guidance scale that a denoiser is told in training which takes it.
pub fn train_guidance_scale(config: &Config) -> f64 {
    config.train_guidance_scale.unwrap_or(config.guidance_scale)
}

fn ddpm(config: &Config, model: &DiffusionModel) -> Result<Objective, RecipeError> {
    let default = Config::default();
    for (key, is_given) in [
        ("weighting_scheme", config.weighting_scheme.is_some()),
        ("logit_mean", config.logit_mean != default.logit_mean),
        ("logit_std", config.logit_std != default.logit_std),
        ("mode_scale", config.mode_scale != default.mode_scale),
        ("precondition_outputs", config.precondition_outputs),
    ] {
        if is_given {
            return Err(RecipeError::Usage(format!(
                "{key} has no effect: it is of flow matching, and {} was trained with a schedule of betas; leave it out \
                 (loss_weighting, snr_gamma and timestep_bias weigh its timesteps)",
                model.family.title()
            )));
        }
    }
    Ok(Objective::Ddpm(DdpmObjective {
        timesteps: timesteps(config, model.scheduler.num_train_timesteps),
        loss_weighting: loss_weighting(config),
        noise_offset: config.noise_offset,
        input_perturbation: config.input_perturbation,
    }))
}

fn flow_matching(
    config: &Config,
    kind: DenoiserKind,
    title: &str,
) -> Result<Objective, RecipeError> {
    const NO_RATIO: &str = "its noise levels have no signal-to-noise ratio of a schedule of betas: give weighting_scheme";
    const STRAIGHT: &str =
        "its noisy samples lie on the line from the clean one to the noise that it is to predict";
    for (key, is_given, reason) in [
        ("snr_gamma", config.snr_gamma > 0.0, NO_RATIO),
        (
            "loss_weighting",
            config.loss_weighting != config::LossWeighting::None,
            NO_RATIO,
        ),
        (
            "timestep_bias",
            config.timestep_bias.strategy != config::BiasStrategy::None,
            "weighting_scheme says which levels are drawn more often",
        ),
        ("noise_offset", config.noise_offset > 0.0, STRAIGHT),
        (
            "input_perturbation",
            config.input_perturbation > 0.0,
            STRAIGHT,
        ),
        (
            "diffusion_scheduler_config.rescale_zero_terminal_snr",
            config.diffusion_scheduler_config.rescale_zero_terminal_snr,
            "its highest level is pure noise already",
        ),
    ] {
        if is_given {
            return Err(RecipeError::Usage(format!(
                "{key} does not go with {title}, which is trained by flow matching: {reason}"
            )));
        }
    }
    let scheme = config.weighting_scheme.unwrap_or(match kind {
        DenoiserKind::Sd3 => config::WeightingScheme::LogitNormal,
        DenoiserKind::Flux | DenoiserKind::Unet | DenoiserKind::PixArt => {
            config::WeightingScheme::None
        }
    });
    let default = Config::default();
    let is_normal =
        config.logit_mean != default.logit_mean || config.logit_std != default.logit_std;
    if is_normal && scheme != config::WeightingScheme::LogitNormal {
        return Err(RecipeError::Usage(format!(
            "logit_mean and logit_std have no effect with weighting_scheme={scheme}: give weighting_scheme=logit_normal, or leave \
             them out"
        )));
    }
    Ok(Objective::FlowMatching(FlowMatching {
        weighting: match scheme {
            config::WeightingScheme::None => WeightingScheme::None,
            config::WeightingScheme::SigmaSqrt => WeightingScheme::SigmaSqrt,
            config::WeightingScheme::LogitNormal => WeightingScheme::LogitNormal {
                mean: config.logit_mean,
                std: config.logit_std,
            },
            config::WeightingScheme::Mode => WeightingScheme::Mode {
                scale: config.mode_scale,
            },
            config::WeightingScheme::Cosmap => WeightingScheme::Cosmap,
        },
        precondition_outputs: config.precondition_outputs,
    }))
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
fn loss_weighting(config: &Config) -> LossWeighting {
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
