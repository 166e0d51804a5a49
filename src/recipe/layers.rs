//! How each layer of a denoiser is stored, and what is done with its weight.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::config::{Config, QuantRule, SvdOrder, WeightAlgorithm};
use crate::graph::{Granularity, Graph, Range};
use crate::models::unet;
use crate::quant::{Decision, Formats, Statistics, StoredLayer, joined_inputs, readers_of_input};
use crate::weights::Checkpoint;
use crate::weights::quantized::{Quantization, weight_name};
use crate::weights::source::UNetQuantization;

use super::RecipeError;
use super::calibrate::{Known, plans};
use super::qat::TrainedRanges;
use super::roundings::{Roundings, rule_of};

/// The formats in which the decisions for a denoiser have weights stored, as its graph and `calibration` have them.
///
/// # Errors
/// When a switch of `calibration` concerns no layer, or the algorithm of a rule none of its layers.
pub(super) fn stored(
    config: &Config,
    model: &str,
    decisions: &[Decision],
    graph: &Graph,
    roundings: &Roundings,
) -> Result<Quantization, RecipeError> {
    let sizes: HashMap<&str, &[usize]> = graph
        .weights()
        .map(|(_, weight)| (weight.key(), weight.shape.dims.as_slice()))
        .collect();
    let dims = |decision: &Decision| {
        let dims = sizes.get(weight_name(&decision.path).as_str());
        dims.copied().unwrap_or_default()
    };
    let is_linear = |rule: &QuantRule| {
        let mut decided = decisions.iter();
        decided.any(|d| rule_of(config, d) == Some(rule) && dims(d).len() == 2)
    };
    for rule in &config.quant_rules.0 {
        if let Some(algorithm @ (WeightAlgorithm::Gptq | WeightAlgorithm::Awq)) = rule.algorithm
            && !is_linear(rule)
        {
            return Err(RecipeError::Usage(format!(
                "{}: algorithm {algorithm} has no effect: it is of linear layers, and the rule decides none; leave it out",
                rule.path
            )));
        }
    }
    let stored = |decision: &Decision| {
        let algorithm = roundings.of_layer(&decision.path).algorithm;
        let stored = stored_layer(config, decision.formats?, dims(decision), algorithm)?;
        Some((decision.path.clone(), stored))
    };
    let mut stored = Quantization {
        layers: decisions.iter().filter_map(stored).collect(),
    };
    if config.calibration.text_in_float {
        let text = unet::names::ENCODER_HIDDEN_STATES;
        text_in_float(&mut stored, &readers_of_input(graph, model, text))?;
    }
    if config.calibration.split_skips {
        split_skips(&mut stored, &joined_inputs(graph, model))?;
    }
    Ok(stored)
}

/// How a layer with a weight of these dimensions is stored in these formats, where the algorithm rounds it. A low-rank product
/// stands beside linear layers that are larger than its rank.
pub(super) fn stored_layer(
    config: &Config,
    formats: Formats,
    dims: &[usize],
    algorithm: WeightAlgorithm,
) -> Option<StoredLayer> {
    let rank = config.svd_rank as usize;
    let is_large = matches!(dims, &[out, inputs] if out.min(inputs) > rank);
    let low_rank = (formats.low_rank && is_large).then_some(rank);
    Some(StoredLayer {
        weight: formats.weight?.stored(config.activations_dtype.into()),
        activation: formats.activation,
        low_rank,
        smoothed: match algorithm {
            WeightAlgorithm::Awq => dims.len() == 2,
            WeightAlgorithm::Nearest | WeightAlgorithm::Gptq | WeightAlgorithm::Hqq => {
                low_rank.is_some() && config.svd_order == SvdOrder::Paper
            }
        },
    })
}

/// Whether calibration finds the scale of what a layer reads.
pub(super) fn is_static(layer: &StoredLayer) -> bool {
    let format = layer.activation;
    format.is_some_and(|format| matches!(format.range, Range::Stored(_)))
}

/// Leaves the activations of layers with recorded scales that read text alone in float.
fn text_in_float(stored: &mut Quantization, readers: &BTreeSet<String>) -> Result<(), RecipeError> {
    let mut is_any = false;
    for (path, layer) in &mut stored.layers {
        if is_static(layer) && readers.contains(path) {
            layer.activation = None;
            is_any = true;
        }
    }
    match is_any {
        true => Ok(()),
        false => Err(RecipeError::Usage(
            "calibration.text_in_float has no effect: no layer with a recorded scale (int8_w8a8_static, fp8_w8a8_static) reads text alone"
                .to_owned(),
        )),
    }
}

/// Gives the layers with recorded scales that read two joined activations a scale for each feature: that of its part.
fn split_skips(
    stored: &mut Quantization,
    joined: &BTreeMap<String, usize>,
) -> Result<(), RecipeError> {
    let mut is_any = false;
    for (path, layer) in &mut stored.layers {
        let is_joined = is_static(layer) && joined.contains_key(path);
        if let Some(format) = layer.activation.as_mut().filter(|_| is_joined) {
            format.granularity = Granularity::Feature;
            is_any = true;
        }
    }
    match is_any {
        true => Ok(()),
        false => Err(RecipeError::Usage(
            "calibration.split_skips has no effect: no layer with a recorded scale (int8_w8a8_static, fp8_w8a8_static) reads two joined activations"
                .to_owned(),
        )),
    }
}

/// How a UNet is quantized whose layers are stored so.
pub(super) fn unet_quantization(
    config: &Config,
    stored: Quantization,
    roundings: &Roundings,
    statistics: Option<&Statistics>,
    trained: Option<&TrainedRanges>,
    checkpoint: &Checkpoint,
) -> Result<UNetQuantization, RecipeError> {
    let known = Known {
        statistics,
        trained,
    };
    let (rounding, others) = roundings.of_files(config);
    Ok(UNetQuantization {
        plans: plans(config, &stored, roundings, &known, checkpoint)?,
        stored,
        weights_dtype: config.weights_dtype.into(),
        rounding,
        roundings: others,
        layout: config.quantized_layout,
    })
}
