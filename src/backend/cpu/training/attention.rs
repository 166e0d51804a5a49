//! Attention and its derivative: kernels that keep no scores.

use std::collections::HashMap;
use std::sync::Arc;

use crate::graph::{Builder, Composite, Graph, GraphError, Node, Op, Tensor};

use super::super::attention::takes;
use super::super::claim::call;
use super::super::kernel::Kernel;

/// Whether [`Attentions`] takes a composite: attention in bf16 without a mask whose products are not quantized, and its derivative.
pub fn claims_in_training(kind: &Composite, body: &Graph) -> bool {
    let is_attention = match kind {
        Composite::Attention { causal: false } => body.inputs.len() == 3,
        Composite::AttentionGradient { .. } => true,
        _ => false,
    };
    let shapes: Vec<_> = body.inputs.iter().map(|input| &input.shape).collect();
    let is_quantized = |node: &Node| matches!(node.op, Op::DotGeneral { quant: Some(_), .. });
    is_attention
        && shapes.len() >= 3
        && takes(shapes[0], shapes[1], shapes[2])
        && shapes.iter().all(|shape| shape.count() > 0)
        && body
            .outputs
            .iter()
            .all(|y| body.nodes[y.node as usize].shape.dtype == shapes[0].dtype)
        && !body.nodes.iter().any(is_quantized)
}

/// The attentions of a training step.
#[derive(Default)]
pub(super) struct Attentions<'a> {
    /// The gradients of an attention's operands, by the nodes that they are computed from: one call gives all.
    gradients: HashMap<&'a [u32], Vec<Tensor>>,
}

impl<'a> Attentions<'a> {
    /// The kernel's call in place of node `i`, if that is an attention or a gradient of one which the kernels compute.
    ///
    /// # Errors
    /// When the graph is ill-typed.
    pub(super) fn claim(
        &mut self,
        b: &Builder,
        graph: &'a Graph,
        i: usize,
        copies: &[Tensor],
    ) -> Result<Option<Tensor>, GraphError> {
        let node = &graph.nodes[i];
        let Op::Composite { kind, body } = &node.op else {
            return Ok(None);
        };
        if !claims_in_training(kind, body) {
            return Ok(None);
        }
        let operands = node.operands.iter().map(|id| copies[*id as usize]);
        let operands: Vec<Tensor> = operands.collect();
        let size = body.inputs[0].shape.dims[3];
        let scale = (1.0 / (size as f64).sqrt()) as f32;
        let Composite::AttentionGradient { operand } = kind else {
            let causal = false;
            return call(b, Kernel::Attention { scale, causal }, &operands).map(Some);
        };
        if let Some(found) = self.gradients.get(&node.operands[..]) {
            return Ok(Some(found[*operand]));
        }
        let kernel = Kernel::AttentionGradient { scale };
        let found = b.call_in_place(Arc::new(kernel), &operands)?;
        let of_operand = found[*operand];
        self.gradients.insert(&node.operands, found);
        Ok(Some(of_operand))
    }
}
