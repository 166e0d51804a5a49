//! The start of denoising: noise, an image, or an image with a mask that keeps a part of it.

use crate::dtype::DType;
use crate::host_tensor::HostTensor;
use crate::models::SeenImage;
use crate::runtime::{Prepared, Session};
use crate::schedulers::SamplingPlan;
use crate::shape::Shape;

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
    /// The latents of the images that steer, of the model or of its ControlNets.
    pub controls: Vec<HostTensor>,
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
    /// Whether samples start from images.
    pub has_images: bool,
    /// `f32[1, 1, height, width]` of the images: 1 where it is generated anew.
    pub mask: Option<&'a HostTensor>,
    /// Images that steer by their latents, each `f32[1, 3, height, width]` in [-1, 1].
    pub controls: Vec<&'a HostTensor>,
    /// The image that the model sees beside the sample.
    pub seen: Option<SeenImage>,
    pub sample_dims: [usize; 4],
}

impl StartSource<'_> {
    /// The start of the steps of a batch, whose rows start from `images`. Noise is drawn in the order of diffusers'
    /// pipelines: for the latents of the images that steer, for those of the image, for the first sample (unless `noise` is
    /// given), for the latents of the masked image.
    ///
    /// # Errors
    /// When a model that sees an image has none, or no mask, these do not fit, or the encoder fails.
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
        let mut controls = Vec::with_capacity(self.controls.len());
        if let Some(encoder) = &self.encoder {
            for control in &self.controls {
                let each = std::iter::repeat_n(*control, generators.len());
                controls.push(encoder.latents(each, generators)?);
            }
        }
        if self.seen == Some(SeenImage::Control) && controls.is_empty() {
            return Err(PipelineError::Request(
                "the model takes an image that steers".to_string(),
            ));
        }
        // diffusers' inpainting pipeline of UNets does not encode the whole image for nothing.
        let is_unread = self.seen == Some(SeenImage::Masked) && from_noise;
        let latents = match &self.encoder {
            Some(encoder) if self.has_images && !is_unread => {
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
            (Some(encoder), Some(mask), _) if self.is_inpainting() => {
                let masked = images.map(|image| without(image, mask));
                let masked = masked.collect::<Result<Vec<_>, _>>()?;
                let small = match self.seen {
                    Some(SeenImage::Filled { .. }) => pixels(mask, [rows, columns])?,
                    Some(SeenImage::Masked | SeenImage::Control) | None => {
                        nearest(mask, [rows, columns])?
                    }
                };
                Some(Inpainting::Seen {
                    mask: repeat(&small, generators.len())?,
                    masked_image_latents: encoder.latents(masked.iter(), generators)?,
                })
            }
            _ if self.is_inpainting() => {
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
        Ok(BatchStart {
            sample,
            inpainting,
            controls,
        })
    }

    /// Whether the model sees mask and image itself.
    fn is_inpainting(&self) -> bool {
        match self.seen {
            Some(SeenImage::Masked | SeenImage::Filled { .. }) => true,
            Some(SeenImage::Control) | None => false,
        }
    }
}

/// `mask` `[1, 1, height, width]` with a channel for each pixel that a place of `rows x columns` stands for, row by row.
fn pixels(mask: &HostTensor, [rows, columns]: [usize; 2]) -> Result<HostTensor, PipelineError> {
    let &[1, 1, height, width] = mask.shape.dims.as_slice() else {
        return Err(PipelineError::Request(format!(
            "mask {}; expected [1, 1, height, width]",
            mask.shape
        )));
    };
    let values = mask.to_f32_vec()?;
    let (down, across) = (height / rows, width / columns);
    let mut places = Vec::with_capacity(values.len());
    for pixel in 0..down * across {
        for place in 0..rows * columns {
            let y = place / columns * down + pixel / across;
            let x = place % columns * across + pixel % across;
            places.push(values[y * width + x]);
        }
    }
    Ok(HostTensor::from_f32(
        [1, down * across, rows, columns],
        &places,
    )?)
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

/// Rows `start..start + count` of given noise for samples `dims`; rows that fill a batch up repeat its first.
///
/// # Errors
/// When there is none for the first row, or it is for other samples.
pub(super) fn rows_of(
    all: &HostTensor,
    dims: [usize; 4],
    start: usize,
    count: usize,
) -> Result<HostTensor, PipelineError> {
    let each: usize = dims[1..].iter().product();
    let values = all.to_f32_vec()?;
    let given = values.len() / each.max(1);
    if all.shape.dims.get(1..) != Some(&dims[1..]) || start >= given {
        return Err(PipelineError::Shape {
            what: "latents of all images",
            expected: Shape::new(DType::F32, [[start + 1].as_slice(), &dims[1..]].concat()),
            found: all.shape.clone(),
        });
    }
    let rows: Vec<f32> = (start..start + count)
        .map(|row| if row < given { row } else { start })
        .flat_map(|row| values[row * each..(row + 1) * each].iter().copied())
        .collect();
    Ok(HostTensor::from_f32(dims, &rows)?)
}
