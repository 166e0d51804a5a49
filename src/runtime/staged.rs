//! Programs in stages: what depends on weights alone runs when they are loaded, what depends on the prompt runs once
//! for all steps (see [`crate::graph::stage`]).

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use rayon::prelude::*;

use crate::emit::{Module, Modules};
use crate::lowering::Lowered;

use super::{Array, Program, ProgramOptions, RuntimeError, Session, Slot, Value};

/// A program in stages, compiled for one session.
pub struct StagedProgram {
    groups: Vec<Group>,
    request: Option<Arc<Program>>,
    step: Arc<Program>,
    weights: Vec<Slot>,
    timings: StagedTimings,
}

/// Seconds spent on making all stages, and how many programs that took.
#[derive(Clone, Copy, Debug, Default)]
pub struct StagedTimings {
    pub emit: f64,
    pub compile: f64,
    /// Programs that were made.
    pub programs: usize,
}

/// Weights of which something is made ahead. Groups that differ only in names share a program.
struct Group {
    program: Arc<Program>,
    /// The program's StableHLO, which names nothing.
    text: Arc<str>,
    weights: Vec<String>,
    results: Vec<String>,
}

/// The weights of one program, as it uses them.
#[derive(Default)]
pub struct Prepared<'a> {
    arrays: HashMap<String, Value<'a>>,
}

/// Weights on their way to what a program uses: [`Preparation::take`] is given each of [`StagedProgram::weights`], in
/// order, and drops those given away as soon as nothing needs them any more.
pub struct Preparation<'p, 'a> {
    slots: std::slice::Iter<'p, Slot>,
    groups: std::slice::Iter<'p, Group>,
    /// The weights of the first of `groups`, as far as they are there.
    given: Vec<(&'p str, Value<'a>)>,
    used_as_is: HashSet<&'p str>,
    prepared: Prepared<'a>,
}

impl<'a> Preparation<'_, 'a> {
    /// Takes the next weight.
    ///
    /// # Errors
    /// When there is no next one, or the program that makes something of it fails.
    pub fn take(&mut self, value: Value<'a>) -> Result<(), RuntimeError> {
        let slot = self.slots.next().ok_or(RuntimeError::TooManyWeights)?;
        let Some(group) = self.groups.as_slice().first() else {
            self.prepared.arrays.insert(slot.name.clone(), value);
            return Ok(());
        };
        self.given.push((&slot.name, value));
        if self.given.len() < group.weights.len() {
            return Ok(());
        }
        self.groups.next();
        let arguments = self
            .given
            .iter()
            .map(|(_, value)| Value::Borrow(value.array()))
            .collect();
        let results = group.program.run(arguments)?;
        let results = results.into_iter().map(Value::Donate);
        self.prepared
            .arrays
            .extend(group.results.iter().cloned().zip(results));
        for (name, value) in self.given.drain(..) {
            if self.used_as_is.contains(name) {
                self.prepared.arrays.insert(name.to_string(), value);
            }
        }
        Ok(())
    }

    /// The results of the load stage.
    ///
    /// # Errors
    /// When one is missing.
    pub fn finish(mut self) -> Result<Prepared<'a>, RuntimeError> {
        match self.slots.next() {
            Some(slot) => Err(RuntimeError::MissingWeight(slot.name.clone())),
            None => Ok(self.prepared),
        }
    }
}

impl Prepared<'_> {
    /// The array of a weight, or of a result of the load stage, by its name in the program.
    pub fn get(&self, name: &str) -> Option<&Array> {
        self.arrays.get(name).map(Value::array)
    }
}

impl StagedProgram {
    /// Compiles the programs of `lowered`, which was lowered for the session ([`Session::lower`]), side by side.
    ///
    /// # Errors
    /// The compiler's.
    pub fn compile(
        session: &Session,
        lowered: Lowered,
        options: &ProgramOptions,
    ) -> Result<StagedProgram, RuntimeError> {
        let modules = Modules::new(lowered, session.mesh(), options.precision);
        let groups = modules.groups;
        let load = modules.load.iter();
        let texts: Vec<Arc<str>> = load.map(|module| module.text.as_str().into()).collect();
        let has_request = modules.request.is_some();
        let first_load = 1 + usize::from(has_request);
        let step = [modules.step].into_iter();
        let all: Vec<Module> = step.chain(modules.request).chain(modules.load).collect();
        let compiled = all
            .into_par_iter()
            .map(|module| Program::of_module(session, module).map(Arc::new))
            .collect::<Result<Vec<_>, _>>()?;
        let mut timings = StagedTimings::default();
        for of_one in compiled.iter().map(|program| program.timings()) {
            timings.emit += of_one.emit;
            timings.compile += of_one.compile;
            timings.programs += 1;
        }
        let groups: Vec<Group> = groups
            .into_iter()
            .map(|group| Group {
                program: compiled[first_load + group.module].clone(),
                text: texts[group.module].clone(),
                weights: group.weights,
                results: group.results,
            })
            .collect();
        let step = compiled[0].clone();
        let request = has_request.then(|| compiled[1].clone());
        let weights = weights(&groups, [Some(&*step), request.as_deref()]);
        Ok(StagedProgram {
            groups,
            request,
            step,
            weights,
            timings,
        })
    }

    /// The weights that [`Preparation::take`] takes, in its order.
    pub fn weights(&self) -> &[Slot] {
        &self.weights
    }

    /// Whether the weights that `other` prepares are those that this program takes, in the same form.
    pub fn takes_prepared_of(&self, other: &StagedProgram) -> bool {
        let is_same_group = |(a, b): (&Group, &Group)| {
            a.text == b.text && a.weights == b.weights && a.results == b.results
        };
        let is_same_slot =
            |(a, b): (&Slot, &Slot)| a.name == b.name && a.spec == b.spec && a.shape == b.shape;
        let taken = |program: &StagedProgram| -> BTreeSet<String> {
            let inputs = program.programs().flat_map(Program::inputs);
            inputs.map(|slot| slot.name.clone()).collect()
        };
        self.groups.len() == other.groups.len()
            && self.groups.iter().zip(&other.groups).all(is_same_group)
            && self.weights.len() == other.weights.len()
            && self.weights.iter().zip(&other.weights).all(is_same_slot)
            && taken(self) == taken(other)
    }

    /// The program of every step.
    pub fn step(&self) -> &Program {
        &self.step
    }

    /// How many of the plugin's kernels a step calls, by name.
    pub fn kernels(&self) -> &BTreeMap<&'static str, usize> {
        self.step.kernels()
    }

    pub fn timings(&self) -> StagedTimings {
        self.timings
    }

    /// Starts to make of the weights what the other stages use.
    pub fn preparation<'a>(&self) -> Preparation<'_, 'a> {
        let used_as_is = self.programs().flat_map(Program::inputs);
        Preparation {
            slots: self.weights.iter(),
            groups: self.groups.iter(),
            given: Vec::new(),
            used_as_is: used_as_is.map(|slot| slot.name.as_str()).collect(),
            prepared: Prepared::default(),
        }
    }

    /// Computes what the inputs of a request decide: arrays by name, for [`StagedProgram::step`].
    ///
    /// # Errors
    /// When `lookup` lacks an input, or the program fails.
    pub fn request<'a>(
        &self,
        lookup: &dyn Fn(&str) -> Option<&'a Array>,
    ) -> Result<HashMap<String, Array>, RuntimeError> {
        let Some(program) = &self.request else {
            return Ok(HashMap::new());
        };
        let results = program.call(lookup, Vec::new())?;
        let names = program.outputs().iter().map(|slot| slot.name.clone());
        Ok(names.zip(results).collect())
    }

    fn programs(&self) -> impl Iterator<Item = &Program> {
        [Some(&*self.step), self.request.as_deref()]
            .into_iter()
            .flatten()
    }

    /// The input called `name` of any stage.
    pub fn input(&self, name: &str) -> Option<&Slot> {
        self.programs()
            .flat_map(Program::inputs)
            .find(|slot| slot.name == name)
    }
}

/// The weights of all groups, then those that are used as they are and are not among them.
fn weights(groups: &[Group], programs: [Option<&Program>; 2]) -> Vec<Slot> {
    let mut weights = Vec::new();
    let mut seen: HashSet<&str> = HashSet::new();
    for group in groups {
        for (name, slot) in group.weights.iter().zip(group.program.inputs()) {
            seen.insert(name);
            weights.push(Slot {
                name: name.clone(),
                ..slot.clone()
            });
        }
        seen.extend(group.results.iter().map(String::as_str));
    }
    for slot in programs.into_iter().flatten().flat_map(Program::inputs) {
        if slot.weight && seen.insert(&slot.name) {
            weights.push(slot.clone());
        }
    }
    weights
}
