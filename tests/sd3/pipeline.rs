//! The whole pipeline, from the files of a folder to images.

use std::fs;
use std::path::Path;

use crate::common::{RecordedPipeline, check_module, error_of, json, program};
use maxdiff::config::{Config, Verb};

/// Without T5, whose place zeros take.
const MEDIUM: RecordedPipeline = RecordedPipeline {
    name: "sd3",
    recorded: "sd3",
    recipe: "sd3",
    shared: &[],
    clip_tokenizers: &["tokenizer", "tokenizer_2"],
    t5_tokenizer: None,
};

/// With T5, guided away from the model without a layer, with another prompt for the second text encoder.
pub const MEDIUM_35: RecordedPipeline = RecordedPipeline {
    name: "sd35",
    recorded: "sd35",
    recipe: "sd35-medium",
    shared: &[
        ("vae", "pipeline_sd3/vae"),
        ("text_encoder", "pipeline_sd3/text_encoder"),
        ("text_encoder_2", "pipeline_sd3/text_encoder_2"),
        ("text_encoder_3", "pipeline_flux_dev/text_encoder_2"),
    ],
    t5_tokenizer: Some(("tokenizer_3", "spiece.model")),
    ..MEDIUM
};

#[test]
fn latents_and_images_are_diffusers() {
    MEDIUM.check(&["use_text_encoder_3=False"]);
    MEDIUM_35.check(&[]);
}

/// From an image, and with a mask that keeps a part of it; the noise is that of each image's seed.
#[test]
fn images_from_images_are_diffusers() {
    for (case, strength) in [
        ("image_0.6", "strength=0.6"),
        ("image_0.65", "strength=0.65"),
        ("image_1.0", "strength=1"),
        ("mask_0.6", "strength=0.6"),
        ("mask_1.0", "strength=1"),
    ] {
        let words = [
            "use_text_encoder_3=False",
            "num_inference_steps=10",
            strength,
        ];
        MEDIUM.check_images(&[(case, &words)]);
    }
}

/// Both rows of an image in one batch or one after the other.
#[test]
fn guidance_in_two_passes_is_the_same() {
    let words = ["use_text_encoder_3=False", "guidance_in_two_passes=True"];
    let error = MEDIUM.error(&words);
    assert!(error < 1e-4, "{error:e}");
}

/// bf16 and int8, against diffusers in float32: bounds of twice what was measured.
#[test]
fn bf16_and_int8_stay_near_float32() {
    let errors = ["activations_dtype=bfloat16", "quantization=int8"]
        .map(|word| MEDIUM.error(&["use_text_encoder_3=False", word]));
    eprintln!("{errors:?}");
    for (error, most) in errors.into_iter().zip([2e-2, 5e-3]) {
        assert!((1e-5..most).contains(&error), "{errors:?}");
    }
}

#[test]
fn what_cannot_be_is_refused_with_what_to_do() {
    for (recipe, word, expected) in [
        ("flux-dev", "use_text_encoder_3=False", "model_family=sd3"),
        ("sdxl", "skip_guidance_layers=[7]", "model_family=sd3"),
        (
            "sd35-medium",
            "skip_layer_guidance_scale=2",
            "it needs skip_guidance_layers",
        ),
        ("sd3", "max_sequence_length=513", "max_sequence_length"),
        ("sd15", "prompt_2=x", "it needs model_family=sdxl, sd3"),
        (
            "sd35-large-turbo",
            "guidance_scale=3",
            "do_classifier_free_guidance=True",
        ),
    ] {
        let words = [word.to_owned(), "prompt=x".to_owned()];
        let loaded = Config::load(Path::new(recipe), &words, Some(Verb::Generate));
        let error = loaded.err().unwrap_or_else(|| panic!("{word}")).to_string();
        assert!(error.contains(expected), "{word}: {error}");
    }
    MEDIUM_35.refuses(&[
        (
            "skip_guidance_layers=[2,3]",
            "skip_guidance_layers has 3, but the SD3Transformer2DModel of Stable Diffusion 3.5 medium has 3 layers",
        ),
        ("width=18", "width=18 is not a multiple of 4"),
        ("height=32", "positions for at most 28 pixels a side"),
        ("prompt_syntax=weighted", "give prompt_syntax=plain"),
        (
            "scheduler=euler",
            "give scheduler= one of dpm_multistep, dpm_singlestep, unipc, flow_match_euler",
        ),
        ("image=x.png", "x.png"),
        ("hires_scale=2", "positions for at most 28 pixels a side"),
    ]);
}

/// A recipe of another family, and parts that are not there, are named with what to do.
#[test]
fn wrong_and_incomplete_folders_are_named() {
    let dir = MEDIUM_35.folder();
    let open = |recipe: &str, words: &[&str]| error_of(recipe, dir.path(), words);
    assert_eq!(open("sd35-medium", &[]), None);
    for recipe in ["sd3", "sd35-large", "flux-dev", "sdxl"] {
        let error = open(recipe, &[]).unwrap();
        assert!(error.contains("use sd35-medium"), "{recipe}: {error}");
    }
    let without = MEDIUM.folder();
    let error = error_of("sd3", without.path(), &[]).unwrap();
    assert!(
        error.contains("needs text_encoder_3") && error.contains("give use_text_encoder_3=False"),
        "{error}"
    );
    assert_eq!(
        error_of("sd3", without.path(), &["use_text_encoder_3=False"]),
        None
    );
    fs::remove_dir_all(dir.path().join("tokenizer_3")).unwrap();
    let error = open("sd35-medium", &[]).unwrap();
    assert!(error.contains("tokenizer_3"), "{error}");
    fs::remove_dir_all(dir.path().join("text_encoder_2")).unwrap();
    let error = open("sd35-medium", &[]).unwrap();
    assert!(error.contains("needs text_encoder_2; expected"), "{error}");
}

#[test]
fn modules_run_on_named_tensors() {
    check_module("sd3_medium", "sample", "out/sample");
}

/// The program of a denoising step at full size, for one chip and split over eight.
#[test]
fn full_size_models_are_lowered_from_the_recipe_alone() {
    let out = tempfile::tempdir().unwrap();
    for (recipe, last, more) in [
        ("sd3", 23, ["compile_topology=v5e-8", "quantization=int8"]),
        (
            "sd35-medium",
            23,
            ["compile_topology=v5e-1", "skip_guidance_layers=[7,8,9]"],
        ),
        (
            "sd35-large",
            37,
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
        let layer = format!("transformer/transformer_blocks.{last}.ff.net.2/");
        assert!(text.contains(&layer), "{recipe}");
        assert_eq!(
            text.contains("\"fsdp\""),
            !more[0].ends_with("-1"),
            "{recipe}"
        );
    }
}
