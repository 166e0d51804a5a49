//! Arithmetic of a graph, from shapes alone.

use super::{Graph, Op};

/// Floating-point or integer operations of all dots and convolutions that outputs depend on; a multiply and an
/// add are two. A loop counts once, whatever its trip count.
pub fn flops(graph: &Graph) -> u64 {
    let live = graph.live_nodes();
    let mut total = 0;
    for (node, live) in graph.nodes.iter().zip(live) {
        if !live {
            continue;
        }
        let operand = |i: usize| &graph.nodes[node.operands[i] as usize].shape.dims;
        total += match &node.op {
            Op::DotGeneral { dims, .. } => {
                let contracted: usize = dims.lhs_contract.iter().map(|d| operand(0)[*d]).product();
                2 * node.shape.count() as u64 * contracted as u64
            }
            Op::Convolution { dims, .. } => {
                let kernel = operand(1);
                let taps: usize = dims.rhs.spatial.iter().map(|d| kernel[*d]).product();
                let terms = taps * kernel[dims.rhs.feature];
                2 * node.shape.count() as u64 * terms as u64
            }
            Op::While { cond, body } => flops(cond) + flops(body),
            _ => 0,
        };
    }
    total
}
