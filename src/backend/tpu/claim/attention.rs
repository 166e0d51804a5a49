//! Attention, alone and with its derivative, as training steps have it.

use std::collections::HashMap;
use std::sync::Arc;

use crate::backend::attention::has_quantized_products;
use crate::dtype::DType;
use crate::graph::{Builder, Composite, Graph, Node, Op, Tensor};
use crate::shape::Shape;

use super::super::attention_gradient::STATISTICS;
use super::super::{Attention, AttentionGradient, AttentionGradients, Features, Side};
use super::{Result, pad_to};

/// Keys from which an attention that is trained is the kernels', whatever its queries and heads are.
const LEAST_KEYS_TRAINED: usize = 256;
/// Keys from which it is with [`MANY_QUERIES`] and heads that fill registers: 77 keys are padded to 128, and pay where little else is
/// copied. Attention of 4,096 queries of 10 heads of 64 and its derivative are predicted at 0.155 ms on v5e, 0.082 on v5p and 0.097
/// on v6e, and as the compiler's operations at 0.207, 0.137 and 0.112; 256 queries of 20 heads at 0.028 and 0.024 on v6e; 4,096
/// queries of 8 heads of 40, which have to be padded, at 0.248 and 0.104 on v5e.
const LEAST_KEYS_OF_MANY_QUERIES: usize = 64;
const MANY_QUERIES: usize = 1024;

/// The gradients of attention's operands that were found so far.
pub(super) struct Gradients<'g> {
    features: Features,
    /// By the nodes that they read; `None` where there are no kernels for them.
    found: HashMap<&'g [u32], Option<[Tensor; 3]>>,
}

impl Gradients<'_> {
    /// None, for a chip.
    pub fn of(features: Features) -> Self {
        Gradients {
            features,
            found: HashMap::new(),
        }
    }
}

/// The kernel of an attention or of a gradient of one, which are what [`is_claimed`] says yes to; `None` where there is
/// none.
pub(super) fn attention_or_gradient<'g>(
    b: &Builder,
    node: &'g Node,
    kind: &Composite,
    copies: &[Tensor],
    gradients: &mut Gradients<'g>,
) -> Result<Option<Tensor>> {
    let copy = |id: u32| copies[id as usize];
    match (kind, &node.operands[..]) {
        (Composite::Attention { .. }, &[q, k, v]) => {
            attention(b, gradients.features, [q, k, v].map(copy))
        }
        (Composite::Gradient { operand, .. }, &[q, k, v, y, gradient]) => {
            let found = match gradients.found.get(&node.operands[..]) {
                Some(found) => *found,
                None => {
                    let found = attention_gradients(
                        b,
                        gradients.features,
                        [q, k, v, y, gradient].map(copy),
                    )?;
                    gradients.found.insert(&node.operands, found);
                    found
                }
            };
            Ok(found.map(|found| found[*operand]))
        }
        _ => Ok(None),
    }
}

/// Whether [`super::claim_training`] may take a composite: attention whose products are not quantized and that the kernels compute
/// faster, and its derivative.
pub(super) fn is_claimed(kind: &Composite, body: &Graph, features: Features) -> bool {
    let is_attention = matches!(kind.layer().0, Composite::Attention { causal: false });
    is_attention && is_faster_in_training(body, features) && !has_quantized_products(body)
}

/// Whether the kernels compute an attention and its derivative faster than the compiler's operations, by the inputs of its body.
fn is_faster_in_training(body: &Graph, features: Features) -> bool {
    let [q, k, v, ..] = &body.inputs[..] else {
        return false;
    };
    let (Some(&queries), Some(&keys)) = (q.shape.dims.get(1), k.shape.dims.get(1)) else {
        return false;
    };
    match keys {
        LEAST_KEYS_TRAINED.. => true,
        LEAST_KEYS_OF_MANY_QUERIES.. if queries >= MANY_QUERIES => {
            Padded::of([&q.shape, &k.shape, &v.shape], features)
                .is_some_and(|of| !of.has_padded_heads())
        }
        _ => false,
    }
}

/// How the kernel of an attention has its operands.
pub(super) struct Padded {
    kernel: Attention,
    batch: usize,
    heads: usize,
    size: usize,
    /// With the padding that makes registers whole.
    all_heads: usize,
    queries: usize,
    keys: usize,
    /// Queries and keys with the padding that makes blocks whole.
    all: [usize; 2],
}

impl Padded {
    /// For q `[batch, queries, heads, size]`, k and v `[batch, keys, heads, size]`; `None` where there is no kernel.
    pub fn of(qkv: [&Shape; 3], features: Features) -> Option<Padded> {
        let [q, k, _] = qkv;
        if qkv.iter().any(|of| of.dtype != DType::BF16) || q.count() == 0 || k.count() == 0 {
            return None;
        }
        let [batch, queries, heads, size] = [0, 1, 2, 3].map(|d| q.dims[d]);
        let keys = k.dims[1];
        let kernel = Attention {
            scale: 1.0 / (size as f64).sqrt(),
            size: Attention::padded_size(size),
            keys,
            side_by_side: false,
            features,
        };
        // Two heads of 64 share the lanes of a register.
        let all_heads = match kernel.size {
            64 => heads.next_multiple_of(2),
            _ => heads,
        };
        let padded = Padded {
            kernel,
            batch,
            heads,
            size,
            all_heads,
            queries,
            keys,
            all: Attention::padded(queries, keys),
        };
        let [q, k] = padded.shapes();
        padded.kernel.fits(&q, &k).then_some(padded)
    }

    /// The number and size of heads, and with the padding.
    pub fn heads(&self) -> [[usize; 2]; 2] {
        [[self.heads, self.size], [self.all_heads, self.kernel.size]]
    }

    pub fn has_padded_heads(&self) -> bool {
        let [own, all] = self.heads();
        own != all
    }

    fn columns(&self) -> usize {
        self.all_heads * self.kernel.size
    }

    /// The shapes of q and of k, and of v.
    fn shapes(&self) -> [Shape; 2] {
        self.all
            .map(|length| Shape::new(DType::BF16, [self.batch, length, self.columns()]))
    }

    /// An operand of as many rows as the queries, or as the keys.
    fn queries(&self, b: &Builder, x: Tensor) -> Result<Tensor> {
        self.padded(b, x, self.all[0])
    }

    fn keys(&self, b: &Builder, x: Tensor) -> Result<Tensor> {
        self.padded(b, x, self.all[1])
    }

    fn padded(&self, b: &Builder, x: Tensor, length: usize) -> Result<Tensor> {
        let dims = [self.batch, length, self.all_heads, self.kernel.size];
        let x = pad_to(b, x, &dims)?;
        b.reshape(x, &[self.batch, length, self.columns()])
    }

    /// The kernel's result `[batch, queries, columns]` for operands whose heads may have their padding already.
    pub fn call(&self, b: &Builder, [q, k, v]: [Tensor; 3]) -> Result<Tensor> {
        let operands = [self.queries(b, q)?, self.keys(b, k)?, self.keys(b, v)?];
        let y = b.push(Op::CustomCall(Arc::new(self.kernel.clone())), &operands)?;
        match self.all[0] == self.queries {
            true => Ok(y),
            false => b.slice_dim(y, 1, 0, self.queries),
        }
    }

    /// The padded heads of `[batch, length, columns]`.
    pub fn split(&self, b: &Builder, x: Tensor) -> Result<Tensor> {
        let length = b.shape(x).count() / (self.batch * self.columns());
        b.reshape(x, &[self.batch, length, self.all_heads, self.kernel.size])
    }

    /// The attention's result, of the kernel's.
    pub fn without_heads_padding(&self, b: &Builder, y: Tensor) -> Result<Tensor> {
        self.cut(b, y, self.queries)
    }

    /// A result without its padding: that of the first `length` rows of `y`, which has all of them.
    fn cut(&self, b: &Builder, y: Tensor, length: usize) -> Result<Tensor> {
        let mut y = self.split(b, y)?;
        for (dim, length) in [length, self.heads, self.size].into_iter().enumerate() {
            if b.dims(y)[dim + 1] != length {
                y = b.slice_dim(y, dim + 1, 0, length)?;
            }
        }
        Ok(y)
    }
}

/// The kernel for q `[batch, queries, heads, size]`, k and v `[batch, keys, heads, size]`; `None` where there is none.
pub(super) fn attention(
    b: &Builder,
    features: Features,
    [q, k, v]: [Tensor; 3],
) -> Result<Option<Tensor>> {
    let shapes = [q, k, v].map(|x| b.shape(x));
    let Some(padded) = Padded::of(shapes.each_ref(), features) else {
        return Ok(None);
    };
    let y = padded.call(b, [q, k, v])?;
    padded.without_heads_padding(b, y).map(Some)
}

/// The kernels for the gradients of q, k and v, given those and the attention's result and its gradient; `None` where there
/// are none.
fn attention_gradients(
    b: &Builder,
    features: Features,
    operands: [Tensor; 5],
) -> Result<Option<[Tensor; 3]>> {
    let [q, k, v, y, gradient] = operands;
    let shapes = [q, k, v].map(|x| b.shape(x));
    let Some(padded) = Padded::of(shapes.each_ref(), features) else {
        return Ok(None);
    };
    let [q_shape, k_shape] = padded.shapes();
    let one = AttentionGradients {
        of: padded.kernel.clone(),
    };
    let in_one = one.fits(&q_shape, &k_shape);
    if !in_one && !AttentionGradient::fits(&padded.kernel, &q_shape, &k_shape) {
        return Ok(None);
    }
    let [q, y, gradient] = [q, y, gradient].map(|x| padded.queries(b, x));
    let [k, v] = [k, v].map(|x| padded.keys(b, x));
    let operands = [q?, k?, v?, y?, gradient?];
    match in_one {
        true => gradients_of_one(b, &padded, one, operands).map(Some),
        false => gradients_of_two(b, &padded, operands).map(Some),
    }
}

/// The gradients of q, k and v by one kernel; the operands have their padding.
fn gradients_of_one(
    b: &Builder,
    padded: &Padded,
    kernel: AttentionGradients,
    operands: [Tensor; 5],
) -> Result<[Tensor; 3]> {
    let [queries, keys] = padded.all;
    let found = b.push(Op::CustomCall(Arc::new(kernel)), &operands)?;
    let rows = [
        (0, queries, padded.queries),
        (queries, queries + keys, padded.keys),
        (queries + keys, queries + 2 * keys, padded.keys),
    ];
    let [of_queries, of_keys, of_values] = rows.map(|(start, end, length)| {
        let own = b.slice_dim(found, 1, start, end)?;
        padded.cut(b, own, length)
    });
    Ok([of_queries?, of_keys?, of_values?])
}

/// The same by two kernels.
fn gradients_of_two(
    b: &Builder,
    padded: &Padded,
    [q, k, v, y, gradient]: [Tensor; 5],
) -> Result<[Tensor; 3]> {
    let [batch, columns] = [padded.batch, padded.columns()];
    let [queries, keys] = padded.all;
    let call = |side: Side, operands: &[Tensor]| {
        let of = padded.kernel.clone();
        b.push(
            Op::CustomCall(Arc::new(AttentionGradient { of, side })),
            operands,
        )
    };
    let slabs = padded.kernel.slabs(columns);
    let slab = columns / slabs;

    // Each result has two halves of rows in each block.
    let half = |found: Tensor, side: Side, rows: usize, which: usize| {
        let [count, size] = AttentionGradient::blocks(side, rows);
        let found = b.reshape(found, &[batch, count, 2, size, columns])?;
        b.slice_dim(found, 2, which, which + 1)
    };

    let found = call(Side::Queries, &[q, k, v, y, gradient])?;
    let of_queries = half(found, Side::Queries, queries, 0)?;
    let of_queries = padded.cut(b, b.convert(of_queries, DType::BF16)?, padded.queries)?;

    let [count, size] = AttentionGradient::blocks(Side::Queries, queries);
    let statistics = half(found, Side::Queries, queries, 1)?;
    let statistics = b.reshape(statistics, &[batch, count, size, slabs, slab])?;
    let statistics = b.slice_dim(statistics, 4, 0, STATISTICS)?;
    let statistics = b.transpose(statistics, &[0, 3, 1, 4, 2])?;
    let statistics = b.reshape(statistics, &[batch, slabs * count * STATISTICS, size])?;

    let found = call(Side::Keys, &[k, v, q, gradient, statistics])?;
    let [of_keys, of_values] =
        [0, 1].map(|which| padded.cut(b, half(found, Side::Keys, keys, which)?, padded.keys));
    Ok([of_queries, of_keys?, of_values?])
}
