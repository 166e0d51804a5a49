//! What kernels' shapes and values have in common.

use crate::dtype::DType;
use crate::graph::eval::Value;
use crate::graph::{InferError, constraint};
use crate::shape::Shape;

/// The mean of the values at `places`, and one over their standard deviation.
pub(super) fn moments(x: &Value, places: impl Iterator<Item = usize>, epsilon: f64) -> [f64; 2] {
    let (mut sum, mut squares, mut count) = (0.0, 0.0, 0.0);
    for place in places {
        let value = x.float(place);
        sum += value;
        squares += value * value;
        count += 1.0;
    }
    let mean = sum / count;
    let variance: f64 = squares / count - mean * mean;
    // Rounding may leave less than zero; NaN stays what it is.
    let variance = if variance < 0.0 { 0.0 } else { variance };
    [mean, 1.0 / (variance + epsilon).sqrt()]
}

/// The first of `count` operands, a bf16 tensor.
pub(super) fn only_bf16<'a>(operands: &[&'a Shape], count: usize) -> Result<&'a Shape, InferError> {
    match operands {
        [x, ..] if operands.len() == count => match x.dtype {
            DType::BF16 => Ok(x),
            found => Err(InferError::ElementType {
                what: "the operand of a kernel",
                expected: "bf16",
                found,
            }),
        },
        _ => Err(InferError::OperandCount {
            expected: count,
            found: operands.len(),
        }),
    }
}

/// The shape of a bf16 tensor, after checking that a weight and a bias for its last dimension follow.
pub(super) fn affine_of_last(what: &'static str, operands: &[&Shape]) -> Result<Shape, InferError> {
    let x = only_bf16(operands, 3)?;
    let last = x.dims.last().copied().unwrap_or(1);
    for operand in &operands[1..] {
        if **operand != Shape::new(DType::F32, [last]) {
            let detail = format!("takes f32[{last}] for {x}, found {operand}");
            return Err(constraint(what, detail));
        }
    }
    Ok(x.clone())
}
