//! The compiled program of one part of a model.

use crate::emit::DotPrecision;
use crate::host_tensor::HostTensor;
use crate::lowering::Lowered;
use crate::runtime::{Array, Prepared, ProgramOptions, Session, StagedProgram};

use super::PipelineError;
use super::inputs::Inputs;

/// The compiled program of a text encoder or of a half of the VAE, which takes its inputs by name.
pub struct PartProgram(StagedProgram);

impl PartProgram {
    /// Compiles a part that was lowered for `session`.
    ///
    /// # Errors
    /// When it does not compile.
    pub fn compile(
        session: &Session,
        lowered: Lowered,
        precision: DotPrecision,
    ) -> Result<PartProgram, PipelineError> {
        let options = ProgramOptions { precision };
        let program = StagedProgram::compile(session, lowered, &options)?;
        Ok(PartProgram(program))
    }

    /// Its stages, for which weights are prepared.
    pub fn stages(&self) -> &StagedProgram {
        &self.0
    }

    /// Inputs of the program, without values yet.
    pub fn inputs<'a>(&'a self, session: &'a Session) -> Inputs<'a> {
        Inputs::new(session, [&self.0])
    }

    /// The results for `inputs`, which are all that are not weights, on the host.
    ///
    /// # Errors
    /// When an input or a weight is missing or has another shape, or the program fails.
    pub fn run(
        &self,
        weights: &Prepared<'_>,
        inputs: &Inputs<'_>,
    ) -> Result<Vec<HostTensor>, PipelineError> {
        let find = |name: &str| inputs.get(name).or_else(|| weights.get(name));
        let results = self.0.step().call(&find, Vec::new())?;
        let to_host = |array: &Array| Ok(array.to_host(inputs.session().mesh())?);
        results.iter().map(to_host).collect()
    }

    /// The result of a program that has one.
    ///
    /// # Errors
    /// As [`PartProgram::run`], and when the program has another number of results.
    pub fn run_for_one(
        &self,
        weights: &Prepared<'_>,
        inputs: &Inputs<'_>,
    ) -> Result<HostTensor, PipelineError> {
        let results = self.run(weights, inputs)?;
        let [result] = <[HostTensor; 1]>::try_from(results).map_err(|results| {
            PipelineError::Request(format!(
                "a part of the model has {} results; expected 1",
                results.len()
            ))
        })?;
        Ok(result)
    }
}
