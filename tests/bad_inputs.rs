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

/// What is wrong with the end of a command line.
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
    let output = program(words)
        .current_dir(dir)
        .env("HF_HUB_OFFLINE", "1")
        .env("HF_HUB_CACHE", dir.join("hub"))
        .env("MAXDIFF_PLUGIN_DIR", dir.join("plugins"))
        .output()
        .unwrap();
    let said = text(&output.stderr);
    let errors = said.lines().filter(|line| line.starts_with("error: "));
    let is_right = output.status.code() == code.parse().ok()
        && said.contains(expected)
        && !said.contains("panicked")
        && errors.count() == 1
        && output.stdout.is_empty();
    (!is_right).then(|| format!("{line}: {}\n{said}", output.status))
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
    let mut count = 0;
    for name in config::names() {
        let key = config::explain_json(name).unwrap();
        let is = |kind: &str| key["type"].as_str().unwrap().starts_with(kind);
        let wrong: &[&str] = if is("boolean") {
            &["maybe", "1", ""]
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
        for value in wrong {
            count += 1;
            let word = format!("{name}={value}");
            let Err(errors) = Config::from_overrides(std::slice::from_ref(&word), None) else {
                panic!("{word} is accepted");
            };
            let message = errors.to_string();
            assert!(message.contains(name), "{word}: {message}");
        }
    }
    assert!(count > 250, "{count}");
}

#[test]
fn every_size_of_a_model_is_refused_or_traced() {
    let unet = serde_json::to_value(UNet2DConditionConfig::default()).unwrap();
    let clip = serde_json::to_value(ClipTextConfig::default()).unwrap();
    let vae = serde_json::to_value(AutoencoderKlConfig::default()).unwrap();
    let refused = |fields: &Value, read: &dyn Fn(Map<String, Value>) -> bool| {
        let fields = fields.as_object().unwrap();
        let numbers = fields.iter().filter(|(_, value)| value.is_u64());
        for (name, _) in numbers {
            for wrong in wrong_sizes() {
                let mut changed = fields.clone();
                changed.insert(name.clone(), wrong.clone());
                let may_be_zero = [
                    "eos_token_id",
                    "projection_dim",
                    "downsample_padding",
                    "num_hidden_layers",
                    "transformer_layers_per_block",
                ];
                let is_number = wrong.is_number() && may_be_zero.contains(&name.as_str());
                assert!(!read(changed) || is_number, "{name} = {wrong}");
            }
        }
    };
    refused(&unet, &|fields| {
        UNet2DConditionConfig::from_map(fields).is_ok()
    });
    refused(&clip, &|fields| ClipTextConfig::from_map(fields).is_ok());
    refused(&vae, &|fields| {
        AutoencoderKlConfig::from_map(fields).is_ok()
    });

    // The largest sizes that are read make programs, or errors.
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
