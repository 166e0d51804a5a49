//! AMD Quark's export, against the library (`scripts/oracles/quark_export.py`).

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{Golden, golden};
use crate::quantize::{model, quantized, refused};
use maxdiff::dtype::DType;
use maxdiff::graph::{Granularity, NumericsConvention, TensorFormat};
use maxdiff::host_tensor::HostTensor;
use maxdiff::models::Part;
use maxdiff::quant::quantize_weight;
use maxdiff::shape::Shape;
use maxdiff::weights::source::ModelSource;
use maxdiff::weights::{Checkpoint, TensorView, WeightsError, save};
use serde_json::{Map, Value, json};

use super::check_products_of;

const CASES: [&str; 9] = [
    "fp8_tensor",
    "int4_channel",
    "int4_group",
    "int4_group_asymmetric",
    "int8_channel",
    "int8_tensor",
    "int8_tensor_asymmetric",
    "mxfp4",
    "nvfp4",
];

fn open(folder: &Path) -> Result<Checkpoint, WeightsError> {
    let place = folder.join("config.json");
    let config = fs::read_to_string(&place).unwrap();
    let config: Map<String, Value> = serde_json::from_str(&config).unwrap();
    Checkpoint::open(folder)?.described_by(&place, &config)
}

#[test]
fn weights_are_the_floats_of_quark() {
    let expected = Golden::read("quark/floats.safetensors");
    for case in CASES {
        let mut file = open(&golden(&format!("quark/{case}"))).unwrap();
        let names: Vec<&str> = file.names().collect();
        assert_eq!(
            names,
            ["head.bias", "head.weight", "linear.bias", "linear.weight"],
            "{case}"
        );
        let found = file.read_as("linear.weight", DType::F32).unwrap();
        assert_eq!(found.shape.dims, [16, 128], "{case}");
        assert_eq!(
            found,
            expected.tensor(&format!("out/{case}"), &found.shape),
            "{case}"
        );
        // Packed, they stand for the same.
        file.pack();
        assert_eq!(file.quantization().unwrap().layers.len(), 1, "{case}");
        file.widen();
        assert_eq!(file.read("linear.weight").unwrap(), found, "{case}");
    }
}

#[test]
fn programs_multiply_what_quark_exports() {
    for case in ["int4_group_asymmetric", "mxfp4", "nvfp4"] {
        let folder = golden(&format!("quark/{case}"));
        check_products_of(&|| open(&folder).unwrap(), &["linear"]);
    }
}

/// SVDQuant's export: codes of what a low-rank product leaves, and its factors beside them, under one layer's path.
#[test]
fn low_rank_products_are_those_of_quark() {
    let folder = golden("quark/svdquant");
    let mut file = open(&folder).unwrap();
    let names: Vec<&str> = file.names().collect();
    assert_eq!(
        names,
        ["head.bias", "head.weight", "linear.bias", "linear.weight"]
    );
    let found = file.read_as("linear.weight", DType::F32).unwrap();
    assert_eq!(found.shape.dims, [256, 256]);
    let values = found.to_f32_vec().unwrap();
    let recorded = Golden::read("quark/floats.safetensors");
    let recorded = recorded.values("out/svdquant");
    let (left, product) = recorded.split_at(recorded.len() / 2);
    assert!(product.iter().any(|x| x.abs() > 1e-3));
    for ((found, left), product) in values.iter().zip(left).zip(product) {
        // Quark rounds codes times scales to bfloat16.
        let bound = left.abs() * 2f64.powi(-8) + 1e-6;
        assert!((f64::from(*found) - left - product).abs() <= bound);
    }
    file.pack();
    let layers = &file.quantization().unwrap().layers;
    assert_eq!(layers["linear"].low_rank, Some(4));
    file.widen();
    assert_eq!(file.read("linear.weight").unwrap(), found);
    check_products_of(&|| open(&folder).unwrap(), &["linear"]);
}

/// What Quark stores is what `quantize` stores, and its microscaling formats stand for the same floats.
#[test]
fn weights_become_what_quark_exports() {
    let recorded = Golden::read("quark/floats.safetensors");
    let values: Vec<f32> = recorded
        .values("in/weight")
        .iter()
        .map(|x| *x as f32)
        .collect();
    let weight = HostTensor::from_f32([16, 128], &values).unwrap();
    let format = |convention, element, granularity, zero_point| TensorFormat {
        element,
        granularity,
        zero_point,
        ..TensorFormat::int8(convention)
    };
    use Granularity::{Channel, Group, Tensor};
    use NumericsConvention::{Mx, Nv, Quark};
    for (case, format) in [
        ("fp8_tensor", format(Quark, DType::F8E4M3Fn, Tensor, false)),
        ("int4_channel", format(Quark, DType::S4, Channel, false)),
        ("int4_group", format(Quark, DType::S4, Group(64), false)),
        (
            "int4_group_asymmetric",
            format(Quark, DType::S4, Group(64), true),
        ),
        ("int8_channel", format(Quark, DType::S8, Channel, false)),
        ("int8_tensor", format(Quark, DType::S8, Tensor, false)),
        (
            "int8_tensor_asymmetric",
            format(Quark, DType::S8, Tensor, true),
        ),
        ("mxfp4", format(Mx, DType::U4, Group(32), false)),
        ("nvfp4", format(Nv, DType::U4, Group(16), false)),
    ] {
        let mut file = open(&golden(&format!("quark/{case}"))).unwrap();
        file.pack();
        let found = quantize_weight(&weight, format).unwrap();
        let stored = |end: &str| file.read(&format!("linear.weight{end}")).unwrap();
        assert_eq!(found.values, stored(""), "{case}");
        assert_eq!(found.scale, stored("_scale"), "{case}");
        if let Some(zero_point) = found.zero_point {
            assert_eq!(zero_point, stored("_zero_point"), "{case}");
        }
        if let Some(scale) = found.tensor_scale {
            assert_eq!(scale, stored("_scale_2"), "{case}");
        }
    }
    // Quark does not pack it.
    let found = quantize_weight(&weight, format(Mx, DType::F8E4M3Fn, Group(32), false)).unwrap();
    let codes = found.values.to_f32_vec().unwrap();
    let scales = found.scale.to_f32_vec().unwrap();
    let floats: Vec<f64> = (0..codes.len())
        .map(|i| f64::from(codes[i] * scales[i / 32]))
        .collect();
    assert_eq!(floats, recorded.values("out/mxfp8"));
}

/// A copy of a case with its description changed.
fn changed(dir: &Path, case: &str, change: impl FnOnce(&mut Value)) -> PathBuf {
    let from = golden(&format!("quark/{case}"));
    let weights = "diffusion_pytorch_model.safetensors";
    fs::copy(from.join(weights), dir.join(weights)).unwrap();
    let config = fs::read_to_string(from.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    change(&mut config["quantization_config"]);
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    dir.to_owned()
}

/// A layer of SVDQuant whose parts do not fit each other.
#[test]
fn low_rank_products_that_do_not_fit_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let folder = golden("quark/svdquant");
    let file = Checkpoint::open(&folder).unwrap();
    let tensors: Vec<(&str, HostTensor)> =
        file.names().map(|n| (n, file.read(n).unwrap())).collect();
    fs::copy(folder.join("config.json"), dir.path().join("config.json")).unwrap();
    let error = |change: &dyn Fn(&str, &HostTensor) -> Option<HostTensor>| {
        let changed = tensors
            .iter()
            .filter_map(|(name, tensor)| Some((*name, change(name, tensor)?)));
        let changed: Vec<(&str, HostTensor)> = changed.collect();
        let views = changed.iter().map(|(name, tensor)| TensorView {
            name,
            dtype: tensor.shape.dtype,
            dims: &tensor.shape.dims,
            data: &tensor.data,
        });
        let path = dir.path().join("diffusion_pytorch_model.safetensors");
        save(&path, views, &BTreeMap::new()).unwrap();
        open(dir.path()).unwrap_err().to_string()
    };
    let up = "linear.correction.l2.weight";
    let missing = error(&|name, tensor| (name != up).then(|| tensor.clone()));
    assert!(
        missing.contains("linear.correction.l2.weight is missing"),
        "{missing}"
    );
    let other = error(&|name, tensor| {
        let other = HostTensor::zeros(Shape::new(DType::BF16, [256, 3]));
        Some(if name == up { other } else { tensor.clone() })
    });
    assert!(
        other.contains(
            "linear.correction: its factors are bf16[4,256] and bf16[256,3], which make no matrix"
        ),
        "{other}"
    );
    let floats = error(&|name, tensor| {
        let weight = HostTensor::zeros(Shape::new(DType::BF16, [256, 256]));
        match name {
            "linear.layer.weight" => Some(weight),
            name if name.contains("_quantizer") => None,
            _ => Some(tensor.clone()),
        }
    });
    assert!(floats.contains("no tensor is a scale of one"), "{floats}");
}

#[test]
fn descriptions_that_disagree_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    type Change = fn(&mut Value);
    let cases: [(&str, Change, &str); 7] = [
        (
            "int8_tensor",
            |c| c["global_quant_config"]["weight"]["dtype"] = json!("int4"),
            "linear is stored in AMD Quark's \"int4\" with weights in s8 and scales in f32, which is not read here",
        ),
        (
            "int4_group",
            |c| c["global_quant_config"]["weight"]["dtype"] = json!("uint4"),
            "AMD Quark's \"uint4\" with weights in s32",
        ),
        (
            "int8_tensor",
            |c| c["export"]["weight_format"] = json!("other"),
            "weight_format is \"other\"; read are real_quantized and fake_quantized",
        ),
        (
            "int8_tensor",
            |c| c["export"] = Value::Null,
            "not as its quantization_config says: export:",
        ),
        (
            "int8_tensor",
            |c| c["quant_method"] = json!("gptq"),
            "quantized by \"gptq\", whose files are not read here; read are those of bitsandbytes, torchao and AMD Quark",
        ),
        (
            "int8_tensor",
            |c| c["quant_method"] = json!("bitsandbytes"),
            "no tensor is quantized by bitsandbytes",
        ),
        (
            "svdquant",
            |c| c["export"]["weight_format"] = json!("fake_quantized"),
            "linear is stored in floats with a low-rank product beside them, which is not read here",
        ),
    ];
    for (case, change, expected) in cases {
        let folder = changed(dir.path(), case, change);
        let error = open(&folder).unwrap_err().to_string();
        assert!(error.contains(expected), "{expected}: {error}");
    }
}

/// Checks that the UNets of two models have the same tensors.
fn check_same_floats(models: &[ModelSource; 2]) {
    let [one, other] = models
        .each_ref()
        .map(|model| &model.component(Part::Unet).unwrap().checkpoint);
    let names: Vec<&str> = one.names().collect();
    assert_eq!(names, other.names().collect::<Vec<_>>());
    for name in names {
        assert_eq!(one.read(name).unwrap(), other.read(name).unwrap(), "{name}");
    }
}

/// `quantized_layout=quark` of a model whose convolutions stay in float: what is read back stands for the same floats as this
/// program's own layout, with another format for some layers.
#[test]
fn a_model_is_written_in_quarks_layout_and_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path());
    let common = [
        "quantization=int8_w8a16",
        "quantization_numerics=quark",
        "quant_rules=[{path: '.*conv.*|.*samplers.*|.*proj_(in|out)', mode: none}, {path: '.*attn2.*', mode: int8_w8a16, \
         granularity: tensor, symmetric: False}]",
    ];
    let [own, quarks] = ["own", "quark"].map(|name| dir.path().join(name));
    quantized(&source, &own, &common);
    let report = quantized(
        &source,
        &quarks,
        &[&common[..], &["quantized_layout=quark"]].concat(),
    );
    let layers = report["tensors"].as_array().unwrap().len();
    let text = fs::read_to_string(quarks.join("unet/config.json")).unwrap();
    let config: Value = serde_json::from_str(&text).unwrap();
    let description = &config["quantization_config"];
    assert_eq!(description["quant_method"], "quark");
    let others = description["layer_quant_config"].as_object().unwrap();
    assert!(!others.is_empty() && others.len() < layers);
    let mut written = [&own, &quarks].map(|folder| ModelSource::open(folder).unwrap());
    assert!(
        written
            .iter_mut()
            .all(|model| model.widen_denoiser() == layers)
    );
    check_same_floats(&written);
    let output = dir.path().join("out");
    let with_convolutions = [
        "quantization=int8_w8a16",
        "quantization_numerics=quark",
        "quantized_layout=quark",
    ];
    let found = crate::quantize::quantize(&source, &output, &with_convolutions);
    refused(&found, 2, "Quark packs linear layers alone");
    let with_observer = [
        &with_convolutions[..],
        &["quant_rules=[{path: '.*attn2.*', mode: int8_w8a16, observer: mse}]"],
    ]
    .concat();
    let found = crate::quantize::quantize(&source, &output, &with_observer);
    refused(&found, 2, ".*attn2.*: its description names Quark's own");
    assert!(!output.exists());
}

/// SVDQuant in Quark's layout: what is read back stands for the same floats as this program's own layout.
#[test]
fn low_rank_products_are_written_in_quarks_layout_and_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let source = model(dir.path());
    let common = [
        "quantization=svdquant_w4a16",
        "quantization_granularity=4",
        "quantization_numerics=quark",
        "svd_rank=2",
        "quant_rules=[{path: '.*attn2.*', mode: int8_w8a16}, {path: '.*(conv|samplers|proj_in|proj_out|time).*', mode: none}]",
    ];
    let [own, quarks] = ["own", "quark"].map(|name| dir.path().join(name));
    quantized(&source, &own, &common);
    quantized(
        &source,
        &quarks,
        &[&common[..], &["quantized_layout=quark"]].concat(),
    );
    let text = fs::read_to_string(quarks.join("unet/config.json")).unwrap();
    let config: Value = serde_json::from_str(&text).unwrap();
    let algorithm = &config["quantization_config"]["algo_config"][0];
    assert_eq!(algorithm["svd_rank"], 2);
    let excluded = algorithm["exclude_patterns"].as_array().unwrap();
    let excluded: Vec<&str> = excluded.iter().filter_map(Value::as_str).collect();
    assert!(excluded.contains(&"conv_in"));
    assert!(excluded.iter().any(|path| path.contains("attn2")));
    let file = Checkpoint::open(&quarks.join("unet")).unwrap();
    let with_bias = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_out.0";
    for name in [
        "layer.weight",
        "layer.bias",
        "correction.l1.weight",
        "correction.l2.weight",
    ] {
        let name = format!("{with_bias}.{name}");
        assert!(file.names().any(|found| found == name), "{name}");
    }
    let written = [&own, &quarks].map(|folder| {
        let mut model = ModelSource::open(folder).unwrap();
        assert!(model.widen_denoiser() > 0);
        model
    });
    check_same_floats(&written);
    let output = dir.path().join("out");
    let twice = [&common[..], &["quantized_layout=quark", "svd_iterations=2"]].concat();
    let found = crate::quantize::quantize(&source, &output, &twice);
    refused(&found, 2, "svd_iterations: Quark decomposes a weight once");
    assert!(!output.exists());
}
