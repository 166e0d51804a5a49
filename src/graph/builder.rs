//! Builds graphs: every operation is checked as it is added.

mod ops;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt::Display;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::dtype::DType;
use crate::host_tensor::HostTensor;
use crate::shape::Shape;

use super::infer::infer;
use super::{
    Composite, CustomCall, Graph, GraphError, Init, Input, InputKind, Keeps, Node, Op, Output,
    Recomputed, Tensor,
};

type Result<T> = std::result::Result<T, GraphError>;

struct Inner {
    graph: RefCell<Graph>,
    id: u32,
    scope_ids: RefCell<HashMap<String, u32>>,
    input_ids: RefCell<HashMap<String, u32>>,
    remat_count: Cell<u32>,
}

/// Adds operations to one graph, inside one scope.
///
/// A `Builder` is a cheap handle: [`Builder::scope`] gives another on the same graph. The scope path is the
/// checkpoint's key prefix of weights declared in it, the subject of quantization and sharding rules, the place
/// named by errors, and the location in the emitted program.
///
/// Binary operations broadcast their operands to one shape by NumPy's rules; element types must already agree.
#[derive(Clone)]
pub struct Builder {
    inner: Rc<Inner>,
    scope: u32,
    remat: Option<Recomputed>,
}

impl Default for Builder {
    fn default() -> Self {
        Builder::new()
    }
}

/// Most elements of a tensor. Its bytes, and the work of a dot of two such operands, count in 64 and 128 bits.
const LARGEST_COUNT: u128 = 1 << 56;

impl Builder {
    /// A builder of a new, empty graph.
    pub fn new() -> Self {
        Builder::with_root(String::new())
    }

    fn with_root(path: String) -> Self {
        static NEXT_GRAPH: AtomicU32 = AtomicU32::new(0);
        let graph = Graph {
            scopes: vec![path.clone()],
            ..Graph::default()
        };
        Builder {
            inner: Rc::new(Inner {
                graph: RefCell::new(graph),
                id: NEXT_GRAPH.fetch_add(1, Ordering::Relaxed),
                scope_ids: RefCell::new(HashMap::from([(path, 0)])),
                input_ids: RefCell::default(),
                remat_count: Cell::new(0),
            }),
            scope: 0,
            remat: None,
        }
    }

    /// The finished graph. The builder and its clones go on with an empty one.
    pub fn finish(self) -> Graph {
        self.inner.graph.take()
    }

    /// Looks at the graph as built so far.
    pub fn with_graph<T>(&self, look: impl FnOnce(&Graph) -> T) -> T {
        look(&self.inner.graph.borrow())
    }

    /// Changes attributes of nodes already added. Shapes and operands must stay as they are.
    pub(crate) fn with_graph_mut<T>(&self, change: impl FnOnce(&mut Graph) -> T) -> T {
        change(&mut self.inner.graph.borrow_mut())
    }

    /// The scope path, e.g. `unet/down_blocks.0.resnets.1`.
    pub fn path(&self) -> String {
        self.with_graph(|g| g.scopes[self.scope as usize].clone())
    }

    /// A builder inside the child scope `name`: `a` becomes `a.name`, and `model/` becomes `model/name`.
    pub fn scope(&self, name: impl Display) -> Builder {
        let parent = self.path();
        let separator = if parent.is_empty() || parent.ends_with('/') {
            ""
        } else {
            "."
        };
        self.at(format!("{parent}{separator}{name}"))
    }

    /// A builder at the root of a model or phase: the path `name/`, below which checkpoint keys start.
    pub fn root(&self, name: impl Display) -> Builder {
        self.at(format!("{name}/"))
    }

    /// A builder at exactly `path`, wherever this one is.
    pub fn at(&self, path: impl AsRef<str>) -> Builder {
        let path = path.as_ref();
        let mut ids = self.inner.scope_ids.borrow_mut();
        let scope = match ids.get(path) {
            Some(id) => *id,
            None => {
                let mut graph = self.inner.graph.borrow_mut();
                let id = graph.scopes.len() as u32;
                graph.scopes.push(path.to_string());
                ids.insert(path.to_string(), id);
                id
            }
        };
        Builder {
            inner: Rc::clone(&self.inner),
            scope,
            remat: self.remat,
        }
    }

    /// A builder whose operations the derivative recomputes instead of keeping their values
    /// (gradient checkpointing), but for those that `keeps` says. Each call opens a region of its own.
    pub fn checkpoint(&self, keeps: Keeps) -> Builder {
        let region = self.inner.remat_count.get();
        self.inner.remat_count.set(region + 1);
        Builder {
            remat: Some(Recomputed { region, keeps }),
            ..self.clone()
        }
    }

    /// This builder in a recomputation region of another graph that is copied.
    pub(crate) fn in_region(&self, remat: Option<Recomputed>) -> Builder {
        let known = self.inner.remat_count.get();
        let next = remat.map_or(0, |remat| remat.region + 1);
        self.inner.remat_count.set(known.max(next));
        Builder {
            remat,
            ..self.clone()
        }
    }

    /// This builder outside any recomputation region.
    pub(crate) fn without_remat(&self) -> Builder {
        Builder {
            remat: None,
            ..self.clone()
        }
    }

    pub fn shape(&self, x: Tensor) -> Shape {
        self.with_graph(|g| g.nodes[x.index()].shape.clone())
    }

    pub fn dims(&self, x: Tensor) -> Vec<usize> {
        self.with_graph(|g| g.nodes[x.index()].shape.dims.clone())
    }

    pub fn dtype(&self, x: Tensor) -> DType {
        self.with_graph(|g| g.nodes[x.index()].shape.dtype)
    }

    /// An error at this builder's scope.
    pub fn invalid(&self, message: impl Into<String>) -> GraphError {
        let path = self.path();
        GraphError::Invalid {
            path: match path.is_empty() {
                true => "the program".to_string(),
                false => path,
            },
            message: message.into(),
        }
    }

    /// The handle of node `id` of this graph.
    pub(crate) fn tensor(&self, id: u32) -> Tensor {
        Tensor {
            graph: self.inner.id,
            id,
        }
    }

    /// Adds `op`; the shape is inferred.
    ///
    /// # Errors
    /// When an operand is another graph's, or operands and attributes break a constraint of the operation.
    pub fn push(&self, op: Op, operands: &[Tensor]) -> Result<Tensor> {
        self.check_graph(&op, operands)?;
        let shape = {
            let graph = self.inner.graph.borrow();
            let shapes: Vec<&Shape> = operands
                .iter()
                .map(|t| &graph.nodes[t.index()].shape)
                .collect();
            infer(&op, &shapes)
        }
        .map_err(|source| GraphError::Infer {
            path: self.path(),
            op: op.name(),
            source: Box::new(source),
        })?;
        self.check_size(&shape)?;
        Ok(self.add_node(op, operands, shape))
    }

    /// Refuses a tensor whose size is a slip of the keyboard, before a count of its elements overflows.
    fn check_size(&self, shape: &Shape) -> Result<()> {
        let count = shape.dims.iter().map(|&d| d as u128);
        match count.reduce(u128::saturating_mul) {
            Some(count) if count > LARGEST_COUNT => Err(self.invalid(format!(
                "{shape} has {count} elements, more than any device or pod holds (2^56); check batch, resolution and \
                 the model's sizes"
            ))),
            _ => Ok(()),
        }
    }

    fn check_graph(&self, op: &Op, operands: &[Tensor]) -> Result<()> {
        match operands.iter().position(|t| t.graph != self.inner.id) {
            None => Ok(()),
            Some(operand) => Err(GraphError::ForeignTensor {
                path: self.path(),
                op: op.name(),
                operand,
            }),
        }
    }

    fn add_node(&self, op: Op, operands: &[Tensor], shape: Shape) -> Tensor {
        let mut graph = self.inner.graph.borrow_mut();
        let id = graph.nodes.len() as u32;
        graph.nodes.push(Node {
            op,
            operands: operands.iter().map(|t| t.id).collect(),
            shape,
            scope: self.scope,
            remat: self.remat,
        });
        self.tensor(id)
    }

    // Inputs and outputs

    /// Declares the weight `name` of this scope; its full name is the scope path, a dot and `name`.
    ///
    /// Declaring one again with the same shape gives the same tensor (shared weights).
    ///
    /// # Errors
    /// When it was declared with another shape, or `logical_axes` is neither empty nor one for each dimension.
    pub fn param(
        &self,
        name: &str,
        shape: Shape,
        init: Init,
        logical_axes: &[Option<&'static str>],
    ) -> Result<Tensor> {
        let path = self.path();
        let separator = if path.is_empty() || path.ends_with('/') {
            ""
        } else {
            "."
        };
        self.declare(Input {
            name: format!("{path}{separator}{name}"),
            kind: InputKind::Weight(init),
            shape,
            logical_axes: logical_axes.to_vec(),
        })
    }

    /// Declares a run-time input called exactly `name`.
    ///
    /// # Errors
    /// As for [`Builder::param`].
    pub fn input(
        &self,
        name: &str,
        shape: Shape,
        logical_axes: &[Option<&'static str>],
    ) -> Result<Tensor> {
        self.declare(Input {
            name: name.to_string(),
            kind: InputKind::Data,
            shape,
            logical_axes: logical_axes.to_vec(),
        })
    }

    /// Declares an input of any kind.
    ///
    /// # Errors
    /// As for [`Builder::param`].
    pub fn declare(&self, input: Input) -> Result<Tensor> {
        if !input.logical_axes.is_empty() && input.logical_axes.len() != input.shape.rank() {
            return Err(self.invalid(format!(
                "{}: {} logical axes for {}",
                input.name,
                input.logical_axes.len(),
                input.shape
            )));
        }
        if let Some(&id) = self.inner.input_ids.borrow().get(&input.name) {
            let tensor = self.tensor(id);
            let first = self.shape(tensor);
            if first != input.shape {
                return Err(GraphError::Redeclared {
                    name: input.name,
                    first,
                    second: input.shape,
                });
            }
            return Ok(tensor);
        }
        self.check_size(&input.shape)?;
        let index = self.with_graph(|g| g.inputs.len());
        let tensor = self
            .without_remat()
            .add_node(Op::Parameter(index), &[], input.shape.clone());
        self.inner
            .input_ids
            .borrow_mut()
            .insert(input.name.clone(), tensor.id);
        self.inner.graph.borrow_mut().inputs.push(input);
        Ok(tensor)
    }

    /// Adds a result called `name`.
    ///
    /// `alias` names the input whose buffer it takes over.
    ///
    /// # Errors
    /// When the alias is not an input of the same shape, or was given away before.
    pub fn output(&self, name: &str, x: Tensor, alias: Option<Tensor>) -> Result<()> {
        let mut graph = self.inner.graph.borrow_mut();
        let mut logical_axes = Vec::new();
        let alias = match alias {
            None => None,
            Some(t) => {
                let node = &graph.nodes[t.index()];
                let Op::Parameter(index) = node.op else {
                    drop(graph);
                    return Err(self.invalid(format!("output {name}: alias is not an input")));
                };
                if node.shape != graph.nodes[x.index()].shape {
                    let message = format!(
                        "output {name}: {} cannot take over the buffer of {}: {}",
                        graph.nodes[x.index()].shape,
                        graph.inputs[index].name,
                        node.shape
                    );
                    drop(graph);
                    return Err(self.invalid(message));
                }
                if graph.outputs.iter().any(|o| o.alias == Some(index)) {
                    let message = format!(
                        "output {name}: {} was given away before",
                        graph.inputs[index].name
                    );
                    drop(graph);
                    return Err(self.invalid(message));
                }
                logical_axes.clone_from(&graph.inputs[index].logical_axes);
                Some(index)
            }
        };
        graph.outputs.push(Output {
            name: name.to_string(),
            node: x.id,
            alias,
            logical_axes,
        });
        Ok(())
    }

    /// Removes all outputs and gives them with their tensors.
    pub fn take_outputs(&self) -> Vec<(Output, Tensor)> {
        let outputs = std::mem::take(&mut self.inner.graph.borrow_mut().outputs);
        let outputs = outputs.into_iter();
        outputs
            .map(|output| {
                let tensor = self.tensor(output.node);
                (output, tensor)
            })
            .collect()
    }

    /// Adds an output that a pass copies.
    pub(crate) fn push_output(&self, output: Output) {
        self.inner.graph.borrow_mut().outputs.push(output);
    }

    // Leaves

    pub fn constant(&self, value: HostTensor) -> Result<Tensor> {
        self.push(Op::Constant(value), &[])
    }

    /// A scalar constant of any number type, rounded to it.
    pub fn scalar(&self, dtype: DType, value: f64) -> Result<Tensor> {
        self.constant(HostTensor::from_f64(Shape::scalar(dtype), &[value])?)
    }

    /// A constant of `shape` filled with `value`.
    pub fn full(&self, shape: &Shape, value: f64) -> Result<Tensor> {
        let scalar = self.scalar(shape.dtype, value)?;
        self.broadcast_in_dim(scalar, &[], &shape.dims)
    }

    /// Counts 0, 1, .. along dimension `dim` of `shape`.
    pub fn iota(&self, shape: Shape, dim: usize) -> Result<Tensor> {
        infer(&Op::Iota(dim), &[&shape]).map_err(|source| GraphError::Infer {
            path: self.path(),
            op: "iota",
            source: Box::new(source),
        })?;
        Ok(self.add_node(Op::Iota(dim), &[], shape))
    }

    /// Memory for a tensor of `shape`. Its elements are undefined until they are written.
    pub fn uninitialized(&self, shape: Shape) -> Tensor {
        self.add_node(Op::Uninitialized, &[], shape)
    }

    // Control and hints

    /// Repeats `body` on the carry while `cond` holds. Regions see only the carry; its shapes never change.
    pub fn while_loop(
        &self,
        init: &[Tensor],
        cond: impl FnOnce(&Builder, &[Tensor]) -> Result<Tensor>,
        body: impl FnOnce(&Builder, &[Tensor]) -> Result<Vec<Tensor>>,
    ) -> Result<Vec<Tensor>> {
        let (region, carry) = self.region(init)?;
        let holds = cond(&region, &carry)?;
        region.output("holds", holds, None)?;
        let cond = region.finish();
        let (region, carry) = self.region(init)?;
        for (i, t) in body(&region, &carry)?.into_iter().enumerate() {
            region.output(&format!("carry{i}"), t, None)?;
        }
        let body = region.finish();
        let node = self.push(
            Op::While {
                cond: Box::new(cond),
                body: Box::new(body),
            },
            init,
        )?;
        Ok(self.elements(node, init))
    }

    /// A builder of a region whose inputs are shaped like `carry`.
    fn region(&self, carry: &[Tensor]) -> Result<(Builder, Vec<Tensor>)> {
        let region = Builder::with_root(self.path());
        let inputs = carry
            .iter()
            .enumerate()
            .map(|(i, t)| region.input(&format!("carry{i}"), self.shape(*t), &[]))
            .collect::<Result<Vec<_>>>()?;
        Ok((region, inputs))
    }

    /// A composite of `kind`: one node now, and `body`'s operations wherever no backend has a kernel for it.
    ///
    /// `body` sees its operands alone; operations of it may be made at any scope.
    ///
    /// # Errors
    /// Errors of `body`, and when the attributes of `kind` do not fit the operands or the body.
    pub fn composite(
        &self,
        kind: Composite,
        operands: &[Tensor],
        body: impl FnOnce(&Builder, &[Tensor]) -> Result<Tensor>,
    ) -> Result<Tensor> {
        self.composite_of(kind, operands, |b, inputs| Ok(vec![body(b, inputs)?]))
    }

    /// The same for a composite whose results are of the shapes of its first operands.
    ///
    /// # Errors
    /// Those of [`Builder::composite`].
    pub fn composite_in_place(
        &self,
        kind: Composite,
        operands: &[Tensor],
        body: impl FnOnce(&Builder, &[Tensor]) -> Result<Vec<Tensor>>,
    ) -> Result<Vec<Tensor>> {
        let results = kind.results();
        let node = self.composite_of(kind, operands, body)?;
        Ok(self.elements(node, &operands[..results]))
    }

    /// A call whose results take the memory of its first operands ([`CustomCall::in_place`]).
    ///
    /// # Errors
    /// When the operands do not fit the kernel.
    pub fn call_in_place(
        &self,
        call: Arc<dyn CustomCall>,
        operands: &[Tensor],
    ) -> Result<Vec<Tensor>> {
        let results = call.in_place();
        let node = self.push(Op::CustomCall(call), operands)?;
        Ok(self.elements(node, &operands[..results]))
    }

    fn composite_of(
        &self,
        kind: Composite,
        operands: &[Tensor],
        body: impl FnOnce(&Builder, &[Tensor]) -> Result<Vec<Tensor>>,
    ) -> Result<Tensor> {
        let (region, inputs) = self.region(operands)?;
        for (i, result) in body(&region, &inputs)?.into_iter().enumerate() {
            region.output(&format!("result{i}"), result, None)?;
        }
        let body = Box::new(region.finish());
        self.push(Op::Composite { kind, body }, operands)
    }

    /// Marks a value computed from weights as one that stays in memory between runs ([`Op::Stored`]).
    pub fn stored(&self, x: Tensor) -> Result<Tensor> {
        self.push(Op::Stored, &[x])
    }

    /// All of `values`, none of which may be computed after anything that uses a result.
    pub fn optimization_barrier(&self, values: &[Tensor]) -> Result<Vec<Tensor>> {
        let node = self.push(Op::OptimizationBarrier, values)?;
        Ok(self.elements(node, values))
    }

    /// The results of a multi-result node whose shapes are those of `like`.
    fn elements(&self, node: Tensor, like: &[Tensor]) -> Vec<Tensor> {
        like.iter()
            .enumerate()
            .map(|(i, t)| self.add_node(Op::GetTupleElement(i), &[node], self.shape(*t)))
            .collect()
    }

    /// Asks for the sharding that the logical axis rules give these axes; the identity on values.
    pub fn constrain(&self, x: Tensor, axes: &[Option<&'static str>]) -> Result<Tensor> {
        self.push(Op::ShardingConstraint(axes.to_vec()), &[x])
    }

    // Used by passes that copy nodes

    /// Goes on with a finished graph: its nodes, inputs and outputs stay.
    pub fn resume(graph: Graph) -> Builder {
        let b = Builder::new();
        let inputs = graph.nodes.iter().enumerate();
        let inputs = inputs.filter_map(|(id, node)| match node.op {
            Op::Parameter(index) => Some((graph.inputs[index].name.clone(), id as u32)),
            _ => None,
        });
        *b.inner.input_ids.borrow_mut() = inputs.collect();
        let scopes = graph.scopes.iter().cloned().zip(0..);
        *b.inner.scope_ids.borrow_mut() = scopes.collect();
        let regions = graph.nodes.iter().filter_map(|n| n.remat);
        let next = regions.map(|remat| remat.region + 1).max();
        b.inner.remat_count.set(next.unwrap_or(0));
        *b.inner.graph.borrow_mut() = graph;
        b
    }

    /// Adds the operations of a body whose inputs are `operands`, each at its own scope; gives the body's first result.
    pub(crate) fn insert(&self, body: &Graph, operands: &[Tensor]) -> Result<Tensor> {
        match self.insert_all(body, operands)?.first() {
            Some(result) => Ok(*result),
            None => Err(self.invalid("a body without a result")),
        }
    }

    /// The same, with all results.
    pub(crate) fn insert_all(&self, body: &Graph, operands: &[Tensor]) -> Result<Vec<Tensor>> {
        let mut copies: Vec<Tensor> = Vec::with_capacity(body.nodes.len());
        for node in &body.nodes {
            let copy = match node.op {
                Op::Parameter(index) => operands[index],
                _ => {
                    let inputs: Vec<Tensor> =
                        node.operands.iter().map(|o| copies[*o as usize]).collect();
                    self.at(body.path(node)).copy_node(node, &inputs)?
                }
            };
            copies.push(copy);
        }
        let outputs = body.outputs.iter();
        Ok(outputs.map(|output| copies[output.node as usize]).collect())
    }

    /// Adds a copy of `node` with other operands, in the scope and region this builder has.
    pub(crate) fn copy_node(&self, node: &Node, operands: &[Tensor]) -> Result<Tensor> {
        self.check_graph(&node.op, operands)?;
        Ok(self.add_node(node.op.clone(), operands, node.shape.clone()))
    }
}

#[cfg(test)]
mod tests;
