//! How often a `while` runs its body.

use std::collections::BTreeMap;

use crate::proto::xla::{HloInstructionProto, LiteralProto, PrimitiveType};

use super::instruction::BackendConfig;
use super::program::{HloProgram, Site};

/// Past this many iterations a loop counts as unknown.
const LIMIT: u64 = 1 << 20;

/// Iterations of the loop at `site`: the compiler's own `known_trip_count`, else found by running
/// the loop's scalar integers. The TPU compiler writes no trip count and peels iterations off its
/// loops, so that neither the bound nor the start alone tells.
pub(super) fn trip_count(program: &HloProgram<'_>, site: Site) -> Option<u64> {
    let instruction = program.instruction(site);
    let config = BackendConfig::parse(program.backend_config(instruction));
    if let Some(count) = config.trip_count() {
        return Some(count);
    }
    let mut called = program.called(site);
    let (body, condition) = (called.next()?, called.next()?);
    let mut slots = initial_slots(program, site)?;
    let next: Vec<(i64, Site)> = {
        let root = program.root(body);
        if program.instruction(root).opcode != "tuple" {
            return None;
        }
        slots
            .keys()
            .filter_map(|&slot| Some((slot, program.operand(root, usize::try_from(slot).ok()?)?)))
            .collect()
    };
    for count in 0..LIMIT {
        if eval(program, program.root(condition), &Arguments::Loop(&slots))? == 0 {
            return Some(count);
        }
        slots = next
            .iter()
            .filter_map(|&(slot, site)| {
                Some((slot, eval(program, site, &Arguments::Loop(&slots))?))
            })
            .collect();
    }
    None
}

/// The loop's tuple elements that are scalar integers and known before it.
fn initial_slots(program: &HloProgram<'_>, site: Site) -> Option<BTreeMap<i64, i64>> {
    let init = program.operand(site, 0)?;
    if program.instruction(init).opcode != "tuple" {
        return None;
    }
    let outside = Arguments::Values(&[]);
    let slots = program
        .operands(init)
        .zip(0i64..)
        .filter_map(|(operand, slot)| {
            is_scalar_integer(program.instruction(operand))
                .then(|| eval(program, operand, &outside))
                .flatten()
                .map(|value| (slot, value))
        });
    Some(slots.collect())
}

fn is_scalar_integer(instruction: &HloInstructionProto) -> bool {
    use PrimitiveType as P;
    instruction.shape.as_ref().is_some_and(|shape| {
        shape.dimensions.is_empty()
            && matches!(
                shape.element_type(),
                P::S8 | P::S16 | P::S32 | P::S64 | P::U8 | P::U16 | P::U32 | P::U64 | P::Pred
            )
    })
}

/// The arguments of a computation's parameters.
enum Arguments<'a> {
    /// One tuple, of which some elements are known.
    Loop(&'a BTreeMap<i64, i64>),
    /// One value for each parameter.
    Values(&'a [Option<i64>]),
}

/// A scalar integer (or predicate, as 0 or 1), if it follows from constants and arguments.
fn eval(program: &HloProgram<'_>, site: Site, arguments: &Arguments<'_>) -> Option<i64> {
    let instruction = program.instruction(site);
    let operand = |number| {
        program
            .operand(site, number)
            .and_then(|site| eval(program, site, arguments))
    };
    match instruction.opcode.as_str() {
        "constant" => literal(instruction.literal.as_ref()?),
        "parameter" => match arguments {
            Arguments::Loop(_) => None,
            Arguments::Values(values) => {
                *values.get(usize::try_from(instruction.parameter_number).ok()?)?
            }
        },
        "get-tuple-element" => match arguments {
            Arguments::Loop(slots)
                if program.instruction(program.operand(site, 0)?).opcode == "parameter" =>
            {
                slots.get(&instruction.tuple_index).copied()
            }
            _ => None,
        },
        "copy" | "bitcast" | "convert" | "reshape" | "opt-barrier" => operand(0),
        "add" => operand(0)?.checked_add(operand(1)?),
        "subtract" => operand(0)?.checked_sub(operand(1)?),
        "multiply" => operand(0)?.checked_mul(operand(1)?),
        "minimum" => Some(operand(0)?.min(operand(1)?)),
        "maximum" => Some(operand(0)?.max(operand(1)?)),
        "and" => Some(operand(0)? & operand(1)?),
        "or" => Some(operand(0)? | operand(1)?),
        "compare" => {
            let (a, b) = (operand(0)?, operand(1)?);
            let holds = match instruction.comparison_direction.as_str() {
                "LT" => a < b,
                "LE" => a <= b,
                "GT" => a > b,
                "GE" => a >= b,
                "EQ" => a == b,
                "NE" => a != b,
                _ => return None,
            };
            Some(i64::from(holds))
        }
        "select" => match operand(0)? {
            0 => operand(2),
            _ => operand(1),
        },
        "fusion" | "call" => {
            let callee = program.called(site).next()?;
            let values: Vec<Option<i64>> = program
                .operands(site)
                .map(|site| eval(program, site, arguments))
                .collect();
            eval(program, program.root(callee), &Arguments::Values(&values))
        }
        _ => None,
    }
}

fn literal(literal: &LiteralProto) -> Option<i64> {
    use PrimitiveType as P;
    let shape = literal.shape.as_ref()?;
    if !shape.dimensions.is_empty() {
        return None;
    }
    let little_endian = |bytes: &[u8]| {
        let bytes: [u8; 2] = bytes.try_into().ok()?;
        Some(bytes)
    };
    match shape.element_type() {
        P::Pred => literal.preds.first().map(|&p| i64::from(p)),
        P::S8 => literal.s8s.first().map(|&v| i64::from(v as i8)),
        P::U8 => literal.u8s.first().map(|&v| i64::from(v)),
        P::S16 => little_endian(&literal.s16s).map(|b| i64::from(i16::from_le_bytes(b))),
        P::U16 => little_endian(&literal.u16s).map(|b| i64::from(u16::from_le_bytes(b))),
        P::S32 => literal.s32s.first().map(|&v| i64::from(v)),
        P::U32 => literal.u32s.first().map(|&v| i64::from(v)),
        P::S64 => literal.s64s.first().copied(),
        P::U64 => literal.u64s.first().and_then(|&v| i64::try_from(v).ok()),
        _ => None,
    }
}
