//! Images as the tokens of transformers.

use crate::graph::{Builder, Tensor};

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
