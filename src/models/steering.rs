//! ControlNets of all kinds.

use super::controlnet::ControlNetConfig;
use super::flux::FluxControlNetConfig;
use super::{DenoiserKind, ModelConfigError};

/// A ControlNet, by its configuration.
#[derive(Clone, Debug, PartialEq)]
pub enum ControlNet {
    /// Of a UNet: it sees an image's pixels.
    Unet(Box<ControlNetConfig>),
    /// Of FLUX.1's transformer: it sees an image's latents.
    Flux(Box<FluxControlNetConfig>),
}

impl ControlNet {
    /// Reads and checks the `config.json` of a ControlNet for a denoiser of this kind.
    ///
    /// # Errors
    /// When it is of another class, asks for something that is not built here, or contradicts itself.
    pub fn from_json(kind: DenoiserKind, text: &str) -> Result<ControlNet, ModelConfigError> {
        match kind {
            DenoiserKind::Unet => Ok(ControlNet::Unet(ControlNetConfig::from_json(text)?.into())),
            DenoiserKind::Flux => Ok(ControlNet::Flux(
                FluxControlNetConfig::from_json(text)?.into(),
            )),
            DenoiserKind::Sd3 | DenoiserKind::PixArt => Err(ModelConfigError::Inconsistent {
                model: kind.name(),
                message: "ControlNets for it are not built".to_owned(),
            }),
        }
    }

    /// Whether it sees the latents that the autoencoder gives of an image.
    pub fn sees_latents(&self) -> bool {
        match self {
            ControlNet::Unet(_) => false,
            ControlNet::Flux(_) => true,
        }
    }

    /// How many kinds of images it was trained on, of which one is chosen.
    pub fn modes(&self) -> Option<usize> {
        match self {
            ControlNet::Unet(_) => None,
            ControlNet::Flux(config) => config.num_mode,
        }
    }
}
