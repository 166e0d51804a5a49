//! Fine-tuning of models trained on pixels, as a user runs it: an earlier run's folder is the model.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::common::{json, keep_programs, without_optimizations};
use maxdiff::metrics::read_json_lines;
use maxdiff::weights::Checkpoint;

/// A folder with the runs of one test.
struct Place(tempfile::TempDir);

const LORA: [&str; 5] = [
    "train_text_encoder=True",
    "lora_rank=2",
    // The UNet of the smallest recipe has no attention.
    "lora_target_modules=.*",
    "ema_decay=0",
    "learning_rate=1e-2",
];

impl Place {
    /// With a run that never saw one colour and one kind.
    fn new() -> Place {
        let place = Place(tempfile::tempdir().unwrap());
        let without = "shapes_without=[purple, triangle]";
        place.train("base", &[without, "max_train_steps=2"]);
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, verb: &str, run: &str, words: &[&str]) -> Command {
        let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny.yml");
        let mut command = Command::new(env!("CARGO_BIN_EXE_maxdiff-rs"));
        without_optimizations(&mut command)
            .arg(verb)
            .arg(recipe)
            .arg(format!("output_dir={}", self.0.path().display()))
            .arg(format!("run_name={run}"))
            .arg(keep_programs())
            .args(words)
            .stdin(Stdio::null());
        command
    }

    fn base(&self) -> String {
        format!(
            "pretrained_model_name_or_path={}",
            self.path("base").display()
        )
    }

    fn train(&self, run: &str, words: &[&str]) -> Output {
        succeed(&mut self.command("train", run, words))
    }

    /// Training that starts from the base run.
    fn tune(&self, run: &str, words: &[&str]) -> Output {
        let base = self.base();
        self.train(
            run,
            &[&["train_new_unet=False", &base, "max_train_steps=2"], words].concat(),
        )
    }

    /// What fine-tuning says that is refused.
    fn refused(&self, words: &[&str]) -> String {
        let base = self.base();
        let words = [&["train_new_unet=False", base.as_str()], words].concat();
        let output = self.command("train", "refused", &words).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    /// The pixels that a run draws.
    fn drawn(&self, run: &str, words: &[&str]) -> Vec<u8> {
        let output = succeed(&mut self.command("generate", run, words));
        let path = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
        image::open(path).unwrap().to_rgb8().into_raw()
    }

    fn losses(&self, run: &str) -> Vec<f64> {
        let lines = read_json_lines(&self.path(run).join("metrics.jsonl")).unwrap();
        let losses = lines
            .lines
            .iter()
            .map(|line| line["learning/loss"].as_f64());
        losses.map(Option::unwrap).collect()
    }
}

fn succeed(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

/// Updates of a model of pixels are trained beside a run's weights, in float and in int8, continue bit for bit, and are drawn
/// with beside that run, where they are a LoRA like any other.
#[test]
fn low_rank_updates_of_a_run_are_trained_and_drawn_with() {
    let place = Place::new();
    let data = [
        "shapes_with=purple",
        "shapes_without=triangle",
        "max_train_samples=6",
    ];
    let words = [&LORA[..], &data].concat();
    place.tune("whole", &words);
    let checkpoint = place.path("whole/checkpoints/step-00000002");
    let names = fs::read_dir(&checkpoint).unwrap();
    let mut names: Vec<String> = names
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let expected = [
        "config.json",
        "manifest.json",
        "optimizer.safetensors",
        "pytorch_lora_weights.safetensors",
        "state.json",
    ];
    assert_eq!(names, expected);
    let lora = checkpoint.join("pytorch_lora_weights.safetensors");
    let factors = Checkpoint::open(&lora).unwrap();
    for part in ["unet.", "text_encoder."] {
        assert!(factors.names().any(|name| name.starts_with(part)), "{part}");
    }
    // Stopped and continued.
    let schedule = "learning_rate_schedule_steps=2";
    place.tune(
        "parts",
        &[&words[..], &[schedule, "max_train_steps=1"]].concat(),
    );
    place.tune("parts", &[&words[..], &[schedule]].concat());
    assert_eq!(place.losses("parts"), place.losses("whole"));
    let again = place.path("parts/checkpoints/step-00000002/pytorch_lora_weights.safetensors");
    assert_eq!(fs::read(&lora).unwrap(), fs::read(again).unwrap());
    // int8 follows float.
    place.tune(
        "int8",
        &[&words[..], &["quantization=int8", "sample_every=2"]].concat(),
    );
    assert!(place.path("int8/samples/step-00000002-00001.png").is_file());
    for (a, b) in place.losses("whole").iter().zip(place.losses("int8")) {
        assert!(*a != b && (a - b).abs() < 0.05 * a, "{a} {b}");
    }
    let base = place.base();
    let prompt = "prompt=a large purple circle on a white background";
    let own = place.drawn("whole", &[&base, prompt]);
    let adapter = format!(
        "lora_config={{lora_model_name_or_path: ['{}']}}",
        lora.display()
    );
    assert_eq!(own, place.drawn("base", &[prompt, &adapter]));
    assert_ne!(own, place.drawn("base", &[prompt]));
    let output = place
        .command("quantize", "whole", &[&base, "quantization=int8"])
        .args(["--output", "x"])
        .output();
    let log = String::from_utf8_lossy(&output.unwrap().stderr).into_owned();
    assert!(log.contains("quantize that model"), "{log}");
}

/// A token for a kind of shape, with updates, is read by the fixed reader as the kind that it stands for.
#[test]
fn a_new_word_of_a_run_is_trained_and_read_back() {
    let place = Place::new();
    let words = "shapes_words={triangle: <sks>}";
    let token = ["placeholder_token=<sks>", "initializer_token=square", words];
    place.tune(
        "token",
        &[&LORA[..], &token, &["shapes_with=triangle"]].concat(),
    );
    let checkpoint = place.path("token/checkpoints/step-00000002");
    assert!(checkpoint.join("learned_embeds.safetensors").is_file());
    let base = place.base();
    let held_out = [
        "held_out_prompts=2",
        "shapes_with=triangle",
        "--json",
        words,
        &base,
    ];
    let report = json(&succeed(&mut place.command("generate", "token", &held_out)));
    assert_eq!(report["score"]["prompts"], 2);
    for image in report["images"].as_array().unwrap() {
        assert!(image["prompt"].as_str().unwrap().contains("<sks>"));
    }
    // Without the run nobody knows the word.
    let output = place
        .command("generate", "base", &held_out)
        .output()
        .unwrap();
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(log.contains("does not know"), "{log}");
}

/// All weights of a run are trained further, as a run of their own.
#[test]
fn a_run_is_trained_further_as_a_whole() {
    let place = Place::new();
    place.tune(
        "further",
        &["max_train_steps=1", "text_encoder_learning_rate=1e-3"],
    );
    let weights = |run: &str, step: u64, folder: &str| {
        let file = format!(
            "{run}/checkpoints/step-{step:08}/{folder}/diffusion_pytorch_model.safetensors"
        );
        fs::read(place.path(&file)).unwrap()
    };
    // It starts from the moving average, which begins anew.
    assert_ne!(
        weights("further", 1, "unet"),
        weights("base", 2, "unet_ema")
    );
    assert_eq!(
        weights("further", 1, "unet").len(),
        weights("base", 2, "unet_ema").len()
    );
    let prompt = "prompt=a large red circle on a white background";
    let named = format!(
        "pretrained_model_name_or_path={}",
        place.path("further").display()
    );
    assert_eq!(
        place.drawn("further", &[prompt]),
        place.drawn("elsewhere", &[prompt, &named])
    );

    let refused = |words: &[&str]| place.refused(words);
    assert!(refused(&["train_text_encoder=False"]).contains("trained with its text encoder"));
    assert!(refused(&["lora_rank=2"]).contains("ema_decay=0.9"));
    let kohya = [&LORA[..], &["lora_kohya=True"]].concat();
    assert!(refused(&kohya).contains("lora_kohya has no effect"));
    let nowhere = [&LORA[..], &["pretrained_model_name_or_path=nowhere"]].concat();
    assert!(refused(&nowhere).contains("name the folder of a run"));
    let epsilon = [&LORA[..], &["prediction_type=epsilon"]].concat();
    assert!(refused(&epsilon).contains("trained with \"v_prediction\""));
    assert!(refused(&["shapes_without=[brown]"]).contains("brown"));
    let nothing = [&LORA[..], &["shapes_with=red", "shapes_without=red"]].concat();
    assert!(refused(&nothing).contains("leave captions with red"));
}
