//! The check of a plugin before its first load on this processor, and before the next one after its files have changed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};

use super::files::sha256_of_file;
use super::{InstallError, Installed, Manifest, PluginKind, Result, located_in, plugin_dir};
use crate::pjrt::processor::processor;
use crate::util::files::{self, Existing};

/// The file beside the manifest that says what was loaded.
const RECORD: &str = "loaded.json";

/// What came of loading a plugin in another process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trial {
    Loaded,
    /// Nothing: no process was started, or it ended with an error of its own, which loading in this process gives as
    /// well.
    Unknown,
    /// The process ended, for the reason given.
    Ended(String),
}

/// Loads the plugin of a kind in another process.
pub type TryLoad<'a> = dyn Fn(PluginKind) -> Trial + 'a;

/// The state of a plugin's files when it was loaded.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    /// A plugin for another processor may end its process.
    processor: String,
    /// Size in bytes and time of the last change in seconds since 1970, by the manifest's paths.
    files: BTreeMap<PathBuf, (u64, u64)>,
}

/// As [`super::locate`], for a plugin that is to be loaded. Before its first load on this processor, and when its files
/// have changed since, their SHA-256 are compared with those of the installation, and `try_load` loads it in another
/// process: a damaged library, or one for another processor, ends its process instead of returning an error.
///
/// # Errors
/// As [`super::locate`]; [`InstallError::EndsProcess`] when the other process ended.
pub fn locate_checked(kind: PluginKind, try_load: &TryLoad<'_>) -> Result<Installed> {
    locate_checked_in(&plugin_dir()?, kind, try_load)
}

pub(super) fn locate_checked_in(
    root: &Path,
    kind: PluginKind,
    try_load: &TryLoad<'_>,
) -> Result<Installed> {
    let (folder, manifest, plugin) = located_in(root, kind)?;
    let now = Record::now(&folder, &manifest)?;
    let before = Record::read(&folder);
    if before == now {
        return Ok(plugin);
    }
    if before.files != now.files {
        check_content(&folder, &manifest, &plugin)?;
    }
    match try_load(kind) {
        Trial::Loaded => now.write(&folder),
        Trial::Unknown => {}
        Trial::Ended(reason) => {
            return Err(InstallError::EndsProcess {
                kind,
                path: plugin.library.clone(),
                reason,
                remedy: plugin.install_command(),
            });
        }
    }
    Ok(plugin)
}

/// Compares the SHA-256 of every file that the manifest has one of.
fn check_content(folder: &Path, manifest: &Manifest, plugin: &Installed) -> Result<()> {
    let library = (&manifest.library, &manifest.sha256);
    for (path, expected) in manifest.members_sha256.iter().chain([library]) {
        // `join` keeps an absolute path as it is.
        let path = folder.join(path);
        let found = sha256_of_file(&path)?;
        if found != *expected {
            return Err(InstallError::LibraryChanged {
                kind: plugin.kind,
                path,
                reason: format!("SHA-256 {found}, installed with {expected}"),
                remedy: plugin.install_command(),
            });
        }
    }
    Ok(())
}

impl Record {
    /// Of the files as they are.
    fn now(folder: &Path, manifest: &Manifest) -> Result<Record> {
        let mut files = BTreeMap::new();
        for path in manifest.members.keys().chain([&manifest.library]) {
            let metadata = fs::metadata(folder.join(path)).map_err(|source| InstallError::Io {
                action: "read",
                path: folder.join(path),
                source,
            })?;
            let changed = metadata.modified().ok();
            let changed = changed.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
            let seconds = changed.map_or(0, |since| since.as_secs());
            files.insert(path.clone(), (metadata.len(), seconds));
        }
        Ok(Record {
            processor: processor().ok().flatten().unwrap_or_default(),
            files,
        })
    }

    /// The one that was written; of nothing where there is none that can be read.
    fn read(folder: &Path) -> Record {
        let text = fs::read(folder.join(RECORD)).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// In a folder that cannot be written, the plugin is checked in every process.
    fn write(&self, folder: &Path) {
        let path = folder.join(RECORD);
        let written = serde_json::to_vec(self)
            .map_err(std::io::Error::other)
            .and_then(|text| files::write(&path, &text, Existing::Replace));
        if let Err(error) = written {
            tracing::debug!("{}: {error}", path.display());
        }
    }
}
