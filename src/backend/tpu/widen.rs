//! Stored weights in bf16, for convolutions whose kernel does not widen them inside: inputs or groups make no whole tiles of
//! integers, or nothing fits the core's memory. The compiler takes four times as long over what it widens, and moves it to a kernel's layout after
//! that: for 3x3 kernels of 640 channels with scales of 64 of them 126,000 cycles on v5e, where reading and writing takes 18,000.

use crate::dtype::DType;
use crate::graph::{InferError, constraint};
use crate::shape::Shape;

use super::arithmetic::block_of_columns;
use super::call::KernelCall;
use super::mosaic::{Kernel, LANES, Place, VMEM_BYTES, Window};

/// Terms that are widened at a time: what is between fits the registers.
const MOST_TERMS: usize = 512;

/// Integers `[1, rows, terms]` of this type as `bf16`. If `scaled`, each is multiplied with the scale of its group first, and
/// rounded once: the operands after the integers are `bf16[1, rows, 128]`, the scales of a row, and `bf16[1, 128, terms]`, which
/// has a one for each term in the row of its group, and zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Widen {
    pub element: DType,
    pub scaled: bool,
}

impl Widen {
    /// Whether so many rows and terms are whole tiles, and fit the core's memory.
    pub fn fits(self, rows: usize, terms: usize) -> bool {
        self.rows(rows, terms).is_some()
    }

    /// Rows of a block.
    fn rows(self, rows: usize, terms: usize) -> Option<usize> {
        let tile = 8 * 32 / self.element.bits().max(1);
        let is_known = [DType::S8, DType::S4].contains(&self.element)
            && terms > 0
            && terms.is_multiple_of(LANES);
        let sizes = [256, 128, 64, 32].into_iter();
        let mut sizes = sizes.filter(|size| {
            let windows = Kernel::new(Vec::new(), self.windows(*size, [rows, terms]));
            size.is_multiple_of(tile)
                && rows.is_multiple_of(*size)
                && windows.window_bytes() <= VMEM_BYTES / 2
        });
        sizes.next().filter(|_| is_known && rows > 0)
    }

    fn windows(self, block: usize, [rows, terms]: [usize; 2]) -> Vec<Window> {
        let of_rows = |dtype: DType, columns: usize| Window {
            dtype,
            array: [1, rows, columns],
            block: [block, columns],
            index: [None, Some(0), None],
            place: Place::Own,
            first_column: 0,
        };
        let mut windows = vec![of_rows(self.element, terms)];
        if self.scaled {
            windows.push(of_rows(DType::BF16, LANES));
            windows.push(Window {
                array: [1, LANES, terms],
                block: [LANES, terms],
                index: [None; 3],
                ..of_rows(DType::BF16, terms)
            });
        }
        windows.push(of_rows(DType::BF16, terms));
        windows
    }

    fn kernel(self, block: usize, [rows, terms]: [usize; 2]) -> Kernel {
        let windows = self.windows(block, [rows, terms]);
        let mut k = Kernel::new(vec![rows / block], windows);
        let width = block_of_columns(terms, MOST_TERMS).unwrap_or(terms);
        let tile = 64.min(block);
        for row in (0..block).step_by(tile) {
            for at in (0..terms).step_by(width) {
                let first = k.row(row);
                let integers = k.load_part(0, first, tile, at..at + width);
                let mut values = k.convert(integers, DType::F32);
                if self.scaled {
                    let scales = k.load(1, first, tile);
                    let groups = k.row(0);
                    let groups = k.load_part(2, groups, LANES, at..at + width);
                    // Each sum has one term.
                    let zero = k.splat(DType::F32, [tile, width], 0.0);
                    let scale = k.matmul(scales, groups, zero);
                    values = k.mul(values, scale);
                }
                let values = k.convert(values, DType::BF16);
                k.store(values, [row, at]);
            }
        }
        k
    }

    /// Rows and terms.
    fn sizes(self, operands: &[&Shape]) -> Option<[usize; 2]> {
        let of = |rows: usize, columns: usize| Shape::new(DType::BF16, [1, rows, columns]);
        let integers = operands.first()?;
        let &[1, rows, terms] = &integers.dims[..] else {
            return None;
        };
        let expected = match self.scaled {
            true => vec![of(rows, LANES), of(LANES, terms)],
            false => Vec::new(),
        };
        let fits = integers.dtype == self.element
            && expected.iter().eq(operands[1..].iter().copied())
            && self.fits(rows, terms);
        fits.then_some([rows, terms])
    }
}

impl KernelCall for Widen {
    fn name(&self) -> &'static str {
        "widen_stored"
    }

    fn kernel_of(&self, operands: &[&Shape]) -> Option<Kernel> {
        let [rows, terms] = self.sizes(operands)?;
        Some(self.kernel(self.rows(rows, terms)?, [rows, terms]))
    }

    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let Some([rows, terms]) = self.sizes(operands) else {
            let found: Vec<String> = operands.iter().map(ToString::to_string).collect();
            return Err(constraint(
                "widening kernel",
                format!(
                    "takes {}[1, rows, terms] of whole tiles, with scales bf16[1, rows, {LANES}] and bf16[1, {LANES}, terms] \
                     beside it, not {}",
                    self.element,
                    found.join(", ")
                ),
            ));
        };
        Ok(Shape::new(DType::BF16, [1, rows, terms]))
    }
}
