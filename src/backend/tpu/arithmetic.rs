//! What kernels multiply, and how numbers become that.

use std::ops::Range;

use crate::dtype::DType;

use super::mosaic::{Kernel, LANES, Noise, Scratch, Value as KernelValue};

/// Multiply-adds of int8 products that cannot overflow 32 bits: 128 * 128 * 130,000 < 2^31.
pub(super) const MOST_TERMS: usize = 130_000;
/// Columns of stored weights that are widened at a time: what is between fits the registers.
pub(super) const WIDENED_COLUMNS: usize = 512;

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

/// Stored weights that a kernel widens to bf16.
#[derive(Clone, Copy, Debug)]
pub(super) struct Widening {
    weights: StoredWeights,
    /// Terms that are widened at a time.
    run: usize,
    /// The windows of the integers, `[terms, columns]`, and of the scales of groups of them.
    windows: [usize; 2],
}

impl Widening {
    /// Terms lie in runs of `terms`, whose groups have the scales. `None` where there are no terms that can be widened at a
    /// time.
    pub(super) fn new(weights: StoredWeights, terms: usize, windows: [usize; 2]) -> Option<Self> {
        let run = weights.run(terms)?;
        Some(Widening {
            weights,
            run,
            windows,
        })
    }

    /// Puts the block's weights into `wide`: as many terms as it has rows, from `first` on.
    pub(super) fn widen(self, k: &mut Kernel, wide: Scratch, first: usize) {
        let [_, columns] = k.scratch_size(wide);
        let width = block_of_columns(columns, WIDENED_COLUMNS).unwrap_or(columns);
        for at in (0..columns).step_by(width) {
            self.widen_columns(k, wide, first, at..at + width);
        }
    }

    /// The same of some of the columns.
    pub(super) fn widen_columns(
        self,
        k: &mut Kernel,
        wide: Scratch,
        first: usize,
        columns: Range<usize>,
    ) {
        let [integers, scales] = self.windows;
        let [terms, _] = k.scratch_size(wide);
        for term in (0..terms).step_by(self.run) {
            let row = k.row(first + term);
            let integers = k.load_part(integers, row, self.run, columns.clone());
            let mut values = k.convert(integers, DType::F32);
            if let Some(group) = self.weights.group {
                let group = k.row(term / group);
                let scale = k.load_part(scales, group, 1, columns.clone());
                let scale = k.broadcast_row(scale, self.run);
                values = k.mul(values, scale);
            }
            let values = k.convert(values, DType::BF16);
            k.keep(wide, values, [term, columns.start]);
        }
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

/// How activations become integers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rounding {
    /// [`Arithmetic::Int8`] or [`Arithmetic::RecordedInt8`].
    pub arithmetic: Arithmetic,
    /// [`super::Features::bf16_vectors`]
    pub bf16_vectors: bool,
}

impl Rounding {
    /// AQT's.
    pub fn of_aqt(bf16_vectors: bool) -> Rounding {
        Rounding {
            arithmetic: Arithmetic::Int8,
            bf16_vectors,
        }
    }

    /// What vector units compute in: AQT's numerics round each step to bf16.
    pub fn vectors(self) -> DType {
        match (self.arithmetic, self.bf16_vectors) {
            (Arithmetic::Int8, true) => DType::BF16,
            _ => DType::F32,
        }
    }

    /// `x`, of bf16, times inverse scales, plus noise where rounding is stochastic, as `s8`: by AQT's numerics, which round the product and
    /// the sum to bf16, or by AMD Quark's.
    pub fn integers(
        self,
        k: &mut Kernel,
        x: KernelValue,
        inverse: KernelValue,
        noise: Option<Noise>,
    ) -> KernelValue {
        let size = k.size(x);
        let vectors = self.vectors();
        let [x, inverse] = [x, inverse].map(|y| k.convert(y, vectors));
        let mut y = k.mul(x, inverse);
        let mut lowest = -127.0;
        match self.arithmetic {
            Arithmetic::Int8 => y = rounded_in(k, y, vectors),
            Arithmetic::RecordedInt8 | Arithmetic::Bf16 | Arithmetic::Stored(_) => lowest = -128.0,
        }
        if let Some(noise) = noise {
            let noise = k.noise(noise, vectors, size);
            y = k.add(y, noise);
            y = rounded_in(k, y, vectors);
        }
        let highest = k.splat(vectors, size, 127.0);
        let lowest = k.splat(vectors, size, lowest);
        let y = k.min(y, highest);
        let y = k.max(y, lowest);
        k.convert(y, DType::S8)
    }
}

/// A value in this type, rounded to bf16.
fn rounded_in(k: &mut Kernel, x: KernelValue, dtype: DType) -> KernelValue {
    let x = k.convert(x, DType::BF16);
    k.convert(x, dtype)
}

/// The inverse scales and the scales of what has these largest magnitudes, by AQT's numerics (`docs/quantization.md`): where it rounds
/// to the operand's type, here too.
pub(super) fn scales(k: &mut Kernel, absmax: KernelValue) -> (KernelValue, KernelValue) {
    let size = k.size(absmax);
    let zero = k.splat(DType::F32, size, 0.0);
    let one = k.splat(DType::F32, size, 1.0);
    let is_empty = k.equal(absmax, zero);
    let absmax = k.select(is_empty, one, absmax);
    let per_step = k.splat(DType::F32, size, 1.0 / 127.5);
    let scale = k.mul(absmax, per_step);
    let scale = rounded(k, scale);
    let inverse = k.div(one, scale);
    let inverse = rounded(k, inverse);
    let infinity = k.splat(DType::F32, size, f64::INFINITY);
    let overflown = k.equal(inverse, infinity);
    (k.select(overflown, one, inverse), scale)
}

/// An `f32` value rounded to bf16.
pub(super) fn rounded(k: &mut Kernel, x: KernelValue) -> KernelValue {
    rounded_in(k, x, DType::F32)
}

/// Where rows have more terms than these, products of rows that the same step rounds are of [`TERMS_AT_A_TIME`]: some are multiplied while
/// others are rounded. Of inference 8,192 rows of 2,560 terms and 640 columns take 137,570 cycles so on a v5e, and 150,594 as one product; of
/// training 1,024 rows of 10,240 and 1,280, rounded at random, 145,521 and 196,863. Runs of 640 of 1,280 terms would take 25,740 cycles in
/// place of 23,916.
const MOST_TERMS_AT_ONCE: usize = 1280;
const TERMS_AT_A_TIME: usize = 640;

/// As many terms of rows as are multiplied at a time where the same step rounds them.
pub(super) fn run_of(terms: usize) -> usize {
    match terms > MOST_TERMS_AT_ONCE {
        true => block_of_columns(terms, TERMS_AT_A_TIME).unwrap_or(terms),
        false => terms,
    }
}

/// Whole tiles of `tile` rows that divide all rows, up to `most`, the largest first.
pub(super) fn blocks_of_rows(rows: usize, tile: usize, most: usize) -> impl Iterator<Item = usize> {
    let blocks = (1..=most / tile).rev().map(move |tiles| tiles * tile);
    blocks.filter(move |block| rows.is_multiple_of(*block))
}

/// The largest multiple of [`LANES`] up to `most` that divides `columns`, or all of them.
pub(super) fn block_of_columns(columns: usize, most: usize) -> Option<usize> {
    if columns > 0 && columns <= most {
        return Some(columns);
    }
    let sizes = (1..=most / LANES).rev().map(|tiles| tiles * LANES);
    let mut sizes = sizes.filter(|size| columns.is_multiple_of(*size));
    sizes.next().filter(|_| columns > 0)
}
