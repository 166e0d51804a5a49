//! What a call tells while it runs, and the seconds that it takes.

use std::time::Instant;

use crate::runtime::{Array, Prepared, Session, StagedProgram};

use super::PipelineError;
use super::batch::Phases;
use super::observer::{Event, Observer, Phase, enter};
use super::weights::WeightSource;

/// The observer of a call and its seconds so far.
pub(super) struct Progress<'o, 'i> {
    pub observer: &'o mut Observer<'i>,
    pub phases: Phases,
}

impl Progress<'_, '_> {
    /// Tells of a phase.
    ///
    /// # Errors
    /// What the observer fails with.
    pub fn enter(&mut self, phase: Phase<'_>) -> Result<(), PipelineError> {
        enter(self.observer, phase)
    }

    /// Tells of anything else.
    ///
    /// # Errors
    /// What the observer fails with.
    pub fn tell(&mut self, event: Event<'_>) -> Result<(), PipelineError> {
        (self.observer)(event).map_err(PipelineError::Observer)
    }

    /// Tells what each run of a denoiser's program said of its activations.
    ///
    /// # Errors
    /// When they cannot be read, and what the observer fails with.
    pub fn tell_statistics(
        &mut self,
        session: &Session,
        runs: &[Vec<Array>],
    ) -> Result<(), PipelineError> {
        for results in runs {
            let results = results.iter().map(|array| array.to_host(session.mesh()));
            let results = results.collect::<Result<Vec<_>, _>>()?;
            self.tell(Event::Statistics(&results))?;
        }
        Ok(())
    }

    /// The weights of `program` as its stages take them.
    ///
    /// # Errors
    /// As [`WeightSource::prepare`].
    pub fn prepare<'w>(
        &mut self,
        weights: &WeightSource<'w>,
        program: &StagedProgram,
    ) -> Result<Prepared<'w>, PipelineError> {
        let start = Instant::now();
        let prepared = weights.prepare(program, self.observer)?;
        self.phases.load += start.elapsed().as_secs_f64();
        Ok(prepared)
    }
}
