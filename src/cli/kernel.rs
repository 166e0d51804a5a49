//! `kernel list`, `kernel check` and `kernel cycles`: this program's kernels, one at a time.

use std::collections::BTreeMap;
use std::io;
use std::process::ExitCode;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};
use serde_json::{Map, Value, json};

use crate::aot::{Simulator, compiler_for_one, serve};
use crate::backend::Backend;
use crate::kernels::{self, Case, Comparison, KernelError, Layer, LayerQuantization};
use crate::pjrt::install;
use crate::report::{CompileReport, Predicted, VliwBundles, VliwUnit};
use crate::topology::{Accelerator, Chip};

use super::doctor::try_load;
use super::{CliError, help, print, progress};

/// `kernel ...`
#[derive(Debug, Args)]
pub struct KernelArgs {
    #[command(subcommand)]
    command: KernelCommand,
}

#[derive(Debug, Subcommand)]
enum KernelCommand {
    /// List the layers that backends have kernels for
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Compile a layer with its TPU kernel, by default for every kind of TPU
    #[command(after_long_help = help::KERNEL)]
    Check(CaseArgs),
    /// Predict the time of a layer with its TPU kernel and without, by default on a v5e
    ///
    /// The kernel is simulated by the TPU compiler, of a large one a part of its grid; the other operations have the compiler's
    /// estimates. Nothing runs, and no TPU is needed.
    #[command(after_long_help = help::KERNEL)]
    Cycles(CaseArgs),
    /// Compile the StableHLO modules on standard input: `compile` and `kernel cycles` run this with libtpu told to simulate
    #[command(hide = true)]
    Simulate {
        #[arg(long, value_name = "NAME")]
        topology: String,
    },
}

#[derive(Debug, Args)]
struct CaseArgs {
    #[arg(
        value_name = "LAYER",
        value_parser = PossibleValuesParser::new(Layer::ALL.map(Layer::name))
            .try_map(|name| Layer::from_name(&name).ok_or("no such layer"))
    )]
    layer: Layer,
    /// Dimensions of the layer; `kernel list` has their names
    #[arg(value_name = "NAME=N")]
    dims: Vec<String>,
    /// Quantize contractions in this mode
    #[arg(
        long,
        value_name = "MODE",
        value_parser = PossibleValuesParser::new(LayerQuantization::ALL.map(LayerQuantization::name))
            .try_map(|name| LayerQuantization::from_name(&name).ok_or("no such mode"))
    )]
    quantization: Option<LayerQuantization>,
    /// Compile for this TPU; several may be given
    #[arg(long, value_name = "NAME")]
    topology: Vec<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl CaseArgs {
    fn case(&self) -> Result<Case, CliError> {
        Ok(Case::new(self.layer, &self.dims, self.quantization)?)
    }

    /// The accelerators that were asked for, or the smallest of each of `chips`. Their plugins are ready to be loaded.
    fn accelerators(&self, chips: &[Chip]) -> Result<Vec<Accelerator>, CliError> {
        let found: Vec<Accelerator> = match self.topology.is_empty() {
            true => chips
                .iter()
                .filter_map(|chip| Accelerator::smallest(*chip))
                .collect(),
            false => {
                let found = self.topology.iter().map(|name| Accelerator::lookup(name));
                found.collect::<Result<_, _>>().map_err(CliError::usage)?
            }
        };
        for accelerator in &found {
            let plugin = accelerator.platform.plugin();
            install::locate_checked(plugin, &try_load).map_err(CliError::failed)?;
        }
        Ok(found)
    }
}

/// Runs `kernel`.
///
/// # Errors
/// When a dimension or topology does not exist, the plugin is missing, or the compiler refuses a kernel.
pub fn run(args: KernelArgs) -> Result<ExitCode, CliError> {
    match args.command {
        KernelCommand::List { json } => list(json)?,
        KernelCommand::Check(args) => return check(&args),
        KernelCommand::Cycles(args) => cycles(&args)?,
        KernelCommand::Simulate { topology } => {
            let accelerator = Accelerator::lookup(&topology).map_err(CliError::usage)?;
            let compiler = compiler_for_one(&accelerator)?;
            let compile = |stablehlo: &str| compiler(stablehlo).map(|_| ());
            serve(io::stdin().lock(), io::stdout(), io::stderr(), compile)
                .map_err(CliError::failed)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Simulates in processes of this program.
///
/// # Errors
/// When the program does not know its own file.
pub fn simulator() -> Result<Simulator, CliError> {
    let program = std::env::current_exe().map_err(CliError::failed)?;
    Ok(Simulator::new(program))
}

/// The backends that have kernels; of TPUs a v5e's.
fn backends() -> [(&'static str, Backend); 2] {
    let tpu = Backend::Tpu {
        kernels: true,
        features: Chip::V5e.features(),
    };
    [("cpu", Backend::Cpu { kernels: true }), ("tpu", tpu)]
}

fn list(as_json: bool) -> Result<(), CliError> {
    let mut rows = Vec::new();
    for layer in Layer::ALL {
        let modes = LayerQuantization::ALL.map(Some);
        for mode in [None].into_iter().chain(modes) {
            let Ok(case) = Case::new(layer, &[], mode) else {
                continue;
            };
            let mut kernels = Map::new();
            for (name, backend) in backends() {
                kernels.insert(name.to_owned(), json!(kernels::claimed(&case, backend)?));
            }
            rows.push((case, kernels));
        }
    }
    if as_json {
        let rows = rows.iter().map(|(case, kernels)| {
            json!({
                "layer": case.layer.name(),
                "dims": case.dims().collect::<BTreeMap<_, _>>(),
                "type": case.quantization.map_or("bf16", LayerQuantization::name),
                "kernels": kernels,
            })
        });
        return print(&json!({"layers": rows.collect::<Vec<_>>()}).to_string());
    }
    let mut text =
        "layers with the dimensions of SDXL at 1024x1024, in bf16, and their kernels\n".to_owned();
    for (case, kernels) in rows {
        text.push_str(&format!("{case}\n"));
        for (backend, kernels) in kernels {
            let kernels = kernels.as_object().into_iter().flatten();
            let kernels: Vec<String> = kernels.map(|(name, n)| format!("{n} {name}")).collect();
            let kernels = match kernels.is_empty() {
                true => "none".to_owned(),
                false => kernels.join(", "),
            };
            text.push_str(&format!("  {backend}  {kernels}\n"));
        }
    }
    print(&text)
}

fn check(args: &CaseArgs) -> Result<ExitCode, CliError> {
    const TPUS: [Chip; 5] = [Chip::V4, Chip::V5e, Chip::V5p, Chip::V6e, Chip::Tpu7x];
    let case = args.case()?;
    let mut rows = Vec::new();
    for accelerator in args.accelerators(&TPUS)? {
        let name = accelerator.name.clone();
        match kernels::check(&case, accelerator) {
            Ok(_) => rows.push((name, None)),
            Err(KernelError::Aot(error)) if !error.is_usage() => {
                rows.push((name, Some(error.to_string())))
            }
            Err(error) => return Err(error.into()),
        }
    }
    if args.json {
        let rows = rows
            .iter()
            .map(|(name, error)| (name.clone(), json!(error)));
        print(
            &json!({"case": case.to_string(), "errors": rows.collect::<Map<_, _>>()}).to_string(),
        )?;
    } else {
        let lines = rows.iter().map(|(name, error)| match error {
            None => format!("  {name:<8} compiles\n"),
            Some(error) => format!("  {name:<8} {error}\n"),
        });
        print(&format!("{case}\n{}", lines.collect::<String>()))?;
    }
    Ok(match rows.iter().all(|(_, error)| error.is_none()) {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

fn cycles(args: &CaseArgs) -> Result<(), CliError> {
    let case = args.case()?;
    let mut reports = Map::new();
    let mut text = format!("{case}\n");
    for accelerator in args.accelerators(&[Chip::V5e])? {
        let name = accelerator.name.clone();
        progress(&format!("{name}: compiling and simulating"));
        let comparison = kernels::compare(&case, accelerator, simulator()?.with_bundles())?;
        text.push_str(&describe(&name, &comparison));
        reports.insert(name, report(&comparison));
    }
    match args.json {
        true => print(&json!({"case": case.to_string(), "topologies": reports}).to_string()),
        false => print(&text),
    }
}

fn report(comparison: &Comparison) -> Value {
    let kernels = comparison.kernels.as_ref();
    json!({
        "kernels": kernels.map(|report| &report.predicted_ms),
        "compiler": comparison.compiler.predicted_ms,
    })
}

fn describe(name: &str, comparison: &Comparison) -> String {
    let side = |side: &str, report: &CompileReport| {
        let predicted = report.predicted_ms.as_ref();
        let total = predicted.map_or_else(
            || "not known for this target".to_owned(),
            |predicted| format!("{:.4} ms", predicted.total),
        );
        let operations = predicted.map_or_else(String::new, operations);
        format!("  {name} {side}: {total}\n{operations}")
    };
    let kernels = match &comparison.kernels {
        Some(report) => side("with kernels", report),
        None => format!("  {name}: no kernel takes it\n"),
    };
    kernels + &side("by the compiler", &comparison.compiler)
}

/// How much of each functional unit a kernel's bundles use, the busiest first.
fn bundles(bundles: &VliwBundles) -> String {
    let mut units: Vec<&VliwUnit> = bundles.units.iter().collect();
    units.sort_by(|a, b| bundles.share(b).total_cmp(&bundles.share(a)));
    let units = units.into_iter().map(|unit| {
        let percent = bundles.share(unit) * 100.0;
        format!("{} {percent:.0} % of {}", unit.name, unit.slots)
    });
    let units: Vec<String> = units.collect();
    format!(
        "      {} bundles, each of a loop counted once; filled slots: {}\n",
        bundles.count,
        units.join(", ")
    )
}

/// What takes time, the costliest first.
fn operations(predicted: &Predicted) -> String {
    let lines = predicted.costliest.iter().map(|operation| {
        format!(
            "    {:<12}{:>12} cycles{:>10.4} ms  {} <- {}\n",
            operation.kind,
            operation.cycles * operation.count,
            operation.ms,
            operation.result,
            operation.operands.join(", ")
        )
    });
    let kernels = predicted.kernels.iter().map(|kernel| {
        let cycles = &kernel.of_one;
        let of_one = format!(
            "    {}: {} cycles in each of {}, of which HBM takes at least {} and products {}; {:.0} % of it was simulated\n",
            kernel.name,
            cycles.cycles,
            kernel.count,
            cycles.hbm_cycles,
            cycles.product_cycles,
            cycles.simulated_share * 100.0
        );
        of_one + &cycles.bundles.as_ref().map_or_else(String::new, bundles)
    });
    let missing = predicted
        .unpredicted
        .iter()
        .map(|operation| format!("    not predicted: {}\n", operation.op_name));
    lines.chain(kernels).chain(missing).collect()
}
