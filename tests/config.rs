//! The configuration as its user meets it: the files that are shipped, a file of MaxDiffusion, the document, the program.

use std::path::{Path, PathBuf};
use std::process::Output;

use crate::common::{self, text};
use maxdiff::config::{Config, DatasetType, Hardware, Loaded, Verb, write_markdown};
use maxdiff::models::Family;
use maxdiff::recipe;
use maxdiff::schedulers::SchedulerKind;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn shipped() -> Vec<PathBuf> {
    let mut files: Vec<_> = std::fs::read_dir(root().join("configs"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "yml"))
        .collect();
    files.sort();
    files
}

fn load(path: &Path, overrides: &[&str], verb: Option<Verb>) -> Loaded {
    let overrides: Vec<String> = overrides.iter().map(|w| (*w).to_owned()).collect();
    Config::load(path, &overrides, verb).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

#[test]
fn every_shipped_file_loads_without_a_warning() {
    let files = shipped();
    let names: Vec<_> = files
        .iter()
        .map(|p| p.file_name().unwrap().to_str().unwrap())
        .collect();
    for name in [
        "base14",
        "base15",
        "base21",
        "base_xl",
        "base_xl_lcm",
        "base_xl_lightning",
        "emoji",
        "quickstart",
        "refiner_xl",
        "sdxl_turbo",
        "shapes",
    ] {
        assert!(
            names.contains(&format!("{name}.yml").as_str()),
            "{name} is missing"
        );
    }
    for file in &files {
        for verb in [
            None,
            Some(Verb::Generate),
            Some(Verb::Compile),
            Some(Verb::Lower),
        ] {
            let loaded = load(file, &["quantization=int8"], verb);
            assert_eq!(loaded.warnings, [""; 0], "{}", file.display());
            loaded.config.denoiser_config_json().unwrap();
        }
    }
}

#[test]
fn the_small_models_train() {
    for name in ["quickstart", "shapes", "emoji"] {
        let path = root().join(format!("configs/{name}.yml"));
        let config = load(&path, &["quantization=int8"], Some(Verb::Train)).config;
        assert!(matches!(
            config.dataset_type,
            DatasetType::Shapes | DatasetType::Folder
        ));
        let unet = config.denoiser_config_json().unwrap();
        let model = recipe::model(&config, None).unwrap();
        assert_eq!(model.family, Family::Pixels);
        assert_eq!(unet["sample_size"], model.sample_size[0]);
        let text = config.text_encoder_config_json().unwrap().unwrap();
        assert_eq!(text["hidden_size"], unet["cross_attention_dim"]);
    }
}

#[test]
fn the_large_models_have_their_unets() {
    for (name, side, width) in [
        ("base14", 64, 768),
        ("base15", 64, 768),
        ("base21", 96, 1024),
        ("base_xl", 128, 2048),
        ("base_xl_lcm", 128, 2048),
        ("base_xl_lightning", 128, 2048),
        ("refiner_xl", 128, 1280),
    ] {
        let path = root().join(format!("configs/{name}.yml"));
        let config = load(&path, &[], Some(Verb::Lower)).config;
        let unet = config.denoiser_config_json().unwrap();
        assert_eq!(unet["cross_attention_dim"], width);
        let model = recipe::model(&config, None).unwrap();
        assert_eq!(Some(model.family), config.model_family);
        assert_eq!(model.sample_size, [side; 2]);
        assert_eq!(unet["sample_size"], side);
    }
}

#[test]
fn samples_that_a_family_does_not_have_are_refused_by_their_size() {
    let error = |words: &[&str]| {
        let path = root().join("configs/base15.yml");
        let config = load(&path, words, None).config;
        recipe::model(&config, None).unwrap_err().to_string()
    };
    let own = |channels: usize| {
        format!("unet_config={{in_channels: {channels}, out_channels: {channels}}}")
    };
    let found = error(&["resolution=500"]);
    assert!(
        found.contains("resolution=500 is not a multiple of 8"),
        "{found}"
    );
    assert!(found.ends_with("nearest: 496 and 504"), "{found}");
    for channels in [3, 5, 16] {
        let found = error(&[&own(channels), "train_new_unet=True"]);
        let expected =
            format!("in_channels = {channels} is not supported; expected 4, the channels");
        assert!(found.contains(&expected), "{found}");
    }
    let found = error(&["pixel_unshuffle=2"]);
    assert!(
        found.contains("Stable Diffusion 1.x works on latents"),
        "{found}"
    );
    let found = error(&[
        "model_family=",
        &own(5),
        "train_new_unet=True",
        "pixel_unshuffle=2",
    ]);
    assert!(
        found.contains("expected 12, the colours of 2x2 pixels"),
        "{found}"
    );
}

#[test]
fn a_whole_file_of_maxdiffusion_loads() {
    let path = root().join("tests/data/base_xl_full.yml");
    let text = std::fs::read_to_string(&path).unwrap();
    let mut keys: Vec<&str> = text
        .lines()
        .filter_map(|l| l.split_once(':').map(|(k, _)| k))
        .filter(|k| {
            k.chars()
                .all(|c| c.is_ascii_lowercase() || c == '_' || c.is_ascii_digit())
        })
        .collect();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), 108);
    let known = maxdiff::config::names();
    assert!(keys.iter().all(|k| known.contains(k)));

    let Loaded {
        config, warnings, ..
    } = load(&path, &[], None);
    assert_eq!(warnings.len(), 3, "{warnings:?}");
    assert!(warnings[0].ends_with("enable_mllog: given twice with the same value"));
    assert!(warnings[1].contains("center_crop: has no effect: it needs dataset_type=folder"));
    assert!(warnings[2].contains("controlnet_image: has no effect"));
    assert_eq!(config.hardware, Hardware::Tpu);
    assert_eq!(config.sampler(), SchedulerKind::Euler);
    assert_eq!(config.learning_rate, 4e-7);
    assert_eq!(config.adam_eps, 1e-8);

    // Apart from what the file says for itself, its values are the defaults of the schema.
    let mut same = load(
        &path,
        &[
            "hardware=auto",
            "prompt=[]",
            "negative_prompt=",
            "revision=main",
            "jax_cache_dir=auto",
        ],
        None,
    )
    .config;
    same.controlnet_image = Default::default();
    same.norm_num_groups = None;
    // MaxDiffusion ignores the one, and its folder for the other is one in /tmp.
    same.center_crop = true;
    same.dataset_save_location = String::new();
    assert_eq!(same, Config::from_text("", "", &[], None).unwrap().config);
}

#[test]
fn the_keys_of_maxdiffusions_base15_are_taken() {
    let path = "tests/data/base15_full.yml";
    for verb in ["generate", "compile", "lower"] {
        let output = program(&["config", "check", path, "--verb", verb]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    }
    let lowered = program(&["lower", path, "--json"]);
    assert_eq!(lowered.status.code(), Some(0), "{}", text(&lowered.stderr));
}

#[test]
fn the_document_is_current() {
    let written = std::fs::read_to_string(root().join("docs/config.md")).unwrap();
    assert!(
        written == write_markdown(),
        "docs/config.md is out of date; run: cargo run -- config explain --markdown > docs/config.md"
    );
}

fn program(args: &[&str]) -> Output {
    let mut program = common::program(args);
    program.current_dir(root()).output().unwrap()
}

#[test]
fn the_program_checks_and_explains() {
    let good = program(&[
        "config",
        "check",
        "configs/base_xl.yml",
        "quantization=int8",
        "--json",
    ]);
    assert_eq!(good.status.code(), Some(0));
    let report: serde_json::Value = serde_json::from_slice(&good.stdout).unwrap();
    assert_eq!(report["ok"], true);
    assert_eq!(report["config"]["quantization"], "int8");
    let places = &report["places"];
    assert_eq!(places["quantization"], serde_json::json!(["command line"]));
    let model = places["pretrained_model_name_or_path"][0].as_str();
    assert!(
        model.unwrap().starts_with("configs/base_xl.yml:"),
        "{places}"
    );
    assert_eq!(places["clip_skip"], serde_json::Value::Null);
    let shown = program(&["config", "check", "configs/base_xl.yml", "seed=1"]);
    assert!(text(&shown.stdout).contains("\nseed: 1  # command line\n"));

    let bad = program(&[
        "config",
        "check",
        "configs/base_xl.yml",
        "quantisation=int8",
        "seed=x",
    ]);
    assert_eq!(bad.status.code(), Some(2));
    assert_eq!(
        text(&bad.stderr),
        "error: 2 errors in the configuration:\n  \
         Key quantisation was passed at the command line but isn't in config. Did you mean quantization?\n  \
         command line: seed: expected integer, found string 'x'\n"
    );
    let bad = program(&["config", "check", "configs/base_xl.yml", "seed=x", "--json"]);
    assert_eq!(bad.status.code(), Some(2));
    let report: serde_json::Value = serde_json::from_slice(&bad.stdout).unwrap();
    assert_eq!(report["errors"][0]["key"], "seed");
    assert_eq!(report["errors"][0]["place"], "command line");

    let verb = program(&[
        "config",
        "check",
        "configs/base_xl.yml",
        "seed=1",
        "--verb",
        "lower",
    ]);
    assert_eq!(verb.status.code(), Some(2));
    assert!(text(&verb.stderr).contains("has no effect on `lower`"));

    let explained = program(&["config", "explain", "quantization"]);
    assert_eq!(explained.status.code(), Some(0));
    assert!(text(&explained.stdout).starts_with("quantization\n  Quantization mode"));
    assert_eq!(
        program(&["config", "explain", "quantisation"])
            .status
            .code(),
        Some(2)
    );
    assert_eq!(program(&["config", "explode"]).status.code(), Some(2));
}
