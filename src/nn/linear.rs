//! The linear layer.

use crate::dtype::DType;
use crate::graph::{Builder, DotDims, Init, Tensor};
use crate::shape::Shape;

use super::{Axis, Precision, Result};

/// Attributes of [`linear`].
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// The size of the result's last dimension.
    pub features: usize,
    pub bias: bool,
    /// Logical axes of input and output features.
    pub axes: (Axis, Axis),
    /// The weight's initial distribution, with a zero bias; `None` is PyTorch's: both uniform with bound
    /// 1/sqrt(fan_in).
    pub init: Option<Init>,
}

impl Linear {
    /// With a bias and PyTorch's initial distribution.
    pub fn new(features: usize, input: &'static str, output: &'static str) -> Self {
        Linear {
            features,
            bias: true,
            axes: (Some(input), Some(output)),
            init: None,
        }
    }

    /// With a bias, and replicated: for the small layers of the conditioning.
    pub fn replicated(features: usize) -> Self {
        Linear {
            features,
            bias: true,
            axes: (None, None),
            init: None,
        }
    }

    pub fn without_bias(self) -> Self {
        Linear {
            bias: false,
            ..self
        }
    }

    pub fn with_init(self, init: Init) -> Self {
        Linear {
            init: Some(init),
            ..self
        }
    }
}

/// `x W^T + bias` over the last dimension of `x`, with `weight` `[features, in]` and `bias` `[features]`.
///
/// The product accumulates in `f32` and the bias is added before the one rounding to the activation type.
///
/// # Errors
/// When `x` is a scalar, or the weights were declared with other shapes.
pub fn linear(b: &Builder, x: Tensor, layer: Linear, precision: Precision) -> Result<Tensor> {
    let y = linear_f32(b, x, layer, precision)?;
    b.convert(y, precision.activations)
}

/// [`linear`] without the rounding to the activation type: the result is `f32`.
///
/// # Errors
/// As for [`linear`].
pub fn linear_f32(b: &Builder, x: Tensor, layer: Linear, precision: Precision) -> Result<Tensor> {
    let x_dims = b.dims(x);
    let Some((&fan_in, leading)) = x_dims.split_last() else {
        return Err(b.invalid("linear: a scalar has no feature dimension"));
    };
    let (axis_in, axis_out) = layer.axes;
    let uniform = uniform_fan_in(fan_in);
    let weight = b.param(
        "weight",
        Shape::new(precision.weights, [layer.features, fan_in]),
        layer.init.unwrap_or(uniform),
        &[axis_out, axis_in],
    )?;
    let x = b.convert(x, precision.activations)?;
    let weight = b.convert(weight, precision.activations)?;
    let mut y = b.dot_general(
        x,
        weight,
        DotDims {
            lhs_contract: vec![leading.len()],
            rhs_contract: vec![1],
            ..DotDims::default()
        },
        DType::F32,
    )?;
    if layer.bias {
        y = add_bias(
            b,
            y,
            layer.features,
            layer.init.map_or(uniform, |_| Init::Zeros),
            precision,
        )?;
    }
    Ok(y)
}

/// PyTorch's initial distribution of linear and convolution weights and biases.
pub(super) fn uniform_fan_in(fan_in: usize) -> Init {
    Init::Uniform {
        bound: (1.0 / (fan_in.max(1) as f64).sqrt()) as f32,
    }
}

/// Adds the weight `bias` to the last dimension of the `f32` tensor `y`. A bias is small: it is replicated.
pub(super) fn add_bias(
    b: &Builder,
    y: Tensor,
    features: usize,
    init: Init,
    precision: Precision,
) -> Result<Tensor> {
    let bias = b.param(
        "bias",
        Shape::new(precision.weights, [features]),
        init,
        &[None],
    )?;
    let bias = b.convert(bias, DType::F32)?;
    b.add(y, bias)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::tests::{input, weights};

    #[test]
    fn declares_pytorchs_layout_and_accumulates_in_f32() {
        let b = Builder::new();
        let x = input(&b, "x", &[2, 7, 3]);
        let precision = Precision {
            weights: DType::F32,
            activations: DType::BF16,
        };
        let y = linear(
            &b.root("m").scope("to_q"),
            x,
            Linear::new(5, "embed", "heads"),
            precision,
        )
        .unwrap();
        assert_eq!(b.shape(y), Shape::new(DType::BF16, [2, 7, 5]));
        assert_eq!(
            weights(&b),
            [
                ("m/to_q.weight".to_string(), vec![5, 3]),
                ("m/to_q.bias".to_string(), vec![5])
            ]
        );
        let graph = b.finish();
        let dot = graph
            .nodes
            .iter()
            .find(|n| n.op.name() == "dot_general")
            .unwrap();
        assert_eq!(dot.shape.dtype, DType::F32);
        let operand = &graph.nodes[dot.operands[0] as usize];
        assert_eq!(operand.shape.dtype, DType::BF16);
        assert_eq!(graph.inputs[1].logical_axes, [Some("heads"), Some("embed")]);
    }
}
