//! Stable Diffusion 1.x: a UNet on latents, conditioned by CLIP-L.

use super::clip::original::Projection;
use super::original::{DENOISER_PREFIX, Root};
use super::spec::{
    Claim, FamilySpec, GuidanceKind, HiddenState, KohyaSpec, Published, SingleFile, TextEncoderSpec,
};
use super::unet::original::Signature;
use super::{DenoiserKind, Part, clip, unet, vae};

/// The features of CLIP-L.
const TEXT_FEATURES: usize = 768;

pub const SPEC: FamilySpec = FamilySpec {
    title: "Stable Diffusion 1.x",
    recipe: "sd15",
    published: Some(Published {
        repositories: &[
            "CompVis/stable-diffusion-v1-4",
            "runwayml/stable-diffusion-v1-5",
            "stable-diffusion-v1-5/stable-diffusion-v1-5",
        ],
        epsilon: &[],
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
                _ => Claim::No,
            },
            denoiser: Root {
                prefix: DENOISER_PREFIX,
                part: Part::Unet,
                read: |tensors, config| unet::original::read(tensors, config, None),
                originals: Some(unet::original::tensors),
            },
            autoencoder: &vae::original::ROOTS,
            text_encoders: &[Root {
                prefix: "cond_stage_model.transformer.",
                part: Part::TextEncoder,
                read: |tensors, _| clip::original::read(tensors, "quick_gelu", Projection::None),
                originals: Some(|paths| clip::original::tensors(paths, Projection::None)),
            }],
            unknown_prediction: None,
        },
        kohya: Some(KohyaSpec {
            versions: ["sd_v1", "sd_v1_v"],
            architectures: ["stable-diffusion-v1"; 2],
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
    // What no other family claims.
    claims: |_| true,
};
