//! The start of denoising: noise, an image, or an image with a mask that keeps a part of it.

use crate::host_tensor::HostTensor;
use crate::runtime::{Prepared, Session};
use crate::schedulers::SamplingPlan;

use super::PipelineError;
use super::batch::joined;
use super::denoiser::{Inpainting, mix};
use super::latents::ImageEncoder;
use super::noise::NoiseGenerator;

/// The start of the steps of a batch.
pub(super) struct BatchStart {
    /// `f32[batch, channels, rows, columns]`
    pub sample: HostTensor,
    pub inpainting: Option<Inpainting>,
}

/// The ready program that encodes images.
pub(super) struct StartEncoder<'a> {
    pub session: &'a Session,
    pub encoder: &'a ImageEncoder,
    pub prepared: Prepared<'a>,
}

impl StartEncoder<'_> {
    /// Latents of `images` `f32[1, 3, height, width]` in [-1, 1], one for each generator.
    fn latents<'i>(
        &self,
        images: impl Iterator<Item = &'i HostTensor>,
        generators: &mut [NoiseGenerator],
    ) -> Result<HostTensor, PipelineError> {
        let (session, prepared) = (self.session, &self.prepared);
        let rows = images.zip(generators);
        let rows =
            rows.map(|(image, generator)| self.encoder.run(session, prepared, image, generator));
        Ok(joined(&rows.collect::<Result<Vec<_>, _>>()?)?)
    }
}

/// The start of all batches of a call.
pub(super) struct StartSource<'a> {
    /// None without images.
    pub encoder: Option<StartEncoder<'a>>,
    /// `f32[1, 1, height, width]` of the images: 1 where it is generated anew.
    pub mask: Option<&'a HostTensor>,
    /// Whether the model sees mask and image itself.
    pub is_inpainting: bool,
    pub sample_dims: [usize; 4],
}

impl StartSource<'_> {
    /// The start of the steps of a batch, whose rows start from `images`. Noise is drawn in the order of diffusers'
    /// pipelines: for the latents of the image, for the first sample (unless `noise` is given), for the latents of the
    /// masked image.
    ///
    /// # Errors
    /// When a model for inpainting has no image or mask, these do not fit, or the encoder fails.
    pub fn begin(
        &self,
        images: &[Option<&HostTensor>],
        noise: Option<HostTensor>,
        plan: &SamplingPlan,
        generators: &mut [NoiseGenerator],
    ) -> Result<BatchStart, PipelineError> {
        let [_, channels, rows, columns] = self.sample_dims;
        let each = channels * rows * columns;
        // With a mask, all steps start from noise alone: the model sees the image, or what is kept is put back.
        let from_noise = self.mask.is_some() && plan.is_whole;
        let images = images.iter().flatten().copied();
        let latents = match &self.encoder {
            Some(encoder) if !(self.is_inpainting && from_noise) => {
                Some(encoder.latents(images.clone(), generators)?)
            }
            Some(_) | None => None,
        };
        let noise = match noise {
            Some(noise) => noise,
            None => {
                let drawn = generators.iter_mut().flat_map(|g| g.normal(each));
                HostTensor::from_f32(self.sample_dims, &drawn.collect::<Vec<_>>())?
            }
        };
        let sample = match &latents {
            Some(latents) if !from_noise => mix(latents, &noise, plan.noised)?,
            Some(_) | None => {
                let values = noise.to_f32_vec()?.into_iter();
                let scaled: Vec<f32> = values.map(|v| v * plan.init_noise_sigma).collect();
                HostTensor::from_f32(self.sample_dims, &scaled)?
            }
        };
        let inpainting = match (&self.encoder, self.mask, latents) {
            (Some(encoder), Some(mask), _) if self.is_inpainting => {
                let masked = images.map(|image| without(image, mask));
                let masked = masked.collect::<Result<Vec<_>, _>>()?;
                Some(Inpainting::Seen {
                    mask: repeat(&nearest(mask, [rows, columns])?, generators.len())?,
                    masked_image_latents: encoder.latents(masked.iter(), generators)?,
                })
            }
            _ if self.is_inpainting => {
                return Err(PipelineError::Request(
                    "an inpainting model takes an image and a mask".to_string(),
                ));
            }
            (_, Some(mask), Some(latents)) => {
                let mask = repeat(&nearest(mask, [rows, columns])?, generators.len())?;
                // diffusers encodes the masked image here too, and uses nothing but up what it draws for it.
                for generator in generators {
                    generator.normal(each);
                }
                Some(Inpainting::PutBack {
                    latents,
                    noise,
                    mask,
                })
            }
            _ => None,
        };
        Ok(BatchStart { sample, inpainting })
    }
}

/// `mask` `[1, 1, height, width]` at another size: of each place the pixel at its upper left, PyTorch's `nearest`.
fn nearest(mask: &HostTensor, [rows, columns]: [usize; 2]) -> Result<HostTensor, PipelineError> {
    let &[1, 1, height, width] = mask.shape.dims.as_slice() else {
        return Err(PipelineError::Request(format!(
            "mask {}; expected [1, 1, height, width]",
            mask.shape
        )));
    };
    let values = mask.to_f32_vec()?;
    let small: Vec<f32> = (0..rows * columns)
        .map(|at| {
            let (y, x) = (at / columns * height / rows, at % columns * width / columns);
            values[y * width + x]
        })
        .collect();
    Ok(HostTensor::from_f32([1, 1, rows, columns], &small)?)
}

/// `image` `[1, channels, height, width]` with 0, which is grey, where `mask` `[1, 1, height, width]` is 1.
fn without(image: &HostTensor, mask: &HostTensor) -> Result<HostTensor, PipelineError> {
    let (of_image, of_mask) = (&image.shape.dims, &mask.shape.dims);
    if of_image.len() != 4 || of_mask.len() != 4 || of_image[2..] != of_mask[2..] {
        return Err(PipelineError::Request(format!(
            "mask {} of image {}",
            mask.shape, image.shape
        )));
    }
    let mask = mask.to_f32_vec()?;
    let values = image.to_f32_vec()?;
    let left: Vec<f32> = values
        .iter()
        .zip(mask.iter().cycle())
        .map(|(value, mask)| if *mask < 0.5 { *value } else { 0.0 })
        .collect();
    Ok(HostTensor::from_f32(of_image.clone(), &left)?)
}

/// `count` copies of a tensor of one row.
fn repeat(row: &HostTensor, count: usize) -> Result<HostTensor, PipelineError> {
    let mut dims = row.shape.dims.clone();
    dims[0] = count;
    Ok(HostTensor::new(
        row.shape.with_dims(dims),
        row.data.repeat(count),
    )?)
}
