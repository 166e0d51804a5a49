//! The networks that denoise: a closed set, which the compiler follows to every place that tells them apart.

use serde_json::{Map, Value};

use crate::dtype::DType;
use crate::graph::{Builder, GraphError, Tensor};
use crate::nn::{Precision, Remat};
use crate::util::named;

use super::flux::{self, FluxConditioning, FluxLatents, FluxTransformer2DConfig};
use super::unet::{self, UNet2DConditionConfig, UNetConditioning, UNetInputs};
use super::{ModelConfigError, Part};

named! {
    /// A kind of network that denoises, by its class in diffusers.
    pub enum DenoiserKind {
        /// Of Stable Diffusion.
        Unet = "UNet2DConditionModel",
        /// Of FLUX.1.
        Flux = "FluxTransformer2DModel",
    }
}

impl DenoiserKind {
    /// The part of a model that it is, whose name is the root of its parameter paths.
    pub const fn part(self) -> Part {
        match self {
            DenoiserKind::Unet => Part::Unet,
            DenoiserKind::Flux => Part::Transformer,
        }
    }

    /// Rows and columns of a sample that it takes together, of which a sample's sides are multiples.
    pub const fn patch(self) -> usize {
        match self {
            DenoiserKind::Unet => 1,
            DenoiserKind::Flux => flux::PATCH,
        }
    }

    /// The tokens of samples of these rows and columns, on which its noise levels may depend; a UNet has none.
    pub fn image_seq_len(self, [rows, columns]: [usize; 2]) -> Option<usize> {
        match self {
            DenoiserKind::Unet => None,
            DenoiserKind::Flux => Some((rows / flux::PATCH) * (columns / flux::PATCH)),
        }
    }
}

/// A network that denoises, by its configuration.
#[derive(Clone, Debug, PartialEq)]
pub enum Denoiser {
    Unet(Box<UNet2DConditionConfig>),
    Flux(Box<FluxTransformer2DConfig>),
}

impl Denoiser {
    /// Reads and checks the fields of a `config.json`.
    ///
    /// # Errors
    /// When it asks for something that is not built here, or contradicts itself.
    pub fn from_map(
        kind: DenoiserKind,
        fields: Map<String, Value>,
    ) -> Result<Denoiser, ModelConfigError> {
        Ok(match kind {
            DenoiserKind::Unet => Denoiser::Unet(UNet2DConditionConfig::from_map(fields)?.into()),
            DenoiserKind::Flux => Denoiser::Flux(FluxTransformer2DConfig::from_map(fields)?.into()),
        })
    }

    pub fn kind(&self) -> DenoiserKind {
        match self {
            Denoiser::Unet(_) => DenoiserKind::Unet,
            Denoiser::Flux(_) => DenoiserKind::Flux,
        }
    }

    /// The part of the model that it is.
    pub fn part(&self) -> Part {
        self.kind().part()
    }

    /// The name of its class in diffusers.
    pub fn class(&self) -> &'static str {
        self.kind().name()
    }

    /// The UNet's configuration, if it is one.
    pub fn unet(&self) -> Option<&UNet2DConditionConfig> {
        match self {
            Denoiser::Unet(config) => Some(config),
            Denoiser::Flux(_) => None,
        }
    }

    /// Channels of the samples that it predicts.
    pub fn out_channels(&self) -> usize {
        match self {
            Denoiser::Unet(config) => config.out_channels,
            Denoiser::Flux(config) => config.out_channels() / (flux::PATCH * flux::PATCH),
        }
    }

    /// Whether it also sees a mask and the masked image: the nine channels of an inpainting UNet are those of the sample,
    /// one of the mask, and those of the masked image's latents.
    pub fn is_inpainting(&self) -> bool {
        match self {
            Denoiser::Unet(config) => config.in_channels == 2 * config.out_channels + 1,
            Denoiser::Flux(_) => false,
        }
    }

    /// Whether the guidance scale is one of its inputs.
    pub fn takes_guidance(&self) -> bool {
        match self {
            Denoiser::Unet(_) => false,
            Denoiser::Flux(config) => config.guidance_embeds,
        }
    }

    /// The prediction for `inputs`, in `f32` and of the sample's rows and columns.
    ///
    /// # Errors
    /// When the inputs are those of another kind, or their shapes do not fit.
    pub fn predict(
        &self,
        b: &Builder,
        inputs: DenoiserInputs,
        precision: Precision,
        remat: Remat,
    ) -> Result<Tensor, GraphError> {
        let out = match (self, inputs) {
            (Denoiser::Unet(config), DenoiserInputs::Unet(inputs)) => {
                unet::unet(b, config, inputs, precision, remat)?
            }
            (Denoiser::Flux(config), DenoiserInputs::Flux(inputs)) => {
                flux::denoise_latents(b, config, inputs, precision, remat)?
            }
            (Denoiser::Unet(_) | Denoiser::Flux(_), _) => {
                return Err(b
                    .root(self.part())
                    .invalid(format!("the inputs are not those of a {}", self.class())));
            }
        };
        b.convert(out, DType::F32)
    }
}

/// The conditioning of a denoiser on text.
#[derive(Clone, Copy, Debug)]
pub enum Conditioning {
    Unet(UNetConditioning),
    Flux(FluxConditioning),
}

/// The inputs of a denoiser.
#[derive(Clone, Debug)]
pub enum DenoiserInputs {
    Unet(UNetInputs),
    Flux(FluxLatents),
}

impl DenoiserInputs {
    /// Those of a noisy `sample` `[B, channels, rows, columns]` at training timesteps `timestep` `[B]`, without anything
    /// that steers beside the text.
    pub fn new(sample: Tensor, timestep: Tensor, conditioning: Conditioning) -> DenoiserInputs {
        match conditioning {
            Conditioning::Unet(conditioning) => DenoiserInputs::Unet(UNetInputs {
                sample,
                timestep,
                conditioning,
                additional_residuals: None,
                image_prompt: None,
            }),
            Conditioning::Flux(conditioning) => DenoiserInputs::Flux(FluxLatents {
                sample,
                timestep,
                conditioning,
            }),
        }
    }
}
