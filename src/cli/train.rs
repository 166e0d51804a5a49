//! `train`.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use clap::Args;
use serde_json::json;

use crate::config::{Config, Derived, Quantization, Resume, Verb, check_local_shard_count};
use crate::data::{BatchOptions, Batcher, Dataset, Tokenizer};
use crate::dtype::DType;
use crate::metrics::{MetricsOptions, MetricsWriter};
use crate::models::unet::ROOT as UNET;
use crate::models::{DiffusionModel, Part};
use crate::pipelines::image_file::{
    labelled_grid, prepare_output_dir, visible_scale, write_numbered,
};
use crate::pipelines::images::{DrawOptions, Pipeline, Watcher, WeightSource};
use crate::pipelines::prompt::PromptSyntax;
use crate::pipelines::text_to_image::DenoiseOptions;
use crate::pipelines::traced::Traced;
use crate::recipe::prompts::{self, Prompted};
use crate::recipe::{self, scheduler as sampler};
use crate::runtime::{Program, ProgramOptions, Session};
use crate::shard::ShardPlan;
use crate::train::checkpoint::{CheckpointWriter, SavedCheckpoint};
use crate::train::run::{
    self, EMA_SUFFIX, Outcome, RunOptions, Sinks, TEXT_ENCODER_FILE, Trainer, TrainingState,
    UNET_FILE,
};
use crate::train::schedule::LearningRate;
use crate::train::step;

use super::{CliError, RecipeArgs, notices, print};

/// `train ...`
#[derive(Debug, Args)]
pub struct TrainArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Print the outcome as JSON
    #[arg(long)]
    json: bool,
}

/// Runs `train`.
///
/// # Errors
/// When the configuration is wrong, or training fails; the error says where the last state is saved.
pub fn run(args: &TrainArgs) -> Result<ExitCode, CliError> {
    let config = args.recipe.load(Verb::Train)?;
    let started = Instant::now();
    // All that can be wrong with folders is found before anything is computed.
    let run_dir = config.run_dir();
    let samples_dir = run_dir.join("samples");
    prepare_output_dir(&run_dir).map_err(CliError::failed)?;
    if config.sample_every > 0 {
        prepare_output_dir(&samples_dir).map_err(CliError::failed)?;
    }
    let mut writer =
        CheckpointWriter::open(&config.checkpoint_folder()).map_err(CliError::failed)?;
    if let Some(owner) = writer.stale_owner() {
        super::tell(&format!(
            "warning: {owner} ended without releasing the checkpoint folder; continuing"
        ));
    }
    let saved = saved_checkpoint(&config)?;
    let dataset = recipe::data::dataset(&config)?;
    let tokenizer_json = tokenizer_json(&config, &dataset, saved.as_ref())?;
    let probe = Tokenizer::from_json(&tokenizer_json, usize::MAX >> 1).map_err(CliError::failed)?;
    let model = recipe::model(&config, Some(&probe))?;
    recipe::check_training(&config, &model)?;
    if config.sample_every > 0 {
        // What the first grid of samples would find wrong is found before an hour of training.
        let steps = config.num_inference_steps as usize;
        sampler::check_sampler_keys(&config, &model.scheduler)?;
        sampler::sampling_plan(&config, &model.scheduler, steps)?;
    }
    let tokenizer =
        Tokenizer::from_json(&tokenizer_json, model.tokens).map_err(CliError::failed)?;

    let opened = recipe::open_session(&config, &mut notices())?;
    super::progress(&format!("devices: {}", opened.chosen));
    let session = opened.session;
    let mesh = session.mesh();
    let derived = config.derived(mesh.num_devices() as u64, mesh.num_slices() as u64)?;
    let shards = derived.quantization_local_shard_count;
    check_local_shard_count(derived.total_train_batch_size, shards)?;
    let batch = derived.total_train_batch_size as usize;
    let options = recipe::step_options(&config, batch, shards as usize)?;
    let traced = step::trace(&model, &options).map_err(CliError::usage)?;
    let plan = ShardPlan::new(&traced.graph, mesh, session.rules()).map_err(CliError::usage)?;
    recipe::check_batch(&traced.graph, &plan, mesh)?;
    let run_options = run_options(&config, &derived, &model, &tokenizer_json)?;
    if let Some(saved) = &saved {
        check_saved(saved, &config, &run_options)?;
        if saved.state().step >= config.max_train_steps {
            return nothing_to_do(args, saved, &config);
        }
    }
    let jsonl = if config.metrics_file.is_empty() {
        run_dir.join("metrics.jsonl")
    } else {
        config.metrics_file.clone().into()
    };
    let tensorboard = run_dir.join("tensorboard");
    let mut metrics = MetricsWriter::open(&MetricsOptions {
        run_name: &config.run_name,
        jsonl: config.write_metrics.then_some(jsonl.as_path()),
        tensorboard_dir: config.write_metrics.then_some(tensorboard.as_path()),
        first_step: saved.as_ref().map_or(0, |s| s.state().step),
        flush_every: config.log_period,
    })
    .map_err(CliError::failed)?;
    if let Some(policy) = &options.quantization {
        super::progress(&recipe::quantization_summary(policy, &traced.decisions));
    }
    super::progress(&format!(
        "{} parameters, {} samples a step; compiling",
        traced.graph.parameter_count(),
        batch
    ));
    let program_options = ProgramOptions {
        precision: config.precision,
    };
    let program = Program::compile(&session, &traced.graph, "train_step", &program_options)
        .map_err(CliError::failed)?;
    let timings = program.timings();
    let how = match timings.from_cache {
        true => "loaded from the cache",
        false => "compiled",
    };
    super::progress(&format!("{how} in {:.1} s", timings.compile));

    let batcher = Arc::new(
        Batcher::new(
            dataset,
            tokenizer,
            BatchOptions {
                batch_size: batch,
                seed: config.seed,
                caption_dropout: config.caption_dropout,
                random_flip: false,
            },
        )
        .map_err(CliError::failed)?,
    );
    let state = match &saved {
        Some(saved) => {
            super::progress(&format!("continuing from {}", saved.dir().display()));
            TrainingState::resume(&session, &traced.graph, &program, saved, &run_options)
        }
        None => TrainingState::new(&session, &traced.graph, &program, config.seed, &mut |_| {
            None
        }),
    }
    .map_err(CliError::failed)?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        // A second signal ends the process at once.
        signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(&stop))
            .map_err(CliError::failed)?;
        signal_hook::flag::register(signal, Arc::clone(&stop)).map_err(CliError::failed)?;
    }
    // Samples are made with the moving averages, which are kept in float32.
    let mut sampled = model.clone();
    if config.ema_decay > 0.0 {
        sampled.precision.weights = DType::F32;
    }
    let mut samples = Samples {
        config: &config,
        session: &session,
        model: &sampled,
        tokenizer: batcher.tokenizer(),
        prompts: sample_prompts(&config, &batcher)?,
        dir: &samples_dir,
        compiled: None,
    };
    let trainer = Trainer {
        session: &session,
        graph: &traced.graph,
        program: &program,
        batcher: Arc::clone(&batcher),
        options: &run_options,
    };
    let mut sampler = |step, weights: run::Weights<'_>| samples.make(step, weights);
    let mut sinks = Sinks {
        checkpoints: &mut writer,
        metrics: &mut metrics,
        sampler: &mut sampler,
    };
    let outcome = trainer
        .run(state, &mut sinks, &stop)
        .map_err(CliError::failed)?;
    let (checkpoint, code, what) = match &outcome {
        Outcome::Done { checkpoint } => (checkpoint, 0, "done"),
        Outcome::Stopped { checkpoint, .. } => (checkpoint, 143, "stopped"),
    };
    if args.json {
        let report = json!({
            "outcome": what,
            "checkpoint": checkpoint,
            "seconds": started.elapsed().as_secs_f64(),
        });
        print(&report.to_string())?;
    } else {
        print(&format!(
            "{what} after {:.0} s; saved in {}",
            started.elapsed().as_secs_f64(),
            checkpoint.display()
        ))?;
    }
    Ok(ExitCode::from(code))
}

fn run_options(
    config: &Config,
    derived: &Derived,
    model: &DiffusionModel,
    tokenizer_json: &str,
) -> Result<RunOptions, CliError> {
    let all = config.to_json();
    let mut deciding = config.fixed_on_resume();
    // The same batch over another number of devices is the same training; a larger one is not.
    deciding.insert(
        "total_train_batch_size".to_string(),
        derived.total_train_batch_size.into(),
    );
    if config.quantization != Quantization::Off {
        deciding.insert(
            "quantization_local_shard_count".to_string(),
            derived.quantization_local_shard_count.into(),
        );
    }
    let json = |value: &serde_json::Value| -> Result<Vec<u8>, CliError> {
        serde_json::to_vec_pretty(value).map_err(CliError::failed)
    };
    let mut unet = serde_json::to_value(&model.unet).map_err(CliError::failed)?;
    unet["_class_name"] = json!("UNet2DConditionModel");
    let mut files = vec![
        ("config.json".to_string(), json(&all)?),
        (
            "tokenizer.json".to_string(),
            tokenizer_json.as_bytes().to_vec(),
        ),
        (format!("{UNET}/config.json"), json(&unet)?),
    ];
    if config.ema_decay > 0.0 {
        files.push((format!("{UNET}{EMA_SUFFIX}/config.json"), json(&unet)?));
    }
    if let Some(text_encoder) = model.text_encoders.first() {
        let value = serde_json::to_value(&text_encoder.config).map_err(CliError::failed)?;
        files.push((format!("{}/config.json", Part::TextEncoder), json(&value)?));
        if config.ema_decay > 0.0 {
            files.push((
                format!("{}{EMA_SUFFIX}/config.json", Part::TextEncoder),
                json(&value)?,
            ));
        }
    }
    let total =
        u64::try_from(config.learning_rate_schedule_steps).unwrap_or(config.max_train_steps);
    let every = |steps: i64| u64::try_from(steps).ok().filter(|n| *n > 0);
    Ok(RunOptions {
        max_train_steps: config.max_train_steps,
        learning_rate: LearningRate {
            peak: config.learning_rate,
            warmup_steps: (total as f64 * config.warmup_steps_fraction) as u64,
            total_steps: total,
            decay: config.learning_rate_schedule,
        },
        seed: config.seed,
        pixel_unshuffle: config.pixel_unshuffle as usize,
        log_period: config.log_period,
        checkpoint_every: every(config.checkpoint_every),
        checkpoints_total_limit: usize::try_from(config.checkpoints_total_limit).ok(),
        sample_every: every(config.sample_every),
        max_nonfinite_steps: config.max_nonfinite_steps,
        quiet: !tracing::enabled!(tracing::Level::INFO),
        config: deciding,
        quantization: json!({
            "quantization": if config.quantization == Quantization::Off { "" } else { "int8" },
            "use_qwix_quantization": config.use_qwix_quantization,
            "quantization_local_shard_count": config.quantization_local_shard_count,
        }),
        files,
        weight_files: vec![
            (UNET.to_string(), UNET_FILE.to_string()),
            (Part::TextEncoder.to_string(), TEXT_ENCODER_FILE.to_string()),
        ],
    })
}

/// The checkpoint that this run continues.
fn saved_checkpoint(config: &Config) -> Result<Option<SavedCheckpoint>, CliError> {
    let folder = config.checkpoint_folder();
    let found = recipe::newest_checkpoint(config, &mut notices())?;
    match (config.resume, &found) {
        (Resume::Never, Some(saved)) => Err(CliError::Usage(format!(
            "resume=never: {} holds checkpoints (newest: step {}); choose another run_name or output_dir",
            folder.display(),
            saved.state().step
        ))),
        (Resume::Must, None) => Err(CliError::Usage(format!(
            "resume=must: there is no checkpoint in {}",
            folder.display()
        ))),
        (Resume::Auto | Resume::Must | Resume::Never, _) => Ok(found),
    }
}

/// The tokenizer that the weights were trained with, or a new run's: one made anew from captions that have changed would
/// give the words other ids.
fn tokenizer_json(
    config: &Config,
    dataset: &Dataset,
    saved: Option<&SavedCheckpoint>,
) -> Result<String, CliError> {
    let given = !config.tokenizer_model_name_or_path.is_empty();
    let Some(saved) = saved else {
        return Ok(recipe::data::tokenizer_json(config, dataset)?);
    };
    let bytes = saved.bytes("tokenizer.json").map_err(CliError::failed)?;
    let kept = String::from_utf8(bytes).map_err(CliError::failed)?;
    if given && recipe::data::tokenizer_json(config, dataset)? != kept {
        return Err(CliError::Usage(format!(
            "tokenizer_model_name_or_path={}: the tokenizer is not the one that {} was trained with",
            config.tokenizer_model_name_or_path,
            saved.dir().display()
        )));
    }
    Ok(kept)
}

/// Whether the run may continue the checkpoint.
fn check_saved(
    saved: &SavedCheckpoint,
    config: &Config,
    options: &RunOptions,
) -> Result<(), CliError> {
    // A key that the checkpoint's version did not know has its default there.
    let defaults = Config::default().fixed_on_resume();
    saved
        .state()
        .check_resume(&options.config, &defaults)
        .map_err(CliError::failed)?;
    let total = options.learning_rate.total_steps;
    match saved.state().counters.get(run::SCHEDULE_STEPS) {
        Some(&before) if before != total => super::tell(&format!(
            "warning: the learning rate's schedule was made for {before} steps and is now for {total}: from step {} on \
             it goes on at {:.3e}; learning_rate_schedule_steps={before} keeps the old one (max_train_steps={})",
            saved.state().step,
            options.learning_rate.at(saved.state().step),
            config.max_train_steps
        )),
        Some(_) | None => {}
    }
    Ok(())
}

fn nothing_to_do(
    args: &TrainArgs,
    saved: &SavedCheckpoint,
    config: &Config,
) -> Result<ExitCode, CliError> {
    let text = match args.json {
        true => json!({"outcome": "nothing to do", "checkpoint": saved.dir(), "seconds": 0.0})
            .to_string(),
        false => format!(
            "nothing to do: the newest checkpoint has {} of {} steps; raise max_train_steps to go on",
            saved.state().step,
            config.max_train_steps
        ),
    };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// The prompts of the sample images: the configured ones, or the first captions of the dataset.
fn sample_prompts(config: &Config, batcher: &Batcher) -> Result<Vec<String>, CliError> {
    if !config.sample_prompts.0.is_empty() {
        return Ok(config.sample_prompts.0.clone());
    }
    (0..8.min(batcher.dataset().len()))
        .map(|i| Ok(batcher.dataset().get(i).map_err(CliError::failed)?.caption))
        .collect()
}

/// Makes grids of sample images during training.
struct Samples<'a> {
    config: &'a Config,
    session: &'a Session,
    model: &'a DiffusionModel,
    tokenizer: &'a Tokenizer,
    prompts: Vec<String>,
    dir: &'a Path,
    compiled: Option<Pipeline>,
}

impl Samples<'_> {
    fn make(
        &mut self,
        step: u64,
        weights: run::Weights<'_>,
    ) -> Result<Vec<u8>, Box<dyn std::error::Error + Send + Sync>> {
        let pipeline = match self.compiled.take() {
            Some(pipeline) => pipeline,
            None => Pipeline::compile(
                self.session,
                self.model,
                &Traced::new(
                    self.model,
                    DenoiseOptions {
                        batch: self.prompts.len(),
                        tokens: self.model.tokens,
                        guidance: recipe::guidance(self.config),
                        quantization: recipe::policy(self.config, 0)?,
                    },
                    false,
                )?,
                self.config.precision,
                self.config.pixel_unshuffle as usize,
            )?,
        };
        let prompted: Vec<Prompted> = self
            .prompts
            .iter()
            .enumerate()
            .map(|(i, prompt)| Prompted {
                prompt: prompt.clone(),
                negative_prompt: String::new(),
                guidance_scale: self.config.guidance_scale,
                steps: self.config.num_inference_steps as usize,
                seed: self.config.seed + i as u64,
            })
            .collect();
        let steps = self.config.num_inference_steps as usize;
        let plan = sampler::sampling_plan(self.config, &self.model.scheduler, steps)?;
        // Captions are what the model was trained on: brackets are text.
        let pictures = prompts::pictures(
            &[self.tokenizer],
            &prompted,
            &[],
            PromptSyntax::Plain,
            &mut notices(),
        )?;
        let images = pipeline
            .run(
                self.session,
                &WeightSource::Devices(weights),
                &pictures,
                &DrawOptions {
                    plans: std::slice::from_ref(&plan),
                    guidance_rescale: 0.0,
                    zero_empty_prompts: false,
                    image: None,
                    controls: &[],
                    mask: None,
                    latents: None,
                    continues: None,
                },
                Watcher {
                    step: &mut || {},
                    previews: None,
                },
            )?
            .images;
        self.compiled = Some(pipeline);
        let columns = 4.min(images.len()) as u32;
        let scale = images.first().map_or(1, |i| visible_scale(i.width()));
        let grid = labelled_grid(&images, &self.prompts, columns, scale)?;
        let path = write_numbered(self.dir, &format!("step-{step:08}"), &grid, None)?;
        Ok(std::fs::read(path)?)
    }
}
