//! A text-to-image model as a whole: what training and generation trace alike.

use crate::dtype::DType;
use crate::graph::{Builder, GraphError, Tensor};
use crate::models::clip::{ClipTextConfig, INPUT_IDS, clip_text, final_layer_norm};
use crate::models::controlnet::{self, Control, ControlNetConfig};
use crate::models::ip_adapter::IpAdapterConfig;
use crate::models::unet::{
    self, AdditionEmbedType, ResSamples, SIZE_TIME_IDS, UNet2DConditionConfig, UNetConditioning,
    UNetInputs,
};
use crate::models::vae::Autoencoder;
use crate::models::{Family, HiddenState, Part};
use crate::nn::{Precision, Remat};
use crate::schedulers::SchedulerConfig;
use crate::shape::Shape;

type Result<T> = std::result::Result<T, GraphError>;

/// The parts of a text-to-image model and how they compute.
#[derive(Clone, Debug)]
pub struct DiffusionModel {
    pub family: Family,
    pub unet: UNet2DConditionConfig,
    /// ControlNets that add residuals to the UNet, each with its conditioning image.
    pub controlnets: Vec<ControlNetConfig>,
    /// An IP-Adapter for the UNet, with its image encoder.
    pub ip_adapter: Option<IpAdapterConfig>,
    /// Empty where programs take finished text embeddings. The results of several stand side by side.
    pub text_encoders: Vec<TextEncoder>,
    /// The VAE that decodes the UNet's samples; `None` if samples are pixels.
    pub vae: Option<Autoencoder>,
    /// The VAE that decodes previews; `None` if that is `vae`.
    pub preview_vae: Option<Autoencoder>,
    /// How all models compute. As in diffusers, that holds for a VAE that asks for `force_upcast` too: it is about f16,
    /// whose range SDXL's activations leave; bf16 has the range of f32.
    pub precision: Precision,
    pub remat: Remat,
    pub scheduler: SchedulerConfig,
    /// Rows and columns of the UNet's sample.
    pub sample_size: [usize; 2],
    /// Height and width of the images in pixels, an input of SDXL's micro-conditioning.
    pub image_size: [usize; 2],
    pub micro_conditioning: MicroConditioning,
    /// Tokens that a text encoder takes at once.
    pub tokens: usize,
    /// Side of the tiles, in latents, that the VAE decodes one at a time; `None` decodes a whole image at once.
    pub decode_tile: Option<usize>,
}

/// The part of SDXL's time ids after size and crop; other models have none.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum MicroConditioning {
    /// The target size: SDXL base.
    #[default]
    TargetSize,
    /// The aesthetic score, from 1 to 10, on the scale of LAION's predictor: SDXL's refiner, diffusers'
    /// `requires_aesthetics_score`.
    AestheticScore {
        score: f32,
        /// The score of the unconditional row.
        negative: f32,
    },
}

impl MicroConditioning {
    /// How many time ids there are.
    pub fn ids(self) -> usize {
        match self {
            MicroConditioning::TargetSize => SIZE_TIME_IDS,
            MicroConditioning::AestheticScore { .. } => SIZE_TIME_IDS - 1,
        }
    }
}

/// One of a model's text encoders.
#[derive(Clone, Debug)]
pub struct TextEncoder {
    /// Its name is the root of the parameter paths.
    pub part: Part,
    pub config: ClipTextConfig,
    pub hidden: HiddenState,
}

/// The output of a text encoder for the UNet.
#[derive(Clone, Copy, Debug)]
pub struct TextConditioning {
    /// The chosen hidden state `[batch, tokens, features]`.
    pub encoder_hidden_states: Tensor,
    /// The projected pooled output `[batch, projection_dim]`, where the encoder has a projection.
    pub text_embeds: Option<Tensor>,
}

impl DiffusionModel {
    /// The same with the VAE that decodes previews, if that is another.
    pub fn previewing(&self) -> Option<DiffusionModel> {
        let vae = self.preview_vae.clone()?;
        Some(DiffusionModel {
            vae: Some(vae),
            ..self.clone()
        })
    }

    /// The sample's dimensions for a batch: `[batch, channels, rows, columns]`.
    pub fn sample_dims(&self, batch: usize) -> [usize; 4] {
        let [rows, columns] = self.sample_size;
        [batch, self.unet.out_channels, rows, columns]
    }

    /// The same model for samples of another size.
    #[must_use]
    pub fn resized(&self, sample_size: [usize; 2]) -> DiffusionModel {
        let side = |which: usize| {
            let pixels = self.image_size[which] / self.sample_size[which].max(1);
            sample_size[which] * pixels
        };
        DiffusionModel {
            sample_size,
            image_size: [side(0), side(1)],
            ..self.clone()
        }
    }

    /// Runs text encoder `which` on token ids of type `s32[batch, tokens]`.
    ///
    /// # Errors
    /// When there is no such text encoder, or it has fewer layers than are to be skipped.
    pub fn encode(&self, b: &Builder, which: usize, input_ids: Tensor) -> Result<TextConditioning> {
        let Some(encoder) = self.text_encoders.get(which) else {
            return Err(b.invalid("this model has no text encoder of its own"));
        };
        let output = clip_text(
            b,
            encoder.part.name(),
            &encoder.config,
            input_ids,
            self.precision,
            self.remat,
        )?;
        let (HiddenState::Normed { skip } | HiddenState::Raw { skip }) = encoder.hidden;
        let states = &output.hidden_states;
        let Some(state) = states.len().checked_sub(1 + skip).map(|at| states[at]) else {
            return Err(b.root(encoder.part.name()).invalid(format!(
                "clip_skip leaves none of the {} layers",
                encoder.config.num_hidden_layers
            )));
        };
        let encoder_hidden_states = match encoder.hidden {
            HiddenState::Normed { skip: 0 } => output.last_hidden_state,
            HiddenState::Normed { .. } => {
                let root = b.root(encoder.part.name());
                final_layer_norm(&root, &encoder.config, state, self.precision)?
            }
            HiddenState::Raw { .. } => state,
        };
        Ok(TextConditioning {
            encoder_hidden_states,
            text_embeds: output.text_embeds,
        })
    }

    /// The text encoder whose pooled output the UNet takes, if it takes one.
    ///
    /// # Errors
    /// When the UNet wants one, and no encoder has a projection.
    pub fn pooled_encoder(&self) -> Result<Option<usize>> {
        let projecting = self
            .text_encoders
            .iter()
            .rposition(|e| e.config.has_projection());
        match (self.unet.addition_embed_type, projecting) {
            (None, _) => Ok(None),
            (Some(AdditionEmbedType::TextTime), Some(which)) => Ok(Some(which)),
            (Some(AdditionEmbedType::TextTime), None) => {
                Err(Builder::new().root(unet::ROOT).invalid(
                    "addition_embed_type = text_time needs text_embeds, which none of the text encoders computes: \
                     give one \
                     architectures: [CLIPTextModelWithProjection] and projection_dim",
                ))
            }
        }
    }

    /// SDXL's time ids of an image that was neither resized nor cropped: original size, top left corner, then what
    /// [`MicroConditioning`] says. Those without the prompt, then those with it.
    pub fn time_ids(&self) -> [Vec<f32>; 2] {
        let [height, width] = self.image_size.map(|side| side as f32);
        let [without, with] = match self.micro_conditioning {
            MicroConditioning::TargetSize => [vec![height, width], vec![height, width]],
            MicroConditioning::AestheticScore { score, negative } => [vec![negative], vec![score]],
        };
        [without, with].map(|last| [vec![height, width, 0.0, 0.0], last].concat())
    }

    /// Whether the UNet also sees a mask and the masked image: the nine channels of inpainting models are those of the
    /// sample, one of the mask, and those of the masked image's latents.
    pub fn is_inpainting(&self) -> bool {
        self.unet.in_channels == 2 * self.unet.out_channels + 1
    }

    /// Checks that the pooled embeddings and the time ids have as many features as the UNet takes.
    ///
    /// # Errors
    /// Says both, where they differ.
    pub fn check_time_ids(&self) -> Result<()> {
        let unet = &self.unet;
        let Some(text) = self
            .pooled_encoder()?
            .map(|which| self.text_encoders[which].config.projection_dim)
        else {
            return Ok(());
        };
        let each = unet.addition_time_embed_dim.unwrap_or_default();
        let ids = self.micro_conditioning.ids();
        let expected = unet
            .projection_class_embeddings_input_dim
            .unwrap_or_default();
        if text + ids * each == expected {
            return Ok(());
        }
        Err(Builder::new().root(unet::ROOT).invalid(format!(
            "projection_class_embeddings_input_dim = {expected}, but {text} features of text_embeds and {ids} time_ids of \
             {each} make {}; a refiner takes 5 time ids (requires_aesthetics_score in its model_index.json), a base model 6",
            text + ids * each
        )))
    }

    /// Declares `input_ids`: `s32[batch, tokens]`.
    ///
    /// # Errors
    /// When the name is taken by an input of another shape.
    pub fn declare_input_ids(&self, b: &Builder, batch: usize) -> Result<Tensor> {
        b.input(
            INPUT_IDS,
            Shape::new(DType::S32, [batch, self.tokens]),
            &[Some("activation_batch"), None],
        )
    }

    /// Declares finished text conditioning of `tokens` tokens as inputs: hidden states, and for SDXL pooled embeddings
    /// and time ids.
    ///
    /// # Errors
    /// When one of the names is taken by an input of another shape.
    pub fn declare_conditioning(
        &self,
        b: &Builder,
        batch: usize,
        tokens: usize,
    ) -> Result<UNetConditioning> {
        let ids = self.micro_conditioning.ids();
        unet::declare_conditioning(b, &self.unet, [batch, tokens], ids, DType::F32)
    }

    /// The sum of all ControlNets' residuals for `inputs`; `None` without one. `declare` gives each its image.
    ///
    /// # Errors
    /// When an input's shape does not fit, or a ControlNet is one of another UNet.
    pub fn control(
        &self,
        b: &Builder,
        inputs: &UNetInputs,
        declare: impl Fn(usize, &ControlNetConfig) -> Result<Control>,
    ) -> Result<Option<ResSamples>> {
        let mut sum: Option<ResSamples> = None;
        for (which, config) in self.controlnets.iter().enumerate() {
            let control = declare(which, config)?;
            let root = controlnet::root(which);
            let (precision, remat) = (self.precision, self.remat);
            let added =
                controlnet::controlnet(b, &root, config, inputs, control, precision, remat)?;
            sum = Some(match sum {
                None => added,
                Some(sum) => sum.add(&b.root(&root), &added)?,
            });
        }
        Ok(sum)
    }

    /// The UNet's prediction for `inputs`, in `f32`.
    ///
    /// # Errors
    /// When an input's shape does not fit.
    pub fn predict(&self, b: &Builder, inputs: UNetInputs) -> Result<Tensor> {
        let out = unet::unet(b, &self.unet, inputs, self.precision, self.remat)?;
        b.convert(out, DType::F32)
    }
}
