//! The files of `textual_inversions`, and the token that training adds.

use std::path::Path;

use crate::config::Config;
use crate::data::{Dataset, Tokenizer};
use crate::pipelines::{PipelineModel, TextualInversion};
use crate::train::{InversionOptions, InversionPlace};

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

/// The token to train, if the configuration names one, which the tokenizers of `base` know from here on.
///
/// # Errors
/// When the family reads none, a vocabulary has the token already, or the initializer is not one token.
pub fn new_token(
    config: &Config,
    base: &mut PipelineModel,
) -> Result<Option<InversionOptions>, RecipeError> {
    let token = config.placeholder_token.trim();
    if token.is_empty() {
        return Ok(None);
    }
    let family = base.model.family;
    if !family.spec().textual_inversions {
        return Err(RecipeError::Usage(format!(
            "placeholder_token={token}: textual inversions of {} are not built",
            family.title()
        )));
    }
    let vectors = config.num_vectors as usize;
    let encoders = base.model.text_encoders.iter().zip(&mut base.tokenizers);
    let place = encoders.map(|(encoder, tokenizer)| {
        let known = tokenizer.pieces(token).map_err(RecipeError::failed)?;
        if known.len() == 1 {
            return Err(RecipeError::Usage(format!(
                "placeholder_token={token}: a word of the text encoder's vocabulary: choose one that is none, such as <{token}>"
            )));
        }
        Ok(InversionPlace {
            part: encoder.part,
            initializer: single_token(tokenizer, &config.initializer_token)?,
            first: tokenizer
                .add_token(token, vectors)
                .map_err(|error| RecipeError::Usage(format!("placeholder_token: {error}")))?,
        })
    });
    Ok(Some(InversionOptions {
        token: token.to_owned(),
        vectors,
        places: place.collect::<Result<_, RecipeError>>()?,
    }))
}

/// The id of a word that is one token.
fn single_token(tokenizer: &Tokenizer, word: &str) -> Result<i32, RecipeError> {
    let pieces = tokenizer.pieces(word).map_err(RecipeError::failed)?;
    match pieces.as_slice() {
        [one] => Ok(one.id),
        several => Err(RecipeError::Usage(format!(
            "initializer_token={word}: {} tokens of the text encoder's vocabulary, expected one: name a common word, such as \
             cat or painting",
            several.len()
        ))),
    }
}

/// Refuses a dataset none of whose captions names the token.
///
/// # Errors
/// Says what the first caption is.
pub fn check_captions(
    inversion: &InversionOptions,
    base: &PipelineModel,
    dataset: &Dataset,
) -> Result<(), RecipeError> {
    let (Some(tokenizer), Some(place)) = (base.tokenizers.first(), inversion.places.first()) else {
        return Ok(());
    };
    let mut first = None;
    for index in 0..dataset.len() {
        let (captions, _) = dataset.entry(index).map_err(RecipeError::failed)?;
        for caption in captions {
            let encoded = tokenizer.encode(&caption).map_err(RecipeError::failed)?;
            if encoded.ids.contains(&place.first) {
                return Ok(());
            }
            first.get_or_insert(caption);
        }
    }
    Err(RecipeError::Usage(format!(
        "placeholder_token={}: no caption names it, so there is nothing to learn it from; the first caption is '{}'",
        inversion.token,
        first.unwrap_or_default()
    )))
}
