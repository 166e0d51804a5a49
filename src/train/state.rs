//! The state of training: weights, optimizer and counters, on the devices and in checkpoints.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::Value as Json;

use crate::graph::{Graph, Input, InputKind};
use crate::host_tensor::HostTensor;
use crate::runtime::{Array, Program, Session};
use crate::weights::TensorSpec;

use super::checkpoint::{
    CheckpointError, CheckpointFile, CheckpointWriter, Content, SavedCheckpoint, TrainState,
};
use super::error::TrainError;
use super::optimizer::{EMA, FIRST_MOMENT, SECOND_MOMENT, UPDATES};
use super::schedule::LearningRate;

/// The counter of a checkpoint that holds the length of the learning-rate schedule.
pub const SCHEDULE_STEPS: &str = "learning_rate_schedule_steps";

/// The model's folder in a checkpoint that holds the moving average.
pub const EMA_SUFFIX: &str = "_ema";

/// The settings of the loop, beside programs and data.
pub struct RunOptions {
    pub max_train_steps: u64,
    pub learning_rate: LearningRate,
    pub seed: u64,
    /// Side of the blocks of pixels that are one position of the model's sample.
    pub pixel_unshuffle: usize,
    /// Steps between checkpoints; `None` saves at the end only.
    pub checkpoint_every: Option<u64>,
    /// Newest checkpoints of this run that are kept; `None` keeps all.
    pub checkpoints_total_limit: Option<usize>,
    pub max_nonfinite_steps: u64,
    /// The configuration values that decide what is computed; a run continues only with the same ones.
    pub config: BTreeMap<String, Json>,
    pub quantization: Json,
    /// Files that go into every checkpoint as they are, by path.
    pub files: Vec<(String, Vec<u8>)>,
    /// For each model root (`unet`), the path of its weights file in a checkpoint, without and with the prefix of the
    /// moving average, e.g. `unet/diffusion_pytorch_model.safetensors`.
    pub weight_files: Vec<(String, String)>,
}

/// The state of training on the devices.
pub struct TrainingState {
    /// In the order of the program's inputs; `None` where an input is data.
    pub(super) arrays: Vec<Option<Array>>,
    pub(super) inputs: Vec<Input>,
    pub(super) step: u64,
    pub(super) skipped: u64,
    /// The newest checkpoint of this state's run, and its step.
    pub(super) saved: Option<(u64, PathBuf)>,
}

impl TrainingState {
    /// New weights from `seed`, and an empty optimizer.
    ///
    /// # Errors
    /// When a transfer fails.
    pub fn new(
        session: &Session,
        graph: &Graph,
        program: &Program,
        seed: u64,
    ) -> Result<TrainingState, TrainError> {
        let mut weights: BTreeMap<String, HostTensor> = BTreeMap::new();
        for input in &graph.inputs {
            if let InputKind::Weight(init) = input.kind {
                let values = init.sample(seed, &input.name, input.shape.count());
                let value = HostTensor::from_f32(input.shape.dims.clone(), &values)?
                    .convert(input.shape.dtype)?;
                weights.insert(input.name.clone(), value);
            }
        }
        let mut arrays = Vec::with_capacity(graph.inputs.len());
        for (input, slot) in graph.inputs.iter().zip(program.inputs()) {
            let value = match input.kind {
                InputKind::Data => None,
                InputKind::Weight(_) => weights.get(&input.name).cloned(),
                InputKind::State => Some(match input.name.strip_prefix(EMA) {
                    Some(weight) => weights
                        .get(weight)
                        .ok_or_else(|| TrainError::UnknownInput(input.name.clone()))?
                        .convert(input.shape.dtype)?,
                    None => HostTensor::zeros(input.shape.clone()),
                }),
            };
            arrays.push(match value {
                None => None,
                Some(tensor) => Some(session.put(&tensor, &slot.spec)?),
            });
        }
        Ok(TrainingState {
            arrays,
            inputs: graph.inputs.clone(),
            step: 0,
            skipped: 0,
            saved: None,
        })
    }

    /// The state of a saved checkpoint, whose files were checked when it was opened.
    ///
    /// # Errors
    /// When the checkpoint lacks a tensor of the program or has it in another shape.
    pub fn resume(
        session: &Session,
        graph: &Graph,
        program: &Program,
        saved: &SavedCheckpoint,
        options: &RunOptions,
    ) -> Result<TrainingState, TrainError> {
        let mut open = BTreeMap::new();
        let mut arrays = Vec::with_capacity(graph.inputs.len());
        for (input, slot) in graph.inputs.iter().zip(program.inputs()) {
            if input.kind == InputKind::Data {
                arrays.push(None);
                continue;
            }
            let (file, name) = place(options, &input.name);
            if !open.contains_key(&file) {
                open.insert(file.clone(), saved.tensors(&file)?);
            }
            let tensor = open[&file].read(&name).map_err(CheckpointError::from)?;
            if tensor.shape != input.shape {
                return Err(TrainError::Resume {
                    path: saved.dir().to_owned(),
                    name: input.name.clone(),
                    expected: input.shape.clone(),
                    found: tensor.shape.to_string(),
                });
            }
            arrays.push(Some(session.put(&tensor, &slot.spec)?));
        }
        Ok(TrainingState {
            arrays,
            inputs: graph.inputs.clone(),
            step: saved.state().step,
            skipped: saved.state().counters.get("skipped").copied().unwrap_or(0),
            saved: Some((saved.state().step, saved.dir().to_owned())),
        })
    }

    /// Whether no array was given to a step that failed.
    pub(super) fn is_whole(&self) -> bool {
        let mut parts = self.inputs.iter().zip(&self.arrays);
        parts.all(|(input, array)| input.kind == InputKind::Data || array.is_some())
    }

    pub(super) fn weight(&self, name: &str) -> Option<&Array> {
        let averaged = format!("{EMA}{name}");
        let find = |wanted: &str| {
            let index = self.inputs.iter().position(|i| i.name == wanted)?;
            self.arrays[index].as_ref()
        };
        find(&averaged).or_else(|| find(name))
    }
}

/// The checkpoint file of an input, and its name there.
fn place(options: &RunOptions, input: &str) -> (String, String) {
    if input == UPDATES || input.starts_with(FIRST_MOMENT) || input.starts_with(SECOND_MOMENT) {
        return ("optimizer.safetensors".to_string(), input.to_string());
    }
    let (suffix, weight) = match input.strip_prefix(EMA) {
        Some(weight) => (EMA_SUFFIX, weight),
        None => ("", input),
    };
    let (root, key) = weight.split_once('/').unwrap_or(("model", weight));
    let file = options
        .weight_files
        .iter()
        .find(|(r, _)| r == root)
        .map_or("model.safetensors", |(_, file)| file);
    (format!("{root}{suffix}/{file}"), key.to_string())
}

/// Writes a checkpoint of `state`, and gives its folder.
///
/// # Errors
/// When an array cannot be read from the devices, or the files cannot be written.
pub(super) fn save(
    session: &Session,
    state: &TrainingState,
    options: &RunOptions,
    writer: &mut CheckpointWriter,
) -> Result<PathBuf, TrainError> {
    let mut files: Vec<CheckpointFile<'_>> = options
        .files
        .iter()
        .map(|(path, bytes)| CheckpointFile {
            path: path.clone(),
            content: Content::Bytes(Cow::Borrowed(bytes)),
        })
        .collect();
    let mut groups: BTreeMap<String, Vec<(TensorSpec, usize)>> = BTreeMap::new();
    for (index, input) in state.inputs.iter().enumerate() {
        if input.kind != InputKind::Data {
            let (file, name) = place(options, &input.name);
            let spec = TensorSpec {
                name,
                shape: input.shape.clone(),
            };
            groups.entry(file).or_default().push((spec, index));
        }
    }
    for (path, tensors) in groups {
        let index: BTreeMap<String, usize> = tensors
            .iter()
            .map(|(spec, index)| (spec.name.clone(), *index))
            .collect();
        let specs = tensors.into_iter().map(|(spec, _)| spec).collect();
        files.push(CheckpointFile {
            path,
            content: Content::Tensors {
                specs,
                metadata: BTreeMap::from([("format".to_string(), "pt".to_string())]),
                fetch: Box::new(move |spec| {
                    let array = state.arrays[index[&spec.name]]
                        .as_ref()
                        .ok_or("the array was given away")?;
                    Ok(Cow::Owned(array.to_host(session.mesh())?.data))
                }),
            },
        });
    }
    let mut record = TrainState::new(state.step, options.config.clone());
    record.seeds.insert("seed".to_string(), options.seed);
    record.data = serde_json::json!({ "step": state.step });
    record.quantization = options.quantization.clone();
    record.counters.insert("skipped".to_string(), state.skipped);
    record.counters.insert(
        SCHEDULE_STEPS.to_string(),
        options.learning_rate.total_steps,
    );
    Ok(writer.save(&record, files)?)
}
