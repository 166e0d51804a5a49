//! Arithmetic of a graph, from shapes alone.

use super::{Graph, Op};

/// Floating-point or integer operations of all dots and convolutions that outputs depend on; a multiply and an
/// add are two. A loop whose trips are not known counts once. Counts past 64 bits stay at the largest.
pub fn flops(graph: &Graph) -> u64 {
    let live = graph.live_nodes();
    let mut total = 0u64;
    for (node, live) in graph.nodes.iter().zip(live) {
        if !live {
            continue;
        }
        let operand = |i: usize| &graph.nodes[node.operands[i] as usize].shape.dims;
        let multiplied = |terms: usize| {
            let each = (terms as u64).saturating_mul(2);
            each.saturating_mul(node.shape.count() as u64)
        };
        total = total.saturating_add(match &node.op {
            Op::DotGeneral { dims, .. } => {
                let contracted: usize = dims.lhs_contract.iter().map(|d| operand(0)[*d]).product();
                multiplied(contracted)
            }
            Op::Convolution { dims, .. } => {
                let kernel = operand(1);
                let taps: usize = dims.rhs.spatial.iter().map(|d| kernel[*d]).product();
                multiplied(taps * kernel[dims.rhs.feature])
            }
            Op::Composite { body, .. } => flops(body),
            Op::CustomCall(call) => {
                let shape = |id: &u32| &graph.nodes[*id as usize].shape;
                let operands: Vec<_> = node.operands.iter().map(shape).collect();
                call.flops(&operands, &node.shape)
            }
            Op::While { cond, body } => {
                let trip = flops(cond).saturating_add(flops(body));
                trip.saturating_mul(node.op.trips().unwrap_or(1))
            }
            _ => 0,
        });
    }
    total
}
