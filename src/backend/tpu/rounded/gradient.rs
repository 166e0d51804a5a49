//! The gradient of weights: rows that are rounded, each column by its own scale, times others that are.

use std::ops::Range;

use crate::dtype::DType;
use crate::graph::{Batch, InferError};
use crate::shape::Shape;

use super::super::arithmetic::{MOST_TERMS, Rounding, block_of_columns, scales};
use super::super::call::{KernelCall, refused};
use super::super::mosaic::{
    Kernel, LANES, Noise, Place, Scratch, Value as KernelValue, Window, most_bytes,
};
use super::{Tiles, absmax, noise_windows, ranges_of};

/// The windows of the gradient and of `x`.
const GRADIENT: usize = 0;
const INPUTS: usize = 1;
/// Those of their ranges come behind these, and behind those of the noise.
const WINDOWS_BEFORE_RANGES: usize = 4;
/// Columns of a block, at most: where rows are few and columns many, and elsewhere. Each part of a block is code of its own, so blocks of
/// fewer parts compile faster: on a v5e the kernel of 4,096 rows of 640 and 640 features takes 7.7 s in place of 17.2, and 52,762 cycles
/// in place of 53,450. 1,024 rows of 1,280 and 10,240 features take 157,092 cycles in wide blocks and 167,024 in others.
const WIDE_COLUMNS: usize = 640;
const MOST_COLUMNS: usize = 256;
const FEW_ROWS: usize = 1024;
const MANY_COLUMNS: usize = 5120;
/// Columns of a part of a block.
const PART: usize = LANES;
/// Rows up to which a part's are rounded without a loop, so that the matrix units multiply the part before meanwhile: a loop is
/// a border that nothing is moved across. On a v5p 1,024 rows of 1,280 and 10,240 features take 82,806 cycles so, and 106,720
/// rounded in loops before they are multiplied; 4,096 rows of 640 and 640 take 44,212 and 54,050.
const MOST_ROWS_IN_PARTS: usize = 4096;
/// Columns that are rounded in one run of a loop, at most.
const ROUNDED_COLUMNS: usize = 640;
/// Rows of a tile of `f32`.
const WIDE_TILE_ROWS: usize = 8;

/// For each part of the batch the sum over its rows of what `x` and a gradient are multiplied with each other: `[parts, outputs,
/// inputs]`, or `[parts, inputs, outputs]`, in `result`. Both are quantized as AQT does it, a scale a column of a part, the gradient at random.
///
/// Operands: the gradient `bf16[parts, rows, outputs]`, `x` `bf16[parts, rows, inputs]`, the key `u32[1, 1, 2]`, and `u32[parts, 1, 1]`,
/// the number of the first row of each part. With ranges the largest magnitudes of the columns of both: `f32[parts, 1, outputs]` and
/// `f32[parts, 1, inputs]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundedGradient {
    /// Whether inputs are the result's rows.
    pub inputs_first: bool,
    /// Whether ranges are operands, as parts that share them need it. Otherwise they are found inside.
    pub ranges: bool,
    /// [`crate::graph::random::rows_in_a_word`] of the gradient of the whole batch.
    pub rows_in_a_word: Option<u32>,
    /// `F32` or `BF16`.
    pub result: DType,
    /// Cores that share the columns of a part.
    pub cores: usize,
    /// [`super::super::Features::bf16_vectors`]
    pub bf16_vectors: bool,
    /// Bytes of the core's memory that it may take.
    pub memory: usize,
}

/// The numbers of parts, their rows, and the columns of the gradient and of `x`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sizes {
    parts: usize,
    terms: usize,
    outputs: usize,
    inputs: usize,
}

impl Sizes {
    /// The window of what is kept whole, the one with fewer columns, and that of what comes in blocks, which is the gradient if both
    /// have as many: each core rounds its own blocks alone, and noise takes longest.
    fn windows(self) -> [usize; 2] {
        match self.outputs >= self.inputs {
            true => [INPUTS, GRADIENT],
            false => [GRADIENT, INPUTS],
        }
    }

    /// Columns of a window.
    fn columns(self, window: usize) -> usize {
        match window {
            GRADIENT => self.outputs,
            _ => self.inputs,
        }
    }
}

/// What a core keeps from step to step.
#[derive(Clone, Copy)]
struct Whole {
    /// `s8[columns, terms]` if they are the result's rows, else `s8[terms, columns]`.
    integers: Scratch,
    /// `f32[columns, 8]`, else `f32[8, columns]`.
    scale: Scratch,
}

/// Some columns of a block.
#[derive(Clone, Copy)]
struct Part {
    first: usize,
    width: usize,
    /// `s8[width, terms]` if they are the result's rows, else `s8[terms, width]`.
    integers: Scratch,
    /// `f32[width, 8]`
    scale: Scratch,
}

/// Those of blocks with so many rows.
fn tiles_of_blocks(terms: usize) -> Tiles {
    match terms <= MOST_ROWS_IN_PARTS {
        true => Tiles::Straight,
        false => Tiles::Loop,
    }
}

/// Columns of a window that are rounded.
struct Rounded {
    window: usize,
    columns: Range<usize>,
    /// Their inverse scales, `f32[1, columns]`.
    inverse: KernelValue,
    /// With noise, the columns of the tensor that it is for, and the dimension of the grid that counts its blocks, with the columns of
    /// one.
    noise: Option<(usize, Option<(usize, usize)>)>,
}

impl RoundedGradient {
    /// Whether the kernel takes so many rows of a part of the batch: whole tiles, that fit the core's memory.
    pub fn fits(&self, rows: usize, outputs: usize, inputs: usize) -> bool {
        let sizes = Sizes {
            parts: 1,
            terms: rows,
            outputs,
            inputs,
        };
        self.block(sizes).is_some()
    }

    /// Columns of the largest block that fits the core's memory.
    fn block(&self, sizes: Sizes) -> Option<usize> {
        let Sizes {
            terms,
            outputs,
            inputs,
            ..
        } = sizes;
        let columns = sizes.columns(sizes.windows()[1]);
        let is_known = [terms, outputs, inputs]
            .iter()
            .all(|size| *size > 0 && size.is_multiple_of(LANES))
            && terms <= MOST_TERMS
            && columns.is_multiple_of(self.cores * LANES);
        if !is_known {
            return None;
        }
        let most = match terms <= FEW_ROWS && columns >= MANY_COLUMNS {
            true => WIDE_COLUMNS,
            false => MOST_COLUMNS,
        };
        let mut widths: Vec<usize> = (1..=most / LANES)
            .rev()
            .filter_map(|tiles| block_of_columns(columns / self.cores, tiles * LANES))
            .collect();
        widths.dedup();
        widths
            .into_iter()
            .find(|width| self.bytes(sizes, *width) <= most_bytes(self.memory))
    }

    /// Bytes of the core's memory: windows, scratch, and sums.
    fn bytes(&self, sizes: Sizes, width: usize) -> usize {
        let mut kernel = Kernel::new(Vec::new(), self.windows(sizes, width));
        self.whole(&mut kernel, sizes);
        self.parts(&mut kernel, sizes, width);
        kernel.window_bytes()
            + kernel.scratch_bytes()
            + sizes.columns(sizes.windows()[0]) * width * 4
    }

    /// Blocks are counted by the last two dimensions of the grid, of which the first is that of cores.
    fn windows(&self, sizes: Sizes, width: usize) -> Vec<Window> {
        let Sizes { parts, terms, .. } = sizes;
        let [of_whole, of_blocks] = sizes.windows();
        let [columns, all_columns] = [of_whole, of_blocks].map(|window| sizes.columns(window));
        let whole = Window {
            dtype: DType::BF16,
            array: [parts, terms, columns],
            block: [terms, columns],
            index: [Some(0), None, None],
            place: Place::Own,
            first_column: 0,
        };
        let blocks = Window {
            array: [parts, terms, all_columns],
            block: [terms, width],
            index: [Some(0), None, Some(2)],
            ..whole
        };
        let [key, first] = noise_windows(parts, Some(0));
        let result = match self.is_rows(of_whole) {
            true => Window {
                array: [parts, columns, all_columns],
                block: [columns, width],
                ..blocks
            },
            false => Window {
                array: [parts, all_columns, columns],
                block: [width, columns],
                index: [Some(0), Some(2), None],
                ..blocks
            },
        };
        let result = Window {
            dtype: self.result,
            ..result
        };
        let both = match of_whole {
            GRADIENT => [whole, blocks],
            _ => [blocks, whole],
        };
        let mut windows = [&both[..], &[key, first]].concat();
        if self.ranges {
            windows.extend(both.map(ranges_of));
        }
        windows.push(result);
        windows
    }

    /// Whether the columns of a window are the result's rows.
    fn is_rows(&self, window: usize) -> bool {
        self.inputs_first == (window == INPUTS)
    }

    fn whole(&self, k: &mut Kernel, sizes: Sizes) -> Whole {
        let [window, _] = sizes.windows();
        let columns = sizes.columns(window);
        let [integers, scale] = match self.is_rows(window) {
            true => [[columns, sizes.terms], [columns, WIDE_TILE_ROWS]],
            false => [[sizes.terms, columns], [WIDE_TILE_ROWS, columns]],
        };
        Whole {
            integers: k.scratch(DType::S8, integers),
            scale: k.scratch(DType::F32, scale),
        }
    }

    fn parts(&self, k: &mut Kernel, sizes: Sizes, width: usize) -> Vec<Part> {
        let of_part = match tiles_of_blocks(sizes.terms) {
            Tiles::Straight => PART,
            Tiles::Loop => width,
        };
        let [_, window] = sizes.windows();
        let firsts = (0..width).step_by(of_part);
        let part = |first: usize| Part {
            first,
            width: of_part,
            integers: match self.is_rows(window) {
                true => k.scratch(DType::S8, [of_part, sizes.terms]),
                false => k.scratch(DType::S8, [sizes.terms, of_part]),
            },
            scale: k.scratch(DType::F32, [of_part, WIDE_TILE_ROWS]),
        };
        firsts.map(part).collect()
    }

    /// Some columns are rounded while those before them are multiplied, so each has a memory of its own.
    fn kernel(&self, sizes: Sizes, width: usize) -> Kernel {
        let blocks = sizes.columns(sizes.windows()[1]) / width / self.cores;
        let grid = vec![sizes.parts, self.cores, blocks];
        let mut k = Kernel::new(grid, self.windows(sizes, width));
        k.memory = self.memory;
        k.share_last_dims();
        let whole = self.whole(&mut k, sizes);
        let parts = self.parts(&mut k, sizes, width);
        k.when_first(2, |k| self.round_whole(k, whole, sizes));
        let mut scale = self.round_part(&mut k, parts[0], sizes, width);
        for (at, part) in parts.iter().enumerate() {
            let next = parts.get(at + 1);
            let next = next.map(|next| self.round_part(&mut k, *next, sizes, width));
            self.multiply(&mut k, *part, scale, whole, sizes);
            scale = next.unwrap_or(scale);
        }
        k
    }

    fn multiply(&self, k: &mut Kernel, part: Part, scale: KernelValue, whole: Whole, sizes: Sizes) {
        let [window, _] = sizes.windows();
        let columns = sizes.columns(window);
        let of_part = k.kept(part.integers);
        let of_whole = k.kept(whole.integers);
        let is_rows = self.is_rows(window);
        let (lhs, rhs, size, at) = match is_rows {
            true => (of_whole, of_part, [columns, part.width], [0, part.first]),
            false => (of_part, of_whole, [part.width, columns], [part.first, 0]),
        };
        let zero = k.splat(DType::S32, size, 0.0);
        let sums = k.matmul(lhs, rhs, zero);
        let y = k.convert(sums, DType::F32);
        let [rows, columns] = size;
        let [of_whole, of_part] = match is_rows {
            true => {
                let of_whole = k.kept_part(whole.scale, [0, 0], [rows, 1]);
                [k.broadcast(of_whole, columns), k.broadcast_row(scale, rows)]
            }
            false => {
                let scale = k.broadcast_row(scale, WIDE_TILE_ROWS);
                let scale = k.transpose(scale);
                k.keep(part.scale, scale, [0, 0]);
                let scale = k.kept_part(part.scale, [0, 0], [rows, 1]);
                let of_whole = k.kept_part(whole.scale, [0, 0], [1, columns]);
                [k.broadcast_row(of_whole, rows), k.broadcast(scale, columns)]
            }
        };
        // The gradient's scale comes first.
        let [first, second] = match window {
            GRADIENT => [of_whole, of_part],
            _ => [of_part, of_whole],
        };
        let y = k.mul(y, first);
        let y = k.mul(y, second);
        let y = k.convert(y, self.result);
        k.store(y, at);
    }

    /// The largest magnitude of each of some columns of a window, `f32[1, columns]`.
    fn absmax(
        &self,
        k: &mut Kernel,
        window: usize,
        sizes: Sizes,
        columns: Range<usize>,
        tiles: Tiles,
    ) -> KernelValue {
        if self.ranges {
            let first = k.row(0);
            return k.load_part(WINDOWS_BEFORE_RANGES + window, first, 1, columns);
        }
        absmax(
            k,
            window,
            sizes.terms,
            columns,
            tiles,
            self.rounding().vectors(),
        )
    }

    fn rounding(&self) -> Rounding {
        Rounding::of_aqt(self.bf16_vectors)
    }

    /// Keeps what is whole, and its scales.
    fn round_whole(&self, k: &mut Kernel, kept: Whole, sizes: Sizes) {
        let [window, _] = sizes.windows();
        let all = sizes.columns(window);
        let width = block_of_columns(all, ROUNDED_COLUMNS).unwrap_or(LANES);
        for from in (0..all).step_by(width) {
            let columns = from..from + width;
            let absmax = self.absmax(k, window, sizes, columns.clone(), Tiles::Loop);
            let (inverse, scale) = scales(k, absmax);
            let scale = k.broadcast_row(scale, WIDE_TILE_ROWS);
            match self.is_rows(window) {
                true => {
                    let scale = k.transpose(scale);
                    k.keep(kept.scale, scale, [from, 0]);
                }
                false => k.keep(kept.scale, scale, [0, from]),
            }
            let of = Rounded {
                window,
                columns,
                inverse,
                noise: (window == GRADIENT).then_some((sizes.outputs, None)),
            };
            self.round(k, &of, sizes.terms, Tiles::Loop, kept.integers, from);
        }
    }

    /// Keeps a part of a block; gives its scales, `f32[1, width]`.
    fn round_part(&self, k: &mut Kernel, part: Part, sizes: Sizes, block: usize) -> KernelValue {
        let [_, window] = sizes.windows();
        let columns = part.first..part.first + part.width;
        let tiles = tiles_of_blocks(sizes.terms);
        let absmax = self.absmax(k, window, sizes, columns.clone(), tiles);
        let (inverse, scale) = scales(k, absmax);
        let of = Rounded {
            window,
            columns,
            inverse,
            noise: (window == GRADIENT).then_some((sizes.outputs, Some((2, block)))),
        };
        self.round(k, &of, sizes.terms, tiles, part.integers, 0);
        scale
    }

    /// Keeps columns of a window as integers, from the column `at` of the memory on; transposed, from that row, where they
    /// are the result's rows.
    fn round(
        &self,
        k: &mut Kernel,
        of: &Rounded,
        terms: usize,
        tiles: Tiles,
        kept: Scratch,
        at: usize,
    ) {
        let is_transposed = self.is_rows(of.window);
        let [rows, width] = match is_transposed {
            true => [LANES, LANES],
            false => [tiles.rows(), of.columns.len()],
        };
        let inverse = k.broadcast_row(of.inverse, rows);
        tiles.each(k, terms, rows, Vec::new(), |k, row, _| {
            for from in (0..of.columns.len()).step_by(width) {
                let first = of.columns.start + from;
                let x = k.load_part(of.window, row, rows, first..first + width);
                let inverse = match width == of.columns.len() {
                    true => inverse,
                    false => k.slice(inverse, from, width),
                };
                let noise = of.noise.map(|(columns, block)| Noise {
                    windows: [2, 3],
                    columns,
                    rows_in_a_word: self.rows_in_a_word,
                    blocks: [None, block],
                    row,
                    column: first,
                });
                let y = self.rounding().integers(k, x, inverse, noise);
                if is_transposed {
                    let y = k.transpose(y);
                    k.keep_columns(kept, y, at + from, row);
                } else {
                    k.keep_at(kept, y, row, at + from);
                }
            }
            Vec::new()
        });
    }

    fn sizes(&self, operands: &[&Shape]) -> Option<Sizes> {
        let &[gradient, x, key, first, ref ranges @ ..] = operands else {
            return None;
        };
        let &[parts, terms, outputs] = &gradient.dims[..] else {
            return None;
        };
        let inputs = *x.dims.get(2)?;
        let of_columns =
            [outputs, inputs].map(|columns| Shape::new(DType::F32, [parts, 1, columns]));
        let expected = of_columns.iter().filter(|_| self.ranges);
        let fits = expected.eq(ranges.iter().copied())
            && *gradient == Shape::new(DType::BF16, [parts, terms, outputs])
            && *x == Shape::new(DType::BF16, [parts, terms, inputs])
            && *key == Shape::new(DType::U32, [1, 1, 2])
            && *first == Shape::new(DType::U32, [parts, 1, 1]);
        fits.then_some(Sizes {
            parts,
            terms,
            outputs,
            inputs,
        })
    }
}

impl KernelCall for RoundedGradient {
    fn name(&self) -> &'static str {
        "int8_gradient_of_weights"
    }

    fn batch(&self, operands: &[&Shape]) -> Option<Batch> {
        let mut of_operands = vec![Some(0); operands.len()];
        of_operands[2] = None;
        Some(Batch {
            operands: of_operands,
            result: 0,
        })
    }

    fn kernel_of(&self, operands: &[&Shape]) -> Option<Kernel> {
        let sizes = self.sizes(operands)?;
        Some(self.kernel(sizes, self.block(sizes)?))
    }

    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let sizes = self.sizes(operands);
        let Some(sizes) = sizes.filter(|sizes| self.block(*sizes).is_some()) else {
            return Err(refused(
                "int8 kernel of a gradient of weights",
                self,
                operands,
            ));
        };
        let Sizes {
            parts,
            outputs,
            inputs,
            ..
        } = sizes;
        let [rows, columns] = match self.inputs_first {
            true => [inputs, outputs],
            false => [outputs, inputs],
        };
        Ok(Shape::new(self.result, [parts, rows, columns]))
    }

    fn flops(&self, operands: &[&Shape], result: &Shape) -> u64 {
        (2 * result.count() as u64).saturating_mul(operands[0].dims[1] as u64)
    }
}
