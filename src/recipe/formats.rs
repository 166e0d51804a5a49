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
/// `float_layers` are those that the model's family leaves in float, `local_shards` is the number of parts of range
/// finding in weight gradients.
pub fn policy(
    config: &Config,
    float_layers: &[&str],
    local_shards: usize,
) -> Result<Option<Policy>, RecipeError> {
    let root = format!("{ROOT}/");
    let mut rules = Vec::new();
    for rule in &config.quant_rules.0 {
        let action = match rule.dtype {
            config::QuantRuleType::None => Action::Float,
            config::QuantRuleType::Int8 => Action::Quantize,
        };
        rules.push(Rule::new(&rule.path, action, true).map_err(RecipeError::usage)?);
    }
    let policy = match (config.quantization, config.use_qwix_quantization) {
        (config::Quantization::Off, _) => return Ok(None),
        (config::Quantization::Int8, false) => {
            Policy::aqt_int8(&root, local_shards, rules, float_layers)
        }
        (config::Quantization::Int8, true) => Policy::qwix_int8(&root, ".*", rules),
        (config::Quantization::Int8W8A16, qwix) => {
            let convention = match qwix {
                false => NumericsConvention::Aqt,
                true => NumericsConvention::Qwix,
            };
            Policy::int8_w8a16(&root, convention, rules, float_layers)
        }
    };
    policy.map(Some).map_err(RecipeError::usage)
}

/// One line that says what quantization does.
pub fn quantization_summary(policy: &Policy, decisions: &[Decision]) -> String {
    let quantized = decisions.iter().filter(|d| d.quantized).count();
    let convention = match policy.formats.convention() {
        NumericsConvention::Aqt => "AQT",
        NumericsConvention::Qwix => "Qwix",
    };
    let what = match policy.formats.activation {
        Some(_) => "int8",
        None => "int8 weights",
    };
    format!(
        "{what} ({convention} numerics): {quantized} of {} dots and convolutions of {}",
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
        // Integers of weights alone are multiplied in the activations' type.
        config::Quantization::Off | config::Quantization::Int8W8A16 => Ok(()),
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
