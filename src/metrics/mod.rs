//! Training metrics: JSON lines and TensorBoard.
