//! The transformer's configuration: the `config.json` of a diffusers checkpoint.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::models::{
    ModelConfigError, check_class, check_depth, check_sizes, parse_error, take_fixed,
};

pub const MODEL: &str = "SD3Transformer2DModel";

/// Rows and columns of latents in a token.
pub const PATCH: usize = 2;

/// Attributes of the transformer, with the names and defaults of diffusers' `SD3Transformer2DModel`.
///
/// [`Sd3Transformer2DConfig::from_map`] refuses by name every field that is unknown, and every known one whose value asks
/// for an architecture that is not built here. Fields that start with `_` (diffusers' own notes) are ignored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sd3Transformer2DConfig {
    /// Side of the latents that it was trained for, which decides nothing here.
    pub sample_size: usize,
    pub in_channels: usize,
    /// Channels of the result; those of the input where there are none.
    pub out_channels: Option<usize>,
    pub num_layers: usize,
    pub attention_head_dim: usize,
    pub num_attention_heads: usize,
    /// Features of the text's tokens.
    pub joint_attention_dim: usize,
    /// Features of the text's tokens between the blocks: those of the image's.
    pub caption_projection_dim: usize,
    /// Features of the pooled text.
    pub pooled_projection_dim: usize,
    /// Rows and columns of tokens that have a position.
    pub pos_embed_max_size: usize,
    /// Blocks in which the image's tokens also attend to themselves alone.
    pub dual_attention_layers: Vec<usize>,
    /// The norm of queries and keys.
    pub qk_norm: Option<QkNorm>,
}

/// A norm of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QkNorm {
    RmsNorm,
}

impl Default for Sd3Transformer2DConfig {
    fn default() -> Self {
        Sd3Transformer2DConfig {
            sample_size: 128,
            in_channels: 16,
            out_channels: Some(16),
            num_layers: 18,
            attention_head_dim: 64,
            num_attention_heads: 18,
            joint_attention_dim: 4096,
            caption_projection_dim: 1152,
            pooled_projection_dim: 2048,
            pos_embed_max_size: 96,
            dual_attention_layers: Vec::new(),
            qk_norm: None,
        }
    }
}

impl Sd3Transformer2DConfig {
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
    /// As for [`Sd3Transformer2DConfig::from_json`].
    pub fn from_map(mut fields: Map<String, Value>) -> Result<Self, ModelConfigError> {
        check_class(MODEL, &fields)?;
        let has_no_out_channels = fields.get("out_channels") == Some(&Value::Null);
        fields.retain(|name, value| !name.starts_with('_') && !value.is_null());
        fields.remove("quantization_config");
        take_fixed(MODEL, &mut fields, "patch_size", &[json!(PATCH)])?;
        let mut config = Self::deserialize(Value::Object(fields)).map_err(parse_error(MODEL))?;
        if has_no_out_channels {
            config.out_channels = None;
        }
        config.check()?;
        Ok(config)
    }

    /// Features of the tokens between the blocks.
    pub fn inner_dim(&self) -> usize {
        self.num_attention_heads * self.attention_head_dim
    }

    /// Channels of the result.
    pub fn out_channels(&self) -> usize {
        self.out_channels.unwrap_or(self.in_channels)
    }

    /// Most rows and columns of a sample: those that have positions.
    pub fn largest_side(&self) -> usize {
        self.pos_embed_max_size * PATCH
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
                ("in_channels", self.in_channels),
                ("out_channels", self.out_channels()),
                ("attention_head_dim", self.attention_head_dim),
                ("num_attention_heads", self.num_attention_heads),
                ("num_layers", self.num_layers),
                ("joint_attention_dim", self.joint_attention_dim),
                ("pooled_projection_dim", self.pooled_projection_dim),
                ("pos_embed_max_size", self.pos_embed_max_size),
            ],
        )?;
        let inner = self.inner_dim();
        check_sizes(MODEL, [("num_attention_heads * attention_head_dim", inner)])?;
        if self.caption_projection_dim != inner {
            return inconsistent(format!(
                "caption_projection_dim = {}; expected num_attention_heads * attention_head_dim = {inner}",
                self.caption_projection_dim
            ));
        }
        let layers = self.num_layers;
        check_depth(MODEL, [("num_layers", layers)])?;
        if let Some(layer) = self.dual_attention_layers.iter().find(|l| **l >= layers) {
            return inconsistent(format!(
                "dual_attention_layers has {layer}, but num_layers = {layers}"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_by_name_what_is_not_built() {
        let error = |text: &str| {
            Sd3Transformer2DConfig::from_json(text)
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            error(r#"{"patch_size": 4}"#),
            "SD3Transformer2DModel: patch_size = 4 is not supported; expected 2"
        );
        assert!(error(r#"{"qk_norm": "layer_norm"}"#).contains("unknown variant `layer_norm`"));
        assert!(error(r#"{"pos_embed_type": "rope"}"#).contains("unknown field `pos_embed_type`"));
        assert!(
            error(r#"{"attention_head_dim": 32}"#)
                .contains("caption_projection_dim = 1152; expected num_attention_heads")
        );
        assert!(
            error(r#"{"dual_attention_layers": [18]}"#).contains("has 18, but num_layers = 18")
        );
        assert!(error(r#"{"num_layers": 100000}"#).contains("num_layers = 100000"));
        assert!(error(r#"{"pos_embed_max_size": 0}"#).contains("pos_embed_max_size = 0"));
        assert!(error(r#"{"_class_name": "UNet2DConditionModel"}"#).contains("_class_name"));
        let same = Sd3Transformer2DConfig::from_json(r#"{"out_channels": null, "in_channels": 8}"#);
        assert_eq!(same.unwrap().out_channels(), 8);
    }
}
