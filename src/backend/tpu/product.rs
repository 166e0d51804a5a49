//! Products of weights with activations of bf16. For int8 weights activations are quantized inside: the range of each row,
//! its scale and its integers are found once for a block of rows and kept on the chip. So is the layer norm of the row
//! where one comes before. Weights that are stored as integers are widened inside, once for a block of columns.

mod step;

use crate::dtype::DType;
use crate::graph::{Batch, InferError, constraint};
use crate::shape::Shape;

use super::Features;
use super::arithmetic::{Arithmetic, MOST_TERMS, block_of_columns};
use super::call::KernelCall;
use super::mosaic::{Kernel, MOST_VMEM_BYTES, Place, Window, most_bytes};

/// Columns of a block, at most. By the compiler's simulation of SDXL's layers on v5e, narrower blocks of int8 take up to 70 %
/// more cycles: the rounding of the rows then overlaps less of the product.
const MOST_COLUMNS: usize = 1280;
/// The same in bf16, but for wide matrix units: others read and write the block's sums once for 128 terms.
const MOST_ADDED_COLUMNS: usize = 640;
/// Numbers of weights that are one block though they have more columns: HBM then reads them once, and rows too. Of SDXL's, those of
/// queries, keys and values of 640 features.
const MOST_WEIGHTS: usize = 1920 * 640;
/// Rows of a block, at most, where one block has all columns, and where there are several: more rows then need the
/// weights to be read less often. Some have twice as many.
const MOST_ROWS: [usize; 2] = [256, 512];
/// Numbers of a block of rows above [`MOST_ROWS`] by weights that are one block, at most: the first block is read
/// before anything is multiplied, and the last result written behind. By the simulation of SDXL's layers on v5e 256 rows of 1,280 and 512 of 640
/// are best by stored ones and in int8. Where there are several blocks of columns, of stored ones 512 of 2,048 and 1,024 of 8,192 are.
const MOST_NUMBERS: usize = 512 * 640;
/// Rows of an int8 tile.
const TILE_ROWS: usize = 32;

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
    /// Of the chip. Where one core takes all steps, a layer norm of rows by [`Arithmetic::Stored`] weights is computed once for
    /// all blocks of columns.
    pub features: Features,
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
    pub fn gated_block(&self, columns: usize) -> Option<usize> {
        // Together they are as wide as a block without gates, or twice as wide where a step multiplies all of them at once.
        let most = match self.arithmetic == Arithmetic::Bf16 && self.features.wide_units {
            true => MOST_COLUMNS,
            false => MOST_COLUMNS / 2,
        };
        block_of_columns(columns, most)
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
            true => self.gated_block(columns)?,
            false if self.is_one_block(terms, columns) => columns,
            false => block_of_columns(columns, self.most_columns())?,
        };
        if let Arithmetic::Stored(weights) = self.arithmetic {
            weights.run(terms)?;
            return self.stored_blocks(rows, terms, columns, width);
        }
        let mut most = self.most_rows(rows, terms, width == columns);
        while most >= TILE_ROWS {
            let count = rows.div_ceil(most);
            let blocks = Blocks {
                rows: rows.div_ceil(count).next_multiple_of(TILE_ROWS),
                columns: width,
                grid: [count, columns / width],
                keeps_rows: false,
            };
            if self.bytes(blocks, terms) <= most_bytes(self.memory()) {
                // Once in all, or all rows at once.
                let are_read_once = blocks.grid.contains(&1);
                return (are_read_once || most >= self.least_rows()).then_some(blocks);
            }
            most /= 2;
        }
        None
    }

    /// As many rows as HBM needs to share what is read of the weights, for it to keep up with the matrix units: a v5e computes 240
    /// operations of bf16 for each byte, a v6e 560. Where the terms are too many for that, the compiler's product is faster: on a v5e 4,608
    /// rows of 15,360 terms and 3,072 columns would take 8.5 ms, and take 2.3.
    fn least_rows(&self) -> usize {
        match self.features.wide_units {
            true => MOST_ROWS[1],
            false => MOST_ROWS[0],
        }
    }

    fn most_columns(&self) -> usize {
        match self.arithmetic == Arithmetic::Bf16 && !self.features.wide_units {
            true => MOST_ADDED_COLUMNS,
            false => MOST_COLUMNS,
        }
    }

    /// Whether the weights are one block for their size.
    fn is_one_block(&self, terms: usize, columns: usize) -> bool {
        columns * terms <= MOST_WEIGHTS
    }

    /// Rows of a block at most; `is_whole`, if it has all columns.
    fn most_rows(&self, rows: usize, terms: usize, is_whole: bool) -> usize {
        let [of_whole, of_several] = MOST_ROWS;
        let is_bf16 = self.arithmetic == Arithmetic::Bf16;
        // On the v6e HBM takes longer than the product where 512 rows share what is read of the weights.
        let is_small = of_several * terms <= MOST_NUMBERS;
        let shares_more = is_bf16 && (self.features.wide_units || is_small);
        // Each core needs a block.
        let cores_share = self.features.one_core || rows > 2 * of_several;
        match is_whole {
            true if is_bf16 || is_small => 2 * of_whole,
            true => of_whole,
            false if shares_more && cores_share => 2 * of_several,
            false => of_several,
        }
    }

    /// Bytes of the core's memory that the kernel may take.
    fn memory(&self) -> usize {
        match self.arithmetic {
            Arithmetic::Stored(_) => MOST_VMEM_BYTES,
            Arithmetic::Bf16 | Arithmetic::Int8 | Arithmetic::RecordedInt8 => {
                self.features.kernel_memory
            }
        }
    }

    /// [`Product::blocks`] of stored weights, whose block is wide in the core's memory too: of `width` columns at most, and so many rows
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
        let keeps_rows = self.features.one_core && self.norm.is_some();
        let pays = move |most: usize, width: usize| match width < columns {
            true => most <= MOST_ROWS[1] || 4 * most <= rows,
            false if self.features.wide_units => most <= MOST_ROWS[1],
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
        blocks.find(|blocks| self.bytes(*blocks, terms) <= most_bytes(self.memory()))
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
        kernel.memory = self.memory();
        self.step(&mut kernel, blocks, terms);
        kernel
    }

    fn is_recorded(&self) -> bool {
        self.arithmetic == Arithmetic::RecordedInt8
    }
}

impl KernelCall for Product {
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

    fn kernel_of(&self, operands: &[&Shape]) -> Option<Kernel> {
        let result = self.infer(operands).ok()?;
        let [rows, terms, columns] = [result.dims[1], operands[0].dims[2], result.dims[2]];
        Some(self.kernel(self.blocks(rows, terms, columns)?, terms))
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

    fn transcendentals(&self, _: &[&Shape], result: &Shape) -> u64 {
        match self.gated {
            true => result.count() as u64,
            false => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::mosaic::LANES;
    use super::*;
    use crate::backend::tpu::StoredWeights;

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
            features: Features {
                one_core: true,
                ..Features::UNKNOWN
            },
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
