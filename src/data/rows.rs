//! Which samples a batch has, by its number alone.

use super::order::Permutation;
use super::rng::{KeyedRng, Stream};
use super::{DataError, Dataset};

/// The options of batches, beside the dataset and the tokenizer.
#[derive(Clone, Debug, PartialEq)]
pub struct BatchOptions {
    pub batch_size: usize,
    /// Seed of the order, the captions, the caption dropout and the flips.
    pub seed: u64,
    /// Probability that a row's caption is replaced by the empty one, for classifier-free guidance
    /// (Ho and Salimans, "Classifier-free diffusion guidance", 2022).
    pub caption_dropout: f64,
    /// Mirror each image left to right with probability one half.
    pub random_flip: bool,
}

impl BatchOptions {
    /// # Errors
    /// [`DataError::Option`] for an empty batch, a dropout outside 0 to 1, or flips of images
    /// whose captions say left and right.
    pub fn check(&self, dataset: &Dataset) -> Result<(), DataError> {
        let refuse = |option, value: String, expected: &str| {
            Err(DataError::Option {
                option,
                value,
                expected: expected.into(),
            })
        };
        if self.batch_size == 0 {
            return refuse("batch_size", "0".into(), "at least 1");
        }
        if !(0.0..=1.0).contains(&self.caption_dropout) {
            return refuse(
                "caption_dropout",
                self.caption_dropout.to_string(),
                "0 to 1",
            );
        }
        if self.random_flip && matches!(dataset, Dataset::Shapes(_)) {
            let expected = "False for dataset_type shapes, whose captions say left and right";
            return refuse("random_flip", "True".into(), expected);
        }
        Ok(())
    }
}

/// The order of class images, among those of groups.
const CLASSES: u64 = u64::MAX;

/// A row of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Its sample in the dataset.
    pub index: usize,
    /// Decides which of the sample's captions it has: [`Row::pick`].
    pub caption: u32,
    /// Decides in which order of its tags: [`Row::pick_order`].
    pub order: u32,
    /// Whether the empty caption stands in place of its own.
    pub drops_caption: bool,
    /// Whether its image is mirrored left to right.
    pub is_flipped: bool,
}

impl Row {
    /// The place of the row's caption among `count` captions, each with the same probability.
    pub fn pick(&self, count: usize) -> usize {
        place(self.caption, count)
    }

    /// The place of the order of its tags among `count` orders of the row's caption.
    pub fn pick_order(&self, count: usize) -> usize {
        place(self.order, count)
    }
}

/// One of `count` places, each for as many draws.
fn place(draw: u32, count: usize) -> usize {
    ((u64::from(draw) * count as u64) >> 32) as usize
}

/// The rows of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchRows {
    /// The group whose samples they are.
    pub group: usize,
    pub rows: Vec<Row>,
}

/// The order of samples in an endless sequence of batches.
#[derive(Clone, Debug)]
pub struct Rows {
    options: BatchOptions,
    /// Samples that go together into a batch, such as those of one size; a sample may be there several times.
    groups: Vec<Vec<usize>>,
    /// Class images, one of which follows each sample of a batch; none without prior preservation.
    classes: Vec<usize>,
}

impl Rows {
    /// Batches of the samples of one of `groups` each. Groups without samples have no batches; at least one must have a
    /// sample.
    pub fn new(options: BatchOptions, groups: Vec<Vec<usize>>) -> Rows {
        Rows {
            options,
            groups,
            classes: Vec::new(),
        }
    }

    /// The same with every second row of a batch one of `classes`, if there are any.
    #[must_use]
    pub fn with_classes(self, classes: Vec<usize>) -> Rows {
        Rows { classes, ..self }
    }

    /// Batches of all samples of `dataset`, whose images have one size, each as often as an epoch has it; with every second
    /// row one of its class images, if it has any.
    pub fn of_all(options: BatchOptions, dataset: &Dataset) -> Rows {
        let groups = dataset.groups(&[dataset.size()]);
        Rows::new(options, groups).with_classes(dataset.classes())
    }

    pub fn options(&self) -> &BatchOptions {
        &self.options
    }

    pub fn groups(&self) -> &[Vec<usize>] {
        &self.groups
    }

    /// The rows of batch `number`: the next of an endless sequence of epochs of its group, each a new order of all its
    /// samples; a batch may span two epochs.
    pub fn batch(&self, number: u64) -> BatchRows {
        let (group, of_group) = self.slot(number);
        let count = self.own_rows();
        let samples = self.next(&self.groups[group], group as u64, of_group, count);
        let classes = self.next(&self.classes, CLASSES, number, count);
        let indices: Vec<usize> = match classes.is_empty() {
            true => samples,
            false => samples
                .into_iter()
                .zip(classes)
                .flat_map(|(own, class)| [own, class])
                .collect(),
        };
        let seed = self.options.seed;
        let rows = indices.into_iter().zip(0..).map(|(index, row)| {
            let draw = |stream| KeyedRng::new(seed, stream, number, row);
            let text = draw(Stream::Caption).next_u64();
            Row {
                index,
                caption: (text >> 32) as u32,
                order: text as u32,
                drops_caption: draw(Stream::CaptionDropout).unit() < self.options.caption_dropout,
                is_flipped: self.options.random_flip && draw(Stream::Flip).unit() < 0.5,
            }
        });
        BatchRows {
            group,
            rows: rows.collect(),
        }
    }

    /// The rows of a batch that are no class images.
    fn own_rows(&self) -> usize {
        match self.classes.is_empty() {
            true => self.options.batch_size,
            false => self.options.batch_size / 2,
        }
    }

    /// The samples of the batch `number` of `count` of them; none of no samples.
    fn next(&self, samples: &[usize], group: u64, number: u64, count: usize) -> Vec<usize> {
        let len = samples.len() as u64;
        if len == 0 {
            return Vec::new();
        }
        let first = number.saturating_mul(count as u64);
        let order = |epoch| Permutation::new(self.options.seed, epoch, group, samples.len());
        let mut epoch = first / len;
        let mut permutation = order(epoch);
        let places = (0..count as u64).map(|row| first.saturating_add(row));
        let next = places.map(|place| {
            if place / len != epoch {
                epoch = place / len;
                permutation = order(epoch);
            }
            samples[permutation.index((place % len) as usize)]
        });
        next.collect()
    }

    /// The group of batch `number`, and its number among the batches of that group. In the first `n` epochs a group has
    /// its samples `n` times, rounded down to whole batches, and the groups take turns at random.
    fn slot(&self, number: u64) -> (usize, u64) {
        let [_, _, ..] = self.groups[..] else {
            return (0, number);
        };
        let size = self.own_rows().max(1) as u128;
        let of_group = |group: &Vec<usize>, epoch: u64| {
            (u128::from(epoch) * group.len() as u128 / size) as u64
        };
        let before = |epoch: u64| {
            self.groups
                .iter()
                .map(|group| of_group(group, epoch))
                .sum::<u64>()
        };
        // The last epoch that begins at `number` or before it.
        let all = self.groups.iter().map(Vec::len).sum::<usize>().max(1) as u128;
        let ahead = u128::from(number) + self.groups.len() as u128;
        let (mut low, mut high) = (0, (ahead * size / all) as u64 + 1);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            match before(middle) <= number {
                true => low = middle,
                false => high = middle,
            }
        }
        let epoch = low;
        let count = before(epoch + 1) - before(epoch);
        let turns = Permutation::of_turns(self.options.seed, epoch, count as usize);
        let mut turn = turns.index((number - before(epoch)) as usize) as u64;
        for (at, group) in self.groups.iter().enumerate() {
            let first = of_group(group, epoch);
            let own = of_group(group, epoch + 1) - first;
            if turn < own {
                return (at, first + turn);
            }
            turn -= own;
        }
        (0, number)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn options(batch_size: usize) -> BatchOptions {
        BatchOptions {
            batch_size,
            seed: 3,
            caption_dropout: 0.0,
            random_flip: false,
        }
    }

    /// Groups of all sizes, one without samples: a batch is of one group, and all samples are used alike.
    #[test]
    fn groups_take_turns_and_every_sample_is_used_alike() {
        let groups = vec![
            vec![0, 1, 2, 3, 4],
            vec![],
            vec![5],
            vec![6, 7, 8, 9, 10, 11, 12],
        ];
        let rows = Rows::new(options(4), groups.clone());
        let mut used: BTreeMap<usize, usize> = BTreeMap::new();
        let mut first_groups = Vec::new();
        // 13 samples, 4 in a batch: 4 epochs are 13 batches, so 40 epochs are 130.
        for number in 0..130 {
            let batch = rows.batch(number);
            assert_eq!(batch, rows.batch(number));
            assert!(
                batch
                    .rows
                    .iter()
                    .all(|row| groups[batch.group].contains(&row.index))
            );
            first_groups.push(batch.group);
            for row in batch.rows {
                *used.entry(row.index).or_default() += 1;
            }
        }
        assert_eq!(used, (0..13).map(|sample| (sample, 40)).collect());
        let changes = first_groups.windows(2).filter(|pair| pair[0] != pair[1]);
        assert!(changes.count() > 30, "{first_groups:?}");
    }

    #[test]
    fn one_group_is_the_plain_order() {
        let rows = Rows::new(options(6), vec![(0..20).collect()]);
        for number in [0, 3, 1000] {
            let batch = rows.batch(number);
            let first = number * 6;
            let expected: Vec<usize> = (first..first + 6)
                .map(|at| Permutation::new(3, at / 20, 0, 20).index((at % 20) as usize))
                .collect();
            let found: Vec<usize> = batch.rows.iter().map(|row| row.index).collect();
            assert_eq!((batch.group, found), (0, expected));
        }
    }

    #[test]
    fn a_class_image_follows_every_sample() {
        let rows = Rows::new(options(6), vec![(0..5).collect()]).with_classes(vec![7, 8]);
        let plain = Rows::new(options(3), vec![(0..5).collect()]);
        let mut classes = [0; 2];
        for number in 0..20 {
            let batch: Vec<usize> = rows
                .batch(number)
                .rows
                .iter()
                .map(|row| row.index)
                .collect();
            let own: Vec<usize> = batch.iter().copied().step_by(2).collect();
            let expected = plain.batch(number).rows;
            assert_eq!(
                own,
                expected.iter().map(|row| row.index).collect::<Vec<_>>()
            );
            for class in batch.iter().skip(1).step_by(2) {
                classes[class - 7] += 1;
            }
        }
        assert_eq!(classes, [30, 30]);
    }

    #[test]
    fn captions_are_picked_alike() {
        let rows = Rows::new(options(100), vec![(0..10).collect()]);
        let mut counts = [0; 9];
        for number in 0..90 {
            for row in rows.batch(number).rows {
                // A caption and the order of its tags, independent of each other.
                counts[3 * row.pick(3) + row.pick_order(3)] += 1;
            }
        }
        // 1000 expected each, standard deviation 30: 5 sigma.
        assert!(
            counts.iter().all(|n| (850..=1150).contains(n)),
            "{counts:?}"
        );
    }
}
