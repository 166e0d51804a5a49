//! The files of a tokenizer, read and checked before anything is built of them.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::Read;
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokenizers::AddedToken;

use super::DataError;
use crate::util::files;

/// Largest file that is read; CLIP's `tokenizer.json` has 2 MiB, its `vocab.json` 1 MiB.
const MAX_FILE_BYTES: u64 = 16 << 20;
/// File names that an error lists.
const LISTED: usize = 12;

/// The content of a file.
///
/// # Errors
/// [`DataError::Io`]; [`DataError::Tokenizer`] for a file of more than 16 MiB.
pub fn read(path: &Path) -> Result<Vec<u8>, DataError> {
    let mut bytes = Vec::new();
    files::open(path)
        .and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes))
        .map_err(|source| DataError::Io {
            action: "read the tokenizer",
            path: path.to_owned(),
            source,
        })?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(DataError::Tokenizer {
            origin: path.display().to_string(),
            message: format!("larger than {} MiB", MAX_FILE_BYTES >> 20),
        });
    }
    Ok(bytes)
}

/// The value of a JSON file.
///
/// # Errors
/// Errors of [`read`], and [`DataError::TokenizerLine`].
pub fn json<T: DeserializeOwned>(path: &Path) -> Result<T, DataError> {
    serde_json::from_slice(&read(path)?).map_err(|e| DataError::TokenizerLine {
        path: path.to_owned(),
        line: e.line(),
        message: e.to_string(),
    })
}

/// The value of a JSON file that may be absent.
///
/// # Errors
/// Errors of [`json`].
pub fn optional_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, DataError> {
    path.is_file().then(|| json(path)).transpose()
}

/// A token with its options, as transformers and `tokenizer.json` write it.
#[derive(Clone, Debug, Deserialize)]
pub struct Token {
    pub content: String,
    #[serde(default)]
    pub single_word: bool,
    #[serde(default)]
    pub lstrip: bool,
    #[serde(default)]
    pub rstrip: bool,
    /// Absent: the opposite of `special`.
    pub normalized: Option<bool>,
    #[serde(default)]
    pub special: bool,
}

impl From<Token> for AddedToken {
    fn from(token: Token) -> Self {
        AddedToken::from(token.content, token.special)
            .single_word(token.single_word)
            .lstrip(token.lstrip)
            .rstrip(token.rstrip)
            .normalized(token.normalized.unwrap_or(!token.special))
    }
}

/// Tokens and merges of a byte pair encoding; both sides and the join of every merge are tokens.
pub struct Pairs {
    pub vocab: HashMap<String, u32>,
    pub merges: Vec<(String, String)>,
}

impl Pairs {
    /// Reads `vocab.json` and `merges.txt`.
    ///
    /// # Errors
    /// Errors of [`read`]; [`DataError::TokenizerLine`] for a line that is not what it should be.
    pub fn read(vocab: &Path, merges: &Path) -> Result<Self, DataError> {
        let path = merges;
        let mut pairs = Self {
            vocab: json(vocab)?,
            merges: Vec::new(),
        };
        for (number, line) in read(path)?.split_inclusive(|b| *b == b'\n').enumerate() {
            let error = |message: String| DataError::TokenizerLine {
                path: path.to_owned(),
                line: number + 1,
                message,
            };
            let line = std::str::from_utf8(line).map_err(|e| error(format!("not UTF-8: {e}")))?;
            let line = line.strip_suffix('\n').unwrap_or(line);
            let line = line.strip_suffix('\r').unwrap_or(line);
            if line.starts_with("#version") {
                continue;
            }
            let pair = line.split_once(' ').filter(|(_, b)| !b.contains(' '));
            let (a, b) = pair.ok_or_else(|| {
                let found: String = line.chars().take(40).flat_map(char::escape_debug).collect();
                error(format!(
                    "expected two tokens with one space between, found `{found}`"
                ))
            })?;
            pairs.check(a, b).map_err(error)?;
            pairs.merges.push((a.to_owned(), b.to_owned()));
        }
        Ok(pairs)
    }

    /// Says which token of a merge is missing: the `tokenizers` crate relies on there being none.
    fn check(&self, a: &str, b: &str) -> Result<(), String> {
        let missing = [a.to_owned(), b.to_owned(), format!("{a}{b}")]
            .into_iter()
            .find(|token| !self.vocab.contains_key(token));
        missing.map_or(Ok(()), |token| {
            Err(format!(
                "the merge `{a} {b}` needs the token `{token}`, which the vocabulary lacks"
            ))
        })
    }
}

/// The fields of a `tokenizer.json` that are read here.
pub struct Document {
    pub pairs: Pairs,
    pub suffix: Option<String>,
    pub added: BTreeMap<u32, Token>,
}

#[derive(Deserialize)]
struct DocumentJson {
    model: ModelJson,
    #[serde(default)]
    added_tokens: Vec<AddedJson>,
}

#[derive(Deserialize)]
struct ModelJson {
    vocab: HashMap<String, u32>,
    #[serde(default)]
    merges: Vec<MergeJson>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum MergeJson {
    Line(String),
    Pair(String, String),
}

#[derive(Deserialize)]
struct AddedJson {
    id: u32,
    #[serde(flatten)]
    token: Token,
}

impl Document {
    /// Reads a `tokenizer.json` whose vocabulary is a map from tokens to ids.
    ///
    /// # Errors
    /// A description of the problem.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let json: DocumentJson =
            serde_json::from_slice(bytes).map_err(|e| format!("not a tokenizer.json: {e}"))?;
        let model = json.model;
        let prefix = model.continuing_subword_prefix.unwrap_or_default();
        if !prefix.is_empty() {
            return Err(format!(
                "continuing_subword_prefix `{prefix}` is not supported"
            ));
        }
        let mut pairs = Pairs {
            vocab: model.vocab,
            merges: Vec::with_capacity(model.merges.len()),
        };
        for (number, merge) in model.merges.into_iter().enumerate() {
            let merge = match merge {
                MergeJson::Pair(a, b) => Some((a, b)),
                MergeJson::Line(line) => line
                    .split_once(' ')
                    .filter(|(_, b)| !b.contains(' '))
                    .map(|(a, b)| (a.to_owned(), b.to_owned())),
            };
            let (a, b) = merge.ok_or_else(|| format!("merge {number} is not two tokens"))?;
            pairs.check(&a, &b)?;
            pairs.merges.push((a, b));
        }
        let added = json.added_tokens.into_iter().map(|a| (a.id, a.token));
        Ok(Self {
            pairs,
            suffix: model.end_of_word_suffix,
            added: added.collect(),
        })
    }
}

/// The error for a folder without tokenizer.
pub fn missing(dir: &Path, expected: &'static str, source_of_it: &'static str) -> DataError {
    let entries = fs::read_dir(dir);
    let found = match entries {
        Err(e) => format!("the folder cannot be read: {e}"),
        Ok(entries) => {
            let mut names: Vec<String> = entries
                .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
                .collect();
            names.sort();
            match names.len() {
                0 => "the folder is empty".into(),
                count if count > LISTED => {
                    format!(
                        "found {} and {} more",
                        names[..LISTED].join(", "),
                        count - LISTED
                    )
                }
                _ => format!("found {}", names.join(", ")),
            }
        }
    };
    DataError::TokenizerMissing {
        dir: dir.to_owned(),
        expected,
        found,
        source_of_it,
    }
}
