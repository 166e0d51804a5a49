//! The PJRT runtime: plugins, clients, buffers, executables, topologies.

pub mod install;
