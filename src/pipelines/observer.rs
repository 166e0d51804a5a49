//! What a caller learns while images are made.

use image::RgbImage;

use crate::quant::{Decision, Policy};

use super::error::BoxError;

/// What happens while images are made.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// Something has no effect, or another one than was asked for.
    Warning(&'a str),
    /// A LoRA was read: how many weights it changes, and by which scale.
    Lora {
        name: &'a str,
        weights: usize,
        scale: f32,
    },
    /// What quantization decided for each contraction of a model's denoising step.
    Quantized {
        policy: &'a Policy,
        decisions: &'a [Decision],
    },
    /// Everything is compiled; this many denoising steps follow, those of all batches and models together.
    Started { steps: usize },
    /// A denoising step is done.
    Step,
    /// What the model takes image number `image` of the request for after `steps` steps.
    Preview {
        image: usize,
        steps: usize,
        preview: &'a RgbImage,
    },
}

/// Takes events as they come. An error ends the call, which fails with it ([`super::PipelineError::Observer`]): that is
/// how a call is cancelled. `&mut |_| Ok(())` ignores all.
pub type Observer<'a> = dyn FnMut(Event<'_>) -> Result<(), BoxError> + 'a;
