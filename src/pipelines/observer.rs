//! Events during generation.

use image::RgbImage;

use crate::host_tensor::HostTensor;
use crate::quant::{Decision, Policy, Watched};

use super::error::{BoxError, PipelineError};

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
    /// Which activations are watched ([`super::PipelineOptions::watch`]).
    Watched(&'a Watched),
    /// Their statistics in one run of the denoiser, for [`crate::quant::Statistics::add`].
    Statistics(&'a [HostTensor]),
    /// What the call does until the next phase.
    Phase(Phase<'a>),
    /// Bytes of weights that were read since the phase began or the last such event.
    Read { bytes: u64 },
    /// Everything is compiled; these denoising steps follow, in this order.
    Started { passes: &'a [PassSteps] },
    /// A denoising step is done.
    Step,
    /// The sample `f32[channels, rows, columns]` of image number `image` of the request after `steps` steps, where the request
    /// asks for them.
    Sample {
        image: usize,
        steps: usize,
        sample: &'a HostTensor,
    },
    /// Image number `image` of the request is finished.
    Image { image: usize, pixels: &'a RgbImage },
    /// The predicted clean image of image number `image` of the request after `steps` steps.
    Preview {
        image: usize,
        steps: usize,
        preview: &'a RgbImage,
    },
}

/// The denoising steps of one model at one size, of all batches together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassSteps {
    pub steps: usize,
    /// Rows times columns of a sample, which the time of a step grows with.
    pub places: usize,
}

/// What a call does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase<'a> {
    /// Traces programs and opens the files of weights.
    Open,
    /// Compiles these programs, or loads them from the cache.
    Compile {
        programs: &'a str,
    },
    /// Reads the weights of one part of a model, this many bytes.
    Read {
        part: &'a str,
        bytes: u64,
    },
    /// Encodes prompts and images.
    Encode,
    Denoise,
    /// Enlarges the samples of the first pass of a hi-res fix.
    Upscale,
    /// Decodes image number `image` of the request, or a preview of it.
    Decode {
        image: usize,
    },
}

/// Takes events as they come. An error ends the call, which fails with it ([`super::PipelineError::Observer`]): that is
/// how a call is cancelled. `&mut |_| Ok(())` ignores all.
pub type Observer<'a> = dyn FnMut(Event<'_>) -> Result<(), BoxError> + 'a;

/// Tells `observer` of a phase.
///
/// # Errors
/// What `observer` fails with.
pub(super) fn enter(observer: &mut Observer<'_>, phase: Phase<'_>) -> Result<(), PipelineError> {
    observer(Event::Phase(phase)).map_err(PipelineError::Observer)
}
