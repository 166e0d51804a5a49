//! A text-to-image model as a whole: what training and generation trace alike.

use crate::dtype::DType;
use crate::graph::{Builder, Comparison, GraphError, Tensor};
use crate::models::clip::{ClipTextConfig, INPUT_IDS, clip_text, final_layer_norm};
use crate::models::controlnet::{self, Control, ControlNetConfig};
use crate::models::flux::{self, FluxConditioning};
use crate::models::ip_adapter::IpAdapterConfig;
use crate::models::joint;
use crate::models::t5::{T5EncoderConfig, t5_encoder};
use crate::models::unet::{
    self, AdditionEmbedType, ResSamples, SIZE_TIME_IDS, UNet2DConditionConfig, UNetInputs,
};
use crate::models::vae::Autoencoder;
use crate::models::{
    Conditioning, ControlNet, Denoiser, DenoiserInputs, Family, HiddenState, ModelConfigError,
    Part, TextEncoderKind, TextPlace, pixart, sd3,
};
use crate::nn::{Precision, Remat};
use crate::schedulers::SchedulerConfig;
use crate::shape::Shape;

use serde_json::{Map, Value};

type Result<T> = std::result::Result<T, GraphError>;

/// The token that fills T5's prompts up.
const T5_PADDING: f64 = 0.0;

/// The field of a transformer's configuration with the features of the text.
const JOINT: &str = "joint_attention_dim";

/// The parts of a text-to-image model and how they compute.
#[derive(Clone, Debug)]
pub struct DiffusionModel {
    pub family: Family,
    pub denoiser: Denoiser,
    /// ControlNets that add residuals to the denoiser, each with its conditioning image.
    pub controlnets: Vec<ControlNet>,
    /// An IP-Adapter for the UNet, with its image encoder.
    pub ip_adapter: Option<IpAdapterConfig>,
    /// Empty where programs take finished text embeddings.
    pub text_encoders: Vec<TextEncoder>,
    /// The VAE that decodes the denoiser's samples; `None` if samples are pixels.
    pub vae: Option<Autoencoder>,
    /// The VAE that decodes previews; `None` if that is `vae`.
    pub preview_vae: Option<Autoencoder>,
    /// How all models compute. As in diffusers, that holds for a VAE that asks for `force_upcast` too: it is about f16,
    /// whose range SDXL's activations leave; bf16 has the range of f32.
    pub precision: Precision,
    pub remat: Remat,
    /// Whether equal blocks are compiled as one loop; `None`: where the devices' compiler gains from it.
    pub scan_layers: Option<bool>,
    pub scheduler: SchedulerConfig,
    /// Rows and columns of the denoiser's sample.
    pub sample_size: [usize; 2],
    /// Height and width of the images in pixels, an input of SDXL's micro-conditioning.
    pub image_size: [usize; 2],
    pub micro_conditioning: MicroConditioning,
    /// Tokens of the text that the denoiser attends to, for prompts of one chunk.
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
    pub config: TextEncoderConfig,
    pub hidden: HiddenState,
    pub place: TextPlace,
    /// Whether neither it nor the denoiser attends to the tokens that fill a prompt up.
    pub masked: bool,
    /// Tokens that it takes at once.
    pub tokens: usize,
}

/// A text encoder, by its configuration.
#[derive(Clone, Debug, PartialEq)]
pub enum TextEncoderConfig {
    Clip(Box<ClipTextConfig>),
    T5(Box<T5EncoderConfig>),
}

impl TextEncoderConfig {
    /// Reads and checks the fields of a `config.json`.
    ///
    /// # Errors
    /// When it asks for something that is not built here, or contradicts itself.
    pub fn from_map(
        kind: TextEncoderKind,
        fields: Map<String, Value>,
    ) -> std::result::Result<Self, ModelConfigError> {
        Ok(match kind {
            TextEncoderKind::Clip => {
                TextEncoderConfig::Clip(ClipTextConfig::from_map(fields)?.into())
            }
            TextEncoderKind::T5 { .. } => {
                TextEncoderConfig::T5(T5EncoderConfig::from_map(fields)?.into())
            }
        })
    }

    /// Features of its tokens.
    pub fn features(&self) -> usize {
        match self {
            TextEncoderConfig::Clip(config) => config.hidden_size,
            TextEncoderConfig::T5(config) => config.d_model,
        }
    }

    /// Rows of its embedding table.
    pub fn vocab_size(&self) -> usize {
        match self {
            TextEncoderConfig::Clip(config) => config.vocab_size,
            TextEncoderConfig::T5(config) => config.vocab_size,
        }
    }

    /// CLIP's configuration, if it is one.
    pub fn clip(&self) -> Option<&ClipTextConfig> {
        match self {
            TextEncoderConfig::Clip(config) => Some(config),
            TextEncoderConfig::T5(_) => None,
        }
    }

    /// Features of its projected pooled output, if it has one.
    fn projection_dim(&self) -> Option<usize> {
        let clip = self.clip().filter(|config| config.has_projection());
        clip.map(|config| config.projection_dim)
    }
}

impl From<ClipTextConfig> for TextEncoderConfig {
    fn from(config: ClipTextConfig) -> Self {
        TextEncoderConfig::Clip(Box::new(config))
    }
}

/// The output of a text encoder for the denoiser.
#[derive(Clone, Copy, Debug)]
pub struct TextConditioning {
    /// The chosen hidden state `[batch, tokens, features]`, if one is chosen.
    pub encoder_hidden_states: Option<Tensor>,
    /// The pooled output `[batch, features]`, projected where the encoder has a projection.
    pub pooled: Option<Tensor>,
    /// `f32[batch, tokens]`: 0 for tokens that fill a prompt up, where the denoiser does not attend to them.
    pub mask: Option<Tensor>,
}

/// 1 for tokens of a prompt and 0 for those that fill it up, of T5's token ids.
fn is_no_padding(b: &Builder, input_ids: Tensor) -> Result<Tensor> {
    let padding = b.scalar(b.dtype(input_ids), T5_PADDING)?;
    let is_text = b.compare(Comparison::Ne, input_ids, padding)?;
    b.convert(is_text, b.dtype(input_ids))
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
        [batch, self.denoiser.out_channels(), rows, columns]
    }

    /// The tokens of an image, on which its noise levels may depend.
    pub fn image_seq_len(&self) -> Option<usize> {
        self.denoiser.kind().image_seq_len(self.sample_size)
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
        let (precision, remat) = (self.precision, self.remat);
        let root = encoder.part.name();
        match &encoder.config {
            TextEncoderConfig::Clip(config) => self.encode_clip(b, encoder, config, input_ids),
            TextEncoderConfig::T5(config) => match encoder.hidden {
                HiddenState::Normed { skip: 0 } => {
                    let mask = match encoder.masked {
                        true => Some(is_no_padding(b, input_ids)?),
                        false => None,
                    };
                    let y = t5_encoder(b, root, config, input_ids, mask, precision, remat)?;
                    Ok(TextConditioning {
                        encoder_hidden_states: Some(y),
                        pooled: None,
                        mask: mask.map(|mask| b.convert(mask, DType::F32)).transpose()?,
                    })
                }
                HiddenState::Normed { .. } | HiddenState::Raw { .. } | HiddenState::Pooled => {
                    Err(b.root(root).invalid("T5 gives its last hidden state alone"))
                }
            },
        }
    }

    fn encode_clip(
        &self,
        b: &Builder,
        encoder: &TextEncoder,
        config: &ClipTextConfig,
        input_ids: Tensor,
    ) -> Result<TextConditioning> {
        let root = encoder.part.name();
        let output = clip_text(b, root, config, input_ids, self.precision, self.remat)?;
        let skip = match encoder.hidden {
            HiddenState::Normed { skip } | HiddenState::Raw { skip } => skip,
            HiddenState::Pooled => {
                return Ok(TextConditioning {
                    encoder_hidden_states: None,
                    pooled: Some(output.pooler_output),
                    mask: None,
                });
            }
        };
        let states = &output.hidden_states;
        let Some(state) = states.len().checked_sub(1 + skip).map(|at| states[at]) else {
            return Err(b.root(root).invalid(format!(
                "clip_skip leaves none of the {} layers",
                config.num_hidden_layers
            )));
        };
        let hidden = match encoder.hidden {
            HiddenState::Normed { skip: 0 } => output.last_hidden_state,
            HiddenState::Normed { .. } => {
                final_layer_norm(&b.root(root), config, state, self.precision)?
            }
            HiddenState::Raw { .. } | HiddenState::Pooled => state,
        };
        Ok(TextConditioning {
            encoder_hidden_states: Some(hidden),
            pooled: output.text_embeds,
            mask: None,
        })
    }

    /// The text encoders whose pooled outputs the denoiser takes, side by side in this order.
    ///
    /// # Errors
    /// When it wants one, and no encoder gives it.
    pub fn pooled_encoders(&self) -> Result<Vec<usize>> {
        let encoders = self.text_encoders.iter().enumerate();
        let projecting = encoders
            .clone()
            .filter(|(_, encoder)| encoder.config.projection_dim().is_some())
            .map(|(which, _)| which);
        let missing = |root: &str, message: &str| Err(Builder::new().root(root).invalid(message));
        let found: Vec<usize> = match &self.denoiser {
            Denoiser::Unet(unet) => match unet.addition_embed_type {
                None => return Ok(Vec::new()),
                Some(AdditionEmbedType::TextTime) => projecting.rev().take(1).collect(),
            },
            Denoiser::Flux(_) => encoders
                .filter(|(_, encoder)| encoder.hidden == HiddenState::Pooled)
                .map(|(which, _)| which)
                .collect(),
            Denoiser::Sd3(_) => projecting.collect(),
            Denoiser::PixArt(_) => return Ok(Vec::new()),
        };
        match (&self.denoiser, found.is_empty()) {
            (_, false) => Ok(found),
            (Denoiser::Unet(_), true) => missing(
                unet::ROOT,
                "addition_embed_type = text_time needs text_embeds, which none of the text encoders computes: give one \
                 architectures: [CLIPTextModelWithProjection] and projection_dim",
            ),
            (Denoiser::Flux(_) | Denoiser::Sd3(_) | Denoiser::PixArt(_), true) => missing(
                flux::ROOT,
                "pooled_projections are the pooled output of a text encoder, and there is none that gives it",
            ),
        }
    }

    /// Features of the pooled text: those of [`DiffusionModel::pooled_encoders`].
    fn pooled_features(&self) -> Result<usize> {
        let features = |which: usize| {
            let config = &self.text_encoders[which].config;
            config.projection_dim().unwrap_or(config.features())
        };
        Ok(self.pooled_encoders()?.into_iter().map(features).sum())
    }

    /// Features of the text where hidden states of different sizes follow one another, or may be left out: those that
    /// others are filled up to with zeros.
    pub fn padded_features(&self) -> Option<usize> {
        match &self.denoiser {
            Denoiser::Unet(_) | Denoiser::Flux(_) | Denoiser::PixArt(_) => None,
            Denoiser::Sd3(config) => Some(config.joint_attention_dim),
        }
    }

    /// SDXL's time ids of a training image: its height and width before it was cropped, the crop's corner after it was
    /// resized, then what [`MicroConditioning`] says of an image with a prompt.
    pub fn time_ids_of(&self, original_size: [usize; 2], crop_top_left: [usize; 2]) -> Vec<f32> {
        let last = match self.micro_conditioning {
            MicroConditioning::TargetSize => self.image_size.map(|side| side as f32).to_vec(),
            MicroConditioning::AestheticScore { score, .. } => vec![score],
        };
        let places = original_size.into_iter().chain(crop_top_left);
        places.map(|place| place as f32).chain(last).collect()
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

    /// Whether the denoiser also sees a mask and the masked image.
    pub fn is_inpainting(&self) -> bool {
        self.denoiser.is_inpainting()
    }

    /// Checks that the text encoders give as many features as the denoiser takes: hidden states for a transformer, and
    /// for all that take one the pooled output, for a UNet together with the time ids.
    ///
    /// # Errors
    /// Says both, where they differ.
    pub fn check_conditioning(&self) -> Result<()> {
        let pooled = self.pooled_features()?;
        let check =
            |field: &str, expected: usize, found: usize, place: &str| match found == expected {
                true => Ok(()),
                false => Err(Builder::new().root(self.denoiser.part()).invalid(format!(
                    "{field} = {expected}, but {place} gives {found} features"
                ))),
            };
        let encoders = self.text_encoders.iter();
        let ((field, dim), pooled_dim) = match &self.denoiser {
            Denoiser::Unet(config) => return self.check_time_ids(config, pooled),
            Denoiser::Flux(config) => (
                (JOINT, config.joint_attention_dim),
                Some(config.pooled_projection_dim),
            ),
            Denoiser::Sd3(config) => (
                (JOINT, config.joint_attention_dim),
                Some(config.pooled_projection_dim),
            ),
            Denoiser::PixArt(config) => (("caption_channels", config.caption_channels), None),
        };
        if let Some(expected) = pooled_dim {
            let part = |which: &usize| self.text_encoders[*which].part.name();
            let names: Vec<&str> = self.pooled_encoders()?.iter().map(part).collect();
            check(
                "pooled_projection_dim",
                expected,
                pooled,
                &names.join(" with "),
            )?;
        }
        let attended = encoders.filter(|encoder| encoder.hidden != HiddenState::Pooled);
        let beside: Vec<&TextEncoder> = attended
            .clone()
            .filter(|encoder| encoder.place == TextPlace::Beside)
            .collect();
        for encoder in attended.filter(|encoder| encoder.place == TextPlace::After) {
            let found = encoder.config.features();
            check(field, dim, found, encoder.part.name())?;
        }
        let found = beside.iter().map(|e| e.config.features()).sum();
        let names: Vec<&str> = beside.iter().map(|e| e.part.name()).collect();
        match self.padded_features() {
            // Filled up with zeros.
            Some(_) if found <= dim => Ok(()),
            Some(_) | None => check(field, dim, found, &names.join(" with ")),
        }
    }

    fn check_time_ids(&self, unet: &UNet2DConditionConfig, text: usize) -> Result<()> {
        if unet.addition_embed_type.is_none() {
            return Ok(());
        }
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

    /// Declares `input_ids` of text encoder `which`: `s32[batch, tokens]`.
    ///
    /// # Errors
    /// When the name is taken by an input of another shape.
    pub fn declare_input_ids(&self, b: &Builder, which: usize, batch: usize) -> Result<Tensor> {
        let encoder = self.text_encoders.get(which);
        let tokens = encoder.map_or(self.tokens, |encoder| encoder.tokens);
        b.input(
            INPUT_IDS,
            Shape::new(DType::S32, [batch, tokens]),
            &[Some("activation_batch"), None],
        )
    }

    /// Declares finished text conditioning of `tokens` tokens as inputs: hidden states, for SDXL and transformers pooled
    /// embeddings, and for SDXL time ids. `guidance` is the guidance scale `[batch]`, for a denoiser that takes it.
    ///
    /// # Errors
    /// When one of the names is taken by an input of another shape.
    pub fn declare_conditioning(
        &self,
        b: &Builder,
        batch: usize,
        tokens: usize,
        guidance: Option<Tensor>,
    ) -> Result<Conditioning> {
        match &self.denoiser {
            Denoiser::Unet(config) => {
                let ids = self.micro_conditioning.ids();
                let sizes = [batch, tokens];
                let declared = unet::declare_conditioning(b, config, sizes, ids, DType::F32)?;
                Ok(Conditioning::Unet(declared))
            }
            Denoiser::Flux(config) => {
                let axes = [Some("activation_batch"), None, None];
                let input = |name: &str, sizes: &[usize]| {
                    b.input(name, Shape::new(DType::F32, sizes), &axes[..sizes.len()])
                };
                let (joint, pooled) = (config.joint_attention_dim, config.pooled_projection_dim);
                Ok(Conditioning::Flux(FluxConditioning {
                    encoder_hidden_states: input(
                        joint::names::ENCODER_HIDDEN_STATES,
                        &[batch, tokens, joint],
                    )?,
                    pooled_projections: input(joint::names::POOLED_PROJECTIONS, &[batch, pooled])?,
                    guidance,
                }))
            }
            Denoiser::PixArt(config) => {
                let size = match config.takes_size() {
                    true => Some(pixart::ImageSize::constant(b, batch, self.image_size)?),
                    false => None,
                };
                let sizes = [batch, tokens];
                let declared = pixart::declare_conditioning(b, config, sizes, size)?;
                Ok(Conditioning::PixArt(declared))
            }
            Denoiser::Sd3(config) => {
                let declared = sd3::declare_conditioning(b, config, [batch, tokens])?;
                Ok(Conditioning::Sd3(declared))
            }
        }
    }

    /// The sum of all ControlNets' residuals for a UNet's `inputs`; `None` without one. `declare` gives each its image.
    ///
    /// # Errors
    /// When an input's shape does not fit, or a ControlNet is one of another denoiser.
    pub fn control(
        &self,
        b: &Builder,
        inputs: &UNetInputs,
        declare: impl Fn(usize, &ControlNetConfig) -> Result<Control>,
    ) -> Result<Option<ResSamples>> {
        let mut sum: Option<ResSamples> = None;
        for (which, net) in self.controlnets.iter().enumerate() {
            let root = controlnet::root(which);
            let ControlNet::Unet(config) = net else {
                return Err(b
                    .root(&root)
                    .invalid("it is a ControlNet of another denoiser"));
            };
            let control = declare(which, config)?;
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

    /// The denoiser's prediction for `inputs`, in `f32`.
    ///
    /// # Errors
    /// When an input's shape does not fit.
    pub fn predict(&self, b: &Builder, inputs: DenoiserInputs) -> Result<Tensor> {
        self.denoiser.predict(b, inputs, self.precision, self.remat)
    }
}
