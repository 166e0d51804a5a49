//! The parts of a model, whichever layout it comes in.
//!
//! [`ModelSource::open`] takes a diffusers pipeline folder or a single file in the original layout (LDM's for
//! Stable Diffusion 1 and 2, SGM's for SDXL, that of its own code for each transformer) and gives each part a
//! configuration and a [`Checkpoint`] by the names of diffusers and transformers. Nothing is copied: the tensors of a
//! single file are renamed and cut by [`Checkpoint::view`].
//!
//! The tensors alone tell the kind of a single file (facts: diffusers' `loaders/single_file_utils.py`).

mod detect;
mod folder;
mod quantize;
mod quark;
mod single_file;
mod write;
mod write_file;

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::{Checkpoint, WeightsError};
use crate::dtype::DType;
use crate::models::{Family, Part};
use crate::quant::LowRankError;
use crate::schedulers::scheduler_fields;
use crate::util::files;
use crate::util::text::listed;

pub use detect::is_lora;
pub use folder::is_pipeline;
pub(crate) use folder::{check_class, denoisers, is_null, no_denoiser};
pub use quantize::{LayerPlan, LayerRounding, QuantizedTensor, UNetQuantization};
pub use quark::check_layer as check_quark_layer;
pub use write::WrittenPart;

/// More than any configuration of a published model.
const LARGEST_CONFIG: u64 = 1 << 20;
/// FLUX.1's layer of a sample's tokens.
const TOKENS: &str = "x_embedder.weight";
/// How many names an error shows.
const SHOWN: usize = 12;

/// How the files of a model are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// diffusers' folder: a subfolder with `config.json` and safetensors for each part.
    Pipeline,
    /// All parts in one safetensors file, with the names of the original code.
    SingleFile,
    /// A checkpoint of `train` from random weights, or what `quantize` made of one: a folder for each part, maybe with a suffix,
    /// and the tokenizer beside them or in a folder of its own.
    Run,
}

/// One part of a model.
#[derive(Debug)]
pub struct Component {
    /// The content of a `config.json`, diffusers' or transformers'.
    pub config: Map<String, Value>,
    /// The weights by diffusers' or transformers' names. Those of a text encoder start with `text_model.`
    pub checkpoint: Checkpoint,
}

/// Tensors or parts that are in the source and not used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ignored {
    /// Their names in the source; never empty.
    pub names: Vec<String>,
    pub reason: &'static str,
}

impl fmt::Display for Ignored {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.names.as_slice() {
            [] => Ok(()),
            [one] => write!(f, "{one}: {}", self.reason),
            [first, rest @ ..] => write!(f, "{first} and {} more: {}", rest.len(), self.reason),
        }
    }
}

/// What a model's pipeline takes beside text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PipelineKind {
    Text,
    /// A mask and a masked image, which the denoiser sees beside the sample: an inpainting UNet, FLUX.1 Fill.
    Inpaint,
    /// An image that steers, which the denoiser sees beside the sample: FLUX.1 Canny and Depth.
    Control,
}

/// An open model: headers and configurations read, tensors still on disk.
#[derive(Debug)]
pub struct ModelSource {
    /// The folder or the single file.
    pub path: PathBuf,
    pub layout: Layout,
    pub family: Family,
    pub kind: PipelineKind,
    /// The parts that the source has. Use [`ModelSource::component`] for one that is needed.
    pub components: BTreeMap<Part, Component>,
    /// The content of `scheduler_config.json`; for a single file the family's, with what the file says of it.
    pub scheduler: Option<Map<String, Value>>,
    /// Whether an empty negative prompt is zeros instead of the encoding of an empty text:
    /// `force_zeros_for_empty_prompt` of `model_index.json`.
    pub zero_empty_prompts: bool,
    /// Whether the UNet is told an aesthetic score in place of the target size: `requires_aesthetics_score` of
    /// `model_index.json`.
    pub requires_aesthetics_score: bool,
    /// The folders of the text encoders' tokenizers.
    pub tokenizers: BTreeMap<Part, PathBuf>,
    /// The other files of the source.
    pub ignored: Vec<Ignored>,
    /// Assumptions where the source does not say something, as whole sentences.
    pub notes: Vec<String>,
}

/// Why a model could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    #[error(
        "{path}: no such file or folder, and not the name of a repository on the hub, which has the form organization/name"
    )]
    NotFound { path: PathBuf },
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error("{path}: {reason}")]
    Json { path: PathBuf, reason: String },
    #[error(
        "{path}: no model in this folder: looked for model_index.json, unet/config.json, transformer/config.json or one \
         .safetensors or .gguf file of a whole model; it has {}",
        listed(found, SHOWN)
    )]
    NotAModel { path: PathBuf, found: Vec<String> },
    #[error(
        "{path}: its model_index.json is of a {class}, which is not supported; supported are {}",
        known()
    )]
    UnknownPipeline { path: PathBuf, class: String },
    #[error(
        "{path}: several checkpoints; name one of them: {}",
        listed(found, SHOWN)
    )]
    SeveralFiles { path: PathBuf, found: Vec<String> },
    #[error(
        "{path}: its tensors belong to no known model ({}){}; among the {} are {}",
        known(),
        architecture.as_ref().map_or_else(String::new, |name| format!("; its general.architecture is {name}")),
        names.len(),
        listed(names, SHOWN)
    )]
    UnknownFamily {
        path: PathBuf,
        names: Vec<String>,
        /// What a GGUF file says it is.
        architecture: Option<String>,
    },
    #[error(
        "{path}: this is {family}, which is not supported; supported are {}",
        known()
    )]
    UnsupportedFamily { path: PathBuf, family: &'static str },
    #[error("{path}: this is {what}, not a whole model that is supported; {advice}")]
    OtherKind {
        path: PathBuf,
        what: &'static str,
        advice: &'static str,
    },
    #[error("{path}: this is {}; {config} expects {}; use {}", found.title(), expected.title(), found.spec().recipe)]
    WrongFamily {
        path: PathBuf,
        found: Family,
        expected: Family,
        config: String,
    },
    #[error(
        "{path}: incomplete: {} needs {}; expected {}; found {}",
        family.title(), names(missing), expected_at(path, *layout, missing), names(found)
    )]
    Incomplete {
        path: PathBuf,
        family: Family,
        layout: Layout,
        /// All that the family needs and the source does not have; never empty.
        missing: Vec<Part>,
        found: Vec<Part>,
    },
    #[error(
        "{path}: {} values of {} tensors are too large for {dtype} and would become infinite: {}; nothing was written; \
         convert with dtype=bf16 or dtype=fp32, or leave dtype out",
        tensors.iter().map(|(_, count)| count).sum::<usize>(),
        tensors.len(),
        listed(&tensors.iter().map(|(name, count)| format!("{name} ({count})")).collect::<Vec<_>>(), SHOWN)
    )]
    Overflow {
        path: PathBuf,
        dtype: DType,
        /// Names with their part, and how many of their values.
        tensors: Vec<(String, usize)>,
    },
    #[error(
        "{path}: {tensor}: expected floating-point numbers, found {found}; a quantized checkpoint cannot be converted"
    )]
    NotFloat {
        path: PathBuf,
        tensor: String,
        found: DType,
    },
    #[error("{path}: {layer}: {source}")]
    Quantize {
        path: PathBuf,
        layer: String,
        source: LowRankError,
    },
    #[error(
        "{path}: its weights are quantized already; name the checkpoint that it was made from, or use it as it is"
    )]
    QuantizedAlready { path: PathBuf },
    #[error("{path}: {tensor} has no place in files with the names of the original code: {reason}")]
    NotOriginal {
        path: PathBuf,
        /// A part, or a tensor of it.
        tensor: String,
        reason: String,
    },
    #[error("{path}: exists already; choose another name or remove it")]
    Exists { path: PathBuf },
    #[error("{path}: {part}: {reason}")]
    Structure {
        path: PathBuf,
        part: Part,
        reason: String,
    },
}

fn names(parts: &[Part]) -> String {
    let names: Vec<String> = parts.iter().map(Part::to_string).collect();
    listed(&names, SHOWN)
}

/// Where parts that a model lacks would be.
fn expected_at(path: &Path, layout: Layout, parts: &[Part]) -> String {
    match layout {
        Layout::SingleFile => "them in the same file, as in a file of a whole model".to_owned(),
        Layout::Pipeline | Layout::Run => {
            let folder = |part: &Part| format!("{}/", path.join(part.name()).display());
            let folders: Vec<String> = parts.iter().map(folder).collect();
            format!("in {}", listed(&folders, SHOWN))
        }
    }
}

fn known() -> String {
    let names: Vec<&str> = Family::published()
        .map(|(family, _)| family.title())
        .collect();
    names.join(", ")
}

impl ModelSource {
    /// Opens a diffusers pipeline folder, a single `.safetensors` or `.gguf` file in the original layout, or a folder that
    /// holds exactly one such file.
    ///
    /// Single files may be Stable Diffusion 1.x or 2.x, SDXL base or refiner, each also for inpainting, Stable Diffusion 3
    /// or 3.5, FLUX.1 or PixArt, whole or the denoiser alone. Of a folder the parts that are there are opened.
    ///
    /// # Errors
    /// When there is no model, it is of a kind that is not supported, or a file of it cannot be opened; pickles are
    /// refused.
    pub fn open(path: &Path) -> Result<Self, SourceError> {
        let metadata = std::fs::metadata(path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => SourceError::NotFound {
                path: path.to_owned(),
            },
            _ => io_error(path, source),
        })?;
        if !metadata.is_dir() {
            return single_file::open(path);
        }
        if folder::is_pipeline(path) {
            return folder::open(path);
        }
        single_file::open(&folder::only_file(path)?)
    }

    /// Opens what training on pixels writes: `dir` with a folder for each part, whose names end in `suffix`.
    ///
    /// # Errors
    /// When a part cannot be opened, or there is none that denoises.
    pub fn of_run(dir: &Path, suffix: &str) -> Result<Self, SourceError> {
        folder::of_run(dir, suffix)
    }

    /// A part that is needed.
    ///
    /// # Errors
    /// When the source does not have it: names all parts of the family that are missing.
    pub fn component(&self, part: Part) -> Result<&Component, SourceError> {
        self.components.get(&part).ok_or_else(|| {
            let needed = self.family.spec().parts();
            SourceError::Incomplete {
                path: self.path.clone(),
                family: self.family,
                layout: self.layout,
                missing: Part::ALL
                    .into_iter()
                    .filter(|other| *other == part || needed.contains(other))
                    .filter(|part| !self.components.contains_key(part))
                    .collect(),
                found: self.components.keys().copied().collect(),
            }
        })
    }

    /// Where the configuration of a part comes from: its file, or the single file that it is told from.
    pub fn config_path(&self, part: Part) -> PathBuf {
        match self.layout {
            Layout::Pipeline | Layout::Run => self.path.join(part.name()).join("config.json"),
            Layout::SingleFile => self.path.clone(),
        }
    }

    /// The file with the noise schedule; for a single file that file.
    pub fn scheduler_path(&self) -> PathBuf {
        match self.layout {
            Layout::Pipeline | Layout::Run => self.path.join(folder::SCHEDULER),
            Layout::SingleFile => self.path.clone(),
        }
    }

    /// Takes the denoiser's weights from another file: one with diffusers' names, or a single file of the same family,
    /// whole or the denoiser alone.
    ///
    /// # Errors
    /// When the file cannot be opened or has no such denoiser, or this model has none.
    pub fn replace_denoiser(&mut self, path: &Path) -> Result<(), SourceError> {
        let part = self.family.spec().denoiser.part();
        self.component(part)?;
        let file = Checkpoint::open(path)?;
        let checkpoint = match detect::is_denoiser_of_diffusers(&file) {
            true => file,
            false => {
                let mut other = single_file::open(path)?;
                other.expect_family(self.family, &self.path.display().to_string())?;
                other.component(part)?;
                match other.components.remove(&part) {
                    Some(denoiser) => denoiser.checkpoint,
                    None => file,
                }
            }
        };
        if let Some(denoiser) = self.components.get_mut(&part) {
            denoiser.checkpoint = checkpoint;
        }
        Ok(())
    }

    /// Takes the denoiser from a folder in diffusers' layout of it alone, as its `config.json` there describes it: quantized or
    /// not.
    ///
    /// # Errors
    /// When the folder cannot be opened, its tensors are not as described, or this model has no denoiser.
    pub fn take_denoiser_of(&mut self, folder: &Path) -> Result<(), SourceError> {
        let part = self.family.spec().denoiser.part();
        self.component(part)?;
        let taken = folder::component(folder, part)?;
        self.components.insert(part, taken);
        Ok(())
    }

    /// Lets the denoiser of FLUX.1 take tokens of `features` of its sample, the further ones with weights of zero: those of an
    /// image that steers, which a control LoRA gives weights.
    ///
    /// # Errors
    /// When there is no such denoiser, or its layer cannot be widened.
    pub fn widen_tokens(&mut self, features: usize) -> Result<(), SourceError> {
        let part = self.family.spec().denoiser.part();
        self.component(part)?;
        if let Some(denoiser) = self.components.get_mut(&part) {
            denoiser.checkpoint.widen_columns(TOKENS, features)?;
            let own = denoiser
                .config
                .insert("in_channels".to_owned(), json!(features));
            denoiser
                .config
                .entry("out_channels")
                .and_modify(|found| {
                    if found.is_null() {
                        *found = json!(own);
                    }
                })
                .or_insert(json!(own));
            self.kind = folder::pipeline_kind(&denoiser.config);
        }
        Ok(())
    }

    /// Shows the denoiser's weights as they are stored, where programs can take them so; others stay the floats that they
    /// stand for.
    pub fn pack_denoiser(&mut self) {
        let part = self.family.spec().denoiser.part();
        if let Some(denoiser) = self.components.get_mut(&part) {
            denoiser.checkpoint.pack();
        }
    }

    /// Shows the denoiser's weights as the floats that they stand for; how many there are that are stored otherwise.
    pub fn widen_denoiser(&mut self) -> usize {
        let part = self.family.spec().denoiser.part();
        self.components.get_mut(&part).map_or(0, |denoiser| {
            denoiser.checkpoint.widen();
            denoiser.checkpoint.widened()
        })
    }

    /// Checks that the model is of the family that `config`, the name of a configuration file, is for.
    ///
    /// # Errors
    /// When it is of another, with the configuration file that is for it.
    pub fn expect_family(&self, expected: Family, config: &str) -> Result<(), SourceError> {
        if self.family == expected {
            return Ok(());
        }
        Err(SourceError::WrongFamily {
            path: self.path.clone(),
            found: self.family,
            expected,
            config: config.to_owned(),
        })
    }
}

fn io_error(path: &Path, source: io::Error) -> SourceError {
    SourceError::Io {
        path: path.to_owned(),
        source,
    }
}

/// Reads a file that holds a JSON object.
fn read_json(path: &Path) -> Result<Map<String, Value>, SourceError> {
    read_with(path, |text| {
        serde_json::from_str(text).map_err(|e| format!("not a JSON object: {e}"))
    })
}

/// Reads a `scheduler_config.json`, in which Python may have written infinities that JSON does not have.
fn read_scheduler(path: &Path) -> Result<Map<String, Value>, SourceError> {
    read_with(path, |text| {
        scheduler_fields(text).map_err(|e| e.to_string())
    })
}

/// A configuration of a family, for a model at `path`.
fn built_in(path: &Path, text: &str) -> Result<Map<String, Value>, SourceError> {
    serde_json::from_str(text).map_err(|e| SourceError::Json {
        path: path.to_owned(),
        reason: format!("the built-in configuration of its family: {e}"),
    })
}

fn read_with(
    path: &Path,
    parse: impl Fn(&str) -> Result<Map<String, Value>, String>,
) -> Result<Map<String, Value>, SourceError> {
    let mut bytes = Vec::new();
    files::open(path)
        .and_then(|file| file.take(LARGEST_CONFIG + 1).read_to_end(&mut bytes))
        .map_err(|source| io_error(path, source))?;
    let error = |reason: String| SourceError::Json {
        path: path.to_owned(),
        reason,
    };
    if bytes.len() as u64 > LARGEST_CONFIG {
        return Err(error(format!(
            "larger than {LARGEST_CONFIG} bytes; configurations of models are smaller"
        )));
    }
    let text = std::str::from_utf8(&bytes).map_err(|e| error(format!("not UTF-8: {e}")))?;
    parse(text).map_err(error)
}

#[cfg(test)]
mod tests;
