//! Errors of training.

use std::path::PathBuf;

use crate::data::DataError;
use crate::footprint::OutOfMemory;
use crate::host_tensor::HostTensorError;
use crate::lowering::LowerError;
use crate::metrics::MetricsError;
use crate::pipelines::PipelineError;
use crate::quant::WeightQuantError;
use crate::runtime::RuntimeError;
use crate::shape::Shape;
use crate::shard::ShardError;
use crate::weights::WeightsError;

use super::checkpoint::CheckpointError;
use super::encoded::StoreError;
use super::samples::SampleError;
use super::step::StepError;

/// An error of training.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    #[error(transparent)]
    Step(#[from] StepError),
    #[error(transparent)]
    Lower(#[from] LowerError),
    #[error(transparent)]
    Shard(#[from] ShardError),
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
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error("the latents and text embeddings of the dataset: {0}")]
    Store(#[from] StoreError),
    #[error("encoding the dataset: {0}")]
    Encode(#[source] Box<PipelineError>),
    #[error(
        "stopped while the dataset was encoded; what is encoded stays, and the same command goes on from there"
    )]
    EncodingStopped,
    #[error(
        "validation_images={count}: there are {all} pictures, of which at least one has to be left for training; hold out fewer"
    )]
    HeldOut { count: usize, all: usize },
    #[error("the validation loss: {0}")]
    Validation(#[source] Box<PipelineError>),
    #[error("the model to start from: {0}")]
    Model(#[source] Box<PipelineError>),
    #[error("{weight}: its scale cannot be learned: {source}")]
    Scale {
        weight: String,
        source: WeightQuantError,
    },
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
    #[error(transparent)]
    OutOfMemory(#[from] Box<OutOfMemory>),
    #[error("sample images: {0}")]
    Samples(#[from] SampleError),
    #[error("{cause}; the training so far is saved in {}", checkpoint.display())]
    Ended {
        #[source]
        cause: Box<TrainError>,
        checkpoint: PathBuf,
    },
}

impl TrainError {
    /// An error of an encoder of the dataset.
    pub(super) fn encode(error: impl Into<PipelineError>) -> TrainError {
        TrainError::Encode(Box::new(error.into()))
    }

    /// An error of measuring the loss on what is held out.
    pub(super) fn validation(error: impl Into<PipelineError>) -> TrainError {
        TrainError::Validation(Box::new(error.into()))
    }

    /// An error of the files of the model that training starts from.
    pub(super) fn model(error: impl Into<PipelineError>) -> TrainError {
        TrainError::Model(Box::new(error.into()))
    }

    /// Whether the model or its options are wrong, rather than a file, a device or a compiler.
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            TrainError::Step(_)
                | TrainError::Lower(_)
                | TrainError::Shard(_)
                | TrainError::HeldOut { .. }
        ) || matches!(self, TrainError::Encode(error) if error.is_usage())
    }
}
