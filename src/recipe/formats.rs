//! Element types, precision and quantization.

mod names;
mod stored;

use crate::config::{self, Config};
use crate::dtype::DType;
use crate::graph::{Arithmetic, Granularity, NumericsConvention, Range, Rounding, TensorFormat};
use crate::models::FamilySpec;
use crate::nn::Precision;
use crate::quant::{Action, Formats, Policy, Rule};

use super::RecipeError;
use super::preset::float_layers;
use names::title;
pub use names::{format_text, mode_name, mode_of, mode_of_rule, quantization_summary};
pub use stored::policy_of_checkpoint;
pub(super) use stored::{Recorded, check_weights_alone, takes_over_scales};

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
///
/// # Errors
/// When what the configuration says does not fit together, or a rule says how `quantize` rounds.
pub fn policy(
    config: &Config,
    family: &FamilySpec,
    local_shards: usize,
) -> Result<Option<Policy>, RecipeError> {
    let mut rules = config.quant_rules.0.iter();
    match rules.find(|rule| rule.says_rounding()) {
        None => policy_of_quantize(config, family, local_shards),
        Some(rule) => Err(RecipeError::Usage(format!(
            "{}: observer and algorithm have no effect: they say how `maxdiff-rs quantize` rounds weights; leave them out, or give \
             the rule to it, and run what it writes",
            rule.path
        ))),
    }
}

/// [`policy`] where observers and algorithms of rules have an effect.
///
/// # Errors
/// When what the configuration says does not fit together.
pub(super) fn policy_of_quantize(
    config: &Config,
    family: &FamilySpec,
    local_shards: usize,
) -> Result<Option<Policy>, RecipeError> {
    let root = format!("{}/", family.denoiser.part());
    let float_layers = float_layers(config, family);
    let mut rules = Vec::new();
    for rule in &config.quant_rules.0 {
        let action = match rule_layers(config, rule) {
            None => Action::Float,
            Some(layers) => Action::Quantize(formats(config, &layers, local_shards)?),
        };
        rules.push(Rule::new(&rule.path, action, true).map_err(RecipeError::usage)?);
    }
    if config.quantization == config::Quantization::Off {
        return match config.quantization_emulate {
            false => Ok(None),
            true => Err(RecipeError::Usage(
                "quantization_emulate=True has no effect: nothing is quantized; name a mode with quantization, or a quantized \
                 checkpoint, or leave it out"
                    .to_owned(),
            )),
        };
    }
    let formats = formats(config, &mode_layers(config), local_shards)?;
    let policy = match has_qwix_rules(config) {
        true => Policy::qwix(&root, ".*", rules, formats),
        false => Policy::of_layers(&root, rules, float_layers, formats),
    };
    let mut policy = policy.map_err(RecipeError::usage)?;
    policy.where_faster = config.int8_where_faster;
    policy.arithmetic = arithmetic(config);
    Ok(Some(policy))
}

/// How products of rounded operands are computed.
fn arithmetic(config: &Config) -> Arithmetic {
    match config.quantization_emulate {
        true => Arithmetic::Emulated,
        false => Arithmetic::Native,
    }
}

/// Whether Qwix's rules say what is quantized: every dot and convolution. They are of modes that round activations as they
/// come.
fn has_qwix_rules(config: &Config) -> bool {
    match config.quantization {
        config::Quantization::Int8 => {
            numerics(config, config.quantization) == NumericsConvention::Qwix
        }
        mode => config.use_qwix_quantization && activations_of(mode) == Activations::Found,
    }
}

/// What a mode makes of the activations of layers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Activations {
    /// They stay in float.
    Float,
    /// They are rounded by scales that are found in them.
    Found,
    /// They are rounded by scales that calibration or training found.
    Recorded,
    /// They have the format of the weights that they meet.
    AsWeights,
}

pub(super) fn activations_of(mode: config::Quantization) -> Activations {
    match mode {
        config::Quantization::Int8 | config::Quantization::Fp8 | config::Quantization::Fp8Full => {
            Activations::Found
        }
        config::Quantization::Int8W8A8Static | config::Quantization::Fp8W8A8Static => {
            Activations::Recorded
        }
        config::Quantization::W4A4 | config::Quantization::SvdQuantW4A4 => Activations::AsWeights,
        config::Quantization::Off
        | config::Quantization::Int8W8A16
        | config::Quantization::W4A16
        | config::Quantization::Fp8W8A16
        | config::Quantization::Nf4
        | config::Quantization::MxFp4
        | config::Quantization::MxFp6E2M3
        | config::Quantization::MxFp6E3M2
        | config::Quantization::MxFp8
        | config::Quantization::NvFp4
        | config::Quantization::SvdQuantW4A16 => Activations::Float,
    }
}

/// The numerics of layers in `mode` to which no rule gives others.
fn numerics(config: &Config, mode: config::Quantization) -> NumericsConvention {
    match (config.use_qwix_quantization, config.quantization_numerics) {
        (true, _) => NumericsConvention::Qwix,
        (false, Some(asked)) => asked,
        (false, None) => own_numerics(mode),
    }
}

/// The numerics of a mode where a configuration names none; of some modes the only ones.
fn own_numerics(mode: config::Quantization) -> NumericsConvention {
    match mode {
        config::Quantization::Off
        | config::Quantization::Int8
        | config::Quantization::Int8W8A16
        | config::Quantization::W4A16 => NumericsConvention::Aqt,
        config::Quantization::Fp8 | config::Quantization::Fp8Full => NumericsConvention::Qwix,
        config::Quantization::Fp8W8A16
        | config::Quantization::Int8W8A8Static
        | config::Quantization::Fp8W8A8Static
        | config::Quantization::SvdQuantW4A16
        | config::Quantization::W4A4
        | config::Quantization::SvdQuantW4A4 => NumericsConvention::Quark,
        config::Quantization::Nf4 => NumericsConvention::Nf4,
        config::Quantization::MxFp4 | config::Quantization::MxFp8 => NumericsConvention::Mx,
        config::Quantization::MxFp6E2M3 => NumericsConvention::MxE2M3,
        config::Quantization::MxFp6E3M2 => NumericsConvention::MxE3M2,
        config::Quantization::NvFp4 => NumericsConvention::Nv,
    }
}

/// What a configuration says of some layers.
struct Layers<'a> {
    /// Where it says it, for messages.
    key: &'a str,
    mode: config::Quantization,
    granularity: Option<Granularity>,
    symmetric: bool,
    numerics: NumericsConvention,
}

/// What the mode says of layers of which no rule does.
fn mode_layers(config: &Config) -> Layers<'_> {
    Layers {
        key: "quantization",
        mode: config.quantization,
        granularity: config.quantization_granularity.0,
        symmetric: config.quantization_symmetric,
        numerics: numerics(config, config.quantization),
    }
}

/// The formats of activations that the mode and the rules give to layers.
///
/// # Errors
/// When what one says does not fit together.
pub(super) fn activation_formats(config: &Config) -> Result<Vec<TensorFormat>, RecipeError> {
    if config.quantization == config::Quantization::Off {
        return Ok(Vec::new());
    }
    let rules = config.quant_rules.0.iter();
    let rules = rules.filter_map(|rule| rule_layers(config, rule));
    let mut found = Vec::new();
    for layers in rules.chain([mode_layers(config)]) {
        found.extend(formats(config, &layers, 0)?.activation);
    }
    Ok(found)
}

/// What a rule says of the layers that it matches; `None` is float.
fn rule_layers<'a>(config: &Config, rule: &'a config::QuantRule) -> Option<Layers<'a>> {
    let mode = match rule.mode {
        config::QuantRuleMode::None => return None,
        config::QuantRuleMode::Int8 => config::Quantization::Int8,
        config::QuantRuleMode::Int8W8A16 => config::Quantization::Int8W8A16,
        config::QuantRuleMode::W4A16 => config::Quantization::W4A16,
        config::QuantRuleMode::Fp8 => config::Quantization::Fp8,
        config::QuantRuleMode::Fp8Full => config::Quantization::Fp8Full,
        config::QuantRuleMode::Fp8W8A16 => config::Quantization::Fp8W8A16,
        config::QuantRuleMode::Nf4 => config::Quantization::Nf4,
        config::QuantRuleMode::MxFp4 => config::Quantization::MxFp4,
        config::QuantRuleMode::MxFp6E2M3 => config::Quantization::MxFp6E2M3,
        config::QuantRuleMode::MxFp6E3M2 => config::Quantization::MxFp6E3M2,
        config::QuantRuleMode::MxFp8 => config::Quantization::MxFp8,
        config::QuantRuleMode::NvFp4 => config::Quantization::NvFp4,
        config::QuantRuleMode::Int8W8A8Static => config::Quantization::Int8W8A8Static,
        config::QuantRuleMode::Fp8W8A8Static => config::Quantization::Fp8W8A8Static,
        config::QuantRuleMode::SvdQuantW4A16 => config::Quantization::SvdQuantW4A16,
        config::QuantRuleMode::W4A4 => config::Quantization::W4A4,
        config::QuantRuleMode::SvdQuantW4A4 => config::Quantization::SvdQuantW4A4,
    };
    Some(Layers {
        key: &rule.path,
        mode,
        granularity: rule.granularity.0,
        symmetric: rule.symmetric.unwrap_or(true),
        numerics: rule.numerics.unwrap_or_else(|| numerics(config, mode)),
    })
}

/// The formats that a rule gives the layers that it matches; `None` is float.
///
/// # Errors
/// When what it says does not fit together.
pub(super) fn rule_formats(
    config: &Config,
    rule: &config::QuantRule,
) -> Result<Option<Formats>, RecipeError> {
    let layers = rule_layers(config, rule);
    layers.map(|layers| formats(config, &layers, 0)).transpose()
}

/// The input features that share a scale in `w4a16`: those of AMD Quark's `int4_wo_64`.
const INT4_GROUP: usize = 64;

/// The input features that share a scale in bitsandbytes' NF4, in OCP's microscaling formats, and in NVFP4.
const NF4_GROUP: usize = 64;
const MX_GROUP: usize = 32;
const NV_GROUP: usize = 16;

/// The formats of layers.
///
/// # Errors
/// When what the configuration says of them does not fit together.
fn formats(
    config: &Config,
    layers: &Layers<'_>,
    local_shards: usize,
) -> Result<Formats, RecipeError> {
    let Layers {
        key,
        mode,
        granularity,
        symmetric,
        numerics,
    } = *layers;
    let refuse = |problem: String| Err(RecipeError::Usage(format!("{key}: {problem}")));
    let convolutions = config.quantization_convolution_gradients;
    let (element, own) = match mode {
        config::Quantization::Int8 | config::Quantization::Off => {
            if granularity.is_some_and(|g| g != Granularity::Channel) || !symmetric {
                return refuse(
                    "mode int8 multiplies integers, so its weights are symmetric with one scale an output feature; leave \
                     granularity and symmetric out, or take int8_w8a16"
                        .into(),
                );
            }
            return match numerics {
                NumericsConvention::Aqt => {
                    Ok(Formats::aqt_int8(local_shards).with_convolution_gradients(convolutions))
                }
                NumericsConvention::Qwix | NumericsConvention::Narrow => {
                    Ok(Formats::forward_int8(numerics))
                }
                NumericsConvention::Quark
                | NumericsConvention::Gguf
                | NumericsConvention::Nf4
                | NumericsConvention::Mx
                | NumericsConvention::MxE2M3
                | NumericsConvention::MxE3M2
                | NumericsConvention::Nv => refuse(format!(
                    "{}'s numerics are here for weights alone: take int8_w8a16 or w4a16, or aqt, qwix or narrow",
                    title(numerics)
                )),
            };
        }
        config::Quantization::Fp8 | config::Quantization::Fp8Full => {
            let granularity = match (granularity, mode) {
                (Some(Granularity::Group(_)), _) => None,
                (Some(asked), _) => Some(asked),
                (None, config::Quantization::Fp8Full) => Some(Granularity::Tensor),
                (None, _) => Some(Granularity::Channel),
            };
            return match granularity.filter(|_| symmetric && numerics == NumericsConvention::Qwix) {
                Some(granularity) if mode == config::Quantization::Fp8 => {
                    Ok(Formats::fp8(granularity))
                }
                Some(granularity) => Ok(Formats::fp8_full(granularity, local_shards)
                    .with_convolution_gradients(convolutions)),
                None => refuse(
                    "fp8 with scales that are found at run time is here in Qwix's numerics, symmetric, with one scale (tensor) or one \
                     a token and an output feature (channel): leave other numerics, symmetric and groups out, or take \
                     fp8_w8a8_static or fp8_w8a16"
                        .into(),
                ),
            };
        }
        config::Quantization::Int8W8A16 => (DType::S8, Granularity::Channel),
        config::Quantization::W4A16 | config::Quantization::SvdQuantW4A16 => {
            (DType::S4, Granularity::Group(INT4_GROUP))
        }
        config::Quantization::W4A4 | config::Quantization::SvdQuantW4A4 => {
            let is_here =
                numerics.has_activations() && symmetric && granularity != Some(Granularity::Tensor);
            if !is_here {
                return refuse(
                    "activations in int4 are here in AMD Quark's or narrow numerics, symmetric, with a scale for so many features, or \
                     one a token (channel): leave other numerics, symmetric and tensor out"
                        .into(),
                );
            }
            (DType::S4, Granularity::Group(INT4_GROUP))
        }
        config::Quantization::Int8W8A8Static | config::Quantization::Fp8W8A8Static => {
            let has_numerics = match mode {
                config::Quantization::Int8W8A8Static => numerics.has_activations(),
                _ => numerics == NumericsConvention::Quark,
            };
            let is_here =
                has_numerics && symmetric && !matches!(granularity, Some(Granularity::Group(_)));
            if !is_here {
                return refuse(
                    "int8 and fp8 by recorded scales are here in AMD Quark's numerics, int8 in narrow numerics too, symmetric, and \
                     weights have one scale (tensor) or one an output feature (channel): leave other numerics, symmetric and groups \
                     out"
                        .into(),
                );
            }
            match mode {
                config::Quantization::Int8W8A8Static => (DType::S8, Granularity::Channel),
                _ => (DType::F8E4M3Fn, Granularity::Tensor),
            }
        }
        config::Quantization::Fp8W8A16 => {
            let is_here = numerics == NumericsConvention::Quark
                && symmetric
                && !matches!(granularity, Some(Granularity::Group(_)));
            if !is_here {
                return refuse(
                    "fp8 weights are here in AMD Quark's numerics, symmetric, with one scale (tensor) or one an output feature \
                     (channel): leave other numerics, symmetric and groups out"
                        .into(),
                );
            }
            (DType::F8E4M3Fn, Granularity::Tensor)
        }
        config::Quantization::Nf4 => (DType::U4, Granularity::Group(NF4_GROUP)),
        config::Quantization::MxFp4 => (DType::U4, Granularity::Group(MX_GROUP)),
        config::Quantization::MxFp6E2M3
        | config::Quantization::MxFp6E3M2
        | config::Quantization::MxFp8 => (DType::F8E4M3Fn, Granularity::Group(MX_GROUP)),
        config::Quantization::NvFp4 => (DType::U4, Granularity::Group(NV_GROUP)),
    };
    let granularity = granularity.unwrap_or(own);
    let is_group = matches!(granularity, Granularity::Group(_));
    match numerics {
        NumericsConvention::Aqt
        | NumericsConvention::Qwix
        | NumericsConvention::Quark
        | NumericsConvention::Narrow => {
            let own = own_numerics(mode);
            if ![NumericsConvention::Aqt, NumericsConvention::Quark].contains(&own) {
                return refuse(format!(
                    "mode {mode} has numerics of its own: leave {numerics} out"
                ));
            }
        }
        NumericsConvention::Gguf => {
            if !is_group || own_numerics(mode) != NumericsConvention::Aqt {
                return refuse(
                    "llama.cpp's blocks are here in int8_w8a16 (q8_0) and w4a16 (q4_0, without symmetric q4_1), with a granularity in \
                     input features: give quantization_granularity=32"
                        .into(),
                );
            }
        }
        NumericsConvention::Nf4
        | NumericsConvention::Mx
        | NumericsConvention::MxE2M3
        | NumericsConvention::MxE3M2
        | NumericsConvention::Nv => {
            if own_numerics(mode) != numerics || !is_group || !symmetric {
                return refuse(format!(
                    "{}'s numerics belong to its own mode, symmetric and with groups of input features: leave numerics and \
                     symmetric out",
                    title(numerics)
                ));
            }
        }
    }
    if !symmetric && ![NumericsConvention::Quark, NumericsConvention::Gguf].contains(&numerics) {
        let what = match numerics {
            // DeepCompressor has asymmetric integers too, of another range.
            NumericsConvention::Narrow => "the narrow range",
            _ => title(numerics),
        };
        return refuse(format!(
            "{what} has no zero points: leave symmetric out, or take AMD Quark's numerics"
        ));
    }
    // Codes above a minimum have no sign.
    let element = match (element, numerics, symmetric) {
        (DType::S4, NumericsConvention::Gguf, false) => DType::U4,
        (element, _, _) => element,
    };
    let weight = TensorFormat {
        element,
        granularity,
        zero_point: !symmetric,
        range: Range::Dynamic,
        rounding: Rounding::NearestEven,
        convention: numerics,
    };
    let recorded = TensorFormat {
        granularity: match config.quantization_smooth_alpha {
            Some(_) => Granularity::Feature,
            None => Granularity::Tensor,
        },
        element,
        range: Range::Stored(config.activations_dtype.into()),
        ..TensorFormat::int8(numerics)
    };
    let activation = match activations_of(mode) {
        Activations::Recorded => Some(recorded),
        Activations::AsWeights => Some(weight),
        // Those that are found have weights of their own, above.
        Activations::Float | Activations::Found => None,
    };
    let low_rank = matches!(
        mode,
        config::Quantization::SvdQuantW4A16 | config::Quantization::SvdQuantW4A4
    );
    Ok(Formats {
        activation,
        low_rank,
        ..Formats::of_weights(weight)
    })
}
