//! An index over an `HloModuleProto`: instructions by id, and what calls what.

use std::collections::HashMap;

use crate::proto::xla::payload::PayloadSource;
use crate::proto::xla::{HloComputationProto, HloInstructionProto, HloModuleProto};

use super::ReportError;
use super::instruction::{Call, call_of};

/// Index of a computation in the module.
pub(super) type Comp = usize;

/// An instruction: computation and position in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Site {
    pub comp: Comp,
    pub index: usize,
}

pub(super) struct HloProgram<'a> {
    pub module: &'a HloModuleProto,
    pub entry: Comp,
    pub computations: Vec<Computation<'a>>,
    by_id: HashMap<i64, Comp>,
}

pub(super) struct Computation<'a> {
    pub proto: &'a HloComputationProto,
    /// Position of the root instruction.
    pub root: usize,
    /// Instructions that run this computation.
    pub callers: Vec<Site>,
    by_id: HashMap<i64, usize>,
}

impl<'a> HloProgram<'a> {
    /// # Errors
    /// [`ReportError::Malformed`] when ids do not resolve.
    pub fn new(module: &'a HloModuleProto) -> Result<Self, ReportError> {
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
        Ok(Self {
            module,
            entry,
            computations,
            by_id,
        })
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

    /// Computations reachable from the entry, every caller before what it calls.
    ///
    /// # Errors
    /// [`ReportError::Malformed`] when computations call themselves.
    pub fn callers_first(&self) -> Result<Vec<Comp>, ReportError> {
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
