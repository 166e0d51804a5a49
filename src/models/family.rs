//! The families of models. [`Family`] and [`Family::spec`] are the one list of them: configuration, hub, weights, LoRA,
//! pipelines and training read the descriptions, and none of them names a family for itself.

use super::spec::{FamilySpec, Published, Signs};
use super::{flux, pixart, pixels, sd1, sd2, sd3, sdxl, sdxl_refiner};
use crate::util::named;

named! {
    /// The families that are built here, the plainest published one first.
    pub enum Family {
        /// Stable Diffusion 1.x.
        Sd1 = "sd1",
        /// Stable Diffusion 2.x.
        Sd2 = "sd2",
        /// SDXL base.
        Sdxl = "sdxl",
        /// SDXL's refiner.
        SdxlRefiner = "sdxl_refiner",
        /// Stable Diffusion 3 medium.
        Sd3 = "sd3",
        /// Stable Diffusion 3.5 medium.
        Sd35Medium = "sd35_medium",
        /// Stable Diffusion 3.5 large.
        Sd35Large = "sd35_large",
        /// FLUX.1 dev.
        FluxDev = "flux_dev",
        /// FLUX.1 schnell.
        FluxSchnell = "flux_schnell",
        /// PixArt-alpha.
        PixArtAlpha = "pixart_alpha",
        /// PixArt-Sigma.
        PixArtSigma = "pixart_sigma",
        /// A UNet on the pixels of small images.
        Pixels = "pixels",
    }
}

impl Family {
    /// The line of each family: its description, and the families that can take the last steps of its samples.
    const fn entry(self) -> (&'static FamilySpec, &'static [Family]) {
        match self {
            Family::Sd1 => (&sd1::SPEC, &[]),
            Family::Sd2 => (&sd2::SPEC, &[]),
            Family::Sdxl => (&sdxl::SPEC, &[Family::SdxlRefiner, Family::Sdxl]),
            Family::SdxlRefiner => (&sdxl_refiner::SPEC, &[]),
            Family::Sd3 => (&sd3::family::MEDIUM, &[]),
            Family::Sd35Medium => (&sd3::family::MEDIUM_35, &[]),
            Family::Sd35Large => (&sd3::family::LARGE_35, &[]),
            Family::FluxDev => (&flux::family::DEV, &[]),
            Family::FluxSchnell => (&flux::family::SCHNELL, &[]),
            Family::PixArtAlpha => (&pixart::family::ALPHA, &[]),
            Family::PixArtSigma => (&pixart::family::SIGMA, &[]),
            Family::Pixels => (&pixels::SPEC, &[]),
        }
    }

    /// Everything that is particular to this family.
    pub const fn spec(self) -> &'static FamilySpec {
        self.entry().0
    }

    /// The families that can take the last steps of its samples.
    pub const fn refiners(self) -> &'static [Family] {
        self.entry().1
    }

    /// The name in messages.
    pub const fn title(self) -> &'static str {
        self.spec().title
    }

    /// The families that people publish, whose files can be opened.
    pub fn published() -> impl Iterator<Item = (Family, &'static Published)> {
        let all = Family::ALL.into_iter();
        all.filter_map(|family| Some((family, family.spec().published.as_ref()?)))
    }

    /// The family of a repository on the hub whose architecture is built in.
    pub fn of_repository(name: &str) -> Option<(Family, &'static Published)> {
        Family::published().find(|(_, published)| published.repositories.contains(&name))
    }

    /// The first published family whose denoiser attends to text of this many features.
    pub fn of_text_features(features: usize) -> Option<(Family, &'static Published)> {
        Family::published().find(|(_, published)| published.text_features == features)
    }

    /// The family of a model in diffusers' layout; what no other family claims is of the first, the plainest.
    pub fn of_folder(signs: &Signs) -> Family {
        let mut from_last = Family::ALL.into_iter().rev();
        let found = from_last.find(|family| (family.spec().claims)(signs));
        found.unwrap_or(Family::ALL[0])
    }
}

/// A family that is recognized so that it is refused by its name.
#[derive(Debug)]
pub struct Unsupported {
    pub name: &'static str,
    /// How its pipelines' class names begin.
    pub pipeline: &'static str,
    /// A tensor of its single files, if that tells them from those of other families.
    pub tensor: Option<&'static str>,
    /// Keys that MaxDiffusion's recipes for it have, each with how its value begins.
    pub recipe: &'static [(&'static str, &'static str)],
}

const REPOSITORY: &str = "pretrained_model_name_or_path";

/// The families that are known and not built: the first whose sign is there is meant. Facts: diffusers'
/// `loaders/single_file_utils.py`, and MaxDiffusion's recipes at 7cfb8801.
pub const UNSUPPORTED: [Unsupported; 7] = [
    Unsupported {
        name: "FLUX.2",
        pipeline: "Flux2",
        tensor: Some("single_stream_modulation.lin.weight"),
        recipe: &[
            ("flux_name", "flux2"),
            (REPOSITORY, "black-forest-labs/FLUX.2"),
        ],
    },
    Unsupported {
        name: "FLUX.1 Kontext",
        pipeline: "FluxKontext",
        tensor: None,
        recipe: &[(REPOSITORY, "black-forest-labs/FLUX.1-Kontext")],
    },
    Unsupported {
        name: "FLUX.1 Redux",
        pipeline: "FluxPriorRedux",
        tensor: None,
        recipe: &[(REPOSITORY, "black-forest-labs/FLUX.1-Redux")],
    },
    Unsupported {
        name: "LTX-2",
        pipeline: "LTX2",
        tensor: Some("av_ca_a2v_gate_adaln_single.emb.timestep_embedder.linear_1.weight"),
        recipe: &[("model_name", "ltx2"), (REPOSITORY, "Lightricks/LTX-2")],
    },
    Unsupported {
        name: "LTX-Video",
        pipeline: "LTX",
        tensor: Some("patchify_proj.weight"),
        recipe: &[
            (REPOSITORY, "Lightricks/LTX-Video"),
            ("spatial_upscaler_model_path", "ltxv"),
        ],
    },
    Unsupported {
        name: "Wan",
        pipeline: "Wan",
        tensor: Some("head.modulation"),
        recipe: &[("model_name", "wan"), (REPOSITORY, "Wan-AI/Wan")],
    },
    Unsupported {
        name: "Z-Image",
        pipeline: "ZImage",
        tensor: Some("layers.0.adaLN_modulation.0.weight"),
        recipe: &[
            ("model_name", "z_image"),
            (REPOSITORY, "Tongyi-MAI/Z-Image"),
        ],
    },
];

#[cfg(test)]
mod tests {

    use serde_json::{Map, Value};

    use super::*;
    use crate::config::Recipe;
    use crate::models::vae::AutoencoderKlConfig;
    use crate::models::{Denoiser, Part, SampleSpace};
    use crate::schedulers::SchedulerConfig;

    fn object(text: &str) -> Map<String, Value> {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn what_is_published_can_be_read_and_is_of_its_family() {
        for (family, published) in Family::published() {
            let spec = family.spec();
            let fields = object(published.denoiser);
            let denoiser = Denoiser::from_map(spec.denoiser, fields.clone()).unwrap();
            let vae = AutoencoderKlConfig::from_json(published.vae).unwrap();
            let space = SampleSpace::latents(&vae.into());
            space.check(&denoiser).unwrap();
            SchedulerConfig::from_map(&object(published.scheduler)).unwrap();
            object(published.index);
            let name = match &denoiser {
                Denoiser::Unet(_) => "cross_attention_dim",
                Denoiser::Flux(_) | Denoiser::Sd3(_) => "joint_attention_dim",
                Denoiser::PixArt(_) => "caption_channels",
            };
            let features = fields[name].as_u64().unwrap() as usize;
            assert_eq!(published.text_features, features, "{family}");
            let has = |part: Part| spec.parts().contains(&part);
            let signs = Signs {
                denoiser: &fields,
                has: &has,
            };
            assert_eq!(Family::of_folder(&signs), family);
        }
    }

    #[test]
    fn every_family_has_its_recipe_and_names_of_its_own() {
        for family in Family::ALL {
            let spec = family.spec();
            assert!(Recipe::named(spec.recipe).is_some(), "{}", spec.recipe);
            let same = |other: &Family| {
                let other = other.spec();
                other.title == spec.title || other.recipe == spec.recipe
            };
            assert_eq!(Family::ALL.iter().filter(|other| same(other)).count(), 1);
        }
    }
}
