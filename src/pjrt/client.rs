//! Clients: the devices of this machine, and of the machines it works with.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicI32;

use super::error::PjrtError;
use super::ffi::{ClientHandle, DeviceHandle};
use super::plugin::Plugin;
use super::threads::cpu_threads;
use super::values::{DeviceDescription, DeviceMemoryStats, NamedValue};

/// A client of a plugin. Clones are the same client; it closes when nothing uses it any more.
#[derive(Clone)]
pub struct Client {
    inner: Arc<Inner>,
}

struct Inner {
    handle: Arc<ClientHandle>,
    plugin: Plugin,
    platform_name: String,
    platform_version: String,
    devices: Vec<Device>,
    addressable_devices: Vec<Device>,
    /// Counts launches of all the client's programs: see [`super::LoadedExecutable::execute`].
    launches: Arc<AtomicI32>,
}

/// A device of a client. Clones are the same device.
#[derive(Clone)]
pub struct Device {
    pub(super) handle: DeviceHandle,
    description: Arc<DeviceDescription>,
}

impl Client {
    /// A client of this process alone, with the plugin's options (see the plugin for their names). The CPU plugin is
    /// told the number of threads ([`cpu_threads`]) where the options do not.
    ///
    /// # Errors
    /// An option the plugin does not know, or no device of its kind in this machine; a number of threads that is none.
    pub fn create(plugin: &Plugin, options: &[(String, NamedValue)]) -> Result<Self, PjrtError> {
        const THREADS: &str = "cpu_threads";
        let mut options = options.to_vec();
        if plugin.is_own() && !options.iter().any(|(name, _)| name == THREADS) {
            let threads = NamedValue::Int64(cpu_threads()? as i64);
            options.push((THREADS.to_string(), threads));
        }
        let handle = Arc::new(ClientHandle::create(plugin.api(), &options)?);
        let describe = |handles: Vec<DeviceHandle>| -> Result<Vec<Device>, PjrtError> {
            handles.into_iter().map(Device::new).collect()
        };
        Ok(Self {
            inner: Arc::new(Inner {
                platform_name: handle.platform_name()?,
                platform_version: handle.platform_version()?,
                devices: describe(handle.devices()?)?,
                addressable_devices: describe(handle.addressable_devices()?)?,
                plugin: plugin.clone(),
                launches: Arc::default(),
                handle,
            }),
        })
    }

    pub(super) fn handle(&self) -> &Arc<ClientHandle> {
        &self.inner.handle
    }

    pub(super) fn launches(&self) -> Arc<AtomicI32> {
        self.inner.launches.clone()
    }

    /// The plugin the client is of.
    pub fn plugin(&self) -> &Plugin {
        &self.inner.plugin
    }

    /// `cpu`, `tpu`, `cuda`.
    pub fn platform_name(&self) -> &str {
        &self.inner.platform_name
    }

    /// The plugin's own description of its build.
    pub fn platform_version(&self) -> &str {
        &self.inner.platform_version
    }

    /// The number of this process among those that work together.
    pub fn process_index(&self) -> Result<i32, PjrtError> {
        self.inner.handle.process_index()
    }

    /// All devices, of this process and of others.
    pub fn devices(&self) -> &[Device] {
        &self.inner.devices
    }

    /// The devices of this process.
    pub fn addressable_devices(&self) -> &[Device] {
        &self.inner.addressable_devices
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("platform_name", &self.inner.platform_name)
            .field("devices", &self.inner.devices.len())
            .finish()
    }
}

impl Device {
    pub(super) fn new(handle: DeviceHandle) -> Result<Self, PjrtError> {
        let description = Arc::new(handle.description()?);
        Ok(Self {
            handle,
            description,
        })
    }

    /// Refuses a device that is not of this client.
    pub(super) fn check_client(&self, client: &Arc<ClientHandle>) -> Result<(), PjrtError> {
        if Arc::ptr_eq(self.handle.client(), client) {
            return Ok(());
        }
        Err(PjrtError::ForeignDevice { id: self.id() })
    }

    /// The plugin's description of the device.
    pub fn description(&self) -> &DeviceDescription {
        &self.description
    }

    /// The device's id: [`DeviceDescription::id`].
    pub fn id(&self) -> i64 {
        self.description.id
    }

    /// The number of the device in this machine; of addressable devices only.
    pub fn local_hardware_id(&self) -> Result<i32, PjrtError> {
        self.handle.local_hardware_id()
    }

    /// The device's memory now.
    ///
    /// # Errors
    /// [`super::ErrorCode::Unimplemented`] from plugins that do not count, as the CPU's with several devices.
    pub fn memory_stats(&self) -> Result<DeviceMemoryStats, PjrtError> {
        self.handle.memory_stats()
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.handle.is(&other.handle)
    }
}

impl Eq for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Device({} {})",
            self.description.kind, self.description.id
        )
    }
}
