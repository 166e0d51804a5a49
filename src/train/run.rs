//! The training loop: batches in, metrics and checkpoints out.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::data::Prefetcher;
use crate::dtype::DType;
use crate::graph::{Graph, InputKind, flops};
use crate::host_tensor::HostTensor;
use crate::metrics::{self, MetricsWriter, PageSources, StepReport, write_page};
use crate::quant::ROUNDING_KEY;
use crate::runtime::{Array, Program, Session, Value};
use crate::shape::Shape;
use crate::weights::source::ModelSource;

use super::checkpoint::CheckpointWriter;
use super::encoded::StepInputs;
use super::error::TrainError;
use super::feed::Feed;
use super::observer::{TrainEvent, TrainObserver};
use super::samples::Samples;
use super::saving::{Saved, Saver};
use super::schedule::LearningRate;
use super::state::{RunOptions, TrainingState};
use super::step::names;
use super::validation::Validation;

/// The outputs of a run's metrics.
#[derive(Clone, Debug, Default)]
pub struct MetricsFiles {
    /// Stands in every JSON line.
    pub run_name: String,
    /// The JSON lines file; an existing one is appended to.
    pub jsonl: Option<PathBuf>,
    /// The folder for TensorBoard's event files.
    pub tensorboard: Option<PathBuf>,
    /// The page of the run, which is made of the JSON lines.
    pub page: Option<PathBuf>,
    /// Steps between two flushes; 0 flushes at the end only.
    pub flush_every: u64,
}

/// How a run ended, errors apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done {
        checkpoint: PathBuf,
    },
    /// The observer asked to stop; the state is saved.
    Stopped {
        checkpoint: PathBuf,
        step: u64,
    },
    /// The newest checkpoint has all steps already.
    NothingToDo {
        checkpoint: PathBuf,
        step: u64,
    },
}

/// A compiled training step.
pub(super) struct StepProgram {
    pub graph: Graph,
    pub program: Program,
    /// The time that its model's arithmetic would take at the peak of the devices, in seconds, where that is known.
    pub ideal_seconds: Option<f64>,
}

/// A compiled training step with its data, and where its results go.
pub(super) struct TrainingLoop<'a, 'o> {
    pub session: &'a Session,
    /// For each size of images. They differ in their data alone.
    pub programs: &'a [StepProgram],
    pub feed: Arc<Feed>,
    pub options: &'a RunOptions,
    /// The model that training started from, if it was not a new one.
    pub base: Option<&'a ModelSource>,
    pub metrics: MetricsWriter,
    pub files: &'a MetricsFiles,
    pub samples: Option<Samples<'a>>,
    pub validation: Option<Validation<'a>>,
    /// Set from another thread when the run is to stop.
    pub stop: Option<Arc<AtomicBool>>,
    pub observer: &'a mut TrainObserver<'o>,
    /// Whether the observer has asked to stop.
    pub is_stopped: bool,
}

impl TrainingLoop<'_, '_> {
    /// Trains from the state's step to the last, or until the observer asks to stop. Checkpoints go to `checkpoints`.
    ///
    /// The state of step `n` depends on the configuration and `n` alone: batches, noise and rounding are made from
    /// the seed and the step, so a run that was stopped and continued computes what one without the pause would have.
    ///
    /// # Errors
    /// When data cannot be read, a program fails, a file cannot be written, or steps keep failing to be finite.
    /// [`TrainError::Ended`] says where the steps before the error are saved.
    pub fn run(
        mut self,
        mut state: TrainingState,
        checkpoints: CheckpointWriter,
    ) -> Result<Outcome, TrainError> {
        let first = state.step;
        let writer = Mutex::new(checkpoints);
        let saved = Saved {
            session: self.session,
            options: self.options,
            base: self.base,
            writer: &writer,
        };
        std::thread::scope(|scope| {
            let mut saver = Saver::new(scope, saved);
            self.steps(&mut state, &mut saver).map_err(|cause| {
                if state.step == first || !state.is_whole() {
                    return cause;
                }
                // The first of the two errors is the one to fix; a failed save leaves older checkpoints intact.
                let checkpoint = match cause {
                    TrainError::NotFinite { .. } | TrainError::Checkpoint(_) => return cause,
                    _ => saver.finish(&mut state),
                };
                match checkpoint {
                    Ok(checkpoint) => TrainError::Ended {
                        cause: Box::new(cause),
                        checkpoint,
                    },
                    Err(error) => {
                        tracing::warn!("the steps since the last checkpoint are lost: {error}");
                        cause
                    }
                }
            })
        })
    }

    fn steps(
        &mut self,
        state: &mut TrainingState,
        saver: &mut Saver<'_, '_>,
    ) -> Result<Outcome, TrainError> {
        let options = self.options;
        let (first, total) = (state.step, options.max_train_steps);
        self.tell(TrainEvent::Started { first, total });
        let devices = self.session.devices().len() as f64;
        let tflops = self
            .programs
            .iter()
            .map(|of_size| flops(&of_size.graph) as f64 / devices / 1e12);
        let tflops: Vec<f64> = tflops.collect();
        let feed = Arc::clone(&self.feed);
        let mut ahead: Prefetcher<(usize, StepInputs), TrainError> =
            Prefetcher::spawn(state.next_batch, 2, move |batch| feed.inputs(batch))?;
        let (mut failed_in_a_row, mut last_seconds) = (0, 0.0);
        while state.step < total {
            let written = saver.poll(state)?;
            self.tell_saved(written);
            if self.is_stopped {
                let checkpoint = self.save(state, saver)?;
                return Ok(Outcome::Stopped {
                    checkpoint,
                    step: state.step,
                });
            }
            let step = state.step;
            if let (Some(stop), true) = (&self.stop, last_seconds > self.options.copy_after_seconds)
            {
                saver.stand_by(state, stop)?;
            }
            let result = self.take_step(state, &mut ahead, &tflops);
            let written = saver.stand_down(state);
            self.tell_saved(written);
            let result = result?;
            last_seconds = result.seconds;
            if result.finite {
                failed_in_a_row = 0;
                state.productive += result.seconds;
            } else {
                failed_in_a_row += 1;
                state.skipped += 1;
                self.tell(TrainEvent::Skipped {
                    step,
                    loss: result.loss,
                    grad_norm: result.grad_norm,
                    skipped: state.skipped,
                });
            }
            self.report(&result, state)?;
            if failed_in_a_row > options.max_nonfinite_steps {
                // Skipped updates left the state as it was before the first of them.
                let checkpoint = self.save(state, saver)?;
                return Err(TrainError::NotFinite {
                    step,
                    count: failed_in_a_row,
                    checkpoint,
                });
            }
            self.save_and_sample(state, saver)?;
        }
        let checkpoint = self.save(state, saver)?;
        Ok(Outcome::Done { checkpoint })
    }

    /// Measures, begins the checkpoint and draws the sample images that are due between two steps. The last step is saved
    /// separately. Measuring and drawing end early when the observer asks to stop, so that the state is saved soon.
    fn save_and_sample(
        &mut self,
        state: &mut TrainingState,
        saver: &mut Saver<'_, '_>,
    ) -> Result<(), TrainError> {
        let step = state.step;
        let is_last = step == self.options.max_train_steps;
        let is_due = |every: u64| step.is_multiple_of(every);
        // Made once where both are due.
        let mut apart = None;
        if let Some(validation) = &mut self.validation
            && (is_last || is_due(validation.options.every))
        {
            let apart = apart.insert(state.apart(self.session)?);
            let weights = &|name: &str| apart.get(name).or_else(|| state.weight(name));
            let measured =
                validation.measure(weights, &mut || (self.observer)(TrainEvent::Validating))?;
            let Some(loss) = measured else {
                self.is_stopped = true;
                return Ok(());
            };
            saver.validated(step, loss.mean);
            let of_level = |(from, loss): &(usize, f64)| {
                (
                    format!("{}_from_{from}", metrics::names::VALIDATION_LOSS),
                    *loss,
                )
            };
            let levels: Vec<(String, f64)> = loss.levels.iter().map(of_level).collect();
            let mut scalars = vec![(metrics::names::VALIDATION_LOSS, loss.mean)];
            scalars.extend(levels.iter().map(|(name, loss)| (name.as_str(), *loss)));
            self.metrics.scalars(step, &scalars)?;
            let loss = &loss;
            self.tell(TrainEvent::Validated { step, loss });
        }
        if !is_last && self.options.checkpoint_every.is_some_and(is_due) {
            let written = saver.wait(state)?;
            self.tell_saved(written);
            self.flush()?;
            self.tell(TrainEvent::Saving);
            saver.begin(state)?;
        }
        if let Some(samples) = &mut self.samples
            && (is_last || is_due(samples.options.every))
        {
            let apart = match apart {
                Some(apart) => apart,
                None => state.apart(self.session)?,
            };
            let weights = &|name: &str| apart.get(name).or_else(|| state.weight(name));
            let drawn =
                samples.make(step, weights, &mut || (self.observer)(TrainEvent::Sampling))?;
            let Some(png) = drawn else {
                self.is_stopped = true;
                return Ok(());
            };
            self.metrics.image(step, "samples", &png)?;
            self.tell(TrainEvent::Sampled { step });
        }
        Ok(())
    }

    /// Flushes the metrics, and writes the page of the run anew. One that cannot be written ends no run.
    fn flush(&mut self) -> Result<(), TrainError> {
        self.metrics.flush()?;
        if let (Some(page), Some(jsonl)) = (&self.files.page, &self.files.jsonl) {
            let sources = PageSources {
                run_name: &self.files.run_name,
                jsonl,
                samples: self
                    .samples
                    .as_ref()
                    .map(|samples| samples.options.dir.as_path()),
            };
            if let Err(error) = write_page(page, &sources) {
                tracing::warn!("the page of the run is not written: {error}");
            }
        }
        Ok(())
    }

    fn tell_saved(&mut self, written: Option<PathBuf>) {
        if let Some(checkpoint) = &written {
            self.tell(TrainEvent::Saved { checkpoint });
        }
    }

    fn tell(&mut self, event: TrainEvent<'_>) {
        self.is_stopped |= (self.observer)(event).is_break();
    }

    /// Tells metrics and observer of a step.
    fn report(&mut self, result: &StepResult, state: &TrainingState) -> Result<(), TrainError> {
        let tflops = result.tflops;
        let samples = self.feed.batch_size() as u64 * self.options.gradient_accumulation_steps;
        let rate = tflops / result.seconds;
        let mut scalars = vec![
            (metrics::names::STEP_TIME_SECONDS, result.seconds),
            (metrics::names::PER_DEVICE_TFLOPS, tflops),
            (metrics::names::PER_DEVICE_TFLOPS_PER_SEC, rate),
            (
                metrics::names::SAMPLES_PER_SEC,
                samples as f64 / result.seconds,
            ),
            (metrics::names::CURRENT_LEARNING_RATE, result.learning_rate),
            (metrics::names::LOSS, result.loss),
            (metrics::names::GRAD_NORM, result.grad_norm),
            (metrics::names::SKIPPED_STEPS, state.skipped as f64),
            (metrics::names::DATA_WAIT_SECONDS, result.data_wait),
            (metrics::names::GOODPUT, state.goodput()),
        ];
        if let Some(ideal) = result.ideal_seconds {
            let name = metrics::names::MODEL_FLOPS_UTILIZATION;
            scalars.push((name, ideal / result.seconds));
        }
        let of_group = |(group, norm): (&String, &f64)| {
            let name = format!("{}_{group}", metrics::names::GRAD_NORM);
            (name, *norm)
        };
        let groups: Vec<(String, f64)> = result.group_norms.iter().map(of_group).collect();
        scalars.extend(groups.iter().map(|(name, norm)| (name.as_str(), *norm)));
        let others = self.other_rates(result.step);
        scalars.extend(others.iter().map(|(name, rate)| (name.as_str(), *rate)));
        self.metrics.scalars(result.step, &scalars)?;
        self.tell(TrainEvent::Step(&StepReport {
            step: result.step,
            seconds: result.seconds,
            tflops_per_device: rate,
            loss: result.loss,
            samples,
        }));
        Ok(())
    }

    /// Saves the last checkpoint of the run, and flushes the metrics so that both tell of the same steps.
    fn save(
        &mut self,
        state: &mut TrainingState,
        saver: &mut Saver<'_, '_>,
    ) -> Result<PathBuf, TrainError> {
        self.flush()?;
        self.tell(TrainEvent::Saving);
        let written = saver.wait(state)?;
        self.tell_saved(written.filter(|_| state.saved.as_ref().map(|s| s.0) != Some(state.step)));
        saver.finish(state)
    }

    /// Runs one step on the next batches; `state` has its results, and its counter is one further.
    fn take_step(
        &self,
        state: &mut TrainingState,
        batches: &mut Prefetcher<(usize, StepInputs), TrainError>,
        tflops: &[f64],
    ) -> Result<StepResult, TrainError> {
        let count = self.options.gradient_accumulation_steps;
        let mut result = StepResult {
            step: state.step,
            seconds: 0.0,
            tflops: 0.0,
            learning_rate: self.options.learning_rate.at(state.step),
            loss: 0.0,
            grad_norm: f64::NAN,
            group_norms: BTreeMap::new(),
            data_wait: 0.0,
            ideal_seconds: self
                .programs
                .iter()
                .all(|p| p.ideal_seconds.is_some())
                .then_some(0.0),
            finite: false,
        };
        let mut loss = 0.0;
        for at in 0..count {
            let start = Instant::now();
            let (size, inputs) = batches.next()?;
            result.data_wait += start.elapsed().as_secs_f64();
            result.tflops += tflops[size];
            let of_size = &self.programs[size];
            result.ideal_seconds = result
                .ideal_seconds
                .zip(of_size.ideal_seconds)
                .map(|(sum, own)| sum + own);
            let start = Instant::now();
            let batch = BatchOfStep {
                number: state.next_batch + at,
                step: state.step,
                is_last: at + 1 == count,
                learning_rate: result.learning_rate,
            };
            let told = self.run_program(of_size, state, &inputs, batch)?;
            if batch.is_last {
                // The arrays are the next step's from here on, also if its results cannot be read.
                state.step += 1;
                state.next_batch += count;
            }
            for (name, array) in told {
                let value = array.to_host(self.session.mesh())?.to_f64_vec()?[0];
                match (name, name.strip_prefix(names::GROUP_NORM)) {
                    (names::LOSS, _) => loss += value,
                    (names::GRAD_NORM, _) => result.grad_norm = value,
                    (names::FINITE, _) => result.finite = value != 0.0,
                    (_, Some(group)) => {
                        result.group_norms.insert(group.replace('/', "."), value);
                    }
                    (other, None) => return Err(TrainError::UnknownOutput(other.to_string())),
                }
            }
            result.seconds += start.elapsed().as_secs_f64();
        }
        result.loss = loss / count as f64;
        Ok(result)
    }

    /// Runs the program on one batch: `state` has its results, but for those that are told.
    fn run_program<'p>(
        &self,
        of_size: &'p StepProgram,
        state: &mut TrainingState,
        inputs: &StepInputs,
        batch: BatchOfStep,
    ) -> Result<Vec<(&'p str, Array)>, TrainError> {
        let mut given = self.step_data(of_size, inputs, batch)?;
        for (index, array) in given.iter_mut().enumerate() {
            if array.is_none() && !state.frozen[index] {
                *array = state.arrays[index].take();
            }
        }
        let mut arguments = Vec::with_capacity(given.len());
        for (index, array) in given.into_iter().enumerate() {
            arguments.push(match (array, &state.arrays[index]) {
                (Some(array), _) => Value::Donate(array),
                (None, Some(frozen)) => Value::Borrow(frozen),
                (None, None) => {
                    let name = state.inputs[index].name.clone();
                    return Err(TrainError::UnknownInput(name));
                }
            });
        }
        let results = of_size.program.run(arguments)?;
        let mut told = Vec::new();
        for (array, output) in results.into_iter().zip(&of_size.graph.outputs) {
            match output.alias {
                Some(input) => state.arrays[input] = Some(array),
                None => told.push((output.name.as_str(), array)),
            }
        }
        Ok(told)
    }

    /// The step's data on the devices, one for each input of the program: the batch, the keys of the random numbers and
    /// the learning rate. `None` for weights and state.
    fn step_data(
        &self,
        of_size: &StepProgram,
        inputs: &StepInputs,
        batch: BatchOfStep,
    ) -> Result<Vec<Option<Array>>, TrainError> {
        let [key, rounding] = keys(self.options.seed, batch.number);
        let words =
            |w: [u32; 2]| HostTensor::from_f64(Shape::new(DType::U32, [2]), &w.map(f64::from));
        let declared = &of_size.graph.inputs;
        let mut data = Vec::with_capacity(declared.len());
        for (input, slot) in declared.iter().zip(of_size.program.inputs()) {
            let host = match (&input.kind, input.name.as_str()) {
                (InputKind::Data, names::KEY) => words(key)?,
                (InputKind::Data, ROUNDING_KEY) => words(rounding)?,
                (InputKind::Data, names::LEARNING_RATE) => {
                    HostTensor::from_f32([], &[batch.learning_rate as f32])?
                }
                (InputKind::Data, names::IS_LAST) => {
                    HostTensor::from_f32([], &[f32::from(u8::from(batch.is_last))])?
                }
                (InputKind::Data, name) => match (self.peak(name), inputs.get(name)) {
                    (Some(peak), _) => {
                        let rate = self.rate(peak, batch.step) as f32;
                        HostTensor::from_f32([], &[rate])?
                    }
                    (None, Some(tensor)) => tensor.clone(),
                    (None, None) => return Err(TrainError::UnknownInput(name.to_string())),
                },
                (InputKind::Weight(_) | InputKind::State, _) => {
                    data.push(None);
                    continue;
                }
            };
            data.push(Some(self.session.put(&host, &slot.spec)?));
        }
        Ok(data)
    }

    /// The highest learning rate that an input is, of what has another than the denoiser.
    fn peak(&self, input: &str) -> Option<f64> {
        let mut text = names::TEXT_LEARNING_RATES.into_iter();
        match text.position(|name| name == input) {
            Some(which) => Some(self.options.text_learning_rates[which]),
            None => {
                (input == names::TOKEN_LEARNING_RATE).then_some(self.options.token_learning_rate)
            }
        }
    }

    /// The learning rate in step `step` of what has `peak` in place of the denoiser's.
    fn rate(&self, peak: f64, step: u64) -> f64 {
        let rate = LearningRate {
            peak,
            ..self.options.learning_rate
        };
        rate.at(step)
    }

    /// The learning rates of step `step` that are not the denoiser's, by the names of their scalars.
    fn other_rates(&self, step: u64) -> Vec<(String, f64)> {
        let inputs = self.programs.first().map(|of_size| &of_size.graph.inputs);
        let rates = inputs.into_iter().flatten().filter_map(|input| {
            let of = input.name.strip_prefix(names::LEARNING_RATE)?;
            let rate = self.rate(self.peak(&input.name)?, step);
            Some((
                format!("{}{of}", metrics::names::CURRENT_LEARNING_RATE),
                rate,
            ))
        });
        rates.collect()
    }
}

/// One of the batches of a step.
#[derive(Clone, Copy)]
struct BatchOfStep {
    /// Counted over all steps.
    number: u64,
    step: u64,
    is_last: bool,
    learning_rate: f64,
}

/// The reported results of one step.
struct StepResult {
    step: u64,
    /// From the batch on the host to the loss on the host.
    seconds: f64,
    /// Of each device.
    tflops: f64,
    learning_rate: f64,
    loss: f64,
    grad_norm: f64,
    /// Of each group of weights, if there are several.
    group_norms: BTreeMap<String, f64>,
    /// Seconds that passed before the batches were there.
    data_wait: f64,
    /// As [`StepProgram::ideal_seconds`], of all batches.
    ideal_seconds: Option<f64>,
    finite: bool,
}

/// The two keys of a batch: words of a ChaCha stream that depends on its seed and number alone.
fn keys(seed: u64, batch: u64) -> [[u32; 2]; 2] {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(batch);
    let mut word = || rng.next_u32();
    [[word(), word()], [word(), word()]]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_differ_by_step_and_seed_and_repeat() {
        assert_eq!(keys(1, 5), keys(1, 5));
        assert_ne!(keys(1, 5), keys(1, 6));
        assert_ne!(keys(1, 5), keys(2, 5));
        assert_ne!(keys(1, 5)[0], keys(1, 5)[1]);
    }
}
