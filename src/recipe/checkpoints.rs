//! Checkpoints of the run.

use crate::config::Config;
use crate::train::checkpoint::{Check, SavedCheckpoint, latest};

use super::{Notice, Notify, RecipeError};

/// The newest complete checkpoint of the run. Damaged ones are skipped with a warning.
///
/// # Errors
/// When the folder cannot be read.
pub fn newest_checkpoint(
    config: &Config,
    notify: &mut Notify<'_>,
) -> Result<Option<SavedCheckpoint>, RecipeError> {
    let found = latest(&config.checkpoint_folder(), Check::Hashes).map_err(RecipeError::failed)?;
    for skipped in &found.skipped {
        notify(Notice::Warning(&format!(
            "skipped {}: {}",
            skipped.path.display(),
            skipped.reason
        )));
    }
    Ok(found.checkpoint)
}
