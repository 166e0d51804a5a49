//! Heads that fill no register, padded by the products that make them: the zeros are then those of weights, which are added once, and
//! not those of activations, which would be copied in every step.

use std::collections::HashMap;

use crate::backend::attention::has_quantized_products;
use crate::dtype::DType;
use crate::graph::{
    Binary, Builder, Composite, DotDims, Granularity, Graph, Op, PadDim, QuantDot, Tensor,
};

use super::attention::Padded;
use super::{Claims, Features, Result};

/// The graph with the kernel for each attention whose heads have to be padded where products with weights make its queries, keys and
/// values. What multiplies its result with weights then multiplies the zeros too. Products may be marked to be quantized, with
/// scales that zeros do not change. Weights that are quantized already stay as they are, and their products too.
///
/// # Errors
/// When the graph is ill-typed.
pub fn pad_heads(graph: &Graph, features: Features, parts: usize) -> Result<Graph> {
    let claims = &Claims::of(graph, features, parts);
    let nodes = 0..claims.graph.nodes.len();
    let found = nodes.filter_map(|i| Some((i, claims.padded_attention(i)?)));
    let found: HashMap<usize, PaddedAttention> = found.collect();
    let readers = found.iter().filter_map(|(i, of)| Some((of.reader?, *i)));
    let readers: HashMap<usize, usize> = readers.collect();
    // By the attention, with their padding.
    let mut results: HashMap<usize, Tensor> = HashMap::new();
    claims.graph.substitute(&mut |b, i, copies| {
        if let Some(of) = found.get(&i) {
            let y = claims.attend(b, of, copies)?;
            results.insert(i, y);
            return of.padded.without_heads_padding(b, y).map(Some);
        }
        let attention = readers.get(&i);
        let read = attention.and_then(|at| Some((&found[at].padded, *results.get(at)?)));
        let (Some((padded, y)), Some((dims, [_, weights]))) = (read, claims.rows_by_weights(i))
        else {
            return Ok(None);
        };
        let weights = pad_heads_of(b, padded, copies[weights as usize], dims.rhs_contract[0])?;
        b.push(claims.graph.nodes[i].op.clone(), &[y, weights])
            .map(Some)
    })
}

/// An attention in bf16 whose heads the kernel wants padded.
struct PaddedAttention {
    padded: Padded,
    /// What makes queries, keys and values.
    products: [HeadProduct; 3],
    /// The product that alone reads the result.
    reader: Option<usize>,
}

/// A product with weights whose columns are the features of heads, before its bias and its rounding to bf16.
struct HeadProduct {
    contraction: usize,
    bias: Option<u32>,
}

impl<'a> Claims<'a> {
    /// Node `i` as such an attention.
    fn padded_attention(&self, i: usize) -> Option<PaddedAttention> {
        let node = &self.graph.nodes[i];
        let Op::Composite {
            kind: Composite::Attention { causal: false },
            body,
        } = &node.op
        else {
            return None;
        };
        if has_quantized_products(body) {
            return None;
        }
        let &[q, k, v] = &node.operands[..] else {
            return None;
        };
        let shapes = [q, k, v].map(|id| &self.node(id).shape);
        let padded = Padded::of(shapes, self.features)?;
        if !padded.has_padded_heads() || self.users[i].is_empty() || !self.is_split(&node.shape) {
            return None;
        }
        let products = [q, k, v].map(|heads| self.head_product(heads, i));
        let [Some(q), Some(k), Some(v)] = products else {
            return None;
        };
        Some(PaddedAttention {
            padded,
            products: [q, k, v],
            reader: self.reader_of_heads(i),
        })
    }

    /// The product that makes `heads` for attention `i` alone.
    fn head_product(&self, heads: u32, i: usize) -> Option<HeadProduct> {
        let is_only_for = |id: u32, user: usize| {
            self.only_user(id as usize)
                .is_some_and(|(found, _)| found == user)
        };
        let node = self.node(heads);
        let &[root] = &node.operands[..] else {
            return None;
        };
        let is_split = matches!(node.op, Op::Reshape(_)) && self.node(root).shape.rank() == 3;
        if !is_split || !is_only_for(heads, i) || !is_only_for(root, heads as usize) {
            return None;
        }
        // From the rounding back to the product.
        let mut at = root;
        while self.rows_by_weights(at as usize).is_none() {
            let node = self.node(at);
            let follows = matches!(node.op, Op::Convert(_) | Op::Binary(Binary::Add));
            at = *node.operands.first().filter(|_| follows)?;
        }
        let contraction = at as usize;
        let (bias, rounded) = self.bias_and_rounding(contraction)?;
        (rounded == root as usize).then_some(HeadProduct { contraction, bias })
    }

    /// The product that alone reads the result of attention `i`, with its heads side by side.
    fn reader_of_heads(&self, i: usize) -> Option<usize> {
        let (rows, node) = self.only_user(i)?;
        let is_joined = matches!(node.op, Op::Reshape(_)) && node.shape.rank() == 3;
        let (reader, _) = self.only_user(rows).filter(|_| is_joined)?;
        let (_, [x, _]) = self.rows_by_weights(reader)?;
        (x as usize == rows).then_some(reader)
    }

    /// The operands of node `i` if it multiplies the last dimension of the first with a matrix made of weights that are not kept in another
    /// form.
    fn rows_by_weights(&self, i: usize) -> Option<(&'a DotDims, [u32; 2])> {
        let node = &self.graph.nodes[i];
        let Op::DotGeneral { dims, quant, .. } = &node.op else {
            return None;
        };
        let &[x, weights] = &node.operands[..] else {
            return None;
        };
        let last = self.node(x).shape.rank().checked_sub(1)?;
        let fits = self.node(weights).shape.rank() == 2
            && dims.lhs_batch.is_empty()
            && dims.lhs_contract == [last]
            && quant.as_deref().is_none_or(zeros_change_no_scale)
            && self.of_weights[weights as usize]
            && !self.from_stored[weights as usize];
        fits.then_some((dims, [x, weights]))
    }

    /// The kernel's result `[batch, queries, columns]`, with the padding of heads.
    fn attend(&self, b: &Builder, of: &PaddedAttention, copies: &[Tensor]) -> Result<Tensor> {
        let padded = &of.padded;
        let heads = of.products.each_ref().map(|product| {
            let node = &self.graph.nodes[product.contraction];
            let Some((dims, operands)) = self.rows_by_weights(product.contraction) else {
                return Err(b.invalid("heads that no product makes"));
            };
            let [x, weights] = operands.map(|id| copies[id as usize]);
            let weights = pad_heads_of(b, padded, weights, 1 - dims.rhs_contract[0])?;
            let mut y = b.push(node.op.clone(), &[x, weights])?;
            if let Some(bias) = product.bias {
                let bias = pad_heads_of(b, padded, copies[bias as usize], 0)?;
                let bias = b.convert(bias, b.dtype(y))?;
                let last = b.dims(y).len() - 1;
                y = b.add(y, b.broadcast_in_dim(bias, &[last], &b.dims(y))?)?;
            }
            padded.split(b, b.convert(y, DType::BF16)?)
        });
        let [q, k, v] = heads;
        padded.call(b, [q?, k?, v?])
    }
}

/// Whether scales belong to rows or columns as a whole: groups of features would be others with zeros among them.
fn zeros_change_no_scale(quant: &QuantDot) -> bool {
    let formats = [quant.forward.lhs, quant.forward.rhs];
    formats.into_iter().flatten().all(|format| {
        format.granularity == Granularity::Channel
            && !format.zero_point
            && !format.has_stored_scale()
    })
}

/// `x` with zeros behind the features of each head along `dim`, and behind the last head.
fn pad_heads_of(b: &Builder, padded: &Padded, x: Tensor, dim: usize) -> Result<Tensor> {
    let dims = b.dims(x);
    let with = |sizes: &[usize]| [&dims[..dim], sizes, &dims[dim + 1..]].concat();
    let [own, all] = padded.heads();
    let x = b.reshape(x, &with(&own))?;
    let mut missing = vec![PadDim::default(); dims.len() + 1];
    for (at, (own, all)) in own.into_iter().zip(all).enumerate() {
        missing[dim + at].high = (all - own) as i64;
    }
    let x = b.pad(x, 0.0, &missing)?;
    b.reshape(x, &with(&[all.iter().product()]))
}
