//! Small images without an autoencoder: a UNet on their pixels, or on blocks of them, with a CLIP text encoder that is
//! trained beside it. The quickstart's family.

use super::spec::{FamilySpec, GuidanceKind, HiddenState, TextEncoderSpec};
use super::{DenoiserKind, Part, unet};

pub const SPEC: FamilySpec = FamilySpec {
    title: "a pixel-space model",
    recipe: "quickstart",
    published: None,
    denoiser: DenoiserKind::Unet,
    text_encoders: &[TextEncoderSpec::clip(
        Part::TextEncoder,
        HiddenState::Normed { skip: 0 },
    )],
    aesthetic_score: false,
    zero_empty_prompts: false,
    guidance: GuidanceKind::ClassifierFree,
    prompt_weights: true,
    lower_case_prompts: false,
    controlnets: false,
    textual_inversions: true,
    lora_names: &[],
    int8_float_layers: &unet::INT8_FLOAT_LAYERS,
    claims: |signs| {
        // The red, green and blue of a block of k x k pixels.
        let of_blocks = |channels: u64| {
            let block = (channels / 3).isqrt();
            channels > 0 && 3 * block * block == channels
        };
        let channels = signs.number("in_channels");
        !(signs.has)(Part::Vae) && channels.is_some_and(of_blocks)
    },
};
