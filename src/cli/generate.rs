//! `generate`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use image::RgbImage;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};

use crate::config::{Config, Given, Loaded, Verb};
use crate::data::shapes::ReadScore;
use crate::pipelines::image_file::{
    GenerationSettings, WebSampler, labelled_grid, prepare_output_dir, visible_scale,
    write_numbered,
};
use crate::pipelines::{BoxError, Event, Generated, ImageRequest, Pipeline};
use crate::recipe::{self, Generation, Notify, Overrides, Repeat};
use crate::runtime::ProgramCounts;

use super::{CliError, RecipeArgs, notices, print};

/// `generate ...`
#[derive(Debug, Args)]
pub struct GenerateArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Print paths, seeds, seconds of each phase and memory as JSON
    #[arg(long)]
    json: bool,
    /// Repeat the image in this PNG file with the settings that this program or a web interface wrote into it; overrides on
    /// the command line take precedence
    #[arg(long, value_name = "PNG")]
    from_image: Option<PathBuf>,
}

impl GenerateArgs {
    /// The configuration; with `--from-image`, with the image's settings where the command line does not override them.
    fn load(&self, notify: &mut Notify<'_>) -> Result<Settled, CliError> {
        let repeat = match &self.from_image {
            None => None,
            Some(path) => Some(Repeat::read(path, self.overrides(), notify)?),
        };
        let mut recipe = self.recipe.clone();
        if let Some(repeat) = &repeat {
            recipe.overrides = repeat.overrides();
        }
        let Loaded {
            mut config, given, ..
        } = recipe.load_given(Verb::Generate)?;
        if let Some(repeat) = repeat {
            repeat.apply(&mut config);
        }
        Ok(Settled {
            config,
            given,
            options: Overrides(&recipe.overrides).recorded(),
        })
    }

    fn overrides(&self) -> Overrides<'_> {
        Overrides(&self.recipe.overrides)
    }

    /// Refuses sources of prompts that exclude each other.
    fn check_prompts(&self, config: &Config) -> Result<(), CliError> {
        if config.held_out_prompts > 0 && self.overrides().give("prompt") {
            return Err(CliError::Usage(
                "prompt has no effect with held_out_prompts, which draws captions of the dataset: give one of the two"
                    .to_string(),
            ));
        }
        if config.prompts_file.is_empty() {
            return Ok(());
        }
        for (key, is_given) in [
            ("prompt", self.overrides().give("prompt")),
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
}

/// The configuration of this call.
struct Settled {
    config: Config,
    /// The keys that the configuration or the command line gives explicitly.
    given: Given,
    /// The options that are written into each image beside its own settings.
    options: BTreeMap<String, String>,
}

/// Runs `generate`.
///
/// # Errors
/// When the configuration is wrong, there are no weights, or a program fails.
pub fn run(args: &GenerateArgs) -> Result<ExitCode, CliError> {
    let mut notify = notices();
    let Settled {
        config,
        given,
        options: recorded,
    } = args.load(&mut notify)?;
    let out = config.run_dir().join("images");
    prepare_output_dir(&out).map_err(CliError::failed)?;
    args.check_prompts(&config)?;
    // After every check of the command line alone: this may download.
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
             {:.1} of them waited for), {:.1} to load weights, \
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

/// The score of the fixed reader, in one line.
fn score_line(score: &ReadScore) -> String {
    let share = |right: usize| format!("{:.1} %", 100.0 * score.fraction(right));
    format!(
        "read back from {} images: colours and shapes right in {}; background {}, colours {}, shapes {}, sizes too {}, \
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
