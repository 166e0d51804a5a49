//! Files into the cache: what is missing, resumed where a download stopped, checked before it gets its name.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::path::Path;

use super::cache::{self, RepoCache, create_parent, io_error};
use super::client::{Client, Failure, FileInfo, transient};
use super::{HubError, Progress, RepoId, Result};
use crate::util::files::{free_space, is_full};
use crate::util::hash::Hasher;

/// Bytes read at once.
const BLOCK: usize = 1 << 18;

/// The files of one commit on their way into the cache.
pub(super) struct Download<'a> {
    client: &'a Client<'a>,
    repo: &'a RepoId,
    commit: &'a str,
    cache: &'a RepoCache,
    infos: HashMap<String, FileInfo>,
    received: u64,
}

type Report<'a> = &'a mut dyn FnMut(Progress<'_>);

impl<'a> Download<'a> {
    pub fn new(
        client: &'a Client<'a>,
        repo: &'a RepoId,
        commit: &'a str,
        cache: &'a RepoCache,
    ) -> Self {
        Download {
            client,
            repo,
            commit,
            cache,
            infos: HashMap::new(),
            received: 0,
        }
    }

    /// Bytes that came over the network.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// The content of a small file, which is downloaded if need be.
    pub fn read(&mut self, name: &str, progress: Report<'_>) -> Result<Vec<u8>> {
        let path = self.cache.snapshot(self.commit).join(name);
        if !path.is_file() {
            let info = self.info(name, progress)?;
            self.file(name, &info, 0, &mut |event| {
                if matches!(event, Progress::Retry { .. }) {
                    progress(event);
                }
            })?;
        }
        cache::read(&path)
    }

    /// Downloads those of the files that are not there.
    pub fn all(&mut self, names: &[String], progress: Report<'_>) -> Result<()> {
        let snapshot = self.cache.snapshot(self.commit);
        let mut missing = Vec::new();
        for name in names {
            if !snapshot.join(name).is_file() {
                let info = self.info(name, progress)?;
                let to_come = self.to_come(&info);
                missing.push((name, info, to_come));
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        let lengths = missing.iter().map(|(_, _, to_come)| *to_come);
        // Sizes are what a server says.
        let bytes = lengths.fold(0, u64::saturating_add);
        self.check_space(bytes)?;
        progress(Progress::Start {
            commit: self.commit,
            files: missing.len(),
            bytes,
        });
        let mut done = 0;
        for (name, info, to_come) in missing {
            progress(Progress::File {
                name,
                bytes: info.size,
            });
            self.file(name, &info, done, progress)?;
            done += to_come;
            progress(Progress::Bytes { done });
        }
        progress(Progress::Done);
        Ok(())
    }

    fn info(&mut self, name: &str, progress: Report<'_>) -> Result<FileInfo> {
        if let Some(info) = self.infos.get(name) {
            return Ok(info.clone());
        }
        let info = self
            .client
            .file_info(self.repo, self.commit, name, progress)?;
        self.infos.insert(name.to_owned(), info.clone());
        Ok(info)
    }

    /// The bytes of a file that are not here.
    fn to_come(&self, info: &FileInfo) -> u64 {
        if self.has_blob(info) {
            return 0;
        }
        info.size - self.kept(info).unwrap_or(0)
    }

    /// Whether the content is here, perhaps under another name or commit. One of another size is damaged.
    fn has_blob(&self, info: &FileInfo) -> bool {
        length(&self.cache.blob(&info.etag)) == Some(info.size)
    }

    /// How many bytes of an earlier download can be resumed: only where the hash of the whole tells
    /// whether the halves belong together.
    fn kept(&self, info: &FileInfo) -> Option<u64> {
        info.sha256()?;
        length(&self.cache.incomplete(&info.etag)).filter(|kept| *kept <= info.size)
    }

    fn check_space(&self, needed: u64) -> Result<()> {
        let dir = self.cache.dir();
        fs::create_dir_all(dir).map_err(|source| io_error("create", dir, source))?;
        match free_space(dir) {
            Some(free) if free < needed => Err(self.disk_full(needed, Some(free))),
            _ => Ok(()),
        }
    }

    fn disk_full(&self, needed: u64, free: Option<u64>) -> HubError {
        HubError::DiskFull {
            repo: self.repo.clone(),
            path: self.cache.dir().to_owned(),
            needed,
            free,
        }
    }

    /// Puts one file into the cache. `before` are the bytes that were reported before it.
    fn file(
        &mut self,
        name: &str,
        info: &FileInfo,
        before: u64,
        progress: Report<'_>,
    ) -> Result<()> {
        let _lock = self.cache.lock(&info.etag)?;
        // Somebody else may have had the lock and downloaded it.
        if !self.has_blob(info) {
            self.blob(name, info, before, progress)?;
        }
        self.cache.link(self.commit, name, &info.etag)
    }

    fn blob(
        &mut self,
        name: &str,
        info: &FileInfo,
        before: u64,
        progress: Report<'_>,
    ) -> Result<()> {
        let path = self.cache.incomplete(&info.etag);
        create_parent(&path)?;
        let io = |action, source| io_error(action, &path, source);
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(|source| io("write", source))?;
        let kept = self.kept(info).unwrap_or(0);
        let mut part = PartialFile {
            file,
            hash: Hasher::default(),
            length: 0,
            spliced: false,
        };
        part.go_on_from(kept).map_err(|source| io("read", source))?;

        let url = self.client.file_url(self.repo, self.commit, name);
        let (mut failed, mut reached, mut is_second) = (0, kept, false);
        loop {
            let attempt = self.rest(name, info, &mut part, &mut |length| {
                // The answer starts over, without the bytes that are here.
                let done = before + length.saturating_sub(kept);
                progress(Progress::Bytes { done });
            });
            match attempt {
                Ok(()) => {}
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Transient { reason, wait }) => {
                    // Attempts that bring something may be many.
                    failed = if part.length > reached { 1 } else { failed + 1 };
                    reached = reached.max(part.length);
                    self.client.wait(&url, failed, reason, wait, progress)?;
                    let kept = info.sha256().map_or(0, |_| part.length);
                    part.go_on_from(kept)
                        .map_err(|source| io("write", source))?;
                    continue;
                }
            }
            let Some(expected) = info.sha256() else { break };
            let found = part.sum();
            if found == expected {
                break;
            }
            // Pieces of different files, perhaps: once more in one piece.
            if part.spliced && !is_second {
                is_second = true;
                part.go_on_from(0).map_err(|source| io("write", source))?;
                continue;
            }
            fs::remove_file(&path).map_err(|source| io("remove", source))?;
            return Err(HubError::Hash {
                repo: self.repo.clone(),
                file: name.to_owned(),
                expected: expected.to_owned(),
                found,
            });
        }
        part.file.sync_all().map_err(|source| io("write", source))?;
        let blob = self.cache.blob(&info.etag);
        fs::rename(&path, &blob).map_err(|source| io_error("write", &blob, source))
    }

    /// Gets what is missing of a file, once.
    fn rest(
        &mut self,
        name: &str,
        info: &FileInfo,
        part: &mut PartialFile,
        at: &mut dyn FnMut(u64),
    ) -> Result<(), Failure> {
        let path = self.cache.incomplete(&info.etag);
        if part.length < info.size {
            let (mut content, from_there) =
                self.client
                    .content(self.repo, self.commit, name, part.length)?;
            if !from_there {
                part.go_on_from(0)
                    .map_err(|source| io_error("write", &path, source))?;
            }
            let mut block = vec![0; BLOCK];
            loop {
                let read = match content.read(&mut block) {
                    Ok(0) => break,
                    Ok(read) => read,
                    Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                    Err(error) => return Err(transient(&error)),
                };
                part.write(&block[..read])
                    .map_err(|source| match is_full(&source) {
                        true => self.disk_full(info.size.saturating_sub(part.length), None),
                        false => io_error("write", &path, source),
                    })?;
                self.received += read as u64;
                at(part.length);
                if part.length > info.size {
                    break;
                }
            }
        }
        match part.length {
            length if length == info.size => Ok(()),
            length if length < info.size => Err(Failure::Transient {
                reason: format!("{name} ended after {length} of {} bytes", info.size),
                wait: None,
            }),
            length => {
                fs::remove_file(&path).map_err(|source| io_error("remove", &path, source))?;
                Err(Failure::Final(HubError::Size {
                    repo: self.repo.clone(),
                    file: name.to_owned(),
                    expected: info.size,
                    found: length,
                }))
            }
        }
    }
}

/// A file that is being written, with the hash of what it holds.
struct PartialFile {
    file: File,
    hash: Hasher,
    /// In bytes.
    length: u64,
    /// Whether its bytes come from more than one answer.
    spliced: bool,
}

impl PartialFile {
    /// Keeps the first `kept` bytes, to write behind them.
    fn go_on_from(&mut self, kept: u64) -> io::Result<()> {
        self.file.set_len(kept)?;
        self.spliced = kept > 0;
        if kept == self.length {
            // The hash is that of all that was written, and that is where the file stands.
            return Ok(());
        }
        self.file.rewind()?;
        self.hash = Hasher::default();
        self.length = 0;
        let mut block = vec![0; BLOCK];
        while self.length < kept {
            let most = usize::try_from(kept - self.length).map_or(BLOCK, |left| left.min(BLOCK));
            let read = self.file.read(&mut block[..most])?;
            if read == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            self.hash.update(&block[..read]);
            self.length += read as u64;
        }
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.hash.update(bytes);
        self.length += bytes.len() as u64;
        Ok(())
    }

    /// The SHA-256 of the content.
    fn sum(&self) -> String {
        self.hash.clone().finish().to_string()
    }
}

/// The length of a file in bytes, if it is there.
fn length(path: &Path) -> Option<u64> {
    let metadata = fs::metadata(path).ok()?;
    metadata.is_file().then_some(metadata.len())
}
