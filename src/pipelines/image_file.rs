//! Images on disk: PNG files that carry their settings, and labelled grids of them.

mod latents;
mod recorded;
mod settings;
mod web_sampler;
mod web_ui;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use font8x8::UnicodeFonts;
use image::imageops::{self, FilterType};
use image::{Rgb, RgbImage};

use crate::util::files::{
    Access, AtomicFile, Durability, Existing, check_can_be_written, check_writable, is_full,
};

pub use latents::{LATENTS, latents_path, write_latents};
pub use recorded::{Recorded, read_recorded};
pub use settings::{GenerationSettings, HiresSettings};
pub use web_sampler::{NamedSampler, WebSampler};
pub use web_ui::WebSettings;

/// An error of an image on disk.
#[derive(Debug, thiserror::Error)]
pub enum ImageFileError {
    #[error(
        "output folder {} cannot be written: {source}; set output_dir to a folder that can",
        path.display()
    )]
    OutputDir {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("cannot write {}: {source}{}", path.display(), advice(source))]
    Write {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("cannot encode {} as png: {message}", path.display())]
    Encode { path: PathBuf, message: String },
    #[error("cannot open {}: {source}", path.display())]
    Open {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{} cannot be read as a PNG file; is it damaged or cut off? {message}", path.display())]
    Read { path: PathBuf, message: String },
    #[error(
        "{} has no settings: it should have a text `maxdiff`, which this program writes, or `parameters`, which web \
         interfaces write; {found}",
        path.display()
    )]
    NoSettings { path: PathBuf, found: String },
    #[error("cannot write the samples of {}: {source}", path.display())]
    Latents {
        path: PathBuf,
        source: Box<crate::weights::WeightsError>,
    },
    #[error("the settings in {} are malformed: {message}", path.display())]
    Settings { path: PathBuf, message: String },
    #[error("file name stem `{stem}` must be a plain name without path separators")]
    Stem { stem: String },
    #[error("a grid needs one label an image: {images} images, {labels} labels")]
    GridLabels { images: usize, labels: usize },
    #[error(
        "a grid of {images} images in {columns} columns at scale {scale} cannot be laid out: {message}"
    )]
    Grid {
        images: usize,
        columns: u32,
        scale: u32,
        message: &'static str,
    },
}

/// Advice for a full disk.
fn advice(error: &std::io::Error) -> &'static str {
    match is_full(error) {
        true => "; free some space, or set output_dir to a folder on another disk",
        false => "",
    }
}

/// Checks that a file can be written into the folder, which need not be there yet; called before work starts, so that
/// nothing is computed that cannot be kept.
///
/// # Errors
/// [`ImageFileError::OutputDir`].
pub fn check_output_dir(path: &Path) -> Result<(), ImageFileError> {
    check_can_be_written(path).map_err(output_dir(path))
}

/// Makes the folder if need be and checks that a file can be written into it.
///
/// # Errors
/// [`ImageFileError::OutputDir`].
pub fn prepare_output_dir(path: &Path) -> Result<(), ImageFileError> {
    fs::create_dir_all(path)
        .and_then(|()| check_writable(path))
        .map_err(output_dir(path))
}

fn output_dir(path: &Path) -> impl FnOnce(std::io::Error) -> ImageFileError {
    let path = path.to_owned();
    move |source| ImageFileError::OutputDir { path, source }
}

/// Writes an image as `{stem}-00001.png`, or under the next number that is free; the number
/// follows the largest in the folder, so that files stay in the order they were made. Returns the
/// path. No file is ever overwritten, also not when two processes write into one folder.
///
/// # Errors
/// [`ImageFileError::Stem`] for a stem with path separators; [`ImageFileError::Encode`],
/// [`ImageFileError::Write`]; after a failed write the partial file is removed.
pub fn write_numbered(
    dir: &Path,
    stem: &str,
    image: &RgbImage,
    settings: Option<&GenerationSettings>,
) -> Result<PathBuf, ImageFileError> {
    if stem.is_empty() || stem.starts_with('.') || stem.contains(['/', '\\', '\0']) {
        return Err(ImageFileError::Stem {
            stem: stem.to_owned(),
        });
    }
    let write_error = |path: &Path, source| ImageFileError::Write {
        path: path.to_owned(),
        source,
    };
    let bytes = encode(image, settings).map_err(|e| ImageFileError::Encode {
        path: dir.join(format!("{stem}.png")),
        message: e.to_string(),
    })?;
    let mut number = 1 + largest_number(dir, stem).map_err(|e| write_error(dir, e))?;
    let name = |number: u64| dir.join(format!("{stem}-{number:05}.png"));
    let first = name(number);
    let mut file = AtomicFile::create(&first, Access::Umask).map_err(|e| write_error(&first, e))?;
    file.write_all(&bytes).map_err(|e| write_error(&first, e))?;
    loop {
        let path = name(number);
        match file.commit(&path, Existing::Refuse, Durability::Synced) {
            Ok(()) => return Ok(path),
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => number += 1,
            Err(e) => return Err(write_error(&path, e)),
        }
    }
}

fn largest_number(dir: &Path, stem: &str) -> std::io::Result<u64> {
    let mut largest = 0;
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name();
        let number = name
            .to_str()
            .and_then(|name| {
                name.strip_prefix(stem)?
                    .strip_prefix('-')?
                    .strip_suffix(".png")
            })
            // Longer ones are not numbers of ours, and could not be counted on from.
            .filter(|digits| digits.len() <= 12 && digits.bytes().all(|b| b.is_ascii_digit()))
            .and_then(|digits| digits.parse::<u64>().ok());
        largest = largest.max(number.unwrap_or(0));
    }
    Ok(largest)
}

fn encode(
    image: &RgbImage,
    settings: Option<&GenerationSettings>,
) -> Result<Vec<u8>, png::EncodingError> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, image.width(), image.height());
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    if let Some(settings) = settings {
        settings.add_to(&mut encoder)?;
    }
    let mut writer = encoder.write_header()?;
    writer.write_image_data(image.as_raw())?;
    writer.finish()?;
    Ok(bytes)
}

/// Side of a character of the font, and the distance between lines, in pixels.
const GLYPH: u32 = 8;
const LINE: u32 = 10;
/// White space around and between the cells of a grid.
const PADDING: u32 = 8;
/// Least width of a cell: shorter lines than 16 characters tear labels apart.
const MIN_CELL: u32 = 16 * GLYPH;
/// Longest side of a grid: what PNG readers and the `image` crate surely take.
const MAX_GRID_SIDE: u64 = 32_768;

/// The whole factor that enlarges an image of this width to at least 160 pixels; 1 for larger
/// ones.
pub fn visible_scale(width: u32) -> u32 {
    160u32.div_ceil(width.max(1)).max(1)
}

/// Lays images out row by row on white, each enlarged by the whole factor `scale` (nearest
/// neighbour) with its label below, wrapped between words. Images may differ in size; a cell has
/// the size of the largest.
///
/// # Errors
/// [`ImageFileError::GridLabels`] unless there is a label for each image;
/// [`ImageFileError::Grid`] for no images, no columns, scale 0 or a grid of more than 32768
/// pixels a side.
pub fn labelled_grid(
    images: &[RgbImage],
    labels: &[String],
    columns: u32,
    scale: u32,
) -> Result<RgbImage, ImageFileError> {
    if images.len() != labels.len() {
        let (images, labels) = (images.len(), labels.len());
        return Err(ImageFileError::GridLabels { images, labels });
    }
    let error = |message| ImageFileError::Grid {
        images: images.len(),
        columns,
        scale,
        message,
    };
    if images.is_empty() || columns == 0 || scale == 0 {
        return Err(error("there must be at least one of each"));
    }
    let largest = |side: fn(&RgbImage) -> u32| {
        u64::from(images.iter().map(side).max().unwrap_or(0)) * u64::from(scale)
    };
    let columns = (columns as usize).min(images.len());
    let (width, height) = (largest(RgbImage::width), largest(RgbImage::height));
    let too_large = || error("it would be larger than 32768 pixels a side");
    let cell = width.max(u64::from(MIN_CELL));
    let gap = u64::from(PADDING);
    let total_width = gap + columns as u64 * (cell + gap);
    if total_width > MAX_GRID_SIDE || height > MAX_GRID_SIDE {
        return Err(too_large());
    }
    let (cell, width, height) = (cell as u32, width as u32, height as u32);
    let lines: Vec<Vec<String>> = labels
        .iter()
        .map(|label| wrap(label, (cell / GLYPH) as usize))
        .collect();
    let row_heights: Vec<u64> = lines
        .chunks(columns)
        .map(|row| {
            let text = row.iter().map(Vec::len).max().unwrap_or(0) as u64;
            u64::from(height) + 4 + text * u64::from(LINE) + gap
        })
        .collect();
    let total_height = gap + row_heights.iter().sum::<u64>();
    if total_height > MAX_GRID_SIDE {
        return Err(too_large());
    }
    let mut grid = RgbImage::from_pixel(total_width as u32, total_height as u32, Rgb([255; 3]));
    for (k, (image, lines)) in images.iter().zip(&lines).enumerate() {
        let (row, column) = (k / columns, k % columns);
        let left = PADDING + column as u32 * (cell + PADDING);
        let top = PADDING + row_heights[..row].iter().sum::<u64>() as u32;
        let (w, h) = (image.width() * scale, image.height() * scale);
        let shown = imageops::resize(image, w, h, FilterType::Nearest);
        let inset = (cell - width) / 2 + (width - w) / 2;
        imageops::replace(&mut grid, &shown, i64::from(left + inset), i64::from(top));
        for (number, line) in lines.iter().enumerate() {
            let y = top + height + 4 + number as u32 * LINE;
            write_line(&mut grid, left, y, line);
        }
    }
    Ok(grid)
}

/// Breaks a label into lines of at most `limit` characters, between words where that is possible.
fn wrap(label: &str, limit: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let mut line = String::new();
    let mut length = 0;
    for word in label.split_whitespace() {
        let letters: Vec<char> = word.chars().collect();
        for (k, piece) in letters.chunks(limit.max(1)).enumerate() {
            let space = usize::from(length > 0 && k == 0);
            if length + space + piece.len() > limit && length > 0 {
                lines.push(std::mem::take(&mut line));
                length = 0;
            }
            if length > 0 && k == 0 {
                line.push(' ');
                length += 1;
            }
            line.extend(piece);
            length += piece.len();
        }
    }
    if !line.is_empty() {
        lines.push(line);
    }
    lines
}

/// Black text; characters that the font lacks are shown as a question mark.
fn write_line(image: &mut RgbImage, left: u32, top: u32, line: &str) {
    for (k, letter) in line.chars().enumerate() {
        let glyph = font8x8::BASIC_FONTS
            .get(letter)
            .or_else(|| font8x8::LATIN_FONTS.get(letter))
            .or_else(|| font8x8::BASIC_FONTS.get('?'))
            .unwrap_or_default();
        for (row, bits) in glyph.iter().enumerate() {
            for column in 0..GLYPH {
                let (x, y) = (left + k as u32 * GLYPH + column, top + row as u32);
                if bits >> column & 1 == 1 && x < image.width() && y < image.height() {
                    image.put_pixel(x, y, Rgb([0; 3]));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    fn image() -> RgbImage {
        RgbImage::from_fn(5, 3, |x, y| Rgb([x as u8 * 40, y as u8 * 80, 7]))
    }

    #[test]
    fn pixels_survive() {
        let dir = TempDir::new().unwrap();
        for settings in [None, Some(&GenerationSettings::default())] {
            let path = write_numbered(dir.path(), "x", &image(), settings).unwrap();
            assert_eq!(image::open(&path).unwrap().into_rgb8(), image());
        }
    }

    #[test]
    fn numbers_follow_the_largest_and_nothing_is_overwritten() {
        let dir = TempDir::new().unwrap();
        let write = |stem| write_numbered(dir.path(), stem, &image(), None).unwrap();
        assert!(write("a").ends_with("a-00001.png"));
        assert!(write("a").ends_with("a-00002.png"));
        fs::write(dir.path().join("a-00041.png"), "kept").unwrap();
        fs::write(dir.path().join("a-99999999999999.png"), "foreign").unwrap();
        fs::write(dir.path().join("a-b-00100.png"), "other stem").unwrap();
        assert!(write("a").ends_with("a-00042.png"));
        assert!(write("a-b").ends_with("a-b-00101.png"));
        assert_eq!(fs::read(dir.path().join("a-00041.png")).unwrap(), b"kept");
        for stem in ["", "../a", "a/b", ".a"] {
            let result = write_numbered(dir.path(), stem, &image(), None);
            assert!(matches!(result, Err(ImageFileError::Stem { .. })), "{stem}");
        }
    }

    #[test]
    fn parallel_writers_get_different_files() {
        let dir = TempDir::new().unwrap();
        let paths: std::collections::HashSet<PathBuf> = std::thread::scope(|scope| {
            let writers: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| write_numbered(dir.path(), "p", &image(), None).unwrap()))
                .collect();
            writers.into_iter().map(|w| w.join().unwrap()).collect()
        });
        assert_eq!(paths.len(), 8);
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_found_first() {
        let dir = TempDir::new().unwrap();
        let nested = dir.path().join("a/b");
        check_output_dir(&nested).unwrap();
        assert!(!nested.exists());
        prepare_output_dir(&nested).unwrap();
        assert_eq!(fs::read_dir(&nested).unwrap().count(), 0);
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        for path in [file.clone(), file.join("below")] {
            for checked in [prepare_output_dir(&path), check_output_dir(&path)] {
                let error = checked.unwrap_err().to_string();
                assert!(error.contains("output_dir"), "{error}");
            }
        }
    }

    #[test]
    fn labels_wrap_between_words() {
        assert_eq!(wrap("a small red circle", 9), ["a small", "red", "circle"]);
        assert_eq!(wrap("abcdefghij kl", 4), ["abcd", "efgh", "ij", "kl"]);
        assert_eq!(wrap("x abcdefgh", 4), ["x", "abcd", "efgh"]);
        assert!(wrap("  ", 4).is_empty());
        for line in wrap("the quick brown fox jumps over the lazy dog", 7) {
            assert!(line.len() <= 7, "{line}");
        }
    }

    #[test]
    fn grids_show_images_and_labels() {
        let images = vec![RgbImage::from_pixel(32, 32, Rgb([255, 0, 0])); 3];
        let labels: Vec<String> = ["one", "two words that need more than one line", ""]
            .map(String::from)
            .into();
        let grid = labelled_grid(&images, &labels, 2, visible_scale(32)).unwrap();
        assert_eq!(grid.width(), 8 + 2 * (160 + 8));
        // Two lines below the first row, none below the second.
        assert_eq!(grid.height(), 8 + (160 + 4 + 20 + 8) + (160 + 4 + 8));
        let count = |colour| grid.pixels().filter(|p| p.0 == colour).count();
        assert_eq!(count([255, 0, 0]), 3 * 160 * 160);
        assert!(count([0, 0, 0]) > 100, "no text");
        assert_eq!(
            count([255, 0, 0]) + count([0, 0, 0]) + count([255; 3]),
            grid.pixels().len()
        );
        // Text stays below its image.
        assert!((8..168).all(|y| grid.get_pixel(20, y).0 == [255, 0, 0]));
        assert_eq!(
            (visible_scale(1), visible_scale(160), visible_scale(1024)),
            (160, 1, 1)
        );
    }

    #[test]
    fn impossible_grids_are_refused() {
        let image = || vec![RgbImage::new(32, 32)];
        let label = || vec![String::new()];
        assert!(matches!(
            labelled_grid(&image(), &[], 1, 1),
            Err(ImageFileError::GridLabels {
                images: 1,
                labels: 0
            })
        ));
        for (columns, scale) in [(0, 1), (1, 0), (1, u32::MAX)] {
            let result = labelled_grid(&image(), &label(), columns, scale);
            assert!(
                matches!(result, Err(ImageFileError::Grid { .. })),
                "{columns} {scale}"
            );
        }
        assert!(labelled_grid(&[], &[], 1, 1).is_err());
    }
}
