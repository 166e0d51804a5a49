//! Times the phases of a program's life on the CPU plugin: trace, emit, parse and compile, one denoising step, one
//! training step.
//!
//! Tracing and emission take the quickstart's training step. Compilation and the steps take a two-level UNet of the same
//! blocks, for a sample of ten to end within minutes.

use std::error::Error;
use std::hint::black_box;
use std::time::Duration;

use criterion::Criterion;

use maxdiff::config::{Config, Verb};
use maxdiff::dtype::DType;
use maxdiff::emit::{EmitOptions, stablehlo};
use maxdiff::graph::{Graph, InputKind};
use maxdiff::host_tensor::HostTensor;
use maxdiff::pipelines::text_to_image::{DenoiseOptions, Guidance, trace_denoise};
use maxdiff::pjrt::install::{PluginKind, locate};
use maxdiff::pjrt::{NamedValue, Plugin};
use maxdiff::recipe;
use maxdiff::runtime::{Array, Program, ProgramOptions, Session, Value};
use maxdiff::shard::{LogicalAxisRules, Parallelism};
use maxdiff::train::step;

const CONFIG: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/configs/quickstart.yml");
const TWO_LEVELS: [&str; 4] = [
    "unet_config.block_out_channels=[32, 64]",
    "unet_config.down_block_types=[DownBlock2D, CrossAttnDownBlock2D]",
    "unet_config.up_block_types=[CrossAttnUpBlock2D, UpBlock2D]",
    "per_device_batch_size=8",
];
type Outcome<T> = Result<T, Box<dyn Error>>;

/// A failed iteration must not count as a fast one.
fn must<T, E: std::fmt::Display>(outcome: Result<T, E>) -> T {
    outcome.unwrap_or_else(|error| panic!("{error}"))
}

fn load(overrides: &[&str]) -> Outcome<Config> {
    let overrides: Vec<String> = overrides.iter().map(|o| (*o).to_string()).collect();
    Ok(Config::load(CONFIG.as_ref(), &overrides, Some(Verb::Lower))?.config)
}

fn train_graph(session: &Session, config: &Config) -> Outcome<Graph> {
    let derived = config.derived(1, 1)?;
    let model = recipe::model(
        config,
        recipe::data::tokenizer_for_vocab_size(config)?.as_ref(),
    )?;
    let options = recipe::step_options(
        config,
        &model,
        derived.total_train_batch_size as usize,
        derived.quantization_local_shard_count as usize,
    )?;
    let traced = step::trace(&model, &options)?;
    Ok(session.lower(&traced)?.step.graph)
}

fn denoise_graph(session: &Session, config: &Config) -> Outcome<Graph> {
    let model = recipe::model(config, None)?;
    let options = DenoiseOptions {
        tokens: model.tokens,
        batch: config.derived(1, 1)?.total_train_batch_size as usize,
        guidance: Guidance::OneBatch,
        skip_layers: Vec::new(),
        quantization: recipe::policy(config, model.family.spec(), 0)?,
    };
    let traced = trace_denoise(&model, &options)?.model;
    Ok(session.lower(&traced)?.step.graph)
}

/// One argument for each input: small weights, zero state, ones for the rest.
fn arguments(session: &Session, graph: &Graph, program: &Program) -> Outcome<Vec<Array>> {
    graph
        .inputs
        .iter()
        .zip(program.inputs())
        .map(|(input, slot)| {
            let value = |i: usize| match input.kind {
                InputKind::Weight(_) => ((i * 37 + 11) % 101) as f64 / 500.0 - 0.1,
                InputKind::Data if input.shape.dtype == DType::F32 => 0.5,
                InputKind::Data | InputKind::State => 0.0,
            };
            let values: Vec<f64> = (0..input.shape.count()).map(value).collect();
            let tensor = HostTensor::from_f64(input.shape.clone(), &values)?;
            Ok(session.put(&tensor, &slot.spec)?)
        })
        .collect()
}

fn main() -> Outcome<()> {
    let plugin = Plugin::load(&locate(PluginKind::Cpu)?.library)?;
    let options = [("cpu_device_count".to_string(), NamedValue::Int64(1))];
    let session = Session::open(
        &plugin,
        &options,
        &Parallelism::default(),
        LogicalAxisRules::default(),
    )?;
    let mut criterion = Criterion::default()
        .sample_size(10)
        .measurement_time(Duration::from_secs(10))
        .configure_from_args();
    for (name, overrides) in [
        ("float32", &[] as &[&str]),
        ("int8", &["quantization=int8"]),
    ] {
        let config = load(overrides)?;
        let graph = train_graph(&session, &config)?;
        criterion.bench_function(&format!("trace/{name}"), |bench| {
            bench.iter(|| black_box(must(train_graph(&session, &config)).nodes.len()));
        });
        criterion.bench_function(&format!("emit/{name}"), |bench| {
            bench.iter(|| black_box(stablehlo(&graph, "train", &EmitOptions::default()).len()));
        });
        let small = load(&[overrides, &TWO_LEVELS].concat())?;
        for (step, graph) in [
            ("denoise", denoise_graph(&session, &small)?),
            ("train", train_graph(&session, &small)?),
        ] {
            let compile = || Program::compile(&session, &graph, step, &ProgramOptions::default());
            criterion.bench_function(&format!("compile/{step}/{name}"), |bench| {
                bench.iter(|| drop(must(compile())));
            });
            let program = compile()?;
            let arrays = arguments(&session, &graph, &program)?;
            let run = || program.run(arrays.iter().map(Value::Borrow).collect());
            run()?;
            criterion.bench_function(&format!("step/{step}/{name}"), |bench| {
                bench.iter(|| drop(must(run())));
            });
        }
    }
    criterion.final_summary();
    Ok(())
}
