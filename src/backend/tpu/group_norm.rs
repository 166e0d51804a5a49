//! The derivative of group norms of images `bf16[batch, rows, channels]`: one pass for sums over the pixels of each channel, one for the
//! gradient of the image. What is between is a few numbers for each channel.

use std::ops::Range;

use crate::dtype::DType;
use crate::graph::{Batch, InferError};
use crate::shape::Shape;

use super::call::{KernelCall, refused};
use super::channels::{TILE, accumulate, block_rows, each_tile, image, logistic, number_of, parts};
use super::mosaic::{Kernel, Place, Value as KernelValue, Window};

/// The windows of the gradient of the norm, and of numbers for each channel.
const GRADIENT: usize = 1;
const OF_CHANNELS: usize = 2;

/// What a kernel finds of the derivative of `n = x * scale + shift`, where each channel of each image has its scale and shift.
///
/// Operands: x and the gradient of the norm, `bf16[batch, rows, channels]`, then numbers of channels, `f32[batch, count, channels]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finds {
    /// Sums of the gradient of `n` over each channel, then of its product with x, `f32[batch, 32, channels]`: 16 of each, of every 16th
    /// pixel. Numbers of channels: scale and shift.
    Sums,
    /// The gradient of x, which is `scale * gradient of n + slope * x + offset`. Numbers of channels: scale, shift, slope and offset.
    GradientOfX,
}

/// A kernel of the derivative of a group norm, with the SiLU behind it if `silu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupNormGradient {
    pub finds: Finds,
    pub silu: bool,
}

impl GroupNormGradient {
    /// Whether rows make whole tiles of which a core can hold some.
    pub fn fits(self, rows: usize, channels: usize) -> bool {
        self.block([rows, channels]).is_some()
    }

    fn block(self, sizes: [usize; 2]) -> Option<usize> {
        let images = match self.finds {
            Finds::Sums => 2,
            Finds::GradientOfX => 3,
        };
        block_rows(sizes, images)
    }

    /// Numbers of a channel.
    fn numbers(self) -> usize {
        match self.finds {
            Finds::Sums => 2,
            Finds::GradientOfX => 4,
        }
    }

    fn result(self, [batch, rows, channels]: [usize; 3]) -> Shape {
        match self.finds {
            Finds::Sums => Shape::new(DType::F32, [batch, 2 * TILE, channels]),
            Finds::GradientOfX => Shape::new(DType::BF16, [batch, rows, channels]),
        }
    }

    fn kernel(self, sizes: [usize; 3]) -> Option<Kernel> {
        let [batch, rows, channels] = sizes;
        let block = self.block([rows, channels])?;
        let of_channels = |numbers: usize| Window {
            dtype: DType::F32,
            array: [batch, numbers, channels],
            block: [numbers, channels],
            index: [Some(0), None, None],
            place: Place::Own,
            first_column: 0,
        };
        let result = match self.finds {
            Finds::Sums => of_channels(2 * TILE),
            Finds::GradientOfX => image(sizes, block),
        };
        let image = image(sizes, block);
        let windows = vec![image, image, of_channels(self.numbers()), result];
        let steps = rows / block;
        let mut kernel = Kernel::new(vec![batch, steps], windows);
        match self.finds {
            Finds::Sums => self.add(&mut kernel, block, steps, channels),
            Finds::GradientOfX => self.gradient(&mut kernel, block, channels),
        }
        Some(kernel)
    }

    fn add(self, k: &mut Kernel, block: usize, steps: usize, channels: usize) {
        accumulate(k, [2 * TILE, channels], steps, |k, part, before| {
            let numbers = self.numbers_of(k, part);
            each_tile(k, block, part, before, |k, sums, x, row| {
                let gradient = self.gradient_of_norm(k, part, x, row, &numbers);
                let product = k.mul(gradient, x);
                vec![k.add(sums[0], gradient), k.add(sums[1], product)]
            })
        });
    }

    fn gradient(self, k: &mut Kernel, block: usize, channels: usize) {
        for part in parts(channels) {
            let numbers = self.numbers_of(k, &part);
            each_tile(k, block, &part, Vec::new(), |k, _, x, row| {
                let gradient = self.gradient_of_norm(k, &part, x, row, &numbers);
                let &[scale, _, slope, offset] = &numbers[..] else {
                    return Vec::new();
                };
                let scaled = k.mul(gradient, scale);
                let of_x = k.mul(x, slope);
                let sum = k.add(scaled, of_x);
                let sum = k.add(sum, offset);
                let sum = k.convert(sum, DType::BF16);
                k.store_at(sum, row, part.start);
                Vec::new()
            });
        }
    }

    /// The numbers of some channels, each for a tile of pixels.
    fn numbers_of(self, k: &mut Kernel, part: &Range<usize>) -> Vec<KernelValue> {
        let numbers = 0..self.numbers();
        numbers
            .map(|number| number_of(k, OF_CHANNELS, number, part))
            .collect()
    }

    /// The gradient of `x * scale + shift` of a tile: that of the norm, times the derivative of SiLU, which reads what it is of in bf16.
    fn gradient_of_norm(
        self,
        k: &mut Kernel,
        part: &Range<usize>,
        x: KernelValue,
        row: KernelValue,
        numbers: &[KernelValue],
    ) -> KernelValue {
        let gradient = k.load_part(GRADIENT, row, TILE, part.clone());
        let gradient = k.convert(gradient, DType::F32);
        if !self.silu {
            return gradient;
        }
        let scaled = k.mul(x, numbers[0]);
        let y = k.add(scaled, numbers[1]);
        let y = k.convert(y, DType::BF16);
        let y = k.convert(y, DType::F32);
        // l * (1 + y * (1 - l)), where l is the logistic function of y.
        let logistic = logistic(k, y);
        let size = k.size(y);
        let one = k.splat(DType::F32, size, 1.0);
        let rest = k.sub(one, logistic);
        let slope = k.mul(y, rest);
        let slope = k.add(slope, one);
        let slope = k.mul(slope, logistic);
        k.mul(gradient, slope)
    }

    fn sizes(self, operands: &[&Shape]) -> Option<[usize; 3]> {
        let &[x, gradient, of_channels] = operands else {
            return None;
        };
        let [batch, rows, channels]: [usize; 3] = x.dims[..].try_into().ok()?;
        let numbers = Shape::new(DType::F32, [batch, self.numbers(), channels]);
        let takes = x.dtype == DType::BF16 && gradient == x && *of_channels == numbers;
        (takes && self.fits(rows, channels)).then_some([batch, rows, channels])
    }
}

impl KernelCall for GroupNormGradient {
    fn name(&self) -> &'static str {
        match (self.finds, self.silu) {
            (Finds::Sums, false) => "group_norm_gradient_sums",
            (Finds::Sums, true) => "group_norm_silu_gradient_sums",
            (Finds::GradientOfX, false) => "group_norm_gradient",
            (Finds::GradientOfX, true) => "group_norm_silu_gradient",
        }
    }

    fn batch(&self, operands: &[&Shape]) -> Option<Batch> {
        Some(Batch::first(operands.len()))
    }

    fn kernel_of(&self, operands: &[&Shape]) -> Option<Kernel> {
        self.sizes(operands).and_then(|sizes| self.kernel(sizes))
    }

    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let sizes = self.sizes(operands);
        let sizes = sizes.ok_or_else(|| refused("group norm's derivative", self, operands))?;
        Ok(self.result(sizes))
    }

    fn transcendentals(&self, operands: &[&Shape], _: &Shape) -> u64 {
        match self.silu {
            true => 2 * operands[0].count() as u64,
            false => 0,
        }
    }
}
