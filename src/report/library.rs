//! Calls of cuBLAS and cuDNN that the GPU compiler makes of dots and convolutions.

use crate::proto::xla::{HloInstructionProto, PrimitiveType, ShapeProto};

use super::instruction::BackendConfig;
use super::macs::{contraction_macs, convolution_macs, wider};
use super::program::{HloProgram, Site};

/// `__cublas$gemm`, `__cublas$lt$matmul` and its form for fp8.
const CUBLAS: &str = "__cublas$";
/// `__cudnn$convForward`, with a bias, as a graph, and the two derivatives.
const CUDNN_CONVOLUTION: &str = "__cudnn$conv";
const OF_INPUT: &str = "__cudnn$convBackwardInput";
const OF_KERNEL: &str = "__cudnn$convBackwardFilter";

pub(super) fn is_product(instruction: &HloInstructionProto) -> bool {
    let target = &instruction.custom_call_target;
    target.starts_with(CUBLAS) || target.starts_with(CUDNN_CONVOLUTION)
}

/// Products of two elements in a call, and the element type of its operands, the wider one where they differ; `None` for a form that
/// is not known.
pub(super) fn product_macs(program: &HloProgram<'_>, site: Site) -> Option<(PrimitiveType, u64)> {
    let instruction = program.instruction(site);
    let operand = |number| {
        let operand = program.operand(site, number)?;
        program.instruction(operand).shape.as_ref()
    };
    let (first, second, result) = (operand(0)?, operand(1)?, result(instruction)?);
    let macs = match instruction.custom_call_target.as_str() {
        OF_INPUT => convolution_macs(instruction, [result, second, first])?,
        OF_KERNEL => convolution_macs(instruction, [first, result, second])?,
        target if target.starts_with(CUDNN_CONVOLUTION) => {
            convolution_macs(instruction, [first, second, result])?
        }
        _ => {
            let config = BackendConfig::parse(program.backend_config(instruction));
            contraction_macs(first, result, &config.gemm_contraction()?)?
        }
    };
    Some((wider(first, second), macs))
}

/// What a call computes: its first result, beside which is memory to work in.
fn result(instruction: &HloInstructionProto) -> Option<&ShapeProto> {
    let shape = instruction.shape.as_ref()?;
    match shape.element_type() {
        PrimitiveType::Tuple => shape.tuple_shapes.first(),
        _ => Some(shape),
    }
}
