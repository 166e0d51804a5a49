//! BERT's uncased tokenizer (Devlin et al., 2018, arXiv:1810.04805), from its `vocab.txt`.
//!
//! Ids are those of transformers' `BertTokenizer` in lower case, with the two tokens that BLIP adds behind the vocabulary.

use std::path::Path;

use tokenizers::AddedToken;
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;

use super::DataError;
use super::files::{missing, read};

pub const START: &str = "[CLS]";
pub const END: &str = "[SEP]";
pub const PADDING: &str = "[PAD]";
pub const UNKNOWN: &str = "[UNK]";
const MASK: &str = "[MASK]";
/// What BLIP adds, in this order.
const OF_BLIP: [&str; 2] = ["[DEC]", "[ENC]"];

const VOCABULARY: &str = "vocab.txt";

/// Reads the `vocab.txt` of a folder: a token a line, whose number is its id.
///
/// # Errors
/// Errors of [`super::Tokenizer::blip_from_dir`].
pub fn load(dir: &Path) -> Result<tokenizers::Tokenizer, DataError> {
    let path = dir.join(VOCABULARY);
    if !path.is_file() {
        return Err(missing(
            dir,
            VOCABULARY,
            "vocab.txt of bert-base-uncased (google-bert/bert-base-uncased on the Hugging Face hub)",
        ));
    }
    of_lines(&read(&path)?).map_err(|message| DataError::Tokenizer {
        origin: path.display().to_string(),
        message,
    })
}

fn of_lines(bytes: &[u8]) -> Result<tokenizers::Tokenizer, String> {
    let failed = |e: tokenizers::Error| e.to_string();
    let vocabulary = WordPiece::read_bytes(bytes).map_err(failed)?;
    let model = WordPiece::builder().vocab(vocabulary).build();
    let mut inner = tokenizers::Tokenizer::new(model.map_err(failed)?);
    let own = [UNKNOWN, END, PADDING, START, MASK];
    if let Some(lacking) = own.iter().find(|token| inner.token_to_id(token).is_none()) {
        return Err(format!(
            "it has no line {lacking}; expected the vocabulary of bert-base-uncased"
        ));
    }
    let (clean, lower_case) = (true, true);
    // Accents go where letters become small.
    let normalizer = BertNormalizer::new(clean, true, None, lower_case);
    inner.with_normalizer(Some(normalizer)).map_err(failed)?;
    inner.with_pre_tokenizer(Some(BertPreTokenizer));
    let special = own.into_iter().chain(OF_BLIP);
    let special = special.map(|token| AddedToken::from(token, true));
    inner.add_special_tokens(special).map_err(failed)?;
    Ok(inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vocabulary_without_its_special_tokens_is_refused() {
        let error = of_lines(b"[PAD]\n[UNK]\n[CLS]\na\n").unwrap_err();
        assert!(error.starts_with("it has no line [SEP]"), "{error}");
        let error = load(Path::new("/nonexistent")).unwrap_err().to_string();
        assert!(error.contains("expected vocab.txt"), "{error}");
    }
}
