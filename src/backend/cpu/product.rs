//! Products of bf16 operands that are packed in the same call (`plugin/fresh.inc`), of which the rhs may be int8.

use crate::dtype::DType;
use crate::graph::eval::{Data, Value};
use crate::graph::{Attribute, InferError, constraint};
use crate::shape::Shape;

use super::window::Window;

/// Attributes of [`super::kernel::Kernel::Product`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Product {
    pub form: ProductForm,
    /// Whether each column of the result is multiplied by a scale.
    pub scale: bool,
    pub bias: bool,
    /// `F32` or `BF16`.
    pub result: DType,
}

/// How the operands lie. Terms are in pairs: there is an even number of them (of convolutions, of channels), except where
/// both operands are transposed and in a kernel's gradient.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProductForm {
    /// The lhs is `[rows, k]`, the rhs `[columns, k]`; each the other way round where it is transposed.
    Matrix {
        lhs_transposed: bool,
        rhs_transposed: bool,
    },
    /// The lhs is `[batch, height, width, channels]`, the rhs `[columns, channels, height, width]`.
    Convolution(Window),
    /// The same with a rhs `[channels, columns, height, width]` whose places are reversed: the derivative of a convolution by
    /// its image, as a convolution of the result's gradient.
    ImageGradient(Window),
    /// The derivative of a convolution by its kernel, `[features, channels, height, width]`. The lhs is the result's
    /// gradient `[batch, height, width, features]`, the rhs the image `[batch, height, width, channels]`.
    KernelGradient(Window),
}

impl Product {
    pub(super) fn target(&self) -> &'static str {
        match self.form {
            ProductForm::KernelGradient(_) => "maxdiff.kernel_gradient",
            _ => "maxdiff.product",
        }
    }

    pub(super) fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        let flag = |name, on: bool| (name, Attribute::I64(i64::from(on)));
        let mut attributes = match &self.form {
            ProductForm::KernelGradient(window) => return window.attributes().to_vec(),
            ProductForm::Matrix {
                lhs_transposed,
                rhs_transposed,
            } => vec![
                flag("lhs_transposed", *lhs_transposed),
                flag("rhs_transposed", *rhs_transposed),
            ],
            ProductForm::Convolution(window) | ProductForm::ImageGradient(window) => {
                let mut attributes = window.attributes().to_vec();
                let reversed = matches!(self.form, ProductForm::ImageGradient(_));
                attributes.push(flag("image_gradient", reversed));
                attributes
            }
        };
        attributes.extend([flag("scale", self.scale), flag("bias", self.bias)]);
        attributes
    }

    pub(super) fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let expected = 2 + usize::from(self.scale) + usize::from(self.bias);
        if operands.len() != expected {
            return Err(InferError::OperandCount {
                expected,
                found: operands.len(),
            });
        }
        let [lhs, rhs] = [operands[0], operands[1]];
        let unfit = || {
            let detail = format!("lhs {lhs} and rhs {rhs} do not fit {:?}", self.form);
            constraint("product kernel", detail)
        };
        let dims = self.dims(lhs, rhs).ok_or_else(unfit)?;
        let is_gradient = matches!(self.form, ProductForm::KernelGradient(_));
        let integers = rhs.dtype == DType::S8 && !is_gradient;
        if lhs.dtype != DType::BF16 || !(rhs.dtype == DType::BF16 || integers) {
            return Err(unfit());
        }
        let of_columns = Shape::new(DType::F32, [dims.last().copied().unwrap_or(1)]);
        let rest = &operands[2..];
        if !rest.is_empty() && (is_gradient || rest.iter().any(|x| **x != of_columns)) {
            return Err(unfit());
        }
        Ok(Shape::new(self.result, dims))
    }

    /// The dimensions of the result; `None` where the operands do not fit each other or the kernel.
    fn dims(&self, lhs: &Shape, rhs: &Shape) -> Option<Vec<usize>> {
        let even = |terms: usize| (terms > 0 && terms.is_multiple_of(2)).then_some(terms);
        match &self.form {
            ProductForm::Matrix {
                lhs_transposed,
                rhs_transposed,
            } => {
                let sizes = |x: &Shape, transposed: bool| match (&x.dims[..], transposed) {
                    (&[lines, k], false) | (&[k, lines], true) => Some([lines, k]),
                    _ => None,
                };
                let [rows, k] = sizes(lhs, *lhs_transposed)?;
                let [columns, terms] = sizes(rhs, *rhs_transposed)?;
                if !(*lhs_transposed && *rhs_transposed) {
                    even(k)?;
                }
                (k == terms && k > 0).then(|| vec![rows, columns])
            }
            ProductForm::Convolution(window) | ProductForm::ImageGradient(window) => {
                let &[batch, height, width, channels] = &lhs.dims[..] else {
                    return None;
                };
                let &[out, of_terms, tall, wide] = &rhs.dims[..] else {
                    return None;
                };
                let [columns, terms] = match self.form {
                    ProductForm::ImageGradient(_) => [of_terms, out],
                    _ => [out, of_terms],
                };
                even(channels)?;
                let [height, width] = window.places([height, width])?;
                let fits = terms == channels && window.size == [tall, wide];
                fits.then(|| vec![batch, height, width, columns])
            }
            ProductForm::KernelGradient(window) => {
                let (&[batch, tall, wide, features], &[images, height, width, channels]) =
                    (&lhs.dims[..], &rhs.dims[..])
                else {
                    return None;
                };
                let places = window.places([height, width])?;
                let fits = images == batch && places == [tall, wide] && batch * tall * wide > 0;
                fits.then(|| vec![features, channels, window.size[0], window.size[1]])
            }
        }
    }

    /// Multiply-adds of each value of the result.
    pub(super) fn terms(&self, operands: &[&Shape]) -> usize {
        let [lhs, rhs] = [operands[0], operands[1]];
        match &self.form {
            ProductForm::Matrix { lhs_transposed, .. } => lhs.dims[usize::from(!lhs_transposed)],
            ProductForm::Convolution(_) => rhs.dims[1..].iter().product(),
            ProductForm::ImageGradient(_) => rhs.count() / rhs.dims[1].max(1),
            ProductForm::KernelGradient(_) => lhs.dims[..3].iter().product(),
        }
    }

    pub(super) fn evaluate(&self, operands: &[&Value], shape: Shape) -> Value {
        let [lhs, rhs] = [operands[0], operands[1]];
        let sum = |i: usize| -> f64 {
            match &self.form {
                ProductForm::Matrix {
                    lhs_transposed,
                    rhs_transposed,
                } => {
                    let [rows, columns] = [shape.dims[0], shape.dims[1]];
                    let k = lhs.shape.count() / rows;
                    let place = |transposed, line: usize, lines: usize, i: usize| match transposed {
                        true => i * lines + line,
                        false => line * k + i,
                    };
                    (0..k)
                        .map(|at| {
                            lhs.float(place(*lhs_transposed, i / columns, rows, at))
                                * rhs.float(place(*rhs_transposed, i % columns, columns, at))
                        })
                        .sum()
                }
                ProductForm::Convolution(window) | ProductForm::ImageGradient(window) => {
                    let columns = shape.dims[3];
                    let [channels, taps] = [lhs.shape.dims[3], window.taps()];
                    let weight = |tap: usize, c: usize| match &self.form {
                        ProductForm::ImageGradient(_) => {
                            rhs.float((c * columns + i % columns) * taps + taps - 1 - tap)
                        }
                        _ => rhs.float((i % columns * channels + c) * taps + tap),
                    };
                    let pixels = window.pixels(i / columns, &lhs.shape, &shape);
                    let of_pixel = |(tap, pixel): (usize, Option<usize>)| -> f64 {
                        let Some(pixel) = pixel else {
                            return 0.0;
                        };
                        let value = |c| lhs.float(pixel * channels + c) * weight(tap, c);
                        (0..channels).map(value).sum()
                    };
                    pixels.into_iter().enumerate().map(of_pixel).sum()
                }
                ProductForm::KernelGradient(window) => {
                    let [features, channels, taps] = [shape.dims[0], shape.dims[1], window.taps()];
                    let (feature, channel, tap) =
                        (i / taps / channels, i / taps % channels, i % taps);
                    let rows = lhs.shape.count() / features;
                    let of_row = |row: usize| {
                        let pixel = window.pixels(row, &rhs.shape, &lhs.shape)[tap];
                        pixel.map_or(0.0, |pixel| {
                            lhs.float(row * features + feature)
                                * rhs.float(pixel * channels + channel)
                        })
                    };
                    (0..rows).map(of_row).sum()
                }
            }
        };
        let columns = shape.dims.last().copied().unwrap_or(1);
        let value = |i: usize| {
            let mut y = sum(i) as f32;
            let mut of_column = operands[2..].iter().map(|x| x.float(i % columns) as f32);
            if self.scale {
                y *= of_column.next().unwrap_or(1.0);
            }
            f64::from(y + of_column.next().unwrap_or(0.0))
        };
        Value {
            data: Data::F((0..shape.count()).map(value).collect()),
            shape,
        }
    }
}
