//! What the TPU kernels stand for: one table of claims.

use std::sync::Arc;

use crate::dtype::DType;
use crate::graph::{Builder, Composite, Graph, GraphError, Op, PadDim, Tensor};
use crate::shape::Shape;

use super::Attention;

type Result<T> = std::result::Result<T, GraphError>;

/// The graph with this program's TPU kernels in place of
///
/// - attention in bf16 that is not causal, of as many keys as a core can hold.
///
/// For programs of one partition.
///
/// # Errors
/// When the graph is ill-typed.
pub fn claim(graph: &Graph) -> Result<Graph> {
    graph.substitute(&mut |b, i, copies| {
        let node = &graph.nodes[i];
        let Op::Composite { kind, .. } = &node.op else {
            return Ok(None);
        };
        let operands: Vec<Tensor> = node.operands.iter().map(|o| copies[*o as usize]).collect();
        match (kind, &operands[..]) {
            (Composite::Attention { causal: false }, &[q, k, v]) => attention(b, [q, k, v]),
            _ => Ok(None),
        }
    })
}

/// The kernel for q `[batch, queries, heads, size]`, k and v `[batch, keys, heads, size]`; `None` where there is none.
fn attention(b: &Builder, qkv: [Tensor; 3]) -> Result<Option<Tensor>> {
    let [q, k, _] = qkv.map(|x| b.shape(x));
    if qkv.iter().any(|x| b.dtype(*x) != DType::BF16) || q.count() == 0 || k.count() == 0 {
        return Ok(None);
    }
    let [batch, queries, heads, size] = [0, 1, 2, 3].map(|d| q.dims[d]);
    let keys = k.dims[1];
    let kernel = Attention {
        scale: 1.0 / (size as f64).sqrt(),
        size: Attention::padded_size(size),
        keys,
    };
    // Two heads of 64 share the lanes of a register.
    let all_heads = match kernel.size {
        64 => heads.next_multiple_of(2),
        _ => heads,
    };
    let columns = all_heads * kernel.size;
    let [all_queries, all_keys] = Attention::padded(queries, keys);
    let shape = |length: usize| Shape::new(DType::BF16, [batch, length, columns]);
    if !kernel.fits(&shape(all_queries), &shape(all_keys)) {
        return Ok(None);
    }
    let padded = |x: Tensor, length: usize| -> Result<Tensor> {
        let dims = [batch, length, all_heads, kernel.size];
        let x = pad_to(b, x, &dims)?;
        b.reshape(x, &[batch, length, columns])
    };
    let [q, k, v] = qkv;
    let operands = [
        padded(q, all_queries)?,
        padded(k, all_keys)?,
        padded(v, all_keys)?,
    ];
    let size_of_head = kernel.size;
    let y = b.push(Op::CustomCall(Arc::new(kernel)), &operands)?;
    let mut y = b.reshape(y, &[batch, all_queries, all_heads, size_of_head])?;
    for (dim, length) in [queries, heads, size].into_iter().enumerate() {
        if b.dims(y)[dim + 1] != length {
            y = b.slice_dim(y, dim + 1, 0, length)?;
        }
    }
    Ok(Some(y))
}

/// `x` with zeros after its elements, up to `dims`.
fn pad_to(b: &Builder, x: Tensor, dims: &[usize]) -> Result<Tensor> {
    let own = b.dims(x);
    if own == dims {
        return Ok(x);
    }
    let missing = dims.iter().zip(&own).map(|(to, from)| PadDim {
        high: (to - from) as i64,
        ..PadDim::default()
    });
    b.pad(x, 0.0, &missing.collect::<Vec<_>>())
}
