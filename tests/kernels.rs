//! The CPU plugin's kernels against the graphs that they stand for, on the host evaluator and on the device.

use crate::common::{cpu_session, run_on};
use maxdiff::dtype::DType;
use maxdiff::graph::{Builder, Graph, Init, Kernel, Op, Tensor, evaluate};
use maxdiff::host_tensor::HostTensor;
use maxdiff::nn::{
    Activation, Attention, Conv2d, Linear, Precision, attention, conv2d, gelu, group_norm,
    layer_norm, linear,
};
use maxdiff::quant::{Policy, annotate, lower};
use maxdiff::runtime::Session;
use maxdiff::shape::Shape;
use maxdiff::target::with_kernels;

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
        if let Op::Kernel(kernel) = &node.op {
            found.push(kernel.as_ref());
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
/// strides, uneven padding, no bias, a 1x1 kernel, results that stay in f32.
fn contractions(b: &Builder) -> Vec<Tensor> {
    let m = b.root("m");
    let x = |name: &str, dims: &[usize]| b.input(name, Shape::new(DType::BF16, dims), &[]).unwrap();
    let layer = |features| Linear::new(features, "embed", "heads");
    let rows = x("rows", &[2, 19, 72]);
    let wide = x("wide", &[1, 6000]);
    let image = x("image", &[2, 7, 6, 8]);
    let deep = x("deep", &[1, 5, 4, 1600]);
    let same = |out, kernel| Conv2d::same(out, kernel);
    let strided = Conv2d {
        stride: 2,
        padding: (0, 1),
        ..same(20, 3)
    };
    vec![
        linear(&m.scope("rows"), rows, layer(100), BF16).unwrap(),
        linear(&m.scope("plain"), rows, layer(16).without_bias(), BF16).unwrap(),
        linear(&m.scope("wide"), wide, layer(33), BF16).unwrap(),
        conv2d(&m.scope("same"), image, same(70, 3), BF16).unwrap(),
        conv2d(&m.scope("point"), image, same(4, 1), BF16).unwrap(),
        conv2d(&m.scope("strided"), image, strided, BF16).unwrap(),
        conv2d(&m.scope("deep"), deep, same(17, 3), BF16).unwrap(),
    ]
}

fn graph_of(build: impl Fn(&Builder) -> Vec<Tensor>, int8: bool) -> Graph {
    let b = Builder::new();
    let results = build(&b);
    for (i, y) in results.iter().enumerate() {
        b.output(&format!("y{i}"), *y, None).unwrap();
    }
    if int8 {
        annotate(&b, &Policy::aqt_int8("m/", 1, Vec::new()).unwrap()).unwrap();
    }
    lower(&b.finish()).unwrap()
}

/// With kernels where the plugin has some for this processor; that it has none is asserted, not passed over.
fn on_device(session: &Session, graph: &Graph) -> Graph {
    let found = session.with_kernels(graph).unwrap();
    let has_kernels = session
        .client()
        .plugin()
        .attributes()
        .contains_key("maxdiff_kernels");
    assert_eq!(kernels(&found).is_empty(), !has_kernels);
    found
}

#[test]
fn contractions_and_what_follows_them_become_one_kernel_each() {
    for int8 in [false, true] {
        let graph = graph_of(contractions, int8);
        let with = with_kernels(&graph).unwrap();
        let contracts = kernels(&with)
            .into_iter()
            .filter_map(|kernel| match kernel {
                Kernel::Contract(contract) => Some(contract),
                _ => None,
            });
        let contracts: Vec<_> = contracts.collect();
        assert_eq!(contracts.len(), 7, "int8: {int8}");
        // Range finding and rounding of every activation.
        assert_eq!(kernels(&with).len(), if int8 { 4 * 7 } else { 7 });
        for (i, contract) in contracts.into_iter().enumerate() {
            assert_eq!(contract.bias, i != 1, "{contract:?}");
            assert_eq!(contract.row_scale, int8, "{contract:?}");
            assert_eq!(contract.column_scale, int8, "{contract:?}");
            assert_eq!(contract.result, DType::BF16, "{contract:?}");
        }
        let inputs = inputs(&graph);
        let expected = evaluate(&graph, &inputs).unwrap();
        // The host's sums are exact, and every rounding after them is the same.
        assert_eq!(evaluate(&with, &inputs).unwrap(), expected, "int8: {int8}");
        let session = cpu_session(1);
        let device = run_on(&session, &on_device(&session, &graph), &inputs);
        for (i, (found, expected)) in device.iter().zip(&expected).enumerate() {
            let error = relative(found, expected);
            // Where f32 sums of another order round to the other of two neighbours in bf16, which is 2^-9 of one value;
            // scales of int8 are found in bf16 by either.
            assert!(error <= 1e-3, "y{i}, int8: {int8}: {error}");
        }
    }
}

#[test]
fn norms_and_gates_become_kernels() {
    let graph = graph_of(
        |b| {
            let m = b.root("m");
            let x = |name: &str, dims: &[usize]| {
                b.input(name, Shape::new(DType::BF16, dims), &[]).unwrap()
            };
            let image = x("image", &[2, 5, 7, 72]);
            let rows = x("rows", &[3, 11, 90]);
            let norm = |name: &str| group_norm(&m.scope(name), image, 8, 1e-5, BF16).unwrap();
            let halves = b.split(rows, 2, 2).unwrap();
            vec![
                norm("plain"),
                silu(b, norm("activated")),
                layer_norm(&m.scope("rows"), rows, 1e-5, BF16).unwrap(),
                b.mul(halves[0], gelu(b, halves[1]).unwrap()).unwrap(),
            ]
        },
        false,
    );
    let with = with_kernels(&graph).unwrap();
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
        let with = with_kernels(&graph).unwrap();
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
fn what_no_kernel_computes_stays_as_it_is() {
    let odd = |b: &Builder| {
        let m = b.root("m");
        let x = b
            .input("x", Shape::new(DType::BF16, [2, 4, 4, 3]), &[])
            .unwrap();
        let f = b.input("f", Shape::new(DType::F32, [4, 8]), &[]).unwrap();
        vec![
            // Channels in no whole group, f32.
            conv2d(&m.scope("odd"), x, Conv2d::same(4, 3), BF16).unwrap(),
            linear(&m.scope("f32"), f, Linear::new(4, "a", "b"), Precision::F32).unwrap(),
        ]
    };
    let graph = graph_of(odd, false);
    let with = with_kernels(&graph).unwrap();
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
    let with = with_kernels(&graph).unwrap();
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
    assert!(kernels(&session.with_kernels(&graph).unwrap()).is_empty());
}
