//! What every module may use.

mod named;

pub use named::Named;
pub(crate) use named::named;
