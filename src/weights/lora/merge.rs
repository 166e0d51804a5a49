//! Adapters: what is added to which weight.

use std::collections::{BTreeMap, BTreeSet};

use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayViewMut2, Axis};
use rayon::prelude::*;

use super::beside::factor_layer;
use super::file::{Layer, LoraFile};
use super::{LoraError, LoraRanks, LoraTarget, weight_name};
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
    /// The weights that stay as they are: their updates stand beside them.
    beside: BTreeSet<String>,
}

/// A weight and its updates.
#[derive(Debug)]
pub(super) struct Patched {
    pub dims: Vec<usize>,
    pub layers: Vec<Layer>,
    /// What is added to a bias.
    pub added: Vec<Added>,
    /// The tensor of a file that it is in place of, by the file's index.
    pub replaced: Option<(usize, String)>,
}

/// A part of a file's tensor that is added to a bias, times a scale.
#[derive(Clone, Debug)]
pub(super) struct Added {
    /// Index of the file.
    pub file: usize,
    pub tensor: String,
    pub part: Transform,
    pub scale: f64,
}

impl Added {
    /// `tensor` for the bias of `layer`.
    pub fn of(layer: &Layer, tensor: &str) -> Added {
        Added {
            file: layer.file,
            tensor: tensor.to_owned(),
            part: layer.of_up.clone(),
            scale: layer.scale,
        }
    }
}

impl Patched {
    fn new(target: &LoraTarget<'_>) -> Patched {
        Patched {
            dims: target.dims.to_vec(),
            layers: Vec::new(),
            added: Vec::new(),
            replaced: None,
        }
    }

    pub fn of_layer(target: &LoraTarget<'_>, layer: Layer) -> Patched {
        Patched {
            layers: vec![layer],
            ..Patched::new(target)
        }
    }

    pub fn of_bias(target: &LoraTarget<'_>, added: Added) -> Patched {
        Patched {
            added: vec![added],
            ..Patched::new(target)
        }
    }

    /// `tensor` of the first file in place of the weight.
    pub fn whole(target: &LoraTarget<'_>, tensor: String) -> Patched {
        Patched {
            replaced: Some((0, tensor)),
            ..Patched::new(target)
        }
    }
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
            all.beside.extend(adapter.beside);
            for (name, mut patched) in adapter.patched {
                patched
                    .layers
                    .iter_mut()
                    .for_each(|layer| layer.file += first);
                patched
                    .added
                    .iter_mut()
                    .for_each(|added| added.file += first);
                patched.replaced = patched.replaced.map(|(file, name)| (file + first, name));
                match all.patched.get_mut(&name) {
                    Some(before) if before.replaced.is_some() && patched.replaced.is_some() => {
                        return Err(LoraError::Replaced { weight: name });
                    }
                    Some(before) if before.dims == patched.dims => {
                        before.layers.extend(patched.layers);
                        before.added.extend(patched.added);
                        before.replaced = before.replaced.take().or(patched.replaced);
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

    /// The weights with low-rank updates, by full name, with the ranks of these: the sums over all files.
    pub fn ranks(&self) -> LoraRanks {
        let patched = self.patched.iter();
        patched
            .filter(|(_, patched)| !patched.layers.is_empty())
            .map(|(name, patched)| (name.clone(), patched.rank()))
            .collect()
    }

    /// Leaves the weights whose names `ranks` has as they are, because their updates stand beside them ([`super::beside`]).
    pub fn leave(&mut self, ranks: &LoraRanks) {
        self.beside.extend(ranks.keys().cloned());
    }

    /// Whether a file changes the weight `key` of `root` itself.
    pub fn changes(&self, root: &str, key: &str) -> bool {
        let weight = weight_name(root, key);
        self.patched.contains_key(&weight) && !self.beside.contains(&weight)
    }

    /// The weight `key` of `root` with its updates added, in `f32` and rounded once to the element type of `tensor`, or the
    /// one in its place. A weight that no file changes, or whose update
    /// stands beside it, is given back as it is.
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
        let patched = self.patched.get(&weight);
        let Some(patched) = patched.filter(|_| !self.beside.contains(&weight)) else {
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
        if patched.layers.is_empty() {
            return self.apply_whole(&weight, patched, tensor);
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

    /// A weight without low-rank updates: a bias that is added to, or a weight that is replaced.
    fn apply_whole(
        &self,
        weight: &str,
        patched: &Patched,
        tensor: HostTensor,
    ) -> Result<HostTensor, LoraError> {
        let failed = |source| LoraError::HostTensor {
            weight: weight.to_owned(),
            source,
        };
        let Shape { dtype, dims } = tensor.shape.clone();
        let mut values = match &patched.replaced {
            Some((file, name)) => f32_values(weight, self.files[*file].checkpoint.read(name)?)?,
            None => f32_values(weight, tensor)?,
        };
        for added in &patched.added {
            let bias = self.files[added.file].checkpoint.read(&added.tensor)?;
            let bias = matrix(weight, f32_values(weight, bias)?, None)?;
            let bias = part_of(bias, &added.part);
            for (value, bias) in values.iter_mut().zip(&bias) {
                *value += added.scale as f32 * bias;
            }
        }
        let whole = HostTensor::from_f32(dims, &values).map_err(failed)?;
        cast::cast(whole, dtype).map_err(failed)
    }

    /// Whether a weight is a factor of an update beside another ([`super::beside`]).
    pub fn has_factor(&self, root: &str, key: &str) -> bool {
        let layer = factor_layer(key).map(|(layer, _)| format!("{layer}.weight"));
        layer.is_some_and(|key| self.beside.contains(&weight_name(root, &key)))
    }

    /// The factor of an update beside a weight, by its own root and key ([`super::beside`]); `None` for other weights.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn factor(&self, root: &str, key: &str) -> Result<Option<HostTensor>, LoraError> {
        let Some((layer, is_up)) = factor_layer(key) else {
            return Ok(None);
        };
        let factors = self.factors(root, &format!("{layer}.weight"))?;
        Ok(factors.map(|factors| match is_up {
            true => factors.up,
            false => factors.down,
        }))
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
            matrix(weight, f32_values(weight, tensor)?, Some(rows))
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

/// A matrix of so many rows, or of one column.
fn matrix(weight: &str, values: Vec<f32>, rows: Option<usize>) -> Result<Array2<f32>, LoraError> {
    let rows = rows.unwrap_or(values.len());
    let columns = values.len() / rows.max(1);
    Array2::from_shape_vec((rows, columns), values).map_err(|source| LoraError::Matrix {
        weight: weight.to_owned(),
        source,
    })
}
