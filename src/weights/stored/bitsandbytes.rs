//! bitsandbytes' weights: NF4 and FP4 with a scale for 64 elements or so, whose scales may be quantized too, and int8 with
//! a scale for each output feature (facts: `QuantState` of `bitsandbytes/functional.py`, `nn/modules.py`).

use serde::Deserialize;

use super::comfy::names;
use crate::dtype::DType;
use crate::graph::{Granularity, NF4, NumericsConvention, Range, TensorFormat};
use crate::shape::Shape;
use crate::weights::WeightsError;
use crate::weights::location::{Location, Order, Parts};
use crate::weights::open::Checkpoint;
use crate::weights::quantized::QuantizedError;

/// Before the name of the code, at the end of a tensor's name.
const STATE: &str = ".quant_state.bitsandbytes__";
/// The most bytes of a state.
const LONGEST: usize = 1 << 12;

/// What is said of a weight of 4 bits.
#[derive(Deserialize)]
struct State {
    quant_type: String,
    blocksize: usize,
    shape: Vec<usize>,
    nested_blocksize: Option<usize>,
    nested_offset: Option<f32>,
}

/// Makes weights of the quantized layers of a file; how many there were.
pub(super) fn recognize(file: &mut Checkpoint) -> Result<usize, WeightsError> {
    let states = names(file, |name| name.contains(STATE));
    for state in &states {
        four_bits(file, state)?;
    }
    let scales = names(file, |name| name.ends_with(".SCB"));
    for scale in &scales {
        int8(file, scale)?;
    }
    Ok(states.len() + scales.len())
}

fn four_bits(file: &mut Checkpoint, state: &str) -> Result<(), WeightsError> {
    let text = file.small(state, LONGEST)?;
    let read: Result<State, _> = serde_json::from_slice(&text);
    let said = read.map_err(|e| file.wrong(state, format!("no state of a weight: {e}")))?;
    let weight = state.split(STATE).next().unwrap_or_default().to_owned();
    if !["nf4", "fp4"].contains(&said.quant_type.as_str()) {
        return Err(QuantizedError::Format {
            path: file.path().to_owned(),
            layer: weight,
            format: format!("bitsandbytes' {}", said.quant_type),
            read: "nf4, fp4 and int8".to_owned(),
        }
        .into());
    }
    let count = said
        .shape
        .iter()
        .try_fold(1_usize, |n, d| n.checked_mul(*d));
    let stored = taken(file, &weight)?;
    let even = count.filter(|n| n.is_multiple_of(2) && n / 2 == stored.shape.bytes());
    if even.is_none() || said.blocksize == 0 {
        let reason = format!(
            "{} bytes are not {:?} in 4 bits, of which {} share a scale, as its state says",
            stored.shape.bytes(),
            said.shape,
            said.blocksize
        );
        return Err(file.wrong(&weight, reason));
    }
    let codes = Location {
        shape: Shape::new(DType::U4, said.shape),
        order: Order::HighFirst,
        ..stored
    };
    let absmax = taken(file, &format!("{weight}.absmax"))?;
    let scale = match (said.nested_blocksize, said.nested_offset) {
        (Some(run @ 1..), Some(offset)) => nested(file, &weight, absmax, run, offset)?,
        _ => absmax,
    };
    let map = format!("{weight}.quant_map");
    let table = taken(file, &map)?;
    // A table that is NF4's needs not be read again.
    let is_known = file.floats(&map, &table)? == NF4;
    file.tensors.remove(state);
    let parts = Parts {
        format: TensorFormat {
            element: DType::U4,
            granularity: Granularity::Group(said.blocksize),
            range: Range::Stored(DType::F32),
            ..TensorFormat::int8(NumericsConvention::Nf4)
        },
        codes,
        scale,
        zero_point: None,
        tensor_scale: None,
        table: (!is_known).then_some(table),
        run: said.blocksize,
        smooth: None,
        low_rank: None,
    };
    insert(file, weight, parts)
}

/// Scales of 8 bits: a number of a table, times the scale of their run, plus `offset`.
fn nested(
    file: &mut Checkpoint,
    weight: &str,
    codes: Location,
    run: usize,
    offset: f32,
) -> Result<Location, WeightsError> {
    let name = format!("{weight}.absmax");
    if codes.shape.dtype != DType::U8 {
        return Err(file.wrong(&name, format!("expected u8, found {}", codes.shape)));
    }
    let parts = Parts {
        format: TensorFormat {
            element: DType::U8,
            granularity: Granularity::Group(run),
            zero_point: true,
            range: Range::Stored(DType::F32),
            // What its zero points are: added.
            ..TensorFormat::int8(NumericsConvention::Gguf)
        },
        scale: taken(file, &format!("{weight}.nested_absmax"))?,
        zero_point: Some(Location::constant(offset)),
        tensor_scale: None,
        table: Some(taken(file, &format!("{weight}.nested_quant_map"))?),
        run,
        smooth: None,
        low_rank: None,
        codes,
    };
    parts.check().map_err(|reason| file.wrong(&name, reason))?;
    Ok(Location::of_parts(parts))
}

fn int8(file: &mut Checkpoint, scale: &str) -> Result<(), WeightsError> {
    let layer = scale.trim_end_matches(".SCB");
    let weight = format!("{layer}.weight");
    let codes = taken(file, &weight)?;
    let absmax = taken(file, scale)?;
    if codes.shape.dtype != DType::S8 || absmax.shape.dtype != DType::F32 {
        let reason = format!(
            "it is {}, and {scale} is {}; expected s8 and f32",
            codes.shape, absmax.shape
        );
        return Err(file.wrong(&weight, reason));
    }
    file.tensors.remove(&format!("{layer}.weight_format"));
    let scale = Location {
        order: Order::Times((1.0_f32 / 127.0).to_bits()),
        ..absmax
    };
    insert(file, weight, Parts::scaled(&codes, scale))
}

fn insert(file: &mut Checkpoint, weight: String, parts: Parts) -> Result<(), WeightsError> {
    parts
        .check()
        .map_err(|reason| file.wrong(&weight, reason))?;
    file.tensors.insert(weight, Location::of_parts(parts));
    Ok(())
}

/// Takes a tensor that must be there.
fn taken(file: &mut Checkpoint, name: &str) -> Result<Location, WeightsError> {
    let problems = || QuantizedError::Tensors {
        path: file.path().to_owned(),
        problems: vec![format!("{name} is missing")],
    };
    let found = file.tensors.get(name).cloned().ok_or_else(problems)?;
    file.tensors.remove(name);
    Ok(found)
}
