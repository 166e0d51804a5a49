//! What a key of the schema is: its type, its checks, how its value is read and shown, and the
//! macros that declare a whole section once.

use std::fmt;

use serde_json::{Map, Value};

use crate::util::Named;
use crate::util::names::nearest;
use crate::util::text::shortened;

use super::error::Problem;
use super::schema::Config;
use super::verb::Verb;
use super::yaml::{join, parse_flow};

/// What setting a key does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// A MaxDiffusion key with MaxDiffusion's meaning.
    Used,
    /// A key of this project.
    Ours,
    /// MaxDiffusion accepts the key and never reads it; so here, with a warning.
    IgnoredByMaxDiffusion,
    /// The key means nothing here, for the reason given. Another value than the default warns in
    /// a file, so that MaxDiffusion's files load, and is refused on the command line.
    NoEffect(&'static str),
    /// The feature named does not exist here yet: any value but the default is refused.
    NotYet(&'static str),
}

/// The numbers a key takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Range {
    AtLeast(f64),
    Above(f64),
    /// Both ends included.
    Between(f64, f64),
    /// The upper end excluded.
    HalfOpen(f64, f64),
    /// -1, which stands for "choose for me" or "never", or at least the number.
    MinusOneOr(f64),
}

impl Range {
    fn contains(self, v: f64) -> bool {
        match self {
            Range::AtLeast(low) => v >= low,
            Range::Above(low) => v > low,
            Range::Between(low, high) => (low..=high).contains(&v),
            Range::HalfOpen(low, high) => (low..high).contains(&v),
            Range::MinusOneOr(low) => v == -1.0 || v >= low,
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
            Range::MinusOneOr(low) => write!(f, "-1 or at least {low}"),
        }
    }
}

/// A condition on the rest of the configuration without which a key changes nothing.
#[derive(Debug, Clone, Copy)]
pub struct Condition {
    /// As a person reads it: `opt_enable_grad_clipping=True`.
    pub text: &'static str,
    pub holds: fn(&Config) -> bool,
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
}

impl Key {
    /// The verbs by name, for messages.
    pub fn affects(&self) -> String {
        let names: Vec<_> = self.verbs.iter().map(|v| v.name()).collect();
        names.join(", ")
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

/// What is wrong inside one configuration, by dotted path.
pub(super) type Problems = Vec<(String, Problem)>;

/// A value that a key can have.
pub(super) trait Field: Sized {
    const TY: Ty;

    /// The value that a file or the command line gives; `None`, and the problem recorded, if it is none of the type.
    fn parse(value: &Value, path: &str, problems: &mut Problems) -> Option<Self>;

    /// Replaces `self`, or changes the part of it that `value` gives. On a problem `self` stays as it was.
    fn read(&mut self, value: &Value, path: &str, problems: &mut Problems) {
        if let Some(read) = Self::parse(value, path, problems) {
            *self = read;
        }
    }

    /// The value as JSON; `parse` takes it back.
    fn show(&self) -> Value;
}

/// A struct whose fields are keys.
pub(super) trait Schema {
    const KEYS: &'static [Key];

    fn read_key(&mut self, name: &str, value: &Value, path: &str, problems: &mut Problems);
    fn show_key(&self, name: &str) -> Value;

    /// Reads every entry of `map`, which may leave keys out.
    fn read_map(&mut self, map: &Map<String, Value>, path: &str, problems: &mut Problems) {
        for (name, value) in map {
            let at = join(path, name);
            match find_key(Self::KEYS, name) {
                Some(key) => {
                    let before = problems.len();
                    self.read_key(name, value, &at, problems);
                    if problems.len() == before {
                        key.check_range(&self.show_key(name), &at, problems);
                    }
                }
                None => {
                    let nearest = nearest(name, Self::KEYS.iter().map(|k| k.name));
                    problems.push((at, Problem::UnknownKey { nearest }));
                }
            }
        }
    }

    fn show_map(&self) -> Map<String, Value> {
        Self::KEYS
            .iter()
            .map(|k| (k.name.to_owned(), self.show_key(k.name)))
            .collect()
    }
}

pub(super) fn find_key(keys: &'static [Key], name: &str) -> Option<&'static Key> {
    keys.iter().find(|k| k.name == name)
}

/// Characters of a value that messages show.
const SHOWN: usize = 80;

/// A value as a configuration would write it, shortened.
pub(super) fn show(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(true) => "True".into(),
        Value::Bool(false) => "False".into(),
        Value::String(s) => format!("'{}'", shortened(s, SHOWN)),
        other => shortened(&other.to_string(), SHOWN),
    }
}

/// A value with the name of its type, for messages.
pub(super) fn describe(value: &Value) -> String {
    match value {
        Value::Null => "nothing (null)".into(),
        Value::Bool(_) => format!("boolean {}", show(value)),
        Value::Number(n) if n.is_f64() => format!("float {n}"),
        Value::Number(n) => format!("integer {n}"),
        Value::String(_) => format!("string {}", show(value)),
        Value::Array(_) => format!("list {}", show(value)),
        Value::Object(_) => format!("dict {}", show(value)),
    }
}

fn list_names(names: &[&str]) -> String {
    names
        .iter()
        .map(|n| if n.is_empty() { "''" } else { n })
        .collect::<Vec<_>>()
        .join(", ")
}

pub(super) fn wrong_type(expected: impl fmt::Display, found: &Value) -> Problem {
    let mut expected = expected.to_string();
    if matches!(found, Value::Bool(_) | Value::Number(_)) && expected.contains("string") {
        expected.push_str(" (quote it)");
    }
    Problem::WrongType {
        expected,
        found: describe(found),
    }
}

/// The value that a command-line text stands for, by the type of its key. Text that does not fit
/// comes back as a string, for `read` to refuse with the type's own message.
pub(super) fn parse_text(ty: Ty, text: &str) -> Result<Value, String> {
    let as_is = || Value::String(text.to_owned());
    Ok(match ty {
        Ty::Bool if text.eq_ignore_ascii_case("true") => Value::Bool(true),
        Ty::Bool if text.eq_ignore_ascii_case("false") => Value::Bool(false),
        Ty::Bool => as_is(),
        Ty::Int | Ty::Float => {
            let digits = text.trim().replace('_', "");
            if let Ok(v) = digits.parse::<i64>() {
                Value::from(v)
            } else {
                digits
                    .parse::<f64>()
                    .ok()
                    .and_then(serde_json::Number::from_f64)
                    .map_or_else(as_is, Value::Number)
            }
        }
        Ty::Text | Ty::Choice(_) => as_is(),
        Ty::Optional(_) if matches!(text, "" | "None" | "null") => Value::Null,
        Ty::Optional(inner) => parse_text(*inner, text)?,
        // A prompt may start with a bracket: only what reads as a list of texts is one.
        Ty::Texts => match parse_flow(text) {
            Ok(Value::Array(items))
                if text.trim_start().starts_with('[') && items.iter().all(Value::is_string) =>
            {
                Value::Array(items)
            }
            _ => as_is(),
        },
        Ty::OneOrMore(_) if text.trim_start().starts_with('[') => parse_flow(text)?,
        Ty::OneOrMore(inner) => parse_text(*inner, text)?,
        Ty::Model(_) if text.trim_start().starts_with('{') => parse_flow(text)?,
        Ty::Model(_) => as_is(),
        Ty::List(_) | Ty::Dict(_) | Ty::Free => parse_flow(text)?,
    })
}

/// Records that `value` is of another type.
pub(super) fn refuse<T: Field>(value: &Value, path: &str, problems: &mut Problems) -> Option<T> {
    problems.push((path.to_owned(), wrong_type(T::TY, value)));
    None
}

impl Field for bool {
    const TY: Ty = Ty::Bool;

    fn parse(value: &Value, path: &str, problems: &mut Problems) -> Option<Self> {
        value.as_bool().or_else(|| refuse(value, path, problems))
    }
    fn show(&self) -> Value {
        Value::Bool(*self)
    }
}

/// An integer, also when written `1e3`.
fn integer(value: &Value) -> Option<i64> {
    // 2^53: above, a float no longer names one integer.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    value.as_i64().or_else(|| {
        let v = value.as_f64()?;
        (v.fract() == 0.0 && v.abs() <= EXACT).then_some(v as i64)
    })
}

impl Field for i64 {
    const TY: Ty = Ty::Int;

    fn parse(value: &Value, path: &str, problems: &mut Problems) -> Option<Self> {
        integer(value).or_else(|| refuse(value, path, problems))
    }
    fn show(&self) -> Value {
        Value::from(*self)
    }
}

impl Field for u64 {
    const TY: Ty = Ty::Int;

    fn parse(value: &Value, path: &str, problems: &mut Problems) -> Option<Self> {
        let Ok(read) = u64::try_from(i64::parse(value, path, problems)?) else {
            let problem = Problem::OutOfRange {
                found: show(value),
                range: Range::AtLeast(0.0).to_string(),
            };
            problems.push((path.to_owned(), problem));
            return None;
        };
        Some(read)
    }
    fn show(&self) -> Value {
        Value::from(*self)
    }
}

impl Field for f64 {
    const TY: Ty = Ty::Float;

    fn parse(value: &Value, path: &str, problems: &mut Problems) -> Option<Self> {
        value.as_f64().or_else(|| refuse(value, path, problems))
    }
    fn show(&self) -> Value {
        Value::from(*self)
    }
}

impl Field for String {
    const TY: Ty = Ty::Text;

    fn parse(value: &Value, path: &str, problems: &mut Problems) -> Option<Self> {
        let text = value.as_str().map(str::to_owned);
        text.or_else(|| refuse(value, path, problems))
    }
    fn show(&self) -> Value {
        Value::String(self.clone())
    }
}

impl<T: Field> Field for Option<T> {
    const TY: Ty = Ty::Optional(&T::TY);

    fn parse(value: &Value, path: &str, problems: &mut Problems) -> Option<Self> {
        if value.is_null() || value.as_str() == Some("") {
            return Some(None);
        }
        T::parse(value, path, problems).map(Some)
    }
    fn show(&self) -> Value {
        self.as_ref()
            .map_or_else(|| Value::String(String::new()), Field::show)
    }
}

impl<T: Named> Field for T {
    const TY: Ty = Ty::Choice(T::NAMES);

    fn parse(value: &Value, path: &str, problems: &mut Problems) -> Option<Self> {
        let read = value.as_str().and_then(T::from_name);
        if read.is_none() {
            problems.push((path.to_owned(), not_a_choice::<T>(value)));
        }
        read
    }
    fn show(&self) -> Value {
        Value::from(self.name())
    }
}

fn not_a_choice<T: Named>(value: &Value) -> Problem {
    let Some(text) = value.as_str() else {
        return wrong_type(Ty::Text, value);
    };
    let valid = list_names(T::NAMES);
    let found = show(value);
    if T::NOT_YET.contains(&text) {
        return Problem::ValueNotYet { found, valid };
    }
    Problem::NotAllowed {
        found,
        valid,
        nearest: nearest(text, T::NAMES.iter().copied()),
    }
}

/// Declares a struct of keys once: field, type, default, status, verbs, and if need be the range
/// and the condition. Its `KEYS` are the schema.
macro_rules! schema {
    (
        $(#[$meta:meta])*
        pub struct $name:ident {
            $(
                group $group:literal;
                $(
                    $(#[doc = $doc:literal])+
                    $key:ident: $ty:ty = $default:expr, $status:expr, $verbs:expr
                        $(, in $range:expr)?
                        $(, when $cond:literal $when:expr)?;
                )+
            )+
        }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq)]
        pub struct $name {
            $($($(#[doc = $doc])+ pub $key: $ty,)+)+
        }

        impl Default for $name {
            fn default() -> Self {
                $name { $($($key: $default,)+)+ }
            }
        }

        impl $crate::config::field::Schema for $name {
            const KEYS: &'static [$crate::config::field::Key] = &[
                $($(
                    $crate::config::field::Key {
                        name: stringify!($key),
                        group: $group,
                        doc: concat!($($doc),+),
                        ty: <$ty as $crate::config::field::Field>::TY,
                        default: || {
                            let value: $ty = $default;
                            $crate::config::field::Field::show(&value)
                        },
                        status: $status,
                        verbs: $verbs,
                        range: schema!(@range $($range)?),
                        condition: schema!(@condition $($cond $when)?),
                    },
                )+)+
            ];

            fn read_key(
                &mut self,
                name: &str,
                value: &serde_json::Value,
                path: &str,
                problems: &mut $crate::config::field::Problems,
            ) {
                match name {
                    $($(stringify!($key) => {
                        $crate::config::field::Field::read(&mut self.$key, value, path, problems)
                    })+)+
                    // `read_map` has looked the name up in `KEYS`.
                    _ => {}
                }
            }

            fn show_key(&self, name: &str) -> serde_json::Value {
                match name {
                    $($(stringify!($key) => $crate::config::field::Field::show(&self.$key),)+)+
                    _ => serde_json::Value::Null,
                }
            }
        }

        impl $crate::config::field::Field for $name {
            const TY: $crate::config::field::Ty =
                $crate::config::field::Ty::Dict(<$name as $crate::config::field::Schema>::KEYS);

            fn parse(
                value: &serde_json::Value,
                path: &str,
                problems: &mut $crate::config::field::Problems,
            ) -> Option<Self> {
                let before = problems.len();
                let mut dict = Self::default();
                dict.read(value, path, problems);
                (problems.len() == before).then_some(dict)
            }

            // Keys that the dict leaves out stay as they are.
            fn read(
                &mut self,
                value: &serde_json::Value,
                path: &str,
                problems: &mut $crate::config::field::Problems,
            ) {
                match value.as_object() {
                    Some(map) => {
                        $crate::config::field::Schema::read_map(self, map, path, problems)
                    }
                    None => problems.push((
                        path.to_owned(),
                        $crate::config::field::wrong_type(Self::TY, value),
                    )),
                }
            }
            fn show(&self) -> serde_json::Value {
                serde_json::Value::Object($crate::config::field::Schema::show_map(self))
            }
        }
    };
    (@range) => { None };
    (@range $range:expr) => { Some($range) };
    (@condition) => { None };
    (@condition $cond:literal $when:expr) => {
        Some($crate::config::field::Condition { text: $cond, holds: $when })
    };
}
pub(super) use schema;
