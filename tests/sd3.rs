//! Stable Diffusion 3 and 3.5 against diffusers: the transformer, and the whole pipeline.

pub mod pipeline;

use crate::common::{Golden, check_denoiser};
use maxdiff::dtype::DType;
use maxdiff::graph::Builder;
use maxdiff::models::sd3::{
    Sd3Inputs, Sd3Transformer2DConfig, SkipLayers, declare_inputs, sd3_transformer,
};
use maxdiff::nn::{Precision, Remat};
use maxdiff::shape::Shape;

fn config(name: &str) -> Sd3Transformer2DConfig {
    let config = Golden::text(&format!("{name}/config.json"));
    Sd3Transformer2DConfig::from_json(&config).unwrap()
}

fn transformer_matches_diffusers(name: &str, remat: Remat) {
    let io = Golden::read(&format!("{name}/io.safetensors"));
    let config = config(name);
    let b = Builder::new();
    let [batch, _, rows, columns] = io.dims("in/hidden_states").try_into().unwrap();
    let text = io.dims("in/encoder_hidden_states")[1];
    let inputs = declare_inputs(&b, &config, [batch, rows, columns, text]).unwrap();
    let run = |inputs: Sd3Inputs| {
        let y = sd3_transformer(&b, &config, inputs, Precision::F32, remat);
        y.unwrap()
    };
    let y = run(inputs.clone());
    if io.has("out/skipped") {
        // One run whose input says that the layer is left out, and one whose says that it is not.
        let skip = |value: f64| SkipLayers {
            layers: vec![1],
            are_skipped: b.full(&Shape::scalar(DType::F32), value).unwrap(),
        };
        for (name, value) in [("out/skipped", 1.0), ("out/sample", 0.0)] {
            let y = run(Sd3Inputs {
                skip_layers: Some(skip(value)),
                ..inputs.clone()
            });
            if value == 1.0 {
                b.output(name, y, None).unwrap();
            }
        }
    }
    let conditioning = inputs.conditioning;
    let inputs = [
        ("hidden_states", inputs.hidden_states),
        ("encoder_hidden_states", conditioning.encoder_hidden_states),
        ("pooled_projections", conditioning.pooled_projections),
    ];
    // One of them is compiled as a user's is: what the others add is in the graph.
    check_denoiser(name, b, y, &inputs, name == "sd3_odd");
}

/// Without a norm of queries and keys, and without a second attention.
#[test]
fn medium_matches_diffusers() {
    transformer_matches_diffusers("sd3_medium", Remat::None);
}

/// With both, as 3.5 medium, and without a layer.
#[test]
fn dual_attention_matches_diffusers() {
    transformer_matches_diffusers("sd3_dual", Remat::None);
}

/// One head, other channels for the result, a second attention in the last block.
#[test]
fn odd_sizes_match_diffusers() {
    transformer_matches_diffusers("sd3_odd", Remat::None);
}

#[test]
fn recomputing_blocks_changes_no_gradient() {
    transformer_matches_diffusers("sd3_medium", Remat::Full);
}

#[test]
fn inputs_that_do_not_fit_are_named() {
    let config = config("sd3_dual");
    let error = |dims: [usize; 4], layers: &[usize]| {
        let b = Builder::new();
        let inputs = declare_inputs(&b, &config, dims).unwrap();
        let skip_layers = SkipLayers {
            layers: layers.to_vec(),
            are_skipped: b.full(&Shape::scalar(DType::F32), 1.0).unwrap(),
        };
        let inputs = Sd3Inputs {
            skip_layers: Some(skip_layers),
            ..inputs
        };
        let y = sd3_transformer(&b, &config, inputs, Precision::F32, Remat::None);
        y.unwrap_err().to_string()
    };
    let large = error([1, 14, 4, 2], &[]);
    assert!(
        large.contains("have positions up to 12 (pos_embed_max_size = 6)"),
        "{large}"
    );
    let odd = error([1, 3, 4, 2], &[]);
    assert!(odd.contains("must be multiples of 2"), "{odd}");
    let missing = error([1, 4, 4, 2], &[3]);
    assert!(
        missing.contains("has 3, but the transformer has 3 layers"),
        "{missing}"
    );
}
