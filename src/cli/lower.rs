//! `lower`: a program as StableHLO text, without weights, devices or plugins.
//!
//! With `compile_topology` it is the program of that topology's mesh, with its shardings.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use clap::{Args, ValueEnum};
use serde_json::json;

use crate::config::{Config, Hardware, Verb, check_local_shard_count};
use crate::emit::{EmitOptions, stablehlo};
use crate::graph::{Graph, flops};
use crate::pipelines::text_to_image::{DenoiseOptions, trace_denoise};
use crate::quant::Decision;
use crate::recipe;
use crate::shard::{DeviceDescription, Mesh, ShardPlan};
use crate::target::for_cpu;
use crate::train::step;
use crate::util::files::{self, Existing};

use super::{CliError, RecipeArgs, notices, print};

/// Which program of a recipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Step {
    /// Loss, gradient and optimizer
    Train,
    /// One denoising step
    Denoise,
}

impl Step {
    pub fn name(self) -> &'static str {
        match self {
            Step::Train => "train",
            Step::Denoise => "denoise",
        }
    }
}

/// `lower ...`
#[derive(Debug, Args)]
pub struct LowerArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// The program
    #[arg(long, value_enum, default_value = "denoise")]
    step: Step,
    /// Write the program's StableHLO text here; an existing file is not replaced
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print JSON: parameters, ops, flops, bytes, and seconds by phase
    #[arg(long)]
    json: bool,
}

/// A traced program of a recipe.
pub struct Traced {
    pub graph: Graph,
    pub decisions: Vec<Decision>,
}

/// Traces a program for `devices` devices in `slices` slices.
///
/// # Errors
/// When the configuration does not fit together.
pub fn trace(config: &Config, step: Step, devices: u64, slices: u64) -> Result<Traced, CliError> {
    let derived = config.derived(devices, slices)?;
    let batch = derived.total_train_batch_size as usize;
    let shards = derived.quantization_local_shard_count;
    match step {
        Step::Train => {
            check_local_shard_count(derived.total_train_batch_size, shards)?;
            let tokenizer = recipe::data::tokenizer_for_vocab_size(config)?;
            let model = recipe::model(config, tokenizer.as_ref())?;
            let options = recipe::step_options(config, batch, shards as usize)?;
            let traced = step::trace(&model, &options).map_err(CliError::usage)?;
            Ok(Traced {
                graph: traced.graph,
                decisions: traced.decisions,
            })
        }
        Step::Denoise => {
            // The text encoder, and with it the vocabulary, is not part of this program.
            let model = recipe::model(config, None)?;
            let options = DenoiseOptions {
                batch,
                tokens: model.tokens,
                guidance: recipe::guidance(config),
                quantization: recipe::policy(config, 0)?,
            };
            let traced = trace_denoise(&model, &options).map_err(CliError::usage)?;
            Ok(Traced {
                graph: traced.model,
                decisions: traced.decisions,
            })
        }
    }
}

/// Runs `lower`.
///
/// # Errors
/// When the configuration is wrong, or the file exists or cannot be written.
pub fn run(args: &LowerArgs) -> Result<ExitCode, CliError> {
    let start = Instant::now();
    let config = args.recipe.load_step(Verb::Lower, args.step)?;
    let loaded = start.elapsed().as_secs_f64();
    let start = Instant::now();
    let mesh = mesh(&config)?;
    let (devices, slices) = (mesh.num_devices() as u64, mesh.num_slices() as u64);
    let traced = trace(&config, args.step, devices, slices)?;
    let mut graph = traced.graph;
    if config.hardware == Hardware::Cpu {
        graph = for_cpu(&graph).map_err(CliError::usage)?;
    }
    let trace_seconds = start.elapsed().as_secs_f64();
    let start = Instant::now();
    let plan =
        ShardPlan::new(&graph, &mesh, &config.logical_axis_rules).map_err(CliError::usage)?;
    plan.log(args.step.name());
    recipe::check_batch(&graph, &plan, &mesh)?;
    let options = EmitOptions {
        precision: config.precision,
        sharding: plan.text(&mesh),
    };
    let text = stablehlo(&graph, args.step.name(), &options);
    let emit_seconds = start.elapsed().as_secs_f64();
    let start = Instant::now();
    if let Some(path) = &args.output {
        write_new(path, text.as_bytes())?;
    }
    let write_seconds = start.elapsed().as_secs_f64();
    let ops = graph.live_nodes().iter().filter(|l| **l).count();
    let report = json!({
        "step": args.step.name(),
        "parameters": graph.parameter_count(),
        "ops": ops,
        "flops": flops(&graph),
        "bytes": text.len(),
        "quantized": traced.decisions.iter().filter(|d| d.quantized).count(),
        "seconds": {
            "config": loaded,
            "trace": trace_seconds,
            "emit": emit_seconds,
            "write": write_seconds,
        },
        "output": args.output.as_ref().map(|path| path.display().to_string()),
    });
    if args.json {
        print(&report.to_string())?;
    } else if args.output.is_none() {
        print(&text)?;
    } else {
        if let Some(policy) = recipe::policy(&config, 0)? {
            super::progress(&recipe::quantization_summary(&policy, &traced.decisions));
        }
        print(&format!(
            "{} parameters, {ops} operations, {} bytes of StableHLO",
            graph.parameter_count(),
            text.len()
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The mesh of `compile_topology`, or that of a single device.
fn mesh(config: &Config) -> Result<Mesh, CliError> {
    let (devices_per_slice, slices) = match recipe::compile_topology(config, &mut notices())? {
        None => (1, 1),
        Some((accelerator, slices)) => (accelerator.devices_per_slice as i64, slices),
    };
    // The text names mesh axes, not devices: where a device lies in its slice is for the compiler to know.
    let devices = DeviceDescription::numbered(devices_per_slice, slices);
    Mesh::new(&recipe::parallelism(config), &devices).map_err(CliError::usage)
}

/// Writes a file that must not exist yet.
///
/// # Errors
/// When it exists, or cannot be written.
pub fn write_new(path: &Path, bytes: &[u8]) -> Result<(), CliError> {
    files::write(path, bytes, Existing::Refuse).map_err(|e| match e.kind() {
        std::io::ErrorKind::AlreadyExists => CliError::Usage(format!(
            "{}: exists already; choose another name or remove it",
            path.display()
        )),
        _ => CliError::failed(std::io::Error::new(
            e.kind(),
            format!("{}: {e}", path.display()),
        )),
    })
}
