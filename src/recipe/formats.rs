//! Element types, precision and quantization.

use std::collections::BTreeSet;
use std::path::Path;

use crate::config::{self, Config};
use crate::graph::{NumericsConvention, TensorFormat};
use crate::models::FamilySpec;
use crate::nn::Precision;
use crate::quant::{Action, Decision, Policy, Rule};
use crate::weights::quantized::Quantization;

use super::RecipeError;

/// Element types of weights and activations.
pub fn precision(config: &Config) -> Precision {
    Precision {
        weights: config.weights_dtype.into(),
        activations: config.activations_dtype.into(),
    }
}

/// The quantization policy for a denoiser with float weights, or `None` when quantization is off.
///
/// `family` says which layers stay in float, `local_shards` is the number of parts of range finding in weight gradients.
pub fn policy(
    config: &Config,
    family: &FamilySpec,
    local_shards: usize,
) -> Result<Option<Policy>, RecipeError> {
    let root = format!("{}/", family.denoiser.part());
    let float_layers = family.int8_float_layers;
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

/// The quantization policy for a UNet to run whose weights are as the checkpoint at `place` stores them: quantized, or
/// in float.
///
/// # Errors
/// When the configuration contradicts the checkpoint.
pub fn policy_of_checkpoint(
    config: &Config,
    stored: Option<&Quantization>,
    place: &Path,
    family: &FamilySpec,
) -> Result<Option<Policy>, RecipeError> {
    let Some(stored) = stored else {
        return policy(config, family, 0);
    };
    let place = place.display();
    if !config.quant_rules.0.is_empty() {
        return Err(RecipeError::Usage(format!(
            "quant_rules has no effect: {place} is quantized already, and its layers were chosen then; leave quant_rules \
             out, or give it to `maxdiff-rs quantize` with the float checkpoint"
        )));
    }
    let conventions: BTreeSet<&str> = stored
        .weights
        .values()
        .map(|f| f.convention.name())
        .collect();
    let only = |convention: NumericsConvention| conventions.iter().eq([&convention.name()]);
    if config.use_qwix_quantization && !only(NumericsConvention::Qwix) {
        return Err(RecipeError::Usage(format!(
            "use_qwix_quantization=True: the weights of {place} were quantized with AQT's numerics; leave it out, or quantize \
             the float checkpoint with it"
        )));
    }
    let activations = match config.quantization {
        config::Quantization::Off => stored.activations,
        config::Quantization::Int8W8A16 => None,
        config::Quantization::Int8 if only(NumericsConvention::Aqt) => {
            Some(TensorFormat::int8(NumericsConvention::Aqt))
        }
        config::Quantization::Int8 => {
            return Err(RecipeError::Usage(format!(
                "quantization=int8: the weights of {place} were quantized with Qwix's numerics, whose int8 also quantizes \
                 products of two activations; leave quantization out, or name the float checkpoint"
            )));
        }
    };
    let root = format!("{}/", family.denoiser.part());
    Ok(Some(Policy::stored(
        &root,
        stored.weights.clone(),
        activations,
    )))
}

/// The name of the mode that a policy is.
pub fn mode_name(policy: Option<&Policy>) -> &'static str {
    let mode = match policy.map(|policy| policy.formats.activation) {
        None => config::Quantization::Off,
        Some(None) => config::Quantization::Int8W8A16,
        Some(Some(_)) => config::Quantization::Int8,
    };
    mode.name()
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
    let stored = match policy.stored.is_empty() {
        true => "",
        false => ", weights as stored",
    };
    format!(
        "{what} ({convention} numerics{stored}): {quantized} of {} dots and convolutions of {}",
        decisions.len(),
        policy.model.trim_end_matches('/')
    )
}
