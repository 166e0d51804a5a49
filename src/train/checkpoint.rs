//! Checkpoints of a training run: a folder a step, committed as a whole.
//!
//! ```text
//! checkpoints/
//!   .lock                       held by the run that writes here
//!   step-00001000/
//!     unet/config.json          a diffusers submodule directory
//!     unet/diffusion_pytorch_model.safetensors
//!     optimizer.safetensors     whatever else the run names
//!     state.json                step, seeds, data position, configuration
//!     manifest.json             size and sha256 of every other file
//!   best -> step-00001000       the lowest validation loss, where it is measured
//!   step-00002000.tmp-4711-x7Qa2K/   left by process 4711, killed while saving
//! ```
//!
//! A checkpoint is written into a folder with a temporary name, made durable file by file, the
//! manifest last, and then renamed. So a folder named `step-N` is complete unless something damaged
//! it later, which sizes and hashes tell. Nothing is deleted that the running process did not write
//! itself: what a killed run left is reported and stays.

mod lock;
mod state;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use crate::util::files::{AtomicDir, check_writable, sync_dir, write_synced};
use crate::util::hash::{Hasher, Sha256};
use crate::weights::save::{FilePlan, check_free_space, write_error};
use crate::weights::{Checkpoint, FetchError, TensorSpec, WeightsError};
use lock::Lock;
pub(in crate::train) use state::BATCHES;
pub use state::{
    BATCH_SIZE, BATCHES_OF_STEP, FieldMismatch, ResumeMismatch, TrainState, config_sha256,
    samples_of_step,
};
use state::{Manifest, ManifestFile, check_paths};

/// The record of a checkpoint, beside the manifest.
pub const STATE_FILE: &str = "state.json";
const PREFIX: &str = "step-";
const DELETING: &str = "deleting";
/// The symbolic link to the checkpoint with the lowest validation loss.
pub const BEST: &str = "best";

/// Why a checkpoint could not be saved or loaded.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("{dir}: {owner} writes checkpoints here; wait for it, or choose another output_dir")]
    Locked { dir: PathBuf, owner: String },
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error("{path}: {reason}")]
    Invalid { path: PathBuf, reason: String },
    #[error("checkpoint file {path:?}: {reason}")]
    Path { path: String, reason: &'static str },
    #[error("the state is of step {state}, the checkpoint of step {step}")]
    Step { state: u64, step: u64 },
}

/// Gives a tensor's bytes when they are to be written.
pub type Fetch<'a> = Box<dyn FnMut(&TensorSpec) -> Result<Cow<'a, [u8]>, FetchError> + Send + 'a>;

/// The kinds of files in a checkpoint.
pub enum Content<'a> {
    /// Bytes as they are: a configuration, a tokenizer.
    Bytes(Cow<'a, [u8]>),
    /// A safetensors file, its tensors fetched one at a time.
    Tensors {
        specs: Vec<TensorSpec>,
        metadata: BTreeMap<String, String>,
        fetch: Fetch<'a>,
    },
    /// Another file, which nobody changes: linked where the file system can and `copy` does not forbid it.
    File { from: PathBuf, copy: bool },
}

/// A file of a checkpoint, by its path inside it (`unet/config.json`).
pub struct CheckpointFile<'a> {
    pub path: String,
    pub content: Content<'a>,
}

/// The folder of a run's checkpoints before the run begins. If it exists it is locked, so that nobody else adds to the
/// checkpoints found in it; if not, it is made when the run begins.
#[derive(Debug)]
pub struct CheckpointFolder {
    root: PathBuf,
    locked: Option<CheckpointWriter>,
}

impl CheckpointFolder {
    /// Locks the folder, if it exists.
    ///
    /// # Errors
    /// As [`CheckpointWriter::open`].
    pub fn find(root: &Path) -> Result<Self, CheckpointError> {
        Ok(CheckpointFolder {
            root: root.to_owned(),
            locked: match root.exists() {
                true => Some(CheckpointWriter::open(root)?),
                false => None,
            },
        })
    }

    /// The folder to write to, which is made and locked if that is still to do.
    ///
    /// # Errors
    /// As [`CheckpointWriter::open`].
    pub fn writer(&mut self) -> Result<CheckpointWriter, CheckpointError> {
        match self.locked.take() {
            Some(writer) => Ok(writer),
            None => CheckpointWriter::open(&self.root),
        }
    }
}

/// A folder of checkpoints that this process writes to.
#[derive(Debug)]
pub struct CheckpointWriter {
    root: PathBuf,
    lock: Lock,
    /// The checkpoints that this process committed and did not delete, oldest first.
    committed: Vec<PathBuf>,
    /// The checkpoint with the lowest validation loss, also of earlier runs.
    best: Option<(f64, PathBuf)>,
    /// Sizes and hashes of the files that were taken from elsewhere, by their paths in a checkpoint.
    taken: BTreeMap<String, (u64, String)>,
}

impl CheckpointWriter {
    /// Makes the folder if there is none and locks it. That also finds a folder that cannot be
    /// written to before training starts.
    ///
    /// # Errors
    /// When another process holds the lock or the folder cannot be written to.
    pub fn open(root: &Path) -> Result<Self, CheckpointError> {
        fs::create_dir_all(root).map_err(|e| io_error(root, e))?;
        let lock = Lock::take(root)?;
        check_writable(root).map_err(|e| io_error(root, e))?;
        Ok(CheckpointWriter {
            root: root.to_owned(),
            lock,
            committed: Vec::new(),
            best: best(root),
            taken: BTreeMap::new(),
        })
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The process that ended without releasing the lock, if one did: it was killed or crashed.
    pub fn stale_owner(&self) -> Option<&str> {
        self.lock.stale_owner()
    }

    /// Saves `files` and `state` as the checkpoint of `state.step` and returns its folder.
    ///
    /// When there is a folder of that step already, from an earlier run, it stays and the new one
    /// gets a numbered name (`step-00001000-1`); [`latest`] takes the higher number.
    ///
    /// # Errors
    /// When a path is not usable, a tensor cannot be fetched or a file cannot be written. The
    /// temporary folder is removed then and older checkpoints are as before.
    pub fn save(
        &mut self,
        state: &TrainState,
        files: Vec<CheckpointFile>,
    ) -> Result<PathBuf, CheckpointError> {
        let reserved = [STATE_FILE, Manifest::FILE];
        check_paths(files.iter().map(|f| f.path.as_str()), &reserved)?;
        let name = folder_name(state.step, 0);
        let prefix = format!("{name}.tmp-{}-", std::process::id());
        let temp = AtomicDir::create_as(&self.root.join(name), OsStr::new(&prefix), "")
            .map_err(|e| io_error(&self.root, e))?;
        let manifest = write_files(temp.path(), state, files, &mut self.taken)?;
        durable_file(&temp.path().join(Manifest::FILE), 0, |out| {
            Ok(out.write_all(manifest.to_text().as_bytes())?)
        })?;
        sync_tree(temp.path()).map_err(|e| io_error(temp.path(), e))?;
        let dir = commit(temp, &self.root, state.step)?;
        self.committed.push(dir.clone());
        if let Some(loss) = state.validation_loss
            && self.best.as_ref().is_none_or(|(lowest, _)| loss < *lowest)
        {
            self.best = Some((loss, dir.clone()));
            if let Err(error) = link_best(&self.root, &dir) {
                tracing::warn!("{BEST} does not lead to {}: {error}", dir.display());
            }
        }
        Ok(dir)
    }

    /// Deletes the oldest checkpoints that this process committed, but for the newest `n` and the best by
    /// validation, and returns what it deleted. Checkpoints of other processes are never touched, those of the run
    /// that this one continues included. At least one is kept.
    ///
    /// # Errors
    /// When a folder cannot be removed.
    pub fn keep_last(&mut self, n: usize) -> Result<Vec<PathBuf>, CheckpointError> {
        let mut deleted = Vec::new();
        let old = self.committed.len().saturating_sub(n.max(1));
        let best = self.best.as_ref().map(|(_, dir)| dir.clone());
        let is_doomed = |dir: &&PathBuf| Some(*dir) != best.as_ref();
        let doomed = self.committed[..old].iter().filter(is_doomed).cloned();
        for dir in doomed.collect::<Vec<PathBuf>>() {
            self.committed.retain(|own| *own != dir);
            // Renamed first: a process that is killed in between leaves no half checkpoint under a
            // committed name.
            let mut name = dir.clone().into_os_string();
            name.push(format!(".{DELETING}-{}", std::process::id()));
            let doomed = PathBuf::from(name);
            match fs::rename(&dir, &doomed).and_then(|()| fs::remove_dir_all(&doomed)) {
                Ok(()) => deleted.push(dir),
                // Someone else moved it away: it is theirs now.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(io_error(&dir, e)),
            }
        }
        Ok(deleted)
    }
}

/// The checkpoint that [`BEST`] leads to, with its validation loss.
fn best(root: &Path) -> Option<(f64, PathBuf)> {
    let dir = root.join(fs::read_link(root.join(BEST)).ok()?);
    let saved = SavedCheckpoint::open(&dir).ok()?;
    Some((saved.state.validation_loss?, dir))
}

/// Makes [`BEST`] lead to `dir`, by one rename.
fn link_best(root: &Path, dir: &Path) -> io::Result<()> {
    let Some(name) = dir.file_name() else {
        return Ok(());
    };
    let fresh = root.join(format!("{BEST}.tmp-{}", std::process::id()));
    // What a process of the same number left.
    match fs::remove_file(&fresh) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    symlink(name, &fresh)?;
    fs::rename(&fresh, root.join(BEST))
}

/// The name of a step's checkpoint; those after the first of a step are numbered.
fn folder_name(step: u64, number: u64) -> String {
    match number {
        0 => format!("{PREFIX}{step:08}"),
        n => format!("{PREFIX}{step:08}-{n}"),
    }
}

/// Gives a complete checkpoint the first name of its step that is free.
fn commit(mut temp: AtomicDir, root: &Path, step: u64) -> Result<PathBuf, CheckpointError> {
    let mut number = 0;
    loop {
        let dir = root.join(folder_name(step, number));
        match temp.commit(&dir) {
            Ok(()) => return Ok(dir),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => number += 1,
            Err(e) => return Err(io_error(&dir, e)),
        }
    }
}

fn io_error(path: &Path, source: io::Error) -> CheckpointError {
    CheckpointError::Io {
        path: path.to_owned(),
        source,
    }
}

/// Hashes and counts what passes through.
struct Hashing<W> {
    inner: W,
    hasher: Hasher,
    bytes: u64,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(data)?;
        self.hasher.update(&data[..n]);
        self.bytes += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// A failure while a file is written: of the file itself, or of what goes into it.
enum WriteFailure {
    Io(io::Error),
    Weights(WeightsError),
}

impl From<io::Error> for WriteFailure {
    fn from(error: io::Error) -> Self {
        WriteFailure::Io(error)
    }
}

/// Writes a new file, makes it durable, and returns its size and hash. `needed` is its size if
/// known, for the message when the device is full.
fn durable_file(
    path: &Path,
    needed: u64,
    write: impl FnOnce(&mut Hashing<&mut BufWriter<File>>) -> Result<(), WriteFailure>,
) -> Result<(u64, String), CheckpointError> {
    let written = write_synced(path, |inner| {
        let mut out = Hashing {
            inner,
            hasher: Hasher::default(),
            bytes: 0,
        };
        write(&mut out)?;
        Ok((out.bytes, out.hasher.finish().to_string()))
    });
    written.map_err(|failure| match failure {
        WriteFailure::Io(source) => write_error(path, needed, source).into(),
        WriteFailure::Weights(error) => error.into(),
    })
}

/// Writes all files but the manifest, which it returns.
fn write_files(
    dir: &Path,
    state: &TrainState,
    files: Vec<CheckpointFile>,
    taken: &mut BTreeMap<String, (u64, String)>,
) -> Result<Manifest, CheckpointError> {
    let state_text = format!("{:#}\n", serde_json::json!(state));
    let mut total = state_text.len() as u64;
    for file in &files {
        total += match &file.content {
            Content::Bytes(data) => data.len() as u64,
            Content::Tensors {
                specs, metadata, ..
            } => FilePlan::new(&dir.join(&file.path), specs, metadata)?.bytes,
            Content::File { copy: false, .. } => 0,
            Content::File { from, copy: true } => {
                fs::metadata(from).map_err(|e| io_error(from, e))?.len()
            }
        };
    }
    check_free_space(dir, dir, total)?;

    let mut manifest = Manifest {
        format: Manifest::FORMAT,
        step: state.step,
        files: Vec::with_capacity(files.len() + 1),
    };
    let state_file = CheckpointFile {
        path: STATE_FILE.to_owned(),
        content: Content::Bytes(state_text.into_bytes().into()),
    };
    for file in files.into_iter().chain([state_file]) {
        let path = dir.join(&file.path);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(|e| io_error(parent, e))?;
        }
        let (bytes, sha256) = match file.content {
            Content::Bytes(data) => {
                durable_file(&path, data.len() as u64, |out| Ok(out.write_all(&data)?))?
            }
            Content::Tensors {
                specs,
                metadata,
                fetch,
            } => {
                let plan = FilePlan::new(&path, &specs, &metadata)?;
                durable_file(&path, plan.bytes, |out| {
                    plan.write(&path, out, fetch).map_err(WriteFailure::Weights)
                })?
            }
            Content::File { from, copy } => {
                take_file(&from, &path, copy)?;
                match taken.get(&file.path) {
                    Some(known) => known.clone(),
                    None => taken
                        .entry(file.path.clone())
                        .or_insert(measure(&path)?)
                        .clone(),
                }
            }
        };
        manifest.files.push(ManifestFile {
            path: file.path,
            bytes,
            sha256,
        });
    }
    Ok(manifest)
}

/// Makes `to` the same file as `from`, or a copy of it.
fn take_file(from: &Path, to: &Path, copy: bool) -> Result<(), CheckpointError> {
    // A link to a symbolic link would point to nothing from here.
    let from = from.canonicalize().map_err(|e| io_error(from, e))?;
    if !copy && fs::hard_link(&from, to).is_ok() {
        return Ok(());
    }
    let copied = fs::copy(&from, to).and_then(|_| File::open(to)?.sync_all());
    copied.map_err(|e| write_error(to, 0, e).into())
}

/// The size and the hash of a file.
fn measure(path: &Path) -> Result<(u64, String), CheckpointError> {
    let measured = fs::metadata(path).and_then(|metadata| {
        let hash = Sha256::of_file(path)?;
        Ok((metadata.len(), hash.to_string()))
    });
    measured.map_err(|e| io_error(path, e))
}

/// Makes the entries of `dir` and of the folders below durable.
fn sync_tree(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            sync_tree(&entry.path())?;
        }
    }
    sync_dir(dir)
}

/// A committed checkpoint whose files are all there with the right sizes.
#[derive(Clone, Debug)]
pub struct SavedCheckpoint {
    dir: PathBuf,
    manifest: Manifest,
    state: TrainState,
}

impl SavedCheckpoint {
    /// Opens the checkpoint in `dir`, checking its manifest, the sizes of its files and its state.
    ///
    /// # Errors
    /// When something is missing, of another size or damaged.
    pub fn open(dir: &Path) -> Result<Self, CheckpointError> {
        let invalid = |reason: String| CheckpointError::Invalid {
            path: dir.to_owned(),
            reason,
        };
        let path = dir.join(Manifest::FILE);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Err(invalid(format!("no {}", Manifest::FILE)));
            }
            Err(e) => return Err(io_error(&path, e)),
        };
        let mut text = Vec::new();
        file.take(Manifest::MAX_BYTES)
            .read_to_end(&mut text)
            .map_err(|e| io_error(&path, e))?;
        let manifest = Manifest::from_text(&text).map_err(invalid)?;
        for file in &manifest.files {
            let found = match fs::metadata(dir.join(&file.path)) {
                Ok(metadata) => metadata.len(),
                Err(e) => return Err(invalid(format!("{}: {e}", file.path))),
            };
            if found != file.bytes {
                return Err(invalid(format!(
                    "{}: {} bytes expected, {found} found",
                    file.path, file.bytes
                )));
            }
        }
        // The state is small and decides what is done, so its hash is checked at once.
        let state = manifest
            .files
            .iter()
            .find(|f| f.path == STATE_FILE)
            .ok_or_else(|| invalid(format!("no {STATE_FILE} in the manifest")))?;
        check_hash(dir, state)?;
        let path = dir.join(STATE_FILE);
        let text = fs::read(&path).map_err(|e| io_error(&path, e))?;
        let state: TrainState =
            serde_json::from_slice(&text).map_err(|e| invalid(format!("{STATE_FILE}: {e}")))?;
        if state.step != manifest.step {
            return Err(CheckpointError::Step {
                state: state.step,
                step: manifest.step,
            });
        }
        Ok(SavedCheckpoint {
            dir: dir.to_owned(),
            manifest,
            state,
        })
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn state(&self) -> &TrainState {
        &self.state
    }

    /// The paths of the files inside the checkpoint, in the order they were saved.
    pub fn files(&self) -> impl Iterator<Item = &str> {
        self.manifest.files.iter().map(|f| f.path.as_str())
    }

    /// Reads every file and compares its hash.
    ///
    /// # Errors
    /// Names the first file, in the order of the manifest, that cannot be read or is damaged.
    pub fn verify(&self) -> Result<(), CheckpointError> {
        let results: Vec<_> = self
            .manifest
            .files
            .par_iter()
            .map(|file| check_hash(&self.dir, file))
            .collect();
        results.into_iter().collect()
    }

    /// Opens a safetensors file of the checkpoint.
    ///
    /// # Errors
    /// When the checkpoint has no such file or it is damaged.
    pub fn tensors(&self, file: &str) -> Result<Checkpoint, CheckpointError> {
        Ok(Checkpoint::open(&self.listed(file)?)?)
    }

    /// Reads a small file of the checkpoint whole.
    ///
    /// # Errors
    /// When the checkpoint has no such file or it cannot be read.
    pub fn bytes(&self, file: &str) -> Result<Vec<u8>, CheckpointError> {
        let path = self.listed(file)?;
        fs::read(&path).map_err(|e| io_error(&path, e))
    }

    fn listed(&self, file: &str) -> Result<PathBuf, CheckpointError> {
        if self.files().any(|f| f == file) {
            return Ok(self.dir.join(file));
        }
        Err(CheckpointError::Invalid {
            path: self.dir.clone(),
            reason: format!(
                "no file {file}; it has {}",
                self.files().collect::<Vec<_>>().join(", ")
            ),
        })
    }
}

fn check_hash(dir: &Path, file: &ManifestFile) -> Result<(), CheckpointError> {
    let path = dir.join(&file.path);
    let found = Sha256::of_file(&path)
        .map_err(|e| io_error(&path, e))?
        .to_string();
    if found == file.sha256 {
        return Ok(());
    }
    Err(CheckpointError::Invalid {
        path,
        reason: format!("damaged: sha256 {} expected, {found} found", file.sha256),
    })
}

/// How thoroughly [`latest`] checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// Manifest, state, and the sizes of files.
    Sizes,
    /// The hash of every file too, which reads them all.
    Hashes,
}

/// A folder that [`latest`] skipped.
#[derive(Clone, Debug, PartialEq)]
pub struct Skipped {
    pub path: PathBuf,
    pub reason: String,
}

/// The newest usable checkpoint, and the folders that were skipped to find it.
#[derive(Clone, Debug, Default)]
pub struct Latest {
    pub checkpoint: Option<SavedCheckpoint>,
    pub skipped: Vec<Skipped>,
}

/// Finds the checkpoint with the highest step that is complete and undamaged. A folder that does
/// not exist has none.
///
/// # Errors
/// When the folder cannot be listed.
pub fn latest(root: &Path, check: Check) -> Result<Latest, CheckpointError> {
    let mut result = Latest::default();
    let entries = match fs::read_dir(root) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(result),
        Err(e) => return Err(io_error(root, e)),
    };
    let mut committed = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|e| io_error(root, e))?;
        let name = entry.file_name();
        match parse_name(&name.to_string_lossy()) {
            Name::Committed { step, number } => committed.push(((step, number), entry.path())),
            Name::Unfinished { reason } => result.skipped.push(Skipped {
                path: entry.path(),
                reason,
            }),
            Name::Other => {}
        }
    }
    result.skipped.sort_by(|a, b| a.path.cmp(&b.path));
    committed.sort();
    for ((step, _), path) in committed.into_iter().rev() {
        let opened = SavedCheckpoint::open(&path).and_then(|saved| {
            if saved.manifest.step != step {
                return Err(CheckpointError::Step {
                    state: saved.manifest.step,
                    step,
                });
            }
            if check == Check::Hashes {
                saved.verify()?;
            }
            Ok(saved)
        });
        match opened {
            Ok(saved) => {
                result.checkpoint = Some(saved);
                break;
            }
            Err(error) => result.skipped.push(Skipped {
                path,
                reason: error.to_string(),
            }),
        }
    }
    Ok(result)
}

enum Name {
    Committed { step: u64, number: u64 },
    Unfinished { reason: String },
    Other,
}

fn parse_name(name: &str) -> Name {
    // Digits alone: u64's parser would take a sign.
    let number = |s: &str| {
        let digits = s.bytes().all(|b| b.is_ascii_digit());
        digits.then(|| s.parse::<u64>().ok()).flatten()
    };
    let Some(rest) = name.strip_prefix(PREFIX) else {
        return Name::Other;
    };
    if let Some((_, suffix)) = rest.split_once('.') {
        return if let Some(owner) = suffix.strip_prefix("tmp-") {
            let pid = owner.split_once('-').map_or(owner, |(pid, _)| pid);
            Name::Unfinished {
                reason: format!(
                    "not committed: process {pid} was stopped while saving it, or still is; safe to delete when it has ended"
                ),
            }
        } else if suffix.starts_with(DELETING) {
            Name::Unfinished {
                reason:
                    "a newer checkpoint replaced it and its deletion was stopped; safe to delete"
                        .to_owned(),
            }
        } else {
            Name::Other
        };
    }
    let (step, suffix) = rest.split_once('-').unwrap_or((rest, "0"));
    match (number(step), number(suffix)) {
        (Some(step), Some(number)) => Name::Committed { step, number },
        _ => Name::Other,
    }
}

#[cfg(test)]
mod tests;
