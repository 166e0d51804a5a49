//! Programs compiled ahead of time, on disk.
//!
//! A bundle is one file: what the programs are and what they were compiled for (the [`Header`]), the compiled programs
//! as their plugin serialized them (the payload), and a SHA-256 of both. It holds no code of this project and nothing
//! that is executed by reading it. See [`frame`] for the bytes.

pub mod frame;

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::lowering::Stage;
use crate::report::Memory;
use crate::util::files::{self, Existing, parent_of};

pub use frame::FrameError;

/// Why a bundle could not be written, read or used.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    #[error("{} exists already; choose another name or remove it", path.display())]
    Exists { path: PathBuf },
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{}: {source}", path.display())]
    Damaged {
        path: PathBuf,
        #[source]
        source: FrameError,
    },
    #[error("{} cannot be used here: {}", path.display(), list(differences))]
    Differs {
        path: PathBuf,
        differences: Vec<Difference>,
    },
}

fn list(differences: &[Difference]) -> String {
    let texts: Vec<String> = differences.iter().map(ToString::to_string).collect();
    texts.join("; ")
}

/// A field in which a bundle is not what is expected.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{field} is {found}, expected {expected}")]
pub struct Difference {
    /// Its path in the header, `target.num_slices`.
    pub field: String,
    pub expected: Value,
    pub found: Value,
}

/// Which plugin compiled a program. Serialized programs are read by the same build only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PluginId {
    /// `tpu`, `cuda`, `cpu`: PJRT's platform name.
    pub platform: String,
    /// The version it was installed as.
    pub version: String,
    /// The plugin's own description of its build.
    pub build: String,
    /// SHA-256 of the library, in hexadecimal.
    pub sha256: String,
}

/// The devices a program is compiled for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Target {
    /// The accelerator as the user names it (`v5e-16`), or the kind of the devices that were there.
    pub name: String,
    pub num_slices: usize,
    /// Positions along the mesh axes, outermost first.
    pub mesh: BTreeMap<String, usize>,
    /// Device ids by partition.
    pub device_assignment: Vec<i64>,
}

/// The compiled program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProgramId {
    /// `train` or `denoise`.
    pub step: String,
    /// SHA-256 of the StableHLO text, in hexadecimal.
    pub stablehlo_sha256: String,
    /// SHA-256 of the serialized `CompileOptionsProto`, in hexadecimal.
    pub compile_options_sha256: String,
    /// The compiler's own options that were set.
    pub flags: BTreeMap<String, String>,
    pub weights_dtype: String,
    pub activations_dtype: String,
    /// Precision of float contractions.
    pub precision: String,
    /// The quantization mode; empty is off.
    pub quantization: String,
}

/// One argument or result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Slot {
    pub name: String,
    /// Element type by its StableHLO name, `bf16`.
    pub dtype: String,
    /// Dimensions of the whole tensor.
    pub dims: Vec<usize>,
    /// Mesh axes each dimension is split over.
    pub sharding: Vec<Vec<String>>,
    /// For an argument, the result that reuses its memory; for a result, the argument whose memory it reuses.
    pub alias: Option<usize>,
}

/// The kind of payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PayloadKind {
    /// The plugin's serialized executable.
    Executable,
    /// StableHLO text, to be compiled again: this plugin does not serialize the program.
    Stablehlo,
}

/// Weights that a load program prepares in one run: names in the order of its inputs, and of its outputs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    pub weights: Vec<String>,
    pub results: Vec<String>,
}

/// All that is known of one program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProgramHeader {
    pub stage: Stage,
    pub payload: PayloadKind,
    /// Its part of the bundle's payload, which holds the programs one after the other.
    pub payload_bytes: u64,
    pub program: ProgramId,
    /// An input that no caller knows is an output of an earlier program by the same name.
    pub inputs: Vec<Slot>,
    pub outputs: Vec<Slot>,
    /// The groups of a load program; empty for others.
    pub groups: Vec<Group>,
    pub memory: Memory,
}

/// All that is known of a bundle's programs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    pub plugin: PluginId,
    pub target: Target,
    /// In the order in which they run.
    pub programs: Vec<ProgramHeader>,
}

/// Compiled programs and what is known of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bundle {
    pub header: Header,
    pub payload: Vec<u8>,
}

impl Bundle {
    /// Writes a file that does not exist yet. It appears whole or not at all.
    ///
    /// # Errors
    /// [`BundleError::Exists`], and what the file system refuses.
    pub fn write(&self, path: &Path) -> Result<(), BundleError> {
        create_parent(path)?;
        let bytes = frame::encode(&self.header, &self.payload);
        files::write(path, &bytes, Existing::Refuse).map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists => exists(path),
            _ => failed("write", path)(error),
        })
    }

    /// Reads a file and verifies its lengths and its SHA-256.
    ///
    /// # Errors
    /// [`BundleError::Damaged`] says what is wrong with the file.
    pub fn read(path: &Path) -> Result<Self, BundleError> {
        let bytes = files::read(path).map_err(failed("read", path))?;
        frame::decode(&bytes).map_err(|source| BundleError::Damaged {
            path: path.to_owned(),
            source,
        })
    }

    /// Whether the bundle read from `path` is the program `expected` describes; the memory it takes is not compared.
    ///
    /// # Errors
    /// [`BundleError::Differs`] with every field that differs.
    pub fn check(&self, path: &Path, expected: &Header) -> Result<(), BundleError> {
        let differences = self.header.differences(expected);
        if differences.is_empty() {
            return Ok(());
        }
        Err(BundleError::Differs {
            path: path.to_owned(),
            differences,
        })
    }
}

impl Header {
    /// Every field in which `self` is not `expected`, except the memory.
    pub fn differences(&self, expected: &Header) -> Vec<Difference> {
        let mut differences = Vec::new();
        compare(
            "",
            &frame::value(expected),
            &frame::value(self),
            &mut differences,
        );
        let is_memory = |field: &str| field.split('.').any(|part| part == "memory");
        differences.retain(|d| !is_memory(&d.field));
        differences
    }
}

/// Fails now where [`Bundle::write`] would fail later: when the file exists, or its folder cannot be made or written.
///
/// # Errors
/// As [`Bundle::write`].
pub fn check_writable(path: &Path) -> Result<(), BundleError> {
    if path.symlink_metadata().is_ok() {
        return Err(exists(path));
    }
    files::check_can_be_written(parent_of(path)).map_err(failed("write", path))
}

fn create_parent(path: &Path) -> Result<(), BundleError> {
    let folder = parent_of(path);
    fs::create_dir_all(folder).map_err(failed("create the folder", folder))
}

fn exists(path: &Path) -> BundleError {
    BundleError::Exists {
        path: path.to_owned(),
    }
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> BundleError {
    let path = path.to_owned();
    move |source| BundleError::Io {
        action,
        path,
        source,
    }
}

fn compare(field: &str, expected: &Value, found: &Value, out: &mut Vec<Difference>) {
    let at = |key: &str| {
        if field.is_empty() {
            key.to_owned()
        } else {
            format!("{field}.{key}")
        }
    };
    match (expected, found) {
        (Value::Object(a), Value::Object(b)) => {
            for (key, expected) in a {
                compare(&at(key), expected, b.get(key).unwrap_or(&Value::Null), out);
            }
            for (key, found) in b.iter().filter(|(key, _)| !a.contains_key(*key)) {
                compare(&at(key), &Value::Null, found, out);
            }
        }
        // Lists of numbers are one value: a mesh of 1024 devices is not 1024 differences.
        (Value::Array(a), Value::Array(b))
            if a.len() == b.len() && a.iter().all(|v| v.is_object()) =>
        {
            for (i, (expected, found)) in a.iter().zip(b).enumerate() {
                compare(&at(&i.to_string()), expected, found, out);
            }
        }
        _ if expected == found => {}
        _ => out.push(Difference {
            field: field.to_owned(),
            expected: expected.clone(),
            found: found.clone(),
        }),
    }
}

#[cfg(test)]
mod tests;
