//! From a configuration to library options: models, sessions, requests, training runs.
//!
//! Nothing here prints: messages go to a [`Notify`].

mod checkpoints;
pub mod data;
mod distilled;
mod error;
mod formats;
mod generate;
pub mod hub;
mod images;
mod lora;
mod mesh;
mod model;
mod notice;
mod overrides;
mod program;
mod prompts;
mod record;
pub mod scheduler;
mod session;
mod source;
mod step;
mod training;

pub use checkpoints::newest_checkpoint;
pub use error::RecipeError;
pub use formats::{check_formats, policy, precision, quantization_summary};
pub use generate::{Generation, generation, guidance};
pub use mesh::{compile_topology, parallelism};
pub use model::{CLIP_TOKENS, check_pixels, check_tokenizer, micro_conditioning, model};
pub use notice::{Notice, Notify};
pub use overrides::{Overrides, Repeat};
pub use program::{Step, compile_options, compiler, lowering_target, memory_advice, trace};
pub use session::{Opened, has_hardware, open_session, program_cache};
pub use step::{check_training, loss_weighting, optimizer, step_options};
pub use training::{Training, training};

use crate::config::{self, Config};

use scheduler::sampling_plan;

/// Every error of a configuration for the verb that shows without data, devices or plugins.
///
/// # Errors
/// The first of it: what the keys make together is looked at one after the other.
pub fn check(
    config: &Config,
    verb: Option<config::Verb>,
    notify: &mut Notify<'_>,
) -> Result<(), RecipeError> {
    use config::Verb::{Compile, Generate, Lower, Train};
    let model = model(config, None)?;
    policy(config, model.family.spec().int8_float_layers, 0)?;
    if verb.is_none_or(|v| [Compile, Lower].contains(&v)) {
        compile_topology(config, notify)?;
    }
    if verb.is_some_and(|v| [Train, Generate].contains(&v)) {
        sampling_plan(
            config,
            &model.scheduler,
            config.num_inference_steps as usize,
        )?;
    }
    if verb == Some(Train) {
        check_training(config, &model)?;
    }
    Ok(())
}
