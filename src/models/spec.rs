//! The description of a family, which configuration, hub, weights, LoRA, pipelines and training read.

use serde_json::{Map, Value};

use super::original::{OriginalTensors, Root};
use super::{DenoiserKind, Part};

/// The description of a family. See `docs/adding-a-family.md`.
#[derive(Debug)]
pub struct FamilySpec {
    /// The name in messages.
    pub title: &'static str,
    /// The name of the recipe that it is used with.
    pub recipe: &'static str,
    /// Its published models; `None` for a family that is only trained here.
    pub published: Option<Published>,
    pub denoiser: DenoiserKind,
    /// The text encoders, in the order in which their hidden states and pooled outputs stand.
    pub text_encoders: &'static [TextEncoderSpec],
    /// Whether the time ids of the image end in an aesthetic score and not in the target size, where
    /// `model_index.json` does not say (`requires_aesthetics_score`).
    pub aesthetic_score: bool,
    /// Whether an empty negative prompt is zeros and not the encoding of an empty text, where `model_index.json` does
    /// not say (`force_zeros_for_empty_prompt`).
    pub zero_empty_prompts: bool,
    pub guidance: GuidanceKind,
    /// Whether prompts may have weights, and as many chunks as they need: what web interfaces do with CLIP alone.
    pub prompt_weights: bool,
    /// Whether prompts are read in lower case, without spaces around them.
    pub lower_case_prompts: bool,
    /// Whether there are ControlNets for its denoiser, and where that is a UNet IP-Adapters.
    pub controlnets: bool,
    /// Whether textual inversions for it are read.
    pub textual_inversions: bool,
    /// Starts of module names that only LoRA files for this family have.
    pub lora_names: &'static [&'static str],
    /// Paths below the denoiser's root (regular expressions) of the layers that stay in float under
    /// `quantization=int8`: they are small, and sensitive to rounding.
    pub int8_float_layers: &'static [&'static str],
    /// Whether a model in diffusers' layout is of this family. Asked from the last family to the first.
    pub claims: fn(&Signs) -> bool,
}

impl FamilySpec {
    /// The tokens that prompts are padded to where nothing else is asked for, and the most, if a text encoder leaves
    /// them open.
    pub fn prompt_lengths(&self) -> Option<[usize; 2]> {
        self.text_encoders
            .iter()
            .find_map(|encoder| match encoder.kind {
                TextEncoderKind::Clip => None,
                TextEncoderKind::T5 { tokens, most } => Some([tokens, most]),
            })
    }

    /// The tokens that the denoiser attends to, where CLIP takes `clip` and T5 `t5`.
    pub fn text_tokens(&self, clip: usize, t5: usize) -> usize {
        let attended = self.text_encoders.iter();
        let attended = attended.filter(|encoder| encoder.hidden != HiddenState::Pooled);
        attended.fold(0, |sum, encoder| {
            let own = match encoder.kind {
                TextEncoderKind::Clip => clip,
                TextEncoderKind::T5 { .. } => t5,
            };
            match encoder.place {
                TextPlace::Beside => sum.max(own),
                TextPlace::After => sum + own,
            }
        })
    }

    /// A prompt as the text encoders read it.
    pub fn read_prompt(&self, prompt: &str) -> String {
        match self.lower_case_prompts {
            true => prompt.trim().to_lowercase(),
            false => prompt.to_owned(),
        }
    }

    /// The parts that every model of this family has.
    pub fn parts(&self) -> Vec<Part> {
        let autoencoder = self.published.as_ref().map(|_| Part::Vae);
        let encoders = self.text_encoders.iter().filter(|e| !e.optional);
        let encoders = encoders.map(|encoder| encoder.part);
        let parts = [self.denoiser.part()].into_iter().chain(autoencoder);
        parts.chain(encoders).collect()
    }
}

/// How a guidance scale acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuidanceKind {
    /// It extrapolates from the denoiser's output without the prompt to that with it.
    ClassifierFree,
    /// It is an input of the denoiser, which was distilled from such outputs.
    Embedded,
    /// It does not: the denoiser was distilled from guided outputs of one scale.
    None,
}

/// A family's published models.
#[derive(Debug)]
pub struct Published {
    /// Repositories on the hub, the original first, whose denoiser has exactly the architecture `denoiser`, whatever
    /// side its samples had in training.
    pub repositories: &'static [&'static str],
    /// Those of them whose denoiser predicts the noise although that of `scheduler` does not.
    pub epsilon: &'static [&'static str],
    /// The features of the text that the denoiser attends to, by which LoRA files of the families differ.
    pub text_features: usize,
    /// The denoiser's `config.json` as published: the architecture, and what no tensor of a single file tells of it.
    pub denoiser: &'static str,
    /// `vae/config.json` as published: the geometry of the latents, and settings that the tensors do not show.
    pub vae: &'static str,
    /// `scheduler/scheduler_config.json` as published: the noise process and the sampler.
    pub scheduler: &'static str,
    /// The pipeline's class in `model_index.json`.
    pub pipeline: &'static str,
    /// The pipeline's class of inpainting models.
    pub inpaint_pipeline: &'static str,
    /// The pipeline's class of models that see an image that steers, where there are any.
    pub control_pipeline: Option<&'static str>,
    /// The other entries of `model_index.json`, as a JSON object.
    pub index: &'static str,
    pub single_file: SingleFile,
    /// `None` where no LoRA is trained.
    pub kohya: Option<KohyaSpec>,
}

/// What kohya's trainers write of a family into LoRA files.
#[derive(Clone, Copy, Debug)]
pub struct KohyaSpec {
    /// `ss_base_model_version`, of models that predict the noise and of those that predict the velocity.
    pub versions: [&'static str; 2],
    /// `modelspec.architecture` of the same, without `/lora`.
    pub architectures: [&'static str; 2],
    /// Whether the denoiser's blocks have the names of the original code.
    pub original_names: bool,
    /// How many text encoders there are: of several, names have a number.
    pub text_encoders: usize,
}

/// How one of a family's text encoders conditions the denoiser.
#[derive(Clone, Copy, Debug)]
pub struct TextEncoderSpec {
    pub part: Part,
    pub kind: TextEncoderKind,
    /// The hidden state that the denoiser attends to.
    pub hidden: HiddenState,
    pub place: TextPlace,
    /// Whether a model may go without it. Zeros are in the place of its hidden states then.
    pub optional: bool,
    /// Whether neither it nor the denoiser attends to the tokens that fill a prompt up.
    pub masked: bool,
}

impl TextEncoderSpec {
    /// A CLIP whose hidden states stand beside those of the encoder before.
    pub const fn clip(part: Part, hidden: HiddenState) -> TextEncoderSpec {
        TextEncoderSpec {
            part,
            kind: TextEncoderKind::Clip,
            hidden,
            place: TextPlace::Beside,
            optional: false,
            masked: false,
        }
    }

    /// A T5 of so many tokens, and at most so many.
    pub const fn t5(part: Part, [tokens, most]: [usize; 2]) -> TextEncoderSpec {
        TextEncoderSpec {
            part,
            kind: TextEncoderKind::T5 { tokens, most },
            hidden: HiddenState::Normed { skip: 0 },
            place: TextPlace::Beside,
            optional: false,
            masked: false,
        }
    }
}

/// Where the hidden states of a text encoder stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextPlace {
    /// Its features follow those of the encoder before, for the same tokens.
    Beside,
    /// Its tokens follow those of the encoders before, whose features are filled up with zeros.
    After,
}

/// A kind of text encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextEncoderKind {
    /// transformers' `CLIPTextModel`, with or without projection. It says itself how many tokens it takes.
    Clip,
    /// transformers' `T5EncoderModel`, with as many tokens as the family pads a prompt to, and the most that it takes.
    T5 { tokens: usize, most: usize },
}

/// A family's models in one file, by the names of the original code.
#[derive(Debug)]
pub struct SingleFile {
    /// A tensor of every denoiser with these names, below the prefix.
    pub sign: &'static str,
    /// Whose the denoiser is, which has the sign.
    pub claims: fn(&OriginalTensors) -> Claim,
    /// Where the denoiser is. A file of a denoiser alone has it without the prefix.
    pub denoiser: Root,
    /// Where the autoencoder may be; of several the first is taken, and the first is written.
    pub autoencoder: &'static [Root],
    pub text_encoders: &'static [Root],
    /// Where models that predict different things are published under the same tensors.
    pub unknown_prediction: Option<UnknownPrediction>,
}

/// Whether a denoiser in a single file is of a family.
#[derive(Clone, Copy, Debug)]
pub enum Claim {
    Yes,
    No,
    /// It is told from the family's by one tensor, and is not built here.
    Lookalike {
        name: &'static str,
        advice: &'static str,
    },
}

/// What is taken for `prediction_type` where a file does not say it.
#[derive(Clone, Copy, Debug)]
pub struct UnknownPrediction {
    /// The type of models for inpainting. Others have that of the published scheduler.
    pub inpaint: &'static str,
    /// What users are told, unless the model is for inpainting.
    pub note: &'static str,
}

/// The properties of a model in diffusers' layout that tell its family.
pub struct Signs<'a> {
    /// The content of the denoiser's `config.json`.
    pub denoiser: &'a Map<String, Value>,
    /// Whether it has this part.
    pub has: &'a dyn Fn(Part) -> bool,
}

impl Signs<'_> {
    /// Whether the denoiser also takes pooled text and sizes (`addition_embed_type = text_time`).
    pub(super) fn takes_text_time(&self) -> bool {
        let kind = self.denoiser.get("addition_embed_type");
        kind.and_then(Value::as_str) == Some("text_time")
    }

    pub(super) fn number(&self, field: &str) -> Option<u64> {
        self.denoiser.get(field).and_then(Value::as_u64)
    }

    pub(super) fn is_true(&self, field: &str) -> bool {
        self.denoiser.get(field) == Some(&Value::Bool(true))
    }

    /// Whether the denoiser is of this class of diffusers.
    pub(super) fn is_class(&self, class: &str) -> bool {
        let found = self.denoiser.get("_class_name").and_then(Value::as_str);
        found == Some(class)
    }
}

/// Which of a text encoder's hidden states condition the denoiser.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HiddenState {
    /// The one `skip` layers before the last, after the final layer norm: Stable Diffusion 1.x and 2.x.
    Normed { skip: usize },
    /// The one `skip` layers before the last, as it is: SDXL, which skips one.
    Raw { skip: usize },
    /// None of them: the pooled output alone, without a projection.
    Pooled,
}

impl HiddenState {
    /// The same, `more` layers earlier.
    pub fn earlier(self, more: usize) -> HiddenState {
        match self {
            HiddenState::Normed { skip } => HiddenState::Normed { skip: skip + more },
            HiddenState::Raw { skip } => HiddenState::Raw { skip: skip + more },
            HiddenState::Pooled => HiddenState::Pooled,
        }
    }
}
