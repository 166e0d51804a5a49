//! PixArt-alpha and PixArt-Sigma: a transformer on latents that predicts noise, conditioned by T5 through attention to the
//! text, with one modulation for all blocks.

mod bins;
mod config;
pub mod family;
pub(super) mod original;
mod transformer;

pub use bins::resolution_bin;
pub use config::{OLD_CLASS, PATCH, PixArtTransformer2DConfig};
pub use transformer::{
    ImageSize, PixArtConditioning, PixArtInputs, ROOT, declare_conditioning, declare_inputs, names,
    pixart_transformer, predict_sample,
};
