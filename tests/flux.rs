//! FLUX.1 against diffusers: the transformer, the autoencoder's size, and the whole pipeline.

mod controlnet;
mod loras;
pub mod pipeline;

use crate::common::{Golden, check_denoiser};
use maxdiff::dtype::DType;
use maxdiff::graph::Builder;
use maxdiff::models::Family;
use maxdiff::models::flux::{FluxTransformer2DConfig, declare_inputs, flux_transformer};
use maxdiff::models::vae::{self, Autoencoder};
use maxdiff::nn::{Precision, Remat};
use maxdiff::shape::Shape;

fn transformer_matches_diffusers(name: &str, remat: Remat) {
    let io = Golden::read(&format!("{name}/io.safetensors"));
    let config = Golden::text(&format!("{name}/config.json"));
    let config = FluxTransformer2DConfig::from_json(&config).unwrap();
    let b = Builder::new();
    let [batch, image, _] = io.dims("in/hidden_states").try_into().unwrap();
    let text = io.dims("in/encoder_hidden_states")[1];
    let inputs = declare_inputs(&b, &config, [batch, image, text]).unwrap();
    let y = flux_transformer(&b, &config, inputs, Precision::F32, remat).unwrap();
    let conditioning = inputs.conditioning;
    let inputs = [
        ("hidden_states", inputs.hidden_states),
        ("encoder_hidden_states", conditioning.encoder_hidden_states),
        ("pooled_projections", conditioning.pooled_projections),
    ];
    // One of them is compiled as a user's is: what the others add is in the graph.
    check_denoiser(name, b, y, &inputs, name == "flux_odd");
}

#[test]
fn dev_matches_diffusers() {
    transformer_matches_diffusers("flux_dev", Remat::None);
}

#[test]
fn schnell_matches_diffusers() {
    transformer_matches_diffusers("flux_schnell", Remat::None);
}

/// An odd number of heads, positions on all axes, other channels for the result.
#[test]
fn odd_sizes_match_diffusers() {
    transformer_matches_diffusers("flux_odd", Remat::None);
}

#[test]
fn recomputing_blocks_changes_no_gradient() {
    transformer_matches_diffusers("flux_dev", Remat::Full);
}

/// The published autoencoder: 16 channels, a shift, no 1x1 convolutions beside encoder and decoder.
#[test]
fn the_autoencoder_has_the_parameters_of_its_checkpoint() {
    let published = Family::FluxDev.spec().published.as_ref().unwrap();
    let config: Autoencoder =
        Autoencoder::from_map(serde_json::from_str(published.vae).unwrap()).unwrap();
    assert_eq!(
        (config.latent_channels(), config.spatial_multiple()),
        (16, 8)
    );
    assert_eq!(config.latent_scale().shift, Some(0.1159));
    let count = |trace: &dyn Fn(&Builder)| {
        let b = Builder::new();
        trace(&b);
        b.finish().parameter_count()
    };
    let input =
        |b: &Builder, dims: [usize; 4]| b.input("x", Shape::new(DType::F32, dims), &[]).unwrap();
    let decoder = count(&|b| {
        vae::decode(
            b,
            vae::ROOT,
            &config,
            input(b, [1, 16, 8, 8]),
            Precision::F32,
        )
        .unwrap();
    });
    let encoder = count(&|b| {
        vae::encode(
            b,
            vae::ROOT,
            &config,
            input(b, [1, 3, 64, 64]),
            Precision::F32,
        )
        .unwrap();
    });
    assert_eq!((decoder, encoder), (49_545_475, 34_274_208));
}
