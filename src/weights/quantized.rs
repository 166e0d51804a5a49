//! Quantized checkpoints: this program's layout.
//!
//! Beside the integers of `<layer>.weight`, in the shape of the weight, stands their scale, `<layer>.weight_scale`, and where
//! the format has one the zero point, `<layer>.weight_zero_point`. Two input features of an int4 weight share a byte, the
//! first in its lower half: `u8[out, in / 2, ..]`. `quantization_config` in the part's `config.json` says which layers are
//! stored in which format, and what the program does with activations unless it is told otherwise. Where calibration found
//! the scale of an activation, it is `<layer>.input_scale`; layers of one parent that read the same activation have the same.
//! Factors that activations are divided by, and the weight is multiplied with, are `<layer>.smooth_factor`.
//! Low-rank factors are `<layer>.svd_down.weight` and `<layer>.svd_up.weight`, in `bf16`, or in `f32` where training has
//! changed them. Other tensors are as in any checkpoint.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::dtype::DType;
use crate::graph::{Granularity, NumericsConvention, Range, Rounding, TensorFormat};
use crate::quant::{
    LOW_RANK, StoredFormats, StoredLayer, input_scale_name, is_low_rank_factor, scale_dims,
    scale_name, smooth_factor_name, tensor_scale_name, zero_point_name,
};
use crate::shape::Shape;
use crate::util::named;
use crate::util::text::listed;

pub use super::shared_bytes::features_together;
use super::shared_bytes::{in_file, of_file};

/// The key of the description in `config.json`: diffusers' and transformers'.
pub const CONFIG_KEY: &str = "quantization_config";
/// The value of `quant_method` in it.
const METHOD: &str = "maxdiff-rs";
/// Of the layout. Version 1 had one format of activations for all layers.
const VERSION: u64 = 2;
/// How many problems an error shows.
const SHOWN: usize = 8;

named! {
    /// How a checkpoint names and packs quantized weights.
    pub enum QuantizedLayout {
        /// This program's, which has every format.
        Own = "maxdiff-rs",
        /// That of AMD Quark's `export_safetensors` with packed weights: linear layers alone, in Quark's formats of weights.
        Quark = "quark",
    }
}

/// How the weights of a checkpoint are stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quantization {
    /// The formats of layers: of their weights, and of activations unless a configuration says otherwise.
    pub layers: StoredFormats,
}

/// Why a quantized checkpoint is refused.
#[derive(Debug, thiserror::Error)]
pub enum QuantizedError {
    #[error(
        "{path}: quantized by {method:?}, whose files are not read here; read are those of bitsandbytes, torchao and AMD Quark, \
         GGUF and ComfyUI's files; take one of these, or the model's own checkpoint, and quantize it with `maxdiff-rs quantize`"
    )]
    Foreign { path: PathBuf, method: String },
    #[error(
        "{path}: {CONFIG_KEY} has version {found}, this program reads version {VERSION}; {}quantize the model again",
        if *found > VERSION { "take a newer maxdiff-rs, or " } else { "" }
    )]
    Version { path: PathBuf, found: u64 },
    #[error("{path}: {layer} is stored in {format}, which is not read here; read are {read}")]
    Format {
        path: PathBuf,
        layer: String,
        format: String,
        read: String,
    },
    #[error(
        "{path}: {} weights in fp8 have no scale (.scale_weight), although the file says that they are scaled: {}; it is not \
         whole: take it again",
        missing.len(),
        listed(missing, SHOWN)
    )]
    Scales { path: PathBuf, missing: Vec<String> },
    #[error("{path}: not as its {CONFIG_KEY} says: {reason}; files of two models may be mixed")]
    Disagrees { path: PathBuf, reason: String },
    #[error("{path}: {CONFIG_KEY}: {reason}")]
    Config { path: PathBuf, reason: String },
    #[error(
        "{path}: {} tensors are not as its {CONFIG_KEY} says: {}; files of two models may be mixed: quantize again",
        problems.len(),
        listed(problems, SHOWN)
    )]
    Tensors {
        path: PathBuf,
        problems: Vec<String>,
    },
}

/// The description of another program's weights in a `config.json`, and what it says of the program.
pub(super) fn foreign(config: &Map<String, Value>) -> Option<(&str, &Map<String, Value>)> {
    let description = config.get(CONFIG_KEY)?.as_object()?;
    let method = description.get("quant_method")?.as_str()?;
    (method != METHOD).then_some((method, description))
}

/// A format as it is written.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct WrittenFormat {
    element: String,
    granularity: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    group_size: Option<usize>,
    symmetric: bool,
    numerics: NumericsConvention,
    /// The type of the scales, in which weights were quantized; `null` for what is found at run time.
    scale_dtype: Option<String>,
}

/// The formats of some layers.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct WrittenLayers {
    weight: WrittenFormat,
    activation: Option<WrittenFormat>,
    /// Of what is multiplied in float beside the weight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    low_rank: Option<usize>,
    /// Whether activations are divided by factors that the weight has taken over.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    smoothed: bool,
    layers: Vec<String>,
}

impl Serialize for NumericsConvention {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// The whole description.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    #[serde(rename = "quant_method")]
    _method: String,
    #[serde(rename = "version")]
    _version: u64,
    #[serde(rename = "producer")]
    _producer: String,
    formats: Vec<WrittenLayers>,
}

/// The types of scales in files, by the names of PyTorch.
const SCALE_TYPES: [(&str, DType); 5] = [
    ("float32", DType::F32),
    ("bfloat16", DType::BF16),
    ("float16", DType::F16),
    ("float8_e4m3fn", DType::F8E4M3Fn),
    ("float8_e8m0fnu", DType::F8E8M0Fnu),
];

/// The elements of weights.
const ELEMENTS: [(&str, DType); 8] = [
    ("int8", DType::S8),
    ("int4", DType::S4),
    ("uint4", DType::U4),
    ("float8_e4m3fn", DType::F8E4M3Fn),
    ("nf4", DType::U4),
    ("float4_e2m1fn", DType::U4),
    ("float6_e2m3fn", DType::F8E4M3Fn),
    ("float6_e3m2fn", DType::F8E4M3Fn),
];

/// The name of a format's elements. Codes of 4 and of 6 bits have that of their numbers.
fn element_name(format: TensorFormat) -> String {
    match (format.codebook(), format.convention) {
        (_, NumericsConvention::MxE2M3) => "float6_e2m3fn".to_owned(),
        (_, NumericsConvention::MxE3M2) => "float6_e3m2fn".to_owned(),
        (Some(_), NumericsConvention::Nf4) => "nf4".to_owned(),
        (Some(_), _) => "float4_e2m1fn".to_owned(),
        (None, _) => name_of(&ELEMENTS, format.element),
    }
}

fn name_of(known: &[(&'static str, DType)], dtype: DType) -> String {
    let named = known.iter().find(|(_, known)| *known == dtype);
    named.map_or_else(|| dtype.to_string(), |(name, _)| (*name).to_owned())
}

/// The type of a name, or which names there are.
fn type_of(known: &[(&'static str, DType)], key: &str, name: &str) -> Result<DType, String> {
    let named = known.iter().find(|(known, _)| *known == name);
    named.map(|(_, dtype)| *dtype).ok_or_else(|| {
        let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
        unknown(key, name, &names.join(", "))
    })
}

fn unknown(key: &str, value: &str, known: &str) -> String {
    format!("{key} is {value:?}, which is not read here; read are {known}")
}

impl WrittenFormat {
    fn new(format: TensorFormat) -> WrittenFormat {
        let (granularity, group_size) = match format.granularity {
            // Parts of a batch are of training alone.
            Granularity::Tensor | Granularity::Part(_) => ("tensor", None),
            Granularity::Channel => ("channel", None),
            Granularity::Group(size) => ("group", Some(size)),
            Granularity::Feature => ("feature", None),
        };
        WrittenFormat {
            element: element_name(format),
            granularity: granularity.to_owned(),
            group_size,
            symmetric: !format.zero_point,
            numerics: format.convention,
            scale_dtype: match format.range {
                Range::Stored(_) => Some(name_of(&SCALE_TYPES, format.scale_type_in_files())),
                Range::Dynamic | Range::Static(_) => None,
            },
        }
    }

    fn read(&self) -> Result<TensorFormat, String> {
        let granularity = match (self.granularity.as_str(), self.group_size) {
            ("tensor", None) => Granularity::Tensor,
            ("channel", None) => Granularity::Channel,
            ("feature", None) => Granularity::Feature,
            ("group", Some(size)) if size > 0 => Granularity::Group(size),
            ("group", size) => {
                return Err(format!(
                    "granularity is \"group\" with group_size {size:?}; expected a number above 0"
                ));
            }
            ("tensor" | "channel" | "feature", Some(_)) => {
                return Err(format!(
                    "granularity {:?} has no group_size",
                    self.granularity
                ));
            }
            (other, _) => {
                return Err(unknown(
                    "granularity",
                    other,
                    "tensor, channel, group and, of activations, feature",
                ));
            }
        };
        let with_zero_points = [NumericsConvention::Quark, NumericsConvention::Gguf];
        if !self.symmetric && !with_zero_points.contains(&self.numerics) {
            return Err(format!(
                "symmetric is false, and {} has no zero points",
                self.numerics
            ));
        }
        let element = type_of(&ELEMENTS, "element", &self.element)?;
        let is_microscaled = matches!(
            self.numerics,
            NumericsConvention::Mx | NumericsConvention::MxE2M3 | NumericsConvention::MxE3M2
        );
        let is_float = element.is_float() && !is_microscaled;
        if is_float
            && (!self.symmetric
                || matches!(granularity, Granularity::Group(_))
                || ![NumericsConvention::Quark, NumericsConvention::Qwix].contains(&self.numerics))
        {
            return Err(format!(
                "{:?} is read with numerics \"quark\" or \"qwix\", symmetric and without groups",
                self.element
            ));
        }
        let scale = self.scale_dtype.as_ref();
        let scale = scale.map(|name| type_of(&SCALE_TYPES, "scale_dtype", name));
        let format = TensorFormat {
            element,
            granularity,
            zero_point: !self.symmetric,
            range: Range::Dynamic,
            rounding: Rounding::NearestEven,
            convention: self.numerics,
        };
        let Some(scale) = scale.transpose()? else {
            return Ok(format);
        };
        let format = format.stored(scale);
        // What the convention leaves open is as it is said; what it does not is checked.
        if element_name(format) != self.element || format.scale_type_in_files() != scale {
            return Err(format!(
                "numerics {} has no {:?} with scales in {:?}",
                self.numerics,
                self.element,
                self.scale_dtype.as_deref().unwrap_or_default()
            ));
        }
        let of_integers = self.numerics.is_of_programs();
        if of_integers && ![DType::F32, DType::BF16].contains(&scale) {
            return Err(unknown(
                "scale_dtype",
                &name_of(&SCALE_TYPES, scale),
                "float32 and bfloat16",
            ));
        }
        if !of_integers && !matches!(granularity, Granularity::Group(_)) {
            return Err(format!("numerics {} has groups alone", self.numerics));
        }
        Ok(format)
    }
}

impl WrittenLayers {
    fn read(&self) -> Result<StoredLayer, String> {
        let weight = self.weight.read()?;
        if !matches!(weight.range, Range::Stored(_)) {
            return Err("a format of weights has no scale_dtype".into());
        }
        if weight.granularity == Granularity::Feature {
            return Err("a weight has no scale for each feature".into());
        }
        let activation = self.activation.as_ref();
        let activation = activation.map(WrittenFormat::read).transpose()?;
        let is_int4 = activation.is_some_and(|format| is_int4_beside(format, weight));
        if let Some(format) = activation
            && format != TensorFormat::int8(format.convention)
            && !format.is_dynamic_float8()
            && !is_recorded_activation(format)
            && !is_int4
        {
            return Err(
                "activation: expected int8 with a scale for each channel that is found at run time, or fp8 with one or one for \
                 each channel, in qwix's numerics; either with one scale or one for each feature that is stored, in quark's \
                 numerics, int8 in narrow too; or int4 as the weight, symmetric, in quark's or narrow numerics"
                    .into(),
            );
        }
        if self.low_rank == Some(0) {
            return Err("low_rank is 0; expected a number above, or none".into());
        }
        if let Some(format) = activation
            && !is_int4
            && (weight.element != format.element || !weight.scales_results())
        {
            return Err(
                "activation: int8 and fp8 activations are multiplied with symmetric weights of the same type that have no groups"
                    .into(),
            );
        }
        Ok(StoredLayer {
            weight,
            activation,
            low_rank: self.low_rank,
            smoothed: self.smoothed,
        })
    }
}

/// Whether activations have this format, int4 that is found at run time, beside a weight in int4 with as many scales.
fn is_int4_beside(format: TensorFormat, weight: TensorFormat) -> bool {
    let has_groups = matches!(
        weight.granularity,
        Granularity::Channel | Granularity::Group(_)
    );
    weight.element == DType::S4
        && weight.convention.has_activations()
        && !weight.zero_point
        && has_groups
        && format
            == TensorFormat {
                range: Range::Dynamic,
                ..weight
            }
}

/// Whether activations have this format by a scale that calibration found.
fn is_recorded_activation(format: TensorFormat) -> bool {
    let is_here = match format.element {
        DType::S8 => format.convention.has_activations(),
        DType::F8E4M3Fn => format.convention == NumericsConvention::Quark,
        _ => false,
    };
    let recorded = |granularity| {
        TensorFormat {
            element: format.element,
            granularity,
            range: format.range,
            ..TensorFormat::int8(format.convention)
        } == format
            && is_here
    };
    matches!(format.range, Range::Stored(_))
        && (recorded(Granularity::Tensor) || recorded(Granularity::Feature))
}

impl Quantization {
    /// Reads the description in a `config.json`, whose path is for messages; `None` where there is none.
    ///
    /// # Errors
    /// When it is another program's, of another version, or makes no sense.
    pub fn of_config(
        path: &Path,
        config: &Map<String, Value>,
    ) -> Result<Option<Quantization>, QuantizedError> {
        let Some(value) = config.get(CONFIG_KEY).filter(|value| !value.is_null()) else {
            return Ok(None);
        };
        let bad = |reason: String| QuantizedError::Config {
            path: path.to_owned(),
            reason,
        };
        match value.get("quant_method").and_then(Value::as_str) {
            Some(METHOD) => {}
            Some(method) => {
                return Err(QuantizedError::Foreign {
                    path: path.to_owned(),
                    method: method.to_owned(),
                });
            }
            None => {
                return Err(bad(
                    "there is no quant_method, which says whose it is".into()
                ));
            }
        }
        match value.get("version").and_then(Value::as_u64) {
            Some(VERSION) => {}
            Some(found) => {
                return Err(QuantizedError::Version {
                    path: path.to_owned(),
                    found,
                });
            }
            None => return Err(bad("there is no version; expected a number".into())),
        }
        let written = Written::deserialize(value).map_err(|e| bad(e.to_string()))?;
        Quantization::of_written(&written).map(Some).map_err(bad)
    }

    fn of_written(written: &Written) -> Result<Quantization, String> {
        let mut layers = StoredFormats::new();
        for group in &written.formats {
            let formats = group.read()?;
            for layer in &group.layers {
                if layers.insert(layer.clone(), formats).is_some() {
                    return Err(format!("the layer {layer} stands twice"));
                }
            }
        }
        match layers.is_empty() {
            true => Err("no layer is quantized".into()),
            false => Ok(Quantization { layers }),
        }
    }

    /// What [`Quantization::of_config`] reads.
    pub fn to_config(&self) -> Value {
        let mut groups: Vec<(StoredLayer, Vec<String>)> = Vec::new();
        for (layer, formats) in &self.layers {
            match groups.iter_mut().find(|(known, _)| known == formats) {
                Some((_, layers)) => layers.push(layer.clone()),
                None => groups.push((*formats, vec![layer.clone()])),
            }
        }
        let written = groups.into_iter().map(|(formats, layers)| WrittenLayers {
            weight: WrittenFormat::new(formats.weight),
            activation: formats.activation.map(WrittenFormat::new),
            low_rank: formats.low_rank,
            smoothed: formats.smoothed,
            layers,
        });
        json!({
            "quant_method": METHOD,
            "version": VERSION,
            "producer": concat!("maxdiff-rs ", env!("CARGO_PKG_VERSION")),
            "formats": written.collect::<Vec<_>>(),
        })
    }

    /// Checks that the tensors of files are as described, and no others are integers or scales. `path` is for messages.
    ///
    /// # Errors
    /// Names every tensor that is not.
    pub(super) fn check(
        &self,
        path: &Path,
        tensors: &BTreeMap<&str, &Shape>,
    ) -> Result<(), QuantizedError> {
        let mut expected: BTreeMap<String, Shape> = BTreeMap::new();
        let mut problems = Vec::new();
        for (layer, formats) in &self.layers {
            let format = &formats.weight;
            let weight = weight_name(layer);
            let Some(found) = tensors.get(weight.as_str()) else {
                problems.push(format!("{weight} is missing"));
                continue;
            };
            let shape = of_file(found, *format);
            match shape.and_then(|shape| layer_tensors(layer, &shape, formats)) {
                Some(tensors) => expected.extend(tensors),
                None => problems.push(format!("{weight} {found} cannot be of its format")),
            }
        }
        for (name, expected) in &expected {
            match tensors.get(name.as_str()) {
                None => problems.push(format!("{name} is missing")),
                Some(found) if !fits(name, found, expected) => {
                    problems.push(format!("{name} is {found}, expected {expected}"));
                }
                Some(_) => {}
            }
        }
        for (name, shape) in tensors {
            let is_quantized = !shape.dtype.is_float()
                || shape.dtype.bits() < 16
                || BESIDE.iter().any(|end| name.ends_with(end));
            if is_quantized && !expected.contains_key(*name) {
                problems.push(format!("{name} {shape} is of no layer that is described"));
            }
        }
        match problems.is_empty() {
            true => Ok(()),
            false => Err(QuantizedError::Tensors {
                path: path.to_owned(),
                problems,
            }),
        }
    }

    /// Whether a tensor of this name is a scale, a zero point or a factor of a layer whose weight is quantized.
    pub fn is_beside(&self, name: &str) -> bool {
        let layer = BESIDE.iter().find_map(|end| name.strip_suffix(end));
        layer.is_some_and(|layer| self.layers.contains_key(layer))
    }

    /// The format of a tensor that holds the integers of a weight.
    pub fn format_of(&self, name: &str) -> Option<TensorFormat> {
        self.layer_of(name).map(|(_, layer)| layer.weight)
    }

    /// The layer whose weight `name` is, with its path.
    pub(super) fn layer_of<'n>(&self, name: &'n str) -> Option<(&'n str, &StoredLayer)> {
        let layer = name.strip_suffix(".weight")?;
        Some((layer, self.layers.get(layer)?))
    }
}

/// The ends of the names of what stands beside a weight, after its layer's path.
const BESIDE: [&str; 7] = [
    ".weight_scale",
    ".weight_scale_2",
    ".weight_zero_point",
    ".input_scale",
    ".smooth_factor",
    ".svd_down.weight",
    ".svd_up.weight",
];

/// Whether a tensor is as it should be: low-rank factors that training has changed are in `f32`, so that it goes on with
/// what it left.
fn fits(name: &str, found: &Shape, expected: &Shape) -> bool {
    let is_trained = found.dtype == DType::F32 && is_low_rank_factor(name);
    found == expected || is_trained && found.dims == expected.dims
}

/// The tensors of a file that a layer has whose weight has this shape; `None` where the shape has no such formats.
pub(super) fn layer_tensors(
    layer: &str,
    shape: &Shape,
    formats: &StoredLayer,
) -> Option<Vec<(String, Shape)>> {
    let mut tensors = stored_tensors(&weight_name(layer), shape, formats.weight)?;
    if let Some(TensorFormat {
        range: Range::Stored(dtype),
        granularity,
        ..
    }) = formats.activation
    {
        let dims = match granularity {
            Granularity::Feature => vec![*shape.dims.get(1)?],
            Granularity::Tensor
            | Granularity::Channel
            | Granularity::Group(_)
            | Granularity::Part(_) => Vec::new(),
        };
        tensors.push((input_scale_name(layer), Shape::new(dtype, dims)));
    }
    if formats.smoothed {
        let dims = [*shape.dims.get(1)?];
        tensors.push((smooth_factor_name(layer), Shape::new(DType::F32, dims)));
    }
    if let Some(rank) = formats.low_rank {
        let (mut down, up) = (shape.dims.clone(), vec![*shape.dims.first()?, rank]);
        down[0] = rank;
        for (name, dims) in LOW_RANK.into_iter().zip([down, up]) {
            let name = format!("{layer}.{name}.weight");
            tensors.push((name, Shape::new(DType::BF16, dims)));
        }
    }
    Some(tensors)
}

/// The tensors of a file that hold the weight `name` of this shape in a format of range [`Range::Stored`]; `None` where
/// the shape has no such format.
fn stored_tensors(name: &str, shape: &Shape, format: TensorFormat) -> Option<Vec<(String, Shape)>> {
    let Range::Stored(_) = format.range else {
        return None;
    };
    let scale_type = format.scale_type_in_files();
    let dims = scale_dims(&shape.dims, format.granularity)?;
    let mut tensors = vec![
        (name.to_owned(), in_file(shape, format)?),
        (scale_name(name), Shape::new(scale_type, dims.clone())),
    ];
    if format.zero_point {
        let zero_points = Shape::new(format.zero_point_type(), dims);
        tensors.push((zero_point_name(name), zero_points));
    }
    if format.has_tensor_scale() {
        tensors.push((tensor_scale_name(name), Shape::scalar(DType::F32)));
    }
    Some(tensors)
}

/// The name of a layer's weight.
pub fn weight_name(layer: &str) -> String {
    format!("{layer}.weight")
}
