//! Training from a model and data to checkpoints.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::data::{BatchOptions, Batcher, Dataset, TagOrders, Tokenizer};
use crate::dtype::DType;
use crate::emit::DotPrecision;
use crate::footprint::Footprint;
use crate::graph::Graph;
use crate::lowering::{self, Traced, traced_flops};
use crate::metrics::{MetricsOptions, MetricsWriter};
use crate::models::DiffusionModel;
use crate::nn::Remat;
use crate::pipelines::image_file::prepare_output_dir;
use crate::pipelines::latents::trace_encode_distribution;
use crate::pipelines::text_to_image::trace_encode;
use crate::pipelines::{PipelineModel, ReadWeights, TakeWeight};
use crate::quant::{Decision, log_scale_name};
use crate::runtime::{Program, ProgramOptions, Session, Slot};
use crate::topology::Chip;

use super::checkpoint::{CheckpointFolder, SavedCheckpoint};
use super::encoded::{self, EncodedDataset, of_size};
use super::error::TrainError;
use super::feed::Feed;
use super::lora;
use super::observer::{TrainEvent, TrainObserver};
use super::run::{MetricsFiles, Outcome, StepProgram, TrainingLoop};
use super::samples::{SampleError, SampleOptions, Samples};
use super::state::{LearnedScales, RunOptions, TrainingState};
use super::step::{self, StepOptions};
use super::validation::{Validation, ValidationOptions};

/// What a run trains, and on what.
pub enum Task {
    /// A model of pixels, with the text encoder beside it.
    Pixels {
        start: PixelStart,
        batcher: Box<Batcher>,
    },
    /// The denoiser of a published model, or low-rank updates of it, in latents.
    FineTune(Box<FineTune>),
}

/// What training on pixels starts from.
pub enum PixelStart {
    /// Random weights.
    New(Box<DiffusionModel>),
    /// Those of an earlier run. The tokenizer is the batcher's.
    Run(Box<PipelineModel>),
}

/// Training that starts from published weights.
pub struct FineTune {
    pub base: PipelineModel,
    pub dataset: Dataset,
    pub batches: BatchOptions,
    /// The orders in which tags of captions are used; `None` leaves captions as they are.
    pub tags: Option<TagOrders>,
    /// The folder of latents and text embeddings, which other runs may share.
    pub cache: PathBuf,
}

impl Task {
    fn model(&self) -> &DiffusionModel {
        match self {
            Task::Pixels { start, .. } => match start {
                PixelStart::New(model) => model,
                PixelStart::Run(base) => &base.model,
            },
            Task::FineTune(tuning) => &tuning.base.model,
        }
    }

    /// Opens the files of all weights that are read, and compares them with what the programs declare.
    fn open_files(&mut self, step: &StepOptions) -> Result<(), TrainError> {
        let (base, mut parts) = match self {
            Task::Pixels { start, .. } => match start {
                PixelStart::New(_) => return Ok(()),
                PixelStart::Run(base) => (&mut **base, Vec::new()),
            },
            Task::FineTune(tuning) => {
                let parts = encoders(&tuning.base.model)?;
                (&mut tuning.base, parts)
            }
        };
        // What is trained beside the model's weights is in no file.
        let of_files = StepOptions {
            lora: None,
            inversion: None,
            fake_quantization: None,
            ..step.clone()
        };
        parts.push(step::trace(&base.model, &of_files)?);
        let stored = step.quantization.as_ref();
        let stored = stored
            .map(|policy| policy.stored.clone())
            .unwrap_or_default();
        let graphs = parts.iter().map(|traced| &traced.graph);
        let denoiser = base.model.denoiser.part();
        let files = &mut base.files;
        files
            .open_all(graphs, denoiser, &stored)
            .map_err(TrainError::model)
    }
}

/// The task, settings and outputs of a training run.
pub struct TrainerOptions {
    pub task: Task,
    pub step: StepOptions,
    pub precision: DotPrecision,
    pub run: RunOptions,
    pub checkpoints: CheckpointFolder,
    /// The checkpoint to resume from.
    pub resume: Option<SavedCheckpoint>,
    pub metrics: MetricsFiles,
    pub samples: Option<SampleOptions>,
    pub validation: Option<ValidationOptions>,
    /// What makes a step smaller, for the message that it does not fit the memory.
    pub memory_advice: Vec<String>,
    /// Set from another thread, it says that the run is to stop: where steps take long, the state before the present one is saved
    /// at once. The run ends when the observer says so.
    pub stop: Option<Arc<AtomicBool>>,
}

/// A model to be trained on a session's devices.
pub struct Trainer {
    session: Session,
    options: TrainerOptions,
    decisions: Vec<Decision>,
    /// For each size of images, at least one.
    steps: Vec<SizedStep>,
}

/// The training step for images of one size.
struct SizedStep {
    /// Their height and width.
    size: [usize; 2],
    /// How many there are of it.
    images: usize,
    lowered: lowering::LoweredProgram,
    footprint: Footprint,
    /// The time that its arithmetic would take at the peak of the devices, in seconds, where that is known.
    ideal_seconds: Option<f64>,
}

impl Trainer {
    /// Traces the training step for the devices of `session`, for each size of the images. Nothing is written.
    ///
    /// # Errors
    /// When the model's parts do not fit together or are not in its files, quantization is refused, or the batch does
    /// not divide over the devices; [`TrainError::OutOfMemory`] when weights and state alone do not fit their memory.
    pub fn new(session: Session, mut options: TrainerOptions) -> Result<Trainer, TrainError> {
        options.task.open_files(&options.step)?;
        let sizes = match &options.task {
            Task::Pixels { batcher, .. } => {
                let size = options.task.model().image_size;
                BTreeMap::from([(size, batcher.dataset().len())])
            }
            Task::FineTune(tuning) => tuning.dataset.sizes(),
        };
        let mut decisions = Vec::new();
        let mut steps = Vec::with_capacity(sizes.len());
        for (size, images) in sizes {
            let model = of_size(options.task.model(), size);
            let traced = step::trace(&model, &options.step)?;
            let lowered = session.lower(&traced)?.step;
            lowered.plan.check_batch(&lowered.graph, session.mesh())?;
            let fit = session.fit(&options.memory_advice);
            let footprint = fit.check("the training step", &lowered)?;
            decisions = traced.decisions;
            let ideal_seconds = match peak(&session) {
                Some(peak) => Some(model_flops(model, &options.step)? as f64 / peak),
                None => None,
            };
            steps.push(SizedStep {
                size,
                images,
                lowered,
                footprint,
                ideal_seconds,
            });
        }
        Ok(Trainer {
            session,
            options,
            decisions,
            steps,
        })
    }

    /// Compiles the step and trains to the last one, or until `observer` asks to stop.
    ///
    /// # Errors
    /// When the step does not compile, the checkpoint to resume from is not the model's, data cannot be read, a program
    /// fails, a file cannot be written, or steps keep failing to be finite. [`TrainError::Ended`] says where the steps
    /// before the error are saved.
    pub fn run(mut self, observer: &mut TrainObserver<'_>) -> Result<Outcome, TrainError> {
        let resumed = self.options.resume.take();
        let first_step = resumed.as_ref().map_or(0, |saved| saved.state().step);
        if let Some(saved) = &resumed
            && first_step >= self.options.run.max_train_steps
        {
            return Ok(Outcome::NothingToDo {
                checkpoint: saved.dir().to_owned(),
                step: first_step,
            });
        }
        let checkpoints = self.options.checkpoints.writer()?;
        if let Some(owner) = checkpoints.stale_owner() {
            tracing::warn!("{owner} ended without releasing the checkpoint folder; continuing");
        }
        if let Some(samples) = &self.options.samples {
            prepare_output_dir(&samples.dir).map_err(SampleError::from)?;
        }
        let files = &self.options.metrics;
        let metrics = MetricsWriter::open(&MetricsOptions {
            run_name: &files.run_name,
            jsonl: files.jsonl.as_deref(),
            tensorboard_dir: files.tensorboard.as_deref(),
            first_step,
            flush_every: files.flush_every,
        })?;
        let session = &self.session;
        let sizes: Vec<([usize; 2], usize)> = self
            .steps
            .iter()
            .map(|step| (step.size, step.images))
            .collect();
        let mut is_stopped = false;
        if sizes.len() > 1 {
            is_stopped |= observer(TrainEvent::Buckets(&sizes)).is_break();
        }
        let sizes: Vec<[usize; 2]> = sizes.into_iter().map(|(size, _)| size).collect();
        let held_out = self.options.validation.map_or(0, |held| held.samples);
        let step = &self.options.step;
        let Prepared {
            feed,
            mut model,
            base,
        } = match self.options.task {
            Task::Pixels { start, batcher } => {
                let unshuffle = self.options.run.pixel_unshuffle;
                let feed = Feed::Pixels { batcher, unshuffle };
                let (model, base) = match start {
                    PixelStart::New(model) => (*model, None),
                    PixelStart::Run(base) => (base.model.clone(), Some(*base)),
                };
                Prepared { feed, model, base }
            }
            Task::FineTune(tuning) => tuning.encode(
                session,
                &self.options.step,
                self.options.precision,
                &sizes,
                held_out,
                observer,
            )?,
        };
        let mut tell = |event: TrainEvent<'_>| is_stopped |= observer(event).is_break();
        let traced = TracedSteps {
            options: step,
            steps: self.steps,
            decisions: &self.decisions,
        };
        let programs = compile(session, traced, self.options.precision, &mut tell)?;
        // Those of all sizes have the same weights and state.
        let StepProgram { graph, program, .. } = &programs[0];
        let run = &self.options.run;
        let files = base.as_ref().map(|base| &base.files);
        let state = match &resumed {
            Some(saved) => {
                let checkpoint = saved.dir();
                tell(TrainEvent::Resumed { checkpoint });
                TrainingState::resume(session, graph, program, saved, run, files)?
            }
            None => {
                let inversion = step.inversion.as_ref();
                let scales = learned_scales(step, &self.decisions, &model);
                TrainingState::new(session, graph, program, run.seed, files, inversion, &scales)?
            }
        };
        // Samples are made with the moving averages, which are kept in float32, as low-rank factors are.
        let trains_weights = step.lora.is_none() && !step.trains_low_rank;
        if step.optimizer.ema_decay.is_some() && trains_weights {
            model.precision.weights = DType::F32;
        }
        let feed = Arc::new(feed);
        let read = files.map(|files| {
            move |slots: &[Slot], take: &mut TakeWeight<'_>| {
                files.read_unchanged(session, slots, take)
            }
        });
        let samples = self.options.samples.as_ref().map(|options| Samples {
            session,
            model: &model,
            tokenizers: tokenizers(&feed, base.as_ref()),
            files: read.as_ref().map(|read| read as &ReadWeights<'_>),
            zero_empty_prompts: base.as_ref().is_some_and(|base| base.zero_empty_prompts),
            lora: step
                .lora
                .as_ref()
                .map(|lora| (lora::ranks_of(graph), lora.scale())),
            inversion: step.inversion.as_ref(),
            fake_quantization: step.fake_quantization,
            precision: self.options.precision,
            pixel_unshuffle: run.pixel_unshuffle,
            options,
            compiled: None,
        });
        let validation = match (&*feed, self.options.validation) {
            (Feed::Encoded(dataset), Some(options)) => Some(Validation {
                session,
                model: &model,
                step,
                files: read.as_ref().map(|read| read as &ReadWeights<'_>),
                precision: self.options.precision,
                dataset,
                sizes: &sizes,
                seed: run.seed,
                options,
                programs: sizes.iter().map(|_| None).collect(),
            }),
            _ => None,
        };
        let training = TrainingLoop {
            session,
            programs: &programs,
            feed: Arc::clone(&feed),
            options: run,
            base: files.and_then(|files| files.published()),
            metrics,
            files: &self.options.metrics,
            samples,
            validation,
            stop: self.options.stop,
            observer,
            is_stopped,
        };
        training.run(state, checkpoints)
    }
}

/// What a task is when its data are ready.
struct Prepared {
    feed: Feed,
    model: DiffusionModel,
    /// The model that training starts from.
    base: Option<PipelineModel>,
}

impl FineTune {
    /// Encodes what no earlier run has encoded of the dataset.
    fn encode(
        self,
        session: &Session,
        step: &StepOptions,
        precision: DotPrecision,
        sizes: &[[usize; 2]],
        held_out: usize,
        observer: &mut TrainObserver<'_>,
    ) -> Result<Prepared, TrainError> {
        let FineTune {
            base,
            dataset,
            batches,
            tags,
            cache,
        } = self;
        let samples = encoded::Samples {
            dataset,
            options: batches,
            tags,
            sizes,
            keeps_ids: step.encodes_text(&base.model),
            held_out,
            dir: &cache,
        };
        let encoded = EncodedDataset::new(session, &base, precision, samples, observer)?;
        Ok(Prepared {
            feed: Feed::Encoded(Box::new(encoded)),
            model: base.model.clone(),
            base: Some(base),
        })
    }
}

/// The scales that a step learns.
fn learned_scales(
    step: &StepOptions,
    decisions: &[Decision],
    model: &DiffusionModel,
) -> LearnedScales {
    let learns = step
        .fake_quantization
        .is_some_and(|fake| fake.learns_scales);
    let Some(policy) = step.quantization.as_ref().filter(|_| learns) else {
        return LearnedScales::new();
    };
    let scale = |decision: &Decision| {
        let format = decision.formats?.weight?;
        let path = format!("{}{}", policy.model, decision.path);
        let dtype = model.precision.activations;
        Some((
            log_scale_name(&path),
            (format!("{path}.weight"), format, dtype),
        ))
    };
    decisions.iter().filter_map(scale).collect()
}

/// The programs that encode a dataset for a published model.
fn encoders(model: &DiffusionModel) -> Result<Vec<Traced>, TrainError> {
    let mut parts = vec![trace_encode_distribution(model).map_err(TrainError::model)?];
    for which in 0..model.text_encoders.len() {
        parts.push(trace_encode(model, which, 1).map_err(TrainError::model)?);
    }
    Ok(parts)
}

/// One for each text encoder.
fn tokenizers<'a>(feed: &'a Feed, base: Option<&'a PipelineModel>) -> Vec<&'a Tokenizer> {
    match (feed, base) {
        (Feed::Pixels { batcher, .. }, _) => vec![batcher.tokenizer()],
        (Feed::Encoded(_), Some(base)) => base.tokenizers.iter().collect(),
        (Feed::Encoded(_), None) => Vec::new(),
    }
}

/// Compiles the step for each size of images, and tells of it.
fn compile(
    session: &Session,
    traced: TracedSteps<'_>,
    precision: DotPrecision,
    tell: &mut dyn FnMut(TrainEvent<'_>),
) -> Result<Vec<StepProgram>, TrainError> {
    let TracedSteps {
        options,
        steps,
        decisions,
    } = traced;
    if let Some(policy) = &options.quantization {
        tell(TrainEvent::Quantized { policy, decisions });
    }
    if let Some(largest) = steps.iter().max_by_key(|step| step.footprint.activations) {
        let graph = &largest.lowered.graph;
        tell(TrainEvent::Traced {
            parameters: graph.parameter_count(),
            trained: trained_count(graph),
            batch: options.batch,
            footprint: &largest.footprint,
        });
    }
    let (mut seconds, mut from_cache) = (0.0, true);
    let mut programs = Vec::with_capacity(steps.len());
    for SizedStep {
        lowered,
        ideal_seconds,
        ..
    } in steps
    {
        let program = Program::of_step(session, &lowered, &ProgramOptions { precision })?;
        let timings = program.timings();
        seconds += timings.compile;
        from_cache &= timings.from_cache;
        let graph = lowered.graph;
        programs.push(StepProgram {
            graph,
            program,
            ideal_seconds,
        });
    }
    tell(TrainEvent::Compiled {
        seconds,
        from_cache,
    });
    Ok(programs)
}

/// Operations a second that all devices of a session together can do in bfloat16; `None` of chips that are not known.
fn peak(session: &Session) -> Option<f64> {
    let devices = session.devices();
    let chip = Chip::from_device_kind(&devices.first()?.description().kind)?;
    Some(chip.device_peak()? * devices.len() as f64)
}

/// Operations of the dots and convolutions of a step over all devices if it computes nothing twice: those that utilization counts.
///
/// # Errors
/// When the step cannot be traced, or has no derivative.
pub fn model_flops(model: DiffusionModel, options: &StepOptions) -> Result<u64, TrainError> {
    let model = DiffusionModel {
        remat: Remat::None,
        ..model
    };
    Ok(traced_flops(&step::trace(&model, options)?)?)
}

/// The elements of the weights that a step gives new values.
fn trained_count(graph: &Graph) -> usize {
    let is_updated = |index| graph.outputs.iter().any(|o| o.alias == Some(index));
    let trained = graph.weights().filter(|(index, _)| is_updated(*index));
    trained.map(|(_, input)| input.shape.count()).sum()
}

/// The traced steps, and what is told of them.
struct TracedSteps<'a> {
    options: &'a StepOptions,
    steps: Vec<SizedStep>,
    decisions: &'a [Decision],
}
