//! Products of weights with activations of bf16. For int8 weights activations are quantized inside: the range of each row,
//! its scale and its integers are found once for a block of rows and kept on the chip. So is the layer norm of the row
//! where one comes before. Weights that are stored as integers are widened inside, once for a block of columns.

use std::ops::Range;

use crate::dtype::DType;
use crate::graph::eval::Value;
use crate::graph::{Batch, Configuration, CustomCall, InferError, constraint};
use crate::shape::Shape;

use super::arithmetic::{Arithmetic, MOST_TERMS, StoredWeights, rounded, rounded_to_integers};
use super::mosaic::{
    CostEstimate, Kernel, LANES, MOST_VMEM_BYTES, Place, Scratch, VMEM_BYTES, Value as KernelValue,
    Window, evaluated,
};

/// Columns of a block, at most. By the compiler's simulation of SDXL's layers on v5e, narrower blocks take up to 70 %
/// more cycles: the rounding of the rows then overlaps less of the product.
const MOST_COLUMNS: usize = 1280;
/// Rows of a block, at most, where one block has all columns, and where there are several: more rows then need the
/// weights to be read less often.
const MOST_ROWS: [usize; 2] = [256, 512];
/// Numbers of a block of rows above [`MOST_ROWS`] by stored weights that are one block, at most: the first block is read
/// before anything is multiplied, and the last result written behind. By the simulation of SDXL's layers on v5e 256 rows of 1,280 and 512 of 640
/// are best there, and where there are several blocks of columns 512 of 2,048 and 1,024 of 8,192.
const MOST_NUMBERS: usize = 512 * 640;
/// Columns of values and of gates that are multiplied at once: GELU then overlaps more of the product.
const GATED_COLUMNS: usize = LANES;
/// Columns of stored weights that are widened at a time: what is between fits the registers.
const WIDENED_COLUMNS: usize = 512;
/// Rows of an int8 tile.
const TILE_ROWS: usize = 32;
/// `Phi(-a) exp(a^2 / 2)` in powers of `1 / (1 + TAIL_SLOPE a)`, the highest first.
const TAIL: [f64; 5] = [-0.12696277, 0.35263383, 0.08005087, 0.19596667, -0.00168689];
const TAIL_SLOPE: f64 = 0.44;
/// `x` times the transposed weights, plus the bias; in bf16. In int8 `x` is quantized as AQT does it, and the product
/// multiplied with the scales of rows and columns.
///
/// Operands: x `bf16[1, rows, terms]`, weights `[1, columns, terms]`, and `f32[1, 2, columns]`, the scales and the
/// biases of columns; without scales of columns `f32[1, 1, columns]`, the biases. Rows are padded to whole blocks ([`Product::padded_rows`]). With `norm`, the next operand is
/// `f32[1, 2, terms]`, the weight and the bias of the layer norm that `x` goes through first, rounded to bf16. In
/// [`Arithmetic::RecordedInt8`] the next operand is `f32[1, 1, terms]`, the inverse scales of the features of `x`; rows have
/// no scales, and those of columns are for the whole product. Of [`Arithmetic::Stored`] weights are `[1, terms, columns]`, and
/// where groups have scales the next operand is `f32[1, groups, columns]`. If
/// `gated`, the weights have twice the result's columns, in blocks of values and of gates in turn
/// ([`Product::gated_block`]), and values are multiplied by the exact GELU of their gates. If `residual`, the last
/// operand is `bf16[1, rows, columns]`, which is added to the rounded result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Product {
    pub arithmetic: Arithmetic,
    /// The epsilon of the layer norm.
    pub norm: Option<f64>,
    pub gated: bool,
    pub residual: bool,
    /// Whether one core takes all steps, so that a layer norm of rows by [`Arithmetic::Stored`] weights is computed once for
    /// all blocks of columns.
    pub one_core: bool,
}

/// Rows and columns of the result's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Blocks {
    rows: usize,
    columns: usize,
    grid: [usize; 2],
    /// Whether all rows stay on the chip after their layer norm, from the first block of columns to the last.
    keeps_rows: bool,
}

impl Product {
    /// Rows with their padding, for a result of `columns`. `None` where columns make no blocks.
    pub fn padded_rows(&self, rows: usize, terms: usize, columns: usize) -> Option<usize> {
        let blocks = self.blocks(rows, terms, columns)?;
        Some(blocks.grid[0] * blocks.rows)
    }

    /// The columns of values that stand before as many of gates. `None` where columns make no blocks.
    pub fn gated_block(columns: usize) -> Option<usize> {
        block_of_columns(columns, MOST_COLUMNS / 2)
    }

    /// Whether a core can hold what the kernel works with.
    pub fn fits(&self, rows: usize, terms: usize, columns: usize) -> bool {
        self.blocks(rows, terms, columns).is_some()
    }

    /// The largest blocks that fit the core's memory.
    fn blocks(&self, rows: usize, terms: usize, columns: usize) -> Option<Blocks> {
        if terms > MOST_TERMS || rows == 0 || terms == 0 {
            return None;
        }
        let width = match self.gated {
            true => Product::gated_block(columns)?,
            false => block_of_columns(columns, MOST_COLUMNS)?,
        };
        if let Arithmetic::Stored(weights) = self.arithmetic {
            weights.run(terms)?;
            return self.stored_blocks(rows, terms, columns, width);
        }
        let several = usize::from(width < columns);
        let mut most = MOST_ROWS[several];
        while most >= TILE_ROWS {
            let count = rows.div_ceil(most);
            let blocks = Blocks {
                rows: rows.div_ceil(count).next_multiple_of(TILE_ROWS),
                columns: width,
                grid: [count, columns / width],
                keeps_rows: false,
            };
            if self.bytes(blocks, terms) <= VMEM_BYTES {
                return Some(blocks);
            }
            most /= 2;
        }
        None
    }

    /// The same of stored weights, whose block is wide in the core's memory too: of `width` columns at most, and so many rows
    /// that widening a block's weights, which all rows share, and reading the rows, which all columns do, take little. Rows
    /// stay on the chip after their norm where they fit beside the larger blocks.
    fn stored_blocks(
        &self,
        rows: usize,
        terms: usize,
        columns: usize,
        width: usize,
    ) -> Option<Blocks> {
        let widths = [width, 640, 512, 384, 256, 128].into_iter().filter(|own| {
            *own == width || !self.gated && *own < width && columns.is_multiple_of(*own)
        });
        let widths: Vec<usize> = widths.collect();
        let of = |most: usize, columns_of_block: usize, keeps_rows: bool| {
            let count = rows.div_ceil(most);
            Blocks {
                rows: rows.div_ceil(count).next_multiple_of(TILE_ROWS),
                columns: columns_of_block,
                grid: [count, columns / columns_of_block],
                keeps_rows: keeps_rows && columns_of_block < columns,
            }
        };
        let keeps_rows = self.one_core && self.norm.is_some();
        let pays = move |most: usize, width: usize| match width < columns {
            true => most <= MOST_ROWS[1] || 4 * most <= rows,
            false => most <= MOST_ROWS[0] || most * terms <= MOST_NUMBERS,
        };
        let sizes = [
            (&[1024, 512, 256][..], keeps_rows),
            (&[1024, 512, 256], false),
            (&[128, 64, 32], false),
        ];
        let mut blocks = sizes.into_iter().flat_map(|(most, keeps_rows)| {
            let rows = move |width: usize| most.iter().map(move |most| (*most, width));
            let sizes = widths.iter().flat_map(move |width| rows(*width));
            let sizes = sizes.filter(move |(most, width)| pays(*most, *width));
            sizes.map(move |(most, width)| of(most, width, keeps_rows))
        });
        blocks.find(|blocks| self.bytes(*blocks, terms) <= MOST_VMEM_BYTES / 16 * 15)
    }

    /// Bytes of the core's memory: windows, scratch, rows or results in `f32`, and of stored weights once more what is widened:
    /// the compiler reads each part before it lets the next one be written.
    fn bytes(&self, blocks: Blocks, terms: usize) -> usize {
        let kernel = self.kernel(blocks, terms);
        let widest = match self.arithmetic {
            Arithmetic::Stored(_) => self.parts() * blocks.columns,
            _ => terms.max(self.parts() * blocks.columns),
        };
        let read_early = match self.arithmetic {
            Arithmetic::Stored(_) => 2 * terms * self.parts() * blocks.columns,
            _ => 0,
        };
        kernel.window_bytes() + kernel.scratch_bytes() + blocks.rows * widest * 4 + read_early
    }

    /// Columns of the product for one of the result.
    fn parts(&self) -> usize {
        match self.gated {
            true => 2,
            false => 1,
        }
    }

    /// Rows of what each column is scaled with: scales and biases, or biases alone.
    pub fn rows_of_columns(&self) -> usize {
        match self.arithmetic.scales_columns() {
            true => 2,
            false => 1,
        }
    }

    /// The stored weights whose groups have scales, and terms of a group.
    fn groups(&self) -> Option<usize> {
        match self.arithmetic {
            Arithmetic::Stored(weights) => weights.group,
            Arithmetic::Int8 | Arithmetic::RecordedInt8 | Arithmetic::Bf16 => None,
        }
    }

    /// The dimensions of the grid that rows and columns lie along. What is computed once for a block stays while the second
    /// one counts: of rows, or of stored weights.
    fn order(&self) -> [usize; 2] {
        match self.arithmetic {
            Arithmetic::Stored(_) => [1, 0],
            Arithmetic::Int8 | Arithmetic::RecordedInt8 | Arithmetic::Bf16 => [0, 1],
        }
    }

    /// Windows of operands before that of what is added to the result.
    fn windows_before_residual(&self) -> usize {
        let more = [
            self.norm.is_some(),
            self.is_recorded(),
            self.groups().is_some(),
        ];
        3 + more.into_iter().map(usize::from).sum::<usize>()
    }

    fn kernel(&self, blocks: Blocks, terms: usize) -> Kernel {
        let Blocks {
            rows,
            columns,
            grid,
            ..
        } = blocks;
        let all_rows = grid[0] * rows;
        let all_columns = grid[1] * columns;
        let width = self.parts() * columns;
        let [along_rows, along_columns] = self.order();
        // All steps see the same columns if there is one block of them.
        let column_index = (grid[1] > 1).then_some(along_columns);
        let x = Window {
            dtype: DType::BF16,
            array: [1, all_rows, terms],
            block: [rows, terms],
            index: [None, Some(along_rows), None],
            place: Place::Own,
            first_column: 0,
        };
        let of_columns_of = |rows: usize, dtype: DType| Window {
            dtype,
            array: [1, rows, self.parts() * all_columns],
            block: [rows, width],
            index: [None, None, column_index],
            place: Place::Own,
            first_column: 0,
        };
        let weights = match self.arithmetic {
            Arithmetic::Stored(weights) => of_columns_of(terms, weights.element),
            arithmetic => Window {
                dtype: arithmetic.operand(),
                array: [1, self.parts() * all_columns, terms],
                block: [width, terms],
                index: [None, column_index, None],
                place: Place::Own,
                first_column: 0,
            },
        };
        let of_columns = of_columns_of(self.rows_of_columns(), DType::F32);
        let result = Window {
            dtype: DType::BF16,
            array: [1, all_rows, all_columns],
            block: [rows, columns],
            index: [None, Some(along_rows), column_index],
            place: Place::Own,
            first_column: 0,
        };
        let of_features = Window {
            dtype: DType::F32,
            array: [1, 2, terms],
            block: [2, terms],
            index: [None; 3],
            place: Place::Own,
            first_column: 0,
        };
        let mut windows = vec![x, weights, of_columns];
        if self.norm.is_some() {
            windows.push(of_features);
        }
        if self.is_recorded() {
            windows.push(Window {
                array: [1, 1, terms],
                block: [1, terms],
                ..of_features
            });
        }
        if let Some(group) = self.groups() {
            windows.push(of_columns_of(terms / group, DType::F32));
        }
        if self.residual {
            windows.push(result);
        }
        windows.push(result);
        let mut steps = [0; 2];
        (steps[along_rows], steps[along_columns]) = (grid[0], grid[1]);
        let mut kernel = Kernel::new(steps.to_vec(), windows);
        if matches!(self.arithmetic, Arithmetic::Stored(_)) {
            kernel.memory = MOST_VMEM_BYTES;
        }
        self.step(&mut kernel, blocks, terms);
        kernel
    }

    fn step(&self, k: &mut Kernel, blocks: Blocks, terms: usize) {
        let Blocks {
            rows,
            columns,
            grid,
            ..
        } = blocks;
        let activation = self.activation(k, blocks, terms);
        let part = |most| block_of_columns(columns, most).unwrap_or(columns);
        let width = match self.gated {
            true => part(GATED_COLUMNS),
            false => columns,
        };
        let multiply = |k: &mut Kernel, wide: Option<Scratch>, at: usize, width: usize| {
            let mut y = self.product(k, activation, wide, at, width);
            if self.gated {
                let gates = self.product(k, activation, wide, columns + at, width);
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
        let stored = match self.arithmetic {
            Arithmetic::Stored(weights) => weights.run(terms).map(|run| (weights, run)),
            Arithmetic::Int8 | Arithmetic::RecordedInt8 | Arithmetic::Bf16 => None,
        };
        let Some((weights, run)) = stored else {
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
                    self.widen(k, wide, weights, [terms, run], first..first + part);
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
                    rows: k.kept(kept.integers),
                    scale: Some(k.kept(kept.scale)),
                }
            }
            (Arithmetic::RecordedInt8, _) => {
                let integers = k.scratch(DType::S8, size);
                once(k, &|k| self.round(k, integers, size));
                Activation {
                    rows: k.kept(integers),
                    scale: None,
                }
            }
            (Arithmetic::Bf16 | Arithmetic::Stored(_), Some(epsilon)) => {
                let rows = match blocks.keeps_rows {
                    false => {
                        let normed = k.scratch(DType::BF16, size);
                        once(k, &|k| normalize(k, normed, size, epsilon, Kernel::row));
                        k.kept(normed)
                    }
                    true => self.kept_normalized(k, blocks, terms, epsilon),
                };
                Activation { rows, scale: None }
            }
            (Arithmetic::Bf16 | Arithmetic::Stored(_), None) => {
                let first = k.row(0);
                Activation {
                    rows: k.load(0, first, blocks.rows),
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

    /// Puts columns of the block's weights into `wide` in bf16, a run of terms at a time.
    fn widen(
        &self,
        k: &mut Kernel,
        wide: Scratch,
        weights: StoredWeights,
        [terms, run]: [usize; 2],
        columns: Range<usize>,
    ) {
        let scales = self.windows_before_residual() - 1;
        for row in (0..terms).step_by(run) {
            let first = k.row(row);
            let integers = k.load_part(1, first, run, columns.clone());
            let mut values = k.convert(integers, DType::F32);
            if let Some(group) = weights.group {
                let group = k.row(row / group);
                let scale = k.load_part(scales, group, 1, columns.clone());
                let scale = k.broadcast_row(scale, run);
                values = k.mul(values, scale);
            }
            let values = k.convert(values, DType::BF16);
            k.keep(wide, values, [row, columns.start]);
        }
    }

    /// Columns of the product from `first` on, scaled, with their biases, in bf16.
    fn product(
        &self,
        k: &mut Kernel,
        activation: Activation,
        wide: Option<Scratch>,
        first: usize,
        columns: usize,
    ) -> KernelValue {
        let [rows, terms] = k.size(activation.rows);
        let zero = k.splat(self.arithmetic.sum(), [rows, columns], 0.0);
        let sums = match wide {
            Some(wide) => {
                let weights = k.kept_part(wide, [0, first], [terms, columns]);
                k.matmul(activation.rows, weights, zero)
            }
            None => {
                let row = k.row(first);
                let weights = k.load(1, row, columns);
                k.matmul_transposed(activation.rows, weights, zero)
            }
        };
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

    fn is_recorded(&self) -> bool {
        self.arithmetic == Arithmetic::RecordedInt8
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
                let y = rounded_to_integers(k, x, inverse, self.arithmetic);
                let y = k.convert(y, DType::S8);
                k.keep(integers, y, [row, at]);
            }
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
                        k.convert(y, DType::F32)
                    }
                    _ => x,
                };
                let magnitudes = k.abs(x);
                highest = Some(match highest {
                    None => magnitudes,
                    Some(highest) => k.max(highest, magnitudes),
                });
            }
            let Some(highest) = highest else {
                continue;
            };
            let absmax = k.row_max(highest);
            let (inverse, scale) = scales(k, absmax);
            k.keep(kept.scale, scale, [row, 0]);
            for [at, width] in parts() {
                let x = match kept.normed {
                    Some(normed) => {
                        let y = k.kept_part(normed, [row, at], [count, width]);
                        k.convert(y, DType::F32)
                    }
                    None => load(k, [row, count], [at, width]),
                };
                let inverse = k.broadcast(inverse, width);
                let integers = rounded_to_integers(k, x, inverse, self.arithmetic);
                let integers = k.convert(integers, DType::S8);
                k.keep(kept.integers, integers, [row, at]);
            }
        }
    }
}

/// Rows as they are multiplied.
#[derive(Clone, Copy)]
struct Activation {
    rows: KernelValue,
    /// The scale of each row.
    scale: Option<KernelValue>,
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

/// The largest multiple of [`LANES`] up to `most` that divides `columns`, or all of them.
pub(super) fn block_of_columns(columns: usize, most: usize) -> Option<usize> {
    if columns > 0 && columns <= most {
        return Some(columns);
    }
    let sizes = (1..=most / LANES).rev().map(|tiles| tiles * LANES);
    let mut sizes = sizes.filter(|size| columns.is_multiple_of(*size));
    sizes.next().filter(|_| columns > 0)
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

/// The inverse scales and the scales of rows whose largest magnitudes are `absmax`, `f32[rows, 1]`, by AQT's numerics
/// (`docs/quantization.md`): where it rounds to the operand's type, here too.
fn scales(k: &mut Kernel, absmax: KernelValue) -> (KernelValue, KernelValue) {
    let column = k.size(absmax);
    let zero = k.splat(DType::F32, column, 0.0);
    let one = k.splat(DType::F32, column, 1.0);
    let is_empty = k.equal(absmax, zero);
    let absmax = k.select(is_empty, one, absmax);
    let per_step = k.splat(DType::F32, column, 1.0 / 127.5);
    let scale = k.mul(absmax, per_step);
    let scale = rounded(k, scale);
    let inverse = k.div(one, scale);
    let inverse = rounded(k, inverse);
    let infinity = k.splat(DType::F32, column, f64::INFINITY);
    let overflown = k.equal(inverse, infinity);
    (k.select(overflown, one, inverse), scale)
}

/// `values` times the exact GELU of `gates`, in `f32` with one rounding.
fn gated(k: &mut Kernel, values: KernelValue, gates: KernelValue) -> KernelValue {
    let [values, gates] = [values, gates].map(|y| k.convert(y, DType::F32));
    let gelu = gelu(k, gates);
    let product = k.mul(values, gelu);
    k.convert(product, DType::BF16)
}

/// The exact GELU `x Phi(x)`, within 6e-5 of its own size even if the chip's reciprocal has no more bits than bf16. It
/// is `max(x, 0) - a Phi(-a)` for `a = |x|`, where `Phi(-a)` is `exp(-a^2 / 2)` times a polynomial in `t = 1 / (1 +
/// 0.44 a)` (the form of Abramowitz and Stegun 7.1.26, fitted anew for the smallest relative error up to a = 6.5).
/// `erf` takes twice as many operations.
fn gelu(k: &mut Kernel, x: KernelValue) -> KernelValue {
    let size = k.size(x);
    let mut number = |number: f64| k.splat(DType::F32, size, number);
    let [zero, one, slope] = [0.0, 1.0, TAIL_SLOPE].map(&mut number);
    let power = number(-0.5 * std::f64::consts::LOG2_E);
    let tail = TAIL.map(&mut number);
    let a = k.abs(x);
    let t = k.mul(a, slope);
    let t = k.add(t, one);
    let t = k.inverse(t);
    let [highest, rest @ ..] = tail;
    let polynomial = rest.into_iter().fold(highest, |sum, term| {
        let product = k.mul(sum, t);
        k.add(product, term)
    });
    let square = k.mul(a, a);
    let exponent = k.mul(square, power);
    let bell = k.exp2(exponent);
    let tail = k.mul(polynomial, bell);
    let tail = k.mul(tail, a);
    let positive = k.max(x, zero);
    k.sub(positive, tail)
}

impl CustomCall for Product {
    fn target(&self) -> &'static str {
        "tpu_custom_call"
    }

    fn name(&self) -> &'static str {
        match (self.arithmetic, self.norm.is_some(), self.gated) {
            (Arithmetic::Int8 | Arithmetic::RecordedInt8, true, true) => {
                "layer_norm_int8_gated_product"
            }
            (Arithmetic::Int8 | Arithmetic::RecordedInt8, true, false) => "layer_norm_int8_product",
            (Arithmetic::Int8 | Arithmetic::RecordedInt8, false, true) => "int8_gated_product",
            (Arithmetic::Int8 | Arithmetic::RecordedInt8, false, false) => "int8_product",
            (Arithmetic::Bf16, true, true) => "layer_norm_gated_product",
            (Arithmetic::Bf16, true, false) => "layer_norm_product",
            (Arithmetic::Bf16, false, true) => "gated_product",
            (Arithmetic::Bf16, false, false) => "product",
            (Arithmetic::Stored(_), true, true) => "layer_norm_stored_gated_product",
            (Arithmetic::Stored(_), true, false) => "layer_norm_stored_product",
            (Arithmetic::Stored(_), false, true) => "stored_gated_product",
            (Arithmetic::Stored(_), false, false) => "stored_product",
        }
    }

    fn batch(&self, operands: &[&Shape]) -> Option<Batch> {
        let mut of_operands = vec![None; operands.len()];
        // Rows, and what is added to them.
        of_operands[0] = Some(1);
        if self.residual {
            of_operands[operands.len() - 1] = Some(1);
        }
        Some(Batch {
            operands: of_operands,
            result: 1,
        })
    }

    fn configuration(&self, operands: &[&Shape]) -> Configuration {
        let Ok(result) = self.infer(operands) else {
            return Configuration::Text(String::new());
        };
        let [rows, terms, columns] = [result.dims[1], operands[0].dims[2], result.dims[2]];
        let Some(blocks) = self.blocks(rows, terms, columns) else {
            return Configuration::Text(String::new());
        };
        let operand_bytes: u64 = operands.iter().map(|s| s.bytes() as u64).sum();
        let cost = CostEstimate {
            flops: self.flops(operands, &result),
            transcendentals: match self.gated {
                true => result.count() as u64,
                false => 0,
            },
            bytes_accessed: operand_bytes + result.bytes() as u64,
        };
        Configuration::Text(self.kernel(blocks, terms).backend_config(cost))
    }

    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let expected = self.windows_before_residual() + usize::from(self.residual);
        if operands.len() != expected {
            return Err(InferError::OperandCount {
                expected,
                found: operands.len(),
            });
        }
        let [x, weights, of_columns] = [0, 1, 2].map(|i| operands[i]);
        let result = || {
            let is_matrix = |s: &Shape, dtype| s.rank() == 3 && s.dims[0] == 1 && s.dtype == dtype;
            if !is_matrix(x, DType::BF16) || !is_matrix(weights, self.arithmetic.operand()) {
                return None;
            }
            let [of_terms, of_columns] = match self.arithmetic {
                Arithmetic::Stored(_) => [1, 2],
                Arithmetic::Int8 | Arithmetic::RecordedInt8 | Arithmetic::Bf16 => [2, 1],
            };
            let all_columns = weights.dims[of_columns];
            let [rows, terms, columns] = [x.dims[1], x.dims[2], all_columns / self.parts()];
            let result = Shape::new(DType::BF16, [1, rows, columns]);
            let of_columns = |rows: usize| Shape::new(DType::F32, [1, rows, all_columns]);
            let mut rest = vec![of_columns(self.rows_of_columns())];
            if self.norm.is_some() {
                rest.push(Shape::new(DType::F32, [1, 2, terms]));
            }
            if self.is_recorded() {
                rest.push(Shape::new(DType::F32, [1, 1, terms]));
            }
            rest.extend(self.groups().map(|group| of_columns(terms / group)));
            if self.residual {
                rest.push(result.clone());
            }
            let fits = weights.dims[of_terms] == terms
                && all_columns.is_multiple_of(self.parts())
                && self.padded_rows(rows, terms, columns) == Some(rows)
                && rest.iter().eq(operands[2..].iter().copied());
            fits.then_some(result)
        };
        result().ok_or_else(|| {
            constraint(
                "product kernel",
                format!(
                    "x {x}, weights {weights}, scales and biases {of_columns} are not bf16[1, rows, terms] in whole blocks, \
                     {}[1, columns, terms] and f32[1, {}, columns], with f32[1, 2, terms] of a norm, f32[1, 1, terms] of \
                     recorded scales or f32[1, groups, columns] of stored weights, [1, terms, columns], and a term like the result, or no block fits the core's memory",
                    self.arithmetic.operand(),
                    self.rows_of_columns()
                ),
            )
        })
    }

    fn flops(&self, operands: &[&Shape], result: &Shape) -> u64 {
        let terms = operands[0].dims[2] as u64;
        (2 * self.parts() as u64 * result.count() as u64).saturating_mul(terms)
    }

    fn evaluate(&self, operands: &[&Value], result: Shape) -> Value {
        let terms = operands[0].shape.dims[2];
        let blocks = self.blocks(result.dims[1], terms, result.dims[2]);
        let kernel = blocks.map(|blocks| self.kernel(blocks, terms));
        evaluated(kernel.as_ref(), operands, result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::eval::erf;

    #[test]
    fn gelu_is_the_exact_one_to_6e_5_of_its_size() {
        let window = Window {
            dtype: DType::F32,
            array: [1, 8, LANES],
            block: [8, LANES],
            index: [None; 3],
            place: Place::Own,
            first_column: 0,
        };
        let mut k = Kernel::new(vec![1], vec![window; 2]);
        let first = k.row(0);
        let x = k.load(0, first, 8);
        let y = gelu(&mut k, x);
        k.store(y, [0, 0]);
        let numbers: Vec<f32> = (0..8 * LANES)
            .map(|i| (i as f32 - 512.0) / 512.0 * 5.0)
            .collect();
        let found = k.evaluate(std::slice::from_ref(&numbers));
        for (x, found) in numbers.into_iter().zip(found) {
            let wide = f64::from(x);
            let exact = wide * 0.5 * (1.0 + erf(wide / 2f64.sqrt()));
            let error = (f64::from(found) - exact).abs();
            assert!(error <= 6e-5 * exact.abs() + 1e-12, "{x}: {found}, {exact}");
        }
    }
    #[test]
    fn rows_that_stay_on_the_chip_are_those_of_each_block() {
        let product = Product {
            arithmetic: Arithmetic::Stored(StoredWeights {
                element: DType::S8,
                group: None,
            }),
            norm: Some(1e-5),
            gated: false,
            residual: false,
            one_core: true,
        };
        let [rows, terms, columns] = [3 * TILE_ROWS, LANES, 2 * LANES];
        let numbers = |count: usize, most: i64| -> Vec<f32> {
            let number = |i: i64| (i * 37 % (2 * most + 1) - most) as f32;
            (0..count as i64).map(number).collect()
        };
        let operands = [
            numbers(rows * terms, 64),
            numbers(terms * columns, 127),
            numbers(2 * columns, 3),
            numbers(2 * terms, 2),
        ];
        let [kept, anew] = [true, false].map(|keeps_rows| {
            let blocks = Blocks {
                rows: TILE_ROWS,
                columns: LANES,
                grid: [3, 2],
                keeps_rows,
            };
            product.kernel(blocks, terms).evaluate(&operands)
        });
        assert!(kept.iter().any(|y| *y != 0.0));
        assert_eq!(kept, anew);
    }
}
