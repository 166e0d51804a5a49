//! Products of training steps in int8, whose operands are rounded inside: the range of each row or column, its scale and its
//! integers are found where the product reads it. Outside they are passes over memory, which take longer than int8 saves.

mod gradient;
mod product;
mod ranges;

pub use gradient::RoundedGradient;
pub use product::RoundedProduct;
pub use ranges::ColumnRanges;

use std::ops::Range;

use crate::dtype::DType;

use super::mosaic::{Kernel, LANES, Place, Value as KernelValue, Window};

/// Rows of an int8 tile.
const TILE_ROWS: usize = 32;

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

/// The window of the largest magnitudes of the columns of another window's array, `f32[parts, 1, columns]`.
fn ranges_of(window: Window) -> Window {
    let ([parts, _, columns], [_, width]) = (window.array, window.block);
    let [part, _, block] = window.index;
    Window {
        dtype: DType::F32,
        array: [parts, 1, columns],
        block: [1, width],
        index: [part, None, block],
        ..window
    }
}

/// How the rows of a window are gone through.
#[derive(Clone, Copy)]
enum Tiles {
    /// One tile after the other, without a loop.
    Straight,
    /// In a loop, [`LANES`] rows in each run.
    Loop,
}

impl Tiles {
    /// Rows of a tile. Few of them keep what is between in registers; without a loop the compiler orders operations itself, and larger
    /// tiles make a smaller program.
    fn rows(self) -> usize {
        match self {
            Tiles::Straight => LANES,
            Tiles::Loop => TILE_ROWS,
        }
    }

    /// Runs `body` for each `rows` rows, with the first of them and the values carried.
    fn each(
        self,
        k: &mut Kernel,
        terms: usize,
        rows: usize,
        start: Vec<KernelValue>,
        body: impl Fn(&mut Kernel, KernelValue, &[KernelValue]) -> Vec<KernelValue>,
    ) -> Vec<KernelValue> {
        match self {
            Tiles::Straight => (0..terms).step_by(rows).fold(start, |values, first| {
                let row = k.row(first);
                body(k, row, &values)
            }),
            Tiles::Loop => k.repeat(terms / LANES, start, |k, counter, values| {
                let firsts = (0..LANES).step_by(rows);
                firsts.fold(values.to_vec(), |values, first| {
                    let row = k.row_of(counter, LANES, first);
                    body(k, row, &values)
                })
            }),
        }
    }
}

/// The largest magnitude of each of some columns of a window, `f32[1, columns]`, found in `vectors`.
fn absmax(
    k: &mut Kernel,
    window: usize,
    terms: usize,
    columns: Range<usize>,
    tiles: Tiles,
    vectors: DType,
) -> KernelValue {
    let zero = k.splat(vectors, [tiles.rows(), columns.len()], 0.0);
    let highest = tiles.each(k, terms, tiles.rows(), vec![zero], |k, row, highest| {
        let x = k.load_part(window, row, tiles.rows(), columns.clone());
        let x = k.convert(x, vectors);
        let magnitudes = k.abs(x);
        vec![k.max(highest[0], magnitudes)]
    });
    let highest = k.convert(highest[0], DType::F32);
    k.column_max(highest)
}
