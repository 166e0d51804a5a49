//! Datasets, captions, tokenizers and batches.
//!
//! A dataset is a list of images with captions; [`Permutation`] shuffles it, [`Batcher`] makes the
//! batch of a step, and [`Prefetcher`] makes batches ahead of the training loop. Everything random
//! is a function of a seed and the step, so a resumed run sees the batches of the uninterrupted
//! one, bit for bit.

mod batch;
mod buckets;
mod folder;
mod mask;
mod order;
mod picture;
mod prefetch;
mod record;
pub mod resample;
mod rng;
mod rows;
pub mod shapes;
mod table;
mod tags;
mod tokenizer;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::util::hash::Sha256;

pub use batch::{Batch, Batcher};
pub use buckets::{BucketOptions, Buckets};
pub use folder::{Folder, FolderOptions, Layout, RecordOptions, Share, TableOptions, is_image};
pub use mask::{Mask, MaskOrigin, Masks};
pub use order::Permutation;
pub use picture::{Crop, Framing, Picture, Sizes};
pub use prefetch::Prefetcher;
pub use rows::{BatchOptions, BatchRows, Row, Rows};
pub use shapes::{Shapes, ShapesOptions, Split};
pub use tags::TagOrders;
pub use tokenizer::{Encoded, Piece, Tokenizer, word_level_json};

/// One image with its caption.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// RGB, row-major HWC.
    pub pixels: Vec<u8>,
    /// Height and width.
    pub size: [usize; 2],
    /// How much its places count; `None` where all count alike.
    pub mask: Option<Mask>,
    /// At least one.
    pub captions: Vec<String>,
}

impl Sample {
    /// Mirrored left to right.
    pub fn flip(&mut self) {
        for row in self.pixels.chunks_exact_mut(3 * self.size[1].max(1)) {
            let mirrored: Vec<u8> = row.chunks_exact(3).rev().flatten().copied().collect();
            row.copy_from_slice(&mirrored);
        }
        if let Some(mask) = &mut self.mask {
            mask.flip();
        }
    }

    /// The pixels as an image; black where `pixels` is shorter than the size says.
    pub fn image(&self) -> image::RgbImage {
        let [height, width] = self.size.map(|side| side as u32);
        image::RgbImage::from_raw(width, height, self.pixels.clone())
            .unwrap_or_else(|| image::RgbImage::new(width, height))
    }
}

/// A source of samples with random access.
#[derive(Debug)]
pub enum Dataset {
    Shapes(Shapes),
    Folder(Box<Folder>),
}

impl Dataset {
    /// Samples in an epoch, at least 1.
    #[allow(clippy::len_without_is_empty, reason = "a dataset is never empty")]
    pub fn len(&self) -> usize {
        match self {
            Self::Shapes(shapes) => shapes.count(),
            Self::Folder(folder) => folder.count(),
        }
    }

    /// Height and width of the images in pixels, of most if they have several sizes.
    pub fn size(&self) -> [usize; 2] {
        match self {
            Self::Shapes(shapes) => [shapes.options().resolution; 2],
            Self::Folder(folder) => folder.options().framing.sizes.usual(),
        }
    }

    /// Sample `index`, below [`Dataset::len`]; the same whenever it is asked for.
    ///
    /// # Errors
    /// [`DataError::Image`] or [`DataError::Io`] for a file that could be read when the folder was
    /// opened and no longer can; [`DataError::Index`] past the end of a folder.
    pub fn get(&self, index: usize) -> Result<Sample, DataError> {
        match self {
            Self::Shapes(shapes) => Ok(shapes.get(index)),
            Self::Folder(folder) => folder.get(index),
        }
    }

    /// The captions of sample `index`, below [`Dataset::len`], and the origin of its pixels.
    ///
    /// # Errors
    /// [`DataError::Index`] past the end of a folder.
    pub fn entry(&self, index: usize) -> Result<(Vec<String>, Picture), DataError> {
        match self {
            Self::Shapes(shapes) => {
                let Sample {
                    pixels,
                    size,
                    captions,
                    ..
                } = shapes.get(index);
                let picture = Picture {
                    content: Sha256::of(pixels),
                    original_size: size,
                    corner: [0; 2],
                    extent: size,
                    size,
                    mask: MaskOrigin::Everywhere,
                };
                Ok((captions, picture))
            }
            Self::Folder(folder) => {
                let len = folder.count();
                let entry = folder.entry(index);
                let (captions, picture) = entry.ok_or(DataError::Index { index, len })?;
                Ok((captions.to_vec(), picture))
            }
        }
    }

    /// Whether places of its pictures count differently.
    pub fn has_masks(&self) -> bool {
        match self {
            Self::Shapes(_) => false,
            Self::Folder(folder) => folder.options().masks != Masks::None,
        }
    }

    /// How often an epoch has sample `index`; 0 past the end.
    pub fn repeats(&self, index: usize) -> usize {
        match self {
            Self::Shapes(_) => 1,
            Self::Folder(folder) => folder.repeats(index),
        }
    }

    /// Height and width of sample `index`.
    fn size_of(&self, index: usize) -> [usize; 2] {
        let own = match self {
            Self::Shapes(_) => None,
            Self::Folder(folder) => folder.entry(index),
        };
        own.map_or(self.size(), |(_, picture)| picture.size)
    }

    /// The heights and widths that images have, ascending, each with the number of its images.
    pub fn sizes(&self) -> BTreeMap<[usize; 2], usize> {
        let mut sizes = BTreeMap::new();
        for index in 0..self.len() {
            *sizes.entry(self.size_of(index)).or_default() += 1;
        }
        sizes
    }

    /// Whether sample `index` is a class image, which prior preservation puts beside each other sample.
    fn is_class(&self, index: usize) -> bool {
        match self {
            Self::Shapes(_) => false,
            Self::Folder(folder) => folder.is_class(index),
        }
    }

    /// The class images.
    pub fn classes(&self) -> Vec<usize> {
        let samples = 0..self.len();
        samples.filter(|index| self.is_class(*index)).collect()
    }

    /// The samples of each of `sizes`, each as often as an epoch has it, without class images.
    pub fn groups(&self, sizes: &[[usize; 2]]) -> Vec<Vec<usize>> {
        let mut groups = vec![Vec::new(); sizes.len()];
        for index in (0..self.len()).filter(|index| !self.is_class(*index)) {
            let size = self.size_of(index);
            if let Some(group) = sizes.iter().position(|s| *s == size) {
                groups[group].extend(std::iter::repeat_n(index, self.repeats(index)));
            }
        }
        groups
    }

    /// Keeps what was found out about files, so that it is not found out again at the next start.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn remember(&self) -> Result<(), DataError> {
        match self {
            Self::Shapes(_) => Ok(()),
            Self::Folder(folder) => folder.remember(),
        }
    }

    /// Captions whose words are all the words of the dataset, to build a tokenizer from.
    pub fn vocabulary_captions(&self) -> Vec<String> {
        match self {
            Self::Shapes(shapes) => shapes.vocabulary_captions(),
            Self::Folder(folder) => folder.captions().map(str::to_owned).collect(),
        }
    }
}

/// An error of a dataset, its options or a tokenizer.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    #[error("{option}={value} is out of range: expected {expected}")]
    Option {
        option: &'static str,
        value: String,
        expected: String,
    },
    #[error(
        "caption \"{caption}\" is not one of dataset_type shapes: expected {expected}, found `{found}`"
    )]
    ShapesCaption {
        caption: String,
        expected: String,
        found: String,
    },
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("image {} cannot be decoded: {message}", path.display())]
    Image { path: PathBuf, message: String },
    #[error("image {}: {message}", path.display())]
    Size { path: PathBuf, message: String },
    #[error("{} holds no images: expected .png, .jpg, .jpeg or .webp files with captions beside them", root.display())]
    EmptyFolder { root: PathBuf },
    #[error(
        "{count} caption(s) in {} have no image: {}; add the image or remove the caption",
        root.display(),
        named(names, *count)
    )]
    CaptionWithoutImage {
        root: PathBuf,
        names: Vec<String>,
        count: usize,
    },
    #[error(
        "{count} image(s) in {} have no caption: {}; write the caption into a .txt file of the same name, or list the image in metadata.jsonl",
        root.display(),
        named(names, *count)
    )]
    ImageWithoutCaption {
        root: PathBuf,
        names: Vec<String>,
        count: usize,
    },
    #[error(
        "{count} image(s) in {} have a .txt caption beside them although metadata.jsonl gives the captions: {}; remove one of the two",
        root.display(),
        named(names, *count)
    )]
    TwoCaptions {
        root: PathBuf,
        names: Vec<String>,
        count: usize,
    },
    #[error(
        "{count} image(s) have no mask in {}: {}; put a picture of the same name there, white where the error counts",
        masks.display(),
        named(names, *count)
    )]
    ImageWithoutMask {
        masks: PathBuf,
        names: Vec<String>,
        count: usize,
    },
    #[error("{} and {} are masks of one name; remove one of the two", first.display(), second.display())]
    TwoMasks { first: PathBuf, second: PathBuf },
    #[error(
        "the folder of masks {} lies in that of the images, {}, where masks would be images too; move it out",
        masks.display(),
        root.display()
    )]
    MasksAmongImages { masks: PathBuf, root: PathBuf },
    #[error("mask {}: {message}; make it as large as the image", mask.display())]
    MaskSize { mask: PathBuf, message: String },
    #[error(
        "none of the images in {} has an alpha channel, which masked_loss=alpha takes for the mask; leave masked_loss out, or \
         give masks of their own with masked_loss=folder",
        root.display()
    )]
    NoAlpha { root: PathBuf },
    #[error("{} line {line}: {message}", path.display())]
    Metadata {
        path: PathBuf,
        line: usize,
        message: String,
    },
    #[error(
        "folder {}: a picture is repeated {found} times, expected 1 to {MOST_REPEATS}; rename the folder, or leave \
         folder_repeats out",
        path.display()
    )]
    Repeats { path: PathBuf, found: String },
    #[error("caption file {}: {message}", path.display())]
    CaptionFile { path: PathBuf, message: String },
    #[error("{} holds no .tar files, each with images and captions of one name: 0001.jpg, 0001.txt", root.display())]
    NoArchives { root: PathBuf },
    #[error("archive {}: {message}", path.display())]
    Archive { path: PathBuf, message: String },
    #[error("{}: no table of the split {split}: {found}; train_split names the split", root.display())]
    NoTables {
        root: PathBuf,
        split: String,
        found: String,
    },
    #[error("table {}: {message}", path.display())]
    Table { path: PathBuf, message: String },
    #[error(
        "{} holds no TFRecord files: expected names that end in .tfrecord, .tfrecords or .tfrec, also with -00000-of-00010 after it",
        root.display()
    )]
    NoRecords { root: PathBuf },
    #[error("TFRecord file {}: {message}", path.display())]
    Record { path: PathBuf, message: String },
    #[error(
        "train_data_mix: to have its share, {} would have each of its {images} pictures in an epoch {repeats} times, expected \
         at most {MOST_REPEATS}: give it less weight or more pictures",
        root.display()
    )]
    Mix {
        root: PathBuf,
        images: usize,
        repeats: usize,
    },
    #[error("{} leads outside the dataset folder {}; copy the file into the folder", path.display(), root.display())]
    PathEscape { path: PathBuf, root: PathBuf },
    #[error(
        "{count} of {total} images in {} cannot be read, more than max_bad_image_fraction={limit} allows: {}",
        root.display(),
        named(names, *count)
    )]
    TooManyBadImages {
        root: PathBuf,
        count: usize,
        total: usize,
        limit: f64,
        names: Vec<String>,
    },
    #[error("sample {index} was asked of a dataset of {len}")]
    Index { index: usize, len: usize },
    #[error("tokenizer {origin}: {message}")]
    Tokenizer { origin: String, message: String },
    #[error("tokenizer file {} line {line}: {message}", path.display())]
    TokenizerLine {
        path: PathBuf,
        line: usize,
        message: String,
    },
    #[error(
        "no tokenizer in {}: expected {expected}; {found}; copy {source_of_it} there",
        dir.display()
    )]
    TokenizerMissing {
        dir: PathBuf,
        /// The names of the files.
        expected: &'static str,
        found: String,
        /// Where people have it from.
        source_of_it: &'static str,
    },
    #[error("the data loader stopped: {message}")]
    Loader { message: String },
}

/// Most times that an epoch has a sample.
const MOST_REPEATS: usize = 10_000;

/// The canonical form of `root/path`, refused when links lead outside `root`.
fn inside(root: &Path, path: &Path) -> Result<PathBuf, DataError> {
    let full = root.join(path);
    let target = full.canonicalize().map_err(|e| io("resolve", &full, e))?;
    if !target.starts_with(root) {
        return Err(DataError::PathEscape {
            path: full,
            root: root.to_owned(),
        });
    }
    Ok(target)
}

fn io(action: &'static str, path: &Path, source: std::io::Error) -> DataError {
    DataError::Io {
        action,
        path: path.to_owned(),
        source,
    }
}

/// How many names a message lists.
const NAMED: usize = 10;

fn named(names: &[String], count: usize) -> String {
    let shown = &names[..names.len().min(NAMED)];
    let mut list = shown.join(", ");
    if count > shown.len() {
        list.push_str(&format!(" and {} more", count - shown.len()));
    }
    list
}
