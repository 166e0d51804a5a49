//! SDXL's refiner: takes the last steps of SDXL's samples, conditioned by OpenCLIP-bigG alone and an aesthetic score.

use super::original::{DENOISER_PREFIX, Root};
use super::spec::{
    Claim, FamilySpec, GuidanceKind, HiddenState, KohyaSpec, Published, SingleFile, TextEncoderSpec,
};
use super::unet::original::Signature;
use super::{DenoiserKind, Part, clip, unet, vae};

/// The features of OpenCLIP-bigG.
const TEXT_FEATURES: usize = 1280;

pub const SPEC: FamilySpec = FamilySpec {
    title: "the SDXL refiner",
    recipe: "sdxl-refiner",
    published: Some(Published {
        repositories: &["stabilityai/stable-diffusion-xl-refiner-1.0"],
        epsilon: &[],
        text_features: TEXT_FEATURES,
        denoiser: include_str!("unet.json"),
        vae: include_str!("vae.json"),
        scheduler: include_str!("scheduler.json"),
        pipeline: "StableDiffusionXLImg2ImgPipeline",
        inpaint_pipeline: "StableDiffusionXLImg2ImgPipeline",
        control_pipeline: None,
        index: r#"{"force_zeros_for_empty_prompt": false, "requires_aesthetics_score": true}"#,
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
            text_encoders: &[Root {
                prefix: "conditioner.embedders.0.model.",
                part: Part::TextEncoder2,
                read: |tensors, _| clip::original::read_open_clip(tensors, None, true),
                originals: Some(clip::original::open_clip_tensors),
            }],
            unknown_prediction: None,
        },
        kohya: Some(KohyaSpec {
            versions: ["sdxl_base_v1-0"; 2],
            architectures: ["stable-diffusion-xl-v1-refiner"; 2],
            original_names: true,
            text_encoders: 2,
        }),
    }),
    denoiser: DenoiserKind::Unet,
    text_encoders: &[TextEncoderSpec::clip(
        Part::TextEncoder2,
        HiddenState::Raw { skip: 1 },
    )],
    aesthetic_score: true,
    zero_empty_prompts: false,
    // ControlNets are made for UNets of another size.
    guidance: GuidanceKind::ClassifierFree,
    prompt_weights: true,
    lower_case_prompts: false,
    controlnets: false,
    textual_inversions: true,
    lora_names: &[],
    int8_float_layers: &unet::INT8_FLOAT_LAYERS,
    // It has the larger of SDXL's text encoders only.
    claims: |signs| {
        let has = signs.has;
        signs.takes_text_time() && has(Part::TextEncoder2) && !has(Part::TextEncoder)
    },
};
