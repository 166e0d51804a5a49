//! Derivatives of operations that place elements elsewhere.

use super::Result;
use crate::graph::{Builder, Op, PadDim, Tensor};
use crate::host_tensor::HostTensor;
use crate::shape::Shape;

pub(super) fn transpose(b: &Builder, g: Tensor, perm: &[usize]) -> Result<Tensor> {
    let mut inverse = vec![0; perm.len()];
    for (i, &p) in perm.iter().enumerate() {
        inverse[p] = i;
    }
    b.transpose(g, &inverse)
}

pub(super) fn slice(
    b: &Builder,
    g: Tensor,
    start: &[usize],
    stride: &[usize],
    operand: &Shape,
) -> Result<Tensor> {
    let result = b.dims(g);
    let pads: Vec<PadDim> = (0..start.len())
        .map(|i| {
            let size = result[i];
            let spanned = size + size.saturating_sub(1) * (stride[i] - 1);
            PadDim {
                low: start[i] as i64,
                high: operand.dims[i] as i64 - (start[i] + spanned) as i64,
                interior: stride[i] - 1,
            }
        })
        .collect();
    b.pad(g, 0.0, &pads)
}

/// The sum of two values that zeros pad along one dimension, where one starts as the other ends: what the cotangents of
/// neighbouring slices are. They are concatenated, so that neither is read again and no zeros are added.
pub(super) fn joined(b: &Builder, x: Tensor, y: Tensor) -> Result<Option<Tensor>> {
    let (Some(x), Some(y)) = (Padded::of(b, x), Padded::of(b, y)) else {
        return Ok(None);
    };
    let (first, second) = if x.low < y.low { (x, y) } else { (y, x) };
    let dim = first.dim;
    let end = first.low + b.dims(first.value)[dim] as i64;
    if second.dim != dim || second.low != end {
        return Ok(None);
    }
    let both = [parts(b, first.value, dim), parts(b, second.value, dim)].concat();
    let both = b.concatenate(&both, dim)?;
    if (first.low, second.high) == (0, 0) {
        return Ok(Some(both));
    }
    let mut pads = vec![PadDim::default(); b.dims(both).len()];
    pads[dim].low = first.low;
    pads[dim].high = second.high;
    b.pad(both, 0.0, &pads).map(Some)
}

/// What `t` concatenates along `dim`, or `t` itself.
fn parts(b: &Builder, t: Tensor, dim: usize) -> Vec<Tensor> {
    let parts = b.with_graph(|g| match &g.nodes[t.index()] {
        node if matches!(node.op, Op::Concatenate(along) if along == dim) => node.operands.clone(),
        _ => vec![t.id],
    });
    parts.into_iter().map(|id| b.tensor(id)).collect()
}

/// A value with zeros before and behind it along one dimension.
struct Padded {
    value: Tensor,
    dim: usize,
    low: i64,
    high: i64,
}

impl Padded {
    fn of(b: &Builder, t: Tensor) -> Option<Padded> {
        let (value, dim, pad) = b.with_graph(|g| {
            let node = &g.nodes[t.index()];
            let (Op::Pad(pads), &[value, by]) = (&node.op, &node.operands[..]) else {
                return None;
            };
            let Op::Constant(by) = &g.nodes[by as usize].op else {
                return None;
            };
            let mut padded = (0..pads.len()).filter(|&dim| pads[dim] != PadDim::default());
            let (dim, None) = (padded.next()?, padded.next()) else {
                return None;
            };
            let is_zero = *by == HostTensor::zeros(Shape::scalar(node.shape.dtype));
            is_zero.then_some((value, dim, pads[dim]))
        })?;
        let PadDim {
            low,
            high,
            interior,
        } = pad;
        let value = b.tensor(value);
        (low >= 0 && high >= 0 && interior == 0).then_some(Padded {
            value,
            dim,
            low,
            high,
        })
    }
}

/// The cotangent of the padded value (`position` 0) or of the padding value.
pub(super) fn pad(b: &Builder, g: Tensor, pads: &[PadDim], position: usize) -> Result<Tensor> {
    let crop: Vec<PadDim> = pads
        .iter()
        .map(|p| PadDim {
            low: -p.low,
            high: -p.high,
            interior: 0,
        })
        .collect();
    let cropped = b.pad(g, 0.0, &crop)?;
    let limit = b.dims(cropped);
    let stride: Vec<usize> = pads.iter().map(|p| p.interior + 1).collect();
    let inner = b.slice(cropped, &vec![0; limit.len()], &limit, &stride)?;
    if position == 0 {
        return Ok(inner);
    }
    let all: Vec<usize> = (0..limit.len()).collect();
    b.sub(b.sum(g, &all)?, b.sum(inner, &all)?)
}

/// Sums `g` over what `broadcast_in_dim` with `dims` had expanded from `operand`.
pub(super) fn sum_to(b: &Builder, g: Tensor, dims: &[usize], operand: &Shape) -> Result<Tensor> {
    let result = b.dims(g);
    let expanded: Vec<usize> = (0..result.len())
        .filter(|d| match dims.iter().position(|x| x == d) {
            None => true,
            Some(i) => operand.dims[i] != result[*d],
        })
        .collect();
    let summed = b.sum(g, &expanded)?;
    // What is left are the unexpanded operand dimensions, in the result's order.
    let mut kept: Vec<usize> = (0..dims.len())
        .filter(|i| !expanded.contains(&dims[*i]))
        .collect();
    let in_operand_order = kept.clone();
    kept.sort_by_key(|i| dims[*i]);
    let perm: Vec<usize> = in_operand_order
        .iter()
        .filter_map(|i| kept.iter().position(|k| k == i))
        .collect();
    b.reshape(b.transpose(summed, &perm)?, &operand.dims)
}
