//! Kernels on the host: what the text means, for tests against the composites that they stand for.

use half::bf16;

use crate::dtype::DType;
use crate::graph::RoundingStream;
use crate::graph::eval::{Data, Value as GraphValue};
use crate::graph::random::{key_of_row, rounding_noise_at};
use crate::shape::Shape;

use super::{
    Binary, Counter, Kernel, Noise, Op, Place, Reduction, Scratch, Statement, Type, Unary, Value,
};

/// What a call of `kernel` gives for values of a graph. Without a kernel nothing: the call's shapes were refused.
pub fn evaluated(kernel: Option<&Kernel>, operands: &[&GraphValue], result: Shape) -> GraphValue {
    let arrays = operands.iter().map(|operand| {
        let elements = 0..operand.shape.count();
        let number = |i: usize| match operand.shape.dtype {
            // Words are kept as bits.
            DType::U32 => f32::from_bits(operand.float(i) as u32),
            _ => operand.float(i) as f32,
        };
        elements.map(number).collect()
    });
    let arrays: Vec<Vec<f32>> = arrays.collect();
    let out = kernel.map(|kernel| kernel.evaluate(&arrays));
    let out = out.unwrap_or_default();
    GraphValue {
        shape: result,
        data: Data::F(out.into_iter().map(f64::from).collect()),
    }
}

/// A value while a step runs, row-major. Integers are small enough to be exact in `f32`, but for those of a product,
/// which are rounded as their conversion to `f32` rounds them.
#[derive(Clone, Debug, Default)]
struct Matrix {
    columns: usize,
    data: Vec<f32>,
}

impl Kernel {
    /// The result `[batch, rows, columns]` for the operands, all row-major.
    pub fn evaluate(&self, operands: &[Vec<f32>]) -> Vec<f32> {
        let Some(result) = self.windows.last() else {
            return Vec::new();
        };
        let (entry, operands) = match operands.split_first() {
            Some((number, rest)) if !self.entries.is_empty() => (number[0] as usize, rest),
            _ => (0, operands),
        };
        let (mut out, operands) = match operands.split_last() {
            Some((stack, rest)) if self.result_entries.is_some() => (stack.clone(), rest),
            _ => (vec![0.0; result.array.iter().product()], operands),
        };
        let steps: usize = self.grid.iter().product();
        // What was never put there is not a number, so that a test finds its use.
        let mut scratch: Vec<Matrix> = self.scratch.iter().map(|of| unset(*of)).collect();
        for step in 0..steps {
            let mut run = Run {
                kernel: self,
                operands,
                entry,
                place: place(&self.grid, step),
                values: vec![Matrix::default(); self.types.len()],
                scratch: &mut scratch,
                out: &mut out,
            };
            run.statements(&self.body);
        }
        out
    }
}

/// The place in the grid of a step.
fn place(grid: &[usize], mut step: usize) -> Vec<usize> {
    let mut place = vec![0; grid.len()];
    for (at, count) in place.iter_mut().zip(grid).rev() {
        *at = step % count;
        step /= count;
    }
    place
}

/// One step of the grid.
struct Run<'a> {
    kernel: &'a Kernel,
    operands: &'a [Vec<f32>],
    /// The number of the entry of stacks.
    entry: usize,
    place: Vec<usize>,
    values: Vec<Matrix>,
    scratch: &'a mut [Matrix],
    out: &'a mut Vec<f32>,
}

impl Run<'_> {
    fn statements(&mut self, statements: &[Statement]) {
        for statement in statements {
            if let Op::Repeat {
                trips,
                counter,
                start,
                carry,
                body,
                next,
            } = &statement.op
            {
                self.assign(carry, start);
                for trip in 0..*trips {
                    self.values[counter.0] = number(trip as f32);
                    self.statements(body);
                    self.assign(carry, next);
                }
                self.assign(&statement.results, carry);
            } else if let Op::When {
                dims,
                place,
                is,
                body,
            } = &statement.op
            {
                let sum: usize = dims.iter().map(|dim| self.place[*dim]).sum();
                if (sum == *place) == *is {
                    self.statements(body);
                }
            } else if let Some(value) = self.value(&statement.op, statement.results.first()) {
                self.values[statement.results[0].0] = value;
            }
        }
    }

    fn assign(&mut self, to: &[Value], from: &[Value]) {
        let values: Vec<Matrix> = from.iter().map(|v| self.values[v.0].clone()).collect();
        for (to, value) in to.iter().zip(values) {
            self.values[to.0] = value;
        }
    }

    fn get(&self, value: Value) -> &Matrix {
        &self.values[value.0]
    }

    /// The value of an operation; `None` for one that stores.
    fn value(&mut self, op: &Op, result: Option<&Value>) -> Option<Matrix> {
        let [rows, columns] = result.map_or([1, 1], |v| self.kernel.size(*v));
        let matrix = |data: Vec<f32>| Some(Matrix { columns, data });
        match op {
            Op::Splat(number) => matrix(vec![*number as f32; rows * columns]),
            Op::Columns => matrix((0..rows * columns).map(|i| (i % columns) as f32).collect()),
            Op::Rows(count) => matrix(
                (0..rows * columns)
                    .map(|i| (i / columns % count) as f32)
                    .collect(),
            ),
            Op::Row { counter, start } => {
                let base = counter.map_or(0.0, |(counter, step)| {
                    let count = match counter {
                        Counter::Trips(value) => self.get(value).data[0],
                        Counter::Steps(dim) => self.place[dim] as f32,
                    };
                    count * step as f32
                });
                Some(number(base + *start as f32))
            }
            Op::Load {
                window,
                row,
                column,
            } => {
                let row = self.get(*row).data[0] as usize;
                matrix(self.load(*window, [row, *column], [rows, columns]))
            }
            Op::Store(value, row, column) => {
                let row = self.get(*row).data[0] as usize;
                self.store(*value, [row, *column]);
                None
            }
            Op::Kept(scratch, row, column) => {
                let row = self.get(*row).data[0] as usize;
                let memory = &self.scratch[scratch.0];
                let rows = (row..row + rows).map(|row| row * memory.columns + column);
                let parts = rows.flat_map(|at| &memory.data[at..at + columns]);
                matrix(parts.copied().collect())
            }
            Op::Keep(scratch, value, row, column) => {
                let row = self.get(*row).data[0] as usize;
                self.keep(*scratch, *value, [row, *column]);
                None
            }
            Op::KeepColumns(scratch, value, place) => {
                let place = place.map(|at| self.get(at).data[0] as usize);
                self.keep(*scratch, *value, place);
                None
            }
            Op::Unary(op, x) => {
                let x = &self.get(*x).data[..];
                matrix(each(x.len(), |i| unary(*op, x[i])))
            }
            Op::Binary(op, a, b) => {
                let (a, b) = (&self.get(*a).data[..], &self.get(*b).data[..]);
                let is_bf16 = result.and_then(|v| self.kernel.dtype_of(*v)) == Some(DType::BF16);
                matrix(each(a.len(), |i| {
                    let exact = binary(*op, a[i], b[i]);
                    match is_bf16 {
                        true => bf16::from_f32(exact).to_f32(),
                        false => exact,
                    }
                }))
            }
            Op::Less(a, b) => {
                let both = self.get(*a).data.iter().zip(&self.get(*b).data);
                matrix(both.map(|(a, b)| f32::from(u8::from(a < b))).collect())
            }
            Op::Equal(a, b) => {
                let both = self.get(*a).data.iter().zip(&self.get(*b).data);
                matrix(both.map(|(a, b)| f32::from(u8::from(a == b))).collect())
            }
            Op::Select([condition, a, b]) => {
                let [c, a, b] = [condition, a, b].map(|v| &self.get(*v).data);
                let chosen = |i: usize| if c[i] != 0.0 { a[i] } else { b[i] };
                matrix(each(c.len(), chosen))
            }
            Op::Convert(x) => {
                let to = result.and_then(|v| self.kernel.dtype_of(*v));
                let x = &self.get(*x).data[..];
                matrix(match to {
                    Some(DType::BF16) => each(x.len(), |i| bf16::from_f32(x[i]).to_f32()),
                    Some(DType::S8) => each(x.len(), |i| f32::from(x[i].round_ties_even() as i8)),
                    _ => x.to_vec(),
                })
            }
            Op::Reduce(kind, x) => {
                let x = self.get(*x);
                let reduced = x.data.chunks(x.columns).map(|row| match kind {
                    Reduction::Sum => row.iter().sum(),
                    Reduction::Max => row.iter().copied().fold(f32::NEG_INFINITY, maximum),
                });
                matrix(reduced.collect())
            }
            Op::ReduceRows(kind, x) => {
                let x = self.get(*x);
                let reduced = (0..columns).map(|column| {
                    let own = each(x.data.len() / columns, |row| x.data[row * columns + column]);
                    match kind {
                        Reduction::Sum => own.into_iter().sum(),
                        Reduction::Max => own.into_iter().fold(f32::NEG_INFINITY, maximum),
                    }
                });
                matrix(reduced.collect())
            }
            Op::Transpose(x) => Some(transposed(self.get(*x))),
            Op::Broadcast(x) => {
                let x = self.get(*x);
                let of_column = x.columns == 1 && x.data.len() == rows;
                let mut data = Vec::with_capacity(rows * columns);
                for row in 0..rows {
                    match of_column {
                        true => data.resize(data.len() + columns, x.data[row]),
                        false => data.extend_from_slice(&x.data[..columns]),
                    }
                }
                matrix(data)
            }
            Op::Slice(x, [row, column]) => {
                let x = self.get(*x);
                let lines = x.data.chunks(x.columns).skip(*row).take(rows);
                matrix(
                    lines
                        .flat_map(|line| &line[*column..column + columns])
                        .copied()
                        .collect(),
                )
            }
            Op::Rotate(x, count) => {
                let lines = self.get(*x).data.chunks(columns);
                let moved = lines.flat_map(|line| {
                    let mut line = line.to_vec();
                    line.rotate_right(*count);
                    line
                });
                matrix(moved.collect())
            }
            Op::Interleave(both) => {
                let [even, odd] = both.map(|x| self.get(x));
                let lines = even.data.chunks(columns).zip(odd.data.chunks(columns));
                matrix(lines.flat_map(|(even, odd)| [even, odd].concat()).collect())
            }
            Op::Noise(noise) => matrix(self.noise(*noise, [rows, columns])),
            Op::MatMul {
                lhs,
                rhs,
                transpose_rhs,
                start,
            } => {
                let [lhs, rhs, start] = [lhs, rhs, start].map(|v| self.get(*v));
                let is_integer = result.and_then(|v| self.kernel.dtype_of(*v)) == Some(DType::S32);
                let sums = match transpose_rhs {
                    true => products(lhs, rhs, is_integer),
                    false => products(lhs, &transposed(rhs), is_integer),
                };
                let both = start.data.iter().zip(sums);
                matrix(both.map(|(start, sum)| start + sum).collect())
            }
            Op::Repeat { .. } | Op::When { .. } => None,
        }
    }

    fn keep(&mut self, scratch: Scratch, value: Value, [row, column]: [usize; 2]) {
        let value = &self.values[value.0];
        let memory = &mut self.scratch[scratch.0];
        for (r, line) in value.data.chunks(value.columns).enumerate() {
            let at = (row + r) * memory.columns + column;
            memory.data[at..at + line.len()].copy_from_slice(line);
        }
    }

    fn noise(&self, noise: Noise, [rows, columns]: [usize; 2]) -> Vec<f32> {
        let [key, first] = noise.windows.map(|window| {
            let [batch, ..] = self.origin(window);
            let of = &self.kernel.windows[window];
            let words = &self.operands[window][batch * of.array[1] * of.array[2]..];
            words.iter().map(|word| word.to_bits()).collect::<Vec<_>>()
        });
        let origin = |block: Option<(usize, usize)>| {
            block.map_or(0, |(dim, size)| self.block(dim) * size) as u32
        };
        let row = self.get(noise.row).data[0] as u32 + origin(noise.blocks[0]);
        let column = noise.column as u32 + origin(noise.blocks[1]);
        let at = |i: usize| {
            let row = first[0].wrapping_add(row + (i / columns) as u32);
            let column = column + (i % columns) as u32;
            let key = match noise.rows_in_a_word {
                Some(rows) => key_of_row([key[0], key[1]], row, rows),
                None => [key[0], key[1]],
            };
            let at = [row, column];
            rounding_noise_at(key, RoundingStream(0), at, noise.columns as u32)
        };
        (0..rows * columns).map(at).collect()
    }

    /// The number of the block that a dimension of the grid counts.
    fn block(&self, dim: usize) -> usize {
        let grid = &self.kernel.grid;
        match self.kernel.shared && dim + 1 == grid.len() {
            true => self.place[dim - 1] * grid[dim] + self.place[dim],
            false => self.place[dim],
        }
    }

    /// Where a window's block begins in its array: batch entry, of those of a whole stack, row, column.
    fn origin(&self, window: usize) -> [usize; 3] {
        let entry = match self.kernel.entries.contains(&window) {
            true => self.entry,
            false => 0,
        };
        let window = &self.kernel.windows[window];
        let mut at = window.index.map(|dim| dim.map_or(0, |dim| self.block(dim)));
        let last = window.array[1] / window.block[0] - 1;
        at[1] = match window.place {
            Place::Own => at[1],
            Place::From(first) => first + at[1],
            Place::Before(blocks) => (at[1] * blocks).saturating_sub(1),
            Place::Behind(blocks) => ((at[1] + 1) * blocks).min(last),
        };
        at[2] += window.first_column;
        let batch = entry * window.array[0] + at[0];
        [batch, at[1] * window.block[0], at[2] * window.block[1]]
    }

    /// A part of a window's block, `size` from the row and the column `first`.
    fn load(&self, window: usize, first: [usize; 2], [rows, columns]: [usize; 2]) -> Vec<f32> {
        let [batch, row, column] = self.origin(window);
        let w = &self.kernel.windows[window];
        let array = self.operands.get(window).unwrap_or(self.out);
        let mut data = Vec::with_capacity(rows * columns);
        for r in row + first[0]..row + first[0] + rows {
            let at = (batch * w.array[1] + r) * w.array[2] + column + first[1];
            data.extend_from_slice(&array[at..at + columns]);
        }
        data
    }

    fn store(&mut self, value: Value, first: [usize; 2]) {
        let window = self.kernel.windows.len() - 1;
        let [batch, row, column] = self.origin(window);
        let w = &self.kernel.windows[window];
        let value = &self.values[value.0];
        for (r, line) in value.data.chunks(value.columns).enumerate() {
            let row = row + first[0] + r;
            let at = (batch * w.array[1] + row) * w.array[2] + column + first[1];
            self.out[at..at + line.len()].copy_from_slice(line);
        }
    }
}

/// The sum of the products of each row of `lhs` with each row of `rhs`, row-major, each in the order of its terms.
///
/// Tests run this without optimizations: a loop by index over slices takes a fraction of what iterators take.
fn products(lhs: &Matrix, rhs: &Matrix, is_integer: bool) -> Vec<f32> {
    let terms = lhs.columns;
    let mut sums = Vec::with_capacity(lhs.data.len() / terms * (rhs.data.len() / terms));
    for left in lhs.data.chunks(terms) {
        for right in rhs.data.chunks(terms) {
            let (mut at, mut sum, mut whole) = (0, -0.0f32, 0);
            while at < terms {
                let product = left[at] * right[at];
                match is_integer {
                    true => whole += product as i32,
                    false => sum += product,
                }
                at += 1;
            }
            sums.push(if is_integer { whole as f32 } else { sum });
        }
    }
    sums
}

/// What `of` says of each number below `count`.
///
/// Tests run this without optimizations: a loop by index takes a fraction of what iterators take.
fn each(count: usize, of: impl Fn(usize) -> f32) -> Vec<f32> {
    let mut data = Vec::with_capacity(count);
    while data.len() < count {
        data.push(of(data.len()));
    }
    data
}

fn transposed(x: &Matrix) -> Matrix {
    let (rows, columns) = (x.data.len() / x.columns, x.columns);
    let mut data = Vec::with_capacity(x.data.len());
    for column in 0..columns {
        let mut at = column;
        while at < x.data.len() {
            data.push(x.data[at]);
            at += columns;
        }
    }
    Matrix {
        columns: rows,
        data,
    }
}

fn unset(of: Type) -> Matrix {
    match of {
        Type::Row => Matrix::default(),
        Type::Matrix { rows, columns, .. } => Matrix {
            columns,
            data: vec![f32::NAN; rows * columns],
        },
    }
}

fn number(x: f32) -> Matrix {
    Matrix {
        columns: 1,
        data: vec![x],
    }
}

fn unary(op: Unary, x: f32) -> f32 {
    match op {
        Unary::Abs => x.abs(),
        Unary::Exp2 => x.exp2(),
        // As roughly as bf16 has it, so that a kernel that relies on more is found.
        Unary::Reciprocal => bf16::from_f32(1.0 / x).to_f32(),
        Unary::Rsqrt => 1.0 / x.sqrt(),
    }
}

fn binary(op: Binary, a: f32, b: f32) -> f32 {
    match op {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Div => a / b,
        Binary::Max => maximum(a, b),
        Binary::Min => -maximum(-a, -b),
    }
}

/// NaN where either is.
fn maximum(a: f32, b: f32) -> f32 {
    match a.is_nan() || b.is_nan() {
        true => f32::NAN,
        false => a.max(b),
    }
}
