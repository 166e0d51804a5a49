//! Helpers for every other module, which use none of them.

pub mod files;
pub mod hash;
pub mod known;
pub mod memory;
mod named;
pub mod names;
pub mod splits;
pub mod text;
pub mod tfrecord;

pub use named::Named;
pub(crate) use named::named;
