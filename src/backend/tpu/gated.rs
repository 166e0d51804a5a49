//! The gated GELU, in products, and with its derivative as kernels of training steps.
//!
//! The compiler finds the derivative in three passes, of which the last joins both halves: for `bf16[1024,10240]` libtpu predicts
//! 207,000 cycles on a v5p. Reading and writing takes 33,000.

use crate::dtype::DType;
use crate::graph::{Batch, InferError};
use crate::shape::Shape;

use super::arithmetic::{block_of_columns, blocks_of_rows};
use super::call::{KernelCall, refused};
use super::mosaic::{Kernel, LANES, Place, Value as KernelValue, Window, most_bytes};

/// `Phi(-a) exp(a^2 / 2)` in powers of `1 / (1 + TAIL_SLOPE a)`, the highest first.
const TAIL: [f64; 5] = [-0.12696277, 0.35263383, 0.08005087, 0.19596667, -0.00168689];
const TAIL_SLOPE: f64 = 0.44;
/// The density of the normal distribution at 0.
const BELL: f64 = 0.398_942_280_401_432_7;
/// Rows of a tile of bf16.
const TILE_ROWS: usize = 16;
/// Rows of a block, at most, and columns of both halves that are computed at a time.
const MOST_ROWS: usize = 64;
const MOST_COLUMNS: usize = 512;

/// The gated GELU of `bf16[1, rows, 2 * columns]`, whose rows are values and then their gates: `bf16[1, rows, columns]`; or its
/// derivative, `bf16[1, rows, 2 * columns]`, of these rows and the gradient of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatedGelu {
    pub derivative: bool,
    /// Bytes of the core's memory that it may take.
    pub memory: usize,
}

impl GatedGelu {
    /// Whether there is a kernel for this, in one part: bf16 rows of which some make a tile.
    pub fn takes(x: &Shape) -> bool {
        let both = x.dims.last().copied().unwrap_or(0);
        let rows = x.count() / both.max(1);
        x.dtype == DType::BF16
            && rows.is_multiple_of(TILE_ROWS)
            && both > 0
            && both.is_multiple_of(2 * LANES)
    }

    /// Whether the kernel takes so many rows of a part of the batch: whole tiles, that fit the core's memory.
    pub fn fits(self, rows: usize, columns: usize) -> bool {
        self.block(rows, columns).is_some()
    }

    /// Rows of the largest block that fits the core's memory.
    fn block(self, rows: usize, columns: usize) -> Option<usize> {
        if rows == 0 || columns == 0 || !columns.is_multiple_of(LANES) {
            return None;
        }
        blocks_of_rows(rows, TILE_ROWS, MOST_ROWS).find(|block| {
            let kernel = Kernel::new(Vec::new(), self.windows([rows, columns], *block));
            kernel.window_bytes() <= most_bytes(self.memory)
        })
    }

    fn windows(self, [rows, columns]: [usize; 2], block: usize) -> Vec<Window> {
        let one = Window {
            dtype: DType::BF16,
            array: [1, rows, columns],
            block: [block, columns],
            index: [None, Some(0), None],
            place: Place::Own,
            first_column: 0,
        };
        let both = Window {
            array: [1, rows, 2 * columns],
            block: [block, 2 * columns],
            ..one
        };
        match self.derivative {
            true => vec![both, one, both],
            false => vec![both, one],
        }
    }

    fn kernel(self, [rows, columns]: [usize; 2], block: usize) -> Kernel {
        let windows = self.windows([rows, columns], block);
        let mut kernel = Kernel::new(vec![rows / block], windows);
        kernel.memory = self.memory;
        let width = block_of_columns(columns, MOST_COLUMNS).unwrap_or(LANES);
        kernel.repeat(block / TILE_ROWS, Vec::new(), |k, counter, _| {
            let row = k.row_of(counter, TILE_ROWS, 0);
            for at in (0..columns).step_by(width) {
                let load = |k: &mut Kernel, window: usize, at: usize| {
                    k.load_part(window, row, TILE_ROWS, at..at + width)
                };
                let values = load(k, 0, at);
                let gates = load(k, 0, columns + at);
                if !self.derivative {
                    let y = gated(k, values, gates);
                    k.store_at(y, row, at);
                    continue;
                }
                let gradient = load(k, 1, at);
                let of = gated_derivative(k, values, gates, gradient);
                for (place, y) in [at, columns + at].into_iter().zip(of) {
                    k.store_at(y, row, place);
                }
            }
            Vec::new()
        });
        kernel
    }

    fn sizes(self, operands: &[&Shape]) -> Option<[usize; 2]> {
        let (x, gradient) = match (self.derivative, operands) {
            (false, &[x]) => (x, None),
            (true, &[x, gradient]) => (x, Some(gradient)),
            _ => return None,
        };
        let &[1, rows, both] = &x.dims[..] else {
            return None;
        };
        let result = Shape::new(DType::BF16, [1, rows, both / 2]);
        let fits = x.dtype == DType::BF16
            && both.is_multiple_of(2)
            && gradient.is_none_or(|gradient| *gradient == result);
        fits.then_some([rows, both / 2])
    }
}

impl KernelCall for GatedGelu {
    fn name(&self) -> &'static str {
        match self.derivative {
            true => "gated_gelu_gradient",
            false => "gated_gelu",
        }
    }

    fn batch(&self, operands: &[&Shape]) -> Option<Batch> {
        Some(Batch {
            operands: vec![Some(1); operands.len()],
            result: 1,
        })
    }

    fn kernel_of(&self, operands: &[&Shape]) -> Option<Kernel> {
        let sizes = self.sizes(operands)?;
        Some(self.kernel(sizes, self.block(sizes[0], sizes[1])?))
    }

    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let sizes = self.sizes(operands);
        let Some([rows, columns]) = sizes.filter(|[rows, columns]| self.fits(*rows, *columns))
        else {
            return Err(refused("gated GELU kernel", self, operands));
        };
        let columns = if self.derivative {
            2 * columns
        } else {
            columns
        };
        Ok(Shape::new(DType::BF16, [1, rows, columns]))
    }

    fn transcendentals(&self, operands: &[&Shape], _: &Shape) -> u64 {
        operands[0].count() as u64
    }
}

/// `values` times the exact GELU of `gates`, in `f32` with one rounding.
pub(super) fn gated(k: &mut Kernel, values: KernelValue, gates: KernelValue) -> KernelValue {
    let [values, gates] = [values, gates].map(|y| k.convert(y, DType::F32));
    let gelu = Tail::of(k, gates).gelu(k);
    let product = k.mul(values, gelu);
    k.convert(product, DType::BF16)
}

/// The gradients of `values` and of `gates`, given that of [`gated`] of them.
fn gated_derivative(
    k: &mut Kernel,
    values: KernelValue,
    gates: KernelValue,
    gradient: KernelValue,
) -> [KernelValue; 2] {
    let [values, gates, gradient] = [values, gates, gradient].map(|y| k.convert(y, DType::F32));
    let tail = Tail::of(k, gates);
    let gelu = tail.gelu(k);
    let of_values = k.mul(gradient, gelu);
    let slope = tail.derivative_of_gelu(k);
    let of_gelu = k.mul(gradient, values);
    let of_gates = k.mul(of_gelu, slope);
    [of_values, of_gates].map(|y| k.convert(y, DType::BF16))
}

/// What GELU and its derivative have in common.
#[derive(Clone, Copy)]
struct Tail {
    x: KernelValue,
    /// `|x|`
    magnitude: KernelValue,
    /// `exp(-x^2 / 2)`
    bell: KernelValue,
    /// `Phi(-|x|)`
    tail: KernelValue,
}

impl Tail {
    /// `Phi(-a)` is `exp(-a^2 / 2)` times a polynomial in `t = 1 / (1 + 0.44 a)` (the form of Abramowitz and Stegun 7.1.26, fitted
    /// anew for the smallest relative error up to a = 6.5). `erf` takes twice as many operations.
    fn of(k: &mut Kernel, x: KernelValue) -> Tail {
        let size = k.size(x);
        let mut number = |number: f64| k.splat(DType::F32, size, number);
        let [one, slope] = [1.0, TAIL_SLOPE].map(&mut number);
        let power = number(-0.5 * std::f64::consts::LOG2_E);
        let tail = TAIL.map(&mut number);
        let magnitude = k.abs(x);
        let t = k.mul(magnitude, slope);
        let t = k.add(t, one);
        let t = k.inverse(t);
        let [highest, rest @ ..] = tail;
        let polynomial = rest.into_iter().fold(highest, |sum, term| {
            let product = k.mul(sum, t);
            k.add(product, term)
        });
        let square = k.mul(magnitude, magnitude);
        let exponent = k.mul(square, power);
        let bell = k.exp2(exponent);
        let tail = k.mul(polynomial, bell);
        Tail {
            x,
            magnitude,
            bell,
            tail,
        }
    }

    /// The exact GELU `x Phi(x)`, which is `max(x, 0) - a Phi(-a)` for `a = |x|`, within 6e-5 of its own size even if the chip's
    /// reciprocal has no more bits than bf16.
    fn gelu(self, k: &mut Kernel) -> KernelValue {
        let size = k.size(self.x);
        let zero = k.splat(DType::F32, size, 0.0);
        let tail = k.mul(self.tail, self.magnitude);
        let positive = k.max(self.x, zero);
        k.sub(positive, tail)
    }

    /// Its derivative `Phi(x) + x phi(x)`.
    fn derivative_of_gelu(self, k: &mut Kernel) -> KernelValue {
        let size = k.size(self.x);
        let [zero, one, bell] = [0.0, 1.0, BELL].map(|number| k.splat(DType::F32, size, number));
        let positive = k.max(self.x, zero);
        let is_negative = k.equal(positive, zero);
        let head = k.sub(one, self.tail);
        let phi = k.select(is_negative, self.tail, head);
        let density = k.mul(self.bell, bell);
        let product = k.mul(self.x, density);
        k.add(phi, product)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::eval::erf;

    /// What a kernel makes of numbers from -5 to 5.
    fn found(of: fn(&mut Kernel, KernelValue) -> KernelValue) -> Vec<(f64, f64)> {
        let window = Window {
            dtype: DType::F32,
            array: [1, 8, LANES],
            block: [8, LANES],
            index: [None; 3],
            place: Place::Own,
            first_column: 0,
        };
        let mut k = Kernel::new(vec![1], vec![window; 2]);
        let first = k.row(0);
        let x = k.load(0, first, 8);
        let y = of(&mut k, x);
        k.store(y, [0, 0]);
        let numbers: Vec<f32> = (0..8 * LANES)
            .map(|i| (i as f32 - 512.0) / 512.0 * 5.0)
            .collect();
        let found = k.evaluate(std::slice::from_ref(&numbers));
        let pairs = numbers.into_iter().zip(found);
        pairs.map(|(x, y)| (f64::from(x), f64::from(y))).collect()
    }

    fn phi(x: f64) -> f64 {
        0.5 * (1.0 + erf(x / 2f64.sqrt()))
    }

    #[test]
    fn gelu_is_the_exact_one_to_6e_5_of_its_size() {
        for (x, found) in found(|k, x| Tail::of(k, x).gelu(k)) {
            let exact = x * phi(x);
            let error = (found - exact).abs();
            assert!(error <= 6e-5 * exact.abs() + 1e-12, "{x}: {found}, {exact}");
        }
    }

    #[test]
    fn its_derivative_is_the_exact_one_to_3e_5() {
        for (x, found) in found(|k, x| Tail::of(k, x).derivative_of_gelu(k)) {
            let exact = phi(x) + x * BELL * (-0.5 * x * x).exp();
            let error = (found - exact).abs();
            assert!(error <= 3e-5, "{x}: {found}, {exact}");
        }
    }
}
