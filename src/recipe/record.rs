//! The record of a training run in its checkpoints, and whether it may resume from one.

use serde_json::json;

use crate::config::{Config, Derived, Quantization, Resume};
use crate::models::unet::ROOT as UNET;
use crate::models::{Denoiser, DiffusionModel, Part};
use crate::train::checkpoint::{BATCH_SIZE, BATCHES_OF_STEP, SavedCheckpoint, samples_of_step};
use crate::train::schedule::LearningRate;
use crate::train::{
    EMA_SUFFIX, InversionOptions, LoraRecord, RunOptions, SCHEDULE_STEPS, UnchangedFile,
};

use super::checkpoints::newest_checkpoint;
use super::objective::train_guidance_scale;
use super::qat::format_keys;
use super::step::lora_targets;
use super::{Notice, Notify, RecipeError};

/// What checkpoints hold beside weights, state and the configuration.
#[derive(Default)]
pub(super) struct Recorded {
    /// Files by path.
    pub files: Vec<(String, Vec<u8>)>,
    pub unchanged: Vec<UnchangedFile>,
    /// Trained parts, of which not every weight is.
    pub completed: Vec<Part>,
    pub lora: Option<LoraRecord>,
    pub inversion: Option<InversionOptions>,
}

/// Seconds of a step that is long beside the half minute of notice that machines give before they are taken away: the other
/// two thirds are for writing.
const LONG_STEP: f64 = 10.0;

/// How the loop runs, and what it records.
pub(super) fn run_options(
    config: &Config,
    derived: &Derived,
    denoiser: &Denoiser,
    recorded: Recorded,
) -> Result<RunOptions, RecipeError> {
    let mut deciding = config.fixed_on_resume();
    // What follows from the family where the configuration leaves it open.
    deciding.insert(
        "lora_target_modules".to_string(),
        lora_targets(config, denoiser.kind()).into(),
    );
    if denoiser.takes_guidance() {
        deciding.insert(
            "train_guidance_scale".to_string(),
            train_guidance_scale(config).into(),
        );
    }
    // The same batch over another number of devices is the same training.
    deciding.insert(BATCH_SIZE.to_owned(), derived.total_train_batch_size.into());
    deciding.insert(
        BATCHES_OF_STEP.to_owned(),
        config.gradient_accumulation_steps.into(),
    );
    if config.quantization != Quantization::Off {
        deciding.insert(
            "quantization_local_shard_count".to_string(),
            derived.quantization_local_shard_count.into(),
        );
    }
    let total =
        u64::try_from(config.learning_rate_schedule_steps).unwrap_or(config.max_train_steps);
    Ok(RunOptions {
        max_train_steps: config.max_train_steps,
        learning_rate: LearningRate {
            peak: config.learning_rate,
            warmup_steps: match config.lr_warmup_steps {
                0 => (total as f64 * config.warmup_steps_fraction) as u64,
                steps => steps,
            },
            total_steps: total,
            decay: config.learning_rate_schedule,
            num_cycles: config.lr_num_cycles,
            power: config.lr_power,
        },
        text_learning_rates: {
            let first = match config.train_new_unet {
                true => config.learning_rate,
                false => config.text_encoder_learning_rate,
            };
            [first, config.text_encoder_2_learning_rate.unwrap_or(first)]
        },
        token_learning_rate: config.token_learning_rate.unwrap_or(config.learning_rate),
        seed: config.seed.0,
        pixel_unshuffle: config.pixel_unshuffle as usize,
        checkpoint_every: every(config.checkpoint_every),
        copy_after_seconds: LONG_STEP,
        checkpoints_total_limit: usize::try_from(config.checkpoints_total_limit).ok(),
        max_nonfinite_steps: config.max_nonfinite_steps,
        gradient_accumulation_steps: config.gradient_accumulation_steps,
        config: deciding,
        quantization: json!({
            "quantization": config.quantization.name(),
            "use_qwix_quantization": config.use_qwix_quantization,
            "quantization_local_shard_count": config.quantization_local_shard_count,
        }),
        files: {
            let own = ("config.json".to_string(), json(&config.to_json())?);
            [own].into_iter().chain(recorded.files).collect()
        },
        unchanged: recorded.unchanged,
        copies_unchanged: config.checkpoint_copies,
        completed: recorded.completed,
        ranges_metadata: format_keys(config),
        lora: recorded.lora,
        inversion: recorded.inversion,
        weight_files: [denoiser.part(), Part::TextEncoder, Part::TextEncoder2]
            .map(|part| (part.to_string(), part.weights_file().to_string()))
            .to_vec(),
    })
}

fn json(value: &serde_json::Value) -> Result<Vec<u8>, RecipeError> {
    serde_json::to_vec_pretty(value).map_err(RecipeError::failed)
}

/// The files of a new model's checkpoints.
pub(super) fn of_new_model(
    config: &Config,
    model: &DiffusionModel,
    tokenizer_json: &str,
) -> Result<Recorded, RecipeError> {
    let unet = match &model.denoiser {
        Denoiser::Unet(config) => serde_json::to_value(config),
        Denoiser::Flux(config) => serde_json::to_value(config),
        Denoiser::Sd3(config) => serde_json::to_value(config),
        Denoiser::PixArt(config) => serde_json::to_value(config),
    };
    let mut unet = unet.map_err(RecipeError::failed)?;
    unet["_class_name"] = json!(model.denoiser.class());
    let mut files = vec![
        (
            "tokenizer.json".to_string(),
            tokenizer_json.as_bytes().to_vec(),
        ),
        (format!("{UNET}/config.json"), json(&unet)?),
    ];
    if config.ema_decay > 0.0 {
        files.push((format!("{UNET}{EMA_SUFFIX}/config.json"), json(&unet)?));
    }
    let clip = model.text_encoders.first().and_then(|e| e.config.clip());
    if let Some(clip) = clip {
        let value = serde_json::to_value(clip).map_err(RecipeError::failed)?;
        files.push((format!("{}/config.json", Part::TextEncoder), json(&value)?));
        if config.ema_decay > 0.0 {
            files.push((
                format!("{}{EMA_SUFFIX}/config.json", Part::TextEncoder),
                json(&value)?,
            ));
        }
    }
    Ok(Recorded {
        files,
        ..Recorded::default()
    })
}

/// Steps between two of something; `None` for never.
pub(super) fn every(steps: i64) -> Option<u64> {
    u64::try_from(steps).ok().filter(|n| *n > 0)
}

/// The checkpoint that this run continues.
pub(super) fn saved_checkpoint(
    config: &Config,
    notify: &mut Notify<'_>,
) -> Result<Option<SavedCheckpoint>, RecipeError> {
    let folder = config.checkpoint_folder();
    let found = newest_checkpoint(config, notify)?;
    match (config.resume, &found) {
        (Resume::Never, Some(saved)) => Err(RecipeError::Usage(format!(
            "resume=never: {} holds checkpoints (newest: step {}); choose another run_name or output_dir",
            folder.display(),
            saved.state().step
        ))),
        (Resume::Must, None) => Err(RecipeError::Usage(format!(
            "resume=must: there is no checkpoint in {}",
            folder.display()
        ))),
        (Resume::Auto | Resume::Must | Resume::Never, _) => Ok(found),
    }
}

/// Refuses to resume from a checkpoint of another training run.
///
/// # Errors
/// Lists every value that decides what is computed and differs.
pub(super) fn check_saved(
    saved: &SavedCheckpoint,
    config: &Config,
    options: &RunOptions,
    notify: &mut Notify<'_>,
) -> Result<(), RecipeError> {
    // A key that the checkpoint's version did not know has its default there.
    let defaults = Config::default().fixed_on_resume();
    saved
        .state()
        .check_resume(&options.config, &defaults)
        .map_err(RecipeError::failed)?;
    let [before, now] = [&saved.state().config, &options.config].map(samples_of_step);
    if let ([Some(size), Some(count)], [Some(new_size), Some(new_count)]) = (before, now)
        && before != now
    {
        notify(Notice::Warning(&format!(
            "a step had {} pictures ({count} x {size}), and from step {} on it has {} ({new_count} x {new_size}); their order goes on \
             after those that were used, and learning_rate stays as it is",
            count * size,
            saved.state().step,
            new_count * new_size
        )));
    }
    let total = options.learning_rate.total_steps;
    match saved.state().counters.get(SCHEDULE_STEPS) {
        Some(&before) if before != total => notify(Notice::Warning(&format!(
            "the learning rate's schedule was made for {before} steps and is now for {total}: from step {} on it \
             continues at {:.3e}; learning_rate_schedule_steps={before} keeps the old one (max_train_steps={})",
            saved.state().step,
            options.learning_rate.at(saved.state().step),
            config.max_train_steps
        ))),
        Some(_) | None => {}
    }
    Ok(())
}
