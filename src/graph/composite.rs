//! Composites: layers and quantization steps that stay whole until a backend had the chance to claim them.
//!
//! A composite's body, made of primitives, is its meaning. Shape inference checks the attributes against the body, the
//! evaluator runs the body, and the derivative goes through it. A backend that has a kernel for a composite puts the
//! kernel in its place ([`crate::backend`]); [`Graph::inline_composites`](super::Graph::inline_composites) puts the
//! body in place of all others.

use crate::dtype::DType;

use super::blockwise::BlockwiseAdamW;
use super::{ConvDims, DotDims, TensorFormat};

/// The computation of a composite, with its attributes.
#[derive(Clone, Debug, PartialEq)]
pub enum Composite {
    /// `softmax(q k^T / sqrt(size)) v` for each head. Operands: q `[batch, queries, heads, size]`, k and v
    /// `[batch, keys, heads, size]`; the result has the dimensions of q. If `causal`, a query sees the keys up to its
    /// own position. If not, there may be a fourth operand, `pred[batch, keys]`: the keys that queries see.
    Attention { causal: bool },
    /// Operands: an image `[batch, height, width, channels]`, weight and bias `f32[channels]`. With `silu`, SiLU of it.
    GroupNorm {
        groups: usize,
        epsilon: f64,
        silu: bool,
    },
    /// Over the last dimension. Operands: x, weight and bias `f32[features]`.
    LayerNorm { epsilon: f64 },
    /// Division by the root of the mean square over the last dimension. Operands: x, weight `f32[features]`.
    RmsNorm { epsilon: f64 },
    /// Rotary position embedding of pairs of neighbours: each feature times `cos`, the next one times `next` and the previous one
    /// times `previous`, which come round the ends. Operands: x `[batch, positions, heads, features]`, then `cos`, `next`
    /// and `previous` `f32[positions, features]`.
    Rotary,
    /// The first half of the last dimension times the exact GELU of the second half.
    GatedGelu,
    /// Twice the height and width of an image `[batch, height, width, channels]`: every pixel twice in both directions.
    UpsampleNearest2x,
    /// The scale of a tensor in `format`: one for each index of the `kept` dimensions (ascending).
    FindScale {
        kept: Vec<usize>,
        format: TensorFormat,
    },
    /// [`rounding_noise`](super::random::rounding_noise) of these dimensions. Operand: the key, `u32[2]`.
    RoundingNoise { dims: Vec<usize> },
    /// Operands: x, its scale along the `kept` dimensions, and for stochastic rounding the noise, `f32` of the
    /// dimensions of x. The result is of the format's element type.
    Quantize {
        kept: Vec<usize>,
        format: TensorFormat,
    },
    /// `(integers - zero point) * scale` in `f32`, rounded to `result`. Operands: the integers, the scale, which lies
    /// `along` dimensions of them (ascending), and an `s8` zero point of the scale's dimensions if `zero_point`. Where a
    /// dimension of the scale is smaller, each of its values is that of a group of integers. A zero point that is a float
    /// is added to `integers * scale` instead; and codes may stand for other numbers than themselves, as the body says.
    Dequantize {
        along: Vec<usize>,
        zero_point: bool,
        result: DType,
    },
    /// What a tensor is after it is rounded to `format` and widened again, in its own type. Operands: x, and its scale, which
    /// lies `along` dimensions of it (ascending); where a dimension of the scale is smaller, each of its values is that of a
    /// group. Rounding counts as one in the derivative, as far as no number is clipped, and where scales are `learned` they have
    /// the derivative of Esser et al. ("Learned step size quantization", 2020).
    FakeQuantize {
        along: Vec<usize>,
        format: TensorFormat,
        learned: bool,
    },
    /// A contraction of quantized operands, in the result's float type. Operands: lhs, rhs, then the lhs's scale if
    /// `lhs_scale`, then the rhs's if `rhs_scale`; a scale lies along its operand's kept dimensions.
    ScaledContraction {
        contraction: Contraction,
        lhs_scale: bool,
        rhs_scale: bool,
    },
    /// The gradient of operand number `operand` of another composite, one that [`Composite::has_gradient`]. Operands: those of the
    /// other, its result if it is attention, and its result's gradient.
    Gradient { of: Box<Composite>, operand: usize },
    /// A step of AdamW for a weight whose moments are [`blockwise`](super::blockwise), as bitsandbytes' `AdamW8bit`. Operands: the
    /// weight (`f32` or `bf16`); codes `u8` of its dimensions and `f32[blocks]` largest absolute values of the first moment, the
    /// same of the second; the gradient, of the weight's dimensions; `f32[5]`: what the gradient is multiplied by, the learning
    /// rate, `1 - b1^t`, `1 - b2^t`, and 1 if the update counts, otherwise 0; and for stochastic rounding the key, `u32[2]`. The
    /// results are of the first five operands' shapes, and what they are after the step.
    BlockwiseAdamW(BlockwiseAdamW),
}

/// Which contraction, with its dimension numbers.
#[derive(Clone, Debug, PartialEq)]
pub enum Contraction {
    Dot(DotDims),
    Convolution(Box<ConvDims>),
}

impl Composite {
    /// The name in errors and reports.
    pub fn name(&self) -> &'static str {
        match self {
            Composite::Attention { .. } => "attention",
            Composite::GroupNorm { silu: false, .. } => "group_norm",
            Composite::GroupNorm { silu: true, .. } => "group_norm_silu",
            Composite::LayerNorm { .. } => "layer_norm",
            Composite::RmsNorm { .. } => "rms_norm",
            Composite::Rotary => "rotary",
            Composite::GatedGelu => "gated_gelu",
            Composite::UpsampleNearest2x => "upsample_nearest_2x",
            Composite::FindScale { .. } => "find_scale",
            Composite::RoundingNoise { .. } => "rounding_noise",
            Composite::Quantize { .. } => "quantize",
            Composite::Dequantize { .. } => "dequantize",
            Composite::FakeQuantize { .. } => "fake_quantize",
            Composite::ScaledContraction {
                contraction: Contraction::Dot(_),
                ..
            } => "scaled_dot_general",
            Composite::ScaledContraction {
                contraction: Contraction::Convolution(_),
                ..
            } => "scaled_convolution",
            Composite::Gradient { of, .. } => match **of {
                Composite::Attention { .. } => "attention_gradient",
                Composite::GroupNorm { .. } => "group_norm_gradient",
                Composite::LayerNorm { .. } => "layer_norm_gradient",
                Composite::GatedGelu => "gated_gelu_gradient",
                Composite::UpsampleNearest2x => "upsample_nearest_2x_gradient",
                _ => "gradient",
            },
            Composite::BlockwiseAdamW(_) => "adamw_8bit",
        }
    }

    /// Whether the derivative, of a call with so many operands, is a [`Composite::Gradient`] for each operand, which a backend may
    /// have a kernel for. That of others goes through the body.
    pub fn has_gradient(&self, operands: usize) -> bool {
        match self {
            Composite::Attention { causal: false } => operands == 3,
            Composite::GroupNorm { .. }
            | Composite::LayerNorm { .. }
            | Composite::GatedGelu
            | Composite::UpsampleNearest2x => true,
            _ => false,
        }
    }

    /// The layer that this is, or is a [`Composite::Gradient`] of, then with the number of the operand.
    pub fn layer(&self) -> (&Composite, Option<usize>) {
        match self {
            Composite::Gradient { of, operand } => (of, Some(*operand)),
            layer => (layer, None),
        }
    }

    /// How many operands of a [`Composite::Gradient`] of this come after its own: its result, if the derivative is computed from
    /// that, and its result's gradient.
    pub fn results_in_gradient(&self) -> usize {
        match self {
            Composite::Attention { .. } => 2,
            _ => 1,
        }
    }

    /// How many results there are; the node's own shape is that of the first.
    pub fn results(&self) -> usize {
        match self {
            Composite::BlockwiseAdamW(_) => BlockwiseAdamW::RESULTS,
            _ => 1,
        }
    }
}

impl Contraction {
    /// The dimensions of each operand along which a scale of its own may lie, in ascending order: those that are not
    /// contracted, and for a convolution the batch of the lhs and the output features of the rhs.
    pub fn kept(&self, ranks: [usize; 2]) -> [Vec<usize>; 2] {
        match self {
            Contraction::Dot(dims) => {
                let free = |rank: usize, contract: &[usize]| -> Vec<usize> {
                    (0..rank).filter(|d| !contract.contains(d)).collect()
                };
                [
                    free(ranks[0], &dims.lhs_contract),
                    free(ranks[1], &dims.rhs_contract),
                ]
            }
            Contraction::Convolution(dims) => [vec![dims.lhs.batch], vec![dims.rhs.batch]],
        }
    }

    /// For each of [`Contraction::kept`], the dimension of the result that it becomes.
    pub fn places(&self, ranks: [usize; 2]) -> [Vec<usize>; 2] {
        let dims = match self {
            Contraction::Dot(dims) => dims,
            Contraction::Convolution(dims) => {
                return [vec![dims.out.batch], vec![dims.out.feature]];
            }
        };
        // The result's dimensions are batch, lhs free, rhs free.
        let batch = dims.lhs_batch.len();
        let lhs_free = ranks[0] - batch - dims.lhs_contract.len();
        let place = |kept: &[usize], of_batch: &[usize], first: usize| -> Vec<usize> {
            let mut free = first..;
            let mut place = |d: &usize| match of_batch.iter().position(|b| b == d) {
                Some(place) => place,
                None => free.next().unwrap_or(first),
            };
            kept.iter().map(&mut place).collect()
        };
        let [lhs, rhs] = self.kept(ranks);
        [
            place(&lhs, &dims.lhs_batch, batch),
            place(&rhs, &dims.rhs_batch, batch + lhs_free),
        ]
    }
}

/// The dimensions of a tensor in which those that a scale of `sizes` divides into groups, `along` them, become two, and where the
/// scale lies among these.
pub fn grouped_dims(dims: &[usize], along: &[usize], sizes: &[usize]) -> (Vec<usize>, Vec<usize>) {
    let (mut split, mut places) = (Vec::new(), Vec::new());
    for (d, size) in dims.iter().enumerate() {
        match along.iter().position(|at| *at == d) {
            Some(at) if sizes[at] != *size => {
                places.push(split.len());
                split.extend([sizes[at], size / sizes[at]]);
            }
            at => {
                places.extend(at.map(|_| split.len()));
                split.push(*size);
            }
        }
    }
    (split, places)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_follow_the_results_dimensions() {
        // The result's dimensions are batch, lhs free, rhs free; batch dimensions stand second here.
        let dot = Contraction::Dot(DotDims {
            lhs_batch: vec![1],
            rhs_batch: vec![2],
            lhs_contract: vec![2],
            rhs_contract: vec![0],
        });
        assert_eq!(dot.kept([3, 3]), [vec![0, 1], vec![1, 2]]);
        assert_eq!(dot.places([3, 3]), [vec![1, 0], vec![2, 0]]);
    }
}
