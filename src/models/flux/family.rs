//! The two published models.

use super::original;
use super::transformer::INT8_FLOAT_LAYERS;
use crate::models::clip::original::Projection;
use crate::models::original::{DENOISER_PREFIX, OriginalTensors, Root};
use crate::models::spec::{
    Claim, FamilySpec, GuidanceKind, HiddenState, Published, SingleFile, TextEncoderSpec,
};
use crate::models::{DenoiserKind, Part, clip, t5, vae};

/// The most tokens of a prompt.
const MOST_TOKENS: usize = 512;

/// The features of T5-XXL.
const TEXT_FEATURES: usize = 4096;

/// `FLUX.1-dev`.
pub const DEV: FamilySpec = FamilySpec {
    title: "FLUX.1 dev",
    recipe: "flux-dev",
    published: Some(Published {
        repositories: &["black-forest-labs/FLUX.1-dev"],
        epsilon: &[],
        text_features: TEXT_FEATURES,
        denoiser: include_str!("transformer_dev.json"),
        vae: include_str!("vae.json"),
        scheduler: include_str!("scheduler_dev.json"),
        pipeline: "FluxPipeline",
        inpaint_pipeline: "FluxFillPipeline",
        control_pipeline: Some("FluxControlPipeline"),
        index: "{}",
        single_file: single_file(|tensors| original::claim(tensors, true)),
        kohya: None,
    }),
    text_encoders: &text_encoders(512),
    guidance: GuidanceKind::Embedded,
    claims: |signs| signs.is_class("FluxTransformer2DModel") && signs.is_true("guidance_embeds"),
    ..SCHNELL
};

/// `FLUX.1-schnell`.
pub const SCHNELL: FamilySpec = FamilySpec {
    title: "FLUX.1 schnell",
    recipe: "flux-schnell",
    published: Some(Published {
        repositories: &["black-forest-labs/FLUX.1-schnell"],
        epsilon: &[],
        text_features: TEXT_FEATURES,
        denoiser: include_str!("transformer_schnell.json"),
        vae: include_str!("vae.json"),
        scheduler: include_str!("scheduler_schnell.json"),
        pipeline: "FluxPipeline",
        inpaint_pipeline: "FluxFillPipeline",
        control_pipeline: Some("FluxControlPipeline"),
        index: "{}",
        single_file: single_file(|tensors| original::claim(tensors, false)),
        kohya: None,
    }),
    denoiser: DenoiserKind::Flux,
    text_encoders: &text_encoders(256),
    aesthetic_score: false,
    zero_empty_prompts: false,
    guidance: GuidanceKind::None,
    prompt_weights: false,
    lower_case_prompts: false,
    controlnets: true,
    textual_inversions: false,
    lora_names: &[],
    int8_float_layers: &INT8_FLOAT_LAYERS,
    claims: |signs| signs.is_class("FluxTransformer2DModel") && !signs.is_true("guidance_embeds"),
};

/// The names of Black Forest Labs' code, and for a whole model ComfyUI's prefixes.
const fn single_file(claims: fn(&OriginalTensors) -> Claim) -> SingleFile {
    SingleFile {
        sign: original::SIGN,
        claims,
        denoiser: Root {
            prefix: DENOISER_PREFIX,
            part: Part::Transformer,
            read: original::read,
            originals: Some(original::tensors),
        },
        autoencoder: &vae::original::COMFY_ROOTS,
        text_encoders: &TEXT_ROOTS,
        unknown_prediction: None,
    }
}

const TEXT_ROOTS: [Root; 2] = [
    Root {
        prefix: "text_encoders.clip_l.transformer.",
        part: Part::TextEncoder,
        read: |tensors, _| clip::original::read(tensors, "quick_gelu", Projection::None),
        originals: Some(|paths| clip::original::tensors(paths, Projection::None)),
    },
    t5::original::root(Part::TextEncoder2),
];

/// CLIP's pooled output, and T5's hidden states of so many tokens.
const fn text_encoders(tokens: usize) -> [TextEncoderSpec; 2] {
    [
        TextEncoderSpec::clip(Part::TextEncoder, HiddenState::Pooled),
        TextEncoderSpec::t5(Part::TextEncoder2, [tokens, MOST_TOKENS]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Builder, Graph};
    use crate::models::flux::{FluxTransformer2DConfig, declare_inputs, flux_transformer};
    use crate::nn::{Precision, Remat};

    fn trace(text: &str, [image, tokens]: [usize; 2]) -> Graph {
        let config = FluxTransformer2DConfig::from_json(text).unwrap();
        let b = Builder::new();
        let inputs = declare_inputs(&b, &config, [1, image, tokens]).unwrap();
        let y = flux_transformer(&b, &config, inputs, Precision::F32, Remat::None).unwrap();
        assert_eq!(b.dims(y), [1, image, 64]);
        b.output("sample", y, None).unwrap();
        b.finish()
    }

    /// Counts of the published checkpoints.
    #[test]
    fn transformers_have_exactly_the_parameters_of_their_checkpoints() {
        for (spec, tokens, expected) in
            [(&DEV, 512, 11_901_408_320), (&SCHNELL, 256, 11_891_178_560)]
        {
            let published = spec.published.as_ref().unwrap();
            let graph = trace(published.denoiser, [4096, tokens]);
            assert_eq!(graph.parameter_count(), expected);
            assert!(
                graph
                    .weights()
                    .all(|(_, w)| w.name.starts_with("transformer/"))
            );
        }
    }

    /// Everything of more than a layer of the conditioning can be split by `fsdp` and by `tensor`.
    #[test]
    fn large_weights_have_logical_axes() {
        let graph = trace(DEV.published.as_ref().unwrap().denoiser, [4, 2]);
        let mut split = 0;
        for (_, weight) in graph.weights() {
            let is_conditioning = weight.name.contains("time_text_embed");
            if weight.shape.rank() == 2 && !is_conditioning {
                assert!(
                    weight.logical_axes.contains(&Some("embed")),
                    "{}",
                    weight.name
                );
                split += weight.shape.count();
            }
        }
        assert!(
            split as f64 > 0.995 * graph.parameter_count() as f64,
            "{split}"
        );
    }
}
