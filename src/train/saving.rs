//! Checkpoints that are written while training goes on.
//!
//! Training waits for the copy of its state to the host alone. One checkpoint is written at a time: the next waits for it.
//!
//! Machines that are taken away give notice of half a minute. Where a step may take longer than that, a copy of the state
//! before it stands by, and is written at once when the run is asked to stop.

use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::Duration;

use crate::runtime::Session;
use crate::util::memory;
use crate::weights::source::ModelSource;

use super::checkpoint::{CheckpointError, CheckpointFile, CheckpointWriter, TrainState};
use super::error::TrainError;
use super::state::{RunOptions, TrainingState, files, record};

/// Memory that stays free beside a copy of the state, as a share of the copy.
const SPARE: f64 = 0.25;

/// How often a copy that stands by looks whether the run is asked to stop.
const LOOK_EVERY: Duration = Duration::from_millis(100);

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
    standing_by: Option<StandingBy<'scope>>,
    /// The last validation loss and its step.
    validated: Option<(u64, f64)>,
}

/// A checkpoint that is being written.
struct Writing<'scope> {
    step: u64,
    thread: ScopedJoinHandle<'scope, Result<PathBuf, CheckpointError>>,
}

/// A copy of the state that is written when the run is asked to stop.
struct StandingBy<'scope> {
    step: u64,
    /// Dropped when the copy is not needed any more.
    needed: Sender<()>,
    thread: ScopedJoinHandle<'scope, Option<Result<PathBuf, CheckpointError>>>,
}

impl<'scope, 'env> Saver<'scope, 'env> {
    pub fn new(scope: &'scope Scope<'scope, 'env>, saved: Saved<'env>) -> Self {
        Saver {
            scope,
            saved,
            writing: None,
            standing_by: None,
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
        if !has_room(state) {
            tracing::info!(
                "training waits for this checkpoint: the {} bytes of a copy of its state are not free",
                state.bytes()
            );
            return self.finish(state).map(drop);
        }
        let Saved {
            options, writer, ..
        } = self.saved;
        let files = self.copies(state)?;
        let record = self.record(state);
        self.writing = Some(Writing {
            step: state.step,
            thread: self
                .scope
                .spawn(move || write(writer, options, &record, files)),
        });
        Ok(())
    }

    /// Lets a copy of `state` stand by until [`Saver::stand_down`]: it is written when `stop` is set. Nothing is done where the
    /// state is saved, or is being saved, or a copy does not fit the memory.
    ///
    /// # Errors
    /// When an array cannot be read from the devices.
    pub fn stand_by(
        &mut self,
        state: &TrainingState,
        stop: &Arc<AtomicBool>,
    ) -> Result<(), TrainError> {
        let is_of = |step: u64| step == state.step;
        let is_saved = state.saved.as_ref().is_some_and(|(step, _)| is_of(*step));
        let is_written = self.writing.as_ref().is_some_and(|w| is_of(w.step));
        if is_saved || is_written || !has_room(state) {
            return Ok(());
        }
        let Saved {
            options, writer, ..
        } = self.saved;
        let files = self.copies(state)?;
        let record = self.record(state);
        let (needed, until) = mpsc::channel();
        let stop = Arc::clone(stop);
        let thread = self.scope.spawn(move || {
            loop {
                if stop.load(Ordering::Relaxed) {
                    return Some(write(writer, options, &record, files));
                }
                if until.recv_timeout(LOOK_EVERY) != Err(RecvTimeoutError::Timeout) {
                    return None;
                }
            }
        });
        self.standing_by = Some(StandingBy {
            step: state.step,
            needed,
            thread,
        });
        Ok(())
    }

    /// The checkpoint of the copy that stood by, if the run was asked to stop; the copy is dropped. One that could not be
    /// written is only warned of: the state is saved again.
    pub fn stand_down(&mut self, state: &mut TrainingState) -> Option<PathBuf> {
        let StandingBy {
            step,
            needed,
            thread,
        } = self.standing_by.take()?;
        drop(needed);
        match thread.join().unwrap_or_else(|panic| resume_unwind(panic))? {
            Ok(path) => {
                state.saved = Some((step, path.clone()));
                Some(path)
            }
            Err(error) => {
                tracing::warn!("the state before step {step} is not saved: {error}");
                None
            }
        }
    }

    /// The files of a checkpoint with copies of the arrays.
    fn copies(&self, state: &TrainingState) -> Result<Vec<CheckpointFile<'env>>, TrainError> {
        let Saved {
            session,
            options,
            base,
            ..
        } = self.saved;
        files(state, options, base, &|file| file.copied(session, state))
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

/// Whether a copy of the state fits the memory.
fn has_room(state: &TrainingState) -> bool {
    let needed = (state.bytes() as f64 * (1.0 + SPARE)) as u64;
    memory::available().is_none_or(|available| available >= needed)
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
