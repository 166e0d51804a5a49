//! The published models.

use super::config::OLD_CLASS;
use super::original;
use super::transformer::INT8_FLOAT_LAYERS;
use crate::models::original::{DENOISER_PREFIX, OriginalTensors, Root};
use crate::models::spec::{
    Claim, FamilySpec, GuidanceKind, Published, Signs, SingleFile, TextEncoderSpec,
};
use crate::models::{DenoiserKind, Part, t5, vae};

/// The features of T5-XXL.
const TEXT_FEATURES: usize = 4096;

/// PixArt-alpha.
pub const ALPHA: FamilySpec = FamilySpec {
    title: "PixArt-alpha",
    recipe: "pixart-alpha",
    published: Some(published(
        &["PixArt-alpha/PixArt-XL-2-1024-MS"],
        include_str!("transformer_alpha.json"),
        // That of Stable Diffusion 1.x.
        include_str!("../sd1/vae.json"),
        ["PixArtAlphaPipeline", "PixArtAlphaPipeline"],
        |tensors| claim(tensors, false),
    )),
    text_encoders: &[masked(120)],
    claims: |signs| is_of(signs, false),
    ..SIGMA
};

/// PixArt-Sigma.
pub const SIGMA: FamilySpec = FamilySpec {
    title: "PixArt-Sigma",
    recipe: "pixart-sigma",
    published: Some(published(
        &["PixArt-alpha/PixArt-Sigma-XL-2-1024-MS"],
        include_str!("transformer_sigma.json"),
        // That of SDXL.
        include_str!("../sdxl/vae.json"),
        ["PixArtSigmaPipeline", "PixArtSigmaPipeline"],
        |tensors| claim(tensors, true),
    )),
    denoiser: DenoiserKind::PixArt,
    text_encoders: &[masked(300)],
    aesthetic_score: false,
    zero_empty_prompts: false,
    guidance: GuidanceKind::ClassifierFree,
    prompt_weights: false,
    lower_case_prompts: true,
    controlnets: false,
    textual_inversions: false,
    lora_names: &[],
    int8_float_layers: &INT8_FLOAT_LAYERS,
    claims: |signs| is_of(signs, true),
};

/// T5 on so many tokens, and at most so many, without those that fill a prompt up.
const fn masked(tokens: usize) -> TextEncoderSpec {
    TextEncoderSpec {
        masked: true,
        ..TextEncoderSpec::t5(Part::TextEncoder, [tokens, tokens])
    }
}

const fn published(
    repositories: &'static [&'static str],
    denoiser: &'static str,
    vae: &'static str,
    [pipeline, inpaint_pipeline]: [&'static str; 2],
    claims: fn(&OriginalTensors) -> Claim,
) -> Published {
    Published {
        repositories,
        epsilon: &[],
        text_features: TEXT_FEATURES,
        denoiser,
        vae,
        scheduler: include_str!("scheduler.json"),
        pipeline,
        inpaint_pipeline,
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
            autoencoder: &vae::original::COMFY_ROOTS,
            text_encoders: &T5_ROOT,
            unknown_prediction: None,
        },
        kohya: None,
    }
}

const T5_ROOT: [Root; 1] = [t5::original::root(Part::TextEncoder)];

/// Whether a folder's transformer is PixArt's, and of Sigma: its configurations say that there are no additional
/// conditions, while alpha's leave open whether there are.
fn is_of(signs: &Signs, sigma: bool) -> bool {
    let norm = signs
        .denoiser
        .get("norm_type")
        .and_then(|norm| norm.as_str());
    let is_old = signs.is_class(OLD_CLASS) && norm == Some("ada_norm_single");
    let is_pixart = is_old || signs.is_class(DenoiserKind::PixArt.name());
    let goes_without = signs.denoiser.get("use_additional_conditions");
    is_pixart && (goes_without == Some(&false.into())) == sigma
}

/// The same in a single file.
fn claim(tensors: &OriginalTensors, sigma: bool) -> Claim {
    match original::is_sigma(tensors) == sigma {
        true => Claim::Yes,
        false => Claim::No,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Builder, Graph};
    use crate::models::pixart::{PixArtTransformer2DConfig, declare_inputs, pixart_transformer};
    use crate::nn::{Precision, Remat};

    fn trace(text: &str, [side, tokens]: [usize; 2]) -> Graph {
        let config = PixArtTransformer2DConfig::from_json(text).unwrap();
        let b = Builder::new();
        let inputs = declare_inputs(&b, &config, [1, side, side, tokens]).unwrap();
        let y = pixart_transformer(&b, &config, inputs, Precision::F32, Remat::None).unwrap();
        assert_eq!(b.dims(y), [1, 8, side, side]);
        b.output("sample", y, None).unwrap();
        b.finish()
    }

    /// Counts of the published checkpoints.
    #[test]
    fn transformers_have_exactly_the_parameters_of_their_checkpoints() {
        for (spec, tokens, expected) in [(&ALPHA, 120, 611_349_152), (&SIGMA, 300, 610_856_096)] {
            let published = spec.published.as_ref().unwrap();
            let graph = trace(published.denoiser, [128, tokens]);
            assert_eq!(graph.parameter_count(), expected, "{}", spec.title);
        }
    }

    /// Everything of more than a layer of the conditioning can be split by `fsdp` and by `tensor`.
    #[test]
    fn large_weights_have_logical_axes() {
        let graph = trace(SIGMA.published.as_ref().unwrap().denoiser, [4, 2]);
        let weights = graph.weights();
        let split: usize = weights
            .filter(|(_, weight)| weight.logical_axes.contains(&Some("embed")))
            .map(|(_, weight)| weight.shape.count())
            .sum();
        let share = split as f64 / graph.parameter_count() as f64;
        assert!(share > 0.995, "{share}");
    }
}
