//! Images `bf16[batch, rows, channels]` by channel: what group norms and the ranges of int8 need of all pixels, and the
//! norm of each pixel. The compiler's operations read an image of 16384 x 320 in 146,000 cycles for a range and in up to
//! 1,000,000 for sums on v5e; the memory gives it in 38,000.

use std::ops::Range;

use crate::dtype::DType;
use crate::graph::{Batch, InferError, constraint};
use crate::shape::Shape;

use super::arithmetic::blocks_of_rows;
use super::call::KernelCall;
use super::mosaic::{Kernel, LANES, Place, VMEM_BYTES, Value as KernelValue, Window};

/// Rows of a tile of bf16; of each value that is found of a channel there are as many, of every 16th pixel.
pub const TILE: usize = 16;
/// Channels that are worked on at once, at most: what is kept of them stays in registers.
const MOST_CHANNELS: usize = 4 * LANES;
/// Registers of 32 bits that a step of a loop loads, at most.
const MOST_REGISTERS: usize = 48;
/// Windows of an image beside each other.
const READ: usize = 1;
const READ_AND_WRITTEN: usize = 2;

/// What is found of the channels of images `bf16[batch, rows, channels]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OfChannels {
    /// The largest magnitudes: `f32[batch, 16, channels]`, one of every 16th row.
    AbsMax,
    /// Sums, then sums of squares: `f32[batch, 32, channels]`, 16 rows of each.
    Sums,
}

impl OfChannels {
    /// Whether rows make whole tiles of which a core can hold some.
    pub fn fits(rows: usize, channels: usize) -> bool {
        block_rows([rows, channels], READ).is_some()
    }

    /// How many values are found of a channel.
    fn count(self) -> usize {
        match self {
            OfChannels::AbsMax => 1,
            OfChannels::Sums => 2,
        }
    }

    /// The values found so far, with those of one more tile.
    fn joined(self, k: &mut Kernel, found: &[KernelValue], x: KernelValue) -> Vec<KernelValue> {
        match self {
            OfChannels::AbsMax => {
                let x = k.abs(x);
                vec![k.max(found[0], x)]
            }
            OfChannels::Sums => {
                let square = k.mul(x, x);
                vec![k.add(found[0], x), k.add(found[1], square)]
            }
        }
    }

    fn kernel(self, sizes: [usize; 3]) -> Option<Kernel> {
        let [batch, rows, channels] = sizes;
        let block = block_rows([rows, channels], READ)?;
        let found = [self.count() * TILE, channels];
        let result = Window {
            dtype: DType::F32,
            array: [batch, found[0], channels],
            block: found,
            index: [Some(0), None, None],
            place: Place::Own,
            first_column: 0,
        };
        let steps = rows / block;
        let mut kernel = Kernel::new(vec![batch, steps], vec![image(sizes, block), result]);
        accumulate(&mut kernel, found, steps, |k, part, found| {
            each_tile(k, block, part, found, |k, found, x, _| {
                self.joined(k, found, x)
            })
        });
        Some(kernel)
    }

    fn sizes(operands: &[&Shape]) -> Option<[usize; 3]> {
        let &[x] = operands else {
            return None;
        };
        image_sizes(x)
    }
}

/// `x * scale + shift` of each channel, rounded to bf16, then with `silu` its SiLU: the second half of a group norm.
///
/// Operands: `bf16[batch, rows, channels]`, then `f32[batch, 2, channels]`: scales, then shifts. The result is of the
/// first operand's shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScaleShift {
    pub silu: bool,
}

impl ScaleShift {
    /// Whether rows make whole tiles of which a core can hold some.
    pub fn fits(rows: usize, channels: usize) -> bool {
        block_rows([rows, channels], READ_AND_WRITTEN).is_some()
    }

    fn kernel(self, sizes: [usize; 3]) -> Option<Kernel> {
        let [batch, rows, channels] = sizes;
        let block = block_rows([rows, channels], READ_AND_WRITTEN)?;
        let of_channels = Window {
            dtype: DType::F32,
            array: [batch, 2, channels],
            block: [2, channels],
            index: [Some(0), None, None],
            place: Place::Own,
            first_column: 0,
        };
        let windows = vec![image(sizes, block), of_channels, image(sizes, block)];
        let mut kernel = Kernel::new(vec![batch, rows / block], windows);
        let k = &mut kernel;
        for part in parts(channels) {
            let [scale, shift] = [0, 1].map(|number| number_of(k, 1, number, &part));
            each_tile(k, block, &part, Vec::new(), |k, _, x, row| {
                let y = k.mul(x, scale);
                let y = k.add(y, shift);
                let mut y = k.convert(y, DType::BF16);
                if self.silu {
                    y = silu(k, y);
                }
                k.store_at(y, row, part.start);
                Vec::new()
            });
        }
        Some(kernel)
    }

    fn sizes(operands: &[&Shape]) -> Option<[usize; 3]> {
        let &[x, of_channels] = operands else {
            return None;
        };
        let sizes = image_sizes(x)?;
        let expected = Shape::new(DType::F32, [sizes[0], 2, sizes[2]]);
        (*of_channels == expected).then_some(sizes)
    }
}

/// The channels of two images, one after the other.
///
/// Operands: `bf16[batch, rows, channels]` of two numbers of channels, the first a multiple of [`LANES`]. The result has the
/// sum of both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SideBySide;

impl SideBySide {
    /// Whether rows make whole tiles of which a core can hold some, and the second image begins a register.
    pub fn fits(rows: usize, [first, second]: [usize; 2]) -> bool {
        let both = first.saturating_add(second);
        first.is_multiple_of(LANES)
            && second > 0
            && block_rows([rows, both], READ_AND_WRITTEN).is_some()
    }

    fn kernel([batch, rows]: [usize; 2], [first, second]: [usize; 2]) -> Option<Kernel> {
        let block = block_rows([rows, first + second], READ_AND_WRITTEN)?;
        let of = |channels: usize| image([batch, rows, channels], block);
        let windows = vec![of(first), of(second), of(first + second)];
        let mut kernel = Kernel::new(vec![batch, rows / block], windows);
        for (window, to, channels) in [(0, 0, first), (1, first, second)] {
            for part in parts(channels) {
                kernel.repeat(block / TILE, Vec::new(), |k, counter, _| {
                    let row = k.row_of(counter, TILE, 0);
                    let x = k.load_part(window, row, TILE, part.clone());
                    k.store_at(x, row, to + part.start);
                    Vec::new()
                });
            }
        }
        Some(kernel)
    }

    /// Batch and rows, and both numbers of channels.
    fn sizes(operands: &[&Shape]) -> Option<([usize; 2], [usize; 2])> {
        let &[a, c] = operands else {
            return None;
        };
        let [[batch, rows, first], [_, _, second]] = [image_sizes(a)?, image_sizes(c)?];
        let fits = a.dims[..2] == c.dims[..2] && SideBySide::fits(rows, [first, second]);
        fits.then_some(([batch, rows], [first, second]))
    }

    fn of_shapes(operands: &[&Shape]) -> Option<Kernel> {
        let (rows, channels) = SideBySide::sizes(operands)?;
        SideBySide::kernel(rows, channels)
    }
}

/// `bf16[batch, rows, channels]`, in blocks of rows that the grid's second dimension counts.
pub(super) fn image([batch, rows, channels]: [usize; 3], block: usize) -> Window {
    Window {
        dtype: DType::BF16,
        array: [batch, rows, channels],
        block: [block, channels],
        index: [Some(0), Some(1), None],
        place: Place::Own,
        first_column: 0,
    }
}

fn image_sizes(x: &Shape) -> Option<[usize; 3]> {
    let sizes: [usize; 3] = x.dims[..].try_into().ok()?;
    (x.dtype == DType::BF16).then_some(sizes)
}

/// The most rows of a block that divide all, as whole tiles, where `windows` images lie beside each other.
pub(super) fn block_rows([rows, channels]: [usize; 2], windows: usize) -> Option<usize> {
    // Blocks are there twice; a quarter of the memory is enough to hide the latency of transfers.
    let row = 2 * channels.next_multiple_of(LANES);
    let most = VMEM_BYTES / 8 / (windows * row).max(1);
    let largest = blocks_of_rows(rows, TILE, most).next();
    largest.filter(|_| rows > 0 && channels > 0)
}

/// Channels that are worked on at once.
pub(super) fn parts(channels: usize) -> impl Iterator<Item = Range<usize>> {
    let first = (0..channels).step_by(MOST_CHANNELS);
    first.map(move |first| first..channels.min(first + MOST_CHANNELS))
}

/// Finds values of channels, `size` in all: a tile of rows for each. `body` takes those of some channels that were found before, and gives
/// them with those of the step; the last of the `steps` stores all.
pub(super) fn accumulate(
    k: &mut Kernel,
    size: [usize; 2],
    steps: usize,
    mut body: impl FnMut(&mut Kernel, &Range<usize>, Vec<KernelValue>) -> Vec<KernelValue>,
) {
    let [rows, channels] = size;
    let kept = k.scratch(DType::F32, size);
    k.when_first(1, |k| {
        let zeros = k.splat(DType::F32, size, 0.0);
        k.keep(kept, zeros, [0, 0]);
    });
    for part in parts(channels) {
        let place = |value: usize| [value * TILE, part.start];
        let of_part = [TILE, part.len()];
        let before = (0..rows / TILE).map(|value| k.kept_part(kept, place(value), of_part));
        let before = before.collect();
        for (value, next) in body(k, &part, before).into_iter().enumerate() {
            k.keep(kept, next, place(value));
        }
    }
    k.when(1, steps - 1, |k| {
        let found = k.kept(kept);
        k.store(found, [0, 0]);
    });
}

/// The number in row `number` of a window for each of some channels, for a tile of pixels.
pub(super) fn number_of(
    k: &mut Kernel,
    window: usize,
    number: usize,
    part: &Range<usize>,
) -> KernelValue {
    let row = k.row(number);
    let row = k.load_part(window, row, 1, part.clone());
    k.broadcast_row(row, TILE)
}

/// Runs `body` for each tile of the first window's block: it takes the carried values, the tile in `f32` and its first
/// row, and gives the next carried values.
pub(super) fn each_tile(
    k: &mut Kernel,
    block: usize,
    part: &Range<usize>,
    start: Vec<KernelValue>,
    mut body: impl FnMut(&mut Kernel, &[KernelValue], KernelValue, KernelValue) -> Vec<KernelValue>,
) -> Vec<KernelValue> {
    let tiles = block / TILE;
    let registers = 2 * part.len().div_ceil(LANES);
    let most = (MOST_REGISTERS / registers).clamp(1, tiles);
    let at_once = (1..=most)
        .rev()
        .find(|count| tiles.is_multiple_of(*count))
        .unwrap_or(1);
    k.repeat(tiles / at_once, start, |k, counter, carried| {
        (0..at_once).fold(carried.to_vec(), |carried, tile| {
            let row = k.row_of(counter, at_once * TILE, tile * TILE);
            let x = k.load_part(0, row, TILE, part.clone());
            let x = k.convert(x, DType::F32);
            body(k, &carried, x, row)
        })
    })
}

/// `x * logistic(x)` of bf16, with one rounding.
fn silu(k: &mut Kernel, x: KernelValue) -> KernelValue {
    let x = k.convert(x, DType::F32);
    let logistic = logistic(k, x);
    let y = k.mul(x, logistic);
    k.convert(y, DType::BF16)
}

/// `1 / (1 + exp(-x))`.
pub(super) fn logistic(k: &mut Kernel, x: KernelValue) -> KernelValue {
    let size = k.size(x);
    let mut number = |number: f64| k.splat(DType::F32, size, number);
    // Beyond the highest exponent, the power or its reciprocal is not finite.
    let [one, factor, highest] = [1.0, -std::f64::consts::LOG2_E, 126.0].map(&mut number);
    let exponent = k.mul(x, factor);
    let exponent = k.min(exponent, highest);
    let power = k.exp2(exponent);
    let sum = k.add(power, one);
    k.inverse(sum)
}

fn refused(name: &'static str, operands: &[&Shape]) -> InferError {
    let found: Vec<String> = operands.iter().map(ToString::to_string).collect();
    constraint(
        name,
        format!(
            "the kernel takes bf16[batch, rows, channels] of rows that are a multiple of {TILE}, not {}",
            found.join(", ")
        ),
    )
}

impl KernelCall for OfChannels {
    fn name(&self) -> &'static str {
        match self {
            OfChannels::AbsMax => "absmax",
            OfChannels::Sums => "channel_sums",
        }
    }

    fn batch(&self, operands: &[&Shape]) -> Option<Batch> {
        Some(Batch::first(operands.len()))
    }

    fn kernel_of(&self, operands: &[&Shape]) -> Option<Kernel> {
        OfChannels::sizes(operands).and_then(|sizes| self.kernel(sizes))
    }

    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let sizes = OfChannels::sizes(operands);
        let sizes = sizes.filter(|[_, rows, channels]| OfChannels::fits(*rows, *channels));
        let [batch, _, channels] = sizes.ok_or_else(|| refused(self.name(), operands))?;
        Ok(Shape::new(
            DType::F32,
            [batch, self.count() * TILE, channels],
        ))
    }
}

impl KernelCall for ScaleShift {
    fn name(&self) -> &'static str {
        match self.silu {
            false => "scale_shift",
            true => "scale_shift_silu",
        }
    }

    fn batch(&self, operands: &[&Shape]) -> Option<Batch> {
        Some(Batch::first(operands.len()))
    }

    fn kernel_of(&self, operands: &[&Shape]) -> Option<Kernel> {
        ScaleShift::sizes(operands).and_then(|sizes| self.kernel(sizes))
    }

    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let sizes = ScaleShift::sizes(operands);
        let sizes = sizes.filter(|[_, rows, channels]| ScaleShift::fits(*rows, *channels));
        match sizes {
            Some(sizes) => Ok(Shape::new(DType::BF16, sizes)),
            None => Err(refused(self.name(), operands)),
        }
    }

    fn transcendentals(&self, _: &[&Shape], result: &Shape) -> u64 {
        match self.silu {
            true => 2 * result.count() as u64,
            false => 0,
        }
    }
}

impl KernelCall for SideBySide {
    fn name(&self) -> &'static str {
        "side_by_side"
    }

    fn batch(&self, operands: &[&Shape]) -> Option<Batch> {
        Some(Batch::first(operands.len()))
    }

    fn kernel_of(&self, operands: &[&Shape]) -> Option<Kernel> {
        SideBySide::of_shapes(operands)
    }

    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        match SideBySide::sizes(operands) {
            Some(([batch, rows], [first, second])) => {
                Ok(Shape::new(DType::BF16, [batch, rows, first + second]))
            }
            None => Err(refused(self.name(), operands)),
        }
    }
}
