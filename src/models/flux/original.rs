//! The transformer of Black Forest Labs' code, which other files keep.

use serde_json::{Map, Value, json};

use crate::models::original::{
    Converted, Original, OriginalPart, OriginalTensors, StructureError, Transform, count_blocks,
    layers_of, number, numbered, originals, renamed, set, tensors_of,
};
use crate::models::spec::Claim;
use crate::shape::Shape;

/// A tensor of every such transformer.
pub const SIGN: &str = "double_blocks.0.img_attn.norm.key_norm.scale";

const IMAGE: &str = "img_in.weight";
const TEXT: &str = "txt_in.weight";
const LAST: &str = "final_layer.linear.weight";
const GUIDANCE: &str = "guidance_in.in_layer.weight";

/// Whether a transformer is one that takes the guidance scale, or that does not, as `with_guidance` says.
pub fn claim(tensors: &OriginalTensors, with_guidance: bool) -> Claim {
    match tensors.has(GUIDANCE) == with_guidance {
        true => Claim::Yes,
        false => Claim::No,
    }
}

/// Reads the tensors of a transformer. Fields that no tensor tells are those of `config`.
///
/// # Errors
/// When a tensor is missing, or heads have no features.
pub fn read<'a>(
    tensors: &OriginalTensors<'a>,
    mut config: Map<String, Value>,
) -> Result<OriginalPart<'a>, StructureError> {
    let inner = tensors.dim(IMAGE, 0)?;
    let head = tensors.dim(SIGN, 0)?;
    let heads = inner.checked_div(head);
    let heads =
        heads.ok_or_else(|| StructureError(format!("{}{SIGN} is empty", tensors.prefix)))?;
    let (in_channels, out_channels) = (tensors.dim(IMAGE, 1)?, tensors.dim(LAST, 0)?);
    // Those of Fill and with a control image see more than the latents that they predict.
    if in_channels != out_channels {
        set(&mut config, [("out_channels", json!(out_channels))]);
    }
    let double = tensors.count(|i| format!("double_blocks.{i}.img_attn.qkv.weight"));
    let single = tensors.count(|i| format!("single_blocks.{i}.linear1.weight"));
    set(
        &mut config,
        [
            ("attention_head_dim", json!(head)),
            ("guidance_embeds", json!(tensors.has(GUIDANCE))),
            ("in_channels", json!(in_channels)),
            ("joint_attention_dim", json!(tensors.dim(TEXT, 1)?)),
            ("num_attention_heads", json!(heads)),
            ("num_layers", json!(double)),
            ("num_single_layers", json!(single)),
            (
                "pooled_projection_dim",
                json!(tensors.dim("vector_in.in_layer.weight", 1)?),
            ),
        ],
    );
    Ok(OriginalPart {
        config,
        tensors: tensors.converted(|key, shape| convert(key, shape, inner)),
    })
}

/// Layers outside the blocks.
const FIXED: [(&str, &str); 10] = [
    ("img_in.", "x_embedder."),
    ("txt_in.", "context_embedder."),
    (
        "time_in.in_layer.",
        "time_text_embed.timestep_embedder.linear_1.",
    ),
    (
        "time_in.out_layer.",
        "time_text_embed.timestep_embedder.linear_2.",
    ),
    (
        "guidance_in.in_layer.",
        "time_text_embed.guidance_embedder.linear_1.",
    ),
    (
        "guidance_in.out_layer.",
        "time_text_embed.guidance_embedder.linear_2.",
    ),
    (
        "vector_in.in_layer.",
        "time_text_embed.text_embedder.linear_1.",
    ),
    (
        "vector_in.out_layer.",
        "time_text_embed.text_embedder.linear_2.",
    ),
    ("final_layer.linear.", "proj_out."),
    // The shift comes first there, diffusers' scale.
    ("final_layer.adaLN_modulation.1.", "norm_out.linear."),
];

/// Layers of a double block.
const DOUBLE: [(&str, &str); 12] = [
    ("img_mod.lin.", "norm1.linear."),
    ("txt_mod.lin.", "norm1_context.linear."),
    ("img_attn.norm.query_norm.scale", "attn.norm_q.weight"),
    ("img_attn.norm.key_norm.scale", "attn.norm_k.weight"),
    ("txt_attn.norm.query_norm.scale", "attn.norm_added_q.weight"),
    ("txt_attn.norm.key_norm.scale", "attn.norm_added_k.weight"),
    ("img_attn.proj.", "attn.to_out.0."),
    ("txt_attn.proj.", "attn.to_add_out."),
    ("img_mlp.0.", "ff.net.0.proj."),
    ("img_mlp.2.", "ff.net.2."),
    ("txt_mlp.0.", "ff_context.net.0.proj."),
    ("txt_mlp.2.", "ff_context.net.2."),
];

/// Layers of a double block that became one for each of these.
const DOUBLE_FUSED: [(&str, [&str; 3]); 2] = [
    ("img_attn.qkv.", ["to_q", "to_k", "to_v"]),
    ("txt_attn.qkv.", ["add_q_proj", "add_k_proj", "add_v_proj"]),
];

/// Layers of a single block.
const SINGLE: [(&str, &str); 4] = [
    ("modulation.lin.", "norm.linear."),
    ("norm.query_norm.scale", "attn.norm_q.weight"),
    ("norm.key_norm.scale", "attn.norm_k.weight"),
    ("linear2.", "proj_out."),
];

/// The layer of a single block that makes queries, keys, values and the entry of the feed-forward layer.
const SINGLE_FUSED: &str = "linear1.";

/// The layers of a transformer whose diffusers' layers are `paths`, by the names of the original code.
pub fn layers(paths: &[&str]) -> Vec<Original> {
    let names = names(paths);
    let convert = |key: &str, shape: &Shape| convert(key, shape, 0);
    let mut layers = layers_of(&names, convert);
    layers.extend(xlabs_layers(paths));
    layers.extend(norms(&tensors_of(&names, convert)));
    layers
}

/// The norms among `tensors`, as layers.
fn norms(tensors: &[Original]) -> impl Iterator<Item = Original> {
    tensors.iter().filter_map(|tensor| {
        let layer = |(name, transform): &(String, Transform)| {
            Some((name.strip_suffix(".weight")?.to_owned(), transform.clone()))
        };
        Some(Original {
            name: tensor.name.strip_suffix(".scale")?.to_owned(),
            parts: tensor.parts.iter().map(layer).collect::<Option<_>>()?,
        })
    })
}

/// The same for tensors.
pub fn tensors(paths: &[&str]) -> Vec<Original> {
    tensors_of(&names(paths), |key, shape| convert(key, shape, 0))
}

/// The layers, which end in a dot, and the other tensors of a transformer of so many blocks.
fn names(paths: &[&str]) -> Vec<String> {
    let of_blocks = |blocks: &str, original: &str, leaves: Vec<&str>| {
        numbered(original, count_blocks(paths, blocks), &leaves)
    };
    let fused = DOUBLE_FUSED.iter().map(|(fused, _)| *fused);
    let of_double = originals(&DOUBLE).chain(fused).collect();
    let of_single = originals(&SINGLE).chain([SINGLE_FUSED]).collect();
    let outer = originals(&FIXED).map(str::to_owned);
    outer
        .chain(of_blocks("transformer_blocks.", "double_blocks", of_double))
        .chain(of_blocks(
            "single_transformer_blocks.",
            "single_blocks",
            of_single,
        ))
        .collect()
}

/// The same layers by the names that XLabs-AI's trainer gives those of attention: its processors'.
fn xlabs_layers(paths: &[&str]) -> Vec<Original> {
    let layer = |name: String, block: &str, parts: &[&str]| Original {
        name,
        parts: parts
            .iter()
            .map(|part| (format!("{block}.{part}"), Transform::Rows(0..0)))
            .collect(),
    };
    let mut layers = Vec::new();
    for index in 0..count_blocks(paths, "transformer_blocks.") {
        let (of, block) = (
            format!("double_blocks.{index}"),
            format!("transformer_blocks.{index}.attn"),
        );
        for (name, parts) in [
            ("qkv_lora1", &["to_q", "to_k", "to_v"][..]),
            ("proj_lora1", &["to_out.0"]),
            ("qkv_lora2", &["add_q_proj", "add_k_proj", "add_v_proj"]),
            ("proj_lora2", &["to_add_out"]),
        ] {
            layers.push(layer(format!("{of}.{name}"), &block, parts));
        }
    }
    for index in 0..count_blocks(paths, "single_transformer_blocks.") {
        let (of, block) = (
            format!("single_blocks.{index}"),
            format!("single_transformer_blocks.{index}"),
        );
        let qkv = ["attn.to_q", "attn.to_k", "attn.to_v"];
        layers.push(layer(format!("{of}.qkv"), &block, &qkv));
        layers.push(layer(format!("{of}.proj"), &block, &["proj_out"]));
    }
    layers
}

/// What becomes of a tensor of a transformer whose tokens have `inner` features.
fn convert(key: &str, shape: &Shape, inner: usize) -> Converted {
    if let Some(name) = renamed(&FIXED, key) {
        let transform = match name.starts_with("norm_out.") {
            true => Transform::SwapHalves,
            false => Transform::Identity,
        };
        return Converted::To(vec![(name, transform)]);
    }
    let block = |kind: &str| key.strip_prefix(kind).and_then(number);
    if let Some((index, leaf)) = block("double_blocks.") {
        return double(&format!("transformer_blocks.{index}"), leaf, inner);
    }
    if let Some((index, leaf)) = block("single_blocks.") {
        let rows = shape.dims.first().copied().unwrap_or(0);
        return single(
            &format!("single_transformer_blocks.{index}"),
            leaf,
            rows,
            inner,
        );
    }
    Converted::Unknown
}

fn double(block: &str, leaf: &str, inner: usize) -> Converted {
    for (fused, names) in DOUBLE_FUSED {
        if let Some(kind) = leaf.strip_prefix(fused) {
            let third = |(i, name)| {
                let name = format!("{block}.attn.{name}.{kind}");
                (name, Transform::Rows(i * inner..(i + 1) * inner))
            };
            return Converted::To(names.into_iter().enumerate().map(third).collect());
        }
    }
    renamed(&DOUBLE, leaf)
        .map(|leaf| format!("{block}.{leaf}"))
        .into()
}

/// `rows` are those of the tensor: its first layer has queries, keys and values, and the feed-forward layer's entry.
fn single(block: &str, leaf: &str, rows: usize, inner: usize) -> Converted {
    if let Some(kind) = leaf.strip_prefix(SINGLE_FUSED) {
        let part = |name: &str, rows| (format!("{block}.{name}.{kind}"), Transform::Rows(rows));
        return Converted::To(vec![
            part("attn.to_q", 0..inner),
            part("attn.to_k", inner..2 * inner),
            part("attn.to_v", 2 * inner..3 * inner),
            part("proj_mlp", 3 * inner..rows),
        ]);
    }
    renamed(&SINGLE, leaf)
        .map(|leaf| format!("{block}.{leaf}"))
        .into()
}
