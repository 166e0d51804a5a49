//! Tensors in host memory.

pub mod float6;
pub mod float8;

use std::borrow::Cow;

use half::{bf16, f16};
use rayon::prelude::*;

use crate::dtype::DType;
use crate::shape::Shape;

pub use float6::Float6;

/// A dense, row-major tensor in host memory, little-endian; integers of 4 bits two to a byte, the first in the lower half.
///
/// `data.len()` is always `shape.bytes()`.
#[derive(Clone, Debug, PartialEq)]
pub struct HostTensor {
    pub shape: Shape,
    pub data: Vec<u8>,
}

/// Why a [`HostTensor`] could not be made or read.
#[derive(Debug, thiserror::Error)]
pub enum HostTensorError {
    #[error("{shape} takes {expected} bytes, found {found}")]
    ByteCount {
        shape: Shape,
        expected: usize,
        found: usize,
    },
    #[error("cannot convert {from} elements to {to} on the host")]
    Conversion { from: DType, to: DType },
}

impl HostTensor {
    /// Wraps `data`.
    ///
    /// # Errors
    /// When the length of `data` is not what `shape` takes.
    pub fn new(shape: Shape, data: Vec<u8>) -> Result<Self, HostTensorError> {
        if data.len() != shape.bytes() {
            return Err(HostTensorError::ByteCount {
                expected: shape.bytes(),
                found: data.len(),
                shape,
            });
        }
        Ok(HostTensor { shape, data })
    }

    pub fn zeros(shape: Shape) -> Self {
        let data = vec![0; shape.bytes()];
        HostTensor { shape, data }
    }

    /// # Errors
    /// When `values` does not have as many elements as `dims` names.
    pub fn from_f32(dims: impl Into<Vec<usize>>, values: &[f32]) -> Result<Self, HostTensorError> {
        HostTensor::new(
            Shape::new(DType::F32, dims),
            bytemuck::cast_slice(values).to_vec(),
        )
    }

    /// # Errors
    /// When `values` does not have as many elements as `dims` names.
    pub fn from_i32(dims: impl Into<Vec<usize>>, values: &[i32]) -> Result<Self, HostTensorError> {
        HostTensor::new(
            Shape::new(DType::S32, dims),
            bytemuck::cast_slice(values).to_vec(),
        )
    }

    /// A scalar of a float type holding `value` rounded to it.
    ///
    /// # Errors
    /// When `dtype` has no conversion from `f32` here.
    pub fn scalar_f32(dtype: DType, value: f32) -> Result<Self, HostTensorError> {
        HostTensor {
            shape: Shape::scalar(DType::F32),
            data: value.to_le_bytes().to_vec(),
        }
        .convert(dtype)
    }

    /// The elements as `f32`, rounded to nearest where the type is wider.
    ///
    /// # Errors
    /// For floats of 4 bits.
    pub fn to_f32_vec(&self) -> Result<Vec<f32>, HostTensorError> {
        Ok(match self.shape.dtype {
            DType::F32 => {
                let values = self.data.as_chunks().0.iter();
                values.map(|bytes| f32::from_le_bytes(*bytes)).collect()
            }
            DType::BF16 => {
                let values = self.data.as_chunks().0.iter();
                values
                    .map(|bytes| bf16::from_le_bytes(*bytes).to_f32())
                    .collect()
            }
            _ => self.to_f64_vec()?.into_iter().map(|v| v as f32).collect(),
        })
    }

    /// The elements as `f64`.
    ///
    /// # Errors
    /// For floats of 4 bits.
    pub fn to_f64_vec(&self) -> Result<Vec<f64>, HostTensorError> {
        fn read<const N: usize>(data: &[u8], value: impl Fn([u8; N]) -> f64) -> Vec<f64> {
            data.chunks_exact(N)
                .map(|c| {
                    let mut bytes = [0; N];
                    bytes.copy_from_slice(c);
                    value(bytes)
                })
                .collect()
        }
        let data = &self.data;
        Ok(match self.shape.dtype {
            DType::Pred => read::<1>(data, |b| f64::from(b[0] != 0)),
            DType::S4 | DType::U4 => {
                let values = self.bytes_of_integers().into_iter();
                match self.shape.dtype.is_signed_int() {
                    true => values.map(|v| f64::from(v as i8)).collect(),
                    false => values.map(f64::from).collect(),
                }
            }
            DType::S8 => read::<1>(data, |b| f64::from(i8::from_le_bytes(b))),
            DType::U8 => read::<1>(data, |b| f64::from(b[0])),
            DType::S16 => read::<2>(data, |b| f64::from(i16::from_le_bytes(b))),
            DType::U16 => read::<2>(data, |b| f64::from(u16::from_le_bytes(b))),
            DType::S32 => read::<4>(data, |b| f64::from(i32::from_le_bytes(b))),
            DType::U32 => read::<4>(data, |b| f64::from(u32::from_le_bytes(b))),
            DType::S64 => read::<8>(data, |b| i64::from_le_bytes(b) as f64),
            DType::U64 => read::<8>(data, |b| u64::from_le_bytes(b) as f64),
            DType::F16 => read::<2>(data, |b| f16::from_le_bytes(b).to_f64()),
            DType::BF16 => read::<2>(data, |b| bf16::from_le_bytes(b).to_f64()),
            DType::F32 => read::<4>(data, |b| f64::from(f32::from_le_bytes(b))),
            DType::F64 => read::<8>(data, f64::from_le_bytes),
            DType::F8E4M3Fn => read::<1>(data, |b| f64::from(float8::decode(b[0]))),
            DType::F8E5M2 => read::<1>(data, |b| f64::from(float8::decode_e5m2(b[0]))),
            DType::F8E8M0Fnu => read::<1>(data, |b| f64::from(float8::decode_e8m0(b[0]))),
            from @ DType::F4E2M1Fn => {
                return Err(HostTensorError::Conversion {
                    from,
                    to: DType::F64,
                });
            }
        })
    }

    /// A tensor of `shape` from `f64` values: floats round to nearest even, integers truncate and saturate.
    ///
    /// # Errors
    /// For float types of 4 and 8 bits but `f8E4M3FN`, and when the element count differs.
    pub fn from_f64(shape: Shape, values: &[f64]) -> Result<Self, HostTensorError> {
        let write = |f: &dyn Fn(f64, &mut Vec<u8>)| {
            let mut data = Vec::with_capacity(shape.bytes());
            for &v in values {
                f(v, &mut data);
            }
            data
        };
        let data = match shape.dtype {
            DType::Pred => write(&|v, d| d.push(u8::from(v != 0.0))),
            DType::S4 => packed(&write(&|v, d| d.push(v.clamp(-8.0, 7.0) as i8 as u8))),
            DType::U4 => packed(&write(&|v, d| d.push(v.clamp(0.0, 15.0) as u8))),
            DType::S8 => write(&|v, d| d.extend((v as i8).to_le_bytes())),
            DType::U8 => write(&|v, d| d.push(v as u8)),
            DType::S16 => write(&|v, d| d.extend((v as i16).to_le_bytes())),
            DType::U16 => write(&|v, d| d.extend((v as u16).to_le_bytes())),
            DType::S32 => write(&|v, d| d.extend((v as i32).to_le_bytes())),
            DType::U32 => write(&|v, d| d.extend((v as u32).to_le_bytes())),
            DType::S64 => write(&|v, d| d.extend((v as i64).to_le_bytes())),
            DType::U64 => write(&|v, d| d.extend((v as u64).to_le_bytes())),
            DType::F16 => write(&|v, d| d.extend(f16::from_f64(v).to_le_bytes())),
            // By way of f32: from_f64 looks at the upper half of the number only, and misses what breaks a tie.
            DType::BF16 => write(&|v, d| d.extend(bf16::from_f32(v as f32).to_le_bytes())),
            DType::F32 => write(&|v, d| d.extend((v as f32).to_le_bytes())),
            DType::F64 => write(&|v, d| d.extend(v.to_le_bytes())),
            DType::F8E4M3Fn => write(&|v, d| d.push(float8::encode(v as f32))),
            DType::F8E5M2 => write(&|v, d| d.push(float8::encode_e5m2(v as f32))),
            to @ (DType::F4E2M1Fn | DType::F8E8M0Fnu) => {
                return Err(HostTensorError::Conversion {
                    from: DType::F64,
                    to,
                });
            }
        };
        HostTensor::new(shape, data)
    }

    /// The elements, each in a byte of its own, with its sign: what PJRT takes and gives for types of 4 bits. The bytes as
    /// they are for all other types.
    pub fn whole_bytes(&self) -> Cow<'_, [u8]> {
        match self.shape.dtype {
            DType::S4 | DType::U4 => Cow::Owned(self.bytes_of_integers()),
            _ => Cow::Borrowed(&self.data),
        }
    }

    /// The tensor of elements that [`HostTensor::whole_bytes`] gives.
    ///
    /// # Errors
    /// When `data` has another length.
    pub fn of_whole_bytes(shape: Shape, data: Vec<u8>) -> Result<Self, HostTensorError> {
        match shape.dtype {
            DType::S4 | DType::U4 if data.len() == shape.count() => {
                let data = packed(&data);
                Ok(HostTensor { shape, data })
            }
            _ => HostTensor::new(shape, data),
        }
    }

    /// Integers of 4 bits, each in a byte of its own.
    fn bytes_of_integers(&self) -> Vec<u8> {
        let count = self.shape.count();
        let mut bytes = vec![0; 2 * self.data.len()];
        let pairs = bytes.as_chunks_mut::<2>().0.par_chunks_mut(TASK);
        let pairs = pairs.zip(self.data.par_chunks(TASK));
        let is_signed = self.shape.dtype.is_signed_int();
        pairs.for_each(|(pairs, data)| {
            for (pair, byte) in pairs.iter_mut().zip(data) {
                *pair = match is_signed {
                    // A shift to the right keeps the sign.
                    true => [((byte << 4) as i8 >> 4) as u8, (*byte as i8 >> 4) as u8],
                    false => [byte & 0xf, byte >> 4],
                };
            }
        });
        bytes.truncate(count);
        bytes
    }

    /// The same elements in another type (see [`HostTensor::from_f64`] for the rounding).
    ///
    /// # Errors
    /// For float types of 4 and 8 bits but `f8E4M3FN`.
    pub fn convert(&self, dtype: DType) -> Result<Self, HostTensorError> {
        if dtype == self.shape.dtype {
            return Ok(self.clone());
        }
        HostTensor::from_f64(self.shape.with_dtype(dtype), &self.to_f64_vec()?)
    }
}

/// Bytes that one thread packs or unpacks at a time.
const TASK: usize = 1 << 16;

/// The lower halves of bytes, two to a byte, the first in the lower half.
pub(crate) fn packed(bytes: &[u8]) -> Vec<u8> {
    let mut packed = vec![0; bytes.len().div_ceil(2)];
    let parts = packed.par_chunks_mut(TASK).zip(bytes.par_chunks(2 * TASK));
    parts.for_each(|(packed, bytes)| {
        for (byte, pair) in packed.iter_mut().zip(bytes.chunks(2)) {
            *byte = pair[0] & 0xf | pair.get(1).map_or(0, |second| second << 4);
        }
    });
    packed
}

/// The bytes of values in `bf16`, to which they are rounded, or else in `f32`.
pub(crate) fn float_bytes(dtype: DType, values: impl Iterator<Item = f32>) -> Vec<u8> {
    // Whole elements are collected: that is several times as fast as byte by byte.
    match dtype {
        DType::BF16 => {
            let rounded = values.map(|x| bf16::from_f32(x).to_le_bytes());
            rounded.collect::<Vec<_>>().into_flattened()
        }
        _ => values
            .map(f32::to_le_bytes)
            .collect::<Vec<_>>()
            .into_flattened(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_of_four_bits_share_bytes() {
        let values = [-8.0, 7.0, -1.0, 3.0, 0.0];
        let shape = Shape::new(DType::S4, [5]);
        let t = HostTensor::from_f64(shape.clone(), &values).unwrap();
        assert_eq!(t.data, [0x78, 0x3f, 0x00]);
        assert_eq!(t.to_f64_vec().unwrap(), values);
        let bytes = t.whole_bytes().into_owned();
        assert_eq!(bytes, [0xf8, 7, 0xff, 3, 0]);
        assert_eq!(HostTensor::of_whole_bytes(shape, bytes).unwrap(), t);
        let unsigned = HostTensor::from_f64(Shape::new(DType::U4, [2]), &[15.0, 9.0]).unwrap();
        assert_eq!(unsigned.to_f64_vec().unwrap(), [15.0, 9.0]);
    }

    #[test]
    fn converts_between_widths_with_round_to_nearest_even() {
        // 1 + 2^-8 lies halfway between two bf16 values; the even one is 1.0.
        let t = HostTensor::from_f32([3], &[1.0 + 2f32.powi(-8), -2.5, 3.75]).unwrap();
        let bf = t.convert(DType::BF16).unwrap();
        assert_eq!(bf.to_f32_vec().unwrap(), vec![1.0, -2.5, 3.75]);
        // Just past such a half: it rounds away from the even one.
        let past = f32::from_bits(0xBEBC_8001);
        let rounded = HostTensor::from_f32([1], &[past]).unwrap();
        let rounded = rounded.convert(DType::BF16).unwrap();
        assert_eq!(rounded.data, 0xBEBDu16.to_le_bytes());
        let ints = t.convert(DType::S8).unwrap();
        assert_eq!(ints.to_f32_vec().unwrap(), vec![1.0, -2.0, 3.0]);
    }

    #[test]
    fn refuses_a_wrong_byte_count() {
        let error = HostTensor::new(Shape::new(DType::F32, [2]), vec![0; 7]).unwrap_err();
        assert_eq!(error.to_string(), "f32[2] takes 8 bytes, found 7");
    }
}
