//! Prompt to image.

pub mod canny;
pub mod conditioning;
pub mod denoiser;
pub mod image_file;
pub mod images;
pub mod latents;
pub mod noise;
pub mod pixels;
pub mod prompt;
pub mod prompt_file;
pub mod sampler;
mod start;
pub mod text_to_image;
pub mod tiling;
pub mod traced;

/// Why pictures could not be made; the sources of weights have errors of their own.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;
