//! `generate`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use image::RgbImage;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};

use crate::config::{Config, Verb};
use crate::data::Tokenizer;
use crate::data::shapes::ReadScore;
use crate::models::unet::ROOT as UNET;
use crate::pipelines::image_file::{
    GenerationSettings, labelled_grid, prepare_output_dir, visible_scale, write_numbered,
};
use crate::pipelines::model::{DiffusionModel, TEXT_ENCODER};
use crate::pipelines::text_to_image::{DenoiseOptions, TextToImage, trace_denoise, trace_encode};
use crate::runtime::{Array, Session};
use crate::shard::PartitionSpec;
use crate::train::checkpoint::SavedCheckpoint;
use crate::train::run::EMA_SUFFIX;
use crate::weights::{Checkpoint, match_parameters};

use super::images::{Prompted, make_images};
use super::train::{TEXT_ENCODER_FILE, UNET_FILE};
use super::{CliError, RecipeArgs, print, recipe};

/// The key of the noise schedule.
const SCHEDULER: &str = "diffusion_scheduler_config";

/// `generate ...`
#[derive(Debug, Args)]
pub struct GenerateArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Print paths, seeds and timings as JSON
    #[arg(long)]
    json: bool,
}

/// Most pictures made at once.
const MAX_BATCH: usize = 8;

/// Runs `generate`.
///
/// # Errors
/// When the configuration is wrong, there are no weights, or a program fails.
pub fn run(args: &GenerateArgs) -> Result<ExitCode, CliError> {
    let config = args.recipe.load(Verb::Generate)?;
    let out = config.run_dir().join("images");
    prepare_output_dir(&out).map_err(CliError::failed)?;
    let source = Source::find(&config)?;
    if config.held_out_prompts > 0
        && args
            .recipe
            .overrides
            .iter()
            .any(|o| o.starts_with("prompt="))
    {
        return Err(CliError::Usage(
            "prompt has no effect with held_out_prompts, which draws captions of the dataset: give one of the two"
                .to_string(),
        ));
    }
    let tokenizer_file = match config.tokenizer_model_name_or_path.as_str() {
        // Checkpoints made here have it beside the models, folders in diffusers' layout in one of its own.
        "" if source.dir.join("tokenizer").is_dir() => source.dir.join("tokenizer/tokenizer.json"),
        "" => source.dir.join("tokenizer.json"),
        given if Path::new(given).is_dir() => Path::new(given).join("tokenizer.json"),
        given => PathBuf::from(given),
    };
    // The text encoder's length bounds the tokens, and the tokenizer's size its vocabulary.
    let probe = Tokenizer::from_file(&tokenizer_file, usize::MAX >> 1).map_err(CliError::failed)?;
    let model = recipe::model(&config, Some(&probe))?;
    if model.text_encoder.is_none() {
        return Err(CliError::Usage(
            "this recipe has no text encoder of its own: give text_encoder_config (loading the encoders of Stable \
             Diffusion checkpoints is not here yet)"
                .to_string(),
        ));
    }
    recipe::check_pixels(&config, &model)?;
    recipe::sampling_plan(&config, &model.scheduler)?;
    let tokenizer =
        Tokenizer::from_file(&tokenizer_file, model.tokens).map_err(CliError::failed)?;

    let start = Instant::now();
    let opened = recipe::open_session(&config)?;
    super::progress(&format!("devices: {}", opened.chosen));
    let session = opened.session;
    let prompts = prompted(&config)?;
    let devices = session.devices().len();
    let batch = prompts.len().min(MAX_BATCH).next_multiple_of(devices);
    let options = DenoiseOptions {
        batch,
        guidance: config.do_classifier_free_guidance,
        quantization: recipe::policy(&config, 0)?,
    };
    let weights = load_weights(&session, &model, &options, &source)?;
    let loaded = start.elapsed().as_secs_f64();
    let start = Instant::now();
    let pipeline = TextToImage::compile(&session, &model, &options, recipe::dot_precision(&config))
        .map_err(CliError::failed)?;
    if let Some(policy) = &options.quantization {
        super::progress(&recipe::quantization_summary(policy, &pipeline.decisions));
    }
    let compiled = start.elapsed().as_secs_f64();

    let start = Instant::now();
    let steps = config.num_inference_steps as usize;
    let bar = match tracing::enabled!(tracing::Level::INFO) {
        true => ProgressBar::new((prompts.len().div_ceil(batch) * steps) as u64),
        false => ProgressBar::hidden(),
    };
    if let Ok(style) = ProgressStyle::with_template("{bar:30} step {pos}/{len}, {eta} left") {
        bar.set_style(style);
    }
    let images = make_images(
        &session,
        &pipeline,
        &|name| weights.get(name),
        &tokenizer,
        &prompts,
        &config.negative_prompt,
        &config,
        &mut |done, step| bar.set_position((done / batch * steps + step) as u64),
    )
    .map_err(CliError::Failed)?;
    bar.finish_and_clear();
    let made = start.elapsed().as_secs_f64();
    let score = match config.held_out_prompts {
        0 => None,
        _ => {
            let pairs = images.iter().zip(prompts.iter().map(|p| p.prompt.as_str()));
            Some(ReadScore::of(pairs).map_err(CliError::failed)?)
        }
    };
    let written = write(&config, &out, &prompts, &images)?;
    if args.json {
        let report = json!({
            "images": written.images.iter().zip(&prompts).map(|(path, p)| json!({
                "path": path, "prompt": p.prompt, "seed": p.seed,
            })).collect::<Vec<_>>(),
            "grid": written.grid,
            "weights": source.dir,
            "score": score,
            "seconds": {"load": loaded, "compile": compiled, "denoise": made},
        });
        print(&report.to_string())?;
    } else {
        for path in &written.images {
            print(&path.display().to_string())?;
        }
        if let Some(grid) = &written.grid {
            print(&format!("grid: {}", grid.display()))?;
        }
        if let Some(score) = &score {
            print(&score_line(score))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// What the pictures' reader found, in one line.
fn score_line(score: &ReadScore) -> String {
    let share = |right: usize| format!("{:.1} %", 100.0 * score.fraction(right));
    format!(
        "read back from {} pictures: colours and shapes right in {}; background {}, colours {}, shapes {}, sizes too {}, \
         places too {}, everything {}",
        score.prompts,
        share(score.both_right),
        share(score.background_right),
        share(score.colours_right),
        share(score.shapes_right),
        share(score.sizes_right),
        share(score.relation_right),
        share(score.all_right),
    )
}

/// Every picture to make: each prompt `num_images_per_prompt` times, with seeds that count up.
fn prompted(config: &Config) -> Result<Vec<Prompted>, CliError> {
    let each = config.num_images_per_prompt;
    let prompts = match config.held_out_prompts {
        0 => config.prompt.0.clone(),
        _ => super::data::held_out_prompts(config)?,
    };
    Ok(prompts
        .iter()
        .flat_map(|prompt| (0..each).map(move |_| prompt.clone()))
        .enumerate()
        .map(|(i, prompt)| Prompted {
            prompt,
            seed: config.seed.wrapping_add(i as u64),
        })
        .collect())
}

/// Where weights come from: a checkpoint of the run, or a folder in diffusers' layout.
struct Source {
    dir: PathBuf,
    /// Added to a model's folder name: the moving average, where the checkpoint has one.
    suffix: &'static str,
}

impl Source {
    fn find(config: &Config) -> Result<Source, CliError> {
        if let Some(saved) = recipe::newest_checkpoint(config)? {
            check_trained(config, &saved)?;
            let averaged = saved.dir().join(format!("{UNET}{EMA_SUFFIX}")).is_dir();
            return Ok(Source {
                dir: saved.dir().to_owned(),
                suffix: if averaged { EMA_SUFFIX } else { "" },
            });
        }
        let named = Path::new(&config.pretrained_model_name_or_path);
        if !config.pretrained_model_name_or_path.is_empty() && named.join(UNET).is_dir() {
            return Ok(Source {
                dir: named.to_owned(),
                suffix: "",
            });
        }
        Err(CliError::Usage(format!(
            "no weights: {} holds no checkpoint, and pretrained_model_name_or_path='{}' is no folder with {UNET}/ in it; \
             train first, or name a folder in diffusers' layout",
            config.checkpoint_folder().display(),
            config.pretrained_model_name_or_path
        )))
    }

    fn open(&self, root: &str) -> Result<Checkpoint, CliError> {
        let file = if root == UNET {
            UNET_FILE
        } else {
            TEXT_ENCODER_FILE
        };
        let folder = self.dir.join(format!("{root}{}", self.suffix));
        let path = if folder.join(file).is_file() {
            folder.join(file)
        } else {
            folder
        };
        Checkpoint::open(&path).map_err(CliError::failed)
    }
}

/// Refuses what contradicts how the checkpoint was trained: the noise schedule and what the model predicts, and for
/// held-out captions which those are.
fn check_trained(config: &Config, saved: &SavedCheckpoint) -> Result<(), CliError> {
    let trained = &saved.state().config;
    let all = config.to_json();
    let differ = |name: &str, then: &Value, now: &Value| {
        Err(CliError::Usage(format!(
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

/// Reads every weight of both programs and puts it on the devices.
fn load_weights(
    session: &Session,
    model: &DiffusionModel,
    options: &DenoiseOptions,
    source: &Source,
) -> Result<HashMap<String, Array>, CliError> {
    let encode = trace_encode(model, options.batch).map_err(CliError::usage)?;
    let (denoise, _) = trace_denoise(model, options).map_err(CliError::usage)?;
    let mut arrays = HashMap::new();
    for (root, graph) in [(TEXT_ENCODER, encode), (UNET, denoise)] {
        let checkpoint = source.open(root)?;
        let plan = crate::shard::ShardPlan::new(&graph, session.mesh(), session.rules())
            .map_err(CliError::usage)?;
        let expected: Vec<(String, Vec<usize>)> = graph
            .weights()
            .map(|(_, w)| (w.key().to_string(), w.shape.dims.clone()))
            .collect();
        match_parameters(&expected, &checkpoint).map_err(CliError::failed)?;
        for (index, input) in graph.weights() {
            let tensor = checkpoint
                .read_as(input.key(), input.shape.dtype)
                .map_err(CliError::failed)?;
            let spec: &PartitionSpec = &plan.inputs[index];
            let array = session.put(&tensor, spec).map_err(CliError::failed)?;
            arrays.insert(input.name.clone(), array);
        }
    }
    Ok(arrays)
}

struct Written {
    images: Vec<PathBuf>,
    grid: Option<PathBuf>,
}

fn write(
    config: &Config,
    out: &Path,
    prompts: &[Prompted],
    images: &[RgbImage],
) -> Result<Written, CliError> {
    let settings = |p: &Prompted, image: &RgbImage| GenerationSettings {
        prompt: p.prompt.clone(),
        negative_prompt: config.negative_prompt.clone(),
        seed: p.seed,
        steps: config.num_inference_steps as u32,
        guidance_scale: config.guidance_scale,
        scheduler: config.sampler().name().to_string(),
        config: config.run_name.clone(),
        width: image.width(),
        height: image.height(),
        ..GenerationSettings::default()
    };
    let paths = prompts
        .iter()
        .zip(images)
        .map(|(prompt, image)| write_numbered(out, "image", image, Some(&settings(prompt, image))))
        .collect::<Result<Vec<_>, _>>()
        .map_err(CliError::failed)?;
    let grid = match images {
        [] | [_] => None,
        [first, ..] => {
            let labels: Vec<String> = prompts.iter().map(|p| p.prompt.clone()).collect();
            let columns = (images.len() as f64).sqrt().ceil() as u32;
            let scale = visible_scale(first.width());
            let made = labelled_grid(images, &labels, columns, scale)
                .and_then(|grid| write_numbered(out, "grid", &grid, None));
            // The pictures are there; one sheet of all may be more than an image file can be.
            made.map_err(|e| super::tell(&format!("warning: no grid of all pictures: {e}")))
                .ok()
        }
    };
    Ok(Written {
        images: paths,
        grid,
    })
}
