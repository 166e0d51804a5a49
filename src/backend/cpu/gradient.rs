//! The derivatives of layers (`plugin/attention_gradient.inc`, `plugin/rows_gradient.inc`).

use crate::backend;
use crate::graph::eval::{Data, Value, erf};
use crate::graph::{Attribute, InferError, constraint};
use crate::shape::Shape;

use super::attention;
use super::operands::{affine_of_last, moments, only_bf16};

/// The gradients of a layer's operands, each in the memory of its operand. Operands: those of the layer, and its result's gradient;
/// both, and what the layer reads besides `f32` weights and biases, are bf16.
#[derive(Clone, Debug, PartialEq)]
pub enum Gradient {
    /// Of q, k and v of an attention that is not causal and has no mask. The attention's result comes before its gradient.
    Attention { scale: f32 },
    /// Of x, and if `affine` of weight and bias too.
    LayerNorm { epsilon: f32, affine: bool },
    /// The same.
    GroupNorm {
        groups: usize,
        epsilon: f32,
        silu: bool,
        affine: bool,
    },
    /// Of the gate's one operand.
    Geglu,
}

impl Gradient {
    pub(super) fn target(&self) -> &'static str {
        match self {
            Gradient::Attention { .. } => "maxdiff.attention_gradient",
            Gradient::LayerNorm { .. } => "maxdiff.layer_norm_gradient",
            Gradient::GroupNorm { .. } => "maxdiff.group_norm_gradient",
            Gradient::Geglu => "maxdiff.geglu_gradient",
        }
    }

    pub(super) fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        let flag = |on: bool| Attribute::I64(i64::from(on));
        match self {
            Gradient::Attention { scale } => vec![("scale", Attribute::F32(*scale))],
            Gradient::LayerNorm { epsilon, affine } => vec![
                ("epsilon", Attribute::F32(*epsilon)),
                ("affine", flag(*affine)),
            ],
            Gradient::GroupNorm {
                groups,
                epsilon,
                silu,
                affine,
            } => vec![
                ("groups", Attribute::I64(*groups as i64)),
                ("epsilon", Attribute::F32(*epsilon)),
                ("silu", flag(*silu)),
                ("affine", flag(*affine)),
            ],
            Gradient::Geglu => Vec::new(),
        }
    }

    /// How many gradients there are.
    pub(super) fn count(&self) -> usize {
        match self {
            Gradient::Attention { .. } => 3,
            Gradient::LayerNorm { affine: true, .. } | Gradient::GroupNorm { affine: true, .. } => {
                3
            }
            Gradient::LayerNorm { .. } | Gradient::GroupNorm { .. } | Gradient::Geglu => 1,
        }
    }

    /// The shape of the first gradient, that of the first operand.
    pub(super) fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let wrong = |detail: String| constraint(self.target(), detail);
        match self {
            Gradient::Attention { .. } => attention::infer_gradients(operands),
            Gradient::LayerNorm { .. } | Gradient::GroupNorm { .. } => {
                let &[x, weight, bias, gradient] = operands else {
                    return Err(InferError::OperandCount {
                        expected: 4,
                        found: operands.len(),
                    });
                };
                let shape = affine_of_last(self.target(), &[x, weight, bias])?;
                let divides = match self {
                    Gradient::GroupNorm { groups, .. } => {
                        x.rank() == 4 && *groups > 0 && x.dims[3].is_multiple_of(*groups)
                    }
                    _ => x.rank() > 0,
                };
                match divides && gradient == x {
                    true => Ok(shape),
                    false => Err(wrong(format!(
                        "{x} does not divide into the groups, or gradient {gradient} is not of it"
                    ))),
                }
            }
            Gradient::Geglu => {
                let x = only_bf16(operands, 2)?;
                let gradient = only_bf16(&operands[1..], 1)?;
                let doubled = gradient.dims.split_last().map(|(last, leading)| {
                    let last = 2 * last;
                    [leading, &[last]].concat()
                });
                match doubled.is_some_and(|dims| x.dims == dims) {
                    true => Ok(x.clone()),
                    false => Err(wrong(format!(
                        "gradient {gradient} has not half the features of {x}"
                    ))),
                }
            }
        }
    }

    /// Multiply-adds for each value of the first gradient.
    pub(super) fn terms(&self, operands: &[&Shape]) -> usize {
        match self {
            Gradient::Attention { .. } => 5 * operands[1].dims[1],
            Gradient::LayerNorm { .. } | Gradient::GroupNorm { .. } | Gradient::Geglu => 0,
        }
    }

    pub(super) fn evaluate(&self, operands: &[&Value]) -> Vec<Value> {
        let mut found = match self {
            Gradient::Attention { scale } => {
                backend::attention::gradients(operands, f64::from(*scale))
            }
            Gradient::LayerNorm { epsilon, .. } => {
                let size = operands[1].shape.count().max(1);
                let rows = operands[0].shape.count() / size;
                let rows = (0..rows).map(|row| (row * size..(row + 1) * size).collect());
                of_norm(operands, rows, f64::from(*epsilon), false)
            }
            Gradient::GroupNorm {
                groups,
                epsilon,
                silu,
                ..
            } => {
                let dims = &operands[0].shape.dims;
                let [pixels, channels] = [dims[1] * dims[2], dims[3]];
                let size = channels / groups;
                let parts = (0..dims[0] * groups).map(|at| {
                    let first = at / groups * pixels * channels + at % groups * size;
                    let places = (0..pixels * size).map(|i| first + i / size * channels + i % size);
                    places.collect()
                });
                of_norm(operands, parts, f64::from(*epsilon), *silu)
            }
            Gradient::Geglu => vec![of_gate(operands[0], operands[1])],
        };
        found.truncate(self.count());
        found
    }
}

/// The gradients of x, weight and bias, the last of the values in each of `parts` normalized together.
fn of_norm(
    operands: &[&Value],
    parts: impl Iterator<Item = Vec<usize>>,
    epsilon: f64,
    silu: bool,
) -> Vec<Value> {
    let [x, weight, bias, gradient] = [0, 1, 2, 3].map(|at| operands[at]);
    let channels = weight.shape.count().max(1);
    let mut of_x = vec![0.0; x.shape.count()];
    let [mut of_weight, mut of_bias] = [(); 2].map(|()| vec![0.0; weight.shape.count()]);
    for places in parts {
        let [mean, inverse] = moments(x, places.iter().copied(), epsilon);
        let normal = |place: usize| (x.float(place) - mean) * inverse;
        // Of the norm's result before SiLU.
        let of_result = |place: usize| {
            let c = place % channels;
            let y = normal(place) * weight.float(c) + bias.float(c);
            let sigmoid = 1.0 / (1.0 + (-y).exp());
            gradient.float(place)
                * match silu {
                    true => sigmoid * (1.0 + y * (1.0 - sigmoid)),
                    false => 1.0,
                }
        };
        let [mut sum, mut products] = [0.0; 2];
        for &place in &places {
            let (c, of_result) = (place % channels, of_result(place));
            of_bias[c] += of_result;
            of_weight[c] += of_result * normal(place);
            sum += of_result * weight.float(c);
            products += of_result * weight.float(c) * normal(place);
        }
        let count = places.len() as f64;
        for &place in &places {
            let own = of_result(place) * weight.float(place % channels);
            of_x[place] = inverse * (own - (sum + normal(place) * products) / count);
        }
    }
    let found = [(x, of_x), (weight, of_weight), (bias, of_bias)];
    let found = found.map(|(like, values)| Value {
        shape: like.shape.clone(),
        data: Data::F(values),
    });
    found.into()
}

/// The gradient of `x`, whose first half of features is multiplied by the GELU of the second.
fn of_gate(x: &Value, gradient: &Value) -> Value {
    let size = gradient.shape.dims.last().copied().unwrap_or(1);
    let mut of_x = vec![0.0; x.shape.count()];
    for at in 0..gradient.shape.count() {
        let first = at / size * 2 * size + at % size;
        let (value, gate) = (x.float(first), x.float(first + size));
        let share = 0.5 * (1.0 + erf(gate / std::f64::consts::SQRT_2));
        let density = (-gate * gate / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
        of_x[first] = gradient.float(at) * gate * share;
        of_x[first + size] = gradient.float(at) * value * (share + gate * density);
    }
    Value {
        shape: x.shape.clone(),
        data: Data::F(of_x),
    }
}
