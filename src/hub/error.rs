//! Errors of the hub, each with what to do about it.

use std::io;
use std::path::PathBuf;

use super::name::{InvalidRevision, RepoId, Revision};
use crate::util::text::listed;
use crate::weights::WeightsError;
use crate::weights::source::SourceError;

/// How many names an error shows.
const SHOWN: usize = 12;

/// Why the files of a repository are not available.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    #[error(transparent)]
    Revision(#[from] InvalidRevision),
    #[error("{name}={value}: expected {expected}")]
    Variable {
        /// The environment variable or the file with the token.
        name: String,
        value: String,
        expected: &'static str,
    },
    #[error(
        "there is no home directory to find the hub's cache in; set HF_HOME or HF_HUB_CACHE to a folder"
    )]
    NoHome,
    #[error(
        "{repo} at {revision} is not complete in the cache {} ({lacking}), and {variable} forbids the network; unset it, or \
         download it where there is a network and copy that folder",
        dir.display()
    )]
    Offline {
        repo: RepoId,
        revision: Revision,
        variable: &'static str,
        dir: PathBuf,
        lacking: String,
    },
    #[error("{repo} at {revision}: {source}")]
    Select {
        repo: RepoId,
        revision: Revision,
        #[source]
        source: Box<SelectError>,
    },
    #[error(
        "{repo}: neither a file or folder here nor a repository that {endpoint} shows {}; {}",
        if *token { "to the owner of the token" } else { "to the public" },
        instead(repo, *token)
    )]
    NoRepo {
        repo: RepoId,
        endpoint: String,
        /// Whether a token was sent.
        token: bool,
    },
    #[error(
        "{repo} has no revision '{revision}'; set revision to one of its branches, tags or commits (usually main)"
    )]
    NoRevision { repo: RepoId, revision: Revision },
    #[error("{repo} at {commit} has no file {file}, which its listing names; try again")]
    NoFile {
        repo: RepoId,
        commit: String,
        file: String,
    },
    #[error(
        "{repo} is gated: accept its terms at {endpoint}/{}, {}{}",
        repo.page(),
        if *token { "with the token's account" } else { "then set HF_TOKEN to a token of that account" },
        said(message)
    )]
    Gated {
        repo: RepoId,
        endpoint: String,
        token: bool,
        message: String,
    },
    #[error(
        "{endpoint} refuses the token (HF_TOKEN, or the file HF_TOKEN_PATH or $HF_HOME/token){}; make a new \
         one at {endpoint}/settings/tokens, or unset it for public repositories",
        said(message)
    )]
    BadToken { endpoint: String, message: String },
    #[error(
        "{endpoint} forbids {}to read {repo}{}; it needs a token that may read this repository (HF_TOKEN)",
        if *token { "the owner of the token " } else { "" },
        said(message)
    )]
    Forbidden {
        repo: RepoId,
        endpoint: String,
        token: bool,
        message: String,
    },
    #[error("{url} answered with status {status}{}", said(message))]
    Status {
        url: String,
        status: u16,
        message: String,
    },
    #[error(
        "{url}: {reason} ({attempts} attempts); try again, which resumes the download, or set HF_ENDPOINT to a mirror \
         or HTTPS_PROXY to a proxy"
    )]
    Network {
        url: String,
        reason: String,
        attempts: u32,
    },
    #[error(
        "{url} does not answer like the hub: {reason}; check HF_ENDPOINT, and SSL_CERT_FILE if a proxy decrypts traffic"
    )]
    Answer { url: String, reason: String },
    #[error("{url} redirects to {location}, which is not followed: {reason}")]
    Redirect {
        url: String,
        location: String,
        reason: &'static str,
    },
    #[error(
        "{repo} at {commit} lists the file name {name:?}, which would lead out of the cache; nothing was downloaded"
    )]
    UnsafePath {
        repo: RepoId,
        commit: String,
        name: String,
    },
    #[error(
        "{repo}: {file} has SHA-256 {found}, expected {expected}; it was deleted: try again, and if that does not help, \
         the server or a proxy changes files"
    )]
    Hash {
        repo: RepoId,
        file: String,
        expected: String,
        found: String,
    },
    #[error("{repo}: {file} has {found} bytes, expected {expected}; it was deleted: try again")]
    Size {
        repo: RepoId,
        file: String,
        expected: u64,
        found: u64,
    },
    #[error(
        "no space for {repo} in {}: {needed} more bytes are needed{}; free some or set HF_HUB_CACHE to a folder on another \
         disk (files already downloaded are kept)",
        path.display(), free.map_or_else(String::new, |free| format!(", {free} are free"))
    )]
    DiskFull {
        repo: RepoId,
        path: PathBuf,
        needed: u64,
        /// The file system's free bytes; `None` when a write failed.
        free: Option<u64>,
    },
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl HubError {
    /// Whether another command line or environment would fix it, rather than another file or server.
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            HubError::Revision(_)
                | HubError::Variable { .. }
                | HubError::NoHome
                | HubError::NoRepo { .. }
                | HubError::NoRevision { .. }
                | HubError::Select { .. }
        )
    }
}

/// Why no files could be chosen.
#[derive(Debug, thiserror::Error)]
pub enum SelectError {
    #[error("missing: {}", listed(names, SHOWN))]
    Missing { names: Vec<String> },
    #[error(
        "it has only PyTorch pickles ({}), which can run code when they are read; if you trust it, convert it \
         in Python: {class}.from_pretrained(\"{repo}\").save_pretrained(\"DIR\", \
         safe_serialization=True), and name DIR",
        listed(names, SHOWN)
    )]
    Pickles {
        repo: RepoId,
        names: Vec<String>,
        /// What reads and writes it.
        class: &'static str,
    },
    #[error(
        "several variants of one part and no default: {}; download one with `hf download` and name its folder",
        listed(names, SHOWN)
    )]
    Variants { names: Vec<String> },
    #[error(
        "it has several files and none is the default: {}; {advice}",
        listed(names, SHOWN)
    )]
    Several {
        names: Vec<String>,
        advice: &'static str,
    },
    #[error("it has {}, and not {expected}", listed(names, SHOWN))]
    Other {
        names: Vec<String>,
        expected: &'static str,
    },
    #[error(
        "no file of the split {split}, which train_split names, among {}",
        listed(names, SHOWN)
    )]
    Split { names: Vec<String>, split: String },
    #[error("{file}: not a JSON object: {reason}")]
    Json { file: String, reason: String },
    #[error(transparent)]
    Index(#[from] WeightsError),
    /// It is of another kind or family than expected.
    #[error(transparent)]
    Model(#[from] SourceError),
}

/// Why no files were chosen: what is in the repository, or that this could not be found out.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    #[error(transparent)]
    Select(#[from] SelectError),
    #[error(transparent)]
    Hub(#[from] HubError),
}

/// What to name instead of a repository that is not there.
fn instead(repo: &RepoId, token: bool) -> String {
    match (repo.moved_to(), token) {
        (Some(copy), _) => format!("it was removed; {copy} is a copy of it: name that"),
        (None, true) => "check the name".to_owned(),
        (None, false) => "check the name; for a private one set HF_TOKEN".to_owned(),
    }
}

/// A server's message, after a colon.
fn said(message: &str) -> String {
    match message.is_empty() {
        true => String::new(),
        false => format!(" (it says: {message})"),
    }
}
