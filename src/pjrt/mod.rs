//! The PJRT runtime: plugins, clients, buffers, executables, topologies.
//!
//! A [`Plugin`] is a shared library that compiles and runs programs for one kind of device. With a
//! [`Client`] it runs them on the devices of this machine; with a [`Topology`] it compiles them for
//! devices that are not here. Objects keep what they were made from alive, may be shared between
//! threads, and are freed when dropped; a plugin is never unloaded.

#![deny(unsafe_code)]

mod buffer;
mod captured;
mod client;
mod compile_options;
mod error;
mod executable;
#[allow(unsafe_code)]
mod ffi;
pub mod install;
mod plugin;
#[cfg(test)]
#[path = "../../tests/common/plugins.rs"]
mod plugins;
mod processor;
mod threads;
mod topology;
mod values;

pub use buffer::{Buffer, HostCopy, Ready};
pub use client::{Client, Device};
pub use compile_options::{CompileOptions, DeviceAssignment, OptimizationLevel, OptionValue};
pub use error::{ApiVersion, ErrorCode, PjrtError};
pub use executable::{Arg, Executable, Execution, LoadedExecutable};
pub use plugin::{
    ISA, ISA_VARIABLE, Kernels, Plugin, UNUSABLE_ISAS, USABLE_ISAS, has_tpu, prepare_process,
};
pub use processor::{CPUINFO, processor};
pub use threads::{CPU_THREADS_VARIABLE, cpu_threads};
pub use topology::Topology;
pub use values::{
    CompiledMemoryStats, DeviceDescription, DeviceMemoryStats, ElementType, NamedValue,
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_shared_between_threads() {
        fn shared<T: Send + Sync>() {}
        shared::<Plugin>();
        shared::<Client>();
        shared::<Device>();
        shared::<Buffer>();
        shared::<Ready>();
        shared::<HostCopy>();
        shared::<Topology>();
        shared::<Executable>();
        shared::<LoadedExecutable>();
        shared::<Execution>();
        shared::<PjrtError>();
    }
}
