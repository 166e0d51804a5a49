//! [`Codes`] as operations, and tensors in blocks.

use crate::dtype::DType;
use crate::graph::blockwise::{BLOCK, Codes, DECADES, scale};
use crate::graph::{Binary, Builder, Comparison, GraphError, Op, PadDim, Reduction, Tensor, Unary};

type Result<T> = std::result::Result<T, GraphError>;

impl Codes {
    /// The floats of `code`, [`in_blocks`], whose blocks have the absolute values `largest` at most.
    pub fn decode(self, b: &Builder, code: Tensor, largest: Tensor) -> Result<Tensor> {
        let code = b.convert(in_filled_blocks(b, code, self.zero())?, DType::F32)?;
        let (number, sign) = match self {
            Codes::Unsigned => (code, None),
            Codes::Signed => {
                let signed = b.add_scalar(code, -self.zero())?;
                (b.abs(signed)?, Some(b.unary(Unary::Sign, signed)?))
            }
        };
        let counted = b.add_scalar(number, f64::from(self.offset()))?;
        let cells = highest_bit(b, counted)?;
        let mut decade = b.full(&b.shape(number), scale(0))?;
        for next in 1..DECADES {
            let begins = b.full(&b.shape(cells), f64::from(self.cells(next)))?;
            let is_in = b.compare(Comparison::Ge, cells, begins)?;
            decade = b.select(is_in, b.full(&b.shape(number), scale(next))?, decade)?;
        }
        let cell = b.add_scalar(b.sub(counted, cells)?, 0.5)?;
        let place = b.add_scalar(b.mul_scalar(b.div(cell, cells)?, 0.9)?, 0.1)?;
        let mut value = b.mul(place, decade)?;
        for (at, special) in [(0.0, 0.0), (f64::from(self.first(DECADES)), 1.0)] {
            let is_it = b.compare(Comparison::Eq, number, b.full(&b.shape(number), at)?)?;
            value = b.select(is_it, b.full(&b.shape(number), special)?, value)?;
        }
        if let Some(sign) = sign {
            value = b.mul(value, sign)?;
        }
        b.mul(value, of_blocks(b, largest)?)
    }

    /// The codes of `x`, which is [`in_blocks`] as they are, and the largest absolute value of each block.
    pub fn encode(self, b: &Builder, x: Tensor) -> Result<(Tensor, Tensor)> {
        let largest = b.reduce(Reduction::Max, b.abs(x)?, &[1])?;
        let zero = b.full(&b.shape(largest), 0.0)?;
        let one = b.full(&b.shape(largest), 1.0)?;
        let is_any = b.compare(Comparison::Gt, largest, zero)?;
        let inverse = b.select(is_any, b.div(one, largest)?, zero)?;
        let x = b.mul(x, of_blocks(b, inverse)?)?;
        let number = self.nearest(b, b.abs(x)?)?;
        let code = match self {
            Codes::Unsigned => number,
            Codes::Signed => {
                // There is no -1.
                let most = b.full(&b.shape(number), 127.0)?;
                let zero = b.full(&b.shape(number), 0.0)?;
                let is_negative = b.compare(Comparison::Lt, x, zero)?;
                let negative = b.neg(b.min(number, most)?)?;
                b.add_scalar(b.select(is_negative, negative, number)?, self.zero())?
            }
        };
        Ok((b.convert(code, DType::U8)?, largest))
    }

    /// The number of the value from 0 to 1 that is nearest to `x`.
    fn nearest(self, b: &Builder, x: Tensor) -> Result<Tensor> {
        let shape = b.shape(x);
        let full = |value: f64| b.full(&shape, value);
        let values = self.magnitudes();
        let middle = |number: i32| (values[number as usize - 1] + values[number as usize]) / 2.0;
        let mut inverse = full(1.0 / scale(0))?;
        let mut cells = full(f64::from(self.cells(0)))?;
        for decade in 1..DECADES {
            let is_in = b.compare(Comparison::Ge, x, full(middle(self.first(decade)))?)?;
            inverse = b.select(is_in, full(1.0 / scale(decade))?, inverse)?;
            cells = b.select(is_in, full(f64::from(self.cells(decade)))?, cells)?;
        }
        // Within a decade the middles between values are the ends of cells.
        let place = b.add_scalar(b.mul(x, inverse)?, -0.1)?;
        let cell = b.mul(b.mul_scalar(place, 1.0 / 0.9)?, cells)?;
        let last = b.add_scalar(cells, -1.0)?;
        let cell = b.max(b.unary(Unary::Floor, cell)?, full(0.0)?)?;
        let cell = b.min(cell, last)?;
        let mut number = b.add_scalar(b.add(cell, cells)?, f64::from(-self.offset()))?;
        let is_zero = b.compare(Comparison::Lt, x, full(middle(1))?)?;
        number = b.select(is_zero, full(0.0)?, number)?;
        let top = self.first(DECADES);
        let is_top = b.compare(Comparison::Ge, x, full(middle(top))?)?;
        b.select(is_top, full(f64::from(top))?, number)
    }
}

/// Of whole numbers from 1 on, the highest power of two that is not above: the float's exponent alone.
fn highest_bit(b: &Builder, x: Tensor) -> Result<Tensor> {
    let bits = b.push(Op::BitcastConvert(DType::U32), &[x])?;
    let exponent = b.full(&b.shape(bits), f64::from(0x7F80_0000_u32))?;
    let kept = b.binary(Binary::And, bits, exponent)?;
    b.push(Op::BitcastConvert(DType::F32), &[kept])
}

/// `x` as `[blocks, BLOCK]`, filled up with zeros. All that is computed of a weight has these dimensions: XLA's CPU backend
/// makes vectors of the last one, which of a convolution's kernel has 3 elements.
pub fn in_blocks(b: &Builder, x: Tensor) -> Result<Tensor> {
    in_filled_blocks(b, x, 0.0)
}

fn in_filled_blocks(b: &Builder, x: Tensor, value: f64) -> Result<Tensor> {
    let count = b.shape(x).count();
    let blocks = count.div_ceil(BLOCK);
    let mut flat = b.reshape(x, &[count])?;
    if blocks * BLOCK > count {
        let fill = PadDim {
            low: 0,
            high: (blocks * BLOCK - count) as i64,
            interior: 0,
        };
        flat = b.pad(flat, value, &[fill])?;
    }
    b.reshape(flat, &[blocks, BLOCK])
}

/// What is [`in_blocks`], or has dimensions `dims` already, as a tensor of these.
pub fn from_blocks(b: &Builder, x: Tensor, dims: &[usize]) -> Result<Tensor> {
    if b.dims(x) == dims {
        return Ok(x);
    }
    let count: usize = dims.iter().product();
    let padded = b.shape(x).count();
    let mut flat = b.reshape(x, &[padded])?;
    if padded > count {
        flat = b.slice_dim(flat, 0, 0, count)?;
    }
    b.reshape(flat, dims)
}

/// The value of each block, for all of its elements.
fn of_blocks(b: &Builder, values: Tensor) -> Result<Tensor> {
    let blocks = b.dims(values)[0];
    b.broadcast_in_dim(values, &[0], &[blocks, BLOCK])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::evaluate;
    use crate::host_tensor::HostTensor;
    use crate::shape::Shape;

    /// The codes of `values` and the largest of each block; and the floats of these codes.
    fn there_and_back(codes: Codes, values: &[f32]) -> [Vec<f64>; 3] {
        let b = Builder::new();
        let shape = Shape::new(DType::F32, [values.len()]);
        let x = b.input("x", shape, &[]).unwrap();
        let blocks = in_blocks(&b, x).unwrap();
        let (code, largest) = codes.encode(&b, blocks).unwrap();
        let decoded = codes.decode(&b, code, largest).unwrap();
        let [code, decoded] = [code, decoded].map(|x| from_blocks(&b, x, &[values.len()]).unwrap());
        for (name, tensor) in [("code", code), ("largest", largest), ("decoded", decoded)] {
            b.output(name, tensor, None).unwrap();
        }
        let x = HostTensor::from_f32([values.len()], values).unwrap();
        let results = evaluate(&b.finish(), &[x]).unwrap();
        [0, 1, 2].map(|i: usize| results[i].to_f64_vec().unwrap())
    }

    fn book(codes: Codes) -> Vec<f64> {
        let values = codes.magnitudes();
        match codes {
            Codes::Unsigned => values,
            Codes::Signed => {
                let negative = values[1..128].iter().rev().map(|v| -v);
                negative.chain(values.iter().copied()).collect()
            }
        }
    }

    #[test]
    fn every_code_is_the_nearest_value_and_decodes_to_it() {
        for codes in [Codes::Signed, Codes::Unsigned] {
            let book = book(codes);
            assert_eq!(book.len(), 256);
            assert!(book.is_sorted());
            // Every value itself, what lies close to both sides of every middle, and powers; the first block's largest is 1.
            let mut values: Vec<f32> = vec![1.0];
            for pair in book.windows(2) {
                values.push(pair[0] as f32);
                let middle = (pair[0] + pair[1]) / 2.0;
                let near = (pair[1] - pair[0]) * 1e-3;
                values.extend([(middle - near) as f32, (middle + near) as f32]);
            }
            let mut padded = Vec::new();
            for block in values.chunks(BLOCK - 1) {
                padded.push(1.0);
                padded.extend(block);
            }
            let [code, largest, decoded] = there_and_back(codes, &padded);
            assert!(largest.iter().all(|l| *l == 1.0));
            for ((value, code), decoded) in padded.iter().zip(code).zip(decoded) {
                let distance = |at: usize| (book[at] - f64::from(*value)).abs();
                let best = (0..256).min_by(|a, b| distance(*a).total_cmp(&distance(*b)));
                assert_eq!(Some(code as usize), best, "{value}");
                let error = (decoded - book[code as usize]).abs();
                assert!(error <= 2.5e-7 * decoded.abs(), "{decoded} {value}");
            }
        }
    }

    #[test]
    fn blocks_have_their_own_largest_values_and_zeros_stay() {
        let mut values = vec![0.0; 2 * BLOCK + 10];
        values[3] = -4.0;
        values[2 * BLOCK + 1] = 0.5;
        let [code, largest, decoded] = there_and_back(Codes::Signed, &values);
        assert_eq!(largest, [4.0, 0.0, 0.5]);
        assert_eq!((code[0], code[3], code[2 * BLOCK + 1]), (127.0, 0.0, 255.0));
        let nonzero = decoded.iter().filter(|v| **v != 0.0).count();
        assert_eq!((nonzero, decoded[2 * BLOCK + 1]), (2, 0.5));
        assert!((decoded[3] + 4.0 * (1.0 - 0.45 / 64.0)).abs() < 1e-6);
    }
}
