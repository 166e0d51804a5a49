//! Locks, staging folders and hashes, which keep the plugin directory consistent.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use super::{InstallError, PluginKind, Result};
use crate::util::files::{is_full, open_lock};
use crate::util::hash::Sha256;

/// Takes the lock of `kind` in `root`, waiting for another installation to end. Held until the
/// file is dropped.
pub(super) fn lock(root: &Path, kind: PluginKind, progress: &mut dyn FnMut(&str)) -> Result<File> {
    let path = root.join(format!(".{kind}.lock"));
    let failed = |source| InstallError::Io {
        action: "lock",
        path: path.clone(),
        source,
    };
    let file = open_lock(&path).map_err(failed)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            progress(&format!(
                "another installation of the {kind} plugin is running; waiting for it"
            ));
            file.lock().map_err(failed)?;
        }
        Err(TryLockError::Error(source)) => return Err(failed(source)),
    }
    Ok(file)
}

/// A folder for work in progress, removed when dropped. What an interrupted installation left
/// behind goes when the next one of its kind, which holds the lock, starts.
pub(super) struct Staging {
    pub(super) path: PathBuf,
}

impl Staging {
    pub(super) fn create(root: &Path, kind: PluginKind) -> Result<Self> {
        let path = root.join(format!(".{kind}.incoming"));
        if path.exists() {
            remove_dir_all(&path)?;
        }
        create_dir_all(&path, 0)?;
        Ok(Self { path })
    }

    /// Makes the whole staging folder the plugin's folder.
    pub(super) fn publish(self, folder: &Path) -> Result<()> {
        let old = self.path.with_extension("old");
        replace(&self.path, folder, &old)?;
        if old.exists() {
            remove_dir_all(&old)?;
        }
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // Left-overs are removed by the next installation.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Puts the folder `new` at `folder`, moving what is there to `old`.
pub(super) fn replace(new: &Path, folder: &Path, old: &Path) -> Result<()> {
    let renamed = |from: &Path, to: &Path| {
        fs::rename(from, to).map_err(|source| InstallError::Io {
            action: "move into place",
            path: from.to_owned(),
            source,
        })
    };
    if folder.exists() {
        renamed(folder, old)?;
    }
    renamed(new, folder).inspect_err(|_| {
        let _ = fs::rename(old, folder);
    })
}

pub(super) fn sha256_of_file(path: &Path) -> Result<String> {
    let sum = Sha256::of_file(path).map_err(|source| InstallError::Io {
        action: "read",
        path: path.to_owned(),
        source,
    })?;
    Ok(sum.to_string())
}

pub(super) fn file_size(path: &Path) -> Result<u64> {
    let metadata = fs::metadata(path).map_err(|source| InstallError::Io {
        action: "read",
        path: path.to_owned(),
        source,
    })?;
    Ok(metadata.len())
}

pub(super) fn file_name(path: &Path) -> String {
    path.file_name()
        .unwrap_or(path.as_os_str())
        .to_string_lossy()
        .into_owned()
}

pub(super) fn create_dir_all(path: &Path, disk: u64) -> Result<()> {
    fs::create_dir_all(path).map_err(|source| write_error(path, disk, source))
}

pub(super) fn remove_dir_all(path: &Path) -> Result<()> {
    fs::remove_dir_all(path).map_err(|source| InstallError::Io {
        action: "remove",
        path: path.to_owned(),
        source,
    })
}

pub(super) fn remove_file(path: &Path) -> Result<()> {
    fs::remove_file(path).map_err(|source| InstallError::Io {
        action: "remove",
        path: path.to_owned(),
        source,
    })
}

pub(super) fn write_error(path: &Path, disk: u64, source: io::Error) -> InstallError {
    if is_full(&source) {
        InstallError::DiskFull {
            path: path.to_owned(),
            needed: disk,
        }
    } else {
        InstallError::Io {
            action: "write",
            path: path.to_owned(),
            source,
        }
    }
}

/// The last `lines` lines of a program's output.
pub(super) fn tail(output: &[u8], lines: usize) -> String {
    let text = String::from_utf8_lossy(output);
    let all: Vec<&str> = text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}
