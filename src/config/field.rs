//! How a key's value is read and shown, and the macro that declares a section of keys once.

use std::fmt;

use serde_json::{Map, Value};

use crate::util::Named;
use crate::util::names::nearest;

use super::error::{Problem, Problems};
use super::key::{Key, Range, Ty, find_key};
use super::text::{describe, list_names, show};
use super::yaml::{join, parse_flow};

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
        // Given, though empty.
        Ty::Texts if text.is_empty() => Value::from([""].as_slice()),
        // A prompt may start with a bracket.
        Ty::Texts if is_quoted_list(text) => parse_flow(text)?,
        Ty::Texts => as_is(),
        Ty::OneOrMore(_) if text.trim_start().starts_with('[') => parse_flow(text)?,
        Ty::OneOrMore(inner) => parse_text(*inner, text)?,
        Ty::Model(_) if text.trim_start().starts_with('{') => parse_flow(text)?,
        Ty::Model(_) => as_is(),
        Ty::List(_) | Ty::Dict(_) | Ty::Free => parse_flow(text)?,
    })
}

/// Whether the text is a list whose entries are all in quotes: `['a', "b"]`.
fn is_quoted_list(text: &str) -> bool {
    let inside = text.trim().strip_prefix('[');
    let Some(mut rest) = inside.and_then(|inside| inside.strip_suffix(']')) else {
        return false;
    };
    loop {
        rest = rest.trim_start();
        let Some(quote) = rest.chars().next().filter(|c| ['\'', '"'].contains(c)) else {
            // A comma may stand behind the last entry.
            return rest.is_empty();
        };
        let Some(after) = after_quoted(&rest[1..], quote) else {
            return false;
        };
        rest = after.trim_start();
        match rest.strip_prefix(',') {
            Some(next) => rest = next,
            None => return rest.is_empty(),
        }
    }
}

/// What follows the text in quotes whose first quote was before `text`, by YAML's rules: a single quote stands for
/// itself when it is written twice, a double one behind a backslash.
fn after_quoted(text: &str, quote: char) -> Option<&str> {
    let mut characters = text.char_indices().peekable();
    while let Some((at, c)) = characters.next() {
        let next_is_quote = characters.peek().is_some_and(|(_, next)| *next == quote);
        match (quote, c) {
            ('"', '\\') => drop(characters.next()),
            ('\'', '\'') if next_is_quote => drop(characters.next()),
            _ if c == quote => return Some(&text[at + 1..]),
            _ => {}
        }
    }
    None
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
                        $(, when $when:expr)?
                        $(, is $marks:expr)?;
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
            const KEYS: &'static [$crate::config::key::Key] = &[
                $($(
                    $crate::config::key::Key {
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
                        range: schema!(@option $($range)?),
                        condition: schema!(@option $($when)?),
                        marks: schema!(@list $($marks)?),
                    },
                )+)+
            ];

            fn read_key(
                &mut self,
                name: &str,
                value: &serde_json::Value,
                path: &str,
                problems: &mut $crate::config::error::Problems,
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
            const TY: $crate::config::key::Ty =
                $crate::config::key::Ty::Dict(<$name as $crate::config::field::Schema>::KEYS);

            fn parse(
                value: &serde_json::Value,
                path: &str,
                problems: &mut $crate::config::error::Problems,
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
                problems: &mut $crate::config::error::Problems,
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
    (@list) => { &[] };
    (@list $values:expr) => { &$values };
    (@option) => { None };
    (@option $value:expr) => { Some($value) };
}
pub(super) use schema;
