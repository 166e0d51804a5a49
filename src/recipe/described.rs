//! How a checkpoint stores its weights, where only its description is read.

use std::path::Path;

use crate::config::{self, Config};
use crate::graph::{Granularity, TensorFormat};
use crate::models::FamilySpec;
use crate::quant::Policy;
use crate::topology::{Chip, Format};
use crate::weights::quantized::Quantization;

use super::formats::{
    Recorded, activation_formats, check_weights_alone, policy, policy_of_checkpoint,
};
use super::model::is_described;
use super::{Notice, Notify, RecipeError};

/// How the checkpoint that the configuration names stores its denoiser's weights, by its `config.json` alone, and where that is;
/// `None` for float weights, and for a model that is not described here.
fn described_quantization(config: &Config) -> Result<Option<(Quantization, String)>, RecipeError> {
    if !is_described(config) {
        return Ok(None);
    }
    let (place, fields) = config.stored_denoiser_config()?;
    let stored =
        Quantization::of_config(Path::new(&place), &fields).map_err(RecipeError::failed)?;
    Ok(stored.map(|stored| (stored, place)))
}

/// [`policy_of_checkpoint`] for the checkpoint that the configuration names, whose weights need not be here.
///
/// # Errors
/// As [`policy_of_checkpoint`], and when the description is none that is read here.
pub fn described_policy(
    config: &Config,
    family: &FamilySpec,
) -> Result<Option<Policy>, RecipeError> {
    let Some((stored, place)) = described_quantization(config)? else {
        // Recorded scales are inputs of the program, whose values it need not know.
        let policy = policy(config, family, 0)?;
        check_weights_alone(policy.as_ref(), Recorded::AreInputs)?;
        return Ok(policy);
    };
    policy_of_checkpoint(config, Some(&stored), Path::new(&place), family)
}

/// Refuses a quantization the chip has no units for, and tells of one that gains no time there.
///
/// # Errors
/// Names the format and the chip.
pub fn check_formats(
    config: &Config,
    chip: Chip,
    notify: &mut Notify<'_>,
) -> Result<(), RecipeError> {
    if config.quantization_emulate {
        // Products are of floats.
        return Ok(());
    }
    // Weights alone are multiplied in the activations' type.
    let activations: Vec<TensorFormat> =
        match (config.quantization, described_quantization(config)?) {
            (config::Quantization::Off, Some((stored, _))) => {
                let layers = stored.layers.values();
                layers.filter_map(|layer| layer.activation).collect()
            }
            _ => activation_formats(config)?,
        };
    // Those that groups of features have scales for are multiplied as floats.
    let is_grouped = |format: &TensorFormat| matches!(format.granularity, Granularity::Group(_));
    for (format, is_float) in [(Format::Int8, false), (Format::Fp8, true)] {
        let mut products = activations.iter().filter(|format| !is_grouped(format));
        if !products.any(|format| format.element.is_float() == is_float) {
            continue;
        }
        let speedup = chip
            .speedup(format)
            .map_err(|e| RecipeError::Usage(format!("quantization={format}: {e}")))?;
        if speedup <= 1.0 {
            notify(Notice::Warning(&format!(
                "quantization={format} saves memory but no time on {chip}: {format} runs at the rate of bf16 there"
            )));
        }
    }
    Ok(())
}
