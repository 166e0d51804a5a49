//! Operations by element type, and the time the TPU compiler predicts.

use std::collections::BTreeMap;

use crate::proto::xla::{HloInstructionProto, PrimitiveType, WindowDimension};

use super::instruction::{BackendConfig, bytes, is_collective, type_name};
use super::kernels::{KernelCall, KernelCycles};
use super::library;
use super::macs::{convolution_macs, dot_macs, wider};
use super::program::{HloProgram, Site};
use super::runs::RunCounts;

/// Operations of all dots, convolutions and kernels by operand type, loops multiplied out.
///
/// A multiply and an add are two. The type is the wider operand's: a product of bf16 and int8
/// runs at bf16's rate. A kernel that takes int8 multiplies int8 ([`KernelCall::multiplies_int8`]).
pub(super) fn flops(program: &HloProgram<'_>, counts: &RunCounts<'_>) -> BTreeMap<String, u64> {
    let mut total = BTreeMap::new();
    for (site, runs) in counts.running() {
        if let Some((element, flops)) = product_flops(program, site) {
            *total.entry(type_name(element)).or_default() += flops.saturating_mul(runs.count);
        }
    }
    total
}

fn product_flops(program: &HloProgram<'_>, site: Site) -> Option<(PrimitiveType, u64)> {
    let instruction = program.instruction(site);
    let shape = |number| {
        let operand = program.operand(site, number)?;
        program.instruction(operand).shape.as_ref()
    };
    let (lhs, rhs) = match instruction.opcode.as_str() {
        "dot" | "convolution" => (shape(0)?, shape(1)?),
        "custom-call" if library::is_product(instruction) => {
            let (element, macs) = library::product_macs(program, site)?;
            return Some((element, macs.saturating_mul(2)));
        }
        "custom-call" => {
            let flops = BackendConfig::parse(program.backend_config(instruction)).kernel_flops()?;
            let is_int8 = KernelCall::at(program, site).is_some_and(|call| call.multiplies_int8());
            let element = match is_int8 {
                true => PrimitiveType::S8,
                false => shape(0)?.element_type(),
            };
            return Some((element, flops));
        }
        _ => return None,
    };
    let macs = match instruction.opcode.as_str() {
        "dot" => dot_macs(instruction, lhs)?,
        _ => convolution_macs(instruction, [lhs, rhs, instruction.shape.as_ref()?])?,
    };
    Some((wider(lhs, rhs), macs.saturating_mul(2)))
}

/// What is scheduled on its own, by what takes its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Copy,
    Elementwise,
    Reduce,
    Gather,
    Scatter,
    Sort,
    /// That is no code of the compiler's own.
    Kernel,
    Dot,
    Convolution,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Copy => "copy",
            Kind::Elementwise => "elementwise",
            Kind::Reduce => "reduce",
            Kind::Gather => "gather",
            Kind::Scatter => "scatter",
            Kind::Sort => "sort",
            Kind::Kernel => "kernel",
            Kind::Dot => "dot",
            Kind::Convolution => "convolution",
        }
    }

    /// The kind of one instruction; that of a fusion is the greatest in it.
    fn of(program: &HloProgram<'_>, site: Site) -> Self {
        let instruction = program.instruction(site);
        match instruction.opcode.as_str() {
            "fusion" => inside(program, site)
                .map(|site| Kind::of(program, site))
                .max()
                .unwrap_or(Kind::Copy),
            "dot" => Kind::Dot,
            "convolution" => convolution_kind(instruction),
            "reduce" | "reduce-window" => Kind::Reduce,
            "gather" => Kind::Gather,
            "scatter" | "select-and-scatter" => Kind::Scatter,
            "sort" => Kind::Sort,
            "parameter"
            | "constant"
            | "iota"
            | "broadcast"
            | "reshape"
            | "bitcast"
            | "bitcast-convert"
            | "transpose"
            | "copy"
            | "slice"
            | "dynamic-slice"
            | "dynamic-update-slice"
            | "concatenate"
            | "pad"
            | "reverse"
            | "tuple"
            | "get-tuple-element" => Kind::Copy,
            // The compiler's own calls allocate or mark, not compute.
            "custom-call" if instruction.custom_call_target == "tpu_custom_call" => Kind::Kernel,
            "custom-call" => Kind::Copy,
            // Waiting for a collective is not computing.
            opcode if is_collective(opcode) => Kind::Copy,
            _ => Kind::Elementwise,
        }
    }
}

/// All instructions of the kernel at `site`, those of nested ones too.
fn inside<'a>(program: &'a HloProgram<'_>, site: Site) -> Box<dyn Iterator<Item = Site> + 'a> {
    let called: Vec<_> = match program.instruction(site).opcode.as_str() {
        "fusion" => program.called(site).collect(),
        _ => Vec::new(),
    };
    Box::new(called.into_iter().flat_map(move |comp| {
        (0..program.computations[comp].proto.instructions.len())
            .map(move |index| Site { comp, index })
            .flat_map(move |site| inside(program, site).chain([site]))
    }))
}

/// The TPU compiler writes every dot as a convolution: without a window, with windows of size 1,
/// or for batch dimensions with one as large as the batch over an input spread out to touch each
/// position once.
fn convolution_kind(instruction: &HloInstructionProto) -> Kind {
    let windows = instruction
        .window
        .as_ref()
        .map_or(&[][..], |w| &w.dimensions);
    let is_dot =
        |w: &WindowDimension| w.size <= 1 || (w.base_dilation == w.size && w.stride == w.size - 1);
    if windows.iter().all(is_dot) {
        Kind::Dot
    } else {
        Kind::Convolution
    }
}

/// What is scheduled on its own: an instruction, or a fusion of several.
#[derive(Debug)]
pub(super) struct Timed {
    pub site: Site,
    pub kind: &'static str,
    /// How often it runs in one execution of the program.
    pub count: u64,
    /// Cycles of one run; `None` where nothing predicts them.
    pub cycles: Option<u64>,
    /// Operations of one run's dots and convolutions.
    pub flops: u64,
    /// The call of a kernel that is no code of the compiler's own, where its cycles are known.
    pub kernel: Option<(KernelCall, KernelCycles)>,
}

/// What takes time, with the compiler's predictions and those of `kernels`. `None` when nothing is predicted (CPU,
/// GPU).
pub(super) fn timed(
    program: &HloProgram<'_>,
    counts: &RunCounts<'_>,
    kernels: &BTreeMap<KernelCall, KernelCycles>,
) -> Option<Vec<Timed>> {
    let scheduled = counts.running().filter(|(_, runs)| runs.scheduled);
    let all = scheduled.filter_map(|(site, runs)| {
        let instruction = program.instruction(site);
        let config = BackendConfig::parse(program.backend_config(instruction));
        let call = KernelCall::at(program, site);
        let kernel = call.and_then(|call| kernels.get_key_value(&call));
        let kernel = kernel.map(|(call, cycles)| (call.clone(), cycles.clone()));
        let of_kernel = kernel.as_ref().map(|(_, cycles)| cycles.cycles);
        let cycles = config.estimated_cycles().or(of_kernel);
        let kind = Kind::of(program, site);
        let computes = is_kernel(instruction) && kind != Kind::Copy;
        if cycles.is_none() && !computes && !moves_much(instruction) {
            return None;
        }
        let flops = inside(program, site).chain([site]);
        let flops = flops.filter_map(|site| product_flops(program, site));
        Some(Timed {
            site,
            kind: kind.name(),
            count: runs.count,
            cycles,
            flops: flops.map(|(_, flops)| flops).sum(),
            kernel,
        })
    });
    let all: Vec<Timed> = all.collect();
    all.iter()
        .any(|timed| timed.cycles.is_some())
        .then_some(all)
}

fn is_kernel(instruction: &HloInstructionProto) -> bool {
    matches!(
        instruction.opcode.as_str(),
        "fusion" | "dot" | "convolution" | "custom-call"
    )
}

/// Whether an instruction that is not part of a fusion moves so many bytes that leaving its time out would tell. The
/// compiler estimates none for a pad.
fn moves_much(instruction: &HloInstructionProto) -> bool {
    const MUCH: u64 = 1 << 20;
    let moves = matches!(
        instruction.opcode.as_str(),
        "broadcast"
            | "concatenate"
            | "copy"
            | "pad"
            | "reshape"
            | "reverse"
            | "slice"
            | "transpose"
    );
    moves
        && instruction
            .shape
            .as_ref()
            .is_some_and(|shape| bytes(shape) >= MUCH)
}
