//! What AMD Quark's guide does with each kind of model
//! (`examples/torch/diffusers/example_quark_torch_diffusers.rst` of <https://github.com/amd/Quark>).

use crate::config::{Config, QuantPreset};
use crate::models::{DenoiserKind, FamilySpec};

/// Layers that stay in float, as regular expressions for whole paths, and the arguments of the pipeline that calibrates.
struct Preset {
    float_layers: &'static [&'static str],
    guidance_scale: Option<f64>,
    /// Height and width in pixels.
    side: Option<u64>,
}

const UNET: Preset = Preset {
    float_layers: &[
        ".*time_embedding.*",
        ".*add_time_proj.*",
        ".*conv_in.*",
        ".*conv_out.*",
    ],
    guidance_scale: Some(8.0),
    side: None,
};

const SD3: Preset = Preset {
    float_layers: &[
        ".*time_text_embed.*",
        ".*context_embedder.*",
        ".*pos_embed.*",
        ".*norm_out.*",
        ".*proj_out.*",
    ],
    guidance_scale: None,
    side: None,
};

/// `.*proj_out.*` also takes the last layer of each single block, some 15 % of the weights: the report says so.
const FLUX: Preset = Preset {
    float_layers: &[
        ".*x_embedder.*",
        ".*context_embedder.*",
        ".*time_text_embed.*",
        ".*norm_out.*",
        ".*proj_out.*",
        r".*norm1\.linear.*",
        r".*norm1_context\.linear.*",
    ],
    guidance_scale: Some(3.5),
    side: Some(1024),
};

fn quark(kind: DenoiserKind) -> &'static Preset {
    match kind {
        DenoiserKind::Unet => &UNET,
        DenoiserKind::Sd3 | DenoiserKind::PixArt => &SD3,
        DenoiserKind::Flux => &FLUX,
    }
}

/// The layers of a denoiser that stay in float where no rule of the configuration decides.
pub(super) fn float_layers(config: &Config, family: &FamilySpec) -> &'static [&'static str] {
    match config.quantization_preset {
        QuantPreset::Family => family.int8_float_layers,
        QuantPreset::Quark => quark(family.denoiser).float_layers,
    }
}

/// The configuration of calibration with the preset's arguments where it has none.
pub(super) fn with_arguments(mut config: Config, kind: DenoiserKind) -> Config {
    if config.quantization_preset == QuantPreset::Quark {
        let preset = quark(kind);
        let calibration = &mut config.calibration;
        calibration.guidance_scale = calibration.guidance_scale.or(preset.guidance_scale);
        for side in [&mut calibration.height, &mut calibration.width] {
            if *side == 0 {
                *side = preset.side.unwrap_or(0);
            }
        }
    }
    config
}
