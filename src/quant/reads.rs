//! What layers read, as far as ranges depend on it: two joined activations, as behind the skip connections of UNets, whose parts have
//! ranges of their own (Li et al. 2023, Q-Diffusion, section 4.3), or a text, whose first token is far larger than the others (Zhao et
//! al. 2024, MixDQ, section 3.2).

use std::collections::{BTreeMap, BTreeSet};

use crate::graph::{Composite, Graph, Node, Op};

/// The layers of `model` whose activation is two joined ones, with the features of the first. Norms, conversions and shardings may
/// stand between.
pub fn joined_inputs(graph: &Graph, model: &str) -> BTreeMap<String, usize> {
    let of_weights = graph.weight_only();
    let layers = graph.nodes.iter().filter_map(|node| {
        let path = graph.path(node).strip_prefix(model)?;
        let (activation, feature) = match &node.op {
            Op::Convolution { dims, .. } => (node.operands[0], dims.lhs.feature),
            Op::DotGeneral { dims, .. } => match dims.lhs_contract[..] {
                [feature] => (node.operands[0], feature),
                _ => return None,
            },
            _ => return None,
        };
        let is_weight = of_weights[node.operands[1] as usize];
        let first = joined(graph, activation, feature).filter(|_| is_weight)?;
        Some((path.to_owned(), first))
    });
    layers.collect()
}

/// The layers of `model` whose activation is computed of the input `text` and of weights alone.
pub fn readers_of_input(graph: &Graph, model: &str, text: &str) -> BTreeSet<String> {
    let of_weights = graph.weight_only();
    let known = graph
        .inputs
        .iter()
        .map(|input| input.is_weight() || input.name == text);
    let of_text = graph.made_of(&known.collect::<Vec<_>>());
    let reads = graph.nodes.iter().filter(|node| {
        let is_layer = matches!(node.op, Op::Convolution { .. } | Op::DotGeneral { .. });
        is_layer && {
            let [activation, weight] = [0, 1].map(|at| node.operands[at] as usize);
            of_weights[weight] && of_text[activation] && !of_weights[activation]
        }
    });
    let paths = reads.filter_map(|node| graph.path(node).strip_prefix(model));
    paths.map(str::to_owned).collect()
}

/// The features of the first of two values that are joined to this one.
fn joined(graph: &Graph, value: u32, feature: usize) -> Option<usize> {
    let mut node: &Node = &graph.nodes[value as usize];
    loop {
        let keeps_features = match &node.op {
            Op::Concatenate(dim) => {
                let [first, _] = node.operands[..] else {
                    return None;
                };
                let dims = &graph.nodes[first as usize].shape.dims;
                return (*dim == feature).then(|| dims[feature]);
            }
            Op::Convert(_) | Op::ShardingConstraint(_) => true,
            Op::Composite { kind, .. } => matches!(
                kind,
                Composite::GroupNorm { .. }
                    | Composite::LayerNorm { .. }
                    | Composite::RmsNorm { .. }
            ),
            _ => false,
        };
        if !keeps_features {
            return None;
        }
        node = &graph.nodes[*node.operands.first()? as usize];
    }
}
