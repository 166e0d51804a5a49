//! Buffers: arrays in the memory of one device.

use std::fmt;

use super::client::{Client, Device};
use super::error::PjrtError;
use super::ffi::{self, BufferHandle, EventHandle};
use super::values::ElementType;

/// An array in the memory of one device.
///
/// It may still be on its way there: operations on it wait their turn in the runtime, and an error
/// of the work that makes it is returned by [`Buffer::wait`] and by transfers from it.
pub struct Buffer {
    pub(super) handle: BufferHandle,
}

/// When a buffer's contents are there: see [`Buffer::ready`].
pub struct Ready {
    event: EventHandle,
}

/// A transfer to the host under way: see [`Buffer::to_host_async`].
pub struct HostCopy {
    copy: ffi::HostCopy,
}

impl Buffer {
    /// Copies `bytes`, a row-major array, to `device`, one of `client`'s. The bytes are free when
    /// this returns; the transfer may continue from a copy.
    ///
    /// Types of less than a byte take a byte for each element on the host.
    ///
    /// # Errors
    /// [`PjrtError::HostSize`] when `bytes` is not as long as the array; the plugin's.
    pub fn from_host(
        client: &Client,
        bytes: &[u8],
        element_type: ElementType,
        dims: &[i64],
        device: &Device,
    ) -> Result<Self, PjrtError> {
        device.check_client(client.handle())?;
        device
            .handle
            .copy_from_host(bytes, element_type, dims)
            .map(|handle| Self { handle })
    }

    /// As [`Buffer::from_host`], without a copy on the host: `source` is kept until its bytes were
    /// read, then dropped on a thread of the runtime.
    ///
    /// # Errors
    /// As [`Buffer::from_host`]; `source` is dropped.
    pub fn from_host_async<S>(
        client: &Client,
        source: S,
        element_type: ElementType,
        dims: &[i64],
        device: &Device,
    ) -> Result<Self, PjrtError>
    where
        S: AsRef<[u8]> + Send + Sync + 'static,
    {
        device.check_client(client.handle())?;
        device
            .handle
            .transfer_from_host(source, element_type, dims)
            .map(|handle| Self { handle })
    }

    /// The array, row-major. Waits for it.
    pub fn to_host(&self) -> Result<Vec<u8>, PjrtError> {
        self.to_host_async()?.wait()
    }

    /// Starts a transfer of the array, row-major, to the host.
    pub fn to_host_async(&self) -> Result<HostCopy, PjrtError> {
        ffi::HostCopy::start(&self.handle).map(|copy| HostCopy { copy })
    }

    /// When the contents are there.
    pub fn ready(&self) -> Result<Ready, PjrtError> {
        self.handle.ready_event().map(|event| Ready { event })
    }

    /// Waits for the contents, and returns the error of the work that makes them.
    pub fn wait(&self) -> Result<(), PjrtError> {
        self.ready()?.wait()
    }

    /// The type of the elements.
    pub fn element_type(&self) -> Result<ElementType, PjrtError> {
        self.handle.element_type()
    }

    /// The dimensions, major first.
    pub fn dims(&self) -> Result<Vec<i64>, PjrtError> {
        self.handle.dims()
    }

    /// Bytes on the device, with what its layout pads.
    pub fn on_device_size(&self) -> Result<usize, PjrtError> {
        self.handle.on_device_size()
    }

    /// The device the array is on.
    pub fn device(&self) -> Result<Device, PjrtError> {
        Device::new(self.handle.device()?)
    }

    /// A copy on another device of the same client.
    ///
    /// # Errors
    /// [`PjrtError::ForeignDevice`] for a device of another client; the plugin's.
    pub fn copy_to_device(&self, device: &Device) -> Result<Self, PjrtError> {
        device.check_client(self.handle.client())?;
        self.handle
            .copy_to_device(&device.handle)
            .map(|handle| Self { handle })
    }

    /// Frees the device memory now, whoever else holds the buffer; what they do with it then is
    /// answered with errors. Dropping a buffer frees it too.
    pub fn delete(&self) -> Result<(), PjrtError> {
        self.handle.delete()
    }

    /// Whether the device memory was freed by [`Buffer::delete`] or given to a program.
    pub fn is_deleted(&self) -> Result<bool, PjrtError> {
        self.handle.is_deleted()
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.element_type(), self.dims()) {
            (Ok(element_type), Ok(dims)) => write!(f, "Buffer({element_type}{dims:?})"),
            _ => f.write_str("Buffer"),
        }
    }
}

impl Ready {
    /// Whether the contents are there, or will never be.
    pub fn is_ready(&self) -> Result<bool, PjrtError> {
        self.event.is_ready()
    }

    /// Waits for the contents, and returns the error of the work that makes them.
    pub fn wait(&self) -> Result<(), PjrtError> {
        self.event.wait()
    }
}

impl HostCopy {
    /// Whether [`HostCopy::wait`] returns at once.
    pub fn is_ready(&self) -> Result<bool, PjrtError> {
        self.copy.is_ready()
    }

    /// The bytes, when they are there.
    pub fn wait(self) -> Result<Vec<u8>, PjrtError> {
        self.copy.wait()
    }
}
