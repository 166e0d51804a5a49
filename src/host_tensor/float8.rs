//! Floats of 8 bits. Most here is of `f8E4M3FN`: a sign, 4 bits of exponent, 3 of mantissa, no infinities; 0x7f and 0xff are NaN.

use half::f16;

/// The largest number.
pub const LARGEST: f32 = 448.0;
/// The largest number of `f8E5M2`.
pub const LARGEST_E5M2: f32 = 57344.0;

/// How a float of 8 bits is made of one of 32.
struct Kind {
    /// The bits of the smallest number that is not subnormal.
    smallest_normal: u32,
    /// Numbers near it are as far apart as those below.
    subnormal_steps: f32,
    /// What the exponents' biases differ by.
    bias: u32,
    /// Bits of the mantissa that go.
    dropped: u32,
    /// The code of all that is larger than the numbers.
    beyond: u32,
}

/// 2^-6, below which numbers are 2^-9 apart; beyond is NaN.
const E4M3FN: Kind = Kind {
    smallest_normal: 0x3c80_0000,
    subnormal_steps: 16384.0,
    bias: 127 - 7,
    dropped: 20,
    beyond: 0x7f,
};

/// 2^-14, below which numbers are 2^-16 apart; beyond is infinity.
const E5M2: Kind = Kind {
    smallest_normal: 0x3880_0000,
    subnormal_steps: 128.0,
    bias: 127 - 15,
    dropped: 21,
    beyond: 0x7c,
};

/// The nearest number, ties to even; NaN from 464 on, as XLA converts.
pub fn encode(x: f32) -> u8 {
    nearest(x, &E4M3FN)
}

/// The nearest number of `f8E5M2`, ties to even; infinity from 61440 on, as XLA converts.
pub fn encode_e5m2(x: f32) -> u8 {
    match x.is_nan() {
        true => (x.to_bits() >> 24) as u8 & 0x80 | 0x7e,
        false => nearest(x, &E5M2),
    }
}

#[inline]
fn nearest(x: f32, kind: &Kind) -> u8 {
    let bits = x.to_bits();
    let sign = (bits >> 24) as u8 & 0x80;
    let magnitude = bits & 0x7fff_ffff;
    let code = if magnitude < kind.smallest_normal {
        (f32::from_bits(magnitude) + kind.subnormal_steps).to_bits()
            - kind.subnormal_steps.to_bits()
    } else {
        let odd = (magnitude >> kind.dropped) & 1;
        let half = (1 << (kind.dropped - 1)) - 1;
        (magnitude - (kind.bias << 23)).saturating_add(half + odd) >> kind.dropped
    };
    sign | code.min(kind.beyond) as u8
}

/// The number of a code.
pub fn decode(code: u8) -> f32 {
    VALUES[usize::from(code)]
}

/// The number of a code of `f8E5M2`, which is the upper half of an `f16`.
pub fn decode_e5m2(code: u8) -> f32 {
    f16::from_bits(u16::from(code) << 8).to_f32()
}

/// The number of a code of `f8E8M0FNU`: a power of two; 0xff is NaN.
pub fn decode_e8m0(code: u8) -> f32 {
    match code {
        // 2^-127 is subnormal.
        0 => f32::from_bits(1 << 22),
        0xff => f32::NAN,
        _ => f32::from_bits(u32::from(code) << 23),
    }
}

const VALUES: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = value(code as u32);
        code += 1;
    }
    values
};

const fn value(code: u32) -> f32 {
    let sign = (code & 0x80) << 24;
    let magnitude = code & 0x7f;
    if magnitude == 0x7f {
        return f32::NAN;
    }
    if magnitude < 8 {
        let value = magnitude as f32 / 512.0;
        return f32::from_bits(value.to_bits() | sign);
    }
    f32::from_bits(sign | ((magnitude << 20) + (120 << 23)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_their_numbers() {
        for code in 0..=255u8 {
            let value = decode(code);
            match code & 0x7f {
                0x7f => assert!(value.is_nan()),
                _ => assert_eq!(encode(value), code, "{value}"),
            }
        }
        assert_eq!(decode(0x7e), LARGEST);
        assert_eq!(
            [decode(1), decode(8), decode(0x38)],
            [1.0 / 512.0, 1.0 / 64.0, 1.0]
        );
    }

    #[test]
    fn codes_of_e5m2_are_their_numbers_and_the_nearest() {
        for code in 0..=0x7c_u8 {
            assert_eq!(encode_e5m2(decode_e5m2(code)), code);
            assert_eq!(encode_e5m2(-decode_e5m2(code)), code | 0x80);
        }
        for code in 0..0x7b_u8 {
            let [low, high] = [decode_e5m2(code), decode_e5m2(code + 1)];
            let middle = (low + high) / 2.0;
            assert_eq!(encode_e5m2(middle), code + (code & 1));
            assert_eq!(encode_e5m2(f32::from_bits(middle.to_bits() - 1)), code);
            assert_eq!(encode_e5m2(f32::from_bits(middle.to_bits() + 1)), code + 1);
        }
        assert_eq!(decode_e5m2(0x7b), LARGEST_E5M2);
        assert_eq!([encode_e5m2(61439.9), encode_e5m2(61440.0)], [0x7b, 0x7c]);
        assert!(decode_e5m2(encode_e5m2(f32::NAN)).is_nan());
    }

    #[test]
    fn what_lies_between_goes_to_the_nearest_or_the_even_one() {
        for code in 0..0x7e_u8 {
            let [low, high] = [decode(code), decode(code + 1)];
            let middle = (low + high) / 2.0;
            let even = code + (code & 1);
            assert_eq!(encode(middle), even);
            assert_eq!(encode(-middle), even | 0x80);
            assert_eq!(encode(f32::from_bits(middle.to_bits() - 1)), code);
            assert_eq!(encode(f32::from_bits(middle.to_bits() + 1)), code + 1);
        }
        assert_eq!(
            [encode(463.9), encode(464.1), encode(f32::INFINITY)],
            [0x7e, 0x7f, 0x7f]
        );
        assert_eq!(encode(f32::NAN) & 0x7f, 0x7f);
    }
}
