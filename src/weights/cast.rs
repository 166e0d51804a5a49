//! Conversion between float types while loading.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;

use crate::dtype::DType;
use crate::host_tensor::{HostTensor, HostTensorError, float8};

/// Elements converted at a time: they stay in the nearest cache.
const CHUNK: usize = 4096;

/// The elements of `tensor` as `dtype`, rounded to nearest, ties to even.
///
/// Between `f32`, `bf16` and `f16`, and from floats of 8 bits, it runs in parallel without a copy in a wider type; other
/// pairs go through [`HostTensor::convert`]. A value past the range of `f16` becomes infinite.
///
/// # Errors
/// For 4-bit and 8-bit float types.
pub fn cast(tensor: HostTensor, dtype: DType) -> Result<HostTensor, HostTensorError> {
    let from = tensor.shape.dtype;
    if from == dtype {
        return Ok(tensor);
    }
    if !is_direct(from, dtype) {
        return tensor.convert(dtype);
    }
    let shape = tensor.shape.with_dtype(dtype);
    let mut data = vec![0; shape.bytes()];
    data.par_chunks_mut(CHUNK * dtype.storage_bytes(1))
        .zip(tensor.data.par_chunks(CHUNK * from.storage_bytes(1)))
        .for_each(|(out, input)| cast_bytes(from, input, dtype, out));
    HostTensor::new(shape, data)
}

/// Whether [`cast_bytes`] converts between the two.
pub(super) fn is_direct(from: DType, to: DType) -> bool {
    let is_float8 = matches!(from, DType::F8E4M3Fn | DType::F8E5M2);
    (is_float8 || is_half_or_single(from)) && is_half_or_single(to)
}

/// Converts the elements of `input` into `out`, on this thread. Both types are `f32`, `bf16` or `f16`, or the first
/// `f8E4M3FN` or `f8E5M2`, and `out` has room for as many elements as `input` has.
pub(super) fn cast_bytes(from: DType, input: &[u8], to: DType, out: &mut [u8]) {
    let mut values = [0.0_f32; CHUNK];
    let chunks = input.chunks(CHUNK * from.storage_bytes(1));
    for (input, out) in chunks.zip(out.chunks_mut(CHUNK * to.storage_bytes(1))) {
        let values = &mut values[..input.len() / from.storage_bytes(1)];
        read_chunk(from, input, values);
        write_chunk(to, values, out);
    }
}

/// Whether [`with_f32`] takes the type.
pub(super) fn is_half_or_single(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16 | DType::F32)
}

/// Lets `change` work on the elements of `data`, of type `dtype`, as `f32`, and rounds them back.
///
/// The type must be one of those of [`is_half_or_single`], and `data` whole elements.
pub(super) fn with_f32(dtype: DType, data: &mut [u8], change: impl FnOnce(&mut [f32])) {
    let mut values = vec![0.0; data.len() / dtype.storage_bytes(1)];
    let bytes = CHUNK * dtype.storage_bytes(1);
    for (values, data) in values.chunks_mut(CHUNK).zip(data.chunks(bytes)) {
        read_chunk(dtype, data, values);
    }
    change(&mut values);
    for (values, data) in values.chunks(CHUNK).zip(data.chunks_mut(bytes)) {
        write_chunk(dtype, values, data);
    }
}

/// Whether a value is infinite; of the types that weights are converted to.
pub(super) fn has_infinity(tensor: &HostTensor) -> bool {
    let halves = |infinity: u16| {
        let values = tensor.data.as_chunks().0.iter();
        values
            .map(|bytes| u16::from_le_bytes(*bytes) & 0x7fff)
            .any(|bits| bits == infinity)
    };
    match tensor.shape.dtype {
        DType::F16 => halves(f16::INFINITY.to_bits()),
        DType::BF16 => halves(bf16::INFINITY.to_bits()),
        DType::F32 => {
            let mut values = tensor.data.as_chunks().0.iter();
            values.any(|bytes| f32::from_le_bytes(*bytes).is_infinite())
        }
        _ => false,
    }
}

fn read_chunk(from: DType, input: &[u8], values: &mut [f32]) {
    let pairs = input.as_chunks().0.iter().map(|b| u16::from_le_bytes(*b));
    match from {
        DType::F16 => {
            let mut halves = [f16::ZERO; CHUNK];
            let halves = &mut halves[..values.len()];
            for (h, bits) in halves.iter_mut().zip(pairs) {
                *h = f16::from_bits(bits);
            }
            halves.convert_to_f32_slice(values);
        }
        DType::BF16 => {
            for (v, bits) in values.iter_mut().zip(pairs) {
                *v = f32::from_bits(u32::from(bits) << 16);
            }
        }
        DType::F8E4M3Fn => {
            for (v, code) in values.iter_mut().zip(input) {
                *v = float8::decode(*code);
            }
        }
        DType::F8E5M2 => {
            for (v, code) in values.iter_mut().zip(input) {
                *v = float8::decode_e5m2(*code);
            }
        }
        _ => {
            for (v, b) in values.iter_mut().zip(input.as_chunks().0) {
                *v = f32::from_le_bytes(*b);
            }
        }
    }
}

fn write_chunk(to: DType, values: &[f32], out: &mut [u8]) {
    match to {
        DType::F16 => {
            let mut halves = [f16::ZERO; CHUNK];
            let halves = &mut halves[..values.len()];
            halves.convert_from_f32_slice(values);
            for (b, h) in out.as_chunks_mut().0.iter_mut().zip(halves.iter()) {
                *b = h.to_le_bytes();
            }
        }
        DType::BF16 => {
            for (b, &v) in out.as_chunks_mut().0.iter_mut().zip(values) {
                *b = to_bf16(v).to_le_bytes();
            }
        }
        _ => {
            for (b, &v) in out.as_chunks_mut().0.iter_mut().zip(values) {
                *b = v.to_le_bytes();
            }
        }
    }
}

/// The bits of `bf16::from_f32(v)`, without the branches that keep that from being vectorized.
fn to_bf16(v: f32) -> u16 {
    let bits = v.to_bits();
    // Half of the last kept place, less one where the kept bits are even, carries into them.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    let quiet = bits | 0x40_0000;
    ((if v.is_nan() { quiet } else { rounded }) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::Shape;

    /// All 65536 bit patterns of a 16-bit type.
    fn all_patterns(dtype: DType) -> HostTensor {
        let data = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        HostTensor::new(Shape::new(dtype, [65536]), data).unwrap()
    }

    #[test]
    fn every_half_survives_the_way_through_f32() {
        for dtype in [DType::F16, DType::BF16] {
            let all = all_patterns(dtype);
            let back = cast(cast(all.clone(), DType::F32).unwrap(), dtype).unwrap();
            for (a, b) in all.data.chunks(2).zip(back.data.chunks(2)) {
                let bits = u16::from_le_bytes([a[0], a[1]]);
                let nan = match dtype {
                    DType::F16 => f16::from_bits(bits).is_nan(),
                    _ => bf16::from_bits(bits).is_nan(),
                };
                // A signalling NaN may come back quiet.
                let found = u16::from_le_bytes([b[0], b[1]]);
                if nan {
                    let still = match dtype {
                        DType::F16 => f16::from_bits(found).is_nan(),
                        _ => bf16::from_bits(found).is_nan(),
                    };
                    assert!(still, "{bits:#06x}");
                } else {
                    assert_eq!(found, bits);
                }
            }
        }
    }

    #[test]
    fn agrees_with_the_general_conversion() {
        // 10,000 values over all magnitudes, with ties, subnormals and overflow, of a length that
        // is no multiple of the chunk.
        let values: Vec<f32> = (0..10_000_u32)
            .map(|i| f32::from_bits(i.wrapping_mul(2_654_435_761)))
            .filter(|v| !v.is_nan())
            .chain([
                257.0 / 256.0,
                259.0 / 256.0,
                65519.0,
                65520.0,
                6e-8,
                2.98e-8,
                -0.0,
            ])
            .collect();
        let t = HostTensor::from_f32([values.len()], &values).unwrap();
        for dtype in [DType::F16, DType::BF16] {
            assert_eq!(cast(t.clone(), dtype).unwrap(), t.convert(dtype).unwrap());
        }
        let f16s = all_patterns(DType::F16);
        let finite = |t: &HostTensor| -> Vec<Option<f32>> {
            let values = t.to_f32_vec().unwrap().into_iter();
            values.map(|v| (!v.is_nan()).then_some(v)).collect()
        };
        assert_eq!(
            finite(&cast(f16s.clone(), DType::BF16).unwrap()),
            finite(&f16s.convert(DType::BF16).unwrap())
        );
    }

    #[test]
    fn what_is_no_number_stays_none() {
        // The first would become an infinity if its low bits were just cut off, the last a zero by the carry.
        for bits in [
            0x7f80_0001,
            0xff80_0001,
            0x7fc0_0000,
            0x7fff_ffff,
            0xffff_ffff,
        ] {
            assert!(
                bf16::from_bits(to_bf16(f32::from_bits(bits))).is_nan(),
                "{bits:#x}"
            );
        }
    }

    #[test]
    fn ties_go_to_the_even_neighbour() {
        let t = HostTensor::from_f32([3], &[257.0 / 256.0, 259.0 / 256.0, 65520.0]).unwrap();
        let bf = cast(t.clone(), DType::BF16).unwrap().to_f32_vec().unwrap();
        assert_eq!(bf, [1.0, 1.015_625, 65536.0]);
        let half = cast(t, DType::F16).unwrap().to_f32_vec().unwrap();
        assert_eq!(half, [257.0 / 256.0, 259.0 / 256.0, f32::INFINITY]);
    }

    #[test]
    fn other_pairs_convert_or_are_refused() {
        let t = HostTensor::from_i32([2], &[3, -4]).unwrap();
        let f = cast(t, DType::F32).unwrap();
        assert_eq!(f.to_f32_vec().unwrap(), [3.0, -4.0]);
        assert!(cast(f, DType::F8E8M0Fnu).is_err());
    }
}
