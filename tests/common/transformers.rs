//! What the tests of transformers that denoise share: networks and whole pipelines against diffusers.

use std::fs;
use std::path::Path;

use super::{
    Golden, assert_close, assert_same_weights, cpu_session, distance, golden, keeping_session,
    program, rel_l2, run_recorded, text, unoptimized_session, weights, without_optimizations,
};
use crate::t5::t5_tokenizer_json;
use maxdiff::config::{Config, Verb};
use maxdiff::dtype::DType;
use maxdiff::graph::{Builder, Tensor, vjp};
use maxdiff::host_tensor::HostTensor;
use maxdiff::pipelines::{Generated, Observer, Pipeline};
use maxdiff::recipe::{self, Notice, RecipeError};
use maxdiff::shape::Shape;

/// diffusers in float64 on the float32 weights, against `y` in float32: results within 1e-5, the recorded gradients of
/// weights and of `inputs`, each with its name, within 1e-4. Further results are declared in `b` by their names.
pub fn check_denoiser(
    name: &str,
    b: Builder,
    y: Tensor,
    inputs: &[(&str, Tensor)],
    is_optimized: bool,
) {
    let io = Golden::read(&format!("{name}/io.safetensors"));
    let checkpoint = Golden::read_folder(name, "diffusion_pytorch_model");
    assert_same_weights(&b, &checkpoint);
    b.output("out/sample", y, None).unwrap();

    let shape = b.shape(y);
    let cotangent = b.input("cotangent", shape.clone(), &[]).unwrap();
    let cotangent = b.mul_scalar(cotangent, 1.0 / shape.count() as f64).unwrap();
    let inputs = inputs
        .iter()
        .map(|(name, x)| (format!("grad/in/{name}"), *x));
    let parameters = weights(&b).into_iter();
    let parameters = parameters.map(|(key, w)| (format!("grad/param/{key}"), w));
    let wrt: Vec<(String, Tensor)> = inputs
        .chain(parameters.filter(|(name, _)| io.has(name)))
        .collect();
    let tensors: Vec<Tensor> = wrt.iter().map(|(_, t)| *t).collect();
    let gradients = vjp(&b, &[(y, cotangent)], &tensors).unwrap();
    for ((name, _), gradient) in wrt.iter().zip(gradients) {
        b.output(name, gradient, None).unwrap();
    }

    let graph = b.finish();
    let session = match is_optimized {
        true => cpu_session(1),
        false => unoptimized_session(),
    };
    let results = run_recorded(&session, &graph, &checkpoint, &io);
    let mut worst = 0.0f64;
    for (output, found) in graph.outputs.iter().zip(&results) {
        if output.name.starts_with("out/") {
            assert_close(&output.name, found, &io, 1e-5);
            let error = rel_l2(found, &io, &output.name);
            eprintln!("{name}: {} {error:.1e}", output.name);
        } else {
            assert_close(&output.name, found, &io, 1e-4);
            worst = worst.max(rel_l2(found, &io, &output.name));
        }
    }
    eprintln!("{name}: worst gradient {worst:.1e}");
}

/// Runs `module run` on the folder tests/golden/`name` and its recorded inputs: the result `output` is `recorded`.
pub fn check_module(name: &str, output: &str, recorded: &str) {
    let out = tempfile::tempdir().unwrap();
    let io = Golden::read(&format!("{name}/io.safetensors"));
    let inputs = out.path().join("in.safetensors");
    let bytes = fs::read(golden(name).join("io.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let named = file.iter().filter_map(|(name, view)| {
        let name = name.strip_prefix("in/");
        Some((name.filter(|name| *name != "cotangent")?.to_owned(), view))
    });
    safetensors::serialize_to_file(named.collect::<Vec<_>>(), None, &inputs).unwrap();
    let outputs = out.path().join("out.safetensors");
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

/// A pipeline that was recorded without its tokenizers.
pub struct RecordedPipeline {
    /// The folder of tests/golden, after `pipeline_`.
    pub name: &'static str,
    /// The folder of tests/golden, after `pipeline_`, whose prompts and sizes it has.
    pub recorded: &'static str,
    pub recipe: &'static str,
    /// Parts that another recorded pipeline has, each with its folder in tests/golden.
    pub shared: &'static [(&'static str, &'static str)],
    /// Folders of CLIP's tokenizers, and of T5's with the file that it is in.
    pub clip_tokenizers: &'static [&'static str],
    pub t5_tokenizer: Option<(&'static str, &'static str)>,
}

impl RecordedPipeline {
    pub fn golden(&self) -> Golden {
        Golden::read(&format!("pipeline_{}/io.safetensors", self.recorded))
    }

    /// The whole folder.
    pub fn folder(&self) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        copy(&golden(&format!("pipeline_{}", self.name)), dir.path());
        for (part, other) in self.shared {
            let target = dir.path().join(part);
            fs::create_dir(&target).unwrap();
            copy(&golden(other), &target);
        }
        for tokenizer in self.clip_tokenizers {
            let target = dir.path().join(tokenizer);
            fs::create_dir(&target).unwrap();
            for file in ["vocab.json", "merges.txt"] {
                fs::copy(golden("tokenizer").join(file), target.join(file)).unwrap();
            }
        }
        if let Some((folder, file)) = self.t5_tokenizer {
            let bytes = match file {
                "spiece.model" => fs::read(golden("t5_tokenizer/spiece.model")).unwrap(),
                _ => t5_tokenizer_json().into_bytes(),
            };
            let folder = dir.path().join(folder);
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join(file), bytes).unwrap();
        }
        dir
    }

    /// The overrides for the recorded prompts and sizes.
    fn words(&self, dir: &Path, golden: &Golden) -> Vec<String> {
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
        if let Some(negative) = meta["negative_prompt"].as_str() {
            words.push(format!("negative_prompt={negative}"));
        }
        let call = meta["call"].as_object().into_iter().flatten();
        words.extend(call.map(|(key, value)| match value.as_str() {
            Some(text) => format!("{key}={text}"),
            None => format!("{key}={value}"),
        }));
        words
    }

    /// What `more` overrides make of it, from the recorded noise.
    pub fn generate(&self, more: &[&str]) -> Result<Generated, RecipeError> {
        self.generate_from(more, true)
    }

    /// The same from the noise of the images' seeds, which count up from 0.
    pub fn generate_from_seeds(&self, more: &[&str]) -> Result<Generated, RecipeError> {
        self.generate_from(more, false)
    }

    fn generate_from(&self, more: &[&str], is_recorded: bool) -> Result<Generated, RecipeError> {
        self.generate_observed(more, is_recorded, &mut |_| Ok(()))
    }

    /// The same, with what `observer` is told.
    pub fn generate_observed(
        &self,
        more: &[&str],
        is_recorded: bool,
        observer: &mut Observer<'_>,
    ) -> Result<Generated, RecipeError> {
        let dir = self.folder();
        let golden = self.golden();
        let mut words = self.words(dir.path(), &golden);
        words.extend(more.iter().map(|word| (*word).to_owned()));
        let recipe = Path::new(self.recipe);
        let loaded = Config::load(recipe, &words, Some(Verb::Generate)).unwrap();
        let mut notify = |_: Notice<'_>| {};
        let mut made = recipe::generation(&loaded.config, &loaded.given, recipe, &mut notify)?;
        let shape = Shape::new(DType::F32, golden.dims("in/latents"));
        made.request.latents = is_recorded.then(|| golden.tensor("in/latents", &shape));
        for (which, tokenizer) in made.options.base.tokenizers.iter().enumerate() {
            let name = format!("in/prompt_ids.{which}");
            if golden.has(&name) {
                let prompts = made.request.images.iter();
                let ids = prompts.flat_map(|image| tokenizer.encode(&image.prompt).unwrap().ids);
                let ids: Vec<f64> = ids.map(f64::from).collect();
                assert_eq!(ids, golden.values(&name), "{} {which}", self.name);
            }
        }
        let mut pipeline = Pipeline::open(keeping_session(), made.options).unwrap();
        Ok(pipeline.generate(&made.request, observer).unwrap())
    }

    /// Images to images, masks, and what else is recorded in `images.safetensors`: last samples within 1e-4 of diffusers'.
    pub fn check_images(&self, cases: &[(&str, &[&str])]) {
        let golden = Golden::read(&format!("pipeline_{}/images.safetensors", self.name));
        let dir = tempfile::tempdir().unwrap();
        let bytes = |name: &str| {
            golden
                .values(name)
                .iter()
                .map(|v| *v as u8)
                .collect::<Vec<u8>>()
        };
        let [height, width] = golden.dims("in/mask").try_into().unwrap();
        let (height, width) = (height as u32, width as u32);
        let [image, mask] = ["image", "mask"].map(|name| dir.path().join(format!("{name}.png")));
        let pixels = image::RgbImage::from_raw(width, height, bytes("in/image")).unwrap();
        pixels.save(&image).unwrap();
        let pixels = image::GrayImage::from_raw(width, height, bytes("in/mask")).unwrap();
        pixels.save(&mask).unwrap();
        let image = format!("image={}", image.display());
        let control = image.replace("image=", "controlnet_image=");
        let mask = format!("mask_image={}", mask.display());
        for (case, words) in cases {
            let mut words = words.to_vec();
            if case.starts_with("image") || case.starts_with("mask") {
                words.push(&image);
            }
            if case.starts_with("mask") {
                words.push(&mask);
            }
            if *case == "control" {
                words.push(&control);
            }
            let made = match *case {
                "true_cfg" => self.generate(&words),
                _ => self.generate_from_seeds(&words),
            };
            let expected = golden.values(&format!("out/{case}"));
            let error = distance(&samples(&made.unwrap()), expected);
            eprintln!("{} {case}: {error:.1e}", self.name);
            assert!(error < 1e-4, "{case}: relative L2 error {error:e}");
        }
    }

    /// The distance of the last samples from diffusers'.
    pub fn error(&self, more: &[&str]) -> f64 {
        let made = self.generate(more).unwrap();
        distance(&samples(&made), self.golden().values("out/latents"))
    }

    /// Samples within 1e-4 of diffusers', and every colour of the images that it has.
    pub fn check(&self, more: &[&str]) {
        let (name, golden) = (self.name, self.golden());
        let made = self.generate(more).unwrap();
        let error = distance(&samples(&made), golden.values("out/latents"));
        eprintln!("{name}: {error:.1e}");
        assert!(error < 1e-4, "{name}: relative L2 error {error:e}");
        let expected = golden.values("out/images");
        let [count, _, height, width] = golden.dims("out/images").try_into().unwrap();
        assert_eq!(made.images.len(), count);
        for (n, image) in made.images.iter().enumerate() {
            let size = (image.height() as usize, image.width() as usize);
            assert_eq!(size, (height, width));
            for (x, y, pixel) in image.enumerate_pixels() {
                for (c, byte) in pixel.0.iter().enumerate() {
                    let at = ((n * 3 + c) * height + y as usize) * width + x as usize;
                    let value = expected[at] * 255.0;
                    let is_near = (f64::from(*byte) - value).abs() < 0.6;
                    assert!(is_near, "{name} {n}: {x}, {y}");
                }
            }
        }
    }

    /// The error of each override, as it says a part of it.
    pub fn refuses(&self, words: &[(&str, &str)]) {
        for (word, expected) in words {
            let error = self.generate(&[word]).err();
            let error = error.unwrap_or_else(|| panic!("{word}")).to_string();
            assert!(error.contains(expected), "{word}: {error}");
        }
    }
}

/// The error of `generate`'s checks of a folder with `recipe`, if there is one.
pub fn error_of(recipe: &str, dir: &Path, words: &[&str]) -> Option<String> {
    let all = [
        format!("pretrained_model_name_or_path={}", dir.display()),
        "prompt=x".to_owned(),
        "resolution=16".to_owned(),
    ];
    let words: Vec<String> = all
        .into_iter()
        .chain(words.iter().map(|word| (*word).to_owned()))
        .collect();
    let recipe = Path::new(recipe);
    let loaded = Config::load(recipe, &words, Some(Verb::Generate)).unwrap();
    let made = recipe::generation(&loaded.config, &loaded.given, recipe, &mut |_| {});
    made.err().map(|error| error.to_string())
}

/// The last samples of all images.
pub fn samples(made: &Generated) -> Vec<f64> {
    let samples = made.samples.iter();
    samples
        .flat_map(|s: &HostTensor| s.to_f64_vec().unwrap())
        .collect()
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
