//! Values of one shape along a new first dimension, as loops over equal blocks take and give them.

use super::{Builder, Graph, GraphError, Op, Tensor};

type Result<T> = std::result::Result<T, GraphError>;

/// Values of one shape along a new first dimension. Neighbours that are entries of one stack already are taken from it as
/// one piece.
///
/// # Errors
/// When there are none, or their shapes differ.
pub fn stack(b: &Builder, values: &[Tensor]) -> Result<Tensor> {
    // The mark of what is stored goes behind the stack, so that the stack is what is stored.
    let stored = |value: &Tensor| {
        b.with_graph(|graph| {
            let node = &graph.nodes[value.index()];
            matches!(node.op, Op::Stored).then(|| b.tensor(node.operands[0]))
        })
    };
    if let Some(values) = values.iter().map(stored).collect::<Option<Vec<_>>>() {
        return b.stored(stack(b, &values)?);
    }
    let pieces = pieces(b, values)?;
    b.concatenate(&pieces, 0)
}

/// The stack of which these values are entries that follow each other, and the place of the first.
pub(super) fn run_of(b: &Builder, values: &[Tensor]) -> Option<(Tensor, usize)> {
    let (stack, first) = place(b, *values.first()?)?;
    let mut entries = values.iter().enumerate();
    let follow = entries.all(|(at, value)| place(b, *value) == Some((stack, first + at)));
    follow.then_some((stack, first))
}

/// The pieces of a stack of these values, along its first dimension.
fn pieces(b: &Builder, values: &[Tensor]) -> Result<Vec<Tensor>> {
    let mut pieces = Vec::new();
    let mut rest = values;
    while let Some(value) = rest.first() {
        let Some((stack, number)) = place(b, *value) else {
            let dims = b.dims(*value);
            let places: Vec<usize> = (1..=dims.len()).collect();
            pieces.push(b.broadcast_in_dim(*value, &places, &[&[1], &dims[..]].concat())?);
            rest = &rest[1..];
            continue;
        };
        let mut follow = rest.iter().enumerate();
        let end = follow.find(|(at, value)| place(b, **value) != Some((stack, number + at)));
        let count = end.map_or(rest.len(), |(at, _)| at);
        let is_whole = number == 0 && b.dims(stack)[0] == count;
        pieces.push(match is_whole {
            true => stack,
            false => b.slice_dim(stack, 0, number, number + count)?,
        });
        rest = &rest[count..];
    }
    Ok(pieces)
}

/// The stack that a value is an entry of, and its number.
fn place(b: &Builder, value: Tensor) -> Option<(Tensor, usize)> {
    let found = b.with_graph(|graph| place_in(graph, value.index()));
    found.map(|(stack, number)| (b.tensor(stack), number))
}

/// The stack that a node is an entry of, and its number: the reverse of [`entry_of`].
pub(super) fn place_in(graph: &Graph, id: usize) -> Option<(u32, usize)> {
    let entry = &graph.nodes[id];
    let (Op::Reshape(_), [slice]) = (&entry.op, &entry.operands[..]) else {
        return None;
    };
    let slice = &graph.nodes[*slice as usize];
    let (Op::Slice { start, limit, .. }, [stack]) = (&slice.op, &slice.operands[..]) else {
        return None;
    };
    let dims = &graph.nodes[*stack as usize].shape.dims[1..];
    let is_entry = limit[0] == start[0] + 1 && slice.shape.dims[1..] == *dims;
    (is_entry && entry.shape.dims == dims).then_some((*stack, start[0]))
}

/// Entry `number` of a stack.
pub(super) fn entry_of(b: &Builder, stack: Tensor, number: usize) -> Result<Tensor> {
    let entry = b.slice_dim(stack, 0, number, number + 1)?;
    b.reshape(entry, &b.dims(stack)[1..])
}

/// The graph with stacks of values that became entries of other stacks taken from these as one piece.
pub(super) fn merged(graph: &Graph) -> Result<Graph> {
    graph.substitute(&mut |b, id, copies| {
        let node = &graph.nodes[id];
        if node.op != Op::Concatenate(0) {
            return Ok(None);
        }
        let value = |part: &u32| {
            let part = &graph.nodes[*part as usize];
            let is_entry = matches!(&part.op, Op::BroadcastInDim { dims, .. }
                if part.shape.dims[0] == 1 && dims.iter().copied().eq(1..part.shape.rank()));
            is_entry.then(|| copies[part.operands[0] as usize])
        };
        let Some(values) = node.operands.iter().map(value).collect::<Option<Vec<_>>>() else {
            return Ok(None);
        };
        if !values.iter().any(|value| place(b, *value).is_some()) {
            return Ok(None);
        }
        b.concatenate(&pieces(b, &values)?, 0).map(Some)
    })
}
