//! The whole pipeline, from the files of a folder to images.

use std::fs;
use std::path::Path;

use crate::common::{RecordedPipeline, check_module, error_of, json, program};
use maxdiff::config::{Config, Verb};
use maxdiff::recipe;

pub const ALPHA: RecordedPipeline = RecordedPipeline {
    name: "pixart_alpha",
    recorded: "pixart_alpha",
    recipe: "pixart-alpha",
    shared: &[
        ("vae", "pipeline_sd15/vae"),
        ("text_encoder", "pipeline_flux_dev/text_encoder_2"),
    ],
    clip_tokenizers: &[],
    t5_tokenizer: Some(("tokenizer", "spiece.model")),
};

const SIGMA: RecordedPipeline = RecordedPipeline {
    name: "pixart_sigma",
    recorded: "pixart_sigma",
    recipe: "pixart-sigma",
    t5_tokenizer: Some(("tokenizer", "tokenizer.json")),
    ..ALPHA
};

/// Capital letters in the prompts, padding that nothing attends to, the size for alpha.
#[test]
fn latents_and_images_are_diffusers() {
    ALPHA.check(&[]);
    SIGMA.check(&[]);
}

#[test]
fn guidance_in_two_passes_is_the_same() {
    let error = ALPHA.error(&["guidance_in_two_passes=True"]);
    assert!(error < 1e-4, "{error:e}");
}

/// bf16 and int8, against diffusers in float32: bounds of twice what was measured.
#[test]
fn bf16_and_int8_stay_near_float32() {
    let errors =
        ["activations_dtype=bfloat16", "quantization=int8"].map(|word| SIGMA.error(&[word]));
    eprintln!("{errors:?}");
    for (error, most) in errors.into_iter().zip([2e-2, 5e-3]) {
        assert!((1e-5..most).contains(&error), "{errors:?}");
    }
}

#[test]
fn what_cannot_be_is_refused_with_what_to_do() {
    let words = ["use_text_encoder_3=False".to_owned(), "prompt=x".to_owned()];
    let loaded = Config::load(Path::new("pixart-alpha"), &words, Some(Verb::Generate));
    let error = loaded.err().unwrap().to_string();
    assert!(error.contains("it needs model_family=sd3"), "{error}");
    ALPHA.refuses(&[
        (
            "max_sequence_length=121",
            "PixArt-alpha takes prompts of at most 120 tokens",
        ),
        ("width=18", "width=18 is not a multiple of 4"),
        ("prompt_syntax=weighted", "give prompt_syntax=plain"),
        ("hires_scale=2", "hires_scale: it is not built"),
    ]);
}

/// A recipe of another family, and parts that are not there, are named with what to do.
#[test]
fn wrong_and_incomplete_folders_are_named() {
    for (pipeline, other) in [(ALPHA, "pixart-sigma"), (SIGMA, "pixart-alpha")] {
        let dir = pipeline.folder();
        let open = |recipe: &str| error_of(recipe, dir.path(), &[]);
        assert_eq!(open(pipeline.recipe), None);
        for recipe in [other, "sd3", "sd15"] {
            let error = open(recipe).unwrap();
            let expected = format!("use {}", pipeline.recipe);
            assert!(error.contains(&expected), "{recipe}: {error}");
        }
        fs::remove_dir_all(dir.path().join("text_encoder")).unwrap();
        let error = open(pipeline.recipe).unwrap();
        assert!(error.contains("needs text_encoder; expected"), "{error}");
    }
}

#[test]
fn modules_run_on_named_tensors() {
    check_module("pixart_alpha", "sample", "out/sample");
}

/// The program of a denoising step at full size, split over eight chips; from a folder too.
#[test]
fn full_size_models_are_lowered_from_the_recipe_alone() {
    let lower = |recipe: &str, more: &[&str]| {
        let out = tempfile::tempdir().unwrap();
        let file = out.path().join("step.mlir");
        let output = file.display().to_string();
        let args = ["lower", recipe, "--output", &output, "--json"];
        let args = args.into_iter().chain(more.iter().copied());
        let report = json(&program(args).output().unwrap());
        eprintln!("{report}");
        fs::read_to_string(&file).unwrap()
    };
    for (recipe, more) in [
        (
            "pixart-alpha",
            ["compile_topology=v5e-8", "quantization=int8"],
        ),
        (
            "pixart-sigma",
            ["compile_topology=v6e-8", "ici_tensor_parallelism=4"],
        ),
    ] {
        let text = lower(recipe, &more);
        assert!(text.contains("transformer/transformer_blocks.0-27.ff.net.2/"));
        assert!(text.contains("\"fsdp\""), "{recipe}: nothing is split");
    }
    let dir = SIGMA.folder();
    let folder = format!("pretrained_model_name_or_path={}", dir.path().display());
    let text = lower("pixart-sigma", &[&folder, "resolution=16"]);
    // Keys and values of the text are computed before the first step.
    assert!(text.contains("transformer_blocks.1.attn2.to_q/dot_general"));
    assert!(!text.contains("attn2.to_v/dot_general"));
}

/// Drawn in the nearest of the sizes for 256 pixels, then scaled and cropped to what is asked for.
#[test]
fn the_nearest_of_a_table_of_sizes_is_drawn() {
    let dir = SIGMA.folder();
    let config = dir.path().join("transformer/config.json");
    let text = fs::read_to_string(&config).unwrap();
    let mut fields: serde_json::Value = serde_json::from_str(&text).unwrap();
    fields["sample_size"] = 32.into();
    fs::write(&config, fields.to_string()).unwrap();
    let words = [
        format!("pretrained_model_name_or_path={}", dir.path().display()),
        "prompt=x".to_owned(),
        "height=99".to_owned(),
        "width=66".to_owned(),
        "use_resolution_binning=True".to_owned(),
    ];
    let recipe = Path::new(SIGMA.recipe);
    let loaded = Config::load(recipe, &words, Some(Verb::Generate)).unwrap();
    let made = recipe::generation(&loaded.config, &loaded.given, recipe, &mut |_| {}).unwrap();
    let model = &made.options.base.model;
    assert_eq!(model.image_size, [304, 208]);
    assert_eq!(model.sample_size, [152, 104]);
    assert_eq!(made.request.image_size, Some([99, 66]));
    SIGMA.refuses(&[(
        "use_resolution_binning=True",
        "tables for transformers of sample_size 32",
    )]);
}
