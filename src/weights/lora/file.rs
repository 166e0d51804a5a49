//! Opening a LoRA file.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::LoraError;
use super::config::Config;
use super::dialects::{self, Role};
use crate::dtype::DType;
use crate::models::original::Transform;
use crate::models::{Family, Part};
use crate::util::files;
use crate::weights::{Checkpoint, WeightsError};

/// The names of a folder's weights: diffusers' and PEFT's.
pub(crate) const FILES: [&str; 2] = [
    "pytorch_lora_weights.safetensors",
    "adapter_model.safetensors",
];
/// PEFT's configuration beside its weights.
pub(crate) const CONFIG_FILE: &str = "adapter_config.json";
/// The metadata that diffusers keeps PEFT's configuration in.
const METADATA_KEY: &str = "lora_adapter_metadata";
/// A configuration is a page of text; more is something else.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// The metadata that names the model a file was trained on.
const ORIGINS: [&str; 3] = [
    "modelspec.architecture",
    "ss_base_model_version",
    "ss_sd_model_name",
];

/// An open LoRA file: names and shapes read, factors still on disk.
#[derive(Debug)]
pub struct LoraFile {
    pub(super) checkpoint: Checkpoint,
    pub(super) modules: Vec<Module>,
    /// Weights that it has whole, in place of the model's.
    pub(super) replacements: Vec<Replacement>,
}

/// A weight in place of the model's.
#[derive(Debug)]
pub(super) struct Replacement {
    /// Its name in the file.
    pub tensor: String,
    pub part: Option<Part>,
    /// The layer's name below the part, in the form that names are compared in.
    pub comparable: String,
    pub dims: Vec<usize>,
}

/// The factors of one module.
#[derive(Debug)]
pub(super) struct Module {
    /// Its name in the file.
    pub name: String,
    pub part: Option<Part>,
    /// The name below the part, in the form that names are compared in.
    pub comparable: String,
    pub factors: Layer,
    pub down_dims: Vec<usize>,
    pub up_dims: Vec<usize>,
    /// The tensor that is added to the layer's bias.
    pub bias: Option<String>,
}

/// One update: names of the factors' tensors, what their product is multiplied with, and the part of it that counts.
#[derive(Clone, Debug)]
pub(super) struct Layer {
    /// Index of the file.
    pub file: usize,
    pub down: String,
    pub up: String,
    pub rank: usize,
    pub scale: f64,
    /// Of the rows of the up factor.
    pub of_up: Transform,
}

/// The tensors of one module, while they are collected.
#[derive(Default)]
struct Tensors {
    down: Option<String>,
    up: Option<String>,
    alpha: Option<String>,
    bias: Option<String>,
}

/// The tensors of a file.
#[derive(Default)]
struct Grouped {
    /// By module, sorted by name.
    modules: BTreeMap<String, Tensors>,
    /// Tensors that replace weights, each with its layer.
    replacements: Vec<(String, String)>,
}

impl LoraFile {
    /// Opens a `.safetensors` file of any of the dialects (kohya, diffusers, PEFT), or a folder that diffusers or PEFT
    /// saved one in.
    ///
    /// The product of a module's factors counts `alpha / rank` times: alpha is the module's own tensor, or what the
    /// configuration says that diffusers (in the metadata) and PEFT (in `adapter_config.json`) save, or the rank.
    ///
    /// # Errors
    /// When the file is damaged, holds other kinds of adapters or anything that is no LoRA, or a factor is missing.
    pub fn open(path: &Path) -> Result<LoraFile, LoraError> {
        let path = file_of(path)?;
        let checkpoint = Checkpoint::open(&path)?;
        let Grouped {
            modules,
            replacements,
        } = group(&path, &checkpoint)?;
        let config = config_of(&path, &checkpoint, &modules)?;
        let modules = modules
            .into_iter()
            .map(|(name, tensors)| Module::new(&checkpoint, &config, name, tensors))
            .collect::<Result<_, _>>()?;
        let replacements = replacements
            .into_iter()
            .map(|(tensor, layer)| {
                let (part, below) = dialects::split_part(&layer);
                let shape = checkpoint.info(&tensor);
                Replacement {
                    part,
                    comparable: dialects::comparable(below),
                    dims: shape.map(|s| s.dims.clone()).unwrap_or_default(),
                    tensor,
                }
            })
            .collect();
        Ok(LoraFile {
            checkpoint,
            modules,
            replacements,
        })
    }

    /// The features that it takes of a token of FLUX.1's sample, if it changes the layer that reads them. Those of an image
    /// that steers are among them where they are more than the model's.
    pub fn token_features(&self) -> Option<usize> {
        let is_input = |module: &&Module| ["img_in", "x_embedder"].contains(&&*module.comparable);
        let input = self.modules.iter().find(is_input)?;
        input.down_dims.get(1).copied()
    }

    /// The family of the model that the file says it was trained on, in the metadata of kohya's trainers.
    pub fn trained_on(&self) -> Option<Family> {
        let said = ORIGINS
            .iter()
            .filter_map(|key| self.checkpoint.metadata().get(*key));
        let said: Vec<String> = said.map(|value| letters(value)).collect();
        let is_named = |family: &Family| {
            let title = letters(family.title());
            said.iter().any(|value| value.contains(&title))
        };
        let named = Family::ALL.into_iter().filter(is_named);
        named.max_by_key(|family| family.title().len())
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        self.checkpoint.path()
    }
}

impl Module {
    fn new(
        checkpoint: &Checkpoint,
        config: &Config,
        name: String,
        tensors: Tensors,
    ) -> Result<Module, LoraError> {
        let path = || checkpoint.path().to_owned();
        let missing = |what| LoraError::Unpaired {
            path: path(),
            module: name.clone(),
            missing: what,
        };
        let down = tensors.down.ok_or_else(|| missing("down"))?;
        let up = tensors.up.ok_or_else(|| missing("up"))?;
        let dims = |tensor: &str| {
            let shape = checkpoint.info(tensor);
            shape.map(|s| s.dims.clone()).unwrap_or_default()
        };
        let (down_dims, up_dims) = (dims(&down), dims(&up));
        let rank = match (down_dims.as_slice(), up_dims.as_slice()) {
            (&[rank, _, ..], &[_, of_up, ..]) if rank == of_up && rank > 0 => rank,
            _ => {
                return Err(LoraError::Factors {
                    path: path(),
                    module: name,
                    down: down_dims,
                    up: up_dims,
                });
            }
        };
        if let Some(bias) = tensors.bias.as_deref()
            && dims(bias) != up_dims[..1]
        {
            let reason = format!(
                "{:?}; expected {:?}, the rows of the second factor",
                dims(bias),
                &up_dims[..1]
            );
            return Err(LoraError::Weights(WeightsError::Tensor {
                path: path(),
                tensor: bias.to_owned(),
                reason,
            }));
        }
        let (part, below) = dialects::split_part(&name);
        let multiplier = match &tensors.alpha {
            Some(alpha) => Some(read_alpha(checkpoint, alpha)? / rank as f64),
            None => config.multiplier(part, below, rank),
        };
        Ok(Module {
            part,
            comparable: dialects::comparable(below),
            factors: Layer {
                file: 0,
                down,
                up,
                rank,
                scale: multiplier.unwrap_or(1.0),
                of_up: Transform::Identity,
            },
            name,
            down_dims,
            up_dims,
            bias: tensors.bias,
        })
    }
}

/// Letters and digits of a name, in lower case: `flux-1-dev` and `FLUX.1 dev` are the same.
fn letters(name: &str) -> String {
    let kept = name.chars().filter(char::is_ascii_alphanumeric);
    kept.map(|c| c.to_ascii_lowercase()).collect()
}

/// The file itself, or that of a folder.
fn file_of(path: &Path) -> Result<PathBuf, LoraError> {
    if !path.is_dir() {
        return Ok(path.to_owned());
    }
    let files = FILES.map(|name| path.join(name));
    let found = files.into_iter().find(|file| file.is_file());
    Ok(found.ok_or_else(|| WeightsError::NoWeights {
        path: path.to_owned(),
        looked_for: FILES.map(str::to_owned).to_vec(),
        found: Vec::new(),
    })?)
}

/// The tensors by module, sorted by name. All of them must be a LoRA's.
fn group(path: &Path, checkpoint: &Checkpoint) -> Result<Grouped, LoraError> {
    let Grouped {
        mut modules,
        mut replacements,
    } = Grouped::default();
    let mut others: BTreeMap<&'static str, Vec<&str>> = BTreeMap::new();
    let mut unknown: Vec<String> = Vec::new();
    for name in checkpoint.names() {
        if let Some(layer) = dialects::replaced_layer(name) {
            replacements.push((name.to_owned(), layer.to_owned()));
            continue;
        }
        let Some((module, role)) = dialects::split_role(name) else {
            match dialects::other_kind(name) {
                Some(kind) => others.entry(kind).or_default().push(name),
                None => unknown.push(name.to_owned()),
            }
            continue;
        };
        let tensors = modules.entry(module.to_owned()).or_default();
        let place = match role {
            Role::Down => &mut tensors.down,
            Role::Up => &mut tensors.up,
            Role::Alpha => &mut tensors.alpha,
            Role::Bias => &mut tensors.bias,
        };
        if let Some(first) = place.replace(name.to_owned()) {
            return Err(LoraError::Duplicate {
                path: path.to_owned(),
                weight: module.to_owned(),
                first,
                second: name.to_owned(),
            });
        }
    }
    if let Some((kind, names)) = others.into_iter().next() {
        return Err(LoraError::Unsupported {
            path: path.to_owned(),
            kind,
            example: names[0].to_owned(),
            count: names.len(),
        });
    }
    if modules.is_empty() || !unknown.is_empty() {
        return Err(LoraError::Unknown {
            path: path.to_owned(),
            modules: modules.len(),
            unknown,
        });
    }
    Ok(Grouped {
        modules,
        replacements,
    })
}

/// The configuration in the file's metadata, or beside a file of PEFT's.
fn config_of(
    path: &Path,
    checkpoint: &Checkpoint,
    modules: &BTreeMap<String, Tensors>,
) -> Result<Config, LoraError> {
    let parse = |path: &Path, text: &str| {
        let fields: Result<Map<String, Value>, _> = serde_json::from_str(text);
        let config = fields
            .map_err(|e| e.to_string())
            .and_then(Config::from_fields);
        config.map_err(|reason| LoraError::Config {
            path: path.to_owned(),
            reason,
        })
    };
    if let Some(text) = checkpoint.metadata().get(METADATA_KEY) {
        return parse(path, text);
    }
    let beside = path.with_file_name(CONFIG_FILE);
    // Another program's file may lie in the same folder.
    let by_peft = modules
        .keys()
        .any(|name| name.starts_with("base_model.model."));
    if !by_peft || !beside.is_file() {
        return Ok(Config::default());
    }
    let io = |source| WeightsError::Io {
        path: beside.clone(),
        source,
    };
    let bytes = fs::metadata(&beside).map_err(io)?.len();
    if bytes > MAX_CONFIG_BYTES {
        return Err(LoraError::Config {
            path: beside,
            reason: format!("{bytes} bytes; expected at most {MAX_CONFIG_BYTES}"),
        });
    }
    let text = files::read_to_string(&beside).map_err(io)?;
    parse(&beside, &text)
}

fn read_alpha(checkpoint: &Checkpoint, name: &str) -> Result<f64, LoraError> {
    let bad = |found: String| LoraError::Alpha {
        path: checkpoint.path().to_owned(),
        tensor: name.to_owned(),
        found,
    };
    match checkpoint.info(name) {
        Some(shape) if shape.count() == 1 => {}
        Some(shape) => return Err(bad(shape.to_string())),
        None => return Err(bad("nothing".to_owned())),
    }
    let value = checkpoint.read_as(name, DType::F64)?;
    let value = value.to_f64_vec().map_err(|e| bad(e.to_string()))?;
    match value.first() {
        Some(value) if value.is_finite() => Ok(*value),
        other => Err(bad(format!("{other:?}"))),
    }
}
