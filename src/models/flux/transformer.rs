//! diffusers' `FluxTransformer2DModel`.

use crate::dtype::DType;
use crate::graph::{Builder, Tensor};
use crate::models::Part;
use crate::nn::{
    Activation, Attention, Linear, Precision, Remat, Result, RotaryTables, TimestepEmbedding,
    attention, constrain_tokens, dims, gelu_tanh, linear, plain_layer_norm, rms_norm, silu,
    sinusoidal_embedding,
};
use crate::shape::Shape;

use super::config::{FluxTransformer2DConfig, POSITION_AXES};

/// The root of the transformer's parameter paths.
pub const ROOT: &str = Part::Transformer.name();

/// Names of the transformer's run-time inputs: the parameters of diffusers' `forward`.
pub mod names {
    pub const HIDDEN_STATES: &str = "hidden_states";
    pub const ENCODER_HIDDEN_STATES: &str = "encoder_hidden_states";
    pub const POOLED_PROJECTIONS: &str = "pooled_projections";
    pub const TIMESTEP: &str = "timestep";
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

/// Epsilon of every normalization; diffusers has no field for it.
const EPSILON: f64 = 1e-6;
/// Features of the sinusoidal embedding of timestep and guidance.
const TIME_FEATURES: usize = 256;
/// Features between two feed-forward layers, over those of a token.
const MLP_RATIO: usize = 4;
/// What timestep and guidance are multiplied with before they are embedded.
const TIME_SCALE: f64 = 1000.0;

/// The inputs of the transformer. `B` is the batch.
#[derive(Clone, Copy, Debug)]
pub struct FluxInputs {
    /// Tokens of noisy latents `[B, image, in_channels]`.
    pub hidden_states: Tensor,
    /// Noise levels from 0 to 1, `[B]`.
    pub timestep: Tensor,
    /// Positions of the image's tokens `[image, 3]`.
    pub img_ids: Tensor,
    /// Positions of the text's tokens `[text, 3]`.
    pub txt_ids: Tensor,
    pub conditioning: FluxConditioning,
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
    inputs: FluxInputs,
    precision: Precision,
    remat: Remat,
) -> Result<Tensor> {
    let b = b.root(ROOT);
    config.check().map_err(|e| b.invalid(e.to_string()))?;
    let [image, text] = check_inputs(&b, config, &inputs)?;
    let inner = config.inner_dim();
    let conditioning = inputs.conditioning;
    let embedding = time_text_embedding(&b, config, &inputs, precision)?;
    let ids = b.concatenate(
        &[
            b.convert(inputs.txt_ids, DType::F32)?,
            b.convert(inputs.img_ids, DType::F32)?,
        ],
        0,
    )?;
    let blocks = Blocks {
        config,
        precision,
        // Every block starts its modulation with this activation; it is the same value in all of them.
        embedding: silu(&b, embedding)?,
        rotary: RotaryTables::new(&b.scope("pos_embed"), ids, &config.axes_dims_rope)?,
        text,
    };
    let embed = |name: &str, x: Tensor| {
        let layer = Linear {
            axes: (Some("embed"), None),
            ..Linear::new(inner, "embed", "heads")
        };
        let y = linear(&b.scope(name), x, layer, precision)?;
        constrain_residual(&b, y)
    };
    let mut x = embed("x_embedder", inputs.hidden_states)?;
    let mut context = embed("context_embedder", conditioning.encoder_hidden_states)?;
    for index in 0..config.num_layers {
        let b = remat.block(&b.scope("transformer_blocks").scope(index));
        (x, context) = blocks.double(&b, x, context)?;
    }
    let mut joint = b.concatenate(&[context, x], 1)?;
    for index in 0..config.num_single_layers {
        let b = remat.block(&b.scope("single_transformer_blocks").scope(index));
        joint = blocks.single(&b, joint)?;
    }
    let x = b.slice_dim(joint, 1, text, text + image)?;

    // Here the scale comes first, unlike in the blocks.
    let [scale, shift] = blocks.modulation(&b.scope("norm_out"))?;
    let x = blocks.modulated(&b.scope("norm_out").scope("norm"), x, [shift, scale])?;
    let layer = Linear {
        axes: (Some("embed"), None),
        ..Linear::new(config.out_channels(), "embed", "heads")
    };
    linear(&b.scope("proj_out"), x, layer, precision)
}

/// Checks shapes, and gives the tokens of the image and of the text.
fn check_inputs(
    b: &Builder,
    config: &FluxTransformer2DConfig,
    inputs: &FluxInputs,
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

/// `CombinedTimestepGuidanceTextProjEmbeddings`, or the same without guidance: `[B, inner_dim]`.
fn time_text_embedding(
    b: &Builder,
    config: &FluxTransformer2DConfig,
    inputs: &FluxInputs,
    precision: Precision,
) -> Result<Tensor> {
    let b = b.scope("time_text_embed");
    let embed = TimestepEmbedding {
        features: config.inner_dim(),
        activation: Activation::Silu,
    };
    let of_number = |name: &str, value: Tensor| {
        let value = b.mul_scalar(b.convert(value, DType::F32)?, TIME_SCALE)?;
        let y = sinusoidal_embedding(&b.scope("time_proj"), value, TIME_FEATURES, true, 0.0)?;
        embed.apply(
            &b.scope(name),
            b.convert(y, precision.activations)?,
            precision,
        )
    };
    let mut sum = of_number("timestep_embedder", inputs.timestep)?;
    if let Some(guidance) = inputs.conditioning.guidance {
        sum = b.add(sum, of_number("guidance_embedder", guidance)?)?;
    }
    let pooled = inputs.conditioning.pooled_projections;
    let text = embed.apply(&b.scope("text_embedder"), pooled, precision)?;
    b.add(sum, text)
}

/// The values that all blocks of one forward pass share.
struct Blocks<'a> {
    config: &'a FluxTransformer2DConfig,
    precision: Precision,
    /// The activated embedding of time, guidance and pooled text: `[B, inner_dim]`.
    embedding: Tensor,
    /// Of the text's tokens, then of the image's.
    rotary: RotaryTables,
    /// Tokens of the text.
    text: usize,
}

impl Blocks<'_> {
    /// `FluxTransformerBlock`: image and text attend to each other; all else is apart, with weights of its own.
    fn double(&self, b: &Builder, x: Tensor, context: Tensor) -> Result<(Tensor, Tensor)> {
        let of_image: [Tensor; 6] = self.modulation(&b.scope("norm1"))?;
        let of_text: [Tensor; 6] = self.modulation(&b.scope("norm1_context"))?;
        let normed = |name: &str, x: Tensor, parts: &[Tensor; 6]| {
            let [shift, scale, ..] = *parts;
            self.modulated(&b.scope(name).scope("norm"), x, [shift, scale])
        };
        let image_tokens = normed("norm1", x, &of_image)?;
        let text_tokens = normed("norm1_context", context, &of_text)?;

        let attn = b.scope("attn");
        let text_qkv = self.heads(
            &attn,
            text_tokens,
            ["add_q_proj", "add_k_proj", "add_v_proj"],
            ["norm_added_q", "norm_added_k"],
        )?;
        let image_qkv = self.heads(
            &attn,
            image_tokens,
            ["to_q", "to_k", "to_v"],
            ["norm_q", "norm_k"],
        )?;
        let [q, k, v] = std::array::from_fn(|i| b.concatenate(&[text_qkv[i], image_qkv[i]], 1));
        let y = self.attend(&attn, [q?, k?, v?])?;
        let [_, length, _] = dims(b, "attention", y)?;
        let leave = |name: &str, from: usize, to: usize| {
            let y = b.slice_dim(y, 1, from, to)?;
            let layer = Linear::new(self.config.inner_dim(), "heads", "embed");
            linear(&attn.scope(name), y, layer, self.precision)
        };
        let of_context = leave("to_add_out", 0, self.text)?;
        let of_x = leave("to_out.0", self.text, length)?;

        let finish = |x: Tensor, attended: Tensor, parts: [Tensor; 6], norm: &str, ff: &str| {
            let [_, _, gate, shift, scale, gate_mlp] = parts;
            let x = self.gated(b, x, gate, attended)?;
            let y = self.modulated(&b.scope(norm), x, [shift, scale])?;
            let y = self.feed_forward(&b.scope(ff), y)?;
            self.gated(b, x, gate_mlp, y)
        };
        let x = finish(x, of_x, of_image, "norm2", "ff")?;
        let context = finish(context, of_context, of_text, "norm2_context", "ff_context")?;
        Ok((x, context))
    }

    /// `FluxSingleTransformerBlock`, on text and image as one sequence: attention and feed-forward layer side by side.
    fn single(&self, b: &Builder, x: Tensor) -> Result<Tensor> {
        let inner = self.config.inner_dim();
        let [shift, scale, gate] = self.modulation(&b.scope("norm"))?;
        let y = self.modulated(&b.scope("norm").scope("norm"), x, [shift, scale])?;
        let layer = Linear::new(MLP_RATIO * inner, "embed", "mlp");
        let mlp = linear(&b.scope("proj_mlp"), y, layer, self.precision)?;
        let mlp = gelu_tanh(b, mlp)?;
        let attn = b.scope("attn");
        let qkv = self.heads(&attn, y, ["to_q", "to_k", "to_v"], ["norm_q", "norm_k"])?;
        let attended = self.attend(&attn, qkv)?;
        let y = b.concatenate(&[attended, mlp], 2)?;
        let layer = Linear::new(inner, "mlp", "embed");
        let y = linear(&b.scope("proj_out"), y, layer, self.precision)?;
        self.gated(b, x, gate, y)
    }

    /// Queries, keys and values of tokens `[B, length, inner_dim]`, each `[B, length, heads, size]`, the first two
    /// normed.
    fn heads(
        &self,
        b: &Builder,
        x: Tensor,
        projections: [&str; 3],
        norms: [&str; 2],
    ) -> Result<[Tensor; 3]> {
        let config = self.config;
        let [batch, length, _] = dims(b, "attention", x)?;
        let project = |name: &str| {
            let layer = Linear::new(config.inner_dim(), "embed", "heads");
            let y = linear(&b.scope(name), x, layer, self.precision)?;
            let y = constrain_tokens(b, y)?;
            let heads = [config.num_attention_heads, config.attention_head_dim];
            b.reshape(y, &[batch, length, heads[0], heads[1]])
        };
        let norm = |name: &str, x: Tensor| rms_norm(&b.scope(name), x, EPSILON, self.precision);
        let [q, k, v] = projections;
        let [norm_q, norm_k] = norms;
        Ok([
            norm(norm_q, project(q)?)?,
            norm(norm_k, project(k)?)?,
            project(v)?,
        ])
    }

    /// Attention of all tokens to all, with positions: `[B, length, inner_dim]`.
    fn attend(&self, b: &Builder, [q, k, v]: [Tensor; 3]) -> Result<Tensor> {
        let [batch, length, _, _] = dims(b, "attention", q)?;
        let all = [batch, length, self.config.inner_dim()];
        let q = self.rotary.apply(b, q)?;
        let k = self.rotary.apply(b, k)?;
        let flat = |x: Tensor| b.reshape(x, &all);
        let attributes = Attention {
            heads: self.config.num_attention_heads,
            causal: false,
        };
        let y = attention(
            b,
            [flat(q)?, flat(k)?, flat(v)?],
            attributes,
            self.precision,
        )?;
        constrain_tokens(b, y)
    }

    /// `FeedForward` with the approximation of GELU.
    fn feed_forward(&self, b: &Builder, x: Tensor) -> Result<Tensor> {
        let inner = self.config.inner_dim();
        let layer = Linear::new(MLP_RATIO * inner, "embed", "mlp");
        let y = linear(&b.scope("net.0.proj"), x, layer, self.precision)?;
        let y = gelu_tanh(b, y)?;
        let layer = Linear::new(inner, "mlp", "embed");
        linear(&b.scope("net.2"), y, layer, self.precision)
    }

    /// The parts of the modulation of scope `b`, each `[B, 1, inner_dim]`.
    fn modulation<const N: usize>(&self, b: &Builder) -> Result<[Tensor; N]> {
        let inner = self.config.inner_dim();
        let layer = Linear::new(N * inner, "embed", "mlp");
        let all = linear(&b.scope("linear"), self.embedding, layer, self.precision)?;
        let [batch, _] = dims(b, "modulation", all)?;
        let all = b.reshape(all, &[batch, 1, N * inner])?;
        let parts = b.split(all, 2, N)?;
        parts
            .try_into()
            .map_err(|_| b.invalid(format!("modulation: expected {N} parts")))
    }

    /// The norm of tokens without weights of its own, times `1 + scale`, plus `shift`.
    fn modulated(&self, b: &Builder, x: Tensor, [shift, scale]: [Tensor; 2]) -> Result<Tensor> {
        let y = plain_layer_norm(b, x, EPSILON, self.precision)?;
        let y = b.mul(y, b.add_scalar(scale, 1.0)?)?;
        b.add(y, shift)
    }

    /// `x + gate y`
    fn gated(&self, b: &Builder, x: Tensor, gate: Tensor, y: Tensor) -> Result<Tensor> {
        let x = b.add(x, b.mul(gate, y)?)?;
        constrain_residual(b, x)
    }
}

/// Pins the sharding of tokens between layers: every device has all features of its tokens, over which the next norm
/// takes its mean.
fn constrain_residual(b: &Builder, x: Tensor) -> Result<Tensor> {
    b.constrain(
        x,
        &[Some("activation_batch"), Some("activation_length"), None],
    )
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
) -> Result<FluxInputs> {
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
    })
}
