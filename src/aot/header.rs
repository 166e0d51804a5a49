//! A bundle's description of a program's arguments and results.

use crate::bundle::Slot;
use crate::graph::Graph;
use crate::shape::Shape;
use crate::shard::{PartitionSpec, ShardPlan};

/// The arguments of a program.
pub fn inputs(graph: &Graph, plan: &ShardPlan) -> Vec<Slot> {
    let inputs = graph.inputs.iter().zip(&plan.inputs).enumerate();
    inputs
        .map(|(index, (input, spec))| {
            let alias = graph.outputs.iter().position(|o| o.alias == Some(index));
            slot(&input.name, &input.shape, spec, alias)
        })
        .collect()
}

/// The results of a program.
pub fn outputs(graph: &Graph, plan: &ShardPlan) -> Vec<Slot> {
    let outputs = graph.outputs.iter().zip(&plan.outputs);
    outputs
        .map(|(output, spec)| {
            let shape = &graph.nodes[output.node as usize].shape;
            slot(&output.name, shape, spec, output.alias)
        })
        .collect()
}

fn slot(name: &str, shape: &Shape, spec: &PartitionSpec, alias: Option<usize>) -> Slot {
    Slot {
        name: name.to_owned(),
        dtype: shape.dtype.to_string(),
        dims: shape.dims.clone(),
        sharding: spec
            .dims()
            .iter()
            .map(|axes| axes.iter().map(|a| a.name().to_owned()).collect())
            .collect(),
        alias,
    }
}
