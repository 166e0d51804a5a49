//! Attention and its derivative with scores that are never stored whole (`plugin/attention.inc`,
//! `plugin/attention_gradient.inc`): shapes and values.

use crate::dtype::DType;
use crate::graph::eval::{Data, Value};
use crate::graph::{InferError, constraint};
use crate::shape::Shape;

/// Whether the kernels take these operands: bf16 `[batch, length, heads, size]`, with an even size.
pub(super) fn takes(q: &Shape, k: &Shape, v: &Shape) -> bool {
    q.rank() == 4
        && k.rank() == 4
        && (q.dims[0], &q.dims[2..]) == (k.dims[0], &k.dims[2..])
        && k == v
        && q.dims[3].is_multiple_of(2)
        && q.dtype == DType::BF16
        && k.dtype == DType::BF16
}

fn checked(q: &Shape, k: &Shape, v: &Shape) -> Result<Shape, InferError> {
    match takes(q, k, v) {
        true => Ok(q.clone()),
        false => Err(constraint(
            "attention kernel",
            format!(
                "query {q}, key {k} and value {v} are not bf16 [batch, length, heads, even size]"
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
    match y == q && gradient == q {
        true => checked(q, k, v),
        false => Err(constraint(
            "attention_gradient kernel",
            format!("result {y} and gradient {gradient} are not those of query {q}"),
        )),
    }
}

pub(super) fn evaluate(operands: &[&Value], scale: f64, causal: bool, shape: Shape) -> Value {
    let (q, k, v) = (operands[0], operands[1], operands[2]);
    let [batch, queries, heads, size] = shape.dims[..] else {
        return Value::zeros(shape);
    };
    let keys = k.shape.dims[1];
    let visible = |image: usize, j: usize| match operands.get(3) {
        Some(mask) => mask.float(image * keys + j) != 0.0,
        None => true,
    };
    let mut out = vec![0.0; shape.count()];
    for image in 0..batch {
        for head in 0..heads {
            let key_at = |j: usize| ((image * keys + j) * heads + head) * size;
            for i in 0..queries {
                let at = ((image * queries + i) * heads + head) * size;
                let seen = if causal { keys.min(i + 1) } else { keys };
                let score = |j| match visible(image, j) {
                    true => {
                        let products = (0..size).map(|d| q.float(at + d) * k.float(key_at(j) + d));
                        products.sum::<f64>() * scale
                    }
                    false => f64::from(f32::MIN),
                };
                let scores: Vec<f64> = (0..seen).map(score).collect();
                let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - highest).exp()).collect();
                let total: f64 = weights.iter().sum();
                for d in 0..size {
                    let sum: f64 = weights
                        .iter()
                        .enumerate()
                        .map(|(j, w)| w * v.float(key_at(j) + d))
                        .sum();
                    out[at + d] = sum / total;
                }
            }
        }
    }
    Value {
        shape,
        data: Data::F(out),
    }
}

/// The gradients of q, k and v: Dao et al., "FlashAttention" (2022), appendix B.
pub(super) fn gradients(operands: &[&Value], scale: f64) -> Vec<Value> {
    let [q, k, v, y, gradient] = [0, 1, 2, 3, 4].map(|at| operands[at]);
    let mut found: Vec<Value> = [q, k, v].map(|x| Value::zeros(x.shape.clone())).into();
    let [batch, queries, heads, size] = q.shape.dims[..] else {
        return found;
    };
    let keys = k.shape.dims[1];
    let mut sums = [q, k, v].map(|x| vec![0.0; x.shape.count()]);
    for head in (0..batch * heads).map(|at| (at / heads, at % heads)) {
        let place = |length: usize, i: usize| ((head.0 * length + i) * heads + head.1) * size;
        for i in 0..queries {
            let query = place(queries, i);
            let dot = |a: &Value, at: usize, b: &Value, other: usize| -> f64 {
                (0..size)
                    .map(|d| a.float(at + d) * b.float(other + d))
                    .sum()
            };
            let scores = (0..keys).map(|j| dot(q, query, k, place(keys, j)) * scale);
            let scores: Vec<f64> = scores.collect();
            let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - highest).exp()).collect();
            let total: f64 = weights.iter().sum();
            let of_total = dot(y, query, gradient, query);
            for (j, weight) in weights.iter().enumerate() {
                let key = place(keys, j);
                let weight = weight / total;
                let of_score = weight * (dot(gradient, query, v, key) - of_total) * scale;
                for d in 0..size {
                    sums[0][query + d] += of_score * k.float(key + d);
                    sums[1][key + d] += of_score * q.float(query + d);
                    sums[2][key + d] += weight * gradient.float(query + d);
                }
            }
        }
    }
    for (value, sums) in found.iter_mut().zip(sums) {
        value.data = Data::F(sums);
    }
    found
}
