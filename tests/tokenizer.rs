//! Tokenizers from folders: the ids of transformers' CLIPTokenizer, and files that are none.

use std::fs;
use std::path::{Path, PathBuf};

use maxdiff::data::{DataError, Tokenizer};
use serde_json::{Value, json};
use tempfile::TempDir;

fn golden(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tokenizer");
    folder.join(name)
}

fn golden_json(name: &str) -> Value {
    serde_json::from_slice(&fs::read(golden(name)).unwrap()).unwrap()
}

/// A folder with the recorded vocabulary and these files of a variant.
fn checkpoint(variant: &Value) -> TempDir {
    let dir = TempDir::new().unwrap();
    for name in ["vocab.json", "merges.txt"] {
        fs::copy(golden(name), dir.path().join(name)).unwrap();
    }
    for (name, content) in variant["files"].as_object().unwrap() {
        fs::write(dir.path().join(name), content.to_string()).unwrap();
    }
    dir
}

fn ids(value: &Value) -> Vec<i32> {
    let ids = value.as_array().unwrap().iter();
    ids.map(|id| id.as_i64().unwrap() as i32).collect()
}

/// Compares the recorded ids of a variant with those of a tokenizer; returns how many prompts.
fn compare(tokenizer: &Tokenizer, cases: &Value, variant: &Value) -> usize {
    let length = cases["length"].as_u64().unwrap() as usize;
    let padding = variant["pad"].as_i64().unwrap() as i32;
    let (rows, first) = (&variant["ids"], &cases["variants"][0]["ids"]);
    for (k, row) in rows.as_array().unwrap().iter().enumerate() {
        let mut expected = ids(if row.is_null() { &first[k] } else { row });
        expected.resize(length, padding);
        let prompt = cases["prompts"][k].as_str().unwrap();
        let found = tokenizer.encode(prompt).unwrap().ids;
        assert_eq!(found, expected, "{}: {prompt:?}", variant["name"]);
    }
    rows.as_array().unwrap().len()
}

#[test]
fn ids_are_those_of_transformers() {
    let cases = golden_json("cases.json");
    let mut compared = 0;
    for variant in cases["variants"].as_array().unwrap() {
        let dir = checkpoint(variant);
        let tokenizer = Tokenizer::from_dir(dir.path(), 77).unwrap();
        compared += compare(&tokenizer, &cases, variant);
        let says = variant["files"]["tokenizer_config.json"]["model_max_length"].as_u64();
        assert_eq!(
            tokenizer.max_length(),
            says.map(|l| l as usize),
            "{}",
            variant["name"]
        );
    }
    assert!(compared >= 2 * 600, "{compared}");
}

/// A `tokenizer.json` of the recorded vocabulary, with merges as pairs or as lines.
fn whole_file(pairs: bool, added: &Value) -> Value {
    let merges = fs::read_to_string(golden("merges.txt")).unwrap();
    let merges: Vec<Value> = merges
        .lines()
        .skip(1)
        .map(|line| match pairs {
            true => json!(line.split(' ').collect::<Vec<_>>()),
            false => json!(line),
        })
        .collect();
    json!({
        "version": "1.0",
        "added_tokens": added,
        // The steps are CLIP's whatever the file says, as in transformers.
        "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {
            "type": "BPE", "dropout": 0.5, "unk_token": null, "end_of_word_suffix": "</w>",
            "vocab": golden_json("vocab.json"), "merges": merges
        }
    })
}

#[test]
fn a_whole_file_gives_the_same_ids() {
    let cases = golden_json("cases.json");
    for (k, pairs) in [(0, true), (1, false)] {
        let variant = &cases["variants"][k];
        let dir = checkpoint(variant);
        // The whole file is preferred: those beside it may be anything.
        fs::write(dir.path().join("merges.txt"), "broken").unwrap();
        let json = whole_file(pairs, &json!([])).to_string();
        fs::write(dir.path().join("tokenizer.json"), json).unwrap();
        let tokenizer = Tokenizer::from_dir(dir.path(), 77).unwrap();
        compare(&tokenizer, &cases, variant);
    }
    // Without a configuration the added tokens of the file count: here, that the end token is
    // looked for in the normalized text.
    let end = golden_json("vocab.json")["<|endoftext|>"].as_i64().unwrap();
    let token = json!({"id": end, "content": "<|endoftext|>", "single_word": false,
        "lstrip": false, "rstrip": false, "normalized": true, "special": true});
    let dir = TempDir::new().unwrap();
    let write = |added| {
        let json = whole_file(true, &added).to_string();
        fs::write(dir.path().join("tokenizer.json"), json).unwrap();
        let tokenizer = Tokenizer::from_dir(dir.path(), 77).unwrap();
        tokenizer.pieces("<|EndOfText|>").unwrap().len()
    };
    assert_eq!(write(json!([token])), 1);
    assert!(write(json!([])) > 1);
}

#[test]
fn models_trained_here_load_from_their_folder() {
    let json = maxdiff::data::word_level_json(["a red circle"]).unwrap();
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("tokenizer.json"), &json).unwrap();
    let loaded = Tokenizer::from_dir(dir.path(), 8).unwrap();
    let expected = Tokenizer::from_json(&json, 8).unwrap();
    let text = "a green circle";
    assert_eq!(loaded.encode(text).unwrap(), expected.encode(text).unwrap());
    assert_eq!(loaded.encode(text).unwrap().unknown, ["green"]);
    assert_eq!(loaded.max_length(), None);
}

#[test]
fn words_that_do_not_fit_are_named_whole() {
    let cases = golden_json("cases.json");
    let dir = checkpoint(&cases["variants"][0]);
    let tokenizer = Tokenizer::from_dir(dir.path(), 4).unwrap();
    let dropped = |text: &str| tokenizer.encode(text).unwrap().dropped;
    assert_eq!(dropped("a cat ZYXWVU, 猫🦊"), ["ZYXWVU", ",", "猫", "🦊"]);
    assert!(dropped("a").is_empty());
}

#[test]
fn a_folder_without_tokenizer_says_what_it_holds_and_where_to_get_one() {
    let dir = TempDir::new().unwrap();
    let error = |dir: &Path| {
        let error = Tokenizer::from_dir(dir, 77).unwrap_err();
        assert!(
            matches!(error, DataError::TokenizerMissing { .. }),
            "{error}"
        );
        error.to_string()
    };
    let empty = error(dir.path());
    for expected in [
        "tokenizer.json",
        "vocab.json and merges.txt",
        "is empty",
        "Hugging Face hub",
        "openai/clip-vit-large-patch14",
    ] {
        assert!(empty.contains(expected), "{empty}");
    }
    fs::copy(golden("vocab.json"), dir.path().join("vocab.json")).unwrap();
    assert!(error(dir.path()).contains("found vocab.json;"));
    for k in 0..20 {
        fs::write(dir.path().join(format!("{k:02}.bin")), "").unwrap();
    }
    let many = error(dir.path());
    assert!(
        many.contains("00.bin, 01.bin") && many.contains("and 9 more"),
        "{many}"
    );
    assert!(error(&dir.path().join("absent")).contains("cannot be read"));
}

/// The error for a folder whose files are those of a variant but for one.
fn broken(name: &str, content: &str) -> DataError {
    let cases = golden_json("cases.json");
    let dir = checkpoint(&cases["variants"][0]);
    fs::write(dir.path().join(name), content).unwrap();
    Tokenizer::from_dir(dir.path(), 77).unwrap_err()
}

#[test]
fn malformed_lines_are_named() {
    let line = |name: &str, content: &str, expected: usize, says: &str| match broken(name, content)
    {
        DataError::TokenizerLine {
            path,
            line,
            message,
        } => {
            assert!(path.ends_with(name));
            assert_eq!(line, expected, "{message}");
            assert!(message.contains(says), "{message}");
        }
        error => panic!("{error}"),
    };
    let merges = "merges.txt";
    line(merges, "#version: 0.2\na t\nonly\n", 3, "found `only`");
    line(merges, "#version: 0.2\nc a t\n", 2, "found `c a t`");
    line(merges, "#version: 0.2\r\na t\r\n\r\n", 3, "found ``");
    line(merges, "a b", 1, "needs the token `ab`");
    line(merges, "猫 a", 1, "needs the token `猫`");
    // Both sides long, their join longer than any token.
    let long = "<|startoftext|>";
    line(merges, &format!("{long} {long}"), 1, "needs the token");
    line("vocab.json", "{\n\"a\": 1,\n\"b\": -2}", 3, "");
    line("vocab.json", "{\"a\":\n\n\"b\"}", 3, "");
    line("vocab.json", "[]", 1, "");
    line("tokenizer_config.json", "{\n\"pad_token\": 3}", 2, "");
    line("special_tokens_map.json", "", 1, "");
    line("added_tokens.json", "{\"x\": 1.5}", 1, "");
}

#[test]
fn what_would_shift_ids_is_refused() {
    let says =
        |name: &str, content: &Value, expected: &str| match broken(name, &content.to_string()) {
            DataError::Tokenizer { message, .. } => {
                assert!(message.contains(expected), "{message}")
            }
            error => panic!("{error}"),
        };
    let config = "tokenizer_config.json";
    says(
        config,
        &json!({"padding_side": "left"}),
        "padding_side left",
    );
    says(
        config,
        &json!({"truncation_side": "left"}),
        "truncation_side left",
    );
    says(
        config,
        &json!({"split_special_tokens": true}),
        "split_special_tokens",
    );
    let decoder = |id: u32| json!({"added_tokens_decoder": {(id.to_string()): {"content": "<x>"}}});
    says(config, &decoder(7), "should have the id 7");
    says(config, &decoder(u32::MAX), "should have the id 4294967295");
    says(
        "special_tokens_map.json",
        &json!({"pad_token": "<pad>"}),
        "<pad> is not in the vocabulary",
    );
    let mut vocab = golden_json("vocab.json");
    vocab["<|startoftext|>"] = json!(3_000_000_000u32);
    says("vocab.json", &vocab, "3000000000 does not fit");
}

#[test]
fn whole_files_that_are_none_are_refused() {
    let refuse = |json: &str| {
        let error = Tokenizer::from_json(json, 8).unwrap_err();
        assert!(matches!(error, DataError::Tokenizer { .. }), "{error}");
        error.to_string()
    };
    let model = |model: Value| refuse(&json!({"version": "1.0", "model": model}).to_string());
    let base = json!({"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []});
    let with = |key: &str, value: Value| {
        let mut model = base.clone();
        model[key] = value;
        model
    };
    assert!(model(with("merges", json!([["a", "b"]]))).contains("`ab`"));
    assert!(model(with("merges", json!(["a b c"]))).contains("merge 0"));
    assert!(model(with("continuing_subword_prefix", json!("##"))).contains("##"));
    assert!(
        model(json!({"type": "Unigram", "vocab": [["a", -1.0]]})).contains("not a tokenizer.json")
    );
    assert!(model(base.clone()).contains("<|startoftext|>"));
    refuse(&"[".repeat(100_000));
}

#[test]
fn files_of_absurd_size_are_refused() {
    let dir = TempDir::new().unwrap();
    for name in ["vocab.json", "merges.txt"] {
        let file = fs::File::create(dir.path().join(name)).unwrap();
        file.set_len(1 << 40).unwrap();
    }
    let error = Tokenizer::from_dir(dir.path(), 77).unwrap_err().to_string();
    assert!(error.contains("larger than 16 MiB"), "{error}");
}

#[test]
fn damaged_files_are_read_or_refused() {
    let cases = golden_json("cases.json");
    let dir = checkpoint(&cases["variants"][1]);
    let whole = whole_file(true, &json!([]));
    let mut refused = 0;
    let mut damage = |name: &str, content: &[u8]| {
        let path = dir.path().join(name);
        for k in 0..40 {
            let mut bytes = content.to_vec();
            // Steps through the file; the first bytes are damaged as well.
            let at = k * 7919 * 13 % bytes.len() * usize::from(k > 4) + k % 5;
            match k % 4 {
                0 => bytes.truncate(at),
                1 => bytes[at] = b'"',
                2 => bytes[at] ^= 0x81,
                _ => bytes.insert(at, b' '),
            }
            fs::write(&path, bytes).unwrap();
            match Tokenizer::from_dir(dir.path(), 77) {
                Ok(tokenizer) => assert_eq!(tokenizer.encode("a cat, 猫!").unwrap().ids.len(), 77),
                Err(_) => refused += 1,
            }
        }
        fs::write(&path, content).unwrap();
    };
    for name in ["vocab.json", "merges.txt"] {
        damage(name, &fs::read(golden(name)).unwrap());
    }
    let config = &cases["variants"][1]["files"]["tokenizer_config.json"];
    damage("tokenizer_config.json", config.to_string().as_bytes());
    damage("tokenizer.json", whole.to_string().as_bytes());
    assert!((60..160).contains(&refused), "{refused}");
}
