//! The formats of weights that a checkpoint has, quantized or in float, and what they are multiplied in.

use std::path::Path;

use crate::config::{self, Config};
use crate::dtype::DType;
use crate::graph::{Granularity, NumericsConvention, Range, TensorFormat};
use crate::models::FamilySpec;
use crate::quant::{Action, Policy, StoredLayer};
use crate::weights::quantized::Quantization;

use super::super::RecipeError;
use super::names::{format_text, mode_of, mode_of_layer, title, weight_mode};
use super::{Activations, activations_of, arithmetic, policy};

/// The format of activations that are multiplied with int8 weights of this format in int8, by scales that are found at run time;
/// `None` where there is none. (Qwix's rules are of more than weights.)
fn int8_activation(weight: TensorFormat) -> Option<TensorFormat> {
    let numerics = [NumericsConvention::Aqt, NumericsConvention::Narrow];
    let found = TensorFormat {
        range: Range::Dynamic,
        ..weight
    };
    let has =
        numerics.contains(&weight.convention) && found == TensorFormat::int8(weight.convention);
    has.then_some(found)
}

/// The format of activations that are multiplied with int4 weights of this format in int4; `None` where there is none.
fn int4_activation(weight: TensorFormat) -> Option<TensorFormat> {
    let has = weight.element == DType::S4
        && weight.convention.has_activations()
        && !weight.zero_point
        && weight.granularity != Granularity::Tensor;
    has.then_some(TensorFormat {
        range: Range::Dynamic,
        ..weight
    })
}

/// The format of activations that are multiplied with fp8 weights of this format in fp8, where the checkpoint says nothing of
/// them; `None` where there is none.
fn fp8_activation(weight: TensorFormat) -> Option<TensorFormat> {
    let has = weight.element == DType::F8E4M3Fn
        && [NumericsConvention::Quark, NumericsConvention::Qwix].contains(&weight.convention)
        && weight.scales_results();
    has.then_some(TensorFormat::float8(DType::F8E4M3Fn, Granularity::Channel))
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
        let policy = policy(config, family, 0)?;
        check_weights_alone(policy.as_ref(), Recorded::AreMissing)?;
        return Ok(policy);
    };
    let place = place.display();
    let refuse = |problem: String| Err(RecipeError::Usage(problem));
    for (key, is_given) in [
        ("quant_rules", !config.quant_rules.0.is_empty()),
        (
            "quantization_granularity",
            config.quantization_granularity.0.is_some(),
        ),
        ("quantization_symmetric", !config.quantization_symmetric),
    ] {
        if is_given {
            return refuse(format!(
                "{key} has no effect: {place} is quantized already, and its formats were chosen then; leave {key} out, or give \
                 it to `maxdiff-rs quantize` with the float checkpoint"
            ));
        }
    }
    let weights = || stored.layers.values().map(|layer| layer.weight);
    let asked = match (config.use_qwix_quantization, config.quantization_numerics) {
        (true, _) => Some(("use_qwix_quantization=True", NumericsConvention::Qwix)),
        (false, asked) => asked.map(|asked| ("quantization_numerics", asked)),
    };
    if let Some((key, asked)) = asked
        && let Some(other) = weights().find(|w| w.convention != asked)
    {
        return refuse(format!(
            "{key}: weights of {place} were quantized with {}'s numerics; leave it out, or quantize the float checkpoint \
             with it",
            title(other.convention)
        ));
    }
    let mode = config.quantization;
    let mut layers = stored.layers.clone();
    let has_int4_activations = weights().any(|weight| int4_activation(weight).is_some());
    for (path, layer) in &mut layers {
        let fits = match mode {
            config::Quantization::Off => true,
            config::Quantization::Int8W8A16
            | config::Quantization::W4A16
            | config::Quantization::Fp8W8A16
            | config::Quantization::Nf4
            | config::Quantization::MxFp4
            | config::Quantization::MxFp6E2M3
            | config::Quantization::MxFp6E3M2
            | config::Quantization::MxFp8
            | config::Quantization::NvFp4 => {
                weight_mode(layer.weight) == mode
                    && !takes_over_scales(layer)
                    && layer.low_rank.is_none()
            }
            config::Quantization::Int8W8A8Static | config::Quantization::Fp8W8A8Static => {
                mode_of_layer(layer) == mode
            }
            config::Quantization::Fp8 => {
                fp8_activation(layer.weight).is_some()
                    && !takes_over_scales(layer)
                    && layer.low_rank.is_none()
            }
            // Of the derivative, which a checkpoint has none of.
            config::Quantization::Fp8Full => false,
            config::Quantization::SvdQuantW4A16 => {
                weight_mode(layer.weight) == config::Quantization::W4A16
            }
            config::Quantization::W4A4 => {
                int4_activation(layer.weight).is_some() && layer.low_rank.is_none()
            }
            // Weights with minimums, as nunchaku's modulations, keep their activations in float beside the others.
            config::Quantization::SvdQuantW4A4 => {
                int4_activation(layer.weight).is_some()
                    || has_int4_activations
                        && weight_mode(layer.weight) == config::Quantization::W4A16
            }
            config::Quantization::Int8 => int8_activation(layer.weight).is_some(),
        };
        if !fits {
            return refuse(format!(
                "quantization={mode}: the weight {path} of {place} is stored as {}, which has no such mode; leave \
                 quantization out, name the float checkpoint, or widen the weights first with dequantize=True",
                format_text(layer.weight)
            ));
        }
        if mode == config::Quantization::Off {
            continue;
        }
        layer.activation = match activations_of(mode) {
            Activations::Float => None,
            Activations::Recorded => layer.activation,
            Activations::AsWeights => int4_activation(layer.weight),
            Activations::Found if !layer.weight.element.is_float() => int8_activation(layer.weight),
            Activations::Found => match layer.activation {
                Some(written) if !written.has_stored_scale() => Some(written),
                _ => fp8_activation(layer.weight),
            },
        };
    }
    let root = format!("{}/", family.denoiser.part());
    let mut policy = Policy::stored(&root, layers);
    policy.arithmetic = arithmetic(config);
    Ok(Some(policy))
}

/// Whether a layer's weight has been multiplied by the scales of its activation's features, so that it means nothing without
/// them.
pub(in crate::recipe) fn takes_over_scales(layer: &StoredLayer) -> bool {
    let activation = layer.activation.filter(|format| format.has_stored_scale());
    activation.is_some_and(|format| format.granularity == Granularity::Feature)
}

/// The scales of activations that calibration finds, where there are float weights.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::recipe) enum Recorded {
    AreMissing,
    /// Nothing runs, and the program has them as inputs.
    AreInputs,
}

/// Refuses modes that need more than the weights of a float checkpoint.
///
/// # Errors
/// When a rule or the mode needs calibration or a decomposition, which `quantize` does.
pub(in crate::recipe) fn check_weights_alone(
    policy: Option<&Policy>,
    recorded: Recorded,
) -> Result<(), RecipeError> {
    let rules = policy.iter().flat_map(|policy| &policy.rules);
    for rule in rules {
        let Action::Quantize(formats) = rule.action() else {
            continue;
        };
        let is_static = formats
            .activation
            .is_some_and(TensorFormat::has_stored_scale);
        let needs_scales = is_static && recorded == Recorded::AreMissing;
        let on_host = formats
            .weight
            .is_some_and(|weight| !weight.convention.is_of_programs());
        let problem = match (needs_scales, formats.low_rank, on_host) {
            (true, _, _) => "needs the scales of activations, which calibration finds",
            (false, true, _) => "needs the low-rank parts of weights",
            (false, false, true) => {
                "needs weights in these numerics, which are quantized by `maxdiff-rs quantize` alone"
            }
            (false, false, false) => continue,
        };
        return Err(RecipeError::Usage(format!(
            "quantization={}: it {problem}; run `maxdiff-rs quantize` with this mode, and name the folder that \
             it writes",
            mode_of(&formats)
        )));
    }
    Ok(())
}
