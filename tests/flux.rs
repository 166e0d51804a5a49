//! FLUX.1 against diffusers: the transformer, the autoencoder's size, and the whole pipeline.

mod pipeline;

use crate::common::{
    Golden, assert_close, assert_same_weights, cpu_session, rel_l2, run_recorded,
    unoptimized_session, weights,
};
use maxdiff::dtype::DType;
use maxdiff::graph::{Builder, Tensor, vjp};
use maxdiff::models::Family;
use maxdiff::models::flux::{FluxTransformer2DConfig, declare_inputs, flux_transformer};
use maxdiff::models::vae::{self, Autoencoder};
use maxdiff::nn::{Precision, Remat};
use maxdiff::shape::Shape;

/// diffusers in float64 on the float32 weights, against this graph in float32: the forward pass within 1e-5, gradients
/// of weights and inputs within 1e-4.
fn transformer_matches_diffusers(name: &str, remat: Remat) {
    let io = Golden::read(&format!("{name}/io.safetensors"));
    let checkpoint = Golden::read_folder(name, "diffusion_pytorch_model");
    let config = Golden::text(&format!("{name}/config.json"));
    let config = FluxTransformer2DConfig::from_json(&config).unwrap();

    let b = Builder::new();
    let [batch, image, _] = io.dims("in/hidden_states").try_into().unwrap();
    let text = io.dims("in/encoder_hidden_states")[1];
    let inputs = declare_inputs(&b, &config, [batch, image, text]).unwrap();
    let y = flux_transformer(&b, &config, inputs, Precision::F32, remat).unwrap();
    assert_same_weights(&b, &checkpoint);
    b.output("out/sample", y, None).unwrap();

    let shape = b.shape(y);
    let cotangent = b.input("cotangent", shape.clone(), &[]).unwrap();
    let cotangent = b.mul_scalar(cotangent, 1.0 / shape.count() as f64).unwrap();
    let conditioning = inputs.conditioning;
    let mut wrt = vec![
        ("grad/in/hidden_states".to_owned(), inputs.hidden_states),
        (
            "grad/in/encoder_hidden_states".to_owned(),
            conditioning.encoder_hidden_states,
        ),
        (
            "grad/in/pooled_projections".to_owned(),
            conditioning.pooled_projections,
        ),
    ];
    let parameters = weights(&b).into_iter();
    let parameters = parameters.map(|(key, w)| (format!("grad/param/{key}"), w));
    wrt.extend(parameters.filter(|(name, _)| io.has(name)));
    let tensors: Vec<Tensor> = wrt.iter().map(|(_, t)| *t).collect();
    let gradients = vjp(&b, &[(y, cotangent)], &tensors).unwrap();
    for ((name, _), gradient) in wrt.iter().zip(gradients) {
        b.output(name, gradient, None).unwrap();
    }

    let graph = b.finish();
    // One of them is compiled as a user's is: what the others add is in the graph.
    let session = match (name, remat) {
        ("flux_odd", _) => cpu_session(1),
        _ => unoptimized_session(),
    };
    let results = run_recorded(&session, &graph, &checkpoint, &io);
    let mut worst = 0.0f64;
    for (output, found) in graph.outputs.iter().zip(&results) {
        if output.name == "out/sample" {
            assert_close(&output.name, found, &io, 1e-5);
            eprintln!("{name}: forward {:.1e}", rel_l2(found, &io, &output.name));
        } else {
            assert_close(&output.name, found, &io, 1e-4);
            worst = worst.max(rel_l2(found, &io, &output.name));
        }
    }
    eprintln!("{name}: worst gradient {worst:.1e}");
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
