//! ControlNets of FLUX.1: one, one that knows several kinds of images, and both together.

use std::fs;

use crate::common::{
    Golden, assert_close, distance, golden, rel_l2, run_on, samples, unoptimized_session,
};
use maxdiff::dtype::DType;
use maxdiff::graph::Builder;
use maxdiff::host_tensor::HostTensor;
use maxdiff::models::controlnet::root;
use maxdiff::models::flux::{
    FluxControl, FluxControlNetConfig, FluxInputs, FluxResiduals, FluxTransformer2DConfig,
    declare_inputs, flux_controlnet, flux_transformer,
};
use maxdiff::nn::{Precision, Remat};
use maxdiff::recipe::RecipeError;
use maxdiff::shape::Shape;

use super::pipeline::DEV;

const NAMES: [&str; 2] = ["canny", "union"];

fn config(name: &str) -> FluxControlNetConfig {
    let text = Golden::text(&format!("flux_controlnet/{name}/config.json"));
    FluxControlNetConfig::from_json(&text).unwrap()
}

/// InstantX's and Shakker Labs' ControlNets: `FLUX.1-dev-Controlnet-Canny` and `FLUX.1-dev-ControlNet-Union-Pro`.
#[test]
fn controlnets_have_the_residuals_of_their_blocks() {
    let text = r#"{"_class_name": "FluxControlNetModel", "_diffusers_version": "0.30.0.dev0", "attention_head_dim": 128,
        "axes_dims_rope": [16, 56, 56], "guidance_embeds": true, "in_channels": 64, "joint_attention_dim": 4096,
        "num_attention_heads": 24, "num_layers": 5, "num_mode": 10, "num_single_layers": 10, "patch_size": 1,
        "pooled_projection_dim": 768}"#;
    let config = FluxControlNetConfig::from_json(text).unwrap();
    assert_eq!(config.num_mode, Some(10));
    let b = Builder::new();
    let inputs = declare_inputs(&b, &config.transformer, [1, 6, 4]).unwrap();
    let control = declare(&b, "union", config.clone(), [1, 6]);
    let residuals = flux_controlnet(&b, &inputs, &control, Precision::F32, Remat::None).unwrap();
    assert_eq!((residuals.double.len(), residuals.single.len()), (5, 10));
    let graph = b.finish();
    // As diffusers counts them.
    assert_eq!(graph.parameter_count(), 3_301_956_608);
    for (field, expected) in [
        (
            "conditioning_embedding_channels\": 16",
            "conditioning_embedding_channels = 16 is not supported",
        ),
        ("num_mode\": 0", "num_mode = 0"),
        ("joint_attention_dimension\": 1", "unknown field"),
    ] {
        let error = FluxControlNetConfig::from_json(&format!("{{\"{field}}}")).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
}

/// A ControlNet's inputs, called after it.
fn declare(
    b: &Builder,
    name: &str,
    config: FluxControlNetConfig,
    [batch, image]: [usize; 2],
) -> FluxControl {
    let which = NAMES.iter().position(|other| *other == name).unwrap();
    let input = |key: &str, shape| b.input(&format!("{name}.{key}"), shape, &[]).unwrap();
    let tokens = [batch, image, config.transformer.in_channels];
    let mode = config.num_mode;
    FluxControl {
        root: root(which),
        latents: input("controlnet_cond", Shape::new(DType::F32, tokens)),
        scale: input("scale", Shape::scalar(DType::F32)),
        mode: mode.map(|_| input("mode", Shape::scalar(DType::S32))),
        config,
    }
}

/// diffusers in float64 on the float16 weights, against this graph in float32.
#[test]
fn residuals_and_what_they_change_are_diffusers() {
    let io = Golden::read("flux_controlnet/io.safetensors");
    let weights = "diffusion_pytorch_model";
    let transformer = Golden::read_folder("pipeline_flux_dev/transformer", weights);
    let nets = NAMES.map(|name| Golden::read_folder(&format!("flux_controlnet/{name}"), weights));
    let text = Golden::text("pipeline_flux_dev/transformer/config.json");
    let of_transformer = FluxTransformer2DConfig::from_json(&text).unwrap();

    let b = Builder::new();
    let [batch, image, _] = io.dims("in/hidden_states").try_into().unwrap();
    let tokens = io.dims("in/encoder_hidden_states")[1];
    let inputs = declare_inputs(&b, &of_transformer, [batch, image, tokens]).unwrap();
    let output = |name: &str, x| b.output(&format!("out/{name}"), x, None).unwrap();
    let mut both: Option<FluxResiduals> = None;
    let steered = |residuals: Option<&FluxResiduals>| {
        let inputs = FluxInputs {
            residuals,
            ..inputs
        };
        flux_transformer(&b, &of_transformer, inputs, Precision::F32, Remat::None).unwrap()
    };
    for name in NAMES {
        let control = declare(&b, name, config(name), [batch, image]);
        let residuals =
            flux_controlnet(&b, &inputs, &control, Precision::F32, Remat::None).unwrap();
        for (kind, residuals) in [("double", &residuals.double), ("single", &residuals.single)] {
            for (index, residual) in residuals.iter().enumerate() {
                output(&format!("{name}.{kind}.{index}"), *residual);
            }
        }
        output(name, steered(Some(&residuals)));
        both = Some(match both {
            None => residuals,
            Some(first) => first.add(&b, &residuals).unwrap(),
        });
    }
    output("both", steered(both.as_ref()));
    output("alone", steered(None));

    let graph = b.finish();
    let arguments: Vec<HostTensor> = graph
        .inputs
        .iter()
        .map(|input| match input.name.split_once('/') {
            Some(("transformer", key)) => transformer.tensor(key, &input.shape),
            Some(("controlnet", key)) => nets[0].tensor(key, &input.shape),
            Some((_, key)) => nets[1].tensor(key, &input.shape),
            None => io.tensor(&format!("in/{}", input.name), &input.shape),
        })
        .collect();
    let declared: Vec<&str> = graph
        .weights()
        .filter_map(|(_, w)| w.name.strip_prefix("controlnet_1/"))
        .collect();
    assert_eq!(declared.len(), nets[1].shapes().len());
    for (output, found) in
        graph
            .outputs
            .iter()
            .zip(&run_on(&unoptimized_session(), &graph, &arguments))
    {
        let error = rel_l2(found, &io, &output.name);
        eprintln!("{}: {error:.1e}", output.name);
        assert_close(&output.name, found, &io, 1e-5);
    }
}

/// The whole pipeline in 20 steps, each ControlNet with a scale and a part of the steps of its own.
#[test]
fn images_that_steer_make_the_latents_of_diffusers() {
    let recorded = Golden::read("flux_controlnet/images.safetensors");
    let dir = tempfile::tempdir().unwrap();
    let image = |name: &str| {
        let [height, width, _] = recorded.dims(name).try_into().unwrap();
        let bytes = recorded.values(name).iter().map(|v| *v as u8).collect();
        let path = dir.path().join(format!("{}.png", name.replace('/', "_")));
        image::RgbImage::from_raw(width as u32, height as u32, bytes)
            .unwrap()
            .save(&path)
            .unwrap();
        path.display().to_string()
    };
    let nets = NAMES.map(|name| golden("flux_controlnet").join(name).display().to_string());
    let images = ["in/image", "in/image_1"].map(image);
    let meta = &recorded.meta;
    let of = |which: usize, key: &str| meta[key][NAMES[which]].clone();
    let one = |which: usize| {
        vec![
            format!("controlnet_model_name_or_path={}", nets[which]),
            format!("controlnet_image={}", images[which]),
            format!("controlnet_conditioning_scale={}", of(which, "scales")),
            format!("control_guidance_start={}", of(which, "ranges")[0]),
            format!("control_guidance_end={}", of(which, "ranges")[1]),
        ]
    };
    let mode = format!("control_mode={}", meta["mode"]);
    let both: Vec<String> = one(0)
        .iter()
        .zip(one(1))
        .map(|(first, second)| {
            let (key, first) = first.split_once('=').unwrap();
            let (_, second) = second.split_once('=').unwrap();
            format!("{key}=[{first}, {second}]")
        })
        .collect();
    let run = |words: &[String]| {
        let always = [
            "use_controlnet=True",
            "num_inference_steps=20",
            "guidance_scale=3.5",
        ];
        let words: Vec<&str> = always
            .into_iter()
            .chain(words.iter().map(String::as_str))
            .collect();
        DEV.generate_from_seeds(&words)
    };
    for (case, words) in [
        ("canny", one(0)),
        ("union", [one(1), vec![mode.clone()]].concat()),
        (
            "both",
            [both, vec![format!("control_mode=[-1, {}]", meta["mode"])]].concat(),
        ),
    ] {
        let made = run(&words).unwrap();
        let error = distance(&samples(&made), recorded.values(&format!("out/{case}")));
        eprintln!("{case}: {error:.1e}");
        assert!(error < 1e-4, "{case}: {error:e}");
    }
    let refused = |words: &[String], expected: &str| match run(words) {
        Err(RecipeError::Usage(error)) => assert!(error.contains(expected), "{error}"),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("expected {expected}"),
    };
    refused(
        &one(1),
        "knows 3 kinds of images: say with control_mode=NUMBER",
    );
    let wrong = [one(1), vec!["control_mode=3".to_owned()]].concat();
    refused(&wrong, "knows 3 kinds of images, from 0 to 2");
    refused(&[one(0), vec![mode]].concat(), "knows one kind of images");
    let guided = [one(0), vec!["true_cfg_scale=2".to_owned()]].concat();
    refused(
        &guided,
        "true_cfg_scale=2 with use_controlnet=True is not built",
    );
    // A ControlNet of a UNet.
    let other = dir.path().join("sd15");
    fs::create_dir(&other).unwrap();
    fs::copy(
        golden("controlnet_sd15/controlnet/config.json"),
        other.join("config.json"),
    )
    .unwrap();
    let mut words = one(0);
    words[0] = format!("controlnet_model_name_or_path={}", other.display());
    let error = match run(&words) {
        Err(error) => error.to_string(),
        Ok(_) => panic!("a ControlNet of a UNet is taken"),
    };
    assert!(
        error.contains("FluxControlNetModel: _class_name"),
        "{error}"
    );
}
