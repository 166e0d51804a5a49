//! Values as text: as configurations write them, as messages show them, and as the command line gives them.

use serde_json::Value;

use crate::util::text::shortened;

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

pub(super) fn list_names(names: &[&str]) -> String {
    names
        .iter()
        .map(|n| if n.is_empty() { "''" } else { n })
        .collect::<Vec<_>>()
        .join(", ")
}
