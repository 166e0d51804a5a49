//! Low-rank updates as what is trained: which weights have one, and the names of their factors in files.

use std::collections::{BTreeMap, BTreeSet};

use regex::Regex;
use serde_json::{Map, Value, json};

use crate::graph::{Graph, stacked};
use crate::host_tensor::HostTensor;
use crate::models::{DenoiserKind, Part};
use crate::shape::Shape;
use crate::util::text::listed;
use crate::weights::TensorSpec;
use crate::weights::lora::{KohyaNames, LoraRanks, adaptable};

/// The file of the factors in a checkpoint, as diffusers calls it, and that with kohya's names beside it.
pub const LORA_FILE: &str = "pytorch_lora_weights.safetensors";
pub const KOHYA_FILE: &str = "kohya_lora.safetensors";

/// Low-rank updates to train (Hu et al. 2021): `alpha / rank * up @ down` beside each target.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraOptions {
    pub rank: usize,
    pub alpha: f64,
    /// Regular expressions; a layer is a target if one of them matches its whole path below the denoiser's root, or an
    /// end of it that begins after a dot: `to_q`, `attn2\.to_[kv]`, `.*`.
    pub target_modules: Vec<String>,
    /// The same for the layers of text encoders, where these are trained.
    pub text_modules: Vec<String>,
    /// The share of an update's input that a training step leaves out, in `[0, 1)`; what stays counts `1 / (1 - dropout)`
    /// times. Validation and samples leave nothing out.
    pub dropout: f64,
    /// How many times the learning rate of first factors that of second ones is (Hayou et al. 2024, LoRA+).
    pub plus_ratio: f64,
}

/// Why low-rank updates cannot be put beside a model's layers.
#[derive(Debug, thiserror::Error)]
pub enum LoraTargetError {
    #[error("{key}: '{pattern}': {source}")]
    Pattern {
        key: &'static str,
        pattern: String,
        source: Box<regex::Error>,
    },
    #[error(
        "{key}: '{pattern}' matches no linear layer and no convolution {of} that the loss depends on; paths look like {}",
        listed(examples, 3)
    )]
    Unmatched {
        key: &'static str,
        of: &'static str,
        pattern: String,
        examples: Vec<String>,
    },
    #[error(
        "lora_rank={rank}: {layer} {shape} has rank {largest} at most; give a smaller rank, or leave the layer out of {key}"
    )]
    Rank {
        key: &'static str,
        rank: usize,
        layer: String,
        shape: Shape,
        largest: usize,
    },
}

/// The layers of a denoiser that have an update where nothing else is said: those of diffusers' scripts. For FLUX.1 and
/// Stable Diffusion 3 these are the projections of the joint attentions, and for FLUX.1 the feed-forward layers of the double
/// blocks too; for UNets, and for PixArt, which has no script there, the projections of all attentions.
pub const fn default_targets(kind: DenoiserKind) -> &'static [&'static str] {
    match kind {
        DenoiserKind::Unet | DenoiserKind::PixArt => &["to_k", "to_q", "to_v", "to_out.0"],
        DenoiserKind::Sd3 => JOINT_PROJECTIONS,
        DenoiserKind::Flux => FLUX_LAYERS.as_slice(),
    }
}

const JOINT_PROJECTIONS: &[&str] = FLUX_LAYERS.split_at(8).0;

const FLUX_LAYERS: [&str; 12] = [
    "attn.to_k",
    "attn.to_q",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_k_proj",
    "attn.add_q_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
    "ff.net.0.proj",
    "ff.net.2",
    "ff_context.net.0.proj",
    "ff_context.net.2",
];

/// The same for text encoders.
pub const TEXT_PROJECTIONS: [&str; 4] = ["q_proj", "k_proj", "v_proj", "out_proj"];

/// The parts whose layers have updates.
const PARTS: [Part; 4] = [
    Part::Unet,
    Part::Transformer,
    Part::TextEncoder,
    Part::TextEncoder2,
];

/// Which layers a list of patterns is about.
struct Targets<'a> {
    key: &'static str,
    of: &'static str,
    patterns: &'a [String],
    is_denoiser: bool,
}

impl LoraOptions {
    /// The factor of each update.
    pub fn scale(&self) -> f64 {
        self.alpha / self.rank as f64
    }

    /// The ranks of the weights that have an update, by their names in `graph`: of those that its outputs depend on.
    ///
    /// # Errors
    /// When a pattern is no regular expression or matches nothing, or a layer is smaller than the rank.
    pub fn ranks(&self, graph: &Graph) -> Result<LoraRanks, LoraTargetError> {
        let mut ranks = LoraRanks::new();
        for targets in [
            Targets {
                key: "lora_target_modules",
                of: "of the denoiser",
                patterns: &self.target_modules,
                is_denoiser: true,
            },
            Targets {
                key: "lora_text_encoder_target_modules",
                of: "of a text encoder",
                patterns: &self.text_modules,
                is_denoiser: false,
            },
        ] {
            self.add_ranks(graph, &targets, &mut ranks)?;
        }
        Ok(ranks)
    }

    fn add_ranks(
        &self,
        graph: &Graph,
        targets: &Targets<'_>,
        ranks: &mut LoraRanks,
    ) -> Result<(), LoraTargetError> {
        let key = targets.key;
        let weights = adaptable(graph).into_iter();
        let layers: Vec<(&str, &str, &Shape)> = weights
            .filter_map(|(name, shape)| {
                let (part, path) = layer(name)?;
                let is_wanted = part.is_denoiser() == targets.is_denoiser;
                is_wanted.then_some((name, path, shape))
            })
            .collect();
        for pattern in targets.patterns {
            let regex = Regex::new(&format!("^(?:.*\\.)?(?:{pattern})$")).map_err(|source| {
                LoraTargetError::Pattern {
                    key,
                    pattern: pattern.clone(),
                    source: Box::new(source),
                }
            })?;
            let mut found = layers
                .iter()
                .filter(|(_, path, _)| regex.is_match(path))
                .peekable();
            if found.peek().is_none() {
                let paths = layers.iter().map(|(_, path, _)| (*path).to_owned());
                return Err(LoraTargetError::Unmatched {
                    key,
                    of: targets.of,
                    pattern: pattern.clone(),
                    examples: paths.collect(),
                });
            }
            for (name, path, shape) in found {
                let inputs = shape.dims[1..].iter().product::<usize>();
                let largest = shape.dims[0].min(inputs);
                if self.rank > largest {
                    return Err(LoraTargetError::Rank {
                        key,
                        rank: self.rank,
                        layer: (*path).to_owned(),
                        shape: (*shape).clone(),
                        largest,
                    });
                }
                ranks.insert((*name).to_owned(), self.rank);
            }
        }
        Ok(())
    }
}

/// The part that the weight called `name` is of, and its key there.
fn part_and_key(name: &str) -> Option<(Part, &str)> {
    let (root, key) = name.split_once('/')?;
    let part = PARTS.into_iter().find(|part| part.name() == root)?;
    Some((part, key))
}

/// The part and the path below its root of the layer whose weight is called `name`.
fn layer(name: &str) -> Option<(Part, &str)> {
    let (part, key) = part_and_key(name)?;
    Some((part, key.strip_suffix(".weight")?))
}

/// The ends of the names of an update's factors: here and in kohya's files, and in PEFT's.
const DOWN: [&str; 2] = [".lora_down.weight", ".lora_A.weight"];
const UP: [&str; 2] = [".lora_up.weight", ".lora_B.weight"];

/// Whether a weight is a factor of an update.
pub fn is_factor(name: &str) -> bool {
    [DOWN, UP].iter().any(|[own, _]| name.ends_with(own))
}

/// Whether a weight is the second factor of an update, which starts at zero.
pub fn is_second_factor(name: &str) -> bool {
    name.ends_with(UP[0])
}

/// The name of a factor in PEFT's files; `None` for other weights.
pub fn file_place(weight: &str) -> Option<String> {
    let (part, key) = part_and_key(weight)?;
    let renamed = |[own, peft]: [&str; 2]| {
        let layer = key.strip_suffix(own)?;
        Some(format!("{part}.{layer}{peft}"))
    };
    renamed(DOWN).or_else(|| renamed(UP))
}

/// The part and the path of a layer by its name in PEFT's files.
fn file_layer(name: &str) -> Option<(Part, &str)> {
    let (root, layer) = name.split_once('.')?;
    let part = PARTS.into_iter().find(|part| part.name() == root)?;
    Some((part, layer))
}

/// The ranks of the updates of `graph`, by the names of the weights that they stand beside.
pub fn ranks_of(graph: &Graph) -> LoraRanks {
    let weights = graph.weights().flat_map(|(_, input)| stacked::parts(input));
    let downs = weights.filter_map(|input| {
        let layer = input.name.strip_suffix(DOWN[0])?;
        Some((format!("{layer}.weight"), *input.shape.dims.first()?))
    });
    downs.collect()
}

/// The dimensions of a weight of `dims` in files. `all` has those of every weight: the second factor of a convolution
/// is a convolution of 1x1 there.
pub fn file_dims(weight: &str, dims: &[usize], all: &BTreeMap<&str, &[usize]>) -> Vec<usize> {
    let down = weight
        .strip_suffix(UP[0])
        .map(|layer| format!("{layer}{}", DOWN[0]));
    let of_down = down.and_then(|down| all.get(down.as_str()));
    let ones = of_down.map_or(0, |of_down| of_down.len() - dims.len());
    dims.iter()
        .copied()
        .chain([1; 4].into_iter().take(ones))
        .collect()
}

/// Low-rank updates as their files describe them.
#[derive(Clone, Debug)]
pub struct LoraRecord {
    pub options: LoraOptions,
    /// How kohya's trainers name the model's layers, if a file with their names is asked for.
    pub kohya: Option<KohyaNames>,
}

/// A file with kohya's names.
pub struct KohyaFile {
    /// In the order that they were given.
    pub factors: Vec<TensorSpec>,
    pub alphas: BTreeMap<String, HostTensor>,
    pub metadata: BTreeMap<String, String>,
}

impl LoraRecord {
    /// The metadata of a file with factors `names`: PEFT's configuration, where diffusers keeps it.
    pub fn peft_metadata<'n>(
        &self,
        names: impl Iterator<Item = &'n str>,
    ) -> BTreeMap<String, String> {
        let mut layers: BTreeMap<Part, BTreeSet<&str>> = BTreeMap::new();
        for name in names {
            if let Some((part, layer)) = name.strip_suffix(DOWN[1]).and_then(file_layer) {
                // transformers 5 has no `text_model` before the paths of some encoders: the ends of paths fit both.
                let layer = match part.is_denoiser() {
                    true => layer,
                    false => layer.rsplit('.').next().unwrap_or(layer),
                };
                layers.entry(part).or_default().insert(layer);
            }
        }
        let mut config = Map::new();
        for (part, layers) in layers {
            for (field, value) in [
                ("peft_type", json!("LORA")),
                ("r", json!(self.options.rank)),
                ("lora_alpha", json!(self.options.alpha)),
                ("target_modules", json!(layers)),
                ("bias", json!("none")),
                ("lora_dropout", json!(self.options.dropout)),
                ("init_lora_weights", json!(true)),
                ("use_dora", json!(false)),
                ("use_rslora", json!(false)),
                ("rank_pattern", json!({})),
                ("alpha_pattern", json!({})),
            ] {
                config.insert(format!("{part}.{field}"), value);
            }
        }
        let config = Value::Object(config);
        BTreeMap::from([("lora_adapter_metadata".to_owned(), config.to_string())])
    }

    /// The same factors with kohya's names, if they are asked for.
    pub fn kohya(&self, factors: &[&TensorSpec]) -> Option<KohyaFile> {
        let names = self.kohya.as_ref()?;
        let mut file = KohyaFile {
            factors: Vec::with_capacity(factors.len()),
            alphas: BTreeMap::new(),
            metadata: names.metadata(self.options.rank, self.options.alpha),
        };
        for spec in factors {
            let of = |[own, peft]: [&'static str; 2]| Some((spec.name.strip_suffix(peft)?, own));
            let (module, end) = of(DOWN).or_else(|| of(UP))?;
            let (part, layer) = file_layer(module)?;
            let module = names.module(part, layer);
            file.factors.push(TensorSpec {
                name: format!("{module}{end}"),
                shape: spec.shape.clone(),
            });
            let alpha = HostTensor::from_f32([], &[self.options.alpha as f32]).ok()?;
            file.alphas.insert(format!("{module}.alpha"), alpha);
        }
        Some(file)
    }
}
