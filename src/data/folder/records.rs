//! TFRecord files, in which each record has an image and its captions. Images are read at their places in the files.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;

use super::Listed;
use super::list::{caption_of, extension, list};
use crate::data::DataError;
use crate::data::picture::{ImageFile, Part};
use crate::data::record::{RecordFile, RecordImage, image_of, values_of};
use crate::proto::tensorflow::Example;

/// The features of records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordOptions {
    /// The bytes of an image file.
    pub image_feature: String,
    /// A text, or several.
    pub caption_feature: String,
}

/// The images of the TFRecord files in `root` and below, in the order of the files' paths and of their records. All files
/// are read to the end, and every checksum is checked.
///
/// # Errors
/// When there is no such file, one is damaged or cut short, or a record is no `tf.train.Example` with an image and a
/// caption; names the file and the first byte of the record.
pub(super) fn captioned_images(
    root: &Path,
    options: &RecordOptions,
) -> Result<Vec<Listed>, DataError> {
    let mut names = BTreeSet::new();
    list(root, Path::new(""), &mut names)?;
    names.retain(|name| is_records(name));
    if names.is_empty() {
        return Err(DataError::NoRecords {
            root: root.to_owned(),
        });
    }
    let feature: Arc<str> = options.image_feature.as_str().into();
    let names: Vec<PathBuf> = names.into_iter().collect();
    let read = |name: &PathBuf| read(root, name, &feature, &options.caption_feature);
    let listed: Vec<Vec<Listed>> = names.par_iter().map(read).collect::<Result<_, _>>()?;
    let listed: Vec<Listed> = listed.into_iter().flatten().collect();
    match listed.is_empty() {
        true => Err(DataError::EmptyFolder {
            root: root.to_owned(),
        }),
        false => Ok(listed),
    }
}

/// Whether a file is called as TensorFlow's programs and MaxDiffusion call theirs: `a.tfrecord`, `a.tfrec`,
/// `a.tfrecord-00000-of-00010`.
fn is_records(name: &Path) -> bool {
    let extension = extension(name);
    let extension = extension.split('-').next();
    matches!(extension, Some("tfrecord" | "tfrecords" | "tfrec"))
}

/// The images of one file.
fn read(
    root: &Path,
    name: &Path,
    feature: &Arc<str>,
    caption_feature: &str,
) -> Result<Vec<Listed>, DataError> {
    let path = root.join(name);
    let mut file = RecordFile::open(&path, 0)?;
    let mut listed = Vec::new();
    while let Some(next) = file.next() {
        let (offset, example) = next?;
        let captions = image_of(&example, feature)
            .and_then(|_| captions_of(&example, caption_feature))
            .map_err(|message| file.error_at(offset, &message))?;
        let number = listed.len();
        listed.push(Listed {
            name: name.join(number.to_string()),
            image: ImageFile {
                path: path.clone(),
                part: Some(Part::Record(RecordImage {
                    offset,
                    number,
                    feature: Arc::clone(feature),
                })),
            },
            captions,
        });
    }
    Ok(listed)
}

/// The captions that the feature `name` has.
fn captions_of(example: &Example, name: &str) -> Result<Vec<String>, String> {
    let values = values_of(example, name)?;
    let error = |problem: &str| format!("the feature {name}: {problem}");
    if values.is_empty() {
        return Err(error("there is no caption"));
    }
    let caption = |value: &Vec<u8>| {
        let text = std::str::from_utf8(value).map_err(|_| error("not UTF-8 text"))?;
        caption_of(text).map_err(error)
    };
    values.iter().map(caption).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Cursor;

    use image::{ImageFormat, Rgb, RgbImage};
    use proptest::prelude::*;
    use prost::Message;
    use tempfile::TempDir;

    use super::*;
    use crate::data::{Folder, FolderOptions, Layout};
    use crate::proto::tensorflow::feature::Kind;
    use crate::proto::tensorflow::{BytesList, Feature, Features, Int64List};
    use crate::util::tfrecord::write_record;

    fn png(red: u8) -> Vec<u8> {
        let mut bytes = Cursor::new(Vec::new());
        let image = RgbImage::from_pixel(9, 6, Rgb([red, 0, 0]));
        image.write_to(&mut bytes, ImageFormat::Png).unwrap();
        bytes.into_inner()
    }

    fn bytes(values: &[&[u8]]) -> Kind {
        let value = values.iter().map(|value| value.to_vec()).collect();
        Kind::BytesList(BytesList { value })
    }

    fn example(features: &[(&str, Kind)]) -> Vec<u8> {
        let feature = features.iter().map(|(name, kind)| {
            let kind = Some(kind.clone());
            ((*name).to_owned(), Feature { kind })
        });
        let features = Some(Features {
            feature: feature.collect(),
        });
        Example { features }.encode_to_vec()
    }

    fn picture(image: &[u8], captions: &[&[u8]]) -> Vec<u8> {
        let size = ("size", Kind::Int64List(Int64List {}));
        example(&[("image", bytes(&[image])), ("text", bytes(captions)), size])
    }

    fn write(path: &Path, payloads: &[Vec<u8>]) {
        let mut data = Vec::new();
        for payload in payloads {
            write_record(&mut data, payload).unwrap();
        }
        fs::write(path, data).unwrap();
    }

    fn open_with(root: &Path, image: &str, caption: &str) -> Result<Folder, DataError> {
        Folder::open(FolderOptions {
            layout: Layout::Records(RecordOptions {
                image_feature: image.to_owned(),
                caption_feature: caption.to_owned(),
            }),
            max_bad_image_fraction: 0.4,
            cache_bytes: 0,
            ..FolderOptions::new(root, 6)
        })
    }

    fn open(dir: &TempDir) -> Result<Folder, DataError> {
        open_with(dir.path(), "image", "text")
    }

    fn message(dir: &TempDir) -> String {
        open(dir).unwrap_err().to_string()
    }

    #[test]
    fn records_of_all_files_have_their_order_and_broken_images_are_named() {
        let dir = TempDir::new().unwrap();
        fs::create_dir(dir.path().join("more")).unwrap();
        let first = [
            picture(&png(10), &[b" one "]),
            picture(&png(20), &[b"two", b"zwei"]),
        ];
        write(&dir.path().join("a.tfrecord-00000-of-00002"), &first);
        write(
            &dir.path().join("b.TFREC"),
            &[picture(&png(30), &[b"three"])],
        );
        write(
            &dir.path().join("more/c.tfrecords"),
            &[picture(b"no image", &[b"four"])],
        );
        write(&dir.path().join("empty.tfrecord"), &[]);
        fs::write(dir.path().join("notes.txt"), "x").unwrap();
        let folder = open(&dir).unwrap();
        let captions: Vec<&str> = folder.captions().collect();
        assert_eq!(captions, ["one", "two", "zwei", "three"]);
        let reds = [0, 1, 2].map(|at| folder.get(at).unwrap().pixels[0]);
        assert_eq!(reds, [10, 20, 30]);
        assert_eq!(folder.bad_images(), [PathBuf::from("more/c.tfrecords/0")]);
        // Another file lies there by now.
        write(&dir.path().join("a.tfrecord-00000-of-00002"), &first[..1]);
        let error = folder.get(1).unwrap_err().to_string();
        assert!(
            error.contains("00000-of-00002: there is no record at byte"),
            "{error}"
        );
    }

    #[test]
    fn every_cut_and_every_wrong_byte_names_file_and_offset() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("a.tfrecord");
        write(
            &path,
            &[picture(&png(1), &[b"x"]), picture(&png(2), &[b"y"])],
        );
        let whole = fs::read(&path).unwrap();
        let second = whole.len() / 2;
        assert_eq!(open(&dir).unwrap().count(), 2);
        for cut in (1..whole.len()).filter(|cut| *cut != second) {
            fs::write(&path, &whole[..cut]).unwrap();
            let offset = if cut < second { 0 } else { second };
            let expected = format!("a.tfrecord: the record at byte {offset}: cut short");
            assert!(message(&dir).contains(&expected), "{cut}");
        }
        for at in 0..whole.len() {
            let mut wrong = whole.clone();
            wrong[at] ^= 1;
            fs::write(&path, &wrong).unwrap();
            let offset = if at < second { 0 } else { second };
            let expected = format!("a.tfrecord: the record at byte {offset}: the checksum");
            assert!(message(&dir).contains(&expected), "{at}");
        }
    }

    #[test]
    fn what_a_record_lacks_is_named() {
        let dir = TempDir::new().unwrap();
        assert!(message(&dir).contains("no TFRecord files"));
        let path = dir.path().join("a.tfrec");
        write(&path, &[]);
        assert!(message(&dir).contains("holds no images"));
        let fine = picture(&png(1), &[b"x"]);
        let numbers = Kind::Int64List(Int64List {});
        let tensors = [
            ("moments", bytes(&[b"x"])),
            ("clip_embeddings", bytes(&[b"x"])),
        ];
        for (payload, expected) in [
            (b"no example".to_vec(), "no tf.train.Example"),
            (
                Vec::new(),
                "there is no feature image; its features are : name",
            ),
            (
                example(&[("jpeg", bytes(&[b"x"])), ("caption", bytes(&[b"x"]))]),
                "no feature image; its features are caption, jpeg: name them by image_column",
            ),
            (example(&[("image", bytes(&[&png(1)]))]), "no feature text"),
            (
                example(&[("image", bytes(&[b"x", b"y"]))]),
                "image has 2 values",
            ),
            (example(&[("image", numbers)]), "image has numbers"),
            (picture(&png(1), &[]), "text: there is no caption"),
            (picture(&png(1), &[b" "]), "text: there is no caption"),
            (picture(&png(1), &[&[0xff]]), "text: not UTF-8"),
            (
                picture(&png(1), &[&[b'x'; 70_000]]),
                "text: a caption is longer",
            ),
            (
                example(&tensors),
                "text embeddings (clip_embeddings, moments)",
            ),
        ] {
            write(&path, &[fine.clone(), payload]);
            let error = message(&dir);
            let place = format!("a.tfrec: the record at byte {}: ", fine.len() + 16);
            assert!(
                error.contains(&place) && error.contains(expected),
                "{error}"
            );
        }
        write(
            &path,
            &[example(&[
                ("jpeg", bytes(&[&png(7)])),
                ("caption", bytes(&[b"x"])),
            ])],
        );
        let folder = open_with(dir.path(), "jpeg", "caption").unwrap();
        assert_eq!(folder.get(0).unwrap().pixels[0], 7);
    }

    proptest! {
        /// Checksums say nothing of what is in a record.
        #[test]
        fn records_of_any_bytes_are_read_or_refused(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut payload = picture(&png(9), &[b"one", b"two"]);
            for (at, byte) in changes {
                let at = at.index(payload.len());
                payload[at] = byte;
            }
            let dir = TempDir::new().unwrap();
            let cut = payload[..=cut.index(payload.len())].to_vec();
            write(&dir.path().join("a.tfrecord"), &[payload, cut]);
            match open(&dir) {
                Ok(folder) => prop_assert!(folder.count() <= 2),
                Err(error) => prop_assert!(!error.to_string().is_empty()),
            }
        }
    }
}
