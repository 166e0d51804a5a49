//! Writing a UNet with quantized weights.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::{Component, SourceError, quark};
use crate::dtype::DType;
use crate::graph::{Range, TensorFormat};
use crate::host_tensor::{HostTensor, HostTensorError};
use crate::quant::{
    LOW_RANK, LayerActivity, LayerErrors, LowRankError, LowRankOptions, Observer, QuantizedWeight,
    RoundedActivation, RoundingAlgorithm, WeightQuantError, WeightRounding, scale_name,
    tensor_scale_name, with_low_rank, zero_point_name,
};
use crate::shape::Shape;
use crate::weights::cast::has_infinity;
use crate::weights::quantized::{
    CONFIG_KEY, Quantization, QuantizedLayout, features_together, layer_tensors, weight_name,
};
use crate::weights::save::{ScatteredFile, pytorch_metadata};
use crate::weights::shared_bytes::to_file_order;
use crate::weights::{Checkpoint, TensorSpec, cast};

/// How a UNet is to be quantized.
#[derive(Clone, Debug)]
pub struct UNetQuantization {
    /// The formats of its layers, with the type in which weights are quantized as that of their scales.
    pub stored: Quantization,
    /// Weights are rounded to this type first, and those that stay in float are not wider.
    pub weights_dtype: DType,
    /// How weights are rounded.
    pub rounding: LayerRounding,
    /// Of layers whose weights are rounded otherwise, by their paths.
    pub roundings: BTreeMap<String, LayerRounding>,
    pub layout: QuantizedLayout,
    /// What is done with the weights of some layers beside, by their paths.
    pub plans: BTreeMap<String, LayerPlan>,
}

/// How a weight is rounded, as far as no plan of its layer says it.
#[derive(Clone, Copy, Debug, Default)]
pub struct LayerRounding {
    /// What decides the range of each scale.
    pub observer: Observer,
    /// Whether HQQ chooses the minimums of codes.
    pub is_hqq: bool,
}

/// What is done with the weight of a layer before it is quantized.
#[derive(Clone, Debug, Default)]
pub struct LayerPlan {
    /// What its input features are multiplied with: the scales of an activation, which it takes over.
    pub factors: Option<Vec<f32>>,
    /// What is written beside it, by names: the scale of its activation, or the factors that it is divided by.
    pub beside: Vec<(String, HostTensor)>,
    pub low_rank: Option<LowRankOptions>,
    /// Scales that training has learned, in the order of the numbers that have them.
    pub scales: Option<Vec<f32>>,
    /// What calibration saw of it.
    pub activity: Option<LayerActivity>,
    /// `x^T x` of what it reads, up to a factor, for GPTQ.
    pub hessian: Option<Arc<Vec<f32>>>,
}

impl LayerPlan {
    /// The mean of `x^T x` of what the weight is multiplied with: features that it has taken factors over for are divided by
    /// them.
    fn hessian_of_input(&self) -> Option<Cow<'_, [f32]>> {
        let hessian = self.hessian.as_deref()?.as_slice();
        let Some(factors) = &self.factors else {
            return Some(Cow::Borrowed(hessian));
        };
        let rows = hessian.chunks(factors.len()).zip(factors);
        let divided = rows.flat_map(|(row, of_row)| {
            row.iter()
                .zip(factors)
                .map(move |(x, factor)| x / (of_row * factor))
        });
        Some(Cow::Owned(divided.collect()))
    }
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
    /// What that does to what the layer computes of activations like those of calibration, and to the steps' results. `None`
    /// without calibration.
    pub errors: Option<LayerErrors>,
    /// [`LowRankOptions::alphas`]' best, where a low-rank product stands beside the weight.
    pub low_rank_alpha: Option<f64>,
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
    pub(super) fn config(&self, component: &Component) -> Map<String, Value> {
        let mut config = component.config.clone();
        let matrices = component.checkpoint.iter();
        let matrices = matrices.filter(|(_, shape)| [2, 4].contains(&shape.rank()));
        let layers =
            matrices.filter_map(|(name, shape)| Some((name.strip_suffix(".weight")?, shape)));
        let description = match self.layout {
            QuantizedLayout::Own => self.stored.to_config(),
            QuantizedLayout::Quark => {
                let layers: Vec<_> = layers.collect();
                quark::config(&self.stored, &layers, self.decomposition().as_ref())
            }
        };
        config.insert(CONFIG_KEY.to_owned(), description);
        config
    }

    /// How low-rank products are chosen, which is the same in all layers that have one.
    fn decomposition(&self) -> Option<quark::Decomposition> {
        let mut plans = self.plans.values();
        let options = plans.find_map(|plan| plan.low_rank.as_ref())?;
        Some(quark::Decomposition {
            rank: options.rank,
            alphas: options.alphas.clone(),
        })
    }

    /// The name under which a tensor that is not quantized is written.
    fn name_of<'a>(&self, name: &'a str) -> Cow<'a, str> {
        match self.layout {
            QuantizedLayout::Own => Cow::Borrowed(name),
            QuantizedLayout::Quark => quark::path_of(name, &self.stored),
        }
    }

    /// The tensors that are written, of those of the float UNet.
    pub(super) fn specs(&self, floats: Vec<TensorSpec>) -> Vec<TensorSpec> {
        let mut specs = Vec::with_capacity(2 * floats.len());
        for spec in floats {
            let layer = self.stored.layer_of(&spec.name);
            let stored = layer.and_then(|(layer, formats)| match self.layout {
                QuantizedLayout::Own => layer_tensors(layer, &spec.shape, formats),
                QuantizedLayout::Quark => {
                    quark::tensors(layer, &spec.shape, formats.weight, formats.low_rank)
                }
            });
            match stored {
                Some(tensors) => {
                    let tensors = tensors.into_iter();
                    specs.extend(tensors.map(|(name, shape)| TensorSpec { name, shape }));
                }
                // One that is in float, or is refused when it is quantized.
                None => {
                    let name = self.name_of(&spec.name).into_owned();
                    specs.push(TensorSpec { name, ..spec });
                }
            }
        }
        specs
    }

    /// The error of a tensor that stays in float, some of whose values are too large for `weights_dtype`.
    pub(super) fn overflow(&self, path: &Path, tensor: &str) -> SourceError {
        SourceError::Quantize {
            path: path.to_owned(),
            layer: tensor.to_owned(),
            source: LowRankError::Weight(WeightQuantError::Overflow {
                dtype: self.weights_dtype,
            }),
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
                file.write(&self.name_of(name), &tensor.data)?;
                wrote(tensor.data.len() as u64);
                return Ok(());
            };
            let layer = self.quantized(checkpoint, name, tensor, format)?;
            for (name, data) in layer.files(name, self.layout) {
                file.write(&name, &data)?;
            }
            let row = layer.row(checkpoint, name, format, self.layout);
            wrote(row.bytes);
            quantized.insert(row.layer.clone(), row);
            Ok::<_, SourceError>(())
        })?;
        file.finish()?;
        Ok(quantized.into_values().collect())
    }

    /// Bytes that are written of a tensor of the source, its scales included.
    pub fn bytes(&self, name: &str, shape: &Shape) -> u64 {
        let shape = match shape.dtype.is_float() {
            true => shape.with_dtype(self.float_type(shape.dtype)),
            false => shape.clone(),
        };
        let name = name.to_owned();
        let specs = self.specs(vec![TensorSpec { name, shape }]).into_iter();
        specs.map(|spec| spec.shape.bytes() as u64).sum()
    }

    /// What would be written of the weight of one layer.
    ///
    /// # Errors
    /// When the layer has no format, or its weight cannot be read or quantized.
    pub fn tried(
        &self,
        checkpoint: &Checkpoint,
        layer: &str,
    ) -> Result<QuantizedTensor, SourceError> {
        let name = weight_name(layer);
        let Some(format) = self.stored.format_of(&name) else {
            return Err(SourceError::Quantize {
                path: checkpoint.path().to_owned(),
                layer: layer.to_owned(),
                source: LowRankError::Weight(WeightQuantError::Scalar),
            });
        };
        let types = HashMap::new();
        let wanted = self.wanted(checkpoint, &types).into_iter();
        let dtype = wanted.into_iter().find(|(found, _)| *found == name);
        let dtype = dtype.map_or(self.weights_dtype, |(_, dtype)| dtype);
        let mut tensor = checkpoint.read_as(&name, dtype)?;
        let layer = self.quantized(checkpoint, &name, &mut tensor, format)?;
        Ok(layer.row(checkpoint, &name, format, self.layout))
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
            let layer = name.strip_suffix(".weight");
            let is_plain = layer.is_none_or(|layer| !self.plans.contains_key(layer));
            let is_exact = shape.dtype.bits() <= 32 && self.weights_dtype == DType::F32 && is_plain;
            let dtype = match scale {
                Some(scale) if is_exact => scale,
                Some(_) => self.weights_dtype,
                None => {
                    let dtype = types.get(self.name_of(name).as_ref()).copied();
                    dtype.unwrap_or(shape.dtype)
                }
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
    ) -> Result<QuantizedLayer, SourceError> {
        let layer = name.trim_end_matches(".weight");
        let fail = |source| SourceError::Quantize {
            path: checkpoint.path().to_owned(),
            layer: layer.to_owned(),
            source,
        };
        let elements = tensor.shape.dims.get(1).copied().unwrap_or(1);
        let together = features_together(format);
        if !elements.is_multiple_of(together) {
            return Err(fail(
                WeightQuantError::Together { elements, together }.into(),
            ));
        }
        let plan = self.plans.get(layer);
        let float = plan
            .is_some_and(|plan| plan.activity.is_some())
            .then(|| tensor.clone());
        let mut tensor = HostTensor {
            data: std::mem::take(&mut tensor.data),
            shape: tensor.shape.clone(),
        };
        let scale_type = scale_type(format).unwrap_or(tensor.shape.dtype);
        let as_scale = |tensor: HostTensor| match tensor.shape.dtype == scale_type {
            true => Ok(tensor),
            false => cast(tensor, scale_type).map_err(|source| {
                SourceError::from(crate::weights::WeightsError::Cast {
                    name: name.to_owned(),
                    source,
                })
            }),
        };
        let mut beside = plan.map_or_else(Vec::new, |plan| plan.beside.clone());
        if let Some(factors) = plan.and_then(|plan| plan.factors.as_ref()) {
            tensor = times_features(&tensor, factors).map_err(|e| fail(e.into()))?;
        }
        let options = plan.and_then(|plan| plan.low_rank.as_ref());
        let hessian = plan.and_then(|plan| plan.hessian_of_input());
        let of_layer = self.roundings.get(layer).unwrap_or(&self.rounding);
        let rounding = WeightRounding {
            observer: of_layer.observer,
            algorithm: match (plan.and_then(|plan| plan.scales.as_deref()), &hessian) {
                (Some(scales), _) => RoundingAlgorithm::Given(scales),
                (None, Some(hessian)) => RoundingAlgorithm::Gptq(hessian),
                (None, None) if of_layer.is_hqq => RoundingAlgorithm::Hqq,
                (None, None) => RoundingAlgorithm::Nearest,
            },
        };
        let (weight, low_rank_alpha) = match options {
            None => {
                let tensor = as_scale(tensor)?;
                let weight = rounding.quantize(&tensor, format);
                (weight.map_err(|e| fail(e.into()))?, None)
            }
            Some(options) => {
                let found = with_low_rank(&tensor, format, &rounding, options, scale_type);
                let found = found.map_err(fail)?;
                for (end, factor) in LOW_RANK.into_iter().zip([found.down, found.up]) {
                    let factor = factor.convert(DType::BF16).map_err(|e| fail(e.into()))?;
                    beside.push((format!("{layer}.{end}.weight"), factor));
                }
                (found.weight, Some(found.alpha))
            }
        };
        let activity = plan.and_then(|plan| plan.activity.as_ref());
        let errors = match (float, activity) {
            (Some(float), Some(activity)) => {
                let factors = plan.and_then(|plan| plan.factors.as_deref());
                let dims = &float.shape.dims;
                let left = stood_for(dims, &weight, &beside, factors);
                let left = left.map_err(|e| fail(e.into()))?;
                let float = float.to_f32_vec().map_err(|e| fail(e.into()))?;
                let stored = self.stored.layers.get(layer);
                let codes = weight.dequantized().map_err(|e| fail(e.into()))?;
                let rounded = stored.and_then(|stored| stored.activation);
                let rounded = rounded.map(|format| RoundedActivation {
                    format,
                    weight: &codes,
                });
                Some(activity.errors(&float, &left, dims, rounded))
            }
            _ => None,
        };
        Ok(QuantizedLayer {
            weight,
            beside,
            errors,
            low_rank_alpha,
        })
    }
}

/// A layer as it is written.
struct QuantizedLayer {
    weight: QuantizedWeight,
    /// Further tensors, by their names.
    beside: Vec<(String, HostTensor)>,
    errors: Option<LayerErrors>,
    low_rank_alpha: Option<f64>,
}

impl QuantizedLayer {
    /// What is written of it, by names; `name` is that of its weight.
    fn files(&self, name: &str, layout: QuantizedLayout) -> Vec<(String, Cow<'_, [u8]>)> {
        let weight = &self.weight;
        if layout == QuantizedLayout::Quark {
            let layer = name.trim_end_matches(".weight");
            let shape = weight.values.shape.with_dtype(DType::F32);
            let factors = self.beside.iter().map(|(_, factor)| &factor.data);
            let rank = self.beside.first().map(|(_, down)| down.shape.dims[0]);
            let named = quark::tensors(layer, &shape, weight.format, rank).unwrap_or_default();
            let packed = quark::bytes(weight).into_iter().map(Cow::Owned);
            let bytes = packed.chain(factors.map(|data| Cow::Borrowed(data.as_slice())));
            return named.into_iter().map(|(name, _)| name).zip(bytes).collect();
        }
        let mut files = vec![
            (
                name.to_owned(),
                to_file_order(&weight.values, weight.format),
            ),
            (
                scale_name(name),
                Cow::Borrowed(weight.scale.data.as_slice()),
            ),
        ];
        let beside = [
            (zero_point_name(name), &weight.zero_point),
            (tensor_scale_name(name), &weight.tensor_scale),
        ];
        let beside = beside
            .into_iter()
            .filter_map(|(name, tensor)| Some((name, tensor.as_ref()?)));
        let beside = beside.chain(
            self.beside
                .iter()
                .map(|(name, tensor)| (name.clone(), tensor)),
        );
        files.extend(beside.map(|(name, tensor)| (name, Cow::Borrowed(tensor.data.as_slice()))));
        files
    }

    /// What is told of it.
    fn row(
        &self,
        checkpoint: &Checkpoint,
        name: &str,
        format: TensorFormat,
        layout: QuantizedLayout,
    ) -> QuantizedTensor {
        let weight = &self.weight;
        let files = self.files(name, layout);
        QuantizedTensor {
            layer: name.trim_end_matches(".weight").to_owned(),
            dims: weight.values.shape.dims.clone(),
            format,
            scale_range: weight.scale_range,
            sqnr_db: weight.sqnr_db(),
            errors: self.errors.clone(),
            low_rank_alpha: self.low_rank_alpha,
            source_bytes: checkpoint.info(name).map_or(0, Shape::bytes) as u64,
            bytes: files.iter().map(|(_, data)| data.len() as u64).sum(),
        }
    }
}

/// `f32` values of a weight `[out, in, ..]` times a factor for each input feature.
fn times_features(weight: &HostTensor, factors: &[f32]) -> Result<HostTensor, HostTensorError> {
    let positions = weight.shape.dims.iter().skip(2).product::<usize>().max(1);
    let mut values = weight.to_f32_vec()?;
    for row in values.chunks_mut(factors.len() * positions) {
        for (values, factor) in row.chunks_mut(positions).zip(factors) {
            values.iter_mut().for_each(|x| *x *= factor);
        }
    }
    HostTensor::from_f32(weight.shape.dims.clone(), &values)
}

/// The weight `[out, in, ..]` of these dimensions that a quantized one, which has taken over `factors`, and a low-rank product
/// beside it stand for.
fn stood_for(
    dims: &[usize],
    weight: &QuantizedWeight,
    beside: &[(String, HostTensor)],
    factors: Option<&[f32]>,
) -> Result<Vec<f32>, HostTensorError> {
    let mut left = weight.dequantized()?;
    let tensor = |end: &str| beside.iter().find(|(name, _)| name.contains(end));
    if let [Some((_, down)), Some((_, up))] = LOW_RANK.map(tensor) {
        let rank = down.shape.dims[0];
        let (down, up) = (down.to_f32_vec()?, up.to_f32_vec()?);
        let inputs = dims[1];
        for (row, up) in left.chunks_mut(inputs).zip(up.chunks(rank)) {
            for (down, up) in down.chunks(inputs).zip(up) {
                row.iter_mut().zip(down).for_each(|(x, d)| *x += up * d);
            }
        }
    }
    if let Some(factors) = factors {
        let positions = dims.iter().skip(2).product::<usize>().max(1);
        for row in left.chunks_mut(factors.len() * positions) {
            for (values, factor) in row.chunks_mut(positions).zip(factors) {
                values.iter_mut().for_each(|x| *x /= factor);
            }
        }
    }
    Ok(left)
}

/// The type in which weights of a format that is stored are quantized: that of their scales, where the convention leaves it
/// open.
fn scale_type(format: TensorFormat) -> Option<DType> {
    match format.range {
        Range::Stored(dtype) if format.convention.is_of_programs() => Some(dtype),
        Range::Stored(_) => Some(DType::F32),
        Range::Dynamic | Range::Static(_) => None,
    }
}
