//! The verbs of the command line.
//!
//! Exit codes: 0 done, 1 failed, 2 usage or configuration, 143 stopped by a signal after saving.

mod compile;
mod completions;
mod config;
mod convert;
mod doctor;
mod evaluate;
mod generate;
mod help;
mod images;
mod kernel;
mod lower;
mod man;
mod module;
mod notice;
mod plugin;
mod quantize;
mod status;
mod stop;
mod train;

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, CommandFactory, Parser, Subcommand};
use tracing_subscriber::EnvFilter;

use crate::aot::AotError;
use crate::config::{Config, ConfigErrors, Loaded, Verb, meant, names};
use crate::kernels::KernelError;
use crate::pipelines::PipelineError;
use crate::pipelines::submodule::SubmoduleError;
use crate::recipe::{RecipeError, Step};
use crate::train::TrainError;
use crate::util::files::{self, Existing, check_writable, parent_of};

use notice::notices;

#[derive(Parser)]
#[command(name = "maxdiff-rs", version, about, max_term_width = 120, after_long_help = help::PROGRAM)]
struct Cli {
    /// Write no progress, only warnings and errors
    #[arg(long, short, global = true)]
    quiet: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Compile a program ahead of time, for a topology or the devices here, and report its costs
    ///
    /// Reads a configuration; needs no weights, and for a topology no such device. Writes a bundle of the compiled program,
    /// and a report of its memory, flops, traffic between devices and slices, and (for TPUs) predicted step time.
    #[command(after_long_help = help::COMPILE)]
    Compile(compile::CompileArgs),
    /// Explain keys of the configuration, or check a configuration file
    Config(config::ConfigArgs),
    /// Write a program as StableHLO text, from shapes alone
    ///
    /// Reads a configuration; needs no weights, devices or plugins. Writes the text of the denoising or of the training step, for
    /// one device or, with compile_topology, for a topology.
    #[command(after_long_help = help::LOWER)]
    Lower(lower::LowerArgs),
    /// Generate images from prompts
    ///
    /// Reads a configuration, and the weights of its run's newest checkpoint or of the model that
    /// pretrained_model_name_or_path names: a folder, a .safetensors file, or a repository on the Hugging Face hub, which is
    /// downloaded once. Writes PNG files with their settings inside, and a labelled grid if there are several, under new
    /// numbers in output_dir/run_name/images.
    #[command(after_long_help = help::GENERATE)]
    Generate(generate::GenerateArgs),
    /// Train a model
    ///
    /// Reads a configuration and its dataset. Writes checkpoints, metrics and grids of samples to output_dir/run_name, and
    /// continues from the last checkpoint there when it is started again.
    #[command(after_long_help = help::TRAIN)]
    Train(train::TrainArgs),
    /// Run one part of a model on saved tensors
    Module(module::ModuleArgs),
    /// List, check and time this program's kernels, one layer at a time
    Kernel(kernel::KernelArgs),
    /// Convert a model of any layout to a diffusers folder
    ///
    /// Reads a single .safetensors file with the names of the original code, a folder with one, a diffusers folder or a
    /// repository on the hub: Stable Diffusion 1.x and 2.x, SDXL and its refiner. Writes each part with its config.json, the
    /// scheduler's configuration and the tokenizers. The folder appears when it is complete; an error leaves none.
    #[command(after_long_help = help::CONVERT)]
    Convert(convert::ConvertArgs),
    /// Quantize a model's weights, from file to file
    ///
    /// Reads a configuration and the model that pretrained_model_name_or_path names: a diffusers folder, a .safetensors file, or
    /// a repository on the Hugging Face hub. Writes a diffusers folder whose UNet has integers with scales beside them, which
    /// `generate`, `compile` and `module run` take as it is. The folder appears when it is complete; an error leaves none.
    #[command(after_long_help = help::QUANTIZE)]
    Quantize(quantize::QuantizeArgs),
    /// Compare the pictures of runs with those of a reference
    ///
    /// Reads folders that `generate` wrote, of the same prompts and seeds, and tells how far each run is from the first one:
    /// PSNR, SSIM, the drift of the samples where both saved them, and for prompts of `shapes` how many pictures are right; with
    /// the weights of networks also CLIP score, LPIPS, FID and Inception score.
    #[command(after_long_help = help::EVALUATE)]
    Evaluate(evaluate::EvaluateArgs),
    /// Install PJRT plugins, or list those that are installed
    Plugin(plugin::PluginArgs),
    /// Check what is installed, and say what is wrong and how to fix it
    ///
    /// Loads every installed plugin in a process of its own, and checks the devices, the processor, the tools that
    /// `plugin install` needs, and the plugin folder.
    #[command(after_long_help = help::DOCTOR)]
    Doctor(doctor::DoctorArgs),
    /// Write a shell's completion script
    ///
    /// Writes the script to standard output. It completes verbs, options, files, configuration keys and their values.
    #[command(after_long_help = help::COMPLETIONS)]
    Completions(completions::CompletionsArgs),
    /// Write man pages
    ///
    /// Writes a page for the program and one for each verb.
    #[command(after_long_help = help::MAN)]
    Man(man::ManArgs),
}

/// `CONFIG.yml key=value ...`: what every verb that works on a model takes.
#[derive(Clone, Debug, Args)]
pub struct RecipeArgs {
    /// Configuration file, or the name of a recipe inside the program; `maxdiff-rs config show` lists them
    #[arg(value_name = "CONFIG.yml", add = completions::recipes())]
    pub config: PathBuf,
    /// Keys to change; `maxdiff-rs config explain` lists them
    #[arg(value_name = "KEY=VALUE", add = completions::overrides())]
    pub overrides: Vec<String>,
}

impl RecipeArgs {
    /// Loads the configuration for `verb` and writes its warnings to standard error.
    ///
    /// # Errors
    /// [`CliError::Config`] with every problem.
    pub fn load(&self, verb: Verb) -> Result<Config, CliError> {
        Ok(self.load_given(verb)?.config)
    }

    /// As [`RecipeArgs::load`], also with the keys that were given explicitly.
    ///
    /// # Errors
    /// [`CliError::Config`] with all that is wrong.
    pub fn load_given(&self, verb: Verb) -> Result<Loaded, CliError> {
        self.check_order(verb)?;
        let loaded = Config::load(&self.config, &self.overrides, Some(verb))?;
        for warning in &loaded.warnings {
            tell(&format!("warning: {warning}"));
        }
        Ok(loaded)
    }

    /// Refuses `KEY=VALUE` in the place of the configuration file.
    fn check_order(&self, verb: Verb) -> Result<(), CliError> {
        let first = self.config.display().to_string();
        if !first.contains('=') || self.config.exists() {
            return Ok(());
        }
        let file = self.overrides.iter().find(|word| !word.contains('='));
        let file = file.map_or("CONFIG.yml", String::as_str);
        Err(CliError::Usage(format!(
            "'{first}' stands in the place of the configuration file; write `maxdiff-rs {verb} {file} {first} ...`"
        )))
    }

    /// As [`RecipeArgs::load`], for one of the programs that the verb can make.
    ///
    /// # Errors
    /// [`CliError::Config`] with all that is wrong.
    pub fn load_step(&self, verb: Verb, step: Step) -> Result<Config, CliError> {
        let config = self.load(verb)?;
        Config::check_step(&self.overrides, verb, step == Step::Train)?;
        Ok(config)
    }
}

/// Why a verb failed.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The command line asks for something that does not exist.
    #[error("{0}")]
    Usage(String),
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigErrors),
    /// The verb failed; causes are shown one below the other.
    #[error(transparent)]
    Failed(Box<dyn std::error::Error + Send + Sync>),
}

impl CliError {
    /// Wraps the error of a part of the library.
    pub fn failed(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        CliError::Failed(error.into())
    }

    /// Wraps an error of the configuration or the arguments.
    pub fn usage(error: impl std::fmt::Display) -> Self {
        CliError::Usage(error.to_string())
    }

    fn code(&self) -> u8 {
        match self {
            CliError::Usage(_) | CliError::Config(_) => 2,
            CliError::Failed(_) => 1,
        }
    }
}

impl From<RecipeError> for CliError {
    fn from(error: RecipeError) -> Self {
        match error {
            RecipeError::Usage(message) => CliError::Usage(message),
            RecipeError::Config(errors) => CliError::Config(errors),
            RecipeError::Failed(error) => CliError::Failed(error),
        }
    }
}

impl From<AotError> for CliError {
    fn from(error: AotError) -> Self {
        RecipeError::from(error).into()
    }
}

impl From<KernelError> for CliError {
    fn from(error: KernelError) -> Self {
        match error.is_usage() {
            true => CliError::usage(error),
            false => CliError::failed(error),
        }
    }
}

impl From<PipelineError> for CliError {
    fn from(error: PipelineError) -> Self {
        match error.is_usage() {
            true => CliError::usage(error),
            false => CliError::failed(error),
        }
    }
}

impl From<SubmoduleError> for CliError {
    fn from(error: SubmoduleError) -> Self {
        match error.is_usage() {
            true => CliError::usage(error),
            false => CliError::failed(error),
        }
    }
}

impl From<TrainError> for CliError {
    fn from(error: TrainError) -> Self {
        match error.is_usage() {
            true => CliError::usage(error),
            false => CliError::failed(error),
        }
    }
}

/// Writes a result to the standard output. A reader that has gone away (`| head`) is no failure.
///
/// # Errors
/// The output cannot be written for another reason.
pub fn print(text: &str) -> Result<(), CliError> {
    let end = if text.ends_with('\n') { "" } else { "\n" };
    let written = status::above(|| {
        let mut out = io::stdout().lock();
        out.write_all(text.as_bytes())
            .and_then(|()| out.write_all(end.as_bytes()))
            .and_then(|()| out.flush())
    });
    match written {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => Err(CliError::failed(e)),
        _ => Ok(()),
    }
}

/// Writes a line to the standard error output. That it has no reader any more ends nothing: Rust programs
/// ignore SIGPIPE, and a training run outlives the pager its log went to.
pub fn tell(text: &str) {
    let _ = status::above(|| writeln!(io::stderr().lock(), "{text}"));
}

/// Writes a file that must not exist yet.
///
/// # Errors
/// When it exists, or cannot be written.
pub fn write_new(path: &Path, bytes: &[u8]) -> Result<(), CliError> {
    files::write(path, bytes, Existing::Refuse).map_err(|e| match e.kind() {
        io::ErrorKind::AlreadyExists => exists(path),
        kind => CliError::failed(io::Error::new(kind, format!("{}: {e}", path.display()))),
    })
}

/// Finds before the work what would stop its result from being written to a new file.
///
/// # Errors
/// When the file exists, or its folder cannot be written.
fn check_new_file(path: &Path) -> Result<(), CliError> {
    if path.symlink_metadata().is_ok() {
        return Err(exists(path));
    }
    let folder = parent_of(path);
    check_writable(folder).map_err(|e| {
        CliError::Usage(format!(
            "{}: cannot be written: {}: {e}",
            path.display(),
            folder.display(),
        ))
    })
}

fn exists(path: &Path) -> CliError {
    CliError::Usage(format!(
        "{}: exists already; choose another name or remove it",
        path.display()
    ))
}

/// Tells of progress, except under `--quiet`.
pub fn progress(text: &str) {
    if tracing::enabled!(tracing::Level::INFO) {
        tell(text);
    }
}

/// Sends log messages to the standard error output: those that `RUST_LOG` asks for, by default this
/// program's of level `info` and others' warnings.
fn start_log(quiet: bool) {
    let filter = if quiet {
        EnvFilter::new("warn")
    } else {
        asked_filter().unwrap_or_else(|| EnvFilter::new("warn,maxdiff=info"))
    };
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(status::stderr)
        .with_ansi(io::stderr().is_terminal())
        .with_target(false)
        .without_time();
    // Fails only where a log is set up already, which then is the one to use.
    let _ = log.try_init();
    if tracing::enabled!(tracing::Level::INFO) {
        status::show();
    }
}

/// The filter of `RUST_LOG`; a value that cannot be parsed is ignored with a warning.
fn asked_filter() -> Option<EnvFilter> {
    let asked = std::env::var_os(EnvFilter::DEFAULT_ENV)?;
    let asked = asked.to_string_lossy();
    EnvFilter::try_new(&asked)
        .inspect_err(|error| {
            tell(&format!(
                "warning: {}='{asked}' is ignored: {error}; write it as maxdiff=debug or warn,maxdiff=trace",
                EnvFilter::DEFAULT_ENV
            ));
        })
        .ok()
}

/// Ends the process after a wrong command line, with code 2, or after a text that was asked for.
fn refuse(error: &clap::Error) -> ! {
    // What cannot be written has no reader any more.
    let _ = error.print();
    let option = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(option)) if error.kind() == ErrorKind::UnknownArgument => option,
        _ => std::process::exit(error.exit_code()),
    };
    let name = option.split('=').next().unwrap_or(option);
    let name = name.trim_start_matches('-').replace('-', "_");
    let key = match names().contains(&name.as_str()) {
        true => Some(name.as_str()),
        false => meant(&name),
    };
    if let Some(key) = key {
        tell(&format!(
            "note: keys of the configuration have no dashes: write {key}=VALUE"
        ));
    }
    std::process::exit(error.exit_code());
}

/// Parses the command line and runs the verb.
pub fn main() -> ExitCode {
    // A shell that asks for completions gets them and nothing else.
    completions::answer(Cli::command);
    let cli = Cli::try_parse().unwrap_or_else(|error| refuse(&error));
    start_log(cli.quiet);
    let result = match cli.command {
        Command::Compile(args) => compile::run(&args),
        Command::Config(args) => config::run(args),
        Command::Lower(args) => lower::run(&args),
        Command::Generate(args) => generate::run(&args),
        Command::Train(args) => train::run(&args),
        Command::Module(args) => module::run(args),
        Command::Kernel(args) => kernel::run(args),
        Command::Convert(args) => convert::run(&args),
        Command::Quantize(args) => quantize::run(&args),
        Command::Evaluate(args) => evaluate::run(&args),
        Command::Plugin(args) => plugin::run(args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Completions(args) => completions::run(&args),
        Command::Man(args) => man::run(&args, Cli::command()),
    };
    status::clear();
    result.unwrap_or_else(|error| {
        let mut told = error.to_string();
        tell(&format!("error: {told}"));
        let mut cause = std::error::Error::source(&error);
        while let Some(inner) = cause {
            let text = inner.to_string();
            // Many messages hold their cause already.
            if !told.contains(&text) {
                tell(&format!("  because: {text}"));
                told = text;
            }
            cause = inner.source();
        }
        ExitCode::from(error.code())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }
}
