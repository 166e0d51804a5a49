//! The samples of every step, in a file beside their image.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::ImageFileError;
use crate::host_tensor::HostTensor;
use crate::weights::{TensorView, save_new};

/// The name of the tensor.
pub const LATENTS: &str = "latents";

/// The file with the samples of the image at `image`.
pub fn latents_path(image: &Path) -> PathBuf {
    image.with_extension("latents.safetensors")
}

/// Writes the samples of the image at `image`, one a step, as the tensor `latents` `[steps, channels, rows, columns]` of a new
/// file.
///
/// # Errors
/// [`ImageFileError::Latents`] when the file exists, or cannot be written.
pub fn write_latents(image: &Path, samples: &[HostTensor]) -> Result<(), ImageFileError> {
    let Some(first) = samples.first() else {
        return Ok(());
    };
    let dims = [&[samples.len()], &first.shape.dims[..]].concat();
    let data: Vec<u8> = samples
        .iter()
        .flat_map(|sample| &sample.data)
        .copied()
        .collect();
    let tensor = TensorView {
        name: LATENTS,
        dtype: first.shape.dtype,
        dims: &dims,
        data: &data,
    };
    save_new(&latents_path(image), [tensor], &BTreeMap::new()).map_err(|source| {
        ImageFileError::Latents {
            path: image.to_owned(),
            source: Box::new(source),
        }
    })
}
