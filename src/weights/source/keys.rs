//! Names of the original code and of older diffusers, as today's diffusers and transformers have them.

use crate::shape::Shape;
use crate::weights::Transform;

/// What becomes of one tensor.
#[derive(Debug, PartialEq)]
pub(super) enum Converted {
    To(Vec<(String, Transform)>),
    Ignored(&'static str),
    /// Not a name of this dialect.
    Unknown,
}

impl From<Option<String>> for Converted {
    fn from(name: Option<String>) -> Self {
        name.map_or(Converted::Unknown, |name| {
            Converted::To(vec![(name, Transform::Identity)])
        })
    }
}

const POSITIONS: &str = "the numbers of the positions, which are no weights";
const OF_TRAINING: &str = "used in training only";

/// The first part of `key`, which must be a number, and what follows.
fn number(key: &str) -> Option<(usize, &str)> {
    let (first, rest) = key.split_once('.')?;
    Some((first.parse().ok()?, rest))
}

/// `key` with the first matching prefix of `table` replaced.
fn renamed(table: &[(&str, &str)], key: &str) -> Option<String> {
    table
        .iter()
        .find_map(|(from, to)| Some(format!("{to}{}", key.strip_prefix(from)?)))
}

/// A UNet of LDM or SGM. `layers` is diffusers' `layers_per_block`, the same in all blocks.
///
/// LDM numbers its blocks through: on the way down `input_blocks.0` is the first convolution and each block then has
/// `layers` resnets and a downsampler; on the way up each has `layers + 1` resnets, the last with the upsampler.
pub(super) fn unet(key: &str, layers: usize) -> Converted {
    const FIXED: [(&str, &str); 7] = [
        ("time_embed.0.", "time_embedding.linear_1."),
        ("time_embed.2.", "time_embedding.linear_2."),
        ("label_emb.0.0.", "add_embedding.linear_1."),
        ("label_emb.0.2.", "add_embedding.linear_2."),
        ("input_blocks.0.0.", "conv_in."),
        ("out.0.", "conv_norm_out."),
        ("out.2.", "conv_out."),
    ];
    renamed(&FIXED, key)
        .or_else(|| unet_block(key, layers))
        .into()
}

fn unet_block(key: &str, layers: usize) -> Option<String> {
    const RESNET: [(&str, &str); 6] = [
        ("in_layers.0.", "norm1."),
        ("in_layers.2.", "conv1."),
        ("out_layers.0.", "norm2."),
        ("out_layers.3.", "conv2."),
        ("emb_layers.1.", "time_emb_proj."),
        ("skip_connection.", "conv_shortcut."),
    ];
    let resnet = |leaf: &str| renamed(&RESNET, leaf);
    let (side, rest) = key.split_once('.')?;
    let (index, rest) = number(rest)?;
    match side {
        "input_blocks" => {
            let index = index.checked_sub(1)?;
            let (block, layer) = (index / (layers + 1), index % (layers + 1));
            let block = format!("down_blocks.{block}");
            match number(rest)? {
                (0, leaf) => match leaf.strip_prefix("op.") {
                    Some(leaf) => Some(format!("{block}.downsamplers.0.conv.{leaf}")),
                    None => Some(format!("{block}.resnets.{layer}.{}", resnet(leaf)?)),
                },
                (1, leaf) => Some(format!("{block}.attentions.{layer}.{leaf}")),
                _ => None,
            }
        }
        "middle_block" => match index {
            0 | 2 => Some(format!("mid_block.resnets.{}.{}", index / 2, resnet(rest)?)),
            1 => Some(format!("mid_block.attentions.0.{rest}")),
            _ => None,
        },
        "output_blocks" => {
            let (block, layer) = (index / (layers + 1), index % (layers + 1));
            let block = format!("up_blocks.{block}");
            let (place, leaf) = number(rest)?;
            // The upsampler comes second where there is no attention.
            match (place, leaf.strip_prefix("conv.")) {
                (0, None) => Some(format!("{block}.resnets.{layer}.{}", resnet(leaf)?)),
                (1 | 2, Some(leaf)) => Some(format!("{block}.upsamplers.0.conv.{leaf}")),
                (1, None) => Some(format!("{block}.attentions.{layer}.{leaf}")),
                _ => None,
            }
        }
        _ => None,
    }
}

/// A VAE of LDM or SGM with `levels` resolutions, which its decoder counts from the other end than diffusers does.
pub(super) fn vae(key: &str, shape: &Shape, levels: usize) -> Converted {
    if key.starts_with("loss.") || key.starts_with("model_ema.") {
        return Converted::Ignored(OF_TRAINING);
    }
    for same in ["quant_conv.", "post_quant_conv."] {
        if key.starts_with(same) {
            return Some(key.to_owned()).into();
        }
    }
    let Some((side @ ("encoder" | "decoder"), rest)) = key.split_once('.') else {
        return Converted::Unknown;
    };
    if let Some(leaf) = rest.strip_prefix("mid.attn_1.") {
        const ATTENTION: [(&str, &str); 5] = [
            ("norm.", "group_norm."),
            ("q.", "to_q."),
            ("k.", "to_k."),
            ("v.", "to_v."),
            ("proj_out.", "to_out.0."),
        ];
        return match renamed(&ATTENTION, leaf) {
            Some(leaf) => {
                let name = format!("{side}.mid_block.attentions.0.{leaf}");
                Converted::To(vec![(name, as_matrix(shape))])
            }
            None => Converted::Unknown,
        };
    }
    const FIXED: [(&str, &str); 5] = [
        ("conv_in.", "conv_in."),
        ("conv_out.", "conv_out."),
        ("norm_out.", "conv_norm_out."),
        ("mid.block_1.", "mid_block.resnets.0."),
        ("mid.block_2.", "mid_block.resnets.1."),
    ];
    renamed(&FIXED, rest)
        .map(|leaf| leaf.replace(".nin_shortcut.", ".conv_shortcut."))
        .or_else(|| vae_block(rest, levels))
        .map(|rest| format!("{side}.{rest}"))
        .into()
}

fn vae_block(key: &str, levels: usize) -> Option<String> {
    let (side, rest) = key.split_once('.')?;
    let (index, rest) = number(rest)?;
    let (block, sampler) = match side {
        "down" => (format!("down_blocks.{index}"), "down"),
        "up" => {
            let index = levels.checked_sub(index)?.checked_sub(1)?;
            (format!("up_blocks.{index}"), "up")
        }
        _ => return None,
    };
    if let Some(leaf) = rest.strip_prefix(&format!("{sampler}sample.conv.")) {
        return Some(format!("{block}.{sampler}samplers.0.conv.{leaf}"));
    }
    let (layer, leaf) = number(rest.strip_prefix("block.")?)?;
    let leaf = renamed(&[("nin_shortcut.", "conv_shortcut.")], leaf).unwrap_or(leaf.to_owned());
    Some(format!("{block}.resnets.{layer}.{leaf}"))
}

/// A 1x1 convolution as the matrix that it is.
fn as_matrix(shape: &Shape) -> Transform {
    match shape.dims[..] {
        [rows, columns, 1] | [rows, columns, 1, 1] => Transform::Reshape(vec![rows, columns]),
        _ => Transform::Identity,
    }
}

/// A VAE of diffusers; before 0.18 its attention had other names.
pub(super) fn diffusers_vae(key: &str, shape: &Shape) -> Converted {
    const OLD: [(&str, &str); 4] = [
        ("query.", "to_q."),
        ("key.", "to_k."),
        ("value.", "to_v."),
        ("proj_attn.", "to_out.0."),
    ];
    let marker = ".mid_block.attentions.0.";
    let new = key
        .split_once(marker)
        .and_then(|(side, leaf)| Some(format!("{side}{marker}{}", renamed(&OLD, leaf)?)));
    match new {
        Some(name) => Converted::To(vec![(name, as_matrix(shape))]),
        None => Some(key.to_owned()).into(),
    }
}

/// A text encoder of transformers. Some versions leave `text_model.` out.
pub(super) fn clip(key: &str, with_projection: bool) -> Converted {
    let key = match key.split_once('.') {
        Some(("embeddings" | "encoder" | "final_layer_norm", _)) => format!("text_model.{key}"),
        _ => key.to_owned(),
    };
    match key.as_str() {
        "text_model.embeddings.position_ids" => Converted::Ignored(POSITIONS),
        "logit_scale" => Converted::Ignored(OF_TRAINING),
        "text_projection.weight" if !with_projection => {
            Converted::Ignored("the projection, which this text encoder's model does not use")
        }
        _ => Some(key).into(),
    }
}

/// OpenCLIP's text tower, of which the first `layers` are used.
pub(super) fn open_clip(
    key: &str,
    shape: &Shape,
    with_projection: bool,
    layers: usize,
) -> Converted {
    const FIXED: [(&str, &str); 3] = [
        (
            "positional_embedding",
            "text_model.embeddings.position_embedding.weight",
        ),
        ("token_embedding.", "text_model.embeddings.token_embedding."),
        ("ln_final.", "text_model.final_layer_norm."),
    ];
    match key {
        "logit_scale" => return Converted::Ignored(OF_TRAINING),
        "text_projection" | "text_projection.weight" if !with_projection => {
            return Converted::Ignored(
                "the projection, which this text encoder's model does not use",
            );
        }
        // A parameter that is multiplied from the right, where a linear layer's weight is from the left.
        "text_projection" => {
            let name = "text_projection.weight".to_owned();
            return Converted::To(vec![(name, Transform::Transpose)]);
        }
        "text_projection.weight" => return Some(key.to_owned()).into(),
        _ => {}
    }
    if let Some(name) = renamed(&FIXED, key) {
        return Some(name).into();
    }
    let Some((layer, leaf)) = key.strip_prefix("transformer.resblocks.").and_then(number) else {
        return Converted::Unknown;
    };
    if layer >= layers {
        return Converted::Ignored("the last layer, whose result this model does not use");
    }
    open_clip_layer(&format!("text_model.encoder.layers.{layer}"), leaf, shape)
}

fn open_clip_layer(layer: &str, leaf: &str, shape: &Shape) -> Converted {
    const LAYER: [(&str, &str); 5] = [
        ("ln_1.", "layer_norm1."),
        ("ln_2.", "layer_norm2."),
        ("mlp.c_fc.", "mlp.fc1."),
        ("mlp.c_proj.", "mlp.fc2."),
        ("attn.out_proj.", "self_attn.out_proj."),
    ];
    // Queries, keys and values in one matrix, one below the other.
    if let Some(kind) = leaf.strip_prefix("attn.in_proj_") {
        let rows = shape.dims.first().copied().unwrap_or(0) / 3;
        let third = |i: usize, name: &str| {
            let rows = Transform::Rows(i * rows..(i + 1) * rows);
            (format!("{layer}.self_attn.{name}.{kind}"), rows)
        };
        return Converted::To(vec![
            third(0, "q_proj"),
            third(1, "k_proj"),
            third(2, "v_proj"),
        ]);
    }
    renamed(&LAYER, leaf)
        .map(|leaf| format!("{layer}.{leaf}"))
        .into()
}
