//! Single blocks at the width of the published models, in float32, against diffusers and transformers in float64. Weights
//! and inputs are made by the rule of `scripts/oracles/full_width.py`.

use serde_json::{Map, Value, json};

use crate::common::{Golden, distance, keeping_session, run_on};
use maxdiff::dtype::DType;
use maxdiff::graph::{Builder, Input, InputKind, Tensor};
use maxdiff::host_tensor::HostTensor;
use maxdiff::models::flux::{self, FluxTransformer2DConfig, flux_transformer};
use maxdiff::models::pixart::{self, PixArtTransformer2DConfig, pixart_transformer};
use maxdiff::models::sd3::{self, Sd3Transformer2DConfig, sd3_transformer};
use maxdiff::models::t5::{T5EncoderConfig, t5_encoder};
use maxdiff::models::{DenoiserKind, Family};
use maxdiff::nn::{Precision, Remat};
use maxdiff::shape::Shape;

/// The length of the table that tensors repeat: a prime, so that no row of a weight is like another.
const LENGTH: usize = 1_048_573;
const STRIDE: usize = 7;

/// MurmurHash3's finalizer, from -1 to 1.
fn table() -> Vec<f64> {
    let mixed = (1..=LENGTH as u32).map(|mut x| {
        x ^= x >> 16;
        x = x.wrapping_mul(0x85EB_CA6B);
        x ^= x >> 13;
        x = x.wrapping_mul(0xC2B2_AE35);
        x ^= x >> 16;
        f64::from(x) / f64::from(1u32 << 31) - 1.0
    });
    mixed.collect()
}

/// The tensor `key`: the table from the key's place on, again and again.
fn filled(table: &[f64], key: &str, shape: &Shape, scale: f64, base: f64) -> HostTensor {
    let hash = |start: u32, byte: &u8| start.wrapping_mul(31).wrapping_add(u32::from(*byte));
    let start = key.as_bytes().iter().fold(0, hash) as usize % LENGTH;
    let scaled: Vec<f32> = table.iter().map(|v| (v * scale + base) as f32).collect();
    let bytes: &[u8] = bytemuck::cast_slice(&scaled);
    let total = 4 * shape.count();
    let mut data = Vec::with_capacity(total + bytes.len());
    data.extend_from_slice(&bytes[4 * start..]);
    while data.len() < total {
        data.extend_from_slice(bytes);
    }
    data.truncate(total);
    HostTensor::new(shape.clone(), data).unwrap()
}

/// The weight or input that the rule says.
fn made(table: &[f64], input: &Input) -> HostTensor {
    let Shape { dims, .. } = &input.shape;
    let floats = |values: &[f32]| HostTensor::from_f32(dims.clone(), values).unwrap();
    if let InputKind::Weight(_) = input.kind {
        let key = input.key();
        let columns: usize = dims.iter().skip(1).product();
        let is_norm = dims.len() == 1 && key.ends_with("weight");
        return match dims.len() {
            1 => filled(table, key, &input.shape, 0.1, f64::from(u8::from(is_norm))),
            _ => filled(table, key, &input.shape, (3.0 / columns as f64).sqrt(), 0.0),
        };
    }
    match (input.name.as_str(), dims.as_slice()) {
        ("img_ids", &[tokens, _]) => {
            let ids = (0..tokens).flat_map(|i| [0.0, (i / 3) as f32, (i % 3) as f32]);
            floats(&ids.collect::<Vec<_>>())
        }
        ("txt_ids", _) => floats(&vec![0.0; input.shape.count()]),
        ("guidance", _) => floats(&[3.5]),
        ("encoder_attention_mask", _) => floats(&vec![1.0; input.shape.count()]),
        ("timestep", _) => unreachable!("it is given"),
        ("input_ids", _) => {
            HostTensor::from_i32(dims.clone(), &[5, 9, 33, 2, 60, 17, 1, 0, 0]).unwrap()
        }
        (name, _) => filled(table, name, &input.shape, 1.0, 0.0),
    }
}

/// The result `y` against the recorded one of `name`.
fn check(name: &str, b: Builder, y: Tensor, timestep: f32) {
    b.output("y", y, None).unwrap();
    let graph = b.finish();
    let table = table();
    let arguments: Vec<HostTensor> = graph
        .inputs
        .iter()
        .map(|input| match input.name.as_str() {
            "timestep" => HostTensor::from_f32([1], &[timestep]).unwrap(),
            _ => made(&table, input),
        })
        .collect();
    let found = run_on(&keeping_session(), &graph, &arguments).remove(0);
    let found = found.to_f64_vec().unwrap();
    let golden = Golden::read("full_width.safetensors");
    let sampled: Vec<f64> = found.iter().copied().step_by(STRIDE).collect();
    let error = distance(&sampled, golden.values(&format!("out/{name}/sample")));
    let norm = found.iter().map(|v| v * v).sum::<f64>().sqrt();
    let expected = golden.values(&format!("out/{name}/norm"))[0];
    eprintln!(
        "{name}: {error:.1e}, norm {:.1e}",
        (norm / expected - 1.0).abs()
    );
    assert!(error < 1e-5, "{name}: {error:e}");
    assert!(
        (norm / expected - 1.0).abs() < 1e-5,
        "{name}: {norm} {expected}"
    );
}

/// The published configuration of a family's transformer with other fields.
fn published(family: Family, kind: DenoiserKind, fields: Value) -> Map<String, Value> {
    let spec = family.spec();
    assert_eq!(spec.denoiser, kind);
    let text = spec.published.as_ref().unwrap().denoiser;
    let mut config: Map<String, Value> = serde_json::from_str(text).unwrap();
    config.extend(fields.as_object().unwrap().clone());
    config
}

fn flux_blocks(name: &str, double: usize, single: usize) {
    let fields = json!({"num_layers": double, "num_single_layers": single});
    let config = published(Family::FluxDev, DenoiserKind::Flux, fields);
    let config = FluxTransformer2DConfig::from_map(config).unwrap();
    let b = Builder::new();
    let inputs = flux::declare_inputs(&b, &config, [1, 6, 4]).unwrap();
    let y = flux_transformer(&b, &config, inputs, Precision::F32, Remat::None).unwrap();
    check(name, b, y, 0.5);
}

/// One after the other: the widest weights take 1.6 GB.
#[test]
fn single_blocks_match_diffusers() {
    flux_blocks("flux_double", 1, 0);
    flux_blocks("flux_single", 0, 1);

    let fields = json!({"num_layers": 2, "pos_embed_max_size": 16});
    let config = published(Family::Sd3, DenoiserKind::Sd3, fields);
    let config = Sd3Transformer2DConfig::from_map(config).unwrap();
    let b = Builder::new();
    let inputs = sd3::declare_inputs(&b, &config, [1, 4, 6, 4]).unwrap();
    let y = sd3_transformer(&b, &config, inputs, Precision::F32, Remat::None).unwrap();
    check("sd3_joint", b, y, 500.0);

    let config = published(
        Family::PixArtSigma,
        DenoiserKind::PixArt,
        json!({"num_layers": 1}),
    );
    let config = PixArtTransformer2DConfig::from_map(config).unwrap();
    let b = Builder::new();
    let inputs = pixart::declare_inputs(&b, &config, [1, 4, 6, 3]).unwrap();
    let y = pixart_transformer(&b, &config, inputs, Precision::F32, Remat::None).unwrap();
    check("pixart", b, y, 500.0);

    let text = json!({"model_type": "t5", "vocab_size": 64, "d_model": 4096, "d_kv": 64, "d_ff": 10240,
        "num_layers": 1, "num_heads": 64, "feed_forward_proj": "gated-gelu"});
    let config = T5EncoderConfig::from_json(&text.to_string()).unwrap();
    let b = Builder::new();
    let ids = b
        .input("input_ids", Shape::new(DType::S32, [1, 9]), &[])
        .unwrap();
    let y = t5_encoder(
        &b,
        "text_encoder_2",
        &config,
        ids,
        None,
        Precision::F32,
        Remat::None,
    );
    check("t5", b, y.unwrap(), 0.0);
}
