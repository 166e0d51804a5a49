//! From a traced program to the programs that run. `generate`, `train`, `compile`, `lower` and `module run` all lower
//! here: what is reported, measured or compiled for a pod is what would run.

mod traced;

pub use traced::{Sums, Traced, Update};

use std::borrow::Cow;
use std::collections::HashSet;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::backend::Backend;
use crate::graph::{
    Builder, Composite, Graph, GraphError, Input, Op, Staged, flops, roll, stacked, stage,
};
use crate::quant::{self, Product, QuantError, Slower, keep_where_faster};
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
    #[error(
        "int8_where_faster=True: what int8 makes faster is known of TPUs and GPUs alone, and this program is for a CPU; \
         leave int8_where_faster out, or name layers with quant_rules"
    )]
    NoTimes,
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
    /// What `int8_where_faster` left in float.
    pub slower: Vec<Slower>,
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
    let kernels = match parts {
        Some(_) => backend,
        None => backend.without_kernels(),
    };
    let devices = options.mesh.num_devices();
    let in_place = |graph| kernels.in_place(graph, devices, parts.unwrap_or(1));
    let target = Target::new(kernels, options)?;
    let (staged, slower) = match &traced.update {
        None => {
            let graph = match parts {
                Some(_) => Cow::Owned(unconstrained(&traced.graph)?),
                None => Cow::Borrowed(&traced.graph),
            };
            let is_float = traced
                .policy
                .as_ref()
                .is_none_or(|policy| policy.stored.is_empty());
            let graph = match parts.filter(|_| is_float) {
                Some(parts) => Cow::Owned(backend.pad_weights(&graph, parts)?.into_owned()),
                None => graph,
            };
            let (mut graph, slower) = quantize(graph, traced, Some(&target))?;
            if let Some(parts) = parts
                && let Cow::Owned(claimed) = backend.claim(&graph, parts)?
            {
                graph = Cow::Owned(claimed);
            }
            let graph = scanned(backend.rewrite(inline(&graph))?, traced, backend)?;
            let graph = in_place(graph)?;
            let mut staged = stage(&graph, &traced.request())?;
            if devices == 1 {
                staged.step = kernels.fuse(staged.step)?;
            }
            (staged, slower)
        }
        Some(update) => {
            let scan = shortest_scan(traced, backend);
            let (graph, slower) = trained(traced, update, kernels, Some(&target), scan)?;
            let is_split = split_inputs(&graph, options)?;
            let graph = kernels.claim_training(&graph, parts.unwrap_or(1), &is_split)?;
            let step = scanned(backend.rewrite_training(inline(&graph))?, traced, backend)?;
            let staged = Staged {
                load: Vec::new(),
                request: None,
                step: in_place(step)?,
            };
            (staged, slower)
        }
    };
    shard(staged, slower, &traced.name, options)
}

/// How many parts of each dimension of an input devices have.
fn split_dims(input: &Input, options: &Options<'_>) -> Result<Vec<usize>, ShardError> {
    if input.logical_axes.is_empty() {
        return Ok(vec![1; input.shape.rank()]);
    }
    let sizes = &input.shape.dims;
    let axes = &input.logical_axes;
    let (spec, _) = options
        .rules
        .spec_for_shape(&input.name, axes, sizes, options.mesh)?;
    let dims = spec.dims().iter();
    Ok(dims.map(|axes| options.mesh.product(axes)).collect())
}

/// Which dimensions of each input devices share.
fn split_inputs(graph: &Graph, options: &Options<'_>) -> Result<Vec<Vec<bool>>, ShardError> {
    let of_input = |input: &Input| {
        let parts = split_dims(input, options)?;
        Ok(parts.into_iter().map(|parts| parts > 1).collect())
    };
    graph.inputs.iter().map(of_input).collect()
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
    let target = Target::new(backend, options)?;
    let scan = shortest_scan(traced, backend).filter(|_| traced.scan_layers == Some(true));
    let (graph, _) = match &traced.update {
        None => quantize(Cow::Borrowed(&traced.graph), traced, Some(&target))?,
        Some(update) => {
            let kernels = backend.without_kernels();
            let (graph, slower) = trained(traced, update, kernels, Some(&target), scan)?;
            (Cow::Owned(graph), slower)
        }
    };
    let graph = match scan {
        Some(_) => Cow::Owned(scanned(inline(&graph), traced, backend)?),
        None => graph,
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
    let backend = Backend::Gpu {
        features: None,
        kernels: false,
    };
    let (graph, _) = trained(traced, update, backend, None, None)?;
    Ok(flops(&graph))
}

/// What decides whether int8 is faster, and in which type gradients are summed.
struct Target<'a> {
    backend: Backend,
    options: &'a Options<'a>,
    /// Devices that share a batch.
    parts: usize,
}

impl<'a> Target<'a> {
    fn new(backend: Backend, options: &'a Options<'a>) -> Result<Target<'a>, ShardError> {
        let parts = options.mesh.product(&options.rules.batch_axes()?);
        Ok(Target {
            backend,
            options,
            parts,
        })
    }

    /// Whether devices may add up the gradient of `weight` in bfloat16.
    fn narrows(&self, weight: &Input) -> bool {
        let split = split_dims(weight, self.options);
        split.is_ok_and(|split| self.backend.adds_narrow_parts(&weight.shape, &split))
    }
}

/// The graph with its annotated contractions in their formats. Without a policy there are none. With `int8_where_faster` those
/// that are not faster on `target` stay in float, and come second.
fn quantize<'g>(
    graph: Cow<'g, Graph>,
    traced: &Traced,
    target: Option<&Target<'_>>,
) -> Result<(Cow<'g, Graph>, Vec<Slower>), LowerError> {
    let Some(policy) = &traced.policy else {
        return Ok((graph, Vec::new()));
    };
    let (mut graph, mut slower) = (graph, Vec::new());
    if let Some(target) = target.filter(|_| policy.where_faster) {
        let backend = target.backend;
        if let Backend::Cpu { .. } = backend {
            return Err(LowerError::NoTimes);
        }
        let prepared = traced.update.is_none();
        let pays = |product: &Product| match backend {
            Backend::Tpu { kernels, features } => features.int8_is_faster(product, kernels),
            // On GPUs convolutions of integers are ones of bf16.
            Backend::Gpu { .. } => !product.is_convolution,
            Backend::Cpu { .. } => false,
        };
        slower = keep_where_faster(graph.to_mut(), target.parts, prepared, &pays);
        tracing::info!(
            "{}: {} products stay in float, which int8 does not make faster",
            traced.name,
            slower.len()
        );
    }
    Ok((Cow::Owned(quant::lower(&graph)?), slower))
}

/// The forward pass with the derivative and the update, quantized. Of its composites there are those that `backend` claims
/// then ([`Backend::claims_in_training`]). Where runs of `scan` and more equal blocks will be loops, their weights are one input
/// if the update takes that.
fn trained(
    traced: &Traced,
    update: &Update,
    backend: Backend,
    target: Option<&Target<'_>>,
    scan: Option<usize>,
) -> Result<(Graph, Vec<Slower>), LowerError> {
    let stacks = scan.filter(|_| update.takes_stacks);
    let parts = target.map_or(1, |target| target.parts);
    let differentiate = |graph: &Graph| {
        let is_claimed =
            |kind: &Composite, body: &Graph| backend.claims_in_training(kind, body, parts);
        let sums = Sums {
            between_devices: parts > 1,
            may_narrow: &|weight| target.is_none_or(|target| target.narrows(weight)),
        };
        differentiate(graph, update, &is_claimed, &sums, stacks)
    };
    let is_stored = traced
        .policy
        .as_ref()
        .is_some_and(|policy| !policy.stored.is_empty());
    Ok(match is_stored {
        // The derivative multiplies the integers of the checkpoint too, and not the floats that they stand for: the
        // scale of an output feature, which it contracts, goes to the gradient.
        true => {
            let (forward, slower) = quantize(Cow::Borrowed(&traced.graph), traced, target)?;
            (differentiate(&forward)?, slower)
        }
        false => {
            let graph = differentiate(&traced.graph)?;
            let (graph, slower) = quantize(Cow::Owned(graph), traced, target)?;
            (graph.into_owned(), slower)
        }
    })
}

/// The forward pass with the derivative and the update that `update` adds to it. Composites that are claimed stay whole. Weights of
/// `stacks` and more equal blocks that can be a loop are one input.
fn differentiate(
    graph: &Graph,
    update: &Update,
    is_claimed: &dyn Fn(&Composite, &Graph) -> bool,
    sums: &Sums<'_>,
    stacks: Option<usize>,
) -> Result<Graph, GraphError> {
    let inlined = graph.inline_composites(&|kind, body| {
        // Rounding has a derivative of its own.
        !matches!(kind, Composite::FakeQuantize { .. }) && !is_claimed(kind, body)
    });
    let forward = match stacks {
        Some(shortest) => stacked::stack_weights(inlined, shortest)?,
        None => inlined,
    };
    let b = Builder::resume(forward);
    (update.add)(&b, sums)?;
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

/// The number of equal blocks from which on a run of them is a loop, if any is.
fn shortest_scan(traced: &Traced, backend: Backend) -> Option<usize> {
    match traced.scan_layers {
        Some(true) => Some(2),
        Some(false) => None,
        None => backend.shortest_scan(traced.update.is_some()),
    }
}

/// The graph with loops in place of long runs of equal blocks.
fn scanned(graph: Graph, traced: &Traced, backend: Backend) -> Result<Graph, LowerError> {
    let request = traced.request();
    let stages = traced.update.is_none().then_some(&request[..]);
    let Some(shortest) = shortest_scan(traced, backend) else {
        return Ok(graph);
    };
    let loops = |graph: &Graph| {
        let nodes = graph.nodes.iter();
        nodes
            .filter(|node| matches!(node.op, Op::While { .. }))
            .count()
    };
    let before = loops(&graph);
    let mut rolled = roll(graph, stages, shortest)?;
    if !backend.allocates() {
        rolled = zeroed(&rolled)?;
    }
    if traced.scan_layers == Some(true) && loops(&rolled) == before {
        return Err(LowerError::NoEqualBlocks {
            program: format!("the {} program", traced.name),
        });
    }
    Ok(rolled)
}

/// The graph with zeros in place of memory without contents.
fn zeroed(graph: &Graph) -> Result<Graph, GraphError> {
    graph.rewrite(&mut |b, node, _| match node.op {
        Op::Uninitialized => b.full(&node.shape, 0.0).map(Some),
        _ => Ok(None),
    })
}

fn inline(graph: &Graph) -> Graph {
    graph.inline_composites(&|_, _| true)
}

/// Plans the shardings of each program.
fn shard(
    staged: Staged,
    slower: Vec<Slower>,
    name: &str,
    options: &Options<'_>,
) -> Result<Lowered, LowerError> {
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
        slower,
    };
    let asked: HashSet<Axis> = lowered
        .programs()
        .flat_map(|program| program.plan.asked.iter().copied())
        .collect();
    options.mesh.check_asked(&asked)?;
    Ok(lowered)
}
