//! Calls of kernels that are no code of the compiler's own (`tpu_custom_call`). It predicts no time for them.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::graph::{Configuration, CustomCall, Graph};
use crate::proto::xla::{HloModuleProto, PrimitiveType, ShapeProto};
use crate::shape::Shape;
use crate::shard::SharedCalls;

use super::ReportError;
use super::instruction::{BackendConfig, op_name};
use super::program::{HloProgram, Site};

/// The custom call's target.
const TARGET: &str = "tpu_custom_call";

/// A kernel with the types of what it is called with: everything that its simulation depends on.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct KernelCode {
    /// Its Mosaic module.
    pub text: String,
    /// The bytes of on-chip memory that it asks for.
    pub memory: u64,
    /// The operands' types in StableHLO: `2x4096x640xbf16`. They and the result are row-major.
    pub operands: Vec<String>,
    pub result: String,
}

/// A call of a kernel. Calls that differ only in the rest of their scope are equal.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct KernelCall {
    /// The end of its scope path: `attention`.
    pub name: String,
    pub code: KernelCode,
    /// Operations of its products; a multiply and an add are two.
    pub flops: u64,
    /// Bytes that the steps of its grid copy from and to HBM: a block that several steps read may be copied for each of them.
    pub bytes: u64,
}

/// The cycles of one run of a kernel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KernelCycles {
    /// Simulated, and no less than `hbm_cycles` and `product_cycles`.
    pub cycles: u64,
    /// What its bytes take at the bandwidth of HBM.
    pub hbm_cycles: u64,
    /// What its products take at the chip's peak rate, in int8 or in bf16.
    pub product_cycles: u64,
    /// The share of the kernel's grid that was simulated, 0 to 1; the rest is as fast.
    pub simulated_share: f64,
    /// Its code; `None` where the compiler wrote none, as it is not asked to for whole programs.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub bundles: Option<VliwBundles>,
}

/// The instructions of a kernel. A core issues one bundle a cycle, unless a unit makes it wait.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VliwBundles {
    /// Of the code, of which loops and the steps of the grid run the same ones again.
    pub count: u64,
    pub units: Vec<VliwUnit>,
}

/// A functional unit, over all bundles of a kernel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VliwUnit {
    /// libtpu's: `VALU`, or `VSTORE:SPILL` for the stores that the registers were too few for.
    pub name: String,
    /// In each bundle.
    pub slots: u64,
    /// The slots that have an instruction, in all bundles together.
    pub filled: u64,
    /// The bundles in which all its slots have one.
    pub full: u64,
}

impl VliwBundles {
    /// The share of the unit's slots that are filled, 0 to 1.
    pub fn share(&self, unit: &VliwUnit) -> f64 {
        unit.filled as f64 / (unit.slots * self.count).max(1) as f64
    }
}

/// The calls that each device makes in a program, each once, before it is compiled. They are those of the compiled program
/// ([`kernel_calls`]), unless the compiler finds that a kernel's operands are equal, or leaves a call out.
pub fn kernel_calls_before(graph: &Graph, shared: Option<&SharedCalls>) -> BTreeSet<KernelCall> {
    let mut calls = BTreeSet::new();
    graph.visit_calls(&mut |graph, node, call| {
        let shape = |operand: &u32| &graph.nodes[*operand as usize].shape;
        let operands: Vec<&Shape> = node.operands.iter().map(shape).collect();
        calls.extend(KernelCall::before(call, &operands, &node.shape, shared));
    });
    calls
}

/// The calls of a compiled program, each once.
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
    /// stored ones that are widened; or both operands, of the gradient of weights.
    pub fn multiplies_int8(&self) -> bool {
        let operands = &self.code.operands;
        let has_int8 = operands.iter().any(|operand| operand.ends_with("xi8"));
        has_int8 && !self.name.contains("stored") || self.name.contains("int8")
    }

    /// The call of a graph, if it is one.
    fn before(
        call: &dyn CustomCall,
        operands: &[&Shape],
        result: &Shape,
        shared: Option<&SharedCalls>,
    ) -> Option<KernelCall> {
        if call.target() != TARGET {
            return None;
        }
        let sharing = shared.and_then(|shared| shared.of(call, operands));
        let (operands, result): (Vec<Shape>, Shape) = match &sharing {
            None => (operands.iter().copied().cloned().collect(), result.clone()),
            Some(sharing) => {
                let pairs = operands.iter().zip(&sharing.batch.operands);
                let operands = pairs.map(|(shape, batch)| sharing.part(shape, *batch));
                let result = sharing.part(result, Some(sharing.batch.result));
                (operands.collect(), result)
            }
        };
        let shapes: Vec<&Shape> = operands.iter().collect();
        let Configuration::Text(text) = call.configuration(&shapes) else {
            return None;
        };
        let config = BackendConfig::parse(text.as_bytes());
        let element = |shape: &Shape| {
            let text = shape.stablehlo();
            text.trim_start_matches("tensor<")
                .trim_end_matches('>')
                .to_owned()
        };
        Some(KernelCall {
            name: call.name().to_owned(),
            code: KernelCode {
                text: config.kernel_text()?,
                memory: config.kernel_memory()?,
                operands: operands.iter().map(element).collect(),
                result: element(&result),
            },
            flops: config.kernel_flops().unwrap_or(0),
            bytes: config.kernel_bytes().unwrap_or(0),
        })
    }

    /// The call at `site`; `None` where there is none.
    pub(super) fn at(program: &HloProgram<'_>, site: Site) -> Option<KernelCall> {
        let instruction = program.instruction(site);
        if instruction.opcode != "custom-call" || instruction.custom_call_target != TARGET {
            return None;
        }
        let config = BackendConfig::parse(program.backend_config(instruction));
        let sites: Vec<Site> = program.operands(site).collect();
        let shape = |site: &Site| program.instruction(*site).shape.as_ref();
        let operands: Vec<&ShapeProto> = sites.iter().map(shape).collect::<Option<_>>()?;
        let result = instruction.shape.as_ref()?;
        let path = op_name(instruction);
        Some(KernelCall {
            name: path.rsplit('/').next().unwrap_or(path).to_owned(),
            code: KernelCode {
                text: config.kernel_text()?,
                memory: config.kernel_memory()?,
                operands: operands
                    .into_iter()
                    .map(stablehlo_type)
                    .collect::<Option<_>>()?,
                result: stablehlo_type(result)?,
            },
            flops: config.kernel_flops().unwrap_or(0),
            bytes: config.kernel_bytes().unwrap_or(0),
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
