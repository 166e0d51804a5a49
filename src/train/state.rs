//! The state of training: weights, optimizer and counters, on the devices and in checkpoints.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::Value as Json;

use crate::dtype::DType;
use crate::graph::{Graph, Input, InputKind, TensorFormat, stacked};
use crate::host_tensor::HostTensor;
use crate::models::Part;
use crate::models::clip::TOKEN_EMBEDDING;
use crate::pipelines::model_files::ModelFiles;
use crate::quant::{initial_log_scale, is_log_scale, is_trained_range};
use crate::runtime::{Array, Program, RuntimeError, Session, Slot};
use crate::shape::Shape;
use crate::shard::PartitionSpec;
use crate::weights::save::pytorch_metadata;
use crate::weights::source::ModelSource;
use crate::weights::{Checkpoint, FetchError, TensorSpec};

use super::INVERSION_FILE;
use super::checkpoint::{
    BATCHES, CheckpointError, CheckpointFile, Content, SavedCheckpoint, TrainState,
};
use super::error::TrainError;
use super::inversion::{InversionOptions, is_learned};
use super::lora::{self, LORA_FILE, LoraRecord, is_factor};
use super::optimizer::{ACCUMULATED, EMA, INITIAL, STATE};
use super::schedule::LearningRate;

/// The counter of a checkpoint that holds the length of the learning-rate schedule.
pub const SCHEDULE_STEPS: &str = "learning_rate_schedule_steps";

/// Further counters: steps that changed nothing, when the run was first started, in milliseconds since 1970, and the milliseconds of
/// the steps that led to the checkpoint.
const SKIPPED: &str = "skipped";
const STARTED: &str = "started_unix_ms";
const PRODUCTIVE: &str = "productive_ms";

/// The model's folder in a checkpoint that holds the moving average.
pub const EMA_SUFFIX: &str = "_ema";

/// The file of learned scales, of which only the logarithms are trained, and of activations' ranges.
pub const RANGES_FILE: &str = "quantization_ranges.safetensors";

/// Learned scales of a new run: by the names of their inputs the weight, and the format and type in which it is multiplied.
pub(super) type LearnedScales = BTreeMap<String, (String, TensorFormat, DType)>;

/// The settings of the loop, beside programs and data.
pub struct RunOptions {
    pub max_train_steps: u64,
    pub learning_rate: LearningRate,
    /// The highest learning rates of text encoders that are trained.
    pub text_learning_rates: [f64; 2],
    /// That of the vectors of a new token.
    pub token_learning_rate: f64,
    pub seed: u64,
    /// Side of the blocks of pixels that are one position of the model's sample.
    pub pixel_unshuffle: usize,
    /// Steps between checkpoints; `None` saves at the end only.
    pub checkpoint_every: Option<u64>,
    /// Where a step takes longer, a copy of the state before it stands by, to be saved while it runs.
    pub copy_after_seconds: f64,
    /// Newest checkpoints of this run that are kept; `None` keeps all.
    pub checkpoints_total_limit: Option<usize>,
    pub max_nonfinite_steps: u64,
    /// Batches of one step, whose gradients are averaged.
    pub gradient_accumulation_steps: u64,
    /// The configuration values that decide what is computed; a run continues only with the same ones.
    pub config: BTreeMap<String, Json>,
    pub quantization: Json,
    /// Files that go into every checkpoint as they are, by path.
    pub files: Vec<(String, Vec<u8>)>,
    /// Files of the model that training does not change and that go into every checkpoint.
    pub unchanged: Vec<UnchangedFile>,
    /// Whether these are copied, or linked where the file system can.
    pub copies_unchanged: bool,
    /// For each model root (`unet`), the path of its weights file in a checkpoint, without and with the prefix of the
    /// moving average, e.g. `unet/diffusion_pytorch_model.safetensors`.
    pub weight_files: Vec<(String, String)>,
    /// Published parts that are trained and of which the loss does not use every weight: their files hold those too.
    pub completed: Vec<Part>,
    /// What is said of scales and ranges in the file that has them.
    pub ranges_metadata: BTreeMap<String, String>,
    /// The low-rank updates that are trained, if any, as their files describe them.
    pub lora: Option<LoraRecord>,
    /// The new token that is trained, if any.
    pub inversion: Option<InversionOptions>,
}

/// A file of a model that training does not change.
#[derive(Clone, Debug)]
pub struct UnchangedFile {
    /// Its path in a checkpoint.
    pub path: String,
    pub origin: UnchangedOrigin,
}

/// Where such a file comes from.
#[derive(Clone, Debug)]
pub enum UnchangedOrigin {
    /// It is this file.
    File(PathBuf),
    /// It holds the weights of a part of the model, which have other names or types where they are.
    Weights(Part),
}

/// The state of training on the devices.
pub struct TrainingState {
    /// In the order of the program's inputs; `None` where an input is data.
    pub(super) arrays: Vec<Option<Array>>,
    pub(super) inputs: Vec<Input>,
    /// Which inputs are weights that are not trained.
    pub(super) frozen: Vec<bool>,
    pub(super) step: u64,
    /// The number of the next batch, of which a step may have several.
    pub(super) next_batch: u64,
    pub(super) skipped: u64,
    /// When the run was first started.
    pub(super) started: SystemTime,
    /// Seconds of the steps that led here, of all starts.
    pub(super) productive: f64,
    /// The newest checkpoint of this state's run, and its step.
    pub(super) saved: Option<(u64, PathBuf)>,
}

impl TrainingState {
    /// The weights of `files`, those that `inversion` starts from, new ones from `seed` where there are no files, and an
    /// optimizer before its first update.
    ///
    /// # Errors
    /// When a weight cannot be read, or a transfer fails.
    pub fn new(
        session: &Session,
        graph: &Graph,
        program: &Program,
        seed: u64,
        files: Option<&ModelFiles>,
        inversion: Option<&InversionOptions>,
        scales: &LearnedScales,
    ) -> Result<TrainingState, TrainError> {
        let mut weights = match files {
            Some(files) => read_weights(session, program, files, &|slot: &Slot| {
                let is_beside = is_factor(&slot.name) || is_learned(&slot.name);
                !is_beside && !is_log_scale(&slot.name)
            })?,
            None => BTreeMap::new(),
        };
        if let (Some(files), Some(inversion)) = (files, inversion) {
            let mut initial = inversion.initial(&mut |part| table(files, part))?;
            for slot in program.inputs() {
                if let Some(vectors) = initial.remove(&slot.name) {
                    let vectors = session.put(&vectors, &slot.spec)?;
                    weights.insert(slot.name.clone(), vectors);
                }
            }
        }
        for (input, slot) in graph.inputs.iter().zip(program.inputs()) {
            if let (InputKind::Weight(init), false) =
                (input.kind.clone(), weights.contains_key(&input.name))
            {
                let names = stacked::entries(&input.name);
                let count = input.shape.count() / names.len();
                let values = names.iter().flat_map(|name| init.sample(seed, name, count));
                let values: Vec<f32> = values.collect();
                let value = HostTensor::from_f32(input.shape.dims.clone(), &values)?
                    .convert(input.shape.dtype)?;
                weights.insert(input.name.clone(), session.put(&value, &slot.spec)?);
            }
        }
        for slot in program.inputs() {
            if let Some(known) = scales.get(&slot.name) {
                let initial = initial_scales(session, &weights, known)?;
                weights.insert(slot.name.clone(), session.put(&initial, &slot.spec)?);
            }
        }
        let mut state = TrainingState::empty(graph);
        for (index, slot) in program.inputs().iter().enumerate() {
            let InputKind::State = state.inputs[index].kind else {
                continue;
            };
            let input = &state.inputs[index];
            let of_weight = [EMA, INITIAL].map(|prefix| input.name.strip_prefix(prefix));
            let value = match of_weight.into_iter().flatten().next() {
                Some(weight) => weights
                    .get(weight)
                    .ok_or_else(|| TrainError::UnknownInput(input.name.clone()))?
                    .to_host(session.mesh())?
                    .convert(input.shape.dtype)?,
                None => HostTensor::zeros(input.shape.clone()),
            };
            state.arrays[index] = Some(session.put(&value, &slot.spec)?);
        }
        state.take_weights(&mut weights);
        Ok(state)
    }

    /// The state of `graph` before its first step, without arrays.
    fn empty(graph: &Graph) -> TrainingState {
        let is_updated = |index| graph.outputs.iter().any(|o| o.alias == Some(index));
        let frozen = graph.inputs.iter().enumerate();
        let frozen = frozen.map(|(index, input)| input.is_weight() && !is_updated(index));
        TrainingState {
            arrays: graph.inputs.iter().map(|_| None).collect(),
            frozen: frozen.collect(),
            inputs: graph.inputs.clone(),
            step: 0,
            next_batch: 0,
            skipped: 0,
            started: SystemTime::now(),
            productive: 0.0,
            saved: None,
        }
    }

    fn take_weights(&mut self, weights: &mut BTreeMap<String, Array>) {
        for (array, input) in self.arrays.iter_mut().zip(&self.inputs) {
            if let Some(weight) = weights.remove(&input.name) {
                *array = Some(weight);
            }
        }
    }

    /// The state of a saved checkpoint, whose files were checked when it was opened. Weights that are not trained come
    /// from `files`.
    ///
    /// # Errors
    /// When the checkpoint lacks a tensor of the program or has it in another shape.
    pub fn resume(
        session: &Session,
        graph: &Graph,
        program: &Program,
        saved: &SavedCheckpoint,
        options: &RunOptions,
        files: Option<&ModelFiles>,
    ) -> Result<TrainingState, TrainError> {
        let mut state = TrainingState::empty(graph);
        state.step = saved.state().step;
        state.next_batch = saved.state().next_batch(&options.config);
        let counter = |name: &str| saved.state().counters.get(name).copied();
        state.skipped = counter(SKIPPED).unwrap_or(0);
        // Checkpoints of earlier versions have neither.
        if let Some((started, productive)) = counter(STARTED).zip(counter(PRODUCTIVE)) {
            state.started = UNIX_EPOCH + Duration::from_millis(started);
            state.productive = Duration::from_millis(productive).as_secs_f64();
        }
        state.saved = Some((state.step, saved.dir().to_owned()));
        let mut open = BTreeMap::new();
        let places = places(options, &state);
        for (index, slot) in program.inputs().iter().enumerate() {
            let input = &state.inputs[index];
            if input.name.starts_with(ACCUMULATED) {
                let nothing = HostTensor::zeros(input.shape.clone());
                state.arrays[index] = Some(session.put(&nothing, &slot.spec)?);
            }
            if places[index].is_empty() {
                continue;
            }
            let mut data = Vec::with_capacity(input.shape.bytes());
            for place in &places[index] {
                if !open.contains_key(&place.file) {
                    open.insert(place.file.clone(), saved.tensors(&place.file)?);
                }
                let tensor = open[&place.file]
                    .read(&place.name)
                    .map_err(CheckpointError::from)?;
                if tensor.shape != place.shape {
                    return Err(TrainError::Resume {
                        path: saved.dir().to_owned(),
                        name: place.input.clone(),
                        expected: place.shape.clone(),
                        found: tensor.shape.to_string(),
                    });
                }
                data.extend(tensor.data);
            }
            let tensor = HostTensor::new(input.shape.clone(), data)?;
            state.arrays[index] = Some(session.put(&tensor, &slot.spec)?);
        }
        if let Some(files) = files {
            let frozen: BTreeSet<&str> = state
                .inputs
                .iter()
                .zip(&state.frozen)
                .filter_map(|(input, frozen)| frozen.then_some(input.name.as_str()))
                .collect();
            let is_frozen = |slot: &Slot| frozen.contains(slot.name.as_str());
            let mut weights = read_weights(session, program, files, &is_frozen)?;
            state.take_weights(&mut weights);
        }
        Ok(state)
    }

    /// The time of the steps that led here as a share of the time since the run was first started: the rest went into
    /// preparations, checkpoints, samples, waiting for data, steps that were lost, and between two starts.
    pub(super) fn goodput(&self) -> f64 {
        let all = self.started.elapsed().unwrap_or_default().as_secs_f64();
        self.productive / all.max(self.productive).max(f64::MIN_POSITIVE)
    }

    /// Whether no array was given to a step that failed.
    pub(super) fn is_whole(&self) -> bool {
        let mut parts = self.inputs.iter().zip(&self.arrays);
        parts.all(|(input, array)| input.kind == InputKind::Data || array.is_some())
    }

    /// Bytes of what checkpoints hold of it: all but data and weights that are not trained.
    pub(super) fn bytes(&self) -> usize {
        let inputs = self.inputs.iter().zip(&self.frozen);
        let saved = inputs.filter(|(input, frozen)| input.kind != InputKind::Data && !**frozen);
        saved.map(|(input, _)| input.shape.bytes()).sum()
    }

    pub(super) fn weight(&self, name: &str) -> Option<&Array> {
        let averaged = format!("{EMA}{name}");
        let find = |wanted: &str| {
            let index = self.inputs.iter().position(|i| i.name == wanted)?;
            self.arrays[index].as_ref()
        };
        find(&averaged).or_else(|| find(name))
    }

    /// The weights that are one array with those of other blocks, each as an array of its own, by name: as
    /// [`TrainingState::weight`] gives the others.
    ///
    /// # Errors
    /// When a transfer fails.
    pub(super) fn apart(&self, session: &Session) -> Result<BTreeMap<String, Array>, TrainError> {
        let mut apart = BTreeMap::new();
        let weights = self.inputs.iter().filter(|input| input.is_weight());
        for input in weights.filter(|input| stacked::is_stacked(&input.name)) {
            let array = self.weight(&input.name);
            let array = array.ok_or_else(|| TrainError::UnknownInput(input.name.clone()))?;
            let whole = array.to_host(session.mesh())?;
            let spec = PartitionSpec::new(array.spec().dims()[1..].to_vec())?;
            let parts = stacked::parts(input);
            let data = whole.data.chunks_exact(whole.data.len() / parts.len());
            for (part, data) in parts.into_iter().zip(data) {
                let shape = part.shape.with_dtype(whole.shape.dtype);
                let tensor = HostTensor::new(shape, data.to_vec())?;
                apart.insert(part.name, session.put(&tensor, &spec)?);
            }
        }
        Ok(apart)
    }
}

/// The weights among the inputs of `program` that `wanted` chooses, as `files` have them, by name.
fn read_weights(
    session: &Session,
    program: &Program,
    files: &ModelFiles,
    wanted: &dyn Fn(&Slot) -> bool,
) -> Result<BTreeMap<String, Array>, TrainError> {
    let weights = program.inputs().iter().filter(|slot| slot.weight);
    let slots: Vec<Slot> = weights.filter(|slot| wanted(slot)).cloned().collect();
    let mut names = slots.iter().map(|slot| slot.name.clone());
    let mut weights = BTreeMap::new();
    files
        .read_unchanged(session, &slots, &mut |array| {
            weights.extend(names.next().map(|name| (name, array)));
            Ok(())
        })
        .map_err(TrainError::model)?;
    Ok(weights)
}

/// The logarithms that the scales of a weight start from.
fn initial_scales(
    session: &Session,
    weights: &BTreeMap<String, Array>,
    (name, format, dtype): &(String, TensorFormat, DType),
) -> Result<HostTensor, TrainError> {
    let weight = weights
        .get(name)
        .ok_or_else(|| TrainError::UnknownInput(name.clone()))?
        .to_host(session.mesh())?
        .convert(*dtype)?;
    initial_log_scale(&weight, *format).map_err(|source| TrainError::Scale {
        weight: name.clone(),
        source,
    })
}

/// The embedding table of a text encoder.
fn table(files: &ModelFiles, part: Part) -> Result<HostTensor, TrainError> {
    let checkpoint = files.get(part.name()).map_err(TrainError::model)?;
    Ok(checkpoint.read_as(TOKEN_EMBEDDING, DType::F32)?)
}

/// Where a checkpoint has the value of an input, or of a weight that is one input with those of other blocks.
struct Place {
    input: String,
    file: String,
    /// Its name there.
    name: String,
    /// Its shape there, which has as many elements as the input.
    shape: Shape,
}

/// The places of all inputs, of which some have several; none of data and of weights that are not trained.
fn places(options: &RunOptions, state: &TrainingState) -> Vec<Vec<Place>> {
    let parts: Vec<Vec<Input>> = state.inputs.iter().map(stacked::parts).collect();
    let dims: BTreeMap<&str, &[usize]> = parts
        .iter()
        .flatten()
        .map(|input| (input.name.as_str(), input.shape.dims.as_slice()))
        .collect();
    let inputs = parts.iter().zip(&state.frozen);
    let of_parts = inputs.map(|(parts, frozen)| {
        let saved = parts.iter().filter(|input| {
            let is_value = input.kind != InputKind::Data && !input.name.starts_with(ACCUMULATED);
            is_value && !frozen
        });
        saved.map(|input| place(options, input, &dims)).collect()
    });
    of_parts.collect()
}

/// The place of an input; `dims` has the dimensions of all.
fn place(options: &RunOptions, input: &Input, dims: &BTreeMap<&str, &[usize]>) -> Place {
    let at = |file: String, name: String, shape: Shape| Place {
        input: input.name.clone(),
        file,
        name,
        shape,
    };
    let inversion = options.inversion.as_ref();
    if let Some(name) = inversion.and_then(|inversion| inversion.file_place(&input.name)) {
        return at(INVERSION_FILE.to_owned(), name, input.shape.clone());
    }
    let weight = input.name.strip_prefix(EMA).unwrap_or(&input.name);
    let average_of = |file: &str| match weight == input.name {
        true => file.to_owned(),
        false => format!("{EMA}{file}"),
    };
    if is_trained_range(weight) && !weight.starts_with(STATE) {
        let (_, name) = weight.split_once('/').unwrap_or(("", weight));
        return at(
            average_of(RANGES_FILE),
            name.to_owned(),
            input.shape.clone(),
        );
    }
    let Some(name) = lora::file_place(weight) else {
        let (file, name) = whole_place(options, &input.name);
        return at(file, name, input.shape.clone());
    };
    let file_dims = lora::file_dims(weight, &input.shape.dims, dims);
    at(
        average_of(LORA_FILE),
        name,
        input.shape.with_dims(file_dims),
    )
}

/// The checkpoint file of an input that is no factor, and its name there.
fn whole_place(options: &RunOptions, input: &str) -> (String, String) {
    if input.starts_with(STATE) {
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

/// Where the training state has a value: part `part` of the `parts` equal ones that the array of `input` has along its first
/// dimension.
#[derive(Clone, Copy)]
struct Source {
    input: usize,
    part: usize,
    parts: usize,
}

/// Values copied from the devices. An array of several is copied once, as they follow each other.
struct Copies<'a> {
    session: &'a Session,
    state: &'a TrainingState,
    last: Option<(usize, Vec<u8>)>,
}

impl<'a> Copies<'a> {
    fn new(session: &'a Session, state: &'a TrainingState) -> Copies<'a> {
        Copies {
            session,
            state,
            last: None,
        }
    }

    /// The bytes of a value; `None` where its array was given away.
    fn bytes(&mut self, source: Source) -> Result<Option<Vec<u8>>, RuntimeError> {
        let Source { input, part, parts } = source;
        let last = self.last.take().filter(|(known, _)| *known == input);
        let data = match (last, &self.state.arrays[input]) {
            (Some((_, data)), _) => data,
            (None, Some(array)) => array.to_host(self.session.mesh())?.data,
            (None, None) => return Ok(None),
        };
        if parts == 1 {
            return Ok(Some(data));
        }
        let size = data.len() / parts;
        let bytes = data[part * size..(part + 1) * size].to_vec();
        self.last = (part + 1 < parts).then_some((input, data));
        Ok(Some(bytes))
    }
}

/// A safetensors file of a checkpoint.
pub(super) struct TensorFile {
    path: String,
    /// Tensors with where their values are.
    tensors: Vec<(TensorSpec, Source)>,
    constants: BTreeMap<String, HostTensor>,
    /// What is not trained, in a part of the model.
    unused: Option<UnusedWeights>,
    metadata: BTreeMap<String, String>,
}

/// The weights of a published part that are not trained and belong into its file. They are read when it is written: of a
/// quantized model they are nearly all of it.
struct UnusedWeights {
    names: BTreeSet<String>,
    checkpoint: Checkpoint,
}

impl UnusedWeights {
    fn specs(&self) -> Vec<TensorSpec> {
        let spec = |name: &String| {
            Some(TensorSpec {
                name: name.clone(),
                shape: self.checkpoint.info(name)?.clone(),
            })
        };
        self.names.iter().filter_map(spec).collect()
    }
}

impl TensorFile {
    /// The file, for which the arrays of `state` are copied from the devices when they are written.
    pub fn borrowed<'a>(
        self,
        session: &'a Session,
        state: &'a TrainingState,
    ) -> CheckpointFile<'a> {
        let sources = self.tensors.iter();
        let sources: BTreeMap<String, Source> = sources
            .map(|(spec, source)| (spec.name.clone(), *source))
            .collect();
        let mut copies = Copies::new(session, state);
        self.file(move |name| {
            let source = *sources.get(name).ok_or("it is no tensor of the file")?;
            Ok(copies.bytes(source)?.ok_or("the array was given away")?)
        })
    }

    /// The same with copies of the arrays.
    ///
    /// # Errors
    /// When an array cannot be read from the devices.
    pub fn copied<'f>(
        self,
        session: &Session,
        state: &TrainingState,
    ) -> Result<CheckpointFile<'f>, TrainError> {
        let mut of_arrays = Copies::new(session, state);
        let mut copies = BTreeMap::new();
        for (spec, source) in &self.tensors {
            let bytes = of_arrays.bytes(*source)?;
            let bytes = bytes.ok_or_else(|| TrainError::UnknownInput(spec.name.clone()))?;
            copies.insert(spec.name.clone(), bytes);
        }
        Ok(self.file(move |name| Ok(copies.remove(name).ok_or("it was written before")?)))
    }

    fn file<'a>(
        self,
        mut bytes_of: impl FnMut(&str) -> Result<Vec<u8>, FetchError> + Send + 'a,
    ) -> CheckpointFile<'a> {
        let (constants, unused) = (self.constants, self.unused);
        let of_constants = constants.iter().map(|(name, tensor)| TensorSpec {
            name: name.clone(),
            shape: tensor.shape.clone(),
        });
        let of_unused = unused.as_ref().map(UnusedWeights::specs);
        let specs = self.tensors.into_iter().map(|(spec, _)| spec);
        let specs = specs.chain(of_constants);
        let specs = specs.chain(of_unused.into_iter().flatten()).collect();
        CheckpointFile {
            path: self.path,
            content: Content::Tensors {
                specs,
                metadata: self.metadata,
                fetch: Box::new(move |spec| {
                    let name = &spec.name;
                    let unused = unused.as_ref().filter(|u| u.names.contains(name));
                    Ok(Cow::Owned(match (constants.get(name), unused) {
                        (Some(constant), _) => constant.data.clone(),
                        (None, Some(unused)) => unused.checkpoint.read(name)?.data,
                        (None, None) => bytes_of(name)?,
                    }))
                }),
            },
        }
    }
}

/// A file that training does not change: as the last checkpoint has it, otherwise from the model.
fn unchanged<'a>(
    file: &UnchangedFile,
    state: &TrainingState,
    options: &RunOptions,
    base: Option<&'a ModelSource>,
) -> Result<CheckpointFile<'a>, TrainError> {
    let last = state.saved.as_ref().map(|(_, dir)| dir.join(&file.path));
    let link = |from: PathBuf| Content::File {
        from,
        copy: options.copies_unchanged,
    };
    let content = match (&file.origin, last.filter(|path| path.is_file())) {
        (_, Some(last)) => link(last),
        (UnchangedOrigin::File(from), None) => link(from.clone()),
        (UnchangedOrigin::Weights(part), None) => {
            let unknown = || TrainError::UnknownInput(file.path.clone());
            let component = base.ok_or_else(unknown)?.component(*part);
            let checkpoint = &component.map_err(TrainError::model)?.checkpoint;
            Content::Tensors {
                specs: checkpoint
                    .iter()
                    .map(|(name, shape)| TensorSpec {
                        name: name.to_owned(),
                        shape: shape.clone(),
                    })
                    .collect(),
                metadata: pytorch_metadata(),
                fetch: Box::new(move |spec| Ok(Cow::Owned(checkpoint.read(&spec.name)?.data))),
            }
        }
    };
    Ok(CheckpointFile {
        path: file.path.clone(),
        content,
    })
}

/// The weights of the published model that belong into the file `path` and are not trained; `None` for a file of trained
/// values alone.
fn unused_weights(
    path: &str,
    trained: &[(TensorSpec, Source)],
    options: &RunOptions,
    base: Option<&ModelSource>,
) -> Result<Option<UnusedWeights>, TrainError> {
    let is_of = |part: &&Part| {
        ["", EMA_SUFFIX]
            .map(|suffix| format!("{part}{suffix}/{}", part.weights_file()))
            .contains(&path.to_owned())
    };
    let (Some(part), Some(base)) = (options.completed.iter().find(is_of), base) else {
        return Ok(None);
    };
    let component = base.component(*part).map_err(TrainError::model)?;
    let trained: BTreeSet<&str> = trained.iter().map(|(spec, _)| spec.name.as_str()).collect();
    let checkpoint = component.checkpoint.as_in_files();
    let names = checkpoint.names().filter(|name| !trained.contains(name));
    let names = names.map(str::to_owned).collect();
    Ok(Some(UnusedWeights { names, checkpoint }))
}

/// The files of a checkpoint of `state`. `content` makes those of its arrays.
///
/// # Errors
/// Errors of `content`, and when a file of the model cannot be read.
pub(super) fn files<'f>(
    state: &TrainingState,
    options: &'f RunOptions,
    base: Option<&'f ModelSource>,
    content: &dyn Fn(TensorFile) -> Result<CheckpointFile<'f>, TrainError>,
) -> Result<Vec<CheckpointFile<'f>>, TrainError> {
    let mut files: Vec<CheckpointFile<'f>> = options
        .files
        .iter()
        .map(|(path, bytes)| CheckpointFile {
            path: path.clone(),
            content: Content::Bytes(Cow::Borrowed(bytes)),
        })
        .collect();
    for file in &options.unchanged {
        files.push(unchanged(file, state, options, base)?);
    }
    let mut groups: BTreeMap<String, Vec<(TensorSpec, Source)>> = BTreeMap::new();
    for (input, places) in places(options, state).into_iter().enumerate() {
        let parts = places.len();
        for (part, place) in places.into_iter().enumerate() {
            let source = Source { input, part, parts };
            let spec = TensorSpec {
                name: place.name,
                shape: place.shape,
            };
            groups.entry(place.file).or_default().push((spec, source));
        }
    }
    if let (Some(record), Some(factors)) = (&options.lora, groups.get(LORA_FILE)) {
        let specs: Vec<&TensorSpec> = factors.iter().map(|(spec, _)| spec).collect();
        if let Some(file) = record.kohya(&specs) {
            let sources = factors.iter().map(|(_, source)| *source);
            files.push(content(TensorFile {
                path: lora::KOHYA_FILE.to_owned(),
                tensors: file.factors.into_iter().zip(sources).collect(),
                constants: file.alphas,
                unused: None,
                metadata: file.metadata,
            })?);
        }
    }
    for (path, tensors) in groups {
        let mut metadata = pytorch_metadata();
        if let (Some(record), true) = (&options.lora, path.ends_with(LORA_FILE)) {
            metadata
                .extend(record.peft_metadata(tensors.iter().map(|(spec, _)| spec.name.as_str())));
        }
        if path.ends_with(RANGES_FILE) {
            metadata.extend(options.ranges_metadata.clone());
        }
        if let (Some(inversion), INVERSION_FILE) = (&options.inversion, path.as_str()) {
            metadata.extend(inversion.metadata());
        }
        files.push(content(TensorFile {
            constants: BTreeMap::new(),
            unused: unused_weights(&path, &tensors, options, base)?,
            path,
            tensors,
            metadata,
        })?);
    }
    Ok(files)
}

/// The record of a checkpoint of `state`.
pub(super) fn record(state: &TrainingState, options: &RunOptions) -> TrainState {
    let mut record = TrainState::new(state.step, options.config.clone());
    record.seeds.insert("seed".to_string(), options.seed);
    record.data = serde_json::json!({ "step": state.step, BATCHES: state.next_batch });
    record.quantization = options.quantization.clone();
    let since_epoch = state.started.duration_since(UNIX_EPOCH).unwrap_or_default();
    for (name, count) in [
        (SKIPPED, state.skipped),
        (STARTED, since_epoch.as_millis() as u64),
        (PRODUCTIVE, (state.productive * 1e3) as u64),
    ] {
        record.counters.insert(name.to_string(), count);
    }
    record.counters.insert(
        SCHEDULE_STEPS.to_string(),
        options.learning_rate.total_steps,
    );
    record
}
