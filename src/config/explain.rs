//! The schema as text: for `config explain` and for `docs/config.md`.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::schedulers::SchedulerKind;
use crate::util::names::nearest;

use super::field::Schema;
use super::key::{Key, Mark, Status, Ty};
use super::schema::Config;
use super::text::show;
use super::verb::Verb;

/// A key by its dotted path.
fn look_up(path: &str) -> Result<&'static Key, String> {
    let mut keys = Config::KEYS;
    let mut found: Option<&'static Key> = None;
    for segment in path.split('.') {
        if let Some(Key {
            ty: Ty::Dict(inner),
            ..
        }) = found
        {
            keys = inner;
        } else if let Some(outer) = found {
            return Err(format!("{} has no keys inside it", outer.name));
        }
        match keys.iter().find(|k| k.name == segment) {
            Some(key) => found = Some(key),
            None => {
                let hint = nearest(segment, keys.iter().map(|k| k.name))
                    .map_or_else(String::new, |n| format!("; did you mean {n}?"));
                return Err(format!("{path}: no such key{hint}"));
            }
        }
    }
    found.ok_or_else(|| format!("{path}: no such key"))
}

/// The treatment of a key without effect whose value is not the default.
const WITHOUT_EFFECT: &str =
    "any value but the default is refused on the command line and a warning in a file";

fn status(key: &Key) -> String {
    match key.status {
        Status::Used => "key of MaxDiffusion".into(),
        Status::Ours => "key of maxdiff-rs, not in MaxDiffusion".into(),
        Status::IgnoredByMaxDiffusion => {
            format!("no effect: MaxDiffusion ignores it too; {WITHOUT_EFFECT}")
        }
        Status::NoEffect(reason) => format!("no effect: {reason}; {WITHOUT_EFFECT}"),
        Status::NotYet(feature) => {
            format!("not here yet: {feature}; any value but the default is refused")
        }
    }
}

fn type_and_range(key: &Key) -> String {
    match key.range {
        Some(range) => format!("{}, {range}", key.ty),
        None => key.ty.to_string(),
    }
}

fn doc(key: &Key) -> &str {
    key.doc.trim()
}

/// The description of a key: meaning, type, default, verbs, relation to MaxDiffusion; for a dict, its keys.
///
/// # Errors
/// A sentence with the nearest key, if there is none of this name.
pub fn explain(path: &str) -> Result<String, String> {
    let key = look_up(path)?;
    let mut text = String::new();
    // Writing to a String does not fail.
    let _ = writeln!(text, "{path}\n  {}", doc(key));
    let _ = writeln!(text, "  type     {}", type_and_range(key));
    match key.ty {
        Ty::Dict(inner) => {
            for k in inner {
                let default = show(&(k.default)());
                let _ = writeln!(
                    text,
                    "    {} ({}; default {default}): {}",
                    k.name,
                    type_and_range(k),
                    doc(k)
                );
            }
        }
        _ => {
            let _ = writeln!(text, "  default  {}", full(&(key.default)()));
        }
    }
    let _ = writeln!(text, "  affects  {}", key.affects());
    if let Some(condition) = key.condition {
        let _ = writeln!(text, "  needs    {condition}");
    }
    if key.is(Mark::FixedOnResume) {
        let _ = writeln!(text, "  resume   a run continues only with the same value");
    }
    if key.verbs.contains(&Verb::Generate) {
        let recorded = match key.is(Mark::NotAnOption) {
            true => "not among the options that are written into images",
            false => "if given on the command line, written into images as an option",
        };
        let _ = writeln!(text, "  images   {recorded}");
    }
    let _ = write!(text, "  status   {}", status(key));
    Ok(text)
}

/// The description of [`explain`] as JSON.
///
/// # Errors
/// As [`explain`].
pub fn explain_json(path: &str) -> Result<Value, String> {
    let key = look_up(path)?;
    Ok(json!({
        "key": path,
        "doc": doc(key),
        "type": key.ty.to_string(),
        "range": key.range.map(|r| r.to_string()),
        "default": (key.default)(),
        "affects": key.verbs.iter().map(|v| v.name()).collect::<Vec<_>>(),
        "needs": key.condition.map(|c| c.to_string()),
        "fixed_on_resume": key.is(Mark::FixedOnResume),
        "image_option": key.verbs.contains(&Verb::Generate) && !key.is(Mark::NotAnOption),
        "status": status(key),
    }))
}

/// Whether setting this key can have an effect with the sampler.
pub fn is_read_with(path: &str, sampler: SchedulerKind) -> bool {
    let condition = look_up(path).ok().and_then(|key| key.condition);
    condition.is_none_or(|condition| condition.allows(sampler))
}

/// Whether an override of the command line belongs among the options that `generate` writes into an image, so that
/// the image can be made again.
pub fn is_image_option(path: &str) -> bool {
    look_up(path).map_or(true, |key| !key.is(Mark::NotAnOption))
}

/// The names of all keys, in the schema's order.
pub fn names() -> Vec<&'static str> {
    Config::KEYS.iter().map(|k| k.name).collect()
}

/// Completions of `word`, a part of `KEY=VALUE`: `KEY=` of the keys that have an effect (on the verb, if one
/// is given), and behind the `=` the values of a key where they are known; each with the first sentence of what the key
/// means.
pub fn complete(word: &str, verb: Option<Verb>) -> Vec<(String, String)> {
    let has_effect = |key: &Key| {
        matches!(key.status, Status::Used | Status::Ours)
            && verb.is_none_or(|verb| key.verbs.contains(&verb))
    };
    let first_sentence = |key: &Key| {
        let text = doc(key);
        let end = text.find(". ").map_or(text.len(), |at| at + 1);
        text[..end].to_owned()
    };
    if let Some((path, start)) = word.split_once('=') {
        let Ok(key) = look_up(path) else {
            return Vec::new();
        };
        let values = values(key.ty).into_iter();
        return values
            .filter(|value| value.starts_with(start))
            .map(|value| (format!("{path}={value}"), first_sentence(key)))
            .collect();
    }
    let mut found = Vec::new();
    for key in Config::KEYS.iter().filter(|key| has_effect(key)) {
        match key.ty {
            Ty::Dict(inner) => {
                let inner = inner.iter().filter(|key| has_effect(key));
                found.extend(
                    inner.map(|k| (format!("{}.{}=", key.name, k.name), first_sentence(k))),
                );
            }
            _ => found.push((format!("{}=", key.name), first_sentence(key))),
        }
    }
    found.retain(|(key, _)| key.starts_with(word));
    found
}

/// The values of a type of which there are few.
fn values(ty: Ty) -> Vec<&'static str> {
    match ty {
        Ty::Bool => vec!["True", "False"],
        Ty::Choice(names) => names.iter().copied().filter(|n| !n.is_empty()).collect(),
        Ty::Optional(inner) => values(*inner),
        _ => Vec::new(),
    }
}

/// The names of all keys under their headings, one a line.
pub fn list() -> String {
    let mut text = String::new();
    let mut group = "";
    for key in Config::KEYS {
        if key.group != group {
            group = key.group;
            let _ = writeln!(text, "{group}");
        }
        let _ = writeln!(text, "  {}", key.name);
    }
    text
}

/// A default in full, as a configuration would write it.
fn full(value: &Value) -> String {
    match value {
        Value::Array(_) | Value::Object(_) => value.to_string(),
        other => show(other),
    }
}

/// `docs/config.md`.
pub fn write_markdown() -> String {
    let mut text = String::from(
        "# Configuration\n\
         \n\
         <!-- Written by `maxdiff-rs config explain --markdown`; a test compares it with the schema. -->\n\
         \n\
         A configuration is a YAML file with the keys below, followed by any number of `key=value` overrides on the\n\
         command line. A key that a file leaves out has its default. Names, meanings and defaults are those of\n\
         MaxDiffusion's `base_xl.yml` unless the last column says otherwise, so its files load.\n\
         \n\
         - The type of the key decides how `key=value` is read: `learning_rate=1e-4`, `write_metrics=False`,\n  \
           `sample_prompts=\"['a','b']\"`, `prompt=\"a red circle\"`. An integer may be written `1e3`, a float `2`.\n\
         - A dot names a key inside a dict: `diffusion_scheduler_config.prediction_type=v_prediction`. A whole dict, as JSON, is\n  \
           merged into the existing one; a list replaces the existing one. `unet_config.x=y` changes the chosen model.\n\
         - Unknown keys and values of the wrong type are errors, all shown at once.\n\
         - On the command line a key without effect is refused: one that has none here or in MaxDiffusion (\"no effect\" below), unless\n  \
           its value is the default; one whose condition (\"Needs\" below) is not met; one that does not affect the verb; one of\n  \
           `diffusion_scheduler_config` that the sampler does not read, also if the model's own files choose the sampler.\n\
         - In a file, which may be MaxDiffusion's own and serves all verbs, a key without effect whose value is not the default is a\n  \
           warning that names the line and the reason; keys of other verbs are ignored. Errors in a file too are a feature of\n  \
           MaxDiffusion that is not here yet, and a spacing of noise levels that the model's own sampler does not read.\n\
         - YAML is 1.2, read strictly: `1e-5` is a float (PyYAML makes it a string), `yes` in a file is true, `None` is the string (write\n  \
           `null`), numbers with leading zeros are refused, and so is a key with two different values.\n",
    );
    let _ = write!(text, "\n{RECIPES}");
    let mut group = "";
    for key in Config::KEYS {
        if key.group != group {
            group = key.group;
            let _ = write!(text, "\n## {group}\n\n{HEAD}");
        }
        row(&mut text, key);
    }
    for key in Config::KEYS {
        if let Ty::Dict(inner) = key.ty {
            let _ = write!(text, "\n## Keys of `{}`\n\n{HEAD}", key.name);
            for k in inner {
                row(&mut text, k);
            }
        }
    }
    text
}

/// What becomes of MaxDiffusion's recipes: the output of `scripts/maxdiffusion_recipes`.
const RECIPES: &str = include_str!("recipes.md");

const HEAD: &str =
    "| key | type | default | affects | meaning | status |\n|---|---|---|---|---|---|\n";

fn row(text: &mut String, key: &Key) {
    let default = match key.ty {
        Ty::Dict(_) => "see below".to_owned(),
        _ => format!("`{}`", full(&(key.default)())),
    };
    let fixed = match key.is(Mark::FixedOnResume) {
        true => " Fixed on resume.",
        false => "",
    };
    let needs = key
        .condition
        .map_or_else(String::new, |c| format!(" Needs `{c}`."));
    let status = match key.status {
        Status::Used => String::new(),
        Status::Ours => "ours".into(),
        Status::IgnoredByMaxDiffusion => "no effect: MaxDiffusion ignores it too".into(),
        Status::NoEffect(reason) => format!("no effect: {reason}"),
        Status::NotYet(_) => status(key),
    };
    let _ = writeln!(
        text,
        "| `{}` | {} | {default} | {} | {}{needs}{fixed} | {status} |",
        key.name,
        type_and_range(key),
        key.affects(),
        doc(key),
    );
}
