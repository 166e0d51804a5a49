//! YAML text to JSON values with line numbers.

use std::collections::HashMap;
use std::fmt;
use std::io::Read;
use std::path::Path;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use serde_saphyr::{DuplicateKeyPolicy, Options, Spanned};

use crate::util::files;

use super::error::Problem;

/// One mapping read from YAML.
#[derive(Debug, Default)]
pub(super) struct Document {
    pub values: Map<String, Value>,
    /// Line of each key by dotted path.
    pub lines: HashMap<String, u64>,
    /// Keys given twice with the same value: path and line.
    pub repeated: Vec<(String, u64)>,
    /// Path, line and problem of what the text says in a way that cannot be taken as meant.
    pub problems: Vec<(String, u64, Problem)>,
}

/// A YAML node before its type is known. `Spanned` gives its line.
enum Raw {
    Null,
    Bool(bool),
    Integer(i64),
    /// Above `i64::MAX`.
    Unsigned(u64),
    Float(f64),
    Text(String),
    List(Vec<Node>),
    Map(Vec<(Spanned<String>, Node)>),
}

type Node = Spanned<Raw>;

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct RawVisitor;

        impl<'de> Visitor<'de> for RawVisitor {
            type Value = Raw;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a YAML value")
            }
            fn visit_unit<E>(self) -> Result<Raw, E> {
                Ok(Raw::Null)
            }
            fn visit_none<E>(self) -> Result<Raw, E> {
                Ok(Raw::Null)
            }
            fn visit_bool<E>(self, v: bool) -> Result<Raw, E> {
                Ok(Raw::Bool(v))
            }
            fn visit_i64<E>(self, v: i64) -> Result<Raw, E> {
                Ok(Raw::Integer(v))
            }
            fn visit_u64<E>(self, v: u64) -> Result<Raw, E> {
                Ok(i64::try_from(v).map_or(Raw::Unsigned(v), Raw::Integer))
            }
            fn visit_f64<E>(self, v: f64) -> Result<Raw, E> {
                Ok(Raw::Float(v))
            }
            fn visit_str<E: de::Error>(self, v: &str) -> Result<Raw, E> {
                Ok(Raw::Text(v.to_owned()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Raw, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = seq.next_element::<Node>()? {
                    items.push(item);
                }
                Ok(Raw::List(items))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Raw, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry::<Spanned<String>, Node>()? {
                    entries.push(entry);
                }
                Ok(Raw::Map(entries))
            }
        }

        deserializer.deserialize_any(RawVisitor)
    }
}

/// Largest configuration file, in bytes. MaxDiffusion's largest has about 20 thousand.
const LARGEST_FILE: u64 = 1 << 20;

/// Limits far above any real configuration and far below what hurts.
fn options() -> Options {
    let mut options = Options::default();
    // Repeated keys come through to `flatten`, which refuses those that differ: MaxDiffusion's own
    // base_xl.yml has one key twice, with one value.
    options.duplicate_keys = DuplicateKeyPolicy::LastWins;
    options.non_finite_float_policy = serde_saphyr::NonFiniteFloatPolicy::PassThrough;
    options.with_snippet = false;
    options.alias_limits.max_total_replayed_events = 20_000;
    if let Some(budget) = options.budget.as_mut() {
        budget.max_depth = 32;
        budget.max_nodes = 50_000;
        budget.max_aliases = 1_000;
        budget.max_documents = 1;
    }
    options
}

/// The text of a file of usual size.
///
/// # Errors
/// The problem, without the path.
pub(super) fn read_file(path: &Path) -> Result<String, String> {
    let file = files::open(path).map_err(|e| e.to_string())?;
    let mut text = String::new();
    file.take(LARGEST_FILE + 1)
        .read_to_string(&mut text)
        .map_err(|e| e.to_string())?;
    if text.len() as u64 > LARGEST_FILE {
        return Err(format!("larger than {LARGEST_FILE} bytes"));
    }
    Ok(text)
}

/// Reads a configuration file's text.
///
/// # Errors
/// The line and the problem, when the text is not one YAML mapping inside the limits.
pub(super) fn parse_document(text: &str) -> Result<Document, (u64, Problem)> {
    let node: Node = serde_saphyr::from_str_with_options(text, options()).map_err(|error| {
        let line = error.location().map_or(0, |l| l.line());
        (line, Problem::Yaml(message(&error)))
    })?;
    let mut document = Document::default();
    let mut flatten = Flatten {
        source: text.lines().collect(),
        document: &mut document,
    };
    match node.value {
        Raw::Null => {}
        Raw::Map(entries) => {
            let values = flatten.map(entries, "");
            document.values = values;
        }
        other => {
            let line = node.referenced.line();
            let found = flatten.value(other, "", line, 0);
            return Err((
                line,
                Problem::WrongType {
                    expected: "a mapping of keys to values".into(),
                    found: super::text::describe(&found),
                },
            ));
        }
    }
    Ok(document)
}

/// Reads one value in YAML's flow form, which takes JSON and Python lists and dicts as they are.
pub(super) fn parse_flow(text: &str) -> Result<Value, String> {
    let node: Node =
        serde_saphyr::from_str_with_options(text, options()).map_err(|error| message(&error))?;
    let mut document = Document::default();
    let mut flatten = Flatten {
        source: text.lines().collect(),
        document: &mut document,
    };
    let value = flatten.value(
        node.value,
        "",
        node.referenced.line(),
        node.referenced.column(),
    );
    match document.problems.into_iter().next() {
        Some((_, _, problem)) => Err(problem.to_string()),
        None => Ok(value),
    }
}

fn message(error: &serde_saphyr::Error) -> String {
    let text = error.without_snippet().to_string();
    // The line is shown in front, as everywhere.
    text.split(" at line ").next().unwrap_or(&text).to_owned()
}

struct Flatten<'a> {
    source: Vec<&'a str>,
    document: &'a mut Document,
}

impl Flatten<'_> {
    fn map(&mut self, entries: Vec<(Spanned<String>, Node)>, path: &str) -> Map<String, Value> {
        let mut map = Map::new();
        for (key, node) in entries {
            let line = key.referenced.line();
            let key = key.value;
            let at = join(path, &key);
            let (value_line, column) = (node.referenced.line(), node.referenced.column());
            let value = self.value(node.value, &at, value_line, column);
            match map.get(&key) {
                Some(first) if *first == value => self.document.repeated.push((at, line)),
                Some(_) => {
                    let first = self.document.lines.get(&at).copied().unwrap_or(0);
                    let problem = Problem::GivenTwice { first };
                    self.document.problems.push((at, line, problem));
                }
                None => {
                    self.document.lines.insert(at, line);
                    map.insert(key, value);
                }
            }
        }
        map
    }

    fn value(&mut self, raw: Raw, path: &str, line: u64, column: u64) -> Value {
        match raw {
            Raw::Null => Value::Null,
            Raw::Bool(v) => Value::Bool(v),
            Raw::Integer(v) => Value::from(v),
            Raw::Unsigned(v) => Value::from(v),
            Raw::Float(v) => {
                self.refuse_leading_zero(path, line, column);
                // A text, so that the type check refuses it by name.
                Number::from_f64(v).map_or_else(|| Value::String(v.to_string()), Value::Number)
            }
            Raw::Text(v) => Value::String(v),
            Raw::List(items) => items
                .into_iter()
                .map(|n| {
                    let (line, column) = (n.referenced.line(), n.referenced.column());
                    self.value(n.value, path, line, column)
                })
                .collect(),
            Raw::Map(entries) => Value::Object(self.map(entries, path)),
        }
    }

    /// `010` is 8 to PyYAML and 10 to YAML 1.2: neither is taken.
    fn refuse_leading_zero(&mut self, path: &str, line: u64, column: u64) {
        let text = usize::try_from(line)
            .ok()
            .and_then(|l| self.source.get(l.checked_sub(1)?).copied())
            .unwrap_or("");
        let skip = usize::try_from(column).unwrap_or(0).saturating_sub(1);
        let token: String = text
            .chars()
            .skip(skip)
            .skip_while(|c| matches!(c, '-' | '+'))
            .take_while(|c| !matches!(c, ' ' | ',' | ']' | '}' | '#'))
            .collect();
        if token.len() > 1 && token.starts_with('0') && token.chars().all(|c| c.is_ascii_digit()) {
            let problem = Problem::WrongType {
                expected: "a number without leading zeros (or a quoted string)".into(),
                found: token,
            };
            self.document
                .problems
                .push((path.to_owned(), line, problem));
        }
    }
}

/// The dotted path of `key` inside `path`.
pub(super) fn join(path: &str, key: &str) -> String {
    if path.is_empty() {
        key.to_owned()
    } else {
        format!("{path}.{key}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn scalars_follow_the_documented_rules() {
        let d = parse_document(
            "a: 1e-5\nb: 4.e-7\nc: yes\nd: None\ne:\nf: 1_000\ng: 'x'\nh: 1:30\ni: .inf\nj: 0o17\nk: 10000000000\nl: True\nm: !!str 5\n",
        )
        .unwrap();
        assert_eq!(
            Value::Object(d.values),
            json!({"a": 1e-5, "b": 4e-7, "c": true, "d": "None", "e": null, "f": 1000, "g": "x",
                "h": "1:30", "i": "inf", "j": 15, "k": 10000000000i64, "l": true, "m": "5"})
        );
        assert_eq!(d.lines["k"], 11);
        assert!(d.problems.is_empty());
    }

    #[test]
    fn nested_keys_have_lines() {
        let d = parse_document("a:\n  b: 1\n  c:\n    d: [1, {e: 2}]\nf: {\n  g: 1\n}\n").unwrap();
        assert_eq!(d.lines["a.b"], 2);
        assert_eq!(d.lines["a.c.d"], 4);
        assert_eq!(d.lines["f.g"], 6);
        assert_eq!(d.values["a"]["c"]["d"][1]["e"], 2);
    }

    #[test]
    fn a_key_twice_is_refused_unless_it_says_the_same() {
        let d = parse_document("a: 1\nb: 2\na: 1\n").unwrap();
        assert_eq!(d.repeated, [("a".to_owned(), 3)]);
        assert!(d.problems.is_empty());
        let d = parse_document("a: 1\nb: 2\na: 3\n").unwrap();
        assert_eq!(
            d.problems,
            [("a".to_owned(), 3, Problem::GivenTwice { first: 1 })]
        );
        assert_eq!(d.values["a"], 1);
    }

    #[test]
    fn merge_keys_fill_in_and_are_no_repetition() {
        let d = parse_document("a: &x {p: 1, q: 2}\nb:\n  <<: *x\n  q: 3\n").unwrap();
        assert_eq!(Value::Object(d.values)["b"], json!({"q": 3, "p": 1}));
        assert!(d.problems.is_empty() && d.repeated.is_empty());
    }

    #[test]
    fn leading_zeros_are_refused() {
        let d = parse_document("a: 010\nb: [1, 007]\nc: '010'\nd: 0.5\ne: -01\n").unwrap();
        let at: Vec<_> = d.problems.iter().map(|p| (p.0.as_str(), p.1)).collect();
        assert_eq!(at, [("a", 1), ("b", 2), ("e", 5)]);
    }

    #[test]
    fn bombs_and_broken_texts_are_refused() {
        let mut bomb = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
        for i in 1..9 {
            let refs = vec![format!("*a{}", i - 1); 10].join(", ");
            bomb.push_str(&format!("a{i}: &a{i} [{refs}]\n"));
        }
        assert!(matches!(parse_document(&bomb), Err((_, Problem::Yaml(_)))));
        let deep = format!("a: {}{}", "[".repeat(5000), "]".repeat(5000));
        assert!(matches!(parse_document(&deep), Err((_, Problem::Yaml(_)))));
        assert!(matches!(
            parse_document("a: 1\nb: [1,\nc: 2\n"),
            Err((_, Problem::Yaml(_)))
        ));
        assert!(matches!(
            parse_document("- a\n- b\n"),
            Err((1, Problem::WrongType { .. }))
        ));
        assert!(parse_document("a: 1\n---\nb: 2\n").is_err());
        assert!(parse_document("").unwrap().values.is_empty());
    }

    #[test]
    fn flow_takes_json_and_python() {
        assert_eq!(
            parse_flow("[['a', ['b','c']], [\"d\", null]]").unwrap(),
            json!([["a", ["b", "c"]], ["d", null]])
        );
        assert_eq!(
            parse_flow("{\"x\": 1e-3, 'y': True}").unwrap(),
            json!({"x": 1e-3, "y": true})
        );
        assert!(parse_flow("[1, 2").is_err());
    }
}
