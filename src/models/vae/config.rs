//! The VAE's configuration: the `config.json` of a diffusers checkpoint.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use crate::models::unet::SampleSize;
use crate::models::{
    LARGEST_DEPTH, ModelConfigError, check_class, check_sizes, each_size, parse_error, take_fixed,
};
use crate::nn::Activation;

use super::LatentScale;

const MODEL: &str = "AutoencoderKL";

/// Blocks of the encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DownBlockType {
    DownEncoderBlock2D,
}

/// Blocks of the decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum UpBlockType {
    UpDecoderBlock2D,
}

/// Attributes of the VAE, with the names and defaults of diffusers' `AutoencoderKL`.
///
/// Deserializing refuses by name every field that is unknown, and every known one whose value asks for an
/// architecture that is not built here. Fields that start with `_` (diffusers' own notes) are ignored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self", default, deny_unknown_fields)]
pub struct AutoencoderKlConfig {
    /// Channels of the encoder's input images.
    pub in_channels: usize,
    /// Channels of the decoder's output images.
    pub out_channels: usize,
    pub down_block_types: Vec<DownBlockType>,
    pub up_block_types: Vec<UpBlockType>,
    /// From the highest resolution down, for encoder and decoder.
    pub block_out_channels: Vec<usize>,
    /// Resnets of each block of the encoder; the decoder's have one more.
    pub layers_per_block: usize,
    /// The activation of the resnets; the one before the last convolution is SiLU always.
    pub act_fn: Activation,
    pub latent_channels: usize,
    pub norm_num_groups: usize,
    /// Height and width of the images the checkpoint was trained on; see [`AutoencoderKlConfig::latent_tile`].
    pub sample_size: SampleSize,
    /// The factor of latents for the diffusion model; see [`super::scale_latents`].
    pub scaling_factor: f64,
    /// The value subtracted from latents before that.
    pub shift_factor: Option<f64>,
    /// Asks for `f32` in pipelines of half precision: SDXL's activations overflow `f16`. Nothing here depends on it.
    pub force_upcast: bool,
    /// Whether a 1x1 convolution follows the encoder.
    pub use_quant_conv: bool,
    /// Whether a 1x1 convolution precedes the decoder.
    pub use_post_quant_conv: bool,
    /// Whether the pixels of the middle block attend to each other.
    pub mid_block_add_attention: bool,
}

impl Default for AutoencoderKlConfig {
    fn default() -> Self {
        AutoencoderKlConfig {
            in_channels: 3,
            out_channels: 3,
            down_block_types: vec![DownBlockType::DownEncoderBlock2D],
            up_block_types: vec![UpBlockType::UpDecoderBlock2D],
            block_out_channels: vec![64],
            layers_per_block: 1,
            act_fn: Activation::Silu,
            latent_channels: 4,
            norm_num_groups: 32,
            sample_size: SampleSize::Square(32),
            scaling_factor: 0.18215,
            shift_factor: None,
            force_upcast: true,
            use_quant_conv: true,
            use_post_quant_conv: true,
            mid_block_add_attention: true,
        }
    }
}

/// Largest number of blocks of the encoder or the decoder: each halves height and width.
const LARGEST_LEVELS: usize = 16;

impl AutoencoderKlConfig {
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
    /// As for [`AutoencoderKlConfig::from_json`].
    pub fn from_map(mut fields: Map<String, Value>) -> Result<Self, ModelConfigError> {
        check_class(MODEL, &fields)?;
        fields.retain(|name, value| !name.starts_with('_') && !value.is_null());
        // Statistics of each channel replace `scaling_factor` in pipelines that read them.
        for field in ["latents_mean", "latents_std"] {
            take_fixed(MODEL, &mut fields, field, &[Value::Null])?;
        }
        let config = Self::deserialize(Value::Object(fields)).map_err(parse_error(MODEL))?;
        config.check()?;
        Ok(config)
    }

    /// The number of blocks of the encoder, and of the decoder.
    pub fn levels(&self) -> usize {
        self.block_out_channels.len()
    }

    /// Rows of pixels to a row of latents: each block but the last halves them. 8 for all released checkpoints.
    ///
    /// The configuration must have passed [`AutoencoderKlConfig::check`].
    pub fn spatial_multiple(&self) -> usize {
        1 << self.levels().saturating_sub(1)
    }

    /// How the diffusion model's latents differ from the autoencoder's.
    pub fn latent_scale(&self) -> LatentScale {
        LatentScale {
            factor: self.scaling_factor,
            shift: self.shift_factor,
        }
    }

    /// Rows and columns of the latents of an image as large as those the checkpoint was trained on, the tile that
    /// diffusers decodes large latents in.
    pub fn latent_tile(&self) -> usize {
        let side = match self.sample_size {
            SampleSize::Square(side) | SampleSize::HeightWidth([side, _]) => side,
        };
        side / self.spatial_multiple()
    }

    /// Checks that the fields fit each other.
    ///
    /// # Errors
    /// The first contradiction, with the numbers.
    pub fn check(&self) -> Result<(), ModelConfigError> {
        let levels = self.levels();
        let inconsistent = |message: String| {
            Err(ModelConfigError::Inconsistent {
                model: MODEL,
                message,
            })
        };
        if levels == 0 || levels > LARGEST_LEVELS {
            return inconsistent(format!(
                "block_out_channels has {levels} entries; expected 1 to {LARGEST_LEVELS}"
            ));
        }
        for (field, length) in [
            ("down_block_types", self.down_block_types.len()),
            ("up_block_types", self.up_block_types.len()),
        ] {
            if length != levels {
                return inconsistent(format!(
                    "{field} has {length} entries for the {levels} of block_out_channels"
                ));
            }
        }
        let trained = match self.sample_size {
            SampleSize::Square(side) => [side; 2],
            SampleSize::HeightWidth(sides) => sides,
        };
        let single = [
            ("in_channels", self.in_channels),
            ("out_channels", self.out_channels),
            ("latent_channels", self.latent_channels),
            ("layers_per_block", self.layers_per_block),
        ];
        let single = single.map(|(field, size)| (field.to_owned(), size));
        let channels = each_size("block_out_channels", &self.block_out_channels);
        let sizes = single.into_iter().chain(channels);
        check_sizes(MODEL, sizes.chain(each_size("sample_size", &trained)))?;
        for (level, &channels) in self.block_out_channels.iter().enumerate() {
            let groups = self.norm_num_groups;
            if groups == 0 || !channels.is_multiple_of(groups) {
                return inconsistent(format!(
                    "norm_num_groups = {groups} does not divide block_out_channels[{level}] = {channels}"
                ));
            }
        }
        // Each layer becomes operations of the program, so a slip of the keyboard would be traced for hours.
        let depth = self.layers_per_block.saturating_mul(levels);
        if depth > LARGEST_DEPTH {
            return inconsistent(format!(
                "layers_per_block = {} in {levels} blocks makes {depth} layers; expected at most {LARGEST_DEPTH}",
                self.layers_per_block
            ));
        }
        // Latents are divided by it.
        if !self.scaling_factor.is_normal() {
            return inconsistent(format!(
                "scaling_factor = {}; expected a number other than 0",
                self.scaling_factor
            ));
        }
        Ok(())
    }
}

impl<'de> Deserialize<'de> for AutoencoderKlConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let fields = Map::deserialize(deserializer)?;
        Self::from_map(fields).map_err(serde::de::Error::custom)
    }
}

impl Serialize for AutoencoderKlConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Self::serialize(self, serializer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_diffusers_writes_and_keeps_it() {
        let text = r#"{
            "_class_name": "AutoencoderKL", "_diffusers_version": "0.20.0.dev0", "_name_or_path": "../vae",
            "act_fn": "silu", "block_out_channels": [128, 256, 512, 512],
            "down_block_types": ["DownEncoderBlock2D", "DownEncoderBlock2D", "DownEncoderBlock2D",
            "DownEncoderBlock2D"], "force_upcast": true, "in_channels": 3, "latent_channels": 4,
            "latents_mean": null, "latents_std": null, "layers_per_block": 2, "norm_num_groups": 32,
            "out_channels": 3, "sample_size": 1024, "scaling_factor": 0.13025, "shift_factor": null,
            "up_block_types": ["UpDecoderBlock2D", "UpDecoderBlock2D", "UpDecoderBlock2D", "UpDecoderBlock2D"]
        }"#;
        let config = AutoencoderKlConfig::from_json(text).unwrap();
        assert_eq!(config.scaling_factor, 0.13025);
        assert_eq!(config.shift_factor, None);
        assert!(config.use_quant_conv && config.use_post_quant_conv);
        assert_eq!((config.spatial_multiple(), config.latent_tile()), (8, 128));
        let again: AutoencoderKlConfig =
            serde_json::from_str(&serde_json::to_string(&config).unwrap()).unwrap();
        assert_eq!(again, config);
    }

    #[test]
    fn refuses_by_name_what_is_not_built() {
        let error = |text: &str| {
            AutoencoderKlConfig::from_json(text)
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            error(r#"{"latents_mean": [0.5, 0.5, 0.5, 0.5]}"#),
            "AutoencoderKL: latents_mean = [0.5,0.5,0.5,0.5] is not supported; expected null"
        );
        assert!(error(r#"{"hidden_layers": 3}"#).contains("unknown field `hidden_layers`"));
        assert!(
            error(r#"{"up_block_types": ["AttnUpDecoderBlock2D"]}"#)
                .contains("AttnUpDecoderBlock2D")
        );
        assert!(
            error(r#"{"block_out_channels": [64, 64]}"#)
                .contains("down_block_types has 1 entries for the 2 of block_out_channels")
        );
        assert!(
            error(r#"{"norm_num_groups": 48}"#).contains("norm_num_groups = 48 does not divide")
        );
        assert!(error(r#"{"block_out_channels": [0]}"#).contains("block_out_channels[0] = 0"));
        assert!(error(r#"{"scaling_factor": 0}"#).contains("scaling_factor = 0;"));
        assert!(error(r#"{"layers_per_block": 100000}"#).contains("makes 100000 layers"));
        let deep = vec![64; 99];
        assert!(
            error(&format!(r#"{{"block_out_channels": {deep:?}}}"#)).contains("has 99 entries")
        );
    }
}
