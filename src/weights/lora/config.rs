//! PEFT's configuration of an adapter: the metadata that diffusers writes, or the `adapter_config.json` of a folder.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::dialects::{DORA, part_of_root};
use crate::models::Part;

/// The scale of the factors, where there is no `alpha` tensor.
#[derive(Debug)]
struct Scaling {
    alpha: f64,
    /// Other values of alpha by module; the first that matches holds.
    patterns: Vec<(Pattern, f64)>,
    /// Rank-stabilized LoRA: alpha is divided by the root of the rank instead of the rank.
    stabilized: bool,
}

/// A module's path, or an end of it that begins at a dot.
///
/// PEFT takes it for a regular expression. What diffusers writes are paths, with `^` before a whole one; more is
/// refused, so that a file's own expressions are never run.
#[derive(Debug)]
struct Pattern {
    path: String,
    whole: bool,
}

impl Pattern {
    fn new(text: &str) -> Option<Pattern> {
        let (path, whole) = match text.strip_prefix('^') {
            Some(path) => (path, true),
            None => (text, false),
        };
        let path = path.strip_suffix('$').unwrap_or(path).replace("\\.", ".");
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        (!path.is_empty() && path.chars().all(plain)).then_some(Pattern { path, whole })
    }

    fn matches(&self, module: &str) -> bool {
        match module.strip_suffix(self.path.as_str()) {
            Some("") => true,
            Some(before) => !self.whole && before.ends_with('.'),
            None => false,
        }
    }
}

/// Initializations that leave the base weights as they are.
const PLAIN_INITS: [&str; 3] = ["gaussian", "orthogonal", "eva"];

/// Fields that change what is computed with the same tensors, with what they ask for.
const OTHER_COMPUTATIONS: [(&str, &str); 10] = [
    ("use_dora", DORA),
    ("use_qalora", "QALoRA"),
    ("use_bdlora", "BD-LoRA"),
    ("fan_in_fan_out", "transposed weights"),
    ("layer_replication", "replicated layers"),
    ("alora_invocation_tokens", "activated LoRA"),
    ("arrow_config", "routed LoRA"),
    ("velora_config", "VeLoRA"),
    ("monteclora_config", "MonteCLoRA"),
    ("kasa_config", "KaSA"),
];

/// The scaling of each part of a file. Modules whose names do not tell their part have the one without.
#[derive(Debug, Default)]
pub(super) struct Config {
    parts: BTreeMap<Option<Part>, Scaling>,
}

impl Config {
    /// Reads fields that may have a part's name and a dot before theirs.
    ///
    /// # Errors
    /// The field that is malformed, or asks for what is no plain LoRA.
    pub fn from_fields(fields: Map<String, Value>) -> Result<Config, String> {
        let mut parts: BTreeMap<Option<Part>, Map<String, Value>> = BTreeMap::new();
        for (name, value) in fields {
            let prefixed = name
                .split_once('.')
                .and_then(|(root, field)| Some((part_of_root(root)?, field)));
            let (part, field) = match prefixed {
                Some((part, field)) => (Some(part), field.to_owned()),
                None => (None, name),
            };
            parts.entry(part).or_default().insert(field, value);
        }
        let parts = parts
            .into_iter()
            .map(|(part, fields)| Ok((part, Scaling::from_fields(&fields)?)))
            .collect::<Result<_, String>>()?;
        Ok(Config { parts })
    }

    /// The factor of the product of a module's factors, if the configuration gives it. `module` is its name below
    /// `part`.
    pub fn multiplier(&self, part: Option<Part>, module: &str, rank: usize) -> Option<f64> {
        let scaling = self.parts.get(&part)?;
        let alpha = scaling
            .patterns
            .iter()
            .find_map(|(pattern, alpha)| pattern.matches(module).then_some(*alpha))
            .unwrap_or(scaling.alpha);
        let rank = rank as f64;
        Some(
            alpha
                / if scaling.stabilized {
                    rank.sqrt()
                } else {
                    rank
                },
        )
    }
}

impl Scaling {
    fn from_fields(fields: &Map<String, Value>) -> Result<Scaling, String> {
        if let Some(kind) = fields.get("peft_type")
            && kind != "LORA"
        {
            return Err(format!("peft_type is {kind}; expected \"LORA\""));
        }
        for (field, what) in OTHER_COMPUTATIONS {
            match fields.get(field) {
                None | Some(Value::Null | Value::Bool(false)) => {}
                Some(value) => {
                    return Err(format!("{field} is {value}: {what} is not supported"));
                }
            }
        }
        match fields.get("init_lora_weights") {
            None | Some(Value::Null | Value::Bool(_)) => {}
            Some(Value::String(init)) if PLAIN_INITS.contains(&init.as_str()) => {}
            Some(other) => {
                return Err(format!(
                    "init_lora_weights is {other}, which trains beside changed base weights; expected a boolean or {}; \
                     convert it with PEFT's path_initial_model_for_weight_conversion",
                    PLAIN_INITS.join(", ")
                ));
            }
        }
        let alpha = fields.get("lora_alpha").ok_or("lora_alpha is missing")?;
        let mut patterns = Vec::new();
        match fields.get("alpha_pattern") {
            None | Some(Value::Null) => {}
            Some(Value::Object(given)) => {
                for (text, alpha) in given {
                    let pattern = Pattern::new(text).ok_or_else(|| {
                        format!("alpha_pattern {text}: expected a module's path, not a regular expression")
                    })?;
                    patterns.push((pattern, number("alpha_pattern", alpha)?));
                }
            }
            Some(other) => return Err(format!("alpha_pattern is {other}; expected an object")),
        }
        let stabilized = match fields.get("use_rslora") {
            None | Some(Value::Null) => false,
            Some(Value::Bool(value)) => *value,
            Some(other) => return Err(format!("use_rslora is {other}; expected a boolean")),
        };
        Ok(Scaling {
            alpha: number("lora_alpha", alpha)?,
            patterns,
            stabilized,
        })
    }
}

fn number(field: &str, value: &Value) -> Result<f64, String> {
    value
        .as_f64()
        .ok_or_else(|| format!("{field} is {value}; expected a number"))
}
