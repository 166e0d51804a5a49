//! Quantized checkpoints: this program's layout.
//!
//! Beside the integers of `<layer>.weight`, in the shape of the weight, stands their scale, `<layer>.weight_scale`.
//! `quantization_config` in the part's `config.json` says which layers are stored in which format, and what the program
//! does with activations unless it is told otherwise. Other tensors are as in any checkpoint.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::dtype::DType;
use crate::graph::{Granularity, NumericsConvention, Range, Rounding, TensorFormat};
use crate::quant::{StoredFormats, scale_dims, scale_name};
use crate::shape::Shape;
use crate::util::text::listed;

/// The key of the description in `config.json`: diffusers' and transformers'.
pub const CONFIG_KEY: &str = "quantization_config";
/// The value of `quant_method` in it.
const METHOD: &str = "maxdiff-rs";
/// Of the layout.
const VERSION: u64 = 1;
/// How many problems an error shows.
const SHOWN: usize = 8;

/// How the weights of a checkpoint are stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quantization {
    /// The formats of weights, by the paths of their layers; of range [`Range::Stored`].
    pub weights: StoredFormats,
    /// The format of activations unless a configuration says otherwise; `None` is float.
    pub activations: Option<TensorFormat>,
}

/// Why a quantized checkpoint is refused.
#[derive(Debug, thiserror::Error)]
pub enum QuantizedError {
    #[error(
        "{path}: quantized by {method:?}, whose files are not read here; take the model's own checkpoint, and quantize it \
         with `maxdiff-rs quantize`"
    )]
    Foreign { path: PathBuf, method: String },
    #[error(
        "{path}: {CONFIG_KEY} has version {found}, this program reads version {VERSION}; take a newer maxdiff-rs, or \
         quantize the model again"
    )]
    Version { path: PathBuf, found: u64 },
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

/// A format as it is written, with the layers that have it.
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
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
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
    activations: Option<WrittenFormat>,
    weights: Vec<WrittenFormat>,
}

/// The types of scales, by the names of `weights_dtype`.
const SCALE_TYPES: [(&str, DType); 2] = [("float32", DType::F32), ("bfloat16", DType::BF16)];

impl WrittenFormat {
    fn new(format: TensorFormat, layers: Vec<String>) -> WrittenFormat {
        let (granularity, group_size) = match format.granularity {
            Granularity::Tensor => ("tensor", None),
            Granularity::Channel => ("channel", None),
            Granularity::Group(size) => ("group", Some(size)),
        };
        let scale = match format.range {
            Range::Stored(dtype) => SCALE_TYPES.iter().find(|(_, known)| *known == dtype),
            Range::Dynamic | Range::Static(_) => None,
        };
        WrittenFormat {
            element: element_name(format.element),
            granularity: granularity.to_owned(),
            group_size,
            symmetric: !format.zero_point,
            numerics: format.convention,
            scale_dtype: scale.map(|(name, _)| (*name).to_owned()),
            layers,
        }
    }

    fn read(&self) -> Result<TensorFormat, String> {
        let unknown = |key: &str, value: &str, known: &str| {
            Err(format!(
                "{key} is {value:?}, which is not read here; read are {known}"
            ))
        };
        if self.element != element_name(DType::S8) {
            return unknown("element", &self.element, "int8");
        }
        if !self.symmetric {
            return unknown("symmetric", "false", "true");
        }
        let granularity = match (self.granularity.as_str(), self.group_size) {
            ("tensor", None) => Granularity::Tensor,
            ("channel", None) => Granularity::Channel,
            (other, None) => return unknown("granularity", other, "tensor and channel"),
            (other, Some(size)) => {
                let value = format!("{other} of {size}");
                return unknown("granularity", &value, "tensor and channel");
            }
        };
        let range = match &self.scale_dtype {
            None => Range::Dynamic,
            Some(name) => match SCALE_TYPES.iter().find(|(known, _)| known == name) {
                Some((_, dtype)) => Range::Stored(*dtype),
                None => return unknown("scale_dtype", name, "float32 and bfloat16"),
            },
        };
        Ok(TensorFormat {
            element: DType::S8,
            granularity,
            zero_point: false,
            range,
            rounding: Rounding::NearestEven,
            convention: self.numerics,
        })
    }
}

/// `int8` for `s8`, as configurations name it.
fn element_name(dtype: DType) -> String {
    match dtype.is_signed_int() {
        true => format!("int{}", dtype.bits()),
        false => dtype.to_string(),
    }
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
        let mut weights = StoredFormats::new();
        for group in &written.weights {
            let format = group.read()?;
            if !matches!(format.range, Range::Stored(_)) {
                return Err("a format of weights has no scale_dtype".into());
            }
            for layer in &group.layers {
                if weights.insert(layer.clone(), format).is_some() {
                    return Err(format!("the layer {layer} stands twice"));
                }
            }
        }
        if weights.is_empty() {
            return Err("no layer is quantized".into());
        }
        let activations = written.activations.as_ref();
        let activations = activations.map(WrittenFormat::read).transpose()?;
        if let Some(format) = activations
            && format != TensorFormat::int8(format.convention)
        {
            return Err("activations: expected int8 with a scale for each channel that is found at run time".into());
        }
        Ok(Quantization {
            weights,
            activations,
        })
    }

    /// What [`Quantization::of_config`] reads.
    pub fn to_config(&self) -> Value {
        let mut groups: Vec<(TensorFormat, Vec<String>)> = Vec::new();
        for (layer, format) in &self.weights {
            match groups.iter_mut().find(|(known, _)| known == format) {
                Some((_, layers)) => layers.push(layer.clone()),
                None => groups.push((*format, vec![layer.clone()])),
            }
        }
        let groups = groups.into_iter();
        let weights = groups.map(|(format, layers)| WrittenFormat::new(format, layers));
        let activations = self.activations.map(|f| WrittenFormat::new(f, Vec::new()));
        json!({
            "quant_method": METHOD,
            "version": VERSION,
            "producer": concat!("maxdiff-rs ", env!("CARGO_PKG_VERSION")),
            "activations": activations,
            "weights": weights.collect::<Vec<_>>(),
        })
    }

    /// Checks that the tensors of a checkpoint are as described, and no others are integers or scales. `path` is for
    /// messages.
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
        for (layer, format) in &self.weights {
            let weight = weight_name(layer);
            let Some(found) = tensors.get(weight.as_str()) else {
                problems.push(format!("{weight} is missing"));
                continue;
            };
            let (Range::Stored(dtype), Some(dims)) =
                (format.range, scale_dims(&found.dims, format.granularity))
            else {
                problems.push(format!("{weight} {found} cannot be of its format"));
                continue;
            };
            expected.insert(scale_name(&weight), Shape::new(dtype, dims));
            expected.insert(weight, found.with_dtype(format.element));
        }
        for (name, expected) in &expected {
            match tensors.get(name.as_str()) {
                None => problems.push(format!("{name} is missing")),
                Some(found) if *found != expected => {
                    problems.push(format!("{name} is {found}, expected {expected}"));
                }
                Some(_) => {}
            }
        }
        let described: BTreeSet<&str> = expected.keys().map(String::as_str).collect();
        for (name, shape) in tensors {
            let is_quantized = !shape.dtype.is_float() || name.ends_with(".weight_scale");
            if is_quantized && !described.contains(name) {
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

    /// Whether a tensor of this name is the scale of a weight.
    pub fn is_scale(&self, name: &str) -> bool {
        let layer = name.strip_suffix(".weight_scale");
        layer.is_some_and(|layer| self.weights.contains_key(layer))
    }

    /// The format of a tensor that holds the integers of a weight.
    pub fn format_of(&self, name: &str) -> Option<TensorFormat> {
        let layer = name.strip_suffix(".weight")?;
        self.weights.get(layer).copied()
    }
}

/// The name of a layer's weight.
pub fn weight_name(layer: &str) -> String {
    format!("{layer}.weight")
}
