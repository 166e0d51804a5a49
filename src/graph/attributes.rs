//! Attributes of operations: kinds of elementwise operations, and dimension numbers.

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

impl Comparison {
    /// Whether it holds of two numbers; what is compared with a NaN is unequal and neither less nor greater.
    pub fn holds<T: PartialOrd>(self, a: T, b: T) -> bool {
        match self {
            Comparison::Eq => a == b,
            Comparison::Ne => a != b,
            Comparison::Lt => a < b,
            Comparison::Le => a <= b,
            Comparison::Gt => a > b,
            Comparison::Ge => a >= b,
        }
    }
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

    /// The dimensions in the order `[b, 0, 1, .., f]`, by which a transpose brings channels last.
    pub fn channels_last_order(&self) -> Vec<usize> {
        [&[self.batch], self.spatial.as_slice(), &[self.feature]].concat()
    }

    /// `[b, f, 0, 1, ..]`; for a kernel `[o, i, 0, 1, ..]`, PyTorch's order.
    pub fn channels_first(spatial: usize) -> Self {
        ConvLayout {
            batch: 0,
            feature: 1,
            spatial: (2..spatial + 2).collect(),
        }
    }

    /// With the batch and the features in each other's place, as derivatives of convolutions have them.
    pub fn swapped(&self) -> ConvLayout {
        ConvLayout {
            batch: self.feature,
            feature: self.batch,
            spatial: self.spatial.clone(),
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

impl ConvDims {
    /// Of an image, channels last, with a kernel in PyTorch's order, the same in both spatial dimensions.
    pub fn of_image(stride: usize, padding: (i64, i64)) -> ConvDims {
        ConvDims {
            lhs: ConvLayout::channels_last(2),
            rhs: ConvLayout::channels_first(2),
            out: ConvLayout::channels_last(2),
            strides: vec![stride; 2],
            padding: vec![padding; 2],
            lhs_dilation: vec![1; 2],
            rhs_dilation: vec![1; 2],
            feature_groups: 1,
            batch_groups: 1,
        }
    }
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
