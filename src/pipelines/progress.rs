//! What a call tells while it runs, and the seconds that it takes.

use std::time::Instant;

use crate::host_tensor::HostTensor;
use crate::runtime::{Array, Prepared, Session, StagedProgram};

use super::PipelineError;
use super::batch::{Batch, Phases};
use super::denoiser::AfterStep;
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

    /// Tells of a step: what each run of the denoiser's program said of its activations, that it is done, and with `samples` what
    /// it left of a batch.
    ///
    /// # Errors
    /// When arrays cannot be read, and what the observer fails with.
    pub fn tell_step(
        &mut self,
        session: &Session,
        batch: &Batch,
        after: &AfterStep<'_>,
        samples: bool,
    ) -> Result<(), PipelineError> {
        self.tell_statistics(session, after.statistics)?;
        self.tell(Event::Step)?;
        match samples {
            true => self.tell_samples(session, batch, after.done, after.sample),
            false => Ok(()),
        }
    }

    fn tell_statistics(
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

    /// Tells the samples of a batch after `steps` steps.
    fn tell_samples(
        &mut self,
        session: &Session,
        batch: &Batch,
        steps: usize,
        samples: &Array,
    ) -> Result<(), PipelineError> {
        let samples = samples.to_host(session.mesh())?;
        let size = samples.data.len() / samples.shape.dims[0].max(1);
        for (row, data) in samples
            .data
            .chunks(size.max(1))
            .take(batch.count)
            .enumerate()
        {
            let dims = samples.shape.dims[1..].to_vec();
            let sample = HostTensor::new(samples.shape.with_dims(dims), data.to_vec())?;
            self.tell(Event::Sample {
                image: batch.start + row,
                steps,
                sample: &sample,
            })?;
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
