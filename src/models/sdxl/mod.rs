//! SDXL base: a UNet on latents, conditioned by CLIP-L and OpenCLIP-bigG side by side, bigG's pooled output and the
//! image's sizes.

use super::clip::original::Projection;
use super::original::{DENOISER_PREFIX, Root};
use super::spec::{
    Claim, FamilySpec, GuidanceKind, HiddenState, KohyaSpec, Published, SingleFile, TextEncoderSpec,
};
use super::unet::original::Signature;
use super::{DenoiserKind, Part, clip, unet, vae};

/// The features of CLIP-L and OpenCLIP-bigG side by side.
const TEXT_FEATURES: usize = 2048;

pub const SPEC: FamilySpec = FamilySpec {
    title: "SDXL",
    recipe: "sdxl",
    published: Some(Published {
        repositories: &[
            "stabilityai/stable-diffusion-xl-base-1.0",
            "stabilityai/sdxl-turbo",
        ],
        epsilon: &[],
        text_features: TEXT_FEATURES,
        denoiser: include_str!("unet.json"),
        vae: include_str!("vae.json"),
        scheduler: include_str!("scheduler.json"),
        pipeline: "StableDiffusionXLPipeline",
        inpaint_pipeline: "StableDiffusionXLInpaintPipeline",
        control_pipeline: None,
        index: r#"{"force_zeros_for_empty_prompt": true}"#,
        single_file: SingleFile {
            sign: unet::original::SIGN,
            claims: |tensors| match Signature::of(tensors) {
                Some(Signature {
                    text_features: TEXT_FEATURES,
                    label_embedding: true,
                }) => Claim::Yes,
                _ => Claim::No,
            },
            denoiser: Root {
                prefix: DENOISER_PREFIX,
                part: Part::Unet,
                read: |tensors, config| unet::original::read(tensors, config, Some(64)),
                originals: Some(unet::original::tensors),
            },
            autoencoder: &vae::original::ROOTS,
            text_encoders: &[
                Root {
                    prefix: "conditioner.embedders.0.transformer.",
                    part: Part::TextEncoder,
                    read: |tensors, _| {
                        clip::original::read(tensors, "quick_gelu", Projection::None)
                    },
                    originals: Some(|paths| clip::original::tensors(paths, Projection::None)),
                },
                Root {
                    prefix: "conditioner.embedders.1.model.",
                    part: Part::TextEncoder2,
                    read: |tensors, _| clip::original::read_open_clip(tensors, None, true),
                    originals: Some(clip::original::open_clip_tensors),
                },
            ],
            unknown_prediction: None,
        },
        kohya: Some(KohyaSpec {
            versions: ["sdxl_base_v1-0"; 2],
            architectures: ["stable-diffusion-xl-v1-base"; 2],
            original_names: true,
            text_encoders: 2,
        }),
    }),
    denoiser: DenoiserKind::Unet,
    text_encoders: &[
        TextEncoderSpec::clip(Part::TextEncoder, HiddenState::Raw { skip: 1 }),
        TextEncoderSpec::clip(Part::TextEncoder2, HiddenState::Raw { skip: 1 }),
    ],
    aesthetic_score: false,
    zero_empty_prompts: true,
    guidance: GuidanceKind::ClassifierFree,
    prompt_weights: true,
    lower_case_prompts: false,
    controlnets: true,
    textual_inversions: true,
    // kohya's trainers number text encoders only where there are two, and use the original block names for SDXL alone.
    lora_names: &[
        "lora_te1_",
        "lora_te2_",
        "text_encoder_2.",
        "lora_unet_input_blocks_",
        "lora_unet_middle_block_",
        "lora_unet_output_blocks_",
    ],
    int8_float_layers: &unet::INT8_FLOAT_LAYERS,
    claims: |signs| signs.takes_text_time(),
};
