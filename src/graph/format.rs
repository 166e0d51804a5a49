//! How the operands of a contraction are quantized.

use crate::dtype::DType;
use crate::host_tensor::{Float6, float6, float8};
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
        /// DeepCompressor, and NVIDIA's ModelOpt with a narrow range: scale absmax/127, divide, round, saturate at -127 and 127.
        Narrow = "narrow",
        /// llama.cpp's blocks: a scale in f16; where there is a minimum, it is a float that is added to `integer * scale`.
        Gguf = "gguf",
        /// bitsandbytes' NF4: codes of 16 quantiles of the normal distribution, times the largest magnitude.
        Nf4 = "nf4",
        /// OCP's microscaling formats: scales that are powers of two; `u4` are the codes of fp4.
        Mx = "mx",
        /// The same with numbers of 6 bits: a sign, 2 bits of exponent, 3 of mantissa. Programs have them as `f8E4M3FN`, which holds
        /// all of them.
        MxE2M3 = "mx_e2m3",
        /// The same with 3 bits of exponent and 2 of mantissa.
        MxE3M2 = "mx_e3m2",
        /// NVIDIA's NVFP4: codes of fp4, scales in fp8 with one number that multiplies them.
        Nv = "nv",
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
    /// Those in one of so many equal parts of the first dimension: what a slice has of a batch.
    Part(usize),
    /// Elements with the same index of the contracting dimension: a feature of all tokens of an activation. The weight is
    /// multiplied by these scales before it is quantized, so that nothing follows the product.
    Feature,
}

/// The source of a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Range {
    /// From the values themselves, whenever they are computed.
    Dynamic,
    /// From a recorded largest magnitude, by its bits as `f32`: the same in every run.
    Static(u32),
    /// The scale stands in the checkpoint, in this type: of a weight that is quantized there, beside the integers; of an
    /// activation that which calibration found.
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

/// bitsandbytes' NF4, by its codes (`create_normal_map` rounded to `f32`; QLoRA, Dettmers et al., 2023, appendix E).
#[allow(clippy::excessive_precision)]
pub const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Floats of 4 bits, `f4E2M1FN`, by their codes: a sign, 2 bits of exponent, 1 of mantissa.
pub const FP4: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

impl NumericsConvention {
    /// Whether its numbers are integers that programs make of floats, and the host alike, with scales in the type of the floats.
    /// Those of the others have scales in types of their own, and are made on the host alone.
    pub fn is_of_programs(self) -> bool {
        match self {
            NumericsConvention::Aqt
            | NumericsConvention::Qwix
            | NumericsConvention::Quark
            | NumericsConvention::Narrow => true,
            NumericsConvention::Gguf
            | NumericsConvention::Nf4
            | NumericsConvention::Mx
            | NumericsConvention::MxE2M3
            | NumericsConvention::MxE3M2
            | NumericsConvention::Nv => false,
        }
    }

    /// Whether activations are rounded by it to int4, or to int8 by a recorded scale.
    pub fn has_activations(self) -> bool {
        match self {
            NumericsConvention::Quark | NumericsConvention::Narrow => true,
            NumericsConvention::Aqt
            | NumericsConvention::Qwix
            | NumericsConvention::Gguf
            | NumericsConvention::Nf4
            | NumericsConvention::Mx
            | NumericsConvention::MxE2M3
            | NumericsConvention::MxE3M2
            | NumericsConvention::Nv => false,
        }
    }
}

impl TensorFormat {
    /// The numbers that the 16 codes of `u4` stand for, where those are not the codes themselves.
    pub fn codebook(self) -> Option<&'static [f32; 16]> {
        match (self.convention, self.element) {
            (NumericsConvention::Nf4, DType::U4) => Some(&NF4),
            (NumericsConvention::Mx | NumericsConvention::Nv, DType::U4) => Some(&FP4),
            _ => None,
        }
    }

    /// The floats of 6 bits that its elements are, if they are such.
    pub fn float6(self) -> Option<Float6> {
        match self.convention {
            NumericsConvention::MxE2M3 => Some(float6::E2M3),
            NumericsConvention::MxE3M2 => Some(float6::E3M2),
            NumericsConvention::Aqt
            | NumericsConvention::Qwix
            | NumericsConvention::Quark
            | NumericsConvention::Narrow
            | NumericsConvention::Gguf
            | NumericsConvention::Nf4
            | NumericsConvention::Mx
            | NumericsConvention::Nv => None,
        }
    }

    /// The bits of an element in files.
    pub fn bits_in_files(self) -> usize {
        match self.float6() {
            Some(_) => 6,
            None => self.element.bits(),
        }
    }

    /// Whether its scales are OCP's powers of two.
    pub fn is_microscaled(self) -> bool {
        matches!(
            self.convention,
            NumericsConvention::Mx | NumericsConvention::MxE2M3 | NumericsConvention::MxE3M2
        )
    }

    /// Whether one number multiplies all scales of a tensor.
    pub fn has_tensor_scale(self) -> bool {
        self.convention == NumericsConvention::Nv
    }

    /// The same for weights that are stored, their scales in `scale` unless the convention has a type for them.
    pub fn stored(self, scale: DType) -> TensorFormat {
        let scale = match self.convention {
            NumericsConvention::Aqt
            | NumericsConvention::Qwix
            | NumericsConvention::Quark
            | NumericsConvention::Narrow => scale,
            NumericsConvention::Gguf => DType::F16,
            NumericsConvention::Nf4 => DType::F32,
            // It holds the powers of two, and every device has it.
            NumericsConvention::Mx | NumericsConvention::MxE2M3 | NumericsConvention::MxE3M2 => {
                DType::BF16
            }
            NumericsConvention::Nv => DType::F8E4M3Fn,
        };
        TensorFormat {
            range: Range::Stored(scale),
            ..self
        }
    }

    /// The type of scales in files.
    pub fn scale_type_in_files(self) -> DType {
        match (
            self.is_microscaled(),
            self.stored(DType::F32).range,
            self.range,
        ) {
            (true, _, _) => DType::F8E8M0Fnu,
            (_, _, Range::Stored(scale)) | (_, Range::Stored(scale), _) => scale,
            (_, Range::Dynamic | Range::Static(_), _) => DType::F32,
        }
    }

    /// The type of zero points: of integers an integer, of GGUF's blocks a float that is added.
    pub fn zero_point_type(self) -> DType {
        match (self.convention, self.range) {
            (NumericsConvention::Gguf, Range::Stored(scale)) => scale,
            _ => DType::S8,
        }
    }

    /// Whether its scale comes from a checkpoint: of a weight beside its integers, of an activation that which calibration found.
    pub fn has_stored_scale(self) -> bool {
        matches!(self.range, Range::Stored(_))
    }

    /// What the largest magnitude becomes before it is rounded: half a step above the largest integer, where the convention is
    /// narrow the largest integer itself, or the largest number of a float type.
    pub fn bound(self) -> f64 {
        if let Some(float6) = self.float6() {
            return f64::from(float6.largest());
        }
        match self.element {
            DType::F8E4M3Fn => f64::from(float8::LARGEST),
            DType::F8E5M2 => f64::from(float8::LARGEST_E5M2),
            _ if self.codebook().is_some() => match self.convention {
                NumericsConvention::Nf4 => 1.0,
                _ => 6.0,
            },
            _ => self.bound_and_ends_of_integers().0,
        }
    }

    /// The lowest and the highest number that values become, in scales.
    pub fn ends(self) -> [f64; 2] {
        if self.element.is_float() {
            return [-self.bound(), self.bound()];
        }
        self.bound_and_ends_of_integers().1
    }

    /// [`TensorFormat::bound`] and [`TensorFormat::ends`] where elements are integers.
    fn bound_and_ends_of_integers(self) -> (f64, [f64; 2]) {
        let (lowest, highest) = self.element.integer_range();
        let half_a_step_above = (highest - lowest) / 2.0;
        match self.convention {
            NumericsConvention::Narrow => (highest, [-highest, highest]),
            NumericsConvention::Aqt => (half_a_step_above, [-highest, highest]),
            NumericsConvention::Qwix
            | NumericsConvention::Quark
            | NumericsConvention::Gguf
            | NumericsConvention::Nf4
            | NumericsConvention::Mx
            | NumericsConvention::MxE2M3
            | NumericsConvention::MxE3M2
            | NumericsConvention::Nv => (half_a_step_above, [lowest, highest]),
        }
    }

    /// Whether its scales multiply the results of a contraction. Otherwise an operand is multiplied as `(integers - zero
    /// point) * scale`.
    pub fn scales_results(self) -> bool {
        !self.zero_point
            && !matches!(
                self.granularity,
                Granularity::Group(_) | Granularity::Feature
            )
    }

    /// A float of 8 bits with a dynamic scale in Qwix's numerics, rounded to nearest.
    pub fn float8(element: DType, granularity: Granularity) -> Self {
        TensorFormat {
            element,
            granularity,
            ..TensorFormat::int8(NumericsConvention::Qwix)
        }
    }

    /// Whether it is of 8 bits, found in the values themselves and Qwix's: what [`TensorFormat::float8`] gives.
    pub fn is_dynamic_float8(self) -> bool {
        matches!(self.element, DType::F8E4M3Fn | DType::F8E5M2)
            && self == TensorFormat::float8(self.element, self.granularity)
            && self.scales_results()
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
/// With both operands quantized to integers the product accumulates in `s32`, with both in 8-bit floats in `f32`; with one,
/// in the contraction's own result type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ContractionQuant {
    pub lhs: Option<TensorFormat>,
    pub rhs: Option<TensorFormat>,
    /// Range finding is done separately in this many equal parts of the first contracting
    /// dimension, and the partial results are summed. 1 means one range for all of it.
    pub local_shards: usize,
    pub arithmetic: Arithmetic,
}

/// How contractions of rounded operands are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arithmetic {
    /// In the operands' formats, with scales applied to the product where they leave its sums.
    Native,
    /// In float, of operands that were rounded and widened again: fake quantization. It needs no units for the format, and saves no
    /// time.
    Emulated,
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
