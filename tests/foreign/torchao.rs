//! torchao, against the library (`scripts/oracles/torchao_files.py`), and files that are refused by their names.

use std::collections::BTreeMap;

use crate::common::{Golden, golden};
use maxdiff::dtype::DType;
use maxdiff::weights::{Checkpoint, TensorView, save};

use super::check_products;

const WEIGHTS: &str = "torchao/weights.safetensors";

#[test]
fn weights_are_the_floats_of_torchao() {
    let expected = Golden::read("torchao/floats.safetensors");
    let file = Checkpoint::open(&golden(WEIGHTS)).unwrap();
    for layer in ["fp8_row", "int8"] {
        let found = file
            .read_as(&format!("{layer}.weight"), DType::F32)
            .unwrap();
        assert_eq!(
            found,
            expected.tensor(&format!("out/{layer}"), &found.shape),
            "{layer}"
        );
    }
    check_products(&golden(WEIGHTS), &["fp8_row", "int8"]);
}

#[test]
fn other_packings_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let open = |names: &[&'static str], metadata: &[(&str, &str)]| {
        let views = names.iter().map(|name| TensorView {
            name,
            dtype: DType::S8,
            dims: &[2, 2],
            data: &[0; 4],
        });
        let metadata = metadata
            .iter()
            .map(|(key, value)| ((*key).into(), (*value).into()));
        save(&path, views, &metadata.collect::<BTreeMap<_, _>>()).unwrap();
        Checkpoint::open(&path).unwrap_err().to_string()
    };
    let error = open(
        &["a._weight_qdata", "a._weight_scale"],
        &[("a.weight", r#"{"_type": "Int4Tensor", "_data": {}}"#)],
    );
    assert!(
        error.contains("a is stored in torchao's Int4Tensor of s8, which is not read here; read are Float8Tensor"),
        "{error}"
    );
    let error = open(
        &["a._weight_qdata"],
        &[("a.weight", r#"{"_type": "Int8Tensor"}"#)],
    );
    assert!(error.contains("a._weight_scale is missing"), "{error}");
    let error = open(&["b.qweight", "b.wscales"], &[]);
    assert!(
        error.contains(
            "b is stored in nunchaku's packing of a layer of another model, which is not read here"
        ),
        "{error}"
    );
}
