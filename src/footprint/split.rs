//! Into how many parts the dimensions of values are split.

use std::collections::HashMap;

use crate::graph::{Batch, Graph, Node, Op};
use crate::shape::{Shape, gcd};
use crate::shard::{LogicalAxisRules, Mesh, PartitionSpec, ShardPlan};

/// The number of parts of each dimension of each value of a graph, as far as inputs and constraints decide it. Where
/// nothing is known, a dimension is whole.
pub(super) struct Parts {
    pub nodes: Vec<Vec<usize>>,
    /// By node, those of the bodies of loops.
    pub bodies: HashMap<usize, Parts>,
    /// By node, those of what loops carry.
    pub carries: HashMap<usize, Vec<Vec<usize>>>,
}

/// The parts of a planned program.
pub(super) fn parts(
    graph: &Graph,
    plan: &ShardPlan,
    mesh: &Mesh,
    rules: &LogicalAxisRules,
) -> Parts {
    let of_spec = |spec: &PartitionSpec| -> Vec<usize> {
        spec.dims().iter().map(|axes| mesh.product(axes)).collect()
    };
    let of_constraint = |node: &Node, path: &str| match &node.op {
        Op::ShardingConstraint(axes) => rules
            .spec_for_shape(path, axes, &node.shape.dims, mesh)
            .ok()
            .map(|(spec, _)| of_spec(&spec)),
        _ => None,
    };
    let inputs: Vec<_> = plan.inputs.iter().map(of_spec).collect();
    Parts::of(graph, &inputs, &of_constraint)
}

impl Parts {
    fn of(
        graph: &Graph,
        inputs: &[Vec<usize>],
        of_constraint: &dyn Fn(&Node, &str) -> Option<Vec<usize>>,
    ) -> Parts {
        let mut nodes: Vec<Vec<usize>> = Vec::with_capacity(graph.nodes.len());
        let mut bodies = HashMap::new();
        let mut carries: HashMap<usize, Vec<_>> = HashMap::new();
        for (id, node) in graph.nodes.iter().enumerate() {
            let asked = match &node.op {
                Op::Parameter(index) => inputs.get(*index).cloned(),
                _ => of_constraint(node, graph.path(node)),
            };
            if let Op::While { body, .. } = &node.op {
                let carry = node.operands.iter();
                let mut carry: Vec<_> = carry.map(|o| nodes[*o as usize].clone()).collect();
                // A stack begins as zeros that nothing splits, and is split as what the body puts into it.
                let first = Parts::of(body, &carry, of_constraint);
                for (carry, output) in carry.iter_mut().zip(&body.outputs) {
                    let result = &first.nodes[output.node as usize];
                    for (before, after) in carry.iter_mut().zip(result) {
                        *before = (*before).max(*after);
                    }
                }
                bodies.insert(id, Parts::of(body, &carry, of_constraint));
                carries.insert(id, carry);
            }
            let of_loop = match node.op {
                Op::GetTupleElement(at) => {
                    let carry = carries.get(&(node.operands[0] as usize));
                    carry.map(|carry| carry[at].clone())
                }
                _ => None,
            };
            let asked = asked.or(of_loop);
            nodes.push(asked.unwrap_or_else(|| of_operands(graph, node, &nodes)));
        }
        Parts {
            nodes,
            bodies,
            carries,
        }
    }
}

/// The parts that a result has from its operands.
fn of_operands(graph: &Graph, node: &Node, parts: &[Vec<usize>]) -> Vec<usize> {
    let operand = |at: usize| parts[node.operands[at] as usize].as_slice();
    let size = |at: usize| {
        graph.nodes[node.operands[at] as usize]
            .shape
            .dims
            .as_slice()
    };
    let dims = &node.shape.dims;
    let mut result = vec![1; dims.len()];
    if let Some(batch) = batch(graph, node) {
        let pairs = batch.operands.iter().enumerate();
        let of_batch = pairs.filter_map(|(at, dim)| operand(at).get((*dim)?).copied());
        result[batch.result] = of_batch.max().unwrap_or(1);
        return result;
    }
    match &node.op {
        Op::Transpose(perm) => return perm.iter().map(|d| operand(0)[*d]).collect(),
        Op::BroadcastInDim { dims: places, .. } => {
            for (d, place) in places.iter().enumerate() {
                if size(0)[d] == dims[*place] {
                    result[*place] = operand(0)[d];
                }
            }
        }
        Op::Reshape(_) => return reshaped(size(0), operand(0), dims),
        Op::Reduce { dims: reduced, .. } => {
            let kept = (0..size(0).len()).filter(|d| !reduced.contains(d));
            return kept.map(|d| operand(0)[d]).collect();
        }
        Op::DotGeneral { dims: of, .. } => {
            let free = |at: usize, batch: &[usize], contract: &[usize]| -> Vec<usize> {
                (0..size(at).len())
                    .filter(|d| !batch.contains(d) && !contract.contains(d))
                    .map(|d| operand(at)[d])
                    .collect()
            };
            let batch = of.lhs_batch.iter().map(|d| operand(0)[*d]);
            return batch
                .chain(free(0, &of.lhs_batch, &of.lhs_contract))
                .chain(free(1, &of.rhs_batch, &of.rhs_contract))
                .collect();
        }
        Op::Convolution { dims: of, .. } => {
            result[of.out.batch] = operand(0)[of.lhs.batch];
            result[of.out.feature] = operand(1)[of.rhs.batch];
        }
        Op::GetTupleElement(at) => {
            let tuple = &graph.nodes[node.operands[0] as usize];
            return match &tuple.op {
                // Programs of several devices have no such calls.
                Op::CustomCall(call) if !call.others().is_empty() => result,
                _ => parts[tuple.operands[*at] as usize].clone(),
            };
        }
        // Elementwise operations, and others that keep some dimensions.
        _ => {
            let same_rank = (0..node.operands.len()).filter(|at| size(*at).len() == dims.len());
            for at in same_rank {
                for d in 0..dims.len() {
                    if size(at)[d] == dims[d] {
                        result[d] = result[d].max(operand(at)[d]);
                    }
                }
            }
        }
    }
    result
}

/// Where a kernel's call has parts of the batch.
fn batch(graph: &Graph, node: &Node) -> Option<Batch> {
    let Op::CustomCall(call) = &node.op else {
        return None;
    };
    let operands = node.operands.iter();
    let shapes: Vec<&Shape> = operands
        .map(|id| &graph.nodes[*id as usize].shape)
        .collect();
    call.batch(&shapes)
}

/// The parts after a reshape, in row-major order: those of a dimension that is split again are those of its first dimensions, and
/// dimensions that are merged have those of the first, and of the next ones where the first have one element a part. Dimensions
/// that do not fit into each other are whole.
fn reshaped(from: &[usize], parts: &[usize], to: &[usize]) -> Vec<usize> {
    let mut result = vec![1; to.len()];
    // Factors of the dimensions, and whether devices have one element of it each.
    let factors = from
        .iter()
        .zip(parts)
        .flat_map(|(size, parts)| [(*parts, true), (size / parts.max(&1), false)]);
    let mut factors = factors.filter(|(size, _)| *size != 1);
    let mut next = factors.next();
    for (size, parts) in to.iter().zip(&mut result) {
        let mut left = *size;
        let mut leads = true;
        while left > 1 {
            let Some((factor, is_split)) = next else {
                return result;
            };
            let both = gcd(factor, left);
            if both == 1 {
                return result;
            }
            leads &= is_split;
            if leads {
                *parts *= both;
            }
            left /= both;
            next = match factor / both {
                1 => factors.next(),
                rest => Some((rest, is_split)),
            };
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reshaping_keeps_the_parts_of_leading_dimensions() {
        assert_eq!(reshaped(&[8, 4, 3], &[4, 1, 1], &[32, 3]), [4, 1]);
        assert_eq!(reshaped(&[32, 3], &[4, 1], &[8, 4, 3]), [4, 1, 1]);
        assert_eq!(reshaped(&[8, 3], &[1, 3], &[8, 1, 3]), [1, 1, 3]);
        // Slices first, then the devices of a slice; and back.
        assert_eq!(reshaped(&[8], &[4], &[2, 4]), [2, 2]);
        assert_eq!(reshaped(&[2, 4], &[2, 2], &[8]), [4]);
        // Rows of which a device has two do not go on in the next dimension.
        assert_eq!(reshaped(&[4, 4], &[2, 2], &[16]), [2]);
        assert_eq!(reshaped(&[6], &[3], &[2, 3]), [1, 1]);
        assert_eq!(reshaped(&[0, 4], &[1, 4], &[4, 0]), [1, 1]);
    }
}
