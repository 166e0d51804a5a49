//! What an error in a layer does, as calibration predicts it, against programs with and without the error.

use maxdiff::dtype::DType;
use maxdiff::graph::{
    Builder, DotDims, Granularity, Graph, Init, NumericsConvention, Range, Tensor, TensorFormat,
    evaluate,
};
use maxdiff::host_tensor::HostTensor;
use maxdiff::quant::{
    LayerActivity, Policy, RoundedActivation, Statistics, StoredLayer, Watch, annotate, lower,
    quantize_weight, watch,
};
use maxdiff::shape::Shape;

const ROWS: usize = 64;
const WIDTH: usize = 32;
const STEPS: usize = 3;
const RUNS: usize = 4;
const LAYERS: [&str; 3] = ["first", "second", "third"];

fn numbers(name: &str, dims: &[usize], std: f32) -> HostTensor {
    let count = dims.iter().product();
    let values = Init::Normal { std }.sample(3, name, count);
    HostTensor::from_f32(dims, &values).unwrap()
}

/// Three linear layers, with what is not linear between them.
fn network() -> Builder {
    let b = Builder::new();
    let shape = Shape::new(DType::F32, [ROWS, WIDTH]);
    let mut x = b.input("x", shape, &[]).unwrap();
    for layer in LAYERS {
        let at = b.root("unet").scope(layer);
        let weight = Shape::new(DType::F32, [WIDTH, WIDTH]);
        let weight = at.param("weight", weight, Init::Ones, &[]).unwrap();
        let dims = DotDims {
            lhs_contract: vec![1],
            rhs_contract: vec![1],
            ..DotDims::default()
        };
        let y: Tensor = at.dot_general(x, weight, dims, DType::F32).unwrap();
        x = at.add(x, at.tanh(y).unwrap()).unwrap();
    }
    b.output("y", x, None).unwrap();
    b
}

fn weight(layer: &str) -> HostTensor {
    numbers(layer, &[WIDTH, WIDTH], 0.3)
}

/// Activations of a step and a run: larger in later steps, with features of different sizes.
fn batch(step: usize, run: usize) -> HostTensor {
    let mut x = numbers(
        &format!("x{step}{run}"),
        &[ROWS, WIDTH],
        0.5 * (step + 1) as f32,
    );
    let mut values = x.to_f32_vec().unwrap();
    for (at, value) in values.iter_mut().enumerate() {
        *value *= [1.0, 0.2, 2.0, 0.5][at % 4];
    }
    x = HostTensor::from_f32([ROWS, WIDTH], &values).unwrap();
    x
}

/// The results of the network whose layer `changed` has another weight.
fn run(x: &HostTensor, changed: Option<(&str, &HostTensor)>) -> Vec<f32> {
    let weights = LAYERS.map(|layer| match changed {
        Some((name, weight)) if name == layer => weight.clone(),
        _ => weight(layer),
    });
    let [first, second, third] = weights;
    let results = evaluate(&network().finish(), &[x.clone(), first, second, third]).unwrap();
    results[0].to_f32_vec().unwrap()
}

fn power(values: impl Iterator<Item = f32>) -> f64 {
    values.map(|x| f64::from(x).powi(2)).sum()
}

/// What the network computes whose layer `rounded` multiplies what is stored of its weight with its rounded activation.
fn run_rounded(
    x: &HostTensor,
    rounded: &str,
    [weight_format, activation]: [TensorFormat; 2],
) -> Vec<f32> {
    let b = network();
    let stored = StoredLayer {
        weight: weight_format,
        activation: Some(activation),
        low_rank: None,
        smoothed: false,
    };
    let policy = Policy::stored("unet/", [(rounded.to_owned(), stored)].into());
    annotate(&b, &policy).unwrap();
    let graph: Graph = lower(&b.finish()).unwrap();
    let codes = quantize_weight(&weight(rounded), weight_format).unwrap();
    let input = |name: &str| match name.strip_prefix("unet/").and_then(|n| n.split_once('.')) {
        None => x.clone(),
        Some((layer, "weight")) if layer == rounded => codes.values.clone(),
        Some((_, "weight_scale")) => codes.scale.clone(),
        Some((layer, _)) => weight(layer),
    };
    let inputs: Vec<HostTensor> = graph.inputs.iter().map(|i| input(&i.name)).collect();
    evaluate(&graph, &inputs).unwrap()[0].to_f32_vec().unwrap()
}

/// int8 as AQT has it, and int4 in groups and of channels: each of a weight, and of its activation at run time.
fn roundings() -> [[TensorFormat; 2]; 3] {
    let int8 = TensorFormat::int8(NumericsConvention::Aqt);
    let int4 = |kind| TensorFormat {
        range: Range::Dynamic,
        ..format(kind)
    };
    let of = |activation: TensorFormat| [activation.stored(DType::F32), activation];
    [of(int8), of(int4(FORMATS[1])), of(int4(FORMATS[2]))]
}

fn activities(gains: bool) -> Vec<LayerActivity> {
    let asked = Watch {
        model: "unet/".into(),
        layers: LAYERS.map(str::to_owned).into(),
        counts: false,
        hessians: Default::default(),
        gains,
        roundings: LAYERS
            .map(|layer| {
                (
                    layer.to_owned(),
                    roundings().map(|[_, activation]| activation).into(),
                )
            })
            .into(),
    };
    let (graph, watched) = watch(network().finish(), &asked).unwrap();
    let mut statistics = Statistics::new(watched);
    let [first, second, third] = LAYERS.map(weight);
    for run in 0..RUNS {
        for step in 0..STEPS {
            let inputs = [
                batch(step, run),
                first.clone(),
                second.clone(),
                third.clone(),
            ];
            let results = evaluate(&graph, &inputs).unwrap();
            statistics.add(step, &results[1..]).unwrap();
        }
    }
    let of = |layer: &&str| statistics.activity(layer).unwrap();
    LAYERS.iter().map(of).collect()
}

const FORMATS: [(DType, Granularity); 3] = [
    (DType::S8, Granularity::Channel),
    (DType::S4, Granularity::Group(16)),
    (DType::S4, Granularity::Channel),
];

fn format((element, granularity): (DType, Granularity)) -> TensorFormat {
    TensorFormat {
        element,
        granularity,
        range: Range::Stored(DType::F32),
        ..TensorFormat::int8(NumericsConvention::Quark)
    }
}

#[test]
fn errors_are_those_of_programs_with_the_rounded_weight() {
    let activities = activities(true);
    for (layer, activity) in LAYERS.iter().zip(&activities) {
        assert_eq!(activity.gains.len(), STEPS);
        for kind in FORMATS {
            let float = weight(layer);
            let left = quantize_weight(&float, format(kind))
                .unwrap()
                .dequantized()
                .unwrap();
            let exact = float.to_f32_vec().unwrap();
            let predicted = activity.errors(&exact, &left, &[WIDTH, WIDTH], None);
            let left = HostTensor::from_f32([WIDTH, WIDTH], &left).unwrap();
            for step in 0..STEPS {
                let (mut signal, mut noise) = (0.0, 0.0);
                for run_number in 0..RUNS {
                    let x = batch(step, run_number);
                    let [before, after] = [run(&x, None), run(&x, Some((layer, &left)))];
                    noise += power(before.iter().zip(&after).map(|(a, b)| a - b));
                    signal += power(before.iter().copied());
                }
                let measured = noise / signal;
                let ratio = predicted.of_result[step] / measured;
                assert!(
                    (0.75..1.35).contains(&ratio),
                    "{layer} {kind:?} step {step}: predicted {}, measured {measured}",
                    predicted.of_result[step]
                );
            }
        }
    }
}

/// The mean over steps of the error of the result, as predicted and as it is, of a layer with rounded weight and activation.
fn rounded_errors(activity: &LayerActivity, layer: &str, formats: [TensorFormat; 2]) -> [f64; 2] {
    let float = weight(layer);
    let left = quantize_weight(&float, formats[0])
        .unwrap()
        .dequantized()
        .unwrap();
    let exact = float.to_f32_vec().unwrap();
    let rounded = RoundedActivation {
        format: formats[1],
        weight: &left,
    };
    let dims = [WIDTH, WIDTH];
    let predicted = activity
        .errors(&exact, &left, &dims, Some(rounded))
        .of_result;
    let alone = activity.errors(&exact, &left, &dims, None).of_result;
    let mut measured = 0.0;
    for step in 0..STEPS {
        assert!(
            predicted[step] > 1.2 * alone[step],
            "{layer} {formats:?} step {step}"
        );
        let (mut signal, mut noise) = (0.0, 0.0);
        for run_number in 0..RUNS {
            let x = batch(step, run_number);
            let [before, after] = [run(&x, None), run_rounded(&x, layer, formats)];
            noise += power(before.iter().zip(&after).map(|(a, b)| a - b));
            signal += power(before.iter().copied());
        }
        let ratio = predicted[step] / (noise / signal);
        assert!(
            (0.7..1.45).contains(&ratio),
            "{layer} {formats:?} step {step}: {ratio}"
        );
        measured += noise / signal;
    }
    [predicted.iter().sum(), measured]
}

/// With rounded activations too, layers and formats come in the order of what programs measure.
#[test]
fn rounded_activations_are_ordered_as_programs_order_them() {
    let activities = activities(true);
    let mut all = Vec::new();
    for (layer, activity) in LAYERS.iter().zip(&activities) {
        all.extend(roundings().map(|formats| rounded_errors(activity, layer, formats)));
    }
    let mut pairs = 0;
    for [predicted, measured] in &all {
        for [other_predicted, other_measured] in &all {
            if *measured > 1.25 * other_measured {
                assert!(predicted > other_predicted, "{all:?}");
                pairs += 1;
            }
        }
    }
    assert!(pairs >= 27, "{pairs} of 36 pairs differ: {all:?}");
}

/// Errors of what the first layer computes, whose inputs are known.
#[test]
fn errors_of_a_layer_are_those_of_its_products() {
    let [with, without] = [true, false].map(|gains| activities(gains)[0].clone());
    assert!(without.gains.is_empty() && without.squares.len() == 1);
    let exact = weight("first").to_f32_vec().unwrap();
    let left = quantize_weight(&weight("first"), format(FORMATS[1])).unwrap();
    let left = left.dequantized().unwrap();
    let product = |x: &[f32], w: &[f32]| -> Vec<f32> {
        let rows = x.chunks(WIDTH);
        let each = rows.flat_map(|x| {
            let features = w.chunks(WIDTH);
            features.map(|w| x.iter().zip(w).map(|(x, w)| x * w).sum::<f32>())
        });
        each.collect()
    };
    let (mut all_signal, mut all_noise) = (0.0, 0.0);
    let predicted = with.errors(&exact, &left, &[WIDTH, WIDTH], None);
    for step in 0..STEPS {
        let (mut signal, mut noise) = (0.0, 0.0);
        for run in 0..RUNS {
            let x = batch(step, run).to_f32_vec().unwrap();
            let [before, after] = [product(&x, &exact), product(&x, &left)];
            signal += power(before.iter().copied());
            noise += power(before.iter().zip(&after).map(|(a, b)| a - b));
        }
        let ratio = predicted.of_layer[step] / (noise / signal);
        assert!((0.9..1.1).contains(&ratio), "step {step}: {ratio}");
        (all_signal, all_noise) = (all_signal + signal, all_noise + noise);
    }
    let measured = 10.0 * (all_signal / all_noise).log10();
    for errors in [
        predicted,
        without.errors(&exact, &left, &[WIDTH, WIDTH], None),
    ] {
        assert!(
            (errors.sqnr_db - measured).abs() < 0.5,
            "{measured}, predicted {}",
            errors.sqnr_db
        );
    }
    // Nothing changed.
    let none = with.errors(&exact, &exact, &[WIDTH, WIDTH], None);
    assert!(none.sqnr_db == f64::INFINITY && none.drift() == Some(0.0));
}
