//! Loading a plugin's shared library.

use std::path::Path;

use super::api::{Api, OLDEST_MINOR};
use super::types::*;
use super::values::named_values;
use crate::pjrt::error::{ApiVersion, PjrtError};
use crate::pjrt::values::NamedValue;
use std::collections::BTreeMap;

/// Loads the library at `path` for the rest of the process, and initializes it.
///
/// Call it once for each file: a plugin expects to be initialized once.
pub fn load(path: &Path) -> Result<Api, PjrtError> {
    let refused = |reason: String| PjrtError::Load {
        path: path.to_path_buf(),
        reason,
    };
    // SAFETY: loading a library runs its initializers. The user names the file, as they name any
    // program they run; nothing else can be promised of it.
    let library =
        unsafe { libloading::Library::new(path) }.map_err(|error| refused(source_chain(&error)))?;
    // Never unloaded: runtime threads of the plugin outlive every object made with it.
    let library: &'static libloading::Library = Box::leak(Box::new(library));
    // SAFETY: a PJRT plugin exports this function with this type.
    let get_api =
        unsafe { library.get::<unsafe extern "C" fn() -> *const PJRT_Api_Head>(b"GetPjrtApi\0") }
            .map_err(|_| PjrtError::MissingSymbol {
            path: path.to_path_buf(),
            symbol: "GetPjrtApi",
        })?;
    // SAFETY: *table*: the function returns the plugin's table, constant and never freed.
    let api = unsafe { Api::new(get_api()) }
        .ok_or_else(|| refused("GetPjrtApi returned no function table".to_string()))?;
    accept(api, path)?;
    // SAFETY: takes nothing but the head.
    unsafe { api.call(&mut PJRT_Plugin_Initialize_Args::new())? };
    Ok(api)
}

/// Refuses a plugin whose function table is in another order than today's.
fn accept(api: Api, path: &Path) -> Result<(), PjrtError> {
    let found = api.version();
    if found.major != 0 {
        return Err(PjrtError::ApiMajorVersion {
            path: path.to_path_buf(),
            found,
        });
    }
    if found.minor < OLDEST_MINOR {
        return Err(PjrtError::ApiTooOld {
            function: "PJRT_Plugin_Initialize",
            needed: ApiVersion {
                major: 0,
                minor: OLDEST_MINOR,
            },
            found,
        });
    }
    Ok(())
}

impl Api {
    pub fn attributes(&self) -> Result<BTreeMap<String, NamedValue>, PjrtError> {
        let mut args = PJRT_Plugin_Attributes_Args::new();
        // SAFETY: takes nothing but the head; *lent*: the attributes live as long as the plugin.
        unsafe {
            self.call(&mut args)?;
            Ok(named_values(args.attributes, args.num_attributes))
        }
    }
}

/// An error with its causes: a loader's own text is in the cause.
fn source_chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {}", source_chain(source)),
        None => error.to_string(),
    }
}
