//! TPU kernels: a small language that is printed as Mosaic's MLIR text ([`text`]) and evaluated on the host ([`eval`]).
//!
//! A kernel runs once for each step of its grid. A step sees one block of every window: of the operands, then of the
//! result. Blocks are copied to and from the core's own memory by Mosaic, while other steps compute. Scratch memory
//! stays from step to step. Values are matrices `[rows, columns]`; columns lie along the 128 lanes of a vector
//! register.

mod eval;
mod noise;
mod text;

use std::collections::BTreeSet;
use std::ops::Range;

use crate::dtype::DType;

pub use eval::evaluated;
pub use noise::Noise;
pub use text::{CostEstimate, MOST_VMEM_BYTES, VMEM_BYTES, backend_config, most_bytes};

/// Lanes of a vector register.
pub const LANES: usize = 128;

/// A kernel of one result.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Steps in each dimension; the last counts fastest.
    grid: Vec<usize>,
    /// Bytes of the core's memory that it takes.
    pub memory: usize,
    /// The dimensions whose steps run in order on one core; those of the others may run in any order, on any core.
    ordered: BTreeSet<usize>,
    /// Whether Mosaic counts the last two dimensions as one.
    joined: bool,
    /// Whether the last two dimensions count blocks together.
    shared: bool,
    /// Windows whose next block is not copied while one is computed with.
    single: BTreeSet<usize>,
    /// Of the operands, then of the result.
    windows: Vec<Window>,
    /// The windows that are of one entry of a stack, whose number is then the first operand.
    entries: BTreeSet<usize>,
    /// The entries of the stack that the result's window is of; this stack is the last operand.
    result_entries: Option<usize>,
    /// The types of scratch memories.
    scratch: Vec<Type>,
    /// The type of each value.
    types: Vec<Type>,
    body: Vec<Statement>,
}

/// What a step sees of an array `[batch, rows, columns]`. One of `u32` lies in the core's memory of scalars: words are read from
/// it one at a time.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    pub dtype: DType,
    pub array: [usize; 3],
    /// Rows and columns of a block; a block is of one batch entry.
    pub block: [usize; 2],
    /// Which dimension of the grid counts the blocks along each dimension of the array; `None` where there is one.
    pub index: [Option<usize>; 3],
    /// Which block along the rows it is.
    pub place: Place,
    /// The block of columns that is counted as the first.
    pub first_column: usize,
}

/// Which block along the rows a step sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The one that the grid counts.
    Own,
    /// The same, counted from this block on.
    From(usize),
    /// The last one before the step's rows, which are this many blocks, or the first of all.
    Before(usize),
    /// The first one behind the step's rows, which are this many blocks, or the last of all.
    Behind(usize),
}

/// A memory of the core that keeps one matrix from step to step.
#[derive(Clone, Copy, Debug)]
pub struct Scratch(usize);

/// A value of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Value(usize);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Type {
    /// A row of a window's block.
    Row,
    Matrix {
        dtype: DType,
        rows: usize,
        columns: usize,
    },
}

#[derive(Clone, Debug)]
struct Statement {
    results: Vec<Value>,
    op: Op,
}

#[derive(Clone, Debug)]
enum Op {
    /// Every element is the number.
    Splat(f64),
    /// The number of each column.
    Columns,
    /// The number of each row, counted anew after this many.
    Rows(usize),
    /// `counter * step + start`, or `start` alone.
    Row {
        counter: Option<(Counter, usize)>,
        start: usize,
    },
    /// A part of a window's block, from a row and a column.
    Load {
        window: usize,
        row: Value,
        column: usize,
    },
    /// A part of the result's block, from a row and a column.
    Store(Value, Value, usize),
    /// A part of what a scratch memory holds, from a row and a column.
    Kept(Scratch, Value, usize),
    /// Puts a value into a scratch memory, from a row and a column.
    Keep(Scratch, Value, Value, usize),
    /// Puts a value into a scratch memory, from a row and a column, both known when it runs.
    KeepColumns(Scratch, Value, [Value; 2]),
    /// Runs the body where the step is in this place along a dimension of the grid, or where it is not; of several dimensions
    /// the sum of the places counts.
    When {
        dims: Vec<usize>,
        place: usize,
        is: bool,
        body: Vec<Statement>,
    },
    Unary(Unary, Value),
    Binary(Binary, Value, Value),
    /// Whether the first is less than the second; both hold integers.
    Less(Value, Value),
    /// Whether both are the same float.
    Equal(Value, Value),
    Select([Value; 3]),
    Convert(Value),
    /// Over the columns.
    Reduce(Reduction, Value),
    /// Over the rows.
    ReduceRows(Reduction, Value),
    Transpose(Value),
    /// A column to a matrix of equal columns, or a row to a matrix of equal rows.
    Broadcast(Value),
    /// A part of a matrix from a row and a column: whole tiles.
    Slice(Value, [usize; 2]),
    /// Columns moved to the right by a number, those at the end to the start.
    Rotate(Value, usize),
    /// The rows of two matrices of bf16 in turn.
    Interleave([Value; 2]),
    /// The noise of stochastic rounding.
    Noise(Noise),
    /// `lhs rhs + start`, or with the rhs transposed: `f32` of floats, `s32` of `s8`.
    MatMul {
        lhs: Value,
        rhs: Value,
        transpose_rhs: bool,
        start: Value,
    },
    /// Runs the body `trips` times. `carry` are the values at the start of a run, `next` those at its end.
    Repeat {
        trips: usize,
        counter: Value,
        start: Vec<Value>,
        carry: Vec<Value>,
        body: Vec<Statement>,
        next: Vec<Value>,
    },
}

#[derive(Clone, Copy, Debug)]
enum Counter {
    /// What a [`Op::Repeat`] counts.
    Trips(Value),
    /// The step's place along a dimension of the grid.
    Steps(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unary {
    Abs,
    Exp2,
    Reciprocal,
    Rsqrt,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    Max,
    Min,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reduction {
    Sum,
    Max,
}

impl Kernel {
    /// A kernel without statements. The last window is the result's.
    pub fn new(grid: Vec<usize>, windows: Vec<Window>) -> Self {
        Kernel {
            grid,
            memory: VMEM_BYTES,
            ordered: BTreeSet::new(),
            joined: false,
            shared: false,
            single: BTreeSet::new(),
            windows,
            entries: BTreeSet::new(),
            result_entries: None,
            scratch: Vec::new(),
            types: Vec::new(),
            body: Vec::new(),
        }
    }

    /// Has Mosaic count the last two dimensions of the grid as one. Where work is done once for all steps of both, a part of
    /// the grid that is simulated then has this work for each step of the others.
    pub fn join_last_dims(&mut self) {
        self.joined = true;
    }

    /// Has the last two dimensions of the grid count blocks together, where windows have the last one as their index: cores share the
    /// first of them, and each takes the steps of the other in order.
    pub fn share_last_dims(&mut self) {
        self.shared = true;
    }

    /// Has the blocks of these windows be in the core's memory once: a step that sees another one waits until it is copied.
    pub fn buffer_once(&mut self, windows: &[usize]) {
        self.single.extend(windows);
    }

    /// Has windows of operands be of an entry of a stack each: of those that `are_stacks` says it of. The number of the entry, `s32[1]`,
    /// comes before the operands.
    pub fn read_entries(&mut self, are_stacks: &[bool]) {
        let windows = are_stacks.iter().enumerate();
        self.entries
            .extend(windows.filter(|(_, is_stack)| **is_stack).map(|(i, _)| i));
    }

    /// Has the result be the entry of that number in a stack of `count`, which comes behind the operands and whose memory the result
    /// takes.
    pub fn write_entry(&mut self, count: usize) {
        self.entries.insert(self.windows.len() - 1);
        self.result_entries = Some(count);
    }

    /// Has a window be of rows, from `first` on, of an array with `rows` in all. Whether it can: its blocks begin there.
    pub fn read_rows(&mut self, window: usize, first: usize, rows: usize) -> bool {
        let window = &mut self.windows[window];
        let is_own = window.place == Place::Own && first.is_multiple_of(window.block[0]);
        if is_own {
            window.place = Place::From(first / window.block[0]);
            window.array[1] = rows;
        }
        is_own
    }

    /// Bytes of the core's memory for blocks, in whole tiles: each twice, because one is copied while another is computed
    /// with, unless all steps see the same or it is [buffered once](Kernel::buffer_once).
    pub fn window_bytes(&self) -> usize {
        let bytes = |(i, w): (usize, &Window)| {
            let copies = match w.index == [None; 3] || self.single.contains(&i) {
                true => 1,
                false => 2,
            };
            let [rows, columns] = w.block;
            let tile_rows = 8 * 32 / w.dtype.bits();
            let numbers = rows.next_multiple_of(tile_rows) * columns.next_multiple_of(LANES);
            copies * w.dtype.bits() * numbers / 8
        };
        let windows = self.windows.iter().enumerate();
        let vectors = windows.filter(|(_, w)| w.dtype != DType::U32);
        vectors.map(bytes).sum()
    }

    /// Bytes of blocks that are copied from and to HBM: one is copied where the step before had another.
    pub fn bytes_moved(&self) -> u64 {
        let copies = |w: &Window| {
            let counted = w.index.iter().flatten().filter(|dim| self.grid[**dim] > 1);
            let steps = counted.max().map_or(0, |innermost| innermost + 1);
            self.grid[..steps].iter().product::<usize>()
        };
        let bytes = |w: &Window| copies(w) * w.block[0] * w.block[1] * w.dtype.bits() / 8;
        self.windows.iter().map(|w| bytes(w) as u64).sum()
    }

    /// Bytes of scratch memory.
    pub fn scratch_bytes(&self) -> usize {
        let bytes = |of: &Type| match of {
            Type::Row => 0,
            Type::Matrix {
                dtype,
                rows,
                columns,
            } => dtype.bits() * rows * columns.next_multiple_of(LANES) / 8,
        };
        self.scratch.iter().map(bytes).sum()
    }

    fn value(&mut self, of: Type) -> Value {
        self.types.push(of);
        Value(self.types.len() - 1)
    }

    fn push(&mut self, of: Type, op: Op) -> Value {
        let value = self.value(of);
        self.body.push(Statement {
            results: vec![value],
            op,
        });
        value
    }

    fn type_of(&self, value: Value) -> Type {
        self.types[value.0]
    }

    /// The element type of a matrix.
    fn dtype_of(&self, value: Value) -> Option<DType> {
        match self.type_of(value) {
            Type::Row => None,
            Type::Matrix { dtype, .. } => Some(dtype),
        }
    }

    /// The matrix type of `value` with another element type or number of columns.
    fn matrix(&self, value: Value, dtype: Option<DType>, columns: Option<usize>) -> Type {
        match self.type_of(value) {
            Type::Row => Type::Row,
            Type::Matrix {
                dtype: own,
                rows,
                columns: width,
            } => Type::Matrix {
                dtype: dtype.unwrap_or(own),
                rows,
                columns: columns.unwrap_or(width),
            },
        }
    }

    /// Rows and columns of a matrix.
    pub fn size(&self, value: Value) -> [usize; 2] {
        match self.type_of(value) {
            Type::Row => [1, 1],
            Type::Matrix { rows, columns, .. } => [rows, columns],
        }
    }

    /// Columns of the array that a window is of.
    pub fn window_columns(&self, window: usize) -> usize {
        self.windows[window].array[2]
    }

    pub fn splat(&mut self, dtype: DType, [rows, columns]: [usize; 2], number: f64) -> Value {
        let of = Type::Matrix {
            dtype,
            rows,
            columns,
        };
        self.push(of, Op::Splat(number))
    }

    /// A matrix of `s32` that holds the number of each column.
    pub fn columns(&mut self, [rows, columns]: [usize; 2]) -> Value {
        let of = Type::Matrix {
            dtype: DType::S32,
            rows,
            columns,
        };
        self.push(of, Op::Columns)
    }

    /// A matrix of `s32` that holds the number of each row, counted anew after every `count`.
    pub fn rows(&mut self, count: usize, [rows, columns]: [usize; 2]) -> Value {
        let of = Type::Matrix {
            dtype: DType::S32,
            rows,
            columns,
        };
        self.push(of, Op::Rows(count))
    }

    /// The row `start` of a block.
    pub fn row(&mut self, start: usize) -> Value {
        let counter = None;
        self.push(Type::Row, Op::Row { counter, start })
    }

    /// The row `counter * step + start`, where `counter` is what [`Kernel::repeat`] counts.
    pub fn row_of(&mut self, counter: Value, step: usize, start: usize) -> Value {
        let counter = Some((Counter::Trips(counter), step));
        self.push(Type::Row, Op::Row { counter, start })
    }

    /// The row `place * rows + start` of a scratch memory, where `place` is the step's along dimension `dim` of the grid,
    /// whose steps then run in order.
    pub fn row_of_step(&mut self, dim: usize, rows: usize, start: usize) -> Value {
        self.ordered.insert(dim);
        let counter = Some((Counter::Steps(dim), rows));
        self.push(Type::Row, Op::Row { counter, start })
    }

    /// `rows` rows of a window's block, from `row`; of the result's what was stored there, by this step or by one before it of
    /// the same block, if steps run in order.
    pub fn load(&mut self, window: usize, row: Value, rows: usize) -> Value {
        let columns = 0..self.windows[window].block[1];
        self.load_part(window, row, rows, columns)
    }

    /// Columns of `rows` rows of a window's block, from `row`. The first is a multiple of [`LANES`].
    pub fn load_part(
        &mut self,
        window: usize,
        row: Value,
        rows: usize,
        columns: Range<usize>,
    ) -> Value {
        let of = Type::Matrix {
            dtype: self.windows[window].dtype,
            rows,
            columns: columns.len(),
        };
        let column = columns.start;
        let op = Op::Load {
            window,
            row,
            column,
        };
        self.push(of, op)
    }

    /// Stores a part of the result's block, from a row and a column. The column is a multiple of [`LANES`].
    pub fn store(&mut self, value: Value, [row, column]: [usize; 2]) {
        let row = self.row(row);
        self.store_at(value, row, column);
    }

    /// Stores a part of the result's block, from a row that may depend on a counter.
    pub fn store_at(&mut self, value: Value, row: Value, column: usize) {
        self.body.push(Statement {
            results: Vec::new(),
            op: Op::Store(value, row, column),
        });
    }

    /// A new scratch memory for a matrix.
    pub fn scratch(&mut self, dtype: DType, [rows, columns]: [usize; 2]) -> Scratch {
        self.scratch.push(Type::Matrix {
            dtype,
            rows,
            columns,
        });
        Scratch(self.scratch.len() - 1)
    }

    /// Rows and columns of a scratch memory.
    pub fn scratch_size(&self, scratch: Scratch) -> [usize; 2] {
        match self.scratch[scratch.0] {
            Type::Row => [1, 1],
            Type::Matrix { rows, columns, .. } => [rows, columns],
        }
    }

    /// Puts a value into a scratch memory, from a row and a column.
    pub fn keep(&mut self, scratch: Scratch, value: Value, [row, column]: [usize; 2]) {
        let row = self.row(row);
        self.keep_at(scratch, value, row, column);
    }

    /// Puts a value into a scratch memory, from a row that may depend on a counter.
    pub fn keep_at(&mut self, scratch: Scratch, value: Value, row: Value, column: usize) {
        self.body.push(Statement {
            results: Vec::new(),
            op: Op::Keep(scratch, value, row, column),
        });
    }

    /// Puts a value into the columns of a scratch memory that `column` is the first of, a multiple of [`LANES`].
    pub fn keep_columns(&mut self, scratch: Scratch, value: Value, row: usize, column: Value) {
        let row = self.row(row);
        self.body.push(Statement {
            results: Vec::new(),
            op: Op::KeepColumns(scratch, value, [row, column]),
        });
    }

    /// What a scratch memory holds.
    pub fn kept(&mut self, scratch: Scratch) -> Value {
        let row = self.row(0);
        self.push(self.scratch[scratch.0], Op::Kept(scratch, row, 0))
    }

    /// A part of it, of `size` from a row and a column.
    pub fn kept_part(
        &mut self,
        scratch: Scratch,
        [row, column]: [usize; 2],
        size: [usize; 2],
    ) -> Value {
        let row = self.row(row);
        self.kept_at(scratch, row, column, size)
    }

    /// A part of it, from a row that may depend on a counter.
    pub fn kept_at(
        &mut self,
        scratch: Scratch,
        row: Value,
        column: usize,
        [rows, columns]: [usize; 2],
    ) -> Value {
        let mut of = self.scratch[scratch.0];
        if let Type::Matrix {
            rows: all_rows,
            columns: all_columns,
            ..
        } = &mut of
        {
            (*all_rows, *all_columns) = (rows, columns);
        }
        self.push(of, Op::Kept(scratch, row, column))
    }

    /// Runs `body` where the step is the first along dimension `dim` of the grid, whose steps then run in order. Values
    /// of the body are not seen outside it.
    pub fn when_first(&mut self, dim: usize, body: impl FnOnce(&mut Kernel)) {
        self.when_first_of(&[dim], body);
    }

    /// The same where the step is the first along each of `dims`.
    pub fn when_first_of(&mut self, dims: &[usize], body: impl FnOnce(&mut Kernel)) {
        self.ordered.extend(dims);
        self.run(dims, 0, true, body);
    }

    /// Runs `body` where the step is not the first along dimension `dim` of the grid.
    pub fn unless_first(&mut self, dim: usize, body: impl FnOnce(&mut Kernel)) {
        self.unless_first_of(&[dim], body);
    }

    /// The same where the step is not the first along one of `dims`.
    pub fn unless_first_of(&mut self, dims: &[usize], body: impl FnOnce(&mut Kernel)) {
        self.run(dims, 0, false, body);
    }

    /// Runs `body` where the step is in `place` along dimension `dim` of the grid. Values of the body are not seen
    /// outside it.
    pub fn when(&mut self, dim: usize, place: usize, body: impl FnOnce(&mut Kernel)) {
        self.run(&[dim], place, true, body);
    }

    fn run(&mut self, dims: &[usize], place: usize, is: bool, body: impl FnOnce(&mut Kernel)) {
        let outer = std::mem::take(&mut self.body);
        body(self);
        let body = std::mem::replace(&mut self.body, outer);
        self.body.push(Statement {
            results: Vec::new(),
            op: Op::When {
                dims: dims.to_vec(),
                place,
                is,
                body,
            },
        });
    }

    fn unary(&mut self, op: Unary, x: Value) -> Value {
        self.push(self.type_of(x), Op::Unary(op, x))
    }

    pub fn exp2(&mut self, x: Value) -> Value {
        self.unary(Unary::Exp2, x)
    }

    pub fn abs(&mut self, x: Value) -> Value {
        self.unary(Unary::Abs, x)
    }

    /// `1 / sqrt(x)`.
    pub fn rsqrt(&mut self, x: Value) -> Value {
        self.unary(Unary::Rsqrt, x)
    }

    /// `1 / x` for finite numbers other than 0: the chip's own, and one step of Newton's method, which doubles the bits
    /// that are right; 16 at least. [`Kernel::div`] takes twice as long.
    pub fn inverse(&mut self, x: Value) -> Value {
        let two = self.splat(DType::F32, self.size(x), 2.0);
        let rough = self.unary(Unary::Reciprocal, x);
        let product = self.mul(x, rough);
        let correction = self.sub(two, product);
        self.mul(rough, correction)
    }

    pub fn add(&mut self, a: Value, b: Value) -> Value {
        self.push(self.type_of(a), Op::Binary(Binary::Add, a, b))
    }

    pub fn sub(&mut self, a: Value, b: Value) -> Value {
        self.push(self.type_of(a), Op::Binary(Binary::Sub, a, b))
    }

    pub fn mul(&mut self, a: Value, b: Value) -> Value {
        self.push(self.type_of(a), Op::Binary(Binary::Mul, a, b))
    }

    pub fn div(&mut self, a: Value, b: Value) -> Value {
        self.push(self.type_of(a), Op::Binary(Binary::Div, a, b))
    }

    pub fn max(&mut self, a: Value, b: Value) -> Value {
        self.push(self.type_of(a), Op::Binary(Binary::Max, a, b))
    }

    pub fn min(&mut self, a: Value, b: Value) -> Value {
        self.push(self.type_of(a), Op::Binary(Binary::Min, a, b))
    }

    /// Whether elements of floats are equal.
    pub fn equal(&mut self, a: Value, b: Value) -> Value {
        self.push(self.matrix(a, Some(DType::Pred), None), Op::Equal(a, b))
    }

    pub fn less(&mut self, a: Value, b: Value) -> Value {
        self.push(self.matrix(a, Some(DType::Pred), None), Op::Less(a, b))
    }

    pub fn select(&mut self, condition: Value, on_true: Value, on_false: Value) -> Value {
        let of = self.type_of(on_true);
        self.push(of, Op::Select([condition, on_true, on_false]))
    }

    /// To another float type, of integers to `f32`, or of numbers from -128 to 127 to `s8`, to the nearest, to even where two are as
    /// near. A value of that type as it is, and one that was widened from it as it was.
    pub fn convert(&mut self, x: Value, dtype: DType) -> Value {
        if self.dtype_of(x) == Some(dtype) {
            return x;
        }
        if let (Some(DType::F32), Some(narrow)) = (self.dtype_of(x), self.converted_from(x))
            && self.dtype_of(narrow) == Some(dtype)
        {
            return narrow;
        }
        self.push(self.matrix(x, Some(dtype), None), Op::Convert(x))
    }

    /// What was converted to `x`, if the statements since the last loop or branch tell.
    fn converted_from(&self, x: Value) -> Option<Value> {
        let makes_it = |statement: &&Statement| statement.results == [x];
        match self.body.iter().rev().find(makes_it)?.op {
            Op::Convert(from) => Some(from),
            _ => None,
        }
    }

    /// The sum of each row, as a column.
    pub fn row_sum(&mut self, x: Value) -> Value {
        self.push(self.matrix(x, None, Some(1)), Op::Reduce(Reduction::Sum, x))
    }

    /// The largest element of each row, as a column.
    pub fn row_max(&mut self, x: Value) -> Value {
        self.push(self.matrix(x, None, Some(1)), Op::Reduce(Reduction::Max, x))
    }

    /// The sum of each column, as a row.
    pub fn column_sum(&mut self, x: Value) -> Value {
        self.reduced_rows(Reduction::Sum, x)
    }

    /// The largest element of each column, as a row.
    pub fn column_max(&mut self, x: Value) -> Value {
        self.reduced_rows(Reduction::Max, x)
    }

    fn reduced_rows(&mut self, kind: Reduction, x: Value) -> Value {
        let of = self.of_size(x, [1, self.size(x)[1]]);
        self.push(of, Op::ReduceRows(kind, x))
    }

    /// Rows as columns.
    pub fn transpose(&mut self, x: Value) -> Value {
        let [rows, columns] = self.size(x);
        let of = self.of_size(x, [columns, rows]);
        self.push(of, Op::Transpose(x))
    }

    /// The type of `x` with other numbers of rows and columns.
    fn of_size(&self, x: Value, [rows, columns]: [usize; 2]) -> Type {
        match self.type_of(x) {
            Type::Matrix { dtype, .. } => Type::Matrix {
                dtype,
                rows,
                columns,
            },
            Type::Row => Type::Row,
        }
    }

    /// A column as each of `columns` columns.
    pub fn broadcast(&mut self, x: Value, columns: usize) -> Value {
        self.push(self.matrix(x, None, Some(columns)), Op::Broadcast(x))
    }

    /// A row as each of `rows` rows.
    pub fn broadcast_row(&mut self, x: Value, rows: usize) -> Value {
        let of = self.of_size(x, [rows, self.size(x)[1]]);
        self.push(of, Op::Broadcast(x))
    }

    /// `count` columns from `first`; both are multiples of [`LANES`].
    pub fn slice(&mut self, x: Value, first: usize, count: usize) -> Value {
        self.push(self.matrix(x, None, Some(count)), Op::Slice(x, [0, first]))
    }

    /// `count` rows from `first`; both are multiples of a tile's rows.
    pub fn slice_rows(&mut self, x: Value, first: usize, count: usize) -> Value {
        let of = self.of_size(x, [count, self.size(x)[1]]);
        self.push(of, Op::Slice(x, [first, 0]))
    }

    /// Columns moved to the right by `count`, those at the end to the start.
    pub fn rotate(&mut self, x: Value, count: usize) -> Value {
        self.push(self.type_of(x), Op::Rotate(x, count))
    }

    /// The rows of two matrices of bf16 in turn: the first of `even`, the first of `odd`, and so on.
    pub fn interleave(&mut self, even: Value, odd: Value) -> Value {
        let [rows, columns] = self.size(even);
        let of = Type::Matrix {
            dtype: DType::BF16,
            rows: 2 * rows,
            columns,
        };
        self.push(of, Op::Interleave([even, odd]))
    }

    /// `lhs rhs^T + start`.
    pub fn matmul_transposed(&mut self, lhs: Value, rhs: Value, start: Value) -> Value {
        self.product(lhs, rhs, true, start)
    }

    /// `lhs rhs + start`.
    pub fn matmul(&mut self, lhs: Value, rhs: Value, start: Value) -> Value {
        self.product(lhs, rhs, false, start)
    }

    fn product(&mut self, lhs: Value, rhs: Value, transpose_rhs: bool, start: Value) -> Value {
        let op = Op::MatMul {
            lhs,
            rhs,
            transpose_rhs,
            start,
        };
        self.push(self.type_of(start), op)
    }

    /// Runs `body` `trips` times: it takes the counter and the carried values, and gives the next ones.
    pub fn repeat(
        &mut self,
        trips: usize,
        start: Vec<Value>,
        body: impl FnOnce(&mut Kernel, Value, &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let types: Vec<Type> = start.iter().map(|v| self.type_of(*v)).collect();
        let counter = self.value(Type::Row);
        let carry: Vec<Value> = types.iter().map(|of| self.value(*of)).collect();
        let outer = std::mem::take(&mut self.body);
        let next = body(self, counter, &carry);
        let inner = std::mem::replace(&mut self.body, outer);
        let results: Vec<Value> = types.iter().map(|of| self.value(*of)).collect();
        self.body.push(Statement {
            results: results.clone(),
            op: Op::Repeat {
                trips,
                counter,
                start,
                carry,
                body: inner,
                next,
            },
        });
        results
    }
}
