//! Clients and devices.

use std::ptr::NonNull;
use std::sync::Arc;

use super::api::{Api, made};
use super::handle::{BufferHandle, ClientHandle, EventHandle, Handle, LoadedExecutableHandle};
use super::types::*;
use super::values::{copied, named_values, raw_named_values, text};
use crate::pjrt::error::PjrtError;
use crate::pjrt::values::{DeviceDescription, DeviceMemoryStats, ElementType, NamedValue};

/// A device of a client. The client owns it.
#[derive(Clone)]
pub struct DeviceHandle {
    client: Arc<ClientHandle>,
    device: NonNull<PJRT_Device>,
}

// SAFETY: the client that owns the device is kept alive, and the interface is thread-safe.
unsafe impl Send for DeviceHandle {}
// SAFETY: as above.
unsafe impl Sync for DeviceHandle {}

/// Copies what a description says.
///
/// # Safety
/// `description` is live during the call.
pub unsafe fn describe(
    api: Api,
    description: NonNull<PJRT_DeviceDescription>,
) -> Result<DeviceDescription, PjrtError> {
    let device_description = description.as_ptr();
    let mut id = PJRT_DeviceDescription_Id_Args {
        device_description,
        ..PJRT_DeviceDescription_Id_Args::new()
    };
    let mut process = PJRT_DeviceDescription_ProcessIndex_Args {
        device_description,
        ..PJRT_DeviceDescription_ProcessIndex_Args::new()
    };
    let mut kind = PJRT_DeviceDescription_Kind_Args {
        device_description,
        ..PJRT_DeviceDescription_Kind_Args::new()
    };
    let mut attributes = PJRT_DeviceDescription_Attributes_Args {
        device_description,
        ..PJRT_DeviceDescription_Attributes_Args::new()
    };
    // SAFETY: the caller says that the description is live; *lent*: all is copied here.
    unsafe {
        api.call(&mut id)?;
        api.call(&mut process)?;
        api.call(&mut kind)?;
        api.call(&mut attributes)?;
        Ok(DeviceDescription {
            id: id.id.into(),
            process_index: process.process_index.into(),
            kind: text(kind.device_kind, kind.device_kind_size),
            attributes: named_values(attributes.attributes, attributes.num_attributes),
        })
    }
}

impl ClientHandle {
    pub fn create(api: Api, options: &[(String, NamedValue)]) -> Result<Self, PjrtError> {
        let options = raw_named_values(options);
        let mut args = PJRT_Client_Create_Args {
            create_options: options.as_ptr(),
            num_options: options.len(),
            ..PJRT_Client_Create_Args::new()
        };
        // SAFETY: the options live during the call; without callbacks the client is of one
        // process. What is made is ours, and needs only the plugin.
        unsafe {
            api.call(&mut args)?;
            let client = made(PJRT_Client_Create_Args::FUNCTION, args.client)?;
            Ok(Handle::new(api, client, ()))
        }
    }

    pub fn platform_name(&self) -> Result<String, PjrtError> {
        let args = PJRT_Client_PlatformName_Args {
            client: self.raw(),
            ..PJRT_Client_PlatformName_Args::new()
        };
        // SAFETY: *owned*, *lent*.
        unsafe {
            let args = self.call(args)?;
            Ok(text(args.platform_name, args.platform_name_size))
        }
    }

    pub fn platform_version(&self) -> Result<String, PjrtError> {
        let args = PJRT_Client_PlatformVersion_Args {
            client: self.raw(),
            ..PJRT_Client_PlatformVersion_Args::new()
        };
        // SAFETY: *owned*, *lent*.
        unsafe {
            let args = self.call(args)?;
            Ok(text(args.platform_version, args.platform_version_size))
        }
    }

    pub fn process_index(&self) -> Result<i32, PjrtError> {
        let args = PJRT_Client_ProcessIndex_Args {
            client: self.raw(),
            ..PJRT_Client_ProcessIndex_Args::new()
        };
        // SAFETY: *owned*.
        unsafe { self.call(args) }.map(|args| args.process_index)
    }

    /// Every device of the client, of this process or not.
    pub fn devices(self: &Arc<Self>) -> Result<Vec<DeviceHandle>, PjrtError> {
        let args = PJRT_Client_Devices_Args {
            client: self.raw(),
            ..PJRT_Client_Devices_Args::new()
        };
        // SAFETY: *owned*, *lent*: the list is copied; the devices live as long as the client.
        unsafe {
            let args = self.call(args)?;
            Ok(self.device_handles(args.devices, args.num_devices))
        }
    }

    /// The devices of this process.
    pub fn addressable_devices(self: &Arc<Self>) -> Result<Vec<DeviceHandle>, PjrtError> {
        let args = PJRT_Client_AddressableDevices_Args {
            client: self.raw(),
            ..PJRT_Client_AddressableDevices_Args::new()
        };
        // SAFETY: as in `devices`.
        unsafe {
            let args = self.call(args)?;
            Ok(self.device_handles(args.addressable_devices, args.num_addressable_devices))
        }
    }

    /// # Safety
    /// `devices` points to `len` devices of this client.
    pub unsafe fn device_handles(
        self: &Arc<Self>,
        devices: *const *mut PJRT_Device,
        len: usize,
    ) -> Vec<DeviceHandle> {
        // SAFETY: the caller's promise.
        unsafe { copied(devices, len) }
            .into_iter()
            .filter_map(NonNull::new)
            .map(|device| DeviceHandle {
                client: self.clone(),
                device,
            })
            .collect()
    }

    pub fn compile(
        self: &Arc<Self>,
        code: &str,
        options: &[u8],
    ) -> Result<LoadedExecutableHandle, PjrtError> {
        let program = mlir_program(code);
        let args = PJRT_Client_Compile_Args {
            client: self.raw(),
            program: &program,
            compile_options: options.as_ptr().cast(),
            compile_options_size: options.len(),
            ..PJRT_Client_Compile_Args::new()
        };
        // SAFETY: *owned*; program and options live during the call, and are only read. What is
        // made is ours, and needs the client.
        unsafe {
            let args = self.call(args)?;
            let executable = made(PJRT_Client_Compile_Args::FUNCTION, args.executable)?;
            Ok(Handle::new(self.api(), executable, self.clone()))
        }
    }

    pub fn deserialize_and_load(
        self: &Arc<Self>,
        bytes: &[u8],
    ) -> Result<LoadedExecutableHandle, PjrtError> {
        let args = PJRT_Executable_DeserializeAndLoad_Args {
            client: self.raw(),
            serialized_executable: bytes.as_ptr().cast(),
            serialized_executable_size: bytes.len(),
            ..PJRT_Executable_DeserializeAndLoad_Args::new()
        };
        // SAFETY: *owned*; the bytes live during the call. What is made is ours, and needs the
        // client.
        unsafe {
            let args = self.call(args)?;
            let executable = made(
                PJRT_Executable_DeserializeAndLoad_Args::FUNCTION,
                args.loaded_executable,
            )?;
            Ok(Handle::new(self.api(), executable, self.clone()))
        }
    }
}

/// A program of StableHLO text (or bytecode) for the length of one call.
///
/// The interface declares the code as mutable for the calls that fill it in; those that compile
/// only read it.
pub fn mlir_program(code: &str) -> PJRT_Program {
    const FORMAT: &str = "mlir";
    PJRT_Program {
        code: code.as_ptr().cast_mut().cast(),
        code_size: code.len(),
        format: FORMAT.as_ptr().cast(),
        format_size: FORMAT.len(),
        ..PJRT_Program::new()
    }
}

impl DeviceHandle {
    /// # Safety
    /// `device` is a device of `client`.
    pub unsafe fn new(client: Arc<ClientHandle>, device: NonNull<PJRT_Device>) -> Self {
        Self { client, device }
    }

    /// The device, live as long as `self`.
    pub fn raw(&self) -> *mut PJRT_Device {
        self.device.as_ptr()
    }

    pub fn client(&self) -> &Arc<ClientHandle> {
        &self.client
    }

    pub fn is(&self, other: &Self) -> bool {
        self.device == other.device
    }

    pub fn description(&self) -> Result<DeviceDescription, PjrtError> {
        let args = PJRT_Device_GetDescription_Args {
            device: self.raw(),
            ..PJRT_Device_GetDescription_Args::new()
        };
        // SAFETY: the device is live; *lent*: its description lives as long as it.
        unsafe {
            let args = self.client.call(args)?;
            let description = made(
                PJRT_Device_GetDescription_Args::FUNCTION,
                args.device_description,
            )?;
            describe(self.client.api(), description)
        }
    }

    pub fn local_hardware_id(&self) -> Result<i32, PjrtError> {
        let args = PJRT_Device_LocalHardwareId_Args {
            device: self.raw(),
            ..PJRT_Device_LocalHardwareId_Args::new()
        };
        // SAFETY: the device is live.
        unsafe { self.client.call(args) }.map(|args| args.local_hardware_id)
    }

    pub fn memory_stats(&self) -> Result<DeviceMemoryStats, PjrtError> {
        let args = PJRT_Device_MemoryStats_Args {
            device: self.raw(),
            ..PJRT_Device_MemoryStats_Args::new()
        };
        // SAFETY: the device is live.
        let args = unsafe { self.client.call(args)? };
        Ok(DeviceMemoryStats {
            bytes_in_use: args.bytes_in_use,
            peak_bytes_in_use: args
                .peak_bytes_in_use_is_set
                .then_some(args.peak_bytes_in_use),
            largest_alloc_size: args
                .largest_alloc_size_is_set
                .then_some(args.largest_alloc_size),
            bytes_limit: args.bytes_limit_is_set.then_some(args.bytes_limit),
        })
    }

    /// A buffer made from host bytes. An error means that the plugin did not take the bytes.
    ///
    /// # Safety
    /// `bytes` holds what a row-major array of this type and these dimensions takes, and stays
    /// valid and unchanged for the call, and with
    /// [`HOST_BUFFER_IMMUTABLE_UNTIL_TRANSFER_COMPLETES`] until [`FromHost::done`]; without that
    /// event, for good.
    pub unsafe fn buffer_from_host(
        &self,
        bytes: *const u8,
        element_type: ElementType,
        dims: &[i64],
        semantics: i32,
    ) -> Result<FromHost, PjrtError> {
        let args = PJRT_Client_BufferFromHostBuffer_Args {
            client: self.client.raw(),
            data: bytes.cast(),
            r#type: element_type as i32,
            dims: dims.as_ptr(),
            num_dims: dims.len(),
            host_buffer_semantics: semantics,
            device: self.raw(),
            ..PJRT_Client_BufferFromHostBuffer_Args::new()
        };
        let function = PJRT_Client_BufferFromHostBuffer_Args::FUNCTION;
        // SAFETY: *owned*, the device is live, the caller answers for the bytes, and no strides
        // means row-major. What is made is ours: the buffer needs the client, the event too.
        unsafe {
            let args = self.client.call(args)?;
            let api = self.client.api();
            let owner = &self.client;
            Ok(FromHost {
                buffer: made(function, args.buffer)
                    .map(|buffer| Handle::new(api, buffer, owner.clone())),
                done: made(function, args.done_with_host_buffer)
                    .map(|event| Handle::new(api, event, owner.clone())),
            })
        }
    }
}

/// The results of a transfer from the host; the plugin may leave out either.
pub struct FromHost {
    pub buffer: Result<BufferHandle, PjrtError>,
    /// When the bytes are no longer read.
    pub done: Result<EventHandle, PjrtError>,
}
