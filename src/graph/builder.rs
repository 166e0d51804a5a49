//! Builds graphs: every operation is checked as it is added.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt::Display;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::dtype::DType;
use crate::host_tensor::HostTensor;
use crate::shape::Shape;

use super::infer::infer;
use super::op::{
    Binary, Comparison, ConvDims, DotDims, GatherDims, Op, PadDim, QuantDot, Reduction,
    ScatterDims, ScatterKind, Unary,
};
use super::{Graph, GraphError, Init, Input, InputKind, Node, Output, Tensor};

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
    remat: Option<u32>,
}

impl Default for Builder {
    fn default() -> Self {
        Builder::new()
    }
}

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
    pub fn at(&self, path: String) -> Builder {
        let mut ids = self.inner.scope_ids.borrow_mut();
        let scope = match ids.get(&path) {
            Some(id) => *id,
            None => {
                let mut graph = self.inner.graph.borrow_mut();
                let id = graph.scopes.len() as u32;
                graph.scopes.push(path.clone());
                ids.insert(path, id);
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
    /// (gradient checkpointing). Each call opens a region of its own.
    pub fn checkpoint(&self) -> Builder {
        let region = self.inner.remat_count.get();
        self.inner.remat_count.set(region + 1);
        Builder {
            remat: Some(region),
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
        GraphError::Invalid {
            path: self.path(),
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
        Ok(self.add_node(op, operands, shape))
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

    // Elementwise

    pub fn unary(&self, kind: Unary, x: Tensor) -> Result<Tensor> {
        self.push(Op::Unary(kind), &[x])
    }

    /// Applies `kind` after broadcasting both operands to one shape by NumPy's rules.
    pub fn binary(&self, kind: Binary, x: Tensor, y: Tensor) -> Result<Tensor> {
        let (x, y) = self.broadcast_together(x, y)?;
        self.push(Op::Binary(kind), &[x, y])
    }

    pub fn add(&self, x: Tensor, y: Tensor) -> Result<Tensor> {
        self.binary(Binary::Add, x, y)
    }

    pub fn sub(&self, x: Tensor, y: Tensor) -> Result<Tensor> {
        self.binary(Binary::Sub, x, y)
    }

    pub fn mul(&self, x: Tensor, y: Tensor) -> Result<Tensor> {
        self.binary(Binary::Mul, x, y)
    }

    pub fn div(&self, x: Tensor, y: Tensor) -> Result<Tensor> {
        self.binary(Binary::Div, x, y)
    }

    pub fn max(&self, x: Tensor, y: Tensor) -> Result<Tensor> {
        self.binary(Binary::Max, x, y)
    }

    pub fn min(&self, x: Tensor, y: Tensor) -> Result<Tensor> {
        self.binary(Binary::Min, x, y)
    }

    /// `x + value`, with `value` rounded to the type of `x`.
    pub fn add_scalar(&self, x: Tensor, value: f64) -> Result<Tensor> {
        let value = self.scalar(self.dtype(x), value)?;
        self.add(x, value)
    }

    /// `x * value`, with `value` rounded to the type of `x`.
    pub fn mul_scalar(&self, x: Tensor, value: f64) -> Result<Tensor> {
        let value = self.scalar(self.dtype(x), value)?;
        self.mul(x, value)
    }

    pub fn neg(&self, x: Tensor) -> Result<Tensor> {
        self.unary(Unary::Neg, x)
    }

    pub fn exp(&self, x: Tensor) -> Result<Tensor> {
        self.unary(Unary::Exp, x)
    }

    pub fn log(&self, x: Tensor) -> Result<Tensor> {
        self.unary(Unary::Log, x)
    }

    pub fn sqrt(&self, x: Tensor) -> Result<Tensor> {
        self.unary(Unary::Sqrt, x)
    }

    pub fn rsqrt(&self, x: Tensor) -> Result<Tensor> {
        self.unary(Unary::Rsqrt, x)
    }

    pub fn tanh(&self, x: Tensor) -> Result<Tensor> {
        self.unary(Unary::Tanh, x)
    }

    pub fn logistic(&self, x: Tensor) -> Result<Tensor> {
        self.unary(Unary::Logistic, x)
    }

    pub fn erf(&self, x: Tensor) -> Result<Tensor> {
        self.unary(Unary::Erf, x)
    }

    pub fn sin(&self, x: Tensor) -> Result<Tensor> {
        self.unary(Unary::Sin, x)
    }

    pub fn cos(&self, x: Tensor) -> Result<Tensor> {
        self.unary(Unary::Cos, x)
    }

    pub fn abs(&self, x: Tensor) -> Result<Tensor> {
        self.unary(Unary::Abs, x)
    }

    /// `x * x`
    pub fn square(&self, x: Tensor) -> Result<Tensor> {
        self.push(Op::Binary(Binary::Mul), &[x, x])
    }

    pub fn compare(&self, kind: Comparison, x: Tensor, y: Tensor) -> Result<Tensor> {
        let (x, y) = self.broadcast_together(x, y)?;
        self.push(Op::Compare(kind), &[x, y])
    }

    /// `on_true` where `pred` holds, else `on_false`; all three broadcast to one shape.
    pub fn select(&self, pred: Tensor, on_true: Tensor, on_false: Tensor) -> Result<Tensor> {
        let (on_true, on_false) = self.broadcast_together(on_true, on_false)?;
        let (pred, on_true) = self.broadcast_together(pred, on_true)?;
        let dims = self.dims(pred);
        let on_false = self.broadcast_to(on_false, &dims)?;
        self.push(Op::Select, &[pred, on_true, on_false])
    }

    /// `x` limited to `[low, high]`.
    pub fn clamp(&self, x: Tensor, low: f64, high: f64) -> Result<Tensor> {
        let shape = self.shape(x);
        let low = self.full(&shape, low)?;
        let high = self.full(&shape, high)?;
        self.push(Op::Clamp, &[low, x, high])
    }

    /// `x` in another element type; `x` itself when it has it already.
    pub fn convert(&self, x: Tensor, dtype: DType) -> Result<Tensor> {
        if self.dtype(x) == dtype {
            return Ok(x);
        }
        self.push(Op::Convert(dtype), &[x])
    }

    pub fn bitcast_convert(&self, x: Tensor, dtype: DType) -> Result<Tensor> {
        self.push(Op::BitcastConvert(dtype), &[x])
    }

    // Shapes

    /// Puts dimension `i` of `x` at `dims[i]` of a result with sizes `result`.
    pub fn broadcast_in_dim(&self, x: Tensor, dims: &[usize], result: &[usize]) -> Result<Tensor> {
        if dims.iter().copied().eq(0..result.len()) && self.dims(x) == result {
            return Ok(x);
        }
        self.push(
            Op::BroadcastInDim {
                dims: dims.to_vec(),
                result: result.to_vec(),
            },
            &[x],
        )
    }

    /// Expands `x` to `result` by NumPy's rules (trailing dimensions align).
    pub fn broadcast_to(&self, x: Tensor, result: &[usize]) -> Result<Tensor> {
        let rank = self.dims(x).len();
        if rank > result.len() {
            return Err(self.invalid(format!(
                "{} cannot broadcast to the lower rank of {result:?}",
                self.shape(x)
            )));
        }
        let dims: Vec<usize> = (result.len() - rank..result.len()).collect();
        self.broadcast_in_dim(x, &dims, result)
    }

    fn broadcast_together(&self, x: Tensor, y: Tensor) -> Result<(Tensor, Tensor)> {
        let (a, b) = (self.dims(x), self.dims(y));
        if a == b {
            return Ok((x, y));
        }
        let rank = a.len().max(b.len());
        let mut result = vec![1; rank];
        for i in 0..rank {
            let size = |dims: &[usize]| {
                let skipped = rank - dims.len();
                if i < skipped { 1 } else { dims[i - skipped] }
            };
            let (p, q) = (size(&a), size(&b));
            result[i] = if p == 1 { q } else { p };
            if q != 1 && q != result[i] {
                return Err(self.invalid(format!(
                    "{} and {} do not broadcast together",
                    self.shape(x),
                    self.shape(y)
                )));
            }
        }
        Ok((
            self.broadcast_to(x, &result)?,
            self.broadcast_to(y, &result)?,
        ))
    }

    pub fn reshape(&self, x: Tensor, dims: &[usize]) -> Result<Tensor> {
        if self.dims(x) == dims {
            return Ok(x);
        }
        self.push(Op::Reshape(dims.to_vec()), &[x])
    }

    /// Result dimension `i` is dimension `perm[i]` of `x`.
    pub fn transpose(&self, x: Tensor, perm: &[usize]) -> Result<Tensor> {
        if perm.iter().copied().eq(0..self.dims(x).len()) {
            return Ok(x);
        }
        self.push(Op::Transpose(perm.to_vec()), &[x])
    }

    pub fn slice(
        &self,
        x: Tensor,
        start: &[usize],
        limit: &[usize],
        stride: &[usize],
    ) -> Result<Tensor> {
        self.push(
            Op::Slice {
                start: start.to_vec(),
                limit: limit.to_vec(),
                stride: stride.to_vec(),
            },
            &[x],
        )
    }

    /// `x[.., start..limit, ..]` along dimension `dim`.
    pub fn slice_dim(&self, x: Tensor, dim: usize, start: usize, limit: usize) -> Result<Tensor> {
        let dims = self.dims(x);
        let mut starts = vec![0; dims.len()];
        let mut limits = dims.clone();
        if dim >= dims.len() {
            return Err(self.invalid(format!("{} has no dimension {dim}", self.shape(x))));
        }
        starts[dim] = start;
        limits[dim] = limit;
        self.slice(x, &starts, &limits, &vec![1; dims.len()])
    }

    /// `parts` equal slices of `x` along `dim`.
    pub fn split(&self, x: Tensor, dim: usize, parts: usize) -> Result<Vec<Tensor>> {
        let size = *self
            .dims(x)
            .get(dim)
            .ok_or_else(|| self.invalid(format!("{} has no dimension {dim}", self.shape(x))))?;
        if parts == 0 || size % parts != 0 {
            return Err(self.invalid(format!(
                "{} dimension {dim} does not split into {parts} equal parts",
                self.shape(x)
            )));
        }
        let each = size / parts;
        (0..parts)
            .map(|i| self.slice_dim(x, dim, i * each, (i + 1) * each))
            .collect()
    }

    pub fn dynamic_slice(&self, x: Tensor, start: &[Tensor], sizes: &[usize]) -> Result<Tensor> {
        let mut operands = vec![x];
        operands.extend(start);
        self.push(Op::DynamicSlice(sizes.to_vec()), &operands)
    }

    pub fn dynamic_update_slice(
        &self,
        x: Tensor,
        update: Tensor,
        start: &[Tensor],
    ) -> Result<Tensor> {
        let mut operands = vec![x, update];
        operands.extend(start);
        self.push(Op::DynamicUpdateSlice, &operands)
    }

    /// Pads with `value`, rounded to the type of `x`.
    pub fn pad(&self, x: Tensor, value: f64, dims: &[PadDim]) -> Result<Tensor> {
        let value = self.scalar(self.dtype(x), value)?;
        self.push(Op::Pad(dims.to_vec()), &[x, value])
    }

    pub fn concatenate(&self, parts: &[Tensor], dim: usize) -> Result<Tensor> {
        if let [single] = parts {
            return Ok(*single);
        }
        self.push(Op::Concatenate(dim), parts)
    }

    pub fn reverse(&self, x: Tensor, dims: &[usize]) -> Result<Tensor> {
        self.push(Op::Reverse(dims.to_vec()), &[x])
    }

    pub fn gather(&self, x: Tensor, indices: Tensor, dims: GatherDims) -> Result<Tensor> {
        self.push(Op::Gather(dims), &[x, indices])
    }

    pub fn scatter(
        &self,
        kind: ScatterKind,
        x: Tensor,
        indices: Tensor,
        updates: Tensor,
        dims: ScatterDims,
    ) -> Result<Tensor> {
        self.push(Op::Scatter(kind, dims), &[x, indices, updates])
    }

    /// Rows of `table` (`[rows, ..]`) chosen by integer `indices`: the result has the dimensions of
    /// `indices`, then those of a row.
    pub fn take(&self, table: Tensor, indices: Tensor) -> Result<Tensor> {
        let table_dims = self.dims(table);
        if table_dims.is_empty() {
            return Err(self.invalid("cannot take rows of a scalar"));
        }
        let index_rank = self.dims(indices).len();
        let mut slice_sizes = table_dims.clone();
        slice_sizes[0] = 1;
        self.gather(
            table,
            indices,
            GatherDims {
                offset_dims: (index_rank..index_rank + table_dims.len() - 1).collect(),
                collapsed_slice_dims: vec![0],
                start_index_map: vec![0],
                index_vector_dim: index_rank,
                slice_sizes,
            },
        )
    }

    // Reductions and contractions

    pub fn reduce(&self, kind: Reduction, x: Tensor, dims: &[usize]) -> Result<Tensor> {
        if dims.is_empty() {
            return Ok(x);
        }
        let mut dims = dims.to_vec();
        dims.sort_unstable();
        self.push(Op::Reduce { kind, dims }, &[x])
    }

    pub fn sum(&self, x: Tensor, dims: &[usize]) -> Result<Tensor> {
        self.reduce(Reduction::Sum, x, dims)
    }

    /// Reduces `dims` and keeps them with size 1.
    pub fn reduce_keep(&self, kind: Reduction, x: Tensor, dims: &[usize]) -> Result<Tensor> {
        let mut kept = self.dims(x);
        let reduced = self.reduce(kind, x, dims)?;
        for &d in dims {
            kept[d] = 1;
        }
        self.reshape(reduced, &kept)
    }

    /// The mean over `dims`, keeping them with size 1.
    pub fn mean_keep(&self, x: Tensor, dims: &[usize]) -> Result<Tensor> {
        let sizes = self.dims(x);
        let sum = self.reduce_keep(Reduction::Sum, x, dims)?;
        let count: usize = dims.iter().map(|&d| sizes[d]).product();
        self.mul_scalar(sum, 1.0 / count as f64)
    }

    /// A contraction whose result has element type `result`.
    pub fn dot_general(
        &self,
        lhs: Tensor,
        rhs: Tensor,
        dims: DotDims,
        result: DType,
    ) -> Result<Tensor> {
        self.dot_general_quant(lhs, rhs, dims, result, None)
    }

    pub(crate) fn dot_general_quant(
        &self,
        lhs: Tensor,
        rhs: Tensor,
        dims: DotDims,
        result: DType,
        quant: Option<QuantDot>,
    ) -> Result<Tensor> {
        self.push(
            Op::DotGeneral {
                dims,
                result,
                quant: quant.map(Box::new),
            },
            &[lhs, rhs],
        )
    }

    pub fn convolution(
        &self,
        lhs: Tensor,
        rhs: Tensor,
        dims: ConvDims,
        result: DType,
    ) -> Result<Tensor> {
        self.push(
            Op::Convolution {
                dims: Box::new(dims),
                result,
                quant: None,
            },
            &[lhs, rhs],
        )
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

    /// Adds a copy of `node` with other operands, in the scope and region this builder has.
    pub(crate) fn copy_node(&self, node: &Node, operands: &[Tensor]) -> Result<Tensor> {
        self.check_graph(&node.op, operands)?;
        Ok(self.add_node(node.op.clone(), operands, node.shape.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn f32(dims: &[usize]) -> Shape {
        Shape::new(DType::F32, dims)
    }

    #[test]
    fn scope_paths_are_checkpoint_keys() {
        let b = Builder::new();
        let unet = b.root("unet").scope("down_blocks").scope(0);
        let w = unet.param("weight", f32(&[4, 2]), Init::Ones, &[]).unwrap();
        assert_eq!(unet.path(), "unet/down_blocks.0");
        b.output("w", w, None).unwrap();
        let graph = b.finish();
        assert_eq!(graph.inputs[0].name, "unet/down_blocks.0.weight");
        assert_eq!(graph.inputs[0].key(), "down_blocks.0.weight");
        assert_eq!(graph.parameter_count(), 8);
    }

    #[test]
    fn errors_name_the_place_the_operation_and_the_shapes() {
        let b = Builder::new();
        let x = b.input("x", f32(&[2, 320]), &[]).unwrap();
        let w = b.input("w", f32(&[640, 8]), &[]).unwrap();
        let error = b
            .root("unet")
            .scope("to_q")
            .dot_general(
                x,
                w,
                DotDims {
                    lhs_contract: vec![1],
                    rhs_contract: vec![0],
                    ..DotDims::default()
                },
                DType::F32,
            )
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            "unet/to_q: dot_general: contracting dimensions: lhs sizes [320] and rhs sizes [640] differ"
        );
    }

    #[test]
    fn binary_operations_broadcast_by_numpys_rules() {
        let b = Builder::new();
        let x = b.input("x", f32(&[2, 1, 3]), &[]).unwrap();
        let y = b.input("y", f32(&[4, 1]), &[]).unwrap();
        let z = b.add(x, y).unwrap();
        assert_eq!(b.dims(z), [2, 4, 3]);
        let w = b.input("w", f32(&[5]), &[]).unwrap();
        assert!(b.add(x, w).is_err());
    }

    #[test]
    fn a_region_cannot_see_outer_tensors() {
        let b = Builder::new();
        let x = b.input("x", f32(&[]), &[]).unwrap();
        let error = b
            .while_loop(
                &[x],
                |b, c| {
                    let zero = b.scalar(DType::F32, 0.0)?;
                    b.compare(Comparison::Gt, c[0], zero)
                },
                |b, c| Ok(vec![b.sub(c[0], x)?]),
            )
            .unwrap_err();
        assert!(matches!(error, GraphError::ForeignTensor { .. }), "{error}");
    }

    #[test]
    fn an_output_takes_over_only_one_input_of_its_shape() {
        let b = Builder::new();
        let x = b.input("x", f32(&[2]), &[]).unwrap();
        let y = b.input("y", f32(&[3]), &[]).unwrap();
        assert!(b.output("wrong", y, Some(x)).is_err());
        b.output("first", x, Some(x)).unwrap();
        assert!(b.output("second", x, Some(x)).is_err());
    }
}
