//! Topologies: devices that need not be here.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Arc;

use super::api::{Api, made};
use super::client::{describe, mlir_program};
use super::handle::{Compiler, ExecutableHandle, Handle, TopologyHandle};
use super::types::*;
use super::values::{copied, named_values, raw_named_values, text};
use crate::pjrt::error::PjrtError;
use crate::pjrt::values::DeviceDescription;
use crate::pjrt::values::NamedValue;

impl TopologyHandle {
    pub fn create(
        api: Api,
        name: &str,
        options: &[(String, NamedValue)],
    ) -> Result<Self, PjrtError> {
        let options = raw_named_values(options);
        let mut args = PJRT_TopologyDescription_Create_Args {
            topology_name: name.as_ptr().cast(),
            topology_name_size: name.len(),
            create_options: options.as_ptr(),
            num_options: options.len(),
            ..PJRT_TopologyDescription_Create_Args::new()
        };
        // SAFETY: name and options live during the call. What is made is ours, and needs only the
        // plugin.
        unsafe {
            api.call(&mut args)?;
            let topology = made(
                PJRT_TopologyDescription_Create_Args::FUNCTION,
                args.topology,
            )?;
            Ok(Handle::new(api, topology, ()))
        }
    }

    pub fn platform_name(&self) -> Result<String, PjrtError> {
        let args = PJRT_TopologyDescription_PlatformName_Args {
            topology: self.raw(),
            ..PJRT_TopologyDescription_PlatformName_Args::new()
        };
        // SAFETY: *owned*, *lent*.
        unsafe {
            let args = self.call(args)?;
            Ok(text(args.platform_name, args.platform_name_size))
        }
    }

    pub fn platform_version(&self) -> Result<String, PjrtError> {
        let args = PJRT_TopologyDescription_PlatformVersion_Args {
            topology: self.raw(),
            ..PJRT_TopologyDescription_PlatformVersion_Args::new()
        };
        // SAFETY: *owned*, *lent*.
        unsafe {
            let args = self.call(args)?;
            Ok(text(args.platform_version, args.platform_version_size))
        }
    }

    pub fn attributes(&self) -> Result<BTreeMap<String, NamedValue>, PjrtError> {
        let args = PJRT_TopologyDescription_Attributes_Args {
            topology: self.raw(),
            ..PJRT_TopologyDescription_Attributes_Args::new()
        };
        // SAFETY: *owned*, *lent*.
        unsafe {
            let args = self.call(args)?;
            Ok(named_values(args.attributes, args.num_attributes))
        }
    }

    pub fn descriptions(&self) -> Result<Vec<DeviceDescription>, PjrtError> {
        let args = PJRT_TopologyDescription_GetDeviceDescriptions_Args {
            topology: self.raw(),
            ..PJRT_TopologyDescription_GetDeviceDescriptions_Args::new()
        };
        // SAFETY: *owned*, *lent*: the descriptions live as long as the topology.
        unsafe {
            let args = self.call(args)?;
            copied(args.descriptions, args.num_descriptions)
                .into_iter()
                .filter_map(NonNull::new)
                .map(|description| describe(self.api(), description))
                .collect()
        }
    }

    pub fn compile(
        self: &Arc<Self>,
        code: &str,
        options: &[u8],
    ) -> Result<ExecutableHandle, PjrtError> {
        let program = mlir_program(code);
        let args = PJRT_Compile_Args {
            topology: self.raw(),
            program: &program,
            compile_options: options.as_ptr().cast(),
            compile_options_size: options.len(),
            ..PJRT_Compile_Args::new()
        };
        // SAFETY: *owned*; program and options live during the call, and are only read; no client
        // is asked for. What is made is ours, and keeps the topology it was made for.
        unsafe {
            let args = self.call(args)?;
            let executable = made(PJRT_Compile_Args::FUNCTION, args.executable)?;
            Ok(Handle::new(
                self.api(),
                executable,
                Compiler::Topology(self.clone()),
            ))
        }
    }
}
