//! Events during training.

use std::ops::ControlFlow;
use std::path::Path;

use crate::footprint::Footprint;
use crate::metrics::StepReport;
use crate::quant::{Decision, Policy};

/// What is encoded of a dataset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoded {
    Images,
    Captions,
}

/// Mean squared errors of what the model predicts.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidationLoss {
    /// Over all samples and levels.
    pub mean: f64,
    /// At each level, from little to much noise: the first timestep of its part, and the mean over all samples.
    pub levels: Vec<(usize, f64)>,
}

/// An event during training.
#[derive(Clone, Copy, Debug)]
pub enum TrainEvent<'a> {
    /// The decision of quantization for each contraction of the step.
    Quantized {
        policy: &'a Policy,
        decisions: &'a [Decision],
    },
    /// Images have several heights and widths, each with its number of images.
    Buckets(&'a [([usize; 2], usize)]),
    /// The files and captions of the dataset are compared with what is encoded already.
    Hashing,
    /// Of what the dataset needs and no earlier run has encoded, `done` of `total` are.
    Encoding {
        what: Encoded,
        done: usize,
        total: usize,
    },
    /// The step is traced, and compiles next. `batch` is the number of samples of a step over all devices.
    Traced {
        parameters: usize,
        /// How many of them are trained.
        trained: usize,
        batch: usize,
        footprint: &'a Footprint,
    },
    Compiled {
        seconds: f64,
        from_cache: bool,
    },
    /// The run resumes from this checkpoint.
    Resumed {
        checkpoint: &'a Path,
    },
    /// Steps `first..total` follow.
    Started {
        first: u64,
        total: u64,
    },
    Step(&'a StepReport),
    /// Loss or gradient was not finite, so that the step changed nothing; `skipped` of them so far.
    Skipped {
        step: u64,
        loss: f64,
        grad_norm: f64,
        skipped: u64,
    },
    /// The state is copied for a checkpoint, which is written while training goes on, or after the last step at once.
    Saving,
    /// A checkpoint is written, some steps after its own.
    Saved {
        checkpoint: &'a Path,
    },
    /// The next samples that are held out are measured.
    Validating,
    /// The loss on what is held out was measured after `step` steps.
    Validated {
        step: u64,
        loss: &'a ValidationLoss,
    },
    /// The next step of images of the sample prompts follows.
    Sampling,
    /// Images of the sample prompts were generated.
    Sampled {
        step: u64,
    },
}

/// Takes events as they come. After `Break`, training ends before its next step, and measures and draws no more: the state is saved, and the outcome is
/// [`super::Outcome::Stopped`]. `&mut |_| ControlFlow::Continue(())` ignores all.
pub type TrainObserver<'a> = dyn FnMut(TrainEvent<'_>) -> ControlFlow<()> + 'a;
