//! Attention, norms and gates, and their derivatives.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::backend::attention::has_quantized_products;
use crate::dtype::DType;
use crate::graph::{Builder, Composite, Graph, GraphError, Op, Tensor};

use super::super::attention::takes;
use super::super::claim::{attention_scale, layer_kernel};
use super::super::kernel::{Gradient, Kernel, call};

/// Whether [`Layers`] takes a composite of bf16, or the derivative of one: attention without a mask whose products are not quantized,
/// norms, and gated GELU.
pub fn claims_in_training(kind: &Composite, body: &Graph) -> bool {
    let shapes: Vec<_> = body.inputs.iter().map(|input| &input.shape).collect();
    let (layer, of_operand) = kind.layer();
    let results = of_operand.map_or(0, |_| layer.results_in_gradient());
    let operands = shapes.len().saturating_sub(results);
    let fits = layer.has_gradient(operands)
        && shapes[0].dtype == DType::BF16
        && match layer {
            Composite::Attention { .. } => takes(shapes[0], shapes[1], shapes[2]),
            // XLA's own operations.
            Composite::UpsampleNearest2x => false,
            _ => true,
        };
    let results = body.outputs.iter().map(|y| &body.nodes[y.node as usize]);
    fits && shapes.iter().all(|shape| shape.count() > 0)
        && (of_operand.is_some() || results.into_iter().all(|y| y.shape.dtype == DType::BF16))
        && !has_quantized_products(body)
}

/// The layers of a training step.
pub(super) struct Layers<'a> {
    graph: &'a Graph,
    /// The operands of derivatives whose weight or bias is trained.
    affine: HashSet<&'a [u32]>,
    /// The gradients of a layer's operands, by the nodes that they are computed from: one call gives all.
    gradients: HashMap<&'a [u32], (&'a Composite, Vec<Tensor>)>,
}

impl<'a> Layers<'a> {
    pub(super) fn of(graph: &'a Graph) -> Layers<'a> {
        let live = graph.nodes.iter().zip(graph.live_nodes());
        let affine = live.filter_map(|(node, live)| match &node.op {
            Op::Composite { kind, .. } if live => match kind {
                Composite::Gradient { operand, .. } if *operand > 0 => Some(&node.operands[..]),
                _ => None,
            },
            _ => None,
        });
        Layers {
            graph,
            affine: affine.collect(),
            gradients: HashMap::new(),
        }
    }

    /// The kernel's call in place of node `i`, if that is a layer or a gradient of one which the kernels compute.
    ///
    /// # Errors
    /// When the graph is ill-typed.
    pub(super) fn claim(
        &mut self,
        b: &Builder,
        i: usize,
        copies: &[Tensor],
    ) -> Result<Option<Tensor>, GraphError> {
        let node = &self.graph.nodes[i];
        let Op::Composite { kind, body } = &node.op else {
            return Ok(None);
        };
        if !claims_in_training(kind, body) {
            return Ok(None);
        }
        let operands = node.operands.iter().map(|id| copies[*id as usize]);
        let operands: Vec<Tensor> = operands.collect();
        let Composite::Gradient { of, operand } = kind else {
            let Some(kernel) = layer_kernel(kind, &body.inputs[0].shape) else {
                return Ok(None);
            };
            return call(b, kernel, &operands).map(Some);
        };
        let affine = self.affine.contains(&node.operands[..]);
        let gradient = match **of {
            Composite::Attention { .. } => Gradient::Attention {
                scale: attention_scale(&body.inputs[0].shape),
            },
            Composite::GroupNorm {
                groups,
                epsilon,
                silu,
            } => Gradient::GroupNorm {
                groups,
                epsilon: epsilon as f32,
                silu,
                affine,
            },
            Composite::LayerNorm { epsilon } => Gradient::LayerNorm {
                epsilon: epsilon as f32,
                affine,
            },
            Composite::GatedGelu => Gradient::Geglu,
            _ => return Ok(None),
        };
        if let Some((kind, found)) = self.gradients.get(&node.operands[..])
            && **kind == **of
        {
            return Ok(Some(found[*operand]));
        }
        let found = b.call_in_place(Arc::new(Kernel::Gradient(gradient)), &operands)?;
        let of_operand = found[*operand];
        self.gradients.insert(&node.operands, (of, found));
        Ok(Some(of_operand))
    }
}
