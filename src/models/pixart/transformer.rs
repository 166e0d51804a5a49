//! diffusers' `PixArtTransformer2DModel`.

use crate::dtype::DType;
use crate::graph::{Builder, Init, Tensor};
use crate::host_tensor::HostTensor;
use crate::models::Part;
use crate::models::joint::{EPSILON, MLP_RATIO, TIME_FEATURES, names as joint, outer_linear};
use crate::nn::{
    Activation, Attention, Linear, Precision, Remat, Result, TimestepEmbedding, attention,
    constrain_residual, constrain_tokens, dims, feed_forward, gated, gelu_tanh, linear,
    masked_attention, modulated, modulation_parts, patch_embedding, silu, sine_positions,
    sinusoidal_embedding, unpatch,
};
use crate::shape::Shape;

use super::config::{PATCH, PixArtTransformer2DConfig};

/// The root of the transformer's parameter paths.
pub const ROOT: &str = Part::Transformer.name();

/// Names of the transformer's run-time inputs: the parameters of diffusers' `forward`, and those of its
/// `added_cond_kwargs`.
pub mod names {
    pub use crate::models::joint::names::{ENCODER_HIDDEN_STATES, HIDDEN_STATES, TIMESTEP};
    pub const ENCODER_ATTENTION_MASK: &str = "encoder_attention_mask";
    pub const RESOLUTION: &str = "resolution";
    pub const ASPECT_RATIO: &str = "aspect_ratio";
}

/// Layers that stay in float under `quantization=int8`, as regular expressions of their paths below the root: what AMD
/// Quark's table for Stable Diffusion 3 and PixArt means, by PixArt's names.
pub const INT8_FLOAT_LAYERS: [&str; 4] = [
    r"adaln_single\..*",
    r"caption_projection\..*",
    r"pos_embed\..*",
    r"proj_out",
];

/// The inputs of the transformer. `B` is the batch.
#[derive(Clone, Copy, Debug)]
pub struct PixArtInputs {
    /// Noisy latents `[B, in_channels, rows, columns]`.
    pub hidden_states: Tensor,
    /// Training timesteps `[B]`, from 0 to 1000.
    pub timestep: Tensor,
    pub conditioning: PixArtConditioning,
}

/// The conditioning of the transformer on text and on the image's size.
#[derive(Clone, Copy, Debug)]
pub struct PixArtConditioning {
    /// `[B, text, caption_channels]`
    pub encoder_hidden_states: Tensor,
    /// `[B, text]`: 0 for tokens that nothing attends to.
    pub encoder_attention_mask: Tensor,
    /// Given exactly when the configuration asks for it.
    pub size: Option<ImageSize>,
}

/// The size of the image.
#[derive(Clone, Copy, Debug)]
pub struct ImageSize {
    /// Height and width in pixels: `[B, 2]`.
    pub resolution: Tensor,
    /// Height over width: `[B, 1]`.
    pub aspect_ratio: Tensor,
}

impl ImageSize {
    /// The same height and width for `batch` images, as constants.
    ///
    /// # Errors
    /// None: the shapes are fixed.
    pub fn constant(b: &Builder, batch: usize, [height, width]: [usize; 2]) -> Result<ImageSize> {
        let [height, width] = [height, width].map(|side| side as f32);
        let constant = |values: &[f32]| {
            let value = b.constant(HostTensor::from_f32([1, values.len()], values)?)?;
            b.broadcast_to(value, &[batch, values.len()])
        };
        Ok(ImageSize {
            resolution: constant(&[height, width])?,
            aspect_ratio: constant(&[height / width])?,
        })
    }
}

/// The model's prediction for `inputs`: `[B, out_channels, rows, columns]` in `precision.activations`.
///
/// Weights are declared under `transformer/` with diffusers' keys. Under [`Remat::Full`] each block is a recomputation
/// region.
///
/// # Errors
/// When the configuration contradicts itself, or an input's shape does not fit it.
pub fn pixart_transformer(
    b: &Builder,
    config: &PixArtTransformer2DConfig,
    inputs: PixArtInputs,
    precision: Precision,
    remat: Remat,
) -> Result<Tensor> {
    let b = b.root(ROOT);
    config.check().map_err(|e| b.invalid(e.to_string()))?;
    let grid = check_inputs(&b, config, &inputs)?;
    let inner = config.inner_dim();
    let adaln = b.scope("adaln_single");
    let embedding = time_size_embedding(&adaln.scope("emb"), config, &inputs, precision)?;
    let layer = Linear::new(6 * inner, "embed", "mlp");
    let activated = silu(&adaln, embedding)?;
    let blocks = Blocks {
        config,
        precision,
        modulation: linear(&adaln.scope("linear"), activated, layer, precision)?,
        context: caption(&b.scope("caption_projection"), config, &inputs, precision)?,
        mask: inputs.conditioning.encoder_attention_mask,
    };
    let mut x = embed_image(&b, config, inputs.hidden_states, grid, precision)?;
    for index in 0..config.num_layers {
        let b = remat.block(&b.scope("transformer_blocks").scope(index));
        x = blocks.block(&b, x)?;
    }
    let [batch, _] = dims(&b, "timestep embedding", embedding)?;
    let embedding = b.reshape(embedding, &[batch, 1, inner])?;
    let both = b.concatenate(&[embedding, embedding], 2)?;
    let [shift, scale] = table_parts(&b, both, inner, precision)?;
    let x = modulated(&b.scope("norm_out"), x, [shift, scale], EPSILON, precision)?;
    let features = PATCH * PATCH * config.out_channels;
    let tokens = outer_linear(&b, "proj_out", x, features, precision)?;
    unpatch(&b, tokens, PATCH, grid.map(|side| side * PATCH))
}

/// The transformer's prediction for the sample: its result without the variance that some checkpoints predict too.
///
/// # Errors
/// As for [`pixart_transformer`].
pub fn predict_sample(
    b: &Builder,
    config: &PixArtTransformer2DConfig,
    inputs: PixArtInputs,
    precision: Precision,
    remat: Remat,
) -> Result<Tensor> {
    let out = pixart_transformer(b, config, inputs, precision, remat)?;
    b.root(ROOT).slice_dim(out, 1, 0, config.in_channels)
}

/// Tokens of the latents with their positions.
fn embed_image(
    b: &Builder,
    config: &PixArtTransformer2DConfig,
    latents: Tensor,
    grid: [usize; 2],
    precision: Precision,
) -> Result<Tensor> {
    let b = b.scope("pos_embed");
    let inner = config.inner_dim();
    let x = patch_embedding(&b, latents, PATCH, inner, precision)?;
    // In f32 as in diffusers.
    let base = (config.sample_size / PATCH) as f64;
    let scale = config.interpolation_scale() as f32;
    let place = |i: usize, n: usize| f64::from(i as f32 / (n as f64 / base) as f32 / scale);
    let positions = sine_positions(&b, grid, inner, place)?;
    let x = b.add(b.convert(x, DType::F32)?, positions)?;
    b.convert(x, precision.activations)
}

/// The text's tokens with the image's features: diffusers' `PixArtAlphaTextProjection`.
fn caption(
    b: &Builder,
    config: &PixArtTransformer2DConfig,
    inputs: &PixArtInputs,
    precision: Precision,
) -> Result<Tensor> {
    let inner = config.inner_dim();
    let text = inputs.conditioning.encoder_hidden_states;
    let layer = Linear::new(inner, "embed", "mlp");
    let y = linear(&b.scope("linear_1"), text, layer, precision)?;
    let y = gelu_tanh(b, y)?;
    let layer = Linear::new(inner, "mlp", "embed");
    let y = linear(&b.scope("linear_2"), y, layer, precision)?;
    constrain_residual(b, y)
}

/// diffusers' `PixArtAlphaCombinedTimestepSizeEmbeddings`: `[B, inner_dim]`.
fn time_size_embedding(
    b: &Builder,
    config: &PixArtTransformer2DConfig,
    inputs: &PixArtInputs,
    precision: Precision,
) -> Result<Tensor> {
    let inner = config.inner_dim();
    let of_numbers = |name: &str, numbers: Tensor, features: usize| {
        let embed = TimestepEmbedding {
            features,
            activation: Activation::Silu,
        };
        let numbers = b.convert(numbers, DType::F32)?;
        let y = sinusoidal_embedding(b, numbers, TIME_FEATURES, true, 0.0)?;
        let y = b.convert(y, precision.activations)?;
        embed.apply(&b.scope(name), y, precision)
    };
    let time = of_numbers("timestep_embedder", inputs.timestep, inner)?;
    let Some(size) = inputs.conditioning.size else {
        return Ok(time);
    };
    let each = inner / 3;
    let [batch, sides] = dims(b, names::RESOLUTION, size.resolution)?;
    let resolution = b.reshape(size.resolution, &[batch * sides])?;
    let resolution = of_numbers("resolution_embedder", resolution, each)?;
    let resolution = b.reshape(resolution, &[batch, sides * each])?;
    let ratio = b.reshape(size.aspect_ratio, &[batch])?;
    let ratio = of_numbers("aspect_ratio_embedder", ratio, each)?;
    b.add(time, b.concatenate(&[resolution, ratio], 1)?)
}

/// The `N` parts of `all` `[B, 1, N * inner]` with the rows of the scope's `scale_shift_table` added.
fn table_parts<const N: usize>(
    b: &Builder,
    all: Tensor,
    inner: usize,
    precision: Precision,
) -> Result<[Tensor; N]> {
    let shape = Shape::new(precision.weights, [N, inner]);
    let init = Init::Normal {
        std: (1.0 / (inner as f64).sqrt()) as f32,
    };
    let table = b.param("scale_shift_table", shape, init, &[None, Some("norm")])?;
    let table = b.convert(table, precision.activations)?;
    let table = b.reshape(table, &[1, 1, N * inner])?;
    modulation_parts(b, b.add(all, table)?)
}

/// The values that all blocks of one forward pass share.
struct Blocks<'a> {
    config: &'a PixArtTransformer2DConfig,
    precision: Precision,
    /// Shifts, scales and gates, to which every block adds its own: `[B, 6 * inner_dim]`.
    modulation: Tensor,
    /// The text's tokens `[B, text, inner_dim]`, and which of them are attended to.
    context: Tensor,
    mask: Tensor,
}

impl Blocks<'_> {
    /// `BasicTransformerBlock` with `ada_norm_single`, on the image's tokens.
    fn block(&self, b: &Builder, x: Tensor) -> Result<Tensor> {
        let (inner, precision) = (self.config.inner_dim(), self.precision);
        let [batch, all] = dims(b, "modulation", self.modulation)?;
        let modulation = b.reshape(self.modulation, &[batch, 1, all])?;
        let [shift, scale, gate, shift_mlp, scale_mlp, gate_mlp] =
            table_parts(b, modulation, inner, precision)?;
        let y = modulated(&b.scope("norm1"), x, [shift, scale], EPSILON, precision)?;
        let attn = b.scope("attn1");
        let y = self.attend(&attn, self.heads(&attn, y, y)?, None)?;
        let x = gated(b, x, gate, y)?;
        // No norm comes before the attention to the text, as in PixArt's own code.
        let attn = b.scope("attn2");
        let y = self.attend(&attn, self.heads(&attn, x, self.context)?, Some(self.mask))?;
        let x = constrain_residual(b, b.add(x, y)?)?;
        let parts = [shift_mlp, scale_mlp];
        let y = modulated(&b.scope("norm2"), x, parts, EPSILON, precision)?;
        let y = feed_forward(&b.scope("ff"), y, MLP_RATIO * inner, precision)?;
        gated(b, x, gate_mlp, y)
    }

    /// Queries of `x`, keys and values of `context`.
    fn heads(&self, b: &Builder, x: Tensor, context: Tensor) -> Result<[Tensor; 3]> {
        let project = |name: &str, x: Tensor| {
            let layer = Linear::new(self.config.inner_dim(), "embed", "heads");
            let y = linear(&b.scope(name), x, layer, self.precision)?;
            constrain_tokens(b, y)
        };
        Ok([
            project("to_q", x)?,
            project("to_k", context)?,
            project("to_v", context)?,
        ])
    }

    fn attend(&self, b: &Builder, qkv: [Tensor; 3], mask: Option<Tensor>) -> Result<Tensor> {
        let attributes = Attention {
            heads: self.config.num_attention_heads,
            causal: false,
        };
        let y = match mask {
            None => attention(b, qkv, attributes, self.precision)?,
            Some(mask) => masked_attention(b, qkv, mask, attributes.heads, self.precision)?,
        };
        let y = constrain_tokens(b, y)?;
        let layer = Linear::new(self.config.inner_dim(), "heads", "embed");
        linear(&b.scope("to_out.0"), y, layer, self.precision)
    }
}

/// Checks shapes, and gives rows and columns of the image's tokens.
fn check_inputs(
    b: &Builder,
    config: &PixArtTransformer2DConfig,
    inputs: &PixArtInputs,
) -> Result<[usize; 2]> {
    let PixArtConditioning {
        encoder_hidden_states,
        encoder_attention_mask,
        size,
    } = inputs.conditioning;
    let [batch, _, rows, columns] = dims(b, joint::HIDDEN_STATES, inputs.hidden_states)?;
    let [_, text, _] = dims(b, joint::ENCODER_HIDDEN_STATES, encoder_hidden_states)?;
    let mut expected = vec![
        (
            names::HIDDEN_STATES,
            inputs.hidden_states,
            vec![batch, config.in_channels, rows, columns],
        ),
        (
            names::ENCODER_HIDDEN_STATES,
            encoder_hidden_states,
            vec![batch, text, config.caption_channels],
        ),
        (
            names::ENCODER_ATTENTION_MASK,
            encoder_attention_mask,
            vec![batch, text],
        ),
        (names::TIMESTEP, inputs.timestep, vec![batch]),
    ];
    if let Some(size) = size {
        expected.push((names::RESOLUTION, size.resolution, vec![batch, 2]));
        expected.push((names::ASPECT_RATIO, size.aspect_ratio, vec![batch, 1]));
    }
    for (name, tensor, sizes) in expected {
        if b.dims(tensor) != sizes {
            return Err(b.invalid(format!(
                "{name} is {}; expected sizes {sizes:?}",
                b.shape(tensor)
            )));
        }
    }
    match (config.takes_size(), size.is_some()) {
        (true, true) | (false, false) => Ok([rows / PATCH, columns / PATCH]),
        (true, false) => {
            Err(b.invalid("use_additional_conditions needs resolution and aspect_ratio"))
        }
        (false, true) => Err(b.invalid(
            "resolution and aspect_ratio are given, but use_additional_conditions is false",
        )),
    }
}

/// Declares the inputs for `batch` samples of `rows x columns` latents and `text` tokens of text, with the names of
/// diffusers' `forward`, in `f32`.
///
/// # Errors
/// When one of the names is taken by an input of another shape.
pub fn declare_inputs(
    b: &Builder,
    config: &PixArtTransformer2DConfig,
    [batch, rows, columns, text]: [usize; 4],
) -> Result<PixArtInputs> {
    let axes = [Some("activation_batch"), None, None, None];
    let input = |name: &str, sizes: &[usize]| {
        b.input(name, Shape::new(DType::F32, sizes), &axes[..sizes.len()])
    };
    let size = match config.takes_size() {
        true => Some(ImageSize {
            resolution: input(names::RESOLUTION, &[batch, 2])?,
            aspect_ratio: input(names::ASPECT_RATIO, &[batch, 1])?,
        }),
        false => None,
    };
    Ok(PixArtInputs {
        hidden_states: input(
            names::HIDDEN_STATES,
            &[batch, config.in_channels, rows, columns],
        )?,
        timestep: input(names::TIMESTEP, &[batch])?,
        conditioning: declare_conditioning(b, config, [batch, text], size)?,
    })
}

/// Declares the conditioning on `text` tokens of text, as [`declare_inputs`] does.
///
/// # Errors
/// When one of the names is taken by an input of another shape.
pub fn declare_conditioning(
    b: &Builder,
    config: &PixArtTransformer2DConfig,
    [batch, text]: [usize; 2],
    size: Option<ImageSize>,
) -> Result<PixArtConditioning> {
    let axes = [Some("activation_batch"), None, None];
    let input = |name: &str, sizes: &[usize]| {
        b.input(name, Shape::new(DType::F32, sizes), &axes[..sizes.len()])
    };
    Ok(PixArtConditioning {
        encoder_hidden_states: input(
            names::ENCODER_HIDDEN_STATES,
            &[batch, text, config.caption_channels],
        )?,
        encoder_attention_mask: input(names::ENCODER_ATTENTION_MASK, &[batch, text])?,
        size,
    })
}
