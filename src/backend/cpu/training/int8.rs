//! Products whose operands are rounded to int8 in the same call: forward, and both of the derivative, with range finding,
//! rounding and scales, and the bias where one follows. Operands are rounded in each product that multiplies them: that is
//! cheaper than writing and reading what was rounded.

use std::collections::HashMap;

use crate::backend::follow;
use crate::backend::rounding::{Noise, Rounded};
use crate::dtype::DType;
use crate::graph::{Binary, Builder, Composite, Contraction, Graph, GraphError, Node, Op, Tensor};

use super::super::kernel::{Form, Kernel, QuantizedProduct, call};
use super::super::pack::channels_last_kernel;
use super::super::quantized::MOST_INT8_TERMS;
use super::super::rewrite::is_plain_convolution;
use super::{Users, matrices, terms_of_dot};

/// The products that the kernel takes, by the node whose value it gives.
pub(super) fn products<'a>(graph: &'a Graph, users: &'a Users) -> HashMap<usize, Product<'a>> {
    Claims { graph, users }.products()
}

/// Numbers are nodes.
pub(super) struct Product<'a> {
    contraction: &'a Contraction,
    lhs: Rounded,
    rhs: u32,
    bias: Option<u32>,
    /// The product itself.
    node: usize,
}

impl Product<'_> {
    pub(super) fn call(
        &self,
        b: &Builder,
        graph: &Graph,
        copies: &[Tensor],
    ) -> Result<Tensor, GraphError> {
        let copy = |id: u32| copies[id as usize];
        // Values of bf16 stay what they are.
        let lhs = b.convert(copy(self.lhs.x), DType::F32)?;
        let rhs = b.convert(copy(self.rhs), DType::F32)?;
        let (form, mut operands) = match self.contraction {
            Contraction::Convolution(dims) => {
                let (kernel, window) = channels_last_kernel(b, rhs, dims)?;
                (Form::Convolution(window), vec![lhs, kernel])
            }
            Contraction::Dot(dims) => {
                let ranks = [lhs, rhs].map(|x| b.dims(x).len());
                let Some(places) = terms_of_dot(dims, ranks) else {
                    return Err(b.invalid("a product was claimed whose terms do not lie together"));
                };
                let sizes = b.dims(lhs);
                let terms = dims.lhs_contract.iter().map(|d| sizes[*d]).product();
                let (matrices, [lhs_transposed, rhs_transposed]) =
                    matrices(b, [lhs, rhs], places, terms)?;
                let form = Form::Matrix {
                    lhs_transposed,
                    rhs_transposed,
                };
                (form, matrices.to_vec())
            }
        };
        operands.extend(self.lhs.noise.map(|noise| copy(noise.key)));
        operands.extend(self.bias.map(copy));
        let kernel = QuantizedProduct {
            form,
            noise: self.lhs.noise.is_some(),
            bias: self.bias.is_some(),
            in_bf16: graph.nodes[self.lhs.x as usize].shape.dtype == DType::BF16,
        };
        let y = call(b, Kernel::QuantizedProduct(kernel), &operands)?;
        b.reshape(y, &graph.nodes[self.node].shape.dims)
    }
}

/// Decides what the kernel takes, by attributes, types and shapes.
struct Claims<'a> {
    graph: &'a Graph,
    users: &'a Users,
}

impl<'a> Claims<'a> {
    fn node(&self, id: u32) -> &'a Node {
        &self.graph.nodes[id as usize]
    }

    fn products(&self) -> HashMap<usize, Product<'a>> {
        let live = (0..self.graph.nodes.len()).filter(|i| !self.users[*i].is_empty());
        live.filter_map(|i| self.product(i))
            .map(|product| self.with_bias(product))
            .collect()
    }

    fn product(&self, i: usize) -> Option<Product<'a>> {
        let node = &self.graph.nodes[i];
        let Op::Composite {
            kind:
                Composite::ScaledContraction {
                    contraction,
                    lhs_scale: true,
                    rhs_scale: true,
                },
            ..
        } = &node.op
        else {
            return None;
        };
        let [lhs, rhs, lhs_scale, rhs_scale] = node.operands[..] else {
            return None;
        };
        let ranks = [lhs, rhs].map(|id| self.node(id).shape.rank());
        let [lhs_kept, rhs_kept] = contraction.kept(ranks);
        let lhs = Rounded::to(self.graph, lhs, lhs_scale, &lhs_kept)?;
        let rhs = Rounded::to(self.graph, rhs, rhs_scale, &rhs_kept)?;
        let product = Product {
            contraction,
            lhs,
            rhs: rhs.x,
            bias: None,
            node: i,
        };
        (rhs.noise.is_none() && self.fits(&product)).then_some(product)
    }

    fn fits(&self, product: &Product<'_>) -> bool {
        let [lhs, rhs] = [product.lhs.x, product.rhs].map(|id| &self.node(id).shape);
        let is_numbered = |noise: Noise| noise.rows_in_a_word.is_none();
        if lhs.dtype != rhs.dtype || !product.lhs.noise.is_none_or(is_numbered) {
            return false;
        }
        let terms = match product.contraction {
            Contraction::Dot(dims) => {
                if terms_of_dot(dims, [lhs.rank(), rhs.rank()]).is_none() {
                    return false;
                }
                // Noise counts the rows and columns of the tensor, which have to be the kernel's.
                let last = lhs.rank().saturating_sub(1);
                let contracted = &dims.lhs_contract;
                let is_matrix = *contracted == [last] || contracted.iter().copied().eq(0..last);
                if product.lhs.noise.is_some() && !is_matrix {
                    return false;
                }
                dims.lhs_contract.iter().map(|d| lhs.dims[*d]).product()
            }
            Contraction::Convolution(dims) => {
                if dims.strides.len() != 2 || !is_plain_convolution(dims) {
                    return false;
                }
                rhs.count() / rhs.dims[dims.rhs.batch].max(1)
            }
        };
        let result = &self.graph.nodes[product.node].shape;
        result.dtype == DType::F32 && result.count() > 0 && (1..=MOST_INT8_TERMS).contains(&terms)
    }

    /// The product with the bias that is its value's only use, and the last node of them.
    fn with_bias(&self, mut product: Product<'a>) -> (usize, Product<'a>) {
        let i = product.node;
        let [Some(user)] = self.users[i][..] else {
            return (i, product);
        };
        let node = &self.graph.nodes[user];
        if !matches!(node.op, Op::Binary(Binary::Add)) {
            return (i, product);
        }
        let columns = self.columns(&product);
        product.bias = follow::vector(self.graph, i as u32, node)
            .filter(|bias| *self.node(*bias).shape.dims == [columns])
            .filter(|bias| self.node(*bias).shape.dtype == DType::F32);
        match product.bias {
            Some(_) => (user, product),
            None => (i, product),
        }
    }

    fn columns(&self, product: &Product<'_>) -> usize {
        let rhs = &self.node(product.rhs).shape;
        match product.contraction {
            Contraction::Convolution(dims) => rhs.dims[dims.rhs.batch],
            Contraction::Dot(dims) => {
                let free = (0..rhs.rank()).filter(|d| !dims.rhs_contract.contains(d));
                free.map(|d| rhs.dims[d]).product()
            }
        }
    }
}
