//! The gated GELU and its derivative, as training steps have them.

use std::sync::Arc;

use crate::graph::{Builder, Composite, Graph, Node, Op, Tensor};

use super::super::{Features, GatedGelu};
use super::{Result, is_split};

/// Whether [`super::claim_training`] may take a composite: the gated GELU of bf16 rows that make whole tiles, and its derivative. What
/// stays whole and is not taken after all may keep equal blocks from being a loop.
pub(super) fn is_claimed(kind: &Composite, body: &Graph) -> bool {
    let is_gated = matches!(kind.layer().0, Composite::GatedGelu);
    let x = body.inputs.first().map(|input| &input.shape);
    is_gated && x.is_some_and(GatedGelu::takes)
}

/// The kernel of what [`is_claimed`] says yes to, where the devices compute `parts` parts of the batch; `None` where there is none.
pub(super) fn gated(
    b: &Builder,
    node: &Node,
    kind: &Composite,
    copies: &[Tensor],
    parts: usize,
    features: Features,
) -> Result<Option<Tensor>> {
    let copy = |id: u32| copies[id as usize];
    let kernel = GatedGelu {
        derivative: kind.layer().1.is_some(),
        memory: features.kernel_memory,
    };
    let x = b.shape(copy(node.operands[0]));
    let both = x.dims.last().copied().unwrap_or(0);
    let rows = x.count() / both.max(1);
    if !is_split(&node.shape, parts) || !kernel.fits(rows / parts, both / 2) {
        return Ok(None);
    }
    let operands = node.operands.iter().map(|id| {
        let operand = copy(*id);
        let columns = b.dims(operand).last().copied().unwrap_or(1);
        b.reshape(operand, &[1, rows, columns])
    });
    let operands = operands.collect::<Result<Vec<Tensor>>>()?;
    let y = b.push(Op::CustomCall(Arc::new(kernel)), &operands)?;
    b.reshape(y, &node.shape.dims).map(Some)
}
