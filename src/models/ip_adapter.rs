//! IP-Adapters (Ye et al. 2023): an image as a part of the prompt, in the layout of their original files.
//!
//! An image encoder and a projection make tokens of the image. Each cross-attention of the UNet attends to them with
//! keys and values of their own, and adds the result to that of the text.

use crate::graph::{Builder, Init, Tensor};
use crate::models::clip::vision::{ClipVisionConfig, VisionOutput, clip_vision};
use crate::nn::{
    Activation, Attention, Linear, Precision, Result, attention, dims, layer_norm, linear,
};
use crate::shape::Shape;

use super::ModelConfigError;

/// The roots of the parameter paths: of the adapter's file, and of its image encoder.
pub const ROOT: &str = "ip_adapter";
pub const IMAGE_ENCODER: &str = "image_encoder";

const MODEL: &str = "IP-Adapter";
/// Epsilon of PyTorch's layer norms.
const EPSILON: f64 = 1e-5;
/// Features of an attention head of a resampler, which its files do not say.
const HEAD: usize = 64;
/// Most layers of a resampler.
const MOST_LAYERS: usize = 100;

/// An adapter, as its tensors and the configuration of its image encoder describe it.
#[derive(Clone, Debug, PartialEq)]
pub struct IpAdapterConfig {
    pub vision: ClipVisionConfig,
    pub projection: Projection,
    /// Tokens of an image.
    pub tokens: usize,
    /// Features of a token: the UNet's `cross_attention_dim`.
    pub features: usize,
}

/// From the encoded image to tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Projection {
    /// A linear layer and a norm of the image's embedding.
    Linear,
    /// IP-Adapter Plus: attention of learned queries to the last but one hidden states of the image encoder.
    Resampler {
        features: usize,
        layers: usize,
        heads: usize,
        /// Features between the two feed-forward layers.
        inner: usize,
    },
}

impl IpAdapterConfig {
    /// Reads the adapter off its tensors' sizes, of which `tensor` gives that of a name. `features` are those of the
    /// UNet's text.
    ///
    /// # Errors
    /// Names the tensor that is missing or does not fit the image encoder or the UNet, and other kinds of adapters.
    pub fn new(
        vision: ClipVisionConfig,
        features: usize,
        tensor: &dyn Fn(&str) -> Option<Vec<usize>>,
    ) -> std::result::Result<IpAdapterConfig, ModelConfigError> {
        fn fail<T>(message: String) -> std::result::Result<T, ModelConfigError> {
            Err(ModelConfigError::Inconsistent {
                model: MODEL,
                message,
            })
        }
        for (sign, kind) in [
            ("image_proj.proj.0.weight", "IP-Adapter Full or Face ID"),
            (
                "image_proj.perceiver_resampler.proj_in.weight",
                "IP-Adapter Face ID Plus",
            ),
            ("ip_adapter.0.to_q_lora.down.weight", "IP-Adapter Face ID"),
        ] {
            if tensor(sign).is_some() {
                return fail(format!(
                    "{sign}: {kind} is not here; those of Stable Diffusion 1.5 and SDXL, and Plus, are"
                ));
            }
        }
        let check = |name: &str, expected: &[usize], of: &str| match tensor(name) {
            Some(found) if found == expected => Ok(()),
            found => fail(format!(
                "{name}: expected {expected:?}, {of}; found {}",
                found.map_or("no such tensor".to_owned(), |found| format!("{found:?}"))
            )),
        };
        if let Some(found) = tensor("image_proj.proj.weight") {
            let of = "the UNet's cross_attention_dim: an adapter of the same family";
            check("image_proj.norm.weight", &[features], of)?;
            let rows = found.first().copied().unwrap_or_default();
            let tokens = (rows / features.max(1)).max(1);
            let of = "all tokens' features, of the image encoder's projection_dim";
            let expected = [tokens * features, vision.projection_dim];
            check("image_proj.proj.weight", &expected, of)?;
            return Ok(IpAdapterConfig {
                vision,
                projection: Projection::Linear,
                tokens,
                features,
            });
        }
        let Some(&[1, tokens, own]) = tensor("image_proj.latents").as_deref() else {
            return fail(
                "there is neither image_proj.proj.weight nor image_proj.latents [1, tokens, features]".to_owned(),
            );
        };
        let rows = |name: &str| tensor(name).and_then(|sizes| sizes.first().copied());
        let layer = |at: usize, name: &str| format!("image_proj.layers.{at}.{name}");
        let all = (0..MOST_LAYERS).take_while(|at| rows(&layer(*at, "0.to_q.weight")).is_some());
        let layers = all.count();
        let heads = rows(&layer(0, "0.to_q.weight")).unwrap_or_default() / HEAD;
        let inner = rows(&layer(0, "1.1.weight")).unwrap_or_default();
        if layers == 0 || heads == 0 || inner == 0 {
            return fail(format!(
                "expected image_proj.layers.0.0.to_q.weight with {HEAD} rows for each head, and image_proj.layers.0.1.1.weight"
            ));
        }
        let of = "features of the resampler, of the image encoder's hidden_size";
        check("image_proj.proj_in.weight", &[own, vision.hidden_size], of)?;
        let of = "the UNet's cross_attention_dim, of the resampler's features";
        check("image_proj.proj_out.weight", &[features, own], of)?;
        Ok(IpAdapterConfig {
            vision,
            projection: Projection::Resampler {
                features: own,
                layers,
                heads,
                inner,
            },
            tokens,
            features,
        })
    }
}

/// The tokens of no image and of the image `pixel_values` `[1, 3, side, side]`: `[2, tokens, features]`. As in
/// diffusers, no image is a zero embedding, and for a resampler the hidden states of grey.
///
/// # Errors
/// When the image has another size.
pub fn image_tokens(
    b: &Builder,
    config: &IpAdapterConfig,
    pixel_values: Tensor,
    precision: Precision,
) -> Result<Tensor> {
    let IpAdapterConfig {
        vision,
        projection,
        tokens,
        features,
    } = config;
    let with_none = |x: Tensor| {
        let none = b.full(&b.shape(x), 0.0)?;
        b.concatenate(&[none, x], 0)
    };
    let own = b.root(ROOT).scope("image_proj");
    match *projection {
        Projection::Linear => {
            let output = VisionOutput::Embeds;
            let embeds = clip_vision(b, IMAGE_ENCODER, vision, pixel_values, output, precision)?;
            let layer = Linear::replicated(tokens * features);
            let x = linear(&own.scope("proj"), with_none(embeds)?, layer, precision)?;
            let x = b.reshape(x, &[2, *tokens, *features])?;
            layer_norm(&own.scope("norm"), x, EPSILON, precision)
        }
        Projection::Resampler {
            features: width,
            layers,
            heads,
            inner,
        } => {
            let output = VisionOutput::Penultimate;
            let images = with_none(pixel_values)?;
            let states = clip_vision(b, IMAGE_ENCODER, vision, images, output, precision)?;
            let layer = Linear::replicated(width);
            let x = linear(&own.scope("proj_in"), states, layer, precision)?;
            let shape = Shape::new(precision.weights, [1, *tokens, width]);
            let init = Init::Normal { std: 0.02 };
            let latents = own.param("latents", shape, init, &[None; 3])?;
            let latents = b.convert(latents, precision.activations)?;
            let latents = b.reshape(latents, &[*tokens, width])?;
            let mut latents = b.broadcast_in_dim(latents, &[1, 2], &[2, *tokens, width])?;
            for at in 0..layers {
                let own = own.scope("layers").scope(at);
                latents = resample(&own, [x, latents], [heads, inner], precision)?;
            }
            let layer = Linear::replicated(*features);
            let y = linear(&own.scope("proj_out"), latents, layer, precision)?;
            layer_norm(&own.scope("norm_out"), y, EPSILON, precision)
        }
    }
}

/// One layer of the resampler (Alayrac et al. 2022): the latents attend to the image and to themselves.
fn resample(
    b: &Builder,
    [x, latents]: [Tensor; 2],
    [heads, inner]: [usize; 2],
    precision: Precision,
) -> Result<Tensor> {
    let [_, _, width] = dims(b, "latents", latents)?;
    let norm = |b: &Builder, x: Tensor| layer_norm(b, x, EPSILON, precision);
    let plain = |b: &Builder, x: Tensor, features: usize| {
        linear(b, x, Linear::replicated(features).without_bias(), precision)
    };
    let own = b.scope(0);
    let x = norm(&own.scope("norm1"), x)?;
    let normed = norm(&own.scope("norm2"), latents)?;
    let q = plain(&own.scope("to_q"), normed, heads * HEAD)?;
    let context = b.concatenate(&[x, normed], 1)?;
    let kv = plain(&own.scope("to_kv"), context, 2 * heads * HEAD)?;
    let kv = b.split(kv, 2, 2)?;
    let attributes = Attention {
        heads,
        causal: false,
    };
    let y = attention(&own, [q, kv[0], kv[1]], attributes, precision)?;
    let y = plain(&own.scope("to_out"), y, width)?;
    let latents = b.add(y, latents)?;

    let own = b.scope(1);
    let y = norm(&own.scope(0), latents)?;
    let y = plain(&own.scope(1), y, inner)?;
    let y = Activation::Gelu.apply(&own, y)?;
    let y = plain(&own.scope(3), y, width)?;
    b.add(y, latents)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The image encoder of adapters for Stable Diffusion 1.5.
    fn vit_h() -> ClipVisionConfig {
        ClipVisionConfig {
            hidden_size: 1280,
            projection_dim: 1024,
            ..ClipVisionConfig::default()
        }
    }

    fn read(
        features: usize,
        tensors: &[(&str, &[usize])],
    ) -> std::result::Result<IpAdapterConfig, String> {
        let sizes = |name: &str| {
            let found = tensors.iter().find(|(own, _)| *own == name);
            found.map(|(_, sizes)| sizes.to_vec())
        };
        IpAdapterConfig::new(vit_h(), features, &sizes).map_err(|error| error.to_string())
    }

    /// The tensors of ip-adapter_sd15 and ip-adapter-plus_sd15.
    #[test]
    fn adapters_are_read_off_their_tensors() {
        let plain: [(&str, &[usize]); 2] = [
            ("image_proj.proj.weight", &[3072, 1024]),
            ("image_proj.norm.weight", &[768]),
        ];
        let found = read(768, &plain).unwrap();
        assert_eq!((found.projection, found.tokens), (Projection::Linear, 4));
        let plus: [(&str, &[usize]); 7] = [
            ("image_proj.latents", &[1, 16, 768]),
            ("image_proj.proj_in.weight", &[768, 1280]),
            ("image_proj.proj_out.weight", &[768, 768]),
            ("image_proj.layers.0.0.to_q.weight", &[768, 768]),
            ("image_proj.layers.0.1.1.weight", &[3072, 768]),
            ("image_proj.layers.1.0.to_q.weight", &[768, 768]),
            ("image_proj.layers.1.1.1.weight", &[3072, 768]),
        ];
        let found = read(768, &plus).unwrap();
        let resampler = Projection::Resampler {
            features: 768,
            layers: 2,
            heads: 12,
            inner: 3072,
        };
        assert_eq!((found.projection, found.tokens), (resampler, 16));

        let error = read(2048, &plain).unwrap_err();
        assert!(
            error.contains("image_proj.norm.weight: expected [2048]"),
            "{error}"
        );
        let error = read(2048, &plus).unwrap_err();
        assert!(
            error.contains("image_proj.proj_out.weight: expected [2048, 768]"),
            "{error}"
        );
        // That of bigG.
        let other: [(&str, &[usize]); 2] = [
            ("image_proj.proj.weight", &[3072, 1280]),
            ("image_proj.norm.weight", &[768]),
        ];
        let error = read(768, &other).unwrap_err();
        assert!(error.contains("expected [3072, 1024]"), "{error}");
        assert!(error.contains("found [3072, 1280]"), "{error}");
        let error = read(768, &[("image_proj.proj.0.weight", &[512, 512])]).unwrap_err();
        assert!(error.contains("Face ID is not here"), "{error}");
        let error = read(768, &[]).unwrap_err();
        assert!(
            error.contains("neither image_proj.proj.weight nor"),
            "{error}"
        );
    }
}
