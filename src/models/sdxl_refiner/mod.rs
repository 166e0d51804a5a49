//! SDXL's refiner: takes the last steps of SDXL's samples, conditioned by OpenCLIP-bigG alone and an aesthetic score.

use super::spec::{
    FamilySpec, HiddenState, OriginalNames, Published, Root, SingleFile, TextEncoderSpec,
};
use super::{Part, unet};

pub const SPEC: FamilySpec = FamilySpec {
    title: "the SDXL refiner",
    recipe: "refiner_xl.yml",
    published: Some(Published {
        repositories: &["stabilityai/stable-diffusion-xl-refiner-1.0"],
        unet: include_str!("unet.json"),
        vae: include_str!("vae.json"),
        scheduler: include_str!("scheduler.json"),
        pipeline: "StableDiffusionXLImg2ImgPipeline",
        inpaint_pipeline: "StableDiffusionXLImg2ImgPipeline",
        index: r#"{"force_zeros_for_empty_prompt": false, "requires_aesthetics_score": true}"#,
        single_file: SingleFile {
            text_features: 1280,
            label_embedding: true,
            lookalike: None,
            text_encoders: &[Root {
                prefix: "conditioner.embedders.0.model.",
                part: Part::TextEncoder2,
                names: OriginalNames::OpenClip { layers: None },
            }],
            head_channels: Some(64),
            prediction_unknown: false,
        },
    }),
    text_encoders: &[TextEncoderSpec {
        part: Part::TextEncoder2,
        hidden: HiddenState::Raw { skip: 1 },
    }],
    aesthetic_score: true,
    zero_empty_prompts: false,
    // ControlNets are made for UNets of another size.
    controlnets: false,
    lora_names: &[],
    int8_float_layers: &unet::INT8_FLOAT_LAYERS,
    // It has the larger of SDXL's text encoders only.
    claims: |signs| {
        let has = signs.has;
        signs.takes_text_time() && has(Part::TextEncoder2) && !has(Part::TextEncoder)
    },
};
