//! Cotangents of gather and scatter.

use crate::host_tensor::HostTensor;
use crate::shape::Shape;

use crate::graph::{
    Binary, Builder, Comparison, GatherDims, GraphError, Reduction, ScatterDims, ScatterKind,
    Tensor,
};

type Result<T> = std::result::Result<T, GraphError>;

/// The cotangent of a gather's operand: `g` added at the places that were read.
pub fn gather_operand(
    b: &Builder,
    g: Tensor,
    indices: Tensor,
    dims: &GatherDims,
    operand: &Shape,
) -> Result<Tensor> {
    let indices = clamped(b, indices, dims, operand)?;
    let zeros = b.full(operand, 0.0)?;
    b.scatter(
        ScatterKind::Add,
        zeros,
        indices,
        g,
        ScatterDims {
            update_window_dims: dims.offset_dims.clone(),
            inserted_window_dims: dims.collapsed_slice_dims.clone(),
            scatter_dims_to_operand_dims: dims.start_index_map.clone(),
            index_vector_dim: dims.index_vector_dim,
        },
    )
}

/// Gather clamps an index that is out of bounds where scatter drops it; the derivative reads what gather read.
fn clamped(b: &Builder, indices: Tensor, dims: &GatherDims, operand: &Shape) -> Result<Tensor> {
    let limits = dims
        .start_index_map
        .iter()
        .map(|&d| operand.dims[d] - dims.slice_sizes[d]);
    let limits = last_starts(b, indices, dims.index_vector_dim, limits)?;
    let zeros = b.full(&b.shape(indices), 0.0)?;
    let above = b.binary(Binary::Max, indices, zeros)?;
    b.binary(Binary::Min, above, limits)
}

/// The last start index within bounds for each element of `indices`, given those of one index vector.
fn last_starts(
    b: &Builder,
    indices: Tensor,
    vector_dim: usize,
    limits: impl Iterator<Item = usize>,
) -> Result<Tensor> {
    let shape = b.shape(indices);
    let limits: Vec<f64> = limits.map(|limit| limit as f64).collect();
    let limits = HostTensor::from_f64(Shape::new(shape.dtype, [limits.len()]), &limits)?;
    let limits = b.constant(limits)?;
    if vector_dim < shape.rank() {
        b.broadcast_in_dim(limits, &[vector_dim], &shape.dims)
    } else {
        let scalar = b.reshape(limits, &[])?;
        b.broadcast_in_dim(scalar, &[], &shape.dims)
    }
}

/// The cotangent of a scatter-add's updates: `g` read at the places that were written, zero for an update that was
/// dropped because its window lay out of bounds.
pub fn scatter_updates(
    b: &Builder,
    g: Tensor,
    indices: Tensor,
    dims: &ScatterDims,
    updates: &Shape,
) -> Result<Tensor> {
    let operand = b.dims(g);
    let rank = operand.len();
    let mut slice_sizes = vec![1; rank];
    let window_dims = (0..rank).filter(|d| !dims.inserted_window_dims.contains(d));
    for (d, &u) in window_dims.zip(&dims.update_window_dims) {
        slice_sizes[d] = updates.dims[u];
    }
    let limits = dims
        .scatter_dims_to_operand_dims
        .iter()
        .map(|&d| operand[d] - slice_sizes[d]);
    let limits = last_starts(b, indices, dims.index_vector_dim, limits)?;
    let zeros = b.full(&b.shape(indices), 0.0)?;
    let above = b.compare(Comparison::Ge, indices, zeros)?;
    let below = b.compare(Comparison::Le, indices, limits)?;
    let mut inside = b.binary(Binary::And, above, below)?;
    if dims.index_vector_dim < b.dims(indices).len() {
        inside = b.reduce(Reduction::And, inside, &[dims.index_vector_dim])?;
    }
    let batch: Vec<usize> = (0..updates.rank())
        .filter(|d| !dims.update_window_dims.contains(d))
        .collect();
    let inside = b.broadcast_in_dim(inside, &batch, &updates.dims)?;
    let read = b.gather(
        g,
        indices,
        GatherDims {
            offset_dims: dims.update_window_dims.clone(),
            collapsed_slice_dims: dims.inserted_window_dims.clone(),
            start_index_map: dims.scatter_dims_to_operand_dims.clone(),
            index_vector_dim: dims.index_vector_dim,
            slice_sizes,
        },
    )?;
    b.select(inside, read, b.full(updates, 0.0)?)
}
