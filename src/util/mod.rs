//! What every other module may use, and what uses none of them.

pub mod files;
mod named;

pub use named::Named;
pub(crate) use named::named;
