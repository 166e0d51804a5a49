//! The gates of a product.

use crate::dtype::DType;

use super::super::mosaic::{Kernel, Value as KernelValue};

/// `Phi(-a) exp(a^2 / 2)` in powers of `1 / (1 + TAIL_SLOPE a)`, the highest first.
const TAIL: [f64; 5] = [-0.12696277, 0.35263383, 0.08005087, 0.19596667, -0.00168689];
const TAIL_SLOPE: f64 = 0.44;

/// `values` times the exact GELU of `gates`, in `f32` with one rounding.
pub(super) fn gated(k: &mut Kernel, values: KernelValue, gates: KernelValue) -> KernelValue {
    let [values, gates] = [values, gates].map(|y| k.convert(y, DType::F32));
    let gelu = gelu(k, gates);
    let product = k.mul(values, gelu);
    k.convert(product, DType::BF16)
}

/// The exact GELU `x Phi(x)`, within 6e-5 of its own size even if the chip's reciprocal has no more bits than bf16. It
/// is `max(x, 0) - a Phi(-a)` for `a = |x|`, where `Phi(-a)` is `exp(-a^2 / 2)` times a polynomial in `t = 1 / (1 +
/// 0.44 a)` (the form of Abramowitz and Stegun 7.1.26, fitted anew for the smallest relative error up to a = 6.5).
/// `erf` takes twice as many operations.
fn gelu(k: &mut Kernel, x: KernelValue) -> KernelValue {
    let size = k.size(x);
    let mut number = |number: f64| k.splat(DType::F32, size, number);
    let [zero, one, slope] = [0.0, 1.0, TAIL_SLOPE].map(&mut number);
    let power = number(-0.5 * std::f64::consts::LOG2_E);
    let tail = TAIL.map(&mut number);
    let a = k.abs(x);
    let t = k.mul(a, slope);
    let t = k.add(t, one);
    let t = k.inverse(t);
    let [highest, rest @ ..] = tail;
    let polynomial = rest.into_iter().fold(highest, |sum, term| {
        let product = k.mul(sum, t);
        k.add(product, term)
    });
    let square = k.mul(a, a);
    let exponent = k.mul(square, power);
    let bell = k.exp2(exponent);
    let tail = k.mul(polynomial, bell);
    let tail = k.mul(tail, a);
    let positive = k.max(x, zero);
    k.sub(positive, tail)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::tpu::mosaic::{LANES, Place, Window};
    use crate::graph::eval::erf;

    #[test]
    fn gelu_is_the_exact_one_to_6e_5_of_its_size() {
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
        let y = gelu(&mut k, x);
        k.store(y, [0, 0]);
        let numbers: Vec<f32> = (0..8 * LANES)
            .map(|i| (i as f32 - 512.0) / 512.0 * 5.0)
            .collect();
        let found = k.evaluate(std::slice::from_ref(&numbers));
        for (x, found) in numbers.into_iter().zip(found) {
            let wide = f64::from(x);
            let exact = wide * 0.5 * (1.0 + erf(wide / 2f64.sqrt()));
            let error = (f64::from(found) - exact).abs();
            assert!(error <= 6e-5 * exact.abs() + 1e-12, "{x}: {found}, {exact}");
        }
    }
}
