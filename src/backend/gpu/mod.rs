//! XLA's GPU backend, and the calls of NVIDIA's libraries that its compiler knows.

mod attention;
mod products;
mod rewrite;
mod rows;
mod triton;

use std::borrow::Cow;
use std::sync::Arc;

use crate::backend::attention::has_quantized_products;
use crate::graph::{Composite, Graph, GraphError, Op, Tensor};

pub use attention::FusedAttention;
pub use rewrite::{rewrite, rewrite_training};
pub use rows::{RowKernel, fuse};

/// What a GPU has for this program's calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// The size of the largest heads that cuDNN's fused attention takes.
    pub largest_head: usize,
}

impl Features {
    /// Of a GPU of this compute capability, such as `9.0`; `None` where cuDNN has no fused attention for it. Source: the
    /// limits of cuDNN 9's scaled dot product attention.
    pub fn of_compute_capability(capability: &str) -> Option<Features> {
        let (major, _) = capability.split_once('.')?;
        let largest_head = match major.parse().ok()? {
            0..8 => return None,
            8 => 128,
            _ => 256,
        };
        Some(Features { largest_head })
    }
}

/// Switches of XLA's compiler for GPUs. By itself it makes one product of those that read the same activation, such as the queries,
/// keys and values of an attention: in each step it then joins their weights, and takes the result apart for the attention's call.
/// In SDXL's step on an H100 an attention's three products of 2,048 rows took 35 us one by one; joined 29, with 7 for the weights
/// and 13 for the parts.
pub(super) const COMPILER_SWITCHES: [(&str, &str); 1] = [("xla_gpu_dot_merger_threshold_mb", "0")];

/// The graph with one product in place of those of 8 bits before an attention, if the program has one part of the batch and weights
/// whole, and, where the GPU has `features`, cuDNN's fused attention in place of attention in bf16 without masks.
///
/// # Errors
/// When the graph is ill-typed.
pub fn claim(graph: &Graph, features: Option<Features>, parts: usize) -> Result<Graph, GraphError> {
    let graph = match parts {
        1 => Cow::Owned(products::join_attention_products(graph)?),
        _ => Cow::Borrowed(graph),
    };
    let Some(features) = features else {
        return Ok(graph.into_owned());
    };
    graph.substitute(&mut |b, i, copies| {
        let node = &graph.nodes[i];
        let Op::Composite {
            kind: Composite::Attention { causal },
            body,
        } = &node.op
        else {
            return Ok(None);
        };
        let &[q, k, v] = &node.operands[..] else {
            return Ok(None);
        };
        let shapes = [q, k, v].map(|id| &graph.nodes[id as usize].shape);
        let kernel = FusedAttention::of(shapes, *causal);
        match kernel.filter(|kernel| kernel.fits(features) && !has_quantized_products(body)) {
            Some(kernel) => {
                let operands: [Tensor; 3] = [q, k, v].map(|id| copies[id as usize]);
                b.push(Op::CustomCall(Arc::new(kernel)), &operands)
                    .map(Some)
            }
            None => Ok(None),
        }
    })
}
