//! One layer alone: which backends have kernels for it, and what a kernel takes of a chip beside what the compiler
//! makes of the layer. `maxdiff-rs kernel` prints it.

mod layer;

use std::collections::BTreeMap;

use crate::aot::{AotError, Compiler, Options, Simulator};
use crate::backend::{Backend, kernel_counts};
use crate::emit::DotPrecision;
use crate::graph::GraphError;
use crate::lowering::{self, LowerError};
use crate::quant::QuantError;
use crate::report::CompileReport;
use crate::shard::{DeviceDescription, LogicalAxisRules, Mesh, Parallelism, ShardError};
use crate::topology::Accelerator;

pub use layer::{Case, Layer, LayerQuantization};

/// Why a layer cannot be built or compiled.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    #[error("{found:?} is no dimension of {layer}; it has {}", expected.join(", "))]
    Dimension {
        layer: Layer,
        found: String,
        expected: Vec<String>,
    },
    #[error("{layer} does not contract, so there is nothing to quantize")]
    NoContraction { layer: Layer },
    #[error("no TPU kernel takes {0}: the compiler makes it of the layer's operations")]
    NoKernel(String),
    #[error(transparent)]
    Graph(#[from] GraphError),
    #[error(transparent)]
    Quant(#[from] QuantError),
    #[error(transparent)]
    Lower(#[from] LowerError),
    #[error(transparent)]
    Shard(#[from] ShardError),
    #[error(transparent)]
    Aot(#[from] AotError),
}

impl KernelError {
    /// Whether the arguments are wrong, rather than a plugin or a compiler.
    pub fn is_usage(&self) -> bool {
        match self {
            KernelError::Dimension { .. }
            | KernelError::NoContraction { .. }
            | KernelError::NoKernel(_)
            | KernelError::Graph(_)
            | KernelError::Quant(_)
            | KernelError::Lower(_)
            | KernelError::Shard(_) => true,
            KernelError::Aot(error) => error.is_usage(),
        }
    }
}

/// The kernels that a backend calls for a layer, by name.
///
/// # Errors
/// When the layer's dimensions do not fit it.
pub fn claimed(
    case: &Case,
    backend: Backend,
) -> Result<BTreeMap<&'static str, usize>, KernelError> {
    let mesh = Mesh::new(&Parallelism::default(), &DeviceDescription::numbered(1, 1))?;
    let options = lowering::Options {
        mesh: &mesh,
        rules: &LogicalAxisRules::default(),
    };
    let lowered = lowering::lower(&case.traced()?, backend, &options)?;
    let mut counts = BTreeMap::new();
    for program in lowered.programs() {
        for (name, count) in kernel_counts(&program.graph) {
            *counts.entry(name).or_default() += count;
        }
    }
    Ok(counts)
}

/// Compiles a layer with this program's kernels for one device of `accelerator`.
///
/// # Errors
/// [`KernelError::NoKernel`] where no kernel takes the layer; the compiler's where it refuses the kernel.
pub fn check(case: &Case, accelerator: Accelerator) -> Result<CompileReport, KernelError> {
    match has_kernel(case, &accelerator)? {
        true => report(case, &Compiler::for_one_device(accelerator)?),
        false => Err(KernelError::NoKernel(case.to_string())),
    }
}

/// The reports of a layer with this program's kernels, which are simulated, and without.
#[derive(Debug)]
pub struct Comparison {
    /// `None` where no kernel takes the layer.
    pub kernels: Option<CompileReport>,
    pub compiler: CompileReport,
}

/// Compiles a layer with and without kernels for one device of `accelerator`.
///
/// # Errors
/// When the compiler refuses one of the two.
pub fn compare(
    case: &Case,
    accelerator: Accelerator,
    simulator: Simulator,
) -> Result<Comparison, KernelError> {
    let compiler = Compiler::for_one_device(accelerator.clone())?.with_simulator(simulator);
    let kernels = has_kernel(case, &accelerator)?.then(|| report(case, &compiler));
    Ok(Comparison {
        kernels: kernels.transpose()?,
        compiler: report(
            case,
            &Compiler::for_one_device(accelerator)?.without_kernels(),
        )?,
    })
}

fn has_kernel(case: &Case, accelerator: &Accelerator) -> Result<bool, KernelError> {
    Ok(!claimed(case, accelerator.backend())?.is_empty())
}

/// The report of the step program; what is computed from weights alone is not in it.
fn report(case: &Case, compiler: &Compiler) -> Result<CompileReport, KernelError> {
    let options = Options {
        step: "kernel",
        precision: DotPrecision::Default,
        weights_dtype: "bfloat16",
        activations_dtype: "bfloat16",
        quantization: case
            .quantization
            .map_or("", LayerQuantization::name)
            .to_owned(),
        memory_advice: Vec::new(),
    };
    Ok(compiler
        .compile(&case.traced()?, &options, &mut |_| {})?
        .step
        .report)
}
