//! Quantization: formats, numerics, rules by path and the pass that lowers annotated contractions.
