//! Elements that are smaller than a byte: which share bytes in a file, and in which order.

use std::borrow::Cow;

use rayon::prelude::*;

use crate::dtype::DType;
use crate::graph::TensorFormat;
use crate::host_tensor::{Float6, HostTensor, float6, float8, packed};
use crate::shape::Shape;

/// How many input features share how many bytes in a file, where their elements are smaller than a byte.
fn shared_bytes(format: TensorFormat) -> Option<(usize, usize)> {
    match format.bits_in_files() {
        4 => Some((2, 1)),
        6 => Some((4, 3)),
        _ => None,
    }
}

/// How many input features share bytes in files: a weight has a multiple of them.
pub fn features_together(format: TensorFormat) -> usize {
    shared_bytes(format).map_or(1, |(features, _)| features)
}

/// The shape in a file of a weight's elements; `None` where its input features share no bytes.
pub(super) fn in_file(shape: &Shape, format: TensorFormat) -> Option<Shape> {
    let Some((features, bytes)) = shared_bytes(format) else {
        return Some(shape.with_dtype(format.element));
    };
    let mut packed = shape.with_dtype(DType::U8);
    let inputs = packed
        .dims
        .get_mut(1)
        .filter(|n| n.is_multiple_of(features))?;
    *inputs = *inputs / features * bytes;
    Some(packed)
}

/// The shape of a weight, of elements of this format, that lies in a file as `found`.
pub(super) fn of_file(found: &Shape, format: TensorFormat) -> Option<Shape> {
    let mut shape = found.with_dtype(format.element);
    if let Some((features, bytes)) = shared_bytes(format) {
        let stored = shape.dims.get_mut(1).filter(|n| n.is_multiple_of(bytes))?;
        *stored = *stored / bytes * features;
    }
    Some(shape)
}

/// Positions of a convolution's kernel: elements of each input feature.
fn positions(shape: &Shape) -> usize {
    shape.dims.iter().skip(2).product()
}

/// Elements in the order of a file, of those in the order of a tensor: elements that share bytes do so with other features.
pub(super) fn to_file_order(tensor: &HostTensor, format: TensorFormat) -> Cow<'_, [u8]> {
    let positions = positions(&tensor.shape);
    let together = features_together(format);
    let pack = |codes: &[u8]| match format.float6() {
        Some(_) => float6::packed(codes),
        None => packed(codes),
    };
    let codes = match (format.float6(), positions) {
        (_, _) if together == 1 => return Cow::Borrowed(&tensor.data),
        (None, 1) => return Cow::Borrowed(&tensor.data),
        (None, _) => tensor.whole_bytes().into_owned(),
        (Some(float6), _) => {
            let values = tensor.data.par_iter();
            values
                .map(|code| float6.encode(float8::decode(*code)))
                .collect()
        }
    };
    if positions == 1 {
        return Cow::Owned(pack(&codes));
    }
    let mut ordered = vec![0; codes.len()];
    let parts = ordered.par_chunks_mut(together * positions);
    parts
        .zip(codes.par_chunks(together * positions))
        .for_each(|(out, features)| {
            for (at, out) in out.chunks_mut(together).enumerate() {
                for (feature, out) in out.iter_mut().enumerate() {
                    *out = features[feature * positions + at];
                }
            }
        });
    Cow::Owned(pack(&ordered))
}

/// The other way round: the bytes of a file as the elements of a tensor of this shape, which share bytes there.
pub(super) fn of_file_order(shape: Shape, data: Vec<u8>, of: SharedBytes) -> HostTensor {
    let positions = positions(&shape);
    let together = match of {
        SharedBytes::Halves => 2,
        SharedBytes::Float6(_) => 4,
    };
    let codes = match of {
        SharedBytes::Halves if positions == 1 => return HostTensor { shape, data },
        SharedBytes::Halves => {
            let pairs = HostTensor {
                shape: shape.clone(),
                data,
            };
            pairs.whole_bytes().into_owned()
        }
        SharedBytes::Float6(_) => float6::unpacked(&data),
    };
    let mut bytes = match positions {
        1 => codes,
        positions => {
            let mut bytes = vec![0; codes.len()];
            let parts = bytes.par_chunks_mut(together * positions);
            parts
                .zip(codes.par_chunks(together * positions))
                .for_each(|(out, features)| {
                    for (at, features) in features.chunks(together).enumerate() {
                        for (feature, code) in features.iter().enumerate() {
                            out[feature * positions + at] = *code;
                        }
                    }
                });
            bytes
        }
    };
    if let SharedBytes::Float6(float6) = of {
        let of_code: Vec<u8> = (0..64)
            .map(|code| float8::encode(float6.decode(code)))
            .collect();
        bytes
            .par_iter_mut()
            .for_each(|byte| *byte = of_code[usize::from(*byte)]);
        return HostTensor { shape, data: bytes };
    }
    HostTensor {
        data: packed(&bytes),
        shape,
    }
}

/// Which elements share bytes in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SharedBytes {
    /// Two of 4 bits.
    Halves,
    /// Four floats of 6 bits in three bytes; a program has them in fp8.
    Float6(Float6),
}

impl SharedBytes {
    /// Those of a format, if any share bytes.
    pub fn of(format: TensorFormat) -> Option<SharedBytes> {
        match (format.float6(), format.element.bits()) {
            (Some(float6), _) => Some(SharedBytes::Float6(float6)),
            (None, 4) => Some(SharedBytes::Halves),
            (None, _) => None,
        }
    }

    /// The bytes of a file that hold the elements of a tensor of this shape.
    pub fn bytes(self, shape: &Shape) -> usize {
        match self {
            SharedBytes::Halves => shape.bytes(),
            SharedBytes::Float6(_) => shape.count() / 4 * 3,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Granularity, NumericsConvention};

    fn format(element: DType, convention: NumericsConvention) -> TensorFormat {
        TensorFormat {
            element,
            granularity: Granularity::Group(2),
            ..TensorFormat::int8(convention)
        }
    }

    #[test]
    fn input_features_share_bytes_at_each_position_of_a_kernel() {
        let int4 = format(DType::S4, NumericsConvention::Aqt);
        let shape = Shape::new(DType::S4, [1, 2, 1, 3]);
        let tensor =
            HostTensor::from_f64(shape.clone(), &[1.0, 2.0, 3.0, -1.0, -2.0, -3.0]).unwrap();
        let file = to_file_order(&tensor, int4).into_owned();
        assert_eq!(file, [0xf1, 0xe2, 0xd3]);
        let of_file_again = of_file_order(shape.clone(), file, SharedBytes::Halves);
        assert_eq!(of_file_again, tensor);
        let in_bytes = Shape::new(DType::U8, [1, 1, 1, 3]);
        assert_eq!(in_file(&shape, int4), Some(in_bytes.clone()));
        assert_eq!(of_file(&in_bytes, int4), Some(shape));
        assert_eq!(in_file(&Shape::new(DType::S4, [2, 3]), int4), None);
    }

    #[test]
    fn four_features_of_six_bits_share_three_bytes() {
        let e2m3 = format(DType::F8E4M3Fn, NumericsConvention::MxE2M3);
        let shared = SharedBytes::of(e2m3).unwrap();
        let shape = Shape::new(DType::F8E4M3Fn, [1, 4, 2]);
        // Features 0 to 3 at the first position, then at the second.
        let values = [[0.125, -7.5], [1.0, 2.0], [0.0, 0.5], [7.5, -1.0]];
        let data = values.as_flattened().iter().map(|x| float8::encode(*x));
        let tensor = HostTensor {
            shape: shape.clone(),
            data: data.collect(),
        };
        let file = to_file_order(&tensor, e2m3).into_owned();
        let codes = [0x01, 0x08, 0x00, 0x1f, 0x3f, 0x10, 0x04, 0x28];
        assert_eq!(float6::unpacked(&file), codes);
        assert_eq!(file.len(), shared.bytes(&shape));
        assert_eq!(of_file_order(shape.clone(), file, shared), tensor);
        let in_bytes = Shape::new(DType::U8, [1, 3, 2]);
        assert_eq!(in_file(&shape, e2m3), Some(in_bytes.clone()));
        assert_eq!(of_file(&in_bytes, e2m3), Some(shape));
    }
}
