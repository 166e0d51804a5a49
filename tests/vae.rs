//! The VAE against what diffusers says of it.

use crate::common::{Golden, assert_close, rel_l2, run_on, unoptimized_session};
use maxdiff::dtype::DType;
use maxdiff::graph::{Builder, Graph, InputKind, Tensor};
use maxdiff::host_tensor::HostTensor;
use maxdiff::models::vae::{self, Autoencoder, EncodedImages, LatentDistribution};
use maxdiff::nn::Precision;
use maxdiff::shape::Shape;

const SD: &str = r#"{"_class_name": "AutoencoderKL", "_diffusers_version": "0.6.0", "act_fn": "silu",
    "block_out_channels": [128, 256, 512, 512], "down_block_types": ["DownEncoderBlock2D", "DownEncoderBlock2D",
    "DownEncoderBlock2D", "DownEncoderBlock2D"], "in_channels": 3, "latent_channels": 4, "layers_per_block": 2,
    "norm_num_groups": 32, "out_channels": 3, "sample_size": 512, "up_block_types": ["UpDecoderBlock2D",
    "UpDecoderBlock2D", "UpDecoderBlock2D", "UpDecoderBlock2D"]}"#;

const FLUX: &str = r#"{"_class_name": "AutoencoderKL", "_diffusers_version": "0.30.0.dev0",
    "_name_or_path": "../checkpoints/flux-dev", "act_fn": "silu", "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D", "DownEncoderBlock2D", "DownEncoderBlock2D", "DownEncoderBlock2D"],
    "force_upcast": true, "in_channels": 3, "latent_channels": 16, "latents_mean": null, "latents_std": null,
    "layers_per_block": 2, "mid_block_add_attention": true, "norm_num_groups": 32, "out_channels": 3,
    "sample_size": 1024, "scaling_factor": 0.3611, "shift_factor": 0.1159, "up_block_types": ["UpDecoderBlock2D",
    "UpDecoderBlock2D", "UpDecoderBlock2D", "UpDecoderBlock2D"], "use_post_quant_conv": false,
    "use_quant_conv": false}"#;

fn encode(
    b: &Builder,
    config: &Autoencoder,
    images: Tensor,
    precision: Precision,
) -> LatentDistribution {
    match vae::encode(b, vae::ROOT, config, images, precision).unwrap() {
        EncodedImages::Distribution(encoded) => encoded,
        EncodedImages::Latents(_) => panic!("AutoencoderKL gives a distribution"),
    }
}

/// Counts of the published checkpoints: the encoder's with `quant_conv`, the decoder's with `post_quant_conv`.
#[test]
fn vaes_have_exactly_the_parameters_of_their_checkpoints() {
    for (text, encoder, decoder) in [(SD, 34_163_664, 49_490_199), (FLUX, 34_274_208, 49_545_475)] {
        let config = Autoencoder::from_map(serde_json::from_str(text).unwrap()).unwrap();
        let b = Builder::new();
        let shape = Shape::new(DType::F32, [1, 3, 512, 512]);
        let images = b.input("images", shape.clone(), &[]).unwrap();
        let latents = encode(&b, &config, images, Precision::F32);
        let encoded = b.shape(latents.mean);
        assert_eq!(encoded.dims, [1, config.latent_channels(), 64, 64]);
        assert_eq!(b.shape(latents.logvar), encoded);
        assert_eq!(b.finish().parameter_count(), encoder);

        let b = Builder::new();
        let latents = b.input("latents", encoded, &[]).unwrap();
        let images = vae::decode(&b, vae::ROOT, &config, latents, Precision::F32).unwrap();
        assert_eq!(b.shape(images), shape);
        let graph = b.finish();
        assert_eq!(graph.parameter_count(), decoder);
        assert!(graph.weights().all(|(_, w)| w.name.starts_with("vae/")));
    }
}

/// A recorded VAE: its configuration, weights, inputs and outputs.
struct Case {
    config: Autoencoder,
    weights: Golden,
    io: Golden,
}

impl Case {
    fn read(name: &str) -> Self {
        Case {
            config: Autoencoder::from_map(
                serde_json::from_str(&Golden::text(&format!("{name}/config.json"))).unwrap(),
            )
            .unwrap(),
            weights: Golden::read_folder(name, "diffusion_pytorch_model"),
            io: Golden::read(&format!("{name}/io.safetensors")),
        }
    }

    fn input(&self, b: &Builder, name: &str) -> Tensor {
        let dims = self.io.dims(&format!("in/{name}"));
        b.input(name, Shape::new(DType::F32, dims), &[]).unwrap()
    }

    /// Both ways, from the recorded inputs to the recorded outputs.
    fn trace(&self, precision: Precision) -> Graph {
        let (b, config) = (Builder::new(), &self.config);
        let images = self.input(&b, "images");
        let encoded = encode(&b, config, images, precision);
        let noise = self.input(&b, "noise");
        let noise = b.convert(noise, precision.activations).unwrap();
        let sample = encoded.sample(&b, noise).unwrap();
        let sample = config.latent_scale().apply(&b, sample).unwrap();
        let latents = self.input(&b, "latents");
        let latents = config.latent_scale().undo(&b, latents).unwrap();
        let decoded = vae::decode(&b, vae::ROOT, config, latents, precision).unwrap();
        for (name, value) in [
            ("out/mean", encoded.mean),
            ("out/logvar", encoded.logvar),
            ("out/latents", sample),
            ("out/images", decoded),
        ] {
            assert_eq!(b.dtype(value), precision.activations);
            let value = b.convert(value, DType::F32).unwrap();
            b.output(name, value, None).unwrap();
        }
        b.finish()
    }

    fn run(&self, graph: &Graph) -> Vec<HostTensor> {
        let arguments: Vec<HostTensor> = graph
            .inputs
            .iter()
            .map(|input| match input.kind {
                InputKind::Weight(_) => self.weights.tensor(input.key(), &input.shape),
                _ => self.io.tensor(&format!("in/{}", input.name), &input.shape),
            })
            .collect();
        run_on(&unoptimized_session(), graph, &arguments)
    }
}

/// diffusers in float64 on the float32 weights, against this graph. In float32, PyTorch's own run is up to 1.3e-6 away.
fn matches_diffusers(name: &str, precision: Precision, tolerance: f64) {
    let case = Case::read(name);
    let graph = case.trace(precision);
    let mut keys: Vec<(String, Vec<usize>)> = graph
        .weights()
        .map(|(_, w)| (w.key().to_string(), w.shape.dims.clone()))
        .collect();
    keys.sort();
    assert_eq!(keys, case.weights.shapes());
    for (output, found) in graph.outputs.iter().zip(&case.run(&graph)) {
        eprintln!(
            "{name} {}: {:.1e}",
            output.name,
            rel_l2(found, &case.io, &output.name)
        );
        assert_close(&output.name, found, &case.io, tolerance);
    }
}

#[test]
fn stable_diffusions_vae_matches_diffusers() {
    matches_diffusers("vae_sd", Precision::F32, 1e-5);
}

#[test]
fn shifted_latents_without_1x1_convolutions_match_diffusers() {
    matches_diffusers("vae_shift", Precision::F32, 1e-5);
}

/// PyTorch's own bfloat16 run is up to 1.4e-2 away.
#[test]
fn bfloat16_stays_near() {
    let precision = Precision {
        weights: DType::BF16,
        activations: DType::BF16,
    };
    matches_diffusers("vae_shift", precision, 2e-2);
}
