//! Which captions a dataset has, and the words that it says them with.

use super::{Caption, DataError, ShapeWords};
use crate::util::named;

named! {
    /// A word of captions that tells what a shape is: its colour or its kind.
    pub enum ShapeWord {
        Red = "red",
        Green = "green",
        Blue = "blue",
        Yellow = "yellow",
        Purple = "purple",
        Orange = "orange",
        Cyan = "cyan",
        Pink = "pink",
        Circle = "circle",
        Square = "square",
        Triangle = "triangle",
    }
}

impl ShapeWord {
    fn is_of(self, shape: &ShapeWords) -> bool {
        [shape.colour.name(), shape.kind.name()].contains(&self.name())
    }
}

/// The captions of a dataset by their words; all of them by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WordFilter {
    /// Words that no caption has.
    pub without: Vec<ShapeWord>,
    /// Words of which every caption has at least one; none of them asks for nothing.
    pub with: Vec<ShapeWord>,
}

impl WordFilter {
    pub fn admits(&self, caption: &Caption) -> bool {
        let shapes = caption.shapes();
        let has = |word: &ShapeWord| shapes.iter().any(|shape| word.is_of(shape));
        !self.without.iter().any(has) && (self.with.is_empty() || self.with.iter().any(has))
    }
}

/// Other words for some colours and kinds, such as the token of a thing that a model is to learn.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OtherWords(Vec<(ShapeWord, String)>);

impl OtherWords {
    /// # Errors
    /// [`DataError::Option`] for a word that is empty, has white space, is a word of captions already, or stands twice.
    pub fn new(words: Vec<(ShapeWord, String)>) -> Result<OtherWords, DataError> {
        for (at, (word, other)) in words.iter().enumerate() {
            let is_taken = |(_, taken): &(ShapeWord, String)| taken.eq_ignore_ascii_case(other);
            let expected = if other.is_empty() || other.contains(char::is_whitespace) {
                "one word"
            } else if is_word(other) {
                "a word that captions do not have yet"
            } else if words[..at].iter().any(is_taken) {
                "another word for each"
            } else if words[..at].iter().any(|(known, _)| known == word) {
                "each colour and kind once"
            } else {
                continue;
            };
            return Err(DataError::Option {
                option: "shapes_words",
                value: format!("{word}: {other}"),
                expected: expected.to_owned(),
            });
        }
        Ok(OtherWords(words))
    }

    /// The caption as a sentence.
    pub fn say(&self, caption: &Caption) -> String {
        self.translated(&caption.to_string(), |word, (own, other)| {
            (own.name() == word).then_some(other)
        })
    }

    /// Reads what [`OtherWords::say`] writes.
    ///
    /// # Errors
    /// As [`Caption::parse`].
    pub fn parse(&self, text: &str) -> Result<Caption, DataError> {
        Caption::parse(&self.translated(text, |word, (own, other)| {
            other.eq_ignore_ascii_case(word).then_some(own.name())
        }))
    }

    /// `text` with the words that `of` gives for those of an entry.
    fn translated<'a>(
        &'a self,
        text: &'a str,
        of: impl Fn(&str, &'a (ShapeWord, String)) -> Option<&'a str>,
    ) -> String {
        let word = |word: &'a str| {
            self.0
                .iter()
                .find_map(|entry| of(word, entry))
                .unwrap_or(word)
        };
        text.split_whitespace()
            .map(word)
            .collect::<Vec<_>>()
            .join(" ")
    }
}

/// Whether captions have the word.
fn is_word(text: &str) -> bool {
    let sentences = super::Shapes::sentences();
    let mut words = sentences.iter().flat_map(|sentence| sentence.split(' '));
    words.any(|word| word.eq_ignore_ascii_case(text))
}

#[cfg(test)]
mod tests {
    use super::super::{Colour, Kind};
    use super::*;

    #[test]
    fn words_are_those_of_colours_and_kinds() {
        let names: Vec<&str> = ShapeWord::ALL.map(ShapeWord::name).to_vec();
        let colours = Colour::ALL.map(Colour::name);
        assert_eq!(names, [&colours[..], &Kind::ALL.map(Kind::name)].concat());
    }

    #[test]
    fn captions_are_chosen_by_their_words() {
        let caption = |text| Caption::parse(text).unwrap();
        let both = caption("a small red circle above a large blue square on a white background");
        let one = caption("a large blue square on a white background");
        let admits = |without: &[ShapeWord], with: &[ShapeWord]| {
            let filter = WordFilter {
                without: without.to_vec(),
                with: with.to_vec(),
            };
            [&both, &one].map(|caption| filter.admits(caption))
        };
        assert_eq!(admits(&[], &[]), [true, true]);
        assert_eq!(admits(&[ShapeWord::Red], &[]), [false, true]);
        assert_eq!(
            admits(&[ShapeWord::Pink], &[ShapeWord::Circle]),
            [true, false]
        );
        assert_eq!(
            admits(&[], &[ShapeWord::Pink, ShapeWord::Square]),
            [true, true]
        );
        assert_eq!(
            admits(&[ShapeWord::Square], &[ShapeWord::Square]),
            [false, false]
        );
    }

    #[test]
    fn other_words_are_said_and_read_back() {
        let words = vec![(ShapeWord::Triangle, "<sks>".to_owned())];
        let words = OtherWords::new(words).unwrap();
        let text = "a small red <sks> above a large red square on a white background";
        let caption = words.parse(text).unwrap();
        assert_eq!(caption.first.kind, Kind::Triangle);
        assert_eq!(words.say(&caption), text);
        assert!(OtherWords::default().parse(text).is_err());
        let refused = |other: &[(ShapeWord, &str)]| {
            let words = other
                .iter()
                .map(|(word, other)| (*word, (*other).to_owned()));
            OtherWords::new(words.collect()).unwrap_err().to_string()
        };
        assert!(refused(&[(ShapeWord::Red, "a b")]).contains("one word"));
        assert!(refused(&[(ShapeWord::Red, "Background")]).contains("do not have yet"));
        let twice = [(ShapeWord::Red, "x"), (ShapeWord::Blue, "X")];
        assert!(refused(&twice).contains("another word for each"));
    }
}
