//! The interface of a backend's kernel to the graph.
//!
//! A backend makes one where it claims a composite or a contraction; the graph knows nothing of its processor.

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

use crate::shape::Shape;

use super::eval::Value;
use super::{Graph, InferError};

/// An attribute of a kernel's call.
#[derive(Clone, Debug, PartialEq)]
pub enum Attribute {
    I32(i32),
    I64(i64),
    F32(f32),
    Text(String),
}

/// What a call tells its kernel besides the operands and the result.
#[derive(Clone, Debug, PartialEq)]
pub enum Configuration {
    /// Attributes by name, as typed calls of XLA's foreign function interface take them.
    Attributes(Vec<(&'static str, Attribute)>),
    /// A text that the compiler reads.
    Text(String),
}

/// The dimensions of a call's operands and of its result along which batch entries lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// `None` for an operand that every entry needs whole.
    pub operands: Vec<Option<usize>>,
    pub result: usize,
}

impl Batch {
    /// The first dimension of the result and of each of `operands` operands.
    pub fn first(operands: usize) -> Batch {
        Batch {
            operands: vec![Some(0); operands],
            result: 0,
        }
    }
}

/// Which operands of a call are entries of stacks, along a first dimension that they do not have themselves, and whether the result is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stacks {
    pub operands: Vec<bool>,
    pub result: bool,
}

/// The rows of an array `[batch, rows, columns]` that an operand of a call is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    pub first: usize,
    pub count: usize,
    /// Whether the operand is `[1, batch * count, columns]`; otherwise `[batch, count, columns]`.
    pub is_merged: bool,
}

/// A kernel with its attributes.
///
/// The one open set of the graph: which kernels there are is for each backend to say, and backends stand above the
/// graph.
pub trait CustomCall: Any + Debug + Send + Sync {
    /// The custom call's target.
    fn target(&self) -> &'static str;

    /// The name in reports and in the operation's location.
    fn name(&self) -> &'static str {
        self.target()
    }

    /// Where parts of the batch lie, if the call of a part is a part of the call. Several devices then share it.
    fn batch(&self, operands: &[&Shape]) -> Option<Batch> {
        let _ = operands;
        None
    }

    /// The configuration of a call with these operands, which fit the kernel.
    fn configuration(&self, operands: &[&Shape]) -> Configuration;

    /// The shape of the result; the first of several.
    ///
    /// # Errors
    /// When the operands do not fit the kernel.
    fn infer(&self, operands: &[&Shape]) -> Result<Shape, InferError>;

    /// The shapes of the results after the first, in memory of their own.
    fn others(&self) -> Vec<Shape> {
        Vec::new()
    }

    /// What the kernel computes as operations, whose inputs are the operands and whose outputs are the results; `None` where only the
    /// kernel knows. A program whose kernels a compiler refuses is compiled with these.
    fn body(&self) -> Option<&Graph> {
        None
    }

    /// Operations of products: multiply-adds times two.
    fn flops(&self, operands: &[&Shape], result: &Shape) -> u64;

    /// The kernel's result, computed on the host; the first of several.
    fn evaluate(&self, operands: &[&Value], result: Shape) -> Value;

    /// How many results there are that take the memory, and have the shapes, of the first operands, in order; 0 where the one result
    /// has memory of its own.
    fn in_place(&self) -> usize {
        0
    }

    /// For a call that the compiler has code of its own for: the dimensions of the result in the order in which the compiler
    /// names them, while the bytes lie in the result's own order. Memory that the code needs meanwhile comes as a second
    /// result, whose size the compiler finds. `None` where the result is returned as it is, alone.
    fn returned_order(&self) -> Option<&'static [usize]> {
        None
    }

    /// The operand whose memory the one result takes, of so many; `None` where it has memory of its own.
    fn replaces(&self, operands: usize) -> Option<usize> {
        let _ = operands;
        None
    }

    /// A call that does the same to one entry of `stacks`: before the operands it takes the number of the entry, `s32[1]`, and behind
    /// them the stack that the result is put into, if any is. `None` where the kernel cannot.
    fn in_stacks(self: Arc<Self>, stacks: &Stacks) -> Option<Arc<dyn CustomCall>> {
        let _ = stacks;
        None
    }

    /// A call that does the same, but reads the operands that `rows` says it of where they lie: `operands` are then the arrays that have these
    /// rows. Where the batch is in several `parts`, they are those of all. `None` where the kernel cannot.
    fn in_rows(
        self: Arc<Self>,
        rows: &[Option<Rows>],
        operands: &[&Shape],
        parts: usize,
    ) -> Option<Arc<dyn CustomCall>> {
        let _ = (rows, operands, parts);
        None
    }

    /// All results, computed on the host.
    fn evaluate_all(&self, operands: &[&Value], first: Shape) -> Vec<Value> {
        vec![self.evaluate(operands, first)]
    }
}

/// Kernels are equal whose names and attributes are.
impl PartialEq for dyn CustomCall {
    fn eq(&self, other: &dyn CustomCall) -> bool {
        self.target() == other.target() && format!("{self:?}") == format!("{other:?}")
    }
}
