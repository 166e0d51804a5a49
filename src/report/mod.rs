//! What a compiled program does: flops, memory, collectives and predicted time.
