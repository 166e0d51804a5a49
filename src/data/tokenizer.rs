//! Captions to token ids, through the `tokenizers` crate.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::json;

use super::DataError;

const START: &str = "<|startoftext|>";
const END: &str = "<|endoftext|>";
const UNKNOWN: &str = "<|unk|>";
/// Largest tokenizer.json that is read; CLIP's has 2 MiB, T5's 3 MiB.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// A tokenizer of fixed sequence length in CLIP's layout: start token, words, end token, then
/// padding (the padding token of the file, or the end token where it names none).
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    origin: String,
    length: usize,
    start: u32,
    end: u32,
    padding: u32,
    unknown: Option<u32>,
}

/// One caption as token ids, and what of it did not survive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// `length` ids.
    pub ids: Vec<i32>,
    /// Words that the vocabulary lacks, in order.
    pub unknown: Vec<String>,
    /// Words cut off at the end because the caption is too long.
    pub dropped: Vec<String>,
}

impl Encoded {
    /// What to tell the user; empty for a caption that fits.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if !self.unknown.is_empty() {
            warnings.push(format!(
                "the tokenizer does not know {}: the model never saw such words",
                quoted(&self.unknown)
            ));
        }
        if !self.dropped.is_empty() {
            warnings.push(format!(
                "the prompt is longer than {} tokens: {} dropped",
                self.ids.len(),
                quoted(&self.dropped)
            ));
        }
        warnings
    }
}

fn quoted(words: &[String]) -> String {
    words
        .iter()
        .map(|word| format!("\"{word}\""))
        .collect::<Vec<_>>()
        .join(", ")
}

impl Tokenizer {
    /// Reads a `tokenizer.json` that has `<|startoftext|>` and `<|endoftext|>`, as CLIP's and
    /// those of [`word_level_json`] have; `length` is the sequence length with both of them.
    ///
    /// # Errors
    /// [`DataError::Io`] for a file that cannot be read, [`DataError::Tokenizer`] for one that is
    /// not such a tokenizer, [`DataError::Option`] for a length below 3.
    pub fn from_file(path: &Path, length: usize) -> Result<Self, DataError> {
        let mut bytes = Vec::new();
        File::open(path)
            .and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes))
            .map_err(|source| DataError::Io {
                action: "read the tokenizer",
                path: path.to_owned(),
                source,
            })?;
        let origin = path.display().to_string();
        if bytes.len() as u64 > MAX_FILE_BYTES {
            let message = format!("larger than {} MiB", MAX_FILE_BYTES >> 20);
            return Err(DataError::Tokenizer { origin, message });
        }
        Self::new(&bytes, origin, length)
    }

    /// As [`Tokenizer::from_file`], from the file's content.
    ///
    /// # Errors
    /// Those of [`Tokenizer::from_file`].
    pub fn from_json(json: &str, length: usize) -> Result<Self, DataError> {
        Self::new(json.as_bytes(), "from memory".into(), length)
    }

    fn new(bytes: &[u8], origin: String, length: usize) -> Result<Self, DataError> {
        if length < 3 {
            return Err(DataError::Option {
                option: "max_sequence_length",
                value: length.to_string(),
                expected: "at least 3: start, one word, end".into(),
            });
        }
        let error = |message: String| DataError::Tokenizer {
            origin: origin.clone(),
            message,
        };
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes)
            .map_err(|e| error(format!("not a tokenizer.json: {e}")))?;
        let special = |token: &str| {
            inner
                .token_to_id(token)
                .ok_or_else(|| error(format!("it has no token {token}")))
        };
        let (start, end) = (special(START)?, special(END)?);
        let padding = inner.get_padding().map_or(end, |padding| padding.pad_id);
        let unknown = inner.token_to_id(UNKNOWN);
        let largest = inner
            .get_vocab(true)
            .into_values()
            .max()
            .unwrap_or(0)
            .max(padding);
        if i32::try_from(largest).is_err() {
            return Err(error(format!(
                "token id {largest} does not fit 32 bits with sign"
            )));
        }
        // Truncation and padding happen here, where dropped words can be named.
        inner.with_padding(None);
        inner
            .with_truncation(None)
            .map_err(|e| error(e.to_string()))?;
        Ok(Self {
            inner,
            origin,
            length,
            start,
            end,
            padding,
            unknown,
        })
    }

    /// Sequence length, start and end tokens included.
    pub fn length(&self) -> usize {
        self.length
    }

    /// One more than the largest token id: rows that an embedding table needs.
    pub fn vocabulary_size(&self) -> usize {
        let largest = self.inner.get_vocab(true).into_values().max().unwrap_or(0);
        largest.max(self.padding) as usize + 1
    }

    /// Id of the end token, at whose first place CLIP pools.
    pub fn end_id(&self) -> i32 {
        self.end as i32
    }

    /// Token ids of a caption; the empty caption is start, end and padding.
    ///
    /// # Errors
    /// [`DataError::Tokenizer`] if the tokenizer's model refuses the text.
    pub fn encode(&self, caption: &str) -> Result<Encoded, DataError> {
        let encoding = self
            .inner
            .encode(caption, false)
            .map_err(|e| DataError::Tokenizer {
                origin: self.origin.clone(),
                message: format!("cannot encode \"{caption}\": {e}"),
            })?;
        let word = |&(from, to): &(usize, usize)| caption.get(from..to).unwrap_or("").to_owned();
        let (ids, offsets) = (encoding.get_ids(), encoding.get_offsets());
        let unknown = ids
            .iter()
            .zip(offsets)
            .filter(|(id, _)| Some(**id) == self.unknown)
            .map(|(_, offset)| word(offset))
            .collect();
        let room = self.length - 2;
        let dropped = offsets.iter().skip(room).map(word).collect();
        let mut all = Vec::with_capacity(self.length);
        all.push(self.start as i32);
        all.extend(ids.iter().take(room).map(|&id| id as i32));
        all.push(self.end as i32);
        all.resize(self.length, self.padding as i32);
        Ok(Encoded {
            ids: all,
            unknown,
            dropped,
        })
    }
}

/// A word-level `tokenizer.json` that knows every word of the captions: lower case, split at white
/// space and around punctuation; ids by falling frequency after the three special tokens.
///
/// # Errors
/// [`DataError::Tokenizer`] if the captions hold no word.
pub fn word_level_json<'a>(
    captions: impl IntoIterator<Item = &'a str>,
) -> Result<String, DataError> {
    let specials = [START, END, UNKNOWN];
    let document = |vocabulary: &serde_json::Map<String, serde_json::Value>| {
        let added: Vec<_> = specials
            .iter()
            .enumerate()
            .map(|(id, content)| {
                json!({
                    "id": id, "content": content, "single_word": false, "lstrip": false,
                    "rstrip": false, "normalized": false, "special": true
                })
            })
            .collect();
        json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added,
            "normalizer": {
                "type": "Sequence",
                "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]
            },
            "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": START, "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                    {"SpecialToken": {"id": END, "type_id": 0}}
                ],
                "pair": [
                    {"Sequence": {"id": "A", "type_id": 0}},
                    {"Sequence": {"id": "B", "type_id": 1}}
                ],
                "special_tokens": {
                    (START): {"id": START, "ids": [0], "tokens": [START]},
                    (END): {"id": END, "ids": [1], "tokens": [END]}
                }
            },
            "decoder": null,
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": UNKNOWN}
        })
    };
    let mut vocabulary: serde_json::Map<String, serde_json::Value> = specials
        .iter()
        .enumerate()
        .map(|(id, token)| ((*token).to_owned(), json!(id)))
        .collect();
    // The words are cut by the tokenizer that will use them, as yet without any: its rules are
    // then written down once.
    let cutter = Tokenizer::from_json(&document(&vocabulary).to_string(), 3)?;
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for caption in captions {
        let mut normalized = tokenizers::NormalizedString::from(caption);
        let error = |e: tokenizers::Error| DataError::Tokenizer {
            origin: "being built".into(),
            message: format!("cannot split \"{caption}\": {e}"),
        };
        if let Some(normalizer) = cutter.inner.get_normalizer() {
            tokenizers::Normalizer::normalize(normalizer, &mut normalized).map_err(error)?;
        }
        let mut pieces = tokenizers::PreTokenizedString::from(normalized);
        if let Some(pre_tokenizer) = cutter.inner.get_pre_tokenizer() {
            tokenizers::PreTokenizer::pre_tokenize(pre_tokenizer, &mut pieces).map_err(error)?;
        }
        for (word, _, _) in pieces.get_splits(
            tokenizers::OffsetReferential::Normalized,
            tokenizers::OffsetType::Byte,
        ) {
            *counts.entry(word.to_owned()).or_default() += 1;
        }
    }
    if counts.is_empty() {
        return Err(DataError::Tokenizer {
            origin: "being built".into(),
            message: "the captions hold no word".into(),
        });
    }
    let mut words: Vec<(String, usize)> = counts.into_iter().collect();
    words.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    for (word, _) in words {
        let id = vocabulary.len();
        vocabulary.entry(word).or_insert(json!(id));
    }
    Ok(format!("{:#}\n", document(&vocabulary)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Shapes, ShapesOptions};

    fn shapes_tokenizer(length: usize) -> Tokenizer {
        let captions = Shapes::vocabulary_captions();
        let json = word_level_json(captions.iter().map(String::as_str)).unwrap();
        Tokenizer::from_json(&json, length).unwrap()
    }

    #[test]
    fn shapes_captions_need_sixteen_tokens_and_no_unknown_word() {
        let tokenizer = shapes_tokenizer(16);
        // 3 special tokens; a, on, background, 2 sizes, 8 colours, 3 kinds, 3 backgrounds and the
        // relations' above, below, left, right, of.
        assert_eq!(tokenizer.vocabulary_size(), 3 + 3 + 2 + 8 + 3 + 3 + 5);
        let dataset = Shapes::new(ShapesOptions::default()).unwrap();
        let captions: Vec<String> = (0..300).map(|i| dataset.get(i).caption).collect();
        for caption in &captions {
            assert_eq!(
                tokenizer.encode(caption).unwrap().warnings(),
                Vec::<String>::new()
            );
        }
        let shorter = shapes_tokenizer(15);
        let dropped = |caption: &String| shorter.encode(caption).unwrap().dropped.len();
        assert_eq!(captions.iter().map(dropped).max(), Some(1));
    }

    #[test]
    fn layout_is_start_words_end_padding() {
        let json = word_level_json(["b a, a"]).unwrap();
        let tokenizer = Tokenizer::from_json(&json, 6).unwrap();
        // By frequency, then by name: a = 3, "," = 4, b = 5.
        assert_eq!(tokenizer.encode("A, B").unwrap().ids, [0, 3, 4, 5, 1, 1]);
        assert_eq!(tokenizer.encode("").unwrap().ids, [0, 1, 1, 1, 1, 1]);
        assert_eq!(tokenizer.end_id(), 1);
    }

    #[test]
    fn lost_words_are_named() {
        let tokenizer = shapes_tokenizer(6);
        let encoded = tokenizer
            .encode("a small Zebra circle on a white background")
            .unwrap();
        assert_eq!(encoded.ids.len(), 6);
        assert_eq!(encoded.unknown, ["Zebra"]);
        assert_eq!(encoded.dropped, ["on", "a", "white", "background"]);
        let warnings = encoded.warnings();
        assert!(warnings[0].contains("\"Zebra\""), "{warnings:?}");
        assert!(warnings[1].contains("6 tokens") && warnings[1].contains("\"white\""));
    }

    #[test]
    fn special_words_in_captions_do_not_shift_ids() {
        let json = word_level_json(["unk <|unk|> x"]).unwrap();
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(value["model"]["vocab"]["<|unk|>"], 2);
        let ids: Vec<u64> = value["model"]["vocab"]
            .as_object()
            .unwrap()
            .values()
            .map(|v| v.as_u64().unwrap())
            .collect();
        assert_eq!(ids, (0..ids.len() as u64).collect::<Vec<_>>());
    }

    #[test]
    fn what_is_no_tokenizer_is_refused() {
        let error = |json: &str| Tokenizer::from_json(json, 8).unwrap_err().to_string();
        assert!(error("{").contains("not a tokenizer.json"));
        assert!(error("[]").contains("not a tokenizer.json"));
        let json = word_level_json(["a"]).unwrap();
        assert!(error(&json.replace(START, "<s>")).contains(START));
        assert!(matches!(
            Tokenizer::from_json(&json, 2),
            Err(DataError::Option { .. })
        ));
        assert!(word_level_json([" "]).is_err());
        let path = Path::new("/nonexistent/tokenizer.json");
        assert!(
            Tokenizer::from_file(path, 8)
                .unwrap_err()
                .to_string()
                .contains("nonexistent")
        );
    }
}
