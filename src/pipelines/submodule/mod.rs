//! The forward pass of one part of a model on saved tensors.
//!
//! Names are diffusers' and transformers', so that the same file of inputs goes through PyTorch and the two results
//! can be compared.

mod inputs;
mod network;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::emit::DotPrecision;
use crate::graph::Builder;
use crate::host_tensor::HostTensor;
use crate::lowering::Traced;
use crate::models::{DenoiserKind, Family, FamilySpec, ModelConfigError};
use crate::nn::Precision;
use crate::quant::Policy;
use crate::runtime::{RuntimeError, Session, Slot};
use crate::weights::Checkpoint;
use crate::weights::quantized::Quantization;

use super::model_files::{Expected, check, check_stored};
use super::{PartProgram, PipelineError, TakeWeight, WeightSource};

pub use inputs::SubmoduleInputs;
use network::{CONFIG, Network};

/// Why a submodule could not be run.
#[derive(Debug, thiserror::Error)]
pub enum SubmoduleError {
    #[error("{}: {reason}", path.display())]
    Config { path: PathBuf, reason: String },
    #[error("{}: {source}", path.display())]
    Model {
        path: PathBuf,
        source: ModelConfigError,
    },
    #[error("{}: does not fit the module:\n  {}", path.display(), problems.join("\n  "))]
    Inputs {
        path: PathBuf,
        problems: Vec<String>,
    },
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
}

impl SubmoduleError {
    /// Whether the requested quantization is wrong, rather than a file, a device or a compiler.
    pub fn is_usage(&self) -> bool {
        matches!(self, SubmoduleError::Pipeline(PipelineError::Quant(_)))
    }
}

/// A denoiser, a VAE or a text encoder: a folder in diffusers' layout.
pub struct Submodule {
    network: Network,
    checkpoint: Checkpoint,
}

/// The results of a submodule.
pub struct SubmoduleRun {
    /// Results by name, in float32.
    pub outputs: Vec<(String, HostTensor)>,
    /// How many of the plugin's kernels the program calls, by name.
    pub kernels: BTreeMap<&'static str, usize>,
    pub seconds: SubmoduleSeconds,
}

/// Seconds by phase; of several runs the least.
#[derive(Clone, Copy, Debug)]
pub struct SubmoduleSeconds {
    pub emit: f64,
    pub compile: f64,
    pub load: f64,
    pub run: f64,
}

impl Submodule {
    /// Opens a folder with `config.json` and safetensors, sharded or not.
    ///
    /// # Errors
    /// When a file cannot be read, or the configuration is of another network.
    pub fn open(folder: &Path) -> Result<Submodule, SubmoduleError> {
        let file = Checkpoint::open(folder).map_err(PipelineError::from)?;
        let (network, config) = Network::read(folder)?;
        let checkpoint = file
            .described_by(&folder.join(CONFIG), &config)
            .map_err(PipelineError::from)?;
        Ok(Submodule {
            network,
            checkpoint,
        })
    }

    /// The name of its class in diffusers or transformers.
    pub fn class(&self) -> &'static str {
        self.network.class()
    }

    /// A family with such a denoiser, which says what of it stays in float; for other parts it does not matter which.
    pub fn family(&self) -> &'static FamilySpec {
        let kind = match &self.network {
            Network::Denoiser(denoiser) => denoiser.kind(),
            Network::ClipText(_) | Network::T5(_) | Network::Vae(_) => DenoiserKind::Unet,
        };
        let mut specs = Family::ALL.into_iter().map(Family::spec);
        let found = specs.find(|spec| spec.denoiser == kind);
        found.unwrap_or(Family::ALL[0].spec())
    }

    /// How its weights are stored, if some are quantized.
    pub fn quantization(&self) -> Option<&Quantization> {
        self.checkpoint.quantization()
    }

    /// Reads its inputs from a safetensors file.
    ///
    /// # Errors
    /// [`SubmoduleError::Inputs`] with every tensor that is missing, unknown, or of another type or shape.
    pub fn read_inputs(&self, path: &Path) -> Result<SubmoduleInputs, SubmoduleError> {
        SubmoduleInputs::read(&self.network, path)
    }

    /// Traces the forward pass for inputs of these sizes, quantized by the rules of `policy`.
    ///
    /// # Errors
    /// When the sizes do not fit the network, a rule matches nothing, or the weights are not those of the network, or
    /// stored in other formats than the policy says.
    pub fn trace(
        &self,
        inputs: &SubmoduleInputs,
        precision: Precision,
        policy: Option<Policy>,
    ) -> Result<Traced, SubmoduleError> {
        let root = self.network.root();
        let b = Builder::new();
        let results = self
            .network
            .declare(&b, &inputs.sizes, &inputs.tensors, precision);
        for (name, tensor) in results.map_err(PipelineError::from)? {
            b.output(name, tensor, None).map_err(PipelineError::from)?;
        }
        let policy = policy.map(|policy| Policy {
            model: format!("{root}/"),
            ..policy
        });
        let traced = Traced::new(root, b.finish())
            .quantized(policy.as_ref())
            .map_err(PipelineError::from)?;
        let expected: Expected<'_> = traced
            .graph
            .weights()
            .map(|(_, w)| (w.key(), w.shape.dims.as_slice()))
            .collect();
        check(root, &expected, &self.checkpoint)?;
        let policy = traced.policy.as_ref();
        let stored = policy.map(|policy| policy.stored.clone());
        check_stored(&self.checkpoint, &stored.unwrap_or_default())?;
        Ok(traced)
    }

    /// Compiles the traced forward pass, reads the weights and computes the results, `runs` times and at least once.
    ///
    /// # Errors
    /// When the program does not compile or fails, or a weight cannot be read.
    pub fn run(
        &self,
        session: &Session,
        traced: &Traced,
        precision: DotPrecision,
        inputs: &SubmoduleInputs,
        runs: u32,
    ) -> Result<SubmoduleRun, PipelineError> {
        let lowered = session.lower(traced).map_err(RuntimeError::from)?;
        let program = PartProgram::compile(session, lowered, precision)?;
        let stages = program.stages();

        let start = Instant::now();
        let read = |slots: &[Slot], take: &mut TakeWeight<'_>| {
            for slot in slots {
                // A large tensor is read by several threads.
                let tensor = self.checkpoint.read_as(slot.key(), slot.shape.dtype)?;
                take(session.put(&tensor, &slot.spec)?)?;
            }
            Ok(())
        };
        let weights = WeightSource::Files(&read).prepare(stages, &mut |_| Ok(()))?;
        let load = start.elapsed().as_secs_f64();

        let forward = || {
            let start = Instant::now();
            let mut arrays = program.inputs(session);
            for (name, tensor) in &inputs.tensors {
                arrays.set(name, tensor)?;
            }
            let results = program.run(&weights, &arrays)?;
            Ok::<_, PipelineError>((results, start.elapsed().as_secs_f64()))
        };
        let (results, mut run) = forward()?;
        for _ in 1..runs {
            run = run.min(forward()?.1);
        }
        let names = stages.step().outputs().iter().map(|slot| slot.name.clone());
        let outputs = names.zip(results).collect();
        let timings = stages.timings();
        Ok(SubmoduleRun {
            outputs,
            kernels: stages.kernels().clone(),
            seconds: SubmoduleSeconds {
                emit: timings.emit,
                compile: timings.compile,
                load,
                run,
            },
        })
    }
}
