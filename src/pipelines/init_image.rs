//! Input images of generation: the initial image, its mask, and the conditioning images of ControlNets.

use image::imageops::FilterType;
use image::{DynamicImage, RgbImage};

use crate::host_tensor::{HostTensor, HostTensorError};

/// The start of generation.
#[derive(Clone, Debug)]
pub struct InitImages {
    /// Each `f32[1, 3, height, width]` in [-1, 1].
    pub images: Vec<HostTensor>,
    /// Of every image. `f32[1, 1, height, width]`: 1 where the image is generated anew, 0 where it is kept.
    pub mask: Option<HostTensor>,
}

impl InitImages {
    /// From images of the size of the model's, and a mask of the same size that is white where they are generated anew.
    ///
    /// # Errors
    /// None for images whose sizes memory can hold.
    pub fn new(
        images: &[RgbImage],
        mask: Option<&RgbImage>,
    ) -> Result<InitImages, HostTensorError> {
        let of_mask = |mask: &RgbImage| {
            let (width, height) = mask.dimensions();
            let white = mask.pixels().map(|pixel| f32::from(is_white(pixel.0)));
            let dims = [1, 1, height as usize, width as usize];
            HostTensor::from_f32(dims, &white.collect::<Vec<_>>())
        };
        Ok(InitImages {
            images: images.iter().map(signed_planes).collect::<Result<_, _>>()?,
            mask: mask.map(of_mask).transpose()?,
        })
    }
}

/// `image` at the size of the model's, as diffusers' `VaeImageProcessor` scales it.
pub fn scaled(image: &DynamicImage, [height, width]: [usize; 2]) -> RgbImage {
    let filter = FilterType::Lanczos3;
    let scaled = image.resize_exact(width as u32, height as u32, filter);
    scaled.to_rgb8()
}

/// `f32[1, 3, height, width]` of an image in [-1, 1]: what the VAE takes.
///
/// # Errors
/// None for images whose sizes memory can hold.
pub fn signed_planes(image: &RgbImage) -> Result<HostTensor, HostTensorError> {
    planes(image, |byte| byte / 127.5 - 1.0)
}

/// `f32[1, 3, height, width]` of an image in [0, 1]: what a ControlNet takes.
///
/// # Errors
/// None for images whose sizes memory can hold.
pub fn unit_planes(image: &RgbImage) -> Result<HostTensor, HostTensorError> {
    planes(image, |byte| byte / 255.0)
}

/// `f32[1, 3, height, width]` of RGB bytes, each through `value`.
fn planes(image: &RgbImage, value: impl Fn(f32) -> f32) -> Result<HostTensor, HostTensorError> {
    let (width, height) = (image.width() as usize, image.height() as usize);
    let plane = height * width;
    let mut values = vec![0.0; 3 * plane];
    for (at, pixel) in image.pixels().enumerate() {
        for (channel, byte) in pixel.0.iter().enumerate() {
            values[channel * plane + at] = value(f32::from(*byte));
        }
    }
    HostTensor::from_f32([1, 3, height, width], &values)
}

/// Whether a pixel of a mask is nearer to white: its grey by ITU-R 601, in the whole numbers of Pillow's
/// `convert("L")`, is at least half, as diffusers rounds masks.
fn is_white([red, green, blue]: [u8; 3]) -> bool {
    let weighted = 19595 * u32::from(red) + 38470 * u32::from(green) + 7471 * u32::from(blue);
    (weighted + 0x8000) >> 16 >= 128
}

#[cfg(test)]
mod tests {
    use super::is_white;

    /// Greys by Pillow 12: (127, 127, 127) is 127, (0, 218, 0) is 128, (0, 217, 0) is 127, (255, 87, 0) is 127,
    /// (255, 88, 0) is 128, (128, 128, 128) is 128.
    #[test]
    fn colours_of_masks_are_rounded_as_pillow_does() {
        for (pixel, white) in [
            ([127, 127, 127], false),
            ([128, 128, 128], true),
            ([0, 217, 0], false),
            ([0, 218, 0], true),
            ([255, 87, 0], false),
            ([255, 88, 0], true),
            ([0, 0, 255], false),
        ] {
            assert_eq!(is_white(pixel), white, "{pixel:?}");
        }
    }
}
