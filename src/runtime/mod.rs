//! Programs on the devices of this machine: one path for CPU, GPU and TPU.
//!
//! A [`Session`] holds a client and the mesh of its devices. It compiles graphs to [`Program`]s, which take and
//! give [`Array`]s: tensors on the mesh's devices, replicated or in parts.

mod array;
mod cache;
mod program;
mod staged;

pub use array::Array;
pub use cache::{CacheError, CacheKey, ExecutableCache, ProgramCounts, Usage};
pub use program::{Program, ProgramOptions, Slot, Timings, Value, compile_options};
pub use staged::{Preparation, Prepared, StagedProgram, StagedTimings};

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::backend::{Backend, gpu, tpu::Features};
use crate::dtype::DType;
use crate::footprint::Fit;
use crate::graph::GraphError;
use crate::host_tensor::{HostTensor, HostTensorError};
use crate::lowering::{LowerError, Lowered, Options, Traced, lower};
use crate::pjrt::{
    Client, CompileOptions, Device, ElementType, LoadedExecutable, NamedValue, OptionValue,
    PjrtError, Plugin,
};
use crate::shape::Shape;
use crate::shard::{
    DeviceDescription, LogicalAxisRules, Mesh, Parallelism, PartitionSpec, ShardError,
};
use crate::topology::Chip;
use crate::util::memory;

use cache::Store;

/// Why a program could not be compiled or run.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    #[error(transparent)]
    Pjrt(#[from] PjrtError),
    #[error(transparent)]
    Lower(#[from] LowerError),
    #[error(transparent)]
    Shard(#[from] ShardError),
    #[error(transparent)]
    Graph(#[from] GraphError),
    #[error(transparent)]
    HostTensor(#[from] HostTensorError),
    #[error("{program}: takes {expected} arguments, found {found}")]
    ArgumentCount {
        program: String,
        expected: usize,
        found: usize,
    },
    #[error("{program}: gives {expected} results, found {found}")]
    ResultCount {
        program: &'static str,
        expected: usize,
        found: usize,
    },
    #[error("{program}: argument {name}: expected {expected}, found {found}")]
    Argument {
        program: String,
        name: String,
        expected: Shape,
        found: Shape,
    },
    #[error("{program}: no value for its input {name}")]
    MissingInput { program: String, name: String },
    #[error("no value for the weight {0}")]
    MissingWeight(String),
    #[error("more values than the program has weights")]
    TooManyWeights,
    #[error("device {id} of the mesh is not addressable from this process")]
    DeviceMissing { id: i64 },
    #[error("{0} has no counterpart in this runtime")]
    ElementType(DType),
}

/// The devices of one client laid out on a mesh.
pub struct Session {
    client: Client,
    mesh: Mesh,
    /// In mesh order.
    devices: Vec<Device>,
    rules: LogicalAxisRules,
    options: CompileOptions,
    cache: Option<Store>,
    counts: Mutex<ProgramCounts>,
}

/// A plugin's device description in the form that the mesh uses.
pub fn describe(device: &crate::pjrt::DeviceDescription) -> DeviceDescription {
    let core = match device.attributes.get("core_on_chip") {
        Some(NamedValue::Int64(core)) => *core,
        _ => 0,
    };
    DeviceDescription {
        id: device.id,
        slice_index: device.slice_index().unwrap_or(0),
        coords: device.coords().map(<[i64]>::to_vec).unwrap_or_default(),
        core_on_chip: core,
    }
}

impl Session {
    /// Opens a client of `plugin` with the plugin's own `options` and lays its devices out.
    ///
    /// # Errors
    /// The plugin's, and when the parallelism does not fit the devices.
    pub fn open(
        plugin: &Plugin,
        options: &[(String, NamedValue)],
        parallelism: &Parallelism,
        rules: LogicalAxisRules,
    ) -> Result<Session, RuntimeError> {
        let client = Client::create(plugin, options)?;
        let descriptions: Vec<DeviceDescription> = client
            .devices()
            .iter()
            .map(|d| describe(d.description()))
            .collect();
        let mesh = Mesh::new(parallelism, &descriptions)?;
        let devices = mesh
            .device_assignment()
            .iter()
            .map(|id| {
                client
                    .addressable_devices()
                    .iter()
                    .find(|d| d.id() == *id)
                    .cloned()
                    .ok_or(RuntimeError::DeviceMissing { id: *id })
            })
            .collect::<Result<Vec<_>, _>>()?;
        let backend = backend_of(&client, &mesh);
        Ok(Session {
            client,
            options: compile_options(&mesh, backend),
            mesh,
            devices,
            rules,
            cache: None,
            counts: Mutex::default(),
        })
    }

    /// From now on, programs are loaded from `cache` if they are there, and otherwise written to it when they are
    /// compiled.
    ///
    /// # Errors
    /// When it cannot be found out what the compiler's results depend on: the plugin's build, or the processor.
    pub fn keep_programs(&mut self, cache: ExecutableCache) -> Result<(), CacheError> {
        self.cache = Some(Store::new(cache, &self.client)?);
        Ok(())
    }

    /// How many programs this session has compiled, and how many it took from its cache.
    pub fn program_counts(&self) -> ProgramCounts {
        *self.counts()
    }

    fn counts(&self) -> MutexGuard<'_, ProgramCounts> {
        // Two numbers stay valid even if a thread that held them has panicked.
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The program of a StableHLO text, and whether it came from the cache.
    fn executable(&self, text: &str) -> Result<(LoadedExecutable, bool), PjrtError> {
        let (executable, from_cache) = match &self.cache {
            Some(store) => store.compile(&self.client, text, &self.options)?,
            None => (self.client.compile(text, &self.options)?, false),
        };
        match from_cache {
            true => self.counts().from_cache += 1,
            false => self.counts().compiled += 1,
        }
        Ok((executable, from_cache))
    }

    /// The same, with the folder in which the compiler for GPUs finds `bin/ptxas` and `nvvm/libdevice`
    /// ([`crate::pjrt::install::Installed::cuda_data_dir`]); without it the compiler searches the system's CUDA.
    pub fn with_cuda_data_dir(mut self, dir: Option<&Path>) -> Session {
        self.options = self.options.with_cuda_data_dir(dir);
        self
    }

    /// The same, with one of the compiler's own options ([`CompileOptions::set`]).
    pub fn with_compiler_option(mut self, name: &str, value: OptionValue) -> Session {
        self.options = self.options.set(name, value);
        self
    }

    /// The options with which programs for this session are compiled.
    pub fn compile_options(&self) -> &CompileOptions {
        &self.options
    }

    /// The backend that programs of this session are lowered for.
    pub fn backend(&self) -> Backend {
        backend_of(&self.client, &self.mesh)
    }

    /// Bytes of memory of one device, where that is known: of a processor an equal share of what the machine has left
    /// now.
    fn memory_limit(&self) -> Option<u64> {
        if self.client.platform_name() == "cpu" {
            return memory::available().map(|bytes| bytes / self.devices.len() as u64);
        }
        let stats = self.devices.first()?.memory_stats().ok()?;
        u64::try_from(stats.bytes_limit?).ok()
    }

    /// What programs of this session are to fit; `advice` makes them smaller.
    pub fn fit<'a>(&'a self, advice: &'a [String]) -> Fit<'a> {
        Fit {
            mesh: &self.mesh,
            rules: &self.rules,
            target: "this machine",
            limit: self.memory_limit(),
            advice,
        }
    }

    /// Lowers a traced program for this session's devices.
    ///
    /// # Errors
    /// Those of [`lower`].
    pub fn lower(&self, traced: &Traced) -> Result<Lowered, LowerError> {
        lower(traced, self.backend(), &self.lowering())
    }

    /// The devices that programs of this session are lowered for.
    fn lowering(&self) -> Options<'_> {
        Options {
            mesh: &self.mesh,
            rules: &self.rules,
        }
    }

    pub fn client(&self) -> &Client {
        &self.client
    }

    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    pub fn rules(&self) -> &LogicalAxisRules {
        &self.rules
    }

    /// The devices in mesh order.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Copies a host tensor to the devices, split by `spec`.
    ///
    /// # Errors
    /// When a dimension does not divide, or a transfer fails.
    pub fn put(&self, tensor: &HostTensor, spec: &PartitionSpec) -> Result<Array, RuntimeError> {
        Array::from_host(self, tensor, spec)
    }
}

/// The backend of programs for these devices of `client`.
fn backend_of(client: &Client, mesh: &Mesh) -> Backend {
    let device = client.devices().first();
    let chip = device.and_then(|device| Chip::from_device_kind(&device.description().kind));
    Backend::of_platform(
        client.platform_name(),
        chip.map_or(Features::UNKNOWN, Chip::features),
        device.and_then(|device| {
            gpu::Features::of_compute_capability(device.description().compute_capability()?)
        }),
        client.plugin().kernels().are_used(),
        mesh.num_devices(),
    )
}

fn element_type(dtype: DType) -> Result<ElementType, RuntimeError> {
    Ok(match dtype {
        DType::Pred => ElementType::Pred,
        DType::S4 => ElementType::S4,
        DType::S8 => ElementType::S8,
        DType::S16 => ElementType::S16,
        DType::S32 => ElementType::S32,
        DType::S64 => ElementType::S64,
        DType::U4 => ElementType::U4,
        DType::U8 => ElementType::U8,
        DType::U16 => ElementType::U16,
        DType::U32 => ElementType::U32,
        DType::U64 => ElementType::U64,
        DType::F4E2M1Fn => ElementType::F4E2M1Fn,
        DType::F8E4M3Fn => ElementType::F8E4M3Fn,
        DType::F8E5M2 => ElementType::F8E5M2,
        DType::F8E8M0Fnu => ElementType::F8E8M0Fnu,
        DType::F16 => ElementType::F16,
        DType::BF16 => ElementType::Bf16,
        DType::F32 => ElementType::F32,
        DType::F64 => ElementType::F64,
    })
}
