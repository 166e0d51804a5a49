//! Int8 contractions against what AQT 0.9.0 and Qwix 0.1.8 computed, on the host evaluator and on the CPU device.
//!
//! `scripts/oracles/README.md` says what is recorded. Every int8 operand and every scale of the lowered graph is
//! compared, beside the results; the operands are read from the graph itself, as the operands of its int32 products.

use std::collections::BTreeSet;

use crate::common::{Golden, cpu_session, distance, run_on};
use maxdiff::dtype::DType;
use maxdiff::graph::{
    Arithmetic, Binary, Builder, ContractionQuant, ConvDims, ConvLayout, DotDims, Granularity,
    Graph, Init, NumericsConvention, Op, Output, QuantDot, Rounding, TensorFormat, evaluate, vjp,
};
use maxdiff::host_tensor::HostTensor;
use maxdiff::quant::{Formats, Policy, annotate, lower_with_noise};
use maxdiff::shape::Shape;
use serde_json::Value;

const SHARDS: [usize; 4] = [0, 1, 2, 4];

fn operand(convention: NumericsConvention, rounding: Rounding) -> Option<TensorFormat> {
    Some(TensorFormat {
        rounding,
        ..TensorFormat::int8(convention)
    })
}

/// AQT's int8 training annotation; `rounding` is the incoming gradient's.
fn aqt(rounding: Rounding, shards: usize) -> QuantDot {
    let nearest = operand(NumericsConvention::Aqt, Rounding::NearestEven);
    let backward = |local_shards| ContractionQuant {
        lhs: operand(NumericsConvention::Aqt, rounding),
        rhs: nearest,
        local_shards,
        arithmetic: Arithmetic::Native,
    };
    QuantDot {
        forward: ContractionQuant {
            lhs: nearest,
            rhs: nearest,
            local_shards: 1,
            arithmetic: Arithmetic::Native,
        },
        dlhs: Some(backward(1)),
        drhs: (shards > 0).then(|| backward(shards)),
    }
}

fn qwix() -> QuantDot {
    let nearest = operand(NumericsConvention::Qwix, Rounding::NearestEven);
    QuantDot {
        forward: ContractionQuant {
            lhs: nearest,
            rhs: nearest,
            local_shards: 1,
            arithmetic: Arithmetic::Native,
        },
        dlhs: None,
        drhs: None,
    }
}

fn numbers(value: &Value) -> Vec<usize> {
    let list = value.as_array().unwrap().iter();
    list.map(|n| n.as_u64().unwrap() as usize).collect()
}

/// JAX's `((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))`.
fn dot_dims(value: &Value) -> DotDims {
    DotDims {
        lhs_contract: numbers(&value[0][0]),
        rhs_contract: numbers(&value[0][1]),
        lhs_batch: numbers(&value[1][0]),
        rhs_batch: numbers(&value[1][1]),
    }
}

/// An einsum whose result has the dimension order of a dot: batch, lhs free, rhs free.
fn einsum_dims(equation: &str) -> DotDims {
    let (operands, out) = equation.split_once("->").unwrap();
    let (lhs, rhs) = operands.split_once(',').unwrap();
    let places = |letters: &str, of: &str| -> Vec<usize> {
        letters.chars().map(|c| of.find(c).unwrap()).collect()
    };
    let shared: String = lhs.chars().filter(|c| rhs.contains(*c)).collect();
    let (batch, contract): (String, String) = shared.chars().partition(|c| out.contains(*c));
    let free = |of: &str| -> String { of.chars().filter(|c| !shared.contains(*c)).collect() };
    assert_eq!(out, format!("{batch}{}{}", free(lhs), free(rhs)));
    DotDims {
        lhs_batch: places(&batch, lhs),
        rhs_batch: places(&batch, rhs),
        lhs_contract: places(&contract, lhs),
        rhs_contract: places(&contract, rhs),
    }
}

/// NHWC by HWIO.
fn conv_dims(case: &Value) -> ConvDims {
    let pair = |v: &Value| (v[0].as_i64().unwrap(), v[1].as_i64().unwrap());
    let padding: Vec<(i64, i64)> = case["padding"]
        .as_array()
        .unwrap()
        .iter()
        .map(pair)
        .collect();
    ConvDims {
        lhs: ConvLayout::channels_last(2),
        rhs: ConvLayout {
            batch: 3,
            feature: 2,
            spatial: vec![0, 1],
        },
        out: ConvLayout::channels_last(2),
        strides: numbers(&case["window_strides"]),
        padding,
        lhs_dilation: vec![1, 1],
        rhs_dilation: vec![1, 1],
        feature_groups: case
            .get("feature_group_count")
            .map_or(1, |g| g.as_u64().unwrap() as usize),
        batch_groups: 1,
    }
}

fn dtype_of(key: &str) -> DType {
    if key.ends_with("_bf16") {
        DType::BF16
    } else {
        DType::F32
    }
}

fn recorded_shape(golden: &Golden, name: &str, dtype: DType) -> Shape {
    Shape::new(dtype, golden.dims(name))
}

/// Makes outputs of the integers and scales of every lowered contraction.
///
/// `name` gives, for a contraction's path, its recorded name and those of its two operands.
fn expose(graph: &mut Graph, name: impl Fn(&str) -> (String, [&'static str; 2])) {
    let live = graph.live_nodes();
    let mut found = Vec::new();
    for (id, node) in graph.nodes.iter().enumerate() {
        let contraction = matches!(node.op, Op::DotGeneral { .. } | Op::Convolution { .. });
        let quantized = |of: &u32| graph.nodes[*of as usize].shape.dtype.bits() == 8;
        if !contraction || !node.operands.iter().all(quantized) || !live[id] {
            continue;
        }
        let (what, operands) = name(graph.path(node));
        // int32 product and its conversion, or float32 product, times the lhs's scales, times the rhs's.
        let mut at = id as u32;
        let user = |of: u32| {
            let mut users = graph.nodes.iter().enumerate();
            users
                .find(|(i, n)| live[*i] && n.operands.first() == Some(&of))
                .map(|(i, n)| (i as u32, n))
                .unwrap()
        };
        if node.shape.dtype == DType::S32 {
            (at, _) = user(at);
        }
        for (side, operand) in operands.into_iter().enumerate() {
            let (product, scaled) = user(at);
            assert!(matches!(scaled.op, Op::Binary(Binary::Mul)), "{what}");
            let mut scale = scaled.operands[1];
            if let Op::BroadcastInDim { .. } = graph.nodes[scale as usize].op {
                scale = graph.nodes[scale as usize].operands[0];
            }
            found.push((format!("{what}_{operand}_q"), node.operands[side]));
            found.push((format!("{what}_{operand}_scale"), scale));
            at = product;
        }
    }
    for (name, node) in found {
        graph.outputs.push(Output {
            name,
            node,
            alias: None,
            logical_axes: Vec::new(),
        });
    }
}

/// All recorded variants of one AQT case.
fn aqt_graph(golden: &Golden, key: &str) -> Graph {
    let dtype = dtype_of(key);
    let b = Builder::new();
    let shape = |name: &str| recorded_shape(golden, &format!("in/{key}/{name}"), dtype);
    let lhs = b.input("lhs", shape("lhs"), &[]).unwrap();
    let rhs = b
        .root("aqt")
        .param("rhs", shape("rhs"), Init::Zeros, &[])
        .unwrap();
    let g = b.input("g", shape("g"), &[]).unwrap();
    for (rounding, prefix) in [
        (Rounding::NearestEven, ""),
        (Rounding::Stochastic, "stochastic_"),
    ] {
        for shards in SHARDS {
            let at = b.root("aqt").scope(format!("{prefix}shards{shards}"));
            let dot = Op::DotGeneral {
                dims: dot_dims(&golden.meta["cases"][key]["dimension_numbers"]),
                result: dtype,
                quant: Some(Box::new(aqt(rounding, shards))),
            };
            let y = at.push(dot, &[lhs, rhs]).unwrap();
            let cotangents = vjp(&b, &[(y, g)], &[lhs, rhs]).unwrap();
            if shards == 0 {
                if rounding == Rounding::NearestEven {
                    b.output("fwd", y, None).unwrap();
                }
                b.output(&format!("{prefix}dlhs"), cotangents[0], None)
                    .unwrap();
            }
            if shards > 0 || rounding == Rounding::NearestEven {
                b.output(&format!("{prefix}shards{shards}_drhs"), cotangents[1], None)
                    .unwrap();
            }
        }
    }
    // What follows the model's name in a path names the variant; the weight's gradient ends with `/gradient`.
    let variant = |path: &str| -> String {
        let path = path.trim_end_matches("/gradient");
        path.rsplit('/').next().unwrap().to_string()
    };
    let mut graph = lower_with_noise(&b.finish(), &mut |b, dims| {
        let path = b.path();
        let name = if path.ends_with("/gradient") {
            let shards = variant(&path).replace("stochastic_", "");
            format!("{shards}_noise_drhs")
        } else {
            "noise_dlhs".to_string()
        };
        b.input(&name, Shape::new(DType::F32, dims), &[])
    })
    .unwrap()
    .inline_composites(&|_, _| true);
    expose(&mut graph, |path| {
        if !path.starts_with("backward/") {
            ("fwd".to_string(), ["lhs", "rhs"])
        } else if path.ends_with("/gradient") {
            (format!("{}_drhs", variant(path)), ["g", "lhs"])
        } else {
            let rounding = variant(path).replace("shards0", "");
            (format!("{rounding}dlhs"), ["g", "rhs"])
        }
    });
    graph
}

fn qwix_graph(golden: &Golden, key: &str) -> Graph {
    let cotangents = golden.has(&format!("out/{key}/eager/dlhs"));
    // Qwix 0.1.8 raises in the derivative of a grouped convolution.
    let case = &golden.meta["cases"][key];
    assert!(cotangents || case["feature_group_count"] == 2, "{key}");
    let mut graph = qwix_graph_of(golden, key, Formats::qwix_int8(), cotangents);
    expose(&mut graph, |_| ("fwd".to_string(), ["lhs", "rhs"]));
    graph
}

/// The recorded contraction in these formats, lowered, with its derivative if it has `cotangents`.
fn qwix_graph_of(golden: &Golden, key: &str, formats: Formats, cotangents: bool) -> Graph {
    let dtype = dtype_of(key);
    let case = &golden.meta["cases"][key];
    let b = Builder::new();
    let shape = |name: &str| recorded_shape(golden, &format!("in/{key}/{name}"), dtype);
    let [lhs, rhs, g] = ["lhs", "rhs", "g"].map(|n| b.input(n, shape(n), &[]).unwrap());
    let quant = None;
    let op = match case["op"].as_str().unwrap() {
        "conv_general_dilated" => Op::Convolution {
            dims: Box::new(conv_dims(case)),
            result: dtype,
            quant,
        },
        "einsum" => Op::DotGeneral {
            dims: einsum_dims(case["equation"].as_str().unwrap()),
            result: dtype,
            quant,
        },
        "dot_general" => Op::DotGeneral {
            dims: dot_dims(&case["dimension_numbers"]),
            result: dtype,
            quant,
        },
        other => panic!("{key}: {other}"),
    };
    let y = b.root("qwix").push(op, &[lhs, rhs]).unwrap();
    annotate(
        &b,
        &Policy::qwix("qwix", ".*", Vec::new(), formats).unwrap(),
    )
    .unwrap();
    b.output("fwd", y, None).unwrap();
    if cotangents {
        let cotangents = vjp(&b, &[(y, g)], &[lhs, rhs]).unwrap();
        b.output("dlhs", cotangents[0], None).unwrap();
        b.output("drhs", cotangents[1], None).unwrap();
    }
    lower_with_noise(&b.finish(), &mut |_, _| {
        panic!("Qwix rounds nothing stochastically")
    })
    .unwrap()
    .inline_composites(&|_, _| true)
}

fn inputs(golden: &Golden, key: &str, graph: &Graph) -> Vec<HostTensor> {
    let tensor = |input: &maxdiff::graph::Input| {
        // One shard's noise is recorded with its dimension of size 1.
        let values = golden.values(&format!("in/{key}/{}", input.key()));
        HostTensor::from_f64(input.shape.clone(), values).unwrap()
    };
    graph.inputs.iter().map(tensor).collect()
}

fn recorded_keys(golden: &Golden) -> Vec<String> {
    let cases = golden.meta["cases"].as_object().unwrap();
    cases.keys().cloned().collect()
}

/// Asserts that no element differs by more than `bound` times the largest recorded one; 0 asks for equality.
fn check(what: &str, found: &HostTensor, expected: &[f64], bound: f64) {
    let found = found.to_f64_vec().unwrap();
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0.0, |m: f64, v| m.max(v.abs()));
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!(
            (f - e).abs() <= bound * largest,
            "{what}[{i}]: {f} is not {e} (largest {largest}, bound {bound})"
        );
    }
}

/// Asserts that the graph's outputs are what is recorded of `key`, all of it.
fn assert_complete(golden: &Golden, key: &str, graph: &Graph) {
    let prefix = format!("out/{key}/eager/");
    let recorded: BTreeSet<String> = golden
        .shapes()
        .into_iter()
        .filter_map(|(name, _)| name.strip_prefix(&prefix).map(str::to_string))
        .collect();
    let found: BTreeSet<String> = graph.outputs.iter().map(|o| o.name.clone()).collect();
    assert_eq!(found, recorded, "{key}");
}

/// Float sums of up to 64 terms in another order: a few units in the last place of the largest result.
const SUM_F32: f64 = 4e-7;
/// A rounding to bf16 before or after such a sum.
const SUM_BF16: f64 = 1.0 / 128.0;

/// Whether a result of this name adds floats: float weight gradients, and sums over two or more shards.
fn adds_floats(name: &str) -> bool {
    ["shards0_drhs", "shards2_drhs", "shards4_drhs"]
        .iter()
        .any(|sum| name.ends_with(sum))
}

#[test]
fn aqt_on_the_host_is_the_recorded_op_by_op_run() {
    let golden = Golden::read("quant_aqt.safetensors");
    for key in recorded_keys(&golden) {
        let graph = aqt_graph(&golden, &key);
        assert_complete(&golden, &key, &graph);
        let host = evaluate(&graph, &inputs(&golden, &key, &graph)).unwrap();
        for (output, found) in graph.outputs.iter().zip(&host) {
            let name = &output.name;
            let mut expected = golden.values(&format!("out/{key}/eager/{name}")).to_vec();
            // Row 17 has a subnormal absmax, which XLA takes for zero and the host does not. Its integers are zero
            // both ways; only the scale that multiplies them differs.
            if key == "special_f32" && name == "fwd_lhs_scale" {
                assert_eq!(expected[17], f64::from(1.0 / 127.5f32));
                let found = found.to_f64_vec().unwrap();
                assert!(found[17] < f64::from(f32::MIN_POSITIVE));
                expected[17] = found[17];
            }
            let sum = adds_floats(name) && key.ends_with("f32");
            let bound = if sum { SUM_F32 } else { 0.0 };
            check(&format!("{key} {name}"), found, &expected, bound);
        }
    }
}

#[test]
fn aqt_on_the_device_is_the_recorded_program() {
    let golden = Golden::read("quant_aqt.safetensors");
    let session = cpu_session(1);
    for key in recorded_keys(&golden) {
        let graph = aqt_graph(&golden, &key);
        let device = run_on(&session, &graph, &inputs(&golden, &key, &graph));
        for (output, found) in graph.outputs.iter().zip(&device) {
            let name = &output.name;
            // XLA keeps f32 between two bf16 operations of one program; that shows in stochastic rounding and in
            // sums over shards. Integers and scales are equal all the same, to those of the program.
            let expected = golden.values(&format!("out/{key}/jit/{name}"));
            let bound = match adds_floats(name) {
                false => 0.0,
                true if key.ends_with("f32") => SUM_F32,
                true => SUM_BF16,
            };
            check(&format!("{key} {name}"), found, expected, bound);
        }
    }
}

/// The relative L2 distance of the cotangents of Qwix's convolutions, which multiply the dequantized operands, to
/// ours, which multiply the operands themselves. `docs/quantization.md` gives the numbers.
fn check_conv_cotangent(what: &str, found: &HostTensor, expected: &[f64]) {
    let error = distance(&found.to_f64_vec().unwrap(), expected);
    let range = if what.ends_with("dlhs") {
        5e-3..8e-3
    } else {
        1.4e-2..2.5e-2
    };
    assert!(range.contains(&error), "{what}: {error:e}");
}

#[test]
fn qwix_on_host_and_device_is_what_is_recorded() {
    let golden = Golden::read("quant_qwix.safetensors");
    let session = cpu_session(1);
    for key in recorded_keys(&golden) {
        let graph = qwix_graph(&golden, &key);
        assert_complete(&golden, &key, &graph);
        let arguments = inputs(&golden, &key, &graph);
        let host = evaluate(&graph, &arguments).unwrap();
        let device = run_on(&session, &graph, &arguments);
        for (i, output) in graph.outputs.iter().enumerate() {
            let name = &output.name;
            let expected = golden.values(&format!("out/{key}/eager/{name}"));
            let cotangent = ["dlhs", "drhs"].contains(&name.as_str());
            for (place, found) in [("host", &host[i]), ("device", &device[i])] {
                let what = format!("{place} {key} {name}");
                if cotangent && key.starts_with("conv") {
                    check_conv_cotangent(&what, found, expected);
                    continue;
                }
                let bound = match cotangent {
                    false => 0.0,
                    true if key.ends_with("f32") => SUM_F32,
                    true => SUM_BF16,
                };
                check(&what, found, expected, bound);
            }
        }
    }
}

#[test]
fn qwix_fp8_on_host_and_device_is_what_is_recorded() {
    let golden = Golden::read("quant_qwix_fp8.safetensors");
    let session = cpu_session(1);
    for key in recorded_keys(&golden) {
        let formats = match golden.meta["cases"][&key]["mode"].as_str() {
            Some("fp8") => Formats::fp8(Granularity::Channel),
            _ => Formats::fp8_full(Granularity::Tensor, 1),
        };
        let cotangents = golden.has(&format!("out/{key}/dlhs"));
        let mut graph = qwix_graph_of(&golden, &key, formats, cotangents);
        expose(&mut graph, |path| match path.starts_with("backward") {
            false => ("fwd".to_string(), ["lhs", "rhs"]),
            true => (format!("backward{path}"), ["g", "residual"]),
        });
        let arguments = inputs(&golden, &key, &graph);
        let host = evaluate(&graph, &arguments).unwrap();
        let device = run_on(&session, &graph, &arguments);
        for (i, output) in graph.outputs.iter().enumerate() {
            let recorded = format!("out/{key}/{}", output.name);
            if !golden.has(&recorded) {
                continue;
            }
            let exact = output.name.ends_with("_q") || output.name.ends_with("_scale");
            let bound = match (exact, key.ends_with("f32")) {
                // Qwix's program of one division keeps it, where all others have a product with the reciprocal.
                (true, true) if output.name.ends_with("_scale") => f64::from(f32::EPSILON),
                (true, _) => 0.0,
                (false, true) => SUM_F32,
                (false, false) => SUM_BF16,
            };
            for (place, found) in [("host", &host[i]), ("device", &device[i])] {
                let what = format!("{place} {recorded}");
                let expected = match golden.values(&recorded) {
                    // One scale stands for every channel.
                    [one] => &vec![*one; found.shape.count()],
                    all => all,
                };
                if key.starts_with("fp8_full") && !exact && output.name != "fwd" {
                    // In bf16 Qwix multiplies the gradient by the other operand's scale before it rounds to two bits of mantissa,
                    // so that some land on the number beside ours.
                    let bound = if key.ends_with("f32") { 1e-6 } else { 3.5e-2 };
                    let error = distance(&found.to_f64_vec().unwrap(), expected);
                    assert!(error < bound, "{what}: {error:e}");
                    continue;
                }
                check(&what, found, expected, bound);
            }
        }
    }
}

#[test]
fn a_row_of_zeros_has_the_scale_each_library_gives_it() {
    for (file, build, scale) in [
        (
            "quant_aqt.safetensors",
            aqt_graph as fn(&Golden, &str) -> Graph,
            f64::from(1.0 / 127.5f32),
        ),
        ("quant_qwix.safetensors", qwix_graph, 1.0),
    ] {
        let golden = Golden::read(file);
        let graph = build(&golden, "special_f32");
        let host = evaluate(&graph, &inputs(&golden, "special_f32", &graph)).unwrap();
        let row = |name: &str| {
            host[graph.output_index(name).unwrap()]
                .to_f64_vec()
                .unwrap()
        };
        assert_eq!(row("fwd_lhs_scale")[0], scale, "{file}");
        assert!(row("fwd_lhs_q")[..32].iter().all(|q| *q == 0.0));
        assert!(row("fwd")[..16].iter().all(|y| *y == 0.0));
    }
}

#[test]
fn policies_annotate_with_the_recorded_configurations() {
    let annotations = |policy: &Policy| -> Vec<QuantDot> {
        let b = Builder::new();
        let f32s = |dims: &[usize]| Shape::new(DType::F32, dims);
        let x = b.input("x", f32s(&[2, 4, 4, 8]), &[]).unwrap();
        let at = b.root("unet").scope("block");
        let kernel = at
            .param("kernel", f32s(&[1, 1, 8, 8]), Init::Zeros, &[])
            .unwrap();
        let weight = at.param("weight", f32s(&[8, 3]), Init::Zeros, &[]).unwrap();
        let case = serde_json::json!({"padding": [[0, 0], [0, 0]], "window_strides": [1, 1]});
        let y = at
            .convolution(x, kernel, conv_dims(&case), DType::F32)
            .unwrap();
        let dims = dot_dims(&serde_json::json!([[[3], [0]], [[], []]]));
        let z = at.dot_general(y, weight, dims, DType::F32).unwrap();
        b.output("z", z, None).unwrap();
        annotate(&b, policy).unwrap();
        let of = |op: &Op| match op {
            Op::DotGeneral { quant, .. } | Op::Convolution { quant, .. } => {
                quant.as_deref().copied()
            }
            _ => None,
        };
        b.finish().nodes.iter().filter_map(|n| of(&n.op)).collect()
    };
    for shards in SHARDS {
        let policy = Policy::aqt_int8(
            "unet/",
            shards,
            vec![],
            &maxdiff::models::unet::INT8_FLOAT_LAYERS,
        )
        .unwrap();
        let dot = aqt(Rounding::Stochastic, shards);
        // AQT's configuration is one of dots; a convolution is quantized forward only.
        let conv = QuantDot {
            dlhs: None,
            drhs: None,
            ..dot
        };
        assert_eq!(annotations(&policy), [conv, dot]);
    }
    let policy = Policy::qwix("unet/", ".*", Vec::new(), Formats::qwix_int8()).unwrap();
    assert_eq!(annotations(&policy), [qwix(), qwix()]);
}
