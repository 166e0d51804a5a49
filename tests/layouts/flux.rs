//! FLUX.1 in one file: the transformer by the names of Black Forest Labs' code.

use std::fs;

use maxdiff::dtype::DType;
use maxdiff::graph::Builder;
use maxdiff::host_tensor::HostTensor;
use maxdiff::models::flux::{self, FluxTransformer2DConfig};
use maxdiff::models::{Family, Part};
use maxdiff::nn::{Precision, Remat};
use maxdiff::shape::Shape;
use maxdiff::weights::match_parameters;
use maxdiff::weights::source::{Layout, ModelSource, PipelineKind};
use serde_json::{Value, json};

use super::convert::converted;
use super::{Recorded, keep};

const DENOISER: &str = "model.diffusion_model.";

#[test]
fn files_hold_what_diffusers_makes_of_them() {
    let dir = tempfile::tempdir().unwrap();
    let recorded = Recorded::read("flux");
    let (folder, report) = converted(dir.path(), "flux");
    let path = dir.path().join("flux.safetensors");
    let single = ModelSource::open(&path).unwrap();
    assert_eq!(single.family, Family::FluxDev);
    assert_eq!(single.layout, Layout::SingleFile);
    assert!(single.ignored.is_empty(), "{:?}", single.ignored);
    recorded.assert_holds(&single);
    for (part, recorded) in &recorded.parts {
        for (key, expected) in &recorded.config {
            // No tensor tells these; a tiny model has other ones than the family.
            if !["norm_num_groups", "axes_dims_rope"].contains(&key.as_str()) {
                let found = &single.components[part].config;
                assert_eq!(found.get(key), Some(expected), "{part} {key}");
            }
        }
    }
    let scale = &single.components[&Part::Vae].config;
    assert_eq!(scale["scaling_factor"], json!(0.3611));
    assert_eq!(scale["shift_factor"], json!(0.1159));
    assert_eq!(single.scheduler.as_ref().unwrap()["shift"], json!(3.0));

    assert_eq!(report["recipe"], json!("flux-dev"));
    let source = ModelSource::open(&folder).unwrap();
    assert_eq!(source.family, Family::FluxDev);
    assert_eq!(source.layout, Layout::Pipeline);
    recorded.assert_holds(&source);
    assert_eq!(source.scheduler, single.scheduler);
    for (part, component) in &source.components {
        assert_eq!(component.config, single.components[part].config);
    }
    let index = fs::read_to_string(folder.join("model_index.json")).unwrap();
    let index: Value = serde_json::from_str(&index).unwrap();
    let transformer = json!(["diffusers", "FluxTransformer2DModel"]);
    assert_eq!(index["transformer"], transformer);
    let t5 = json!(["transformers", "T5EncoderModel"]);
    assert_eq!(index["text_encoder_2"], t5);

    let component = &single.components[&Part::Transformer];
    let mut config = component.config.clone();
    config.insert("axes_dims_rope".to_owned(), json!([2, 2, 4]));
    let config = FluxTransformer2DConfig::from_map(config).unwrap();
    let b = Builder::new();
    let inputs = flux::declare_inputs(&b, &config, [1, 6, 2]).unwrap();
    flux::flux_transformer(&b, &config, inputs, Precision::F32, Remat::None).unwrap();
    let declared: Vec<(String, Vec<usize>)> = b
        .finish()
        .weights()
        .map(|(_, w)| (w.key().to_owned(), w.shape.dims.clone()))
        .collect();
    match_parameters(&declared, &component.checkpoint).unwrap();
}

#[test]
fn a_transformer_alone_tells_which_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("transformer.safetensors");
    let recorded = Recorded::read("flux");
    for prefix in ["", DENOISER] {
        recorded.write(&path, &[], |tensors| keep(tensors, DENOISER, prefix));
        let source = ModelSource::open(&path).unwrap();
        assert_eq!(source.family, Family::FluxDev);
        let transformer = source.component(Part::Transformer).unwrap();
        recorded.assert_part(Part::Transformer, &transformer.checkpoint);
        let error = source.component(Part::Vae).unwrap_err().to_string();
        let expected = "incomplete: FLUX.1 dev needs vae, text_encoder, text_encoder_2; expected them in the same file, \
                        as in a file of a whole model; found transformer";
        assert!(error.ends_with(expected), "{error}");
    }

    recorded.write(&path, &[], |tensors| {
        tensors.retain(|(name, _)| !name.contains("guidance_in."));
    });
    let source = ModelSource::open(&path).unwrap();
    assert_eq!(source.family, Family::FluxSchnell);
    assert_eq!(source.scheduler.unwrap()["shift"], json!(1.0));
    let config = &source.components[&Part::Transformer].config;
    assert_eq!(config["guidance_embeds"], json!(false));

    // Those of Fill and with a control image see more than the 16 channels that they make.
    for (taken, kind) in [(96, PipelineKind::Inpaint), (32, PipelineKind::Control)] {
        recorded.write(&path, &[], |tensors| {
            let name = format!("{DENOISER}img_in.weight");
            let tensor = tensors.iter_mut().find(|(n, _)| *n == name).unwrap();
            let shape = Shape::new(DType::F16, [24, taken]);
            tensor.1 = HostTensor::new(shape, vec![0; 2 * 24 * taken]).unwrap();
        });
        let source = ModelSource::open(&path).unwrap();
        assert_eq!((source.family, source.kind), (Family::FluxDev, kind));
        let config = &source.components[&Part::Transformer].config;
        assert_eq!(config["in_channels"], json!(taken));
        assert_eq!(config["out_channels"], json!(16));
    }
}
