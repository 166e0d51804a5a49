//! The class pictures of prior preservation (Ruiz et al. 2022, "DreamBooth", section 3.3): what the model draws of the class
//! before it is trained.

use std::path::Path;

use crate::config::{Config, Given, Prompts, Seed};
use crate::pipelines::Pipeline;
use crate::pipelines::image_file::{check_output_dir, prepare_output_dir, write_numbered};
use crate::pipelines::prompt::PromptSyntax;
use crate::pjrt::install::TryLoad;
use crate::util::files::sorted_entries;

use super::data::subject;
use super::fine_tune::{class_folder, without_steering};
use super::{Generation, Notify, RecipeError, generation, open_session};

/// Pictures that are drawn and written together.
const TOGETHER: usize = 4;

/// Draws as many pictures of `class_prompt` as `class_data_dir` lacks of `num_class_images`, if prior preservation is
/// asked for. `progress` hears how many of how many are there.
///
/// # Errors
/// When the subject's pictures cannot be read, the folder cannot be read or written, or the model cannot draw.
pub fn class_pictures(
    config: &Config,
    given: &Given,
    recipe_file: &Path,
    try_load: &TryLoad<'_>,
    notify: &mut Notify<'_>,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<(), RecipeError> {
    if !config.with_prior_preservation {
        return Ok(());
    }
    let dir = class_folder(config);
    check_output_dir(&dir).map_err(RecipeError::failed)?;
    let (mut there, wanted) = (count(&dir)?, config.num_class_images as usize);
    if there >= wanted {
        return Ok(());
    }
    // What is wrong with the subject's pictures is said before any of the class are drawn.
    subject(config)?;
    progress(there, wanted);
    let drawing = Config {
        prompt: Prompts(vec![config.class_prompt.clone()]),
        prompt_2: String::new(),
        negative_prompt: String::new(),
        prompts_file: String::new(),
        prompt_syntax: PromptSyntax::Plain,
        held_out_prompts: 0,
        num_images_per_prompt: (wanted - there) as u64,
        seed: Seed(config.seed.0.wrapping_add(there as u64)),
        // No checkpoint of the run is meant.
        output_dir: dir.display().to_string(),
        run_name: String::new(),
        checkpoint_dir: String::new(),
        lora_rank: 0,
        ..without_steering(config)
    };
    let Generation {
        options,
        mut request,
        ..
    } = generation(&drawing, given, recipe_file, notify)?;
    let opened = open_session(config, try_load, notify)?;
    let mut pipeline = Pipeline::open(opened.session, options).map_err(RecipeError::failed)?;
    prepare_output_dir(&dir).map_err(RecipeError::failed)?;
    let images = std::mem::take(&mut request.images);
    let together = TOGETHER.min(images.len());
    for chunk in images.chunks(together) {
        request.images = chunk.to_vec();
        // One program draws all, so the last ones are filled up.
        request.images.resize(together, chunk[0].clone());
        let made = pipeline.generate(&request, &mut |_| Ok(()));
        let made = made.map_err(RecipeError::failed)?;
        for image in made.images.iter().take(chunk.len()) {
            write_numbered(&dir, "class", image, None).map_err(RecipeError::failed)?;
            there += 1;
            progress(there, wanted);
        }
    }
    Ok(())
}

/// The pictures in a folder, which need not be there.
fn count(dir: &Path) -> Result<usize, RecipeError> {
    if !dir.exists() {
        return Ok(0);
    }
    let names = sorted_entries(dir).map_err(RecipeError::at(dir.display()))?;
    let is_picture = |name: &&String| crate::data::is_image(Path::new(name.as_str()));
    Ok(names.iter().filter(is_picture).count())
}
