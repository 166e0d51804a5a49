//! The TPU kernels of training against the graphs that they stand for, on the host; and that the TPU compiler takes them.

use std::collections::BTreeSet;

use maxdiff::backend::tpu::claim_training;
use maxdiff::dtype::DType;
use maxdiff::emit::{EmitOptions, stablehlo};
use maxdiff::graph::{Builder, ConvDims, Graph, Keeps, Tensor, evaluate, vjp};
use maxdiff::host_tensor::HostTensor;
use maxdiff::nn::{
    Activation, Attention, GroupNorm, Linear, Precision, attention, gated_gelu, group_norm, linear,
    upsample_nearest_2x,
};
use maxdiff::pjrt::{CompileOptions, Topology};
use maxdiff::report::{kernel_calls, kernel_calls_before};
use maxdiff::shape::Shape;
use maxdiff::topology::{Accelerator, Chip};

use crate::common::tpu_plugin;
use crate::tpu_kernels::{calls, inputs};

const BF16: Precision = Precision {
    weights: DType::BF16,
    activations: DType::BF16,
};

/// The gradients of attention's operands in bf16, given that of its result: batch, heads, queries, keys, size of a head.
fn derivative([batch, heads, queries, keys, size]: [usize; 5]) -> Graph {
    let b = Builder::new();
    let input = |name: &str, length: usize| {
        let shape = Shape::new(DType::BF16, [batch, length, heads * size]);
        b.input(name, shape, &[]).unwrap()
    };
    let qkv = [input("q", queries), input("k", keys), input("v", keys)];
    let gradient = input("gradient", queries);
    let attributes = Attention {
        heads,
        causal: false,
    };
    let y = attention(&b.root("m"), qkv, attributes, BF16).unwrap();
    let found = vjp(&b, &[(y, gradient)], &qkv).unwrap();
    for (name, found) in ["q", "k", "v"].into_iter().zip(found) {
        b.output(&format!("gradient of {name}"), found, None)
            .unwrap();
    }
    b.finish()
}

#[test]
fn the_derivative_of_attention_is_its_body() {
    // Queries and keys that fill no block, an odd number of heads, heads that fill no register, several blocks of queries and
    // of keys, one query. The attention has one kernel; its derivative one where blocks of queries fill registers, else two.
    let cases = [
        ([2, 2, 19, 257, 64], 3),
        ([1, 3, 40, 256, 64], 3),
        ([1, 1, 8, 1100, 64], 3),
        ([1, 1, 530, 256, 128], 3),
        ([1, 2, 20, 300, 40], 3),
        ([1, 1, 1, 270, 160], 3),
        ([2, 1, 128, 256, 64], 2),
        ([1, 1, 128, 520, 64], 2),
        ([1, 1, 128, 256, 128], 2),
        ([1, 1, 128, 2400, 64], 2),
        // Few keys for several blocks of queries.
        ([1, 2, 2560, 77, 64], 2),
    ];
    for (case, count) in cases {
        let graph = derivative(case);
        let kernels = claim_training(&graph, Chip::V5e.features(), 1, &[]).unwrap();
        assert_eq!(calls(&kernels), count, "{case:?}");
        // Both round weights, their gradients and the results to bf16, by up to 2^-9 (2e-3), but not at the same places.
        are_near(&graph, &kernels, 1e-2);
    }
}

/// The results of two graphs are within a relative L2 distance.
#[track_caller]
fn are_near(graph: &Graph, kernels: &Graph, bound: f64) {
    let inputs = inputs(graph);
    let [expected, found] = [graph, kernels].map(|g| evaluate(g, &inputs).unwrap());
    for (of, (expected, found)) in graph.outputs.iter().zip(expected.iter().zip(&found)) {
        let (error, shape) = (distance_of(expected, found), &expected.shape);
        assert!(error <= bound, "{} {shape}: {error}", of.name);
    }
}

/// The relative L2 distance.
fn distance_of(expected: &HostTensor, found: &HostTensor) -> f64 {
    let [a, b] = [expected, found].map(|x| x.to_f64_vec().unwrap());
    let norm: f64 = a.iter().map(|x| x * x).sum();
    let distance: f64 = a.iter().zip(&b).map(|(a, b)| (a - b).powi(2)).sum();
    (distance / norm).sqrt()
}

/// The gated GELU of bf16 rows of `columns` values and their gates, and the gradient of these rows.
fn gates([batch, tokens, columns]: [usize; 3]) -> Graph {
    let b = Builder::new();
    let input = |name: &str, columns: usize| {
        let shape = Shape::new(DType::BF16, [batch, tokens, columns]);
        b.input(name, shape, &[]).unwrap()
    };
    let (x, gradient) = (input("x", 2 * columns), input("gradient", columns));
    let y = gated_gelu(&b.root("m"), x).unwrap();
    let found = vjp(&b, &[(y, gradient)], &[x]).unwrap();
    b.output("y", y, None).unwrap();
    b.output("gradient of x", found[0], None).unwrap();
    b.finish()
}

#[test]
fn the_gated_gelu_and_its_derivative_are_their_bodies() {
    // Blocks of 64, 48 and 16 rows, columns of one register and of several widths, two images; then rows that make no tile, and
    // columns that fill no register.
    let cases = [
        ([1, 64, 128], 2),
        ([2, 24, 640], 2),
        ([1, 16, 1280], 2),
        ([1, 24, 128], 0),
        ([1, 64, 96], 0),
    ];
    for (case, count) in cases {
        let graph = gates(case);
        let kernels = claim_training(&graph, Chip::V5e.features(), 1, &[]).unwrap();
        assert_eq!(calls(&kernels), count, "{case:?}");
        // The operations round to bf16 between them, by up to 2^-9 (2e-3).
        are_near(&graph, &kernels, 5e-3);
    }
}

/// An image in bf16 with every pixel twice in both directions, and its gradient: images, height, width, channels.
fn upsampling(dims: [usize; 4]) -> Graph {
    let b = Builder::new();
    let input =
        |name: &str, dims: [usize; 4]| b.input(name, Shape::new(DType::BF16, dims), &[]).unwrap();
    let x = input("x", dims);
    let [images, height, width, channels] = dims;
    let gradient = input("gradient", [images, 2 * height, 2 * width, channels]);
    let y = upsample_nearest_2x(&b.root("m"), x).unwrap();
    let found = vjp(&b, &[(y, gradient)], &[x]).unwrap();
    b.output("y", y, None).unwrap();
    b.output("gradient of x", found[0], None).unwrap();
    b.finish()
}

#[test]
fn upsampling_and_its_derivative_are_their_bodies() {
    // One row; several images and channels that fill no register; more pixels than a register has lanes; then rows that make no
    // tile.
    let cases = [
        ([1, 1, 16, 128], 2),
        ([2, 3, 32, 20], 2),
        ([1, 2, 144, 8], 2),
        ([1, 2, 24, 128], 0),
    ];
    for (case, count) in cases {
        let graph = upsampling(case);
        let kernels = claim_training(&graph, Chip::V5e.features(), 1, &[]).unwrap();
        assert_eq!(calls(&kernels), count, "{case:?}");
        // The operations round each sum to bf16, by up to 2^-9 (2e-3).
        are_near(&graph, &kernels, 5e-3);
    }
}

#[test]
fn images_that_devices_share_stay_the_compilers() {
    let graph = upsampling([1, 4, 32, 128]);
    let kernels = claim_training(&graph, Chip::V5e.features(), 2, &[]).unwrap();
    assert_eq!(calls(&kernels), 0);
}

/// A group norm of images in bf16, with SiLU behind it if `silu`, and the gradients of its operands: images, height, width, channels,
/// groups.
fn norm_of_groups([images, height, width, channels, groups]: [usize; 5], silu: bool) -> Graph {
    let b = Builder::new();
    let shape = Shape::new(DType::BF16, [images, height, width, channels]);
    let [x, gradient] = ["x", "gradient"].map(|name| b.input(name, shape.clone(), &[]).unwrap());
    let layer = GroupNorm {
        groups,
        epsilon: 1e-5,
        activation: silu.then_some(Activation::Silu),
    };
    let y = group_norm(&b.root("m").scope("norm"), x, layer, BF16).unwrap();
    let [weight, bias] = ["m/norm.weight", "m/norm.bias"].map(|name| {
        let input = b.with_graph(|g| g.inputs.iter().find(|i| i.name == name).cloned());
        b.declare(input.unwrap()).unwrap()
    });
    let found = vjp(&b, &[(y, gradient)], &[x, weight, bias]).unwrap();
    b.output("y", y, None).unwrap();
    for (name, found) in ["x", "weight", "bias"].into_iter().zip(found) {
        b.output(&format!("gradient of {name}"), found, None)
            .unwrap();
    }
    b.finish()
}

#[test]
fn group_norms_and_their_derivatives_are_their_bodies() {
    // One tile; several images, channels that fill no register; several blocks of rows and more channels than are worked on at once;
    // then rows that make no tile.
    let cases = [
        ([1, 4, 4, 128, 32], 4),
        ([2, 4, 8, 40, 4], 4),
        ([1, 32, 32, 640, 32], 4),
        ([1, 3, 8, 128, 32], 0),
    ];
    for (case, count) in cases {
        for silu in [false, true] {
            let graph = norm_of_groups(case, silu);
            let kernels = claim_training(&graph, Chip::V5e.features(), 1, &[]).unwrap();
            assert_eq!(calls(&kernels), count, "{case:?}");
            // The operations round SiLU and its derivative to bf16 between them, by up to 2^-9 (2e-3).
            are_near(&graph, &kernels, 1e-2);
        }
    }
}

/// The gradient of a block's input. With `recomputed` the block's values are computed again for it.
fn block(recomputed: bool) -> Graph {
    let b = Builder::new();
    let shape = Shape::new(DType::BF16, [1, 256, 64]);
    let x = b.input("x", shape.clone(), &[]).unwrap();
    let gradient = b.input("gradient", shape, &[]).unwrap();
    let m = b.root("m");
    let m = if recomputed {
        m.checkpoint(Keeps::Nothing)
    } else {
        m
    };
    let project = |name: &str, x: Tensor| {
        let layer = Linear::new(64, "embed", "mlp");
        linear(&m.scope(name), x, layer, BF16).unwrap()
    };
    let qkv = ["to_q", "to_k", "to_v"].map(|name| project(name, x));
    let attributes = Attention {
        heads: 1,
        causal: false,
    };
    let y = attention(&m, qkv, attributes, BF16).unwrap();
    let found = vjp(&b, &[(project("to_out", y), gradient)], &[x]).unwrap();
    b.output("gradient of x", found[0], None).unwrap();
    b.finish()
}

#[test]
fn a_block_that_is_computed_again_has_the_same_gradient_in_kernels() {
    let graph = block(true);
    let kernels = claim_training(&graph, Chip::V5e.features(), 1, &[]).unwrap();
    // The attention again, and one for its derivative: nothing reads the result of the forward pass here.
    assert_eq!(calls(&kernels), 2);
    // Weights that keep the size of what they multiply: scores far apart have gradients that cancel.
    let inputs = graph.inputs.iter().zip(inputs(&graph));
    let inputs = inputs.map(|(input, value)| match input.is_weight() {
        true => {
            let small = value.to_f64_vec().unwrap().into_iter().map(|x| x / 16.0);
            HostTensor::from_f64(value.shape.clone(), &small.collect::<Vec<f64>>()).unwrap()
        }
        false => value,
    });
    let inputs: Vec<HostTensor> = inputs.collect();
    let [expected, found] = [&graph, &kernels].map(|g| evaluate(g, &inputs).unwrap());
    let kept = evaluate(&block(false), &inputs).unwrap();
    assert_eq!(distance_of(&expected[0], &kept[0]), 0.0);
    let error = distance_of(&expected[0], &found[0]);
    assert!(error <= 1e-2, "{error}");
}

#[test]
fn attention_to_few_keys_stays_the_compilers() {
    // Few queries, heads that fill no register, hardly any keys.
    for case in [
        [1, 2, 512, 77, 64],
        [1, 1, 1024, 77, 64],
        [1, 2, 1024, 77, 40],
        [1, 2, 1024, 63, 64],
    ] {
        let graph = claim_training(&derivative(case), Chip::V5e.features(), 1, &[]).unwrap();
        assert_eq!(calls(&graph), 0, "{case:?}");
    }
}

/// A 3x3 convolution in bf16, and the gradients of image and weights, given that of the result: images, height, width, inputs,
/// outputs.
fn trained_convolution([images, height, width, inputs, outputs]: [usize; 5]) -> Graph {
    let b = Builder::new();
    let input =
        |name: &str, dims: [usize; 4]| b.input(name, Shape::new(DType::BF16, dims), &[]).unwrap();
    let x = input("x", [images, height, width, inputs]);
    let weight = input("weight", [outputs, inputs, 3, 3]);
    let gradient = input("gradient", [images, height, width, outputs]);
    let dims = ConvDims::of_image(1, (1, 1));
    let y = b.convolution(x, weight, dims, DType::F32).unwrap();
    let y = b.convert(y, DType::BF16).unwrap();
    let found = vjp(&b, &[(y, gradient)], &[x, weight]).unwrap();
    for (name, value) in [("y", y), ("dx", found[0]), ("dw", found[1])] {
        b.output(name, value, None).unwrap();
    }
    b.finish()
}

#[test]
fn every_chip_takes_the_derivatives_kernels() {
    // The attention itself and one or two for its derivative; the convolution and its derivatives. A v4's core has less memory.
    every_chip_takes(&derivative([1, 2, 4096, 4096, 64]), |chip| match chip {
        Chip::V4 => 3,
        _ => 2,
    });
    every_chip_takes(&derivative([1, 4, 600, 1100, 64]), |_| 3);
    every_chip_takes(&derivative([1, 2, 4096, 77, 64]), |_| 2);
    every_chip_takes(&trained_convolution([1, 64, 64, 640, 320]), |_| 3);
}

#[test]
fn every_chip_takes_the_kernels_of_gates() {
    every_chip_takes(&gates([1, 128, 2560]), |_| 2);
}

#[test]
fn every_chip_takes_the_kernels_of_group_norms() {
    every_chip_takes(&norm_of_groups([1, 32, 64, 320, 32], true), |_| 4);
    every_chip_takes(&norm_of_groups([2, 32, 32, 1280, 32], false), |_| 4);
}

#[test]
fn every_chip_takes_the_kernels_of_upsampling() {
    every_chip_takes(&upsampling([1, 32, 32, 1280]), |_| 2);
}

/// Every kind of TPU compiles the kernels of a training step, of which there are so many.
pub fn every_chip_takes(graph: &Graph, count: fn(Chip) -> usize) {
    let claimed = |chip: Chip| {
        let graph = claim_training(graph, chip.features(), 1, &[]).unwrap();
        graph.inline_composites(&|_, _| true)
    };
    for (chip, found) in every_chip_compiles(claimed) {
        assert_eq!(found, count(chip), "{chip:?}");
    }
}

/// Every kind of TPU compiles a program, and what the report says of its kernels before that is what it says then: the number of their
/// calls in the compiled program.
pub fn every_chip_compiles(graph: impl Fn(Chip) -> Graph) -> Vec<(Chip, usize)> {
    let plugin = tpu_plugin();
    let mut counts = Vec::new();
    for name in ["v4-8", "v5e-1", "v5p-8", "v6e-1", "tpu7x-8"] {
        let accelerator = Accelerator::lookup(name).unwrap();
        let chip = accelerator.chip;
        let graph = graph(chip);
        let text = stablehlo(&graph, "kernel", &EmitOptions::default());
        let options = accelerator.create_options(1).unwrap();
        let topology =
            Topology::create(&plugin, accelerator.pjrt_topology_name(), &options).unwrap();
        let compiled = topology.compile(&text, &CompileOptions::new(1, 1));
        let hlo = compiled.unwrap_or_else(|error| panic!("{name}: {error}"));
        let hlo = hlo.optimized_hlo().unwrap();
        let instructions = hlo.computations.iter().flat_map(|c| &c.instructions);
        let kernels = instructions.filter(|i| i.custom_call_target == "tpu_custom_call");
        let count = kernels.count();
        // What is simulated while the compiler works is what it compiles.
        let [before, after] = [
            kernel_calls_before(&graph, None),
            kernel_calls(&hlo).unwrap(),
        ]
        .map(|calls| {
            calls
                .into_iter()
                .map(|call| call.code)
                .collect::<BTreeSet<_>>()
        });
        assert!(
            before == after && after.is_empty() == (count == 0),
            "{name}"
        );
        counts.push((chip, count));
    }
    counts
}
