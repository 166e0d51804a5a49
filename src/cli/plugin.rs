//! `plugin install` and `plugin list`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::{CliError, help, print, progress};
use crate::pjrt::install::{self, Installed, PluginKind};

/// `plugin ...`
#[derive(Debug, Args)]
pub struct PluginArgs {
    #[command(subcommand)]
    command: PluginCommand,
}

#[derive(Debug, Subcommand)]
enum PluginCommand {
    /// Fetch a pinned plugin with pip and build it, or take one that is here already
    #[command(after_long_help = help::PLUGIN_INSTALL)]
    Install {
        #[arg(
            value_name = "KIND",
            value_parser = PossibleValuesParser::new(PluginKind::ALL.map(PluginKind::name))
                .try_map(|name| name.parse::<PluginKind>())
        )]
        kind: PluginKind,
        /// Use this PJRT plugin (a shared library) instead of the pinned one
        #[arg(long, value_name = "FILE")]
        path: Option<PathBuf>,
        /// Do nothing where a plugin of this kind is in use, whole and of this program's sources
        #[arg(long, conflicts_with = "path")]
        if_needed: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// List the plugins in use
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// Runs `plugin`.
///
/// # Errors
/// When a plugin cannot be installed, or the plugin folder cannot be read.
pub fn run(args: PluginArgs) -> Result<ExitCode, CliError> {
    match args.command {
        PluginCommand::Install {
            kind,
            path,
            if_needed,
            json,
        } => {
            // Before anything is written: the folder may be one that only its owner may change.
            let in_use = if if_needed {
                install::locate(kind).ok().filter(|plugin| !plugin.stale)
            } else {
                None
            };
            let plugin = match in_use {
                Some(plugin) => {
                    progress(&format!(
                        "the {kind} plugin {} is in use: {}",
                        plugin.version,
                        plugin.library.display()
                    ));
                    plugin
                }
                None => install::install(kind, path.as_deref(), &mut |line| progress(line))
                    .map_err(CliError::failed)?,
            };
            if json {
                print(&describe(&plugin).to_string())?;
            } else {
                print(&plugin.library.display().to_string())?;
            }
        }
        PluginCommand::List { json } => list(json)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn list(as_json: bool) -> Result<(), CliError> {
    let folder = install::plugin_dir().map_err(CliError::failed)?;
    let plugins = install::list().map_err(CliError::failed)?;
    if as_json {
        let plugins: Vec<Value> = plugins.iter().map(describe).collect();
        let folder = folder.display().to_string();
        return print(&json!({"folder": folder, "plugins": plugins}).to_string());
    }
    let mut text = format!("plugins in {}\n", folder.display());
    for kind in PluginKind::ALL {
        let line = match plugins.iter().find(|p| p.kind == kind) {
            None => format!("not installed; `maxdiff-rs plugin install {kind}`"),
            Some(plugin) => {
                let note = problem(plugin).map_or_else(String::new, |p| format!("\n         {p}"));
                format!("{} {}{note}", plugin.version, plugin.library.display())
            }
        };
        text.push_str(&format!("  {:<6} {line}\n", kind.name()));
    }
    print(&text)
}

/// A plugin as JSON.
pub fn describe(plugin: &Installed) -> Value {
    json!({
        "kind": plugin.kind,
        "version": plugin.version,
        "library": plugin.library.display().to_string(),
        "source": plugin.source,
        "sha256": plugin.sha256,
        "cuda_data_dir": plugin.cuda_data_dir.as_ref().map(|dir| dir.display().to_string()),
        "stale": plugin.stale,
        "problem": problem(plugin),
    })
}

/// The problem of an installed plugin's files, with what to do.
pub fn problem(plugin: &Installed) -> Option<String> {
    if let Err(error) = install::locate(plugin.kind) {
        return Some(error.to_string());
    }
    plugin.stale_note()
}
