//! Buffers.

use std::sync::Arc;

use super::api::made;
use super::client::DeviceHandle;
use super::handle::{BufferHandle, ClientHandle, EventHandle, Handle};
use super::types::*;
use super::values::copied;
use crate::pjrt::error::PjrtError;
use crate::pjrt::values::ElementType;

impl DeviceHandle {
    /// A buffer made from `bytes`, which are read during the call only.
    pub fn copy_from_host(
        &self,
        bytes: &[u8],
        element_type: ElementType,
        dims: &[i64],
    ) -> Result<BufferHandle, PjrtError> {
        check_size(bytes, element_type, dims)?;
        let semantics = HOST_BUFFER_IMMUTABLE_ONLY_DURING_CALL;
        // SAFETY: the length was checked; the borrow outlives the call.
        unsafe { self.buffer_from_host(bytes.as_ptr(), element_type, dims, semantics) }?.buffer
    }

    /// A buffer made from the bytes of `source`, which is kept until they were read.
    pub fn transfer_from_host<S>(
        &self,
        source: S,
        element_type: ElementType,
        dims: &[i64],
    ) -> Result<BufferHandle, PjrtError>
    where
        S: AsRef<[u8]> + Send + Sync + 'static,
    {
        let source = Arc::new(source);
        let bytes = (*source).as_ref();
        check_size(bytes, element_type, dims)?;
        let semantics = HOST_BUFFER_IMMUTABLE_UNTIL_TRANSFER_COMPLETES;
        // SAFETY: the length was checked. The source stays where it is and is only shared, so the
        // bytes it lends stay valid and unchanged: until the event, or for good without one.
        let made = unsafe { self.buffer_from_host(bytes.as_ptr(), element_type, dims, semantics) }?;
        match made.done {
            Ok(done) => done.release_when_done(source),
            Err(error) => {
                std::mem::forget(source);
                return Err(error);
            }
        }
        made.buffer
    }
}

fn check_size(bytes: &[u8], element_type: ElementType, dims: &[i64]) -> Result<(), PjrtError> {
    let expected = element_type.host_size(dims)?;
    if bytes.len() == expected {
        return Ok(());
    }
    Err(PjrtError::HostSize {
        element_type: element_type.name(),
        dims: dims.to_vec(),
        expected,
        found: bytes.len(),
    })
}

/// Row-major order of `rank` dimensions, as the interface writes it: the last dimension first.
fn row_major(rank: usize) -> Vec<i64> {
    (0..rank as i64).rev().collect()
}

/// A layout that points into `minor_to_major`.
fn tiled(minor_to_major: &[i64]) -> PJRT_Buffer_MemoryLayout {
    PJRT_Buffer_MemoryLayout {
        struct_size: PJRT_Buffer_MemoryLayout::STRUCT_SIZE,
        extension_start: std::ptr::null_mut(),
        tiled: PJRT_Buffer_MemoryLayout_Tiled {
            minor_to_major: minor_to_major.as_ptr(),
            minor_to_major_size: minor_to_major.len(),
            ..PJRT_Buffer_MemoryLayout_Tiled::new()
        },
        r#type: MEMORY_LAYOUT_TILED,
    }
}

impl BufferHandle {
    pub fn client(&self) -> &Arc<ClientHandle> {
        self.owner()
    }

    pub fn element_type(&self) -> Result<ElementType, PjrtError> {
        let args = PJRT_Buffer_ElementType_Args {
            buffer: self.raw(),
            ..PJRT_Buffer_ElementType_Args::new()
        };
        // SAFETY: *owned*.
        let args = unsafe { self.call(args)? };
        ElementType::from_raw(PJRT_Buffer_ElementType_Args::FUNCTION.name, args.r#type)
    }

    pub fn dims(&self) -> Result<Vec<i64>, PjrtError> {
        let args = PJRT_Buffer_Dimensions_Args {
            buffer: self.raw(),
            ..PJRT_Buffer_Dimensions_Args::new()
        };
        // SAFETY: *owned*, *lent*.
        unsafe {
            let args = self.call(args)?;
            Ok(copied(args.dims, args.num_dims))
        }
    }

    pub fn on_device_size(&self) -> Result<usize, PjrtError> {
        let args = PJRT_Buffer_OnDeviceSizeInBytes_Args {
            buffer: self.raw(),
            ..PJRT_Buffer_OnDeviceSizeInBytes_Args::new()
        };
        // SAFETY: *owned*.
        unsafe { self.call(args) }.map(|args| args.on_device_size_in_bytes)
    }

    pub fn device(&self) -> Result<DeviceHandle, PjrtError> {
        let args = PJRT_Buffer_Device_Args {
            buffer: self.raw(),
            ..PJRT_Buffer_Device_Args::new()
        };
        // SAFETY: *owned*; the device is the client's.
        unsafe {
            let args = self.call(args)?;
            let device = made(PJRT_Buffer_Device_Args::FUNCTION, args.device)?;
            Ok(DeviceHandle::new(self.client().clone(), device))
        }
    }

    pub fn delete(&self) -> Result<(), PjrtError> {
        let args = PJRT_Buffer_Delete_Args {
            buffer: self.raw(),
            ..PJRT_Buffer_Delete_Args::new()
        };
        // SAFETY: *owned*: this frees the device memory, not the object; later calls on the object
        // are answered with errors.
        unsafe { self.call(args) }.map(|_| ())
    }

    pub fn is_deleted(&self) -> Result<bool, PjrtError> {
        let args = PJRT_Buffer_IsDeleted_Args {
            buffer: self.raw(),
            ..PJRT_Buffer_IsDeleted_Args::new()
        };
        // SAFETY: *owned*.
        unsafe { self.call(args) }.map(|args| args.is_deleted)
    }

    pub fn ready_event(&self) -> Result<EventHandle, PjrtError> {
        let args = PJRT_Buffer_ReadyEvent_Args {
            buffer: self.raw(),
            ..PJRT_Buffer_ReadyEvent_Args::new()
        };
        // SAFETY: *owned*; the event is ours, and needs the client.
        unsafe {
            let args = self.call(args)?;
            let event = made(PJRT_Buffer_ReadyEvent_Args::FUNCTION, args.event)?;
            Ok(Handle::new(self.api(), event, self.client().clone()))
        }
    }

    /// A copy on another device of the same client.
    pub fn copy_to_device(&self, device: &DeviceHandle) -> Result<BufferHandle, PjrtError> {
        let args = PJRT_Buffer_CopyToDevice_Args {
            buffer: self.raw(),
            dst_device: device.raw(),
            ..PJRT_Buffer_CopyToDevice_Args::new()
        };
        // SAFETY: *owned*; the device is live. The copy is ours, and needs the client of the
        // device.
        unsafe {
            let args = self.call(args)?;
            let buffer = made(PJRT_Buffer_CopyToDevice_Args::FUNCTION, args.dst_buffer)?;
            Ok(Handle::new(self.api(), buffer, device.client().clone()))
        }
    }

    /// Bytes that [`Self::copy_to_host`] writes.
    pub fn host_size(&self) -> Result<usize, PjrtError> {
        let order = row_major(self.dims()?.len());
        let mut layout = tiled(&order);
        let args = PJRT_Buffer_ToHostBuffer_Args {
            src: self.raw(),
            host_layout: &mut layout,
            ..PJRT_Buffer_ToHostBuffer_Args::new()
        };
        // SAFETY: *owned*; with no destination the call writes the size only, and makes no event.
        unsafe { self.call(args) }.map(|args| args.dst_size)
    }

    /// Starts to copy the array, row-major, to `dst`; it is done at the event.
    ///
    /// # Safety
    /// `dst` has `len` bytes, which nobody else uses until the event, and that stay valid to then.
    pub unsafe fn copy_to_host(&self, dst: *mut u8, len: usize) -> Result<EventHandle, PjrtError> {
        let order = row_major(self.dims()?.len());
        let mut layout = tiled(&order);
        let args = PJRT_Buffer_ToHostBuffer_Args {
            src: self.raw(),
            host_layout: &mut layout,
            dst: dst.cast(),
            dst_size: len,
            ..PJRT_Buffer_ToHostBuffer_Args::new()
        };
        // SAFETY: *owned*; the layout is read during the call, the caller answers for `dst`, and
        // the plugin refuses a `dst` that is too short. The event is ours, and needs the client.
        unsafe {
            let args = self.call(args)?;
            let event = made(PJRT_Buffer_ToHostBuffer_Args::FUNCTION, args.event)?;
            Ok(Handle::new(self.api(), event, self.client().clone()))
        }
    }
}

/// A copy to the host under way, with the memory it goes to.
pub struct HostCopy {
    /// Taken when the event is waited for.
    bytes: Option<Vec<u8>>,
    event: EventHandle,
}

impl HostCopy {
    pub fn start(buffer: &BufferHandle) -> Result<Self, PjrtError> {
        let mut bytes = vec![0; buffer.host_size()?];
        // SAFETY: the vector's memory stays where it is, untouched, until `wait` or drop, and both
        // free it only after the event. A `HostCopy` that is leaked leaks the memory too.
        match unsafe { buffer.copy_to_host(bytes.as_mut_ptr(), bytes.len()) } {
            Ok(event) => Ok(Self {
                bytes: Some(bytes),
                event,
            }),
            Err(error) => {
                // A copy that was started without an event may go on for any time.
                if matches!(error, PjrtError::Protocol { .. }) {
                    std::mem::forget(bytes);
                }
                Err(error)
            }
        }
    }

    pub fn is_ready(&self) -> Result<bool, PjrtError> {
        self.event.is_ready()
    }

    pub fn wait(mut self) -> Result<Vec<u8>, PjrtError> {
        let bytes = self.bytes.take().unwrap_or_default();
        self.event.wait_keeping(bytes)
    }
}

impl Drop for HostCopy {
    fn drop(&mut self) {
        if let Some(bytes) = self.bytes.take() {
            let _ = self.event.wait_keeping(bytes);
        }
    }
}
