//! Losses, optimizer, the training loop and checkpoints.
