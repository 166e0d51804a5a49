//! Stable Diffusion 3 and 3.5: a transformer on latents of 16 channels, trained by flow matching and conditioned by two
//! CLIPs and, on request, T5.

mod config;
pub mod family;
pub(super) mod original;
mod transformer;

pub use config::{PATCH, QkNorm, Sd3Transformer2DConfig};
pub use transformer::{
    ROOT, Sd3Conditioning, Sd3Inputs, SkipLayers, declare_conditioning, declare_inputs,
    sd3_transformer,
};
