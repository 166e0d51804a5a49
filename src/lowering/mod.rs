//! From a traced program to the programs that run. `generate`, `train`, `compile`, `lower` and `module run` all lower
//! here: what is reported, measured or compiled for a pod is what would run.

mod traced;

pub use traced::{Traced, Update};

use std::borrow::Cow;
use std::collections::HashSet;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::backend::Backend;
use crate::graph::{Builder, Composite, Graph, GraphError, Op, Staged, flops, roll, stage};
use crate::quant::{self, QuantError};
use crate::shard::{Axis, LogicalAxisRules, Mesh, ShardError, ShardPlan};

/// Why a program could not be lowered.
#[derive(Debug, thiserror::Error)]
pub enum LowerError {
    #[error(transparent)]
    Graph(#[from] GraphError),
    #[error(transparent)]
    Quant(#[from] QuantError),
    #[error(transparent)]
    Shard(#[from] ShardError),
    #[error(
        "scan_layers=True: {program} has no two equal blocks of which one takes what the other gives; leave scan_layers out"
    )]
    NoEqualBlocks { program: String },
}

/// The devices that programs are lowered for.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    pub mesh: &'a Mesh,
    pub rules: &'a LogicalAxisRules,
}

/// When a program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// While weights are loaded, once for each group of them
    Load,
    /// Once for the inputs of a request, such as a prompt
    Request,
    /// In every step
    Step,
}

impl Stage {
    pub fn name(self) -> &'static str {
        match self {
            Stage::Load => "load",
            Stage::Request => "request",
            Stage::Step => "step",
        }
    }
}

/// One program, ready to be emitted.
#[derive(Clone, Debug)]
pub struct LoweredProgram {
    pub name: String,
    pub graph: Graph,
    pub plan: ShardPlan,
}

impl LoweredProgram {
    /// Plans the shardings of a graph.
    fn new(
        name: String,
        graph: Graph,
        options: &Options<'_>,
    ) -> Result<LoweredProgram, LowerError> {
        let plan = ShardPlan::new(&graph, options.mesh, options.rules)?;
        Ok(LoweredProgram { name, graph, plan })
    }

    /// A graph as one program: with no stages and no kernels, in the forms that `backend` wants.
    ///
    /// # Errors
    /// When the graph is ill-typed, or no rule splits anything over an axis of the mesh.
    pub fn whole(
        name: &str,
        graph: &Graph,
        backend: Backend,
        options: &Options<'_>,
    ) -> Result<LoweredProgram, LowerError> {
        let graph = backend.rewrite(inline(graph))?;
        let program = LoweredProgram::new(name.to_string(), graph, options)?;
        options.mesh.check_asked(&program.plan.asked)?;
        Ok(program)
    }
}

/// What a traced program becomes. Inputs of a later program that no caller knows are results of an earlier one of the
/// same name.
#[derive(Clone, Debug)]
pub struct Lowered {
    /// The load stage, computed from weights while they are read: one program for each group of weights that have a
    /// result in common. A training step has none, because its weights change.
    pub load: Vec<LoweredProgram>,
    /// The request stage, computed once for the inputs of a request; `None` if nothing is.
    pub request: Option<LoweredProgram>,
    /// The step program, run in every step.
    pub step: LoweredProgram,
}

impl Lowered {
    /// All programs, in the order in which they run.
    pub fn programs(&self) -> impl Iterator<Item = &LoweredProgram> {
        self.load.iter().chain(&self.request).chain([&self.step])
    }
}

/// Lowers a traced program, whose contractions are annotated with their formats ([`Traced::quantized`]).
///
/// # Errors
/// When the program has no derivative, a format does not fit a contraction, or no rule splits anything over an axis of
/// the mesh.
pub fn lower(
    traced: &Traced,
    backend: Backend,
    options: &Options<'_>,
) -> Result<Lowered, LowerError> {
    // Kernels compute parts of the batch, each without the others.
    let parts = options.rules.batch_parts(options.mesh)?;
    let parts = parts.filter(|parts| *parts == 1 || backend.splits_kernels());
    let staged = match &traced.update {
        None => {
            let graph = match parts {
                Some(_) => Cow::Owned(unconstrained(&traced.graph)?),
                None => Cow::Borrowed(&traced.graph),
            };
            let mut graph = quantize(&graph, traced)?;
            if let Some(parts) = parts
                && let Cow::Owned(claimed) = backend.claim(&graph, parts)?
            {
                graph = Cow::Owned(claimed);
            }
            let graph = scanned(backend.rewrite(inline(&graph))?, traced, backend)?;
            stage(&graph, &traced.request())?
        }
        Some(update) => {
            let kernels = match parts {
                Some(_) => backend,
                None => backend.without_kernels(),
            };
            let graph = trained(traced, update, kernels)?;
            let graph = kernels.claim_training(&graph, parts.unwrap_or(1))?;
            Staged {
                load: Vec::new(),
                request: None,
                step: scanned(backend.rewrite_training(inline(&graph))?, traced, backend)?,
            }
        }
    };
    shard(staged, &traced.name, options)
}

/// A whole traced program, before it is split into stages and without kernels. Nothing runs it; its text can be
/// compared with another compiler's.
///
/// # Errors
/// As [`lower`].
pub fn whole(
    traced: &Traced,
    backend: Backend,
    options: &Options<'_>,
) -> Result<LoweredProgram, LowerError> {
    let graph = match &traced.update {
        None => Cow::Borrowed(&traced.graph),
        Some(update) => Cow::Owned(trained(traced, update, backend.without_kernels())?),
    };
    let graph = match &traced.update {
        None => quantize(&graph, traced)?,
        Some(_) => graph,
    };
    let graph = match traced.scan_layers {
        Some(true) => Cow::Owned(scanned(inline(&graph), traced, backend)?),
        Some(false) | None => graph,
    };
    LoweredProgram::whole(&traced.name, &graph, backend, options)
}

/// Operations of the dots and convolutions of a traced program, over all devices ([`flops`]): of a training step those of the
/// derivative too.
///
/// # Errors
/// When the program has no derivative, or a format does not fit a contraction.
pub fn traced_flops(traced: &Traced) -> Result<u64, LowerError> {
    let Some(update) = &traced.update else {
        return Ok(flops(&traced.graph));
    };
    // Without kernels, which only some backends have.
    Ok(flops(&trained(traced, update, Backend::Gpu)?))
}

/// The graph with its annotated contractions in their formats. Without a policy there are none.
fn quantize<'g>(graph: &'g Graph, traced: &Traced) -> Result<Cow<'g, Graph>, QuantError> {
    match traced.policy {
        None => Ok(Cow::Borrowed(graph)),
        Some(_) => quant::lower(graph).map(Cow::Owned),
    }
}

/// The forward pass with the derivative and the update, quantized. Of its composites there are those that `backend` claims
/// then ([`Backend::claims_in_training`]).
fn trained(traced: &Traced, update: &Update, backend: Backend) -> Result<Graph, LowerError> {
    let is_stored = traced
        .policy
        .as_ref()
        .is_some_and(|policy| !policy.stored.is_empty());
    Ok(match is_stored {
        // The derivative multiplies the integers of the checkpoint too, and not the floats that they stand for: the
        // scale of an output feature, which it contracts, goes to the gradient.
        true => {
            let forward = quantize(&traced.graph, traced)?;
            differentiate(&forward, update, backend)?
        }
        false => quantize(&differentiate(&traced.graph, update, backend)?, traced)?.into_owned(),
    })
}

/// The forward pass with the derivative and the update that `update` adds to it.
fn differentiate(graph: &Graph, update: &Update, backend: Backend) -> Result<Graph, GraphError> {
    let inlined = graph.inline_composites(&|kind, body| {
        // Rounding has a derivative of its own.
        !matches!(kind, Composite::FakeQuantize { .. }) && !backend.claims_in_training(kind, body)
    });
    let b = Builder::resume(inlined);
    update(&b)?;
    Ok(b.finish())
}

/// The graph without shardings, where devices share nothing but the batch, which the inputs split: what stands on both sides
/// of one is then one claim.
fn unconstrained(graph: &Graph) -> Result<Graph, GraphError> {
    graph.substitute(&mut |_, i, copies| {
        let node = &graph.nodes[i];
        let is_constraint = matches!(node.op, Op::ShardingConstraint(_));
        Ok(is_constraint.then(|| copies[node.operands[0] as usize]))
    })
}

/// The graph with loops in place of long runs of equal blocks.
fn scanned(graph: Graph, traced: &Traced, backend: Backend) -> Result<Graph, LowerError> {
    let request = traced.request();
    let stages = traced.update.is_none().then_some(&request[..]);
    let shortest = match traced.scan_layers {
        Some(true) => Some(2),
        Some(false) => None,
        None => backend.shortest_scan(traced.update.is_some()),
    };
    let Some(shortest) = shortest else {
        return Ok(graph);
    };
    let loops = |graph: &Graph| {
        let nodes = graph.nodes.iter();
        nodes
            .filter(|node| matches!(node.op, Op::While { .. }))
            .count()
    };
    let before = loops(&graph);
    let rolled = roll(graph, stages, shortest)?;
    if traced.scan_layers == Some(true) && loops(&rolled) == before {
        return Err(LowerError::NoEqualBlocks {
            program: format!("the {} program", traced.name),
        });
    }
    Ok(rolled)
}

fn inline(graph: &Graph) -> Graph {
    graph.inline_composites(&|_, _| true)
}

/// Plans the shardings of each program.
fn shard(staged: Staged, name: &str, options: &Options<'_>) -> Result<Lowered, LowerError> {
    let plan = |name: String, graph: Graph| LoweredProgram::new(name, graph, options);
    let load = staged
        .load
        .into_iter()
        .map(|graph| plan("prepare".to_string(), graph))
        .collect::<Result<Vec<_>, _>>()?;
    let request = match staged.request {
        Some(graph) => Some(plan(format!("{name}_request"), graph)?),
        None => None,
    };
    let lowered = Lowered {
        load,
        request,
        step: plan(name.to_string(), staged.step)?,
    };
    let asked: HashSet<Axis> = lowered
        .programs()
        .flat_map(|program| program.plan.asked.iter().copied())
        .collect();
    options.mesh.check_asked(&asked)?;
    Ok(lowered)
}
