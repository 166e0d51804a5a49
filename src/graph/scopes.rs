//! Parts of scope paths that say what an operation is for. They are in the names of the compiled program's
//! instructions, where a report finds them again.

/// Before the path of the operation that a derivative is of.
pub const BACKWARD: &str = "backward";

/// Behind it, for what makes the gradient of a weight.
pub const GRADIENT: &str = "gradient";

/// Behind the path of a quantized contraction, for what finds the largest values of its operands.
pub const RANGE_FINDING: &str = "range_finding";

/// Before all that updates the weights.
pub const OPTIMIZER: &str = "optimizer";
