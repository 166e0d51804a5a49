//! The norms of gradients, and updates of weights whose moments have 8 bits.

use crate::dtype::DType;
use crate::graph::blockwise::BlockwiseAdamW;
use crate::graph::{Binary, Builder, Composite, Graph, GraphError, Op, Reduction, Tensor};

use super::super::kernel::{AdamW8bit, Kernel, call};

/// Values from which a sum of squares is the kernel's: fewer are in a processor's nearest memory, where XLA's are as fast.
const LEAST_SQUARES: usize = 1 << 15;

/// The kernel's call in place of node `i`, if that is an update or a sum of squares which one computes.
pub(super) fn claim(
    b: &Builder,
    graph: &Graph,
    i: usize,
    copies: &[Tensor],
) -> Result<Option<Tensor>, GraphError> {
    let node = &graph.nodes[i];
    let (kernel, operands) = match &node.op {
        Op::Composite {
            kind: Composite::BlockwiseAdamW(step),
            ..
        } => {
            let mut operands = node.operands.to_vec();
            let gradient = narrow(graph, operands[BlockwiseAdamW::RESULTS]);
            operands[BlockwiseAdamW::RESULTS] = gradient;
            let [weight, gradient] =
                [operands[0], gradient].map(|id| &graph.nodes[id as usize].shape);
            if !AdamW8bit::takes(weight, gradient) {
                return Ok(None);
            }
            (Kernel::AdamW8bit(AdamW8bit(*step)), operands)
        }
        Op::Reduce {
            kind: Reduction::Sum,
            ..
        } if node.shape.rank() == 0 && node.shape.dtype == DType::F32 => {
            let x = squared(graph, node.operands[0]);
            match x.filter(|x| graph.nodes[*x as usize].shape.count() >= LEAST_SQUARES) {
                Some(x) => (Kernel::SumOfSquares, vec![narrow(graph, x)]),
                None => return Ok(None),
            }
        }
        _ => return Ok(None),
    };
    let operands: Vec<Tensor> = operands.iter().map(|id| copies[*id as usize]).collect();
    call(b, kernel, &operands).map(Some)
}

/// What node `id` is the square of.
fn squared(graph: &Graph, id: u32) -> Option<u32> {
    let node = &graph.nodes[id as usize];
    match (&node.op, &node.operands[..]) {
        (Op::Binary(Binary::Mul), [x, y]) if x == y => Some(*x),
        _ => None,
    }
}

/// The node of bf16 that `id` is in `f32`, or `id` itself.
fn narrow(graph: &Graph, id: u32) -> u32 {
    let node = &graph.nodes[id as usize];
    match (&node.op, &node.operands[..]) {
        (Op::Convert(DType::F32), [x]) if graph.nodes[*x as usize].shape.dtype == DType::BF16 => *x,
        _ => id,
    }
}
