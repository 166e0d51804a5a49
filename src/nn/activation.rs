//! Activation functions.

use serde::{Deserialize, Serialize};

use crate::graph::{Builder, Composite, Tensor};

use super::Result;

/// An activation by its name in model configurations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    #[serde(alias = "swish")]
    Silu,
    Gelu,
    QuickGelu,
}

impl Activation {
    /// Applies it elementwise.
    ///
    /// # Errors
    /// When `x` is not of a float type.
    pub fn apply(self, b: &Builder, x: Tensor) -> Result<Tensor> {
        match self {
            Activation::Silu => silu(b, x),
            Activation::Gelu => gelu(b, x),
            Activation::QuickGelu => quick_gelu(b, x),
        }
    }
}

/// `x * logistic(x)`
///
/// # Errors
/// When `x` is not of a float type.
pub fn silu(b: &Builder, x: Tensor) -> Result<Tensor> {
    let gate = b.logistic(x)?;
    b.mul(x, gate)
}

/// `x * (1 + erf(x / sqrt(2))) / 2`, the exact form.
///
/// # Errors
/// When `x` is not of a float type.
pub fn gelu(b: &Builder, x: Tensor) -> Result<Tensor> {
    let scaled = b.mul_scalar(x, std::f64::consts::FRAC_1_SQRT_2)?;
    let erf = b.erf(scaled)?;
    let gate = b.add_scalar(erf, 1.0)?;
    let gate = b.mul_scalar(gate, 0.5)?;
    b.mul(x, gate)
}

/// `x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2`: transformers' `gelu_new`, diffusers' `gelu-approximate`.
///
/// # Errors
/// When `x` is not of a float type.
pub fn gelu_tanh(b: &Builder, x: Tensor) -> Result<Tensor> {
    let square = b.square(x)?;
    let cubic = b.add_scalar(b.mul_scalar(square, 0.044715)?, 1.0)?;
    let root = std::f64::consts::FRAC_2_PI.sqrt();
    let inner = b.mul_scalar(b.mul(x, cubic)?, root)?;
    let gate = b.add_scalar(b.tanh(inner)?, 1.0)?;
    let gate = b.mul_scalar(gate, 0.5)?;
    b.mul(x, gate)
}

/// The first half of the last dimension times [`gelu`] of the second half (GEGLU, Shazeer 2020).
///
/// # Errors
/// When `x` is a scalar, not of a float type, or its last dimension has no halves.
pub fn gated_gelu(b: &Builder, x: Tensor) -> Result<Tensor> {
    b.composite(Composite::GatedGelu, &[x], |b, operands| {
        let last = b.dims(operands[0]).len().saturating_sub(1);
        let parts = b.split(operands[0], last, 2)?;
        let gate = gelu(b, parts[1])?;
        b.mul(parts[0], gate)
    })
}

/// `x * logistic(1.702 x)`, CLIP's approximation of GELU.
///
/// # Errors
/// When `x` is not of a float type.
pub fn quick_gelu(b: &Builder, x: Tensor) -> Result<Tensor> {
    let scaled = b.mul_scalar(x, 1.702)?;
    let gate = b.logistic(scaled)?;
    b.mul(x, gate)
}
