//! The published models.

use super::original;
use super::transformer::INT8_FLOAT_LAYERS;
use crate::models::clip::original::Projection;
use crate::models::original::{DENOISER_PREFIX, OriginalTensors, Root};
use crate::models::spec::{
    Claim, FamilySpec, GuidanceKind, HiddenState, Published, Signs, SingleFile, TextEncoderSpec,
    TextPlace,
};
use crate::models::{DenoiserKind, Part, clip, t5, vae};

/// The tokens of a prompt for T5, and the most.
const T5_TOKENS: [usize; 2] = [256, 512];

/// The features of T5-XXL.
const TEXT_FEATURES: usize = 4096;

/// Stable Diffusion 3 medium.
pub const MEDIUM: FamilySpec = family(
    ["Stable Diffusion 3 medium", "sd3"],
    published(
        &["stabilityai/stable-diffusion-3-medium-diffusers"],
        include_str!("transformer_medium.json"),
        |tensors| claim(tensors, (false, false)),
    ),
    |signs| is_of(signs, (false, false)),
);

/// Stable Diffusion 3.5 medium.
pub const MEDIUM_35: FamilySpec = family(
    ["Stable Diffusion 3.5 medium", "sd35-medium"],
    published(
        &["stabilityai/stable-diffusion-3.5-medium"],
        include_str!("transformer_35_medium.json"),
        |tensors| claim(tensors, (true, true)),
    ),
    |signs| is_of(signs, (true, true)),
);

/// Stable Diffusion 3.5 large, and its turbo for few steps.
pub const LARGE_35: FamilySpec = family(
    ["Stable Diffusion 3.5 large", "sd35-large"],
    published(
        &[
            "stabilityai/stable-diffusion-3.5-large",
            "stabilityai/stable-diffusion-3.5-large-turbo",
        ],
        include_str!("transformer_35_large.json"),
        |tensors| claim(tensors, (true, false)),
    ),
    |signs| is_of(signs, (true, false)),
);

const fn family(
    [title, recipe]: [&'static str; 2],
    published: Published,
    claims: fn(&Signs) -> bool,
) -> FamilySpec {
    FamilySpec {
        title,
        recipe,
        published: Some(published),
        denoiser: DenoiserKind::Sd3,
        text_encoders: &TEXT_ENCODERS,
        aesthetic_score: false,
        zero_empty_prompts: false,
        guidance: GuidanceKind::ClassifierFree,
        prompt_weights: false,
        lower_case_prompts: false,
        controlnets: false,
        textual_inversions: false,
        lora_names: &[],
        int8_float_layers: &INT8_FLOAT_LAYERS,
        claims,
    }
}

const fn published(
    repositories: &'static [&'static str],
    denoiser: &'static str,
    claims: fn(&OriginalTensors) -> Claim,
) -> Published {
    Published {
        repositories,
        epsilon: &[],
        text_features: TEXT_FEATURES,
        denoiser,
        vae: include_str!("vae.json"),
        scheduler: include_str!("scheduler.json"),
        pipeline: "StableDiffusion3Pipeline",
        inpaint_pipeline: "StableDiffusion3InpaintPipeline",
        control_pipeline: None,
        index: "{}",
        single_file: SingleFile {
            sign: original::SIGN,
            claims,
            denoiser: Root {
                prefix: DENOISER_PREFIX,
                part: Part::Transformer,
                read: original::read,
                originals: Some(original::tensors),
            },
            autoencoder: &vae::original::ROOTS,
            text_encoders: &TEXT_ROOTS,
            unknown_prediction: None,
        },
        kohya: None,
    }
}

const TEXT_ENCODERS: [TextEncoderSpec; 3] = [
    TextEncoderSpec::clip(Part::TextEncoder, HiddenState::Raw { skip: 1 }),
    TextEncoderSpec::clip(Part::TextEncoder2, HiddenState::Raw { skip: 1 }),
    TextEncoderSpec {
        place: TextPlace::After,
        optional: true,
        ..TextEncoderSpec::t5(Part::TextEncoder3, T5_TOKENS)
    },
];

const TEXT_ROOTS: [Root; 3] = [
    Root {
        prefix: "text_encoders.clip_l.transformer.",
        part: Part::TextEncoder,
        // Its pooled output is used as it is. diffusers' model has a projection there that changes nothing.
        read: |tensors, _| clip::original::read(tensors, "quick_gelu", Projection::Unit),
        originals: Some(|paths| clip::original::tensors(paths, Projection::Unit)),
    },
    Root {
        prefix: "text_encoders.clip_g.transformer.",
        part: Part::TextEncoder2,
        read: |tensors, _| clip::original::read(tensors, "gelu", Projection::Stored),
        originals: Some(|paths| clip::original::tensors(paths, Projection::Stored)),
    },
    t5::original::root(Part::TextEncoder3),
];

/// Whether queries and keys are normed, and whether there are layers with a second attention, in a folder.
fn is_of(signs: &Signs, (qk_norm, dual_attention): (bool, bool)) -> bool {
    let has_layers = signs
        .denoiser
        .get("dual_attention_layers")
        .and_then(|layers| layers.as_array())
        .is_some_and(|layers| !layers.is_empty());
    let is_normed = signs
        .denoiser
        .get("qk_norm")
        .is_some_and(|norm| !norm.is_null());
    signs.is_class("SD3Transformer2DModel") && (is_normed, has_layers) == (qk_norm, dual_attention)
}

/// The same in a single file.
fn claim(tensors: &OriginalTensors, expected: (bool, bool)) -> Claim {
    match original::signature(tensors) == expected {
        true => Claim::Yes,
        false => Claim::No,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Builder, Graph};
    use crate::models::sd3::{Sd3Transformer2DConfig, declare_inputs, sd3_transformer};
    use crate::nn::{Precision, Remat};

    fn trace(text: &str, [side, tokens]: [usize; 2]) -> Graph {
        let config = Sd3Transformer2DConfig::from_json(text).unwrap();
        let b = Builder::new();
        let inputs = declare_inputs(&b, &config, [1, side, side, tokens]).unwrap();
        let y = sd3_transformer(&b, &config, inputs, Precision::F32, Remat::None).unwrap();
        assert_eq!(b.dims(y), [1, 16, side, side]);
        b.output("sample", y, None).unwrap();
        b.finish()
    }

    /// Counts of the published checkpoints: what is trained, and the stored positions.
    #[test]
    fn transformers_have_exactly_the_parameters_of_their_checkpoints() {
        for (spec, trained, side) in [
            (&MEDIUM, 2_028_328_000, 192),
            (&MEDIUM_35, 2_243_171_520, 384),
            (&LARGE_35, 8_056_627_520, 192),
        ] {
            let published = spec.published.as_ref().unwrap();
            let config = Sd3Transformer2DConfig::from_json(published.denoiser).unwrap();
            let graph = trace(published.denoiser, [128, 333]);
            let positions = side * side * config.inner_dim();
            assert_eq!(
                graph.parameter_count(),
                trained + positions,
                "{}",
                spec.title
            );
        }
    }

    /// Everything of more than a layer of the conditioning can be split by `fsdp` and by `tensor`.
    #[test]
    fn large_weights_have_logical_axes() {
        let graph = trace(LARGE_35.published.as_ref().unwrap().denoiser, [4, 2]);
        let mut split = 0;
        for (_, weight) in graph.weights() {
            if weight.logical_axes.contains(&Some("embed")) {
                split += weight.shape.count();
            }
        }
        assert!(
            split as f64 > 0.995 * graph.parameter_count() as f64,
            "{split}"
        );
    }
}
