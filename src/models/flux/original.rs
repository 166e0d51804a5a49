//! The transformer of Black Forest Labs' code, which other files keep.

use serde_json::{Map, Value, json};

use crate::models::original::{
    Converted, OriginalPart, OriginalTensors, StructureError, Transform, number, renamed, set,
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
    let of = |name: &str, dimension: usize| tensors.get(name)?.get(dimension).copied();
    // Fill's and the control models' transformers see more than the latents that they predict.
    match (of(IMAGE, 1), of(LAST, 0)) {
        (Some(taken), Some(made)) if taken > made => Claim::Lookalike {
            name: "FLUX.1 Fill, or FLUX.1 with a control image",
            advice: "name FLUX.1 dev or schnell",
        },
        _ if tensors.has(GUIDANCE) == with_guidance => Claim::Yes,
        _ => Claim::No,
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
    let in_channels = tensors.dim(IMAGE, 1)?;
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

/// What becomes of a tensor of a transformer whose tokens have `inner` features.
fn convert(key: &str, shape: &Shape, inner: usize) -> Converted {
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
    const LEAVES: [(&str, &str); 12] = [
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
    for (fused, names) in [
        ("img_attn.qkv.", ["to_q", "to_k", "to_v"]),
        ("txt_attn.qkv.", ["add_q_proj", "add_k_proj", "add_v_proj"]),
    ] {
        if let Some(kind) = leaf.strip_prefix(fused) {
            let third = |(i, name)| {
                let name = format!("{block}.attn.{name}.{kind}");
                (name, Transform::Rows(i * inner..(i + 1) * inner))
            };
            return Converted::To(names.into_iter().enumerate().map(third).collect());
        }
    }
    renamed(&LEAVES, leaf)
        .map(|leaf| format!("{block}.{leaf}"))
        .into()
}

/// `rows` are those of the tensor: its first layer has queries, keys and values, and the feed-forward layer's entry.
fn single(block: &str, leaf: &str, rows: usize, inner: usize) -> Converted {
    const LEAVES: [(&str, &str); 4] = [
        ("modulation.lin.", "norm.linear."),
        ("norm.query_norm.scale", "attn.norm_q.weight"),
        ("norm.key_norm.scale", "attn.norm_k.weight"),
        ("linear2.", "proj_out."),
    ];
    if let Some(kind) = leaf.strip_prefix("linear1.") {
        let part = |name: &str, rows| (format!("{block}.{name}.{kind}"), Transform::Rows(rows));
        return Converted::To(vec![
            part("attn.to_q", 0..inner),
            part("attn.to_k", inner..2 * inner),
            part("attn.to_v", 2 * inner..3 * inner),
            part("proj_mlp", 3 * inner..rows),
        ]);
    }
    renamed(&LEAVES, leaf)
        .map(|leaf| format!("{block}.{leaf}"))
        .into()
}
