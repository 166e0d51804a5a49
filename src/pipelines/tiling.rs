//! Large latents decoded in overlapping tiles, whose seams are blended.
//!
//! A VAE's activations at the image's full size are the largest of the whole pipeline. Tiles bound them: one program
//! for tiles of one size runs over all of them. As in diffusers' `tiled_decode`, neighbours share a quarter of a tile,
//! and over the first quarter of each tile the image is blended linearly from its neighbour. Unlike there, the last
//! tile of a row or column is not smaller but moved inside, so that one program is enough and no tile lacks context.
//! The result differs from decoding without tiles: normalizations see a tile, not the image.

use std::ops::Range;

use crate::host_tensor::{HostTensor, HostTensorError};
use crate::models::DiffusionModel;

/// Neighbouring tiles share one part in this many (`tile_overlap_factor = 0.25`).
const OVERLAP: usize = 4;

/// Why tiles could not be cut or blended.
#[derive(Debug, thiserror::Error)]
pub enum TilingError {
    #[error(
        "tiles of {tile} latents over {height} x {width} latents of {scale} pixels; expected positive numbers whose \
         image has at most 2^32 pixels"
    )]
    Sizes {
        tile: usize,
        height: usize,
        width: usize,
        scale: usize,
    },
    #[error("tiling: expected {expected}, found {found}")]
    Shape { expected: String, found: String },
    #[error(transparent)]
    HostTensor(#[from] HostTensorError),
}

/// Which tiles cover latents of one size. Tiles are in rows from the top, each from the left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TilePlan {
    rows: Axis,
    columns: Axis,
}

/// The tiles along one side, in latents.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Axis {
    length: usize,
    tile: usize,
    /// Where tiles start, ascending.
    starts: Vec<usize>,
    /// Pixels to a latent.
    scale: usize,
}

impl Axis {
    fn new(length: usize, tile: usize, scale: usize) -> Self {
        let tile = tile.min(length);
        let stride = tile - tile / OVERLAP;
        let last = length - tile;
        let mut starts: Vec<usize> = (0..last).step_by(stride).collect();
        starts.push(last);
        Axis {
            length,
            tile,
            starts,
            scale,
        }
    }

    /// The pixels of the image that a tile covers.
    fn pixels(&self, start: usize) -> Range<usize> {
        start * self.scale..(start + self.tile) * self.scale
    }

    /// How much of a tile's pixel at `offset` replaces what earlier tiles left there: none at the seam, all of it
    /// from the end of the overlap on. The first tile has no seam.
    fn weight(&self, start: usize, offset: usize) -> f32 {
        let seam = self.tile / OVERLAP * self.scale;
        if start == 0 || offset >= seam {
            1.0
        } else {
            offset as f32 / seam as f32
        }
    }
}

impl TilePlan {
    /// Tiles of at most `tile` x `tile` latents over `[height, width]` latents of `scale` x `scale` pixels each.
    ///
    /// A side that is not longer than `tile` has one tile of its length.
    ///
    /// # Errors
    /// When a size is 0, or the image would have more than 2^32 pixels.
    pub fn new(
        [height, width]: [usize; 2],
        tile: usize,
        scale: usize,
    ) -> Result<Self, TilingError> {
        let pixels = [height, width, scale, scale]
            .iter()
            .fold(1u128, |product, &n| product.saturating_mul(n as u128));
        if pixels == 0 || pixels > 1 << 32 || tile == 0 {
            return Err(TilingError::Sizes {
                tile,
                height,
                width,
                scale,
            });
        }
        Ok(TilePlan {
            rows: Axis::new(height, tile, scale),
            columns: Axis::new(width, tile, scale),
        })
    }

    /// The tiles that `model`'s decoder is made for: a single one for the whole image, if it does not use tiles.
    ///
    /// # Errors
    /// When the image has no pixels, or too many.
    pub fn of(model: &DiffusionModel) -> Result<Self, TilingError> {
        let scale = model.vae.as_ref().map_or(1, |vae| vae.spatial_multiple());
        let [rows, columns] = model.sample_size;
        let tile = model.decode_tile.unwrap_or(rows.max(columns));
        TilePlan::new(model.sample_size, tile, scale)
    }

    /// Rows and columns of latents of every tile: what the decoder is compiled for.
    pub fn tile(&self) -> [usize; 2] {
        [self.rows.tile, self.columns.tile]
    }

    /// Where each tile starts: row and column of latents.
    pub fn positions(&self) -> Vec<[usize; 2]> {
        let columns = &self.columns.starts;
        let row = |&y: &usize| columns.iter().map(move |&x| [y, x]);
        self.rows.starts.iter().flat_map(row).collect()
    }

    /// The tiles `f32[batch, channels, rows, columns]` of latents `[batch, channels, height, width]`.
    ///
    /// # Errors
    /// When the latents do not have the plan's height and width.
    pub fn cut(&self, latents: &HostTensor) -> Result<Vec<HostTensor>, TilingError> {
        let [height, width] = [self.rows.length, self.columns.length];
        let &[batch, channels, h, w] = latents.shape.dims.as_slice() else {
            return Err(self.wrong_latents(latents));
        };
        if [h, w] != [height, width] {
            return Err(self.wrong_latents(latents));
        }
        let values = latents.to_f32_vec()?;
        let [tile_height, tile_width] = self.tile();
        let cut = |[top, left]: [usize; 2]| {
            let mut tile = Vec::with_capacity(batch * channels * tile_height * tile_width);
            for plane in 0..batch * channels {
                for y in top..top + tile_height {
                    let start = (plane * height + y) * width + left;
                    tile.extend_from_slice(&values[start..start + tile_width]);
                }
            }
            HostTensor::from_f32([batch, channels, tile_height, tile_width], &tile)
        };
        let tiles: Result<_, HostTensorError> = self.positions().into_iter().map(cut).collect();
        Ok(tiles?)
    }

    fn wrong_latents(&self, found: &HostTensor) -> TilingError {
        let (rows, columns) = (self.rows.length, self.columns.length);
        TilingError::Shape {
            expected: format!("latents [batch, channels, {rows}, {columns}]"),
            found: found.shape.to_string(),
        }
    }

    /// The images `f32[batch, channels, height, width]` of decoded tiles in the order of [`TilePlan::positions`].
    ///
    /// # Errors
    /// When there are not as many tiles as positions, or one has not the size of a decoded tile.
    pub fn blend(&self, tiles: &[HostTensor]) -> Result<HostTensor, TilingError> {
        let expected = self.rows.starts.len() * self.columns.starts.len();
        let Some(first) = tiles.first().filter(|_| tiles.len() == expected) else {
            return Err(TilingError::Shape {
                expected: format!("{expected} tiles"),
                found: tiles.len().to_string(),
            });
        };
        let [tile_height, tile_width] = [&self.rows, &self.columns].map(|a| a.tile * a.scale);
        let [height, width] = [&self.rows, &self.columns].map(|a| a.length * a.scale);
        let (batch, channels) = match first.shape.dims.as_slice() {
            &[batch, channels, h, w] if [h, w] == [tile_height, tile_width] => (batch, channels),
            _ => {
                return Err(TilingError::Shape {
                    expected: format!("tiles [batch, channels, {tile_height}, {tile_width}]"),
                    found: first.shape.to_string(),
                });
            }
        };
        if let Some(other) = tiles.iter().find(|t| t.shape != first.shape) {
            return Err(TilingError::Shape {
                expected: format!("tiles that are all {}", first.shape),
                found: other.shape.to_string(),
            });
        }

        let planes = batch * channels;
        let mut image = vec![0.0f32; planes * height * width];
        // A row of tiles is blended by itself first, so that both directions are linear at the corners too.
        let mut strip = vec![0.0f32; planes * tile_height * width];
        for (&top, row) in self
            .rows
            .starts
            .iter()
            .zip(tiles.chunks(self.columns.starts.len()))
        {
            for (&left, tile) in self.columns.starts.iter().zip(row) {
                let values = tile.to_f32_vec()?;
                let across = self.columns.pixels(left);
                for (to, from) in strip.chunks_mut(width).zip(values.chunks(tile_width)) {
                    for (x, (to, from)) in to[across.clone()].iter_mut().zip(from).enumerate() {
                        *to = mix(*to, *from, self.columns.weight(left, x));
                    }
                }
            }
            let down = self.rows.pixels(top);
            for (plane, strip) in image
                .chunks_mut(height * width)
                .zip(strip.chunks(tile_height * width))
            {
                let rows = plane[down.start * width..down.end * width].chunks_mut(width);
                for (y, (to, from)) in rows.zip(strip.chunks(width)).enumerate() {
                    let weight = self.rows.weight(top, y);
                    for (to, from) in to.iter_mut().zip(from) {
                        *to = mix(*to, *from, weight);
                    }
                }
            }
        }
        Ok(HostTensor::from_f32(
            [batch, channels, height, width],
            &image,
        )?)
    }
}

/// From `a` to `b`. Where both are equal or `weight` is 0 or 1, nothing is rounded; a weight of 1 does not look at `a`.
fn mix(a: f32, b: f32, weight: f32) -> f32 {
    if weight == 1.0 {
        b
    } else {
        a + (b - a) * weight
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tiles of an image itself, as a decoder would give them that repeats each latent `scale` times.
    fn repeat(tile: &HostTensor, scale: usize) -> HostTensor {
        let [n, c, h, w] = tile.shape.dims.clone().try_into().unwrap();
        let values = tile.to_f32_vec().unwrap();
        let mut out = Vec::new();
        for plane in values.chunks(h * w) {
            for y in 0..h * scale {
                for x in 0..w * scale {
                    out.push(plane[y / scale * w + x / scale]);
                }
            }
        }
        HostTensor::from_f32([n, c, h * scale, w * scale], &out).unwrap()
    }

    fn latents(dims: [usize; 4], value: impl Fn(usize) -> f32) -> HostTensor {
        let values: Vec<f32> = (0..dims.iter().product()).map(value).collect();
        HostTensor::from_f32(dims, &values).unwrap()
    }

    #[test]
    fn all_tiles_have_one_size_and_the_last_moves_inside() {
        let plan = TilePlan::new([8, 21], 8, 8).unwrap();
        assert_eq!(plan.tile(), [8, 8]);
        assert_eq!(plan.positions(), [[0, 0], [0, 6], [0, 12], [0, 13]]);
        // 6 is three quarters of 8, and 14 = 8 + 6: nothing to move.
        let plan = TilePlan::new([14, 14], 8, 8).unwrap();
        assert_eq!(plan.positions(), [[0, 0], [0, 6], [6, 0], [6, 6]]);
    }

    #[test]
    fn latents_within_a_tile_are_one_tile_and_come_back_as_they_are() {
        let plan = TilePlan::new([5, 7], 8, 2).unwrap();
        assert_eq!(plan.tile(), [5, 7]);
        let whole = latents([2, 3, 5, 7], |i| (i as f32).sin());
        let tiles = plan.cut(&whole).unwrap();
        assert_eq!(tiles, [whole]);
        let decoded = repeat(&tiles[0], 2);
        assert_eq!(plan.blend(std::slice::from_ref(&decoded)).unwrap(), decoded);
    }

    #[test]
    fn a_decoder_that_sees_single_latents_gives_the_whole_image() {
        for (height, width) in [(9, 30), (17, 8), (16, 23)] {
            let plan = TilePlan::new([height, width], 8, 2).unwrap();
            let whole = latents([2, 3, height, width], |i| (i as f32).sin());
            let tiles: Vec<HostTensor> = plan
                .cut(&whole)
                .unwrap()
                .iter()
                .map(|tile| repeat(tile, 2))
                .collect();
            assert_eq!(plan.blend(&tiles).unwrap(), repeat(&whole, 2));
        }
    }

    #[test]
    fn seams_go_over_linearly() {
        // Two tiles of 8 latents, 16 pixels, that share 2 latents: black, then white.
        let plan = TilePlan::new([8, 14], 8, 2).unwrap();
        let tiles = [0.0, 1.0].map(|value| latents([1, 1, 16, 16], |_| value));
        let image = plan.blend(&tiles).unwrap().to_f32_vec().unwrap();
        let mut row = vec![0.0; 12];
        row.extend([0.0, 0.25, 0.5, 0.75]);
        row.extend([1.0; 12]);
        for found in image.chunks(28) {
            assert_eq!(found, row);
        }
        // Four tiles, of which the last alone is white: both ways linear at the corner.
        let plan = TilePlan::new([14, 14], 8, 2).unwrap();
        let tiles = [0.0, 0.0, 0.0, 1.0].map(|value| latents([1, 1, 16, 16], |_| value));
        let image = plan.blend(&tiles).unwrap().to_f32_vec().unwrap();
        for (y, found) in image.chunks(28).enumerate() {
            for (x, found) in found.iter().enumerate() {
                assert_eq!(*found, row[y] * row[x], "{y}, {x}");
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_named() {
        assert!(TilePlan::new([8, 8], 0, 8).is_err());
        assert!(TilePlan::new([0, 8], 8, 8).is_err());
        assert!(TilePlan::new([usize::MAX, usize::MAX], 8, 8).is_err());
        let plan = TilePlan::new([8, 14], 8, 2).unwrap();
        let other = latents([1, 4, 14, 8], |_| 0.0);
        let error = plan.cut(&other).unwrap_err().to_string();
        assert_eq!(
            error,
            "tiling: expected latents [batch, channels, 8, 14], found f32[1,4,14,8]"
        );
        let tile = latents([1, 3, 16, 16], |_| 0.0);
        let error = |tiles: &[HostTensor]| plan.blend(tiles).unwrap_err().to_string();
        assert!(error(std::slice::from_ref(&tile)).contains("expected 2 tiles, found 1"));
        assert!(
            error(&[tile.clone(), latents([1, 1, 16, 16], |_| 0.0)]).contains("all f32[1,3,16,16]")
        );
        assert!(error(&[other.clone(), other]).contains("[batch, channels, 16, 16]"));
    }
}
