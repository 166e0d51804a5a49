//! Autoencoders, from images to latents and back: diffusers' `AutoencoderKL` of Stable Diffusion 1.x, 2.x, XL and 3 and
//! of Flux, and `AutoencoderTiny`.

mod config;
pub mod original;
mod tiny;

pub use config::{AutoencoderKlConfig, DownBlockType, UpBlockType};
pub use tiny::AutoencoderTinyConfig;

use serde_json::{Map, Value};

use crate::graph::{Builder, Tensor};
use crate::host_tensor::{HostTensor, HostTensorError};
use crate::models::{ModelConfigError, Part};
use crate::nn::{
    Activation, Attention, Conv2d, GroupNorm, Linear, Precision, Result, attention,
    constrain_image, constrain_tokens, conv2d, dims, downsample_2x, group_norm, linear,
    upsample_2x,
};

/// The root of the VAE's parameter paths in a text-to-image model.
pub const ROOT: &str = Part::Vae.name();

/// The root of the parameter paths of an autoencoder that decodes previews alone.
pub const PREVIEW_ROOT: &str = "preview_vae";

/// Epsilon of every normalization; diffusers has no field for it.
const EPSILON: f64 = 1e-6;

/// Bounds of the log-variance of encoded latents.
const LOGVAR: [f64; 2] = [-30.0, 20.0];

/// An autoencoder of latent models.
#[derive(Clone, Debug, PartialEq)]
pub enum Autoencoder {
    Kl(Box<AutoencoderKlConfig>),
    Tiny(AutoencoderTinyConfig),
}

impl Autoencoder {
    /// Reads and checks the fields of a `config.json`, of `AutoencoderKL` where it does not name its class.
    ///
    /// # Errors
    /// When it asks for something that is not built here, or contradicts itself.
    pub fn from_map(fields: Map<String, Value>) -> std::result::Result<Self, ModelConfigError> {
        let class = fields.get("_class_name").and_then(Value::as_str);
        Ok(match class {
            Some("AutoencoderTiny") => Autoencoder::Tiny(AutoencoderTinyConfig::from_map(fields)?),
            _ => AutoencoderKlConfig::from_map(fields)?.into(),
        })
    }

    /// Checks that the fields fit each other.
    ///
    /// # Errors
    /// The first contradiction, with the numbers.
    pub fn check(&self) -> std::result::Result<(), ModelConfigError> {
        match self {
            Autoencoder::Kl(config) => config.check(),
            Autoencoder::Tiny(config) => config.check(),
        }
    }

    /// The name of its class in diffusers.
    pub fn class(&self) -> &'static str {
        match self {
            Autoencoder::Kl(_) => "AutoencoderKL",
            Autoencoder::Tiny(_) => "AutoencoderTiny",
        }
    }

    /// Channels of the images that it encodes.
    pub fn in_channels(&self) -> usize {
        match self {
            Autoencoder::Kl(config) => config.in_channels,
            Autoencoder::Tiny(config) => config.in_channels,
        }
    }

    /// Channels of latents.
    pub fn latent_channels(&self) -> usize {
        match self {
            Autoencoder::Kl(config) => config.latent_channels,
            Autoencoder::Tiny(config) => config.latent_channels,
        }
    }

    /// Rows of pixels to a row of latents.
    pub fn spatial_multiple(&self) -> usize {
        match self {
            Autoencoder::Kl(config) => config.spatial_multiple(),
            Autoencoder::Tiny(config) => config.spatial_multiple(),
        }
    }

    /// Rows and columns of the latents of a tile.
    pub fn latent_tile(&self) -> usize {
        match self {
            Autoencoder::Kl(config) => config.latent_tile(),
            Autoencoder::Tiny(config) => config.latent_tile(),
        }
    }

    /// How the diffusion model's latents differ from its own.
    pub fn latent_scale(&self) -> LatentScale {
        match self {
            Autoencoder::Kl(config) => config.latent_scale(),
            Autoencoder::Tiny(config) => config.latent_scale(),
        }
    }
}

impl From<AutoencoderKlConfig> for Autoencoder {
    fn from(config: AutoencoderKlConfig) -> Self {
        Autoencoder::Kl(Box::new(config))
    }
}

/// How the latents of the diffusion model differ from those of the autoencoder.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatentScale {
    pub factor: f64,
    pub shift: Option<f64>,
}

impl LatentScale {
    /// The encoder's latents as the diffusion model takes them: `(latents - shift) * factor`.
    ///
    /// # Errors
    /// When `latents` are not of a float type.
    pub fn apply(self, b: &Builder, latents: Tensor) -> Result<Tensor> {
        let shifted = match self.shift {
            None => latents,
            Some(shift) => b.add_scalar(latents, -shift)?,
        };
        b.mul_scalar(shifted, self.factor)
    }

    /// The diffusion model's latents as the decoder takes them: `latents / factor + shift`.
    ///
    /// # Errors
    /// When `latents` are not of a float type.
    pub fn undo(self, b: &Builder, latents: Tensor) -> Result<Tensor> {
        let factor = b.scalar(b.dtype(latents), self.factor)?;
        let divided = b.div(latents, factor)?;
        match self.shift {
            None => Ok(divided),
            Some(shift) => b.add_scalar(divided, shift),
        }
    }
}

/// What an image is encoded to, unscaled.
#[derive(Clone, Copy, Debug)]
pub enum EncodedImages {
    /// A distribution to draw latents from.
    Distribution(LatentDistribution),
    /// The latents `[B, latent_channels, height, width]` themselves.
    Latents(Tensor),
}

/// The normal distribution of latents that an image is encoded to; each element is independent of the others.
#[derive(Clone, Copy, Debug)]
pub struct LatentDistribution {
    /// `[B, latent_channels, height, width]`; also its mode.
    pub mean: Tensor,
    /// The logarithm of the variance, shaped like `mean` and within [-30, 20].
    pub logvar: Tensor,
}

impl LatentDistribution {
    /// `mean + exp(logvar / 2) * noise`, for standard normal noise shaped like `mean`.
    ///
    /// # Errors
    /// When `noise` has another shape or type.
    pub fn sample(self, b: &Builder, noise: Tensor) -> Result<Tensor> {
        let spread = b.mul(self.deviation(b)?, noise)?;
        b.add(self.mean, spread)
    }

    /// The standard deviation, `exp(logvar / 2)`, shaped like `mean`.
    ///
    /// # Errors
    /// None for a distribution that an encoder gave.
    pub fn deviation(self, b: &Builder) -> Result<Tensor> {
        b.exp(b.mul_scalar(self.logvar, 0.5)?)
    }
}

/// The images `[B, out_channels, m * height, m * width]` of unscaled latents `[B, latent_channels, height, width]`,
/// with `m` the configuration's spatial multiple, in `precision.activations`. Values in [-1, 1] are the range from
/// black to white; they may lie outside.
///
/// Weights are declared under `root/` with diffusers' keys.
///
/// # Errors
/// When the configuration contradicts itself, or `latents` have other channels.
pub fn decode(
    b: &Builder,
    root: &str,
    config: &Autoencoder,
    latents: Tensor,
    precision: Precision,
) -> Result<Tensor> {
    let b = b.root(root);
    config.check().map_err(|e| b.invalid(e.to_string()))?;
    let [_, channels, _, _] = dims(&b, "latents", latents)?;
    if channels != config.latent_channels() {
        return Err(b.invalid(format!(
            "latents {} have {channels} channels; latent_channels is {}",
            b.shape(latents),
            config.latent_channels()
        )));
    }
    match config {
        Autoencoder::Kl(config) => decode_kl(&b, config, latents, precision),
        Autoencoder::Tiny(config) => tiny::decode(&b, config, latents, precision),
    }
}

fn decode_kl(
    b: &Builder,
    config: &AutoencoderKlConfig,
    latents: Tensor,
    precision: Precision,
) -> Result<Tensor> {
    let layers = Layers { config, precision };
    let mut x = b.convert(latents, precision.activations)?;
    x = b.transpose(x, &[0, 2, 3, 1])?;
    if config.use_post_quant_conv {
        x = layers.conv(&b.scope("post_quant_conv"), x, config.latent_channels, 1)?;
    }

    let b = b.scope("decoder");
    let widths = &config.block_out_channels;
    x = layers.conv(&b.scope("conv_in"), x, widths[widths.len() - 1], 3)?;
    x = constrain_image(&b, x)?;
    x = layers.middle(&b.scope("mid_block"), x)?;
    for (index, &channels) in widths.iter().rev().enumerate() {
        let b = b.scope("up_blocks").scope(index);
        x = layers.resnets(&b, x, channels, config.layers_per_block + 1)?;
        if index + 1 < widths.len() {
            let [_, height, width, _] = dims(&b, "upsample", x)?;
            let size = [2 * height, 2 * width];
            x = upsample_2x(&b.scope("upsamplers").scope(0), x, size, precision)?;
        }
    }
    let x = layers.last(&b, x, config.out_channels)?;
    b.transpose(x, &[0, 3, 1, 2])
}

/// The unscaled latents of images `[B, in_channels, height, width]` with values in [-1, 1], in `precision.activations`.
///
/// Weights are declared under `root/` with diffusers' keys.
///
/// # Errors
/// When the configuration contradicts itself, or the images have other channels or sides that are not multiples of
/// the configuration's spatial multiple.
pub fn encode(
    b: &Builder,
    root: &str,
    config: &Autoencoder,
    images: Tensor,
    precision: Precision,
) -> Result<EncodedImages> {
    let b = b.root(root);
    config.check().map_err(|e| b.invalid(e.to_string()))?;
    let [_, channels, height, width] = dims(&b, "images", images)?;
    if channels != config.in_channels() {
        return Err(b.invalid(format!(
            "images {} have {channels} channels; in_channels is {}",
            b.shape(images),
            config.in_channels()
        )));
    }
    let multiple = config.spatial_multiple();
    if !height.is_multiple_of(multiple) || !width.is_multiple_of(multiple) {
        return Err(b.invalid(format!(
            "image height {height} and width {width} must be multiples of {multiple}, the pixels of a latent"
        )));
    }
    Ok(match config {
        Autoencoder::Kl(config) => {
            EncodedImages::Distribution(encode_kl(&b, config, images, precision)?)
        }
        Autoencoder::Tiny(config) => {
            EncodedImages::Latents(tiny::encode(&b, config, images, precision)?)
        }
    })
}

fn encode_kl(
    b: &Builder,
    config: &AutoencoderKlConfig,
    images: Tensor,
    precision: Precision,
) -> Result<LatentDistribution> {
    let layers = Layers { config, precision };
    let x = b.convert(images, precision.activations)?;
    let x = b.transpose(x, &[0, 2, 3, 1])?;
    let moments = 2 * config.latent_channels;
    let mut x = {
        let b = b.scope("encoder");
        let widths = &config.block_out_channels;
        let mut x = layers.conv(&b.scope("conv_in"), x, widths[0], 3)?;
        x = constrain_image(&b, x)?;
        for (index, &channels) in widths.iter().enumerate() {
            let b = b.scope("down_blocks").scope(index);
            x = layers.resnets(&b, x, channels, config.layers_per_block)?;
            if index + 1 < widths.len() {
                x = downsample_2x(&b.scope("downsamplers").scope(0), x, 0, precision)?;
            }
        }
        x = layers.middle(&b.scope("mid_block"), x)?;
        layers.last(&b, x, moments)?
    };
    if config.use_quant_conv {
        x = layers.conv(&b.scope("quant_conv"), x, moments, 1)?;
    }
    let x = b.transpose(x, &[0, 3, 1, 2])?;
    let parts = b.split(x, 1, 2)?;
    let [lowest, highest] = LOGVAR;
    let lowest = b.scalar(precision.activations, lowest)?;
    let highest = b.scalar(precision.activations, highest)?;
    let logvar = b.max(parts[1], lowest)?;
    Ok(LatentDistribution {
        mean: parts[0],
        logvar: b.min(logvar, highest)?,
    })
}

/// Shared by the layers of one pass.
struct Layers<'a> {
    config: &'a AutoencoderKlConfig,
    precision: Precision,
}

impl Layers<'_> {
    fn conv(&self, b: &Builder, x: Tensor, channels: usize, kernel: usize) -> Result<Tensor> {
        conv2d(b, x, Conv2d::same(channels, kernel), self.precision)
    }

    fn norm(&self, b: &Builder, x: Tensor, activation: Option<Activation>) -> Result<Tensor> {
        let layer = GroupNorm {
            groups: self.config.norm_num_groups,
            epsilon: EPSILON,
            activation,
        };
        group_norm(b, x, layer, self.precision)
    }

    /// The resnets of a block.
    fn resnets(&self, b: &Builder, mut x: Tensor, channels: usize, count: usize) -> Result<Tensor> {
        for layer in 0..count {
            x = self.resnet(&b.scope("resnets").scope(layer), x, channels)?;
        }
        Ok(x)
    }

    /// `ResnetBlock2D` without a time embedding.
    fn resnet(&self, b: &Builder, input: Tensor, channels: usize) -> Result<Tensor> {
        let [_, _, _, in_channels] = dims(b, "resnet", input)?;
        let mut x = input;
        for (norm, conv) in [("norm1", "conv1"), ("norm2", "conv2")] {
            x = self.norm(&b.scope(norm), x, Some(self.config.act_fn))?;
            x = self.conv(&b.scope(conv), x, channels, 3)?;
            x = constrain_image(b, x)?;
        }
        let shortcut = if in_channels == channels {
            input
        } else {
            self.conv(&b.scope("conv_shortcut"), input, channels, 1)?
        };
        b.add(shortcut, x)
    }

    /// `UNetMidBlock2D`: two resnets, and between them attention.
    fn middle(&self, b: &Builder, x: Tensor) -> Result<Tensor> {
        let [_, _, _, channels] = dims(b, "mid_block", x)?;
        let mut x = self.resnet(&b.scope("resnets").scope(0), x, channels)?;
        if self.config.mid_block_add_attention {
            x = self.attend(&b.scope("attentions").scope(0), x)?;
        }
        self.resnet(&b.scope("resnets").scope(1), x, channels)
    }

    /// Attention of all pixels to all, with one head, added to the input.
    fn attend(&self, b: &Builder, input: Tensor) -> Result<Tensor> {
        let image: [usize; 4] = dims(b, "attention", input)?;
        let [batch, height, width, channels] = image;
        let x = self.norm(&b.scope("group_norm"), input, None)?;
        let x = b.reshape(x, &[batch, height * width, channels])?;
        let project = |name: &str| {
            let layer = Linear::new(channels, "embed", "heads");
            let y = linear(&b.scope(name), x, layer, self.precision)?;
            constrain_tokens(b, y)
        };
        let qkv = [project("to_q")?, project("to_k")?, project("to_v")?];
        let attributes = Attention {
            heads: 1,
            causal: false,
        };
        let y = attention(b, qkv, attributes, self.precision)?;
        let y = constrain_tokens(b, y)?;
        let layer = Linear::new(channels, "heads", "embed");
        let y = linear(&b.scope("to_out").scope(0), y, layer, self.precision)?;
        let y = b.reshape(y, &image)?;
        let y = b.add(y, input)?;
        constrain_image(b, y)
    }

    /// The last layers of encoder and decoder.
    fn last(&self, b: &Builder, x: Tensor, channels: usize) -> Result<Tensor> {
        let x = self.norm(&b.scope("conv_norm_out"), x, Some(Activation::Silu))?;
        self.conv(&b.scope("conv_out"), x, channels, 3)
    }
}

/// Why decoded images cannot be converted to bytes.
#[derive(Debug, thiserror::Error)]
pub enum DecodedError {
    #[error(
        "{found} of {count} decoded values are infinite or not a number; decode in float32, or if these values are \
         from float32, look for the first step whose latents are not finite"
    )]
    NotFinite { found: usize, count: usize },
    #[error(transparent)]
    Unreadable(#[from] HostTensorError),
}

/// Refuses decoded images with infinities or NaN, which a conversion to bytes would turn black.
///
/// In `f16`, SDXL's first VAE decodes valid latents to them: its activations exceed 65504.
///
/// # Errors
/// When there are any, with their number; or when the type has no conversion on the host.
pub fn check_finite(images: &HostTensor) -> std::result::Result<(), DecodedError> {
    let values = images.to_f32_vec()?;
    match values.iter().filter(|v| !v.is_finite()).count() {
        0 => Ok(()),
        found => Err(DecodedError::NotFinite {
            found,
            count: values.len(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::nn::tests::input;

    #[test]
    fn inputs_that_do_not_fit_are_named() {
        let config: Autoencoder = AutoencoderKlConfig {
            down_block_types: vec![DownBlockType::DownEncoderBlock2D; 2],
            up_block_types: vec![UpBlockType::UpDecoderBlock2D; 2],
            block_out_channels: vec![32, 64],
            ..AutoencoderKlConfig::default()
        }
        .into();
        let b = Builder::new();
        let latents = input(&b, "latents", &[1, 16, 8, 8]);
        let error = decode(&b, ROOT, &config, latents, Precision::F32).unwrap_err();
        assert_eq!(
            error.to_string(),
            "vae/: latents f32[1,16,8,8] have 16 channels; latent_channels is 4"
        );
        let images = input(&b, "images", &[1, 3, 8, 9]);
        let error = encode(&b, ROOT, &config, images, Precision::F32).unwrap_err();
        assert!(
            error.to_string().contains("must be multiples of 2"),
            "{error}"
        );
        let images = input(&b, "grey", &[1, 1, 8, 8]);
        let error = encode(&b, ROOT, &config, images, Precision::F32).unwrap_err();
        assert!(error.to_string().contains("in_channels is 3"), "{error}");
    }

    #[test]
    fn images_that_are_not_finite_are_refused() {
        let mut values = vec![0.5; 12];
        let decoded = |values: &[f32]| HostTensor::from_f32([1, 3, 2, 2], values).unwrap();
        assert!(check_finite(&decoded(&values)).is_ok());
        values[3] = f32::NAN;
        values[7] = f32::NEG_INFINITY;
        let error = check_finite(&decoded(&values)).unwrap_err().to_string();
        assert!(error.starts_with("2 of 12 decoded values"), "{error}");
        // 7e4 is finite in f32 and not in f16.
        let large = HostTensor::from_f32([1], &[7e4]).unwrap();
        assert!(check_finite(&large).is_ok());
        assert!(check_finite(&large.convert(DType::F16).unwrap()).is_err());
    }
}
