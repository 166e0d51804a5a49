//! Values and vector-Jacobian products of single operations against JAX, on the host evaluator and on the CPU device.
//!
//! `scripts/oracles/ops.py` recorded them under StableHLO's names. One program holds every case: compiling is most of
//! what a device run costs.

use std::collections::BTreeSet;

use crate::common::{Golden, cpu_session, run_on};
use maxdiff::dtype::DType;
use maxdiff::graph::{
    Binary, Builder, ConvDims, ConvLayout, DotDims, GatherDims, Graph, GraphError, Op, PadDim,
    Reduction, ScatterDims, ScatterKind, Tensor, Unary, evaluate, vjp,
};
use maxdiff::host_tensor::HostTensor;
use maxdiff::nn::{self, Precision};
use maxdiff::shape::Shape;
use serde_json::Value;

/// StableHLO operations, or forms of one, that the graph does not have: models are built without them.
const ABSENT: [&str; 11] = [
    "atan2",
    "cbrt",
    "exponential_minus_one",
    "gather_batched",
    "log_plus_one",
    "max_pool",
    "reduce_multiply_0",
    "reduce_multiply_012",
    "reduce_multiply_12",
    "scatter_add_batched",
    "sum_pool",
];

/// Operands by which the derivative is refused, though JAX has one.
const REFUSED: [(&str, usize); 6] = [
    ("clamp", 0),
    ("clamp", 2),
    ("remainder", 0),
    ("remainder", 1),
    ("scatter_replace_rows", 0),
    ("scatter_replace_rows", 2),
];

const UNARY: [Unary; 15] = [
    Unary::Abs,
    Unary::Ceil,
    Unary::Cos,
    Unary::Erf,
    Unary::Exp,
    Unary::Floor,
    Unary::Log,
    Unary::Logistic,
    Unary::Neg,
    Unary::RoundNearestEven,
    Unary::Rsqrt,
    Unary::Sign,
    Unary::Sin,
    Unary::Sqrt,
    Unary::Tanh,
];

const BINARY: [Binary; 8] = [
    Binary::Add,
    Binary::Div,
    Binary::Max,
    Binary::Min,
    Binary::Mul,
    Binary::Pow,
    Binary::Rem,
    Binary::Sub,
];

fn sizes(value: &Value) -> Vec<usize> {
    let list = value.as_array().unwrap().iter();
    list.map(|n| n.as_u64().unwrap() as usize).collect()
}

fn signed(value: &Value) -> Vec<i64> {
    let list = value.as_array().unwrap().iter();
    list.map(|n| n.as_i64().unwrap()).collect()
}

fn number(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

/// A layout of letters, such as `NHWC` or `OIHW`; what is not `batch` or `feature` is spatial, in `D`, `H`, `W` order.
fn layout(text: &Value, batch: char, feature: char) -> ConvLayout {
    let text = text.as_str().unwrap();
    ConvLayout {
        batch: text.find(batch).unwrap(),
        feature: text.find(feature).unwrap(),
        spatial: "DHW".chars().filter_map(|c| text.find(c)).collect(),
    }
}

fn convolution(a: &Value) -> Op {
    let dims = ConvDims {
        lhs: layout(&a["layout"][0], 'N', 'C'),
        rhs: layout(&a["layout"][1], 'O', 'I'),
        out: layout(&a["layout"][2], 'N', 'C'),
        strides: sizes(&a["window_strides"]),
        padding: a["padding"]
            .as_array()
            .unwrap()
            .iter()
            .map(|pair| (signed(pair)[0], signed(pair)[1]))
            .collect(),
        lhs_dilation: sizes(&a["lhs_dilation"]),
        rhs_dilation: sizes(&a["rhs_dilation"]),
        feature_groups: number(&a["feature_group_count"]),
        batch_groups: number(&a["batch_group_count"]),
    };
    Op::Convolution {
        dims: Box::new(dims),
        result: DType::F32,
        quant: None,
    }
}

fn dot_general(a: &Value) -> Op {
    Op::DotGeneral {
        dims: DotDims {
            lhs_batch: sizes(&a["lhs_batching_dimensions"]),
            rhs_batch: sizes(&a["rhs_batching_dimensions"]),
            lhs_contract: sizes(&a["lhs_contracting_dimensions"]),
            rhs_contract: sizes(&a["rhs_contracting_dimensions"]),
        },
        result: DType::F32,
        quant: None,
    }
}

fn gather(a: &Value) -> Op {
    Op::Gather(GatherDims {
        offset_dims: sizes(&a["offset_dims"]),
        collapsed_slice_dims: sizes(&a["collapsed_slice_dims"]),
        start_index_map: sizes(&a["start_index_map"]),
        index_vector_dim: number(&a["index_vector_dim"]),
        slice_sizes: sizes(&a["slice_sizes"]),
    })
}

fn scatter(a: &Value) -> Op {
    let kind = match a["computation"].as_str().unwrap() {
        "add" => ScatterKind::Add,
        "replace" => ScatterKind::Set,
        other => panic!("scatter by {other}"),
    };
    let dims = ScatterDims {
        update_window_dims: sizes(&a["update_window_dims"]),
        inserted_window_dims: sizes(&a["inserted_window_dims"]),
        scatter_dims_to_operand_dims: sizes(&a["scatter_dims_to_operand_dims"]),
        index_vector_dim: number(&a["index_vector_dim"]),
    };
    Op::Scatter(kind, dims)
}

fn reduce(a: &Value) -> Op {
    let kind = match a["computation"].as_str().unwrap() {
        "add" => Reduction::Sum,
        "maximum" => Reduction::Max,
        "minimum" => Reduction::Min,
        other => panic!("reduce by {other}"),
    };
    Op::Reduce {
        kind,
        dims: sizes(&a["dimensions"]),
    }
}

fn pad(a: &Value) -> Op {
    let (low, high) = (
        signed(&a["edge_padding_low"]),
        signed(&a["edge_padding_high"]),
    );
    let interior = sizes(&a["interior_padding"]);
    Op::Pad(
        (0..low.len())
            .map(|d| PadDim {
                low: low[d],
                high: high[d],
                interior: interior[d],
            })
            .collect(),
    )
}

fn dtype(name: &Value) -> DType {
    match name.as_str().unwrap() {
        "int8" => DType::S8,
        "int32" => DType::S32,
        "bfloat16" => DType::BF16,
        "float16" => DType::F16,
        other => panic!("element type {other}"),
    }
}

/// The operation of a case's name and attributes, both StableHLO's.
fn decode(op: &str, a: &Value) -> Op {
    if let Some(kind) = UNARY.into_iter().find(|kind| kind.name() == op) {
        return Op::Unary(kind);
    }
    if let Some(kind) = BINARY.into_iter().find(|kind| kind.name() == op) {
        return Op::Binary(kind);
    }
    match op {
        "broadcast_in_dim" => Op::BroadcastInDim {
            dims: sizes(&a["broadcast_dimensions"]),
            result: sizes(&a["shape"]),
        },
        "clamp" => Op::Clamp,
        "concatenate" => Op::Concatenate(number(&a["dimension"])),
        "convert" => Op::Convert(dtype(&a["to"])),
        "convolution" => convolution(a),
        "dot_general" => dot_general(a),
        "dynamic_slice" => Op::DynamicSlice(sizes(&a["slice_sizes"])),
        "dynamic_update_slice" => Op::DynamicUpdateSlice,
        "gather" => gather(a),
        "pad" => pad(a),
        "reduce" => reduce(a),
        "reverse" => Op::Reverse(sizes(&a["dimensions"])),
        "scatter" => scatter(a),
        "select" => Op::Select,
        "slice" => Op::Slice {
            start: sizes(&a["start_indices"]),
            limit: sizes(&a["limit_indices"]),
            stride: sizes(&a["strides"]),
        },
        "transpose" => Op::Transpose(sizes(&a["permutation"])),
        other => panic!("no operation {other}"),
    }
}

/// What models are built of; normalizations take their weight and bias from the scope.
fn composition(b: &Builder, a: &Value, x: &[Tensor]) -> Result<Tensor, GraphError> {
    let epsilon = || a["epsilon"].as_f64().unwrap();
    match a["name"].as_str().unwrap() {
        "silu" => nn::silu(b, x[0]),
        "gelu" => nn::gelu(b, x[0]),
        "quick_gelu" => nn::quick_gelu(b, x[0]),
        "layer_norm" => nn::layer_norm(b, x[0], epsilon(), Precision::F32),
        "group_norm" => {
            assert_eq!(a["layout"], "NHWC");
            let layer = nn::GroupNorm {
                groups: number(&a["groups"]),
                epsilon: epsilon(),
                activation: None,
            };
            nn::group_norm(b, x[0], layer, Precision::F32)
        }
        "gelu_tanh" => {
            // x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2
            let x = x[0];
            let cube = b.mul(b.square(x)?, x)?;
            let inner = b.add(x, b.mul_scalar(cube, 0.044_715)?)?;
            let slope = (2.0 / std::f64::consts::PI).sqrt();
            let gate = b.add_scalar(b.tanh(b.mul_scalar(inner, slope)?)?, 1.0)?;
            b.mul(x, b.mul_scalar(gate, 0.5)?)
        }
        "softmax" => {
            assert_eq!(a["axis"], -1);
            let last = b.dims(x[0]).len() - 1;
            let highest = b.reduce_keep(Reduction::Max, x[0], &[last])?;
            let exp = b.exp(b.sub(x[0], highest)?)?;
            b.div(exp, b.reduce_keep(Reduction::Sum, exp, &[last])?)
        }
        other => panic!("no composition {other}"),
    }
}

/// A traced case: its operands and its result.
struct Case {
    operands: Vec<Tensor>,
    result: Tensor,
}

fn trace(b: &Builder, golden: &Golden, name: &str) -> Result<Case, GraphError> {
    let case = &golden.meta["cases"][name];
    let op = case["op"].as_str().unwrap();
    let attributes = &case["attributes"];
    let at = b.root(name);
    let operands = (0..number(&case["operands"]))
        .map(|i| {
            let recorded = format!("in/{name}/{i}");
            let shape = Shape::new(golden.dtype(&recorded), golden.dims(&recorded));
            let affine = ["", "weight", "bias"][i.min(2)];
            match attributes["name"].as_str() {
                Some("layer_norm" | "group_norm") if i > 0 => {
                    at.param(affine, shape, maxdiff::graph::Init::Zeros, &[Some("norm")])
                }
                _ => b.input(&format!("{name}/{i}"), shape, &[]),
            }
        })
        .collect::<Result<Vec<_>, _>>()?;
    let result = match op {
        "composition" => composition(&at, attributes, &operands)?,
        "clamp" => {
            let dims = b.dims(operands[1]);
            let low = b.broadcast_to(operands[0], &dims)?;
            let high = b.broadcast_to(operands[2], &dims)?;
            at.push(Op::Clamp, &[low, operands[1], high])?
        }
        _ => at.push(decode(op, attributes), &operands)?,
    };
    Ok(Case { operands, result })
}

fn cases(golden: &Golden) -> Vec<String> {
    let all = golden.meta["cases"].as_object().unwrap().keys();
    all.filter(|name| !ABSENT.contains(&name.as_str()))
        .cloned()
        .collect()
}

/// Every case's value and VJPs as outputs with their recorded names.
fn whole_graph(golden: &Golden) -> Graph {
    let b = Builder::new();
    for name in cases(golden) {
        let case = trace(&b, golden, &name).unwrap_or_else(|error| panic!("{name}: {error}"));
        b.output(&format!("out/{name}"), case.result, None).unwrap();
        let wanted: Vec<usize> = (0..case.operands.len())
            .filter(|i| golden.has(&format!("grad/{name}/{i}")))
            .filter(|i| !REFUSED.contains(&(name.as_str(), *i)))
            .collect();
        if wanted.is_empty() {
            continue;
        }
        let cotangent = b
            .input(&format!("{name}/cotangent"), b.shape(case.result), &[])
            .unwrap();
        let operands: Vec<Tensor> = wanted.iter().map(|i| case.operands[*i]).collect();
        let found = vjp(&b, &[(case.result, cotangent)], &operands)
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        for (i, gradient) in wanted.iter().zip(found) {
            b.output(&format!("grad/{name}/{i}"), gradient, None)
                .unwrap();
        }
    }
    b.finish()
}

fn inputs(golden: &Golden, graph: &Graph) -> Vec<HostTensor> {
    graph
        .inputs
        .iter()
        .map(|input| {
            let name = input.name.replace("/weight", "/1").replace("/bias", "/2");
            let (case, operand) = name.split_once('/').unwrap();
            let mut values = golden.values(&format!("in/{name}")).to_vec();
            // JAX counts a negative start index from the end before StableHLO clamps it; only the latter is ours.
            let starts = match case {
                "dynamic_slice_clamped" => Some(1),
                "dynamic_update_slice_clamped" => Some(2),
                _ => None,
            };
            if let (Some(first), Ok(operand)) = (starts, operand.parse::<usize>())
                && operand >= first
                && values[0] < 0.0
            {
                values[0] += golden.dims(&format!("in/{case}/0"))[operand - first] as f64;
            }
            HostTensor::from_f64(input.shape.clone(), &values).unwrap()
        })
        .collect()
}

/// Eight units in the last place: what a handful of f32 roundings may add up to.
const TOLERANCE: f64 = 1e-6;

fn assert_near(place: &str, name: &str, op: &str, found: &HostTensor, golden: &Golden) {
    assert_eq!(found.shape.dims, golden.dims(name), "{place} {name}");
    assert_eq!(found.shape.dtype, golden.dtype(name), "{place} {name}");
    let expected = golden.values(name);
    let largest = expected.iter().fold(0.0, |m: f64, v| m.max(v.abs()));
    let elementwise =
        UNARY.iter().any(|kind| kind.name() == op) || BINARY.iter().any(|kind| kind.name() == op);
    let exact = ["convert", "floor", "ceil", "round_nearest_even", "sign"].contains(&op);
    for (i, (f, e)) in found.to_f64_vec().unwrap().iter().zip(expected).enumerate() {
        // XLA's CPU code reads and writes subnormals as zero.
        let flushed = e.abs() < f64::from(f32::MIN_POSITIVE) && *f == 0.0;
        let allowed = if exact {
            0.0
        } else if elementwise && name.starts_with("out/") {
            // Each element for itself, however small.
            TOLERANCE * e.abs()
        } else {
            // Sums and differences cancel: measured against the largest element.
            TOLERANCE * largest
        };
        assert!(
            f == e || flushed || (f - e).abs() <= allowed,
            "{place} {name}[{i}]: {f} is not {e} (largest {largest})"
        );
    }
}

#[test]
fn values_and_cotangents_are_those_of_jax_on_host_and_device() {
    let golden = Golden::read("ops.safetensors");
    let graph = whole_graph(&golden);
    let arguments = inputs(&golden, &graph);
    let host = evaluate(&graph, &arguments).unwrap();
    let device = run_on(&cpu_session(1), &graph, &arguments);
    for (i, output) in graph.outputs.iter().enumerate() {
        let case = output.name.split('/').nth(1).unwrap();
        let op = golden.meta["cases"][case]["op"].as_str().unwrap();
        assert_near("host", &output.name, op, &host[i], &golden);
        assert_near("device", &output.name, op, &device[i], &golden);
    }
}

#[test]
fn every_recorded_result_is_compared_or_listed() {
    let golden = Golden::read("ops.safetensors");
    let mut left: BTreeSet<String> = golden
        .shapes()
        .into_iter()
        .map(|(name, _)| name)
        .filter(|name| !name.starts_with("in/"))
        .collect();
    for output in whole_graph(&golden).outputs {
        assert!(left.remove(&output.name), "{}", output.name);
    }
    for (name, operand) in REFUSED {
        assert!(left.remove(&format!("grad/{name}/{operand}")), "{name}");
    }
    let cases: BTreeSet<&str> = left.iter().filter_map(|n| n.split('/').nth(1)).collect();
    assert_eq!(cases, BTreeSet::from(ABSENT));
}

#[test]
fn a_refused_derivative_names_the_operation() {
    let golden = Golden::read("ops.safetensors");
    for (name, operand) in REFUSED {
        let b = Builder::new();
        let case = trace(&b, &golden, name).unwrap();
        assert!(golden.has(&format!("grad/{name}/{operand}")), "{name}");
        let cotangent = b.input("cotangent", b.shape(case.result), &[]).unwrap();
        let error = vjp(&b, &[(case.result, cotangent)], &[case.operands[operand]]).unwrap_err();
        assert!(
            matches!(&error, GraphError::NotDifferentiable { path, .. } if path.contains(name)),
            "{name}: {error}"
        );
    }
}
