//! The traced program: a closed set of operations, the builder, shape inference and derivatives.
