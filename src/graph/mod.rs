//! The traced program: a closed set of operations, the builder, shape inference and derivatives.
//!
//! A [`Graph`] is a flat arena of nodes in topological order. It is made by a [`Builder`], which
//! checks every shape; what consumes a finished graph (derivative, passes, emission) cannot meet
//! an ill-typed one.

mod attributes;
pub mod blockwise;
mod builder;
mod composite;
mod custom_call;
mod error;
pub mod eval;
mod flops;
mod format;
mod infer;
mod init;
mod op;
pub(crate) mod patches;
pub mod random;
mod repeats;
mod rewrite;
mod roll;
pub mod scopes;
mod stack;
pub mod stacked;
mod stage;
mod vjp;

pub use attributes::{
    Binary, Comparison, ConvDims, ConvLayout, DotDims, GatherDims, PadDim, Reduction, ScatterDims,
    ScatterKind, Unary,
};
pub use builder::Builder;
pub use composite::{Composite, Contraction, grouped_dims};
pub use custom_call::{Attribute, Batch, Configuration, CustomCall, Rows, Stacks};
pub use error::{GraphError, InferError, constraint};
pub use eval::{EvalError, evaluate};
pub use flops::{ContractionFlops, contraction_flops, flops};
pub use format::{
    Arithmetic, ContractionQuant, FP4, Granularity, NF4, NumericsConvention, QuantDot, Range,
    Rounding, RoundingStream, TensorFormat,
};
pub use init::Init;
pub use op::Op;
pub use rewrite::{Replace, Substitute};
pub use roll::roll;
pub use stage::{Staged, stage};
pub use vjp::{grad, vjp};

use crate::shape::Shape;

/// A symbolic tensor: a node of the graph that made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tensor {
    pub(crate) graph: u32,
    pub(crate) id: u32,
}

impl Tensor {
    /// The node's position in [`Graph::nodes`].
    pub fn index(self) -> usize {
        self.id as usize
    }
}

/// One operation, its operands (indices of earlier nodes) and its result's shape.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    pub op: Op,
    pub operands: Vec<u32>,
    pub shape: Shape,
    /// Index into [`Graph::scopes`].
    pub scope: u32,
    /// The recomputation region this node belongs to, if any (see [`Builder::checkpoint`]).
    pub remat: Option<Recomputed>,
}

/// A region of operations that the derivative computes again ([`Builder::checkpoint`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recomputed {
    pub region: u32,
    pub keeps: Keeps,
}

/// The values of a recomputation region, besides those it takes from outside, that are kept for the derivative.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeps {
    Nothing,
    /// Results of products without batch dimensions, which are those of linear layers, of convolutions, and of attention that is
    /// one composite.
    Products,
}

/// The kind of a graph input.
#[derive(Clone, Debug, PartialEq)]
pub enum InputKind {
    /// A model parameter with its initialisation.
    Weight(Init),
    /// Optimizer moments and other values that live from step to step.
    State,
    /// Values that change from run to run: batches, token ids, seeds, schedules.
    Data,
}

/// One input of the program, in argument order.
#[derive(Clone, Debug, PartialEq)]
pub struct Input {
    /// For a weight `model/checkpoint.key`; otherwise a plain name.
    pub name: String,
    pub kind: InputKind,
    pub shape: Shape,
    /// Logical axis of each dimension; empty when nothing is known.
    pub logical_axes: Vec<Option<&'static str>>,
}

impl Input {
    pub fn is_weight(&self) -> bool {
        matches!(self.kind, InputKind::Weight(_))
    }

    /// A weight's key in its checkpoint: the name without the model's prefix.
    pub fn key(&self) -> &str {
        self.name
            .rsplit_once('/')
            .map_or(&self.name, |(_, key)| key)
    }
}

/// One result of the program, in result order.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    pub name: String,
    pub node: u32,
    /// The input whose buffer this result takes over (donation).
    pub alias: Option<usize>,
    /// Logical axis of each dimension; empty when nothing is known.
    pub logical_axes: Vec<Option<&'static str>>,
}

/// A finished program: nodes in topological order, inputs and outputs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Graph {
    pub nodes: Vec<Node>,
    pub inputs: Vec<Input>,
    pub outputs: Vec<Output>,
    /// Scope paths; nodes refer to them by index.
    pub scopes: Vec<String>,
}

impl Graph {
    /// The scope path a node was made in.
    pub fn path(&self, node: &Node) -> &str {
        &self.scopes[node.scope as usize]
    }

    /// The number of elements of all weights.
    pub fn parameter_count(&self) -> usize {
        self.inputs
            .iter()
            .filter(|i| matches!(i.kind, InputKind::Weight(_)))
            .map(|i| i.shape.count())
            .sum()
    }

    /// Weights in declaration order, with their argument positions.
    pub fn weights(&self) -> impl Iterator<Item = (usize, &Input)> {
        self.inputs
            .iter()
            .enumerate()
            .filter(|(_, i)| matches!(i.kind, InputKind::Weight(_)))
    }

    /// Which nodes depend on weights and constants alone, whatever the run-time inputs are.
    pub fn weight_only(&self) -> Vec<bool> {
        let weights: Vec<bool> = self.inputs.iter().map(Input::is_weight).collect();
        self.made_of(&weights)
    }

    /// Which nodes depend on constants and on the inputs that `inputs` marks alone.
    pub fn made_of(&self, inputs: &[bool]) -> Vec<bool> {
        let mut result = vec![false; self.nodes.len()];
        for (i, node) in self.nodes.iter().enumerate() {
            result[i] = match node.op {
                Op::Parameter(p) => inputs[p],
                _ => node.operands.iter().all(|o| result[*o as usize]),
            };
        }
        result
    }

    /// Which nodes are marks of stored values ([`Op::Stored`]), or computed from one.
    pub fn from_stored(&self) -> Vec<bool> {
        let mut from_stored = Vec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            let of_operands = node.operands.iter().any(|o| from_stored[*o as usize]);
            from_stored.push(matches!(node.op, Op::Stored) || of_operands);
        }
        from_stored
    }

    /// The same program without the names of anything: equal for programs that differ in names alone.
    pub fn anonymous(&self) -> Graph {
        let mut graph = self.clone();
        graph.scopes.iter_mut().for_each(String::clear);
        for (i, input) in graph.inputs.iter_mut().enumerate() {
            input.name = i.to_string();
        }
        for (i, output) in graph.outputs.iter_mut().enumerate() {
            output.name = i.to_string();
        }
        graph
    }

    /// Tells `visit` of each kernel's call that an output depends on, here and in loops, with the graph that its operands are in.
    pub fn visit_calls(&self, visit: &mut dyn FnMut(&Graph, &Node, &dyn CustomCall)) {
        let live = self.live_nodes();
        for (node, _) in self.nodes.iter().zip(live).filter(|(_, live)| *live) {
            if let Op::CustomCall(call) = &node.op {
                visit(self, node, call.as_ref());
            }
            for region in node.op.loop_regions() {
                region.visit_calls(visit);
            }
        }
    }

    /// Which nodes an output depends on.
    pub fn live_nodes(&self) -> Vec<bool> {
        let mut live = vec![false; self.nodes.len()];
        for output in &self.outputs {
            live[output.node as usize] = true;
        }
        for index in (0..self.nodes.len()).rev() {
            if live[index] {
                for &operand in &self.nodes[index].operands {
                    live[operand as usize] = true;
                }
            }
        }
        live
    }

    /// The argument position of the input called `name`.
    pub fn input_index(&self, name: &str) -> Option<usize> {
        self.inputs.iter().position(|i| i.name == name)
    }

    /// The result position of the output called `name`.
    pub fn output_index(&self, name: &str) -> Option<usize> {
        self.outputs.iter().position(|o| o.name == name)
    }
}
