//! `dataset_type: folder`: image files with captions beside them.
//!
//! Captions come from `metadata.jsonl` at the top of the folder (`{"file_name": ..., "text": ...}`
//! per line) where there is one, and otherwise from a `.txt` file of the same name as each image.
//! Subfolders are searched; names that begin with a dot are skipped. The order of samples is
//! that of their paths.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Component, Path, PathBuf};

use rayon::prelude::*;

use super::picture::{self, Crop, Note, Picture};
use super::{DataError, NAMED, Sample};
use crate::util::files;
use crate::util::known::Known;

/// Longest caption, and longest line of metadata.jsonl.
const MAX_CAPTION_BYTES: u64 = 64 << 10;
const MAX_LINE_BYTES: u64 = 1 << 20;

/// Options of `dataset_type: folder`.
#[derive(Clone, Debug, PartialEq)]
pub struct FolderOptions {
    pub root: PathBuf,
    /// Side to which the largest square of an image is resized (Lanczos).
    pub resolution: usize,
    /// Where that square lies.
    pub crop: Crop,
    /// Share of the images that may be unreadable; these are skipped with a warning.
    pub max_bad_image_fraction: f64,
    /// Most memory for decoded images. When all fit they are decoded once; otherwise each is
    /// decoded again whenever it is asked for.
    pub cache_bytes: u64,
    /// The file in which [`Folder::remember`] keeps which images can be decoded. One that has not changed since is not
    /// read when the folder is opened, unless decoded images are kept in memory.
    pub known: Option<PathBuf>,
}

impl FolderOptions {
    /// Crops about the centre, one bad image in a hundred, and 2 GiB of cache.
    pub fn new(root: impl Into<PathBuf>, resolution: usize) -> Self {
        Self {
            root: root.into(),
            resolution,
            crop: Crop::Center,
            max_bad_image_fraction: 0.01,
            cache_bytes: 2 << 30,
            known: None,
        }
    }
}

#[derive(Debug)]
struct Entry {
    path: PathBuf,
    caption: String,
    picture: Picture,
    /// RGB at the dataset's resolution, when the whole dataset fits the cache.
    pixels: Option<Vec<u8>>,
}

/// An image with what to remember of it, or why it cannot be decoded.
type Decoded = Result<(Entry, Option<Note>), (PathBuf, DataError)>;

/// The images of a folder that could be read, with their captions.
#[derive(Debug)]
pub struct Folder {
    options: FolderOptions,
    entries: Vec<Entry>,
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
    /// its number); a path that leads outside the folder; more unreadable images than
    /// `max_bad_image_fraction` allows.
    pub fn open(options: FolderOptions) -> Result<Self, DataError> {
        if !(1..=4096).contains(&options.resolution) {
            return Err(DataError::Option {
                option: "resolution",
                value: options.resolution.to_string(),
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
        let captions = captioned_images(&root)?;
        let total = captions.len();
        let bytes_per_image = 3 * (options.resolution as u64).pow(2);
        let keep = bytes_per_image.saturating_mul(total as u64) <= options.cache_bytes;
        if !keep {
            tracing::info!(
                "the {total} images of {} need {} MiB decoded, more than the cache of {} MiB: \
                 each is decoded again when it is used",
                root.display(),
                (bytes_per_image * total as u64) >> 20,
                options.cache_bytes >> 20,
            );
        }
        let known = options.known.as_deref().map(Known::read);
        let load = |path: &Path| match &known {
            Some(known) if !keep => {
                let (picture, found) = picture::find(path, options.crop, known)?;
                Ok((picture, None, found))
            }
            _ => {
                let (image, picture) = picture::load(path, options.resolution, options.crop)?;
                Ok((picture, keep.then(|| image.into_raw()), None))
            }
        };
        let decoded: Vec<Decoded> = captions
            .into_par_iter()
            .map(|(path, caption)| match load(&root.join(&path)) {
                Ok((picture, pixels, found)) => Ok((
                    Entry {
                        path,
                        caption,
                        picture,
                        pixels,
                    },
                    found,
                )),
                Err(error) => Err((path, error)),
            })
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
            bad,
            found,
        })
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

    /// Captions in the order of the samples.
    pub fn captions(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|entry| entry.caption.as_str())
    }

    /// The caption of sample `index` and what is known of its picture; `None` past the end.
    pub fn entry(&self, index: usize) -> Option<(&str, Picture)> {
        let entry = self.entries.get(index)?;
        Some((&entry.caption, entry.picture))
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
        let resolution = self.options.resolution;
        let pixels = match &entry.pixels {
            Some(pixels) => pixels.clone(),
            None => {
                let path = self.options.root.join(&entry.path);
                let (image, found) = picture::load(&path, resolution, self.options.crop)?;
                if found != entry.picture {
                    return Err(DataError::Image {
                        path,
                        message: "it changed since training began; start again".into(),
                    });
                }
                image.into_raw()
            }
        };
        Ok(Sample {
            pixels,
            resolution,
            caption: entry.caption.clone(),
        })
    }
}

fn io(action: &'static str, path: &Path, source: std::io::Error) -> DataError {
    DataError::Io {
        action,
        path: path.to_owned(),
        source,
    }
}

fn extension(path: &Path) -> String {
    path.extension()
        .map(|e| e.to_string_lossy().to_lowercase())
        .unwrap_or_default()
}

fn is_image(path: &Path) -> bool {
    matches!(extension(path).as_str(), "png" | "jpg" | "jpeg" | "webp")
}

/// Images relative to `root` with their captions, by path.
fn captioned_images(root: &Path) -> Result<Vec<(PathBuf, String)>, DataError> {
    let mut files = BTreeSet::new();
    list(root, Path::new(""), &mut files)?;
    let images: BTreeSet<&PathBuf> = files.iter().filter(|path| is_image(path)).collect();
    let texts: BTreeSet<&PathBuf> = files
        .iter()
        .filter(|path| extension(path) == "txt")
        .collect();
    let metadata = root.join("metadata.jsonl");
    let captions = if metadata.is_file() {
        let twice: Vec<&PathBuf> = images
            .iter()
            .filter(|image| {
                texts
                    .iter()
                    .any(|text| *text == &image.with_extension("txt"))
            })
            .copied()
            .collect();
        if !twice.is_empty() {
            let (names, count) = names_of(&twice);
            return Err(DataError::TwoCaptions {
                root: root.to_owned(),
                names,
                count,
            });
        }
        read_metadata(root, &metadata)?
    } else {
        let stems: BTreeSet<PathBuf> = images.iter().map(|p| p.with_extension("")).collect();
        let orphans: Vec<&PathBuf> = texts
            .iter()
            .filter(|text| !stems.contains(&text.with_extension("")))
            .copied()
            .collect();
        if !orphans.is_empty() {
            let (names, count) = names_of(&orphans);
            return Err(DataError::CaptionWithoutImage {
                root: root.to_owned(),
                names,
                count,
            });
        }
        let text_of: BTreeMap<PathBuf, &PathBuf> = texts
            .iter()
            .map(|text| (text.with_extension(""), *text))
            .collect();
        let mut captions = BTreeMap::new();
        for image in &images {
            if let Some(text) = text_of.get(&image.with_extension("")) {
                let caption = read_caption(&root.join(text))?;
                captions.insert((*image).clone(), caption);
            }
        }
        captions
    };
    if images.is_empty() && captions.is_empty() {
        return Err(DataError::EmptyFolder {
            root: root.to_owned(),
        });
    }
    let missing: Vec<&PathBuf> = images
        .iter()
        .filter(|image| !captions.contains_key(**image))
        .copied()
        .collect();
    if !missing.is_empty() {
        let (names, count) = names_of(&missing);
        return Err(DataError::ImageWithoutCaption {
            root: root.to_owned(),
            names,
            count,
        });
    }
    Ok(captions.into_iter().collect())
}

fn names_of(paths: &[&PathBuf]) -> (Vec<String>, usize) {
    (
        paths
            .iter()
            .take(NAMED)
            .map(|p| p.display().to_string())
            .collect(),
        paths.len(),
    )
}

/// Collects the files below `root/relative`, each checked to lie inside `root`.
fn list(root: &Path, relative: &Path, files: &mut BTreeSet<PathBuf>) -> Result<(), DataError> {
    let folder = root.join(relative);
    let entries = fs::read_dir(&folder).map_err(|e| io("list the folder", &folder, e))?;
    for entry in entries {
        let entry = entry.map_err(|e| io("list the folder", &folder, e))?;
        if entry.file_name().to_string_lossy().starts_with('.') {
            continue;
        }
        let path = relative.join(entry.file_name());
        let kind = entry
            .file_type()
            .map_err(|e| io("inspect", &root.join(&path), e))?;
        if kind.is_dir() {
            list(root, &path, files)?;
        } else if kind.is_symlink() {
            let target = inside(root, &path)?;
            // A linked folder inside the root is listed at its own place.
            if target.is_file() {
                files.insert(path);
            }
        } else {
            files.insert(path);
        }
    }
    Ok(())
}

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

fn read_caption(path: &Path) -> Result<String, DataError> {
    let error = |message: &str| DataError::CaptionFile {
        path: path.to_owned(),
        message: message.to_owned(),
    };
    let mut bytes = Vec::new();
    files::open(path)
        .and_then(|file| file.take(MAX_CAPTION_BYTES + 1).read_to_end(&mut bytes))
        .map_err(|e| io("read the caption", path, e))?;
    if bytes.len() as u64 > MAX_CAPTION_BYTES {
        return Err(error("longer than 64 KiB"));
    }
    let text = String::from_utf8(bytes).map_err(|_| error("not UTF-8 text"))?;
    let text = text.trim_start_matches('\u{feff}').trim();
    if text.is_empty() {
        return Err(error("empty; write the caption into it"));
    }
    Ok(text.to_owned())
}

/// Captions of metadata.jsonl by image path.
fn read_metadata(root: &Path, path: &Path) -> Result<BTreeMap<PathBuf, String>, DataError> {
    let file = files::open(path).map_err(|e| io("read", path, e))?;
    let mut reader = BufReader::new(file);
    let mut captions = BTreeMap::new();
    let mut absent: Vec<String> = Vec::new();
    let mut number = 0;
    loop {
        number += 1;
        let error = |message: String| DataError::Metadata {
            path: path.to_owned(),
            line: number,
            message,
        };
        let mut bytes = Vec::new();
        let count = reader
            .by_ref()
            .take(MAX_LINE_BYTES + 1)
            .read_until(b'\n', &mut bytes)
            .map_err(|e| io("read", path, e))?;
        if count == 0 {
            break;
        }
        if count as u64 > MAX_LINE_BYTES {
            return Err(error("longer than 1 MiB".into()));
        }
        if bytes.trim_ascii().is_empty() {
            continue;
        }
        let value: serde_json::Value =
            serde_json::from_slice(&bytes).map_err(|e| error(format!("not a JSON object: {e}")))?;
        let field = |name: &str| match value.get(name) {
            Some(serde_json::Value::String(text)) if !text.trim().is_empty() => {
                Ok(text.trim().to_owned())
            }
            Some(other) => Err(error(format!("`{name}` is {other}, expected a text"))),
            None => Err(error(format!(
                "`{name}` is missing, expected {{\"file_name\": \"...\", \"text\": \"...\"}}"
            ))),
        };
        let (name, caption) = (field("file_name")?, field("text")?);
        let relative: PathBuf = Path::new(&name)
            .components()
            .filter(|c| *c != Component::CurDir)
            .collect();
        if !relative
            .components()
            .all(|c| matches!(c, Component::Normal(_)))
        {
            return Err(DataError::PathEscape {
                path: PathBuf::from(name),
                root: root.to_owned(),
            });
        }
        if !is_image(&relative) {
            return Err(error(format!(
                "{name} is not a .png, .jpg, .jpeg or .webp file"
            )));
        }
        if !root.join(&relative).is_file() {
            absent.push(format!("{name} (line {number})"));
            continue;
        }
        inside(root, &relative)?;
        if captions.insert(relative, caption).is_some() {
            return Err(error(format!("{name} is listed a second time")));
        }
    }
    if !absent.is_empty() {
        let count = absent.len();
        absent.truncate(NAMED);
        return Err(DataError::CaptionWithoutImage {
            root: root.to_owned(),
            names: absent,
            count,
        });
    }
    Ok(captions)
}

#[cfg(test)]
mod tests {
    use image::{Rgb, RgbImage};
    use tempfile::TempDir;

    use super::*;

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
