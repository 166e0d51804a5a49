//! The transformer's configuration: the `config.json` of a diffusers checkpoint.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::models::{
    ModelConfigError, check_class, check_depth, check_sizes, parse_error, take_fixed,
};

pub const MODEL: &str = "PixArtTransformer2DModel";

/// The class that published checkpoints name: diffusers gave the architecture a class of its own later.
pub const OLD_CLASS: &str = "Transformer2DModel";

/// Rows and columns of latents in a token.
pub const PATCH: usize = 2;

/// Latents of a side at 1024 x 1024 pixels, for which diffusers' default is to take the size.
const SIDE_OF_1024: usize = 128;

/// Attributes of the transformer, with the names and defaults of diffusers' `PixArtTransformer2DModel`.
///
/// [`PixArtTransformer2DConfig::from_map`] refuses by name every field that is unknown, and every known one whose value
/// asks for an architecture that is not built here. Fields that start with `_` (diffusers' own notes) are ignored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PixArtTransformer2DConfig {
    pub num_attention_heads: usize,
    pub attention_head_dim: usize,
    pub in_channels: usize,
    /// Channels of the result: those of the sample, or twice as many, of which the second half is a variance that no
    /// sampler here reads.
    pub out_channels: usize,
    pub num_layers: usize,
    /// Features that attention to the text reads: those of the image's tokens.
    pub cross_attention_dim: usize,
    /// Side of the latents that positions are relative to.
    pub sample_size: usize,
    /// What positions are divided by. Where it is not set, it is `sample_size / 64`, and at least 1.
    pub interpolation_scale: Option<f64>,
    /// Whether the image's height, width and their quotient are inputs. Where it is not set, a `sample_size` of 128 has
    /// them.
    pub use_additional_conditions: Option<bool>,
    /// Features of the text's tokens.
    pub caption_channels: usize,
}

impl Default for PixArtTransformer2DConfig {
    fn default() -> Self {
        PixArtTransformer2DConfig {
            num_attention_heads: 16,
            attention_head_dim: 72,
            in_channels: 4,
            out_channels: 8,
            num_layers: 28,
            cross_attention_dim: 1152,
            sample_size: SIDE_OF_1024,
            interpolation_scale: None,
            use_additional_conditions: None,
            caption_channels: 4096,
        }
    }
}

impl PixArtTransformer2DConfig {
    /// Reads and checks a `config.json`.
    ///
    /// # Errors
    /// When it is not JSON of the expected types, asks for something that is not built here, or contradicts itself.
    pub fn from_json(text: &str) -> Result<Self, ModelConfigError> {
        Self::from_map(serde_json::from_str(text).map_err(parse_error(MODEL))?)
    }

    /// Reads and checks the fields of a `config.json`.
    ///
    /// # Errors
    /// As for [`PixArtTransformer2DConfig::from_json`].
    pub fn from_map(mut fields: Map<String, Value>) -> Result<Self, ModelConfigError> {
        if fields.get("_class_name") == Some(&json!(OLD_CLASS)) {
            fields.remove("_class_name");
        }
        check_class(MODEL, &fields)?;
        fields.retain(|name, value| !name.starts_with('_') && !value.is_null());
        fields.remove("quantization_config");
        // Neither is read: there is no dropout where nothing is trained, and no group norm.
        fields.remove("dropout");
        fields.remove("norm_num_groups");
        for (field, only) in [
            ("activation_fn", json!("gelu-approximate")),
            ("attention_bias", json!(true)),
            ("attention_type", json!("default")),
            ("double_self_attention", json!(false)),
            ("norm_elementwise_affine", json!(false)),
            ("norm_eps", json!(1e-6)),
            ("norm_type", json!("ada_norm_single")),
            ("num_embeds_ada_norm", json!(1000)),
            ("only_cross_attention", json!(false)),
            ("patch_size", json!(PATCH)),
            ("upcast_attention", json!(false)),
            ("use_linear_projection", json!(false)),
        ] {
            take_fixed(MODEL, &mut fields, field, &[only])?;
        }
        let config = Self::deserialize(Value::Object(fields)).map_err(parse_error(MODEL))?;
        config.check()?;
        Ok(config)
    }

    /// Features of the tokens between the blocks.
    pub fn inner_dim(&self) -> usize {
        self.num_attention_heads * self.attention_head_dim
    }

    /// Whether the image's size is an input.
    pub fn takes_size(&self) -> bool {
        let at_1024 = self.sample_size == SIDE_OF_1024;
        self.use_additional_conditions.unwrap_or(at_1024)
    }

    /// What positions are divided by.
    pub fn interpolation_scale(&self) -> f64 {
        let own = (self.sample_size / 64).max(1) as f64;
        self.interpolation_scale.unwrap_or(own)
    }

    /// Checks that the fields fit each other.
    ///
    /// # Errors
    /// The first contradiction, with the numbers.
    pub fn check(&self) -> Result<(), ModelConfigError> {
        let inconsistent = |message: String| {
            Err(ModelConfigError::Inconsistent {
                model: MODEL,
                message,
            })
        };
        check_sizes(
            MODEL,
            [
                ("num_attention_heads", self.num_attention_heads),
                ("attention_head_dim", self.attention_head_dim),
                ("in_channels", self.in_channels),
                ("out_channels", self.out_channels),
                ("num_layers", self.num_layers),
                ("caption_channels", self.caption_channels),
                ("sample_size", self.sample_size),
            ],
        )?;
        let inner = self.inner_dim();
        check_sizes(MODEL, [("num_attention_heads * attention_head_dim", inner)])?;
        if self.cross_attention_dim != inner {
            return inconsistent(format!(
                "cross_attention_dim = {}; expected num_attention_heads * attention_head_dim = {inner}",
                self.cross_attention_dim
            ));
        }
        let channels = self.in_channels;
        if ![channels, 2 * channels].contains(&self.out_channels) {
            return inconsistent(format!(
                "out_channels = {}; expected in_channels = {channels}, or twice as many",
                self.out_channels
            ));
        }
        // The features of a place are sines and cosines of row and column, those of the size three equal parts.
        let parts = if self.takes_size() { 12 } else { 4 };
        if !inner.is_multiple_of(parts) {
            return inconsistent(format!(
                "num_attention_heads * attention_head_dim = {inner}; expected a multiple of {parts}"
            ));
        }
        let scale = self.interpolation_scale();
        if !(scale.is_finite() && scale > 0.0) || self.sample_size < PATCH {
            return inconsistent(format!(
                "interpolation_scale = {scale}, sample_size = {}; expected a scale above 0 and a side of a token at least",
                self.sample_size
            ));
        }
        check_depth(MODEL, [("num_layers", self.num_layers)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_by_name_what_is_not_built() {
        let read = PixArtTransformer2DConfig::from_json;
        let error = |text: &str| read(text).unwrap_err().to_string();
        assert_eq!(
            error(r#"{"norm_type": "ada_norm_zero"}"#),
            "PixArtTransformer2DModel: norm_type = \"ada_norm_zero\" is not supported; expected \"ada_norm_single\""
        );
        assert!(error(r#"{"num_classes": 3}"#).contains("unknown field `num_classes`"));
        assert!(error(r#"{"out_channels": 5}"#).contains("out_channels = 5"));
        assert!(error(r#"{"num_attention_heads": 8}"#).contains("cross_attention_dim = 1152"));
        let odd =
            r#"{"num_attention_heads": 2, "attention_head_dim": 4, "cross_attention_dim": 8}"#;
        assert!(error(odd).contains("expected a multiple of 12"));
        assert!(error(r#"{"interpolation_scale": 0}"#).contains("interpolation_scale = 0"));
        assert!(error(r#"{"num_layers": 100000}"#).contains("num_layers = 100000"));
        assert!(error(r#"{"_class_name": "UNet2DConditionModel"}"#).contains("_class_name"));
        let old = read(r#"{"_class_name": "Transformer2DModel", "sample_size": 64}"#).unwrap();
        assert!(!old.takes_size());
        assert_eq!(old.interpolation_scale(), 1.0);
        let new = PixArtTransformer2DConfig::default();
        assert_eq!((new.takes_size(), new.interpolation_scale()), (true, 2.0));
    }
}
