//! The space of a denoiser's samples: pixels or latents.

use super::flux::PATCH;
use super::vae::Autoencoder;
use super::{Denoiser, ModelConfigError};

/// Channels of a pixel.
pub const RGB: usize = 3;

/// The meaning of one position of a denoiser's sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SampleSpace {
    /// `block x block` pixels of the image, each with its red, green and blue.
    Pixels { block: usize },
    /// A latent of an autoencoder, which stands for `factor x factor` pixels.
    Latents { channels: usize, factor: usize },
}

impl SampleSpace {
    /// The latents of this autoencoder.
    pub fn latents(vae: &Autoencoder) -> SampleSpace {
        SampleSpace::Latents {
            channels: vae.latent_channels(),
            factor: vae.spatial_multiple(),
        }
    }

    /// Channels of a sample.
    pub fn channels(self) -> usize {
        match self {
            SampleSpace::Pixels { block } => RGB * block * block,
            SampleSpace::Latents { channels, .. } => channels,
        }
    }

    /// Rows of pixels to a row of the sample, of which height and width of an image are multiples.
    pub fn factor(self) -> usize {
        match self {
            SampleSpace::Pixels { block } => block,
            SampleSpace::Latents { factor, .. } => factor,
        }
    }

    /// Checks that a denoiser's inputs and outputs are samples of this space, the inputs maybe with what [`SeenImage`]
    /// says.
    ///
    /// [`SeenImage`]: super::SeenImage
    ///
    /// # Errors
    /// Names the channels that were found and those that are expected.
    pub fn check(self, denoiser: &Denoiser) -> Result<(), ModelConfigError> {
        let channels = self.channels();
        let inpainting = 2 * channels + 1;
        let (found, out) = match denoiser {
            Denoiser::Unet(config) => (config.in_channels, config.out_channels),
            Denoiser::Flux(config) => (config.in_channels, config.out_channels()),
            Denoiser::Sd3(config) => (config.in_channels, config.out_channels()),
            // Without the variance that some predict too.
            Denoiser::PixArt(config) => (config.in_channels, config.in_channels),
        };
        let ((taken, expected), made) = match (denoiser, self) {
            (Denoiser::Flux(_), _) => {
                let packed = |channels: usize| channels * PATCH * PATCH;
                let own = packed(channels);
                let [control, fill] = [2 * own, 2 * own + packed(self.factor() * self.factor())];
                let expected = format!(
                    "{own}, the {channels} channels of {PATCH}x{PATCH} latents, {control} with a control image, or {fill} \
                     with a masked image and the pixels of its mask"
                );
                ((vec![own, control, fill], expected), own)
            }
            (Denoiser::Sd3(_) | Denoiser::PixArt(_), _) => {
                let expected = format!("{channels}, the channels of the autoencoder's latents");
                ((vec![channels], expected), channels)
            }
            (Denoiser::Unet(_), SampleSpace::Pixels { block }) => (
                (
                    vec![channels],
                    format!("{channels}, the colours of {block}x{block} pixels"),
                ),
                channels,
            ),
            (Denoiser::Unet(_), SampleSpace::Latents { .. }) => (
                (
                    vec![channels, inpainting],
                    format!(
                        "{channels}, the channels of the autoencoder's latents, or {inpainting} for inpainting; a \
                     pixel-space model has {RGB} * pixel_unshuffle^2"
                    ),
                ),
                channels,
            ),
        };
        let unsupported = |field: &str, found: usize, expected: String| {
            Err(ModelConfigError::Unsupported {
                model: denoiser.class(),
                field: field.to_owned(),
                found: found.to_string(),
                expected,
            })
        };
        if !taken.contains(&found) {
            return unsupported("in_channels", found, expected);
        }
        if out != made {
            let expected = format!("{made}, those of the sample");
            return unsupported("out_channels", out, expected);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::unet::UNet2DConditionConfig;
    use crate::models::vae::AutoencoderKlConfig;

    #[test]
    fn channels_are_those_of_pixels_or_latents_or_refused_by_their_number() {
        let unet = |in_channels| UNet2DConditionConfig {
            in_channels,
            out_channels: match in_channels {
                9 => 4,
                channels => channels,
            },
            ..UNet2DConditionConfig::default()
        };
        let vae = AutoencoderKlConfig {
            block_out_channels: vec![64; 3],
            ..AutoencoderKlConfig::default()
        };
        let latents = SampleSpace::latents(&vae.into());
        assert_eq!((latents.channels(), latents.factor()), (4, 4));
        let block = SampleSpace::Pixels { block: 2 };
        assert_eq!((block.channels(), block.factor()), (12, 2));
        for channels in 1..20 {
            let fits = |space: SampleSpace| {
                let unet = Denoiser::Unet(unet(channels).into());
                space.check(&unet).is_ok()
            };
            assert_eq!(fits(latents), [4, 9].contains(&channels));
            assert_eq!(fits(block), channels == 12);
        }
        let wide = UNet2DConditionConfig {
            out_channels: 8,
            ..unet(4)
        };
        let error = |unet: UNet2DConditionConfig| {
            let error = latents.check(&Denoiser::Unet(unet.into()));
            error.unwrap_err().to_string()
        };
        let wide = error(wide);
        assert!(
            wide.contains("out_channels = 8 is not supported; expected 4"),
            "{wide}"
        );
        assert_eq!(
            error(unet(5)),
            "UNet2DConditionModel: in_channels = 5 is not supported; expected 4, the channels of the autoencoder's \
             latents, or 9 for inpainting; a pixel-space model has 3 * pixel_unshuffle^2"
        );
    }
}
