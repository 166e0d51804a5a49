//! Training the low-rank factors of a model in int4, which stand beside weights that stay as they are stored.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::runs::{Place, in_grid};
use crate::common::text;
use maxdiff::dtype::DType;
use maxdiff::metrics::read_json_lines;
use maxdiff::weights::Checkpoint;

/// The model of `place`, quantized in a mode that leaves low-rank products.
fn quantized(place: &Place, mode: &str) -> PathBuf {
    let output = place.path(mode);
    let (mode, model) = (format!("quantization={mode}"), place.model());
    let run = Command::new(env!("CARGO_BIN_EXE_maxdiff-rs"))
        .arg("quantize")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/base15.yml"))
        .args([mode.as_str(), model.as_str()])
        .args([
            "svd_rank=2",
            "quantization_granularity=4",
            "activations_dtype=float32",
        ])
        .arg("--output")
        .arg(&output)
        .output()
        .unwrap();
    assert!(run.status.success(), "{}", text(&run.stderr));
    output
}

fn named(model: &Path) -> String {
    format!("pretrained_model_name_or_path={}", model.display())
}

const GRID: [&str; 2] = [
    "sample_prompts=a picture",
    "do_classifier_free_guidance=False",
];

/// The losses on what is held out, in the order of steps.
fn validation_losses(place: &Place, out: &str) -> Vec<f64> {
    let lines = read_json_lines(&place.path(out).join("metrics.jsonl")).unwrap();
    let lines = lines.lines.iter();
    lines
        .filter_map(|line| line.get("learning/validation_loss")?.as_f64())
        .collect()
}

/// The factors of `saved` are others than those of `base`, in f32, and all else is the same, bit for bit.
fn differ_in_factors_alone(base: &Path, saved: &Path) {
    let [base, saved] = [base, saved].map(|dir| Checkpoint::open(&dir.join("unet")).unwrap());
    assert!(base.names().eq(saved.names()));
    let mut trained = 0;
    for name in base.names() {
        let [old, new] = [&base, &saved].map(|file| file.read(name).unwrap());
        if !name.contains(".svd_") {
            assert!(old == new, "{name}");
            continue;
        }
        trained += 1;
        assert_eq!(new.shape.dtype, DType::F32, "{name}");
        assert_eq!(new.shape.dims, old.shape.dims, "{name}");
        let [old, new] = [old, new].map(|tensor| tensor.to_f32_vec().unwrap());
        assert_ne!(old, new, "{name}");
    }
    assert!(trained > 20, "{trained}");
}

#[test]
fn low_rank_factors_are_trained_beside_weights_that_stay() {
    let place = Place::new("sd15");
    let base = quantized(&place, "svdquant_w4a16");
    let stored = named(&base);
    let own = [
        "train_low_rank=True",
        "per_device_batch_size=4",
        "learning_rate=2e-3",
        "learning_rate_schedule_steps=20",
        "validation_images=2",
        "validation_every=5",
        "seed=3",
        stored.as_str(),
    ];
    let with = |more: &[&'static str]| [&own[..], more].concat();
    let all = [&["max_train_steps=20", "sample_every=20"], &GRID[..]].concat();
    place.train("whole", &with(&all));
    place.train("parts", &with(&["max_train_steps=8"]));
    let log = place.train("parts", &with(&["max_train_steps=20"]));
    assert!(log.contains("continuing from"), "{log}");
    assert_eq!(place.losses("whole"), place.losses("parts"));
    let losses = validation_losses(&place, "whole");
    assert!(losses.last() < losses.first(), "{losses:?}");

    let saved = place.checkpoint("whole", 20);
    differ_in_factors_alone(&base, &saved);
    differ_in_factors_alone(&base, &place.checkpoint("parts", 20));
    // Nothing else has an optimizer.
    let optimizer = Checkpoint::open(&saved.join("optimizer.safetensors")).unwrap();
    let moments: Vec<&str> = optimizer
        .names()
        .filter(|name| name.starts_with("optimizer/m/"))
        .collect();
    assert!(
        !moments.is_empty() && moments.iter().all(|name| name.contains(".svd_")),
        "{moments:?}"
    );

    // What is drawn with the run, and with its checkpoint as a model, is what was drawn in training.
    let unguided = "do_classifier_free_guidance=False";
    let drawn = place.generate("whole", &[unguided]);
    let grid = image::open(place.path("whole").join("samples/step-00000020-00001.png")).unwrap();
    assert!(in_grid(&drawn, &grid.to_rgb8()));
    assert_eq!(drawn, place.generate("images", &[&named(&saved), unguided]));
    assert_ne!(drawn, place.generate("images", &[&stored, unguided]));
}

/// A moving average is a whole model too, of the same weights.
#[test]
fn averages_of_low_rank_factors_are_drawn_with() {
    let place = Place::new("sd15");
    let base = quantized(&place, "svdquant_w4a16");
    let stored = named(&base);
    let own = [
        "train_low_rank=True",
        "per_device_batch_size=6",
        "max_train_steps=4",
        "ema_decay=0.5",
        "sample_every=4",
        "seed=3",
        stored.as_str(),
    ];
    place.train("averaged", &[&own[..], &GRID[..]].concat());
    let folder = place.checkpoint("averaged", 4);
    differ_in_factors_alone(&base, &folder);
    let parts = ["unet", "unet_ema"];
    let [now, average] = parts.map(|part| Checkpoint::open(&folder.join(part)).unwrap());
    assert!(now.names().eq(average.names()));
    let drawn = place.generate("averaged", &["do_classifier_free_guidance=False"]);
    let grid = image::open(
        place
            .path("averaged")
            .join("samples/step-00000004-00001.png"),
    )
    .unwrap();
    assert!(in_grid(&drawn, &grid.to_rgb8()));
}

#[test]
fn low_rank_factors_that_cannot_be_trained_are_named() {
    let place = Place::new("sd15");
    let stored = named(&quantized(&place, "svdquant_w4a4"));
    let stored = stored.as_str();
    let asked = "train_low_rank=True";
    for (words, expected) in [
        (&[asked][..], "has no low-rank factors beside its weights"),
        (&[asked, stored, "lora_rank=2"], "leave lora_rank out"),
        (
            &[asked, stored, "train_text_encoder=True"],
            "leave train_text_encoder out",
        ),
        (
            &[asked, stored, "quantization=svdquant_w4a4"],
            "training has float activations",
        ),
        (&[stored], "train_low_rank=True"),
    ] {
        let (code, log) = place.try_train("none", words);
        assert_eq!(code, Some(2), "{words:?}: {log}");
        assert!(log.contains(expected), "{words:?}: {log}");
    }
    assert!(!place.path("none").exists());
}
