//! `generate` with a model that somebody published, from the outside.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(name)
}

/// `generate` with the recorded SD 2.x pipeline, and `words` after its own.
fn generate(out: &Path, words: &[&str]) -> Output {
    // Finds the plugin, or says how to install it.
    common::cpu_plugin();
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/base21.yml");
    let mut command = Command::new(env!("CARGO_BIN_EXE_maxdiff-rs"));
    command
        .arg("generate")
        .arg(recipe)
        .args(words)
        .args(["hardware=cpu", "activations_dtype=float32"])
        .arg(format!("output_dir={}", out.display()))
        .arg(format!(
            "tokenizer_model_name_or_path={}",
            golden("tokenizer").display()
        ))
        // No test asks the hub.
        .env("HF_HUB_OFFLINE", "1")
        .env("HF_HUB_CACHE", out.join("hub"))
        .stdin(Stdio::null());
    let pipeline = golden("pipeline_sd21").display().to_string();
    // The recorded model is too small to be told from SD 1.x.
    for (key, value) in [
        ("pretrained_model_name_or_path=", pipeline.as_str()),
        ("model_family=", ""),
        // No test fills the user's cache.
        ("jax_cache_dir=", ""),
    ] {
        if !words.iter().any(|word| word.starts_with(key)) {
            command.arg(format!("{key}{value}"));
        }
    }
    command.output().unwrap()
}

fn json(output: &Output) -> Value {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The error of a call that must end with `code`.
fn error(code: i32, words: &[&str]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let output = generate(dir.path(), words);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{words:?}: {error}");
    error
}

fn pixels(path: &Value) -> image::RgbImage {
    image::open(path.as_str().unwrap()).unwrap().to_rgb8()
}

#[test]
fn a_picture_is_repeated_from_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let prompts = dir.path().join("prompts.txt");
    std::fs::write(
        &prompts,
        "# two pictures with settings of their own\n\na red circle --n blurry --d 7 --s 3\n\
         (a blue square:1.3), 绿色 --s 4 --l 2.5\n",
    )
    .unwrap();
    let prompts = format!("prompts_file={}", prompts.display());
    let size = ["height=16", "width=24"];
    let words = [&size[..], &[&prompts, "scheduler=unipc", "--json"]].concat();
    let drawn = json(&generate(dir.path(), &words));
    assert_eq!(drawn["images"][0]["seed"], 7);
    assert_eq!(drawn["unet_runs"], 7);
    assert!(drawn["peak_host_bytes"].as_u64() > Some(1 << 20));
    assert!(drawn["seconds"]["denoise"].as_f64() > Some(0.0));
    let second = &drawn["images"][1];
    let picture = pixels(&second["path"]);
    assert_eq!(picture.dimensions(), (24, 16));

    let path = second["path"].as_str().unwrap();
    let words = ["--from-image", path, "--json"];
    let again = json(&generate(dir.path(), &words));
    let again = &again["images"][0];
    assert_eq!(again["prompt"], "(a blue square:1.3), 绿色");
    assert_ne!(again["path"], second["path"], "nothing is overwritten");
    assert_eq!(pixels(&again["path"]), picture);
}

#[test]
fn bad_input_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.display().to_string()
    };
    let size = ["prompt=x", "height=16", "width=16"];
    let with = |words: &[&str]| error(2, &[&size[..], words].concat());

    let found = error(2, &["prompt=x", "height=15"]);
    assert!(
        found.contains("height=15 is not a multiple of 2"),
        "{found}"
    );
    assert!(found.contains("nearest: 14 and 16"), "{found}");
    let found = with(&["scheduler=plms"]);
    assert!(found.contains("valid: ddim, ddpm, pndm"), "{found}");
    let broken = format!("image={}", file("broken.png", b"no picture"));
    let found = with(&[&broken, "strength=1.5"]);
    assert!(found.contains("strength: 1.5 is out of range"), "{found}");
    let found = with(&[&broken]);
    assert!(found.contains("not a picture that can be read"), "{found}");
    let found = with(&["strength=0.5"]);
    assert!(found.contains("strength: has no effect"), "{found}");
    let found = with(&["(word:heavy)", "prompt=(word:1.2.3)"]);
    assert!(found.contains("key=value"), "{found}");
    let found = with(&["controlnet_image=x.png"]);
    assert!(found.contains("controlnet_image: has no effect"), "{found}");
    let control = ["use_controlnet=True", "controlnet_image=x.png"];
    let nowhere = "controlnet_model_name_or_path=./nowhere";
    let found = with(&[&control[..], &[nowhere]].concat());
    assert!(found.contains("name the folder of a ControlNet"), "{found}");
    let found = error(1, &[&size[..], &control].concat());
    let missing = "diffusers/controlnet-canny-sdxl-1.0 at main is not whole in the cache";
    assert!(found.contains(missing), "{found}");
    let prompts = format!("prompts_file={}", file("prompts.txt", b"a cat --w 99\n"));
    let found = error(2, &[&prompts, "height=16", "width=16"]);
    assert!(found.contains("--w 99"), "{found}");
    let lines = error(2, &["prompts_file=/nowhere.txt", "height=16", "width=16"]);
    assert!(lines.contains("/nowhere.txt"), "{lines}");
    let found = with(&[&prompts]);
    assert!(
        found.contains("prompt has no effect with prompts_file"),
        "{found}"
    );

    let folder = format!("pretrained_model_name_or_path={}", dir.path().display());
    let found = error(1, &["prompt=x", &folder]);
    assert!(found.contains("no model in this folder"), "{found}");
    assert!(found.contains("broken.png"), "{found}");
    let other = golden("pipeline_sdxl");
    let other = format!("pretrained_model_name_or_path={}", other.display());
    let found = error(2, &["prompt=x", &other, "model_family=sd2"]);
    let expected = "this is SDXL; base21.yml expects Stable Diffusion 2.x; use base_xl.yml";
    assert!(found.contains(expected), "{found}");
}
