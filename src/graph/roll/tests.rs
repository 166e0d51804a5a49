use super::*;
use crate::graph::{DotDims, Init, InputKind, Keeps, evaluate, grad, stage};
use crate::host_tensor::HostTensor;
use crate::shape::Shape;

const BLOCKS: usize = 4;
const WIDTH: usize = 3;

fn f32(dims: &[usize]) -> Shape {
    Shape::new(DType::F32, dims)
}

/// `x + tanh(x W_k) * prompt + b_k` four times, between two layers of their own. Values of two blocks are results too.
fn blocks(b: &Builder) -> (Tensor, Vec<Tensor>) {
    let model = b.root("m");
    let x = b.input("x", f32(&[2, WIDTH]), &[]).unwrap();
    let prompt = b.input("prompt", f32(&[WIDTH]), &[]).unwrap();
    let mut weights = Vec::new();
    let mut x = model.scope("before").tanh(x).unwrap();
    for k in 0..BLOCKS {
        let at = model.scope("blocks").scope(k).checkpoint(Keeps::Nothing);
        let inner = at.scope("dot");
        let w = inner
            .param(
                "weight",
                f32(&[WIDTH, WIDTH]),
                Init::Zeros,
                &[None, Some("out")],
            )
            .unwrap();
        let bias = inner
            .param("bias", f32(&[WIDTH]), Init::Zeros, &[])
            .unwrap();
        weights.extend([w, bias]);
        let dims = DotDims {
            lhs_contract: vec![1],
            rhs_contract: vec![0],
            ..DotDims::default()
        };
        let y = inner.dot_general(x, w, dims, DType::F32).unwrap();
        let y = at.add(at.tanh(y).unwrap(), bias).unwrap();
        let scaled = at.mul(y, prompt).unwrap();
        x = at.add(x, scaled).unwrap();
        if k == 1 {
            b.output("between", y, None).unwrap();
        }
    }
    (model.scope("after").tanh(x).unwrap(), weights)
}

fn values(graph: &Graph) -> Vec<HostTensor> {
    let inputs = graph.inputs.iter().enumerate();
    inputs
        .map(|(i, input)| {
            let count = input.shape.count();
            let values: Vec<f32> = (0..count).map(|j| ((7 * i + j) as f32).sin()).collect();
            HostTensor::from_f32(&input.shape.dims[..], &values).unwrap()
        })
        .collect()
}

fn loops(graph: &Graph) -> usize {
    let nodes = graph.nodes.iter();
    nodes
        .filter(|node| matches!(node.op, Op::While { .. }))
        .count()
}

/// The dimensions of all that loops carry.
fn carried(graph: &Graph) -> Vec<&[usize]> {
    let inputs = graph.nodes.iter().filter_map(|node| match &node.op {
        Op::While { body, .. } => Some(&body.inputs),
        _ => None,
    });
    let dims = inputs.flatten().map(|input| &input.shape.dims[..]);
    dims.collect()
}

fn same_results(graph: &Graph, rolled: &Graph) {
    let inputs = values(graph);
    assert_eq!(
        evaluate(graph, &inputs).unwrap(),
        evaluate(rolled, &inputs).unwrap()
    );
}

#[test]
fn a_chain_of_equal_blocks_is_a_loop() {
    let b = Builder::new();
    let (y, _) = blocks(&b);
    b.output("y", y, None).unwrap();
    let graph = b.finish();
    let rolled = roll(graph.clone(), Some(&[]), 2).unwrap();
    assert_eq!(loops(&rolled), 1);
    assert!(
        rolled.scopes.iter().any(|path| path == "m/blocks.0-3"),
        "{:?}",
        rolled.scopes
    );
    same_results(&graph, &rolled);
    let long = roll(graph.clone(), Some(&[]), BLOCKS + 1).unwrap();
    assert_eq!(loops(&long), 0);
}

#[test]
fn weights_are_stacked_before_the_step() {
    let b = Builder::new();
    let (y, _) = blocks(&b);
    b.output("y", y, None).unwrap();
    let rolled = roll(b.finish(), Some(&["prompt"]), 2).unwrap();
    let staged = stage(&rolled, &["prompt"]).unwrap();
    let stacks: Vec<_> = staged.load.iter().flat_map(|load| &load.outputs).collect();
    assert_eq!(stacks.len(), 2);
    let [weights] = stacks
        .iter()
        .filter(|s| !s.logical_axes.is_empty())
        .collect::<Vec<_>>()[..]
    else {
        panic!("{stacks:?}");
    };
    assert_eq!(weights.logical_axes, [None, None, Some("out")]);
    let of_step = staged.step.inputs.iter();
    let known: Vec<_> = of_step
        .filter(|i| matches!(i.kind, InputKind::Weight(_)))
        .collect();
    assert_eq!(known.len(), 2, "{known:?}");
}

#[test]
fn the_derivative_is_a_loop_in_the_other_direction() {
    let b = Builder::new();
    let (y, weights) = blocks(&b);
    let loss = b.reduce(crate::graph::Reduction::Sum, y, &[0, 1]).unwrap();
    let gradients = grad(&b, loss, &weights).unwrap();
    for (i, gradient) in gradients.into_iter().enumerate() {
        b.output(&format!("gradient{i}"), gradient, None).unwrap();
    }
    let graph = b.finish();
    let rolled = roll(graph.clone(), None, 2).unwrap();
    assert_eq!(loops(&rolled), 2);
    same_results(&graph, &rolled);
    let barriers = |graph: &Graph| {
        let nodes = graph.nodes.iter();
        nodes
            .filter(|node| matches!(node.op, Op::OptimizationBarrier))
            .count()
    };
    let bodies = rolled.nodes.iter().filter_map(|node| match &node.op {
        Op::While { body, .. } => Some(barriers(body)),
        _ => None,
    });
    // What blocks take is one stack, not the first's beside a part of the results.
    let is_part = |node: &&Node| matches!(node.op, Op::Slice { .. }) && node.shape.dims[0] > 1;
    assert_eq!(rolled.nodes.iter().filter(is_part).count(), 0);
    assert!(barriers(&graph) >= BLOCKS);
    assert_eq!(bodies.sum::<usize>(), 0);
    // What the forward pass keeps for the derivative goes as a stack from loop to loop.
    let slices = |graph: &Graph| {
        let nodes = graph.nodes.iter();
        nodes
            .filter(|node| matches!(node.op, Op::Slice { .. }))
            .count()
    };
    let live = rolled.inline_composites(&|_, _| true);
    assert!(
        slices(&live) <= gradients_and_results(),
        "{}",
        slices(&live)
    );
}

/// One slice for each gradient, and one for the result between the blocks.
fn gradients_and_results() -> usize {
    2 * BLOCKS + 1
}

#[test]
fn stacks_are_of_what_other_shapes_are_made_of() {
    let b = Builder::new();
    let model = b.root("m");
    let mut x = b.input("x", f32(&[2, WIDTH]), &[]).unwrap();
    let mut lines = Vec::new();
    for k in 0..BLOCKS {
        let at = model.scope("blocks").scope(k);
        let y = at.tanh(x).unwrap();
        lines.push(at.reshape(y, &[2 * WIDTH]).unwrap());
        x = at.add(x, y).unwrap();
    }
    let mut z = x;
    for (k, line) in lines.into_iter().enumerate() {
        let own = b.reshape(line, &[2, WIDTH]).unwrap();
        let at = model.scope("later").scope(k);
        z = at.mul(at.add(z, own).unwrap(), own).unwrap();
    }
    b.output("z", z, None).unwrap();
    let graph = b.finish();
    let rolled = roll(graph.clone(), None, 2).unwrap();
    assert_eq!(loops(&rolled), 2);
    same_results(&graph, &rolled);
    let is_line = |dims: &[usize]| dims.last() == Some(&(2 * WIDTH));
    assert!(!carried(&rolled).into_iter().any(is_line));
}

/// What blocks hand on is another shape of what they compute, and all of it is used behind them, with what the first one takes: one
/// stack. What they take of vectors are rows, and so is the stack of these.
#[test]
fn blocks_hand_on_another_shape_of_what_they_compute() {
    let b = Builder::new();
    let model = b.root("m");
    let x = b.input("x", f32(&[2, WIDTH]), &[]).unwrap();
    let first = b.tanh(x).unwrap();
    let mut taken = vec![first];
    for k in 0..BLOCKS {
        let at = model.scope("blocks").scope(k);
        let bias = at.param("bias", f32(&[WIDTH]), Init::Zeros, &[]).unwrap();
        let row = at.reshape(bias, &[1, 1, WIDTH]).unwrap();
        let rows = at
            .broadcast_in_dim(row, &[0, 1, 2], &[1, 2, WIDTH])
            .unwrap();
        let flat = at.reshape(taken[k], &[1, 2, WIDTH]).unwrap();
        let y = at.add(at.tanh(flat).unwrap(), rows).unwrap();
        taken.push(at.reshape(y, &[2, WIDTH]).unwrap());
    }
    let mut z = taken[BLOCKS];
    for (k, x) in taken.iter().take(BLOCKS).enumerate() {
        let at = model.scope("afterwards").scope(k);
        z = at.mul(at.add(z, *x).unwrap(), *x).unwrap();
    }
    b.output("z", z, None).unwrap();
    b.output("last", taken[BLOCKS], None).unwrap();
    let graph = b.finish();
    let rolled = roll(graph.clone(), None, 2).unwrap();
    assert_eq!(loops(&rolled), 2);
    same_results(&graph, &rolled);
    let dims = carried(&rolled);
    assert!(dims.contains(&&[BLOCKS, 1, 1, WIDTH][..]), "{dims:?}");
    assert!(dims.contains(&&[BLOCKS + 1, 1, 2, WIDTH][..]), "{dims:?}");
}

#[test]
fn blocks_that_something_outside_connects_stay() {
    let b = Builder::new();
    let model = b.root("m");
    let mut x = b.input("x", f32(&[WIDTH]), &[]).unwrap();
    for k in 0..BLOCKS {
        let at = model.scope("blocks").scope(k);
        x = at.mul(at.tanh(x).unwrap(), x).unwrap();
        x = model.scope("between").abs(x).unwrap();
    }
    b.output("y", x, None).unwrap();
    let rolled = roll(b.finish(), Some(&[]), 2).unwrap();
    assert_eq!(loops(&rolled), 0);
}
