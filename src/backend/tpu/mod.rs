//! The TPU compiler's backend: kernels of this program, as Mosaic text in the module that calls them.

mod arithmetic;
mod attention;
mod attention_gradient;
mod attention_gradients;
mod call;
mod channels;
mod claim;
mod convolution;
mod convolution_gradient;
mod gated;
mod group_norm;
mod heads;
mod layer_norm;
pub mod mosaic;
mod patches;
mod product;
mod rounded;
mod rows;
mod stacks;
mod sums;
mod upsample;
mod widen;

pub use arithmetic::{Arithmetic, StoredWeights};
pub use attention::Attention;
pub use attention_gradient::{AttentionGradient, Side};
pub use attention_gradients::AttentionGradients;
pub use channels::{OfChannels, ScaleShift, SideBySide};
pub use claim::{claim, claim_training, claims_in_training, pad_heads};
pub use convolution::{Added, Convolution, DoubledConvolution, NarrowConvolution, Weights};
pub use convolution_gradient::ConvolutionGradient;
pub use gated::GatedGelu;
pub use group_norm::GroupNormGradient;
pub use heads::Heads;
pub use layer_norm::LayerNorm;
pub use patches::products_of_patches;
pub use product::Product;
pub use rounded::{ColumnRanges, RoundedGradient, RoundedProduct};
pub use rows::in_rows;
pub use stacks::in_stacks;
pub use sums::{SUM_OF_ROWS, products_of_ones};
pub use upsample::Upsample;
pub use widen::Widen;

use crate::quant::{self, Role};
use crate::shape::Shape;

use mosaic::LANES;

/// Rows of a tile of 32 bits.
const TILE_ROWS: usize = 8;
/// Rows of a tile of bfloat16.
const NARROW_TILE_ROWS: usize = 16;

/// What kernels need to know of a chip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// Whether its matrix units multiply int8.
    pub int8: bool,
    /// Whether a device has one core, which then takes all steps of a kernel in order.
    pub one_core: bool,
    /// Whether its matrix units multiply 256 terms and 256 columns at a time, where others have 128. The vector units add up the sums
    /// of more terms.
    pub wide_units: bool,
    /// Whether its vector units compute in bfloat16, with twice as many numbers at a time.
    pub bf16_vectors: bool,
    /// Of a product in int8 whose operands the compiler's own operations round in the step: how much `rows * columns / (rows + columns)`
    /// is where the product saves as much time as rounding takes. `None` where products in int8 save none.
    pub int8_break_even: Option<usize>,
    /// The same of products that kernels round.
    pub int8_kernels_break_even: Option<BreakEven>,
    /// Bytes of a core's own memory that a kernel which asks for more than others may take.
    pub kernel_memory: usize,
}

/// From how many multiply-adds with each rounded element on a training step's product takes no longer in int8 than in bfloat16, by its
/// [`Role`]. With operands of `rows` and `columns` they are `columns` where one operand is a weight, whose rounding rows share, and else
/// `rows * columns / (rows + columns)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakEven {
    pub forward: usize,
    pub dlhs: usize,
    pub drhs: usize,
}

impl Features {
    /// What is safe to assume of a chip that is not known.
    pub const UNKNOWN: Features = Features {
        int8: false,
        one_core: false,
        wide_units: false,
        bf16_vectors: false,
        int8_break_even: None,
        int8_kernels_break_even: None,
        kernel_memory: mosaic::VMEM_BYTES,
    };

    /// Columns that its matrix units multiply at a time.
    fn columns_of_units(self) -> usize {
        match self.wide_units {
            true => 256,
            false => 128,
        }
    }

    /// Instructions of the matrix units for a product of so many rows, terms and columns: each multiplies a tile of rows with as many
    /// terms as columns.
    fn instructions(self, rows: usize, terms: usize, columns: usize) -> usize {
        let [terms, columns] = [terms, columns].map(|n| n.div_ceil(self.columns_of_units()));
        rows.div_ceil(TILE_ROWS) * terms * columns
    }

    /// `columns`, in blocks of which each is filled up to whole columns of the matrix units: they multiply these in any case.
    fn multiplied_columns(self, columns: usize, of_block: usize) -> usize {
        columns / of_block * of_block.next_multiple_of(self.columns_of_units())
    }

    /// Numbers of cores that may share a kernel's columns, the most first: few columns do not divide among all.
    pub fn cores(self) -> &'static [usize] {
        match self.one_core {
            true => &[1],
            false => &[2, 1],
        }
    }

    /// Whether a training step's product takes no longer in int8 than in bfloat16 where kernels round its operands. `None` where they take
    /// none of its sizes.
    fn int8_pays_in_kernels(&self, product: &quant::Product) -> Option<bool> {
        let quant::Product {
            role,
            rows,
            contracted,
            columns,
            ..
        } = *product;
        let even = self.int8_kernels_break_even?;
        let fill = |sizes: &[usize]| sizes.iter().all(|size| size.is_multiple_of(LANES));
        match role {
            Role::Forward => fill(&[contracted, columns]).then_some(columns >= even.forward),
            Role::Dlhs => fill(&[contracted, columns]).then_some(columns >= even.dlhs),
            Role::Drhs => fill(&[rows, contracted, columns])
                .then_some(rows * columns >= even.drhs * (rows + columns)),
        }
    }

    /// Whether a contraction takes less time in int8 than in bfloat16, with what rounds its operands; `kernels` may be used.
    ///
    /// Both operands have as many rows, or columns, as the result has, and a product of as many terms; so what it saves is to
    /// what rounding takes as `rows * columns` is to `rows + columns`.
    pub fn int8_is_faster(&self, product: &quant::Product, kernels: bool) -> bool {
        let Some(least) = self.int8_break_even else {
            return false;
        };
        let quant::Product { rows, columns, .. } = *product;
        match (product.is_prepared, product.is_convolution) {
            (true, true) if kernels => true,
            // The kernels round while they multiply: from 128 rows on, products of 640 to 5,120 features took 0.54 to 0.83
            // of the time that they take in bfloat16. 320 features fill no tile: products that give so many took 1.7 times of
            // what the compiler's take. Of those that read them, 8,192 rows, 512 columns took 1.19, 640 columns 1.02, 2,560
            // columns 0.51, and 1,536 columns, which are the queries, keys and values of one attention, 0.64.
            (true, false) if kernels => columns.is_multiple_of(LANES),
            (true, _) => columns > least,
            // Those that pay as kernels are kernels in bfloat16 too, the others products of patches.
            (false, true) => false,
            (false, false) => {
                let in_kernels = kernels.then(|| self.int8_pays_in_kernels(product));
                let by_compiler = || rows * columns > least * (rows + columns);
                in_kernels.flatten().unwrap_or_else(by_compiler)
            }
        }
    }
}

/// Whether the compiler can add up bfloat16 values of `shape` between devices of which each gets one of `split` parts of each dimension.
/// libtpu 0.0.51 aborts (`rotated_pincer_fusion_emitter.cc`), or finds "no feasible span", where a part's rows fill no tiles: 20 or 40
/// rows, which 16 devices have of 320 and 640; it takes 80.
pub fn adds_narrow_parts(shape: &Shape, split: &[usize]) -> bool {
    let mut dims = shape.dims.iter().zip(split);
    dims.all(|(size, parts)| *parts == 1 || (size / parts).is_multiple_of(NARROW_TILE_ROWS))
}

/// Switches of libtpu. By itself it folds rows or columns of images into the batch of 3x3 convolutions and keeps this
/// layout through norms and sums, at the price of padding, transposes and widened images around them: a resnet pair of
/// SDXL at 64x64 is predicted at 9.3 ms on a v5e with it and 3.9 without, the convolutions alone at 1.78 and 1.84.
///
/// Windowed einsums split a product whose weights are gathered, or whose gradient is scattered, into one for each device, between
/// which the parts travel. Gathers overlap with other operations without that, and of each product there is one to compile.
///
/// Without calls, the code of an operation stands in the program as often as the operation does: with them the code of a training
/// step of one level of Stable Diffusion 1.5 takes 30 MB in place of 131.
///
/// Propagation of bfloat16 narrows the stack of float32 weights that a loop reads in bfloat16: the whole stack is converted before
/// the loop, and each trip copies its weights out of that. Without it each trip converts its weights while it reads them: SDXL's
/// training step on a v5p-8 is predicted at 138.6 ms in place of 143.5.
pub(super) const COMPILER_SWITCHES: [(&str, &str); 6] = [
    ("xla_tpu_run_space_to_batch", "false"),
    ("xla_tpu_run_space_to_batch_on_new_platforms", "false"),
    ("xla_tpu_enable_windowed_einsum_for_all_gather", "false"),
    ("xla_tpu_enable_windowed_einsum_for_reduce_scatter", "false"),
    ("xla_tpu_enable_deduplicated_calls", "ENABLED"),
    ("xla_jf_bf16_propagation", "false"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    #[test]
    fn parts_of_whole_tiles_are_added_up_in_bfloat16() {
        let adds = |dims: &[usize], split: &[usize]| {
            adds_narrow_parts(&Shape::new(DType::F32, dims), split)
        };
        assert!(adds(&[1280, 640], &[16, 1]) && adds(&[640, 1280], &[1, 16]));
        assert!(!adds(&[640, 640], &[16, 1]) && !adds(&[320, 4, 3, 3], &[16, 1, 1, 1]));
        assert!(adds(&[320, 4], &[1, 1]));
    }
}
