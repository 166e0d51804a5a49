//! Prompts of a configuration as the pipeline takes them.

use crate::config::{self, Config};
use crate::data::Tokenizer;
use crate::pipelines::images::Picture;
use crate::pipelines::prompt::{
    PromptError, PromptSyntax, PromptTokens, align_chunks, encode_prompt,
};

use super::tell;

/// One picture to make.
#[derive(Clone, Debug)]
pub struct Prompted {
    pub prompt: String,
    pub negative_prompt: String,
    pub seed: u64,
}

/// How the configuration has prompts read.
pub fn syntax(config: &Config) -> PromptSyntax {
    match config.prompt_syntax {
        config::PromptSyntax::Weighted => PromptSyntax::Weighted,
        config::PromptSyntax::Plain => PromptSyntax::Plain,
    }
}

/// Pictures with the tokens of their prompts for every text encoder, all of as many chunks; what of a prompt does not
/// survive is told.
///
/// # Errors
/// When a prompt cannot be read or encoded.
pub fn pictures(
    tokenizers: &[Tokenizer],
    prompts: &[Prompted],
    syntax: PromptSyntax,
) -> Result<Vec<Picture>, PromptError> {
    let mut told = Vec::new();
    let mut encode = |text: &str| -> Result<Vec<PromptTokens>, PromptError> {
        let tokens = tokenizers
            .iter()
            .map(|tokenizer| encode_prompt(tokenizer, text, syntax))
            .collect::<Result<Vec<_>, _>>()?;
        for warning in tokens.iter().flat_map(|t| &t.warnings) {
            let warning = format!("warning: '{text}': {warning}");
            if !told.contains(&warning) {
                tell(&warning);
                told.push(warning);
            }
        }
        Ok(tokens)
    };
    let mut pictures = prompts
        .iter()
        .map(|prompted| {
            Ok(Picture {
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

/// Chunks of every prompt of `pictures`.
pub fn chunks(pictures: &[Picture]) -> usize {
    let first = pictures.first().and_then(|p| p.prompt.first());
    first.map_or(1, |tokens| tokens.chunks.len())
}
