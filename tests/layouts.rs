//! Layouts of Stable Diffusion checkpoints against what diffusers makes of them (`scripts/oracles/layouts.py`).

mod convert;
mod file;
mod flux;
mod pixart;
mod quantize;
mod sd3;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::common::Golden;
use maxdiff::dtype::DType;
use maxdiff::graph::{Builder, Graph};
use maxdiff::host_tensor::HostTensor;
use maxdiff::models::clip::{ClipTextConfig, clip_text};
use maxdiff::models::unet::{UNet2DConditionConfig, declare_inputs, unet};
use maxdiff::models::{Family, Part};
use maxdiff::nn::{Precision, Remat};
use maxdiff::shape::Shape;
use maxdiff::weights::source::{Layout, ModelSource, PipelineKind};
use maxdiff::weights::{Checkpoint, TensorSpec, TensorView, match_parameters, save};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use convert::converted;

const MODELS: [(&str, Family); 4] = [
    ("sd1", Family::Sd1),
    ("sd2", Family::Sd2),
    ("sdxl", Family::Sdxl),
    ("sdxl_refiner", Family::SdxlRefiner),
];

/// A recorded model.
struct Recorded {
    /// The tensors of the single file.
    file: Vec<TensorSpec>,
    parts: BTreeMap<Part, RecordedPart>,
}

struct RecordedPart {
    config: Map<String, Value>,
    /// Name, sizes, and the start of the hash.
    tensors: Vec<(String, Vec<usize>, String)>,
}

fn dims(value: &Value) -> Vec<usize> {
    serde_json::from_value(value.clone()).unwrap()
}

fn string(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}

fn part(name: &str) -> Part {
    Part::from_name(name).unwrap()
}

impl Recorded {
    fn read(name: &str) -> Self {
        let text = Golden::text(&format!("layouts/{name}.json"));
        let golden: Value = serde_json::from_str(&text).unwrap();
        let file = golden["file"].as_array().unwrap().iter().map(|entry| {
            let dtype = match entry[1].as_str().unwrap() {
                "F16" => DType::F16,
                "F32" => DType::F32,
                "I32" => DType::S32,
                "I64" => DType::S64,
                other => panic!("{other}"),
            };
            TensorSpec {
                name: string(&entry[0]),
                shape: Shape::new(dtype, dims(&entry[2])),
            }
        });
        let parts = golden["parts"]
            .as_object()
            .unwrap()
            .iter()
            .map(|(name, p)| {
                let tensors = p["tensors"].as_array().unwrap().iter();
                let recorded = RecordedPart {
                    config: p["config"].as_object().unwrap().clone(),
                    tensors: tensors
                        .map(|t| (string(&t[0]), dims(&t[1]), string(&t[2])))
                        .collect(),
                };
                (part(name), recorded)
            });
        Recorded {
            file: file.collect(),
            parts: parts.collect(),
        }
    }

    /// The tensors with the values that the recorded hashes are of.
    fn filled(&self) -> Vec<(String, HostTensor)> {
        let fill = |(index, spec): (usize, &TensorSpec)| {
            let words = (0..spec.shape.bytes() as u64 / 2).map(|i| pattern(index as u64, i));
            let data = words.flat_map(u16::to_le_bytes).collect();
            let tensor = HostTensor::new(spec.shape.clone(), data).unwrap();
            (spec.name.clone(), tensor)
        };
        self.file.iter().enumerate().map(fill).collect()
    }

    /// Writes the single file, its tensors changed by `change`.
    fn write(
        &self,
        path: &Path,
        metadata: &[(&str, &str)],
        change: impl FnOnce(&mut Vec<(String, HostTensor)>),
    ) {
        let mut tensors = self.filled();
        change(&mut tensors);
        write(path, metadata, &tensors);
    }

    fn assert_holds(&self, source: &ModelSource) {
        let parts: Vec<Part> = source.components.keys().copied().collect();
        assert_eq!(parts, self.parts.keys().copied().collect::<Vec<_>>());
        for part in parts {
            self.assert_part(part, &source.components[&part].checkpoint);
        }
    }

    fn assert_part(&self, part: Part, found: &Checkpoint) {
        let found: Vec<(String, Vec<usize>, String)> = found
            .iter()
            .map(|(name, shape)| {
                let tensor = found.read(name).unwrap();
                assert_eq!(&tensor.shape, shape);
                (name.to_owned(), shape.dims.clone(), hash(&tensor.data))
            })
            .collect();
        let expected = &self.parts[&part].tensors;
        let names = |t: &[(String, Vec<usize>, String)]| -> Vec<String> {
            t.iter().map(|(name, _, _)| name.clone()).collect()
        };
        assert_eq!(names(&found), names(expected), "{part}");
        for (found, expected) in found.iter().zip(expected) {
            assert_eq!(found, expected, "{part}");
        }
    }
}

/// Number `i` of the recorded pattern of tensor `index`.
fn pattern(index: u64, i: u64) -> u16 {
    let n = (i + index * 65_537).wrapping_mul(2_654_435_761) & 0xffff_ffff;
    (n >> 16) as u16 & 0xbfff
}

fn hash(data: &[u8]) -> String {
    let digest = Sha256::digest(data);
    digest.iter().take(6).map(|b| format!("{b:02x}")).collect()
}

fn write(path: &Path, metadata: &[(&str, &str)], tensors: &[(String, HostTensor)]) {
    let views = tensors.iter().map(|(name, tensor)| TensorView {
        name,
        dtype: tensor.shape.dtype,
        dims: &tensor.shape.dims,
        data: &tensor.data,
    });
    let metadata = metadata
        .iter()
        .map(|&(k, v)| (k.to_owned(), v.to_owned()))
        .collect();
    save(path, views, &metadata).unwrap();
}

/// The parameters that the graph of a part declares.
fn declared(part: Part, config: &Map<String, Value>) -> Vec<(String, Vec<usize>)> {
    let b = Builder::new();
    let mut config = config.clone();
    match part {
        Part::Unet => {
            // No tensor tells the number of groups; the tiny model's is less than the family's.
            config.insert("norm_num_groups".to_owned(), json!(4));
            let config = UNet2DConditionConfig::from_map(config).unwrap();
            let inputs = declare_inputs(&b, &config, [1, 8, 8, 5], DType::F32).unwrap();
            unet(&b, &config, inputs, Precision::F32, Remat::None).unwrap();
        }
        Part::TextEncoder | Part::TextEncoder2 => {
            let config = ClipTextConfig::from_map(config).unwrap();
            let ids = b
                .input("input_ids", Shape::new(DType::S32, [1, 5]), &[])
                .unwrap();
            clip_text(&b, part.name(), &config, ids, Precision::F32, Remat::None).unwrap();
        }
        Part::Vae | Part::Transformer | Part::TextEncoder3 => {
            unreachable!("compared with the recorded names")
        }
    }
    let graph: Graph = b.finish();
    graph
        .weights()
        .map(|(_, w)| (w.key().to_owned(), w.shape.dims.clone()))
        .collect()
}

#[test]
fn single_files_hold_what_diffusers_makes_of_them() {
    let dir = tempfile::tempdir().unwrap();
    for (name, family) in MODELS {
        let recorded = Recorded::read(name);
        let path = dir.path().join(format!("{name}.safetensors"));
        recorded.write(&path, &[], |_| {});
        let source = ModelSource::open(&path).unwrap();
        assert_eq!(source.family, family);
        assert_eq!(source.layout, Layout::SingleFile);
        assert_eq!(source.kind, PipelineKind::Text);
        assert!(source.tokenizers.is_empty());
        recorded.assert_holds(&source);
        for (part, component) in &source.components {
            if *part != Part::Vae {
                let expected = declared(*part, &component.config);
                match_parameters(&expected, &component.checkpoint).unwrap();
            }
        }
    }
}

#[test]
fn tensors_tell_the_configuration() {
    let dir = tempfile::tempdir().unwrap();
    for (name, _) in MODELS {
        let recorded = Recorded::read(name);
        let path = dir.path().join(format!("{name}.safetensors"));
        recorded.write(&path, &[], |_| {});
        let source = ModelSource::open(&path).unwrap();
        for (part, recorded) in &recorded.parts {
            let found = &source.components[part].config;
            for (key, expected) in &recorded.config {
                // Numbers of groups are not told. A level without transformers has no number of their layers.
                if key == "norm_num_groups"
                    || (name, key.as_str()) == ("sdxl_refiner", "transformer_layers_per_block")
                {
                    continue;
                }
                assert_eq!(&found[key], expected, "{name} {part} {key}");
            }
        }
        let scale = if name.starts_with("sdxl") {
            0.13025
        } else {
            0.18215
        };
        assert_eq!(
            source.components[&Part::Vae].config["scaling_factor"],
            json!(scale)
        );
    }
    let refiner = ModelSource::open(&dir.path().join("sdxl_refiner.safetensors")).unwrap();
    let depths = &refiner.components[&Part::Unet].config["transformer_layers_per_block"];
    assert_eq!(depths, &json!([1, 2, 2]));
}

#[test]
fn a_denoiser_is_replaced_by_one_in_either_layout() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(format!("{name}.safetensors"));
    let recorded = Recorded::read("sdxl");
    recorded.write(&at("base"), &[], |tensors| {
        for (_, tensor) in tensors {
            tensor.data.fill(0);
        }
    });
    recorded.write(&at("whole"), &[], |_| {});
    let whole = ModelSource::open(&at("whole")).unwrap();
    let unet = &whole.components[&Part::Unet].checkpoint;
    let tensors: Vec<(String, HostTensor)> = unet
        .names()
        .map(|name| (name.to_owned(), unet.read(name).unwrap()))
        .collect();
    write(&at("diffusers"), &[], &tensors);
    for file in ["whole", "diffusers"] {
        let mut source = ModelSource::open(&at("base")).unwrap();
        source.replace_denoiser(&at(file)).unwrap();
        recorded.assert_part(Part::Unet, &source.components[&Part::Unet].checkpoint);
    }

    Recorded::read("sd1").write(&at("sd1"), &[], |_| {});
    let mut source = ModelSource::open(&at("base")).unwrap();
    let error = source.replace_denoiser(&at("sd1")).unwrap_err().to_string();
    assert!(error.contains("this is Stable Diffusion 1.x; "), "{error}");
    assert!(error.contains("base.safetensors expects SDXL"), "{error}");
}

#[test]
fn what_a_file_holds_besides_is_listed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sd2.safetensors");
    Recorded::read("sd2").write(&path, &[], |tensors| {
        let other = HostTensor::from_f32([1], &[0.0]).unwrap();
        tensors.push(("embedding_manager.x".to_owned(), other));
    });
    let source = ModelSource::open(&path).unwrap();
    let ignored: Vec<(&str, usize, &str)> = source
        .ignored
        .iter()
        .map(|i| (i.reason, i.names.len(), i.names[0].as_str()))
        .collect();
    assert_eq!(
        ignored,
        [
            (
                "averaged weights; the others are used",
                3,
                "model_ema.decay"
            ),
            ("of no known part", 1, "embedding_manager.x"),
            (
                "the last layer, whose result this model does not use",
                12,
                "cond_stage_model.model.transformer.resblocks.23.attn.in_proj_bias"
            ),
            (
                "the noise schedule, which the family decides",
                3,
                "alphas_cumprod"
            ),
            (
                "the projection, which this text encoder's model does not use",
                1,
                "cond_stage_model.model.text_projection"
            ),
            (
                "used in training only",
                1,
                "cond_stage_model.model.logit_scale"
            ),
        ]
    );
    assert_eq!(
        source.ignored[0].to_string(),
        "model_ema.decay and 2 more: averaged weights; the others are used"
    );
}

#[test]
fn a_name_of_no_dialect_stays_for_the_comparison_to_tell() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sd1.safetensors");
    let strange = "model.diffusion_model.input_blocks.1.0.in_layers.5.weight";
    Recorded::read("sd1").write(&path, &[], |tensors| {
        let other = HostTensor::from_f32([1], &[0.0]).unwrap();
        tensors.push((strange.to_owned(), other));
    });
    let source = ModelSource::open(&path).unwrap();
    let unet = source.component(Part::Unet).unwrap();
    let error =
        match_parameters(&declared(Part::Unet, &unet.config), &unet.checkpoint).unwrap_err();
    assert_eq!(
        error.extra,
        [("input_blocks.1.0.in_layers.5.weight".to_owned(), vec![1])]
    );
    assert!(error.missing.is_empty() && error.misshapen.is_empty());
}

/// Puts nine channels into the UNet's first convolution.
fn for_inpainting(tensors: &mut [(String, HostTensor)]) {
    let conv = "model.diffusion_model.input_blocks.0.0.weight";
    let (_, tensor) = tensors.iter_mut().find(|(name, _)| name == conv).unwrap();
    *tensor = HostTensor::zeros(Shape::new(DType::F16, [8, 9, 3, 3]));
}

#[test]
fn text_encoders_of_other_versions_load_to_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let recorded = Recorded::read("sd1");
    recorded.write(&path, &[], |tensors| {
        for (name, _) in tensors {
            *name = name.replace("transformer.text_model.", "transformer.");
        }
    });
    recorded.assert_holds(&ModelSource::open(&path).unwrap());

    // A projection that is a linear layer's weight already.
    let recorded = Recorded::read("sdxl");
    recorded.write(&path, &[], |tensors| {
        let projection = "conditioner.embedders.1.model.text_projection";
        let (name, tensor) = tensors.iter_mut().find(|(n, _)| n == projection).unwrap();
        name.push_str(".weight");
        let [rows, columns] = tensor.shape.dims[..] else {
            panic!("{}", tensor.shape)
        };
        let element = |i: usize| 2 * (i % rows * columns + i / rows);
        tensor.data = (0..rows * columns)
            .flat_map(|i| [tensor.data[element(i)], tensor.data[element(i) + 1]])
            .collect();
        tensor.shape.dims = vec![columns, rows];
    });
    recorded.assert_holds(&ModelSource::open(&path).unwrap());
}

#[test]
fn nine_channels_are_for_inpainting() {
    let dir = tempfile::tempdir().unwrap();
    for (name, family) in MODELS {
        let path = dir.path().join(format!("{name}.safetensors"));
        Recorded::read(name).write(&path, &[], |tensors| for_inpainting(tensors));
        let source = ModelSource::open(&path).unwrap();
        assert_eq!(
            (source.kind, source.family),
            (PipelineKind::Inpaint, family)
        );
        let unet = source.component(Part::Unet).unwrap();
        assert_eq!(unet.config["in_channels"], json!(9));
        match_parameters(&declared(Part::Unet, &unet.config), &unet.checkpoint).unwrap();
        assert_eq!(
            source.scheduler.unwrap()["prediction_type"],
            json!("epsilon")
        );
    }
}

#[test]
fn prediction_and_schedule_are_the_familys_or_what_the_file_says() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let open = |name: &str, metadata: &[(&str, &str)], marks: &[&str]| {
        Recorded::read(name).write(&path, metadata, |tensors| {
            for mark in marks {
                let empty = HostTensor::zeros(Shape::new(DType::F32, [0]));
                tensors.push(((*mark).to_owned(), empty));
            }
        });
        let source = ModelSource::open(&path).unwrap();
        assert!(
            source
                .ignored
                .iter()
                .all(|i| !i.names.iter().any(|n| marks.contains(&n.as_str())))
        );
        (source.scheduler.unwrap(), source.notes)
    };
    let (sd1, notes) = open("sd1", &[], &[]);
    assert_eq!(sd1["prediction_type"], json!("epsilon"));
    assert!(notes.is_empty());
    let (sd2, notes) = open("sd2", &[], &[]);
    assert_eq!(sd2["prediction_type"], json!("v_prediction"));
    assert!(notes[0].contains("prediction_type=epsilon"), "{notes:?}");
    let (sd2, notes) = open("sd2", &[("modelspec.prediction_type", "epsilon")], &[]);
    assert_eq!(sd2["prediction_type"], json!("epsilon"));
    assert!(notes.is_empty());
    let (xl, _) = open("sdxl", &[("modelspec.prediction_type", "v")], &[]);
    assert_eq!(xl["prediction_type"], json!("v_prediction"));
    assert_eq!(xl["timestep_spacing"], json!("leading"));
    let (xl, _) = open("sdxl", &[], &["v_pred", "ztsnr"]);
    assert_eq!(xl["prediction_type"], json!("v_prediction"));
    assert_eq!(xl["rescale_betas_zero_snr"], json!(true));
    assert_eq!(xl["timestep_spacing"], json!("trailing"));
    let (xl, notes) = open("sdxl", &[("modelspec.prediction_type", "flow")], &[]);
    assert_eq!(xl["prediction_type"], json!("epsilon"));
    assert!(notes[0].contains("\"flow\""), "{notes:?}");
}

#[test]
fn a_unet_alone_is_opened_and_a_vae_alone_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (name, family) in MODELS {
        let recorded = Recorded::read(name);
        for prefix in ["", "model.diffusion_model."] {
            let path = dir.path().join("unet.safetensors");
            recorded.write(&path, &[], |tensors| {
                keep(tensors, "model.diffusion_model.", prefix)
            });
            let source = ModelSource::open(&path).unwrap();
            assert_eq!(source.family, family);
            assert!(source.ignored.is_empty());
            assert_eq!(source.components.len(), 1);
            recorded.assert_part(
                Part::Unet,
                &source.component(Part::Unet).unwrap().checkpoint,
            );
            let error = source.component(Part::Vae).unwrap_err().to_string();
            let missing: Vec<&str> = match family {
                Family::Sdxl => vec!["vae", "text_encoder", "text_encoder_2"],
                Family::SdxlRefiner => vec!["vae", "text_encoder_2"],
                Family::Sd1 | Family::Sd2 | Family::Pixels => vec!["vae", "text_encoder"],
                other => unreachable!("{other} is not among them"),
            };
            let expected = format!(
                "incomplete: {} needs {}; expected them in the same file, as in a file of a whole model; found unet",
                family.title(),
                missing.join(", ")
            );
            assert!(error.ends_with(&expected), "{error}");
        }
        for prefix in ["", "first_stage_model.", "vae."] {
            let path = dir.path().join("vae.safetensors");
            recorded.write(&path, &[], |tensors| {
                keep(tensors, "first_stage_model.", prefix)
            });
            let error = ModelSource::open(&path).unwrap_err().to_string();
            assert!(error.contains("this is a VAE alone"), "{error}");
            let whole = dir.path().join("whole.safetensors");
            recorded.write(&whole, &[], |tensors| {
                tensors.retain(|(name, _)| !name.starts_with("first_stage_model."));
            });
            let mut source = ModelSource::open(&whole).unwrap();
            source.replace_autoencoder(&path).unwrap();
            recorded.assert_part(Part::Vae, &source.components[&Part::Vae].checkpoint);
        }
    }
}

/// Keeps the tensors under `prefix` and puts them under another.
fn keep(tensors: &mut Vec<(String, HostTensor)>, prefix: &str, new: &str) {
    tensors.retain(|(name, _)| name.starts_with(prefix));
    for (name, _) in tensors {
        *name = format!("{new}{}", &name[prefix.len()..]);
    }
}

/// Rewrites one part of a diffusers folder with other names; what `rename` gives nothing for is left out.
fn rename_part(folder: &Path, from: &str, to: &str, rename: impl Fn(&str) -> Option<String>) {
    let file = Checkpoint::open(&folder.join(from)).unwrap();
    let tensors: Vec<(String, HostTensor)> = file
        .names()
        .filter_map(|name| Some((rename(name)?, file.read(name).unwrap())))
        .collect();
    fs::remove_file(folder.join(from)).unwrap();
    write(&folder.join(to), &[], &tensors);
}

#[test]
fn folders_of_other_versions_load_to_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, _) = converted(dir.path(), "sd1");
    let recorded = Recorded::read("sd1");
    let vae = "diffusion_pytorch_model.safetensors";
    rename_part(&folder.join("vae"), vae, vae, |name| {
        let old = [
            (".to_q.", ".query."),
            (".to_k.", ".key."),
            (".to_v.", ".value."),
        ];
        let name = name.replace(".to_out.0.", ".proj_attn.");
        Some(old.iter().fold(name, |n, (new, old)| n.replace(new, old)))
    });
    let text = "model.safetensors";
    rename_part(
        &folder.join("text_encoder"),
        text,
        "model.fp16.safetensors",
        |name| Some(name.strip_prefix("text_model.").unwrap().to_owned()),
    );
    let source = ModelSource::open(&folder).unwrap();
    recorded.assert_holds(&source);

    // Without the index, and without all parts.
    fs::remove_file(folder.join("model_index.json")).unwrap();
    fs::remove_dir_all(folder.join("vae")).unwrap();
    let source = ModelSource::open(&folder).unwrap();
    assert_eq!(source.family, Family::Sd1);
    let parts: Vec<Part> = source.components.keys().copied().collect();
    assert_eq!(parts, [Part::Unet, Part::TextEncoder]);
    let error = source.component(Part::Vae).unwrap_err().to_string();
    let expected = format!(
        "incomplete: Stable Diffusion 1.x needs vae; expected in {}/; found unet, text_encoder",
        folder.join("vae").display()
    );
    assert!(error.ends_with(&expected), "{error}");
    // A part that the index rules out.
    let index = json!({"_class_name": "StableDiffusionPipeline", "text_encoder": [null, null],
        "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"]});
    fs::write(folder.join("model_index.json"), index.to_string()).unwrap();
    let source = ModelSource::open(&folder).unwrap();
    assert_eq!(source.components.len(), 1);
    assert_eq!(source.ignored[0].names, ["safety_checker"]);
}

#[test]
fn a_folder_with_one_file_is_that_file() {
    let dir = tempfile::tempdir().unwrap();
    let recorded = Recorded::read("sdxl");
    recorded.write(&dir.path().join("sd_xl.safetensors"), &[], |_| {});
    fs::write(dir.path().join("README.md"), "").unwrap();
    let source = ModelSource::open(dir.path()).unwrap();
    assert_eq!(source.path, dir.path().join("sd_xl.safetensors"));
    recorded.assert_holds(&source);
    fs::copy(&source.path, dir.path().join("other.safetensors")).unwrap();
    let error = ModelSource::open(dir.path()).unwrap_err().to_string();
    assert!(
        error.ends_with(
            "several checkpoints; name one of them: other.safetensors, sd_xl.safetensors"
        ),
        "{error}"
    );
}

#[test]
fn the_wrong_family_is_told_with_its_configuration() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("v2-1.safetensors");
    Recorded::read("sd2").write(&path, &[], |_| {});
    let source = ModelSource::open(&path).unwrap();
    source.expect_family(Family::Sd2, "base21.yml").unwrap();
    let error = source
        .expect_family(Family::Sdxl, "base_xl.yml")
        .unwrap_err()
        .to_string();
    assert!(
        error.ends_with("this is Stable Diffusion 2.x; base_xl.yml expects SDXL; use sd21"),
        "{error}"
    );
}
