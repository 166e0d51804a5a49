//! The transformer of PixArt's own code (`PixArtMS`), as files converted to safetensors keep it.

use serde_json::{Map, Value, json};

use crate::models::original::{
    ARCHITECTURE, Converted, Original, OriginalPart, OriginalTensors, RESOLUTION, StructureError,
    Transform, count_blocks, layers_of, number, numbered, originals, renamed, set, tensors_of,
};
use crate::shape::Shape;

use super::config::PATCH;

/// A tensor of every such transformer.
pub const SIGN: &str = "blocks.0.cross_attn.kv_linear.weight";

const IMAGE: &str = "x_embedder.proj.weight";
const LAST: &str = "final_layer.linear.weight";
const SIZE: &str = "csize_embedder.mlp.0.weight";
const POSITIONS: &str = "pos_embed";
/// Latents of a side at 512 x 512 pixels, where positions are not scaled.
const SIDE_OF_512: usize = 64;
/// The embedding of no caption, with a row for each token.
const NO_CAPTION: &str = "y_embedder.y_embedding";

/// Whether it is of Sigma: captions have 300 tokens there and 120 in alpha, which may also take the size. Files that were
/// written from diffusers' tensors have no such captions.
pub fn is_sigma(tensors: &OriginalTensors) -> bool {
    let said = tensors.metadata.get(ARCHITECTURE);
    match (tensors.get(NO_CAPTION), said) {
        (Some([tokens, ..]), _) => *tokens > 120,
        (Some([]) | None, Some(said)) => !said.contains("alpha"),
        (Some([]) | None, None) => !tensors.has(SIZE),
    }
}

/// Latents of a side in training, as far as the file tells.
fn side(tensors: &OriginalTensors) -> Option<usize> {
    if let Some([_, tokens, _]) = tensors.get(POSITIONS) {
        return Some(tokens.isqrt() * PATCH);
    }
    let said = tensors.metadata.get(RESOLUTION);
    let pixels = said.and_then(|said| said.split_once('x')?.0.parse::<usize>().ok());
    // Alpha takes the size where it is for 1024 x 1024 pixels.
    let without_size = !is_sigma(tensors) && !tensors.has(SIZE);
    let latents = pixels.map(|pixels| pixels * SIDE_OF_512 / 512);
    latents.or(without_size.then_some(SIDE_OF_512))
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
    let head = config.get("attention_head_dim").and_then(Value::as_u64);
    let heads = head.and_then(|head| inner.checked_div(head as usize));
    let layers = tensors.count(|i| format!("blocks.{i}.cross_attn.kv_linear.weight"));
    let out_channels = tensors.dim(LAST, 0)? / (PATCH * PATCH);
    set(
        &mut config,
        [
            (
                "caption_channels",
                json!(tensors.dim("y_embedder.y_proj.fc1.weight", 1)?),
            ),
            ("cross_attention_dim", json!(inner)),
            ("in_channels", json!(tensors.dim(IMAGE, 1)?)),
            ("num_attention_heads", json!(heads)),
            ("num_layers", json!(layers)),
            ("out_channels", json!(out_channels)),
            ("patch_size", json!(tensors.dim(IMAGE, 2)?)),
        ],
    );
    let side = side(tensors);
    if let Some(side) = side {
        set(&mut config, [("sample_size", json!(side))]);
    }
    if tensors.has(SIZE) {
        set(&mut config, [("use_additional_conditions", json!(true))]);
    }
    if let (true, Some(side)) = (is_sigma(tensors), side) {
        let scale = side as f64 / SIDE_OF_512 as f64;
        set(&mut config, [("interpolation_scale", json!(scale))]);
    }
    Ok(OriginalPart {
        config,
        tensors: tensors.converted(convert),
    })
}

/// Layers outside the blocks.
const FIXED: [(&str, &str); 12] = [
    ("x_embedder.proj.", "pos_embed.proj."),
    ("y_embedder.y_proj.fc1.", "caption_projection.linear_1."),
    ("y_embedder.y_proj.fc2.", "caption_projection.linear_2."),
    (
        "t_embedder.mlp.0.",
        "adaln_single.emb.timestep_embedder.linear_1.",
    ),
    (
        "t_embedder.mlp.2.",
        "adaln_single.emb.timestep_embedder.linear_2.",
    ),
    (
        "csize_embedder.mlp.0.",
        "adaln_single.emb.resolution_embedder.linear_1.",
    ),
    (
        "csize_embedder.mlp.2.",
        "adaln_single.emb.resolution_embedder.linear_2.",
    ),
    (
        "ar_embedder.mlp.0.",
        "adaln_single.emb.aspect_ratio_embedder.linear_1.",
    ),
    (
        "ar_embedder.mlp.2.",
        "adaln_single.emb.aspect_ratio_embedder.linear_2.",
    ),
    ("t_block.1.", "adaln_single.linear."),
    ("final_layer.linear.", "proj_out."),
    ("final_layer.scale_shift_table", "scale_shift_table"),
];

/// Layers of a block.
const LEAVES: [(&str, &str); 6] = [
    ("scale_shift_table", "scale_shift_table"),
    ("attn.proj.", "attn1.to_out.0."),
    ("cross_attn.q_linear.", "attn2.to_q."),
    ("cross_attn.proj.", "attn2.to_out.0."),
    ("mlp.fc1.", "ff.net.0.proj."),
    ("mlp.fc2.", "ff.net.2."),
];

/// Layers of a block that became one for each of these.
const FUSED: [(&str, &[&str]); 2] = [
    ("attn.qkv.", &["attn1.to_q", "attn1.to_k", "attn1.to_v"]),
    ("cross_attn.kv_linear.", &["attn2.to_k", "attn2.to_v"]),
];

/// The layers of a transformer whose diffusers' layers are `paths`, by the names of the original code.
pub fn layers(paths: &[&str]) -> Vec<Original> {
    layers_of(&names(paths), convert)
}

/// The same for tensors, without those that diffusers leaves out.
pub fn tensors(paths: &[&str]) -> Vec<Original> {
    tensors_of(&names(paths), convert)
}

/// The layers, which end in a dot, and the other tensors of a transformer of so many blocks.
fn names(paths: &[&str]) -> Vec<String> {
    let fused = FUSED.iter().map(|(fused, _)| *fused);
    let of_block: Vec<&str> = originals(&LEAVES).chain(fused).collect();
    let count = count_blocks(paths, "transformer_blocks.");
    let outer = originals(&FIXED).map(str::to_owned);
    outer.chain(numbered("blocks", count, &of_block)).collect()
}

/// What becomes of a tensor.
fn convert(key: &str, shape: &Shape) -> Converted {
    match key {
        POSITIONS => return Converted::Ignored("positions, which follow from their number"),
        NO_CAPTION => return Converted::Ignored("used in training only"),
        _ => {}
    }
    if let Some(name) = renamed(&FIXED, key) {
        return Some(name).into();
    }
    let Some((index, leaf)) = key.strip_prefix("blocks.").and_then(number) else {
        return Converted::Unknown;
    };
    let block = format!("transformer_blocks.{index}");
    let rows = shape.dims.first().copied().unwrap_or(0);
    for (fused, names) in FUSED {
        if let Some(kind) = leaf.strip_prefix(fused) {
            let each = rows / names.len();
            let part = |(i, name): (usize, &&str)| {
                let rows = Transform::Rows(i * each..(i + 1) * each);
                (format!("{block}.{name}.{kind}"), rows)
            };
            return Converted::To(names.iter().enumerate().map(part).collect());
        }
    }
    renamed(&LEAVES, leaf)
        .map(|leaf| format!("{block}.{leaf}"))
        .into()
}
