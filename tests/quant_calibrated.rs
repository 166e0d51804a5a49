//! A layer that amd-quark 0.13 calibrated: static int8 of weight and activation, and SVDQuant's low-rank product beside int4.

use crate::common::Golden;
use maxdiff::dtype::DType;
use maxdiff::graph::{
    Builder, DotDims, Granularity, Graph, Init, NumericsConvention, Range, TensorFormat, evaluate,
};
use maxdiff::host_tensor::HostTensor;
use maxdiff::lowering::Traced;
use maxdiff::quant::{
    ActivationStatistics, LowRankOptions, LowRankWeight, Observer, Policy, RoundingAlgorithm,
    Statistics, StoredLayer, Watch, WeightRounding, balance, largest_of_features, lower,
    quantize_weight, watch, with_low_rank,
};
use maxdiff::shape::Shape;
use maxdiff::weights::cast;

const OUTPUTS: usize = 96;
const INPUTS: usize = 128;
const ROWS: usize = 16;
const BATCHES: usize = 3;

fn tensor(golden: &Golden, name: &str, dims: &[usize]) -> HostTensor {
    golden.tensor(name, &Shape::new(DType::F32, dims))
}

fn of_type(tensor: &HostTensor, dtype: DType) -> HostTensor {
    cast(tensor.clone(), dtype).unwrap()
}

/// `x w^T` of the layer `unet/to_q`.
fn linear(dtype: DType) -> Graph {
    let b = Builder::new();
    let x = b
        .input("x", Shape::new(dtype, [ROWS, INPUTS]), &[])
        .unwrap();
    let at = b.root("unet").scope("to_q");
    let weight = Shape::new(dtype, [OUTPUTS, INPUTS]);
    let weight = at.param("weight", weight, Init::Ones, &[]).unwrap();
    let dims = DotDims {
        lhs_contract: vec![1],
        rhs_contract: vec![1],
        ..DotDims::default()
    };
    let y = at.dot_general(x, weight, dims, DType::F32).unwrap();
    b.output("y", y, None).unwrap();
    b.finish()
}

/// The statistics of the recorded batches.
fn calibrated(golden: &Golden, dtype: DType) -> ActivationStatistics {
    let asked = Watch {
        model: "unet/".into(),
        layers: ["to_q".to_owned()].into(),
        counts: false,
        hessians: ["to_q".to_owned()].into(),
        gains: false,
        roundings: Default::default(),
    };
    let (graph, watched) = watch(linear(dtype), &asked).unwrap();
    let mut statistics = Statistics::new(watched);
    let weight = of_type(&tensor(golden, "in/weight", &[OUTPUTS, INPUTS]), dtype);
    let batches = tensor(golden, "in/batches", &[BATCHES, ROWS, INPUTS]);
    for batch in batches.to_f32_vec().unwrap().chunks(ROWS * INPUTS) {
        let x = HostTensor::from_f32([ROWS, INPUTS], batch).unwrap();
        let results = evaluate(&graph, &[of_type(&x, dtype), weight.clone()]).unwrap();
        statistics.add(0, &results[1..]).unwrap();
    }
    statistics.of_layer("to_q").unwrap().clone()
}

fn distance(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let square = |x: f32| f64::from(x).powi(2);
    let difference: f64 = found.iter().zip(expected).map(|(a, b)| square(a - b)).sum();
    (difference / expected.iter().map(|x| square(*x)).sum::<f64>()).sqrt()
}

/// The result of the layer for the recorded x, of a weight and an activation in these formats.
fn result(
    golden: &Golden,
    dtype: DType,
    layer: StoredLayer,
    weight: &HostTensor,
    input_scale: &[f32],
) -> Vec<f32> {
    let quantized = quantize_weight(weight, layer.weight).unwrap();
    let stored = [&quantized.values, &quantized.scale];
    run(golden, dtype, layer, stored, input_scale, None)
}

/// The same of integers and their scales, with the factors of a product beside them. `input_scale` are the scales of the
/// activation, or what it is divided by.
fn run(
    golden: &Golden,
    dtype: DType,
    layer: StoredLayer,
    [integers, scale]: [&HostTensor; 2],
    input_scale: &[f32],
    low_rank: Option<[&HostTensor; 2]>,
) -> Vec<f32> {
    let policy = Policy::stored("unet/", [("to_q".to_owned(), layer)].into());
    let traced = Traced::new("layer", linear(dtype));
    let graph = lower(&traced.quantized(Some(&policy)).unwrap().graph).unwrap();
    let x = of_type(&tensor(golden, "in/x", &[ROWS, INPUTS]), dtype);
    let inputs = graph.inputs.iter().map(|input| match input.name.as_str() {
        "x" => x.clone(),
        "unet/to_q.weight" => integers.clone(),
        "unet/to_q.weight_scale" => scale.clone(),
        "unet/to_q.input_scale" | "unet/to_q.smooth_factor" => {
            let dims = input.shape.dims.clone();
            let scale = HostTensor::from_f32(dims, input_scale).unwrap();
            of_type(&scale, input.shape.dtype)
        }
        "unet/to_q.svd_down.weight" => low_rank.unwrap()[0].clone(),
        "unet/to_q.svd_up.weight" => low_rank.unwrap()[1].clone(),
        other => panic!("{other}"),
    });
    let inputs: Vec<HostTensor> = inputs.collect();
    evaluate(&graph, &inputs).unwrap()[0].to_f32_vec().unwrap()
}

fn int8(granularity: Granularity, dtype: DType) -> TensorFormat {
    TensorFormat {
        granularity,
        range: Range::Stored(dtype),
        ..TensorFormat::int8(NumericsConvention::Quark)
    }
}

#[test]
fn static_int8_is_quarks() {
    let golden = Golden::read("quant_calibrated.safetensors");
    for (name, dtype, limit) in [("f32", DType::F32, 1e-6), ("bf16", DType::BF16, 5e-3)] {
        let statistics = calibrated(&golden, dtype);
        let weight = of_type(&tensor(&golden, "in/weight", &[OUTPUTS, INPUTS]), dtype);
        for (kind, granularity, scales) in [
            ("tensor", Granularity::Tensor, 1),
            ("channel", Granularity::Channel, OUTPUTS),
        ] {
            let case = format!("out/static_{name}_{kind}");
            let recorded = |key: &str, dims: &[usize]| {
                let tensor = tensor(&golden, &format!("{case}/{key}"), dims);
                tensor.to_f32_vec().unwrap()
            };
            let activation = int8(Granularity::Tensor, dtype);
            let input_scale = statistics.scale(Observer::default(), activation);
            assert_eq!([input_scale], recorded("input_scale", &[1])[..], "{case}");
            let format = int8(granularity, dtype);
            let quantized = quantize_weight(&weight, format).unwrap();
            let found = quantized.scale.to_f32_vec().unwrap();
            assert_eq!(found, recorded("weight_scale", &[scales]), "{case}");
            let layer = StoredLayer {
                weight: format,
                activation: Some(activation),
                low_rank: None,
                smoothed: false,
            };
            let found = result(&golden, dtype, layer, &weight, &[input_scale]);
            // In bf16 Quark multiplies what integers stand for, each rounded.
            let error = distance(&found, &recorded("y", &[ROWS, OUTPUTS]));
            assert!(error <= limit, "{case}: {error}");
        }
    }
}

/// Narrow integers by a recorded scale: one of half the range clips both ends to 127 of it.
#[test]
fn static_int8_may_be_narrow() {
    let golden = Golden::read("quant_calibrated.safetensors");
    let dtype = DType::F32;
    let narrow = |granularity| TensorFormat {
        convention: NumericsConvention::Narrow,
        ..int8(granularity, dtype)
    };
    let statistics = calibrated(&golden, dtype);
    let activation = narrow(Granularity::Tensor);
    let scale = statistics.scale(Observer::default(), activation);
    let quarks = statistics.scale(Observer::default(), int8(Granularity::Tensor, dtype));
    assert!((scale / quarks - 127.5 / 127.0).abs() < 1e-6);
    let weight = tensor(&golden, "in/weight", &[OUTPUTS, INPUTS]);
    let layer = StoredLayer {
        weight: narrow(Granularity::Channel),
        activation: Some(activation),
        low_rank: None,
        smoothed: false,
    };
    let quantized = quantize_weight(&weight, layer.weight).unwrap();
    let weights = quantized.dequantized().unwrap();
    let x = tensor(&golden, "in/x", &[ROWS, INPUTS]);
    let x = x.to_f32_vec().unwrap();
    for scale in [scale, scale / 2.0] {
        let rounded = |x: &f32| (x * scale.recip()).round_ties_even().clamp(-127.0, 127.0) * scale;
        let x: Vec<f32> = x.iter().map(rounded).collect();
        let expected: Vec<f32> = x
            .chunks(INPUTS)
            .flat_map(|x| {
                let rows = weights.chunks(INPUTS);
                rows.map(move |w| x.iter().zip(w).map(|(x, w)| x * w).sum::<f32>())
            })
            .collect();
        let found = result(&golden, dtype, layer, &weight, &[scale]);
        let error = distance(&found, &expected);
        assert!(error < 2e-6, "{error}");
    }
}

/// With a scale for each feature the error of outlier features leaves the others alone.
#[test]
fn weights_take_over_the_scales_of_features() {
    let golden = Golden::read("quant_calibrated.safetensors");
    let dtype = DType::F32;
    let statistics = calibrated(&golden, dtype);
    let weight = tensor(&golden, "in/weight", &[OUTPUTS, INPUTS]);
    let values = weight.to_f32_vec().unwrap();
    let x = tensor(&golden, "in/x", &[ROWS, INPUTS])
        .to_f32_vec()
        .unwrap();
    let exact: Vec<f32> = x
        .chunks(INPUTS)
        .flat_map(|x| {
            let rows = values.chunks(INPUTS);
            rows.map(|w| x.iter().zip(w).map(|(x, w)| x * w).sum::<f32>())
        })
        .collect();
    let largest = largest_of_features(&values, &[OUTPUTS, INPUTS]);
    let factors = balance(statistics.features(), &largest, 0.5);
    let magnitudes = statistics.features().iter().zip(&factors);
    let step = magnitudes.fold(0f32, |highest, (a, f)| highest.max(a / f)) / 127.5;
    let scales: Vec<f32> = factors.iter().map(|factor| factor * step).collect();
    let taken: Vec<f32> = values
        .iter()
        .enumerate()
        .map(|(at, w)| w * scales[at % INPUTS])
        .collect();
    let taken = HostTensor::from_f32([OUTPUTS, INPUTS], &taken).unwrap();
    let error = |granularity, weight: &HostTensor, scales: &[f32]| {
        let layer = StoredLayer {
            weight: int8(Granularity::Channel, dtype),
            activation: Some(int8(granularity, dtype)),
            low_rank: None,
            smoothed: false,
        };
        distance(&result(&golden, dtype, layer, weight, scales), &exact)
    };
    let plain = statistics.scale(Observer::default(), int8(Granularity::Tensor, dtype));
    let plain = error(Granularity::Tensor, &weight, &[plain]);
    let smooth = error(Granularity::Feature, &taken, &scales);
    assert!(smooth < 0.5 * plain, "{smooth}, without {plain}");
}

const INT4: TensorFormat = TensorFormat {
    element: DType::S4,
    granularity: Granularity::Group(64),
    zero_point: false,
    range: Range::Stored(DType::BF16),
    rounding: maxdiff::graph::Rounding::NearestEven,
    convention: NumericsConvention::Quark,
};

/// Weight and activation in int4 as AMD Quark computes them, with a scale for so many features, or one a channel and a token.
#[test]
fn int4_activations_are_quarks() {
    let golden = Golden::read("quant_calibrated.safetensors");
    for (name, dtype, limit) in [("f32", DType::F32, 1e-6), ("bf16", DType::BF16, 5e-3)] {
        let weight = of_type(&tensor(&golden, "in/weight", &[OUTPUTS, INPUTS]), dtype);
        for group in [0, 32, 64, 128] {
            let format = TensorFormat {
                granularity: match group {
                    0 => Granularity::Channel,
                    size => Granularity::Group(size),
                },
                ..INT4.stored(dtype)
            };
            let layer = StoredLayer {
                weight: format,
                activation: Some(TensorFormat {
                    range: Range::Dynamic,
                    ..format
                }),
                low_rank: None,
                smoothed: false,
            };
            let found = result(&golden, dtype, layer, &weight, &[]);
            let case = format!("out/w4a4_{name}_{group}/y");
            let expected = tensor(&golden, &case, &[ROWS, OUTPUTS]);
            let error = distance(&found, &expected.to_f32_vec().unwrap());
            assert!(error <= limit, "{case}: {error}");
        }
    }
}

/// The integers of a weight that was recorded as what they stand for, with a scale for 64 of them.
fn integers_of(weight: &[f32], scales: &[f32]) -> Vec<f64> {
    let runs = weight.chunks(64).zip(scales);
    let integers =
        runs.flat_map(|(run, scale)| run.iter().map(move |w| f64::from((w / scale).round())));
    integers.collect()
}

/// The layer's result without quantization.
fn exact(golden: &Golden) -> Vec<f32> {
    let weight = tensor(golden, "in/weight", &[OUTPUTS, INPUTS]);
    let x = tensor(golden, "in/x", &[ROWS, INPUTS]);
    let results = evaluate(&linear(DType::F32), &[x, weight]).unwrap();
    results[0].to_f32_vec().unwrap()
}

/// SVDQuant with activations in int4: AMD Quark's layer of its own integers and factors, and both orders of ours beside it and
/// beside the paper's.
#[test]
fn svdquant_with_int4_activations_is_quarks_and_the_papers() {
    let golden = Golden::read("quant_calibrated.safetensors");
    let dtype = DType::BF16;
    let rank = golden.meta["rank"].as_u64().unwrap() as usize;
    let exact = exact(&golden);
    let layer = |smoothed| StoredLayer {
        weight: INT4,
        activation: Some(TensorFormat {
            range: Range::Dynamic,
            ..INT4
        }),
        low_rank: Some(rank),
        smoothed,
    };
    let recorded =
        |key: &str, dims: &[usize]| tensor(&golden, &format!("out/svdquant_w4a4/{key}"), dims);
    let quarks = recorded("y", &[ROWS, OUTPUTS]).to_f32_vec().unwrap();

    let scale = recorded("scale", &[OUTPUTS, INPUTS / 64]);
    let (steps, scales) = (
        recorded("weight", &[OUTPUTS, INPUTS]).to_f32_vec().unwrap(),
        scale.to_f32_vec().unwrap(),
    );
    let integers = integers_of(&steps, &scales);
    let integers = HostTensor::from_f64(Shape::new(DType::S4, [OUTPUTS, INPUTS]), &integers);
    let factors = [
        recorded("down", &[rank, INPUTS]),
        recorded("up", &[OUTPUTS, rank]),
    ];
    let stored = [&integers.unwrap(), &of_type(&scale, dtype)];
    let factors = factors.each_ref();
    let found = run(&golden, dtype, layer(false), stored, &[], Some(factors));
    let error = distance(&found, &quarks);
    assert!(error <= 5e-3, "{error}");

    // Our own decomposition, in both orders.
    let statistics = calibrated(&golden, dtype);
    let weight = tensor(&golden, "in/weight", &[OUTPUTS, INPUTS]);
    let of = |weight: &HostTensor, features, smooth: &[f32]| {
        let options = LowRankOptions {
            rank,
            iterations: 1,
            alphas: vec![0.5],
            features,
        };
        let found = decomposed(weight, &options);
        let stored = [&found.weight.values, &found.weight.scale];
        let low_rank = Some([&found.down, &found.up]);
        let layer = layer(!smooth.is_empty());
        run(&golden, dtype, layer, stored, smooth, low_rank)
    };
    let features = [statistics.features().to_vec(), statistics.squares()];
    let own = distance(&of(&weight, Some(features), &[]), &exact);
    let quarks = distance(&quarks, &exact);
    assert!(
        (own / quarks - 1.0).abs() < 0.03,
        "{own}, AMD Quark {quarks}"
    );

    let values = weight.to_f32_vec().unwrap();
    let largest = largest_of_features(&values, &[OUTPUTS, INPUTS]);
    let smooth = balance(statistics.features(), &largest, 0.5);
    let recorded = tensor(&golden, "out/paper/factors", &[INPUTS]);
    let error = distance(&smooth, &recorded.to_f32_vec().unwrap());
    assert!(error < 1e-6, "{error}");
    let taken = values.iter().enumerate();
    let taken: Vec<f32> = taken.map(|(at, w)| w * smooth[at % INPUTS]).collect();
    let taken = HostTensor::from_f32([OUTPUTS, INPUTS], &taken).unwrap();
    let own = distance(&of(&taken, None, &smooth), &exact);
    let recorded = tensor(&golden, "out/paper/y", &[ROWS, OUTPUTS]);
    let papers = distance(&recorded.to_f32_vec().unwrap(), &exact);
    assert!(
        (own / papers - 1.0).abs() < 0.05,
        "{own}, the paper {papers}"
    );
    // Divided activations have fewer outliers.
    assert!(own < 0.9 * quarks, "{own}, AMD Quark {quarks}");
}

fn decomposed(weight: &HostTensor, options: &LowRankOptions) -> LowRankWeight {
    with_low_rank(
        weight,
        INT4,
        &WeightRounding::nearest(Observer::default()),
        options,
        DType::BF16,
    )
    .unwrap()
}

fn product(up: &HostTensor, down: &HostTensor) -> Vec<f32> {
    let rank = down.shape.dims[0];
    let [up, down] = [up, down].map(|factor| factor.to_f32_vec().unwrap());
    let rows = up.chunks(rank).flat_map(|up| {
        (0..INPUTS).map(|column| {
            let terms = up.iter().zip(down[column..].iter().step_by(INPUTS));
            terms.map(|(u, d)| u * d).sum::<f32>()
        })
    });
    rows.collect()
}

fn sum(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

#[test]
fn svdquant_is_quarks() {
    let golden = Golden::read("quant_calibrated.safetensors");
    let rank = golden.meta["rank"].as_u64().unwrap() as usize;
    let statistics = calibrated(&golden, DType::BF16);
    let weight = tensor(&golden, "in/weight", &[OUTPUTS, INPUTS]);
    let exact = weight.to_f32_vec().unwrap();
    let options = |rank, alphas: &[f64]| LowRankOptions {
        rank,
        iterations: 1,
        alphas: alphas.to_vec(),
        features: Some([statistics.features().to_vec(), statistics.squares()]),
    };
    let found = decomposed(&weight, &options(rank, &[0.5]));
    let recorded =
        |key: &str, dims: &[usize]| tensor(&golden, &format!("out/svdquant/{key}"), dims);
    let [up, down] = [
        recorded("up", &[OUTPUTS, rank]),
        recorded("down", &[rank, INPUTS]),
    ];
    let [found_product, quarks_product] = [product(&found.up, &found.down), product(&up, &down)];
    // Of directions that are nearly as strong as others the product may have others.
    let error = distance(&found_product, &quarks_product);
    assert!(error <= 2e-2, "{error}");
    let quarks = sum(
        &recorded("weight", &[OUTPUTS, INPUTS]).to_f32_vec().unwrap(),
        &quarks_product,
    );
    let own = sum(&found.weight.dequantized().unwrap(), &found_product);
    let [own, quarks] = [distance(&own, &exact), distance(&quarks, &exact)];
    assert!(own <= 1.01 * quarks, "{own}, AMD Quark {quarks}");

    // Without the product, of a higher rank, chosen several times, and with the best of several alphas.
    let plain = quantize_weight(&of_type(&weight, DType::BF16), INT4).unwrap();
    let plain = distance(&plain.dequantized().unwrap(), &exact);
    assert!(own < 0.9 * plain, "{own}, without {plain}");
    let of = |options: &LowRankOptions| {
        let found = decomposed(&weight, options);
        let both = sum(
            &found.weight.dequantized().unwrap(),
            &product(&found.up, &found.down),
        );
        distance(&both, &exact)
    };
    let higher = of(&options(2 * rank, &[0.5]));
    assert!(higher < own, "{higher}, {own}");
    let unweighted = |iterations| LowRankOptions {
        iterations,
        features: None,
        ..options(rank, &[0.5])
    };
    let [once, often] = [1, 8].map(|iterations| of(&unweighted(iterations)));
    assert!(often < once, "{often}, {once}");
    let best = decomposed(&weight, &options(rank, &[0.05, 0.5, 0.95])).alpha;
    assert!([0.05, 0.5, 0.95].contains(&best));
}

/// AMD Quark takes what its product leaves before it rounds the factors to bf16. Of an exact decomposition that rest, in bf16, has the
/// recorded integers and scales bit for bit, and stands for the recorded weight. We take it after the factors are rounded: of
/// Quark's own factors integers are then at most one step from Quark's, and all together is nearer to the weight.
#[test]
fn what_svdquant_leaves_is_quantized_as_by_quark() {
    let golden = Golden::read("quant_calibrated.safetensors");
    let rank = golden.meta["rank"].as_u64().unwrap() as usize;
    let statistics = calibrated(&golden, DType::BF16);
    let exact = tensor(&golden, "in/weight", &[OUTPUTS, INPUTS]);
    let exact = exact.to_f32_vec().unwrap();
    let largest = largest_of_features(&exact, &[OUTPUTS, INPUTS]);
    let factors = balance(statistics.features(), &largest, 0.5);
    let matrix = nalgebra::DMatrix::from_fn(OUTPUTS, INPUTS, |row, column| {
        f64::from(exact[row * INPUTS + column]) * f64::from(factors[column])
    });
    let svd = matrix.clone().svd(true, true);
    let (u, v, strengths) = (svd.u.unwrap(), svd.v_t.unwrap(), svd.singular_values);
    let mut order: Vec<usize> = (0..strengths.len()).collect();
    order.sort_by(|a, b| strengths[*b].total_cmp(&strengths[*a]));
    let rest = (0..OUTPUTS * INPUTS).map(|at| {
        let (row, column) = (at / INPUTS, at % INPUTS);
        let taken = order[..rank].iter();
        let low: f64 = taken
            .map(|which| u[(row, *which)] * strengths[*which] * v[(*which, column)])
            .sum();
        (matrix[(row, column)] - low) as f32 * (1.0 / factors[column])
    });
    let rest: Vec<f32> = rest.collect();
    let quantized = |rest: &[f32]| {
        let rest = HostTensor::from_f32([OUTPUTS, INPUTS], rest).unwrap();
        quantize_weight(&of_type(&rest, DType::BF16), INT4).unwrap()
    };
    let found = quantized(&rest);
    let stands_for = found.dequantized().unwrap();
    let stands_for = HostTensor::from_f32([OUTPUTS, INPUTS], &stands_for).unwrap();
    let stands_for = of_type(&stands_for, DType::BF16).to_f32_vec().unwrap();
    for case in ["svdquant", "svdquant_w4a4"] {
        let recorded = |key: &str, dims: &[usize]| {
            let tensor = tensor(&golden, &format!("out/{case}/{key}"), dims);
            tensor.to_f32_vec().unwrap()
        };
        let scales = recorded("scale", &[OUTPUTS, INPUTS / 64]);
        let weight = recorded("weight", &[OUTPUTS, INPUTS]);
        let integers = integers_of(&weight, &scales);
        assert_eq!(found.scale.to_f32_vec().unwrap(), scales, "{case}");
        assert_eq!(found.values.to_f64_vec().unwrap(), integers, "{case}");
        assert_eq!(stands_for, weight, "{case}");

        // Ours, of Quark's factors.
        let up = tensor(&golden, &format!("out/{case}/up"), &[OUTPUTS, rank]);
        let down = tensor(&golden, &format!("out/{case}/down"), &[rank, INPUTS]);
        let low_rank = product(&up, &down);
        let both = exact.iter().zip(&low_rank);
        let rest: Vec<f32> = both.map(|(weight, low)| weight - low).collect();
        let own = quantized(&rest);
        let steps = own.values.to_f64_vec().unwrap();
        let apart = steps.iter().zip(&integers).map(|(a, b)| (a - b).abs());
        let apart: Vec<f64> = apart.filter(|steps| *steps > 0.0).collect();
        assert!(apart.iter().all(|steps| *steps == 1.0), "{case}");
        assert!(apart.len() < steps.len() / 20, "{case}: {}", apart.len());
        for (own, quarks) in own.scale.to_f32_vec().unwrap().iter().zip(&scales) {
            assert!((own / quarks - 1.0).abs() < 0.06, "{case}: {own}, {quarks}");
        }
        let [own, quarks] = [&own.dequantized().unwrap(), &weight]
            .map(|left| distance(&sum(left, &low_rank), &exact));
        assert!(own < quarks, "{case}: {own}, AMD Quark {quarks}");
    }
}

/// GPTQ against a computation in float64: integers, scales, and what the layer computes of the calibration's batches. Alone, and of
/// what a low-rank product leaves.
#[test]
fn gptq_is_the_papers() {
    let golden = Golden::read("quant_calibrated.safetensors");
    let recorded = Golden::read("quant_gptq.safetensors");
    let statistics = calibrated(&golden, DType::F32);
    let hessian = statistics.hessian().unwrap();
    let weight = tensor(&golden, "in/weight", &[OUTPUTS, INPUTS]);
    let exact = weight.to_f32_vec().unwrap();
    // tr(E H E^T), which is the squared error of the batches, of the whole.
    let error = |left: &[f32]| {
        let energy = |rows: &dyn Fn(usize) -> f64| -> f64 {
            (0..OUTPUTS)
                .map(|row| {
                    let at = |column: usize| rows(row * INPUTS + column);
                    let terms = (0..INPUTS * INPUTS).map(|i| {
                        let (a, b) = (i / INPUTS, i % INPUTS);
                        at(a) * f64::from(hessian[i]) * at(b)
                    });
                    terms.sum::<f64>()
                })
                .sum()
        };
        let changed = energy(&|i| f64::from(exact[i]) - f64::from(left[i]));
        (changed / energy(&|i| f64::from(exact[i]))).sqrt()
    };
    let rounding = WeightRounding {
        observer: Observer::default(),
        algorithm: RoundingAlgorithm::Gptq(&hessian),
    };
    for (case, element, granularity, groups) in [
        ("int4_group", DType::S4, Granularity::Group(64), 2),
        ("int4_channel", DType::S4, Granularity::Channel, 1),
        ("int8_channel", DType::S8, Granularity::Channel, 1),
    ] {
        let format = TensorFormat {
            element,
            granularity,
            ..INT4.stored(DType::F32)
        };
        let found = rounding.quantize(&weight, format).unwrap();
        let of = |key: &str, shape: Shape| recorded.tensor(&format!("out/{case}/{key}"), &shape);
        let integers = of("integers", Shape::new(DType::S8, [OUTPUTS, INPUTS]));
        let integers = integers.to_f32_vec().unwrap();
        let own = found.values.to_f32_vec().unwrap();
        // Sums in float32 round the other way at a tie, and what follows is other by a step.
        let same = own.iter().zip(&integers).filter(|(a, b)| a == b).count();
        assert!(same as f64 > 0.99 * own.len() as f64, "{case}: {same}");
        let scale = of("scale", Shape::new(DType::F32, [OUTPUTS, groups]));
        let scale = distance(
            &found.scale.to_f32_vec().unwrap(),
            &scale.to_f32_vec().unwrap(),
        );
        assert!(scale < 1e-3, "{case}: {scale}");
        let number = |key: &str| of(key, Shape::new(DType::F32, [1])).to_f64_vec().unwrap()[0];
        let own = error(&found.dequantized().unwrap());
        assert!((own / number("error") - 1.0).abs() < 0.02, "{case}: {own}");
        let nearest = quantize_weight(&weight, format).unwrap();
        let nearest = error(&nearest.dequantized().unwrap());
        assert!(
            (nearest / number("nearest") - 1.0).abs() < 5e-3,
            "{case}: {nearest}"
        );
        assert!(
            own < 0.8 * nearest,
            "{case}: {own}, to the nearest {nearest}"
        );
    }
    let options = LowRankOptions {
        rank: 8,
        iterations: 1,
        alphas: vec![0.5],
        features: Some([statistics.features().to_vec(), statistics.squares()]),
    };
    let of = |rounding: &WeightRounding<'_>| {
        let found = with_low_rank(&weight, INT4, rounding, &options, DType::BF16).unwrap();
        error(&sum(
            &found.weight.dequantized().unwrap(),
            &product(&found.up, &found.down),
        ))
    };
    let nearest = of(&WeightRounding::nearest(Observer::default()));
    let own = of(&rounding);
    assert!(own < 0.9 * nearest, "{own}, to the nearest {nearest}");
}

/// The randomized decomposition against the exact one.
#[test]
fn the_product_is_nearly_the_best_of_its_rank() {
    let golden = Golden::read("quant_calibrated.safetensors");
    let weight = tensor(&golden, "in/weight", &[OUTPUTS, INPUTS]);
    let noise = Init::Normal { std: 1.0 }.sample(7, "w", OUTPUTS * INPUTS);
    let noise = HostTensor::from_f32([OUTPUTS, INPUTS], &noise).unwrap();
    for weight in [weight, noise] {
        let values = weight.to_f32_vec().unwrap();
        let matrix = nalgebra::DMatrix::from_row_slice(OUTPUTS, INPUTS, &values);
        let mut singular: Vec<f32> = matrix.singular_values().iter().copied().collect();
        singular.sort_by(|a, b| b.total_cmp(a));
        for rank in [1, 8, 32] {
            let options = LowRankOptions {
                rank,
                iterations: 1,
                alphas: vec![0.5],
                features: None,
            };
            let found = decomposed(&weight, &options);
            let squares = |values: &mut dyn Iterator<Item = f32>| {
                values.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt()
            };
            let left = product(&found.up, &found.down);
            let left = squares(&mut values.iter().zip(&left).map(|(a, b)| a - b));
            let best = squares(&mut singular[rank..].iter().copied());
            assert!(left <= 1.02 * best, "rank {rank}: {left}, best {best}");
        }
    }
}
