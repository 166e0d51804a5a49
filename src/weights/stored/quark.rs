//! AMD Quark's export of diffusers models (`export_safetensors`): `real_quantized`, with packed weights and their scales in
//! `<layer>.weight_quantizer.*`, or `fake_quantized`, whose weights are floats.
//!
//! int4 is packed into 32-bit words; of groups the matrix is transposed too. A layer of SVDQuant is two: `<layer>.layer` is what
//! its low-rank product leaves, `<layer>.correction.l1` and `.l2` are the product's factors down and up. What is said of
//! activations is not used: those stay in float.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::comfy::names;
use super::shifted;
use crate::dtype::DType;
use crate::graph::{Granularity, NumericsConvention, Range, TensorFormat};
use crate::shape::Shape;
use crate::weights::WeightsError;
use crate::weights::location::{Location, Order, Parts, Words};
use crate::weights::open::Checkpoint;
use crate::weights::quantized::QuantizedError;

/// The end of the path of what a low-rank product leaves, and the product's factors.
pub(in crate::weights) const REMAINDER: &str = ".layer";
pub(in crate::weights) const DOWN: &str = "l1";
pub(in crate::weights) const UP: &str = "l2";

/// The part of the description that says how tensors lie.
#[derive(Deserialize)]
struct Export {
    weight_format: String,
    pack_method: String,
}

/// How weights are quantized, of one layer or of all.
#[derive(Deserialize)]
struct Spec {
    dtype: String,
}

/// Makes weights of the quantized layers of a file that `description` is of.
pub(super) fn recognize(
    file: &mut Checkpoint,
    description: &Map<String, Value>,
) -> Result<(), WeightsError> {
    let said = description.get("export").cloned().unwrap_or_default();
    let export = Export::deserialize(said).map_err(|e| file.disagrees(format!("export: {e}")))?;
    // Its activations, and what a fake-quantized weight was rounded with.
    for name in names(file, |name| {
        ["input_quantizer.", "output_quantizer.", "bias_quantizer."]
            .iter()
            .any(|part| name.contains(part))
    }) {
        file.tensors.remove(&name);
    }
    match export.weight_format.as_str() {
        "fake_quantized" => {
            refuse_products_beside_floats(file)?;
            for name in names(file, |name| name.contains("._weight_quantizer.")) {
                file.tensors.remove(&name);
            }
            return Ok(());
        }
        "real_quantized" => {}
        other => {
            return Err(file.disagrees(format!(
                "weight_format is {other:?}; read are real_quantized and fake_quantized"
            )));
        }
    }
    let layers = names(file, |name| {
        name.ends_with(".weight_quantizer.scale") || name.ends_with(".weight_quantizer.0.scale")
    });
    if layers.is_empty() {
        return Err(file
            .disagrees("it says that weights are packed, and no tensor is a scale of one".into()));
    }
    let is_reordered = export.pack_method == "reorder";
    for scale in layers {
        let layer = scale
            .split(".weight_quantizer.")
            .next()
            .unwrap_or_default()
            .to_owned();
        let whole = layer.strip_suffix(REMAINDER);
        let whole = whole.filter(|whole| file.tensors.contains_key(&factor_name(whole, DOWN)));
        let dtype = dtype_of(description, whole, &layer);
        let mut parts = parts(file, &layer, &scale, dtype.as_deref(), is_reordered)?;
        let name = format!("{layer}.weight");
        parts.check().map_err(|reason| file.wrong(&name, reason))?;
        for name in names(file, |name| {
            name.starts_with(&format!("{layer}.weight_quantizer."))
        }) {
            file.tensors.remove(&name);
        }
        file.tensors.remove(&name);
        let path = whole.unwrap_or(&layer);
        if let Some(whole) = whole {
            parts.low_rank = Some(factors(file, whole, &parts.codes.shape)?);
            if let Some(bias) = file.tensors.remove(&format!("{layer}.bias")) {
                file.tensors.insert(format!("{whole}.bias"), bias);
            }
        }
        let weight = Location::of_parts(parts);
        file.tensors.insert(format!("{path}.weight"), weight);
    }
    refuse_products_beside_floats(file)
}

pub(in crate::weights) fn factor_name(layer: &str, factor: &str) -> String {
    format!("{layer}.correction.{factor}.weight")
}

/// Takes the factors of the low-rank product beside a weight of these dimensions.
fn factors(
    file: &mut Checkpoint,
    layer: &str,
    weight: &Shape,
) -> Result<[Location; 2], WeightsError> {
    let mut take = |factor| {
        let name = factor_name(layer, factor);
        let found = file.tensors.remove(&name);
        found.ok_or_else(|| file.disagrees(format!("{name} is missing")))
    };
    let [down, up] = [take(DOWN)?, take(UP)?];
    let rank = down.shape.dims.first().copied().unwrap_or(0);
    let fits = match weight.dims[..] {
        [out, inputs] => down.shape.dims == [rank, inputs] && up.shape.dims == [out, rank],
        _ => false,
    };
    let is_float =
        |location: &Location| matches!(location.shape.dtype, DType::BF16 | DType::F16 | DType::F32);
    match fits && rank > 0 && is_float(&down) && is_float(&up) {
        true => Ok([down, up]),
        false => Err(file.disagrees(format!(
            "{layer}.correction: its factors are {} and {}, which make no matrix of floats with the dimensions {:?}",
            down.shape, up.shape, weight.dims
        ))),
    }
}

/// Quark also decomposes layers whose weights it then leaves in floats.
fn refuse_products_beside_floats(file: &Checkpoint) -> Result<(), WeightsError> {
    let end = factor_name("", DOWN);
    let left = file.tensors.keys().find_map(|name| name.strip_suffix(&end));
    match left {
        None => Ok(()),
        Some(layer) => Err(QuantizedError::Format {
            path: file.path().to_owned(),
            layer: layer.to_owned(),
            format: "floats with a low-rank product beside them".to_owned(),
            read: "low-rank products beside packed weights".to_owned(),
        }
        .into()),
    }
}

/// The element type that the description gives a layer's weight; of one with two stages that of the first. Of SVDQuant the layer
/// has two names.
fn dtype_of(description: &Map<String, Value>, whole: Option<&str>, layer: &str) -> Option<String> {
    let own = description.get("layer_quant_config");
    let own = own.and_then(|layers| layers.get(layer).or_else(|| layers.get(whole?)));
    let weight = own
        .or_else(|| description.get("global_quant_config"))?
        .get("weight")?;
    let first = weight.as_array().and_then(|stages| stages.first());
    let spec = Spec::deserialize(first.unwrap_or(weight)).ok()?;
    Some(spec.dtype)
}

/// The parts of a layer's weight, by the types and dimensions of its tensors, which must be those of `dtype`.
fn parts(
    file: &Checkpoint,
    layer: &str,
    scale: &str,
    dtype: Option<&str>,
    is_reordered: bool,
) -> Result<Parts, WeightsError> {
    let name = format!("{layer}.weight");
    let get = |name: &str| {
        let found = file.tensors.get(name).cloned();
        found.ok_or_else(|| file.disagrees(format!("{name} is missing")))
    };
    let (codes, scale) = (get(&name)?, get(scale)?);
    let beside = |leaf: &str| format!("{layer}.weight_quantizer.{leaf}");
    let zero_point = file.tensors.get(&beside("zero_point")).cloned();
    let of_all = file.tensors.get(&beside("1.scale")).cloned();
    let dims = codes.shape.dims.clone();
    let kind = (
        codes.shape.dtype,
        scale.shape.dtype,
        dtype.unwrap_or_default(),
    );
    let is_scale = matches!(scale.shape.dtype, DType::F32 | DType::BF16);
    match kind {
        (DType::S8, _, "int8" | "") | (DType::F8E4M3Fn, _, "fp8_e4m3" | "") if is_scale => {
            let mut parts = Parts::scaled(&codes, scale);
            parts.zero_point = shifted(file, &name, zero_point)?;
            parts.format.zero_point = parts.zero_point.is_some();
            Ok(parts)
        }
        (DType::S32, _, "int4" | "") if is_scale && dims.len() == 2 => {
            let is_grouped = scale.shape.dims.len() == 2;
            int4(
                file,
                &name,
                codes,
                scale,
                zero_point,
                [is_grouped, is_reordered],
            )
        }
        (DType::U8, DType::U8, "fp4" | "") if dims.len() == 2 => {
            let scale = Location {
                shape: scale.shape.with_dtype(DType::F8E8M0Fnu),
                ..scale
            };
            Ok(fp4(codes, scale, None))
        }
        (DType::U8, DType::F8E4M3Fn, "fp4" | "") if dims.len() == 2 && of_all.is_some() => {
            Ok(fp4(codes, scale, of_all))
        }
        (codes, scale, dtype) => Err(QuantizedError::Format {
            path: file.path().to_owned(),
            layer: layer.to_owned(),
            format: format!("AMD Quark's {dtype:?} with weights in {codes} and scales in {scale}"),
            read: "int8, int4, fp8_e4m3, mxfp4 and nvfp4 as Quark exports them".to_owned(),
        }
        .into()),
    }
}

/// Eight values share a word: of groups eight output features of a transposed matrix, else eight input features.
fn int4(
    file: &Checkpoint,
    name: &str,
    codes: Location,
    scale: Location,
    zero_point: Option<Location>,
    [is_grouped, is_reordered]: [bool; 2],
) -> Result<Parts, WeightsError> {
    let words = |location: &Location, dtype: DType| {
        let mut dims = location.shape.dims.clone();
        if let Some(last) = dims.last_mut() {
            *last *= 8;
        }
        dims.reverse();
        if !is_grouped {
            dims.reverse();
        }
        Location {
            shape: Shape::new(dtype, dims),
            order: Order::Words(Words {
                transposed: is_grouped,
                reordered: is_reordered,
            }),
            ..location.clone()
        }
    };
    let codes = words(&codes, DType::S4);
    let inputs = codes.shape.dims[1];
    let (scale, granularity, run) = match is_grouped {
        true => {
            let groups = scale.shape.dims[0];
            let run = inputs.checked_div(groups).unwrap_or(0);
            let mut dims = scale.shape.dims.clone();
            dims.reverse();
            let scale = Location {
                shape: scale.shape.with_dims(dims),
                order: Order::Transposed,
                ..scale
            };
            (scale, Granularity::Group(run), run)
        }
        false => (scale, Granularity::Channel, inputs),
    };
    let zero_point = zero_point.map(|location| words(&location, DType::S8));
    let zero_point = shifted(file, name, zero_point)?;
    Ok(Parts {
        format: TensorFormat {
            element: DType::S4,
            granularity,
            zero_point: zero_point.is_some(),
            range: Range::Stored(scale.shape.dtype),
            ..TensorFormat::int8(NumericsConvention::Quark)
        },
        codes,
        scale,
        zero_point,
        tensor_scale: None,
        table: None,
        run,
        smooth: None,
        low_rank: None,
    })
}

/// Codes of fp4, two to a byte, with scales in powers of two, or in fp8 with one number for all.
fn fp4(codes: Location, scale: Location, tensor_scale: Option<Location>) -> Parts {
    let mut dims = codes.shape.dims.clone();
    dims[1] *= 2;
    let groups = scale.shape.dims.last().copied().unwrap_or(0);
    let run = dims[1].checked_div(groups).unwrap_or(0);
    let convention = match tensor_scale {
        None => NumericsConvention::Mx,
        Some(_) => NumericsConvention::Nv,
    };
    let format = TensorFormat {
        element: DType::U4,
        granularity: Granularity::Group(run),
        ..TensorFormat::int8(convention)
    };
    Parts {
        format: format.stored(DType::F32),
        codes: Location {
            shape: Shape::new(DType::U4, dims),
            ..codes
        },
        scale,
        zero_point: None,
        tensor_scale,
        table: None,
        run,
        smooth: None,
        low_rank: None,
    }
}
