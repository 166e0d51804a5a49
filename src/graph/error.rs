//! Errors of graphs.

use crate::dtype::DType;
use crate::shape::Shape;

/// Why a graph could not be built.
#[derive(Debug, thiserror::Error)]
pub enum GraphError {
    /// `path` is the scope the operation was made in.
    #[error("{path}: {op}: {source}")]
    Infer {
        path: String,
        op: &'static str,
        source: Box<InferError>,
    },
    #[error("{path}: {op}: operand {operand} belongs to another graph; pass it through the carry")]
    ForeignTensor {
        path: String,
        op: &'static str,
        operand: usize,
    },
    #[error("{name}: declared twice, as {first} and as {second}")]
    Redeclared {
        name: String,
        first: Shape,
        second: Shape,
    },
    #[error("{path}: {message}")]
    Invalid { path: String, message: String },
    #[error("{path}: {op} has no derivative here; keep it out of what the loss depends on")]
    NotDifferentiable { path: String, op: &'static str },
    #[error(transparent)]
    HostTensor(#[from] crate::host_tensor::HostTensorError),
}

/// Which constraint of an operation its operands or attributes break.
#[derive(Debug, thiserror::Error)]
pub enum InferError {
    #[error("takes {expected} operands, found {found}")]
    OperandCount { expected: usize, found: usize },
    #[error("operands must have one shape, found {lhs} and {rhs}")]
    ShapesDiffer { lhs: Shape, rhs: Shape },
    #[error("{what} of element type {found} is not supported; expected {expected}")]
    ElementType {
        what: &'static str,
        expected: &'static str,
        found: DType,
    },
    #[error("{what}: {left} sizes {lhs:?} and {right} sizes {rhs:?} differ")]
    SizesDiffer {
        what: &'static str,
        left: &'static str,
        lhs: Vec<usize>,
        right: &'static str,
        rhs: Vec<usize>,
    },
    #[error(
        "dimension numbers {dims:?} of {what} are not distinct dimensions of a rank-{rank} tensor"
    )]
    DimensionNumbers {
        what: &'static str,
        dims: Vec<usize>,
        rank: usize,
    },
    #[error("{what} has {found} entries for {expected} dimensions")]
    AttributeLength {
        what: &'static str,
        expected: usize,
        found: usize,
    },
    #[error("cannot reshape {from} to {to:?}: {from_count} elements are not {to_count}")]
    Reshape {
        from: Shape,
        to: Vec<usize>,
        from_count: usize,
        to_count: usize,
    },
    #[error("composite {name}: {detail}")]
    Composite { name: &'static str, detail: String },
    #[error("{what}: {detail}")]
    Constraint { what: &'static str, detail: String },
}

/// A constraint that has no variant of its own.
pub fn constraint(what: &'static str, detail: impl Into<String>) -> InferError {
    InferError::Constraint {
        what,
        detail: detail.into(),
    }
}
