//! `dataset_type: shapes`: images of one or two coloured shapes, made by the program.
//!
//! A sample is a function of `(seed, split, index)` alone. Its caption names every property that
//! the image shows, so the fixed reader in [`read`] can tell whether a generated image obeys
//! its prompt.
//!
//! A fixed hash of what the caption means decides whether it belongs to the training or to the
//! validation split: no prompt of the validation split is ever trained on, under any seed, nor is
//! its paraphrase ("A above B" and "B below A" are one meaning).

mod caption;
mod read;
mod render;
mod words;

use std::collections::HashSet;

pub use caption::{Background, Caption, Colour, Kind, Relation, ShapeWords, Size};
pub use read::{ReadScore, ReadShape, Reading, Verdict, read};
pub use words::{OtherWords, ShapeWord, WordFilter};

use super::rng::{KeyedRng, Stream};
use super::{DataError, Sample};

/// Smallest side at which the smallest shape still covers several pixels.
pub const MIN_RESOLUTION: usize = 16;
/// Largest side; beyond it an image of flat shapes has nothing to add.
pub const MAX_RESOLUTION: usize = 1024;
/// One shape with its place; lengths are fractions of the image's side, y grows downwards.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    pub kind: Kind,
    pub colour: Colour,
    /// Centre of the bounding box.
    pub center: (f64, f64),
    pub diameter: f64,
}

/// A caption with places and exact sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct Scene {
    pub background: Background,
    pub shapes: Vec<Shape>,
}

/// Free border around the shapes and least gap between two, as fractions of the side.
const MARGIN: f64 = 0.5 / 32.0;
const GAP: f64 = 3.0 / 32.0;

impl Scene {
    fn draw(caption: &Caption, spread: f64, rng: &mut KeyedRng) -> Self {
        let mut shapes: Vec<Shape> = caption
            .shapes()
            .iter()
            .map(|words| {
                let (low, high) = words.size.diameters();
                let diameter = rng.between(low, high);
                let (kind, colour) = (words.kind, words.colour);
                Shape {
                    kind,
                    colour,
                    center: (0.0, 0.0),
                    diameter,
                }
            })
            .collect();
        let extent = |shape: &Shape| {
            let (width, height) = shape.kind.extent();
            (width * shape.diameter, height * shape.diameter)
        };
        let anywhere = |rng: &mut KeyedRng, length: f64| {
            let reach = spread * (0.5 - MARGIN - length / 2.0);
            rng.between(0.5 - reach, 0.5 + reach)
        };
        match (&mut shapes[..], caption.second) {
            ([first, second], Some((relation, _))) => {
                let vertical = matches!(relation, Relation::Above | Relation::Below);
                let turned = matches!(relation, Relation::Below | Relation::RightOf);
                let (low, high) = if turned {
                    (second, first)
                } else {
                    (first, second)
                };
                let along = |shape: &Shape| {
                    if vertical {
                        extent(shape).1
                    } else {
                        extent(shape).0
                    }
                };
                let across = |shape: &Shape| {
                    if vertical {
                        extent(shape).0
                    } else {
                        extent(shape).1
                    }
                };
                let free = 1.0 - 2.0 * MARGIN - along(low) - along(high) - GAP;
                // Three uniform parts, before, between and after the two; three alike without spread.
                let (a, b) = (rng.unit(), rng.unit());
                let part = |share: f64| free * (1.0 / 3.0 + spread * (share - 1.0 / 3.0));
                let before = part(a.min(b));
                let between = GAP + part((a - b).abs());
                let low_center = MARGIN + before + along(low) / 2.0;
                let high_center = low_center + along(low) / 2.0 + between + along(high) / 2.0;
                let low_across = anywhere(rng, across(low));
                // The offset across stays below half the distance along, so that the relation that
                // the caption names is the only one that holds.
                let reach = spread * (high_center - low_center) / 2.0;
                let half = across(high) / 2.0;
                let high_across = rng.between(
                    (low_across - reach).max(MARGIN + half),
                    (low_across + reach).min(1.0 - MARGIN - half),
                );
                let place = |along, across| {
                    if vertical {
                        (across, along)
                    } else {
                        (along, across)
                    }
                };
                low.center = place(low_center, low_across);
                high.center = place(high_center, high_across);
            }
            (all, _) => {
                for shape in all {
                    let (width, height) = extent(shape);
                    shape.center = (anywhere(rng, width), anywhere(rng, height));
                }
            }
        }
        Self {
            background: caption.background,
            shapes,
        }
    }

    /// RGB `u8`, row-major HWC, `resolution x resolution`.
    pub fn render(&self, resolution: usize) -> Vec<u8> {
        render::render(self, resolution)
    }
}

/// Which captions a dataset draws from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    Train,
    Validation,
}

/// Options of `dataset_type: shapes`.
#[derive(Clone, Debug, PartialEq)]
pub struct ShapesOptions {
    pub seed: u64,
    /// Side of the images in pixels.
    pub resolution: usize,
    /// Samples in an epoch; each index is a different draw.
    pub count: usize,
    /// Most shapes in an image, 1 or 2; with 2, half of the images show one.
    pub max_objects: usize,
    /// How far from the middle shapes may lie, 0 to 1: with 1 anywhere in the image. Between two
    /// shapes it scales how uneven the space before, between and after them is.
    pub position_spread: f64,
    /// Share of captions that training never sees; 0 for a training split of all captions.
    pub validation_fraction: f64,
    pub split: Split,
    /// Which of the captions there are.
    pub filter: WordFilter,
    /// The words that captions are said with.
    pub words: OtherWords,
}

impl Default for ShapesOptions {
    fn default() -> Self {
        Self {
            seed: 0,
            resolution: 32,
            count: 50_000,
            max_objects: 2,
            position_spread: 1.0,
            validation_fraction: 0.1,
            split: Split::Train,
            filter: WordFilter::default(),
            words: OtherWords::default(),
        }
    }
}

/// The dataset: nothing is stored, every sample is computed when asked for.
#[derive(Clone, Debug)]
pub struct Shapes {
    options: ShapesOptions,
}

impl Shapes {
    /// # Errors
    /// [`DataError::Option`] for a resolution, count, number of objects or fraction out of range, and for words that
    /// leave no caption.
    pub fn new(options: ShapesOptions) -> Result<Self, DataError> {
        let refuse = |option, value: String, expected: String| {
            Err(DataError::Option {
                option,
                value,
                expected,
            })
        };
        if !(MIN_RESOLUTION..=MAX_RESOLUTION).contains(&options.resolution) {
            return refuse(
                "resolution",
                options.resolution.to_string(),
                format!("{MIN_RESOLUTION} to {MAX_RESOLUTION} for dataset_type shapes"),
            );
        }
        if options.count == 0 {
            return refuse("count", "0".into(), "at least 1 sample".into());
        }
        if !(1..=2).contains(&options.max_objects) {
            return refuse(
                "max_objects",
                options.max_objects.to_string(),
                "1 or 2".into(),
            );
        }
        if !(0.0..=1.0).contains(&options.position_spread) {
            return refuse(
                "position_spread",
                options.position_spread.to_string(),
                "0 to 1".into(),
            );
        }
        // Both splits must hold captions: with 144 captions of one shape, 1 % still leaves one.
        let nothing = options.validation_fraction == 0.0 && options.split == Split::Train;
        if !nothing && !(0.01..=0.9).contains(&options.validation_fraction) {
            let why = match options.split {
                Split::Train => "0 (nothing is held out), or 0.01 to 0.9",
                Split::Validation => "0.01 to 0.9: with 0, no caption is held out of training",
            };
            return refuse(
                "validation_fraction",
                options.validation_fraction.to_string(),
                why.into(),
            );
        }
        let shapes = Self { options };
        // A rejection loop over an empty split would not end.
        if !shapes.any_caption(|caption| shapes.options.filter.admits(caption)) {
            let WordFilter { without, with } = &shapes.options.filter;
            let listed = |words: &[ShapeWord]| words.iter().map(|w| w.name()).collect::<Vec<_>>();
            return refuse(
                "shapes_without",
                listed(without).join(", "),
                match with.is_empty() {
                    true => "words that leave a colour and a kind".to_owned(),
                    false => format!(
                        "words that leave captions with {}",
                        listed(with).join(" or ")
                    ),
                },
            );
        }
        if !shapes.any_caption(|caption| shapes.contains(caption)) {
            return refuse(
                "validation_fraction",
                shapes.options.validation_fraction.to_string(),
                "a fraction that leaves at least one caption in the split".into(),
            );
        }
        Ok(shapes)
    }

    pub fn options(&self) -> &ShapesOptions {
        &self.options
    }

    /// Samples in an epoch, at least 1.
    pub fn count(&self) -> usize {
        self.options.count
    }

    fn contains(&self, caption: &Caption) -> bool {
        let held_out = caption.held_out(self.options.validation_fraction);
        held_out == (self.options.split == Split::Validation) && self.options.filter.admits(caption)
    }

    /// Caption and scene of sample `index`, from `(seed, split, index)` alone.
    pub fn scene(&self, index: usize) -> (Caption, Scene) {
        let stream = match self.options.split {
            Split::Train => Stream::ShapesTrain,
            Split::Validation => Stream::ShapesValidation,
        };
        let mut rng = KeyedRng::new(self.options.seed, stream, index as u64, 0);
        let caption = loop {
            let caption = Caption::draw(&mut rng, self.options.max_objects);
            if self.contains(&caption) {
                break caption;
            }
        };
        let scene = Scene::draw(&caption, self.options.position_spread, &mut rng);
        (caption, scene)
    }

    /// Image and caption of sample `index`.
    pub fn get(&self, index: usize) -> Sample {
        let (caption, scene) = self.scene(index);
        let resolution = self.options.resolution;
        Sample {
            pixels: scene.render(resolution),
            size: [resolution; 2],
            mask: None,
            captions: vec![self.options.words.say(&caption)],
        }
    }

    /// `count` different captions of the validation split, drawn by the dataset's seed; fewer when
    /// the split holds fewer.
    pub fn held_out_prompts(&self, count: usize) -> Vec<String> {
        let mut rng = KeyedRng::new(self.options.seed, Stream::HeldOutPrompts, 0, 0);
        let mut seen = HashSet::new();
        let mut prompts = Vec::new();
        // The split of one-shape captions is small; stop when draws no longer find new ones.
        let mut misses = 0;
        while prompts.len() < count && misses < 100_000 {
            let caption = Caption::draw(&mut rng, self.options.max_objects);
            if caption.held_out(self.options.validation_fraction)
                && self.options.filter.admits(&caption)
                && seen.insert(caption)
            {
                prompts.push(self.options.words.say(&caption));
                misses = 0;
            } else {
                misses += 1;
            }
        }
        prompts
    }

    /// Whether `is_wanted` holds for a caption of as many shapes as the dataset has.
    fn any_caption(&self, is_wanted: impl Fn(&Caption) -> bool) -> bool {
        let singles = single_captions();
        let pairs = singles.iter().flat_map(|caption| {
            let seconds = singles
                .iter()
                .filter(|other| other.background == caption.background);
            seconds.flat_map(|other| {
                let second = |relation| Some((relation, other.first));
                Relation::ALL.map(|relation| Caption {
                    second: second(relation),
                    ..*caption
                })
            })
        });
        let pairs = pairs.take_while(|_| self.options.max_objects == 2);
        singles
            .iter()
            .copied()
            .chain(pairs)
            .any(|caption| is_wanted(&caption))
    }

    /// Captions that between them use every word of the dataset, whatever the seed, the split and the captions that it
    /// leaves out: a tokenizer built from them knows every caption, and is the same for every run.
    pub fn vocabulary_captions(&self) -> Vec<String> {
        let captions = word_captions().into_iter();
        captions
            .map(|caption| self.options.words.say(&caption))
            .collect()
    }

    /// The same in the dataset's own words.
    fn sentences() -> Vec<String> {
        let captions = word_captions().into_iter();
        captions.map(|caption| caption.to_string()).collect()
    }
}

/// All captions of one shape.
fn single_captions() -> Vec<Caption> {
    let mut captions = Vec::new();
    for size in Size::ALL {
        for colour in Colour::ALL {
            for kind in Kind::ALL {
                for background in Background::ALL {
                    captions.push(Caption {
                        first: ShapeWords { size, colour, kind },
                        second: None,
                        background,
                    });
                }
            }
        }
    }
    captions
}

/// Captions that between them have every word.
fn word_captions() -> Vec<Caption> {
    let words = |size, colour, kind| ShapeWords { size, colour, kind };
    let mut captions = Vec::new();
    for relation in Relation::ALL {
        for colour in Colour::ALL {
            for kind in Kind::ALL {
                for background in Background::ALL {
                    captions.push(Caption {
                        first: words(Size::Small, colour, kind),
                        second: Some((relation, words(Size::Large, colour, kind))),
                        background,
                    });
                }
            }
        }
    }
    captions
}

#[cfg(test)]
mod tests {
    use crate::util::hash::Sha256;

    use super::*;

    fn shapes(split: Split) -> Shapes {
        Shapes::new(ShapesOptions {
            split,
            ..ShapesOptions::default()
        })
        .unwrap()
    }

    #[test]
    fn captions_print_and_parse() {
        let text = "a small red circle above a large blue square on a white background";
        let caption = Caption::parse(text).unwrap();
        assert_eq!(caption.to_string(), text);
        assert_eq!(caption.first.colour, Colour::Red);
        assert_eq!(caption.second.unwrap().0, Relation::Above);
        for index in 0..500 {
            let (caption, _) = shapes(Split::Train).scene(index);
            assert_eq!(Caption::parse(&caption.to_string()).unwrap(), caption);
        }
    }

    #[test]
    fn a_caption_that_does_not_fit_names_the_word() {
        let error = |text| Caption::parse(text).unwrap_err().to_string();
        let message = error("a small brown circle on a white background");
        assert!(
            message.contains("brown") && message.contains("purple"),
            "{message}"
        );
        assert!(error("a small red circle").contains("the end"));
        assert!(error("a small red circle on a white background and more").contains("and"));
        assert!(error("").contains("the end"));
    }

    #[test]
    fn a_sample_depends_on_seed_and_index_alone() {
        let a = shapes(Split::Train);
        let b = shapes(Split::Train);
        assert_eq!(a.get(7), b.get(7));
        assert_ne!(a.get(7), a.get(8));
        let options = ShapesOptions {
            seed: 1,
            ..ShapesOptions::default()
        };
        assert_ne!(a.get(7), Shapes::new(options).unwrap().get(7));
        // Recorded: a change of the drawing order or of the renderer changes every trained model.
        let sum = Sha256::of(a.get(7).pixels).to_string();
        assert_eq!((a.get(7).captions[0].as_str(), &sum[..8]), RECORDED);
    }

    const RECORDED: (&str, &str) = (
        "a small red circle right of a small orange square on a gray background",
        "8ecf8ebb",
    );

    #[test]
    fn splits_share_no_caption_and_no_paraphrase() {
        let meanings = |split| -> HashSet<String> {
            (0..3000)
                .map(|i| shapes(split).scene(i).0.canonical().to_string())
                .collect()
        };
        let (train, validation) = (meanings(Split::Train), meanings(Split::Validation));
        assert!(train.len() > 1000 && validation.len() > 500);
        assert!(train.is_disjoint(&validation));
        for prompt in shapes(Split::Train).held_out_prompts(200) {
            assert!(Caption::parse(&prompt).unwrap().held_out(0.1));
        }
    }

    #[test]
    fn held_out_prompts_are_distinct_and_end() {
        let options = ShapesOptions {
            max_objects: 1,
            ..ShapesOptions::default()
        };
        let prompts = Shapes::new(options).unwrap().held_out_prompts(200);
        let distinct: HashSet<&String> = prompts.iter().collect();
        assert_eq!(distinct.len(), prompts.len());
        // 10 % of 144 captions of one shape.
        assert!((5..=30).contains(&prompts.len()), "{}", prompts.len());
        assert_eq!(shapes(Split::Train).held_out_prompts(200).len(), 200);
    }

    #[test]
    fn a_dataset_has_the_captions_that_it_is_asked_for() {
        let of = |without: &[ShapeWord], with: &[ShapeWord]| {
            Shapes::new(ShapesOptions {
                filter: WordFilter {
                    without: without.to_vec(),
                    with: with.to_vec(),
                },
                words: OtherWords::new(vec![(ShapeWord::Circle, "<sks>".into())]).unwrap(),
                ..ShapesOptions::default()
            })
        };
        let shapes = of(&[ShapeWord::Triangle], &[ShapeWord::Purple]).unwrap();
        let trained = (0..200).map(|index| shapes.get(index).captions[0].clone());
        for caption in trained.chain(shapes.held_out_prompts(100)) {
            assert!(caption.contains("purple"), "{caption}");
            assert!(!caption.contains("triangle") && !caption.contains("circle"));
        }
        assert_eq!(shapes.held_out_prompts(100).len(), 100);
        let words = shapes.vocabulary_captions().join(" ");
        assert!(words.contains("triangle") && words.contains("<sks>"));
        let refused =
            |without: &[ShapeWord], with: &[ShapeWord]| of(without, with).unwrap_err().to_string();
        let kinds = [ShapeWord::Circle, ShapeWord::Square, ShapeWord::Triangle];
        assert!(refused(&kinds, &[]).contains("leave a colour and a kind"));
        let red = [ShapeWord::Red];
        assert!(refused(&red, &red).contains("leave captions with red"));
    }

    #[test]
    fn about_the_asked_fraction_is_held_out() {
        let mut rng = KeyedRng::new(3, Stream::HeldOutPrompts, 0, 0);
        let held_out = (0..5000)
            .filter(|_| Caption::draw(&mut rng, 2).held_out(0.1))
            .count();
        // Half the draws are one-shape captions, of which there are only 144: the share of those
        // that falls in has a standard deviation of 2.5 %.
        assert!((300..=700).contains(&held_out), "{held_out} of 5000");
    }

    #[test]
    fn shapes_lie_inside_and_apart() {
        let dataset = shapes(Split::Train);
        for index in 0..2000 {
            let (caption, scene) = dataset.scene(index);
            let boxes: Vec<[f64; 4]> = scene
                .shapes
                .iter()
                .map(|s| {
                    let (w, h) = s.kind.extent();
                    let (w, h) = (w * s.diameter / 2.0, h * s.diameter / 2.0);
                    let (x, y) = s.center;
                    [x - w, y - h, x + w, y + h]
                })
                .collect();
            for b in &boxes {
                assert!(
                    b[0] > 0.0 && b[1] > 0.0 && b[2] < 1.0 && b[3] < 1.0,
                    "{caption}: {b:?}"
                );
            }
            if let [a, b] = boxes[..] {
                let gap = [b[0] - a[2], a[0] - b[2], b[1] - a[3], a[1] - b[3]]
                    .into_iter()
                    .fold(f64::MIN, f64::max);
                assert!(gap > GAP - 1e-9, "{caption}: gap {gap}");
            }
        }
    }

    #[test]
    fn options_out_of_range_are_refused() {
        let base = ShapesOptions::default();
        for options in [
            ShapesOptions {
                resolution: 8,
                ..base.clone()
            },
            ShapesOptions {
                count: 0,
                ..base.clone()
            },
            ShapesOptions {
                max_objects: 3,
                ..base.clone()
            },
            ShapesOptions {
                position_spread: 1.5,
                ..base.clone()
            },
            ShapesOptions {
                validation_fraction: 0.0,
                split: Split::Validation,
                ..base.clone()
            },
            ShapesOptions {
                validation_fraction: f64::NAN,
                ..base
            },
        ] {
            assert!(matches!(
                Shapes::new(options),
                Err(DataError::Option { .. })
            ));
        }
    }
}
