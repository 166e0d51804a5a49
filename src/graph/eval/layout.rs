//! Host evaluation of operations that place elements elsewhere.

use crate::graph::PadDim;
use crate::shape::{Shape, row_major_strides};

use super::value::{Value, for_each_index, position};

pub(super) fn broadcast_in_dim(x: &Value, dims: &[usize], shape: Shape) -> Value {
    let own = row_major_strides(&x.shape.dims);
    let mut strides = vec![0; shape.rank()];
    for (at, place) in dims
        .iter()
        .enumerate()
        .filter(|(at, _)| x.shape.dims[*at] != 1)
    {
        strides[*place] = own[at];
    }
    x.strided(shape, 0, &strides)
}

pub(super) fn transpose(x: &Value, perm: &[usize], shape: Shape) -> Value {
    let own = row_major_strides(&x.shape.dims);
    let strides: Vec<usize> = perm.iter().map(|d| own[*d]).collect();
    x.strided(shape, 0, &strides)
}

pub(super) fn slice(x: &Value, start: &[usize], stride: &[usize], shape: Shape) -> Value {
    let own = row_major_strides(&x.shape.dims);
    let first = own.iter().zip(start).map(|(own, start)| own * start).sum();
    let strides: Vec<usize> = own
        .iter()
        .zip(stride)
        .map(|(own, stride)| own * stride)
        .collect();
    x.strided(shape, first, &strides)
}

pub(super) fn dynamic_slice(operands: &[&Value], shape: Shape) -> Value {
    let x = operands[0];
    let start = clamped_start(&operands[1..], &x.shape.dims, &shape.dims);
    slice(x, &start, &vec![1; start.len()], shape)
}

pub(super) fn dynamic_update_slice(operands: &[&Value], shape: &Shape) -> Value {
    let update = operands[1];
    let start = clamped_start(&operands[2..], &shape.dims, &update.shape.dims);
    let mut out = operands[0].clone();
    let mut source = 0;
    for_each_index(&update.shape.dims, |index| {
        let place: Vec<usize> = index.iter().zip(&start).map(|(i, s)| i + s).collect();
        out.set(position(&shape.dims, &place), update, source);
        source += 1;
    });
    out
}

fn clamped_start(indices: &[&Value], from: &[usize], sizes: &[usize]) -> Vec<usize> {
    indices
        .iter()
        .zip(from.iter().zip(sizes))
        .map(|(i, (size, slice))| i.int(0).clamp(0, (size - slice) as i64) as usize)
        .collect()
}

pub(super) fn pad(x: &Value, value: &Value, pads: &[PadDim], shape: Shape) -> Value {
    let sizes = shape.dims.clone();
    let mut out = value.pick(shape, |_| 0);
    let mut source = 0;
    for_each_index(&x.shape.dims, |index| {
        let place: Vec<i64> = index
            .iter()
            .zip(pads)
            .map(|(i, p)| *i as i64 * (p.interior as i64 + 1) + p.low)
            .collect();
        let inside = place
            .iter()
            .zip(&sizes)
            .all(|(i, size)| *i >= 0 && *i < *size as i64);
        if inside {
            let place: Vec<usize> = place.iter().map(|i| *i as usize).collect();
            out.set(position(&sizes, &place), x, source);
        }
        source += 1;
    });
    out
}

pub(super) fn concatenate(parts: &[&Value], dim: usize, shape: Shape) -> Value {
    let sizes = shape.dims.clone();
    let mut out = Value::zeros(shape);
    let mut before = 0;
    for part in parts {
        let mut source = 0;
        for_each_index(&part.shape.dims, |index| {
            let mut place = index.to_vec();
            place[dim] += before;
            out.set(position(&sizes, &place), part, source);
            source += 1;
        });
        before += part.shape.dims[dim];
    }
    out
}

pub(super) fn reverse(x: &Value, dims: &[usize], shape: Shape) -> Value {
    let sizes = shape.dims.clone();
    x.pick(shape, |index| {
        let source: Vec<usize> = (0..index.len())
            .map(|d| match dims.contains(&d) {
                true => sizes[d] - 1 - index[d],
                false => index[d],
            })
            .collect();
        position(&sizes, &source)
    })
}
