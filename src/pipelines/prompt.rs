//! Prompts as people write them: weights in brackets, and texts longer than an encoder's sequence.
//!
//! A weighted prompt is cut into parts ([`parse_weighted`]), its tokens are laid out in chunks of the
//! tokenizer's length ([`encode_prompt`]), prompts of one image get as many chunks as the
//! longest of them ([`align_chunks`]), and the weights act on the encoder's output for the chunks
//! ([`apply_weights`]).

mod lora_tag;

use crate::data::{DataError, Encoded, Tokenizer};
use crate::util::named;

pub use lora_tag::{LoraTag, split_lora_tags};

/// The factor of a pair of round brackets, and the divisor of a pair of square ones.
const BRACKET: f64 = 1.1;
/// Starts a new chunk where it stands as a word.
const BREAK: &str = "BREAK";
/// When a chunk is full, what follows its last comma moves to the next chunk, if that is no more
/// than this many tokens; the default of web interfaces.
const COMMA_BACKTRACK: usize = 20;
/// Longest prompt in bytes: more than anybody writes, little enough for steps of quadratic cost.
const MAX_PROMPT_BYTES: usize = 1 << 14;

/// A problem of a prompt.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    #[error(
        "prompt weight `{weight}` is not a number: expected one such as 1.3 in (word:1.3); write \\( and \\) for \
         brackets that are part of the text"
    )]
    Weight { weight: String },
    #[error(
        "the brackets around `{text}` multiply to a weight that is not finite: write fewer of them"
    )]
    Infinite { text: String },
    #[error(
        "`{text}` would change the prompt from step to step, which is not here; write \\[ and \\] for brackets that are \
         part of the text, or set prompt_syntax=plain"
    )]
    Editing { text: String },
    #[error("`{tag}` is not a LoRA: expected <lora:name> or <lora:name:0.8>, with one number")]
    Lora { tag: String },
    #[error("the prompt has {bytes} bytes, more than {MAX_PROMPT_BYTES}")]
    TooLong { bytes: usize },
    #[error(
        "hidden states of {hidden} values do not belong to {weights} weights in chunks of {length} tokens"
    )]
    HiddenStates {
        hidden: usize,
        weights: usize,
        length: usize,
    },
    #[error(transparent)]
    Tokenizer(#[from] DataError),
}

named! {
    /// How a prompt is read.
    pub enum PromptSyntax {
        /// `(word:1.2)`, `[word]`, `BREAK`, and as many chunks as the prompt needs, as web interfaces read it.
        Weighted = "weighted",
        /// Brackets are text, and what is longer than the encoder's sequence is dropped, as diffusers does it.
        Plain = "plain",
    }
}

/// A part of a weighted prompt.
#[derive(Clone, Debug, PartialEq)]
pub enum PromptPart {
    Text {
        text: String,
        weight: f64,
    },
    /// The next part starts a new chunk.
    Break,
}

impl PromptPart {
    fn text(text: &str) -> Self {
        Self::Text {
            text: text.to_owned(),
            weight: 1.0,
        }
    }
}

/// Reads a weighted prompt.
///
/// `(text)` has the weight 1.1, `[text]` 1/1.1, `(text:1.3)` 1.3, `(text:-1)` -1; brackets nest and
/// their weights multiply. `\(`, `\)`, `\[`, `\]` and `\\` are these characters; any other backslash
/// disappears. A bracket that is never closed reaches to the end; one that was never opened is text. Prompt editing,
/// `[red:blue:0.5]` and `[red|blue]`, is refused.
/// The word `BREAK` and the white space around it start a new chunk, inside brackets as well.
/// Neighbours of equal weight become one part, and a prompt always has at least one part.
///
/// These are the rules of AUTOMATIC1111's web interface, except that there a `BREAK` inside brackets
/// is text.
///
/// # Errors
/// [`PromptError::Weight`], [`PromptError::Editing`], [`PromptError::Infinite`], [`PromptError::TooLong`].
pub fn parse_weighted(prompt: &str) -> Result<Vec<PromptPart>, PromptError> {
    if prompt.len() > MAX_PROMPT_BYTES {
        let bytes = prompt.len();
        return Err(PromptError::TooLong { bytes });
    }
    let mut parts: Vec<PromptPart> = Vec::new();
    // The first part of each open bracket, and for square ones the byte that they stand at.
    let (mut round, mut square) = (Vec::new(), Vec::new());
    let mut rest = prompt;
    while let Some(first) = rest.chars().next() {
        let mut taken = first.len_utf8();
        match first {
            '\\' => {
                let escaped = rest[1..].starts_with(['(', ')', '[', ']', '\\']);
                taken += usize::from(escaped);
                parts.push(PromptPart::text(&rest[1..taken]));
            }
            '(' => round.push(parts.len()),
            '[' => square.push((parts.len(), prompt.len() - rest.len())),
            ')' => match round.pop() {
                Some(start) => multiply(&mut parts[start..], BRACKET),
                None => parts.push(PromptPart::text(")")),
            },
            ']' => match square.pop() {
                Some((start, open)) => {
                    check_editing(&prompt[open..=prompt.len() - rest.len()])?;
                    multiply(&mut parts[start..], 1.0 / BRACKET);
                }
                None => parts.push(PromptPart::text("]")),
            },
            ':' => match closing_weight(rest) {
                None => parts.push(PromptPart::text(":")),
                Some((number, length)) => {
                    taken = length;
                    match round.pop() {
                        Some(start) => multiply(&mut parts[start..], weight(number)?),
                        None => parts.push(PromptPart::text(&rest[..length])),
                    }
                }
            },
            _ => {
                taken = rest
                    .find(['\\', '(', ')', '[', ']', ':'])
                    .unwrap_or(rest.len());
                split_at_breaks(&rest[..taken], &mut parts);
            }
        }
        rest = &rest[taken..];
    }
    for start in round {
        multiply(&mut parts[start..], BRACKET);
    }
    for (start, _) in square {
        multiply(&mut parts[start..], 1.0 / BRACKET);
    }
    joined(parts)
}

fn multiply(parts: &mut [PromptPart], factor: f64) {
    for part in parts {
        match part {
            PromptPart::Text { weight, .. } => *weight *= factor,
            PromptPart::Break => {}
        }
    }
}

/// Refuses `[red:blue:0.5]`, which changes the text after a share of the steps, and `[red|blue]`, which changes it in
/// every step.
fn check_editing(bracket: &str) -> Result<(), PromptError> {
    let inside = bracket.trim_start_matches('[').trim_end_matches(']');
    let number = inside.rsplit_once(':').map(|(_, number)| number.trim());
    let is_timed = number.is_some_and(|number| number.parse::<f64>().is_ok());
    match is_timed || inside.contains('|') {
        true => Err(PromptError::Editing {
            text: bracket.to_owned(),
        }),
        false => Ok(()),
    }
}

/// The number of a text that starts as `: number )`, and the length of the whole.
fn closing_weight(text: &str) -> Option<(&str, usize)> {
    let after_colon = text.strip_prefix(':')?.trim_start();
    let sign = usize::from(after_colon.starts_with(['+', '-']));
    let digits = after_colon[sign..].find(|c: char| c != '.' && !c.is_ascii_digit())?;
    let number = &after_colon[..sign + digits];
    let after = after_colon[number.len()..].trim_start().strip_prefix(')')?;
    (digits > 0).then_some((number, text.len() - after.len()))
}

fn weight(number: &str) -> Result<f64, PromptError> {
    let weight: Option<f64> = number.parse().ok().filter(|w: &f64| w.is_finite());
    weight.ok_or_else(|| PromptError::Weight {
        weight: number.to_owned(),
    })
}

/// Appends a text without brackets, cut where `BREAK` stands as a word.
fn split_at_breaks(text: &str, parts: &mut Vec<PromptPart>) {
    let of_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut from = 0;
    for (at, _) in text.match_indices(BREAK) {
        let end = at + BREAK.len();
        if text[..at].ends_with(of_word) || text[end..].starts_with(of_word) {
            continue;
        }
        parts.push(PromptPart::text(text[from..at].trim_end()));
        parts.push(PromptPart::Break);
        from = text.len() - text[end..].trim_start().len();
    }
    parts.push(PromptPart::text(&text[from..]));
}

/// Joins neighbours of equal weight, then leaves out empty ones; in this order, because an empty one
/// of another weight keeps its neighbours apart.
fn joined(parts: Vec<PromptPart>) -> Result<Vec<PromptPart>, PromptError> {
    let mut all: Vec<PromptPart> = Vec::new();
    for part in parts {
        match (all.last_mut(), part) {
            (
                Some(PromptPart::Text { text, weight }),
                PromptPart::Text {
                    text: more,
                    weight: same,
                },
            ) if *weight == same => text.push_str(&more),
            (_, part) => all.push(part),
        }
    }
    all.retain(|part| !matches!(part, PromptPart::Text { text, .. } if text.is_empty()));
    if all.is_empty() {
        all.push(PromptPart::text(""));
    }
    let infinite = |part: &PromptPart| match part {
        PromptPart::Text { text, weight } if !(*weight as f32).is_finite() => Some(text.clone()),
        _ => None,
    };
    match all.iter().find_map(infinite) {
        None => Ok(all),
        Some(text) => Err(PromptError::Infinite { text }),
    }
}

/// One sequence of an encoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Chunk {
    /// As many ids as the tokenizer's length: start, tokens, end, padding.
    pub ids: Vec<i32>,
    /// The weight of each of them; 1 for start, end and padding.
    pub weights: Vec<f32>,
}

/// A prompt for one encoder.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptTokens {
    /// At least one.
    pub chunks: Vec<Chunk>,
    /// Messages about the parts of the prompt that were cut off or are unknown to the tokenizer.
    pub warnings: Vec<String>,
    empty: Chunk,
}

impl PromptTokens {
    /// The ids of all chunks, `chunks x length`.
    pub fn ids(&self) -> Vec<i32> {
        self.chunks
            .iter()
            .flat_map(|chunk| &chunk.ids)
            .copied()
            .collect()
    }

    /// The weights of all chunks, `chunks x length`.
    pub fn weights(&self) -> Vec<f32> {
        self.chunks
            .iter()
            .flat_map(|chunk| &chunk.weights)
            .copied()
            .collect()
    }
}

/// Lays the tokens of a prompt out for an encoder.
///
/// [`PromptSyntax::Plain`] gives one chunk, that of [`Tokenizer::encode`]. [`PromptSyntax::Weighted`] fills chunk after
/// chunk; `BREAK` ends one early, and so does the last comma of a chunk if no more than 20 tokens follow it; an added
/// token of several ids is not split; LoRAs are left out. A weighted prompt without brackets that fits into one chunk
/// has the ids of the plain one.
///
/// # Errors
/// Errors of [`parse_weighted`] and [`Tokenizer::encode`].
pub fn encode_prompt(
    tokenizer: &Tokenizer,
    prompt: &str,
    syntax: PromptSyntax,
) -> Result<PromptTokens, PromptError> {
    let mut layout = Layout::new(tokenizer)?;
    let empty = layout.chunk(&[], &[]);
    let (chunks, encoded) = match syntax {
        PromptSyntax::Plain => {
            let encoded = tokenizer.encode(prompt)?;
            let weights = empty.weights.clone();
            let ids = encoded.ids.clone();
            (vec![Chunk { ids, weights }], encoded)
        }
        PromptSyntax::Weighted => {
            let mut unknown = Vec::new();
            let (text, _) = split_lora_tags(prompt)?;
            for part in parse_weighted(&text)? {
                match part {
                    PromptPart::Break => layout.finish(),
                    PromptPart::Text { text, weight } => {
                        let pieces = tokenizer.pieces(&text)?;
                        unknown.extend(tokenizer.unknown_words(&text, &pieces));
                        for piece in pieces {
                            layout.make_room(tokenizer.ids_of_token(piece.id));
                            layout.push(piece.id, weight as f32);
                        }
                    }
                }
            }
            if !layout.ids.is_empty() || layout.chunks.is_empty() {
                layout.finish();
            }
            let encoded = Encoded {
                ids: Vec::new(),
                unknown,
                dropped: Vec::new(),
            };
            (layout.chunks, encoded)
        }
    };
    Ok(PromptTokens {
        chunks,
        warnings: encoded.warnings(),
        empty,
    })
}

/// Chunks in the making.
struct Layout<'a> {
    tokenizer: &'a Tokenizer,
    /// The token of a comma that is a word of its own, where the vocabulary has one.
    comma: Option<i32>,
    chunks: Vec<Chunk>,
    /// Tokens of the last chunk, without start and end.
    ids: Vec<i32>,
    weights: Vec<f32>,
    last_comma: Option<usize>,
}

impl<'a> Layout<'a> {
    fn new(tokenizer: &'a Tokenizer) -> Result<Self, DataError> {
        let comma = match tokenizer.pieces(",")?.as_slice() {
            [piece] => Some(piece.id),
            _ => None,
        };
        Ok(Self {
            tokenizer,
            comma,
            chunks: Vec::new(),
            ids: Vec::new(),
            weights: Vec::new(),
            last_comma: None,
        })
    }

    fn chunk(&self, ids: &[i32], weights: &[f32]) -> Chunk {
        let mut all = vec![1.0; self.tokenizer.length()];
        let before = self.tokenizer.before();
        all[before..before + weights.len()].copy_from_slice(weights);
        Chunk {
            ids: self.tokenizer.lay_out(ids.iter().copied()),
            weights: all,
        }
    }

    fn finish(&mut self) {
        let chunk = self.chunk(&self.ids, &self.weights);
        self.chunks.push(chunk);
        self.ids.clear();
        self.weights.clear();
        self.last_comma = None;
    }

    /// Ends the chunk if the next `count` ids, which belong together, fit into a new one only.
    fn make_room(&mut self, count: usize) {
        let room = self.tokenizer.room();
        if count > 1 && count <= room && self.ids.len() + count > room {
            self.finish();
        }
    }

    fn push(&mut self, id: i32, weight: f32) {
        let room = self.tokenizer.room();
        if Some(id) == self.comma {
            self.last_comma = Some(self.ids.len());
        } else if let Some(comma) = self.last_comma
            && self.ids.len() == room
            && room - comma <= COMMA_BACKTRACK
        {
            let ids = self.ids.split_off(comma + 1);
            let weights = self.weights.split_off(comma + 1);
            self.finish();
            (self.ids, self.weights) = (ids, weights);
        }
        if self.ids.len() == room {
            self.finish();
        }
        self.ids.push(id);
        self.weights.push(weight);
    }
}

/// Appends empty chunks to the shorter prompts, so that all have as many as the longest; returns how
/// many that is. Prompts that go together are the prompt and the negative prompt of an image, and
/// those of every encoder of the model.
pub fn align_chunks(prompts: &mut [&mut PromptTokens]) -> usize {
    let most = prompts.iter().map(|prompt| prompt.chunks.len()).max();
    let most = most.unwrap_or(0);
    for prompt in prompts {
        let empty = prompt.empty.clone();
        prompt.chunks.resize(most, empty);
    }
    most
}

/// Applies the weights of chunks to the hidden states that an encoder computed from them.
///
/// With `h[t][f]` feature `f` of token `t` of a chunk, `w[t]` the token's weight, and means over all
/// tokens and features of the chunk, the result is `w[t] * h[t][f] * mean(h) / mean(w * h)`: what
/// AUTOMATIC1111's web interface calls the original emphasis. Where one of the means is zero, or
/// their quotient not finite, nothing is scaled back. A chunk of weights 1 keeps every bit. Pooled
/// outputs have no weights.
///
/// `hidden` is `[chunks, length, features]`, `weights` is `[chunks, length]`.
///
/// # Errors
/// [`PromptError::HiddenStates`] where the sizes do not fit together.
pub fn apply_weights(
    hidden: &mut [f32],
    weights: &[f32],
    length: usize,
) -> Result<(), PromptError> {
    let fits = length > 0
        && weights.len().is_multiple_of(length)
        && (weights.is_empty() == hidden.is_empty())
        && hidden.len().checked_rem(weights.len()).unwrap_or(0) == 0;
    if !fits {
        return Err(PromptError::HiddenStates {
            hidden: hidden.len(),
            weights: weights.len(),
            length,
        });
    }
    let Some(features) = hidden.len().checked_div(weights.len()) else {
        return Ok(());
    };
    let chunks = hidden.chunks_exact_mut(length * features);
    for (hidden, weights) in chunks.zip(weights.chunks_exact(length)) {
        if weights.iter().all(|weight| *weight == 1.0) {
            continue;
        }
        let sum = |token: &[f32]| token.iter().map(|v| f64::from(*v)).sum::<f64>();
        let (mut before, mut after) = (0.0, 0.0);
        for (token, weight) in hidden.chunks_exact(features).zip(weights) {
            let sum = sum(token);
            before += sum;
            after += sum * f64::from(*weight);
        }
        let scale = Some(before / after).filter(|s| s.is_finite() && *s != 0.0);
        let scale = scale.unwrap_or(1.0);
        for (token, weight) in hidden.chunks_exact_mut(features).zip(weights) {
            let factor = f64::from(*weight) * scale;
            token
                .iter_mut()
                .for_each(|v| *v = (f64::from(*v) * factor) as f32);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
