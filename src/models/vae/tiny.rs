//! diffusers' `AutoencoderTiny` (TAESD): a small autoencoder for the latents of others, fast enough for previews.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::graph::{Builder, Tensor};
use crate::models::{
    LARGEST_DEPTH, ModelConfigError, check_class, check_sizes, each_size, take_fixed,
};
use crate::nn::{Conv2d, Precision, Result, constrain_image, conv2d, upsample_nearest_2x};

use super::LatentScale;

const MODEL: &str = "AutoencoderTiny";

/// Largest number of stages: each but one halves height and width.
const LARGEST_LEVELS: usize = 16;
/// The side in pixels of the tiles that diffusers decodes large latents in.
const TILE: usize = 512;
/// Latents are bounded to about this on their way into the decoder.
const BOUND: f64 = 3.0;

/// Attributes of the autoencoder, with the names and defaults of diffusers' `AutoencoderTiny`.
///
/// Reading refuses by name every field that is unknown, and every known one whose value asks for an architecture that
/// is not built here. Fields that start with `_` are ignored, and so are those that `encode` and `decode` do not read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AutoencoderTinyConfig {
    /// Channels of the encoder's input images.
    pub in_channels: usize,
    /// Channels of the decoder's output images.
    pub out_channels: usize,
    pub encoder_block_out_channels: Vec<usize>,
    pub decoder_block_out_channels: Vec<usize>,
    pub latent_channels: usize,
    /// Blocks in each stage of the encoder.
    pub num_encoder_blocks: Vec<usize>,
    /// Blocks in each stage of the decoder.
    pub num_decoder_blocks: Vec<usize>,
    /// Latents are multiplied with it for the diffusion model: 1, its latents are those of the diffusion model.
    pub scaling_factor: f64,
    pub shift_factor: f64,
}

impl Default for AutoencoderTinyConfig {
    fn default() -> Self {
        AutoencoderTinyConfig {
            in_channels: 3,
            out_channels: 3,
            encoder_block_out_channels: vec![64; 4],
            decoder_block_out_channels: vec![64; 4],
            latent_channels: 4,
            num_encoder_blocks: vec![1, 3, 3, 3],
            num_decoder_blocks: vec![3, 3, 3, 1],
            scaling_factor: 1.0,
            shift_factor: 0.0,
        }
    }
}

impl AutoencoderTinyConfig {
    /// Reads and checks the fields of a `config.json`.
    ///
    /// # Errors
    /// When it is not of the expected types, asks for something that is not built here, or contradicts itself.
    pub fn from_map(mut fields: Map<String, Value>) -> std::result::Result<Self, ModelConfigError> {
        check_class(MODEL, &fields)?;
        fields.retain(|name, value| !name.starts_with('_') && !value.is_null());
        for (field, only) in [
            ("act_fn", json!("relu")),
            ("upsample_fn", json!("nearest")),
            ("upsampling_scaling_factor", json!(2)),
        ] {
            take_fixed(MODEL, &mut fields, field, &[only])?;
        }
        // Of the conversion to bytes, of f16, and a copy of the decoder's channels.
        for unread in [
            "latent_magnitude",
            "latent_shift",
            "force_upcast",
            "block_out_channels",
        ] {
            fields.remove(unread);
        }
        let config =
            Self::deserialize(Value::Object(fields)).map_err(|source| ModelConfigError::Parse {
                model: MODEL,
                source,
            })?;
        config.check()?;
        Ok(config)
    }

    /// Rows of pixels to a row of latents: each stage but one halves them.
    pub fn spatial_multiple(&self) -> usize {
        1 << self.num_decoder_blocks.len().saturating_sub(1)
    }

    /// Rows and columns of latents of a tile.
    pub fn latent_tile(&self) -> usize {
        TILE / self.spatial_multiple()
    }

    pub(super) fn latent_scale(&self) -> LatentScale {
        LatentScale {
            factor: self.scaling_factor,
            shift: Some(self.shift_factor).filter(|shift| *shift != 0.0),
        }
    }

    /// Checks that the fields fit each other.
    ///
    /// # Errors
    /// The first contradiction, with the numbers.
    pub fn check(&self) -> std::result::Result<(), ModelConfigError> {
        let inconsistent = |message: String| {
            Err(ModelConfigError::Inconsistent {
                model: MODEL,
                message,
            })
        };
        let levels = self.num_decoder_blocks.len();
        for (field, length) in [
            ("num_decoder_blocks", levels),
            ("num_encoder_blocks", self.num_encoder_blocks.len()),
            (
                "encoder_block_out_channels",
                self.encoder_block_out_channels.len(),
            ),
            (
                "decoder_block_out_channels",
                self.decoder_block_out_channels.len(),
            ),
        ] {
            if length != levels || !(1..=LARGEST_LEVELS).contains(&length) {
                return inconsistent(format!(
                    "{field} has {length} entries; expected 1 to {LARGEST_LEVELS}, as many as num_decoder_blocks, which has \
                     {levels}"
                ));
            }
        }
        let single = [
            ("in_channels", self.in_channels),
            ("out_channels", self.out_channels),
            ("latent_channels", self.latent_channels),
        ];
        let single = single.map(|(field, size)| (field.to_owned(), size));
        let lists = [
            (
                "encoder_block_out_channels",
                &self.encoder_block_out_channels,
            ),
            (
                "decoder_block_out_channels",
                &self.decoder_block_out_channels,
            ),
        ];
        let listed = lists
            .into_iter()
            .flat_map(|(field, sizes)| each_size(field, sizes));
        check_sizes(MODEL, single.into_iter().chain(listed))?;
        for (field, sizes) in lists {
            // No layer of diffusers changes the number of channels between stages.
            if sizes.iter().any(|size| *size != sizes[0]) {
                return inconsistent(format!(
                    "{field} = {sizes:?}; expected the same for all stages"
                ));
            }
        }
        for (field, blocks) in [
            ("num_encoder_blocks", &self.num_encoder_blocks),
            ("num_decoder_blocks", &self.num_decoder_blocks),
        ] {
            let depth = blocks.iter().fold(0usize, |sum, n| sum.saturating_add(*n));
            if depth > LARGEST_DEPTH {
                return inconsistent(format!(
                    "{field} makes {depth} blocks; expected at most {LARGEST_DEPTH}"
                ));
            }
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

/// The images `[B, out_channels, m * height, m * width]` of unscaled latents `[B, latent_channels, height, width]`; see
/// [`super::decode`].
pub(super) fn decode(
    b: &Builder,
    config: &AutoencoderTinyConfig,
    latents: Tensor,
    precision: Precision,
) -> Result<Tensor> {
    let x = b.convert(latents, precision.activations)?;
    let bounded = b.tanh(b.mul_scalar(x, 1.0 / BOUND)?)?;
    let x = b.transpose(b.mul_scalar(bounded, BOUND)?, &[0, 2, 3, 1])?;
    let layers = Layers::new(b.scope("decoder"), precision);
    let channels = config.decoder_block_out_channels[0];
    let x = layers.conv(x, Conv2d::same(channels, 3))?;
    let mut x = layers.relu(x)?;
    let last = config.num_decoder_blocks.len() - 1;
    for (stage, &blocks) in config.num_decoder_blocks.iter().enumerate() {
        for _ in 0..blocks {
            x = layers.block(x, channels)?;
        }
        x = match stage == last {
            true => layers.conv(x, Conv2d::same(config.out_channels, 3))?,
            false => {
                let doubled = upsample_nearest_2x(&layers.scope(), x)?;
                layers.conv(doubled, Conv2d::same(channels, 3).without_bias())?
            }
        };
    }
    // From [0, 1] to [-1, 1].
    let x = b.add_scalar(b.mul_scalar(x, 2.0)?, -1.0)?;
    b.transpose(x, &[0, 3, 1, 2])
}

/// The unscaled latents of images; see [`super::encode`].
pub(super) fn encode(
    b: &Builder,
    config: &AutoencoderTinyConfig,
    images: Tensor,
    precision: Precision,
) -> Result<Tensor> {
    let x = b.convert(images, precision.activations)?;
    // From [-1, 1] to [0, 1].
    let x = b.mul_scalar(b.add_scalar(x, 1.0)?, 0.5)?;
    let mut x = b.transpose(x, &[0, 2, 3, 1])?;
    let layers = Layers::new(b.scope("encoder"), precision);
    let channels = config.encoder_block_out_channels[0];
    let same = Conv2d::same(channels, 3);
    for (stage, &blocks) in config.num_encoder_blocks.iter().enumerate() {
        x = layers.conv(
            x,
            match stage {
                0 => same,
                _ => Conv2d { stride: 2, ..same }.without_bias(),
            },
        )?;
        for _ in 0..blocks {
            x = layers.block(x, channels)?;
        }
    }
    let x = layers.conv(x, Conv2d::same(config.latent_channels, 3))?;
    b.transpose(x, &[0, 3, 1, 2])
}

/// The layers of one pass, which diffusers numbers one after the other.
struct Layers {
    b: Builder,
    next: std::cell::Cell<usize>,
    precision: Precision,
}

impl Layers {
    fn new(b: Builder, precision: Precision) -> Layers {
        Layers {
            b: b.scope("layers"),
            next: std::cell::Cell::new(0),
            precision,
        }
    }

    /// The scope of the next layer.
    fn scope(&self) -> Builder {
        let index = self.next.get();
        self.next.set(index + 1);
        self.b.scope(index)
    }

    fn conv(&self, x: Tensor, layer: Conv2d) -> Result<Tensor> {
        let b = self.scope();
        let y = conv2d(&b, x, layer, self.precision)?;
        constrain_image(&b, y)
    }

    fn relu(&self, x: Tensor) -> Result<Tensor> {
        relu(&self.scope(), x)
    }

    /// `AutoencoderTinyBlock`: three convolutions beside the input.
    fn block(&self, input: Tensor, channels: usize) -> Result<Tensor> {
        let b = self.scope();
        let mut x = input;
        for index in [0, 2, 4] {
            let b = b.scope("conv").scope(index);
            x = conv2d(&b, x, Conv2d::same(channels, 3), self.precision)?;
            x = constrain_image(&b, x)?;
            if index < 4 {
                x = relu(&b, x)?;
            }
        }
        relu(&b, b.add(x, input)?)
    }
}

fn relu(b: &Builder, x: Tensor) -> Result<Tensor> {
    let zero = b.scalar(b.dtype(x), 0.0)?;
    b.max(x, zero)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_diffusers_writes_and_refuses_the_rest_by_name() {
        let read = |text: &str| {
            let fields = serde_json::from_str(text).unwrap();
            AutoencoderTinyConfig::from_map(fields).map_err(|error| error.to_string())
        };
        let taesd = r#"{"_class_name": "AutoencoderTiny", "_diffusers_version": "0.20.0.dev0", "act_fn": "relu",
            "decoder_block_out_channels": [64, 64, 64, 64], "encoder_block_out_channels": [64, 64, 64, 64],
            "force_upcast": false, "in_channels": 3, "latent_channels": 4, "latent_magnitude": 3, "latent_shift": 0.5,
            "num_decoder_blocks": [3, 3, 3, 1], "num_encoder_blocks": [1, 3, 3, 3], "out_channels": 3,
            "scaling_factor": 1.0, "upsampling_scaling_factor": 2}"#;
        let config = read(taesd).unwrap();
        assert_eq!(config, AutoencoderTinyConfig::default());
        assert_eq!((config.spatial_multiple(), config.latent_tile()), (8, 64));
        for (text, expected) in [
            (
                r#"{"act_fn": "mish"}"#,
                "act_fn = \"mish\" is not supported; expected \"relu\"",
            ),
            (r#"{"layers": 3}"#, "unknown field `layers`"),
            (
                r#"{"num_decoder_blocks": [1]}"#,
                "num_encoder_blocks has 4 entries; expected 1 to 16",
            ),
            (
                r#"{"decoder_block_out_channels": [8, 8, 8, 16]}"#,
                "decoder_block_out_channels = [8, 8, 8, 16]; expected the same for all stages",
            ),
            (
                r#"{"num_encoder_blocks": [1, 1, 1, 9999]}"#,
                "makes 10002 blocks",
            ),
            (r#"{"scaling_factor": 0}"#, "scaling_factor = 0;"),
            (r#"{"latent_channels": 0}"#, "latent_channels = 0"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
