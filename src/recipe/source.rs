//! The model that `generate` uses: a checkpoint of the run, or a published model.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::config::{Config, Given, ModelConfig};
use crate::data::Tokenizer;
use crate::hub::{RepoId, Wanted};
use crate::models::controlnet;
use crate::models::spec::TextEncoderSpec;
use crate::models::unet::ROOT as UNET;
use crate::models::vae::{Autoencoder, ROOT as VAE};
use crate::models::{
    ControlNet, Denoiser, DenoiserKind, DiffusionModel, Family, Part, SampleSpace, TextEncoder,
    TextEncoderConfig,
};
use crate::nn::Remat;
use crate::pipelines::model_files::ModelFiles;
use crate::pipelines::{LoraChoice, PipelineModel, TextualInversion, TextualInversions};
use crate::schedulers::SchedulerConfig;
use crate::train::checkpoint::{Check, STATE_FILE, SavedCheckpoint, latest};
use crate::train::{EMA_SUFFIX, INVERSION_FILE, LORA_FILE};
use crate::util::files;
use crate::weights::Checkpoint;
use crate::weights::source::{Component, ModelSource, PipelineKind, SourceError, is_pipeline};

use super::clip_skip::clip_skips;
use super::model::{check_positions, drawn_size, prompt_tokens};
use super::run_model::run_model;
use super::scheduler::{OwnScheduler, SCHEDULER, scheduler, scheduler_of};
use super::{
    Notice, Notify, RecipeError, check_tokenizer, control_lora, hub, ip_adapter,
    micro_conditioning, newest_checkpoint, policy_of_checkpoint, precision,
};

/// The index of a diffusers folder.
pub(super) const INDEX: &str = "model_index.json";
/// The folder of checkpoints in that of a run.
const CHECKPOINTS: &str = "checkpoints";
/// The moving average of low-rank updates in a checkpoint.
const AVERAGED_LORA: &str = "ema/pytorch_lora_weights.safetensors";
/// The keys of another autoencoder, another denoiser and another T5.
const VAE_KEY: &str = "vae_model_name_or_path";
const DENOISER_KEY: &str = "denoiser_model_name_or_path";
const T5_KEY: &str = "t5_model_name_or_path";

/// Where weights come from.
pub enum Source {
    /// A checkpoint of training on pixels.
    Run {
        dir: PathBuf,
        /// Added to a model's folder name: the moving average, where the checkpoint has one.
        suffix: &'static str,
        beside: Beside,
    },
    Model {
        source: Box<ModelSource>,
        /// The repository that it is of.
        repo: Option<RepoId>,
        beside: Beside,
    },
}

/// The files of what a run has trained beside a model's weights.
#[derive(Default)]
pub struct Beside {
    /// Low-rank updates.
    lora: Option<PathBuf>,
    /// A new token.
    inversion: Option<PathBuf>,
}

impl Beside {
    /// What the checkpoint `dir` has; `None` for one of whole weights.
    fn of(dir: &Path) -> Option<Beside> {
        let file = |name: &str| Some(dir.join(name)).filter(|file| file.is_file());
        let lora = file(LORA_FILE).map(|lora| file(AVERAGED_LORA).unwrap_or(lora));
        let inversion = file(INVERSION_FILE);
        (lora.is_some() || inversion.is_some()).then_some(Beside { lora, inversion })
    }
}

impl Source {
    /// The newest checkpoint of the run, else the model that `pretrained_model_name_or_path` names, which is downloaded
    /// where it is a repository's name.
    ///
    /// # Errors
    /// When there is neither, or it cannot be opened or is of another family than the recipe.
    pub fn find(
        config: &Config,
        recipe_file: &Path,
        notify: &mut Notify<'_>,
    ) -> Result<Source, RecipeError> {
        let Some(saved) = newest_checkpoint(config, notify)? else {
            return Source::base(config, recipe_file, notify);
        };
        check_trained(config, &saved)?;
        let dir = saved.dir();
        if dir.join(INDEX).is_file() {
            return fine_tuned(dir);
        }
        let Some(trained) = Beside::of(dir) else {
            return Ok(Source::of_run(dir));
        };
        let mut source = Source::base(config, recipe_file, notify)?;
        let (Source::Run { beside, .. } | Source::Model { beside, .. }) = &mut source;
        *beside = trained;
        Ok(source)
    }

    /// The model that `pretrained_model_name_or_path` names, downloaded where it is a repository's name.
    ///
    /// # Errors
    /// As [`Source::find`].
    pub fn base(
        config: &Config,
        recipe_file: &Path,
        notify: &mut Notify<'_>,
    ) -> Result<Source, RecipeError> {
        if let Some(dir) = run_on_pixels(config)? {
            return Ok(Source::of_run(&dir));
        }
        let (source, repo) = find_model(config, recipe_file, notify)?;
        Ok(Source::Model {
            source: Box::new(source),
            repo,
            beside: Beside::default(),
        })
    }

    /// A checkpoint of training on pixels, with the moving average where it has one.
    pub fn of_run(dir: &Path) -> Source {
        let has_average = dir.join(format!("{UNET}{EMA_SUFFIX}")).is_dir();
        Source::Run {
            dir: dir.to_owned(),
            suffix: if has_average { EMA_SUFFIX } else { "" },
            beside: Beside::default(),
        }
    }

    /// The low-rank updates that a run has trained for the model.
    pub fn trained_lora(&self) -> Option<LoraChoice> {
        let path = self.beside().lora.as_ref()?;
        Some(LoraChoice {
            path: path.clone(),
            name: path.display().to_string(),
            scale: 1.0,
        })
    }

    /// The token that a run has trained for the model.
    ///
    /// # Errors
    /// When its file cannot be read.
    pub fn trained_inversion(&self) -> Result<Option<TextualInversion>, RecipeError> {
        let path = self.beside().inversion.as_ref();
        let inversion = path.map(|path| TextualInversion::open(path, None));
        inversion.transpose().map_err(RecipeError::failed)
    }

    /// Whether a run has trained something beside the model's weights.
    pub fn has_beside(&self) -> bool {
        let Beside { lora, inversion } = self.beside();
        lora.is_some() || inversion.is_some()
    }

    fn beside(&self) -> &Beside {
        let (Source::Run { beside, .. } | Source::Model { beside, .. }) = self;
        beside
    }

    /// Takes the denoiser's weights from another file.
    ///
    /// # Errors
    /// When the file has no denoiser of the model's family, or the model is a checkpoint of a run.
    pub fn replace_denoiser(&mut self, path: &Path) -> Result<(), RecipeError> {
        match self {
            Source::Model { source, .. } => {
                source.replace_denoiser(path).map_err(RecipeError::failed)
            }
            Source::Run { dir, .. } => Err(RecipeError::Usage(format!(
                "lightning_repo has no effect: {} is a checkpoint of a run, which has weights of its own",
                dir.display()
            ))),
        }
    }

    /// Takes the denoiser and T5 from the files that the configuration names, if it does.
    ///
    /// # Errors
    /// When a file has no such part, or the model is a checkpoint of a run.
    pub fn replace_parts(&mut self, config: &Config) -> Result<(), RecipeError> {
        type Replace = fn(&mut ModelSource, &Path) -> Result<(), SourceError>;
        let parts: [(&str, &str, Replace); 2] = [
            (
                DENOISER_KEY,
                &config.denoiser_model_name_or_path,
                ModelSource::replace_denoiser,
            ),
            (
                T5_KEY,
                &config.t5_model_name_or_path,
                ModelSource::replace_t5,
            ),
        ];
        for (key, path, replace) in parts.into_iter().filter(|(_, path, _)| !path.is_empty()) {
            match self {
                Source::Model { source, .. } => replace(source, Path::new(path))
                    .map_err(|error| RecipeError::Usage(format!("{key}={path}: {error}")))?,
                Source::Run { dir, .. } => {
                    return Err(RecipeError::Usage(format!(
                        "{key} has no effect: {} is a checkpoint of a run, which has parts of its own",
                        dir.display()
                    )));
                }
            }
        }
        Ok(())
    }

    /// Takes the autoencoder from the file or folder that the configuration names, if it does.
    ///
    /// # Errors
    /// When there is no autoencoder, or the model is a checkpoint of a run.
    pub fn replace_autoencoder(&mut self, config: &Config) -> Result<(), RecipeError> {
        let path = &config.vae_model_name_or_path;
        match self {
            _ if path.is_empty() => Ok(()),
            Source::Model { source, .. } => source
                .replace_autoencoder(Path::new(path))
                .map_err(|error| RecipeError::Usage(format!("{VAE_KEY}={path}: {error}"))),
            Source::Run { dir, .. } => Err(RecipeError::Usage(format!(
                "{VAE_KEY} has no effect: {} is a model of pixels, which has no autoencoder",
                dir.display()
            ))),
        }
    }

    /// The name to tell people: that of the repository, folder or file.
    pub fn name(&self) -> String {
        match self {
            Source::Model {
                repo: Some(repo), ..
            } => repo.name().to_owned(),
            _ => {
                let stem = self.path().file_stem().unwrap_or_default();
                stem.to_string_lossy().into_owned()
            }
        }
    }

    /// The model that takes the last steps, if the configuration names one.
    ///
    /// # Errors
    /// When it cannot be opened, or its family cannot continue with this model's samples.
    pub fn refiner(&self, config: &Config) -> Result<Option<Source>, RecipeError> {
        let name = &config.refiner_model_name_or_path;
        if name.is_empty() {
            return Ok(None);
        }
        let key = "refiner_model_name_or_path";
        let usage = |reason: String| RecipeError::Usage(format!("{key}={name}: {reason}"));
        let (family, path) = (self.family(), self.path());
        let refiners = family.refiners();
        if refiners.is_empty() {
            return Err(usage(format!(
                "{} is {}, which has no refiner",
                path.display(),
                family.title()
            )));
        }
        let source = ModelSource::open(Path::new(name)).map_err(|e| usage(e.to_string()))?;
        if !refiners.contains(&source.family) || source.kind != PipelineKind::Text {
            let kind = match source.kind {
                PipelineKind::Text => "",
                PipelineKind::Inpaint => " for inpainting",
                PipelineKind::Control => " with a control image",
            };
            let names: Vec<&str> = refiners.iter().map(|family| family.title()).collect();
            return Err(usage(format!(
                "expected {}; found {}{kind}",
                names.join(" or "),
                source.family.title()
            )));
        }
        Ok(Some(Source::Model {
            source: Box::new(source),
            repo: None,
            beside: Beside::default(),
        }))
    }

    /// The family of the model.
    pub fn family(&self) -> Family {
        match self {
            Source::Run { .. } => Family::Pixels,
            Source::Model { source, .. } => source.family,
        }
    }

    /// The path to tell people.
    pub fn path(&self) -> &Path {
        match self {
            Source::Run { dir, .. } => dir,
            Source::Model { source, .. } => &source.path,
        }
    }

    /// The model with its tokenizers and files. `given` holds the keys that the configuration sets explicitly.
    ///
    /// # Errors
    /// When a part is missing or not supported, or the configuration contradicts it.
    pub fn model(
        self,
        config: &Config,
        given: &Given,
        notify: &mut Notify<'_>,
    ) -> Result<PipelineModel, RecipeError> {
        match self {
            Source::Model { source, .. } => published(config, given, source, notify),
            Source::Run { dir, suffix, .. } => run_model(config, &dir, suffix),
        }
    }
}

/// The model that `pretrained_model_name_or_path` names, downloaded where it is a repository's name, and that repository.
///
/// # Errors
/// When there is none, or it cannot be opened or is of another family than the recipe.
pub(super) fn find_model(
    config: &Config,
    recipe_file: &Path,
    notify: &mut Notify<'_>,
) -> Result<(ModelSource, Option<RepoId>), RecipeError> {
    let name = &config.pretrained_model_name_or_path;
    let folder = Path::new(name);
    let file = recipe_file.file_name().unwrap_or(recipe_file.as_os_str());
    let file = file.to_string_lossy();
    let expected = config.model_family.map(|family| (family, file.as_ref()));
    let wanted = Wanted::Model {
        expected,
        without: (!config.use_text_encoder_3).then_some(Part::TextEncoder3),
    };
    // A recipe with its own UNet does not mean the schema's default model.
    let found = match config.unet_config.0 {
        ModelConfig::Unset => hub::find(
            name,
            &config.revision,
            &config.hf_access_token,
            &wanted,
            notify,
        )?,
        ModelConfig::Path(_) | ModelConfig::Inline(_) => None,
    };
    if config.unet_config.0 != ModelConfig::Unset
        && RepoId::parse(name).is_some()
        && !folder.exists()
    {
        return Err(RecipeError::Usage(format!(
            "no weights: {} holds no checkpoint, and {name} has none for the architecture that unet_config gives; train \
             first, or leave unet_config out",
            config.checkpoint_folder().display(),
        )));
    }
    if found.is_none() && (name.is_empty() || !folder.exists()) {
        return Err(RecipeError::Usage(format!(
            "no weights: {} holds no checkpoint, and pretrained_model_name_or_path='{name}' is neither a file or \
             folder here nor a repository's name (organization/name); train first, or name a folder in diffusers' layout, \
             a .safetensors file or a repository on the hub",
            config.checkpoint_folder().display(),
        )));
    }
    let path = found.as_ref().map_or(folder, |found| &found.path);
    let newest = newest_of_run(path)?;
    let path = newest.as_deref().unwrap_or(path);
    let mut source = ModelSource::open(path).map_err(RecipeError::failed)?;
    take_average(&mut source)?;
    if let Some((expected, file)) = expected {
        source
            .expect_family(expected, file)
            .map_err(RecipeError::usage)?;
    }
    for note in &source.notes {
        notify(Notice::Warning(note));
    }
    for ignored in &source.ignored {
        tracing::info!("not used: {ignored}");
    }
    Ok((source, found.map(|found| found.repo)))
}

/// The newest checkpoint in the folder of a fine-tuning run; `None` if the path is none.
fn newest_of_run(path: &Path) -> Result<Option<PathBuf>, RecipeError> {
    let checkpoints = path.join(CHECKPOINTS);
    if !checkpoints.is_dir() || is_pipeline(path) {
        return Ok(None);
    }
    let found = latest(&checkpoints, Check::Sizes).map_err(RecipeError::failed)?;
    Ok(found.checkpoint.map(|saved| saved.dir().to_owned()))
}

/// The checkpoint of training on pixels that `pretrained_model_name_or_path` names, itself or by the run's folder; `None` for
/// another model.
fn run_on_pixels(config: &Config) -> Result<Option<PathBuf>, RecipeError> {
    let path = Path::new(&config.pretrained_model_name_or_path);
    if path.as_os_str().is_empty() {
        return Ok(None);
    }
    let dir = newest_of_run(path)?.unwrap_or_else(|| path.to_owned());
    // Only those have neither an index nor an autoencoder.
    if !dir.join(UNET).is_dir() || dir.join(INDEX).exists() || dir.join(VAE).exists() {
        return Ok(None);
    }
    // What `quantize` wrote is no checkpoint.
    if dir.join(STATE_FILE).is_file() {
        let saved = SavedCheckpoint::open(&dir).map_err(RecipeError::failed)?;
        check_trained(config, &saved)?;
    }
    Ok(Some(dir))
}

/// The whole model of a checkpoint.
pub(super) fn fine_tuned(dir: &Path) -> Result<Source, RecipeError> {
    let mut source = ModelSource::open(dir).map_err(RecipeError::failed)?;
    take_average(&mut source)?;
    Ok(Source::Model {
        source: Box::new(source),
        repo: None,
        beside: Beside::default(),
    })
}

/// Takes the moving average of the denoiser's weights where a checkpoint has one.
fn take_average(source: &mut ModelSource) -> Result<(), RecipeError> {
    let part = source.family.spec().denoiser.part();
    let averaged = source.path.join(format!("{part}{EMA_SUFFIX}"));
    match averaged.join(part.weights_file()).is_file() {
        true => source
            .take_denoiser_of(&averaged)
            .map_err(RecipeError::failed),
        false => Ok(()),
    }
}

/// The ControlNets that the configuration uses.
fn controlnets(config: &Config, kind: DenoiserKind) -> Result<Vec<ControlNet>, RecipeError> {
    if !config.use_controlnet {
        return Ok(Vec::new());
    }
    let read = |name: &String| {
        let path = Path::new(name).join("config.json");
        let text = files::read_to_string(&path).map_err(|e| {
            RecipeError::Usage(format!(
                "controlnet_model_name_or_path={name}: {}: {e}; name the folder of a ControlNet in diffusers' layout \
                 or a repository on the hub",
                path.display()
            ))
        })?;
        ControlNet::from_json(kind, &text).map_err(RecipeError::at(path.display()))
    };
    let names = &config.controlnet_model_name_or_path.0;
    names.iter().map(read).collect()
}

/// A model that somebody published, as configured.
fn published(
    config: &Config,
    given: &Given,
    mut source: Box<ModelSource>,
    notify: &mut Notify<'_>,
) -> Result<PipelineModel, RecipeError> {
    match config.dequantize {
        false => source.pack_denoiser(),
        true if source.widen_denoiser() > 0 => {}
        true => {
            return Err(RecipeError::Usage(format!(
                "dequantize has no effect: the denoiser of {} is not quantized; leave it out",
                source.path.display()
            )));
        }
    }
    if config.unet_config.0 != ModelConfig::Unset {
        return Err(RecipeError::Usage(format!(
            "unet_config has no effect: {} has a UNet of its own; leave one of the two out",
            source.path.display()
        )));
    }
    control_lora::widen_tokens(config, &mut source)?;
    let part = |part: Part| source.component(part).map_err(RecipeError::failed);
    let at = |part: Part| RecipeError::at(source.config_path(part).display().to_string());
    let denoiser = denoiser(config, &source)?;
    let vae = part(Part::Vae)?.config.clone();
    let channels = denoiser.out_channels();
    let vae = match config.vae_model_name_or_path.as_str() {
        "" => Autoencoder::from_map(vae).map_err(at(Part::Vae))?,
        other => other_autoencoder(&format!("{VAE_KEY}={other}"), vae, channels)?,
    };
    let preview_vae = preview_autoencoder(config, &source, channels)?;
    let (preview_vae, preview_checkpoint) = preview_vae.unzip();
    let spec = source.family.spec();
    let skips = clip_skips(config, source.family)?;
    let text_encoders = spec
        .text_encoders
        .iter()
        .zip(skips)
        .filter(|(encoder, _)| !encoder.optional || config.use_text_encoder_3)
        .map(|(encoder, skip)| {
            let fields = text_encoder(config, &source, encoder)?;
            let config = TextEncoderConfig::from_map(encoder.kind, fields);
            Ok(TextEncoder {
                part: encoder.part,
                config: config.map_err(at(encoder.part))?,
                hidden: encoder.hidden.earlier(skip),
                place: encoder.place,
                masked: encoder.masked,
                tokens: 0,
            })
        })
        .collect::<Result<Vec<_>, RecipeError>>()?;
    let clips = text_encoders
        .iter()
        .filter_map(|encoder| encoder.config.clip());
    let clip_tokens = clips.map(|clip| clip.max_position_embeddings).min();
    let tokens = prompt_tokens(config, source.family, clip_tokens)?;
    let text_encoders: Vec<TextEncoder> = text_encoders
        .into_iter()
        .map(|encoder| TextEncoder {
            tokens: match encoder.config {
                TextEncoderConfig::Clip(_) => tokens.clip,
                TextEncoderConfig::T5(_) => tokens.t5,
            },
            ..encoder
        })
        .collect();
    let tokenizers = text_encoders
        .iter()
        .map(|encoder| tokenizer(config, &source, encoder))
        .collect::<Result<Vec<_>, _>>()?;
    for (encoder, tokenizer) in text_encoders.iter().zip(&tokenizers) {
        check_tokenizer(&encoder.config, tokenizer)?;
    }
    let space = SampleSpace::latents(&vae);
    space.check(&denoiser).map_err(at(denoiser.part()))?;
    let scale = space.factor();
    let image_size = drawn_size(config, &denoiser, scale * denoiser.kind().patch())?;
    check_positions(&denoiser, scale, image_size)?;
    let precision = precision(config);
    // SDXL's refiner takes neither.
    let adapter = match denoiser.unet().filter(|_| spec.controlnets) {
        Some(unet) => ip_adapter::adapter(config, unet)?,
        None => None,
    };
    let (ip_adapter, adapter_files) = adapter.map(|a| (a.config, a.files)).unzip();
    let model = DiffusionModel {
        family: source.family,
        sample_size: image_size.map(|side| side / scale),
        image_size,
        decode_tile: config.vae_tiling.then(|| vae.latent_tile()),
        denoiser,
        text_encoders,
        vae: Some(vae),
        preview_vae,
        controlnets: match spec.controlnets {
            true => controlnets(config, spec.denoiser)?,
            false => Vec::new(),
        },
        ip_adapter,
        micro_conditioning: micro_conditioning(config, source.requires_aesthetics_score),
        precision,
        remat: Remat::None,
        scan_layers: config.scan_layers,
        scheduler: published_scheduler(config, given, &source, notify)?,
        tokens: tokens.all,
    };
    model.check_conditioning().map_err(RecipeError::usage)?;
    let names = config.controlnet_model_name_or_path.0.iter();
    let controlnets = names.take(model.controlnets.len()).enumerate();
    let controlnets = controlnets.map(|(at, name)| (controlnet::root(at), PathBuf::from(name)));
    let beside = controlnets.chain(adapter_files.into_iter().flatten());
    let weights = &part(model.denoiser.part())?.checkpoint;
    let quantization = policy_of_checkpoint(config, weights.quantization(), weights.path(), spec)?;
    let zero_empty_prompts = source.zero_empty_prompts;
    let mut files = ModelFiles::source(source, beside.collect());
    if let Some(checkpoint) = preview_checkpoint {
        files = files.with_preview_vae(checkpoint);
    }
    Ok(PipelineModel {
        model,
        quantization,
        tokenizers,
        zero_empty_prompts,
        files,
        inversions: TextualInversions::default(),
    })
}

/// The configuration of a text encoder of a published model.
///
/// # Errors
/// When the model has none, with what to do without one that it may go without.
fn text_encoder(
    config: &Config,
    source: &ModelSource,
    encoder: &TextEncoderSpec,
) -> Result<Map<String, Value>, RecipeError> {
    match source.component(encoder.part) {
        Ok(component) => Ok(component.config.clone()),
        Err(error) if encoder.optional && config.use_text_encoder_3 => {
            Err(RecipeError::Usage(format!(
                "{error}; to draw without it, with zeros in the place of its results, give use_text_encoder_3=False"
            )))
        }
        Err(error) => Err(RecipeError::failed(error)),
    }
}

/// The denoiser of a published model, as configured.
///
/// # Errors
/// When the model has none, or its configuration asks for something that is not built.
pub(super) fn denoiser(config: &Config, source: &ModelSource) -> Result<Denoiser, RecipeError> {
    let kind = source.family.spec().denoiser;
    let component = source.component(kind.part()).map_err(RecipeError::failed)?;
    let mut fields = component.config.clone();
    if let (DenoiserKind::Unet, Some(groups)) = (kind, config.norm_num_groups) {
        fields.insert("norm_num_groups".to_string(), groups.into());
    }
    let place = source.config_path(kind.part());
    Denoiser::from_map(kind, fields).map_err(RecipeError::at(place.display()))
}

/// An autoencoder that is not the model's own, whose latents have `channels`. `place` names it.
fn other_autoencoder(
    place: &str,
    fields: Map<String, Value>,
    channels: usize,
) -> Result<Autoencoder, RecipeError> {
    let vae = Autoencoder::from_map(fields).map_err(RecipeError::at(place))?;
    match vae.latent_channels() {
        found if found == channels => Ok(vae),
        found => Err(RecipeError::Usage(format!(
            "{place}: its latents have {found} channels; expected {channels}, those of the denoiser's samples"
        ))),
    }
}

/// The autoencoder that decodes previews, if the configuration asks for previews and names one.
fn preview_autoencoder(
    config: &Config,
    source: &ModelSource,
    channels: usize,
) -> Result<Option<(Autoencoder, Checkpoint)>, RecipeError> {
    let path = &config.preview_vae_model_name_or_path;
    if config.preview_steps == 0 || path.is_empty() {
        return Ok(None);
    }
    let place = format!("preview_vae_model_name_or_path={path}");
    let Component { config, checkpoint } = source
        .other_autoencoder(Path::new(path))
        .map_err(RecipeError::at(&place))?;
    Ok(Some((
        other_autoencoder(&place, config, channels)?,
        checkpoint,
    )))
}

/// The noise schedule of the model's own file, else of the recipe, with a warning.
fn published_scheduler(
    config: &Config,
    given: &Given,
    source: &ModelSource,
    notify: &mut Notify<'_>,
) -> Result<SchedulerConfig, RecipeError> {
    let path = source.scheduler_path();
    let Some(own) = &source.scheduler else {
        notify(Notice::Warning(&format!(
            "there is no {}: the noise schedule and the sampler, {}, are the recipe's",
            path.display(),
            config.sampler()
        )));
        return scheduler(config);
    };
    let own = OwnScheduler {
        fields: own,
        place: &path.display().to_string(),
    };
    scheduler_of(config, given, &own, notify)
}

fn tokenizer(
    config: &Config,
    source: &ModelSource,
    encoder: &TextEncoder,
) -> Result<Tokenizer, RecipeError> {
    let (part, tokens) = (encoder.part, encoder.tokens);
    let named = Path::new(&config.tokenizer_model_name_or_path);
    let folder = part.tokenizer().unwrap_or_default();
    // Of a whole model's folder that of the encoder, where the encoders have different ones.
    let kinds = source.family.spec().text_encoders.iter().map(|e| e.kind);
    let is_mixed = kinds.clone().any(|kind| Some(kind) != kinds.clone().next());
    let place = match named.as_os_str().is_empty() {
        false if is_mixed => named.join(folder),
        false => named.to_owned(),
        true => match source.tokenizers.get(&part) {
            Some(dir) => dir.clone(),
            // The error of a folder that is not there says where to get one.
            None => source.path.join(folder),
        },
    };
    let read = match encoder.config {
        TextEncoderConfig::T5(_) => Tokenizer::t5_from_path(&place, tokens),
        TextEncoderConfig::Clip(_) if place.is_file() => Tokenizer::from_file(&place, tokens),
        TextEncoderConfig::Clip(_) => Tokenizer::from_dir(&place, tokens),
    };
    read.map_err(RecipeError::failed)
}

/// Refuses what contradicts how the checkpoint was trained: the noise schedule and what the model predicts, and for
/// held-out captions which those are.
fn check_trained(config: &Config, saved: &SavedCheckpoint) -> Result<(), RecipeError> {
    let trained = &saved.state().config;
    let all = config.to_json();
    let differ = |name: &str, then: &Value, now: &Value| {
        Err(RecipeError::Usage(format!(
            "{name}={now}, but {} was trained with {then}",
            saved.dir().display()
        )))
    };
    if let Some(then) = trained.get(SCHEDULER) {
        for name in [
            "prediction_type",
            "num_train_timesteps",
            "beta_schedule",
            "beta_start",
            "beta_end",
            "rescale_zero_terminal_snr",
        ] {
            if then[name] != all[SCHEDULER][name] {
                return differ(
                    &format!("{SCHEDULER}.{name}"),
                    &then[name],
                    &all[SCHEDULER][name],
                );
            }
        }
    }
    if config.held_out_prompts == 0 {
        return Ok(());
    }
    // A smaller fraction holds out some of the same captions, a larger one others that were trained on.
    let name = "validation_fraction";
    match trained.get(name) {
        Some(then) if then.as_f64().is_none_or(|f| f < config.validation_fraction) => {
            differ(name, then, &all[name])
        }
        Some(_) | None => Ok(()),
    }
}
