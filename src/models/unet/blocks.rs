//! The UNet's blocks: resnets, transformers, and their order in down, mid and up blocks.

use crate::graph::{Builder, Tensor};
use crate::nn::{
    Activation, Attention, Conv2d, GroupNorm, Linear, Precision, Remat, Result, attention,
    constrain_image, constrain_tokens, conv2d, dims, downsample_2x, gated_gelu, group_norm,
    layer_norm, linear, upsample_2x,
};

use super::ImagePrompt;
use super::config::{TimeScaleShift, UNet2DConditionConfig};
use crate::models::ip_adapter;

/// The values that all blocks of one forward pass share.
pub(in crate::models) struct Shared<'a> {
    pub config: &'a UNet2DConditionConfig,
    pub precision: Precision,
    pub remat: Remat,
    /// The activated time embedding `[B, features]`.
    pub time_embedding: Tensor,
    /// `[B, length, cross_attention_dim]`
    pub encoder_hidden_states: Tensor,
    pub image_prompt: Option<SharedImagePrompt>,
}

/// What an IP-Adapter gives all cross-attentions.
pub(in crate::models) struct SharedImagePrompt {
    /// In the activation type.
    pub prompt: ImagePrompt,
    /// The paths of all cross-attentions below the UNet's root, in the order of the adapter's file.
    pub places: Vec<String>,
}

impl SharedImagePrompt {
    /// The builder of the adapter's layer for the cross-attention at `b`. Its file counts self-attentions too.
    fn layer(&self, b: &Builder) -> Result<Builder> {
        let path = b.path();
        let own = path.strip_prefix("unet/").unwrap_or(&path);
        let Some(at) = self.places.iter().position(|place| place == own) else {
            return Err(b.invalid("an IP-Adapter has no layer for this attention"));
        };
        Ok(b.root(ip_adapter::ROOT)
            .scope("ip_adapter")
            .scope(2 * at + 1))
    }
}

/// One block: alternating resnets and, if it has them, transformers.
pub(super) struct Block {
    /// Channels of its results.
    pub channels: usize,
    /// The number of resnets, without the middle block's first.
    pub layers: usize,
    pub transformer: Option<Transformer>,
    /// Whether it ends with a down- or upsampler.
    pub resample: bool,
}

/// Attributes of `Transformer2DModel`.
#[derive(Clone, Copy)]
pub(super) struct Transformer {
    pub heads: usize,
    pub layers: usize,
    pub only_cross_attention: bool,
}

impl Block {
    /// `DownBlock2D` and `CrossAttnDownBlock2D`: appends the result of each layer and of the downsampler to `skips`.
    pub fn down(
        &self,
        b: &Builder,
        shared: &Shared,
        mut x: Tensor,
        skips: &mut Vec<Tensor>,
    ) -> Result<Tensor> {
        for layer in 0..self.layers {
            x = self.layer(b, shared, x, layer)?;
            skips.push(x);
        }
        if self.resample {
            let b = b.scope("downsamplers").scope(0);
            x = downsample_2x(&b, x, shared.config.downsample_padding, shared.precision)?;
            skips.push(x);
        }
        Ok(x)
    }

    /// `UNetMidBlock2DCrossAttn`: a resnet, then a transformer and a resnet for each layer.
    pub fn middle(&self, b: &Builder, shared: &Shared, x: Tensor) -> Result<Tensor> {
        let divisor = shared.config.mid_block_scale_factor;
        let resnets = b.scope("resnets");
        let mut x = resnet(&resnets.scope(0), shared, x, self.channels, divisor)?;
        for layer in 0..self.layers {
            if let Some(attributes) = self.transformer {
                x = transformer(&b.scope("attentions").scope(layer), shared, x, attributes)?;
            }
            x = resnet(&resnets.scope(layer + 1), shared, x, self.channels, divisor)?;
        }
        Ok(x)
    }

    /// `UpBlock2D` and `CrossAttnUpBlock2D`: each layer takes the last of `skips` beside its input.
    pub fn up(
        &self,
        b: &Builder,
        shared: &Shared,
        mut x: Tensor,
        skips: &mut Vec<Tensor>,
    ) -> Result<Tensor> {
        for layer in 0..self.layers {
            let skip = skips
                .pop()
                .ok_or_else(|| b.invalid(format!("layer {layer}: no skip connection is left")))?;
            x = b.concatenate(&[x, skip], 3)?;
            x = self.layer(b, shared, x, layer)?;
        }
        if self.resample {
            // As large as the skip connection that the next block concatenates.
            let next = skips
                .last()
                .ok_or_else(|| b.invalid("no skip connection is left"))?;
            let [_, height, width, _] = dims(b, "skip connection", *next)?;
            let b = b.scope("upsamplers").scope(0);
            x = upsample_2x(&b, x, [height, width], shared.precision)?;
        }
        Ok(x)
    }

    fn layer(&self, b: &Builder, shared: &Shared, x: Tensor, layer: usize) -> Result<Tensor> {
        let x = resnet(
            &b.scope("resnets").scope(layer),
            shared,
            x,
            self.channels,
            1.0,
        )?;
        match self.transformer {
            Some(attributes) => {
                transformer(&b.scope("attentions").scope(layer), shared, x, attributes)
            }
            None => Ok(x),
        }
    }
}

/// `ResnetBlock2D`. The sum with its input is divided by `divisor`.
fn resnet(
    b: &Builder,
    shared: &Shared,
    input: Tensor,
    channels: usize,
    divisor: f64,
) -> Result<Tensor> {
    let Shared {
        config, precision, ..
    } = *shared;
    let b = &shared.remat.block(b);
    let norm = |name: &str, x: Tensor, activation: Option<Activation>| {
        let layer = GroupNorm {
            groups: config.norm_num_groups,
            epsilon: config.norm_eps,
            activation,
        };
        group_norm(&b.scope(name), x, layer, precision)
    };
    let act_fn = Some(config.act_fn);
    let conv = |name: &str, x: Tensor, kernel: usize| {
        conv2d(&b.scope(name), x, Conv2d::same(channels, kernel), precision)
    };
    let [_, _, _, in_channels] = dims(b, "resnet", input)?;

    let x = norm("norm1", input, act_fn)?;
    let x = conv("conv1", x, 3)?;
    let x = constrain_image(b, x)?;
    let sizes = b.dims(x);
    let over_pixels = |v: Tensor| b.broadcast_in_dim(v, &[0, 3], &sizes);
    let project = |features: usize| {
        linear(
            &b.scope("time_emb_proj"),
            shared.time_embedding,
            Linear::replicated(features),
            precision,
        )
    };
    let x = match config.resnet_time_scale_shift {
        TimeScaleShift::Default => {
            let time = over_pixels(project(channels)?)?;
            let x = b.add(x, time)?;
            norm("norm2", x, act_fn)?
        }
        TimeScaleShift::ScaleShift => {
            let time = b.split(project(2 * channels)?, 1, 2)?;
            let scale = over_pixels(b.add_scalar(time[0], 1.0)?)?;
            let shift = over_pixels(time[1])?;
            let x = norm("norm2", x, None)?;
            let x = b.mul(x, scale)?;
            let x = b.add(x, shift)?;
            config.act_fn.apply(b, x)?
        }
    };
    let x = conv("conv2", x, 3)?;
    let x = constrain_image(b, x)?;

    let shortcut = if in_channels == channels {
        input
    } else {
        conv("conv_shortcut", input, 1)?
    };
    let sum = b.add(shortcut, x)?;
    if divisor == 1.0 {
        return Ok(sum);
    }
    let divisor = b.scalar(b.dtype(sum), divisor)?;
    b.div(sum, divisor)
}

/// `Transformer2DModel`: the image as a sequence of pixels, through `layers` transformer layers, added to the input.
fn transformer(
    b: &Builder,
    shared: &Shared,
    input: Tensor,
    attributes: Transformer,
) -> Result<Tensor> {
    let Shared {
        config, precision, ..
    } = *shared;
    let [batch, height, width, channels] = dims(b, "transformer", input)?;
    let sequence = [batch, height * width, channels];
    let image = [batch, height, width, channels];

    // The norm's epsilon is fixed in diffusers: it does not follow `norm_eps`.
    let layer = GroupNorm {
        groups: config.norm_num_groups,
        epsilon: 1e-6,
        activation: None,
    };
    let x = group_norm(&b.scope("norm"), input, layer, precision)?;
    let projection = |name: &str, x: Tensor, axes: (&'static str, &'static str)| {
        if config.use_linear_projection {
            linear(
                &b.scope(name),
                x,
                Linear::new(channels, axes.0, axes.1),
                precision,
            )
        } else {
            let x = b.reshape(x, &image)?;
            let x = conv2d(&b.scope(name), x, Conv2d::same(channels, 1), precision)?;
            b.reshape(x, &sequence)
        }
    };
    let x = b.reshape(x, &sequence)?;
    let mut x = projection("proj_in", x, ("embed", "hidden"))?;
    for layer in 0..attributes.layers {
        let b = shared
            .remat
            .block(&b.scope("transformer_blocks").scope(layer));
        x = transformer_block(&b, shared, x, attributes)?;
    }
    let x = projection("proj_out", x, ("hidden", "embed"))?;
    let x = b.reshape(x, &image)?;
    let x = b.add(x, input)?;
    constrain_image(b, x)
}

/// `BasicTransformerBlock`: self-attention, attention to the text, and a gated feed-forward layer.
fn transformer_block(
    b: &Builder,
    shared: &Shared,
    x: Tensor,
    attributes: Transformer,
) -> Result<Tensor> {
    // PyTorch's default epsilon of layer norms.
    let norm = |name: &str, x: Tensor| layer_norm(&b.scope(name), x, 1e-5, shared.precision);
    let text = shared.encoder_hidden_states;

    let y = norm("norm1", x)?;
    let context = if attributes.only_cross_attention {
        text
    } else {
        y
    };
    let y = multi_head_attention(
        &b.scope("attn1"),
        shared,
        [y, context],
        attributes.heads,
        None,
    )?;
    let x = b.add(y, x)?;

    let y = norm("norm2", x)?;
    let image = shared.image_prompt.as_ref();
    let y = multi_head_attention(
        &b.scope("attn2"),
        shared,
        [y, text],
        attributes.heads,
        image,
    )?;
    let x = b.add(y, x)?;

    let y = norm("norm3", x)?;
    let y = feed_forward(&b.scope("ff"), shared, y)?;
    b.add(y, x)
}

/// `Attention`: queries from `x`, keys and values from `context`; to its result that of the same queries with keys and
/// values from `image` is added, as far as its scale says.
fn multi_head_attention(
    b: &Builder,
    shared: &Shared,
    [x, context]: [Tensor; 2],
    heads: usize,
    image: Option<&SharedImagePrompt>,
) -> Result<Tensor> {
    let precision = shared.precision;
    let [_, _, features] = dims(b, "attention", x)?;
    let project = |b: &Builder, name: &str, x: Tensor| {
        let layer = Linear::new(features, "embed", "heads").without_bias();
        let y = linear(&b.scope(name), x, layer, precision)?;
        constrain_tokens(b, y)
    };
    let q = project(b, "to_q", x)?;
    let k = project(b, "to_k", context)?;
    let v = project(b, "to_v", context)?;
    let attributes = Attention {
        heads,
        causal: false,
    };
    let mut y = attention(b, [q, k, v], attributes, precision)?;
    if let Some(image) = image {
        let own = image.layer(b)?;
        let ImagePrompt { tokens, scale } = image.prompt;
        let k = project(&own, "to_k_ip", tokens)?;
        let v = project(&own, "to_v_ip", tokens)?;
        let seen = attention(&own, [q, k, v], attributes, precision)?;
        y = b.add(y, b.mul(seen, scale)?)?;
    }
    let y = constrain_tokens(b, y)?;
    let layer = Linear::new(features, "heads", "embed");
    linear(&b.scope("to_out").scope(0), y, layer, precision)
}

/// `FeedForward` with GEGLU: the first layer makes values and gates of four times the features each.
fn feed_forward(b: &Builder, shared: &Shared, x: Tensor) -> Result<Tensor> {
    let [_, _, features] = dims(b, "feed forward", x)?;
    let net = b.scope("net");
    let geglu = net.scope(0);
    let layer = Linear::new(8 * features, "embed", "mlp");
    let both = linear(&geglu.scope("proj"), x, layer, shared.precision)?;
    let y = gated_gelu(&geglu, both)?;
    let layer = Linear::new(features, "mlp", "embed");
    linear(&net.scope(2), y, layer, shared.precision)
}
