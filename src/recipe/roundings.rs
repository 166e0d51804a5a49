//! How weights become numbers of their formats: what decides their ranges, and the algorithm. The configuration says it of all
//! layers, and a rule of those that it decides.

use std::collections::BTreeMap;

use crate::config::{Config, QuantRule, WeightAlgorithm};
use crate::quant::{Decision, Formats, Observer, ObserverKind, gptq_takes, has_minimums};
use crate::weights::source::LayerRounding;

use super::RecipeError;

/// How the weight of a layer is rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rounding {
    pub observer: ObserverKind,
    pub algorithm: WeightAlgorithm,
}

impl Rounding {
    /// Each number to the nearest one, between the lowest and the highest value.
    pub const NEAREST: Rounding = Rounding {
        observer: ObserverKind::MinMax,
        algorithm: WeightAlgorithm::Nearest,
    };

    /// That of the layers which `rule` decides, or no rule of the configuration.
    pub fn of(config: &Config, rule: Option<&QuantRule>) -> Rounding {
        let observer = rule.and_then(|rule| rule.observer);
        let algorithm = rule.and_then(|rule| rule.algorithm);
        Rounding {
            observer: observer.unwrap_or(config.quantization_observer),
            algorithm: algorithm.unwrap_or(config.quantization_algorithm),
        }
    }

    /// Whether it reads what calibration sees.
    pub fn is_fed(self) -> bool {
        match self.algorithm {
            WeightAlgorithm::Gptq | WeightAlgorithm::Awq => true,
            WeightAlgorithm::Nearest | WeightAlgorithm::Hqq => false,
        }
    }

    /// What decides the range of each scale.
    pub fn weight_observer(self, config: &Config) -> Observer {
        Observer {
            kind: self.observer,
            percentile: config.quantization_percentile,
            compat: config.observer_compat,
        }
    }

    fn of_layer(self, config: &Config) -> LayerRounding {
        LayerRounding {
            observer: self.weight_observer(config),
            is_hqq: self.algorithm == WeightAlgorithm::Hqq,
        }
    }

    /// Refuses formats whose weights are not rounded so. `rule` gives its layers these formats, or no rule of the configuration does.
    ///
    /// # Errors
    /// Names the rule, where it says how weights are rounded.
    pub fn check(
        self,
        config: &Config,
        rule: Option<&QuantRule>,
        formats: &Formats,
    ) -> Result<(), RecipeError> {
        let has_algorithm = rule.is_some_and(|rule| rule.algorithm.is_some());
        let has_observer = rule.is_some_and(|rule| rule.observer.is_some());
        let place = match rule.filter(|rule| rule.says_rounding()) {
            Some(rule) => format!("{}: ", rule.path),
            None => String::new(),
        };
        let algorithm = match has_algorithm {
            true => format!("algorithm {}", self.algorithm),
            false => format!("quantization_algorithm={}", self.algorithm),
        };
        let observer = match has_observer {
            true => "observer",
            false => "quantization_observer",
        };
        let refuse = |problem: String| Err(RecipeError::Usage(format!("{place}{problem}")));
        let observes = self.observer != ObserverKind::MinMax;
        let weight = formats.weight;
        // A rule may take a layer back from the configuration's observer.
        let changes_nothing = has_observer && config.quantization_observer == ObserverKind::MinMax;
        if weight.is_some_and(|weight| !weight.convention.is_of_programs())
            && (observes || changes_nothing)
        {
            return refuse(format!(
                "{observer} has no effect on llama.cpp's blocks, nf4, nvfp4 and OCP's microscaling formats, which have ranges of their \
                 own: leave it out"
            ));
        }
        match self.algorithm {
            WeightAlgorithm::Gptq if !weight.is_none_or(gptq_takes) => refuse(format!(
                "{algorithm} rounds to integers, with aqt, qwix, quark or narrow as numerics: leave it out of other formats"
            )),
            WeightAlgorithm::Gptq if observes => refuse(format!(
                "{algorithm} changes weights while it finds their ranges: leave {observer} out"
            )),
            WeightAlgorithm::Awq if formats.activation.is_some() || formats.low_rank => {
                refuse(format!(
                    "{algorithm} is of weights alone, such as int8_w8a16 and w4a16: static modes have quantization_smooth_alpha, \
                     and SVDQuant svd_order=paper"
                ))
            }
            WeightAlgorithm::Hqq if !weight.is_none_or(has_minimums) => refuse(format!(
                "{algorithm} chooses the float that is added to codes: give quantization_numerics=gguf \
                 quantization_symmetric=False quantization_granularity=64 with w4a16 or int8_w8a16"
            )),
            WeightAlgorithm::Nearest
            | WeightAlgorithm::Gptq
            | WeightAlgorithm::Awq
            | WeightAlgorithm::Hqq => Ok(()),
        }
    }
}

/// Refuses a rule that leaves its layers in float, and says how weights are rounded.
///
/// # Errors
/// Names the rule.
pub(super) fn check_float(rule: Option<&QuantRule>) -> Result<(), RecipeError> {
    match rule.filter(|rule| rule.says_rounding()) {
        Some(rule) => Err(RecipeError::Usage(format!(
            "{}: mode none leaves these layers in float, so observer and algorithm have no effect: leave them out",
            rule.path
        ))),
        None => Ok(()),
    }
}

/// The rule of the configuration that decided about a layer. Of several with one pattern it is the first.
pub(super) fn rule_of<'a>(config: &'a Config, decision: &Decision) -> Option<&'a QuantRule> {
    let pattern = decision.rule.as_deref()?;
    config
        .quant_rules
        .0
        .iter()
        .find(|rule| rule.path == pattern)
}

/// How the weights of a model's layers are rounded.
#[derive(Clone, Debug)]
pub(super) struct Roundings {
    /// Of layers that are not in `others`.
    all: Rounding,
    /// By the paths of layers.
    others: BTreeMap<String, Rounding>,
}

impl Roundings {
    /// As the rules say that decided.
    pub fn of(config: &Config, decisions: &[Decision]) -> Roundings {
        let all = Rounding::of(config, None);
        let other = |decision: &Decision| {
            let rounding = Rounding::of(config, rule_of(config, decision));
            (rounding != all).then(|| (decision.path.clone(), rounding))
        };
        Roundings {
            all,
            others: decisions.iter().filter_map(other).collect(),
        }
    }

    /// All weights alike.
    pub fn same(all: Rounding) -> Roundings {
        Roundings {
            all,
            others: BTreeMap::new(),
        }
    }

    /// That of a layer's weight.
    pub fn of_layer(&self, path: &str) -> Rounding {
        self.others.get(path).copied().unwrap_or(self.all)
    }

    /// Whether it is the algorithm of a layer's weight.
    pub fn has(&self, path: &str, algorithm: WeightAlgorithm) -> bool {
        self.of_layer(path).algorithm == algorithm
    }

    /// As files are written: that of layers, and by their paths those of others.
    pub fn of_files(&self, config: &Config) -> (LayerRounding, BTreeMap<String, LayerRounding>) {
        let others = self.others.iter();
        let others = others.map(|(path, rounding)| (path.clone(), rounding.of_layer(config)));
        (self.all.of_layer(config), others.collect())
    }
}
