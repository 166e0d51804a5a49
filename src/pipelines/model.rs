//! A text-to-image model as a whole: what training and generation trace alike.

use crate::dtype::DType;
use crate::graph::{Builder, GraphError, Tensor};
use crate::models::clip::{ClipTextConfig, clip_text};
use crate::models::unet::{self, TextTime, UNet2DConditionConfig, UNetInputs};
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
    /// Tokens of a prompt.
    pub tokens: usize,
}

impl DiffusionModel {
    /// The sample's dimensions for a batch: `[batch, in_channels, rows, columns]`.
    pub fn sample_dims(&self, batch: usize) -> [usize; 4] {
        let [rows, columns] = self.sample_size;
        [batch, self.unet.in_channels, rows, columns]
    }

    /// The text encoder's last hidden state `[batch, tokens, features]` for token ids of type `s32`.
    ///
    /// # Errors
    /// When there is no text encoder, or its output does not fit the UNet.
    pub fn encode(&self, b: &Builder, input_ids: Tensor) -> Result<Tensor> {
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
        Ok(output.last_hidden_state)
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
