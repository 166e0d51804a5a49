//! Shapes of the results of operations that index.

use crate::graph::{GatherDims, InferError, ScatterDims, constraint};
use crate::shape::Shape;

use super::{Result, attribute_length, count, distinct, element_type, first, fits};

pub(super) fn slice(
    [x]: [&Shape; 1],
    start: &[usize],
    limit: &[usize],
    stride: &[usize],
) -> Result<Shape> {
    attribute_length("start", x.rank(), start.len())?;
    attribute_length("limit", x.rank(), limit.len())?;
    attribute_length("stride", x.rank(), stride.len())?;
    let mut dims = Vec::with_capacity(x.rank());
    for i in 0..x.rank() {
        if start[i] > limit[i] || limit[i] > x.dims[i] || stride[i] == 0 {
            return Err(constraint(
                "slice",
                format!(
                    "{}:{}:{} is not a slice of dimension {i} of {x}",
                    start[i], limit[i], stride[i]
                ),
            ));
        }
        dims.push((limit[i] - start[i]).div_ceil(stride[i]));
    }
    Ok(x.with_dims(dims))
}

pub(super) fn dynamic_slice(operands: &[&Shape], sizes: &[usize]) -> Result<Shape> {
    let x = first(operands)?;
    count(operands, 1 + x.rank())?;
    scalar_indices(&operands[1..])?;
    attribute_length("slice sizes", x.rank(), sizes.len())?;
    fits("dynamic_slice", sizes, &x.dims)?;
    Ok(x.with_dims(sizes))
}

pub(super) fn dynamic_update_slice(operands: &[&Shape]) -> Result<Shape> {
    let x = first(operands)?;
    count(operands, 2 + x.rank())?;
    let update = operands[1];
    scalar_indices(&operands[2..])?;
    if update.dtype != x.dtype {
        return Err(InferError::ShapesDiffer {
            lhs: x.clone(),
            rhs: update.clone(),
        });
    }
    attribute_length("the update", x.rank(), update.rank())?;
    fits("dynamic_update_slice", &update.dims, &x.dims)?;
    Ok(x.clone())
}

fn scalar_indices(indices: &[&Shape]) -> Result<()> {
    for index in indices {
        if index.rank() != 0 || !index.dtype.is_int() {
            return Err(constraint(
                "start index",
                format!("expected an integer scalar, found {index}"),
            ));
        }
    }
    Ok(())
}

pub(super) fn gather([x, indices]: [&Shape; 2], dims: &GatherDims) -> Result<Shape> {
    let batch = index_batch(indices, dims.index_vector_dim)?;
    attribute_length("slice sizes", x.rank(), dims.slice_sizes.len())?;
    fits("gather", &dims.slice_sizes, &x.dims)?;
    distinct("collapsed_slice_dims", &dims.collapsed_slice_dims, x.rank())?;
    distinct("start_index_map", &dims.start_index_map, x.rank())?;
    attribute_length(
        "start_index_map",
        index_vector_len(indices, dims.index_vector_dim),
        dims.start_index_map.len(),
    )?;
    if let Some(d) = dims
        .collapsed_slice_dims
        .iter()
        .find(|d| dims.slice_sizes[**d] != 1)
    {
        return Err(constraint(
            "gather",
            format!(
                "collapsed dimension {d} has slice size {}",
                dims.slice_sizes[*d]
            ),
        ));
    }
    let offsets: Vec<usize> = (0..x.rank())
        .filter(|d| !dims.collapsed_slice_dims.contains(d))
        .map(|d| dims.slice_sizes[d])
        .collect();
    attribute_length("offset_dims", offsets.len(), dims.offset_dims.len())?;
    let rank = batch.len() + offsets.len();
    distinct("offset_dims", &dims.offset_dims, rank)?;
    let mut batch = batch.into_iter();
    let mut offsets = offsets.into_iter();
    let out: Vec<usize> = (0..rank)
        .filter_map(|d| {
            if dims.offset_dims.contains(&d) {
                offsets.next()
            } else {
                batch.next()
            }
        })
        .collect();
    Ok(x.with_dims(out))
}

pub(super) fn scatter([x, indices, updates]: [&Shape; 3], dims: &ScatterDims) -> Result<Shape> {
    let batch = index_batch(indices, dims.index_vector_dim)?;
    distinct(
        "update_window_dims",
        &dims.update_window_dims,
        updates.rank(),
    )?;
    distinct("inserted_window_dims", &dims.inserted_window_dims, x.rank())?;
    distinct(
        "scatter_dims_to_operand_dims",
        &dims.scatter_dims_to_operand_dims,
        x.rank(),
    )?;
    attribute_length(
        "scatter_dims_to_operand_dims",
        index_vector_len(indices, dims.index_vector_dim),
        dims.scatter_dims_to_operand_dims.len(),
    )?;
    if updates.dtype != x.dtype {
        return Err(InferError::ShapesDiffer {
            lhs: x.clone(),
            rhs: updates.clone(),
        });
    }
    let update_batch: Vec<usize> = (0..updates.rank())
        .filter(|d| !dims.update_window_dims.contains(d))
        .map(|d| updates.dims[d])
        .collect();
    if update_batch != batch {
        return Err(InferError::SizesDiffer {
            what: "scatter",
            left: "update batch",
            lhs: update_batch,
            right: "index batch",
            rhs: batch,
        });
    }
    let window: Vec<usize> = dims
        .update_window_dims
        .iter()
        .map(|&d| updates.dims[d])
        .collect();
    let target: Vec<usize> = (0..x.rank())
        .filter(|d| !dims.inserted_window_dims.contains(d))
        .map(|d| x.dims[d])
        .collect();
    attribute_length("update_window_dims", target.len(), window.len())?;
    fits("scatter", &window, &target)?;
    Ok(x.clone())
}

/// The dimensions of `indices` other than the index vector's.
fn index_batch(indices: &Shape, index_vector_dim: usize) -> Result<Vec<usize>> {
    if !indices.dtype.is_int() {
        return Err(element_type("indices", "an integer", indices.dtype));
    }
    if index_vector_dim > indices.rank() {
        return Err(InferError::DimensionNumbers {
            what: "index_vector_dim",
            dims: vec![index_vector_dim],
            rank: indices.rank(),
        });
    }
    let mut dims = indices.dims.clone();
    if index_vector_dim < dims.len() {
        dims.remove(index_vector_dim);
    }
    Ok(dims)
}

fn index_vector_len(indices: &Shape, index_vector_dim: usize) -> usize {
    indices.dims.get(index_vector_dim).copied().unwrap_or(1)
}
