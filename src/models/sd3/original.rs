//! The transformer of Stability AI's code (`MMDiT`), which other files keep.

use serde_json::{Map, Value, json};

use crate::models::original::{
    Converted, Original, OriginalPart, OriginalTensors, StructureError, Transform, count_blocks,
    layers_of, number, numbered, originals, renamed, set, tensors_of,
};
use crate::shape::Shape;

/// A tensor of every such transformer.
pub const SIGN: &str = "joint_blocks.0.context_block.adaLN_modulation.1.bias";

/// diffusers' name of the blocks.
const BLOCKS: &str = "transformer_blocks.";
const POSITIONS: &str = "pos_embed";
const IMAGE: &str = "x_embedder.proj.weight";
const LAST: &str = "final_layer.linear.weight";
const QUERY_NORM: &str = "joint_blocks.0.x_block.attn.ln_q.weight";

/// The layers with a second attention of the image's tokens.
fn dual_layers(tensors: &OriginalTensors, layers: usize) -> Vec<usize> {
    let has = |i: &usize| tensors.has(&format!("joint_blocks.{i}.x_block.attn2.qkv.weight"));
    (0..layers).filter(has).collect()
}

/// Whether queries and keys are normed, and whether there are layers with a second attention.
pub fn signature(tensors: &OriginalTensors) -> (bool, bool) {
    (
        tensors.has(QUERY_NORM),
        tensors.has("joint_blocks.0.x_block.attn2.qkv.weight"),
    )
}

/// Reads the tensors of a transformer. Fields that no tensor tells are those of `config`: the size of a head where
/// nothing norms it.
///
/// # Errors
/// When a tensor is missing, or heads have no features.
pub fn read<'a>(
    tensors: &OriginalTensors<'a>,
    mut config: Map<String, Value>,
) -> Result<OriginalPart<'a>, StructureError> {
    let inner = tensors.dim(IMAGE, 0)?;
    let layers = tensors.count(|i| format!("joint_blocks.{i}.x_block.attn.qkv.weight"));
    if tensors.has(QUERY_NORM) {
        let head = tensors.dim(QUERY_NORM, 0)?;
        set(&mut config, [("attention_head_dim", json!(head))]);
    }
    let head = config.get("attention_head_dim").and_then(Value::as_u64);
    let heads = head.and_then(|head| inner.checked_div(head as usize));
    let heads =
        heads.ok_or_else(|| StructureError(format!("{}{QUERY_NORM} is empty", tensors.prefix)))?;
    let patch = tensors.dim(IMAGE, 2)?;
    let out_channels = tensors.dim(LAST, 0)?.checked_div(patch * patch);
    set(
        &mut config,
        [
            ("caption_projection_dim", json!(inner)),
            ("dual_attention_layers", json!(dual_layers(tensors, layers))),
            ("in_channels", json!(tensors.dim(IMAGE, 1)?)),
            (
                "joint_attention_dim",
                json!(tensors.dim("context_embedder.weight", 1)?),
            ),
            ("num_attention_heads", json!(heads)),
            ("num_layers", json!(layers)),
            ("out_channels", json!(out_channels)),
            ("patch_size", json!(patch)),
            (
                "pooled_projection_dim",
                json!(tensors.dim("y_embedder.mlp.0.weight", 1)?),
            ),
            (
                "pos_embed_max_size",
                json!(tensors.dim(POSITIONS, 1)?.isqrt()),
            ),
        ],
    );
    Ok(OriginalPart {
        config,
        tensors: tensors.converted(|key, shape| convert(key, shape, layers)),
    })
}

/// Layers outside the blocks.
const FIXED: [(&str, &str); 8] = [
    ("x_embedder.proj.", "pos_embed.proj."),
    ("context_embedder.", "context_embedder."),
    (
        "t_embedder.mlp.0.",
        "time_text_embed.timestep_embedder.linear_1.",
    ),
    (
        "t_embedder.mlp.2.",
        "time_text_embed.timestep_embedder.linear_2.",
    ),
    (
        "y_embedder.mlp.0.",
        "time_text_embed.text_embedder.linear_1.",
    ),
    (
        "y_embedder.mlp.2.",
        "time_text_embed.text_embedder.linear_2.",
    ),
    ("final_layer.linear.", "proj_out."),
    ("final_layer.adaLN_modulation.1.", "norm_out.linear."),
];

/// Layers of a block.
const LEAVES: [(&str, &str); 15] = [
    ("x_block.adaLN_modulation.1.", "norm1.linear."),
    ("context_block.adaLN_modulation.1.", "norm1_context.linear."),
    ("x_block.attn.ln_q.", "attn.norm_q."),
    ("x_block.attn.ln_k.", "attn.norm_k."),
    ("x_block.attn2.ln_q.", "attn2.norm_q."),
    ("x_block.attn2.ln_k.", "attn2.norm_k."),
    ("context_block.attn.ln_q.", "attn.norm_added_q."),
    ("context_block.attn.ln_k.", "attn.norm_added_k."),
    ("x_block.attn.proj.", "attn.to_out.0."),
    ("x_block.attn2.proj.", "attn2.to_out.0."),
    ("context_block.attn.proj.", "attn.to_add_out."),
    ("x_block.mlp.fc1.", "ff.net.0.proj."),
    ("x_block.mlp.fc2.", "ff.net.2."),
    ("context_block.mlp.fc1.", "ff_context.net.0.proj."),
    ("context_block.mlp.fc2.", "ff_context.net.2."),
];

/// Layers of a block that became one for each of these.
const FUSED: [(&str, &str, [&str; 3]); 3] = [
    ("x_block.attn.qkv.", "attn", ["to_q", "to_k", "to_v"]),
    ("x_block.attn2.qkv.", "attn2", ["to_q", "to_k", "to_v"]),
    (
        "context_block.attn.qkv.",
        "attn",
        ["add_q_proj", "add_k_proj", "add_v_proj"],
    ),
];

/// The layers of a transformer whose diffusers' layers are `paths`, by the names of the original code.
pub fn layers(paths: &[&str]) -> Vec<Original> {
    let count = count_blocks(paths, BLOCKS);
    layers_of(&names(count), |key, shape| convert(key, shape, count))
}

/// The same for tensors.
pub fn tensors(paths: &[&str]) -> Vec<Original> {
    let count = count_blocks(paths, BLOCKS);
    tensors_of(&names(count), |key, shape| convert(key, shape, count))
}

/// The layers, which end in a dot, and the other tensors of a transformer of `count` blocks.
fn names(count: usize) -> Vec<String> {
    let fused = FUSED.iter().map(|(fused, ..)| *fused);
    let of_block: Vec<&str> = originals(&LEAVES).chain(fused).collect();
    let outer = originals(&FIXED).chain([POSITIONS]).map(str::to_owned);
    outer
        .chain(numbered("joint_blocks", count, &of_block))
        .collect()
}

/// What becomes of a tensor of a transformer of so many layers.
fn convert(key: &str, shape: &Shape, layers: usize) -> Converted {
    if key == POSITIONS {
        return Some("pos_embed.pos_embed".to_owned()).into();
    }
    if let Some(name) = renamed(&FIXED, key) {
        return scale_first(name.starts_with("norm_out."), name);
    }
    let Some((index, leaf)) = key.strip_prefix("joint_blocks.").and_then(number) else {
        return Converted::Unknown;
    };
    let block = format!("transformer_blocks.{index}");
    let third = shape.dims.first().copied().unwrap_or(0) / 3;
    for (fused, layer, names) in FUSED {
        if let Some(kind) = leaf.strip_prefix(fused) {
            let part = |(i, name)| {
                let rows = Transform::Rows(i * third..(i + 1) * third);
                (format!("{block}.{layer}.{name}.{kind}"), rows)
            };
            return Converted::To(names.into_iter().enumerate().map(part).collect());
        }
    }
    let Some(leaf) = renamed(&LEAVES, leaf) else {
        return Converted::Unknown;
    };
    // The text's last norm has two parts, like that after the blocks.
    let is_last = index + 1 == layers && leaf.starts_with("norm1_context.");
    scale_first(is_last, format!("{block}.{leaf}"))
}

/// A tensor of a modulation by its new name; where it has two parts, the shift comes first there and diffusers' scale.
fn scale_first(has_two_parts: bool, name: String) -> Converted {
    let transform = match has_two_parts {
        true => Transform::SwapHalves,
        false => Transform::Identity,
    };
    Converted::To(vec![(name, transform)])
}
