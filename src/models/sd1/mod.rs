//! Stable Diffusion 1.x: a UNet on latents, conditioned by CLIP-L.

use super::spec::{
    FamilySpec, HiddenState, OriginalNames, Published, Root, SingleFile, TextEncoderSpec,
};
use super::{Part, unet};

pub const SPEC: FamilySpec = FamilySpec {
    title: "Stable Diffusion 1.x",
    recipe: "base15.yml",
    published: Some(Published {
        repositories: &[
            "CompVis/stable-diffusion-v1-4",
            "runwayml/stable-diffusion-v1-5",
            "stable-diffusion-v1-5/stable-diffusion-v1-5",
        ],
        unet: include_str!("unet.json"),
        vae: include_str!("vae.json"),
        scheduler: include_str!("scheduler.json"),
        pipeline: "StableDiffusionPipeline",
        inpaint_pipeline: "StableDiffusionInpaintPipeline",
        index: r#"{"requires_safety_checker": false, "safety_checker": [null, null]}"#,
        single_file: SingleFile {
            text_features: 768,
            label_embedding: false,
            lookalike: None,
            text_encoders: &[Root {
                prefix: "cond_stage_model.transformer.",
                part: Part::TextEncoder,
                names: OriginalNames::Clip,
            }],
            head_channels: None,
            prediction_unknown: false,
        },
    }),
    text_encoders: &[TextEncoderSpec {
        part: Part::TextEncoder,
        hidden: HiddenState::Normed { skip: 0 },
    }],
    aesthetic_score: false,
    zero_empty_prompts: false,
    controlnets: true,
    lora_names: &[],
    int8_float_layers: &unet::INT8_FLOAT_LAYERS,
    // What no other family claims.
    claims: |_| true,
};
