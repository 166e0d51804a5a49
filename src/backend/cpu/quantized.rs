//! Products of `f32` operands that are rounded to int8 in the same call (`plugin/quantized.inc`).

use half::bf16;

use crate::dtype::DType;
use crate::graph::eval::{Data, Value};
use crate::graph::random::rounding_noise_at;
use crate::graph::{Attribute, InferError, RoundingStream, constraint};
use crate::shape::Shape;

use super::window::Window;

/// Multiply-adds of int8 products that cannot overflow 32 bits, whatever the values: 255 * 128 * 65,000 < 2^31.
pub(super) const MOST_INT8_TERMS: usize = 65_000;

/// Attributes of [`super::kernel::Kernel::QuantizedProduct`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuantizedProduct {
    pub form: Form,
    /// Whether noise rounds the lhs; it is rounded to nearest without.
    pub noise: bool,
    pub bias: bool,
    /// Whether the operands are values of `bf16`: scales and each step of rounding are rounded to `bf16` then.
    pub in_bf16: bool,
}

/// How the operands lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Form {
    /// The lhs is `[rows, k]`, the rhs `[columns, k]`; each the other way round where it is transposed.
    Matrix {
        lhs_transposed: bool,
        rhs_transposed: bool,
    },
    /// The lhs is `[batch, height, width, channels]`, the rhs `[columns, height, width, channels]`.
    Convolution(Window),
}

/// One operand: lines that have a range of their own, and where their values are.
struct Lines<'a> {
    values: &'a Value,
    count: usize,
    size: usize,
    transposed: bool,
}

impl Lines<'_> {
    fn place(&self, line: usize, i: usize) -> usize {
        match self.transposed {
            true => i * self.count + line,
            false => line * self.size + i,
        }
    }

    /// The scale of each line, and the rounded values, in the operand's own order; each operation rounded to `f32` or `bf16`.
    fn rounded(&self, in_bf16: bool, noise: &dyn Fn(usize) -> f32) -> (Vec<f32>, Vec<f32>) {
        let step = |x: f32| match in_bf16 {
            true => bf16::from_f32(x).to_f32(),
            false => x,
        };
        let mut scales = Vec::with_capacity(self.count);
        let mut rounded = vec![0.0; self.values.shape.count()];
        let value = |place| self.values.float(place) as f32;
        for line in 0..self.count {
            let places = || (0..self.size).map(|i| self.place(line, i));
            let largest = places().fold(0f32, |largest, place| {
                let x = value(place).abs();
                if largest.is_nan() || x.is_nan() {
                    f32::NAN
                } else {
                    largest.max(x)
                }
            });
            let range = if largest == 0.0 { 1.0 } else { largest };
            let scale = step(range * (1.0 / 127.5) as f32);
            let inverse = match step(scale.recip()) {
                f32::INFINITY => 1.0,
                inverse => inverse,
            };
            for place in places() {
                let y = step(step(value(place) * inverse) + noise(place));
                rounded[place] = y.clamp(-127.0, 127.0).round_ties_even();
            }
            scales.push(scale);
        }
        (scales, rounded)
    }
}

impl QuantizedProduct {
    pub(super) fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        let flag = |on: bool| Attribute::I64(i64::from(on));
        let mut attributes = vec![
            ("stochastic", flag(self.noise)),
            ("bias", flag(self.bias)),
            ("in_bf16", flag(self.in_bf16)),
        ];
        match &self.form {
            Form::Matrix {
                lhs_transposed,
                rhs_transposed,
            } => attributes.extend([
                ("lhs_transposed", flag(*lhs_transposed)),
                ("rhs_transposed", flag(*rhs_transposed)),
            ]),
            Form::Convolution(window) => attributes.extend(window.attributes()),
        }
        attributes
    }

    pub(super) fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let expected = 2 + usize::from(self.noise) + usize::from(self.bias);
        if operands.len() != expected {
            return Err(InferError::OperandCount {
                expected,
                found: operands.len(),
            });
        }
        let [lhs, rhs] = [operands[0], operands[1]];
        let wrong = |detail: String| constraint("quantized_product kernel", detail);
        let unfit = || {
            wrong(format!(
                "lhs {lhs} and rhs {rhs} do not fit {:?}",
                self.form
            ))
        };
        let (dims, terms, columns) = match &self.form {
            Form::Matrix {
                lhs_transposed,
                rhs_transposed,
            } => {
                let sizes = |x: &Shape, transposed| match (&x.dims[..], transposed) {
                    (&[lines, k], false) | (&[k, lines], true) => Ok([lines, k]),
                    _ => Err(unfit()),
                };
                let [rows, k] = sizes(lhs, *lhs_transposed)?;
                let [columns, terms] = sizes(rhs, *rhs_transposed)?;
                if k != terms {
                    return Err(unfit());
                }
                (vec![rows, columns], terms, columns)
            }
            Form::Convolution(window) => {
                let (&[batch, height, width, channels], &[columns, ..]) =
                    (&lhs.dims[..], &rhs.dims[..])
                else {
                    return Err(unfit());
                };
                let [tall, wide] = window.size;
                if rhs.dims[1..] != [tall, wide, channels] {
                    return Err(unfit());
                }
                let Some([height, width]) = window.places([height, width]) else {
                    return Err(wrong(format!("{lhs} is smaller than the kernel")));
                };
                let terms = window.taps() * channels;
                (vec![batch, height, width, columns], terms, columns)
            }
        };
        if [lhs, rhs].iter().any(|x| x.dtype != DType::F32) {
            return Err(unfit());
        }
        if terms == 0 || terms > MOST_INT8_TERMS {
            return Err(wrong(format!(
                "takes sums of 1 to {MOST_INT8_TERMS} terms, found {terms}"
            )));
        }
        let key = self.noise.then(|| Shape::new(DType::U32, [2]));
        let bias = self.bias.then(|| Shape::new(DType::F32, [columns]));
        for (expected, found) in key.into_iter().chain(bias).zip(&operands[2..]) {
            if expected != **found {
                return Err(wrong(format!("takes {expected}, found {found}")));
            }
        }
        Ok(Shape::new(DType::F32, dims))
    }

    /// Multiply-adds of each value of the result.
    pub(super) fn terms(&self, operands: &[&Shape]) -> usize {
        let rhs = operands[1];
        match &self.form {
            Form::Matrix { rhs_transposed, .. } => rhs.dims[usize::from(!rhs_transposed)],
            Form::Convolution(_) => rhs.dims[1..].iter().product(),
        }
    }

    pub(super) fn evaluate(&self, operands: &[&Value], shape: Shape) -> Value {
        let [lhs, rhs] = [operands[0], operands[1]];
        let columns = shape.dims.last().copied().unwrap_or(1);
        let [lhs_lines, rhs_lines] = match &self.form {
            Form::Matrix {
                lhs_transposed,
                rhs_transposed,
            } => [
                (lhs, shape.dims[0], *lhs_transposed),
                (rhs, columns, *rhs_transposed),
            ],
            Form::Convolution(_) => [(lhs, shape.dims[0], false), (rhs, columns, false)],
        }
        .map(|(values, count, transposed)| Lines {
            values,
            count,
            size: values.shape.count() / count.max(1),
            transposed,
        });
        let mut rest = operands[2..].iter();
        let key = self.noise.then(|| rest.next()).flatten();
        let bias = self.bias.then(|| rest.next()).flatten();
        let noise = |place: usize| match key {
            Some(key) => {
                let key = [0, 1].map(|word| key.float(word) as u32);
                let columns = lhs.shape.dims.last().map_or(1, |columns| *columns);
                let at = [place / columns, place % columns].map(|i| i as u32);
                rounding_noise_at(key, RoundingStream(0), at, columns as u32)
            }
            None => 0.0,
        };
        let (row_scales, lhs_values) = lhs_lines.rounded(self.in_bf16, &noise);
        let (column_scales, rhs_values) = rhs_lines.rounded(self.in_bf16, &|_| 0.0);
        let rows = shape.count() / columns.max(1);
        let rows_in_line = rows / lhs_lines.count.max(1);
        let mut out = Vec::with_capacity(shape.count());
        for row in 0..rows {
            // Where the values are that the terms of this row multiply; `None` in the padding.
            let places: Vec<Option<usize>> = match &self.form {
                Form::Matrix { .. } => (0..lhs_lines.size)
                    .map(|i| Some(lhs_lines.place(row, i)))
                    .collect(),
                Form::Convolution(window) => {
                    let channels = lhs.shape.dims[3];
                    let pixels = window.pixels(row, &lhs.shape, &shape);
                    let of_pixel = |pixel: Option<usize>| {
                        (0..channels).map(move |c| pixel.map(|p| p * channels + c))
                    };
                    pixels.into_iter().flat_map(of_pixel).collect()
                }
            };
            for column in 0..columns {
                let terms = places.iter().enumerate().filter_map(|(i, place)| {
                    let place = (*place)?;
                    let weight = rhs_values[rhs_lines.place(column, i)];
                    Some(lhs_values[place] as i64 * weight as i64)
                });
                let sum: i64 = terms.sum();
                let mut y = sum as f32 * row_scales[row / rows_in_line] * column_scales[column];
                if let Some(bias) = bias {
                    y += bias.float(column) as f32;
                }
                out.push(f64::from(y));
            }
        }
        Value {
            shape,
            data: Data::F(out),
        }
    }
}
