//! Checkpoint files: safetensors, alone or in a diffusers directory, and GGUF.
//!
//! [`Checkpoint::open`] reads and checks headers only; tensors are read when asked for, with
//! positioned reads in parallel. [`Checkpoint::view`] shows them under other names.
//! [`match_parameters`] compares a checkpoint with what a model declares. [`save`] replaces a file
//! atomically. [`source`] finds the parts of a Stable Diffusion
//! model, whichever layout it comes in; [`lora`] adds low-rank updates to its weights.
//!
//! Files are not trusted: every length is checked before memory is asked for, and formats that run
//! code when they are loaded (pickle) are refused.

mod cast;
mod gguf;
mod header;
mod location;
pub mod lora;
mod made;
mod matching;
mod open;
pub mod quantized;
mod read;
pub(crate) mod save;
mod shared_bytes;
pub mod source;
mod stored;
mod view;

use std::path::PathBuf;

pub use cast::cast;
pub use header::TensorSpec;
pub use matching::{MismatchError, Misshapen, MissingTensor, match_parameters};
pub use open::Checkpoint;
pub(crate) use open::{Choice, choose, is_pickle, parse_index};
pub use save::{FetchError, TensorView, save, save_new};

/// Why a checkpoint could not be opened, read or written.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    #[error("{path}: {source}")]
    Io {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "{path}: truncated: the header declares {expected} bytes, the file has {found}; copy or download it again"
    )]
    Truncated {
        path: PathBuf,
        expected: u64,
        found: u64,
    },
    #[error("{path}: the header declares {expected} bytes, the file has {found}")]
    TrailingBytes {
        path: PathBuf,
        expected: u64,
        found: u64,
    },
    #[error("{path}: not a safetensors file: {reason}")]
    Header { path: PathBuf, reason: String },
    #[error("{path}: not a GGUF file that is read here: {reason}")]
    Gguf { path: PathBuf, reason: String },
    #[error("{path}: tensor {tensor}: {reason}")]
    Tensor {
        path: PathBuf,
        tensor: String,
        reason: String,
    },
    #[error(
        "{path}: a PyTorch pickle, which can run code when it is loaded; if you trust it, convert it \
         with diffusers' save_pretrained(..., safe_serialization=True) or \
         safetensors.torch.save_file(torch.load(path, weights_only=True), \"model.safetensors\") \
         (the tensors of a .ckpt are under its key state_dict)"
    )]
    Pickle { path: PathBuf },
    #[error("{path}: a git-lfs pointer, not the file itself; run `git lfs pull` in its repository")]
    LfsPointer { path: PathBuf },
    #[error(
        "{path}: no weights found; looked for {}{}", looked_for.join(", "), found_instead(found)
    )]
    NoWeights {
        path: PathBuf,
        looked_for: Vec<String>,
        found: Vec<String>,
    },
    #[error("{path}: several variants and no default: {}; pass one of the files", found.join(", "))]
    AmbiguousVariant { path: PathBuf, found: Vec<String> },
    #[error("{path}: a pipeline folder; pass one of its parts: {}", parts.join(", "))]
    Pipeline { path: PathBuf, parts: Vec<String> },
    #[error("{path}: not a safetensors index: {reason}")]
    Index { path: PathBuf, reason: String },
    #[error("{index}: shards that are not in the folder: {}", missing.join(", "))]
    MissingShards {
        index: PathBuf,
        missing: Vec<String>,
    },
    #[error("{path}: no tensor {name}{}", hint(nearest))]
    NoSuchTensor {
        path: PathBuf,
        name: String,
        nearest: Option<String>,
    },
    #[error("tensor {name}: {source}")]
    Cast {
        name: String,
        source: crate::host_tensor::HostTensorError,
    },
    #[error("{path}: no space left on the device: {needed} bytes needed{}", available(*free))]
    NoSpace {
        path: PathBuf,
        needed: u64,
        free: Option<u64>,
    },
    #[error(transparent)]
    Quantized(#[from] quantized::QuantizedError),
    #[error("{path}: tensor {tensor}: {source}")]
    Fetch {
        path: PathBuf,
        tensor: String,
        source: FetchError,
    },
}

fn hint(nearest: &Option<String>) -> String {
    nearest
        .as_ref()
        .map_or_else(String::new, |n| format!("; the nearest name is {n}"))
}

fn available(free: Option<u64>) -> String {
    free.map_or_else(String::new, |n| format!(", {n} bytes free"))
}

fn found_instead(found: &[String]) -> String {
    if found.is_empty() {
        return String::new();
    }
    format!("; the folder has {}", found.join(", "))
}
