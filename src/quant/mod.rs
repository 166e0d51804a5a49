//! Quantization: rules by path that annotate contractions, and the pass that lowers annotations to integers.
//!
//! The order in a training step is: trace the forward pass and the loss, [`annotate`], differentiate (the
//! derivative of an annotated dot makes annotated dots), finish the graph, [`lower`]. Models do not mention
//! quantization. `docs/quantization.md` gives the formulas.

mod lower;
mod stored;
mod weight;

pub use lower::{NoiseSource, ROUNDING_KEY, lower, lower_with_noise, scale_of};

pub use stored::scale_name;
pub use weight::{QuantizedWeight, WeightQuantError, quantize_weight, scale_dims};

use std::collections::{BTreeMap, BTreeSet};

use regex::Regex;

use crate::graph::{
    Builder, ContractionQuant, Graph, GraphError, NumericsConvention, Op, QuantDot, Rounding,
    TensorFormat,
};
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
    #[error(transparent)]
    Graph(#[from] GraphError),
}

/// The action of a rule on the contractions whose path it matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Float,
    /// Quantizes them in the policy's formats.
    Quantize,
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
    pub formats: Formats,
    /// The formats that weights have in their checkpoint already, by the paths of their layers: where there are any,
    /// these are the contractions that are quantized, and no rule is asked.
    pub stored: StoredFormats,
}

/// Formats of weights that are quantized in a checkpoint, by the paths of their layers: checkpoint keys without
/// `.weight`.
pub type StoredFormats = BTreeMap<String, TensorFormat>;

/// The formats of the operands of a contraction and of its derivative.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Formats {
    /// `None` leaves that operand in float.
    pub weight: Option<TensorFormat>,
    pub activation: Option<TensorFormat>,
    pub backward: Option<Backward>,
}

/// The formats of the two contractions of a dot's derivative. Derivatives of convolutions stay in float.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backward {
    /// The incoming gradient, which is the lhs of both.
    pub gradient: TensorFormat,
    /// The weight and the activation that the forward pass multiplied.
    pub residual: TensorFormat,
    /// Parts in which the range of a weight gradient's contraction is found; 0 leaves weight gradients in float.
    pub local_shards: usize,
}

impl Formats {
    /// The numerics of weights, or where they stay in float, of activations.
    pub fn convention(&self) -> NumericsConvention {
        let format = self.weight.or(self.activation);
        format.map_or(NumericsConvention::Aqt, |format| format.convention)
    }

    /// The annotation of a contraction whose rhs is the weight, or whose lhs is.
    fn of(&self, is_dot: bool, lhs_is_weight: bool) -> QuantDot {
        let (lhs, rhs) = match lhs_is_weight {
            false => (self.activation, self.weight),
            true => (self.weight, self.activation),
        };
        let backward = self.backward.filter(|_| is_dot);
        let derivative = |local_shards| {
            backward.map(|formats| ContractionQuant {
                lhs: Some(formats.gradient),
                rhs: Some(formats.residual),
                local_shards,
            })
        };
        let shards = backward.map_or(0, |formats| formats.local_shards);
        QuantDot {
            forward: ContractionQuant {
                lhs,
                rhs,
                local_shards: 1,
            },
            dlhs: derivative(1),
            drhs: derivative(shards).filter(|_| shards > 0),
        }
    }
}

impl Policy {
    /// `quantization=int8` with AQT's numerics (MaxDiffusion's `config_v3(fwd_bits=8, dlhs_bits=8, drhs_bits=8)`).
    ///
    /// `rules` come before those for `float_layers`: the paths below the model's root, as regular expressions, of what
    /// its family leaves in float.
    ///
    /// # Errors
    /// When a pattern is no regular expression.
    pub fn aqt_int8(
        model: &str,
        local_shards: usize,
        rules: Vec<Rule>,
        float_layers: &[&str],
    ) -> Result<Policy, QuantError> {
        let nearest = TensorFormat::int8(NumericsConvention::Aqt);
        let formats = Formats {
            weight: Some(nearest),
            activation: Some(nearest),
            backward: Some(Backward {
                gradient: TensorFormat {
                    rounding: Rounding::Stochastic,
                    ..nearest
                },
                residual: nearest,
                local_shards,
            }),
        };
        Policy::of_layers(model, rules, float_layers, formats)
    }

    /// `quantization=int8_w8a16`: weights in int8 with one scale an output channel, activations in float.
    ///
    /// `rules` come before those for `float_layers`, as in [`Policy::aqt_int8`].
    ///
    /// # Errors
    /// When a pattern is no regular expression.
    pub fn int8_w8a16(
        model: &str,
        convention: NumericsConvention,
        rules: Vec<Rule>,
        float_layers: &[&str],
    ) -> Result<Policy, QuantError> {
        let formats = Formats {
            weight: Some(TensorFormat::int8(convention)),
            activation: None,
            backward: None,
        };
        Policy::of_layers(model, rules, float_layers, formats)
    }

    /// Weights as a checkpoint has them, and activations in `activation`, or in float.
    pub fn stored(model: &str, stored: StoredFormats, activation: Option<TensorFormat>) -> Policy {
        Policy {
            model: model.to_string(),
            rules: Vec::new(),
            slash_paths: false,
            activations: false,
            formats: Formats {
                weight: stored.values().next().copied(),
                activation,
                backward: None,
            },
            stored,
        }
    }

    /// `rules`, then the family's layers in float, and all other contractions with a weight in `formats`.
    fn of_layers(
        model: &str,
        mut rules: Vec<Rule>,
        float_layers: &[&str],
        formats: Formats,
    ) -> Result<Policy, QuantError> {
        rules.extend(rules_of_mode(float_layers)?);
        Ok(Policy {
            model: model.to_string(),
            rules,
            slash_paths: false,
            activations: false,
            formats,
            stored: StoredFormats::new(),
        })
    }

    /// `quantization=int8 use_qwix_quantization=True`: Qwix's `QtRule` with int8 weights and activations on every
    /// dot and convolution whose module path `module_path` matches wholly; the backward pass stays in float.
    ///
    /// `rules` come before it.
    ///
    /// # Errors
    /// When `module_path` is no regular expression.
    pub fn qwix_int8(
        model: &str,
        module_path: &str,
        mut rules: Vec<Rule>,
    ) -> Result<Policy, QuantError> {
        rules.push(Rule::new(module_path, Action::Quantize, true)?);
        let format = TensorFormat::int8(NumericsConvention::Qwix);
        Ok(Policy {
            model: model.to_string(),
            rules,
            slash_paths: true,
            activations: true,
            formats: Formats {
                weight: Some(format),
                activation: Some(format),
                backward: None,
            },
            stored: StoredFormats::new(),
        })
    }
}

/// The rules after those of a user: the family's layers stay in float, all others are quantized.
fn rules_of_mode(float_layers: &[&str]) -> Result<Vec<Rule>, QuantError> {
    let float = float_layers.iter().map(|pattern| (*pattern, Action::Float));
    let rules = float.chain([(".*", Action::Quantize)]);
    rules
        .map(|(pattern, action)| Rule::new(pattern, action, false))
        .collect()
}

/// The decision of [`annotate`] for one contraction of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    pub path: String,
    pub op: &'static str,
    pub quantized: bool,
    /// The pattern that decided, or `None` where no operand is a weight.
    pub rule: Option<String>,
}

/// Annotates the model's contractions by the policy's rules and returns every decision, in graph order.
///
/// # Errors
/// When a user's rule matches nothing, a stored layer is none of the model's, or nothing at all is quantized.
pub fn annotate(b: &Builder, policy: &Policy) -> Result<Vec<Decision>, QuantError> {
    let mut annotation = Annotation {
        policy,
        used: vec![false; policy.rules.len()],
        decisions: Vec::new(),
    };
    b.with_graph_mut(|g| {
        let inputs = g.inputs.iter().map(|i| i.is_weight()).collect::<Vec<_>>();
        annotation.graph(g, &inputs);
    });
    let Annotation {
        used, decisions, ..
    } = annotation;
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
    if !decisions.iter().any(|d| d.quantized) {
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
            match &mut g.nodes[i].op {
                Op::Composite { body, .. } => self.graph(body, &operands),
                op @ (Op::DotGeneral { .. } | Op::Convolution { .. }) => {
                    if let Some(path) = path.strip_prefix(&self.policy.model) {
                        self.contraction(path, op, &operands);
                    }
                }
                _ => {}
            }
        }
    }

    fn contraction(&mut self, path: &str, op: &mut Op, of_weights: &[bool]) {
        let policy = self.policy;
        if !policy.stored.is_empty() {
            return self.stored(path, op, of_weights);
        }
        let path = match policy.slash_paths {
            true => path.replace('.', "/"),
            false => path.to_string(),
        };
        let asked = policy.activations || of_weights.contains(&true);
        let rules = &policy.rules;
        let rule = rules
            .iter()
            .position(|r| asked && r.pattern.is_match(&path));
        if let Some(rule) = rule {
            self.used[rule] = true;
        }
        let quantized = rule.is_some_and(|rule| rules[rule].action == Action::Quantize);
        self.decisions.push(Decision {
            path,
            op: op.name(),
            quantized,
            rule: rule.map(|rule| rules[rule].text.clone()),
        });
        mark(op, of_weights, quantized.then_some(policy.formats));
    }

    /// Annotates a contraction whose weight is stored quantized, and no other.
    fn stored(&mut self, path: &str, op: &mut Op, of_weights: &[bool]) {
        let weight = self.policy.stored.get(path).copied();
        let formats = weight
            .filter(|_| of_weights.contains(&true))
            .map(|_| Formats {
                weight,
                ..self.policy.formats
            });
        self.decisions.push(Decision {
            path: path.to_string(),
            op: op.name(),
            quantized: formats.is_some(),
            rule: None,
        });
        mark(op, of_weights, formats);
    }
}

/// Puts formats on a contraction, or takes them off.
fn mark(op: &mut Op, of_weights: &[bool], formats: Option<Formats>) {
    let is_dot = matches!(op, Op::DotGeneral { .. });
    if let Op::DotGeneral { quant, .. } | Op::Convolution { quant, .. } = op {
        *quant = formats.map(|formats| Box::new(formats.of(is_dot, of_weights == [true, false])));
    }
}

#[cfg(test)]
mod tests;
