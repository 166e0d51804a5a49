//! Calls of kernels that are no code of the compiler's own (`tpu_custom_call`). It predicts no time for them.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::proto::xla::{HloModuleProto, PrimitiveType, ShapeProto};

use super::ReportError;
use super::instruction::{BackendConfig, bytes, op_name};
use super::program::{HloProgram, Site};

/// The custom call's target.
const TARGET: &str = "tpu_custom_call";

/// A call of a kernel: everything that its cycles depend on. Calls that differ only in their scope are equal.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct KernelCall {
    /// The end of its scope path: `attention`.
    pub name: String,
    /// The custom call's configuration, which holds the kernel's text.
    pub configuration: String,
    /// The operands' types in StableHLO: `2x4096x640xbf16`. They and the result are row-major.
    pub operands: Vec<String>,
    pub result: String,
    /// Operations of its products; a multiply and an add are two.
    pub flops: u64,
    /// Bytes of operands and result.
    pub bytes: u64,
}

/// The cycles of one run of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct KernelCycles {
    /// Simulated, and no less than `hbm_cycles`.
    pub cycles: u64,
    /// What its bytes take at the bandwidth of HBM.
    pub hbm_cycles: u64,
    /// What its products take at the chip's peak rate, in int8 or in bf16.
    pub product_cycles: u64,
    /// The share of the kernel's grid that was simulated, 0 to 1; the rest is as fast.
    pub simulated_share: f64,
}

/// The calls of a program, each once.
///
/// # Errors
/// [`ReportError::Malformed`] when the program's references do not resolve.
pub fn kernel_calls(module: &HloModuleProto) -> Result<BTreeSet<KernelCall>, ReportError> {
    let program = HloProgram::new(module)?;
    let computations = program.computations.iter().enumerate();
    let sites = computations.flat_map(|(comp, computation)| {
        (0..computation.proto.instructions.len()).map(move |index| Site { comp, index })
    });
    Ok(sites
        .filter_map(|site| KernelCall::at(&program, site))
        .collect())
}

impl KernelCall {
    /// Whether its products are of int8: this program's kernels round the activation that meets int8 weights, unless these are
    /// stored ones that are widened.
    pub fn multiplies_int8(&self) -> bool {
        let has_int8 = self.operands.iter().any(|operand| operand.ends_with("xi8"));
        has_int8 && !self.name.contains("stored")
    }

    /// The call at `site`; `None` where there is none.
    pub(super) fn at(program: &HloProgram<'_>, site: Site) -> Option<KernelCall> {
        let instruction = program.instruction(site);
        if instruction.opcode != "custom-call" || instruction.custom_call_target != TARGET {
            return None;
        }
        let text = program.backend_config(instruction);
        let configuration: Value = serde_json::from_slice(text).ok()?;
        let sites: Vec<Site> = program.operands(site).collect();
        let shape = |site: &Site| program.instruction(*site).shape.as_ref();
        let operands: Vec<&ShapeProto> = sites.iter().map(shape).collect::<Option<_>>()?;
        // An array that is an operand several times has parts that are read by themselves.
        let distinct: BTreeSet<Site> = sites.iter().copied().collect();
        let read = distinct.iter().filter_map(shape);
        let result = instruction.shape.as_ref()?;
        let path = op_name(instruction);
        Some(KernelCall {
            name: path.rsplit('/').next().unwrap_or(path).to_owned(),
            // The compiler adds notes of its own.
            configuration: json!({
                "custom_call_config": configuration["custom_call_config"],
                "scoped_memory_configs": configuration["scoped_memory_configs"],
            })
            .to_string(),
            flops: BackendConfig::parse(text).kernel_flops().unwrap_or(0),
            bytes: read.chain([result]).map(bytes).sum(),
            operands: operands
                .into_iter()
                .map(stablehlo_type)
                .collect::<Option<_>>()?,
            result: stablehlo_type(result)?,
        })
    }
}

/// `2x4096x640xbf16`; `None` for tuples and what else is no array.
fn stablehlo_type(shape: &ShapeProto) -> Option<String> {
    let element = shape.element_type();
    if matches!(
        element,
        PrimitiveType::Invalid
            | PrimitiveType::Tuple
            | PrimitiveType::OpaqueType
            | PrimitiveType::Token
    ) {
        return None;
    }
    let name = element.as_str_name().to_lowercase();
    let name = match name.split_at(1) {
        ("s", bits) if bits.starts_with(|c: char| c.is_ascii_digit()) => format!("i{bits}"),
        ("u", bits) => format!("ui{bits}"),
        _ if name == "pred" => "i1".to_owned(),
        _ => name,
    };
    let dims = shape.dimensions.iter().map(|d| format!("{d}x"));
    Some(dims.chain([name]).collect())
}
