//! The crate's only `unsafe` code: the PJRT C API behind handles that are safe to hold.
//!
//! Three facts of the interface carry every block here, and are named where they are used:
//!
//! - *table*: a plugin is never unloaded, so its function table and code live as long as the
//!   process; a function is called only after its place was found inside the table and not empty
//!   ([`Api::call`]).
//! - *owned*: a [`Handle`] holds the one owning pointer to its object, keeps what the object needs
//!   alive ([`handle::Object::Owner`]), and destroys it once, on drop.
//! - *lent*: text, lists and attributes that a call returns belong to the object asked and live as
//!   long as it does; they are copied before the call's wrapper returns.
//!
//! The interface is thread-safe: any function may be called from any thread at any time, except
//! that an object must not be used while it is destroyed, which *owned* rules out.

mod api;
mod buffer;
mod client;
mod env;
mod event;
mod executable;
mod handle;
mod layout;
mod load;
mod signals;
mod topology;
mod types;
mod values;

pub use api::Api;
pub use buffer::HostCopy;
pub use client::DeviceHandle;
pub use env::set_defaults;
pub use executable::CheckedExecutable;
pub use handle::{
    BufferHandle, ClientHandle, EventHandle, ExecutableHandle, LoadedExecutableHandle,
    TopologyHandle,
};
pub use layout::assertions as layout_assertions;
pub use load::load;
pub use signals::keeping_sigterm;
