//! Training from a model and data to checkpoints.

use std::path::PathBuf;
use std::sync::Arc;

use crate::data::Batcher;
use crate::dtype::DType;
use crate::emit::DotPrecision;
use crate::footprint::Footprint;
use crate::lowering;
use crate::metrics::{MetricsOptions, MetricsWriter};
use crate::models::DiffusionModel;
use crate::pipelines::image_file::prepare_output_dir;
use crate::quant::Decision;
use crate::runtime::{Program, ProgramOptions, Session};

use super::checkpoint::{CheckpointFolder, SavedCheckpoint};
use super::error::TrainError;
use super::observer::{TrainEvent, TrainObserver};
use super::run::{Outcome, TrainingLoop};
use super::samples::{SampleError, SampleOptions, Samples};
use super::state::{RunOptions, TrainingState};
use super::step::{self, StepOptions};

/// The outputs of a run's metrics.
#[derive(Clone, Debug, Default)]
pub struct MetricsFiles {
    /// Stands in every JSON line.
    pub run_name: String,
    /// The JSON lines file; an existing one is appended to.
    pub jsonl: Option<PathBuf>,
    /// The folder for TensorBoard's event files.
    pub tensorboard: Option<PathBuf>,
    /// Steps between two flushes; 0 flushes at the end only.
    pub flush_every: u64,
}

/// The model, data and settings of a training run.
pub struct TrainerOptions {
    pub model: DiffusionModel,
    pub batcher: Batcher,
    pub step: StepOptions,
    pub precision: DotPrecision,
    pub run: RunOptions,
    pub checkpoints: CheckpointFolder,
    /// The checkpoint to resume from.
    pub resume: Option<SavedCheckpoint>,
    pub metrics: MetricsFiles,
    pub samples: Option<SampleOptions>,
    /// What makes a step smaller, for the message that it does not fit the memory.
    pub memory_advice: Vec<String>,
}

/// A model to be trained on a session's devices.
pub struct Trainer {
    session: Session,
    options: TrainerOptions,
    decisions: Vec<Decision>,
    step: lowering::LoweredProgram,
    footprint: Footprint,
}

impl Trainer {
    /// Traces the training step for the devices of `session`. Nothing is written.
    ///
    /// # Errors
    /// When the model's parts do not fit together, quantization is refused, or the batch does not divide over the
    /// devices; [`TrainError::OutOfMemory`] when weights and state alone do not fit their memory.
    pub fn new(session: Session, options: TrainerOptions) -> Result<Trainer, TrainError> {
        let traced = step::trace(&options.model, &options.step)?;
        let mesh = session.mesh();
        let lowered = session.lower(&traced)?;
        lowered.step.plan.check_batch(&lowered.step.graph, mesh)?;
        let fit = session.fit(&options.memory_advice);
        let footprint = fit.check("the training step", &lowered.step)?;
        Ok(Trainer {
            session,
            options,
            decisions: traced.decisions,
            step: lowered.step,
            footprint,
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
        let mut checkpoints = self.options.checkpoints.writer()?;
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
        let mut is_stopped = false;
        let mut tell = |event: TrainEvent<'_>| is_stopped |= observer(event).is_break();
        let program = self.compile(&mut tell)?;
        let TrainerOptions {
            model,
            batcher,
            precision,
            run,
            samples,
            ..
        } = self.options;
        let (session, graph) = (&self.session, &self.step.graph);
        let state = match &resumed {
            Some(saved) => {
                let checkpoint = saved.dir();
                tell(TrainEvent::Resumed { checkpoint });
                TrainingState::resume(session, graph, &program, saved, &run)?
            }
            None => TrainingState::new(session, graph, &program, run.seed)?,
        };
        // Samples are made with the moving averages, which are kept in float32.
        let mut sampled = model;
        if self.options.step.optimizer.ema_decay.is_some() {
            sampled.precision.weights = DType::F32;
        }
        let batcher = Arc::new(batcher);
        let samples = samples.as_ref().map(|options| Samples {
            session,
            model: &sampled,
            tokenizer: batcher.tokenizer(),
            precision,
            pixel_unshuffle: run.pixel_unshuffle,
            options,
            compiled: None,
        });
        let training = TrainingLoop {
            session,
            graph,
            program: &program,
            batcher: Arc::clone(&batcher),
            options: &run,
            checkpoints: &mut checkpoints,
            metrics,
            samples,
            observer,
            is_stopped,
        };
        training.run(state)
    }

    fn compile(&self, tell: &mut dyn FnMut(TrainEvent<'_>)) -> Result<Program, TrainError> {
        let TrainerOptions {
            step, precision, ..
        } = &self.options;
        let decisions = &self.decisions;
        if let Some(policy) = &step.quantization {
            tell(TrainEvent::Quantized { policy, decisions });
        }
        tell(TrainEvent::Traced {
            parameters: self.step.graph.parameter_count(),
            batch: step.batch,
            footprint: &self.footprint,
        });
        let options = ProgramOptions {
            precision: *precision,
        };
        let program = Program::of_step(&self.session, &self.step, &options)?;
        let timings = program.timings();
        tell(TrainEvent::Compiled {
            seconds: timings.compile,
            from_cache: timings.from_cache,
        });
        Ok(program)
    }
}
