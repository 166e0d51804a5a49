//! What kernels multiply, and how numbers become that.

use crate::dtype::DType;

use super::mosaic::{Kernel, Value as KernelValue};

/// Multiply-adds of int8 products that cannot overflow 32 bits: 128 * 128 * 130,000 < 2^31.
pub(super) const MOST_TERMS: usize = 130_000;

/// What the matrix units multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// AQT's int8, with scales.
    Int8,
    /// AMD Quark's int8, with scales of activations that are recorded.
    RecordedInt8,
    Bf16,
    /// bf16, of weights that are stored otherwise.
    Stored(StoredWeights),
}

/// Weights of integers without zero points, which lie `[1, terms, columns]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredWeights {
    /// `s8` or `s4`.
    pub element: DType,
    /// The terms that share a scale, with which they are rounded to bf16. `None` where each column has one, which sums are
    /// multiplied with.
    pub group: Option<usize>,
}

impl StoredWeights {
    /// `None` of elements that no kernel widens.
    pub(super) fn new(element: DType, group: Option<usize>) -> Option<StoredWeights> {
        let widens = [DType::S8, DType::S4].contains(&element);
        widens.then_some(StoredWeights { element, group })
    }

    /// Terms that are widened at a time: of one scale, and whole tiles. `None` where there are none such.
    pub(super) fn run(self, terms: usize) -> Option<usize> {
        let tile = 8 * 32 / self.element.bits();
        let divides = |run: &usize| {
            let of_scale = self.group.unwrap_or(terms);
            run.is_multiple_of(tile) && terms.is_multiple_of(*run) && of_scale.is_multiple_of(*run)
        };
        [64, 32].into_iter().find(divides)
    }
}

impl Arithmetic {
    /// The type of weights; of integers that are not stored also that of activations when they are multiplied.
    pub(super) fn operand(self) -> DType {
        match self {
            Arithmetic::Int8 | Arithmetic::RecordedInt8 => DType::S8,
            Arithmetic::Bf16 => DType::BF16,
            Arithmetic::Stored(weights) => weights.element,
        }
    }

    /// Whether sums are multiplied with a scale of their column.
    pub(super) fn scales_columns(self) -> bool {
        match self {
            Arithmetic::Int8 | Arithmetic::RecordedInt8 => true,
            Arithmetic::Bf16 => false,
            Arithmetic::Stored(weights) => weights.group.is_none(),
        }
    }

    /// The type of sums.
    pub(super) fn sum(self) -> DType {
        match self {
            Arithmetic::Int8 | Arithmetic::RecordedInt8 => DType::S32,
            Arithmetic::Bf16 | Arithmetic::Stored(_) => DType::F32,
        }
    }
}

/// `x` times inverse scales, rounded to int8, by AQT's numerics to bf16 first; in `f32`.
pub(super) fn rounded_to_integers(
    k: &mut Kernel,
    x: KernelValue,
    inverse: KernelValue,
    arithmetic: Arithmetic,
) -> KernelValue {
    let size = k.size(x);
    let mut y = k.mul(x, inverse);
    let mut lowest = -127.0;
    match arithmetic {
        Arithmetic::Int8 => y = rounded(k, y),
        Arithmetic::RecordedInt8 | Arithmetic::Bf16 | Arithmetic::Stored(_) => lowest = -128.0,
    }
    let highest = k.splat(DType::F32, size, 127.0);
    let lowest = k.splat(DType::F32, size, lowest);
    let y = k.min(y, highest);
    let y = k.max(y, lowest);
    k.round_even(y)
}

/// An `f32` value rounded to bf16.
pub(super) fn rounded(k: &mut Kernel, x: KernelValue) -> KernelValue {
    let x = k.convert(x, DType::BF16);
    k.convert(x, DType::F32)
}
