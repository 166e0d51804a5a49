//! Scaled dot-product attention.

use crate::dtype::DType;
use crate::graph::{Builder, Comparison, Composite, DotDims, Reduction, Tensor, Unary};
use crate::shape::Shape;

use super::{Precision, Result, dims};

/// Attributes of [`attention`].
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    pub heads: usize,
    /// Whether a query sees only keys up to its own position.
    pub causal: bool,
}

/// `softmax(q k^T / sqrt(head_dim)) v` for each head.
///
/// `q` is `[batch, queries, heads * head_dim]`, `k` and `v` are `[batch, keys, heads * head_dim]`; the result has
/// the shape of `q`. Scores and softmax are `f32`. The softmax divides after the product with `v`: one division
/// for each result instead of one for each score.
///
/// # Errors
/// When the shapes do not fit each other, or `heads` does not divide the last dimension.
pub fn attention(
    b: &Builder,
    qkv: [Tensor; 3],
    attributes: Attention,
    precision: Precision,
) -> Result<Tensor> {
    seen(b, qkv, None, attributes, precision)
}

/// [`attention`] of `heads` heads in which no query sees the keys where `mask` `[batch, keys]` is 0. Where all of it is 0
/// the result is the mean of `v`.
///
/// # Errors
/// When the shapes do not fit each other.
pub fn masked_attention(
    b: &Builder,
    qkv: [Tensor; 3],
    mask: Tensor,
    heads: usize,
    precision: Precision,
) -> Result<Tensor> {
    let attributes = Attention {
        heads,
        causal: false,
    };
    seen(b, qkv, Some(visible(b, mask)?), attributes, precision)
}

/// [`attention`] to keys of which `visible`, `pred[batch, keys]`, says which queries see; all if there is none.
fn seen(
    b: &Builder,
    [q, k, v]: [Tensor; 3],
    visible: Option<Tensor>,
    Attention { heads, causal }: Attention,
    precision: Precision,
) -> Result<Tensor> {
    let [batch, queries, features] = dims(b, "attention query", q)?;
    let key_dims: [usize; 3] = dims(b, "attention key", k)?;
    let keys = key_dims[1];
    if key_dims != [batch, keys, features] || b.dims(v) != key_dims {
        return Err(b.invalid(format!(
            "attention: query {}, key {} and value {} do not fit each other",
            b.shape(q),
            b.shape(k),
            b.shape(v)
        )));
    }
    if let Some(visible) = visible
        && b.dims(visible) != [batch, keys]
    {
        return Err(b.invalid(format!(
            "attention: mask {} does not fit key {}",
            b.shape(visible),
            b.shape(k)
        )));
    }
    if heads == 0 || !features.is_multiple_of(heads) {
        return Err(b.invalid(format!(
            "attention: {heads} heads do not divide {features} features"
        )));
    }
    let head_dim = features / heads;
    let split = |x: Tensor, length: usize| b.reshape(x, &[batch, length, heads, head_dim]);
    let mut operands = vec![split(q, queries)?, split(k, keys)?, split(v, keys)?];
    operands.extend(visible);
    let y = b.composite(Composite::Attention { causal }, &operands, |b, operands| {
        attend(b, operands, causal, precision)
    })?;
    b.reshape(y, &[batch, queries, features])
}

/// Attention of `[q, k, v]`, each `[batch, length, heads, head_dim]`, and of the keys that queries see if there is a
/// fourth operand.
fn attend(b: &Builder, operands: &[Tensor], causal: bool, precision: Precision) -> Result<Tensor> {
    let (q, k, v, visible) = match *operands {
        [q, k, v] => (q, k, v, None),
        [q, k, v, visible] => (q, k, v, Some(visible)),
        _ => return Err(b.invalid("attention: takes a query, a key, a value, and perhaps a mask")),
    };
    let [_, queries, _, head_dim] = dims(b, "attention query", q)?;
    let [_, keys, _, _] = dims(b, "attention key", k)?;
    let scores = scores(b, q, k)?;
    let mut scores = b.mul_scalar(scores, 1.0 / (head_dim as f64).sqrt())?;
    if causal {
        let shape = Shape::new(DType::S32, [queries, keys]);
        let row = b.iota(shape.clone(), 0)?;
        let column = b.iota(shape, 1)?;
        scores = hidden(b, scores, b.compare(Comparison::Ge, row, column)?, &[2, 3])?;
    }
    if let Some(visible) = visible {
        scores = hidden(b, scores, visible, &[0, 3])?;
    }
    softmax_product(b, scores, v, precision)
}

/// `softmax(q k^T + bias) v` for each head, without a scale: T5's attention. `bias` is `f32[heads, queries, keys]`, and
/// no query sees the keys where `mask` `[batch, keys]`, integers, is 0; the others are as for [`attention`].
///
/// # Errors
/// When the shapes do not fit each other.
pub fn biased_attention(
    b: &Builder,
    [q, k, v]: [Tensor; 3],
    bias: Tensor,
    mask: Option<Tensor>,
    precision: Precision,
) -> Result<Tensor> {
    let [heads, queries, keys] = dims(b, "attention bias", bias)?;
    let [batch, length, features] = dims(b, "attention query", q)?;
    let key_dims: [usize; 3] = dims(b, "attention key", k)?;
    let fits = key_dims == [batch, keys, features]
        && b.dims(v) == key_dims
        && length == queries
        && mask.is_none_or(|mask| b.dims(mask) == [batch, keys]);
    if !fits || heads == 0 || !features.is_multiple_of(heads) {
        return Err(b.invalid(format!(
            "attention: query {}, key {}, value {} and bias {} do not fit each other",
            b.shape(q),
            b.shape(k),
            b.shape(v),
            b.shape(bias)
        )));
    }
    let split = |x: Tensor, length: usize| b.reshape(x, &[batch, length, heads, features / heads]);
    let scores = scores(b, split(q, queries)?, split(k, keys)?)?;
    let all = [batch, heads, queries, keys];
    let mut scores = b.add(scores, b.broadcast_in_dim(bias, &[1, 2, 3], &all)?)?;
    if let Some(mask) = mask {
        scores = hidden(b, scores, visible(b, mask)?, &[0, 3])?;
    }
    let y = softmax_product(b, scores, split(v, keys)?, precision)?;
    b.reshape(y, &[batch, queries, features])
}

/// Where a mask is not 0.
fn visible(b: &Builder, mask: Tensor) -> Result<Tensor> {
    let none = b.scalar(b.dtype(mask), 0.0)?;
    b.compare(Comparison::Ne, mask, none)
}

/// The lowest number in place of scores `[batch, heads, queries, keys]` where `visible`, which lies along `dims`, is false.
fn hidden(b: &Builder, scores: Tensor, visible: Tensor, dims: &[usize]) -> Result<Tensor> {
    let visible = b.broadcast_in_dim(visible, dims, &b.dims(scores))?;
    let lowest = b.scalar(DType::F32, f64::from(f32::MIN))?;
    b.select(visible, scores, lowest)
}

/// `q k^T` of each head, in `f32`: `[batch, heads, queries, keys]`.
fn scores(b: &Builder, q: Tensor, k: Tensor) -> Result<Tensor> {
    b.scope("qk_product").dot_general(
        q,
        k,
        DotDims {
            lhs_batch: vec![0, 2],
            rhs_batch: vec![0, 2],
            lhs_contract: vec![3],
            rhs_contract: vec![3],
        },
        DType::F32,
    )
}

/// `softmax(scores) v` of each head, for scores `[batch, heads, queries, keys]` and `v` `[batch, keys, heads, size]`:
/// `[batch, queries, heads, size]`.
fn softmax_product(b: &Builder, scores: Tensor, v: Tensor, precision: Precision) -> Result<Tensor> {
    let [batch, heads, queries, _] = dims(b, "attention scores", scores)?;
    let [_, _, _, head_dim] = dims(b, "attention value", v)?;
    let highest = b.reduce_keep(Reduction::Max, scores, &[3])?;
    // Softmax is the same after any shift. Rounding the shift to an integer costs nothing in range, and since
    // rounding has no derivative, none goes through the maximum, where all its parts would cancel.
    let shift = b.unary(Unary::RoundNearestEven, highest)?;
    let shifted = b.sub(scores, shift)?;
    let weights = b.exp(shifted)?;
    let total = b.sum(weights, &[3])?;
    let weights = b.convert(weights, precision.activations)?;
    let y = b.scope("wv_product").dot_general(
        weights,
        v,
        DotDims {
            lhs_batch: vec![0, 1],
            rhs_batch: vec![0, 2],
            lhs_contract: vec![3],
            rhs_contract: vec![1],
        },
        DType::F32,
    )?;
    let total = b.broadcast_in_dim(total, &[0, 1, 2], &[batch, heads, queries, head_dim])?;
    let y = b.div(y, total)?;
    let y = b.convert(y, precision.activations)?;
    b.transpose(y, &[0, 2, 1, 3])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::tests::input;

    #[test]
    fn cross_attention_has_the_queries_shape() {
        let b = Builder::new();
        let q = input(&b, "q", &[2, 16, 12]);
        let kv = input(&b, "kv", &[2, 5, 12]);
        let spec = Attention {
            heads: 3,
            causal: false,
        };
        let y = attention(&b, [q, kv, kv], spec, Precision::F32).unwrap();
        assert_eq!(b.dims(y), [2, 16, 12]);
    }

    #[test]
    fn errors_name_shapes_and_heads() {
        let b = Builder::new();
        let q = input(&b, "q", &[2, 16, 12]);
        let kv = input(&b, "kv", &[3, 5, 12]);
        let spec = |heads| Attention {
            heads,
            causal: false,
        };
        let error = attention(&b.root("m"), [q, kv, kv], spec(3), Precision::F32).unwrap_err();
        assert!(error.to_string().contains("f32[3,5,12]"), "{error}");
        let error = attention(&b.root("m"), [q, q, q], spec(5), Precision::F32).unwrap_err();
        assert!(
            error.to_string().contains("5 heads do not divide 12"),
            "{error}"
        );
    }
}
