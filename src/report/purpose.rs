//! The purpose of a collective.
//!
//! libtpu drops the op name of every collective and transfer, so the purpose follows from the
//! data: the nearest named instructions that make the operand, the program arguments it comes
//! from, and the scope that uses the result. Scopes are those of [`scopes`], which the graph is
//! built with.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::Purpose;
use super::instruction::{Call, attribute, call_of, is_contraction, is_megascale, op_name};
use super::program::{HloProgram, Site};
use super::runs::RunCounts;
use crate::graph::scopes;

const RENDEZVOUS: &str = "_xla_host_transfer_rendezvous";

/// Walks end here: past so many values no answer is better than a wrong one.
const WALK_LIMIT: usize = 50_000;

/// A value, or one element of a tuple.
type Value = (Site, Option<i64>);

/// Where values come from and go to.
pub(super) struct Provenance<'a> {
    program: &'a HloProgram<'a>,
    /// Entry parameters that hold weights.
    weights: HashSet<i64>,
    users: HashMap<Site, Vec<Site>>,
    sends: HashMap<&'a str, Vec<Site>>,
    recvs: HashMap<&'a str, Vec<Site>>,
}

/// What a collective does with each device's operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Transfer {
    Sum,
    /// The largest or the smallest.
    Extremum,
    Gather,
    /// Hands it to another device.
    Move,
}

/// The sources of an operand, except contractions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Leaves {
    weights: bool,
    other: bool,
}

impl<'a> Provenance<'a> {
    pub fn new(
        program: &'a HloProgram<'a>,
        counts: &RunCounts<'_>,
        weight_arguments: &[usize],
    ) -> Self {
        let mut users: HashMap<Site, Vec<Site>> = HashMap::new();
        let mut sends: HashMap<&str, Vec<Site>> = HashMap::new();
        let mut recvs: HashMap<&str, Vec<Site>> = HashMap::new();
        for (site, _) in counts.running() {
            for operand in program.operands(site) {
                users.entry(operand).or_default().push(site);
            }
            let instruction = program.instruction(site);
            if is_megascale(instruction)
                && let Some(rendezvous) = attribute(instruction, RENDEZVOUS)
            {
                match instruction.opcode.as_str() {
                    "send" => sends.entry(rendezvous).or_default().push(site),
                    "recv" => recvs.entry(rendezvous).or_default().push(site),
                    _ => {}
                }
            }
        }
        Self {
            program,
            weights: weight_arguments
                .iter()
                .filter_map(|&n| i64::try_from(n).ok())
                .collect(),
            users,
            sends,
            recvs,
        }
    }

    /// The purpose of one operand of the collective at `site`, and the op name it is judged by
    /// (empty when none was found).
    pub fn of(
        &self,
        site: Site,
        number: usize,
        operand: Site,
        transfer: Transfer,
    ) -> (Purpose, String) {
        let own = op_name(self.program.instruction(site));
        let names = match transfer {
            // The partitioner gives a reduction the name of what made the partial results.
            Transfer::Sum | Transfer::Extremum if !own.is_empty() => BTreeSet::from([own]),
            // It gives other transfers the name of what needs the result, which may be a gradient made from an
            // activation.
            Transfer::Sum | Transfer::Extremum | Transfer::Gather | Transfer::Move => {
                self.producers(operand)
            }
        };
        let ranges: Vec<&str> = select(&names, |n| has_scope(n, scopes::RANGE_FINDING));
        let rest: Vec<&str> = select(&names, |n| !has_scope(n, scopes::RANGE_FINDING));
        // A kernel without a name may hold a dequantization beside the gradient it scales: then
        // only the maximum is range finding.
        if !ranges.is_empty() && (rest.is_empty() || transfer == Transfer::Extremum) {
            return (Purpose::RangeFinding, ranges[0].to_owned());
        }
        let with = |scope: &str| rest.iter().find(|n| has_scope(n, scope)).copied();
        // A path says more than a name the compiler made up.
        let path = rest.iter().find(|n| n.contains('/'));
        let first = path
            .or(rest.first())
            .copied()
            .unwrap_or_default()
            .to_owned();
        let part = i64::try_from(number).ok();
        let purpose = if transfer == Transfer::Gather
            && (with(scopes::OPTIMIZER).is_some()
                || self.leaves(operand)
                    == (Leaves {
                        weights: true,
                        other: false,
                    })) {
            Purpose::Parameter
        } else if let Some(name) = with(scopes::GRADIENT).or_else(|| with(scopes::OPTIMIZER)) {
            return (Purpose::Gradient, name.to_owned());
        } else if self.reaches_optimizer((site, part)) {
            Purpose::Gradient
        } else if rest.is_empty() {
            Purpose::Other
        } else {
            Purpose::Activation
        };
        (purpose, first)
    }

    /// Names of the nearest named instructions (or arguments of the program) that make a value.
    fn producers(&self, operand: Site) -> BTreeSet<&'a str> {
        let mut names = BTreeSet::new();
        self.walk((operand, None), |(site, _)| {
            let instruction = self.program.instruction(site);
            let name = op_name(instruction);
            let is_argument = instruction.opcode == "parameter" && site.comp == self.program.entry;
            if name.is_empty() || (is_structural(&instruction.opcode) && !is_argument) {
                return Walk::Through;
            }
            names.insert(name);
            Walk::Stop
        });
        names
    }

    /// Whether a value is computed from weights alone.
    fn leaves(&self, operand: Site) -> Leaves {
        let mut leaves = Leaves::default();
        let complete = self.walk((operand, None), |(site, _)| {
            let instruction = self.program.instruction(site);
            if is_contraction(&instruction.opcode) {
                leaves.other = true;
            } else if instruction.opcode == "parameter" && site.comp == self.program.entry {
                let scalar = instruction
                    .shape
                    .as_ref()
                    .is_some_and(|s| s.dimensions.is_empty());
                if self.weights.contains(&instruction.parameter_number) {
                    leaves.weights = true;
                } else if !scalar {
                    leaves.other = true;
                }
            }
            if leaves.other {
                Walk::End
            } else {
                Walk::Through
            }
        });
        leaves.other |= !complete;
        leaves
    }

    /// Visits the values that a value is computed from, nearest first; false when the limit was reached.
    fn walk(&self, start: Value, mut visit: impl FnMut(Value) -> Walk) -> bool {
        let mut seen = HashSet::from([start]);
        let mut queue = std::collections::VecDeque::from([start]);
        while let Some(value) = queue.pop_front() {
            if seen.len() > WALK_LIMIT {
                return false;
            }
            match visit(value) {
                Walk::Stop => {}
                Walk::End => return true,
                Walk::Through => {
                    let new = self.sources(value).into_iter().filter(|v| seen.insert(*v));
                    queue.extend(new);
                }
            }
        }
        true
    }

    /// The values that a value is computed from.
    fn sources(&self, (site, part): Value) -> Vec<Value> {
        let program = self.program;
        let instruction = program.instruction(site);
        let operand = |number: usize, part| program.operand(site, number).map(|s| (s, part));
        let nth = |part: i64| usize::try_from(part).ok().and_then(|n| operand(n, None));
        let all = || program.operands(site).map(|s| (s, None)).collect();
        let roots = |part| {
            program
                .called(site)
                .map(|c| (program.root(c), part))
                .collect()
        };
        match (instruction.opcode.as_str(), part) {
            ("get-tuple-element", _) => operand(0, Some(instruction.tuple_index))
                .into_iter()
                .collect(),
            ("tuple" | "all-reduce" | "all-gather" | "all-to-all", Some(part)) => {
                nth(part).into_iter().collect()
            }
            ("parameter", _) => self.arguments(site, part),
            ("while", _) => {
                let body = program.called(site).next();
                let body = body.map(|body| (program.root(body), part));
                body.into_iter().chain(operand(0, part)).collect()
            }
            ("fusion" | "call" | "conditional", _) => roots(part),
            ("async-start", _) => roots(None),
            // Positions and predicates choose values, they are not in them.
            ("dynamic-slice" | "gather", _) => operand(0, None).into_iter().collect(),
            ("dynamic-update-slice", _) => operand(0, None)
                .into_iter()
                .chain(operand(1, None))
                .collect(),
            ("scatter", _) => operand(0, None)
                .into_iter()
                .chain(operand(2, None))
                .collect(),
            ("select", _) => operand(1, None)
                .into_iter()
                .chain(operand(2, None))
                .collect(),
            ("recv", _) => {
                let rendezvous = attribute(instruction, RENDEZVOUS).unwrap_or_default();
                let sends = self.sends.get(rendezvous).into_iter().flatten();
                sends
                    .filter_map(|&send| Some((program.operand(send, 0)?, None)))
                    .collect()
            }
            _ => all(),
        }
    }

    /// The callers' arguments for a parameter, and for a loop also its body's result.
    fn arguments(&self, site: Site, part: Option<i64>) -> Vec<Value> {
        let program = self.program;
        let parameter = program.instruction(site).parameter_number;
        let mut values = Vec::new();
        for &caller in &program.computations[site.comp].callers {
            let opcode = program.instruction(caller).opcode.as_str();
            let mut called = program.called(caller);
            let number = match (call_of(opcode), opcode) {
                (Call::While, _) => {
                    values.extend(called.next().map(|body| (program.root(body), part)));
                    Some(0)
                }
                // Operand 0 chooses the branch.
                (_, "conditional") => called.position(|c| c == site.comp).map(|b| b + 1),
                _ => usize::try_from(parameter).ok(),
            };
            let operand = number.and_then(|n| program.operand(caller, n));
            values.extend(operand.map(|operand| (operand, part)));
        }
        values
    }

    /// Whether a value comes to the optimizer without a product or a reduction on the way, as a
    /// gradient does and the derivative of an activation does not.
    fn reaches_optimizer(&self, start: Value) -> bool {
        // A collective of one operand is no tuple.
        let is_tuple = self.program.operands(start.0).count() > 1;
        let start = (start.0, start.1.filter(|_| is_tuple));
        let mut seen = HashSet::from([start]);
        let mut stack = vec![start];
        while let Some(value) = stack.pop() {
            if seen.len() > WALK_LIMIT {
                return false;
            }
            for next in self.targets(value) {
                let instruction = self.program.instruction(next.0);
                let structural = is_structural(&instruction.opcode);
                if !structural && has_scope(op_name(instruction), scopes::OPTIMIZER) {
                    return true;
                }
                let ends = is_contraction(&instruction.opcode)
                    || matches!(instruction.opcode.as_str(), "reduce" | "reduce-window");
                if !ends && seen.insert(next) {
                    stack.push(next);
                }
            }
        }
        false
    }

    /// The values computed from a value.
    fn targets(&self, (site, part): Value) -> Vec<Value> {
        let program = self.program;
        let mut targets = Vec::new();
        for &user in self.users.get(&site).into_iter().flatten() {
            let instruction = program.instruction(user);
            let positions = || {
                program
                    .operands(user)
                    .enumerate()
                    .filter(|(_, operand)| *operand == site)
                    .map(|(position, _)| position)
            };
            match instruction.opcode.as_str() {
                "get-tuple-element" => {
                    if part.is_none_or(|part| part == instruction.tuple_index) {
                        targets.push((user, None));
                    }
                }
                "tuple" => targets.extend(positions().map(|p| (user, i64::try_from(p).ok()))),
                "while" => targets.extend(
                    program
                        .called(user)
                        .next()
                        .and_then(|body| self.parameter(body, 0))
                        .map(|parameter| (parameter, part)),
                ),
                "fusion" | "call" => targets.extend(positions().filter_map(|p| {
                    let callee = program.called(user).next()?;
                    Some((self.parameter(callee, p)?, part))
                })),
                "conditional" => targets.extend(positions().filter_map(|p| {
                    let branch = program.called(user).nth(p.checked_sub(1)?)?;
                    Some((self.parameter(branch, 0)?, part))
                })),
                "send" => {
                    let rendezvous = attribute(instruction, RENDEZVOUS).unwrap_or_default();
                    let recvs = self.recvs.get(rendezvous).into_iter().flatten();
                    targets.extend(recvs.map(|&recv| (recv, None)));
                }
                _ => targets.push((user, None)),
            }
        }
        if program.root(site.comp) == site {
            for &caller in &program.computations[site.comp].callers {
                let is_while = program.instruction(caller).opcode == "while";
                let is_body = program.called(caller).next() == Some(site.comp);
                if is_while && !is_body {
                    continue;
                }
                targets.push((caller, part));
                if is_while {
                    let parameter = self.parameter(site.comp, 0);
                    targets.extend(parameter.map(|parameter| (parameter, part)));
                }
            }
        }
        // A send's own name stands for what its counterpart receives.
        if program.instruction(site).opcode == "send" {
            let rendezvous = attribute(program.instruction(site), RENDEZVOUS).unwrap_or_default();
            let recvs = self.recvs.get(rendezvous).into_iter().flatten();
            targets.extend(recvs.map(|&recv| (recv, None)));
        }
        targets
    }

    fn parameter(&self, comp: usize, number: usize) -> Option<Site> {
        let instructions = &self.program.computations[comp].proto.instructions;
        let index = instructions.iter().position(|i| {
            i.opcode == "parameter" && usize::try_from(i.parameter_number) == Ok(number)
        })?;
        Some(Site { comp, index })
    }
}

enum Walk {
    Through,
    Stop,
    End,
}

fn select<'a>(names: &BTreeSet<&'a str>, keep: impl Fn(&str) -> bool) -> Vec<&'a str> {
    names.iter().copied().filter(|n| keep(n)).collect()
}

/// Whether `scope` is a component of a path. The compiler joins the names of merged instructions
/// by semicolons.
fn has_scope(op_name: &str, scope: &str) -> bool {
    op_name.split([';', '/']).any(|part| part == scope)
}

/// Instructions whose name tells where a value is kept, not what it is.
fn is_structural(opcode: &str) -> bool {
    matches!(
        opcode,
        "tuple"
            | "get-tuple-element"
            | "parameter"
            | "while"
            | "call"
            | "conditional"
            | "bitcast"
            | "copy"
            | "copy-start"
            | "copy-done"
            | "opt-barrier"
            | "after-all"
            | "constant"
            | "broadcast"
            | "iota"
    )
}
