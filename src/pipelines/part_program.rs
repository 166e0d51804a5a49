//! The compiled program of one part of a model.

use crate::emit::DotPrecision;
use crate::host_tensor::HostTensor;
use crate::lowering::Traced;
use crate::runtime::{Array, Prepared, ProgramOptions, Session, StagedProgram};
use crate::shard::PartitionSpec;

use super::PipelineError;

/// The compiled program of a text encoder or of a half of the VAE, which takes its inputs by name.
pub struct PartProgram(StagedProgram);

impl PartProgram {
    /// Compiles a traced part.
    ///
    /// # Errors
    /// When it does not compile.
    pub fn compile(
        session: &Session,
        traced: &Traced,
        precision: DotPrecision,
    ) -> Result<PartProgram, PipelineError> {
        let options = ProgramOptions { precision };
        let program = StagedProgram::compile(session, traced, &options)?;
        Ok(PartProgram(program))
    }

    /// Its stages, for which weights are prepared.
    pub fn stages(&self) -> &StagedProgram {
        &self.0
    }

    /// Puts the input `name` on the devices.
    ///
    /// # Errors
    /// When the transfer fails.
    pub fn put(
        &self,
        session: &Session,
        name: &str,
        value: &HostTensor,
    ) -> Result<Array, PipelineError> {
        put(session, [&self.0], name, value)
    }

    /// The results for `inputs`, which are all that are not weights, on the host.
    ///
    /// # Errors
    /// When an input or a weight is missing or has another shape, or the program fails.
    pub fn run(
        &self,
        session: &Session,
        weights: &Prepared<'_>,
        inputs: &[(&str, &Array)],
    ) -> Result<Vec<HostTensor>, PipelineError> {
        let find = |name: &str| {
            let given = inputs.iter().find(|(input, _)| *input == name);
            given.map(|(_, array)| *array).or_else(|| weights.get(name))
        };
        let results = self.0.step().call(&find, Vec::new())?;
        let to_host = |array: &Array| Ok(array.to_host(session.mesh())?);
        results.iter().map(to_host).collect()
    }
}

/// Puts an input on the devices, as the one of `programs` that has it wants it.
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
