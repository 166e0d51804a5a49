//! The closed set of operations. Operands live in the graph; attributes live here.

use std::sync::Arc;

use crate::dtype::DType;
use crate::host_tensor::HostTensor;

use super::{
    Binary, Comparison, Composite, Contraction, ConvDims, CustomCall, DotDims, GatherDims, Graph,
    PadDim, QuantDot, Reduction, ScatterDims, ScatterKind, Unary,
};

/// One operation with its attributes.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// Input `index` of the graph or region.
    Parameter(usize),
    Constant(HostTensor),
    /// Counts along dimension `0`'s index.
    Iota(usize),
    /// Memory whose elements are undefined until they are written.
    Uninitialized,
    Unary(Unary),
    Binary(Binary),
    Compare(Comparison),
    /// Operands: predicate, value where true, value where false.
    Select,
    /// Operands: minimum, value, maximum, all of one shape.
    Clamp,
    Convert(DType),
    BitcastConvert(DType),
    /// Operand dimension `i` becomes result dimension `dims[i]`; size-1 dimensions expand.
    BroadcastInDim {
        dims: Vec<usize>,
        result: Vec<usize>,
    },
    Reshape(Vec<usize>),
    /// Result dimension `i` is operand dimension `perm[i]`.
    Transpose(Vec<usize>),
    Slice {
        start: Vec<usize>,
        limit: Vec<usize>,
        stride: Vec<usize>,
    },
    /// Operands: value, then one scalar start index for each dimension.
    DynamicSlice(Vec<usize>),
    /// Operands: value, update, then one scalar start index for each dimension.
    DynamicUpdateSlice,
    /// Operands: value, scalar padding value.
    Pad(Vec<PadDim>),
    Concatenate(usize),
    Reverse(Vec<usize>),
    /// Operands: value, start indices. Indices out of bounds are clamped.
    Gather(GatherDims),
    /// Operands: value, indices, updates. Updates out of bounds are dropped.
    Scatter(ScatterKind, ScatterDims),
    Reduce {
        kind: Reduction,
        dims: Vec<usize>,
    },
    DotGeneral {
        dims: DotDims,
        result: DType,
        quant: Option<Box<QuantDot>>,
    },
    Convolution {
        dims: Box<ConvDims>,
        result: DType,
        quant: Option<Box<QuantDot>>,
    },
    /// Operands: the initial carry. `cond` maps the carry to a scalar predicate, `body` to the next carry.
    /// The node's own shape is that of the first carry element; read results through `GetTupleElement`.
    While {
        cond: Box<Graph>,
        body: Box<Graph>,
    },
    GetTupleElement(usize),
    /// The identity on all its operands; the compiler may not move computations across it.
    /// The node's own shape is that of the first operand; read results through `GetTupleElement`.
    OptimizationBarrier,
    /// A layer or a quantization step that a backend may have a kernel for; `body` says what it means.
    Composite {
        kind: Composite,
        body: Box<Graph>,
    },
    /// A kernel of a backend.
    CustomCall(Arc<dyn CustomCall>),
    /// The identity on a value computed from weights: this value stays in memory between runs. Everything computed from
    /// it is computed again in every run, so that a quantized weight takes less memory.
    Stored,
    /// The identity; asks for the sharding that the logical axis rules give these axes.
    ShardingConstraint(Vec<Option<&'static str>>),
}

impl Op {
    /// The operation's StableHLO name without its dialect prefix.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Parameter(_) => "parameter",
            Op::Constant(_) => "constant",
            Op::Iota(_) => "iota",
            Op::Uninitialized => "uninitialized",
            Op::Unary(op) => op.name(),
            Op::Binary(op) => op.name(),
            Op::Compare(_) => "compare",
            Op::Select => "select",
            Op::Clamp => "clamp",
            Op::Convert(_) => "convert",
            Op::BitcastConvert(_) => "bitcast_convert",
            Op::BroadcastInDim { .. } => "broadcast_in_dim",
            Op::Reshape(_) => "reshape",
            Op::Transpose(_) => "transpose",
            Op::Slice { .. } => "slice",
            Op::DynamicSlice(_) => "dynamic_slice",
            Op::DynamicUpdateSlice => "dynamic_update_slice",
            Op::Pad(_) => "pad",
            Op::Concatenate(_) => "concatenate",
            Op::Reverse(_) => "reverse",
            Op::Gather(_) => "gather",
            Op::Scatter(..) => "scatter",
            Op::Reduce { .. } => "reduce",
            Op::DotGeneral { .. } => "dot_general",
            Op::Convolution { .. } => "convolution",
            Op::While { .. } => "while",
            Op::GetTupleElement(_) => "get_tuple_element",
            Op::OptimizationBarrier => "optimization_barrier",
            Op::Composite { kind, .. } => kind.name(),
            Op::CustomCall(call) => call.name(),
            Op::Stored => "stored",
            Op::ShardingConstraint(_) => "sharding_constraint",
        }
    }

    /// The contraction without quantization.
    pub fn contraction(contraction: &Contraction, result: DType) -> Op {
        match contraction {
            Contraction::Dot(dims) => Op::DotGeneral {
                dims: dims.clone(),
                result,
                quant: None,
            },
            Contraction::Convolution(dims) => Op::Convolution {
                dims: dims.clone(),
                result,
                quant: None,
            },
        }
    }

    /// How often a loop runs that counts its first carry up from 0 to a constant, as [`super::roll`] writes them; `None` for
    /// other loops and operations.
    pub fn trips(&self) -> Option<u64> {
        let Op::While { cond, .. } = self else {
            return None;
        };
        let holds = &cond.nodes[cond.outputs.first()?.node as usize];
        let operand = |at: usize| &cond.nodes[holds.operands[at] as usize].op;
        match (&holds.op, operand(0), operand(1)) {
            (Op::Compare(Comparison::Lt), Op::Parameter(0), Op::Constant(end)) => {
                let end = end.to_f64_vec().ok()?.first().copied()?;
                Some(end as u64)
            }
            _ => None,
        }
    }

    /// The regions of a loop: its condition and its body.
    pub fn loop_regions(&self) -> impl Iterator<Item = &Graph> {
        let regions = match self {
            Op::While { cond, body } => [Some(cond), Some(body)],
            _ => [None, None],
        };
        regions.into_iter().flatten().map(Box::as_ref)
    }

    /// The same operation with each of its regions replaced.
    pub(super) fn with_regions(&self, replace: &dyn Fn(&Graph) -> Graph) -> Op {
        match self {
            Op::While { cond, body } => Op::While {
                cond: Box::new(replace(cond)),
                body: Box::new(replace(body)),
            },
            Op::Composite { kind, body } => Op::Composite {
                kind: kind.clone(),
                body: Box::new(replace(body)),
            },
            other => other.clone(),
        }
    }
}
