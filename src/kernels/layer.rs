//! Layers with dimensions, as programs of their own.

use std::fmt;
use std::sync::Arc;

use crate::dtype::DType;
use crate::graph::{
    Builder, Granularity, GraphError, NumericsConvention, Op, Tensor, TensorFormat, vjp,
};
use crate::lowering::{Sums, Traced, Update};
use crate::nn::{self, Activation, Attention, Conv2d, GroupNorm, Linear, Precision};
use crate::quant::{Formats, Policy, ROUNDING_KEY};
use crate::shape::Shape;
use crate::util::named;

use super::KernelError;

named! {
    /// A layer that a backend has a kernel for.
    pub enum Layer {
        Attention = "attention",
        CausalAttention = "causal_attention",
        /// Attention with its derivative, as a training step has it.
        AttentionTraining = "attention_training",
        GroupNorm = "group_norm",
        GroupNormSilu = "group_norm_silu",
        /// A group norm and SiLU with their derivative, as a training step has them.
        GroupNormSiluTraining = "group_norm_silu_training",
        LayerNorm = "layer_norm",
        GatedGelu = "gated_gelu",
        /// The gated GELU with its derivative, as a training step has it.
        GatedGeluTraining = "gated_gelu_training",
        UpsampleNearest2x = "upsample_nearest_2x",
        /// Upsampling with its derivative, as a training step has it.
        UpsampleNearest2xTraining = "upsample_nearest_2x_training",
        /// Upsampling with the convolution behind it.
        Upsample2x = "upsample_2x",
        Linear = "linear",
        /// A linear layer with its derivatives, as a training step has it.
        LinearTraining = "linear_training",
        Conv2d = "conv2d",
        /// A convolution with its derivatives, as a training step has it.
        Conv2dTraining = "conv2d_training",
        /// Norms, attention and the feed-forward layer of a transformer block, with the text's keys and values as
        /// inputs.
        TransformerBlock = "transformer_block",
    }
}

/// A layer of bf16 with its dimensions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    pub layer: Layer,
    /// In the order of [`Layer::dims`].
    dims: Vec<usize>,
    /// How contractions are quantized, if they are.
    pub quantization: Option<LayerQuantization>,
}

named! {
    /// A mode of `quantization` for a layer, in its own numerics.
    pub enum LayerQuantization {
        Int8 = "int8",
        Int8W8A16 = "int8_w8a16",
        /// Groups of 64.
        W4A16 = "w4a16",
    }
}

impl LayerQuantization {
    fn formats(self) -> Formats {
        let int8 = TensorFormat::int8(NumericsConvention::Aqt);
        match self {
            LayerQuantization::Int8 => Formats::aqt_int8(1),
            LayerQuantization::Int8W8A16 => Formats::of_weights(int8),
            LayerQuantization::W4A16 => Formats::of_weights(TensorFormat {
                element: DType::S4,
                granularity: Granularity::Group(64),
                ..int8
            }),
        }
    }
}

impl Layer {
    /// The names of its dimensions, with those of a layer of SDXL at 1024x1024 and two rows.
    pub fn dims(self) -> &'static [(&'static str, usize)] {
        match self {
            Layer::Attention | Layer::AttentionTraining => &[
                ("batch", 2),
                ("queries", 4096),
                ("keys", 4096),
                ("heads", 10),
                ("size", 64),
            ],
            Layer::CausalAttention => &[("batch", 2), ("tokens", 77), ("heads", 12), ("size", 64)],
            Layer::GroupNorm | Layer::GroupNormSilu | Layer::GroupNormSiluTraining => &[
                ("batch", 2),
                ("height", 64),
                ("width", 64),
                ("channels", 640),
                ("groups", 32),
            ],
            Layer::LayerNorm => &[("batch", 2), ("tokens", 4096), ("features", 640)],
            Layer::GatedGelu | Layer::GatedGeluTraining => {
                &[("batch", 2), ("tokens", 4096), ("features", 5120)]
            }
            Layer::UpsampleNearest2x | Layer::UpsampleNearest2xTraining | Layer::Upsample2x => &[
                ("batch", 2),
                ("height", 64),
                ("width", 64),
                ("channels", 640),
            ],
            Layer::Linear | Layer::LinearTraining => &[
                ("batch", 2),
                ("tokens", 1024),
                ("inputs", 1280),
                ("outputs", 1280),
            ],
            Layer::Conv2d | Layer::Conv2dTraining => &[
                ("batch", 2),
                ("height", 64),
                ("width", 64),
                ("inputs", 640),
                ("outputs", 640),
                ("kernel", 3),
            ],
            Layer::TransformerBlock => &[
                ("batch", 2),
                ("tokens", 1024),
                ("keys", 77),
                ("heads", 20),
                ("size", 64),
            ],
        }
    }

    fn contracts(self) -> bool {
        matches!(
            self,
            Layer::Linear
                | Layer::LinearTraining
                | Layer::Conv2d
                | Layer::Conv2dTraining
                | Layer::Upsample2x
                | Layer::TransformerBlock
        )
    }

    /// Whether the derivative is part of it.
    fn trains(self) -> bool {
        matches!(
            self,
            Layer::AttentionTraining
                | Layer::GroupNormSiluTraining
                | Layer::GatedGeluTraining
                | Layer::UpsampleNearest2xTraining
                | Layer::LinearTraining
                | Layer::Conv2dTraining
        )
    }
}

impl Case {
    /// A layer with the dimensions `name=number`, the others by default.
    ///
    /// # Errors
    /// [`KernelError::Dimension`] for a name that the layer has not, or no number above 0; [`KernelError::NoContraction`]
    /// for a quantization where there is nothing to quantize.
    pub fn new(
        layer: Layer,
        given: &[String],
        quantization: Option<LayerQuantization>,
    ) -> Result<Case, KernelError> {
        let names = layer.dims();
        let mut dims: Vec<usize> = names.iter().map(|(_, size)| *size).collect();
        for text in given {
            let place = text.split_once('=').and_then(|(name, size)| {
                let place = names.iter().position(|(own, _)| *own == name)?;
                Some((place, size.parse().ok().filter(|size| *size > 0)?))
            });
            let Some((place, size)) = place else {
                return Err(KernelError::Dimension {
                    layer,
                    found: text.clone(),
                    expected: names.iter().map(|(name, _)| format!("{name}=N")).collect(),
                });
            };
            dims[place] = size;
        }
        if quantization.is_some() && !layer.contracts() {
            return Err(KernelError::NoContraction { layer });
        }
        Ok(Case {
            layer,
            dims,
            quantization,
        })
    }

    /// The dimensions by name.
    pub fn dims(&self) -> impl Iterator<Item = (&'static str, usize)> {
        let names = self.layer.dims().iter().map(|(name, _)| *name);
        names.zip(self.dims.iter().copied())
    }

    /// The layer as a program.
    ///
    /// # Errors
    /// When the dimensions do not fit each other.
    pub fn traced(&self) -> Result<Traced, KernelError> {
        let b = Builder::new();
        let y = self.build(&b)?;
        b.output("y", y, None)?;
        let traced = Traced::new("kernel", b.finish());
        let traced = match self.quantization {
            None => traced,
            Some(quantization) => {
                let policy = Policy::of_layers("m/", Vec::new(), &[], quantization.formats())?;
                traced.quantized(Some(&policy))?
            }
        };
        Ok(match self.layer.trains() {
            false => traced,
            true => traced.trained(Update {
                add: Arc::new(|b: &Builder, _: &Sums<'_>| derivative(b)),
                takes_stacks: false,
            }),
        })
    }

    fn build(&self, b: &Builder) -> Result<Tensor, KernelError> {
        let input = |name: &str, dims: &[usize]| b.input(name, Shape::new(DType::BF16, dims), &[]);
        let precision = Precision {
            weights: DType::BF16,
            activations: DType::BF16,
        };
        let m = b.root("m");
        let y = match (self.layer, &self.dims[..]) {
            (Layer::Attention | Layer::AttentionTraining, &[batch, queries, keys, heads, size]) => {
                let of = |name, length| input(name, &[batch, length, heads * size]);
                let qkv = [of("q", queries)?, of("k", keys)?, of("v", keys)?];
                let causal = false;
                nn::attention(&m, qkv, Attention { heads, causal }, precision)?
            }
            (Layer::CausalAttention, &[batch, tokens, heads, size]) => {
                let of = |name| input(name, &[batch, tokens, heads * size]);
                let qkv = [of("q")?, of("k")?, of("v")?];
                let causal = true;
                nn::attention(&m, qkv, Attention { heads, causal }, precision)?
            }
            (
                Layer::GroupNorm | Layer::GroupNormSilu | Layer::GroupNormSiluTraining,
                &[batch, height, width, channels, groups],
            ) => {
                let x = input("x", &[batch, height, width, channels])?;
                let silu = self.layer != Layer::GroupNorm;
                let norm = GroupNorm {
                    groups,
                    epsilon: 1e-5,
                    activation: silu.then_some(Activation::Silu),
                };
                nn::group_norm(&m, x, norm, precision)?
            }
            (Layer::LayerNorm, &[batch, tokens, features]) => {
                nn::layer_norm(&m, input("x", &[batch, tokens, features])?, 1e-5, precision)?
            }
            (Layer::GatedGelu | Layer::GatedGeluTraining, &[batch, tokens, features]) => {
                nn::gated_gelu(&m, input("x", &[batch, tokens, features])?)?
            }
            (
                Layer::UpsampleNearest2x | Layer::UpsampleNearest2xTraining,
                &[batch, height, width, channels],
            ) => nn::upsample_nearest_2x(&m, input("x", &[batch, height, width, channels])?)?,
            (Layer::Upsample2x, &[batch, height, width, channels]) => {
                let x = input("x", &[batch, height, width, channels])?;
                nn::upsample_2x(&m, x, [2 * height, 2 * width], precision)?
            }
            (Layer::Linear | Layer::LinearTraining, &[batch, tokens, inputs, outputs]) => {
                let x = input("x", &[batch, tokens, inputs])?;
                nn::linear(&m, x, Linear::new(outputs, "embed", "mlp"), precision)?
            }
            (
                Layer::Conv2d | Layer::Conv2dTraining,
                &[batch, height, width, inputs, outputs, kernel],
            ) => {
                let x = input("x", &[batch, height, width, inputs])?;
                nn::conv2d(&m, x, Conv2d::same(outputs, kernel), precision)?
            }
            (Layer::TransformerBlock, &[batch, tokens, keys, heads, size]) => {
                let x = input("x", &[batch, tokens, heads * size])?;
                let text = ["k", "v"].map(|name| input(name, &[batch, keys, heads * size]));
                let [k, v] = text;
                transformer_block(&m, x, [k?, v?], heads, precision)?
            }
            (layer, dims) => {
                let count = dims.len();
                return Err(b
                    .invalid(format!("{layer} has not {count} dimensions"))
                    .into());
            }
        };
        Ok(y)
    }
}

/// Adds the gradients of all inputs, given that of the result.
fn derivative(b: &Builder) -> Result<(), GraphError> {
    // Of layers that are quantized, gradients are rounded at random.
    b.input(ROUNDING_KEY, Shape::new(DType::U32, [2]), &[])?;
    let inputs: Vec<Tensor> = b.with_graph(|graph| {
        let nodes = graph.nodes.iter().zip(0..);
        let inputs = nodes
            .filter(|(node, _)| matches!(node.op, Op::Parameter(_)) && node.shape.dtype.is_float());
        inputs.map(|(_, id)| b.tensor(id)).collect()
    });
    let outputs = b.take_outputs();
    for (name, y) in outputs {
        b.output(&name.name, y, None)?;
        let gradient = b.input("gradient", b.shape(y), &[])?;
        let gradients = vjp(b, &[(y, gradient)], &inputs)?;
        for (place, gradient) in gradients.into_iter().enumerate() {
            b.output(&format!("gradient.{place}"), gradient, None)?;
        }
    }
    Ok(())
}

/// A block as UNets have it; k and v are of the text.
fn transformer_block(
    b: &Builder,
    x: Tensor,
    [k, v]: [Tensor; 2],
    heads: usize,
    precision: Precision,
) -> Result<Tensor, GraphError> {
    let features = b.dims(x).last().copied().unwrap_or(0);
    let linear = |name: &str, x: Tensor, outputs: usize| {
        nn::linear(
            &b.scope(name),
            x,
            Linear::new(outputs, "embed", "mlp"),
            precision,
        )
    };
    let norm = |name: &str, x: Tensor| nn::layer_norm(&b.scope(name), x, 1e-5, precision);
    let causal = false;
    let attention = |name: &str, q: Tensor, k: Tensor, v: Tensor| {
        nn::attention(
            &b.scope(name),
            [q, k, v],
            Attention { heads, causal },
            precision,
        )
    };
    let y = norm("norm1", x)?;
    let own = ["to_q", "to_k", "to_v"].map(|name| linear(name, y, features));
    let [own_q, own_k, own_v] = own;
    let y = attention("attn1", own_q?, own_k?, own_v?)?;
    let x = b.add(linear("to_out", y, features)?, x)?;
    let y = norm("norm2", x)?;
    let q = linear("to_text_q", y, features)?;
    let y = attention("attn2", q, k, v)?;
    let x = b.add(linear("to_text_out", y, features)?, x)?;
    let y = norm("norm3", x)?;
    let y = nn::gated_gelu(b, linear("proj", y, 8 * features)?)?;
    b.add(linear("net", y, features)?, x)
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.layer.name())?;
        for (name, size) in self.dims() {
            write!(f, " {name}={size}")?;
        }
        match self.quantization {
            Some(quantization) => write!(f, " in {quantization}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layer_is_a_program() {
        for layer in Layer::ALL {
            let modes = LayerQuantization::ALL.map(Some);
            let modes = modes.into_iter().filter(|_| layer.contracts());
            for mode in modes.chain([None]) {
                let case = Case::new(layer, &[], mode).unwrap();
                assert_eq!(case.traced().unwrap().graph.outputs.len(), 1, "{case}");
            }
        }
    }

    #[test]
    fn a_wrong_dimension_is_an_error_that_names_them() {
        let error = |given: &str| {
            let case = Case::new(Layer::LayerNorm, &[given.to_owned()], None);
            case.unwrap_err().to_string()
        };
        let expected = "is no dimension of layer_norm; it has batch=N, tokens=N, features=N";
        assert_eq!(error("rows=3"), format!("\"rows=3\" {expected}"));
        assert_eq!(error("tokens=0"), format!("\"tokens=0\" {expected}"));
        let error = Case::new(Layer::LayerNorm, &[], Some(LayerQuantization::Int8)).unwrap_err();
        assert!(error.to_string().contains("nothing to quantize"), "{error}");
    }
}
