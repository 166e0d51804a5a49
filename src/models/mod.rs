//! Models: configurations as the checkpoints have them, and forward passes whose weights have the checkpoints' keys.

pub mod clip;
pub mod controlnet;
mod denoiser;
mod diffusion;
pub mod family;
pub mod flux;
pub mod ip_adapter;
pub mod joint;
pub mod original;
mod part;
pub mod pixart;
mod pixels;
mod sd1;
mod sd2;
pub mod sd3;
mod sdxl;
mod sdxl_refiner;
mod space;
pub mod spec;
mod steering;
pub mod t5;
pub mod unet;
pub mod vae;

pub use denoiser::{Conditioning, Denoiser, DenoiserInputs, DenoiserKind, SeenImage};
pub use diffusion::{
    DiffusionModel, MicroConditioning, TextConditioning, TextEncoder, TextEncoderConfig,
};
pub use family::Family;
pub use part::Part;
pub use space::{RGB, SampleSpace};
pub use spec::{FamilySpec, GuidanceKind, HiddenState, Published, TextEncoderKind, TextPlace};
pub use steering::ControlNet;

use std::fmt::Display;

use serde_json::{Map, Value};

/// Why a model configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ModelConfigError {
    #[error("{model}: the configuration is not valid: {source}")]
    Parse {
        model: &'static str,
        source: serde_json::Error,
    },
    #[error("{model}: {field} = {found} is not supported; expected {expected}")]
    Unsupported {
        model: &'static str,
        field: String,
        found: String,
        expected: String,
    },
    #[error("{model}: {message}")]
    Inconsistent {
        model: &'static str,
        message: String,
    },
}

impl ModelConfigError {
    /// The same of `name`, whose configuration is read as a part of another model's.
    fn of(mut self, name: &'static str) -> Self {
        let (ModelConfigError::Parse { model, .. }
        | ModelConfigError::Unsupported { model, .. }
        | ModelConfigError::Inconsistent { model, .. }) = &mut self;
        *model = name;
        self
    }
}

/// Largest size of a layer: the vocabulary of CLIP has 49,408 tokens, the widest layer of SDXL 10,240 features.
/// Products of two sizes are counted without an overflow.
const LARGEST_SIZE: usize = 1 << 20;

/// Refuses sizes that no model has, each with the name of its field.
fn check_sizes<F: Display>(
    model: &'static str,
    sizes: impl IntoIterator<Item = (F, usize)>,
) -> Result<(), ModelConfigError> {
    for (field, size) in sizes {
        if !(1..=LARGEST_SIZE).contains(&size) {
            return Err(ModelConfigError::Unsupported {
                model,
                field: field.to_string(),
                found: size.to_string(),
                expected: format!("1 to {LARGEST_SIZE}"),
            });
        }
    }
    Ok(())
}

/// Most layers or blocks of a kind. Each becomes operations of the program, so a slip of the keyboard would be traced for
/// hours.
const LARGEST_DEPTH: usize = 1000;

/// Refuses more blocks than any model has, each number with the name of its field.
fn check_depth<const N: usize>(
    model: &'static str,
    depths: [(&str, usize); N],
) -> Result<(), ModelConfigError> {
    match depths.into_iter().find(|(_, depth)| *depth > LARGEST_DEPTH) {
        None => Ok(()),
        Some((field, depth)) => Err(ModelConfigError::Inconsistent {
            model,
            message: format!("{field} = {depth}; expected at most {LARGEST_DEPTH}"),
        }),
    }
}

/// What `serde_json` found wrong with the configuration of `model`.
fn parse_error(model: &'static str) -> impl Fn(serde_json::Error) -> ModelConfigError {
    move |source| ModelConfigError::Parse { model, source }
}

/// The sizes of a list, each with its place in the list.
fn each_size<'a>(
    field: &'static str,
    sizes: &'a [usize],
) -> impl Iterator<Item = (String, usize)> + 'a {
    let sizes = sizes.iter().enumerate();
    sizes.map(move |(index, size)| (format!("{field}[{index}]"), *size))
}

/// Refuses the configuration of another class than diffusers' `class`, or the Flax variant of it, where it names one.
fn check_class(class: &'static str, config: &Map<String, Value>) -> Result<(), ModelConfigError> {
    match config.get("_class_name") {
        Some(Value::String(found)) if found.trim_start_matches("Flax") != class => {
            Err(ModelConfigError::Unsupported {
                model: class,
                field: "_class_name".to_string(),
                found: found.clone(),
                expected: class.to_string(),
            })
        }
        _ => Ok(()),
    }
}

/// Removes `field` from a configuration, if it is there, and refuses every value but the `allowed` ones.
fn take_fixed(
    model: &'static str,
    config: &mut Map<String, Value>,
    field: &str,
    allowed: &[Value],
) -> Result<(), ModelConfigError> {
    match config.remove(field) {
        Some(found) if !allowed.contains(&found) => Err(ModelConfigError::Unsupported {
            model,
            field: field.to_string(),
            found: found.to_string(),
            expected: allowed
                .iter()
                .map(Value::to_string)
                .collect::<Vec<_>>()
                .join(" or "),
        }),
        _ => Ok(()),
    }
}
