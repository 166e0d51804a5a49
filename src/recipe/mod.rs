//! From a configuration to library options: models, sessions, requests, training runs.
//!
//! Nothing here prints: messages go to a [`Notify`].

mod calibrate;
mod checkpoints;
mod class_pictures;
mod clip_skip;
mod control_lora;
pub mod data;
mod denoiser_flops;
mod described;
mod distilled;
mod error;
mod fine_tune;
mod formats;
mod generate;
pub mod hub;
mod images;
mod inversions;
mod ip_adapter;
mod layers;
mod lora;
mod mesh;
mod model;
mod notice;
mod objective;
mod overrides;
mod plan;
mod preset;
mod program;
mod prompts;
mod qat;
mod quantize;
mod quantize_page;
mod record;
mod roundings;
mod run_model;
pub mod scheduler;
mod session;
mod source;
mod step;
mod training;

pub use checkpoints::newest_checkpoint;
pub use class_pictures::class_pictures;
pub use data::dataset;
pub use denoiser_flops::DenoiserFlops;
pub use described::{check_formats, described_policy};
pub use error::RecipeError;
pub use fine_tune::{check_low_rank, stored_policy};
pub use formats::{
    format_text, mode_name, mode_of, mode_of_rule, policy, policy_of_checkpoint, precision,
    quantization_summary,
};
pub use generate::{Generation, generation, guidance, skip_layers};
pub use mesh::{compile_topology, parallelism};
pub use model::{CLIP_TOKENS, check_pixels, check_tokenizer, micro_conditioning, model};
pub use notice::{Notice, Notify};
pub use overrides::{Overrides, Repeat};
pub use plan::{Budget, Candidate, Measure, Plan, PlannedLayer};
pub use program::{
    Step, compile_options, compiler, lowering_target, memory_advice, model_flops, trace,
};
pub use quantize::{
    FormatSum, QuantizeReport, QuantizeRequest, RuleMatch, Treated, check_quantize, quantize,
};
pub use quantize_page::quantize_page;
pub use session::{Opened, has_hardware, open_session, program_cache};
pub use step::{check_fine_tuning, check_trainable, check_training, optimizer, step_options};
pub use training::{Training, training};

use std::path::Path;

use crate::config::{Config, Loaded, Verb};
use crate::models::DiffusionModel;

use generate::check_generation;
use model::is_described;
use objective::objective;
use scheduler::sampling_plan;

/// Every error of a configuration for the verb that shows without data, devices, plugins or the network. `recipe_file`
/// is the file that it was read from.
///
/// # Errors
/// The first of it: what the keys make together is looked at one after the other.
pub fn check(
    loaded: &Loaded,
    recipe_file: &Path,
    verb: Option<Verb>,
    notify: &mut Notify<'_>,
) -> Result<(), RecipeError> {
    let config = &loaded.config;
    match verb {
        Some(Verb::Generate) => check_generation(config, &loaded.given, recipe_file, notify),
        Some(Verb::Train) if !config.train_new_unet => {
            check_fine_tuning(config)?;
            if is_described(config) {
                let model = model(config, None)?;
                policy(config, model.family.spec(), 0)?;
                check_trainable(config, &model, &config.pretrained_model_name_or_path)?;
                objective(config, &model)?;
                check_sampling(config, &model)?;
            }
            Ok(())
        }
        Some(Verb::Train) => {
            let model = model(config, None)?;
            policy(config, model.family.spec(), 0)?;
            check_sampling(config, &model)?;
            check_training(config, &model)
        }
        Some(Verb::Lower) => check_program(config, notify),
        Some(Verb::Quantize) => check_quantize(config, true),
        Some(Verb::Compile) if !config.compile_topology.is_empty() => check_program(config, notify),
        Some(Verb::Compile | Verb::ModuleRun) | None => {
            compile_topology(config, notify)?;
            if verb.is_none() && !is_described(config) {
                notify(Notice::Note(&format!(
                    "the model {} is not opened; check with --verb",
                    config.pretrained_model_name_or_path
                )));
                return Ok(());
            }
            let model = model(config, None)?;
            described_policy(config, model.family.spec())?;
            Ok(())
        }
    }
}

/// Checks that the program of a denoising step can be made for the mesh of `compile_topology`, or for one device.
fn check_program(config: &Config, notify: &mut Notify<'_>) -> Result<(), RecipeError> {
    let (mesh, _) = lowering_target(config, notify)?;
    trace(config, Step::Denoise, &mesh)?;
    Ok(())
}

/// Checks that the configured sampler has the configured steps.
fn check_sampling(config: &Config, model: &DiffusionModel) -> Result<(), RecipeError> {
    let steps = config.num_inference_steps as usize;
    let kind = model.denoiser.kind();
    sampling_plan(config, &model.scheduler, kind, model.image_seq_len(), steps)?;
    Ok(())
}
