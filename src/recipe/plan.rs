//! Mixed precision: the format of each layer under a budget, by what each costs in quality.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::config::{
    Config, QuantRule, QuantRuleMode, QuantRules, SvdOrder, WeightAlgorithm, WeightGranularity,
};
use crate::graph::{Granularity, Graph, Range, TensorFormat};
use crate::quant::{
    Action, BudgetError, Choice, Decision, Formats, Rule, Statistics, StoredLayer, choose,
};
use crate::weights::Checkpoint;
use crate::weights::quantized::{Quantization, features_together, weight_name};
use crate::weights::source::{LayerRounding, QuantizedTensor, UNetQuantization};

use super::formats::{mode_of, rule_formats};
use super::layers::{stored_layer, unet_quantization};
use super::roundings::{Rounding, Roundings};
use super::{Notice, Notify, RecipeError};

/// What a plan may take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Budget {
    /// Bits a weight, with scales, of the layers that the plan decides.
    Bits(f64),
    /// Bytes of the denoiser's files.
    Bytes(u64),
}

/// What the errors of a plan are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// The power of a weight's error, relative to the weight's: without calibration.
    Weight,
    /// The power of the error of what denoising steps leave of samples, relative to the samples', the mean over steps.
    Result,
}

impl Measure {
    /// What is said of it.
    pub fn text(self) -> &'static str {
        match self {
            Measure::Weight => "the power of the weight's error, relative to the weight's",
            Measure::Result => {
                "the power of the error of what a denoising step leaves of a sample, relative to the sample's"
            }
        }
    }
}

/// A format that a layer could have.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The number of the rule in [`Plan::candidates`].
    pub rule: usize,
    pub bytes: u64,
    /// As [`Plan::measure`] says.
    pub error: f64,
    /// `None` for float.
    pub tensor: Option<QuantizedTensor>,
}

/// A layer whose format was chosen.
#[derive(Clone, Debug)]
pub struct PlannedLayer {
    pub layer: String,
    /// Numbers in its weight.
    pub parameters: usize,
    pub candidates: Vec<Candidate>,
    /// Which of them it has.
    pub chosen: usize,
}

/// The formats of layers.
#[derive(Clone, Debug)]
pub struct Plan {
    pub budget: Budget,
    pub measure: Measure,
    /// The rules of which each layer has one, as they were given: with patterns of layers that may have it.
    pub candidates: Vec<QuantRule>,
    pub layers: Vec<PlannedLayer>,
    /// A rule for each layer.
    pub rules: QuantRules,
}

impl PlannedLayer {
    /// The format that it has.
    pub fn taken(&self) -> &Candidate {
        &self.candidates[self.chosen]
    }
}

impl Plan {
    /// Bytes of the layers' weights and scales.
    pub fn bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.taken().bytes).sum()
    }

    /// Bits of a weight of the layers, with scales.
    pub fn bits(&self) -> f64 {
        let parameters: usize = self.layers.iter().map(|layer| layer.parameters).sum();
        8.0 * self.bytes() as f64 / parameters as f64
    }

    /// The sum of the layers' errors.
    pub fn error(&self) -> f64 {
        self.layers.iter().map(|layer| layer.taken().error).sum()
    }

    /// A file of rules, which `quant_rules` takes.
    pub fn to_yaml(&self) -> String {
        format!(
            "# A rule for each layer: {:.3} bits a weight with scales, {} bytes. Give this file back as quant_rules=FILE.\n\
             # The error that was kept least is the sum over layers of {}: {:.3e}.\n{}",
            self.bits(),
            self.bytes(),
            self.measure.text(),
            self.error(),
            self.rules.to_yaml()
        )
    }
}

/// What a plan is made for.
pub(super) struct Planning<'a> {
    pub config: &'a Config,
    pub graph: &'a Graph,
    pub decisions: &'a [Decision],
    /// The formats of layers without a plan.
    pub stored: &'a Quantization,
    pub statistics: Option<&'a Statistics>,
    pub checkpoint: &'a Checkpoint,
}

/// The rules that are tried where the configuration names none: its mode, int8 and float.
fn candidates(config: &Config) -> Vec<QuantRule> {
    if !config.quantization_candidates.0.is_empty() {
        return config.quantization_candidates.0.clone();
    }
    let rule = |mode| QuantRule {
        path: ".*".to_owned(),
        mode,
        granularity: WeightGranularity::default(),
        symmetric: None,
        numerics: None,
        observer: None,
        algorithm: None,
    };
    let own = QuantRuleMode::from_name(config.quantization.name()).map(|mode| QuantRule {
        granularity: config.quantization_granularity,
        symmetric: (!config.quantization_symmetric).then_some(false),
        ..rule(mode)
    });
    let others = [QuantRuleMode::Int8W8A16, QuantRuleMode::None];
    let others = others.into_iter().map(rule);
    let others = others.filter(|other| own.as_ref().is_none_or(|own| own.mode != other.mode));
    own.iter().cloned().chain(others).collect()
}

/// The formats with scales found at run time to which layers may round what they read: their own, and with a budget those of
/// candidates.
///
/// # Errors
/// When a candidate has no format.
pub(super) fn activation_roundings(
    config: &Config,
    stored: &Quantization,
    has_budget: bool,
) -> Result<BTreeMap<String, Vec<TensorFormat>>, RecipeError> {
    let is_found = |format: &TensorFormat| matches!(format.range, Range::Dynamic);
    let mut tried = Vec::new();
    for rule in candidates(config).iter().filter(|_| has_budget) {
        let pattern = Rule::new(&rule.path, Action::Float, true).map_err(RecipeError::usage)?;
        let formats = rule_formats(config, rule)?;
        let activation = formats.and_then(|formats| formats.activation);
        tried.extend(activation.filter(is_found).map(|format| (pattern, format)));
    }
    let of_layer = |(path, layer): (&String, &StoredLayer)| {
        let others = tried.iter().filter(|(pattern, _)| pattern.matches(path));
        let mut formats: Vec<TensorFormat> =
            layer.activation.filter(is_found).into_iter().collect();
        for (_, format) in others {
            if !formats.contains(format) {
                formats.push(*format);
            }
        }
        (path.clone(), formats)
    };
    Ok(stored.layers.iter().map(of_layer).collect())
}

/// The layers whose inputs GPTQ reads: those whose weights it rounds, and with a budget those whose weights it would round with a
/// candidate.
///
/// # Errors
/// When the pattern of a candidate is none.
pub(super) fn correlated(
    config: &Config,
    stored: &Quantization,
    roundings: &Roundings,
    has_budget: bool,
) -> Result<BTreeSet<String>, RecipeError> {
    let mut tried = Vec::new();
    for rule in candidates(config).iter().filter(|_| has_budget) {
        if Rounding::of(config, Some(rule)).algorithm == WeightAlgorithm::Gptq {
            let pattern = Rule::new(&rule.path, Action::Float, true);
            tried.push(pattern.map_err(RecipeError::usage)?);
        }
    }
    let is_read = |path: &&String| {
        roundings.has(path, WeightAlgorithm::Gptq)
            || tried.iter().any(|pattern| pattern.matches(path))
    };
    Ok(stored.layers.keys().filter(is_read).cloned().collect())
}

/// Chooses the format of each layer that no rule of the configuration decides.
///
/// # Errors
/// When it is not known what a candidate's rounding of activations does, a layer has no candidate, the budget is below the least possible or holds the model as it
/// is, and when a weight cannot be read or quantized.
pub(super) fn plan(
    planning: &Planning<'_>,
    budget: Budget,
    notify: &mut Notify<'_>,
) -> Result<Plan, RecipeError> {
    let config = planning.config;
    let candidates = candidates(config);
    let given: Vec<&str> = config
        .quant_rules
        .0
        .iter()
        .map(|r| r.path.as_str())
        .collect();
    let is_open = |decision: &&Decision| {
        decision.formats.is_some() && !decision.rule.as_deref().is_some_and(|r| given.contains(&r))
    };
    let open = planning.decisions.iter().filter(is_open);
    let open: Vec<&str> = open.map(|decision| decision.path.as_str()).collect();
    if open.is_empty() {
        return Err(RecipeError::Usage(
            "quant_rules decide every layer, so a budget has nothing to choose: leave the budget out, or some rules".to_owned(),
        ));
    }
    notify(Notice::Progress(&format!(
        "measuring {} formats of {} layers",
        candidates.len(),
        open.len()
    )));
    let measure = match planning.statistics {
        Some(_) => Measure::Result,
        None => Measure::Weight,
    };
    let mut layers = planning.unplanned(&open);
    for (at, rule) in candidates.iter().enumerate() {
        planning.measure(at, rule, &mut layers)?;
    }
    if let Some(layer) = layers.iter().find(|layer| layer.candidates.is_empty()) {
        return Err(RecipeError::Usage(format!(
            "{}: none of quantization_candidates fits it; give one with another granularity, or mode none for its path",
            layer.layer
        )));
    }
    planning.choose(budget, &mut layers)?;
    let rules = layers.iter().map(|layer| {
        let rule = &candidates[layer.taken().rule];
        QuantRule {
            path: regex::escape(&layer.layer),
            algorithm: match rule.algorithm {
                // It is of linear layers: of others it has measured what the nearest number leaves.
                Some(WeightAlgorithm::Gptq | WeightAlgorithm::Awq)
                    if !planning.is_linear(&layer.layer) =>
                {
                    Some(WeightAlgorithm::Nearest)
                }
                own => own,
            },
            ..rule.clone()
        }
    });
    Ok(Plan {
        rules: QuantRules(rules.collect()),
        budget,
        measure,
        candidates,
        layers,
    })
}

impl Planning<'_> {
    fn is_linear(&self, layer: &str) -> bool {
        let shape = self.checkpoint.info(&weight_name(layer));
        shape.is_some_and(|shape| shape.rank() == 2)
    }

    /// The layers to choose formats for, in the order of names.
    fn unplanned(&self, open: &[&str]) -> Vec<PlannedLayer> {
        let names: BTreeSet<&str> = open.iter().copied().collect();
        let layer = |layer: &str| {
            let shape = self.checkpoint.info(&weight_name(layer));
            PlannedLayer {
                layer: layer.to_owned(),
                parameters: shape.map_or(0, |shape| shape.dims.iter().product()),
                candidates: Vec::new(),
                chosen: 0,
            }
        };
        names.into_iter().map(layer).collect()
    }

    /// Adds a rule to the candidates of the layers that may have it.
    fn measure(
        &self,
        at: usize,
        rule: &QuantRule,
        layers: &mut [PlannedLayer],
    ) -> Result<(), RecipeError> {
        let config = self.config;
        let pattern = Rule::new(&rule.path, Action::Float, true);
        let pattern = pattern.map_err(RecipeError::usage)?;
        let formats = rule_formats(config, rule)?;
        let rounding = Rounding::of(config, Some(rule));
        if let Some(formats) = &formats {
            self.check_activation(formats)?;
        }
        let dims: HashMap<&str, &[usize]> = self
            .graph
            .weights()
            .map(|(_, weight)| (weight.key(), weight.shape.dims.as_slice()))
            .collect();
        let stored = |layer: &str, formats: Formats| -> Option<StoredLayer> {
            let dims = *dims.get(weight_name(layer).as_str())?;
            let stored = stored_layer(config, formats, dims, rounding.algorithm)?;
            fits(&stored, dims).then_some(stored)
        };
        let mut of_layers = BTreeMap::new();
        for layer in layers.iter().filter(|layer| pattern.matches(&layer.layer)) {
            if let Some(stored) = formats.and_then(|formats| stored(&layer.layer, formats)) {
                of_layers.insert(layer.layer.clone(), stored);
            }
        }
        let tried = Quantization { layers: of_layers };
        let roundings = Roundings::same(rounding);
        let tried = unet_quantization(
            config,
            tried,
            &roundings,
            self.statistics,
            None,
            self.checkpoint,
        )?;
        for layer in layers
            .iter_mut()
            .filter(|layer| pattern.matches(&layer.layer))
        {
            let name = weight_name(&layer.layer);
            let (tensor, bytes) = match (formats, tried.stored.layers.contains_key(&layer.layer)) {
                (None, _) => {
                    let shape = self.checkpoint.info(&name);
                    (None, shape.map_or(0, |shape| tried.bytes(&name, shape)))
                }
                (Some(_), false) => continue,
                (Some(_), true) => {
                    let tensor = tried.tried(self.checkpoint, &layer.layer);
                    let tensor = tensor.map_err(RecipeError::failed)?;
                    let bytes = tensor.bytes;
                    (Some(tensor), bytes)
                }
            };
            let error = tensor.as_ref().map_or(0.0, error);
            layer.candidates.push(Candidate {
                rule: at,
                bytes,
                error,
                tensor,
            });
        }
        Ok(())
    }

    /// Refuses formats of activations of which calibration does not tell what rounding to them does.
    fn check_activation(&self, formats: &Formats) -> Result<(), RecipeError> {
        let Some(activation) = formats.activation else {
            return Ok(());
        };
        let is_divided = formats.low_rank && self.config.svd_order == SvdOrder::Paper;
        let problem = if !matches!(activation.range, Range::Dynamic) {
            "rounds activations by recorded scales, whose error is not measured: take one that finds them at run time, such as int8, fp8 or w4a4"
        } else if is_divided {
            "with svd_order=paper rounds activations that are divided by factors, whose error is not measured: leave svd_order out"
        } else if self.statistics.is_none() {
            "rounds activations, whose error calibration measures: give prompts, such as calibration='{prompts: [a lighthouse at \
             sunrise, a bowl of fruit], steps: 20}', or take modes of weights alone, such as w4a16, int8_w8a16 or nf4"
        } else {
            return Ok(());
        };
        Err(RecipeError::Usage(format!(
            "quantization_candidates: {} {problem}, or name its layers in quant_rules",
            mode_of(formats)
        )))
    }

    /// Chooses a candidate of each layer.
    fn choose(&self, budget: Budget, layers: &mut [PlannedLayer]) -> Result<(), RecipeError> {
        let parameters: usize = layers.iter().map(|layer| layer.parameters).sum();
        let (bytes, others) = match budget {
            Budget::Bits(bits) => ((bits * parameters as f64 / 8.0) as u64, 0),
            Budget::Bytes(bytes) => {
                let others = self.bytes_of_others(layers);
                (bytes.saturating_sub(others), others)
            }
        };
        let bits = |bytes: u64| 8.0 * bytes as f64 / parameters as f64;
        let choices: Vec<Vec<Choice>> = layers
            .iter()
            .map(|layer| {
                let each = layer.candidates.iter();
                each.map(|c| Choice {
                    bytes: c.bytes,
                    error: c.error,
                })
                .collect()
            })
            .collect();
        let chosen = choose(&choices, bytes).map_err(|error| match error {
            BudgetError::TooSmall { least, .. } => RecipeError::Usage(match budget {
                Budget::Bits(asked) => format!(
                    "a budget of {asked} bits a weight is too small: the least possible with these candidates is {:.3}",
                    bits(least) + 5e-4
                ),
                Budget::Bytes(asked) => format!(
                    "a budget of {asked} bytes is too small: the least possible with these candidates is {}, of which {others} are \
                     tensors that the plan does not decide",
                    least + others
                ),
            }),
            other => RecipeError::failed(other),
        })?;
        for (layer, chosen) in layers.iter_mut().zip(chosen) {
            layer.chosen = chosen;
        }
        let is_float = |layer: &PlannedLayer| layer.taken().tensor.is_none();
        match layers.iter().all(is_float) {
            true => Err(RecipeError::Usage(
                "the budget holds all layers in float, so nothing would be quantized: give a smaller one".to_owned(),
            )),
            false => Ok(()),
        }
    }

    /// Bytes of the denoiser's tensors that no plan decides.
    fn bytes_of_others(&self, layers: &[PlannedLayer]) -> u64 {
        let planned: Vec<String> = layers.iter().map(|l| weight_name(&l.layer)).collect();
        let plain = UNetQuantization {
            stored: self.stored.clone(),
            weights_dtype: self.config.weights_dtype.into(),
            rounding: LayerRounding::default(),
            roundings: BTreeMap::new(),
            layout: self.config.quantized_layout,
            plans: BTreeMap::new(),
        };
        let others = self.checkpoint.iter();
        let others =
            others.filter(|(name, _)| planned.binary_search_by(|p| p.as_str().cmp(name)).is_err());
        others.map(|(name, shape)| plain.bytes(name, shape)).sum()
    }
}

/// Whether a weight of these dimensions has the format.
fn fits(stored: &StoredLayer, dims: &[usize]) -> bool {
    let inputs = dims.get(1).copied().unwrap_or(1);
    let in_groups = match stored.weight.granularity {
        Granularity::Group(size) => inputs.is_multiple_of(size),
        Granularity::Tensor
        | Granularity::Channel
        | Granularity::Part(_)
        | Granularity::Feature => true,
    };
    in_groups && inputs.is_multiple_of(features_together(stored.weight))
}

/// What a format costs: [`Measure`].
fn error(tensor: &QuantizedTensor) -> f64 {
    let of_steps = tensor.errors.as_ref().map(|errors| &errors.of_result);
    match of_steps.filter(|steps| !steps.is_empty()) {
        Some(steps) => steps.iter().sum::<f64>() / steps.len() as f64,
        None => 10f64.powf(-tensor.sqnr_db / 10.0),
    }
}
