//! Training and generation as a user runs them, on the CPU plugin.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::{json, keep_programs, without_optimizations};
use maxdiff::config::{Config, Verb};
use maxdiff::data::shapes::Caption;
use maxdiff::metrics::read_json_lines;
use maxdiff::pipelines::image_file::{Recorded, read_recorded};
use maxdiff::pjrt::install::Trial;
use maxdiff::recipe;
use maxdiff::train::checkpoint::SavedCheckpoint;
use maxdiff::train::{Outcome, TrainEvent, Trainer};
use maxdiff::weights::Checkpoint;

fn maxdiff(verb: &str, out: &Path, overrides: &[&str]) -> Command {
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny.yml");
    let mut command = Command::new(env!("CARGO_BIN_EXE_maxdiff-rs"));
    without_optimizations(&mut command)
        .arg(verb)
        .arg(recipe)
        .arg(format!("output_dir={}", out.display()))
        .arg(keep_programs())
        .args(overrides)
        .stdin(Stdio::null());
    command
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

fn checkpoint(out: &Path, step: u64) -> PathBuf {
    out.join(format!("tiny/checkpoints/step-{step:08}"))
}

/// Every tensor file of a checkpoint, by its path inside it.
fn tensor_files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let files = [
        "unet/diffusion_pytorch_model.safetensors",
        "unet_ema/diffusion_pytorch_model.safetensors",
        "text_encoder/model.safetensors",
        "text_encoder_ema/model.safetensors",
        "optimizer.safetensors",
    ];
    files
        .iter()
        .map(|file| ((*file).to_string(), fs::read(dir.join(file)).unwrap()))
        .collect()
}

fn losses(out: &Path) -> Vec<f64> {
    read_json_lines(&out.join("tiny/metrics.jsonl"))
        .unwrap()
        .lines
        .iter()
        .map(|line| line["learning/loss"].as_f64().unwrap())
        .collect()
}

/// The values of two runs of as many steps, side by side.
fn paired(a: &[f64], b: &[f64]) -> Vec<(f64, f64)> {
    assert_eq!(a.len(), b.len());
    a.iter().copied().zip(b.iter().copied()).collect()
}

/// A run that stops and continues must be the run without the pause, bit for bit, in int8 with its stochastic rounding;
/// and images of the same seed must be the same, under new names.
#[test]
fn a_continued_run_is_bit_for_bit_the_uninterrupted_one() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, parts) = (dir.path().join("whole"), dir.path().join("parts"));
    let run = |verb: &str, out: &Path, overrides: &[&str]| {
        let int8 = ["quantization=int8"];
        maxdiff(verb, out, &[&int8, overrides].concat())
    };
    succeed(&mut run(
        "train",
        &whole,
        &[
            "max_train_steps=4",
            "checkpoint_every=1",
            "checkpoints_total_limit=2",
        ],
    ));
    let kept = [1, 2, 3, 4].map(|step| checkpoint(&whole, step).is_dir());
    assert_eq!(kept, [false, false, true, true]);
    // The schedule is part of what is computed: both runs are made for four steps.
    let schedule = "learning_rate_schedule_steps=4";
    succeed(&mut run("train", &parts, &[schedule, "max_train_steps=2"]));
    let output = succeed(&mut run("train", &parts, &[schedule, "max_train_steps=4"]));
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(log.contains("continuing from"), "{log}");
    assert!(
        log.contains("in int8 (int8, a scale a channel, aqt)"),
        "{log}"
    );
    assert_eq!(losses(&whole), losses(&parts));
    // `tensor_files` gives the same files in the same order.
    for ((name, a), (_, b)) in tensor_files(&checkpoint(&whole, 4))
        .iter()
        .zip(tensor_files(&checkpoint(&parts, 4)).iter())
    {
        assert!(a == b, "{name} differs between the runs");
    }
    // The configuration decides what is computed: another one does not continue.
    let other = [schedule, "max_train_steps=6", "learning_rate=1e-2"];
    let output = run("train", &parts, &other).output().unwrap();
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{log}");
    assert!(log.contains("learning_rate"), "{log}");

    let prompt = "prompt=a large red circle on a white background";
    let generate = |seed: &str| {
        let output = succeed(&mut run("generate", &whole, &[prompt, seed]));
        PathBuf::from(String::from_utf8_lossy(&output.stdout).trim())
    };
    let (first, again, other) = (generate("seed=3"), generate("seed=3"), generate("seed=4"));
    assert_ne!(first, again);
    let pixels = |path: &Path| image::open(path).unwrap().to_rgb8();
    assert_eq!(pixels(&first), pixels(&again));
    assert_ne!(pixels(&first), pixels(&other));
    let Recorded::Own(settings) = read_recorded(&first).unwrap() else {
        panic!("settings of this program");
    };
    assert_eq!(settings.seed, 3);
    assert_eq!(settings.prompt, "a large red circle on a white background");
}

/// A run that goes on with two devices, and then with four, has the losses of one device, to 1e-5. With another batch it goes on after
/// the pictures that it has had.
#[test]
fn a_run_continues_on_other_numbers_of_devices() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, parts) = (dir.path().join("whole"), dir.path().join("parts"));
    let schedule = "learning_rate_schedule_steps=6";
    succeed(&mut maxdiff(
        "train",
        &whole,
        &[schedule, "max_train_steps=6"],
    ));
    for (steps, devices, rows) in [(2, 1, 4), (4, 2, 2), (6, 4, 1)] {
        let steps = format!("max_train_steps={steps}");
        let devices = format!("num_devices={devices}");
        let rows = format!("per_device_batch_size={rows}");
        succeed(&mut maxdiff(
            "train",
            &parts,
            &[schedule, &steps, &devices, &rows],
        ));
    }
    for (a, b) in paired(&losses(&whole), &losses(&parts)) {
        // The same sums in another order.
        assert!((a - b).abs() < 1e-5 * a, "{a} {b}");
    }
    let batch = [
        schedule,
        "max_train_steps=8",
        "num_devices=1",
        "per_device_batch_size=3",
        "gradient_accumulation_steps=2",
    ];
    let output = succeed(&mut maxdiff("train", &parts, &batch));
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        log.contains("a step had 4 pictures (1 x 4), and from step 6 on it has 6 (2 x 3)"),
        "{log}"
    );
    let state = fs::read_to_string(checkpoint(&parts, 8).join("state.json")).unwrap();
    let state: serde_json::Value = serde_json::from_str(&state).unwrap();
    // 24 pictures are eight batches of three, and two steps have two each.
    assert_eq!(state["data"]["batches"], 12);
}

#[test]
fn bf16_activations_train_on_the_cpu() {
    let dir = tempfile::tempdir().unwrap();
    let (float, bf16) = (dir.path().join("float"), dir.path().join("bf16"));
    succeed(&mut maxdiff("train", &float, &["max_train_steps=2"]));
    let overrides = ["max_train_steps=2", "activations_dtype=bfloat16"];
    succeed(&mut maxdiff("train", &bf16, &overrides));
    for (a, b) in paired(&losses(&float), &losses(&bf16)) {
        // bf16 keeps 8 bits of each activation.
        assert!(a != b && (a - b).abs() < 0.02 * a, "{a} {b}");
    }
}

/// A signal between steps, and one while sample images are drawn, which would take a minute: the state is saved at once.
#[test]
fn a_signal_saves_and_ends_with_143() {
    for (overrides, last) in [
        (&["max_train_steps=1000000"][..], None),
        (
            &[
                "max_train_steps=2",
                "sample_every=1",
                "num_inference_steps=1000",
            ],
            Some(1),
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().to_path_buf();
        let mut child = maxdiff("train", &out, overrides)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let started = Instant::now();
        let metrics = out.join("tiny/metrics.jsonl");
        while fs::metadata(&metrics).map_or(0, |m| m.len()) == 0 {
            let is_over = child.try_wait().unwrap().is_some();
            assert!(!is_over, "training ended by itself");
            let waited = started.elapsed();
            assert!(waited < Duration::from_secs(300), "no step in 300 s");
            std::thread::sleep(Duration::from_millis(50));
        }
        let id = child.id().to_string();
        assert!(Command::new("kill").arg(id).status().unwrap().success());
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(143));
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(said.contains("saved in"), "{said}");
        let entries = fs::read_dir(out.join("tiny/checkpoints")).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let saved: Vec<String> = names.filter(|name| name.starts_with("step-")).collect();
        assert_eq!(saved.len(), 1);
        if let Some(last) = last {
            assert_eq!(saved, [format!("step-{last:08}")]);
            assert_eq!(fs::read_dir(out.join("tiny/samples")).unwrap().count(), 0);
        }
    }
}

/// Files that may not grow stand for a disk that is full. Training hears of it at one of the next steps.
#[test]
fn a_checkpoint_that_cannot_be_written_ends_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let words = [
        "max_train_steps=500",
        "checkpoint_every=1",
        "write_metrics=False",
    ];
    let command = maxdiff("train", dir.path(), &words);
    let variables = command
        .get_envs()
        .filter_map(|(key, value)| Some((key, value?)));
    let output = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 16; exec \"$0\" \"$@\""])
        .arg(command.get_program())
        .args(command.get_args())
        .envs(variables)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{log}");
    assert!(log.contains("no space left on the device"), "{log}");
    assert!(!log.contains("completed step: 400"), "{log}");
    // Nothing is left of it.
    let entries = fs::read_dir(dir.path().join("tiny/checkpoints")).unwrap();
    let names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, [".lock"]);
}

#[test]
fn a_loss_that_is_not_finite_changes_nothing_and_ends_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().to_path_buf();
    let overrides = [
        "max_train_steps=50",
        "learning_rate=1e30",
        "max_nonfinite_steps=2",
        "adam_weight_decay=0",
    ];
    let output = maxdiff("train", &out, &overrides).output().unwrap();
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{log}");
    assert!(log.contains("the update was skipped"), "{log}");
    assert!(log.contains("3 steps in a row"), "{log}");
    let saved: Vec<PathBuf> = fs::read_dir(out.join("tiny/checkpoints"))
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.is_dir())
        .collect();
    assert_eq!(saved.len(), 1, "{saved:?}");
    let weights =
        Checkpoint::open(&saved[0].join("unet/diffusion_pytorch_model.safetensors")).unwrap();
    for name in weights.names() {
        let tensor = weights.read(name).unwrap().to_f32_vec().unwrap();
        assert!(tensor.iter().all(|v| v.is_finite()), "{name}");
    }
}

/// The pooled text reaches the UNet: its projection has a gradient. And held-out captions are drawn and scored.
#[test]
fn pooled_text_is_trained_and_held_out_captions_are_scored() {
    let dir = tempfile::tempdir().unwrap();
    succeed(&mut maxdiff("train", dir.path(), &["max_train_steps=2"]));
    let saved = checkpoint(dir.path(), 2);
    let optimizer = Checkpoint::open(&saved.join("optimizer.safetensors")).unwrap();
    let moments: Vec<&str> = optimizer
        .names()
        .filter(|name| name.contains("text_encoder/text_projection.weight"))
        .collect();
    assert_eq!(moments.len(), 2, "{moments:?}");
    for name in moments {
        let moment = optimizer.read(name).unwrap().to_f32_vec().unwrap();
        assert!(moment.iter().all(|v| *v != 0.0), "{name}");
    }

    let mut command = maxdiff("generate", dir.path(), &["held_out_prompts=3", "--json"]);
    let report = json(&succeed(&mut command));
    assert_eq!(report["score"]["prompts"], 3);
    for image in report["images"].as_array().unwrap() {
        let caption = Caption::parse(image["prompt"].as_str().unwrap()).unwrap();
        assert!(caption.held_out(0.1), "{caption}");
    }
    // What contradicts the training of the checkpoint is refused before anything compiles.
    for (overrides, word) in [
        (
            ["held_out_prompts=3", "dataset_type=folder"],
            "dataset_type=shapes",
        ),
        (
            ["held_out_prompts=3", "validation_fraction=0.2"],
            "trained with 0.1",
        ),
        (
            ["held_out_prompts=3", "prompt=a red circle"],
            "held_out_prompts",
        ),
        (
            ["prompt=a red circle", "prediction_type=epsilon"],
            "trained with \"v_prediction\"",
        ),
    ] {
        let output = maxdiff("generate", dir.path(), &overrides)
            .output()
            .unwrap();
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{overrides:?}: {log}");
        assert!(log.contains(word), "{overrides:?}: {log}");
    }
}

/// Training whose forward pass rounds weights and activations to int4 gives a model that `quantize` stores so, and that draws
/// what its floats draw when they are rounded while they are loaded.
#[test]
fn a_model_trained_in_int4_is_stored_in_int4() {
    let dir = tempfile::tempdir().unwrap();
    let int4 = ["quantization=w4a4", "quantization_granularity=4"];
    let train = [&int4[..], &["max_train_steps=2"]].concat();
    succeed(&mut maxdiff("train", dir.path(), &train));
    let float = tempfile::tempdir().unwrap();
    succeed(&mut maxdiff("train", float.path(), &["max_train_steps=2"]));
    assert_ne!(losses(dir.path()), losses(float.path()));

    let stored = dir.path().join("stored");
    let output = stored.display().to_string();
    let quantize = [&int4[..], &["--output", &output, "--json"]].concat();
    let report = json(&succeed(&mut maxdiff("quantize", dir.path(), &quantize)));
    let bits = report["bits_of_quantized"].as_f64().unwrap();
    // A scale in float32 for four weights of four bits, and at each position of a kernel.
    assert!((4.0 + 32.0 / 36.0..=12.0).contains(&bits), "{bits}");
    assert!(stored.join("tokenizer/tokenizer.json").is_file());
    assert!(!stored.join("tokenizer/manifest.json").exists());

    let drawn = |out: &Path, words: &[&str]| {
        let words = [
            &["prompt=a large red circle on a white background", "--json"],
            words,
        ];
        let report = json(&succeed(&mut maxdiff("generate", out, &words.concat())));
        let path = report["images"][0]["path"].as_str().unwrap().to_owned();
        image::open(path).unwrap().to_rgb8()
    };
    let elsewhere = tempfile::tempdir().unwrap();
    let named = format!("pretrained_model_name_or_path={output}");
    assert!(drawn(elsewhere.path(), &[&named]) == drawn(dir.path(), &int4));
}

/// A grid with so long a caption is larger than an image file can be: an error that comes up while training runs.
#[test]
fn after_an_error_the_steps_before_it_are_saved() {
    let dir = tempfile::tempdir().unwrap();
    let prompt = format!("sample_prompts=['{}']", "a red circle ".repeat(8000));
    let overrides = ["max_train_steps=2", "sample_every=1", &prompt];
    let output = maxdiff("train", dir.path(), &overrides).output().unwrap();
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{log}");
    let saved = checkpoint(dir.path(), 1);
    assert!(
        log.contains(&format!("is saved in {}", saved.display())),
        "{log}"
    );
    assert!(saved.is_dir());
}

#[test]
fn samples_are_made_with_bfloat16_weights_and_an_average() {
    let dir = tempfile::tempdir().unwrap();
    let overrides = [
        "max_train_steps=1",
        "sample_every=1",
        "weights_dtype=bfloat16",
    ];
    succeed(&mut maxdiff("train", dir.path(), &overrides));
    let samples = fs::read_dir(dir.path().join("tiny/samples"))
        .unwrap()
        .count();
    assert_eq!(samples, 1);
    // The page shows the curves and the grid.
    let page = fs::read_to_string(dir.path().join("tiny/report.html")).unwrap();
    assert!(page.contains("<h2>Loss</h2><svg") && page.contains("data:image/png;base64,"));
}

/// Ids go by how often a word is used: captions that change must not give a trained embedding another word.
#[test]
fn a_continued_run_keeps_its_tokenizer() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    fs::create_dir(&data).unwrap();
    let example = |name: &str, caption: &str| {
        image::RgbImage::new(16, 16)
            .save(data.join(format!("{name}.png")))
            .unwrap();
        fs::write(data.join(format!("{name}.txt")), caption).unwrap();
    };
    example("a", "red red blue");
    example("b", "red blue");
    let folder = format!("train_data_dir={}", data.display());
    let train = |steps: &str| {
        let overrides = [
            "dataset_type=folder",
            folder.as_str(),
            "per_device_batch_size=2",
            steps,
        ];
        succeed(&mut maxdiff("train", dir.path(), &overrides));
    };
    train("max_train_steps=1");
    example("c", "blue blue blue");
    train("max_train_steps=2");
    let tokenizer =
        |step| fs::read_to_string(checkpoint(dir.path(), step).join("tokenizer.json")).unwrap();
    assert_eq!(tokenizer(1), tokenizer(2));
}

#[test]
fn what_cannot_be_written_is_found_before_training() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("taken");
    fs::write(&file, "a file").unwrap();
    let started = Instant::now();
    let output = maxdiff("train", &file, &["max_train_steps=1"])
        .output()
        .unwrap();
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{log}");
    assert!(log.contains("taken"), "{log}");
    assert!(!log.contains("compiled"), "{log}");
    assert!(started.elapsed() < Duration::from_secs(30));
}

/// Where steps are long, the state before the running one is saved as soon as the run is asked to stop, and whole.
#[test]
fn a_copy_of_the_state_stands_by_during_long_steps() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny.yml");
    let words = [
        format!("output_dir={}", dir.path().display()),
        "max_train_steps=5".to_owned(),
        keep_programs(),
    ];
    let loaded = Config::load(&recipe, &words, Some(Verb::Train)).unwrap();
    let config = &loaded.config;
    let training = recipe::training(config, &loaded.given, &recipe, &mut |_| {}).unwrap();
    let session = recipe::open_session(config, &|_| Trial::Unknown, &mut |_| {})
        .unwrap()
        .session;
    let mut options = training.options(&session, &mut |_| {}).unwrap();
    options.run.copy_after_seconds = 0.0;
    let stop = Arc::new(AtomicBool::new(false));
    options.stop = Some(Arc::clone(&stop));
    let mut saved = Vec::new();
    let trainer = Trainer::new(session, options).unwrap();
    let outcome = trainer.run(&mut |event| {
        match event {
            // The third one is done, and nobody ends the run.
            TrainEvent::Step(report) if report.step == 2 => stop.store(true, Ordering::Relaxed),
            TrainEvent::Saved { checkpoint } => saved.push(checkpoint.to_owned()),
            _ => {}
        }
        ControlFlow::Continue(())
    });
    let last = checkpoint(dir.path(), 5);
    assert_eq!(outcome.unwrap(), Outcome::Done { checkpoint: last });
    assert_eq!(saved, [3, 4].map(|step| checkpoint(dir.path(), step)));
    let third = SavedCheckpoint::open(&saved[0]).unwrap();
    assert_eq!(third.state().step, 3);
    third.verify().unwrap();
    // The time that training took is kept from start to start.
    let goodput = third.state().counters["productive_ms"];
    let counted = read_json_lines(&dir.path().join("tiny/metrics.jsonl")).unwrap();
    let goodputs = counted
        .lines
        .iter()
        .map(|line| line["perf/goodput"].as_f64().unwrap());
    assert!(
        goodputs
            .into_iter()
            .all(|share| share > 0.0 && share <= 1.0)
    );
    let last = SavedCheckpoint::open(&checkpoint(dir.path(), 5)).unwrap();
    assert!(last.state().counters["productive_ms"] >= goodput);
    for line in &counted.lines {
        let norm = |name: &str| line[&format!("learning/grad_norm{name}")].as_f64().unwrap();
        let groups = [
            "_text_encoder",
            "_unet",
            "_unet.down_blocks",
            "_unet.mid_block",
            "_unet.up_blocks",
        ];
        let of_groups: f64 = groups.map(norm).iter().map(|norm| norm * norm).sum();
        assert!((of_groups.sqrt() / norm("") - 1.0).abs() < 1e-5, "{line:?}");
    }
}
