//! The whole pipeline, from the files of a folder to images.

use std::fs;
use std::path::Path;

use crate::common::{RecordedPipeline, check_module, error_of, golden, json, program};
use maxdiff::config::{Config, Verb};
use maxdiff::pipelines::Event;

pub const DEV: RecordedPipeline = RecordedPipeline {
    name: "flux_dev",
    recorded: "flux_dev",
    recipe: "flux-dev",
    shared: &[],
    clip_tokenizers: &["tokenizer"],
    // One family's from either file.
    t5_tokenizer: Some(("tokenizer_2", "spiece.model")),
};

const SCHNELL: RecordedPipeline = RecordedPipeline {
    name: "flux_schnell",
    recorded: "flux_schnell",
    recipe: "flux-schnell",
    shared: &[
        ("vae", "pipeline_flux_dev/vae"),
        ("text_encoder", "pipeline_flux_dev/text_encoder"),
        ("text_encoder_2", "pipeline_flux_dev/text_encoder_2"),
    ],
    t5_tokenizer: Some(("tokenizer_2", "tokenizer.json")),
    ..DEV
};

#[test]
fn latents_and_images_are_diffusers() {
    DEV.check(&["guidance_scale=3.5"]);
    // The single blocks as a loop.
    SCHNELL.check(&["scan_layers=True"]);
}

/// From an image, with a mask that keeps a part of it, and by a hi-res fix; the noise is that of each image's seed.
#[test]
fn images_from_images_are_diffusers() {
    let guidance = "guidance_scale=3.5";
    DEV.check_images(&[
        (
            "image_0.6",
            &["num_inference_steps=10", "strength=0.6", guidance],
        ),
        (
            "image_0.65",
            &["num_inference_steps=10", "strength=0.65", guidance],
        ),
        (
            "image_1.0",
            &["num_inference_steps=10", "strength=1", guidance],
        ),
        (
            "mask_0.6",
            &["num_inference_steps=10", "strength=0.6", guidance],
        ),
        (
            "mask_1.0",
            &["num_inference_steps=10", "strength=1", guidance],
        ),
        (
            "latent_bicubic",
            &[
                "num_inference_steps=8",
                "hires_scale=1.5",
                "hires_upscaler=latent_bicubic",
                "hires_strength=0.55",
                "hires_steps=10",
                guidance,
            ],
        ),
    ]);
}

const FILL: RecordedPipeline = RecordedPipeline {
    name: "flux_fill",
    recorded: "flux_dev",
    shared: SCHNELL.shared,
    ..DEV
};

/// FLUX.1 Fill sees the pixels of the mask, and the control models an image that steers.
#[test]
fn images_that_the_model_sees_make_the_latents_of_diffusers() {
    let guidance = "guidance_scale=3.5";
    let steps = "num_inference_steps=10";
    FILL.check_images(&[
        ("mask_0.6", &[steps, "strength=0.6", guidance]),
        ("mask_1.0", &[steps, "strength=1", guidance]),
    ]);
    FILL.refuses(&[("seed=1", "give image=FILE and mask_image=FILE")]);
    let control = RecordedPipeline {
        name: "flux_control",
        ..FILL
    };
    control.check_images(&[("control", &[steps, guidance])]);
    control.refuses(&[("seed=1", "give controlnet_image=FILE")]);
    DEV.refuses(&[("controlnet_image=x.png", "takes no image that steers")]);
}

/// A LoRA that was trained on dev has schnell's tensors: it draws, with a warning.
#[test]
fn a_lora_of_the_other_model_is_warned_of() {
    let file = golden("lora_transformers/fluxattention_xlabs.safetensors");
    let bytes = fs::read(file).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("style.safetensors");
    let origin = (
        "ss_sd_model_name".to_owned(),
        "flux1-dev.safetensors".to_owned(),
    );
    safetensors::serialize_to_file(tensors.iter(), Some([origin].into()), &path).unwrap();
    let lora = format!("lora_config.lora_model_name_or_path=['{}']", path.display());
    for (model, expected) in [
        (
            &SCHNELL,
            Some("was trained on FLUX.1 dev; FLUX.1 schnell has the same tensors"),
        ),
        (&DEV, None),
    ] {
        let (mut warnings, mut changed) = (Vec::new(), 0);
        let mut observer = |event: Event<'_>| {
            match event {
                Event::Warning(text) => warnings.push(text.to_owned()),
                Event::Lora { weights, .. } => changed = weights,
                _ => {}
            }
            Ok(())
        };
        let words = [lora.as_str(), "num_inference_steps=1"];
        model
            .generate_observed(&words, true, &mut observer)
            .unwrap();
        assert_eq!(changed, 8);
        let found = warnings.iter().find(|text| text.contains("trained on"));
        assert_eq!(found.is_some(), expected.is_some(), "{warnings:?}");
        if let (Some(found), Some(expected)) = (found, expected) {
            assert!(found.contains(expected), "{found}");
        }
    }
}

/// Two runs of the model in a step, as one batch or one after the other, which both take the guidance scale.
#[test]
fn true_guidance_is_diffusers() {
    let words = [
        "num_inference_steps=6",
        "guidance_scale=3.5",
        "true_cfg_scale=2.5",
        "negative_prompt=fog",
    ];
    DEV.check_images(&[("true_cfg", &words)]);
    let in_two_passes = [words.as_slice(), &["guidance_in_two_passes=True"]].concat();
    DEV.check_images(&[("true_cfg", &in_two_passes)]);
}

/// bf16, int8 and int8 weights, against diffusers in float32: bounds of twice what was measured.
#[test]
fn bf16_and_int8_stay_near_float32() {
    let bf16 = ["activations_dtype=bfloat16"].as_slice();
    let int8 = ["quantization=int8"].as_slice();
    let weights = ["quantization=int8_w8a16"].as_slice();
    let errors = [bf16, int8, weights].map(|more| SCHNELL.error(more));
    eprintln!("{errors:?}");
    for (error, most) in errors.into_iter().zip([5e-3, 2e-3, 2e-3]) {
        assert!((1e-5..most).contains(&error), "{errors:?}");
    }
}

#[test]
fn what_has_no_effect_is_refused_with_the_reason() {
    for (name, word, expected) in [
        (
            "schnell",
            "guidance_scale=3.5",
            "it needs do_classifier_free_guidance=True or model_family=flux_dev",
        ),
        (
            "dev",
            "negative_prompt=blurry",
            "it needs do_classifier_free_guidance=True or true_cfg_scale above 1",
        ),
        ("dev", "true_cfg_scale=0.5", "true_cfg_scale"),
        ("dev", "max_sequence_length=513", "max_sequence_length"),
        ("dev", "eta=0.5", "eta"),
    ] {
        let words = [word.to_owned(), "prompt=x".to_owned()];
        let recipe = format!("flux-{name}");
        let loaded = Config::load(Path::new(&recipe), &words, Some(Verb::Generate));
        let error = loaded.err().unwrap_or_else(|| panic!("{word}")).to_string();
        assert!(error.contains(expected), "{word}: {error}");
    }
    DEV.refuses(&[
        (
            "do_classifier_free_guidance=True",
            "asked for by true_cfg_scale above 1",
        ),
        ("width=18", "width=18 is not a multiple of 4"),
        ("prompt_syntax=weighted", "give prompt_syntax=plain"),
        (
            "scheduler=euler",
            "give scheduler= one of dpm_multistep, dpm_singlestep, unipc, flow_match_euler",
        ),
        ("clip_skip=1", "clip_skip has no effect"),
        ("image=x.png", "x.png"),
    ]);
    SCHNELL.refuses(&[("refiner_model_name_or_path=x", "has no refiner")]);
}

/// A model of the other kind, and a folder that lacks something, are named with what to do.
#[test]
fn wrong_and_incomplete_folders_are_named() {
    let dir = SCHNELL.folder();
    let open = |recipe: &str, words: &[&str]| error_of(recipe, dir.path(), words);
    assert_eq!(open("flux-schnell", &[]), None);
    let error = open("flux-dev", &[]).unwrap();
    assert!(
        error.contains("this is FLUX.1 schnell") && error.contains("use flux-schnell"),
        "{error}"
    );
    let error = open("sdxl", &[]).unwrap();
    assert!(error.contains("use flux-schnell"), "{error}");

    let tokenizer = dir.path().join("tokenizer_2");
    fs::remove_dir_all(&tokenizer).unwrap();
    let error = open("flux-schnell", &[]).unwrap();
    assert!(
        error.contains("tokenizer_2") && error.contains("spiece.model"),
        "{error}"
    );
    // The tokenizers of another model's folder.
    let other = DEV.folder();
    let word = format!("tokenizer_model_name_or_path={}", other.path().display());
    assert_eq!(open("flux-schnell", &[&word]), None);

    fs::remove_dir_all(dir.path().join("text_encoder_2")).unwrap();
    let error = open("flux-schnell", &[]).unwrap();
    assert!(error.contains("needs text_encoder_2"), "{error}");
}

/// `convert` writes a folder that is the same model, with its names in `model_index.json`.
#[test]
fn a_converted_folder_has_the_same_tensors() {
    let dir = DEV.folder();
    let out = tempfile::tempdir().unwrap();
    let target = out.path().join("converted");
    let args = [
        "convert",
        dir.path().to_str().unwrap(),
        target.to_str().unwrap(),
        "--json",
    ];
    json(&program(args).output().unwrap());
    let read = |path: &Path| -> serde_json::Value {
        serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
    };
    let index = read(&target.join("model_index.json"));
    assert_eq!(index["_class_name"], "FluxPipeline");
    assert_eq!(index["transformer"][1], "FluxTransformer2DModel");
    assert_eq!(index["text_encoder_2"][1], "T5EncoderModel");
    assert_eq!(index["tokenizer_2"][1], "T5TokenizerFast");
    assert!(index.get("unet").is_none());
    for (part, file) in [
        ("transformer", "diffusion_pytorch_model.safetensors"),
        ("text_encoder_2", "model.safetensors"),
    ] {
        let tensors = |dir: &Path| {
            let bytes = fs::read(dir.join(part).join(file)).unwrap();
            let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            let mut all: Vec<(String, Vec<u8>)> = file
                .iter()
                .map(|(name, view)| (name.to_owned(), view.data().to_vec()))
                .collect();
            all.sort();
            all
        };
        assert_eq!(tensors(dir.path()), tensors(&target), "{part}");
    }
}

/// The transformer and T5 alone, by the names of diffusers and transformers.
#[test]
fn modules_run_on_named_tensors() {
    check_module("flux_dev", "sample", "out/sample");
    check_module("t5_odd", "last_hidden_state", "out/masked");
}

/// The program of a denoising step at full size, for one chip and split over eight.
#[test]
fn full_size_models_are_lowered_from_the_recipe_alone() {
    let out = tempfile::tempdir().unwrap();
    for (recipe, more) in [
        ("flux-dev", ["compile_topology=v5e-8", "quantization=int8"]),
        (
            "flux-schnell",
            ["compile_topology=v6e-8", "ici_tensor_parallelism=4"],
        ),
    ] {
        let file = out.path().join(format!("{recipe}.mlir"));
        let output = file.display().to_string();
        let args = ["lower", recipe, "--output", &output, "--json"]
            .into_iter()
            .chain(more);
        let report = json(&program(args).output().unwrap());
        eprintln!("{report}");
        let text = fs::read_to_string(&file).unwrap();
        // Equal blocks are one loop.
        assert!(text.contains("transformer/single_transformer_blocks.0-37.proj_out/dot_general"));
        assert!(text.contains("\"fsdp\""), "{recipe}: nothing is split");
    }
}
