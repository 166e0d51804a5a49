//! Pipelines that take images.

use image::RgbImage;

use crate::common::{self, Golden, distance, keeping_session};
use maxdiff::emit::DotPrecision;
use maxdiff::host_tensor::HostTensor;
use maxdiff::models::controlnet;
use maxdiff::models::vae::Autoencoder;
use maxdiff::models::{ControlNet, DenoiserKind};
use maxdiff::nn::Precision;
use maxdiff::pipelines::denoiser::ControlImage;
use maxdiff::pipelines::generator::{CompiledModel, ModelOutput, Redraw, SamplingOptions};
use maxdiff::pipelines::image_prompt::{ImagePrompt, Middle, clip_pixels};
use maxdiff::pipelines::text_to_image::{DenoiseOptions, Guidance};
use maxdiff::pipelines::traced::TracedModel;
use maxdiff::pipelines::{Event, HiresUpscaler, Phase};
use maxdiff::schedulers::{PlanOptions, SchedulerKind, Start};

use super::case::Case;
use super::samples;

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
            mode: None,
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
                ControlNet::from_json(DenoiserKind::Unet, &config).unwrap()
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
        // The same samples, their images scaled and cropped.
        let image_size = Some([9, 14]);
        let options = SamplingOptions {
            image_size,
            ..options
        };
        let made = case.run(&session, &pipeline, &options);
        check_samples(&made, &golden, kind);
        assert!(
            made.images
                .iter()
                .all(|image| image.dimensions() == (14, 9))
        );
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

/// Linear projections and a resampler; the pixels of the image are those that transformers prepares.
#[test]
fn ip_adapters_make_the_latents_of_diffusers() {
    let session = keeping_session();
    let golden = Golden::read("ip_adapter/io.safetensors");
    let pixels = HostTensor::from_f32([1, 3, 16, 16], &floats(&golden, "in/pixel_values")).unwrap();
    let dims = golden.dims("in/image");
    let bytes = golden.values("in/image").iter().map(|b| *b as u8).collect();
    let image = RgbImage::from_raw(dims[1] as u32, dims[0] as u32, bytes).unwrap();
    let own = clip_pixels(&image.into(), 16, Middle::Transformers).unwrap();
    let differences = own.to_f64_vec().unwrap();
    let differences = differences.iter().zip(golden.values("in/pixel_values"));
    let largest = differences.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    // A byte is 0.014 at least.
    assert!(largest < 1e-5, "{largest}");

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
        skip_layers: Vec::new(),
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
