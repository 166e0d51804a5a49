//! diffusers' `UNet2DConditionModel`: the UNet of Stable Diffusion 1.x, 2.x and XL.

mod blocks;
mod config;
pub mod original;

pub use config::{
    AdditionEmbedType, DownBlockType, PerBlock, SampleSize, TimeScaleShift, UNet2DConditionConfig,
    UpBlockType,
};

use crate::dtype::DType;
use crate::graph::{Builder, GraphError, Tensor};
use crate::models::Part;
use crate::nn::{
    Activation, Conv2d, GroupNorm, Precision, Remat, Result, TimestepEmbedding, constrain_image,
    conv2d, dims, group_norm, sinusoidal_embedding,
};

use crate::shape::Shape;

use blocks::{Block, Shared, SharedImagePrompt, Transformer};

/// The root of the UNet's parameter paths.
pub const ROOT: &str = Part::Unet.name();

/// Names of the UNet's run-time inputs.
pub mod names {
    pub const SAMPLE: &str = "sample";
    pub const TIMESTEP: &str = "timestep";
    pub const ENCODER_HIDDEN_STATES: &str = "encoder_hidden_states";
    pub const TEXT_EMBEDS: &str = "text_embeds";
    pub const TIME_IDS: &str = "time_ids";
}

/// Layers that stay in float under `quantization=int8`, as regular expressions of their paths below the root: they are
/// small, and sensitive to rounding.
pub const INT8_FLOAT_LAYERS: [&str; 5] = [
    r"(.*\.)?time_embedding\..*",
    r"(.*\.)?add_embedding\..*",
    r"(.*\.)?time_emb_proj",
    r"conv_in",
    r"conv_out",
];

/// Time ids of SDXL base: original size, top left corner of the crop, target size.
pub const SIZE_TIME_IDS: usize = 6;

/// The inputs of the UNet. `B` is the batch.
#[derive(Clone, Debug)]
pub struct UNetInputs {
    /// Noisy latents `[B, in_channels, height, width]`.
    pub sample: Tensor,
    /// Training timesteps, `[B]` or one scalar for all; integers or floats, which may be fractional.
    pub timestep: Tensor,
    pub conditioning: UNetConditioning,
    /// Residuals of ControlNets, added to the skip connections and to the mid block's output.
    pub additional_residuals: Option<ResSamples>,
    /// The image prompt of an IP-Adapter.
    pub image_prompt: Option<ImagePrompt>,
}

/// What an IP-Adapter adds to the text.
#[derive(Clone, Copy, Debug)]
pub struct ImagePrompt {
    /// `[B, tokens, cross_attention_dim]`
    pub tokens: Tensor,
    /// How much the attention to them counts: a scalar of a float type.
    pub scale: Tensor,
}

/// The conditioning of the UNet on text.
#[derive(Clone, Copy, Debug)]
pub struct UNetConditioning {
    /// The text encoder's hidden states `[B, length, cross_attention_dim]`.
    pub encoder_hidden_states: Tensor,
    /// SDXL's conditioning; given exactly when the configuration asks for it.
    pub text_time: Option<TextTime>,
}

/// Outputs of the down blocks and of the mid block: a UNet's own, or the residuals that a ControlNet adds.
///
/// Images are `[B, height, width, channels]`, so that no transposition lies between a ControlNet and its UNet.
#[derive(Clone, Debug)]
pub struct ResSamples {
    /// The skip connections: outputs of the first convolution and of each layer and downsampler of the down blocks, in
    /// order.
    pub down_blocks: Vec<Tensor>,
    /// The output of the mid block.
    pub mid_block: Tensor,
}

impl ResSamples {
    /// The sum of both: of two ControlNets' residuals, or of a UNet's own outputs and residuals.
    ///
    /// # Errors
    /// When they are of different shapes.
    pub fn add(&self, b: &Builder, other: &ResSamples) -> Result<ResSamples> {
        let add = |name: &dyn std::fmt::Display, x: Tensor, y: Tensor| {
            if b.shape(x) != b.shape(y) {
                return Err(b.invalid(format!(
                    "residuals do not fit: {name} is {} and {}; is the ControlNet for another kind of UNet?",
                    b.shape(x),
                    b.shape(y)
                )));
            }
            b.add(x, y)
        };
        let (mine, others) = (&self.down_blocks, &other.down_blocks);
        if mine.len() != others.len() {
            return Err(b.invalid(format!(
                "residuals do not fit: there are {} and {} down_blocks; is the ControlNet for another kind of UNet?",
                mine.len(),
                others.len()
            )));
        }
        let pairs = mine.iter().zip(others).enumerate();
        Ok(ResSamples {
            down_blocks: pairs
                .map(|(i, (&x, &y))| add(&format_args!("down_blocks[{i}]"), x, y))
                .collect::<Result<_>>()?,
            mid_block: add(&"mid_block", self.mid_block, other.mid_block)?,
        })
    }
}

/// The conditioning of `addition_embed_type = text_time`.
#[derive(Clone, Copy, Debug)]
pub struct TextTime {
    /// Pooled text embeddings `[B, features]`.
    pub text_embeds: Tensor,
    /// Sizes and scores of the image: `[B, ids]`. SDXL base takes [`SIZE_TIME_IDS`]: original height and width,
    /// top and left crop, target height and width; its refiner an aesthetic score in place of the last two.
    pub time_ids: Tensor,
}

/// The model's prediction for `inputs.sample`: `[B, out_channels, height, width]` in `precision.activations`.
///
/// Weights are declared under `unet/` with diffusers' keys. Under [`Remat::Full`] each resnet and each transformer
/// layer is a recomputation region.
///
/// # Errors
/// When the configuration contradicts itself, or an input's shape does not fit it.
pub fn unet(
    b: &Builder,
    config: &UNet2DConditionConfig,
    inputs: UNetInputs,
    precision: Precision,
    remat: Remat,
) -> Result<Tensor> {
    let b = b.root(ROOT);
    config.check().map_err(|e| b.invalid(e.to_string()))?;
    let shared = shared(&b, config, &inputs, precision, remat)?;
    let sample = conv_in(&b, &shared, inputs.sample)?;
    let mut encoded = encode(&b, &shared, sample)?;
    if let Some(residuals) = &inputs.additional_residuals {
        encoded = encoded.add(&b, residuals)?;
    }
    let ResSamples {
        down_blocks: mut skips,
        mid_block: mut sample,
    } = encoded;
    let levels = config.levels();

    for (index, kind) in config.up_block_types.iter().enumerate() {
        let level = levels - 1 - index;
        let block = block(
            config,
            level,
            *kind == UpBlockType::CrossAttnUpBlock2D,
            config.block_out_channels[level],
            config.layers_per_block.get(level).unwrap_or_default() + 1,
            index + 1 < levels,
        );
        sample = block.up(
            &b.scope("up_blocks").scope(index),
            &shared,
            sample,
            &mut skips,
        )?;
    }

    let norm = GroupNorm {
        groups: config.norm_num_groups,
        epsilon: config.norm_eps,
        activation: Some(config.act_fn),
    };
    let sample = group_norm(&b.scope("conv_norm_out"), sample, norm, precision)?;
    let conv_out = Conv2d::same(config.out_channels, config.conv_out_kernel);
    let sample = conv2d(&b.scope("conv_out"), sample, conv_out, precision)?;
    b.transpose(sample, &[0, 3, 1, 2])
}

/// The values that all blocks share, from inputs whose shapes are checked here. The configuration must have passed its
/// own check.
pub(super) fn shared<'a>(
    b: &Builder,
    config: &'a UNet2DConditionConfig,
    inputs: &UNetInputs,
    precision: Precision,
    remat: Remat,
) -> Result<Shared<'a>> {
    let batch = check_inputs(b, config, inputs)?;
    let time_embedding = time_embedding(b, config, inputs, batch, precision)?;
    Ok(Shared {
        config,
        precision,
        remat,
        // Every resnet starts with this activation; it is the same value in all of them.
        time_embedding: config.act_fn.apply(b, time_embedding)?,
        encoder_hidden_states: b.convert(
            inputs.conditioning.encoder_hidden_states,
            precision.activations,
        )?,
        image_prompt: match inputs.image_prompt {
            None => None,
            Some(ImagePrompt { tokens, scale }) => Some(SharedImagePrompt {
                prompt: ImagePrompt {
                    tokens: b.convert(tokens, precision.activations)?,
                    scale: b.convert(scale, precision.activations)?,
                },
                places: cross_attentions(config),
            }),
        },
    })
}

/// The first convolution of latents `[B, in_channels, height, width]`: an image `[B, height, width, channels]`.
pub(super) fn conv_in(b: &Builder, shared: &Shared, sample: Tensor) -> Result<Tensor> {
    let Shared {
        config, precision, ..
    } = *shared;
    let mut sample = b.convert(sample, precision.activations)?;
    if config.center_input_sample {
        let doubled = b.mul_scalar(sample, 2.0)?;
        sample = b.add_scalar(doubled, -1.0)?;
    }
    let sample = b.transpose(sample, &[0, 2, 3, 1])?;
    let layer = Conv2d::same(config.block_out_channels[0], config.conv_in_kernel);
    let sample = conv2d(&b.scope("conv_in"), sample, layer, precision)?;
    constrain_image(b, sample)
}

/// The down blocks and the mid block, which a ControlNet copies.
pub(super) fn encode(b: &Builder, shared: &Shared, mut sample: Tensor) -> Result<ResSamples> {
    let config = shared.config;
    let levels = config.levels();
    let channels = &config.block_out_channels;
    let mut skips = vec![sample];
    for (level, (&width, kind)) in channels.iter().zip(&config.down_block_types).enumerate() {
        let block = block(
            config,
            level,
            *kind == DownBlockType::CrossAttnDownBlock2D,
            width,
            config.layers_per_block.get(level).unwrap_or_default(),
            level + 1 < levels,
        );
        let b = b.scope("down_blocks").scope(level);
        sample = block.down(&b, shared, sample, &mut skips)?;
    }

    // The middle takes the attributes of the last block; diffusers does not pass it `only_cross_attention`.
    let last = block(config, levels - 1, true, channels[levels - 1], 1, false);
    let middle = Block {
        transformer: last.transformer.map(|t| Transformer {
            only_cross_attention: false,
            ..t
        }),
        ..last
    };
    Ok(ResSamples {
        down_blocks: skips,
        mid_block: middle.middle(&b.scope("mid_block"), shared, sample)?,
    })
}

/// The paths of all cross-attentions below the root, in diffusers' order of its modules: the middle comes last.
fn cross_attentions(config: &UNet2DConditionConfig) -> Vec<String> {
    let levels = config.levels();
    let of_block = |name: String, level: usize, attentions: usize| {
        let layers = config.transformer_layers_per_block.get(level);
        let layers = layers.unwrap_or_default();
        (0..attentions).flat_map(move |attention| {
            let name = name.clone();
            (0..layers).map(move |layer| {
                format!("{name}.attentions.{attention}.transformer_blocks.{layer}.attn2")
            })
        })
    };
    let resnets = |level: usize| config.layers_per_block.get(level).unwrap_or_default();
    let down = config.down_block_types.iter().enumerate();
    let down = down.filter(|(_, kind)| **kind == DownBlockType::CrossAttnDownBlock2D);
    let down = down.flat_map(|(at, _)| of_block(format!("down_blocks.{at}"), at, resnets(at)));
    let up = config.up_block_types.iter().enumerate();
    let up = up.filter(|(_, kind)| **kind == UpBlockType::CrossAttnUpBlock2D);
    let up = up.flat_map(|(at, _)| {
        let level = levels - 1 - at;
        of_block(format!("up_blocks.{at}"), level, resnets(level) + 1)
    });
    let middle = of_block("mid_block".to_owned(), levels - 1, 1);
    down.chain(up).chain(middle).collect()
}

/// The block at resolution `level`.
fn block(
    config: &UNet2DConditionConfig,
    level: usize,
    cross_attention: bool,
    channels: usize,
    layers: usize,
    resample: bool,
) -> Block {
    Block {
        channels,
        layers,
        resample,
        transformer: cross_attention.then(|| Transformer {
            heads: config.attention_head_dim.get(level).unwrap_or_default(),
            layers: config
                .transformer_layers_per_block
                .get(level)
                .unwrap_or_default(),
            only_cross_attention: config.only_cross_attention.get(level).unwrap_or_default(),
        }),
    }
}

/// Checks shapes, and gives the batch size.
fn check_inputs(b: &Builder, config: &UNet2DConditionConfig, inputs: &UNetInputs) -> Result<usize> {
    let [batch, channels, height, width] = dims(b, names::SAMPLE, inputs.sample)?;
    if channels != config.in_channels {
        return Err(b.invalid(format!(
            "sample {} has {channels} channels; in_channels is {}",
            b.shape(inputs.sample),
            config.in_channels
        )));
    }
    // With padding above and on the left an odd size is halved upwards, and its double can be cut.
    let multiple = match config.downsample_padding {
        0 => config.spatial_multiple(),
        _ => 1,
    };
    if !height.is_multiple_of(multiple) || !width.is_multiple_of(multiple) {
        return Err(b.invalid(format!(
            "sample height {height} and width {width} must be multiples of {multiple}: {} blocks halve them, \
             and the skip connections must fit the up blocks",
            config.levels() - 1
        )));
    }
    let timestep = b.dims(inputs.timestep);
    if !timestep.is_empty() && timestep != [batch] {
        return Err(b.invalid(format!(
            "timestep {} is neither a scalar nor one for each of {batch} samples",
            b.shape(inputs.timestep)
        )));
    }
    let hidden = inputs.conditioning.encoder_hidden_states;
    let [text_batch, _, features] = dims(b, names::ENCODER_HIDDEN_STATES, hidden)?;
    if text_batch != batch {
        return Err(b.invalid(format!(
            "encoder_hidden_states {} is for {text_batch} samples, sample for {batch}",
            b.shape(hidden)
        )));
    }
    for level in 0..config.levels() {
        let expected = config.cross_attention_dim.get(level).unwrap_or_default();
        if features != expected {
            return Err(b.invalid(format!(
                "encoder_hidden_states {} has {features} features; cross_attention_dim is {expected}",
                b.shape(hidden)
            )));
        }
    }
    Ok(batch)
}

/// The conditioning of all resnets: `[B, time_embedding_dim]`.
fn time_embedding(
    b: &Builder,
    config: &UNet2DConditionConfig,
    inputs: &UNetInputs,
    batch: usize,
    precision: Precision,
) -> Result<Tensor> {
    let width = config.block_out_channels[0];
    let embed = TimestepEmbedding {
        features: config.time_embedding_dim.unwrap_or(4 * width),
        activation: config.act_fn,
    };
    let sinusoidal = |b: &Builder, timesteps: Tensor, features: usize| {
        let y = sinusoidal_embedding(
            b,
            timesteps,
            features,
            config.flip_sin_to_cos,
            config.freq_shift,
        )?;
        b.convert(y, precision.activations)
    };

    let timesteps = b.broadcast_to(inputs.timestep, &[batch])?;
    let projected = sinusoidal(&b.scope("time_proj"), timesteps, width)?;
    let embedding = embed.apply(&b.scope("time_embedding"), projected, precision)?;

    let (kind, given) = match (config.addition_embed_type, inputs.conditioning.text_time) {
        (None, None) => return Ok(embedding),
        (Some(kind), Some(given)) => (kind, given),
        (None, Some(_)) => {
            return Err(
                b.invalid("text_embeds and time_ids are given, but addition_embed_type is null")
            );
        }
        (Some(_), None) => {
            return Err(b.invalid("addition_embed_type = text_time needs text_embeds and time_ids"));
        }
    };
    let added = match kind {
        AdditionEmbedType::TextTime => {
            let [text_batch, text_features] = dims(b, names::TEXT_EMBEDS, given.text_embeds)?;
            let [ids_batch, ids] = dims(b, names::TIME_IDS, given.time_ids)?;
            let per_id = config.addition_time_embed_dim.unwrap_or_default();
            let expected = config
                .projection_class_embeddings_input_dim
                .unwrap_or_default();
            if text_batch != batch || ids_batch != batch || text_features + ids * per_id != expected
            {
                return Err(b.invalid(format!(
                    "text_embeds {} and time_ids {} with {per_id} features for each id do not make \
                     [{batch}, projection_class_embeddings_input_dim = {expected}]",
                    b.shape(given.text_embeds),
                    b.shape(given.time_ids)
                )));
            }
            let flat = b.reshape(given.time_ids, &[batch * ids])?;
            let time = sinusoidal(&b.scope("add_time_proj"), flat, per_id)?;
            let time = b.reshape(time, &[batch, ids * per_id])?;
            let text = b.convert(given.text_embeds, precision.activations)?;
            b.concatenate(&[text, time], 1)?
        }
    };
    // diffusers hands act_fn to time_embedding alone.
    let embed = TimestepEmbedding {
        activation: Activation::Silu,
        ..embed
    };
    let added = embed.apply(&b.scope("add_embedding"), added, precision)?;
    b.add(embedding, added)
}

/// Declares the UNet's run-time inputs for `batch` samples of `height` x `width` latents and `length` text tokens.
///
/// Names are `sample` and `timestep`, and those of [`declare_conditioning`]. Samples and conditioning are in `dtype`;
/// timesteps are `f32`.
///
/// # Errors
/// When one of the names is taken by an input of another shape.
pub fn declare_inputs(
    b: &Builder,
    config: &UNet2DConditionConfig,
    [batch, height, width, length]: [usize; 4],
    dtype: DType,
) -> std::result::Result<UNetInputs, GraphError> {
    let sample = b.input(
        names::SAMPLE,
        Shape::new(dtype, [batch, config.in_channels, height, width]),
        &[Some("conv_batch"), None, None, None],
    )?;
    let timestep = b.input(
        names::TIMESTEP,
        Shape::new(DType::F32, [batch]),
        &[Some("activation_batch")],
    )?;
    let conditioning = declare_conditioning(b, config, [batch, length], SIZE_TIME_IDS, dtype)?;
    Ok(UNetInputs {
        sample,
        timestep,
        conditioning,
        additional_residuals: None,
        image_prompt: None,
    })
}

/// Declares what conditions the UNet on `length` text tokens: `encoder_hidden_states`, and for SDXL `text_embeds` and
/// `ids` `time_ids` (`f32`) to a sample. The numbers of features in its configuration leave open how many ids there
/// are.
///
/// # Errors
/// When one of the names is taken by an input of another shape, or the ids have more features than there are.
pub fn declare_conditioning(
    b: &Builder,
    config: &UNet2DConditionConfig,
    [batch, length]: [usize; 2],
    ids: usize,
    dtype: DType,
) -> std::result::Result<UNetConditioning, GraphError> {
    let batch_axis = Some("activation_batch");
    let matrix = [batch_axis, None];
    let features = config.cross_attention_dim.get(0).unwrap_or_default();
    let encoder_hidden_states = b.input(
        names::ENCODER_HIDDEN_STATES,
        Shape::new(dtype, [batch, length, features]),
        &[batch_axis, None, None],
    )?;
    let text_time = match config.addition_embed_type {
        None => None,
        Some(AdditionEmbedType::TextTime) => {
            let total = config
                .projection_class_embeddings_input_dim
                .unwrap_or_default();
            let time = ids * config.addition_time_embed_dim.unwrap_or_default();
            let text = total.checked_sub(time).ok_or_else(|| {
                b.invalid(format!(
                    "projection_class_embeddings_input_dim = {total} is less than the {time} features of time_ids"
                ))
            })?;
            Some(TextTime {
                text_embeds: b.input(
                    names::TEXT_EMBEDS,
                    Shape::new(dtype, [batch, text]),
                    &matrix,
                )?,
                time_ids: b.input(
                    names::TIME_IDS,
                    Shape::new(DType::F32, [batch, ids]),
                    &matrix,
                )?,
            })
        }
    };
    Ok(UNetConditioning {
        encoder_hidden_states,
        text_time,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::Family;

    /// The layers of published IP-Adapters: numbers 1 to 31 and 1 to 139, every other one.
    #[test]
    fn cross_attentions_come_in_diffusers_order() {
        for (family, count, last) in [
            (
                Family::Sd1,
                16,
                "mid_block.attentions.0.transformer_blocks.0.attn2",
            ),
            (
                Family::Sdxl,
                70,
                "mid_block.attentions.0.transformer_blocks.9.attn2",
            ),
        ] {
            let published = family.spec().published.as_ref().unwrap();
            let config = UNet2DConditionConfig::from_json(published.denoiser).unwrap();
            let places = cross_attentions(&config);
            assert_eq!(places.len(), count);
            assert_eq!(places[count - 1], last);
        }
    }
}
