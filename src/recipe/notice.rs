//! Messages for the user that are not errors.

use std::path::Path;

use crate::hub;

/// A message for the user that is not an error.
#[derive(Clone, Copy, Debug)]
pub enum Notice<'a> {
    /// Something has no effect, or another one than was asked for.
    Warning(&'a str),
    /// Something that is as it should be, but not as one might expect.
    Note(&'a str),
    /// How far the work is.
    Progress(&'a str),
    /// Files of a repository are on their way to the cache.
    Download {
        repo: &'a hub::RepoId,
        cache: &'a Path,
        progress: hub::Progress<'a>,
    },
}

/// Takes notices as they come; `&mut |_| {}` drops them.
pub type Notify<'a> = dyn FnMut(Notice<'_>) + 'a;
