//! Owning pointers to the plugin's objects.

use std::ptr::NonNull;
use std::sync::Arc;

use super::api::Api;
use super::types::*;
use crate::pjrt::error::PjrtError;

/// A kind of object that has a destroy function.
pub trait Object {
    type Destroy: Args;
    /// The object that must outlive this one. The plugin itself is never unloaded.
    type Owner: Send + Sync;
    fn destroy(object: NonNull<Self>) -> Self::Destroy;
}

/// Where an executable came from.
#[expect(dead_code, reason = "held so that they outlive the executable")]
pub enum Compiler {
    Client(Arc<ClientHandle>),
    Topology(Arc<TopologyHandle>),
}

macro_rules! objects {
    ($($object:ident owned by $owner:ty, $args:ident { $field:ident };)*) => { $(
        impl Object for $object {
            type Destroy = $args;
            type Owner = $owner;
            fn destroy(object: NonNull<Self>) -> $args {
                $args { $field: object.as_ptr(), ..$args::new() }
            }
        }
    )* };
}

objects! {
    PJRT_Client owned by (), PJRT_Client_Destroy_Args { client };
    PJRT_TopologyDescription owned by (), PJRT_TopologyDescription_Destroy_Args { topology };
    PJRT_Executable owned by Compiler, PJRT_Executable_Destroy_Args { executable };
    PJRT_LoadedExecutable owned by Arc<ClientHandle>, PJRT_LoadedExecutable_Destroy_Args { executable };
    PJRT_Buffer owned by Arc<ClientHandle>, PJRT_Buffer_Destroy_Args { buffer };
    PJRT_Event owned by Arc<ClientHandle>, PJRT_Event_Destroy_Args { event };
}

/// The one owning pointer to an object of a plugin.
pub struct Handle<T: Object> {
    api: Api,
    object: NonNull<T>,
    owner: T::Owner,
}

pub type ClientHandle = Handle<PJRT_Client>;
pub type TopologyHandle = Handle<PJRT_TopologyDescription>;
pub type ExecutableHandle = Handle<PJRT_Executable>;
pub type LoadedExecutableHandle = Handle<PJRT_LoadedExecutable>;
pub type BufferHandle = Handle<PJRT_Buffer>;
pub type EventHandle = Handle<PJRT_Event>;

// SAFETY: the interface lets an object be used and destroyed on any thread.
unsafe impl<T: Object> Send for Handle<T> {}
// SAFETY: the interface is thread-safe, and a shared handle cannot destroy its object.
unsafe impl<T: Object> Sync for Handle<T> {}

impl<T: Object> Handle<T> {
    /// # Safety
    /// `object` is live, of the plugin of `api`, owned by the caller, and needs nothing but
    /// `owner` alive.
    pub unsafe fn new(api: Api, object: NonNull<T>, owner: T::Owner) -> Self {
        Self { api, object, owner }
    }

    pub fn api(&self) -> Api {
        self.api
    }

    /// The object, live as long as `self`.
    pub fn raw(&self) -> *mut T {
        self.object.as_ptr()
    }

    pub fn owner(&self) -> &T::Owner {
        &self.owner
    }

    /// Calls a function on the object.
    ///
    /// # Safety
    /// As [`Api::call`].
    pub unsafe fn call<A: Args>(&self, mut args: A) -> Result<A, PjrtError> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.api.call(&mut args)? };
        Ok(args)
    }
}

impl<T: Object> Drop for Handle<T> {
    fn drop(&mut self) {
        // SAFETY: *owned*: this is the owning pointer, and it is not used after this.
        if let Err(error) = unsafe { self.api.call(&mut T::destroy(self.object)) } {
            tracing::warn!(%error, "an object of the pjrt plugin was not freed");
        }
    }
}
