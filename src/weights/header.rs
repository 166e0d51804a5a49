//! The header of a safetensors file, read and written.
//!
//! The format (<https://huggingface.co/docs/safetensors>): `u64 le` length of the header, the header
//! as JSON, then the tensors' bytes without gaps. The header is checked here rather than by the
//! `safetensors` crate because that wants the whole file in memory, lets a later duplicate of a key
//! win, and does not say which bytes are missing; its types are used, and it is the oracle in tests.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorInfo};
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};

use super::WeightsError;
use crate::dtype::DType;
use crate::shape::Shape;

/// The `safetensors` crate's own limit.
pub(super) const MAX_HEADER_BYTES: u64 = 100_000_000;
const METADATA_KEY: &str = "__metadata__";

/// A tensor to be written: its bytes come later.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSpec {
    pub name: String,
    pub shape: Shape,
}

/// A tensor's place in its file.
#[derive(Debug)]
pub(super) struct Entry {
    pub name: String,
    pub shape: Shape,
    /// From the start of the file.
    pub offset: u64,
}

#[derive(Debug)]
pub(super) struct Header {
    pub metadata: BTreeMap<String, String>,
    /// In the order of their bytes.
    pub tensors: Vec<Entry>,
}

/// A JSON object whose keys must be unique.
pub(super) struct UniqueMap<V>(pub BTreeMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct UniqueVisitor<V>(PhantomData<V>);
        impl<'de, V: Deserialize<'de>> Visitor<'de> for UniqueVisitor<V> {
            type Value = UniqueMap<V>;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = BTreeMap::new();
                while let Some(key) = map.next_key::<String>()? {
                    let value = map
                        .next_value()
                        .map_err(|e| serde::de::Error::custom(format!("{key}: {e}")))?;
                    if entries.insert(key.clone(), value).is_some() {
                        return Err(serde::de::Error::custom(format!("{key} stands twice")));
                    }
                }
                Ok(UniqueMap(entries))
            }
        }
        deserializer.deserialize_map(UniqueVisitor(PhantomData))
    }
}

/// A header as it stands in the file, its keys unique.
struct RawHeader {
    metadata: BTreeMap<String, String>,
    tensors: BTreeMap<String, TensorInfo>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeaderVisitor;
        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a JSON object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut metadata: Option<BTreeMap<String, String>> = None;
                let mut tensors = BTreeMap::new();
                while let Some(key) = map.next_key::<String>()? {
                    let named = |e| serde::de::Error::custom(format!("{key}: {e}"));
                    let unique = if key == METADATA_KEY {
                        let entries: Option<UniqueMap<String>> = map.next_value().map_err(named)?;
                        let entries = entries.map_or_else(BTreeMap::new, |m| m.0);
                        metadata.replace(entries).is_none()
                    } else {
                        let info: TensorInfo = map.next_value().map_err(named)?;
                        tensors.insert(key.clone(), info).is_none()
                    };
                    if !unique {
                        return Err(serde::de::Error::custom(format!("{key} stands twice")));
                    }
                }
                Ok(RawHeader {
                    metadata: metadata.unwrap_or_default(),
                    tensors,
                })
            }
        }
        deserializer.deserialize_map(HeaderVisitor)
    }
}

/// Reads a header and checks it against the length of the file.
///
/// `json` are the header's bytes, which end at `data_start`.
pub(super) fn parse(
    path: &Path,
    json: &[u8],
    data_start: u64,
    file_bytes: u64,
) -> Result<Header, WeightsError> {
    let bad = |reason: String| WeightsError::Header {
        path: path.to_owned(),
        reason,
    };
    if json.first() != Some(&b'{') {
        return Err(bad("the header does not begin with {".to_owned()));
    }
    let RawHeader { metadata, tensors } =
        serde_json::from_slice(json).map_err(|e| bad(format!("header: {e}")))?;
    let mut infos: Vec<(String, TensorInfo)> = tensors.into_iter().collect();
    infos.sort_by(|(a, x), (b, y)| (x.data_offsets, a).cmp(&(y.data_offsets, b)));

    // Truncation is the most common damage: it is reported before any other.
    let declared_end = infos.iter().map(|(_, i)| i.data_offsets.1).max();
    let expected = data_start
        .checked_add(declared_end.unwrap_or(0) as u64)
        .ok_or_else(|| bad("the offsets overflow".to_owned()))?;
    if expected > file_bytes {
        return Err(WeightsError::Truncated {
            path: path.to_owned(),
            expected,
            found: file_bytes,
        });
    }

    let tensors = entries(path, infos, data_start)?;
    if expected != file_bytes {
        return Err(WeightsError::TrailingBytes {
            path: path.to_owned(),
            expected,
            found: file_bytes,
        });
    }
    Ok(Header { metadata, tensors })
}

/// The tensors in the order of their bytes, which follow one another without a gap.
fn entries(
    path: &Path,
    infos: Vec<(String, TensorInfo)>,
    data_start: u64,
) -> Result<Vec<Entry>, WeightsError> {
    let mut tensors: Vec<Entry> = Vec::with_capacity(infos.len());
    let mut cursor = 0;
    for (name, info) in infos {
        let bad = |reason: String| WeightsError::Tensor {
            path: path.to_owned(),
            tensor: name.clone(),
            reason,
        };
        let (begin, end) = info.data_offsets;
        if begin < cursor {
            let before = tensors.last().map_or("", |e| e.name.as_str());
            return Err(bad(format!(
                "its bytes {begin}..{end} overlap those of {before}, which end at {cursor}"
            )));
        }
        if begin > cursor {
            return Err(bad(format!(
                "bytes {cursor}..{begin} before it belong to no tensor"
            )));
        }
        let bytes = byte_count(info.dtype, &info.shape).map_err(bad)?;
        if end.checked_sub(begin) != Some(bytes) {
            return Err(bad(format!(
                "{:?}{:?} takes {bytes} bytes, its offsets are {begin}..{end}",
                info.dtype, info.shape
            )));
        }
        let dtype = from_safetensors(info.dtype)
            .ok_or_else(|| bad(format!("element type {:?} is not supported", info.dtype)))?;
        cursor = end;
        tensors.push(Entry {
            shape: Shape::new(dtype, info.shape),
            offset: data_start + begin as u64,
            name,
        });
    }
    Ok(tensors)
}

fn byte_count(dtype: Dtype, dims: &[usize]) -> Result<usize, String> {
    let bits = dims
        .iter()
        .try_fold(dtype.bitsize(), |n, &dim| n.checked_mul(dim))
        .ok_or_else(|| format!("the size of {dtype:?}{dims:?} overflows"))?;
    if !bits.is_multiple_of(8) {
        return Err(format!("{dtype:?}{dims:?} does not fill whole bytes"));
    }
    Ok(bits / 8)
}

/// The bytes before the tensors: length and header, padded so that the tensors start aligned.
/// `specs` are in file order; the same input gives the same bytes.
pub(super) fn encode(
    path: &Path,
    specs: &[&TensorSpec],
    metadata: &BTreeMap<String, String>,
) -> Result<Vec<u8>, WeightsError> {
    let tensor_error = |tensor: &str, reason: String| WeightsError::Tensor {
        path: path.to_owned(),
        tensor: tensor.to_owned(),
        reason,
    };
    let mut entries = serde_json::Map::new();
    if !metadata.is_empty() {
        entries.insert(METADATA_KEY.to_owned(), serde_json::json!(metadata));
    }
    let mut begin = 0;
    for spec in specs {
        if spec.name == METADATA_KEY || entries.contains_key(&spec.name) {
            return Err(tensor_error(&spec.name, "the name stands twice".to_owned()));
        }
        let dtype = to_safetensors(spec.shape.dtype).ok_or_else(|| {
            tensor_error(
                &spec.name,
                format!("safetensors has no element type {}", spec.shape.dtype),
            )
        })?;
        let bytes = byte_count(dtype, &spec.shape.dims).map_err(|r| tensor_error(&spec.name, r))?;
        let end = begin + bytes;
        let info = TensorInfo {
            dtype,
            shape: spec.shape.dims.clone(),
            data_offsets: (begin, end),
        };
        entries.insert(spec.name.clone(), serde_json::json!(info));
        begin = end;
    }
    let mut json = serde_json::Value::Object(entries).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    if json.len() as u64 > MAX_HEADER_BYTES {
        return Err(WeightsError::Header {
            path: path.to_owned(),
            reason: format!(
                "a header of {} bytes, the most is {MAX_HEADER_BYTES}",
                json.len()
            ),
        });
    }
    let mut head = (json.len() as u64).to_le_bytes().to_vec();
    head.append(&mut json);
    Ok(head)
}

fn from_safetensors(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::BOOL => DType::Pred,
        Dtype::F4 => DType::F4E2M1Fn,
        Dtype::U8 => DType::U8,
        Dtype::I8 => DType::S8,
        Dtype::F8_E5M2 => DType::F8E5M2,
        Dtype::F8_E4M3 => DType::F8E4M3Fn,
        Dtype::F8_E8M0 => DType::F8E8M0Fnu,
        Dtype::I16 => DType::S16,
        Dtype::U16 => DType::U16,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I32 => DType::S32,
        Dtype::U32 => DType::U32,
        Dtype::F32 => DType::F32,
        Dtype::F64 => DType::F64,
        Dtype::I64 => DType::S64,
        Dtype::U64 => DType::U64,
        // 6-bit floats, the fnuz types and complex numbers have no counterpart here.
        _ => return None,
    })
}

fn to_safetensors(dtype: DType) -> Option<Dtype> {
    Some(match dtype {
        DType::Pred => Dtype::BOOL,
        DType::S8 => Dtype::I8,
        DType::S16 => Dtype::I16,
        DType::S32 => Dtype::I32,
        DType::S64 => Dtype::I64,
        DType::U8 => Dtype::U8,
        DType::U16 => Dtype::U16,
        DType::U32 => Dtype::U32,
        DType::U64 => Dtype::U64,
        DType::F4E2M1Fn => Dtype::F4,
        DType::F8E4M3Fn => Dtype::F8_E4M3,
        DType::F8E5M2 => Dtype::F8_E5M2,
        DType::F8E8M0Fnu => Dtype::F8_E8M0,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
        DType::S4 | DType::U4 => return None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use safetensors::SafeTensors;

    use super::*;

    fn file(json: &str, data: usize) -> Vec<u8> {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(json.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    fn parse_json(json: &str, data: usize) -> Result<Header, WeightsError> {
        let start = 8 + json.len() as u64;
        parse(
            Path::new("x.safetensors"),
            json.as_bytes(),
            start,
            start + data as u64,
        )
    }

    fn message(json: &str, data: usize) -> String {
        parse_json(json, data).unwrap_err().to_string()
    }

    #[test]
    fn every_defect_is_named() {
        let f32s = |offsets: &str| {
            format!(r#"{{"a":{{"dtype":"F32","shape":[2],"data_offsets":{offsets}}}}}"#)
        };
        assert_eq!(
            message(&f32s("[0,8]"), 5),
            "x.safetensors: truncated: the header declares 70 bytes, the file has 67; \
             copy or download it again"
        );
        let cases = [
            (f32s("[0,8]"), 9, "the header declares 70 bytes, the file has 71"),
            (f32s("[0,4]"), 4, "tensor a: F32[2] takes 8 bytes, its offsets are 0..4"),
            (f32s("[8,0]"), 8, "tensor a: bytes 0..8 before it belong to no tensor"),
            (f32s("[4,12]"), 12, "tensor a: bytes 0..4 before it belong to no tensor"),
            (f32s("[0,18446744073709551615]"), 8, "overflow"),
            (f32s("[0,-1]"), 8, "not a safetensors file"),
            ("[]".to_owned(), 0, "does not begin with {"),
            ("{".to_owned(), 0, "EOF"),
            (r#"{"a":1}"#.to_owned(), 0, "not a safetensors file: header: a:"),
            (
                r#"{"__metadata__":{"k":1}}"#.to_owned(),
                0,
                "not a safetensors file: header: __metadata__:",
            ),
            (
                r#"{"a":{"dtype":"C64","shape":[1],"data_offsets":[0,8]}}"#.to_owned(),
                8,
                "tensor a: element type C64 is not supported",
            ),
            (
                r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}}"#
                    .to_owned(),
                8,
                "tensor a: the size of F32[4294967296, 4294967296] overflows",
            ),
            (
                r#"{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}"#.to_owned(),
                1,
                "tensor a: F4[3] does not fill whole bytes",
            ),
            (
                r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#
                    .to_owned(),
                6,
                "tensor b: its bytes 2..6 overlap those of a, which end at 4",
            ),
            (
                r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#
                    .to_owned(),
                1,
                "a stands twice",
            ),
        ];
        for (json, data, expected) in cases {
            let found = message(&json, data);
            assert!(found.contains(expected), "{json}: {found}");
        }
    }

    #[test]
    fn reads_tensors_in_the_order_of_their_bytes() {
        let json = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"F16","shape":[],"data_offsets":[4,6]},"a":{"dtype":"BF16","shape":[2,1],"data_offsets":[0,4]}}"#;
        let header = parse_json(json, 6).unwrap();
        assert_eq!(header.metadata["format"], "pt");
        let start = 8 + json.len() as u64;
        let found: Vec<_> = header
            .tensors
            .iter()
            .map(|t| (t.name.as_str(), t.shape.to_string(), t.offset - start))
            .collect();
        assert_eq!(
            found,
            [
                ("a", "bf16[2,1]".to_owned(), 0),
                ("b", "f16[]".to_owned(), 4)
            ]
        );
    }

    #[test]
    fn every_written_type_is_read_back() {
        for dtype in [
            DType::Pred,
            DType::S8,
            DType::S16,
            DType::S32,
            DType::S64,
            DType::U8,
            DType::U16,
            DType::U32,
            DType::U64,
            DType::F4E2M1Fn,
            DType::F8E4M3Fn,
            DType::F8E5M2,
            DType::F8E8M0Fnu,
            DType::F16,
            DType::BF16,
            DType::F32,
            DType::F64,
        ] {
            let stored = to_safetensors(dtype).unwrap();
            assert_eq!(from_safetensors(stored), Some(dtype));
            assert_eq!(stored.bitsize(), dtype.bits(), "{dtype}");
        }
    }

    fn offsets() -> impl Strategy<Value = (usize, usize)> {
        (0_usize..24, 0_usize..24)
    }

    proptest! {
        // Whatever is accepted here, the reference implementation accepts too, and the other way
        // round but for the types that have no counterpart.
        #[test]
        fn agrees_with_the_reference_implementation(
            spans in proptest::collection::vec((offsets(), 0_usize..5, 0_usize..4), 0..4),
            contiguous in any::<bool>(),
            data in 0_usize..40,
        ) {
            let types = ["U8", "F16", "F32", "F4"];
            let sizes = [8, 16, 32, 4];
            let mut cursor = 0;
            let mut total = 0;
            let entries: Vec<String> = spans
                .iter()
                .enumerate()
                .map(|(i, &((begin, end), dim, dtype))| {
                    let (begin, end) = if contiguous {
                        (cursor, cursor + dim * sizes[dtype] / 8)
                    } else {
                        (begin, end)
                    };
                    cursor = end;
                    total = total.max(end);
                    format!(
                        r#""t{i}":{{"dtype":"{}","shape":[{dim}],"data_offsets":[{begin},{end}]}}"#,
                        types[dtype]
                    )
                })
                .collect();
            let json = format!("{{{}}}", entries.join(","));
            let data = if contiguous { total } else { data };
            let ours = parse_json(&json, data);
            let reference = SafeTensors::deserialize(&file(&json, data)).map(|t| t.len());
            prop_assert_eq!(ours.is_ok(), reference.is_ok(), "{}: {:?} {:?}", json, ours, reference);
        }

        #[test]
        fn damaged_headers_never_panic(
            position in 0_usize..70,
            byte in any::<u8>(),
            length in 0_usize..80,
        ) {
            let mut json = br#"{"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},"b":{}}   "#.to_vec();
            let position = position % json.len();
            json[position] = byte;
            json.truncate(length);
            let start = 8 + json.len() as u64;
            let _ = parse(Path::new("x"), &json, start, start + 8);
        }
    }
}
