//! Fitting a LoRA file to a model: which weights each module changes.

use std::collections::{BTreeMap, HashMap};

use super::dialects;
use super::file::{LoraFile, Module, Replacement};
use super::merge::{Adapter, Added, Patched};
use super::mismatch::{LoraFamily, LoraMismatch, MisshapenModule, UnmatchedModule};
use super::{LoraError, LoraScale, LoraTarget, weight_name};
use crate::models::original::{Original, Transform};
use crate::models::unet::original::Blocks;
use crate::models::{DenoiserKind, Part};

impl LoraFile {
    /// Finds the weights of every module among `targets`: all weights of the model, each once. A module has several where
    /// the original code had one layer for them.
    ///
    /// Modules of a part whose scale is zero are left out, whether the model has that part or not.
    ///
    /// # Errors
    /// When a module matches no weight, several by one name, or one of another shape (all of them are listed), or a weight
    /// twice.
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
        let mut resolution = Resolution {
            targets,
            names: &names,
            scale,
            adapter: Adapter::default(),
            taken: HashMap::new(),
            mismatch: LoraMismatch {
                path,
                modules: 0,
                unmatched: Vec::new(),
                misshapen: Vec::new(),
                lora_family: self.family(),
                model_family: model_family(targets),
            },
        };
        let counts = |part: Option<Part>| part.is_none_or(|part| scale.of(part) != 0.0);
        for module in self.modules.iter().filter(|m| counts(m.part)) {
            resolution.place(module)?;
        }
        for replacement in self.replacements.iter().filter(|r| counts(r.part)) {
            resolution.replace(replacement);
        }
        let Resolution {
            mut adapter,
            mismatch,
            ..
        } = resolution;
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
        of_shape.or_else(|| LoraFamily::of_names(self.modules.iter().map(|m| m.name.as_str())))
    }
}

/// The weights of a file's modules, while they are found.
struct Resolution<'a> {
    targets: &'a [LoraTarget<'a>],
    names: &'a Names,
    scale: LoraScale,
    adapter: Adapter,
    /// The module of each target that has one.
    taken: HashMap<usize, String>,
    mismatch: LoraMismatch,
}

impl Resolution<'_> {
    /// Finds the weights of a module.
    fn place(&mut self, module: &Module) -> Result<(), LoraError> {
        self.mismatch.modules += 1;
        let (names, targets) = (self.names, self.targets);
        let found = names.find(module.part, &module.comparable);
        let fits = |place: &&Place| module.fits(place, targets);
        let fitting: Vec<&Place> = found.iter().copied().filter(fits).collect();
        match (found.as_slice(), fitting.as_slice()) {
            ([], _) => self.unmatched(&module.name, &module.down_dims, &module.up_dims),
            ([first, ..], []) => self.mismatch.misshapen.push(MisshapenModule {
                module: module.name.clone(),
                down: module.down_dims.clone(),
                up: module.up_dims.clone(),
                weight: first.weight(targets),
                expected: first.dims(targets),
            }),
            (_, &[place]) => self.patch(module, place)?,
            (_, several) => {
                return Err(LoraError::Ambiguous {
                    path: self.mismatch.path.clone(),
                    module: module.name.clone(),
                    weights: several.iter().map(|place| place.weight(targets)).collect(),
                });
            }
        }
        Ok(())
    }

    /// The updates of the weights of `place`, and of their biases.
    fn patch(&mut self, module: &Module, place: &Place) -> Result<(), LoraError> {
        let targets = self.targets;
        for (index, part) in place.parts(targets) {
            let target = &targets[index];
            let weight = weight_name(target.root, target.key);
            if let Some(first) = self.taken.insert(index, module.name.clone()) {
                return Err(LoraError::Duplicate {
                    path: self.mismatch.path.clone(),
                    weight,
                    first,
                    second: module.name.clone(),
                });
            }
            let root = dialects::part_of_root(target.root);
            let mut layer = module.factors.clone();
            layer.scale *= root.map_or(1.0, |part| f64::from(self.scale.of(part)));
            layer.of_up = part;
            if let Some(tensor) = &module.bias {
                match bias_of(targets, target) {
                    Some(bias) => {
                        let patched = Patched::of_bias(bias, Added::of(&layer, tensor));
                        let bias = weight_name(bias.root, bias.key);
                        self.adapter.patched.insert(bias, patched);
                    }
                    None => self.unmatched(tensor, &[], &module.up_dims[..1]),
                }
            }
            let patched = Patched::of_layer(target, layer);
            self.adapter.patched.insert(weight, patched);
        }
        Ok(())
    }

    /// Finds the weight that a tensor replaces.
    fn replace(&mut self, replacement: &Replacement) {
        self.mismatch.modules += 1;
        let (names, targets) = (self.names, self.targets);
        let found = names.find(replacement.part, &replacement.comparable);
        let target = match found.as_slice() {
            [place] => place.targets().next().map(|index| &targets[index]),
            _ => None,
        };
        match target {
            Some(target) if target.dims == replacement.dims => {
                let patched = Patched::whole(target, replacement.tensor.clone());
                let weight = weight_name(target.root, target.key);
                self.adapter.patched.insert(weight, patched);
            }
            Some(target) => self.mismatch.misshapen.push(MisshapenModule {
                module: replacement.tensor.clone(),
                down: Vec::new(),
                up: replacement.dims.clone(),
                weight: weight_name(target.root, target.key),
                expected: target.dims.to_vec(),
            }),
            None => self.unmatched(&replacement.tensor, &[], &replacement.dims),
        }
    }

    fn unmatched(&mut self, module: &str, down: &[usize], up: &[usize]) {
        self.mismatch.unmatched.push(UnmatchedModule {
            module: module.to_owned(),
            down: down.to_vec(),
            up: up.to_vec(),
        });
    }
}

impl Module {
    /// Whether the factors make an update of the weights of `place`.
    fn fits(&self, place: &Place, targets: &[LoraTarget<'_>]) -> bool {
        let dims = place.dims(targets);
        let same_columns = |index: &usize| targets[*index].dims.get(1..) == dims.get(1..);
        place.targets().all(|index| same_columns(&index)) && self.fits_one(&dims)
    }

    /// Whether the factors make an update of a weight with dimensions `[out, in]` or `[out, in, k, k]`. Those of a
    /// 1x1 convolution and of a linear layer may be written for each other.
    fn fits_one(&self, weight: &[usize]) -> bool {
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

/// The bias of the layer whose weight is `weight`.
fn bias_of<'a>(
    targets: &'a [LoraTarget<'a>],
    weight: &LoraTarget<'_>,
) -> Option<&'a LoraTarget<'a>> {
    let key = format!("{}.bias", weight.key.strip_suffix(".weight")?);
    let mut biases = targets.iter().filter(|t| t.root == weight.root);
    biases.find(|target| target.key == key)
}

/// What a module is for: targets by index, with the part of the module's rows that each has. The ranges of
/// [`Transform::Rows`] follow from the targets' dimensions.
#[derive(Clone, Debug, PartialEq)]
struct Place(Vec<(usize, Transform)>);

impl Place {
    fn targets(&self) -> impl Iterator<Item = usize> {
        self.0.iter().map(|(index, _)| *index)
    }

    /// The dimensions of the weight that the original code had.
    fn dims(&self, targets: &[LoraTarget<'_>]) -> Vec<usize> {
        let rows = self
            .targets()
            .map(|index| targets[index].dims.first().unwrap_or(&0));
        let rows = rows.sum();
        let first = self.targets().next().map(|index| targets[index].dims);
        let columns = first.and_then(|dims| dims.get(1..)).unwrap_or_default();
        [&[rows], columns].concat()
    }

    /// Names of the weights, for messages.
    fn weight(&self, targets: &[LoraTarget<'_>]) -> String {
        let names = self
            .targets()
            .map(|index| weight_name(targets[index].root, targets[index].key));
        names.collect::<Vec<_>>().join(" + ")
    }

    /// The targets, each with its part of the rows.
    fn parts(&self, targets: &[LoraTarget<'_>]) -> Vec<(usize, Transform)> {
        let mut first = 0;
        let of = |(index, part): &(usize, Transform)| {
            let rows = targets[*index].dims.first().copied().unwrap_or(0);
            let range = first..first + rows;
            first = range.end;
            let part = match part {
                Transform::Rows(_) => Transform::Rows(range),
                other => other.clone(),
            };
            (*index, part)
        };
        self.0.iter().map(of).collect()
    }
}

/// The names that the model's weights go by.
struct Names {
    parts: BTreeMap<Part, HashMap<String, Vec<Place>>>,
}

impl Names {
    fn of(targets: &[LoraTarget<'_>]) -> Names {
        let unet = targets.iter().filter(|t| t.root == Part::Unet.name());
        let blocks = Blocks::of(unet.map(|t| t.key));
        let mut parts: BTreeMap<Part, HashMap<String, Vec<Place>>> = BTreeMap::new();
        let mut transformer: HashMap<&str, usize> = HashMap::new();
        for (index, target) in targets.iter().enumerate() {
            let (Some(part), Some(path)) = (
                dialects::part_of_root(target.root),
                target.key.strip_suffix(".weight"),
            ) else {
                continue;
            };
            if part == Part::Transformer {
                transformer.insert(path, index);
            }
            let names = parts.entry(part).or_default();
            for alias in dialects::aliases(part, path, &blocks) {
                let place = Place(vec![(index, Transform::Identity)]);
                names.entry(alias).or_default().push(place);
            }
        }
        let mut names = Names { parts };
        let paths: Vec<&str> = transformer.keys().copied().collect();
        if let Some(kind) = DenoiserKind::of_transformer(&paths) {
            names.add_original(&kind.original_layers(&paths), &transformer);
        }
        names
    }

    /// The names of a transformer's original code.
    fn add_original(&mut self, layers: &[Original], targets: &HashMap<&str, usize>) {
        let names = self.parts.entry(Part::Transformer).or_default();
        for layer in layers {
            let index = |path: &str| targets.get(path).copied();
            let parts = layer.parts.iter();
            let parts = parts.map(|(path, part)| Some((index(path)?, part.clone())));
            // Absent: a second attention, or the guidance of a model that goes without.
            if let Some(parts) = parts.collect::<Option<Vec<_>>>() {
                let places = names.entry(dialects::comparable(&layer.name)).or_default();
                places.push(Place(parts));
            }
        }
    }

    /// The places that a layer may be for, which is called `comparable` below the part that it names.
    fn find(&self, part: Option<Part>, comparable: &str) -> Vec<&Place> {
        let named = part.map(|named| match self.parts.contains_key(&named) {
            true => named,
            false => dialects::stands_for(named).unwrap_or(named),
        });
        let mut found: Vec<&Place> = self
            .parts
            .iter()
            .filter(|(part, _)| named.is_none_or(|named| named == **part))
            .filter_map(|(_, names)| names.get(comparable))
            .flatten()
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
    let of_root = |part: Part| targets.iter().filter(move |t| t.root == part.name());
    let text = of_root(Part::Unet).find(|t| t.key.ends_with(".attn2.to_k.weight"));
    let of_unet = text.and_then(|t| LoraFamily::of_text_features(*t.dims.get(1)?));
    of_unet.or_else(|| {
        let paths = of_root(Part::Transformer).filter_map(|t| t.key.strip_suffix(".weight"));
        let kind = DenoiserKind::of_transformer(&paths.collect::<Vec<_>>())?;
        Some(LoraFamily::Transformer(kind))
    })
}
