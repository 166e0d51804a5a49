//! Convolutions of images whose pixels are repeated, as convolutions of the images themselves. [`crate::backend::doubled`] says
//! why that takes 4 products in place of 9.

use crate::dtype::DType;
use crate::graph::{Batch, InferError};
use crate::shape::Shape;

use super::super::Features;
use super::super::call::{KernelCall, refused};
use super::super::mosaic::{Kernel, LANES, Place, Value as KernelValue, Window, most_bytes};
use super::{Block, Convolution, IMAGES, Sizes, TILE_ROWS, are_of, blocks};

/// Products with weights of their own: of the result's even and odd rows two each, with those of columns on the left, of even ones, of
/// odd ones and on the right.
const PRODUCTS: usize = 16;
/// Those of a row of the kernel.
const PLACES: usize = 4;
/// The window of weights, and that of biases.
const WEIGHTS: usize = IMAGES;
const BIASES: usize = IMAGES + 1;

/// The 3x3 convolution in bf16 of an image with each pixel twice in both directions, with zeros around it to keep its size, plus the
/// bias.
///
/// Operands: the image before it is doubled, three times, `bf16[batch, height * width, inputs]`; weights `bf16[1, 16 * outputs, inputs]`,
/// for each block of [`DoubledConvolution::columns`] outputs those of each product, one after the other; biases `f32[batch, 1,
/// outputs]`. The result is `bf16[batch, 4 * height * width, outputs]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DoubledConvolution {
    /// Of the image before it is doubled.
    pub height: usize,
    pub width: usize,
    /// Of the chip.
    pub features: Features,
}

impl DoubledConvolution {
    /// Outputs of a block. `None` where no block fits.
    pub fn columns(&self, inputs: usize, outputs: usize) -> Option<usize> {
        let sizes = Sizes {
            batch: 1,
            inputs,
            outputs,
        };
        self.block(sizes).map(|block| block.columns)
    }

    /// Of the blocks that fit the core's memory, and for which the matrix units multiply the fewest columns, the one for which the
    /// least is read.
    fn block(&self, sizes: Sizes) -> Option<Block> {
        let fills_tiles = self.width > 0
            && self.width.is_multiple_of(TILE_ROWS[0])
            && [sizes.inputs, sizes.outputs]
                .iter()
                .all(|size| *size > 0 && size.is_multiple_of(LANES));
        let most = most_bytes(self.features.kernel_memory);
        let of_image = Convolution::in_bf16(self.height, self.width, self.features);
        let all = blocks(self.height, self.width, sizes.outputs);
        let fitting = all.filter(|block| fills_tiles && self.bytes(*block, sizes) <= most);
        fitting.min_by_key(|block| {
            let rows = self.height / block.image_rows;
            let image = rows * of_image.rows_seen(*block) * self.width * sizes.inputs;
            let weights = match block.columns == sizes.outputs {
                true => 0,
                false => rows * PRODUCTS * sizes.inputs * sizes.outputs,
            };
            let columns = self
                .features
                .multiplied_columns(sizes.outputs, block.columns);
            (columns, image + weights)
        })
    }

    /// Bytes of the core's memory: windows, the rows of the image, sums of four places of which two are moved, and what is made of
    /// them.
    fn bytes(&self, block: Block, sizes: Sizes) -> usize {
        let of_image = Convolution::in_bf16(self.height, self.width, self.features);
        let windows = Kernel::new(Vec::new(), self.windows(block, sizes));
        let pixels = block.image_rows * self.width;
        let image = 2 * of_image.rows_seen(block) * self.width * sizes.inputs;
        let rows = (PLACES + 3) * pixels + 4 * TILE_ROWS[1];
        let sums = 4 * rows * block.columns;
        windows.window_bytes() + image + sums + of_image.copied(block, sizes.inputs)
    }

    fn windows(&self, block: Block, sizes: Sizes) -> Vec<Window> {
        let Sizes {
            batch,
            inputs,
            outputs,
        } = sizes;
        let of_image =
            Convolution::in_bf16(self.height, self.width, self.features).windows(block, sizes);
        let along_columns = (outputs > block.columns).then_some(2);
        let weights = Window {
            dtype: DType::BF16,
            array: [1, PRODUCTS * outputs, inputs],
            block: [PRODUCTS * block.columns, inputs],
            index: [None, along_columns, None],
            place: Place::Own,
            first_column: 0,
        };
        let biases = Window {
            dtype: DType::F32,
            array: [batch, 1, outputs],
            block: [1, block.columns],
            index: [Some(0), None, along_columns],
            ..weights
        };
        let result = Window {
            array: [batch, 4 * self.height * self.width, outputs],
            block: [4 * block.image_rows * self.width, block.columns],
            index: [Some(0), Some(1), along_columns],
            ..weights
        };
        let images = of_image.into_iter().take(IMAGES);
        images.chain([weights, biases, result]).collect()
    }

    fn kernel(&self, block: Block, sizes: Sizes) -> Kernel {
        let grid = vec![
            sizes.batch,
            self.height / block.image_rows,
            sizes.outputs / block.columns,
        ];
        let mut kernel = Kernel::new(grid, self.windows(block, sizes));
        kernel.memory = self.features.kernel_memory;
        self.step(&mut kernel, block, sizes);
        kernel
    }

    fn step(&self, k: &mut Kernel, block: Block, sizes: Sizes) {
        let of_image = Convolution::in_bf16(self.height, self.width, self.features);
        let columns = block.columns;
        let size = [block.image_rows * self.width, columns];
        let rows_seen = of_image.rows_seen(block) * self.width;
        let image = k.scratch(DType::BF16, [rows_seen, sizes.inputs]);
        // A tile of rows before and behind the sums.
        let moved = [size[0] + 2 * TILE_ROWS[1], columns];
        let [left, right] = [(); 2].map(|()| k.scratch(DType::F32, moved));
        match sizes.outputs > columns {
            false => of_image.keep_image(k, block.image_rows, image),
            true => k.when_first(2, |k| of_image.keep_image(k, block.image_rows, image)),
        }
        // The result's even rows, then its odd ones.
        k.repeat(2, Vec::new(), |k, odd, _| {
            let sums = |k: &mut Kernel, place: usize| {
                let zero = k.splat(DType::F32, size, 0.0);
                (0..2).fold(zero, |sums, row| {
                    let from = k.row_of(odd, self.width, row * self.width);
                    let x = k.kept_at(image, from, 0, [size[0], sizes.inputs]);
                    let first = (row * PLACES + place) * columns;
                    let first = k.row_of(odd, 2 * PLACES * columns, first);
                    let weights = k.load_part(WEIGHTS, first, columns, 0..sizes.inputs);
                    k.matmul_transposed(x, weights, sums)
                })
            };
            let [of_left, even, odd_columns, of_right] = [0, 1, 2, 3].map(|place| sums(k, place));
            let last = self.width as f64 - 1.0;
            let of_left = of_image.moved(k, left, of_left, -1, 0.0);
            let of_right = of_image.moved(k, right, of_right, 1, last);
            let first = k.row(0);
            let bias = k.load(BIASES, first, 1);
            let bias = k.broadcast_row(bias, size[0]);
            let rounded = |k: &mut Kernel, own: KernelValue, moved: KernelValue| {
                let sums = k.add(own, moved);
                let y = k.add(sums, bias);
                k.convert(y, DType::BF16)
            };
            let even = rounded(k, even, of_left);
            let odd_columns = rounded(k, odd_columns, of_right);
            let y = k.interleave(even, odd_columns);
            let width = 2 * self.width;
            for row in 0..block.image_rows {
                let part = k.slice_rows(y, row * width, width);
                let to = k.row_of(odd, width, 2 * row * width);
                k.store_at(part, to, 0);
            }
            Vec::new()
        });
    }

    /// The sizes that operands tell.
    fn sizes(&self, operands: &[&Shape]) -> Option<Sizes> {
        let &[image, _, _, _, biases] = operands else {
            return None;
        };
        let sizes = Sizes {
            batch: *image.dims.first()?,
            inputs: *image.dims.get(2)?,
            outputs: *biases.dims.get(2)?,
        };
        let block = Block {
            image_rows: 1,
            columns: sizes.outputs,
        };
        let windows = self.windows(block, sizes);
        let fits = are_of(&windows, operands);
        (fits && self.block(sizes).is_some()).then_some(sizes)
    }
}

impl KernelCall for DoubledConvolution {
    fn name(&self) -> &'static str {
        "doubled_convolution"
    }

    fn batch(&self, operands: &[&Shape]) -> Option<Batch> {
        let mut batch = Batch::first(operands.len());
        // Every image has the same kernel.
        *batch.operands.get_mut(WEIGHTS)? = None;
        Some(batch)
    }

    fn kernel_of(&self, operands: &[&Shape]) -> Option<Kernel> {
        let sizes = self.sizes(operands)?;
        Some(self.kernel(self.block(sizes)?, sizes))
    }

    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let sizes = self.sizes(operands);
        let sizes = sizes.ok_or_else(|| refused("doubled convolution kernel", self, operands))?;
        let dims = [sizes.batch, 4 * self.height * self.width, sizes.outputs];
        Ok(Shape::new(DType::BF16, dims))
    }

    fn flops(&self, operands: &[&Shape], result: &Shape) -> u64 {
        let terms = PLACES * operands[0].dims[2];
        (2 * result.count() as u64).saturating_mul(terms as u64)
    }
}
