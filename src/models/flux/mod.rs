//! FLUX.1: a transformer on packed latents of 16 channels, trained by flow matching and conditioned by CLIP-L's pooled
//! output and by T5. `dev` takes the guidance scale as an input; `schnell` was distilled to few steps without guidance.

mod config;
mod controlnet;
pub mod family;
mod latents;
pub(super) mod original;
mod residuals;
mod transformer;

pub use config::{FluxTransformer2DConfig, POSITION_AXES};
pub use controlnet::{FluxControl, FluxControlNetConfig, flux_controlnet};
pub use latents::{FluxLatents, PATCH, denoise_latents};
pub use residuals::FluxResiduals;
pub use transformer::{
    FluxConditioning, FluxInputs, ROOT, declare_inputs, flux_transformer, names,
};
