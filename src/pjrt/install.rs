//! Fetches, builds and finds PJRT plugins.
//!
//! Plugins come out of Python wheels, pinned by version and SHA-256 in one table and fetched with
//! the user's own `pip download`, so that mirrors and proxies work; no Python is needed afterwards.
//! The CPU plugin is compiled here from sources embedded in this crate against TensorFlow's wheel.
//!
//! Layout of the plugin directory: one folder per plugin (`cpu-2.21.0`, `tpu-0.0.51`,
//! `cuda13-0.11.2`, or `KIND-local` for a plugin the user already has), each with a
//! `manifest.json`. A folder appears by one rename, so it is either absent or complete.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use zip::result::ZipError;

pub(super) use build::sources_sha256;
use build::{Tools, make};
pub use check::{Trial, TryLoad, locate_checked};
use files::{
    Staging, create_dir_all, file_size, lock, remove_dir_all, sha256_of_file, write_error,
};
use recipe::{RECIPES, Recipe, recipe_for, source_of};

use crate::util::files::{open, write_synced};

mod build;
mod check;
mod files;
mod recipe;

/// The environment variable that names the plugin directory.
pub const PLUGIN_DIR_VARIABLE: &str = "MAXDIFF_PLUGIN_DIR";

const MANIFEST: &str = "manifest.json";
const LOCAL_VERSION: &str = "local";

/// The plugins this project knows how to install.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PluginKind {
    /// XLA's CPU client, built from TensorFlow's wheel.
    Cpu,
    /// `libtpu`: runs on TPUs, and compiles for them on any x86-64 Linux host.
    Tpu,
    /// XLA's CUDA 13 plugin, with `libdevice` and `ptxas`.
    #[serde(rename = "cuda13")]
    Cuda,
}

impl PluginKind {
    /// Every kind, in the order in which lists show them.
    pub const ALL: [Self; 3] = [Self::Cpu, Self::Tpu, Self::Cuda];

    /// The name used on the command line and in folder names.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Tpu => "tpu",
            Self::Cuda => "cuda13",
        }
    }

    /// The version that [`install`] fetches.
    pub const fn pinned_version(self) -> &'static str {
        match self {
            Self::Cpu => "2.21.0",
            Self::Tpu => "0.0.51",
            Self::Cuda => "0.11.2",
        }
    }
}

impl fmt::Display for PluginKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for PluginKind {
    type Err = InstallError;

    fn from_str(name: &str) -> Result<Self, InstallError> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| InstallError::UnknownKind {
                name: name.to_owned(),
            })
    }
}

/// An installed plugin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installed {
    pub kind: PluginKind,
    /// The pinned version, or `local` for a plugin of the user's own.
    pub version: String,
    /// The shared library that exports `GetPjrtApi`.
    pub library: PathBuf,
    /// The wheels it came from, or the path that was given.
    pub source: String,
    /// SHA-256 of the library, in hexadecimal.
    pub sha256: String,
    /// For CUDA: the folder that holds `bin/ptxas` and `nvvm/libdevice`, for XLA's
    /// `xla_gpu_cuda_data_dir`.
    pub cuda_data_dir: Option<PathBuf>,
    /// Whether the library was built from other sources than this program carries; [`install`]
    /// rebuilds it.
    pub stale: bool,
}

impl Installed {
    /// The command that installs it anew: from its path where it was given by one.
    pub fn install_command(&self) -> String {
        let pinned = format!("maxdiff-rs plugin install {}", self.kind);
        match self.version.as_str() {
            LOCAL_VERSION => format!("{pinned} --path {}", self.source),
            _ => pinned,
        }
    }

    /// A message that the plugin is stale, with what to do; `None` if it is not.
    pub fn stale_note(&self) -> Option<String> {
        self.stale.then(|| {
            format!(
                "built from other sources than this program's; run `{}`",
                self.install_command()
            )
        })
    }
}

/// An error while installing or finding a plugin.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    #[error("unknown plugin '{name}', expected one of cpu, tpu, cuda13")]
    UnknownKind { name: String },
    #[error(
        "no cache directory is known for this user; set {PLUGIN_DIR_VARIABLE} to a folder for plugins"
    )]
    NoCacheDir,
    #[error(
        "no {kind} plugin is pinned for {os} on {arch}; give one with `maxdiff-rs plugin install {kind} --path FILE`"
    )]
    UnsupportedHost {
        kind: PluginKind,
        os: &'static str,
        arch: &'static str,
    },
    #[error("the {kind} plugin is not installed in {}; run `maxdiff-rs plugin install {kind}`", dir.display())]
    NotInstalled { kind: PluginKind, dir: PathBuf },
    #[error("the file {} of the {kind} plugin is missing or has changed ({reason}); run `{remedy}`", path.display())]
    LibraryChanged {
        kind: PluginKind,
        /// The library, or another file that was unpacked beside it.
        path: PathBuf,
        reason: String,
        remedy: String,
    },
    #[error("the {kind} plugin {} ends the process that loads it ({reason}); run `{remedy}`", path.display())]
    EndsProcess {
        kind: PluginKind,
        path: PathBuf,
        reason: String,
        remedy: String,
    },
    #[error(
        "{tool} is needed {purpose} and cannot be run ({reason}); install it, for example with `{remedy}`"
    )]
    MissingTool {
        tool: &'static str,
        purpose: &'static str,
        remedy: &'static str,
        reason: String,
    },
    #[error("pip could not download {wheel}:\n{output}")]
    Download { wheel: String, output: String },
    #[error(
        "{file} has SHA-256 {found}, expected {expected}; the download is damaged or not the pinned file"
    )]
    Checksum {
        file: String,
        expected: String,
        found: String,
    },
    #[error("{file} cannot be read as a wheel: {source}")]
    Archive {
        file: String,
        #[source]
        source: ZipError,
    },
    #[error("{file} holds the unsafe path '{entry}'; nothing was unpacked")]
    UnsafePath { file: String, entry: String },
    #[error("{file} does not hold {member}")]
    MissingMember { file: String, member: String },
    #[error("the CPU plugin did not compile:\n{output}")]
    Compile { output: String },
    #[error("{} is not a PJRT plugin: {reason}", path.display())]
    NotAPlugin { path: PathBuf, reason: &'static str },
    #[error("{} cannot be understood: {reason}; delete its folder and run `maxdiff-rs plugin install` again", path.display())]
    Manifest { path: PathBuf, reason: String },
    #[error("no space left while writing {}; installing this plugin takes about {} MB there", path.display(), needed / 1_000_000)]
    DiskFull { path: PathBuf, needed: u64 },
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

type Result<T, E = InstallError> = std::result::Result<T, E>;

/// The file beside an installed plugin.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    kind: PluginKind,
    version: String,
    /// Relative to the manifest, or absolute for a plugin of the user's own.
    library: PathBuf,
    sha256: String,
    /// Size of the library in bytes: a cheap check that it is still the one that was installed.
    size: u64,
    source: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cuda_data_dir: Option<PathBuf>,
    /// SHA-256 of the sources of the library.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sources_sha256: Option<String>,
    /// Sizes in bytes of all files that came out of the wheels, relative to the manifest. Manifests of earlier
    /// versions have none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    members: BTreeMap<PathBuf, u64>,
    /// SHA-256 of these files.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    members_sha256: BTreeMap<PathBuf, String>,
}

impl Manifest {
    /// The first file of the plugin in `folder` that is gone or has another size than it was installed with, and
    /// what is wrong with it. Sizes are cheap to compare, and find what a full disk or a power cut left behind.
    fn changed_file(&self, folder: &Path) -> Option<(PathBuf, String)> {
        let members = self.members.iter().map(|(path, size)| (path, *size));
        std::iter::once((&self.library, self.size))
            .chain(members)
            .find_map(|(path, size)| {
                // `join` keeps an absolute path as it is.
                let path = folder.join(path);
                let reason = match fs::metadata(&path) {
                    Err(error) => error.to_string(),
                    Ok(found) if found.len() != size => {
                        format!("{} bytes, installed with {size}", found.len())
                    }
                    Ok(_) => return None,
                };
                Some((path, reason))
            })
    }
}

/// The directory that holds the plugins: `MAXDIFF_PLUGIN_DIR`, or `maxdiff-rs/plugins` in the
/// user's cache directory.
///
/// # Errors
/// [`InstallError::NoCacheDir`] when the variable is unset and the user has no cache directory.
pub fn plugin_dir() -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os(PLUGIN_DIR_VARIABLE).filter(|dir| !dir.is_empty()) {
        return std::path::absolute(&dir).map_err(|source| InstallError::Io {
            action: "resolve",
            path: dir.into(),
            source,
        });
    }
    dirs::cache_dir()
        .map(|dir| dir.join("maxdiff-rs").join("plugins"))
        .ok_or(InstallError::NoCacheDir)
}

/// Installs the pinned plugin of `kind`, or makes the plugin at `source` the one in use.
///
/// Does nothing, and says so, when the same plugin is already there and intact. Two installations
/// at once wait for each other. `progress` gets one line per stage.
///
/// # Errors
/// Missing tools (`python3` with pip; `g++` for the CPU), failed or wrong downloads, compiler
/// errors, and what the file system refuses; an existing installation stays as it was.
pub fn install(
    kind: PluginKind,
    source: Option<&Path>,
    progress: &mut dyn FnMut(&str),
) -> Result<Installed> {
    let root = plugin_dir()?;
    match source {
        Some(path) => install_local(&root, kind, path, progress),
        None => {
            let (os, arch) = (std::env::consts::OS, std::env::consts::ARCH);
            let recipe = recipe_for(RECIPES, kind, os, arch, has_gpu())?;
            install_pinned(&root, recipe, &Tools::default(), progress)
        }
    }
}

/// Whether this machine has an NVIDIA GPU, by its device file.
pub fn has_gpu() -> bool {
    Path::new("/dev/nvidiactl").exists()
}

/// The plugins in use, at most one per kind.
///
/// # Errors
/// An unreadable directory or manifest. A library that has gone missing is no error here.
pub fn list() -> Result<Vec<Installed>> {
    list_in(&plugin_dir()?)
}

/// Finds the plugin of `kind` in use.
///
/// # Errors
/// [`InstallError::NotInstalled`] names the command that installs it;
/// [`InstallError::LibraryChanged`] when one of its files is gone or is not the one installed.
pub fn locate(kind: PluginKind) -> Result<Installed> {
    locate_in(&plugin_dir()?, kind)
}

fn list_in(root: &Path) -> Result<Vec<Installed>> {
    let mut plugins = Vec::new();
    for kind in PluginKind::ALL {
        if let Some((folder, manifest)) = read_active(root, kind)? {
            plugins.push(installed(&folder, &manifest));
        }
    }
    Ok(plugins)
}

fn locate_in(root: &Path, kind: PluginKind) -> Result<Installed> {
    located_in(root, kind).map(|(_, _, plugin)| plugin)
}

/// The plugin of `kind` in use with its folder and its manifest.
fn located_in(root: &Path, kind: PluginKind) -> Result<(PathBuf, Manifest, Installed)> {
    let Some((folder, manifest)) = read_active(root, kind)? else {
        return Err(InstallError::NotInstalled {
            kind,
            dir: root.to_owned(),
        });
    };
    let plugin = installed(&folder, &manifest);
    match manifest.changed_file(&folder) {
        None => Ok((folder, manifest, plugin)),
        Some((path, reason)) => Err(InstallError::LibraryChanged {
            kind,
            path,
            reason,
            remedy: plugin.install_command(),
        }),
    }
}

/// A plugin of the user's own goes before the pinned one.
fn read_active(root: &Path, kind: PluginKind) -> Result<Option<(PathBuf, Manifest)>> {
    for version in [LOCAL_VERSION, kind.pinned_version()] {
        let folder = folder_of(root, kind, version);
        if let Some(manifest) = read_manifest(&folder, kind)? {
            return Ok(Some((folder, manifest)));
        }
    }
    Ok(None)
}

fn folder_of(root: &Path, kind: PluginKind, version: &str) -> PathBuf {
    root.join(format!("{kind}-{version}"))
}

fn read_manifest(folder: &Path, kind: PluginKind) -> Result<Option<Manifest>> {
    let path = folder.join(MANIFEST);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => {
            return Err(InstallError::Io {
                action: "read",
                path,
                source,
            });
        }
    };
    let manifest: Manifest =
        serde_json::from_str(&text).map_err(|error| InstallError::Manifest {
            path: path.clone(),
            reason: error.to_string(),
        })?;
    if manifest.kind != kind {
        return Err(InstallError::Manifest {
            path,
            reason: format!("it describes a {} plugin", manifest.kind),
        });
    }
    Ok(Some(manifest))
}

fn installed(folder: &Path, manifest: &Manifest) -> Installed {
    Installed {
        kind: manifest.kind,
        version: manifest.version.clone(),
        library: folder.join(&manifest.library),
        source: manifest.source.clone(),
        sha256: manifest.sha256.clone(),
        cuda_data_dir: manifest.cuda_data_dir.as_ref().map(|dir| folder.join(dir)),
        stale: manifest
            .sources_sha256
            .as_ref()
            .is_some_and(|sum| *sum != sources_sha256()),
    }
}

fn install_local(
    root: &Path,
    kind: PluginKind,
    path: &Path,
    progress: &mut dyn FnMut(&str),
) -> Result<Installed> {
    let library = fs::canonicalize(path).map_err(|source| InstallError::Io {
        action: "read",
        path: path.to_owned(),
        source,
    })?;
    check_is_plugin(&library)?;
    create_dir_all(root, 0)?;
    let _lock = lock(root, kind, progress)?;
    let folder = folder_of(root, kind, LOCAL_VERSION);
    let manifest = Manifest {
        kind,
        version: LOCAL_VERSION.to_owned(),
        sha256: sha256_of_file(&library)?,
        size: file_size(&library)?,
        source: library.display().to_string(),
        library,
        cuda_data_dir: None,
        sources_sha256: None,
        members: BTreeMap::new(),
        members_sha256: BTreeMap::new(),
    };
    if let Ok(Some(old)) = read_manifest(&folder, kind)
        && old.library == manifest.library
        && old.sha256 == manifest.sha256
    {
        progress(&format!(
            "the {kind} plugin {} is already in use",
            manifest.source
        ));
        return Ok(installed(&folder, &old));
    }
    let staging = Staging::create(root, kind)?;
    write_manifest(&staging.path, &manifest)?;
    staging.publish(&folder)?;
    progress(&format!(
        "the {kind} plugin in use is now {}",
        manifest.source
    ));
    Ok(installed(&folder, &manifest))
}

fn install_pinned(
    root: &Path,
    recipe: &Recipe,
    tools: &Tools,
    progress: &mut dyn FnMut(&str),
) -> Result<Installed> {
    let kind = recipe.kind;
    create_dir_all(root, recipe.disk)?;
    let _lock = lock(root, kind, progress)?;
    let folder = folder_of(root, kind, recipe.version);
    let plugin = match intact(&folder, recipe)? {
        Some(manifest) => {
            progress(&format!(
                "the {kind} plugin {} is already installed in {}",
                recipe.version,
                folder.display()
            ));
            installed(&folder, &manifest)
        }
        None => {
            let manifest = make(root, &folder, recipe, tools, progress)?;
            progress(&format!(
                "installed the {kind} plugin {} in {}",
                recipe.version,
                folder.display()
            ));
            installed(&folder, &manifest)
        }
    };
    // Asking for the pinned plugin ends the use of one given by path; only our note of it goes.
    let local = folder_of(root, kind, LOCAL_VERSION);
    if local.exists() {
        progress("the plugin given by --path is no longer used");
        remove_dir_all(&local)?;
    }
    Ok(plugin)
}

/// The manifest of an installation that is complete, undamaged and built from today's sources.
fn intact(folder: &Path, recipe: &Recipe) -> Result<Option<Manifest>> {
    // A manifest that cannot be read is replaced by this installation.
    let Ok(Some(manifest)) = read_manifest(folder, recipe.kind) else {
        return Ok(None);
    };
    let expected_sources = recipe.compiled.then(sources_sha256);
    let library = folder.join(&manifest.library);
    let members = recipe.wheels.iter().flat_map(|wheel| wheel.members);
    let same = manifest.version == recipe.version
        && manifest.source == source_of(recipe)
        && manifest.sources_sha256 == expected_sources
        && members
            .into_iter()
            .all(|member| folder.join(member.to).is_file())
        && library.is_file()
        && manifest.changed_file(folder).is_none()
        && sha256_of_file(&library)? == manifest.sha256;
    Ok(same.then_some(manifest))
}

/// A shared library that names the one function every PJRT plugin exports. It is not loaded: that
/// would run its code.
fn check_is_plugin(path: &Path) -> Result<()> {
    let not = |reason| InstallError::NotAPlugin {
        path: path.to_owned(),
        reason,
    };
    let read = || -> io::Result<Option<&'static str>> {
        let mut file = open(path)?;
        let mut magic = [0; 4];
        if file.read_exact(&mut magic).is_err() || magic != *b"\x7fELF" {
            return Ok(Some("it is not an ELF shared library"));
        }
        file.seek(SeekFrom::Start(0))?;
        Ok((!contains(BufReader::new(file), b"GetPjrtApi\0")?)
            .then_some("it does not export GetPjrtApi"))
    };
    match read() {
        Ok(None) => Ok(()),
        Ok(Some(reason)) => Err(not(reason)),
        Err(source) => Err(InstallError::Io {
            action: "read",
            path: path.to_owned(),
            source,
        }),
    }
}

/// Whether `needle` occurs in what `reader` yields, read in blocks that overlap by its length.
fn contains(mut reader: impl Read, needle: &[u8]) -> io::Result<bool> {
    let mut block = vec![0; 1 << 20];
    let mut kept = 0;
    loop {
        let read = reader.read(&mut block[kept..])?;
        if read == 0 {
            return Ok(false);
        }
        let filled = kept + read;
        if block[..filled]
            .windows(needle.len())
            .any(|window| window == needle)
        {
            return Ok(true);
        }
        kept = filled.min(needle.len() - 1);
        block.copy_within(filled - kept..filled, 0);
    }
}

fn write_manifest(folder: &Path, manifest: &Manifest) -> Result<()> {
    let path = folder.join(MANIFEST);
    let text = serde_json::to_string_pretty(manifest).map_err(|error| InstallError::Manifest {
        path: path.clone(),
        reason: error.to_string(),
    })?;
    write_synced(&path, |out| out.write_all(text.as_bytes()))
        .map_err(|source| write_error(&path, 0, source))
}

#[cfg(test)]
mod tests;
