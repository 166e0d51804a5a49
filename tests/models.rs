//! The models against what diffusers and transformers say of them.

use crate::common::{
    Golden, assert_close, assert_same_weights, cpu_session, rel_l2, run_recorded,
    unoptimized_session, weights,
};
use maxdiff::config::builtin_unet_config;
use maxdiff::dtype::DType;
use maxdiff::graph::{Builder, Graph, Op, Tensor, vjp};
use maxdiff::models::clip::{ClipTextConfig, clip_text};
use maxdiff::models::unet::{ROOT, UNet2DConditionConfig, declare_inputs, unet};
use maxdiff::nn::{Precision, Remat};
use maxdiff::shape::Shape;

const SD15: &str = r#"{"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.6.0",
    "act_fn": "silu", "attention_head_dim": 8, "block_out_channels": [320, 640, 1280, 1280],
    "center_input_sample": false, "cross_attention_dim": 768,
    "down_block_types": ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
    "downsample_padding": 1, "flip_sin_to_cos": true, "freq_shift": 0, "in_channels": 4, "layers_per_block": 2,
    "mid_block_scale_factor": 1, "norm_eps": 1e-05, "norm_num_groups": 32, "out_channels": 4, "sample_size": 64,
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"]}"#;

const SD21: &str = r#"{"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.10.0.dev0",
    "act_fn": "silu", "attention_head_dim": [5, 10, 20, 20], "block_out_channels": [320, 640, 1280, 1280],
    "center_input_sample": false, "cross_attention_dim": 1024,
    "down_block_types": ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
    "downsample_padding": 1, "dual_cross_attention": false, "flip_sin_to_cos": true, "freq_shift": 0,
    "in_channels": 4, "layers_per_block": 2, "mid_block_scale_factor": 1, "norm_eps": 1e-05,
    "norm_num_groups": 32, "num_class_embeds": null, "only_cross_attention": false, "out_channels": 4,
    "sample_size": 96, "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D",
    "CrossAttnUpBlock2D"], "upcast_attention": true, "use_linear_projection": true}"#;

const SDXL: &str = r#"{"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.19.0.dev0",
    "act_fn": "silu", "addition_embed_type": "text_time", "addition_embed_type_num_heads": 64,
    "addition_time_embed_dim": 256, "attention_head_dim": [5, 10, 20], "block_out_channels": [320, 640, 1280],
    "center_input_sample": false, "class_embed_type": null, "class_embeddings_concat": false,
    "conv_in_kernel": 3, "conv_out_kernel": 3, "cross_attention_dim": 2048, "cross_attention_norm": null,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"], "downsample_padding": 1,
    "dual_cross_attention": false, "encoder_hid_dim": null, "encoder_hid_dim_type": null,
    "flip_sin_to_cos": true, "freq_shift": 0, "in_channels": 4, "layers_per_block": 2,
    "mid_block_only_cross_attention": null, "mid_block_scale_factor": 1,
    "mid_block_type": "UNetMidBlock2DCrossAttn", "norm_eps": 1e-05, "norm_num_groups": 32,
    "num_attention_heads": null, "num_class_embeds": null, "only_cross_attention": false, "out_channels": 4,
    "projection_class_embeddings_input_dim": 2816, "resnet_out_scale_factor": 1.0, "resnet_skip_time_act": false,
    "resnet_time_scale_shift": "default", "sample_size": 128, "time_cond_proj_dim": null,
    "time_embedding_act_fn": null, "time_embedding_dim": null, "time_embedding_type": "positional",
    "timestep_post_act": null, "transformer_layers_per_block": [1, 2, 10],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"], "upcast_attention": null,
    "use_linear_projection": true}"#;

/// The traced forward pass of `config` on one `size` x `size` latent.
fn trace(config: &UNet2DConditionConfig, size: usize, precision: Precision) -> Graph {
    let b = Builder::new();
    let inputs = declare_inputs(&b, config, [1, size, size, 77], precision.activations).unwrap();
    let y = unet(&b, config, inputs, precision, Remat::None).unwrap();
    assert_eq!(b.dims(y), [1, config.out_channels, size, size]);
    b.output("sample", y, None).unwrap();
    b.finish()
}

/// Counts of the checkpoints that are published for these configurations.
#[test]
fn unets_have_exactly_the_parameters_of_their_checkpoints() {
    let refiner = builtin_unet_config("stabilityai/stable-diffusion-xl-refiner-1.0").unwrap();
    for (text, size, expected) in [
        (SD15, 64, 859_520_964),
        (SD21, 96, 865_910_724),
        (SDXL, 128, 2_567_463_684),
        (refiner, 128, 2_259_526_660),
    ] {
        let config = UNet2DConditionConfig::from_json(text).unwrap();
        let graph = trace(&config, size, Precision::F32);
        assert_eq!(graph.parameter_count(), expected);
        assert!(graph.weights().all(|(_, w)| w.name.starts_with("unet/")));
    }
    assert_eq!(ROOT, "unet");
}

#[test]
fn every_weight_is_used_and_every_axis_is_named_with_its_weight() {
    let config = UNet2DConditionConfig::from_json(SDXL).unwrap();
    let graph = trace(&config, 128, Precision::F32);
    let mut used = vec![false; graph.nodes.len()];
    used[graph.outputs[0].node as usize] = true;
    for (id, node) in graph.nodes.iter().enumerate().rev() {
        if used[id] {
            for &operand in &node.operands {
                used[operand as usize] = true;
            }
        }
    }
    for (id, node) in graph.nodes.iter().enumerate() {
        if let Op::Parameter(index) = node.op {
            assert!(used[id], "{} is not used", graph.inputs[index].name);
        }
    }
    let axes = |key: &str| {
        let index = graph.input_index(&format!("unet/{key}")).unwrap();
        graph.inputs[index].logical_axes.clone()
    };
    let block = "mid_block.attentions.0.transformer_blocks.9";
    assert_eq!(
        axes(&format!("{block}.attn2.to_k.weight")),
        [Some("heads"), Some("embed")]
    );
    assert_eq!(
        axes(&format!("{block}.ff.net.2.weight")),
        [Some("embed"), Some("mlp")]
    );
    assert_eq!(
        axes("conv_in.weight"),
        [
            Some("conv_out"),
            Some("conv_in"),
            Some("keep_1"),
            Some("keep_2")
        ]
    );
}

#[test]
fn bf16_activations_stay_bf16_and_contractions_accumulate_in_f32() {
    let config = UNet2DConditionConfig::from_json(SD15).unwrap();
    let precision = Precision {
        weights: DType::F32,
        activations: DType::BF16,
    };
    let graph = trace(&config, 64, precision).inline_composites(&|_, _| true);
    let output = &graph.nodes[graph.outputs[0].node as usize];
    assert_eq!(output.shape.dtype, DType::BF16);
    let mut contractions = 0;
    for node in &graph.nodes {
        if matches!(node.op.name(), "dot_general" | "convolution") {
            contractions += 1;
            assert_eq!(node.shape.dtype, DType::F32);
            for &operand in &node.operands {
                assert_eq!(
                    graph.nodes[operand as usize].shape.dtype,
                    DType::BF16,
                    "{}",
                    graph.path(node)
                );
            }
        }
    }
    assert!(contractions > 300, "{contractions}");
}

#[test]
fn inputs_that_do_not_fit_are_named() {
    let config = UNet2DConditionConfig {
        downsample_padding: 0,
        ..UNet2DConditionConfig::from_json(SDXL).unwrap()
    };
    let error = |size: usize, length_features: Option<usize>, text_time: bool| {
        let b = Builder::new();
        let mut inputs = declare_inputs(&b, &config, [1, size, size, 77], DType::F32).unwrap();
        if let Some(features) = length_features {
            let shape = Shape::new(DType::F32, [1, 77, features]);
            inputs.conditioning.encoder_hidden_states = b.input("other", shape, &[]).unwrap();
        }
        if !text_time {
            inputs.conditioning.text_time = None;
        }
        unet(&b, &config, inputs, Precision::F32, Remat::None)
            .unwrap_err()
            .to_string()
    };
    assert!(error(30, None, true).contains("must be multiples of 4"));
    assert!(error(32, Some(768), true).contains("cross_attention_dim is 2048"));
    assert!(error(32, None, false).contains("needs text_embeds and time_ids"));
}

#[test]
fn remat_marks_each_resnet_and_transformer_layer() {
    let config = UNet2DConditionConfig::from_json(SD15).unwrap();
    let b = Builder::new();
    let inputs = declare_inputs(&b, &config, [1, 64, 64, 77], DType::F32).unwrap();
    unet(&b, &config, inputs, Precision::F32, Remat::Full).unwrap();
    let graph = b.finish();
    let regions: std::collections::BTreeSet<u32> = graph
        .nodes
        .iter()
        .filter_map(|n| n.remat.map(|remat| remat.region))
        .collect();
    // 22 resnets (8 down, 2 in the middle, 12 up) and 16 transformers of one layer.
    assert_eq!(regions.len(), 38);
}

/// diffusers in float64 on the float32 weights, against this graph in float32: the forward pass within 1e-5, gradients
/// of weights and inputs within 1e-4. PyTorch's own float32 run is up to 7e-7 and 1.3e-5 away.
fn unet_matches_diffusers(name: &str, remat: Remat) {
    let io = Golden::read(&format!("{name}/io.safetensors"));
    let checkpoint = Golden::read_folder(name, "diffusion_pytorch_model");
    let config =
        UNet2DConditionConfig::from_json(&Golden::text(&format!("{name}/config.json"))).unwrap();

    let b = Builder::new();
    let [batch, _, height, width] = io.dims("in/sample").try_into().unwrap();
    let length = io.dims("in/encoder_hidden_states")[1];
    let inputs = declare_inputs(&b, &config, [batch, height, width, length], DType::F32).unwrap();
    let y = unet(&b, &config, inputs.clone(), Precision::F32, remat).unwrap();
    assert_same_weights(&b, &checkpoint);
    b.output("out/sample", y, None).unwrap();

    let shape = b.shape(y);
    let cotangent = b.input("cotangent", shape.clone(), &[]).unwrap();
    let cotangent = b.mul_scalar(cotangent, 1.0 / shape.count() as f64).unwrap();
    let mut wrt: Vec<(String, Tensor)> = weights(&b)
        .into_iter()
        .map(|(key, w)| (format!("grad/param/{key}"), w))
        .collect();
    wrt.push(("grad/in/sample".to_string(), inputs.sample));
    wrt.push((
        "grad/in/encoder_hidden_states".to_string(),
        inputs.conditioning.encoder_hidden_states,
    ));
    if let Some(text_time) = inputs.conditioning.text_time {
        wrt.push(("grad/in/text_embeds".to_string(), text_time.text_embeds));
    }
    let tensors: Vec<Tensor> = wrt.iter().map(|(_, t)| *t).collect();
    for ((name, _), g) in wrt
        .iter()
        .zip(vjp(&b, &[(y, cotangent)], &tensors).unwrap())
    {
        b.output(name, g, None).unwrap();
    }

    let graph = b.finish();
    // One of them is compiled as a user's is: what the others add is in the graph.
    let session = match name {
        "unet_sdxl" => cpu_session(1),
        _ => unoptimized_session(),
    };
    let results = run_recorded(&session, &graph, &checkpoint, &io);
    let mut worst = 0.0f64;
    for (output, found) in graph.outputs.iter().zip(&results) {
        let tolerance = if output.name == "out/sample" {
            1e-5
        } else {
            1e-4
        };
        assert_close(&output.name, found, &io, tolerance);
        if output.name == "out/sample" {
            eprintln!("{name}: forward {:.1e}", rel_l2(found, &io, &output.name));
        } else {
            worst = worst.max(rel_l2(found, &io, &output.name));
        }
    }
    eprintln!("{name}: worst gradient {worst:.1e}");
}

#[test]
fn sd15_matches_diffusers() {
    unet_matches_diffusers("unet_sd15", Remat::None);
}

/// Sides that no halving keeps whole: 9 -> 5 -> 3 and 7 -> 4 -> 2.
#[test]
fn odd_sizes_match_diffusers() {
    let io = Golden::read("unet_sd15/odd.safetensors");
    let checkpoint = Golden::read_folder("unet_sd15", "diffusion_pytorch_model");
    let config = UNet2DConditionConfig::from_json(&Golden::text("unet_sd15/config.json")).unwrap();
    let b = Builder::new();
    let [batch, _, height, width] = io.dims("in/sample").try_into().unwrap();
    let length = io.dims("in/encoder_hidden_states")[1];
    let inputs = declare_inputs(&b, &config, [batch, height, width, length], DType::F32).unwrap();
    let y = unet(&b, &config, inputs, Precision::F32, Remat::None).unwrap();
    b.output("out/sample", y, None).unwrap();
    let graph = b.finish();
    let found = run_recorded(&unoptimized_session(), &graph, &checkpoint, &io);
    assert_close("out/sample", &found[0], &io, 1e-5);
}

#[test]
fn sd21_matches_diffusers() {
    unet_matches_diffusers("unet_sd21", Remat::None);
}

#[test]
fn sdxl_matches_diffusers() {
    unet_matches_diffusers("unet_sdxl", Remat::MatmulWithoutBatch);
}

#[test]
fn scale_and_shift_by_the_time_embedding_match_diffusers() {
    unet_matches_diffusers("unet_scale_shift", Remat::None);
}

#[test]
fn recomputing_blocks_changes_no_gradient() {
    unet_matches_diffusers("unet_sd15", Remat::Full);
}

/// transformers in float64, against this graph in float32; PyTorch's own float32 run is up to 1.1e-6 away.
fn clip_matches_transformers(name: &str) {
    let io = Golden::read(&format!("{name}/io.safetensors"));
    let checkpoint = Golden::read_folder(name, "model");
    let config = ClipTextConfig::from_json(&Golden::text(&format!("{name}/config.json"))).unwrap();

    let b = Builder::new();
    let shape = Shape::new(DType::S32, io.dims("in/input_ids"));
    let ids = b.input("input_ids", shape, &[]).unwrap();
    let y = clip_text(
        &b,
        "text_encoder",
        &config,
        ids,
        Precision::F32,
        Remat::None,
    )
    .unwrap();
    assert_same_weights(&b, &checkpoint);
    let (pooled_name, pooled) = match y.text_embeds {
        Some(embeds) => ("out/text_embeds", embeds),
        None => ("out/pooler_output", y.pooler_output),
    };
    b.output("out/last_hidden_state", y.last_hidden_state, None)
        .unwrap();
    b.output(pooled_name, pooled, None).unwrap();
    for (i, hidden) in y.hidden_states.iter().enumerate() {
        b.output(&format!("out/hidden_states.{i}"), *hidden, None)
            .unwrap();
    }

    let penultimate = y.hidden_states[y.hidden_states.len() - 2];
    let outputs = [
        ("cotangent_last_hidden_state", y.last_hidden_state),
        ("cotangent_penultimate", penultimate),
        ("cotangent_pooled", pooled),
    ]
    .map(|(name, output)| {
        let shape = b.shape(output);
        let cotangent = b.input(name, shape.clone(), &[]).unwrap();
        (
            output,
            b.mul_scalar(cotangent, 1.0 / shape.count() as f64).unwrap(),
        )
    });
    let wrt = weights(&b);
    let tensors: Vec<Tensor> = wrt.iter().map(|(_, t)| *t).collect();
    for ((key, _), g) in wrt.iter().zip(vjp(&b, &outputs, &tensors).unwrap()) {
        b.output(&format!("grad/param/{key}"), g, None).unwrap();
    }

    let graph = b.finish();
    for (output, found) in
        graph
            .outputs
            .iter()
            .zip(&run_recorded(&cpu_session(1), &graph, &checkpoint, &io))
    {
        let tolerance = if output.name.starts_with("out/") {
            1e-5
        } else {
            1e-4
        };
        assert_close(&output.name, found, &io, tolerance);
    }
}

#[test]
fn clip_with_legacy_pooling_matches_transformers() {
    clip_matches_transformers("clip_quick_gelu");
}

#[test]
fn clip_with_projection_matches_transformers() {
    clip_matches_transformers("clip_gelu");
}

/// Prints what `maxdiff-rs lower` spends on tracing; the bound is for an optimized build only.
#[test]
fn tracing_sdxl_is_fast() {
    let config = UNet2DConditionConfig::from_json(SDXL).unwrap();
    let mut best = f64::INFINITY;
    let mut nodes = 0;
    for _ in 0..5 {
        let start = std::time::Instant::now();
        nodes = trace(&config, 128, Precision::F32).nodes.len();
        best = best.min(start.elapsed().as_secs_f64());
    }
    eprintln!("SDXL: {nodes} nodes in {:.1} ms", best * 1e3);
    assert!(best < 1.0, "{best} s");
}
