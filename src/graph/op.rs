//! The closed set of operations. Operands live in the graph; attributes live here.

use std::sync::Arc;

use crate::dtype::DType;
use crate::host_tensor::HostTensor;

use super::custom_call::CustomCall;
use super::{Composite, Graph};

/// Elementwise operations of one operand. Names and meaning are StableHLO's (`Erf` is CHLO's).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unary {
    Abs,
    Ceil,
    Cos,
    Erf,
    Exp,
    Floor,
    IsFinite,
    Log,
    Logistic,
    Neg,
    Not,
    RoundNearestEven,
    Rsqrt,
    Sign,
    Sin,
    Sqrt,
    Tanh,
}

/// Elementwise operations of two operands of one shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binary {
    Add,
    And,
    Div,
    Max,
    Min,
    Mul,
    Or,
    Pow,
    Rem,
    ShiftLeft,
    ShiftRightLogical,
    Sub,
    Xor,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
}

/// The associative operation of a [`Op::Reduce`]; its initial value is the operation's identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    Sum,
    Max,
    Min,
    And,
    Or,
}

/// How [`Op::Scatter`] combines an update with what is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScatterKind {
    Add,
    Set,
}

/// Dimension numbers of a `dot_general`. The result's dimensions are batch, lhs free, rhs free.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DotDims {
    pub lhs_batch: Vec<usize>,
    pub rhs_batch: Vec<usize>,
    pub lhs_contract: Vec<usize>,
    pub rhs_contract: Vec<usize>,
}

/// Where batch, feature and spatial dimensions of one convolution operand lie.
///
/// For the kernel, `batch` is the output-feature dimension and `feature` the input-feature dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConvLayout {
    pub batch: usize,
    pub feature: usize,
    pub spatial: Vec<usize>,
}

impl ConvLayout {
    /// `[b, 0, 1, .., f]`
    pub fn channels_last(spatial: usize) -> Self {
        ConvLayout {
            batch: 0,
            feature: spatial + 1,
            spatial: (1..=spatial).collect(),
        }
    }

    /// `[b, f, 0, 1, ..]`; for a kernel `[o, i, 0, 1, ..]`, PyTorch's order.
    pub fn channels_first(spatial: usize) -> Self {
        ConvLayout {
            batch: 0,
            feature: 1,
            spatial: (2..spatial + 2).collect(),
        }
    }

    pub fn rank(&self) -> usize {
        self.spatial.len() + 2
    }
}

/// Attributes of a convolution; per-spatial-dimension lists follow the layouts' spatial order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConvDims {
    pub lhs: ConvLayout,
    pub rhs: ConvLayout,
    pub out: ConvLayout,
    pub strides: Vec<usize>,
    /// Low and high padding; negative values crop.
    pub padding: Vec<(i64, i64)>,
    pub lhs_dilation: Vec<usize>,
    pub rhs_dilation: Vec<usize>,
    pub feature_groups: usize,
    pub batch_groups: usize,
}

/// Attributes of `gather`, as StableHLO defines them (without operand batching dimensions).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatherDims {
    pub offset_dims: Vec<usize>,
    pub collapsed_slice_dims: Vec<usize>,
    pub start_index_map: Vec<usize>,
    pub index_vector_dim: usize,
    pub slice_sizes: Vec<usize>,
}

/// Attributes of `scatter`, as StableHLO defines them (without operand batching dimensions).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScatterDims {
    pub update_window_dims: Vec<usize>,
    pub inserted_window_dims: Vec<usize>,
    pub scatter_dims_to_operand_dims: Vec<usize>,
    pub index_vector_dim: usize,
}

/// Padding of one dimension: edge amounts may be negative (they crop), `interior` goes between elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PadDim {
    pub low: i64,
    pub high: i64,
    pub interior: usize,
}

/// Integer-range and scale conventions of the tools people compare with.
///
/// Which numbers each stands for is in `docs/quantization.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NumericsConvention {
    /// Google AQT: scale absmax/127.5, multiply by the reciprocal, clip to ±127, then round.
    Aqt,
    /// Google Qwix: scale absmax/127.5, divide, round, saturate at -128 and 127.
    Qwix,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rounding {
    NearestEven,
    /// Adds uniform noise in [-0.5, 0.5) before rounding to nearest.
    Stochastic,
}

/// Which elements share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Granularity {
    /// All of them.
    Tensor,
    /// Those with the same index of the non-contracting dimensions: an output channel of a weight, a token of an
    /// activation (for a convolution: an output feature of the kernel, an image of the batch).
    Channel,
    /// Each run of so many elements along the contracting dimension of a channel.
    Group(usize),
}

/// Where a scale comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Range {
    /// From the values themselves, whenever they are computed.
    Dynamic,
    /// From a recorded largest magnitude, by its bits as `f32`: the same in every run.
    Static(u32),
}

/// How the values of one tensor are quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorFormat {
    pub element: DType,
    pub granularity: Granularity,
    /// Whether the lowest value, not zero, is the lowest integer.
    pub zero_point: bool,
    pub range: Range,
    pub rounding: Rounding,
    pub convention: NumericsConvention,
}

impl TensorFormat {
    /// int8 with one dynamic symmetric scale a channel, rounded to nearest.
    pub fn int8(convention: NumericsConvention) -> Self {
        TensorFormat {
            element: DType::S8,
            granularity: Granularity::Channel,
            zero_point: false,
            range: Range::Dynamic,
            rounding: Rounding::NearestEven,
            convention,
        }
    }
}

/// Formats of both operands of one contraction; `None` leaves an operand in float.
///
/// With both operands quantized to integers the product accumulates in `s32`; with one, in the contraction's own
/// result type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ContractionQuant {
    pub lhs: Option<TensorFormat>,
    pub rhs: Option<TensorFormat>,
    /// Range finding is done separately in this many equal parts of the first contracting
    /// dimension, and the partial results are summed. 1 means one range for all of it.
    pub local_shards: usize,
}

/// The quantization of a contraction and of the two contractions of its derivative.
///
/// In `dlhs` and `drhs` the lhs is the incoming gradient and the rhs the unquantized residual.
/// `None` leaves that contraction in float.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuantDot {
    pub forward: ContractionQuant,
    pub dlhs: Option<ContractionQuant>,
    pub drhs: Option<ContractionQuant>,
}

/// One operation with its attributes.
#[derive(Clone, Debug)]
pub enum Op {
    /// Input `index` of the graph or region.
    Parameter(usize),
    Constant(HostTensor),
    /// Counts along dimension `0`'s index.
    Iota(usize),
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
    /// The identity on a value made of weights: it is what stays in memory between runs. What is made of it is made
    /// again in every run, so that a weight that was quantized to take less memory does.
    Stored,
    /// The identity; asks for the sharding that the logical axis rules give these axes.
    ShardingConstraint(Vec<Option<&'static str>>),
}

impl Unary {
    pub fn name(self) -> &'static str {
        match self {
            Unary::Abs => "abs",
            Unary::Ceil => "ceil",
            Unary::Cos => "cosine",
            Unary::Erf => "erf",
            Unary::Exp => "exponential",
            Unary::Floor => "floor",
            Unary::IsFinite => "is_finite",
            Unary::Log => "log",
            Unary::Logistic => "logistic",
            Unary::Neg => "negate",
            Unary::Not => "not",
            Unary::RoundNearestEven => "round_nearest_even",
            Unary::Rsqrt => "rsqrt",
            Unary::Sign => "sign",
            Unary::Sin => "sine",
            Unary::Sqrt => "sqrt",
            Unary::Tanh => "tanh",
        }
    }
}

impl Binary {
    pub fn name(self) -> &'static str {
        match self {
            Binary::Add => "add",
            Binary::And => "and",
            Binary::Div => "divide",
            Binary::Max => "maximum",
            Binary::Min => "minimum",
            Binary::Mul => "multiply",
            Binary::Or => "or",
            Binary::Pow => "power",
            Binary::Rem => "remainder",
            Binary::ShiftLeft => "shift_left",
            Binary::ShiftRightLogical => "shift_right_logical",
            Binary::Sub => "subtract",
            Binary::Xor => "xor",
        }
    }
}

impl Comparison {
    /// The direction's name in StableHLO.
    pub fn name(self) -> &'static str {
        match self {
            Comparison::Eq => "EQ",
            Comparison::Ne => "NE",
            Comparison::Lt => "LT",
            Comparison::Le => "LE",
            Comparison::Gt => "GT",
            Comparison::Ge => "GE",
        }
    }
}

impl Reduction {
    /// The StableHLO operation in the reduction's body.
    pub fn name(self) -> &'static str {
        match self {
            Reduction::Sum => "add",
            Reduction::Max => "maximum",
            Reduction::Min => "minimum",
            Reduction::And => "and",
            Reduction::Or => "or",
        }
    }
}

impl Op {
    /// The operation's StableHLO name without its dialect prefix.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Parameter(_) => "parameter",
            Op::Constant(_) => "constant",
            Op::Iota(_) => "iota",
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
            Op::CustomCall(call) => call.target(),
            Op::Stored => "stored",
            Op::ShardingConstraint(_) => "sharding_constraint",
        }
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
