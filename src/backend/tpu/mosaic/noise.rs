//! The noise of stochastic rounding in kernels.

use std::fmt::Write;

use crate::dtype::DType;
use crate::graph::random::{POSITION_FACTOR, ROUNDING_FACTORS, ROWS_OF_NOISE, WORDS_FACTOR};

use super::text::{self, vector};
use super::{Kernel, Op, Type, Value};

/// Where a matrix lies in a tensor of rows that is rounded with noise, and what the noise is made from.
#[derive(Clone, Copy, Debug)]
pub struct Noise {
    /// The window of the key's two words, and that of the row of the tensor that the kernel's first row is.
    pub windows: [usize; 2],
    /// Columns of the tensor.
    pub columns: usize,
    /// [`crate::graph::random::rows_in_a_word`] of the tensor. The matrix lies in one word.
    pub rows_in_a_word: Option<u32>,
    /// The dimension of the grid that counts blocks of rows, and one that counts blocks of columns; with rows and columns of a
    /// block.
    pub blocks: [Option<(usize, usize)>; 2],
    /// The matrix's first row and first column within the block. The row is a multiple of [`ROWS_OF_NOISE`] in the tensor.
    pub row: Value,
    pub column: usize,
}

impl Kernel {
    /// Noise of stochastic rounding, in `F32` or `BF16`: [`crate::graph::random::rounding_noise_at`] of each element's
    /// position in the tensor, in a stream of its key's own. Of whole tiles of `s8`.
    pub fn noise(&mut self, noise: Noise, dtype: DType, [rows, columns]: [usize; 2]) -> Value {
        let of = Type::Matrix {
            dtype,
            rows,
            columns,
        };
        self.push(of, Op::Noise(noise))
    }

    /// [`crate::graph::random::rounding_noise_at`] of the position of each element.
    pub(super) fn noise_text(&self, text: &mut String, noise: Noise, value: Value) {
        let Type::Matrix {
            dtype,
            rows,
            columns,
        } = self.type_of(value)
        else {
            return;
        };
        let of_rows = |dtype, rows| {
            vector(Type::Matrix {
                dtype,
                rows,
                columns,
            })
        };
        let of = &of_rows(dtype, rows);
        let bytes = &of_rows(DType::S8, rows);
        let bits = &of_rows(DType::S32, rows / ROWS_OF_NOISE as usize);
        let name = &text::name(value);
        let mut lines = Lines {
            text,
            name,
            count: 0,
        };
        let number =
            |lines: &mut Lines, number: usize| lines.push(format!("arith.constant {number} : i32"));
        let word = |lines: &mut Lines, window: usize, at: usize| {
            let memory = self.memref(window);
            let at = lines.push(format!("arith.constant {at} : index"));
            lines.push(format!(
                "memref.load %w{window}[%zero, %zero, {at}] : {memory}"
            ))
        };
        let [key, first] = noise.windows;
        let [high, low] = [0, 1].map(|at| word(&mut lines, key, at));
        let first = word(&mut lines, first, 0);
        let row = text::name(noise.row);
        let row = lines.push(format!("arith.index_cast {row} : index to i32"));
        let row = lines.push(format!("arith.addi {row}, {first} : i32"));
        let column = number(&mut lines, noise.column);
        let mut place = [row, column];
        for (at, block) in place.iter_mut().zip(noise.blocks) {
            if let Some((dim, size)) = block {
                let size = number(&mut lines, size);
                let origin = lines.push(format!("arith.muli %g{dim}, {size} : i32"));
                *at = lines.push(format!("arith.addi {at}, {origin} : i32"));
            }
        }
        let [row, column] = place;
        let low = match noise.rows_in_a_word {
            Some(rows) => {
                let rows = number(&mut lines, rows as usize);
                let of_row = lines.push(format!("arith.shrui {row}, {rows} : i32"));
                let factor = lines.push(format!("arith.constant {} : i32", WORDS_FACTOR as i32));
                let more = lines.push(format!("arith.muli {of_row}, {factor} : i32"));
                lines.push(format!("arith.addi {low}, {more} : i32"))
            }
            None => low,
        };
        let shared = number(&mut lines, ROWS_OF_NOISE.ilog2() as usize);
        let row = lines.push(format!("arith.shrui {row}, {shared} : i32"));
        let columns = number(&mut lines, noise.columns);
        let origin = lines.push(format!("arith.muli {row}, {columns} : i32"));
        let origin = lines.push(format!("arith.addi {origin}, {column} : i32"));
        let factor = lines.push(format!("arith.constant {} : i32", POSITION_FACTOR as i32));
        let origin = lines.push(format!("arith.muli {origin}, {factor} : i32"));
        let origin = lines.push(format!("arith.addi {origin}, {low} : i32"));
        let [origin, high] = [origin, high]
            .map(|word| lines.push(format!("vector.broadcast {word} : i32 to {bits}")));

        let splat = |lines: &mut Lines, number: u32| {
            lines.push(format!("arith.constant dense<{}> : {bits}", number as i32))
        };
        let apply = |lines: &mut Lines, op: &str, a: &str, b: &str| {
            lines.push(format!("arith.{op} {a}, {b} : {bits}"))
        };
        let times = |lines: &mut Lines, x: &str, factor: u32| {
            let factor = splat(lines, factor);
            apply(lines, "muli", x, &factor)
        };
        // What is the same for all matrices of this size is computed once.
        let strides = [noise.columns as u32, 1].map(|stride| stride.wrapping_mul(POSITION_FACTOR));
        let [rows, along] = [0, 1].map(|dim| {
            let index = lines.push(format!(
                "tpu.iota {{dimensions = array<i32: {dim}>}} : {bits}"
            ));
            times(&mut lines, &index, strides[dim])
        });
        let within = apply(&mut lines, "addi", &rows, &along);
        let x = apply(&mut lines, "addi", &within, &origin);
        let mut x = apply(&mut lines, "xori", &x, &high);
        for (by, factor) in [16, 15].into_iter().zip(ROUNDING_FACTORS) {
            let by = splat(&mut lines, by);
            let upper = apply(&mut lines, "shrui", &x, &by);
            x = apply(&mut lines, "xori", &x, &upper);
            x = times(&mut lines, &x, factor);
        }

        let by = splat(&mut lines, 16);
        let upper = apply(&mut lines, "shrui", &x, &by);
        let x = apply(&mut lines, "xori", &x, &upper);

        // Each word becomes a byte of four rows.
        let steps = lines.push(format!("tpu.bitcast {x} : {bits} -> {bytes}"));
        let steps = lines.push(format!("arith.sitofp {steps} : {bytes} to {of}"));
        let [step, middle] = [256, 512].map(|part| {
            let number = 1.0 / f64::from(part);
            lines.push(format!("arith.constant dense<{number:e}> : {of}"))
        });
        let low = lines.push(format!("arith.mulf {steps}, {step} : {of}"));
        let _ = writeln!(lines.text, "{name} = arith.addf {low}, {middle} : {of}");
    }
}

/// The operations of a value that takes several.
struct Lines<'a> {
    text: &'a mut String,
    /// Of the value.
    name: &'a str,
    count: usize,
}

impl Lines<'_> {
    /// Appends an operation; gives the name of its result.
    fn push(&mut self, op: String) -> String {
        self.count += 1;
        let name = format!("{}_{}", self.name, self.count);
        let _ = writeln!(self.text, "{name} = {op}");
        name
    }
}
