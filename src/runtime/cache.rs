//! Compiled programs kept on disk, so that a program is compiled once on a machine and loaded from then on.
//!
//! A file is named by the SHA-256 of everything that decides what the compiler makes ([`CacheKey`]), so no file is ever
//! out of date, only unused. An unreadable program is compiled and written again; one that cannot be written is not
//! kept. The cache makes a start faster or has no effect, and it never makes one fail.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use crate::pjrt::{
    CPUINFO, Client, CompileOptions, ErrorCode, LoadedExecutable, PjrtError, cpu_threads, processor,
};
use crate::util::files::{Access, AtomicFile, Durability, Existing, is_partial};
use crate::util::hash::{Hasher, Sha256};

/// Starts every file. Together with [`VERSION`] it keeps other files and other layouts from being taken for programs.
const MAGIC: &[u8; 8] = b"mxdfprog";
/// Version of the layout of files and of the contents of the key: a change of either increases it.
const VERSION: u32 = 1;
/// Magic, version, key, length of the program, SHA-256 of the program.
const HEADER: usize = 8 + 4 + 32 + 8 + 32;
const EXTENSION: &str = "program";
/// An unfinished file this old was left by a process that ended; writing one takes seconds.
const ABANDONED: Duration = Duration::from_secs(24 * 3600);

/// Environment variables that compilers read.
const COMPILER_VARIABLES: [&str; 3] = ["XLA_FLAGS", "LIBTPU_INIT_ARGS", "TF_XLA_FLAGS"];

/// An error of a cached program.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is not a complete program of this cache: {reason}", path.display())]
    Damaged { path: PathBuf, reason: String },
    #[error(
        "{} is machine code that another user may have written (owner {owner}, mode {mode:o})",
        path.display()
    )]
    NotOwn {
        path: PathBuf,
        owner: u32,
        mode: u32,
    },
    #[error("{} cannot be loaded: {source}", path.display())]
    Load {
        path: PathBuf,
        #[source]
        source: PjrtError,
    },
    #[error("{} does not list the processor's features", path.display())]
    Processor { path: PathBuf },
}

fn io_error<'a>(action: &'static str, path: &'a Path) -> impl Fn(io::Error) -> CacheError + 'a {
    move |source| CacheError::Io {
        action,
        path: path.to_path_buf(),
        source,
    }
}

/// Names one compilation: equal keys are equal programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheKey(Sha256);

impl CacheKey {
    /// The key of what `parts` say together; where one ends and the next starts counts too.
    pub fn of(parts: &[&[u8]]) -> CacheKey {
        let mut hash = Hasher::default();
        for part in parts {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        CacheKey(hash.finish())
    }
}

/// The size of a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub programs: usize,
    pub bytes: u64,
}

/// A folder of compiled programs. Several processes may use it at once.
///
/// The files are machine code: whoever can write to the folder decides what its users run.
#[derive(Clone, Debug)]
pub struct ExecutableCache {
    dir: PathBuf,
    max_bytes: u64,
}

impl ExecutableCache {
    /// Default limit of the bytes in one folder.
    pub const MAX_BYTES: u64 = 10_000_000_000;

    /// The cache in `dir`, which is made when the first program is kept. Beyond `max_bytes` the programs that were not
    /// used for the longest time go.
    pub fn new(dir: impl Into<PathBuf>, max_bytes: u64) -> ExecutableCache {
        ExecutableCache {
            dir: dir.into(),
            max_bytes,
        }
    }

    /// `maxdiff-rs/programs` in the user's cache directory, where there is one.
    pub fn default_dir() -> Option<PathBuf> {
        dirs::cache_dir().map(|dir| dir.join("maxdiff-rs").join("programs"))
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    fn path(&self, key: &CacheKey) -> PathBuf {
        self.dir.join(key.0.to_string()).with_extension(EXTENSION)
    }

    /// The program kept under `key`, and notes that it was used; `None` if there is none.
    ///
    /// # Errors
    /// When its file cannot be read, is not what was written, or could be written by others: whoever writes it decides
    /// what is run.
    pub fn read(&self, key: &CacheKey) -> Result<Option<Vec<u8>>, CacheError> {
        let path = self.path(key);
        let mut file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(io_error("read", &path)(error)),
        };
        let metadata = file.metadata().map_err(io_error("read", &path))?;
        let (owner, mode) = (metadata.uid(), metadata.mode() & 0o7777);
        let is_own = owner == 0 || user().is_none_or(|user| user == owner);
        if mode & 0o022 != 0 || !is_own {
            return Err(CacheError::NotOwn { path, owner, mode });
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)
            .map_err(io_error("read", &path))?;
        if let Err(reason) = check(&bytes, key) {
            return Err(CacheError::Damaged { path, reason });
        }
        // The time of change is that of the last use. In a folder that may only be read nothing is evicted either.
        let _ = file.set_modified(SystemTime::now());
        bytes.drain(..HEADER);
        Ok(Some(bytes))
    }

    /// Keeps a program under `key`, then lets go of others as far as the limit asks.
    ///
    /// # Errors
    /// When the folder cannot be made or the file not be written; nothing of it is left then.
    pub fn write(&self, key: &CacheKey, program: &[u8]) -> Result<(), CacheError> {
        if (program.len() + HEADER) as u64 > self.max_bytes {
            return Ok(());
        }
        // For this user alone, because its files are run.
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.dir)
            .map_err(io_error("make the folder", &self.dir))?;
        let path = self.path(key);
        AtomicFile::create(&path, Access::Owner)
            .and_then(|mut file| {
                file.write_all(&header(key, program))?;
                file.write_all(program)?;
                // A file that a crash of the machine cut short is found by its SHA-256 and made again.
                file.commit(&path, Existing::Replace, Durability::Unsynced)
            })
            .map_err(io_error("write", &path))?;
        self.evict(&path);
        Ok(())
    }

    /// Forgets what is kept under `key`.
    fn remove(&self, key: &CacheKey) {
        // If it cannot be removed, the program that is compiled instead replaces it.
        let _ = fs::remove_file(self.path(key));
    }

    /// The size of the folder.
    ///
    /// # Errors
    /// When the folder is there and cannot be read.
    pub fn usage(&self) -> Result<Usage, CacheError> {
        let entries = match fs::read_dir(&self.dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Usage::default()),
            Err(error) => return Err(io_error("read", &self.dir)(error)),
        };
        let sizes = entries
            .flatten()
            .filter(|entry| has_extension(&entry.path(), EXTENSION))
            .filter_map(|entry| entry.metadata().ok())
            .map(|metadata| metadata.len());
        Ok(sizes.fold(Usage::default(), |usage, size| Usage {
            programs: usage.programs + 1,
            bytes: usage.bytes + size,
        }))
    }

    /// Removes the programs that were not used for the longest time until the rest is within the limit, but not
    /// `newest`, and what ended processes left unfinished. Another process may do the same: what is gone already is no
    /// error, and a file that is being read stays readable.
    fn evict(&self, newest: &Path) {
        let now = SystemTime::now();
        let mut programs = Vec::new();
        let mut total = 0;
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let path = entry.path();
            let Ok(metadata) = entry.metadata() else {
                continue;
            };
            let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            if has_extension(&path, EXTENSION) {
                total += metadata.len();
                programs.push((used, metadata.len(), path));
            } else if is_partial(&path) && now.duration_since(used).is_ok_and(|age| age > ABANDONED)
            {
                let _ = fs::remove_file(path);
            }
        }
        programs.sort();
        for (_, size, path) in programs {
            if total <= self.max_bytes {
                break;
            }
            if path != newest && fs::remove_file(&path).is_ok() {
                total -= size;
            }
        }
    }
}

/// The user that this process runs as, where the system tells: the owner of its entry among the processes.
fn user() -> Option<u32> {
    fs::metadata("/proc/self").ok().map(|own| own.uid())
}

fn has_extension(path: &Path, extension: &str) -> bool {
    path.extension().is_some_and(|found| found == extension)
}

fn header(key: &CacheKey, program: &[u8]) -> Vec<u8> {
    let mut header = Vec::with_capacity(HEADER);
    header.extend(MAGIC);
    header.extend(VERSION.to_le_bytes());
    header.extend(key.0.bytes());
    header.extend((program.len() as u64).to_le_bytes());
    header.extend(Sha256::of(program).bytes());
    header
}

/// Checks that `bytes` are a complete file of the program `key`.
fn check(bytes: &[u8], key: &CacheKey) -> Result<(), String> {
    let Some((found, program)) = bytes.split_at_checked(HEADER) else {
        return Err(format!("{} bytes, expected at least {HEADER}", bytes.len()));
    };
    let expected = header(key, program);
    let parts = [
        ("magic", 0..8),
        ("version", 8..12),
        ("key", 12..44),
        ("length", 44..52),
        ("SHA-256", 52..HEADER),
    ];
    match parts
        .into_iter()
        .find(|(_, at)| found[at.clone()] != expected[at.clone()])
    {
        Some((part, _)) => Err(format!("its {part} is another")),
        None => Ok(()),
    }
}

/// How many programs a session has compiled, and how many it has loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProgramCounts {
    pub compiled: usize,
    pub from_cache: usize,
}

/// A cache in use by a session.
pub(super) struct Store {
    cache: ExecutableCache,
    /// The part of the key that is the same for all programs.
    environment: CacheKey,
    /// Set when a program could not be kept: the next ones could not either.
    gave_up: AtomicBool,
}

impl Store {
    pub(super) fn new(cache: ExecutableCache, client: &Client) -> Result<Store, CacheError> {
        Ok(Store {
            cache,
            environment: environment(client)?,
            gave_up: AtomicBool::new(false),
        })
    }

    /// The program of a StableHLO text, and whether it was loaded from the cache.
    pub(super) fn compile(
        &self,
        client: &Client,
        text: &str,
        options: &CompileOptions,
    ) -> Result<(LoadedExecutable, bool), PjrtError> {
        let key = CacheKey::of(&[
            self.environment.0.bytes(),
            &options.to_bytes(),
            text.as_bytes(),
        ]);
        match self.load(client, &key) {
            Ok(Some(executable)) => return Ok((executable, true)),
            Ok(None) => {}
            Err(error) => {
                tracing::warn!("{error}; the program is compiled again");
                self.cache.remove(&key);
            }
        }
        let executable = client.compile(text, options)?;
        self.keep(&key, &executable);
        Ok((executable, false))
    }

    fn load(
        &self,
        client: &Client,
        key: &CacheKey,
    ) -> Result<Option<LoadedExecutable>, CacheError> {
        let Some(bytes) = self.cache.read(key)? else {
            return Ok(None);
        };
        client
            .load(&bytes)
            .map(Some)
            .map_err(|source| CacheError::Load {
                path: self.cache.path(key),
                source,
            })
    }

    fn keep(&self, key: &CacheKey, executable: &LoadedExecutable) {
        if self.gave_up.load(Ordering::Relaxed) {
            return;
        }
        let give_up = || self.gave_up.store(true, Ordering::Relaxed);
        match executable.executable().serialize() {
            Ok(bytes) => {
                if let Err(error) = self.cache.write(key, &bytes) {
                    tracing::warn!("{error}; compiled programs are not kept");
                    give_up();
                }
            }
            Err(error) if error.code() == Some(ErrorCode::Unimplemented) => {
                tracing::debug!(
                    "this plugin does not serialize programs, so none is kept: {error}"
                );
                give_up();
            }
            Err(error) => tracing::debug!("a program is not kept: {error}"),
        }
    }
}

/// All but program and options that decides what the compiler of `client` makes: this cache's layout, the plugin's
/// build, its devices, what it reads of the environment and, where it compiles for the processor it runs on, that
/// processor.
fn environment(client: &Client) -> Result<CacheKey, CacheError> {
    let library = client.plugin().path();
    let metadata = fs::metadata(library).map_err(io_error("look at", library))?;
    let changed = metadata
        .modified()
        .map_err(io_error("look at", library))?
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    // The platform's own version does not tell two builds of one plugin apart, and reading all of a library of hundreds
    // of megabytes takes longer than loading what it compiled.
    let build = format!(
        "{VERSION} {} {} {} {} {changed:?}",
        client.platform_name(),
        client.platform_version(),
        library.display(),
        metadata.len(),
    );
    let devices: Vec<String> = client
        .devices()
        .iter()
        .map(|d| format!("{:?}", d.description()))
        .collect();
    let variables = COMPILER_VARIABLES.map(|name| format!("{name}={:?}", std::env::var_os(name)));
    let processor = match client.platform_name() {
        "cpu" => own_processor()?,
        _ => String::new(),
    };
    Ok(CacheKey::of(&[
        build.as_bytes(),
        format!("{:?}", client.process_index().ok()).as_bytes(),
        devices.join("\n").as_bytes(),
        variables.join("\n").as_bytes(),
        processor.as_bytes(),
    ]))
}

/// The processor's model and features, and how many threads the compiler may plan for.
fn own_processor() -> Result<String, CacheError> {
    let path = Path::new(CPUINFO);
    // A session has a client, which no other number makes.
    let threads = cpu_threads().unwrap_or(1);
    match processor().map_err(io_error("read", path))? {
        Some(processor) => Ok(format!("{threads}\n{processor}")),
        None => Err(CacheError::Processor {
            path: path.to_path_buf(),
        }),
    }
}

#[cfg(test)]
mod tests;
