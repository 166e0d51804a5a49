//! `train`.

use std::ops::ControlFlow;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use clap::Args;
use serde_json::json;

use crate::config::{Loaded, Verb};
use crate::metrics::Progress;
use crate::recipe;
use crate::train::{Encoded, Outcome, TrainEvent, Trainer};

use super::doctor::try_load;
use super::{CliError, RecipeArgs, notices, print, progress, status};

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
    let Loaded { config, given, .. } = args.recipe.load_given(Verb::Train)?;
    let started = Instant::now();
    let mut notify = notices();
    recipe::class_pictures(
        &config,
        &given,
        &args.recipe.config,
        &try_load,
        &mut notify,
        &mut |done, total| match done == total {
            true => progress(&format!("{total} class pictures")),
            false => status::spin(&format!("drawing class pictures: {done} of {total}")),
        },
    )?;
    status::spin("reading the data");
    let training = recipe::training(&config, &given, &args.recipe.config, &mut notify)?;
    status::spin("opening the devices");
    let opened = recipe::open_session(&config, &try_load, &mut notify)?;
    progress(&format!("devices: {}", opened.chosen));
    let mut options = training.options(&opened.session, &mut notify)?;
    status::spin("tracing the training step");
    let stop = stop_on_signals()?;
    options.stop = Some(Arc::clone(&stop));
    let trainer = Trainer::new(opened.session, options)?;
    let mut shown = TrainProgress {
        log_period: config.log_period,
        steps: None,
    };
    let outcome = trainer.run(&mut |event| {
        shown.show(event);
        match stop.load(Ordering::Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    })?;
    drop(shown);
    let seconds = started.elapsed().as_secs_f64();
    let (checkpoint, code, what) = match &outcome {
        Outcome::Done { checkpoint } => (checkpoint, 0, "done"),
        Outcome::Stopped { checkpoint, .. } => (checkpoint, 143, "stopped"),
        Outcome::NothingToDo { checkpoint, step } => {
            print_nothing_to_do(args.json, checkpoint, *step, config.max_train_steps)?;
            return Ok(ExitCode::SUCCESS);
        }
    };
    if args.json {
        let report = json!({"outcome": what, "checkpoint": checkpoint, "seconds": seconds});
        print(&report.to_string())?;
    } else {
        print(&format!(
            "{what} after {seconds:.0} s; saved in {}",
            checkpoint.display()
        ))?;
    }
    Ok(ExitCode::from(code))
}

/// A flag that the first SIGINT or SIGTERM sets; the second ends the process at once.
fn stop_on_signals() -> Result<Arc<AtomicBool>, CliError> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(&stop))
            .map_err(CliError::failed)?;
        signal_hook::flag::register(signal, Arc::clone(&stop)).map_err(CliError::failed)?;
    }
    Ok(stop)
}

fn print_nothing_to_do(
    as_json: bool,
    checkpoint: &Path,
    step: u64,
    max_train_steps: u64,
) -> Result<(), CliError> {
    print(&match as_json {
        true => json!({"outcome": "nothing to do", "checkpoint": checkpoint, "seconds": 0.0})
            .to_string(),
        false => format!(
            "nothing to do: the newest checkpoint has {step} of {max_train_steps} steps; raise max_train_steps to \
             continue"
        ),
    })
}

/// Shows how much of the dataset is encoded.
fn show_encoding(what: Encoded, done: usize, total: usize) {
    let what = match what {
        Encoded::Images => "images",
        Encoded::Captions => "captions",
    };
    match done {
        done if done == total => progress(&format!("encoded {total} {what}")),
        0 => status::spin(&format!("encoding {total} {what}")),
        done => status::rename(&format!("encoding {what}: {done} of {total}")),
    }
}

/// Shows how far the run is.
struct TrainProgress {
    log_period: u64,
    /// From the first step on.
    steps: Option<Progress>,
}

impl TrainProgress {
    fn show(&mut self, event: TrainEvent<'_>) {
        match event {
            TrainEvent::Buckets(sizes) => {
                let sizes = sizes.iter().map(|([height, width], images)| {
                    format!("{width}x{height} ({images})")
                });
                let sizes: Vec<String> = sizes.collect();
                progress(&format!("{} buckets: {}", sizes.len(), sizes.join(", ")));
            }
            TrainEvent::Hashing => status::spin("comparing the data with what is encoded"),
            TrainEvent::Encoding { what, done, total } => show_encoding(what, done, total),
            TrainEvent::Quantized { policy, decisions } => {
                progress(&recipe::quantization_summary(policy, decisions));
            }
            TrainEvent::Traced {
                parameters,
                trained,
                batch,
                footprint,
            } => {
                let memory = footprint.describe();
                progress(&format!("memory of each device: {memory}"));
                let trained = match trained == parameters {
                    true => String::new(),
                    false => format!(", {trained} of them trained"),
                };
                progress(&format!(
                    "{parameters} parameters{trained}, {batch} samples a step; compiling"
                ));
                status::spin("compiling the training step");
            }
            TrainEvent::Compiled {
                seconds,
                from_cache,
            } => {
                let how = match from_cache {
                    true => "loaded from the cache",
                    false => "compiled",
                };
                progress(&format!("{how} in {seconds:.1} s"));
                status::spin("putting the initial state on the devices");
            }
            TrainEvent::Resumed { checkpoint } => {
                progress(&format!("continuing from {}", checkpoint.display()));
            }
            TrainEvent::Started { first, total } => {
                status::clear();
                let quiet = !tracing::enabled!(tracing::Level::INFO);
                self.steps = Some(Progress::new(total, first, self.log_period, quiet));
            }
            TrainEvent::Step(report) => self.with(|steps| steps.step(report)),
            TrainEvent::Skipped {
                step,
                loss,
                grad_norm,
                skipped,
            } => self.with(|steps| {
                steps.warn(&format!(
                    "step {step}: loss {loss} or gradient norm {grad_norm} is not finite; the update was skipped \
                     ({skipped} so far)"
                ));
            }),
            TrainEvent::Saving => self.with(|steps| steps.between("saving a checkpoint")),
            TrainEvent::Validating => self.with(|steps| steps.between("measuring the validation loss")),
            TrainEvent::Sampling => self.with(|steps| steps.between("drawing sample images")),
            TrainEvent::Saved { checkpoint } => {
                self.with(|steps| steps.message(&format!("saved {}", checkpoint.display())));
            }
            TrainEvent::Validated { step, loss } => {
                let of = |(from, loss): &(usize, f64)| format!("{loss:.4} from timestep {from}");
                let levels: Vec<String> = loss.levels.iter().map(of).collect();
                self.with(|steps| {
                    steps.message(&format!(
                        "step {step}: validation loss {:.4}: {}",
                        loss.mean,
                        levels.join(", ")
                    ));
                });
            }
            TrainEvent::Sampled { .. } => {}
        }
    }

    fn with(&mut self, show: impl FnOnce(&mut Progress)) {
        if let Some(steps) = &mut self.steps {
            show(steps);
        }
    }
}
