//! Layer norms of training steps. The compiler's products read and write some of what norms need on the way, but what is found of each row
//! it computes in operations of their own, of at least 1.2 us on a v6e; with its derivative a norm has seven.

use crate::dtype::DType;
use crate::graph::{Batch, InferError};
use crate::shape::Shape;

use super::arithmetic::blocks_of_rows;
use super::call::{KernelCall, refused};
use super::mosaic::{Kernel, LANES, Place, Scratch, Value as KernelValue, Window, most_bytes};

/// Rows of a tile of bf16.
const TILE_ROWS: usize = 16;
/// Rows of a block, at most. On a v5p 1,024 rows of 1,280 columns are normalized in 8,047 cycles if two tiles are worked on side by side,
/// in 5,631 if four are, 5,042 eight, 4,525 sixteen; their memory gives and takes them in 3,324.
const MOST_ROWS: usize = 256;

/// What a kernel computes of a layer norm over the columns of `x` `bf16[groups, rows, columns]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finds {
    /// The norm. Operands: x, weight and bias `f32[1, 1, columns]`.
    Norm,
    /// The gradient of x. Operands: x, the weight, the gradient of the norm. If `added`, rounded and added to another gradient of x, the last
    /// operand.
    GradientOfX { added: bool },
    /// The gradients of weight and bias, `f32[groups, 32, columns]`: of each group of rows 16 sums for the weight, then 16 for the bias,
    /// each of every 16th row. Operands: x, the gradient of the norm.
    GradientsOfWeights,
}

/// A kernel for a layer norm, or of its derivative. The results but the last one's are of x's shape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerNorm {
    pub finds: Finds,
    pub epsilon: f64,
    /// Bytes of the core's memory that it may take.
    pub memory: usize,
}

/// Rows that are normalized.
struct Centered {
    /// Less their means.
    centered: KernelValue,
    /// One over their deviations, `[rows, 1]`.
    inverse: KernelValue,
}

impl LayerNorm {
    /// Whether the kernel takes groups of so many rows: whole tiles, that fit the core's memory.
    pub fn fits(self, rows: usize, columns: usize) -> bool {
        self.block([1, rows, columns]).is_some()
    }

    /// Rows of the largest block that fits the core's memory.
    fn block(self, sizes: [usize; 3]) -> Option<usize> {
        let [_, rows, columns] = sizes;
        if sizes.contains(&0) || !columns.is_multiple_of(LANES) {
            return None;
        }
        blocks_of_rows(rows, TILE_ROWS, MOST_ROWS).find(|block| {
            let mut kernel = Kernel::new(Vec::new(), self.windows(sizes, *block));
            self.sums(&mut kernel, columns);
            kernel.window_bytes() + kernel.scratch_bytes() <= most_bytes(self.memory)
        })
    }

    fn windows(self, [groups, rows, columns]: [usize; 3], block: usize) -> Vec<Window> {
        let own = Window {
            dtype: DType::BF16,
            array: [groups, rows, columns],
            block: [block, columns],
            index: [Some(0), Some(1), None],
            place: Place::Own,
            first_column: 0,
        };
        let vector = Window {
            dtype: DType::F32,
            array: [1, 1, columns],
            block: [1, columns],
            index: [None; 3],
            ..own
        };
        let sums = Window {
            dtype: DType::F32,
            array: [groups, 2 * TILE_ROWS, columns],
            block: [2 * TILE_ROWS, columns],
            index: [Some(0), None, None],
            ..own
        };
        match self.finds {
            Finds::Norm => vec![own, vector, vector, own],
            Finds::GradientOfX { added } => {
                let gradients = 1 + usize::from(added);
                [vec![own, vector], vec![own; gradients + 1]].concat()
            }
            Finds::GradientsOfWeights => vec![own, own, sums],
        }
    }

    /// The memory of the sums for weight and bias.
    fn sums(self, k: &mut Kernel, columns: usize) -> Option<[Scratch; 2]> {
        match self.finds {
            Finds::Norm | Finds::GradientOfX { .. } => None,
            Finds::GradientsOfWeights => {
                Some([0, 1].map(|_| k.scratch(DType::F32, [TILE_ROWS, columns])))
            }
        }
    }

    fn kernel(self, sizes: [usize; 3], block: usize) -> Kernel {
        let [groups, rows, columns] = sizes;
        let mut kernel = Kernel::new(vec![groups, rows / block], self.windows(sizes, block));
        kernel.memory = self.memory;
        let sums = self.sums(&mut kernel, columns);
        if let Some(sums) = sums {
            kernel.when_first(1, |k| {
                let zero = k.splat(DType::F32, [TILE_ROWS, columns], 0.0);
                for sum in sums {
                    k.keep(sum, zero, [0, 0]);
                }
            });
        }
        // Side by side: the sums of one row wait for nothing of another.
        for first in (0..block).step_by(TILE_ROWS) {
            let row = kernel.row(first);
            self.tile(&mut kernel, row, columns, sums);
        }
        if let Some(sums) = sums {
            kernel.when(1, rows / block - 1, |k| {
                for (place, sum) in sums.into_iter().enumerate() {
                    let sum = k.kept(sum);
                    k.store(sum, [place * TILE_ROWS, 0]);
                }
            });
        }
        kernel
    }

    /// What is found of a tile of rows.
    fn tile(self, k: &mut Kernel, row: KernelValue, columns: usize, sums: Option<[Scratch; 2]>) {
        let x = wide(k, 0, row);
        let Centered { centered, inverse } = self.centered(k, x, columns);
        match (self.finds, sums) {
            (Finds::Norm, _) => {
                let inverse = k.broadcast(inverse, columns);
                let y = k.mul(centered, inverse);
                let [weight, bias] = [1, 2].map(|window| vector(k, window));
                let y = k.mul(y, weight);
                let y = k.add(y, bias);
                let y = k.convert(y, DType::BF16);
                k.store_at(y, row, 0);
            }
            (Finds::GradientOfX { added }, _) => {
                let gradient = wide(k, 2, row);
                let weight = vector(k, 1);
                let gradient = k.mul(gradient, weight);
                let mean = mean(k, gradient, columns);
                let product = k.mul(gradient, centered);
                let along = self::mean(k, product, columns);
                // The part along the normalized row, of which `inverse` belongs to it, and to the product.
                let along = k.mul(along, inverse);
                let along = k.mul(along, inverse);
                let [mean, along, inverse] =
                    [mean, along, inverse].map(|x| k.broadcast(x, columns));
                let along = k.mul(centered, along);
                let y = k.sub(gradient, mean);
                let y = k.sub(y, along);
                let y = k.mul(y, inverse);
                let mut y = k.convert(y, DType::BF16);
                if added {
                    let rounded = k.convert(y, DType::F32);
                    let other = wide(k, 3, row);
                    let sum = k.add(rounded, other);
                    y = k.convert(sum, DType::BF16);
                }
                k.store_at(y, row, 0);
            }
            (Finds::GradientsOfWeights, sums) => {
                let gradient = wide(k, 1, row);
                let inverse = k.broadcast(inverse, columns);
                let normalized = k.mul(centered, inverse);
                let of_weight = k.mul(gradient, normalized);
                for (sum, part) in sums.into_iter().flatten().zip([of_weight, gradient]) {
                    let before = k.kept(sum);
                    let after = k.add(before, part);
                    k.keep(sum, after, [0, 0]);
                }
            }
        }
    }

    fn centered(self, k: &mut Kernel, x: KernelValue, columns: usize) -> Centered {
        let mean = mean(k, x, columns);
        let mean = k.broadcast(mean, columns);
        let centered = k.sub(x, mean);
        let square = k.mul(centered, centered);
        let variance = self::mean(k, square, columns);
        let epsilon = k.splat(DType::F32, k.size(variance), self.epsilon);
        let variance = k.add(variance, epsilon);
        let inverse = k.rsqrt(variance);
        Centered { centered, inverse }
    }

    /// Groups, rows and columns.
    fn sizes(self, operands: &[&Shape]) -> Option<[usize; 3]> {
        let x = *operands.first()?;
        let &[groups, rows, columns] = &x.dims[..] else {
            return None;
        };
        let vector = Shape::new(DType::F32, [1, 1, columns]);
        let expected: &[&Shape] = match self.finds {
            Finds::Norm => &[x, &vector, &vector],
            Finds::GradientOfX { added: false } => &[x, &vector, x],
            Finds::GradientOfX { added: true } => &[x, &vector, x, x],
            Finds::GradientsOfWeights => &[x, x],
        };
        (x.dtype == DType::BF16 && operands == expected).then_some([groups, rows, columns])
    }
}

/// Rows of a tile of a window, in `f32`.
fn wide(k: &mut Kernel, window: usize, row: KernelValue) -> KernelValue {
    let x = k.load(window, row, TILE_ROWS);
    k.convert(x, DType::F32)
}

/// A window of one row, in each row of a tile.
fn vector(k: &mut Kernel, window: usize) -> KernelValue {
    let first = k.row(0);
    let row = k.load(window, first, 1);
    k.broadcast_row(row, TILE_ROWS)
}

/// The mean of each row, `[rows, 1]`.
fn mean(k: &mut Kernel, x: KernelValue, columns: usize) -> KernelValue {
    let sum = k.row_sum(x);
    let share = k.splat(DType::F32, k.size(sum), 1.0 / columns as f64);
    k.mul(sum, share)
}

impl KernelCall for LayerNorm {
    fn name(&self) -> &'static str {
        match self.finds {
            Finds::Norm => "layer_norm",
            Finds::GradientOfX { added: false } => "layer_norm_gradient",
            Finds::GradientOfX { added: true } => "layer_norm_added_gradient",
            Finds::GradientsOfWeights => "layer_norm_gradients_of_weights",
        }
    }

    fn batch(&self, _: &[&Shape]) -> Option<Batch> {
        let operands = match self.finds {
            Finds::Norm => vec![Some(0), None, None],
            Finds::GradientOfX { added: false } => vec![Some(0), None, Some(0)],
            Finds::GradientOfX { added: true } => vec![Some(0), None, Some(0), Some(0)],
            Finds::GradientsOfWeights => vec![Some(0); 2],
        };
        Some(Batch {
            operands,
            result: 0,
        })
    }

    fn kernel_of(&self, operands: &[&Shape]) -> Option<Kernel> {
        let sizes = self.sizes(operands)?;
        Some(self.kernel(sizes, self.block(sizes)?))
    }

    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let sizes = self.sizes(operands);
        let Some([groups, rows, columns]) = sizes.filter(|sizes| self.block(*sizes).is_some())
        else {
            return Err(refused("layer norm kernel", self, operands));
        };
        Ok(match self.finds {
            Finds::Norm | Finds::GradientOfX { .. } => {
                Shape::new(DType::BF16, [groups, rows, columns])
            }
            Finds::GradientsOfWeights => Shape::new(DType::F32, [groups, 2 * TILE_ROWS, columns]),
        })
    }
}
