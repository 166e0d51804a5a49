//! Adapters: what is added to which weight.

use std::collections::BTreeMap;

use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayViewMut2, Axis};
use rayon::prelude::*;

use super::file::{Layer, LoraFile};
use super::{LoraError, LoraRanks, weight_name};
use crate::dtype::DType;
use crate::host_tensor::HostTensor;
use crate::models::original::Transform;
use crate::shape::Shape;
use crate::weights::cast;

/// Rows of a weight that one thread updates at a time.
const ROWS: usize = 64;

/// The updates of one model's weights by one LoRA file or several.
#[derive(Debug, Default)]
pub struct Adapter {
    pub(super) files: Vec<LoraFile>,
    /// By the weight's full name.
    pub(super) patched: BTreeMap<String, Patched>,
}

/// A weight and its updates.
#[derive(Debug)]
pub(super) struct Patched {
    pub dims: Vec<usize>,
    pub layers: Vec<Layer>,
}

/// The factors of a weight's whole update `up @ down`, in `f32`.
#[derive(Clone, Debug, PartialEq)]
pub struct Factors {
    /// `[rank, in]`, for a convolution `[rank, in, k, k]`.
    pub down: HostTensor,
    /// `[out, rank]`, with all scales in it.
    pub up: HostTensor,
}

impl Adapter {
    /// The updates of all of `adapters`.
    ///
    /// # Errors
    /// When they were resolved for models that have a weight in different shapes.
    pub fn stack(adapters: impl IntoIterator<Item = Adapter>) -> Result<Adapter, LoraError> {
        let mut all = Adapter::default();
        for adapter in adapters {
            let first = all.files.len();
            all.files.extend(adapter.files);
            for (name, mut patched) in adapter.patched {
                for layer in &mut patched.layers {
                    layer.file += first;
                }
                match all.patched.get_mut(&name) {
                    Some(before) if before.dims == patched.dims => {
                        before.layers.extend(patched.layers);
                    }
                    Some(before) => {
                        return Err(LoraError::Dims {
                            weight: name,
                            expected: before.dims.clone(),
                            found: patched.dims,
                        });
                    }
                    None => {
                        all.patched.insert(name, patched);
                    }
                }
            }
        }
        Ok(all)
    }

    /// The weights that are changed, by full name, with the ranks of their updates: the sums over all files.
    pub fn ranks(&self) -> LoraRanks {
        self.patched
            .iter()
            .map(|(name, patched)| (name.clone(), patched.rank()))
            .collect()
    }

    /// Whether a file changes the weight `key` of `root`.
    pub fn changes(&self, root: &str, key: &str) -> bool {
        self.patched.contains_key(&weight_name(root, key))
    }

    /// The weight `key` of `root` with its updates added, in `f32` and rounded once to the element type of `tensor`.
    /// A weight that no file changes is given back as it is.
    ///
    /// # Errors
    /// When `tensor` is not `f32`, `bf16` or `f16`, has other dimensions than the target had, or a file cannot be
    /// read.
    pub fn apply(
        &self,
        root: &str,
        key: &str,
        mut tensor: HostTensor,
    ) -> Result<HostTensor, LoraError> {
        let weight = weight_name(root, key);
        let Some(patched) = self.patched.get(&weight) else {
            return Ok(tensor);
        };
        let Shape { dtype, dims } = &tensor.shape;
        if *dims != patched.dims {
            return Err(LoraError::Dims {
                weight,
                expected: patched.dims.clone(),
                found: dims.clone(),
            });
        }
        if !cast::is_half_or_single(*dtype) {
            return Err(LoraError::NotFloat {
                weight,
                dtype: *dtype,
            });
        }
        let updates = patched
            .layers
            .iter()
            .map(|layer| Ok((self.read(&weight, layer)?, layer.scale as f32)))
            .collect::<Result<Vec<_>, LoraError>>()?;
        let columns: usize = dims[1..].iter().product();
        let (dtype, row_bytes) = (*dtype, dtype.storage_bytes(columns));
        if row_bytes == 0 {
            return Ok(tensor);
        }
        let chunks = tensor.data.par_chunks_mut(ROWS * row_bytes).enumerate();
        chunks
            .try_for_each(|(chunk, data)| {
                let rows = data.len() / row_bytes;
                let place = ndarray::s![chunk * ROWS..chunk * ROWS + rows, ..];
                let mut result = Ok(());
                cast::with_f32(dtype, data, |values| {
                    result = ArrayViewMut2::from_shape((rows, columns), values).map(|mut sum| {
                        for ((down, up), scale) in &updates {
                            general_mat_mul(*scale, &up.slice(place), down, 1.0, &mut sum);
                        }
                    });
                });
                result
            })
            .map_err(|source| LoraError::Matrix { weight, source })?;
        Ok(tensor)
    }

    /// The factors of a weight's update, those of all files stacked along the rank and their scales folded into `up`.
    /// `None` for a weight that no file changes.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn factors(&self, root: &str, key: &str) -> Result<Option<Factors>, LoraError> {
        let weight = weight_name(root, key);
        let Some(patched) = self.patched.get(&weight) else {
            return Ok(None);
        };
        let rank = patched.rank();
        let out = patched.dims.first().copied().unwrap_or_default();
        let mut down_values = Vec::new();
        let mut up_values = Array2::zeros((out, rank));
        let mut first = 0;
        for layer in &patched.layers {
            let (down, up) = self.read(&weight, layer)?;
            down_values.extend(down.into_raw_vec_and_offset().0);
            let place = ndarray::s![.., first..first + layer.rank];
            up_values
                .slice_mut(place)
                .assign(&(up * layer.scale as f32));
            first += layer.rank;
        }
        let mut down_dims = patched.dims.clone();
        if let Some(first) = down_dims.first_mut() {
            *first = rank;
        }
        let (up_values, _) = up_values.into_raw_vec_and_offset();
        let tensor = |dims: Vec<usize>, values: &[f32]| {
            HostTensor::from_f32(dims, values).map_err(|source| LoraError::HostTensor {
                weight: weight.clone(),
                source,
            })
        };
        Ok(Some(Factors {
            down: tensor(down_dims, &down_values)?,
            up: tensor(vec![out, rank], &up_values)?,
        }))
    }

    /// An update's factors as matrices: `[rank, in]`, with a convolution's kernel in `in`, and `[out, rank]`.
    fn read(&self, weight: &str, layer: &Layer) -> Result<(Array2<f32>, Array2<f32>), LoraError> {
        let read = |name: &str, rows: Option<usize>| {
            let tensor = self.files[layer.file].checkpoint.read(name)?;
            let rows = rows.unwrap_or(tensor.shape.count() / layer.rank);
            matrix(weight, f32_values(weight, tensor)?, rows)
        };
        let up = part_of(read(&layer.up, None)?, &layer.of_up);
        Ok((read(&layer.down, Some(layer.rank))?, up))
    }
}

impl Patched {
    fn rank(&self) -> usize {
        self.layers.iter().map(|l| l.rank).sum()
    }
}

/// The rows of an up factor that are for a weight.
fn part_of(up: Array2<f32>, part: &Transform) -> Array2<f32> {
    match part {
        Transform::Rows(rows) => up.slice(ndarray::s![rows.clone(), ..]).to_owned(),
        Transform::SwapHalves => {
            let (first, second) = up.view().split_at(Axis(0), up.nrows() / 2);
            ndarray::concatenate![Axis(0), second, first]
        }
        Transform::Identity
        | Transform::Transpose
        | Transform::Reshape(_)
        | Transform::UnitMatrix => up,
    }
}

fn f32_values(weight: &str, tensor: HostTensor) -> Result<Vec<f32>, LoraError> {
    let tensor = cast::cast(tensor, DType::F32);
    let tensor = tensor.map_err(|source| LoraError::HostTensor {
        weight: weight.to_owned(),
        source,
    })?;
    let mut values = vec![0.0; tensor.shape.count()];
    bytemuck::cast_slice_mut(&mut values).copy_from_slice(&tensor.data);
    Ok(values)
}

fn matrix(weight: &str, values: Vec<f32>, rows: usize) -> Result<Array2<f32>, LoraError> {
    let columns = values.len() / rows.max(1);
    Array2::from_shape_vec((rows, columns), values).map_err(|source| LoraError::Matrix {
        weight: weight.to_owned(),
        source,
    })
}
