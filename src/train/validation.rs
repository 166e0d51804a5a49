//! The loss on samples that training never sees, with noise and timesteps that are always the same.

use std::ops::ControlFlow;

use crate::emit::DotPrecision;
use crate::host_tensor::HostTensor;
use crate::models::DiffusionModel;
use crate::pipelines::noise::NoiseGenerator;
use crate::pipelines::{PartProgram, ReadWeights, WeightSource};
use crate::runtime::Session;

use super::encoded::{EncodedDataset, StepInputs, of_size, stacked};
use super::error::TrainError;
use super::observer::ValidationLoss;
use super::samples::Weights;
use super::step::{self, StepOptions, names};

/// How many noise levels each sample is measured at: one in the middle of each of as many equal parts of the timesteps.
pub const LEVELS: usize = 4;

/// When samples are measured.
#[derive(Clone, Copy, Debug)]
pub struct ValidationOptions {
    /// How many samples are held out of training.
    pub samples: usize,
    /// Steps from one measurement to the next.
    pub every: u64,
}

/// Measures the loss on the samples that are held out.
pub(super) struct Validation<'a> {
    pub session: &'a Session,
    pub model: &'a DiffusionModel,
    pub step: &'a StepOptions,
    /// The weights of the parts that are not trained.
    pub files: Option<&'a ReadWeights<'a>>,
    pub precision: DotPrecision,
    pub dataset: &'a EncodedDataset,
    pub sizes: &'a [[usize; 2]],
    pub seed: u64,
    pub options: ValidationOptions,
    /// Compiled when they are first used, for each of `sizes`.
    pub programs: Vec<Option<PartProgram>>,
}

impl<'a> Validation<'a> {
    /// The loss with the weights as they are; nothing when `go_on`, which is asked before each batch, says to stop.
    ///
    /// # Errors
    /// When a program does not compile or fails, or an entry of the dataset cannot be read.
    pub fn measure<'w>(
        &mut self,
        weights: Weights<'w>,
        go_on: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Option<ValidationLoss>, TrainError>
    where
        'a: 'w,
    {
        let steps = self.model.scheduler.num_train_timesteps;
        let rows = self.session.devices().len();
        let part = steps / LEVELS;
        let mut sums = [0.0; LEVELS];
        for size in 0..self.sizes.len() {
            let samples = self.dataset.held_out(size);
            if samples.is_empty() {
                continue;
            }
            let program = match self.programs[size].take() {
                Some(program) => program,
                None => self.compile(size, rows)?,
            };
            let source = match self.files {
                None => WeightSource::Devices(weights),
                Some(files) => WeightSource::Trained {
                    on_devices: weights,
                    files,
                },
            };
            let prepared = source.prepare(program.stages(), &mut |_| Ok(()));
            let prepared = prepared.map_err(TrainError::validation)?;
            let work: Vec<(usize, usize)> = samples
                .iter()
                .flat_map(|sample| (0..LEVELS).map(|level| (*sample, level)))
                .collect();
            for work in work.chunks(rows) {
                if go_on().is_break() {
                    return Ok(None);
                }
                // A batch that is not full is filled up with its first sample.
                let of_row = |row: usize| *work.get(row).unwrap_or(&work[0]);
                let inputs = (0..rows).map(|row| self.row(of_row(row), part, size));
                let inputs = stacked(inputs.collect::<Result<Vec<_>, _>>()?)?;
                let mut given = program.inputs(self.session);
                for (name, tensor) in &inputs {
                    given.set(name, tensor).map_err(TrainError::validation)?;
                }
                let errors = program.run_for_one(&prepared, &given);
                let errors = errors.map_err(TrainError::validation)?.to_f64_vec()?;
                for ((_, level), error) in work.iter().zip(errors) {
                    sums[*level] += error;
                }
            }
            self.programs[size] = Some(program);
        }
        let count = self.options.samples.max(1) as f64;
        let levels = sums.into_iter().enumerate();
        Ok(Some(ValidationLoss {
            mean: sums.iter().sum::<f64>() / count / LEVELS as f64,
            levels: levels
                .map(|(level, sum)| (level * part, sum / count))
                .collect(),
        }))
    }

    fn compile(&self, size: usize, rows: usize) -> Result<PartProgram, TrainError> {
        let model = of_size(self.model, self.sizes[size]);
        let traced = step::trace_validation(&model, self.step, rows)?;
        let lowered = self.session.lower(&traced)?;
        let program = PartProgram::compile(self.session, lowered, self.precision);
        program.map_err(TrainError::validation)
    }

    /// The inputs of one sample at one level: noise is that of the sample and the level.
    fn row(
        &self,
        (sample, level): (usize, usize),
        part: usize,
        size: usize,
    ) -> Result<StepInputs, TrainError> {
        let mut row = self.dataset.held_out_row(sample)?;
        let dims = of_size(self.model, self.sizes[size]).sample_dims(1);
        let which = (sample * LEVELS + level) as u64;
        let mut noise = NoiseGenerator::new(self.seed.wrapping_add(which));
        let noise = noise.normal(dims.iter().product());
        row.insert(
            names::NOISE,
            HostTensor::from_f32(dims[1..].to_vec(), &noise)?,
        );
        let timestep = (level * part + part / 2) as i32;
        row.insert(names::TIMESTEP, HostTensor::from_i32([], &[timestep])?);
        Ok(row)
    }
}
