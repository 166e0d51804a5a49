//! The second pass of a hi-res fix: the samples of a smaller one are enlarged, get noise, and are denoised again.

use std::time::Instant;

use image::DynamicImage;

use crate::emit::DotPrecision;
use crate::host_tensor::HostTensor;
use crate::lowering::Lowered;
use crate::models::{DiffusionModel, vae};
use crate::runtime::{Session, StagedProgram};

use super::PipelineError;
use super::batch::{Batch, joined, one_row};
use super::decoded::{check_samples, decoded_to_image};
use super::denoiser::mix;
use super::init_image::{scaled, signed_planes};
use super::interpolate::interpolate;
use super::latents::{Decoder, ImageEncoder};
use super::noise::NoiseGenerator;
use super::observer::Phase;
use super::part_program::PartProgram;
use super::pass::Pass;
use super::progress::Progress;
use super::start::BatchStart;
use super::text_to_image::DenoiseOptions;
use super::tiling::TilePlan;
use super::traced::HiresPrograms;
use super::upscaler::Upscaling;
use super::weights::WeightSource;

/// The compiled second pass.
pub(super) struct Hires {
    pub pass: Pass,
    upscaling: Upscaling<Decoder, ImageEncoder>,
    /// Height and width of the images in pixels.
    image_size: [usize; 2],
}

/// Where the programs of the second pass run.
pub(super) struct Place<'a, 'w> {
    pub session: &'a Session,
    pub weights: &'a WeightSource<'w>,
}

impl Hires {
    /// Compiles the programs of the second pass, which were lowered for `session`. `model` is that of the first pass.
    ///
    /// # Errors
    /// When a program does not compile.
    pub fn compile(
        session: &Session,
        model: &DiffusionModel,
        lowered: HiresPrograms<Lowered>,
        options: &DenoiseOptions,
        precision: DotPrecision,
    ) -> Result<Hires, PipelineError> {
        let HiresPrograms {
            model: large,
            denoise,
            upscaling,
        } = lowered;
        let upscaling = || -> Result<_, PipelineError> {
            Ok(match upscaling {
                Upscaling::Latents(interpolation) => Upscaling::Latents(interpolation),
                Upscaling::Images { decoder, encoder } => {
                    let tiles = TilePlan::of(model)?;
                    let dims = large.sample_dims(1);
                    Upscaling::Images {
                        decoder: Decoder::compile(session, decoder, tiles, precision)?,
                        encoder: ImageEncoder::compile(session, encoder, dims, precision)?,
                    }
                }
            })
        };
        let (pass, upscaling) = rayon::join(
            || Pass::compile(session, &large, denoise, options, precision),
            upscaling,
        );
        Ok(Hires {
            pass: pass?,
            upscaling: upscaling?,
            image_size: large.image_size,
        })
    }

    /// All its programs.
    pub fn programs(&self) -> impl Iterator<Item = &StagedProgram> {
        let parts = self.upscaling.programs();
        let parts = parts.map(|(decoder, encoder)| [decoder.program(), encoder.program()]);
        let parts = parts.into_iter().flatten().map(PartProgram::stages);
        self.pass.denoiser.programs().chain(parts)
    }

    /// The latents of the first pass, of each batch, at the size of this one.
    ///
    /// # Errors
    /// When weights cannot be read, a program fails, or an image is not finite; what `observer` fails with.
    pub fn upscale(
        &self,
        place: &Place<'_, '_>,
        batches: &[Batch],
        samples: &[HostTensor],
        generators: &mut [Vec<NoiseGenerator>],
        progress: &mut Progress<'_, '_>,
    ) -> Result<Vec<HostTensor>, PipelineError> {
        let [_, _, rows, columns] = self.pass.denoiser.sample_dims();
        let (decoder, encoder) = match &self.upscaling {
            Upscaling::Latents(interpolation) => {
                progress.enter(Phase::Upscale)?;
                let enlarge = |sample| interpolate(sample, [rows, columns], *interpolation);
                return samples.iter().map(enlarge).collect();
            }
            Upscaling::Images { decoder, encoder } => (decoder, encoder),
        };
        let images = self.images(place, decoder, batches, samples, progress)?;
        let prepared = progress.prepare(place.weights, encoder.program().stages())?;
        progress.enter(Phase::Encode)?;
        let start = Instant::now();
        let mut latents = Vec::with_capacity(batches.len());
        for (images, generators) in images.iter().zip(generators) {
            let rows = generators.iter_mut().enumerate().map(|(row, generator)| {
                // A batch that is not full repeats its first image.
                let image = images.get(row).unwrap_or(&images[0]);
                encoder.run(place.session, &prepared, image, generator)
            });
            latents.push(joined(&rows.collect::<Result<Vec<_>, _>>()?)?);
        }
        progress.phases.encode += start.elapsed().as_secs_f64();
        Ok(latents)
    }

    /// The images of the first pass, of each batch, at the size of this one: `f32[1, 3, height, width]` in [-1, 1].
    fn images(
        &self,
        place: &Place<'_, '_>,
        decoder: &Decoder,
        batches: &[Batch],
        samples: &[HostTensor],
        progress: &mut Progress<'_, '_>,
    ) -> Result<Vec<Vec<HostTensor>>, PipelineError> {
        let prepared = progress.prepare(place.weights, decoder.program().stages())?;
        progress.enter(Phase::Upscale)?;
        let start = Instant::now();
        let enlarged = |sample: &HostTensor, row: usize| {
            let sample = one_row(sample, row)?;
            check_samples(&sample)?;
            let decoded = decoder.run(place.session, &prepared, &sample)?;
            vae::check_finite(&decoded)?;
            let image = DynamicImage::from(decoded_to_image(&decoded)?);
            Ok(signed_planes(&scaled(&image, self.image_size))?)
        };
        let images = batches.iter().zip(samples).map(|(batch, sample)| {
            let rows = (0..batch.count).map(|row| enlarged(sample, row));
            rows.collect::<Result<Vec<_>, PipelineError>>()
        });
        let images = images.collect::<Result<Vec<_>, _>>()?;
        progress.phases.decode += start.elapsed().as_secs_f64();
        Ok(images)
    }
}

/// The start of the steps of a batch of the second pass: `latents` with noise of its generators.
///
/// # Errors
/// When there are more generators than latents.
pub(super) fn noised(
    latents: &HostTensor,
    coefficients: [f32; 2],
    generators: &mut [NoiseGenerator],
) -> Result<BatchStart, PipelineError> {
    let each = latents.shape.count() / generators.len().max(1);
    let drawn: Vec<f32> = generators.iter_mut().flat_map(|g| g.normal(each)).collect();
    let noise = HostTensor::from_f32(latents.shape.dims.clone(), &drawn)?;
    Ok(BatchStart {
        sample: mix(latents, &noise, coefficients)?,
        inpainting: None,
        controls: Vec::new(),
    })
}
