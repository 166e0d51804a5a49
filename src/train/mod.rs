//! Losses, optimizer, the training loop and checkpoints.
//!
//! [`Trainer`] trains a model on data, and writes checkpoints.

pub mod checkpoint;
mod error;
mod observer;
pub mod optimizer;
mod run;
mod samples;
pub mod schedule;
mod state;
pub mod step;
mod trainer;

pub use error::TrainError;
pub use observer::{TrainEvent, TrainObserver};
pub use run::Outcome;
pub use samples::{SampleError, SampleOptions};
pub use state::{EMA_SUFFIX, RunOptions, SCHEDULE_STEPS};
pub use trainer::{MetricsFiles, Trainer, TrainerOptions};
