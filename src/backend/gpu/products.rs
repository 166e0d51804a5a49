//! Products of 8 bits that give the queries, keys and values of one attention, as one product.
//!
//! Their weights are joined while they are loaded. On an H200 three products of fp8 of 2,048 rows, 1,280 terms and 1,280 columns take
//! 24 us and one of 3,840 columns 20; in int8 35 and 23. The pass that scales the sums takes the columns apart again. In bf16, which
//! has no such pass, nothing would be gained.

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
        let operands: [u32; 3] = attention.operands.get(..3)?.try_into().ok()?;
        let mut products = operands.iter().map(|operand| self.product(*operand));
        let [Some(q), Some(k), Some(v)] = [products.next()?, products.next()?, products.next()?]
        else {
            return None;
        };
        let same = [k, v].iter().all(|other| {
            (
                other.0,
                other.1.operands[0],
                other.1.operands[2],
                &other.1.shape,
            ) == (q.0, q.1.operands[0], q.1.operands[2], &q.1.shape)
        });
        let of = |at: usize| {
            let [q, k, v] = [q, k, v].map(|(_, product)| self.weight(product.operands[at]));
            Some([q?, k?, v?])
        };
        (is_attention && same).then_some(())?;
        Some(Joined {
            dims: q.0,
            lhs: q.1.operands[0],
            lhs_scale: q.1.operands[2],
            weights: of(1)?,
            scales: of(3)?,
            results: operands.map(|operand| &self.node(operand).shape.dims[..]),
        })
    }

    /// The product of 8 bits that node `i` is, rounded to bf16 and reshaped, if nothing else reads it.
    fn product(&self, mut i: u32) -> Option<(&'g DotDims, &'g Node)> {
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
                    let is_linear = dims.lhs_batch.is_empty()
                        && dims.rhs_contract == [1]
                        && self.node(node.operands[1]).shape.rank() == 2;
                    let is_narrow =
                        |at: usize| self.node(node.operands[at]).shape.dtype.bits() == 8;
                    let takes = is_rounded && is_linear && is_narrow(0) && is_narrow(1);
                    return takes.then_some((dims, node));
                }
                _ => return None,
            }
            i = *node.operands.first()?;
        }
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
