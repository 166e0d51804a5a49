//! A weight in parts: its codes, and what is computed with them.

use std::collections::BTreeMap;
use std::ops::Range as Indices;
use std::sync::Arc;

use rayon::prelude::*;

use crate::dtype::DType;
use crate::graph::{Granularity, NumericsConvention, Range, TensorFormat};
use crate::host_tensor::{HostTensor, float8};
use crate::quant::{
    StoredFormats, StoredLayer, scale_dims, scale_name, tensor_scale_name, zero_point_name,
};
use crate::shape::Shape;
use crate::weights::cast::{cast_bytes, is_half_or_single};
use crate::weights::open::{Checkpoint, Location, Order};
use crate::weights::quantized::{Quantization, weight_name};
use crate::weights::{WeightsError, cast};

/// Elements that one thread makes at a time: they stay in the second cache.
const TASK: usize = 64 << 10;

/// Where the parts of a weight are, each in row-major order. A run of codes has one scale.
#[derive(Clone, Debug)]
pub(in crate::weights) struct Parts {
    /// Of range [`Range::Stored`]: what the codes are, and the type in which a program takes their scales.
    pub format: TensorFormat,
    /// In the dimensions of the weight.
    pub codes: Location,
    pub scale: Location,
    /// The zero point of each scale, or, in GGUF's numerics, the float that is added; one, or one for each scale.
    pub zero_point: Option<Location>,
    /// One number that multiplies all scales.
    pub tensor_scale: Option<Location>,
    /// The numbers that codes stand for, where the file has them and the format does not say.
    pub table: Option<Location>,
    /// The codes that share a scale; the last run may be shorter.
    pub run: usize,
}

impl Location {
    /// A weight of these parts, in `f32`.
    pub(in crate::weights) fn of_parts(parts: Parts) -> Location {
        Location {
            file: parts.codes.file,
            offset: parts.codes.offset,
            shape: parts.codes.shape.with_dtype(DType::F32),
            order: Order::AsShown,
            parts: Some(Arc::new(parts)),
        }
    }

    /// A number that no file has.
    pub(in crate::weights) fn constant(value: f32) -> Location {
        Location {
            file: 0,
            offset: 0,
            shape: Shape::scalar(DType::F32),
            order: Order::Constant(value.to_bits()),
            parts: None,
        }
    }

    /// A run of the elements, as a vector; `None` where its bytes hold others too, or they are in another order.
    fn elements(&self, run: Indices<usize>) -> Option<Location> {
        let mut part = self.clone();
        part.shape.dims = vec![run.len()];
        let bits = self.shape.dtype.bits();
        let bytes = match self.order {
            Order::AsShown | Order::HighFirst | Order::Times(_) => {
                let whole = |elements: usize| (elements * bits).is_multiple_of(8);
                (whole(run.start) && whole(run.end)).then_some(run.start * bits / 8)?
            }
            Order::Blocks(kind, part) => {
                let of_block = kind.values(part);
                let whole = |elements: usize| elements.is_multiple_of(of_block);
                (whole(run.start) && whole(run.end))
                    .then_some(run.start / of_block * kind.bytes())?
            }
            _ => return None,
        };
        part.offset += bytes as u64;
        Some(part)
    }
}

impl Parts {
    /// A weight of floats of 8 bits, which stand for themselves.
    fn of_float8(location: &Location) -> Option<Parts> {
        (location.shape.dtype == DType::F8E4M3Fn)
            .then(|| Parts::scaled(location, Location::constant(1.0)))
    }

    /// A weight that is `codes * scale`, with one scale, or one for each output feature.
    pub fn scaled(codes: &Location, scale: Location) -> Parts {
        let count = codes.shape.count();
        let channels = codes.shape.dims.first().copied().unwrap_or(1).max(1);
        let (granularity, run) = match scale.shape.count() {
            1 => (Granularity::Tensor, count),
            _ => (Granularity::Channel, count / channels),
        };
        Parts {
            format: TensorFormat {
                element: codes.shape.dtype,
                granularity,
                range: Range::Stored(scale.shape.dtype),
                ..TensorFormat::int8(NumericsConvention::Quark)
            },
            codes: codes.clone(),
            scale,
            zero_point: None,
            tensor_scale: None,
            table: None,
            run: run.max(1),
        }
    }

    /// Whether every code has a scale.
    pub fn check(&self) -> Result<(), String> {
        let (codes, scales) = (self.codes.shape.count(), self.scale.shape.count());
        let run = self.run;
        let expected = codes.div_ceil(run.max(1));
        if run == 0 || scales != expected {
            return Err(format!(
                "its {codes} elements take {expected} scales, one for {run}; found {scales}"
            ));
        }
        if let Some(zero_point) = &self.zero_point
            && ![1, scales].contains(&zero_point.shape.count())
        {
            return Err(format!(
                "it has {scales} scales and {} zero points",
                zero_point.shape.count()
            ));
        }
        let is_table = |table: &Location| [16, 256].contains(&table.shape.count());
        if let Some(table) = self.table.as_ref().filter(|table| !is_table(table)) {
            return Err(format!(
                "its table of codes is {}, expected 16 or 256 numbers",
                table.shape
            ));
        }
        match &self.tensor_scale {
            Some(one) if one.shape.count() != 1 => {
                Err(format!("its second scale is {}, not one number", one.shape))
            }
            _ => Ok(()),
        }
    }

    /// These rows of the weight.
    pub fn rows(&self, rows: &Indices<usize>) -> Result<Parts, String> {
        let shape = &self.codes.shape;
        let row = shape.count() / shape.dims.first().copied().unwrap_or(1).max(1);
        let codes = rows.start * row..rows.end * row;
        let shared = || format!("rows {rows:?} of {shape} share scales with others");
        let mut parts = self.clone();
        let dims = [&[rows.len()], &shape.dims[1..]].concat();
        parts.codes = self.codes.elements(codes.clone()).ok_or_else(shared)?;
        parts.codes.shape.dims = dims;
        if self.scale.shape.count() > 1 {
            let run = self.run;
            if !codes.start.is_multiple_of(run) || !codes.end.is_multiple_of(run) {
                return Err(shared());
            }
            let scales = codes.start / run..codes.end / run;
            let cut = |part: &Location| part.elements(scales.clone()).ok_or_else(shared);
            parts.scale = cut(&self.scale)?;
            if let Some(zero_point) = &self.zero_point
                && zero_point.shape.count() > 1
            {
                parts.zero_point = Some(cut(zero_point)?);
            }
        } else {
            parts.run = codes.len().max(1);
        }
        Ok(parts)
    }

    /// The tensors that hold the weight `name` in this program's own layout; `None` where that has no such format.
    fn tensors(&self, name: &str) -> Option<Vec<(String, Location)>> {
        let dims = &self.codes.shape.dims;
        let scale = scale_dims(dims, self.format.granularity)?;
        let scales = scale.iter().product::<usize>();
        let even = scales * self.run == self.codes.shape.count();
        if dims.len() < 2 || scales != self.scale.shape.count() || !even || self.table.is_some() {
            return None;
        }
        let shaped = |part: &Location| {
            let mut part = part.clone();
            part.shape.dims.clone_from(&scale);
            part
        };
        let mut tensors = vec![
            (name.to_owned(), self.codes.clone()),
            (scale_name(name), shaped(&self.scale)),
        ];
        if let Some(zero_point) = &self.zero_point {
            tensors.push((zero_point_name(name), shaped(zero_point)));
        }
        if let Some(one) = &self.tensor_scale {
            let mut one = one.clone();
            one.shape.dims.clear();
            tensors.push((tensor_scale_name(name), one));
        }
        Some(tensors)
    }
}

impl Checkpoint {
    /// Shows the weights of layers as they are stored, in this program's own layout, where it has their format. Others
    /// stay the floats that they stand for.
    pub fn pack(&mut self) {
        let mut layers = StoredFormats::new();
        let mut tensors = BTreeMap::new();
        for (name, location) in std::mem::take(&mut self.tensors) {
            let layer = name.strip_suffix(".weight");
            let as_shown = location.order == Order::AsShown;
            let parts = match &location.parts {
                None => Parts::of_float8(&location),
                Some(parts) => Some(Parts::clone(parts)),
            };
            let stored = parts.filter(|_| as_shown);
            let stored = stored.and_then(|parts| Some((parts.format, parts.tensors(&name)?)));
            match (layer, stored) {
                (Some(layer), Some((weight, stored))) => {
                    let activation = None;
                    layers.insert(layer.to_owned(), StoredLayer { weight, activation });
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
        tensors.filter(|location| location.parts.is_some()).count()
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
