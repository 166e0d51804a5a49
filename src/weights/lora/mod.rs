//! LoRA files: low-rank updates of a model's weights, in the dialects of kohya, diffusers and PEFT.
//!
//! A module's update is `scale * alpha / rank * up @ down` (Hu et al. 2021, LoRA: Low-Rank Adaptation of Large
//! Language Models, section 4.1). [`LoraFile::open`] reads a file, [`LoraFile::resolve`] finds the model's weight of
//! each module, [`Adapter::stack`] puts several files together. Then either [`Adapter::apply`] adds the updates to the
//! weights while they are loaded, or [`beside`] adds the products of the factors to what a traced program computes with
//! its weights, for weights that can not take an update (quantized ones) or should not.
//!
//! Names are matched against the model's own parameter paths, never guessed at, and what matches nothing is an error.

mod beside;
mod config;
mod dialects;
mod file;
mod kohya;
mod merge;
mod mismatch;
mod resolve;

use std::collections::BTreeMap;
use std::path::PathBuf;

pub use beside::{adaptable, beside, beside_with_dropout};
pub use file::LoraFile;
pub(crate) use file::{CONFIG_FILE, FILES};
pub use kohya::KohyaNames;
pub use merge::{Adapter, Factors};
pub use mismatch::{LoraFamily, LoraMismatch, MisshapenModule, UnmatchedModule};

use super::WeightsError;
use crate::host_tensor::HostTensorError;
use crate::models::Part;
use crate::util::text::listed;

/// Why a LoRA could not be read or applied.
#[derive(Debug, thiserror::Error)]
pub enum LoraError {
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error(
        "{path}: {kind} is not supported: {count} tensors such as {example}; merge it with the tool that made it"
    )]
    Unsupported {
        path: PathBuf,
        kind: &'static str,
        example: String,
        count: usize,
    },
    #[error("{}", unknown_tensors(path, *modules, unknown))]
    Unknown {
        path: PathBuf,
        /// LoRA modules in the file.
        modules: usize,
        /// Tensors that are no LoRA's.
        unknown: Vec<String>,
    },
    #[error("{path}: module {module} has no {missing} factor")]
    Unpaired {
        path: PathBuf,
        module: String,
        missing: &'static str,
    },
    #[error(
        "{path}: module {module}: its factors do not fit each other: down {down:?}, expected [rank, in, ..], \
         up {up:?}, expected [out, rank, ..]"
    )]
    Factors {
        path: PathBuf,
        module: String,
        down: Vec<usize>,
        up: Vec<usize>,
    },
    #[error("{path}: tensor {tensor}: {found}; expected a finite number")]
    Alpha {
        path: PathBuf,
        tensor: String,
        found: String,
    },
    #[error("{path}: the adapter's configuration: {reason}")]
    Config { path: PathBuf, reason: String },
    #[error("{path}: two updates of {weight}: {first} and {second}")]
    Duplicate {
        path: PathBuf,
        weight: String,
        first: String,
        second: String,
    },
    #[error(
        "{path}: module {module} may be any of {}; its name has to begin with a part's, such as unet.",
        weights.join(", ")
    )]
    Ambiguous {
        path: PathBuf,
        module: String,
        weights: Vec<String>,
    },
    #[error("{path}: scale {scale:?}; expected finite numbers")]
    Scale { path: PathBuf, scale: LoraScale },
    #[error(transparent)]
    Mismatch(Box<LoraMismatch>),
    #[error("{weight}: {found:?} given, but the LoRA was resolved for {expected:?}")]
    Dims {
        weight: String,
        expected: Vec<usize>,
        found: Vec<usize>,
    },
    #[error(
        "{weight}: a LoRA cannot be merged into elements of type {dtype}, only f32, bf16 and f16; merge it before \
         they are quantized, give dequantize=True, or use the float checkpoint with quantization=int8_w8a16, which merges it first"
    )]
    NotFloat {
        weight: String,
        dtype: crate::dtype::DType,
    },
    #[error("{weight}: two LoRAs replace it; use one of them")]
    Replaced { weight: String },
    #[error("{weight}: {source}")]
    HostTensor {
        weight: String,
        source: HostTensorError,
    },
    #[error("{weight}: {source}")]
    Matrix {
        weight: String,
        source: ndarray::ShapeError,
    },
}

fn unknown_tensors(path: &std::path::Path, modules: usize, unknown: &[String]) -> String {
    const SHOWN: usize = 10;
    let what = match modules {
        0 => "not a LoRA file".to_owned(),
        n => format!(
            "beside {n} LoRA modules there are {} other tensors",
            unknown.len()
        ),
    };
    match unknown.is_empty() {
        true => format!("{}: {what}: it has no tensors", path.display()),
        false => format!("{}: {what}: {}", path.display(), listed(unknown, SHOWN)),
    }
}

/// The scale of a LoRA in the parts of a model; 1 is as trained, 0 leaves the part out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoraScale {
    pub unet: f32,
    /// For both text encoders, where there are two.
    pub text_encoder: f32,
}

impl From<f32> for LoraScale {
    /// The same in all parts.
    fn from(scale: f32) -> Self {
        LoraScale {
            unet: scale,
            text_encoder: scale,
        }
    }
}

impl LoraScale {
    fn of(self, part: Part) -> f32 {
        match part {
            Part::Unet | Part::Transformer => self.unet,
            Part::TextEncoder | Part::TextEncoder2 | Part::TextEncoder3 => self.text_encoder,
            // No LoRA is for it.
            Part::Vae => 0.0,
        }
    }
}

/// A weight of the model that a LoRA may change.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoraTarget<'a> {
    /// The root of its part's paths: `unet`, `text_encoder` or `text_encoder_2`. No LoRA is for weights of others.
    pub root: &'a str,
    /// Its key in the part's checkpoint, e.g. `conv_in.weight`.
    pub key: &'a str,
    pub dims: &'a [usize],
}

/// A weight's full name, as graphs have it.
fn weight_name(root: &str, key: &str) -> String {
    format!("{root}/{key}")
}

/// Ranks of the updates by the weight's full name, e.g. `unet/conv_in.weight`.
pub type LoraRanks = BTreeMap<String, usize>;

#[cfg(test)]
mod tests;
