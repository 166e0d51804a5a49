//! Where a program's weights come from.

use crate::runtime::{Array, Prepared, RuntimeError, Slot, StagedProgram, Value};

use super::PipelineError;

/// Takes the array of the next weight.
pub type TakeWeight<'a> = dyn FnMut(Array) -> Result<(), PipelineError> + 'a;

/// Reads weights, puts them on the devices and gives their arrays away in the order asked for.
pub type ReadWeights<'a> = dyn Fn(&[Slot], &mut TakeWeight<'_>) -> Result<(), PipelineError> + 'a;

/// Where weights are when a program needs them.
pub enum WeightSource<'a> {
    /// On the devices already.
    Devices(&'a dyn Fn(&str) -> Option<&'a Array>),
    /// In files.
    Files(&'a ReadWeights<'a>),
}

impl<'a> WeightSource<'a> {
    /// The weights of `program` as its stages take them.
    ///
    /// # Errors
    /// When a weight is missing or cannot be read, or a program that prepares it fails.
    pub fn prepare(&self, program: &StagedProgram) -> Result<Prepared<'a>, PipelineError> {
        let mut preparation = program.preparation();
        match self {
            WeightSource::Devices(lookup) => {
                for slot in program.weights() {
                    let Some(array) = lookup(&slot.name) else {
                        return Err(RuntimeError::MissingWeight(slot.name.clone()).into());
                    };
                    preparation.take(Value::Borrow(array))?;
                }
            }
            WeightSource::Files(read) => read(program.weights(), &mut |array| {
                Ok(preparation.take(Value::Donate(array))?)
            })?,
        }
        Ok(preparation.finish()?)
    }
}
