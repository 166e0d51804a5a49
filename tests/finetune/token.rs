//! A new token: the steps of diffusers' scripts, and a run from the outside.

use super::runs::{Place, in_grid};
use super::{Run, Trains, recorded_factor, recorded_updates};
use crate::common::{Golden, keeping_session};
use maxdiff::dtype::DType;
use maxdiff::models::Part;
use maxdiff::train::{InversionOptions, InversionPlace};
use maxdiff::weights::Checkpoint;

/// The recorded token.
fn inversion(golden: &Golden) -> InversionOptions {
    let meta = |key: &str| golden.meta[key].as_i64().unwrap();
    let parts = [Part::TextEncoder, Part::TextEncoder2];
    let place = |part: Part| {
        let first = golden.meta["first"].get(part.name())?.as_i64()?;
        Some(InversionPlace {
            part,
            first: first as i32,
            initializer: meta("initializer") as i32,
        })
    };
    InversionOptions {
        token: "<sks>".to_owned(),
        vectors: meta("vectors") as usize,
        places: parts.into_iter().filter_map(place).collect(),
    }
}

/// The vectors of one text encoder alone, and of two with updates of the UNet.
#[test]
fn five_steps_of_a_new_token_are_those_of_diffusers_scripts() {
    let session = keeping_session();
    for (name, run) in [("sd15", "token"), ("sdxl", "pivotal")] {
        let golden = Golden::read(&format!("finetune/{name}/token.safetensors"));
        let steps = Golden::read(&format!("finetune/{name}/steps.safetensors"));
        let lora = (run == "pivotal").then(|| recorded_updates(&steps));
        let inversion = Some(inversion(&golden));
        let compared = Run::new(
            &session,
            name,
            Trains {
                lora,
                inversion,
                masked: false,
            },
            1,
        );
        // The tables themselves are no results of a step.
        let mut outputs = compared.program.outputs().iter();
        assert!(outputs.all(|output| !output.name.contains("token_embedding")));
        let recorded = |name: &str| match name.strip_suffix("/learned_embeds") {
            Some(part) => part.to_owned(),
            None => recorded_factor(name),
        };
        let all = golden.shapes();
        let gradients = all
            .iter()
            .filter(|(key, _)| key.starts_with(&format!("out/{run}/grad/")));
        assert_eq!(
            compared.check(run, &recorded),
            gradients.count(),
            "{name} {run}"
        );
    }
}

/// A token of SDXL with updates of its UNet: the run continues with the same losses, samples show it, and its files are loaded as
/// they were trained.
#[test]
fn a_token_and_updates_are_loaded_as_they_were_trained() {
    let place = Place::new("sdxl");
    place.caption("a <sks> picture");
    let words = |more: &[&'static str]| {
        let own = [
            "placeholder_token=<sks>",
            "initializer_token=red",
            "num_vectors=2",
            "token_learning_rate=0.1",
            "lora_rank=2",
            "per_device_batch_size=2",
            "sample_every=2",
            "sample_prompts=a <sks> picture",
            "seed=3",
            "do_classifier_free_guidance=False",
        ];
        [&own, more].concat()
    };
    place.train("whole", &words(&["max_train_steps=2"]));
    place.train("parts", &words(&["max_train_steps=1"]));
    place.train("parts", &words(&["max_train_steps=2"]));
    assert_eq!(place.losses("whole"), place.losses("parts"));

    let saved = place.checkpoint("whole", 2);
    let file = saved.join("learned_embeds.safetensors");
    let vectors = Checkpoint::open(&file).unwrap();
    assert_eq!(vectors.metadata()["token"], "<sks>");
    for (name, features) in [("clip_l", 16), ("clip_g", 24)] {
        let tensor = vectors.read_as(name, DType::F32).unwrap();
        assert_eq!(tensor.shape.dims, [2, features]);
        // Both start from one row, and only what a caption says tells them apart.
        let values = tensor.to_f32_vec().unwrap();
        assert_ne!(values[..features], values[features..]);
    }

    let unguided = "do_classifier_free_guidance=False";
    let prompt = "prompt=a <sks> picture";
    let drawn = place.draw("whole", prompt, &[unguided]);
    let grid = image::open(place.path("whole").join("samples/step-00000002-00001.png")).unwrap();
    assert!(in_grid(&drawn, &grid.to_rgb8()));
    let lora = format!(
        "lora_config.lora_model_name_or_path=['{}']",
        saved.display()
    );
    let token = format!("textual_inversions={}", file.display());
    assert_eq!(
        place.draw("images", prompt, &[unguided, &lora, &token]),
        drawn
    );
    assert_ne!(place.draw("images", prompt, &[unguided, &lora]), drawn);
}

/// The token alone, for Stable Diffusion 1.5: the file that diffusers writes.
#[test]
fn a_token_alone_is_in_diffusers_file() {
    let place = Place::new("sd15");
    let token = [
        "placeholder_token=<sks>",
        "initializer_token=red",
        "max_train_steps=1",
    ];
    let (code, log) = place.try_train("out", &token);
    assert_eq!(code, Some(2), "{log}");
    let expected = "no caption names it, so there is nothing to learn it from; the first caption is 'a picture of 0'";
    assert!(log.contains(expected), "{log}");
    place.caption("a <sks> picture");
    for (more, expected) in [
        ("initializer_token=unbelievable", "expected one"),
        ("initializer_token=", "give initializer_token"),
        ("train_text_encoder=True", "lora_rank=16"),
        ("ema_decay=0.9", "ema_decay=0.9"),
        (
            "placeholder_token=red",
            "choose one that is none, such as <red>",
        ),
    ] {
        let key = more.split('=').next().unwrap();
        let kept = token.iter().filter(|word| !word.starts_with(key));
        let words: Vec<&str> = kept.copied().chain([more]).collect();
        let (code, log) = place.try_train("none", &words);
        assert_eq!(code, Some(2), "{more}: {log}");
        assert!(log.contains(expected), "{more}: {log}");
    }

    let log = place.train("out", &token);
    assert!(log.contains(", 16 of them trained"), "{log}");
    let saved = place.checkpoint("out", 1);
    let vectors = Checkpoint::open(&saved.join("learned_embeds.safetensors")).unwrap();
    let names: Vec<&str> = vectors.names().collect();
    assert_eq!(names, ["<sks>"]);
    assert!(
        !saved.join("unet").exists() && !saved.join("pytorch_lora_weights.safetensors").exists()
    );
    let drawn = place.draw("out", "prompt=a <sks> picture", &[]);
    assert_ne!(drawn, place.draw("out", "prompt=a red picture", &[]));
}
