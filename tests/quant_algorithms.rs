//! AWQ and HQQ against their formulas in float64 (`scripts/oracles/quant_awq_hqq.py`), and llama.cpp's Q4_1.

use crate::common::Golden;
use maxdiff::dtype::DType;
use maxdiff::graph::{
    Builder, DotDims, Granularity, Graph, Init, NumericsConvention, Range, TensorFormat, evaluate,
};
use maxdiff::host_tensor::HostTensor;
use maxdiff::lowering::Traced;
use maxdiff::quant::{
    AwqWeight, Observer, Policy, RoundingAlgorithm, Statistics, StoredLayer, Watch, WeightRounding,
    awq_factors, joined_inputs, lower, quantize_weight, readers_of_input, watch,
};
use maxdiff::shape::Shape;

const OUTPUTS: usize = 96;
const INPUTS: usize = 128;

fn values(golden: &Golden, name: &str, dims: &[usize]) -> Vec<f32> {
    let tensor = golden.tensor(name, &Shape::new(DType::F32, dims));
    tensor.to_f32_vec().unwrap()
}

/// `x w^T`, row by row, in `f64`.
fn product(x: &[f32], w: &[f32]) -> Vec<f64> {
    let dot = |x: &[f32], w: &[f32]| -> f64 {
        x.iter()
            .zip(w)
            .map(|(x, w)| f64::from(*x) * f64::from(*w))
            .sum()
    };
    let rows = x.chunks(INPUTS);
    rows.flat_map(|x| w.chunks(INPUTS).map(move |w| dot(x, w)))
        .collect()
}

fn distance(found: &[f64], exact: &[f64]) -> f64 {
    let changed: f64 = found.iter().zip(exact).map(|(a, b)| (a - b).powi(2)).sum();
    (changed / exact.iter().map(|x| x * x).sum::<f64>()).sqrt()
}

#[test]
fn awq_chooses_nearly_the_best_factors() {
    let golden = Golden::read("quant_calibrated.safetensors");
    let recorded = Golden::read("quant_awq_hqq.safetensors");
    let weight = values(&golden, "in/weight", &[OUTPUTS, INPUTS]);
    let x = values(&golden, "in/batches", &[3, 16, INPUTS]);
    let mean = |of: &dyn Fn(f32) -> f32| -> Vec<f32> {
        let sum = |feature| {
            x.iter()
                .skip(feature)
                .step_by(INPUTS)
                .map(|x| of(*x))
                .sum::<f32>()
        };
        (0..INPUTS).map(|feature| sum(feature) / 48.0).collect()
    };
    let (magnitudes, squares) = (mean(&f32::abs), mean(&|x| x * x));
    let format = TensorFormat {
        element: DType::S4,
        granularity: Granularity::Group(64),
        ..TensorFormat::int8(NumericsConvention::Quark)
    };
    let own = AwqWeight {
        values: weight.clone(),
        format,
        dtype: DType::F32,
        observer: Observer::default(),
    };
    let (factors, power) = awq_factors(&[own], &magnitudes, &squares).unwrap();
    let errors = values(&recorded, "out/awq/errors", &[20]);
    let at = (power * 20.0).round() as usize;
    let best = errors.iter().copied().fold(f32::INFINITY, f32::min);
    // Features are taken as independent: the power may be a neighbour of the best.
    assert!(
        errors[at] < 1.03 * best,
        "{power}: {} of {best}",
        errors[at]
    );
    if errors[at] == best {
        let expected = values(&recorded, "out/awq/factors", &[INPUTS]);
        for (own, expected) in factors.iter().zip(&expected) {
            assert!((own / expected - 1.0).abs() < 1e-4, "{own} {expected}");
        }
    }
    // What the layer computes of divided activations.
    let taken: Vec<f32> = weight
        .iter()
        .enumerate()
        .map(|(i, w)| w * factors[i % INPUTS])
        .collect();
    let taken = HostTensor::from_f32([OUTPUTS, INPUTS], &taken).unwrap();
    let left = quantize_weight(&taken, format)
        .unwrap()
        .dequantized()
        .unwrap();
    let divided: Vec<f32> = x
        .iter()
        .enumerate()
        .map(|(i, x)| x / factors[i % INPUTS])
        .collect();
    let exact = product(&x, &weight);
    let own = distance(&product(&divided, &left), &exact);
    assert!(
        (own / f64::from(errors[at]) - 1.0).abs() < 0.01,
        "{own} {}",
        errors[at]
    );
    // Two of the features are outliers: the error falls by a tenth and more.
    assert!(
        own < 0.9 * f64::from(errors[0]),
        "{own}, to the nearest {}",
        errors[0]
    );
}

#[test]
fn hqq_lowers_the_errors_of_heavy_tails() {
    let recorded = Golden::read("quant_awq_hqq.safetensors");
    let weight = values(&recorded, "in/heavy", &[32, 128]);
    let tensor = HostTensor::from_f32([32, 128], &weight).unwrap();
    for (bits, element) in [(4, DType::U4), (8, DType::S8)] {
        let format = TensorFormat {
            element,
            granularity: Granularity::Group(32),
            zero_point: true,
            range: Range::Stored(DType::F16),
            ..TensorFormat::int8(NumericsConvention::Gguf)
        };
        let of =
            |key: &str, dims: &[usize]| values(&recorded, &format!("out/hqq_{bits}/{key}"), dims);
        let errors = of("errors", &[4]);
        let rounding = WeightRounding {
            observer: Observer::default(),
            algorithm: RoundingAlgorithm::Hqq,
        };
        let found = rounding.quantize(&tensor, format).unwrap();
        let codes = recorded.tensor(
            &format!("out/hqq_{bits}/codes"),
            &Shape::new(DType::S8, [128, 32]),
        );
        let codes = codes.to_f32_vec().unwrap();
        let own = found.values.to_f32_vec().unwrap();
        let same = own.iter().zip(&codes).filter(|(a, b)| a == b).count();
        assert!(same as f64 > 0.99 * own.len() as f64, "{bits} bits: {same}");
        let measures = |left: &[f32]| {
            let errors = || left.iter().zip(&weight).map(|(a, b)| f64::from(a - b));
            let count = weight.len() as f64;
            [
                errors().map(f64::abs).sum::<f64>() / count,
                (errors().map(|e| e * e).sum::<f64>() / count).sqrt(),
            ]
        };
        let fitted = measures(&found.dequantized().unwrap());
        let nearest = quantize_weight(&tensor, format).unwrap();
        let nearest = measures(&nearest.dequantized().unwrap());
        for (which, name) in ["mean magnitude", "root mean square"]
            .into_iter()
            .enumerate()
        {
            let [own, plain] = [fitted[which], nearest[which]];
            // Scales and minimums are rounded to f16 here, which counts where codes have 8 bits.
            let limit = if bits == 4 { 0.01 } else { 0.15 };
            let expected = f64::from(errors[which]);
            assert!(
                (own / expected - 1.0).abs() < limit,
                "{bits} bits, {name}: {own} {expected}"
            );
            if bits == 4 {
                assert!(own < 0.97 * plain, "{name}: {own}, to the nearest {plain}");
            }
        }
        // The error that the report tells is that of what is stored.
        let squares: f64 = fitted[1].powi(2) * weight.len() as f64;
        assert!((found.noise / squares - 1.0).abs() < 1e-4);
    }
}

const ROWS: usize = 32;
const HALF: usize = 16;

/// `concatenate(x, 30 y) w^T`, where `w` takes the second part by a 30th: both parts count as much.
fn joined() -> Graph {
    let b = Builder::new();
    let shape = Shape::new(DType::F32, [ROWS, HALF]);
    let [x, y] = ["x", "y"].map(|name| b.input(name, shape.clone(), &[]).unwrap());
    let both = b.concatenate(&[x, y], 1).unwrap();
    let at = b.root("unet").scope("conv_shortcut");
    let weight = Shape::new(DType::F32, [HALF, 2 * HALF]);
    let weight = at.param("weight", weight, Init::Ones, &[]).unwrap();
    let dims = DotDims {
        lhs_contract: vec![1],
        rhs_contract: vec![1],
        ..DotDims::default()
    };
    let z = at.dot_general(both, weight, dims, DType::F32).unwrap();
    b.output("z", z, None).unwrap();
    b.finish()
}

/// Static int8 of two joined activations, the second 30 times as large: with a range for each part the error is a small share of that
/// with one range.
#[test]
fn ranges_of_joined_activations_are_split() {
    let numbers = |name: &str, dims: [usize; 2], factor: f32| {
        let values = Init::Normal { std: 1.0 }.sample(5, name, dims[0] * dims[1]);
        let values: Vec<f32> = values.into_iter().map(|x| factor * x).collect();
        HostTensor::from_f32(dims, &values).unwrap()
    };
    let inputs = [
        numbers("x", [ROWS, HALF], 1.0),
        numbers("y", [ROWS, HALF], 30.0),
    ];
    let mut weight = numbers("w", [HALF, 2 * HALF], 0.2).to_f32_vec().unwrap();
    for row in weight.chunks_mut(2 * HALF) {
        row[HALF..].iter_mut().for_each(|w| *w /= 30.0);
    }
    let layer = "conv_shortcut".to_owned();
    let asked = Watch {
        model: "unet/".into(),
        layers: [layer.clone()].into(),
        counts: false,
        hessians: Default::default(),
        gains: false,
        roundings: Default::default(),
    };
    let (graph, watched) = watch(joined(), &asked).unwrap();
    let tensor = |values: &[f32]| HostTensor::from_f32([HALF, 2 * HALF], values).unwrap();
    let mut all = inputs.to_vec();
    all.push(tensor(&weight));
    let results = evaluate(&graph, &all).unwrap();
    let mut statistics = Statistics::new(watched);
    statistics.add(0, &results[1..]).unwrap();
    let (largest, first) = statistics.parts(&layer).unwrap().unwrap();
    assert_eq!(first, HALF);
    assert!(largest[1] > 15.0 * largest[0], "{largest:?}");
    assert_eq!(
        joined_inputs(&joined(), "unet/"),
        [(layer.clone(), HALF)].into()
    );

    let exact = results[0].to_f64_vec().unwrap();
    let run = |granularity, scales: &[f32], weight: &HostTensor| {
        let int8 = |granularity| TensorFormat {
            granularity,
            range: Range::Stored(DType::F32),
            ..TensorFormat::int8(NumericsConvention::Quark)
        };
        let stored = StoredLayer {
            weight: int8(Granularity::Channel),
            activation: Some(int8(granularity)),
            low_rank: None,
            smoothed: false,
        };
        let policy = Policy::stored("unet/", [(layer.clone(), stored)].into());
        let traced = Traced::new("layer", joined())
            .quantized(Some(&policy))
            .unwrap();
        let graph = lower(&traced.graph).unwrap();
        let quantized = quantize_weight(weight, stored.weight).unwrap();
        let values = graph.inputs.iter().map(|input| match input.name.as_str() {
            "x" => inputs[0].clone(),
            "y" => inputs[1].clone(),
            "unet/conv_shortcut.weight" => quantized.values.clone(),
            "unet/conv_shortcut.weight_scale" => quantized.scale.clone(),
            "unet/conv_shortcut.input_scale" => {
                HostTensor::from_f32(input.shape.dims.clone(), scales).unwrap()
            }
            other => panic!("{other}"),
        });
        let values: Vec<HostTensor> = values.collect();
        let found = evaluate(&graph, &values).unwrap()[0].to_f64_vec().unwrap();
        distance(&found, &exact)
    };
    let whole = run(Granularity::Tensor, &[largest[1] / 127.5], &tensor(&weight));
    let scales: Vec<f32> = (0..2 * HALF).map(|at| largest[at / HALF] / 127.5).collect();
    let taken: Vec<f32> = weight
        .iter()
        .enumerate()
        .map(|(i, w)| w * scales[i % (2 * HALF)])
        .collect();
    let split = run(Granularity::Feature, &scales, &tensor(&taken));
    assert!(split < 0.15 * whole, "{split}, with one range {whole}");
}

/// Static int8 of a text whose first token is 60 times as large, on the other tokens, beside activations in float.
#[test]
fn the_first_token_takes_the_range_of_a_text() {
    const TOKENS: usize = 8;
    let b = Builder::new();
    let shape = |dims: [usize; 2]| Shape::new(DType::F32, dims);
    let text = b
        .input("encoder_hidden_states", shape([TOKENS, HALF]), &[])
        .unwrap();
    let sample = b.input("sample", shape([TOKENS, HALF]), &[]).unwrap();
    let dims = DotDims {
        lhs_contract: vec![1],
        rhs_contract: vec![1],
        ..DotDims::default()
    };
    for (layer, x) in [("attn2.to_k", text), ("attn2.to_q", sample)] {
        let at = b.root("unet").scope(layer);
        let weight = at
            .param("weight", shape([HALF, HALF]), Init::Ones, &[])
            .unwrap();
        let y = at.dot_general(x, weight, dims.clone(), DType::F32).unwrap();
        b.output(layer, y, None).unwrap();
    }
    let graph = b.finish();
    let readers = readers_of_input(&graph, "unet/", "encoder_hidden_states");
    assert_eq!(readers, ["attn2.to_k".to_owned()].into());

    let numbers = |name: &str, count| Init::Normal { std: 1.0 }.sample(5, name, count);
    let mut text = numbers("text", TOKENS * HALF);
    text[..HALF].iter_mut().for_each(|x| *x *= 60.0);
    let weight = HostTensor::from_f32([HALF, HALF], &numbers("w", HALF * HALF)).unwrap();
    let largest = text.iter().fold(0f32, |most, x| most.max(x.abs()));
    let run = |quantized: bool, is_static: bool| -> Vec<f64> {
        let int8 = |granularity| TensorFormat {
            granularity,
            range: Range::Stored(DType::F32),
            ..TensorFormat::int8(NumericsConvention::Quark)
        };
        let layer = StoredLayer {
            weight: int8(Granularity::Channel),
            activation: is_static.then_some(int8(Granularity::Tensor)),
            low_rank: None,
            smoothed: false,
        };
        let policy = Policy::stored("unet/", [("attn2.to_k".to_owned(), layer)].into());
        let policy = quantized.then_some(&policy);
        let traced = Traced::new("layer", graph.clone())
            .quantized(policy)
            .unwrap();
        let lowered = lower(&traced.graph).unwrap();
        let found = quantize_weight(&weight, layer.weight).unwrap();
        let tensors = lowered
            .inputs
            .iter()
            .map(|input| match input.name.as_str() {
                "encoder_hidden_states" | "sample" => {
                    HostTensor::from_f32([TOKENS, HALF], &text).unwrap()
                }
                "unet/attn2.to_k.weight" if quantized => found.values.clone(),
                "unet/attn2.to_k.weight_scale" => found.scale.clone(),
                "unet/attn2.to_k.input_scale" => {
                    HostTensor::from_f32([0; 0], &[largest / 127.5]).unwrap()
                }
                _ => weight.clone(),
            });
        let tensors: Vec<HostTensor> = tensors.collect();
        let results = evaluate(&lowered, &tensors).unwrap();
        results[0].to_f64_vec().unwrap()[HALF..].to_vec()
    };
    let exact = run(false, false);
    let [whole, floats] = [true, false].map(|is_static| distance(&run(true, is_static), &exact));
    assert!(
        whole > 0.2 && floats < 0.01,
        "{whole}, activations in float {floats}"
    );
}
