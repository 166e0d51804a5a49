//! Attention and its derivative, computed on the host: what the kernels of several backends mean.

use crate::graph::eval::{Data, Value};
use crate::graph::{Graph, Node, Op};
use crate::shape::Shape;

/// Whether the products of an attention are marked to be quantized, as Qwix's rules mark them. Kernels multiply floats.
pub(super) fn has_quantized_products(body: &Graph) -> bool {
    let is_quantized = |node: &Node| matches!(node.op, Op::DotGeneral { quant: Some(_), .. });
    body.nodes.iter().any(is_quantized)
}

/// Whether the shapes are those of an attention: q `[batch, queries, heads, size]`, k and v `[batch, keys, heads, size]`.
pub(super) fn is_attention(q: &Shape, k: &Shape, v: &Shape) -> bool {
    q.rank() == 4
        && k.rank() == 4
        && (q.dims[0], &q.dims[2..]) == (k.dims[0], &k.dims[2..])
        && k == v
}

/// `softmax(q k^T * scale) v` for each head, for operands `[batch, length, heads, size]`. If `causal`, a query sees the keys up to its
/// own place. A fourth operand, `pred[batch, keys]`, are the keys that queries see.
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
