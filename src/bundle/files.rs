//! Files that appear whole, and replace nothing.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use super::BundleError;

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> BundleError {
    let path = path.to_owned();
    move |source| BundleError::Io {
        action,
        path,
        source,
    }
}

fn exists(path: &Path) -> BundleError {
    BundleError::Exists {
        path: path.to_owned(),
    }
}

/// Where the file is written before it gets its name: beside it, so that a rename suffices. In containers process ids
/// repeat, so the file of a process that was killed may have the name: `number` makes another.
fn staging(path: &Path, number: u32) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let id = std::process::id();
    path.with_file_name(match number {
        0 => format!(".{name}.{id}.partial"),
        number => format!(".{name}.{id}-{number}.partial"),
    })
}

/// Removes the unfinished file unless it was published.
struct Staging(PathBuf);

impl Drop for Staging {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Fails now where [`write`] would fail later: when the file exists, or its folder cannot be made or written.
///
/// # Errors
/// As [`super::Bundle::write`].
pub fn check_writable(path: &Path) -> Result<(), BundleError> {
    if path.symlink_metadata().is_ok() {
        return Err(exists(path));
    }
    create(path).map(|_| ())
}

fn create(path: &Path) -> Result<(Staging, File), BundleError> {
    if let Some(folder) = path.parent().filter(|p| !p.as_os_str().is_empty()) {
        fs::create_dir_all(folder).map_err(failed("create the folder", folder))?;
    }
    let mut number = 0;
    loop {
        let staging = staging(path, number);
        match OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&staging)
        {
            Ok(file) => return Ok((Staging(staging), file)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
            Err(error) => return Err(failed("create", &staging)(error)),
        }
    }
}

pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<(), BundleError> {
    let (staging, mut file) = create(path)?;
    file.write_all(bytes)
        .and_then(|()| file.sync_all())
        .map_err(failed("write", &staging.0))?;
    drop(file);
    publish(&staging.0, path)?;
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))
        .and_then(|folder| folder.sync_all())
        .map_err(failed("write the folder of", path))
}

/// Gives the file its name, unless something has it.
fn publish(from: &Path, to: &Path) -> Result<(), BundleError> {
    let result = match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // A file system that cannot rename without replacing can usually link, which never replaces.
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => fs::hard_link(from, to),
        other => other.map_err(io::Error::from),
    };
    result.map_err(|source| match source.kind() {
        io::ErrorKind::AlreadyExists => exists(to),
        _ => failed("write", to)(source),
    })
}

pub(super) fn read(path: &Path) -> Result<Vec<u8>, BundleError> {
    fs::read(path).map_err(failed("read", path))
}
