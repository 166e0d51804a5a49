//! Splits of datasets, by the names of their files: `data/train-00000-of-00002.parquet`.

use std::path::{Component, Path};

/// The names that the `datasets` library looks for in the names of files and folders.
const SPLITS: [&str; 8] = [
    "train",
    "training",
    "validation",
    "valid",
    "dev",
    "val",
    "test",
    "eval",
];

/// Those of `paths` that are of `split`; all of them where no name tells a split.
pub fn of_split<P: AsRef<Path> + Clone>(paths: &[P], split: &str) -> Vec<P> {
    let mut pairs = paths
        .iter()
        .flat_map(|p| SPLITS.map(|split| (p.as_ref(), split)));
    let tells = pairs.any(|(path, split)| is_of(path, split));
    let of_split = paths
        .iter()
        .filter(|path| !tells || is_of(path.as_ref(), split));
    of_split.cloned().collect()
}

fn is_of(path: &Path, split: &str) -> bool {
    path.with_extension("").components().any(|part| match part {
        Component::Normal(part) => {
            let part = part.to_string_lossy();
            part.split(['-', '_', '.', ' ']).any(|word| word == split)
        }
        _ => false,
    })
}
