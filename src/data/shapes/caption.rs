//! Captions of images, and their grammar.

use std::fmt;

use super::DataError;
use super::KeyedRng;
use crate::util::hash::Sha256;

/// Colour of a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Colour {
    Red,
    Green,
    Blue,
    Yellow,
    Purple,
    Orange,
    Cyan,
    Pink,
}

impl Colour {
    pub const ALL: [Self; 8] = [
        Self::Red,
        Self::Green,
        Self::Blue,
        Self::Yellow,
        Self::Purple,
        Self::Orange,
        Self::Cyan,
        Self::Pink,
    ];

    /// The word in captions.
    pub fn name(self) -> &'static str {
        match self {
            Self::Red => "red",
            Self::Green => "green",
            Self::Blue => "blue",
            Self::Yellow => "yellow",
            Self::Purple => "purple",
            Self::Orange => "orange",
            Self::Cyan => "cyan",
            Self::Pink => "pink",
        }
    }

    /// sRGB.
    pub fn rgb(self) -> [u8; 3] {
        match self {
            Self::Red => [220, 20, 30],
            Self::Green => [20, 150, 40],
            Self::Blue => [20, 90, 230],
            Self::Yellow => [250, 220, 30],
            Self::Purple => [140, 30, 150],
            Self::Orange => [250, 130, 10],
            Self::Cyan => [30, 200, 220],
            Self::Pink => [250, 130, 190],
        }
    }
}

/// Colour behind the shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Background {
    White,
    Gray,
    Black,
}

impl Background {
    pub const ALL: [Self; 3] = [Self::White, Self::Gray, Self::Black];

    /// The word in captions.
    pub fn name(self) -> &'static str {
        match self {
            Self::White => "white",
            Self::Gray => "gray",
            Self::Black => "black",
        }
    }

    /// sRGB.
    pub fn rgb(self) -> [u8; 3] {
        match self {
            Self::White => [255; 3],
            Self::Gray => [128; 3],
            Self::Black => [0; 3],
        }
    }
}

/// Kind of a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    Circle,
    Square,
    Triangle,
}

impl Kind {
    pub const ALL: [Self; 3] = [Self::Circle, Self::Square, Self::Triangle];

    /// The word in captions.
    pub fn name(self) -> &'static str {
        match self {
            Self::Circle => "circle",
            Self::Square => "square",
            Self::Triangle => "triangle",
        }
    }

    /// Width and height of the bounding box in units of the diameter. A square is as wide as its
    /// circle: its corners, a fifth of its area, tell the two apart.
    pub(crate) fn extent(self) -> (f64, f64) {
        match self {
            Self::Circle => (1.0, 1.0),
            Self::Square => (1.0, 1.0),
            Self::Triangle => (1.06, 0.98),
        }
    }
}

/// Size of a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Size {
    Small,
    Large,
}

impl Size {
    pub const ALL: [Self; 2] = [Self::Small, Self::Large];

    /// The word in captions.
    pub fn name(self) -> &'static str {
        match self {
            Self::Small => "small",
            Self::Large => "large",
        }
    }

    /// Diameters, as a fraction of the image's side. Two large ones and a gap fit side by side.
    pub(super) fn diameters(self) -> (f64, f64) {
        match self {
            Self::Small => (8.0 / 32.0, 9.0 / 32.0),
            Self::Large => (12.0 / 32.0, 13.2 / 32.0),
        }
    }
}

/// Where the first shape of a caption is, seen from the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Relation {
    Above,
    Below,
    LeftOf,
    RightOf,
}

impl Relation {
    pub const ALL: [Self; 4] = [Self::Above, Self::Below, Self::LeftOf, Self::RightOf];

    /// The words in captions.
    pub fn name(self) -> &'static str {
        match self {
            Self::Above => "above",
            Self::Below => "below",
            Self::LeftOf => "left of",
            Self::RightOf => "right of",
        }
    }
}

/// A caption's description of one shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShapeWords {
    pub size: Size,
    pub colour: Colour,
    pub kind: Kind,
}

impl fmt::Display for ShapeWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (size, colour, kind) = (self.size.name(), self.colour.name(), self.kind.name());
        write!(f, "a {size} {colour} {kind}")
    }
}

/// A caption, understood. `Display` writes the sentence, [`Caption::parse`] reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Caption {
    pub first: ShapeWords,
    pub second: Option<(Relation, ShapeWords)>,
    pub background: Background,
}

impl fmt::Display for Caption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.first)?;
        if let Some((relation, second)) = &self.second {
            write!(f, " {} {second}", relation.name())?;
        }
        write!(f, " on a {} background", self.background.name())
    }
}

impl Caption {
    /// Reads a caption of this dataset; case and spacing do not matter.
    ///
    /// # Errors
    /// [`DataError::ShapesCaption`] names the sentence and the word that does not fit.
    pub fn parse(text: &str) -> Result<Self, DataError> {
        let lower = text.to_lowercase();
        let mut words = Words {
            caption: text,
            rest: lower.split_whitespace().collect(),
            at: 0,
        };
        let first = words.shape()?;
        let second = match words.peek() {
            Some("on") | None => None,
            Some(_) => {
                let relation = words.one_of(&Relation::ALL, Relation::name)?;
                Some((relation, words.shape()?))
            }
        };
        words.expect("on")?;
        words.expect("a")?;
        let background = words.one_of(&Background::ALL, Background::name)?;
        words.expect("background")?;
        match words.peek() {
            None => Ok(Self {
                first,
                second,
                background,
            }),
            Some(_) => Err(words.error("the end of the caption")),
        }
    }

    /// The shapes in the order of the sentence.
    pub fn shapes(&self) -> Vec<ShapeWords> {
        std::iter::once(self.first)
            .chain(self.second.map(|(_, words)| words))
            .collect()
    }

    /// The sentence of the same meaning whose relation is "above" or "left of".
    pub(super) fn canonical(&self) -> Self {
        let turned = |relation, second| Self {
            first: second,
            second: Some((relation, self.first)),
            background: self.background,
        };
        match self.second {
            Some((Relation::Below, second)) => turned(Relation::Above, second),
            Some((Relation::RightOf, second)) => turned(Relation::LeftOf, second),
            Some((Relation::Above | Relation::LeftOf, _)) | None => *self,
        }
    }

    /// Whether the caption belongs to the validation split of `validation_fraction`: the first 8
    /// bytes of the SHA-256 of its canonical sentence, as a fraction of 2^64, are below it.
    pub fn held_out(&self, validation_fraction: f64) -> bool {
        let sum = Sha256::of(self.canonical().to_string());
        let [a, b, c, d, e, f, g, h, ..] = *sum.bytes();
        let head = u64::from_be_bytes([a, b, c, d, e, f, g, h]);
        (head as f64) < validation_fraction * 2f64.powi(64)
    }

    pub(super) fn draw(rng: &mut KeyedRng, max_objects: usize) -> Self {
        let words = |rng: &mut KeyedRng| ShapeWords {
            size: rng.pick(&Size::ALL),
            colour: rng.pick(&Colour::ALL),
            kind: rng.pick(&Kind::ALL),
        };
        let first = words(rng);
        let second = (rng.below(max_objects) == 1).then(|| (rng.pick(&Relation::ALL), words(rng)));
        Self {
            first,
            second,
            background: rng.pick(&Background::ALL),
        }
    }
}

struct Words<'a> {
    caption: &'a str,
    rest: Vec<&'a str>,
    at: usize,
}

impl<'a> Words<'a> {
    fn peek(&self) -> Option<&'a str> {
        self.rest.get(self.at).copied()
    }

    fn error(&self, expected: &str) -> DataError {
        DataError::ShapesCaption {
            caption: self.caption.to_owned(),
            expected: expected.to_owned(),
            found: self.peek().unwrap_or("the end").to_owned(),
        }
    }

    fn expect(&mut self, word: &str) -> Result<(), DataError> {
        if self.peek() != Some(word) {
            return Err(self.error(&format!("`{word}`")));
        }
        self.at += 1;
        Ok(())
    }

    fn one_of<T: Copy>(&mut self, all: &[T], name: fn(T) -> &'static str) -> Result<T, DataError> {
        for &value in all {
            let words: Vec<&str> = name(value).split(' ').collect();
            if self.rest[self.at..].starts_with(&words) {
                self.at += words.len();
                return Ok(value);
            }
        }
        let names: Vec<&str> = all.iter().map(|&value| name(value)).collect();
        Err(self.error(&format!("one of {}", names.join(", "))))
    }

    fn shape(&mut self) -> Result<ShapeWords, DataError> {
        self.expect("a")?;
        Ok(ShapeWords {
            size: self.one_of(&Size::ALL, Size::name)?,
            colour: self.one_of(&Colour::ALL, Colour::name)?,
            kind: self.one_of(&Kind::ALL, Kind::name)?,
        })
    }
}
