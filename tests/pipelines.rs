//! Whole text-to-image pipelines against diffusers, from the same noise.

use std::path::Path;

use image::RgbImage;

use crate::common::{self, Golden, distance, golden, keeping_session, kernels_run};
use maxdiff::config::{Config, Verb};
use maxdiff::data::Tokenizer;
use maxdiff::dtype::DType;
use maxdiff::emit::DotPrecision;
use maxdiff::host_tensor::HostTensor;
use maxdiff::models::clip::ClipTextConfig;
use maxdiff::models::clip::vision::ClipVisionConfig;
use maxdiff::models::controlnet::{self, ControlNetConfig};
use maxdiff::models::ip_adapter::{self, IpAdapterConfig};
use maxdiff::models::unet::UNet2DConditionConfig;
use maxdiff::models::vae::{self, Autoencoder};
use maxdiff::models::{DiffusionModel, HiddenState, MicroConditioning, Part, TextEncoder};
use maxdiff::nn::{Precision, Remat};
use maxdiff::pipelines::denoiser::ControlImage;
use maxdiff::pipelines::generator::{CompiledModel, ModelOutput, Redraw, SamplingOptions};
use maxdiff::pipelines::image_prompt::{ImagePrompt, clip_pixels};
use maxdiff::pipelines::prompt::{PromptSyntax, encode_prompt};
use maxdiff::pipelines::text_to_image::{DenoiseOptions, Guidance};
use maxdiff::pipelines::traced::TracedModel;
use maxdiff::pipelines::{
    EmbeddingRows, Event, HiresUpscaler, Observer, Phase, Pipeline, PipelineError, TakeWeight,
    TextualInversion, TextualInversions, TokenizedImage, WeightSource,
};
use maxdiff::quant::Policy;
use maxdiff::recipe::{self, Notice};
use maxdiff::runtime::{Session, Slot};
use maxdiff::schedulers::{PlanOptions, SamplingPlan, SchedulerConfig, SchedulerKind, Start};
use maxdiff::shape::Shape;
use maxdiff::weights::Checkpoint;
use maxdiff::weights::source::ModelSource;

/// The recorded vocabulary as a tokenizer that pads with `pad`.
fn tokenizer(pad: &str) -> Tokenizer {
    let dir = tempfile::tempdir().unwrap();
    for file in ["vocab.json", "merges.txt"] {
        std::fs::copy(golden("tokenizer").join(file), dir.path().join(file)).unwrap();
    }
    let config = serde_json::json!({
        "tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "pad_token": pad,
    });
    std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    Tokenizer::from_dir(dir.path(), 77).unwrap()
}

struct Case {
    source: ModelSource,
    golden: Golden,
    model: DiffusionModel,
    tokenizers: Vec<Tokenizer>,
    is_xl: bool,
    /// The file of its IP-Adapter, if it has one.
    adapter: String,
    /// The folder of the UNet in that of the pipeline.
    unet: &'static str,
    quantization: Option<Policy>,
    /// Rows of embedding tables that textual inversions replace.
    rows: Vec<EmbeddingRows>,
}

impl Case {
    fn read(name: &str, precision: Precision) -> Case {
        let folder = format!("pipeline_{name}");
        let source = ModelSource::open(&golden(&folder)).unwrap();
        let config = |part: Part| source.component(part).unwrap().config.clone();
        let is_xl = name == "sdxl";
        let mut text_encoders = vec![TextEncoder {
            part: Part::TextEncoder,
            config: ClipTextConfig::from_map(config(Part::TextEncoder)).unwrap(),
            hidden: HiddenState::Normed { skip: 0 },
        }];
        let mut tokenizers = vec![tokenizer("<|endoftext|>")];
        if is_xl {
            text_encoders[0].hidden = HiddenState::Raw { skip: 1 };
            text_encoders.push(TextEncoder {
                part: Part::TextEncoder2,
                config: ClipTextConfig::from_map(config(Part::TextEncoder2)).unwrap(),
                hidden: HiddenState::Raw { skip: 1 },
            });
            tokenizers.push(tokenizer("!"));
        }
        let model = DiffusionModel {
            family: source.family,
            unet: UNet2DConditionConfig::from_map(config(Part::Unet)).unwrap(),
            text_encoders,
            controlnets: Vec::new(),
            ip_adapter: None,
            vae: Some(Autoencoder::from_map(config(Part::Vae)).unwrap()),
            preview_vae: None,
            precision,
            remat: Remat::None,
            scheduler: SchedulerConfig::from_map(source.scheduler.as_ref().unwrap()).unwrap(),
            sample_size: [8, 8],
            image_size: [16, 16],
            tokens: 77,
            micro_conditioning: MicroConditioning::TargetSize,
            decode_tile: None,
        };
        Case {
            adapter: String::new(),
            unet: "unet",
            golden: Golden::read(&format!("{folder}/io.safetensors")),
            source,
            model,
            tokenizers,
            is_xl,
            quantization: None,
            rows: Vec::new(),
        }
    }

    /// The same parts with a recorded IP-Adapter.
    fn with_adapter(name: &str, adapter: &str) -> Case {
        let mut case = Case::read(name, Precision::F32);
        case.adapter = format!("ip_adapter/{adapter}.safetensors");
        let file = Checkpoint::open(&golden(&case.adapter)).unwrap();
        let vision = Golden::text("ip_adapter/image_encoder/config.json");
        let vision = ClipVisionConfig::from_json(&vision).unwrap();
        let features = case.model.unet.cross_attention_dim.get(0).unwrap();
        let sizes = |name: &str| file.info(name).map(|shape| shape.dims.clone());
        case.model.ip_adapter = Some(IpAdapterConfig::new(vision, features, &sizes).unwrap());
        case
    }

    /// The same parts with a UNet for inpainting.
    fn inpainting(name: &str) -> Case {
        let mut case = Case::read(name, Precision::F32);
        case.unet = "unet_inpainting";
        let config = Golden::text(&format!("pipeline_{name}/{}/config.json", case.unet));
        case.model.unet = UNet2DConditionConfig::from_json(&config).unwrap();
        case
    }

    /// SDXL's refiner, with the second text encoder and the VAE of the base model.
    fn refiner() -> Case {
        let mut case = Case::read("sdxl", Precision::F32);
        let source = ModelSource::open(&golden("pipeline_refiner")).unwrap();
        assert!(source.requires_aesthetics_score && !source.zero_empty_prompts);
        let unet = source.component(Part::Unet).unwrap().config.clone();
        case.golden = Golden::read("pipeline_refiner/refined.safetensors");
        let score = |key: &str| case.golden.meta[key].as_f64().unwrap() as f32;
        let micro_conditioning = MicroConditioning::AestheticScore {
            score: score("aesthetic_score"),
            negative: score("negative_aesthetic_score"),
        };
        for key in ["prompts", "negative", "guidance_scale"] {
            let io = Golden::read("pipeline_sdxl/io.safetensors");
            case.golden.meta[key] = io.meta[key].clone();
        }
        case.model = DiffusionModel {
            family: source.family,
            unet: UNet2DConditionConfig::from_map(unet).unwrap(),
            text_encoders: case.model.text_encoders.split_off(1),
            scheduler: SchedulerConfig::from_map(source.scheduler.as_ref().unwrap()).unwrap(),
            micro_conditioning,
            ..case.model
        };
        case.model.check_time_ids().unwrap();
        case.tokenizers.remove(0);
        case.is_xl = false;
        case.unet = "../pipeline_refiner/unet";
        case
    }

    fn text(&self, key: &str) -> String {
        self.golden.meta[key].as_str().unwrap().to_string()
    }

    fn images(&self) -> Vec<TokenizedImage> {
        let negative = self.text("negative");
        let encode = |text: &str| {
            self.tokenizers
                .iter()
                .map(|t| encode_prompt(t, text, PromptSyntax::Weighted).unwrap())
                .collect::<Vec<_>>()
        };
        let prompts = self.golden.meta["prompts"].as_array().unwrap();
        prompts
            .iter()
            .enumerate()
            .map(|(i, prompt)| TokenizedImage {
                plan: 0,
                guidance_scale: self.golden.meta["guidance_scale"].as_f64().unwrap() as f32,
                prompt: encode(prompt.as_str().unwrap()),
                negative: encode(&negative),
                negative_is_empty: negative.is_empty(),
                seed: i as u64,
                init: 0,
            })
            .collect()
    }

    fn options(&self, batch: usize) -> DenoiseOptions {
        DenoiseOptions {
            batch,
            tokens: 77,
            guidance: Guidance::OneBatch,
            quantization: self.quantization.clone(),
        }
    }

    fn compile(&self, session: &Session, batch: usize, from_image: bool) -> CompiledModel {
        self.compile_guided(session, batch, from_image, Guidance::OneBatch)
    }

    fn compile_guided(
        &self,
        session: &Session,
        batch: usize,
        from_image: bool,
        guidance: Guidance,
    ) -> CompiledModel {
        let options = DenoiseOptions {
            guidance,
            ..self.options(batch)
        };
        let traced = TracedModel::new(&self.model, options, from_image).unwrap();
        let lowered = traced.lower(session).unwrap();
        CompiledModel::compile(session, &self.model, lowered, DotPrecision::Default, 1).unwrap()
    }

    fn plan(&self) -> SamplingPlan {
        let steps = self.golden.meta["steps"].as_u64().unwrap() as usize;
        self.model.scheduler.plan(&PlanOptions::new(steps)).unwrap()
    }

    /// Images from the recorded noise.
    fn draw(&self, session: &Session, compiled: &CompiledModel) -> ModelOutput {
        let dims = self.golden.dims("in/latents");
        let values: Vec<f32> = self
            .golden
            .values("in/latents")
            .iter()
            .map(|v| *v as f32)
            .collect();
        let latents = HostTensor::from_f32(dims, &values).unwrap();
        let plans = [self.plan()];
        let options = SamplingOptions {
            zero_empty_prompts: self.is_xl,
            latents: Some(&latents),
            ..SamplingOptions::new(&plans)
        };
        self.run(session, compiled, &options)
    }

    fn run(
        &self,
        session: &Session,
        compiled: &CompiledModel,
        options: &SamplingOptions<'_>,
    ) -> ModelOutput {
        self.run_images(session, compiled, &self.images(), options)
    }

    fn run_images(
        &self,
        session: &Session,
        compiled: &CompiledModel,
        images: &[TokenizedImage],
        options: &SamplingOptions<'_>,
    ) -> ModelOutput {
        self.run_observed(session, compiled, images, options, &mut |_| Ok(()))
    }

    fn run_observed(
        &self,
        session: &Session,
        compiled: &CompiledModel,
        images: &[TokenizedImage],
        options: &SamplingOptions<'_>,
        observer: &mut Observer<'_>,
    ) -> ModelOutput {
        let tensor = |slot: &Slot| -> Result<HostTensor, PipelineError> {
            let (root, key) = slot.name.split_once('/').unwrap();
            let beside = match root {
                ip_adapter::ROOT => &self.adapter,
                ip_adapter::IMAGE_ENCODER => "ip_adapter/image_encoder",
                _ => "",
            };
            if !beside.is_empty() {
                let file = Checkpoint::open(&golden(beside))?;
                return Ok(file.read_as(key, slot.shape.dtype)?);
            }
            let folder = match root {
                _ if root.starts_with(controlnet::ROOT) => root,
                "unet" => self.unet,
                vae::PREVIEW_ROOT => "../vae_tiny",
                _ => "",
            };
            if !folder.is_empty() {
                let file = Checkpoint::open(&self.source.path.join(folder))?;
                return Ok(file.read_as(key, slot.shape.dtype)?);
            }
            let part = Part::from_name(root).unwrap();
            let checkpoint = &self.source.component(part)?.checkpoint;
            let mut tensor = checkpoint.read_as(key, slot.shape.dtype)?;
            for rows in &self.rows {
                rows.apply(root, key, &mut tensor)?;
            }
            Ok(tensor)
        };
        let read = |slots: &[Slot], show: &mut TakeWeight<'_>| {
            slots
                .iter()
                .try_for_each(|slot| show(session.put(&tensor(slot)?, &slot.spec)?))
        };
        compiled
            .run(
                session,
                &WeightSource::Files(&read),
                images,
                options,
                observer,
            )
            .unwrap()
    }
}

/// The samples of all batches, without those that fill the last one up.
fn samples(made: &ModelOutput, count: usize) -> Vec<f64> {
    let values: Vec<f64> = made
        .samples
        .iter()
        .flat_map(|s| s.to_f64_vec().unwrap())
        .collect();
    values[..count].to_vec()
}

#[test]
fn the_tokens_are_transformers() {
    for name in ["sd15", "sdxl"] {
        let case = Case::read(name, Precision::F32);
        for (which, encoder) in case.model.text_encoders.iter().enumerate() {
            for (i, image) in case.images().iter().enumerate() {
                for (kind, tokens) in [("prompt", &image.prompt), ("negative", &image.negative)] {
                    let ids = case
                        .golden
                        .values(&format!("in/{kind}_ids.{}", encoder.part));
                    let found: Vec<f64> = tokens[which]
                        .ids()
                        .iter()
                        .map(|id| f64::from(*id))
                        .collect();
                    assert_eq!(found, ids[i * 77..(i + 1) * 77], "{name} {kind} {i}");
                }
            }
        }
    }
}

#[test]
fn latents_and_images_are_diffusers_after_twenty_steps() {
    let session = keeping_session();
    for name in ["sd15", "sd21", "sdxl"] {
        let case = Case::read(name, Precision::F32);
        let expected = case.golden.values("out/latents");
        let pipeline = case.compile(&session, 2, false);
        let made = case.draw(&session, &pipeline);
        let error = distance(&samples(&made, expected.len()), expected);
        assert!(error < 1e-4, "{name}: relative L2 error {error:e}");
        assert_images(&made.images, case.golden.values("out/images"));
    }
}

/// Asserts that images have the values `[images, 3, 16, 16]` in [0, 1].
fn assert_images(images: &[image::RgbImage], expected: &[f64]) {
    assert_eq!(images.len() * 3 * 16 * 16, expected.len());
    for (n, image) in images.iter().enumerate() {
        for (x, y, pixel) in image.enumerate_pixels() {
            for (c, byte) in pixel.0.iter().enumerate() {
                let at = ((n * 3 + c) * 16 + y as usize) * 16 + x as usize;
                let value = expected[at] * 255.0;
                assert!(
                    (f64::from(*byte) - value).abs() < 0.6,
                    "image {n} at {x}, {y}: {byte} for {value}"
                );
            }
        }
    }
}

#[test]
fn textual_inversions_make_the_latents_of_diffusers() {
    let session = keeping_session();
    for (name, files) in [
        ("sd15", ["my-style", "cat", "one"].as_slice()),
        ("sdxl", &["xl"]),
    ] {
        let mut case = Case::read(name, Precision::F32);
        let golden = Golden::read("textual_inversion/io.safetensors");
        case.golden.meta = golden.meta.clone();
        for key in ["prompts", "negative"] {
            case.golden.meta[key] = golden.meta[key][name].clone();
        }
        let mut inversions = TextualInversions::default();
        for file in files {
            let path = common::golden(&format!("textual_inversion/{file}.safetensors"));
            let token = (*file == "xl").then_some("xl-style");
            let inversion = TextualInversion::open(&path, token).unwrap();
            let encoders = &case.model.text_encoders;
            inversions
                .add(&inversion, encoders, &mut case.tokenizers)
                .unwrap();
        }
        let mut images = case.images();
        assert_eq!(inversions.unused(&images), Vec::<String>::new());
        let encoders = &case.model.text_encoders;
        case.rows = inversions
            .place(encoders, &case.tokenizers, &mut images)
            .unwrap();
        let latents = golden.tensor(
            &format!("in/{name}_latents"),
            &Shape::new(DType::F32, [2, 4, 8, 8]),
        );
        let pipeline = case.compile(&session, 2, false);
        let plans = [case.plan()];
        let options = SamplingOptions {
            zero_empty_prompts: case.is_xl,
            latents: Some(&latents),
            ..SamplingOptions::new(&plans)
        };
        let made = case.run_images(&session, &pipeline, &images, &options);
        let expected = golden.values(&format!("out/{name}_latents"));
        let error = distance(&samples(&made, expected.len()), expected);
        assert!(error < 1e-4, "{name}: relative L2 error {error:e}");
    }
}

#[test]
fn skipped_layers_make_the_latents_of_diffusers() {
    let session = keeping_session();
    let golden = Golden::read("clip_skip.safetensors");
    for (name, skips) in [("sd15", [1, 1]), ("sdxl", [1, 2])] {
        let mut case = Case::read(name, Precision::F32);
        case.golden.meta = golden.meta.clone();
        let negative = ["blurry", ""][usize::from(case.is_xl)];
        case.golden.meta["negative"] = negative.into();
        for (encoder, skip) in case.model.text_encoders.iter_mut().zip(skips) {
            encoder.hidden = encoder.hidden.earlier(skip);
        }
        let pipeline = case.compile(&session, 2, false);
        let plans = [case.plan()];
        let shape = Shape::new(DType::F32, [2, 4, 8, 8]);
        let options = SamplingOptions {
            zero_empty_prompts: case.is_xl,
            latents: Some(&golden.tensor("in/latents", &shape)),
            ..SamplingOptions::new(&plans)
        };
        let made = case.run(&session, &pipeline, &options);
        let expected = golden.values(&format!("out/{name}_{}{}", skips[0], skips[1]));
        let error = distance(&samples(&made, expected.len()), expected);
        assert!(
            error < 1e-4,
            "{name} {skips:?}: relative L2 error {error:e}"
        );
    }
}

/// The recipe of SDXL-Lightning, with a UNet, with a LoRA, and with a LoRA beside the UNet.
#[test]
fn lightning_makes_the_latents_of_diffusers() {
    let recorded = Golden::read("lightning/io.safetensors");
    let latents = recorded.tensor("in/latents", &Shape::new(DType::F32, [2, 4, 8, 8]));
    let at = |name: &str| golden(name).display().to_string();
    let recipe = Path::new("sdxl-lightning");
    let lora = format!(
        "lora_config.lora_model_name_or_path=[{}]",
        at("lightning/lora.safetensors")
    );
    // Clipping as the published model's own files have it; Euler's have no such keys.
    let both = [
        "diffusion_scheduler_config.clip_sample=False",
        "diffusion_scheduler_config.set_alpha_to_one=False",
        &lora,
    ];
    for (case, file, more) in [
        ("unet", "unet", ["scheduler=euler"].as_slice()),
        ("lora", "lora", &["scheduler=euler"]),
        ("both", "unet", &both),
    ] {
        let prompts = &recorded.meta["prompts"];
        let words = [
            format!("pretrained_model_name_or_path={}", at("pipeline_sdxl")),
            format!("tokenizer_model_name_or_path={}", at("tokenizer")),
            format!("lightning_repo={}", at("lightning")),
            format!("lightning_ckpt={file}.safetensors"),
            format!("prompt=[{}, {}]", prompts[0], prompts[1]),
            "resolution=16".to_owned(),
            "activations_dtype=float32".to_owned(),
        ];
        let words: Vec<String> = words
            .into_iter()
            .chain(more.iter().map(|word| word.to_string()))
            .collect();
        let loaded = Config::load(recipe, &words, Some(Verb::Generate)).unwrap();
        let mut notify = |_: Notice<'_>| {};
        let mut made =
            recipe::generation(&loaded.config, &loaded.given, recipe, &mut notify).unwrap();
        assert_eq!(made.request.images[0].steps, 4);
        // SDXL's second tokenizer pads with another token.
        made.options.base.tokenizers = ["<|endoftext|>", "!"].map(tokenizer).into();
        made.request.latents = Some(latents.clone());
        let mut pipeline = Pipeline::open(keeping_session(), made.options).unwrap();
        let made = pipeline.generate(&made.request, &mut |_| Ok(())).unwrap();
        let found = made.samples.iter().flat_map(|s| s.to_f64_vec().unwrap());
        let error = distance(
            &found.collect::<Vec<f64>>(),
            recorded.values(&format!("out/{case}")),
        );
        assert!(error < 1e-4, "{case}: relative L2 error {error:e}");
    }
}

/// The tiny autoencoder in place of the pipeline's own, on diffusers' latents, and for previews alone.
#[test]
fn a_tiny_autoencoder_makes_the_images_of_diffusers_or_previews() {
    let session = keeping_session();
    let config = Golden::text("vae_tiny/config.json");
    let tiny = Autoencoder::from_map(serde_json::from_str(&config).unwrap()).unwrap();
    let golden = Golden::read("vae_tiny/io.safetensors");
    let draw = |case: &Case| {
        let latents = case
            .golden
            .tensor("in/latents", &Shape::new(DType::F32, [2, 4, 8, 8]));
        let plans = [case.plan()];
        let options = SamplingOptions {
            latents: Some(&latents),
            preview_every: Some(15),
            ..SamplingOptions::new(&plans)
        };
        let mut previews = Vec::new();
        let mut observer = |event: Event<'_>| {
            if let Event::Preview { preview, .. } = event {
                previews.push(preview.clone());
            }
            Ok(())
        };
        let pipeline = case.compile(&session, 2, false);
        let images = case.images();
        let made = case.run_observed(&session, &pipeline, &images, &options, &mut observer);
        (made.images, previews)
    };
    let mut images = Case::read("sd15", Precision::F32);
    images.model.vae = Some(tiny.clone());
    let path = common::golden("vae_tiny");
    images.source.replace_autoencoder(&path).unwrap();
    let (made, expected) = draw(&images);
    assert_images(&made, golden.values("out/pipeline_sd15"));
    assert_eq!(expected.len(), 2);

    let mut previews = Case::read("sd15", Precision::F32);
    previews.model.preview_vae = Some(tiny);
    let (made, found) = draw(&previews);
    assert_images(&made, previews.golden.values("out/images"));
    assert!(found == expected);
}

#[test]
fn two_passes_make_the_latents_of_one_batch() {
    let session = keeping_session();
    for name in ["sd15", "sdxl"] {
        let case = Case::read(name, Precision::F32);
        let expected = case.golden.values("out/latents");
        let pipeline = case.compile_guided(&session, 2, false, Guidance::TwoPasses);
        let made = case.draw(&session, &pipeline);
        let error = distance(&samples(&made, expected.len()), expected);
        assert!(error < 1e-4, "{name}: relative L2 error {error:e}");
    }
}

#[test]
fn previews_show_every_image_after_the_steps_asked_for() {
    let session = keeping_session();
    let case = Case::read("sd15", Precision::F32);
    let images = case.images();
    let pipeline = case.compile(&session, 2, false);
    let plans = [case.plan()];
    let mut steps = 0;
    let mut shown = Vec::new();
    let options = SamplingOptions {
        preview_every: Some(7),
        ..SamplingOptions::new(&plans)
    };
    let mut observer = |event: Event<'_>| {
        match event {
            Event::Step => steps += 1,
            Event::Preview {
                image,
                steps,
                preview,
            } => shown.push((image, steps, preview.clone())),
            _ => {}
        }
        Ok(())
    };
    let made = case.run_observed(&session, &pipeline, &images, &options, &mut observer);
    assert_eq!((images.len(), steps), (2, plans[0].steps.len()));
    // None after the last step, the 21st of PNDM: that is the image.
    let at: Vec<(usize, usize)> = shown.iter().map(|(p, steps, _)| (*p, *steps)).collect();
    assert_eq!(at, [(0, 7), (1, 7), (0, 14), (1, 14)]);
    for (index, _, image) in &shown {
        let finished = &made.images[*index];
        assert_eq!(image.dimensions(), finished.dimensions());
        assert!(image != finished);
    }
    let options = SamplingOptions::new(&plans);
    let quiet = case.run(&session, &pipeline, &options);
    assert!(quiet.images == made.images);
}

/// Prompts, negative prompts, seeds, guidance and step counts are inputs of the programs.
#[test]
fn other_settings_compile_nothing() {
    let session = keeping_session();
    let case = Case::read("sdxl", Precision::F32);
    let pipeline = case.compile(&session, 1, false);
    let compiled = session.program_counts();
    // Another test may have compiled them before.
    let known = compiled.compiled + compiled.from_cache;
    assert_eq!(known, pipeline.timings().programs);
    let plans = [3, 5].map(|steps| {
        let options = PlanOptions::new(steps);
        case.model.scheduler.plan(&options).unwrap()
    });
    let encode = |text: &str| -> Vec<_> {
        let tokenizers = case.tokenizers.iter();
        tokenizers
            .map(|t| encode_prompt(t, text, PromptSyntax::Weighted).unwrap())
            .collect()
    };
    let image = |plan, guidance_scale, prompt, negative, seed| TokenizedImage {
        plan,
        guidance_scale,
        prompt: encode(prompt),
        negative: encode(negative),
        negative_is_empty: false,
        seed,
        init: 0,
    };
    let images = [
        image(0, 5.0, "a red circle", "blurred", 0),
        image(1, 7.5, "two (blue:1.3) squares", "dark", 1),
    ];
    let options = SamplingOptions {
        zero_empty_prompts: true,
        ..SamplingOptions::new(&plans)
    };
    let rescaled = SamplingOptions {
        guidance_rescale: 0.7,
        ..options
    };
    let first = case.run_images(&session, &pipeline, &images, &options);
    let second = case.run_images(&session, &pipeline, &images, &rescaled);
    assert_eq!((first.images.len(), second.images.len()), (2, 2));
    assert_ne!(first.images[0], first.images[1]);
    assert_ne!(first.images[1], second.images[1]);
    assert_eq!(session.program_counts(), compiled);
}

#[test]
fn bfloat16_stays_near() {
    let session = keeping_session();
    let precision = Precision {
        weights: DType::F32,
        activations: DType::BF16,
    };
    let case = Case::read("sd21", precision);
    let expected = case.golden.values("out/latents");
    let made = case.draw(&session, &case.compile(&session, 2, false));
    let error = distance(&samples(&made, expected.len()), expected);
    assert!(error < 2e-2, "relative L2 error {error:e}");
    assert!(error > 1e-5, "{error:e}: nothing was rounded");
}

/// The final latents of twenty steps with the CPU plugin's kernels, against those in float32: bf16, and int8 of AQT and
/// of Qwix on bf16, as measured with AVX-512's bf16 and AMX.
#[test]
fn bf16_and_int8_stay_near_float32() {
    // Fails where none run, unless that is known.
    kernels_run();
    let session = keeping_session();
    let latents = |precision: Precision, quantization: Option<Policy>| {
        let mut case = Case::read("sd21", precision);
        case.quantization = quantization;
        let made = case.draw(&session, &case.compile(&session, 2, false));
        samples(&made, case.golden.values("out/latents").len())
    };
    let float32 = latents(Precision::F32, None);
    let bf16 = Precision {
        weights: DType::BF16,
        activations: DType::BF16,
    };
    let aqt = || {
        Policy::aqt_int8(
            "unet/",
            1,
            Vec::new(),
            &maxdiff::models::unet::INT8_FLOAT_LAYERS,
        )
        .unwrap()
    };
    let qwix = || Policy::qwix_int8("unet/", ".*", Vec::new()).unwrap();
    let errors = [None, Some(aqt()), Some(qwix())]
        .map(|quantization| distance(&latents(bf16, quantization), &float32));
    for (error, measured) in errors.into_iter().zip([1.233e-2, 4.115e-2, 4.118e-2]) {
        // Sums in another order are rounded otherwise; half of what was measured would be another rounding.
        assert!(
            (0.5 * measured..1.5 * measured).contains(&error),
            "relative L2 errors of bf16, AQT's int8 and Qwix's int8: {errors:?}"
        );
    }
}

/// Two images in batches of three and of one: what fills a batch up changes nothing, and neither do neighbours.
#[test]
fn images_do_not_depend_on_their_batch() {
    let session = keeping_session();
    let case = Case::read("sd21", Precision::F32);
    let expected = case.golden.values("out/latents");
    let one = case.draw(&session, &case.compile(&session, 1, false));
    assert_eq!(one.samples.len(), 2);
    assert_eq!(one.images.len(), 2);
    let three = case.draw(&session, &case.compile(&session, 3, false));
    assert_eq!(three.samples.len(), 1);
    assert_eq!(three.images.len(), 2);
    for made in [&one, &three] {
        let error = distance(&samples(made, expected.len()), expected);
        assert!(error < 1e-4, "relative L2 error {error:e}");
    }
}

/// The recorded image, in [-1, 1].
fn image(golden: &Golden) -> HostTensor {
    let bytes = golden.values("in/image");
    let values: Vec<f32> = (0..3 * 256)
        .map(|i| (bytes[i % 256 * 3 + i / 256] / 127.5 - 1.0) as f32)
        .collect();
    HostTensor::from_f32([1, 3, 16, 16], &values).unwrap()
}

/// The recorded mask.
fn mask(golden: &Golden) -> HostTensor {
    let bytes = golden.values("in/mask").iter();
    let values: Vec<f32> = bytes.map(|b| f32::from(u8::from(*b >= 128.0))).collect();
    HostTensor::from_f32([1, 1, 16, 16], &values).unwrap()
}

/// From an image, and with a mask that keeps a part of it; the noise is that of each image's seed.
#[test]
fn images_from_images_are_diffusers() {
    let session = keeping_session();
    let case = Case::read("sd21", Precision::F32);
    let golden = Golden::read("pipeline_sd21/from_image.safetensors");
    let pipeline = case.compile(&session, 2, true);
    let image = image(&golden);
    let mask = mask(&golden);
    for (kind, strength, mask) in [
        ("image_0.6", 0.6, None),
        ("image_1", 1.0, None),
        ("mask_0.6", 0.6, Some(&mask)),
        ("mask_1", 1.0, Some(&mask)),
        ("mask_ancestral", 0.6, Some(&mask)),
    ] {
        let plan = PlanOptions {
            start: Start::Strength(strength),
            ..PlanOptions::new(10)
        };
        let mut scheduler = case.model.scheduler.clone();
        if kind == "mask_ancestral" {
            scheduler.kind = SchedulerKind::EulerAncestral;
        }
        let plans = [scheduler.plan(&plan).unwrap()];
        let options = SamplingOptions {
            images: std::slice::from_ref(&image),
            mask,
            ..SamplingOptions::new(&plans)
        };
        let made = case.run(&session, &pipeline, &options);
        check_samples(&made, &golden, kind);
    }
}

/// Compares the last samples with those that diffusers gave for `kind`.
fn check_samples(made: &ModelOutput, golden: &Golden, kind: &str) {
    let expected = golden.values(&format!("out/{kind}"));
    let error = distance(&samples(made, expected.len()), expected);
    assert!(error < 1e-4, "{kind}: relative L2 error {error:e}");
}

/// The tiny autoencoder gives latents and no distribution, so none of the seed's noise is drawn for them.
#[test]
fn images_from_images_of_a_tiny_autoencoder_are_diffusers() {
    let session = keeping_session();
    let mut case = Case::read("sd21", Precision::F32);
    let config = Golden::text("vae_tiny/config.json");
    let config = serde_json::from_str(&config).unwrap();
    case.model.vae = Some(Autoencoder::from_map(config).unwrap());
    let path = common::golden("vae_tiny");
    case.source.replace_autoencoder(&path).unwrap();
    let given = Golden::read("pipeline_sd21/from_image.safetensors");
    let golden = Golden::read("vae_tiny/io.safetensors");
    let pipeline = case.compile(&session, 2, true);
    let (image, mask) = (image(&given), mask(&given));
    let plan = PlanOptions {
        start: Start::Strength(0.6),
        ..PlanOptions::new(10)
    };
    let plans = [case.model.scheduler.plan(&plan).unwrap()];
    for (kind, mask) in [("image_0.6", None), ("mask_0.6", Some(&mask))] {
        let options = SamplingOptions {
            images: std::slice::from_ref(&image),
            mask,
            ..SamplingOptions::new(&plans)
        };
        let made = case.run(&session, &pipeline, &options);
        check_samples(&made, &golden, kind);
    }
}

/// One ControlNet, and two whose effects add up, each with a scale and a part of the steps of its own.
#[test]
fn controlnets_steer_as_in_diffusers() {
    let session = keeping_session();
    let golden = Golden::read("pipeline_sd15/controlled.safetensors");
    let f32s = |name: &str| -> Vec<f32> { golden.values(name).iter().map(|v| *v as f32).collect() };
    let number = |key: &str| golden.meta[key].as_f64().unwrap();
    let latents = HostTensor::from_f32(golden.dims("in/latents"), &f32s("in/latents")).unwrap();
    let control = |name: &str, scale: &str, range: [f64; 2]| {
        let bytes = golden.values(name);
        let values: Vec<f32> = (0..3 * 256)
            .map(|i| (bytes[i % 256 * 3 + i / 256] / 255.0) as f32)
            .collect();
        ControlImage {
            image: HostTensor::from_f32([1, 3, 16, 16], &values).unwrap(),
            scale: number(scale) as f32,
            range,
        }
    };
    let controls = [
        control("in/image", "scale", [0.0, number("end")]),
        control("in/image_1", "scale_1", [number("start_1"), 1.0]),
    ];
    for (count, kind) in [(1, "latents"), (2, "both")] {
        let mut case = Case::read("sd15", Precision::F32);
        case.model.controlnets = (0..count)
            .map(|which| {
                let folder = controlnet::root(which);
                let config = Golden::text(&format!("pipeline_sd15/{folder}/config.json"));
                ControlNetConfig::from_json(&config).unwrap()
            })
            .collect();
        let plan = PlanOptions::new(number("steps") as usize);
        let plans = [case.model.scheduler.plan(&plan).unwrap()];
        let options = SamplingOptions {
            controls: &controls[..count],
            latents: Some(&latents),
            ..SamplingOptions::new(&plans)
        };
        let pipeline = case.compile(&session, 2, false);
        let made = case.run(&session, &pipeline, &options);
        check_samples(&made, &golden, kind);
    }
}

/// UNets of nine channels: the noise of each image's seed is drawn in diffusers' order, fresh noise after it.
#[test]
fn models_for_inpainting_paint_as_in_diffusers() {
    let session = keeping_session();
    for name in ["sd15", "sdxl"] {
        let case = Case::inpainting(name);
        assert!(case.model.is_inpainting());
        let golden = Golden::read(&format!("pipeline_{name}/inpainted.safetensors"));
        let (image, mask) = (image(&golden), mask(&golden));
        let pipeline = case.compile(&session, 2, true);
        let steps = golden.meta["steps"].as_u64().unwrap() as usize;
        for (kind, strength) in [
            ("0.6", 0.6),
            ("1", 1.0),
            ("ancestral", 0.6),
            ("ancestral_1", 1.0),
        ] {
            let plan = PlanOptions {
                start: Start::Strength(strength),
                ..PlanOptions::new(steps)
            };
            let mut scheduler = case.model.scheduler.clone();
            if kind.starts_with("ancestral") {
                scheduler.kind = SchedulerKind::EulerAncestral;
            }
            let plans = [scheduler.plan(&plan).unwrap()];
            let options = SamplingOptions {
                zero_empty_prompts: case.is_xl,
                images: std::slice::from_ref(&image),
                mask: Some(&mask),
                ..SamplingOptions::new(&plans)
            };
            let made = case.run(&session, &pipeline, &options);
            let expected = golden.values(&format!("out/{kind}"));
            let error = distance(&samples(&made, expected.len()), expected);
            assert!(error < 1e-4, "{name} {kind}: relative L2 error {error:e}");
        }
    }
}

/// Linear projections and a resampler; the pixels of the image are those that transformers prepares, but for the rounding
/// of bytes.
#[test]
fn ip_adapters_make_the_latents_of_diffusers() {
    let session = keeping_session();
    let golden = Golden::read("ip_adapter/io.safetensors");
    let pixels = HostTensor::from_f32([1, 3, 16, 16], &floats(&golden, "in/pixel_values")).unwrap();
    let dims = golden.dims("in/image");
    let bytes = golden.values("in/image").iter().map(|b| *b as u8).collect();
    let image = RgbImage::from_raw(dims[1] as u32, dims[0] as u32, bytes).unwrap();
    let own = clip_pixels(&image.into(), 16).unwrap();
    let differences = own.to_f64_vec().unwrap();
    let differences = differences.iter().zip(golden.values("in/pixel_values"));
    let largest = differences.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    // A byte is 1 / 255 / 0.26 at most.
    assert!(largest < 1.01 / 255.0 / 0.26, "{largest}");

    let latents = HostTensor::from_f32(golden.dims("in/latents"), &floats(&golden, "in/latents"));
    let latents = latents.unwrap();
    for (name, adapter) in [("sd15", "sd15"), ("sd15", "sd15_plus"), ("sdxl", "sdxl")] {
        let case = Case::with_adapter(name, adapter);
        let compiled = case.compile(&session, 2, false);
        let steps = golden.meta["steps"].as_u64().unwrap() as usize;
        let plans = [case.model.scheduler.plan(&PlanOptions::new(steps)).unwrap()];
        let prompt = ImagePrompt {
            pixels: pixels.clone(),
            scale: golden.meta["scale"].as_f64().unwrap() as f32,
        };
        let options = SamplingOptions {
            zero_empty_prompts: case.is_xl,
            latents: Some(&latents),
            image_prompt: Some(&prompt),
            ..SamplingOptions::new(&plans)
        };
        let made = case.run(&session, &compiled, &options);
        let expected = golden.values(&format!("out/{adapter}"));
        let error = distance(&samples(&made, expected.len()), expected);
        assert!(error < 1e-4, "{adapter}: relative L2 error {error:e}");
    }
}

/// A recorded tensor.
fn floats(golden: &Golden, name: &str) -> Vec<f32> {
    golden.values(name).iter().map(|v| *v as f32).collect()
}

/// Text to image, samples enlarged, and image to image with the same generators. Lanczos's filter rounds to bytes
/// otherwise than Pillow's.
#[test]
fn a_hires_fix_draws_as_diffusers_does() {
    let session = keeping_session();
    for (name, upscalers) in [
        (
            "sd21",
            [HiresUpscaler::LatentBicubic, HiresUpscaler::Lanczos].as_slice(),
        ),
        ("sdxl", &[HiresUpscaler::Latent]),
    ] {
        let case = Case::read(name, Precision::F32);
        let golden = Golden::read(&format!("pipeline_{name}/hires.safetensors"));
        let number = |key: &str| golden.meta[key].as_f64().unwrap();
        let first = PlanOptions::new(number("steps") as usize);
        let second = PlanOptions {
            start: Start::Strength(number("strength")),
            ..PlanOptions::new(number("hires_steps") as usize)
        };
        let [plans, redraw] =
            [first, second].map(|plan| [case.model.scheduler.plan(&plan).unwrap()]);
        let options = SamplingOptions {
            zero_empty_prompts: case.is_xl,
            redraw: Some(Redraw {
                plans: &redraw,
                controls: &[],
            }),
            ..SamplingOptions::new(&plans)
        };
        for upscaler in upscalers {
            let traced = TracedModel::new(&case.model, case.options(2), false).unwrap();
            let traced = traced.with_hires(&case.model, [12, 10], *upscaler).unwrap();
            let lowered = traced.lower(&session).unwrap();
            let compiled =
                CompiledModel::compile(&session, &case.model, lowered, DotPrecision::Default, 1);
            let compiled = compiled.unwrap();
            let steps: Vec<usize> = compiled
                .generator()
                .steps(&case.images(), &options)
                .iter()
                .map(|pass| pass.steps * pass.places)
                .collect();
            assert_eq!(steps, [8 * 64, 5 * 120]);
            let mut reads = 0;
            let mut observer = |event: Event<'_>| {
                reads += usize::from(matches!(
                    event,
                    Event::Phase(Phase::Read { part: "unet", .. })
                ));
                Ok(())
            };
            let made =
                case.run_observed(&session, &compiled, &case.images(), &options, &mut observer);
            assert_eq!(made.images[0].dimensions(), (20, 24));
            assert_eq!(reads, 1, "both passes take the same weights");
            let expected = golden.values(&format!("out/{upscaler}"));
            let error = distance(&samples(&made, expected.len()), expected);
            let most = match upscaler {
                HiresUpscaler::Lanczos => 2e-2,
                _ => 1e-4,
            };
            assert!(
                error < most,
                "{name} {upscaler}: relative L2 error {error:e}"
            );
        }
    }
}

#[test]
fn a_refiner_goes_on_as_in_diffusers() {
    let session = keeping_session();
    let base = Case::read("sdxl", Precision::F32);
    let refiner = Case::refiner();
    let golden = &refiner.golden;
    let number = |key: &str| golden.meta[key].as_f64().unwrap();
    let (steps, share) = (number("steps") as usize, number("share"));
    let options = |batch| DenoiseOptions {
        batch,
        tokens: 77,
        guidance: Guidance::OneBatch,
        quantization: None,
    };
    let compile = |case: &Case, traced: &TracedModel| {
        let lowered = traced.lower(&session).unwrap();
        CompiledModel::compile(&session, &case.model, lowered, DotPrecision::Default, 1).unwrap()
    };
    let traced = TracedModel::new(&base.model, options(2), false).unwrap();
    let first = compile(&base, &traced.handed_on());
    let traced = TracedModel::new(&refiner.model, options(2), true).unwrap();
    let second = compile(&refiner, &traced);

    let values: Vec<f32> = golden
        .values("in/latents")
        .iter()
        .map(|v| *v as f32)
        .collect();
    let latents = HostTensor::from_f32(golden.dims("in/latents"), &values).unwrap();
    for (kind, sampler) in [
        ("euler", SchedulerKind::Euler),
        ("multistep", SchedulerKind::DpmMultistep),
    ] {
        let plan = |case: &Case, plan: PlanOptions| {
            let mut scheduler = case.model.scheduler.clone();
            scheduler.kind = sampler;
            [scheduler.plan(&plan).unwrap()]
        };
        let whole = PlanOptions::new(steps);
        let until = PlanOptions {
            end: Some(share),
            ..whole
        };
        let plans = plan(&base, until);
        let options = SamplingOptions {
            zero_empty_prompts: true,
            latents: Some(&latents),
            ..SamplingOptions::new(&plans)
        };
        let half = base.run(&session, &first, &options);
        assert!(half.images.is_empty());
        let from = PlanOptions {
            start: Start::After(share),
            ..whole
        };
        let plans = plan(&refiner, from);
        let options = SamplingOptions {
            plans: &plans,
            zero_empty_prompts: false,
            latents: None,
            continues: Some(&half),
            ..options
        };
        let made = refiner.run(&session, &second, &options);
        assert_eq!(made.images.len(), 2);
        let expected = golden.values(&format!("out/{kind}"));
        let error = distance(&samples(&made, expected.len()), expected);
        assert!(error < 1e-4, "{kind}: relative L2 error {error:e}");
    }

    // Alone, from an image.
    let image = image(golden);
    let plan = PlanOptions {
        start: Start::Strength(number("strength")),
        ..PlanOptions::new(steps)
    };
    let plans = [refiner.model.scheduler.plan(&plan).unwrap()];
    let options = SamplingOptions {
        images: std::slice::from_ref(&image),
        ..SamplingOptions::new(&plans)
    };
    let made = refiner.run(&session, &second, &options);
    let expected = golden.values("out/alone");
    let error = distance(&samples(&made, expected.len()), expected);
    assert!(error < 1e-4, "alone: relative L2 error {error:e}");
}
