//! Losses, optimizer, the training loop and checkpoints.
//!
//! [`Trainer`] trains a model on data, and writes checkpoints.

pub mod checkpoint;
mod encoded;
mod error;
mod feed;
mod inversion;
mod lora;
mod observer;
pub mod optimizer;
mod run;
mod samples;
mod saving;
pub mod schedule;
mod state;
pub mod step;
mod trainer;
mod validation;

pub use crate::pipelines::textual_inversion::FILE as INVERSION_FILE;
pub use encoded::{EncodedDataset, KNOWN_FILES, Samples as EncodedSamples, StepInputs, StoreError};
pub use error::TrainError;
pub use inversion::{InversionOptions, InversionPlace};
pub use lora::{
    LORA_FILE, LoraOptions, LoraRecord, LoraTargetError, TEXT_PROJECTIONS, default_targets,
};
pub use observer::{Encoded, TrainEvent, TrainObserver, ValidationLoss};
pub use run::{MetricsFiles, Outcome};
pub use samples::{SampleError, SampleOptions};
pub use state::{
    EMA_SUFFIX, RANGES_FILE, RunOptions, SCHEDULE_STEPS, UnchangedFile, UnchangedOrigin,
};
pub use trainer::{FineTune, PixelStart, Task, Trainer, TrainerOptions, model_flops};
pub use validation::ValidationOptions;
