//! Products of 8 bits that give the queries, keys and values of one attention, as one product.
//!
//! Their weights are joined while they are loaded. On an H200 three products of fp8 of 2,048 rows, 1,280 terms and 1,280 columns take
//! 24 us and one of 3,840 columns 20; in int8 35 and 23. The pass that scales the sums takes the columns apart again. In bf16, which
//! has no such pass, nothing would be gained. Products with a bias stay apart: UNets' have none.

use crate::backend::follow;
use crate::dtype::DType;
use crate::graph::{Builder, Composite, Contraction, DotDims, Graph, GraphError, Node, Op, Tensor};
use crate::quant::scaled_product;

/// The graph with one product of 8 bits for each attention whose queries, keys and values are products of the same rows.
///
/// # Errors
/// When the graph is ill-typed.
pub(super) fn join_attention_products(graph: &Graph) -> Result<Graph, GraphError> {
    let graph = graph.clone().without_repeats();
    let finder = Finder {
        graph: &graph,
        users: follow::users(&graph),
        of_weights: graph.weight_only(),
    };
    graph.substitute(&mut |b, i, copies| match finder.joined(i) {
        Some(joined) => joined.call(b, &graph.nodes[i], copies).map(Some),
        None => Ok(None),
    })
}

struct Finder<'g> {
    graph: &'g Graph,
    users: Vec<Vec<Option<usize>>>,
    /// Whether a node is made of weights alone.
    of_weights: Vec<bool>,
}

/// A product of 8 bits, with scales for its rows and its columns.
struct Product<'g> {
    dims: &'g DotDims,
    node: &'g Node,
}

/// Products that one product computes. Numbers are nodes.
struct Joined<'g> {
    dims: &'g DotDims,
    lhs: u32,
    lhs_scale: u32,
    /// Of queries, keys and values, before they are marked as stored.
    weights: [u32; 3],
    scales: [u32; 3],
    /// The dimensions of the queries, keys and values.
    results: [&'g [usize]; 3],
}

impl<'g> Finder<'g> {
    fn node(&self, i: u32) -> &'g Node {
        &self.graph.nodes[i as usize]
    }

    /// The products before the attention that is node `i`.
    fn joined(&self, i: usize) -> Option<Joined<'g>> {
        let attention = &self.graph.nodes[i];
        let is_attention = matches!(
            &attention.op,
            Op::Composite {
                kind: Composite::Attention { .. },
                ..
            }
        );
        is_attention.then_some(())?;
        let operands: [u32; 3] = attention.operands.get(..3)?.try_into().ok()?;
        let [q, k, v] = operands.map(|operand| self.product(operand));
        let [q, k, v] = [q?, k?, v?];
        let rows = |product: &Product<'_>| (product.node.operands[0], product.node.operands[2]);
        let is_same = |other: &Product<'_>| {
            (other.dims, rows(other), &other.node.shape) == (q.dims, rows(&q), &q.node.shape)
        };
        [&k, &v].into_iter().all(is_same).then_some(())?;
        let of = |at: usize| {
            let [q, k, v] = [&q, &k, &v].map(|product| self.weight(product.node.operands[at]));
            Some([q?, k?, v?])
        };
        let (lhs, lhs_scale) = rows(&q);
        Some(Joined {
            dims: q.dims,
            lhs,
            lhs_scale,
            weights: of(1)?,
            scales: of(3)?,
            results: operands.map(|operand| &self.node(operand).shape.dims[..]),
        })
    }

    /// The product of 8 bits that node `i` is, rounded to bf16 and reshaped, if nothing else reads it.
    fn product(&self, mut i: u32) -> Option<Product<'g>> {
        let mut is_rounded = false;
        loop {
            let node = self.node(i);
            let [Some(_)] = self.users[i as usize][..] else {
                return None;
            };
            match &node.op {
                Op::Reshape(_) => {}
                Op::Convert(DType::BF16) => is_rounded = true,
                Op::Composite {
                    kind:
                        Composite::ScaledContraction {
                            contraction: Contraction::Dot(dims),
                            lhs_scale: true,
                            rhs_scale: true,
                        },
                    ..
                } => {
                    return (is_rounded && self.is_linear(dims, node))
                        .then_some(Product { dims, node });
                }
                _ => return None,
            }
            i = *node.operands.first()?;
        }
    }

    /// Whether a product is one of 8 bits with a weight `[columns, terms]` that has a scale for each column.
    fn is_linear(&self, dims: &DotDims, product: &Node) -> bool {
        let shape = |at: usize| &self.node(product.operands[at]).shape;
        let is_narrow = |at: usize| shape(at).dtype.bits() == 8;
        let [weight, scale] = [1, 3].map(|at| &shape(at).dims[..]);
        dims.lhs_batch.is_empty()
            && dims.rhs_contract == [1]
            && matches!((weight, scale), ([columns, _], [scales]) if columns == scales)
            && is_narrow(0)
            && is_narrow(1)
    }

    /// What a weight, or its scales, is before it is stored.
    fn weight(&self, i: u32) -> Option<u32> {
        let node = self.node(i);
        let weight = match node.op {
            Op::Stored => node.operands[0],
            _ => i,
        };
        self.of_weights[i as usize].then_some(weight)
    }
}

impl Joined<'_> {
    /// The attention of the parts of the one product.
    fn call(&self, b: &Builder, attention: &Node, copies: &[Tensor]) -> Result<Tensor, GraphError> {
        let copy = |i: u32| copies[i as usize];
        let together = |parts: [u32; 3]| b.stored(b.concatenate(&parts.map(copy), 0)?);
        let operands = [
            copy(self.lhs),
            together(self.weights)?,
            copy(self.lhs_scale),
            together(self.scales)?,
        ];
        let contraction = Contraction::Dot(self.dims.clone());
        let kind = Composite::ScaledContraction {
            contraction: contraction.clone(),
            lhs_scale: true,
            rhs_scale: true,
        };
        let product = b.composite(kind, &operands, |b, operands| {
            scaled_product(b, operands, &contraction, [true; 2], DType::F32)
        })?;
        let product = b.convert(product, DType::BF16)?;
        let last = b.dims(product).len() - 1;
        let parts = b.split(product, last, 3)?;
        let parts = parts.iter().zip(self.results);
        let mut operands = parts
            .map(|(part, dims)| b.reshape(*part, dims))
            .collect::<Result<Vec<Tensor>, _>>()?;
        operands.extend(attention.operands[3..].iter().map(|operand| copy(*operand)));
        b.push(attention.op.clone(), &operands)
    }
}
