//! Plugins and what they say when they are loaded.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::pjrt::install::{self, InstallError, Installed, PluginKind};
use crate::pjrt::{Client, ISA_VARIABLE, Kernels, Plugin};
use crate::recipe::{self, RecipeError};

use super::Problem;

/// The state of one kind of plugin.
pub struct PluginState {
    pub kind: PluginKind,
    pub found: Option<Installed>,
    /// Whether its files have changed since the installation.
    changed: bool,
    /// What it reports when loaded, or why it cannot be loaded; `None` when it is not installed.
    pub loaded: Option<Result<Probe, String>>,
}

/// The report of a loaded plugin.
#[derive(Serialize, Deserialize)]
pub struct Probe {
    pub api_version: String,
    pub attributes: BTreeMap<String, String>,
    pub kernels: Kernels,
    /// The client's devices, where this machine has hardware for it.
    pub devices: Vec<String>,
}

impl Probe {
    /// Loads the plugin in this process.
    ///
    /// # Errors
    /// When it is not installed, or cannot be loaded or used.
    pub fn new(kind: PluginKind) -> Result<Probe, RecipeError> {
        let library = install::locate(kind).map_err(RecipeError::failed)?.library;
        let plugin = Plugin::load(library).map_err(RecipeError::failed)?;
        let mut devices = Vec::new();
        if recipe::has_hardware(kind) {
            let client = Client::create(&plugin, &[]).map_err(RecipeError::failed)?;
            let found = client.devices().iter();
            devices.extend(found.map(|d| format!("{} {}", d.description().kind, d.id())));
        }
        let attributes = plugin.attributes().iter();
        Ok(Probe {
            api_version: plugin.api_version().to_string(),
            attributes: attributes
                .map(|(name, value)| (name.clone(), value.to_string()))
                .collect(),
            kernels: plugin.kernels(),
            devices,
        })
    }
}

impl PluginState {
    pub(super) fn new(
        kind: PluginKind,
        probe: &dyn Fn(PluginKind) -> Result<Probe, String>,
    ) -> PluginState {
        let located = install::locate(kind);
        let listed = || {
            let plugins = install::list().ok()?;
            plugins.into_iter().find(|p| p.kind == kind)
        };
        let changed = matches!(located, Err(InstallError::LibraryChanged { .. }));
        let (found, loaded) = match located {
            Ok(found) => (Some(found), Some(probe(kind))),
            Err(InstallError::NotInstalled { .. }) => (None, None),
            Err(error) => (listed(), Some(Err(error.to_string()))),
        };
        PluginState {
            kind,
            found,
            changed,
            loaded,
        }
    }

    fn remedy(&self) -> String {
        match &self.loaded {
            // libtpu serves one process at a time where there is a TPU.
            Some(Err(error)) if error.contains("libtpu_lockfile") => {
                "end the other program that uses the TPU; if there is none, remove /tmp/libtpu_lockfile"
                    .to_string()
            }
            Some(Err(error)) if error.contains(ISA_VARIABLE) => {
                format!("set {ISA_VARIABLE} to what this machine has, or unset it")
            }
            // Installing the same plugin again would not fix one that cannot be loaded.
            _ => match &self.found {
                Some(found) if self.changed => format!("run `{}`", found.install_command()),
                _ => format!("run `maxdiff-rs plugin install {}`", self.kind),
            },
        }
    }

    /// Whether it is the plugin of an accelerator of this machine, and works.
    pub(super) fn accelerates(&self) -> bool {
        let works = matches!(self.loaded, Some(Ok(_)));
        self.kind != PluginKind::Cpu && recipe::has_hardware(self.kind) && works
    }

    /// What is wrong with it, on a machine with an accelerator that works or without one.
    pub(super) fn problem(&self, is_accelerated: bool) -> Option<Problem> {
        let kind = self.kind;
        let (what, needed) = match &self.loaded {
            None if kind == PluginKind::Cpu => {
                let what = "the cpu plugin is not installed".to_string();
                (what, !is_accelerated)
            }
            // `hardware=auto` passes over an accelerator without its plugin, and takes the processor.
            None if recipe::has_hardware(kind) => (
                format!("this machine has hardware for the {kind} plugin, which is not installed"),
                false,
            ),
            Some(Err(error)) => (format!("the {kind} plugin cannot be used: {error}"), true),
            Some(Ok(_)) if self.found.as_ref().is_some_and(|f| f.stale) => (
                format!(
                    "the {kind} plugin was built from other sources than this program's, so its kernels are not used"
                ),
                false,
            ),
            None | Some(Ok(_)) => return None,
        };
        Some(Problem {
            what,
            remedy: self.remedy(),
            needed,
        })
    }
}
