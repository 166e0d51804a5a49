//! Products and convolutions of bf16 whose operands are packed in the same call: forward, and both of the derivative, with
//! the bias and the rounding that follow them.

use std::collections::HashMap;

use crate::backend::follow;
use crate::dtype::DType;
use crate::graph::{
    Builder, ConvDims, ConvLayout, DotDims, Graph, GraphError, Node, Op, PadDim, Tensor,
};
use crate::shape::Shape;

use super::super::kernel::{self, Kernel, ProductForm, Window, call};
use super::{Terms, Users, matrices, terms_of_dot};

/// The products that the kernel takes, by the node whose value it gives.
pub(super) fn products<'a>(graph: &'a Graph, users: &Users) -> HashMap<usize, Product<'a>> {
    let live = (0..graph.nodes.len()).filter(|i| !users[*i].is_empty());
    live.filter_map(|i| {
        let product = product(graph, i)?;
        if product.result == DType::BF16 {
            return Some((i, product));
        }
        let fits = |of: u32| graph.nodes[of as usize].shape.dims == [product.columns(graph)];
        let (scaled, scale) = match follow::scale(graph, users, i) {
            Some((node, scale)) if fits(scale) => (node, Some(scale)),
            _ => (i, None),
        };
        let followed = follow::bias_and_rounding(graph, users, scaled);
        // Where the sum has another bias than the kernel's, the product is claimed without it.
        let (root, bias, result) = match followed.bias.is_none_or(fits) {
            true => (followed.root, followed.bias, followed.result),
            false => (scaled, None, DType::F32),
        };
        let product = Product {
            scale,
            bias,
            result,
            ..product
        };
        Some((root, product))
    })
    .collect()
}

pub(super) struct Product<'a> {
    operands: [u32; 2],
    kind: Kind<'a>,
    scale: Option<u32>,
    bias: Option<u32>,
    result: DType,
    /// The product itself, whose dimensions are those of the result.
    node: usize,
}

enum Kind<'a> {
    Dot {
        terms: usize,
        places: [Terms; 2],
    },
    Convolution(Window),
    /// The derivative of a convolution by its image, and from one value of the gradient to the next.
    ImageGradient(Window, &'a [usize]),
    /// The derivative of a convolution by its kernel.
    KernelGradient(Window),
}

/// Node `i` as a product that the kernel takes, without what follows it.
fn product(graph: &Graph, i: usize) -> Option<Product<'_>> {
    let node = &graph.nodes[i];
    let shape = |id: u32| &graph.nodes[id as usize].shape;
    let of_bf16 = node.operands.len() == 2
        && node
            .operands
            .iter()
            .all(|id| shape(*id).dtype == DType::BF16)
        && matches!(node.shape.dtype, DType::F32 | DType::BF16)
        && node.shape.count() > 0;
    if !of_bf16 {
        return None;
    }
    let [lhs, rhs] = [node.operands[0], node.operands[1]];
    let (operands, kind) = match &node.op {
        Op::DotGeneral {
            dims, quant: None, ..
        } => ([lhs, rhs], dot(dims, [shape(lhs), shape(rhs)])?),
        Op::Convolution {
            dims, quant: None, ..
        } => convolution(graph, dims, node)?,
        _ => return None,
    };
    Some(Product {
        operands: [operands[0], stored(graph, operands[1], &kind)],
        kind,
        scale: None,
        bias: None,
        result: node.shape.dtype,
        node: i,
    })
}

/// The integers that rhs `id` is in bf16, if the kernel takes them; otherwise `id` itself.
fn stored(graph: &Graph, id: u32, kind: &Kind<'_>) -> u32 {
    let node = &graph.nodes[id as usize];
    let narrow = |of: u32| graph.nodes[of as usize].shape.dtype == DType::S8;
    match (&node.op, kind) {
        (Op::Convert(_), Kind::Dot { .. } | Kind::Convolution(_) | Kind::ImageGradient(..))
            if narrow(node.operands[0]) =>
        {
            node.operands[0]
        }
        _ => id,
    }
}

fn dot(dims: &DotDims, [lhs, rhs]: [&Shape; 2]) -> Option<Kind<'static>> {
    let places = terms_of_dot(dims, [lhs.rank(), rhs.rank()])?;
    let terms = dims.lhs_contract.iter().map(|d| lhs.dims[*d]).product();
    let pairs = usize::is_multiple_of(terms, 2) || places == [Terms::First; 2];
    (terms > 0 && pairs).then_some(Kind::Dot { terms, places })
}

fn swapped(layout: &ConvLayout) -> ConvLayout {
    ConvLayout {
        batch: layout.feature,
        feature: layout.batch,
        spatial: layout.spatial.clone(),
    }
}

/// The convolution of `node` and its operands in the kernel's order.
fn convolution<'a>(graph: &Graph, dims: &'a ConvDims, node: &Node) -> Option<([u32; 2], Kind<'a>)> {
    let [lhs, rhs] = [node.operands[0], node.operands[1]];
    let shape = |id: u32| &graph.nodes[id as usize].shape;
    let ones = |values: &[usize]| values.iter().all(|n| *n == 1);
    let low = |at: usize| usize::try_from(dims.padding[at].0).ok();
    if dims.feature_groups != 1 || dims.batch_groups != 1 || dims.strides.len() != 2 {
        return None;
    }
    let low = [low(0)?, low(1)?];
    let image = ConvLayout::channels_last(2);
    let kernel = ConvLayout::channels_first(2);
    if dims.lhs == swapped(&image) && dims.rhs == swapped(&image) && dims.out == swapped(&kernel) {
        let plain = ones(&dims.strides) && ones(&dims.lhs_dilation);
        let window = Window {
            size: [node.shape.dims[2], node.shape.dims[3]],
            strides: [dims.rhs_dilation[0], dims.rhs_dilation[1]],
            padding: low.map(|low| (low, 0)),
        };
        // The gradient is what the kernel moves over.
        let window = window.of_result(shape(lhs), shape(rhs))?;
        return plain.then_some(([rhs, lhs], Kind::KernelGradient(window)));
    }
    let high = |at: usize| usize::try_from(dims.padding[at].1).ok();
    let padding = [(low[0], high(0)?), (low[1], high(1)?)];
    let channels = shape(lhs).dims[dims.lhs.feature];
    let images = dims.lhs == image && dims.out == image && ones(&dims.rhs_dilation);
    if !images || channels == 0 || !channels.is_multiple_of(2) {
        return None;
    }
    let window = Window {
        size: [0, 1].map(|at| shape(rhs).dims[dims.rhs.spatial[at]]),
        strides: [dims.strides[0], dims.strides[1]],
        padding,
    };
    if dims.rhs == kernel && ones(&dims.lhs_dilation) {
        return Some(([lhs, rhs], Kind::Convolution(window)));
    }
    if dims.rhs != swapped(&kernel) || !ones(&dims.strides) {
        return None;
    }
    let weight = match &graph.nodes[rhs as usize] {
        Node {
            op: Op::Reverse(dims),
            operands,
            ..
        } if dims[..] == kernel.spatial[..] => operands[0],
        _ if window.taps() == 1 => rhs,
        _ => return None,
    };
    let kind = Kind::ImageGradient(window, &dims.lhs_dilation);
    Some(([lhs, weight], kind))
}

impl Product<'_> {
    /// Columns of the kernel's result, which a bias is added to; 0 where there can be none.
    fn columns(&self, graph: &Graph) -> usize {
        let rhs = &graph.nodes[self.operands[1] as usize].shape;
        match &self.kind {
            Kind::Dot { terms, .. } => rhs.count() / terms,
            Kind::Convolution(_) => rhs.dims[0],
            Kind::ImageGradient(..) => rhs.dims[1],
            Kind::KernelGradient(_) => 0,
        }
    }

    pub(super) fn call(
        &self,
        b: &Builder,
        graph: &Graph,
        copies: &[Tensor],
    ) -> Result<Tensor, GraphError> {
        let copy = |id: u32| copies[id as usize];
        let [lhs, rhs] = self.operands.map(copy);
        let (form, operands) = match &self.kind {
            Kind::Dot { terms, places } => {
                let (operands, [lhs_transposed, rhs_transposed]) =
                    matrices(b, [lhs, rhs], *places, *terms)?;
                let form = ProductForm::Matrix {
                    lhs_transposed,
                    rhs_transposed,
                };
                (form, operands)
            }
            Kind::Convolution(window) => (ProductForm::Convolution(window.clone()), [lhs, rhs]),
            Kind::ImageGradient(window, dilation) => {
                let gradient = dilated(b, lhs, dilation)?;
                (ProductForm::ImageGradient(window.clone()), [gradient, rhs])
            }
            Kind::KernelGradient(window) => {
                (ProductForm::KernelGradient(window.clone()), [lhs, rhs])
            }
        };
        let mut operands = operands.to_vec();
        for of_columns in [self.scale, self.bias].into_iter().flatten() {
            operands.push(b.convert(copy(of_columns), DType::F32)?);
        }
        let kernel = kernel::Product {
            form,
            scale: self.scale.is_some(),
            bias: self.bias.is_some(),
            result: self.result,
        };
        let y = call(b, Kernel::Product(kernel), &operands)?;
        b.reshape(y, &graph.nodes[self.node].shape.dims)
    }
}

/// A channels-last image with zeros between its pixels.
fn dilated(b: &Builder, image: Tensor, dilation: &[usize]) -> Result<Tensor, GraphError> {
    if dilation.iter().all(|n| *n == 1) {
        return Ok(image);
    }
    let between = |at: usize| PadDim {
        interior: dilation[at] - 1,
        ..PadDim::default()
    };
    let none = PadDim::default();
    b.pad(image, 0.0, &[none, between(0), between(1), none])
}
