//! LoRAs that let FLUX.1 see an image that steers.

use serde_json::Value;

use crate::config::Config;
use crate::models::DenoiserKind;
use crate::models::flux::FluxTransformer2DConfig;
use crate::weights::lora::LoraFile;
use crate::weights::source::{ModelSource, PipelineKind};

use super::RecipeError;
use super::lora::loras;

/// Lets FLUX.1 see an image that steers where one of the configuration's LoRAs reads its latents beside the sample's: Black
/// Forest Labs' Canny and Depth.
///
/// # Errors
/// When a LoRA cannot be read, or the model's layer cannot be widened.
pub(super) fn widen_tokens(config: &Config, source: &mut ModelSource) -> Result<(), RecipeError> {
    let spec = source.family.spec();
    if spec.denoiser != DenoiserKind::Flux || source.kind != PipelineKind::Text {
        return Ok(());
    }
    let denoiser = source.component(spec.denoiser.part());
    let denoiser = denoiser.map_err(RecipeError::failed)?;
    let own = denoiser.config.get("in_channels").and_then(Value::as_u64);
    let own = own.unwrap_or(FluxTransformer2DConfig::default().in_channels as u64) as usize;
    for lora in loras(config)?.iter().filter(|lora| lora.scale != 0.0) {
        let file = LoraFile::open(&lora.path).map_err(RecipeError::failed)?;
        if file.token_features() == Some(2 * own) {
            return source.widen_tokens(2 * own).map_err(RecipeError::failed);
        }
    }
    Ok(())
}
