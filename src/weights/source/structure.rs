//! Configurations of the parts of a single file: what the tensors say, and the family's for the rest.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::SourceError;
use crate::models::{Part, Published};
use crate::weights::Checkpoint;

/// Channels of one attention head in all of CLIP's text encoders.
const HEAD_CHANNELS: usize = 64;

/// The tensors of one part of a file.
#[derive(Clone, Copy)]
pub(super) struct Tensors<'a> {
    pub file: &'a Checkpoint,
    pub prefix: &'a str,
    pub part: Part,
}

impl<'a> Tensors<'a> {
    fn get(&self, name: &str) -> Option<&'a [usize]> {
        let shape = self.file.info(&format!("{}{name}", self.prefix))?;
        Some(&shape.dims)
    }

    fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// One dimension of a tensor that must be there.
    fn dim(&self, name: &str, dimension: usize) -> Result<usize, SourceError> {
        let dims = self
            .get(name)
            .ok_or_else(|| self.error(format!("{}{name} is missing", self.prefix)))?;
        dims.get(dimension).copied().ok_or_else(|| {
            let rank = dimension + 1;
            self.error(format!(
                "{}{name} {dims:?} has less than {rank} dimensions",
                self.prefix
            ))
        })
    }

    /// How many tensors there are whose names `name` makes of 0, 1, ...
    fn count(&self, name: impl Fn(usize) -> String) -> usize {
        (0..).take_while(|&i| self.has(&name(i))).count()
    }

    fn error(&self, reason: String) -> SourceError {
        SourceError::Structure {
            path: self.file.path().to_owned(),
            part: self.part,
            reason,
        }
    }
}

/// A configuration of a family, for a model at `path`.
pub(super) fn built_in(path: &Path, text: &str) -> Result<Map<String, Value>, SourceError> {
    serde_json::from_str(text).map_err(|e| SourceError::Json {
        path: path.to_owned(),
        reason: format!("the built-in configuration of its family: {e}"),
    })
}

/// One value where all are the same, as the published configurations have it.
fn per_block(values: &[usize]) -> Value {
    match values {
        [first, rest @ ..] if rest.iter().all(|v| v == first) => json!(first),
        _ => json!(values),
    }
}

/// The configuration of a UNet in LDM's names, and its `layers_per_block`.
pub(super) fn unet(
    tensors: Tensors,
    published: &Published,
) -> Result<(Map<String, Value>, usize), SourceError> {
    // The numbers of the input blocks that are resnets, level by level; a downsampler ends a level.
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
        return Err(tensors.error(format!(
            "resnets in the input blocks of each level: {counts:?}; expected the same number in all"
        )));
    }

    let transformers =
        |place: &str| tensors.count(|i| format!("{place}.1.transformer_blocks.{i}.norm1.weight"));
    let middle = tensors.count(|i| format!("middle_block.1.transformer_blocks.{i}.norm1.weight"));
    let mut channels = Vec::new();
    let mut down = Vec::new();
    let mut depths = Vec::new();
    let last = levels.len() - 1;
    for (level, blocks) in levels.iter().enumerate() {
        let block = format!("input_blocks.{}", blocks[0]);
        channels.push(tensors.dim(&format!("{block}.0.out_layers.3.weight"), 0)?);
        let depth = transformers(&block);
        down.push(depth > 0);
        // The middle block takes the last level's number of layers. A level without any has none to tell.
        depths.push(match depth {
            0 if level == last => middle,
            0 => 1,
            n => n,
        });
    }
    let kind = |side: &str, attends: bool| match attends {
        true => format!("CrossAttn{side}Block2D"),
        false => format!("{side}Block2D"),
    };
    let up: Vec<String> = down.iter().rev().map(|&c| kind("Up", c)).collect();
    let down: Vec<String> = down.iter().map(|&c| kind("Down", c)).collect();
    let text = tensors
        .file
        .iter()
        .find(|(name, _)| name.starts_with(tensors.prefix) && name.ends_with(".attn2.to_k.weight"))
        .and_then(|(_, shape)| shape.dims.get(1).copied());
    let linear = ["input_blocks.1.1", "middle_block.1"]
        .iter()
        .find_map(|place| tensors.get(&format!("{place}.proj_in.weight")))
        .is_some_and(|dims| dims.len() == 2);

    let mut config = built_in(tensors.file.path(), published.unet)?;
    let told = [
        (
            "in_channels",
            json!(tensors.dim("input_blocks.0.0.weight", 1)?),
        ),
        ("out_channels", json!(tensors.dim("out.2.weight", 0)?)),
        ("block_out_channels", json!(channels)),
        ("layers_per_block", json!(layers)),
        ("down_block_types", json!(down)),
        ("up_block_types", json!(up)),
        ("transformer_layers_per_block", per_block(&depths)),
        ("cross_attention_dim", json!(text)),
        ("use_linear_projection", json!(linear)),
    ];
    config.extend(told.map(|(k, v)| (k.to_owned(), v)));
    if let Some(dims) = tensors.get("label_emb.0.0.weight") {
        let features = dims.get(1);
        config.insert(
            "projection_class_embeddings_input_dim".to_owned(),
            json!(features),
        );
    }
    if let Some(each) = published.single_file.head_channels {
        let heads: Vec<usize> = channels.iter().map(|c| (c / each).max(1)).collect();
        config.insert("attention_head_dim".to_owned(), per_block(&heads));
    }
    Ok((config, layers))
}

/// The configuration of a VAE in LDM's names, and its number of levels.
pub(super) fn vae(
    tensors: Tensors,
    published: &Published,
) -> Result<(Map<String, Value>, usize), SourceError> {
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
        return Err(tensors.error(format!(
            "{}decoder.up.0 has less than two resnets",
            tensors.prefix
        )));
    }
    // The deviation of latents before they are scaled is the family's: no tensor tells it.
    let mut config = built_in(tensors.file.path(), published.vae)?;
    let told = [
        ("block_out_channels", json!(channels)),
        (
            "down_block_types",
            json!(vec!["DownEncoderBlock2D"; levels]),
        ),
        (
            "in_channels",
            json!(tensors.dim("encoder.conv_in.weight", 1)?),
        ),
        (
            "latent_channels",
            json!(tensors.dim("decoder.conv_in.weight", 1)?),
        ),
        ("layers_per_block", json!(layers)),
        (
            "out_channels",
            json!(tensors.dim("decoder.conv_out.weight", 0)?),
        ),
        ("up_block_types", json!(vec!["UpDecoderBlock2D"; levels])),
        (
            "use_post_quant_conv",
            json!(tensors.has("post_quant_conv.weight")),
        ),
        ("use_quant_conv", json!(tensors.has("quant_conv.weight"))),
    ];
    config.extend(told.map(|(k, v)| (k.to_owned(), v)));
    Ok((config, levels))
}

/// The configuration of a text encoder in transformers' names, and its number of layers.
pub(super) fn clip(tensors: Tensors) -> Result<(Map<String, Value>, usize), SourceError> {
    // Some versions of transformers leave the first word out.
    let root = if tensors.has("text_model.embeddings.token_embedding.weight") {
        "text_model."
    } else {
        ""
    };
    let table = format!("{root}embeddings.token_embedding.weight");
    let layer = |i: usize| format!("{root}encoder.layers.{i}.mlp.fc1.weight");
    let layers = tensors.count(layer);
    let hidden = tensors.dim(&table, 1)?;
    let config = text_encoder(
        tensors.part,
        TextEncoder {
            activation: "quick_gelu",
            vocabulary: tensors.dim(&table, 0)?,
            hidden,
            intermediate: tensors.dim(&layer(0), 0)?,
            projection: hidden,
            layers,
            positions: tensors.dim(&format!("{root}embeddings.position_embedding.weight"), 0)?,
        },
    );
    Ok((config, layers))
}

/// The configuration of OpenCLIP's text tower, and how many of its layers are used: at most `used`. The first text
/// encoder of a model goes without the projection.
pub(super) fn open_clip(
    tensors: Tensors,
    used: Option<usize>,
) -> Result<(Map<String, Value>, usize), SourceError> {
    let layer = |i: usize| format!("transformer.resblocks.{i}.mlp.c_fc.weight");
    let all = tensors.count(layer);
    let layers = used.map_or(all, |used| all.min(used));
    let projection = match tensors.part {
        Part::TextEncoder2 if tensors.has("text_projection.weight") => {
            tensors.dim("text_projection.weight", 0)?
        }
        Part::TextEncoder2 => tensors.dim("text_projection", 1)?,
        // What SD 2's published configuration says.
        Part::TextEncoder | Part::Unet | Part::Vae => 512,
    };
    let config = text_encoder(
        tensors.part,
        TextEncoder {
            activation: "gelu",
            vocabulary: tensors.dim("token_embedding.weight", 0)?,
            hidden: tensors.dim("token_embedding.weight", 1)?,
            intermediate: tensors.dim(&layer(0), 0)?,
            projection,
            layers,
            positions: tensors.dim("positional_embedding", 0)?,
        },
    );
    Ok((config, layers))
}

struct TextEncoder {
    activation: &'static str,
    vocabulary: usize,
    hidden: usize,
    intermediate: usize,
    projection: usize,
    layers: usize,
    positions: usize,
}

fn text_encoder(part: Part, sizes: TextEncoder) -> Map<String, Value> {
    // The second one's pooled output is projected.
    let class = match part {
        Part::TextEncoder2 => "CLIPTextModelWithProjection",
        Part::TextEncoder | Part::Unet | Part::Vae => "CLIPTextModel",
    };
    to_map([
        ("architectures", json!([class])),
        ("attention_dropout", json!(0.0)),
        ("bos_token_id", json!(0)),
        // What the published configurations say, by mistake: it stands for the highest token id.
        ("eos_token_id", json!(2)),
        ("hidden_act", json!(sizes.activation)),
        ("hidden_size", json!(sizes.hidden)),
        ("initializer_factor", json!(1.0)),
        ("initializer_range", json!(0.02)),
        ("intermediate_size", json!(sizes.intermediate)),
        ("layer_norm_eps", json!(1e-5)),
        ("max_position_embeddings", json!(sizes.positions)),
        ("model_type", json!("clip_text_model")),
        (
            "num_attention_heads",
            json!((sizes.hidden / HEAD_CHANNELS).max(1)),
        ),
        ("num_hidden_layers", json!(sizes.layers)),
        ("pad_token_id", json!(1)),
        ("projection_dim", json!(sizes.projection)),
        ("vocab_size", json!(sizes.vocabulary)),
    ])
}

fn to_map<const N: usize>(entries: [(&str, Value); N]) -> Map<String, Value> {
    entries
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value))
        .collect()
}
