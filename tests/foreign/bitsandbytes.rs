//! bitsandbytes, against the library (`scripts/oracles/bitsandbytes_files.py`).

use std::collections::BTreeMap;
use std::path::Path;

use crate::common::{Golden, distance, golden};
use maxdiff::dtype::DType;
use maxdiff::graph::{Granularity, NumericsConvention, TensorFormat};
use maxdiff::host_tensor::HostTensor;
use maxdiff::quant::quantize_weight;
use maxdiff::weights::{Checkpoint, TensorView, save};

use super::check_products;

const WEIGHTS: &str = "bitsandbytes/weights.safetensors";

#[test]
fn weights_are_the_floats_of_bitsandbytes() {
    let expected = Golden::read("bitsandbytes/floats.safetensors");
    let file = Checkpoint::open(&golden(WEIGHTS)).unwrap();
    let names: Vec<&str> = file.names().collect();
    assert_eq!(
        names,
        ["fp4.weight", "int8.weight", "nested.weight", "nf4.weight"]
    );
    for layer in ["fp4", "int8", "nested", "nf4"] {
        let found = file
            .read_as(&format!("{layer}.weight"), DType::F32)
            .unwrap();
        assert_eq!(found.shape.dims, [20, 128]);
        assert_eq!(
            found,
            expected.tensor(&format!("out/{layer}"), &found.shape),
            "{layer}"
        );
    }
}

#[test]
fn programs_multiply_the_codes() {
    // FP4's numbers are those of a table of its own.
    check_products(&golden(WEIGHTS), &["int8", "nested", "nf4"]);
}

#[test]
fn weights_become_the_codes_of_bitsandbytes() {
    let recorded = Golden::read("bitsandbytes/floats.safetensors");
    let mut file = Checkpoint::open(&golden(WEIGHTS)).unwrap();
    file.pack();
    let values: Vec<f32> = recorded
        .values("in/weight")
        .iter()
        .map(|x| *x as f32)
        .collect();
    let weight = HostTensor::from_f32([20, 128], &values).unwrap();
    let format = TensorFormat {
        element: DType::U4,
        granularity: Granularity::Group(64),
        ..TensorFormat::int8(NumericsConvention::Nf4)
    };
    let found = quantize_weight(&weight, format).unwrap();
    assert_eq!(found.values, file.read("nf4.weight").unwrap());
    assert_eq!(found.scale, file.read("nf4.weight_scale").unwrap());
    let stood_for = recorded.values("out/nf4");
    let expected = -20.0 * distance(stood_for, recorded.values("in/weight")).log10();
    assert!(
        (found.sqnr_db() - expected).abs() < 0.01,
        "{}",
        found.sqnr_db()
    );
}

/// Writes the recorded tensors, changed by `change`; the error of opening them.
fn error(path: &Path, change: impl FnOnce(&mut BTreeMap<String, HostTensor>)) -> String {
    let bytes = std::fs::read(golden(WEIGHTS)).unwrap();
    let recorded = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |name: &str, view: safetensors::tensor::TensorView<'_>| {
        let dtype = match view.dtype() {
            safetensors::Dtype::U8 => DType::U8,
            safetensors::Dtype::I8 => DType::S8,
            safetensors::Dtype::F32 => DType::F32,
            other => panic!("{other:?}"),
        };
        let shape = maxdiff::shape::Shape::new(dtype, view.shape());
        (
            name.to_owned(),
            HostTensor::new(shape, view.data().to_vec()).unwrap(),
        )
    };
    let mut tensors = recorded
        .iter()
        .map(|(name, view)| tensor(name, view))
        .collect();
    change(&mut tensors);
    let views = tensors.iter().map(|(name, tensor)| TensorView {
        name,
        dtype: tensor.shape.dtype,
        dims: &tensor.shape.dims,
        data: &tensor.data,
    });
    save(path, views, &BTreeMap::new()).unwrap();
    Checkpoint::open(path).unwrap_err().to_string()
}

#[test]
fn weights_that_are_not_whole_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let state = "nf4.weight.quant_state.bitsandbytes__nf4";
    let text = |json: &str| {
        let shape = maxdiff::shape::Shape::new(DType::U8, [json.len()]);
        HostTensor::new(shape, json.as_bytes().to_vec()).unwrap()
    };
    let said = |json: &'static str| {
        move |t: &mut BTreeMap<String, HostTensor>| {
            t.insert(state.to_owned(), text(json));
        }
    };
    type Change = Box<dyn FnOnce(&mut BTreeMap<String, HostTensor>)>;
    let without = |name: &'static str| -> Change {
        Box::new(move |t| {
            t.remove(name);
        })
    };
    let cases: Vec<(Change, &str)> = vec![
        (without("nf4.weight"), "nf4.weight is missing"),
        (without("nf4.weight.absmax"), "nf4.weight.absmax is missing"),
        (
            without("nested.weight.nested_absmax"),
            "nested.weight.nested_absmax is missing",
        ),
        (without("int8.weight"), "int8.weight is missing"),
        (Box::new(said("{")), "no state of a weight"),
        (
            Box::new(said(
                r#"{"quant_type": "nf4", "blocksize": 64, "shape": [20, 130]}"#,
            )),
            "1280 bytes are not [20, 130] in 4 bits",
        ),
        (
            Box::new(said(
                r#"{"quant_type": "nf4", "blocksize": 0, "shape": [20, 128]}"#,
            )),
            "of which 0 share a scale",
        ),
        (
            Box::new(said(
                r#"{"quant_type": "nf4", "blocksize": 32, "shape": [20, 128]}"#,
            )),
            "take 80 scales, one for 32; found 40",
        ),
        (
            Box::new(said(
                r#"{"quant_type": "nf4", "blocksize": 64, "shape": [4611686018427387904, 4]}"#,
            )),
            "1280 bytes are not",
        ),
        (
            Box::new(said(
                r#"{"quant_type": "nf3", "blocksize": 64, "shape": [20, 128]}"#,
            )),
            "is stored in bitsandbytes' nf3, which is not read here; read are nf4, fp4 and int8",
        ),
    ];
    for (change, expected) in cases {
        let error = error(&path, change);
        assert!(error.contains(expected), "{expected}: {error}");
    }
}
