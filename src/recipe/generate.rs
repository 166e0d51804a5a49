//! The models of `generate`, and the images to generate.

use std::path::Path;

use crate::config::{Config, Given, ModelConfig, Place};
use crate::dtype::DType;
use crate::host_tensor::HostTensor;
use crate::models::vae::AutoencoderKlConfig;
use crate::models::{
    DenoiserKind, DiffusionModel, Family, GuidanceKind, MicroConditioning, SampleSpace,
};
use crate::pipelines::prompt::{PromptSyntax, parse_weighted, split_lora_tags};
use crate::pipelines::text_to_image::Guidance;
use crate::pipelines::{
    GenerateRequest, Handover, HiresRequest, ImageRequest, MemoryAdvice, PipelineModel,
    PipelineOptions, SkipLayerGuidance,
};
use crate::schedulers::scheduler_fields;
use crate::weights::Checkpoint;

use super::distilled::Distilled;
use super::inversions::textual_inversions;
use super::model::{asked_size, check_positions, image_size, is_described};
use super::prompts::image_requests;
use super::qat::check_rounded_by_quantize;
use super::scheduler::{
    OwnScheduler, check_redraw, check_sampler_keys, sampling_plan, scheduler_of,
};
use super::source::Source;
use super::{
    Notice, Notify, RecipeError, check_sampling, described_policy, hub, images, ip_adapter, lora,
    model,
};

/// Most images made at once.
const MAX_BATCH: usize = 8;

/// The options and the request of `generate`.
pub struct Generation {
    pub options: PipelineOptions,
    pub request: GenerateRequest,
    /// The name of the model to tell people: that of a repository, folder or file.
    pub model_name: String,
}

/// Finds the models and reads the images that they are given. `given` holds the keys that the configuration sets
/// explicitly, `recipe_file` the file that it was read from.
///
/// # Errors
/// When there are no weights, a model does not fit the configuration, or an image or a prompt cannot be read.
pub fn generation(
    config: &Config,
    given: &Given,
    recipe_file: &Path,
    notify: &mut Notify<'_>,
) -> Result<Generation, RecipeError> {
    let images = image_requests(config, given, notify)?;
    check_words(config, given, &images)?;
    let mut inversions = textual_inversions(config)?;
    let config = &lora::with_prompt_loras(config.clone(), &images)?;
    let mut source = Source::find(config, recipe_file, notify)?;
    check_rounded_by_quantize(config, source.path())?;
    let config = &hub::with_paths(config.clone(), notify)?;
    let model_name = source.name();
    let mut loras = lora::loras(config)?;
    check_family(config, source.family(), !inversions.is_empty())?;
    check_distilled(config, given, source.family(), &images, notify)?;
    loras.extend(source.trained_lora());
    inversions.extend(source.trained_inversion()?);
    match Distilled::open(config)? {
        None => {}
        Some(Distilled::Denoiser(path)) => source.replace_denoiser(&path)?,
        Some(Distilled::Lora(lora)) => loras.push(lora),
    }
    source.replace_parts(config)?;
    let mut refiner = source.refiner(config)?;
    for source in [Some(&mut source), refiner.as_mut()].into_iter().flatten() {
        source.replace_autoencoder(config)?;
    }
    let mut base = source.model(config, given, notify)?;
    let mut refiner = match refiner {
        None => None,
        Some(refiner) => {
            let mut refiner = refiner.model(config, given, notify)?;
            // What steers is for the first model's part of the steps.
            refiner.model.controlnets.clear();
            Some(refiner)
        }
    };
    for model in [Some(&mut base), refiner.as_mut()].into_iter().flatten() {
        check_sampler_keys(config, &model.model.scheduler)?;
        for inversion in &inversions {
            model.add_inversion(inversion).map_err(RecipeError::usage)?;
        }
    }
    check_scores(given, &base, refiner.as_ref())?;
    let family = base.model.family;
    check_guidance_scales(&base.model, given, &images)?;
    let memory_advice = memory_advice(config, &base)?;
    let options = PipelineOptions {
        skip_layers: skip_layers(config, &base.model)?,
        base,
        refiner,
        loras,
        guidance: guidance(config, family),
        precision: config.precision,
        pixel_unshuffle: config.pixel_unshuffle as usize,
        max_batch: MAX_BATCH,
        memory_advice,
        watch: None,
    };
    let request = request(config, &options.base, images)?;
    options.check(&request).map_err(RecipeError::usage)?;
    Ok(Generation {
        options,
        request,
        model_name,
    })
}

/// What makes the programs of `generate` smaller, for messages.
fn memory_advice(config: &Config, base: &PipelineModel) -> Result<MemoryAdvice, RecipeError> {
    let smaller = "a smaller height or width, or fewer images at once".to_owned();
    let mut model = Vec::new();
    if config.weights_dtype.name() == "float32" {
        model.push("weights_dtype=bfloat16".to_owned());
    }
    if base.quantization.is_none() {
        model.push("quantization=int8_w8a16".to_owned());
    }
    if guidance(config, base.model.family) == Guidance::OneBatch {
        model.push("guidance_in_two_passes=True".to_owned());
    }
    let mut images = Vec::new();
    if !config.vae_tiling {
        images.push("vae_tiling=True, which decodes images in tiles".to_owned());
    }
    for advice in [&mut model, &mut images] {
        advice.push(smaller.clone());
    }
    Ok(MemoryAdvice { model, images })
}

/// Checks what [`generation`] does, as far as that needs no network: all of it for a model that is here, otherwise what
/// the configuration alone says. A model that is yet to be trained need not be there.
///
/// # Errors
/// As [`generation`].
pub fn check_generation(
    config: &Config,
    given: &Given,
    recipe_file: &Path,
    notify: &mut Notify<'_>,
) -> Result<(), RecipeError> {
    if config.unet_config.0 == ModelConfig::Unset && !hub::names_repositories(config) {
        generation(config, given, recipe_file, notify)?;
        return Ok(());
    }
    let images = image_requests(config, given, notify)?;
    check_words(config, given, &images)?;
    textual_inversions(config)?;
    lora::with_prompt_loras(config.clone(), &images)?;
    if is_described(config) {
        let model = model(config, None)?;
        described_policy(config, model.family.spec())?;
        check_sampling(config, &model)?;
    }
    Ok(())
}

/// Checks what the configuration alone says, before anything is downloaded: prompts, files, sizes and the sampler.
fn check_words(config: &Config, given: &Given, images: &[ImageRequest]) -> Result<(), RecipeError> {
    if config.prompt_syntax == PromptSyntax::Weighted {
        for image in images {
            let second = image.prompt_2.as_ref();
            for text in [&image.prompt, &image.negative_prompt]
                .into_iter()
                .chain(second)
            {
                let (text, _) = split_lora_tags(text).map_err(RecipeError::usage)?;
                parse_weighted(&text).map_err(RecipeError::usage)?;
            }
        }
    }
    check_pixel_keys(config)?;
    images::check_files(config)?;
    hub::check_autoencoders(config)?;
    ip_adapter::check_path(config)?;
    lora::loras(config)?;
    let name = &config.pretrained_model_name_or_path;
    let is_published = config.unet_config.0 == ModelConfig::Unset && !Path::new(name).exists();
    if let (true, Some((family, published))) = (is_published, Family::of_repository(name)) {
        let vae = AutoencoderKlConfig::from_json(published.vae).map_err(RecipeError::usage)?;
        let factor = SampleSpace::latents(&vae.into()).factor();
        if let Some(expected) = config.model_family.filter(|expected| *expected != family) {
            return Err(RecipeError::Usage(format!(
                "{name}: this is {}, but the recipe is for {}; use {}",
                family.title(),
                expected.title(),
                family.spec().recipe
            )));
        }
        check_distilled(config, given, family, images, &mut |_| {})?;
        let kind = family.spec().denoiser;
        let size = match config.use_resolution_binning {
            // Which depends on the transformer's own configuration.
            true => asked_size(config),
            false => image_size(config, factor * kind.patch())?,
        };
        let tokens = kind.image_seq_len(size.map(|side| side / factor));
        let own = scheduler_fields(published.scheduler).map_err(RecipeError::usage)?;
        let own = OwnScheduler {
            fields: &own,
            place: name,
        };
        let scheduler = scheduler_of(config, given, &own, &mut |_| {})?;
        check_sampler_keys(config, &scheduler)?;
        sampling_plan(
            config,
            &scheduler,
            kind,
            tokens,
            config.num_inference_steps as usize,
        )?;
        check_redraw(config, &scheduler, tokens)?;
    }
    Ok(())
}

/// Refuses keys that a model of `unet_config` does not read: it draws pixels.
fn check_pixel_keys(config: &Config) -> Result<(), RecipeError> {
    if config.unet_config.0 == ModelConfig::Unset {
        return Ok(());
    }
    let skips = config.clip_skip.0.iter().any(|layers| *layers > 0);
    let refuse = |problem: &str| Err(RecipeError::Usage(problem.to_owned()));
    match (skips, config.vae_tiling) {
        (true, _) => refuse(
            "clip_skip has no effect: a pixel-space model reads the last layer of its text encoder; leave it out",
        ),
        (_, true) => {
            refuse("vae_tiling has no effect: a pixel-space model has no autoencoder; leave it out")
        }
        (false, false) => Ok(()),
    }
}

/// The request for `images`, as the configuration makes them with `base`.
fn request(
    config: &Config,
    base: &PipelineModel,
    images: Vec<ImageRequest>,
) -> Result<GenerateRequest, RecipeError> {
    let name = base.files.path().display().to_string();
    Ok(GenerateRequest {
        images,
        prompt_syntax: config.prompt_syntax,
        // MaxDiffusion's recipe of SDXL-Lightning has -1: it rescales above 0 only.
        guidance_rescale: config.guidance_rescale.max(0.0) as f32,
        true_cfg_scale: config.true_cfg_scale as f32,
        skip_layer_guidance: SkipLayerGuidance {
            scale: config.skip_layer_guidance_scale as f32,
            start: config.skip_layer_guidance_start,
            stop: config.skip_layer_guidance_stop,
        },
        eta: config.eta,
        init_images: images::read(config, &base.model, &name)?,
        strength: config.strength,
        control_image: images::read_control_image(config, &base.model, &name)?,
        controls: images::read_controls(config, &base.model)?,
        image_prompt: ip_adapter::image_prompt(config, base.model.ip_adapter.as_ref(), &name)?,
        latents: latents(config, &base.model)?,
        hires: hires(config, &base.model)?,
        handover: Handover {
            denoising_end: config.denoising_end,
            denoising_start: config.denoising_start.unwrap_or(config.denoising_end),
        },
        image_size: config.use_resolution_binning.then(|| asked_size(config)),
        preview_every: (config.preview_steps > 0).then_some(config.preview_steps as usize),
        tell_samples: config.save_latents,
    })
}

/// The second pass of a hi-res fix, if the configuration asks for one.
fn hires(config: &Config, model: &DiffusionModel) -> Result<Option<HiresRequest>, RecipeError> {
    let Some(scale) = config.hires_scale else {
        return Ok(None);
    };
    if model.vae.is_none() {
        return Err(RecipeError::Usage(format!(
            "hires_scale={scale}: a pixel-space model draws images of one size; name a latent model"
        )));
    }
    let patch = model.denoiser.kind().patch();
    let larger = |side: usize| (side as f64 * scale) as usize / patch * patch;
    let sample_size = model.sample_size.map(larger);
    let large = model.resized(sample_size);
    let [height, width] = model.image_size;
    if sample_size == model.sample_size {
        return Err(RecipeError::Usage(format!(
            "hires_scale={scale} leaves images of height={height} width={width} at their size: their sides grow by \
             {} pixels at least; give a larger scale",
            height / model.sample_size[0] * patch
        )));
    }
    check_positions(
        &model.denoiser,
        height / model.sample_size[0],
        large.image_size,
    )?;
    Ok(Some(HiresRequest {
        sample_size,
        image_seq_len: large.image_seq_len(),
        upscaler: config.hires_upscaler,
        strength: config.hires_strength,
        steps: (config.hires_steps > 0).then_some(config.hires_steps as usize),
        controls: images::read_controls(config, &large)?,
    }))
}

/// The layers that skip-layer guidance of `model` leaves out.
///
/// # Errors
/// When the model has no such layers.
pub fn skip_layers(config: &Config, model: &DiffusionModel) -> Result<Vec<usize>, RecipeError> {
    let Some(layers) = &config.skip_guidance_layers else {
        return Ok(Vec::new());
    };
    let count = model.denoiser.skippable_layers().unwrap_or(0) as u64;
    match layers.0.iter().find(|layer| **layer >= count) {
        None => Ok(layers.0.iter().map(|layer| *layer as usize).collect()),
        Some(layer) => Err(RecipeError::Usage(format!(
            "skip_guidance_layers has {layer}, but the {} of {} has {count} layers that can be left out, counted from 0",
            model.denoiser.class(),
            model.family.title()
        ))),
    }
}

/// How a denoising step of a model of `family` is guided. Skip-layer guidance takes passes of one row.
pub fn guidance(config: &Config, family: Family) -> Guidance {
    let is_guided = match family.spec().guidance {
        GuidanceKind::ClassifierFree => config.do_classifier_free_guidance,
        GuidanceKind::Embedded | GuidanceKind::None => config.true_cfg_scale > 1.0,
    };
    let in_two_passes = config.guidance_in_two_passes || config.skip_guidance_layers.is_some();
    match (is_guided, in_two_passes) {
        (false, _) => Guidance::Off,
        (true, false) => Guidance::OneBatch,
        (true, true) => Guidance::TwoPasses,
    }
}

/// Refuses guidance that a distilled model does not have, where it is asked for now; in a file, which may be one of
/// MaxDiffusion's, it is told.
///
/// # Errors
/// Names the key, and the one that has an effect.
fn check_distilled(
    config: &Config,
    given: &Given,
    family: Family,
    images: &[ImageRequest],
    notify: &mut Notify<'_>,
) -> Result<(), RecipeError> {
    if family.spec().guidance == GuidanceKind::ClassifierFree || config.true_cfg_scale > 1.0 {
        return Ok(());
    }
    let has_negative = images.iter().any(|image| !image.negative_prompt.is_empty());
    for (key, is_asked) in [
        (
            "do_classifier_free_guidance",
            config.do_classifier_free_guidance,
        ),
        ("negative_prompt", has_negative),
    ] {
        if !is_asked || given.get(key).is_none() && key != "negative_prompt" {
            continue;
        }
        let problem = format!(
            "{key} has no effect: {} was distilled from guided outputs, and a step runs it with the prompt alone; guidance \
             by a negative prompt in a second run (true guidance) is asked for by true_cfg_scale above 1",
            family.title()
        );
        match given.get(key).map(|_| given.place(key)) {
            Some(place @ Place::File { .. }) => {
                notify(Notice::Warning(&format!("{place}: {problem}")))
            }
            Some(Place::CommandLine | Place::Default) | None => {
                return Err(RecipeError::Usage(problem));
            }
        }
    }
    Ok(())
}

/// Refuses a guidance scale where the denoiser was distilled without one. 0 and 1 stand for none.
fn check_guidance_scales(
    model: &DiffusionModel,
    given: &Given,
    images: &[ImageRequest],
) -> Result<(), RecipeError> {
    let GuidanceKind::None = model.family.spec().guidance else {
        return Ok(());
    };
    let is_set = given.get("guidance_scale").is_some() || given.get("prompts_file").is_some();
    let scales = images.iter().map(|image| image.guidance_scale);
    match scales
        .into_iter()
        .find(|scale| is_set && ![0.0, 1.0].contains(scale))
    {
        None => Ok(()),
        Some(scale) => Err(RecipeError::Usage(format!(
            "guidance_scale={scale} has no effect: {} was distilled to go without guidance; leave it out, or take FLUX.1 \
             dev, which has the scale as an input",
            model.family.title()
        ))),
    }
}

/// Refuses what is not built for models of `family`.
fn check_family(config: &Config, family: Family, has_inversions: bool) -> Result<(), RecipeError> {
    let spec = family.spec();
    let refuse = |what: &str, reason: &str| {
        Err(RecipeError::Usage(format!(
            "{what}: {reason} for {}; leave it out",
            family.title()
        )))
    };
    if !spec.textual_inversions && has_inversions {
        return refuse("textual_inversions", "textual inversions are not built");
    }
    if !spec.prompt_weights && config.prompt_syntax == PromptSyntax::Weighted {
        return Err(RecipeError::Usage(format!(
            "prompt_syntax=weighted: weights and chunks of prompts are for CLIP, and {} reads prompts by T5; give \
             prompt_syntax=plain",
            family.title()
        )));
    }
    // diffusers has no image to image of PixArt.
    let from_noise = spec.denoiser == DenoiserKind::PixArt;
    let keys = [
        ("use_controlnet", config.use_controlnet && !spec.controlnets),
        ("ip_adapter_path", !config.ip_adapter_path.is_empty()),
        ("image", from_noise && !config.input_images().is_empty()),
        ("hires_scale", from_noise && config.hires_scale.is_some()),
        ("lightning_repo", !config.lightning_repo.is_empty()),
    ];
    match (spec.denoiser, keys.iter().find(|(_, is_asked)| *is_asked)) {
        (DenoiserKind::Unet, _) | (_, None) => Ok(()),
        (DenoiserKind::Flux | DenoiserKind::Sd3 | DenoiserKind::PixArt, Some((key, _))) => {
            refuse(key, "it is not built")
        }
    }
}

/// Refuses aesthetic scores that no model here reads.
fn check_scores(
    given: &Given,
    base: &PipelineModel,
    refiner: Option<&PipelineModel>,
) -> Result<(), RecipeError> {
    let is_scored = |model: &PipelineModel| {
        let told = model.model.micro_conditioning;
        matches!(told, MicroConditioning::AestheticScore { .. })
    };
    if is_scored(base) || refiner.is_some_and(is_scored) {
        return Ok(());
    }
    for key in ["aesthetic_score", "negative_aesthetic_score"] {
        if given.get(key).is_some() {
            return Err(RecipeError::Usage(format!(
                "{key} has no effect: {} is conditioned on sizes only; SDXL's refiner takes a score",
                base.files.path().display()
            )));
        }
    }
    Ok(())
}

/// The noise that the configuration gives to start from.
fn latents(config: &Config, model: &DiffusionModel) -> Result<Option<HostTensor>, RecipeError> {
    if config.latents.is_empty() {
        return Ok(None);
    }
    let file = Checkpoint::open(Path::new(&config.latents)).map_err(RecipeError::failed)?;
    let latents = file
        .read_as("latents", DType::F32)
        .map_err(RecipeError::failed)?;
    let expected = &model.sample_dims(1)[1..];
    if latents.shape.rank() != 4 || latents.shape.dims[1..] != *expected {
        return Err(RecipeError::Usage(format!(
            "latents={}: its tensor latents is {}; expected [images, {}, {}, {}]",
            config.latents, latents.shape, expected[0], expected[1], expected[2]
        )));
    }
    Ok(Some(latents))
}
