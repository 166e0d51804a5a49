//! Weights in OCP's MXFP6 against what ml_dtypes rounds: codes, scales and numbers are equal bit for bit. Products with stored
//! weights in MXFP6 and MXFP8.

use crate::common::{Golden, cpu_session, run_on};
use maxdiff::dtype::DType;
use maxdiff::graph::{
    Builder, Granularity, Graph, Init, NumericsConvention, TensorFormat, evaluate,
};
use maxdiff::host_tensor::{HostTensor, float8};
use maxdiff::nn::{Conv2d, Linear, Precision, conv2d, linear};
use maxdiff::quant::{Policy, StoredLayer, annotate, lower, quantize_weight};
use maxdiff::shape::Shape;
use maxdiff::weights::cast;

#[test]
fn weights_are_rounded_to_six_bits_as_recorded() {
    let golden = Golden::read("quant_mxfp6.safetensors");
    let shape = Shape::new(DType::F32, [8, 96]);
    let weight = golden.tensor("in/weight", &shape);
    for (case, convention, bits) in [
        ("mxfp6_e2m3", NumericsConvention::MxE2M3, 6),
        ("mxfp6_e3m2", NumericsConvention::MxE3M2, 6),
    ] {
        let format = TensorFormat {
            element: DType::F8E4M3Fn,
            granularity: Granularity::Group(32),
            ..TensorFormat::int8(convention)
        };
        assert_eq!(format.bits_in_files(), bits);
        let found = quantize_weight(&weight, format).unwrap();
        let recorded = |what: &str| golden.values(&format!("out/{case}/{what}"));
        let float6 = format.float6().unwrap();
        let codes = found.values.data.iter();
        let codes: Vec<f64> = codes
            .map(|code| f64::from(float6.encode(float8::decode(*code))))
            .collect();
        assert_eq!(codes, recorded("codes"), "{case}");
        assert_eq!(found.scale.shape, Shape::new(DType::F8E8M0Fnu, [8, 3]));
        let scales: Vec<f64> = found
            .scale
            .data
            .iter()
            .map(|code| f64::from(*code))
            .collect();
        assert_eq!(scales, recorded("scale"), "{case}");
        let numbers: Vec<f64> = found
            .dequantized()
            .unwrap()
            .into_iter()
            .map(f64::from)
            .collect();
        assert_eq!(numbers, recorded("weight"), "{case}");
    }
}

/// The activations and the weight of a layer.
struct Layer {
    x: &'static [usize],
    weight: &'static [usize],
}

const LAYERS: [Layer; 2] = [
    Layer {
        x: &[5, 96],
        weight: &[24, 96],
    },
    Layer {
        x: &[2, 4, 3, 64],
        weight: &[16, 64, 3, 3],
    },
];

/// The program of a layer whose weight is stored in `format`; without one, in float.
fn program(layer: &Layer, dtype: DType, format: Option<TensorFormat>) -> Graph {
    let b = Builder::new();
    let x = Shape::new(dtype, layer.x);
    let x = b.input("x", x, &[]).unwrap();
    let at = b.root("m").scope("layer");
    let precision = Precision {
        weights: DType::F32,
        activations: dtype,
    };
    let y = match *layer.weight {
        [out, _] => {
            let linear_layer = Linear::new(out, "embed", "heads").without_bias();
            linear(&at, x, linear_layer, precision)
        }
        _ => {
            let conv = Conv2d::same(layer.weight[0], layer.weight[2]).without_bias();
            conv2d(&at, x, conv, precision)
        }
    };
    b.output("y", y.unwrap(), None).unwrap();
    if let Some(weight) = format {
        let stored = StoredLayer {
            weight,
            activation: None,
            low_rank: None,
            smoothed: false,
        };
        let policy = Policy::stored("m/", [("layer".to_owned(), stored)].into());
        annotate(&b, &policy).unwrap();
    }
    lower(&b.finish()).unwrap().inline_composites(&|_, _| true)
}

/// A product with a weight that is stored in codes is that of the program in float with what the codes stand for: on the host bit
/// for bit, on the device as far as sums have another order.
#[test]
fn products_with_microscaled_weights_are_those_of_what_codes_stand_for() {
    let session = cpu_session(1);
    let conventions = [
        NumericsConvention::MxE2M3,
        NumericsConvention::MxE3M2,
        NumericsConvention::Mx,
    ];
    for convention in conventions {
        let format = TensorFormat {
            element: DType::F8E4M3Fn,
            granularity: Granularity::Group(32),
            ..TensorFormat::int8(convention)
        };
        let format = format.stored(DType::F32);
        for layer in &LAYERS {
            let random = |seed, dims: &[usize]| {
                let values = Init::Normal { std: 1.0 }.sample(seed, "x", dims.iter().product());
                HostTensor::from_f32(dims.to_vec(), &values).unwrap()
            };
            let quantized = quantize_weight(&random(2, layer.weight), format).unwrap();
            // Every device has bf16, which holds the powers of two.
            let scale = quantized.scale.shape.with_dtype(DType::BF16);
            let scale = HostTensor::from_f64(scale, &quantized.scale.to_f64_vec().unwrap());
            let scale = scale.unwrap();
            let float = quantized.dequantized().unwrap();
            let float = HostTensor::from_f32(layer.weight.to_vec(), &float).unwrap();
            for (dtype, most) in [(DType::F32, 1e-6), (DType::BF16, 2f64.powi(-8))] {
                let what = format!("{convention} {dtype} {:?}", layer.weight);
                let x = cast(random(1, layer.x), dtype).unwrap();
                let of = |name: &str, weight: &HostTensor| match name {
                    "x" => x.clone(),
                    "m/layer.weight" => weight.clone(),
                    "m/layer.weight_scale" => scale.clone(),
                    other => panic!("{other}"),
                };
                let inputs = |graph: &Graph, weight: &HostTensor| -> Vec<HostTensor> {
                    let inputs = graph.inputs.iter();
                    inputs.map(|input| of(&input.name, weight)).collect()
                };
                let [stored, in_float] =
                    [Some(format), None].map(|format| program(layer, dtype, format));
                assert_eq!([stored.inputs.len(), in_float.inputs.len()], [3, 2]);
                let codes = inputs(&stored, &quantized.values);
                let float = inputs(&in_float, &float);
                let expected = evaluate(&in_float, &float).unwrap();
                assert_eq!(evaluate(&stored, &codes).unwrap(), expected, "{what}");

                let [found, expected] = [(&stored, &codes), (&in_float, &float)]
                    .map(|(graph, inputs)| run_on(&session, graph, inputs)[0].to_f64_vec());
                let (found, expected) = (found.unwrap(), expected.unwrap());
                let largest = expected.iter().fold(0f64, |m, y| m.max(y.abs()));
                for (found, expected) in found.iter().zip(&expected) {
                    let error = (found - expected).abs() / largest;
                    assert!(error <= most, "{what}: {error}");
                }
            }
        }
    }
}
