//! Weights in every format: in the graph, on the host, and as a checkpoint stores them.

use super::*;
use crate::graph::Range;

/// The policy of weights alone in a format.
fn of_weights(format: TensorFormat) -> Policy {
    Policy::of_layers("unet/", vec![], &[], Formats::of_weights(format)).unwrap()
}

/// Every format of weights alone, with groups of 4.
fn formats_of_weights() -> Vec<TensorFormat> {
    let mut formats = Vec::new();
    for element in [DType::S8, DType::S4] {
        for granularity in [
            Granularity::Tensor,
            Granularity::Channel,
            Granularity::Group(4),
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

/// `x W^T` in the weight's format, and in float: results on the host, with how the lowered graph looks.
fn weight_only(format: TensorFormat) -> (crate::graph::Graph, Vec<f64>, Vec<f64>) {
    let trace = |policy: Option<Policy>| {
        let b = Builder::new();
        let x = b.input("x", f32s(&[1, 4, 16]), &[]).unwrap();
        let y = linear(&b.root("unet").scope("to_q"), x, 16, 6);
        if let Some(policy) = policy {
            annotate(&b, &policy).unwrap();
        }
        b.output("y", y, None).unwrap();
        lower(&b.finish()).unwrap()
    };
    let policy = of_weights(format);
    let inputs = [
        HostTensor::from_f32([1, 4, 16], &wave(64, 0.7)).unwrap(),
        HostTensor::from_f32([6, 16], &wave(96, 2.1)).unwrap(),
    ];
    let run = |graph: &crate::graph::Graph| {
        let out = evaluate(graph, &inputs).unwrap().remove(0);
        out.to_f64_vec().unwrap()
    };
    let (quantized, float) = (trace(Some(policy)), trace(None));
    let results = [run(&quantized), run(&float)];
    let [found, expected] = results;
    (quantized, found, expected)
}

#[test]
fn a_weight_alone_is_quantized_in_every_format() {
    let fixed = TensorFormat {
        range: Range::Static(1f32.to_bits()),
        ..TensorFormat::int8(NumericsConvention::Aqt)
    };
    for format in formats_of_weights().into_iter().chain([fixed]) {
        let (_, found, expected) = weight_only(format);
        // A step is 1/127.5 or 1/7.5 of at most 1, of the narrow range 1/127 or 1/7, an element is off by half of one at most, or
        // a whole one where the largest is clipped; over 16 products with |x| <= 1.
        let most = match format.element {
            DType::S4 => 16.0 / 7.5,
            // Half of a step is 1/16 of a number.
            DType::F8E4M3Fn => 16.0 / 16.0,
            _ => 16.0 * 0.5 / 127.5 * 1.01,
        };
        let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs());
        let worst = worst.fold(0.0, f64::max);
        assert!(worst > 0.0 && worst < most, "{format:?}: {worst}");
    }
}

/// What is multiplied is what the integers stand for: `(integers - zero point) * scale` in float.
#[test]
fn a_quantized_weight_is_worth_its_integers_times_scales() {
    let x = wave(64, 0.7);
    let weight = HostTensor::from_f32([6, 16], &wave(96, 2.1)).unwrap();
    for format in formats_of_weights() {
        let (_, found, _) = weight_only(format);
        let quantized = quantize_weight(&weight, format).unwrap();
        let values = quantized.values.to_f64_vec().unwrap();
        let scales = quantized.scale.to_f64_vec().unwrap();
        let zero_points = match &quantized.zero_point {
            Some(zero_point) => zero_point.to_f64_vec().unwrap(),
            None => vec![0.0; scales.len()],
        };
        let run = 96 / scales.len();
        for (at, found) in found.iter().enumerate() {
            let (token, out) = (at / 6, at % 6);
            let term = |i: usize| {
                let place = out * 16 + i;
                let steps = values[place] - zero_points[place / run];
                f64::from(x[token * 16 + i]) * steps * scales[place / run]
            };
            let expected: f64 = (0..16).map(term).sum();
            // Sums of 16 products of at most 1, in f32.
            assert!(
                (found - expected).abs() < 1e-6 * 4.0,
                "{format:?}: {found} {expected}"
            );
        }
    }
}

#[test]
fn what_is_kept_of_a_weight_is_its_integers() {
    for format in formats_of_weights() {
        let (graph, expected, _) = weight_only(format);
        let graph = graph.inline_composites(&|_, _| true);
        let staged = crate::graph::stage(&graph, &[]).unwrap();
        let largest = staged.step.inputs.iter().filter(|i| i.is_weight());
        let largest = largest.max_by_key(|i| i.shape.count()).unwrap();
        assert_eq!(largest.shape.dtype, format.element, "{format:?}");
        let ranges = |graph: &crate::graph::Graph| {
            let paths = graph.nodes.iter().map(|node| graph.path(node));
            paths.filter(|path| path.ends_with("range_finding")).count()
        };
        assert_eq!(
            ranges(&staged.step),
            0,
            "no step finds the range of a weight"
        );
        assert!(staged.load.iter().map(ranges).sum::<usize>() > 0);
        // The stages together are the program.
        let weight = HostTensor::from_f32([6, 16], &wave(96, 2.1)).unwrap();
        let kept = evaluate(&staged.load[0], &[weight]).unwrap();
        let inputs: Vec<HostTensor> = staged
            .step
            .inputs
            .iter()
            .map(|input| {
                let outputs = &staged.load[0].outputs;
                match outputs.iter().position(|o| o.name == input.name) {
                    Some(at) => kept[at].clone(),
                    None => HostTensor::from_f32([1, 4, 16], &wave(64, 0.7)).unwrap(),
                }
            })
            .collect();
        let found = evaluate(&staged.step, &inputs).unwrap().remove(0);
        assert_eq!(found.to_f64_vec().unwrap(), expected, "{format:?}");
    }
}

#[test]
fn groups_that_do_not_divide_are_refused() {
    let b = Builder::new();
    let x = b.input("x", f32s(&[1, 4, 16]), &[]).unwrap();
    let y = linear(&b.root("unet").scope("to_q"), x, 16, 6);
    let policy = of_weights(TensorFormat {
        granularity: Granularity::Group(5),
        ..TensorFormat::int8(NumericsConvention::Aqt)
    });
    b.output("y", y, None).unwrap();
    assert_eq!(
        annotate(&b, &policy).unwrap_err().to_string(),
        "unet/to_q: groups of 5 do not divide its 16 input features; nearest: 4 and 8; a rule of quant_rules gives this \
         layer others, or one scale a channel"
    );
}

/// `x W^T` with `W` `[6, 16]` used in `dtype`, lowered by `policy`.
fn lowered_linear(policy: &Policy, dtype: DType) -> crate::graph::Graph {
    let b = Builder::new();
    let x = b.input("x", Shape::new(dtype, [1, 4, 16]), &[]).unwrap();
    let at = b.root("unet").scope("to_q");
    let w = at.param("weight", f32s(&[6, 16]), Init::Ones, &[]).unwrap();
    let dims = DotDims {
        lhs_contract: vec![2],
        rhs_contract: vec![1],
        ..DotDims::default()
    };
    let w = at.convert(w, dtype).unwrap();
    let y = at.dot_general(x, w, dims, DType::F32).unwrap();
    annotate(&b, policy).unwrap();
    b.output("y", y, None).unwrap();
    let graph = lower(&b.finish()).unwrap();
    graph.inline_composites(&|_, _| true)
}

/// Rows of ordinary numbers, of ties, of one outlier, of zeros, of tiny numbers, and of large ones.
fn weight() -> HostTensor {
    let mut values = wave(96, 2.1);
    for (i, value) in values.iter_mut().enumerate() {
        *value = match i / 16 {
            1 => (i % 16) as f32 * 8.5 - 63.75,
            2 if i % 16 == 3 => 77.0,
            3 => 0.0,
            4 => *value * 1e-30,
            5 => *value * 1e30,
            _ => *value,
        };
    }
    HostTensor::from_f32([6, 16], &values).unwrap()
}

/// The integers and scales of the host are those that the load stage computes, in every granularity.
#[test]
fn weights_are_quantized_on_the_host_as_in_the_graph() {
    let formats = formats_of_weights().into_iter();
    let cases = formats.flat_map(|format| [DType::F32, DType::BF16].map(|dtype| (dtype, format)));
    for (dtype, format) in cases {
        let policy = of_weights(format);
        let staged = crate::graph::stage(&lowered_linear(&policy, dtype), &[]).unwrap();
        let kept = evaluate(&staged.load[0], &[weight()]).unwrap();
        let cast = crate::weights::cast(weight(), dtype).unwrap();
        let found = quantize_weight(&cast, format).unwrap();
        let what = format!("{dtype} {format:?}");
        let of_shape = |shape: &Shape| {
            let mut kept = kept
                .iter()
                .filter(|tensor| tensor.shape.dtype == shape.dtype);
            let tensor = kept.find(|tensor| tensor.shape.count() == shape.count());
            tensor.unwrap_or_else(|| panic!("{what}: no {shape}"))
        };
        assert_eq!(found.values.shape, Shape::new(format.element, [6, 16]));
        assert_eq!(
            found.values.data,
            of_shape(&found.values.shape).data,
            "{what}"
        );
        assert_eq!(
            found.scale.data,
            of_shape(&found.scale.shape).data,
            "{what}"
        );
        if let Some(zero_point) = &found.zero_point {
            assert_eq!(zero_point.data, of_shape(&zero_point.shape).data, "{what}");
        }
        assert_eq!(kept.len(), 2 + usize::from(format.zero_point), "{what}");
        let scales = found.scale.to_f64_vec().unwrap();
        let lowest = scales.iter().copied().fold(f64::MAX, f64::min);
        let highest = scales.iter().copied().fold(0.0, f64::max);
        assert_eq!(found.scale_range.map(f64::from), [lowest, highest]);
    }
}

/// Rows whose integers differ between conventions, computed by hand: with half a step above the highest integer their scale is 1.
#[test]
fn conventions_round_as_their_formulas_say() {
    let rows = [
        (DType::S8, [-127.5, 127.5, 63.5, 1.5, 126.6, 0.0]),
        (DType::S4, [-7.5, 7.5, 3.5, 1.5, 5.6, 0.0]),
    ];
    let cases: [(NumericsConvention, [[i32; 6]; 2]); 4] = [
        (
            NumericsConvention::Aqt,
            [[-127, 127, 64, 2, 127, 0], [-7, 7, 4, 2, 6, 0]],
        ),
        (
            NumericsConvention::Qwix,
            [[-128, 127, 64, 2, 127, 0], [-8, 7, 4, 2, 6, 0]],
        ),
        (
            NumericsConvention::Quark,
            [[-128, 127, 64, 2, 127, 0], [-8, 7, 4, 2, 6, 0]],
        ),
        // 63.5 / (127.5 / 127) is 63.25, 3.5 / (7.5 / 7) is 3.27.
        (
            NumericsConvention::Narrow,
            [[-127, 127, 63, 1, 126, 0], [-7, 7, 3, 1, 5, 0]],
        ),
    ];
    for (convention, expected) in cases {
        for ((element, row), expected) in rows.into_iter().zip(expected) {
            let format = TensorFormat {
                element,
                ..TensorFormat::int8(convention)
            };
            let weight = HostTensor::from_f32([1, 6], &row).unwrap();
            let found = quantize_weight(&weight, format).unwrap();
            let found = found.values.to_f64_vec().unwrap();
            assert_eq!(found, expected.map(f64::from), "{element} {convention}");
        }
    }
}

/// Numbers are divided by the scale, ties go to the even integer, and both ends are the highest integer.
#[test]
fn narrow_integers_are_quotients() {
    let int8 = TensorFormat::int8(NumericsConvention::Narrow);
    let int4 = TensorFormat {
        element: DType::S4,
        ..int8
    };
    assert_eq!((int8.bound(), int8.ends()), (127.0, [-127.0, 127.0]));
    assert_eq!((int4.bound(), int4.ends()), (7.0, [-7.0, 7.0]));
    let integers = |weight: &QuantizedWeight| weight.values.to_f64_vec().unwrap();
    // The scale is 7: 45.5 / 7 is 6.5, where its product with the reciprocal of 7 in f32 would be 6.5000005.
    for (format, row, expected) in [
        (
            int8,
            [889.0_f32, -889.0, 45.5, -45.5, 87.5, 10.5],
            [127.0_f64, -127.0, 6.0, -6.0, 12.0, 2.0],
        ),
        (
            int4,
            [49.0, -49.0, 45.5, -45.5, 31.5, 10.5],
            [7.0, -7.0, 6.0, -6.0, 4.0, 2.0],
        ),
    ] {
        // Beside it a row of zeros.
        let rows = [row, [0.0; 6]].concat();
        let weight = HostTensor::from_f32([2, 6], &rows).unwrap();
        let found = quantize_weight(&weight, format).unwrap();
        assert_eq!(integers(&found), [expected, [0.0; 6]].concat());
        assert_eq!(found.scale.to_f32_vec().unwrap(), [7.0, 1.0]);
    }
    let weight = HostTensor::from_f32([1, 6], &[889.0, -889.0, 45.5, -45.5, 87.5, 10.5]).unwrap();
    let given = WeightRounding {
        observer: Observer::default(),
        algorithm: RoundingAlgorithm::Given(&[0.5]),
    };
    let found = given.quantize(&weight, int8).unwrap();
    assert_eq!(integers(&found), [127.0, -127.0, 91.0, -91.0, 127.0, 21.0]);
    // In bf16 the scale is rounded to it, the quotients are not: 126.5 / 1.0078125 is 125.52.
    let weight = HostTensor::from_f32([1, 6], &[-127.5, 127.5, 63.5, 1.5, 126.5, 0.0]).unwrap();
    let weight = crate::weights::cast(weight, DType::BF16).unwrap();
    let found = quantize_weight(&weight, int8).unwrap();
    assert_eq!(found.scale.to_f32_vec().unwrap(), [1.0078125]);
    assert_eq!(integers(&found), [-127.0, 127.0, 63.0, 1.0, 126.0, 0.0]);
}

/// The same of an activation, whose scale is found while the program runs.
#[test]
fn narrow_activations_are_quotients() {
    let b = Builder::new();
    let x = b.input("x", f32s(&[1, 1, 4]), &[]).unwrap();
    let y = linear(&b.root("unet").scope("to_q"), x, 4, 1);
    annotate(&b, &of_narrow_int8()).unwrap();
    b.output("y", y, None).unwrap();
    let graph = lower(&b.finish()).unwrap();
    // 127, 6, -6 and 12 times 7; 127, 64, 0 and 2 times 1.
    let inputs = [
        HostTensor::from_f32([1, 1, 4], &[889.0, 45.5, -45.5, 87.5]).unwrap(),
        HostTensor::from_f32([1, 4], &[127.0, 63.5, -0.5, 2.5]).unwrap(),
    ];
    let found = evaluate(&graph, &inputs).unwrap().remove(0);
    let expected: i32 = 7 * (127 * 127 + 6 * 64 + 12 * 2);
    assert_eq!(found.to_f64_vec().unwrap(), [f64::from(expected)]);
}

#[test]
fn the_error_of_a_weight_is_measured() {
    let weight = HostTensor::from_f32([2, 3], &[1.0, 0.5, -0.25, 0.0, 0.0, 0.0]).unwrap();
    let quantized = quantize_weight(&weight, TensorFormat::int8(NumericsConvention::Aqt)).unwrap();
    let integers: Vec<i8> = quantized.values.data.iter().map(|b| *b as i8).collect();
    // 127.5, 63.75 and -31.875 are clipped to 127 and rounded.
    assert_eq!(integers, [127, 64, -32, 0, 0, 0]);
    assert_eq!(quantized.signal, 1.3125);
    let expected = (0.5f64.powi(2) + 0.25f64.powi(2) + 0.125f64.powi(2)) / 127.5f64.powi(2);
    assert!(
        (quantized.noise / expected - 1.0).abs() < 1e-4,
        "{}",
        quantized.noise
    );
    let db = 10.0 * (1.3125 / expected).log10();
    assert!((quantized.sqnr_db() - db).abs() < 1e-3);
    let zeros = HostTensor::zeros(f32s(&[2, 3]));
    let zeros = quantize_weight(&zeros, TensorFormat::int8(NumericsConvention::Aqt)).unwrap();
    assert_eq!(zeros.sqnr_db(), f64::INFINITY);
}

/// Many elements are split over threads; each of them has the scale of its row, or the one of all.
#[test]
fn large_weights_are_quantized_in_parts() {
    let (rows, columns) = (5, 50_001);
    let values: Vec<f32> = (0..rows * columns)
        .map(|i| ((i * 7919) % 10_007) as f32 - 5000.0)
        .collect();
    let weight = HostTensor::from_f32([rows, columns], &values).unwrap();
    for granularity in [Granularity::Tensor, Granularity::Channel] {
        let format = TensorFormat {
            granularity,
            ..TensorFormat::int8(NumericsConvention::Aqt)
        };
        let found = quantize_weight(&weight, format).unwrap();
        let scales = found.scale.to_f32_vec().unwrap();
        for (i, (value, integer)) in values.iter().zip(&found.values.data).enumerate() {
            let scale = scales[(i / columns).min(scales.len() - 1)];
            let expected = (value * scale.recip())
                .clamp(-127.0, 127.0)
                .round_ties_even();
            assert_eq!(f32::from(*integer as i8), expected, "{i}");
        }
    }
}

#[test]
fn weights_without_the_format_are_refused() {
    let int8 = TensorFormat::int8(NumericsConvention::Aqt);
    let group = TensorFormat {
        granularity: Granularity::Group(5),
        ..int8
    };
    let error =
        |weight: &HostTensor, format| quantize_weight(weight, format).unwrap_err().to_string();
    assert_eq!(
        error(&weight(), group),
        "its 16 input features are not a multiple of the group size 5; nearest: 4 and 8"
    );
    let infinite = HostTensor::from_f32([1, 2], &[1.0, f32::INFINITY]).unwrap();
    assert!(error(&infinite, int8).contains("too large for f32"));
    assert!(
        error(&HostTensor::zeros(Shape::scalar(DType::F32)), int8).contains("no output features")
    );
    let narrow = TensorFormat::int8(NumericsConvention::Narrow);
    for unknown in [
        TensorFormat {
            element: DType::U8,
            ..int8
        },
        TensorFormat {
            zero_point: true,
            ..int8
        },
        TensorFormat {
            zero_point: true,
            ..narrow
        },
        TensorFormat {
            element: DType::F8E4M3Fn,
            ..narrow
        },
    ] {
        assert!(error(&weight(), unknown).contains("not quantized here"));
    }
}

/// A weight that its checkpoint stores in int8 is an input with its scale: nothing is computed while it is loaded.
#[test]
fn stored_weights_are_inputs_with_their_scales() {
    let formats = formats_of_weights().into_iter();
    let cases = formats.flat_map(|format| [DType::F32, DType::BF16].map(|dtype| (dtype, format)));
    for (dtype, format) in cases {
        let policy = of_weights(format);
        let x = HostTensor::from_f32([1, 4, 16], &wave(64, 0.7)).unwrap();
        let x = crate::weights::cast(x, dtype).unwrap();
        let graph = lowered_linear(&policy, dtype);
        let expected = evaluate(&graph, &[x.clone(), weight()]).unwrap();

        let weight_format = TensorFormat {
            range: Range::Stored(dtype),
            ..format
        };
        let layer = StoredLayer {
            weight: weight_format,
            activation: None,
            low_rank: None,
            smoothed: false,
        };
        let policy = Policy::stored("unet/", [("to_q".to_string(), layer)].into());
        let graph = lowered_linear(&policy, dtype);
        let cast = crate::weights::cast(weight(), dtype).unwrap();
        let quantized = quantize_weight(&cast, format).unwrap();
        let mut tensors = vec![x, quantized.values, quantized.scale];
        tensors.extend(quantized.zero_point);
        let inputs = graph.inputs.iter().map(|i| (i.name.as_str(), &i.shape));
        let names = ["", "", "_scale", "_zero_point"].map(|end| format!("unet/to_q.weight{end}"));
        let shapes = tensors.iter().map(|tensor| &tensor.shape);
        let expected_inputs = names.iter().map(String::as_str).zip(shapes).skip(1);
        assert!(inputs.skip(1).eq(expected_inputs), "{dtype} {format:?}");
        let found = evaluate(&graph, &tensors).unwrap();
        assert_eq!(found, expected, "{dtype} {format:?}");

        let staged = crate::graph::stage(&graph, &[]).unwrap();
        assert!(staged.load.is_empty());
        let types = |graph: &crate::graph::Graph| -> Vec<DType> {
            graph.inputs.iter().map(|i| i.shape.dtype).collect()
        };
        assert_eq!(types(&staged.step), types(&graph));
    }
}

#[test]
fn stored_layers_that_do_not_fit_the_model_are_refused() {
    let stored = TensorFormat {
        range: Range::Stored(DType::F32),
        ..TensorFormat::int8(NumericsConvention::Aqt)
    };
    let annotated = |paths: &[&str]| {
        let b = Builder::new();
        let x = b.input("x", f32s(&[1, 4, 16]), &[]).unwrap();
        let y = linear(&b.root("unet").scope("to_q"), x, 16, 6);
        let layer = StoredLayer {
            weight: stored,
            activation: None,
            low_rank: None,
            smoothed: false,
        };
        let layers = paths.iter().map(|path| ((*path).to_string(), layer));
        let policy = Policy::stored("unet/", layers.collect());
        let decisions = annotate(&b, &policy);
        b.output("y", y, None).unwrap();
        (decisions, b)
    };
    let (decisions, _) = annotated(&["to_q", "to_k", "to_v"]);
    assert_eq!(
        decisions.unwrap_err().to_string(),
        "the checkpoint says that 2 layers of unet are quantized, which has no such layers: to_k, to_v"
    );
    // The weight has a second use, in float.
    let (decisions, b) = annotated(&["to_q"]);
    decisions.unwrap();
    let at = b.root("unet").scope("to_q");
    let again = at.param("weight", f32s(&[6, 16]), Init::Ones, &[]).unwrap();
    b.output("again", at.neg(again).unwrap(), None).unwrap();
    assert_eq!(
        lower(&b.finish()).unwrap_err().to_string(),
        "unet/to_q: a weight that is stored quantized is used outside of its layer"
    );
}
