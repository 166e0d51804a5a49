//! Writing a UNet with quantized weights.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use serde_json::{Map, Value};

use super::{Component, SourceError};
use crate::dtype::DType;
use crate::graph::{NumericsConvention, Range, TensorFormat};
use crate::host_tensor::HostTensor;
use crate::quant::{
    QuantizedWeight, WeightQuantError, quantize_weight, scale_name, tensor_scale_name,
    zero_point_name,
};
use crate::shape::Shape;
use crate::weights::cast::has_infinity;
use crate::weights::quantized::{CONFIG_KEY, Quantization, stored_tensors, to_file_order};
use crate::weights::save::{ScatteredFile, pytorch_metadata};
use crate::weights::{Checkpoint, TensorSpec, cast};

/// How a UNet is to be quantized.
#[derive(Clone, Debug)]
pub struct UNetQuantization {
    /// The formats of its layers, with the type in which weights are quantized as that of their scales.
    pub stored: Quantization,
    /// Weights are rounded to this type first, and those that stay in float are not wider.
    pub weights_dtype: DType,
}

/// A weight that was quantized.
#[derive(Clone, Debug)]
pub struct QuantizedTensor {
    /// The path of its layer.
    pub layer: String,
    pub dims: Vec<usize>,
    pub format: TensorFormat,
    /// The lowest and the highest scale.
    pub scale_range: [f32; 2],
    /// The ratio of the weight's power to that of its error, in decibels; infinite without an error.
    pub sqnr_db: f64,
    /// Bytes of the weight in the source.
    pub source_bytes: u64,
    /// Bytes of the integers and their scales.
    pub bytes: u64,
}

impl UNetQuantization {
    /// The type in which a float of the source is written.
    pub(super) fn float_type(&self, source: DType) -> DType {
        match source.bits() > self.weights_dtype.bits() {
            true => self.weights_dtype,
            false => source,
        }
    }

    /// The `config.json` of the UNet.
    pub(super) fn config(&self, source: &Map<String, Value>) -> Map<String, Value> {
        let mut config = source.clone();
        config.insert(CONFIG_KEY.to_owned(), self.stored.to_config());
        config
    }

    /// The tensors that are written, of those of the float UNet.
    pub(super) fn specs(&self, floats: Vec<TensorSpec>) -> Vec<TensorSpec> {
        let mut specs = Vec::with_capacity(2 * floats.len());
        for spec in floats {
            let format = self.stored.format_of(&spec.name);
            let stored = format.and_then(|f| stored_tensors(&spec.name, &spec.shape, f));
            match stored {
                Some(tensors) => {
                    let tensors = tensors.into_iter();
                    specs.extend(tensors.map(|(name, shape)| TensorSpec { name, shape }));
                }
                // One that is in float, or is refused when it is quantized.
                None => specs.push(spec),
            }
        }
        specs
    }

    /// The error of a tensor that stays in float, some of whose values are too large for `weights_dtype`.
    pub(super) fn overflow(&self, path: &Path, tensor: &str) -> SourceError {
        SourceError::Quantize {
            path: path.to_owned(),
            layer: tensor.to_owned(),
            source: WeightQuantError::Overflow {
                dtype: self.weights_dtype,
            },
        }
    }

    /// Writes the file of `specs`, a tensor at a time, and tells `wrote` the bytes of each.
    pub(super) fn write(
        &self,
        component: &Component,
        specs: &[TensorSpec],
        path: &Path,
        wrote: &mut dyn FnMut(u64),
    ) -> Result<Vec<QuantizedTensor>, SourceError> {
        let checkpoint = &component.checkpoint;
        if checkpoint.quantization().is_some() {
            let path = checkpoint.path().to_owned();
            return Err(SourceError::QuantizedAlready { path });
        }
        let types: HashMap<&str, DType> = specs
            .iter()
            .map(|spec| (spec.name.as_str(), spec.shape.dtype))
            .collect();
        let mut file = ScatteredFile::create(path, specs, &pytorch_metadata())?;
        let mut quantized = BTreeMap::new();
        let wanted = self.wanted(checkpoint, &types);
        checkpoint.read_all_with(&wanted, |name, tensor| {
            let Some(format) = self.stored.format_of(name) else {
                if has_infinity(tensor) {
                    return Err(self.overflow(checkpoint.path(), name));
                }
                file.write(name, &tensor.data)?;
                wrote(tensor.data.len() as u64);
                return Ok(());
            };
            let weight = self.quantized(checkpoint, name, tensor, format)?;
            file.write(name, &to_file_order(&weight.values))?;
            file.write(&scale_name(name), &weight.scale.data)?;
            let mut bytes = (weight.values.data.len() + weight.scale.data.len()) as u64;
            for (name, beside) in [
                (zero_point_name(name), &weight.zero_point),
                (tensor_scale_name(name), &weight.tensor_scale),
            ] {
                if let Some(beside) = beside {
                    file.write(&name, &beside.data)?;
                    bytes += beside.data.len() as u64;
                }
            }
            wrote(bytes);
            let source = checkpoint.info(name).map_or(0, Shape::bytes);
            let layer = name.trim_end_matches(".weight").to_owned();
            let row = QuantizedTensor {
                dims: weight.values.shape.dims.clone(),
                format,
                scale_range: weight.scale_range,
                sqnr_db: weight.sqnr_db(),
                source_bytes: source as u64,
                bytes,
                layer: layer.clone(),
            };
            quantized.insert(layer, row);
            Ok::<_, SourceError>(())
        })?;
        file.finish()?;
        Ok(quantized.into_values().collect())
    }

    /// What is read, and in which types: weights that are quantized in that of `weights_dtype`, or, where that holds
    /// every value of the source, in that of their scales at once.
    fn wanted<'a>(
        &self,
        checkpoint: &'a Checkpoint,
        types: &HashMap<&str, DType>,
    ) -> Vec<(&'a str, DType)> {
        let of = |(name, shape): (&'a str, &Shape)| {
            let scale = self.stored.format_of(name).and_then(scale_type);
            let is_exact = shape.dtype.bits() <= 32 && self.weights_dtype == DType::F32;
            let dtype = match scale {
                Some(scale) if is_exact => scale,
                Some(_) => self.weights_dtype,
                None => types.get(name).copied().unwrap_or(shape.dtype),
            };
            (name, dtype)
        };
        checkpoint.iter().map(of).collect()
    }

    fn quantized(
        &self,
        checkpoint: &Checkpoint,
        name: &str,
        tensor: &mut HostTensor,
        format: TensorFormat,
    ) -> Result<QuantizedWeight, SourceError> {
        let fail = |source| SourceError::Quantize {
            path: checkpoint.path().to_owned(),
            layer: name.trim_end_matches(".weight").to_owned(),
            source,
        };
        let elements = tensor.shape.dims.get(1).copied().unwrap_or(1);
        if format.element.bits() < 8 && !elements.is_multiple_of(2) {
            return Err(fail(WeightQuantError::Odd { elements }));
        }
        match scale_type(format) {
            Some(scale) if scale != tensor.shape.dtype => {
                let data = std::mem::take(&mut tensor.data);
                let shape = tensor.shape.clone();
                let tensor = cast(HostTensor { shape, data }, scale).map_err(|source| {
                    crate::weights::WeightsError::Cast {
                        name: name.to_owned(),
                        source,
                    }
                })?;
                quantize_weight(&tensor, format).map_err(fail)
            }
            _ => quantize_weight(tensor, format).map_err(fail),
        }
    }
}

/// The type in which weights of a format that is stored are quantized: that of their scales, where the convention leaves it
/// open.
fn scale_type(format: TensorFormat) -> Option<DType> {
    match (format.range, format.convention) {
        (
            Range::Stored(dtype),
            NumericsConvention::Aqt | NumericsConvention::Qwix | NumericsConvention::Quark,
        ) => Some(dtype),
        (Range::Stored(_), _) => Some(DType::F32),
        (Range::Dynamic | Range::Static(_), _) => None,
    }
}
