//! Captions of tags between commas, whose order changes.

use std::collections::HashSet;

use super::rng::{KeyedRng, Stream};
use crate::util::hash::Sha256;

/// Draws for each new order that is looked for: some give one that is there already.
const DRAWS: u64 = 64;

/// Which orders of its tags a caption is used in, as kohya's trainers make them (`library/train_util.py` of sd-scripts,
/// `process_caption`): tags stand between commas, some first ones stay in place, and each of the others may be left out.
#[derive(Clone, Debug, PartialEq)]
pub struct TagOrders {
    pub seed: u64,
    /// Orders of each caption; fewer where its tags have fewer.
    pub count: usize,
    /// How many first tags stay in place, and are never left out.
    pub keep: usize,
    /// Probability that a tag is left out.
    pub dropout: f64,
}

impl TagOrders {
    /// Whether a caption has tags that change their places or may be left out.
    pub fn changes(&self, caption: &str) -> bool {
        let free = tags(caption).count().saturating_sub(self.keep);
        free > 1 || free == 1 && self.dropout > 0.0
    }

    /// The texts of a caption, at least one, which the seed and the caption decide. They differ from each other, unless tags
    /// are left out: then each is as probable as tags say, and some may be equal.
    pub fn of(&self, caption: &str) -> Vec<String> {
        if !self.changes(caption) {
            return vec![caption.to_owned()];
        }
        let all: Vec<&str> = tags(caption).collect();
        let content = Sha256::of(caption);
        let content = content.bytes().first_chunk().copied().unwrap_or_default();
        let content = u64::from_le_bytes(content);
        let draw = |number| {
            self.draw(
                &all,
                KeyedRng::new(self.seed, Stream::Tags, content, number),
            )
        };
        if self.dropout > 0.0 {
            return (0..self.count as u64).map(draw).collect();
        }
        // With few tags there are not as many orders as are asked for.
        let free = (all.len() - self.keep.min(all.len())) as u64;
        let orders = (1..=free).try_fold(1u64, u64::checked_mul);
        let wanted = orders.unwrap_or(u64::MAX).min(self.count as u64);
        let (mut seen, mut texts) = (HashSet::new(), Vec::new());
        for number in 0..wanted * DRAWS {
            let text = draw(number);
            if seen.insert(text.clone()) {
                texts.push(text);
            }
            if texts.len() as u64 == wanted {
                break;
            }
        }
        texts
    }

    fn draw(&self, all: &[&str], mut rng: KeyedRng) -> String {
        let (kept, free) = all.split_at(self.keep.min(all.len()));
        let mut free = free.to_vec();
        for last in (1..free.len()).rev() {
            free.swap(last, rng.below(last + 1));
        }
        free.retain(|_| self.dropout == 0.0 || rng.unit() >= self.dropout);
        [kept, &free].concat().join(", ")
    }
}

/// What stands between the commas of a caption.
fn tags(caption: &str) -> impl Iterator<Item = &str> {
    let tags = caption.split(',').map(str::trim);
    tags.filter(|tag| !tag.is_empty())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn orders(count: usize, keep: usize) -> TagOrders {
        TagOrders {
            seed: 5,
            count,
            keep,
            dropout: 0.0,
        }
    }

    #[test]
    fn tags_change_places_behind_those_that_stay() {
        let caption = "dog,  red ball , grass,, sky";
        let found = orders(6, 1).of(caption);
        let different: HashSet<&String> = found.iter().collect();
        // All orders of three tags.
        assert_eq!((found.len(), different.len()), (6, 6));
        for text in &found {
            let mut parts: Vec<&str> = text.split(", ").collect();
            assert_eq!(parts[0], "dog");
            parts.sort_unstable();
            assert_eq!(parts, ["dog", "grass", "red ball", "sky"]);
        }
        assert_eq!(found, orders(6, 1).of(caption));
        let other = TagOrders {
            seed: 6,
            ..orders(6, 1)
        };
        assert_ne!(found, other.of(caption));
        assert_ne!(
            orders(1, 0).of("a, b, c, d, e"),
            orders(1, 0).of("b, a, c, d, e")
        );
        assert_eq!(orders(100, 0).of(caption).len(), 24);
        assert_eq!(orders(7, 0).of("one, two").len(), 2);
        // Two tags that are equal have one order.
        assert_eq!(orders(7, 0).of("one, one"), ["one, one"]);
        for caption in ["a dog, on grass", "a dog", ""] {
            assert_eq!(orders(7, 1).of(caption), [caption]);
        }
    }

    #[test]
    fn tags_are_left_out_at_their_rate() {
        let dropping = TagOrders {
            dropout: 0.25,
            ..orders(2000, 1)
        };
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        for text in dropping.of("dog, red, big") {
            for tag in text.split(", ") {
                *counts.entry(tag.to_owned()).or_default() += 1;
            }
        }
        assert_eq!(counts["dog"], 2000);
        // 1500 expected of each, standard deviation 19: 5 sigma.
        assert!(
            ["red", "big"]
                .iter()
                .all(|tag| counts[*tag].abs_diff(1500) < 97)
        );
        // One tag alone may be left out too.
        let one = dropping.of("dog, red");
        assert!(one.len() == 2000 && one.iter().any(|text| text == "dog"));
    }
}
