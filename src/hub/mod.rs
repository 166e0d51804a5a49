//! Models and datasets by their name on the Hugging Face hub, from the cache on disk or downloaded into it.
//!
//! The cache is the one of Python's `huggingface_hub`, file for file, so both share downloads. Not the crate `hf-hub`
//! (1.0), because it neither resumes a file nor checks its hash, and brings an asynchronous runtime with some three
//! hundred packages.
//!
//! No answer of a server is trusted: names of files and of cache entries are checked before they become paths, weights
//! are compared with the SHA-256 that the hub names for them, and only safetensors are downloaded, never pickles.

mod address;
mod cache;
mod client;
mod download;
mod error;
mod name;
mod options;
mod select;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

pub use error::{HubError, SelectError};
pub use name::{InvalidRevision, RepoId, Revision};
pub use options::{HubOptions, Token};
pub use select::Wanted;

use cache::RepoCache;
use client::Client;
use download::Download;
use error::Fault;
use select::{Listing, Plan};

type Result<T, E = HubError> = std::result::Result<T, E>;

/// Where the files of a repository are on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// The folder or file to open, inside `snapshots/<commit>` of the cache.
    pub path: PathBuf,
    /// The commit, 40 hexadecimal digits.
    pub commit: String,
    /// The files that are needed, by their paths in the repository.
    pub files: Vec<String>,
    /// Bytes that came over the network; 0 when the cache had everything.
    pub downloaded: u64,
}

/// An event during downloads.
#[derive(Clone, Copy, Debug)]
pub enum Progress<'a> {
    /// The first of all, once it is known what is to come; `bytes` of `files` are missing.
    Start {
        commit: &'a str,
        files: usize,
        bytes: u64,
    },
    /// A file is next, of that many bytes.
    File { name: &'a str, bytes: u64 },
    /// So many of the missing bytes are here; goes back where a file has to be started again.
    Bytes { done: u64 },
    /// Something failed that may work the next time, which is after `wait`.
    Retry { reason: &'a str, wait: Duration },
    /// The last of all.
    Done,
}

/// Finds the files of `wanted` in `repo`, in the cache if it has them all and else by downloading those that it lacks.
///
/// A branch or tag that the cache knows means the commit that it was when it was fetched; the network is asked for
/// nothing then, but which files a dataset has: they do not tell of each other. What was downloaded before an error stays in the cache and is not downloaded again, of a file of
/// weights also the part that came.
///
/// # Errors
/// [`HubError`], with what to do about it.
pub fn fetch(
    repo: &RepoId,
    revision: &Revision,
    wanted: &Wanted<'_>,
    options: &HubOptions,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Fetched> {
    let cache = RepoCache::new(&options.cache, repo);
    let lacking = match cached(repo, revision, wanted, options, &cache)? {
        Cached::Whole(fetched) => return Ok(fetched),
        Cached::Lacks(what) => what,
    };
    if let Some(variable) = options.offline {
        return Err(HubError::Offline {
            repo: repo.clone(),
            revision: revision.clone(),
            variable,
            dir: cache.dir().to_owned(),
            lacking,
        });
    }
    tracing::debug!("{repo} at {revision}: not all in the cache: {lacking}");

    let client = Client::new(options)?;
    let known = cache.commit(revision)?.filter(|_| repo.is_dataset());
    let asked = known.map_or_else(|| revision.clone(), Revision::of_commit);
    let found = client.listing(repo, &asked, progress)?;
    let commit = found.commit;
    let mut download = Download::new(&client, repo, &commit, &cache);
    let absent = |name: &str| !found.names.contains(name);
    let listing = Listing {
        repo,
        names: &found.names,
        absent: &absent,
        guess: false,
    };
    let plan = select::plan(wanted, &listing, &mut |name| download.read(name, progress)).map_err(
        |error| match error {
            Fault::Select(source) => HubError::Select {
                repo: repo.clone(),
                revision: revision.clone(),
                source: Box::new(source),
            },
            Fault::Hub(error) => error,
        },
    )?;
    download.all(&plan.files, progress)?;
    for name in &plan.absent {
        cache.note_absent(&commit, name)?;
    }
    // Last, so that a name never means an incomplete snapshot.
    cache.write_ref(revision, &commit)?;
    Ok(Fetched {
        path: opened(cache.snapshot(&commit), &plan),
        downloaded: download.received(),
        files: plan.files,
        commit,
    })
}

/// The path to open in a snapshot.
fn opened(snapshot: PathBuf, plan: &Plan) -> PathBuf {
    match plan.open.is_empty() {
        // Joined, it would leave a slash at the end.
        true => snapshot,
        false => snapshot.join(&plan.open),
    }
}

enum Cached {
    Whole(Fetched),
    /// A description of what the cache lacks.
    Lacks(String),
}

/// The cache's copy of `wanted`, without the network.
fn cached(
    repo: &RepoId,
    revision: &Revision,
    wanted: &Wanted<'_>,
    options: &HubOptions,
    cache: &RepoCache,
) -> Result<Cached> {
    let Some(commit) = cache.commit(revision)? else {
        let known = cache.revisions();
        return Ok(Cached::Lacks(match known.is_empty() {
            true => "none of it is there".to_owned(),
            false => format!(
                "the revision {revision} is not there; it has {}",
                known.join(", ")
            ),
        }));
    };
    if repo.is_dataset() && options.offline.is_none() {
        return Ok(Cached::Lacks("it may lack some files".to_owned()));
    }
    let names: BTreeSet<String> = cache.files(&commit)?;
    // That a file is not in the cache does not tell that it is not on the hub, unless that was noted.
    let absent = |name: &str| !names.contains(name) && cache.is_noted_absent(&commit, name);
    let listing = Listing {
        repo,
        names: &names,
        absent: &absent,
        guess: options.offline.is_some(),
    };
    let snapshot = cache.snapshot(&commit);
    let read = &mut |name: &str| cache::read(&snapshot.join(name));
    match select::plan(wanted, &listing, read) {
        Ok(plan) => Ok(Cached::Whole(Fetched {
            path: opened(snapshot, &plan),
            files: plan.files,
            commit,
            downloaded: 0,
        })),
        Err(Fault::Hub(error)) => Err(error),
        // No file that is still missing would make it another model.
        Err(Fault::Select(source @ SelectError::Model(_))) => Err(HubError::Select {
            repo: repo.clone(),
            revision: revision.clone(),
            source: Box::new(source),
        }),
        Err(Fault::Select(lacking)) => Ok(Cached::Lacks(lacking.to_string())),
    }
}

#[cfg(test)]
mod tests;
