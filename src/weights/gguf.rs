//! The header of a GGUF file (<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>), versions 2 and 3.
//!
//! Every count and length is compared with what is left of the file before anything is done by it, nothing is allocated
//! by a count alone, and values that no reader here asks for (vocabularies, templates) are stepped over.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use super::WeightsError;
use super::stored::BlockType;
use crate::dtype::DType;

/// What the file begins with.
pub(super) const MAGIC: &[u8; 4] = b"GGUF";
/// Where ComfyUI-GGUF notes the shape of a tensor whose rows no block divides, and which it has cut into rows of 256.
const SHAPE: &str = "comfy.gguf.orig_shape.";
/// The most bytes of a name or of a text that is kept, and the most numbers of a shape.
const LONGEST: u64 = 1 << 16;
const MOST_DIMENSIONS: u64 = 8;
/// Arrays within arrays.
const DEEPEST: usize = 4;

/// A tensor's place in its file.
#[derive(Debug)]
pub(super) struct Entry {
    pub name: String,
    pub dims: Vec<usize>,
    pub kind: Kind,
    /// From the start of the file.
    pub offset: u64,
}

/// How a tensor's elements are stored.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Plain(DType),
    Blocks(BlockType),
}

#[derive(Debug)]
pub(super) struct Header {
    /// Texts of the header.
    pub metadata: BTreeMap<String, String>,
    pub tensors: Vec<Entry>,
}

/// ggml's names of tensor types, by their numbers; those without a name were withdrawn.
const TYPES: [&str; 41] = [
    "F32", "F16", "Q4_0", "Q4_1", "", "", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K",
    "Q5_K", "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S",
    "IQ4_XS", "I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16", "", "", "", "TQ1_0", "TQ2_0", "",
    "", "", "MXFP4", "NVFP4",
];

impl Kind {
    /// `None` where tensors of this type are not read.
    fn of(number: u32) -> Option<Kind> {
        let name = usize::try_from(number).ok().and_then(|n| TYPES.get(n))?;
        match *name {
            "F32" => Some(Kind::Plain(DType::F32)),
            "F16" => Some(Kind::Plain(DType::F16)),
            "BF16" => Some(Kind::Plain(DType::BF16)),
            "" => None,
            name => {
                let mut known = BlockType::ALL.into_iter();
                known.find(|kind| kind.name() == name).map(Kind::Blocks)
            }
        }
    }

    /// The bytes of `count` elements in rows of `row`, or why there is no such tensor.
    fn bytes(self, count: usize, row: usize) -> Result<u64, String> {
        let overflow = || "its size overflows".to_owned();
        let bytes = match self {
            Kind::Plain(dtype) => count.checked_mul(dtype.bits() / 8),
            Kind::Blocks(kind) => {
                if !row.is_multiple_of(kind.elements()) {
                    return Err(format!(
                        "rows of {row} elements are no whole blocks of {}, which have {}",
                        kind.name(),
                        kind.elements()
                    ));
                }
                (count / kind.elements()).checked_mul(kind.bytes())
            }
        };
        Ok(bytes.ok_or_else(overflow)? as u64)
    }
}

fn type_name(number: u32) -> String {
    let known = usize::try_from(number).ok().and_then(|n| TYPES.get(n));
    match known.filter(|name| !name.is_empty()) {
        Some(name) => (*name).to_owned(),
        None => format!("number {number}"),
    }
}

/// A tensor as the header has it.
struct Raw {
    name: String,
    /// The fastest first.
    sizes: Vec<u64>,
    kind: u32,
    /// From the start of the tensors.
    offset: u64,
}

/// Reads a header and checks it against the length of the file.
pub(super) fn read(path: &Path, file: &File, file_bytes: u64) -> Result<Header, WeightsError> {
    let mut source = Source {
        path,
        file: BufReader::new(file),
        at: 0,
        bytes: file_bytes,
    };
    source.take::<4>()?;
    let version = source.u32()?;
    match version {
        2 | 3 => {}
        _ if version.swap_bytes() < 1 << 16 && version >= 1 << 16 => {
            return Err(
                source.bad("its numbers are big-endian; convert it to little-endian".into())
            );
        }
        _ => {
            return Err(source.bad(format!(
                "it has version {version}; read are 2 and 3: write it again with a current llama.cpp or ComfyUI-GGUF"
            )));
        }
    }
    let (tensor_count, key_count) = (source.u64()?, source.u64()?);
    let mut values = Values::default();
    for _ in 0..key_count {
        source.pair(&mut values)?;
    }
    let mut raw = Vec::new();
    for _ in 0..tensor_count {
        raw.push(source.tensor()?);
    }
    let alignment = values.alignment.unwrap_or(32);
    if !alignment.is_power_of_two() || alignment > 1 << 20 {
        return Err(source.bad(format!(
            "general.alignment is {alignment}; expected a power of two up to {}",
            1 << 20
        )));
    }
    let start = source.at.next_multiple_of(alignment);
    let tensors = entries(path, raw, &values.shapes, start, alignment, file_bytes)?;
    Ok(Header {
        metadata: values.texts,
        tensors,
    })
}

/// The tensors, in the order of their names in the file.
fn entries(
    path: &Path,
    raw: Vec<Raw>,
    shapes: &BTreeMap<String, Vec<i64>>,
    start: u64,
    alignment: u64,
    file_bytes: u64,
) -> Result<Vec<Entry>, WeightsError> {
    refuse_unread(path, &raw)?;
    let mut names = BTreeSet::new();
    let mut tensors = Vec::with_capacity(raw.len());
    let mut ends = BTreeMap::new();
    let mut end_of_all = 0;
    for tensor in raw {
        let bad = |reason: String| WeightsError::Tensor {
            path: path.to_owned(),
            tensor: tensor.name.clone(),
            reason,
        };
        if !names.insert(tensor.name.clone()) {
            return Err(bad("the name stands twice".into()));
        }
        let Some(kind) = Kind::of(tensor.kind) else {
            return Err(bad(format!("type {} is not read", type_name(tensor.kind))));
        };
        let sizes = tensor.sizes.iter().rev();
        let dims: Option<Vec<usize>> = sizes.map(|size| usize::try_from(*size).ok()).collect();
        let count_of = |dims: &[usize]| dims.iter().try_fold(1_usize, |n, d| n.checked_mul(*d));
        let overflow = || bad(format!("the size of {:?} overflows", tensor.sizes));
        let mut dims = dims.ok_or_else(overflow)?;
        let count = count_of(&dims).ok_or_else(overflow)?;
        let bytes = kind.bytes(count, dims.last().copied().unwrap_or(1));
        let bytes = bytes.map_err(bad)?;
        if let Some(shape) = shapes.get(&tensor.name) {
            let original: Option<Vec<usize>> =
                shape.iter().map(|d| usize::try_from(*d).ok()).collect();
            let fits = |dims: &Vec<usize>| count_of(dims) == Some(count);
            dims = original.filter(fits).ok_or_else(|| {
                bad(format!(
                    "{SHAPE}{} is {shape:?}, which does not have the elements of {dims:?}",
                    tensor.name
                ))
            })?;
        }
        if !tensor.offset.is_multiple_of(alignment) {
            return Err(bad(format!(
                "its offset {} is no multiple of the alignment {alignment}",
                tensor.offset
            )));
        }
        let end = start.checked_add(tensor.offset);
        let end = end.and_then(|offset| offset.checked_add(bytes));
        let end = end.ok_or_else(|| bad("its offset overflows".into()))?;
        end_of_all = end_of_all.max(end);
        let offset = end - bytes;
        ends.insert((offset, end), tensor.name.clone());
        tensors.push(Entry {
            name: tensor.name,
            dims,
            kind,
            offset,
        });
    }
    // Truncation is the most common damage: it is reported before any other.
    if end_of_all > file_bytes {
        return Err(WeightsError::Truncated {
            path: path.to_owned(),
            expected: end_of_all,
            found: file_bytes,
        });
    }
    let next = ends.iter().skip(1);
    for (((_, end), before), ((begin, _), name)) in ends.iter().zip(next) {
        if begin < end {
            return Err(WeightsError::Tensor {
                path: path.to_owned(),
                tensor: name.clone(),
                reason: format!("its bytes overlap those of {before}"),
            });
        }
    }
    Ok(tensors)
}

/// Refuses tensors of types that are not read, all at once.
fn refuse_unread(path: &Path, raw: &[Raw]) -> Result<(), WeightsError> {
    let mut unread: BTreeMap<String, usize> = BTreeMap::new();
    for tensor in raw.iter().filter(|t| Kind::of(t.kind).is_none()) {
        *unread.entry(type_name(tensor.kind)).or_default() += 1;
    }
    if unread.is_empty() {
        return Ok(());
    }
    let count = |(name, count): (&String, &usize)| format!("{name} ({count} tensors)");
    let found: Vec<String> = unread.iter().map(count).collect();
    let blocks = BlockType::ALL.map(BlockType::name);
    Err(WeightsError::Gguf {
        path: path.to_owned(),
        reason: format!(
            "it has tensors of types that are not read here: {}; read are F32, F16, BF16, {}: take the model in one of these",
            found.join(", "),
            blocks.join(", ")
        ),
    })
}

/// What is kept of the header's values.
#[derive(Default)]
struct Values {
    texts: BTreeMap<String, String>,
    /// Of [`SHAPE`], by the tensors' names.
    shapes: BTreeMap<String, Vec<i64>>,
    alignment: Option<u64>,
}

/// The header, read from its start.
struct Source<'a> {
    path: &'a Path,
    file: BufReader<&'a File>,
    /// Bytes that were read or stepped over.
    at: u64,
    /// Of the whole file.
    bytes: u64,
}

impl Source<'_> {
    fn io(&self, source: std::io::Error) -> WeightsError {
        WeightsError::Io {
            path: self.path.to_owned(),
            source,
        }
    }

    fn bad(&self, reason: String) -> WeightsError {
        WeightsError::Gguf {
            path: self.path.to_owned(),
            reason,
        }
    }

    /// Whether so many more bytes are there.
    fn claim(&mut self, bytes: u64) -> Result<(), WeightsError> {
        let end = self.at.saturating_add(bytes);
        if end > self.bytes {
            return Err(WeightsError::Truncated {
                path: self.path.to_owned(),
                expected: end,
                found: self.bytes,
            });
        }
        self.at = end;
        Ok(())
    }

    fn fill(&mut self, out: &mut [u8]) -> Result<(), WeightsError> {
        self.claim(out.len() as u64)?;
        let read = self.file.read_exact(out);
        read.map_err(|e| self.io(e))
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], WeightsError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn skip(&mut self, bytes: u64) -> Result<(), WeightsError> {
        self.claim(bytes)?;
        let steps = i64::try_from(bytes).map_err(|_| self.bad("a length overflows".into()))?;
        let skipped = self.file.seek_relative(steps);
        skipped.map_err(|e| self.io(e))
    }

    fn u32(&mut self) -> Result<u32, WeightsError> {
        Ok(u32::from_le_bytes(self.take()?))
    }

    fn u64(&mut self) -> Result<u64, WeightsError> {
        Ok(u64::from_le_bytes(self.take()?))
    }

    /// A text of at most [`LONGEST`] bytes.
    fn text(&mut self, what: &str) -> Result<String, WeightsError> {
        let length = self.u64()?;
        if length > LONGEST {
            return Err(self.bad(format!("{what} of {length} bytes; the most is {LONGEST}")));
        }
        let mut bytes = vec![0; length as usize];
        self.fill(&mut bytes)?;
        String::from_utf8(bytes).map_err(|_| self.bad(format!("{what} is not UTF-8")))
    }

    /// A key with its value.
    fn pair(&mut self, values: &mut Values) -> Result<(), WeightsError> {
        let key = self.text("a key")?;
        let kind = self.u32()?;
        if key == "general.alignment" && kind == 4 {
            values.alignment = Some(self.u32()?.into());
            return Ok(());
        }
        if let Some(tensor) = key.strip_prefix(SHAPE)
            && kind == 9
        {
            let (element, count) = (self.u32()?, self.u64()?);
            if element != 5 || count > MOST_DIMENSIONS {
                return Err(self.bad(format!("{key} is no shape of 32-bit integers")));
            }
            let mut shape = Vec::new();
            for _ in 0..count {
                shape.push(i32::from_le_bytes(self.take()?).into());
            }
            values.shapes.insert(tensor.to_owned(), shape);
            return Ok(());
        }
        if kind != 8 {
            return self.skip_value(kind, 0);
        }
        let length = self.u64()?;
        if length > LONGEST {
            return self.skip(length);
        }
        let mut bytes = vec![0; length as usize];
        self.fill(&mut bytes)?;
        // Others than UTF-8 are nothing that is asked for.
        if let Ok(text) = String::from_utf8(bytes) {
            values.texts.insert(key, text);
        }
        Ok(())
    }

    /// Steps over a value of a type's number.
    fn skip_value(&mut self, kind: u32, depth: usize) -> Result<(), WeightsError> {
        match kind {
            0 | 1 | 7 => self.skip(1),
            2 | 3 => self.skip(2),
            4..=6 => self.skip(4),
            10..=12 => self.skip(8),
            8 => {
                let length = self.u64()?;
                self.skip(length)
            }
            9 if depth < DEEPEST => {
                let (element, count) = (self.u32()?, self.u64()?);
                let size = match element {
                    0 | 1 | 7 => 1,
                    2 | 3 => 2,
                    4..=6 => 4,
                    10..=12 => 8,
                    _ => {
                        // Each takes at least its length: the end of the file ends this, whatever the count is.
                        for _ in 0..count {
                            self.skip_value(element, depth + 1)?;
                        }
                        return Ok(());
                    }
                };
                self.skip(count.saturating_mul(size))
            }
            9 => Err(self.bad(format!("arrays within more than {DEEPEST} arrays"))),
            _ => Err(self.bad(format!("a value of the unknown type {kind}"))),
        }
    }

    fn tensor(&mut self) -> Result<Raw, WeightsError> {
        let name = self.text("a tensor's name")?;
        let rank = self.u32()?;
        if u64::from(rank) > MOST_DIMENSIONS {
            return Err(self.bad(format!(
                "tensor {name} has {rank} dimensions; the most is {MOST_DIMENSIONS}"
            )));
        }
        let mut sizes = Vec::new();
        for _ in 0..rank {
            sizes.push(self.u64()?);
        }
        Ok(Raw {
            name,
            sizes,
            kind: self.u32()?,
            offset: self.u64()?,
        })
    }
}
