//! Several folders as one, of which each has a share of the samples.

use std::path::PathBuf;

use super::Folder;
use crate::data::{DataError, MOST_REPEATS};

/// How far a share may be from the one that is asked for, as a fraction of it.
const MOST_OFF: f64 = 0.01;
/// As often, pictures of the folder that is repeated least are repeated at most. More is never needed: repeats of 101 and
/// more are at most 0.5 / 101 of themselves from what they are rounded from, and so shares less than 1 % from those asked for.
const MOST_FACTOR: usize = 101;

/// What a folder is of a mixture.
#[derive(Clone, Debug, PartialEq)]
pub struct Share {
    pub root: PathBuf,
    pub images: usize,
    /// How often an epoch has each of them, times the repeats that the folder's own names ask for.
    pub repeats: usize,
    /// Share of an epoch's samples: 0 to 1.
    pub share: f64,
}

/// A folder before it is mixed.
struct Part {
    /// Samples of an epoch, with the repeats that its names ask for.
    samples: usize,
    /// Largest of these repeats.
    most: usize,
    weight: u64,
}

impl Folder {
    /// All of `parts` as one folder: of an epoch's samples each part has a share in proportion to its weight, up to 1 %.
    /// The images of a part are repeated alike, and so few times as possible. The options are those of the first part.
    ///
    /// # Errors
    /// When there are no parts, or an image would be in an epoch more than [`MOST_REPEATS`] times.
    pub fn mixed(parts: Vec<(Folder, u64)>) -> Result<(Folder, Vec<Share>), DataError> {
        let sizes: Vec<Part> = parts
            .iter()
            .map(|(folder, weight)| Part {
                samples: folder.entries.iter().map(|entry| entry.repeats).sum(),
                most: folder.entries.iter().map(|e| e.repeats).max().unwrap_or(1),
                weight: *weight,
            })
            .collect();
        let repeats = fewest_repeats(&sizes);
        let found = shares(&sizes, &repeats);
        let mut all: Option<Folder> = None;
        let mut told = Vec::with_capacity(sizes.len());
        for (((mut folder, _), part), (repeats, share)) in parts
            .into_iter()
            .zip(sizes)
            .zip(repeats.into_iter().zip(found))
        {
            let root = folder.options.root.clone();
            let images = folder.entries.len();
            if part.most.saturating_mul(repeats) > MOST_REPEATS {
                return Err(DataError::Mix {
                    root,
                    images,
                    repeats: part.most.saturating_mul(repeats),
                });
            }
            for entry in &mut folder.entries {
                entry.repeats *= repeats;
            }
            told.push(Share {
                root,
                images,
                repeats,
                share,
            });
            match &mut all {
                None => all = Some(folder),
                Some(all) => {
                    all.entries.extend(folder.entries);
                    all.bad.extend(folder.bad);
                    all.found.extend(folder.found);
                }
            }
        }
        let all = all.ok_or_else(|| DataError::Option {
            option: "train_data_mix",
            value: "{}".to_owned(),
            expected: "a folder or more".to_owned(),
        })?;
        Ok((all, told))
    }
}

/// The fewest repeats of each part's images that give every part the share that its weight asks for, up to [`MOST_OFF`].
fn fewest_repeats(parts: &[Part]) -> Vec<usize> {
    // How often an image would be used, up to a factor.
    let of_image = |part: &Part| part.weight as f64 / part.samples.max(1) as f64;
    let least = parts.iter().map(of_image).fold(f64::INFINITY, f64::min);
    let with = |factor: usize| -> Vec<usize> {
        let repeats = parts
            .iter()
            .map(|part| factor as f64 * of_image(part) / least);
        repeats.map(|repeats| repeats.round() as usize).collect()
    };
    let all: u64 = parts.iter().map(|part| part.weight).sum();
    let is_close = |repeats: &Vec<usize>| {
        let shares = shares(parts, repeats);
        parts.iter().zip(shares).all(|(part, share)| {
            let asked = part.weight as f64 / all as f64;
            (share - asked).abs() <= MOST_OFF * asked
        })
    };
    let found = (1..MOST_FACTOR).map(with).find(is_close);
    found.unwrap_or_else(|| with(MOST_FACTOR))
}

/// The share of each part in an epoch.
fn shares(parts: &[Part], repeats: &[usize]) -> Vec<f64> {
    let samples = parts.iter().zip(repeats);
    let samples: Vec<f64> = samples
        .map(|(part, repeats)| part.samples as f64 * *repeats as f64)
        .collect();
    let all: f64 = samples.iter().sum();
    samples.iter().map(|samples| samples / all).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;

    use image::{Rgb, RgbImage};
    use proptest::prelude::*;
    use tempfile::TempDir;

    use super::*;
    use crate::data::{BatchOptions, Dataset, FolderOptions, Rows};

    fn parts(sizes: &[(usize, u64)]) -> Vec<Part> {
        let part = |(samples, weight): &(usize, u64)| Part {
            samples: *samples,
            most: 1,
            weight: *weight,
        };
        sizes.iter().map(part).collect()
    }

    #[test]
    fn repeats_are_the_fewest_that_do() {
        for (sizes, expected) in [
            (&[(5, 1)][..], &[1][..]),
            (&[(6, 3), (6, 1)], &[3, 1]),
            (&[(100, 3), (100, 3), (50, 1)], &[3, 3, 2]),
            (&[(1000, 1), (50, 1)], &[1, 20]),
            // 15 times 66 is near enough to 1000, and 14 times 70 is not.
            (&[(1000, 1), (66, 1)], &[1, 15]),
            (&[(1000, 1), (70, 1)], &[2, 29]),
            (&[(3, 1), (2, 1)], &[2, 3]),
        ] {
            assert_eq!(fewest_repeats(&parts(sizes)), expected, "{sizes:?}");
        }
    }

    proptest! {
        #[test]
        fn shares_are_those_of_the_weights(
            sizes in prop::collection::vec((1usize..1_000_000, 1u64..=10_000), 1..6),
        ) {
            let sizes = parts(&sizes);
            let all: u64 = sizes.iter().map(|part| part.weight).sum();
            let repeats = fewest_repeats(&sizes);
            prop_assert!(repeats.iter().all(|repeats| *repeats > 0));
            for (part, share) in sizes.iter().zip(shares(&sizes, &repeats)) {
                let asked = part.weight as f64 / all as f64;
                prop_assert!((share / asked - 1.0).abs() <= MOST_OFF, "{} {}", share, asked);
            }
        }
    }

    /// A folder of single colours, those of `names` in order from `first` on.
    fn folder(dir: &TempDir, names: &[&str], first: u8) -> Folder {
        for (name, red) in names.iter().zip(first..) {
            let path = dir.path().join(format!("{name}.png"));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            RgbImage::from_pixel(4, 4, Rgb([red, 0, 0]))
                .save(&path)
                .unwrap();
            fs::write(path.with_extension("txt"), name).unwrap();
        }
        Folder::open(FolderOptions {
            folder_repeats: true,
            ..FolderOptions::new(dir.path(), 4)
        })
        .unwrap()
    }

    #[test]
    fn in_the_long_run_folders_have_their_shares_and_their_pictures_are_used_alike() {
        let [one, two] = [TempDir::new().unwrap(), TempDir::new().unwrap()];
        let first = folder(&one, &["a", "b", "c"], 0);
        // Five samples of two pictures.
        let second = folder(&two, &["4_x/d", "e"], 10);
        let (mixed, told) = Folder::mixed(vec![(first, 2), (second, 1)]).unwrap();
        assert_eq!(told.iter().map(|t| t.repeats).collect::<Vec<_>>(), [10, 3]);
        assert_eq!(told.iter().map(|t| t.images).collect::<Vec<_>>(), [3, 2]);
        assert!((told[0].share - 2.0 / 3.0).abs() < 1e-9, "{told:?}");
        assert_eq!(told[1].root, two.path().canonicalize().unwrap());
        let dataset = Dataset::Folder(Box::new(mixed));
        let reds = [0, 1, 2, 3, 4].map(|at| dataset.get(at).unwrap().pixels[0]);
        assert_eq!(reds, [0, 1, 2, 10, 11]);
        let options = BatchOptions {
            batch_size: 5,
            seed: 1,
            caption_dropout: 0.0,
            random_flip: false,
        };
        let rows = Rows::of_all(options, &dataset);
        let mut used: BTreeMap<usize, usize> = BTreeMap::new();
        // Two epochs of 45 samples.
        for row in (0..18).flat_map(|number| rows.batch(number).rows) {
            *used.entry(row.index).or_default() += 1;
        }
        let expected = [(0, 20), (1, 20), (2, 20), (3, 24), (4, 6)];
        assert_eq!(used, expected.into());
    }

    #[test]
    fn too_many_repeats_are_refused() {
        let [one, two] = [TempDir::new().unwrap(), TempDir::new().unwrap()];
        let sets = vec![
            (folder(&one, &["a", "c"], 0), 1),
            (folder(&two, &["9_x/b"], 0), 10_000),
        ];
        let error = Folder::mixed(sets).unwrap_err().to_string();
        assert!(
            error.contains("each of its 1 pictures in an epoch 19998 times"),
            "{error}"
        );
        assert!(error.contains(two.path().file_name().unwrap().to_str().unwrap()));
        assert!(matches!(
            Folder::mixed(Vec::new()),
            Err(DataError::Option { .. })
        ));
    }
}
