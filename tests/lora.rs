//! LoRA files in every dialect against what diffusers and PEFT compute with them.

mod transformers;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::common::{Golden, assert_close, distance, keeping_session, rel_l2, run_on};
use maxdiff::dtype::DType;
use maxdiff::graph::{Builder, Graph, InputKind};
use maxdiff::host_tensor::HostTensor;
use maxdiff::models::clip::{ClipTextConfig, clip_text};
use maxdiff::models::unet::{UNet2DConditionConfig, declare_inputs, unet};
use maxdiff::nn::{Precision, Remat};
use maxdiff::quant::{self, Policy};
use maxdiff::shape::Shape;
use maxdiff::weights::lora::{Adapter, LoraFile, LoraScale, LoraTarget, beside};

fn lora(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden/lora")
        .join(name)
}

/// One part of a model: its program, its base weights, and its recorded inputs.
struct Part {
    root: &'static str,
    graph: Graph,
    weights: Golden,
    io: Golden,
    /// The name of the program's result among the recorded ones of a case.
    result: &'static str,
}

impl Part {
    fn unet(model: &str, int8: bool) -> Part {
        let folder = format!("unet_{model}");
        let io = Golden::read(&format!("{folder}/io.safetensors"));
        let text = Golden::text(&format!("{folder}/config.json"));
        let config = UNet2DConditionConfig::from_json(&text).unwrap();
        let b = Builder::new();
        let [batch, _, height, width] = io.dims("in/sample").try_into().unwrap();
        let tokens = io.dims("in/encoder_hidden_states")[1];
        let inputs =
            declare_inputs(&b, &config, [batch, height, width, tokens], DType::F32).unwrap();
        let y = unet(&b, &config, inputs, Precision::F32, Remat::None).unwrap();
        if int8 {
            quant::annotate(
                &b,
                // A part has all kinds of layers, and a program of it compiles in half the time.
                &Policy::aqt_int8(
                    "unet/down_blocks.",
                    0,
                    Vec::new(),
                    &maxdiff::models::unet::INT8_FLOAT_LAYERS,
                )
                .unwrap(),
            )
            .unwrap();
        }
        b.output("sample", y, None).unwrap();
        Part {
            root: "unet",
            graph: b.finish(),
            weights: Golden::read_folder(&folder, "diffusion_pytorch_model"),
            io,
            result: "sample",
        }
    }

    fn text_encoder(root: &'static str) -> Part {
        let folder = match root {
            "text_encoder" => "clip_quick_gelu",
            _ => "clip_gelu",
        };
        let io = Golden::read(&format!("{folder}/io.safetensors"));
        let config =
            ClipTextConfig::from_json(&Golden::text(&format!("{folder}/config.json"))).unwrap();
        let b = Builder::new();
        let ids = Shape::new(DType::S32, io.dims("in/input_ids"));
        let ids = b.input("input_ids", ids, &[]).unwrap();
        let y = clip_text(&b, root, &config, ids, Precision::F32, Remat::None).unwrap();
        b.output("y", y.text_embeds.unwrap_or(y.last_hidden_state), None)
            .unwrap();
        Part {
            root,
            graph: b.finish(),
            weights: Golden::read_folder(folder, "model"),
            io,
            result: root,
        }
    }

    fn all(model: &str) -> Vec<Part> {
        let mut parts = vec![Part::unet(model, false), Part::text_encoder("text_encoder")];
        if model == "sdxl" {
            parts.push(Part::text_encoder("text_encoder_2"));
        }
        parts
    }

    /// The graph's only output, with `weight` giving each weight.
    fn run(&self, graph: &Graph, weight: &dyn Fn(&str, &Shape) -> HostTensor) -> HostTensor {
        let arguments: Vec<HostTensor> = graph
            .inputs
            .iter()
            .map(|input| match input.kind {
                InputKind::Weight(_) => weight(input.key(), &input.shape),
                _ => self.io.tensor(&format!("in/{}", input.name), &input.shape),
            })
            .collect();
        run_on(&keeping_session(), graph, &arguments).remove(0)
    }

    fn run_merged(&self, graph: &Graph, adapter: &Adapter) -> HostTensor {
        self.run(graph, &|key, shape| {
            adapter
                .apply(self.root, key, self.weights.tensor(key, shape))
                .unwrap()
        })
    }

    /// As [`Part::run_merged`], for a graph that has the factors beside the weights.
    fn run_beside(&self, graph: &Graph, adapter: &Adapter) -> HostTensor {
        self.run(graph, &|key, shape| {
            for (suffix, is_down) in [(".lora_down.weight", true), (".lora_up.weight", false)] {
                if let Some(path) = key.strip_suffix(suffix) {
                    let factors = adapter.factors(self.root, &format!("{path}.weight"));
                    let factors = factors.unwrap().unwrap();
                    let factor = if is_down { factors.down } else { factors.up };
                    assert_eq!(&factor.shape, shape);
                    return factor;
                }
            }
            self.weights.tensor(key, shape)
        })
    }
}

/// All weights of a model.
fn targets_of(parts: &[Part]) -> Vec<LoraTarget<'_>> {
    let weights = parts.iter().flat_map(|part| {
        let weights = part.graph.weights();
        weights.map(|(_, weight)| (part.root, weight))
    });
    weights
        .map(|(root, weight)| LoraTarget {
            root,
            key: weight.key(),
            dims: &weight.shape.dims,
        })
        .collect()
}

fn resolve(parts: &[Part], file: &str, scale: impl Into<LoraScale>) -> Adapter {
    let targets = targets_of(parts);
    let file = LoraFile::open(&lora(file)).unwrap_or_else(|e| panic!("{e}"));
    file.resolve(&targets, scale.into())
        .unwrap_or_else(|e| panic!("{e}"))
}

/// Every changed weight, merged.
fn merged(parts: &[Part], adapter: &Adapter) -> BTreeMap<String, HostTensor> {
    adapter
        .ranks()
        .into_keys()
        .map(|name| {
            let (root, key) = name.split_once('/').unwrap();
            let part = parts.iter().find(|p| p.root == root).unwrap();
            let shape = Shape::new(DType::F32, part.weights.dims(key));
            let tensor = adapter
                .apply(root, key, part.weights.tensor(key, &shape))
                .unwrap();
            (name, tensor)
        })
        .collect()
}

/// Outputs of all parts against a recorded case. PyTorch computed it in `f64`.
fn assert_outputs(case: &str, parts: &[Part], adapter: &Adapter) {
    let recorded = Golden::read("lora/io.safetensors");
    let mut compared = 0;
    for part in parts {
        let name = format!("out/{case}/{}", part.result);
        if recorded.has(&name) {
            let found = part.run_merged(&part.graph, adapter);
            eprintln!("{name}: {:.1e}", rel_l2(&found, &recorded, &name));
            assert_close(&name, &found, &recorded, 1e-5);
            compared += 1;
        }
    }
    assert!(compared > 0, "{case}");
}

/// Dialects of one set of factors: the same merged weights in every bit, those and the outputs as recorded.
fn assert_dialects(case: &str, files: &[&str]) {
    let parts = Part::all(case);
    let recorded = Golden::read("lora/io.safetensors");
    let first = resolve(&parts, files[0], 0.7);
    let weights = merged(&parts, &first);
    for file in &files[1..] {
        let other = merged(&parts, &resolve(&parts, file, 0.7));
        assert_eq!(
            weights.keys().collect::<Vec<_>>(),
            other.keys().collect::<Vec<_>>(),
            "{file}"
        );
        for (name, tensor) in &weights {
            assert!(tensor == &other[name], "{file}: {name}");
        }
    }
    let mut compared = 0;
    for (name, tensor) in &weights {
        let name = format!("out/{case}/weight/{name}");
        if recorded.has(&name) {
            assert_close(&name, tensor, &recorded, 1e-6);
            compared += 1;
        }
    }
    assert!(compared > 1, "{compared}");
    assert_outputs(case, &parts, &first);
}

#[test]
fn sd15_in_every_dialect_matches_diffusers() {
    assert_dialects(
        "sd15",
        &[
            "sd15_kohya.safetensors",
            "sd15_diffusers.safetensors",
            "sd15_saved.safetensors",
        ],
    );
}

#[test]
fn sdxl_in_every_dialect_matches_diffusers() {
    assert_dialects(
        "sdxl",
        &[
            "sdxl_sgm.safetensors",
            "sdxl_kohya.safetensors",
            "sdxl_saved.safetensors",
        ],
    );
}

#[test]
fn the_first_diffusers_dialect_matches_diffusers() {
    let parts = Part::all("sd15");
    let adapter = resolve(&parts, "sd15_attention.safetensors", 0.7);
    assert_eq!(adapter.ranks().len(), 11);
    assert_outputs("attention", &parts, &adapter);
}

#[test]
fn a_folder_of_pefts_matches_peft() {
    let parts = Part::all("sd15");
    let folder = resolve(&parts, "peft", 0.7);
    assert_outputs("peft", &parts, &folder);
    // The configuration lies beside the file.
    let file = resolve(&parts, "peft/adapter_model.safetensors", 0.7);
    assert!(merged(&parts, &folder) == merged(&parts, &file));
}

#[test]
fn two_files_with_different_scales_match_diffusers() {
    let parts = Part::all("sd15");
    let second = LoraScale {
        unet: -0.4,
        text_encoder: 0.5,
    };
    let adapter = Adapter::stack([
        resolve(&parts, "sd15_kohya.safetensors", 0.7),
        resolve(&parts, "sd15_second.safetensors", second),
    ])
    .unwrap();
    assert_outputs("two", &parts, &adapter);
    // Factors beside the weights compute the same.
    let recorded = Golden::read("lora/io.safetensors");
    for part in &parts {
        let ranks = of_root(&adapter, part.root);
        let graph = beside(&part.graph, &ranks, 1.0).unwrap();
        assert_eq!(
            graph.inputs.len(),
            part.graph.inputs.len() + 2 * ranks.len()
        );
        let name = format!("out/two/{}", part.result);
        let found = part.run_beside(&graph, &adapter);
        eprintln!("beside, {name}: {:.1e}", rel_l2(&found, &recorded, &name));
        assert_close(&name, &found, &recorded, 1e-5);
    }
}

fn of_root(adapter: &Adapter, root: &str) -> BTreeMap<String, usize> {
    let prefix = format!("{root}/");
    adapter
        .ranks()
        .into_iter()
        .filter(|(name, _)| name.starts_with(&prefix))
        .collect()
}

/// An int8 base with float factors beside it is about as far from the float model as int8 weights with the update
/// merged into them.
#[test]
fn beside_an_int8_base_the_update_stays_in_float() {
    let part = Part::unet("sd15", true);
    let parts = [part, Part::text_encoder("text_encoder")];
    let part = &parts[0];
    let adapter = resolve(&parts, "sd15_kohya.safetensors", 0.7);
    let recorded = Golden::read("lora/io.safetensors");
    let error = |found: HostTensor| {
        distance(
            &found.to_f64_vec().unwrap(),
            recorded.values("out/sd15/sample"),
        )
    };
    let int8 = quant::lower(&part.graph).unwrap();
    let with =
        quant::lower(&beside(&part.graph, &of_root(&adapter, "unet"), 1.0).unwrap()).unwrap();
    let without = error(part.run(&int8, &|key, shape| part.weights.tensor(key, shape)));
    let merged = error(part.run_merged(&int8, &adapter));
    let beside = error(part.run_beside(&with, &adapter));
    eprintln!("int8: without {without:.1e}, merged {merged:.1e}, beside {beside:.1e}");
    assert!(without > 0.5 && beside < 0.05 && beside < 1.5 * merged);
}

const SD15: &str = r#"{"block_out_channels": [320, 640, 1280, 1280], "cross_attention_dim": 768,
    "attention_head_dim": 8, "sample_size": 64}"#;
const SDXL: &str = r#"{"addition_embed_type": "text_time", "addition_time_embed_dim": 256,
    "attention_head_dim": [5, 10, 20], "block_out_channels": [320, 640, 1280], "cross_attention_dim": 2048,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "projection_class_embeddings_input_dim": 2816, "sample_size": 128, "transformer_layers_per_block": [1, 2, 10],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"], "use_linear_projection": true}"#;

/// Keys and dimensions of a UNet's weights.
fn weights_of(config: &str) -> Vec<(String, Vec<usize>)> {
    let config = UNet2DConditionConfig::from_json(config).unwrap();
    let b = Builder::new();
    let inputs = declare_inputs(&b, &config, [1, 64, 64, 77], DType::F32).unwrap();
    unet(&b, &config, inputs, Precision::F32, Remat::None).unwrap();
    let graph = b.finish();
    graph
        .weights()
        .map(|(_, w)| (w.key().to_owned(), w.shape.dims.clone()))
        .collect()
}

fn targets(weights: &[(String, Vec<usize>)]) -> Vec<LoraTarget<'_>> {
    weights
        .iter()
        .map(|(key, dims)| LoraTarget {
            root: "unet",
            key,
            dims,
        })
        .collect()
}

/// A kohya file of rank 1 with zeros for every linear layer and convolution of a UNet.
fn kohya_file(dir: &Path, weights: &[(String, Vec<usize>)]) -> (PathBuf, usize) {
    let mut tensors = Vec::new();
    for (key, dims) in weights.iter().filter(|(_, dims)| dims.len() > 1) {
        let name = key.strip_suffix(".weight").unwrap().replace('.', "_");
        let down = [&[1], &dims[1..]].concat();
        let up = if dims.len() == 2 {
            vec![dims[0], 1]
        } else {
            vec![dims[0], 1, 1, 1]
        };
        tensors.push((format!("lora_unet_{name}.lora_down.weight"), down));
        tensors.push((format!("lora_unet_{name}.lora_up.weight"), up));
    }
    let zeros = vec![0; 4 * 23040];
    let path = dir.join("lora.safetensors");
    let views = tensors
        .iter()
        .map(|(name, dims)| maxdiff::weights::TensorView {
            name,
            dtype: DType::F16,
            dims,
            data: &zeros[..2 * dims.iter().product::<usize>()],
        });
    maxdiff::weights::save(&path, views, &BTreeMap::new()).unwrap();
    (path, tensors.len() / 2)
}

#[test]
fn every_layer_of_the_released_models_is_found_and_none_twice() {
    for config in [SD15, SDXL] {
        let weights = weights_of(config);
        let dir = tempfile::tempdir().unwrap();
        let (path, count) = kohya_file(dir.path(), &weights);
        let adapter = LoraFile::open(&path)
            .unwrap()
            .resolve(&targets(&weights), 1.0.into())
            .unwrap();
        assert_eq!(adapter.ranks().len(), count);
        assert!(count > 250, "{count}");
    }
}

#[test]
fn a_lora_of_one_released_model_is_refused_by_another() {
    let (sd15, sdxl) = (weights_of(SD15), weights_of(SDXL));
    for (lora, model, expected) in [
        (
            &sd15,
            &sdxl,
            "it is a LoRA for Stable Diffusion 1.x, the model is SDXL",
        ),
        (
            &sdxl,
            &sd15,
            "it is a LoRA for SDXL, the model is Stable Diffusion 1.x",
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let (path, _) = kohya_file(dir.path(), lora);
        let file = LoraFile::open(&path).unwrap();
        let text = file
            .resolve(&targets(model), 1.0.into())
            .unwrap_err()
            .to_string();
        assert!(text.lines().next().unwrap().ends_with(expected), "{text}");
        assert!(text.lines().count() < 50, "{text}");
    }
}
