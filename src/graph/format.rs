//! How the operands of a contraction are quantized.

use crate::dtype::DType;
use crate::host_tensor::float8;
use crate::util::named;

named! {
    /// Integer-range and scale conventions of the tools people compare with.
    ///
    /// Which numbers each stands for is in `docs/quantization.md`.
    pub enum NumericsConvention {
        /// Google AQT: scale absmax/127.5, multiply by the reciprocal, clip to ±127, then round.
        Aqt = "aqt",
        /// Google Qwix: scale absmax/127.5, divide, round, saturate at -128 and 127.
        Qwix = "qwix",
        /// AMD Quark: scale absmax/127.5, multiply by the reciprocal, round, saturate at -128 and 127; with zero points too.
        Quark = "quark",
    }
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
    /// Elements with the same index of the non-contracting dimensions: an output channel of a weight, a token of an
    /// activation (for a convolution: an output feature of the kernel, an image of the batch).
    Channel,
    /// Each run of so many elements along the contracting dimension of a channel.
    Group(usize),
}

/// The source of a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Range {
    /// From the values themselves, whenever they are computed.
    Dynamic,
    /// From a recorded largest magnitude, by its bits as `f32`: the same in every run.
    Static(u32),
    /// Of a weight that is quantized in its checkpoint: the scale stands there beside the integers, in this type.
    Stored(DType),
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
    /// What the largest magnitude becomes before it is rounded: half a step above the largest integer, or the largest
    /// number of a float type.
    pub fn bound(self) -> f64 {
        match self.element {
            DType::F8E4M3Fn => f64::from(float8::LARGEST),
            integers => {
                let (lowest, highest) = integers.integer_range();
                (highest - lowest) / 2.0
            }
        }
    }

    /// Whether its scales multiply the results of a contraction. Otherwise an operand is multiplied as `(integers - zero
    /// point) * scale`.
    pub fn scales_results(self) -> bool {
        !self.zero_point && !matches!(self.granularity, Granularity::Group(_))
    }

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

/// One of the uses of a key for stochastic rounding. Each has noise of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundingStream(pub u32);

impl RoundingStream {
    /// What is added to the key's high word. Streams start far apart: multiples of 2^32 over the golden ratio.
    pub fn salt(self) -> u32 {
        self.0.wrapping_mul(0x9E37_79B9)
    }
}
