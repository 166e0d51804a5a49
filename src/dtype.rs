//! Element types of tensors.

use std::fmt;

/// The element type of a tensor, with StableHLO's set and names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    Pred,
    S4,
    S8,
    S16,
    S32,
    S64,
    U4,
    U8,
    U16,
    U32,
    U64,
    F4E2M1Fn,
    F8E4M3Fn,
    F8E5M2,
    F8E8M0Fnu,
    F16,
    BF16,
    F32,
    F64,
}

impl DType {
    /// The type's width in bits. `Pred` is stored in a whole byte on host and device.
    pub fn bits(self) -> usize {
        match self {
            DType::S4 | DType::U4 | DType::F4E2M1Fn => 4,
            DType::Pred
            | DType::S8
            | DType::U8
            | DType::F8E4M3Fn
            | DType::F8E5M2
            | DType::F8E8M0Fnu => 8,
            DType::S16 | DType::U16 | DType::F16 | DType::BF16 => 16,
            DType::S32 | DType::U32 | DType::F32 => 32,
            DType::S64 | DType::U64 | DType::F64 => 64,
        }
    }

    /// Bytes that `count` elements occupy when stored densely, 4-bit elements two to a byte.
    pub fn storage_bytes(self, count: usize) -> usize {
        (count * self.bits()).div_ceil(8)
    }

    pub fn is_float(self) -> bool {
        matches!(
            self,
            DType::F4E2M1Fn
                | DType::F8E4M3Fn
                | DType::F8E5M2
                | DType::F8E8M0Fnu
                | DType::F16
                | DType::BF16
                | DType::F32
                | DType::F64
        )
    }

    pub fn is_signed_int(self) -> bool {
        matches!(
            self,
            DType::S4 | DType::S8 | DType::S16 | DType::S32 | DType::S64
        )
    }

    pub fn is_unsigned_int(self) -> bool {
        matches!(
            self,
            DType::U4 | DType::U8 | DType::U16 | DType::U32 | DType::U64
        )
    }

    pub fn is_int(self) -> bool {
        self.is_signed_int() || self.is_unsigned_int()
    }

    /// The lowest and the highest value of an integer type.
    pub fn integer_range(self) -> (f64, f64) {
        let values = 2f64.powi(self.bits() as i32);
        match self.is_signed_int() {
            true => (-values / 2.0, values / 2.0 - 1.0),
            false => (0.0, values - 1.0),
        }
    }

    /// The name in StableHLO text, e.g. `f32`, `i8`, `ui32`, `i1`, `f8E4M3FN`.
    pub fn stablehlo(self) -> &'static str {
        match self {
            DType::Pred => "i1",
            DType::S4 => "i4",
            DType::S8 => "i8",
            DType::S16 => "i16",
            DType::S32 => "i32",
            DType::S64 => "i64",
            DType::U4 => "ui4",
            DType::U8 => "ui8",
            DType::U16 => "ui16",
            DType::U32 => "ui32",
            DType::U64 => "ui64",
            DType::F4E2M1Fn => "f4E2M1FN",
            DType::F8E4M3Fn => "f8E4M3FN",
            DType::F8E5M2 => "f8E5M2",
            DType::F8E8M0Fnu => "f8E8M0FNU",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F32 => "f32",
            DType::F64 => "f64",
        }
    }
}

/// HLO's short names (`s8`, `pred`, `f8e4m3fn`), as reports and users of XLA know them.
impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::Pred => "pred",
            DType::S4 => "s4",
            DType::S8 => "s8",
            DType::S16 => "s16",
            DType::S32 => "s32",
            DType::S64 => "s64",
            DType::U4 => "u4",
            DType::U8 => "u8",
            DType::U16 => "u16",
            DType::U32 => "u32",
            DType::U64 => "u64",
            DType::F4E2M1Fn => "f4e2m1fn",
            DType::F8E4M3Fn => "f8e4m3fn",
            DType::F8E5M2 => "f8e5m2",
            DType::F8E8M0Fnu => "f8e8m0fnu",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F32 => "f32",
            DType::F64 => "f64",
        })
    }
}
