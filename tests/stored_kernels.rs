//! The CPU plugin's products of bf16 with weights that are stored in integers, against the graphs that they stand for.

use std::any::Any;

use crate::common::{
    all_passed, cpu_plugin, in_child_all, kernels_run, run_on, unoptimized_session,
};
use maxdiff::backend::cpu::claim;
use maxdiff::backend::cpu::kernel::{Contract, Kernel};
use maxdiff::dtype::DType;
use maxdiff::graph::{
    Builder, Granularity, Graph, Init, NumericsConvention, Op, Tensor, TensorFormat, evaluate,
    stage,
};
use maxdiff::host_tensor::HostTensor;
use maxdiff::nn::{Conv2d, Linear, Precision, conv2d, linear};
use maxdiff::pjrt::{ISA, ISA_VARIABLE, USABLE_ISAS};
use maxdiff::quant::{Formats, Policy, annotate, lower};
use maxdiff::shape::Shape;

const BF16: Precision = Precision {
    weights: DType::BF16,
    activations: DType::BF16,
};

fn format(element: DType, granularity: Granularity, zero_point: bool) -> TensorFormat {
    TensorFormat {
        element,
        granularity,
        zero_point,
        ..TensorFormat::int8(NumericsConvention::Quark)
    }
}

/// Scales that follow the product, scales of groups, and zero points of groups, of channels and of a whole weight.
fn formats() -> [TensorFormat; 6] {
    use Granularity::{Channel, Group, Tensor};
    [
        format(DType::S8, Channel, false),
        format(DType::S4, Channel, false),
        format(DType::S8, Group(4), false),
        format(DType::S4, Group(8), true),
        format(DType::S4, Channel, true),
        format(DType::S8, Tensor, true),
    ]
}

/// Rows and columns that fill no tile, several parts of k and tasks of rows, channels in tiles of AMX, strides, a 1x1
/// kernel, no bias.
fn layers(b: &Builder) -> Vec<Tensor> {
    let m = b.root("m");
    let x = |name: &str, dims: &[usize]| b.input(name, Shape::new(DType::BF16, dims), &[]).unwrap();
    let layer = |features| Linear::new(features, "embed", "heads");
    let rows = x("rows", &[2, 19, 72]);
    let wide = x("wide", &[1, 3200]);
    let image = x("image", &[2, 7, 6, 8]);
    let deep = x("deep", &[1, 3, 2, 512]);
    let tiles = x("tiles", &[60, 64]);
    let strided = Conv2d {
        stride: 2,
        padding: (0, 1),
        ..Conv2d::same(20, 3)
    };
    vec![
        linear(&m.scope("rows"), rows, layer(100), BF16).unwrap(),
        linear(&m.scope("wide"), wide, layer(33).without_bias(), BF16).unwrap(),
        conv2d(&m.scope("point"), image, Conv2d::same(4, 1), BF16).unwrap(),
        conv2d(&m.scope("strided"), image, strided, BF16).unwrap(),
        conv2d(&m.scope("deep"), deep, Conv2d::same(17, 3), BF16).unwrap(),
        linear(&m.scope("tiles"), tiles, layer(50), BF16).unwrap(),
    ]
}

fn graph(format: TensorFormat) -> Graph {
    graph_of(layers, format)
}

fn graph_of(layers: impl Fn(&Builder) -> Vec<Tensor>, format: TensorFormat) -> Graph {
    let b = Builder::new();
    for (i, y) in layers(&b).into_iter().enumerate() {
        b.output(&format!("y{i}"), y, None).unwrap();
    }
    let policy = Policy::of_layers("m/", Vec::new(), &[], Formats::of_weights(format)).unwrap();
    annotate(&b, &policy).unwrap();
    lower(&b.finish()).unwrap()
}

fn inputs(graph: &Graph) -> Vec<HostTensor> {
    let value = |(i, input): (usize, &maxdiff::graph::Input)| {
        let values = Init::Uniform { bound: 1.0 }.sample(i as u64, "x", input.shape.count());
        let values: Vec<f64> = values.into_iter().map(f64::from).collect();
        HostTensor::from_f64(input.shape.clone(), &values).unwrap()
    };
    graph.inputs.iter().enumerate().map(value).collect()
}

fn contracts(graph: &Graph) -> Vec<&Contract> {
    let calls = graph.nodes.iter().filter_map(|node| match &node.op {
        Op::CustomCall(call) => Some(call.as_ref() as &dyn Any),
        _ => None,
    });
    calls
        .map(|call| match call.downcast_ref() {
            Some(Kernel::Contract(contract)) => contract,
            other => panic!("{other:?}"),
        })
        .collect()
}

/// The kernel would read them packed, which they would be anew in every run.
#[test]
fn weights_that_are_widened_to_float32_in_every_run_are_not_packed() {
    let layer = |b: &Builder| {
        let x = b.input("x", Shape::new(DType::F32, [4, 16]), &[]).unwrap();
        let spec = Linear::new(20, "embed", "heads");
        vec![linear(&b.root("m"), x, spec, Precision::F32).unwrap()]
    };
    for format in formats().into_iter().take(2) {
        let graph = graph_of(layer, format);
        assert!(graph.nodes.iter().any(|node| matches!(node.op, Op::Stored)));
        assert!(contracts(&claim(&graph).unwrap()).is_empty(), "{format:?}");
    }
}

fn relative(found: &HostTensor, expected: &HostTensor) -> f64 {
    let [found, expected] = [found, expected].map(|t| t.to_f64_vec().unwrap());
    let difference = found.iter().zip(&expected).map(|(a, b)| (a - b).powi(2));
    let norm: f64 = expected.iter().map(|b| b * b).sum();
    (difference.sum::<f64>() / norm).sqrt()
}

/// A product becomes one kernel, which computes what the graph does and keeps the weight in its integers.
#[test]
fn products_with_stored_weights_become_one_kernel_each() {
    for format in formats() {
        let graph = graph(format);
        let with = claim(&graph).unwrap();
        let found = contracts(&with);
        assert_eq!(found.len(), 6);
        for contract in found {
            let stored = contract.stored.unwrap();
            assert_eq!(stored.element, format.element);
            assert_eq!(stored.zero_point, format.zero_point);
            assert_eq!(
                stored.scale_groups > 0,
                !format.scales_results(),
                "{contract:?}"
            );
            assert_eq!(contract.column_scale, format.scales_results());
        }
        let inputs = inputs(&graph);
        let expected = evaluate(&graph, &inputs).unwrap();
        // The host's sums are exact, and every rounding before and after them is the same.
        assert_eq!(evaluate(&with, &inputs).unwrap(), expected, "{format:?}");

        let staged = stage(&with.inline_composites(&|_, _| true), &[]).unwrap();
        let weights = staged.step.inputs.iter().filter(|input| input.is_weight());
        let largest = weights.max_by_key(|input| input.shape.bytes()).unwrap();
        // That of `wide`: columns are padded to three vectors.
        let bytes = 48 * 3200 * format.element.bits() / 8;
        assert_eq!(largest.shape.bytes(), bytes, "{}", largest.shape);
    }
}

/// Products of int4 with int4 are those of int8, of weights that are packed as int8.
#[test]
fn int4_activations_take_the_kernel_of_int8() {
    let int4 = format(DType::S4, Granularity::Channel, false);
    let b = Builder::new();
    for (i, y) in layers(&b).into_iter().enumerate() {
        b.output(&format!("y{i}"), y, None).unwrap();
    }
    let formats = Formats {
        activation: Some(int4),
        ..Formats::of_weights(int4)
    };
    let policy = Policy::of_layers("m/", Vec::new(), &[], formats).unwrap();
    annotate(&b, &policy).unwrap();
    let graph = lower(&b.finish()).unwrap();
    let with = claim(&graph).unwrap();
    let found = contracts(&with);
    assert_eq!(found.len(), 6);
    for contract in found {
        assert!(contract.stored.is_none() && contract.row_scale && contract.column_scale);
    }
    let inputs = inputs(&graph);
    let expected = evaluate(&graph, &inputs).unwrap();
    assert_eq!(evaluate(&with, &inputs).unwrap(), expected);
}

/// A process uses one instruction set, so each has a process of its own.
#[test]
fn every_instruction_set_widens_stored_weights() {
    if !kernels_run() {
        return;
    }
    let attributes = cpu_plugin().attributes().clone();
    let usable = attributes[USABLE_ISAS].to_string();
    let name = "stored_kernels::every_instruction_set_widens_stored_weights";
    for isa in usable.split(',') {
        if let Some(output) = in_child_all(&[name], &[(ISA_VARIABLE, isa)]) {
            all_passed(&output, 1);
            continue;
        }
        let isa = attributes[ISA].to_string();
        assert_eq!(std::env::var(ISA_VARIABLE).unwrap(), isa);
        let session = unoptimized_session();
        // Integers as they are, and with scales and zero points of groups.
        let [bytes, _, _, halves, ..] = formats();
        for format in [bytes, halves] {
            let graph = graph(format);
            let inputs = inputs(&graph);
            let with = session.backend().claim(&graph, 1).unwrap().into_owned();
            assert_eq!(contracts(&with).len(), 6);
            let expected = evaluate(&graph, &inputs).unwrap();
            let found = run_on(&session, &with, &inputs);
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                // Where f32 sums of another order round to the other of two neighbours in bf16.
                let error = relative(found, expected);
                assert!(error <= 1e-3, "{isa}, y{i}, {format:?}: {error}");
            }
        }
        return;
    }
}
