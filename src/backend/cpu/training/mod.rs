//! The claims of the CPU plugin's kernels in a training step, whose weights are new each time.

mod bf16;
mod int8;
mod layers;
mod update;

use crate::backend::follow;
use crate::graph::{Builder, DotDims, Graph, GraphError, Tensor};

use layers::Layers;
pub use layers::claims_in_training;

/// The nodes that read each node ([`follow::users`]).
type Users = Vec<Vec<Option<usize>>>;

/// The graph of a training step with the CPU plugin's kernels in place of its int8 products, of its products and
/// convolutions of bf16, and of attention, norms and gates in bf16; forward, and all of the derivative. So are updates of weights whose moments have
/// 8 bits, and the sums of squares that norms of gradients are.
///
/// # Errors
/// When the graph is ill-typed.
pub fn claim_training(graph: &Graph) -> Result<Graph, GraphError> {
    let users = follow::users(graph);
    let of_int8 = int8::products(graph, &users);
    let of_bf16 = bf16::products(graph, &users);
    let mut layers = Layers::of(graph);
    graph.substitute(&mut |b, i, copies| {
        if let Some(product) = of_int8.get(&i) {
            return product.call(b, graph, copies).map(Some);
        }
        if let Some(product) = of_bf16.get(&i) {
            return product.call(b, graph, copies).map(Some);
        }
        match layers.claim(b, i, copies)? {
            Some(layer) => Ok(Some(layer)),
            None => update::claim(b, graph, i, copies),
        }
    })
}

/// Where a matrix product's terms lie in an operand.
#[derive(Clone, Copy, PartialEq)]
enum Terms {
    Last,
    First,
}

impl Terms {
    /// `None` where `contract` are not the first or the last dimensions of `rank`, in order.
    fn of(contract: &[usize], rank: usize) -> Option<Terms> {
        let places = contract.iter().copied();
        if places.clone().eq(rank - contract.len()..rank) {
            Some(Terms::Last)
        } else {
            places.eq(0..contract.len()).then_some(Terms::First)
        }
    }

    /// An operand as a matrix, `[lines, terms]` or `[terms, lines]`.
    fn matrix(self, b: &Builder, x: Tensor, terms: usize) -> Result<Tensor, GraphError> {
        let lines = b.shape(x).count() / terms;
        match self {
            Terms::Last => b.reshape(x, &[lines, terms]),
            Terms::First => b.reshape(x, &[terms, lines]),
        }
    }
}

/// Where the terms lie in both operands of a dot, if it is one that the kernel takes.
fn terms_of_dot(dims: &DotDims, ranks: [usize; 2]) -> Option<[Terms; 2]> {
    let lhs = Terms::of(&dims.lhs_contract, ranks[0])?;
    let rhs = Terms::of(&dims.rhs_contract, ranks[1])?;
    dims.lhs_batch.is_empty().then_some([lhs, rhs])
}

/// The operands of a dot as matrices, and for each whether its terms come first.
fn matrices(
    b: &Builder,
    [lhs, rhs]: [Tensor; 2],
    [of_lhs, of_rhs]: [Terms; 2],
    terms: usize,
) -> Result<([Tensor; 2], [bool; 2]), GraphError> {
    let matrices = [of_lhs.matrix(b, lhs, terms)?, of_rhs.matrix(b, rhs, terms)?];
    Ok((
        matrices,
        [of_lhs, of_rhs].map(|place| place == Terms::First),
    ))
}
