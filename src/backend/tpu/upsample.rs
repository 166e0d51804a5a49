//! Images of twice the height and width. Two rows of bf16 share the lanes of a register, so that a row twice is its own bits
//! twice. The compiler's operations take 1,845,000 cycles on v5e for 64x64x640 and two images, and a reshape that is not
//! counted; reading and writing takes 97,000.

use crate::dtype::DType;
use crate::graph::{Batch, InferError, constraint};
use crate::shape::Shape;

use super::call::KernelCall;
use super::channels::TILE;
use super::mosaic::{Kernel, LANES, Place, VMEM_BYTES, Window};

/// Nearest upsampling: each pixel of `bf16[batch, rows * width, channels]` becomes two in each of two rows, `bf16[batch,
/// 4 * rows * width, channels]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Upsample {
    /// Pixels of a row of the operand.
    pub width: usize,
}

impl Upsample {
    /// Whether a row makes whole tiles of which a core can hold what they become.
    pub fn fits(self, channels: usize) -> bool {
        let row = 2 * self.width * channels.next_multiple_of(LANES);
        // Of the operand one row, of the result four; each twice.
        let bytes = 2 * (1 + 4) * row;
        self.width > 0 && self.width.is_multiple_of(TILE) && channels > 0 && bytes <= VMEM_BYTES / 2
    }

    fn kernel(self, [batch, pixels, channels]: [usize; 3]) -> Kernel {
        let window = |scale: usize| Window {
            dtype: DType::BF16,
            array: [batch, scale * pixels, channels],
            block: [scale * self.width, channels],
            index: [Some(0), Some(1), None],
            place: Place::Own,
            first_column: 0,
        };
        let mut kernel = Kernel::new(vec![batch, pixels / self.width], vec![window(1), window(4)]);
        kernel.repeat(self.width / TILE, Vec::new(), |k, counter, _| {
            let from = k.row_of(counter, TILE, 0);
            let x = k.load(0, from, TILE);
            let twice = k.interleave(x, x);
            for row in [0, 2 * self.width] {
                let to = k.row_of(counter, 2 * TILE, row);
                k.store_at(twice, to, 0);
            }
            Vec::new()
        });
        kernel
    }

    fn sizes(self, operands: &[&Shape]) -> Option<[usize; 3]> {
        let &[x] = operands else {
            return None;
        };
        let sizes: [usize; 3] = x.dims[..].try_into().ok()?;
        let fits = x.dtype == DType::BF16 && self.fits(sizes[2]);
        (fits && sizes[1].is_multiple_of(self.width)).then_some(sizes)
    }
}

impl KernelCall for Upsample {
    fn name(&self) -> &'static str {
        "upsample_nearest_2x"
    }

    fn batch(&self, operands: &[&Shape]) -> Option<Batch> {
        Some(Batch::first(operands.len()))
    }

    fn kernel_of(&self, operands: &[&Shape]) -> Option<Kernel> {
        self.sizes(operands).map(|sizes| self.kernel(sizes))
    }

    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let Some([batch, pixels, channels]) = self.sizes(operands) else {
            let found: Vec<String> = operands.iter().map(ToString::to_string).collect();
            return Err(constraint(
                "upsampling kernel",
                format!(
                    "takes bf16[batch, pixels, channels] of rows of {} pixels, a multiple of {TILE}, not {}",
                    self.width,
                    found.join(", ")
                ),
            ));
        };
        Ok(Shape::new(DType::BF16, [batch, 4 * pixels, channels]))
    }
}
