//! The networks that denoise: a closed set, which the compiler follows to every place that tells them apart.

use std::cmp::Ordering;

use serde_json::{Map, Value};

use crate::dtype::DType;
use crate::graph::{Builder, GraphError, Tensor};
use crate::nn::{Precision, Remat};
use crate::schedulers::FlowLevels;
use crate::util::named;

use super::flux::{self, FluxConditioning, FluxLatents, FluxTransformer2DConfig};
use super::original::Original;
use super::pixart::{self, PixArtConditioning, PixArtInputs, PixArtTransformer2DConfig};
use super::sd3::{self, Sd3Conditioning, Sd3Inputs, Sd3Transformer2DConfig};
use super::unet::{self, UNet2DConditionConfig, UNetConditioning, UNetInputs};
use super::{ModelConfigError, Part};

named! {
    /// A kind of network that denoises, by its class in diffusers.
    pub enum DenoiserKind {
        /// Of Stable Diffusion.
        Unet = "UNet2DConditionModel",
        /// Of FLUX.1.
        Flux = "FluxTransformer2DModel",
        /// Of Stable Diffusion 3 and 3.5.
        Sd3 = "SD3Transformer2DModel",
        /// Of PixArt; published checkpoints name the class that it was before it had its own.
        PixArt = "PixArtTransformer2DModel" | "Transformer2DModel",
    }
}

impl DenoiserKind {
    /// The part of a model that it is, whose name is the root of its parameter paths.
    pub const fn part(self) -> Part {
        match self {
            DenoiserKind::Unet => Part::Unet,
            DenoiserKind::Flux | DenoiserKind::Sd3 | DenoiserKind::PixArt => Part::Transformer,
        }
    }

    /// Rows and columns of a sample that it takes together, of which a sample's sides are multiples.
    pub const fn patch(self) -> usize {
        match self {
            DenoiserKind::Unet => 1,
            DenoiserKind::Flux => flux::PATCH,
            DenoiserKind::Sd3 => sd3::PATCH,
            DenoiserKind::PixArt => pixart::PATCH,
        }
    }

    /// Whether its published models were trained by flow matching, and not with a schedule of betas.
    pub const fn is_flow(self) -> bool {
        match self {
            DenoiserKind::Flux | DenoiserKind::Sd3 => true,
            DenoiserKind::Unet | DenoiserKind::PixArt => false,
        }
    }

    /// The noise levels that diffusers' pipeline gives its sampler, where that is one of flow matching.
    pub const fn flow_levels(self) -> FlowLevels {
        match self {
            DenoiserKind::Unet | DenoiserKind::Flux | DenoiserKind::PixArt => FlowLevels::OfSteps,
            DenoiserKind::Sd3 => FlowLevels::OfTraining,
        }
    }

    /// The tokens of samples of these rows and columns, on which its noise levels may depend; a UNet has none.
    pub fn image_seq_len(self, [rows, columns]: [usize; 2]) -> Option<usize> {
        match self {
            DenoiserKind::Unet | DenoiserKind::PixArt => None,
            DenoiserKind::Flux | DenoiserKind::Sd3 => {
                Some((rows / self.patch()) * (columns / self.patch()))
            }
        }
    }
}

impl DenoiserKind {
    /// The models that have it, for messages.
    pub const fn models(self) -> &'static str {
        match self {
            DenoiserKind::Unet => "Stable Diffusion",
            DenoiserKind::Flux => "FLUX.1",
            DenoiserKind::Sd3 => "Stable Diffusion 3",
            DenoiserKind::PixArt => "PixArt",
        }
    }

    /// The kind of transformer whose layers are `paths`; `None` for a UNet.
    pub fn of_transformer(paths: &[&str]) -> Option<DenoiserKind> {
        let has = |path: &str| paths.contains(&path);
        match (has("x_embedder"), has("context_embedder")) {
            (true, true) => Some(DenoiserKind::Flux),
            (false, true) => Some(DenoiserKind::Sd3),
            _ => has("adaln_single.linear").then_some(DenoiserKind::PixArt),
        }
    }

    /// The layers of a transformer whose diffusers' layers are `paths`, by the names of the original code. A UNet's
    /// names are [`unet::original::Blocks`]'.
    pub fn original_layers(self, paths: &[&str]) -> Vec<Original> {
        match self {
            DenoiserKind::Unet => Vec::new(),
            DenoiserKind::Flux => flux::original::layers(paths),
            DenoiserKind::Sd3 => sd3::original::layers(paths),
            DenoiserKind::PixArt => pixart::original::layers(paths),
        }
    }
}

/// An image that a denoiser sees beside the sample, in further channels of its input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeenImage {
    /// A mask of one channel, then the latents of the image without the masked part: inpainting UNets.
    Masked,
    /// The latents of the image without the masked part, then a channel for each of the `pixels` of the mask that a latent
    /// stands for: FLUX.1 Fill.
    Filled { pixels: usize },
    /// The latents of an image that steers: FLUX.1 Canny and Depth.
    Control,
}

/// A network that denoises, by its configuration.
#[derive(Clone, Debug, PartialEq)]
pub enum Denoiser {
    Unet(Box<UNet2DConditionConfig>),
    Flux(Box<FluxTransformer2DConfig>),
    Sd3(Box<Sd3Transformer2DConfig>),
    PixArt(Box<PixArtTransformer2DConfig>),
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
            DenoiserKind::Sd3 => Denoiser::Sd3(Sd3Transformer2DConfig::from_map(fields)?.into()),
            DenoiserKind::PixArt => {
                Denoiser::PixArt(PixArtTransformer2DConfig::from_map(fields)?.into())
            }
        })
    }

    pub fn kind(&self) -> DenoiserKind {
        match self {
            Denoiser::Unet(_) => DenoiserKind::Unet,
            Denoiser::Flux(_) => DenoiserKind::Flux,
            Denoiser::Sd3(_) => DenoiserKind::Sd3,
            Denoiser::PixArt(_) => DenoiserKind::PixArt,
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
            Denoiser::Flux(_) | Denoiser::Sd3(_) | Denoiser::PixArt(_) => None,
        }
    }

    /// Channels of the samples that it predicts.
    pub fn out_channels(&self) -> usize {
        match self {
            Denoiser::Unet(config) => config.out_channels,
            Denoiser::Flux(config) => config.out_channels() / (flux::PATCH * flux::PATCH),
            Denoiser::Sd3(config) => config.out_channels(),
            Denoiser::PixArt(config) => config.in_channels,
        }
    }

    /// Most rows and columns of a sample, where it has positions for so many only.
    pub fn largest_side(&self) -> Option<usize> {
        match self {
            Denoiser::Unet(_) | Denoiser::Flux(_) | Denoiser::PixArt(_) => None,
            Denoiser::Sd3(config) => Some(config.largest_side()),
        }
    }

    /// Rows and columns of the smallest sample.
    pub fn smallest_side(&self) -> usize {
        match self {
            Denoiser::Unet(config) => config.spatial_multiple(),
            Denoiser::Flux(_) | Denoiser::Sd3(_) | Denoiser::PixArt(_) => self.kind().patch(),
        }
    }

    /// Blocks that skip-layer guidance may leave out; `None` where it is not built.
    pub fn skippable_layers(&self) -> Option<usize> {
        match self {
            Denoiser::Unet(_) | Denoiser::Flux(_) | Denoiser::PixArt(_) => None,
            Denoiser::Sd3(config) => Some(config.num_layers),
        }
    }

    /// The image that it sees beside the sample, if there is one: the width of its input tells.
    pub fn seen_image(&self) -> Option<SeenImage> {
        match self {
            Denoiser::Unet(config) => {
                let is_masked = config.in_channels == 2 * config.out_channels + 1;
                is_masked.then_some(SeenImage::Masked)
            }
            Denoiser::Flux(config) => {
                let (taken, made) = (config.in_channels, config.out_channels());
                match taken.cmp(&(2 * made)) {
                    Ordering::Less => None,
                    Ordering::Equal => Some(SeenImage::Control),
                    Ordering::Greater => Some(SeenImage::Filled {
                        pixels: taken / (flux::PATCH * flux::PATCH) - 2 * self.out_channels(),
                    }),
                }
            }
            Denoiser::Sd3(_) | Denoiser::PixArt(_) => None,
        }
    }

    /// Whether it also sees a mask and the masked image.
    pub fn is_inpainting(&self) -> bool {
        match self.seen_image() {
            Some(SeenImage::Masked | SeenImage::Filled { .. }) => true,
            Some(SeenImage::Control) | None => false,
        }
    }

    /// Keys of weights that are no parameters of diffusers' class but buffers, which training leaves as they are.
    pub fn buffers(&self) -> &'static [&'static str] {
        match self {
            Denoiser::Unet(_) | Denoiser::Flux(_) | Denoiser::PixArt(_) => &[],
            Denoiser::Sd3(_) => &["pos_embed.pos_embed"],
        }
    }

    /// Whether the guidance scale is one of its inputs.
    pub fn takes_guidance(&self) -> bool {
        match self {
            Denoiser::Unet(_) | Denoiser::Sd3(_) | Denoiser::PixArt(_) => false,
            Denoiser::Flux(config) => config.guidance_embeds,
        }
    }

    /// Declares the inputs of diffusers' `forward` by its names, and gives the prediction for them in `f32`. `size` gives
    /// what the configuration leaves open: `batch`; for a UNet `height`, `width` and `length`, the tokens of the text;
    /// for FLUX.1 the tokens `image` and `text`; for the other transformers `height`, `width` and `text`.
    ///
    /// # Errors
    /// When the sizes do not fit the network.
    pub fn declare_forward(
        &self,
        b: &Builder,
        size: &dyn Fn(&str) -> usize,
        precision: Precision,
    ) -> Result<Tensor, GraphError> {
        let out = match self {
            Denoiser::Unet(config) => {
                let dims = ["batch", "height", "width", "length"].map(size);
                let inputs = unet::declare_inputs(b, config, dims, DType::F32)?;
                unet::unet(b, config, inputs, precision, Remat::None)?
            }
            Denoiser::Flux(config) => {
                let inputs = flux::declare_inputs(b, config, ["batch", "image", "text"].map(size))?;
                flux::flux_transformer(b, config, inputs, precision, Remat::None)?
            }
            Denoiser::Sd3(config) => {
                let dims = ["batch", "height", "width", "text"].map(size);
                let inputs = sd3::declare_inputs(b, config, dims)?;
                sd3::sd3_transformer(b, config, inputs, precision, Remat::None)?
            }
            Denoiser::PixArt(config) => {
                let dims = ["batch", "height", "width", "text"].map(size);
                let inputs = pixart::declare_inputs(b, config, dims)?;
                pixart::pixart_transformer(b, config, inputs, precision, Remat::None)?
            }
        };
        b.convert(out, DType::F32)
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
            (Denoiser::Sd3(config), DenoiserInputs::Sd3(inputs)) => {
                sd3::sd3_transformer(b, config, inputs, precision, remat)?
            }
            (Denoiser::PixArt(config), DenoiserInputs::PixArt(inputs)) => {
                pixart::predict_sample(b, config, inputs, precision, remat)?
            }
            (Denoiser::Unet(_) | Denoiser::Flux(_) | Denoiser::Sd3(_) | Denoiser::PixArt(_), _) => {
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
    Sd3(Sd3Conditioning),
    PixArt(PixArtConditioning),
}

/// The inputs of a denoiser.
#[derive(Clone, Debug)]
pub enum DenoiserInputs {
    Unet(UNetInputs),
    Flux(FluxLatents),
    Sd3(Sd3Inputs),
    PixArt(PixArtInputs),
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
                controls: Vec::new(),
            }),
            Conditioning::Sd3(conditioning) => DenoiserInputs::Sd3(Sd3Inputs {
                hidden_states: sample,
                timestep,
                conditioning,
                skip_layers: None,
            }),
            Conditioning::PixArt(conditioning) => DenoiserInputs::PixArt(PixArtInputs {
                hidden_states: sample,
                timestep,
                conditioning,
            }),
        }
    }
}
