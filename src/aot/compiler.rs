//! Compilers of devices.

use std::collections::BTreeMap;
use std::time::Instant;

use crate::backend::{Backend, kernel_counts};
use crate::bundle::{Group, Header, PayloadKind, PluginId, ProgramHeader, ProgramId, Target};
use crate::emit::{LoadGroup, Module, Modules};
use crate::footprint::{self, Fit, OutOfMemory};
use crate::lowering::{self, LoweredProgram, Stage, Traced, lower};
use crate::pjrt::install::{self, Installed};
use crate::pjrt::{
    Client, CompileOptions, Executable, NamedValue, OptimizationLevel, PjrtError, Plugin, Topology,
    prepare_process,
};
use crate::report::{CompileReport, Memory, ReportInput, kernel_calls, kernel_calls_before};
use crate::runtime::{Session, compile_options, describe};
use crate::shard::{Axis, LogicalAxisRules, Mesh, Parallelism};
use crate::topology::{Accelerator, Chip};
use crate::util::hash::Sha256;

use super::error::{needed_memory, out_of_memory_message};
use super::simulations::Simulations;
use super::{AotError, Compiled, CompiledProgram, Options, Progress, Seconds, Simulator, header};

/// The compiler for a topology or for the devices here, with the properties of these devices.
pub struct Compiler {
    plugin: CompilerPlugin,
    backend: Backend,
    /// The name of the devices: the accelerator's, or the kind of those here.
    name: String,
    plugin_id: PluginId,
    chip: Option<Chip>,
    mesh: Mesh,
    rules: LogicalAxisRules,
    options: CompileOptions,
    /// Bytes of memory of one device.
    hbm_limit: Option<u64>,
    simulator: Option<Simulator>,
}

enum CompilerPlugin {
    Topology(Topology),
    Client(Client),
}

/// Which program is compiled.
#[derive(Clone, Copy)]
struct Site<'a> {
    options: &'a Options,
    stage: Stage,
    /// Number of parameters of the whole model.
    parameters: u64,
}

impl Compiler {
    /// The compiler of the installed plugin for `slices` slices of `accelerator`, none of which need be here.
    ///
    /// # Errors
    /// When the parallelism does not fit the devices, or the plugin is not installed or does not know the topology.
    pub fn for_topology(
        accelerator: Accelerator,
        slices: i64,
        parallelism: &Parallelism,
        rules: LogicalAxisRules,
    ) -> Result<Compiler, AotError> {
        let options = accelerator.create_options(slices)?;
        let (topology, installed) = open(&accelerator, &options)?;
        let devices: Vec<_> = topology.devices().iter().map(describe).collect();
        let mesh = Mesh::new(parallelism, &devices)?;
        Ok(Compiler::of(accelerator, topology, installed, mesh, rules))
    }

    /// The compiler for the first device of a slice of `accelerator`, which need not be here.
    ///
    /// # Errors
    /// When the plugin is not installed or does not know the topology.
    pub fn for_one_device(accelerator: Accelerator) -> Result<Compiler, AotError> {
        let (topology, installed) = open(&accelerator, &accelerator.create_options(1)?)?;
        let devices: Vec<_> = topology.devices().iter().take(1).map(describe).collect();
        let mesh = Mesh::new(&Parallelism::default(), &devices)?;
        let rules = LogicalAxisRules::default();
        Ok(Compiler::of(accelerator, topology, installed, mesh, rules))
    }

    fn of(
        accelerator: Accelerator,
        topology: Topology,
        installed: Installed,
        mesh: Mesh,
        rules: LogicalAxisRules,
    ) -> Compiler {
        let backend = accelerator.backend();
        Compiler {
            plugin_id: PluginId {
                platform: topology.platform_name().to_owned(),
                version: installed.version,
                build: topology.platform_version().to_owned(),
                sha256: installed.sha256,
            },
            hbm_limit: bytes(topology.device_memory_limit())
                .or_else(|| accelerator.chip.device_memory_bytes()),
            plugin: CompilerPlugin::Topology(topology),
            backend,
            name: accelerator.name,
            chip: Some(accelerator.chip),
            options: compile_options(&mesh, backend)
                .with_cuda_data_dir(installed.cuda_data_dir.as_deref()),
            mesh,
            rules,
            simulator: None,
        }
    }

    /// The compiler for the devices of `session`.
    ///
    /// # Errors
    /// When the folder of plugins cannot be read.
    pub fn for_session(session: &Session) -> Result<Compiler, AotError> {
        let client = session.client().clone();
        let library = client.plugin().path();
        let installed = install::list()?
            .into_iter()
            .find(|i| i.library.canonicalize().is_ok_and(|path| path == library));
        let (version, sha256) = installed.map_or_else(Default::default, |i| (i.version, i.sha256));
        let device = client.devices().first();
        let name = device.map_or_else(String::new, |d| d.description().kind.clone());
        let stats = device.and_then(|d| d.memory_stats().ok());
        Ok(Compiler {
            plugin_id: PluginId {
                platform: client.platform_name().to_owned(),
                version,
                build: client.platform_version().to_owned(),
                sha256,
            },
            mesh: session.mesh().clone(),
            rules: session.rules().clone(),
            options: session.compile_options().clone(),
            backend: session.backend(),
            chip: Chip::from_device_kind(&name),
            hbm_limit: bytes(stats.and_then(|stats| stats.bytes_limit)),
            plugin: CompilerPlugin::Client(client),
            name,
            simulator: None,
        })
    }

    /// Compiles what it can without this program's kernels.
    pub fn without_kernels(self) -> Compiler {
        Compiler {
            backend: self.backend.without_kernels(),
            ..self
        }
    }

    /// Compiles with this much effort, in place of the plugin's own choice.
    pub fn with_optimization_level(self, level: OptimizationLevel) -> Compiler {
        Compiler {
            options: self.options.optimization_level(level),
            ..self
        }
    }

    /// Also predicts the time of this program's TPU kernels, for which the compiler has no estimate.
    pub fn with_simulator(self, simulator: Simulator) -> Compiler {
        Compiler {
            simulator: Some(simulator),
            ..self
        }
    }

    /// The devices, by the axes of the parallelism.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// The kind of the devices, if it is known.
    pub fn chip(&self) -> Option<Chip> {
        self.chip
    }

    /// Lowers a program that was traced for as many devices as [`Compiler::mesh`] has, and compiles what it becomes.
    /// `tell` gets each program before it is compiled.
    ///
    /// # Errors
    /// When the program does not fit the mesh, or the compiler refuses it; [`AotError::OutOfMemory`] when a program
    /// does not fit a device's memory.
    pub fn compile(
        &self,
        traced: &Traced,
        options: &Options,
        tell: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Compiled, AotError> {
        let start = Instant::now();
        let target = lowering::Options {
            mesh: &self.mesh,
            rules: &self.rules,
        };
        let lowered = lower(traced, self.backend, &target)?;
        let step = &lowered.step;
        step.plan.check_batch(&step.graph, &self.mesh)?;
        let target = self.devices();
        let fit = self.fit(&target, options);
        let check = |stage, program| {
            let checked = fit.check(&title(options, stage), program);
            checked.map_err(AotError::OutOfMemory)
        };
        let footprint = check(Stage::Step, step)?;
        for program in &lowered.load {
            check(Stage::Load, program)?;
        }
        if let Some(program) = &lowered.request {
            check(Stage::Request, program)?;
        }
        tell(Progress::Fits { step: &footprint });
        let lower = start.elapsed().as_secs_f64();
        let slower = lowered.slower.clone();

        let start = Instant::now();
        let modules = Modules::new(lowered, &self.mesh, options.precision);
        let emit = start.elapsed().as_secs_f64();

        let start = Instant::now();
        let parameters = traced.graph.parameter_count() as u64;
        let programs = 1 + modules.load.len() + usize::from(modules.request.is_some());
        let mut number = 0;
        let mut program = |stage, module: Module, groups: Vec<LoadGroup>| {
            number += 1;
            tell(Progress::Compiling {
                stage,
                number,
                programs,
            });
            let site = Site {
                options,
                stage,
                parameters,
            };
            self.program(site, module, groups)
        };
        // The largest first: what does not fit is found soonest.
        let step = program(Stage::Step, modules.step, Vec::new())?;
        let load = modules.load.into_iter().enumerate().map(|(at, module)| {
            let groups = modules.groups.iter().filter(|group| group.module == at);
            program(Stage::Load, module, groups.cloned().collect())
        });
        let load = load.collect::<Result<Vec<_>, _>>()?;
        let request = modules.request;
        let request = request.map(|module| program(Stage::Request, module, Vec::new()));
        let request = request.transpose()?;
        let all = load.iter().chain(&request).chain([&step]);
        let header = Header {
            plugin: self.plugin_id.clone(),
            target: self.target(),
            programs: all.map(|program| program.header.clone()).collect(),
        };
        Ok(Compiled {
            load,
            request,
            step,
            footprint,
            decisions: traced.decisions.clone(),
            slower,
            header,
            seconds: Seconds {
                lower,
                emit,
                compile: start.elapsed().as_secs_f64(),
            },
        })
    }

    /// Compiles one module and reports on it.
    fn program(
        &self,
        site: Site<'_>,
        mut module: Module,
        groups: Vec<LoadGroup>,
    ) -> Result<CompiledProgram, AotError> {
        footprint::log(&module.program, &self.mesh, &self.rules);
        let simulations = self.simulations(&module.program);
        let start = Instant::now();
        let executable = module
            .compile(&self.mesh, |text| self.executable(text))
            .map_err(|error| self.compile_error(site, &module.program, error))?;
        let program = &module.program;
        let graph = &program.graph;
        let compile_seconds = start.elapsed().as_secs_f64();
        let memory = self.memory(&executable)?;
        let weights: Vec<usize> = graph.weights().map(|(index, _)| index).collect();
        let hlo = executable.optimized_hlo()?;
        let kernel_cycles = match simulations {
            Some(simulations) => simulations.finish(kernel_calls(&hlo)?),
            None => BTreeMap::new(),
        };
        let report = CompileReport::new(
            &hlo,
            &ReportInput {
                parameters: site.parameters,
                memory,
                slice_of_partition: self.mesh.slice_of_partition(),
                weight_arguments: &weights,
                clock_hz: self.chip.and_then(Chip::clock_hz),
                // No loop is emitted whose trip count the program does not tell.
                trip_count_hints: &[],
                kernel_cycles: &kernel_cycles,
                compile_seconds,
            },
        )?;
        let groups = groups.into_iter().map(|group| Group {
            weights: group.weights,
            results: group.results,
        });
        let header = ProgramHeader {
            stage: site.stage,
            payload: PayloadKind::Executable,
            payload_bytes: 0,
            program: self.program_id(site.options, &module.text),
            inputs: header::inputs(graph, &program.plan),
            outputs: header::outputs(graph, &program.plan),
            groups: groups.collect(),
            memory,
        };
        Ok(CompiledProgram {
            executable,
            report,
            header,
            kernels: kernel_counts(graph),
            stablehlo: module.text,
        })
    }

    /// Simulates the program's kernels while it is compiled, which takes one processor for minutes at first.
    fn simulations(&self, program: &LoweredProgram) -> Option<Simulations> {
        let (simulator, chip) = (self.simulator.clone()?, self.chip?);
        let calls = kernel_calls_before(&program.graph, program.plan.calls.as_ref());
        let compiler = match &self.plugin {
            CompilerPlugin::Topology(topology) => topology.platform_version(),
            CompilerPlugin::Client(client) => client.platform_version(),
        };
        let compiler = compiler.to_owned();
        Some(Simulations::start(simulator, compiler, chip, calls))
    }

    fn executable(&self, text: &str) -> Result<Executable, PjrtError> {
        match &self.plugin {
            CompilerPlugin::Topology(topology) => topology.compile(text, &self.options),
            CompilerPlugin::Client(client) => client
                .compile(text, &self.options)
                .map(|loaded| loaded.executable().clone()),
        }
    }

    fn memory(&self, executable: &Executable) -> Result<Memory, PjrtError> {
        let stats = executable.memory_stats()?;
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

    fn program_id(&self, options: &Options, text: &str) -> ProgramId {
        let flags = self.options.overrides().into_iter();
        ProgramId {
            step: options.step.to_owned(),
            stablehlo_sha256: Sha256::of(text).to_string(),
            compile_options_sha256: Sha256::of(self.options.to_bytes()).to_string(),
            flags: flags
                .map(|(name, value)| (name.to_owned(), value))
                .collect(),
            weights_dtype: options.weights_dtype.to_owned(),
            activations_dtype: options.activations_dtype.to_owned(),
            precision: options.precision.name().to_owned(),
            quantization: options.quantization.to_owned(),
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

    /// The compiler's error for a program.
    fn compile_error(
        &self,
        site: Site<'_>,
        program: &LoweredProgram,
        error: PjrtError,
    ) -> AotError {
        let Some(message) = out_of_memory_message(&error) else {
            return error.into();
        };
        let target = self.devices();
        let title = title(site.options, site.stage);
        let needed = needed_memory(message).map(|needed| format!("{needed} bytes"));
        let fit = self.fit(&target, site.options);
        AotError::OutOfMemory(Box::new(OutOfMemory {
            message: message.to_owned(),
            ..fit.refusal(&title, program, needed)
        }))
    }

    /// The devices in messages.
    fn devices(&self) -> String {
        match self.mesh.num_slices() {
            1 => self.name.clone(),
            slices => format!("{slices} slices of {}", self.name),
        }
    }

    fn fit<'a>(&'a self, target: &'a str, options: &'a Options) -> Fit<'a> {
        Fit {
            mesh: &self.mesh,
            rules: &self.rules,
            target,
            limit: self.hbm_limit,
            advice: &options.memory_advice,
        }
    }
}

/// A program in messages.
fn title(options: &Options, stage: Stage) -> String {
    let step = options.step;
    match stage {
        Stage::Load => format!("the program that prepares weights for the {step} program"),
        Stage::Request => format!("the request part of the {step} program"),
        Stage::Step => format!("the {step} program"),
    }
}

/// The topology of an accelerator, with the plugin that it is of.
fn open(
    accelerator: &Accelerator,
    options: &[(String, NamedValue)],
) -> Result<(Topology, Installed), AotError> {
    // A mistake in the configuration is told before the plugin is asked for: the message is the shorter way.
    let installed = install::locate(accelerator.platform.plugin())?;
    prepare_process()?;
    let plugin = Plugin::load(&installed.library)?;
    let topology = Topology::create(&plugin, accelerator.pjrt_topology_name(), options)?;
    Ok((topology, installed))
}

/// What compiles StableHLO modules for one device of `accelerator`, or fails where the compiler refuses one.
///
/// # Errors
/// When the plugin is missing.
pub fn compiler_for_one(
    accelerator: &Accelerator,
) -> Result<impl Fn(&str) -> Result<Executable, AotError>, AotError> {
    let (topology, installed) = open(accelerator, &accelerator.create_options(1)?)?;
    let options = CompileOptions::new(1, 1).with_cuda_data_dir(installed.cuda_data_dir.as_deref());
    Ok(move |stablehlo: &str| Ok(topology.compile(stablehlo, &options)?))
}

fn bytes(told: Option<i64>) -> Option<u64> {
    told.and_then(|bytes| u64::try_from(bytes).ok())
}
