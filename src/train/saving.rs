//! Checkpoints that are written while training goes on.
//!
//! Training waits for the copy of its state to the host alone. One checkpoint is written at a time: the next waits for it.

use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::thread::{Scope, ScopedJoinHandle};

use crate::runtime::Session;
use crate::util::memory;
use crate::weights::source::ModelSource;

use super::checkpoint::{CheckpointError, CheckpointFile, CheckpointWriter, TrainState};
use super::error::TrainError;
use super::state::{RunOptions, TrainingState, files, record};

/// Memory that stays free beside a copy of the state, as a share of the copy.
const SPARE: f64 = 0.25;

/// What is saved, and where.
#[derive(Clone, Copy)]
pub(super) struct Saved<'env> {
    pub session: &'env Session,
    pub options: &'env RunOptions,
    /// The model that training started from, if it was not a new one.
    pub base: Option<&'env ModelSource>,
    pub writer: &'env Mutex<CheckpointWriter>,
}

/// Writes the checkpoints of a run.
pub(super) struct Saver<'scope, 'env> {
    scope: &'scope Scope<'scope, 'env>,
    saved: Saved<'env>,
    writing: Option<Writing<'scope>>,
    /// The last validation loss and its step.
    validated: Option<(u64, f64)>,
}

/// A checkpoint that is being written.
struct Writing<'scope> {
    step: u64,
    thread: ScopedJoinHandle<'scope, Result<PathBuf, CheckpointError>>,
}

impl<'scope, 'env> Saver<'scope, 'env> {
    pub fn new(scope: &'scope Scope<'scope, 'env>, saved: Saved<'env>) -> Self {
        Saver {
            scope,
            saved,
            writing: None,
            validated: None,
        }
    }

    /// Takes note of the loss on what is held out, for the checkpoint of the same step.
    pub fn validated(&mut self, step: u64, loss: f64) {
        self.validated = Some((step, loss));
    }

    /// Begins a checkpoint of `state`, after the one before it is written. Where a copy of the state does not fit the memory
    /// training waits until it is written.
    ///
    /// # Errors
    /// When an array cannot be read from the devices, or an earlier checkpoint could not be written.
    pub fn begin(&mut self, state: &mut TrainingState) -> Result<(), TrainError> {
        self.wait(state)?;
        let Saved {
            session,
            options,
            base,
            writer,
        } = self.saved;
        let needed = (state.bytes() as f64 * (1.0 + SPARE)) as u64;
        if memory::available().is_some_and(|available| available < needed) {
            tracing::info!(
                "training waits for this checkpoint: the {needed} bytes of a copy of its state are not free"
            );
            return self.finish(state).map(drop);
        }
        let files = files(state, options, base, &|file| file.copied(session, state))?;
        let record = self.record(state);
        self.writing = Some(Writing {
            step: state.step,
            thread: self
                .scope
                .spawn(move || write(writer, options, &record, files)),
        });
        Ok(())
    }

    /// The checkpoint that was written since the last call, if one was; `state` knows it then.
    ///
    /// # Errors
    /// When it could not be written.
    pub fn poll(&mut self, state: &mut TrainingState) -> Result<Option<PathBuf>, TrainError> {
        match &self.writing {
            Some(writing) if writing.thread.is_finished() => self.wait(state),
            Some(_) | None => Ok(None),
        }
    }

    /// As [`Saver::poll`], after what is being written is.
    pub fn wait(&mut self, state: &mut TrainingState) -> Result<Option<PathBuf>, TrainError> {
        let Some(Writing { step, thread }) = self.writing.take() else {
            return Ok(None);
        };
        let path = thread.join().unwrap_or_else(|panic| resume_unwind(panic))?;
        state.saved = Some((step, path.clone()));
        Ok(Some(path))
    }

    /// The checkpoint of `state` when it is written; nothing is written twice.
    ///
    /// # Errors
    /// When an array cannot be read from the devices, or a checkpoint cannot be written.
    pub fn finish(&mut self, state: &mut TrainingState) -> Result<PathBuf, TrainError> {
        self.wait(state)?;
        if let Some((step, path)) = &state.saved
            && *step == state.step
        {
            return Ok(path.clone());
        }
        let Saved {
            session,
            options,
            base,
            writer,
        } = self.saved;
        let files = files(state, options, base, &|file| {
            Ok(file.borrowed(session, state))
        })?;
        let path = write(writer, options, &self.record(state), files)?;
        state.saved = Some((state.step, path.clone()));
        Ok(path)
    }

    fn record(&self, state: &TrainingState) -> TrainState {
        let of_step = self.validated.filter(|(step, _)| *step == state.step);
        TrainState {
            validation_loss: of_step.map(|(_, loss)| loss),
            ..record(state, self.saved.options)
        }
    }
}

/// Writes a checkpoint, and deletes the oldest beyond those that are kept.
fn write(
    writer: &Mutex<CheckpointWriter>,
    options: &RunOptions,
    record: &TrainState,
    files: Vec<CheckpointFile<'_>>,
) -> Result<PathBuf, CheckpointError> {
    let mut writer = writer.lock().unwrap_or_else(PoisonError::into_inner);
    let path = writer.save(record, files)?;
    if let Some(limit) = options.checkpoints_total_limit
        && let Err(error) = writer.keep_last(limit)
    {
        tracing::warn!("an old checkpoint stays: {error}");
    }
    Ok(path)
}
