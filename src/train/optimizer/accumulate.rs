//! Sums of the gradients of several batches, before they make one update.

use crate::dtype::DType;
use crate::graph::{Builder, Comparison, GraphError, Tensor, scopes};
use crate::shape::Shape;

use super::state::declare;
use super::{Trained, UpdateInputs};

type Result<T> = std::result::Result<T, GraphError>;

/// Before the name of a sum, which is 0 after every update, so that checkpoints have none.
pub const ACCUMULATED: &str = "accumulated/";
const LOSS: &str = "accumulated/loss";

/// What an update is made of.
pub(super) struct Averaged {
    pub gradients: Vec<Tensor>,
    pub loss: Tensor,
    /// Whether it is made after this batch; `None` where it is after every one.
    pub is_last: Option<Tensor>,
}

/// The means of `count` batches' gradients and losses, complete with the last one.
pub(super) fn averaged(
    b: &Builder,
    trained: &[Trained],
    gradients: Vec<Tensor>,
    inputs: UpdateInputs,
    count: usize,
) -> Result<Averaged> {
    let is_last = match (count, inputs.is_last) {
        (0 | 1, _) => {
            return Ok(Averaged {
                gradients,
                loss: inputs.loss,
                is_last: None,
            });
        }
        (_, Some(is_last)) => is_last,
        (_, None) => return Err(b.invalid("sums of gradients need to know the last batch")),
    };
    let zero = b.scalar(DType::F32, 0.0)?;
    let is_last = b.compare(Comparison::Ne, is_last, zero)?;
    let share = 1.0 / count as f64;
    let add = |b: &Builder, sum: Tensor, new: Tensor, name: &str| {
        let total = b.add(sum, b.mul_scalar(new, share)?)?;
        let nothing = b.full(&b.shape(sum), 0.0)?;
        b.output(name, b.select(is_last, nothing, total)?, Some(sum))?;
        Ok::<_, GraphError>(total)
    };
    let mut means = Vec::with_capacity(gradients.len());
    for (trained, gradient) in trained.iter().zip(gradients) {
        let b = &b.at(format!("{}/{}", scopes::OPTIMIZER, trained.name));
        let name = format!("{ACCUMULATED}{}", trained.name);
        let shape = b.shape(gradient);
        let sum = declare(b, &name, shape, &trained.logical_axes)?;
        means.push(add(b, sum, gradient, &name)?);
    }
    let loss = declare(b, LOSS, Shape::scalar(DType::F32), &[])?;
    Ok(Averaged {
        gradients: means,
        loss: add(b, loss, inputs.loss, LOSS)?,
        is_last: Some(is_last),
    })
}
