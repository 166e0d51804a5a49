//! Pictures of files: decoded, cropped to a square and resized.

use std::fmt;
use std::fs;
use std::io::{self, Cursor, Read, Seek, SeekFrom};
use std::path::PathBuf;

use image::imageops::{self, FilterType};
use image::{DynamicImage, ImageDecoder, ImageReader, Limits, RgbImage};

use super::DataError;
use super::rng::{KeyedRng, Stream};
use crate::util::files;
use crate::util::hash::Sha256;
use crate::util::known::{Known, Stamp};

/// Longest side that is decoded.
const MAX_SIDE: u32 = 16_384;
/// Most memory that decoding one image may take.
const MAX_DECODED_BYTES: u64 = 1 << 30;
/// Largest image file.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// Where the square that is kept of an image lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crop {
    /// About the centre.
    Center,
    /// At a place that `seed` and the image's content decide.
    Random { seed: u64 },
}

/// Where the bytes of an image are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageFile {
    pub path: PathBuf,
    /// Which part of the file, for an image in an archive.
    pub part: Option<FilePart>,
}

/// An entry of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilePart {
    pub name: String,
    /// Its first byte in the archive.
    pub offset: u64,
    pub size: u64,
}

impl ImageFile {
    /// A file of its own.
    pub fn of(path: PathBuf) -> ImageFile {
        ImageFile { path, part: None }
    }

    /// The path for messages, with the name in the archive.
    pub fn shown(&self) -> PathBuf {
        match &self.part {
            None => self.path.clone(),
            Some(part) => self.path.join(&part.name),
        }
    }

    /// All bytes, or a few more than [`MAX_FILE_BYTES`].
    fn bytes(&self) -> io::Result<Vec<u8>> {
        let mut file = files::open(&self.path)?;
        let mut size = MAX_FILE_BYTES + 1;
        if let Some(part) = &self.part {
            file.seek(SeekFrom::Start(part.offset))?;
            size = size.min(part.size);
        }
        let mut bytes = Vec::new();
        file.take(size).read_to_end(&mut bytes)?;
        Ok(bytes)
    }
}

/// The origin of a sample's pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Picture {
    /// SHA-256 of the file; of the pixels where there is no file.
    pub content: Sha256,
    /// Height and width before it was cropped and resized.
    pub original_size: [usize; 2],
    /// Row and column of the corner of the square that was kept.
    pub corner: [usize; 2],
    /// Side of that square.
    pub side: usize,
}

impl Picture {
    /// Row and column of the crop's corner in the picture whose shorter side is resized to `resolution`, as SDXL is told
    /// it (Podell et al. 2023, section 2.2). `is_flipped` says that the picture was mirrored left to right before.
    pub fn crop_top_left(&self, resolution: usize, is_flipped: bool) -> [usize; 2] {
        let [top, left] = self.corner;
        let left = match is_flipped {
            true => self.original_size[1] - left - self.side,
            false => left,
        };
        let resized = |place: usize| (place * resolution + self.side / 2) / self.side.max(1);
        [resized(top), resized(left)]
    }
}

/// Decodes an image, turns it as its EXIF orientation says, lays it on white, crops the largest square and resizes that
/// to `resolution`.
///
/// # Errors
/// When the file cannot be read, is too large, or is no image.
pub fn load(
    file: &ImageFile,
    resolution: usize,
    crop: Crop,
) -> Result<(RgbImage, Picture), DataError> {
    let (image, source) = read(file)?;
    let picture = source.place(crop);
    Ok((square(&image, &picture, resolution as u32), picture))
}

/// What to remember of a file: the key and the text of an entry of [`Known`].
pub type Note = [String; 2];

/// The picture of a file that can be decoded, and what to remember of it. The file is not read if `known` has it.
///
/// # Errors
/// As [`load`].
pub fn find(
    file: &ImageFile,
    crop: Crop,
    known: &Known,
) -> Result<(Picture, Option<Note>), DataError> {
    let key = || {
        let stamp = Stamp::of(&fs::metadata(&file.path).ok()?)?;
        let offset = file.part.as_ref().map_or(0, |part| part.offset);
        Some(format!(
            "picture {} {offset} {stamp}",
            file.shown().display()
        ))
    };
    let before = key();
    let text = before.as_deref().and_then(|key| known.get(key));
    if let Some(source) = text.and_then(Source::parse) {
        return Ok((source.place(crop), None));
    }
    let (_, source) = read(file)?;
    let unchanged = before.filter(|before| key().as_ref() == Some(before));
    let entry = unchanged.map(|key| [key, source.to_string()]);
    Ok((source.place(crop), entry))
}

/// What of a file decides where it is cropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Source {
    content: Sha256,
    /// Height and width.
    size: [usize; 2],
}

impl Source {
    /// Which square of the image is kept.
    fn place(self, crop: Crop) -> Picture {
        let [height, width] = self.size;
        let side = width.min(height);
        let room = [height - side, width - side];
        let corner = match crop {
            Crop::Center => room.map(|room| room / 2),
            Crop::Random { seed } => {
                let first = self.content.bytes().first_chunk();
                let first = u64::from_le_bytes(first.copied().unwrap_or_default());
                let mut rng = KeyedRng::new(seed, Stream::Crop, first, 0);
                room.map(|room| rng.below(room + 1))
            }
        };
        Picture {
            content: self.content,
            original_size: self.size,
            corner,
            side,
        }
    }

    /// What [`Source::to_string`] gave.
    fn parse(text: &str) -> Option<Source> {
        let mut words = text.split(' ');
        let content = Sha256::parse(words.next()?)?;
        let mut side = || words.next()?.parse::<usize>().ok();
        let size = [side()?, side()?];
        Some(Source { content, size })
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [height, width] = self.size;
        write!(f, "{} {height} {width}", self.content)
    }
}

/// The whole image of a file, upright and on white.
fn read(file: &ImageFile) -> Result<(RgbImage, Source), DataError> {
    let error = |message: String| DataError::Image {
        path: file.shown(),
        message,
    };
    let bytes = file.bytes().map_err(|source| DataError::Io {
        action: "read the image",
        path: file.shown(),
        source,
    })?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(error(format!("larger than {} MiB", MAX_FILE_BYTES >> 20)));
    }
    let image = on_white(decode(&bytes).map_err(|e| error(e.to_string()))?);
    let (width, height) = image.dimensions();
    let source = Source {
        content: Sha256::of(&bytes),
        size: [height as usize, width as usize],
    };
    Ok((image, source))
}

fn decode(bytes: &[u8]) -> image::ImageResult<DynamicImage> {
    let mut limits = Limits::default();
    limits.max_image_width = Some(MAX_SIDE);
    limits.max_image_height = Some(MAX_SIDE);
    limits.max_alloc = Some(MAX_DECODED_BYTES);
    let mut reader = ImageReader::new(Cursor::new(bytes)).with_guessed_format()?;
    reader.limits(limits);
    let mut decoder = reader.into_decoder()?;
    let orientation = decoder.orientation()?;
    let mut image = DynamicImage::from_decoder(decoder)?;
    image.apply_orientation(orientation);
    Ok(image)
}

/// Transparent pixels over white; done before resizing, so that hidden colours do not bleed.
fn on_white(image: DynamicImage) -> RgbImage {
    if !image.color().has_alpha() {
        return image.into_rgb8();
    }
    let rgba = image.into_rgba8();
    let mut rgb = RgbImage::new(rgba.width(), rgba.height());
    for (to, from) in rgb.pixels_mut().zip(rgba.pixels()) {
        let [r, g, b, a] = from.0.map(u32::from);
        to.0 = [r, g, b].map(|v| ((v * a + 255 * (255 - a) + 127) / 255) as u8);
    }
    rgb
}

/// The square that `picture` keeps of `image`, at another size.
fn square(image: &RgbImage, picture: &Picture, resolution: u32) -> RgbImage {
    let [top, left] = picture.corner.map(|place| place as u32);
    let side = picture.side as u32;
    let crop = imageops::crop_imm(image, left, top, side, side).to_image();
    if side == resolution {
        return crop;
    }
    imageops::resize(&crop, resolution, resolution, FilterType::Lanczos3)
}

#[cfg(test)]
mod tests {
    use image::{ImageFormat, Rgb, Rgba, RgbaImage};

    use super::*;

    /// The squares of a wide and of a high image, and what SDXL is told of them.
    #[test]
    fn crops_are_where_they_say() {
        let image = RgbImage::from_fn(9, 6, |x, y| Rgb([x as u8, y as u8, 0]));
        let wide = |content: &str| Source {
            content: Sha256::of(content),
            size: [6, 9],
        };
        assert_eq!(Source::parse(&wide("x").to_string()), Some(wide("x")));
        let center = wide("wide").place(Crop::Center);
        assert_eq!((center.corner, center.side), ([0, 1], 6));
        assert_eq!(square(&image, &center, 6).get_pixel(0, 0).0, [1, 0, 0]);
        assert_eq!(center.crop_top_left(12, false), [0, 2]);
        // Mirrored, the same square begins 2 pixels from the left.
        assert_eq!(center.crop_top_left(12, true), [0, 4]);

        let of = |content: &str, seed| wide(content).place(Crop::Random { seed });
        assert_eq!(of("wide", 1), of("wide", 1));
        let mut seen = [0; 4];
        for picture in 0..400 {
            let found = of(&picture.to_string(), 1);
            assert_eq!((found.corner[0], found.side), (0, 6));
            seen[found.corner[1]] += 1;
            let cropped = square(&image, &found, 6);
            assert_eq!(cropped.get_pixel(0, 0).0[0] as usize, found.corner[1]);
        }
        // 100 expected each, standard deviation 8.7: 5 sigma.
        assert!(seen.iter().all(|n| (56..=144).contains(n)), "{seen:?}");
        assert!((0..40).any(|seed| of("wide", seed) != of("wide", seed + 1)));
    }

    #[test]
    fn a_header_that_claims_a_huge_image_is_refused() {
        let mut bytes = Vec::new();
        let image = RgbImage::new(4, 4);
        image
            .write_to(&mut Cursor::new(&mut bytes), ImageFormat::Png)
            .unwrap();
        // Width of the IHDR chunk, with its checksum made right again.
        bytes[16..20].copy_from_slice(&100_000u32.to_be_bytes());
        let crc = bytes[12..29].iter().fold(!0u32, |crc, &byte| {
            (0..8).fold(crc ^ u32::from(byte), |c, _| {
                if c & 1 == 1 {
                    (c >> 1) ^ 0xedb8_8320
                } else {
                    c >> 1
                }
            })
        });
        bytes[29..33].copy_from_slice(&(!crc).to_be_bytes());
        let error = decode(&bytes).unwrap_err();
        assert!(matches!(error, image::ImageError::Limits(_)), "{error}");
    }

    #[test]
    fn transparency_is_white_and_the_centre_is_kept() {
        let mut image = RgbaImage::from_pixel(20, 10, Rgba([255, 0, 0, 0]));
        for y in 0..10 {
            for x in 5..15 {
                image.put_pixel(x, y, Rgba([0, 0, 0, 51]));
            }
        }
        let flat = on_white(DynamicImage::ImageRgba8(image));
        assert_eq!(flat.get_pixel(0, 0).0, [255; 3]);
        let source = Source {
            content: Sha256::of(""),
            size: [10, 20],
        };
        let picture = source.place(Crop::Center);
        let cropped = square(&flat, &picture, 5);
        assert_eq!(cropped.dimensions(), (5, 5));
        // 51 / 255 of black on white everywhere: the transparent sides are cut off.
        assert!(cropped.pixels().all(|p| p.0 == [204; 3]));
    }

    #[test]
    fn exif_orientation_is_applied() {
        // A 16 x 8 JPEG, left half red, right half blue, marked as to be turned by 90 degrees
        // clockwise (orientation 6): red comes out at the top.
        let mut image = RgbImage::from_pixel(16, 8, Rgb([255, 0, 0]));
        for y in 0..8 {
            for x in 8..16 {
                image.put_pixel(x, y, Rgb([0, 0, 255]));
            }
        }
        let mut bytes = Vec::new();
        image
            .write_to(&mut Cursor::new(&mut bytes), ImageFormat::Jpeg)
            .unwrap();
        let exif: &[u8] = &[
            b'E', b'x', b'i', b'f', 0, 0, b'M', b'M', 0, 42, 0, 0, 0, 8, 0, 1, 0x01, 0x12, 0, 3, 0,
            0, 0, 1, 0, 6, 0, 0, 0, 0, 0, 0,
        ];
        let mut segment = vec![0xff, 0xe1];
        segment.extend(((exif.len() + 2) as u16).to_be_bytes());
        segment.extend(exif);
        bytes.splice(2..2, segment);
        let turned = on_white(decode(&bytes).unwrap());
        assert_eq!(turned.dimensions(), (8, 16));
        let [r, _, b] = turned.get_pixel(4, 2).0;
        assert!(r > 200 && b < 60, "top is {:?}", turned.get_pixel(4, 2));
    }
}
