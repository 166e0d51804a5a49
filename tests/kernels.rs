//! The CPU plugin's kernels against the graphs that they stand for, on the host evaluator and on the device.

mod doubled;
mod training;

use std::any::Any;

use crate::common::{
    all_passed, cpu_plugin, cpu_session, in_child_all, kernels_run, lowered, run_on,
};
use maxdiff::backend::cpu::kernel::Kernel;
use maxdiff::backend::cpu::{claim, claim_training};
use maxdiff::dtype::DType;
use maxdiff::graph::blockwise::BLOCK;
use maxdiff::graph::{Builder, Graph, Init, Op, Tensor, evaluate};
use maxdiff::host_tensor::HostTensor;
use maxdiff::nn::{
    Activation, Attention, Conv2d, GroupNorm, Linear, Precision, attention, conv2d, gated_gelu,
    group_norm, layer_norm, linear, masked_attention,
};
use maxdiff::pjrt::{ISA, ISA_VARIABLE, UNUSABLE_ISAS, USABLE_ISAS};
use maxdiff::runtime::{Array, Program, ProgramOptions, Session, Slot, Value};
use maxdiff::shape::Shape;

use training::{
    attentions_of_training, bf16_products_of_training, inputs_of_update, inputs_with_integers,
    inputs_with_key, norms_and_gates_of_training, products_of_training,
    stored_products_of_training, update_in_8_bits,
};

const BF16: Precision = Precision {
    weights: DType::BF16,
    activations: DType::BF16,
};

/// Uniform in [-1, 1], another sequence for each input.
fn inputs(graph: &Graph) -> Vec<HostTensor> {
    graph
        .inputs
        .iter()
        .enumerate()
        .map(|(i, input)| {
            let values = Init::Uniform { bound: 1.0 }.sample(i as u64, "x", input.shape.count());
            let values: Vec<f64> = values.into_iter().map(f64::from).collect();
            HostTensor::from_f64(input.shape.clone(), &values).unwrap()
        })
        .collect()
}

fn kernels(graph: &Graph) -> Vec<&Kernel> {
    let mut found = Vec::new();
    for node in &graph.nodes {
        if let Op::CustomCall(call) = &node.op {
            let call: &dyn Any = call.as_ref();
            found.push(call.downcast_ref().unwrap());
        }
    }
    found
}

fn relative(found: &HostTensor, expected: &HostTensor) -> f64 {
    let [found, expected] = [found, expected].map(|t| t.to_f64_vec().unwrap());
    let difference = found.iter().zip(&expected).map(|(a, b)| (a - b).powi(2));
    let norm: f64 = expected.iter().map(|b| b * b).sum();
    (difference.sum::<f64>() / norm).sqrt()
}

/// One program of every kind of contraction that has a kernel: rows and columns that fill no tile, several parts of k,
/// strides, uneven padding, no bias, a 1x1 kernel, results that stay in f32. Rounding to int8 runs on all threads from
/// 32,768 values on: `many` and `large` have more, in many rows and in one.
fn contractions_in(b: &Builder, precision: Precision) -> Vec<Tensor> {
    let m = b.root("m");
    let x = |name: &str, dims: &[usize]| {
        b.input(name, Shape::new(precision.activations, dims), &[])
            .unwrap()
    };
    let layer = |features| Linear::new(features, "embed", "heads");
    let rows = x("rows", &[2, 19, 72]);
    let wide = x("wide", &[1, 6000]);
    let image = x("image", &[2, 7, 6, 8]);
    let deep = x("deep", &[1, 5, 4, 1600]);
    let many = x("many", &[600, 60]);
    let large = x("large", &[1, 70, 72, 8]);
    let same = |out, kernel| Conv2d::same(out, kernel);
    let strided = Conv2d {
        stride: 2,
        padding: (0, 1),
        ..same(20, 3)
    };
    vec![
        linear(&m.scope("rows"), rows, layer(100), precision).unwrap(),
        linear(&m.scope("plain"), rows, layer(16).without_bias(), precision).unwrap(),
        linear(&m.scope("wide"), wide, layer(33), precision).unwrap(),
        conv2d(&m.scope("same"), image, same(70, 3), precision).unwrap(),
        conv2d(&m.scope("point"), image, same(4, 1), precision).unwrap(),
        conv2d(&m.scope("strided"), image, strided, precision).unwrap(),
        conv2d(&m.scope("deep"), deep, same(17, 3), precision).unwrap(),
        linear(&m.scope("many"), many, layer(20), precision).unwrap(),
        conv2d(&m.scope("large"), large, same(5, 3), precision).unwrap(),
    ]
}

fn contractions(b: &Builder) -> Vec<Tensor> {
    contractions_in(b, BF16)
}

fn contractions_of_f32(b: &Builder) -> Vec<Tensor> {
    contractions_in(b, Precision::F32)
}

fn graph_of(build: impl Fn(&Builder) -> Vec<Tensor>, int8: bool) -> Graph {
    let b = Builder::new();
    let results = build(&b);
    for (i, y) in results.iter().enumerate() {
        b.output(&format!("y{i}"), *y, None).unwrap();
    }
    lowered(b, int8)
}

/// With kernels where they run.
fn on_device(session: &Session, graph: &Graph) -> Graph {
    let found = session.backend().claim(graph, 1).unwrap().into_owned();
    assert_eq!(kernels(&found).is_empty(), !kernels_run());
    found
}

#[test]
fn contractions_and_what_follows_them_become_one_kernel_each() {
    for (precision, int8) in [(BF16, false), (BF16, true), (Precision::F32, false)] {
        let graph = graph_of(|b| contractions_in(b, precision), int8);
        let with = claim(&graph).unwrap();
        let contracts = kernels(&with)
            .into_iter()
            .filter_map(|kernel| match kernel {
                Kernel::Contract(contract) => Some(contract),
                _ => None,
            });
        let contracts: Vec<_> = contracts.collect();
        assert_eq!(contracts.len(), 9, "int8: {int8}");
        // Range finding and rounding of every activation.
        assert_eq!(kernels(&with).len(), if int8 { 4 * 9 } else { 9 });
        for (i, contract) in contracts.into_iter().enumerate() {
            assert_eq!(contract.bias, i != 1, "{contract:?}");
            assert_eq!(contract.row_scale, int8, "{contract:?}");
            assert_eq!(contract.column_scale, int8, "{contract:?}");
            assert_eq!(contract.result, precision.activations, "{contract:?}");
        }
        let inputs = inputs(&graph);
        let expected = evaluate(&graph, &inputs).unwrap();
        // The host's sums are exact, and every rounding after them is the same.
        assert_eq!(evaluate(&with, &inputs).unwrap(), expected, "int8: {int8}");
        let session = cpu_session(1);
        let device = run_on(&session, &on_device(&session, &graph), &inputs);
        for (i, (found, expected)) in device.iter().zip(&expected).enumerate() {
            if int8 {
                // Sums are exact, and every rounding after them is the host's.
                assert_eq!(found, expected, "y{i}, int8");
                continue;
            }
            let error = relative(found, expected);
            // f32 sums in another order, which round to the other of two neighbours in bf16 here and there: that is 2^-9 of one
            // value.
            let most = if precision.activations == DType::F32 {
                5e-6
            } else {
                1e-3
            };
            assert!(error <= most, "y{i}: {error}");
        }
    }
}

/// Products with the rows and channels that tiles take: rows and columns that fill no tile, two parts of k and two blocks
/// of rows, an image whose width is a tile and one whose is not, strides, a 1x1 kernel.
fn contractions_in_tiles(b: &Builder) -> Vec<Tensor> {
    let m = b.root("m");
    let x = |name: &str, dims: &[usize]| b.input(name, Shape::new(DType::BF16, dims), &[]).unwrap();
    let layer = |features| Linear::new(features, "embed", "heads");
    let strided = Conv2d {
        stride: 2,
        padding: (0, 1),
        ..Conv2d::same(20, 3)
    };
    let image = x("image", &[1, 3, 16, 64]);
    let narrow = x("narrow", &[2, 5, 6, 64]);
    vec![
        linear(&m.scope("a"), x("a", &[2, 19, 128]), layer(50), BF16).unwrap(),
        linear(&m.scope("b"), x("b", &[130, 2624]), layer(3), BF16).unwrap(),
        conv2d(&m.scope("image"), image, Conv2d::same(20, 3), BF16).unwrap(),
        conv2d(&m.scope("point"), image, Conv2d::same(4, 1), BF16).unwrap(),
        conv2d(&m.scope("strided"), image, strided, BF16).unwrap(),
        conv2d(&m.scope("narrow"), narrow, Conv2d::same(17, 3), BF16).unwrap(),
    ]
}

/// Products whose terms fill no vector and no step of a tile.
fn contractions_of_few_terms(b: &Builder) -> Vec<Tensor> {
    let m = b.root("m");
    let x = |name: &str, dims: &[usize]| b.input(name, Shape::new(DType::BF16, dims), &[]).unwrap();
    let rows = x("rows", &[2, 19, 72]);
    let image = x("image", &[1, 5, 6, 12]);
    vec![
        linear(&m.scope("rows"), rows, Linear::new(70, "a", "b"), BF16).unwrap(),
        conv2d(&m.scope("image"), image, Conv2d::same(20, 3), BF16).unwrap(),
    ]
}

/// Attention of heads that fill no tile, in two blocks of keys, and causal.
fn attentions_in(b: &Builder, precision: Precision) -> Vec<Tensor> {
    let cases = [
        (2, 20, 77, 40, false),
        (1, 98, 530, 8, false),
        (1, 40, 40, 64, true),
    ];
    let attend = |(i, (heads, queries, keys, size, causal)): (usize, _)| {
        let x = |name: &str, length| {
            let shape = Shape::new(precision.activations, [1, length, heads * size]);
            b.input(&format!("{name}{i}"), shape, &[]).unwrap()
        };
        let qkv = [x("q", queries), x("k", keys), x("v", keys)];
        attention(&b.root("m"), qkv, Attention { heads, causal }, precision).unwrap()
    };
    cases.into_iter().enumerate().map(attend).collect()
}

fn attentions(b: &Builder) -> Vec<Tensor> {
    attentions_in(b, BF16)
}

fn attentions_of_f32(b: &Builder) -> Vec<Tensor> {
    attentions_in(b, Precision::F32)
}

/// The tests of what kernels compute, which every instruction set runs.
const OF_EVERY_ISA: [&str; 4] = [
    "kernels::every_instruction_set_computes_what_the_graph_does",
    "kernels::nan_and_infinity_come_out_of_int8_as_the_graph_has_them",
    "kernels::nan_and_infinity_come_out_of_norms_and_gates_as_the_graph_has_them",
    "kernels::norms_and_gates_become_kernels",
];

/// A process uses one instruction set, so each has a process of its own. The arithmetic of those that this machine lacks
/// runs in plain C++, as do all others'.
#[test]
fn every_instruction_set_computes_what_the_graph_does() {
    if !kernels_run() {
        return;
    }
    let attributes = cpu_plugin().attributes().clone();
    let list = |name| attributes[name].to_string();
    let (usable, unusable) = (list(USABLE_ISAS), list(UNUSABLE_ISAS));
    let usable: Vec<&str> = usable.split(',').collect();
    for isa in [list(ISA).as_str(), "emulated_avx2", "emulated_avx512"] {
        assert!(usable.contains(&isa), "{isa} is none of {usable:?}");
    }
    for isa in usable {
        match in_child_all(&OF_EVERY_ISA, &[(ISA_VARIABLE, isa)]) {
            Some(output) => all_passed(&output, OF_EVERY_ISA.len()),
            None => return compare_with_the_host(&list(ISA)),
        }
    }
    for isa in unusable.split(',').filter(|isa| !isa.is_empty()) {
        println!("not run: the kernels with {isa}, which this machine lacks");
    }
}

fn compare_with_the_host(isa: &str) {
    assert_eq!(std::env::var(ISA_VARIABLE).unwrap(), isa);
    let session = cpu_session(1);
    let run = |graph: &Graph, inputs: &[HostTensor]| {
        let expected = evaluate(graph, inputs).unwrap();
        let found = run_on(&session, &on_device(&session, graph), inputs);
        found.into_iter().zip(expected).collect::<Vec<_>>()
    };
    let [tiles, few, of_f32, attending, attending_in_f32] = [
        contractions_in_tiles,
        contractions_of_few_terms,
        contractions_of_f32,
        attentions,
        attentions_of_f32,
    ];
    // Sums of int8 products are exact, so all instruction sets have the host's.
    for build in [tiles, few] {
        let graph = graph_of(build, true);
        for (i, (found, expected)) in run(&graph, &inputs(&graph)).into_iter().enumerate() {
            assert!(
                found == expected,
                "{isa}, y{i}: {}",
                relative(&found, &expected)
            );
        }
    }
    // The same for what training multiplies, whose roundings before the sums are the host's too.
    for precision in [Precision::F32, BF16] {
        let training = products_of_training(precision);
        let given = inputs_with_key(&training);
        let found = run_on(&session, &claim_training(&training).unwrap(), &given);
        let expected = evaluate(&training, &given).unwrap();
        assert!(found == expected, "{isa}, {:?}", precision.activations);
    }
    // Sums of bf16 products are in another order.
    let training = bf16_products_of_training();
    let given = inputs(&training);
    let found = run_on(&session, &claim_training(&training).unwrap(), &given);
    let expected = evaluate(&training, &given).unwrap();
    for ((found, expected), output) in found.iter().zip(&expected).zip(&training.outputs) {
        let error = relative(found, expected);
        assert!(error <= 1e-3, "{isa}, {}: {error}", output.name);
    }
    let stored = stored_products_of_training();
    let given = inputs_with_integers(&stored);
    let found = run_on(&session, &claim_training(&stored).unwrap(), &given);
    for (found, expected) in found.iter().zip(&evaluate(&stored, &given).unwrap()) {
        let error = relative(found, expected);
        assert!(error <= 1e-3, "{isa}: {error}");
    }
    for layers in [
        attentions_of_training(),
        norms_and_gates_of_training(5, 11, true),
    ] {
        let layers = claim_training(&layers).unwrap();
        let given = inputs(&layers);
        let found = run_on(&session, &layers, &given);
        let expected = evaluate(&layers, &given).unwrap();
        for ((found, expected), output) in found.iter().zip(&expected).zip(&layers.outputs) {
            let error = training::distance(found, expected);
            assert!(error <= 4e-3, "{isa}, {}: {error}", output.name);
        }
    }
    // Each operation of an update is rounded as on the host.
    let updates = update_in_8_bits(DType::BF16, 5 * BLOCK + 10, true);
    let given = inputs_of_update(&updates, true);
    let updates = claim_training(&updates).unwrap();
    let found = run_on(&session, &updates, &given);
    assert!(
        found == evaluate(&updates, &given).unwrap(),
        "{isa}: update"
    );
    // As in the tests of one set.
    for (build, limit) in [
        (tiles, 1e-3),
        (few, 1e-3),
        (of_f32, 5e-6),
        (attending, 4e-3),
        (attending_in_f32, 5e-6),
    ] {
        let graph = graph_of(build, false);
        let mut inputs = inputs(&graph);
        // The first input's rows are rows of a result.
        inputs[0] = with_values(&inputs[0], &[(3, f64::NAN)]);
        for (i, (found, expected)) in run(&graph, &inputs).iter().enumerate() {
            let error = relative_of_finite(found, expected);
            assert!(error <= limit, "{isa}, y{i}: {error}");
        }
    }
}

/// A group norm without and with SiLU, a layer norm and a gate, of images of `height` x 7 and 3 x `length` rows.
fn norms_and_gates(height: usize, length: usize) -> Graph {
    graph_of(
        |b| {
            let m = b.root("m");
            let x = |name: &str, dims: &[usize]| {
                b.input(name, Shape::new(DType::BF16, dims), &[]).unwrap()
            };
            let image = x("image", &[2, height, 7, 72]);
            let rows = x("rows", &[3, length, 90]);
            let norm = |name: &str, activation| {
                let layer = GroupNorm {
                    groups: 8,
                    epsilon: 1e-5,
                    activation,
                };
                group_norm(&m.scope(name), image, layer, BF16).unwrap()
            };
            vec![
                norm("plain", None),
                norm("activated", Some(Activation::Silu)),
                layer_norm(&m.scope("rows"), rows, 1e-5, BF16).unwrap(),
                gated_gelu(&m.scope("ff"), rows).unwrap(),
            ]
        },
        false,
    )
}

#[test]
fn norms_and_gates_become_kernels() {
    // On one thread, and on all: the latter from 32,768 values on.
    for (height, length) in [(5, 11), (41, 250)] {
        let graph = norms_and_gates(height, length);
        let with = claim(&graph).unwrap();
        let found: Vec<String> = kernels(&with).iter().map(|k| format!("{k:?}")).collect();
        let expected = [
            "GroupNorm { groups: 8, epsilon: 1e-5, silu: false }",
            "GroupNorm { groups: 8, epsilon: 1e-5, silu: true }",
            "LayerNorm { epsilon: 1e-5 }",
            "Geglu",
        ];
        assert_eq!(found, expected);
        let inputs = inputs(&graph);
        let expected = evaluate(&graph, &inputs).unwrap();
        let host = evaluate(&with, &inputs).unwrap();
        let session = cpu_session(1);
        let device = run_on(&session, &on_device(&session, &graph), &inputs);
        for (i, expected) in expected.iter().enumerate() {
            // The graphs of SiLU and GELU round to bf16 at every operation.
            let limit = if i % 2 == 0 { 1e-3 } else { 5e-3 };
            let errors = [&host[i], &device[i]].map(|found| relative(found, expected));
            assert!(errors.iter().all(|e| *e <= limit), "y{i}: {errors:?}");
        }
    }
}

/// A copy with `values` at their places.
fn with_values(tensor: &HostTensor, values: &[(usize, f64)]) -> HostTensor {
    let mut all = tensor.to_f64_vec().unwrap();
    for (place, value) in values {
        all[*place] = *value;
    }
    HostTensor::from_f64(tensor.shape.clone(), &all).unwrap()
}

/// The relative distance of what is finite, after checking that NaN and infinities are at the same places.
#[track_caller]
fn relative_of_finite(found: &HostTensor, expected: &HostTensor) -> f64 {
    let [found, expected] = [found, expected].map(|t| t.to_f64_vec().unwrap());
    let (mut difference, mut norm) = (0.0, 0.0);
    for (i, (a, b)) in found.iter().zip(&expected).enumerate() {
        if a.is_finite() && b.is_finite() {
            difference += (a - b).powi(2);
            norm += b.powi(2);
        } else {
            assert!(
                (a.is_nan() && b.is_nan()) || a == b,
                "{i}: found {a}, expected {b}"
            );
        }
    }
    match difference == 0.0 {
        true => 0.0,
        false => (difference / norm).sqrt(),
    }
}

/// `inputs` with a NaN and an infinity each, in different rows, images or groups: in groups of 9 of 72 channels, the
/// NaN of the first image is in its first group and the infinity of the second in its last.
#[test]
fn nan_and_infinity_come_out_of_norms_and_gates_as_the_graph_has_them() {
    for (height, length) in [(5, 11), (41, 250)] {
        let graph = norms_and_gates(height, length);
        let mut all = inputs(&graph);
        let place = |name| graph.inputs.iter().position(|input| input.name == name);
        let [image, rows] = ["image", "rows"].map(|name| place(name).unwrap());
        let (nan, infinity) = (f64::NAN, f64::INFINITY);
        let last = all[image].shape.count() - 1;
        all[image] = with_values(&all[image], &[(72 * 3 + 2, nan), (last, infinity)]);
        // Of the gate's two halves either; of the layer norm's rows the first four.
        let places = [
            (7, nan),
            (80, nan),
            (90 + 3, infinity),
            (180 + 50, infinity),
            (270 + 60, -infinity),
        ];
        all[rows] = with_values(&all[rows], &places);
        let expected = evaluate(&graph, &all).unwrap();
        let host = evaluate(&claim(&graph).unwrap(), &all).unwrap();
        let session = cpu_session(1);
        let device = run_on(&session, &on_device(&session, &graph), &all);
        for (i, expected) in expected.iter().enumerate() {
            let is_nan = |x: &f64| x.is_nan();
            let count = expected
                .to_f64_vec()
                .unwrap()
                .iter()
                .filter(|x| is_nan(x))
                .count();
            assert!(
                count > 0 && count < expected.shape.count(),
                "y{i}: {count} NaN"
            );
            for found in [&host[i], &device[i]] {
                let error = relative_of_finite(found, expected);
                assert!(error <= 5e-3, "y{i}: {error}");
            }
        }
    }
}

/// A row with a NaN or an infinity has no range, and is NaN; the others are what they are without it.
#[test]
fn nan_and_infinity_come_out_of_int8_as_the_graph_has_them() {
    for rows in [7, 600] {
        let graph = graph_of(
            |b| {
                let x = b
                    .input("x", Shape::new(DType::BF16, [rows, 60]), &[])
                    .unwrap();
                vec![linear(&b.root("m"), x, Linear::new(20, "a", "b"), BF16).unwrap()]
            },
            true,
        );
        let mut inputs = inputs(&graph);
        let x = graph.inputs.iter().position(|input| input.name == "x");
        let x = x.unwrap();
        let places = [
            (3, f64::NAN),
            (60 + 59, f64::INFINITY),
            (120, f64::NEG_INFINITY),
        ];
        inputs[x] = with_values(&inputs[x], &places);
        let expected = evaluate(&graph, &inputs).unwrap();
        let session = cpu_session(1);
        let device = run_on(&session, &on_device(&session, &graph), &inputs);
        let host = evaluate(&claim(&graph).unwrap(), &inputs).unwrap();
        let nan = expected[0]
            .to_f64_vec()
            .unwrap()
            .iter()
            .filter(|x| x.is_nan())
            .count();
        assert_eq!(nan, 3 * 20);
        for found in [&host[0], &device[0]] {
            assert_eq!(relative_of_finite(found, &expected[0]), 0.0, "{rows} rows");
        }
    }
}

#[test]
fn attention_becomes_a_kernel_in_blocks_of_keys() {
    // Keys in more than one block, keys and sizes that fill no vector, one query.
    let cases = [
        (2, 3, 50, 77, 40, false),
        (1, 2, 19, 600, 64, false),
        (1, 1, 1, 5, 8, false),
        (2, 2, 77, 77, 64, true),
        (1, 1, 600, 600, 16, true),
        (1, 2, 20, 5, 8, true),
    ];
    for (batch, heads, queries, keys, size, causal) in cases {
        let graph = graph_of(
            |b| {
                let x = |name: &str, length| {
                    let shape = Shape::new(DType::BF16, [batch, length, heads * size]);
                    b.input(name, shape, &[]).unwrap()
                };
                let qkv = [x("q", queries), x("k", keys), x("v", keys)];
                let spec = Attention { heads, causal };
                vec![attention(&b.root("m"), qkv, spec, BF16).unwrap()]
            },
            false,
        );
        let with = claim(&graph).unwrap();
        let found = kernels(&with);
        assert!(matches!(found[..], [Kernel::Attention { causal: c, .. }] if *c == causal));
        let inputs = inputs(&graph);
        let expected = evaluate(&graph, &inputs).unwrap();
        // The graph rounds weights to bf16 before it sums them.
        let error = relative(&evaluate(&with, &inputs).unwrap()[0], &expected[0]);
        assert!(error <= 4e-3, "{error}");
        let session = cpu_session(1);
        let found = run_on(&session, &on_device(&session, &graph), &inputs);
        let error = relative(&found[0], &expected[0]);
        assert!(error <= 4e-3, "{queries} queries, {keys} keys: {error}");
    }
}

#[test]
fn hidden_keys_have_no_part_in_attention() {
    // Keys seen by each image: some, in more than a block and at odd places; one; none, where all count alike.
    let masks = |keys: usize| -> Vec<i32> {
        let image = |seen: fn(usize) -> bool| (0..keys).map(move |key| i32::from(seen(key)));
        let images = [
            image(|key| key % 3 != 1),
            image(|key| key == 4),
            image(|_| false),
        ];
        images.into_iter().flatten().collect()
    };
    let session = cpu_session(1);
    for (heads, queries, keys, size) in [(2, 50, 77, 40), (1, 19, 900, 64)] {
        let graph = graph_of(
            |b| {
                let x = |name: &str, length| {
                    let shape = Shape::new(DType::BF16, [3, length, heads * size]);
                    b.input(name, shape, &[]).unwrap()
                };
                let qkv = [x("q", queries), x("k", keys), x("v", keys)];
                let mask = b.input("mask", Shape::new(DType::S32, [3, keys]), &[]);
                vec![masked_attention(&b.root("m"), qkv, mask.unwrap(), heads, BF16).unwrap()]
            },
            false,
        );
        let with = claim(&graph).unwrap();
        assert!(matches!(
            kernels(&with)[..],
            [Kernel::Attention { causal: false, .. }]
        ));
        let mut inputs = inputs(&graph);
        let mask: Vec<f64> = masks(keys).into_iter().map(f64::from).collect();
        let places: Vec<(usize, f64)> = mask.into_iter().enumerate().collect();
        inputs[3] = with_values(&inputs[3], &places);
        let expected = evaluate(&graph, &inputs).unwrap();
        let error = relative(&evaluate(&with, &inputs).unwrap()[0], &expected[0]);
        assert!(error <= 4e-3, "{error}");
        let found = run_on(&session, &on_device(&session, &graph), &inputs);
        let error = relative(&found[0], &expected[0]);
        assert!(error <= 4e-3, "{queries} queries, {keys} keys: {error}");
    }
}

#[test]
fn nan_and_infinity_come_out_of_attention_as_the_graph_has_them() {
    // More than a block of keys.
    const KEYS: usize = 530;
    const SIZE: usize = 8;
    // All other components of the key in question are 0, so its score is the one product's, or 0.
    let alone = |key: usize, value: f64| {
        (0..SIZE).map(move |d| (key * SIZE + d, if d == 0 { value } else { 0.0 }))
    };
    let keys = |count: usize| (0..count).flat_map(move |key| alone(key, 3e38)).collect();
    // Values put in q and in k, and how many queries have NaN where all keys are seen.
    type Values = Vec<(usize, f64)>;
    let cases: Vec<(Values, Values, usize)> = vec![
        (vec![(5 * SIZE + 1, f64::NAN)], vec![], 1),
        (vec![], vec![(520 * SIZE, f64::NAN)], KEYS),
        (vec![], vec![(3 * SIZE, f64::NAN)], KEYS),
        (vec![(5 * SIZE, f64::INFINITY)], vec![], 1),
        // A score of infinity.
        (alone(9, 3e38).collect(), alone(4, 3e38).collect(), 1),
        // A score of -infinity has no weight.
        (alone(9, -3e38).collect(), alone(4, 3e38).collect(), 0),
        // Scores of -infinity in the whole first block, then for all keys.
        (alone(529, -3e38).collect(), keys(520), 0),
        (alone(529, -3e38).collect(), keys(KEYS), 1),
    ];
    let session = cpu_session(1);
    for causal in [false, true] {
        let graph = graph_of(
            |b| {
                let shape = Shape::new(DType::BF16, [1, KEYS, SIZE]);
                let qkv = ["q", "k", "v"].map(|name| b.input(name, shape.clone(), &[]).unwrap());
                let spec = Attention { heads: 1, causal };
                vec![attention(&b.root("m"), qkv, spec, BF16).unwrap()]
            },
            false,
        );
        let run = runner(&session, &on_device(&session, &graph));
        let plain = inputs(&graph);
        for (i, (q, k, nan_rows)) in cases.iter().enumerate() {
            let inputs = [
                with_values(&plain[0], q),
                with_values(&plain[1], k),
                plain[2].clone(),
            ];
            let expected = evaluate(&graph, &inputs).unwrap();
            let values = expected[0].to_f64_vec().unwrap();
            let nan = values.iter().filter(|x| x.is_nan()).count();
            assert!(causal || nan == nan_rows * SIZE, "case {i}: {nan} NaN");
            let error = relative_of_finite(&run(&inputs)[0], &expected[0]);
            assert!(error <= 4e-3, "case {i}, causal: {causal}: {error}");
        }
    }
}

/// What runs a graph on inputs, compiled once.
fn runner<'a>(
    session: &'a Session,
    graph: &Graph,
) -> impl Fn(&[HostTensor]) -> Vec<HostTensor> + use<'a> {
    let program = Program::compile(session, graph, "test", &ProgramOptions::default()).unwrap();
    move |inputs| {
        let put = |(tensor, slot): (&HostTensor, &Slot)| session.put(tensor, &slot.spec).unwrap();
        let arrays: Vec<Array> = inputs.iter().zip(program.inputs()).map(put).collect();
        let results = program.run(arrays.iter().map(Value::Borrow).collect());
        let to_host = |array: &Array| array.to_host(session.mesh()).unwrap();
        results.unwrap().iter().map(to_host).collect()
    }
}

/// Jobs of several callers share the threads: each caller's results are those that it has alone.
#[test]
fn several_callers_at_once_do_not_disturb_each_other() {
    let session = cpu_session(1);
    let callers = [
        graph_of(contractions, false),
        graph_of(contractions, true),
        graph_of(contractions_of_f32, false),
        norms_and_gates(41, 250),
    ]
    .map(|graph| {
        let inputs = inputs(&graph);
        let run = runner(&session, &on_device(&session, &graph));
        let alone = run(&inputs);
        (run, inputs, alone)
    });
    std::thread::scope(|scope| {
        for (run, inputs, alone) in &callers {
            scope.spawn(move || {
                for _ in 0..20 {
                    assert_eq!(run(inputs), *alone);
                }
            });
        }
    });
}

#[test]
fn what_no_kernel_computes_stays_as_it_is() {
    let odd = |b: &Builder| {
        let m = b.root("m");
        let x = b
            .input("x", Shape::new(DType::BF16, [2, 4, 4, 3]), &[])
            .unwrap();
        vec![
            // Channels in no whole group.
            conv2d(&m.scope("odd"), x, Conv2d::same(4, 3), BF16).unwrap(),
        ]
    };
    let graph = graph_of(odd, false);
    let with = claim(&graph).unwrap();
    assert!(kernels(&with).is_empty());
    assert_eq!(with.nodes.len(), graph.nodes.len());
}

#[test]
fn a_value_that_is_used_twice_is_not_taken_into_a_kernel() {
    let graph = graph_of(
        |b| {
            let x = b.input("x", Shape::new(DType::BF16, [3, 8]), &[]).unwrap();
            let y = linear(&b.root("m"), x, Linear::new(16, "a", "b"), BF16).unwrap();
            let wide = b.convert(y, DType::F32).unwrap();
            let both = b.add(wide, silu(b, wide)).unwrap();
            vec![y, both]
        },
        false,
    );
    let with = claim(&graph).unwrap();
    let inputs = inputs(&graph);
    assert_eq!(kernels(&with).len(), 1);
    assert_eq!(
        evaluate(&with, &inputs).unwrap(),
        evaluate(&graph, &inputs).unwrap()
    );
}

fn silu(b: &Builder, x: Tensor) -> Tensor {
    Activation::Silu.apply(b, x).unwrap()
}

#[test]
fn partitioned_programs_have_no_kernels() {
    let graph = graph_of(contractions, false);
    let session = cpu_session(2);
    assert!(kernels(&session.backend().claim(&graph, 1).unwrap()).is_empty());
}
