//! Text encoders trained beside the UNet, from the outside.

use std::collections::BTreeSet;
use std::path::Path;

use super::runs::{Place, in_grid};
use serde_json::{Map, Value};

use maxdiff::dtype::DType;
use maxdiff::metrics::read_json_lines;
use maxdiff::weights::Checkpoint;

fn names(file: &Path) -> BTreeSet<String> {
    let file = Checkpoint::open(file).unwrap();
    file.names().map(str::to_owned).collect()
}

/// Updates of SDXL's UNet and of both text encoders, which are loaded as they were trained in both dialects.
#[test]
fn updates_of_text_encoders_are_loaded_as_they_were_trained() {
    let place = Place::new("sdxl");
    let words = |more: &[&'static str]| {
        let own = [
            "train_text_encoder=True",
            "text_encoder_learning_rate=2e-2",
            "text_encoder_2_learning_rate=1e-2",
            "lora_rank=2",
            "lora_alpha=3",
            "lora_dropout=0.2",
            "lora_plus_ratio=4",
            "validation_images=2",
            "lora_kohya=True",
            "caption_dropout=0.3",
            "per_device_batch_size=2",
            "learning_rate_schedule_steps=4",
            "sample_every=4",
            "sample_prompts=a picture",
            "seed=3",
            "do_classifier_free_guidance=False",
        ];
        [&own, more].concat()
    };
    let log = place.train("whole", &words(&["max_train_steps=4"]));
    assert!(
        log.contains("encoded 6 images") && !log.contains("captions"),
        "{log}"
    );
    // A measurement has no key to drop inputs by, and samples below show none dropped.
    assert!(log.contains("validation loss"), "{log}");
    place.train("parts", &words(&["max_train_steps=2"]));
    place.train("parts", &words(&["max_train_steps=4"]));
    assert_eq!(place.losses("whole"), place.losses("parts"));

    let saved = place.checkpoint("whole", 4);
    let peft = names(&saved.join("pytorch_lora_weights.safetensors"));
    let kohya = names(&saved.join("kohya_lora.safetensors"));
    for (layers, peft_name, kohya_name) in [
        // The denoiser attends to the last layer but one of both; the pooled text is that of the second's last.
        (
            2,
            "text_encoder.text_model.encoder.layers.1",
            "lora_te1_text_model_encoder_layers_1_",
        ),
        (
            3,
            "text_encoder_2.text_model.encoder.layers.2",
            "lora_te2_text_model_encoder_layers_2_",
        ),
    ] {
        let part = peft_name.split('.').next().unwrap();
        let own = peft
            .iter()
            .filter(|name| name.starts_with(&format!("{part}.")));
        assert_eq!(own.count(), layers * 4 * 2, "{peft:?}");
        assert!(
            peft.contains(&format!("{peft_name}.self_attn.q_proj.lora_A.weight")),
            "{peft:?}"
        );
        assert!(
            kohya.contains(&format!("{kohya_name}self_attn_out_proj.lora_up.weight")),
            "{kohya:?}"
        );
        assert!(kohya.contains(&format!("{kohya_name}self_attn_out_proj.alpha")));
    }

    let unguided = "do_classifier_free_guidance=False";
    let drawn = place.generate("whole", &[unguided]);
    let grid = image::open(place.path("whole").join("samples/step-00000004-00001.png")).unwrap();
    assert!(in_grid(&drawn, &grid.to_rgb8()));
    let kohya = saved.join("kohya_lora.safetensors");
    let lora = format!(
        "lora_config.lora_model_name_or_path=['{}']",
        kohya.display()
    );
    assert_eq!(place.generate("images", &[unguided, &lora]), drawn);
    assert_ne!(place.generate("images", &[unguided]), drawn);
}

/// A checkpoint has whole text encoders, also what of them is not trained, and its run continues bit for bit, with masks and tags
/// in three orders.
#[test]
fn trained_text_encoders_are_whole() {
    let place = Place::new("sd15");
    place.caption("a picture, red, big, wide");
    place.make_transparent();
    let words = |more: &[&'static str]| {
        let own = [
            "train_text_encoder=True",
            "per_device_batch_size=2",
            "optimizer_type=Lion",
            "learning_rate=1e-3",
            "text_encoder_learning_rate=1e-3",
            "validation_images=2",
            "validation_every=1",
            "masked_loss=alpha",
            "caption_shuffles=3",
            "keep_tokens=1",
            "caption_tag_dropout_rate=0.2",
        ];
        [&own, more].concat()
    };
    place.train("whole", &words(&["max_train_steps=2"]));
    place.train("parts", &words(&["max_train_steps=1"]));
    place.train("parts", &words(&["max_train_steps=2"]));
    assert_eq!(place.losses("whole"), place.losses("parts"));
    // Two pictures are held out, and measured after each step alike.
    let measured = |out: &str| {
        let lines = read_json_lines(&place.path(out).join("metrics.jsonl")).unwrap();
        let measured = |line: &Map<String, Value>| {
            let names = ["", "_from_0", "_from_250", "_from_500", "_from_750"];
            let of = |name: &str| {
                line.get(&format!("learning/validation_loss{name}"))?
                    .as_f64()
            };
            names.map(of).into_iter().collect::<Option<Vec<f64>>>()
        };
        lines.lines.iter().filter_map(measured).collect::<Vec<_>>()
    };
    let found = measured("whole");
    assert_eq!((found.len(), &found), (2, &measured("parts")));
    for losses in &found {
        assert!(
            (losses[0] - losses[1..].iter().sum::<f64>() / 4.0).abs() < 1e-6,
            "{losses:?}"
        );
        assert!(losses.iter().all(|loss| *loss > 0.0), "{losses:?}");
    }
    assert_ne!(found[0], found[1]);

    let read = |dir: &Path| {
        let file = Checkpoint::open(&dir.join("text_encoder")).unwrap();
        // transformers 5 writes the recorded encoder without `text_model.`
        let own = |name: &str| name.strip_prefix("text_model.").unwrap_or(name).to_owned();
        let read = |name: &str| (own(name), file.read_as(name, DType::F32).unwrap());
        file.names().map(read).collect::<Vec<_>>()
    };
    let base = read(&place.path("model"));
    let trained = read(&place.checkpoint("whole", 2));
    assert!(trained == read(&place.checkpoint("parts", 2)));
    assert_eq!(base.len(), trained.len());
    let changed = base.iter().zip(&trained).filter(|(a, b)| a != b);
    assert!(
        changed.count() + 1 >= base.len(),
        "all but position ids change"
    );
    let run = format!(
        "pretrained_model_name_or_path={}",
        place.path("whole").display()
    );
    let drawn = place.generate("images", &[&run]);
    assert_ne!(drawn, place.generate("images", &[]));

    // A rate of 0 leaves them as they are.
    place.train(
        "still",
        &words(&["max_train_steps=1", "text_encoder_learning_rate=0"]),
    );
    assert!(base == read(&place.checkpoint("still", 1)));

    for (words, expected) in [
        (
            &["lora_rank=2", "lora_text_encoder_target_modules=q_prox"][..],
            "lora_text_encoder_target_modules: 'q_prox' matches no linear layer and no convolution of a text encoder",
        ),
        (&["ema_decay=0.9"], "ema_decay=0.9"),
        (
            &["validation_images=6"],
            "validation_images=6: there are 6 pictures",
        ),
        (
            &["optimizer_type=Prodigy", "learning_rate=1"],
            "Prodigy finds one learning rate",
        ),
    ] {
        let words = [&["train_text_encoder=True"], words].concat();
        let (code, log) = place.try_train("none", &words);
        assert_eq!(code, Some(2), "{log}");
        assert!(log.contains(expected), "{log}");
    }
}
