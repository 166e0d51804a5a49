//! Batches by step, and a thread that makes them ahead of time.

use std::any::Any;
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rayon::prelude::*;

use super::order::Permutation;
use super::rng::{KeyedRng, Stream};
use super::{DataError, Dataset, Tokenizer};

/// The options of batches, beside the dataset and the tokenizer.
#[derive(Clone, Debug, PartialEq)]
pub struct BatchOptions {
    pub batch_size: usize,
    /// Seed of the order, the caption dropout and the flips.
    pub seed: u64,
    /// Probability that a row's caption is replaced by the empty one, for classifier-free guidance
    /// (Ho and Salimans, "Classifier-free diffusion guidance", 2022).
    pub caption_dropout: f64,
    /// Mirror each image left to right with probability one half.
    pub random_flip: bool,
}

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
    options: BatchOptions,
    warned: Mutex<HashSet<String>>,
}

impl Batcher {
    /// # Errors
    /// [`DataError::Option`] for an empty batch, a dropout outside 0 to 1, or flips of images
    /// whose captions say left and right.
    pub fn new(
        dataset: Dataset,
        tokenizer: Tokenizer,
        options: BatchOptions,
    ) -> Result<Self, DataError> {
        let refuse = |option, value: String, expected: &str| {
            Err(DataError::Option {
                option,
                value,
                expected: expected.into(),
            })
        };
        if options.batch_size == 0 {
            return refuse("batch_size", "0".into(), "at least 1");
        }
        if !(0.0..=1.0).contains(&options.caption_dropout) {
            return refuse(
                "caption_dropout",
                options.caption_dropout.to_string(),
                "0 to 1",
            );
        }
        if options.random_flip && matches!(dataset, Dataset::Shapes(_)) {
            let expected = "False for dataset_type shapes, whose captions say left and right";
            return refuse("random_flip", "True".into(), expected);
        }
        Ok(Self {
            dataset,
            tokenizer,
            options,
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
        &self.options
    }

    /// The batch of `step`. Its rows are the next `batch_size` samples of an endless sequence of
    /// epochs, each a new order of the whole dataset; a batch may span two epochs.
    ///
    /// # Errors
    /// Errors of [`Dataset::get`] and [`Tokenizer::encode`].
    pub fn batch(&self, step: u64) -> Result<Batch, DataError> {
        let BatchOptions {
            batch_size,
            seed,
            caption_dropout,
            random_flip,
        } = self.options;
        let len = self.dataset.len() as u64;
        let first = step.saturating_mul(batch_size as u64);
        let mut epoch = first / len;
        let mut permutation = Permutation::new(seed, epoch, len as usize);
        let indices: Vec<usize> = (0..batch_size as u64)
            .map(|row| {
                let number = first.saturating_add(row);
                if number / len != epoch {
                    epoch = number / len;
                    permutation = Permutation::new(seed, epoch, len as usize);
                }
                permutation.index((number % len) as usize)
            })
            .collect();
        let rows: Vec<(Vec<f32>, Vec<i32>, String)> = indices
            .into_par_iter()
            .enumerate()
            .map(|(row, index)| {
                let sample = self.dataset.get(index)?;
                let draw = |stream| KeyedRng::new(seed, stream, step, row as u64).unit();
                let dropped = draw(Stream::CaptionDropout) < caption_dropout;
                let caption = if dropped {
                    String::new()
                } else {
                    sample.caption
                };
                let encoded = self.tokenizer.encode(&caption)?;
                for warning in encoded.warnings() {
                    self.warn_once(&caption, warning);
                }
                let flip = random_flip && draw(Stream::Flip) < 0.5;
                let pixels = to_unit(&sample.pixels, sample.resolution, flip);
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

/// `0..=255` to `-1..=1`, optionally mirrored left to right.
fn to_unit(pixels: &[u8], resolution: usize, flip: bool) -> Vec<f32> {
    let unit = |&value: &u8| f32::from(value) / 127.5 - 1.0;
    if !flip {
        return pixels.iter().map(unit).collect();
    }
    pixels
        .chunks_exact(resolution * 3)
        .flat_map(|row| row.chunks_exact(3).rev().flatten().map(unit))
        .collect()
}

/// A thread that makes batches ahead of the training loop, in order.
#[derive(Debug)]
pub struct Prefetcher {
    receiver: Option<Receiver<Result<Batch, DataError>>>,
    thread: Option<JoinHandle<()>>,
}

impl Prefetcher {
    /// Starts at `first_step`; at most `depth` finished batches wait.
    ///
    /// # Errors
    /// [`DataError::Loader`] if the thread cannot be started.
    pub fn spawn(batcher: Arc<Batcher>, first_step: u64, depth: usize) -> Result<Self, DataError> {
        Self::spawn_with(first_step, depth, move |step| batcher.batch(step))
    }

    fn spawn_with(
        first_step: u64,
        depth: usize,
        make: impl Fn(u64) -> Result<Batch, DataError> + Send + 'static,
    ) -> Result<Self, DataError> {
        let (sender, receiver) = sync_channel(depth.max(1));
        let thread = std::thread::Builder::new()
            .name("prefetch".into())
            .spawn(move || produce(first_step, &make, &sender))
            .map_err(|e| DataError::Loader {
                message: format!("cannot start its thread: {e}"),
            })?;
        Ok(Self {
            receiver: Some(receiver),
            thread: Some(thread),
        })
    }

    /// The next batch, waiting for it if need be.
    ///
    /// # Errors
    /// The error of [`Batcher::batch`]; [`DataError::Loader`] with the panic's message if it
    /// panicked, and on every call after an error.
    pub fn next_batch(&mut self) -> Result<Batch, DataError> {
        match self.receiver.as_ref().map(Receiver::recv) {
            Some(Ok(result)) => result,
            Some(Err(_)) | None => Err(DataError::Loader {
                message: "it ended after the error reported before".into(),
            }),
        }
    }
}

fn produce(
    first_step: u64,
    make: &dyn Fn(u64) -> Result<Batch, DataError>,
    sender: &SyncSender<Result<Batch, DataError>>,
) {
    for step in first_step.. {
        // Unwind safety: after a panic nothing of the batcher is used again by this thread, and
        // its only mutable state, the set of warnings, is behind a lock.
        let result = catch_unwind(AssertUnwindSafe(|| make(step))).unwrap_or_else(|panic| {
            Err(DataError::Loader {
                message: panic_message(&*panic),
            })
        });
        let failed = result.is_err();
        // A closed channel means that the training loop has ended.
        if sender.send(result).is_err() || failed {
            return;
        }
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("panic: {}", text.unwrap_or("without a message"))
}

impl Drop for Prefetcher {
    fn drop(&mut self) {
        // The thread may wait for room in the channel: close it before joining.
        self.receiver = None;
        if let Some(thread) = self.thread.take() {
            // A panic was already turned into an error inside the thread.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::data::{Folder, FolderOptions, Shapes, ShapesOptions, word_level_json};

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
        let mut whole = Prefetcher::spawn(Arc::new(batcher(20, options())), 0, 2).unwrap();
        let all: Vec<Batch> = (0..9).map(|_| whole.next_batch().unwrap()).collect();
        let mut resumed = Prefetcher::spawn(Arc::new(batcher(20, options())), 5, 1).unwrap();
        for (step, batch) in all.iter().enumerate() {
            assert_eq!(batch, &first.batch(step as u64).unwrap());
            if step >= 5 {
                assert_eq!(batch, &resumed.next_batch().unwrap());
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
        assert_eq!(
            to_unit(&[0, 255, 51, 1, 2, 3], 2, false)[..3],
            [-1.0, 1.0, -0.6]
        );
        let flipped = to_unit(&[0, 255, 51, 1, 2, 3], 2, true);
        assert_eq!(flipped[3..], [-1.0, 1.0, -0.6]);
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
                .entry(batcher.dataset().get(index).unwrap().caption)
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
        let dataset = Dataset::Folder(folder);
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
    fn panics_and_errors_of_the_thread_reach_the_caller() {
        let mut loader = Prefetcher::spawn_with(0, 2, |step| {
            assert!(step < 1, "broken at {step}");
            Ok(Batch {
                step,
                pixels: vec![],
                token_ids: vec![],
                captions: vec![],
            })
        })
        .unwrap();
        assert_eq!(loader.next_batch().unwrap().step, 0);
        let message = loader.next_batch().unwrap_err().to_string();
        assert!(message.contains("broken at 1"), "{message}");
        assert!(
            loader
                .next_batch()
                .unwrap_err()
                .to_string()
                .contains("reported before")
        );

        let mut loader = Prefetcher::spawn_with(3, 2, |index| {
            Err(DataError::Index {
                index: index as usize,
                len: 0,
            })
        })
        .unwrap();
        assert!(matches!(
            loader.next_batch(),
            Err(DataError::Index { index: 3, .. })
        ));
    }

    #[test]
    fn dropping_a_full_loader_does_not_hang() {
        let mut loader = Prefetcher::spawn(Arc::new(batcher(20, options())), 0, 1).unwrap();
        loader.next_batch().unwrap();
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
