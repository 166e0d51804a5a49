//! Tar archives in which an image and the text file with its caption have one name up to its first dot, as WebDataset
//! reads them. Nothing is unpacked: images are read at their places in the archives.

use std::collections::HashMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::Listed;
use super::list::{MAX_CAPTION_BYTES, captions_of, extension, is_image, names_of};
use crate::data::picture::{FilePart, ImageFile, Part};
use crate::data::{DataError, io};
use crate::util::files;

/// Bytes of a header, and what entries are filled up to.
const RECORD: u64 = 512;

/// The images of the archives in `root`, in the order of the archives' names and of their entries. Entries that are no
/// image and no text are left out.
pub(super) fn captioned_images(root: &Path) -> Result<Vec<Listed>, DataError> {
    let names = files::sorted_entries(root).map_err(|e| io("list the folder", root, e))?;
    let is_tar = |name: &String| extension(Path::new(name)) == "tar" && !name.starts_with('.');
    let names: Vec<String> = names.into_iter().filter(is_tar).collect();
    if names.is_empty() {
        return Err(DataError::NoArchives {
            root: root.to_owned(),
        });
    }
    let read = |name: &String| Archive::read(&root.join(name));
    let archives: Result<Vec<Archive>, DataError> = names.par_iter().map(read).collect();
    let (mut listed, mut orphans, mut bare) = (Vec::new(), Vec::new(), Vec::new());
    for (archive, sample) in archives?.into_iter().flat_map(Archive::into_samples) {
        let name = |entry: &str| PathBuf::from(&archive).join(entry);
        match (sample.image, sample.captions) {
            (Some(part), Some(captions)) => listed.push(Listed {
                name: name(&part.name),
                image: ImageFile {
                    path: root.join(&archive),
                    part: Some(Part::Entry(part)),
                },
                captions,
            }),
            (Some(part), None) => bare.push(name(&part.name)),
            (None, _) => orphans.push(name(&sample.key)),
        }
    }
    let root = root.to_owned();
    if !orphans.is_empty() {
        let (names, count) = names_of(&orphans.iter().collect::<Vec<_>>());
        return Err(DataError::CaptionWithoutImage { root, names, count });
    }
    if !bare.is_empty() {
        let (names, count) = names_of(&bare.iter().collect::<Vec<_>>());
        return Err(DataError::ImageWithoutCaption { root, names, count });
    }
    match listed.is_empty() {
        true => Err(DataError::EmptyFolder { root }),
        false => Ok(listed),
    }
}

/// What an archive holds under one name.
struct Sample {
    key: String,
    image: Option<FilePart>,
    captions: Option<Vec<String>>,
}

struct Archive {
    /// The archive's file name.
    name: String,
    samples: Vec<Sample>,
    /// The places of samples by their keys.
    places: HashMap<String, usize>,
}

impl Archive {
    fn into_samples(self) -> impl Iterator<Item = (String, Sample)> {
        let name = self.name;
        self.samples
            .into_iter()
            .map(move |sample| (name.clone(), sample))
    }

    /// # Errors
    /// When it is no tar archive or is cut short, a caption is no text, or two images or captions have one name.
    fn read(path: &Path) -> Result<Archive, DataError> {
        let error = |message: String| DataError::Archive {
            path: path.to_owned(),
            message,
        };
        let read = |e: std::io::Error| error(e.to_string());
        let file = files::open(path).map_err(|e| io("open the archive", path, e))?;
        let length = file.metadata().map_err(read)?.len();
        let mut found = Archive {
            name: path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
            samples: Vec::new(),
            places: HashMap::new(),
        };
        let mut end = 0;
        let mut archive = tar::Archive::new(file);
        for entry in archive.entries_with_seek().map_err(read)? {
            let mut entry = entry.map_err(|e| {
                error(format!(
                    "cut short or damaged behind byte {end} of {length}: {e}; copy or download it again"
                ))
            })?;
            let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
            let (offset, size) = (entry.raw_file_position(), entry.size());
            let stop = offset.checked_add(size).filter(|stop| *stop <= length);
            let Some(stop) = stop else {
                return Err(error(format!(
                    "cut short: {name} ends at byte {}, the file at {length}; copy or download it again",
                    u128::from(offset) + u128::from(size)
                )));
            };
            end = stop.next_multiple_of(RECORD);
            if !entry.header().entry_type().is_file() {
                continue;
            }
            let Some((key, rest)) = key_of(&name) else {
                continue;
            };
            let sample = found.sample(key);
            let twice = if rest == "txt" {
                let mut bytes = Vec::new();
                let mut limited = (&mut entry).take(MAX_CAPTION_BYTES + 1);
                limited.read_to_end(&mut bytes).map_err(read)?;
                let captions = captions_of(bytes).map_err(|e| error(format!("{name}: {e}")))?;
                sample.captions.replace(captions).is_some()
            } else {
                let name = name.clone();
                sample
                    .image
                    .replace(FilePart { name, offset, size })
                    .is_some()
            };
            if twice {
                return Err(error(format!("{name}: a second one of this name")));
            }
        }
        // Every writer ends an archive with records of zeros; without one, entries may be missing.
        if length < end + RECORD {
            return Err(error(format!(
                "cut short: the end of the archive is missing after byte {end}; copy or download it again"
            )));
        }
        Ok(found)
    }

    fn sample(&mut self, key: &str) -> &mut Sample {
        let next = self.samples.len();
        let place = *self.places.entry(key.to_owned()).or_insert(next);
        if place == next {
            self.samples.push(Sample {
                key: key.to_owned(),
                image: None,
                captions: None,
            });
        }
        &mut self.samples[place]
    }
}

/// The part of an entry's name before the first dot of its last part, and the rest in small letters, for images and texts.
fn key_of(name: &str) -> Option<(&str, String)> {
    let base = name.rfind('/').map_or(0, |at| at + 1);
    let dot = base + name[base..].find('.').filter(|dot| *dot > 0)?;
    let rest = name[dot + 1..].to_lowercase();
    (rest == "txt" || is_image(Path::new(&format!("x.{rest}")))).then_some((&name[..dot], rest))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Cursor;

    use image::{ImageFormat, Rgb, RgbImage};
    use tempfile::TempDir;

    use super::*;
    use crate::data::{Folder, FolderOptions, Layout};

    fn png(red: u8) -> Vec<u8> {
        let mut bytes = Cursor::new(Vec::new());
        let image = RgbImage::from_pixel(9, 6, Rgb([red, 0, 0]));
        image.write_to(&mut bytes, ImageFormat::Png).unwrap();
        bytes.into_inner()
    }

    fn tar(entries: &[(&str, Vec<u8>)]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (name, bytes) in entries {
            let mut header = tar::Header::new_gnu();
            header.set_size(bytes.len() as u64);
            header.set_mode(0o644);
            builder
                .append_data(&mut header, name, bytes.as_slice())
                .unwrap();
        }
        builder.into_inner().unwrap()
    }

    fn open(dir: &TempDir) -> Result<Folder, DataError> {
        Folder::open(FolderOptions {
            layout: Layout::Tars,
            max_bad_image_fraction: 0.4,
            ..FolderOptions::new(dir.path(), 6)
        })
    }

    #[test]
    fn samples_of_archives_have_their_order_and_broken_ones_are_named() {
        let dir = TempDir::new().unwrap();
        let long = format!("{}/b", "folder".repeat(30));
        let first = tar(&[
            ("a.txt", b" the first ".to_vec()),
            ("a.json", b"{}".to_vec()),
            ("a.png", png(10)),
            (&format!("{long}.x.txt"), b"no".to_vec()),
            (&format!("{long}.PNG"), png(20)),
            (&format!("{long}.txt"), b"the second".to_vec()),
            (".hidden.png", png(99)),
        ]);
        fs::write(dir.path().join("0.tar"), first).unwrap();
        let broken = tar(&[
            ("c.jpg", b"no image".to_vec()),
            ("c.txt", b"the third".to_vec()),
        ]);
        fs::write(dir.path().join("1.tar"), broken).unwrap();
        fs::write(dir.path().join("notes.md"), "x").unwrap();
        let folder = open(&dir).unwrap();
        let captions: Vec<&str> = folder.captions().collect();
        assert_eq!(captions, ["the first", "the second"]);
        let reds = [0, 1].map(|at| folder.get(at).unwrap().pixels[0]);
        assert_eq!(reds, [10, 20]);
        assert_eq!(folder.bad_images(), [PathBuf::from("1.tar/c.jpg")]);
    }

    #[test]
    fn every_cut_of_an_archive_is_an_error_that_names_it() {
        let dir = TempDir::new().unwrap();
        let whole = tar(&[
            ("a.png", png(1)),
            ("a.txt", b"x".to_vec()),
            ("b.txt", b"y".to_vec()),
            ("b.png", png(2)),
        ]);
        let path = dir.path().join("0.tar");
        // The second of two records of zeros says nothing.
        let needed = whole.len() - RECORD as usize;
        for cut in (0..needed).step_by(101).chain([needed - 1]) {
            fs::write(&path, &whole[..cut]).unwrap();
            let error = open(&dir).unwrap_err().to_string();
            assert!(error.contains("0.tar"), "cut at {cut}: {error}");
        }
        fs::write(&path, &whole[..needed]).unwrap();
        assert_eq!(open(&dir).unwrap().count(), 2);
    }

    #[test]
    fn what_does_not_fit_together_is_named() {
        let dir = TempDir::new().unwrap();
        assert!(open(&dir).unwrap_err().to_string().contains("no .tar"));
        for (entries, expected) in [
            (vec![("a.png", png(1))], "no caption: 0.tar/a.png"),
            (vec![("b.txt", b"x".to_vec())], "no image: 0.tar/b"),
            (vec![("b.txt", b" ".to_vec())], "b.txt: empty"),
            (vec![("b.txt", vec![0xff])], "b.txt: not UTF-8"),
            (vec![("b.txt", vec![b'x'; 70_000])], "b.txt: longer"),
            (
                vec![("a.png", png(1)), ("a.jpg", png(1))],
                "a.jpg: a second",
            ),
            (vec![("a.json", b"{}".to_vec())], "holds no images"),
        ] {
            fs::write(dir.path().join("0.tar"), tar(&entries)).unwrap();
            let error = open(&dir).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        fs::write(dir.path().join("0.tar"), vec![b'x'; 2048]).unwrap();
        assert!(matches!(open(&dir), Err(DataError::Archive { .. })));
    }
}
