//! Models in one file, by the names of the original code: what each network's names are read with.

use std::collections::BTreeMap;
use std::ops::Range;

use serde_json::{Map, Value, json};

use super::Part;
use crate::dtype::DType;
use crate::shape::Shape;

/// Where a file of a whole model has the denoiser: LDM's name, which the code of later models kept.
pub const DENOISER_PREFIX: &str = "model.diffusion_model.";

/// What files say of themselves, by the keys of ModelSpec: the family; the pixels of a sample in training, `512x512`; what
/// the denoiser predicts, `epsilon` or `v`.
pub const ARCHITECTURE: &str = "modelspec.architecture";
pub const RESOLUTION: &str = "modelspec.resolution";
pub const PREDICTION: &str = "modelspec.prediction_type";

/// Where the tensors of one part are in a single file.
#[derive(Clone, Copy, Debug)]
pub struct Root {
    pub prefix: &'static str,
    pub part: Part,
    /// Reads the original names. The second argument is the family's published configuration of the part, which is
    /// right where no tensor says otherwise; text encoders have none.
    pub read: Read,
    /// The tensors that the original code may have for a network whose tensors have these names of diffusers or
    /// transformers; `None` where a network here lacks some of the original's.
    pub originals: Option<Originals>,
}

/// See [`Root::originals`].
pub type Originals = fn(&[&str]) -> Vec<Original>;

/// See [`Root::read`].
///
/// # Errors
/// When the tensors do not make such a network.
pub type Read = for<'a> fn(
    &OriginalTensors<'a>,
    Map<String, Value>,
) -> Result<OriginalPart<'a>, StructureError>;

/// One part of a single file, read.
#[derive(Debug)]
pub struct OriginalPart<'a> {
    /// The content of a `config.json`, diffusers' or transformers'.
    pub config: Map<String, Value>,
    /// What becomes of each tensor, by its original name below the part's prefix.
    pub tensors: Vec<(&'a str, Converted)>,
}

/// What becomes of one tensor.
#[derive(Debug, PartialEq)]
pub enum Converted {
    /// Parts of it, or all of it, by diffusers' or transformers' names.
    To(Vec<(String, Transform)>),
    /// Left out, with the reason.
    Ignored(&'static str),
    /// Not a name of this network.
    Unknown,
}

impl From<Option<String>> for Converted {
    fn from(name: Option<String>) -> Self {
        name.map_or(Converted::Unknown, |name| {
            Converted::To(vec![(name, Transform::Identity)])
        })
    }
}

/// The part of a stored tensor that another name stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Transform {
    /// All of it.
    Identity,
    /// These indices of the first dimension.
    Rows(Range<usize>),
    /// The transpose of a matrix.
    Transpose,
    /// The second half of the first dimension, then the first.
    SwapHalves,
    /// Other dimensions of the same number of elements.
    Reshape(Vec<usize>),
    /// The unit matrix with a row for each element, whatever their values.
    UnitMatrix,
}

/// A layer or a tensor by its original name, and those of diffusers' that its rows became, in their order. How many rows
/// of several each has, their weights tell: the ranges in [`Transform::Rows`] say nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct Original {
    pub name: String,
    pub parts: Vec<(String, Transform)>,
}

impl Original {
    /// The tensor `name`, of which `convert` makes something for this shape.
    pub(super) fn tensor(
        name: String,
        shape: &Shape,
        convert: impl Fn(&str, &Shape) -> Converted,
    ) -> Option<Original> {
        match convert(&name, shape) {
            Converted::To(parts) => Some(Original { name, parts }),
            Converted::Ignored(_) | Converted::Unknown => None,
        }
    }

    /// The layer `name`, of whose weight `convert` makes something.
    fn layer(name: &str, convert: impl Fn(&str, &Shape) -> Converted) -> Option<Original> {
        const WEIGHT: &str = ".weight";
        let nothing = Shape::new(DType::F32, [0, 0]);
        let Original { parts, .. } =
            Original::tensor(format!("{name}{WEIGHT}"), &nothing, convert)?;
        let layer = |(name, transform): (String, Transform)| {
            Some((name.strip_suffix(WEIGHT)?.to_owned(), transform))
        };
        Some(Original {
            name: name.to_owned(),
            parts: parts.into_iter().map(layer).collect::<Option<_>>()?,
        })
    }
}

/// The layers among `names`, which end in a dot, with what `convert` makes of their weights.
pub(super) fn layers_of(
    names: &[String],
    convert: impl Fn(&str, &Shape) -> Converted,
) -> Vec<Original> {
    let layers = names.iter().filter_map(|name| name.strip_suffix('.'));
    layers
        .filter_map(|name| Original::layer(name, &convert))
        .collect()
}

/// The tensors that `names` may stand for, with what `convert` makes of them: a layer, which ends in a dot, has a weight
/// and a bias; others are tensors.
pub(super) fn tensors_of(
    names: &[String],
    convert: impl Fn(&str, &Shape) -> Converted,
) -> Vec<Original> {
    let of_name = |name: &String| match name.ends_with('.') {
        true => vec![format!("{name}weight"), format!("{name}bias")],
        false => vec![name.clone()],
    };
    let nothing = Shape::new(DType::F32, [0, 0]);
    let tensors = names.iter().flat_map(of_name);
    tensors
        .filter_map(|name| Original::tensor(name, &nothing, &convert))
        .collect()
}

/// The names that `table` renames: its first column.
pub(super) fn originals<'a>(table: &'a [(&str, &str)]) -> impl Iterator<Item = &'a str> {
    table.iter().map(|(from, _)| *from)
}

/// Names that are the same in the original code.
pub(super) fn same(paths: &[&str]) -> Vec<String> {
    paths.iter().map(|path| (*path).to_owned()).collect()
}

/// `leaves` in each of `count` blocks.
pub(super) fn numbered(blocks: &str, count: usize, leaves: &[&str]) -> Vec<String> {
    (0..count)
        .flat_map(|index| {
            let leaves = leaves.iter();
            leaves.map(move |leaf| format!("{blocks}.{index}.{leaf}"))
        })
        .collect()
}

/// One more than the largest number behind `prefix`.
pub(super) fn count_blocks(paths: &[&str], prefix: &str) -> usize {
    let numbers = paths
        .iter()
        .filter_map(|path| number(path.strip_prefix(prefix)?));
    numbers.map(|(index, _)| index + 1).max().unwrap_or(0)
}

/// Why the tensors of a part do not make a network.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct StructureError(pub String);

/// The tensors of one part of a file.
#[derive(Clone, Debug)]
pub struct OriginalTensors<'a> {
    pub part: Part,
    /// For messages: what stands before the names in the file.
    pub prefix: &'a str,
    /// Shapes by the names below the prefix.
    pub shapes: BTreeMap<&'a str, &'a Shape>,
    /// What the file says of itself.
    pub metadata: &'a BTreeMap<String, String>,
}

impl<'a> OriginalTensors<'a> {
    /// Dimensions of a tensor.
    pub fn get(&self, name: &str) -> Option<&'a [usize]> {
        let shape = self.shapes.get(name)?;
        Some(&shape.dims)
    }

    pub fn has(&self, name: &str) -> bool {
        self.shapes.contains_key(name)
    }

    /// One dimension of a tensor that must be there.
    ///
    /// # Errors
    /// When it is not, or has fewer dimensions.
    pub fn dim(&self, name: &str, dimension: usize) -> Result<usize, StructureError> {
        let prefix = self.prefix;
        let dims = self
            .get(name)
            .ok_or_else(|| StructureError(format!("{prefix}{name} is missing")))?;
        dims.get(dimension).copied().ok_or_else(|| {
            let rank = dimension + 1;
            StructureError(format!(
                "{prefix}{name} {dims:?} has fewer than {rank} dimensions"
            ))
        })
    }

    /// How many tensors there are whose names `name` makes of 0, 1, ...
    pub fn count(&self, name: impl Fn(usize) -> String) -> usize {
        (0..).take_while(|&i| self.has(&name(i))).count()
    }

    /// All tensors, each with what `convert` makes of its name and shape.
    pub fn converted(
        &self,
        convert: impl Fn(&str, &Shape) -> Converted,
    ) -> Vec<(&'a str, Converted)> {
        let shapes = self.shapes.iter();
        shapes
            .map(|(&name, shape)| (name, convert(name, shape)))
            .collect()
    }
}

/// `key` with the first matching prefix of `table` replaced.
pub(super) fn renamed(table: &[(&str, &str)], key: &str) -> Option<String> {
    table
        .iter()
        .find_map(|(from, to)| Some(format!("{to}{}", key.strip_prefix(from)?)))
}

/// The first part of `key`, which must be a number, and what follows.
pub(super) fn number(key: &str) -> Option<(usize, &str)> {
    let (first, rest) = key.split_once('.')?;
    Some((first.parse().ok()?, rest))
}

/// One value where all are the same, as the published configurations have it.
pub(super) fn per_block(values: &[usize]) -> Value {
    match values {
        [first, rest @ ..] if rest.iter().all(|v| v == first) => json!(first),
        _ => json!(values),
    }
}

/// Sets fields of a configuration.
pub(super) fn set<const N: usize>(config: &mut Map<String, Value>, fields: [(&str, Value); N]) {
    let fields = fields.into_iter();
    config.extend(fields.map(|(key, value)| (key.to_owned(), value)));
}
