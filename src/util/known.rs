//! What was found out about files, kept on disk, so that it is not computed again while the files stay as they are.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::files::{self, Existing};
use super::hash::Sha256;

/// A file that was written to since then may change again within one tick of its file system's clock.
const SETTLED: Duration = Duration::from_secs(2);

/// What tells whether a file is still what it was: device, inode, size, and the time of its last change in nanoseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stamp(String);

impl Stamp {
    /// `None` for a file that was written to just now, or after now: its time would not tell of another change.
    pub fn of(metadata: &Metadata) -> Option<Stamp> {
        let modified = metadata.modified().ok()?;
        let age = SystemTime::now().duration_since(modified).ok()?;
        (age >= SETTLED).then(|| {
            Stamp(format!(
                "{}:{}:{}:{}.{:09}",
                metadata.dev(),
                metadata.ino(),
                metadata.size(),
                metadata.mtime(),
                metadata.mtime_nsec()
            ))
        })
    }
}

impl fmt::Display for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Texts by keys, in a file that several processes may share. Keys say all that the texts depend on, so an entry is
/// never wrong, and one that is lost is only found out again.
#[derive(Debug)]
pub struct Known {
    path: PathBuf,
    entries: BTreeMap<String, String>,
    /// Whether there are entries that the file lacks.
    is_changed: bool,
}

#[derive(Serialize, Deserialize)]
struct Content {
    sha256: String,
    entries: BTreeMap<String, String>,
}

impl Known {
    /// What the file `path` holds: nothing if it is not there or damaged.
    pub fn read(path: &Path) -> Known {
        Known {
            path: path.to_owned(),
            entries: entries(path).unwrap_or_default(),
            is_changed: false,
        }
    }

    pub fn get(&self, key: &str) -> Option<&str> {
        self.entries.get(key).map(String::as_str)
    }

    pub fn insert(&mut self, key: String, text: String) {
        self.is_changed |= self.get(&key) != Some(&text);
        self.entries.insert(key, text);
    }

    /// Writes the file if it lacks entries, with what other processes have written since it was read. Its folder must
    /// exist.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&mut self) -> io::Result<()> {
        if !self.is_changed {
            return Ok(());
        }
        let mut all = entries(&self.path).unwrap_or_default();
        all.append(&mut self.entries);
        let content = Content {
            sha256: hash(&all)?,
            entries: all,
        };
        files::write(
            &self.path,
            &serde_json::to_vec(&content)?,
            Existing::Replace,
        )?;
        self.entries = content.entries;
        self.is_changed = false;
        Ok(())
    }
}

fn hash(entries: &BTreeMap<String, String>) -> io::Result<String> {
    Ok(Sha256::of(serde_json::to_vec(entries)?).to_string())
}

fn entries(path: &Path) -> Option<BTreeMap<String, String>> {
    let content: Content = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
    (hash(&content.entries).ok()? == content.sha256).then_some(content.entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_of_several_processes_come_together_and_damage_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("known.json");
        let mut first = Known::read(&path);
        let mut second = Known::read(&path);
        first.write().unwrap();
        assert!(!path.exists(), "there was nothing to write");
        first.insert("a".into(), "1".into());
        second.insert("b".into(), "2".into());
        first.write().unwrap();
        second.write().unwrap();
        let both = Known::read(&path);
        assert_eq!([both.get("a"), both.get("b")], [Some("1"), Some("2")]);

        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            fs::write(&path, &bytes).unwrap();
            let known = Known::read(&path);
            assert!(known.get("a").is_none_or(|text| text == "1"), "byte {at}");
            fs::write(&path, &whole[..at]).unwrap();
            assert_eq!(Known::read(&path).get("a"), None, "cut at {at}");
        }
    }

    #[test]
    fn stamps_tell_of_changes_once_files_have_settled() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let stamp = || Stamp::of(&fs::metadata(&path).unwrap());
        fs::write(&path, "abc").unwrap();
        assert_eq!(stamp(), None, "written just now");
        let at = |seconds| {
            let time = SystemTime::now() - Duration::from_secs(60) + Duration::from_secs(seconds);
            fs::File::options()
                .write(true)
                .open(&path)
                .unwrap()
                .set_modified(time)
                .unwrap();
        };
        at(0);
        let first = stamp().unwrap();
        assert_eq!(stamp(), Some(first.clone()));
        at(1);
        assert_ne!(stamp(), Some(first.clone()));
        at(3600);
        assert_eq!(stamp(), None, "in the future");
    }
}
