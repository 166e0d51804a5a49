//! Compiled programs and how they run.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::time::Instant;

use crate::backend::{Backend, kernel_counts};
use crate::emit::{DotPrecision, Module};
use crate::footprint;
use crate::graph::Graph;
use crate::lowering;
use crate::pjrt::{
    Arg, CompileOptions, DeviceAssignment, Executable, LoadedExecutable, OptionValue,
};
use crate::shape::Shape;
use crate::shard::{Mesh, PartitionSpec};

use super::{Array, RuntimeError, Session};

/// The options of a compilation, beside the session.
#[derive(Clone, Debug, Default)]
pub struct ProgramOptions {
    pub precision: DotPrecision,
}

/// Seconds spent on making a program.
#[derive(Clone, Copy, Debug, Default)]
pub struct Timings {
    pub emit: f64,
    /// Compiling it, or loading it from the cache.
    pub compile: f64,
    pub from_cache: bool,
}

/// One argument or result of a program.
#[derive(Clone, Debug)]
pub struct Slot {
    pub name: String,
    pub shape: Shape,
    pub spec: PartitionSpec,
    /// Whether it is a weight, or computed from weights alone.
    pub weight: bool,
}

impl Slot {
    /// A weight's key in its checkpoint: the name without the model's prefix.
    pub fn key(&self) -> &str {
        self.name
            .rsplit_once('/')
            .map_or(&self.name, |(_, key)| key)
    }
}

/// An argument: borrowed, or given up so that its memory may hold a result.
pub enum Value<'a> {
    Borrow(&'a Array),
    Donate(Array),
}

impl Value<'_> {
    pub(super) fn array(&self) -> &Array {
        match self {
            Value::Borrow(array) => array,
            Value::Donate(array) => array,
        }
    }
}

/// A compiled program on a session's devices.
pub struct Program {
    name: String,
    executable: LoadedExecutable,
    inputs: Vec<Slot>,
    outputs: Vec<Slot>,
    kernels: BTreeMap<&'static str, usize>,
    timings: Timings,
}

/// Compile options of a program for `backend`, partitioned over `mesh`; [`Session::compile_options`] adds what the
/// session's own compiler needs.
pub fn compile_options(mesh: &Mesh, backend: Backend) -> CompileOptions {
    let options = CompileOptions::new(1, mesh.num_devices() as u32);
    let options = options.device_assignment(&DeviceAssignment::partitions(
        mesh.device_assignment().to_vec(),
    ));
    let switches = backend.compiler_switches().iter();
    switches.fold(options, |options, (name, value)| {
        options.set(*name, OptionValue::String((*value).to_owned()))
    })
}

impl Program {
    /// Compiles a module, or loads what an earlier compilation of the same text left in the session's cache.
    pub(super) fn of_module(
        session: &Session,
        mut module: Module,
    ) -> Result<Program, RuntimeError> {
        footprint::log(&module.program, &session.mesh, &session.rules);
        let start = Instant::now();
        let (executable, from_cache) =
            module.compile(&session.mesh, |text| session.executable(text))?;
        let compile = start.elapsed().as_secs_f64();
        let Module {
            program,
            text,
            seconds,
            ..
        } = module;
        let lowering::LoweredProgram { name, graph, plan } = program;
        let kernels = kernel_counts(&graph);
        tracing::debug!(
            "{name}: {} bytes of StableHLO in {seconds:.3} s, {} in {compile:.3} s",
            text.len(),
            if from_cache { "loaded" } else { "compiled" },
        );
        let inputs = graph
            .inputs
            .iter()
            .zip(plan.inputs)
            .map(|(input, spec)| Slot {
                name: input.name.clone(),
                shape: input.shape.clone(),
                spec,
                weight: input.is_weight(),
            })
            .collect();
        let outputs = graph
            .outputs
            .iter()
            .zip(plan.outputs)
            .map(|(output, spec)| Slot {
                name: output.name.clone(),
                shape: graph.nodes[output.node as usize].shape.clone(),
                spec,
                weight: false,
            })
            .collect();
        Ok(Program {
            name,
            executable,
            inputs,
            outputs,
            kernels,
            timings: Timings {
                emit: seconds,
                compile,
                from_cache,
            },
        })
    }

    /// Compiles the one program of a training step.
    ///
    /// # Errors
    /// The compiler's, and those of lowering.
    pub fn of_step(
        session: &Session,
        step: &lowering::LoweredProgram,
        options: &ProgramOptions,
    ) -> Result<Program, RuntimeError> {
        let module = Module::new(step.clone(), &session.mesh, options.precision);
        Program::of_module(session, module)
    }

    /// Compiles a graph as one program, with no stages and no kernels.
    ///
    /// # Errors
    /// The compiler's, and those of the sharding rules.
    pub fn compile(
        session: &Session,
        graph: &Graph,
        name: &str,
        options: &ProgramOptions,
    ) -> Result<Program, RuntimeError> {
        let program =
            lowering::LoweredProgram::whole(name, graph, session.backend(), &session.lowering())?;
        let module = Module::new(program, &session.mesh, options.precision);
        Program::of_module(session, module)
    }

    pub fn inputs(&self) -> &[Slot] {
        &self.inputs
    }

    pub fn outputs(&self) -> &[Slot] {
        &self.outputs
    }

    /// How often each kernel is called.
    pub fn kernels(&self) -> &BTreeMap<&'static str, usize> {
        &self.kernels
    }

    pub fn timings(&self) -> Timings {
        self.timings
    }

    /// The plugin's description of the compiled program.
    pub fn executable(&self) -> &Executable {
        self.executable.executable()
    }

    /// Starts the program. Results may be used at once; reading one waits for it.
    ///
    /// # Errors
    /// When arguments do not fit the program, or the plugin refuses them.
    pub fn run(&self, arguments: Vec<Value<'_>>) -> Result<Vec<Array>, RuntimeError> {
        if arguments.len() != self.inputs.len() {
            return Err(RuntimeError::ArgumentCount {
                program: self.name.clone(),
                expected: self.inputs.len(),
                found: arguments.len(),
            });
        }
        let devices = self.executable.devices().len();
        let mut lists: Vec<Vec<Arg<'_>>> = (0..devices)
            .map(|_| Vec::with_capacity(arguments.len()))
            .collect();
        for (argument, slot) in arguments.into_iter().zip(&self.inputs) {
            let shape = &argument.array().shape;
            if *shape != slot.shape {
                return Err(RuntimeError::Argument {
                    program: self.name.clone(),
                    name: slot.name.clone(),
                    expected: slot.shape.clone(),
                    found: shape.clone(),
                });
            }
            match argument {
                Value::Borrow(array) => {
                    for (list, part) in lists.iter_mut().zip(&array.parts) {
                        list.push(Arg::Borrow(part));
                    }
                }
                Value::Donate(array) => {
                    for (list, part) in lists.iter_mut().zip(array.parts) {
                        list.push(Arg::Donate(part));
                    }
                }
            }
        }
        let execution = self.executable.execute(lists)?;
        let mut by_device: Vec<_> = execution.wait()?.into_iter().map(Vec::into_iter).collect();
        Ok(self
            .outputs
            .iter()
            .map(|slot| Array {
                shape: slot.shape.clone(),
                spec: slot.spec.clone(),
                parts: by_device.iter_mut().filter_map(Iterator::next).collect(),
            })
            .collect())
    }

    /// Runs the program on arguments by name. It takes `state` over: what its first results replace, in their order.
    ///
    /// # Errors
    /// When neither `state` nor `lookup` has an input, and as [`Program::run`].
    pub fn call<'a>(
        &self,
        lookup: &dyn Fn(&str) -> Option<&'a Array>,
        state: Vec<Array>,
    ) -> Result<Vec<Array>, RuntimeError> {
        let outputs = self.outputs.iter().map(|slot| slot.name.as_str());
        let mut state: HashMap<&str, Array> = outputs.zip(state).collect();
        let arguments = self
            .inputs
            .iter()
            .map(|slot| match state.remove(slot.name.as_str()) {
                Some(array) => Ok(Value::Donate(array)),
                None => lookup(&slot.name).map(Value::Borrow).ok_or_else(|| {
                    RuntimeError::MissingInput {
                        program: self.name.clone(),
                        name: slot.name.clone(),
                    }
                }),
            })
            .collect::<Result<Vec<_>, _>>()?;
        self.run(arguments)
    }
}
