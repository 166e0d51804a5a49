//! The schema itself, and what is said of it.

use proptest::prelude::*;

use super::super::condition::Condition;
use super::super::field::Schema;
use super::super::key::{Key, Status, Ty};
use super::*;
use crate::schedulers::SchedulerKind;

#[test]
fn explain_says_what_a_key_is() {
    assert_eq!(
        explain("max_grad_norm").unwrap(),
        "max_grad_norm\n  Largest norm of the whole gradient.\n  type     float, more than 0\n  default  1.0\n  \
         affects  train, compile, lower\n  needs    opt_enable_grad_global_norm_clipping=True\n  \
         resume   a run continues only with the same value\n  status   key of MaxDiffusion"
    );
    assert!(
        explain("timestep_bias")
            .unwrap()
            .contains("    strategy (one of none, earlier, later, range; default 'none')")
    );
    assert!(
        explain("diffusion_scheduler_config.beta_start")
            .unwrap()
            .contains("not in MaxDiffusion")
    );
    assert_eq!(
        explain("quantizatoin").unwrap_err(),
        "quantizatoin: no such key; did you mean quantization?"
    );
    assert!(explain("seed.x").unwrap_err().contains("no keys inside"));
    assert_eq!(explain_json("seed").unwrap()["default"], 0);
}

fn all_keys() -> Vec<(String, &'static Key)> {
    let mut all = Vec::new();
    for key in Config::KEYS {
        all.push((key.name.to_owned(), key));
        if let Ty::Dict(inner) = key.ty {
            all.extend(
                inner
                    .iter()
                    .map(|k| (format!("{}.{}", key.name, k.name), k)),
            );
        }
    }
    all
}

#[test]
fn the_schema_is_sound() {
    let mut seen = std::collections::HashSet::new();
    for (path, key) in all_keys() {
        assert!(seen.insert(path.clone()), "{path} declared twice");
        assert!(!key.verbs.is_empty(), "{path} affects nothing");
        assert!(
            key.doc.trim().ends_with('.') || key.doc.contains(':'),
            "{path}: {}",
            key.doc
        );
        if key.status == Status::Ours || key.status == Status::Used {
            continue;
        }
        assert!(
            key.condition.is_none(),
            "{path}: a condition on a key without effect"
        );
    }
}

/// The keys that a condition names, with the values it asks for.
fn named_in(condition: Condition) -> Vec<(&'static str, Vec<&'static str>)> {
    match condition {
        Condition::Is(path, values) => vec![(path, values.to_vec())],
        Condition::IsNot(path, value) => vec![(path, vec![value])],
        Condition::Given(path) | Condition::MoreThan(path, _) => vec![(path, Vec::new())],
        Condition::SamplerReads(field) => {
            let readers = SchedulerKind::ALL.iter().filter(|kind| kind.reads(field));
            assert_ne!(readers.count(), 0, "no sampler reads {field}");
            Vec::new()
        }
        Condition::FamilyHas(_) => vec![("model_family", Vec::new())],
        Condition::Both(a, b) | Condition::Either(a, b) => [named_in(*a), named_in(*b)].concat(),
    }
}

fn accepts(ty: Ty, value: &str) -> bool {
    match ty {
        Ty::Choice(names) => names.contains(&value),
        Ty::Optional(inner) => value.is_empty() || accepts(*inner, value),
        Ty::Bool => ["True", "False"].contains(&value),
        _ => false,
    }
}

#[test]
fn conditions_name_keys_and_values_that_there_are() {
    let all = all_keys();
    for (path, key) in &all {
        for (needed, values) in key.condition.map(named_in).unwrap_or_default() {
            let found = all.iter().find(|(path, _)| path == needed);
            let (_, needed) = found.unwrap_or_else(|| panic!("{path} needs {needed}"));
            for value in values {
                assert!(
                    accepts(needed.ty, value),
                    "{path} needs {}={value}",
                    needed.name
                );
            }
        }
    }
}

#[test]
fn what_is_shown_loads_again() {
    let c = with(&[
        "prompt=['a','b']",
        "quantization=int8",
        "quant_rules=[{path: x, mode: none}, {path: z, mode: w4a16, observer: mse, algorithm: awq}]",
        "unet_config.dropout=0",
    ]);
    // JSON is YAML.
    assert_eq!(load(&c.to_json().to_string(), &[], None).config, c);
}

fn key_name() -> impl Strategy<Value = String> {
    let names: Vec<String> = all_keys().into_iter().map(|(path, _)| path).collect();
    prop_oneof![
        4 => proptest::sample::select(names),
        1 => "[a-z_.]{0,20}",
    ]
}

fn value_text() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<i64>().prop_map(|v| v.to_string()),
        any::<f64>().prop_map(|v| format!("{v:e}")),
        r#"[\[\]{}'",:a-z0-9 .-]{0,30}"#,
        any::<String>(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_command_line_panics(
        named in proptest::collection::vec((key_name(), value_text()), 0..4),
        free in proptest::collection::vec(any::<String>(), 0..2),
        verb in proptest::option::of(proptest::sample::select(&Verb::ALL[..])),
    ) {
        let mut overrides: Vec<String> = named.into_iter().map(|(k, v)| format!("{k}={v}")).collect();
        overrides.extend(free);
        match Config::from_text("run.yml", "timestep_bias: {begin: 1}\n", &overrides, verb) {
            // What was accepted says itself again, but for the secret.
            Ok(mut loaded) => {
                if !loaded.config.hf_access_token.is_empty() {
                    loaded.config.hf_access_token = "(not shown)".into();
                }
                let shown = loaded.config.to_json().to_string();
                let again = Config::from_text("run.yml", &shown, &[], verb).unwrap();
                prop_assert_eq!(again.config, loaded.config);
            }
            Err(errors) => prop_assert!(!errors.0.is_empty() && !errors.to_string().is_empty()),
        }
    }

    #[test]
    fn no_file_panics(text in any::<String>(), lines in proptest::collection::vec((key_name(), value_text()), 0..4)) {
        let _ = Config::from_text("run.yml", &text, &[], None);
        let text: String = lines.iter().map(|(k, v)| format!("{k}: {v}\n")).collect();
        let _ = Config::from_text("run.yml", &text, &[], Some(Verb::Train));
    }
}
