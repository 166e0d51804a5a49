//! Fine-tuning of FLUX.1, Stable Diffusion 3 and PixArt from the outside.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::runs::{Place, in_grid};
use crate::common::text;
use crate::flux::pipeline::DEV;
use crate::pixart::pipeline::ALPHA;
use crate::sd3::pipeline::MEDIUM_35;
use maxdiff::weights::Checkpoint;

/// Short prompts for T5, and what small updates need.
const SMALL: [&str; 2] = ["max_sequence_length=24", "weights_dtype=float32"];

fn with(groups: &[&[&'static str]]) -> Vec<&'static str> {
    [&SMALL[..], &groups.concat()].concat()
}

/// Whether two checkpoints have the same tensors, up to a relative L2 distance.
fn are_close(one: &Path, other: &Path, limit: f64) {
    let [one, other] = [one, other].map(|path| Checkpoint::open(path).unwrap());
    assert!(one.names().eq(other.names()));
    for name in one.names() {
        let [a, b] = [&one, &other].map(|file| file.read(name).unwrap());
        assert_eq!(a.shape, b.shape, "{name}");
        let [a, b] = [a, b].map(|tensor| tensor.to_f64_vec().unwrap());
        let length = |values: &[f64]| values.iter().map(|v| v * v).sum::<f64>().sqrt();
        let difference: Vec<f64> = a.iter().zip(&b).map(|(a, b)| a - b).collect();
        assert!(
            length(&difference) <= limit * length(&a),
            "{name}: {} of {}",
            length(&difference),
            length(&a)
        );
    }
}

/// FLUX.1 dev: a run continues with the same losses, draws in training what `generate` draws with its file, and has the
/// layers of diffusers' script in it.
#[test]
fn updates_of_flux_are_loaded_as_they_were_trained() {
    let place = Place::of_transformer(&DEV);
    place.make_transparent();
    let words = [
        "lora_rank=2",
        "lora_alpha=3",
        "lora_dropout=0.2",
        "per_device_batch_size=1",
        "gradient_accumulation_steps=2",
        "learning_rate_schedule_steps=4",
        "caption_dropout=0.3",
        "random_flip=True",
        "remat_policy=FULL",
        "weighting_scheme=logit_normal",
        "train_guidance_scale=1",
        "masked_loss=alpha",
    ];
    let grid = ["sample_every=4", "sample_prompts=a picture", "seed=3"];
    let log = place.train("whole", &with(&[&words, &grid, &["max_train_steps=4"]]));
    assert!(
        log.contains("encoded 7 captions") && log.contains("encoded 12 images"),
        "{log}"
    );
    let log = place.train("parts", &with(&[&words, &["seed=3", "max_train_steps=2"]]));
    assert!(!log.contains("encoded"), "{log}");
    place.train("parts", &with(&[&words, &grid, &["max_train_steps=4"]]));
    assert_eq!(place.losses("whole"), place.losses("parts"));
    assert_eq!(place.losses("whole").len(), 4);

    // Blocks as loops, whose weights are one input: files and losses are those of one weight after the other.
    let loops = [&words[..], &["seed=3", "scan_layers=True"]].concat();
    place.train("loops", &with(&[&loops, &["max_train_steps=2"]]));
    let words_of_grid = [&grid[..2], &["max_train_steps=4"]].concat();
    place.train("loops", &with(&[&loops, &words_of_grid]));
    for (whole, looped) in place.losses("whole").iter().zip(&place.losses("loops")) {
        assert!((whole - looped).abs() < 1e-5 * whole, "{whole} {looped}");
    }
    let file_of = |run: &str| {
        let checkpoint = place.checkpoint(run, 4);
        checkpoint.join("pytorch_lora_weights.safetensors")
    };
    are_close(&file_of("whole"), &file_of("loops"), 1e-3);
    let drawn = place.generate("loops", &SMALL);
    let drawn_in_training =
        image::open(place.path("loops").join("samples/step-00000004-00001.png")).unwrap();
    assert!(in_grid(&drawn, &drawn_in_training.to_rgb8()));

    let file = file_of("whole");
    let lora = Checkpoint::open(&file).unwrap();
    // Twelve layers of the double block, and queries, keys and values of two single blocks.
    assert_eq!(lora.names().count(), 2 * (12 + 2 * 3));
    for name in [
        "transformer.transformer_blocks.0.ff_context.net.0.proj.lora_A.weight",
        "transformer.single_transformer_blocks.1.attn.to_q.lora_B.weight",
    ] {
        assert!(lora.info(name).is_some(), "{name}");
    }
    let drawn = place.generate("whole", &SMALL);
    let grid = image::open(place.path("whole").join("samples/step-00000004-00001.png")).unwrap();
    assert!(in_grid(&drawn, &grid.to_rgb8()));
    let word = format!("lora_config.lora_model_name_or_path=['{}']", file.display());
    let loaded = place.generate("images", &[&SMALL[..], &[word.as_str()]].concat());
    assert_eq!(loaded, drawn);
    assert_ne!(place.generate("images", &SMALL), drawn);

    // The same run with another guidance scale is another training.
    let (code, log) = place.try_train(
        "parts",
        &with(&[&words[..10], &["max_train_steps=6", "guidance_scale=2"]]),
    );
    assert_eq!(code, Some(1), "{log}");
    assert!(
        log.contains("train_guidance_scale: saved 1.0, now 2.0"),
        "{log}"
    );
}

/// Stable Diffusion 3.5 with its three text encoders: the whole transformer and its moving average.
#[test]
fn a_fine_tuned_transformer_is_a_whole_model() {
    let place = Place::of_transformer(&MEDIUM_35);
    let words = [
        "max_train_steps=3",
        "learning_rate=1e-3",
        "ema_decay=0.5",
        "per_device_batch_size=4",
        "validation_images=1",
    ];
    let log = place.train("one", &with(&[&words]));
    assert!(log.contains("validation loss"), "{log}");
    // Positions are no parameters: they stay, in the average too.
    let open = |folder: &str| {
        let dir = place.checkpoint("one", 3).join(folder);
        Checkpoint::open(&dir).unwrap()
    };
    let own = Checkpoint::open(&place.path("model").join("transformer")).unwrap();
    let (trained, averaged) = (open("transformer"), open("transformer_ema"));
    let positions = "pos_embed.pos_embed";
    for other in [&trained, &averaged] {
        assert!(other.names().eq(own.names()));
        assert_eq!(own.read(positions).unwrap(), other.read(positions).unwrap());
    }
    let loops = with(&[&words, &["scan_layers=True"]]);
    let log = place.train("loops", &loops);
    assert!(log.contains("validation loss"), "{log}");
    for folder in ["transformer", "transformer_ema"] {
        let [one, loops] = ["one", "loops"].map(|run| place.checkpoint(run, 3).join(folder));
        are_close(&one, &loops, 1e-3);
    }
    let weight = "proj_out.weight";
    let values = [&own, &trained, &averaged].map(|file| file.read(weight).unwrap().data);
    assert!(values[0] != values[1] && values[1] != values[2]);

    let run = format!(
        "pretrained_model_name_or_path={}",
        place.path("one").display()
    );
    let drawn = place.generate("images", &[&SMALL[..], &[run.as_str()]].concat());
    assert_ne!(drawn, place.generate("images", &SMALL));
    assert_eq!(drawn, place.generate("one", &SMALL));
}

/// PixArt-alpha, whose prompts are read in lower case and without padding: updates beside weights in float and in int8, and
/// beside float weights with products in int8.
#[test]
fn updates_of_pixart_beside_integers_follow_those_beside_floats() {
    let place = Place::of_transformer(&ALPHA);
    let int8 = place.path("int8");
    let output = Command::new(env!("CARGO_BIN_EXE_maxdiff-rs"))
        .args(["quantize", "pixart-alpha", "quantization=int8_w8a16"])
        .args(["activations_dtype=float32", "weights_dtype=float32"])
        .arg(place.model())
        .arg("--output")
        .arg(&int8)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let words = with(&[&[
        "lora_rank=2",
        "per_device_batch_size=6",
        "max_train_steps=3",
        "learning_rate=1e-3",
        "snr_gamma=5",
    ]]);
    let log = place.train("float", &words);
    assert!(log.contains("encoded 7 captions"), "{log}");
    for at in 0..6 {
        let caption = place.path("data").join(format!("{at}.txt"));
        let upper = fs::read_to_string(&caption).unwrap().to_uppercase();
        fs::write(&caption, upper).unwrap();
    }
    let log = place.train("products", &[&words[..], &["quantization=int8"]].concat());
    assert!(!log.contains("encoded"), "{log}");
    let stored = format!("pretrained_model_name_or_path={}", int8.display());
    place.train("stored", &[&words[..], &[stored.as_str()]].concat());
    let float = place.losses("float");
    for other in ["stored", "products"] {
        for (float, other) in float.iter().zip(&place.losses(other)) {
            assert!(
                float != other && (float - other).abs() < 0.05 * float,
                "{float} {other}"
            );
        }
    }
    let drawn = place.generate("float", &SMALL);
    assert_ne!(drawn, place.generate("images", &SMALL));

    // The whole transformer, over two devices with weights and state sharded too.
    let whole = ["max_train_steps=2", "learning_rate=1e-3"];
    place.train("one", &with(&[&whole, &["per_device_batch_size=6"]]));
    let two = [
        "scan_layers=True",
        "per_device_batch_size=3",
        "num_devices=2",
        "ici_fsdp_parallelism=2",
        "ici_data_parallelism=1",
    ];
    place.train("two", &with(&[&whole, &two]));
    for (one, two) in place.losses("one").iter().zip(&place.losses("two")) {
        assert!((one - two).abs() < 1e-4 * one, "{one} {two}");
    }
}

/// The step for a pod, from the configuration alone: data split over all chips, weights by `fsdp`, products in int8.
#[test]
fn the_steps_of_transformers_lower_for_a_pod() {
    for (pipeline, own) in [
        (&DEV, "pooled_projections"),
        (&MEDIUM_35, "pooled_projections"),
        (&ALPHA, "encoder_attention_mask"),
    ] {
        let place = Place::of_transformer(pipeline);
        let mut command = Command::new(env!("CARGO_BIN_EXE_maxdiff-rs"));
        command
            .args(["lower", pipeline.recipe, "--step", "train"])
            .arg(place.model())
            .args(["resolution=16", "per_device_batch_size=1"])
            .args(["compile_topology=v5e-8", "ici_fsdp_parallelism=2"])
            .args(["ici_data_parallelism=4", "remat_policy=FULL"])
            .args(["quantization=int8", "gradient_accumulation_steps=2"])
            .args(["lora_rank=2", "lora_dropout=0.1", SMALL[0]]);
        let output = command.output().unwrap();
        let program = text(&output.stdout);
        assert!(output.status.success(), "{}", text(&output.stderr));
        for input in ["clean_sample", "encoder_hidden_states", own] {
            let line = program
                .split("%arg")
                .find(|arg| arg.contains(&format!("loc(\"{input}\")")));
            let line = line.unwrap_or_else(|| panic!("{}: {input}", pipeline.name));
            assert!(line.contains(r#"[{"data", "fsdp"}, {}"#), "{line}");
        }
        let is_split =
            |arg: &str| arg.contains("loc(\"transformer/") && arg.contains(r#"{"fsdp"}"#);
        assert!(program.split("%arg").filter(|arg| is_split(arg)).count() > 10);
        assert!(program.contains("xi8>"), "{}", pipeline.name);
    }
}

/// Each layer drops others of its inputs, and in int8 each gradient is rounded by other noise: equal blocks are loops as they are
/// without, forward and backward.
#[test]
fn blocks_of_a_step_with_noise_of_their_own_are_loops() {
    let place = Place::of_transformer(&DEV);
    let lowered = |noise: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_maxdiff-rs"));
        command
            .args(["lower", DEV.recipe, "--step", "train"])
            .arg(place.model())
            .args(["resolution=16", "per_device_batch_size=1"])
            .args(["compile_topology=v5e-8", "remat_policy=FULL"])
            .args(["lora_rank=2", noise, SMALL[0]]);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout).to_string()
    };
    let noise = ["lora_dropout=0", "lora_dropout=0.1", "quantization=int8"];
    let [without, with, int8] = noise.map(lowered);
    for program in [&without, &with, &int8] {
        assert_eq!(program.matches("stablehlo.while").count(), 2);
    }
    assert_ne!(with, without);
}

#[test]
fn objectives_and_layers_that_do_not_fit_are_named_before_anything_is_computed() {
    let flux = Place::of_transformer(&DEV);
    let pixart = Place::of_transformer(&ALPHA);
    for (place, words, expected) in [
        (
            &flux,
            &["snr_gamma=5"][..],
            "snr_gamma does not go with FLUX.1 dev, which is trained by flow matching",
        ),
        (
            &flux,
            &["noise_offset=0.1"],
            "noise_offset does not go with",
        ),
        (
            &flux,
            &["logit_std=2"],
            "give weighting_scheme=logit_normal",
        ),
        (&flux, &["mode_scale=1"], "it needs"),
        (
            &flux,
            &["train_text_encoder=True"],
            "the text encoders of FLUX.1 dev stay as they are",
        ),
        (
            &flux,
            &["placeholder_token=<a>", "initializer_token=a"],
            "textual inversions of FLUX.1 dev are not built",
        ),
        (
            &flux,
            &["lora_rank=2", "lora_kohya=True"],
            "kohya's names for layers of FLUX.1 dev",
        ),
        (
            &flux,
            &["lora_rank=2", "lora_target_modules=attn2.to_k"],
            "'attn2.to_k' matches no linear layer and no convolution of the denoiser",
        ),
        (&flux, &["train_new_flux=True"], "from published ones"),
        (&pixart, &["weighting_scheme=cosmap"], "weighting_scheme"),
        (&pixart, &["train_guidance_scale=1"], "train_guidance_scale"),
    ] {
        let (code, log) = place.try_train("none", &[&SMALL[..], words].concat());
        assert_eq!(code, Some(2), "{words:?}: {log}");
        assert!(log.contains(expected), "{words:?}: {log}");
        assert!(!log.contains("compiled in"), "{words:?}: {log}");
    }
    assert!(!flux.path("none").exists());
}
