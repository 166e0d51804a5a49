//! nunchaku's files of SVDQuant (Li et al. 2024): FLUX.1 and SDXL in int4 or fp4, with a low-rank product beside each layer, and
//! FLUX.1's modulations in AWQ's int4 (facts: `convert_to_nunchaku_w4x4y16_linear_weight` and
//! `convert_to_nunchaku_w4x16_linear_weight` of `deepcompressor/backend/nunchaku/utils.py`, `nunchaku/models/linear.py`).
//!
//! A layer computes `codes * scales * (x / smooth) + up (down x)`. Here the low-rank product reads `x / smooth` too, so `down` is
//! shown times `smooth`. What files say of activations is not used: those stay in float.

mod names;
mod tiles;

use std::collections::BTreeMap;
use std::ops::Range;

use serde::Deserialize;

use self::names::{Role, renamed, role};
use self::tiles::{Kind, TILE};
use super::comfy::names as names_of;
use crate::dtype::DType;
use crate::graph::{Granularity, NumericsConvention, Range as Ranges, TensorFormat};
use crate::shape::Shape;
use crate::weights::WeightsError;
use crate::weights::location::{Location, Made, Order, Parts, Product, Term};
use crate::weights::open::Checkpoint;
use crate::weights::quantized::{QuantizedError, weight_name};

pub(in crate::weights) use self::tiles::Tiles;

/// The end of the name of codes.
const CODES: &str = ".qweight";
/// The description in a header.
const METADATA: &str = "quantization_config";
/// What is added to the results of GELU before they are rounded to integers without a sign (`SHIFT_GELU` of
/// `src/kernels/zgemm/gemm_w4a4_launch_impl.cuh`). The bias makes up for what the codes make of it.
const GELU_SHIFT: f32 = 0.171_875;
/// Input features of an AWQ layer that share a scale.
const AWQ_GROUP: usize = 64;
/// What is read.
const READ: &str = "SVDQuant's int4 in groups of 64 and fp4 in groups of 16, of FLUX.1 and of SDXL";

/// What a header says.
#[derive(Deserialize)]
struct Described {
    method: String,
    weight: DescribedWeight,
}

#[derive(Deserialize)]
struct DescribedWeight {
    dtype: String,
    group_size: usize,
}

/// A layer of a file: its tensors by their names in it, all checked.
struct Layer {
    codes: Location,
    scales: Location,
    /// A factor for each output feature, and one for all.
    channels: Option<Location>,
    whole: Option<Location>,
    smooth: Location,
    low_rank: Option<[Location; 2]>,
    bias: Option<Location>,
    outputs: usize,
    group: usize,
    is_fp4: bool,
}

/// The two parts of a layer that reads two things.
#[derive(Default)]
struct Halves([Option<Layer>; 2]);

/// Makes weights of the packed layers of a file.
pub(super) fn recognize(file: &mut Checkpoint) -> Result<(), WeightsError> {
    let layers = names_of(file, |name| name.ends_with(CODES));
    if layers.is_empty() {
        return Ok(());
    }
    let described = described(file)?;
    let mut halves: BTreeMap<String, Halves> = BTreeMap::new();
    for codes in layers {
        let layer = codes.trim_end_matches(CODES).to_owned();
        let Some((block, role)) = role(&layer) else {
            return Err(refused(file, &layer, "a layer of another model"));
        };
        let path = |name: &str| format!("{block}.{name}");
        if let Role::Modulation { name, vectors } = role {
            modulation(file, &layer, &path(name), vectors)?;
            continue;
        }
        let found = svdquant(file, &layer, described.as_ref())?;
        match role {
            Role::Fused(names) => {
                let [one, two, three] = names.map(path);
                fused(file, &found, &layer, [one, two, three])?;
            }
            Role::Layer { name, after_gelu } => {
                whole(file, vec![(found, after_gelu)], &path(name))?;
            }
            Role::Part { name, second } => {
                halves.entry(path(name)).or_default().0[usize::from(second)] = Some(found);
            }
            Role::Modulation { .. } => {}
        }
    }
    for (layer, halves) in halves {
        let [Some(first), Some(second)] = halves.0 else {
            let reason =
                format!("{layer}: one of out_proj and mlp_fc2, of which it is made, is missing");
            return Err(file.disagrees(reason));
        };
        whole(file, vec![(first, false), (second, true)], &layer)?;
    }
    for name in names_of(file, |name| renamed(name).is_some()) {
        if let (Some(new), Some(location)) = (renamed(&name), file.tensors.remove(&name)) {
            file.tensors.insert(new, location);
        }
    }
    Ok(())
}

/// What the header says of weights, if it does.
fn described(file: &Checkpoint) -> Result<Option<DescribedWeight>, WeightsError> {
    let Some(text) = file.metadata().get(METADATA) else {
        return Ok(None);
    };
    let read: Result<Described, _> = serde_json::from_str(text);
    let read = read.map_err(|e| file.wrong(METADATA, format!("no description of weights: {e}")))?;
    match read.method.as_str() {
        "svdquant" => Ok(Some(read.weight)),
        other => Err(refused(file, METADATA, &format!("the method {other:?}"))),
    }
}

fn refused(file: &Checkpoint, layer: &str, what: &str) -> WeightsError {
    QuantizedError::Format {
        path: file.path().to_owned(),
        layer: layer.to_owned(),
        format: format!("nunchaku's packing of {what}"),
        read: READ.to_owned(),
    }
    .into()
}

fn missing(file: &Checkpoint, tensor: &str) -> WeightsError {
    QuantizedError::Tensors {
        path: file.path().to_owned(),
        problems: vec![format!("{tensor} is missing")],
    }
    .into()
}

/// Takes a tensor of one of these types and dimensions.
fn taken(
    file: &mut Checkpoint,
    name: &str,
    types: &[DType],
    dims: &[usize],
) -> Result<Location, WeightsError> {
    let Some(location) = file.tensors.remove(name) else {
        return Err(missing(file, name));
    };
    let Shape { dtype, dims: found } = &location.shape;
    if !types.contains(dtype) || found != dims {
        let types: Vec<String> = types.iter().map(DType::to_string).collect();
        let reason = format!(
            "it is {}, expected {} with the dimensions {dims:?}",
            location.shape,
            types.join(" or ")
        );
        return Err(file.wrong(name, reason));
    }
    Ok(location)
}

/// As [`taken`], if it is there.
fn maybe(
    file: &mut Checkpoint,
    name: &str,
    types: &[DType],
    dims: &[usize],
) -> Result<Option<Location>, WeightsError> {
    match file.tensors.contains_key(name) {
        true => taken(file, name, types, dims).map(Some),
        false => Ok(None),
    }
}

/// The dimensions of packed codes.
fn packed_dims(file: &Checkpoint, name: &str) -> Result<[usize; 2], WeightsError> {
    let shape = &file.locate(name)?.shape;
    match shape.dims[..] {
        [outputs, inputs] => Ok([outputs, inputs]),
        _ => Err(file.wrong(name, format!("it is {shape}, expected a matrix"))),
    }
}

const HALVES: [DType; 2] = [DType::BF16, DType::F16];

/// Shows what lies in tiles: all rows of a matrix of this shape.
fn shown(location: Location, kind: Kind, shape: Shape) -> Location {
    let tiles = Tiles {
        kind,
        stored: shape.dims[0],
        first: 0,
    };
    Location {
        shape,
        order: Order::Tiles(tiles),
        ..location
    }
}

/// Takes the tensors of a layer, in the names of older and of newer files.
fn svdquant(
    file: &mut Checkpoint,
    layer: &str,
    described: Option<&DescribedWeight>,
) -> Result<Layer, WeightsError> {
    let at = |leaf: &str| format!("{layer}.{leaf}");
    let name = at("qweight");
    let [outputs, half] = packed_dims(file, &name)?;
    let inputs = 2 * half;
    if outputs == 0 || inputs == 0 || !outputs.is_multiple_of(TILE) || !inputs.is_multiple_of(TILE)
    {
        let reason =
            format!("{outputs} output and {inputs} input features; expected multiples of {TILE}");
        return Err(file.wrong(&name, reason));
    }
    let codes = taken(file, &name, &[DType::S8, DType::U8], &[outputs, half])?;
    let wscales = at("wscales");
    let is_fp4 = file.locate(&wscales)?.shape.dtype == DType::F8E4M3Fn;
    let group = if is_fp4 { 16 } else { 64 };
    let said = if is_fp4 { "fp4_e2m1_all" } else { "int4" };
    if let Some(weight) = described
        && (weight.dtype != said || weight.group_size != group)
    {
        return Err(file.disagrees(format!(
            "{METADATA} says {} in groups of {}, and {layer} is {said} in groups of {group}",
            weight.dtype, weight.group_size
        )));
    }
    let types: &[DType] = if is_fp4 { &[DType::F8E4M3Fn] } else { &HALVES };
    let scales = taken(file, &wscales, types, &[inputs / group, outputs])?;
    let scale_shape = Shape::new(scales.shape.dtype, [outputs, inputs / group]);
    let kind = if is_fp4 {
        Kind::SmallScales
    } else {
        Kind::Scales
    };
    let vector = |location: Location| {
        let shape = location.shape.clone();
        shown(location, Kind::Scales, shape)
    };
    let channels = maybe(file, &at("wcscales"), &HALVES, &[outputs])?;
    let whole = whole_scale(file, &at("wtscale"))?;
    if !is_fp4 && (channels.is_some() || whole.is_some()) {
        return Err(refused(
            file,
            layer,
            "int4 with scales for channels or for the weight",
        ));
    }
    let smooth = one_of(file, layer, ["smooth", "smooth_factor"]);
    let smooth = taken(file, &smooth, &HALVES, &[inputs])?;
    // By this quantization was calibrated; nothing runs with it.
    file.tensors.remove(&at("smooth_orig"));
    file.tensors.remove(&at("smooth_factor_orig"));
    let bias = maybe(file, &at("bias"), &HALVES, &[outputs])?;
    Ok(Layer {
        low_rank: low_rank(file, layer, outputs, inputs)?,
        codes: shown(
            codes,
            Kind::Codes,
            Shape::new(
                if is_fp4 { DType::U4 } else { DType::S4 },
                [outputs, inputs],
            ),
        ),
        scales: shown(scales, kind, scale_shape),
        channels: channels.map(vector),
        whole,
        smooth: vector(smooth),
        bias: bias.map(vector),
        outputs,
        group,
        is_fp4,
    })
}

/// The number for all of a weight.
fn whole_scale(file: &mut Checkpoint, name: &str) -> Result<Option<Location>, WeightsError> {
    let dims = file
        .info(name)
        .map_or(Vec::new(), |shape| shape.dims.clone());
    let dims: &[usize] = if dims.is_empty() { &[] } else { &[1] };
    let types = [DType::F32, DType::BF16, DType::F16];
    maybe(file, name, &types, dims)
}

/// The name of a layer's tensor that the file has, in older files or newer ones.
fn one_of(file: &Checkpoint, layer: &str, [older, newer]: [&str; 2]) -> String {
    let newer = format!("{layer}.{newer}");
    match file.info(&newer) {
        Some(_) => newer,
        None => format!("{layer}.{older}"),
    }
}

/// The factors of a layer, if it has some: down `[rank, in]` and up `[out, rank]`.
fn low_rank(
    file: &mut Checkpoint,
    layer: &str,
    outputs: usize,
    inputs: usize,
) -> Result<Option<[Location; 2]>, WeightsError> {
    let down = one_of(file, layer, ["lora_down", "proj_down"]);
    let up = one_of(file, layer, ["lora_up", "proj_up"]);
    if file.info(&down).is_none() && file.info(&up).is_none() {
        return Ok(None);
    }
    let [_, rank] = packed_dims(file, &down)?;
    let (of_down, of_up) = (
        taken(file, &down, &HALVES, &[inputs, rank])?,
        taken(file, &up, &HALVES, &[outputs, rank])?,
    );
    match rank {
        0 => Ok(None),
        rank if rank.is_multiple_of(16) => {
            let dtype = of_down.shape.dtype;
            let of_down = shown(of_down, Kind::Down, Shape::new(dtype, [rank, inputs]));
            let shape = of_up.shape.clone();
            Ok(Some([of_down, shown(of_up, Kind::Up, shape)]))
        }
        rank => Err(file.wrong(&down, format!("rank {rank}; expected a multiple of 16"))),
    }
}

/// Rows of what is shown of tiles.
fn cut(location: &Location, rows: &Range<usize>) -> Location {
    let mut cut = location.clone();
    cut.shape.dims[0] = rows.len();
    if let Order::Tiles(tiles) = &mut cut.order {
        tiles.first = rows.start;
        if rows.start.is_multiple_of(TILE) && rows.end.is_multiple_of(TILE) {
            // They lie one after the other.
            let columns: usize = location.shape.dims.iter().skip(1).product();
            let bytes = location.shape.dtype.storage_bytes(rows.start * columns);
            cut.offset += bytes as u64;
            (tiles.first, tiles.stored) = (0, rows.len());
        }
    }
    cut
}

impl Layer {
    fn rows(&self, rows: &Range<usize>) -> Layer {
        let cut_of = |location: &Option<Location>| location.as_ref().map(|l| cut(l, rows));
        Layer {
            codes: cut(&self.codes, rows),
            scales: cut(&self.scales, rows),
            channels: cut_of(&self.channels),
            whole: self.whole.clone(),
            smooth: self.smooth.clone(),
            low_rank: self
                .low_rank
                .as_ref()
                .map(|[down, up]| [down.clone(), cut(up, rows)]),
            bias: cut_of(&self.bias),
            outputs: rows.len(),
            ..*self
        }
    }

    /// The scales with those of channels and of the weight, in the type in which a program takes them.
    fn all_scales(&self) -> Location {
        let is_bf16 = self.scales.shape.dtype == DType::BF16;
        if is_bf16 {
            return self.scales.clone();
        }
        let product = Product {
            rows: self.channels.clone(),
            whole: self.whole.clone(),
            ..Product::of(self.scales.clone())
        };
        product.shown()
    }

    fn smooth(&self) -> Location {
        Product::of(self.smooth.clone()).shown()
    }

    /// The first factor for what has been divided.
    fn down(&self, down: &Location) -> Location {
        let product = Product {
            columns: Some(self.smooth.clone()),
            ..Product::of(down.clone())
        };
        product.shown()
    }

    fn format(&self) -> TensorFormat {
        let scale = self.all_scales().shape.dtype;
        let (element, convention) = match self.is_fp4 {
            true => (DType::U4, NumericsConvention::Nv),
            false => (DType::S4, NumericsConvention::Quark),
        };
        TensorFormat {
            element,
            granularity: Granularity::Group(self.group),
            range: Ranges::Stored(scale),
            ..TensorFormat::int8(convention)
        }
    }
}

/// Puts three layers in place of one that computes all of them.
fn fused(
    file: &mut Checkpoint,
    layer: &Layer,
    name: &str,
    names: [String; 3],
) -> Result<(), WeightsError> {
    if !layer.outputs.is_multiple_of(3) {
        let reason = format!(
            "{} output features are not those of three layers",
            layer.outputs
        );
        return Err(file.wrong(&format!("{name}{CODES}"), reason));
    }
    let each = layer.outputs / 3;
    for (at, name) in names.iter().enumerate() {
        let rows = layer.rows(&(at * each..(at + 1) * each));
        whole(file, vec![(rows, false)], name)?;
    }
    Ok(())
}

/// Puts a layer in the place of those that have its input features one after the other, each with whether it reads what
/// GELU leaves.
fn whole(
    file: &mut Checkpoint,
    pieces: Vec<(Layer, bool)>,
    name: &str,
) -> Result<(), WeightsError> {
    let weight = weight_name(name);
    let Some((first, _)) = pieces.first() else {
        return Ok(());
    };
    let format = first.format();
    if pieces
        .iter()
        .any(|(piece, _)| piece.outputs != first.outputs || piece.format() != format)
    {
        let reason = "its two parts have other output features or formats".to_owned();
        return Err(file.wrong(&weight, reason));
    }
    let each = |part: &dyn Fn(&Layer) -> Location| {
        Made::beside(pieces.iter().map(|(piece, _)| part(piece)).collect())
    };
    let factors = || {
        let pairs = pieces
            .iter()
            .filter_map(|(piece, _)| Some((piece, piece.low_rank.as_ref()?)));
        let (downs, ups): (Vec<Location>, Vec<Location>) = pairs
            .map(|(piece, [down, up])| (piece.down(down), up.clone()))
            .unzip();
        [Made::diagonal(downs), Made::beside(ups)]
    };
    let ranks = pieces.iter().filter(|(piece, _)| piece.low_rank.is_some());
    let low_rank = match ranks.count() {
        0 => None,
        all if all == pieces.len() => Some(factors()),
        _ => {
            let reason = "one of its two parts has no low-rank product".to_owned();
            return Err(file.wrong(&weight, reason));
        }
    };
    let parts = Parts {
        format,
        codes: each(&|piece| piece.codes.clone()),
        scale: each(&Layer::all_scales),
        zero_point: None,
        // Scales have it.
        tensor_scale: first.is_fp4.then(|| Location::constant(1.0)),
        table: None,
        run: first.group,
        smooth: Some(each(&Layer::smooth)),
        low_rank,
    };
    parts
        .check()
        .map_err(|reason| file.wrong(&weight, reason))?;
    if let Some(bias) = bias(&pieces) {
        file.tensors.insert(format!("{name}.bias"), bias);
    }
    file.tensors.insert(weight, Location::of_parts(parts));
    Ok(())
}

/// The bias of a layer of these parts.
fn bias(pieces: &[(Layer, bool)]) -> Option<Location> {
    let mut terms = Vec::new();
    for (piece, after_gelu) in pieces {
        terms.extend(piece.bias.clone().map(Term::Of));
        if *after_gelu && !piece.is_fp4 && piece.bias.is_some() {
            terms.push(Term::Constant(piece.codes_alone(), GELU_SHIFT));
        }
    }
    let outputs = pieces.first()?.0.outputs;
    let shape = Shape::new(DType::F32, [outputs]);
    match &terms[..] {
        [] => None,
        [Term::Of(one)] => Some(one.clone()),
        _ => Some(Made::Bias(terms).shown(shape)),
    }
}

impl Layer {
    /// The floats of the codes without the low-rank product.
    fn codes_alone(&self) -> Location {
        Location::of_parts(Parts {
            format: self.format(),
            codes: self.codes.clone(),
            scale: self.all_scales(),
            zero_point: None,
            tensor_scale: None,
            table: None,
            run: self.group,
            smooth: Some(self.smooth()),
            low_rank: None,
        })
    }
}

/// Takes a layer whose results are shifts, scales and gates: `codes * scale + minimum`, with output features of its vectors in
/// turn. The bias of scales has the 1 that diffusers adds afterwards.
fn modulation(
    file: &mut Checkpoint,
    layer: &str,
    new: &str,
    vectors: usize,
) -> Result<(), WeightsError> {
    let at = |leaf: &str| format!("{layer}.{leaf}");
    let name = at("qweight");
    let [quarter, half] = packed_dims(file, &name)?;
    let overflow = quarter.checked_mul(4).zip(half.checked_mul(2));
    let Some((outputs, inputs)) = overflow.filter(|(outputs, inputs)| {
        *outputs > 0
            && outputs.is_multiple_of(vectors)
            && *inputs > 0
            && inputs.is_multiple_of(AWQ_GROUP)
    }) else {
        let reason = format!(
            "{quarter} x {half} words; expected output features of {vectors} vectors and groups of {AWQ_GROUP} input features"
        );
        return Err(file.wrong(&name, reason));
    };
    let codes = taken(file, &name, &[DType::S32], &[quarter, half])?;
    let groups = inputs / AWQ_GROUP;
    let mut of_groups = |leaf: &str| {
        // Further groups fill a tile of the kernel.
        let name = at(leaf);
        let stored = packed_dims(file, &name)?[0].max(groups);
        let location = taken(file, &name, &HALVES, &[stored, outputs])?;
        let shape = Shape::new(location.shape.dtype, [outputs, groups]);
        let tiles = shown(location, Kind::AwqScales(vectors), shape);
        Ok::<_, WeightsError>(Product::of(tiles).shown())
    };
    let (scale, minimum) = (of_groups("wscales")?, of_groups("wzeros")?);
    let bias = taken(file, &at("bias"), &HALVES, &[outputs])?;
    let parts = Parts {
        format: TensorFormat {
            element: DType::U4,
            granularity: Granularity::Group(AWQ_GROUP),
            zero_point: true,
            range: Ranges::Stored(DType::F32),
            ..TensorFormat::int8(NumericsConvention::Gguf)
        },
        codes: shown(
            codes,
            Kind::AwqCodes(vectors),
            Shape::new(DType::U4, [outputs, inputs]),
        ),
        scale,
        zero_point: Some(minimum),
        tensor_scale: None,
        table: None,
        run: AWQ_GROUP,
        smooth: None,
        low_rank: None,
    };
    let weight = weight_name(new);
    parts
        .check()
        .map_err(|reason| file.wrong(&weight, reason))?;
    let shape = bias.shape.clone();
    let bias = shown(bias, Kind::AwqScales(vectors), shape);
    let each = outputs / vectors;
    let scales = [1, vectors - 2].map(|at| at * each..(at + 1) * each);
    // Of three vectors these are the same one.
    let scales = if vectors == 3 {
        scales[..1].to_vec()
    } else {
        scales.to_vec()
    };
    let terms = vec![Term::Of(bias), Term::OneLess(scales)];
    let bias = Made::Bias(terms).shown(Shape::new(DType::F32, [outputs]));
    file.tensors.insert(weight, Location::of_parts(parts));
    file.tensors.insert(format!("{new}.bias"), bias);
    Ok(())
}
