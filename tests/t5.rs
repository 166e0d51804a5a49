//! T5 and its tokenizer against transformers.

use crate::common::{
    Golden, assert_close, assert_same_weights, golden, rel_l2, run_recorded, unoptimized_session,
};
use maxdiff::data::Tokenizer;
use maxdiff::dtype::DType;
use maxdiff::graph::Builder;
use maxdiff::models::clip;
use maxdiff::models::t5::{ATTENTION_MASK, T5EncoderConfig, t5_encoder};
use maxdiff::nn::{Precision, Remat};
use maxdiff::shape::Shape;

/// transformers in float64, against this graph in float32, without and with padding masked.
#[test]
fn t5_matches_transformers() {
    for name in ["t5_plain", "t5_odd"] {
        let io = Golden::read(&format!("{name}/io.safetensors"));
        let checkpoint = Golden::read_folder(name, "model");
        let config = Golden::text(&format!("{name}/config.json"));
        let config = T5EncoderConfig::from_json(&config).unwrap();
        let b = Builder::new();
        let shape = Shape::new(DType::S32, io.dims("in/input_ids"));
        let ids = b.input(clip::INPUT_IDS, shape.clone(), &[]).unwrap();
        let mask = b.input(ATTENTION_MASK, shape, &[]).unwrap();
        for (output, mask) in [("out/last_hidden_state", None), ("out/masked", Some(mask))] {
            let precision = Precision::F32;
            let y = t5_encoder(&b, "t5", &config, ids, mask, precision, Remat::None).unwrap();
            b.output(output, y, None).unwrap();
        }
        assert_same_weights(&b, &checkpoint);
        let graph = b.finish();
        let results = run_recorded(&unoptimized_session(), &graph, &checkpoint, &io);
        for (output, found) in graph.outputs.iter().zip(&results) {
            assert_close(&output.name, found, &io, 1e-5);
            eprintln!(
                "{name}: {} {:.1e}",
                output.name,
                rel_l2(found, &io, &output.name)
            );
        }
    }
}

/// The recorded `tokenizer.json` with its table of replacements, which is recorded once, in `spiece.model`.
pub fn t5_tokenizer_json() -> String {
    use base64::Engine;
    let read = |name: &str| -> serde_json::Value {
        serde_json::from_str(&Golden::text(&format!("t5_tokenizer/{name}"))).unwrap()
    };
    let charsmap = &read("ids.json")["charsmap"];
    let [offset, length] = [0, 1].map(|i| charsmap[i].as_u64().unwrap() as usize);
    let pieces = std::fs::read(golden("t5_tokenizer/spiece.model")).unwrap();
    let table = base64::prelude::BASE64_STANDARD.encode(&pieces[offset..offset + length]);
    let mut document = read("tokenizer.json");
    document["normalizer"]["precompiled_charsmap"] = table.into();
    document.to_string()
}

#[test]
fn tokens_of_t5_are_transformers() {
    let recorded: serde_json::Value =
        serde_json::from_str(&Golden::text("t5_tokenizer/ids.json")).unwrap();
    let ids = |value: &serde_json::Value| -> Vec<i32> {
        let ids = value.as_array().unwrap().iter();
        ids.map(|id| id.as_i64().unwrap() as i32).collect()
    };
    let texts: Vec<&str> = recorded["texts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| t.as_str().unwrap())
        .collect();
    assert!(texts.len() > 500);
    let dir = tempfile::tempdir().unwrap();
    let whole = dir.path().join("tokenizer.json");
    std::fs::write(&whole, t5_tokenizer_json()).unwrap();
    let pieces = golden("t5_tokenizer/spiece.model");
    for path in [dir.path().to_owned(), whole, pieces] {
        let read = |length| Tokenizer::t5_from_path(&path, length).unwrap();
        let tokenizer = read(512);
        assert_eq!(
            tokenizer.vocabulary_size() as u64,
            recorded["vocabulary"].as_u64().unwrap()
        );
        for (text, expected) in texts.iter().zip(recorded["ids"].as_array().unwrap()) {
            let pieces = tokenizer.pieces(text).unwrap();
            let found: Vec<i32> = pieces.iter().map(|piece| piece.id).collect();
            assert_eq!(found, ids(expected), "{}: {text:?}", path.display());
        }
        for (length, rows) in recorded["padded"].as_object().unwrap() {
            let tokenizer = read(length.parse().unwrap());
            for (text, expected) in texts.iter().zip(rows.as_array().unwrap()) {
                let found = tokenizer.encode(text).unwrap().ids;
                assert_eq!(found, ids(expected), "{length}: {text:?}");
            }
        }
        let dropped = read(12)
            .encode("red blue green a b c d e f g h i j k")
            .unwrap();
        let warning = dropped.warnings().join("; ");
        assert!(
            warning.contains("longer than 12 tokens") && warning.contains("\"k\""),
            "{warning}"
        );
    }
}

/// A folder without tokenizer says what to put there; damaged files are errors and no panics.
#[test]
fn tokenizers_that_are_none_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let error = |path: &std::path::Path| Tokenizer::t5_from_path(path, 16).unwrap_err().to_string();
    let missing = error(dir.path());
    assert!(
        missing.contains("spiece.model") && missing.contains("tokenizer.json"),
        "{missing}"
    );
    let clip = dir.path().join("tokenizer.json");
    std::fs::write(&clip, r#"{"model": {"type": "BPE"}}"#).unwrap();
    assert!(error(&clip).contains("its model is of type BPE; expected Unigram"));

    let pieces = std::fs::read(golden("t5_tokenizer").join("spiece.model")).unwrap();
    let path = dir.path().join("spiece.model");
    let mut refused = 0;
    // Cut at every 1/64, and a byte turned at many places: an error or a tokenizer that works, never a panic.
    for i in 0..64 {
        std::fs::write(&path, &pieces[..pieces.len() * i / 64]).unwrap();
        refused += usize::from(Tokenizer::t5_from_path(&path, 16).is_err());
    }
    assert!(refused > 48, "{refused}");
    for i in 0..200 {
        let mut damaged = pieces.clone();
        let at = pieces.len() * i / 200;
        damaged[at] ^= 1 << (i % 8);
        std::fs::write(&path, &damaged).unwrap();
        if let Ok(tokenizer) = Tokenizer::t5_from_path(&path, 16) {
            tokenizer.encode("ﬁne café １２３ 灯塔").unwrap();
        }
    }
}
