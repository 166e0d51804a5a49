//! The parts of a model.

use crate::util::named;

named! {
    /// The parts of a model that have weights. A part's name is that of its folder in diffusers' layout, its entry in
    /// `model_index.json`, and the root of its parameter paths.
    #[derive(PartialOrd, Ord)]
    pub enum Part {
        /// The denoiser of models with a UNet.
        Unet = "unet",
        /// The denoiser of models with a transformer.
        Transformer = "transformer",
        /// The autoencoder.
        Vae = "vae",
        /// The text encoder, of several the first.
        TextEncoder = "text_encoder",
        /// The second text encoder.
        TextEncoder2 = "text_encoder_2",
        /// The third text encoder.
        TextEncoder3 = "text_encoder_3",
    }
}

impl Part {
    /// Whether it is a network that denoises.
    pub const fn is_denoiser(self) -> bool {
        match self {
            Part::Unet | Part::Transformer => true,
            Part::Vae | Part::TextEncoder | Part::TextEncoder2 | Part::TextEncoder3 => false,
        }
    }

    /// The folder of a text encoder's tokenizer.
    pub const fn tokenizer(self) -> Option<&'static str> {
        match self {
            Part::Unet | Part::Transformer | Part::Vae => None,
            Part::TextEncoder => Some("tokenizer"),
            Part::TextEncoder2 => Some("tokenizer_2"),
            Part::TextEncoder3 => Some("tokenizer_3"),
        }
    }

    /// The file of its weights in diffusers' layout.
    pub const fn weights_file(self) -> &'static str {
        match self {
            Part::Unet | Part::Transformer | Part::Vae => "diffusion_pytorch_model.safetensors",
            Part::TextEncoder | Part::TextEncoder2 | Part::TextEncoder3 => "model.safetensors",
        }
    }

    /// The library and the classes that `model_index.json` may name; the first is that of a `config.json` without a
    /// name.
    pub const fn classes(self) -> (&'static str, &'static [&'static str]) {
        match self {
            Part::Unet => ("diffusers", &["UNet2DConditionModel"]),
            Part::Transformer => (
                "diffusers",
                &[
                    "FluxTransformer2DModel",
                    "SD3Transformer2DModel",
                    "PixArtTransformer2DModel",
                    "Transformer2DModel",
                ],
            ),
            Part::Vae => ("diffusers", &["AutoencoderKL", "AutoencoderTiny"]),
            Part::TextEncoder => (
                "transformers",
                &[
                    "CLIPTextModel",
                    "CLIPTextModelWithProjection",
                    "T5EncoderModel",
                ],
            ),
            Part::TextEncoder2 => (
                "transformers",
                &["CLIPTextModelWithProjection", "T5EncoderModel"],
            ),
            Part::TextEncoder3 => ("transformers", &["T5EncoderModel"]),
        }
    }
}
