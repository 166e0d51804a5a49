//! Layers built from graph operations.
