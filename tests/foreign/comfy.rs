//! ComfyUI's scaled files.

use std::collections::BTreeMap;
use std::path::Path;

use maxdiff::dtype::DType;
use maxdiff::host_tensor::{HostTensor, float8};
use maxdiff::shape::Shape;
use maxdiff::weights::{Checkpoint, TensorView, WeightsError, save};

use super::check_products;

const OUTPUTS: usize = 6;
const INPUTS: usize = 64;

type Tensors = Vec<(&'static str, HostTensor)>;

/// Codes that are no NaN.
fn codes(dtype: DType) -> HostTensor {
    let code = |i: usize| ((i * 7919 + 13) % 251) as u8;
    let code = |i| match (dtype, code(i)) {
        (DType::F8E4M3Fn, code) if code & 0x7f == 0x7f => 0,
        (DType::F8E5M2, code) if code & 0x7c == 0x7c => 0,
        (_, code) => code,
    };
    let data = (0..OUTPUTS * INPUTS).map(code).collect();
    HostTensor::new(Shape::new(dtype, [OUTPUTS, INPUTS]), data).unwrap()
}

fn number(dtype: DType, code: u8) -> f32 {
    match dtype {
        DType::F8E4M3Fn => float8::decode(code),
        DType::F8E5M2 => float8::decode_e5m2(code),
        _ => f32::from(code as i8),
    }
}

fn text(text: &str) -> HostTensor {
    HostTensor::new(
        Shape::new(DType::U8, [text.len()]),
        text.as_bytes().to_vec(),
    )
    .unwrap()
}

fn scale(dims: &[usize]) -> HostTensor {
    let values: Vec<f32> = (0..dims.iter().product())
        .map(|i| 0.013 + i as f32 / 7.0)
        .collect();
    HostTensor::from_f32(dims, &values).unwrap()
}

fn open(path: &Path, tensors: &Tensors, metadata: &str) -> Result<Checkpoint, WeightsError> {
    let views = tensors.iter().map(|(name, tensor)| TensorView {
        name,
        dtype: tensor.shape.dtype,
        dims: &tensor.shape.dims,
        data: &tensor.data,
    });
    let metadata = match metadata {
        "" => BTreeMap::new(),
        text => BTreeMap::from([("_quantization_metadata".to_owned(), text.to_owned())]),
    };
    save(path, views, &metadata).unwrap();
    Checkpoint::open(path)
}

fn older() -> Tensors {
    let mark = HostTensor::zeros(Shape::new(DType::F8E4M3Fn, [0]));
    vec![
        ("scaled_fp8", mark),
        ("one.weight", codes(DType::F8E4M3Fn)),
        ("one.scale_weight", scale(&[])),
        ("one.scale_input", scale(&[])),
        ("one.bias", scale(&[OUTPUTS])),
        ("two.weight", codes(DType::F8E4M3Fn)),
        ("two.scale_weight", scale(&[1])),
    ]
}

fn newer() -> Tensors {
    vec![
        ("one.weight", codes(DType::F8E5M2)),
        ("one.weight_scale", scale(&[])),
        ("one.comfy_quant", text(r#"{"format": "float8_e5m2"}"#)),
        ("two.weight", codes(DType::S8)),
        ("two.weight_scale", scale(&[OUTPUTS, 1])),
        ("two.input_scale", scale(&[])),
        (
            "two.comfy_quant",
            text(r#"{"format": "int8_tensorwise", "convrot": false}"#),
        ),
        ("three.weight", codes(DType::F8E4M3Fn)),
        ("three.weight_scale", scale(&[])),
    ]
}

const THREE: &str =
    r#"{"format_version": "1.0", "layers": {"three": {"format": "float8_e4m3fn"}}}"#;

#[test]
fn weights_are_codes_times_scales() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    for (tensors, metadata, layers) in [
        (older(), "", &["one", "two"][..]),
        (newer(), THREE, &["one", "three", "two"]),
    ] {
        let file = open(&path, &tensors, metadata).unwrap();
        let of = |name: &str| &tensors.iter().find(|(n, _)| *n == name).unwrap().1;
        let weights = file.names().filter(|n| n.ends_with(".weight"));
        assert_eq!(weights.count(), layers.len());
        assert!(
            file.names()
                .all(|n| n.ends_with(".weight") || n == "one.bias")
        );
        for layer in layers {
            let name = format!("{layer}.weight");
            let found = file.read_as(&name, DType::F32).unwrap();
            let stored = of(&name);
            let scale = ["scale_weight", "weight_scale"].map(|end| format!("{layer}.{end}"));
            let scale = scale
                .iter()
                .find(|n| tensors.iter().any(|(t, _)| t == n))
                .unwrap();
            let scales = of(scale).to_f32_vec().unwrap();
            let dtype = stored.shape.dtype;
            let value = |(i, code): (usize, &u8)| {
                let scale = scales[i / INPUTS % scales.len()];
                number(dtype, *code) * scale
            };
            let expected: Vec<f32> = stored.data.iter().enumerate().map(value).collect();
            assert_eq!(found.to_f32_vec().unwrap(), expected, "{layer}");
        }
        check_products(&path, layers);
    }
}

/// Floats of 8 bits without scales stand for themselves, and stay so.
#[test]
fn plain_fp8_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let tensors = vec![("one.weight", codes(DType::F8E4M3Fn))];
    let file = open(&path, &tensors, "").unwrap();
    let found = file.read_as("one.weight", DType::BF16).unwrap();
    let expected: Vec<f32> = tensors[0]
        .1
        .data
        .iter()
        .map(|c| float8::decode(*c))
        .collect();
    assert_eq!(found.to_f32_vec().unwrap(), expected);
    check_products(&path, &["one"]);
}

#[test]
fn files_that_are_not_whole_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let without = |tensors: Tensors, name: &str| -> Tensors {
        tensors.into_iter().filter(|(n, _)| *n != name).collect()
    };
    let with = |tensors: Tensors, name: &'static str, tensor: HostTensor| {
        let mut tensors = without(tensors, name);
        tensors.push((name, tensor));
        tensors
    };
    for (tensors, metadata, expected) in [
        (
            without(older(), "two.scale_weight"),
            "",
            "1 weights in fp8 have no scale (.scale_weight), although the file says that they are scaled: two.weight",
        ),
        (without(older(), "two.weight"), "", "two.weight is missing"),
        (
            with(older(), "two.scale_weight", scale(&[5])),
            "",
            "two.weight: its 384 elements take 6 scales, one for 64; found 5",
        ),
        (
            with(older(), "two.weight", scale(&[OUTPUTS, INPUTS])),
            "",
            "two.weight: it is f32[6,64], and two.scale_weight is there; expected fp8 or s8",
        ),
        (
            without(newer(), "two.weight_scale"),
            THREE,
            "two.weight_scale is missing",
        ),
        (
            with(newer(), "two.weight", codes(DType::F8E4M3Fn)),
            THREE,
            "two.weight: it is f8e4m3fn[6,64], and two.weight_scale is there; expected s8",
        ),
        (
            with(newer(), "two.comfy_quant", text(r#"{"format": "nvfp4"}"#)),
            THREE,
            "two is stored in ComfyUI's nvfp4, which is not read here; read are float8_e4m3fn, float8_e5m2, int8_tensorwise",
        ),
        (
            with(
                newer(),
                "two.comfy_quant",
                text(r#"{"format": "int8_tensorwise", "convrot": true}"#),
            ),
            THREE,
            "ComfyUI's int8_tensorwise with rotation",
        ),
        (
            newer(),
            "[]",
            "_quantization_metadata: no description of layers",
        ),
        (
            with(newer(), "two.comfy_quant", text("{")),
            "",
            "two.comfy_quant: no description of a layer",
        ),
    ] {
        let error = open(&path, &tensors, metadata).unwrap_err().to_string();
        assert!(error.contains(expected), "{expected}: {error}");
    }
}
