//! Pictures of files: decoded, cropped and resized.

use std::fmt;
use std::fs;
use std::io::{self, Cursor, Read, Seek, SeekFrom};
use std::path::PathBuf;

use image::imageops::{self, FilterType};
use image::{DynamicImage, GrayImage, ImageDecoder, ImageReader, Limits, Luma, RgbImage};

use super::DataError;
use super::buckets::Buckets;
use super::mask::{Mask, MaskOrigin, MaskSource};
use super::record::RecordImage;
use super::rng::{KeyedRng, Stream};
use super::table::{RowImage, TableRow};
use crate::util::files;
use crate::util::hash::Sha256;
use crate::util::known::{Known, Stamp};

/// Longest side that is decoded.
const MAX_SIDE: u32 = 16_384;
/// Most memory that decoding one image may take.
const MAX_DECODED_BYTES: u64 = 1 << 30;
/// Largest image file.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// Where the part that is kept of an image lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crop {
    /// About the centre.
    Center,
    /// At a place that `seed` and the image's content decide.
    Random { seed: u64 },
}

/// Where the bytes of an image are.
#[derive(Clone, Debug)]
pub struct ImageFile {
    pub path: PathBuf,
    /// Which part of the file, if not all of it.
    pub part: Option<Part>,
}

/// A part of a file that is an image.
#[derive(Clone, Debug)]
pub enum Part {
    Entry(FilePart),
    Row(TableRow),
    Record(RecordImage),
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

    /// The path for messages, with the name in the archive or the number of the row or record.
    pub fn shown(&self) -> PathBuf {
        match &self.part {
            None => self.path.clone(),
            Some(Part::Entry(part)) => self.path.join(&part.name),
            Some(Part::Row(row)) => self.path.join(row.number.to_string()),
            Some(Part::Record(record)) => self.path.join(record.number.to_string()),
        }
    }

    /// All bytes.
    ///
    /// # Errors
    /// When they cannot be read, or are more than 256 MiB.
    pub fn bytes(&self) -> Result<Vec<u8>, DataError> {
        let bytes = match &self.part {
            None => self.range(0, MAX_FILE_BYTES + 1),
            Some(Part::Entry(part)) => self.range(part.offset, part.size.min(MAX_FILE_BYTES + 1)),
            Some(Part::Row(row)) => match row.image()? {
                RowImage::Bytes(bytes) => return Ok(bytes),
                RowImage::File(path) => return ImageFile::of(path).bytes(),
            },
            Some(Part::Record(record)) => Ok(record.bytes(&self.path)?),
        };
        let bytes = bytes.map_err(|source| DataError::Io {
            action: "read the image",
            path: self.shown(),
            source,
        })?;
        if bytes.len() as u64 > MAX_FILE_BYTES {
            return Err(DataError::Image {
                path: self.shown(),
                message: format!("larger than {} MiB", MAX_FILE_BYTES >> 20),
            });
        }
        Ok(bytes)
    }

    fn range(&self, offset: u64, size: u64) -> io::Result<Vec<u8>> {
        let mut file = files::open(&self.path)?;
        file.seek(SeekFrom::Start(offset))?;
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
    /// Row and column of the corner of the part that was kept.
    pub corner: [usize; 2],
    /// Height and width of that part.
    pub extent: [usize; 2],
    /// Height and width that it is resized to.
    pub size: [usize; 2],
    pub mask: MaskOrigin,
}

impl Picture {
    /// Row and column of the crop's corner in the picture after it was resized, as SDXL is told it (Podell et al. 2023,
    /// section 2.2). `is_flipped` says that the picture was mirrored left to right before.
    pub fn crop_top_left(&self, is_flipped: bool) -> [usize; 2] {
        let mut corner = self.corner;
        if is_flipped {
            corner[1] = self.original_size[1] - corner[1] - self.extent[1];
        }
        std::array::from_fn(|at| {
            let extent = self.extent[at].max(1);
            (corner[at] * self.size[at] + extent / 2) / extent
        })
    }
}

/// The sizes that pictures are cropped and resized to.
#[derive(Clone, Debug, PartialEq)]
pub enum Sizes {
    /// Squares of this side.
    Square(usize),
    Buckets(Buckets),
}

impl Sizes {
    /// The height and width that a picture of this height and width is given.
    fn of(&self, size: [usize; 2]) -> [usize; 2] {
        match self {
            Sizes::Square(side) => [*side; 2],
            Sizes::Buckets(buckets) => buckets.of(size),
        }
    }

    /// The height and width of most pictures.
    pub fn usual(&self) -> [usize; 2] {
        match self {
            Sizes::Square(side) => [*side; 2],
            Sizes::Buckets(buckets) => [buckets.options().resolution; 2],
        }
    }
}

/// Which part of each picture is kept, and at which size.
#[derive(Clone, Debug, PartialEq)]
pub struct Framing {
    pub sizes: Sizes,
    pub crop: Crop,
}

/// What is kept of an image.
#[derive(Debug)]
pub struct Loaded {
    pub pixels: RgbImage,
    pub mask: Option<Mask>,
    pub picture: Picture,
}

/// Decodes an image, turns it as its EXIF orientation says, lays it on white, crops the largest part of the shape that
/// `framing` gives it and resizes that (Lanczos). Its mask is cropped alike.
///
/// # Errors
/// When the file cannot be read, is too large, is no image, or is smaller than every bucket; the same of a mask's file, and
/// when the mask has another size.
pub fn load(file: &ImageFile, mask: &MaskSource, framing: &Framing) -> Result<Loaded, DataError> {
    let (image, source) = read(file)?;
    let mut weights = None;
    let origin = source.mask(file, mask, |file| {
        let (mask, source) = read(file)?;
        weights = Some(channel(&mask, 0));
        Ok(source)
    })?;
    if origin == MaskOrigin::Alpha {
        weights = Some(channel(&image, 3));
    }
    let picture = source.framed(file, framing, origin)?;
    Ok(Loaded {
        pixels: framed(&on_white(image), &picture),
        mask: weights.map(|all| Mask::of_part(&all, picture.corner, picture.extent)),
        picture,
    })
}

/// How [`Source::to_string`] says whether there is an alpha channel.
const ALPHA: &str = "alpha";
const OPAQUE: &str = "opaque";

/// What to remember of a file: the key and the text of an entry of [`Known`].
pub type Note = [String; 2];

/// The picture of a file that can be decoded, and what to remember of it and of its mask. What `known` has is not read.
///
/// # Errors
/// As [`load`].
pub fn find(
    file: &ImageFile,
    mask: &MaskSource,
    framing: &Framing,
    known: &Known,
) -> Result<(Picture, Vec<Note>), DataError> {
    let mut notes = Vec::new();
    let mut look = |file: &ImageFile| {
        let (source, note) = look_up(file, known)?;
        notes.extend(note);
        Ok(source)
    };
    let source = look(file)?;
    let origin = source.mask(file, mask, look)?;
    Ok((source.framed(file, framing, origin)?, notes))
}

/// What of a file decides its picture, and what to remember of it if `known` has nothing.
fn look_up(file: &ImageFile, known: &Known) -> Result<(Source, Option<Note>), DataError> {
    let key = || {
        let stamp = Stamp::of(&fs::metadata(&file.path).ok()?)?;
        // A row or a record may have several pictures.
        let place = match &file.part {
            None => "0".to_owned(),
            Some(Part::Entry(part)) => part.offset.to_string(),
            Some(Part::Row(row)) => row.table.image_column().to_owned(),
            Some(Part::Record(record)) => format!("{} {}", record.offset, record.feature),
        };
        Some(format!(
            "picture {} {place} {stamp}",
            file.shown().display()
        ))
    };
    let before = key();
    let text = before.as_deref().and_then(|key| known.get(key));
    if let Some(source) = text.and_then(Source::parse) {
        return Ok((source, None));
    }
    let (_, source) = read(file)?;
    let unchanged = before.filter(|before| key().as_ref() == Some(before));
    Ok((source, unchanged.map(|key| [key, source.to_string()])))
}

/// What of a file decides where it is cropped, and whether it has a mask in itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Source {
    content: Sha256,
    /// Height and width.
    size: [usize; 2],
    has_alpha: bool,
}

impl Source {
    /// The origin of the image's mask; `of_mask` tells of the mask's file, if it has one.
    ///
    /// # Errors
    /// Those of `of_mask`, and when the mask has another size.
    fn mask(
        self,
        file: &ImageFile,
        mask: &MaskSource,
        of_mask: impl FnOnce(&ImageFile) -> Result<Source, DataError>,
    ) -> Result<MaskOrigin, DataError> {
        match mask {
            MaskSource::None => Ok(MaskOrigin::Everywhere),
            MaskSource::Alpha => Ok(match self.has_alpha {
                true => MaskOrigin::Alpha,
                false => MaskOrigin::Everywhere,
            }),
            MaskSource::File(path) => {
                let found = of_mask(&ImageFile::of(path.clone()))?;
                if found.size == self.size {
                    return Ok(MaskOrigin::File(found.content));
                }
                let [[height, width], [rows, columns]] = [found.size, self.size];
                Err(DataError::MaskSize {
                    mask: path.clone(),
                    message: format!(
                        "{width}x{height} pixels, but its image {} has {columns}x{rows}",
                        file.shown().display()
                    ),
                })
            }
        }
    }

    /// Which part of the image is kept.
    ///
    /// # Errors
    /// When the image is smaller than every bucket.
    fn framed(
        self,
        file: &ImageFile,
        framing: &Framing,
        mask: MaskOrigin,
    ) -> Result<Picture, DataError> {
        let problem = match &framing.sizes {
            Sizes::Square(_) => None,
            Sizes::Buckets(buckets) => buckets.too_small(self.size),
        };
        match problem {
            None => Ok(Picture {
                mask,
                ..self.place(framing.sizes.of(self.size), framing.crop)
            }),
            Some(message) => Err(DataError::Size {
                path: file.shown(),
                message,
            }),
        }
    }

    /// The largest part of the shape of `size`.
    fn place(self, size: [usize; 2], crop: Crop) -> Picture {
        let [height, width] = self.size;
        // In exact numbers: the side that binds is kept whole.
        let is_wide = width * size[0] > height * size[1];
        let extent = match is_wide {
            true => [height, rounded(height * size[1], size[0]).min(width)],
            false => [rounded(width * size[0], size[1]).min(height), width],
        };
        let room = [height - extent[0], width - extent[1]];
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
            extent,
            size,
            mask: MaskOrigin::Everywhere,
        }
    }

    /// What [`Source::to_string`] gave.
    fn parse(text: &str) -> Option<Source> {
        let mut words = text.split(' ');
        let content = Sha256::parse(words.next()?)?;
        let mut side = || words.next()?.parse::<usize>().ok();
        let size = [side()?, side()?];
        let has_alpha = match words.next()? {
            ALPHA => true,
            OPAQUE => false,
            _ => return None,
        };
        Some(Source {
            content,
            size,
            has_alpha,
        })
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [height, width] = self.size;
        let alpha = if self.has_alpha { ALPHA } else { OPAQUE };
        write!(f, "{} {height} {width} {alpha}", self.content)
    }
}

/// The whole image of a file, upright.
fn read(file: &ImageFile) -> Result<(DynamicImage, Source), DataError> {
    let error = |message: String| DataError::Image {
        path: file.shown(),
        message,
    };
    let bytes = file.bytes()?;
    let image = decode(&bytes).map_err(|e| error(e.to_string()))?;
    let source = Source {
        content: Sha256::of(&bytes),
        size: [image.height() as usize, image.width() as usize],
        has_alpha: image.color().has_alpha(),
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

/// A channel of the image in RGBA.
fn channel(image: &DynamicImage, which: usize) -> GrayImage {
    let image = image.to_rgba8();
    GrayImage::from_fn(image.width(), image.height(), |x, y| {
        Luma([image.get_pixel(x, y).0[which]])
    })
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

/// `value / by`, to the nearest whole number, at least 1.
fn rounded(value: usize, by: usize) -> usize {
    ((value + by / 2) / by.max(1)).max(1)
}

/// The part that `picture` keeps of `image`, at its new size.
fn framed(image: &RgbImage, picture: &Picture) -> RgbImage {
    let [top, left] = picture.corner.map(|place| place as u32);
    let [rows, columns] = picture.extent.map(|side| side as u32);
    let crop = imageops::crop_imm(image, left, top, columns, rows).to_image();
    let [height, width] = picture.size.map(|side| side as u32);
    if [rows, columns] == [height, width] {
        return crop;
    }
    imageops::resize(&crop, width, height, FilterType::Lanczos3)
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
            has_alpha: true,
        };
        assert_eq!(Source::parse(&wide("x").to_string()), Some(wide("x")));
        let center = wide("wide").place([6, 6], Crop::Center);
        assert_eq!((center.corner, center.extent), ([0, 1], [6, 6]));
        assert_eq!(framed(&image, &center).get_pixel(0, 0).0, [1, 0, 0]);
        let doubled = wide("wide").place([12, 12], Crop::Center);
        assert_eq!(doubled.crop_top_left(false), [0, 2]);
        // Mirrored, the same square begins 2 pixels from the left.
        assert_eq!(doubled.crop_top_left(true), [0, 4]);
        // Of the shape that is asked for as much as there is.
        let high = wide("wide").place([12, 4], Crop::Center);
        assert_eq!((high.corner, high.extent), ([0, 3], [6, 2]));
        assert_eq!(high.crop_top_left(false), [0, 6]);
        assert_eq!(framed(&image, &high).dimensions(), (4, 12));
        let flat = wide("wide").place([3, 9], Crop::Center);
        assert_eq!((flat.corner, flat.extent), ([1, 0], [3, 9]));
        assert_eq!(framed(&image, &flat).get_pixel(8, 0).0, [8, 1, 0]);

        let of = |content: &str, seed| wide(content).place([6, 6], Crop::Random { seed });
        assert_eq!(of("wide", 1), of("wide", 1));
        let mut seen = [0; 4];
        for picture in 0..400 {
            let found = of(&picture.to_string(), 1);
            assert_eq!((found.corner[0], found.extent), (0, [6, 6]));
            seen[found.corner[1]] += 1;
            let cropped = framed(&image, &found);
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
            has_alpha: true,
        };
        let picture = source.place([5, 5], Crop::Center);
        let cropped = framed(&flat, &picture);
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
