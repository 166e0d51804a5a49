//! LoRA files for transformers against diffusers and PEFT.

use super::{Part, merged, of_root};
use crate::common::{Golden, assert_close, rel_l2};
use maxdiff::graph::Builder;
use maxdiff::models::flux::{FluxTransformer2DConfig, flux_transformer};
use maxdiff::models::pixart::{PixArtTransformer2DConfig, pixart_transformer};
use maxdiff::models::sd3::{Sd3Transformer2DConfig, sd3_transformer};
use maxdiff::models::{Family, flux, pixart, sd3};
use maxdiff::nn::{Precision, Remat};
use maxdiff::weights::lora::{Adapter, LoraFile, LoraScale, beside};

/// The folder of a dialect's files in tests/golden, below `lora`.
const FOLDER: &str = "../lora_transformers";

fn transformer(folder: &str) -> Part {
    let io = Golden::read(&format!("{folder}/io.safetensors"));
    let config = Golden::text(&format!("{folder}/config.json"));
    let b = Builder::new();
    let dims = io.dims("in/hidden_states");
    let text = io.dims("in/encoder_hidden_states")[1];
    let y = match (folder, dims.as_slice()) {
        ("flux_dev", &[batch, image, _]) => {
            let config = FluxTransformer2DConfig::from_json(&config).unwrap();
            let inputs = flux::declare_inputs(&b, &config, [batch, image, text]).unwrap();
            flux_transformer(&b, &config, inputs, Precision::F32, Remat::None)
        }
        ("sd3_dual", &[batch, _, rows, columns]) => {
            let config = Sd3Transformer2DConfig::from_json(&config).unwrap();
            let inputs = sd3::declare_inputs(&b, &config, [batch, rows, columns, text]).unwrap();
            sd3_transformer(&b, &config, inputs, Precision::F32, Remat::None)
        }
        (_, &[batch, _, rows, columns]) => {
            let config = PixArtTransformer2DConfig::from_json(&config).unwrap();
            let inputs = pixart::declare_inputs(&b, &config, [batch, rows, columns, text]).unwrap();
            pixart_transformer(&b, &config, inputs, Precision::F32, Remat::None)
        }
        _ => panic!("{folder}: {dims:?}"),
    };
    b.output("sample", y.unwrap(), None).unwrap();
    Part {
        root: "transformer",
        graph: b.finish(),
        weights: Golden::read_folder(folder, "diffusion_pytorch_model"),
        io,
        result: "sample",
    }
}

fn flux_parts() -> Vec<Part> {
    vec![transformer("flux_dev"), Part::text_encoder("text_encoder")]
}

fn resolve(parts: &[Part], file: &str, scale: impl Into<LoraScale>) -> Adapter {
    super::resolve(parts, &format!("{FOLDER}/{file}"), scale)
}

/// What merging and what factors beside the weights compute, against what is recorded.
fn assert_outputs(case: &str, parts: &[Part], adapter: &Adapter) {
    let recorded = Golden::read("lora_transformers/io.safetensors");
    for part in parts {
        let name = format!("out/{case}/{}", part.result);
        if !recorded.has(&name) {
            continue;
        }
        let ranks = of_root(adapter, part.root);
        let with_factors = beside(&part.graph, &ranks, 1.0).unwrap();
        for found in [
            part.run_merged(&part.graph, adapter),
            part.run_beside(&with_factors, adapter),
        ] {
            eprintln!("{name}: {:.1e}", rel_l2(&found, &recorded, &name));
            assert_close(&name, &found, &recorded, 1e-5);
        }
    }
}

/// Dialects of one set of factors: the same merged weights, but for the rounding of alpha, and outputs as recorded.
fn assert_dialects(case: &str, parts: &[Part], files: &[&str]) {
    let first = resolve(parts, files[0], 0.7);
    let weights = merged(parts, &first);
    for file in &files[1..] {
        let other = merged(parts, &resolve(parts, file, 0.7));
        assert_eq!(
            weights.keys().collect::<Vec<_>>(),
            other.keys().collect::<Vec<_>>(),
            "{file}"
        );
        for (name, tensor) in &weights {
            assert!(tensor == &other[name], "{file}: {name}");
        }
    }
    assert_outputs(case, parts, &first);
}

#[test]
fn flux_in_every_dialect_matches_diffusers() {
    let parts = flux_parts();
    let whole = ["kohya", "saved", "ai_toolkit", "comfy"].map(|d| format!("flux_{d}.safetensors"));
    assert_dialects("flux", &parts, &whole.each_ref().map(String::as_str));
    let attention = [
        "fluxattention_xlabs.safetensors",
        "fluxattention_onetrainer.safetensors",
    ];
    assert_dialects("fluxattention", &parts, &attention);
    assert_dialects("fluxouter", &parts, &["fluxouter_kohya.safetensors"]);
    let two = Adapter::stack([
        resolve(&parts, "flux_kohya.safetensors", 0.7),
        resolve(&parts, "fluxattention_xlabs.safetensors", -0.4),
    ]);
    assert_outputs("two", &parts, &two.unwrap());
}

#[test]
fn stable_diffusion_3_in_every_dialect_matches_diffusers() {
    let parts = [transformer("sd3_dual")];
    assert_dialects(
        "sd3",
        &parts,
        &["sd3_kohya.safetensors", "sd3_saved.safetensors"],
    );
}

#[test]
fn pixart_of_pefts_matches_peft() {
    let parts = [transformer("pixart_sigma")];
    assert_dialects("pixart", &parts, &["pixart_peft"]);
}

/// The layers of one model are not those of another: all modules are listed, and the family is named.
#[test]
fn a_lora_of_another_transformer_is_refused() {
    for (model, file, expected) in [
        (
            "flux_dev",
            "sd3_kohya",
            "it is a LoRA for Stable Diffusion 3, the model is FLUX.1",
        ),
        (
            "sd3_dual",
            "flux_kohya",
            "it is a LoRA for FLUX.1, the model is Stable Diffusion 3",
        ),
        ("pixart_sigma", "sd3_saved", "match no weight"),
    ] {
        let part = transformer(model);
        let file = super::lora(&format!("{FOLDER}/{file}.safetensors"));
        let file = LoraFile::open(&file).unwrap();
        let targets = super::targets_of(std::slice::from_ref(&part));
        // The text encoder's modules are another part's.
        let scale = LoraScale {
            unet: 1.0,
            text_encoder: 0.0,
        };
        let error = file.resolve(&targets, scale).unwrap_err().to_string();
        assert!(error.contains(expected), "{model}: {error}");
    }
}

/// kohya's metadata says which of FLUX.1's models a file was trained on, whose tensors are the same.
#[test]
fn files_say_what_they_were_trained_on() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = std::fs::read(super::lora(&format!("{FOLDER}/flux_kohya.safetensors"))).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    for (key, value, expected) in [
        (
            "modelspec.architecture",
            "flux-1-dev/lora",
            Some(Family::FluxDev),
        ),
        (
            "ss_sd_model_name",
            "flux1-schnell.safetensors",
            Some(Family::FluxSchnell),
        ),
        ("ss_base_model_version", "flux1", None),
    ] {
        let path = dir.path().join("lora.safetensors");
        let metadata = std::collections::HashMap::from([(key.to_owned(), value.to_owned())]);
        safetensors::serialize_to_file(tensors.iter(), Some(metadata), &path).unwrap();
        let file = LoraFile::open(&path).unwrap();
        assert_eq!(file.trained_on(), expected, "{value}");
    }
}
