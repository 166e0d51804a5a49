//! The TPU kernels of blocks that are loops, which read entries of stacks and put their results into stacks where these lie.

use std::collections::BTreeMap;

use maxdiff::backend::tpu::{claim_training, claims_in_training, in_stacks};
use maxdiff::dtype::DType;
use maxdiff::graph::{Builder, Graph, Keeps, Op, Tensor, evaluate, roll, vjp};
use maxdiff::nn::{Linear, Precision, gated_gelu, layer_norm, linear};
use maxdiff::quant::{Policy, ROUNDING_KEY, annotate, lower};
use maxdiff::shape::Shape;
use maxdiff::topology::Chip;

use crate::tpu_gradients::every_chip_compiles;
use crate::tpu_kernels::inputs;

const BLOCKS: usize = 3;

/// Blocks of a layer norm and a feed-forward layer around a gated GELU, in int8, with the gradient of what they take: `tokens` rows of
/// 128 features. Kernels of a chip in loops, or operations.
fn blocks(tokens: usize, chip: Option<Chip>) -> Graph {
    let b = Builder::new();
    let shape = Shape::new(DType::BF16, [1, tokens, 128]);
    let x = b.input("x", shape.clone(), &[]).unwrap();
    let gradient = b.input("gradient", shape, &[]).unwrap();
    b.input(ROUNDING_KEY, Shape::new(DType::U32, [2]), &[])
        .unwrap();
    let precision = Precision {
        weights: DType::F32,
        activations: DType::BF16,
    };
    let mut y = x;
    for number in 0..BLOCKS {
        let m = b.root("m").scope("blocks").scope(number);
        let m = m.checkpoint(Keeps::Products);
        let layer = |name: &str, x, outputs| {
            let layer = Linear::new(outputs, "embed", "mlp");
            linear(&m.scope(name), x, layer, precision).unwrap()
        };
        let normed = layer_norm(&m.scope("norm"), y, 1e-5, precision).unwrap();
        let wide = layer("wide", normed, 256);
        let gated = gated_gelu(&m.scope("gate"), wide).unwrap();
        y = m.add(y, layer("narrow", gated, 128)).unwrap();
    }
    for (name, value) in [("y", y), ("x", x), ("gradient", gradient)] {
        b.output(name, value, None).unwrap();
    }
    annotate(&b, &Policy::aqt_int8("m/", 1, Vec::new(), &[]).unwrap()).unwrap();
    let forward = b.finish().inline_composites(&|kind, body| {
        !chip.is_some_and(|chip| claims_in_training(kind, body, chip.features(), 1))
    });
    let b = Builder::resume(forward);
    let values: Vec<Tensor> = b
        .take_outputs()
        .into_iter()
        .map(|(_, value)| value)
        .collect();
    let found = vjp(&b, &[(values[0], values[2])], &values[1..2]).unwrap();
    b.output("y", values[0], None).unwrap();
    b.output("gradient of x", found[0], None).unwrap();
    let graph = lower(&b.finish()).unwrap();
    let Some(chip) = chip else {
        return graph;
    };
    let claimed = claim_training(&graph, chip.features(), 1, &[]).unwrap();
    roll(claimed.inline_composites(&|_, _| true), None, 2).unwrap()
}

/// How many operands and results of the kernels in loops are stacks of these blocks, by kernel.
fn stacks(graph: &Graph) -> BTreeMap<&'static str, usize> {
    let mut found = BTreeMap::new();
    let bodies = graph.nodes.iter().filter_map(|node| match &node.op {
        Op::While { body, .. } => Some(body),
        _ => None,
    });
    for body in bodies {
        for (node, _) in body
            .nodes
            .iter()
            .zip(body.live_nodes())
            .filter(|(_, live)| *live)
        {
            let Op::CustomCall(call) = &node.op else {
                continue;
            };
            let shapes = node
                .operands
                .iter()
                .map(|id| &body.nodes[*id as usize].shape);
            let is_stack = |shape: &&Shape| shape.rank() == 4 && shape.dims[0] == BLOCKS;
            let count = shapes.chain([&node.shape]).filter(is_stack).count();
            *found.entry(call.name()).or_default() += count;
        }
    }
    found
}

#[test]
fn kernels_of_blocks_read_and_write_stacks() {
    let rolled = blocks(32, Some(Chip::V5e));
    let found = in_stacks(&rolled, 1).unwrap();
    // Rows of images, biases, and weights of norms.
    let expected = BTreeMap::from([
        ("gated_gelu", 1),
        ("gated_gelu_gradient", 1),
        ("layer_norm", 2),
        ("layer_norm_added_gradient", 2),
        ("rounded_int8_product", 6),
        ("stochastic_int8_product", 0),
    ]);
    assert_eq!(stacks(&found), expected);
    assert!(stacks(&rolled).values().all(|count| *count == 0));
    let inputs = inputs(&rolled);
    let [copied, read] = [&rolled, &found].map(|graph| evaluate(graph, &inputs).unwrap());
    assert_eq!(copied, read);
    let whole = evaluate(&blocks(32, None), &inputs).unwrap();
    for (whole, found) in whole.iter().zip(&read) {
        let [a, b] = [whole, found].map(|x| x.to_f64_vec().unwrap());
        let norm: f64 = a.iter().map(|x| x * x).sum();
        let distance: f64 = a.iter().zip(&b).map(|(a, b)| (a - b).powi(2)).sum();
        // Both round norms and gates to bf16, by up to 2^-9 (2e-3), but not at the same places, and int8 to 128 steps.
        let error = (distance / norm).sqrt();
        assert!(error <= 2e-2, "{error}");
    }
}

#[test]
fn every_chip_takes_kernels_of_stacks() {
    for (chip, count) in every_chip_compiles(|chip| in_stacks(&blocks(128, Some(chip)), 1).unwrap())
    {
        assert!(count > 0, "{chip:?}");
    }
}
