//! Triton kernels: a small language that is printed as the MLIR text that XLA's GPU compiler takes ([`text`]), and evaluated on
//! the host ([`eval`]).
//!
//! A kernel runs once for each of its programs, which differ in their number. Values are scalars, vectors and matrices whose sizes
//! are powers of two, as Triton wants them. Arrays lie in memory row by row; what is loaded of them and stored to them is
//! addressed by elements.

mod eval;
mod text;

use crate::dtype::DType;
use crate::graph::{self, Comparison};

pub use eval::evaluated;

/// A kernel, whose results are the arguments that it stores to.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// How many programs run.
    pub programs: usize,
    /// Warps of 32 threads that run a program.
    pub warps: usize,
    /// The element type of each array: of the operands, then of the results.
    arguments: Vec<DType>,
    types: Vec<Type>,
    body: Vec<Statement>,
}

/// Number of a value of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Value(usize);

/// `Pred`, `S32`, `F32` or the element type of an array; no dimension is that of a scalar.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Type {
    dtype: DType,
    dims: Vec<usize>,
}

/// Functions of floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unary {
    Abs,
    Exp,
    RoundNearestEven,
    Rsqrt,
    Sqrt,
    Tanh,
}

impl Unary {
    /// The graph's operation as one of a kernel, if kernels have it.
    pub fn of(kind: graph::Unary) -> Option<Unary> {
        Some(match kind {
            graph::Unary::Abs => Unary::Abs,
            graph::Unary::Exp => Unary::Exp,
            graph::Unary::RoundNearestEven => Unary::RoundNearestEven,
            graph::Unary::Rsqrt => Unary::Rsqrt,
            graph::Unary::Sqrt => Unary::Sqrt,
            graph::Unary::Tanh => Unary::Tanh,
            graph::Unary::Ceil
            | graph::Unary::Cos
            | graph::Unary::Erf
            | graph::Unary::Floor
            | graph::Unary::IsFinite
            | graph::Unary::Log
            | graph::Unary::Logistic
            | graph::Unary::Neg
            | graph::Unary::Not
            | graph::Unary::Sign
            | graph::Unary::Sin => return None,
        })
    }
}

/// Operations of two numbers of one type; integers are added and multiplied alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binary {
    Add,
    Div,
    /// A quotient of floats to within two units in the last place, in fewer operations.
    DivNearly,
    Max,
    Min,
    Mul,
    Sub,
}

impl Binary {
    /// The graph's operation as one of a kernel, if kernels have it.
    pub fn of(kind: graph::Binary) -> Option<Binary> {
        Some(match kind {
            graph::Binary::Add => Binary::Add,
            graph::Binary::Div => Binary::Div,
            graph::Binary::Max => Binary::Max,
            graph::Binary::Min => Binary::Min,
            graph::Binary::Mul => Binary::Mul,
            graph::Binary::Sub => Binary::Sub,
            graph::Binary::And
            | graph::Binary::Or
            | graph::Binary::Pow
            | graph::Binary::Rem
            | graph::Binary::ShiftLeft
            | graph::Binary::ShiftRightLogical
            | graph::Binary::Xor => return None,
        })
    }

    /// The operation that combines the values of a reduction, if kernels have it.
    pub fn of_reduction(kind: graph::Reduction) -> Option<Binary> {
        Some(match kind {
            graph::Reduction::Sum => Binary::Add,
            graph::Reduction::Max => Binary::Max,
            graph::Reduction::Min => Binary::Min,
            graph::Reduction::And | graph::Reduction::Or => return None,
        })
    }
}

/// An operation, and the number of its result if it has one.
#[derive(Clone, Debug)]
struct Statement {
    op: Op,
    result: Option<Value>,
}

#[derive(Clone, Debug)]
enum Op {
    /// The same number everywhere.
    Number(f64),
    /// The program's number.
    Program,
    /// `0, 1, 2` and so on.
    Count,
    /// A scalar everywhere.
    Spread(Value),
    /// A vector along the rows of a matrix: each value is that of one row.
    OfRows(Value),
    /// A vector along the columns of a matrix: each value is that of one column.
    OfColumns(Value),
    Unary(Unary, Value),
    Binary(Binary, [Value; 2]),
    Compare(Comparison, [Value; 2]),
    /// Predicate, value where true, value where false.
    Select([Value; 3]),
    Convert(Value),
    /// The columns of a matrix, combined.
    Reduce(Binary, Value),
    /// The elements at these places of an argument.
    Load {
        argument: usize,
        places: Value,
    },
    Store {
        argument: usize,
        places: Value,
        value: Value,
    },
}

/// The numbers that a kernel computes with: `f32`, `s32` and predicates.
impl Kernel {
    /// A kernel that does nothing yet.
    pub fn new(programs: usize, warps: usize, arguments: Vec<DType>) -> Kernel {
        Kernel {
            programs,
            warps,
            arguments,
            types: Vec::new(),
            body: Vec::new(),
        }
    }

    fn add(&mut self, op: Op, dtype: DType, dims: &[usize]) -> Value {
        let value = Value(self.types.len());
        self.types.push(Type {
            dtype,
            dims: dims.to_vec(),
        });
        self.body.push(Statement {
            op,
            result: Some(value),
        });
        value
    }

    fn of(&self, value: Value) -> &Type {
        &self.types[value.0]
    }

    /// The sizes of a value; none is a scalar's.
    pub fn dims(&self, value: Value) -> Vec<usize> {
        self.of(value).dims.clone()
    }

    pub fn dtype(&self, value: Value) -> DType {
        self.of(value).dtype
    }

    pub fn number(&mut self, number: f64, dtype: DType, dims: &[usize]) -> Value {
        self.add(Op::Number(number), dtype, dims)
    }

    pub fn program(&mut self) -> Value {
        self.add(Op::Program, DType::S32, &[])
    }

    /// The first `count` integers from `first` on.
    pub fn count(&mut self, first: usize, count: usize) -> Value {
        let counted = self.add(Op::Count, DType::S32, &[count]);
        match first {
            0 => counted,
            _ => {
                let first = self.number(first as f64, DType::S32, &[count]);
                self.binary(Binary::Add, counted, first)
            }
        }
    }

    pub fn spread(&mut self, scalar: Value, dims: &[usize]) -> Value {
        self.add(Op::Spread(scalar), self.dtype(scalar), dims)
    }

    /// A matrix of `columns` columns with a value for each row.
    pub fn of_rows(&mut self, vector: Value, columns: usize) -> Value {
        let rows = self.of(vector).dims[0];
        self.add(Op::OfRows(vector), self.dtype(vector), &[rows, columns])
    }

    /// A matrix of `rows` rows with a value for each column.
    pub fn of_columns(&mut self, vector: Value, rows: usize) -> Value {
        let columns = self.of(vector).dims[0];
        self.add(Op::OfColumns(vector), self.dtype(vector), &[rows, columns])
    }

    pub fn unary(&mut self, kind: Unary, x: Value) -> Value {
        self.add(Op::Unary(kind, x), self.dtype(x), &self.dims(x))
    }

    /// Triton's lowering has no operation for it.
    pub fn negated(&mut self, x: Value) -> Value {
        let zero = self.number(-0.0, self.dtype(x), &self.dims(x));
        self.binary(Binary::Sub, zero, x)
    }

    pub fn binary(&mut self, kind: Binary, x: Value, y: Value) -> Value {
        self.add(Op::Binary(kind, [x, y]), self.dtype(x), &self.dims(x))
    }

    pub fn compare(&mut self, kind: Comparison, x: Value, y: Value) -> Value {
        self.add(Op::Compare(kind, [x, y]), DType::Pred, &self.dims(x))
    }

    pub fn select(&mut self, predicate: Value, yes: Value, no: Value) -> Value {
        let op = Op::Select([predicate, yes, no]);
        self.add(op, self.dtype(yes), &self.dims(yes))
    }

    /// The value in another type; the same value where it has that type.
    pub fn convert(&mut self, x: Value, dtype: DType) -> Value {
        match self.dtype(x) == dtype {
            true => x,
            false => self.add(Op::Convert(x), dtype, &self.dims(x)),
        }
    }

    /// A value for each row of a matrix.
    pub fn reduce(&mut self, kind: Binary, x: Value) -> Value {
        let rows = self.of(x).dims[0];
        self.add(Op::Reduce(kind, x), self.dtype(x), &[rows])
    }

    pub fn load(&mut self, argument: usize, places: Value) -> Value {
        let op = Op::Load { argument, places };
        self.add(op, self.arguments[argument], &self.dims(places))
    }

    /// Stores a value of the argument's type.
    pub fn store(&mut self, argument: usize, places: Value, value: Value) {
        self.body.push(Statement {
            op: Op::Store {
                argument,
                places,
                value,
            },
            result: None,
        });
    }
}
