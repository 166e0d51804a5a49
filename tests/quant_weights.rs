//! Weights in every format: what the CPU device computes of them while they are loaded, and what it multiplies.

use crate::common::{cpu_session, run_on};
use maxdiff::dtype::DType;
use maxdiff::graph::{
    Arithmetic, Builder, DotDims, Granularity, Graph, Init, NumericsConvention, Op, Output,
    TensorFormat,
};
use maxdiff::host_tensor::HostTensor;
use maxdiff::nn::{Conv2d, Linear, Precision, conv2d, linear};
use maxdiff::quant::{
    Action, Formats, Policy, QuantizedWeight, Rule, annotate, lower, quantize_weight,
};
use maxdiff::shape::Shape;
use maxdiff::weights::cast;

const ROWS: usize = 5;
const INPUTS: usize = 64;
const OUTPUTS: usize = 24;

/// Every format of weights alone.
fn formats() -> Vec<TensorFormat> {
    let mut formats = Vec::new();
    for element in [DType::S8, DType::S4] {
        for granularity in [
            Granularity::Tensor,
            Granularity::Channel,
            Granularity::Group(16),
        ] {
            for convention in [
                NumericsConvention::Aqt,
                NumericsConvention::Qwix,
                NumericsConvention::Quark,
                NumericsConvention::Narrow,
            ] {
                let format = TensorFormat {
                    element,
                    granularity,
                    ..TensorFormat::int8(convention)
                };
                formats.push(format);
                if convention == NumericsConvention::Quark {
                    formats.push(TensorFormat {
                        zero_point: true,
                        ..format
                    });
                }
            }
        }
    }
    for granularity in [Granularity::Tensor, Granularity::Channel] {
        for convention in [NumericsConvention::Quark, NumericsConvention::Qwix] {
            formats.push(TensorFormat {
                element: DType::F8E4M3Fn,
                granularity,
                ..TensorFormat::int8(convention)
            });
        }
    }
    formats
}

/// One linear layer for each format, each with the same weight, which it takes in `dtype`. Beside the products, all that
/// is stored of weights is a result.
fn layers(formats: &[TensorFormat], dtype: DType) -> Graph {
    let b = Builder::new();
    let x = b
        .input("x", Shape::new(dtype, [ROWS, INPUTS]), &[])
        .unwrap();
    let mut rules = Vec::new();
    for (i, format) in formats.iter().enumerate() {
        let at = b.root("m").scope(format!("layer{i}"));
        let shape = Shape::new(DType::F32, [OUTPUTS, INPUTS]);
        let weight = at.param("weight", shape, Init::Ones, &[]).unwrap();
        let dims = DotDims {
            lhs_contract: vec![1],
            rhs_contract: vec![1],
            ..DotDims::default()
        };
        let weight = at.convert(weight, dtype).unwrap();
        let y = at.dot_general(x, weight, dims, DType::F32).unwrap();
        b.output(&format!("y{i}"), y, None).unwrap();
        let action = Action::Quantize(Formats::of_weights(*format));
        rules.push(Rule::new(&format!("layer{i}"), action, true).unwrap());
    }
    let policy = Policy::of_layers("m/", rules, &[], Formats::aqt_int8(0)).unwrap();
    annotate(&b, &policy).unwrap();
    let mut graph = lower(&b.finish()).unwrap().inline_composites(&|_, _| true);
    for i in 0..graph.nodes.len() {
        let node = &graph.nodes[i];
        if matches!(node.op, Op::Stored) {
            graph.outputs.push(Output {
                name: graph.path(node).to_string(),
                node: i as u32,
                alias: None,
                logical_axes: Vec::new(),
            });
        }
    }
    graph
}

/// Numbers of all magnitudes, of which some are ties, in rows of other ranges; one row of zeros.
fn weight() -> HostTensor {
    let value = |i: usize| {
        let x = ((i * 7919 + 13) % 1009) as f32 / 504.0 - 1.0;
        match i / INPUTS {
            1 => ((i * 37) % 255) as f32 - 127.5,
            2 => 0.0,
            3 => x.abs(),
            row => x * (1.0 + row as f32 / 7.0),
        }
    };
    let values: Vec<f32> = (0..OUTPUTS * INPUTS).map(value).collect();
    HostTensor::from_f32([OUTPUTS, INPUTS], &values).unwrap()
}

/// The weight that the integers stand for.
fn dequantized(quantized: &QuantizedWeight) -> Vec<f64> {
    let steps = quantized.values.to_f64_vec().unwrap();
    let scales = quantized.scale.to_f64_vec().unwrap();
    let zero_points = quantized
        .zero_point
        .as_ref()
        .map(|t| t.to_f64_vec().unwrap());
    let run = steps.len() / scales.len();
    let value = |(i, step): (usize, f64)| {
        let zero_point = zero_points.as_ref().map_or(0.0, |points| points[i / run]);
        (step - zero_point) * scales[i / run]
    };
    steps.into_iter().enumerate().map(value).collect()
}

/// The device's integers, scales and zero points are the host's, and the products are those with the weights that they
/// stand for.
#[test]
fn weights_in_every_format_are_on_the_device_as_on_the_host() {
    let formats = formats();
    let session = cpu_session(1);
    for dtype in [DType::F32, DType::BF16] {
        let graph = layers(&formats, dtype);
        let x: Vec<f32> = (0..ROWS * INPUTS)
            .map(|i| ((i * 31) % 97) as f32 / 48.0 - 1.0)
            .collect();
        let x = HostTensor::from_f32([ROWS, INPUTS], &x).unwrap();
        let x = cast(x, dtype).unwrap();
        let mut inputs = vec![x.clone()];
        inputs.extend(formats.iter().map(|_| weight()));
        let results = run_on(&session, &graph, &inputs);
        let x = x.to_f64_vec().unwrap();
        let as_used = cast(weight(), dtype).unwrap();
        for (i, format) in formats.iter().enumerate() {
            let what = format!("{dtype} {format:?}");
            let expected = quantize_weight(&as_used, *format).unwrap();
            let path = format!("m/layer{i}");
            let stored = graph.outputs.iter().zip(&results);
            let stored = stored
                .filter(|(output, _)| output.name == path)
                .map(|(_, t)| t);
            let of = |expected: &HostTensor| {
                let shape = |t: &&HostTensor| t.shape == expected.shape;
                let found = stored.clone().find(shape);
                assert_eq!(
                    found.unwrap_or_else(|| panic!("{what}: {}", expected.shape)),
                    expected,
                    "{what}"
                );
            };
            of(&expected.values);
            if !format.scales_results() {
                of(&expected.scale);
            }
            expected.zero_point.iter().for_each(of);

            let float = dequantized(&expected);
            let found = results[i].to_f64_vec().unwrap();
            for (at, found) in found.into_iter().enumerate() {
                let (row, out) = (at / OUTPUTS, at % OUTPUTS);
                let terms = (0..INPUTS).map(|k| x[row * INPUTS + k] * float[out * INPUTS + k]);
                let magnitude: f64 = terms.clone().map(f64::abs).sum();
                let sum: f64 = terms.sum();
                // Where scales stay in the sum, a weight is rounded to bf16.
                let tolerance = match (dtype, format.scales_results()) {
                    (DType::BF16, false) => 2f64.powi(-9),
                    _ => 1e-6,
                };
                assert!(
                    (found - sum).abs() <= tolerance * magnitude,
                    "{what}: {found} {sum}"
                );
            }
        }
    }
}

/// The weight and the activation of a layer, in the order of `[rows, features]`, and what multiplies them.
struct Layer {
    name: &'static str,
    x: Vec<usize>,
    weight: Vec<usize>,
    format: TensorFormat,
}

fn int4(convention: NumericsConvention, granularity: Granularity) -> TensorFormat {
    TensorFormat {
        element: DType::S4,
        granularity,
        ..TensorFormat::int8(convention)
    }
}

/// The values that a tensor of these dimensions stands for in the format, of rows `[count, features]`.
fn fake_quantized(values: &[f32], features: usize, format: TensorFormat) -> HostTensor {
    let rows = HostTensor::from_f32([values.len() / features, features], values).unwrap();
    let quantized = quantize_weight(&rows, format).unwrap();
    HostTensor::from_f32(
        [values.len() / features, features],
        &quantized.dequantized().unwrap(),
    )
    .unwrap()
}

/// Weights and activations in int4, in narrow int8 and in fp8: a device's product of such numbers, and of groups of them, is the product of the
/// floats that they stand for.
#[test]
fn products_in_int4_and_fp8_are_those_of_what_the_numbers_stand_for() {
    let fp8 = |granularity| TensorFormat::float8(DType::F8E4M3Fn, granularity);
    let formats = [
        int4(NumericsConvention::Quark, Granularity::Channel),
        int4(NumericsConvention::Quark, Granularity::Group(16)),
        int4(NumericsConvention::Narrow, Granularity::Channel),
        int4(NumericsConvention::Narrow, Granularity::Group(16)),
        TensorFormat::int8(NumericsConvention::Narrow),
        fp8(Granularity::Channel),
        fp8(Granularity::Tensor),
    ];
    let layers = formats.map(|format| {
        [
            ("linear", vec![ROWS, 32], vec![OUTPUTS, 32]),
            ("conv", vec![2, 3, 3, 32], vec![8, 32, 1, 1]),
        ]
        .map(|(name, x, weight)| Layer {
            name,
            x,
            weight,
            format,
        })
    });
    let session = cpu_session(1);
    for layer in layers.iter().flatten() {
        let traced = |arithmetic: Option<Arithmetic>| {
            let b = Builder::new();
            let x = Shape::new(DType::F32, layer.x.clone());
            let x = b.input("x", x, &[]).unwrap();
            let at = b.root("m");
            let precision = Precision {
                weights: DType::F32,
                activations: DType::F32,
            };
            let y = match layer.name {
                "linear" => {
                    let linear_layer = Linear::new(OUTPUTS, "embed", "heads").without_bias();
                    linear(&at.scope("layer"), x, linear_layer, precision)
                }
                _ => {
                    let conv = Conv2d::same(8, 1).without_bias();
                    conv2d(&at.scope("layer"), x, conv, precision)
                }
            };
            b.output("y", y.unwrap(), None).unwrap();
            if let Some(arithmetic) = arithmetic {
                let formats = Formats {
                    activation: Some(layer.format),
                    ..Formats::of_weights(layer.format)
                };
                let mut policy = Policy::of_layers("m/", Vec::new(), &[], formats).unwrap();
                policy.arithmetic = arithmetic;
                annotate(&b, &policy).unwrap();
            }
            lower(&b.finish()).unwrap()
        };
        let random = |seed, dims: &[usize]| {
            let count = dims.iter().product();
            Init::Normal { std: 1.0 }.sample(seed, "x", count)
        };
        let (x, weight) = (random(1, &layer.x), random(2, &layer.weight));
        // Channel is one scale an image of a convolution's activation.
        let features = match (layer.name, layer.format.granularity) {
            ("conv", Granularity::Channel) => layer.x[1..].iter().product(),
            _ => 32,
        };
        let element = layer.format.element;
        let of = |tensor: HostTensor, dims: &[usize]| {
            HostTensor::from_f32(dims.to_vec(), &tensor.to_f32_vec().unwrap()).unwrap()
        };
        let fake = [
            of(fake_quantized(&x, features, layer.format), &layer.x),
            of(fake_quantized(&weight, 32, layer.format), &layer.weight),
        ];
        let expected = &run_on(&session, &traced(None), &fake)[0];
        let inputs = [
            HostTensor::from_f32(layer.x.clone(), &x).unwrap(),
            HostTensor::from_f32(layer.weight.clone(), &weight).unwrap(),
        ];
        let types = |graph: &Graph| {
            let nodes = graph.inline_composites(&|_, _| true).nodes;
            let dot = nodes
                .iter()
                .find(|node| matches!(node.op, Op::DotGeneral { .. } | Op::Convolution { .. }))
                .unwrap();
            let multiplied = [0, 1].map(|at| nodes[dot.operands[at] as usize].shape.dtype);
            (multiplied, dot.shape.dtype)
        };
        let graph = traced(Some(Arithmetic::Native));
        let emulated = traced(Some(Arithmetic::Emulated));
        // Where scales leave the sum, int8 or fp8 is multiplied.
        let expected_types = match (layer.format.scales_results(), element) {
            (false, _) => ([DType::F32; 2], DType::F32),
            (true, DType::S4 | DType::S8) => ([DType::S8; 2], DType::S32),
            (true, element) => ([element; 2], DType::F32),
        };
        assert_eq!(types(&graph), expected_types);
        assert_eq!(types(&emulated), ([DType::F32; 2], DType::F32));
        let expected = expected.to_f64_vec().unwrap();
        let largest = expected.iter().fold(0f64, |m, y| m.max(y.abs()));
        for graph in [&graph, &emulated] {
            let found = run_on(&session, graph, &inputs)[0].to_f64_vec().unwrap();
            for (found, expected) in found.iter().zip(&expected) {
                let error = (found - expected).abs() / largest;
                assert!(error <= 1e-6, "{} {:?}: {error}", layer.name, layer.format);
            }
        }
    }
}
