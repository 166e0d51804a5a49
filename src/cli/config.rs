//! `config explain`, `config check` and `config show`.

use std::process::ExitCode;

use clap::{Args, Subcommand, ValueEnum};
use serde_json::json;

use super::{CliError, RecipeArgs, completions, help, notices, print};
use crate::config::{self, Config, Loaded, RECIPES, Recipe, Verb};
use crate::recipe;

/// `config ...`
#[derive(Debug, Args)]
pub struct ConfigArgs {
    #[command(subcommand)]
    command: ConfigCommand,
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Say what keys mean: type, default, which verbs they change, how MaxDiffusion has them
    #[command(after_long_help = help::CONFIG_EXPLAIN)]
    Explain {
        /// Keys, dotted inside dicts (without any: the names of all)
        #[arg(value_name = "KEY", add = completions::keys())]
        keys: Vec<String>,
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Print docs/config.md
        #[arg(long, conflicts_with_all = ["keys", "json"])]
        markdown: bool,
    },
    /// Print a recipe of this program as a file that can be changed, or list them
    #[command(after_long_help = help::CONFIG_SHOW)]
    Show {
        /// The recipe (without it: the names of all)
        #[arg(value_name = "RECIPE", add = completions::recipe_names())]
        recipe: Option<String>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Check a configuration and show the value of every key
    #[command(after_long_help = help::CONFIG_CHECK)]
    Check {
        #[command(flatten)]
        recipe: RecipeArgs,
        /// Check as this verb would (without: every key that any verb reads)
        #[arg(long, value_enum)]
        verb: Option<VerbArg>,
        /// Print JSON: errors, warnings and the value of every key
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum VerbArg {
    Train,
    Generate,
    Compile,
    Lower,
    ModuleRun,
    Quantize,
}

impl From<VerbArg> for Verb {
    fn from(verb: VerbArg) -> Self {
        match verb {
            VerbArg::Train => Verb::Train,
            VerbArg::Generate => Verb::Generate,
            VerbArg::Compile => Verb::Compile,
            VerbArg::Lower => Verb::Lower,
            VerbArg::ModuleRun => Verb::ModuleRun,
            VerbArg::Quantize => Verb::Quantize,
        }
    }
}

/// Runs `config`.
///
/// # Errors
/// A key that does not exist; a configuration that is wrong.
pub fn run(args: ConfigArgs) -> Result<ExitCode, CliError> {
    match args.command {
        ConfigCommand::Explain {
            keys,
            json,
            markdown,
        } => explain(&keys, json, markdown),
        ConfigCommand::Show { recipe, json } => show(recipe.as_deref(), json),
        ConfigCommand::Check { recipe, verb, json } => {
            let verb = verb.map(Verb::from);
            let loaded = Config::load(&recipe.config, &recipe.overrides, verb);
            if json {
                check_json(&recipe, loaded, verb)
            } else {
                check(&recipe, loaded?, verb)
            }
        }
    }
}

fn explain(keys: &[String], as_json: bool, markdown: bool) -> Result<ExitCode, CliError> {
    let text = if markdown {
        config::write_markdown()
    } else if as_json {
        let keys = if keys.is_empty() {
            config::names().into_iter().map(str::to_owned).collect()
        } else {
            keys.to_vec()
        };
        let all: Result<Vec<_>, _> = keys.iter().map(|k| config::explain_json(k)).collect();
        json!(all.map_err(CliError::Usage)?).to_string()
    } else if keys.is_empty() {
        config::list()
    } else {
        let all: Result<Vec<_>, _> = keys.iter().map(|k| config::explain(k)).collect();
        all.map_err(CliError::Usage)?.join("\n\n")
    };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn show(name: Option<&str>, as_json: bool) -> Result<ExitCode, CliError> {
    let recipes: Vec<&Recipe> = match name {
        None => RECIPES.iter().collect(),
        Some(name) => match Recipe::named(name) {
            Some(recipe) => vec![recipe],
            None => {
                let advice = Recipe::advice(name);
                return Err(CliError::Usage(format!("{name}: no such recipe; {advice}")));
            }
        },
    };
    let text = match (as_json, name, recipes.as_slice()) {
        (true, ..) => json!(
            recipes
                .iter()
                .map(|r| json!({"name": r.name, "about": r.about(), "text": r.text}))
                .collect::<Vec<_>>()
        )
        .to_string(),
        (false, Some(_), [recipe]) => recipe.text.to_owned(),
        (false, ..) => {
            let lines = recipes
                .iter()
                .map(|r| format!("{:<16}{}\n", r.name, r.about()));
            lines.collect()
        }
    };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn check(args: &RecipeArgs, loaded: Loaded, verb: Option<Verb>) -> Result<ExitCode, CliError> {
    for warning in &loaded.warnings {
        super::tell(&format!("warning: {warning}"));
    }
    recipe::check(&loaded, &args.config, verb, &mut notices())?;
    let mut text = String::new();
    if let serde_json::Value::Object(keys) = loaded.config.to_json() {
        for (key, value) in keys {
            let places = loaded.given.places(&key).join(", ");
            let comment = match places.as_str() {
                "" => String::new(),
                places => format!("  # {places}"),
            };
            text.push_str(&format!("{key}: {value}{comment}\n"));
        }
    }
    print(&text)?;
    super::progress(&format!("{} is valid", args.config.display()));
    Ok(ExitCode::SUCCESS)
}

/// Where each key that was given is written.
fn places(loaded: &Loaded) -> serde_json::Value {
    let keys = loaded.config.to_json();
    let keys = keys.as_object().into_iter().flatten();
    keys.filter_map(|(key, _)| {
        let places = loaded.given.places(key);
        (!places.is_empty()).then(|| (key.clone(), json!(places)))
    })
    .collect()
}

fn check_json(
    args: &RecipeArgs,
    loaded: Result<Loaded, config::ConfigErrors>,
    verb: Option<Verb>,
) -> Result<ExitCode, CliError> {
    let wrong = |errors: Vec<serde_json::Value>, code: u8| {
        (json!({"ok": false, "errors": errors}), ExitCode::from(code))
    };
    let (report, code) = match loaded {
        Ok(loaded) => match recipe::check(&loaded, &args.config, verb, &mut notices()) {
            Ok(()) => (
                json!({
                    "ok": true,
                    "errors": [],
                    "warnings": loaded.warnings,
                    "config": loaded.config.to_json(),
                    "places": places(&loaded),
                }),
                ExitCode::SUCCESS,
            ),
            Err(e) => {
                let e = CliError::from(e);
                let error = json!({"key": "", "place": "", "message": e.to_string()});
                wrong(vec![error], e.code())
            }
        },
        Err(errors) => wrong(
            errors
                .0
                .iter()
                .map(|e| {
                    json!({"key": e.key, "place": e.place.to_string(), "message": e.to_string()})
                })
                .collect(),
            2,
        ),
    };
    print(&report.to_string())?;
    Ok(code)
}
