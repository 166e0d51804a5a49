//! Convolutions with few outputs: a decoder's last one has three, for the colours. As columns they would fill three of the matrix units'
//! 128, and three of a register's lanes. Here outputs are rows and pixels are columns, and one product gives all nine places of the
//! kernel, whose sums then move by pixels.

use crate::dtype::DType;
use crate::graph::{Batch, InferError};
use crate::shape::Shape;

use super::super::Features;
use super::super::call::{KernelCall, refused};
use super::super::mosaic::{
    Kernel, LANES, Place, Scratch, Value as KernelValue, Window, most_bytes,
};
use super::{BEFORE, BEHIND, Block, Convolution, IMAGES, Sizes, TILE_ROWS, are_of};

/// Pixels of a block, at most.
const MOST_PIXELS: usize = 8192;

/// The 3x3 convolution in bf16 of an image with a stride of 1 and zeros around it to keep its size, with [`NarrowConvolution::ROWS`] outputs at most.
///
/// Operands: the image three times, `bf16[batch, height * width, inputs]`, and weights `bf16[1, 80, inputs]`: for each row and each column
/// of the kernel 8 rows of outputs. The result is `f32[batch, 8, height * width]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NarrowConvolution {
    pub height: usize,
    pub width: usize,
    /// Of the chip.
    pub features: Features,
}

impl NarrowConvolution {
    /// Rows of the result, those of an `f32` tile: outputs at most.
    pub const ROWS: usize = TILE_ROWS[1];
    /// Rows of the kernel's places: those of nine tiles, filled up to whole tiles of bf16.
    pub const WEIGHTS: usize = 9 * NarrowConvolution::ROWS + 8;

    /// Whether a core can hold what the kernel works with.
    pub fn fits(&self, inputs: usize) -> bool {
        self.image_rows(Sizes {
            batch: 1,
            inputs,
            outputs: NarrowConvolution::ROWS,
        })
        .is_some()
    }

    /// Rows of the image of the largest block that fits: rows around a block are read once more.
    fn image_rows(&self, sizes: Sizes) -> Option<usize> {
        let fills_lanes = self.width > 0 && self.width.is_multiple_of(LANES) && sizes.inputs > 0;
        let most = most_bytes(self.features.kernel_memory);
        let largest = self.height.min(MOST_PIXELS / self.width.max(1));
        let mut rows = (1..=largest).rev();
        rows.find(|rows| {
            fills_lanes && self.height.is_multiple_of(*rows) && self.bytes(*rows, sizes) <= most
        })
    }

    /// Bytes of the core's memory: windows, sums of the kernel's places, and as much again for what is made of them.
    fn bytes(&self, image_rows: usize, sizes: Sizes) -> usize {
        let windows = Kernel::new(Vec::new(), self.windows(image_rows, sizes));
        windows.window_bytes() + 2 * 4 * NarrowConvolution::WEIGHTS * (image_rows + 2) * self.width
    }

    fn windows(&self, image_rows: usize, sizes: Sizes) -> Vec<Window> {
        let Sizes { batch, inputs, .. } = sizes;
        let block = Block {
            image_rows,
            columns: NarrowConvolution::ROWS,
        };
        let of_image = Convolution::in_bf16(self.height, self.width, self.features);
        let images = of_image.windows(block, sizes).into_iter().take(IMAGES);
        let weights = Window {
            dtype: DType::BF16,
            array: [1, NarrowConvolution::WEIGHTS, inputs],
            block: [NarrowConvolution::WEIGHTS, inputs],
            index: [None; 3],
            place: Place::Own,
            first_column: 0,
        };
        let result = Window {
            dtype: DType::F32,
            array: [batch, NarrowConvolution::ROWS, self.height * self.width],
            block: [NarrowConvolution::ROWS, image_rows * self.width],
            index: [Some(0), None, Some(1)],
            ..weights
        };
        images.chain([weights, result]).collect()
    }

    fn kernel(&self, image_rows: usize, sizes: Sizes) -> Kernel {
        let grid = vec![sizes.batch, self.height / image_rows];
        let mut kernel = Kernel::new(grid, self.windows(image_rows, sizes));
        kernel.memory = self.features.kernel_memory;
        self.step(&mut kernel, image_rows);
        kernel
    }

    fn step(&self, k: &mut Kernel, image_rows: usize) {
        let width = self.width;
        // The sums of each place for each row of the image, those before and behind the block included.
        let columns = (image_rows + 2) * width;
        let sums = k.scratch(DType::F32, [NarrowConvolution::WEIGHTS, columns]);
        let size = [NarrowConvolution::WEIGHTS, width];
        let first = k.row(0);
        let weights = k.load(IMAGES, first, NarrowConvolution::WEIGHTS);
        let own = (0..image_rows).map(|row| (0, row * width));
        for (at, (window, row)) in [(BEFORE, 0)]
            .into_iter()
            .chain(own)
            .chain([(BEHIND, 0)])
            .enumerate()
        {
            let row = k.row(row);
            let x = k.load(window, row, width);
            let zero = k.splat(DType::F32, size, 0.0);
            let of_row = k.matmul_transposed(weights, x, zero);
            k.keep(sums, of_row, [0, at * width]);
        }
        let last = self.height / image_rows - 1;
        for (place, at) in [(0, 0), (last, image_rows + 1)] {
            // Outside the image are zeros.
            k.when(1, place, |k| {
                let zeros = k.splat(DType::F32, size, 0.0);
                k.keep(sums, zeros, [0, at * width]);
            });
        }
        for row in 0..image_rows {
            let y = self.row_of_result(k, sums, row);
            k.store(y, [0, row * width]);
        }
    }

    /// A row of the image in the result: of each column of the kernel the sums over its rows, which stand in the place of the pixels that
    /// see them.
    fn row_of_result(&self, k: &mut Kernel, sums: Scratch, row: usize) -> KernelValue {
        let size = [NarrowConvolution::ROWS, self.width];
        let [left, own, right] = [0, 1, 2].map(|column| {
            let of_rows = [0, 1, 2].map(|kernel_row| {
                let place = (3 * kernel_row + column) * NarrowConvolution::ROWS;
                k.kept_part(sums, [place, (row + kernel_row) * self.width], size)
            });
            let [above, own, below] = of_rows;
            let sum = k.add(above, own);
            k.add(sum, below)
        });
        let place = k.columns(size);
        let none = k.splat(DType::F32, size, 0.0);
        let [first, last] = [0, self.width - 1].map(|end| k.splat(DType::S32, size, end as f64));
        let left = k.rotate(left, 1);
        let has_left = k.less(first, place);
        let left = k.select(has_left, left, none);
        let right = k.rotate(right, self.width - 1);
        let has_right = k.less(place, last);
        let right = k.select(has_right, right, none);
        let y = k.add(own, left);
        k.add(y, right)
    }

    /// The sizes that operands tell.
    fn sizes(&self, operands: &[&Shape]) -> Option<(usize, Sizes)> {
        let &[image, _, _, _] = operands else {
            return None;
        };
        let sizes = Sizes {
            batch: *image.dims.first()?,
            inputs: *image.dims.get(2)?,
            outputs: NarrowConvolution::ROWS,
        };
        let image_rows = self.image_rows(sizes)?;
        let windows = self.windows(image_rows, sizes);
        let fits = are_of(&windows, operands);
        fits.then_some((image_rows, sizes))
    }
}

impl KernelCall for NarrowConvolution {
    fn name(&self) -> &'static str {
        "narrow_convolution"
    }

    fn batch(&self, operands: &[&Shape]) -> Option<Batch> {
        let mut batch = Batch::first(operands.len());
        // Every image has the same kernel.
        *batch.operands.get_mut(IMAGES)? = None;
        Some(batch)
    }

    fn kernel_of(&self, operands: &[&Shape]) -> Option<Kernel> {
        let (image_rows, sizes) = self.sizes(operands)?;
        Some(self.kernel(image_rows, sizes))
    }

    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let sizes = self.sizes(operands);
        let (_, sizes) =
            sizes.ok_or_else(|| refused("narrow convolution kernel", self, operands))?;
        let dims = [
            sizes.batch,
            NarrowConvolution::ROWS,
            self.height * self.width,
        ];
        Ok(Shape::new(DType::F32, dims))
    }

    fn flops(&self, operands: &[&Shape], result: &Shape) -> u64 {
        let terms = 9 * operands[0].dims[2];
        (2 * result.count() as u64).saturating_mul(terms as u64)
    }
}
