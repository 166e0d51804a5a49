//! Host evaluation of gather and scatter, from StableHLO's definitions.

use crate::shape::Shape;

use super::value::{Data, Value, for_each_index, position};
use crate::graph::{GatherDims, ScatterDims, ScatterKind};

/// The index vector at `batch` of the index tensor.
fn index_vector(indices: &Value, batch: &[usize], vector_dim: usize) -> Vec<i64> {
    let dims = &indices.shape.dims;
    let count = dims.get(vector_dim).copied().unwrap_or(1);
    (0..count)
        .map(|k| {
            let mut at = batch.to_vec();
            if vector_dim < dims.len() {
                at.insert(vector_dim, k);
            }
            indices.int(position(dims, &at))
        })
        .collect()
}

pub(super) fn gather(x: &Value, indices: &Value, dims: &GatherDims, shape: Shape) -> Value {
    let rank = x.shape.rank();
    let mut out = Value::zeros(shape.clone());
    let mut place = 0;
    for_each_index(&shape.dims, |index| {
        let batch: Vec<usize> = (0..index.len())
            .filter(|d| !dims.offset_dims.contains(d))
            .map(|d| index[d])
            .collect();
        let start = index_vector(indices, &batch, dims.index_vector_dim);
        let mut at = vec![0usize; rank];
        for (i, &d) in dims.start_index_map.iter().enumerate() {
            let limit = (x.shape.dims[d] - dims.slice_sizes[d]) as i64;
            at[d] = start[i].clamp(0, limit) as usize;
        }
        let window = (0..rank).filter(|d| !dims.collapsed_slice_dims.contains(d));
        for (d, &o) in window.zip(&dims.offset_dims) {
            at[d] += index[o];
        }
        out.set(place, x, position(&x.shape.dims, &at));
        place += 1;
    });
    out
}

pub(super) fn scatter(
    kind: ScatterKind,
    x: &Value,
    indices: &Value,
    updates: &Value,
    dims: &ScatterDims,
) -> Value {
    let rank = x.shape.rank();
    let mut window_sizes = vec![1; rank];
    let window_dims = (0..rank).filter(|d| !dims.inserted_window_dims.contains(d));
    for (d, &u) in window_dims.zip(&dims.update_window_dims) {
        window_sizes[d] = updates.shape.dims[u];
    }
    let mut out = x.clone();
    let mut source = 0;
    for_each_index(&updates.shape.dims, |index| {
        let batch: Vec<usize> = (0..index.len())
            .filter(|d| !dims.update_window_dims.contains(d))
            .map(|d| index[d])
            .collect();
        let start = index_vector(indices, &batch, dims.index_vector_dim);
        let mut at = vec![0i64; rank];
        for (i, &d) in dims.scatter_dims_to_operand_dims.iter().enumerate() {
            at[d] = start[i];
        }
        // StableHLO drops the elements that are out of bounds, XLA the whole window; devices run XLA.
        let inside = (0..rank).all(|d| {
            let last = x.shape.dims[d] as i64 - window_sizes[d] as i64;
            (0..=last).contains(&at[d])
        });
        let window = (0..rank).filter(|d| !dims.inserted_window_dims.contains(d));
        for (d, &u) in window.zip(&dims.update_window_dims) {
            at[d] += index[u] as i64;
        }
        if inside {
            let at: Vec<usize> = at.iter().map(|i| *i as usize).collect();
            let place = position(&x.shape.dims, &at);
            match (kind, &mut out.data) {
                (ScatterKind::Set, _) => out.set(place, updates, source),
                (ScatterKind::Add, Data::F(v)) => v[place] += updates.float(source),
                (ScatterKind::Add, Data::I(v)) => {
                    v[place] = v[place].wrapping_add(updates.int(source));
                }
            }
        }
        source += 1;
    });
    out
}
