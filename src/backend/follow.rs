//! What follows a product in a graph, for claims that take it with them.

use crate::dtype::DType;
use crate::graph::{Binary, Graph, Node, Op};

/// The live nodes that read each node; an output of the program counts as one more, `None`.
pub(super) fn users(graph: &Graph) -> Vec<Vec<Option<usize>>> {
    let live = graph.live_nodes();
    let mut users = vec![Vec::new(); graph.nodes.len()];
    for (i, node) in graph.nodes.iter().enumerate().filter(|(i, _)| live[*i]) {
        for operand in &node.operands {
            users[*operand as usize].push(Some(i));
        }
    }
    for output in &graph.outputs {
        users[output.node as usize].push(None);
    }
    users
}

/// The other operand of a sum or product of two nodes, one of which is `of`.
pub(super) fn other_term(of: u32, sum: &Node) -> Option<u32> {
    match sum.operands[..] {
        [a, b] if a == of && b != of => Some(b),
        [a, b] if b == of && a != of => Some(a),
        _ => None,
    }
}

/// The vector along the last dimension that `sum` adds to `product`, or multiplies it by, in bf16 if that is what it is widened from.
pub(super) fn vector(graph: &Graph, product: u32, sum: &Node) -> Option<u32> {
    let spread = &graph.nodes[other_term(product, sum)? as usize];
    let Op::BroadcastInDim { dims, .. } = &spread.op else {
        return None;
    };
    let last = sum.shape.rank() - 1;
    let source = widened(graph, spread.operands[0]);
    let whole = graph.nodes[source as usize].shape.dims == [sum.shape.dims[last]];
    (dims[..] == [last] && whole).then_some(source)
}

/// The product of node `product`, of which that is the only use, and a vector along its last dimension: its node, and the
/// vector, in bf16 if that is what it is widened from.
pub(super) fn scale(
    graph: &Graph,
    users: &[Vec<Option<usize>>],
    product: usize,
) -> Option<(usize, u32)> {
    let [Some(user)] = users[product][..] else {
        return None;
    };
    let node = &graph.nodes[user];
    let multiplies = matches!(node.op, Op::Binary(Binary::Mul));
    let scale = vector(graph, product as u32, node).filter(|_| multiplies)?;
    Some((user, scale))
}

/// Whether the only use of node `product`, in `f32`, is that it is multiplied, once or more, and rounded to bf16, perhaps after
/// something is added.
pub(super) fn is_rounded_when_scaled(
    graph: &Graph,
    users: &[Vec<Option<usize>>],
    product: usize,
) -> bool {
    let mut at = product;
    while let [Some(user)] = users[at][..] {
        match graph.nodes[user].op {
            Op::Binary(Binary::Mul) => at = user,
            Op::Binary(Binary::Add) if at != product => at = user,
            Op::Convert(DType::BF16) => return at != product,
            _ => return false,
        }
    }
    false
}

/// What is a product's only use: a bias, and rounding to bf16.
pub(super) struct Followed {
    /// The last node of them; the product itself where nothing follows it.
    pub root: usize,
    /// Along the last dimension, in bf16 if that is what it is widened from.
    pub bias: Option<u32>,
    pub result: DType,
}

/// What follows the product of node `product`, whose value is `f32`.
pub(super) fn bias_and_rounding(
    graph: &Graph,
    users: &[Vec<Option<usize>>],
    product: usize,
) -> Followed {
    let (mut root, mut bias) = (product, None);
    if let [Some(user)] = users[product][..]
        && matches!(graph.nodes[user].op, Op::Binary(Binary::Add))
    {
        bias = vector(graph, product as u32, &graph.nodes[user]);
        root = bias.map_or(product, |_| user);
    }
    let rounded = rounding(graph, users, root);
    Followed {
        root: rounded.unwrap_or(root),
        bias,
        result: rounded.map_or(DType::F32, |_| DType::BF16),
    }
}

/// The rounding to bf16 that is the only use of node `product`, if that is so.
pub(super) fn rounding(
    graph: &Graph,
    users: &[Vec<Option<usize>>],
    product: usize,
) -> Option<usize> {
    match users[product][..] {
        [Some(user)] if matches!(graph.nodes[user].op, Op::Convert(DType::BF16)) => Some(user),
        _ => None,
    }
}

/// The bf16 tensor that `id` is in `f32`, or `id` itself.
pub(super) fn widened(graph: &Graph, id: u32) -> u32 {
    let node = &graph.nodes[id as usize];
    match (&node.op, node.operands.first()) {
        (Op::Convert(DType::F32), Some(source))
            if graph.nodes[*source as usize].shape.dtype == DType::BF16 =>
        {
            *source
        }
        _ => id,
    }
}
