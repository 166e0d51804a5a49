//! Low-rank updates as what is trained: which weights have one, and the names of their factors in files.

use std::collections::{BTreeMap, BTreeSet};

use regex::Regex;
use serde_json::json;

use crate::graph::Graph;
use crate::host_tensor::HostTensor;
use crate::models::unet::ROOT as UNET;
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
}

/// Why low-rank updates cannot be put beside a model's layers.
#[derive(Debug, thiserror::Error)]
pub enum LoraTargetError {
    #[error("lora_target_modules: '{pattern}': {source}")]
    Pattern {
        pattern: String,
        source: Box<regex::Error>,
    },
    #[error(
        "lora_target_modules: '{pattern}' matches no linear layer and no convolution of the UNet; paths look like {}",
        listed(examples, 3)
    )]
    Unmatched {
        pattern: String,
        examples: Vec<String>,
    },
    #[error(
        "lora_rank={rank}: {layer} {shape} has rank {largest} at most; give a smaller rank, or leave the layer out of \
         lora_target_modules"
    )]
    Rank {
        rank: usize,
        layer: String,
        shape: Shape,
        largest: usize,
    },
}

/// The default of PEFT's trainers for diffusers' UNets: the projections of all attentions.
pub const ATTENTION_PROJECTIONS: [&str; 4] = ["to_k", "to_q", "to_v", "to_out.0"];

impl LoraOptions {
    /// The factor of each update.
    pub fn scale(&self) -> f64 {
        self.alpha / self.rank as f64
    }

    /// The ranks of the denoiser's weights that have an update, by their names in `graph`.
    ///
    /// # Errors
    /// When a pattern is no regular expression or matches nothing, or a layer is smaller than the rank.
    pub fn ranks(&self, graph: &Graph) -> Result<LoraRanks, LoraTargetError> {
        let weights = adaptable(graph);
        let layers: Vec<(&str, &str, &Shape)> = weights
            .into_iter()
            .filter_map(|(name, shape)| Some((name, layer(name)?, shape)))
            .collect();
        let mut ranks = LoraRanks::new();
        for pattern in &self.target_modules {
            let regex = Regex::new(&format!("^(?:.*\\.)?(?:{pattern})$")).map_err(|source| {
                LoraTargetError::Pattern {
                    pattern: pattern.clone(),
                    source: Box::new(source),
                }
            })?;
            let mut targets = layers
                .iter()
                .filter(|(_, path, _)| regex.is_match(path))
                .peekable();
            if targets.peek().is_none() {
                let paths = layers.iter().map(|(_, path, _)| (*path).to_owned());
                return Err(LoraTargetError::Unmatched {
                    pattern: pattern.clone(),
                    examples: paths.collect(),
                });
            }
            for (name, path, shape) in targets {
                let inputs = shape.dims[1..].iter().product::<usize>();
                let largest = shape.dims[0].min(inputs);
                if self.rank > largest {
                    return Err(LoraTargetError::Rank {
                        rank: self.rank,
                        layer: (*path).to_owned(),
                        shape: (*shape).clone(),
                        largest,
                    });
                }
                ranks.insert((*name).to_owned(), self.rank);
            }
        }
        Ok(ranks)
    }
}

/// The path below the denoiser's root of the layer whose weight is called `name`.
fn layer(name: &str) -> Option<&str> {
    let key = name.strip_prefix(UNET)?.strip_prefix('/')?;
    key.strip_suffix(".weight")
}

/// The ends of the names of an update's factors: here and in kohya's files, and in PEFT's.
const DOWN: [&str; 2] = [".lora_down.weight", ".lora_A.weight"];
const UP: [&str; 2] = [".lora_up.weight", ".lora_B.weight"];

/// Whether a weight is a factor of an update.
pub fn is_factor(name: &str) -> bool {
    [DOWN, UP].iter().any(|[own, _]| name.ends_with(own))
}

/// The name of a factor of the denoiser in PEFT's files; `None` for other weights.
pub fn file_place(weight: &str) -> Option<String> {
    let key = weight.strip_prefix(UNET)?.strip_prefix('/')?;
    let renamed = |[own, peft]: [&str; 2]| {
        let layer = key.strip_suffix(own)?;
        Some(format!("{UNET}.{layer}{peft}"))
    };
    renamed(DOWN).or_else(|| renamed(UP))
}

/// The ranks of the updates of `graph`, by the names of the weights that they stand beside.
pub fn ranks_of(graph: &Graph) -> LoraRanks {
    let downs = graph.weights().filter_map(|(_, input)| {
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
        let layers: BTreeSet<&str> = names
            .filter_map(|name| {
                name.strip_suffix(DOWN[1])?
                    .strip_prefix(UNET)?
                    .strip_prefix('.')
            })
            .collect();
        let config = json!({
            "unet.peft_type": "LORA",
            "unet.r": self.options.rank,
            "unet.lora_alpha": self.options.alpha,
            "unet.target_modules": layers,
            "unet.bias": "none",
            "unet.lora_dropout": 0.0,
            "unet.init_lora_weights": true,
            "unet.use_dora": false,
            "unet.use_rslora": false,
            "unet.rank_pattern": {},
            "unet.alpha_pattern": {},
        });
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
            let layer = module.strip_prefix(UNET)?.strip_prefix('.')?;
            let module = names.module(layer);
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
