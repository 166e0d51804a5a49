//! Kernels in programs that the TPU compiler makes, and in its simulation.

use maxdiff::aot::{self, Compiled, Compiler, Simulator};
use maxdiff::dtype::DType;
use maxdiff::emit::{DotPrecision, EmitOptions, stablehlo};
use maxdiff::graph::Builder;
use maxdiff::kernels::{Case, Layer, LayerQuantization};
use maxdiff::lowering::Traced;
use maxdiff::nn::{Attention, Precision, attention, gated_gelu};
use maxdiff::pjrt::{CompileOptions, Topology};
use maxdiff::runtime::ExecutableCache;
use maxdiff::shape::Shape;
use maxdiff::shard::{Axis, LogicalAxisRules, Parallelism};
use maxdiff::topology::Accelerator;
use serde_json::json;

use super::images::convolution;
use super::{
    STORED, alone, attention_layer, calls, linear, normed, normed_in, project, stored,
    stored_block, stored_convolution,
};
use crate::common::{json, program, tpu_plugin};

#[test]
fn every_chip_takes_the_kernels() {
    let plugin = tpu_plugin();
    let attention = attention_layer([1, 4, 600, 1100, 64], false);
    // Blocks that are cut; several blocks of columns, whose rows are quantized in the first.
    let products = [[1, 260, 320, 320], [1, 256, 128, 2560]].map(linear);
    let gated = normed([256, 640], |m, x| {
        gated_gelu(m, project(m, "proj", x, 2560)).unwrap()
    });
    // Several blocks of rows, of channels that fill no register.
    let convolution = convolution([2, 64, 32, 40, 24]);
    let products = [vec![gated, convolution], products.to_vec()].concat();
    // Several blocks of rows and of columns.
    let of_stored = STORED.map(|mode| stored(mode, [1, 640, 640, 2560]));
    let products = [
        products,
        of_stored.to_vec(),
        // Several blocks of columns behind a norm.
        vec![stored_block(LayerQuantization::W4A16, 10)],
    ]
    .concat();
    // Several blocks of rows, and of outputs.
    let convolutions = STORED.map(|mode| stored_convolution(mode, [2, 64, 32, 192, 1408, 3]));
    let of_bf16 = [
        normed_in(false, [256, 640], |m, x| {
            gated_gelu(m, project(m, "proj", x, 2560)).unwrap()
        }),
        alone(Layer::Conv2d, &[2, 64, 32, 136, 140, 3], false),
        alone(Layer::Upsample2x, &[2, 64, 32, 256], false),
        alone(Layer::Conv2d, &[2, 96, 128, 200, 3, 3], false),
    ];
    for name in ["v4-8", "v5e-1", "v5p-8", "v6e-1", "tpu7x-8"] {
        let accelerator = Accelerator::lookup(name).unwrap();
        let options = accelerator.create_options(1).unwrap();
        let topology =
            Topology::create(&plugin, accelerator.pjrt_topology_name(), &options).unwrap();
        // The matrix units of a v4 and of a v7x do not take int8.
        let backend = accelerator.backend();
        let int8 = !["v4-8", "tpu7x-8"].contains(&name);
        let count = products
            .iter()
            .map(|graph| calls(&backend.claim(graph, 1).unwrap()));
        // The attentions of the block are of bf16.
        assert_eq!(count.sum::<usize>(), if int8 { 15 } else { 2 }, "{name}");
        let of_int8 = products.iter().chain(&convolutions);
        let graphs = of_int8.filter(|_| int8).chain(&of_bf16);
        let graphs = graphs.chain([&attention]);
        for (i, graph) in graphs.enumerate() {
            let claimed = backend.claim(graph, 1).unwrap();
            assert_ne!(calls(&claimed), 0, "{name}, program {i}");
            let graph = claimed.inline_composites(&|_, _| true);
            let text = stablehlo(&graph, "kernel", &EmitOptions::default());
            let compiled = topology.compile(&text, &CompileOptions::new(1, 1));
            let hlo = compiled.unwrap_or_else(|error| panic!("{name}, program {i}: {error}"));
            let hlo = hlo.optimized_hlo().unwrap();
            let instructions = hlo.computations.iter().flat_map(|c| &c.instructions);
            let kernels = instructions.filter(|i| i.custom_call_target == "tpu_custom_call");
            assert_eq!(kernels.count(), calls(&claimed), "{name}, program {i}");
        }
    }
}

fn options() -> aot::Options {
    aot::Options {
        step: "layer",
        precision: DotPrecision::Default,
        weights_dtype: "bfloat16",
        activations_dtype: "bfloat16",
        quantization: String::new(),
        memory_advice: Vec::new(),
    }
}

/// Attention between projections, with activations split over the batch, and the text of its program on four devices.
fn on_four_devices(axis: Axis, batch: usize) -> (Compiled, String) {
    let b = Builder::new();
    let dims = [batch, 256, 128];
    let axes = [Some("activation_batch"), None, Some("activation_heads")];
    let x = b.input("x", Shape::new(DType::BF16, dims), &axes).unwrap();
    let precision = Precision {
        weights: DType::BF16,
        activations: DType::BF16,
    };
    let m = b.root("m");
    let [q, k, v] = ["q", "k", "v"].map(|name| project(&m, name, x, 128));
    let layer = Attention {
        heads: 2,
        causal: false,
    };
    let y = attention(&m, [q, k, v], layer, precision).unwrap();
    let y = m.add(project(&m, "out", y, 128), x).unwrap();
    let y = m.constrain(y, &axes).unwrap();
    b.output("y", y, None).unwrap();
    let traced = Traced::new("layer", b.finish());

    let accelerator = Accelerator::lookup("v5e-4").unwrap();
    let parallelism = Parallelism {
        ici: Axis::ALL.map(|of| if of == axis { 4 } else { 1 }),
        ..Parallelism::default()
    };
    let rules = LogicalAxisRules::default();
    let compiler = Compiler::for_topology(accelerator, 1, &parallelism, rules).unwrap();
    let compiled = compiler.compile(&traced, &options(), &mut |_| {}).unwrap();
    let text = compiled.step.executable.optimized_hlo().unwrap();
    (compiled, format!("{text:?}"))
}

#[test]
fn devices_run_kernels_on_their_parts_of_a_batch() {
    tpu_plugin();
    let (compiled, hlo) = on_four_devices(Axis::Fsdp, 8);
    let expected = [("attention", 1), ("product", 2)];
    assert_eq!(compiled.step.kernels, expected.into());
    // Two of eight images each: weights alone are gathered.
    assert!(hlo.contains("tpu_custom_call"));
    let report = &compiled.step.report;
    let gathered = report.ici_bytes.activation + report.ici_bytes.parameter;
    let (weights, images) = (4 * 128 * 128 * 2, 8 * 256 * 128 * 2);
    assert!((weights..images / 2).contains(&gathered), "{gathered}");
    // Devices that share more than a batch have the compiler's operations.
    let (compiled, hlo) = on_four_devices(Axis::Tensor, 8);
    assert_eq!(compiled.step.kernels, [].into());
    assert!(!hlo.contains("tpu_custom_call"));
}

#[test]
fn products_of_int8_are_counted_as_such() {
    tpu_plugin();
    let case =
        "kernel cycles linear batch=1 tokens=256 inputs=256 outputs=256 --quantization int8 --json";
    let report = json(&program(case.split(' ')).output().unwrap());
    let [kernel] = &report["topologies"]["v5e-1"]["kernels"]["kernels"]
        .as_array()
        .unwrap()[..]
    else {
        panic!("{report}");
    };
    // 394 TOPS at 1.5 GHz.
    let cycles = 2.0 * 256f64.powi(3) / 394e12 * 1.5e9;
    let found = kernel["product_cycles"].as_f64().unwrap();
    assert!(
        (found - cycles).abs() <= 1.0,
        "{found}, expected {cycles}: {report}"
    );
}

#[test]
fn a_kernel_is_simulated() {
    tpu_plugin();
    let case = "kernel cycles attention batch=1 queries=128 keys=128 heads=4 --json";
    let report = json(&program(case.split(' ')).output().unwrap());
    let report = &report["topologies"]["v5e-1"];
    let [kernel] = &report["kernels"]["kernels"].as_array().unwrap()[..] else {
        panic!("{report}");
    };
    assert_eq!(
        (&kernel["name"], &kernel["count"]),
        (&json!("attention"), &json!(1))
    );
    let cycles = kernel["cycles"].as_u64().unwrap();
    assert!((100..20_000).contains(&cycles), "{report}");
    let bundles = &kernel["bundles"];
    // The grid has two steps, and a bundle takes a cycle at least.
    let count = bundles["count"].as_u64().unwrap();
    assert!((1..=cycles / 2).contains(&count), "{report}");
    let units = bundles["units"].as_array().unwrap();
    let products = units.iter().find(|unit| unit["name"] == "MATMUL").unwrap();
    let filled = products["filled"].as_u64().unwrap();
    let slots = products["slots"].as_u64().unwrap();
    assert!((1..count * slots).contains(&filled), "{report}");
    assert!(report["kernels"]["by_kind"]["kernel"].is_f64(), "{report}");
    assert_eq!(report["kernels"]["unpredicted"], json!([]));
    assert!(report["compiler"]["total"].is_f64(), "{report}");
    assert_eq!(report["compiler"]["kernels"], json!([]));
}

#[test]
fn cycles_are_simulated_once() {
    tpu_plugin();
    let folder = tempfile::tempdir().unwrap();
    let cache = ExecutableCache::new(folder.path(), 1 << 20);
    let cycles = |program: &str| {
        let simulator = Simulator::new(program.into()).with_cache(Some(cache.clone()));
        let accelerator = Accelerator::lookup("v5e-1").unwrap();
        let compiler = Compiler::for_one_device(accelerator).unwrap();
        let compiler = compiler.with_simulator(simulator);
        let sizes = ["batch=1", "tokens=256", "inputs=256", "outputs=256"].map(str::to_owned);
        let case = Case::new(Layer::Linear, &sizes, None).unwrap();
        let compiled = compiler.compile(&case.traced().unwrap(), &options(), &mut |_| {});
        let report = serde_json::to_value(&compiled.unwrap().step.report).unwrap();
        report["predicted_ms"]["kernels"][0]["cycles"].as_u64()
    };
    let simulated = cycles(env!("CARGO_BIN_EXE_maxdiff-rs"));
    assert!(simulated.is_some_and(|cycles| cycles > 0));
    // A program that is not there simulates nothing.
    assert_eq!(cycles("/nowhere/maxdiff-rs"), simulated);
    let [kept] = std::fs::read_dir(folder.path().join("cycles"))
        .unwrap()
        .collect::<Vec<_>>()
        .try_into()
        .unwrap();
    std::fs::remove_file(kept.unwrap().path()).unwrap();
    assert_eq!(cycles("/nowhere/maxdiff-rs"), None);
}
