//! Norms whose scale and shift come from a conditioning vector, as in diffusion transformers (Peebles and Xie, 2023,
//! arXiv:2212.09748).

use crate::graph::{Builder, Tensor};

use super::{Linear, Precision, Result, constrain_residual, dims, linear, plain_layer_norm};

/// The `N` parts of the layer `linear` on a conditioning vector `[batch, features]`: each `[batch, 1, features]`.
///
/// # Errors
/// As for [`linear`].
pub fn modulation<const N: usize>(
    b: &Builder,
    embedding: Tensor,
    precision: Precision,
) -> Result<[Tensor; N]> {
    let [batch, features] = dims(b, "modulation", embedding)?;
    let layer = Linear::new(N * features, "embed", "mlp");
    let all = linear(&b.scope("linear"), embedding, layer, precision)?;
    let all = b.reshape(all, &[batch, 1, N * features])?;
    modulation_parts(b, all)
}

/// `N` equal parts of the last dimension of `all` `[batch, 1, N * features]`.
///
/// # Errors
/// When `N` does not divide it.
pub fn modulation_parts<const N: usize>(b: &Builder, all: Tensor) -> Result<[Tensor; N]> {
    let parts = b.split(all, 2, N)?;
    parts
        .try_into()
        .map_err(|_| b.invalid(format!("modulation: expected {N} parts")))
}

/// The norm of tokens without weights of its own, times `1 + scale`, plus `shift`.
///
/// # Errors
/// When the shapes do not fit each other.
pub fn modulated(
    b: &Builder,
    x: Tensor,
    [shift, scale]: [Tensor; 2],
    epsilon: f64,
    precision: Precision,
) -> Result<Tensor> {
    let y = plain_layer_norm(b, x, epsilon, precision)?;
    let y = b.mul(y, b.add_scalar(scale, 1.0)?)?;
    b.add(y, shift)
}

/// `x + gate y` for tokens.
///
/// # Errors
/// When the shapes do not fit each other.
pub fn gated(b: &Builder, x: Tensor, gate: Tensor, y: Tensor) -> Result<Tensor> {
    let x = b.add(x, b.mul(gate, y)?)?;
    constrain_residual(b, x)
}
