//! The kernel of a group: its graph, operation by operation, on a few rows at once.
//!
//! Sizes of a kernel's values are powers of two, so a row is computed in pieces whose widths are those that make up its size:
//! 1,280 columns are 1,024 and 256. Floats are computed in `f32`. Where the graph rounds to bf16, values of each row are rounded, and
//! elements of rows only where they are stored; XLA's compiler leaves out such roundings too.

use std::collections::HashMap;

use crate::dtype::DType;
use crate::graph::{self, Comparison, Graph, Node, Op};
use crate::host_tensor::HostTensor;

use super::super::triton::{Binary, Kernel, Unary, Value};

/// The least piece of a row; each thread of a warp holds two of its elements.
const LEAST_PIECE: usize = 64;
/// The most pieces of a row.
const MOST_PIECES: usize = 4;
/// The widest rows, which the registers of one program hold.
const WIDEST_ROW: usize = 16_384;
/// Elements of a program's rows up to which there are more rows. Of 2,048 rows of 1,280 columns on an H200, a kernel that
/// normalizes and rounds to int8 took 7.3 us with four rows a program, and 7.8 with two.
const ELEMENTS: usize = 5_120;
/// The most rows of a program.
const MOST_ROWS: usize = 4;
/// Elements of a program from which on it has [`MOST_WARPS`] in place of [`WARPS`].
const MANY_ELEMENTS: usize = 8_192;
const WARPS: usize = 4;
const MOST_WARPS: usize = 8;

/// A part of the columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Piece {
    pub first: usize,
    pub width: usize,
}

/// The pieces of rows of so many columns; `None` where kernels do not take them.
pub(super) fn pieces(columns: usize) -> Option<Vec<Piece>> {
    let fits = columns.is_multiple_of(LEAST_PIECE)
        && (1..=MOST_PIECES).contains(&(columns.count_ones() as usize))
        && columns <= WIDEST_ROW;
    let mut pieces: Vec<Piece> = Vec::new();
    for bit in (0..usize::BITS).rev().map(|bit| 1 << bit) {
        if columns & bit != 0 {
            let first = pieces.last().map_or(0, |last| last.first + last.width);
            pieces.push(Piece { first, width: bit });
        }
    }
    fits.then_some(pieces)
}

/// In how many first dimensions rows agree that read the same of an array of the sizes `source`, spread along the dimensions `along` of
/// one of the sizes `result`; `None` where the array is none of whole rows, or each row reads its own.
pub(super) fn shared_by(along: &[usize], source: &[usize], result: &[usize]) -> Option<usize> {
    let ((last, leading), columns) = (along.split_last()?, source.last()?);
    let is_whole = last + 1 == result.len() && result.last() == Some(columns);
    let is_first = leading.iter().copied().eq(0..leading.len());
    let agree = leading
        .iter()
        .take_while(|d| source[**d] == result[**d])
        .count();
    let spread = source[agree..leading.len()].iter().all(|size| *size == 1);
    (is_whole && is_first && spread && agree < *last).then_some(agree)
}

/// Whether kernels load arrays of this type, and compute in it.
pub(super) fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16)
}

/// Whether kernels store arrays of this type.
pub(super) fn is_stored(dtype: DType) -> bool {
    matches!(
        dtype,
        DType::F32 | DType::BF16 | DType::S8 | DType::F8E4M3Fn | DType::F8E5M2
    )
}

/// Whether kernels compute this function.
pub(super) fn has_unary(kind: graph::Unary) -> bool {
    matches!(kind, graph::Unary::Erf | graph::Unary::Neg) || Unary::of(kind).is_some()
}

/// The sizes of rows in a graph: those of a reduction's results.
fn rows_of(body: &Graph) -> Vec<usize> {
    let mut nodes = body.nodes.iter();
    let reduction = nodes.find(|node| matches!(node.op, Op::Reduce { .. }));
    reduction.map_or_else(Vec::new, |node| node.shape.dims.clone())
}

/// The kernel of a group's graph; `None` if an operation is none of a kernel's, or places in its arrays are more than 32 bits count.
pub(super) fn kernel(body: &Graph) -> Option<Kernel> {
    let rows = rows_of(body);
    let widest = body
        .nodes
        .iter()
        .filter(|node| node.shape.rank() == rows.len() + 1);
    let widest = widest.filter_map(|node| node.shape.dims.last()).max();
    let widest = widest.copied().unwrap_or(1);
    let count: usize = rows.iter().product();
    i32::try_from(count.checked_mul(widest)?).ok()?;
    let mut share = MOST_ROWS;
    // Rows of a program are of one entry of what is the same for some of the rows.
    let entry = rows.last().copied().unwrap_or(1);
    while share > 1 && (share * widest > ELEMENTS || !entry.is_multiple_of(share)) {
        share /= 2;
    }
    let warps = match share * widest < MANY_ELEMENTS {
        true => WARPS,
        false => MOST_WARPS,
    };
    let inputs = body.inputs.iter().map(|input| input.shape.dtype);
    let outputs = body.outputs.iter();
    let outputs = outputs.map(|output| body.nodes[output.node as usize].shape.dtype);
    let mut kernel = Kernel::new(count / share, warps, inputs.chain(outputs).collect());
    let program = kernel.program();
    let rows_a_program = kernel.number(share as f64, DType::S32, &[]);
    let first = kernel.binary(Binary::Mul, program, rows_a_program);
    let spread = kernel.spread(first, &[share]);
    let counted = kernel.count(0, share);
    let numbers = kernel.binary(Binary::Add, spread, counted);
    let mut emitter = Emitter {
        body,
        rows,
        share,
        first,
        numbers,
        kernel,
        known: HashMap::new(),
    };
    for (number, output) in body.outputs.iter().enumerate() {
        emitter.store(body.inputs.len() + number, output.node as usize)?;
    }
    Some(emitter.kernel)
}

struct Emitter<'a> {
    body: &'a Graph,
    rows: Vec<usize>,
    /// Rows of a program.
    share: usize,
    /// The number of a program's first row, and of all of them.
    first: Value,
    numbers: Value,
    kernel: Kernel,
    known: HashMap<(usize, Option<Piece>), Value>,
}

impl<'a> Emitter<'a> {
    fn node(&self, i: usize) -> &'a Node {
        &self.body.nodes[i]
    }

    fn columns(&self, i: usize) -> usize {
        self.node(i).shape.dims.last().copied().unwrap_or(1)
    }

    fn is_matrix(&self, i: usize) -> bool {
        self.node(i).shape.rank() > self.rows.len()
    }

    /// The pieces in which node `i` is computed: one with no columns for a value of each row.
    fn pieces(&self, i: usize) -> Option<Vec<Option<Piece>>> {
        match self.is_matrix(i) {
            true => Some(pieces(self.columns(i))?.into_iter().map(Some).collect()),
            false => Some(vec![None]),
        }
    }

    fn store(&mut self, argument: usize, i: usize) -> Option<()> {
        for piece in self.pieces(i)? {
            let value = self.value(i, piece)?;
            let value = self.kernel.convert(value, self.node(i).shape.dtype);
            let places = self.places(piece, self.columns(i));
            self.kernel.store(argument, places, value);
        }
        Some(())
    }

    /// The places of the program's rows, in a piece of an array of so many columns or in one with a value for each row.
    fn places(&mut self, piece: Option<Piece>, columns: usize) -> Value {
        let Some(piece) = piece else {
            return self.numbers;
        };
        let width = self
            .kernel
            .number(columns as f64, DType::S32, &[self.share]);
        let starts = self.kernel.binary(Binary::Mul, self.numbers, width);
        let starts = self.kernel.of_rows(starts, piece.width);
        let within = self.kernel.count(piece.first, piece.width);
        let within = self.kernel.of_columns(within, self.share);
        self.kernel.binary(Binary::Add, starts, within)
    }

    /// Node `i` of the program's rows: a predicate or `f32`.
    fn value(&mut self, i: usize, piece: Option<Piece>) -> Option<Value> {
        if let Some(known) = self.known.get(&(i, piece)) {
            return Some(*known);
        }
        let value = self.computed(i, piece)?;
        let value = match self.node(i).shape.dtype {
            // What is stored of it, such as a scale, is what the kernel goes on with.
            DType::BF16 if piece.is_none() => self.rounded(value),
            _ => value,
        };
        self.known.insert((i, piece), value);
        Some(value)
    }

    fn rounded(&mut self, value: Value) -> Value {
        let narrow = self.kernel.convert(value, DType::BF16);
        self.kernel.convert(narrow, DType::F32)
    }

    fn computed(&mut self, i: usize, piece: Option<Piece>) -> Option<Value> {
        let node = self.node(i);
        let operand = |at: usize| node.operands[at] as usize;
        let width = piece.map(|piece| piece.width);
        let dims: Vec<usize> = [Some(self.share), width].into_iter().flatten().collect();
        Some(match &node.op {
            Op::Parameter(input) => {
                let places = self.places(piece, self.columns(i));
                self.load(*input, places)
            }
            Op::Constant(constant) => self.constant(constant, &dims)?,
            Op::BroadcastInDim { dims: along, .. } => match (&self.node(operand(0)).op, piece) {
                (Op::Constant(constant), _) => self.constant(constant, &dims)?,
                (_, Some(piece)) if along.contains(&self.rows.len()) => {
                    let source = &self.node(operand(0)).shape.dims;
                    let leading = shared_by(along, source, &node.shape.dims)?;
                    self.shared(operand(0), leading, piece)?
                }
                (_, Some(piece)) => {
                    let of_rows = self.value(operand(0), None)?;
                    self.kernel.of_rows(of_rows, piece.width)
                }
                (_, None) => return None,
            },
            Op::Unary(kind) => {
                let [x] = self.operands(node, piece)?;
                match kind {
                    graph::Unary::Erf => self.erf(x),
                    graph::Unary::Neg => self.kernel.negated(x),
                    _ => self.kernel.unary(Unary::of(*kind)?, x),
                }
            }
            Op::Binary(kind) => {
                let [x, y] = self.operands(node, piece)?;
                self.kernel.binary(Binary::of(*kind)?, x, y)
            }
            Op::Compare(kind) => {
                let [x, y] = self.operands(node, piece)?;
                self.kernel.compare(*kind, x, y)
            }
            Op::Select => {
                let [predicate, yes, no] = self.operands(node, piece)?;
                self.kernel.select(predicate, yes, no)
            }
            Op::Clamp => {
                let [lowest, x, highest] = self.operands(node, piece)?;
                let x = self.kernel.binary(Binary::Max, x, lowest);
                self.kernel.binary(Binary::Min, x, highest)
            }
            Op::Slice { start, .. } => {
                let first = start.last()?;
                let piece = piece.map(|piece| Piece {
                    first: first + piece.first,
                    ..piece
                });
                self.value(operand(0), piece)?
            }
            Op::Reduce { kind, .. } => {
                let kind = Binary::of_reduction(*kind)?;
                let mut combined = None;
                for piece in self.pieces(operand(0))? {
                    let part = self.value(operand(0), piece)?;
                    let part = self.kernel.reduce(kind, part);
                    combined = Some(match combined {
                        Some(before) => self.kernel.binary(kind, before, part),
                        None => part,
                    });
                }
                combined?
            }
            // Rounded by the caller, or where it is stored.
            Op::Convert(_) => self.value(operand(0), piece)?,
            _ => return None,
        })
    }

    /// The operands of a node, in the same piece.
    fn operands<const N: usize>(
        &mut self,
        node: &Node,
        piece: Option<Piece>,
    ) -> Option<[Value; N]> {
        let operands = node.operands.iter();
        let values = operands.map(|operand| self.value(*operand as usize, piece));
        values.collect::<Option<Vec<Value>>>()?.try_into().ok()
    }

    /// The error function to within 1.5e-7: formula 7.1.26 of Abramowitz and Stegun, "Handbook of Mathematical Functions" (1964).
    /// CUDA's own function branches for each element: a gate's kernel had 1,881 lines of PTX with that, and 1,392 with this one.
    fn erf(&mut self, x: Value) -> Value {
        const FACTOR: f64 = 0.327_591_1;
        const COEFFICIENTS: [f64; 5] = [
            1.061_405_429,
            -1.453_152_027,
            1.421_413_741,
            -0.284_496_736,
            0.254_829_592,
        ];
        let dims = self.kernel.dims(x);
        let kernel = &mut self.kernel;
        let number = |kernel: &mut Kernel, number| kernel.number(number, DType::F32, &dims);
        let one = number(kernel, 1.0);
        let zero = number(kernel, 0.0);
        let size = kernel.unary(Unary::Abs, x);
        let factor = number(kernel, FACTOR);
        let scaled = kernel.binary(Binary::Mul, size, factor);
        let divisor = kernel.binary(Binary::Add, scaled, one);
        let t = kernel.binary(Binary::DivNearly, one, divisor);
        let [first, rest @ ..] = COEFFICIENTS;
        let mut sum = number(kernel, first);
        for coefficient in rest {
            let coefficient = number(kernel, coefficient);
            let before = kernel.binary(Binary::Mul, sum, t);
            sum = kernel.binary(Binary::Add, before, coefficient);
        }
        let sum = kernel.binary(Binary::Mul, sum, t);
        let square = kernel.binary(Binary::Mul, x, x);
        let square = kernel.negated(square);
        let power = kernel.unary(Unary::Exp, square);
        let rest = kernel.binary(Binary::Mul, sum, power);
        let positive = kernel.binary(Binary::Sub, one, rest);
        let negative = kernel.negated(positive);
        let is_negative = kernel.compare(Comparison::Lt, x, zero);
        kernel.select(is_negative, negative, positive)
    }

    fn constant(&mut self, constant: &HostTensor, dims: &[usize]) -> Option<Value> {
        let number = constant.to_f64_vec().ok()?.first().copied()?;
        Some(self.kernel.number(number, DType::F32, dims))
    }

    /// The elements at `places` of an input.
    fn load(&mut self, input: usize, places: Value) -> Value {
        let loaded = self.kernel.load(input, places);
        self.kernel.convert(loaded, DType::F32)
    }

    /// A piece of node `i`, an input, one in a wider type or one number, that is the same for all rows that agree in their first `leading`
    /// dimensions, in all rows of the program.
    fn shared(&mut self, i: usize, leading: usize, piece: Piece) -> Option<Value> {
        let node = self.node(i);
        let input = match node.op {
            Op::Parameter(input) => input,
            Op::Convert(_) => return self.shared(node.operands[0] as usize, leading, piece),
            Op::BroadcastInDim { .. } => {
                let Op::Constant(constant) = &self.node(node.operands[0] as usize).op else {
                    return None;
                };
                let dims = [self.share, piece.width];
                return self.constant(constant, &dims);
            }
            _ => return None,
        };
        let mut places = self.kernel.count(piece.first, piece.width);
        if leading > 0 {
            let rows: usize = self.rows[leading..].iter().product();
            let rows = self.kernel.number(rows as f64, DType::S32, &[]);
            let entry = self.kernel.binary(Binary::Div, self.first, rows);
            let width = self.kernel.number(self.columns(i) as f64, DType::S32, &[]);
            let start = self.kernel.binary(Binary::Mul, entry, width);
            let start = self.kernel.spread(start, &[piece.width]);
            places = self.kernel.binary(Binary::Add, places, start);
        }
        // A vector lies in other threads than the rows, and goes to them by way of shared memory, for which the threads wait. Loaded
        // as a matrix it lies as the rows do, once for each: on an H200 a gate of 2,048 rows of one row a program then takes 25.7 us
        // for 31.2, but a sum and norm of four rows a program 8.2 for 7.2.
        Some(match self.share {
            1 => {
                let places = self.kernel.of_columns(places, 1);
                self.load(input, places)
            }
            share => {
                let vector = self.load(input, places);
                self.kernel.of_columns(vector, share)
            }
        })
    }
}
