//! Products of training steps in int8, whose operands are rounded inside: the range of each row or column, its scale and its
//! integers are found where the product reads it. Outside they are passes over memory, which take longer than int8 saves.

mod gradient;
mod product;

pub use gradient::RoundedGradient;
pub use product::RoundedProduct;

use crate::dtype::DType;

use super::arithmetic::{Arithmetic, rounded, rounded_to_integers};
use super::mosaic::{Kernel, Noise, Place, Value as KernelValue, Window};

/// Rows of an int8 tile.
const TILE_ROWS: usize = 32;
/// Columns that are rounded at a time: what is between fits the registers.
const ROUNDED_COLUMNS: usize = 1280;

/// The windows of a key's words, `u32[1, 1, 2]`, and of the number of the first row of each part of the batch in the tensor that is
/// rounded, `u32[parts, 1, 1]`.
fn noise_windows(parts: usize, part: Option<usize>) -> [Window; 2] {
    let key = Window {
        dtype: DType::U32,
        array: [1, 1, 2],
        block: [1, 2],
        index: [None; 3],
        place: Place::Own,
        first_column: 0,
    };
    let first = Window {
        array: [parts, 1, 1],
        block: [1, 1],
        index: [part, None, None],
        ..key
    };
    [key, first]
}

/// [`rounded_values`] as `s8`.
fn integers(
    k: &mut Kernel,
    x: KernelValue,
    inverse: KernelValue,
    noise: Option<Noise>,
) -> KernelValue {
    let y = rounded_values(k, x, inverse, noise);
    k.convert(y, DType::S8)
}

/// `x` in `f32`, of bf16, times inverse scales, rounded to integers by AQT's numerics: to bf16 first, to which noise is added where
/// there is some, and which is rounded again.
fn rounded_values(
    k: &mut Kernel,
    x: KernelValue,
    inverse: KernelValue,
    noise: Option<Noise>,
) -> KernelValue {
    match noise {
        None => rounded_to_integers(k, x, inverse, Arithmetic::Int8),
        Some(noise) => {
            let size = k.size(x);
            let scaled = k.mul(x, inverse);
            let scaled = rounded(k, scaled);
            let noise = k.noise(noise, size);
            let noisy = k.add(scaled, noise);
            let one = k.splat(DType::F32, size, 1.0);
            rounded_to_integers(k, noisy, one, Arithmetic::Int8)
        }
    }
}
