//! Blocks in which image and text attend to each other, each with weights of its own: those of Stable Diffusion 3 (Esser
//! et al., 2024, arXiv:2403.03206) and the double blocks of FLUX.1.

use crate::dtype::DType;
use crate::graph::{Builder, Tensor};
use crate::nn::{
    Activation, Attention, Linear, Precision, Result, RotaryTables, TimestepEmbedding, attention,
    constrain_tokens, dims, feed_forward, gated, linear, modulated, modulation, rms_norm,
    sinusoidal_embedding,
};

/// Epsilon of every normalization; diffusers has no field for it.
pub const EPSILON: f64 = 1e-6;
/// Features between two feed-forward layers, over those of a token.
pub const MLP_RATIO: usize = 4;
/// Features of the sinusoidal embedding of a number.
pub const TIME_FEATURES: usize = 256;

/// Names of run-time inputs that all such transformers take: the parameters of diffusers' `forward`.
pub mod names {
    pub const HIDDEN_STATES: &str = "hidden_states";
    pub const ENCODER_HIDDEN_STATES: &str = "encoder_hidden_states";
    pub const POOLED_PROJECTIONS: &str = "pooled_projections";
    pub const TIMESTEP: &str = "timestep";
}

/// The values that all blocks of one forward pass share.
#[derive(Debug)]
pub struct Blocks {
    pub num_attention_heads: usize,
    pub attention_head_dim: usize,
    /// Whether queries and keys have RMS norms.
    pub qk_norm: bool,
    pub precision: Precision,
    /// The activated embedding of what conditions all tokens alike: `[B, inner_dim]`.
    pub embedding: Tensor,
    /// Of the text's tokens, then of the image's; `None` where tokens have their positions added.
    pub rotary: Option<RotaryTables>,
    /// Tokens of the text.
    pub text: usize,
}

/// How one joint block differs from others.
#[derive(Clone, Copy, Debug, Default)]
pub struct JointBlock {
    /// Whether the image's tokens also attend to themselves alone.
    pub use_dual_attention: bool,
    /// Whether the text ends here, as in the last block of Stable Diffusion 3.
    pub context_pre_only: bool,
}

/// The embeddings of numbers and of the pooled text, added up: diffusers' `CombinedTimestepTextProjEmbeddings` and
/// `CombinedTimestepGuidanceTextProjEmbeddings`. Gives `[B, features]`.
///
/// # Errors
/// When the shapes do not fit each other.
pub fn time_text_embedding(
    b: &Builder,
    numbers: &[(&str, Tensor)],
    pooled: Tensor,
    features: usize,
    precision: Precision,
) -> Result<Tensor> {
    let b = b.scope("time_text_embed");
    let embed = TimestepEmbedding {
        features,
        activation: Activation::Silu,
    };
    let mut sum = None;
    for &(name, value) in numbers {
        let value = b.convert(value, DType::F32)?;
        let y = sinusoidal_embedding(&b.scope("time_proj"), value, TIME_FEATURES, true, 0.0)?;
        let y = b.convert(y, precision.activations)?;
        let y = embed.apply(&b.scope(name), y, precision)?;
        sum = Some(match sum {
            None => y,
            Some(sum) => b.add(sum, y)?,
        });
    }
    let text = embed.apply(&b.scope("text_embedder"), pooled, precision)?;
    sum.map_or(Ok(text), |sum| b.add(sum, text))
}

/// The layer `name` before the first or after the last block.
///
/// # Errors
/// As for [`linear`].
pub fn outer_linear(
    b: &Builder,
    name: &str,
    x: Tensor,
    features: usize,
    precision: Precision,
) -> Result<Tensor> {
    let layer = Linear {
        axes: (Some("embed"), None),
        ..Linear::new(features, "embed", "heads")
    };
    linear(&b.scope(name), x, layer, precision)
}

impl Blocks {
    /// Features of the tokens between the blocks.
    pub fn inner_dim(&self) -> usize {
        self.num_attention_heads * self.attention_head_dim
    }

    /// diffusers' `JointTransformerBlock` and `FluxTransformerBlock` on the image's tokens `x` and the text's tokens
    /// `context`. No tokens of the text come out of the block in which it ends.
    ///
    /// # Errors
    /// When the shapes do not fit each other.
    pub fn joint(
        &self,
        b: &Builder,
        block: JointBlock,
        x: Tensor,
        context: Tensor,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let norm1 = b.scope("norm1");
        let (of_image, of_second) = self.image_modulation(&norm1, block)?;
        let [shift, scale, gate, ..] = of_image;
        let norm1 = norm1.scope("norm");
        let image_tokens = self.modulated(&norm1, x, [shift, scale])?;
        let norm1_context = b.scope("norm1_context");
        let (of_text, first) = match block.context_pre_only {
            // Here the scale comes first.
            true => {
                let [scale, shift] = self.modulation(&norm1_context)?;
                (None, [shift, scale])
            }
            false => {
                let parts: [Tensor; 6] = self.modulation(&norm1_context)?;
                (Some(parts), [parts[0], parts[1]])
            }
        };
        let text_tokens = self.modulated(&norm1_context.scope("norm"), context, first)?;

        let attn = b.scope("attn");
        let y = self.joint_attention(&attn, image_tokens, text_tokens)?;
        let [_, length, _] = dims(b, "attention", y)?;
        let attended = b.slice_dim(y, 1, self.text, length)?;
        let attended = self.leave(&attn.scope("to_out.0"), attended)?;
        let mut attending = gated(b, x, gate, attended)?;
        if let Some([shift, scale, gate]) = of_second {
            let attn = b.scope("attn2");
            let tokens = self.modulated(&norm1, x, [shift, scale])?;
            let y = self.attend(&attn, self.image_heads(&attn, tokens)?, None)?;
            let y = self.leave(&attn.scope("to_out.0"), y)?;
            attending = gated(b, attending, gate, y)?;
        }
        let x = self.finish(b, attending, of_image, ["norm2", "ff"])?;
        let Some(of_text) = of_text else {
            return Ok((x, None));
        };
        let [_, _, gate, ..] = of_text;
        let attended = b.slice_dim(y, 1, 0, self.text)?;
        let attended = self.leave(&attn.scope("to_add_out"), attended)?;
        let context = gated(b, context, gate, attended)?;
        let context = self.finish(b, context, of_text, ["norm2_context", "ff_context"])?;
        Ok((x, Some(context)))
    }

    /// The parts of the modulation of the image's tokens, and those of the attention to themselves alone.
    fn image_modulation(
        &self,
        b: &Builder,
        block: JointBlock,
    ) -> Result<([Tensor; 6], Option<[Tensor; 3]>)> {
        if !block.use_dual_attention {
            return Ok((self.modulation(b)?, None));
        }
        let [first @ .., shift, scale, gate]: [Tensor; 9] = self.modulation(b)?;
        Ok((first, Some([shift, scale, gate])))
    }

    /// Attention of image and text to both: `[B, text + image, inner_dim]`, the text's tokens first.
    fn joint_attention(&self, b: &Builder, image: Tensor, text: Tensor) -> Result<Tensor> {
        let projections = ["add_q_proj", "add_k_proj", "add_v_proj"];
        let of_text = self.heads(b, text, projections, ["norm_added_q", "norm_added_k"])?;
        let of_image = self.image_heads(b, image)?;
        let [q, k, v] = std::array::from_fn(|i| b.concatenate(&[of_text[i], of_image[i]], 1));
        self.attend(b, [q?, k?, v?], self.rotary.as_ref())
    }

    /// [`Blocks::heads`] by the names of a layer whose tokens are of one kind.
    ///
    /// # Errors
    /// When `x` has another rank.
    pub fn image_heads(&self, b: &Builder, x: Tensor) -> Result<[Tensor; 3]> {
        self.heads(b, x, ["to_q", "to_k", "to_v"], ["norm_q", "norm_k"])
    }

    /// Queries, keys and values of tokens `[B, length, inner_dim]`, each `[B, length, heads, size]`, the first two
    /// normed where the model does.
    fn heads(
        &self,
        b: &Builder,
        x: Tensor,
        projections: [&str; 3],
        norms: [&str; 2],
    ) -> Result<[Tensor; 3]> {
        let [batch, length, _] = dims(b, "attention", x)?;
        let project = |name: &str| {
            let layer = Linear::new(self.inner_dim(), "embed", "heads");
            let y = linear(&b.scope(name), x, layer, self.precision)?;
            let y = constrain_tokens(b, y)?;
            let heads = [self.num_attention_heads, self.attention_head_dim];
            b.reshape(y, &[batch, length, heads[0], heads[1]])
        };
        let norm = |name: &str, x: Tensor| match self.qk_norm {
            true => rms_norm(&b.scope(name), x, EPSILON, self.precision),
            false => Ok(x),
        };
        let [q, k, v] = projections;
        let [norm_q, norm_k] = norms;
        Ok([
            norm(norm_q, project(q)?)?,
            norm(norm_k, project(k)?)?,
            project(v)?,
        ])
    }

    /// Attention of all tokens to all, with positions where they rotate: `[B, length, inner_dim]`.
    ///
    /// # Errors
    /// When the shapes do not fit each other.
    pub fn attend(
        &self,
        b: &Builder,
        [q, k, v]: [Tensor; 3],
        rotary: Option<&RotaryTables>,
    ) -> Result<Tensor> {
        let [batch, length, _, _] = dims(b, "attention", q)?;
        let rotated = |x: Tensor| rotary.map_or(Ok(x), |rotary| rotary.apply(b, x));
        let flat = |x: Tensor| b.reshape(x, &[batch, length, self.inner_dim()]);
        let attributes = Attention {
            heads: self.num_attention_heads,
            causal: false,
        };
        let operands = [flat(rotated(q)?)?, flat(rotated(k)?)?, flat(v)?];
        let y = attention(b, operands, attributes, self.precision)?;
        constrain_tokens(b, y)
    }

    /// The layer of scope `b` after attention.
    fn leave(&self, b: &Builder, y: Tensor) -> Result<Tensor> {
        let layer = Linear::new(self.inner_dim(), "heads", "embed");
        linear(b, y, layer, self.precision)
    }

    /// The second half of a block: the feed-forward layer.
    fn finish(
        &self,
        b: &Builder,
        x: Tensor,
        [_, _, _, shift, scale, gate]: [Tensor; 6],
        [norm, ff]: [&str; 2],
    ) -> Result<Tensor> {
        let y = self.modulated(&b.scope(norm), x, [shift, scale])?;
        let hidden = MLP_RATIO * self.inner_dim();
        let y = feed_forward(&b.scope(ff), y, hidden, self.precision)?;
        gated(b, x, gate, y)
    }

    /// The last norm, whose modulation has the scale first, and the last layer: tokens of `features`.
    ///
    /// # Errors
    /// When the shapes do not fit each other.
    pub fn last(&self, b: &Builder, x: Tensor, features: usize) -> Result<Tensor> {
        let norm_out = b.scope("norm_out");
        let [scale, shift] = self.modulation(&norm_out)?;
        let x = self.modulated(&norm_out.scope("norm"), x, [shift, scale])?;
        outer_linear(b, "proj_out", x, features, self.precision)
    }

    /// The parts of the modulation of scope `b`, each `[B, 1, inner_dim]`.
    ///
    /// # Errors
    /// As for [`linear`].
    pub fn modulation<const N: usize>(&self, b: &Builder) -> Result<[Tensor; N]> {
        modulation(b, self.embedding, self.precision)
    }

    /// The norm of tokens without weights of its own, times `1 + scale`, plus `shift`.
    ///
    /// # Errors
    /// When the shapes do not fit each other.
    pub fn modulated(&self, b: &Builder, x: Tensor, parts: [Tensor; 2]) -> Result<Tensor> {
        modulated(b, x, parts, EPSILON, self.precision)
    }
}
