//! Times the whole training step of variants of a configuration on the CPU plugin, in turns.
//!
//! `cargo bench --bench steps -- CONFIG.yml [--rounds N] [--variant "key=value key=value"]... [key=value]...`

use std::error::Error;
use std::time::Instant;

use maxdiff::backend::kernel_counts;
use maxdiff::config::{Config, Verb};
use maxdiff::dtype::DType;
use maxdiff::graph::InputKind;
use maxdiff::host_tensor::HostTensor;
use maxdiff::lowering::Traced;
use maxdiff::pjrt::install::{PluginKind, locate};
use maxdiff::pjrt::{NamedValue, Plugin};
use maxdiff::recipe;
use maxdiff::runtime::{Array, Program, ProgramOptions, Session, Value};
use maxdiff::shard::{LogicalAxisRules, Parallelism};
use maxdiff::train::step;

/// A compiled step and the arguments of its next run.
struct Running {
    label: String,
    program: Program,
    aliases: Vec<Option<usize>>,
    arguments: Vec<Option<Array>>,
    seconds: Vec<f64>,
}

impl Running {
    fn new(session: &Session, label: String, traced: &Traced) -> Result<Running, Box<dyn Error>> {
        let step = session.lower(traced)?.step;
        let program = Program::of_step(session, &step, &ProgramOptions::default())?;
        let graph = &step.graph;
        let calls: usize = kernel_counts(graph).values().sum();
        let mut state = 1u64;
        let mut arguments = Vec::new();
        for (input, slot) in graph.inputs.iter().zip(program.inputs()) {
            let values: Vec<f64> = (0..input.shape.count())
                .map(|_| {
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    let unit = (state >> 33) as f64 / (1u64 << 31) as f64 - 0.5;
                    match input.kind {
                        InputKind::Weight(_) => unit * 0.2,
                        InputKind::Data if input.shape.rank() == 0 => 1e-4,
                        InputKind::Data if input.shape.dtype.is_float() => unit * 2.0,
                        InputKind::Data if input.shape.dtype == DType::U32 => unit * 1e9 + 1e9,
                        InputKind::Data | InputKind::State => 0.0,
                    }
                })
                .collect();
            let tensor = HostTensor::from_f64(input.shape.clone(), &values)?;
            arguments.push(Some(session.put(&tensor, &slot.spec)?));
        }
        println!(
            "{label}: {} nodes, {calls} of them kernels, compiled in {:.1} s",
            graph.nodes.len(),
            program.timings().compile
        );
        Ok(Running {
            label,
            aliases: graph.outputs.iter().map(|o| o.alias).collect(),
            program,
            arguments,
            seconds: Vec::new(),
        })
    }

    fn step(&mut self) -> Result<(), Box<dyn Error>> {
        let start = Instant::now();
        let taken: Vec<Option<Array>> = (0..self.arguments.len())
            .map(|i| {
                if self.aliases.contains(&Some(i)) {
                    self.arguments[i].take()
                } else {
                    None
                }
            })
            .collect();
        let mut values = Vec::new();
        for (taken, kept) in taken.into_iter().zip(&self.arguments) {
            values.push(match (taken, kept) {
                (Some(array), _) => Value::Donate(array),
                (None, Some(array)) => Value::Borrow(array),
                (None, None) => return Err("an argument was lost".into()),
            });
        }
        let results = self.program.run(values)?;
        for (result, alias) in results.into_iter().zip(&self.aliases) {
            if let Some(alias) = alias {
                self.arguments[*alias] = Some(result);
            }
        }
        self.seconds.push(start.elapsed().as_secs_f64());
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut rounds = 10;
    let mut shared = Vec::new();
    let mut variants: Vec<Vec<String>> = Vec::new();
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--bench" => {}
            "--rounds" => rounds = args.next().ok_or("--rounds needs a number")?.parse()?,
            "--variant" => variants.push(
                args.next()
                    .ok_or("--variant needs overrides")?
                    .split_whitespace()
                    .map(String::from)
                    .collect(),
            ),
            _ => shared.push(arg),
        }
    }
    if shared.is_empty() {
        return Err("name a configuration file".into());
    }
    let path = shared.remove(0);
    if variants.is_empty() {
        variants.push(Vec::new());
    }
    let plugin = Plugin::load(&locate(PluginKind::Cpu)?.library)?;
    let options = [("cpu_device_count".to_string(), NamedValue::Int64(1))];
    let session = Session::open(
        &plugin,
        &options,
        &Parallelism::default(),
        LogicalAxisRules::default(),
    )?;
    let mut programs = Vec::new();
    for variant in variants {
        let overrides = [shared.as_slice(), &variant].concat();
        let loaded = Config::load(path.as_ref(), &overrides, Some(Verb::Lower))?;
        let derived = loaded.config.derived(1, 1)?;
        let model = recipe::model(
            &loaded.config,
            recipe::data::tokenizer_for_vocab_size(&loaded.config)?.as_ref(),
        )?;
        let options = recipe::step_options(
            &loaded.config,
            &model,
            derived.total_train_batch_size as usize,
            derived.quantization_local_shard_count as usize,
        )?;
        let traced = step::trace(&model, &options)?;
        let name = variant.join(" ");
        programs.push(Running::new(&session, name, &traced)?);
    }
    for _ in 0..rounds + 2 {
        for program in &mut programs {
            program.step()?;
        }
    }
    for program in &mut programs {
        program.seconds.drain(..2);
        program.seconds.sort_by(f64::total_cmp);
        println!(
            "{:48} least {:8.2} ms, median {:8.2} ms",
            program.label,
            program.seconds[0] * 1e3,
            program.seconds[program.seconds.len() / 2] * 1e3
        );
    }
    Ok(())
}
