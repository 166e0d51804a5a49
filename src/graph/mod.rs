//! The traced program: a closed set of operations, the builder, shape inference and derivatives.
//!
//! A [`Graph`] is a flat arena of nodes in topological order. It is made by a [`Builder`], which
//! checks every shape; what consumes a finished graph (derivative, passes, emission) cannot meet
//! an ill-typed one.

mod builder;
pub mod composite;
pub mod custom_call;
pub mod eval;
mod flops;
mod infer;
mod init;
pub mod op;
pub mod random;
pub mod scopes;
mod stage;
mod vjp;

pub use builder::Builder;
pub use composite::{Composite, Contraction};
pub use custom_call::{Attribute, CustomCall};
pub use eval::{EvalError, evaluate};
pub use flops::flops;
pub use infer::{InferError, constraint};
pub use init::Init;
pub use op::{
    Binary, Comparison, ContractionQuant, ConvDims, ConvLayout, DotDims, GatherDims, Granularity,
    NumericsConvention, Op, PadDim, QuantDot, Range, Reduction, Rounding, ScatterDims, ScatterKind,
    TensorFormat, Unary,
};
pub use stage::{Staged, stage};
pub use vjp::{grad, vjp};

use crate::dtype::DType;
use crate::shape::Shape;

/// Why a graph could not be built.
#[derive(Debug, thiserror::Error)]
pub enum GraphError {
    /// `path` is the scope the operation was made in.
    #[error("{path}: {op}: {source}")]
    Infer {
        path: String,
        op: &'static str,
        source: Box<InferError>,
    },
    #[error("{path}: {op}: operand {operand} belongs to another graph; pass it through the carry")]
    ForeignTensor {
        path: String,
        op: &'static str,
        operand: usize,
    },
    #[error("{name}: declared twice, as {first} and as {second}")]
    Redeclared {
        name: String,
        first: Shape,
        second: Shape,
    },
    #[error("{path}: {message}")]
    Invalid { path: String, message: String },
    #[error("{path}: {op} has no derivative here; keep it out of what the loss depends on")]
    NotDifferentiable { path: String, op: &'static str },
    #[error(transparent)]
    HostTensor(#[from] crate::host_tensor::HostTensorError),
}

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
#[derive(Clone, Debug)]
pub struct Node {
    pub op: Op,
    pub operands: Vec<u32>,
    pub shape: Shape,
    /// Index into [`Graph::scopes`].
    pub scope: u32,
    /// The recomputation region this node belongs to, if any (see [`Builder::checkpoint`]).
    pub remat: Option<u32>,
}

/// What a graph input is.
#[derive(Clone, Debug, PartialEq)]
pub enum InputKind {
    /// A model parameter with its initialisation.
    Weight(Init),
    /// Optimizer moments and other values that live from step to step.
    State,
    /// What changes from run to run: batches, token ids, seeds, schedules.
    Data,
}

/// One input of the program, in argument order.
#[derive(Clone, Debug)]
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
#[derive(Clone, Debug)]
pub struct Output {
    pub name: String,
    pub node: u32,
    /// The input whose buffer this result takes over (donation).
    pub alias: Option<usize>,
    /// Logical axis of each dimension; empty when nothing is known.
    pub logical_axes: Vec<Option<&'static str>>,
}

/// A finished program: nodes in topological order, inputs and outputs.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    pub nodes: Vec<Node>,
    pub inputs: Vec<Input>,
    pub outputs: Vec<Output>,
    /// Scope paths; nodes refer to them by index.
    pub scopes: Vec<String>,
}

/// What [`Graph::rewrite`] asks of each node: a builder at its scope, the node and its operands in the copy.
pub type Replace<'a> =
    dyn FnMut(&Builder, &Node, &[Tensor]) -> Result<Option<Tensor>, GraphError> + 'a;

/// What [`Graph::substitute`] asks of each node: a builder at its scope, the node's index, and the copies of all nodes
/// before it that outputs depend on.
pub type Substitute<'a> =
    dyn FnMut(&Builder, usize, &[Tensor]) -> Result<Option<Tensor>, GraphError> + 'a;

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

    /// The same program for weights as `stored` says they are: `f32` weights that are stored as `bf16` or `f16` are
    /// inputs of that type where all that the program does with them is to convert them.
    ///
    /// # Errors
    /// None for a well-typed graph.
    pub fn with_stored_weights(
        &self,
        stored: &dyn Fn(&str) -> Option<DType>,
    ) -> Result<Graph, GraphError> {
        let live = self.live_nodes();
        let mut only_converted = vec![true; self.nodes.len()];
        for (node, _) in self.nodes.iter().zip(&live).filter(|(_, live)| **live) {
            for operand in &node.operands {
                only_converted[*operand as usize] &= matches!(node.op, Op::Convert(_));
            }
        }
        for output in &self.outputs {
            only_converted[output.node as usize] = false;
        }
        let mut graph = self.clone();
        for (i, node) in self.nodes.iter().enumerate() {
            let Op::Parameter(index) = node.op else {
                continue;
            };
            let input = &mut graph.inputs[index];
            let is_weight = matches!(input.kind, InputKind::Weight(_));
            if !is_weight || input.shape.dtype != DType::F32 || !only_converted[i] {
                continue;
            }
            if let Some(dtype @ (DType::BF16 | DType::F16)) = stored(&input.name) {
                input.shape = input.shape.with_dtype(dtype);
                graph.nodes[i].shape = input.shape.clone();
            }
        }
        graph.substitute(&mut |_, i, copies| {
            let node = &graph.nodes[i];
            let Op::Convert(dtype) = node.op else {
                return Ok(None);
            };
            let operand = node.operands[0] as usize;
            Ok((graph.nodes[operand].shape.dtype == dtype).then(|| copies[operand]))
        })
    }

    /// A copy in which `replace` may put other nodes in an operation's place.
    ///
    /// `replace` gets a builder at the node's scope, the node, and its operands in the copy. `None` keeps the node.
    /// Loop bodies are rewritten by the same function.
    ///
    /// # Errors
    /// Those of `replace`, and when a replacement's shape is not the node's.
    pub fn rewrite(&self, replace: &mut Replace<'_>) -> Result<Graph, GraphError> {
        self.substitute(&mut |b, i, copies| {
            let node = &self.nodes[i];
            let operands: Vec<Tensor> = node.operands.iter().map(|o| copies[*o as usize]).collect();
            match (replace(b, node, &operands)?, &node.op) {
                (None, Op::While { cond, body }) => {
                    let op = Op::While {
                        cond: Box::new(cond.rewrite(replace)?),
                        body: Box::new(body.rewrite(replace)?),
                    };
                    b.push(op, &operands).map(Some)
                }
                (other, _) => Ok(other),
            }
        })
    }

    /// [`Graph::rewrite`] for replacements that reach further back than a node's operands; loop bodies stay as they
    /// are.
    ///
    /// # Errors
    /// Those of `replace`, and when a replacement's shape is not the node's.
    pub fn substitute(&self, replace: &mut Substitute<'_>) -> Result<Graph, GraphError> {
        let b = Builder::new();
        let inputs = self
            .inputs
            .iter()
            .map(|input| b.declare(input.clone()))
            .collect::<Result<Vec<_>, _>>()?;
        let mut copies: Vec<Tensor> = Vec::with_capacity(self.nodes.len());
        let live = self.live_nodes();
        for (i, node) in self.nodes.iter().enumerate() {
            if let Op::Parameter(index) = node.op {
                copies.push(inputs[index]);
                continue;
            }
            // What no output needs is not worth a copy; its place holds any earlier tensor, never read.
            if !live[i] {
                copies.push(Tensor {
                    graph: u32::MAX,
                    id: 0,
                });
                continue;
            }
            let at = b.at(self.path(node).to_string());
            let copy = match replace(&at, i, &copies)? {
                Some(t) => t,
                None => {
                    let operands: Vec<Tensor> =
                        node.operands.iter().map(|o| copies[*o as usize]).collect();
                    at.copy_node(node, &operands)?
                }
            };
            if at.shape(copy) != node.shape {
                return Err(at.invalid(format!(
                    "{}: replaced {} by {}",
                    node.op.name(),
                    node.shape,
                    at.shape(copy)
                )));
            }
            copies.push(copy);
        }
        for output in &self.outputs {
            b.push_output(Output {
                node: copies[output.node as usize].id,
                ..output.clone()
            });
        }
        Ok(b.finish())
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
