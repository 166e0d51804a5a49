//! Meshes, partition specs and logical axis rules.
