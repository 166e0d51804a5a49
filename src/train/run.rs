//! The training loop: batches in, metrics and checkpoints out.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::Value as Json;

use crate::data::{Batch, Batcher, DataError, Prefetcher};
use crate::dtype::DType;
use crate::graph::{Graph, Input, InputKind, flops};
use crate::host_tensor::{HostTensor, HostTensorError};
use crate::metrics::{self, MetricsError, MetricsWriter, Progress, StepReport};
use crate::pipelines::pixels::to_samples;
use crate::quant::ROUNDING_KEY;
use crate::runtime::{Array, Program, RuntimeError, Session, Value};
use crate::shape::Shape;
use crate::weights::TensorSpec;

use super::checkpoint::{
    CheckpointError, CheckpointFile, CheckpointWriter, Content, SavedCheckpoint, TrainState,
};
use super::optimizer::{EMA, FIRST_MOMENT, SECOND_MOMENT, UPDATES};
use super::schedule::LearningRate;
use super::step::names;

/// Why training ended without its result.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    #[error(transparent)]
    HostTensor(#[from] HostTensorError),
    #[error("the checkpoint {path}: {name}: expected {expected}, found {found}")]
    Resume {
        path: PathBuf,
        name: String,
        expected: Shape,
        found: String,
    },
    #[error(
        "loss or gradient was not finite in {count} steps in a row, the last being {step}; the weights are as before \
         them and saved in {}; lower learning_rate, or clip gradients with opt_enable_grad_global_norm_clipping=True",
        checkpoint.display()
    )]
    NotFinite {
        step: u64,
        count: u64,
        checkpoint: PathBuf,
    },
    #[error("the training program has no value for its input {0}")]
    UnknownInput(String),
    #[error("the training program has a result {0} that the loop does not know")]
    UnknownOutput(String),
    #[error("sample images: {0}")]
    Samples(Box<dyn std::error::Error + Send + Sync>),
    #[error("{cause}; what was trained so far is saved in {}", checkpoint.display())]
    Ended {
        #[source]
        cause: Box<TrainError>,
        checkpoint: PathBuf,
    },
}

/// What the loop is told, beside programs and data.
pub struct RunOptions {
    pub max_train_steps: u64,
    pub learning_rate: LearningRate,
    pub seed: u64,
    /// Side of the blocks of pixels that are one place of the model's sample.
    pub pixel_unshuffle: usize,
    pub log_period: u64,
    /// Steps between checkpoints; `None` saves at the end only.
    pub checkpoint_every: Option<u64>,
    /// Newest checkpoints of this run that are kept; `None` keeps all.
    pub checkpoints_total_limit: Option<usize>,
    /// Steps between sample images.
    pub sample_every: Option<u64>,
    pub max_nonfinite_steps: u64,
    /// Whether steps are told to the metrics only.
    pub quiet: bool,
    /// The configuration values that decide what is computed; a run continues only with the same ones.
    pub config: BTreeMap<String, Json>,
    pub quantization: Json,
    /// Files that go into every checkpoint as they are, by path.
    pub files: Vec<(String, Vec<u8>)>,
    /// For each model root (`unet`), the path of its weights file in a checkpoint, without and with the prefix of the
    /// moving average, e.g. `unet/diffusion_pytorch_model.safetensors`.
    pub weight_files: Vec<(String, String)>,
}

/// How a run ended, errors apart.
#[derive(Debug)]
pub enum Outcome {
    Done {
        checkpoint: PathBuf,
    },
    /// A signal asked to stop; the state is saved.
    Stopped {
        checkpoint: PathBuf,
        step: u64,
    },
}

/// Gives the array of a weight, or of its moving average if there is one.
pub type Weights<'a> = &'a dyn Fn(&str) -> Option<&'a Array>;

/// Makes sample images of the weights at a step and returns them as one PNG file's bytes.
pub type Sampler<'a> =
    dyn FnMut(u64, Weights<'_>) -> Result<Vec<u8>, Box<dyn std::error::Error + Send + Sync>> + 'a;

/// The counter of a checkpoint that holds the length of the learning-rate schedule.
pub const SCHEDULE_STEPS: &str = "learning_rate_schedule_steps";

/// The file of the UNet's weights in its folder, and that of the text encoder's.
pub const UNET_FILE: &str = "diffusion_pytorch_model.safetensors";
pub const TEXT_ENCODER_FILE: &str = "model.safetensors";

/// The model's folder in a checkpoint that holds the moving average.
pub const EMA_SUFFIX: &str = "_ema";

/// The state of training on the devices.
pub struct TrainingState {
    /// In the order of the program's inputs; `None` where an input is data.
    arrays: Vec<Option<Array>>,
    inputs: Vec<Input>,
    step: u64,
    skipped: u64,
    /// The newest checkpoint of this state's run, and its step.
    saved: Option<(u64, PathBuf)>,
}

impl TrainingState {
    /// New weights from `seed`, or from `initial` where that has a weight's name, and an empty optimizer.
    ///
    /// # Errors
    /// When a transfer fails.
    pub fn new(
        session: &Session,
        graph: &Graph,
        program: &Program,
        seed: u64,
        initial: &mut dyn FnMut(&str) -> Option<HostTensor>,
    ) -> Result<TrainingState, TrainError> {
        let mut weights: BTreeMap<String, HostTensor> = BTreeMap::new();
        for input in &graph.inputs {
            if let InputKind::Weight(init) = input.kind {
                let value = match initial(&input.name) {
                    Some(tensor) => tensor.convert(input.shape.dtype)?,
                    None => {
                        let values = init.sample(seed, &input.name, input.shape.count());
                        HostTensor::from_f32(input.shape.dims.clone(), &values)?
                            .convert(input.shape.dtype)?
                    }
                };
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

    /// Completed steps.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Whether no array was given to a step that failed.
    fn is_whole(&self) -> bool {
        let mut parts = self.inputs.iter().zip(&self.arrays);
        parts.all(|(input, array)| input.kind == InputKind::Data || array.is_some())
    }

    fn weight(&self, name: &str) -> Option<&Array> {
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

/// Where a run writes.
pub struct Sinks<'a> {
    pub checkpoints: &'a mut CheckpointWriter,
    pub metrics: &'a mut MetricsWriter,
    pub sampler: &'a mut Sampler<'a>,
}

/// A compiled training step with its data and settings.
pub struct Trainer<'a> {
    pub session: &'a Session,
    pub graph: &'a Graph,
    pub program: &'a Program,
    pub batcher: Arc<Batcher>,
    pub options: &'a RunOptions,
}

impl Trainer<'_> {
    /// Trains from the state's step to the last, or until `stop` is set.
    ///
    /// The state of step `n` depends on the configuration and `n` alone: batches, noise and rounding are made from
    /// the seed and the step, so a run that was stopped and continued computes what one without the pause would have.
    ///
    /// # Errors
    /// When data cannot be read, a program fails, a file cannot be written, or steps keep failing to be finite.
    /// [`TrainError::Ended`] says where the steps before the error are saved.
    pub fn run(
        &self,
        mut state: TrainingState,
        sinks: &mut Sinks<'_>,
        stop: &AtomicBool,
    ) -> Result<Outcome, TrainError> {
        let first = state.step;
        self.steps(&mut state, sinks, stop).map_err(|cause| {
            if state.step == first || !state.is_whole() {
                return cause;
            }
            // Of the two errors the first is the one to mend; a failed save leaves older checkpoints intact.
            let checkpoint = match cause {
                TrainError::NotFinite { .. } | TrainError::Checkpoint(_) => return cause,
                _ => self.save_state(&mut state, sinks.checkpoints),
            };
            match checkpoint {
                Ok(checkpoint) => TrainError::Ended {
                    cause: Box::new(cause),
                    checkpoint,
                },
                Err(error) => {
                    tracing::warn!("the steps since the last checkpoint are lost: {error}");
                    cause
                }
            }
        })
    }

    fn steps(
        &self,
        state: &mut TrainingState,
        sinks: &mut Sinks<'_>,
        stop: &AtomicBool,
    ) -> Result<Outcome, TrainError> {
        let options = self.options;
        let mut progress = Progress::new(
            options.max_train_steps,
            state.step,
            options.log_period,
            options.quiet,
        );
        let tflops = flops(self.graph) as f64 / self.session.devices().len() as f64 / 1e12;
        let mut prefetcher = Prefetcher::spawn(Arc::clone(&self.batcher), state.step, 2)?;
        let mut failed_in_a_row = 0;
        while state.step < options.max_train_steps {
            if stop.load(Ordering::Relaxed) {
                progress.finish();
                let checkpoint = self.save(state, sinks)?;
                return Ok(Outcome::Stopped {
                    checkpoint,
                    step: state.step,
                });
            }
            let step = state.step;
            let batch = prefetcher.next_batch()?;
            let result = self.take_step(state, &batch)?;
            if result.finite {
                failed_in_a_row = 0;
            } else {
                failed_in_a_row += 1;
                state.skipped += 1;
                progress.warn(&format!(
                    "step {step}: loss {} or gradient norm {} is not finite; the update was skipped ({} so far)",
                    result.loss, result.grad_norm, state.skipped
                ));
            }
            self.report(tflops, &result, state.skipped, sinks, &mut progress)?;
            if failed_in_a_row > options.max_nonfinite_steps {
                // Skipped updates left the state as it was before the first of them.
                let checkpoint = self.save(state, sinks)?;
                return Err(TrainError::NotFinite {
                    step,
                    count: failed_in_a_row,
                    checkpoint,
                });
            }
            let last = state.step == options.max_train_steps;
            let due = |every: Option<u64>| every.is_some_and(|n| state.step.is_multiple_of(n));
            let (save, sample) = (due(options.checkpoint_every), due(options.sample_every));
            if save && !last {
                let path = self.save(state, sinks)?;
                progress.message(&format!("saved {}", path.display()));
            }
            if sample || (options.sample_every.is_some() && last) {
                let png = (sinks.sampler)(state.step, &|name| state.weight(name))
                    .map_err(TrainError::Samples)?;
                sinks.metrics.image(state.step, "samples", &png)?;
            }
        }
        progress.finish();
        let checkpoint = self.save(state, sinks)?;
        Ok(Outcome::Done { checkpoint })
    }

    /// Tells metrics and terminal of a step that costs `tflops` on each device.
    fn report(
        &self,
        tflops: f64,
        result: &StepResult,
        skipped: u64,
        sinks: &mut Sinks<'_>,
        progress: &mut Progress,
    ) -> Result<(), TrainError> {
        let samples = self.batcher.options().batch_size as u64;
        let rate = tflops / result.seconds;
        sinks.metrics.scalars(
            result.step,
            &[
                (metrics::names::STEP_TIME_SECONDS, result.seconds),
                (metrics::names::PER_DEVICE_TFLOPS, tflops),
                (metrics::names::PER_DEVICE_TFLOPS_PER_SEC, rate),
                (
                    metrics::names::SAMPLES_PER_SEC,
                    samples as f64 / result.seconds,
                ),
                (metrics::names::CURRENT_LEARNING_RATE, result.learning_rate),
                (metrics::names::LOSS, result.loss),
                (metrics::names::GRAD_NORM, result.grad_norm),
                (metrics::names::SKIPPED_STEPS, skipped as f64),
            ],
        )?;
        progress.step(&StepReport {
            step: result.step,
            seconds: result.seconds,
            tflops_per_device: rate,
            loss: result.loss,
            samples,
        });
        Ok(())
    }

    /// Saves a checkpoint, and flushes the metrics so that both tell of the same steps.
    fn save(
        &self,
        state: &mut TrainingState,
        sinks: &mut Sinks<'_>,
    ) -> Result<PathBuf, TrainError> {
        sinks.metrics.flush()?;
        self.save_state(state, sinks.checkpoints)
    }

    fn save_state(
        &self,
        state: &mut TrainingState,
        writer: &mut CheckpointWriter,
    ) -> Result<PathBuf, TrainError> {
        if let Some((step, path)) = &state.saved
            && *step == state.step
        {
            return Ok(path.clone());
        }
        let path = save(self.session, state, self.options, writer)?;
        if let Some(limit) = self.options.checkpoints_total_limit
            && let Err(error) = writer.keep_last(limit)
        {
            tracing::warn!("an old checkpoint stays: {error}");
        }
        state.saved = Some((state.step, path.clone()));
        Ok(path)
    }

    /// Runs one step; `state` has its results, and its counter is one further.
    fn take_step(
        &self,
        state: &mut TrainingState,
        batch: &Batch,
    ) -> Result<StepResult, TrainError> {
        let (session, program, options) = (self.session, self.program, self.options);
        let start = Instant::now();
        let learning_rate = options.learning_rate.at(state.step);
        let [key, rounding] = keys(options.seed, state.step);
        let words =
            |w: [u32; 2]| HostTensor::from_f64(Shape::new(DType::U32, [2]), &w.map(f64::from));
        let mut arguments = Vec::with_capacity(state.inputs.len());
        let mut data: Vec<Option<Array>> = Vec::with_capacity(state.inputs.len());
        for (input, slot) in state.inputs.iter().zip(program.inputs()) {
            let host = match (&input.kind, input.name.as_str()) {
                (InputKind::Data, names::KEY) => words(key)?,
                (InputKind::Data, ROUNDING_KEY) => words(rounding)?,
                (InputKind::Data, names::LEARNING_RATE) => {
                    HostTensor::from_f32([], &[learning_rate as f32])?
                }
                (InputKind::Data, names::SAMPLE) => {
                    let side = input.shape.dims[2] * options.pixel_unshuffle;
                    let samples = to_samples(
                        &batch.pixels,
                        input.shape.dims[0],
                        side,
                        options.pixel_unshuffle,
                    );
                    HostTensor::from_f32(input.shape.dims.clone(), &samples)?
                }
                (InputKind::Data, "input_ids") => {
                    HostTensor::from_i32(input.shape.dims.clone(), &batch.token_ids)?
                }
                (InputKind::Data, other) => {
                    return Err(TrainError::UnknownInput(other.to_string()));
                }
                (InputKind::Weight(_) | InputKind::State, _) => {
                    data.push(None);
                    continue;
                }
            };
            data.push(Some(session.put(&host, &slot.spec)?));
        }
        for (index, data) in data.into_iter().enumerate() {
            let array = match data {
                Some(array) => array,
                None => state.arrays[index]
                    .take()
                    .ok_or_else(|| TrainError::UnknownInput(state.inputs[index].name.clone()))?,
            };
            arguments.push(Value::Donate(array));
        }
        let mut result = StepResult {
            step: state.step,
            seconds: 0.0,
            learning_rate,
            loss: f64::NAN,
            grad_norm: f64::NAN,
            finite: false,
        };
        let mut told = Vec::new();
        for (array, output) in program.run(arguments)?.into_iter().zip(&self.graph.outputs) {
            match output.alias {
                Some(input) => state.arrays[input] = Some(array),
                None => told.push((output.name.as_str(), array)),
            }
        }
        // The arrays are the next step's from here on, also if its results cannot be read.
        state.step += 1;
        for (name, array) in told {
            let value = array.to_host(session.mesh())?.to_f64_vec()?[0];
            match name {
                names::LOSS => result.loss = value,
                names::GRAD_NORM => result.grad_norm = value,
                names::FINITE => result.finite = value != 0.0,
                other => return Err(TrainError::UnknownOutput(other.to_string())),
            }
        }
        result.seconds = start.elapsed().as_secs_f64();
        Ok(result)
    }
}

/// What one step told.
struct StepResult {
    step: u64,
    /// From the batch on the host to the loss on the host.
    seconds: f64,
    learning_rate: f64,
    loss: f64,
    grad_norm: f64,
    finite: bool,
}

/// The step's two keys: words of a ChaCha stream that depends on seed and step alone.
fn keys(seed: u64, step: u64) -> [[u32; 2]; 2] {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(step);
    let mut word = || rng.next_u32();
    [[word(), word()], [word(), word()]]
}

fn save(
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_differ_by_step_and_seed_and_repeat() {
        assert_eq!(keys(1, 5), keys(1, 5));
        assert_ne!(keys(1, 5), keys(1, 6));
        assert_ne!(keys(1, 5), keys(2, 5));
        assert_ne!(keys(1, 5)[0], keys(1, 5)[1]);
    }
}
