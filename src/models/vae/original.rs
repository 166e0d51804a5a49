//! `AutoencoderKL` of LDM and SGM, and of older diffusers.

use serde_json::{Map, Value, json};

use crate::dtype::DType;
use crate::models::Part;
use crate::models::original::{
    Converted, Original, OriginalPart, OriginalTensors, Root, StructureError, Transform,
    count_blocks, number, numbered, originals, renamed, set, tensors_of,
};
use crate::shape::Shape;

/// Where a file of a whole model has its autoencoder.
pub const ROOTS: [Root; 2] = [root("first_stage_model."), root("vae.")];
/// The same in files that ComfyUI's users put together.
pub const COMFY_ROOTS: [Root; 2] = [root("vae."), root("first_stage_model.")];

const fn root(prefix: &'static str) -> Root {
    Root {
        prefix,
        part: Part::Vae,
        read,
        originals: Some(tensors),
    }
}

/// Reads the tensors of an autoencoder. Fields that no tensor tells, such as the deviation of latents before they are
/// scaled, are those of `config`.
///
/// # Errors
/// When a tensor is missing, or the decoder has no layers.
pub fn read<'a>(
    tensors: &OriginalTensors<'a>,
    mut config: Map<String, Value>,
) -> Result<OriginalPart<'a>, StructureError> {
    let first = |level: usize| format!("decoder.up.{level}.block.0.conv1.weight");
    let levels = tensors.count(first);
    let channels: Vec<usize> = (0..levels)
        .map(|level| tensors.dim(&first(level), 0))
        .collect::<Result<_, _>>()?;
    // A block of the decoder has one resnet more than one of the encoder.
    let layers = tensors
        .count(|i| format!("decoder.up.0.block.{i}.conv1.weight"))
        .saturating_sub(1);
    if layers == 0 {
        return Err(StructureError(format!(
            "{}decoder.up.0 has fewer than two resnets",
            tensors.prefix
        )));
    }
    let in_channels = tensors.dim("encoder.conv_in.weight", 1)?;
    let latent_channels = tensors.dim("decoder.conv_in.weight", 1)?;
    let out_channels = tensors.dim("decoder.conv_out.weight", 0)?;
    set(
        &mut config,
        [
            ("block_out_channels", json!(channels)),
            (
                "down_block_types",
                json!(vec!["DownEncoderBlock2D"; levels]),
            ),
            ("in_channels", json!(in_channels)),
            ("latent_channels", json!(latent_channels)),
            ("layers_per_block", json!(layers)),
            ("out_channels", json!(out_channels)),
            ("up_block_types", json!(vec!["UpDecoderBlock2D"; levels])),
            (
                "use_post_quant_conv",
                json!(tensors.has("post_quant_conv.weight")),
            ),
            ("use_quant_conv", json!(tensors.has("quant_conv.weight"))),
        ],
    );
    Ok(OriginalPart {
        config,
        tensors: tensors.converted(|key, shape| convert(key, shape, levels)),
    })
}

/// Layers of the encoder and of the decoder outside blocks.
const LAYERS: [(&str, &str); 3] = [
    ("conv_in.", "conv_in."),
    ("conv_out.", "conv_out."),
    ("norm_out.", "conv_norm_out."),
];
/// The resnets of the middle block.
const MIDDLE: [(&str, &str); 2] = [
    ("mid.block_1.", "mid_block.resnets.0."),
    ("mid.block_2.", "mid_block.resnets.1."),
];
/// The attention of the middle block, and its layers.
const ATTENTION_BLOCK: &str = "mid.attn_1.";
const ATTENTION: [(&str, &str); 5] = [
    ("norm.", "group_norm."),
    ("q.", "to_q."),
    ("k.", "to_k."),
    ("v.", "to_v."),
    ("proj_out.", "to_out.0."),
];
/// Layers of a resnet.
const RESNET: [&str; 5] = ["norm1.", "conv1.", "norm2.", "conv2.", "nin_shortcut."];
/// Layers beside the encoder and the decoder.
const OUTER: [&str; 2] = ["quant_conv.", "post_quant_conv."];

/// The tensors that LDM has of an autoencoder whose tensors have these names in diffusers.
fn tensors(paths: &[&str]) -> Vec<Original> {
    let levels = count_blocks(paths, "decoder.up_blocks.");
    let mut names: Vec<String> = OUTER.iter().map(|name| (*name).to_owned()).collect();
    for (side, blocks, theirs, sampler) in [
        ("encoder", "down_blocks", "down", "downsample.conv."),
        ("decoder", "up_blocks", "up", "upsample.conv."),
    ] {
        let layers = originals(&LAYERS).map(|layer| format!("{side}.{layer}"));
        names.extend(layers);
        for (block, _) in MIDDLE {
            names.extend(RESNET.map(|layer| format!("{side}.{block}{layer}")));
        }
        names.push(format!("{side}.{ATTENTION_BLOCK}{}", ATTENTION[0].0));
        for level in 0..levels {
            let resnets = count_blocks(paths, &format!("{side}.{blocks}.{level}.resnets."));
            let level = format!("{side}.{theirs}.{level}");
            names.extend(numbered(&format!("{level}.block"), resnets, &RESNET));
            names.push(format!("{level}.{sampler}"));
        }
    }
    let convert = |key: &str, shape: &Shape| convert(key, shape, levels);
    let mut tensors = tensors_of(&names, convert);
    for side in ["encoder", "decoder"] {
        for (layer, _) in &ATTENTION[1..] {
            let name = format!("{side}.{ATTENTION_BLOCK}{layer}");
            let pointwise = Shape::new(DType::F32, [1; 4]);
            tensors.extend(Original::tensor(
                format!("{name}weight"),
                &pointwise,
                convert,
            ));
            tensors.extend(tensors_of(&[format!("{name}bias")], convert));
        }
    }
    tensors
}

/// What becomes of a tensor of an autoencoder with `levels` resolutions, which LDM's decoder counts from the other end
/// than diffusers does.
fn convert(key: &str, shape: &Shape, levels: usize) -> Converted {
    if key.starts_with("loss.") || key.starts_with("model_ema.") {
        return Converted::Ignored("used in training only");
    }
    if OUTER.iter().any(|same| key.starts_with(same)) {
        return Some(key.to_owned()).into();
    }
    let Some((side @ ("encoder" | "decoder"), rest)) = key.split_once('.') else {
        return Converted::Unknown;
    };
    if let Some(leaf) = rest.strip_prefix(ATTENTION_BLOCK) {
        return match renamed(&ATTENTION, leaf) {
            Some(leaf) => {
                let name = format!("{side}.mid_block.attentions.0.{leaf}");
                Converted::To(vec![(name, as_matrix(shape))])
            }
            None => Converted::Unknown,
        };
    }
    renamed(&LAYERS, rest)
        .or_else(|| renamed(&MIDDLE, rest))
        .map(|leaf| leaf.replace(".nin_shortcut.", ".conv_shortcut."))
        .or_else(|| block_name(rest, levels))
        .map(|rest| format!("{side}.{rest}"))
        .into()
}

fn block_name(key: &str, levels: usize) -> Option<String> {
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

/// What becomes of a tensor of diffusers; before 0.18 attention had other names.
pub fn of_diffusers(key: &str, shape: &Shape) -> Converted {
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
