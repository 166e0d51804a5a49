//! `generate`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};

use crate::config::{Config, Given, Loaded, Verb};
use crate::data::shapes::ReadScore;
use crate::pipelines::image_file::{
    GenerationSettings, HiresSettings, WebSampler, check_output_dir, prepare_output_dir,
};
use crate::pipelines::{BoxError, Event, Generated, PassSteps, Phase, Pipeline};
use crate::recipe::{self, Generation, Notify, Overrides, Repeat};
use crate::runtime::ProgramCounts;

use super::doctor::try_load;
use super::images::ImageFiles;
use super::stop::end_on_signals;
use super::{CliError, RecipeArgs, notices, print, status};

/// `generate ...`
#[derive(Debug, Args)]
pub struct GenerateArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    #[command(flatten)]
    short: ShortForms,
    /// Print paths, seeds, seconds of each phase and memory as JSON
    #[arg(long)]
    json: bool,
    /// Repeat the image in this PNG file with the settings that this program or a web interface wrote into it; overrides on
    /// the command line take precedence
    #[arg(long, value_name = "PNG")]
    from_image: Option<PathBuf>,
}

/// Short forms of keys, as other programs have them.
#[derive(Debug, Args)]
struct ShortForms {
    /// Short for prompt=TEXT
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// Short for negative_prompt=TEXT
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    negative_prompt: Option<String>,
    /// Short for seed=NUMBER
    #[arg(short, long, value_name = "NUMBER", allow_hyphen_values = true)]
    seed: Option<String>,
    /// Short for num_inference_steps=NUMBER
    #[arg(long, value_name = "NUMBER")]
    steps: Option<String>,
    /// Short for guidance_scale=NUMBER
    #[arg(long, value_name = "NUMBER")]
    cfg: Option<String>,
    /// Short for width=WIDTH height=HEIGHT
    #[arg(long, value_name = "WIDTHxHEIGHT", value_parser = parse_size)]
    size: Option<[u64; 2]>,
    /// Short for output_dir=DIR
    #[arg(short, long, value_name = "DIR")]
    output_dir: Option<String>,
}

fn parse_size(text: &str) -> Result<[u64; 2], String> {
    let sides = text.split_once('x');
    let sides = sides.and_then(|(width, height)| Some([width.parse().ok()?, height.parse().ok()?]));
    sides.ok_or_else(|| "expected width and height in pixels, as in 768x512".to_owned())
}

impl ShortForms {
    /// The overrides that they stand for.
    fn overrides(&self) -> Vec<String> {
        let [width, height] = [0, 1].map(|side| self.size.map(|size| size[side].to_string()));
        [
            ("prompt", &self.prompt),
            ("negative_prompt", &self.negative_prompt),
            ("seed", &self.seed),
            ("num_inference_steps", &self.steps),
            ("guidance_scale", &self.cfg),
            ("width", &width),
            ("height", &height),
            ("output_dir", &self.output_dir),
        ]
        .into_iter()
        .filter_map(|(key, value)| Some(format!("{key}={}", value.as_ref()?)))
        .collect()
    }
}

impl GenerateArgs {
    /// The command line with the overrides that short forms stand for.
    fn recipe(&self) -> RecipeArgs {
        let mut recipe = self.recipe.clone();
        recipe.overrides.extend(self.short.overrides());
        recipe
    }

    /// The configuration; with `--from-image`, with the image's settings where the command line does not override them.
    fn load(&self, mut recipe: RecipeArgs, notify: &mut Notify<'_>) -> Result<Settled, CliError> {
        let given = recipe.overrides.clone();
        let repeat = match &self.from_image {
            None => None,
            Some(path) => Some(Repeat::read(path, Overrides(&given), notify)?),
        };
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
    let recipe = args.recipe();
    let Settled {
        config,
        given,
        options: recorded,
    } = args.load(recipe, &mut notify)?;
    let out = config.run_dir().join("images");
    check_output_dir(&out).map_err(CliError::failed)?;
    status::spin("opening the model");
    // After every check of the command line alone: this may download.
    let Generation {
        options,
        request,
        model_name,
    } = recipe::generation(&config, &given, &args.recipe.config, &mut notify)?;

    let start = Instant::now();
    status::spin("opening the devices");
    let opened = recipe::open_session(&config, &try_load, &mut notify)?;
    super::progress(&format!("devices: {}", opened.chosen));
    let mut pipeline = Pipeline::open(opened.session, options)?;
    let opened = start.elapsed().as_secs_f64();
    let base = &pipeline.options().base;
    let [height, width] = request.image_size.unwrap_or(base.model.image_size);
    let common = GenerationSettings {
        scheduler: base.model.scheduler.kind.class_name().to_string(),
        web_sampler: Some(WebSampler::of(&base.model.scheduler)),
        config: config.run_name.clone(),
        width: width as u32,
        height: height as u32,
        model: model_name,
        hires: request
            .hires
            .as_ref()
            .zip(config.hires_scale)
            .map(|(hires, scale)| HiresSettings {
                scale,
                strength: hires.strength,
                steps: hires.steps.map(|steps| steps as u32),
                upscaler: hires.upscaler,
            }),
        options: recorded,
        ..GenerationSettings::default()
    };
    prepare_output_dir(&out).map_err(CliError::failed)?;
    let files = ImageFiles::new(out, common, request.images.clone(), config.input_images());
    let at_stop = files.clone();
    end_on_signals(move || {
        status::clear();
        super::tell(&format!("stopped: {}", at_stop.end()));
    })?;
    let mut progress = GenerateProgress {
        files: &files,
        json: args.json,
        steps: StepTimes::default(),
    };
    let made = pipeline.generate(&request, &mut |event| progress.show(event));
    status::clear();
    let made = made.inspect_err(|_| super::tell(&files.summary()))?;
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
            let words = recipe::data::shape_words(&config)?;
            Some(ReadScore::of(pairs, &words).map_err(CliError::failed)?)
        }
    };
    let grid = match made.images.len() {
        0 | 1 => None,
        // The images are there; one sheet of all may be more than an image file can be.
        _ => files
            .write_grid(&made.images)
            .inspect_err(|e| super::tell(&format!("warning: no grid of all images: {e}")))
            .ok(),
    };
    if args.json {
        let options = pipeline.options();
        let report = json!({
            "images": files.reports(),
            "grid": grid,
            "weights": options.base.files.path(),
            "refiner": options.refiner.as_ref().map(|refiner| refiner.files.path()),
            "score": score,
            "seconds": timing.json(),
            "unet_runs": made.steps,
            "programs_compiled": timing.counts.compiled,
            "programs_from_cache": timing.counts.from_cache,
            "peak_host_bytes": peak_host_bytes(),
        });
        print(&report.to_string())?;
    } else {
        if let Some(grid) = &grid {
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

/// Shows how far the images are, and writes them.
struct GenerateProgress<'a> {
    files: &'a ImageFiles,
    json: bool,
    steps: StepTimes,
}

impl GenerateProgress<'_> {
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
            // Nothing is watched here.
            Event::Watched(_) | Event::Statistics(_) => {}
            Event::Phase(phase) => self.enter(phase),
            Event::Read { bytes } => status::advance(bytes),
            Event::Started { passes } => self.steps = StepTimes::new(passes),
            Event::Step => {
                status::advance(1);
                if let Some(left) = self.steps.step() {
                    status::set_left(left);
                }
            }
            Event::Sample { image, sample, .. } => self.files.keep_sample(image, sample),
            Event::Preview {
                image,
                steps,
                preview,
            } => {
                let path = self.files.write_preview(preview)?;
                super::progress(&format!(
                    "image {} after {steps} steps: {}",
                    image + 1,
                    path.display()
                ));
            }
            Event::Image { image, pixels } => {
                status::spin(&format!("saving {}", self.files.name(image)));
                let path = self.files.write(image, pixels)?;
                print(&match self.json {
                    true => self.files.report(image, &path).to_string(),
                    false => path.display().to_string(),
                })?;
            }
        }
        Ok(())
    }

    fn enter(&mut self, phase: Phase<'_>) {
        match phase {
            Phase::Open => status::spin("opening the model"),
            Phase::Compile { programs } => status::spin(&format!("compiling {programs}")),
            Phase::Read { part, bytes } => {
                status::count_bytes(&format!("reading {part}"), bytes);
            }
            Phase::Encode => status::spin("encoding"),
            Phase::Denoise => {
                self.steps.begin();
                status::count_steps("denoising", self.steps.done as u64, self.steps.all() as u64);
            }
            Phase::Upscale => status::spin("enlarging"),
            Phase::Decode { image } => {
                status::spin(&format!("decoding {}", self.files.name(image)));
            }
        }
    }
}

/// The time of denoising steps. The first one of a pass warms caches up, so it says nothing of the others.
#[derive(Default)]
struct StepTimes {
    passes: Vec<PassSteps>,
    done: usize,
    begun: Option<Instant>,
    /// Of all steps of the present pass but the first.
    spent: Duration,
    /// Seconds of a step for each place of its samples, once they are known.
    each: Option<f64>,
}

impl StepTimes {
    fn new(passes: &[PassSteps]) -> StepTimes {
        StepTimes {
            passes: passes.to_vec(),
            ..StepTimes::default()
        }
    }

    /// Steps of all passes.
    fn all(&self) -> usize {
        self.passes.iter().map(|pass| pass.steps).sum()
    }

    /// A step begins now.
    fn begin(&mut self) {
        self.begun = Some(Instant::now());
    }

    /// A step is done, and the next one begins. Gives the time that those left will take.
    fn step(&mut self) -> Option<Duration> {
        let took = self.begun.map(|begun| begun.elapsed()).unwrap_or_default();
        self.begin();
        self.took(took)
    }

    /// A step took so long.
    fn took(&mut self, took: Duration) -> Option<Duration> {
        self.done += 1;
        let mut until = 0;
        let mut left = 0;
        for pass in &self.passes {
            let from = until;
            until += pass.steps;
            left += until.saturating_sub(self.done.max(from)) * pass.places;
            if self.done == from + 1 {
                self.spent = Duration::ZERO;
            } else if (from + 1..=until).contains(&self.done) {
                self.spent += took;
                let measured = (self.done - from - 1) * pass.places;
                self.each = Some(self.spent.as_secs_f64() / measured.max(1) as f64);
            }
        }
        Some(Duration::from_secs_f64(self.each? * left as f64))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_counts_both_passes() {
        let passes = [(3, 100), (2, 400)].map(|(steps, places)| PassSteps { steps, places });
        let mut times = StepTimes::new(&passes);
        assert_eq!(times.all(), 5);
        let mut after = |seconds| {
            times
                .took(Duration::from_secs(seconds))
                .map(|left| left.as_secs())
        };
        // The first step of a pass is not counted.
        assert_eq!(after(9), None);
        assert_eq!(after(1), Some(1 + 2 * 4));
        assert_eq!(after(1), Some(2 * 4));
        assert_eq!(after(30), Some(4));
        assert_eq!(after(5), Some(0));
    }
}
