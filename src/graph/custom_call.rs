//! The interface of a backend's kernel to the graph.
//!
//! A backend makes one where it claims a composite or a contraction; the graph knows nothing of its processor.

use std::any::Any;
use std::fmt::Debug;

use crate::shape::Shape;

use super::InferError;
use super::eval::Value;

/// An attribute of a kernel's call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Attribute {
    I64(i64),
    F32(f32),
}

/// A kernel with its attributes.
///
/// The one open set of the graph: which kernels there are is for each backend to say, and backends stand above the
/// graph.
pub trait CustomCall: Any + Debug + Send + Sync {
    /// The custom call's target.
    fn target(&self) -> &'static str;

    /// The attributes of the call besides operands and result, by name.
    fn attributes(&self) -> Vec<(&'static str, Attribute)>;

    /// The shape of the result.
    ///
    /// # Errors
    /// When the operands do not fit the kernel.
    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError>;

    /// Operations of products: multiply-adds times two.
    fn flops(&self, operands: &[&Shape], result: &Shape) -> u64;

    /// The kernel's result, computed on the host.
    fn evaluate(&self, operands: &[&Value], result: Shape) -> Value;
}
