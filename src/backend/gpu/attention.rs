//! cuDNN's fused attention, as XLA's GPU compiler calls it: scores are never stored whole.

use serde_json::{Value as Json, json};

use crate::backend::attention::{self, is_attention};
use crate::dtype::DType;
use crate::graph::eval::Value;
use crate::graph::{Batch, Configuration, CustomCall, InferError, constraint};
use crate::shape::Shape;

use super::Features;

/// `softmax(q k^T * scale) v` for each head; operands and result are bf16 `[batch, length, heads, size]`. If `causal`, a query
/// sees the keys up to its own place.
#[derive(Clone, Debug, PartialEq)]
pub struct FusedAttention {
    scale: f64,
    size: usize,
    causal: bool,
}

/// What the size of a head is a multiple of: cuDNN reads 16 bytes at once.
const SIZE_STEP: usize = 8;

impl FusedAttention {
    /// The attention of these operands, if cuDNN takes their type and shapes.
    pub fn of([q, k, v]: [&Shape; 3], causal: bool) -> Option<FusedAttention> {
        let size = *q.dims.get(3)?;
        let is_bf16 = q.dtype == DType::BF16 && k.dtype == DType::BF16;
        let has_values = q.count() > 0 && k.count() > 0;
        let fits = is_attention(q, k, v) && size.is_multiple_of(SIZE_STEP);
        (fits && is_bf16 && has_values).then(|| FusedAttention {
            scale: 1.0 / (size as f64).sqrt(),
            size,
            causal,
        })
    }

    /// Whether the GPU's kernels hold heads of this size.
    pub fn fits(&self, features: Features) -> bool {
        self.size <= features.largest_head
    }
}

impl CustomCall for FusedAttention {
    fn target(&self) -> &'static str {
        "__cudnn$fmhaSoftmax"
    }

    fn name(&self) -> &'static str {
        "attention"
    }

    fn batch(&self, operands: &[&Shape]) -> Option<Batch> {
        Some(Batch::first(operands.len()))
    }

    /// XLA's `GpuBackendConfig` (`xla/service/gpu/backend_configs.proto`), with the dimension numbers of both products. The
    /// scores are `[batch, heads, queries, keys]`.
    fn configuration(&self, operands: &[&Shape]) -> Configuration {
        let [batch, queries, heads] = [0, 1, 2].map(|d| operands[0].dims[d].to_string());
        let keys = operands[1].dims[1].to_string();
        let config = json!({
            "cudnn_fmha_backend_config": {
                "algorithm": {
                    "algo_id": "0",
                    "math_type": "TENSOR_OP_MATH",
                    "tuning_knobs": { "17": "1", "24": "0" },
                    "is_cudnn_frontend": true,
                    "workspace_size": "0",
                },
                "fmha_scale": self.scale,
                "dropout_rate": 0.0,
                "seed": "0",
                "sliding_window_length": 0,
                "max_seg_per_batch": 1,
                "is_paged_attention": false,
                "is_flash_attention": true,
                "mask_type": if self.causal { "CAUSAL" } else { "NO_MASK" },
                "intermediate_tensor_shape": {
                    "element_type": "BF16",
                    "dimensions": [batch, heads, queries, keys],
                    "is_dynamic_dimension": [false, false, false, false],
                    "layout": { "minor_to_major": ["3", "2", "1", "0"] },
                },
                "bmm1_dot_dimension_numbers": dot(["3", "3"], [["0", "2"], ["0", "2"]]),
                "bmm2_dot_dimension_numbers": dot(["3", "1"], [["0", "1"], ["0", "2"]]),
            },
        });
        Configuration::Text(config.to_string())
    }

    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError> {
        let &[q, k, v] = operands else {
            return Err(InferError::OperandCount {
                expected: 3,
                found: operands.len(),
            });
        };
        match FusedAttention::of([q, k, v], self.causal).as_ref() == Some(self) {
            true => Ok(q.clone()),
            false => Err(constraint(
                "cuDNN's attention",
                format!(
                    "query {q}, key {k} and value {v} are not bf16 [batch, length, heads, {}]",
                    self.size
                ),
            )),
        }
    }

    fn flops(&self, operands: &[&Shape], result: &Shape) -> u64 {
        (4 * operands[1].dims[1] as u64).saturating_mul(result.count() as u64)
    }

    /// `[batch, heads, length, size]`.
    fn returned_order(&self) -> Option<&'static [usize]> {
        Some(&[0, 2, 1, 3])
    }

    fn evaluate(&self, operands: &[&Value], result: Shape) -> Value {
        attention::evaluate(operands, self.scale, self.causal, result)
    }
}

/// The dimensions that a product contracts, and those of its batch, of the lhs and of the rhs.
fn dot(contracted: [&str; 2], batch: [[&str; 2]; 2]) -> Json {
    json!({
        "lhs_contracting_dimensions": [contracted[0]],
        "rhs_contracting_dimensions": [contracted[1]],
        "lhs_batch_dimensions": batch[0],
        "rhs_batch_dimensions": batch[1],
    })
}
