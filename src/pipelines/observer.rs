//! Events during generation.

use image::RgbImage;

use crate::quant::{Decision, Policy};

use super::error::BoxError;

/// An event during generation.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// A setting has no effect, or another effect than requested.
    Warning(&'a str),
    /// A LoRA was read: how many weights it changes, with which scale.
    Lora {
        name: &'a str,
        weights: usize,
        scale: f32,
    },
    /// The decision of quantization for each contraction of a model's denoising step.
    Quantized {
        policy: &'a Policy,
        decisions: &'a [Decision],
    },
    /// Everything is compiled; this many denoising steps follow, of all batches and models together.
    Started { steps: usize },
    /// A denoising step is done.
    Step,
    /// The predicted clean image of image number `image` of the request after `steps` steps.
    Preview {
        image: usize,
        steps: usize,
        preview: &'a RgbImage,
    },
}

/// Takes events as they come. An error ends the call, which fails with it ([`super::PipelineError::Observer`]): that is
/// how a call is cancelled. `&mut |_| Ok(())` ignores all.
pub type Observer<'a> = dyn FnMut(Event<'_>) -> Result<(), BoxError> + 'a;
