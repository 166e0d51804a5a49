//! Stable Diffusion 2.x: as 1.x, conditioned by OpenCLIP-H, and most of its models predict the velocity.

use serde_json::Value;

use super::spec::{
    FamilySpec, HiddenState, Lookalike, OriginalNames, Published, Root, SingleFile, TextEncoderSpec,
};
use super::{Part, unet};

/// The features of OpenCLIP-H.
const TEXT_FEATURES: usize = 1024;

pub const SPEC: FamilySpec = FamilySpec {
    title: "Stable Diffusion 2.x",
    recipe: "base21.yml",
    published: Some(Published {
        repositories: &["stabilityai/stable-diffusion-2-1"],
        unet: include_str!("unet.json"),
        vae: include_str!("vae.json"),
        scheduler: include_str!("scheduler.json"),
        pipeline: "StableDiffusionPipeline",
        inpaint_pipeline: "StableDiffusionInpaintPipeline",
        index: r#"{"requires_safety_checker": false, "safety_checker": [null, null]}"#,
        single_file: SingleFile {
            text_features: TEXT_FEATURES,
            label_embedding: false,
            lookalike: Some(Lookalike {
                name: "Stable Diffusion 2.1 unCLIP",
                advice: "its conditioning on images is not built here",
            }),
            text_encoders: &[Root {
                prefix: "cond_stage_model.model.",
                part: Part::TextEncoder,
                // OpenCLIP-H has 24; the denoiser attends to what the last but one gives.
                names: OriginalNames::OpenClip { layers: Some(23) },
            }],
            head_channels: Some(64),
            prediction_unknown: true,
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
    claims: |signs| {
        let linear = signs.unet.get("use_linear_projection") == Some(&Value::Bool(true));
        signs.number("cross_attention_dim") == Some(TEXT_FEATURES as u64) || linear
    },
};
