//! The gradient of a 3x3 convolution's kernel: for each place of the kernel one product, of the gradient of the result with what
//! the place sees of the image.
//!
//! The compiler's own way needs the image nine times, once for each place. Here a block of the image is moved by a pixel to
//! either side on the chip, and places in other rows read it from there. Sums stay in the core's memory until the last block.

use std::cmp::Reverse;

use crate::dtype::DType;
use crate::graph::{Batch, InferError};
use crate::shape::Shape;

use super::Features;
use super::arithmetic::block_of_columns;
use super::call::{KernelCall, refused};
use super::mosaic::{Kernel, LANES, Place, Scratch, Value as KernelValue, Window, most_bytes};

/// Rows and columns of the convolution's kernel.
const SIDE: usize = 3;
/// The window of the result's gradient, behind the image's own rows, those before them and those behind them; and that of
/// the kernel's own result.
const GRADIENT: usize = 3;
const RESULT: usize = 4;
/// Rows of a tile of bf16, and of an `f32` one.
const TILE_ROWS: [usize; 2] = [16, 8];
/// Pixels of a block, at most.
const MOST_PIXELS: usize = 1024;
/// Instructions of the matrix units in a step, at most: their code is written out.
const MOST_INSTRUCTIONS: usize = 12_288;

/// The gradient of the kernel of a 3x3 convolution with a stride of 1 and zeros around the image for it to keep its size.
///
/// Operands: three times the images, `bf16[parts, images * height * width, inputs]`, and the gradient of the result, transposed,
/// `bf16[parts, outputs, images * height * width]`. The result is `[parts, 9 * outputs, inputs]`, for each part the sum over
/// its images: the kernel's places row by row, and of each place the outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvolutionGradient {
    pub height: usize,
    pub width: usize,
    /// Of a part.
    pub images: usize,
    /// The type of the result. Sums are `f32`.
    pub result: DType,
    /// Of the chip.
    pub features: Features,
}

/// What a step computes with: some rows of an image, some of its channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Block {
    image_rows: usize,
    columns: usize,
}

/// The numbers of parts and channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sizes {
    parts: usize,
    inputs: usize,
    outputs: usize,
}

/// The rows and columns of the kernel's places.
fn places() -> impl Iterator<Item = [usize; 2]> {
    (0..SIDE).flat_map(|row| (0..SIDE).map(move |column| [row, column]))
}

/// The first of a place's rows in the result.
fn first_row([row, column]: [usize; 2], sizes: Sizes) -> usize {
    (SIDE * row + column) * sizes.outputs
}

/// What the core keeps from step to step.
struct Memory {
    /// The rows of the image that a block is computed from, as each column of the kernel sees them.
    images: [Scratch; SIDE],
    /// One row of them, with a tile of rows before and behind it.
    row: Scratch,
    /// `None` where the result itself has them, or nothing is added to them.
    sums: Option<Scratch>,
}

impl Memory {
    fn sum(&self, k: &mut Kernel, first: usize, of_place: [usize; 2]) -> KernelValue {
        let row = k.row(first);
        match self.sums {
            Some(sums) => k.kept_at(sums, row, 0, of_place),
            None => k.load(RESULT, row, of_place[0]),
        }
    }

    fn keep_sum(&self, k: &mut Kernel, sum: KernelValue, first: usize) {
        match self.sums {
            Some(sums) => k.keep(sums, sum, [first, 0]),
            None => k.store(sum, [first, 0]),
        }
    }
}

impl ConvolutionGradient {
    /// Whether a core can hold what the kernel works with.
    pub fn fits(&self, inputs: usize, outputs: usize) -> bool {
        let sizes = Sizes {
            parts: 1,
            inputs,
            outputs,
        };
        self.block(sizes).is_some()
    }

    /// Steps that a sum is added up in.
    fn steps(&self, block: Block) -> usize {
        self.images * self.height / block.image_rows
    }

    /// Of the blocks that fit the core's memory, and for which the matrix units multiply the fewest columns, the one with the most
    /// pixels, as each step reads and writes all sums; of these the narrowest.
    fn block(&self, sizes: Sizes) -> Option<Block> {
        let is_known = self.width > 0
            && self.width.is_multiple_of(TILE_ROWS[0])
            && sizes.outputs.is_multiple_of(TILE_ROWS[0])
            && sizes.outputs > 0
            && self.images > 0;
        let largest = self.height.min(MOST_PIXELS / self.width.max(1));
        let rows = (1..=largest).filter(|rows| {
            // The gradient's pixels lie along the lanes.
            let pixels = rows * self.width;
            let is_all = pixels == self.height * self.width && self.images == 1;
            self.height.is_multiple_of(*rows) && (pixels.is_multiple_of(LANES) || is_all)
        });
        let rows: Vec<usize> = rows.collect();
        let most = sizes.inputs.next_multiple_of(LANES);
        let mut columns: Vec<usize> = (LANES..=most)
            .step_by(LANES)
            .filter_map(|most| block_of_columns(sizes.inputs, most))
            .collect();
        columns.dedup();
        let blocks = rows.into_iter().flat_map(|image_rows| {
            let columns = columns.iter();
            columns.map(move |columns| Block {
                image_rows,
                columns: *columns,
            })
        });
        let fitting = blocks.filter(|block| {
            is_known
                && self.instructions(*block, sizes) <= MOST_INSTRUCTIONS
                && self.bytes(*block, sizes) <= most_bytes(self.features.kernel_memory)
        });
        fitting.min_by_key(|block| {
            let multiplied = self
                .features
                .multiplied_columns(sizes.inputs, block.columns);
            (multiplied, Reverse(block.image_rows), block.columns)
        })
    }

    fn pixels(&self, block: Block) -> usize {
        block.image_rows * self.width
    }

    /// Instructions of the matrix units in a step.
    fn instructions(&self, block: Block, sizes: Sizes) -> usize {
        let pixels = self.pixels(block);
        SIDE * SIDE
            * self
                .features
                .instructions(sizes.outputs, pixels, block.columns)
    }

    /// Bytes of the core's memory: windows, scratch, and the product that is added to the sums with copies of its operands.
    fn bytes(&self, block: Block, sizes: Sizes) -> usize {
        let mut kernel = Kernel::new(Vec::new(), self.windows(block, sizes));
        self.memory(&mut kernel, block, sizes);
        let columns = block.columns.next_multiple_of(LANES);
        let operands = 2 * self.pixels(block) * (sizes.outputs + columns);
        let product = 4 * sizes.outputs * columns;
        kernel.window_bytes() + kernel.scratch_bytes() + product + operands
    }

    /// The image, its rows before and behind the block, the result's gradient, and the result.
    fn windows(&self, block: Block, sizes: Sizes) -> Vec<Window> {
        let Sizes {
            parts,
            inputs,
            outputs,
        } = sizes;
        let all = self.images * self.height * self.width;
        let several = (inputs > block.columns).then_some(1);
        let x = Window {
            dtype: DType::BF16,
            array: [parts, all, inputs],
            block: [self.pixels(block), block.columns],
            index: [Some(0), Some(2), several],
            place: Place::Own,
            first_column: 0,
        };
        let row = |place| Window {
            block: [self.width, block.columns],
            place,
            ..x
        };
        let gradient = Window {
            array: [parts, outputs, all],
            block: [outputs, self.pixels(block)],
            index: [Some(0), None, Some(2)],
            ..x
        };
        let result = Window {
            dtype: self.result,
            array: [parts, SIDE * SIDE * outputs, inputs],
            block: [SIDE * SIDE * outputs, block.columns],
            index: [Some(0), None, several],
            ..x
        };
        vec![
            x,
            row(Place::Before(block.image_rows)),
            row(Place::Behind(block.image_rows)),
            gradient,
            result,
        ]
    }

    fn memory(&self, k: &mut Kernel, block: Block, sizes: Sizes) -> Memory {
        let rows = (block.image_rows + SIDE - 1) * self.width;
        let sums = [SIDE * SIDE * sizes.outputs, block.columns];
        let row = [self.width + 2 * TILE_ROWS[1], block.columns];
        Memory {
            images: [(); SIDE].map(|()| k.scratch(DType::BF16, [rows, block.columns])),
            row: k.scratch(DType::F32, row),
            sums: (self.result != DType::F32 && self.steps(block) > 1)
                .then(|| k.scratch(DType::F32, sums)),
        }
    }

    fn kernel(&self, block: Block, sizes: Sizes) -> Kernel {
        let grid = vec![sizes.parts, sizes.inputs / block.columns, self.steps(block)];
        let mut kernel = Kernel::new(grid, self.windows(block, sizes));
        kernel.memory = self.features.kernel_memory;
        self.step(&mut kernel, block, sizes);
        kernel
    }

    fn step(&self, k: &mut Kernel, block: Block, sizes: Sizes) {
        let memory = self.memory(k, block, sizes);
        self.keep_image(k, block, &memory);
        match self.steps(block) {
            1 => self.sum_at_once(k, &memory, block, sizes),
            steps => self.sum_up(k, &memory, block, sizes, steps),
        }
    }

    fn sum_at_once(&self, k: &mut Kernel, memory: &Memory, block: Block, sizes: Sizes) {
        let gradient = self.gradient(k, sizes);
        for place in places() {
            let zeros = k.splat(DType::F32, [sizes.outputs, block.columns], 0.0);
            let sum = self.product(k, memory, block, place, [gradient, zeros]);
            let sum = k.convert(sum, self.result);
            k.store(sum, [first_row(place, sizes), 0]);
        }
    }

    fn sum_up(&self, k: &mut Kernel, memory: &Memory, block: Block, sizes: Sizes, steps: usize) {
        let of_place = [sizes.outputs, block.columns];
        k.when_first(2, |k| {
            let zeros = k.splat(DType::F32, of_place, 0.0);
            for place in places() {
                memory.keep_sum(k, zeros, first_row(place, sizes));
            }
        });
        let gradient = self.gradient(k, sizes);
        for place in places() {
            let before = memory.sum(k, first_row(place, sizes), of_place);
            let sum = self.product(k, memory, block, place, [gradient, before]);
            memory.keep_sum(k, sum, first_row(place, sizes));
        }
        if memory.sums.is_none() {
            return;
        }
        k.when(2, steps - 1, |k| {
            for place in places() {
                let sum = memory.sum(k, first_row(place, sizes), of_place);
                let sum = k.convert(sum, self.result);
                k.store(sum, [first_row(place, sizes), 0]);
            }
        });
    }

    /// The gradient of the result at the block's pixels.
    fn gradient(&self, k: &mut Kernel, sizes: Sizes) -> KernelValue {
        let start = k.row(0);
        k.load(GRADIENT, start, sizes.outputs)
    }

    /// The gradient of the result times what `place` sees of the image, plus what was summed up before.
    fn product(
        &self,
        k: &mut Kernel,
        memory: &Memory,
        block: Block,
        [row, column]: [usize; 2],
        [gradient, before]: [KernelValue; 2],
    ) -> KernelValue {
        let size = [self.pixels(block), block.columns];
        let x = k.kept_part(memory.images[column], [row * self.width, 0], size);
        k.matmul(gradient, x, before)
    }

    /// Keeps the rows of the block, the one before it and the one behind it, as each column of the kernel sees them.
    fn keep_image(&self, k: &mut Kernel, block: Block, memory: &Memory) {
        k.repeat(block.image_rows, Vec::new(), |k, counter, _| {
            let from = k.row_of(counter, self.width, 0);
            let to = k.row_of(counter, self.width, self.width);
            self.keep_row(k, 0, [from, to], memory);
            Vec::new()
        });
        let blocks = self.height / block.image_rows;
        for (window, to, edge) in [(1, 0, 0), (2, block.image_rows + 1, blocks - 1)] {
            let to = to * self.width;
            let places = [0, to].map(|row| k.row(row));
            self.keep_row(k, window, places, memory);
            // Outside each image are zeros.
            for image in 0..self.images {
                k.when(2, image * blocks + edge, |k| {
                    let zeros = k.splat(DType::BF16, [self.width, block.columns], 0.0);
                    for image in memory.images {
                        k.keep(image, zeros, [to, 0]);
                    }
                });
            }
        }
    }

    /// Keeps one row of the image: the pixels on the left of each pixel, themselves, and those on the right.
    fn keep_row(
        &self,
        k: &mut Kernel,
        window: usize,
        [from, to]: [KernelValue; 2],
        memory: &Memory,
    ) {
        let [left, middle, right] = memory.images;
        let x = k.load(window, from, self.width);
        k.keep_at(middle, x, to, 0);
        let wide = k.convert(x, DType::F32);
        k.keep(memory.row, wide, [TILE_ROWS[1], 0]);
        let size = k.size(wide);
        let pixel = k.rows(self.width, size);
        let zero = k.splat(DType::F32, size, 0.0);
        let [first, last] =
            [0, self.width - 1].map(|pixel| k.splat(DType::S32, size, pixel as f64));
        let has_left = k.less(first, pixel);
        let has_right = k.less(pixel, last);
        let sides = [
            (left, TILE_ROWS[1] - 1, has_left),
            (right, TILE_ROWS[1] + 1, has_right),
        ];
        for (image, start, inside) in sides {
            let moved = k.kept_part(memory.row, [start, 0], size);
            let moved = k.select(inside, moved, zero);
            let moved = k.convert(moved, DType::BF16);
            k.keep_at(image, moved, to, 0);
        }
    }

    /// The sizes that operands tell.
    fn sizes(&self, operands: &[&Shape]) -> Option<Sizes> {
        let &[x, before, behind, gradient] = operands else {
            return None;
        };
        let sizes = Sizes {
            parts: *x.dims.first()?,
            inputs: *x.dims.get(2)?,
            outputs: *gradient.dims.get(1)?,
        };
        let all = self.images * self.height * self.width;
        let images = Shape::new(DType::BF16, [sizes.parts, all, sizes.inputs]);
        let of_gradient = Shape::new(DType::BF16, [sizes.parts, sizes.outputs, all]);
        let same = [x, before, behind].iter().all(|shape| **shape == images);
        (same && *gradient == of_gradient).then_some(sizes)
    }
}

impl KernelCall for ConvolutionGradient {
    fn name(&self) -> &'static str {
        "convolution_gradient_of_kernel"
    }

    fn batch(&self, operands: &[&Shape]) -> Option<Batch> {
        Some(Batch::first(operands.len()))
    }

    fn kernel_of(&self, operands: &[&Shape]) -> Option<Kernel> {
        let sizes = self.sizes(operands)?;
        Some(self.kernel(self.block(sizes)?, sizes))
    }

    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let sizes = self.sizes(operands);
        let sizes = sizes.filter(|sizes| self.fits(sizes.inputs, sizes.outputs));
        let sizes =
            sizes.ok_or_else(|| refused("kernel of a convolution's gradient", self, operands))?;
        let dims = [sizes.parts, SIDE * SIDE * sizes.outputs, sizes.inputs];
        Ok(Shape::new(self.result, dims))
    }

    fn flops(&self, operands: &[&Shape], result: &Shape) -> u64 {
        let pixels = operands[0].dims[1];
        (2 * result.count() as u64).saturating_mul(pixels as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small integers: exact in bf16, and their sums in any order.
    fn numbers(count: usize) -> Vec<f32> {
        (0..count).map(|i| (i * 7 % 11) as f32 - 5.0).collect()
    }

    /// For each part, place, output and input the sum over all pixels, as it is defined.
    fn expected(of: &ConvolutionGradient, sizes: Sizes, x: &[f32], gradient: &[f32]) -> Vec<f32> {
        let Sizes {
            parts,
            inputs,
            outputs,
        } = sizes;
        let (height, width) = (of.height, of.width);
        let all = of.images * height * width;
        let mut sums = vec![0.0; parts * SIDE * SIDE * outputs * inputs];
        for part in 0..parts {
            for pixel in 0..all {
                let (image, row, column) = (
                    pixel / (height * width),
                    pixel / width % height,
                    pixel % width,
                );
                for place in 0..SIDE * SIDE {
                    let (seen_row, seen_column) = (row + place / SIDE, column + place % SIDE);
                    if !(1..=height).contains(&seen_row) || !(1..=width).contains(&seen_column) {
                        continue;
                    }
                    let seen = (image * height + seen_row - 1) * width + seen_column - 1;
                    for output in 0..outputs {
                        let dy = gradient[(part * outputs + output) * all + pixel];
                        let at = ((part * SIDE * SIDE + place) * outputs + output) * inputs;
                        for input in 0..inputs {
                            sums[at + input] += dy * x[(part * all + seen) * inputs + input];
                        }
                    }
                }
            }
        }
        sums
    }

    fn compare(of: ConvolutionGradient, sizes: Sizes, block: Block) {
        let all = of.images * of.height * of.width;
        let x = numbers(sizes.parts * all * sizes.inputs);
        let gradient = numbers(sizes.parts * sizes.outputs * all);
        let kernel = of.kernel(block, sizes);
        let found = kernel.evaluate(&[x.clone(), x.clone(), x.clone(), gradient.clone()]);
        let expected = expected(&of, sizes, &x, &gradient);
        assert!(found == expected, "{of:?} {sizes:?} {block:?}");
    }

    #[test]
    fn the_kernel_is_the_sum_over_all_pixels() {
        let of = ConvolutionGradient {
            height: 16,
            width: 16,
            images: 1,
            result: DType::F32,
            features: Features::UNKNOWN,
        };
        let sizes = Sizes {
            parts: 1,
            inputs: 24,
            outputs: 16,
        };
        let block = |image_rows, columns| Block {
            image_rows,
            columns,
        };
        // All of an image, and its halves.
        compare(of, sizes, block(16, 24));
        compare(of, sizes, block(8, 24));
        // Several images of a part, and several parts.
        compare(ConvolutionGradient { images: 3, ..of }, sizes, block(8, 24));
        let images = ConvolutionGradient { images: 2, ..of };
        compare(images, Sizes { parts: 2, ..sizes }, block(8, 24));
        // Inputs in several blocks.
        let wide = Sizes {
            inputs: 256,
            ..sizes
        };
        compare(of, wide, block(8, 128));
    }

    /// Sums that are kept apart from a result in bf16, of numbers so small that nothing is rounded.
    #[test]
    fn a_result_in_bf16_has_the_same_sums() {
        let of = ConvolutionGradient {
            height: 4,
            width: 16,
            images: 2,
            result: DType::BF16,
            features: Features::UNKNOWN,
        };
        let sizes = Sizes {
            parts: 1,
            inputs: 16,
            outputs: 16,
        };
        let all = of.images * of.height * of.width;
        let x = vec![1.0; all * sizes.inputs];
        let gradient = vec![1.0; all * sizes.outputs];
        let block = Block {
            image_rows: 4,
            columns: 16,
        };
        let kernel = of.kernel(block, sizes);
        let found = kernel.evaluate(&[x.clone(), x.clone(), x.clone(), gradient.clone()]);
        assert!(found == expected(&of, sizes, &x, &gradient));
    }

    #[test]
    fn blocks_fit_the_memory_and_divide_what_there_is() {
        let of = |height: usize, images: usize| ConvolutionGradient {
            height,
            width: height,
            images,
            result: DType::F32,
            features: Features::UNKNOWN,
        };
        for (side, inputs, outputs) in [(64, 320, 320), (128, 1024, 320), (64, 640, 640)] {
            let sizes = Sizes {
                parts: 1,
                inputs,
                outputs,
            };
            let of = of(side, 2);
            let block = of.block(sizes).unwrap();
            let most = most_bytes(of.features.kernel_memory);
            assert!(of.bytes(block, sizes) <= most, "{sizes:?}");
            assert!(side.is_multiple_of(block.image_rows) && inputs.is_multiple_of(block.columns));
            assert!(of.pixels(block).is_multiple_of(LANES));
        }
        // Rows that are no tiles, and inputs of one block that is too large.
        assert!(!of(40, 1).fits(320, 320));
        assert!(!of(64, 1).fits(960, 640));
    }
}
