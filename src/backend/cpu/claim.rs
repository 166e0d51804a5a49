//! The claims of the CPU plugin's kernels: one table.

use std::collections::HashMap;

use crate::backend::follow;
use crate::dtype::DType;
use crate::graph::{
    Binary, Builder, Composite, Contraction, Graph, GraphError, Node, NumericsConvention, Op,
    Tensor, TensorFormat,
};
use crate::quant::scale_of;
use crate::shape::Shape;

use super::attention;
use super::kernel::{Contract, Kernel, Stored, call, group};
use super::pack::{
    channels_last_kernel, columns_of_kernel, packed, packed_integers, packed_scales, start,
};
use super::phases;
use super::quantized::MOST_INT8_TERMS;
use super::rewrite::is_plain_convolution;

type Result<T> = std::result::Result<T, GraphError>;

/// The graph with the CPU plugin's kernels in place of
///
/// - products of bf16, f32 or int8 activations with weights that are known when they are loaded, and convolutions of images
///   whose channels come last, together with their scales, the bias and the rounding that follow them; weights that are
///   stored in int8 or int4 stay so,
/// - attention in bf16 and f32, and in bf16 norms (with SiLU after them), gated GELU, the range finding and rounding of int8.
///
/// Weights are packed for the kernels by operations on weights alone, which [`crate::graph::stage`] moves to where
/// weights are loaded. For programs of one partition.
///
/// # Errors
/// When the graph is ill-typed.
pub fn claim(graph: &Graph) -> Result<Graph> {
    let claims = Claims {
        graph,
        of_weights: graph.weight_only(),
        from_stored: graph.from_stored(),
        users: follow::users(graph),
    };
    let products = claims.products();
    graph.substitute(&mut |b, i, copies| {
        if let Some(product) = products.get(&i) {
            return claims.contract(b, product, copies).map(Some);
        }
        let node = &graph.nodes[i];
        let Op::Composite { kind, .. } = &node.op else {
            return Ok(None);
        };
        let operands: Vec<Tensor> = node.operands.iter().map(|o| copies[*o as usize]).collect();
        match claims.kernel(i, kind) {
            Some(Claim::Kernel(kernel)) => call(b, kernel, &operands).map(Some),
            Some(Claim::AbsMax { kept, format }) => {
                let absmax = call(b, Kernel::AbsMax { kept, scale: false }, &operands)?;
                scale_of(b, absmax, format).map(Some)
            }
            None => Ok(None),
        }
    })
}

/// What the scores of an attention to queries `[batch, length, heads, size]` are multiplied by.
pub(super) fn attention_scale(q: &Shape) -> f32 {
    (1.0 / (q.dims[3] as f64).sqrt()) as f32
}

/// The kernel that computes a layer whose first operand is `x`.
pub(super) fn layer_kernel(kind: &Composite, x: &Shape) -> Option<Kernel> {
    match kind {
        Composite::Attention { causal } => Some(Kernel::Attention {
            scale: attention_scale(x),
            causal: *causal,
        }),
        Composite::GroupNorm {
            groups,
            epsilon,
            silu,
        } => Some(Kernel::GroupNorm {
            groups: *groups,
            epsilon: *epsilon as f32,
            silu: *silu,
        }),
        Composite::LayerNorm { epsilon } => Some(Kernel::LayerNorm {
            epsilon: *epsilon as f32,
        }),
        Composite::GatedGelu => Some(Kernel::Geglu),
        _ => None,
    }
}

/// The replacement of a composite.
enum Claim {
    /// A kernel with the same operands.
    Kernel(Kernel),
    /// The kernel that finds the range, and the scale computed from it.
    AbsMax { kept: usize, format: TensorFormat },
}

/// A product with what follows it. Numbers are nodes.
struct Product {
    contraction: Contraction,
    lhs: u32,
    rhs: u32,
    /// The scales and zero points of a rhs whose integers are made floats before they are multiplied.
    dequantized: Option<Dequantized>,
    row_scale: Option<u32>,
    column_scale: Option<u32>,
    bias: Option<u32>,
    /// Whether a convolution is of `lhs` with every pixel twice in both directions.
    doubled: bool,
    /// The product itself, whose shape leads to that of the result.
    node: usize,
    result: DType,
}

/// What a rhs of integers stands for.
#[derive(Clone)]
struct Dequantized {
    /// The dimensions of the rhs along which scales lie.
    along: Vec<usize>,
    scale: u32,
    zero_point: Option<u32>,
}

/// Decides what the kernels take, by attributes, types and shapes.
struct Claims<'a> {
    graph: &'a Graph,
    of_weights: Vec<bool>,
    /// What is computed from stored values, and so in every run.
    from_stored: Vec<bool>,
    users: Vec<Vec<Option<usize>>>,
}

impl<'a> Claims<'a> {
    fn node(&self, id: u32) -> &'a Node {
        &self.graph.nodes[id as usize]
    }

    fn shape(&self, id: u32) -> &'a Shape {
        &self.node(id).shape
    }

    /// The replacement of the composite `kind` at node `i`. The table of claims, but for [`Claims::products`].
    fn kernel(&self, i: usize, kind: &Composite) -> Option<Claim> {
        let node = &self.graph.nodes[i];
        let x = self.shape(*node.operands.first()?);
        let all_bf16 = x.dtype == DType::BF16 && node.shape.dtype == DType::BF16;
        // Weights are computed with once; but XLA widens all of one to find its range.
        let runs_often = !self.of_weights[i];
        let kernel = match kind {
            Composite::Attention { .. } if runs_often => {
                let [q, k, v] = [0, 1, 2].map(|at| self.shape(node.operands[at]));
                let fits = attention::takes(q, k, v) && q.count() > 0 && k.count() > 0;
                layer_kernel(kind, q).filter(|_| fits && node.shape.dtype == q.dtype)
            }
            Composite::GroupNorm { .. } | Composite::LayerNorm { .. } | Composite::GatedGelu
                if all_bf16 && runs_often =>
            {
                layer_kernel(kind, x)
            }
            Composite::FindScale { kept, format } if all_bf16 && leads(kept) => {
                let kept = kept.len();
                if *format == TensorFormat::int8(NumericsConvention::Aqt) {
                    return Some(Claim::Kernel(Kernel::AbsMax { kept, scale: true }));
                }
                // Of the range that the kernel finds the scale is computed as the format says.
                let format = *format;
                let is_here = [NumericsConvention::Qwix, NumericsConvention::Narrow]
                    .map(TensorFormat::int8)
                    .contains(&format);
                return (is_here && runs_often).then_some(Claim::AbsMax { kept, format });
            }
            // The product that reads a rounded operand takes the rounding with it; updates are for `training`.
            Composite::BlockwiseAdamW(_)
            | Composite::Gradient { .. }
            | Composite::Attention { .. }
            | Composite::GroupNorm { .. }
            | Composite::LayerNorm { .. }
            | Composite::RmsNorm { .. }
            | Composite::Rotary
            | Composite::GatedGelu
            | Composite::UpsampleNearest2x
            | Composite::FindScale { .. }
            | Composite::RoundingNoise { .. }
            | Composite::Quantize { .. }
            | Composite::Dequantize { .. }
            | Composite::FakeQuantize { .. }
            | Composite::ScaledContraction { .. } => None,
        };
        kernel.map(Claim::Kernel)
    }

    /// The products that the kernel takes, by the node whose value it gives.
    fn products(&self) -> HashMap<usize, Product> {
        let mut products = HashMap::new();
        for i in 0..self.graph.nodes.len() {
            if self.users[i].is_empty() || self.of_weights[i] {
                continue;
            }
            if let Some(product) = self.product(i).filter(|product| self.fits(product)) {
                let product = self.of_image_before_doubling(product);
                let (root, product) = self.with_what_follows(product);
                products.insert(root, product);
            }
        }
        products
    }

    /// Node `i` as a product of bf16, of f32, of int8 with both scales, or of bf16 with weights in integers.
    fn product(&self, i: usize) -> Option<Product> {
        let node = &self.graph.nodes[i];
        let contraction = match &node.op {
            Op::DotGeneral {
                dims, quant: None, ..
            } => Contraction::Dot(dims.clone()),
            Op::Convolution {
                dims, quant: None, ..
            } => Contraction::Convolution(dims.clone()),
            Op::Composite {
                kind: Composite::ScaledContraction { contraction, .. },
                ..
            } => contraction.clone(),
            _ => return None,
        };
        let [lhs, mut rhs] = [node.operands[0], node.operands[1]];
        let dequantized = self.dequantized(rhs);
        // A float that is added is no zero point of the kernel.
        let zero_point = dequantized.as_ref().and_then(|d| d.zero_point);
        if zero_point.is_some_and(|id| self.shape(id).dtype != DType::S8) {
            return None;
        }
        if dequantized.is_some() {
            rhs = self.node(rhs).operands[0];
        }
        let types = [lhs, rhs].map(|id| self.shape(id).dtype);
        let is_stored = [DType::S8, DType::S4].contains(&types[1]);
        let (row_scale, column_scale) = match node.operands[2..] {
            [] if types == [DType::BF16; 2] => (None, None),
            // Weights that are made again in every run would be packed in every run.
            [] if types == [DType::F32; 2] && !self.from_stored[rhs as usize] => (None, None),
            [] if types[0] == DType::BF16 && dequantized.is_some() && is_stored => (None, None),
            [column] if types[0] == DType::BF16 && is_stored => (None, Some(column)),
            [row, column] if types == [DType::S8; 2] => (Some(row), Some(column)),
            // The scale of the activation is recorded, and that of the columns has it.
            [column] if types == [DType::S8; 2] => (None, Some(column)),
            _ => return None,
        };
        (node.shape.dtype == DType::F32).then_some(Product {
            contraction,
            lhs,
            rhs,
            dequantized,
            row_scale,
            column_scale,
            bias: None,
            doubled: false,
            node: i,
            result: DType::F32,
        })
    }

    /// The same product of the image whose pixels are repeated for it, if it is one that [`phases::of_doubled`] can compute.
    fn of_image_before_doubling(&self, product: Product) -> Product {
        let doubled = self.node(product.lhs);
        let is_doubled = matches!(
            &doubled.op,
            Op::Composite {
                kind: Composite::UpsampleNearest2x,
                ..
            }
        );
        let is_float = product.dequantized.is_none() && self.shape(product.rhs).dtype.is_float();
        let is_known = match &product.contraction {
            Contraction::Convolution(dims) => phases::takes(dims, self.shape(product.rhs)),
            Contraction::Dot(_) => false,
        };
        match is_doubled && is_float && is_known {
            true => Product {
                lhs: doubled.operands[0],
                doubled: true,
                ..product
            },
            false => product,
        }
    }

    /// The integers and scales that node `id` is made of.
    fn dequantized(&self, id: u32) -> Option<Dequantized> {
        let node = self.node(id);
        let Op::Composite {
            kind:
                Composite::Dequantize {
                    along,
                    result: DType::BF16,
                    ..
                },
            ..
        } = &node.op
        else {
            return None;
        };
        Some(Dequantized {
            along: along.clone(),
            scale: node.operands[1],
            zero_point: node.operands.get(2).copied(),
        })
    }

    /// Whether a product multiplies rows with weights as the kernel can.
    fn fits(&self, product: &Product) -> bool {
        let [lhs, rhs] = [product.lhs, product.rhs].map(|id| self.shape(id));
        if self.of_weights[product.lhs as usize] || !self.of_weights[product.rhs as usize] {
            return false;
        }
        let (terms, channels) = match &product.contraction {
            Contraction::Dot(dims) => {
                let is_matrix = dims.lhs_batch.is_empty()
                    && dims.lhs_contract == [lhs.rank() - 1]
                    && dims.rhs_contract.len() == 1
                    && rhs.rank() == 2;
                if !is_matrix {
                    return false;
                }
                let terms = lhs.dims[lhs.rank() - 1];
                (terms, terms)
            }
            Contraction::Convolution(dims) => {
                if !is_plain_convolution(dims) {
                    return false;
                }
                let taps: usize = dims.rhs.spatial.iter().map(|d| rhs.dims[*d]).product();
                (taps * lhs.dims[3], lhs.dims[3])
            }
        };
        let exact = lhs.dtype != DType::S8 || terms <= MOST_INT8_TERMS;
        let groups = group(lhs.dtype).is_some_and(|group| channels.is_multiple_of(group));
        // A pair of channels has one scale.
        let scales = product
            .dequantized
            .as_ref()
            .is_none_or(|stored| (channels / 2).is_multiple_of(self.scale_groups(product, stored)));
        exact && groups && scales && self.graph.nodes[product.node].shape.count() > 0 && terms > 0
    }

    /// The dimensions of a rhs that are its columns and its channels.
    fn columns_and_channels(&self, product: &Product) -> [usize; 2] {
        match &product.contraction {
            Contraction::Dot(dims) => [1 - dims.rhs_contract[0], dims.rhs_contract[0]],
            Contraction::Convolution(dims) => [dims.rhs.batch, dims.rhs.feature],
        }
    }

    /// Parts of the channels that have a scale of their own.
    fn scale_groups(&self, product: &Product, stored: &Dequantized) -> usize {
        let [_, channels] = self.columns_and_channels(product);
        let place = stored.along.iter().position(|d| *d == channels);
        place.map_or(1, |place| self.shape(stored.scale).dims[place])
    }

    /// The product with the bias and the rounding to bf16 that are its value's only use, and the last node of them. The
    /// kernel widens a bias of bf16 by itself.
    fn with_what_follows(&self, mut product: Product) -> (usize, Product) {
        let followed = follow::bias_and_rounding(self.graph, &self.users, product.node);
        product.bias = followed.bias;
        product.result = followed.result;
        (followed.root, product)
    }

    /// The kernel's call in place of a product and what follows it.
    fn contract(&self, b: &Builder, product: &Product, copies: &[Tensor]) -> Result<Tensor> {
        let copy = |id: u32| copies[id as usize];
        // What is stored of a weight is its packed form.
        let unmarked = |id: u32| match self.node(id).op {
            Op::Stored => self.node(id).operands[0],
            _ => id,
        };
        // int4 that is multiplied as int8 is packed as that.
        let narrow = matches!(self.node(product.rhs).op, Op::Convert(DType::S8));
        let rhs = match narrow {
            true => b.convert(
                copy(unmarked(self.node(product.rhs).operands[0])),
                DType::S8,
            )?,
            false => copy(unmarked(product.rhs)),
        };
        let (matrix, window) = match &product.contraction {
            Contraction::Convolution(dims) if product.doubled => {
                let (kernel, _) = channels_last_kernel(b, rhs, dims)?;
                let bias = product.bias.map(copy);
                return phases::of_doubled(b, copy(product.lhs), kernel, bias, product.result);
            }
            Contraction::Convolution(dims) => columns_of_kernel(b, rhs, dims)?,
            Contraction::Dot(dims) => match dims.rhs_contract[..] {
                [0] => (b.transpose(rhs, &[1, 0])?, None),
                _ => (rhs, None),
            },
        };
        let columns = b.dims(matrix)[0];
        let element = b.dtype(matrix);
        let is_stored = b.dtype(copy(product.lhs)) == DType::BF16 && element != DType::BF16;
        let mut operands = vec![copy(product.lhs)];
        operands.push(match is_stored {
            true => packed_integers(b, matrix)?,
            false => packed(b, matrix)?,
        });
        if let Some(stored) = &product.dequantized {
            let groups = self.scale_groups(product, stored);
            let places = self.columns_and_channels(product);
            for id in [Some(stored.scale), stored.zero_point]
                .into_iter()
                .flatten()
            {
                let scale = copy(unmarked(id));
                operands.push(packed_scales(
                    b,
                    scale,
                    &stored.along,
                    places,
                    [columns, groups],
                )?);
            }
        }
        if b.dtype(operands[0]) == DType::S8 {
            operands[0] = self.unsigned(b, product.lhs, copies)?;
            operands.push(start(b, matrix)?);
        }
        let shape = &self.graph.nodes[product.node].shape;
        let leading = &shape.dims[..shape.rank() - 1];
        if let Some(scale) = product.row_scale {
            let ranks = [product.lhs, product.rhs].map(|id| self.shape(id).rank());
            let [places, _] = product.contraction.places(ranks);
            let scale = copy(follow::widened(self.graph, scale));
            operands.push(b.broadcast_in_dim(scale, &places, leading)?);
        }
        operands.extend(
            product
                .column_scale
                .map(|id| copy(follow::widened(self.graph, id))),
        );
        operands.extend(product.bias.map(copy));
        let kernel = Kernel::Contract(Contract {
            columns,
            window,
            stored: is_stored.then(|| {
                let dequantized = product.dequantized.as_ref();
                Stored {
                    element,
                    scale_groups: dequantized.map_or(0, |s| self.scale_groups(product, s)),
                    zero_point: dequantized.is_some_and(|s| s.zero_point.is_some()),
                }
            }),
            row_scale: product.row_scale.is_some(),
            column_scale: product.column_scale.is_some(),
            bias: product.bias.is_some(),
            result: product.result,
        });
        call(b, kernel, &operands)
    }

    /// An int8 operand plus 128: the processor's int8 product takes one unsigned factor. Where the operand was rounded
    /// by AQT's numerics, the kernel that rounds gives it so; else its top bit is flipped.
    fn unsigned(&self, b: &Builder, id: u32, copies: &[Tensor]) -> Result<Tensor> {
        let node = self.node(id);
        if let Op::Composite {
            kind: Composite::Quantize { kept, format },
            ..
        } = &node.op
            && *format == TensorFormat::int8(NumericsConvention::Aqt)
            && leads(kept)
            && self.shape(node.operands[0]).dtype == DType::BF16
        {
            let operands: Vec<Tensor> = node.operands.iter().map(|o| copies[*o as usize]).collect();
            return call(b, Kernel::Quantize, &operands);
        }
        let bits = b.push(Op::BitcastConvert(DType::U8), &[copies[id as usize]])?;
        let top = b.full(&b.shape(bits), 128.0)?;
        b.binary(Binary::Xor, bits, top)
    }
}

/// Whether dimensions are the first ones, in order.
fn leads(dims: &[usize]) -> bool {
    dims.iter().copied().eq(0..dims.len())
}
