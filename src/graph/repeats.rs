//! Operations that compute the same of the same operands.

use std::collections::HashMap;

use super::{Composite, Graph, Op};

/// Most elements of a constant that is compared with others.
const MOST_COMPARED: usize = 1;

impl Graph {
    /// The graph in which what is computed twice of the same operands is read from the first of them; nothing reads the second.
    /// Loops, layers and kernels stay as they are.
    pub fn without_repeats(mut self) -> Graph {
        let mut firsts: Vec<u32> = Vec::with_capacity(self.nodes.len());
        let mut known: HashMap<(&'static str, Vec<u32>), Vec<u32>> = HashMap::new();
        for i in 0..self.nodes.len() {
            let node = &mut self.nodes[i];
            for operand in &mut node.operands {
                *operand = firsts[*operand as usize];
            }
            let id = i as u32;
            let node = &self.nodes[i];
            if !may_repeat(&node.op, node.shape.count()) {
                firsts.push(id);
                continue;
            }
            let alike = known
                .entry((node.op.name(), node.operands.clone()))
                .or_default();
            let equal = |other: &&u32| {
                let other = &self.nodes[**other as usize];
                is_same(&other.op, &node.op) && other.shape == node.shape
            };
            let first = alike.iter().find(equal).copied();
            if first.is_none() {
                alike.push(id);
            }
            firsts.push(first.unwrap_or(id));
        }
        for output in &mut self.outputs {
            output.node = firsts[output.node as usize];
        }
        self
    }
}

/// Whether two operations compute the same of the same operands.
fn is_same(a: &Op, b: &Op) -> bool {
    match (a, b) {
        // What these compute follows from their attributes; scopes within differ.
        (Op::Composite { kind: a, .. }, Op::Composite { kind: b, .. }) => a == b,
        _ => a == b,
    }
}

fn may_repeat(op: &Op, count: usize) -> bool {
    match op {
        Op::Constant(_) => count <= MOST_COMPARED,
        Op::Composite { kind, .. } => {
            matches!(
                kind,
                Composite::FindScale { .. } | Composite::Quantize { .. }
            )
        }
        Op::Unary(_)
        | Op::Binary(_)
        | Op::Compare(_)
        | Op::Select
        | Op::Clamp
        | Op::Convert(_)
        | Op::BroadcastInDim { .. }
        | Op::Reshape(_)
        | Op::Transpose(_)
        | Op::Slice { .. }
        | Op::Reduce { .. } => true,
        Op::Parameter(_)
        | Op::Iota(_)
        | Op::Uninitialized
        | Op::BitcastConvert(_)
        | Op::DynamicSlice(_)
        | Op::DynamicUpdateSlice
        | Op::Pad(_)
        | Op::Concatenate(_)
        | Op::Reverse(_)
        | Op::Gather(_)
        | Op::Scatter(..)
        | Op::DotGeneral { .. }
        | Op::Convolution { .. }
        | Op::While { .. }
        | Op::GetTupleElement(_)
        | Op::OptimizationBarrier
        | Op::CustomCall(_)
        | Op::Stored
        | Op::ShardingConstraint(_) => false,
    }
}
