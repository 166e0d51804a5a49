//! `compile`: a program compiled ahead of time for devices that need not be here, with a report of what it needs and
//! moves, as a bundle on disk.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::LazyLock;
use std::time::Instant;

use clap::Args;
use regex::Regex;
use serde_json::{Value, json};

use crate::backend::{Backend, kernel_counts};
use crate::bundle::{
    self, Bundle, BundleError, Group, Header, PayloadKind, PluginId, ProgramHeader, ProgramId,
    Slot, Target,
};
use crate::config::{Config, Verb};
use crate::emit::{LoadGroup, Module, Modules};
use crate::graph::{Graph, InputKind};
use crate::lowering::{Options, Program, Stage, lower};
use crate::nn::Remat;
use crate::pjrt::install::{self, PluginKind};
use crate::pjrt::{
    Client, CompileOptions, ErrorCode, Executable, NamedValue, PjrtError, Plugin, Topology,
    prepare_process,
};
use crate::quant::Decision;
use crate::recipe;
use crate::report::{CompileReport, Memory, ReportInput};
use crate::runtime::{compile_options, describe};
use crate::shape::Shape;
use crate::shard::{Axis, LogicalAxisRules, Mesh, PartitionSpec, ShardPlan};
use crate::topology::{Accelerator, Chip, OptionValue, Platform};
use crate::util::hash::Sha256;
use crate::util::text::binary_size;

use super::lower::{Step, trace};
use super::{CliError, RecipeArgs, notices, print};

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

/// What compiles, and for which devices.
enum Compiler {
    Topology(Topology),
    Here(Client),
}

/// A target of compilation, ready.
struct Machine {
    compiler: Compiler,
    backend: Backend,
    /// What the user calls the devices: the accelerator's name, or the kind of those here.
    name: String,
    plugin: PluginId,
    chip: Option<Chip>,
    mesh: Mesh,
    rules: LogicalAxisRules,
    options: CompileOptions,
    hbm_limit: Option<u64>,
}

/// What a recipe's step was compiled to.
pub struct Compiled {
    /// What prepares the weights, for each group of weights that does it in its own way.
    pub load: Vec<CompiledProgram>,
    /// What is computed once for a request.
    pub request: Option<CompiledProgram>,
    /// What every run computes.
    pub step: CompiledProgram,
    /// What quantization decided for each contraction.
    pub decisions: Vec<Decision>,
    pub header: Header,
    seconds: Seconds,
}

/// A compiled program with its report.
pub struct CompiledProgram {
    pub executable: Executable,
    pub report: CompileReport,
    pub header: ProgramHeader,
    /// How many of a backend's kernels it calls, by the custom call's target.
    pub kernels: BTreeMap<&'static str, usize>,
    stablehlo: String,
}

/// Seconds by phase.
#[derive(Debug, Clone, Copy)]
struct Seconds {
    setup: f64,
    trace: f64,
    emit: f64,
    compile: f64,
}

/// A program that needs more memory than a device has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutOfMemory {
    step: &'static str,
    stage: Stage,
    target: String,
    /// In the compiler's words, `20.31G`.
    needed: Option<String>,
    limit: Option<u64>,
    /// Bytes of weights and of optimizer state on one device.
    weights: u64,
    state: u64,
    advice: Vec<String>,
    /// The compiler's message.
    message: String,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let step = self.step;
        match self.stage {
            Stage::Load => write!(
                f,
                "the program that prepares weights for the {step} program"
            )?,
            Stage::Request => write!(f, "the request part of the {step} program")?,
            Stage::Step => write!(f, "the {step} program")?,
        }
        write!(f, " does not fit {}", self.target)?;
        if let Some(needed) = &self.needed {
            write!(f, ": it needs {needed} bytes of memory on each device")?;
        }
        if let Some(limit) = self.limit {
            write!(f, ", which has {}", binary_size(limit))?;
        }
        write!(f, "; weights take {}", binary_size(self.weights))?;
        if self.state > 0 {
            write!(f, " and optimizer state {}", binary_size(self.state))?;
        }
        write!(f, " of it. Try {}", self.advice.join(", or "))?;
        match self.message.lines().next() {
            Some(line) if !line.is_empty() => write!(f, ". The compiler says: {line}"),
            _ => Ok(()),
        }
    }
}

impl std::error::Error for OutOfMemory {}

/// Compiles the programs of the step `step` of a configuration: for `compile_topology`, or for the devices here.
///
/// # Errors
/// When the configuration does not fit the devices, the plugin is missing, or the compiler refuses a program;
/// [`OutOfMemory`] when one does not fit a device's memory.
pub fn compile(config: &Config, step: Step) -> Result<Compiled, CliError> {
    let start = Instant::now();
    let machine = Machine::new(config)?;
    let setup = start.elapsed().as_secs_f64();
    let start = Instant::now();
    let mesh = &machine.mesh;
    let devices = mesh.num_devices() as u64;
    let traced = trace(config, step, devices, mesh.num_slices() as u64)?;
    let options = Options {
        mesh,
        rules: &machine.rules,
    };
    let lowered = lower(&traced, machine.backend, &options).map_err(CliError::usage)?;
    recipe::check_batch(&lowered.step.graph, &lowered.step.plan, mesh)?;
    let trace = start.elapsed().as_secs_f64();

    let start = Instant::now();
    let modules = Modules::new(lowered, mesh, config.precision);
    let emit = start.elapsed().as_secs_f64();

    let start = Instant::now();
    let compile = |stage, module: &Module, groups: Vec<LoadGroup>| {
        let site = Site {
            config,
            step,
            stage,
            parameters: traced.graph.parameter_count() as u64,
        };
        machine.program(&site, module, groups)
    };
    // The largest first: what does not fit is found soonest.
    let compiled_step = compile(Stage::Step, &modules.step, Vec::new())?;
    let load = modules.load.iter().enumerate().map(|(at, module)| {
        let groups = modules.groups.iter().filter(|group| group.module == at);
        compile(Stage::Load, module, groups.cloned().collect())
    });
    let load = load.collect::<Result<Vec<_>, _>>()?;
    let request = modules.request.as_ref();
    let request = request.map(|module| compile(Stage::Request, module, Vec::new()));
    let request = request.transpose()?;
    let compile = start.elapsed().as_secs_f64();
    let all = load.iter().chain(&request).chain([&compiled_step]);
    let header = Header {
        plugin: machine.plugin.clone(),
        target: machine.target(),
        programs: all.map(|program| program.header.clone()).collect(),
    };
    Ok(Compiled {
        load,
        request,
        step: compiled_step,
        decisions: traced.decisions,
        header,
        seconds: Seconds {
            setup,
            trace,
            emit,
            compile,
        },
    })
}

/// Which program is compiled.
struct Site<'a> {
    config: &'a Config,
    step: Step,
    stage: Stage,
    /// Of the whole model.
    parameters: u64,
}

impl Machine {
    fn new(config: &Config) -> Result<Self, CliError> {
        match recipe::compile_topology(config, &mut notices())? {
            None => Self::here(config),
            Some((accelerator, slices)) => Self::topology(config, accelerator, slices),
        }
    }

    fn topology(config: &Config, accelerator: Accelerator, slices: i64) -> Result<Self, CliError> {
        let options: Vec<(String, NamedValue)> = accelerator
            .create_options(slices)
            .map_err(CliError::usage)?
            .into_iter()
            .map(|(key, value)| (key, named_value(value)))
            .collect();
        // A mistake in the configuration is told before the plugin is asked for: the message is the shorter way.
        let kind = match accelerator.platform {
            Platform::Tpu => PluginKind::Tpu,
            Platform::Gpu => PluginKind::Cuda,
        };
        let installed = install::locate(kind).map_err(CliError::failed)?;
        prepare_process().map_err(CliError::failed)?;
        let plugin = Plugin::load(&installed.library).map_err(CliError::failed)?;
        let topology = Topology::create(&plugin, accelerator.pjrt_topology_name(), &options)
            .map_err(CliError::failed)?;
        let devices: Vec<_> = topology.devices().iter().map(describe).collect();
        let mesh = Mesh::new(&recipe::parallelism(config), &devices).map_err(CliError::usage)?;
        let hbm_limit = topology
            .device_memory_limit()
            .and_then(|bytes| u64::try_from(bytes).ok())
            .or_else(|| accelerator.chip.device_memory_bytes());
        Ok(Machine {
            plugin: PluginId {
                platform: topology.platform_name().to_owned(),
                version: installed.version,
                build: topology.platform_version().to_owned(),
                sha256: installed.sha256,
            },
            compiler: Compiler::Topology(topology),
            name: accelerator.name,
            chip: Some(accelerator.chip),
            backend: match accelerator.platform {
                Platform::Tpu => Backend::Tpu,
                Platform::Gpu => Backend::Gpu,
            },
            options: compile_options(&mesh).with_cuda_data_dir(installed.cuda_data_dir.as_deref()),
            mesh,
            rules: config.logical_axis_rules.clone(),
            hbm_limit,
        })
    }

    fn here(config: &Config) -> Result<Self, CliError> {
        prepare_process().map_err(CliError::failed)?;
        let opened = recipe::open_session(config, &mut notices())?;
        super::progress(&format!("devices: {}", opened.chosen));
        let session = opened.session;
        let client = session.client().clone();
        let library = client.plugin().path();
        let installed = install::list()
            .map_err(CliError::failed)?
            .into_iter()
            .find(|i| i.library.canonicalize().is_ok_and(|path| path == library));
        let device = client.devices().first();
        let name = device.map_or_else(String::new, |d| d.description().kind.clone());
        let chip = Chip::from_device_kind(&name);
        if let Some(chip) = chip {
            recipe::check_formats(config, chip, &mut notices())?;
        }
        let limit = device
            .and_then(|d| d.memory_stats().ok())
            .and_then(|stats| stats.bytes_limit)
            .and_then(|bytes| u64::try_from(bytes).ok());
        let (version, sha256) = installed.map_or_else(Default::default, |i| (i.version, i.sha256));
        Ok(Machine {
            plugin: PluginId {
                platform: client.platform_name().to_owned(),
                version,
                build: client.platform_version().to_owned(),
                sha256,
            },
            mesh: session.mesh().clone(),
            rules: session.rules().clone(),
            options: session.compile_options(),
            backend: session.backend(),
            compiler: Compiler::Here(client),
            name,
            chip,
            hbm_limit: limit,
        })
    }

    /// Compiles one module and reports on it.
    fn program(
        &self,
        site: &Site<'_>,
        module: &Module,
        groups: Vec<LoadGroup>,
    ) -> Result<CompiledProgram, CliError> {
        let program = &module.program;
        program.plan.log(&program.name);
        let start = Instant::now();
        let executable =
            self.compile(&module.text)
                .map_err(|error| match out_of_memory_message(&error) {
                    Some(message) => CliError::failed(self.out_of_memory(site, program, message)),
                    None => CliError::failed(error),
                })?;
        let compile_seconds = start.elapsed().as_secs_f64();
        let memory = self.memory(&executable)?;
        let graph = &program.graph;
        let weights: Vec<usize> = graph.weights().map(|(index, _)| index).collect();
        let report = CompileReport::new(
            &executable.optimized_hlo().map_err(CliError::failed)?,
            &ReportInput {
                parameters: site.parameters,
                memory,
                slice_of_partition: self.mesh.slice_of_partition(),
                weight_arguments: &weights,
                clock_hz: self.chip.and_then(Chip::clock_hz),
                // No loop is emitted whose trip count the program does not tell.
                trip_count_hints: &[],
                compile_seconds,
            },
        )
        .map_err(CliError::failed)?;
        let header = ProgramHeader {
            stage: site.stage,
            payload: PayloadKind::Executable,
            payload_bytes: 0,
            program: self.program_id(site, &module.text),
            inputs: inputs(graph, &program.plan),
            outputs: outputs(graph, &program.plan),
            groups: groups
                .into_iter()
                .map(|group| Group {
                    weights: group.weights,
                    results: group.results,
                })
                .collect(),
            memory,
        };
        Ok(CompiledProgram {
            executable,
            report,
            header,
            kernels: kernel_counts(graph),
            stablehlo: module.text.clone(),
        })
    }

    fn program_id(&self, site: &Site<'_>, text: &str) -> ProgramId {
        let config = site.config;
        let flags = self.options.overrides().into_iter();
        ProgramId {
            step: site.step.name().to_owned(),
            stablehlo_sha256: Sha256::of(text).to_string(),
            compile_options_sha256: Sha256::of(self.options.to_bytes()).to_string(),
            flags: flags
                .map(|(name, value)| (name.to_owned(), value))
                .collect(),
            weights_dtype: config.weights_dtype.name().to_owned(),
            activations_dtype: config.activations_dtype.name().to_owned(),
            precision: config.precision.name().to_owned(),
            quantization: config.quantization.name().to_owned(),
        }
    }

    fn target(&self) -> Target {
        let mesh = &self.mesh;
        Target {
            name: self.name.clone(),
            num_slices: mesh.num_slices(),
            mesh: Axis::ALL
                .map(|axis| (axis.name().to_owned(), mesh.size(axis)))
                .into(),
            device_assignment: mesh.device_assignment().to_vec(),
        }
    }

    fn compile(&self, text: &str) -> Result<Executable, PjrtError> {
        match &self.compiler {
            Compiler::Topology(topology) => topology.compile(text, &self.options),
            Compiler::Here(client) => client
                .compile(text, &self.options)
                .map(|loaded| loaded.executable().clone()),
        }
    }

    fn memory(&self, executable: &Executable) -> Result<Memory, CliError> {
        let stats = executable.memory_stats().map_err(CliError::failed)?;
        let bytes = |n: i64| u64::try_from(n).unwrap_or(0);
        Ok(Memory {
            argument: bytes(stats.argument),
            output: bytes(stats.output),
            temp: bytes(stats.temp),
            code: bytes(stats.generated_code),
            peak: stats.peak.map(bytes),
            hbm_limit: self.hbm_limit,
        })
    }

    fn describe(&self) -> String {
        match self.mesh.num_slices() {
            1 => self.name.clone(),
            slices => format!("{slices} slices of {}", self.name),
        }
    }

    fn out_of_memory(&self, site: &Site<'_>, program: &Program, message: String) -> OutOfMemory {
        let Site { config, step, .. } = *site;
        let Program { graph, plan, .. } = program;
        let mesh = &self.mesh;
        let bytes_of = |wanted: fn(&InputKind) -> bool| -> u64 {
            graph
                .inputs
                .iter()
                .zip(&plan.inputs)
                .filter(|(input, _)| wanted(&input.kind))
                .map(|(input, spec)| local_bytes(&input.shape, spec, mesh))
                .sum()
        };
        let mut advice = Vec::new();
        if mesh.num_devices() > 1 && mesh.size(Axis::Fsdp) == 1 {
            advice.push(
                "splitting weights over the devices of a slice with ici_fsdp_parallelism=-1 ici_data_parallelism=1"
                    .to_owned(),
            );
        }
        if step == Step::Train && config.remat_policy == Remat::None {
            advice.push("recomputing activations with remat_policy=FULL".to_owned());
        }
        if config.weights_dtype.name() == "float32" {
            advice.push("weights_dtype=bfloat16".to_owned());
        }
        if config.per_device_batch_size > 1.0 {
            advice.push(format!(
                "a per_device_batch_size below {}",
                config.per_device_batch_size
            ));
        }
        advice.push("a larger topology, or a chip with more memory".to_owned());
        OutOfMemory {
            step: step.name(),
            stage: site.stage,
            target: self.describe(),
            needed: needed_memory(&message),
            limit: self.hbm_limit,
            weights: bytes_of(|kind| matches!(kind, InputKind::Weight(_))),
            state: bytes_of(|kind| matches!(kind, InputKind::State)),
            advice,
            message,
        }
    }
}

fn named_value(value: OptionValue) -> NamedValue {
    match value {
        OptionValue::Str(text) => NamedValue::String(text),
        OptionValue::Int(number) => NamedValue::Int64(number),
        OptionValue::IntList(numbers) => NamedValue::Int64List(numbers),
    }
}

fn local_bytes(shape: &Shape, spec: &PartitionSpec, mesh: &Mesh) -> u64 {
    let parts: usize = spec.dims().iter().map(|axes| mesh.product(axes)).product();
    (shape.bytes() / parts.max(1)) as u64
}

/// The compiler's text, where its complaint is the device's main memory. Where it is a memory inside the chip (vmem,
/// smem), one operation asks too much of it, and none of the advice on whole programs helps.
fn out_of_memory_message(error: &PjrtError) -> Option<String> {
    let PjrtError::Plugin { code, message, .. } = error else {
        return None;
    };
    let memory = *code == ErrorCode::ResourceExhausted || message.contains("Ran out of memory");
    let elsewhere = memory_space(message).is_some_and(|space| space != "hbm");
    (memory && !elsewhere).then(|| message.clone())
}

/// `Ran out of memory in memory space vmem`.
fn memory_space(message: &str) -> Option<&str> {
    static SPACE: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new(r"out of memory in memory space ([a-z_]+)").ok());
    let space = SPACE.as_ref()?.captures(message)?.get(1)?;
    Some(space.as_str())
}

/// Whether the program fits a device, where both its peak and the limit are known. The compiler refuses what does not
/// fit, where it knows the limit.
fn fits(memory: &Memory) -> Option<bool> {
    Some(memory.peak? <= memory.hbm_limit?)
}

/// `Used 20.31G of 15.75G hbm`.
fn needed_memory(message: &str) -> Option<String> {
    static USED: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new(r"Used ([0-9.]+[KMGT]) of [0-9.]+[KMGT] hbm").ok());
    Some(USED.as_ref()?.captures(message)?[1].to_owned())
}

fn slot(name: &str, shape: &Shape, spec: &PartitionSpec, alias: Option<usize>) -> Slot {
    Slot {
        name: name.to_owned(),
        dtype: shape.dtype.to_string(),
        dims: shape.dims.clone(),
        sharding: spec
            .dims()
            .iter()
            .map(|axes| axes.iter().map(|a| a.name().to_owned()).collect())
            .collect(),
        alias,
    }
}

fn inputs(graph: &Graph, plan: &ShardPlan) -> Vec<Slot> {
    let inputs = graph.inputs.iter().zip(&plan.inputs).enumerate();
    inputs
        .map(|(index, (input, spec))| {
            let alias = graph.outputs.iter().position(|o| o.alias == Some(index));
            slot(&input.name, &input.shape, spec, alias)
        })
        .collect()
}

fn outputs(graph: &Graph, plan: &ShardPlan) -> Vec<Slot> {
    let outputs = graph.outputs.iter().zip(&plan.outputs);
    outputs
        .map(|(output, spec)| {
            let shape = &graph.nodes[output.node as usize].shape;
            slot(&output.name, shape, spec, output.alias)
        })
        .collect()
}

impl Compiled {
    /// All programs, in the order in which they run.
    pub fn programs(&self) -> impl Iterator<Item = &CompiledProgram> {
        self.load.iter().chain(&self.request).chain([&self.step])
    }

    /// The bundle, and why a payload is not the executable where one is not.
    fn bundle(&self) -> Result<(Bundle, Option<String>), CliError> {
        let mut header = self.header.clone();
        let mut payload = Vec::new();
        let mut not_serialized = None;
        for (program, header) in self.programs().zip(&mut header.programs) {
            let bytes = match program.executable.serialize() {
                Ok(bytes) => bytes,
                Err(error) if error.code() == Some(ErrorCode::Unimplemented) => {
                    header.payload = PayloadKind::Stablehlo;
                    not_serialized = Some(error.to_string());
                    program.stablehlo.clone().into_bytes()
                }
                Err(error) => return Err(CliError::failed(error)),
            };
            header.payload_bytes = bytes.len() as u64;
            payload.extend(bytes);
        }
        Ok((Bundle { header, payload }, not_serialized))
    }

    /// The step's report with what surrounds it and the reports of the programs before it, as JSON.
    fn json(&self) -> Value {
        let mut value = self.step.json();
        let target = &self.header.target;
        let more = json!({
            "step": self.step.header.program.step,
            "quantization": self.step.header.program.quantization,
            "quantized": self.decisions.iter().filter(|d| d.quantized).count(),
            "topology": {
                "name": target.name,
                "num_slices": target.num_slices,
                "num_devices": target.device_assignment.len(),
                "mesh": target.mesh,
            },
            "load": {
                "runs": self.load.iter().map(CompiledProgram::runs).sum::<usize>(),
                "predicted_ms": self.load_ms(),
                "compile_seconds": self.load.iter().map(|p| p.report.compile_seconds).sum::<f64>(),
                "programs": self.load.iter().map(CompiledProgram::json).collect::<Vec<_>>(),
            },
            "request": self.request.as_ref().map(CompiledProgram::json),
            "together": {
                "compile_seconds": self.programs().map(|p| p.report.compile_seconds).sum::<f64>(),
                "code_bytes": self.programs().map(|p| p.report.memory.code).sum::<u64>(),
                "fits": self.fits(),
            },
            "seconds": {
                "setup": self.seconds.setup,
                "trace": self.seconds.trace,
                "emit": self.seconds.emit,
                "compile": self.seconds.compile,
            },
        });
        if let (Value::Object(value), Value::Object(more)) = (&mut value, more) {
            value.extend(more);
        }
        value
    }

    /// Predicted milliseconds of preparing all weights, where the compiler predicts them.
    fn load_ms(&self) -> Option<f64> {
        let of_one =
            |p: &CompiledProgram| Some(p.report.predicted_ms.as_ref()?.total * p.runs() as f64);
        let mut each = self.load.iter().map(of_one);
        // `sum` of no floats would be -0.
        each.try_fold(0.0, |sum, ms| Some(sum + ms?))
    }

    /// Whether every program fits a device, where that is known.
    fn fits(&self) -> Option<bool> {
        let each: Option<Vec<bool>> = self.programs().map(|p| fits(&p.report.memory)).collect();
        each.map(|each| each.into_iter().all(|fits| fits))
    }

    /// The reports for people: what prepares weights in a few lines, the others whole.
    fn describe(&self) -> String {
        let mut text = String::new();
        if !self.load.is_empty() {
            let runs: usize = self.load.iter().map(CompiledProgram::runs).sum();
            let predicted = match self.load_ms() {
                Some(ms) => format!("{ms:.1} ms predicted"),
                None => "time not predicted for this target".to_owned(),
            };
            text.push_str(&format!(
                "load program: {} programs run {runs} times while weights are loaded, {predicted}\n",
                self.load.len()
            ));
        }
        if let Some(request) = &self.request {
            text.push_str(&format!(
                "request program, once for each prompt\n{}",
                request.describe()
            ));
        }
        text.push_str(&format!("step program\n{}", self.step.describe()));
        text
    }
}

impl CompiledProgram {
    /// How often it runs: once for each group of weights, or once.
    fn runs(&self) -> usize {
        self.header.groups.len().max(1)
    }

    fn json(&self) -> Value {
        let mut value = json!(self.report);
        value["runs"] = json!(self.runs());
        value["kernels"] = json!(self.kernels);
        value["fits"] = json!(fits(&self.report.memory));
        value
    }

    fn describe(&self) -> String {
        let kernels: Vec<String> = self
            .kernels
            .iter()
            .map(|(kernel, count)| format!("{count} {kernel}"))
            .collect();
        match kernels.is_empty() {
            true => self.report.to_string(),
            false => format!("{}kernels           {}\n", self.report, kernels.join(", ")),
        }
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

/// Runs `compile`.
///
/// # Errors
/// As [`compile`], and when the bundle cannot be written.
pub fn run(args: &CompileArgs) -> Result<ExitCode, CliError> {
    let config = args.recipe.load_step(Verb::Compile, args.step)?;
    let path = output_path(args, &config);
    bundle::check_writable(&path).map_err(|e| match e {
        BundleError::Exists { .. } => CliError::Usage(e.to_string()),
        _ => CliError::failed(e),
    })?;
    let compiled = compile(&config, args.step)?;
    let written = write(args, &config, path, &compiled);
    // The report is told even where the bundle is lost: compiling may have taken an hour.
    let bundle = written.as_ref().ok();
    if args.json {
        let mut value = compiled.json();
        value["bundle"] = bundle.map_or(Value::Null, Written::json);
        print(&value.to_string())?;
    } else {
        let target = &compiled.header.target;
        print(&format!(
            "{} programs for {} devices: {}{}\n{}{}",
            args.step.name(),
            target.device_assignment.len(),
            target.name,
            match target.num_slices {
                1 => String::new(),
                slices => format!(", {slices} slices"),
            },
            compiled.describe(),
            bundle.map_or_else(String::new, Written::describe)
        ))?;
    }
    written.map(|_| ExitCode::SUCCESS)
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
    let (bundle, not_serialized) = compiled.bundle()?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_compilers_figure_is_found_in_its_complaint() {
        let message = "Ran out of memory in memory space hbm. Used 30.22G of 15.75G hbm. Exceeded hbm capacity by 14.47G.";
        assert_eq!(needed_memory(message).as_deref(), Some("30.22G"));
        assert_eq!(needed_memory("no figures"), None);
    }

    #[test]
    fn only_the_main_memory_is_what_a_program_does_not_fit() {
        let told = |code, message: &str| {
            out_of_memory_message(&PjrtError::Plugin {
                function: "PJRT_Compile",
                code,
                message: message.to_owned(),
            })
            .is_some()
        };
        let (exhausted, internal) = (ErrorCode::ResourceExhausted, ErrorCode::Internal);
        assert!(told(
            internal,
            "Ran out of memory in memory space hbm. Used 30.22G of 15.75G hbm."
        ));
        assert!(told(exhausted, "out of host memory"));
        for space in ["vmem", "smem"] {
            let message = format!("Ran out of memory in memory space {space} while allocating");
            assert!(!told(exhausted, &message), "{space}");
            assert!(!told(internal, &message), "{space}");
        }
        assert!(!told(internal, "another error"));
    }

    #[test]
    fn whether_a_program_fits_is_unknown_without_its_peak() {
        let fits = |peak, hbm_limit| {
            fits(&Memory {
                peak,
                hbm_limit,
                ..Memory::default()
            })
        };
        assert_eq!(fits(Some(1), Some(2)), Some(true));
        assert_eq!(fits(Some(3), Some(2)), Some(false));
        assert_eq!(fits(None, Some(2)), None);
        assert_eq!(fits(Some(1), None), None);
    }

    #[test]
    fn a_program_too_large_says_what_to_try() {
        let error = OutOfMemory {
            step: "train",
            stage: Stage::Step,
            target: "v5e-16".to_owned(),
            needed: Some("30.22G".to_owned()),
            limit: Some(16_909_328_384),
            weights: 10 << 30,
            state: 20 << 30,
            advice: vec!["one".to_owned(), "two".to_owned()],
            message: String::new(),
        };
        assert_eq!(
            error.to_string(),
            "the train program does not fit v5e-16: it needs 30.22G bytes of memory on each device, which has 15.75 GiB; \
             weights take 10.00 GiB and optimizer state 20.00 GiB of it. Try one, or two"
        );
    }
}
