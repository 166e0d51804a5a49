//! `compile`: a program compiled ahead of time for devices that need not be here, with a report of what it needs and
//! moves, as a bundle on disk.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use serde_json::{Value, json};

use crate::aot::{Bundled, Compiled, CompiledProgram, Compiler, Progress};
use crate::bundle::{self, Bundle, BundleError, PayloadKind};
use crate::config::{Config, Verb};
use crate::quant::Product;
use crate::recipe::{self, Step};
use crate::report::operations;
use crate::topology::Chip;

use super::doctor::try_load;
use super::{CliError, RecipeArgs, kernel, notices, print, status};

/// `compile ...`
#[derive(Debug, Args)]
pub struct CompileArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// The program
    #[arg(long, value_enum, default_value = "denoise")]
    step: Step,
    /// Write the bundle here; an existing file is not replaced. Default: a new name in the run's folder
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

/// Runs `compile`.
///
/// # Errors
/// When the configuration does not fit the devices, the plugin is missing, the compiler refuses a program, or the
/// bundle cannot be written.
pub fn run(args: &CompileArgs) -> Result<ExitCode, CliError> {
    let config = args.recipe.load_step(Verb::Compile, args.step)?;
    let path = output_path(args, &config);
    bundle::check_writable(&path).map_err(|e| match e {
        BundleError::Exists { .. } => CliError::Usage(e.to_string()),
        _ => CliError::failed(e),
    })?;
    let start = Instant::now();
    status::spin("opening the compiler");
    let cache = recipe::program_cache(&config.jax_cache_dir);
    let simulator = kernel::simulator()?.with_cache(cache);
    let compiler = recipe::compiler(&config, &try_load, &mut notices())?.with_simulator(simulator);
    let setup = start.elapsed().as_secs_f64();
    let start = Instant::now();
    status::spin("tracing");
    let traced = recipe::trace(&config, args.step, compiler.mesh())?;
    let trace = start.elapsed().as_secs_f64();
    let model_flops = match args.step {
        Step::Train => Some(recipe::model_flops(&config, compiler.mesh())?),
        Step::Denoise => None,
    };
    let options = recipe::compile_options(&config, args.step, &traced);
    let compiled = compiler.compile(&traced, &options, &mut show)?;
    status::clear();
    let training = model_flops.map(|flops| Training::of(&config, &compiler, &compiled, flops));
    let written = write(args, &config, path, &compiled);
    // The report is told even where the bundle is lost: compiling may have taken an hour.
    let bundle = written.as_ref().ok();
    if args.json {
        let mut value = report(&compiled, setup, trace);
        value["training"] = training.map_or(Value::Null, |training| training.json());
        value["bundle"] = bundle.map_or(Value::Null, Written::json);
        print(&value.to_string())?;
    } else {
        let bundle = bundle.map_or_else(String::new, Written::describe);
        let training = training.map_or_else(String::new, |training| training.describe());
        print(&format!("{}{training}{bundle}", describe(&compiled)))?;
    }
    written.map(|_| ExitCode::SUCCESS)
}

/// What only training steps have in the report.
struct Training {
    /// Images of one device in a step.
    per_device_batch_size: f64,
    /// Operations of one device for them, if nothing is computed twice.
    model_flops: f64,
    /// These over what the device could do in bfloat16 in the predicted time. `None` where one of the two is not known.
    utilization: Option<f64>,
}

impl Training {
    /// `of_all` are the operations of all devices.
    fn of(config: &Config, compiler: &Compiler, compiled: &Compiled, of_all: u64) -> Training {
        let flops = of_all as f64 / compiler.mesh().num_devices() as f64;
        let peak = compiler.chip().and_then(Chip::device_peak);
        let predicted = compiled.step.report.predicted_ms.as_ref();
        Training {
            per_device_batch_size: config.per_device_batch_size,
            model_flops: flops,
            utilization: peak
                .zip(predicted)
                .map(|(peak, predicted)| flops / peak / (predicted.total / 1e3)),
        }
    }

    fn json(&self) -> Value {
        json!({
            "per_device_batch_size": self.per_device_batch_size,
            "model_flops": self.model_flops,
            "model_flops_utilization": self.utilization,
        })
    }

    fn describe(&self) -> String {
        let utilization = match self.utilization {
            Some(share) => format!("{:.1} %, without waiting for collectives", share * 100.0),
            None => "not known for this target".to_owned(),
        };
        format!(
            "images of a device {:>13}\nmodel flops       {:>14}\nutilization       {utilization:>14}\n",
            self.per_device_batch_size,
            operations(self.model_flops as u64),
        )
    }
}

/// Says how much memory a step takes, and which program is compiled.
fn show(progress: Progress<'_>) {
    match progress {
        Progress::Fits { step } => {
            let memory = step.describe();
            super::progress(&format!("memory of each device: {memory}"));
        }
        Progress::Compiling {
            stage,
            number,
            programs,
        } => {
            let stage = stage.name();
            status::spin(&match programs {
                1 => format!("compiling the {stage} program"),
                _ => format!("compiling program {number} of {programs} ({stage})"),
            });
        }
    }
}

/// The step's report with what surrounds it and the reports of the programs before it, as JSON.
fn report(compiled: &Compiled, setup: f64, trace: f64) -> Value {
    let target = &compiled.header.target;
    let program = &compiled.step.header.program;
    let reports = || compiled.programs().map(|program| &program.report);
    let load_seconds = |p: &CompiledProgram| p.report.compile_seconds;
    let more = json!({
        "step": program.step,
        "quantization": program.quantization,
        "quantized": compiled.decisions.iter().filter(|d| d.quantized()).count(),
        "slower_in_int8": compiled.slower,
        "topology": {
            "name": target.name,
            "num_slices": target.num_slices,
            "num_devices": target.device_assignment.len(),
            "mesh": target.mesh,
        },
        "load": {
            "runs": compiled.load_runs(),
            "predicted_ms": compiled.load_ms(),
            "compile_seconds": compiled.load.iter().map(load_seconds).sum::<f64>(),
            "programs": compiled.load.iter().map(program_report).collect::<Vec<_>>(),
        },
        "request": compiled.request.as_ref().map(program_report),
        "together": {
            "compile_seconds": reports().map(|report| report.compile_seconds).sum::<f64>(),
            "code_bytes": reports().map(|report| report.memory.code).sum::<u64>(),
            "fits": compiled.fits(),
        },
        "estimated_memory": {
            "weights": compiled.footprint.weights,
            "optimizer_state": compiled.footprint.state,
            "activations": compiled.footprint.activations,
        },
        "seconds": {
            "setup": setup,
            "trace": trace + compiled.seconds.lower,
            "emit": compiled.seconds.emit,
            "compile": compiled.seconds.compile,
        },
    });
    let mut value = program_report(&compiled.step);
    if let (Value::Object(value), Value::Object(more)) = (&mut value, more) {
        value.extend(more);
    }
    value
}

fn program_report(program: &CompiledProgram) -> Value {
    let mut value = json!(program.report);
    value["runs"] = json!(program.runs());
    value["kernels"] = json!(program.kernels);
    value["fits"] = json!(program.report.memory.fits());
    value
}

/// The reports for people: what prepares weights in a few lines, the others whole.
fn describe(compiled: &Compiled) -> String {
    let target = &compiled.header.target;
    let devices = match target.device_assignment.len() {
        1 => "1 device".to_owned(),
        devices => format!("{devices} devices"),
    };
    let mut text = format!(
        "{} programs for {devices}: {}{}\n",
        compiled.step.header.program.step,
        target.name,
        match target.num_slices {
            1 => String::new(),
            slices => format!(", {slices} slices"),
        },
    );
    if !compiled.load.is_empty() {
        let predicted = match compiled.load_ms() {
            Some(ms) => format!("{ms:.1} ms predicted"),
            None => "time not predicted for this target".to_owned(),
        };
        text.push_str(&format!(
            "load program: {} programs run {} times while weights are loaded, {predicted}\n",
            compiled.load.len(),
            compiled.load_runs(),
        ));
    }
    if let Some(request) = &compiled.request {
        text.push_str(&format!(
            "request program, once for each prompt\n{}",
            describe_program(request)
        ));
    }
    if let Some(first) = compiled.slower.first() {
        let Product {
            rows,
            contracted,
            columns,
            ..
        } = first.product;
        text.push_str(&format!(
            "not faster in int8, so in float: {} products, such as {} ({rows} rows, {columns} columns, {contracted} terms)\n",
            compiled.slower.len(),
            first.path,
        ));
    }
    text.push_str(&format!(
        "step program\n{}",
        describe_program(&compiled.step)
    ));
    text
}

fn describe_program(program: &CompiledProgram) -> String {
    let kernels: Vec<String> = program
        .kernels
        .iter()
        .map(|(kernel, count)| format!("{count} {kernel}"))
        .collect();
    match kernels.is_empty() {
        true => program.report.to_string(),
        false => format!(
            "{}kernels           {}\n",
            program.report,
            kernels.join(", ")
        ),
    }
}

/// Where the bundle goes: `--output`, or the first free name in the run's folder.
fn output_path(args: &CompileArgs, config: &Config) -> PathBuf {
    if let Some(path) = &args.output {
        return path.clone();
    }
    let target = match (
        config.compile_topology.as_str(),
        config.compile_topology_num_slices,
    ) {
        ("", _) => config.hardware.name().to_owned(),
        (name, -1 | 1) => name.to_owned(),
        (name, slices) => format!("{name}-x{slices}"),
    };
    let stem = format!("{}-{target}", args.step.name());
    let folder = config.run_dir();
    let mut path = folder.join(format!("{stem}.bundle"));
    for number in 1.. {
        if path.symlink_metadata().is_err() {
            break;
        }
        path = folder.join(format!("{stem}-{number}.bundle"));
    }
    path
}

/// A bundle on disk.
struct Written {
    path: PathBuf,
    payload: PayloadKind,
    bytes: usize,
}

impl Written {
    fn json(&self) -> Value {
        json!({
            "path": self.path.display().to_string(),
            "payload": self.payload,
            "payload_bytes": self.bytes,
        })
    }

    fn describe(&self) -> String {
        format!(
            "bundle            {} ({} of {:.1} MiB)",
            self.path.display(),
            match self.payload {
                PayloadKind::Executable => "executable",
                PayloadKind::Stablehlo => "StableHLO",
            },
            self.bytes as f64 / f64::from(1 << 20)
        )
    }
}

/// Writes the bundle to `path`, or where another program has taken the default name meanwhile, to the next one.
fn write(
    args: &CompileArgs,
    config: &Config,
    mut path: PathBuf,
    compiled: &Compiled,
) -> Result<Written, CliError> {
    let Bundled {
        bundle,
        not_serialized,
    } = compiled.bundle().map_err(CliError::failed)?;
    loop {
        match bundle.write(&path) {
            Ok(()) => break,
            Err(BundleError::Exists { .. }) if args.output.is_none() => {
                path = output_path(args, config);
            }
            Err(error) => return Err(CliError::failed(error)),
        }
    }
    // What lies on the disk is what was compiled, or this is the time to say so.
    Bundle::read(&path)
        .and_then(|read| read.check(&path, &bundle.header))
        .map_err(CliError::failed)?;
    if let Some(reason) = &not_serialized {
        super::tell(&format!(
            "warning: the plugin does not serialize this program ({reason}); the bundle holds its StableHLO, to be compiled again where it runs"
        ));
    }
    Ok(Written {
        path,
        payload: match not_serialized {
            None => PayloadKind::Executable,
            Some(_) => PayloadKind::Stablehlo,
        },
        bytes: bundle.payload.len(),
    })
}
