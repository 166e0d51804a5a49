//! The images that a configuration asks for.

use std::path::Path;

use crate::config::{Config, Given, MOST_IMAGES, Place};
use crate::pipelines::ImageRequest;
use crate::pipelines::prompt_file::{PromptLine, read_prompts};

use super::{Notify, RecipeError};

/// Every image that the configuration asks for: from each input image, or from noise alone, each prompt
/// `num_images_per_prompt` times. Where a line of the file of prompts gives no seed, seeds count up, for each input
/// image anew: it gives what a call with it alone gives.
///
/// # Errors
/// When there are two sources of prompts, the file of prompts cannot be read or asks for another size, or the images are too
/// many.
pub fn image_requests(
    config: &Config,
    given: &Given,
    notify: &mut Notify<'_>,
) -> Result<Vec<ImageRequest>, RecipeError> {
    check_sources(config, given)?;
    let lines = if config.held_out_prompts > 0 {
        plain(super::data::held_out_prompts(config, notify)?)
    } else if config.prompts_file.is_empty() {
        plain(config.prompt.0.clone())
    } else {
        read_prompts(Path::new(&config.prompts_file)).map_err(RecipeError::usage)?
    };
    let inputs = config.input_images().len().max(1);
    let images = config
        .num_images_per_prompt
        .saturating_mul(lines.len() as u64)
        .saturating_mul(inputs as u64);
    if images > MOST_IMAGES {
        return Err(RecipeError::Usage(format!(
            "num_images_per_prompt={} for {} prompts and {inputs} input images makes {images} images; a call makes at most {MOST_IMAGES}: make them \
             in several calls, with another seed for each",
            config.num_images_per_prompt,
            lines.len()
        )));
    }
    let mut requests = Vec::new();
    for line in lines {
        check_size(config, &line)?;
        for copy in 0..config.num_images_per_prompt {
            let counted = config.seed.0.wrapping_add(requests.len() as u64);
            requests.push(ImageRequest {
                prompt: line.prompt.clone(),
                prompt_2: Some(config.prompt_2.clone()).filter(|text| !text.is_empty()),
                negative_prompt: line
                    .negative
                    .clone()
                    .unwrap_or_else(|| config.negative_prompt.clone()),
                seed: line.seed.map_or(counted, |seed| seed.wrapping_add(copy)),
                guidance_scale: line.guidance_scale.unwrap_or(config.guidance_scale),
                steps: line.steps.map_or(config.num_inference_steps, u64::from) as usize,
                init: 0,
            });
        }
    }
    let of_input = |init: usize| {
        let requests = requests.iter().cloned();
        requests.map(move |request| ImageRequest { init, ..request })
    };
    Ok((0..inputs).flat_map(of_input).collect())
}

/// Refuses sources of prompts that exclude each other.
fn check_sources(config: &Config, given: &Given) -> Result<(), RecipeError> {
    let prompt_is_asked = given.place("prompt") == Place::CommandLine;
    if config.held_out_prompts > 0 && prompt_is_asked {
        return Err(RecipeError::Usage(
            "prompt has no effect with held_out_prompts, which draws captions of the dataset: give one of the two"
                .to_string(),
        ));
    }
    if config.prompts_file.is_empty() {
        return Ok(());
    }
    for (key, is_given) in [
        ("prompt", prompt_is_asked),
        ("held_out_prompts", config.held_out_prompts > 0),
    ] {
        if is_given {
            return Err(RecipeError::Usage(format!(
                "{key} has no effect with prompts_file={}, whose lines are the prompts: give one of the two",
                config.prompts_file
            )));
        }
    }
    Ok(())
}

fn plain(prompts: Vec<String>) -> Vec<PromptLine> {
    prompts
        .into_iter()
        .map(|prompt| PromptLine {
            prompt,
            ..PromptLine::default()
        })
        .collect()
}

/// One program makes all images of a call, so they are of one size.
fn check_size(config: &Config, line: &PromptLine) -> Result<(), RecipeError> {
    let side = |given: u64| match given {
        0 => config.resolution,
        given => given,
    };
    let sizes = [
        ("--h", line.height, side(config.height)),
        ("--w", line.width, side(config.width)),
    ];
    for (option, asked, made) in sizes {
        if let Some(asked) = asked.filter(|asked| u64::from(*asked) != made) {
            return Err(RecipeError::Usage(format!(
                "prompts_file={}: '{}' has {option} {asked}, but this call makes images of {made}: all images of one \
                 call have one size",
                config.prompts_file, line.prompt
            )));
        }
    }
    Ok(())
}
