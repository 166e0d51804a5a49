//! The options of a training run: model, data and output.

use std::path::{Path, PathBuf};

use crate::config::{Config, Given, check_local_shard_count};
use crate::data::{BatchOptions, Batcher, Dataset, TagOrders, Tokenizer};
use crate::models::DiffusionModel;
use crate::pipelines::image_file::check_output_dir;
use crate::pipelines::{ImageRequest, PipelineModel};
use crate::runtime::Session;
use crate::schedulers::SamplingPlan;
use crate::train::checkpoint::{CheckpointFolder, SavedCheckpoint};
use crate::train::{
    FineTune, InversionOptions, MetricsFiles, PixelStart, SampleOptions, Task, TrainerOptions,
    ValidationOptions,
};

use super::fine_tune::{self, cache_folder};
use super::inversions::{check_captions, new_token};
use super::model::trains_pixels;
use super::record::{check_saved, every, of_new_model, run_options, saved_checkpoint};
use super::scheduler::{check_sampler_keys, sampling_plan};
use super::{
    Notify, RecipeError, Step, check_fine_tuning, check_training, data, guidance, memory_advice,
    model, policy, step_options,
};

/// A training run as configured, before it has devices. Its checkpoint folder is locked, if there is one; nothing is
/// made.
pub struct Training {
    config: Config,
    checkpoints: CheckpointFolder,
    saved: Option<SavedCheckpoint>,
    dataset: Dataset,
    /// The orders of tags of captions, if they change.
    tags: Option<TagOrders>,
    start: Start,
    /// The new token to train, if any.
    inversion: Option<InversionOptions>,
    /// The sampler of sample images, if there are any.
    plan: Option<SamplingPlan>,
}

/// What a run starts from.
enum Start {
    New {
        model: Box<DiffusionModel>,
        tokenizer_json: String,
    },
    /// A model of pixels that an earlier run has trained.
    Pixels(Box<PipelineModel>),
    Published(Box<PipelineModel>),
}

impl Start {
    fn model(&self) -> &DiffusionModel {
        match self {
            Start::New { model, .. } => model,
            Start::Pixels(base) | Start::Published(base) => &base.model,
        }
    }
}

/// Finds the folders, the model and the data of a run. All that can be wrong with them, and with the sampler of the
/// first grid of samples, is found here, before anything is computed. `given` holds the keys that the configuration sets
/// explicitly, `recipe_file` the file that it was read from.
///
/// # Errors
/// When a folder cannot be written or is another run's, the data or the model cannot be read, or the model cannot be
/// trained.
pub fn training(
    config: &Config,
    given: &Given,
    recipe_file: &Path,
    notify: &mut Notify<'_>,
) -> Result<Training, RecipeError> {
    match config.train_new_unet {
        true => check_training(config, &model(config, None)?)?,
        false => check_fine_tuning(config)?,
    }
    check_output_dir(&config.run_dir()).map_err(RecipeError::failed)?;
    if config.sample_every > 0 {
        check_output_dir(&samples_dir(config)).map_err(RecipeError::failed)?;
    }
    if !trains_pixels(config) {
        check_output_dir(&cache_folder(config)).map_err(RecipeError::failed)?;
    }
    let checkpoints =
        CheckpointFolder::find(&config.checkpoint_folder()).map_err(RecipeError::failed)?;
    let saved = saved_checkpoint(config, notify)?;
    let mut inversion = None;
    let (dataset, start) = match config.train_new_unet {
        true => {
            let dataset = data::dataset(config, notify)?;
            let start = new_model(config, &dataset, saved.as_ref())?;
            (dataset, start)
        }
        false => {
            let mut base = fine_tune::base(config, given, recipe_file, saved.as_ref(), notify)?;
            check_bucket_steps(config, &base.model)?;
            inversion = new_token(config, &mut base)?;
            let dataset = data::dataset(config, notify)?;
            if let Some(inversion) = &inversion {
                check_captions(inversion, &base, &dataset)?;
            }
            let base = Box::new(base);
            match trains_pixels(config) {
                true => (dataset, Start::Pixels(base)),
                false => (dataset, Start::Published(base)),
            }
        }
    };
    let tags = data::tag_orders(config, &dataset)?;
    let plan = match config.sample_every > 0 {
        false => None,
        true => {
            let steps = config.num_inference_steps as usize;
            let model = start.model();
            check_sampler_keys(config, &model.scheduler)?;
            Some(sampling_plan(
                config,
                &model.scheduler,
                model.denoiser.kind(),
                model.image_seq_len(),
                steps,
            )?)
        }
    };
    Ok(Training {
        config: config.clone(),
        checkpoints,
        saved,
        dataset,
        tags,
        start,
        inversion,
        plan,
    })
}

/// Refuses buckets whose sides are no whole numbers of latents.
fn check_bucket_steps(config: &Config, model: &DiffusionModel) -> Result<(), RecipeError> {
    let steps = config.bucket_reso_steps;
    let factor = (model.image_size[0] / model.sample_size[0].max(1)) as u64;
    if !config.enable_bucket || steps.is_multiple_of(factor.max(1)) {
        return Ok(());
    }
    Err(RecipeError::Usage(format!(
        "bucket_reso_steps={steps} is not a multiple of {factor}, the side in pixels of one latent; the nearest is {}",
        steps.next_multiple_of(factor)
    )))
}

/// A new model, whose vocabulary is that of the captions where the configuration does not say another.
fn new_model(
    config: &Config,
    dataset: &Dataset,
    saved: Option<&SavedCheckpoint>,
) -> Result<Start, RecipeError> {
    let tokenizer_json = tokenizer_json(config, dataset, saved)?;
    let probe =
        Tokenizer::from_json(&tokenizer_json, usize::MAX >> 1).map_err(RecipeError::failed)?;
    let model = model(config, Some(&probe))?;
    check_training(config, &model)?;
    Ok(Start::New {
        model: Box::new(model),
        tokenizer_json,
    })
}

impl Training {
    /// The options of a [`crate::train::Trainer`] on the devices of `session`.
    ///
    /// # Errors
    /// When the batch does not fit the devices, or the checkpoint is one of other training.
    pub fn options(
        self,
        session: &Session,
        notify: &mut Notify<'_>,
    ) -> Result<TrainerOptions, RecipeError> {
        let config = &self.config;
        let mesh = session.mesh();
        let derived = config.derived(mesh.num_devices() as u64, mesh.num_slices() as u64)?;
        let shards = derived.quantization_local_shard_count;
        check_local_shard_count(derived.total_train_batch_size, shards)?;
        let mut batch = derived.total_train_batch_size as usize;
        if config.with_prior_preservation {
            // As many class pictures.
            batch *= 2;
        }
        let recorded = match &self.start {
            Start::New {
                model,
                tokenizer_json,
            } => of_new_model(config, model, tokenizer_json)?,
            Start::Pixels(base) | Start::Published(base) => {
                fine_tune::recorded(config, base, self.inversion.clone())?
            }
        };
        let run = run_options(config, &derived, &self.start.model().denoiser, recorded)?;
        if let Some(saved) = &self.saved {
            check_saved(saved, config, &run, notify)?;
        }
        let mut step = step_options(config, self.start.model(), batch, shards as usize)?;
        step.inversion = self.inversion;
        let family = self.start.model().family;
        // Samples are drawn as `generate` would draw them.
        let drawing = match &self.start {
            Start::Pixels(base) | Start::Published(base) => base.quantization.clone(),
            Start::New { .. } => policy(config, family.spec(), 0)?,
        };
        if let Some(policy) = drawing.as_ref().filter(|policy| !policy.stored.is_empty()) {
            step.quantization = Some(policy.clone());
        }
        let samples = match self.plan {
            None => None,
            Some(plan) => Some(SampleOptions {
                every: every(config.sample_every).unwrap_or(u64::MAX),
                dir: samples_dir(config),
                images: sample_images(config, &self.dataset)?,
                plan,
                guidance: guidance(config, family),
                quantization: drawing,
            }),
        };
        let validation = (config.validation_images > 0).then(|| ValidationOptions {
            samples: config.validation_images as usize,
            every: every(config.validation_every).unwrap_or(u64::MAX),
        });
        let batches = BatchOptions {
            batch_size: batch,
            seed: config.seed.0,
            caption_dropout: config.caption_dropout,
            random_flip: config.random_flip,
        };
        let data = (self.dataset, self.tags);
        Ok(TrainerOptions {
            step,
            precision: config.precision,
            metrics: metrics(config),
            task: task(config, self.start, data, batches)?,
            run,
            checkpoints: self.checkpoints,
            resume: self.saved,
            samples,
            validation,
            memory_advice: memory_advice(config, Step::Train),
            stop: None,
        })
    }
}

/// What is trained, and on what.
fn task(
    config: &Config,
    start: Start,
    (dataset, tags): (Dataset, Option<TagOrders>),
    batches: BatchOptions,
) -> Result<Task, RecipeError> {
    let (start, tokenizer) = match start {
        Start::New {
            model,
            tokenizer_json,
        } => {
            let tokenizer = Tokenizer::from_json(&tokenizer_json, model.tokens);
            let tokenizer = tokenizer.map_err(RecipeError::failed)?;
            (PixelStart::New(model), tokenizer)
        }
        Start::Pixels(mut base) => {
            let tokenizer = base.tokenizers.pop().ok_or_else(|| {
                RecipeError::Usage(format!("{}: no tokenizer", base.files.path().display()))
            })?;
            (PixelStart::Run(base), tokenizer)
        }
        Start::Published(base) => {
            batches.check(&dataset).map_err(RecipeError::failed)?;
            return Ok(Task::FineTune(Box::new(FineTune {
                base: *base,
                dataset,
                batches,
                tags,
                cache: cache_folder(config),
            })));
        }
    };
    let batcher = Batcher::new(dataset, tokenizer, batches).map_err(RecipeError::failed)?;
    let batcher = Box::new(batcher);
    Ok(Task::Pixels { start, batcher })
}

/// The tokenizer that the weights were trained with, or a new run's: one made anew from captions that have changed
/// would give the words other ids.
fn tokenizer_json(
    config: &Config,
    dataset: &Dataset,
    saved: Option<&SavedCheckpoint>,
) -> Result<String, RecipeError> {
    let given = !config.tokenizer_model_name_or_path.is_empty();
    let Some(saved) = saved else {
        return data::tokenizer_json(config, dataset);
    };
    let bytes = saved.bytes("tokenizer.json").map_err(RecipeError::failed)?;
    let kept = String::from_utf8(bytes).map_err(RecipeError::failed)?;
    if given && data::tokenizer_json(config, dataset)? != kept {
        return Err(RecipeError::Usage(format!(
            "tokenizer_model_name_or_path={}: the tokenizer is not the one that {} was trained with",
            config.tokenizer_model_name_or_path,
            saved.dir().display()
        )));
    }
    Ok(kept)
}

fn samples_dir(config: &Config) -> PathBuf {
    config.run_dir().join("samples")
}

/// The sample images: of the configured prompts, or of the first captions of the dataset.
fn sample_images(config: &Config, dataset: &Dataset) -> Result<Vec<ImageRequest>, RecipeError> {
    let prompts = match config.sample_prompts.0.as_slice() {
        [] | [_] if config.sample_prompts.0.concat().is_empty() => (0..8.min(dataset.len()))
            .map(|i| {
                Ok(dataset
                    .entry(i)
                    .map_err(RecipeError::failed)?
                    .0
                    .swap_remove(0))
            })
            .collect::<Result<Vec<_>, RecipeError>>()?,
        given => given.to_vec(),
    };
    let image = |(prompt, at)| ImageRequest {
        seed: config.seed.0 + at,
        guidance_scale: config.guidance_scale,
        steps: config.num_inference_steps as usize,
        ..ImageRequest::new(prompt)
    };
    Ok(prompts.into_iter().zip(0..).map(image).collect())
}

fn metrics(config: &Config) -> MetricsFiles {
    let run_dir = config.run_dir();
    let jsonl = match config.metrics_file.as_str() {
        "" => run_dir.join("metrics.jsonl"),
        given => given.into(),
    };
    let tensorboard = match config.tensorboard_dir.as_str() {
        "" => run_dir.join("tensorboard"),
        given => given.into(),
    };
    MetricsFiles {
        run_name: config.run_name.clone(),
        jsonl: config.write_metrics.then_some(jsonl),
        tensorboard: config.write_metrics.then_some(tensorboard),
        page: config.write_metrics.then(|| run_dir.join("report.html")),
        flush_every: config.log_period,
    }
}
