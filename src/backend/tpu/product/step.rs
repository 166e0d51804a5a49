//! What one step of a product computes of its blocks.

use crate::dtype::DType;

use super::super::arithmetic::{
    Arithmetic, Rounding, WIDENED_COLUMNS, Widening, block_of_columns, rounded, run_of, scales,
};
use super::super::gated::gated;
use super::super::mosaic::{Kernel, LANES, Scratch, Value as KernelValue};
use super::{Blocks, MOST_COLUMNS, Product, TILE_ROWS};

/// Columns of values and of gates that are multiplied at once: GELU then overlaps more of the product. Wide matrix
/// units take a whole block.
const GATED_COLUMNS: usize = LANES;

impl Product {
    /// Multiplies and stores the blocks of a step.
    pub(super) fn step(&self, k: &mut Kernel, blocks: Blocks, terms: usize) {
        let Blocks {
            rows,
            columns,
            grid,
            ..
        } = blocks;
        let activation = self.activation(k, blocks, terms);
        let part = |most| block_of_columns(columns, most).unwrap_or(columns);
        let width = match self.gated {
            true if !self.features.wide_units => part(GATED_COLUMNS),
            _ => columns,
        };
        let multiply = |k: &mut Kernel, wide: Option<Scratch>, at: usize, width: usize| {
            let size = [rows, terms];
            let mut y = self.product(k, activation, size, wide, at, width);
            if self.gated {
                let gates = self.product(k, activation, size, wide, columns + at, width);
                y = gated(k, y, gates);
            }
            if self.residual {
                let first = k.row(0);
                let window = self.windows_before_residual();
                let residual = k.load_part(window, first, rows, at..at + width);
                let residual = k.convert(residual, DType::F32);
                let wide = k.convert(y, DType::F32);
                let sum = k.add(wide, residual);
                y = k.convert(sum, DType::BF16);
            }
            k.store(y, [0, at]);
        };
        let multiply_all = |k: &mut Kernel, wide: Option<Scratch>| {
            for at in (0..columns).step_by(width) {
                multiply(k, wide, at, width);
            }
        };
        let widening = match self.arithmetic {
            Arithmetic::Stored(weights) => {
                Widening::new(weights, terms, [1, self.windows_before_residual() - 1])
            }
            Arithmetic::Int8 | Arithmetic::RecordedInt8 | Arithmetic::Bf16 => None,
        };
        let Some(widening) = widening else {
            return multiply_all(k, None);
        };
        let wide = k.scratch(DType::BF16, [terms, self.parts() * columns]);
        // In the first step of a block of columns the next part of the weights is widened while one is multiplied.
        let part = match self.gated {
            true => width,
            false => part(WIDENED_COLUMNS),
        };
        let widen_and_multiply = |k: &mut Kernel| {
            for at in (0..columns).step_by(part) {
                for first in (at..).step_by(columns).take(self.parts()) {
                    widening.widen_columns(k, wide, 0, first..first + part);
                }
                multiply(k, Some(wide), at, part);
            }
        };
        match grid[0] {
            1 => widen_and_multiply(k),
            _ => {
                k.when_first(1, widen_and_multiply);
                k.unless_first(1, |k| multiply_all(k, Some(wide)));
            }
        }
    }

    /// The rows as they are multiplied. What has to be computed of them is computed in the first step of a block of rows.
    fn activation(&self, k: &mut Kernel, blocks: Blocks, terms: usize) -> Activation {
        let size = [blocks.rows, terms];
        let stays = blocks.grid[1] > 1 && self.order() == [0, 1];
        let once = |k: &mut Kernel, compute: &dyn Fn(&mut Kernel)| match stays {
            false => compute(k),
            true => k.when_first(1, |k| compute(k)),
        };
        let kept_rows = match stays {
            false => Rows::Computed,
            true => Rows::Kept,
        };
        let normed = |k: &mut Kernel| self.norm.map(|_| k.scratch(DType::BF16, size));
        match (self.arithmetic, self.norm) {
            (Arithmetic::Int8, _) => {
                let kept = Kept {
                    integers: k.scratch(DType::S8, size),
                    scale: k.scratch(DType::F32, [blocks.rows, 1]),
                    normed: normed(k),
                };
                once(k, &|k| self.quantize(k, kept, size));
                Activation {
                    rows: kept_rows(kept.integers),
                    scale: Some(k.kept(kept.scale)),
                }
            }
            (Arithmetic::RecordedInt8, _) => {
                let integers = k.scratch(DType::S8, size);
                once(k, &|k| self.round(k, integers, size));
                Activation {
                    rows: kept_rows(integers),
                    scale: None,
                }
            }
            (Arithmetic::Bf16 | Arithmetic::Stored(_), Some(epsilon)) => {
                let rows = match blocks.keeps_rows {
                    false => {
                        let normed = k.scratch(DType::BF16, size);
                        once(k, &|k| normalize(k, normed, size, epsilon, Kernel::row));
                        kept_rows(normed)
                    }
                    true => Rows::Whole(self.kept_normalized(k, blocks, terms, epsilon)),
                };
                Activation { rows, scale: None }
            }
            (Arithmetic::Bf16 | Arithmetic::Stored(_), None) => {
                let first = k.row(0);
                Activation {
                    rows: Rows::Whole(k.load(0, first, blocks.rows)),
                    scale: None,
                }
            }
        }
    }

    /// The rows after their layer norm, which is computed for all rows in the first block of columns.
    fn kept_normalized(
        &self,
        k: &mut Kernel,
        blocks: Blocks,
        terms: usize,
        epsilon: f64,
    ) -> KernelValue {
        let [along_rows, along_columns] = self.order();
        let rows = blocks.rows;
        let normed = k.scratch(DType::BF16, [blocks.grid[0] * rows, terms]);
        let place = |k: &mut Kernel, row: usize| k.row_of_step(along_rows, rows, row);
        k.when_first(along_columns, |k| {
            normalize(k, normed, [rows, terms], epsilon, place);
        });
        let first = place(k, 0);
        k.kept_at(normed, first, 0, [rows, terms])
    }

    /// Columns of the product from `first` on, scaled, with their biases, in bf16.
    fn product(
        &self,
        k: &mut Kernel,
        activation: Activation,
        [rows, terms]: [usize; 2],
        wide: Option<Scratch>,
        first: usize,
        columns: usize,
    ) -> KernelValue {
        let mut sums = k.splat(self.arithmetic.sum(), [rows, columns], 0.0);
        let width = match activation.rows {
            Rows::Computed(_) => run_of(terms),
            Rows::Kept(_) | Rows::Whole(_) => terms,
        };
        for at in (0..terms).step_by(width) {
            let x = match activation.rows {
                Rows::Whole(x) => x,
                Rows::Computed(scratch) | Rows::Kept(scratch) => {
                    k.kept_part(scratch, [0, at], [rows, width])
                }
            };
            sums = match wide {
                Some(wide) => {
                    let weights = k.kept_part(wide, [at, first], [width, columns]);
                    k.matmul(x, weights, sums)
                }
                None => {
                    let row = k.row(first);
                    let weights = k.load_part(1, row, columns, at..at + width);
                    k.matmul_transposed(x, weights, sums)
                }
            };
        }
        let mut y = k.convert(sums, DType::F32);
        let of_columns = |k: &mut Kernel, row: usize| {
            let row = k.row(row);
            let row = k.load_part(2, row, 1, first..first + columns);
            k.broadcast_row(row, rows)
        };
        if let Some(scale) = activation.scale {
            let scale = k.broadcast(scale, columns);
            y = k.mul(y, scale);
        }
        if self.arithmetic.scales_columns() {
            let column_scale = of_columns(k, 0);
            y = k.mul(y, column_scale);
        }
        let bias = of_columns(k, self.rows_of_columns() - 1);
        let y = k.add(y, bias);
        k.convert(y, DType::BF16)
    }

    /// Rounds the rows to integers by recorded scales.
    fn round(&self, k: &mut Kernel, integers: Scratch, [rows, terms]: [usize; 2]) {
        let width = block_of_columns(terms, MOST_COLUMNS).unwrap_or(terms);
        let window = 3 + usize::from(self.norm.is_some());
        for row in (0..rows).step_by(TILE_ROWS) {
            let count = TILE_ROWS.min(rows - row);
            let parts = || (0..terms).step_by(width).map(|at| [at, width]);
            let norm = self
                .norm
                .map(|epsilon| statistics(k, [row, count], parts(), terms, epsilon));
            for [at, width] in parts() {
                let mut x = load(k, [row, count], [at, width]);
                if let Some(norm) = norm {
                    let y = normalized(k, x, norm, at);
                    x = rounded(k, y);
                }
                let first = k.row(0);
                let inverse = k.load_part(window, first, 1, at..at + width);
                let inverse = k.broadcast_row(inverse, count);
                let y = self.rounding().integers(k, x, inverse, None);
                k.keep(integers, y, [row, at]);
            }
        }
    }

    fn rounding(&self) -> Rounding {
        Rounding {
            arithmetic: self.arithmetic,
            bf16_vectors: self.features.bf16_vectors,
        }
    }

    /// Rounds the rows to integers, with their scales, some rows and columns at a time: what is between fits the
    /// registers.
    fn quantize(&self, k: &mut Kernel, kept: Kept, [rows, terms]: [usize; 2]) {
        let width = block_of_columns(terms, MOST_COLUMNS).unwrap_or(terms);
        for row in (0..rows).step_by(TILE_ROWS) {
            let count = TILE_ROWS.min(rows - row);
            let parts = || (0..terms).step_by(width).map(|at| [at, width]);
            let norm = self
                .norm
                .map(|epsilon| statistics(k, [row, count], parts(), terms, epsilon));
            let mut highest = None;
            for [at, width] in parts() {
                let x = load(k, [row, count], [at, width]);
                let x = match (norm, kept.normed) {
                    (Some(norm), Some(normed)) => {
                        let y = normalized(k, x, norm, at);
                        let y = k.convert(y, DType::BF16);
                        k.keep(normed, y, [row, at]);
                        y
                    }
                    _ => x,
                };
                let x = k.convert(x, self.rounding().vectors());
                let magnitudes = k.abs(x);
                highest = Some(match highest {
                    None => magnitudes,
                    Some(highest) => k.max(highest, magnitudes),
                });
            }
            let Some(highest) = highest else {
                continue;
            };
            let highest = k.convert(highest, DType::F32);
            let absmax = k.row_max(highest);
            let (inverse, scale) = scales(k, absmax);
            k.keep(kept.scale, scale, [row, 0]);
            for [at, width] in parts() {
                let x = match kept.normed {
                    Some(normed) => k.kept_part(normed, [row, at], [count, width]),
                    None => load(k, [row, count], [at, width]),
                };
                let inverse = k.broadcast(inverse, width);
                let integers = self.rounding().integers(k, x, inverse, None);
                k.keep(kept.integers, integers, [row, at]);
            }
        }
    }
}

/// Rows as they are multiplied.
#[derive(Clone, Copy)]
struct Activation {
    rows: Rows,
    /// The scale of each row.
    scale: Option<KernelValue>,
}

#[derive(Clone, Copy)]
enum Rows {
    /// All of their terms.
    Whole(KernelValue),
    /// What this step computed of them, `[rows, terms]`.
    Computed(Scratch),
    /// What the first step of a block of rows computed, in the same shape.
    Kept(Scratch),
}

/// What a step keeps of its rows in int8.
#[derive(Clone, Copy)]
struct Kept {
    /// `s8[rows, terms]`
    integers: Scratch,
    /// `f32[rows, 1]`
    scale: Scratch,
    /// The rows after their layer norm, `bf16[rows, terms]`.
    normed: Option<Scratch>,
}

/// Puts the rows after their layer norm into `normed`, some rows and columns at a time: what is between fits the registers.
/// `place` gives the row of `normed` of a row of the block.
fn normalize(
    k: &mut Kernel,
    normed: Scratch,
    [rows, terms]: [usize; 2],
    epsilon: f64,
    place: impl Fn(&mut Kernel, usize) -> KernelValue,
) {
    let width = block_of_columns(terms, MOST_COLUMNS).unwrap_or(terms);
    for row in (0..rows).step_by(TILE_ROWS) {
        let count = TILE_ROWS.min(rows - row);
        let parts = || (0..terms).step_by(width).map(|at| [at, width]);
        let norm = statistics(k, [row, count], parts(), terms, epsilon);
        for [at, width] in parts() {
            let x = load(k, [row, count], [at, width]);
            let y = normalized(k, x, norm, at);
            let y = k.convert(y, DType::BF16);
            let row = place(k, row);
            k.keep_at(normed, y, row, at);
        }
    }
}

/// A part of the activation, in `f32`.
fn load(k: &mut Kernel, [row, rows]: [usize; 2], [at, width]: [usize; 2]) -> KernelValue {
    let row = k.row(row);
    let x = k.load_part(0, row, rows, at..at + width);
    k.convert(x, DType::F32)
}

/// The mean and the inverse standard deviation of rows, `f32[rows, 1]`.
fn statistics(
    k: &mut Kernel,
    rows: [usize; 2],
    parts: impl Iterator<Item = [usize; 2]>,
    features: usize,
    epsilon: f64,
) -> [KernelValue; 2] {
    let mut sums: Option<[KernelValue; 2]> = None;
    for part in parts {
        let x = load(k, rows, part);
        let squares = k.mul(x, x);
        sums = Some(match sums {
            None => [x, squares],
            Some([sum, sum_of_squares]) => [k.add(sum, x), k.add(sum_of_squares, squares)],
        });
    }
    let column = [rows[1], 1];
    let share = k.splat(DType::F32, column, 1.0 / features as f64);
    let [mean, mean_of_squares] = match sums {
        Some(sums) => sums.map(|sums| {
            let sum = k.row_sum(sums);
            k.mul(sum, share)
        }),
        None => [share; 2],
    };
    let square_of_mean = k.mul(mean, mean);
    let variance = k.sub(mean_of_squares, square_of_mean);
    let zero = k.splat(DType::F32, column, 0.0);
    let variance = k.max(variance, zero);
    let epsilon = k.splat(DType::F32, column, epsilon);
    let variance = k.add(variance, epsilon);
    [mean, k.rsqrt(variance)]
}

/// [`crate::graph::Composite::LayerNorm`] of columns of rows, from column `at` on, in `f32`. Window 3 holds the weight
/// and the bias.
fn normalized(
    k: &mut Kernel,
    x: KernelValue,
    [mean, inverse]: [KernelValue; 2],
    at: usize,
) -> KernelValue {
    let [rows, columns] = k.size(x);
    let mean = k.broadcast(mean, columns);
    let inverse = k.broadcast(inverse, columns);
    let y = k.sub(x, mean);
    let y = k.mul(y, inverse);
    let [weight, bias] = [0, 1].map(|row| {
        let row = k.row(row);
        let row = k.load_part(3, row, 1, at..at + columns);
        k.broadcast_row(row, rows)
    });
    let y = k.mul(y, weight);
    k.add(y, bias)
}
