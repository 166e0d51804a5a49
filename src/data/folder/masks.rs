//! The masks of images, in a folder of their own or in alpha channels.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::Listed;
use super::list::{is_image, list, names_of};
use crate::data::mask::{MaskOrigin, MaskSource, Masks};
use crate::data::{DataError, io};

/// Where the mask of each of the images of `root` is, in their order. A mask in a folder has its image's name there, with the
/// extension of any image.
///
/// # Errors
/// When the folder of masks cannot be read, or lies in that of the images; when an image has no mask, or two masks have one name.
pub(super) fn sources(
    masks: &Masks,
    root: &Path,
    images: &[Listed],
) -> Result<Vec<MaskSource>, DataError> {
    let folder = match masks {
        Masks::None => return Ok(vec![MaskSource::None; images.len()]),
        Masks::Alpha => return Ok(vec![MaskSource::Alpha; images.len()]),
        Masks::Folder(folder) => folder,
    };
    let found = folder.canonicalize();
    let folder = found.map_err(|source| io("open the folder of masks", folder, source))?;
    if folder.starts_with(root) {
        return Err(DataError::MasksAmongImages {
            masks: folder,
            root: root.to_owned(),
        });
    }
    let mut files = BTreeSet::new();
    list(&folder, Path::new(""), &mut files)?;
    let mut by_name: BTreeMap<PathBuf, PathBuf> = BTreeMap::new();
    for file in files.into_iter().filter(|file| is_image(file)) {
        let second = folder.join(&file);
        if let Some(first) = by_name.insert(file.with_extension(""), second.clone()) {
            return Err(DataError::TwoMasks { first, second });
        }
    }
    let mask_of = |image: &Listed| by_name.get(&image.name.with_extension(""));
    let bare: Vec<&PathBuf> = images
        .iter()
        .filter(|image| mask_of(image).is_none())
        .map(|image| &image.name)
        .collect();
    if !bare.is_empty() {
        let (names, count) = names_of(&bare);
        return Err(DataError::ImageWithoutMask {
            masks: folder,
            names,
            count,
        });
    }
    let source = |image: &Listed| {
        let file = mask_of(image).cloned();
        file.map_or(MaskSource::None, MaskSource::File)
    };
    Ok(images.iter().map(source).collect())
}

/// Says how many images have no alpha channel where masks are to be there.
///
/// # Errors
/// When none has one.
pub(super) fn check_alpha(
    masks: &Masks,
    root: &Path,
    origins: impl ExactSizeIterator<Item = MaskOrigin>,
) -> Result<(), DataError> {
    if *masks != Masks::Alpha {
        return Ok(());
    }
    let total = origins.len();
    let without = origins.filter(|origin| *origin == MaskOrigin::Everywhere);
    match without.count() {
        0 => {}
        count if count == total => {
            return Err(DataError::NoAlpha {
                root: root.to_owned(),
            });
        }
        count => tracing::info!(
            "{count} of {total} images in {} have no alpha channel: all of each counts in the loss",
            root.display()
        ),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use image::{GrayImage, Luma, Rgba, RgbaImage};
    use tempfile::TempDir;

    use super::*;
    use crate::data::picture::{Crop, Framing, Sizes};
    use crate::data::{BucketOptions, Buckets, Folder, FolderOptions, Layout};

    /// A picture whose red and alpha tell the column; black below, so that its colour does not depend on what it lies on.
    fn striped(width: u32, height: u32) -> RgbaImage {
        RgbaImage::from_fn(width, height, |x, y| Rgba([0, 0, 0, (x * 8 + y) as u8]))
    }

    fn save(dir: &TempDir, name: &str, image: &RgbaImage) {
        image.save(dir.path().join(name)).unwrap();
        let text = dir.path().join(name).with_extension("txt");
        fs::write(text, "x").unwrap();
    }

    fn options(dir: &TempDir, masks: Masks) -> FolderOptions {
        FolderOptions {
            masks,
            ..FolderOptions::new(dir.path(), 8)
        }
    }

    fn message(options: FolderOptions) -> String {
        Folder::open(options).unwrap_err().to_string()
    }

    /// On white, black of opacity `a` has the value `255 - a`: masks are where their pictures are, cropped at random and to
    /// buckets, mirrored, with what is decoded kept and read again.
    #[test]
    fn masks_follow_their_pictures() {
        let dir = TempDir::new().unwrap();
        save(&dir, "a.png", &striped(20, 8));
        save(&dir, "b.png", &striped(8, 17));
        let framing = |sizes, crop| Framing { sizes, crop };
        let random = Crop::Random { seed: 3 };
        let buckets = Buckets::new(BucketOptions {
            resolution: 8,
            min_side: 4,
            max_side: 16,
            steps: 4,
        });
        for framing in [
            framing(Sizes::Square(8), Crop::Center),
            framing(Sizes::Square(8), random),
            framing(Sizes::Buckets(buckets.unwrap()), random),
        ] {
            for cache_bytes in [0, 1 << 20] {
                let folder = Folder::open(FolderOptions {
                    framing: framing.clone(),
                    cache_bytes,
                    ..options(&dir, Masks::Alpha)
                })
                .unwrap();
                for index in [0, 1] {
                    let mut sample = folder.get(index).unwrap();
                    let (_, picture) = folder.entry(index).unwrap();
                    assert_eq!(picture.mask, MaskOrigin::Alpha);
                    for _ in 0..2 {
                        let mask = sample.mask.as_ref().unwrap();
                        let weights = mask.averaged(sample.size);
                        let pixels = sample.pixels.chunks(3);
                        for (weight, pixel) in weights.iter().zip(pixels) {
                            let expected = 255.0 - weight * 255.0;
                            // Pictures that change their size are filtered with another kernel, which sees more columns.
                            let error = (f32::from(pixel[0]) - expected).abs();
                            let most = if picture.extent == picture.size {
                                0.01
                            } else {
                                9.0
                            };
                            assert!(error <= most, "{pixel:?} {expected} {picture:?}");
                        }
                        sample.flip();
                    }
                    assert_eq!(sample, folder.get(index).unwrap());
                }
            }
        }
    }

    #[test]
    fn pictures_in_archives_have_the_masks_of_their_alpha() {
        let (files, archives) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        save(&files, "a.png", &striped(20, 8));
        let archive = fs::File::create(archives.path().join("0.tar")).unwrap();
        let mut archive = tar::Builder::new(archive);
        for name in ["a.png", "a.txt"] {
            let file = files.path().join(name);
            archive.append_path_with_name(file, name).unwrap();
        }
        archive.finish().unwrap();
        let of_files = Folder::open(options(&files, Masks::Alpha)).unwrap();
        let of_archive = Folder::open(FolderOptions {
            layout: Layout::Tars,
            ..options(&archives, Masks::Alpha)
        });
        let sample = of_files.get(0).unwrap();
        assert!(sample.mask.is_some());
        assert_eq!(sample, of_archive.unwrap().get(0).unwrap());
    }

    #[test]
    fn masks_of_a_folder_have_their_pictures_names_and_sizes() {
        let (dir, masks) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        fs::create_dir(dir.path().join("sub")).unwrap();
        fs::create_dir(masks.path().join("sub")).unwrap();
        for name in ["a.png", "sub/b.png"] {
            save(&dir, name, &striped(20, 8));
        }
        let with = || options(&dir, Masks::Folder(masks.path().to_owned()));
        let half = GrayImage::from_fn(20, 8, |x, _| Luma([if x < 10 { 51 } else { 255 }]));
        half.save(masks.path().join("a.webp")).unwrap();
        let error = message(with());
        assert!(
            error.contains("no mask") && error.contains("sub/b.png"),
            "{error}"
        );
        assert!(!error.contains("a.png"), "{error}");
        half.save(masks.path().join("sub/b.png")).unwrap();
        // One that no picture has does nothing.
        half.save(masks.path().join("c.png")).unwrap();
        let folder = Folder::open(with()).unwrap();
        let mask = folder.get(1).unwrap().mask.unwrap();
        assert_eq!(mask.averaged([1, 2]), [0.2, 1.0]);
        let origin = |folder: &Folder| folder.entry(0).unwrap().1.mask;
        let before = origin(&folder);
        GrayImage::new(20, 8)
            .save(masks.path().join("a.webp"))
            .unwrap();
        assert!(before != origin(&Folder::open(with()).unwrap()));
        let changed = folder.get(0);
        // What was decoded at first is kept.
        assert!(changed.is_ok());

        GrayImage::new(10, 4)
            .save(masks.path().join("a.webp"))
            .unwrap();
        let error = message(with());
        assert!(
            error.contains("a.webp: 10x4 pixels") && error.contains("a.png has 20x8"),
            "{error}"
        );
        half.save(masks.path().join("a.png")).unwrap();
        let error = message(with());
        assert!(
            error.contains("a.png and ") && error.contains("a.webp"),
            "{error}"
        );
        let error = message(options(&dir, Masks::Folder(dir.path().join("sub"))));
        assert!(error.contains("lies in"), "{error}");
        let error = message(options(&dir, Masks::Folder(dir.path().join("none"))));
        assert!(error.contains("folder of masks"), "{error}");
    }

    #[test]
    fn pictures_without_alpha_count_everywhere_unless_none_has_it() {
        let dir = TempDir::new().unwrap();
        let opaque = RgbaImage::from_pixel(8, 8, Rgba([9, 9, 9, 255]));
        save(&dir, "a.png", &opaque);
        let plain = image::RgbImage::new(8, 8);
        plain.save(dir.path().join("b.png")).unwrap();
        fs::write(dir.path().join("b.txt"), "x").unwrap();
        let folder = Folder::open(options(&dir, Masks::Alpha)).unwrap();
        let origins = [0, 1].map(|at| folder.entry(at).unwrap().1.mask);
        assert_eq!(origins, [MaskOrigin::Alpha, MaskOrigin::Everywhere]);
        assert_eq!(folder.get(1).unwrap().mask, None);
        folder.check_masks().unwrap();
        let none = Folder::open(options(&dir, Masks::None)).unwrap();
        assert_eq!(none.get(0).unwrap().mask, None);
        fs::remove_file(dir.path().join("a.png")).unwrap();
        fs::remove_file(dir.path().join("a.txt")).unwrap();
        let bare = Folder::open(options(&dir, Masks::Alpha)).unwrap();
        let error = bare.check_masks().unwrap_err().to_string();
        assert!(error.contains("none of the images"), "{error}");
    }
}
