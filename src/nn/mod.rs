//! Layers: functions that declare their weights in the builder's scope and add their operations.
//!
//! Every layer takes a builder whose scope is the layer's own, so that `linear(&b.scope("to_q"), ..)` declares
//! `<path>.to_q.weight`. Weights have PyTorch's layouts and names; images are `[batch, height, width, channels]`.
//! Weights default to PyTorch's initial distributions.

mod activation;
mod adaptive;
mod attention;
mod conv;
mod embedding;
mod feed_forward;
mod linear;
mod norm;
mod patches;
mod pool;
mod rotary;

pub use activation::{Activation, gated_gelu, gelu, gelu_tanh, quick_gelu, silu};
pub use adaptive::{gated, modulated, modulation, modulation_parts};
pub use attention::{Attention, attention, biased_attention, masked_attention};
pub use conv::{Conv2d, conv2d, downsample_2x, upsample_2x, upsample_nearest_2x};
pub use embedding::{TimestepEmbedding, embedding, sinusoidal_embedding};
pub use feed_forward::feed_forward;
pub use linear::{Linear, linear, linear_f32};
pub use norm::{GroupNorm, batch_norm, group_norm, layer_norm, plain_layer_norm, rms_norm};
pub use patches::{check_patches, patch_embedding, sine_positions, unpatch};
pub use pool::{Pool, average_pool, max_pool};
pub use rotary::RotaryTables;

use crate::dtype::DType;
use crate::graph::{Builder, GraphError, Keeps, Tensor};
use crate::util::named;

pub(crate) type Result<T> = std::result::Result<T, GraphError>;

/// The logical name of one dimension, which the axis rules turn into mesh axes. `None` is never sharded.
pub type Axis = Option<&'static str>;

/// The element types a model computes with.
///
/// Contractions and convolutions accumulate in `f32`, and statistics of normalizations and softmax are `f32`,
/// whatever the types here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precision {
    /// The type weights are declared in.
    pub weights: DType,
    /// The type of activations, and of weights where they are used.
    pub activations: DType,
}

impl Precision {
    /// Everything in `f32`.
    pub const F32: Precision = Precision {
        weights: DType::F32,
        activations: DType::F32,
    };
}

named! {
    /// The values that the derivative of a block keeps from the forward pass, with MaxDiffusion's names.
    #[derive(Default)]
    pub enum Remat {
        /// Every value it needs.
        None = "NONE" (default),
        /// The block's inputs; the rest is computed again.
        Full = "FULL",
        /// The block's inputs, and the results of linear layers, convolutions and kernels of attention; the rest is computed again.
        MatmulWithoutBatch = "MATMUL_WITHOUT_BATCH",
    }
    not_yet [
        "OFFLOAD_MATMUL_WITHOUT_BATCH", "CUSTOM",
        "HIDDEN_STATE_WITH_OFFLOAD", "FLUX_OPTIMIZED",
    ]
}

impl Remat {
    /// The builder a block is traced with: a new recomputation region but under [`Remat::None`].
    pub(crate) fn block(self, b: &Builder) -> Builder {
        match self {
            Remat::None => b.clone(),
            Remat::Full => b.checkpoint(Keeps::Nothing),
            Remat::MatmulWithoutBatch => b.checkpoint(Keeps::Products),
        }
    }
}

/// Pins the sharding of an image `[batch, height, width, channels]`.
///
/// # Errors
/// When `x` has another rank.
pub fn constrain_image(b: &Builder, x: Tensor) -> Result<Tensor> {
    b.constrain(
        x,
        &[
            Some("conv_batch"),
            Some("height"),
            Some("keep_2"),
            Some("out_channels"),
        ],
    )
}

/// Pins the sharding of a sequence `[batch, length, heads * head_dim]`.
///
/// # Errors
/// When `x` has another rank.
pub fn constrain_tokens(b: &Builder, x: Tensor) -> Result<Tensor> {
    b.constrain(
        x,
        &[
            Some("activation_batch"),
            Some("activation_length"),
            Some("activation_heads"),
        ],
    )
}

/// Pins the sharding of tokens `[batch, length, features]` between layers: every device has all features of its tokens,
/// over which the next norm takes its mean.
///
/// # Errors
/// When `x` has another rank.
pub fn constrain_residual(b: &Builder, x: Tensor) -> Result<Tensor> {
    b.constrain(
        x,
        &[Some("activation_batch"), Some("activation_length"), None],
    )
}

/// The sizes of `x`, which must have rank `N`.
pub(crate) fn dims<const N: usize>(b: &Builder, what: &str, x: Tensor) -> Result<[usize; N]> {
    b.dims(x).try_into().map_err(|found: Vec<usize>| {
        b.invalid(format!("{what}: expected rank {N}, found sizes {found:?}"))
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::shape::Shape;

    /// An `f32` data input.
    pub(crate) fn input(b: &Builder, name: &str, dims: &[usize]) -> Tensor {
        b.input(name, Shape::new(DType::F32, dims), &[]).unwrap()
    }

    /// Names and sizes of the declared weights.
    pub(crate) fn weights(b: &Builder) -> Vec<(String, Vec<usize>)> {
        b.with_graph(|g| {
            g.weights()
                .map(|(_, w)| (w.name.clone(), w.shape.dims.clone()))
                .collect()
        })
    }
}
