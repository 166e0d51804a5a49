//! What enlarges samples between the two passes of a hi-res fix.

use crate::util::named;

use super::interpolate::Interpolation;

named! {
    /// What a hi-res fix enlarges, and how.
    pub enum HiresUpscaler {
        /// The latents, bilinearly.
        Latent = "latent" | "Latent",
        /// The latents, each place as the nearest one.
        LatentNearest = "latent_nearest" | "Latent (nearest)",
        /// The latents, bicubically.
        LatentBicubic = "latent_bicubic" | "Latent (bicubic)",
        /// The decoded image, by Lanczos's filter; it is encoded again.
        Lanczos = "lanczos" | "Lanczos",
    }
}

impl HiresUpscaler {
    /// The name in web interfaces.
    pub fn web_name(self) -> &'static str {
        self.aliases().first().copied().unwrap_or(self.name())
    }

    /// How latents are enlarged; `None` where images are.
    pub fn of_latents(self) -> Option<Interpolation> {
        match self {
            HiresUpscaler::Latent => Some(Interpolation::Bilinear),
            HiresUpscaler::LatentNearest => Some(Interpolation::Nearest),
            HiresUpscaler::LatentBicubic => Some(Interpolation::Bicubic),
            HiresUpscaler::Lanczos => None,
        }
    }
}

/// From the samples of the first pass to those of the second, with the programs for it.
pub(super) enum Upscaling<D, E> {
    Latents(Interpolation),
    /// Images are decoded at the small size, enlarged, and encoded at the large one.
    Images {
        decoder: D,
        encoder: E,
    },
}

impl<D, E> Upscaling<D, E> {
    /// The decoder and the encoder, if it takes them.
    pub(super) fn programs(&self) -> Option<(&D, &E)> {
        match self {
            Upscaling::Latents(_) => None,
            Upscaling::Images { decoder, encoder } => Some((decoder, encoder)),
        }
    }
}
