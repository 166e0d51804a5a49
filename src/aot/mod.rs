//! Programs compiled ahead of time, with a report of what they need and move.
//!
//! A [`Compiler`] is that of a topology that is not here, or of a session's devices. [`Compiler::compile`] lowers a
//! traced program and compiles what it becomes; [`Compiled::bundle`] is what is saved of it.

mod compiler;
mod cycles;
mod error;
mod grid;
mod header;
mod kept_cycles;
mod simulations;
mod simulator_child;
mod trips;
mod vliw;

use std::collections::BTreeMap;

use crate::bundle::{Bundle, Header, PayloadKind, ProgramHeader};
use crate::emit::DotPrecision;
use crate::footprint::Footprint;
use crate::lowering::Stage;
use crate::pjrt::{ErrorCode, Executable, PjrtError};
use crate::quant::{Decision, Slower};
use crate::report::CompileReport;

pub use compiler::{Compiler, compiler_for_one};
pub use cycles::Simulator;
pub use error::AotError;
pub use simulator_child::{SimulationError, serve};

/// The options of a compilation, beside its devices.
#[derive(Clone, Debug)]
pub struct Options {
    /// The program's name in the bundle and in messages: `train` or `denoise`.
    pub step: &'static str,
    pub precision: DotPrecision,
    /// The names of the settings that the program was traced with, for the bundle.
    pub weights_dtype: &'static str,
    pub activations_dtype: &'static str,
    pub quantization: String,
    /// Advice for a program that does not fit its devices, in the message of [`crate::footprint::OutOfMemory`].
    pub memory_advice: Vec<String>,
}

/// What the compiler does next.
#[derive(Clone, Debug)]
pub enum Progress<'a> {
    /// All programs fit the devices; a step takes `step` of each.
    Fits { step: &'a Footprint },
    /// Compiles a program: number `number` of `programs`, from 1.
    Compiling {
        stage: Stage,
        number: usize,
        programs: usize,
    },
}

/// The compiled programs of a traced program.
pub struct Compiled {
    /// The load programs, which prepare the weights: one for each kind of group of weights.
    pub load: Vec<CompiledProgram>,
    /// The request program, run once for a request.
    pub request: Option<CompiledProgram>,
    /// The step program, run in every step.
    pub step: CompiledProgram,
    /// The memory that a step takes of each device, as estimated.
    pub footprint: Footprint,
    /// The decision of quantization for each contraction.
    pub decisions: Vec<Decision>,
    /// What `int8_where_faster` left in float.
    pub slower: Vec<Slower>,
    pub header: Header,
    pub seconds: Seconds,
}

/// A compiled program with its report.
pub struct CompiledProgram {
    pub executable: Executable,
    pub report: CompileReport,
    pub header: ProgramHeader,
    /// How many of a backend's kernels it calls, by name.
    pub kernels: BTreeMap<&'static str, usize>,
    stablehlo: String,
}

/// Seconds by phase.
#[derive(Debug, Clone, Copy)]
pub struct Seconds {
    pub lower: f64,
    pub emit: f64,
    /// Compiling, with reading the reports.
    pub compile: f64,
}

/// A bundle of compiled programs.
pub struct Bundled {
    pub bundle: Bundle,
    /// Why the bundle holds StableHLO instead of executables, if it does.
    pub not_serialized: Option<PjrtError>,
}

impl Compiled {
    /// All programs, in the order in which they run.
    pub fn programs(&self) -> impl Iterator<Item = &CompiledProgram> {
        self.load.iter().chain(&self.request).chain([&self.step])
    }

    /// The programs as a bundle. Where the plugin does not serialize a program, the bundle has its StableHLO.
    ///
    /// # Errors
    /// When serializing fails for another reason.
    pub fn bundle(&self) -> Result<Bundled, PjrtError> {
        let mut header = self.header.clone();
        let mut payload = Vec::new();
        let mut not_serialized = None;
        for (program, header) in self.programs().zip(&mut header.programs) {
            let bytes = match program.executable.serialize() {
                Ok(bytes) => bytes,
                Err(error) if error.code() == Some(ErrorCode::Unimplemented) => {
                    header.payload = PayloadKind::Stablehlo;
                    not_serialized = Some(error);
                    program.stablehlo.clone().into_bytes()
                }
                Err(error) => return Err(error),
            };
            header.payload_bytes = bytes.len() as u64;
            payload.extend(bytes);
        }
        Ok(Bundled {
            bundle: Bundle { header, payload },
            not_serialized,
        })
    }

    /// How often load programs run while weights are loaded.
    pub fn load_runs(&self) -> usize {
        self.load.iter().map(CompiledProgram::runs).sum()
    }

    /// Predicted milliseconds of preparing all weights, where the compiler predicts them.
    pub fn load_ms(&self) -> Option<f64> {
        let of_one =
            |p: &CompiledProgram| Some(p.report.predicted_ms.as_ref()?.total * p.runs() as f64);
        let mut each = self.load.iter().map(of_one);
        // `sum` of no floats would be -0.
        each.try_fold(0.0, |sum, ms| Some(sum + ms?))
    }

    /// Whether every program fits a device, where that is known.
    pub fn fits(&self) -> Option<bool> {
        let each: Option<Vec<bool>> = self.programs().map(|p| p.report.memory.fits()).collect();
        each.map(|each| each.into_iter().all(|fits| fits))
    }
}

impl CompiledProgram {
    /// How often it runs: once for each group of weights, or once.
    pub fn runs(&self) -> usize {
        self.header.groups.len().max(1)
    }
}
