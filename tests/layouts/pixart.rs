//! PixArt's transformer in a file with the names of its own code.

use maxdiff::models::{Denoiser, DenoiserKind, Family, Part};
use maxdiff::weights::source::ModelSource;
use serde_json::json;

use super::Recorded;

#[test]
fn a_transformer_alone_is_read_by_its_original_names() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("transformer.safetensors");
    let recorded = Recorded::read("pixart");
    recorded.write(&path, &[], |_| {});
    let source = ModelSource::open(&path).unwrap();
    assert_eq!(source.family, Family::PixArtSigma);
    let transformer = source.component(Part::Transformer).unwrap();
    recorded.assert_part(Part::Transformer, &transformer.checkpoint);
    for (key, expected) in &recorded.parts[&Part::Transformer].config {
        assert_eq!(transformer.config.get(key), Some(expected), "{key}");
    }
    Denoiser::from_map(DenoiserKind::PixArt, transformer.config.clone()).unwrap();
    let ignored: Vec<String> = source.ignored.iter().map(ToString::to_string).collect();
    assert_eq!(ignored.len(), 2, "{ignored:?}");
    let error = source.component(Part::Vae).unwrap_err().to_string();
    assert!(error.contains("needs vae, text_encoder;"), "{error}");

    // Captions of 120 tokens are alpha's.
    recorded.write(&path, &[], |tensors| {
        let name = "y_embedder.y_embedding";
        let tensor = tensors.iter_mut().find(|(n, _)| n == name).unwrap();
        tensor.1.shape.dims[0] = 120;
        tensor.1.data.truncate(tensor.1.shape.bytes());
    });
    let source = ModelSource::open(&path).unwrap();
    assert_eq!(source.family, Family::PixArtAlpha);
    let config = &source.components[&Part::Transformer].config;
    assert!(!config.contains_key("use_additional_conditions"));
    assert_eq!(config["sample_size"], json!(8));
}
