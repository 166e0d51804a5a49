//! The model of a run that trains on pixels: the recipe says what it is, a checkpoint has its weights and tokenizer.

use std::path::{Path, PathBuf};

use crate::config::Config;
use crate::data::Tokenizer;
use crate::models::Part;
use crate::pipelines::model_files::ModelFiles;
use crate::pipelines::{PipelineModel, TextualInversions};
use crate::weights::source::ModelSource;

use super::{RecipeError, check_pixels, model, policy_of_checkpoint};

/// The model of the checkpoint `dir`, whose folders of models end in `suffix`.
///
/// # Errors
/// When a part is missing or not supported, or the recipe contradicts it.
pub(super) fn run_model(
    config: &Config,
    dir: &Path,
    suffix: &str,
) -> Result<PipelineModel, RecipeError> {
    let file = tokenizer_file(config, dir);
    // The text encoder's length bounds the tokens, and the tokenizer's size its vocabulary.
    let probe = Tokenizer::from_file(&file, usize::MAX >> 1).map_err(RecipeError::failed)?;
    let model = model(config, Some(&probe))?;
    if model.text_encoders.is_empty() {
        return Err(RecipeError::Usage(
            "this recipe has no text encoder of its own: give text_encoder_config".to_string(),
        ));
    }
    check_pixels(&model)?;
    let tokenizer = Tokenizer::from_file(&file, model.tokens).map_err(RecipeError::failed)?;
    let source = ModelSource::of_run(dir, suffix).map_err(RecipeError::failed)?;
    let denoiser = source.component(Part::Unet).map_err(RecipeError::failed)?;
    let stored = denoiser.checkpoint.quantization();
    let quantization = policy_of_checkpoint(config, stored, dir, model.family.spec())?;
    Ok(PipelineModel {
        quantization,
        model,
        tokenizers: vec![tokenizer],
        zero_empty_prompts: false,
        files: ModelFiles::source(Box::new(source), Vec::new()),
        inversions: TextualInversions::default(),
    })
}

/// The `tokenizer.json` that the model of a checkpoint is used with.
pub(super) fn tokenizer_file(config: &Config, dir: &Path) -> PathBuf {
    match config.tokenizer_model_name_or_path.as_str() {
        // Checkpoints of `train` have it beside the models, diffusers folders in a folder of its own.
        "" if dir.join("tokenizer").is_dir() => dir.join("tokenizer/tokenizer.json"),
        "" => dir.join("tokenizer.json"),
        given if Path::new(given).is_dir() => Path::new(given).join("tokenizer.json"),
        given => PathBuf::from(given),
    }
}
