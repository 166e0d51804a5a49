//! Prompts of a configuration as the pipeline takes them.

use std::path::Path;

use crate::config::Config;
use crate::data::Tokenizer;
use crate::pipelines::images::Picture;
use crate::pipelines::prompt::{
    PromptError, PromptSyntax, PromptTokens, align_chunks, encode_prompt,
};

use crate::pipelines::prompt_file::{PromptLine, read_prompts};

use super::{Notice, Notify, RecipeError};

/// One picture to make.
#[derive(Clone, Debug)]
pub struct Prompted {
    pub prompt: String,
    pub negative_prompt: String,
    pub seed: u64,
    pub guidance_scale: f64,
    pub steps: usize,
}

/// Every picture that the configuration asks for: each prompt `num_images_per_prompt` times, with seeds that count up
/// where a line of the file of prompts does not give one.
///
/// # Errors
/// When the file of prompts cannot be read, or asks for another size.
pub fn prompted(config: &Config, notify: &mut Notify<'_>) -> Result<Vec<Prompted>, RecipeError> {
    let lines = if config.held_out_prompts > 0 {
        plain(super::data::held_out_prompts(config, notify)?)
    } else if config.prompts_file.is_empty() {
        plain(config.prompt.0.clone())
    } else {
        read_prompts(Path::new(&config.prompts_file)).map_err(RecipeError::usage)?
    };
    let mut prompted = Vec::new();
    for line in lines {
        check_size(config, &line)?;
        for copy in 0..config.num_images_per_prompt {
            let counted = config.seed.wrapping_add(prompted.len() as u64);
            prompted.push(Prompted {
                prompt: line.prompt.clone(),
                negative_prompt: line
                    .negative
                    .clone()
                    .unwrap_or_else(|| config.negative_prompt.clone()),
                seed: line.seed.map_or(counted, |seed| seed.wrapping_add(copy)),
                guidance_scale: line.guidance_scale.unwrap_or(config.guidance_scale),
                steps: line.steps.map_or(config.num_inference_steps, u64::from) as usize,
            });
        }
    }
    Ok(prompted)
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

/// One program makes all pictures of a call, so they are of one size.
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
                "prompts_file={}: '{}' has {option} {asked}, but this call makes pictures of {made}: all of one call are \
                 of one size",
                config.prompts_file, line.prompt
            )));
        }
    }
    Ok(())
}

/// The step counts of `prompts`, each once: what [`pictures`] refers to.
pub fn step_counts(prompts: &[Prompted]) -> Vec<usize> {
    let mut counts: Vec<usize> = prompts.iter().map(|p| p.steps).collect();
    counts.sort_unstable();
    counts.dedup();
    counts
}

/// Pictures with the tokens of their prompts for every text encoder, all of as many chunks; what of a prompt does not
/// survive is told.
///
/// # Errors
/// When a prompt cannot be read or encoded.
pub fn pictures(
    tokenizers: &[&Tokenizer],
    prompts: &[Prompted],
    steps: &[usize],
    syntax: PromptSyntax,
    notify: &mut Notify<'_>,
) -> Result<Vec<Picture>, PromptError> {
    let mut told = Vec::new();
    let mut encode = |text: &str| -> Result<Vec<PromptTokens>, PromptError> {
        let tokens = tokenizers
            .iter()
            .map(|tokenizer| encode_prompt(tokenizer, text, syntax))
            .collect::<Result<Vec<_>, _>>()?;
        for warning in tokens.iter().flat_map(|t| &t.warnings) {
            let warning = format!("'{text}': {warning}");
            if !told.contains(&warning) {
                notify(Notice::Warning(&warning));
                told.push(warning);
            }
        }
        Ok(tokens)
    };
    let mut pictures = prompts
        .iter()
        .map(|prompted| {
            Ok(Picture {
                plan: steps.iter().position(|s| *s == prompted.steps).unwrap_or(0),
                guidance_scale: prompted.guidance_scale as f32,
                prompt: encode(&prompted.prompt)?,
                negative: encode(&prompted.negative_prompt)?,
                negative_is_empty: prompted.negative_prompt.is_empty(),
                seed: prompted.seed,
            })
        })
        .collect::<Result<Vec<_>, PromptError>>()?;
    let mut all: Vec<&mut PromptTokens> = pictures
        .iter_mut()
        .flat_map(|p| p.prompt.iter_mut().chain(&mut p.negative))
        .collect();
    align_chunks(&mut all);
    Ok(pictures)
}

/// The same pictures for a second model: takes the prompts after the first `own` text encoders off.
pub fn split_off(pictures: &mut [Picture], own: usize) -> Vec<Picture> {
    let split = |picture: &mut Picture| Picture {
        prompt: picture.prompt.split_off(own.min(picture.prompt.len())),
        negative: picture.negative.split_off(own.min(picture.negative.len())),
        ..*picture
    };
    pictures.iter_mut().map(split).collect()
}

/// Chunks of every prompt of `pictures`.
pub fn chunks(pictures: &[Picture]) -> usize {
    let first = pictures.first().and_then(|p| p.prompt.first());
    first.map_or(1, |tokens| tokens.chunks.len())
}
