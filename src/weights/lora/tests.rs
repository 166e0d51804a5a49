//! Names, and what is refused. `tests/lora.rs` compares whole models with diffusers and PEFT.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use tempfile::TempDir;

mod arithmetic;
mod dropout;

use super::dialects::{Role, aliases, split_part, split_role};
use super::*;
use crate::dtype::DType;
use crate::host_tensor::HostTensor;
use crate::models::unet::original::Blocks;
use crate::models::{Family, Part};
use crate::weights::{TensorView, save};

/// Values of order one that differ from place to place.
fn values(count: usize, seed: u32) -> Vec<f32> {
    (0..count as u32)
        .map(|i| {
            let mixed = (i + 1)
                .wrapping_mul(2_654_435_761)
                .wrapping_add(seed.wrapping_mul(40_503));
            (mixed >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

fn tensor(dims: &[usize], seed: u32) -> HostTensor {
    HostTensor::from_f32(dims, &values(dims.iter().product(), seed)).unwrap()
}

/// A file of `f32` tensors; an `alpha` is 1.
fn write(dir: &TempDir, tensors: &[(&str, &[usize])], metadata: &[(&str, &str)]) -> PathBuf {
    let path = dir.path().join("lora.safetensors");
    let data: Vec<HostTensor> = tensors
        .iter()
        .zip(0..)
        .map(|((name, dims), seed)| match name.ends_with(".alpha") {
            true => HostTensor::from_f32(*dims, &vec![1.0; dims.iter().product()]).unwrap(),
            false => tensor(dims, seed),
        })
        .collect();
    let views = tensors
        .iter()
        .zip(&data)
        .map(|((name, dims), t)| TensorView {
            name,
            dtype: DType::F32,
            dims,
            data: &t.data,
        });
    let metadata = metadata
        .iter()
        .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
    save(&path, views, &metadata.collect()).unwrap();
    path
}

fn open(tensors: &[(&str, &[usize])], metadata: &[(&str, &str)]) -> Result<LoraFile, LoraError> {
    let dir = tempfile::tempdir().unwrap();
    LoraFile::open(&write(&dir, tensors, metadata))
}

/// The error's text without the file's path.
fn message<T: std::fmt::Debug>(result: Result<T, LoraError>) -> String {
    let text = result.unwrap_err().to_string();
    text.split_once(".safetensors: ")
        .map_or(text.clone(), |(_, m)| m.to_owned())
}

const TO_Q: &str = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q.weight";
const TO_K: &str = "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k.weight";

/// Weights of SD 1.5, with its dimensions.
const SD15: [LoraTarget<'static>; 6] = [
    LoraTarget {
        root: "unet",
        key: "conv_in.weight",
        dims: &[320, 4, 3, 3],
    },
    LoraTarget {
        root: "unet",
        key: "conv_in.bias",
        dims: &[320],
    },
    LoraTarget {
        root: "unet",
        key: TO_Q,
        dims: &[320, 320],
    },
    LoraTarget {
        root: "unet",
        key: TO_K,
        dims: &[320, 768],
    },
    LoraTarget {
        root: "unet",
        key: "down_blocks.0.attentions.0.proj_in.weight",
        dims: &[320, 320, 1, 1],
    },
    LoraTarget {
        root: "text_encoder",
        key: "text_model.encoder.layers.0.self_attn.q_proj.weight",
        dims: &[768, 768],
    },
];

#[test]
fn names_tell_role_part_and_module() {
    use Role::{Alpha, Down, Up};
    let q = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q";
    let kohya = q.replace('.', "_");
    let text = "text_model.encoder.layers.3.mlp.fc1";
    for (name, role, part, module) in [
        (
            format!("lora_unet_{kohya}.lora_down.weight"),
            Down,
            Some(Part::Unet),
            kohya.as_str(),
        ),
        (
            format!("lora_unet_{kohya}.alpha"),
            Alpha,
            Some(Part::Unet),
            &kohya,
        ),
        (format!("unet.{q}.lora.up.weight"), Up, Some(Part::Unet), q),
        (format!("unet.{q}_lora.up.weight"), Up, Some(Part::Unet), q),
        (format!("unet.{q}.lora_B.weight"), Up, Some(Part::Unet), q),
        (format!("base_model.model.{q}.lora_A.weight"), Down, None, q),
        (
            format!("base_model.model.{q}.lora_A.default.weight"),
            Down,
            None,
            q,
        ),
        (
            format!("base_model.model.unet.{q}.lora_B.style.weight"),
            Up,
            Some(Part::Unet),
            q,
        ),
        (
            format!("unet.base_model.model.{q}.lora_B.weight"),
            Up,
            Some(Part::Unet),
            q,
        ),
        (format!("{q}.lora_A.weight"), Down, None, q),
        (
            format!("text_encoder.{text}.lora_linear_layer.down.weight"),
            Down,
            Some(Part::TextEncoder),
            text,
        ),
        (
            format!("text_encoder_2.{text}.lora_A.weight"),
            Down,
            Some(Part::TextEncoder2),
            text,
        ),
        (
            "lora_te_text_model.lora_up.weight".into(),
            Up,
            Some(Part::TextEncoder),
            "text_model",
        ),
        (
            "lora_te1_text_model.lora_up.weight".into(),
            Up,
            Some(Part::TextEncoder),
            "text_model",
        ),
        (
            "lora_te2_text_model.lora_up.weight".into(),
            Up,
            Some(Part::TextEncoder2),
            "text_model",
        ),
    ] {
        let (stem, found) = split_role(&name).unwrap_or_else(|| panic!("{name}"));
        assert_eq!((found, split_part(stem)), (role, (part, module)), "{name}");
    }
    for name in [
        "conv_in.weight",
        "x.lora_mid.weight",
        "x.lora_down.bias",
        "x.dora_scale",
        ".weight",
        "",
    ] {
        assert_eq!(split_role(name), None, "{name}");
    }
}

/// The original code's names of SDXL's blocks, from its published configuration: three levels of two layers, attention
/// in the lower two.
#[test]
fn the_original_names_of_sdxls_blocks_are_known() {
    let mut paths = Vec::new();
    for (side, layers) in [("down", 2), ("up", 3)] {
        for block in 0..3 {
            let attentions = block != if side == "down" { 0 } else { 2 };
            for layer in 0..layers {
                paths.push(format!(
                    "{side}_blocks.{block}.resnets.{layer}.conv1.weight"
                ));
                if attentions {
                    paths.push(format!(
                        "{side}_blocks.{block}.attentions.{layer}.proj_in.weight"
                    ));
                }
            }
        }
    }
    let blocks = Blocks::of(paths.iter().map(String::as_str));
    for (path, original) in [
        ("conv_in", "input_blocks_0_0"),
        (
            "down_blocks.0.resnets.1.conv1",
            "input_blocks_2_0_in_layers_2",
        ),
        ("down_blocks.0.downsamplers.0.conv", "input_blocks_3_0_op"),
        (
            "down_blocks.1.resnets.0.conv_shortcut",
            "input_blocks_4_0_skip_connection",
        ),
        (
            "down_blocks.1.attentions.0.proj_in",
            "input_blocks_4_1_proj_in",
        ),
        ("down_blocks.1.downsamplers.0.conv", "input_blocks_6_0_op"),
        (
            "down_blocks.2.attentions.1.proj_out",
            "input_blocks_8_1_proj_out",
        ),
        (
            "mid_block.resnets.0.time_emb_proj",
            "middle_block_0_emb_layers_1",
        ),
        ("mid_block.attentions.0.norm", "middle_block_1_norm"),
        ("mid_block.resnets.1.norm2", "middle_block_2_out_layers_0"),
        (
            "up_blocks.0.resnets.0.conv2",
            "output_blocks_0_0_out_layers_3",
        ),
        ("up_blocks.0.upsamplers.0.conv", "output_blocks_2_2_conv"),
        (
            "up_blocks.1.attentions.2.proj_in",
            "output_blocks_5_1_proj_in",
        ),
        ("up_blocks.1.upsamplers.0.conv", "output_blocks_5_2_conv"),
        (
            "up_blocks.2.resnets.2.norm1",
            "output_blocks_8_0_in_layers_0",
        ),
        ("add_embedding.linear_1", "label_emb_0_0"),
        ("time_embedding.linear_2", "time_embed_2"),
        ("conv_out", "out_2"),
    ] {
        let names = aliases(Part::Unet, path, &blocks);
        assert_eq!(
            names,
            [path.replace('.', "_"), original.to_owned()],
            "{path}"
        );
    }
    // Of paths that no model has.
    for path in [
        "down_blocks.7.resnets.0.conv1",
        "down_blocks.0.resnets.x.conv1",
        "up_blocks.0.extra.0.conv",
        "mid_block",
    ] {
        assert_eq!(aliases(Part::Unet, path, &blocks).len(), 1, "{path}");
    }
}

#[test]
fn other_adapters_are_refused_by_name() {
    let pair: [(&str, &[usize]); 2] = [
        ("lora_unet_conv_in.lora_down.weight", &[2, 4, 3, 3]),
        ("lora_unet_conv_in.lora_up.weight", &[320, 2, 1, 1]),
    ];
    for (tensor, kind) in [
        ("lora_unet_conv_in.dora_scale", "DoRA"),
        ("unet.conv_in.lora_magnitude_vector.weight", "DoRA"),
        ("lora_unet_conv_in.hada_w1_a", "LoHa"),
        ("unet.conv_in.lokr_w2", "LoKr"),
        ("lora_unet_conv_in.lora_mid.weight", "Tucker"),
        ("lora_unet_conv_norm_out.diff_b", "differences"),
        ("lora_unet_conv_norm_out.w_norm", "trained norms"),
        (
            "text_model.embeddings.token_embedding.lora_embedding_A",
            "embedding",
        ),
    ] {
        let text = message(open(&[pair[0], pair[1], (tensor, &[4])], &[]));
        assert!(
            text.contains(kind) && text.contains("is not supported"),
            "{text}"
        );
        assert!(
            text.contains(&format!("1 tensors such as {tensor}")),
            "{text}"
        );
    }
    // A bias belongs to factors.
    let alone = ("unet.conv_in.lora_B.bias", &[4][..]);
    let text = message(open(&[pair[0], pair[1], alone], &[]));
    assert_eq!(text, "module unet.conv_in has no down factor");
    let text = message(open(&[pair[0], pair[1], ("emb_params", &[4])], &[]));
    assert_eq!(
        text,
        "beside 1 LoRA modules there are 1 other tensors: emb_params"
    );
    let text = message(open(
        &[("conv_in.weight", &[4]), ("conv_in.bias", &[4])],
        &[],
    ));
    assert_eq!(text, "not a LoRA file: conv_in.bias, conv_in.weight");
    let text = message(open(&[], &[]));
    assert_eq!(text, "not a LoRA file: it has no tensors");
    let text = message(open(&[pair[1], ("lora_unet_conv_in.alpha", &[])], &[]));
    assert_eq!(text, "module lora_unet_conv_in has no down factor");
    for dims in [&[2_usize][..], &[0, 4], &[3, 4, 3, 3]] {
        let text = message(open(
            &[("lora_unet_conv_in.lora_down.weight", dims), pair[1]],
            &[],
        ));
        assert!(
            text.contains(&format!("do not fit each other: down {dims:?}, expected")),
            "{text}"
        );
    }
    let text = message(open(
        &[pair[0], pair[1], ("lora_unet_conv_in.alpha", &[2])],
        &[],
    ));
    assert_eq!(
        text,
        "tensor lora_unet_conv_in.alpha: f32[2]; expected a finite number"
    );
    let twice: (&str, &[usize]) = ("lora_unet_conv_in.lora.up.weight", &[320, 2]);
    assert!(
        message(open(&[pair[0], pair[1], twice], &[]))
            .starts_with("two updates of lora_unet_conv_in: ")
    );
    let missing = LoraFile::open(Path::new("/nonexistent/lora.safetensors"));
    assert!(matches!(
        missing,
        Err(LoraError::Weights(WeightsError::Io { .. }))
    ));
    let empty = tempfile::tempdir().unwrap();
    let text = LoraFile::open(empty.path()).unwrap_err().to_string();
    assert!(
        text.contains("looked for pytorch_lora_weights.safetensors"),
        "{text}"
    );
}

#[test]
fn a_configuration_that_asks_for_more_than_a_lora_is_refused() {
    let tensors: [(&str, &[usize]); 2] = [
        ("unet.conv_in.lora_A.weight", &[2, 4, 3, 3]),
        ("unet.conv_in.lora_B.weight", &[320, 2, 1, 1]),
    ];
    for (config, expected) in [
        (
            r#"{"unet.lora_alpha": 1, "unet.use_dora": true}"#,
            "use_dora is true: DoRA",
        ),
        (
            r#"{"unet.lora_alpha": 1, "unet.init_lora_weights": "pissa"}"#,
            "init_lora_weights is \"pissa\"",
        ),
        (
            r#"{"unet.lora_alpha": 1, "unet.peft_type": "LOHA"}"#,
            "peft_type is \"LOHA\"",
        ),
        (r#"{"unet.r": 2}"#, "lora_alpha is missing"),
        (
            r#"{"unet.lora_alpha": "2"}"#,
            "lora_alpha is \"2\"; expected a number",
        ),
        (
            r#"{"unet.lora_alpha": 1, "unet.alpha_pattern": {"conv_(in|out)": 2}}"#,
            "not a regular expression",
        ),
        (
            r#"{"unet.lora_alpha": 1, "unet.alpha_pattern": [1]}"#,
            "alpha_pattern is [1]",
        ),
        (r#"{"unet.lora_alpha": NaN}"#, "expected value"),
        ("[]", "invalid type"),
    ] {
        let text = message(open(&tensors, &[("lora_adapter_metadata", config)]));
        assert!(
            text.starts_with("the adapter's configuration: ") && text.contains(expected),
            "{text}"
        );
    }
}

/// What the only module of a file counts.
fn multiplier(tensors: &[(&str, &[usize])], config: &str) -> f64 {
    let file = open(tensors, &[("lora_adapter_metadata", config)]).unwrap();
    let adapter = file.resolve(&SD15, 1.0.into()).unwrap();
    let patched = adapter.patched.values().next().unwrap();
    patched.layers[0].scale
}

#[test]
fn alpha_comes_from_the_tensor_or_the_configuration_or_is_the_rank() {
    let down: (&str, &[usize]) = ("unet.conv_in.lora_A.weight", &[4, 4, 3, 3]);
    let up: (&str, &[usize]) = ("unet.conv_in.lora_B.weight", &[320, 4, 1, 1]);
    let pair = [down, up];
    assert_eq!(multiplier(&pair, "{}"), 1.0);
    assert_eq!(
        multiplier(&[down, up, ("unet.conv_in.alpha", &[])], "{}"),
        0.25
    );
    assert_eq!(
        multiplier(&[down, up, ("unet.conv_in.alpha", &[1])], "{}"),
        0.25
    );
    assert_eq!(multiplier(&pair, r#"{"unet.lora_alpha": 6}"#), 1.5);
    // Of another part.
    assert_eq!(multiplier(&pair, r#"{"text_encoder.lora_alpha": 6}"#), 1.0);
    let patterns =
        |keys: &str| format!(r#"{{"unet.lora_alpha": 6, "unet.alpha_pattern": {{{keys}}}}}"#);
    assert_eq!(
        multiplier(&pair, &patterns(r#""conv_in": 8, "^conv_in": 12"#)),
        2.0
    );
    assert_eq!(
        multiplier(
            &pair,
            &patterns(r#""in": 8, "^in": 8, "conv_in.x": 8, "^conv_in": 12"#)
        ),
        3.0
    );
    let stabilized = r#"{"unet.lora_alpha": 6, "unet.use_rslora": true}"#;
    assert_eq!(multiplier(&pair, stabilized), 3.0);
}

#[test]
fn modules_without_a_weight_are_all_listed() {
    let tensors: Vec<(String, &[usize])> = (0..45)
        .flat_map(|i| {
            let down: &[usize] = &[1, 320];
            [
                (format!("lora_unet_nothing_{i:02}.lora_down.weight"), down),
                (
                    format!("lora_unet_nothing_{i:02}.lora_up.weight"),
                    &[320, 1],
                ),
            ]
        })
        .collect();
    let mut tensors: Vec<(&str, &[usize])> =
        tensors.iter().map(|(n, d)| (n.as_str(), *d)).collect();
    let proj_in: [(&str, &[usize]); 2] = [
        (
            "lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight",
            &[4, 640],
        ),
        (
            "lora_unet_down_blocks_0_attentions_0_proj_in.lora_up.weight",
            &[320, 4],
        ),
    ];
    tensors.extend(proj_in);
    let file = open(&tensors, &[]).unwrap();
    let error = file.resolve(&SD15, 1.0.into()).unwrap_err();
    let LoraError::Mismatch(mismatch) = &error else {
        panic!("{error}");
    };
    assert_eq!(
        (
            mismatch.modules,
            mismatch.unmatched.len(),
            mismatch.misshapen.len()
        ),
        (46, 45, 1)
    );
    assert_eq!(
        (mismatch.lora_family, mismatch.model_family),
        (None, Some(LoraFamily::Known(Family::Sd1)))
    );
    let text = error.to_string();
    assert!(
        text.contains("of 46 modules 45 match no weight, 1 are of another shape\n"),
        "{text}"
    );
    assert!(
        text.contains("no such weight: lora_unet_nothing_19 (down [1, 320], up [320, 1])"),
        "{text}"
    );
    assert!(
        !text.contains("nothing_20") && text.contains("... and 25 more that match no weight"),
        "{text}"
    );
    assert!(
        text.ends_with(
            "(down [4, 640], up [320, 4]) for unet/down_blocks.0.attentions.0.proj_in.weight [320, 320, 1, 1]"
        ),
        "{text}"
    );
    // Left out on purpose.
    let file = open(&tensors, &[]).unwrap();
    let scale = LoraScale {
        unet: 0.0,
        text_encoder: 1.0,
    };
    assert_eq!(file.resolve(&SD15, scale).unwrap().ranks(), BTreeMap::new());
}

/// How the error of a LoRA with this one module on SD 1.5 calls the two families.
fn families(module: &str, features: usize) -> String {
    let names = ["down", "up"].map(|role| format!("{module}.lora_{role}.weight"));
    let tensors: [(&str, &[usize]); 2] = [(&names[0], &[4, features]), (&names[1], &[640, 4])];
    let text = open(&tensors, &[])
        .unwrap()
        .resolve(&SD15, 1.0.into())
        .unwrap_err()
        .to_string();
    let (first, _) = text.split_once('\n').unwrap();
    first
        .split_once("; ")
        .map_or(String::new(), |(_, f)| f.to_owned())
}

#[test]
fn a_lora_for_another_family_is_told_as_such() {
    let other =
        |family: &str| format!("it is a LoRA for {family}, the model is Stable Diffusion 1.x");
    let to_k = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k";
    assert_eq!(families(to_k, 2048), other("SDXL"));
    assert_eq!(families(to_k, 1024), other("Stable Diffusion 2.x"));
    assert_eq!(families(to_k, 1280), other("the SDXL refiner"));
    assert_eq!(families(to_k, 768), "");
    // By names alone.
    let xl = other("SDXL");
    assert_eq!(
        families("lora_te2_text_model_encoder_layers_0_mlp_fc1", 1280),
        xl
    );
    assert_eq!(families("lora_unet_input_blocks_8_1_proj_in", 1280), xl);
    for (module, family) in [
        (
            "transformer.single_transformer_blocks.0.attn.to_q",
            "FLUX.1",
        ),
        ("lora_unet_double_blocks_0_img_attn_proj", "FLUX.1"),
        (
            "lora_unet_joint_blocks_0_x_block_attn_qkv",
            "Stable Diffusion 3",
        ),
        (
            "transformer.transformer_blocks.0.attn.to_q",
            "a transformer such as Flux or SD 3",
        ),
    ] {
        assert_eq!(families(module, 3072), other(family));
    }
}

#[test]
fn a_module_for_one_weight_only() {
    let q = TO_Q.trim_end_matches(".weight");
    let factors = |module: &str| {
        let dims: [&'static [usize]; 2] = [&[4, 320], &[320, 4]];
        [("lora_A", dims[0]), ("lora_B", dims[1])].map(|(f, d)| (format!("{module}.{f}.weight"), d))
    };
    let both: Vec<_> = [
        factors(&format!("unet.{q}")),
        factors(&format!("lora_unet_{}", q.replace('.', "_"))),
    ]
    .concat();
    let both: Vec<(&str, &[usize])> = both.iter().map(|(n, d)| (n.as_str(), *d)).collect();
    let text = message(open(&both, &[]).unwrap().resolve(&SD15, 1.0.into()));
    assert_eq!(
        text,
        format!(
            "two updates of unet/{TO_Q}: lora_unet_{} and unet.{q}",
            q.replace('.', "_")
        )
    );

    // A file of PEFT's does not say which text encoder it is for; shapes may.
    let key = "text_model.encoder.layers.0.self_attn.q_proj.weight";
    let second = |dims| LoraTarget {
        root: "text_encoder_2",
        key,
        dims,
    };
    let factors: [(&str, &[usize]); 2] = [
        (
            "base_model.model.text_model.encoder.layers.0.self_attn.q_proj.lora_A.weight",
            &[4, 768],
        ),
        (
            "base_model.model.text_model.encoder.layers.0.self_attn.q_proj.lora_B.weight",
            &[768, 4],
        ),
    ];
    let targets = [SD15[5], second(&[1280, 1280])];
    let adapter = open(&factors, &[])
        .unwrap()
        .resolve(&targets, 1.0.into())
        .unwrap();
    assert_eq!(
        adapter.ranks(),
        BTreeMap::from([(format!("text_encoder/{key}"), 4)])
    );
    let targets = [SD15[5], second(&[768, 768])];
    let text = message(open(&factors, &[]).unwrap().resolve(&targets, 1.0.into()));
    assert!(
        text.contains(&format!(
            "may be any of text_encoder/{key}, text_encoder_2/{key}"
        )),
        "{text}"
    );

    let scale = LoraScale {
        unet: 1.0,
        text_encoder: f32::NAN,
    };
    let text = message(open(&factors, &[]).unwrap().resolve(&SD15, scale));
    assert!(
        text.starts_with("scale LoraScale") && text.ends_with("expected finite numbers"),
        "{text}"
    );
}

fn any_name() -> impl Strategy<Value = String> {
    const WORDS: [&str; 25] = [
        "lora_unet_",
        "lora_te_",
        "lora_te2_",
        "unet.",
        "text_encoder.",
        "base_model.model.",
        "diffusion_model.",
        "down_blocks.0.attentions.0.",
        "down_blocks_0_attentions_0_",
        "input_blocks_1_1_",
        "proj_in",
        "conv_in",
        "transformer_blocks.0.attn1.to_q",
        "transformer_blocks.0.attn1.processor.to_q",
        ".lora_down.weight",
        ".lora_up.weight",
        ".lora_A.weight",
        ".lora_B.default.weight",
        "_lora.down.weight",
        ".lora.up.weight",
        ".alpha",
        ".dora_scale",
        ".",
        "",
        "ü",
    ];
    proptest::collection::vec(proptest::sample::select(&WORDS[..]), 1..5)
        .prop_map(|words| words.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Whatever a file's names and shapes are, it is taken or refused with a message.
    #[test]
    fn no_file_panics(
        tensors in proptest::collection::btree_map(
            any_name(), proptest::collection::vec(0_usize..5, 0..5), 0..6
        ),
        config in proptest::option::of("[{}\"a-z_.:0-9]{0,40}"),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let tensors: Vec<(&str, &[usize])> = tensors.iter().map(|(n, d)| (n.as_str(), d.as_slice())).collect();
        let metadata: Vec<(&str, &str)> = config.iter().map(|c| ("lora_adapter_metadata", c.as_str())).collect();
        let targets = [
            LoraTarget { root: "unet", key: "conv_in.weight", dims: &[3, 2, 1, 1] },
            LoraTarget { root: "unet", key: "down_blocks.0.attentions.0.proj_in.weight", dims: &[2, 2] },
            LoraTarget { root: "unet", key: TO_Q, dims: &[2, 2] },
        ];
        let opened = LoraFile::open(&write(&dir, &tensors, &metadata));
        match opened.and_then(|file| file.resolve(&targets, 1.0.into())) {
            Err(error) => prop_assert!(!error.to_string().is_empty()),
            Ok(adapter) => {
                for target in &targets {
                    let merged = adapter.apply(target.root, target.key, tensor(target.dims, 7)).unwrap();
                    prop_assert_eq!(&merged.shape.dims, target.dims);
                }
            }
        }
        fs::remove_dir_all(dir.path()).unwrap();
    }
}
