//! PixArt-alpha and -Sigma against diffusers: the transformer, and the whole pipeline.

pub mod pipeline;

use crate::common::{Golden, check_denoiser};
use maxdiff::graph::Builder;
use maxdiff::models::pixart::{PixArtTransformer2DConfig, declare_inputs, pixart_transformer};
use maxdiff::nn::{Precision, Remat};

fn transformer_matches_diffusers(name: &str, remat: Remat) {
    let io = Golden::read(&format!("{name}/io.safetensors"));
    let config = Golden::text(&format!("{name}/config.json"));
    let config = PixArtTransformer2DConfig::from_json(&config).unwrap();
    let b = Builder::new();
    let [batch, _, rows, columns] = io.dims("in/hidden_states").try_into().unwrap();
    let text = io.dims("in/encoder_hidden_states")[1];
    let inputs = declare_inputs(&b, &config, [batch, rows, columns, text]).unwrap();
    let y = pixart_transformer(&b, &config, inputs, Precision::F32, remat).unwrap();
    let conditioning = inputs.conditioning;
    let inputs = [
        ("hidden_states", inputs.hidden_states),
        ("encoder_hidden_states", conditioning.encoder_hidden_states),
    ];
    // One of them is compiled as a user's is: what the others add is in the graph.
    check_denoiser(name, b, y, &inputs, name == "pixart_odd");
}

/// With the size, and a row whose text is masked in part.
#[test]
fn alpha_matches_diffusers() {
    transformer_matches_diffusers("pixart_alpha", Remat::None);
}

/// Without the size, with positions divided by 2.
#[test]
fn sigma_matches_diffusers() {
    transformer_matches_diffusers("pixart_sigma", Remat::None);
}

/// One head, three channels, no variance in the result.
#[test]
fn odd_sizes_match_diffusers() {
    transformer_matches_diffusers("pixart_odd", Remat::None);
}

#[test]
fn recomputing_blocks_changes_no_gradient() {
    transformer_matches_diffusers("pixart_alpha", Remat::Full);
}

#[test]
fn inputs_that_do_not_fit_are_named() {
    let b = Builder::new();
    let config = PixArtTransformer2DConfig::default();
    let inputs = declare_inputs(&b, &config, [1, 4, 6, 3]).unwrap();
    let error = |change: &dyn Fn(&mut maxdiff::models::pixart::PixArtInputs)| {
        let mut inputs = inputs;
        change(&mut inputs);
        let y = pixart_transformer(&b, &config, inputs, Precision::F32, Remat::None);
        y.unwrap_err().to_string()
    };
    let without = error(&|inputs| inputs.conditioning.size = None);
    assert!(
        without.contains("needs resolution and aspect_ratio"),
        "{without}"
    );
    let mask = error(&|inputs| inputs.conditioning.encoder_attention_mask = inputs.timestep);
    assert!(
        mask.contains("encoder_attention_mask is f32[1]; expected sizes [1, 3]"),
        "{mask}"
    );
}
