//! Element types, precision and quantization.

use crate::config::{self, Config};
use crate::graph::NumericsConvention;
use crate::models::unet::ROOT;
use crate::nn::Precision;
use crate::quant::{Action, Decision, Policy, Rule};
use crate::topology::{Chip, Format};

use super::{Notice, Notify, RecipeError};

/// Element types of weights and activations.
pub fn precision(config: &Config) -> Precision {
    Precision {
        weights: config.weights_dtype.into(),
        activations: config.activations_dtype.into(),
    }
}

/// The quantization policy for the UNet, or `None` when quantization is off.
///
/// `local_shards` is the number of parts of range finding in weight gradients.
pub fn policy(config: &Config, local_shards: usize) -> Result<Option<Policy>, RecipeError> {
    if config.quantization == config::Quantization::Off {
        return Ok(None);
    }
    let root = format!("{ROOT}/");
    let mut rules = Vec::new();
    for rule in &config.quant_rules.0 {
        let action = match rule.dtype {
            config::QuantRuleType::None => Action::Float,
            config::QuantRuleType::Int8 => Action::Int8,
        };
        rules.push(Rule::new(&rule.path, action, true).map_err(RecipeError::usage)?);
    }
    let policy = if config.use_qwix_quantization {
        let mut policy = Policy::qwix_int8(&root, ".*").map_err(RecipeError::usage)?;
        rules.append(&mut policy.rules);
        policy.rules = rules;
        policy
    } else {
        Policy::aqt_int8(&root, local_shards, rules).map_err(RecipeError::usage)?
    };
    Ok(Some(policy))
}

/// One line that says what quantization does.
pub fn quantization_summary(policy: &Policy, decisions: &[Decision]) -> String {
    let quantized = decisions.iter().filter(|d| d.quantized).count();
    let convention = match policy.convention {
        NumericsConvention::Aqt => "AQT",
        NumericsConvention::Qwix => "Qwix",
    };
    format!(
        "int8 ({convention} numerics): {quantized} of {} dots and convolutions of {}",
        decisions.len(),
        policy.model.trim_end_matches('/')
    )
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
    match config.quantization {
        config::Quantization::Off => Ok(()),
        config::Quantization::Int8 => {
            let speedup = chip
                .speedup(Format::Int8)
                .map_err(|e| RecipeError::Usage(format!("quantization=int8: {e}")))?;
            if speedup <= 1.0 {
                notify(Notice::Warning(&format!(
                    "quantization=int8 saves memory but no time on {chip}: int8 runs at the rate of bf16 there"
                )));
            }
            Ok(())
        }
    }
}
