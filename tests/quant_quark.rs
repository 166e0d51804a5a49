//! Weights in AMD Quark's formats against what amd-quark 0.13 computed: scales, zero points and what is left of weights
//! are equal bit for bit.

use crate::common::Golden;
use maxdiff::dtype::DType;
use maxdiff::graph::{Granularity, NumericsConvention, TensorFormat};
use maxdiff::host_tensor::HostTensor;
use maxdiff::quant::quantize_weight;
use maxdiff::shape::Shape;
use maxdiff::weights::cast;

/// The format of a recorded case.
fn format(case: &str, group: usize) -> TensorFormat {
    let mut words = case.split('_');
    let element = match words.next() {
        Some("int8") => DType::S8,
        Some("int4") => DType::S4,
        Some("fp8") => DType::F8E4M3Fn,
        other => panic!("{other:?}"),
    };
    let granularity = match words.next() {
        Some("tensor") => Granularity::Tensor,
        Some("channel") => Granularity::Channel,
        Some("group") => Granularity::Group(group),
        other => panic!("{other:?}"),
    };
    TensorFormat {
        element,
        granularity,
        zero_point: match words.next() {
            None => false,
            Some("asymmetric") => true,
            other => panic!("{other:?}"),
        },
        ..TensorFormat::int8(NumericsConvention::Quark)
    }
}

#[test]
fn weights_are_quantized_as_quark_does() {
    let golden = Golden::read("quant_quark.safetensors");
    let cases = golden.meta["cases"].as_array().unwrap();
    let group = golden.meta["group"].as_u64().unwrap() as usize;
    assert_eq!(cases.len(), 8);
    for (name, dtype) in [("f32", DType::F32), ("bf16", DType::BF16)] {
        let shape = Shape::new(DType::F32, [12, 128]);
        let weight = golden.tensor(&format!("in/{name}/weight"), &shape);
        let weight = cast(weight, dtype).unwrap();
        for case in cases {
            let case = case.as_str().unwrap();
            let found = quantize_weight(&weight, format(case, group)).unwrap();
            let expected = |key: &str, shape: &Shape| {
                let tensor = golden.tensor(&format!("out/{case}_{name}/{key}"), shape);
                tensor.to_f64_vec().unwrap()
            };
            let what = format!("{case} {name}");
            let scale_shape = found.scale.shape.with_dtype(DType::F32);
            let scales = found.scale.to_f64_vec().unwrap();
            assert_eq!(scales, expected("scale", &scale_shape), "{what}");
            let zero_points = match &found.zero_point {
                None => vec![0.0; scales.len()],
                Some(zero_point) => {
                    let found = zero_point.to_f64_vec().unwrap();
                    assert_eq!(found, expected("zero_point", &zero_point.shape), "{what}");
                    found
                }
            };
            let run = 12 * 128 / scales.len();
            let steps = found.values.to_f64_vec().unwrap();
            let values = steps
                .iter()
                .enumerate()
                .map(|(i, step)| ((step - zero_points[i / run]) * scales[i / run]) as f32);
            let left = HostTensor::from_f32([12, 128], &values.collect::<Vec<_>>()).unwrap();
            let left = cast(left, dtype).unwrap().to_f64_vec().unwrap();
            assert_eq!(left, expected("weight", &shape), "{what}");
        }
    }
}
