//! Fitting a LoRA file to a model: which weight each module changes.

use std::collections::{BTreeMap, HashMap};

use super::dialects;
use super::file::{LoraFile, Module};
use super::merge::{Adapter, Patched};
use super::mismatch::{LoraFamily, LoraMismatch, MisshapenModule, UnmatchedModule};
use super::{LoraError, LoraScale, LoraTarget, weight_name};
use crate::models::Part;
use crate::models::unet::original::Blocks;

impl LoraFile {
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

    /// The family that the file seems to be for.
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
