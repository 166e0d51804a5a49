//! Losses, optimizer, the training loop and checkpoints.

pub mod checkpoint;
pub mod optimizer;
pub mod run;
pub mod schedule;
pub mod step;
