//! Attention and its derivative with scores that are never stored whole (`plugin/attention.inc`,
//! `plugin/attention_gradient.inc`): shapes and values.

use crate::backend::attention::is_attention;
use crate::dtype::DType;
use crate::graph::{InferError, constraint};
use crate::shape::Shape;

/// Whether the kernel takes these operands: `[batch, length, heads, size]`, in bf16 with an even size, or in `f32`.
pub(super) fn takes(q: &Shape, k: &Shape, v: &Shape) -> bool {
    is_attention(q, k, v)
        && q.dtype == k.dtype
        && match q.dtype {
            DType::BF16 => q.dims[3].is_multiple_of(2),
            dtype => dtype == DType::F32,
        }
}

fn checked(q: &Shape, k: &Shape, v: &Shape) -> Result<Shape, InferError> {
    match takes(q, k, v) {
        true => Ok(q.clone()),
        false => Err(constraint(
            "attention kernel",
            format!(
                "query {q}, key {k} and value {v} are not f32 [batch, length, heads, size], or bf16 of an even size"
            ),
        )),
    }
}

/// The shape of the attention's result.
///
/// # Errors
/// When the operands are not those of [`super::kernel::Kernel::Attention`].
pub(super) fn infer(operands: &[&Shape], causal: bool) -> Result<Shape, InferError> {
    match operands {
        [q, k, v] => checked(q, k, v),
        [q, k, v, visible] if !causal => {
            let shape = checked(q, k, v)?;
            match visible.dtype == DType::Pred && k.dims.starts_with(&visible.dims) {
                true => Ok(shape),
                false => Err(constraint(
                    "attention kernel",
                    format!("mask {visible} is not pred[batch, keys] of key {k}"),
                )),
            }
        }
        _ => Err(InferError::OperandCount {
            expected: 3,
            found: operands.len(),
        }),
    }
}

/// The shape of the first gradient, that of the queries.
///
/// # Errors
/// When the operands are not those of [`super::gradient::Gradient::Attention`].
pub(super) fn infer_gradients(operands: &[&Shape]) -> Result<Shape, InferError> {
    let &[q, k, v, y, gradient] = operands else {
        return Err(InferError::OperandCount {
            expected: 5,
            found: operands.len(),
        });
    };
    match y == q && gradient == q && q.dtype == DType::BF16 {
        true => checked(q, k, v),
        false => Err(constraint(
            "attention_gradient kernel",
            format!("result {y} and gradient {gradient} are not those of query {q} in bf16"),
        )),
    }
}
