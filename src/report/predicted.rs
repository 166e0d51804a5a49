//! The predicted time of a program, from the cycles of what it runs.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::proto::xla::ShapeProto;

use super::cost::Timed;
use super::instruction::op_name;
use super::program::HloProgram;
use super::{COSTLIEST, Kernel, KernelCall, KernelCycles, Operation, Predicted, Unpredicted};

impl Predicted {
    pub(super) fn new(program: &HloProgram<'_>, timed: &[Timed], clock_hz: f64) -> Self {
        let ms = |cycles: u64| cycles as f64 / clock_hz * 1e3;
        let mut by_kind = BTreeMap::new();
        let mut total = 0;
        for (timed, cycles) in predicted(timed) {
            let cycles = cycles * timed.count;
            *by_kind.entry(timed.kind).or_default() += cycles;
            total += cycles;
        }
        let by_kind = by_kind.into_iter();
        Self {
            total: ms(total),
            by_kind: by_kind
                .map(|(kind, cycles)| (kind.to_owned(), ms(cycles)))
                .collect(),
            kernels: kernels(timed, &ms),
            costliest: costliest(program, timed, &ms),
            unpredicted: unpredicted(program, timed),
        }
    }
}

/// What has a prediction, with the cycles of one run.
fn predicted(timed: &[Timed]) -> impl Iterator<Item = (&Timed, u64)> {
    timed
        .iter()
        .filter_map(|timed| Some((timed, timed.cycles?)))
}

fn kernels(timed: &[Timed], ms: &impl Fn(u64) -> f64) -> Vec<Kernel> {
    let mut counts: BTreeMap<&KernelCall, (u64, &KernelCycles)> = BTreeMap::new();
    for timed in timed {
        if let Some((call, cycles)) = &timed.kernel {
            counts.entry(call).or_insert((0, cycles)).0 += timed.count;
        }
    }
    let kernels = counts.into_iter().map(|(call, (count, of_one))| Kernel {
        name: call.name.clone(),
        operands: call.code.operands.clone(),
        result: call.code.result.clone(),
        count,
        ms: ms(of_one.cycles * count),
        of_one: of_one.clone(),
    });
    let mut kernels: Vec<Kernel> = kernels.collect();
    kernels.sort_by(|a, b| b.ms.total_cmp(&a.ms));
    kernels
}

fn costliest(
    program: &HloProgram<'_>,
    timed: &[Timed],
    ms: &impl Fn(u64) -> f64,
) -> Vec<Operation> {
    let mut all: Vec<(&Timed, u64)> = predicted(timed).collect();
    all.sort_by_key(|(timed, cycles)| Reverse(cycles * timed.count));
    all.truncate(COSTLIEST);
    let shape_of = |site| {
        program
            .instruction(site)
            .shape
            .as_ref()
            .map_or_else(String::new, hlo_shape)
    };
    let operations = all.into_iter().map(|(timed, cycles)| {
        let instruction = program.instruction(timed.site);
        Operation {
            instruction: instruction.name.clone(),
            kind: timed.kind.to_owned(),
            op_name: op_name(instruction).to_owned(),
            operands: program.operands(timed.site).map(shape_of).collect(),
            result: shape_of(timed.site),
            count: timed.count,
            cycles,
            ms: ms(cycles * timed.count),
        }
    });
    operations.collect()
}

fn unpredicted(program: &HloProgram<'_>, timed: &[Timed]) -> Vec<Unpredicted> {
    let missing = timed.iter().filter(|timed| timed.cycles.is_none());
    let missing = missing.map(|timed| {
        let instruction = program.instruction(timed.site);
        Unpredicted {
            instruction: instruction.name.clone(),
            op_name: op_name(instruction).to_owned(),
            count: timed.count,
            flops: timed.flops.saturating_mul(timed.count),
        }
    });
    missing.collect()
}

/// `bf16[2,4096,640]{2,1,0}`.
fn hlo_shape(shape: &ShapeProto) -> String {
    let join = |numbers: &[i64]| {
        let numbers: Vec<String> = numbers.iter().map(ToString::to_string).collect();
        numbers.join(",")
    };
    if !shape.tuple_shapes.is_empty() {
        let parts: Vec<String> = shape.tuple_shapes.iter().map(hlo_shape).collect();
        return format!("({})", parts.join(", "));
    }
    let layout = shape.layout.as_ref().map(|layout| &layout.minor_to_major);
    let layout = layout.map_or_else(String::new, |order| format!("{{{}}}", join(order)));
    let element = shape.element_type().as_str_name().to_lowercase();
    format!("{element}[{}]{layout}", join(&shape.dimensions))
}
