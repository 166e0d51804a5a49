//! A network over many rows: compiled once, run on batches of one size.

use crate::emit::DotPrecision;
use crate::graph::{Builder, Graph, GraphError, Tensor};
use crate::host_tensor::HostTensor;
use crate::lowering::Traced;
use crate::pipelines::{PartProgram, PipelineError, TakeWeight, WeightSource};
use crate::runtime::{RuntimeError, Session, Slot};
use crate::shape::Shape;
use crate::weights::{Checkpoint, match_parameters};

use super::super::EvaluateError;

/// The result of a network.
const OUTPUT: &str = "result";

/// A traced network with `N` inputs and one result, all with a row for each of the batch.
pub(super) struct Network<const N: usize> {
    root: &'static str,
    /// Names and shapes.
    inputs: [(&'static str, Shape); N],
    graph: Graph,
}

impl<const N: usize> Network<N> {
    /// Traces `declare`, which gives the result for `inputs` of these names and shapes and declares weights below `root/`.
    ///
    /// # Errors
    /// The error of `declare`.
    pub fn trace(
        root: &'static str,
        inputs: [(&'static str, Shape); N],
        declare: impl FnOnce(&Builder, &[Tensor]) -> Result<Tensor, GraphError>,
    ) -> Result<Network<N>, EvaluateError> {
        let b = Builder::new();
        let traced = || -> Result<(), GraphError> {
            let declared = inputs.iter().map(|(name, shape)| {
                let mut axes = vec![None; shape.rank()];
                axes[0] = Some("activation_batch");
                b.input(name, shape.clone(), &axes)
            });
            let declared: Vec<Tensor> = declared.collect::<Result<_, _>>()?;
            let y = declare(&b, &declared)?;
            b.output(OUTPUT, y, None)
        };
        traced().map_err(PipelineError::from)?;
        Ok(Network {
            root,
            inputs,
            graph: b.finish(),
        })
    }

    /// Compares a checkpoint with the weights of the network; it may have others.
    ///
    /// # Errors
    /// Names each that is missing, or of another shape or type.
    pub fn check(&self, checkpoint: &Checkpoint) -> Result<(), EvaluateError> {
        let weights = self.graph.weights();
        let expected: Vec<(&str, &[usize])> = weights
            .map(|(_, weight)| (weight.key(), weight.shape.dims.as_slice()))
            .collect();
        let Err(mut error) = match_parameters(&expected, checkpoint) else {
            return Ok(());
        };
        error.extra.clear();
        match error.missing.is_empty() && error.misshapen.is_empty() && error.not_float.is_empty() {
            true => Ok(()),
            false => Err(PipelineError::Mismatch(Box::new(error)).into()),
        }
    }

    /// The rows of the results for `count` rows, of which `row` gives each, a part for each input; `done` is told how many there
    /// are so far.
    ///
    /// # Errors
    /// When the network does not compile, a weight cannot be read, or what `row` fails with.
    pub fn run(
        self,
        session: &Session,
        checkpoint: &Checkpoint,
        count: usize,
        row: &mut dyn FnMut(usize) -> Result<[HostTensor; N], EvaluateError>,
        done: &mut dyn FnMut(usize),
    ) -> Result<Vec<Vec<f32>>, EvaluateError> {
        let traced = Traced::new(self.root, self.graph);
        let lowered = session.lower(&traced).map_err(RuntimeError::from);
        let lowered = lowered.map_err(PipelineError::from)?;
        let program = PartProgram::compile(session, lowered, DotPrecision::Highest)?;
        let read = |slots: &[Slot], take: &mut TakeWeight<'_>| {
            for slot in slots {
                let tensor = checkpoint.read_as(slot.key(), slot.shape.dtype)?;
                take(session.put(&tensor, &slot.spec)?)?;
            }
            Ok(())
        };
        let weights = WeightSource::Files(&read).prepare(program.stages(), &mut |_| Ok(()))?;

        let batch = self.inputs.first().map_or(1, |(_, shape)| shape.dims[0]);
        let mut results = Vec::with_capacity(count);
        while results.len() < count {
            let first = results.len();
            let end = count.min(first + batch);
            let rows: Vec<_> = (first..end).map(&mut *row).collect::<Result<_, _>>()?;
            let mut inputs = program.inputs(session);
            for (at, (name, shape)) in self.inputs.iter().enumerate() {
                let parts = rows.iter().map(|row| &row[at]);
                inputs.set(name, &filled(parts, shape)?)?;
            }
            let result = program.run_for_one(&weights, &inputs)?.to_f32_vec()?;
            let rows = result.chunks_exact((result.len() / batch).max(1));
            results.extend(rows.take(end - first).map(<[f32]>::to_vec));
            done(results.len());
        }
        Ok(results)
    }
}

/// One row below the other, the last one repeated until the batch is full.
fn filled<'a>(
    rows: impl Iterator<Item = &'a HostTensor>,
    shape: &Shape,
) -> Result<HostTensor, EvaluateError> {
    let mut data = Vec::with_capacity(shape.bytes());
    let mut last: &[u8] = &[];
    for row in rows {
        last = &row.data;
        data.extend_from_slice(last);
    }
    if !last.is_empty() {
        while data.len() < shape.bytes() {
            data.extend_from_slice(last);
        }
    }
    Ok(HostTensor::new(shape.clone(), data)?)
}
