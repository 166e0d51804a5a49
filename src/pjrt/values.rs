//! Plain values of the interface: named options and attributes, element types, and properties of devices and
//! programs.

use std::collections::BTreeMap;
use std::fmt;

use super::error::PjrtError;

/// A value of an option or an attribute.
#[derive(Clone, Debug, PartialEq)]
pub enum NamedValue {
    String(String),
    Int64(i64),
    Int64List(Vec<i64>),
    Float(f32),
    Bool(bool),
}

impl From<&str> for NamedValue {
    fn from(value: &str) -> Self {
        Self::String(value.to_string())
    }
}

impl From<i64> for NamedValue {
    fn from(value: i64) -> Self {
        Self::Int64(value)
    }
}

impl From<Vec<i64>> for NamedValue {
    fn from(value: Vec<i64>) -> Self {
        Self::Int64List(value)
    }
}

impl From<f32> for NamedValue {
    fn from(value: f32) -> Self {
        Self::Float(value)
    }
}

impl From<bool> for NamedValue {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

impl fmt::Display for NamedValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::String(value) => f.write_str(value),
            Self::Int64(value) => value.fmt(f),
            Self::Int64List(value) => fmt::Debug::fmt(value, f),
            Self::Float(value) => value.fmt(f),
            Self::Bool(value) => value.fmt(f),
        }
    }
}

macro_rules! element_types {
    ($($variant:ident = $code:literal, $name:literal, $bytes:expr;)*) => {
        /// The type of a buffer's elements, with the numbers of `PJRT_Buffer_Type`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(i32)]
        pub enum ElementType {
            $(#[doc = concat!("`", $name, "`")] $variant = $code,)*
        }

        impl ElementType {
            const ALL: &[Self] = &[$(Self::$variant),*];

            /// StableHLO's name of the type.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Bytes of one element in host memory, where types of less than a byte take one;
            /// `None` for a token.
            pub fn host_bytes(self) -> Option<usize> {
                match self { $(Self::$variant => $bytes,)* }
            }
        }
    };
}

element_types! {
    Pred = 1, "i1", Some(1);
    S8 = 2, "i8", Some(1);
    S16 = 3, "i16", Some(2);
    S32 = 4, "i32", Some(4);
    S64 = 5, "i64", Some(8);
    U8 = 6, "ui8", Some(1);
    U16 = 7, "ui16", Some(2);
    U32 = 8, "ui32", Some(4);
    U64 = 9, "ui64", Some(8);
    F16 = 10, "f16", Some(2);
    F32 = 11, "f32", Some(4);
    F64 = 12, "f64", Some(8);
    Bf16 = 13, "bf16", Some(2);
    C64 = 14, "complex<f32>", Some(8);
    C128 = 15, "complex<f64>", Some(16);
    F8E5M2 = 16, "f8E5M2", Some(1);
    F8E4M3Fn = 17, "f8E4M3FN", Some(1);
    F8E4M3B11Fnuz = 18, "f8E4M3B11FNUZ", Some(1);
    F8E5M2Fnuz = 19, "f8E5M2FNUZ", Some(1);
    F8E4M3Fnuz = 20, "f8E4M3FNUZ", Some(1);
    S4 = 21, "i4", Some(1);
    U4 = 22, "ui4", Some(1);
    Token = 23, "token", None;
    S2 = 24, "i2", Some(1);
    U2 = 25, "ui2", Some(1);
    F8E4M3 = 26, "f8E4M3", Some(1);
    F8E3M4 = 27, "f8E3M4", Some(1);
    F8E8M0Fnu = 28, "f8E8M0FNU", Some(1);
    F4E2M1Fn = 29, "f4E2M1FN", Some(1);
}

impl ElementType {
    /// The type with this number in the interface.
    pub(super) fn from_raw(function: &'static str, code: i32) -> Result<Self, PjrtError> {
        Self::ALL
            .iter()
            .copied()
            .find(|element| *element as i32 == code)
            .ok_or_else(|| PjrtError::Protocol {
                function,
                what: format!("unknown element type {code}"),
            })
    }

    /// Bytes of a row-major array of these dimensions in host memory.
    ///
    /// # Errors
    /// A token, a negative dimension, or a size that does not fit memory.
    pub fn host_size(self, dims: &[i64]) -> Result<usize, PjrtError> {
        let element = self.host_bytes().ok_or(PjrtError::NotTransferable {
            element_type: self.name(),
        })?;
        dims.iter()
            .try_fold(element, |size, &dim| {
                size.checked_mul(usize::try_from(dim).ok()?)
            })
            .ok_or_else(|| PjrtError::Dimensions {
                element_type: self.name(),
                dims: dims.to_vec(),
            })
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A plugin's description of a device, whether it is here or not.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceDescription {
    /// Unique among the devices of all processes. On several TPU slices device `i` of slice `s`
    /// has id `100000 * (s + 1) + i`; ids are not in raster order.
    pub id: i64,
    /// The process that can address the device.
    pub process_index: i64,
    /// The device's model, such as `TPU v5 lite`.
    pub kind: String,
    /// All that the plugin tells beside: on TPU `coords`, `core_on_chip`, `num_cores`,
    /// `slice_index`.
    pub attributes: BTreeMap<String, NamedValue>,
}

impl DeviceDescription {
    /// Position of the chip in its slice, where devices have one.
    pub fn coords(&self) -> Option<&[i64]> {
        match self.attributes.get("coords") {
            Some(NamedValue::Int64List(coords)) => Some(coords),
            _ => None,
        }
    }

    /// The generation of an NVIDIA GPU, such as `9.0`.
    pub fn compute_capability(&self) -> Option<&str> {
        match self.attributes.get("compute_capability") {
            Some(NamedValue::String(capability)) => Some(capability),
            _ => None,
        }
    }

    /// The slice the device is in, counted from 0, where there are slices.
    pub fn slice_index(&self) -> Option<i64> {
        match self.attributes.get("slice_index") {
            Some(NamedValue::Int64(index)) => Some(*index),
            _ => None,
        }
    }
}

/// Memory of a device, in bytes. What a plugin does not count is `None`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemoryStats {
    pub bytes_in_use: i64,
    pub peak_bytes_in_use: Option<i64>,
    pub largest_alloc_size: Option<i64>,
    pub bytes_limit: Option<i64>,
}

/// The memory a compiled program takes on each device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompiledMemoryStats {
    pub generated_code: i64,
    pub argument: i64,
    pub output: i64,
    /// Bytes of the output that share memory with donated arguments.
    pub alias: i64,
    pub temp: i64,
    pub host_generated_code: i64,
    pub host_argument: i64,
    pub host_output: i64,
    pub host_alias: i64,
    pub host_temp: i64,
    /// The most in use at one time; plugins before API 0.72 do not report it.
    pub peak: Option<i64>,
    /// All allocations together; plugins before API 0.90 do not report it.
    pub total: Option<i64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_interface_without_gaps() {
        for (index, element) in ElementType::ALL.iter().enumerate() {
            assert_eq!(*element as i32, index as i32 + 1, "{element}");
            assert_eq!(
                ElementType::from_raw("test", *element as i32).unwrap(),
                *element
            );
        }
        assert!(ElementType::from_raw("test", 0).is_err());
        assert!(ElementType::from_raw("test", 30).is_err());
    }

    #[test]
    fn host_sizes() {
        assert_eq!(ElementType::F32.host_size(&[2, 3]).unwrap(), 24);
        assert_eq!(ElementType::Bf16.host_size(&[]).unwrap(), 2);
        assert_eq!(ElementType::S4.host_size(&[5]).unwrap(), 5);
        assert_eq!(ElementType::F32.host_size(&[7, 0]).unwrap(), 0);
        assert!(ElementType::F32.host_size(&[-1]).is_err());
        assert!(ElementType::F32.host_size(&[i64::MAX, 2]).is_err());
        assert!(ElementType::Token.host_size(&[]).is_err());
    }
}
