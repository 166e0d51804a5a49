//! The feed-forward layer of transformers.

use crate::graph::{Builder, Tensor};

use super::{Linear, Precision, Result, dims, gelu_tanh, linear};

/// `net.2(gelu(net.0.proj(x)))` for tokens `[batch, length, features]`, with the tangent's approximation of GELU and
/// `hidden` features between: diffusers' `FeedForward` with `gelu-approximate`.
///
/// # Errors
/// As for [`linear`].
pub fn feed_forward(b: &Builder, x: Tensor, hidden: usize, precision: Precision) -> Result<Tensor> {
    let [_, _, features] = dims(b, "feed_forward", x)?;
    let layer = Linear::new(hidden, "embed", "mlp");
    let y = linear(&b.scope("net.0.proj"), x, layer, precision)?;
    let y = gelu_tanh(b, y)?;
    let layer = Linear::new(features, "mlp", "embed");
    linear(&b.scope("net.2"), y, layer, precision)
}
