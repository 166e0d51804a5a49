//! Queries and keys `bf16[batch, positions, heads * 128]` before their attention: RMS norms and rotary positions. The
//! compiler shifts features by slices and concatenations, each of which it writes: FLUX.1's take five times as long as
//! reading and writing the heads once.

use crate::dtype::DType;
use crate::graph::{Batch, InferError};
use crate::shape::Shape;

use super::call::{KernelCall, refused};
use super::channels::{TILE, block_rows, each_tile, image};
use super::mosaic::{Kernel, LANES, Place, Value as KernelValue, Window};

/// Windows as large as the heads: read, written, and as much again for tables.
const WINDOWS: usize = 3;

/// What is computed of heads of 128 features. The result is of the shape of the heads, the first operand.
///
/// A kernel that does both takes five times as long as two: its values do not fit the registers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Heads {
    /// Division by each head's root mean square, times a weight, the second operand `f32[1, 1, 128]`.
    RmsNorm {
        /// What is added to the mean square.
        epsilon: f64,
    },
    /// [`crate::graph::Composite::Rotary`] with its tables, the other operands, each `f32[1, positions, 128]`.
    Rotary,
}

impl Heads {
    /// Whether positions make whole tiles of which a core can hold some.
    pub fn fits(self, positions: usize, heads: usize) -> bool {
        heads > 0 && block_rows([positions, heads * LANES], WINDOWS).is_some()
    }

    /// The windows of the operands behind the heads, whose blocks have `block` of all `positions`.
    fn others(self, positions: usize, block: usize) -> Vec<Window> {
        let row = Window {
            dtype: DType::F32,
            array: [1, 1, LANES],
            block: [1, LANES],
            index: [None; 3],
            place: Place::Own,
            first_column: 0,
        };
        let table = Window {
            array: [1, positions, LANES],
            block: [block, LANES],
            index: [None, Some(1), None],
            ..row
        };
        match self {
            Heads::RmsNorm { .. } => vec![row],
            Heads::Rotary => vec![table; 3],
        }
    }

    fn sizes(self, operands: &[&Shape]) -> Option<[usize; 3]> {
        let (x, others) = operands.split_first()?;
        let sizes: [usize; 3] = x.dims[..].try_into().ok()?;
        let [_, positions, columns] = sizes;
        let is_whole = x.dtype == DType::BF16
            && columns.is_multiple_of(LANES)
            && self.fits(positions, columns / LANES);
        let expected = self.others(positions, positions);
        let expected = expected
            .iter()
            .map(|window| Shape::new(window.dtype, window.array));
        let is_same = expected.eq(others.iter().map(|shape| (*shape).clone()));
        (is_whole && is_same).then_some(sizes)
    }

    fn kernel(self, sizes: [usize; 3]) -> Option<Kernel> {
        let [batch, positions, columns] = sizes;
        let block = block_rows([positions, columns], WINDOWS)?;
        let mut windows = vec![image(sizes, block)];
        windows.extend(self.others(positions, block));
        windows.push(image(sizes, block));
        let mut kernel = Kernel::new(vec![batch, positions / block], windows);
        let k = &mut kernel;
        for first in (0..columns).step_by(LANES) {
            let head = first..first + LANES;
            each_tile(k, block, &head, Vec::new(), |k, _, x, row| {
                let y = match self {
                    Heads::RmsNorm { epsilon } => normed(k, x, epsilon),
                    Heads::Rotary => rotated(k, x, row),
                };
                let y = k.convert(y, DType::BF16);
                k.store_at(y, row, first);
                Vec::new()
            });
        }
        Some(kernel)
    }
}

/// The rows of `x` divided by their root mean square, times the weight in the second window.
fn normed(k: &mut Kernel, x: KernelValue, epsilon: f64) -> KernelValue {
    let [rows, columns] = k.size(x);
    let square = k.mul(x, x);
    let sum = k.row_sum(square);
    let share = k.splat(DType::F32, [rows, 1], 1.0 / columns as f64);
    let mean = k.mul(sum, share);
    let epsilon = k.splat(DType::F32, [rows, 1], epsilon);
    let mean = k.add(mean, epsilon);
    let inverse = k.rsqrt(mean);
    let inverse = k.broadcast(inverse, columns);
    let y = k.mul(x, inverse);
    let row = k.row(0);
    let weight = k.load_part(1, row, 1, 0..columns);
    let weight = k.broadcast_row(weight, rows);
    k.mul(y, weight)
}

/// The rows of `x`, from `row` on, rotated by the tables in the windows from the second on.
fn rotated(k: &mut Kernel, x: KernelValue, row: KernelValue) -> KernelValue {
    let next = k.rotate(x, LANES - 1);
    let previous = k.rotate(x, 1);
    let terms = [x, next, previous].into_iter().enumerate();
    let terms: Vec<KernelValue> = terms
        .map(|(table, value)| {
            let table = k.load_part(1 + table, row, TILE, 0..LANES);
            k.mul(value, table)
        })
        .collect();
    let sum = k.add(terms[0], terms[1]);
    k.add(sum, terms[2])
}

impl KernelCall for Heads {
    fn name(&self) -> &'static str {
        match self {
            Heads::RmsNorm { .. } => "rms_norm",
            Heads::Rotary => "rotary",
        }
    }

    fn batch(&self, operands: &[&Shape]) -> Option<Batch> {
        let mut batch = Batch::first(operands.len());
        // Weight and tables are the same for every entry.
        batch.operands[1..].fill(None);
        Some(batch)
    }

    fn kernel_of(&self, operands: &[&Shape]) -> Option<Kernel> {
        self.sizes(operands).and_then(|sizes| self.kernel(sizes))
    }

    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        match self.sizes(operands) {
            Some(sizes) => Ok(Shape::new(DType::BF16, sizes)),
            None => Err(refused(self.name(), self, operands)),
        }
    }
}
