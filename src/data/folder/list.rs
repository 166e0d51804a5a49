//! Files of images, and their captions beside them or in `metadata.jsonl`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Component, Path, PathBuf};

use super::Listed;
use crate::data::picture::ImageFile;
use crate::data::{DataError, NAMED, inside, io};
use crate::util::files;

/// Longest caption, and longest line of metadata.jsonl.
pub(super) const MAX_CAPTION_BYTES: u64 = 64 << 10;
const MAX_LINE_BYTES: u64 = 1 << 20;

pub(super) fn extension(path: &Path) -> String {
    path.extension()
        .map(|e| e.to_string_lossy().to_lowercase())
        .unwrap_or_default()
}

pub fn is_image(path: &Path) -> bool {
    matches!(extension(path).as_str(), "png" | "jpg" | "jpeg" | "webp")
}

/// The images below `root` with their captions, by path. Those that have none of their own have `common`, if there is one.
pub(super) fn captioned_images(
    root: &Path,
    common: Option<&str>,
) -> Result<Vec<Listed>, DataError> {
    let mut files = BTreeSet::new();
    list(root, Path::new(""), &mut files)?;
    let images: BTreeSet<&PathBuf> = files.iter().filter(|path| is_image(path)).collect();
    let texts: BTreeSet<&PathBuf> = files
        .iter()
        .filter(|path| extension(path) == "txt")
        .collect();
    let metadata = root.join("metadata.jsonl");
    let mut captions = if metadata.is_file() {
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
                captions.insert((*image).clone(), read_captions(&root.join(text))?);
            }
        }
        captions
    };
    if images.is_empty() && captions.is_empty() {
        return Err(DataError::EmptyFolder {
            root: root.to_owned(),
        });
    }
    if let Some(common) = common {
        for image in &images {
            let own = captions.entry((*image).clone());
            own.or_insert_with(|| vec![common.to_owned()]);
        }
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
    let listed = |(name, captions): (PathBuf, Vec<String>)| Listed {
        image: ImageFile::of(root.join(&name)),
        name,
        captions,
    };
    Ok(captions.into_iter().map(listed).collect())
}

pub(super) fn names_of(paths: &[&PathBuf]) -> (Vec<String>, usize) {
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
pub(super) fn list(
    root: &Path,
    relative: &Path,
    files: &mut BTreeSet<PathBuf>,
) -> Result<(), DataError> {
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

fn read_captions(path: &Path) -> Result<Vec<String>, DataError> {
    let error = |message: &str| DataError::CaptionFile {
        path: path.to_owned(),
        message: message.to_owned(),
    };
    let mut bytes = Vec::new();
    files::open(path)
        .and_then(|file| file.take(MAX_CAPTION_BYTES + 1).read_to_end(&mut bytes))
        .map_err(|e| io("read the caption", path, e))?;
    captions_of(bytes).map_err(error)
}

/// The captions of a text file, one in each line, or what is wrong with it. Longer ones need not be read to the end.
pub(super) fn captions_of(bytes: Vec<u8>) -> Result<Vec<String>, &'static str> {
    if bytes.len() as u64 > MAX_CAPTION_BYTES {
        return Err("longer than 64 KiB");
    }
    let text = String::from_utf8(bytes).map_err(|_| "not UTF-8 text")?;
    let lines = text.trim_start_matches('\u{feff}').lines().map(str::trim);
    let captions: Vec<String> = lines
        .filter(|line| !line.is_empty())
        .map(str::to_owned)
        .collect();
    match captions.is_empty() {
        true => Err("empty; write the caption into it"),
        false => Ok(captions),
    }
}

/// A caption that is a text of its own, or what is wrong with it.
pub(super) fn caption_of(text: &str) -> Result<String, &'static str> {
    match text.trim() {
        _ if text.len() as u64 > MAX_CAPTION_BYTES => Err("a caption is longer than 64 KiB"),
        "" => Err("there is no caption"),
        caption => Ok(caption.to_owned()),
    }
}

/// Captions of metadata.jsonl by image path.
fn read_metadata(root: &Path, path: &Path) -> Result<BTreeMap<PathBuf, Vec<String>>, DataError> {
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
        let field = |name: &str| {
            let missing = || {
                error(format!(
                    "`{name}` is missing, expected {{\"file_name\": \"...\", \"text\": \"...\"}}"
                ))
            };
            value.get(name).ok_or_else(missing)
        };
        let text = |name: &str, value: &serde_json::Value| match value {
            serde_json::Value::String(text) if !text.trim().is_empty() => {
                Ok(text.trim().to_owned())
            }
            other => Err(error(format!("`{name}` is {other}, expected a text"))),
        };
        let name = text("file_name", field("file_name")?)?;
        let own = match field("text")? {
            serde_json::Value::Array(several) if !several.is_empty() => several
                .iter()
                .map(|value| text("text", value))
                .collect::<Result<Vec<_>, _>>()?,
            one => vec![text("text", one)?],
        };
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
        if captions.insert(relative, own).is_some() {
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
