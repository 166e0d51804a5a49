//! Topologies: devices to compile for, that need not be here.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use super::compile_options::CompileOptions;
use super::error::PjrtError;
use super::executable::Executable;
use super::ffi::TopologyHandle;
use super::plugin::Plugin;
use super::values::{DeviceDescription, NamedValue};

/// Devices a plugin can compile for without having them. Clones are the same topology.
#[derive(Clone)]
pub struct Topology {
    inner: Arc<Inner>,
}

struct Inner {
    handle: Arc<TopologyHandle>,
    name: String,
    platform_name: String,
    platform_version: String,
    devices: Vec<DeviceDescription>,
    attributes: BTreeMap<String, NamedValue>,
}

impl Topology {
    /// The topology of this name, such as libtpu's `v5e:4x4`, with the plugin's options, such as
    /// libtpu's `num_slices`.
    ///
    /// # Errors
    /// The plugin's, for a name or an option it does not know, or numbers that do not fit.
    pub fn create(
        plugin: &Plugin,
        name: &str,
        options: &[(String, NamedValue)],
    ) -> Result<Self, PjrtError> {
        let handle = TopologyHandle::create(plugin.api(), name, options)?;
        let devices = handle.descriptions()?;
        Ok(Self {
            inner: Arc::new(Inner {
                name: name.to_string(),
                platform_name: handle.platform_name()?,
                platform_version: handle.platform_version()?,
                devices,
                attributes: handle.attributes()?,
                handle: Arc::new(handle),
            }),
        })
    }

    /// The name it was made with.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// `tpu`, `cuda`.
    pub fn platform_name(&self) -> &str {
        &self.inner.platform_name
    }

    /// The plugin's own description of its build.
    pub fn platform_version(&self) -> &str {
        &self.inner.platform_version
    }

    /// The devices, in the plugin's order. Meshes are built from their ids, coordinates and
    /// slices, never from their number.
    pub fn devices(&self) -> &[DeviceDescription] {
        &self.inner.devices
    }

    /// The plugin's attributes of all devices together.
    pub fn attributes(&self) -> &BTreeMap<String, NamedValue> {
        &self.inner.attributes
    }

    /// Bytes of memory of one device, where the plugin says it (`device_memory_bytes_limit`).
    pub fn device_memory_limit(&self) -> Option<i64> {
        match self.inner.attributes.get("device_memory_bytes_limit") {
            Some(NamedValue::Int64(bytes)) => Some(*bytes),
            _ => None,
        }
    }

    /// Compiles a StableHLO module for devices of this topology.
    ///
    /// # Errors
    /// The compiler's, with its text: for a module that does not parse it has line and column.
    pub fn compile(
        &self,
        stablehlo: &str,
        options: &CompileOptions,
    ) -> Result<Executable, PjrtError> {
        let handle = self.inner.handle.compile(stablehlo, &options.to_bytes())?;
        Ok(Executable::new(Arc::new(handle)))
    }
}

impl fmt::Debug for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Topology")
            .field("name", &self.inner.name)
            .field("devices", &self.inner.devices.len())
            .finish()
    }
}
