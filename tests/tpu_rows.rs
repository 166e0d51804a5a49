//! The TPU kernels that read rows of what other kernels gave where these lie.

use maxdiff::backend::tpu::{claim_training, claims_in_training, in_rows};
use maxdiff::dtype::DType;
use maxdiff::graph::{Builder, Graph, Op, Tensor, evaluate, vjp};
use maxdiff::nn::{Attention, Precision, attention};
use maxdiff::quant::{Policy, ROUNDING_KEY, annotate, lower};
use maxdiff::shape::Shape;
use maxdiff::topology::Chip;

use crate::tpu_gradients::every_chip_compiles;
use crate::tpu_kernels::{inputs, project};

/// As many as the kernels of a training step take.
const TOKENS: usize = 256;

/// Attention of 128 features, with projections in int8, with the gradient of the tokens.
fn trained_attention(chip: Chip) -> Graph {
    let b = Builder::new();
    let shape = Shape::new(DType::BF16, [1, TOKENS, 128]);
    let x = b.input("x", shape.clone(), &[]).unwrap();
    let gradient = b.input("gradient", shape, &[]).unwrap();
    b.input(ROUNDING_KEY, Shape::new(DType::U32, [2]), &[])
        .unwrap();
    let m = b.root("m");
    let precision = Precision {
        weights: DType::BF16,
        activations: DType::BF16,
    };
    let all = ["q", "k", "v"].map(|name| project(&m, name, x, 128));
    let layer = Attention {
        heads: 2,
        causal: false,
    };
    let y = attention(&b.root("attention"), all, layer, precision).unwrap();
    for (name, value) in [("y", y), ("x", x), ("gradient", gradient)] {
        b.output(name, value, None).unwrap();
    }
    annotate(&b, &Policy::aqt_int8("m/", 1, Vec::new(), &[]).unwrap()).unwrap();
    let forward = b
        .finish()
        .inline_composites(&|kind, body| !claims_in_training(kind, body, chip.features(), 1));
    let b = Builder::resume(forward);
    let outputs = b.take_outputs();
    let values: Vec<Tensor> = outputs.into_iter().map(|(_, value)| value).collect();
    let found = vjp(&b, &[(values[0], values[2])], &values[1..2]).unwrap();
    b.output("y", values[0], None).unwrap();
    b.output("gradient of x", found[0], None).unwrap();
    let graph = lower(&b.finish()).unwrap();
    let claimed = claim_training(&graph, chip.features(), 1, &[]).unwrap();
    claimed.inline_composites(&|_, _| true)
}

/// The kernels that read rows of larger arrays.
fn readers(graph: &Graph) -> Vec<&'static str> {
    let mut found = Vec::new();
    for (node, _) in graph
        .nodes
        .iter()
        .zip(graph.live_nodes())
        .filter(|(_, live)| *live)
    {
        if let Op::CustomCall(call) = &node.op {
            let shapes = node
                .operands
                .iter()
                .map(|id| &graph.nodes[*id as usize].shape);
            let of_all = Shape::new(DType::BF16, [1, 3 * TOKENS, 128]);
            found.extend(
                shapes
                    .filter(|shape| **shape == of_all)
                    .map(|_| call.name()),
            );
        }
    }
    found
}

#[test]
fn products_read_gradients_of_an_attention() {
    let copied = trained_attention(Chip::V5e);
    let read = in_rows(&copied, 1).unwrap();
    assert!(readers(&copied).is_empty());
    assert_eq!(readers(&read), ["stochastic_int8_product"; 3]);
    let inputs = inputs(&copied);
    let [copied, read] = [&copied, &read].map(|graph| evaluate(graph, &inputs).unwrap());
    assert_eq!(copied, read);
}

#[test]
fn every_chip_takes_kernels_of_rows() {
    for (chip, count) in every_chip_compiles(|chip| in_rows(&trained_attention(chip), 1).unwrap()) {
        assert!(count > 0, "{chip:?}");
    }
}
