//! `generate`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use image::RgbImage;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Map, Value, json};

use crate::config::{Config, Loaded, Verb};
use crate::data::shapes::ReadScore;
use crate::dtype::DType;
use crate::host_tensor::HostTensor;
use crate::pipelines::image_file::{
    GenerationSettings, labelled_grid, prepare_output_dir, read_settings, visible_scale,
    write_numbered,
};
use crate::pipelines::images::{DrawOptions, Failure, Made, Pipeline, Traced, WeightSource};
use crate::pipelines::model::DiffusionModel;
use crate::pipelines::text_to_image::DenoiseOptions;
use crate::runtime::{Array, Session, Slot};
use crate::weights::Checkpoint;
use crate::weights::lora::Adapter;

use super::model::{Drawn, Files, Source};
use super::prompts::{self, Prompted};
use super::{CliError, RecipeArgs, hub, init_image, lora, print, recipe};

/// `generate ...`
#[derive(Debug, Args)]
pub struct GenerateArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Print paths, seeds, seconds of each phase and memory as JSON
    #[arg(long)]
    json: bool,
    /// Repeat the picture in this PNG file with the settings written into it; words on the command line go before them
    #[arg(long, value_name = "PNG")]
    from_image: Option<PathBuf>,
}

/// What [`GenerationSettings`] has fields of its own for, and what says nothing of the picture.
const NOT_OPTIONS: [&str; 19] = [
    "prompt",
    "prompts_file",
    "held_out_prompts",
    "num_images_per_prompt",
    "negative_prompt",
    "seed",
    "num_inference_steps",
    "guidance_scale",
    "scheduler",
    "width",
    "height",
    "run_name",
    "output_dir",
    "hardware",
    "num_devices",
    "jax_cache_dir",
    "hf_access_token",
    "pretrained_model_name_or_path",
    "revision",
];

impl GenerateArgs {
    /// The configuration; with `--from-image`, changed by what the picture says as far as the command line does not say
    /// otherwise.
    fn load(&self) -> Result<(Config, Map<String, Value>), CliError> {
        let Some(path) = &self.from_image else {
            let Loaded { config, given, .. } = self.recipe.load_given(Verb::Generate)?;
            return Ok((config, given));
        };
        let settings = read_settings(path).map_err(CliError::usage)?;
        let mut recipe = self.recipe.clone();
        let is_free = |key: &str| !self.says(key);
        let numbers = [
            ("seed", settings.seed.to_string()),
            ("num_inference_steps", settings.steps.to_string()),
            ("guidance_scale", settings.guidance_scale.to_string()),
            ("scheduler", settings.scheduler.clone()),
        ];
        let options = settings
            .options
            .iter()
            .map(|(k, v)| (k.as_str(), v.clone()));
        let mut words: Vec<String> = options
            .chain(numbers)
            .filter(|(key, value)| is_free(key) && !value.is_empty())
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        words.append(&mut recipe.overrides);
        recipe.overrides = words;
        let Loaded {
            mut config,
            mut given,
            ..
        } = recipe.load_given(Verb::Generate)?;
        if is_free("prompt") && is_free("prompts_file") {
            config.prompt.0 = vec![settings.prompt.clone()];
            given.insert("prompt".to_string(), settings.prompt.into());
        }
        if is_free("negative_prompt") {
            config.negative_prompt = settings.negative_prompt;
        }
        // The size of a model of pixels is its own.
        if config.pixel_unshuffle == 1 && is_free("height") && is_free("width") {
            config.height = u64::from(settings.height);
            config.width = u64::from(settings.width);
        }
        Ok((config, given))
    }

    /// Whether the command line gives `key`.
    fn says(&self, key: &str) -> bool {
        let words = self.recipe.overrides.iter();
        words
            .filter_map(|word| word.split_once('='))
            .any(|(said, _)| said == key)
    }

    /// What of the command line is needed to make the pictures again, beside their own settings.
    fn options(&self) -> BTreeMap<String, String> {
        self.recipe
            .overrides
            .iter()
            .filter_map(|word| word.split_once('='))
            .filter(|(key, _)| !NOT_OPTIONS.contains(key))
            .map(|(key, value)| (key.to_string(), value.to_string()))
            .collect()
    }
}

/// Most pictures made at once.
const MAX_BATCH: usize = 8;

/// Runs `generate`.
///
/// # Errors
/// When the configuration is wrong, there are no weights, or a program fails.
pub fn run(args: &GenerateArgs) -> Result<ExitCode, CliError> {
    let (config, given) = args.load()?;
    let out = config.run_dir().join("images");
    prepare_output_dir(&out).map_err(CliError::failed)?;
    if config.held_out_prompts > 0 && args.says("prompt") {
        return Err(CliError::Usage(
            "prompt has no effect with held_out_prompts, which draws captions of the dataset: give one of the two"
                .to_string(),
        ));
    }
    if !config.prompts_file.is_empty() {
        for (key, is_given) in [
            ("prompt", args.says("prompt")),
            ("held_out_prompts", config.held_out_prompts > 0),
        ] {
            if is_given {
                return Err(CliError::Usage(format!(
                    "{key} has no effect with prompts_file={}, whose lines are the prompts: give one of the two",
                    config.prompts_file
                )));
            }
        }
    }
    // After all that can be wrong with the words alone: this may download.
    let source = Source::find(&config, &args.recipe.config)?;
    let config = hub::with_paths(config)?;
    let Drawn {
        model,
        tokenizers,
        zero_empty_prompts,
    } = source.drawn(&config, &given)?;
    let prompts = prompts::prompted(&config)?;
    let steps = prompts::step_counts(&prompts);
    let plans = steps
        .iter()
        .map(|steps| recipe::sampling_plan(&config, &model.scheduler, *steps))
        .collect::<Result<Vec<_>, _>>()?;
    let pictures = prompts::pictures(&tokenizers, &prompts, &steps, prompts::syntax(&config))
        .map_err(CliError::usage)?;
    let latents = latents(&config, &model)?;
    let start_image = init_image::read(&config, &model)?;
    let control = init_image::read_control(&config, &model)?;

    let start = Instant::now();
    let opened = recipe::open_session(&config)?;
    super::progress(&format!("devices: {}", opened.chosen));
    let session = opened.session;
    let devices = session.devices().len();
    let batch = prompts.len().min(MAX_BATCH).next_multiple_of(devices);
    let options = DenoiseOptions {
        batch,
        tokens: model.tokens * prompts::chunks(&pictures),
        guidance: config.do_classifier_free_guidance,
        quantization: recipe::policy(&config, 0)?,
    };
    let policy = options.quantization.clone();
    let traced = Traced::new(&model, options, start_image.is_some()).map_err(CliError::usage)?;
    // A checkpoint that does not fit is found before anything is compiled.
    let files = source.open_all(&config, &traced)?;
    let adapter = lora::adapter(&config, &traced)?;
    if let Some(policy) = &policy {
        super::progress(&recipe::quantization_summary(policy, &traced.decisions));
    }
    let opened = start.elapsed().as_secs_f64();
    let start = Instant::now();
    let pipeline = Pipeline::compile(
        &session,
        &model,
        &traced,
        recipe::dot_precision(&config),
        config.pixel_unshuffle as usize,
    )
    .map_err(CliError::failed)?;
    let compiled = start.elapsed().as_secs_f64();

    let runs = pipeline.runs(&pictures, &plans);
    let bar = match tracing::enabled!(tracing::Level::INFO) {
        true => ProgressBar::new(runs as u64),
        false => ProgressBar::hidden(),
    };
    if let Ok(style) = ProgressStyle::with_template("{bar:30} step {pos}/{len}, {eta} left") {
        bar.set_style(style);
    }
    let draw = DrawOptions {
        plans: &plans,
        guidance_rescale: config.guidance_rescale as f32,
        zero_empty_prompts,
        image: start_image.as_ref().map(|start| &start.image),
        mask: start_image.as_ref().and_then(|start| start.mask.as_ref()),
        control: control.as_ref(),
        latents: latents.as_ref(),
    };
    let Made { images, phases, .. } = pipeline
        .run(
            &session,
            &WeightSource::Files(&|slot| read_weight(&session, &files, adapter.as_ref(), slot)),
            &pictures,
            &draw,
            &mut || bar.inc(1),
        )
        .map_err(CliError::Failed)?;
    bar.finish_and_clear();
    let timings = pipeline.timings();
    let counts = session.program_counts();
    super::progress(&format!(
        "seconds: {opened:.1} to open, {compiled:.1} to compile ({} programs, {} from the cache), {:.1} to load weights, \
         {:.1} to encode, {:.1} to denoise ({:.2} a step), {:.1} to decode",
        timings.programs,
        timings.from_cache,
        phases.load,
        phases.encode,
        phases.denoise,
        phases.denoise / runs.max(1) as f64,
        phases.decode,
    ));
    let score = match config.held_out_prompts {
        0 => None,
        _ => {
            let pairs = images.iter().zip(prompts.iter().map(|p| p.prompt.as_str()));
            Some(ReadScore::of(pairs).map_err(CliError::failed)?)
        }
    };
    let written = write(
        &config,
        &source,
        model.scheduler.kind.name(),
        &args.options(),
        &out,
        &prompts,
        &images,
    )?;
    if args.json {
        let report = json!({
            "images": written.images.iter().zip(&prompts).map(|(path, p)| json!({
                "path": path, "prompt": p.prompt, "seed": p.seed,
            })).collect::<Vec<_>>(),
            "grid": written.grid,
            "weights": source.path(),
            "score": score,
            "seconds": {
                "open": opened,
                "compile": compiled,
                "load": phases.load,
                "encode": phases.encode,
                "denoise": phases.denoise,
                "decode": phases.decode,
            },
            "unet_runs": runs,
            "programs": timings.programs,
            // Of the whole process: a program that were compiled while pictures are made would be among them.
            "programs_compiled": counts.compiled,
            "programs_from_cache": counts.from_cache,
            "peak_host_bytes": peak_host_bytes(),
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

/// The noise that the configuration gives to start from.
fn latents(config: &Config, model: &DiffusionModel) -> Result<Option<HostTensor>, CliError> {
    if config.latents.is_empty() {
        return Ok(None);
    }
    let file = Checkpoint::open(Path::new(&config.latents)).map_err(CliError::failed)?;
    let latents = file
        .read_as("latents", DType::F32)
        .map_err(CliError::failed)?;
    let expected = &model.sample_dims(1)[1..];
    if latents.shape.rank() != 4 || latents.shape.dims[1..] != *expected {
        return Err(CliError::Usage(format!(
            "latents={}: its tensor latents is {}; expected [pictures, {}, {}, {}]",
            config.latents, latents.shape, expected[0], expected[1], expected[2]
        )));
    }
    Ok(Some(latents))
}

/// The most memory this process has had, in bytes, where the system tells.
fn peak_host_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().trim_end_matches(" kB").parse().ok()?;
    Some(kibibytes * 1024)
}

/// Reads one weight and puts it on the devices.
fn read_weight(
    session: &Session,
    files: &Files<'_>,
    adapter: Option<&Adapter>,
    slot: &Slot,
) -> Result<Array, Failure> {
    let (root, key) = slot.name.split_once('/').unwrap_or(("", &slot.name));
    let checkpoint = files
        .get(root)
        .ok_or_else(|| format!("no file has the weights of {root}"))?;
    let mut tensor = checkpoint.read_as(key, slot.shape.dtype)?;
    if let Some(adapter) = adapter {
        tensor = adapter.apply(root, key, tensor)?;
    }
    Ok(session.put(&tensor, &slot.spec)?)
}

struct Written {
    images: Vec<PathBuf>,
    grid: Option<PathBuf>,
}

fn write(
    config: &Config,
    source: &Source,
    sampler: &str,
    options: &BTreeMap<String, String>,
    out: &Path,
    prompts: &[Prompted],
    images: &[RgbImage],
) -> Result<Written, CliError> {
    let model = source.name();
    let settings = |p: &Prompted, image: &RgbImage| GenerationSettings {
        prompt: p.prompt.clone(),
        negative_prompt: p.negative_prompt.clone(),
        seed: p.seed,
        steps: p.steps as u32,
        guidance_scale: p.guidance_scale,
        scheduler: sampler.to_string(),
        config: config.run_name.clone(),
        width: image.width(),
        height: image.height(),
        model: model.clone(),
        model_hash: None,
        options: options.clone(),
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
