//! ControlNets against what diffusers says of them, and the edges they are given against OpenCV's.

use crate::common::{Golden, assert_close, rel_l2, run_on, unoptimized_session};
use maxdiff::dtype::DType;
use maxdiff::graph::{Builder, Graph, Init, InputKind, Tensor};
use maxdiff::host_tensor::HostTensor;
use maxdiff::models::controlnet::{self, Control, ControlNetConfig, controlnet};
use maxdiff::models::unet::{ResSamples, UNet2DConditionConfig, UNetInputs, declare_inputs, unet};
use maxdiff::nn::{Precision, Remat};
use maxdiff::pipelines::canny::canny;
use maxdiff::shape::Shape;

const SD15: &str = r#"{"_class_name": "ControlNetModel", "_diffusers_version": "0.14.0.dev0", "act_fn": "silu",
    "attention_head_dim": 8, "block_out_channels": [320, 640, 1280, 1280], "class_embed_type": null,
    "conditioning_embedding_out_channels": [16, 32, 96, 256], "controlnet_conditioning_channel_order": "rgb",
    "cross_attention_dim": 768, "down_block_types": ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D",
    "CrossAttnDownBlock2D", "DownBlock2D"], "downsample_padding": 1, "flip_sin_to_cos": true, "freq_shift": 0,
    "in_channels": 4, "layers_per_block": 2, "mid_block_scale_factor": 1, "norm_eps": 1e-05, "norm_num_groups": 32,
    "num_class_embeds": null, "only_cross_attention": false, "projection_class_embeddings_input_dim": null,
    "resnet_time_scale_shift": "default", "upcast_attention": false, "use_linear_projection": false}"#;

const SDXL: &str = r#"{"_class_name": "ControlNetModel", "_diffusers_version": "0.20.0.dev0", "act_fn": "silu",
    "addition_embed_type": "text_time", "addition_embed_type_num_heads": 64, "addition_time_embed_dim": 256,
    "attention_head_dim": [5, 10, 20], "block_out_channels": [320, 640, 1280], "class_embed_type": null,
    "conditioning_channels": 3, "conditioning_embedding_out_channels": [16, 32, 96, 256],
    "controlnet_conditioning_channel_order": "rgb", "cross_attention_dim": 2048,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"], "downsample_padding": 1,
    "encoder_hid_dim": null, "encoder_hid_dim_type": null, "flip_sin_to_cos": true, "freq_shift": 0,
    "global_pool_conditions": false, "in_channels": 4, "layers_per_block": 2, "mid_block_scale_factor": 1,
    "norm_eps": 1e-05, "norm_num_groups": 32, "num_attention_heads": null, "num_class_embeds": null,
    "only_cross_attention": false, "projection_class_embeddings_input_dim": 2816,
    "resnet_time_scale_shift": "default", "transformer_layers_per_block": [1, 2, 10], "upcast_attention": null,
    "use_linear_projection": true}"#;

/// A condition called `image<suffix>` with the scale `scale<suffix>`.
fn declare_control(
    b: &Builder,
    config: &ControlNetConfig,
    [batch, height, width]: [usize; 3],
    suffix: &str,
) -> Control {
    let multiple = config.spatial_multiple();
    let dims = [
        batch,
        config.condition.conditioning_channels,
        multiple * height,
        multiple * width,
    ];
    let input = |name: &str, shape| b.input(&format!("{name}{suffix}"), shape, &[]).unwrap();
    Control {
        image: input("image", Shape::new(DType::F32, dims)),
        scale: input("scale", Shape::scalar(DType::F32)),
    }
}

/// Counts of the published checkpoints.
#[test]
fn controlnets_have_exactly_the_parameters_of_their_checkpoints() {
    for (text, size, residuals, expected) in
        [(SD15, 64, 12, 361_279_120), (SDXL, 128, 9, 1_251_014_160)]
    {
        let config = ControlNetConfig::from_json(text).unwrap();
        let b = Builder::new();
        let inputs = declare_inputs(&b, &config.unet, [2, size, size, 77], DType::F32).unwrap();
        let control = declare_control(&b, &config, [2, size, size], "");
        let precision = Precision {
            weights: DType::F32,
            activations: DType::BF16,
        };
        let added = controlnet(
            &b,
            controlnet::ROOT,
            &config,
            &inputs,
            control,
            precision,
            Remat::None,
        )
        .unwrap();
        assert_eq!(added.down_blocks.len(), residuals);
        assert_eq!(
            b.shape(added.down_blocks[0]),
            Shape::new(DType::BF16, [2, size, size, 320])
        );
        let graph = b.finish();
        assert_eq!(graph.parameter_count(), expected);
        assert!(
            graph
                .weights()
                .all(|(_, w)| w.name.starts_with("controlnet/"))
        );
        // Training starts from a ControlNet that adds nothing: one convolution for each residual, the image's last.
        let zero = InputKind::Weight(Init::Zeros);
        let zeros = graph.weights().filter(|(_, w)| {
            w.kind == zero && w.shape.rank() == 4 && w.name.starts_with("controlnet/controlnet_")
        });
        assert_eq!(zeros.count(), residuals + 2);
    }
}

/// diffusers in float64 on the float32 weights, against this graph in float32. PyTorch's own float32 run is up to 6e-7
/// away.
fn matches_diffusers(name: &str) {
    let io = Golden::read(&format!("{name}/io.safetensors"));
    let config = |part: &str| -> String { Golden::text(&format!("{name}/{part}/config.json")) };
    let weights = ["unet", "controlnet"].map(|part| {
        let folder = format!("{name}/{part}");
        Golden::read_folder(&folder, "diffusion_pytorch_model")
    });
    let unet_config = UNet2DConditionConfig::from_json(&config("unet")).unwrap();
    let config = ControlNetConfig::from_json(&config("controlnet")).unwrap();

    let b = Builder::new();
    let [batch, _, height, width] = io.dims("in/sample").try_into().unwrap();
    let length = io.dims("in/encoder_hidden_states")[1];
    let inputs =
        declare_inputs(&b, &unet_config, [batch, height, width, length], DType::F32).unwrap();
    let control = |suffix: &str| {
        let control = declare_control(&b, &config, [batch, height, width], suffix);
        controlnet(
            &b,
            controlnet::ROOT,
            &config,
            &inputs,
            control,
            Precision::F32,
            Remat::None,
        )
        .unwrap()
    };
    let controlled = |residuals: Option<ResSamples>| {
        let inputs = UNetInputs {
            additional_residuals: residuals,
            ..inputs.clone()
        };
        unet(&b, &unet_config, inputs, Precision::F32, Remat::None).unwrap()
    };
    let (first, second) = (control(""), control("_2"));
    let sum = first.add(&b, &second).unwrap();

    let output = |name: &str, x: Tensor| b.output(&format!("out/{name}"), x, None).unwrap();
    let channels_first = |x: Tensor| b.transpose(x, &[0, 3, 1, 2]).unwrap();
    for (i, &x) in first.down_blocks.iter().enumerate() {
        output(&format!("down_block_res_samples.{i}"), channels_first(x));
    }
    output("mid_block_res_sample", channels_first(first.mid_block));
    output("alone", controlled(None));
    output("sample", controlled(Some(first)));
    output("sample_2", controlled(Some(sum)));

    let graph = b.finish();
    for (part, weights) in ["unet/", "controlnet/"].iter().zip(&weights) {
        let mut keys: Vec<(String, Vec<usize>)> = graph
            .weights()
            .filter_map(|(_, w)| Some((w.name.strip_prefix(part)?, w.shape.dims.clone())))
            .map(|(key, dims)| (key.to_string(), dims))
            .collect();
        keys.sort();
        assert_eq!(keys, weights.shapes());
    }
    for (output, found) in graph.outputs.iter().zip(&run(&graph, &weights, &io)) {
        eprintln!(
            "{name} {}: {:.1e}",
            output.name,
            rel_l2(found, &io, &output.name)
        );
        assert_close(&output.name, found, &io, 1e-5);
    }
}

fn run(graph: &Graph, [unet, controlnet]: &[Golden; 2], io: &Golden) -> Vec<HostTensor> {
    let arguments: Vec<HostTensor> = graph
        .inputs
        .iter()
        .map(|input| match input.name.split_once('/') {
            Some(("unet", key)) => unet.tensor(key, &input.shape),
            Some((_, key)) => controlnet.tensor(key, &input.shape),
            None => io.tensor(&format!("in/{}", input.name), &input.shape),
        })
        .collect();
    run_on(&unoptimized_session(), graph, &arguments)
}

#[test]
fn sd15_matches_diffusers() {
    matches_diffusers("controlnet_sd15");
}

#[test]
fn sdxl_with_a_bgr_condition_matches_diffusers() {
    matches_diffusers("controlnet_sdxl");
}

#[test]
fn what_does_not_fit_is_named() {
    let config = ControlNetConfig::from_json(SD15).unwrap();
    let b = Builder::new();
    let inputs = declare_inputs(&b, &config.unet, [1, 64, 64, 77], DType::F32).unwrap();
    let small = declare_control(&b, &config, [1, 32, 32], "");
    let fitting = declare_control(&b, &config, [1, 64, 64], "_2");
    let trace = |inputs: &UNetInputs, control: Control| {
        controlnet(
            &b,
            controlnet::ROOT,
            &config,
            inputs,
            control,
            Precision::F32,
            Remat::None,
        )
    };
    let error = trace(&inputs, small).unwrap_err().to_string();
    assert!(error.contains("expected sizes [1, 3, 512, 512]"), "{error}");
    let vector = Control {
        scale: inputs.timestep,
        ..fitting
    };
    let error = trace(&inputs, vector).unwrap_err().to_string();
    assert!(error.contains("f32[1] is not a scalar"), "{error}");

    // A UNet of other channels, and a ControlNet of fewer blocks.
    let mut added = trace(&inputs, fitting).unwrap();
    let error = |residuals: &ResSamples| {
        let unet_config = UNet2DConditionConfig {
            block_out_channels: vec![320, 640, 1280, 640],
            ..config.unet.clone()
        };
        let inputs = UNetInputs {
            additional_residuals: Some(residuals.clone()),
            ..inputs.clone()
        };
        unet(&b, &unet_config, inputs, Precision::F32, Remat::None)
            .unwrap_err()
            .to_string()
    };
    let message = error(&added);
    assert!(
        message.contains("down_blocks[10] is f32[1,8,8,640] and f32[1,8,8,1280]"),
        "{message}"
    );
    added.down_blocks.pop();
    let message = error(&added);
    assert!(message.contains("12 and 11 down_blocks"), "{message}");
    let nested = UNetInputs {
        additional_residuals: Some(added),
        ..inputs.clone()
    };
    let error = trace(&nested, fitting).unwrap_err().to_string();
    assert!(error.contains("takes no additional_residuals"), "{error}");
}

#[test]
fn edges_are_opencvs_to_the_bit() {
    let golden = Golden::read("canny.safetensors");
    let cases = golden.meta["cases"].as_object().unwrap();
    assert_eq!(cases.len(), 5);
    for (name, case) in cases {
        let [height, width, _] = golden.dims(&format!("in/{name}")).try_into().unwrap();
        let rgb: Vec<u8> = golden
            .values(&format!("in/{name}"))
            .iter()
            .map(|&v| v as u8)
            .collect();
        let threshold = |i: usize| case["thresholds"][i].as_u64().unwrap() as u16;
        let edges = canny(&rgb, [height, width], [threshold(0), threshold(1)]).unwrap();
        let expected: Vec<u8> = golden
            .values(&format!("out/{name}"))
            .iter()
            .flat_map(|&v| [v as u8; 3])
            .collect();
        assert_eq!(edges, expected, "{name}");
        let white = edges.iter().filter(|&&v| v == 255).count();
        assert_eq!(white as u64, 3 * case["edges"].as_u64().unwrap(), "{name}");
    }
}
