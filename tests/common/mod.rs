//! What the suites share.

mod golden;
mod plugins;
mod program;
mod transformers;

pub use golden::*;
pub use program::*;
pub use transformers::*;

use maxdiff::graph::{Builder, Graph, InputKind, Tensor};
use maxdiff::host_tensor::HostTensor;
use maxdiff::models::unet::INT8_FLOAT_LAYERS;
use maxdiff::pjrt::install::{self, PluginKind};
use maxdiff::pjrt::{Client, NamedValue, OptionValue, Plugin};
use maxdiff::quant::{Policy, annotate, lower};
use maxdiff::runtime::{Array, ExecutableCache, Program, ProgramOptions, Session, Value};
use maxdiff::shard::{LogicalAxisRules, Parallelism};
use std::collections::BTreeMap;

/// Where compiled programs are kept between the tests: beside what Cargo builds, not in the user's cache. A program is
/// compiled once in a run of all tests, and loaded in the next run.
const PROGRAMS: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/programs");

/// Has a command keep its compiled programs for the other tests.
pub fn keep_programs() -> String {
    format!("jax_cache_dir={PROGRAMS}")
}

/// The CPU plugin. Fails when it is not installed.
pub fn cpu_plugin() -> Plugin {
    let path = plugins::plugin_path(PluginKind::Cpu);
    Plugin::load(&path).unwrap_or_else(|error| panic!("{error}"))
}

/// The TPU plugin, for compiling ahead of time. Fails when it is not installed.
pub fn tpu_plugin() -> Plugin {
    maxdiff::pjrt::prepare_process().unwrap_or_else(|error| panic!("{error}"));
    let path = plugins::plugin_path(PluginKind::Tpu);
    Plugin::load(&path).unwrap_or_else(|error| panic!("{error}"))
}

/// Whether kernels run on this machine. Where they do not the tests of kernels prove nothing, so they fail, unless
/// `MAXDIFF_ALLOW_NO_KERNELS=1` says that this is known.
pub fn kernels_run() -> bool {
    let kernels = cpu_plugin().kernels();
    let is_known = std::env::var("MAXDIFF_ALLOW_NO_KERNELS").is_ok_and(|value| value == "1");
    assert!(
        kernels.are_used() || is_known,
        "kernels do not run on this machine: {kernels:?}; `maxdiff-rs doctor` says why, MAXDIFF_ALLOW_NO_KERNELS=1 \
         lets the tests of kernels pass without"
    );
    kernels.are_used()
}

/// A client of the CPU plugin with this many virtual devices.
pub fn cpu_client(devices: i64) -> Client {
    let options = [("cpu_device_count".to_string(), NamedValue::Int64(devices))];
    Client::create(&cpu_plugin(), &options).unwrap_or_else(|error| panic!("{error}"))
}

/// A session on virtual CPU devices, all on the mesh's data axis.
pub fn cpu_session(devices: i64) -> Session {
    let options = [("cpu_device_count".to_string(), NamedValue::Int64(devices))];
    Session::open(
        &cpu_plugin(),
        &options,
        &Parallelism::default(),
        LogicalAxisRules::default(),
    )
    .unwrap_or_else(|error| panic!("{error}"))
}

/// A session on one CPU device that compiles as [`without_optimizations`]. For tests of what programs compute under wide
/// bounds, and of what differs in the graph alone; operations, layers, kernels and one family's models are compiled as a
/// user's are.
pub fn unoptimized_session() -> Session {
    cpu_session(1)
        .with_compiler_option("xla_backend_optimization_level", OptionValue::Int(0))
        .with_compiler_option("xla_cpu_use_fusion_emitters", OptionValue::Bool(false))
        .with_compiler_option("xla_llvm_disable_expensive_passes", OptionValue::Bool(true))
        .with_compiler_option("xla_cpu_parallel_codegen_split_count", OptionValue::Int(1))
}

/// The same, keeping its compiled programs for the other tests.
pub fn keeping_session() -> Session {
    let mut session = unoptimized_session();
    let cache = ExecutableCache::new(PROGRAMS, ExecutableCache::MAX_BYTES);
    session
        .keep_programs(cache)
        .unwrap_or_else(|error| panic!("{error}"));
    session
}

/// The values of a program's inputs, by their names, on a session's devices.
pub fn put_state(
    session: &Session,
    program: &Program,
    state: &BTreeMap<String, HostTensor>,
) -> Vec<Array> {
    let slots = program.inputs().iter();
    slots
        .map(|slot| session.put(&state[&slot.name], &slot.spec).unwrap())
        .collect()
}

/// The graph's outputs, compiled and run on a session's devices.
pub fn run_on(session: &Session, graph: &Graph, inputs: &[HostTensor]) -> Vec<HostTensor> {
    let program = Program::compile(session, graph, "test", &ProgramOptions::default())
        .unwrap_or_else(|error| panic!("{error}"));
    let arrays: Vec<Array> = inputs
        .iter()
        .zip(program.inputs())
        .map(|(tensor, slot)| session.put(tensor, &slot.spec).unwrap())
        .collect();
    let arguments = arrays.iter().map(Value::Borrow).collect();
    program
        .run(arguments)
        .unwrap_or_else(|error| panic!("{error}"))
        .iter()
        .map(|array| array.to_host(session.mesh()).unwrap())
        .collect()
}

/// The graph of layers under the scope `m`, quantized to int8 where asked, with the quantization lowered.
pub fn lowered(b: Builder, int8: bool) -> Graph {
    if int8 {
        let policy = Policy::aqt_int8("m/", 1, Vec::new(), &INT8_FLOAT_LAYERS).unwrap();
        annotate(&b, &policy).unwrap();
    }
    lower(&b.finish()).unwrap()
}

/// Weights of the traced model as tensors of `b`, in argument order.
pub fn weights(b: &Builder) -> Vec<(String, Tensor)> {
    let declared = b.with_graph(|g| g.weights().map(|(_, w)| w.clone()).collect::<Vec<_>>());
    declared
        .into_iter()
        .map(|w| (w.key().to_string(), b.declare(w).unwrap()))
        .collect()
}

/// The checkpoint must have exactly the model's weights, in name and shape.
pub fn assert_same_weights(b: &Builder, checkpoint: &Golden) {
    let named = weights(b).into_iter().map(|(key, w)| (key, b.dims(w)));
    let mut ours: Vec<(String, Vec<usize>)> = named.collect();
    ours.sort();
    assert_eq!(ours, checkpoint.shapes());
}

/// The graph's inputs: the checkpoint's weights and the recorded inputs.
pub fn recorded(graph: &Graph, checkpoint: &Golden, io: &Golden) -> Vec<HostTensor> {
    let inputs = graph.inputs.iter();
    inputs
        .map(|input| match input.kind {
            InputKind::Weight(_) => checkpoint.tensor(input.key(), &input.shape),
            _ => io.tensor(&format!("in/{}", input.name), &input.shape),
        })
        .collect()
}

/// The graph's outputs on the checkpoint's weights and the recorded inputs.
pub fn run_recorded(
    session: &Session,
    graph: &Graph,
    checkpoint: &Golden,
    io: &Golden,
) -> Vec<HostTensor> {
    run_on(session, graph, &recorded(graph, checkpoint, io))
}
