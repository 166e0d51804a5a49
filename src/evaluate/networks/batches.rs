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

/// A traced network with one input and one result, both with a row for each of the batch.
pub(super) struct Network {
    root: &'static str,
    input: &'static str,
    /// Of the input.
    shape: Shape,
    graph: Graph,
}

impl Network {
    /// Traces `declare`, which gives the result for the input `name` of `shape` and declares weights below `root/`.
    ///
    /// # Errors
    /// The error of `declare`.
    pub fn trace(
        root: &'static str,
        (name, shape): (&'static str, Shape),
        declare: impl FnOnce(&Builder, Tensor) -> Result<Tensor, GraphError>,
    ) -> Result<Network, EvaluateError> {
        let b = Builder::new();
        let traced = || -> Result<(), GraphError> {
            let mut axes = vec![None; shape.rank()];
            axes[0] = Some("activation_batch");
            let x = b.input(name, shape.clone(), &axes)?;
            let y = declare(&b, x)?;
            b.output(OUTPUT, y, None)
        };
        traced().map_err(PipelineError::from)?;
        Ok(Network {
            root,
            input: name,
            shape,
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

    /// The rows of the results for `count` rows, of which `row` gives each; `done` is told how many there are so far.
    ///
    /// # Errors
    /// When the network does not compile, a weight cannot be read, or what `row` fails with.
    pub fn run(
        self,
        session: &Session,
        checkpoint: &Checkpoint,
        count: usize,
        row: &mut dyn FnMut(usize) -> Result<HostTensor, EvaluateError>,
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

        let batch = self.shape.dims[0];
        let mut results = Vec::with_capacity(count);
        while results.len() < count {
            let first = results.len();
            let end = count.min(first + batch);
            let rows: Vec<HostTensor> = (first..end).map(&mut *row).collect::<Result<_, _>>()?;
            let mut inputs = program.inputs(session);
            inputs.set(self.input, &filled(&rows, &self.shape)?)?;
            let result = program.run_for_one(&weights, &inputs)?.to_f32_vec()?;
            let rows = result.chunks_exact((result.len() / batch).max(1));
            results.extend(rows.take(end - first).map(<[f32]>::to_vec));
            done(results.len());
        }
        Ok(results)
    }
}

/// One row below the other, the last one repeated until the batch is full.
fn filled(rows: &[HostTensor], shape: &Shape) -> Result<HostTensor, EvaluateError> {
    let mut data = Vec::with_capacity(shape.bytes());
    for row in rows {
        data.extend_from_slice(&row.data);
    }
    if let Some(last) = rows.last() {
        for _ in rows.len()..shape.dims[0] {
            data.extend_from_slice(&last.data);
        }
    }
    Ok(HostTensor::new(shape.clone(), data)?)
}
