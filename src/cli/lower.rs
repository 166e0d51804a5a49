//! `lower`: a program as StableHLO text, without weights, devices or plugins.
//!
//! With `compile_topology` it is the program of that topology's mesh, with its shardings.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use serde_json::json;

use crate::backend::Backend;
use crate::config::Verb;
use crate::emit::{Module, Modules};
use crate::footprint;
use crate::graph::flops;
use crate::lowering::{Lowered, LoweredProgram, Options, Stage, Traced, lower, whole};
use crate::recipe::{self, Step};

use super::{CliError, RecipeArgs, notices, print, write_new};

/// `lower ...`
#[derive(Debug, Args)]
pub struct LowerArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// The program
    #[arg(long, value_enum, default_value = "denoise")]
    step: Step,
    /// When it runs: for every step, once for a request, or while weights are loaded
    #[arg(long, value_enum, default_value = "step")]
    stage: Stage,
    /// One module with everything, before it is split into stages and without kernels: nothing runs it, but it can be
    /// compared with another compiler's
    #[arg(long, conflicts_with = "stage")]
    whole: bool,
    /// Write the program's StableHLO text here; an existing file is not replaced
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print JSON: parameters, ops, flops, bytes, and seconds by phase
    #[arg(long)]
    json: bool,
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
    let (mesh, backend) = recipe::lowering_target(&config, &mut notices())?;
    let traced = recipe::trace(&config, args.step, &mesh)?;
    let options = Options {
        mesh: &mesh,
        rules: &config.logical_axis_rules,
    };
    let lowered = lowered(args, &traced, backend, &options)?;
    footprint::log(&lowered.step, &mesh, &config.logical_axis_rules);
    let LoweredProgram { graph, plan, .. } = &lowered.step;
    plan.check_batch(graph, &mesh).map_err(CliError::usage)?;
    let trace_seconds = start.elapsed().as_secs_f64();
    let start = Instant::now();
    let slower = lowered.slower.clone();
    let modules = Modules::new(lowered, &mesh, config.precision);
    let asked: Vec<&Module> = match args.stage {
        Stage::Load => modules.load.iter().collect(),
        Stage::Request => modules.request.iter().collect(),
        Stage::Step => vec![&modules.step],
    };
    if asked.is_empty() {
        return Err(CliError::Usage(format!(
            "--stage={}: the {} program has no such stage: it computes nothing before its steps",
            args.stage.name(),
            args.step.name()
        )));
    }
    let texts: Vec<&str> = asked.iter().map(|module| module.text.as_str()).collect();
    let text = texts.join("// -----\n");
    let emit_seconds = start.elapsed().as_secs_f64();
    let start = Instant::now();
    if let Some(path) = &args.output {
        write_new(path, text.as_bytes())?;
    }
    let write_seconds = start.elapsed().as_secs_f64();
    let graphs = || asked.iter().map(|module| &module.program.graph);
    let ops: usize = graphs()
        .map(|graph| graph.live_nodes().iter().filter(|l| **l).count())
        .sum();
    let parameters = traced.graph.parameter_count();
    let report = json!({
        "step": args.step.name(),
        "stage": args.stage.name(),
        "programs": asked.len(),
        "parameters": parameters,
        "ops": ops,
        "flops": graphs().map(flops).fold(0, u64::saturating_add),
        "bytes": text.len(),
        "quantized": traced.decisions.iter().filter(|d| d.quantized()).count(),
        "slower_in_int8": slower,
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
        if let Some(policy) = &traced.policy {
            super::progress(&recipe::quantization_summary(policy, &traced.decisions));
        }
        print(&format!(
            "{parameters} parameters, {ops} operations, {} bytes of StableHLO",
            text.len()
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn lowered(
    args: &LowerArgs,
    traced: &Traced,
    backend: Backend,
    options: &Options<'_>,
) -> Result<Lowered, CliError> {
    let lowered = match args.whole {
        false => lower(traced, backend, options),
        true => whole(traced, backend, options).map(|step| Lowered {
            load: Vec::new(),
            request: None,
            step,
            slower: Vec::new(),
        }),
    };
    lowered.map_err(CliError::usage)
}
