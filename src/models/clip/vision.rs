//! transformers' `CLIPVisionModelWithProjection`: the encoder of images.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::dtype::DType;
use crate::graph::{Builder, DotDims, Init, Tensor};
use crate::models::{LARGEST_DEPTH, ModelConfigError, check_sizes, take_fixed};
use crate::nn::{Activation, Attention, Linear, Precision, Result, dims, layer_norm, linear};
use crate::shape::Shape;

use super::{EncoderLayer, encoder_layer};

const MODEL: &str = "CLIPVisionModelWithProjection";

/// Most patches in a row of an image.
const LARGEST_GRID: usize = 1024;

/// The run-time input: a batch of images.
pub const PIXEL_VALUES: &str = "pixel_values";

/// Attributes of the image encoder, with the names and defaults of transformers' `CLIPVisionConfig`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct ClipVisionConfig {
    pub hidden_size: usize,
    pub intermediate_size: usize,
    /// Features of `image_embeds`.
    pub projection_dim: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_channels: usize,
    /// Side of the images in pixels.
    pub image_size: usize,
    /// Side of the patches that they are cut into.
    pub patch_size: usize,
    pub hidden_act: Activation,
    pub layer_norm_eps: f64,
}

impl Default for ClipVisionConfig {
    fn default() -> Self {
        ClipVisionConfig {
            hidden_size: 768,
            intermediate_size: 3072,
            projection_dim: 512,
            num_hidden_layers: 12,
            num_attention_heads: 12,
            num_channels: 3,
            image_size: 224,
            patch_size: 32,
            hidden_act: Activation::QuickGelu,
            layer_norm_eps: 1e-5,
        }
    }
}

impl ClipVisionConfig {
    /// Reads and checks a `config.json`.
    ///
    /// # Errors
    /// When it is not JSON of the expected types, is that of another model, or contradicts itself.
    pub fn from_json(text: &str) -> std::result::Result<Self, ModelConfigError> {
        let parse = |source| ModelConfigError::Parse {
            model: MODEL,
            source,
        };
        let mut fields: Map<String, Value> = serde_json::from_str(text).map_err(parse)?;
        fields.retain(|_, value| !value.is_null());
        take_fixed(MODEL, &mut fields, "architectures", &[json!([MODEL])])?;
        take_fixed(
            MODEL,
            &mut fields,
            "model_type",
            &[json!("clip_vision_model")],
        )?;
        for field in ["attention_dropout", "dropout"] {
            take_fixed(MODEL, &mut fields, field, &[json!(0.0), json!(0)])?;
        }
        let config = Self::deserialize(Value::Object(fields)).map_err(parse)?;
        config.check()?;
        Ok(config)
    }

    /// Checks that the fields fit each other.
    ///
    /// # Errors
    /// The first contradiction, with the numbers.
    pub fn check(&self) -> std::result::Result<(), ModelConfigError> {
        let inconsistent = |message| {
            Err(ModelConfigError::Inconsistent {
                model: MODEL,
                message,
            })
        };
        check_sizes(
            MODEL,
            [
                ("hidden_size", self.hidden_size),
                ("intermediate_size", self.intermediate_size),
                ("projection_dim", self.projection_dim),
                ("num_channels", self.num_channels),
                ("image_size", self.image_size),
                ("patch_size", self.patch_size),
            ],
        )?;
        if self.num_attention_heads == 0
            || !self.hidden_size.is_multiple_of(self.num_attention_heads)
        {
            return inconsistent(format!(
                "num_attention_heads = {} does not divide hidden_size = {}",
                self.num_attention_heads, self.hidden_size
            ));
        }
        if !self.image_size.is_multiple_of(self.patch_size)
            || self.image_size / self.patch_size > LARGEST_GRID
        {
            return inconsistent(format!(
                "patch_size = {} does not divide image_size = {}, or into more than {LARGEST_GRID} patches in a row",
                self.patch_size, self.image_size
            ));
        }
        if !(1..=LARGEST_DEPTH).contains(&self.num_hidden_layers) {
            return inconsistent(format!(
                "num_hidden_layers = {}; expected 1 to {LARGEST_DEPTH}",
                self.num_hidden_layers
            ));
        }
        Ok(())
    }

    fn layer(&self) -> EncoderLayer {
        EncoderLayer {
            features: self.hidden_size,
            inner: self.intermediate_size,
            attention: Attention {
                heads: self.num_attention_heads,
                causal: false,
            },
            activation: self.hidden_act,
            epsilon: self.layer_norm_eps,
            depth: self.num_hidden_layers,
            initializer_factor: 1.0,
        }
    }
}

/// The part of the encoder that is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VisionOutput {
    /// `image_embeds` `[B, projection_dim]`: the projected state of the class token.
    Embeds,
    /// `hidden_states[-2]` `[B, 1 + patches, hidden_size]`: what the last but one layer gives, with no norm after it.
    Penultimate,
}

/// Encodes images `[B, num_channels, image_size, image_size]`, normalized as CLIP's processor does. Weights are
/// declared under `root/` with transformers' keys; those that `output` does not depend on are not.
///
/// # Errors
/// When the configuration contradicts itself, or the images have another size.
pub fn clip_vision(
    b: &Builder,
    root: &str,
    config: &ClipVisionConfig,
    pixel_values: Tensor,
    output: VisionOutput,
    precision: Precision,
) -> Result<Tensor> {
    let root = b.root(root);
    config.check().map_err(|e| root.invalid(e.to_string()))?;
    let b = root.scope("vision_model");
    let x = embeddings(&b.scope("embeddings"), config, pixel_values, precision)?;
    let norm =
        |name: &str, x: Tensor| layer_norm(&b.scope(name), x, config.layer_norm_eps, precision);
    // The checkpoints' spelling.
    let mut x = norm("pre_layrnorm", x)?;
    let layers = match output {
        VisionOutput::Embeds => config.num_hidden_layers,
        VisionOutput::Penultimate => config.num_hidden_layers - 1,
    };
    for layer in 0..layers {
        let b = b.scope("encoder").scope("layers").scope(layer);
        x = encoder_layer(&b, &config.layer(), x, precision)?;
    }
    match output {
        VisionOutput::Penultimate => Ok(x),
        VisionOutput::Embeds => {
            let [batch, _, features] = dims(&b, "hidden state", x)?;
            let class = b.reshape(b.slice_dim(x, 1, 0, 1)?, &[batch, features])?;
            let pooled = norm("post_layernorm", class)?;
            let layer = Linear::replicated(config.projection_dim).without_bias();
            linear(&root.scope("visual_projection"), pooled, layer, precision)
        }
    }
}

/// The class token and the patches, each with the embedding of its position: `[B, 1 + patches, hidden_size]`.
fn embeddings(
    b: &Builder,
    config: &ClipVisionConfig,
    pixel_values: Tensor,
    precision: Precision,
) -> Result<Tensor> {
    let [batch, channels, height, width] = dims(b, PIXEL_VALUES, pixel_values)?;
    let (side, patch, features) = (config.image_size, config.patch_size, config.hidden_size);
    if [channels, height, width] != [config.num_channels, side, side] {
        return Err(b.invalid(format!(
            "pixel_values {}; expected [{batch}, {}, {side}, {side}]",
            b.shape(pixel_values),
            config.num_channels
        )));
    }
    let grid = side / patch;
    let init = Init::Normal { std: 0.02 };
    let param = |b: &Builder, name: &str, sizes: &[usize]| {
        let axes = vec![None; sizes.len()];
        let x = b.param(name, Shape::new(precision.weights, sizes), init, &axes)?;
        b.convert(x, precision.activations)
    };
    // A convolution whose stride is its kernel: each patch is seen once.
    let x = b.convert(pixel_values, precision.activations)?;
    let x = b.reshape(x, &[batch, channels, grid, patch, grid, patch])?;
    let x = b.transpose(x, &[0, 2, 4, 1, 3, 5])?;
    let x = b.reshape(x, &[batch, grid * grid, channels * patch * patch])?;
    let own = b.scope("patch_embedding");
    let weight = param(&own, "weight", &[features, channels, patch, patch])?;
    let weight = own.reshape(weight, &[features, channels * patch * patch])?;
    let contract = DotDims {
        lhs_contract: vec![2],
        rhs_contract: vec![1],
        ..DotDims::default()
    };
    let patches = own.dot_general(x, weight, contract, DType::F32)?;
    let patches = b.convert(patches, precision.activations)?;

    let class = param(b, "class_embedding", &[features])?;
    let class = b.broadcast_in_dim(class, &[2], &[batch, 1, features])?;
    let x = b.concatenate(&[class, patches], 1)?;
    let positions = b.scope("position_embedding");
    let positions = param(&positions, "weight", &[1 + grid * grid, features])?;
    let positions = b.broadcast_in_dim(positions, &[1, 2], &[batch, 1 + grid * grid, features])?;
    b.add(x, positions)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters(config: &ClipVisionConfig, output: VisionOutput) -> usize {
        let b = Builder::new();
        let side = config.image_size;
        let pixels = b.input(
            PIXEL_VALUES,
            Shape::new(DType::F32, [2, 3, side, side]),
            &[],
        );
        let y = clip_vision(
            &b,
            "image_encoder",
            config,
            pixels.unwrap(),
            output,
            Precision::F32,
        );
        let expected = match output {
            VisionOutput::Embeds => vec![2, config.projection_dim],
            VisionOutput::Penultimate => vec![2, 257, config.hidden_size],
        };
        assert_eq!(b.dims(y.unwrap()), expected);
        b.finish().parameter_count()
    }

    /// The image encoders of IP-Adapters for SD 1.5 and SDXL.
    #[test]
    fn vit_h_and_big_g_have_their_parameters() {
        let h = ClipVisionConfig::from_json(
            r#"{"architectures": ["CLIPVisionModelWithProjection"], "attention_dropout": 0.0, "dropout": 0.0,
                "hidden_act": "gelu", "hidden_size": 1280, "image_size": 224, "initializer_factor": 1.0,
                "intermediate_size": 5120, "layer_norm_eps": 1e-05, "model_type": "clip_vision_model",
                "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 32, "patch_size": 14,
                "projection_dim": 1024, "torch_dtype": "float16", "transformers_version": "4.28.0.dev0"}"#,
        )
        .unwrap();
        assert_eq!(parameters(&h, VisionOutput::Embeds), VIT_H);
        // Without the last layer, the last norm and the projection.
        let (norm, projection) = (2 * 1280, 1280 * 1024);
        let layer = 12 * 1280 * 1280 + 13 * 1280;
        let less = VIT_H - norm - projection - layer;
        assert_eq!(parameters(&h, VisionOutput::Penultimate), less);
        let big_g = ClipVisionConfig {
            hidden_size: 1664,
            intermediate_size: 8192,
            num_hidden_layers: 48,
            projection_dim: 1280,
            ..h
        };
        assert_eq!(parameters(&big_g, VisionOutput::Embeds), BIG_G);
    }

    const VIT_H: usize = 632_076_800;
    const BIG_G: usize = 1_844_907_264;

    #[test]
    fn refuses_other_models_and_sizes_that_do_not_fit() {
        let error = |text: &str| ClipVisionConfig::from_json(text).unwrap_err().to_string();
        let found = error(r#"{"architectures": ["CLIPTextModel"]}"#);
        assert!(found.contains("architectures"), "{found}");
        let found = error(r#"{"patch_size": 15}"#);
        assert!(
            found.contains("patch_size = 15 does not divide image_size = 224"),
            "{found}"
        );
        let found = error(r#"{"num_hidden_layers": 0}"#);
        assert!(found.contains("num_hidden_layers = 0"), "{found}");
    }
}
