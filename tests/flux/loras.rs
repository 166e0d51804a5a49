//! LoRAs that give FLUX.1 an image that steers, and LoRAs beside weights that are stored as integers.

use std::path::Path;

use crate::common::{Golden, distance, golden, program, samples, text};
use maxdiff::models::Part;
use maxdiff::pipelines::Event;
use maxdiff::weights::source::{ModelSource, PipelineKind};

use super::pipeline::DEV;

fn lora(path: &Path, scale: f32) -> Vec<String> {
    vec![
        format!("lora_config.lora_model_name_or_path=['{}']", path.display()),
        format!("lora_config.scale=[{scale}]"),
    ]
}

/// Black Forest Labs' layers with biases, a wider first layer, and norms in place of the model's.
#[test]
fn a_control_lora_makes_the_latents_of_diffusers() {
    let recorded = Golden::read("flux_control_lora/images.safetensors");
    let dir = tempfile::tempdir().unwrap();
    let [height, width, _] = recorded.dims("in/image").try_into().unwrap();
    let bytes = recorded.values("in/image").iter().map(|v| *v as u8);
    let image = dir.path().join("image.png");
    image::RgbImage::from_raw(width as u32, height as u32, bytes.collect())
        .unwrap()
        .save(&image)
        .unwrap();
    let file = golden("flux_control_lora/lora.safetensors");
    let run = |scale, more: &[&str]| {
        let words = lora(&file, scale);
        let always = ["num_inference_steps=6", "guidance_scale=3.5"];
        let words: Vec<&str> = always
            .into_iter()
            .chain(words.iter().map(String::as_str))
            .chain(more.iter().copied())
            .collect();
        DEV.generate_from_seeds(&words)
    };
    let control = format!("controlnet_image={}", image.display());
    for (case, scale) in [("control", 1.0), ("control_half", 0.5)] {
        let made = run(scale, &[&control]).unwrap();
        let error = distance(&samples(&made), recorded.values(&format!("out/{case}")));
        eprintln!("{case}: {error:.1e}");
        assert!(error < 1e-4, "{case}: {error:e}");
    }
    let refused = |scale, more: &[&str], expected: &str| {
        let error = run(scale, more).err().unwrap().to_string();
        assert!(error.contains(expected), "{error}");
    };
    refused(1.0, &[], "give controlnet_image=FILE");
    // Without effect it widens nothing.
    refused(0.0, &[&control], "takes no image that steers");
}

#[test]
fn a_widened_model_has_zeros_for_the_image_that_steers() {
    let dir = DEV.folder();
    let mut source = ModelSource::open(dir.path()).unwrap();
    let before = source.components[&Part::Transformer]
        .checkpoint
        .read("x_embedder.weight")
        .unwrap();
    assert_eq!(source.kind, PipelineKind::Text);
    source.widen_tokens(32).unwrap();
    assert_eq!(source.kind, PipelineKind::Control);
    let component = &source.components[&Part::Transformer];
    assert_eq!(component.config["in_channels"], 32);
    assert_eq!(component.config["out_channels"], 16);
    let wide = component.checkpoint.read("x_embedder.weight").unwrap();
    assert_eq!(wide.shape.dims, [16, 32]);
    let (before, wide) = (before.to_f32_vec().unwrap(), wide.to_f32_vec().unwrap());
    for (wide, row) in wide.chunks(32).zip(before.chunks(16)) {
        assert_eq!(&wide[..16], row);
        assert_eq!(&wide[16..], [0.0; 16]);
    }
    let error = source.widen_tokens(64).unwrap_err().to_string();
    assert!(error.contains("cannot be shown with 64 columns"), "{error}");
}

/// Each dialect, beside weights that are stored in int8: as merged into the floats that these stand for.
#[test]
fn a_lora_stands_beside_stored_integers() {
    let base = DEV.folder();
    let out = tempfile::tempdir().unwrap();
    let stored = out.path().join("int8");
    let quantize = program(["quantize", "flux-dev"])
        .arg("--output")
        .arg(&stored)
        .arg(format!(
            "pretrained_model_name_or_path={}",
            base.path().display()
        ))
        .args(["quantization=int8_w8a16", "weights_dtype=float32"])
        .output()
        .unwrap();
    assert!(quantize.status.success(), "{}", text(&quantize.stderr));
    let from = format!("pretrained_model_name_or_path={}", stored.display());
    let run = |file: Option<&Path>, more: &[&str]| {
        let words = file.map_or(Vec::new(), |file| lora(file, 0.75));
        let mut changed = 0;
        let mut observer = |event: Event<'_>| {
            if let Event::Lora { weights, .. } = event {
                changed = weights;
            }
            Ok(())
        };
        let steps = [from.as_str(), "num_inference_steps=2", "guidance_scale=3.5"];
        let words: Vec<&str> = steps
            .into_iter()
            .chain(words.iter().map(String::as_str))
            .chain(more.iter().copied())
            .collect();
        let made = DEV.generate_observed(&words, true, &mut observer).unwrap();
        (samples(&made), changed)
    };
    let (without, _) = run(None, &[]);
    for name in ["fluxattention_xlabs", "fluxattention_onetrainer"] {
        let file = golden("lora_transformers").join(format!("{name}.safetensors"));
        let (beside, changed) = run(Some(&file), &[]);
        let (merged, same) = run(Some(&file), &["dequantize=True"]);
        assert_eq!(changed, same);
        let (error, effect) = (distance(&beside, &merged), distance(&without, &merged));
        eprintln!("{name}: {error:.1e}, the LoRA's effect {effect:.1e}");
        assert!(
            error < 1e-4 && effect > 1e-2,
            "{name}: {error:e}, {effect:e}"
        );
    }
}
