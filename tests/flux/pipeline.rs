//! The whole pipeline, from the files of a folder to images.

use std::fs;
use std::path::Path;

use crate::common::{
    Golden, distance, golden, json, keeping_session, program, text, without_optimizations,
};
use crate::t5::t5_tokenizer_json;
use maxdiff::config::{Config, Verb};
use maxdiff::dtype::DType;
use maxdiff::host_tensor::HostTensor;
use maxdiff::pipelines::{Generated, Pipeline};
use maxdiff::recipe::{self, Notice, RecipeError};
use maxdiff::shape::Shape;

/// A recorded pipeline with the recorded tokenizers.
fn folder(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    copy(&golden(&format!("pipeline_flux_{name}")), dir.path());
    for part in ["vae", "text_encoder", "text_encoder_2"] {
        let target = dir.path().join(part);
        if !target.exists() {
            fs::create_dir(&target).unwrap();
            copy(&golden("pipeline_flux_dev").join(part), &target);
        }
    }
    fs::create_dir(dir.path().join("tokenizer")).unwrap();
    for file in ["vocab.json", "merges.txt"] {
        let from = golden("tokenizer").join(file);
        fs::copy(from, dir.path().join("tokenizer").join(file)).unwrap();
    }
    // One family's from either file.
    let (file, bytes) = match name {
        "dev" => (
            "spiece.model",
            fs::read(golden("t5_tokenizer/spiece.model")).unwrap(),
        ),
        _ => ("tokenizer.json", t5_tokenizer_json().into_bytes()),
    };
    let folder = dir.path().join("tokenizer_2");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join(file), bytes).unwrap();
    dir
}

fn copy(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        match path.is_dir() {
            true => {
                fs::create_dir(&target).unwrap();
                copy(&path, &target);
            }
            false => drop(fs::copy(&path, &target).unwrap()),
        }
    }
}

/// The overrides for the recorded prompts and sizes.
fn words(name: &str, dir: &Path, golden: &Golden) -> Vec<String> {
    let meta = &golden.meta;
    let mut words = vec![
        format!("pretrained_model_name_or_path={}", dir.display()),
        format!("prompt=[{}, {}]", meta["prompts"][0], meta["prompts"][1]),
        format!("height={}", meta["image_size"][0]),
        format!("width={}", meta["image_size"][1]),
        format!("max_sequence_length={}", meta["length"]),
        format!("num_inference_steps={}", meta["steps"]),
        "weights_dtype=float32".to_owned(),
        "activations_dtype=float32".to_owned(),
    ];
    if name == "dev" {
        words.push(format!("guidance_scale={}", meta["guidance_scale"]));
    }
    words
}

/// What `more` overrides make of the recorded pipeline.
fn generate(name: &str, more: &[&str]) -> Result<Generated, RecipeError> {
    let dir = folder(name);
    let golden = Golden::read(&format!("pipeline_flux_{name}/io.safetensors"));
    let mut words = words(name, dir.path(), &golden);
    words.extend(more.iter().map(|word| (*word).to_owned()));
    let recipe = format!("flux-{name}");
    let recipe = Path::new(&recipe);
    let loaded = Config::load(recipe, &words, Some(Verb::Generate)).unwrap();
    let mut notify = |_: Notice<'_>| {};
    let mut made = recipe::generation(&loaded.config, &loaded.given, recipe, &mut notify)?;
    let shape = Shape::new(DType::F32, golden.dims("in/latents"));
    made.request.latents = Some(golden.tensor("in/latents", &shape));
    for (which, tokenizer) in made.options.base.tokenizers.iter().enumerate() {
        let expected = golden.values(&format!("in/prompt_ids.{which}"));
        let prompts = made.request.images.iter();
        let ids = prompts.flat_map(|image| tokenizer.encode(&image.prompt).unwrap().ids);
        let ids: Vec<f64> = ids.map(f64::from).collect();
        assert_eq!(ids, expected, "{name} {which}");
    }
    let mut pipeline = Pipeline::open(keeping_session(), made.options).unwrap();
    Ok(pipeline.generate(&made.request, &mut |_| Ok(())).unwrap())
}

fn samples(made: &Generated) -> Vec<f64> {
    let samples = made.samples.iter();
    samples
        .flat_map(|s: &HostTensor| s.to_f64_vec().unwrap())
        .collect()
}

#[test]
fn latents_and_images_are_diffusers() {
    for name in ["dev", "schnell"] {
        let made = generate(name, &[]).unwrap();
        let golden = Golden::read(&format!("pipeline_flux_{name}/io.safetensors"));
        let error = distance(&samples(&made), golden.values("out/latents"));
        eprintln!("{name}: {error:.1e}");
        assert!(error < 1e-4, "{name}: relative L2 error {error:e}");
        let expected = golden.values("out/images");
        let [count, _, height, width] = golden.dims("out/images").try_into().unwrap();
        assert_eq!(made.images.len(), count);
        for (n, image) in made.images.iter().enumerate() {
            assert_eq!(
                (image.height() as usize, image.width() as usize),
                (height, width)
            );
            for (x, y, pixel) in image.enumerate_pixels() {
                for (c, byte) in pixel.0.iter().enumerate() {
                    let at = ((n * 3 + c) * height + y as usize) * width + x as usize;
                    let value = expected[at] * 255.0;
                    assert!(
                        (f64::from(*byte) - value).abs() < 0.6,
                        "{name} {n}: {x}, {y}"
                    );
                }
            }
        }
    }
}

/// bf16, int8 and int8 weights, against diffusers in float32: bounds of twice what was measured.
#[test]
fn bf16_and_int8_stay_near_float32() {
    let golden = Golden::read("pipeline_flux_schnell/io.safetensors");
    let error = |more: &[&str]| {
        let made = generate("schnell", more).unwrap();
        distance(&samples(&made), golden.values("out/latents"))
    };
    let bf16 = ["activations_dtype=bfloat16"].as_slice();
    let int8 = ["quantization=int8"].as_slice();
    let weights = ["quantization=int8_w8a16"].as_slice();
    let errors = [bf16, int8, weights].map(error);
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
            "it needs do_classifier_free_guidance=True",
        ),
        ("dev", "max_sequence_length=513", "max_sequence_length"),
        ("dev", "eta=0.5", "eta"),
    ] {
        let words = [word.to_owned(), "prompt=x".to_owned()];
        let recipe = format!("flux-{name}");
        let loaded = Config::load(Path::new(&recipe), &words, Some(Verb::Generate));
        let error = loaded.err().unwrap_or_else(|| panic!("{word}")).to_string();
        assert!(error.contains(expected), "{word}: {error}");
    }
    for (name, word, expected) in [
        (
            "dev",
            "do_classifier_free_guidance=True",
            "true guidance) is not built",
        ),
        ("dev", "width=18", "width=18 is not a multiple of 4"),
        ("dev", "prompt_syntax=weighted", "give prompt_syntax=plain"),
        (
            "dev",
            "scheduler=euler",
            "give scheduler= one of flow_match_euler",
        ),
        ("dev", "clip_skip=1", "clip_skip has no effect"),
        (
            "dev",
            "hires_scale=2",
            "hires_scale: it is not built for FLUX.1 dev",
        ),
        (
            "schnell",
            "lora_config.lora_model_name_or_path=['x.safetensors']",
            "LoRAs",
        ),
        ("schnell", "refiner_model_name_or_path=x", "has no refiner"),
    ] {
        let error = generate(name, &[word])
            .err()
            .unwrap_or_else(|| panic!("{word}"))
            .to_string();
        assert!(error.contains(expected), "{word}: {error}");
    }
}

/// A model of the other kind, and a folder that lacks something, are named with what to do.
#[test]
fn wrong_and_incomplete_folders_are_named() {
    let dir = folder("schnell");
    let open = |recipe: &str, words: &[String]| {
        let words: Vec<String> = [
            format!("pretrained_model_name_or_path={}", dir.path().display()),
            "prompt=x".to_owned(),
            "resolution=16".to_owned(),
        ]
        .into_iter()
        .chain(words.iter().cloned())
        .collect();
        let recipe = Path::new(recipe);
        let loaded = Config::load(recipe, &words, Some(Verb::Generate)).unwrap();
        let made = recipe::generation(&loaded.config, &loaded.given, recipe, &mut |_| {});
        made.err().map(|error| error.to_string())
    };
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
    let other = folder("dev");
    let word = format!("tokenizer_model_name_or_path={}", other.path().display());
    assert_eq!(open("flux-schnell", &[word]), None);

    fs::remove_dir_all(dir.path().join("text_encoder_2")).unwrap();
    let error = open("flux-schnell", &[]).unwrap();
    assert!(error.contains("needs text_encoder_2"), "{error}");
}

/// `convert` writes a folder that is the same model, with its names in `model_index.json`.
#[test]
fn a_converted_folder_has_the_same_tensors() {
    let dir = folder("dev");
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
    let out = tempfile::tempdir().unwrap();
    for (name, output, recorded) in [
        ("flux_dev", "sample", "out/sample"),
        ("t5_odd", "last_hidden_state", "out/masked"),
    ] {
        let io = Golden::read(&format!("{name}/io.safetensors"));
        let inputs = out.path().join(format!("{name}.safetensors"));
        let bytes = fs::read(golden(name).join("io.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let named = file.iter().filter_map(|(name, view)| {
            let name = name
                .strip_prefix("in/")
                .filter(|name| *name != "cotangent")?;
            Some((name.to_owned(), view))
        });
        safetensors::serialize_to_file(named.collect::<Vec<_>>(), None, &inputs).unwrap();
        let outputs = out.path().join(format!("{name}_out.safetensors"));
        let args = [
            "module".to_owned(),
            "run".to_owned(),
            golden(name).display().to_string(),
            "--inputs".to_owned(),
            inputs.display().to_string(),
            "--outputs".to_owned(),
            outputs.display().to_string(),
            "hardware=cpu".to_owned(),
            "activations_dtype=float32".to_owned(),
        ];
        let run = without_optimizations(&mut program(&args)).output().unwrap();
        assert!(run.status.success(), "{}", text(&run.stderr));
        let bytes = fs::read(&outputs).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let found: Vec<f64> = file
            .tensor(output)
            .unwrap()
            .data()
            .chunks_exact(4)
            .map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap())))
            .collect();
        let error = distance(&found, io.values(recorded));
        assert!(error < 1e-5, "{name}: {error:e}");
    }
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
        assert!(text.contains("transformer/single_transformer_blocks.37.proj_out/dot_general"));
        assert!(text.contains("\"fsdp\""), "{recipe}: nothing is split");
    }
}
