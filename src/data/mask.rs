//! Masks: how much the error of a picture counts at each of its places.

use std::path::PathBuf;

use image::{GrayImage, imageops};

use crate::util::hash::Sha256;

/// Where a dataset has the masks of its images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Masks {
    /// There are none: every place counts alike.
    None,
    /// In the images' own alpha channels. An image without one counts everywhere.
    Alpha,
    /// In a folder that has a picture of the same name for each image, of which the red channel counts: of a grey one its
    /// value.
    Folder(PathBuf),
}

/// Where the mask of one image is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MaskSource {
    None,
    /// In its alpha channel, if it has one.
    Alpha,
    File(PathBuf),
}

/// What decides the mask of a picture, beside the picture itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaskOrigin {
    /// It has none: all of it counts.
    Everywhere,
    Alpha,
    /// The SHA-256 of the mask's file.
    File(Sha256),
}

/// The weights of the part that is kept of a picture, before that is resized.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mask {
    /// Row-major, 255 for a place that counts in full.
    values: Vec<u8>,
    /// Height and width.
    size: [usize; 2],
}

impl Mask {
    /// The part of a whole mask whose corner is at this row and column, with this height and width.
    pub fn of_part(whole: &GrayImage, corner: [usize; 2], extent: [usize; 2]) -> Mask {
        let [top, left] = corner.map(|place| place as u32);
        let [rows, columns] = extent.map(|side| side as u32);
        Mask {
            values: imageops::crop_imm(whole, left, top, columns, rows)
                .to_image()
                .into_raw(),
            size: extent,
        }
    }

    /// Mirrored left to right.
    pub fn flip(&mut self) {
        for row in self.values.chunks_exact_mut(self.size[1].max(1)) {
            row.reverse();
        }
    }

    /// The mean weight, 0 to 1, of each of `rows x columns` equal parts, row-major: PyTorch's interpolation of mode `area`
    /// where these numbers divide the mask's, and exact areas where they do not.
    pub fn averaged(&self, [rows, columns]: [usize; 2]) -> Vec<f32> {
        let [height, width] = self.size;
        let (rows, columns) = (spans(height, rows), spans(width, columns));
        // The weight of one part in whole numbers: each pixel counts `rows x columns` times.
        let all = 255.0 * (height * width) as f64;
        let mut means = Vec::with_capacity(rows.len() * columns.len());
        for row in &rows {
            for column in &columns {
                let of_line = |(y, high): &(usize, u64)| {
                    let line = &self.values[y * width..];
                    let pixels = column.iter().map(|(x, wide)| u64::from(line[*x]) * wide);
                    high * pixels.sum::<u64>()
                };
                means.push((row.iter().map(of_line).sum::<u64>() as f64 / all) as f32);
            }
        }
        means
    }
}

/// The pixels of each of `parts` equal parts of a line of `length`, each with the share of it that lies there, in parts of a
/// pixel of which it has `parts`.
fn spans(length: usize, parts: usize) -> Vec<Vec<(usize, u64)>> {
    let span = |part: usize| {
        let [from, to] = [part * length, (part + 1) * length];
        let pixels = from / parts..to.div_ceil(parts);
        let share = |at: usize| ((at + 1) * parts).min(to) - (at * parts).max(from);
        pixels.map(|at| (at, share(at) as u64)).collect()
    };
    (0..parts).map(span).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_the_means_of_their_areas() {
        let mask = |values: &[u8], size| Mask {
            values: values.to_vec(),
            size,
        };
        let shares = |values: &[f32]| values.iter().map(|v| v / 255.0).collect::<Vec<_>>();
        // torch.nn.functional.interpolate of mode "area": blocks of 2x3.
        let blocks = mask(
            &[
                0, 255, 10, 1, 1, 1, //
                20, 255, 60, 1, 1, 7, //
                9, 9, 9, 255, 255, 255, //
                9, 9, 9, 255, 255, 255,
            ],
            [4, 6],
        );
        assert_eq!(
            blocks.averaged([2, 2]),
            shares(&[100.0, 2.0, 9.0, 255.0]),
            "{blocks:?}"
        );
        let mut mirrored = blocks.clone();
        mirrored.flip();
        assert_eq!(mirrored.averaged([2, 2]), shares(&[2.0, 100.0, 255.0, 9.0]));
        // Halves of three pixels share the middle one; a part of a pixel has its value.
        let three = mask(&[30, 90, 120], [1, 3]);
        assert_eq!(three.averaged([1, 2]), shares(&[50.0, 110.0]));
        assert_eq!(
            three.averaged([2, 6]),
            shares(&[30.0, 30.0, 90.0, 90.0, 120.0, 120.0].repeat(2))
        );
        // What counts in full counts exactly once, whatever the sizes.
        for size in [[1, 1], [5, 3], [7, 11]] {
            let full = mask(&vec![255; size[0] * size[1]], size);
            assert!(full.averaged([3, 2]).iter().all(|v| *v == 1.0));
        }
    }
}
