//! Protocol buffer messages, compiled from `proto/`.
#![allow(missing_docs)]

/// TensorBoard's events.
pub mod tensorflow {
    include!(concat!(env!("OUT_DIR"), "/tensorflow.rs"));
}
