//! T5's tokenizer: a unigram model of SentencePiece (Kudo, 2018, arXiv:1804.10959), from `tokenizer.json` or from
//! `spiece.model`.
//!
//! The steps from text to the ids of `spiece.model` are those of `T5Tokenizer` in transformers 5.23: the pieces have the
//! first ids, then come 100 sentinel tokens.

use std::path::{Path, PathBuf};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use prost::Message;
use serde_json::Value;
use tokenizers::AddedToken;
use tokenizers::models::unigram::Unigram;
use tokenizers::normalizers::Precompiled;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::whitespace::WhitespaceSplit;

use super::DataError;
use super::files::{missing, read};
use crate::proto::sentencepiece::ModelProto;

pub const PADDING: &str = "<pad>";
pub const END: &str = "</s>";
pub const UNKNOWN: &str = "<unk>";

const WHOLE: &str = "tokenizer.json";
const PIECES: &str = "spiece.model";
/// Tokens behind the pieces, the last one first: `<extra_id_99>` to `<extra_id_0>`.
const SENTINELS: usize = 100;
/// What a space is in the pieces.
const SPACE: char = '\u{2581}';
/// The type of models in a SentencePiece file whose pieces have probabilities.
const UNIGRAM: i32 = 1;

/// The file of the tokenizer in a folder.
///
/// # Errors
/// [`DataError::TokenizerMissing`]
pub fn file_in(dir: &Path) -> Result<PathBuf, DataError> {
    let files = [WHOLE, PIECES].map(|name| dir.join(name));
    let found = files.into_iter().find(|file| file.is_file());
    found.ok_or_else(|| {
        missing(
            dir,
            "tokenizer.json or spiece.model",
            "the folder tokenizer_2/ of the model's repository on the Hugging Face hub, or the files of \
             google/t5-v1_1-xxl",
        )
    })
}

/// Reads a `tokenizer.json`, or a SentencePiece model, which has another suffix.
///
/// # Errors
/// Errors of [`super::Tokenizer::t5_from_path`].
pub fn load(path: &Path) -> Result<tokenizers::Tokenizer, DataError> {
    let bytes = read(path)?;
    let loaded = match path.extension().is_some_and(|suffix| suffix == "json") {
        true => of_json(&bytes),
        false => of_pieces(&bytes),
    };
    loaded.map_err(|message| DataError::Tokenizer {
        origin: path.display().to_string(),
        message,
    })
}

fn of_json(bytes: &[u8]) -> Result<tokenizers::Tokenizer, String> {
    let no_tokenizer = |e: &dyn std::fmt::Display| format!("not a tokenizer.json: {e}");
    let document: Value = serde_json::from_slice(bytes).map_err(|e| no_tokenizer(&e))?;
    let kind = document["model"]["type"].as_str().unwrap_or("none");
    if kind != "Unigram" {
        return Err(format!(
            "its model is of type {kind}; expected Unigram, that of T5"
        ));
    }
    check_charsmaps(&document["normalizer"])?;
    tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| no_tokenizer(&e))
}

/// Checks the tables of replacements of a normalizer and of those inside it.
fn check_charsmaps(normalizer: &Value) -> Result<(), String> {
    if let Some(charsmap) = normalizer["precompiled_charsmap"].as_str() {
        let bytes = BASE64_STANDARD
            .decode(charsmap)
            .map_err(|e| format!("precompiled_charsmap: {e}"))?;
        check_charsmap(&bytes)?;
    }
    let inside = normalizer["normalizers"].as_array();
    inside.into_iter().flatten().try_for_each(check_charsmaps)
}

fn of_pieces(bytes: &[u8]) -> Result<tokenizers::Tokenizer, String> {
    let model = ModelProto::decode(bytes).map_err(|e| format!("not a SentencePiece model: {e}"))?;
    let kind = model.trainer_spec.unwrap_or_default().model_type;
    if ![0, UNIGRAM].contains(&kind) {
        return Err(format!(
            "a SentencePiece model of type {kind}; expected {UNIGRAM}, unigram"
        ));
    }
    let mut vocabulary: Vec<(String, f64)> = Vec::with_capacity(model.pieces.len() + SENTINELS);
    for piece in model.pieces {
        if piece.piece.is_empty() || !piece.score.is_finite() {
            return Err(format!(
                "piece {} is {:?} with score {}; expected a text and a finite number",
                vocabulary.len(),
                piece.piece,
                piece.score
            ));
        }
        vocabulary.push((piece.piece, f64::from(piece.score)));
    }
    let unknown = vocabulary.iter().position(|(piece, _)| piece == UNKNOWN);
    let unknown = unknown.ok_or_else(|| format!("it has no piece {UNKNOWN}"))?;
    let sentinels = (0..SENTINELS).rev().map(|i| format!("<extra_id_{i}>"));
    let special: Vec<String> = [PADDING, END, UNKNOWN]
        .map(str::to_owned)
        .into_iter()
        .chain(sentinels.clone())
        .collect();
    vocabulary.extend(sentinels.map(|sentinel| (sentinel, 0.0)));

    let failed = |e: tokenizers::Error| e.to_string();
    let model_of = Unigram::from(vocabulary, Some(unknown), false).map_err(failed)?;
    let mut inner = tokenizers::Tokenizer::new(model_of);
    let charsmap = model
        .normalizer_spec
        .unwrap_or_default()
        .precompiled_charsmap;
    if !charsmap.is_empty() {
        check_charsmap(&charsmap)?;
        let table = Precompiled::from(&charsmap);
        let table = table.map_err(|e| format!("precompiled_charsmap: {e}"))?;
        inner.with_normalizer(Some(table)).map_err(failed)?;
    }
    let spaces = Metaspace::new(SPACE, PrependScheme::Always, true);
    let words = Sequence::new(vec![WhitespaceSplit.into(), spaces.into()]);
    inner.with_pre_tokenizer(Some(words));
    let special = special
        .into_iter()
        .map(|token| AddedToken::from(token, true));
    inner.add_special_tokens(special).map_err(failed)?;
    Ok(inner)
}

/// Checks a table of replacements, which the `tokenizers` crate follows without looking: a double array (Yata's
/// darts-clone) of 32-bit units behind its length in bytes, then the replacements, each ended by a zero byte.
fn check_charsmap(bytes: &[u8]) -> Result<(), String> {
    const IS_VALUE: u32 = 1 << 31;
    let damaged = |what: &str| Err(format!("precompiled_charsmap is damaged: {what}"));
    let Some((length, rest)) = bytes.split_first_chunk::<4>() else {
        return damaged("no length");
    };
    let length = u32::from_le_bytes(*length) as usize;
    let Some((array, replacements)) = rest.split_at_checked(length) else {
        return damaged("the array is shorter than it says");
    };
    let Ok(replacements) = std::str::from_utf8(replacements) else {
        return damaged("the replacements are not UTF-8");
    };
    let (units, left) = array.as_chunks::<4>();
    if units.is_empty() || !left.is_empty() {
        return damaged("the array is not of whole units");
    }
    for (index, unit) in units.iter().enumerate() {
        let unit = u32::from_le_bytes(*unit);
        if unit & IS_VALUE != 0 {
            let place = (unit & !IS_VALUE) as usize;
            if place >= replacements.len() || !replacements.is_char_boundary(place) {
                return damaged("a replacement begins inside a character, or behind the end");
            }
            continue;
        }
        let offset = ((unit >> 10) << ((unit & (1 << 9)) >> 6)) as usize;
        if (index ^ offset) | 0xff >= units.len() {
            return damaged("a unit leads behind the end");
        }
    }
    Ok(())
}
