//! The request to a pipeline.

use crate::host_tensor::HostTensor;

use super::denoiser::{ControlImage, SkipLayerGuidance};
use super::image_prompt::ImagePrompt;
use super::init_image::InitImages;
use super::prompt::PromptSyntax;
use super::upscaler::HiresUpscaler;

/// One image to make.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageRequest {
    pub prompt: String,
    /// What the second text encoder reads; `prompt` where there is none.
    pub prompt_2: Option<String>,
    pub negative_prompt: String,
    pub seed: u64,
    pub guidance_scale: f64,
    pub steps: usize,
    /// Which of [`InitImages::images`] it starts from, where there are any.
    pub init: usize,
}

impl ImageRequest {
    /// An image of `prompt` with diffusers' defaults: no negative prompt, guidance 7.5, 50 steps, and seed 0.
    pub fn new(prompt: impl Into<String>) -> Self {
        ImageRequest {
            prompt: prompt.into(),
            prompt_2: None,
            negative_prompt: String::new(),
            seed: 0,
            guidance_scale: 7.5,
            steps: 50,
            init: 0,
        }
    }
}

/// Images to make, and how; nothing of it compiles anything anew but the number of images, the length of the longest
/// prompt, whether there is an image to start from, and the size and the upscaler of a hi-res fix.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    pub images: Vec<ImageRequest>,
    pub prompt_syntax: PromptSyntax,
    /// The scale of true guidance, for a model that was distilled from guided samples.
    pub true_cfg_scale: f32,
    /// How much of the guided output's deviation is brought back to that of the prompt's alone.
    pub guidance_rescale: f32,
    /// How layers act that [`super::PipelineOptions`] says to skip.
    pub skip_layer_guidance: SkipLayerGuidance,
    /// Fresh noise in each step, for samplers that read it: 0 for none.
    pub eta: f64,
    pub init_images: Option<InitImages>,
    /// The share of the steps that are taken from an initial image.
    pub strength: f64,
    /// The image that steers a model that sees one, `f32[1, 3, height, width]` in [-1, 1]: FLUX.1 Canny and Depth.
    pub control_image: Option<HostTensor>,
    /// One for each of the base model's ControlNets.
    pub controls: Vec<ControlImage>,
    /// The image for the base model's IP-Adapter.
    pub image_prompt: Option<ImagePrompt>,
    /// Unit normal noise to start from, `f32[images, channels, rows, columns]`, in place of the seeds'.
    pub latents: Option<HostTensor>,
    /// With a refiner, the share of the steps that the base model takes, and that after which the refiner goes on.
    pub handover: Handover,
    /// The second pass of a hi-res fix: not with `init_images`, and not with a refiner.
    pub hires: Option<HiresRequest>,
    /// Height and width that images are scaled and cropped to; without, they have the model's.
    pub image_size: Option<[usize; 2]>,
    /// Steps from one preview of an image to the next.
    pub preview_every: Option<usize>,
    /// Whether [`super::Event::Sample`] tells of every step's samples.
    pub tell_samples: bool,
}

/// A hi-res fix: the images are enlarged and drawn again by the same model.
#[derive(Clone, Debug)]
pub struct HiresRequest {
    /// Rows and columns of the final samples.
    pub sample_size: [usize; 2],
    /// The tokens of a sample of that size, for a model whose noise levels depend on them.
    pub image_seq_len: Option<usize>,
    pub upscaler: HiresUpscaler,
    /// The share of the steps of the second pass that are taken.
    pub strength: f64,
    /// Steps of the second pass's whole schedule; those of the image's own where there are none.
    pub steps: Option<usize>,
    /// One for each of the model's ControlNets, at the final size.
    pub controls: Vec<ControlImage>,
}

/// Shares of the steps: where the base model ends, and where the refiner goes on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Handover {
    pub denoising_end: f64,
    pub denoising_start: f64,
}

impl GenerateRequest {
    /// `images` from noise of their seeds.
    pub fn new(images: Vec<ImageRequest>) -> Self {
        GenerateRequest {
            images,
            prompt_syntax: PromptSyntax::Weighted,
            true_cfg_scale: 1.0,
            guidance_rescale: 0.0,
            skip_layer_guidance: SkipLayerGuidance::default(),
            eta: 0.0,
            init_images: None,
            strength: 1.0,
            control_image: None,
            controls: Vec::new(),
            image_prompt: None,
            latents: None,
            handover: Handover {
                denoising_end: 0.8,
                denoising_start: 0.8,
            },
            hires: None,
            image_size: None,
            preview_every: None,
            tell_samples: false,
        }
    }
}
