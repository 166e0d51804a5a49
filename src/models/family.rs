//! The families of models. [`Family`] and [`Family::spec`] are the one list of them: configuration, hub, weights, LoRA,
//! pipelines and training read the descriptions, and none of them names a family for itself.

use serde_json::{Map, Value};

use super::HiddenState;
use super::{pixels, sd1, sd2, sdxl, sdxl_refiner};
use crate::util::named;

named! {
    /// The families that are built here, the plainest published one first.
    pub enum Family {
        /// Stable Diffusion 1.x.
        Sd1 = "sd1",
        /// Stable Diffusion 2.x.
        Sd2 = "sd2",
        /// SDXL base.
        Sdxl = "sdxl",
        /// SDXL's refiner.
        SdxlRefiner = "sdxl_refiner",
        /// A UNet on the pixels of small images.
        Pixels = "pixels",
    }
}

impl Family {
    /// Everything that is particular to this family.
    pub const fn spec(self) -> &'static FamilySpec {
        match self {
            Family::Sd1 => &sd1::SPEC,
            Family::Sd2 => &sd2::SPEC,
            Family::Sdxl => &sdxl::SPEC,
            Family::SdxlRefiner => &sdxl_refiner::SPEC,
            Family::Pixels => &pixels::SPEC,
        }
    }

    /// The name in messages.
    pub const fn title(self) -> &'static str {
        self.spec().title
    }

    /// The families that people publish, whose files can be opened.
    pub fn published() -> impl Iterator<Item = (Family, &'static Published)> {
        let all = Family::ALL.into_iter();
        all.filter_map(|family| Some((family, family.spec().published.as_ref()?)))
    }

    /// The family of a repository on the hub whose architecture is built in.
    pub fn of_repository(name: &str) -> Option<(Family, &'static Published)> {
        Family::published().find(|(_, published)| published.repositories.contains(&name))
    }

    /// The published family whose denoiser attends to text of this many features.
    pub fn of_text_features(features: usize) -> Option<(Family, &'static Published)> {
        Family::published().find(|(_, published)| published.single_file.text_features == features)
    }

    /// The family of a model in diffusers' layout; what no other family claims is of the first, the plainest.
    pub fn of_folder(signs: &Signs) -> Family {
        let mut from_last = Family::ALL.into_iter().rev();
        let found = from_last.find(|family| (family.spec().claims)(signs));
        found.unwrap_or(Family::ALL[0])
    }
}

named! {
    /// The parts of a model that have weights. A part's name is that of its folder in diffusers' layout, its entry in
    /// `model_index.json`, and the root of its parameter paths.
    #[derive(PartialOrd, Ord)]
    pub enum Part {
        /// The denoiser.
        Unet = "unet",
        /// The autoencoder.
        Vae = "vae",
        /// The text encoder, of two the first.
        TextEncoder = "text_encoder",
        /// The second text encoder.
        TextEncoder2 = "text_encoder_2",
    }
}

impl Part {
    /// The folder of a text encoder's tokenizer.
    pub const fn tokenizer(self) -> Option<&'static str> {
        match self {
            Part::Unet | Part::Vae => None,
            Part::TextEncoder => Some("tokenizer"),
            Part::TextEncoder2 => Some("tokenizer_2"),
        }
    }

    /// The library and the class in `model_index.json`.
    pub const fn class(self) -> [&'static str; 2] {
        match self {
            Part::Unet => ["diffusers", "UNet2DConditionModel"],
            Part::Vae => ["diffusers", "AutoencoderKL"],
            Part::TextEncoder => ["transformers", "CLIPTextModel"],
            Part::TextEncoder2 => ["transformers", "CLIPTextModelWithProjection"],
        }
    }
}

/// The description of a family. See `docs/adding-a-family.md`.
#[derive(Debug)]
pub struct FamilySpec {
    /// The name in messages.
    pub title: &'static str,
    /// The configuration file in `configs/` that it is used with.
    pub recipe: &'static str,
    /// What is known of its published models; `None` for a family that is trained here only.
    pub published: Option<Published>,
    /// The text encoders. Their features stand side by side in this order.
    pub text_encoders: &'static [TextEncoderSpec],
    /// Whether the time ids of the image end in an aesthetic score and not in the target size, where
    /// `model_index.json` does not say (`requires_aesthetics_score`).
    pub aesthetic_score: bool,
    /// Whether an empty negative prompt is zeros and not the encoding of an empty text, where `model_index.json` does not
    /// say (`force_zeros_for_empty_prompt`).
    pub zero_empty_prompts: bool,
    /// Whether there are ControlNets for its denoiser.
    pub controlnets: bool,
    /// The families that can take the last steps of its samples.
    pub refiners: &'static [Family],
    /// Starts of module names that only LoRA files for this family have.
    pub lora_names: &'static [&'static str],
    /// Paths below the denoiser's root (regular expressions) of the layers that stay in float under
    /// `quantization=int8`: they are small, and sensitive to rounding.
    pub int8_float_layers: &'static [&'static str],
    /// Whether a model in diffusers' layout is of this family. Asked from the last family to the first.
    pub claims: fn(&Signs) -> bool,
}

impl FamilySpec {
    /// The parts that a model of this family is made of.
    pub fn parts(&self) -> Vec<Part> {
        let autoencoder = self.published.as_ref().map(|_| Part::Vae);
        let encoders = self.text_encoders.iter().map(|encoder| encoder.part);
        let parts = [Part::Unet].into_iter().chain(autoencoder);
        parts.chain(encoders).collect()
    }
}

/// A family's published models.
#[derive(Debug)]
pub struct Published {
    /// Repositories on the hub, the original first, whose denoiser has exactly the architecture `unet`.
    pub repositories: &'static [&'static str],
    /// `unet/config.json` as published: the architecture, and what no tensor of a single file tells of it.
    pub unet: &'static str,
    /// `vae/config.json` as published: the geometry of the latents, and what no tensor tells of it.
    pub vae: &'static str,
    /// `scheduler/scheduler_config.json` as published: the noise process and the sampler.
    pub scheduler: &'static str,
    /// The pipeline's class in `model_index.json`.
    pub pipeline: &'static str,
    /// That of models for inpainting.
    pub inpaint_pipeline: &'static str,
    /// What else `model_index.json` has, as a JSON object.
    pub index: &'static str,
    pub single_file: SingleFile,
}

/// How one of a family's text encoders conditions the denoiser.
#[derive(Clone, Copy, Debug)]
pub struct TextEncoderSpec {
    pub part: Part,
    /// The hidden state that the denoiser attends to.
    pub hidden: HiddenState,
}

/// A family's models in one file, by the names of the original code.
#[derive(Debug)]
pub struct SingleFile {
    /// The features of the text that the denoiser attends to, which tell the families apart: nothing else of its size
    /// is looked at.
    pub text_features: usize,
    /// Whether the denoiser embeds pooled text and sizes (`label_emb`).
    pub label_embedding: bool,
    /// What a file is that has the same text features and differs in `label_embedding`.
    pub lookalike: Option<Lookalike>,
    /// Where the text encoders stand.
    pub text_encoders: &'static [Root],
    /// Channels of one attention head, where blocks differ in the number of heads.
    pub head_channels: Option<usize>,
    /// Whether `scheduler`'s prediction type is a guess, since models of both types are published under the same tensors.
    pub prediction_unknown: bool,
}

/// A model that is told from a family's by one tensor, and is not built here.
#[derive(Debug)]
pub struct Lookalike {
    pub name: &'static str,
    pub advice: &'static str,
}

/// Where the tensors of one part stand in a single file.
#[derive(Clone, Copy, Debug)]
pub struct Root {
    pub prefix: &'static str,
    pub part: Part,
    pub names: OriginalNames,
}

/// Whose names the tensors of one part have in a single file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OriginalNames {
    /// `openaimodel.UNetModel` of LDM and SGM.
    LdmUnet,
    /// `AutoencoderKL` of LDM and SGM.
    LdmVae,
    /// transformers' CLIP.
    Clip,
    /// OpenCLIP's text tower, of which the first layers are used, at most `layers`.
    OpenClip { layers: Option<usize> },
}

/// What of a model in diffusers' layout tells its family.
pub struct Signs<'a> {
    /// The content of `unet/config.json`.
    pub unet: &'a Map<String, Value>,
    /// Whether it has this part.
    pub has: &'a dyn Fn(Part) -> bool,
}

impl Signs<'_> {
    /// Whether the denoiser also takes pooled text and sizes (`addition_embed_type = text_time`).
    pub(super) fn takes_text_time(&self) -> bool {
        self.unet.get("addition_embed_type").and_then(Value::as_str) == Some("text_time")
    }

    pub(super) fn number(&self, field: &str) -> Option<u64> {
        self.unet.get(field).and_then(Value::as_u64)
    }
}

/// A family that is recognized so that it is refused by its name.
#[derive(Debug)]
pub struct Unsupported {
    pub name: &'static str,
    /// How its pipelines' class names begin.
    pub pipeline: &'static str,
    /// A tensor of its single files.
    pub tensor: &'static str,
}

/// The families that are known and not built.
pub const UNSUPPORTED: [Unsupported; 2] = [
    Unsupported {
        name: "Stable Diffusion 3.x",
        pipeline: "StableDiffusion3",
        tensor: "joint_blocks.0.context_block.adaLN_modulation.1.bias",
    },
    Unsupported {
        name: "FLUX.1",
        pipeline: "Flux",
        tensor: "double_blocks.0.img_attn.norm.key_norm.scale",
    },
];

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::models::unet::UNet2DConditionConfig;
    use crate::models::vae::AutoencoderKlConfig;
    use crate::schedulers::SchedulerConfig;

    fn object(text: &str) -> Map<String, Value> {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn what_is_published_can_be_read_and_is_of_its_family() {
        for (family, published) in Family::published() {
            let unet = UNet2DConditionConfig::from_json(published.unet).unwrap();
            let vae = AutoencoderKlConfig::from_json(published.vae).unwrap();
            assert_eq!(unet.in_channels, vae.latent_channels, "{family}");
            SchedulerConfig::from_map(&object(published.scheduler)).unwrap();
            object(published.index);
            let unet = object(published.unet);
            let features = unet["cross_attention_dim"].as_u64().unwrap() as usize;
            assert_eq!(Family::of_text_features(features).unwrap().0, family);
            let encoders = family.spec().text_encoders;
            let has = |part| {
                [Part::Unet, Part::Vae].contains(&part) || encoders.iter().any(|e| e.part == part)
            };
            let signs = Signs {
                unet: &unet,
                has: &has,
            };
            assert_eq!(Family::of_folder(&signs), family);
        }
    }

    #[test]
    fn every_family_has_its_recipe_and_names_of_its_own() {
        let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs");
        for family in Family::ALL {
            let spec = family.spec();
            assert!(configs.join(spec.recipe).is_file(), "{}", spec.recipe);
            let same = |other: &Family| {
                let other = other.spec();
                other.title == spec.title || other.recipe == spec.recipe
            };
            assert_eq!(Family::ALL.iter().filter(|other| same(other)).count(), 1);
        }
    }
}
