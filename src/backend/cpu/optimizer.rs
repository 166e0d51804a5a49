//! A step of AdamW with moments in 8 bits, in one pass over the weight (`plugin/optimizer.inc`).

use crate::dtype::DType;
use crate::graph::blockwise::{BLOCK, BlockwiseAdamW, Codes};
use crate::graph::eval::{Data, Value};
use crate::graph::random::rounding_bits_at;
use crate::graph::{Attribute, InferError, constraint};
use crate::shape::Shape;

const RESULTS: usize = BlockwiseAdamW::RESULTS;

/// Operands and results are those of [`Composite::BlockwiseAdamW`](crate::graph::Composite::BlockwiseAdamW), results in the memory
/// of their operands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW8bit(pub BlockwiseAdamW);

impl AdamW8bit {
    pub(super) fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        let step = self.0;
        let float = |name, value: f64| (name, Attribute::F32(value as f32));
        let mut attributes = vec![
            float("keep_first", step.b1),
            float("add_first", 1.0 - step.b1),
            float("keep_second", step.b2),
            float("add_second", 1.0 - step.b2),
            float("epsilon", step.eps),
            float("weight_decay", step.weight_decay),
        ];
        if let Some(stream) = step.rounding {
            attributes.push(("salt", Attribute::I64(i64::from(stream.salt()))));
        }
        attributes
    }

    /// Whether the kernel takes a weight: positions of its elements are words.
    pub(in crate::backend::cpu) fn takes(weight: &Shape, gradient: &Shape) -> bool {
        let float = |x: &Shape| matches!(x.dtype, DType::F32 | DType::BF16);
        float(weight) && float(gradient) && weight.count() <= u32::MAX as usize
    }

    pub(super) fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let expected = self.0.operands();
        if operands.len() != expected {
            return Err(InferError::OperandCount {
                expected,
                found: operands.len(),
            });
        }
        let [weight, gradient] = [operands[0], operands[RESULTS]];
        match Self::takes(weight, gradient) && BlockwiseAdamW::fits(operands) {
            true => Ok(weight.clone()),
            false => Err(constraint(
                "adamw_8bit kernel",
                format!(
                    "weight {weight} and gradient {gradient} with what follows them do not fit"
                ),
            )),
        }
    }

    /// All results; each operation rounded to `f32`. Codes are looked up, as bitsandbytes does; the composite's body computes them,
    /// so where a moment lies in the middle between two values it may find the other one.
    pub(super) fn evaluate(&self, operands: &[&Value]) -> Vec<Value> {
        let mut results: Vec<Value> = operands[..RESULTS].iter().map(|x| (*x).clone()).collect();
        let scalars: [f32; BlockwiseAdamW::SCALARS] =
            std::array::from_fn(|i| operands[RESULTS + 1].float(i) as f32);
        if scalars[4] == 0.0 {
            return results;
        }
        let count = operands[0].shape.count();
        let factor = scalars[0];
        let gradient = (0..count).map(|i| operands[RESULTS].float(i) as f32 * factor);
        let gradient: Vec<f32> = gradient.collect();
        let squares: Vec<f32> = gradient.iter().map(|g| g * g).collect();
        let [first, second] = BlockwiseAdamW::CODES.map(Book::of);
        let m = first.moment(operands, &mut results, 1, &gradient, self.0.b1);
        let v = second.moment(operands, &mut results, 3, &squares, self.0.b2);
        self.weight(operands, &mut results[0], scalars, [&m, &v]);
        results
    }

    fn weight(
        &self,
        operands: &[&Value],
        result: &mut Value,
        [_, rate, first, second, _]: [f32; BlockwiseAdamW::SCALARS],
        [m, v]: [&[f32]; 2],
    ) {
        let step = self.0;
        let key = operands.get(RESULTS + 2);
        let key = key.map(|key| [0, 1].map(|word| key.int(word) as u32));
        for (i, (m, v)) in m.iter().zip(v).enumerate() {
            let weight = operands[0].float(i) as f32;
            let change = (m / first) / ((v / second).sqrt() + step.eps as f32);
            let decayed = change + weight * step.weight_decay as f32;
            let mut new = weight - decayed * rate;
            if let (Some(key), Some(stream)) = (key, step.rounding) {
                let bits = rounding_bits_at(key, stream, i as u32) >> 16;
                new = f32::from_bits(new.to_bits().wrapping_add(bits) & 0xFFFF_0000);
            }
            set(result, i, f64::from(new));
        }
    }
}

fn set(of: &mut Value, place: usize, value: f64) {
    match &mut of.data {
        Data::F(values) => values[place] = value,
        Data::I(values) => values[place] = value as i64,
    }
}

/// A code book as tables.
struct Book {
    codes: Codes,
    /// The values from 0 to 1 in order.
    values: Vec<f32>,
    /// Where the nearest value changes from each to the next.
    middles: Vec<f32>,
}

impl Book {
    fn of(codes: Codes) -> Book {
        let values = codes.magnitudes();
        let middles = values
            .windows(2)
            .map(|pair| ((pair[0] + pair[1]) / 2.0) as f32);
        Book {
            codes,
            middles: middles.collect(),
            values: values.iter().map(|value| *value as f32).collect(),
        }
    }

    /// A moment after the step, which adds `(1 - decay) added` to it. Its codes are operand and result `at`, the largest of their
    /// blocks those after it.
    fn moment(
        &self,
        operands: &[&Value],
        results: &mut [Value],
        at: usize,
        added: &[f32],
        decay: f64,
    ) -> Vec<f32> {
        let mut moments = Vec::with_capacity(added.len());
        for (block, added) in added.chunks(BLOCK).enumerate() {
            let old_largest = operands[at + 1].float(block) as f32;
            let new = added.iter().enumerate().map(|(i, added)| {
                let old = self.value(operands[at].int(block * BLOCK + i)) * old_largest;
                old * decay as f32 + added * (1.0 - decay) as f32
            });
            let new: Vec<f32> = new.collect();
            let largest = new.iter().fold(0f32, |largest, x| largest.max(x.abs()));
            let inverse = if largest > 0.0 { 1.0 / largest } else { 0.0 };
            for (i, x) in new.iter().enumerate() {
                set(&mut results[at], block * BLOCK + i, self.code(x * inverse));
            }
            set(&mut results[at + 1], block, f64::from(largest));
            moments.extend(new);
        }
        moments
    }

    /// What `code` stands for in a block whose largest absolute value is 1.
    fn value(&self, code: i64) -> f32 {
        let number = code - self.codes.zero() as i64;
        let value = self.values[number.unsigned_abs() as usize];
        if number < 0 { -value } else { value }
    }

    /// The code of what is nearest to `x`, -1 to 1.
    fn code(&self, x: f32) -> f64 {
        let number = self.middles.partition_point(|middle| *middle <= x.abs()) as f64;
        let signed = if x < 0.0 { -number.min(127.0) } else { number };
        signed + self.codes.zero()
    }
}
