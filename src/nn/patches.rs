//! Images as the tokens of transformers.

use crate::graph::{Builder, Tensor};
use crate::host_tensor::HostTensor;

use super::{Conv2d, Precision, Result, constrain_residual, conv2d, dims};

/// Tokens of `patch x patch` positions of an image `[batch, channels, rows, columns]` by the convolution `proj`, row by
/// row: `[batch, rows * columns / patch^2, features]`.
///
/// # Errors
/// When the patches do not cover the image; as for [`conv2d`].
pub fn patch_embedding(
    b: &Builder,
    image: Tensor,
    patch: usize,
    features: usize,
    precision: Precision,
) -> Result<Tensor> {
    let [batch, _, rows, columns] = dims(b, "patch embedding", image)?;
    check_patches(b, image, patch)?;
    let x = b.transpose(image, &[0, 2, 3, 1])?;
    let conv = Conv2d {
        stride: patch,
        padding: (0, 0),
        ..Conv2d::same(features, patch)
    };
    let y = conv2d(&b.scope("proj"), x, conv, precision)?;
    let y = b.reshape(y, &[batch, (rows / patch) * (columns / patch), features])?;
    constrain_residual(b, y)
}

/// Refuses an image `[batch, channels, rows, columns]` that patches of this side do not cover.
///
/// # Errors
/// Says the sizes.
pub fn check_patches(b: &Builder, image: Tensor, patch: usize) -> Result<()> {
    let [_, _, rows, columns] = dims(b, "image", image)?;
    if rows.is_multiple_of(patch) && columns.is_multiple_of(patch) {
        return Ok(());
    }
    Err(b.invalid(format!(
        "latents {}: rows and columns must be multiples of {patch}, the side of a token",
        b.shape(image)
    )))
}

/// The image `[batch, channels, rows, columns]` of tokens whose features are those of each position of a patch, row by
/// row, channels last.
///
/// # Errors
/// When the tokens are not those of such an image.
pub fn unpatch(
    b: &Builder,
    tokens: Tensor,
    patch: usize,
    [rows, columns]: [usize; 2],
) -> Result<Tensor> {
    let [batch, _, features] = dims(b, "tokens", tokens)?;
    let channels = features / (patch * patch);
    let (down, across) = (rows / patch, columns / patch);
    let x = b.reshape(tokens, &[batch, down, across, patch, patch, channels])?;
    let x = b.transpose(x, &[0, 5, 1, 3, 2, 4])?;
    b.reshape(x, &[batch, channels, rows, columns])
}

/// Sines and cosines of the places of `rows x columns` tokens: `f32[1, rows * columns, features]`. The first half of the
/// features is of the column, the second of the row, in each half first sines, then cosines, at frequencies that fall
/// from 1 by the powers of 10000: diffusers' `get_2d_sincos_pos_embed`.
///
/// `place` gives the position of row or column `i` of `n`.
///
/// # Errors
/// When the features do not divide by 4.
pub fn sine_positions(
    b: &Builder,
    [rows, columns]: [usize; 2],
    features: usize,
    place: impl Fn(usize, usize) -> f64,
) -> Result<Tensor> {
    if features == 0 || !features.is_multiple_of(4) {
        return Err(b.invalid(format!(
            "sine positions: {features} features; expected a multiple of 4"
        )));
    }
    let half = features / 2;
    // In f64 as in diffusers, and a line of each axis alone: the grid of both is made in the program.
    let line = |n: usize| {
        let frequencies = half / 2;
        let angle =
            |i: usize, f: usize| place(i, n) / 10_000f64.powf(f as f64 / frequencies as f64);
        let of = |function: fn(f64) -> f64, i: usize| {
            (0..frequencies).map(move |f| function(angle(i, f)) as f32)
        };
        let values: Vec<f32> = (0..n)
            .flat_map(|i| of(f64::sin, i).chain(of(f64::cos, i)))
            .collect();
        b.constant(HostTensor::from_f32([n, half], &values)?)
    };
    let grid = [rows, columns, half];
    let of_column = b.broadcast_in_dim(line(columns)?, &[1, 2], &grid)?;
    let of_row = b.broadcast_in_dim(line(rows)?, &[0, 2], &grid)?;
    let both = b.concatenate(&[of_column, of_row], 2)?;
    b.reshape(both, &[1, rows * columns, features])
}
