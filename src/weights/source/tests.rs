//! What is refused, and how. Layouts that load are in `tests/layouts.rs`.

use std::fs;
use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::dtype::DType;
use crate::weights::{TensorView, save};

/// A file of zeros.
fn write(path: &Path, tensors: &[(&str, &[usize])]) {
    let zeros = vec![0; 1 << 20];
    let views = tensors.iter().map(|&(name, dims)| TensorView {
        name,
        dtype: DType::F16,
        dims,
        data: &zeros[..2 * dims.iter().product::<usize>()],
    });
    save(path, views, &BTreeMap::new()).unwrap();
}

/// A whole model of zeros in one file: a UNet and an autoencoder.
fn write_whole(path: &Path, unet: &[(&str, &[usize])], vae: &[(&str, &[usize])]) {
    let under = |root: &str, tensors: &[(&str, &[usize])]| -> Vec<(String, Vec<usize>)> {
        let tensors = tensors.iter();
        tensors
            .map(|(name, dims)| (format!("{root}{name}"), dims.to_vec()))
            .collect()
    };
    let all = [
        under("model.diffusion_model.", unet),
        under("first_stage_model.", vae),
    ]
    .concat();
    let all: Vec<(&str, &[usize])> = all
        .iter()
        .map(|(n, d)| (n.as_str(), d.as_slice()))
        .collect();
    write(path, &all);
}

fn error(path: &Path) -> String {
    ModelSource::open(path).unwrap_err().to_string()
}

#[test]
fn files_of_other_kinds_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let refused = |tensors: &[(&str, &[usize])]| {
        write(&path, tensors);
        error(&path)
    };
    let model = "model.diffusion_model.";
    let flux = "double_blocks.0.img_attn.norm.key_norm.scale";
    for (name, expected) in [
        (flux.to_owned(), "transformer: img_in.weight is missing"),
        (
            format!("{model}{flux}"),
            "transformer: model.diffusion_model.img_in.weight is missing",
        ),
        (
            format!("{model}joint_blocks.0.context_block.adaLN_modulation.1.bias"),
            "transformer: model.diffusion_model.x_embedder.proj.weight is missing",
        ),
        (
            format!("{model}single_stream_modulation.lin.weight"),
            "this is FLUX.2, which is not supported; supported are Stable Diffusion 1.x,",
        ),
        ("lora_unet_mid.lora_down.weight".into(), "this is a LoRA"),
        ("unet.mid_block.to_q.lora_A.weight".into(), "this is a LoRA"),
        (
            "control_model.time_embed.0.weight".into(),
            "this is a ControlNet",
        ),
        (
            format!("{model}label_emb.weight"),
            "this is the x4 upscaler",
        ),
        ("edm_mean".into(), "Playground"),
        (
            "down_blocks.0.resnets.0.conv1.weight".into(),
            "the denoiser of a diffusers folder, not a whole model that is supported; name the folder",
        ),
        (
            "encoder.down_blocks.0.resnets.0.conv1.weight".into(),
            "the VAE of a diffusers folder",
        ),
        ("decoder.up.0.block.0.conv1.weight".into(), "a VAE alone"),
        (
            "text_model.embeddings.token_embedding.weight".into(),
            "a text encoder of a diffusers folder",
        ),
    ] {
        let found = refused(&[(&name, &[2])]);
        assert!(found.contains(expected), "{name}: {found}");
    }

    let many: Vec<String> = (0..20).map(|i| format!("layers.{i:02}.weight")).collect();
    let many: Vec<(&str, &[usize])> = many.iter().map(|n| (n.as_str(), &[1][..])).collect();
    let found = refused(&many);
    assert!(
        found.contains("among the 20 are layers.00.weight, layers.01.weight,")
            && found.ends_with("layers.11.weight and 8 more"),
        "{found}"
    );
    // A UNet that attends to a text of no known width.
    let found = refused(&[
        ("input_blocks.0.0.weight", &[8, 4, 3, 3]),
        (
            "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight",
            &[8, 512],
        ),
    ]);
    assert!(found.contains("no known model"), "{found}");
    let found = refused(&[
        ("input_blocks.0.0.weight", &[8, 4, 3, 3]),
        (
            "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight",
            &[8, 1024],
        ),
        ("label_emb.0.0.weight", &[8, 2048]),
    ]);
    assert!(found.contains("unCLIP"), "{found}");
}

#[test]
fn damaged_structures_are_told_by_what_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let refused = |tensors: &[(&str, &[usize])]| {
        let attention = "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight";
        let mut all: Vec<(&str, &[usize])> = vec![
            ("input_blocks.0.0.weight", &[8, 4, 3, 3]),
            (attention, &[8, 768]),
        ];
        all.extend(tensors);
        write(&path, &all);
        error(&path)
    };
    let resnet = "input_blocks.1.0.out_layers.3.weight";
    let found = refused(&[]);
    assert!(
        found.contains("unet: resnets in the input blocks of each level: [0]"),
        "{found}"
    );
    let found = refused(&[(resnet, &[8]), ("input_blocks.2.0.op.weight", &[8])]);
    assert!(
        found.contains("each level: [1, 0]; expected the same number"),
        "{found}"
    );
    let found = refused(&[(resnet, &[8, 8, 3, 3])]);
    assert!(found.ends_with("unet: out.2.weight is missing"), "{found}");
    let found = refused(&[(resnet, &[]), ("out.2.weight", &[4])]);
    assert!(
        found.ends_with("input_blocks.1.0.out_layers.3.weight [] has fewer than 1 dimensions"),
        "{found}"
    );

    // Two tensors that would get one name.
    let found = refused(&[
        (resnet, &[8, 8, 3, 3]),
        ("out.2.weight", &[4, 8, 3, 3]),
        ("output_blocks.1.1.conv.bias", &[8]),
        ("output_blocks.1.2.conv.bias", &[8]),
    ]);
    assert!(
        found.ends_with("up_blocks.0.upsamplers.0.conv.bias stands for two tensors"),
        "{found}"
    );

    let unet: [(&str, &[usize]); 4] = [
        ("input_blocks.0.0.weight", &[8, 4, 3, 3]),
        (resnet, &[8, 8, 3, 3]),
        (
            "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight",
            &[8, 768],
        ),
        ("out.2.weight", &[4, 8, 3, 3]),
    ];
    let vae = "decoder.up.0.block.0.conv1.weight";
    write_whole(&path, &unet, &[(vae, &[8, 8, 3, 3])]);
    let found = error(&path);
    assert!(
        found.ends_with("vae: first_stage_model.decoder.up.0 has fewer than two resnets"),
        "{found}"
    );
}

#[test]
fn numbers_in_names_do_not_overflow() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let huge = "18446744073709551615";
    let names = [
        format!("input_blocks.{huge}.0.in_layers.0.weight"),
        format!("input_blocks.0.{huge}.weight"),
        format!("output_blocks.{huge}.0.in_layers.0.weight"),
        format!("output_blocks.{huge}9.0.in_layers.0.weight"),
        "input_blocks.0.1.weight".to_owned(),
        "input_blocks..0.weight".to_owned(),
        "middle_block.3.norm.weight".to_owned(),
    ];
    let mut tensors: Vec<(&str, &[usize])> = vec![
        ("input_blocks.0.0.weight", &[8, 4, 3, 3]),
        ("input_blocks.1.0.out_layers.3.weight", &[8, 8, 3, 3]),
        (
            "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight",
            &[8, 768],
        ),
        ("out.2.weight", &[4, 8, 3, 3]),
    ];
    tensors.extend(names.iter().map(|n| (n.as_str(), &[1][..])));
    write(&path, &tensors);
    let source = ModelSource::open(&path).unwrap();
    let unet = &source.component(Part::Unet).unwrap().checkpoint;
    assert_eq!(unet.iter().count(), tensors.len());
    // What is no name of the layout stays as it is.
    for name in &names[3..] {
        assert!(unet.info(name).is_some(), "{name}");
    }

    let vae: Vec<(String, &[usize])> = [
        (
            "decoder.up.0.block.0.conv1.weight".to_owned(),
            &[8, 8, 3, 3][..],
        ),
        (
            "decoder.up.0.block.1.conv1.weight".to_owned(),
            &[8, 8, 3, 3],
        ),
        ("decoder.conv_in.weight".to_owned(), &[8, 4, 3, 3]),
        ("decoder.conv_out.weight".to_owned(), &[3, 8, 3, 3]),
        ("encoder.conv_in.weight".to_owned(), &[8, 3, 3, 3]),
        (format!("decoder.up.{huge}.block.0.conv1.weight"), &[1]),
        (
            format!("encoder.down.{huge}.block.{huge}.conv1.weight"),
            &[1],
        ),
        ("decoder.up.7.block.0.conv1.weight".to_owned(), &[1]),
    ]
    .into();
    let vae: Vec<(&str, &[usize])> = vae.iter().map(|(n, d)| (n.as_str(), *d)).collect();
    write_whole(&path, &tensors[..4], &vae);
    let source = ModelSource::open(&path).unwrap();
    let found = source.component(Part::Vae).unwrap();
    assert_eq!(found.checkpoint.iter().count(), vae.len());
    assert!(
        found
            .checkpoint
            .info("decoder.up.7.block.0.conv1.weight")
            .is_some()
    );
}

#[test]
fn folders_without_a_model_say_what_was_looked_for() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("README.md"), "").unwrap();
    let found = error(dir.path());
    assert!(
        found.contains(
            "looked for model_index.json, unet/config.json, transformer/config.json or one .safetensors or .gguf \
             file",
        )
            && found.ends_with("it has README.md"),
        "{found}"
    );
    fs::write(at("v1-5.ckpt"), "PK").unwrap();
    let found = error(dir.path());
    assert!(found.contains("v1-5.ckpt: a PyTorch pickle"), "{found}");
    assert!(found.contains("state_dict"), "{found}");
    let found = error(&at("v1-5.ckpt"));
    assert!(found.contains("a PyTorch pickle"), "{found}");

    let text = r#"{"_class_name": "FluxKontextPipeline"}"#;
    fs::write(at("model_index.json"), text).unwrap();
    assert!(error(dir.path()).contains("this is FLUX.1 Kontext"));
    let text = r#"{"_class_name": "StableDiffusion3Pipeline"}"#;
    fs::write(at("model_index.json"), text).unwrap();
    assert!(error(dir.path()).contains("no model in this folder"));
    fs::write(at("model_index.json"), r#"{"_class_name": "SanaPipeline"}"#).unwrap();
    assert!(error(dir.path()).contains("of a SanaPipeline, which is not supported"));
    fs::write(
        at("model_index.json"),
        r#"{"_class_name": "StableDiffusionPipeline"}"#,
    )
    .unwrap();
    assert!(error(dir.path()).contains("no model in this folder"));
    fs::write(at("model_index.json"), "[]").unwrap();
    assert!(error(dir.path()).contains("model_index.json: not a JSON object"));
    fs::write(at("model_index.json"), vec![b' '; (1 << 20) + 1]).unwrap();
    assert!(error(dir.path()).contains("larger than 1048576 bytes"));

    // A part that only has a pickle.
    fs::write(at("model_index.json"), "{}").unwrap();
    fs::create_dir(at("unet")).unwrap();
    fs::write(at("unet/config.json"), "{}").unwrap();
    fs::write(at("unet/diffusion_pytorch_model.bin"), "").unwrap();
    assert!(error(dir.path()).contains("diffusion_pytorch_model.bin: a PyTorch pickle"));

    let missing = error(&at("nowhere"));
    assert!(missing.contains("no such file or folder"), "{missing}");
}

/// Names that look like those of a model, and tensors of any small shape.
fn tensors() -> impl Strategy<Value = BTreeMap<String, Vec<usize>>> {
    const ROOTS: [&str; 8] = [
        "model.diffusion_model.",
        "first_stage_model.",
        "cond_stage_model.transformer.",
        "cond_stage_model.model.",
        "conditioner.embedders.0.transformer.",
        "conditioner.embedders.1.model.",
        "conditioner.embedders.0.model.",
        "",
    ];
    const NAMES: [&str; 24] = [
        "input_blocks.0.0.weight",
        "input_blocks.1.0.out_layers.3.weight",
        "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight",
        "input_blocks.2.0.op.weight",
        "input_blocks.2.0.out_layers.3.weight",
        "middle_block.1.proj_in.weight",
        "output_blocks.0.1.conv.weight",
        "label_emb.0.0.weight",
        "out.2.weight",
        "encoder.conv_in.weight",
        "encoder.mid.attn_1.q.weight",
        "encoder.down.0.downsample.conv.weight",
        "decoder.conv_in.weight",
        "decoder.conv_out.weight",
        "decoder.up.0.block.0.conv1.weight",
        "decoder.up.0.block.1.conv1.weight",
        "token_embedding.weight",
        "positional_embedding",
        "text_projection",
        "transformer.resblocks.0.mlp.c_fc.weight",
        "transformer.resblocks.0.attn.in_proj_weight",
        "text_model.embeddings.token_embedding.weight",
        "text_model.embeddings.position_embedding.weight",
        "text_model.encoder.layers.0.mlp.fc1.weight",
    ];
    let dims = prop::collection::vec(prop_oneof![0..5_usize, Just(768), Just(1280)], 0..4);
    let entry = (
        prop::sample::select(&ROOTS[..]),
        prop::sample::select(&NAMES[..]),
        dims,
    );
    // Mostly there, so that most files get past what is looked at first.
    let usual = (
        prop::bool::weighted(0.9),
        prop::sample::select(&[768, 1024, 1280, 2048][..]),
    );
    (prop::collection::vec(entry, 0..60), usual).prop_map(|(entries, (usual, text))| {
        let mut tensors: BTreeMap<String, Vec<usize>> = entries
            .into_iter()
            .map(|(root, name, dims)| (format!("{root}{name}"), dims))
            .filter(|(_, dims)| dims.iter().product::<usize>() <= 1 << 18)
            .collect();
        if usual {
            for (name, dims) in [
                (NAMES[0], vec![8, 4, 3, 3]),
                (NAMES[1], vec![8, 8, 3, 3]),
                (NAMES[2], vec![8, text]),
                (NAMES[8], vec![4, 8, 3, 3]),
            ] {
                tensors.insert(format!("{}{name}", ROOTS[0]), dims);
            }
        }
        tensors
    })
}

proptest! {
    #[test]
    fn no_file_makes_it_panic(tensors in tensors()) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        let tensors: Vec<(&str, &[usize])> = tensors.iter().map(|(n, d)| (n.as_str(), d.as_slice())).collect();
        write(&path, &tensors);
        let mut components = Vec::new();
        if let Ok(source) = ModelSource::open(&path) {
            components.extend(source.components.into_values());
        }
        for component in components {
            for (name, shape) in component.checkpoint.iter() {
                prop_assert_eq!(&component.checkpoint.read(name).unwrap().shape, shape);
            }
        }
    }
}
