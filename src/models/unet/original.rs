//! LDM's and SGM's names of the UNet (`openaimodel.UNetModel`), which number all blocks in one sequence. Of the down
//! blocks, `input_blocks.0` is the first convolution, and each block then has its resnets and a downsampler. Each up
//! block has one more resnet, the last with the upsampler.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::models::original::{
    Original, OriginalPart, OriginalTensors, StructureError, Transform, number, per_block, renamed,
    set,
};

/// A tensor that every UNet with these names has.
pub const SIGN: &str = "input_blocks.0.0.weight";

/// Names outside blocks, and diffusers'.
const FIXED: [(&str, &str); 7] = [
    ("time_embed.0.", "time_embedding.linear_1."),
    ("time_embed.2.", "time_embedding.linear_2."),
    ("label_emb.0.0.", "add_embedding.linear_1."),
    ("label_emb.0.2.", "add_embedding.linear_2."),
    ("input_blocks.0.0.", "conv_in."),
    ("out.0.", "conv_norm_out."),
    ("out.2.", "conv_out."),
];
/// Names within a resnet, and diffusers'.
const RESNET: [(&str, &str); 6] = [
    ("in_layers.0.", "norm1."),
    ("in_layers.2.", "conv1."),
    ("out_layers.0.", "norm2."),
    ("out_layers.3.", "conv2."),
    ("emb_layers.1.", "time_emb_proj."),
    ("skip_connection.", "conv_shortcut."),
];
/// What the tensors of a UNet show of its conditioning, by which families differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signature {
    /// The features of the text that it attends to.
    pub text_features: usize,
    /// Whether it embeds pooled text and sizes (`label_emb`).
    pub label_embedding: bool,
}

impl Signature {
    /// The signature of these tensors, if their UNet attends to text.
    pub fn of(tensors: &OriginalTensors) -> Option<Signature> {
        Some(Signature {
            text_features: text_features(tensors)?,
            label_embedding: tensors.has("label_emb.0.0.weight"),
        })
    }
}

fn text_features(tensors: &OriginalTensors) -> Option<usize> {
    let mut shapes = tensors.shapes.iter();
    let (_, to_k) = shapes.find(|(name, _)| name.ends_with(".attn2.to_k.weight"))?;
    to_k.dims.get(1).copied()
}

/// Reads the tensors of a UNet. Fields that no tensor tells are those of `config`, but the numbers of heads where
/// `head_channels`, the channels of one attention head, is the same in all blocks.
///
/// # Errors
/// When a tensor is missing, or levels differ in their number of resnets.
pub fn read<'a>(
    tensors: &OriginalTensors<'a>,
    mut config: Map<String, Value>,
    head_channels: Option<usize>,
) -> Result<OriginalPart<'a>, StructureError> {
    let levels = levels(tensors)?;
    let layers = levels[0].len();
    let blocks = blocks(tensors, &levels)?;
    let attends: Vec<bool> = blocks.iter().map(|block| block.depth > 0).collect();
    let kind = |side: &str, attends: bool| match attends {
        true => format!("CrossAttn{side}Block2D"),
        false => format!("{side}Block2D"),
    };
    let down: Vec<String> = attends.iter().map(|&a| kind("Down", a)).collect();
    let up: Vec<String> = attends.iter().rev().map(|&a| kind("Up", a)).collect();
    let channels: Vec<usize> = blocks.iter().map(|block| block.channels).collect();
    let linear = ["input_blocks.1.1", "middle_block.1"]
        .iter()
        .find_map(|place| tensors.get(&format!("{place}.proj_in.weight")))
        .is_some_and(|dims| dims.len() == 2);
    let in_channels = tensors.dim(SIGN, 1)?;
    let out_channels = tensors.dim("out.2.weight", 0)?;
    set(
        &mut config,
        [
            ("in_channels", json!(in_channels)),
            ("out_channels", json!(out_channels)),
            ("block_out_channels", json!(channels)),
            ("layers_per_block", json!(layers)),
            ("down_block_types", json!(down)),
            ("up_block_types", json!(up)),
            (
                "transformer_layers_per_block",
                per_block(&depths(tensors, &blocks)),
            ),
            ("cross_attention_dim", json!(text_features(tensors))),
            ("use_linear_projection", json!(linear)),
        ],
    );
    if let Some(dims) = tensors.get("label_emb.0.0.weight") {
        let features = json!(dims.get(1));
        set(
            &mut config,
            [("projection_class_embeddings_input_dim", features)],
        );
    }
    if let Some(each) = head_channels {
        let heads: Vec<usize> = channels.iter().map(|c| (c / each).max(1)).collect();
        set(&mut config, [("attention_head_dim", per_block(&heads))]);
    }
    Ok(OriginalPart {
        config,
        tensors: tensors.converted(|key, _| name(key, layers).into()),
    })
}

/// The numbers of the input blocks that are resnets, level by level; a downsampler ends a level. All levels have as
/// many.
fn levels(tensors: &OriginalTensors) -> Result<Vec<Vec<usize>>, StructureError> {
    let mut levels: Vec<Vec<usize>> = Vec::new();
    let mut level = Vec::new();
    for i in 1.. {
        if tensors.has(&format!("input_blocks.{i}.0.op.weight")) {
            levels.push(std::mem::take(&mut level));
        } else if tensors.has(&format!("input_blocks.{i}.0.out_layers.3.weight")) {
            level.push(i);
        } else {
            levels.push(level);
            break;
        }
    }
    let layers = levels[0].len();
    if layers == 0 || levels.iter().any(|level| level.len() != layers) {
        let counts: Vec<usize> = levels.iter().map(Vec::len).collect();
        return Err(StructureError(format!(
            "resnets in the input blocks of each level: {counts:?}; expected the same number in all"
        )));
    }
    Ok(levels)
}

/// A down block.
struct DownBlock {
    channels: usize,
    /// Transformer layers of each attention; 0 where the block has none.
    depth: usize,
}

fn blocks(
    tensors: &OriginalTensors,
    levels: &[Vec<usize>],
) -> Result<Vec<DownBlock>, StructureError> {
    let block = |level: &Vec<usize>| {
        let first = format!("input_blocks.{}", level[0]);
        Ok(DownBlock {
            channels: tensors.dim(&format!("{first}.0.out_layers.3.weight"), 0)?,
            depth: transformer_layers(tensors, &first),
        })
    };
    levels.iter().map(block).collect()
}

fn transformer_layers(tensors: &OriginalTensors, block: &str) -> usize {
    tensors.count(|i| format!("{block}.1.transformer_blocks.{i}.norm1.weight"))
}

/// `transformer_layers_per_block`. The middle block takes the last level's number of layers. A level without any has
/// none to tell.
fn depths(tensors: &OriginalTensors, blocks: &[DownBlock]) -> Vec<usize> {
    let mut depths: Vec<usize> = blocks.iter().map(|block| block.depth.max(1)).collect();
    if let (Some(last), Some(DownBlock { depth: 0, .. })) = (depths.last_mut(), blocks.last()) {
        *last = transformer_layers(tensors, "middle_block");
    }
    depths
}

/// diffusers' name of a tensor. `layers` is diffusers' `layers_per_block`, the same in all blocks.
fn name(key: &str, layers: usize) -> Option<String> {
    renamed(&FIXED, key).or_else(|| block_name(key, layers))
}

fn block_name(key: &str, layers: usize) -> Option<String> {
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

/// The tensors that the original code has of a UNet whose tensors have these names in diffusers.
pub fn tensors(paths: &[&str]) -> Vec<Original> {
    let blocks = Blocks::of(paths.iter().copied());
    let of_path = |path: &&str| {
        let (module, leaf) = path.rsplit_once('.')?;
        Some(Original {
            name: format!("{}.{leaf}", blocks.original_name(module)?),
            parts: vec![((*path).to_owned(), Transform::Identity)],
        })
    };
    paths.iter().filter_map(of_path).collect()
}

/// Where a UNet's blocks stand in the original code's flat lists of blocks.
///
/// There, `input_blocks` holds `conv_in`, then each block's layers and its downsampler; `output_blocks` holds each
/// block's layers, the last of which has the upsampler.
#[derive(Clone, Debug, Default)]
pub struct Blocks {
    /// The place in `input_blocks` of each down block's first layer.
    down: Vec<usize>,
    /// The place in `output_blocks` of each up block's first layer, and whether the block has attentions.
    up: Vec<(usize, bool)>,
    /// Layers of each up block.
    up_layers: Vec<usize>,
}

impl Blocks {
    /// The blocks of the UNet that has these parameter paths.
    pub fn of<'a>(paths: impl Iterator<Item = &'a str>) -> Blocks {
        #[derive(Default)]
        struct Block {
            layers: usize,
            attentions: bool,
        }
        let mut down: BTreeMap<usize, Block> = BTreeMap::new();
        let mut up: BTreeMap<usize, Block> = BTreeMap::new();
        for path in paths {
            let mut words = path.split('.');
            let blocks = match words.next() {
                Some("down_blocks") => &mut down,
                Some("up_blocks") => &mut up,
                _ => continue,
            };
            let (Some(block), Some(kind), Some(layer)) = (
                layer_number(words.next()),
                words.next(),
                layer_number(words.next()),
            ) else {
                continue;
            };
            let block = blocks.entry(block).or_default();
            match kind {
                "resnets" => block.layers = block.layers.max(layer + 1),
                "attentions" => block.attentions = true,
                _ => {}
            }
        }
        let mut result = Blocks::default();
        // `conv_in` is the first.
        let mut next = 1;
        for block in down.values() {
            result.down.push(next);
            next += block.layers + 1;
        }
        next = 0;
        for block in up.values() {
            result.up.push((next, block.attentions));
            result.up_layers.push(block.layers);
            next += block.layers;
        }
        result
    }

    /// The original code's name of a module of diffusers, where it has one.
    pub fn original_name(&self, path: &str) -> Option<String> {
        if let Some((theirs, _)) = FIXED.iter().find(|(_, ours)| is_module(ours, path)) {
            return Some(theirs.trim_end_matches('.').to_owned());
        }
        let (side, rest) = path.split_once('.')?;
        if side == "mid_block" {
            let (kind, rest) = rest.split_once('.')?;
            let (layer, rest) = rest.split_once('.')?;
            let layer = layer_number(Some(layer))?;
            return Some(match kind {
                "resnets" => format!("middle_block.{}.{}", 2 * layer, resnet_part(rest)?),
                "attentions" => format!("middle_block.{}.{rest}", 2 * layer + 1),
                _ => return None,
            });
        }
        let mut words = rest.splitn(4, '.');
        let (block, kind, layer) = (
            layer_number(words.next())?,
            words.next()?,
            layer_number(words.next())?,
        );
        let rest = words.next()?;
        let (list, first, layers, attentions) = match side {
            "down_blocks" => ("input_blocks", *self.down.get(block)?, 0, false),
            "up_blocks" => {
                let (first, attentions) = *self.up.get(block)?;
                (
                    "output_blocks",
                    first,
                    *self.up_layers.get(block)?,
                    attentions,
                )
            }
            _ => return None,
        };
        let place = first + layer;
        Some(match kind {
            "resnets" => format!("{list}.{place}.0.{}", resnet_part(rest)?),
            "attentions" => format!("{list}.{place}.1.{rest}"),
            // It is an entry of its own, after the block's layers.
            "downsamplers" => format!("{list}.{}.0.op", self.down.get(block + 1)?.checked_sub(1)?),
            "upsamplers" => {
                let last = (first + layers).checked_sub(1)?;
                format!("{list}.{last}.{}.conv", if attentions { 2 } else { 1 })
            }
            _ => return None,
        })
    }
}

fn layer_number(word: Option<&str>) -> Option<usize> {
    // A digit more than any model has blocks, so that sums can not overflow.
    word.filter(|w| w.len() <= 4)?.parse().ok()
}

/// Whether `prefix`, which ends in a dot, is that of the module's tensors.
fn is_module(prefix: &str, module: &str) -> bool {
    prefix.strip_suffix('.') == Some(module)
}

/// The original code's name of a resnet's layer.
fn resnet_part(layer: &str) -> Option<&'static str> {
    let (theirs, _) = RESNET.iter().find(|(_, ours)| is_module(ours, layer))?;
    Some(theirs.trim_end_matches('.'))
}
