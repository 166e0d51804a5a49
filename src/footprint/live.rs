//! The most memory that intermediate values take at once.

use super::split::Parts;
use crate::graph::{Graph, Node, Op};

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
/// them. Noise takes none either, as it is made of a key alone. Results that take over an input's memory take none, nor do entries that are
/// put into stacks. A loop
/// has the values of its carry that it changes, and while it runs those of its body.
pub(super) fn peak(graph: &Graph, parts: &Parts) -> Peak {
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
        let all = match is_kept[i] || in_place[i] {
            true => i,
            false => last[i],
        };
        let replaced = replaced(node);
        for (at, operand) in node.operands.iter().enumerate().filter(|_| live[i]) {
            let until = match replaced {
                Some(replaced) if replaced != at => i,
                _ => all,
            };
            let last = &mut last[*operand as usize];
            *last = (*last).max(until);
        }
    }
    let part_of = |i: usize, parts: &[usize]| {
        let parts: usize = parts.iter().product();
        (graph.nodes[i].shape.bytes() / parts.max(1)) as u64
    };
    let bytes = |i: usize| match (&graph.nodes[i].op, parts.carries.get(&i)) {
        (Op::While { body, .. }, Some(carry)) => changed(body)
            .map(|at| part_of(graph.nodes[i].operands[at] as usize, &carry[at]))
            .fold(0, u64::saturating_add),
        (Op::CustomCall(call), _) => {
            let others = call.others();
            let others = others.iter().map(|shape| shape.bytes() as u64);
            others.fold(part_of(i, &parts.nodes[i]), u64::saturating_add)
        }
        _ => part_of(i, &parts.nodes[i]),
    };
    let mut freed: Vec<Vec<usize>> = vec![Vec::new(); graph.nodes.len() + 1];
    let mut used = 0u64;
    let mut peak = Peak::default();
    for i in 0..graph.nodes.len() {
        if is_kept[i] && !in_place[i] {
            used = used.saturating_add(bytes(i));
            freed[last[i]].push(i);
        }
        let inside = match (&graph.nodes[i].op, parts.bodies.get(&i)) {
            (Op::While { body, .. }, Some(parts)) if live[i] => self::peak(body, parts).bytes,
            _ => 0,
        };
        let now = used.saturating_add(inside);
        if now > peak.bytes {
            peak = Peak {
                bytes: now,
                node: Some(i),
            };
        }
        for freed in &freed[i] {
            used = used.saturating_sub(bytes(*freed));
        }
    }
    peak
}

/// The elements of a loop's carry that its body changes.
fn changed(body: &Graph) -> impl Iterator<Item = usize> {
    let is_kept = |(at, node): &(usize, u32)| {
        let op = &body.nodes[*node as usize].op;
        !matches!(op, Op::Parameter(index) if index == at)
    };
    let results = body.outputs.iter().map(|output| output.node);
    results.enumerate().filter(is_kept).map(|(at, _)| at)
}

/// The operand whose memory a node's result takes, with what it has written there.
fn replaced(node: &Node) -> Option<usize> {
    match &node.op {
        Op::DynamicUpdateSlice => Some(0),
        Op::CustomCall(call) => call.replaces(node.operands.len()),
        _ => None,
    }
}

/// Which values take memory.
fn kept(graph: &Graph, live: &[bool]) -> Vec<bool> {
    let is_made = made_of_scalars(graph);
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
        // The loop that writes it is what takes the memory.
        | Op::Uninitialized
        | Op::Reshape(_)
        | Op::BroadcastInDim { .. }
        | Op::GetTupleElement(_)
        | Op::OptimizationBarrier
        | Op::Stored
        | Op::ShardingConstraint(_) => false,
        Op::Unary(_)
        | Op::Binary(_)
        | Op::Compare(_)
        | Op::Select
        | Op::Clamp
        | Op::Convert(_)
        | Op::BitcastConvert(_) => is_multiplied[i] || (uses[i] > 1 && !is_made[i]),
        Op::Transpose(_)
        | Op::Slice { .. }
        | Op::DynamicSlice(_)
        | Op::Pad(_)
        | Op::Concatenate(_)
        | Op::Reverse(_)
        | Op::Gather(_)
        | Op::Scatter(..)
        | Op::Reduce { .. }
        | Op::DotGeneral { .. }
        | Op::Convolution { .. }
        | Op::Composite { .. }
        | Op::While { .. } => true,
        Op::DynamicUpdateSlice | Op::CustomCall(_) => replaced(&graph.nodes[i]).is_none(),
    };
    (0..graph.nodes.len())
        .map(|i| live[i] && is_kept(i))
        .collect()
}

/// Which values elementwise operations make of nothing but scalars and counts, such as noise of its key. Compilers make
/// them anew for each use.
fn made_of_scalars(graph: &Graph) -> Vec<bool> {
    let mut made: Vec<bool> = Vec::with_capacity(graph.nodes.len());
    for node in &graph.nodes {
        let is_elementwise = matches!(
            node.op,
            Op::Constant(_)
                | Op::Iota(_)
                | Op::Reshape(_)
                | Op::BroadcastInDim { .. }
                | Op::Unary(_)
                | Op::Binary(_)
                | Op::Compare(_)
                | Op::Select
                | Op::Clamp
                | Op::Convert(_)
                | Op::BitcastConvert(_)
        );
        let of_scalars = || node.operands.iter().all(|operand| made[*operand as usize]);
        let is_made = node.shape.dims.is_empty() || (is_elementwise && of_scalars());
        made.push(is_made);
    }
    made
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::footprint::split::parts;
    use crate::graph::{Builder, Comparison, DotDims};
    use crate::shape::Shape;
    use crate::shard::{DeviceDescription, LogicalAxisRules, Mesh, Parallelism, ShardPlan};

    fn peak_of(b: Builder) -> Peak {
        let graph = b.finish();
        let devices = DeviceDescription::numbered(1, 1);
        let mesh = Mesh::new(&Parallelism::default(), &devices).unwrap();
        let rules = LogicalAxisRules::default();
        let plan = ShardPlan::new(&graph, &mesh, &rules).unwrap();
        peak(&graph, &parts(&graph, &plan, &mesh, &rules))
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

    /// Numbers of a key that are used twice are made twice; what is multiplied by them is there once.
    #[test]
    fn noise_takes_no_memory() {
        let b = Builder::new();
        let x = b.input("x", Shape::new(DType::F32, [16, 16]), &[]).unwrap();
        let key = b.input("key", Shape::new(DType::F32, []), &[]).unwrap();
        let noise = b
            .mul_scalar(b.broadcast_to(key, &[16, 16]).unwrap(), 3.0)
            .unwrap();
        let dims = DotDims {
            lhs_contract: vec![1],
            rhs_contract: vec![0],
            ..DotDims::default()
        };
        let noisy = b
            .mul(b.mul(x, noise).unwrap(), b.add(x, noise).unwrap())
            .unwrap();
        let product = b.dot_general(noisy, x, dims, DType::F32).unwrap();
        b.output("y", product, None).unwrap();
        let kib = 16 * 16 * 4;
        assert_eq!(peak_of(b).bytes, 2 * kib);
    }

    /// A loop that hands on a matrix beside one that stays as it is, with one more product inside.
    #[test]
    fn loops_have_what_they_change_and_their_body() {
        let b = Builder::new();
        let x = b.input("x", Shape::new(DType::F32, [16, 16]), &[]).unwrap();
        let dims = DotDims {
            lhs_contract: vec![1],
            rhs_contract: vec![0],
            ..DotDims::default()
        };
        let zero = b.scalar(DType::S32, 0.0).unwrap();
        let holds = |r: &Builder, carry: &[_]| {
            r.compare(Comparison::Lt, carry[0], r.scalar(DType::S32, 3.0)?)
        };
        let body = |r: &Builder, carry: &[_]| {
            let y = r.dot_general(carry[1], carry[2], dims, DType::F32)?;
            let next = r.add(carry[0], r.scalar(DType::S32, 1.0)?)?;
            Ok(vec![next, y, carry[2]])
        };
        let results = b.while_loop(&[zero, x, x], holds, body).unwrap();
        b.output("y", results[1], None).unwrap();
        let kib = 16 * 16 * 4;
        // The counter and the matrix, and the product of a trip.
        assert_eq!(peak_of(b).bytes, 2 * kib + 4);
    }
}
