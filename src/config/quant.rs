//! Rules of quantization, and which weights share a scale.

use std::path::Path;

use serde_json::{Map, Value};

use crate::graph::{Granularity, NumericsConvention};
use crate::quant::ObserverKind;
use crate::util::named;
use crate::util::names::nearest;

use super::error::{Problem, Problems};
use super::field::{Field, refuse, wrong_type};
use super::key::Ty;
use super::values::WeightAlgorithm;
use super::yaml::{join, parse_flow, read_file};

named! {
    /// What a quantization rule gives the contractions that it matches.
    pub enum QuantRuleMode {
        /// They stay in float.
        None = "none",
        Int8 = "int8",
        Int8W8A16 = "int8_w8a16",
        W4A16 = "w4a16",
        Fp8 = "fp8",
        Fp8Full = "fp8_full",
        Fp8W8A16 = "fp8_w8a16",
        Nf4 = "nf4",
        MxFp4 = "mxfp4",
        MxFp6E2M3 = "mxfp6_e2m3",
        MxFp6E3M2 = "mxfp6_e3m2",
        MxFp8 = "mxfp8",
        NvFp4 = "nvfp4",
        Int8W8A8Static = "int8_w8a8_static",
        Fp8W8A8Static = "fp8_w8a8_static",
        SvdQuantW4A16 = "svdquant_w4a16",
        W4A4 = "w4a4",
        SvdQuantW4A4 = "svdquant_w4a4",
    }
}

/// Which elements of a weight share a scale; `None` is the mode's own choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WeightGranularity(pub Option<Granularity>);

impl Field for WeightGranularity {
    const TY: Ty = Ty::Model("tensor, channel, or a number of input features");

    fn parse(value: &Value, path: &str, problems: &mut Problems) -> Option<Self> {
        let size = match value {
            Value::String(text) => text.parse().ok(),
            other => other.as_u64(),
        };
        let granularity = match (value.as_str(), size) {
            (Some(""), _) => None,
            (Some("tensor"), _) => Some(Granularity::Tensor),
            (Some("channel"), _) => Some(Granularity::Channel),
            (_, Some(size @ 1..)) => Some(Granularity::Group(usize::try_from(size).ok()?)),
            _ if value.is_null() => None,
            _ => return refuse(value, path, problems),
        };
        Some(WeightGranularity(granularity))
    }

    fn show(&self) -> Value {
        match self.0 {
            None | Some(Granularity::Feature | Granularity::Part(_)) => Value::from(""),
            Some(Granularity::Tensor) => Value::from("tensor"),
            Some(Granularity::Channel) => Value::from("channel"),
            Some(Granularity::Group(size)) => Value::from(size),
        }
    }
}

/// The mode of the contractions under a path, with what is not the mode's own choice. The quantization pass defines the
/// form of the pattern.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuantRule {
    pub path: String,
    pub mode: QuantRuleMode,
    pub granularity: WeightGranularity,
    pub symmetric: Option<bool>,
    pub numerics: Option<NumericsConvention>,
    /// What decides the ranges of weights, where it is not `quantization_observer`.
    pub observer: Option<ObserverKind>,
    /// How weights become integers, where it is not `quantization_algorithm`.
    pub algorithm: Option<WeightAlgorithm>,
}

/// Explicit quantization rules; the first that matches wins.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct QuantRules(pub Vec<QuantRule>);

const RULE_KEYS: [&str; 7] = [
    "path",
    "mode",
    "granularity",
    "symmetric",
    "numerics",
    "observer",
    "algorithm",
];
const RULE: &str = "a dict {path: pattern, mode: mode or none, granularity, symmetric, numerics, observer, algorithm}";

impl QuantRule {
    /// Whether it says how weights become numbers of their format, which `quantize` does.
    pub fn says_rounding(&self) -> bool {
        self.observer.is_some() || self.algorithm.is_some()
    }

    fn parse(item: &Value, path: &str, problems: &mut Problems) -> Option<Self> {
        let Some(map) = item.as_object() else {
            problems.push((path.to_owned(), wrong_type(RULE, item)));
            return None;
        };
        let before = problems.len();
        for name in map.keys().filter(|n| !RULE_KEYS.contains(&n.as_str())) {
            let nearest = nearest(name, RULE_KEYS);
            problems.push((join(path, name), Problem::UnknownKey { nearest }));
        }
        let rule = QuantRule {
            path: required(map, "path", path, problems)?,
            mode: match map.get("mode") {
                Some(Value::Null) => QuantRuleMode::None,
                _ => required(map, "mode", path, problems)?,
            },
            granularity: optional(map, "granularity", path, problems).unwrap_or_default(),
            symmetric: optional(map, "symmetric", path, problems),
            numerics: optional(map, "numerics", path, problems),
            observer: optional(map, "observer", path, problems),
            algorithm: optional(map, "algorithm", path, problems),
        };
        (problems.len() == before).then_some(rule)
    }

    fn show(&self) -> Value {
        let mut map = Map::new();
        map.insert("path".to_owned(), Value::from(self.path.as_str()));
        map.insert("mode".to_owned(), Value::from(self.mode.name()));
        if self.granularity.0.is_some() {
            map.insert("granularity".to_owned(), self.granularity.show());
        }
        if let Some(symmetric) = self.symmetric {
            map.insert("symmetric".to_owned(), Value::from(symmetric));
        }
        if let Some(numerics) = self.numerics {
            map.insert("numerics".to_owned(), Value::from(numerics.name()));
        }
        if let Some(observer) = self.observer {
            map.insert("observer".to_owned(), Value::from(observer.name()));
        }
        if let Some(algorithm) = self.algorithm {
            map.insert("algorithm".to_owned(), Value::from(algorithm.name()));
        }
        Value::Object(map)
    }
}

/// The list of rules in a YAML file, whose path counts from the current folder.
fn rules_of_file(file: &str) -> Result<Value, String> {
    parse_flow(&read_file(Path::new(file))?)
}

fn required<T: Field>(
    map: &Map<String, Value>,
    name: &str,
    path: &str,
    problems: &mut Problems,
) -> Option<T> {
    T::parse(
        map.get(name).unwrap_or(&Value::Null),
        &join(path, name),
        problems,
    )
}

/// `None` where it is not given, or is wrong, which is noted.
fn optional<T: Field>(
    map: &Map<String, Value>,
    name: &str,
    path: &str,
    problems: &mut Problems,
) -> Option<T> {
    T::parse(map.get(name)?, &join(path, name), problems)
}

impl QuantRules {
    /// The rules as a list in YAML, one a line.
    pub fn to_yaml(&self) -> String {
        let rule = |rule: &QuantRule| {
            let Value::Object(map) = rule.show() else {
                return String::new();
            };
            let entry = |(name, value): (&String, &Value)| match value.as_str() {
                // In single quotes nothing but the quote has a meaning.
                Some(text) if name == "path" => format!("{name}: '{}'", text.replace('\'', "''")),
                Some(text) => format!("{name}: {text}"),
                None => format!("{name}: {value}"),
            };
            let entries: Vec<String> = map.iter().map(entry).collect();
            format!("- {{{}}}\n", entries.join(", "))
        };
        self.0.iter().map(rule).collect()
    }
}

impl Field for QuantRules {
    const TY: Ty = Ty::List(
        "YAML file of rules, or list of {path: pattern, mode: int8, int8_w8a16, w4a16, fp8, fp8_full, fp8_w8a16, nf4, mxfp4, mxfp6_e2m3, mxfp6_e3m2, mxfp8, nvfp4, \
         int8_w8a8_static, fp8_w8a8_static, \
         svdquant_w4a16, w4a4, svdquant_w4a4 or none, granularity, symmetric, numerics, observer, algorithm}",
    );

    fn parse(value: &Value, path: &str, problems: &mut Problems) -> Option<Self> {
        let of_file;
        let value = match value.as_str() {
            Some(file) if !file.is_empty() => match rules_of_file(file) {
                Ok(value) => {
                    of_file = value;
                    &of_file
                }
                Err(problem) => {
                    problems.push((path.to_owned(), Problem::Read(format!("{file}: {problem}"))));
                    return None;
                }
            },
            _ => value,
        };
        let Some(items) = value.as_array() else {
            return refuse(value, path, problems);
        };
        let read: Vec<_> = items
            .iter()
            .map(|item| QuantRule::parse(item, path, problems))
            .collect();
        read.into_iter().collect::<Option<_>>().map(QuantRules)
    }

    fn show(&self) -> Value {
        self.0.iter().map(QuantRule::show).collect()
    }
}
