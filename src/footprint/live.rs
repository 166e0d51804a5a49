//! The most memory that intermediate values take at once.

use crate::graph::{Graph, Op};

/// Where most is in use, and how much.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Peak {
    pub bytes: u64,
    /// The node that is computed then.
    pub node: Option<usize>,
}

/// The peak of all values but inputs and constants, if nodes run in their order. `parts` says into how many parts the
/// dimensions of values are split.
///
/// Views and values that compilers compute where they are used take no memory, but what they are made of stays for
/// them. Results that take over an input's memory take none. The bodies of loops are not looked at.
pub(super) fn peak(graph: &Graph, parts: &[Vec<usize>]) -> Peak {
    let live = graph.live_nodes();
    let is_kept = kept(graph, &live);
    let mut in_place = vec![false; graph.nodes.len()];
    // The last node that needs each value.
    let mut last = vec![0; graph.nodes.len()];
    for output in &graph.outputs {
        let node = output.node as usize;
        in_place[node] |= output.alias.is_some();
        last[node] = graph.nodes.len();
    }
    for (i, node) in graph.nodes.iter().enumerate().rev() {
        let until = match is_kept[i] || in_place[i] {
            true => i,
            false => last[i],
        };
        for operand in node.operands.iter().filter(|_| live[i]) {
            let last = &mut last[*operand as usize];
            *last = (*last).max(until);
        }
    }
    let bytes = |i: usize| {
        let parts: usize = parts[i].iter().product();
        (graph.nodes[i].shape.bytes() / parts.max(1)) as u64
    };
    let mut freed: Vec<Vec<usize>> = vec![Vec::new(); graph.nodes.len() + 1];
    let mut used = 0u64;
    let mut peak = Peak::default();
    for i in 0..graph.nodes.len() {
        if is_kept[i] && !in_place[i] {
            used = used.saturating_add(bytes(i));
            freed[last[i]].push(i);
        }
        if used > peak.bytes {
            peak = Peak {
                bytes: used,
                node: Some(i),
            };
        }
        for freed in &freed[i] {
            used = used.saturating_sub(bytes(*freed));
        }
    }
    peak
}

/// Which values take memory.
fn kept(graph: &Graph, live: &[bool]) -> Vec<bool> {
    let mut uses = vec![0usize; graph.nodes.len()];
    let mut is_multiplied = vec![false; graph.nodes.len()];
    for (node, _) in graph.nodes.iter().zip(live).filter(|(_, live)| **live) {
        let multiplies = matches!(
            node.op,
            Op::DotGeneral { .. } | Op::Convolution { .. } | Op::CustomCall(_)
        );
        for operand in &node.operands {
            uses[*operand as usize] += 1;
            is_multiplied[*operand as usize] |= multiplies;
        }
    }
    let is_kept = |i: usize| match &graph.nodes[i].op {
        Op::Parameter(_)
        | Op::Constant(_)
        | Op::Iota(_)
        | Op::Reshape(_)
        | Op::BroadcastInDim { .. }
        | Op::GetTupleElement(_)
        | Op::OptimizationBarrier
        | Op::While { .. }
        | Op::Stored
        | Op::ShardingConstraint(_) => false,
        Op::Unary(_)
        | Op::Binary(_)
        | Op::Compare(_)
        | Op::Select
        | Op::Clamp
        | Op::Convert(_)
        | Op::BitcastConvert(_) => uses[i] > 1 || is_multiplied[i],
        Op::Transpose(_)
        | Op::Slice { .. }
        | Op::DynamicSlice(_)
        | Op::DynamicUpdateSlice
        | Op::Pad(_)
        | Op::Concatenate(_)
        | Op::Reverse(_)
        | Op::Gather(_)
        | Op::Scatter(..)
        | Op::Reduce { .. }
        | Op::DotGeneral { .. }
        | Op::Convolution { .. }
        | Op::Composite { .. }
        | Op::CustomCall(_) => true,
    };
    (0..graph.nodes.len())
        .map(|i| live[i] && is_kept(i))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::graph::{Builder, DotDims};
    use crate::shape::Shape;

    fn peak_of(b: Builder) -> Peak {
        let graph = b.finish();
        let whole: Vec<_> = graph
            .nodes
            .iter()
            .map(|n| vec![1; n.shape.rank()])
            .collect();
        peak(&graph, &whole)
    }

    /// Two products in a row: while the second is computed, both results are there, and what is added to the first is
    /// computed on the way.
    #[test]
    fn operands_stay_until_their_last_use() {
        let b = Builder::new();
        let x = b.input("x", Shape::new(DType::F32, [16, 16]), &[]).unwrap();
        let dims = DotDims {
            lhs_contract: vec![1],
            rhs_contract: vec![0],
            ..DotDims::default()
        };
        let dot = |a| b.dot_general(a, x, dims.clone(), DType::F32).unwrap();
        let first = dot(x);
        let second = dot(b.mul_scalar(b.add(first, x).unwrap(), 2.0).unwrap());
        let third = dot(second);
        b.output("y", third, None).unwrap();
        let kib = 16 * 16 * 4;
        // The first product lives until its sum is made; sum and second product are there together.
        assert_eq!(peak_of(b).bytes, 2 * kib);
    }
}
