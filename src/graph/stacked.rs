//! Weights of equal blocks as one input each.
//!
//! A training step whose blocks are a loop takes their weights as stacks. Where every weight is an input of its own, each step
//! copies them together and the gradients apart, and the optimizer's update is as many operations as there are weights.
//! As one input the stack stays a stack from step to step: its name is that of its weights, with the range of blocks in
//! place of the number, `unet/mid_block.attentions.0.transformer_blocks.0-9.norm1.weight`.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use super::roll::roll;
pub use super::stack::stack;
use super::stack::{entry_of, place_in};
use super::{Builder, Graph, GraphError, Init, Input, InputKind, Op, Tensor};
use crate::shape::Shape;

type Result<T> = std::result::Result<T, GraphError>;

/// The names of the weights that an input holds: those of its blocks, in order, or its own.
///
/// So of `ema/m/blocks.2-4.weight` they are `ema/m/blocks.2.weight`, `ema/m/blocks.3.weight` and `ema/m/blocks.4.weight`.
pub fn entries(name: &str) -> Vec<String> {
    match parse(name) {
        None => vec![name.to_owned()],
        Some((before, blocks, after)) => blocks
            .map(|block| format!("{before}{block}{after}"))
            .collect(),
    }
}

/// Whether an input is a stack of weights or of their state.
pub fn is_stacked(name: &str) -> bool {
    parse(name).is_some()
}

/// The inputs that an input stands for: those of its blocks, in order, or itself.
pub fn parts(input: &Input) -> Vec<Input> {
    if !is_stacked(&input.name) {
        return vec![input.clone()];
    }
    let part = |name| Input {
        name,
        kind: input.kind.clone(),
        shape: input.shape.with_dims(input.shape.dims[1..].to_vec()),
        logical_axes: input.logical_axes.get(1..).unwrap_or_default().to_vec(),
    };
    entries(&input.name).into_iter().map(part).collect()
}

/// What stands before the range of blocks, the range, and what stands behind it.
fn parse(name: &str) -> Option<(&str, Range<usize>, &str)> {
    name.match_indices('.').find_map(|(dot, _)| {
        let rest = &name[dot + 1..];
        let part = &rest[..rest.find('.')?];
        let (first, last) = part.split_once('-')?;
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        Some((
            &name[..=dot],
            first..last + 1,
            &name[dot + 1 + part.len()..],
        ))
    })
}

/// By the nodes of stacks, which are inputs, the nodes that stand for their weights, in order.
pub fn entry_nodes(graph: &Graph) -> HashMap<u32, Vec<u32>> {
    let mut entries: HashMap<u32, BTreeMap<usize, u32>> = HashMap::new();
    for id in 0..graph.nodes.len() {
        if let Some((stack, number)) = place_in(graph, id)
            && let Op::Parameter(index) = graph.nodes[stack as usize].op
            && is_stacked(&graph.inputs[index].name)
        {
            entries
                .entry(stack)
                .or_default()
                .entry(number)
                .or_insert(id as u32);
        }
    }
    let in_order = entries.into_iter();
    in_order
        .map(|(stack, entries)| (stack, entries.into_values().collect()))
        .collect()
}

/// The graph with one input in place of the weights of equal blocks, where `shortest` and more of them can be a loop
/// ([`roll`]). Weights stay apart that differ in type, initialization or axes, or of which outputs depend on some alone.
///
/// # Errors
/// None for a well-typed graph.
pub fn stack_weights(graph: Graph, shortest: usize) -> Result<Graph> {
    let stacks = stacks(&graph, &loops(&graph, shortest)?);
    if stacks.is_empty() {
        return Ok(graph);
    }
    let mut places: BTreeMap<&str, (&str, usize)> = BTreeMap::new();
    for (name, weights) in &stacks {
        for (number, weight) in weights.iter().enumerate() {
            places.insert(weight, (name, number));
        }
    }
    let b = Builder::new();
    let root = b.root("stacks");
    let mut inputs: Vec<Tensor> = Vec::with_capacity(graph.inputs.len());
    for input in &graph.inputs {
        inputs.push(match places.get(input.name.as_str()) {
            None => b.declare(input.clone())?,
            Some(&(name, number)) => {
                let count = stacks[name].len();
                entry_of(&root, root.declare(stacked(input, name, count))?, number)?
            }
        });
    }
    graph.substitute_onto(&b, &inputs, &mut |_, _, _| Ok(None))?;
    Ok(b.finish())
}

/// The stack of `count` inputs like `input`.
fn stacked(input: &Input, name: &str, count: usize) -> Input {
    let mut dims = input.shape.dims.clone();
    dims.insert(0, count);
    let mut axes = input.logical_axes.clone();
    if !axes.is_empty() {
        axes.insert(0, None);
    }
    Input {
        name: name.to_owned(),
        kind: input.kind.clone(),
        shape: Shape::new(input.shape.dtype, dims),
        logical_axes: axes,
    }
}

/// The paths of loops that runs of blocks can be, with the range of the blocks at the end.
fn loops(graph: &Graph, shortest: usize) -> Result<Vec<String>> {
    // Bodies of composites have the paths of their blocks.
    let inlined = graph.inline_composites(&|_, _| true);
    let rolled = roll(inlined, None, shortest)?;
    let nodes = rolled.nodes.iter();
    let loops = nodes.filter(|node| matches!(node.op, Op::While { .. }));
    Ok(loops.map(|node| rolled.path(node).to_owned()).collect())
}

/// By the names of stacks, those of their weights.
fn stacks(graph: &Graph, loops: &[String]) -> BTreeMap<String, Vec<String>> {
    let live = graph.live_nodes();
    let mut known: BTreeMap<&str, (Init, &Input, bool)> = BTreeMap::new();
    for (id, node) in graph.nodes.iter().enumerate() {
        if let Op::Parameter(index) = node.op
            && let InputKind::Weight(init) = graph.inputs[index].kind
        {
            let input = &graph.inputs[index];
            known.insert(&input.name, (init, input, live[id]));
        }
    }
    let are_alike = |one: &str, other: &str| {
        let [one, other] = [one, other].map(|name| known.get(name));
        one.zip(other).is_some_and(|(one, other)| {
            let [a, b] = [one.1, other.1];
            // Of smaller elements, several share a byte.
            a.shape.dtype.bits() >= 8
                && (one.0, one.2) == (other.0, other.2)
                && a.shape == b.shape
                && a.logical_axes == b.logical_axes
        })
    };
    let mut stacks = BTreeMap::new();
    for path in loops {
        let blocks = entries(&format!("{path}."));
        let of_first = known
            .keys()
            .filter_map(|name| name.strip_prefix(&blocks[0]));
        for rest in of_first {
            let stack = format!("{path}.{rest}");
            let weights = entries(&stack);
            if weights.len() > 1 && weights.iter().all(|weight| are_alike(&weights[0], weight)) {
                stacks.insert(stack, weights);
            }
        }
    }
    stacks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::graph::{DotDims, Reduction, evaluate, grad};
    use crate::host_tensor::HostTensor;

    const BLOCKS: usize = 3;
    const WIDTH: usize = 2;

    #[test]
    fn a_stack_is_called_by_the_range_of_its_blocks() {
        let name = "optimizer/m/unet/mid.transformer_blocks.9-11.ff.net.0.proj.weight";
        assert_eq!(
            entries(name),
            [9, 10, 11].map(|k| format!(
                "optimizer/m/unet/mid.transformer_blocks.{k}.ff.net.0.proj.weight"
            ))
        );
        for name in ["unet/conv_in.weight", "m/blocks.3.weight", "m/a-b.weight"] {
            assert!(!is_stacked(name));
            assert_eq!(entries(name), [name]);
        }
    }

    /// A scale and a chain of layers `tanh(x W_k + b_k)`, of which the last bias has axes of its own.
    fn chain() -> Graph {
        let b = Builder::new();
        let f32 = |dims: &[usize]| Shape::new(DType::F32, dims);
        let x = b.input("x", f32(&[1, WIDTH]), &[]).unwrap();
        let before = b.root("m").scope("before");
        let scale = f32(&[1, WIDTH]);
        let scale = before.param("scale", scale, Init::Zeros, &[]).unwrap();
        let mut x = before.mul(x, scale).unwrap();
        for k in 0..BLOCKS {
            let at = b.root("m").scope("blocks").scope(k);
            let matrix = f32(&[WIDTH, WIDTH]);
            let axes = [Some("in"), Some("out")];
            let w = at.param("weight", matrix, Init::Zeros, &axes).unwrap();
            let axes: &[_] = match k + 1 == BLOCKS {
                true => &[Some("out")],
                false => &[None],
            };
            let bias = at.param("bias", f32(&[WIDTH]), Init::Zeros, axes).unwrap();
            let dims = DotDims {
                lhs_contract: vec![1],
                rhs_contract: vec![0],
                ..DotDims::default()
            };
            let y = at.dot_general(x, w, dims, DType::F32).unwrap();
            let bias = at.broadcast_in_dim(bias, &[1], &[1, WIDTH]).unwrap();
            x = at.tanh(at.add(y, bias).unwrap()).unwrap();
        }
        let loss = b.reduce(Reduction::Sum, x, &[0, 1]).unwrap();
        b.output("loss", loss, None).unwrap();
        b.finish()
    }

    /// The graph with the gradients of all weights as results.
    fn differentiated(graph: Graph) -> Graph {
        let b = Builder::resume(graph);
        let (of_stacks, weights, loss) = b.with_graph(|graph| {
            let nodes = graph.nodes.iter().enumerate();
            let weights = nodes.filter(|(_, node)| match node.op {
                Op::Parameter(index) => graph.inputs[index].is_weight(),
                _ => false,
            });
            let weights: Vec<u32> = weights.map(|(id, _)| id as u32).collect();
            (entry_nodes(graph), weights, graph.outputs[0].node)
        });
        let entries = weights.iter().map(|weight| match of_stacks.get(weight) {
            Some(entries) => entries.clone(),
            None => vec![*weight],
        });
        let entries: Vec<Vec<u32>> = entries.collect();
        let wrt: Vec<Tensor> = entries
            .concat()
            .into_iter()
            .map(|id| b.tensor(id))
            .collect();
        let mut gradients = grad(&b, b.tensor(loss), &wrt).unwrap().into_iter();
        for (weight, entries) in weights.iter().zip(entries) {
            let own: Vec<Tensor> = gradients.by_ref().take(entries.len()).collect();
            let gradient = match of_stacks.contains_key(weight) {
                true => stack(&b, &own).unwrap(),
                false => own[0],
            };
            b.output("gradient", gradient, None).unwrap();
        }
        b.finish()
    }

    /// Values of weights, which depend on their names alone, and of the other input.
    fn values(graph: &Graph) -> Vec<HostTensor> {
        let init = Init::Uniform { bound: 1.0 };
        let inputs = graph.inputs.iter();
        inputs
            .map(|input| {
                let names = entries(&input.name);
                let count = input.shape.count() / names.len();
                let values = names.iter().flat_map(|name| init.sample(1, name, count));
                let values: Vec<f32> = values.collect();
                HostTensor::from_f32(&input.shape.dims[..], &values).unwrap()
            })
            .collect()
    }

    #[test]
    fn weights_of_equal_blocks_are_one_input_and_have_one_gradient() {
        let graph = chain();
        let stacked = stack_weights(graph.clone(), 2).unwrap();
        let names: Vec<_> = stacked.inputs.iter().map(|i| i.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "x",
                "m/before.scale",
                "m/blocks.0-2.weight",
                "m/blocks.0.bias",
                "m/blocks.1.bias",
                "m/blocks.2.bias"
            ]
        );
        assert_eq!(stacked.inputs[2].shape.dims, [BLOCKS, WIDTH, WIDTH]);
        assert_eq!(
            stacked.inputs[2].logical_axes,
            [None, Some("in"), Some("out")]
        );
        let parts = parts(&stacked.inputs[2]);
        let own = graph.inputs.iter();
        assert!(own.filter(|i| i.name.ends_with("weight")).eq(parts.iter()));

        let (one, other) = (differentiated(graph), differentiated(stacked));
        let rolled = roll(other.clone(), None, 2).unwrap();
        let expected = evaluate(&one, &values(&one)).unwrap();
        let joined = |of: &[HostTensor]| of.iter().flat_map(|t| t.data.clone()).collect::<Vec<_>>();
        for graph in [&other, &rolled] {
            let found = evaluate(graph, &values(graph)).unwrap();
            // Loss and scale; weights; biases. Without stacks each block has its weight before its bias.
            assert_eq!(found[..2], expected[..2]);
            let weights = [2, 4, 6].map(|at| expected[at].clone());
            assert_eq!(found[2].data, joined(&weights));
            let biases = [3, 5, 7].map(|at| expected[at].clone());
            assert_eq!(joined(&found[3..]), joined(&biases));
        }
        // The loops take the stack and give its gradient: nothing is put together or taken apart.
        let left = rolled.live_nodes();
        let nodes = rolled.nodes.iter().zip(left).filter(|(_, live)| *live);
        let of_matrices = nodes.filter(|(node, _)| {
            let is_copy = matches!(node.op, Op::Concatenate(_) | Op::Slice { .. });
            is_copy && node.shape.dims.ends_with(&[WIDTH, WIDTH])
        });
        assert_eq!(of_matrices.count(), 0);
    }

    #[test]
    fn fewer_equal_blocks_than_a_loop_has_stay_apart() {
        let graph = chain();
        assert_eq!(stack_weights(graph.clone(), BLOCKS + 1).unwrap(), graph);
    }
}
