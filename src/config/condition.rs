//! The conditions on other keys under which a key has an effect.

use std::fmt;

use serde_json::Value;

use crate::models::{DenoiserKind, Family, GuidanceKind, Part};
use crate::schedulers::SchedulerKind;

use super::text::show;

/// A condition on the rest of the configuration without which a key changes nothing.
#[derive(Debug, Clone, Copy)]
pub enum Condition {
    /// The key has one of the values, as a configuration writes them.
    Is(&'static str, &'static [&'static str]),
    /// The key has any value but this.
    IsNot(&'static str, &'static str),
    /// There is a value, and it is no empty text or list.
    Given(&'static str),
    /// The number is above this one.
    MoreThan(&'static str, u8),
    /// The sampler reads this field of diffusers' `scheduler_config.json`, or `eta`. Holds where `scheduler` is not
    /// set: the model's own files say then which sampler it is.
    SamplerReads(&'static str),
    /// The family of the model may be one with this property.
    FamilyHas(Trait),
    Both(&'static Condition, &'static Condition),
    Either(&'static Condition, &'static Condition),
}

/// A property of a family that keys depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trait {
    /// Its denoiser takes an aesthetic score.
    AestheticScore,
    /// Its denoiser takes the guidance scale.
    EmbeddedGuidance,
    /// Its denoiser was distilled from guided outputs.
    Distilled,
    /// Prompts have a length of their own for one of its text encoders.
    SequenceLength,
    /// It has a text encoder beside its first.
    SecondTextEncoder,
    /// It may go without one of its text encoders.
    OptionalTextEncoder,
    /// Guidance may leave out layers of its denoiser.
    SkipLayers,
    /// It was trained with a table of sizes.
    ResolutionBins,
    /// It was trained by flow matching.
    FlowMatching,
}

impl Trait {
    fn is_of(self, family: Family) -> bool {
        let spec = family.spec();
        match self {
            Trait::AestheticScore => spec.aesthetic_score,
            Trait::EmbeddedGuidance => spec.guidance == GuidanceKind::Embedded,
            Trait::Distilled => spec.guidance != GuidanceKind::ClassifierFree,
            Trait::SequenceLength => spec.prompt_lengths().is_some(),
            Trait::SecondTextEncoder => {
                let mut encoders = spec.text_encoders.iter();
                encoders.len() > 1 && encoders.any(|e| e.part == Part::TextEncoder2)
            }
            Trait::OptionalTextEncoder => spec.text_encoders.iter().any(|e| e.optional),
            Trait::SkipLayers => spec.denoiser == DenoiserKind::Sd3,
            Trait::ResolutionBins => spec.denoiser == DenoiserKind::PixArt,
            Trait::FlowMatching => spec.denoiser.is_flow(),
        }
    }
}

impl Condition {
    /// Whether the configuration meets it; `config` has every key with its value.
    pub fn holds(&self, config: &Value) -> bool {
        let value = |path: &str| path.split('.').fold(config, |inside, key| &inside[key]);
        let is = |path: &str, text: &str| match value(path) {
            Value::String(found) => found == text,
            other => show(other) == text,
        };
        match self {
            Condition::Is(path, values) => values.iter().any(|v| is(path, v)),
            Condition::IsNot(path, text) => !is(path, text),
            Condition::Given(path) => {
                let is_empty = value(path).as_array().is_some_and(Vec::is_empty);
                !is(path, "") && !value(path).is_null() && !is_empty
            }
            Condition::MoreThan(path, least) => {
                let number = value(path).as_f64();
                number.is_some_and(|number| number > f64::from(*least))
            }
            Condition::SamplerReads(field) => value("scheduler")
                .as_str()
                .and_then(SchedulerKind::from_name)
                .is_none_or(|kind| kind.reads(field)),
            Condition::FamilyHas(property) => value("model_family")
                .as_str()
                .and_then(Family::from_name)
                .is_none_or(|family| property.is_of(family)),
            Condition::Both(a, b) => a.holds(config) && b.holds(config),
            Condition::Either(a, b) => a.holds(config) || b.holds(config),
        }
    }

    /// Whether it can hold with this sampler.
    pub fn allows(&self, sampler: SchedulerKind) -> bool {
        match self {
            Condition::SamplerReads(field) => sampler.reads(field),
            Condition::Both(a, b) => a.allows(sampler) && b.allows(sampler),
            Condition::Either(a, b) => a.allows(sampler) || b.allows(sampler),
            Condition::Is(..)
            | Condition::IsNot(..)
            | Condition::Given(_)
            | Condition::MoreThan(..)
            | Condition::FamilyHas(_) => true,
        }
    }
}

/// As a person writes it: `dataset_type=shapes`, `scheduler=ddim or tcd`.
impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Condition::Is(path, values) => write!(f, "{path}={}", alternatives(values)),
            Condition::IsNot(path, value) => write!(f, "{path} other than {value}"),
            Condition::Given(path) => f.write_str(path),
            Condition::MoreThan(path, least) => write!(f, "{path} above {least}"),
            Condition::SamplerReads(field) => {
                let (read_by, others): (Vec<_>, Vec<_>) = SchedulerKind::ALL
                    .iter()
                    .partition(|kind| kind.reads(field));
                let names = |kinds: Vec<&SchedulerKind>| {
                    let names: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
                    alternatives(&names)
                };
                match read_by.len() <= SchedulerKind::ALL.len() * 2 / 3 {
                    true => write!(f, "scheduler={}", names(read_by)),
                    false => write!(f, "scheduler other than {}", names(others)),
                }
            }
            Condition::FamilyHas(property) => {
                let with = Family::ALL
                    .into_iter()
                    .filter(|family| property.is_of(*family));
                let names: Vec<&str> = with.map(Family::name).collect();
                write!(f, "model_family={}", alternatives(&names))
            }
            Condition::Both(a, b @ Condition::Either(..)) => write!(f, "{a} and ({b})"),
            Condition::Both(a, b) => write!(f, "{a} and {b}"),
            Condition::Either(a, b) => write!(f, "{a} or {b}"),
        }
    }
}

/// `a, b or c`.
fn alternatives(names: &[&str]) -> String {
    let quoted: Vec<&str> = names
        .iter()
        .map(|n| if n.is_empty() { "''" } else { *n })
        .collect();
    match quoted.split_last() {
        Some((last, [])) => (*last).to_owned(),
        Some((last, rest)) => format!("{} or {last}", rest.join(", ")),
        None => String::new(),
    }
}
