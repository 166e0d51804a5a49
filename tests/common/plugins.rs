//! Where the plugins are that tests run against: those that `maxdiff-rs plugin install` put in `MAXDIFF_PLUGIN_DIR`,
//! or in the user's cache directory. A missing one fails the test: none is skipped.

use std::path::PathBuf;

// This file is a module of the suites and of the library's own tests; each has `install` one level up.
use super::install::{self, PluginKind};

/// The library of the installed plugin of this kind.
pub fn plugin_path(kind: PluginKind) -> PathBuf {
    match install::locate(kind) {
        Ok(plugin) => plugin.library,
        Err(error) => panic!("{error}"),
    }
}
