//! Weights that were distilled for few steps, such as SDXL-Lightning's: `lightning_repo` and `lightning_ckpt`.

use std::path::{Path, PathBuf};

use crate::config::Config;
use crate::pipelines::LoraChoice;
use crate::weights::Checkpoint;
use crate::weights::source::is_lora;

use super::RecipeError;

/// What a file of distilled weights is.
pub enum Distilled {
    /// The denoiser's weights, which replace those of the model.
    Denoiser(PathBuf),
    /// A LoRA for the model's own.
    Lora(LoraChoice),
}

impl Distilled {
    /// The file that the configuration names in a folder here; `None` where it names none.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn open(config: &Config) -> Result<Option<Distilled>, RecipeError> {
        if config.lightning_repo.is_empty() {
            return Ok(None);
        }
        let path = Path::new(&config.lightning_repo).join(&config.lightning_ckpt);
        let file = Checkpoint::open(&path)
            .map_err(|e| RecipeError::Usage(format!("lightning_repo, lightning_ckpt: {e}")))?;
        Ok(Some(match file.names().any(is_lora) {
            false => Distilled::Denoiser(path),
            true => Distilled::Lora(LoraChoice {
                path,
                name: config.lightning_ckpt.clone(),
                scale: 1.0,
            }),
        }))
    }
}
