//! The report of a program that the CPU plugin compiled.

use super::*;
use crate::dtype::DType;
use crate::graph::{Builder, DotDims, Init, Tensor, grad};
use crate::pjrt::install::{self, PluginKind};
use crate::pjrt::{NamedValue, Plugin};
use crate::quant::{Policy, ROUNDING_KEY, annotate, lower};
use crate::runtime::{Program, ProgramOptions, Session};
use crate::shape::Shape;
use crate::shard::{LogicalAxisRules, Parallelism};
use crate::train::optimizer::{
    AdamOptions, Optimizer, OptimizerOptions, Trained, UpdateInputs, update,
};

/// The report of a step of two layers on four devices in two slices, made as the training program is: traced,
/// quantized, differentiated, given an optimizer and compiled.
fn compiled_training_step() -> CompileReport {
    let b = Builder::new();
    let rounding_key = Shape::new(DType::U32, [2]);
    b.input(ROUNDING_KEY, rounding_key, &[]).unwrap();
    let rate = Shape::scalar(DType::F32);
    let rate = b.input("learning_rate", rate, &[]).unwrap();
    let square = Shape::new(DType::F32, [32, 32]);
    let batch = [Some("activation_batch"), None];
    let mut x = b.input("x", square.clone(), &batch).unwrap();
    let mut weights = Vec::new();
    for layer in ["to_q", "to_out"] {
        let b = b.root("unet").scope(layer);
        let weight = b.param("weight", square.clone(), Init::Ones, &[None, None]);
        let weight = weight.unwrap();
        weights.push((b.path(), weight));
        let dims = DotDims {
            lhs_contract: vec![1],
            rhs_contract: vec![1],
            ..DotDims::default()
        };
        x = b.dot_general(x, weight, dims, DType::F32).unwrap();
    }
    let loss = b.sum(b.mul(x, x).unwrap(), &[0, 1]).unwrap();
    annotate(
        &b,
        &Policy::aqt_int8(
            "unet/",
            1,
            Vec::new(),
            &crate::models::unet::INT8_FLOAT_LAYERS,
        )
        .unwrap(),
    )
    .unwrap();
    let wrt: Vec<Tensor> = weights.iter().map(|(_, weight)| *weight).collect();
    let gradients = grad(&b, loss, &wrt).unwrap();
    let trained: Vec<Trained> = weights
        .into_iter()
        .zip(gradients)
        .map(|((name, weight), gradient)| Trained {
            name,
            is_vector: false,
            weight,
            gradient,
            learning_rate: None,
            logical_axes: vec![None, None],
        })
        .collect();
    let options = OptimizerOptions {
        optimizer: Optimizer::AdamW {
            adam: AdamOptions {
                b1: 0.9,
                b2: 0.999,
                eps: 1e-8,
            },
            moments: DType::F32,
        },
        weight_decay: 0.0,
        decays_vectors: true,
        accumulated: 1,
        stochastic_rounding: false,
        max_grad_value: None,
        max_grad_norm: None,
        ema_decay: None,
    };
    let inputs = UpdateInputs {
        loss,
        learning_rate: rate,
        is_last: None,
        rounding: None,
    };
    update(&b, &trained, inputs, &options).unwrap();
    let graph = lower(&b.finish()).unwrap();

    let plugin = install::locate(PluginKind::Cpu).unwrap_or_else(|error| panic!("{error}"));
    let plugin = Plugin::load(&plugin.library).unwrap();
    let devices = [("cpu_device_count".to_owned(), NamedValue::Int64(4))];
    let (parallelism, rules) = (Parallelism::default(), LogicalAxisRules::default());
    let session = Session::open(&plugin, &devices, &parallelism, rules).unwrap();
    let program = Program::compile(&session, &graph, "step", &ProgramOptions::default()).unwrap();
    let input = ReportInput {
        parameters: graph.parameter_count() as u64,
        memory: Memory::default(),
        slice_of_partition: &[0, 0, 1, 1],
        weight_arguments: &graph.weights().map(|(index, _)| index).collect::<Vec<_>>(),
        clock_hz: None,
        trip_count_hints: &[],
        kernel_cycles: &BTreeMap::new(),
        compile_seconds: 0.0,
    };
    CompileReport::new(&program.executable().optimized_hlo().unwrap(), &input).unwrap()
}

#[test]
fn the_scopes_of_a_compiled_training_step_tell_gradients_and_ranges() {
    let report = compiled_training_step();
    let crossing = |purpose| {
        let all = report.collectives.iter();
        all.filter(move |c| c.link == Link::Dcn && c.purpose == purpose)
    };
    let gradients = crossing(Purpose::Gradient).filter(|c| c.op_name.contains("/gradient/"));
    let gradients: u64 = gradients.map(|c| c.bytes).sum();
    // The products of both layers, summed as s32; besides them the optimizer looks at the loss.
    assert_eq!(gradients, 4 * report.parameters, "{report}");
    assert_eq!(report.dcn_bytes.gradient, gradients + 4, "{report}");
    assert!(report.dcn_bytes.range_finding > 0, "{report}");
    for range in crossing(Purpose::RangeFinding) {
        assert!(range.op_name.contains("/range_finding/"), "{report}");
    }
}
