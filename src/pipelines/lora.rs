//! LoRAs for the weights of a pipeline.

use std::path::PathBuf;

use crate::models::Family;
use crate::models::vae::{PREVIEW_ROOT, ROOT as VAE};
use crate::weights::lora::{Adapter, LoraFile, LoraScale, LoraTarget};

use super::PipelineError;
use super::observer::{Event, Observer};
use super::traced::TracedModel;

/// A LoRA to use.
#[derive(Clone, Debug)]
pub struct LoraChoice {
    /// A file, or a folder with one.
    pub path: PathBuf,
    /// Its name in messages.
    pub name: String,
    pub scale: f32,
}

/// All LoRAs together, for the weights of `traced`, a model of `family`; `None` if there are none. A LoRA that was trained
/// on another family with the same tensors is warned of.
///
/// # Errors
/// When a file cannot be read, or a module of it is not one of the model's.
pub(super) fn adapter(
    loras: &[LoraChoice],
    traced: &TracedModel,
    family: Family,
    observer: &mut Observer<'_>,
) -> Result<Option<Adapter>, PipelineError> {
    if loras.is_empty() {
        return Ok(None);
    }
    let mut targets = Vec::new();
    for graph in traced.graphs() {
        for (_, input) in graph.weights() {
            let (root, key) = input.name.split_once('/').unwrap_or(("", &input.name));
            if ![VAE, PREVIEW_ROOT].contains(&root) {
                targets.push(LoraTarget {
                    root,
                    key,
                    dims: &input.shape.dims,
                });
            }
        }
    }
    let mut adapters = Vec::with_capacity(loras.len());
    for lora in loras {
        let file = LoraFile::open(&lora.path)?;
        let trained_on = file.trained_on();
        let adapter = file.resolve(&targets, LoraScale::from(lora.scale))?;
        if let Some(other) = trained_on.filter(|other| *other != family) {
            let warning = format!(
                "{}: was trained on {}; {} has the same tensors, but other values in them",
                lora.name,
                other.title(),
                family.title()
            );
            observer(Event::Warning(&warning)).map_err(PipelineError::Observer)?;
        }
        observer(Event::Lora {
            name: &lora.name,
            weights: adapter.ranks().len(),
            scale: lora.scale,
        })
        .map_err(PipelineError::Observer)?;
        adapters.push(adapter);
    }
    Ok(Some(Adapter::stack(adapters)?))
}
