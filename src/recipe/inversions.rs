//! The files of `textual_inversions`.

use std::path::Path;

use crate::config::Config;
use crate::pipelines::TextualInversion;

use super::RecipeError;

/// Reads the textual inversions that prompts may name.
///
/// # Errors
/// When a file is not a textual inversion, or two have the same token.
pub fn textual_inversions(config: &Config) -> Result<Vec<TextualInversion>, RecipeError> {
    let files = config.textual_inversions.0.iter();
    let read =
        files.map(|file| TextualInversion::open(Path::new(&file.path), file.token.as_deref()));
    read.map(|read| read.map_err(RecipeError::at("textual_inversions")))
        .collect()
}
