//! Opening a LoRA file and fitting it to a model.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::config::Config;
use super::dialects::{self, Blocks, Role};
use super::mismatch::{LoraFamily, LoraMismatch, MisshapenModule, UnmatchedModule};
use super::{Adapter, Layer, LoraError, LoraScale, LoraTarget, Patched, weight_name};
use crate::dtype::DType;
use crate::models::Part;
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

/// An open LoRA file: names and shapes read, factors still on disk.
#[derive(Debug)]
pub struct LoraFile {
    pub(super) checkpoint: Checkpoint,
    modules: Vec<Module>,
}

/// The factors of one module.
#[derive(Debug)]
struct Module {
    /// Its name in the file.
    name: String,
    part: Option<Part>,
    /// The name below the part, in the form that names are compared in.
    comparable: String,
    factors: Layer,
    down_dims: Vec<usize>,
    up_dims: Vec<usize>,
}

/// The tensors of one module, while they are collected.
#[derive(Default)]
struct Tensors {
    down: Option<String>,
    up: Option<String>,
    alpha: Option<String>,
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
        let modules = group(&path, &checkpoint)?;
        let config = config_of(&path, &checkpoint, &modules)?;
        let modules = modules
            .into_iter()
            .map(|(name, tensors)| Module::new(&checkpoint, &config, name, tensors))
            .collect::<Result<_, _>>()?;
        Ok(LoraFile {
            checkpoint,
            modules,
        })
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        self.checkpoint.path()
    }

    /// Finds the weight of every module among `targets`: all weights of the model, each once.
    ///
    /// Modules of a part whose scale is zero are left out, whether the model has that part or not.
    ///
    /// # Errors
    /// When a module matches no weight, several, or one of another shape (all of them are listed), or a weight twice.
    pub fn resolve(
        self,
        targets: &[LoraTarget<'_>],
        scale: LoraScale,
    ) -> Result<Adapter, LoraError> {
        let path = self.path().to_owned();
        if !scale.unet.is_finite() || !scale.text_encoder.is_finite() {
            return Err(LoraError::Scale { path, scale });
        }
        let names = Names::of(targets);
        let mut adapter = Adapter::default();
        let mut taken: HashMap<usize, String> = HashMap::new();
        let mut mismatch = LoraMismatch {
            path: path.clone(),
            modules: 0,
            unmatched: Vec::new(),
            misshapen: Vec::new(),
            lora_family: self.family(),
            model_family: model_family(targets),
        };
        for module in &self.modules {
            if module.part.is_some_and(|part| scale.of(part) == 0.0) {
                continue;
            }
            mismatch.modules += 1;
            let found = names.find(module);
            let fitting: Vec<usize> = found
                .iter()
                .copied()
                .filter(|&i| module.fits(targets[i].dims))
                .collect();
            match (found.as_slice(), fitting.as_slice()) {
                ([], _) => mismatch.unmatched.push(UnmatchedModule {
                    module: module.name.clone(),
                    down: module.down_dims.clone(),
                    up: module.up_dims.clone(),
                }),
                ([first, ..], []) => mismatch.misshapen.push(MisshapenModule {
                    module: module.name.clone(),
                    down: module.down_dims.clone(),
                    up: module.up_dims.clone(),
                    weight: weight_name(targets[*first].root, targets[*first].key),
                    expected: targets[*first].dims.to_vec(),
                }),
                (_, &[index]) => {
                    let target = &targets[index];
                    if let Some(first) = taken.insert(index, module.name.clone()) {
                        return Err(LoraError::Duplicate {
                            path,
                            weight: weight_name(target.root, target.key),
                            first,
                            second: module.name.clone(),
                        });
                    }
                    let part = dialects::part_of_root(target.root);
                    let mut layer = module.factors.clone();
                    layer.scale *= part.map_or(1.0, |part| f64::from(scale.of(part)));
                    adapter.patched.insert(
                        weight_name(target.root, target.key),
                        Patched {
                            dims: target.dims.to_vec(),
                            layers: vec![layer],
                        },
                    );
                }
                (_, several) => {
                    return Err(LoraError::Ambiguous {
                        path,
                        module: module.name.clone(),
                        weights: several
                            .iter()
                            .map(|&i| weight_name(targets[i].root, targets[i].key))
                            .collect(),
                    });
                }
            }
        }
        if !mismatch.unmatched.is_empty() || !mismatch.misshapen.is_empty() {
            return Err(LoraError::Mismatch(Box::new(mismatch)));
        }
        adapter.files.push(self);
        Ok(adapter)
    }

    /// What the file seems to be for.
    fn family(&self) -> Option<LoraFamily> {
        let of_shape = self
            .modules
            .iter()
            .filter(|m| reads_text(&m.comparable) && m.part.is_none_or(|p| p == Part::Unet))
            .find_map(|m| LoraFamily::of_text_features(*m.down_dims.get(1)?));
        of_shape.or_else(|| {
            self.modules
                .iter()
                .find_map(|m| LoraFamily::of_name(&m.name))
        })
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
            },
            name,
            down_dims,
            up_dims,
        })
    }

    /// Whether the factors make an update of a weight with dimensions `[out, in]` or `[out, in, k, k]`. Those of a
    /// 1x1 convolution and of a linear layer may be written for each other.
    fn fits(&self, weight: &[usize]) -> bool {
        let &[out, fan_in, ref kernel @ ..] = weight else {
            return false;
        };
        if !matches!(kernel, [] | [_, _]) {
            return false;
        }
        let of = |dims: &[usize], first: usize, second: usize, kernel: &[usize]| {
            let pointwise = kernel.iter().all(|&k| k == 1);
            dims.starts_with(&[first, second])
                && (&dims[2..] == kernel || pointwise && matches!(&dims[2..], [] | [1, 1]))
        };
        let rank = self.factors.rank;
        of(&self.down_dims, rank, fan_in, kernel) && of(&self.up_dims, out, rank, &[])
    }
}

/// The names that the model's weights go by.
struct Names {
    parts: BTreeMap<Part, HashMap<String, Vec<usize>>>,
}

impl Names {
    fn of(targets: &[LoraTarget<'_>]) -> Names {
        let unet = targets.iter().filter(|t| t.root == Part::Unet.name());
        let blocks = Blocks::of(unet.map(|t| t.key));
        let mut parts: BTreeMap<Part, HashMap<String, Vec<usize>>> = BTreeMap::new();
        for (index, target) in targets.iter().enumerate() {
            let (Some(part), Some(path)) = (
                dialects::part_of_root(target.root),
                target.key.strip_suffix(".weight"),
            ) else {
                continue;
            };
            let names = parts.entry(part).or_default();
            for alias in dialects::aliases(part, path, &blocks) {
                names.entry(alias).or_default().push(index);
            }
        }
        Names { parts }
    }

    /// The targets that a module may be for.
    fn find(&self, module: &Module) -> Vec<usize> {
        let mut found: Vec<usize> = self
            .parts
            .iter()
            .filter(|(part, _)| module.part.is_none_or(|p| p == **part))
            .filter_map(|(_, names)| names.get(&module.comparable))
            .flatten()
            .copied()
            .collect();
        // A weight may go by one name twice.
        found.dedup();
        found
    }
}

/// Whether a weight's name is that of cross-attention's keys or values.
fn reads_text(comparable: &str) -> bool {
    comparable.ends_with("attn2_to_k") || comparable.ends_with("attn2_to_v")
}

fn model_family(targets: &[LoraTarget<'_>]) -> Option<LoraFamily> {
    targets
        .iter()
        .find(|t| t.root == Part::Unet.name() && t.key.ends_with(".attn2.to_k.weight"))
        .and_then(|t| LoraFamily::of_text_features(*t.dims.get(1)?))
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
fn group(path: &Path, checkpoint: &Checkpoint) -> Result<BTreeMap<String, Tensors>, LoraError> {
    let mut modules: BTreeMap<String, Tensors> = BTreeMap::new();
    let mut others: BTreeMap<&'static str, Vec<&str>> = BTreeMap::new();
    let mut unknown: Vec<String> = Vec::new();
    for name in checkpoint.names() {
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
    Ok(modules)
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
    let text = fs::read_to_string(&beside).map_err(io)?;
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
