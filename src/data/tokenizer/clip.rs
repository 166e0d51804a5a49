//! CLIP's tokenizer from the folder of a checkpoint: vocabulary and merges from `tokenizer.json`, or
//! from `vocab.json` and `merges.txt`; special tokens from `tokenizer_config.json`,
//! `special_tokens_map.json` and `added_tokens.json`.
//!
//! The steps from text to ids, and which file wins where several name a special token, are those of
//! `CLIPTokenizer` in transformers 5.23.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use serde::Deserialize;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::replace::ReplacePattern;
use tokenizers::normalizers::{Lowercase, NFC, Replace, Sequence as Normalizers};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence as PreTokenizers;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior};

use super::files::{Document, Pairs, Token, missing, optional_json, read};
use super::{DataError, END, START};

const CONFIG: &str = "tokenizer_config.json";
/// The suffix of the last token of a word.
const SUFFIX: &str = "</w>";
/// CLIP's pieces: special tokens, English contractions, runs of letters, single digits, runs of
/// anything else; white space only separates.
const PIECES: &str = concat!(
    r"<\|startoftext\|>|<\|endoftext\|>",
    r"|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
);

/// The tokenizer of a folder.
pub struct Loaded {
    pub inner: tokenizers::Tokenizer,
    pub start: String,
    pub end: String,
    /// The padding token, where the folder names one.
    pub padding: Option<String>,
    /// Longest sequence that the folder's configuration allows, where it says so.
    pub max_length: Option<usize>,
}

/// A special token as configurations name it.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Special {
    Name(String),
    Token(Token),
}

impl Special {
    fn content(&self) -> &str {
        match self {
            Self::Name(name) => name,
            Self::Token(token) => &token.content,
        }
    }
}

/// The fields that are read of `tokenizer_config.json`, and of `special_tokens_map.json`, which has the special
/// tokens only.
#[derive(Debug, Default, Deserialize)]
struct Config {
    bos_token: Option<Special>,
    eos_token: Option<Special>,
    unk_token: Option<Special>,
    sep_token: Option<Special>,
    pad_token: Option<Special>,
    cls_token: Option<Special>,
    mask_token: Option<Special>,
    additional_special_tokens: Option<Vec<Special>>,
    added_tokens_decoder: Option<BTreeMap<u32, Token>>,
    model_max_length: Option<f64>,
    padding_side: Option<String>,
    truncation_side: Option<String>,
    #[serde(default)]
    split_special_tokens: bool,
}

impl Config {
    /// Reads the configuration of a folder; one that is not there is empty.
    fn read(dir: &Path) -> Result<Self, DataError> {
        let mut config: Self = optional_json(&dir.join(CONFIG))?.unwrap_or_default();
        // A configuration with a decoder is whole; the other files are of an older format.
        if config.added_tokens_decoder.is_none()
            && let Some(map) = optional_json(&dir.join("special_tokens_map.json"))?
        {
            config.overlay(map);
        }
        let unsupported = |option: &str, value: &str, expected: &str| DataError::Tokenizer {
            origin: dir.join(CONFIG).display().to_string(),
            message: format!("{option} {value} is not supported: expected {expected}"),
        };
        let sides = [
            ("padding_side", &config.padding_side),
            ("truncation_side", &config.truncation_side),
        ];
        for (option, side) in sides {
            if let Some(side) = side.as_deref().filter(|side| *side != "right") {
                return Err(unsupported(option, side, "right"));
            }
        }
        if config.split_special_tokens {
            return Err(unsupported("split_special_tokens", "true", "false"));
        }
        Ok(config)
    }

    fn overlay(&mut self, map: Self) {
        let pairs = [
            (&mut self.bos_token, map.bos_token),
            (&mut self.eos_token, map.eos_token),
            (&mut self.unk_token, map.unk_token),
            (&mut self.sep_token, map.sep_token),
            (&mut self.pad_token, map.pad_token),
            (&mut self.cls_token, map.cls_token),
            (&mut self.mask_token, map.mask_token),
        ];
        for (mine, theirs) in pairs {
            let theirs = match theirs {
                None => continue,
                Some(Special::Name(name)) => Special::Name(name),
                Some(Special::Token(token)) => Special::Token(Token {
                    special: true,
                    ..token
                }),
            };
            *mine = Some(theirs);
        }
        if map.additional_special_tokens.is_some() {
            self.additional_special_tokens = map.additional_special_tokens;
        }
    }

    /// The special tokens that are named, in the order in which transformers registers them.
    fn specials(&self) -> impl Iterator<Item = &Special> {
        let named = [
            &self.bos_token,
            &self.eos_token,
            &self.unk_token,
            &self.sep_token,
            &self.pad_token,
            &self.cls_token,
            &self.mask_token,
        ];
        let more = self.additional_special_tokens.iter().flatten();
        named.into_iter().flatten().chain(more)
    }

    /// The tokens that are added to the vocabulary by id, from whichever file has them.
    fn added(
        &self,
        dir: &Path,
        document: BTreeMap<u32, Token>,
    ) -> Result<BTreeMap<u32, Token>, DataError> {
        if let Some(decoder) = &self.added_tokens_decoder {
            return Ok(decoder.clone());
        }
        let ids: Option<BTreeMap<String, u32>> = optional_json(&dir.join("added_tokens.json"))?;
        let mut added: BTreeMap<u32, Token> = BTreeMap::new();
        for (content, id) in ids.unwrap_or_default() {
            let special = self.specials().any(|special| special.content() == content);
            let token = Token {
                content,
                single_word: false,
                lstrip: false,
                rstrip: false,
                normalized: None,
                special,
            };
            added.insert(id, token);
        }
        added.extend(document);
        Ok(added)
    }

    fn max_length(&self) -> Option<usize> {
        // transformers writes 1e30 where any length will do.
        let length = self.model_max_length.filter(|l| (1.0..1e9).contains(l));
        length.map(|l| l as usize)
    }
}

/// Reads the tokenizer of a folder.
///
/// # Errors
/// Errors of [`super::Tokenizer::from_dir`].
pub fn load(dir: &Path) -> Result<Loaded, DataError> {
    let mut config = Config::read(dir)?;
    let max_length = config.max_length();
    let whole = dir.join("tokenizer.json");
    let (vocab, merges) = (dir.join("vocab.json"), dir.join("merges.txt"));
    let document = if whole.is_file() {
        let bytes = read(&whole)?;
        let origin = || whole.display().to_string();
        let document = Document::parse(&bytes).map_err(|message| DataError::Tokenizer {
            origin: origin(),
            message,
        })?;
        if document.suffix.as_deref() != Some(SUFFIX) {
            // Not CLIP's, such as the word lists of models trained here: as the file says.
            return Ok(Loaded {
                inner: super::from_bytes(&bytes, &origin())?,
                start: content(&config.bos_token, START),
                end: content(&config.eos_token, END),
                padding: config.pad_token.map(|pad| pad.content().to_owned()),
                max_length,
            });
        }
        document
    } else if vocab.is_file() && merges.is_file() {
        Document {
            pairs: Pairs::read(&vocab, &merges)?,
            suffix: Some(SUFFIX.to_owned()),
            added: BTreeMap::new(),
        }
    } else {
        return Err(missing(
            dir,
            "tokenizer.json, or vocab.json and merges.txt",
            "the folder tokenizer/ of the model's repository on the Hugging Face hub, or for an encoder of CLIP the files \
             of openai/clip-vit-large-patch14",
        ));
    };
    let added = config.added(dir, document.added)?;
    for (special, default) in [
        (&mut config.bos_token, START),
        (&mut config.eos_token, END),
        (&mut config.unk_token, END),
        (&mut config.pad_token, END),
    ] {
        special.get_or_insert_with(|| Special::Name(default.to_owned()));
    }
    let origin = dir.display().to_string();
    Ok(Loaded {
        inner: build(document.pairs, added, &config, &origin)?,
        start: content(&config.bos_token, START),
        end: content(&config.eos_token, END),
        padding: Some(content(&config.pad_token, END)),
        max_length,
    })
}

fn content(special: &Option<Special>, default: &str) -> String {
    special
        .as_ref()
        .map_or(default, Special::content)
        .to_owned()
}

/// Puts CLIP's tokenizer together.
fn build(
    pairs: Pairs,
    added: BTreeMap<u32, Token>,
    config: &Config,
    origin: &str,
) -> Result<tokenizers::Tokenizer, DataError> {
    let error = |message: String| DataError::Tokenizer {
        origin: origin.to_owned(),
        message,
    };
    let failed = |e: tokenizers::Error| error(e.to_string());
    let by_id: HashSet<&str> = added.values().map(|token| token.content.as_str()).collect();
    // A later token of the same content takes the place of an earlier one, except that nothing
    // takes the place of one added by id, and that a repeated one stays where it is.
    let mut seen = HashSet::new();
    let mut tokens: Vec<AddedToken> = added.values().cloned().map(Into::into).collect();
    for special in config.specials() {
        let content = special.content();
        if by_id.contains(content) {
            continue;
        }
        if !pairs.vocab.contains_key(content) {
            return Err(error(format!(
                "the special token {content} is not in the vocabulary"
            )));
        }
        let token = match special.clone() {
            Special::Name(name) => (true, AddedToken::from(name, true)),
            Special::Token(token) => (false, token.into()),
        };
        if seen.insert(token.clone()) {
            tokens.push(token.1);
        }
    }
    let unknown = content(&config.unk_token, END);
    let vocab: Vocab = pairs.vocab.into_iter().collect();
    let model = BPE::builder()
        .vocab_and_merges(vocab, pairs.merges)
        .end_of_word_suffix(SUFFIX.to_owned())
        .unk_token(unknown)
        .build()
        .map_err(failed)?;
    let mut inner = tokenizers::Tokenizer::new(model);
    let spaces = Replace::new(ReplacePattern::Regex(r"\s+".to_owned()), " ").map_err(failed)?;
    let normalizer = Normalizers::new(vec![NFC.into(), spaces.into(), Lowercase.into()]);
    inner.with_normalizer(Some(normalizer)).map_err(failed)?;
    let pieces = SplitPattern::Regex(PIECES.to_owned());
    let pieces = Split::new(pieces, SplitDelimiterBehavior::Removed, true).map_err(failed)?;
    let bytes = ByteLevel::new(false, true, true);
    inner.with_pre_tokenizer(Some(PreTokenizers::new(vec![pieces.into(), bytes.into()])));
    inner.add_tokens(tokens).map_err(failed)?;
    for (id, token) in &added {
        let found = inner.token_to_id(&token.content);
        if found != Some(*id) {
            return Err(error(format!(
                "the added token {} should have the id {id}, but the vocabulary gives it {}",
                token.content,
                found.map_or("none".to_owned(), |id| id.to_string())
            )));
        }
    }
    Ok(inner)
}
