//! Errors of generation.

use std::path::PathBuf;

use crate::footprint::OutOfMemory;
use crate::graph::GraphError;
use crate::host_tensor::HostTensorError;
use crate::models::vae::DecodedError;
use crate::quant::QuantError;
use crate::runtime::RuntimeError;
use crate::schedulers::SchedulerError;
use crate::shape::Shape;
use crate::weights::lora::LoraError;
use crate::weights::source::SourceError;
use crate::weights::{MismatchError, WeightsError};

use super::prompt::PromptError;
use super::textual_inversion::InversionError;
use super::tiling::TilingError;

/// Any error of an observer or of a caller's reader of weights.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// An error of generation.
#[derive(Debug, thiserror::Error)]
pub enum PipelineError {
    #[error(transparent)]
    Graph(#[from] GraphError),
    #[error(transparent)]
    Quant(#[from] QuantError),
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    #[error(transparent)]
    HostTensor(#[from] HostTensorError),
    #[error(transparent)]
    Tiling(#[from] TilingError),
    #[error(transparent)]
    Prompt(#[from] PromptError),
    #[error(transparent)]
    Scheduler(#[from] SchedulerError),
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error(transparent)]
    Mismatch(Box<MismatchError>),
    #[error(
        "{path}: the program was traced for {expected} layers with quantized weights, the checkpoint has {stored} such \
         layers, or others; trace it with the checkpoint's formats"
    )]
    Stored {
        path: PathBuf,
        stored: usize,
        expected: usize,
    },
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error(transparent)]
    Lora(#[from] LoraError),
    #[error(transparent)]
    Inversion(#[from] InversionError),
    #[error(transparent)]
    Decoded(#[from] DecodedError),
    #[error("{what}: expected {expected}, found {found}")]
    Shape {
        what: &'static str,
        expected: Shape,
        found: Shape,
    },
    /// The request does not fit the model, or contradicts itself.
    #[error("{0}")]
    Request(String),
    #[error("{0} is not a part of the model")]
    UnknownPart(String),
    #[error("the model's sample is not finite, so there is no image")]
    NotFinite,
    #[error(transparent)]
    OutOfMemory(#[from] Box<OutOfMemory>),
    /// The threads that compile could not be started.
    #[error("cannot start threads to compile with: {0}")]
    Threads(String),
    /// The observer ended the call.
    #[error(transparent)]
    Observer(BoxError),
}

impl PipelineError {
    /// Whether the model or the request is wrong, rather than a file, a device or a compiler.
    pub fn is_usage(&self) -> bool {
        match self {
            PipelineError::Graph(_)
            | PipelineError::Quant(_)
            | PipelineError::Tiling(_)
            | PipelineError::Prompt(_)
            | PipelineError::Scheduler(_)
            | PipelineError::Inversion(_)
            | PipelineError::Request(_)
            | PipelineError::UnknownPart(_) => true,
            PipelineError::Runtime(_)
            | PipelineError::HostTensor(_)
            | PipelineError::Weights(_)
            | PipelineError::Mismatch(_)
            | PipelineError::Stored { .. }
            | PipelineError::Source(_)
            | PipelineError::Lora(_)
            | PipelineError::Decoded(_)
            | PipelineError::Shape { .. }
            | PipelineError::NotFinite
            | PipelineError::OutOfMemory(_)
            | PipelineError::Threads(_)
            | PipelineError::Observer(_) => false,
        }
    }
}
