//! The kernels of the CPU plugin (`plugin/kernels.h`), as custom calls.
//!
//! They replace composites and contractions of a graph; [`super::claim`] puts them in.

use std::sync::Arc;

use crate::backend;
use crate::dtype::DType;
use crate::graph::blockwise::BlockwiseAdamW;
use crate::graph::eval::{Data, Value, erf};
use crate::graph::{
    Attribute, Builder, Configuration, CustomCall, GraphError, InferError, Op, Tensor, constraint,
};
use crate::shape::Shape;

use super::attention;
pub use super::gradient::Gradient;
use super::operands::{affine_of_last, moments, only_bf16};
pub use super::optimizer::AdamW8bit;
pub use super::product::{Product, ProductForm};
pub use super::quantized::{Form, QuantizedProduct};
pub use super::window::Window;

/// The call of a kernel in a graph.
pub(super) fn call(b: &Builder, kernel: Kernel, operands: &[Tensor]) -> Result<Tensor, GraphError> {
    b.push(Op::CustomCall(Arc::new(kernel)), operands)
}

/// Columns that one vector of packed weights holds.
pub const LANES: usize = 16;

/// An operation of the CPU plugin.
#[derive(Clone, Debug, PartialEq)]
pub enum Kernel {
    /// `(lhs rhs + start) * row_scale * column_scale + bias`, in that order, each step in `f32`.
    ///
    /// Operands: the lhs, `[.., k]` or an image `[batch, height, width, k]`, of bf16, `f32` or `u8` (an int8 plus 128); the
    /// packed rhs, of the same type or int8 ([`packed_shape`]); for `u8` then `start`, `s32[columns]` up to the next multiple of
    /// [`LANES`]: -128 times the sum of each column; then what the attributes ask for: of a [`Stored`] rhs scales and zero
    /// points, `row_scale` of the result's leading dimensions, `column_scale` and `bias` `[columns]`, each `f32` or bf16.
    Contract(Contract),
    /// `lhs rhs * row_scale * column_scale + bias` in `f32`, of `f32` operands that are rounded to int8 by AQT's
    /// numerics first: a range for each row of the lhs, or image of it, and for each column. Operands: lhs and rhs, the
    /// key of the noise `u32[2]` where the lhs is rounded stochastically, and the bias `f32[columns]` if there is one.
    QuantizedProduct(QuantizedProduct),
    /// `lhs rhs * scale + bias` of bf16 operands that are packed in the call, sums in `f32`. Operands: lhs and rhs, which may be
    /// int8, then the scale and the bias, `f32[columns]`, if there are any.
    Product(Product),
    /// A step of AdamW.
    AdamW8bit(AdamW8bit),
    /// `softmax(q k^T * scale) v` for each head; operands and result are bf16 or `f32`, `[batch, length, heads, size]`. If
    /// `causal`, a query sees the keys up to its own place. If not, there may be a fourth operand, `pred[batch, keys]`:
    /// the keys that queries see; where there are none the result is the mean of v.
    Attention { scale: f32, causal: bool },
    /// The largest magnitude over all but the first `kept` dimensions of a bf16 tensor; with `scale` what int8's steps
    /// are worth then, by AQT: `magnitude * (1 / 127.5)` in `f32`, rounded to bf16, with 1 for a magnitude of 0.
    AbsMax { kept: usize, scale: bool },
    /// `round(clamp(x * inverse, -127, 127)) + 128` as `u8`, the product rounded to bf16. Operands are bf16: x, and the
    /// scale of x's leading dimensions, whose `inverse` is rounded to bf16 and 1 where it is infinite. NaN is rounded
    /// to 0.
    Quantize,
    /// [`crate::nn::layer_norm`] of a bf16 tensor, to bf16. Operands: x, then weight and bias, `f32[features]`.
    LayerNorm { epsilon: f32 },
    /// [`crate::nn::group_norm`] of a bf16 image, to bf16, and [`crate::nn::silu`] of it. Operands: x, then weight and
    /// bias, `f32[channels]`.
    GroupNorm {
        groups: usize,
        epsilon: f32,
        silu: bool,
    },
    /// The first half of the last dimension times [`crate::nn::gelu`] of the second, all bf16.
    Geglu,
    /// The sum of the squares of a bf16 or `f32` tensor's values, in `f32`.
    SumOfSquares,
    /// The gradients of another kernel's operands.
    Gradient(Gradient),
}

/// Attributes of [`Kernel::Contract`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contract {
    pub columns: usize,
    /// The window of a convolution; `None` for a matrix product.
    pub window: Option<Window>,
    /// The rhs is integers, which become bf16 where they are multiplied with a bf16 lhs.
    pub stored: Option<Stored>,
    pub row_scale: bool,
    pub column_scale: bool,
    pub bias: bool,
    /// `F32` or `BF16`.
    pub result: DType,
}

/// How the integers of a rhs become bf16: as they are, or as `(integer - zero point) * scale` in `f32`, rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    /// `S8`, packed as bf16 is, or `S4`, of which both values of a lane share a byte of `u8[columns / 16, k / 2, 16]`.
    pub element: DType,
    /// Parts of the channels of a kernel place, each of which has a scale `[columns / 16, groups, 16]`; 0 without scales.
    pub scale_groups: usize,
    /// Whether zero points follow the scales, with their dimensions.
    pub zero_point: bool,
}

impl Stored {
    /// The packed rhs.
    fn packed_shape(self, k: usize, columns: usize) -> Option<Shape> {
        let mut shape = packed_shape(DType::BF16, k, columns)?;
        if self.element == DType::S4 {
            shape.dims.pop();
            return Some(shape.with_dtype(DType::U8));
        }
        Some(shape.with_dtype(self.element))
    }

    fn scale_dims(self, columns: usize) -> Vec<usize> {
        vec![columns.div_ceil(LANES), self.scale_groups, LANES]
    }
}

/// Values along `k` that one 32-bit lane holds: 1 of `f32`, 2 of bf16, 4 of 8 bits; `None` for types that no kernel takes.
pub fn group(dtype: DType) -> Option<usize> {
    match dtype {
        DType::F32 => Some(1),
        DType::BF16 => Some(2),
        DType::S8 | DType::U8 => Some(4),
        _ => None,
    }
}

/// The shape of a packed rhs of `k` rows (kernel places times channels) and `columns` columns:
/// `[columns / 16, k / group, 16, group]`, the columns padded by zeros.
pub fn packed_shape(dtype: DType, k: usize, columns: usize) -> Option<Shape> {
    let group = group(dtype)?;
    let dims = [columns.div_ceil(LANES), k / group, LANES, group];
    k.is_multiple_of(group).then(|| Shape::new(dtype, dims))
}

impl Kernel {
    fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        use Attribute::{F32, I64};
        let flag = |on: bool| I64(i64::from(on));
        let size = |n: usize| I64(n as i64);
        match self {
            Kernel::Contract(c) => {
                let mut attributes = vec![
                    ("row_scale", flag(c.row_scale)),
                    ("column_scale", flag(c.column_scale)),
                    ("bias", flag(c.bias)),
                ];
                if let Some(w) = &c.window {
                    attributes.extend(w.attributes());
                }
                if let Some(stored) = &c.stored {
                    attributes.extend([
                        ("stored_bits", size(stored.element.bits())),
                        ("scale_groups", size(stored.scale_groups)),
                        ("zero_point", flag(stored.zero_point)),
                    ]);
                }
                attributes
            }
            Kernel::QuantizedProduct(product) => product.attributes(),
            Kernel::Product(product) => product.attributes(),
            Kernel::AdamW8bit(step) => step.attributes(),
            Kernel::Attention { scale, causal } => {
                vec![("scale", F32(*scale)), ("causal", flag(*causal))]
            }
            Kernel::Gradient(gradient) => gradient.attributes(),
            Kernel::LayerNorm { epsilon } => vec![("epsilon", F32(*epsilon))],
            Kernel::GroupNorm {
                groups,
                epsilon,
                silu,
            } => vec![
                ("groups", size(*groups)),
                ("epsilon", F32(*epsilon)),
                ("silu", flag(*silu)),
            ],
            Kernel::AbsMax { scale, .. } => vec![("scale", flag(*scale))],
            Kernel::Quantize | Kernel::Geglu | Kernel::SumOfSquares => Vec::new(),
        }
    }
}

impl CustomCall for Kernel {
    fn target(&self) -> &'static str {
        match self {
            Kernel::Contract(_) => "maxdiff.contract",
            Kernel::QuantizedProduct(_) => "maxdiff.quantized_product",
            Kernel::Product(product) => product.target(),
            Kernel::AdamW8bit(_) => "maxdiff.adamw_8bit",
            Kernel::Attention { .. } => "maxdiff.attention",
            Kernel::AbsMax { .. } => "maxdiff.abs_max",
            Kernel::Quantize => "maxdiff.quantize",
            Kernel::LayerNorm { .. } => "maxdiff.layer_norm",
            Kernel::GroupNorm { .. } => "maxdiff.group_norm",
            Kernel::Geglu => "maxdiff.geglu",
            Kernel::SumOfSquares => "maxdiff.sum_of_squares",
            Kernel::Gradient(gradient) => gradient.target(),
        }
    }

    fn configuration(&self, _: &[&Shape]) -> Configuration {
        Configuration::Attributes(self.attributes())
    }

    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        match self {
            Kernel::Contract(c) => c.infer(operands),
            Kernel::QuantizedProduct(product) => product.infer(operands),
            Kernel::Product(product) => product.infer(operands),
            Kernel::AdamW8bit(step) => step.infer(operands),
            Kernel::Attention { causal, .. } => attention::infer(operands, *causal),
            Kernel::SumOfSquares => match operands {
                [x] if matches!(x.dtype, DType::BF16 | DType::F32) => {
                    Ok(Shape::new(DType::F32, []))
                }
                [x] => Err(constraint(
                    "sum_of_squares kernel",
                    format!("takes bf16 or f32, found {x}"),
                )),
                _ => Err(InferError::OperandCount {
                    expected: 1,
                    found: operands.len(),
                }),
            },
            Kernel::Gradient(gradient) => gradient.infer(operands),
            Kernel::AbsMax { kept, .. } => {
                let x = only_bf16(operands, 1)?;
                if *kept > x.rank() {
                    return Err(constraint(
                        "abs_max kernel",
                        format!("{x} has fewer than {kept} dimensions"),
                    ));
                }
                Ok(Shape::new(DType::BF16, &x.dims[..*kept]))
            }
            Kernel::Quantize => {
                let x = only_bf16(operands, 2)?;
                let scale = operands[1];
                if scale.dtype != DType::BF16 || !x.dims.starts_with(&scale.dims) {
                    let detail = format!("{scale} is not of the leading dimensions of {x}");
                    return Err(constraint("quantize kernel", detail));
                }
                Ok(x.with_dtype(DType::U8))
            }
            Kernel::LayerNorm { .. } => affine_of_last("layer_norm kernel", operands),
            Kernel::GroupNorm { groups, .. } => {
                let x = affine_of_last("group_norm kernel", operands)?;
                match x.rank() == 4 && *groups > 0 && x.dims[3].is_multiple_of(*groups) {
                    true => Ok(x),
                    false => Err(constraint(
                        "group_norm kernel",
                        format!("{x} is not an image whose channels divide into {groups} groups"),
                    )),
                }
            }
            Kernel::Geglu => {
                let x = only_bf16(operands, 1)?;
                match x.dims.split_last() {
                    Some((last, leading)) if last.is_multiple_of(2) => {
                        Ok(Shape::new(DType::BF16, [leading, &[last / 2]].concat()))
                    }
                    _ => Err(constraint("geglu kernel", format!("{x} has no halves"))),
                }
            }
        }
    }

    fn flops(&self, operands: &[&Shape], result: &Shape) -> u64 {
        let terms = match self {
            Kernel::Contract(c) => {
                let packed = operands[1];
                // Two values share a byte of int4.
                let group = match c.stored {
                    Some(_) => 2,
                    None => packed.dims[3],
                };
                packed.dims[1] * group
            }
            Kernel::QuantizedProduct(product) => product.terms(operands),
            Kernel::Product(product) => product.terms(operands),
            Kernel::Attention { .. } => 2 * operands[1].dims[1],
            Kernel::Gradient(gradient) => gradient.terms(operands),
            Kernel::AdamW8bit(_)
            | Kernel::AbsMax { .. }
            | Kernel::Quantize
            | Kernel::LayerNorm { .. }
            | Kernel::GroupNorm { .. }
            | Kernel::Geglu
            | Kernel::SumOfSquares => 0,
        };
        (result.count() as u64)
            .saturating_mul(terms as u64)
            .saturating_mul(2)
    }

    fn in_place(&self) -> usize {
        match self {
            Kernel::AdamW8bit(_) => BlockwiseAdamW::RESULTS,
            Kernel::Gradient(gradient) => gradient.count(),
            _ => 0,
        }
    }

    fn evaluate_all(&self, operands: &[&Value], first: Shape) -> Vec<Value> {
        match self {
            Kernel::AdamW8bit(step) => step.evaluate(operands),
            Kernel::Gradient(gradient) => gradient.evaluate(operands),
            _ => vec![self.evaluate(operands, first)],
        }
    }

    fn evaluate(&self, operands: &[&Value], shape: Shape) -> Value {
        match self {
            Kernel::Contract(c) => c.evaluate(operands, shape),
            Kernel::QuantizedProduct(product) => product.evaluate(operands, shape),
            Kernel::Product(product) => product.evaluate(operands, shape),
            Kernel::AdamW8bit(step) => step.evaluate(operands).swap_remove(0),
            Kernel::Attention { scale, causal } => {
                backend::attention::evaluate(operands, f64::from(*scale), *causal, shape)
            }
            Kernel::SumOfSquares => {
                let x = operands[0];
                let sum = (0..x.shape.count()).map(|i| x.float(i).powi(2)).sum();
                Value {
                    shape,
                    data: Data::F(vec![sum]),
                }
            }
            Kernel::Gradient(gradient) => gradient.evaluate(operands).swap_remove(0),
            Kernel::AbsMax { scale, .. } => {
                let size = operands[0].shape.count() / shape.count().max(1);
                from_rows(shape, 1, |row, _| {
                    let most = (0..size).fold(0.0, |most: f64, i| {
                        let x = operands[0].float(row * size + i).abs();
                        if x.is_nan() || most.is_nan() {
                            f64::NAN
                        } else {
                            most.max(x)
                        }
                    });
                    match (scale, most == 0.0) {
                        (false, _) => most,
                        (true, true) => f64::from((1.0 / 127.5) as f32),
                        (true, false) => f64::from(most as f32 * (1.0 / 127.5) as f32),
                    }
                })
            }
            Kernel::Quantize => {
                let size = shape.count() / operands[1].shape.count().max(1);
                let values = from_rows(shape.clone(), size, |row, i| {
                    let round = |x: f64| f64::from(half::bf16::from_f32(x as f32));
                    let inverse = round(1.0 / operands[1].float(row));
                    let inverse = if inverse == f64::INFINITY {
                        1.0
                    } else {
                        inverse
                    };
                    let product = round(operands[0].float(row * size + i) * inverse);
                    product.clamp(-127.0, 127.0).round_ties_even()
                });
                let integers = (0..shape.count())
                    .map(|i| values.float(i) as i64 + 128)
                    .collect();
                Value {
                    shape,
                    data: Data::I(integers),
                }
            }
            Kernel::LayerNorm { epsilon } => {
                let size = operands[1].shape.count();
                let rows = shape.count() / size.max(1);
                let moments: Vec<[f64; 2]> = (0..rows)
                    .map(|row| {
                        let places = (0..size).map(|i| row * size + i);
                        moments(operands[0], places, f64::from(*epsilon))
                    })
                    .collect();
                from_rows(shape, size, |row, i| {
                    let [mean, inverse] = moments[row];
                    let x = operands[0].float(row * size + i);
                    (x - mean) * inverse * operands[1].float(i) + operands[2].float(i)
                })
            }
            Kernel::GroupNorm {
                groups,
                epsilon,
                silu,
            } => {
                let [batch, channels] = [shape.dims[0], shape.dims[3]];
                let (pixels, size) = (shape.dims[1] * shape.dims[2], channels / groups);
                let moments: Vec<[f64; 2]> = (0..batch * groups)
                    .map(|at| {
                        let (image, group) = (at / groups, at % groups);
                        let places = (0..pixels * size).map(|i| {
                            (image * pixels + i / size) * channels + group * size + i % size
                        });
                        moments(operands[0], places, f64::from(*epsilon))
                    })
                    .collect();
                from_rows(shape, channels, |pixel, c| {
                    let [mean, inverse] = moments[pixel / pixels * groups + c / size];
                    let x = operands[0].float(pixel * channels + c);
                    let y = (x - mean) * inverse * operands[1].float(c) + operands[2].float(c);
                    if *silu { y / (1.0 + (-y).exp()) } else { y }
                })
            }
            Kernel::Geglu => {
                let size = shape.dims.last().copied().unwrap_or(1);
                from_rows(shape, size, |row, i| {
                    let at = row * 2 * size + i;
                    let gate = operands[0].float(at + size);
                    let erf = erf(gate * std::f64::consts::FRAC_1_SQRT_2);
                    operands[0].float(at) * gate * (erf + 1.0) / 2.0
                })
            }
        }
    }
}

impl Contract {
    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let is_int8 = operands.first().is_some_and(|lhs| lhs.dtype == DType::U8);
        let scales = self.stored.is_some_and(|stored| stored.scale_groups > 0);
        let zero_points = self.stored.is_some_and(|stored| stored.zero_point);
        let flags = [
            is_int8,
            scales,
            zero_points,
            self.row_scale,
            self.column_scale,
            self.bias,
        ];
        let expected = 2 + flags.iter().filter(|f| **f).count();
        if operands.len() != expected {
            return Err(InferError::OperandCount {
                expected,
                found: operands.len(),
            });
        }
        let (lhs, packed) = (operands[0], operands[1]);
        let wrong = |detail: String| constraint("contract kernel", detail);
        let Some((&channels, leading)) = lhs.dims.split_last() else {
            return Err(wrong("the lhs is a scalar".to_string()));
        };
        let rhs = match lhs.dtype {
            DType::U8 => DType::S8,
            other => other,
        };
        let taps = self.window.as_ref().map_or(1, Window::taps);
        let rhs_shape = match self.stored {
            None => packed_shape(rhs, taps * channels, self.columns),
            Some(stored) => stored.packed_shape(taps * channels, self.columns),
        };
        let stored_fits = self.stored.is_none_or(|stored| {
            let groups = stored.scale_groups;
            lhs.dtype == DType::BF16
                && [DType::S8, DType::S4].contains(&stored.element)
                && (groups == 0 || (channels / 2).is_multiple_of(groups))
                && (groups > 0 || !stored.zero_point)
        });
        if rhs_shape.as_ref() != Some(packed)
            || !stored_fits
            || !group(lhs.dtype).is_some_and(|group| channels.is_multiple_of(group))
        {
            return Err(wrong(format!(
                "lhs {lhs} and packed rhs {packed} do not fit {taps} places and {} columns",
                self.columns
            )));
        }
        let mut dims = leading.to_vec();
        if let Some(window) = &self.window {
            let [_, height, width] = leading else {
                return Err(wrong(format!("{lhs} is no image")));
            };
            let Some(places) = window.places([*height, *width]) else {
                return Err(wrong(format!("{lhs} is smaller than the kernel")));
            };
            dims[1..].copy_from_slice(&places);
        }
        let rows = dims.clone();
        dims.push(self.columns);
        let start = vec![packed.dims[0] * LANES];
        let columns = vec![self.columns];
        const FLOATS: &[DType] = &[DType::F32, DType::BF16];
        let of_stored = self.stored.map(|stored| stored.scale_dims(self.columns));
        let of_stored = of_stored.unwrap_or_default();
        let expected = [
            (&[DType::S32][..], start),
            (FLOATS, of_stored.clone()),
            (FLOATS, of_stored),
            (FLOATS, rows),
            (FLOATS, columns.clone()),
            (FLOATS, columns),
        ];
        let given = flags.iter().zip(&expected).filter(|(flag, _)| **flag);
        for ((_, (dtypes, dims)), found) in given.zip(&operands[2..]) {
            if !dtypes.contains(&found.dtype) || *dims != found.dims {
                let expected = Shape::new(dtypes[0], dims.clone());
                return Err(wrong(format!("takes {expected}, found {found}")));
            }
        }
        Ok(Shape::new(self.result, dims))
    }

    fn evaluate(&self, operands: &[&Value], shape: Shape) -> Value {
        let (lhs, packed) = (operands[0], operands[1]);
        let is_int8 = lhs.shape.dtype == DType::U8;
        let mut rest = operands[2..].iter();
        let mut next = |flag: bool| flag.then(|| rest.next()).flatten();
        let start = next(is_int8);
        let scales = next(self.stored.is_some_and(|stored| stored.scale_groups > 0));
        let zero_points = next(self.stored.is_some_and(|stored| stored.zero_point));
        let row_scale = next(self.row_scale);
        let column_scale = next(self.column_scale);
        let bias = next(self.bias);
        let channels = lhs.shape.dims.last().copied().unwrap_or(1);
        let [_, groups, lanes, ..] = packed.shape.dims[..] else {
            return Value::zeros(shape);
        };
        let group = packed.shape.dims.get(3).copied().unwrap_or(2);
        let value = |k: usize, n: usize| {
            let lane = (n / lanes * groups + k / group) * lanes + n % lanes;
            match self.stored.map(|stored| stored.element) {
                Some(DType::S4) => {
                    let half = packed.int(lane) >> (4 * (k % group));
                    (((half & 0xf) ^ 8) - 8) as f64
                }
                _ => packed.float(lane * group + k % group),
            }
        };
        let weight = |k: usize, n: usize| {
            let (Some(stored), Some(scales)) = (self.stored, scales) else {
                return value(k, n);
            };
            let part = k % channels / (channels / stored.scale_groups);
            let place = (n / lanes * stored.scale_groups + part) * lanes + n % lanes;
            let steps = value(k, n) - zero_points.map_or(0.0, |points| points.float(place));
            let value = (steps as f32) * (scales.float(place) as f32);
            f64::from(half::bf16::from_f32(value))
        };
        let round = |x: f64| f64::from(x as f32);
        let mut out = Vec::with_capacity(shape.count());
        for row in 0..shape.count() / self.columns.max(1) {
            let pixels = match &self.window {
                Some(window) => window.pixels(row, &lhs.shape, &shape),
                None => vec![Some(row)],
            };
            for n in 0..self.columns {
                let mut sum = start.map_or(0.0, |s| s.float(n));
                for (tap, pixel) in pixels.iter().enumerate() {
                    for c in 0..channels {
                        // Padding is zero: 128 where values are shifted by it.
                        let outside = if is_int8 { 128.0 } else { 0.0 };
                        let x = pixel.map_or(outside, |p| lhs.float(p * channels + c));
                        sum += x * weight(tap * channels + c, n);
                    }
                }
                let mut y = round(sum);
                if let Some(scale) = row_scale {
                    y = round(y * scale.float(row));
                }
                if let Some(scale) = column_scale {
                    y = round(y * scale.float(n));
                }
                if let Some(bias) = bias {
                    y = round(y + bias.float(n));
                }
                out.push(y);
            }
        }
        Value {
            shape,
            data: Data::F(out),
        }
    }
}

/// A tensor whose row `r` has at `i` what `value` gives for them.
fn from_rows(shape: Shape, size: usize, value: impl Fn(usize, usize) -> f64) -> Value {
    let size = size.max(1);
    let values = (0..shape.count()).map(|i| value(i / size, i % size));
    Value {
        data: Data::F(values.collect()),
        shape,
    }
}
