//! Captions to token ids, through the `tokenizers` crate.

mod bert;
mod clip;
mod files;
mod t5;

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::json;

use super::DataError;
use crate::util::text::shortened;

const START: &str = "<|startoftext|>";
const END: &str = "<|endoftext|>";
const UNKNOWN: &str = "<|unk|>";
/// Characters of a text that an error shows.
const SHOWN: usize = 80;

/// A tokenizer of fixed sequence length: start token (CLIP's; T5 has none), words, end token, then padding (the padding
/// token of the files, or the end token where they name none).
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    origin: String,
    length: usize,
    start: Option<u32>,
    end: u32,
    padding: u32,
    unknown: Option<u32>,
    max_length: Option<usize>,
    /// The first id of each added token, and how many ids it stands for.
    added: BTreeMap<i32, usize>,
}

/// One token of a text, without those that mark start and end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    pub id: i32,
    /// Bytes of the text that it stands for; of a character of several tokens, each has the whole.
    pub bytes: std::ops::Range<usize>,
    /// Counts the words of the text; the pieces of a word have the same number.
    pub word: usize,
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
    /// The warning for the user; empty for a caption that fits.
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
        Self::new(&files::read(path)?, path.display().to_string(), length)
    }

    /// As [`Tokenizer::from_file`], from the file's content.
    ///
    /// # Errors
    /// Errors of [`Tokenizer::from_file`].
    pub fn from_json(json: &str, length: usize) -> Result<Self, DataError> {
        Self::new(json.as_bytes(), "from memory".into(), length)
    }

    /// Reads the tokenizer of a folder such as `tokenizer/` and `tokenizer_2/` of Stable Diffusion
    /// checkpoints: `tokenizer.json` where there is one, else `vocab.json` and `merges.txt`, with
    /// the special tokens of `tokenizer_config.json`, `special_tokens_map.json` and
    /// `added_tokens.json`. `length` is the sequence length with start and end token. Ids are those
    /// of `CLIPTokenizer` in transformers.
    ///
    /// # Errors
    /// [`DataError::TokenizerMissing`] for a folder without tokenizer; [`DataError::Io`];
    /// [`DataError::TokenizerLine`] for a malformed line; [`DataError::Tokenizer`] for files of
    /// more than 16 MiB, special tokens that the vocabulary lacks, and padding or truncation at the
    /// left; [`DataError::Option`] for a length below 3.
    pub fn from_dir(dir: &Path, length: usize) -> Result<Self, DataError> {
        let loaded = clip::load(dir)?;
        let origin = dir.display().to_string();
        let marks = (Some(loaded.start.as_str()), loaded.end.as_str());
        let mut tokenizer = Self::of(loaded.inner, origin, marks, length)?;
        if let Some(padding) = &loaded.padding {
            tokenizer.padding = tokenizer.id_of(padding)?;
        }
        tokenizer.max_length = loaded.max_length;
        Ok(tokenizer)
    }

    /// Reads T5's tokenizer: a `tokenizer.json` with a unigram model, a SentencePiece model such as `spiece.model`, or a
    /// folder with one of the two. `length` is the sequence length with the end token. Ids are those of `T5Tokenizer` in
    /// transformers.
    ///
    /// # Errors
    /// [`DataError::TokenizerMissing`] for a folder without tokenizer; [`DataError::Io`]; [`DataError::Tokenizer`] for
    /// files of more than 16 MiB and for other tokenizers; [`DataError::Option`] for a length below 3.
    pub fn t5_from_path(path: &Path, length: usize) -> Result<Self, DataError> {
        let file = match path.is_file() {
            true => path.to_owned(),
            false => t5::file_in(path)?,
        };
        let origin = file.display().to_string();
        let mut tokenizer = Self::of(t5::load(&file)?, origin, (None, t5::END), length)?;
        tokenizer.padding = tokenizer.id_of(t5::PADDING)?;
        tokenizer.unknown = tokenizer.inner.token_to_id(t5::UNKNOWN);
        Ok(tokenizer)
    }

    /// Reads BLIP's tokenizer, which is that of bert-base-uncased, from the `vocab.txt` of a folder. `length` is the sequence
    /// length with start and end token. Ids are those of `BertTokenizer` in transformers.
    ///
    /// # Errors
    /// [`DataError::TokenizerMissing`] for a folder without the file; [`DataError::Io`]; [`DataError::Tokenizer`] for a file
    /// of more than 16 MiB, and for other vocabularies; [`DataError::Option`] for a length below 3.
    pub fn blip_from_dir(dir: &Path, length: usize) -> Result<Self, DataError> {
        let origin = dir.display().to_string();
        let marks = (Some(bert::START), bert::END);
        let mut tokenizer = Self::of(bert::load(dir)?, origin, marks, length)?;
        tokenizer.padding = tokenizer.id_of(bert::PADDING)?;
        tokenizer.unknown = tokenizer.inner.token_to_id(bert::UNKNOWN);
        Ok(tokenizer)
    }

    fn new(bytes: &[u8], origin: String, length: usize) -> Result<Self, DataError> {
        let inner = from_bytes(bytes, &origin)?;
        Self::of(inner, origin, (Some(START), END), length)
    }

    /// A sequence begins and ends with the tokens `start` and `end`.
    fn of(
        mut inner: tokenizers::Tokenizer,
        origin: String,
        (start, end): (Option<&str>, &str),
        length: usize,
    ) -> Result<Self, DataError> {
        if length < 3 {
            return Err(DataError::Option {
                option: "max_sequence_length",
                value: length.to_string(),
                expected: "at least 3: start, one word, end".into(),
            });
        }
        let padding = inner.get_padding().map(|padding| padding.pad_id);
        // Truncation and padding happen here, where dropped words can be named.
        inner.with_padding(None);
        inner
            .with_truncation(None)
            .map_err(|e| DataError::Tokenizer {
                origin: origin.clone(),
                message: e.to_string(),
            })?;
        let mut tokenizer = Self {
            unknown: inner.token_to_id(UNKNOWN),
            inner,
            origin,
            length,
            start: None,
            end: 0,
            padding: 0,
            max_length: None,
            added: BTreeMap::new(),
        };
        tokenizer.start = start.map(|start| tokenizer.id_of(start)).transpose()?;
        tokenizer.end = tokenizer.id_of(end)?;
        tokenizer.padding = padding.unwrap_or(tokenizer.end);
        let largest = tokenizer.largest_id();
        if i32::try_from(largest).is_err() {
            return Err(
                tokenizer.error(format!("token id {largest} does not fit 32 bits with sign"))
            );
        }
        Ok(tokenizer)
    }

    fn error(&self, message: String) -> DataError {
        DataError::Tokenizer {
            origin: self.origin.clone(),
            message,
        }
    }

    fn id_of(&self, token: &str) -> Result<u32, DataError> {
        let id = self.inner.token_to_id(token);
        id.ok_or_else(|| self.error(format!("it has no token {token}")))
    }

    fn largest_id(&self) -> u32 {
        let largest = self.inner.get_vocab(true).into_values().max();
        largest.unwrap_or(0).max(self.padding)
    }

    /// Sequence length, start and end tokens included.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Tokens of a sequence before the words: the start token, if there is one.
    pub fn before(&self) -> usize {
        usize::from(self.start.is_some())
    }

    /// Tokens of a sequence without start and end.
    pub fn room(&self) -> usize {
        self.length - 1 - self.before()
    }

    /// Longest sequence that the files allow (77 for CLIP), where they say so.
    pub fn max_length(&self) -> Option<usize> {
        self.max_length
    }

    /// One more than the largest token id: rows that an embedding table needs.
    pub fn vocabulary_size(&self) -> usize {
        self.largest_id() as usize + 1
    }

    /// Id of the end token, at whose first place CLIP pools.
    pub fn end_id(&self) -> i32 {
        self.end as i32
    }

    /// Adds a token that stands for `count` ids, one after the other and behind all others; gives the first of them. As
    /// in diffusers' `load_textual_inversion`, it is found anywhere in a text, in upper or lower case, and `token_1` is
    /// its second id alone.
    ///
    /// # Errors
    /// [`DataError::Tokenizer`] for an empty token, and for one that the vocabulary has.
    pub fn add_token(&mut self, token: &str, count: usize) -> Result<i32, DataError> {
        let token = token.trim();
        let names: Vec<String> = (0..count)
            .map(|index| match index {
                0 => token.to_owned(),
                _ => format!("{token}_{index}"),
            })
            .collect();
        if token.is_empty() {
            return Err(self.error("an added token is empty".to_owned()));
        }
        if let Some(known) = names.iter().find(|n| self.inner.token_to_id(n).is_some()) {
            return Err(self.error(format!(
                "the vocabulary has the token {known}: choose another token"
            )));
        }
        let tokens: Vec<_> = names
            .iter()
            .map(|name| tokenizers::AddedToken::from(name.as_str(), false))
            .collect();
        self.inner
            .add_tokens(tokens)
            .map_err(|e| self.error(format!("cannot add the token {token}: {e}")))?;
        let first = self.id_of(token)? as i32;
        self.added.insert(first, count);
        Ok(first)
    }

    /// How many ids follow one another where a text has the token of `id`: more than one for the first id of an added
    /// token.
    pub fn ids_of_token(&self, id: i32) -> usize {
        self.added.get(&id).copied().unwrap_or(1)
    }

    /// The tokens of a text, all of them, without start and end token.
    ///
    /// # Errors
    /// [`DataError::Tokenizer`] if the tokenizer's model refuses the text.
    pub fn pieces(&self, text: &str) -> Result<Vec<Piece>, DataError> {
        let encoding = self.inner.encode(text, false).map_err(|e| {
            let shown = shortened(text, SHOWN);
            self.error(format!("cannot encode \"{shown}\": {e}"))
        })?;
        let pieces = encoding
            .get_ids()
            .iter()
            .zip(encoding.get_offsets())
            .zip(encoding.get_word_ids());
        Ok(pieces
            .flat_map(|((&id, &(from, to)), word)| {
                let id = id as i32;
                let ids = id..id + self.ids_of_token(id) as i32;
                ids.map(move |id| Piece {
                    id,
                    bytes: from..to,
                    word: word.unwrap_or(0) as usize,
                })
            })
            .collect())
    }

    /// `length` ids: the start token, the first of `ids` that there is room for, the end token, padding.
    pub fn lay_out(&self, ids: impl IntoIterator<Item = i32>) -> Vec<i32> {
        let mut all = Vec::with_capacity(self.length);
        all.extend(self.start.map(|start| start as i32));
        all.extend(ids.into_iter().take(self.room()));
        all.push(self.end as i32);
        all.resize(self.length, self.padding as i32);
        all
    }

    /// Token ids of a caption; the empty caption is start, end and padding.
    ///
    /// # Errors
    /// Errors of [`Tokenizer::pieces`].
    pub fn encode(&self, caption: &str) -> Result<Encoded, DataError> {
        let pieces = self.pieces(caption)?;
        let dropped = words(caption, pieces.iter().skip(self.room()));
        Ok(Encoded {
            ids: self.lay_out(pieces.iter().map(|piece| piece.id)),
            unknown: self.unknown_words(caption, &pieces),
            dropped,
        })
    }

    /// The words of a text that the vocabulary lacks, in order.
    pub fn unknown_words(&self, text: &str, pieces: &[Piece]) -> Vec<String> {
        let unknown = |piece: &&Piece| Some(piece.id as u32) == self.unknown;
        words(text, pieces.iter().filter(unknown))
    }
}

/// The text of pieces, those of one word put together.
fn words<'a>(text: &str, pieces: impl IntoIterator<Item = &'a Piece>) -> Vec<String> {
    let mut ranges: Vec<(usize, std::ops::Range<usize>)> = Vec::new();
    for piece in pieces {
        match ranges.last_mut() {
            Some((word, range)) if *word == piece.word => range.end = piece.bytes.end,
            _ => ranges.push((piece.word, piece.bytes.clone())),
        }
    }
    ranges
        .into_iter()
        .map(|(_, range)| text.get(range).unwrap_or_default().to_owned())
        .collect()
}

/// Checks a `tokenizer.json` and hands it to the `tokenizers` crate.
fn from_bytes(bytes: &[u8], origin: &str) -> Result<tokenizers::Tokenizer, DataError> {
    let error = |message| DataError::Tokenizer {
        origin: origin.to_owned(),
        message,
    };
    files::Document::parse(bytes).map_err(error)?;
    tokenizers::Tokenizer::from_bytes(bytes)
        .map_err(|e| error(format!("not a tokenizer.json: {e}")))
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
        let dataset = Shapes::new(ShapesOptions::default()).unwrap();
        let captions = dataset.vocabulary_captions();
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
        let captions: Vec<String> = (0..300)
            .map(|i| dataset.get(i).captions.remove(0))
            .collect();
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
    fn an_added_token_stands_for_all_of_its_ids() {
        let mut tokenizer = shapes_tokenizer(9);
        let size = tokenizer.vocabulary_size() as i32;
        assert_eq!(tokenizer.add_token("<My-Cat>", 3).unwrap(), size);
        assert_eq!(tokenizer.add_token("solo", 1).unwrap(), size + 3);
        let a = tokenizer.pieces("a").unwrap()[0].id;
        let ids = tokenizer.encode("a <my-cat> A solo<my-cat>_1").unwrap().ids;
        let cat = [size, size + 1, size + 2];
        assert_eq!(
            ids[1..8],
            [&[a], &cat[..], &[a, size + 3, size + 1]].concat()
        );
        let dropped = tokenizer.encode("a a a a a a <my-cat>").unwrap().dropped;
        assert_eq!(dropped, ["<my-cat>"]);
        for (token, expected) in [
            (" ", "an added token is empty"),
            ("circle", "the vocabulary has the token circle"),
            ("<My-Cat>", "the vocabulary has the token <My-Cat>"),
        ] {
            let error = tokenizer.add_token(token, 2).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
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
