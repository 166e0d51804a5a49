//! `generate`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use image::RgbImage;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Map, Value, json};

use crate::config::{Config, Loaded, Verb, is_image_option, is_read_with};
use crate::data::shapes::ReadScore;
use crate::pipelines::image_file::{
    GenerationSettings, Recorded, WebSampler, WebSettings, labelled_grid, prepare_output_dir,
    read_recorded, visible_scale, write_numbered,
};
use crate::pipelines::{BoxError, Event, Generated, ImageRequest, Pipeline};
use crate::recipe::{self, Generation};
use crate::runtime::ProgramCounts;
use crate::schedulers::SchedulerKind;

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

    /// Refuses sources of prompts that exclude each other.
    fn check_prompts(&self, config: &Config) -> Result<(), CliError> {
        if config.held_out_prompts > 0 && self.says("prompt") {
            return Err(CliError::Usage(
                "prompt has no effect with held_out_prompts, which draws captions of the dataset: give one of the two"
                    .to_string(),
            ));
        }
        if config.prompts_file.is_empty() {
            return Ok(());
        }
        for (key, is_given) in [
            ("prompt", self.says("prompt")),
            ("held_out_prompts", config.held_out_prompts > 0),
        ] {
            if is_given {
                return Err(CliError::Usage(format!(
                    "{key} has no effect with prompts_file={}, whose lines are the prompts: give one of the two",
                    config.prompts_file
                )));
            }
        }
        Ok(())
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
    args.check_prompts(&config)?;
    // After all that can be wrong with the words alone: this may download.
    let mut notify = notices();
    let Generation {
        options,
        request,
        model_name,
    } = recipe::generation(&config, &given, &args.recipe.config, &mut notify)?;

    let start = Instant::now();
    let opened = recipe::open_session(&config, &mut notify)?;
    super::progress(&format!("devices: {}", opened.chosen));
    let mut pipeline = Pipeline::open(opened.session, options)?;
    let opened = start.elapsed().as_secs_f64();
    let mut progress = GenerateProgress::new(&out);
    let made = pipeline.generate(&request, &mut |event| progress.show(event))?;
    progress.finish();
    let timing = Timing {
        open: opened + made.seconds.open,
        counts: pipeline.session().program_counts(),
        made: &made,
    };
    super::progress(&timing.line());
    let score = match config.held_out_prompts {
        0 => None,
        _ => {
            let prompts = request.images.iter().map(|image| image.prompt.as_str());
            let pairs = made.images.iter().zip(prompts);
            Some(ReadScore::of(pairs).map_err(CliError::failed)?)
        }
    };
    let base = &pipeline.options().base;
    let common = GenerationSettings {
        scheduler: base.model.scheduler.kind.class_name().to_string(),
        web_sampler: Some(WebSampler::of(&base.model.scheduler)),
        config: config.run_name.clone(),
        model: model_name,
        options: recorded,
        ..GenerationSettings::default()
    };
    let written = write(&out, &common, &request.images, &made.images)?;
    if args.json {
        let refiner = pipeline.options().refiner.as_ref();
        let report = json!({
            "images": written.images.iter().zip(&request.images).map(|(path, image)| json!({
                "path": path, "prompt": image.prompt, "seed": image.seed,
            })).collect::<Vec<_>>(),
            "grid": written.grid,
            "weights": base.files.path(),
            "refiner": refiner.map(|refiner| refiner.files.path()),
            "score": score,
            "seconds": timing.json(),
            "unet_runs": made.steps,
            "programs_compiled": timing.counts.compiled,
            "programs_from_cache": timing.counts.from_cache,
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

/// The seconds that everything took.
struct Timing<'a> {
    open: f64,
    counts: ProgramCounts,
    made: &'a Generated,
}

impl Timing<'_> {
    fn line(&self) -> String {
        let seconds = &self.made.seconds;
        let phases = &seconds.phases;
        format!(
            "seconds: {:.1} to open, {:.1} to compile ({} programs, {} from the cache; \
             {:.1} of them with nothing else to do), {:.1} to load weights, \
             {:.1} to encode, {:.1} to denoise ({:.2} a step), {:.1} to decode",
            self.open,
            seconds.compile,
            self.counts.compiled + self.counts.from_cache,
            self.counts.from_cache,
            seconds.compile_waited,
            phases.load,
            phases.encode,
            phases.denoise,
            phases.denoise / self.made.steps.max(1) as f64,
            phases.decode,
        )
    }

    fn json(&self) -> Value {
        let seconds = &self.made.seconds;
        json!({
            "open": self.open,
            "compile": seconds.compile,
            "compile_waited": seconds.compile_waited,
            "load": seconds.phases.load,
            "encode": seconds.phases.encode,
            "denoise": seconds.phases.denoise,
            "decode": seconds.phases.decode,
        })
    }
}

/// Shows how far the images are, and writes previews of them.
struct GenerateProgress<'a> {
    out: &'a Path,
    bar: ProgressBar,
}

impl GenerateProgress<'_> {
    fn new(out: &Path) -> GenerateProgress<'_> {
        GenerateProgress {
            out,
            bar: ProgressBar::hidden(),
        }
    }

    fn show(&mut self, event: Event<'_>) -> Result<(), BoxError> {
        match event {
            Event::Warning(text) => super::tell(&format!("warning: {text}")),
            Event::Lora {
                name,
                weights,
                scale,
            } => super::progress(&format!("LoRA {name}: {weights} weights, scale {scale}")),
            Event::Quantized { policy, decisions } => {
                super::progress(&recipe::quantization_summary(policy, decisions));
            }
            Event::Started { steps } => self.start(steps),
            Event::Step => self.bar.inc(1),
            Event::Preview {
                image,
                steps,
                preview,
            } => {
                let path = write_numbered(self.out, "preview", preview, None)?;
                self.bar.suspend(|| {
                    super::progress(&format!(
                        "image {} after {steps} steps: {}",
                        image + 1,
                        path.display()
                    ));
                });
            }
        }
        Ok(())
    }

    fn start(&mut self, steps: usize) {
        if !tracing::enabled!(tracing::Level::INFO) {
            return;
        }
        self.bar = ProgressBar::new(steps as u64);
        if let Ok(style) = ProgressStyle::with_template("{bar:30} step {pos}/{len}, {eta} left") {
            self.bar.set_style(style);
        }
    }

    fn finish(&self) {
        self.bar.finish_and_clear();
    }
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

/// The most memory this process has had, in bytes, where the system tells.
fn peak_host_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().trim_end_matches(" kB").parse().ok()?;
    Some(kibibytes * 1024)
}

/// The files that were written.
struct Written {
    images: Vec<PathBuf>,
    grid: Option<PathBuf>,
}

/// Writes the images with their settings, of which `common` has what they share, and a grid of several.
fn write(
    out: &Path,
    common: &GenerationSettings,
    requests: &[ImageRequest],
    images: &[RgbImage],
) -> Result<Written, CliError> {
    let settings = |request: &ImageRequest, image: &RgbImage| GenerationSettings {
        prompt: request.prompt.clone(),
        negative_prompt: request.negative_prompt.clone(),
        seed: request.seed,
        steps: request.steps as u32,
        guidance_scale: request.guidance_scale,
        width: image.width(),
        height: image.height(),
        ..common.clone()
    };
    let paths = requests
        .iter()
        .zip(images)
        .map(|(request, image)| {
            write_numbered(out, "image", image, Some(&settings(request, image)))
        })
        .collect::<Result<Vec<_>, _>>()
        .map_err(CliError::failed)?;
    let grid = match images {
        [] | [_] => None,
        [first, ..] => {
            let labels: Vec<String> = requests.iter().map(|r| r.prompt.clone()).collect();
            let columns = (images.len() as f64).sqrt().ceil() as u32;
            let scale = visible_scale(first.width());
            let made = labelled_grid(images, &labels, columns, scale)
                .and_then(|grid| write_numbered(out, "grid", &grid, None));
            // The images are there; one sheet of all may be more than an image file can be.
            made.map_err(|e| super::tell(&format!("warning: no grid of all images: {e}")))
                .ok()
        }
    };
    Ok(Written {
        images: paths,
        grid,
    })
}
