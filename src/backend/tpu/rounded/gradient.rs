//! The gradient of weights: rows that are rounded, each column by its own scale, times others that are.

use crate::dtype::DType;
use crate::graph::eval::Value;
use crate::graph::{Batch, Configuration, CustomCall, InferError, constraint};
use crate::shape::Shape;

use super::super::arithmetic::{MOST_TERMS, block_of_columns, scales};
use super::super::mosaic::{
    Kernel, LANES, Noise, Place, Scratch, Value as KernelValue, Window, evaluated,
};
use super::{TILE_ROWS, configuration, integers, noise_windows};

/// Columns of a block of the result, at most.
const MOST_COLUMNS: usize = 640;
/// Columns that are rounded in one run of a loop, at most.
const ROUNDED_COLUMNS: usize = 640;
/// Rows of a tile of `f32`.
const WIDE_TILE_ROWS: usize = 8;

/// For each part of the batch the sum over its rows of what `x` and a gradient are multiplied with each other: `f32[parts, outputs,
/// inputs]`, or `[parts, inputs, outputs]`. Both are quantized as AQT does it, a scale a column of a part, the gradient at random.
///
/// Operands: the gradient `bf16[parts, rows, outputs]`, `x` `bf16[parts, rows, inputs]`, the key `u32[1, 1, 2]`, and `u32[parts, 1, 1]`,
/// the number of the first row of each part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundedGradient {
    /// Whether inputs are the result's rows.
    pub inputs_first: bool,
    /// Cores that share the columns of a part.
    pub cores: usize,
    /// Bytes of the core's memory that it may take.
    pub memory: usize,
}

/// The numbers of parts, their rows, and the rows and columns of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sizes {
    parts: usize,
    terms: usize,
    rows: usize,
    columns: usize,
}

/// What a core keeps from step to step.
#[derive(Clone, Copy)]
struct Kept {
    /// `s8[rows, terms]`
    lhs: Scratch,
    /// The scales of the result's rows, `f32[rows, 8]`.
    lhs_scale: Scratch,
    /// `s8[terms, columns of a block]`
    rhs: Scratch,
}

impl RoundedGradient {
    /// Whether the kernel takes so many rows of a part of the batch: whole tiles, that fit the core's memory.
    pub fn fits(&self, rows: usize, outputs: usize, inputs: usize) -> bool {
        let [of_rows, columns] = self.ordered([outputs, inputs]);
        let sizes = Sizes {
            parts: 1,
            terms: rows,
            rows: of_rows,
            columns,
        };
        self.block(sizes).is_some()
    }

    /// What belongs to the result's rows, and to its columns, of what belongs to outputs and to inputs.
    fn ordered<T>(&self, [outputs, inputs]: [T; 2]) -> [T; 2] {
        match self.inputs_first {
            true => [inputs, outputs],
            false => [outputs, inputs],
        }
    }

    /// Columns of the largest block that fits the core's memory.
    fn block(&self, sizes: Sizes) -> Option<usize> {
        let Sizes { terms, rows, .. } = sizes;
        let is_known = [terms, rows, sizes.columns]
            .iter()
            .all(|size| *size > 0 && size.is_multiple_of(LANES))
            && terms <= MOST_TERMS
            && sizes.columns.is_multiple_of(self.cores * LANES);
        if !is_known {
            return None;
        }
        let mut widths: Vec<usize> = (1..=MOST_COLUMNS / LANES)
            .rev()
            .filter_map(|tiles| block_of_columns(sizes.columns / self.cores, tiles * LANES))
            .collect();
        widths.dedup();
        widths
            .into_iter()
            .find(|width| self.bytes(sizes, *width) <= self.memory / 16 * 15)
    }

    /// Bytes of the core's memory: windows, scratch, and sums.
    fn bytes(&self, sizes: Sizes, width: usize) -> usize {
        let mut kernel = Kernel::new(Vec::new(), self.windows(sizes, width));
        kept(&mut kernel, sizes, width);
        kernel.window_bytes() + kernel.scratch_bytes() + sizes.rows * width * 4
    }

    /// Columns of a block are counted by the last two dimensions of the grid, of which the first is that of cores.
    fn windows(&self, sizes: Sizes, width: usize) -> Vec<Window> {
        let Sizes {
            parts,
            terms,
            rows,
            columns,
        } = sizes;
        let all = Window {
            dtype: DType::BF16,
            array: [parts, terms, rows],
            block: [terms, rows],
            index: [Some(0), None, None],
            place: Place::Own,
            first_column: 0,
        };
        let some = Window {
            array: [parts, terms, columns],
            block: [terms, width],
            index: [Some(0), None, Some(2)],
            ..all
        };
        let operands = match self.inputs_first {
            true => [some, all],
            false => [all, some],
        };
        let mut windows = operands.to_vec();
        windows.extend(noise_windows(parts, Some(0)));
        windows.push(Window {
            dtype: DType::F32,
            array: [parts, rows, columns],
            block: [rows, width],
            index: [Some(0), None, Some(2)],
            ..all
        });
        windows
    }

    fn kernel(&self, sizes: Sizes, width: usize) -> Kernel {
        let blocks = sizes.columns / width / self.cores;
        let grid = vec![sizes.parts, self.cores, blocks];
        let mut k = Kernel::new(grid, self.windows(sizes, width));
        k.memory = self.memory;
        k.share_last_dims();
        let kept = kept(&mut k, sizes, width);
        let [lhs, rhs] = self.ordered([0, 1]);
        k.when_first(2, |k| self.round_lhs(k, kept, lhs, sizes));
        let scale = self.round_rhs(&mut k, kept, rhs, sizes.terms, width);
        let [lhs, rhs] = [kept.lhs, kept.rhs].map(|of| k.kept(of));
        let size = [sizes.rows, width];
        let zero = k.splat(DType::S32, size, 0.0);
        let sums = k.matmul(lhs, rhs, zero);
        let sums = k.convert(sums, DType::F32);
        let of_rows = k.kept_part(kept.lhs_scale, [0, 0], [sizes.rows, 1]);
        let of_rows = k.broadcast(of_rows, width);
        let of_columns = k.broadcast_row(scale, sizes.rows);
        // The gradient's scale comes first.
        let [first, second] = match self.inputs_first {
            true => [of_columns, of_rows],
            false => [of_rows, of_columns],
        };
        let y = k.mul(sums, first);
        let y = k.mul(y, second);
        k.store(y, [0, 0]);
        k
    }

    /// The largest magnitude of each of some columns of a window, `f32[1, columns]`.
    fn absmax(k: &mut Kernel, window: usize, terms: usize, [at, width]: [usize; 2]) -> KernelValue {
        let zero = k.splat(DType::F32, [TILE_ROWS, width], 0.0);
        let highest = k.repeat(terms / LANES, vec![zero], |k, counter, highest| {
            let mut highest = highest[0];
            for start in (0..LANES).step_by(TILE_ROWS) {
                let row = k.row_of(counter, LANES, start);
                let x = k.load_part(window, row, TILE_ROWS, at..at + width);
                let x = k.convert(x, DType::F32);
                let magnitudes = k.abs(x);
                highest = k.max(highest, magnitudes);
            }
            vec![highest]
        });
        k.column_max(highest[0])
    }

    /// Where noise of a window's rows comes from; `None` where it is rounded to nearest.
    fn noise(
        &self,
        window: usize,
        row: KernelValue,
        [columns, at]: [usize; 2],
        block: Option<(usize, usize)>,
    ) -> Option<Noise> {
        (window == 0).then_some(Noise {
            windows: [2, 3],
            columns,
            blocks: [None, block],
            row,
            column: at,
        })
    }

    /// Keeps what belongs to the result's rows, transposed, and their scales.
    fn round_lhs(&self, k: &mut Kernel, kept: Kept, window: usize, sizes: Sizes) {
        let width = block_of_columns(sizes.rows, ROUNDED_COLUMNS).unwrap_or(LANES);
        for from in (0..sizes.rows).step_by(width) {
            let absmax = RoundedGradient::absmax(k, window, sizes.terms, [from, width]);
            let (inverse, scale) = scales(k, absmax);
            let scale = k.broadcast_row(scale, WIDE_TILE_ROWS);
            let scale = k.transpose(scale);
            k.keep(kept.lhs_scale, scale, [from, 0]);
            k.repeat(sizes.terms / LANES, Vec::new(), |k, counter, _| {
                let row = k.row_of(counter, LANES, 0);
                for at in (0..width).step_by(LANES) {
                    let columns = from + at..from + at + LANES;
                    let x = k.load_part(window, row, LANES, columns.clone());
                    let x = k.convert(x, DType::F32);
                    let inverse = k.slice(inverse, at, LANES);
                    let inverse = k.broadcast_row(inverse, LANES);
                    let noise = self.noise(window, row, [sizes.rows, from + at], None);
                    let y = integers(k, x, inverse, noise);
                    let y = k.transpose(y);
                    k.keep_columns(kept.lhs, y, from + at, row);
                }
                Vec::new()
            });
        }
    }

    /// Keeps what belongs to the result's columns; gives their scales, `f32[1, width]`.
    fn round_rhs(
        &self,
        k: &mut Kernel,
        kept: Kept,
        window: usize,
        terms: usize,
        width: usize,
    ) -> KernelValue {
        let absmax = RoundedGradient::absmax(k, window, terms, [0, width]);
        let (inverse, scale) = scales(k, absmax);
        let inverse = k.broadcast_row(inverse, TILE_ROWS);
        let columns = k.window_columns(window);
        k.repeat(terms / LANES, Vec::new(), |k, counter, _| {
            for start in (0..LANES).step_by(TILE_ROWS) {
                let row = k.row_of(counter, LANES, start);
                let x = k.load_part(window, row, TILE_ROWS, 0..width);
                let x = k.convert(x, DType::F32);
                let noise = self.noise(window, row, [columns, 0], Some((2, width)));
                let y = integers(k, x, inverse, noise);
                k.keep_at(kept.rhs, y, row, 0);
            }
            Vec::new()
        });
        scale
    }

    fn sizes(&self, operands: &[&Shape]) -> Option<Sizes> {
        let &[gradient, x, key, first] = operands else {
            return None;
        };
        let &[parts, terms, outputs] = &gradient.dims[..] else {
            return None;
        };
        let inputs = *x.dims.get(2)?;
        let [rows, columns] = self.ordered([outputs, inputs]);
        let fits = *gradient == Shape::new(DType::BF16, [parts, terms, outputs])
            && *x == Shape::new(DType::BF16, [parts, terms, inputs])
            && *key == Shape::new(DType::U32, [1, 1, 2])
            && *first == Shape::new(DType::U32, [parts, 1, 1]);
        fits.then_some(Sizes {
            parts,
            terms,
            rows,
            columns,
        })
    }

    fn of(&self, operands: &[&Shape]) -> Option<Kernel> {
        let sizes = self.sizes(operands)?;
        Some(self.kernel(sizes, self.block(sizes)?))
    }
}

fn kept(k: &mut Kernel, sizes: Sizes, width: usize) -> Kept {
    Kept {
        lhs: k.scratch(DType::S8, [sizes.rows, sizes.terms]),
        lhs_scale: k.scratch(DType::F32, [sizes.rows, WIDE_TILE_ROWS]),
        rhs: k.scratch(DType::S8, [sizes.terms, width]),
    }
}

impl CustomCall for RoundedGradient {
    fn target(&self) -> &'static str {
        "tpu_custom_call"
    }

    fn name(&self) -> &'static str {
        "int8_gradient_of_weights"
    }

    fn batch(&self, _operands: &[&Shape]) -> Option<Batch> {
        Some(Batch {
            operands: vec![Some(0), Some(0), None, Some(0)],
            result: 0,
        })
    }

    fn configuration(&self, operands: &[&Shape]) -> Configuration {
        configuration(self, self.of(operands), operands)
    }

    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let sizes = self.sizes(operands);
        let Some(sizes) = sizes.filter(|sizes| self.block(*sizes).is_some()) else {
            let found: Vec<String> = operands.iter().map(ToString::to_string).collect();
            return Err(constraint(
                "int8 kernel of a gradient of weights",
                format!(
                    "{} are not the operands of {self:?}, or no block fits the core's memory",
                    found.join(", ")
                ),
            ));
        };
        Ok(Shape::new(
            DType::F32,
            [sizes.parts, sizes.rows, sizes.columns],
        ))
    }

    fn flops(&self, operands: &[&Shape], result: &Shape) -> u64 {
        (2 * result.count() as u64).saturating_mul(operands[0].dims[1] as u64)
    }

    fn evaluate(&self, operands: &[&Value], result: Shape) -> Value {
        let shapes: Vec<&Shape> = operands.iter().map(|operand| &operand.shape).collect();
        evaluated(self.of(&shapes).as_ref(), operands, result)
    }
}
