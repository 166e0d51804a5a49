//! Where the tensors of a checkpoint are in its files, and how their bytes are read.

use std::ops::Range as Indices;
use std::sync::Arc;

use super::shared_bytes::SharedBytes;
use super::stored::{BlockPart, BlockType, Tiles};
use crate::dtype::DType;
use crate::graph::{Granularity, NumericsConvention, Range, TensorFormat};
use crate::quant::{
    LOW_RANK, StoredLayer, scale_dims, scale_name, smooth_factor_name, tensor_scale_name,
    zero_point_name,
};
use crate::shape::Shape;

/// Where a tensor's bytes are.
#[derive(Clone, Debug)]
pub(super) struct Location {
    pub file: usize,
    /// From the start of the file.
    pub offset: u64,
    /// As it is read.
    pub shape: Shape,
    pub order: Order,
    /// Of a tensor that no file has as it is shown: what it is computed from.
    pub made: Option<Arc<Made>>,
}

/// How the bytes of a tensor are stored, beside the shape that is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    AsShown,
    /// As the transposed matrix.
    Transposed,
    /// With the halves of the first dimension swapped.
    HalvesSwapped,
    /// Not at all: it is the unit matrix.
    UnitMatrix,
    /// With input features of a weight that share bytes.
    Shared(SharedBytes),
    /// With the first of the two elements in a byte in its upper half.
    HighFirst,
    /// With other parts of the weight, in blocks.
    Blocks(BlockType, BlockPart),
    /// Not at all: every element is the `f32` of these bits.
    Constant(u32),
    /// As `f32`s that are shown times the one of these bits.
    Times(u32),
    /// As 4-bit integers, eight of a row in a word of 32 bits.
    Words(Words),
    /// As a matrix of so many columns; the others are zeros.
    ZeroColumns(usize),
    /// In the tiles of a GPU kernel.
    Tiles(Tiles),
}

/// How 4-bit integers lie in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Words {
    /// Whether the rows are those of the transposed matrix.
    pub transposed: bool,
    /// Whether the even ones of a word come before the odd ones, from the lowest bits on.
    pub reordered: bool,
}

/// Where the parts of a weight are, each in row-major order. A run of codes has one scale.
#[derive(Clone, Debug)]
pub(super) struct Parts {
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
    /// Factors of input features, by which activations are divided and which the codes have taken over.
    pub smooth: Option<Location>,
    /// Down `[rank, in]` and up `[out, rank]`, whose product with what the codes are multiplied with is added.
    pub low_rank: Option<[Location; 2]>,
}

/// What a tensor is computed of.
#[derive(Clone, Debug)]
pub(super) enum Made {
    /// The floats of a weight that is stored as codes.
    Weight(Box<Parts>),
    /// These beside each other along their last dimension. A row of each has whole bytes.
    Beside(Vec<Location>),
    /// A product, in `f32`.
    Product(Box<Product>),
    /// These along the diagonal of a matrix, in `f32`, and zeros.
    Diagonal(Vec<Location>),
    /// The sum of these, in `f32`.
    Bias(Vec<Term>),
}

/// A tensor times numbers of its rows, of its columns, and one for all.
#[derive(Clone, Debug)]
pub(super) struct Product {
    pub of: Location,
    pub rows: Option<Location>,
    pub columns: Option<Location>,
    pub whole: Option<Location>,
}

impl Product {
    /// A tensor alone.
    pub fn of(of: Location) -> Product {
        Product {
            of,
            rows: None,
            columns: None,
            whole: None,
        }
    }

    pub fn shown(self) -> Location {
        let shape = self.of.shape.with_dtype(DType::F32);
        Made::Product(Box::new(self)).shown(shape)
    }
}

/// A part of a bias.
#[derive(Clone, Debug)]
pub(super) enum Term {
    Of(Location),
    /// What a weight makes of an input of which every feature is this number.
    Constant(Location, f32),
    /// 1 less for each of these output features.
    OneLess(Vec<Indices<usize>>),
}

impl Made {
    /// A tensor of this shape.
    pub fn shown(self, shape: Shape) -> Location {
        Location {
            file: 0,
            offset: 0,
            shape,
            order: Order::AsShown,
            made: Some(Arc::new(self)),
        }
    }

    /// These beside each other; one alone is itself.
    pub fn beside(mut parts: Vec<Location>) -> Location {
        if parts.len() == 1
            && let Some(one) = parts.pop()
        {
            return one;
        }
        let mut shape = parts[0].shape.clone();
        let columns = parts.iter().map(Location::columns).sum();
        if let Some(last) = shape.dims.last_mut() {
            *last = columns;
        }
        Made::Beside(parts).shown(shape)
    }

    /// These matrices along the diagonal of one.
    pub fn diagonal(parts: Vec<Location>) -> Location {
        let rows = parts.iter().map(|part| part.shape.dims[0]).sum();
        let columns = parts.iter().map(Location::columns).sum();
        Made::Diagonal(parts).shown(Shape::new(DType::F32, [rows, columns]))
    }
}

impl Location {
    /// A weight of these parts, in `f32`.
    pub(super) fn of_parts(parts: Parts) -> Location {
        Location {
            file: parts.codes.file,
            offset: parts.codes.offset,
            shape: parts.codes.shape.with_dtype(DType::F32),
            order: Order::AsShown,
            made: Some(Arc::new(Made::Weight(Box::new(parts)))),
        }
    }

    /// The elements of a row.
    pub(super) fn columns(&self) -> usize {
        self.shape.dims.last().copied().unwrap_or(1)
    }

    /// What a weight is computed from that is stored as codes.
    pub(super) fn parts(&self) -> Option<&Parts> {
        match self.made.as_deref() {
            Some(Made::Weight(parts)) => Some(parts.as_ref()),
            Some(Made::Beside(_) | Made::Product(_) | Made::Diagonal(_) | Made::Bias(_)) | None => {
                None
            }
        }
    }

    /// A number that no file has.
    pub(super) fn constant(value: f32) -> Location {
        Location {
            file: 0,
            offset: 0,
            shape: Shape::scalar(DType::F32),
            order: Order::Constant(value.to_bits()),
            made: None,
        }
    }

    /// A run of the elements, as a vector; `None` where its bytes hold others too, or they are in another order.
    fn elements(&self, run: Indices<usize>) -> Option<Location> {
        if self.made.is_some() {
            return None;
        }
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
    pub(super) fn of_float8(location: &Location) -> Option<Parts> {
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
            smooth: None,
            low_rank: None,
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

    /// What a checkpoint says of a layer with this weight and activations in float.
    pub(super) fn layer(&self) -> StoredLayer {
        let rank = |[down, _]: &[Location; 2]| down.shape.dims.first().copied();
        StoredLayer {
            weight: self.format,
            activation: None,
            low_rank: self.low_rank.as_ref().and_then(rank),
            smoothed: self.smooth.is_some(),
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
        if let Some([_, up]) = &mut parts.low_rank {
            let rank = up.shape.dims.last().copied().unwrap_or(0);
            let cut = up.elements(rows.start * rank..rows.end * rank);
            *up = cut.ok_or_else(shared)?;
            up.shape.dims = vec![rows.len(), rank];
        }
        Ok(parts)
    }

    /// The tensors that hold the weight `name` in this program's own layout; `None` where that has no such format.
    pub(super) fn tensors(&self, name: &str) -> Option<Vec<(String, Location)>> {
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
        let layer = name.strip_suffix(".weight").unwrap_or(name);
        if let Some(smooth) = &self.smooth {
            tensors.push((smooth_factor_name(layer), smooth.clone()));
        }
        for (factor, location) in LOW_RANK.iter().zip(self.low_rank.iter().flatten()) {
            tensors.push((format!("{layer}.{factor}.weight"), location.clone()));
        }
        Some(tensors)
    }
}
