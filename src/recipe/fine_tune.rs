//! Training that starts from published weights: the model, and the files of its checkpoints.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::config::{Config, Given, LoraConfig};
use crate::models::{DenoiserKind, Part};
use crate::pipelines::PipelineModel;
use crate::quant::Policy;
use crate::schedulers::SchedulerConfig;
use crate::train::checkpoint::SavedCheckpoint;
use crate::train::{
    EMA_SUFFIX, INVERSION_FILE, InversionOptions, LORA_FILE, LoraOptions, LoraRecord,
    UnchangedFile, UnchangedOrigin,
};
use crate::util::files::{self, sorted_entries};
use crate::weights::lora::KohyaNames;
use crate::weights::quantized::Quantization;
use crate::weights::source::{Component, ModelSource};

use super::formats::{Activations, activations_of, takes_over_scales};
use super::model::trains_pixels;
use super::objective::objective;
use super::record::{Recorded, of_new_model};
use super::run_model::tokenizer_file;
use super::scheduler::as_trained;
use super::source::{Beside, INDEX, Source};
use super::step::lora_options;
use super::{Notify, RecipeError, check_fine_tuning, check_trainable, hub};

/// The model that the run starts from: that of the checkpoint which it continues, if this has a whole one, else the
/// published one.
///
/// # Errors
/// When it is not here, is not one that can be trained, or contradicts the configuration.
pub(super) fn base(
    config: &Config,
    given: &Given,
    recipe_file: &Path,
    saved: Option<&SavedCheckpoint>,
    notify: &mut Notify<'_>,
) -> Result<PipelineModel, RecipeError> {
    check_fine_tuning(config)?;
    let config = without_steering(config);
    let mut source = match saved {
        None => Source::base(&config, recipe_file, notify)?,
        Some(saved) if trains_beside(&config) => {
            let (file, what) = match config.lora_rank {
                0 => (INVERSION_FILE, "a textual inversion"),
                _ => (LORA_FILE, "low-rank updates"),
            };
            check_saved(saved, saved.dir().join(file).is_file(), what)?;
            Source::base(&config, recipe_file, notify)?
        }
        Some(saved) if trains_pixels(&config) => {
            let is_whole = saved.dir().join(Part::Unet.name()).is_dir();
            check_saved(saved, is_whole, "a model of pixels")?;
            Source::of_run(saved.dir())
        }
        Some(saved) => {
            check_saved(
                saved,
                saved.dir().join(INDEX).is_file(),
                "a fine-tuned model",
            )?;
            let source = ModelSource::open(saved.dir()).map_err(RecipeError::failed)?;
            Source::Model {
                source: Box::new(source),
                repo: None,
                beside: Beside::default(),
            }
        }
    };
    if let (Source::Model { source, .. }, true) = (&source, trains_pixels(&config)) {
        return Err(RecipeError::Usage(format!(
            "unet_config has no effect: {} has a UNet of its own; leave one of the two out",
            source.path.display()
        )));
    }
    let config = hub::with_paths(config, notify)?;
    if saved.is_none() || trains_beside(&config) {
        source.replace_autoencoder(&config)?;
    }
    let mut base = source.model(&config, given, notify)?;
    check_trainable(
        &config,
        &base.model,
        &base.files.path().display().to_string(),
    )?;
    objective(&config, &base.model)?;
    base.model.remat = config.remat_policy;
    train_as_stored(&config, &mut base)?;
    Ok(base)
}

/// Lets a step train beside the weights of `base` that are stored quantized, or the low-rank factors that stand beside them.
///
/// # Errors
/// As [`stored_policy`] and [`check_low_rank`], and where such factors are in the layout of another program.
fn train_as_stored(config: &Config, base: &mut PipelineModel) -> Result<(), RecipeError> {
    base.quantization = match base.quantization.take() {
        Some(policy) if !policy.stored.is_empty() => Some(stored_policy(config, policy)?),
        other => other,
    };
    if !config.train_low_rank {
        return Ok(());
    }
    let place = base.files.path().display().to_string();
    check_low_rank(config, base.quantization.as_ref(), &place)?;
    check_own_layout(base)
}

/// Whether the model's own weights stay as they are.
fn trains_beside(config: &Config) -> bool {
    config.lora_rank > 0 || !config.placeholder_token.is_empty()
}

/// The configuration without what a file may have for `generate`: sizes, previews, and what steers or refines.
pub(super) fn without_steering(config: &Config) -> Config {
    Config {
        width: 0,
        height: 0,
        use_controlnet: false,
        ip_adapter_path: String::new(),
        preview_steps: 0,
        preview_vae_model_name_or_path: String::new(),
        refiner_model_name_or_path: String::new(),
        lightning_repo: String::new(),
        lora_config: LoraConfig::default(),
        ..config.clone()
    }
}

fn check_saved(saved: &SavedCheckpoint, fits: bool, expected: &str) -> Result<(), RecipeError> {
    if fits {
        return Ok(());
    }
    Err(RecipeError::Usage(format!(
        "{} is a checkpoint of other training, expected one of {expected}: choose another run_name or output_dir",
        saved.dir().display()
    )))
}

/// How a step trains on weights that are stored quantized: beside them, and with activations in float.
///
/// # Errors
/// When the weights themselves are to be trained, or rounded activations are asked for.
pub fn stored_policy(config: &Config, policy: Policy) -> Result<Policy, RecipeError> {
    let refuse = |problem: &str| Err(RecipeError::Usage(problem.to_owned()));
    if !trains_beside(config) && !config.train_low_rank {
        return refuse(match policy.low_ranks().is_empty() {
            true => {
                "the weights of this checkpoint are stored as integers and cannot be trained: train low-rank updates beside them \
                 with lora_rank=16, or name the float checkpoint"
            }
            false => {
                "the weights of this checkpoint are stored as integers and cannot be trained: train the low-rank factors that it has \
                 beside them with train_low_rank=True, or low-rank updates with lora_rank=16, or name the float checkpoint"
            }
        });
    }
    let rounds_activations = matches!(
        activations_of(config.quantization),
        Activations::Found | Activations::AsWeights
    );
    if rounds_activations {
        return Err(RecipeError::Usage(format!(
            "quantization={}: beside weights that are stored quantized, training has float activations: leave it out, or name the \
             mode of the weights alone, such as int8_w8a16 or svdquant_w4a16",
            config.quantization
        )));
    }
    let mut policy = policy;
    let mut layers = policy.stored.iter();
    if let Some((path, _)) = layers.find(|(_, layer)| takes_over_scales(layer)) {
        return Err(RecipeError::Usage(format!(
            "the weight of {path} takes over the scales of int8 activations (quantization_smooth_alpha), and training has float \
             ones: train beside a checkpoint that was quantized without"
        )));
    }
    for layer in policy.stored.values_mut() {
        layer.activation = None;
    }
    Ok(policy)
}

/// Refuses to train the low-rank factors of a model that has none; `place` is where it is from.
///
/// # Errors
/// Names the model, and what makes one with factors.
pub fn check_low_rank(
    config: &Config,
    policy: Option<&Policy>,
    place: &str,
) -> Result<(), RecipeError> {
    let has_factors = policy.is_some_and(|policy| !policy.low_ranks().is_empty());
    if !config.train_low_rank || has_factors {
        return Ok(());
    }
    Err(RecipeError::Usage(format!(
        "train_low_rank=True: {place} has no low-rank factors beside its weights: `maxdiff-rs quantize` with \
         quantization=svdquant_w4a16 or svdquant_w4a4 makes a model that has; name the folder that it writes"
    )))
}

/// Refuses a denoiser in the layout of another program, in which no checkpoint of a run could be written.
fn check_own_layout(base: &PipelineModel) -> Result<(), RecipeError> {
    let Some(source) = base.files.published() else {
        return Ok(());
    };
    let part = base.model.denoiser.part();
    let component = source.component(part).map_err(RecipeError::failed)?;
    match Quantization::of_config(&source.config_path(part), &component.config) {
        Ok(Some(_)) => Ok(()),
        Ok(None) | Err(_) => Err(RecipeError::Usage(format!(
            "train_low_rank=True: the low-rank factors of {} are stored in the layout of another program, in which runs are not \
             saved: train low-rank updates beside them with lora_rank=16, or quantize the float model with `maxdiff-rs quantize`",
            component.checkpoint.path().display()
        ))),
    }
}

/// What checkpoints of the run hold beside weights and state: what is trained beside the model's weights alone, or the
/// whole model.
///
/// # Errors
/// When a file of the model cannot be found.
pub(super) fn recorded(
    config: &Config,
    base: &PipelineModel,
    inversion: Option<InversionOptions>,
) -> Result<Recorded, RecipeError> {
    let kind = base.model.denoiser.kind();
    let lora = match lora_options(config, kind) {
        Some(options) => Some(lora_record(config, base, options)?),
        None => None,
    };
    match (lora, inversion, base.files.published()) {
        (None, None, Some(source)) => {
            let scheduler = &base.model.scheduler;
            whole_model(config, kind, source, scheduler)
        }
        (None, None, None) => {
            let file = tokenizer_file(config, base.files.path());
            let json = files::read_to_string(&file).map_err(RecipeError::at(file.display()))?;
            of_new_model(config, &base.model, &json)
        }
        (lora, inversion, _) => Ok(Recorded {
            lora,
            inversion,
            ..Recorded::default()
        }),
    }
}

fn lora_record(
    config: &Config,
    base: &PipelineModel,
    options: LoraOptions,
) -> Result<LoraRecord, RecipeError> {
    let Some(source) = base.files.published().filter(|_| config.lora_kohya) else {
        return Ok(LoraRecord {
            options,
            kohya: None,
        });
    };
    let denoiser = source.component(base.model.denoiser.part());
    let denoiser = &denoiser.map_err(RecipeError::failed)?.checkpoint;
    let published = source.family.spec().published.as_ref();
    let kohya = published.and_then(|published| published.kohya).map(|spec| {
        let name = match config.run_name.as_str() {
            "" => "lora",
            name => name,
        };
        let prediction = base.model.scheduler.prediction_type;
        KohyaNames::new(spec, prediction, denoiser.names(), name.to_owned())
    });
    Ok(LoraRecord { options, kohya })
}

/// A diffusers folder: the denoiser's configuration, what the run has trained it to predict, and all that training does not change.
fn whole_model(
    config: &Config,
    kind: DenoiserKind,
    source: &ModelSource,
    trained: &SchedulerConfig,
) -> Result<Recorded, RecipeError> {
    let mut files = vec![(
        "model_index.json".to_owned(),
        json(&source.index_fields().map_err(RecipeError::failed)?)?,
    )];
    if let Some(own) = &source.scheduler {
        let path = "scheduler/scheduler_config.json".to_owned();
        files.push((path, json(&as_trained(own, trained)?)?));
    }
    let (mut unchanged, mut completed) = (Vec::new(), Vec::new());
    for (part, component) in &source.components {
        files.push((format!("{part}/config.json"), json(&component.config)?));
        match part {
            part if *part == kind.part() => {
                if config.ema_decay > 0.0 {
                    let path = format!("{part}{EMA_SUFFIX}/config.json");
                    files.push((path, json(&component.config)?));
                }
                if kind != DenoiserKind::Unet || config.train_low_rank {
                    completed.push(*part);
                }
            }
            Part::TextEncoder | Part::TextEncoder2 if config.train_text_encoder => {
                completed.push(*part);
            }
            _ => unchanged.push(weights(source, *part, component)),
        }
    }
    for (part, folder) in &source.tokenizers {
        let Some(name) = part.tokenizer() else {
            continue;
        };
        for file in sorted_entries(folder).map_err(RecipeError::at(folder.display()))? {
            let from = folder.join(&file);
            if from.is_file() {
                unchanged.push(UnchangedFile {
                    path: format!("{name}/{file}"),
                    origin: UnchangedOrigin::File(from),
                });
            }
        }
    }
    Ok(Recorded {
        files,
        unchanged,
        completed,
        ..Recorded::default()
    })
}

/// The weights of a part that is not trained: its one file in diffusers' layout, or its tensors.
fn weights(source: &ModelSource, part: Part, component: &Component) -> UnchangedFile {
    let folder = source.path.join(part.name());
    let files: Vec<&Path> = component.checkpoint.files().collect();
    let own = match files.as_slice() {
        [one] if one.parent() == Some(&folder) => Some(one.to_path_buf()),
        _ => None,
    };
    UnchangedFile {
        path: format!("{part}/{}", part.weights_file()),
        origin: match own {
            Some(file) => UnchangedOrigin::File(file),
            None => UnchangedOrigin::Weights(part),
        },
    }
}

fn json(fields: &Map<String, Value>) -> Result<Vec<u8>, RecipeError> {
    serde_json::to_vec_pretty(fields).map_err(RecipeError::failed)
}

/// The folder of latents and text embeddings.
pub(super) fn cache_folder(config: &Config) -> PathBuf {
    match config.dataset_save_location.as_str() {
        "" => Path::new(&config.output_dir).join("encoded"),
        given => PathBuf::from(given),
    }
}

/// The folder of class pictures.
pub(super) fn class_folder(config: &Config) -> PathBuf {
    match config.class_data_dir.as_str() {
        "" => Path::new(&config.output_dir).join("class"),
        given => PathBuf::from(given),
    }
}
