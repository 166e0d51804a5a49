//! The folders that plugins and compiled programs are kept in.

use std::path::PathBuf;

use crate::pjrt::install;
use crate::recipe;
use crate::runtime::Usage;
use crate::util::files::free_space;

use super::Problem;

/// Free bytes below which an installation of the CPU plugin fails: the wheel, what is unpacked and the build.
const SPACE_TO_INSTALL: u64 = 1_600_000_000;

/// The folder that plugins are installed in.
pub struct PluginFolder {
    /// Its path, or why there is none.
    pub path: Result<PathBuf, String>,
    pub writable: bool,
    /// Free bytes.
    pub free: Option<u64>,
}

impl PluginFolder {
    pub(super) fn find() -> PluginFolder {
        let path = match install::plugin_dir() {
            Ok(path) => path,
            Err(error) => {
                return PluginFolder {
                    path: Err(error.to_string()),
                    writable: false,
                    free: None,
                };
            }
        };
        // Before the first installation the folder is made inside one of these.
        let there = path.ancestors().find(|p| p.exists());
        let writable = there.is_some_and(|p| {
            use rustix::fs::Access;
            p.is_dir() && rustix::fs::access(p, Access::WRITE_OK | Access::EXEC_OK).is_ok()
        });
        let free = there.and_then(free_space);
        PluginFolder {
            path: Ok(path),
            writable,
            free,
        }
    }

    /// Why plugins cannot be installed in it; this stops programs only if one is still `to_install`.
    pub(super) fn problem(&self, to_install: bool) -> Option<Problem> {
        let what = match &self.path {
            Err(error) => error.clone(),
            Ok(path) if !self.writable => format!("{} is not writable", path.display()),
            Ok(path) if self.free.is_some_and(|f| f < SPACE_TO_INSTALL) => {
                format!("{} has too little space for a plugin", path.display())
            }
            Ok(_) => return None,
        };
        Some(Problem {
            what,
            remedy: format!(
                "set {} to a folder with {:.1} GB free that you can write to",
                install::PLUGIN_DIR_VARIABLE,
                SPACE_TO_INSTALL as f64 / 1e9
            ),
            needed: to_install,
        })
    }
}

/// The folder that compiled programs are kept in where the configuration names no other.
pub struct ProgramFolder {
    pub path: PathBuf,
    /// Its contents.
    pub usage: Usage,
}

impl ProgramFolder {
    /// The folder, or why it cannot be read.
    pub(super) fn find() -> Result<ProgramFolder, String> {
        let cache = recipe::program_cache("auto")
            .ok_or_else(|| "no folder: no cache directory is known for this user".to_string())?;
        let usage = cache.usage().map_err(|error| error.to_string())?;
        Ok(ProgramFolder {
            path: cache.dir().to_path_buf(),
            usage,
        })
    }
}
