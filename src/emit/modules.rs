//! The StableHLO modules of a lowered program.

use std::collections::HashMap;
use std::fmt::Display;
use std::time::Instant;

use crate::lowering::{Lowered, LoweredProgram};
use crate::shard::Mesh;

use super::{DotPrecision, EmitOptions, stablehlo};

/// One program as text.
#[derive(Clone, Debug)]
pub struct Module {
    pub program: LoweredProgram,
    pub text: String,
    /// The time that emission took.
    pub seconds: f64,
    precision: DotPrecision,
}

impl Module {
    pub fn new(program: LoweredProgram, mesh: &Mesh, precision: DotPrecision) -> Module {
        let start = Instant::now();
        let options = EmitOptions {
            precision,
            sharding: program.plan.text(mesh),
        };
        let text = stablehlo(&program.graph, &program.name, &options);
        Module {
            program,
            text,
            seconds: start.elapsed().as_secs_f64(),
            precision,
        }
    }

    /// What `compile` makes of the module. If it refuses kernels whose operations are known, it gets the program with these in their
    /// place, and the module is that one then.
    ///
    /// # Errors
    /// Those of `compile`, of the module without kernels if it had some.
    pub fn compile<T, E: Display>(
        &mut self,
        mesh: &Mesh,
        compile: impl Fn(&str) -> Result<T, E>,
    ) -> Result<T, E> {
        let refusal = match compile(&self.text) {
            Ok(compiled) => return Ok(compiled),
            Err(refusal) => refusal,
        };
        let Ok(Some(graph)) = self.program.graph.without_calls() else {
            return Err(refusal);
        };
        tracing::warn!(
            "{}: the compiler refuses the program with kernels ({refusal}); it is compiled without them, and takes longer to run",
            self.program.name
        );
        let program = LoweredProgram {
            graph,
            ..self.program.clone()
        };
        *self = Module::new(program, mesh, self.precision);
        compile(&self.text)
    }
}

/// Weights of which something is made while they are loaded.
#[derive(Clone, Debug)]
pub struct LoadGroup {
    /// Which of [`Modules::load`] makes it.
    pub module: usize,
    /// The weights' names, in the order of the module's inputs.
    pub weights: Vec<String>,
    /// The names of what is computed from them, in the order of the module's outputs.
    pub results: Vec<String>,
}

/// The modules of a lowered program. Load programs that differ only in names are one module.
#[derive(Clone, Debug)]
pub struct Modules {
    pub load: Vec<Module>,
    pub groups: Vec<LoadGroup>,
    pub request: Option<Module>,
    pub step: Module,
}

impl Modules {
    pub fn new(lowered: Lowered, mesh: &Mesh, precision: DotPrecision) -> Modules {
        let module = |program: LoweredProgram| Module::new(program, mesh, precision);
        let mut load: Vec<Module> = Vec::new();
        let mut by_text: HashMap<String, usize> = HashMap::new();
        let mut groups = Vec::with_capacity(lowered.load.len());
        for program in lowered.load {
            let graph = &program.graph;
            let weights = graph.inputs.iter().map(|i| i.name.clone()).collect();
            let results = graph.outputs.iter().map(|o| o.name.clone()).collect();
            let anonymous = module(LoweredProgram {
                graph: graph.anonymous(),
                ..program
            });
            let at = *by_text
                .entry(anonymous.text.clone())
                .or_insert_with(|| load.len());
            if at == load.len() {
                load.push(anonymous);
            }
            groups.push(LoadGroup {
                module: at,
                weights,
                results,
            });
        }
        Modules {
            load,
            groups,
            request: lowered.request.map(module),
            step: module(lowered.step),
        }
    }
}
