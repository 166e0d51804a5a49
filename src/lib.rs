//! A compiler frontend for diffusion models.
//!
//! A model is traced into one [`graph`]; the graph is quantized ([`quant`]), sharded ([`shard`]),
//! emitted as StableHLO ([`emit`]) and compiled through PJRT ([`pjrt`]). `docs/design.md` tells
//! how the parts fit together.

pub mod aot;
pub mod backend;
pub mod bundle;
pub mod cli;
pub mod config;
pub mod data;
pub mod doctor;
pub mod dtype;
pub mod emit;
pub mod evaluate;
pub mod footprint;
pub mod graph;
pub mod host_tensor;
pub mod hub;
pub mod kernels;
pub mod lowering;
pub mod metrics;
pub mod models;
pub mod nn;
pub mod pipelines;
pub mod pjrt;
pub mod proto;
pub mod quant;
pub mod recipe;
pub mod report;
pub mod runtime;
pub mod schedulers;
pub mod shape;
pub mod shard;
pub mod topology;
pub mod train;
pub mod util;
pub mod weights;
