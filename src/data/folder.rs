//! `dataset_type: folder`, `webdataset`, `hf` and `tfrecord`: images with captions, as files of a folder, in tar archives, in
//! parquet files or in TFRecord files.
//!
//! An image may have several captions, of which each use draws one. In a folder captions come from `metadata.jsonl` at the top of the folder (`{"file_name": ..., "text": ...}`
//! per line, or a list of texts) where there is one, and otherwise from a `.txt` file of the same name as each image, a
//! caption in each line.
//! Subfolders are searched; names that begin with a dot are skipped. The order of samples is
//! that of their paths.

mod list;
mod masks;
mod mix;
mod records;
mod tables;
mod tars;

use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::mask::{Mask, MaskSource, Masks};
use super::picture::{self, Crop, Framing, ImageFile, Loaded, Note, Picture, Sizes};
use super::{DataError, MOST_REPEATS, NAMED, Sample, io};
use crate::util::known::Known;
pub use list::is_image;
pub use mix::Share;
pub use records::RecordOptions;
pub use tables::TableOptions;

/// How a folder holds images and captions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layout {
    /// As files.
    Files,
    /// In tar archives, as WebDataset writes them.
    Tars,
    /// In parquet files, as Hugging Face's `datasets` writes them; `root` may be one such file.
    Tables(TableOptions),
    /// In TFRecord files, as TensorFlow writes them.
    Records(RecordOptions),
}

/// An image that a folder lists.
struct Listed {
    /// Its path relative to the folder.
    name: PathBuf,
    image: ImageFile,
    /// At least one.
    captions: Vec<String>,
}

/// Options of a folder.
#[derive(Clone, Debug, PartialEq)]
pub struct FolderOptions {
    pub root: PathBuf,
    pub layout: Layout,
    /// The caption of images of [`Layout::Files`] that have none of their own; `None` refuses those.
    pub caption: Option<String>,
    /// What is kept of each image.
    pub framing: Framing,
    pub masks: Masks,
    /// Share of the images that may be unreadable; these are skipped with a warning.
    pub max_bad_image_fraction: f64,
    /// How many images are used, the first of their order; all by default.
    pub max_images: Option<usize>,
    /// Whether a folder called `10_name` has its images ten times in an epoch, as in kohya's trainers.
    pub folder_repeats: bool,
    /// Most memory for decoded images. When all fit they are decoded once; otherwise each is
    /// decoded again whenever it is asked for.
    pub cache_bytes: u64,
    /// The file in which [`Folder::remember`] keeps which images can be decoded. One that has not changed since is not
    /// read when the folder is opened, unless decoded images are kept in memory.
    pub known: Option<PathBuf>,
}

impl FolderOptions {
    /// Squares of `resolution` pixels about the centre, one bad image in a hundred, and 2 GiB of cache.
    pub fn new(root: impl Into<PathBuf>, resolution: usize) -> Self {
        Self {
            root: root.into(),
            layout: Layout::Files,
            caption: None,
            framing: Framing {
                sizes: Sizes::Square(resolution),
                crop: Crop::Center,
            },
            masks: Masks::None,
            max_bad_image_fraction: 0.01,
            max_images: None,
            folder_repeats: false,
            cache_bytes: 2 << 30,
            known: None,
        }
    }
}

#[derive(Debug)]
struct Entry {
    image: ImageFile,
    mask: MaskSource,
    captions: Vec<String>,
    /// How often an epoch has it.
    repeats: usize,
    picture: Picture,
    /// RGB at the picture's size with its mask, when the whole dataset fits the cache.
    pixels: Option<(Vec<u8>, Option<Mask>)>,
}

/// An image with what to remember of it, or why it cannot be decoded.
type Decoded = Result<(Entry, Vec<Note>), (PathBuf, DataError)>;

/// The images of a folder that could be read, with their captions.
#[derive(Debug)]
pub struct Folder {
    options: FolderOptions,
    entries: Vec<Entry>,
    /// The first of the class images, which come after all others.
    first_class: Option<usize>,
    bad: Vec<PathBuf>,
    /// What is not in the file of known images yet.
    found: Vec<Note>,
}

impl Folder {
    /// Lists the folder, pairs images with captions and decodes every image once, in parallel, so
    /// that the number of samples is known before training starts.
    ///
    /// # Errors
    /// Options out of range; a folder that cannot be read or has no images; captions without image
    /// and images without caption (up to ten are named); a malformed line of metadata.jsonl (with
    /// its number); a path that leads outside the folder; masks that are missing or have another size than their images;
    /// more unreadable images than `max_bad_image_fraction` allows.
    pub fn open(options: FolderOptions) -> Result<Self, DataError> {
        let [side, _] = options.framing.sizes.usual();
        if !(1..=4096).contains(&side) {
            return Err(DataError::Option {
                option: "resolution",
                value: side.to_string(),
                expected: "1 to 4096".into(),
            });
        }
        if !(0.0..=1.0).contains(&options.max_bad_image_fraction) {
            return Err(DataError::Option {
                option: "max_bad_image_fraction",
                value: options.max_bad_image_fraction.to_string(),
                expected: "0 to 1".into(),
            });
        }
        let root = options
            .root
            .canonicalize()
            .map_err(|source| io("open the dataset folder", &options.root, source))?;
        let mut listed = match &options.layout {
            Layout::Files => list::captioned_images(&root, options.caption.as_deref())?,
            Layout::Tars => tars::captioned_images(&root)?,
            Layout::Tables(tables) => tables::captioned_images(&root, tables)?,
            Layout::Records(records) => records::captioned_images(&root, records)?,
        };
        if let Some(most) = options.max_images {
            if most > listed.len() {
                return Err(DataError::Option {
                    option: "max_train_samples",
                    value: most.to_string(),
                    expected: format!("at most {}, the images of {}", listed.len(), root.display()),
                });
            }
            listed.truncate(most);
        }
        let sources = masks::sources(&options.masks, &root, &listed)?;
        let total = listed.len();
        let bytes_per_image = 3 * (side as u64).pow(2);
        let keep = bytes_per_image.saturating_mul(total as u64) <= options.cache_bytes;
        // Without a cache nobody asked for one: pictures are decoded once, to be encoded.
        if !keep && options.cache_bytes > 0 {
            tracing::info!(
                "the {total} images of {} need {} MiB decoded, more than the cache of {} MiB: \
                 each is decoded again when it is used",
                root.display(),
                (bytes_per_image * total as u64) >> 20,
                options.cache_bytes >> 20,
            );
        }
        let repeats: Vec<usize> = match options.folder_repeats {
            false => vec![1; total],
            true => listed
                .iter()
                .map(|listed| repeats(&listed.name))
                .collect::<Result<_, _>>()?,
        };
        let known = options.known.as_deref().map(Known::read);
        let load = |image: &ImageFile, mask: &MaskSource| match &known {
            Some(known) if !keep => {
                let (picture, found) = picture::find(image, mask, &options.framing, known)?;
                Ok((picture, None, found))
            }
            _ => {
                let loaded = picture::load(image, mask, &options.framing)?;
                let pixels = keep.then(|| (loaded.pixels.into_raw(), loaded.mask));
                Ok((loaded.picture, pixels, Vec::new()))
            }
        };
        let decoded: Vec<Decoded> = listed
            .into_par_iter()
            .zip(repeats)
            .zip(sources)
            .map(
                |((listed, repeats), mask)| match load(&listed.image, &mask) {
                    Ok((picture, pixels, found)) => Ok((
                        Entry {
                            image: listed.image,
                            mask,
                            captions: listed.captions,
                            repeats,
                            picture,
                            pixels,
                        },
                        found,
                    )),
                    Err(error) => Err((listed.name, error)),
                },
            )
            .collect();
        let mut entries = Vec::new();
        let mut bad = Vec::new();
        let mut found = Vec::new();
        for result in decoded {
            match result {
                Ok((entry, new)) => {
                    entries.push(entry);
                    found.extend(new);
                }
                Err((_, error @ DataError::MaskSize { .. })) => return Err(error),
                Err((path, error)) => {
                    tracing::warn!("skipped: {error}");
                    bad.push(path);
                }
            }
        }
        if bad.len() as f64 > options.max_bad_image_fraction * total as f64 || entries.is_empty() {
            return Err(DataError::TooManyBadImages {
                root,
                count: bad.len(),
                total,
                limit: options.max_bad_image_fraction,
                names: bad
                    .iter()
                    .take(NAMED)
                    .map(|p| p.display().to_string())
                    .collect(),
            });
        }
        if !bad.is_empty() {
            tracing::warn!(
                "{} of {total} images in {} were skipped",
                bad.len(),
                root.display()
            );
        }
        Ok(Self {
            options: FolderOptions { root, ..options },
            entries,
            first_class: None,
            bad,
            found,
        })
    }

    /// The same with the first `count` images of another folder, which has the same framing, as class images for prior
    /// preservation.
    pub fn with_class_images(mut self, classes: Folder, count: usize) -> Folder {
        self.first_class = Some(self.entries.len());
        self.entries.extend(classes.entries.into_iter().take(count));
        self.bad.extend(classes.bad);
        self.found.extend(classes.found);
        self
    }

    /// Says how many images have no mask where masks are in alpha channels.
    ///
    /// # Errors
    /// When none has one.
    pub fn check_masks(&self) -> Result<(), DataError> {
        let origins = self.entries.iter().map(|entry| entry.picture.mask);
        masks::check_alpha(&self.options.masks, &self.options.root, origins)
    }

    /// Whether sample `index` is a class image.
    pub fn is_class(&self, index: usize) -> bool {
        self.first_class.is_some_and(|first| index >= first)
    }

    /// Keeps what was found out about the images in [`FolderOptions::known`], whose folder must exist.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn remember(&self) -> Result<(), DataError> {
        let Some(path) = self
            .options
            .known
            .as_deref()
            .filter(|_| !self.found.is_empty())
        else {
            return Ok(());
        };
        let mut known = Known::read(path);
        for [key, text] in &self.found {
            known.insert(key.clone(), text.clone());
        }
        let write = known.write();
        write.map_err(|source| io("write what is known of the images", path, source))
    }

    /// The options, with the folder's canonical path.
    pub fn options(&self) -> &FolderOptions {
        &self.options
    }

    /// Images that can be read, at least 1.
    pub fn count(&self) -> usize {
        self.entries.len()
    }

    /// Images that could not be read and were skipped, relative to the folder.
    pub fn bad_images(&self) -> &[PathBuf] {
        &self.bad
    }

    /// All captions, in the order of the samples.
    pub fn captions(&self) -> impl Iterator<Item = &str> {
        let captions = self.entries.iter().flat_map(|entry| &entry.captions);
        captions.map(String::as_str)
    }

    /// The captions of sample `index` and what is known of its picture; `None` past the end.
    pub fn entry(&self, index: usize) -> Option<(&[String], Picture)> {
        let entry = self.entries.get(index)?;
        Some((&entry.captions, entry.picture))
    }

    /// How often an epoch has sample `index`; 0 past the end.
    pub fn repeats(&self, index: usize) -> usize {
        self.entries.get(index).map_or(0, |entry| entry.repeats)
    }

    /// Sample `index`.
    ///
    /// # Errors
    /// [`DataError::Index`] past the end; [`DataError::Io`] or [`DataError::Image`] for a file that
    /// changed since the folder was opened.
    pub fn get(&self, index: usize) -> Result<Sample, DataError> {
        let len = self.entries.len();
        let entry = self
            .entries
            .get(index)
            .ok_or(DataError::Index { index, len })?;
        let (pixels, mask) = match &entry.pixels {
            Some(kept) => kept.clone(),
            None => {
                let framing = &self.options.framing;
                let Loaded {
                    pixels,
                    mask,
                    picture,
                } = picture::load(&entry.image, &entry.mask, framing)?;
                if picture != entry.picture {
                    return Err(DataError::Image {
                        path: entry.image.shown(),
                        message: "it changed since training began; start again".into(),
                    });
                }
                (pixels.into_raw(), mask)
            }
        };
        Ok(Sample {
            pixels,
            size: entry.picture.size,
            mask,
            captions: entry.captions.clone(),
        })
    }
}

/// How often an epoch has an image, by the number before the first underscore of its folder's name, if there is one.
fn repeats(name: &Path) -> Result<usize, DataError> {
    let folder = name.parent().unwrap_or(Path::new(""));
    let own = folder.file_name().unwrap_or_default().to_string_lossy();
    let number = own.split_once('_').map(|(number, _)| number);
    let is_number = |text: &&str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let Some(number) = number.filter(is_number) else {
        return Ok(1);
    };
    let repeats = number.parse().ok();
    let repeats = repeats.filter(|n| (1..=MOST_REPEATS).contains(n));
    repeats.ok_or_else(|| DataError::Repeats {
        path: folder.to_owned(),
        found: number.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use image::{Rgb, RgbImage};
    use tempfile::TempDir;

    use super::*;
    use crate::data::{BucketOptions, Buckets, Dataset};

    fn save_image(dir: &Path, name: &str, colour: [u8; 3]) {
        let path = dir.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        RgbImage::from_pixel(12, 8, Rgb(colour)).save(path).unwrap();
    }

    fn text(dir: &Path, name: &str, content: &str) {
        fs::write(dir.join(name), content).unwrap();
    }

    fn open(dir: &Path) -> Result<Folder, DataError> {
        Folder::open(FolderOptions::new(dir, 8))
    }

    fn message(dir: &Path) -> String {
        open(dir).unwrap_err().to_string()
    }

    #[test]
    fn text_files_and_subfolders() {
        let dir = TempDir::new().unwrap();
        save_image(dir.path(), "b.png", [255, 0, 0]);
        save_image(dir.path(), "sub/a.JPG", [0, 0, 255]);
        save_image(dir.path(), "c.webp", [0, 255, 0]);
        text(dir.path(), "b.txt", " a red image\n");
        text(dir.path(), "c.txt", "a green image");
        text(dir.path(), "sub/a.txt", "\u{feff}a blue image");
        let folder = open(dir.path()).unwrap();
        let captions: Vec<&str> = folder.captions().collect();
        assert_eq!(captions, ["a red image", "a green image", "a blue image"]);
        let sample = folder.get(0).unwrap();
        assert_eq!(sample.pixels, [255, 0, 0].repeat(64));
        assert_eq!(sample.image().get_pixel(3, 3).0, [255, 0, 0]);
        assert!(matches!(
            folder.get(3),
            Err(DataError::Index { index: 3, len: 3 })
        ));
    }

    #[test]
    fn without_cache_the_pixels_are_the_same() {
        let dir = TempDir::new().unwrap();
        save_image(dir.path(), "a.png", [1, 2, 3]);
        text(dir.path(), "a.txt", "a");
        let options = FolderOptions {
            cache_bytes: 10,
            ..FolderOptions::new(dir.path(), 8)
        };
        let folder = Folder::open(options).unwrap();
        assert!(folder.entries[0].pixels.is_none());
        assert_eq!(
            folder.get(0).unwrap(),
            open(dir.path()).unwrap().get(0).unwrap()
        );
        fs::remove_file(dir.path().join("a.png")).unwrap();
        assert!(folder.get(0).unwrap_err().to_string().contains("a.png"));
    }

    /// The content of a file that seems unchanged does not matter, so it is not read; a file that changed is.
    #[test]
    fn known_images_are_not_read_again() {
        use std::time::{Duration, SystemTime};

        let dir = TempDir::new().unwrap();
        let known = dir.path().join(".known");
        let then = SystemTime::now() - Duration::from_secs(60);
        let settle = |name: &str, time| {
            let file = fs::File::options()
                .write(true)
                .open(dir.path().join(name))
                .unwrap();
            file.set_modified(time).unwrap();
        };
        for name in ["a", "b"] {
            save_image(dir.path(), &format!("{name}.png"), [1, 2, 3]);
            text(dir.path(), &format!("{name}.txt"), "x");
        }
        settle("a.png", then);
        let open = || {
            Folder::open(FolderOptions {
                cache_bytes: 0,
                max_bad_image_fraction: 0.5,
                known: Some(known.clone()),
                ..FolderOptions::new(dir.path(), 8)
            })
            .unwrap()
        };
        let first = open();
        first.remember().unwrap();
        let damage = |name: &str| {
            let bytes = fs::read(dir.path().join(name)).unwrap();
            fs::write(dir.path().join(name), vec![b'x'; bytes.len()]).unwrap();
        };
        damage("a.png");
        settle("a.png", then);
        let again = open();
        assert_eq!((again.count(), again.entry(0)), (2, first.entry(0)));
        // What it holds is found wrong when it is used.
        assert!(again.get(0).unwrap_err().to_string().contains("a.png"));
        // The other was written to just before it was read, so nothing is known of it.
        damage("b.png");
        assert_eq!(open().bad_images(), [PathBuf::from("b.png")]);
        settle("a.png", then + Duration::from_secs(1));
        save_image(dir.path(), "b.png", [1, 2, 3]);
        assert_eq!(open().bad_images(), [PathBuf::from("a.png")]);
    }

    #[test]
    fn metadata_lists_images() {
        let dir = TempDir::new().unwrap();
        save_image(dir.path(), "x/a.png", [9, 9, 9]);
        save_image(dir.path(), "b.png", [7, 7, 7]);
        text(
            dir.path(),
            "metadata.jsonl",
            "{\"file_name\": \"./x/a.png\", \"text\": \"one\"}\n\n{\"file_name\": \"b.png\", \"text\": \"two\", \"more\": 1}",
        );
        let captions: Vec<String> = open(dir.path())
            .unwrap()
            .captions()
            .map(String::from)
            .collect();
        assert_eq!(captions, ["two", "one"]);
    }

    #[test]
    fn images_have_several_captions_and_folders_repeat_them() {
        let dir = TempDir::new().unwrap();
        for name in ["10_cats/a.png", "2_x_y/b.png", "c_3/c.png", "d.png"] {
            save_image(dir.path(), name, [9, 9, 9]);
            text(dir.path(), &name.replace("png", "txt"), " one \n\n two\r\n");
        }
        let with = |folder_repeats| {
            Folder::open(FolderOptions {
                folder_repeats,
                ..FolderOptions::new(dir.path(), 8)
            })
        };
        let repeats = |folder: &Folder| [0, 1, 2, 3, 4].map(|index| folder.repeats(index));
        let folder = with(true).unwrap();
        assert_eq!(folder.entry(2).unwrap().0, ["one", "two"]);
        assert_eq!(folder.get(2).unwrap().captions, ["one", "two"]);
        assert_eq!(repeats(&folder), [10, 2, 1, 1, 0]);
        assert_eq!(repeats(&with(false).unwrap()), [1, 1, 1, 1, 0]);
        save_image(dir.path(), "0_x/e.png", [9, 9, 9]);
        text(dir.path(), "0_x/e.txt", "x");
        let error = with(true).unwrap_err().to_string();
        assert!(
            error.contains("folder 0_x") && error.contains("0 times"),
            "{error}"
        );

        let listed = TempDir::new().unwrap();
        save_image(listed.path(), "a.png", [9, 9, 9]);
        let line = "{\"file_name\": \"a.png\", \"text\": [\"one\", \" two \"]}";
        text(listed.path(), "metadata.jsonl", line);
        assert_eq!(
            open(listed.path()).unwrap().entry(0).unwrap().0,
            ["one", "two"]
        );
    }

    /// Each image keeps as much as its bucket shows of it; one below the smallest bucket is named and left out.
    #[test]
    fn images_have_the_sizes_of_their_buckets() {
        let dir = TempDir::new().unwrap();
        for (name, width, height) in [("a", 40, 20), ("b", 20, 20), ("c", 21, 43), ("d", 60, 7)] {
            let path = dir.path().join(format!("{name}.png"));
            RgbImage::new(width, height).save(path).unwrap();
            text(dir.path(), &format!("{name}.txt"), "x");
        }
        let buckets = Buckets::new(BucketOptions {
            resolution: 16,
            min_side: 8,
            max_side: 32,
            steps: 4,
        });
        let folder = Folder::open(FolderOptions {
            framing: Framing {
                sizes: Sizes::Buckets(buckets.unwrap()),
                crop: Crop::Center,
            },
            max_bad_image_fraction: 0.25,
            ..FolderOptions::new(dir.path(), 16)
        })
        .unwrap();
        let sizes = [0, 1, 2].map(|index| folder.get(index).unwrap().size);
        assert_eq!(sizes, [[12, 20], [16, 16], [20, 12]]);
        for (index, size) in sizes.iter().enumerate() {
            let sample = folder.get(index).unwrap();
            assert_eq!(sample.pixels.len(), size[0] * size[1] * 3);
        }
        assert_eq!(folder.bad_images(), [PathBuf::from("d.png")]);
        let dataset = Dataset::Folder(Box::new(folder));
        let sizes: Vec<[usize; 2]> = dataset.sizes().into_keys().collect();
        assert_eq!(dataset.groups(&sizes), [vec![0], vec![1], vec![2]]);
    }

    #[test]
    fn bad_metadata_names_the_line() {
        for (line, part) in [
            ("{\"file_name\": \"a.png\"", "not a JSON object"),
            ("{\"file_name\": \"a.png\"}", "`text` is missing"),
            ("{\"file_name\": 3, \"text\": \"x\"}", "`file_name` is 3"),
            ("[1]", "`file_name` is missing"),
            (
                "{\"file_name\": \"a.png\", \"text\": \"again\"}",
                "second time",
            ),
            (
                "{\"file_name\": \"a.gif\", \"text\": \"x\"}",
                "a.gif is not a",
            ),
        ] {
            let dir = TempDir::new().unwrap();
            save_image(dir.path(), "a.png", [0; 3]);
            let first = "{\"file_name\": \"a.png\", \"text\": \"x\"}";
            text(dir.path(), "metadata.jsonl", &format!("{first}\n{line}\n"));
            let message = message(dir.path());
            assert!(
                message.contains("line 2") && message.contains(part),
                "{message}"
            );
        }
    }

    #[test]
    fn metadata_cannot_leave_the_folder() {
        let outer = TempDir::new().unwrap();
        save_image(outer.path(), "secret.png", [0; 3]);
        let dir = outer.path().join("set");
        fs::create_dir(&dir).unwrap();
        let absolute = outer.path().join("secret.png").display().to_string();
        for name in ["../secret.png", "x/../../secret.png", absolute.as_str()] {
            let line = serde_json::json!({"file_name": name, "text": "x"}).to_string();
            text(&dir, "metadata.jsonl", &line);
            assert!(
                matches!(open(&dir), Err(DataError::PathEscape { .. })),
                "{name}"
            );
        }
        #[cfg(unix)]
        {
            fs::remove_file(dir.join("metadata.jsonl")).unwrap();
            std::os::unix::fs::symlink(outer.path().join("secret.png"), dir.join("a.png")).unwrap();
            text(&dir, "a.txt", "x");
            assert!(matches!(open(&dir), Err(DataError::PathEscape { .. })));
        }
    }

    #[test]
    fn captions_and_images_that_miss_each_other_are_named() {
        let dir = TempDir::new().unwrap();
        assert!(matches!(
            open(dir.path()),
            Err(DataError::EmptyFolder { .. })
        ));
        save_image(dir.path(), "a.png", [0; 3]);
        text(dir.path(), "a.txt", "x");
        text(dir.path(), "lost.txt", "x");
        assert!(message(dir.path()).contains("no image: lost.txt"));
        fs::remove_file(dir.path().join("lost.txt")).unwrap();
        for k in 0..12 {
            save_image(dir.path(), &format!("n{k:02}.png"), [0; 3]);
        }
        let text_message = message(dir.path());
        assert!(text_message.starts_with("12 image(s)"), "{text_message}");
        assert!(
            text_message.contains("n09.png and 2 more"),
            "{text_message}"
        );
        text(
            dir.path(),
            "metadata.jsonl",
            "{\"file_name\": \"gone.png\", \"text\": \"x\"}",
        );
        assert!(message(dir.path()).contains(".txt caption beside them"));
        fs::remove_file(dir.path().join("a.txt")).unwrap();
        assert!(message(dir.path()).contains("gone.png (line 1)"));
        assert!(
            open(&dir.path().join("absent"))
                .unwrap_err()
                .to_string()
                .contains("absent")
        );
    }

    #[test]
    fn empty_and_foreign_caption_files_are_named() {
        let dir = TempDir::new().unwrap();
        save_image(dir.path(), "a.png", [0; 3]);
        text(dir.path(), "a.txt", " \n");
        assert!(message(dir.path()).contains("a.txt: empty"));
        fs::write(dir.path().join("a.txt"), [0xff, 0xfe]).unwrap();
        assert!(message(dir.path()).contains("not UTF-8"));
        fs::write(dir.path().join("a.txt"), vec![b'x'; 70_000]).unwrap();
        assert!(message(dir.path()).contains("64 KiB"));
    }

    #[test]
    fn unreadable_images_are_skipped_up_to_the_limit() {
        let dir = TempDir::new().unwrap();
        for k in 0..4 {
            save_image(dir.path(), &format!("{k}.png"), [k; 3]);
            text(dir.path(), &format!("{k}.txt"), "x");
        }
        let whole = fs::read(dir.path().join("2.png")).unwrap();
        fs::write(dir.path().join("2.png"), &whole[..whole.len() / 2]).unwrap();
        let with = |limit| {
            let base = FolderOptions::new(dir.path(), 8);
            Folder::open(FolderOptions {
                max_bad_image_fraction: limit,
                ..base
            })
        };
        let folder = with(0.25).unwrap();
        assert_eq!(
            (folder.count(), folder.bad_images()),
            (3, &[PathBuf::from("2.png")][..])
        );
        let error = with(0.2).unwrap_err().to_string();
        assert!(
            error.contains("1 of 4") && error.contains("2.png"),
            "{error}"
        );
        assert!(matches!(with(1.5), Err(DataError::Option { .. })));
        for k in 0..4 {
            text(dir.path(), &format!("{k}.png"), "no image");
        }
        assert!(matches!(
            with(1.0),
            Err(DataError::TooManyBadImages { count: 4, .. })
        ));
    }
}
