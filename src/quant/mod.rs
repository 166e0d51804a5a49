//! Quantization: rules by path that annotate contractions, and the pass that lowers annotations to integers.
//!
//! The order in a training step is: trace the forward pass and the loss, [`annotate`], differentiate (the
//! derivative of an annotated dot makes annotated dots), finish the graph, [`lower`]. Models do not mention
//! quantization. `docs/quantization.md` gives the formulas.

mod awq;
mod budget;
mod calibration;
mod codes;
mod fake_quantize;
mod faster;
mod gptq;
mod low_rank;
mod lower;
mod minimums;
mod observer;
mod reads;
mod recorded;
mod rounding;
mod sensitivity;
mod smooth;
mod stored;
mod svd;
mod weight;

pub use low_rank::{Dropout, LOW_RANK, contracted_weights, is_low_rank_factor, low_rank_beside};
pub use lower::{ROUNDING_KEY, lower, lower_with_noise, scaled_product};
pub use rounding::{NoiseSource, absmax, scale_of};

pub use awq::{AwqWeight, awq_factors};
pub use budget::{BudgetError, Choice, choose};
pub use calibration::{ActivationStatistics, CalibrationError, Statistics, Watch, Watched, watch};
pub use codes::{quantize_observed, quantize_weight};
pub use fake_quantize::{
    ActivationRanges, FakeQuantization, fake_quantize, initial_log_scale, input_range_name,
    is_learnable, is_log_scale, is_trained_range, log_scale_name, scale_of_range,
};
pub use faster::{Product, Role, Slower, keep_where_faster};
pub use gptq::{RoundingAlgorithm, WeightRounding, takes as gptq_takes};
pub use minimums::has_minimums;
pub use observer::{Observer, ObserverCompat, ObserverKind};
pub use reads::{joined_inputs, readers_of_input};
pub use sensitivity::{LayerActivity, LayerErrors, RoundedActivation};
pub use smooth::{divided_by_factors, smooth_factor_name};
pub use stored::{input_scale_name, scale_name, tensor_scale_name, zero_point_name};
pub use svd::{
    LowRankError, LowRankOptions, LowRankWeight, balance, largest_of_features, with_low_rank,
};
pub use weight::{QuantizedWeight, WeightQuantError, nearest_groups, scale_dims};

use std::collections::{BTreeMap, BTreeSet};

use regex::Regex;

use crate::dtype::DType;
use crate::graph::{
    Arithmetic, Builder, Contraction, ContractionQuant, Granularity, Graph, GraphError,
    NumericsConvention, Op, QuantDot, Rounding, TensorFormat,
};
use crate::shape::Shape;
use crate::util::text::listed;

/// Why a graph could not be quantized.
#[derive(Debug, thiserror::Error)]
pub enum QuantError {
    #[error("quantization rule '{pattern}': {source}")]
    Pattern {
        pattern: String,
        source: Box<regex::Error>,
    },
    #[error(
        "quantization rule '{pattern}' matches no contraction of {model}; paths look like {example}"
    )]
    Unmatched {
        pattern: String,
        model: String,
        example: String,
    },
    #[error(
        "the quantization rule '{pattern}' matches only products of two activations of {model}, such as '{example}', which \
         AQT's numerics leave in float; use_qwix_quantization=True quantizes them"
    )]
    ActivationsOnly {
        pattern: String,
        model: String,
        example: String,
    },
    #[error(
        "quantization applies to nothing in {model}: no contraction with a weight is left to the rules"
    )]
    Nothing { model: String },
    #[error(
        "the checkpoint says that {} of {model} are quantized, which has no such layers: {}",
        if layers.len() == 1 { "a layer".to_owned() } else { format!("{} layers", layers.len()) },
        listed(layers, 4)
    )]
    NoSuchLayers { model: String, layers: Vec<String> },
    #[error(
        "{layer}: groups of {group} do not divide its {elements} input features; {}; a rule of quant_rules gives this layer \
         others, or one scale a channel",
        nearest_groups(*elements, *group)
    )]
    Group {
        layer: String,
        group: usize,
        elements: usize,
    },
    #[error(transparent)]
    Graph(#[from] GraphError),
}

/// The action of a rule on the contractions whose path it matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Float,
    Quantize(Formats),
}

impl Action {
    /// Whether the rule is asked about a contraction, of which an operand is a weight, or none is.
    fn concerns(self, has_weight: bool) -> bool {
        has_weight
            || match self {
                Action::Float => true,
                Action::Quantize(formats) => formats.activation.is_some(),
            }
    }
}

/// One rule: the first whose pattern matches a contraction's whole path decides.
#[derive(Clone, Debug)]
pub struct Rule {
    pattern: Regex,
    text: String,
    action: Action,
    /// A rule the user wrote must match something; a built-in one may name layers this model lacks.
    must_match: bool,
}

impl Rule {
    /// The pattern, as it was given.
    pub fn pattern(&self) -> &str {
        &self.text
    }

    pub fn action(&self) -> Action {
        self.action
    }

    /// Whether it matches a whole path.
    pub fn matches(&self, path: &str) -> bool {
        self.pattern.is_match(path)
    }

    /// A rule for paths below the model's root, e.g. `down_blocks\.0\..*\.to_q`.
    ///
    /// # Errors
    /// When `pattern` is no regular expression.
    pub fn new(pattern: &str, action: Action, must_match: bool) -> Result<Rule, QuantError> {
        let compiled =
            Regex::new(&format!("^(?:{pattern})$")).map_err(|source| QuantError::Pattern {
                pattern: pattern.to_string(),
                source: Box::new(source),
            })?;
        Ok(Rule {
            pattern: compiled,
            text: pattern.to_string(),
            action,
            must_match,
        })
    }
}

/// Which contractions are quantized, and in which formats.
#[derive(Clone, Debug)]
pub struct Policy {
    /// The root scope of the model it applies to, e.g. `unet/`.
    pub model: String,
    pub rules: Vec<Rule>,
    /// Whether a rule's path separates modules by `/`, as Qwix writes them, instead of `.`.
    pub slash_paths: bool,
    /// Whether contractions of two activations (attention scores and values) are quantized as well.
    pub activations: bool,
    /// The formats of layers whose weights are quantized in their checkpoint already: where there are any, these are the
    /// contractions that are quantized, and no rule is asked.
    pub stored: StoredFormats,
    /// Whether what int8 does not make faster on the chip at hand stays in float.
    pub where_faster: bool,
    pub arithmetic: Arithmetic,
}

/// The formats of layers whose weights are quantized in a checkpoint, by their paths: checkpoint keys without `.weight`.
pub type StoredFormats = BTreeMap<String, StoredLayer>;

/// The formats of a layer whose weight is quantized in a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredLayer {
    /// Of range [`Range::Stored`](crate::graph::Range::Stored).
    pub weight: TensorFormat,
    /// `None` is float.
    pub activation: Option<TensorFormat>,
    /// The rank of what is multiplied in float beside the weight ([`low_rank_beside`]); `None` without.
    pub low_rank: Option<usize>,
    /// Whether what it reads is divided by factors first, which its weight has taken over ([`divided_by_factors`]).
    pub smoothed: bool,
}

/// The formats of the operands of a contraction and of its derivative.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Formats {
    /// `None` leaves that operand in float.
    pub weight: Option<TensorFormat>,
    pub activation: Option<TensorFormat>,
    pub backward: Option<Backward>,
    /// Whether a low-rank product in float is to stand beside that with the weight.
    pub low_rank: bool,
}

/// The formats of the two contractions of a derivative.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backward {
    /// The incoming gradient, which is the lhs of both.
    pub gradient: TensorFormat,
    /// The weight that the forward pass multiplied.
    pub weight: TensorFormat,
    /// The activation that it multiplied.
    pub activation: TensorFormat,
    /// Parts in which the range of a weight gradient's contraction is found; 0 leaves weight gradients in float.
    pub local_shards: usize,
    /// Whether derivatives of convolutions have them too, and not those of dots alone.
    pub convolutions: bool,
}

impl Formats {
    /// Weights and activations in int8 with AQT's numerics, forward and in both backward dots (MaxDiffusion's
    /// `config_v3(fwd_bits=8, dlhs_bits=8, drhs_bits=8)`).
    pub fn aqt_int8(local_shards: usize) -> Formats {
        let nearest = TensorFormat::int8(NumericsConvention::Aqt);
        Formats {
            weight: Some(nearest),
            activation: Some(nearest),
            backward: Some(Backward {
                gradient: TensorFormat {
                    rounding: Rounding::Stochastic,
                    ..nearest
                },
                weight: nearest,
                activation: nearest,
                local_shards,
                convolutions: false,
            }),
            low_rank: false,
        }
    }

    /// Weights and activations in int8 with Qwix's numerics; the backward pass stays in float.
    pub fn qwix_int8() -> Formats {
        Formats::forward_int8(NumericsConvention::Qwix)
    }

    /// Weights and activations in int8 with these numerics; the backward pass stays in float.
    pub fn forward_int8(convention: NumericsConvention) -> Formats {
        let format = TensorFormat::int8(convention);
        Formats {
            weight: Some(format),
            activation: Some(format),
            backward: None,
            low_rank: false,
        }
    }

    /// Weights and activations in `f8E4M3FN` with Qwix's numerics; the backward pass stays in float (MaxDiffusion's `fp8`).
    /// `granularity` is that of both: [`Granularity::Channel`] or [`Granularity::Tensor`].
    pub fn fp8(granularity: Granularity) -> Formats {
        let format = TensorFormat::float8(DType::F8E4M3Fn, granularity);
        Formats {
            weight: Some(format),
            activation: Some(format),
            backward: None,
            low_rank: false,
        }
    }

    /// [`Formats::fp8`] with both contractions of a dot's derivative in 8-bit floats too: gradients in `f8E5M2`, which has their
    /// range (MaxDiffusion's `fp8_full`, but for convolutions, for which see [`Formats::with_convolution_gradients`]). With
    /// [`Granularity::Tensor`] each of `local_shards` parts of a batch has a scale of its own, so that none is found across
    /// slices.
    pub fn fp8_full(granularity: Granularity, local_shards: usize) -> Formats {
        let of_activations = match (granularity, local_shards) {
            (Granularity::Tensor, 2..) => Granularity::Part(local_shards),
            _ => granularity,
        };
        let forward = Formats::fp8(granularity);
        let of = |element| TensorFormat::float8(element, of_activations);
        Formats {
            activation: Some(of(DType::F8E4M3Fn)),
            backward: Some(Backward {
                gradient: of(DType::F8E5M2),
                weight: TensorFormat::float8(DType::F8E4M3Fn, granularity),
                activation: of(DType::F8E4M3Fn),
                local_shards,
                convolutions: false,
            }),
            ..forward
        }
    }

    /// The same with the derivatives of convolutions in the formats of those of dots, if `convolutions`: as products of patches,
    /// so the gradient has a scale for each place of the image, or of a kernel's derivative for each output feature.
    pub fn with_convolution_gradients(mut self, convolutions: bool) -> Formats {
        if let Some(backward) = &mut self.backward {
            backward.convolutions = convolutions;
        }
        self
    }

    /// Weights alone; activations and the backward pass stay in float.
    pub fn of_weights(weight: TensorFormat) -> Formats {
        Formats {
            weight: Some(weight),
            activation: None,
            backward: None,
            low_rank: false,
        }
    }

    /// The annotation of a contraction whose rhs is the weight, or whose lhs is.
    fn of(&self, is_dot: bool, lhs_is_weight: bool, arithmetic: Arithmetic) -> QuantDot {
        let (lhs, rhs) = match lhs_is_weight {
            false => (self.activation, self.weight),
            true => (self.weight, self.activation),
        };
        let has_backward = |formats: &Backward| is_dot || formats.convolutions;
        let backward = self.backward.filter(has_backward);
        let shards = backward.map_or(0, |formats| formats.local_shards);
        // The gradient of either operand multiplies the other one.
        let of_activation = backward.map(|formats| ContractionQuant {
            lhs: Some(formats.gradient),
            rhs: Some(formats.weight),
            local_shards: 1,
            arithmetic,
        });
        let of_weight = backward
            .filter(|_| shards > 0)
            .map(|formats| ContractionQuant {
                lhs: Some(formats.gradient),
                rhs: Some(formats.activation),
                local_shards: shards,
                arithmetic,
            });
        let (dlhs, drhs) = match lhs_is_weight {
            false => (of_activation, of_weight),
            true => (of_weight, of_activation),
        };
        QuantDot {
            forward: ContractionQuant {
                lhs,
                rhs,
                local_shards: 1,
                arithmetic,
            },
            dlhs,
            drhs,
        }
    }
}

impl Policy {
    /// `rules`, then all other contractions with a weight in `formats`, but those of `float_layers`: the paths below the
    /// model's root, as regular expressions, of what its family leaves in float.
    ///
    /// # Errors
    /// When a pattern is no regular expression.
    pub fn of_layers(
        model: &str,
        mut rules: Vec<Rule>,
        float_layers: &[&str],
        formats: Formats,
    ) -> Result<Policy, QuantError> {
        rules.extend(rules_of_mode(float_layers, formats)?);
        Ok(Policy {
            model: model.to_string(),
            rules,
            slash_paths: false,
            activations: false,
            stored: StoredFormats::new(),
            where_faster: false,
            arithmetic: Arithmetic::Native,
        })
    }

    /// [`Policy::of_layers`] of [`Formats::aqt_int8`]: `quantization=int8`.
    ///
    /// # Errors
    /// When a pattern is no regular expression.
    pub fn aqt_int8(
        model: &str,
        local_shards: usize,
        rules: Vec<Rule>,
        float_layers: &[&str],
    ) -> Result<Policy, QuantError> {
        Policy::of_layers(model, rules, float_layers, Formats::aqt_int8(local_shards))
    }

    /// `use_qwix_quantization=True`: Qwix's `QtRule` with weights and activations in `formats` on every dot and convolution
    /// whose module path `module_path` matches wholly.
    ///
    /// `rules` come before it.
    ///
    /// # Errors
    /// When `module_path` is no regular expression.
    pub fn qwix(
        model: &str,
        module_path: &str,
        mut rules: Vec<Rule>,
        formats: Formats,
    ) -> Result<Policy, QuantError> {
        let action = Action::Quantize(formats);
        rules.push(Rule::new(module_path, action, true)?);
        Ok(Policy {
            model: model.to_string(),
            rules,
            slash_paths: true,
            activations: true,
            stored: StoredFormats::new(),
            where_faster: false,
            arithmetic: Arithmetic::Native,
        })
    }

    /// The ranks of what is multiplied in float beside weights, by the names of the weights.
    pub fn low_ranks(&self) -> BTreeMap<String, usize> {
        let layers = self.stored.iter();
        let ranks = layers.filter_map(|(path, layer)| {
            Some((format!("{}{path}.weight", self.model), layer.low_rank?))
        });
        ranks.collect()
    }

    /// The names of the weights that have taken over factors of what their layers read.
    pub fn smoothed(&self) -> BTreeSet<String> {
        let layers = self.stored.iter().filter(|(_, layer)| layer.smoothed);
        layers
            .map(|(path, _)| format!("{}{path}.weight", self.model))
            .collect()
    }

    /// Weights as a checkpoint has them.
    pub fn stored(model: &str, stored: StoredFormats) -> Policy {
        Policy {
            model: model.to_string(),
            rules: Vec::new(),
            slash_paths: false,
            activations: false,
            stored,
            where_faster: false,
            arithmetic: Arithmetic::Native,
        }
    }
}

/// The rules after those of a user: the family's layers stay in float, all others are quantized.
fn rules_of_mode(float_layers: &[&str], formats: Formats) -> Result<Vec<Rule>, QuantError> {
    let float = float_layers.iter().map(|pattern| (*pattern, Action::Float));
    let rules = float.chain([(".*", Action::Quantize(formats))]);
    rules
        .map(|(pattern, action)| Rule::new(pattern, action, false))
        .collect()
}

/// The decision of [`annotate`] for one contraction of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    pub path: String,
    pub op: &'static str,
    /// `None` is float.
    pub formats: Option<Formats>,
    /// The pattern that decided, or `None` where no rule was asked.
    pub rule: Option<String>,
}

impl Decision {
    pub fn quantized(&self) -> bool {
        self.formats.is_some()
    }
}

/// Annotates the model's contractions by the policy's rules and returns every decision, in graph order.
///
/// # Errors
/// When a user's rule matches nothing, groups do not divide a layer's input features, a stored layer is none of the
/// model's, or nothing at all is quantized.
pub fn annotate(b: &Builder, policy: &Policy) -> Result<Vec<Decision>, QuantError> {
    let mut annotation = Annotation {
        policy,
        used: vec![false; policy.rules.len()],
        decisions: Vec::new(),
        undivided: None,
    };
    b.with_graph_mut(|g| {
        let inputs = g.inputs.iter().map(|i| i.is_weight()).collect::<Vec<_>>();
        annotation.graph(g, &inputs);
    });
    let Annotation {
        used,
        decisions,
        undivided,
        ..
    } = annotation;
    if let Some(error) = undivided {
        return Err(error);
    }
    let paths: BTreeSet<&str> = decisions.iter().map(|d| d.path.as_str()).collect();
    let unknown = policy
        .stored
        .keys()
        .filter(|path| !paths.contains(path.as_str()));
    let layers: Vec<String> = unknown.cloned().collect();
    if !layers.is_empty() {
        return Err(QuantError::NoSuchLayers {
            model: policy.model.trim_end_matches('/').to_string(),
            layers,
        });
    }
    for (rule, used) in policy.rules.iter().zip(used) {
        let model = policy.model.trim_end_matches('/').to_string();
        if rule.must_match && !used {
            // What the rule matches among the contractions that no rule is asked about.
            if let Some(left) = decisions
                .iter()
                .find(|d| d.rule.is_none() && rule.pattern.is_match(&d.path))
            {
                return Err(QuantError::ActivationsOnly {
                    pattern: rule.text.clone(),
                    model,
                    example: left.path.clone(),
                });
            }
            return Err(QuantError::Unmatched {
                pattern: rule.text.clone(),
                model,
                example: decisions
                    .first()
                    .map_or_else(|| "(none)".to_string(), |d| d.path.clone()),
            });
        }
    }
    if !decisions.iter().any(Decision::quantized) {
        return Err(QuantError::Nothing {
            model: policy.model.trim_end_matches('/').to_string(),
        });
    }
    Ok(decisions)
}

/// Annotation on its way through a graph.
struct Annotation<'a> {
    policy: &'a Policy,
    /// Which rules have decided something.
    used: Vec<bool>,
    decisions: Vec<Decision>,
    /// The first weight whose groups do not divide.
    undivided: Option<QuantError>,
}

/// A contraction of the model.
struct Site<'a> {
    /// Below the model's root.
    path: &'a str,
    /// Of each operand.
    shapes: [Shape; 2],
    of_weights: [bool; 2],
}

impl Annotation<'_> {
    /// Annotates the contractions of a graph and of the composites in it; `inputs` says which inputs are weights.
    fn graph(&mut self, g: &mut Graph, inputs: &[bool]) {
        let of_weights = g.made_of(inputs);
        for i in 0..g.nodes.len() {
            let operands: Vec<bool> = g.nodes[i]
                .operands
                .iter()
                .map(|o| of_weights[*o as usize])
                .collect();
            let path = g.path(&g.nodes[i]).to_string();
            let shape = |at: usize| g.nodes[g.nodes[i].operands[at] as usize].shape.clone();
            match &g.nodes[i].op {
                Op::DotGeneral { .. } | Op::Convolution { .. } => {
                    let Some(path) = path.strip_prefix(&self.policy.model) else {
                        continue;
                    };
                    let site = Site {
                        path,
                        shapes: [shape(0), shape(1)],
                        of_weights: [operands[0], operands[1]],
                    };
                    self.contraction(&site, &mut g.nodes[i].op);
                }
                Op::Composite { .. } => {
                    if let Op::Composite { body, .. } = &mut g.nodes[i].op {
                        self.graph(body, &operands);
                    }
                }
                _ => {}
            }
        }
    }

    /// Decides about a contraction and marks it.
    fn contraction(&mut self, site: &Site<'_>, op: &mut Op) {
        let policy = self.policy;
        let has_weight = site.of_weights.contains(&true);
        let path = match policy.slash_paths {
            true => site.path.replace('.', "/"),
            false => site.path.to_string(),
        };
        let (formats, rule) = match policy.stored.is_empty() {
            true => self.asked(&path, has_weight),
            false => {
                let layer = policy.stored.get(site.path).filter(|_| has_weight);
                let formats = layer.map(|layer| Formats {
                    activation: layer.activation,
                    low_rank: layer.low_rank.is_some(),
                    ..Formats::of_weights(layer.weight)
                });
                (formats, None)
            }
        };
        self.decisions.push(Decision {
            path,
            op: op.name(),
            formats,
            rule,
        });
        let is_dot = matches!(op, Op::DotGeneral { .. });
        let lhs_is_weight = site.of_weights == [true, false];
        let annotation = formats.map(|f| f.of(is_dot, lhs_is_weight, policy.arithmetic));
        if let Some(annotation) = &annotation {
            self.check_groups(site, op, annotation);
        }
        if let Op::DotGeneral { quant, .. } | Op::Convolution { quant, .. } = op {
            *quant = annotation.map(Box::new);
        }
    }

    /// What the first rule that matches says, and its pattern.
    fn asked(&mut self, path: &str, has_weight: bool) -> (Option<Formats>, Option<String>) {
        let policy = self.policy;
        let is_asked =
            |rule: &Rule| (has_weight || policy.activations) && rule.action.concerns(has_weight);
        let mut rules = policy.rules.iter();
        let Some(at) = rules.position(|r| is_asked(r) && r.pattern.is_match(path)) else {
            return (None, None);
        };
        self.used[at] = true;
        let rule = &policy.rules[at];
        let formats = match rule.action {
            Action::Float => None,
            Action::Quantize(formats) => Some(formats),
        };
        (formats, Some(rule.text.clone()))
    }

    /// Notes an operand whose groups do not divide its contracted dimension.
    fn check_groups(&mut self, site: &Site<'_>, op: &Op, annotation: &QuantDot) {
        let contraction = match op {
            Op::DotGeneral { dims, .. } => Contraction::Dot(dims.clone()),
            Op::Convolution { dims, .. } => Contraction::Convolution(dims.clone()),
            _ => return,
        };
        let ranks = [0, 1].map(|at| site.shapes[at].rank());
        let kept = contraction.kept(ranks);
        let formats = [annotation.forward.lhs, annotation.forward.rhs];
        for (at, format) in formats.into_iter().enumerate() {
            let Some(Granularity::Group(group)) = format.map(|f| f.granularity) else {
                continue;
            };
            let dims = &site.shapes[at].dims;
            let place = lower::Place {
                contraction: &contraction,
                side: at,
                kept: &kept[at],
            };
            if let Some(dim) = place.grouped_dimension(dims.len())
                && (group == 0 || !dims[dim].is_multiple_of(group))
            {
                self.undivided.get_or_insert(QuantError::Group {
                    layer: format!("{}{}", self.policy.model, site.path),
                    group,
                    elements: dims[dim],
                });
            }
        }
    }
}

#[cfg(test)]
mod tests;
