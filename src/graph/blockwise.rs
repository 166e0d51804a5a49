//! Floats in 8 bits, block by block: Dettmers et al., "8-bit optimizers via block-wise quantization", 2022, with the code
//! books and the block size of bitsandbytes.
//!
//! Each block of [`BLOCK`] elements in row-major order is divided by its largest absolute value. What is left is the
//! nearest of 256 values: 0, 1, and in each of seven decades, `10^(i - 7)` to `10^(i - 6)`, the centres of `2^i` equal
//! cells (with a sign) or of `2^(i + 1)` (without), so that large values have more digits. Counted from 0, the `k`-th
//! value is in the decade and cell that the position of the highest bit of `k`, or of `k + 1`, and the bits below it say,
//! so neither direction needs a table.

use super::RoundingStream;
use crate::dtype::DType;
use crate::shape::Shape;

/// Elements of a block.
pub const BLOCK: usize = 256;

pub(crate) const DECADES: i32 = 7;

/// The code book.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codes {
    /// -0.993 to 1; code 127 is 0.
    Signed,
    /// 0 to 1.
    Unsigned,
}

/// Attributes of [`Composite::BlockwiseAdamW`](super::Composite::BlockwiseAdamW).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockwiseAdamW {
    pub b1: f64,
    pub b2: f64,
    pub eps: f64,
    /// Relative to the learning rate.
    pub weight_decay: f64,
    /// The noise that a weight in bfloat16 is rounded with; it is rounded to nearest without.
    pub rounding: Option<RoundingStream>,
}

impl BlockwiseAdamW {
    /// The numbers in the composite's operand of scalars.
    pub const SCALARS: usize = 5;
    /// The composite's results: the weight, and codes and largest absolute values of both moments.
    pub const RESULTS: usize = 5;

    /// The code books of the first and of the second moment.
    pub const CODES: [Codes; 2] = [Codes::Signed, Codes::Unsigned];

    /// How many operands the composite has.
    pub fn operands(&self) -> usize {
        Self::RESULTS + 2 + usize::from(self.rounding.is_some())
    }

    /// Whether so many operands have the composite's shapes, whatever the types of weight and gradient are.
    pub fn fits(operands: &[&Shape]) -> bool {
        let (olds, rest) = operands.split_at(Self::RESULTS);
        let weight = olds[0];
        let codes = weight.with_dtype(DType::U8);
        let largest = Shape::new(DType::F32, [weight.count().div_ceil(BLOCK)]);
        let key = Shape::new(DType::U32, [2]);
        olds[1..] == [&codes, &largest, &codes, &largest]
            && rest[0].dims == weight.dims
            && *rest[1] == Shape::new(DType::F32, [Self::SCALARS])
            && rest[2..].iter().all(|x| **x == key)
    }
}

impl Codes {
    /// The values from 0 to 1 in order, each the `f32` that bitsandbytes has: centres of the cells between the numbers of
    /// `torch.linspace`, which counts from both ends.
    pub(crate) fn magnitudes(self) -> Vec<f64> {
        let mut values = vec![0.0];
        for decade in 0..DECADES {
            let cells = self.cells(decade);
            let (start, end) = (0.1f32, 1f32);
            let step = (end - start) / cells as f32;
            let bound = |i: i32| match i < (cells + 1) / 2 {
                true => (f64::from(start) + f64::from(step) * f64::from(i)) as f32,
                false => (f64::from(end) - f64::from(step) * f64::from(cells - i)) as f32,
            };
            let centre = |cell: i32| (bound(cell) + bound(cell + 1)) / 2.0;
            let scale = scale(decade) as f32;
            values.extend((0..cells).map(|cell| f64::from(scale * centre(cell))));
        }
        values.push(1.0);
        values
    }

    pub(crate) fn cells(self, decade: i32) -> i32 {
        match self {
            Codes::Signed => 1 << decade,
            Codes::Unsigned => 2 << decade,
        }
    }

    /// What is added to the number of a value, so that its highest bit says the decade.
    pub(crate) fn offset(self) -> i32 {
        self.cells(0) - 1
    }

    /// The code of 0.
    pub(crate) fn zero(self) -> f64 {
        match self {
            Codes::Signed => 127.0,
            Codes::Unsigned => 0.0,
        }
    }

    /// The number of the first value of `decade`.
    pub(crate) fn first(self, decade: i32) -> i32 {
        self.cells(decade) - self.offset()
    }
}

/// The end of decade `decade`.
pub(crate) fn scale(decade: i32) -> f64 {
    10f64.powi(decade - DECADES + 1)
}
