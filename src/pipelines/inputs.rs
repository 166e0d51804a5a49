//! The inputs of programs, on the devices.

use std::collections::HashMap;

use crate::host_tensor::HostTensor;
use crate::runtime::{Array, Session, StagedProgram};
use crate::shard::PartitionSpec;

use super::PipelineError;

/// Values of inputs of one or more programs, by the inputs' names.
pub struct Inputs<'a> {
    session: &'a Session,
    programs: Vec<&'a StagedProgram>,
    arrays: HashMap<String, Array>,
}

impl<'a> Inputs<'a> {
    /// No values yet.
    pub fn new(
        session: &'a Session,
        programs: impl IntoIterator<Item = &'a StagedProgram>,
    ) -> Inputs<'a> {
        Inputs {
            session,
            programs: programs.into_iter().collect(),
            arrays: HashMap::new(),
        }
    }

    /// The session whose devices have the values.
    pub(super) fn session(&self) -> &Session {
        self.session
    }

    /// Puts the value of the input `name` on the devices, in place of an earlier one.
    ///
    /// # Errors
    /// When the transfer fails.
    pub fn set(&mut self, name: &str, value: &HostTensor) -> Result<(), PipelineError> {
        let array = put(self.session, self.programs.iter().copied(), name, value)?;
        self.arrays.insert(name.to_owned(), array);
        Ok(())
    }

    /// Adds values that a program computed.
    pub(super) fn extend(&mut self, arrays: HashMap<String, Array>) {
        self.arrays.extend(arrays);
    }

    /// The value of the input `name`.
    pub fn get(&self, name: &str) -> Option<&Array> {
        self.arrays.get(name)
    }
}

/// Puts a value on the devices, sharded as the first of `programs` with the input `name` takes it.
pub(super) fn put<'p>(
    session: &Session,
    programs: impl IntoIterator<Item = &'p StagedProgram>,
    name: &str,
    value: &HostTensor,
) -> Result<Array, PipelineError> {
    let slot = programs.into_iter().find_map(|program| program.input(name));
    let spec = slot.map_or_else(
        || PartitionSpec::replicated(value.shape.rank()),
        |slot| slot.spec.clone(),
    );
    Ok(session.put(value, &spec)?)
}
