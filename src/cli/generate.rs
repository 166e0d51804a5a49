//! `generate`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::Instant;

use clap::Args;
use image::RgbImage;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Map, Value, json};

use crate::config::{Config, Loaded, Verb, is_image_option, is_read_with};
use crate::data::Tokenizer;
use crate::data::shapes::ReadScore;
use crate::dtype::DType;
use crate::host_tensor::HostTensor;
use crate::models::{DiffusionModel, MicroConditioning};
use crate::pipelines::Failure;
use crate::pipelines::conditioning::PromptEncoders;
use crate::pipelines::image_file::{
    GenerationSettings, Recorded, WebSampler, WebSettings, labelled_grid, prepare_output_dir,
    read_recorded, visible_scale, write_numbered,
};
use crate::pipelines::images::{
    DrawOptions, Drawer, Made, Picture, Pipeline, Previews, ShowPreview, Watcher, WeightSource,
};
use crate::pipelines::text_to_image::{DenoiseOptions, PipelineError};
use crate::pipelines::traced::Traced;
use crate::recipe::prompts::{self, Prompted};
use crate::recipe::source::{Drawn, Files, Source};
use crate::recipe::{self, RecipeError, hub, images as init_image, lora, scheduler as sampler};
use crate::runtime::{Array, Session, Slot};
use crate::schedulers::{SamplingPlan, SchedulerConfig, SchedulerKind};
use crate::weights::Checkpoint;
use crate::weights::lora::Adapter;

use super::{CliError, RecipeArgs, notices, print};

/// `generate ...`
#[derive(Debug, Args)]
pub struct GenerateArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Print paths, seeds, seconds of each phase and memory as JSON
    #[arg(long)]
    json: bool,
    /// Repeat the picture in this PNG file with the settings written into it, by this program or by a web interface; words on
    /// the command line go before them
    #[arg(long, value_name = "PNG")]
    from_image: Option<PathBuf>,
}

impl GenerateArgs {
    /// The configuration; with `--from-image`, changed by what the picture says as far as the command line does not say
    /// otherwise.
    fn load(&self) -> Result<Settled, CliError> {
        let Some(path) = &self.from_image else {
            let Loaded { config, given, .. } = self.recipe.load_given(Verb::Generate)?;
            let options = recorded_options(&self.recipe.overrides);
            return Ok(Settled {
                config,
                given,
                options,
            });
        };
        let settings = match read_recorded(path).map_err(CliError::usage)? {
            Recorded::Own(settings) => settings,
            Recorded::Web(read) => self.of_web_interface(path, read)?,
        };
        let mut recipe = self.recipe.clone();
        let sampler = self.said_sampler();
        // What only the picture's own sampler reads goes with it.
        let is_read = |key: &str| sampler.is_none_or(|sampler| is_read_with(key, sampler));
        let is_free = |key: &str| !self.says(key) && is_read(key);
        let numbers = [
            ("seed", settings.seed.to_string()),
            ("num_inference_steps", settings.steps.to_string()),
            ("guidance_scale", settings.guidance_scale.to_string()),
            (
                "scheduler",
                match sampler {
                    Some(_) => String::new(),
                    None => settings.scheduler.clone(),
                },
            ),
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
        Ok(Settled {
            config,
            given,
            options: recorded_options(&recipe.overrides),
        })
    }

    /// The settings of a picture that a web interface drew; tells of what is not taken over.
    fn of_web_interface(
        &self,
        path: &Path,
        read: WebSettings,
    ) -> Result<GenerationSettings, CliError> {
        if let (Some(name), None) = (read.unknown_sampler, self.said_sampler()) {
            return Err(CliError::Usage(format!(
                "{}: its sampler, {name}, is not here; give scheduler=, or take a picture with one of {}",
                path.display(),
                WebSettings::samplers()
            )));
        }
        super::tell(&format!(
            "note: {} was drawn by another program: its settings are taken over, but noise and steps differ, and so will the \
             picture",
            path.display()
        ));
        for unused in read.unused {
            super::tell(&format!("warning: not taken over: {unused}"));
        }
        Ok(read.settings)
    }

    /// The sampler that the command line gives.
    fn said_sampler(&self) -> Option<SchedulerKind> {
        let words = self.recipe.overrides.iter().rev();
        words
            .filter_map(|word| word.split_once('='))
            .find(|(key, _)| ["scheduler", "diffusion_scheduler_config._class_name"].contains(key))
            .and_then(|(_, name)| SchedulerKind::from_name(name))
    }

    /// Whether the command line gives `key`.
    fn says(&self, key: &str) -> bool {
        let words = self.recipe.overrides.iter();
        words
            .filter_map(|word| word.split_once('='))
            .any(|(said, _)| said == key)
    }
}

/// What `generate` is asked for.
struct Settled {
    config: Config,
    /// What the configuration says in so many words.
    given: Map<String, Value>,
    /// What is written into pictures, beside their own settings.
    options: BTreeMap<String, String>,
}

/// The overrides that are needed to make the images again, beside the settings that images have fields for.
fn recorded_options(words: &[String]) -> BTreeMap<String, String> {
    words
        .iter()
        .filter_map(|word| word.split_once('='))
        .filter(|(key, _)| is_image_option(key))
        .map(|(key, value)| (key.to_string(), value.to_string()))
        .collect()
}

/// One of the models that draw a picture, one after the other, with what it needs to.
struct Expert {
    drawn: Drawn,
    /// The pictures with their prompts as its text encoders take them.
    pictures: Vec<Picture>,
    /// Its part of the steps, for each number of steps that pictures have.
    plans: Vec<SamplingPlan>,
}

impl Expert {
    fn new(
        drawn: Drawn,
        pictures: Vec<Picture>,
        steps: &[usize],
        plan: impl Fn(&SchedulerConfig, usize) -> Result<SamplingPlan, RecipeError>,
    ) -> Result<Expert, CliError> {
        let plans = steps
            .iter()
            .map(|steps| plan(&drawn.model.scheduler, *steps));
        Ok(Expert {
            plans: plans.collect::<Result<_, _>>()?,
            drawn,
            pictures,
        })
    }
}

/// Refuses models that cannot go on with each other, and settings that no model here reads.
fn check_refining(
    config: &Config,
    given: &Map<String, Value>,
    source: &Source,
    drawn: &Drawn,
    refining: Option<&Drawn>,
) -> Result<(), CliError> {
    let models = [Some(drawn), refining].into_iter().flatten();
    let scored = models.map(|drawn| drawn.model.micro_conditioning);
    if !scored
        .into_iter()
        .any(|told| matches!(told, MicroConditioning::AestheticScore { .. }))
    {
        for key in ["aesthetic_score", "negative_aesthetic_score"] {
            if given.contains_key(key) {
                return Err(CliError::Usage(format!(
                    "{key} has no effect: {} is told sizes only; SDXL's refiner is told a score",
                    source.path().display()
                )));
            }
        }
    }
    let Some(refining) = refining else {
        return Ok(());
    };
    let dims = [drawn, refining].map(|drawn| drawn.model.sample_dims(1));
    if dims[0] != dims[1] {
        return Err(CliError::Usage(format!(
            "refiner_model_name_or_path={}: its latents are {:?}, and those of {} are {:?}",
            config.refiner_model_name_or_path,
            &dims[1][1..],
            source.path().display(),
            &dims[0][1..]
        )));
    }
    Ok(())
}

/// Takes the weights that [`read_weights`] reads.
type Show<'a> = dyn FnMut(Array) -> Result<(), Failure> + 'a;

/// Most pictures made at once.
const MAX_BATCH: usize = 8;

/// Runs `generate`.
///
/// # Errors
/// When the configuration is wrong, there are no weights, or a program fails.
pub fn run(args: &GenerateArgs) -> Result<ExitCode, CliError> {
    let Settled {
        config,
        given,
        options: recorded,
    } = args.load()?;
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
    let source = Source::find(&config, &args.recipe.config, &mut notices())?;
    let config = hub::with_paths(config, &mut notices())?;
    let drawn = source.drawn(&config, &given, &mut notices())?;
    let refiner = source.refiner(&config)?;
    let refining = match &refiner {
        Some(refiner) => {
            let mut drawn = refiner.drawn(&config, &given, &mut notices())?;
            // What steers is for the first model's part of the steps.
            drawn.model.controlnets.clear();
            Some(drawn)
        }
        None => None,
    };
    for drawn in [Some(&drawn), refining.as_ref()].into_iter().flatten() {
        sampler::check_sampler_keys(&config, &drawn.model.scheduler)?;
    }
    check_refining(&config, &given, &source, &drawn, refining.as_ref())?;
    let prompts = prompts::prompted(&config, &mut notices())?;
    let steps = prompts::step_counts(&prompts);
    // All tokenizers at once, so that the prompts of all models have as many chunks.
    let own = drawn.tokenizers.len();
    let all = drawn
        .tokenizers
        .iter()
        .chain(refining.iter().flat_map(|r| &r.tokenizers));
    let all: Vec<&Tokenizer> = all.collect();
    let mut pictures =
        prompts::pictures(&all, &prompts, &steps, config.prompt_syntax, &mut notices())
            .map_err(CliError::usage)?;
    let to_refine = prompts::split_off(&mut pictures, own);
    let name = source.path().display().to_string();
    let start_image = init_image::read(&config, &drawn.model, &name)?;
    let controls = init_image::read_controls(&config, &drawn.model)?;
    let latents = latents(&config, &drawn.model)?;
    let scheduler = drawn.model.scheduler.clone();

    let first = Expert::new(drawn, pictures, &steps, |scheduler, steps| {
        sampler::sampling_plan(&config, scheduler, steps)
    })?;
    let second = match refining {
        Some(drawn) => Some(Expert::new(
            drawn,
            to_refine,
            &steps,
            |scheduler, steps| sampler::refining_plan(&config, scheduler, steps),
        )?),
        None => None,
    };

    let start = Instant::now();
    let opened = recipe::open_session(&config, &mut notices())?;
    super::progress(&format!("devices: {}", opened.chosen));
    let session = opened.session;
    let devices = session.devices().len();
    let batch = prompts.len().min(MAX_BATCH).next_multiple_of(devices);
    let policy = recipe::policy(&config, 0)?;
    let trace = |expert: &Expert, from_image: bool| {
        let options = DenoiseOptions {
            batch,
            tokens: expert.drawn.model.tokens * prompts::chunks(&expert.pictures),
            guidance: recipe::guidance(&config),
            quantization: policy.clone(),
        };
        Traced::new(&expert.drawn.model, options, from_image).map_err(CliError::usage)
    };
    let traced = trace(&first, start_image.is_some())?;
    let (traced, to_refine) = match &second {
        None => (traced, None),
        Some(second) => (traced.handed_on(), Some(trace(second, false)?)),
    };
    // A checkpoint that does not fit is found before anything is compiled.
    let files = source.open_all(&config, &traced)?;
    let refiner_files = match (&refiner, &to_refine) {
        (Some(refiner), Some(traced)) => Some(refiner.open_all(&config, traced)?),
        _ => None,
    };
    let adapter = lora::adapter(&config, &traced, &mut notices())?;
    let traced = as_stored(traced, &files, adapter.as_ref())?;
    let to_refine = match (to_refine, &refiner_files) {
        (Some(traced), Some(files)) => Some(as_stored(traced, files, None)?),
        _ => None,
    };
    if let Some(policy) = &policy {
        for traced in [Some(&traced), to_refine.as_ref()].into_iter().flatten() {
            super::progress(&recipe::quantization_summary(policy, traced.decisions()));
        }
    }
    let opened = start.elapsed().as_secs_f64();
    let start = Instant::now();
    let precision = config.precision;
    let unshuffle = config.pixel_unshuffle as usize;
    let read = |slots: &[Slot], show: &mut Show<'_>| {
        read_weights(&session, &files, adapter.as_ref(), slots, show)
    };
    let weights = WeightSource::Files(&read);
    let encoders = PromptEncoders::compile(&session, &first.drawn.model, &traced, precision)
        .map_err(CliError::failed)?;
    let mut waited = start.elapsed().as_secs_f64();
    // Prompts are encoded meanwhile, which waits for weights most of the time. The threads are other ones than those
    // that read, which would wait for the compiler.
    let compiling = rayon::ThreadPoolBuilder::new()
        .build()
        .map_err(CliError::failed)?;
    let (encoded, encoded_at, compiled) = thread::scope(|scope| {
        let compiled = scope.spawn(|| {
            compiling.install(|| {
                let model = &first.drawn.model;
                let drawer = Drawer::compile(&session, model, &traced, precision, unshuffle)?;
                let refine = match (&second, &to_refine) {
                    (Some(second), Some(traced)) => {
                        let model = &second.drawn.model;
                        let pipeline =
                            Pipeline::compile(&session, model, traced, precision, unshuffle)?;
                        Some((second, pipeline))
                    }
                    _ => None,
                };
                Ok::<_, PipelineError>((drawer, refine, start.elapsed().as_secs_f64()))
            })
        });
        let encoded = encoders.run(&session, &weights, &first.pictures);
        (encoded, start.elapsed().as_secs_f64(), compiled.join())
    });
    let compiled = compiled.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    let (drawer, refine, compiled) = compiled.map_err(CliError::failed)?;
    let encoded = encoded.map_err(CliError::Failed)?;
    waited += (compiled - encoded_at).max(0.0);

    let mut runs = drawer.runs(&first.pictures, &first.plans);
    if let Some((second, pipeline)) = &refine {
        runs += pipeline.drawer().runs(&second.pictures, &second.plans);
    }
    let bar = match tracing::enabled!(tracing::Level::INFO) {
        true => ProgressBar::new(runs as u64),
        false => ProgressBar::hidden(),
    };
    if let Ok(style) = ProgressStyle::with_template("{bar:30} step {pos}/{len}, {eta} left") {
        bar.set_style(style);
    }
    let draw = DrawOptions {
        plans: &first.plans,
        guidance_rescale: config.guidance_rescale as f32,
        zero_empty_prompts: first.drawn.zero_empty_prompts,
        image: start_image.as_ref().map(|start| &start.image),
        mask: start_image.as_ref().and_then(|start| start.mask.as_ref()),
        controls: &controls,
        latents: latents.as_ref(),
        continues: None,
    };
    let mut preview = |picture: usize, steps: usize, image: &RgbImage| {
        let path = write_numbered(&out, "preview", image, None)?;
        bar.suspend(|| {
            super::progress(&format!(
                "picture {} after {steps} steps: {}",
                picture + 1,
                path.display()
            ));
        });
        Ok(())
    };
    let mut step = || bar.inc(1);
    let mut made = drawer
        .run(
            &session,
            &weights,
            &first.pictures,
            encoded,
            &draw,
            Watcher {
                step: &mut step,
                previews: previews(&config, &mut preview),
            },
        )
        .map_err(CliError::Failed)?;
    if let (Some((second, pipeline)), Some(files)) = (&refine, &refiner_files) {
        let draw = DrawOptions {
            plans: &second.plans,
            zero_empty_prompts: second.drawn.zero_empty_prompts,
            image: None,
            controls: &[],
            latents: None,
            continues: Some(&made),
            ..draw
        };
        // LoRAs are for the first model.
        let read =
            |slots: &[Slot], show: &mut Show<'_>| read_weights(&session, files, None, slots, show);
        let weights = WeightSource::Files(&read);
        let refined = pipeline
            .run(
                &session,
                &weights,
                &second.pictures,
                &draw,
                Watcher {
                    step: &mut step,
                    previews: previews(&config, &mut preview),
                },
            )
            .map_err(CliError::Failed)?;
        let before = made.phases;
        made = refined;
        made.phases += before;
    }
    let Made { images, phases, .. } = made;
    bar.finish_and_clear();
    let counts = session.program_counts();
    super::progress(&format!(
        "seconds: {opened:.1} to open, {compiled:.1} to compile ({} programs, {} from the cache; \
         {waited:.1} of them with nothing else to do), {:.1} to load weights, \
         {:.1} to encode, {:.1} to denoise ({:.2} a step), {:.1} to decode",
        counts.compiled + counts.from_cache,
        counts.from_cache,
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
        &config, &source, &scheduler, &recorded, &out, &prompts, &images,
    )?;
    if args.json {
        let report = json!({
            "images": written.images.iter().zip(&prompts).map(|(path, p)| json!({
                "path": path, "prompt": p.prompt, "seed": p.seed,
            })).collect::<Vec<_>>(),
            "grid": written.grid,
            "weights": source.path(),
            "refiner": refiner.as_ref().map(Source::path),
            "score": score,
            "seconds": {
                "open": opened,
                "compile": compiled,
                "compile_waited": waited,
                "load": phases.load,
                "encode": phases.encode,
                "denoise": phases.denoise,
                "decode": phases.decode,
            },
            "unet_runs": runs,
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

/// The previews that the configuration asks for, which `show` takes.
fn previews<'a>(config: &Config, show: &'a mut ShowPreview<'a>) -> Option<Previews<'a>> {
    let every = config.preview_steps as usize;
    (every > 0).then_some(Previews { every, show })
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

/// A weight's part of the model and its key there.
fn root_and_key(name: &str) -> (&str, &str) {
    name.split_once('/').unwrap_or(("", name))
}

/// The programs for weights as they are in `files`, but for those that LoRAs are merged into.
fn as_stored(
    traced: Traced,
    files: &Files<'_>,
    adapter: Option<&Adapter>,
) -> Result<Traced, CliError> {
    let stored = |name: &str| {
        let (root, key) = root_and_key(name);
        let is_changed = adapter.is_some_and(|adapter| adapter.changes(root, key));
        let shape = files.get(root)?.info(key).filter(|_| !is_changed);
        shape.map(|shape| shape.dtype)
    };
    traced
        .with_stored_weights(&stored)
        .map_err(CliError::failed)
}

/// Reads the weights `slots` while those before them are put on the devices, with the LoRAs' updates, and shows them.
fn read_weights(
    session: &Session,
    files: &Files<'_>,
    adapter: Option<&Adapter>,
    slots: &[Slot],
    show: &mut Show<'_>,
) -> Result<(), Failure> {
    fn root(slot: &Slot) -> &str {
        root_and_key(&slot.name).0
    }
    for slots in slots.chunk_by(|a, b| root(a) == root(b)) {
        let root = root(&slots[0]);
        let checkpoint = files
            .get(root)
            .ok_or_else(|| format!("no file has the weights of {root}"))?;
        let wanted: Vec<(&str, DType)> = slots
            .iter()
            .map(|slot| (root_and_key(&slot.name).1, slot.shape.dtype))
            .collect();
        let mut specs = slots.iter().map(|slot| &slot.spec);
        checkpoint.read_all_with(&wanted, |key, tensor| {
            if let Some(adapter) = adapter {
                let data = std::mem::take(&mut tensor.data);
                let given = HostTensor::new(tensor.shape.clone(), data)?;
                *tensor = adapter.apply(root, key, given)?;
            }
            let spec = specs.next().ok_or("more tensors than were asked for")?;
            show(session.put(tensor, spec)?)
        })?;
    }
    Ok(())
}

struct Written {
    images: Vec<PathBuf>,
    grid: Option<PathBuf>,
}

fn write(
    config: &Config,
    source: &Source,
    scheduler: &SchedulerConfig,
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
        scheduler: scheduler.kind.class_name().to_string(),
        web_sampler: Some(WebSampler::of(scheduler)),
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
