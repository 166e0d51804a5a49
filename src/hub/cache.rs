//! One repository's folder in the cache: `blobs/<etag>`, `snapshots/<commit>/<file>`, `refs/<revision>` and
//! `.no_exist/<commit>/<file>`, as `huggingface_hub` lays them out.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};

use super::name::{is_commit, is_safe_path};
use super::{HubError, RepoId, Result, Revision};
use crate::util::files::{self, Existing, open_lock, replace_link};

/// More than any of the files that are read to find out which others are needed.
const LARGEST_READ: u64 = 64 << 20;
/// Folders inside each other that are looked through.
const DEEPEST: usize = 8;

/// The folder of one repository. Nothing is created before something is written.
#[derive(Debug)]
pub(super) struct RepoCache {
    dir: PathBuf,
    locks: PathBuf,
}

impl RepoCache {
    pub fn new(cache: &Path, repo: &RepoId) -> Self {
        RepoCache {
            dir: cache.join(repo.folder()),
            locks: cache.join(".locks").join(repo.folder()),
        }
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.dir.join("snapshots").join(commit)
    }

    pub fn blob(&self, etag: &str) -> PathBuf {
        self.dir.join("blobs").join(etag)
    }

    /// The partial file of an incomplete download.
    pub fn incomplete(&self, etag: &str) -> PathBuf {
        self.dir.join("blobs").join(format!("{etag}.incomplete"))
    }

    /// The commit that a revision is here, if there are files of it.
    pub fn commit(&self, revision: &Revision) -> Result<Option<String>> {
        let commit = match revision.is_commit() {
            true => revision.as_str().to_owned(),
            false => {
                let path = self.dir.join("refs").join(revision.as_str());
                match fs::read_to_string(&path) {
                    Ok(text) => text.trim().to_owned(),
                    // A folder is the first half of other names.
                    Err(error)
                        if matches!(
                            error.kind(),
                            ErrorKind::NotFound
                                | ErrorKind::IsADirectory
                                | ErrorKind::NotADirectory
                        ) =>
                    {
                        return Ok(None);
                    }
                    Err(source) => return Err(io_error("read", &path, source)),
                }
            }
        };
        Ok((is_commit(&commit) && self.snapshot(&commit).is_dir()).then_some(commit))
    }

    /// The revisions that are here, for messages.
    pub fn revisions(&self) -> Vec<String> {
        let names = files_below(&self.dir.join("refs")).unwrap_or_default();
        let commits = fs::read_dir(self.dir.join("snapshots"))
            .into_iter()
            .flatten();
        let commits = commits.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        names.into_iter().chain(commits).collect()
    }

    /// The files of a snapshot. A link to a blob that is gone is no file.
    pub fn files(&self, commit: &str) -> Result<BTreeSet<String>> {
        let dir = self.snapshot(commit);
        files_below(&dir).map_err(|source| io_error("read", &dir, source))
    }

    /// Whether it was noted that the hub does not have a file.
    pub fn is_noted_absent(&self, commit: &str, name: &str) -> bool {
        self.dir.join(".no_exist").join(commit).join(name).is_file()
    }

    /// Notes that the hub does not have a file, so that it need not be asked again.
    pub fn note_absent(&self, commit: &str, name: &str) -> Result<()> {
        let path = self.dir.join(".no_exist").join(commit).join(name);
        create_parent(&path)?;
        File::create(&path)
            .map(drop)
            .map_err(|source| io_error("write", &path, source))
    }

    /// Notes which commit a branch or tag is.
    pub fn write_ref(&self, revision: &Revision, commit: &str) -> Result<()> {
        if revision.is_commit() {
            return Ok(());
        }
        let path = self.dir.join("refs").join(revision.as_str());
        create_parent(&path)?;
        files::write(&path, commit.as_bytes(), Existing::Replace)
            .map_err(|source| io_error("write", &path, source))
    }

    /// Shows a blob under its name in a snapshot.
    pub fn link(&self, commit: &str, name: &str, etag: &str) -> Result<()> {
        debug_assert!(is_safe_path(name));
        let path = self.snapshot(commit).join(name);
        create_parent(&path)?;
        // Relative, so that the cache may be moved: out of the folders of the name, the commit and `snapshots`.
        let up = "../".repeat(name.split('/').count() + 1);
        let linked = match replace_link(&path, Path::new(&format!("{up}blobs/{etag}"))) {
            // A file system without links: the file itself, as huggingface_hub does there.
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::PermissionDenied | ErrorKind::Unsupported
                ) =>
            {
                fs::rename(self.blob(etag), &path)
            }
            linked => linked,
        };
        linked.map_err(|source| io_error("write", &path, source))
    }

    /// Takes the lock of a blob, which `huggingface_hub` takes too, waiting for whoever downloads it. Held until the
    /// file is dropped.
    pub fn lock(&self, etag: &str) -> Result<File> {
        let path = self.locks.join(format!("{etag}.lock"));
        create_parent(&path)?;
        open_lock(&path)
            .and_then(|file| file.lock().map(|()| file))
            .map_err(|source| io_error("lock", &path, source))
    }
}

/// The content of a small file.
pub(super) fn read(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(LARGEST_READ + 1).read_to_end(&mut bytes))
        .and_then(|_| match bytes.len() as u64 > LARGEST_READ {
            true => Err(io::Error::other(format!(
                "larger than {LARGEST_READ} bytes"
            ))),
            false => Ok(()),
        })
        .map_err(|source| io_error("read", path, source))?;
    Ok(bytes)
}

pub(super) fn io_error(action: &'static str, path: &Path, source: io::Error) -> HubError {
    HubError::Io {
        action,
        path: path.to_owned(),
        source,
    }
}

pub(super) fn create_parent(path: &Path) -> Result<()> {
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent).map_err(|source| io_error("create", parent, source))
}

/// The files below a folder, with slashes; links count as what they lead to.
pub(super) fn files_below(dir: &Path) -> io::Result<BTreeSet<String>> {
    fn walk(
        dir: &Path,
        prefix: &str,
        depth: usize,
        found: &mut BTreeSet<String>,
    ) -> io::Result<()> {
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            let name = format!("{prefix}{name}");
            let path = entry.path();
            // `metadata` follows links; of one that leads nowhere there is none.
            match fs::metadata(&path) {
                Ok(metadata) if metadata.is_file() => {
                    found.insert(name);
                }
                Ok(metadata) if metadata.is_dir() && depth < DEEPEST => {
                    walk(&path, &format!("{name}/"), depth + 1, found)?;
                }
                _ => {}
            }
        }
        Ok(())
    }
    let mut found = BTreeSet::new();
    walk(dir, "", 0, &mut found)?;
    Ok(found)
}
