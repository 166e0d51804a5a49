//! ComfyUI's scaled files: `weight * scale`, with one scale for a weight or one for each output feature.
//!
//! Older files have a tensor `scaled_fp8` as their mark and `<layer>.scale_weight`; newer ones `<layer>.weight_scale`, and
//! describe each layer in `<layer>.comfy_quant` or in the header (facts: ComfyUI's `QUANTIZATION.md` and
//! `comfy/quant_ops.py`). What they say of activations is not used: those stay in float.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use crate::dtype::DType;
use crate::weights::WeightsError;
use crate::weights::location::{Location, Parts};
use crate::weights::open::Checkpoint;
use crate::weights::quantized::QuantizedError;

/// The mark of older files.
const MARK: &str = "scaled_fp8";
/// The description of all layers in the header of newer ones.
const METADATA: &str = "_quantization_metadata";
/// The most bytes of a layer's description.
const LONGEST: usize = 1 << 12;

/// The formats that are read.
const READ: [(&str, DType); 3] = [
    ("float8_e4m3fn", DType::F8E4M3Fn),
    ("float8_e5m2", DType::F8E5M2),
    ("int8_tensorwise", DType::S8),
];

/// What is said of a layer.
#[derive(Deserialize)]
struct Layer {
    format: String,
    /// Whether weights were rotated before they were quantized.
    #[serde(default)]
    convrot: bool,
}

#[derive(Deserialize)]
struct Metadata {
    layers: BTreeMap<String, Layer>,
}

/// Makes weights of scaled layers of a file.
pub(super) fn recognize(file: &mut Checkpoint) -> Result<(), WeightsError> {
    older(file)?;
    newer(file)
}

fn older(file: &mut Checkpoint) -> Result<(), WeightsError> {
    let is_mark = |name: &str| name == MARK || name.ends_with(&format!(".{MARK}"));
    let marks = names(file, is_mark);
    let scales = names(file, |name| name.ends_with(".scale_weight"));
    let mut scaled = BTreeSet::new();
    for scale in &scales {
        let layer = scale.trim_end_matches(".scale_weight");
        scale_weight(file, layer, scale, None)?;
        file.tensors.remove(&format!("{layer}.scale_input"));
        scaled.insert(format!("{layer}.weight"));
    }
    // A mark says that all below it are scaled.
    let roots: Vec<String> = match (&marks[..], &scales[..]) {
        ([], []) => return Ok(()),
        ([], _) => vec![String::new()],
        (marks, _) => marks
            .iter()
            .map(|m| m.trim_end_matches(MARK).to_owned())
            .collect(),
    };
    marks
        .iter()
        .for_each(|mark| drop(file.tensors.remove(mark)));
    let is_unscaled = |(name, location): &(&String, &Location)| {
        location.shape.dtype == DType::F8E4M3Fn && roots.iter().any(|root| name.starts_with(root))
    };
    let missing: Vec<String> = file
        .tensors
        .iter()
        .filter(is_unscaled)
        .map(|(name, _)| name.clone())
        .collect();
    if !missing.is_empty() {
        return Err(QuantizedError::Scales {
            path: file.path().to_owned(),
            missing,
        }
        .into());
    }
    Ok(())
}

fn newer(file: &mut Checkpoint) -> Result<(), WeightsError> {
    let mut layers = match file.metadata().get(METADATA) {
        None => BTreeMap::new(),
        Some(text) => {
            let read: Result<Metadata, _> = serde_json::from_str(text);
            read.map_err(|e| file.wrong(METADATA, format!("no description of layers: {e}")))?
                .layers
        }
    };
    for name in names(file, |name| name.ends_with(".comfy_quant")) {
        let text = file.small(&name, LONGEST)?;
        let read: Result<Layer, _> = serde_json::from_slice(&text);
        let layer =
            read.map_err(|e| file.wrong(&name, format!("no description of a layer: {e}")))?;
        layers.insert(name.trim_end_matches(".comfy_quant").to_owned(), layer);
        file.tensors.remove(&name);
    }
    for (layer, described) in layers {
        let format = READ.iter().find(|(name, _)| *name == described.format);
        let Some((_, dtype)) = format.filter(|_| !described.convrot) else {
            let rotation = if described.convrot {
                " with rotation"
            } else {
                ""
            };
            return Err(QuantizedError::Format {
                path: file.path().to_owned(),
                layer,
                format: format!("ComfyUI's {}{rotation}", described.format),
                read: READ.map(|(name, _)| name).join(", "),
            }
            .into());
        };
        let scale = format!("{layer}.weight_scale");
        scale_weight(file, &layer, &scale, Some(*dtype))?;
        file.tensors.remove(&format!("{layer}.input_scale"));
    }
    Ok(())
}

/// Makes the weight of a layer of its codes and the tensor `scale`. `dtype` is that of the codes, where it is said.
fn scale_weight(
    file: &mut Checkpoint,
    layer: &str,
    scale: &str,
    dtype: Option<DType>,
) -> Result<(), WeightsError> {
    let name = format!("{layer}.weight");
    let missing = |tensor: &str| {
        WeightsError::from(QuantizedError::Tensors {
            path: file.path().to_owned(),
            problems: vec![format!("{tensor} is missing")],
        })
    };
    let Some(codes) = file.tensors.get(&name) else {
        return Err(missing(&name));
    };
    let Some(found) = file.tensors.get(scale) else {
        return Err(missing(scale));
    };
    let known = READ.map(|(_, dtype)| dtype);
    let fits = match dtype {
        Some(dtype) => codes.shape.dtype == dtype,
        None => known.contains(&codes.shape.dtype),
    };
    if !fits {
        let expected = dtype.map_or("fp8 or s8".to_owned(), |dtype| dtype.to_string());
        let reason = format!(
            "it is {}, and {scale} is there; expected {expected}",
            codes.shape
        );
        return Err(file.wrong(&name, reason));
    }
    if !found.shape.dtype.is_float() || found.shape.dtype.bits() < 16 {
        return Err(file.wrong(scale, format!("a scale is a float, found {}", found.shape)));
    }
    let parts = Parts::scaled(codes, found.clone());
    parts.check().map_err(|reason| file.wrong(&name, reason))?;
    file.tensors.remove(scale);
    file.tensors.insert(name, Location::of_parts(parts));
    Ok(())
}

/// The names for which `is_one` holds.
pub(super) fn names(file: &Checkpoint, is_one: impl Fn(&str) -> bool) -> Vec<String> {
    let names = file.names().filter(|name| is_one(name));
    names.map(str::to_owned).collect()
}
