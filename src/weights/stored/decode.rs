//! Weights in parts, shown as they are stored or as the floats that they stand for.

use std::collections::BTreeMap;
use std::sync::Arc;

use rayon::prelude::*;

use crate::dtype::DType;
use crate::graph::{Granularity, NumericsConvention, TensorFormat};
use crate::host_tensor::{HostTensor, float8};
use crate::quant::{
    LOW_RANK, StoredFormats, StoredLayer, input_scale_name, scale_name, smooth_factor_name,
    tensor_scale_name, zero_point_name,
};
use crate::weights::cast::{cast_bytes, is_half_or_single};
use crate::weights::location::{Location, Order, Parts};
use crate::weights::open::Checkpoint;
use crate::weights::quantized::{Quantization, weight_name};
use crate::weights::{WeightsError, cast};

/// Elements that one thread makes at a time: they stay in the second cache.
const TASK: usize = 64 << 10;

impl Checkpoint {
    /// Shows the weights of layers as they are stored, in this program's own layout, where it has their format. Others
    /// stay the floats that they stand for. A checkpoint in that layout is as it is.
    pub fn pack(&mut self) {
        if self.quantization.is_some() {
            return;
        }
        let mut layers = StoredFormats::new();
        let mut tensors = BTreeMap::new();
        for (name, location) in std::mem::take(&mut self.tensors) {
            let layer = name.strip_suffix(".weight");
            let as_shown = location.order == Order::AsShown;
            let parts = match location.parts() {
                None => Parts::of_float8(&location),
                Some(parts) => Some(parts.clone()),
            };
            let stored = parts.filter(|_| as_shown);
            let stored = stored.and_then(|parts| Some((parts.layer(), parts.tensors(&name)?)));
            match (layer, stored) {
                (Some(layer), Some((formats, stored))) => {
                    layers.insert(layer.to_owned(), formats);
                    tensors.extend(stored);
                }
                _ => {
                    tensors.insert(name, location);
                }
            }
        }
        self.tensors = tensors;
        if !layers.is_empty() {
            self.quantization = Some(Arc::new(Quantization { layers }));
        }
    }

    /// Shows weights that are in this program's own layout as the floats that they stand for: undoes
    /// [`Checkpoint::pack`].
    pub fn widen(&mut self) {
        let Some(quantization) = self.quantization.take() else {
            return;
        };
        for (layer, stored) in &quantization.layers {
            let name = weight_name(layer);
            let scale = self.tensors.remove(&scale_name(&name));
            let (Some(codes), Some(scale)) = (self.tensors.remove(&name), scale) else {
                continue;
            };
            let run = codes.shape.count() / scale.shape.count().max(1);
            let parts = Parts {
                format: stored.weight,
                run: run.max(1),
                codes,
                scale,
                zero_point: self.tensors.remove(&zero_point_name(&name)),
                tensor_scale: self.tensors.remove(&tensor_scale_name(&name)),
                table: None,
                smooth: self.taken_over(layer, stored),
                low_rank: factors(&mut self.tensors, layer),
            };
            self.tensors.insert(name, Location::of_parts(parts));
        }
    }

    /// The error of a tensor that is not as it should be.
    pub(in crate::weights) fn wrong(&self, name: &str, reason: String) -> WeightsError {
        WeightsError::Tensor {
            path: self.path().to_owned(),
            tensor: name.to_owned(),
            reason,
        }
    }

    /// How many tensors are stored as codes and shown as the floats that they stand for.
    pub fn widened(&self) -> usize {
        let tensors = self.tensors.values();
        tensors
            .filter(|location| location.parts().is_some())
            .count()
    }

    /// The floats of a weight, in `dtype`; each is computed in `f32`, `code * scale`, and then rounded.
    pub(in crate::weights) fn read_parts(
        &self,
        name: &str,
        parts: &Parts,
        dtype: DType,
        finite: impl Fn(&[u8]) -> Result<(), WeightsError> + Sync,
    ) -> Result<HostTensor, WeightsError> {
        let shape = parts.codes.shape.with_dtype(DType::F32);
        let floats = |part: &Location| {
            let tensor = self.read_location(part)?;
            tensor.to_f32_vec().map_err(|source| WeightsError::Cast {
                name: name.to_owned(),
                source,
            })
        };
        let codes = self.read_location(&parts.codes)?;
        let mut scales = floats(&parts.scale)?;
        if let Some(one) = &parts.tensor_scale {
            let one = floats(one)?.first().copied().unwrap_or(1.0);
            scales.iter_mut().for_each(|scale| *scale *= one);
        }
        let zero_points = parts.zero_point.as_ref().map(floats).transpose()?;
        let table = match &parts.table {
            Some(table) => floats(table)?,
            None => table(parts.format, codes.shape.dtype),
        };
        let codes_of_table = if codes.shape.dtype.bits() < 8 {
            16
        } else {
            256
        };
        if table.len() < codes_of_table {
            return Err(self.wrong(name, format!("a table of {} numbers", table.len())));
        }
        let decoder = Decoder {
            codes: &codes.data,
            is_paired: codes.shape.dtype.bits() < 8,
            table,
            scales: &scales,
            zero_points: zero_points.as_deref(),
            is_added: parts.format.convention == NumericsConvention::Gguf,
            run: parts.run,
        };
        let beside = Beside {
            columns: shape.dims.iter().skip(1).product::<usize>().max(1),
            positions: shape.dims.iter().skip(2).product::<usize>().max(1),
            smooth: parts.smooth.as_ref().map(floats).transpose()?,
            low_rank: match &parts.low_rank {
                None => None,
                Some([down, up]) => Some([floats(down)?, floats(up)?]),
            },
        };
        let direct = if is_half_or_single(dtype) {
            dtype
        } else {
            DType::F32
        };
        let size = direct.storage_bytes(1);
        let mut data = vec![0; shape.count() * size];
        data.par_chunks_mut(TASK * size)
            .enumerate()
            .try_for_each_init(Vec::new, |values: &mut Vec<f32>, (task, out)| {
                values.resize(out.len() / size, 0.0);
                decoder.decode(task * TASK, values);
                beside.apply(task * TASK, values);
                let bytes = bytemuck::cast_slice(values);
                finite(bytes)?;
                match direct {
                    DType::F32 => out.copy_from_slice(bytes),
                    _ => cast_bytes(DType::F32, bytes, direct, out),
                }
                Ok::<_, WeightsError>(())
            })?;
        let tensor = HostTensor {
            shape: shape.with_dtype(direct),
            data,
        };
        cast(tensor, dtype).map_err(|source| WeightsError::Cast {
            name: name.to_owned(),
            source,
        })
    }
}

/// What codes are multiplied with.
struct Decoder<'a> {
    codes: &'a [u8],
    /// Whether two codes share a byte, the first in its lower half.
    is_paired: bool,
    /// What each code stands for.
    table: Vec<f32>,
    scales: &'a [f32],
    zero_points: Option<&'a [f32]>,
    /// Whether zero points are added to the products; else they are taken off the codes.
    is_added: bool,
    run: usize,
}

impl Decoder<'_> {
    /// The elements from `start` on.
    fn decode(&self, start: usize, out: &mut [f32]) {
        let mut done = 0;
        while done < out.len() {
            let at = start + done;
            let of_run = at / self.run;
            let count = ((of_run + 1) * self.run - at).min(out.len() - done);
            let scale = self.scales[of_run];
            // One for all, or one for each scale.
            let zero_point = |points: &[f32]| points[of_run.min(points.len() - 1)];
            let zero_point = self.zero_points.map_or(0.0, zero_point);
            let values = out[done..done + count].iter_mut().zip(at..);
            match (self.zero_points, self.is_added) {
                (None, _) => values.for_each(|(out, i)| *out = self.value(i) * scale),
                (Some(_), true) => {
                    values.for_each(|(out, i)| *out = self.value(i) * scale + zero_point);
                }
                (Some(_), false) => {
                    values.for_each(|(out, i)| *out = (self.value(i) - zero_point) * scale);
                }
            }
            done += count;
        }
    }

    fn value(&self, i: usize) -> f32 {
        let code = match self.is_paired {
            true => self.codes[i / 2] >> (4 * (i % 2)) & 0xf,
            false => self.codes[i],
        };
        self.table[usize::from(code)]
    }
}

/// What a weight in float has beside the floats of its codes.
struct Beside {
    /// Elements of an output feature.
    columns: usize,
    /// Those of them that belong to one input feature.
    positions: usize,
    /// By which an input feature is divided.
    smooth: Option<Vec<f32>>,
    /// Down and up, in row-major order. Their product is that with what was divided, as the codes'.
    low_rank: Option<[Vec<f32>; 2]>,
}

impl Beside {
    /// Changes the elements from `start` on, a row at a time.
    fn apply(&self, start: usize, values: &mut [f32]) {
        if self.smooth.is_none() && self.low_rank.is_none() {
            return;
        }
        let mut done = 0;
        while done < values.len() {
            let (row, column) = ((start + done) / self.columns, (start + done) % self.columns);
            let count = (self.columns - column).min(values.len() - done);
            let of_row = &mut values[done..done + count];
            if let Some([down, up]) = &self.low_rank {
                let rank = down.len() / self.columns;
                for (factor, down) in up[row * rank..][..rank]
                    .iter()
                    .zip(down.chunks_exact(self.columns))
                {
                    let down = &down[column..column + count];
                    for (value, down) in of_row.iter_mut().zip(down) {
                        *value += factor * down;
                    }
                }
            }
            if let Some(smooth) = &self.smooth {
                for (value, at) in of_row.iter_mut().zip(column..) {
                    *value /= smooth[at / self.positions];
                }
            }
            done += count;
        }
    }
}

impl Checkpoint {
    /// Takes the factors of input features that the weight of a layer has taken over.
    fn taken_over(&mut self, layer: &str, stored: &StoredLayer) -> Option<Location> {
        let of_features = stored
            .activation
            .is_some_and(|activation| activation.granularity == Granularity::Feature);
        match of_features {
            true => self.tensors.remove(&input_scale_name(layer)),
            false => self.tensors.remove(&smooth_factor_name(layer)),
        }
    }
}

/// Takes the low-rank factors of a layer.
fn factors(tensors: &mut BTreeMap<String, Location>, layer: &str) -> Option<[Location; 2]> {
    let [down, up] = LOW_RANK.map(|name| tensors.remove(&format!("{layer}.{name}.weight")));
    Some([down?, up?])
}

/// What each code of a format stands for, of codes that are stored as `dtype`.
fn table(format: TensorFormat, dtype: DType) -> Vec<f32> {
    if let Some(codebook) = format.codebook() {
        return codebook.to_vec();
    }
    match dtype {
        DType::S4 => (0..16_i8).map(|code| f32::from((code << 4) >> 4)).collect(),
        DType::F8E4M3Fn => (0..=255).map(float8::decode).collect(),
        DType::F8E5M2 => (0..=255).map(float8::decode_e5m2).collect(),
        dtype if dtype.is_signed_int() => (0..=255_u8).map(|code| f32::from(code as i8)).collect(),
        _ => (0..=255_u8).map(f32::from).collect(),
    }
}
