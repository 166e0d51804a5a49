//! Prompts to images.
//!
//! [`Pipeline`] opens models and generates the images of a [`GenerateRequest`].

mod batch;
pub mod canny;
pub mod conditioning;
mod decoded;
pub mod denoiser;
mod error;
pub mod generator;
mod hires;
pub mod image_file;
pub mod image_prompt;
pub mod init_image;
mod inputs;
mod interpolate;
pub mod latents;
mod lora;
mod memory;
pub mod model_files;
pub mod noise;
mod observer;
mod part_program;
mod pass;
mod pipeline;
pub mod pixels;
mod prepared;
mod progress;
pub mod prompt;
pub mod prompt_file;
mod request;
pub mod sampler_step;
mod start;
pub mod submodule;
pub mod text_to_image;
pub mod textual_inversion;
pub mod tiling;
pub mod traced;
mod upscaler;
mod weights;

pub use batch::{Phases, TokenizedImage};
pub use denoiser::SkipLayerGuidance;
pub use error::{BoxError, PipelineError};
pub use inputs::Inputs;
pub use lora::LoraChoice;
pub use memory::MemoryAdvice;
pub use observer::{Event, Observer, PassSteps, Phase};
pub use part_program::PartProgram;
pub use pipeline::{GenerateSeconds, Generated, Pipeline, PipelineModel, PipelineOptions};
pub use prepared::{requests_of, tokenize};
pub use request::{GenerateRequest, Handover, HiresRequest, ImageRequest};
pub use textual_inversion::{EmbeddingRows, InversionError, TextualInversion, TextualInversions};
pub use upscaler::HiresUpscaler;
pub use weights::{ReadWeights, TakeWeight, WeightSource};
