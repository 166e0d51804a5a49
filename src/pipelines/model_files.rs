//! The files of a model's weights.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::dtype::DType;
use crate::graph::{Graph, TensorFormat, stacked};
use crate::host_tensor::HostTensor;
use crate::models::vae::{PREVIEW_ROOT, ROOT as VAE};
use crate::models::{Part, ip_adapter};
use crate::quant::StoredFormats;
use crate::runtime::{Session, Slot};
use crate::weights::lora::{Adapter, LoraRanks};
use crate::weights::source::ModelSource;
use crate::weights::{Checkpoint, MismatchError, cast, match_parameters};

use super::PipelineError;
use super::textual_inversion::EmbeddingRows;
use super::traced::TracedModel;
use super::weights::TakeWeight;

/// The parts of a VAE: encoder and decoder.
const VAE_PARTS: [&str; 4] = ["encoder.", "quant_conv.", "decoder.", "post_quant_conv."];

/// Keys and dimensions of the weights that a program has of one part of a model.
pub(super) type Expected<'a> = Vec<(&'a str, &'a [usize])>;

/// The files of a model's weights, by the root of their paths.
pub struct ModelFiles {
    source: Box<ModelSource>,
    /// The file or folder of each root beside the origin's: of ControlNets, of an IP-Adapter.
    beside: Vec<(String, PathBuf)>,
    /// Files that are not the origin's own.
    opened: HashMap<String, Checkpoint>,
}

/// Changes of weights on their way to the devices.
#[derive(Clone, Copy, Default)]
pub(super) struct WeightChanges<'a> {
    /// LoRAs to merge, or to put beside weights that are stored as codes.
    pub adapter: Option<&'a Adapter>,
    /// Vectors of textual inversions.
    pub rows: &'a [EmbeddingRows],
}

impl WeightChanges<'_> {
    /// Whether a weight is a factor of a LoRA beside another.
    fn is_factor(&self, slot: &Slot) -> bool {
        let (root, key) = root_and_key(&slot.name);
        self.adapter
            .is_some_and(|adapter| adapter.has_factor(root, key))
    }

    fn factor(&self, slot: &Slot) -> Result<HostTensor, PipelineError> {
        let (root, key) = root_and_key(&slot.name);
        let factor = self.adapter.map(|adapter| adapter.factor(root, key));
        let factor = factor.transpose()?.flatten();
        let factor = factor.ok_or_else(|| PipelineError::UnknownPart(slot.name.clone()))?;
        Ok(cast(factor, slot.shape.dtype)?)
    }

    fn apply(&self, root: &str, key: &str, tensor: &mut HostTensor) -> Result<(), PipelineError> {
        if let Some(adapter) = self.adapter {
            let data = std::mem::take(&mut tensor.data);
            let given = HostTensor::new(tensor.shape.clone(), data)?;
            *tensor = adapter.apply(root, key, given)?;
        }
        for rows in self.rows {
            rows.apply(root, key, tensor)?;
        }
        Ok(())
    }
}

impl ModelFiles {
    /// The files of a model, and beside them a file or folder for the weights under each of other roots:
    /// those of ControlNets, or of an IP-Adapter.
    pub fn source(source: Box<ModelSource>, beside: Vec<(String, PathBuf)>) -> Self {
        ModelFiles {
            source,
            beside,
            opened: HashMap::new(),
        }
    }

    /// The same with the autoencoder that decodes previews.
    pub fn with_preview_vae(mut self, checkpoint: Checkpoint) -> Self {
        self.opened.insert(PREVIEW_ROOT.to_owned(), checkpoint);
        self
    }

    /// The path for messages.
    pub fn path(&self) -> &Path {
        &self.source.path
    }

    /// Opens the files of every program's weights, and checks them against what the programs declare.
    ///
    /// # Errors
    /// When a part is missing, or its tensors are not those of the program.
    pub(super) fn open(&mut self, traced: &TracedModel) -> Result<(), PipelineError> {
        self.open_all(traced.graphs(), traced.denoiser, &traced.stored_formats())
    }

    /// As [`TracedModel`]s are opened, for any programs: each those of one part of the model, the denoiser with weights
    /// stored in the formats `stored`.
    ///
    /// # Errors
    /// When a part is missing, or its tensors are not those of the program.
    pub fn open_all<'g>(
        &mut self,
        graphs: impl IntoIterator<Item = &'g Graph>,
        denoiser: Part,
        stored: &StoredFormats,
    ) -> Result<(), PipelineError> {
        let mut parts: Vec<(&str, Expected<'_>)> = Vec::new();
        for graph in graphs {
            let first = parts.len();
            for (_, weight) in graph.weights() {
                let (root, key) = root_and_key(&weight.name);
                let entry = (key, weight.shape.dims.as_slice());
                match parts[first..].iter_mut().find(|(known, _)| *known == root) {
                    Some((_, expected)) => expected.push(entry),
                    None => parts.push((root, vec![entry])),
                }
            }
        }
        for (root, expected) in parts {
            if let Some(file) = self.own_file(root) {
                self.opened
                    .insert(root.to_string(), Checkpoint::open(&file)?);
            }
            check(root, &expected, self.get(root)?)?;
        }
        check_stored(self.get(denoiser.name())?, stored)
    }

    /// The updates of weights that are stored as codes, by the weights' names.
    pub(super) fn stored(&self, adapter: &Adapter) -> Result<LoraRanks, PipelineError> {
        let mut stored = LoraRanks::new();
        for (weight, rank) in adapter.ranks() {
            let (root, key) = root_and_key(&weight);
            let quantization = self.get(root)?.quantization();
            if quantization.and_then(|q| q.format_of(key)).is_some() {
                stored.insert(weight, rank);
            }
        }
        Ok(stored)
    }

    /// The file or folder to open for the weights under `root`; `None` where the source has opened it already.
    fn own_file(&self, root: &str) -> Option<PathBuf> {
        let mut beside = self.beside.iter();
        let (_, path) = beside.find(|(own, _)| own == root)?;
        Some(path.clone())
    }

    /// The published model that the files are of; `None` for those that training on pixels writes.
    pub fn published(&self) -> Option<&ModelSource> {
        Some(&*self.source).filter(|source| source.family.spec().published.is_some())
    }

    /// The checkpoint with the weights under `root`.
    ///
    /// # Errors
    /// When there is no such part.
    pub fn get(&self, root: &str) -> Result<&Checkpoint, PipelineError> {
        if let Some(checkpoint) = self.opened.get(root) {
            return Ok(checkpoint);
        }
        let unknown = || PipelineError::UnknownPart(root.to_string());
        let part = Part::from_name(root).ok_or_else(unknown)?;
        Ok(&self.source.component(part)?.checkpoint)
    }

    /// The programs for weights as the files have them, but for those that LoRAs are merged into.
    ///
    /// # Errors
    /// None for programs that were traced.
    pub(super) fn as_stored(
        &self,
        traced: TracedModel,
        adapter: Option<&Adapter>,
    ) -> Result<TracedModel, PipelineError> {
        let stored = |name: &str| {
            let (root, key) = root_and_key(name);
            let is_changed = adapter.is_some_and(|adapter| adapter.changes(root, key));
            let shape = self.get(root).ok()?.info(key).filter(|_| !is_changed);
            shape.map(|shape| shape.dtype)
        };
        Ok(traced.with_stored_weights(&stored)?)
    }

    /// Reads the weights `slots`, as the files have them, and gives their arrays to `take`.
    ///
    /// # Errors
    /// When a weight is missing, cannot be read or put on the devices; errors of `take`.
    pub fn read_unchanged(
        &self,
        session: &Session,
        slots: &[Slot],
        take: &mut TakeWeight<'_>,
    ) -> Result<(), PipelineError> {
        self.read(session, WeightChanges::default(), slots, take)
    }

    /// Reads the weights `slots` while those before them are put on the devices, applies `changes`, and gives their
    /// arrays to `take`: of weights that are one input ([`stacked`]) one array.
    ///
    /// # Errors
    /// When a weight is missing, cannot be read or put on the devices; errors of `take`.
    pub(super) fn read(
        &self,
        session: &Session,
        changes: WeightChanges<'_>,
        slots: &[Slot],
        take: &mut TakeWeight<'_>,
    ) -> Result<(), PipelineError> {
        fn root(slot: &Slot) -> &str {
            root_and_key(&slot.name).0
        }
        let is_factor = |slot: &Slot| changes.is_factor(slot);
        let together = |a: &Slot, b: &Slot| root(a) == root(b) && is_factor(a) == is_factor(b);
        for slots in slots.chunk_by(together) {
            let root = root(&slots[0]);
            if is_factor(&slots[0]) {
                for slot in slots {
                    take(session.put(&changes.factor(slot)?, &slot.spec)?)?;
                }
                continue;
            }
            let keys = |slot: &Slot| {
                let names = stacked::entries(&slot.name).into_iter();
                let dtype = slot.shape.dtype;
                names.map(move |name| (root_and_key(&name).1.to_owned(), dtype))
            };
            let wanted: Vec<(String, DType)> = slots.iter().flat_map(keys).collect();
            // As many tensors come as are asked for, in their order.
            let mut slots = slots.iter();
            let mut stack: Option<(&Slot, Vec<u8>)> = None;
            self.get(root)?.read_all_with(&wanted, |key, tensor| {
                changes.apply(root, key, tensor)?;
                let (slot, mut data) = match stack.take() {
                    Some(begun) => begun,
                    None => match slots.next() {
                        Some(slot) if stacked::is_stacked(&slot.name) => (slot, Vec::new()),
                        Some(slot) => return take(session.put(tensor, &slot.spec)?),
                        None => return Ok(()),
                    },
                };
                data.extend_from_slice(&tensor.data);
                if data.len() < slot.shape.bytes() {
                    stack = Some((slot, data));
                    return Ok(());
                }
                let whole = HostTensor::new(slot.shape.clone(), data)?;
                take(session.put(&whole, &slot.spec)?)
            })?;
        }
        Ok(())
    }
}

/// Checks that a program takes the quantized weights of a checkpoint as they are stored there.
pub(super) fn check_stored(
    checkpoint: &Checkpoint,
    formats: &StoredFormats,
) -> Result<(), PipelineError> {
    let none = StoredFormats::new();
    let stored = checkpoint.quantization().map_or(&none, |q| &q.layers);
    // A program may take other activations than the checkpoint asks for.
    fn weights(layers: &StoredFormats) -> impl Iterator<Item = (&str, TensorFormat)> {
        layers
            .iter()
            .map(|(path, layer)| (path.as_str(), layer.weight))
    }
    match weights(stored).eq(weights(formats)) {
        true => Ok(()),
        false => Err(PipelineError::Stored {
            path: checkpoint.path().to_owned(),
            stored: stored.len(),
            expected: formats.len(),
        }),
    }
}

/// Compares a part's tensors with what a program declares of it.
pub(super) fn check(
    root: &str,
    expected: &Expected<'_>,
    checkpoint: &Checkpoint,
) -> Result<(), PipelineError> {
    let Err(mut error) = match_parameters(expected, checkpoint) else {
        return Ok(());
    };
    // Generating uses a half of the VAE, or both.
    if [VAE, PREVIEW_ROOT].contains(&root) {
        let has = |part: &str| expected.iter().any(|(key, _)| key.starts_with(part));
        let unused: Vec<&str> = VAE_PARTS.into_iter().filter(|part| !has(part)).collect();
        let is_unused = |name: &str| unused.iter().any(|part| name.starts_with(part));
        error.extra.retain(|(name, _)| !is_unused(name));
    }
    match root {
        // What an adapter does not use of its image encoder.
        ip_adapter::IMAGE_ENCODER => error.extra.clear(),
        // Its projection belongs to one program, its layers to another.
        ip_adapter::ROOT => {
            let part = |key: &str| key.split('.').next().map(str::to_owned);
            let own = |name: &str| expected.iter().any(|(key, _)| part(key) == part(name));
            error.extra.retain(|(name, _)| own(name));
        }
        _ => {}
    }
    let MismatchError {
        missing,
        extra,
        misshapen,
        not_float,
        ..
    } = &error;
    match missing.is_empty() && misshapen.is_empty() && extra.is_empty() && not_float.is_empty() {
        true => Ok(()),
        false => Err(PipelineError::Mismatch(Box::new(error))),
    }
}

/// A weight's part of the model and its key there.
fn root_and_key(name: &str) -> (&str, &str) {
    name.split_once('/').unwrap_or(("", name))
}
