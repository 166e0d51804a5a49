//! Where a program's weights come from.

use crate::runtime::{Array, Prepared, RuntimeError, Slot, StagedProgram, Value};

use super::PipelineError;
use super::observer::{Event, Observer, Phase, enter};

/// Takes the array of the next weight.
pub type TakeWeight<'a> = dyn FnMut(Array) -> Result<(), PipelineError> + 'a;

/// Reads weights, puts them on the devices and gives their arrays away in the order asked for.
pub type ReadWeights<'a> = dyn Fn(&[Slot], &mut TakeWeight<'_>) -> Result<(), PipelineError> + 'a;

/// Where weights are when a program needs them.
#[derive(Clone, Copy)]
pub enum WeightSource<'a> {
    /// On the devices already.
    Devices(&'a dyn Fn(&str) -> Option<&'a Array>),
    /// In files.
    Files(&'a ReadWeights<'a>),
    /// Those of one part of the model on the devices, the others in files.
    Trained {
        on_devices: &'a dyn Fn(&str) -> Option<&'a Array>,
        files: &'a ReadWeights<'a>,
    },
}

impl<'a> WeightSource<'a> {
    /// The weights of `program` as its stages take them.
    ///
    /// # Errors
    /// When a weight is missing or cannot be read, or a program that prepares it fails; what `observer` fails with.
    pub fn prepare(
        &self,
        program: &StagedProgram,
        observer: &mut Observer<'_>,
    ) -> Result<Prepared<'a>, PipelineError> {
        let mut preparation = program.preparation();
        let first = program.weights().first();
        let from = match *self {
            WeightSource::Trained { on_devices, files } => {
                match first.is_none_or(|slot| on_devices(&slot.name).is_some()) {
                    true => WeightSource::Devices(on_devices),
                    false => WeightSource::Files(files),
                }
            }
            other => other,
        };
        match from {
            WeightSource::Devices(lookup) => {
                for slot in program.weights() {
                    let Some(array) = lookup(&slot.name) else {
                        return Err(RuntimeError::MissingWeight(slot.name.clone()).into());
                    };
                    preparation.take(Value::Borrow(array))?;
                }
            }
            WeightSource::Files(read) | WeightSource::Trained { files: read, .. } => {
                let slots = program.weights();
                let sizes = || slots.iter().map(|slot| slot.shape.bytes() as u64);
                let part = slots.first().and_then(|slot| slot.name.split('/').next());
                let part = part.unwrap_or_default();
                let bytes = sizes().sum();
                enter(observer, Phase::Read { part, bytes })?;
                let mut sizes = sizes();
                read(slots, &mut |array| {
                    preparation.take(Value::Donate(array))?;
                    let bytes = sizes.next().unwrap_or_default();
                    observer(Event::Read { bytes }).map_err(PipelineError::Observer)
                })?;
            }
        }
        Ok(preparation.finish()?)
    }
}
