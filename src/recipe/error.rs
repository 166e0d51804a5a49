//! Errors on the way from a configuration to library options.

use crate::aot::AotError;
use crate::config::ConfigErrors;

/// Why a configuration does not make what was asked for.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    /// The configuration contradicts itself, its model, or what is there; the message names the keys.
    #[error("{0}")]
    Usage(String),
    /// Single keys are wrong.
    #[error(transparent)]
    Config(#[from] ConfigErrors),
    /// A file, a device or the network failed.
    #[error(transparent)]
    Failed(Box<dyn std::error::Error + Send + Sync>),
}

impl From<AotError> for RecipeError {
    fn from(error: AotError) -> Self {
        match error.is_usage() {
            true => RecipeError::usage(error),
            false => RecipeError::failed(error),
        }
    }
}

impl RecipeError {
    /// An error that the configuration is not to blame for.
    pub fn failed(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        RecipeError::Failed(error.into())
    }

    /// An error of what is written at `place`: a file, or a key.
    pub fn at<E: std::fmt::Display>(place: impl std::fmt::Display) -> impl FnOnce(E) -> Self {
        move |error| RecipeError::Usage(format!("{place}: {error}"))
    }

    /// An error that the configuration is to blame for.
    pub fn usage(error: impl std::fmt::Display) -> Self {
        RecipeError::Usage(error.to_string())
    }
}
