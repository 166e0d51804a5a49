//! Stable Diffusion 3 in one file: the transformer by the names of Stability AI's code.

use maxdiff::models::{Denoiser, DenoiserKind, Family, Part};
use maxdiff::weights::source::{Layout, ModelSource};
use serde_json::json;

use super::convert::converted;
use super::{Recorded, keep};

const DENOISER: &str = "model.diffusion_model.";

#[test]
fn files_hold_what_diffusers_makes_of_them() {
    let dir = tempfile::tempdir().unwrap();
    let recorded = Recorded::read("sd35");
    let (folder, report) = converted(dir.path(), "sd35");
    let path = dir.path().join("sd35.safetensors");
    let single = ModelSource::open(&path).unwrap();
    assert_eq!(single.family, Family::Sd35Medium);
    assert!(single.ignored.is_empty(), "{:?}", single.ignored);
    recorded.assert_holds(&single);
    for (part, recorded) in &recorded.parts {
        for (key, expected) in &recorded.config {
            // No tensor tells it; a tiny model has another than the family.
            if key != "norm_num_groups" {
                let found = &single.components[part].config;
                assert_eq!(found.get(key), Some(expected), "{part} {key}");
            }
        }
    }
    let vae = &single.components[&Part::Vae].config;
    assert_eq!(vae["scaling_factor"], json!(1.5305));
    assert_eq!(single.scheduler.as_ref().unwrap()["shift"], json!(3.0));
    let config = single.components[&Part::Transformer].config.clone();
    Denoiser::from_map(DenoiserKind::Sd3, config).unwrap();

    assert_eq!(report["recipe"], json!("sd35-medium"));
    let source = ModelSource::open(&folder).unwrap();
    assert_eq!(source.family, Family::Sd35Medium);
    assert_eq!(source.layout, Layout::Pipeline);
    recorded.assert_holds(&source);
    for (part, component) in &source.components {
        assert_eq!(component.config, single.components[part].config);
    }
    let index = source.index_fields().unwrap();
    for (part, class) in [
        ("transformer", ["diffusers", "SD3Transformer2DModel"]),
        (
            "text_encoder",
            ["transformers", "CLIPTextModelWithProjection"],
        ),
        ("text_encoder_3", ["transformers", "T5EncoderModel"]),
    ] {
        assert_eq!(index[part], json!(class));
    }
}

/// Files come with all text encoders, without T5, and without any; the projection of CLIP-L that some have is not used.
#[test]
fn files_may_lack_text_encoders() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file.safetensors");
    let recorded = Recorded::read("sd35");
    recorded.write(&path, &[], |tensors| {
        tensors.retain(|(name, _)| !name.contains("t5xxl"));
        let prefix = "text_encoders.clip_l.transformer.";
        let like = format!("{prefix}text_model.encoder.layers.0.self_attn.q_proj.weight");
        let projection = tensors.iter().find(|(name, _)| *name == like).unwrap();
        let projection = projection.1.clone();
        tensors.push((format!("{prefix}text_projection.weight"), projection));
    });
    let source = ModelSource::open(&path).unwrap();
    let clip = source.component(Part::TextEncoder).unwrap();
    recorded.assert_part(Part::TextEncoder, &clip.checkpoint);
    let ignored: Vec<String> = source.ignored.iter().map(ToString::to_string).collect();
    assert!(
        ignored[0].contains("clip_l.transformer.text_projection.weight"),
        "{ignored:?}"
    );
    let error = source
        .component(Part::TextEncoder3)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("needs text_encoder_3; expected them in the same file"),
        "{error}"
    );
    let index = source.index_fields().unwrap();
    assert_eq!(index["text_encoder_3"], json!([null, null]));

    for prefix in ["", DENOISER] {
        recorded.write(&path, &[], |tensors| keep(tensors, DENOISER, prefix));
        let source = ModelSource::open(&path).unwrap();
        let transformer = source.component(Part::Transformer).unwrap();
        recorded.assert_part(Part::Transformer, &transformer.checkpoint);
        let error = source.component(Part::Vae).unwrap_err().to_string();
        assert!(
            error.contains("needs vae, text_encoder, text_encoder_2;"),
            "{error}"
        );
    }
}

#[test]
fn the_norms_and_the_second_attention_tell_the_models_apart() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file.safetensors");
    let recorded = Recorded::read("sd35");
    for (left_out, family, recipe) in [
        (&["attn2."][..], Family::Sd35Large, "sd35-large"),
        (&["attn2.", ".ln_"], Family::Sd3, "sd3"),
    ] {
        recorded.write(&path, &[], |tensors| {
            tensors.retain(|(name, _)| !left_out.iter().any(|part| name.contains(part)));
        });
        let source = ModelSource::open(&path).unwrap();
        assert_eq!(source.family, family);
        let error = source
            .expect_family(Family::Sd35Medium, "x.yml")
            .unwrap_err();
        assert!(
            error.to_string().ends_with(&format!("use {recipe}")),
            "{error}"
        );
    }
}
