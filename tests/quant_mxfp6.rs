//! Weights in OCP's MXFP6 against what ml_dtypes rounds: codes, scales and numbers are equal bit for bit.

use crate::common::Golden;
use maxdiff::dtype::DType;
use maxdiff::graph::{Granularity, NumericsConvention, TensorFormat};
use maxdiff::host_tensor::float8;
use maxdiff::quant::quantize_weight;
use maxdiff::shape::Shape;

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
