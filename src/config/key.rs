//! A key of the schema.

use std::fmt;

use serde_json::Value;

use super::condition::Condition;
use super::error::{Problem, Problems};
use super::text::{list_names, show};
use super::verb::Verb;

/// The effect of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// A MaxDiffusion key with MaxDiffusion's meaning.
    Used,
    /// A key of this project.
    Ours,
    /// MaxDiffusion accepts the key and never reads it, nor does this program. Another value than the default warns in
    /// a file, so that MaxDiffusion's files load, and is refused on the command line.
    IgnoredByMaxDiffusion,
    /// The key means nothing here, for the reason given; treated alike.
    NoEffect(&'static str),
    /// The feature named does not exist here yet: any value but the default is refused.
    NotYet(&'static str),
}

/// The numbers a key takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Range {
    AtLeast(f64),
    Above(f64),
    /// The upper end included.
    AboveUpTo(f64, f64),
    /// Both ends included.
    Between(f64, f64),
    /// The upper end excluded.
    HalfOpen(f64, f64),
    /// -1, which stands for "choose for me" or "never", or at least the number.
    MinusOneOr(f64),
    /// The same with an upper end, which is included.
    MinusOneOrBetween(f64, f64),
}

impl Range {
    pub(super) fn contains(self, v: f64) -> bool {
        match self {
            Range::AtLeast(low) => v >= low,
            Range::Above(low) => v > low,
            Range::Between(low, high) => (low..=high).contains(&v),
            Range::HalfOpen(low, high) => (low..high).contains(&v),
            Range::AboveUpTo(low, high) => v > low && v <= high,
            Range::MinusOneOr(low) => v == -1.0 || v >= low,
            Range::MinusOneOrBetween(low, high) => v == -1.0 || (low..=high).contains(&v),
        }
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Range::AtLeast(low) => write!(f, "at least {low}"),
            Range::Above(low) => write!(f, "more than {low}"),
            Range::Between(low, high) => write!(f, "{low} to {high}"),
            Range::HalfOpen(low, high) => write!(f, "at least {low} and less than {high}"),
            Range::AboveUpTo(low, high) => write!(f, "more than {low}, at most {high}"),
            Range::MinusOneOr(low) => write!(f, "-1 or at least {low}"),
            Range::MinusOneOrBetween(low, high) => write!(f, "-1 or {low} to {high}"),
        }
    }
}

/// The type of a key's value.
#[derive(Debug, Clone, Copy)]
pub enum Ty {
    Bool,
    Int,
    Float,
    Text,
    /// One of a closed set of names.
    Choice(&'static [&'static str]),
    /// Empty or null means "not set".
    Optional(&'static Ty),
    /// One value, or a list of such.
    OneOrMore(&'static Ty),
    /// A list, with a description of the whole.
    List(&'static str),
    /// A text or a list of texts.
    Texts,
    /// A dict with a schema of its own.
    Dict(&'static [Key]),
    /// A free dict, or the path of a JSON file that holds it, with a description.
    Model(&'static str),
    /// A free dict.
    Free,
}

impl fmt::Display for Ty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ty::Bool => f.write_str("boolean"),
            Ty::Int => f.write_str("integer"),
            Ty::Float => f.write_str("float"),
            Ty::Text => f.write_str("string"),
            Ty::Choice(names) => write!(f, "one of {}", list_names(names)),
            Ty::Optional(inner) => write!(f, "{inner}, or '' for unset"),
            Ty::OneOrMore(inner) => write!(f, "{inner} or list of such"),
            Ty::List(what) | Ty::Model(what) => f.write_str(what),
            Ty::Texts => f.write_str("string or list of strings"),
            Ty::Dict(_) | Ty::Free => f.write_str("dict"),
        }
    }
}

/// Other properties of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// It decides what training computes: a run continues a checkpoint only with the value that the checkpoint has.
    FixedOnResume,
    /// `generate` does not write it among the options of an image: the image has a field of its own for it, or it does
    /// not change the image.
    NotAnOption,
}

/// One key of the schema.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    pub name: &'static str,
    /// Heading under which the documentation lists it.
    pub group: &'static str,
    pub doc: &'static str,
    pub ty: Ty,
    pub default: fn() -> Value,
    pub status: Status,
    /// The verbs whose outcome it changes.
    pub verbs: &'static [Verb],
    pub range: Option<Range>,
    pub condition: Option<Condition>,
    pub marks: &'static [Mark],
}

impl Key {
    /// The verbs by name, for messages.
    pub fn affects(&self) -> String {
        let names: Vec<_> = self.verbs.iter().map(|v| v.name()).collect();
        names.join(", ")
    }

    pub fn is(&self, mark: Mark) -> bool {
        self.marks.contains(&mark)
    }

    pub(super) fn check_range(&self, value: &Value, path: &str, problems: &mut Problems) {
        let Some(range) = self.range else { return };
        let values = match value {
            Value::Array(items) => items.as_slice(),
            one => std::slice::from_ref(one),
        };
        for value in values {
            if let Some(number) = value.as_f64()
                && !range.contains(number)
            {
                problems.push((
                    path.to_owned(),
                    Problem::OutOfRange {
                        found: show(value),
                        range: range.to_string(),
                    },
                ));
            }
        }
    }
}

pub(super) fn find_key(keys: &'static [Key], name: &str) -> Option<&'static Key> {
    keys.iter().find(|k| k.name == name)
}
