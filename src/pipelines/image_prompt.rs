//! The image of an IP-Adapter: from a file's pixels to the tokens that denoising takes.

use image::{DynamicImage, GenericImageView};

use crate::data::resample::bicubic_bytes;
use crate::emit::DotPrecision;
use crate::host_tensor::{HostTensor, HostTensorError};
use crate::lowering::Lowered;
use crate::models::clip::vision::PIXEL_VALUES;
use crate::runtime::{Prepared, Session};

use super::PipelineError;
use super::batch::{joined, one_row};
use super::part_program::PartProgram;

/// Means and standard deviations of CLIP's pixels, red, green and blue in [0, 1].
pub const MEAN: [f32; 3] = [0.481_454_66, 0.457_827_5, 0.408_210_73];
pub const DEVIATION: [f32; 3] = [0.268_629_54, 0.261_302_6, 0.275_777_1];

/// The image that an IP-Adapter shows the model.
#[derive(Clone, Debug)]
pub struct ImagePrompt {
    /// [`clip_pixels`] of it.
    pub pixels: HostTensor,
    /// How much the attention to it counts; 0 is as without.
    pub scale: f32,
}

/// Where the middle of an image begins if an odd number of pixels is left over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Middle {
    /// transformers: the smaller half of them before it.
    Transformers,
    /// torchvision's `CenterCrop`: half of them, rounded to an even number.
    Torchvision,
}

impl Middle {
    /// Pixels before the middle, of `left` that are not part of it.
    fn begin(self, left: u32) -> u32 {
        match self {
            Middle::Transformers => left / 2,
            Middle::Torchvision => left / 2 + u32::from(left % 4 == 3),
        }
    }
}

/// `f32[1, 3, side, side]` of an image, as CLIP's processors prepare it: the shorter side is scaled
/// to `side` with Pillow's bicubic filter, the middle is cut out, and the channels are normalized.
///
/// # Errors
/// None for images whose sizes memory can hold.
pub fn clip_pixels(
    image: &DynamicImage,
    side: usize,
    middle: Middle,
) -> Result<HostTensor, HostTensorError> {
    let (width, height) = image.dimensions();
    let short = u64::from(width.min(height)).max(1);
    let scaled = |length: u32| (side as u64 * u64::from(length) / short) as u32;
    let (width, height) = (scaled(width), scaled(height));
    let resized = bicubic_bytes(&image.to_rgb8(), width, height);
    let side_32 = side as u32;
    let [left, top] = [width, height].map(|length| middle.begin(length - side_32));
    let plane = side * side;
    let mut values = vec![0.0; 3 * plane];
    for at in 0..plane {
        let (x, y) = ((at % side) as u32, (at / side) as u32);
        for (channel, byte) in resized.get_pixel(left + x, top + y).0.iter().enumerate() {
            let value = f32::from(*byte) / 255.0;
            values[channel * plane + at] = (value - MEAN[channel]) / DEVIATION[channel];
        }
    }
    HostTensor::from_f32([1, 3, side, side], &values)
}

/// The compiled program from an image to tokens.
pub(super) struct ImageTokens {
    program: PartProgram,
}

impl ImageTokens {
    /// Compiles a program that was lowered for `session`.
    ///
    /// # Errors
    /// When it does not compile.
    pub fn compile(
        session: &Session,
        lowered: Lowered,
        precision: DotPrecision,
    ) -> Result<ImageTokens, PipelineError> {
        let program = PartProgram::compile(session, lowered, precision)?;
        Ok(ImageTokens { program })
    }

    /// The compiled program.
    pub fn program(&self) -> &PartProgram {
        &self.program
    }

    /// The tokens of no image and of the image, each `f32[1, tokens, features]`.
    ///
    /// # Errors
    /// When the image has another size, or the program fails.
    pub fn run(
        &self,
        session: &Session,
        weights: &Prepared<'_>,
        pixels: &HostTensor,
    ) -> Result<[HostTensor; 2], PipelineError> {
        let mut inputs = self.program.inputs(session);
        inputs.set(PIXEL_VALUES, pixels)?;
        let tokens = self.program.run_for_one(weights, &inputs)?;
        Ok([one_row(&tokens, 0)?, one_row(&tokens, 1)?])
    }
}

/// The tokens of a batch's prompts, one after the other: with guidance those of no image before those of the image, for
/// each.
///
/// # Errors
/// None for tokens of one shape.
pub(super) fn of_batch(
    [without, with]: &[HostTensor; 2],
    prompts: usize,
    guidance: bool,
) -> Result<HostTensor, HostTensorError> {
    let row = |row: usize| match guidance && row.is_multiple_of(2) {
        true => without.clone(),
        false => with.clone(),
    };
    joined(&(0..prompts).map(row).collect::<Vec<_>>())
}
