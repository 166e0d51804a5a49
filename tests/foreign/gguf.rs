//! GGUF, against the gguf package (`scripts/oracles/gguf_files.py`).

use std::fs;
use std::panic::catch_unwind;
use std::path::Path;

use crate::common::{Golden, RecordedPipeline, distance, golden};
use maxdiff::dtype::DType;
use maxdiff::graph::{Granularity, NumericsConvention, TensorFormat};
use maxdiff::host_tensor::HostTensor;
use maxdiff::models::t5;
use maxdiff::quant::quantize_weight;
use maxdiff::weights::{Checkpoint, WeightsError};
use serde_json::Value;

use super::check_products;

const FLUX: RecordedPipeline = RecordedPipeline {
    name: "flux_schnell",
    recorded: "flux_schnell",
    recipe: "flux-schnell",
    shared: &[
        ("vae", "pipeline_flux_dev/vae"),
        ("text_encoder", "pipeline_flux_dev/text_encoder"),
        ("text_encoder_2", "pipeline_flux_dev/text_encoder_2"),
    ],
    clip_tokenizers: &["tokenizer"],
    t5_tokenizer: Some(("tokenizer_2", "tokenizer.json")),
};

#[test]
fn tensors_are_bit_for_bit_those_of_the_gguf_package() {
    let expected = Golden::read("gguf/blocks.safetensors");
    let file = Checkpoint::open(&golden("gguf/blocks.gguf")).unwrap();
    assert_eq!(file.metadata()["general.architecture"], "flux");
    let names: Vec<&str> = file.names().collect();
    assert_eq!(names.len(), 12);
    for name in names {
        let found = file.read_as(name, DType::F32).unwrap();
        let shape = found.shape.clone();
        assert_eq!(
            Some(&shape.dims),
            file.info(name).map(|s| &s.dims),
            "{name}"
        );
        assert_eq!(
            found,
            expected.tensor(&format!("out/{name}"), &shape),
            "{name}"
        );
        let half = file.read_as(name, DType::BF16).unwrap();
        assert_eq!(half, found.convert(DType::BF16).unwrap(), "{name}");
    }
}

#[test]
fn programs_multiply_blocks_as_they_are_stored() {
    let layers = [
        "q4_0", "q4_1", "q4_k", "q5_0", "q5_1", "q5_k", "q6_k", "q8_0",
    ];
    check_products(&golden("gguf/blocks.gguf"), &layers);
    // The kernel's blocks are no groups of its input channels.
    let mut packed = Checkpoint::open(&golden("gguf/blocks.gguf")).unwrap();
    packed.pack();
    assert_eq!(
        packed.info("kernel.weight").unwrap().to_string(),
        "f32[8,32,3,3]"
    );
    assert_eq!(packed.info("q8_0.weight").unwrap().to_string(), "s8[3,512]");
    assert_eq!(
        packed.info("q8_0.weight_scale").unwrap().to_string(),
        "f16[3,16]"
    );
    packed.widen();
    let plain = Checkpoint::open(&golden("gguf/blocks.gguf")).unwrap();
    for name in plain.names() {
        assert_eq!(
            packed.read(name).unwrap(),
            plain.read(name).unwrap(),
            "{name}"
        );
    }
}

/// q8_0, q4_0 and q4_1 the other way round: `quantization_numerics=gguf`.
#[test]
fn weights_become_the_blocks_of_the_gguf_package() {
    let recorded = Golden::read("gguf/blocks.safetensors");
    let mut file = Checkpoint::open(&golden("gguf/blocks.gguf")).unwrap();
    file.pack();
    for (name, element) in [
        ("q8_0", DType::S8),
        ("q4_0", DType::S4),
        ("q4_1", DType::U4),
    ] {
        let format = TensorFormat {
            element,
            zero_point: element == DType::U4,
            granularity: Granularity::Group(32),
            ..TensorFormat::int8(NumericsConvention::Gguf)
        };
        let format = format.stored(DType::F16);
        let name = format!("{name}.weight");
        let values: Vec<f32> = recorded
            .values(&format!("in/{name}"))
            .iter()
            .map(|x| *x as f32)
            .collect();
        let weight = HostTensor::from_f32([3, 512], &values).unwrap();
        let found = quantize_weight(&weight, format).unwrap();
        assert_eq!(found.values, file.read(&name).unwrap(), "{name}");
        assert_eq!(
            found.scale,
            file.read(&format!("{name}_scale")).unwrap(),
            "{name}"
        );
        if let Some(minimums) = found.zero_point {
            let stored = file.read(&format!("{name}_zero_point")).unwrap();
            assert_eq!(minimums, stored, "{name}");
        }
    }
}

#[test]
fn the_names_of_t5_are_those_of_llama_cpp() {
    let names: Value = serde_json::from_str(&Golden::text("gguf/names.json")).unwrap();
    for (expected, name) in names.as_object().unwrap() {
        let found = t5::original::of_llama_cpp(name.as_str().unwrap());
        assert_eq!(found.as_ref(), Some(expected));
    }
    assert_eq!(t5::original::of_llama_cpp("dec.blk.0.attn_q.weight"), None);
}

/// A transformer and T5 in GGUF in place of the model's own: the pictures are near those of the floats, the same whether
/// weights stay packed or are widened, and the program has fewer bytes of them.
#[test]
fn a_transformer_and_t5_draw_from_gguf() {
    let at = |key: &str, name: &str| format!("{key}={}", golden(&format!("gguf/{name}")).display());
    let denoiser = at("denoiser_model_name_or_path", "flux-schnell.gguf");
    let t5 = at("t5_model_name_or_path", "t5.gguf");
    let samples = |words: &[&str]| {
        let made = FLUX.generate(words).unwrap();
        let values: Vec<f64> = made
            .samples
            .iter()
            .flat_map(|s| s.to_f64_vec().unwrap())
            .collect();
        values
    };
    let packed = samples(&[&denoiser, &t5]);
    let widened = samples(&[&denoiser, &t5, "dequantize=True"]);
    let error = distance(&packed, &widened);
    assert!(error < 1e-6, "{error:e}");
    let error = distance(&packed, FLUX.golden().values("out/latents"));
    assert!((1e-6..2e-2).contains(&error), "{error:e}");
    FLUX.refuses(&[
        ("dequantize=True", "dequantize has no effect"),
        (
            "denoiser_model_name_or_path=no-such.gguf",
            "no such file or folder",
        ),
    ]);
}

fn opened(path: &Path, bytes: &[u8]) -> Result<Checkpoint, WeightsError> {
    fs::write(path, bytes).unwrap();
    Checkpoint::open(path)
}

#[test]
fn every_truncation_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.gguf");
    let whole = fs::read(golden("gguf/blocks.gguf")).unwrap();
    let header = 1500;
    // The last tensor is followed by nothing but its padding.
    let cuts = (4..header)
        .step_by(3)
        .chain((header..whole.len() - 64).step_by(97));
    for cut in cuts {
        match opened(&path, &whole[..cut]) {
            Err(WeightsError::Truncated {
                expected, found, ..
            }) => {
                assert_eq!(found, cut as u64);
                assert!(expected > found);
            }
            other => panic!("cut at {cut}: {other:?}"),
        }
    }
}

/// The header of a file: `keys` and `tensors` are counted and written as they are.
fn header(keys: &[Vec<u8>], tensors: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3_u32.to_le_bytes());
    bytes.extend((tensors.len() as u64).to_le_bytes());
    bytes.extend((keys.len() as u64).to_le_bytes());
    bytes.extend(keys.concat());
    bytes.extend(tensors.concat());
    bytes
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

fn tensor(name: &str, sizes: &[u64], kind: u32, offset: u64) -> Vec<u8> {
    let mut bytes = text(name);
    bytes.extend((sizes.len() as u32).to_le_bytes());
    sizes
        .iter()
        .for_each(|size| bytes.extend(size.to_le_bytes()));
    bytes.extend(kind.to_le_bytes());
    bytes.extend(offset.to_le_bytes());
    bytes
}

#[test]
fn hostile_headers_are_refused_by_what_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.gguf");
    let key = |name: &str, kind: u32, value: &[u8]| {
        [&text(name)[..], &kind.to_le_bytes(), value].concat()
    };
    let mut deep = 9_u32.to_le_bytes().to_vec();
    for _ in 0..8 {
        deep = [&9_u32.to_le_bytes()[..], &1_u64.to_le_bytes(), &deep].concat();
    }
    let counted = |count: u64| {
        let mut bytes = header(&[], &[]);
        bytes[8..16].copy_from_slice(&count.to_le_bytes());
        bytes
    };
    let version = |version: u32| {
        let mut bytes = header(&[], &[]);
        bytes[4..8].copy_from_slice(&version.to_le_bytes());
        bytes
    };
    let shape = |dims: &[i32]| {
        let mut value = [&5_u32.to_le_bytes()[..], &(dims.len() as u64).to_le_bytes()].concat();
        dims.iter().for_each(|d| value.extend(d.to_le_bytes()));
        key("comfy.gguf.orig_shape.a", 9, &value)
    };
    let alignment = |n: u32| key("general.alignment", 4, &n.to_le_bytes());
    let long = |length: u64| [&length.to_le_bytes()[..], &[0; 100]].concat();
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (version(1), "version 1; read are 2 and 3"),
        (version(3_u32.swap_bytes()), "big-endian"),
        (counted(u64::MAX), "truncated"),
        (
            header(&[long(u64::MAX)], &[]),
            "a key of 18446744073709551615 bytes",
        ),
        (header(&[key("k", 8, &long(u64::MAX))], &[]), "truncated"),
        (
            header(
                &[key(
                    "k",
                    9,
                    &[&4_u32.to_le_bytes()[..], &u64::MAX.to_le_bytes()].concat(),
                )],
                &[],
            ),
            "truncated",
        ),
        (
            header(
                &[key(
                    "k",
                    9,
                    &[&8_u32.to_le_bytes()[..], &u64::MAX.to_le_bytes()].concat(),
                )],
                &[],
            ),
            "truncated",
        ),
        (
            header(&[key("k", 9, &deep)], &[]),
            "arrays within more than 4 arrays",
        ),
        (header(&[key("k", 77, &[])], &[]), "unknown type 77"),
        (header(&[alignment(48)], &[]), "general.alignment is 48"),
        (
            header(&[], &[tensor("a", &[1; 9], 0, 0)]),
            "tensor a has 9 dimensions",
        ),
        (
            header(&[], &[tensor("a", &[u64::MAX, 2], 0, 0)]),
            "overflows",
        ),
        (
            header(&[], &[tensor("a", &[1 << 32, 1 << 31], 0, 0)]),
            "overflows",
        ),
        (header(&[], &[tensor("a", &[1 << 40], 0, 0)]), "truncated"),
        (
            header(&[], &[tensor("a", &[4], 0, u64::MAX - 31)]),
            "its offset overflows",
        ),
        (
            header(&[], &[tensor("a", &[4], 0, 5)]),
            "no multiple of the alignment 32",
        ),
        (
            header(&[], &[tensor("a", &[40], 8, 0)]),
            "rows of 40 elements are no whole blocks of Q8_0",
        ),
        (
            header(&[], &[tensor("a", &[0], 0, 0), tensor("a", &[0], 0, 0)]),
            "the name stands twice",
        ),
        (
            header(&[], &[tensor("a", &[32], 10, 0), tensor("b", &[32], 99, 0)]),
            "not read here: Q2_K (1 tensors), number 99 (1 tensors); read are F32, F16, BF16, Q4_0",
        ),
        (
            header(&[shape(&[3, 3])], &[tensor("a", &[32], 8, 0)]),
            "does not have the elements of [32]",
        ),
        (
            header(&[shape(&[-1, -32])], &[tensor("a", &[32], 8, 0)]),
            "does not have the elements of [32]",
        ),
    ];
    for (bytes, expected) in cases {
        let error = opened(&path, &bytes).unwrap_err().to_string();
        assert!(error.contains(expected), "{expected}: {error}");
    }
    let mut overlapping = header(&[], &[tensor("a", &[16], 0, 0), tensor("b", &[16], 0, 32)]);
    overlapping.resize(4096, 0);
    let error = opened(&path, &overlapping).unwrap_err().to_string();
    assert!(
        error.ends_with("tensor b: its bytes overlap those of a"),
        "{error}"
    );
}

/// Whatever bytes of a header are changed, the file opens or is refused, and what opens is read or refused.
#[test]
fn changed_headers_never_panic() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.gguf");
    let whole = fs::read(golden("gguf/blocks.gguf")).unwrap();
    let mut state = 1_u64;
    let mut random = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) as usize
    };
    for _ in 0..500 {
        let mut bytes = whole.clone();
        for _ in 0..1 + random() % 3 {
            let at = random() % 1500;
            bytes[at] = [0, 1, 0x7f, 0xff, random() as u8][random() % 5];
        }
        fs::write(&path, &bytes).unwrap();
        let read = catch_unwind(|| {
            if let Ok(mut file) = Checkpoint::open(&path) {
                file.pack();
                let names: Vec<String> = file.names().map(str::to_owned).collect();
                names.iter().for_each(|name| drop(file.read(name)));
            }
        });
        assert!(read.is_ok());
    }
}
