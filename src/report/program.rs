//! An index over an `HloModuleProto`: instructions by id, callers, and how often each runs.

use std::collections::HashMap;

use crate::proto::xla::payload::PayloadSource;
use crate::proto::xla::{HloComputationProto, HloInstructionProto, HloModuleProto};
use crate::proto::xla::{PrimitiveType, ShapeProto};

use super::{ReportError, TripCountHint, trips};

/// Index of a computation in the module.
pub(super) type Comp = usize;

/// An instruction: computation and position in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Site {
    pub comp: Comp,
    pub index: usize,
}

/// How an instruction runs the computations it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Call {
    /// In the caller's stead, instruction by instruction.
    Control,
    /// `while`: body first, then condition.
    While,
    /// As one kernel, whose cost stands on the caller.
    Fusion,
    /// Beside the caller, until the matching `-done`.
    Async,
    /// Per element (the sum of a reduce), or not run at all (`-done` of an async pair).
    None,
}

pub(super) fn call_of(opcode: &str) -> Call {
    match opcode {
        "call" | "conditional" => Call::Control,
        "while" => Call::While,
        "fusion" => Call::Fusion,
        "async-start" => Call::Async,
        _ => Call::None,
    }
}

/// How often a computation runs in one execution of the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Runs {
    pub count: u64,
    /// Whether its instructions are scheduled one by one (not inside a kernel or a transfer), so
    /// that each carries its own predicted cost.
    pub scheduled: bool,
}

/// A `while` whose number of iterations nothing tells; it is counted as one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct UnknownLoop {
    pub name: String,
    pub op_name: String,
}

pub(super) struct Program<'a> {
    pub module: &'a HloModuleProto,
    pub entry: Comp,
    pub computations: Vec<Computation<'a>>,
    pub unknown_loops: Vec<UnknownLoop>,
    by_id: HashMap<i64, Comp>,
    runs: Vec<Runs>,
}

pub(super) struct Computation<'a> {
    pub proto: &'a HloComputationProto,
    /// Position of the root instruction.
    pub root: usize,
    /// Instructions that run this computation.
    pub callers: Vec<Site>,
    by_id: HashMap<i64, usize>,
}

impl<'a> Program<'a> {
    /// # Errors
    /// [`ReportError::Malformed`] when ids do not resolve or computations call themselves.
    pub fn new(module: &'a HloModuleProto, hints: &[TripCountHint]) -> Result<Self, ReportError> {
        let malformed = |what: String| ReportError::Malformed {
            module: module.name.clone(),
            what,
        };
        let by_id: HashMap<i64, Comp> = module
            .computations
            .iter()
            .enumerate()
            .map(|(index, c)| (c.id, index))
            .collect();
        let entry = *by_id
            .get(&module.entry_computation_id)
            .ok_or_else(|| malformed("it has no entry computation".to_owned()))?;
        let mut computations = Vec::with_capacity(module.computations.len());
        for proto in &module.computations {
            let ids: HashMap<i64, usize> = proto
                .instructions
                .iter()
                .enumerate()
                .map(|(index, i)| (i.id, index))
                .collect();
            let root = *ids
                .get(&proto.root_id)
                .ok_or_else(|| malformed(format!("computation {} has no root", proto.name)))?;
            computations.push(Computation {
                proto,
                root,
                callers: Vec::new(),
                by_id: ids,
            });
        }
        for (comp, proto) in module.computations.iter().enumerate() {
            for (index, instruction) in proto.instructions.iter().enumerate() {
                if let Some(operand) = instruction
                    .operand_ids
                    .iter()
                    .find(|id| !computations[comp].by_id.contains_key(id))
                {
                    return Err(malformed(format!(
                        "operand {operand} of {} is not in computation {}",
                        instruction.name, proto.name
                    )));
                }
                for id in &instruction.called_computation_ids {
                    let callee = *by_id.get(id).ok_or_else(|| {
                        malformed(format!(
                            "{} calls computation {id}, which is missing",
                            instruction.name
                        ))
                    })?;
                    if call_of(&instruction.opcode) != Call::None {
                        computations[callee].callers.push(Site { comp, index });
                    }
                }
                if instruction.opcode == "while" && instruction.called_computation_ids.len() != 2 {
                    return Err(malformed(format!(
                        "{} has no body and condition",
                        instruction.name
                    )));
                }
            }
        }
        let mut program = Self {
            module,
            entry,
            runs: vec![Runs::default(); computations.len()],
            computations,
            unknown_loops: Vec::new(),
            by_id,
        };
        program.count_runs(hints)?;
        Ok(program)
    }

    pub fn instruction(&self, site: Site) -> &'a HloInstructionProto {
        &self.computations[site.comp].proto.instructions[site.index]
    }

    /// The operands of an instruction.
    pub fn operands(&self, site: Site) -> impl Iterator<Item = Site> {
        let computation = &self.computations[site.comp];
        self.instruction(site)
            .operand_ids
            .iter()
            .map(move |id| Site {
                comp: site.comp,
                index: computation.by_id[id],
            })
    }

    pub fn operand(&self, site: Site, number: usize) -> Option<Site> {
        self.operands(site).nth(number)
    }

    /// The computations an instruction names.
    pub fn called(&self, site: Site) -> impl Iterator<Item = Comp> {
        self.instruction(site)
            .called_computation_ids
            .iter()
            .map(|id| self.by_id[id])
    }

    pub fn root(&self, comp: Comp) -> Site {
        Site {
            comp,
            index: self.computations[comp].root,
        }
    }

    /// All instructions of computations that run, with how often.
    pub fn running(&self) -> impl Iterator<Item = (Site, Runs)> {
        self.computations
            .iter()
            .enumerate()
            .flat_map(|(comp, computation)| {
                let runs = self.runs[comp];
                let indices = 0..if runs.count > 0 {
                    computation.proto.instructions.len()
                } else {
                    0
                };
                indices.map(move |index| (Site { comp, index }, runs))
            })
    }

    fn count_runs(&mut self, hints: &[TripCountHint]) -> Result<(), ReportError> {
        self.runs[self.entry] = Runs {
            count: 1,
            scheduled: true,
        };
        for comp in self.callers_first()? {
            let from = self.runs[comp];
            for index in 0..self.computations[comp].proto.instructions.len() {
                let site = Site { comp, index };
                let call = call_of(&self.instruction(site).opcode);
                if call == Call::None || from.count == 0 {
                    continue;
                }
                let trips = if call == Call::While {
                    self.trips(site, hints)
                } else {
                    1
                };
                for (position, callee) in self
                    .called(site)
                    .collect::<Vec<_>>()
                    .into_iter()
                    .enumerate()
                {
                    // The condition of a loop runs once more than its body.
                    let times = trips + u64::from(call == Call::While && position == 1);
                    let runs = &mut self.runs[callee];
                    runs.count = runs.count.saturating_add(from.count.saturating_mul(times));
                    runs.scheduled |= from.scheduled && matches!(call, Call::Control | Call::While);
                }
            }
        }
        Ok(())
    }

    fn trips(&mut self, site: Site, hints: &[TripCountHint]) -> u64 {
        if let Some(count) = trips::trip_count(self, site) {
            return count;
        }
        let instruction = self.instruction(site);
        let op_name = op_name(instruction);
        if let Some(hint) = hints.iter().find(|h| op_name.contains(&h.op_name)) {
            return hint.count;
        }
        self.unknown_loops.push(UnknownLoop {
            name: instruction.name.clone(),
            op_name: op_name.to_owned(),
        });
        1
    }

    /// Computations reachable from the entry, every caller before what it calls.
    fn callers_first(&self) -> Result<Vec<Comp>, ReportError> {
        #[derive(Clone, Copy, PartialEq)]
        enum State {
            New,
            Open,
            Done,
        }
        let callees = |comp: Comp| -> Vec<Comp> {
            (0..self.computations[comp].proto.instructions.len())
                .map(|index| Site { comp, index })
                .filter(|&site| call_of(&self.instruction(site).opcode) != Call::None)
                .flat_map(|site| self.called(site))
                .collect()
        };
        let mut state = vec![State::New; self.computations.len()];
        let mut order = Vec::new();
        let mut stack = vec![(self.entry, callees(self.entry))];
        state[self.entry] = State::Open;
        while let Some((comp, rest)) = stack.last_mut() {
            let Some(next) = rest.pop() else {
                state[*comp] = State::Done;
                order.push(*comp);
                stack.pop();
                continue;
            };
            match state[next] {
                State::Done => {}
                State::New => {
                    state[next] = State::Open;
                    stack.push((next, callees(next)));
                }
                State::Open => {
                    return Err(ReportError::Malformed {
                        module: self.module.name.clone(),
                        what: format!(
                            "computation {} calls itself",
                            self.computations[next].proto.name
                        ),
                    });
                }
            }
        }
        order.reverse();
        Ok(order)
    }

    /// The target's own text on an instruction: in place, or in the module's table.
    pub fn backend_config(&self, instruction: &'a HloInstructionProto) -> &'a [u8] {
        let source = instruction
            .backend_config_payload
            .as_ref()
            .and_then(|p| p.payload_source.as_ref());
        match source {
            Some(PayloadSource::Value(bytes)) => bytes,
            Some(PayloadSource::Id(id)) => usize::try_from(*id)
                .ok()
                .and_then(|id| self.module.payloads.get(id))
                .map_or(&[], Vec::as_slice),
            None => &instruction.backend_config,
        }
    }
}

/// Scope path the instruction was emitted with; empty when the compiler dropped it.
pub(super) fn op_name(instruction: &HloInstructionProto) -> &str {
    instruction.metadata.as_ref().map_or("", |m| &m.op_name)
}

pub(super) fn attribute<'a>(instruction: &'a HloInstructionProto, key: &str) -> Option<&'a str> {
    let attributes = instruction.frontend_attributes.as_ref()?;
    attributes.map.get(key).map(String::as_str)
}

/// Number of elements of an array shape.
pub(super) fn elements(shape: &ShapeProto) -> u64 {
    shape
        .dimensions
        .iter()
        .map(|&d| u64::try_from(d).unwrap_or(0))
        .product()
}

/// Bytes of a value without padding; tokens have none, tuples the sum of their parts.
pub(super) fn bytes(shape: &ShapeProto) -> u64 {
    if shape.element_type() == PrimitiveType::Tuple {
        return shape.tuple_shapes.iter().map(bytes).sum();
    }
    (elements(shape) * u64::from(bits(shape.element_type()))).div_ceil(8)
}

/// Bits of one element; 0 for what is no number.
pub(super) fn bits(element: PrimitiveType) -> u32 {
    use PrimitiveType as P;
    match element {
        P::Invalid | P::Tuple | P::OpaqueType | P::Token | P::Buffer => 0,
        P::S1 | P::U1 => 1,
        P::S2 | P::U2 => 2,
        P::S4 | P::U4 | P::F4e2m1fn => 4,
        P::F6e3m2fn | P::F6e2m3fn => 6,
        P::Pred | P::S8 | P::U8 => 8,
        P::F8e5m2 | P::F8e4m3fn | P::F8e4m3b11fnuz | P::F8e5m2fnuz | P::F8e4m3fnuz => 8,
        P::F8e4m3 | P::F8e3m4 | P::F8e8m0fnu => 8,
        P::S16 | P::U16 | P::F16 | P::Bf16 => 16,
        P::S32 | P::U32 | P::F32 => 32,
        P::S64 | P::U64 | P::F64 | P::C64 => 64,
        P::C128 => 128,
    }
}

/// The type's name as users of quantization write it: `int8`, `bf16`, `f8e4m3fn`.
pub(super) fn type_name(element: PrimitiveType) -> String {
    let name = element.as_str_name().to_lowercase();
    match name
        .strip_prefix('s')
        .and_then(|bits| bits.parse::<u32>().ok())
    {
        Some(bits) => format!("int{bits}"),
        None => match name
            .strip_prefix('u')
            .and_then(|bits| bits.parse::<u32>().ok())
        {
            Some(bits) => format!("uint{bits}"),
            None => name,
        },
    }
}
