//! BLIP's encoder of a picture with a text (Li et al., 2022, arXiv:2201.12086), with the names of its own code: a vision
//! transformer, and a BERT each of whose layers also attends to the picture's patches.

use crate::dtype::DType;
use crate::graph::{Builder, GraphError, Init, Tensor};
use crate::nn::{
    Attention, Linear, Precision, attention, dims, embedding, gelu, layer_norm, linear,
    masked_attention, patch_embedding,
};
use crate::shape::Shape;
use crate::weights::Checkpoint;

use super::super::EvaluateError;

/// In the norms of the vision transformer and of BERT.
const VISION_EPSILON: f64 = 1e-6;
const TEXT_EPSILON: f64 = 1e-12;
/// Features of an attention head in every BLIP.
const HEAD: usize = 64;
/// Initial weights, which are never drawn.
const INIT: Init = Init::Zeros;

/// Sizes of one of the two encoders.
#[derive(Clone, Debug, PartialEq)]
struct Encoder {
    features: usize,
    /// Features between the two feed-forward layers.
    inner: usize,
    layers: usize,
}

/// Sizes of both, as the weights of a file have them.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Blip {
    vision: Encoder,
    text: Encoder,
    /// Side of a patch, and patches in a row of a picture.
    patch: usize,
    grid: usize,
    vocabulary: usize,
    positions: usize,
}

const VISION: &str = "visual_encoder";
const TEXT: &str = "text_encoder";

impl Blip {
    /// Reads the sizes from the weights below `root.`.
    ///
    /// # Errors
    /// Names a weight that is missing, or of a shape that no BLIP has.
    pub fn of(checkpoint: &Checkpoint, root: &str) -> Result<Blip, EvaluateError> {
        let weights = Weights { checkpoint, root };
        let [features, channels, patch, _] =
            weights.dims(&format!("{VISION}.patch_embed.proj.weight"))?;
        let [_, places, _] = weights.dims(&format!("{VISION}.pos_embed"))?;
        let grid = places.saturating_sub(1).isqrt();
        if channels != 3 || patch == 0 || grid == 0 || 1 + grid * grid != places {
            return Err(weights.unexpected(format!(
                "{channels} channels in patches of side {patch}, {places} positions; expected 3 channels, and positions of \
                 a class and of a square of patches"
            )));
        }
        let [vocabulary, of_text] =
            weights.dims(&format!("{TEXT}.embeddings.word_embeddings.weight"))?;
        let [positions, _] =
            weights.dims(&format!("{TEXT}.embeddings.position_embeddings.weight"))?;
        Ok(Blip {
            vision: weights.encoder(features, &format!("{VISION}.blocks"), "mlp.fc1")?,
            text: weights.encoder(
                of_text,
                &format!("{TEXT}.encoder.layer"),
                "intermediate.dense",
            )?,
            patch,
            grid,
            vocabulary,
            positions,
        })
    }

    /// Side of the pictures that it takes.
    pub fn side(&self) -> usize {
        self.patch * self.grid
    }

    /// Rows of the embedding of tokens.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// The last state of the text's first token, `[batch, features]`, for `pixels` `[batch, 3, side, side]`, token `ids`
    /// `[batch, length]`, and a `mask` of their shape that is 0 for padding.
    ///
    /// # Errors
    /// When the inputs have other shapes.
    pub fn encode(
        &self,
        b: &Builder,
        pixels: Tensor,
        ids: Tensor,
        mask: Tensor,
    ) -> Result<Tensor, GraphError> {
        let patches = self.patches(&b.scope(VISION), pixels)?;
        let text = b.scope(TEXT);
        let mut x = self.words(&text.scope("embeddings"), ids)?;
        for layer in 0..self.text.layers {
            let b = text.scope("encoder").scope("layer").scope(layer);
            x = self.text_layer(&b, x, mask, patches)?;
        }
        let [batch, _, features] = dims(b, "hidden state", x)?;
        b.reshape(b.slice_dim(x, 1, 0, 1)?, &[batch, features])
    }

    /// The states of the class token and of the patches: `[batch, 1 + grid^2, features]`.
    fn patches(&self, b: &Builder, pixels: Tensor) -> Result<Tensor, GraphError> {
        let Encoder {
            features,
            inner,
            layers,
        } = self.vision;
        let own = b.scope("patch_embed");
        let patches = patch_embedding(&own, pixels, self.patch, features, Precision::F32)?;
        let [batch, count, _] = dims(b, "patches", patches)?;
        let class = param(b, "cls_token", &[1, 1, features])?;
        let class = b.reshape(class, &[features])?;
        let class = b.broadcast_in_dim(class, &[2], &[batch, 1, features])?;
        let x = b.concatenate(&[class, patches], 1)?;
        let places = param(b, "pos_embed", &[1, 1 + count, features])?;
        let places = b.reshape(places, &[1 + count, features])?;
        let places = b.broadcast_in_dim(places, &[1, 2], &[batch, 1 + count, features])?;
        let mut x = b.add(x, places)?;
        let norm = |b: &Builder, x: Tensor| layer_norm(b, x, VISION_EPSILON, Precision::F32);
        let attributes = Attention {
            heads: features / HEAD,
            causal: false,
        };
        for layer in 0..layers {
            let b = b.scope("blocks").scope(layer);
            let own = b.scope("attn");
            let y = norm(&b.scope("norm1"), x)?;
            let qkv = dense(&own.scope("qkv"), y, 3 * features)?;
            let part = |at: usize| b.slice_dim(qkv, 2, at * features, (at + 1) * features);
            let qkv = [part(0)?, part(1)?, part(2)?];
            let y = attention(&own, qkv, attributes, Precision::F32)?;
            x = b.add(x, dense(&own.scope("proj"), y, features)?)?;
            let mlp = b.scope("mlp");
            let y = norm(&b.scope("norm2"), x)?;
            let y = gelu(&mlp, dense(&mlp.scope("fc1"), y, inner)?)?;
            x = b.add(x, dense(&mlp.scope("fc2"), y, features)?)?;
        }
        norm(&b.scope("norm"), x)
    }

    /// The embeddings of tokens and of their positions, normalized.
    fn words(&self, b: &Builder, ids: Tensor) -> Result<Tensor, GraphError> {
        let [_, length] = dims(b, "token ids", ids)?;
        let features = self.text.features;
        let own = b.scope("word_embeddings");
        let words = embedding(&own, ids, self.vocabulary, features, INIT, Precision::F32)?;
        let own = b.scope("position_embeddings");
        let places = param(&own, "weight", &[self.positions, features])?;
        let places = b.slice_dim(places, 0, 0, length)?;
        let places = b.broadcast_in_dim(places, &[1, 2], &b.dims(words))?;
        let x = b.add(words, places)?;
        layer_norm(&b.scope("LayerNorm"), x, TEXT_EPSILON, Precision::F32)
    }

    /// Attention to the text, attention to the patches, and feed-forward layers, each added to what it is of and then
    /// normalized.
    fn text_layer(
        &self,
        b: &Builder,
        x: Tensor,
        mask: Tensor,
        patches: Tensor,
    ) -> Result<Tensor, GraphError> {
        let Encoder {
            features, inner, ..
        } = self.text;
        let added = |b: &Builder, y: Tensor, x: Tensor| {
            let y = dense(&b.scope("dense"), y, features)?;
            let y = b.add(y, x)?;
            layer_norm(&b.scope("LayerNorm"), y, TEXT_EPSILON, Precision::F32)
        };
        let heads = features / HEAD;
        let qkv = |b: &Builder, x: Tensor, of: Tensor| {
            let own = b.scope("self");
            Ok::<_, GraphError>([
                dense(&own.scope("query"), x, features)?,
                dense(&own.scope("key"), of, features)?,
                dense(&own.scope("value"), of, features)?,
            ])
        };
        let own = b.scope("attention");
        let y = masked_attention(&own, qkv(&own, x, x)?, mask, heads, Precision::F32)?;
        let x = added(&own.scope("output"), y, x)?;

        let own = b.scope("crossattention");
        let attributes = Attention {
            heads,
            causal: false,
        };
        let y = attention(&own, qkv(&own, x, patches)?, attributes, Precision::F32)?;
        let x = added(&own.scope("output"), y, x)?;

        let own = b.scope("intermediate");
        let y = gelu(&own, dense(&own.scope("dense"), x, inner)?)?;
        added(&b.scope("output"), y, x)
    }
}

/// A linear layer with a bias.
pub(super) fn dense(b: &Builder, x: Tensor, features: usize) -> Result<Tensor, GraphError> {
    linear(b, x, Linear::replicated(features), Precision::F32)
}

fn param(b: &Builder, name: &str, sizes: &[usize]) -> Result<Tensor, GraphError> {
    let axes = vec![None; sizes.len()];
    b.param(name, Shape::new(DType::F32, sizes), INIT, &axes)
}

/// The weights of a file whose names begin with `root.`.
struct Weights<'a> {
    checkpoint: &'a Checkpoint,
    root: &'a str,
}

impl Weights<'_> {
    /// The sizes of a weight of rank `N`.
    fn dims<const N: usize>(&self, name: &str) -> Result<[usize; N], EvaluateError> {
        let shape = self.checkpoint.info(&format!("{}.{name}", self.root));
        let dims = shape.map(|shape| shape.dims.as_slice());
        dims.and_then(|dims| dims.try_into().ok()).ok_or_else(|| {
            let found = dims.map_or_else(
                || "no such weight".to_owned(),
                |dims| format!("a weight of {dims:?}"),
            );
            self.unexpected(format!("{name} of rank {N} is expected; found {found}"))
        })
    }

    /// The sizes of an encoder whose layers are below `layers`; the first linear layer behind attention is `inner`.
    fn encoder(
        &self,
        features: usize,
        layers: &str,
        inner: &str,
    ) -> Result<Encoder, EvaluateError> {
        let weight = |layer: usize| format!("{layers}.{layer}.{inner}.weight");
        let [of_first, _] = self.dims(&weight(0))?;
        if features == 0 || !features.is_multiple_of(HEAD) {
            return Err(self.unexpected(format!(
                "{layers} has {features} features; expected a multiple of {HEAD}, those of an attention head"
            )));
        }
        let has = |layer: &usize| {
            let name = format!("{}.{}", self.root, weight(*layer));
            self.checkpoint.info(&name).is_some()
        };
        Ok(Encoder {
            features,
            inner: of_first,
            layers: (0..).take_while(has).count(),
        })
    }

    fn unexpected(&self, reason: String) -> EvaluateError {
        EvaluateError::Network {
            path: self.checkpoint.path().to_owned(),
            reason: format!(
                "the weights are not those of BLIP below {}: {reason}",
                self.root
            ),
        }
    }
}
