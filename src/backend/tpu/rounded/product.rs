//! Rows that are rounded, times weights that are.

use crate::dtype::DType;
use crate::graph::{Batch, InferError};
use crate::shape::Shape;

use super::super::arithmetic::{
    MOST_TERMS, Rounding, block_of_columns, blocks_of_rows, run_of, scales,
};
use super::super::call::{KernelCall, refused};
use super::super::mosaic::{
    Kernel, Noise, Place, Scratch, Value as KernelValue, Window, most_bytes,
};
use super::{TILE_ROWS, noise_windows};

/// Columns and rows of a block, at most.
const MOST_COLUMNS: usize = 1280;
const MOST_ROWS: usize = 512;
/// Terms of a block of so many rows that has all columns, at most; of more terms it has half as many rows. On a v5p 4,096 rows of 640
/// terms and 640 columns take 12,381 cycles so, and 13,434 with fewer rows; of 1,280 terms, which are rounded at random, 39,805 and 39,030.
const MOST_TERMS_OF_MANY_ROWS: usize = 640;
/// Parts of a block's rows. On a v5p 1,024 rows of 1,280 terms that are rounded at random take 12,561 cycles so, and 14,981 in one.
const PARTS: usize = 4;
/// The same for wide matrix units, which take longer to load weights than to multiply few rows with them: 4,096 rows of 1,280 terms and 1,280 columns
/// take 26,462 cycles on a v6e in blocks of 512 rows, 36,590 in four parts, and 64,193 in four parts of 256 rows.
const PARTS_FOR_WIDE_UNITS: usize = 2;
/// Terms of rows that are multiplied in parts, at most: 4,096 rows of 5,120 take 148,443 cycles so, and 122,127 in one. Nor do parts help
/// where rows are rounded in a step of their own, which is the first of several blocks of columns.
const MOST_TERMS_IN_PARTS: usize = 2560;

/// `x` times weights, plus the bias, in bf16. `x` is quantized as AQT does it, a scale a row, and the product multiplied with the
/// scales of rows and columns.
///
/// Operands: x `bf16[1, rows, terms]`, weights `s8[1, columns, terms]`, or `[1, terms, columns]`, and `f32[1, 1, columns]`, the largest
/// magnitudes of the weights' columns before they were rounded, by which their scales are found; with a bias another one of these;
/// with noise the key `u32[1, 1, 2]`, and `u32[parts, 1, 1]`, the number of the first row of each part of the batch; with a residual
/// `bf16[1, rows, columns]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundedProduct {
    /// Whether weights lie `[1, terms, columns]`.
    pub terms_first: bool,
    pub bias: bool,
    /// Whether rounding is stochastic.
    pub noise: bool,
    /// [`crate::graph::random::rows_in_a_word`] of the rows of the whole batch.
    pub rows_in_a_word: Option<u32>,
    /// Whether a tensor of the result's shape is added to the rounded result.
    pub residual: bool,
    /// [`super::super::Features::wide_units`]
    pub wide_units: bool,
    /// [`super::super::Features::bf16_vectors`]
    pub bf16_vectors: bool,
    /// Bytes of the core's memory that it may take.
    pub memory: usize,
}

/// Rows and columns of the result's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Blocks {
    rows: usize,
    columns: usize,
    grid: [usize; 2],
}

/// Some rows of a block, and what a step keeps of them.
#[derive(Clone, Copy)]
struct Part {
    first: usize,
    rows: usize,
    /// `s8[rows, terms]`
    integers: Scratch,
    /// `f32[rows, 1]`
    scale: Scratch,
}

impl RoundedProduct {
    /// Whether the kernel takes so many rows of a part of the batch: whole blocks, that fit the core's memory.
    pub fn fits(&self, rows: usize, terms: usize, columns: usize) -> bool {
        self.blocks(rows, terms, columns).is_some()
    }

    /// The largest blocks that fit the core's memory.
    fn blocks(&self, rows: usize, terms: usize, columns: usize) -> Option<Blocks> {
        if terms > MOST_TERMS || rows == 0 || terms == 0 {
            return None;
        }
        let width = block_of_columns(columns, MOST_COLUMNS)?;
        let many_rows = width < columns || self.wide_units || terms <= MOST_TERMS_OF_MANY_ROWS;
        let most = match many_rows {
            true => MOST_ROWS,
            false => MOST_ROWS / 2,
        };
        let mut blocks = blocks_of_rows(rows, TILE_ROWS, most).map(|tile| Blocks {
            rows: tile,
            columns: width,
            grid: [rows / tile, columns / width],
        });
        blocks.find(|blocks| self.bytes(*blocks, terms) <= most_bytes(self.memory))
    }

    /// Bytes of the core's memory: windows, scratch, and sums.
    fn bytes(&self, blocks: Blocks, terms: usize) -> usize {
        let mut kernel = Kernel::new(Vec::new(), self.windows(blocks, terms));
        self.parts(&mut kernel, blocks, terms);
        kernel.window_bytes() + kernel.scratch_bytes() + blocks.rows * blocks.columns * 4
    }

    fn windows(&self, blocks: Blocks, terms: usize) -> Vec<Window> {
        let Blocks {
            rows,
            columns,
            grid,
        } = blocks;
        let all_columns = grid[1] * columns;
        // All steps see the same columns if there is one block of them.
        let column_index = (grid[1] > 1).then_some(1);
        let x = Window {
            dtype: DType::BF16,
            array: [1, grid[0] * rows, terms],
            block: [rows, terms],
            index: [None, Some(0), None],
            place: Place::Own,
            first_column: 0,
        };
        let of_columns = |dtype: DType, rows: usize| Window {
            dtype,
            array: [1, rows, all_columns],
            block: [rows, columns],
            index: [None, None, column_index],
            ..x
        };
        let weights = match self.terms_first {
            true => of_columns(DType::S8, terms),
            false => Window {
                dtype: DType::S8,
                array: [1, all_columns, terms],
                block: [columns, terms],
                index: [None, column_index, None],
                ..x
            },
        };
        let mut windows = vec![x, weights, of_columns(DType::F32, 1)];
        if self.bias {
            windows.push(of_columns(DType::F32, 1));
        }
        if self.noise {
            windows.extend(noise_windows(1, None));
        }
        let result = Window {
            array: [1, grid[0] * rows, all_columns],
            block: [rows, columns],
            index: [None, Some(0), column_index],
            ..x
        };
        windows.extend(self.residual.then_some(result));
        windows.push(result);
        windows
    }

    /// Some rows are rounded while those before them are multiplied, so each has a memory of its own.
    fn kernel(&self, blocks: Blocks, terms: usize) -> Kernel {
        let grid = blocks.grid;
        let mut k = Kernel::new(grid.to_vec(), self.windows(blocks, terms));
        k.memory = self.memory;
        let parts = self.parts(&mut k, blocks, terms);
        let several = grid[1] > 1;
        if several {
            k.when_first(1, |k| {
                for part in &parts {
                    self.round(k, *part, blocks, terms);
                }
            });
        }
        let mut next = parts.iter();
        let mut round_next = |k: &mut Kernel| {
            if let (Some(part), false) = (next.next(), several) {
                self.round(k, *part, blocks, terms);
            }
        };
        round_next(&mut k);
        for part in &parts {
            round_next(&mut k);
            self.multiply(&mut k, *part, blocks, terms);
        }
        k
    }

    /// The rows of a block in parts of whole tiles, or all of them.
    fn parts(&self, k: &mut Kernel, blocks: Blocks, terms: usize) -> Vec<Part> {
        let overlaps = blocks.grid[1] == 1 && terms <= MOST_TERMS_IN_PARTS;
        let most = match self.wide_units {
            true => PARTS_FOR_WIDE_UNITS,
            false => PARTS,
        };
        let count = match overlaps && blocks.rows.is_multiple_of(most * TILE_ROWS) {
            true => most,
            false => 1,
        };
        let rows = blocks.rows / count;
        let part = |at: usize| Part {
            first: at * rows,
            rows,
            integers: k.scratch(DType::S8, [rows, terms]),
            scale: k.scratch(DType::F32, [rows, 1]),
        };
        (0..count).map(part).collect()
    }

    /// Keeps some rows of a block as integers, with their scales.
    fn round(&self, k: &mut Kernel, part: Part, blocks: Blocks, terms: usize) {
        let width = run_of(terms);
        let columns = || (0..terms).step_by(width);
        let rounding = Rounding::of_aqt(self.bf16_vectors);
        for row in (0..part.rows).step_by(TILE_ROWS) {
            let first = k.row(part.first + row);
            let load = |k: &mut Kernel, at: usize| {
                let x = k.load_part(0, first, TILE_ROWS, at..at + width);
                k.convert(x, rounding.vectors())
            };
            let mut highest: Option<KernelValue> = None;
            for at in columns() {
                let x = load(k, at);
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
            k.keep(part.scale, scale, [row, 0]);
            let inverse = k.broadcast(inverse, width);
            for at in columns() {
                let x = load(k, at);
                let noise = self.noise.then(|| Noise {
                    windows: [0, 1].map(|window| self.windows_before_noise() + window),
                    columns: terms,
                    rows_in_a_word: self.rows_in_a_word,
                    blocks: [Some((0, blocks.rows)), None],
                    row: first,
                    column: at,
                });
                let integers = rounding.integers(k, x, inverse, noise);
                k.keep(part.integers, integers, [row, at]);
            }
        }
    }

    fn windows_before_noise(&self) -> usize {
        3 + usize::from(self.bias)
    }

    /// Multiplies the integers of some rows, and stores the result.
    fn multiply(&self, k: &mut Kernel, part: Part, blocks: Blocks, terms: usize) {
        let (rows, columns) = (part.rows, blocks.columns);
        let mut sums = k.splat(DType::S32, [rows, columns], 0.0);
        let width = match self.wide_units {
            true => terms,
            false => run_of(terms),
        };
        for at in (0..terms).step_by(width) {
            let x = k.kept_part(part.integers, [0, at], [rows, width]);
            sums = match self.terms_first {
                true => {
                    let first = k.row(at);
                    let weights = k.load(1, first, width);
                    k.matmul(x, weights, sums)
                }
                false => {
                    let first = k.row(0);
                    let weights = k.load_part(1, first, columns, at..at + width);
                    k.matmul_transposed(x, weights, sums)
                }
            };
        }
        let first = k.row(0);
        let scale = k.kept(part.scale);
        let scale = k.broadcast(scale, columns);
        let y = k.convert(sums, DType::F32);
        let mut y = k.mul(y, scale);
        let absmax = k.load(2, first, 1);
        let (_, column_scale) = scales(k, absmax);
        let column_scale = k.broadcast_row(column_scale, rows);
        y = k.mul(y, column_scale);
        if self.bias {
            let bias = k.load(3, first, 1);
            let bias = k.broadcast_row(bias, rows);
            y = k.add(y, bias);
        }
        let mut y = k.convert(y, DType::BF16);
        if self.residual {
            let wide = k.convert(y, DType::F32);
            let first = k.row(part.first);
            let window = self.windows_before_noise() + if self.noise { 2 } else { 0 };
            let residual = k.load(window, first, rows);
            let residual = k.convert(residual, DType::F32);
            let sum = k.add(wide, residual);
            y = k.convert(sum, DType::BF16);
        }
        k.store(y, [part.first, 0]);
    }

    /// Rows, terms and columns.
    fn sizes(&self, operands: &[&Shape]) -> Option<[usize; 3]> {
        let &[x, weights, scales, ref rest @ ..] = operands else {
            return None;
        };
        let is_matrix = |s: &Shape, dtype| s.rank() == 3 && s.dims[0] == 1 && s.dtype == dtype;
        if !is_matrix(x, DType::BF16) || !is_matrix(weights, DType::S8) {
            return None;
        }
        let [of_terms, of_columns] = match self.terms_first {
            true => [1, 2],
            false => [2, 1],
        };
        let [rows, terms, columns] = [x.dims[1], x.dims[2], weights.dims[of_columns]];
        let vector = Shape::new(DType::F32, [1, 1, columns]);
        let mut expected = Vec::new();
        if self.bias {
            expected.push(vector.clone());
        }
        if self.noise {
            let parts = *rest.get(expected.len() + 1)?.dims.first()?;
            expected.push(Shape::new(DType::U32, [1, 1, 2]));
            expected.push(Shape::new(DType::U32, [parts, 1, 1]));
        }
        if self.residual {
            expected.push(Shape::new(DType::BF16, [1, rows, columns]));
        }
        let fits = weights.dims[of_terms] == terms
            && *scales == vector
            && expected.iter().eq(rest.iter().copied());
        fits.then_some([rows, terms, columns])
    }
}

impl KernelCall for RoundedProduct {
    fn name(&self) -> &'static str {
        match self.noise {
            true => "stochastic_int8_product",
            false => "rounded_int8_product",
        }
    }

    fn batch(&self, operands: &[&Shape]) -> Option<Batch> {
        let mut of_operands = vec![None; operands.len()];
        of_operands[0] = Some(1);
        let last = operands.len() - 1;
        if self.residual {
            of_operands[last] = Some(1);
        }
        if self.noise {
            of_operands[last - usize::from(self.residual)] = Some(0);
        }
        Some(Batch {
            operands: of_operands,
            result: 1,
        })
    }

    fn kernel_of(&self, operands: &[&Shape]) -> Option<Kernel> {
        let [rows, terms, columns] = self.sizes(operands)?;
        Some(self.kernel(self.blocks(rows, terms, columns)?, terms))
    }

    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let sizes = self
            .sizes(operands)
            .filter(|[rows, terms, columns]| self.fits(*rows, *terms, *columns));
        let Some([_, _, columns]) = sizes else {
            return Err(refused(
                "int8 product kernel of a training step",
                self,
                operands,
            ));
        };
        Ok(Shape::new(DType::BF16, [1, operands[0].dims[1], columns]))
    }

    fn flops(&self, operands: &[&Shape], result: &Shape) -> u64 {
        (2 * result.count() as u64).saturating_mul(operands[0].dims[2] as u64)
    }
}
