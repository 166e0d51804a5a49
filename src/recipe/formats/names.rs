//! What formats are called, in messages and reports.

use std::collections::{BTreeMap, BTreeSet};

use crate::config;
use crate::dtype::DType;
use crate::graph::{Granularity, NumericsConvention, TensorFormat};
use crate::quant::{Decision, Formats, Policy, StoredLayer};

/// Whose numerics they are.
pub(super) fn title(convention: NumericsConvention) -> &'static str {
    match convention {
        NumericsConvention::Aqt => "AQT",
        NumericsConvention::Qwix => "Qwix",
        NumericsConvention::Quark => "AMD Quark",
        NumericsConvention::Narrow => "DeepCompressor",
        NumericsConvention::Gguf => "llama.cpp",
        NumericsConvention::Nf4 => "bitsandbytes",
        NumericsConvention::Mx | NumericsConvention::MxE2M3 | NumericsConvention::MxE3M2 => "OCP",
        NumericsConvention::Nv => "NVIDIA",
    }
}

/// `int8, a scale a channel, aqt`
pub fn format_text(format: TensorFormat) -> String {
    let element = match format.element {
        _ if format.codebook().is_some() => match format.convention {
            NumericsConvention::Nf4 => "nf4".to_owned(),
            _ => "fp4".to_owned(),
        },
        DType::F8E4M3Fn if format.float6().is_some() => "fp6".to_owned(),
        DType::F8E4M3Fn => "fp8".to_owned(),
        DType::F8E5M2 => "fp8 (e5m2)".to_owned(),
        integers => format!("int{}", integers.bits()),
    };
    let granularity = match format.granularity {
        Granularity::Tensor => "one scale".to_owned(),
        Granularity::Part(parts) => format!("a scale for each of {parts} parts"),
        Granularity::Channel => "a scale a channel".to_owned(),
        Granularity::Group(size) => format!("a scale for {size}"),
        Granularity::Feature => "a scale a feature".to_owned(),
    };
    let zero_point = if format.zero_point_type().is_float() && format.zero_point {
        " and a minimum"
    } else if format.zero_point {
        " and a zero point"
    } else {
        ""
    };
    format!(
        "{element}, {granularity}{zero_point}, {}",
        format.convention
    )
}

/// The mode that formats are.
pub fn mode_of(formats: &Formats) -> config::Quantization {
    match (formats.activation, formats.weight) {
        (Some(activation), _) if activation.has_stored_scale() => {
            match activation.element.is_float() {
                false => config::Quantization::Int8W8A8Static,
                true => config::Quantization::Fp8W8A8Static,
            }
        }
        (Some(activation), _) if activation.element.is_float() => match formats.backward {
            None => config::Quantization::Fp8,
            Some(_) => config::Quantization::Fp8Full,
        },
        (Some(activation), _) if activation.element == DType::S4 => match formats.low_rank {
            true => config::Quantization::SvdQuantW4A4,
            false => config::Quantization::W4A4,
        },
        (Some(_), _) => config::Quantization::Int8,
        (None, Some(_)) if formats.low_rank => config::Quantization::SvdQuantW4A16,
        (None, Some(weight)) => weight_mode(weight),
        (None, None) => config::Quantization::Off,
    }
}

/// The mode that a layer of a checkpoint is.
pub(super) fn mode_of_layer(layer: &StoredLayer) -> config::Quantization {
    mode_of(&Formats {
        activation: layer.activation,
        low_rank: layer.low_rank.is_some(),
        ..Formats::of_weights(layer.weight)
    })
}

/// The mode of weights in a format, with activations in float.
pub(super) fn weight_mode(weight: TensorFormat) -> config::Quantization {
    match (weight.convention, weight.element) {
        (NumericsConvention::Nf4, _) => config::Quantization::Nf4,
        (NumericsConvention::Nv, _) => config::Quantization::NvFp4,
        (NumericsConvention::MxE2M3, _) => config::Quantization::MxFp6E2M3,
        (NumericsConvention::MxE3M2, _) => config::Quantization::MxFp6E3M2,
        (NumericsConvention::Mx, DType::U4) => config::Quantization::MxFp4,
        (NumericsConvention::Mx, _) => config::Quantization::MxFp8,
        (_, DType::F8E4M3Fn | DType::F8E5M2) => config::Quantization::Fp8W8A16,
        (_, DType::S4 | DType::U4) => config::Quantization::W4A16,
        (_, _) => config::Quantization::Int8W8A16,
    }
}

/// The modes of a program's contractions, `int8_w8a16+w4a16` where they have several; empty is float.
pub fn mode_name(decisions: &[Decision]) -> String {
    let modes = decisions.iter().filter_map(|d| d.formats.as_ref());
    let names: BTreeSet<&str> = modes.map(|formats| mode_of(formats).name()).collect();
    names.into_iter().collect::<Vec<_>>().join("+")
}

/// A rule's mode with what is not its own: `w4a16 (32), mse`.
pub fn mode_of_rule(rule: &config::QuantRule) -> String {
    let granularity = match rule.granularity.0 {
        None => String::new(),
        Some(Granularity::Tensor | Granularity::Part(_)) => " (tensor)".to_owned(),
        Some(Granularity::Channel | Granularity::Feature) => " (channel)".to_owned(),
        Some(Granularity::Group(size)) => format!(" ({size})"),
    };
    let observer = rule.observer.map(|observer| format!(", {observer}"));
    let algorithm = rule.algorithm.map(|algorithm| format!(", {algorithm}"));
    format!(
        "{}{granularity}{}{}",
        rule.mode,
        observer.unwrap_or_default(),
        algorithm.unwrap_or_default()
    )
}

/// One line that says what quantization does.
pub fn quantization_summary(policy: &Policy, decisions: &[Decision]) -> String {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for formats in decisions.iter().filter_map(|d| d.formats.as_ref()) {
        let mode = mode_of(formats);
        let weight = formats.weight.map_or_else(String::new, format_text);
        *counts.entry(format!("{mode} ({weight})")).or_default() += 1;
    }
    let counts: Vec<String> = counts
        .into_iter()
        .map(|(format, count)| format!("{count} in {format}"))
        .collect();
    let stored = match policy.stored.is_empty() {
        true => "",
        false => ", weights as stored",
    };
    format!(
        "of {} dots and convolutions of {}: {}{stored}",
        decisions.len(),
        policy.model.trim_end_matches('/'),
        counts.join(", ")
    )
}
