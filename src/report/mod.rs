//! The costs of a compiled program: the report of `compile`.
//!
//! [`CompileReport::new`] reads an optimized `HloModuleProto`; what only the runtime knows (memory,
//! compile time) the caller passes in.
//!
//! # What libtpu 0.0.51 leaves in a program
//! - A program over several slices is compiled once for one slice: its device assignment and all
//!   replica groups number that slice's devices from 0, so every ordinary collective stays inside.
//! - Traffic between slices is `send`/`recv` (and their `-done`) with the frontend attributes
//!   `_xla_host_transfer_handler_name="xla_megascale_runtime"`, `_xla_host_transfer_rendezvous`
//!   (equal on both halves), `_xla_megascale_transfer_type` (`ALL_REDUCE`, `ALL_GATHER`,
//!   `ONE_TO_ONE`, ...), `_xla_megascale_reduce_operation` (`SUM`, `MAX`) and
//!   `_xla_megascale_target` (`{1,2}x{0:15}`: slices by devices, or pairs of global device ids).
//! - A large all-reduce over both kinds of links is hierarchical: a reduce-scatter in the slice
//!   (also in the form of an all-reduce and a slice, in a computation `all-reduce-scatter`), a
//!   transfer of the shard, an all-gather in the slice. Small ones are an all-reduce and a
//!   transfer.
//! - No collective and no transfer carries an op name, though nearly all other instructions do.
//! - Loops carry no trip count, and iterations may be peeled off, with transfers of one iteration
//!   completed in the next.
//! - One collective may be spread over several fusions that share a `chain_id`.
//! - Fusions and products carry `estimated_cycles` in the JSON of their `backend_config`, some
//!   with the greatest 64-bit integer for no answer.

mod collectives;
mod cost;
mod instruction;
mod kernels;
mod library;
mod macs;
mod predicted;
mod program;
mod purpose;
mod runs;
mod text;
mod trips;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::proto::xla::HloModuleProto;

pub use kernels::{
    KernelCall, KernelCode, KernelCycles, VliwBundles, VliwUnit, kernel_calls, kernel_calls_before,
};
pub use text::operations;

#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum ReportError {
    #[error("optimized program \"{module}\" is malformed: {what}")]
    Malformed { module: String, what: String },
}

/// Iterations of the loops whose op name contains `op_name`, for loops whose program does not
/// tell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TripCountHint {
    pub op_name: String,
    pub count: u64,
}

/// Facts that the program itself does not contain.
#[derive(Debug, Clone)]
pub struct ReportInput<'a> {
    /// Number of model parameters.
    pub parameters: u64,
    /// From PJRT's compiled memory stats.
    pub memory: Memory,
    /// `slice_index` by partition id ([`crate::shard::Mesh::slice_of_partition`]).
    pub slice_of_partition: &'a [i64],
    /// Positions of the program's arguments that are model weights, to know a gather of
    /// parameters from one of activations.
    pub weight_arguments: &'a [usize],
    /// Clock of the chip ([`crate::topology::Chip::clock_hz`]).
    pub clock_hz: Option<f64>,
    pub trip_count_hints: &'a [TripCountHint],
    /// Cycles of the kernels that [`kernel_calls`] lists, as far as they are known.
    pub kernel_cycles: &'a BTreeMap<KernelCall, KernelCycles>,
    pub compile_seconds: f64,
}

/// Bytes on one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Memory {
    pub argument: u64,
    pub output: u64,
    pub temp: u64,
    pub code: u64,
    /// The most in use at once, where the plugin tells.
    pub peak: Option<u64>,
    /// The memory of the device.
    pub hbm_limit: Option<u64>,
}

impl Memory {
    /// Whether the program fits a device, where both its peak and the limit are known. The compiler refuses what does
    /// not fit, where it knows the limit.
    pub fn fits(&self) -> Option<bool> {
        Some(self.peak? <= self.hbm_limit?)
    }
}

/// The kind of link between devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Link {
    /// Inside a slice.
    Ici,
    /// Across slices.
    Dcn,
}

/// The purpose of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// Largest absolute values for quantization scales.
    RangeFinding,
    /// Derivatives by weights, on their way to the optimizer.
    Gradient,
    /// Weights that are stored split.
    Parameter,
    Activation,
    /// Nothing in the program tells.
    Other,
}

impl Purpose {
    pub const ALL: [Purpose; 5] = [
        Purpose::RangeFinding,
        Purpose::Gradient,
        Purpose::Parameter,
        Purpose::Activation,
        Purpose::Other,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Purpose::RangeFinding => "range_finding",
            Purpose::Gradient => "gradient",
            Purpose::Parameter => "parameter",
            Purpose::Activation => "activation",
            Purpose::Other => "other",
        }
    }
}

/// Bytes by purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ByPurpose {
    pub range_finding: u64,
    pub gradient: u64,
    pub parameter: u64,
    pub activation: u64,
    pub other: u64,
}

impl ByPurpose {
    pub fn of(&self, purpose: Purpose) -> u64 {
        match purpose {
            Purpose::RangeFinding => self.range_finding,
            Purpose::Gradient => self.gradient,
            Purpose::Parameter => self.parameter,
            Purpose::Activation => self.activation,
            Purpose::Other => self.other,
        }
    }

    pub fn total(&self) -> u64 {
        Purpose::ALL.into_iter().map(|p| self.of(p)).sum()
    }

    fn of_mut(&mut self, purpose: Purpose) -> &mut u64 {
        match purpose {
            Purpose::RangeFinding => &mut self.range_finding,
            Purpose::Gradient => &mut self.gradient,
            Purpose::Parameter => &mut self.parameter,
            Purpose::Activation => &mut self.activation,
            Purpose::Other => &mut self.other,
        }
    }
}

/// One collective of the program.
///
/// Its bytes are those of the operand each device hands to it, without padding, times how often
/// it runs in one execution of the program. What the wires carry depends on the algorithm: a ring
/// all-reduce over n devices sends 2 (n - 1) / n of the operand, an all-gather n - 1 times it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Collective {
    /// `all-reduce`, `all-gather`, ...; across slices what the transfers together make up.
    pub kind: String,
    /// Operand bytes of one device in one execution of the program.
    pub bytes: u64,
    /// How often it runs in one execution.
    pub count: u64,
    pub link: Link,
    pub purpose: Purpose,
    /// Scope path of the collective, or where the compiler dropped it, of what makes its operand.
    pub op_name: String,
    /// Name in the optimized program.
    pub instruction: String,
}

/// Predicted time of what the device itself computes, in milliseconds; waiting for collectives is not in it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Predicted {
    pub total: f64,
    /// By kind: `dot`, `convolution`, `reduce`, `elementwise`, `copy`, `kernel` (no code of the compiler's own), ...
    pub by_kind: BTreeMap<String, f64>,
    /// The kernels that are no code of the compiler's own, the costliest first.
    pub kernels: Vec<Kernel>,
    /// What the compiler schedules on its own, the costliest first and no more than [`COSTLIEST`].
    pub costliest: Vec<Operation>,
    /// What nothing is predicted for (kernels that were not simulated, pads, some operations that overlap with a
    /// collective): `total` is too small by their time.
    pub unpredicted: Vec<Unpredicted>,
}

/// Operations that a report lists.
pub const COSTLIEST: usize = 1000;

/// The equal calls of a kernel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Kernel {
    pub name: String,
    /// Types in StableHLO.
    pub operands: Vec<String>,
    pub result: String,
    /// How often it runs in one execution.
    pub count: u64,
    #[serde(flatten)]
    pub of_one: KernelCycles,
    /// Of all runs.
    pub ms: f64,
}

/// An instruction of the optimized program.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Operation {
    /// Name in the optimized program.
    pub instruction: String,
    pub kind: String,
    pub op_name: String,
    /// Shapes in HLO with their layouts, `bf16[2,4096,640]{2,1,0}`: the numbers of the dimensions from the fastest one
    /// on.
    pub operands: Vec<String>,
    pub result: String,
    /// How often it runs in one execution.
    pub count: u64,
    /// Cycles of one run.
    pub cycles: u64,
    /// Of all runs.
    pub ms: f64,
}

/// An operation without a prediction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unpredicted {
    /// Name in the optimized program.
    pub instruction: String,
    pub op_name: String,
    /// How often it runs in one execution.
    pub count: u64,
    /// Operations of its dots and convolutions in one execution of the program.
    pub flops: u64,
}

/// A loop counted once, because nothing tells how often it runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnknownTripCount {
    /// Name in the optimized program.
    pub instruction: String,
    pub op_name: String,
}

/// The report of a compiled program, for one device and one execution.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CompileReport {
    pub parameters: u64,
    /// Operations of dots and convolutions on one device by operand type; a multiply and an add
    /// are two.
    pub flops: BTreeMap<String, u64>,
    /// Share of `flops` with int8 operands, 0 to 1.
    pub int8_flops_share: f64,
    pub memory: Memory,
    pub ici_bytes: ByPurpose,
    pub dcn_bytes: ByPurpose,
    pub collectives: Vec<Collective>,
    /// `None` where the compiler predicts nothing or the clock is unknown.
    pub predicted_ms: Option<Predicted>,
    pub unknown_trip_counts: Vec<UnknownTripCount>,
    pub compile_seconds: f64,
}

impl CompileReport {
    /// # Errors
    /// [`ReportError::Malformed`] when the program's references do not resolve.
    pub fn new(module: &HloModuleProto, input: &ReportInput<'_>) -> Result<Self, ReportError> {
        let program = program::HloProgram::new(module)?;
        let counts = runs::RunCounts::new(&program, input.trip_count_hints)?;
        let provenance = purpose::Provenance::new(&program, &counts, input.weight_arguments);
        let slices = input.slice_of_partition;
        let collectives = collectives::collectives(&program, &counts, slices, &provenance);
        let flops = cost::flops(&program, &counts);
        let all: u64 = flops.values().sum();
        let int8: u64 = ["int8", "uint8"]
            .into_iter()
            .filter_map(|t| flops.get(t))
            .sum();
        let predicted_ms = cost::timed(&program, &counts, input.kernel_cycles)
            .zip(input.clock_hz)
            .map(|(timed, clock)| Predicted::new(&program, &timed, clock));
        Ok(Self {
            parameters: input.parameters,
            int8_flops_share: if all == 0 {
                0.0
            } else {
                int8 as f64 / all as f64
            },
            flops,
            memory: input.memory,
            ici_bytes: collectives::total(&collectives, Link::Ici),
            dcn_bytes: collectives::total(&collectives, Link::Dcn),
            collectives,
            predicted_ms,
            unknown_trip_counts: counts
                .unknown_loops
                .iter()
                .map(|l| UnknownTripCount {
                    instruction: l.name.clone(),
                    op_name: l.op_name.clone(),
                })
                .collect(),
            compile_seconds: input.compile_seconds,
        })
    }
}

#[cfg(test)]
mod tests;
