//! Quantization: rules by path that annotate contractions, and the pass that lowers annotations to integers.
//!
//! The order in a training step is: trace the forward pass and the loss, [`annotate`], differentiate (the
//! derivative of an annotated dot makes annotated dots), finish the graph, [`lower`]. Models do not mention
//! quantization. `docs/quantization.md` gives the formulas.

mod lower;

pub use lower::{NoiseSource, ROUNDING_KEY, lower, lower_with_noise};

use regex::Regex;

use crate::dtype::DType;
use crate::graph::{
    Builder, ContractionQuant, GraphError, NumericsConvention, Op, OperandQuant, QuantDot, Rounding,
};

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
    #[error(transparent)]
    Graph(#[from] GraphError),
}

/// What a rule does with the contractions whose path it matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Float,
    Int8,
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

/// Which contractions become integers, and how.
#[derive(Clone, Debug)]
pub struct Policy {
    /// The root scope of the model it applies to, e.g. `unet/`.
    pub model: String,
    pub convention: NumericsConvention,
    pub rules: Vec<Rule>,
    /// Whether a rule's path separates modules by `/`, as Qwix writes them, instead of `.`.
    pub slash_paths: bool,
    /// Whether contractions of two activations (attention scores and values) are quantized as well.
    pub activations: bool,
    /// Parts in which the range of a weight gradient's contraction is found; 0 leaves weight gradients in float.
    pub local_shards: usize,
}

/// Layers that stay in float under `quantization=int8`: they are small, and sensitive to rounding.
const FLOAT_LAYERS: [&str; 5] = [
    r"(.*\.)?time_embedding\..*",
    r"(.*\.)?add_embedding\..*",
    r"(.*\.)?time_emb_proj",
    r"conv_in",
    r"conv_out",
];

impl Policy {
    /// `quantization=int8` with AQT's numerics (MaxDiffusion's `config_v3(fwd_bits=8, dlhs_bits=8, drhs_bits=8)`).
    ///
    /// `rules` come before the built-in ones.
    ///
    /// # Errors
    /// When a pattern is no regular expression.
    pub fn aqt_int8(
        model: &str,
        local_shards: usize,
        mut rules: Vec<Rule>,
    ) -> Result<Policy, QuantError> {
        for pattern in FLOAT_LAYERS {
            rules.push(Rule::new(pattern, Action::Float, false)?);
        }
        rules.push(Rule::new(".*", Action::Int8, false)?);
        Ok(Policy {
            model: model.to_string(),
            convention: NumericsConvention::Aqt,
            rules,
            slash_paths: false,
            activations: false,
            local_shards,
        })
    }

    /// `quantization=int8 use_qwix_quantization=True`: Qwix's `QtRule` with int8 weights and activations on every
    /// dot and convolution whose module path `module_path` matches wholly; the backward pass stays in float.
    ///
    /// # Errors
    /// When `module_path` is no regular expression.
    pub fn qwix_int8(model: &str, module_path: &str) -> Result<Policy, QuantError> {
        Ok(Policy {
            model: model.to_string(),
            convention: NumericsConvention::Qwix,
            rules: vec![Rule::new(module_path, Action::Int8, true)?],
            slash_paths: true,
            activations: true,
            local_shards: 0,
        })
    }

    fn quant(&self, is_dot: bool) -> QuantDot {
        let operand = |rounding| OperandQuant {
            dtype: DType::S8,
            convention: self.convention,
            rounding,
        };
        let nearest = operand(Rounding::NearestEven);
        let forward = ContractionQuant {
            lhs: nearest,
            rhs: nearest,
            local_shards: 1,
        };
        // The incoming gradient, which is the lhs of both, rounds stochastically.
        let backward = |local_shards| ContractionQuant {
            lhs: operand(Rounding::Stochastic),
            rhs: nearest,
            local_shards,
        };
        let trains = is_dot && self.convention == NumericsConvention::Aqt;
        QuantDot {
            forward,
            dlhs: trains.then(|| backward(1)),
            drhs: (trains && self.local_shards > 0).then(|| backward(self.local_shards)),
        }
    }
}

/// What [`annotate`] decided for one contraction of the model.
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
/// When a user's rule matches nothing, or nothing at all is quantized.
pub fn annotate(b: &Builder, policy: &Policy) -> Result<Vec<Decision>, QuantError> {
    let mut used = vec![false; policy.rules.len()];
    let mut decisions = Vec::new();
    b.with_graph_mut(|g| {
        let weight_only = g.weight_only();
        for i in 0..g.nodes.len() {
            let is_dot = matches!(g.nodes[i].op, Op::DotGeneral { .. });
            if !is_dot && !matches!(g.nodes[i].op, Op::Convolution { .. }) {
                continue;
            }
            let Some(path) = g.path(&g.nodes[i]).strip_prefix(&policy.model) else {
                continue;
            };
            let path = if policy.slash_paths {
                path.replace('.', "/")
            } else {
                path.to_string()
            };
            let has_weight = g.nodes[i].operands.iter().any(|o| weight_only[*o as usize]);
            let rule = if has_weight || policy.activations {
                policy.rules.iter().position(|r| r.pattern.is_match(&path))
            } else {
                None
            };
            if let Some(r) = rule {
                used[r] = true;
            }
            let quantized = rule.is_some_and(|r| policy.rules[r].action == Action::Int8);
            let node = &mut g.nodes[i];
            decisions.push(Decision {
                path,
                op: node.op.name(),
                quantized,
                rule: rule.map(|r| policy.rules[r].text.clone()),
            });
            if let Op::DotGeneral { quant, .. } | Op::Convolution { quant, .. } = &mut node.op {
                *quant = quantized.then(|| Box::new(policy.quant(is_dot)));
            }
        }
    });
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

#[cfg(test)]
mod tests;
