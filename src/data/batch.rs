//! Batches by step.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;

use super::{BatchOptions, DataError, Dataset, Rows, Tokenizer};

/// The input of one training step.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    pub step: u64,
    /// NHWC RGB in [-1, 1], `batch_size x resolution x resolution x 3`.
    pub pixels: Vec<f32>,
    /// `batch_size x length`, row-major.
    pub token_ids: Vec<i32>,
    /// As encoded: the empty text where the caption was dropped.
    pub captions: Vec<String>,
}

/// Makes the batch of any step, from the step alone.
#[derive(Debug)]
pub struct Batcher {
    dataset: Dataset,
    tokenizer: Tokenizer,
    rows: Rows,
    warned: Mutex<HashSet<String>>,
}

impl Batcher {
    /// # Errors
    /// As [`BatchOptions::check`].
    pub fn new(
        dataset: Dataset,
        tokenizer: Tokenizer,
        options: BatchOptions,
    ) -> Result<Self, DataError> {
        options.check(&dataset)?;
        let rows = Rows::of_all(options, &dataset);
        Ok(Self {
            dataset,
            tokenizer,
            rows,
            warned: Mutex::default(),
        })
    }

    pub fn dataset(&self) -> &Dataset {
        &self.dataset
    }

    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    pub fn options(&self) -> &BatchOptions {
        self.rows.options()
    }

    /// The batch of `step`, with the rows of [`Rows::batch`].
    ///
    /// # Errors
    /// Errors of [`Dataset::get`] and [`Tokenizer::encode`].
    pub fn batch(&self, step: u64) -> Result<Batch, DataError> {
        let rows: Vec<(Vec<f32>, Vec<i32>, String)> = self
            .rows
            .batch(step)
            .rows
            .into_par_iter()
            .map(|row| {
                let mut sample = self.dataset.get(row.index)?;
                if row.is_flipped {
                    sample.flip();
                }
                let caption = match row.drops_caption {
                    true => String::new(),
                    false => {
                        let own = row.pick(sample.captions.len());
                        sample.captions.swap_remove(own)
                    }
                };
                let encoded = self.tokenizer.encode(&caption)?;
                for warning in encoded.warnings() {
                    self.warn_once(&caption, warning);
                }
                let pixels = sample.pixels.iter().map(to_unit).collect();
                Ok((pixels, encoded.ids, caption))
            })
            .collect::<Result<_, DataError>>()?;
        let mut batch = Batch {
            step,
            pixels: Vec::new(),
            token_ids: Vec::new(),
            captions: Vec::new(),
        };
        for (pixels, ids, caption) in rows {
            batch.pixels.extend(pixels);
            batch.token_ids.extend(ids);
            batch.captions.push(caption);
        }
        Ok(batch)
    }

    /// Logs each distinct warning once in a run.
    fn warn_once(&self, caption: &str, warning: String) {
        let mut warned = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
        if !warned.contains(&warning) {
            tracing::warn!("caption \"{caption}\": {warning}");
            warned.insert(warning);
        }
    }
}

/// `0..=255` to `-1..=1`.
fn to_unit(value: &u8) -> f32 {
    f32::from(*value) / 127.5 - 1.0
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::data::{Folder, FolderOptions, Prefetcher, Shapes, ShapesOptions, word_level_json};

    fn options() -> BatchOptions {
        BatchOptions {
            batch_size: 6,
            seed: 4,
            caption_dropout: 0.25,
            random_flip: false,
        }
    }

    fn tokenizer(captions: &[String]) -> Tokenizer {
        let json = word_level_json(captions.iter().map(String::as_str)).unwrap();
        Tokenizer::from_json(&json, 16).unwrap()
    }

    fn batcher(count: usize, options: BatchOptions) -> Batcher {
        let shapes = Shapes::new(ShapesOptions {
            count,
            ..ShapesOptions::default()
        })
        .unwrap();
        let dataset = Dataset::Shapes(shapes);
        let tokenizer = tokenizer(&dataset.vocabulary_captions());
        Batcher::new(dataset, tokenizer, options).unwrap()
    }

    #[test]
    fn a_resumed_run_sees_the_same_batches() {
        let first = batcher(20, options());
        let ahead = |first, depth| {
            let batcher = batcher(20, options());
            Prefetcher::<_, DataError>::spawn(first, depth, move |step| batcher.batch(step))
                .unwrap()
        };
        let mut whole = ahead(0, 2);
        let all: Vec<Batch> = (0..9).map(|_| whole.next().unwrap()).collect();
        let mut resumed = ahead(5, 1);
        for (step, batch) in all.iter().enumerate() {
            assert_eq!(batch, &first.batch(step as u64).unwrap());
            if step >= 5 {
                assert_eq!(batch, &resumed.next().unwrap());
            }
        }
        assert_ne!(all[0].pixels, all[1].pixels);
    }

    #[test]
    fn shapes_values_and_layout() {
        let batch = batcher(20, options()).batch(0).unwrap();
        assert_eq!(batch.pixels.len(), 6 * 32 * 32 * 3);
        assert_eq!((batch.token_ids.len(), batch.captions.len()), (6 * 16, 6));
        assert!(batch.pixels.iter().all(|v| (-1.0..=1.0).contains(v)));
        assert_eq!([0, 255, 51].map(|v| to_unit(&v)), [-1.0, 1.0, -0.6]);
    }

    #[test]
    fn epochs_cover_the_dataset_across_batches() {
        // 6 rows a batch, 20 samples: 10 batches are exactly 3 epochs.
        let no_dropout = BatchOptions {
            caption_dropout: 0.0,
            ..options()
        };
        let batcher = batcher(20, no_dropout);
        let mut seen: BTreeMap<String, usize> = BTreeMap::new();
        let mut expected: BTreeMap<String, usize> = BTreeMap::new();
        for step in 0..10 {
            for caption in batcher.batch(step).unwrap().captions {
                *seen.entry(caption).or_default() += 1;
            }
        }
        for index in 0..20 {
            *expected
                .entry(batcher.dataset().get(index).unwrap().captions.remove(0))
                .or_default() += 3;
        }
        assert_eq!(seen, expected);
    }

    #[test]
    fn dropout_has_the_asked_rate_and_empties_the_tokens() {
        let batcher = batcher(100, options());
        let mut dropped = 0;
        for step in 0..100 {
            let batch = batcher.batch(step).unwrap();
            for (row, caption) in batch.captions.iter().enumerate() {
                let ids = &batch.token_ids[row * 16..(row + 1) * 16];
                assert_eq!(caption.is_empty(), ids[1] == batcher.tokenizer().end_id());
                dropped += usize::from(caption.is_empty());
            }
        }
        // 150 of 600 expected, standard deviation 10.6: 5 sigma.
        assert!((97..=203).contains(&dropped), "{dropped}");
    }

    #[test]
    fn folder_batches_flip_half_of_the_images() {
        let dir = tempfile::TempDir::new().unwrap();
        let mut image = image::RgbImage::new(8, 8);
        image.put_pixel(0, 0, image::Rgb([255; 3]));
        image.save(dir.path().join("a.png")).unwrap();
        std::fs::write(dir.path().join("a.txt"), "a dot").unwrap();
        let folder = Folder::open(FolderOptions::new(dir.path(), 8)).unwrap();
        let dataset = Dataset::Folder(Box::new(folder));
        let tokenizer = tokenizer(&dataset.vocabulary_captions());
        let options = BatchOptions {
            random_flip: true,
            batch_size: 200,
            ..options()
        };
        let batch = Batcher::new(dataset, tokenizer, options)
            .unwrap()
            .batch(0)
            .unwrap();
        let left = batch.pixels.chunks(192).filter(|p| p[0] == 1.0).count();
        let right = batch.pixels.chunks(192).filter(|p| p[21] == 1.0).count();
        assert_eq!(left + right, 200);
        // Standard deviation 7.1: 5 sigma.
        assert!((65..=135).contains(&left), "{left}");
    }

    #[test]
    fn dropping_a_full_loader_does_not_hang() {
        let batcher = batcher(20, options());
        let mut loader =
            Prefetcher::<_, DataError>::spawn(0, 1, move |step| batcher.batch(step)).unwrap();
        loader.next().unwrap();
        drop(loader);
    }

    #[test]
    fn options_are_checked() {
        for bad in [
            BatchOptions {
                batch_size: 0,
                ..options()
            },
            BatchOptions {
                caption_dropout: 1.1,
                ..options()
            },
            BatchOptions {
                random_flip: true,
                ..options()
            },
        ] {
            let dataset = Dataset::Shapes(Shapes::new(ShapesOptions::default()).unwrap());
            let tokenizer = tokenizer(&dataset.vocabulary_captions());
            let error = Batcher::new(dataset, tokenizer, bad).unwrap_err();
            assert!(matches!(error, DataError::Option { .. }));
        }
    }
}
