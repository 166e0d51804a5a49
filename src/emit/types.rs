//! The text of tensor types and literals.

use std::collections::HashMap;
use std::fmt::Write;
use std::rc::Rc;

use crate::dtype::DType;
use crate::host_tensor::HostTensor;
use crate::shape::Shape;

/// Remembers the text of each shape: a model has thousands of values and few shapes.
#[derive(Default)]
pub struct TypeText {
    texts: HashMap<Shape, Rc<str>>,
}

impl TypeText {
    pub fn of(&mut self, shape: &Shape) -> Rc<str> {
        if let Some(text) = self.texts.get(shape) {
            return Rc::clone(text);
        }
        let text: Rc<str> = shape.stablehlo().into();
        self.texts.insert(shape.clone(), Rc::clone(&text));
        text
    }
}

/// The elements of a constant inside `dense<..>`: a splat where all are equal, else raw bytes in hex.
pub fn dense(value: &HostTensor) -> String {
    let bytes = value.shape.dtype.bits() / 8;
    if bytes > 0 && !value.data.is_empty() {
        let first = &value.data[..bytes];
        if value.data.chunks_exact(bytes).all(|c| c == first)
            && let Some(text) = scalar(value.shape.dtype, first)
        {
            return text;
        }
    }
    // MLIR packs i1 elements eight to a byte in raw form; elements are listed instead.
    if value.shape.dtype == DType::Pred {
        return nested(&value.shape.dims, &value.data);
    }
    let mut text = String::with_capacity(value.data.len() * 2 + 4);
    text.push_str("\"0x");
    for byte in &value.data {
        let _ = write!(text, "{byte:02X}");
    }
    text.push('"');
    text
}

fn nested(dims: &[usize], data: &[u8]) -> String {
    match dims {
        [] => (data[0] != 0).to_string(),
        [size, rest @ ..] => {
            let each = data.len() / size;
            let parts: Vec<String> = data.chunks(each).map(|c| nested(rest, c)).collect();
            format!("[{}]", parts.join(", "))
        }
    }
}

/// One element as an MLIR literal, from its little-endian bytes; `None` for types without one here.
fn scalar(dtype: DType, bytes: &[u8]) -> Option<String> {
    let one = HostTensor {
        shape: Shape::scalar(dtype),
        data: bytes.to_vec(),
    };
    if dtype == DType::Pred {
        return Some((bytes[0] != 0).to_string());
    }
    if dtype.is_int() {
        let mut wide = [if dtype.is_signed_int() && bytes.last()? & 0x80 != 0 {
            0xFF
        } else {
            0
        }; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        return Some(if dtype.is_signed_int() {
            i64::from_le_bytes(wide).to_string()
        } else {
            u64::from_le_bytes(wide).to_string()
        });
    }
    let value = one.to_f64_vec().ok()?[0];
    if !value.is_finite() {
        let mut text = String::from("0x");
        for byte in bytes.iter().rev() {
            let _ = write!(text, "{byte:02X}");
        }
        return Some(text);
    }
    // The shortest text that reads back as this value; f16 and bf16 values are exact in f32.
    let text = if dtype == DType::F64 {
        format!("{value:?}")
    } else {
        format!("{:?}", value as f32)
    };
    // MLIR wants a decimal point before an exponent.
    Some(match text.split_once('e') {
        Some((mantissa, exponent)) if !mantissa.contains('.') => format!("{mantissa}.0e{exponent}"),
        _ => text,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_read_back_exactly() {
        let text = |dtype, v| dense(&HostTensor::from_f64(Shape::scalar(dtype), &[v]).unwrap());
        assert_eq!(text(DType::F32, 1e-5), "1.0e-5");
        assert_eq!(text(DType::F32, 1.5), "1.5");
        assert_eq!(text(DType::F32, f64::NEG_INFINITY), "0xFF800000");
        assert_eq!(text(DType::BF16, f64::NEG_INFINITY), "0xFF80");
        assert_eq!(text(DType::S8, -127.0), "-127");
        assert_eq!(text(DType::U32, 4294967295.0), "4294967295");
        let list = HostTensor::from_i32([2], &[1, -2]).unwrap();
        assert_eq!(dense(&list), "\"0x01000000FEFFFFFF\"");
        let splat = HostTensor::from_f32([2, 2], &[0.5; 4]).unwrap();
        assert_eq!(dense(&splat), "0.5");
    }
}
