//! Floats of 6 bits: OCP's `f6E2M3FN` and `f6E3M2FN` (OCP Microscaling Formats 1.0, section 5.3.2), which have no infinities and no
//! NaN. Codes in files are a sign, the exponent and the mantissa; four lie in three bytes, the first in the lowest bits.

/// A format of 6 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Float6 {
    /// Bits of the mantissa; those of the exponent are the rest but the sign.
    mantissa: u32,
    /// What is added to an exponent.
    bias: i32,
}

pub const E2M3: Float6 = Float6 {
    mantissa: 3,
    bias: 1,
};

pub const E3M2: Float6 = Float6 {
    mantissa: 2,
    bias: 3,
};

impl Float6 {
    pub fn mantissa_bits(self) -> u32 {
        self.mantissa
    }

    /// The exponent of the largest number.
    pub fn largest_exponent(self) -> i32 {
        (1 << (5 - self.mantissa)) - 1 - self.bias
    }

    pub fn largest(self) -> f32 {
        self.decode(0x1f)
    }

    /// The code of the nearest number, ties to even; of a number beyond the largest that one. A zero has no sign.
    pub fn encode(self, x: f32) -> u8 {
        let x = x.clamp(-self.largest(), self.largest());
        let magnitude = x.abs();
        // Below 2^(1 - bias) numbers are as far apart as there.
        let exponent = (magnitude.to_bits() >> 23) as i32 - 127;
        let exponent = exponent.max(1 - self.bias);
        let step = 2f32.powi(exponent - self.mantissa as i32);
        let steps = (magnitude / step).round_ties_even() as u32;
        // A mantissa that overflows is the next exponent's.
        let below = ((exponent + self.bias - 1) as u32) << self.mantissa;
        let code = (steps + below) as u8;
        match code {
            0 => 0,
            code => code | u8::from(x < 0.0) << 5,
        }
    }

    /// The number of a code, of which the lowest 6 bits count.
    pub fn decode(self, code: u8) -> f32 {
        let magnitude = u32::from(code & 0x1f);
        let mantissa = magnitude & ((1 << self.mantissa) - 1);
        let field = (magnitude >> self.mantissa) as i32;
        let hidden = u32::from(field > 0) << self.mantissa;
        let exponent = field.max(1) - self.bias - self.mantissa as i32;
        let value = (mantissa + hidden) as f32 * 2f32.powi(exponent);
        if code & 0x20 == 0 { value } else { -value }
    }
}

/// Codes of which each has a byte, four in three bytes; `codes.len()` is a multiple of 4.
pub fn packed(codes: &[u8]) -> Vec<u8> {
    let fours = codes.as_chunks::<4>().0.iter();
    let word = |four: &[u8; 4]| {
        let code = |at: usize| u32::from(four[at] & 0x3f) << (6 * at);
        code(0) | code(1) | code(2) | code(3)
    };
    fours
        .flat_map(|four| {
            let [a, b, c, _] = word(four).to_le_bytes();
            [a, b, c]
        })
        .collect()
}

/// The other way round.
pub fn unpacked(bytes: &[u8]) -> Vec<u8> {
    let threes = bytes.as_chunks::<3>().0.iter();
    threes
        .flat_map(|&[a, b, c]| {
            let word = u32::from_le_bytes([a, b, c, 0]);
            [0, 6, 12, 18].map(|at| (word >> at) as u8 & 0x3f)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host_tensor::float8;

    #[test]
    fn codes_are_their_numbers_which_fp8_holds() {
        for (format, largest, smallest) in [(E2M3, 7.5, 0.125), (E3M2, 28.0, 0.0625)] {
            assert_eq!((format.largest(), format.decode(1)), (largest, smallest));
            let mut last = -1.0;
            for code in 0..32 {
                let value = format.decode(code);
                assert!(value > last, "{code}: {value}");
                last = value;
                assert_eq!(format.encode(value), code);
                assert_eq!(float8::decode(float8::encode(value)), value);
                if code > 0 {
                    assert_eq!(format.encode(-value), code | 0x20);
                    assert_eq!(format.decode(code | 0x20), -value);
                }
            }
            assert_eq!(format.encode(1e9), 0x1f);
        }
    }

    #[test]
    fn four_codes_share_three_bytes() {
        let codes: Vec<u8> = (0..64).collect();
        let bytes = packed(&codes);
        assert_eq!(bytes.len(), 48);
        assert_eq!(bytes[..3], [0b0100_0000, 0b0010_0000, 0b0000_1100]);
        assert_eq!(unpacked(&bytes), codes);
    }
}
