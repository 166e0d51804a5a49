//! The transformer's configuration: the `config.json` of a diffusers checkpoint.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::models::{
    ModelConfigError, check_class, check_depth, check_sizes, parse_error, take_fixed,
};

pub const MODEL: &str = "FluxTransformer2DModel";

/// Attributes of the transformer, with the names and defaults of diffusers' `FluxTransformer2DModel`.
///
/// [`FluxTransformer2DConfig::from_map`] refuses by name every field that is unknown, and every known one whose value
/// asks for an architecture that is not built here. Fields that start with `_` (diffusers' own notes) are ignored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FluxTransformer2DConfig {
    /// Features of a token of the image: those of 2 x 2 latents.
    pub in_channels: usize,
    /// Features of a token of the result; those of its input where there are none.
    pub out_channels: Option<usize>,
    /// Blocks with weights of their own for image and text.
    pub num_layers: usize,
    /// Blocks that take image and text as one sequence.
    pub num_single_layers: usize,
    pub attention_head_dim: usize,
    pub num_attention_heads: usize,
    /// Features of the text's tokens.
    pub joint_attention_dim: usize,
    /// Features of the pooled text.
    pub pooled_projection_dim: usize,
    /// Whether the guidance scale is an input, as in a model that was distilled from guided samples.
    pub guidance_embeds: bool,
    /// The features of a head that each axis of the positions rotates.
    pub axes_dims_rope: Vec<usize>,
}

impl Default for FluxTransformer2DConfig {
    fn default() -> Self {
        FluxTransformer2DConfig {
            in_channels: 64,
            out_channels: None,
            num_layers: 19,
            num_single_layers: 38,
            attention_head_dim: 128,
            num_attention_heads: 24,
            joint_attention_dim: 4096,
            pooled_projection_dim: 768,
            guidance_embeds: false,
            axes_dims_rope: vec![16, 56, 56],
        }
    }
}

/// Axes of a position: one that is always 0, row and column.
pub const POSITION_AXES: usize = 3;

impl FluxTransformer2DConfig {
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
    /// As for [`FluxTransformer2DConfig::from_json`].
    pub fn from_map(mut fields: Map<String, Value>) -> Result<Self, ModelConfigError> {
        check_class(MODEL, &fields)?;
        fields.retain(|name, value| !name.starts_with('_') && !value.is_null());
        fields.remove("quantization_config");
        take_fixed(MODEL, &mut fields, "patch_size", &[json!(1)])?;
        let config = Self::deserialize(Value::Object(fields)).map_err(parse_error(MODEL))?;
        config.check()?;
        Ok(config)
    }

    /// Features of the tokens between the blocks.
    pub fn inner_dim(&self) -> usize {
        self.num_attention_heads * self.attention_head_dim
    }

    /// Features of a token of the result.
    pub fn out_channels(&self) -> usize {
        self.out_channels.unwrap_or(self.in_channels)
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
                ("joint_attention_dim", self.joint_attention_dim),
                ("pooled_projection_dim", self.pooled_projection_dim),
                ("num_attention_heads * attention_head_dim", self.inner_dim()),
            ],
        )?;
        let depths = [
            ("num_layers", self.num_layers),
            ("num_single_layers", self.num_single_layers),
        ];
        check_depth(MODEL, depths)?;
        let axes = &self.axes_dims_rope;
        let sum = axes
            .iter()
            .fold(0usize, |sum, dim| sum.saturating_add(*dim));
        let are_even = axes.iter().all(|dim| *dim > 0 && dim.is_multiple_of(2));
        if axes.len() != POSITION_AXES || !are_even || sum != self.attention_head_dim {
            return inconsistent(format!(
                "axes_dims_rope = {axes:?}; expected {POSITION_AXES} even numbers whose sum is attention_head_dim = {}",
                self.attention_head_dim
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
            FluxTransformer2DConfig::from_json(text)
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            error(r#"{"patch_size": 2}"#),
            "FluxTransformer2DModel: patch_size = 2 is not supported; expected 1"
        );
        assert!(error(r#"{"mlp_ratio": 3}"#).contains("unknown field `mlp_ratio`"));
        assert!(error(r#"{"axes_dims_rope": [16, 56]}"#).contains("axes_dims_rope = [16, 56]"));
        assert!(
            error(r#"{"attention_head_dim": 64}"#).contains("whose sum is attention_head_dim = 64")
        );
        assert!(error(r#"{"num_layers": 100000}"#).contains("num_layers = 100000"));
        assert!(error(r#"{"in_channels": 0}"#).contains("in_channels = 0"));
        assert!(error(r#"{"_class_name": "UNet2DConditionModel"}"#).contains("_class_name"));
    }
}
