//! Observers against what amd-quark 0.13 and PyTorch computed, of values that are there and of values that a program counts.

use crate::common::Golden;
use maxdiff::dtype::DType;
use maxdiff::graph::{
    Builder, Granularity, Init, NumericsConvention, Range, TensorFormat, evaluate,
};
use maxdiff::host_tensor::HostTensor;
use maxdiff::quant::{
    CalibrationError, Observer, ObserverCompat, ObserverKind, Statistics, Watch, quantize_observed,
    watch,
};
use maxdiff::shape::Shape;

const BATCHES: [usize; 2] = [3, 2048];

/// int8 in AMD Quark's numerics, with one scale.
fn format(symmetric: bool) -> TensorFormat {
    TensorFormat {
        granularity: Granularity::Tensor,
        zero_point: !symmetric,
        range: Range::Stored(DType::F32),
        ..TensorFormat::int8(NumericsConvention::Quark)
    }
}

fn batches(golden: &Golden) -> Vec<f32> {
    let shape = Shape::new(DType::F32, BATCHES);
    let batches = golden.tensor("in/batches", &shape);
    batches.to_f32_vec().unwrap()
}

/// The recorded numbers.
fn recorded(golden: &Golden, name: &str, count: usize) -> Vec<f32> {
    let shape = Shape::new(DType::F32, [count]);
    let tensor = golden.tensor(&format!("out/{name}"), &shape);
    tensor.to_f32_vec().unwrap()
}

/// A program that multiplies `rows` values of one feature with a weight, and what it tells of them over `batches`.
fn counted(batches: &[&[f32]], counts: bool) -> Result<Statistics, CalibrationError> {
    let rows = batches[0].len();
    let b = Builder::new();
    let x = b
        .input("x", Shape::new(DType::F32, [rows, 1]), &[])
        .unwrap();
    let at = b.root("unet").scope("to_q");
    let weight = Shape::new(DType::F32, [1, 1]);
    let weight = at.param("weight", weight, Init::Ones, &[]).unwrap();
    let dims = maxdiff::graph::DotDims {
        lhs_contract: vec![1],
        rhs_contract: vec![1],
        ..Default::default()
    };
    let y = at.dot_general(x, weight, dims, DType::F32).unwrap();
    b.output("y", y, None).unwrap();
    let asked = Watch {
        model: "unet/".into(),
        layers: ["to_q".to_owned()].into(),
        counts,
        hessians: Default::default(),
        gains: false,
        roundings: Default::default(),
    };
    let (graph, watched) = watch(b.finish(), &asked).unwrap();
    let mut statistics = Statistics::new(watched);
    for batch in batches {
        let x = HostTensor::from_f32([rows, 1], batch).unwrap();
        let one = HostTensor::from_f32([1, 1], &[1.0]).unwrap();
        let results = evaluate(&graph, &[x, one]).unwrap();
        statistics.add(0, &results[1..])?;
    }
    Ok(statistics)
}

/// The scale of values that are there, and of those that a program counts.
fn scales(values: &[f32], observer: Observer, symmetric: bool) -> [f32; 2] {
    let tensor = HostTensor::from_f32([1, values.len()], values).unwrap();
    let quantized = quantize_observed(&tensor, format(symmetric), observer).unwrap();
    let statistics = counted(&[values], true).unwrap();
    let counted = statistics.of_layer("to_q").unwrap();
    [
        quantized.scale.to_f32_vec().unwrap()[0],
        counted.scale(observer, format(symmetric)),
    ]
}

#[track_caller]
fn near(found: f32, expected: f32, relative: f32, what: &str) {
    let error = (found - expected).abs() / expected.abs();
    assert!(error <= relative, "{what}: {found}, expected {expected}");
}

#[test]
fn ranges_are_those_of_quark_and_pytorch() {
    let golden = Golden::read("quant_observers.safetensors");
    let signed = batches(&golden);
    let positive: Vec<f32> = signed.iter().map(|x| x.abs()).collect();
    for (name, values) in [("signed", &signed), ("positive", &positive)] {
        for (symmetric, kind) in [(true, "symmetric"), (false, "asymmetric")] {
            let case = format!("{name}_{kind}");
            let expected = recorded(&golden, &format!("min_max_{case}/scale"), 1)[0];
            let found = scales(values, Observer::default(), symmetric);
            assert_eq!(found, [expected; 2], "{case}");
            for (kind, bins) in [
                (ObserverKind::HistogramPro, 256),
                (ObserverKind::Histogram, 2048),
            ] {
                let expected = recorded(&golden, &format!("histogram_{bins}_{case}/scale"), 1)[0];
                for found in scales(values, Observer::of(kind), symmetric) {
                    near(found, expected, 1e-6, &format!("{bins} {case}"));
                }
            }
        }
        for percentile in golden.meta["percentiles"].as_array().unwrap() {
            let observer = Observer {
                percentile: percentile.as_f64().unwrap(),
                ..Observer::of(ObserverKind::Percentile)
            };
            let case = format!("percentile_{}_{name}/scale", observer.percentile);
            let expected = recorded(&golden, &case, 1)[0];
            for found in scales(values, observer, true) {
                near(found, expected, 1e-6, &case);
            }
        }
        let expected = recorded(&golden, &format!("mse_{name}/scale"), 1)[0];
        let found = scales(values, Observer::of(ObserverKind::Mse), true);
        assert_eq!(found, [expected; 2], "mse {name}");
    }
}

/// `observer_compat: quark`: scales and zero points of Quark's own observers, with their defects.
#[test]
fn quarks_own_results_are_there_for_comparison() {
    let golden = Golden::read("quant_observers.safetensors");
    let signed = batches(&golden);
    let positive: Vec<f32> = signed.iter().map(|x| x.abs()).collect();
    for (name, values) in [("signed", &signed), ("positive", &positive)] {
        let weight = HostTensor::from_f32([1, values.len()], values).unwrap();
        for (symmetric, symmetry) in [(true, "symmetric"), (false, "asymmetric")] {
            for kind in [
                ObserverKind::Histogram,
                ObserverKind::Mse,
                ObserverKind::Percentile,
            ] {
                let case = format!("quark_{kind}_{name}_{symmetry}");
                let observer = Observer {
                    compat: Some(ObserverCompat::Quark),
                    ..Observer::of(kind)
                };
                let found = quantize_observed(&weight, format(symmetric), observer).unwrap();
                let scale = recorded(&golden, &format!("{case}/scale"), 1)[0];
                near(found.scale.to_f32_vec().unwrap()[0], scale, 1e-5, &case);
                if let Some(zero_point) = found.zero_point {
                    let shape = Shape::new(DType::S32, [1]);
                    let expected = golden.tensor(&format!("out/{case}/zero_point"), &shape);
                    let expected = expected.to_f32_vec().unwrap();
                    assert_eq!(zero_point.to_f32_vec().unwrap(), expected, "{case}");
                }
                // The defects are not those of the observers that are for use.
                if kind == ObserverKind::Histogram {
                    assert_eq!(scale, 1.0);
                }
            }
        }
    }
}

#[test]
fn scales_are_powers_of_two() {
    let golden = Golden::read("quant_observers.safetensors");
    let values = batches(&golden);
    let observer = Observer::of(ObserverKind::PowerOfTwo);
    let expected = recorded(&golden, "power_of_two/scale", 1)[0];
    assert_eq!(scales(&values, observer, true), [expected; 2]);
    let rows = 24;
    let weight = HostTensor::from_f32([rows, values.len() / rows], &values).unwrap();
    let format = TensorFormat {
        granularity: Granularity::Channel,
        ..format(true)
    };
    let found = quantize_observed(&weight, format, observer).unwrap();
    let expected = recorded(&golden, "power_of_two_channel/scale", rows);
    assert_eq!(found.scale.to_f32_vec().unwrap(), expected);
    for convention in [NumericsConvention::Aqt, NumericsConvention::Qwix] {
        let format = TensorFormat {
            convention,
            ..format
        };
        let found = quantize_observed(&weight, format, observer).unwrap();
        assert_eq!(found.scale.to_f32_vec().unwrap(), expected, "{convention}");
    }
    // The scales of the narrow range are 127.5 / 127 times as large, and so may be the next power of two.
    let format = TensorFormat {
        convention: NumericsConvention::Narrow,
        ..format
    };
    let found = quantize_observed(&weight, format, observer).unwrap();
    let found = found.scale.to_f32_vec().unwrap();
    for (found, expected) in found.into_iter().zip(expected) {
        assert!(
            [1.0, 2.0].contains(&(found / expected)),
            "{found} {expected}"
        );
    }
}

/// A batch at a time: the whole range, and PyTorch's moving average of ranges.
#[test]
fn statistics_are_summed_up_over_batches() {
    let golden = Golden::read("quant_observers.safetensors");
    let values = batches(&golden);
    let each: Vec<&[f32]> = values.chunks(BATCHES[1]).collect();
    let statistics = counted(&each, true).unwrap();
    let found = statistics.of_layer("to_q").unwrap();
    assert_eq!(statistics.steps(), 3);
    let whole = counted(&[&values], true).unwrap();
    let whole = whole.of_layer("to_q").unwrap();
    assert_eq!(found.range(), whole.range());
    assert_eq!(found.features(), [61.25]);
    let kinds = [
        ObserverKind::Mse,
        ObserverKind::Percentile,
        ObserverKind::Histogram,
    ];
    for kind in kinds {
        let [of_batches, of_all] =
            [found, whole].map(|s| s.scale(Observer::of(kind), format(true)));
        assert_eq!(of_batches, of_all, "{kind}");
    }
    let [lowest, highest] = recorded(&golden, "ema/range", 2)[..] else {
        panic!("two ends");
    };
    let ema = Observer::of(ObserverKind::Ema);
    near(
        found.scale(ema, format(false)),
        (highest - lowest) / 255.0,
        1e-6,
        "ema",
    );
    near(found.scale(ema, format(true)), highest / 127.5, 1e-6, "ema");
}

#[test]
fn what_cannot_be_calibrated_is_named() {
    let nothing = counted(&[&[1.0][..]][..1], false).unwrap();
    assert!(matches!(
        nothing.of_layer("to_k"),
        Err(CalibrationError::NoLayer { layer }) if layer == "to_k"
    ));
    let error = counted(&[&[1.0, 2.0], &[1.0, f32::NAN]], false).unwrap_err();
    assert_eq!(
        error.to_string(),
        "to_q: its input has NaN or infinity in step 2 of calibration; take float32 as activations_dtype, or leave the layer \
         in float by a rule of quant_rules"
    );
}
