//! A text-to-image model as a whole: what training and generation trace alike.

use crate::dtype::DType;
use crate::graph::{Builder, GraphError, Tensor};
use crate::models::clip::{ClipTextConfig, clip_text};
use crate::models::unet::{self, AdditionEmbedType, TextTime, UNet2DConditionConfig, UNetInputs};
use crate::nn::{Precision, Remat};
use crate::schedulers::SchedulerConfig;
use crate::shape::Shape;

type Result<T> = std::result::Result<T, GraphError>;

/// The root of the text encoder's parameter paths.
pub const TEXT_ENCODER: &str = "text_encoder";

/// The parts of a text-to-image model and how they compute.
#[derive(Clone, Debug)]
pub struct DiffusionModel {
    pub unet: UNet2DConditionConfig,
    /// `None` where programs take finished text embeddings.
    pub text_encoder: Option<ClipTextConfig>,
    pub precision: Precision,
    pub remat: Remat,
    pub scheduler: SchedulerConfig,
    /// Rows and columns of the UNet's sample.
    pub sample_size: [usize; 2],
    /// Height and width of the pictures in pixels, which SDXL's micro-conditioning is told.
    pub image_size: [usize; 2],
    /// Tokens of a prompt.
    pub tokens: usize,
}

/// What the text encoder gives the UNet.
#[derive(Clone, Copy, Debug)]
pub struct TextConditioning {
    /// The last hidden state `[batch, tokens, features]`.
    pub encoder_hidden_states: Tensor,
    /// The projected pooled output `[batch, projection_dim]`, for a UNet that conditions on it.
    pub text_embeds: Option<Tensor>,
}

impl DiffusionModel {
    /// The sample's dimensions for a batch: `[batch, in_channels, rows, columns]`.
    pub fn sample_dims(&self, batch: usize) -> [usize; 4] {
        let [rows, columns] = self.sample_size;
        [batch, self.unet.in_channels, rows, columns]
    }

    /// Runs the text encoder on token ids of type `s32[batch, tokens]`.
    ///
    /// # Errors
    /// When there is no text encoder, or the UNet wants a projection that it does not have.
    pub fn encode(&self, b: &Builder, input_ids: Tensor) -> Result<TextConditioning> {
        let Some(config) = &self.text_encoder else {
            return Err(b.invalid("this model has no text encoder of its own"));
        };
        let output = clip_text(
            b,
            TEXT_ENCODER,
            config,
            input_ids,
            self.precision,
            self.remat,
        )?;
        let text_embeds = match (self.unet.addition_embed_type, output.text_embeds) {
            (None, _) => None,
            (Some(AdditionEmbedType::TextTime), Some(embeds)) => Some(embeds),
            (Some(AdditionEmbedType::TextTime), None) => {
                return Err(b.invalid(
                    "the UNet's addition_embed_type = text_time takes text_embeds, which this text encoder does not \
                     make: give it architectures: [CLIPTextModelWithProjection] and projection_dim",
                ));
            }
        };
        Ok(TextConditioning {
            encoder_hidden_states: output.last_hidden_state,
            text_embeds,
        })
    }

    /// SDXL's time ids of a picture that was neither resized nor cropped: original size, top left corner, target size.
    pub fn time_ids(&self) -> [f32; 6] {
        let [height, width] = self.image_size.map(|side| side as f32);
        [height, width, 0.0, 0.0, height, width]
    }

    /// Declares `input_ids`: `s32[batch, tokens]`.
    ///
    /// # Errors
    /// When the name is taken by an input of another shape.
    pub fn declare_input_ids(&self, b: &Builder, batch: usize) -> Result<Tensor> {
        b.input(
            "input_ids",
            Shape::new(DType::S32, [batch, self.tokens]),
            &[Some("activation_batch"), None],
        )
    }

    /// Declares finished text conditioning as inputs: hidden states, and for SDXL pooled embeddings and time ids.
    ///
    /// # Errors
    /// When one of the names is taken by an input of another shape.
    pub fn declare_conditioning(
        &self,
        b: &Builder,
        batch: usize,
    ) -> Result<(Tensor, Option<TextTime>)> {
        unet::declare_conditioning(b, &self.unet, batch, self.tokens, DType::F32)
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
