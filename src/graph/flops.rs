//! Arithmetic of a graph, from shapes alone.

use super::{Graph, Node, Op};

/// Floating-point or integer operations of all dots and convolutions that outputs depend on; a multiply and an
/// add are two. A loop whose trips are not known counts once. Counts past 64 bits stay at the largest.
pub fn flops(graph: &Graph) -> u64 {
    let live = graph.live_nodes();
    let mut total = 0u64;
    for (node, live) in graph.nodes.iter().zip(live) {
        if !live {
            continue;
        }
        total = total.saturating_add(match &node.op {
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
            _ => of_contraction(graph, node),
        });
    }
    total
}

/// Operations of a dot or a convolution; 0 for other nodes.
fn of_contraction(graph: &Graph, node: &Node) -> u64 {
    let operand = |i: usize| &graph.nodes[node.operands[i] as usize].shape.dims;
    let terms: usize = match &node.op {
        Op::DotGeneral { dims, .. } => dims.lhs_contract.iter().map(|d| operand(0)[*d]).product(),
        Op::Convolution { dims, .. } => {
            let kernel = operand(1);
            let taps: usize = dims.rhs.spatial.iter().map(|d| kernel[*d]).product();
            taps * kernel[dims.rhs.feature]
        }
        _ => return 0,
    };
    let each = (terms as u64).saturating_mul(2);
    each.saturating_mul(node.shape.count() as u64)
}

/// A dot or a convolution, with its operations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContractionFlops {
    /// The scope path that it was made in.
    pub path: String,
    /// Whether an operand is made of weights and constants alone; otherwise both are activations.
    pub has_weight: bool,
    /// As [`flops`] counts them.
    pub flops: u64,
}

/// Each dot and convolution that outputs of a traced program depend on, those in composites and loops too, in graph order.
/// Kernels, which stand in lowered programs alone, are none.
pub fn contraction_flops(graph: &Graph) -> Vec<ContractionFlops> {
    let weights: Vec<bool> = graph.inputs.iter().map(|input| input.is_weight()).collect();
    let mut found = Vec::new();
    add_contractions(graph, &weights, 1, &mut found);
    found
}

/// Adds the contractions of a graph that runs so many times. `inputs` says which inputs are made of weights alone.
fn add_contractions(graph: &Graph, inputs: &[bool], times: u64, found: &mut Vec<ContractionFlops>) {
    let live = graph.live_nodes();
    let of_weights = graph.made_of(inputs);
    for (node, _) in graph.nodes.iter().zip(live).filter(|(_, live)| *live) {
        let operands = node.operands.iter().map(|id| of_weights[*id as usize]);
        match &node.op {
            Op::DotGeneral { .. } | Op::Convolution { .. } => found.push(ContractionFlops {
                path: graph.path(node).to_owned(),
                has_weight: operands.clone().any(|is_weight| is_weight),
                flops: of_contraction(graph, node).saturating_mul(times),
            }),
            Op::Composite { body, .. } => {
                let operands: Vec<bool> = operands.collect();
                add_contractions(body, &operands, times, found);
            }
            Op::While { .. } => {
                let operands: Vec<bool> = operands.collect();
                let times = times.saturating_mul(node.op.trips().unwrap_or(1));
                for region in node.op.loop_regions() {
                    add_contractions(region, &operands, times, found);
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::graph::Builder;
    use crate::nn::{Attention, Linear, Precision, attention, linear};
    use crate::shape::Shape;

    /// A layer, and the products of two activations in a composite: each has its path, and together they are all operations.
    #[test]
    fn contractions_are_told_by_path_and_add_up() {
        let b = Builder::new();
        let x = Shape::new(DType::F32, [1, 3, 8]);
        let x = b.input("x", x, &[]).unwrap();
        let m = b.root("m");
        let layer = Linear::new(8, "embed", "heads");
        let y = linear(&m.scope("layer"), x, layer, Precision::F32).unwrap();
        let attributes = Attention {
            heads: 2,
            causal: false,
        };
        let z = attention(&m.scope("attn"), [y; 3], attributes, Precision::F32).unwrap();
        b.output("z", z, None).unwrap();
        let graph = b.finish();
        let found = contraction_flops(&graph);
        let told: Vec<(bool, u64)> = found.iter().map(|c| (c.has_weight, c.flops)).collect();
        // Scores of 3 queries and 3 keys in 2 heads of 4 features, and as much for the values.
        let product = 2 * 2 * 3 * 3 * 4;
        assert_eq!(
            told,
            [(true, 2 * 3 * 8 * 8), (false, product), (false, product)]
        );
        assert_eq!(found[0].path, "m/layer");
        assert!(found[1..].iter().all(|c| c.path.starts_with("m/attn")));
        let sum: u64 = found.iter().map(|contraction| contraction.flops).sum();
        assert_eq!(sum, flops(&graph));
    }
}
