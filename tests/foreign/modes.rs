//! The modes of `quantize` whose formats are those of other libraries.

use crate::quantize::{model, quantized, refused};
use maxdiff::dtype::DType;
use maxdiff::models::Part;
use maxdiff::quant::quantize_weight;
use maxdiff::weights::source::ModelSource;

#[test]
fn what_is_written_is_what_the_host_quantizes() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path());
    let floats = ModelSource::open(&source).unwrap();
    let floats = &floats.component(Part::Unet).unwrap().checkpoint;
    let gguf = "quantization_numerics=gguf";
    use DType::{F8E4M3Fn, F8E8M0Fnu, F16, F32, S4, S8, U4};
    for (name, words, types) in [
        ("nf4", &["quantization=nf4"][..], [U4, F32]),
        ("mxfp4", &["quantization=mxfp4"], [U4, F8E8M0Fnu]),
        (
            "mxfp6_e2m3",
            &["quantization=mxfp6_e2m3"],
            [F8E4M3Fn, F8E8M0Fnu],
        ),
        (
            "mxfp6_e3m2",
            &["quantization=mxfp6_e3m2"],
            [F8E4M3Fn, F8E8M0Fnu],
        ),
        ("mxfp8", &["quantization=mxfp8"], [F8E4M3Fn, F8E8M0Fnu]),
        ("nvfp4", &["quantization=nvfp4"], [U4, F8E4M3Fn]),
        ("q8_0", &["quantization=int8_w8a16", gguf], [S8, F16]),
        ("q4_0", &["quantization=w4a16", gguf], [S4, F16]),
    ] {
        let output = dir.path().join(name);
        let words = [words, &["quantization_granularity=4"]].concat();
        let report = quantized(&source, &output, &words);
        assert!(!report["tensors"].as_array().unwrap().is_empty());
        let mut written = ModelSource::open(&output).unwrap();
        let unet = &written.component(Part::Unet).unwrap().checkpoint;
        let layers = unet.quantization().unwrap().layers.clone();
        for (layer, stored) in &layers {
            let name = format!("{layer}.weight");
            let weight = floats.read_as(&name, DType::F32).unwrap();
            let found = quantize_weight(&weight, stored.weight).unwrap();
            assert_eq!(found.values, unet.read(&name).unwrap(), "{name}");
            assert_eq!(
                found.scale,
                unet.read(&format!("{name}_scale")).unwrap(),
                "{name}"
            );
            let found = [&found.values, &found.scale].map(|tensor| tensor.shape.dtype);
            assert_eq!(found, types, "{name}");
        }
        assert_eq!(written.widen_denoiser(), layers.len());
    }
}

#[test]
fn numerics_that_belong_to_other_modes_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path());
    let output = dir.path().join("out");
    for (words, expected) in [
        (
            &["quantization=nf4", "quantization_numerics=quark"][..],
            "mode nf4 has numerics of its own: leave quark out",
        ),
        (
            &["quantization=mxfp4", "quantization_numerics=narrow"],
            "mode mxfp4 has numerics of its own: leave narrow out",
        ),
        (
            &["quantization=nf4", "quantization_granularity=channel"],
            "bitsandbytes's numerics belong to its own mode, symmetric and with groups of input features",
        ),
        (
            &["quantization=w4a16", "quantization_numerics=mx"],
            "OCP's numerics belong to its own mode",
        ),
        (
            &["quantization=int8_w8a16", "quantization_numerics=gguf"],
            "llama.cpp's blocks are here in int8_w8a16 (q8_0) and w4a16 (q4_0, without symmetric q4_1)",
        ),
        (
            &["quantization=int8", "quantization_numerics=nf4"],
            "bitsandbytes's numerics are here for weights alone",
        ),
    ] {
        let found = crate::quantize::quantize(&source, &output, words);
        refused(&found, 2, expected);
        assert!(!output.exists());
    }
}
