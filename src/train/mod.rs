//! Losses, optimizer, the training loop and checkpoints.

pub mod checkpoint;
