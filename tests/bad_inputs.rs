//! Bad inputs by the hundred. Each ends with its exit code and one clear line, without a panic, and nothing is written.
//! `scripts/bad_inputs` runs these tests alone.

use std::collections::BTreeMap;
use std::path::Path;

use maxdiff::config::{self, Config, Verb};
use maxdiff::models::clip::ClipTextConfig;
use maxdiff::models::unet::UNet2DConditionConfig;
use maxdiff::models::vae::AutoencoderKlConfig;
use maxdiff::recipe::{self, Step};
use maxdiff::shard::{DeviceDescription, Mesh, Parallelism};
use rayon::prelude::*;
use serde_json::{Map, Value, json};

use crate::common::{program, text};

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/tiny.yml");

/// Values that no size has.
fn wrong_sizes() -> [Value; 8] {
    [
        json!(0),
        json!(-1),
        json!(1u64 << 40),
        json!(1u64 << 62),
        json!(1.5),
        json!("x"),
        json!([]),
        json!({}),
    ]
}

#[test]
fn every_command_line_ends_with_its_code_and_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    std::fs::create_dir(at("folder")).unwrap();
    for name in ["empty", "empty.safetensors"] {
        std::fs::write(at(name), "").unwrap();
    }
    std::fs::write(at("broken.yml"), "a: [").unwrap();
    let wan = "model_name: wan2.1\nmodel_type: T2V\nflow_shift: 5.0\n";
    std::fs::write(at("wan.yml"), wan).unwrap();
    std::fs::write(at("latin1.yml"), b"run_name: \xe9\n").unwrap();
    std::fs::write(at("large.yml"), "#".repeat((1 << 20) + 1)).unwrap();
    for (name, config) in [
        (
            "wrong_size",
            r#"{"block_out_channels": [0, 320, 640, 1280]}"#,
        ),
        ("wrong_class", r#"{"_class_name": "UNet3DConditionModel"}"#),
        (
            "quark",
            r#"{"quantization_config": {"quant_method": "quark"}}"#,
        ),
    ] {
        std::fs::create_dir_all(at(name).join("unet")).unwrap();
        std::fs::write(at(name).join("unet/config.json"), config).unwrap();
    }
    for name in ["pipe", "pipe.safetensors"] {
        let made = std::process::Command::new("mkfifo").arg(at(name)).status();
        assert!(made.unwrap().success());
    }
    let before = files_below(dir.path());
    let lines: Vec<&str> = include_str!("data/bad_inputs.txt")
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .collect();
    let wrong: Vec<String> = lines
        .par_iter()
        .filter_map(|line| problem(dir.path(), line))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    assert_eq!(files_below(dir.path()), before);
}

/// What is wrong with the end of a line of the file.
fn problem(dir: &Path, line: &str) -> Option<String> {
    let mut parts = line.splitn(3, " | ");
    let mut part = || parts.next().unwrap();
    let (code, expected, words) = (part(), part(), part());
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let words = words.split("  ").map(|word| {
        let folders = [('@', "configs"), ('%', "tests")];
        let placed = folders.iter().find_map(|(sign, folder)| {
            let rest = word.strip_prefix(*sign)?;
            Some(root.join(folder).join(rest).display().to_string())
        });
        placed.unwrap_or_else(|| word.to_owned())
    });
    let words: Vec<String> = words.collect();
    problem_of(dir, code.parse().unwrap(), expected, &words)
}

/// What is wrong with the end of a call in `dir`: it is another than `code` and one line that contains `expected`.
fn problem_of(dir: &Path, code: i32, expected: &str, words: &[String]) -> Option<String> {
    let output = program(words)
        .current_dir(dir)
        .env("HF_HUB_OFFLINE", "1")
        .env("HF_HUB_CACHE", dir.join("hub"))
        .env("MAXDIFF_PLUGIN_DIR", dir.join("plugins"))
        .output()
        .unwrap();
    let said = text(&output.stderr);
    let errors = said.lines().filter(|line| line.starts_with("error: "));
    let is_right = output.status.code() == Some(code)
        && said.contains(expected)
        && !said.contains("panicked")
        && errors.count() == 1
        && output.stdout.is_empty();
    (!is_right).then(|| format!("{words:?}: {}\n{said}", output.status))
}

/// Sizes of the files below a folder, by path.
fn files_below(dir: &Path) -> BTreeMap<String, u64> {
    let mut files = BTreeMap::new();
    let mut folders = vec![dir.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let metadata = path.symlink_metadata().unwrap();
            files.insert(path.display().to_string(), metadata.len());
            if metadata.is_dir() {
                folders.push(path);
            }
        }
    }
    files
}

#[test]
fn every_key_refuses_what_is_not_of_its_type_or_range() {
    let dir = tempfile::tempdir().unwrap();
    let mut cases = Vec::new();
    for name in config::names() {
        let key = config::explain_json(name).unwrap();
        let is = |kind: &str| key["type"].as_str().unwrap().starts_with(kind);
        let wrong: &[&str] = if is("boolean") {
            // A key may be empty whose default is.
            match key["default"] == "" {
                true => &["maybe", "1"],
                false => &["maybe", "1", ""],
            }
        } else if is("integer") || is("float") {
            match key["range"].is_null() {
                true => &["x", "nan"],
                false => &["x", "nan", "-7", "inf"],
            }
        } else if is("one of") {
            &["nothing of that name"]
        } else if (is("list") || is("dict")) && !key["type"].to_string().contains("path of such") {
            &["3", "x: ["]
        } else {
            &[]
        };
        cases.extend(wrong.iter().map(|value| (name, format!("{name}={value}"))));
    }
    assert!(cases.len() > 250, "{}", cases.len());
    let check = |(name, word): &(&str, String)| {
        let words = ["config", "check", TINY, word].map(str::to_owned);
        problem_of(dir.path(), 2, name, &words)
    };
    let wrong: Vec<String> = cases.par_iter().filter_map(check).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    assert!(files_below(dir.path()).is_empty());
}

/// Every number of the default configuration of each part of a model, as every wrong size.
fn wrong_configurations() -> Vec<(&'static str, String, Map<String, Value>)> {
    // Each takes one of the wrong numbers, such as 0.
    const MAY_BE_ANY: [&str; 5] = [
        "eos_token_id",
        "projection_dim",
        "downsample_padding",
        "num_hidden_layers",
        "transformer_layers_per_block",
    ];
    let parts = [
        (
            "unet",
            serde_json::to_value(UNet2DConditionConfig::default()),
        ),
        (
            "text_encoder",
            serde_json::to_value(ClipTextConfig::default()),
        ),
        ("vae", serde_json::to_value(AutoencoderKlConfig::default())),
    ];
    let mut wrong = Vec::new();
    for (part, fields) in parts {
        let fields = fields.unwrap().as_object().unwrap().clone();
        for (name, _) in fields.iter().filter(|(_, value)| value.is_u64()) {
            for size in wrong_sizes() {
                if !(size.is_number() && MAY_BE_ANY.contains(&name.as_str())) {
                    let mut fields = fields.clone();
                    fields.insert(name.clone(), size);
                    wrong.push((part, name.clone(), fields));
                }
            }
        }
    }
    wrong
}

#[test]
fn every_size_of_a_model_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/configs/base15.yml");
    let cases = wrong_configurations();
    assert!(cases.len() > 150, "{}", cases.len());
    let check = |(number, (part, name, fields)): (usize, &(&str, String, Map<String, Value>))| {
        let model = dir.path().join(number.to_string());
        for other in ["unet", "text_encoder", "vae"] {
            let fields = match other == *part {
                true => Value::Object(fields.clone()).to_string(),
                false => "{}".to_owned(),
            };
            std::fs::create_dir_all(model.join(other)).unwrap();
            std::fs::write(model.join(other).join("config.json"), fields).unwrap();
        }
        let before = files_below(&model);
        let model_word = format!("pretrained_model_name_or_path={number}");
        let words = ["lower", recipe, &model_word].map(str::to_owned);
        let problem = problem_of(
            dir.path(),
            2,
            &format!("{number}/{part}/config.json"),
            &words,
        );
        problem
            .or_else(|| (files_below(&model) != before).then(|| format!("{number}: changed")))
            .map(|problem| format!("{part} {name} = {}: {problem}", fields[name]))
    };
    let wrong: Vec<String> = cases.par_iter().enumerate().filter_map(check).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn the_largest_sizes_make_programs_or_errors() {
    let tiny = std::fs::read_to_string(TINY).unwrap();
    let mesh = Mesh::new(&Parallelism::default(), &DeviceDescription::numbered(1, 1)).unwrap();
    for word in [
        "unet_config.block_out_channels=[1048576, 1048576]",
        "unet_config.cross_attention_dim=1048576",
        "unet_config.conv_in_kernel=99",
        "unet_config.addition_time_embed_dim=1048576",
        "unet_config.projection_class_embeddings_input_dim=1048576",
        "unet_config.in_channels=1048576",
        "resolution=8192",
        "per_device_batch_size=65536",
        "text_encoder_config.hidden_size=1048576",
        "text_encoder_config.vocab_size=1048576",
        "text_encoder_config.max_position_embeddings=1048576",
    ] {
        let words = [word.to_owned()];
        for (verb, step) in [(Verb::Lower, Step::Denoise), (Verb::Train, Step::Train)] {
            let Ok(loaded) = Config::from_text("tiny.yml", &tiny, &words, Some(verb)) else {
                continue;
            };
            // Only that it comes back counts.
            let _ = recipe::trace(&loaded.config, step, &mesh);
        }
    }
}
