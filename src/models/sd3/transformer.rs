//! diffusers' `SD3Transformer2DModel`.

use crate::dtype::DType;
use crate::graph::{Builder, Comparison, Init, Tensor};
use crate::models::Part;
use crate::models::joint::{Blocks, JointBlock, names, outer_linear, time_text_embedding};
use crate::nn::{
    Precision, Remat, Result, constrain_residual, dims, patch_embedding, silu, unpatch,
};
use crate::shape::Shape;

use super::config::{PATCH, Sd3Transformer2DConfig};

/// The root of the transformer's parameter paths.
pub const ROOT: &str = Part::Transformer.name();

/// Layers that stay in float under `quantization=int8`, as regular expressions of their paths below the root: AMD Quark's
/// table for Stable Diffusion 3.
pub const INT8_FLOAT_LAYERS: [&str; 5] = [
    r"time_text_embed\..*",
    r"context_embedder",
    r"pos_embed\..*",
    r"norm_out\..*",
    r"proj_out",
];

/// The inputs of the transformer. `B` is the batch.
#[derive(Clone, Debug)]
pub struct Sd3Inputs {
    /// Noisy latents `[B, in_channels, rows, columns]`.
    pub hidden_states: Tensor,
    /// Training timesteps `[B]`, from 0 to 1000.
    pub timestep: Tensor,
    pub conditioning: Sd3Conditioning,
    pub skip_layers: Option<SkipLayers>,
}

/// The conditioning of the transformer on text.
#[derive(Clone, Copy, Debug)]
pub struct Sd3Conditioning {
    /// `[B, text, joint_attention_dim]`
    pub encoder_hidden_states: Tensor,
    /// `[B, pooled_projection_dim]`
    pub pooled_projections: Tensor,
}

/// Blocks that a run may leave out, as one of three does in skip-layer guidance.
#[derive(Clone, Debug)]
pub struct SkipLayers {
    pub layers: Vec<usize>,
    /// A scalar: they are left out where it is not 0. Being an input, it lets all runs share one program and its weights.
    pub are_skipped: Tensor,
}

impl SkipLayers {
    /// What comes out of block `index`: `after`, or what went in where it is left out.
    fn select(&self, b: &Builder, index: usize, before: Tensor, after: Tensor) -> Result<Tensor> {
        if !self.layers.contains(&index) {
            return Ok(after);
        }
        let zero = b.scalar(b.dtype(self.are_skipped), 0.0)?;
        let skipped = b.compare(Comparison::Ne, self.are_skipped, zero)?;
        let skipped = b.broadcast_to(skipped, &b.dims(after))?;
        b.select(skipped, before, after)
    }
}

/// The model's prediction for `inputs`: `[B, out_channels, rows, columns]` in `precision.activations`.
///
/// Weights are declared under `transformer/` with diffusers' keys. Under [`Remat::Full`] each block is a recomputation
/// region.
///
/// # Errors
/// When the configuration contradicts itself, an input's shape does not fit it, or a block to skip does not exist.
pub fn sd3_transformer(
    b: &Builder,
    config: &Sd3Transformer2DConfig,
    inputs: Sd3Inputs,
    precision: Precision,
    remat: Remat,
) -> Result<Tensor> {
    let b = b.root(ROOT);
    config.check().map_err(|e| b.invalid(e.to_string()))?;
    let (grid, text) = check_inputs(&b, config, &inputs)?;
    let inner = config.inner_dim();
    let Sd3Conditioning {
        encoder_hidden_states,
        pooled_projections,
    } = inputs.conditioning;
    let numbers = [("timestep_embedder", inputs.timestep)];
    let embedding = time_text_embedding(&b, &numbers, pooled_projections, inner, precision)?;
    let blocks = Blocks {
        num_attention_heads: config.num_attention_heads,
        attention_head_dim: config.attention_head_dim,
        qk_norm: config.qk_norm.is_some(),
        precision,
        // Every block starts its modulation with this activation; it is the same value in all of them.
        embedding: silu(&b, embedding)?,
        rotary: None,
        text,
    };
    let mut x = embed_image(&b, config, inputs.hidden_states, grid, precision)?;
    let context = outer_linear(
        &b,
        "context_embedder",
        encoder_hidden_states,
        inner,
        precision,
    )?;
    let mut context = constrain_residual(&b, context)?;
    for index in 0..config.num_layers {
        let b = remat.block(&b.scope("transformer_blocks").scope(index));
        let block = JointBlock {
            use_dual_attention: config.dual_attention_layers.contains(&index),
            context_pre_only: index + 1 == config.num_layers,
        };
        let (image, text) = blocks.joint(&b, block, x, context)?;
        let text = text.unwrap_or(context);
        (x, context) = match &inputs.skip_layers {
            None => (image, text),
            Some(skip) => (
                skip.select(&b, index, x, image)?,
                skip.select(&b, index, context, text)?,
            ),
        };
    }
    let features = PATCH * PATCH * config.out_channels();
    let tokens = blocks.last(&b, x, features)?;
    unpatch(&b, tokens, PATCH, grid.map(|side| side * PATCH))
}

/// Tokens of the latents with their positions: those in the middle of the stored grid.
fn embed_image(
    b: &Builder,
    config: &Sd3Transformer2DConfig,
    latents: Tensor,
    grid: [usize; 2],
    precision: Precision,
) -> Result<Tensor> {
    let b = b.scope("pos_embed");
    let (inner, side) = (config.inner_dim(), config.pos_embed_max_size);
    let x = patch_embedding(&b, latents, PATCH, inner, precision)?;
    let stored = Shape::new(precision.weights, [1, side * side, inner]);
    let axes = [None, None, Some("embed")];
    let mut positions = b.param("pos_embed", stored, Init::Zeros, &axes)?;
    positions = b.reshape(positions, &[side, side, inner])?;
    for (axis, &tokens) in grid.iter().enumerate() {
        let first = (side - tokens) / 2;
        positions = b.slice_dim(positions, axis, first, first + tokens)?;
    }
    let positions = b.reshape(positions, &[1, grid[0] * grid[1], inner])?;
    b.add(x, b.convert(positions, precision.activations)?)
}

/// Checks shapes, and gives rows and columns of the image's tokens, and the tokens of the text.
fn check_inputs(
    b: &Builder,
    config: &Sd3Transformer2DConfig,
    inputs: &Sd3Inputs,
) -> Result<([usize; 2], usize)> {
    let Sd3Conditioning {
        encoder_hidden_states,
        pooled_projections,
    } = inputs.conditioning;
    let [batch, _, rows, columns] = dims(b, names::HIDDEN_STATES, inputs.hidden_states)?;
    let [_, text, _] = dims(b, names::ENCODER_HIDDEN_STATES, encoder_hidden_states)?;
    for (name, tensor, sizes) in [
        (
            names::HIDDEN_STATES,
            inputs.hidden_states,
            vec![batch, config.in_channels, rows, columns],
        ),
        (
            names::ENCODER_HIDDEN_STATES,
            encoder_hidden_states,
            vec![batch, text, config.joint_attention_dim],
        ),
        (
            names::POOLED_PROJECTIONS,
            pooled_projections,
            vec![batch, config.pooled_projection_dim],
        ),
        (names::TIMESTEP, inputs.timestep, vec![batch]),
    ] {
        if b.dims(tensor) != sizes {
            return Err(b.invalid(format!(
                "{name} is {}; expected sizes {sizes:?}",
                b.shape(tensor)
            )));
        }
    }
    let most = config.largest_side();
    if rows > most || columns > most {
        return Err(b.invalid(format!(
            "{} is {}; rows and columns have positions up to {most} (pos_embed_max_size = {})",
            names::HIDDEN_STATES,
            b.shape(inputs.hidden_states),
            config.pos_embed_max_size
        )));
    }
    let skipped = inputs.skip_layers.iter().flat_map(|skip| &skip.layers);
    if let Some(layer) = skipped.into_iter().find(|l| **l >= config.num_layers) {
        return Err(b.invalid(format!(
            "skip_guidance_layers has {layer}, but the transformer has {} layers, from 0 on",
            config.num_layers
        )));
    }
    Ok(([rows / PATCH, columns / PATCH], text))
}

/// Declares the inputs for `batch` samples of `rows x columns` latents and `text` tokens of text, with the names of
/// diffusers' `forward`, in `f32`.
///
/// # Errors
/// When one of the names is taken by an input of another shape.
pub fn declare_inputs(
    b: &Builder,
    config: &Sd3Transformer2DConfig,
    [batch, rows, columns, text]: [usize; 4],
) -> Result<Sd3Inputs> {
    let axes = [Some("activation_batch"), None, None, None];
    let input = |name: &str, sizes: &[usize]| {
        b.input(name, Shape::new(DType::F32, sizes), &axes[..sizes.len()])
    };
    Ok(Sd3Inputs {
        hidden_states: input(
            names::HIDDEN_STATES,
            &[batch, config.in_channels, rows, columns],
        )?,
        timestep: input(names::TIMESTEP, &[batch])?,
        conditioning: declare_conditioning(b, config, [batch, text])?,
        skip_layers: None,
    })
}

/// Declares the conditioning on `text` tokens of text, as [`declare_inputs`] does.
///
/// # Errors
/// When one of the names is taken by an input of another shape.
pub fn declare_conditioning(
    b: &Builder,
    config: &Sd3Transformer2DConfig,
    [batch, text]: [usize; 2],
) -> Result<Sd3Conditioning> {
    let axes = [Some("activation_batch"), None, None];
    let input = |name: &str, sizes: &[usize]| {
        b.input(name, Shape::new(DType::F32, sizes), &axes[..sizes.len()])
    };
    Ok(Sd3Conditioning {
        encoder_hidden_states: input(
            names::ENCODER_HIDDEN_STATES,
            &[batch, text, config.joint_attention_dim],
        )?,
        pooled_projections: input(
            names::POOLED_PROJECTIONS,
            &[batch, config.pooled_projection_dim],
        )?,
    })
}
