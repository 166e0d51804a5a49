//! How often the computations of a program run.

use super::instruction::{Call, call_of, op_name};
use super::program::{HloProgram, Site};
use super::trips::trip_count;
use super::{ReportError, TripCountHint};

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

/// The runs of all computations of a program.
pub(super) struct RunCounts<'a> {
    program: &'a HloProgram<'a>,
    /// By computation.
    runs: Vec<Runs>,
    pub unknown_loops: Vec<UnknownLoop>,
}

impl<'a> RunCounts<'a> {
    /// # Errors
    /// [`ReportError::Malformed`] when computations call themselves.
    pub fn new(program: &'a HloProgram<'a>, hints: &[TripCountHint]) -> Result<Self, ReportError> {
        let mut counts = Self {
            program,
            runs: vec![Runs::default(); program.computations.len()],
            unknown_loops: Vec::new(),
        };
        counts.runs[program.entry] = Runs {
            count: 1,
            scheduled: true,
        };
        for comp in program.callers_first()? {
            for index in 0..program.computations[comp].proto.instructions.len() {
                counts.add_callees(Site { comp, index }, hints);
            }
        }
        Ok(counts)
    }

    /// All instructions of computations that run, with how often.
    pub fn running(&self) -> impl Iterator<Item = (Site, Runs)> {
        let computations = self.program.computations.iter().zip(&self.runs);
        computations
            .enumerate()
            .filter(|(_, (_, runs))| runs.count > 0)
            .flat_map(|(comp, (computation, &runs))| {
                let indices = 0..computation.proto.instructions.len();
                indices.map(move |index| (Site { comp, index }, runs))
            })
    }

    /// Adds the runs of what the instruction at `site` calls, once its own computation's are known.
    fn add_callees(&mut self, site: Site, hints: &[TripCountHint]) {
        let from = self.runs[site.comp];
        let call = call_of(&self.program.instruction(site).opcode);
        if call == Call::None || from.count == 0 {
            return;
        }
        let trips = match call {
            Call::While => self.trips(site, hints),
            Call::Control | Call::Fusion | Call::Async | Call::None => 1,
        };
        for (position, callee) in self.program.called(site).enumerate() {
            // The condition of a loop runs once more than its body.
            let times = trips + u64::from(call == Call::While && position == 1);
            let runs = &mut self.runs[callee];
            runs.count = runs.count.saturating_add(from.count.saturating_mul(times));
            runs.scheduled |= from.scheduled && matches!(call, Call::Control | Call::While);
        }
    }

    fn trips(&mut self, site: Site, hints: &[TripCountHint]) -> u64 {
        if let Some(count) = trip_count(self.program, site) {
            return count;
        }
        let instruction = self.program.instruction(site);
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
}
