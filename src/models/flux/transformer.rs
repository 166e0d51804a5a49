//! diffusers' `FluxTransformer2DModel`.

use crate::dtype::DType;
use crate::graph::{Builder, Tensor};
use crate::models::Part;
use crate::models::joint::{Blocks, JointBlock, MLP_RATIO, outer_linear, time_text_embedding};
use crate::nn::{
    Linear, Precision, Remat, Result, RotaryTables, constrain_residual, dims, gated, gelu_tanh,
    linear, silu,
};
use crate::shape::Shape;

use super::config::{FluxTransformer2DConfig, POSITION_AXES};
use super::residuals::FluxResiduals;

/// The root of the transformer's parameter paths.
pub const ROOT: &str = Part::Transformer.name();

/// Names of the transformer's run-time inputs: the parameters of diffusers' `forward`.
pub mod names {
    pub use crate::models::joint::names::*;
    pub const IMG_IDS: &str = "img_ids";
    pub const TXT_IDS: &str = "txt_ids";
    pub const GUIDANCE: &str = "guidance";
}

/// Layers that stay in float under `quantization=int8`, as regular expressions of their paths below the root: AMD Quark's
/// table for FLUX, with its `*proj_out*` meaning the last layer alone and not those of the 38 single blocks too.
pub const INT8_FLOAT_LAYERS: [&str; 7] = [
    r"x_embedder",
    r"context_embedder",
    r"time_text_embed\..*",
    r"norm_out\..*",
    r"proj_out",
    r"transformer_blocks\.\d+\.norm1\.linear",
    r"transformer_blocks\.\d+\.norm1_context\.linear",
];

/// What timestep and guidance are multiplied with before they are embedded.
const TIME_SCALE: f64 = 1000.0;

/// The inputs of the transformer. `B` is the batch.
#[derive(Clone, Copy, Debug)]
pub struct FluxInputs<'a> {
    /// Tokens of noisy latents `[B, image, in_channels]`.
    pub hidden_states: Tensor,
    /// Noise levels from 0 to 1, `[B]`.
    pub timestep: Tensor,
    /// Positions of the image's tokens `[image, 3]`.
    pub img_ids: Tensor,
    /// Positions of the text's tokens `[text, 3]`.
    pub txt_ids: Tensor,
    pub conditioning: FluxConditioning,
    /// What ControlNets add after the blocks.
    pub residuals: Option<&'a FluxResiduals>,
}

/// The conditioning of the transformer on text.
#[derive(Clone, Copy, Debug)]
pub struct FluxConditioning {
    /// `[B, text, joint_attention_dim]`
    pub encoder_hidden_states: Tensor,
    /// `[B, pooled_projection_dim]`
    pub pooled_projections: Tensor,
    /// The guidance scale `[B]`; given exactly when the configuration asks for it.
    pub guidance: Option<Tensor>,
}

/// The model's prediction for the tokens of `inputs`: `[B, image, out_channels]` in `precision.activations`.
///
/// Weights are declared under `transformer/` with diffusers' keys. Under [`Remat::Full`] each block is a recomputation
/// region.
///
/// # Errors
/// When the configuration contradicts itself, or an input's shape does not fit it.
pub fn flux_transformer(
    b: &Builder,
    config: &FluxTransformer2DConfig,
    inputs: FluxInputs<'_>,
    precision: Precision,
    remat: Remat,
) -> Result<Tensor> {
    let b = b.root(ROOT);
    let embedded = embed(&b, config, &inputs, None, precision)?;
    let mut add = |block, x: Tensor| {
        let residual = inputs.residuals.and_then(|residuals| match block {
            Block::Double(index) => {
                FluxResiduals::after(&residuals.double, index, config.num_layers)
            }
            Block::Single(index) => {
                FluxResiduals::after(&residuals.single, index, config.num_single_layers)
            }
        });
        residual.map(|residual| b.add(x, residual)).transpose()
    };
    let after: Option<&mut AfterBlock<'_>> = match inputs.residuals {
        Some(_) => Some(&mut add),
        None => None,
    };
    let (blocks, x) = run_blocks(&b, config, embedded, remat, after)?;
    blocks.last(&b, x, config.out_channels())
}

/// What the blocks share, and the tokens before them.
pub(super) struct Embedded {
    pub blocks: Blocks,
    pub image: Tensor,
    pub context: Tensor,
}

/// The tokens of `inputs` before the blocks. `first` `[B, 1, inner_dim]` stands before those of the text, at the position of
/// the first.
pub(super) fn embed(
    b: &Builder,
    config: &FluxTransformer2DConfig,
    inputs: &FluxInputs<'_>,
    first: Option<Tensor>,
    precision: Precision,
) -> Result<Embedded> {
    config.check().map_err(|e| b.invalid(e.to_string()))?;
    let [_, text] = check_inputs(b, config, inputs)?;
    let inner = config.inner_dim();
    let conditioning = inputs.conditioning;
    let scaled = |value: Tensor| b.mul_scalar(b.convert(value, DType::F32)?, TIME_SCALE);
    let mut numbers = vec![("timestep_embedder", scaled(inputs.timestep)?)];
    if let Some(guidance) = conditioning.guidance {
        numbers.push(("guidance_embedder", scaled(guidance)?));
    }
    let pooled = conditioning.pooled_projections;
    let embedding = time_text_embedding(b, &numbers, pooled, inner, precision)?;
    let txt_ids = b.convert(inputs.txt_ids, DType::F32)?;
    let mut ids = vec![txt_ids, b.convert(inputs.img_ids, DType::F32)?];
    if first.is_some() {
        ids.insert(0, b.slice_dim(txt_ids, 0, 0, 1)?);
    }
    let ids = b.concatenate(&ids, 0)?;
    let rotary = RotaryTables::new(&b.scope("pos_embed"), ids, &config.axes_dims_rope)?;
    let blocks = Blocks {
        num_attention_heads: config.num_attention_heads,
        attention_head_dim: config.attention_head_dim,
        qk_norm: true,
        precision,
        // Every block starts its modulation with this activation; it is the same value in all of them.
        embedding: silu(b, embedding)?,
        rotary: Some(rotary),
        text: text + usize::from(first.is_some()),
    };
    let embed = |name: &str, x: Tensor| {
        let y = outer_linear(b, name, x, inner, precision)?;
        constrain_residual(b, y)
    };
    let image = embed("x_embedder", inputs.hidden_states)?;
    let mut context = embed("context_embedder", conditioning.encoder_hidden_states)?;
    if let Some(first) = first {
        context = b.concatenate(&[first, context], 1)?;
    }
    Ok(Embedded {
        blocks,
        image,
        context,
    })
}

/// A block by its number.
#[derive(Clone, Copy, Debug)]
pub(super) enum Block {
    Double(usize),
    Single(usize),
}

/// Takes the image's tokens after a block, and may give others for them.
pub(super) type AfterBlock<'a> = dyn FnMut(Block, Tensor) -> Result<Option<Tensor>> + 'a;

/// Runs all blocks; what they share, and the image's tokens after them.
pub(super) fn run_blocks(
    b: &Builder,
    config: &FluxTransformer2DConfig,
    embedded: Embedded,
    remat: Remat,
    mut after: Option<&mut AfterBlock<'_>>,
) -> Result<(Blocks, Tensor)> {
    let Embedded {
        blocks,
        image: mut x,
        mut context,
    } = embedded;
    for index in 0..config.num_layers {
        let b = remat.block(&b.scope("transformer_blocks").scope(index));
        let (image, text) = blocks.joint(&b, JointBlock::default(), x, context)?;
        (x, context) = (image, text.unwrap_or(context));
        if let Some(after) = &mut after {
            x = after(Block::Double(index), x)?.unwrap_or(x);
        }
    }
    let text = blocks.text;
    let all = text + b.dims(x)[1];
    let mut joint = b.concatenate(&[context, x], 1)?;
    for index in 0..config.num_single_layers {
        let b = remat.block(&b.scope("single_transformer_blocks").scope(index));
        joint = single(&blocks, &b, joint)?;
        if let Some(after) = &mut after {
            let image = b.slice_dim(joint, 1, text, all)?;
            if let Some(image) = after(Block::Single(index), image)? {
                let context = b.slice_dim(joint, 1, 0, text)?;
                joint = b.concatenate(&[context, image], 1)?;
            }
        }
    }
    let x = b.slice_dim(joint, 1, text, all)?;
    Ok((blocks, x))
}

/// `FluxSingleTransformerBlock`, on text and image as one sequence: attention and feed-forward layer side by side.
fn single(blocks: &Blocks, b: &Builder, x: Tensor) -> Result<Tensor> {
    let (inner, precision) = (blocks.inner_dim(), blocks.precision);
    let norm = b.scope("norm");
    let [shift, scale, gate] = blocks.modulation(&norm)?;
    let y = blocks.modulated(&norm.scope("norm"), x, [shift, scale])?;
    let layer = Linear::new(MLP_RATIO * inner, "embed", "mlp");
    let mlp = linear(&b.scope("proj_mlp"), y, layer, precision)?;
    let mlp = gelu_tanh(b, mlp)?;
    let attn = b.scope("attn");
    let qkv = blocks.image_heads(&attn, y)?;
    let attended = blocks.attend(&attn, qkv, blocks.rotary.as_ref())?;
    let y = b.concatenate(&[attended, mlp], 2)?;
    let layer = Linear::new(inner, "mlp", "embed");
    let y = linear(&b.scope("proj_out"), y, layer, precision)?;
    gated(b, x, gate, y)
}

/// Checks shapes, and gives the tokens of the image and of the text.
fn check_inputs(
    b: &Builder,
    config: &FluxTransformer2DConfig,
    inputs: &FluxInputs<'_>,
) -> Result<[usize; 2]> {
    let FluxConditioning {
        encoder_hidden_states,
        pooled_projections,
        guidance,
    } = inputs.conditioning;
    let [batch, image, _] = dims(b, names::HIDDEN_STATES, inputs.hidden_states)?;
    let [_, text, _] = dims(b, names::ENCODER_HIDDEN_STATES, encoder_hidden_states)?;
    let mut expected = vec![
        (
            names::HIDDEN_STATES,
            inputs.hidden_states,
            vec![batch, image, config.in_channels],
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
        (names::IMG_IDS, inputs.img_ids, vec![image, POSITION_AXES]),
        (names::TXT_IDS, inputs.txt_ids, vec![text, POSITION_AXES]),
    ];
    expected.extend(guidance.map(|guidance| (names::GUIDANCE, guidance, vec![batch])));
    for (name, tensor, sizes) in expected {
        if b.dims(tensor) != sizes {
            return Err(b.invalid(format!(
                "{name} is {}; expected sizes {sizes:?}",
                b.shape(tensor)
            )));
        }
    }
    match (config.guidance_embeds, guidance) {
        (true, Some(_)) | (false, None) => Ok([image, text]),
        (true, None) => Err(b.invalid("guidance_embeds = true needs guidance")),
        (false, Some(_)) => Err(b.invalid("guidance is given, but guidance_embeds is false")),
    }
}

/// Declares the inputs for `batch` samples of `image` tokens and `text` tokens of text, with the names of diffusers'
/// `forward`, in `f32`.
///
/// # Errors
/// When one of the names is taken by an input of another shape.
pub fn declare_inputs(
    b: &Builder,
    config: &FluxTransformer2DConfig,
    [batch, image, text]: [usize; 3],
) -> Result<FluxInputs<'static>> {
    let batch_axis = Some("activation_batch");
    let input = |name: &str, sizes: &[usize]| {
        let is_of_batch = ![names::IMG_IDS, names::TXT_IDS].contains(&name);
        let mut axes = vec![None; sizes.len()];
        axes[0] = batch_axis.filter(|_| is_of_batch);
        b.input(name, Shape::new(DType::F32, sizes), &axes)
    };
    let guidance = match config.guidance_embeds {
        true => Some(input(names::GUIDANCE, &[batch])?),
        false => None,
    };
    Ok(FluxInputs {
        hidden_states: input(names::HIDDEN_STATES, &[batch, image, config.in_channels])?,
        timestep: input(names::TIMESTEP, &[batch])?,
        img_ids: input(names::IMG_IDS, &[image, POSITION_AXES])?,
        txt_ids: input(names::TXT_IDS, &[text, POSITION_AXES])?,
        conditioning: FluxConditioning {
            encoder_hidden_states: input(
                names::ENCODER_HIDDEN_STATES,
                &[batch, text, config.joint_attention_dim],
            )?,
            pooled_projections: input(
                names::POOLED_PROJECTIONS,
                &[batch, config.pooled_projection_dim],
            )?,
            guidance,
        },
        residuals: None,
    })
}
