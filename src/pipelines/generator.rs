//! The compiled programs of one model, from prompts to images.

use std::time::Instant;

use image::RgbImage;

use crate::dtype::DType;
use crate::emit::DotPrecision;
use crate::host_tensor::HostTensor;
use crate::models::{DiffusionModel, vae};
use crate::runtime::{Array, Prepared, Session, StagedProgram, StagedTimings};
use crate::schedulers::SamplingPlan;
use crate::shape::Shape;

use super::PipelineError;
use super::batch::{Batch, Phases, TokenizedImage, batches};
use super::conditioning::{Conditioning, Encoded, PromptEncoders};
use super::decoded::{check_samples, decoded_to_image, pixels_to_image};
use super::denoiser::{ControlImage, DenoiseInputs, Denoiser};
use super::latents::{Decoder, ImageEncoder};
use super::noise::NoiseGenerator;
use super::observer::{Event, Observer, Phase, enter};
use super::part_program::PartProgram;
use super::start::{BatchStart, StartImage, StartSource};
use super::text_to_image::Guidance;
use super::tiling::TilePlan;
use super::traced::{Ending, LoweredModel};
use super::weights::WeightSource;

/// Run-time settings of generation: a change compiles nothing.
#[derive(Clone, Copy, Debug)]
pub struct SamplingOptions<'a> {
    /// The samplers of all images.
    pub plans: &'a [SamplingPlan],
    pub guidance_rescale: f32,
    /// Whether an empty negative prompt is zeros instead of the encoding of an empty text
    /// (`force_zeros_for_empty_prompt` of SDXL's `model_index.json`).
    pub zero_empty_prompts: bool,
    /// The image to start from, `f32[1, 3, height, width]` in [-1, 1]; the model must be traced for one.
    pub image: Option<&'a HostTensor>,
    /// `f32[1, 1, height, width]` of that image: 1 where it is generated anew, 0 where it is kept.
    pub mask: Option<&'a HostTensor>,
    /// The conditioning images of the model's ControlNets, one for each.
    pub controls: &'a [ControlImage],
    /// Unit normal noise to start from, `f32[images, channels, rows, columns]`, in place of the seeds'.
    pub latents: Option<&'a HostTensor>,
    /// The unfinished result of another model, for the same number of images in batches of the same size: the steps
    /// continue with its samples. Neither `image` nor `latents` is read then.
    pub continues: Option<&'a ModelOutput>,
    /// Steps from one preview of an image to the next.
    pub preview_every: Option<usize>,
}

impl<'a> SamplingOptions<'a> {
    /// From noise of the images' seeds, by these samplers.
    pub fn new(plans: &'a [SamplingPlan]) -> Self {
        SamplingOptions {
            plans,
            guidance_rescale: 0.0,
            zero_empty_prompts: false,
            image: None,
            mask: None,
            controls: &[],
            latents: None,
            continues: None,
            preview_every: None,
        }
    }

    fn plan(&self, image: &TokenizedImage) -> Result<&'a SamplingPlan, PipelineError> {
        self.plans.get(image.plan).ok_or_else(|| {
            let found = self.plans.len();
            PipelineError::Request(format!(
                "an image has sampler {}, of {found} samplers",
                image.plan
            ))
        })
    }
}

/// The result of one model, and the seconds it took.
#[derive(Debug)]
pub struct ModelOutput {
    /// The denoiser's last samples, `f32[batch, channels, rows, columns]` for each batch; those that fill the last batch
    /// up are among them.
    pub samples: Vec<HostTensor>,
    /// None if another model continues.
    pub images: Vec<RgbImage>,
    pub phases: Phases,
    /// The generator of each image of each batch, after the noise it gave.
    generators: Vec<Vec<NoiseGenerator>>,
}

/// All compiled programs of one model.
pub struct CompiledModel {
    encoders: PromptEncoders,
    generator: ImageGenerator,
}

impl CompiledModel {
    /// Compiles every program of `model`, as [`ImageGenerator::compile`].
    ///
    /// # Errors
    /// When a program does not compile.
    pub fn compile(
        session: &Session,
        model: &DiffusionModel,
        mut lowered: LoweredModel,
        precision: DotPrecision,
        pixel_unshuffle: usize,
    ) -> Result<CompiledModel, PipelineError> {
        let encoders = std::mem::take(&mut lowered.encoders);
        let options = lowered.options.clone();
        let (generator, encoders) = rayon::join(
            || ImageGenerator::compile(session, model, lowered, precision, pixel_unshuffle),
            || PromptEncoders::compile(session, model, encoders, &options, precision),
        );
        Ok(CompiledModel {
            encoders: encoders?,
            generator: generator?,
        })
    }

    /// The part from encoded prompts to images.
    pub fn generator(&self) -> &ImageGenerator {
        &self.generator
    }

    /// The time that compiling all programs took.
    pub fn timings(&self) -> StagedTimings {
        let encoders = self.encoders.programs().map(PartProgram::stages);
        let mut all = StagedTimings::default();
        for program in encoders.chain(self.generator.programs()) {
            let timings = program.timings();
            all.emit += timings.emit;
            all.compile += timings.compile;
            all.programs += timings.programs;
        }
        all
    }

    /// Makes `images`: [`PromptEncoders::run`], then [`ImageGenerator::run`].
    ///
    /// # Errors
    /// Theirs.
    pub fn run(
        &self,
        session: &Session,
        weights: &WeightSource<'_>,
        images: &[TokenizedImage],
        options: &SamplingOptions<'_>,
        observer: &mut Observer<'_>,
    ) -> Result<ModelOutput, PipelineError> {
        let encoded = self.encoders.run(session, weights, images, observer)?;
        self.generator
            .run(session, weights, images, encoded, options, observer)
    }
}

/// The programs from encoded prompts to images.
pub struct ImageGenerator {
    denoiser: Denoiser,
    ending: Ending<Decoder>,
    image_encoder: Option<ImageEncoder>,
    guidance: bool,
    is_inpainting: bool,
    /// SDXL's time ids of an image's rows, one after the other.
    time_ids: Vec<f32>,
    pixel_unshuffle: usize,
}

impl ImageGenerator {
    /// Compiles the programs but for the text encoders. Samples of a model without a VAE are images of `pixel_unshuffle x pixel_unshuffle` pixels
    /// in each place.
    ///
    /// # Errors
    /// When a program does not compile.
    pub fn compile(
        session: &Session,
        model: &DiffusionModel,
        lowered: LoweredModel,
        precision: DotPrecision,
        pixel_unshuffle: usize,
    ) -> Result<ImageGenerator, PipelineError> {
        let LoweredModel {
            denoise,
            ending,
            encode_image,
            options,
            ..
        } = lowered;
        let guidance = options.guidance != Guidance::Off;
        let dims = model.sample_dims(options.batch);
        let [without, with] = model.time_ids();
        let ending = || -> Result<Ending<Decoder>, PipelineError> {
            ending.try_map(|decoder| {
                let tiles = TilePlan::of(model)?;
                Decoder::compile(session, decoder, tiles, precision)
            })
        };
        let image_encoder = || -> Result<Option<ImageEncoder>, PipelineError> {
            let dims = model.sample_dims(1);
            encode_image
                .map(|encoder| ImageEncoder::compile(session, encoder, dims, precision))
                .transpose()
        };
        let (denoiser, (ending, image_encoder)) = rayon::join(
            || Denoiser::compile(session, denoise, dims, precision),
            || rayon::join(ending, image_encoder),
        );
        Ok(ImageGenerator {
            denoiser: denoiser?,
            ending: ending?,
            image_encoder: image_encoder?,
            guidance,
            is_inpainting: model.is_inpainting(),
            time_ids: match guidance {
                true => [without, with].concat(),
                false => with,
            },
            pixel_unshuffle,
        })
    }

    fn programs(&self) -> impl Iterator<Item = &StagedProgram> {
        let decoder = self.ending.program().map(Decoder::program);
        let image = self.image_encoder.as_ref().map(ImageEncoder::program);
        let parts = decoder.into_iter().chain(image);
        self.denoiser
            .programs()
            .chain(parts.map(PartProgram::stages))
    }

    /// How many steps `images` take, batch by batch.
    pub fn steps(&self, images: &[TokenizedImage], plans: &[SamplingPlan]) -> usize {
        batches(images, self.denoiser.batch())
            .iter()
            .filter_map(|batch| plans.get(images[batch.start].plan))
            .map(|plan| plan.steps.len())
            .sum()
    }

    /// Makes `images`, whose prompts are `encoded`, in batches of the programs' size, and gives each image to `observer` as
    /// soon as it is decoded. The weights of each program are let go before those of the next are read; with previews or
    /// several batches those of the decoder are there while the denoiser runs. Samples that are handed on are not decoded,
    /// and there are no previews of them.
    ///
    /// # Errors
    /// When weights cannot be read, a program fails, or what it makes is not finite; what `observer` fails with.
    pub fn run(
        &self,
        session: &Session,
        weights: &WeightSource<'_>,
        images: &[TokenizedImage],
        encoded: Encoded,
        options: &SamplingOptions<'_>,
        observer: &mut Observer<'_>,
    ) -> Result<ModelOutput, PipelineError> {
        let Encoded {
            conditioning,
            mut phases,
        } = encoded;
        let batches = batches(images, self.denoiser.batch());
        let (starts, mut generators) = match options.continues {
            Some(output) => (
                self.go_on(output, batches.len())?,
                output.generators.clone(),
            ),
            None => {
                let starting = Starting {
                    session,
                    weights,
                    images,
                    batches: &batches,
                    options,
                };
                self.start(starting, observer, &mut phases)?
            }
        };

        let start = Instant::now();
        let prepared = weights.prepare(self.denoiser.program(), observer)?;
        phases.load += start.elapsed().as_secs_f64();
        let beside = options.preview_every.is_some() || batches.len() > 1;
        let mut decoder = match beside {
            true => self.decoder_weights(weights, observer, &mut phases)?,
            false => None,
        };
        let mut samples = Vec::with_capacity(batches.len());
        let mut made = Vec::with_capacity(images.len());
        for (((batch, conditioning), start), generators) in batches
            .iter()
            .zip(conditioning)
            .zip(&starts)
            .zip(&mut generators)
        {
            let denoising = Denoising {
                session,
                prepared: &prepared,
                decoding: decoder.as_ref(),
                images,
                batch,
                start,
                options,
            };
            let sample =
                self.denoise(denoising, conditioning, generators, observer, &mut phases)?;
            if beside {
                let decoding = decoder.as_ref();
                made.extend(self.finish(
                    session,
                    decoding,
                    batch,
                    &sample,
                    observer,
                    &mut phases,
                )?);
            }
            samples.push(sample);
        }
        drop(prepared);
        if !beside {
            decoder = self.decoder_weights(weights, observer, &mut phases)?;
            for (batch, sample) in batches.iter().zip(&samples) {
                let decoding = decoder.as_ref();
                made.extend(self.finish(
                    session,
                    decoding,
                    batch,
                    sample,
                    observer,
                    &mut phases,
                )?);
            }
        }
        Ok(ModelOutput {
            samples,
            images: made,
            phases,
            generators,
        })
    }

    /// The decoder's weights, where there is one.
    fn decoder_weights<'w>(
        &self,
        weights: &WeightSource<'w>,
        observer: &mut Observer<'_>,
        phases: &mut Phases,
    ) -> Result<Option<Prepared<'w>>, PipelineError> {
        let Ending::Decoded(decoder) = &self.ending else {
            return Ok(None);
        };
        let start = Instant::now();
        let prepared = weights.prepare(decoder.program().stages(), observer)?;
        phases.load += start.elapsed().as_secs_f64();
        Ok(Some(prepared))
    }

    /// The images of a batch's last sample. `observer` gets each as soon as it is decoded.
    fn finish(
        &self,
        session: &Session,
        decoding: Option<&Prepared<'_>>,
        batch: &Batch,
        sample: &HostTensor,
        observer: &mut Observer<'_>,
        phases: &mut Phases,
    ) -> Result<Vec<RgbImage>, PipelineError> {
        let mut images = Vec::with_capacity(batch.count);
        for row in 0..batch.count {
            let image = batch.start + row;
            if !matches!(self.ending, Ending::Handed) {
                enter(observer, Phase::Decode { image })?;
            }
            let start = Instant::now();
            let pixels = self.image(session, decoding, sample, row)?;
            phases.decode += start.elapsed().as_secs_f64();
            let Some(pixels) = pixels else {
                continue;
            };
            let event = Event::Image {
                image,
                pixels: &pixels,
            };
            observer(event).map_err(PipelineError::Observer)?;
            images.push(pixels);
        }
        Ok(images)
    }

    /// The start of each batch, and the noise of each of its images.
    fn start(
        &self,
        starting: Starting<'_, '_>,
        observer: &mut Observer<'_>,
        phases: &mut Phases,
    ) -> Result<(Vec<BatchStart>, Vec<Vec<NoiseGenerator>>), PipelineError> {
        let Starting {
            session,
            weights,
            images,
            batches,
            options,
        } = starting;
        let size = self.denoiser.batch();
        let mut generators: Vec<Vec<NoiseGenerator>> = batches
            .iter()
            .map(|batch| {
                let seeds = batch.filled(images, size).into_iter().map(|i| i.seed);
                seeds.map(NoiseGenerator::new).collect()
            })
            .collect();
        let start = Instant::now();
        let source = StartSource {
            image: match (options.image, &self.image_encoder) {
                (Some(image), Some(encoder)) => Some(StartImage {
                    session,
                    encoder,
                    prepared: weights.prepare(encoder.program().stages(), observer)?,
                    image,
                }),
                _ => None,
            },
            mask: options.mask,
            is_inpainting: self.is_inpainting,
            sample_dims: self.denoiser.sample_dims(),
        };
        phases.load += start.elapsed().as_secs_f64();
        enter(observer, Phase::Encode)?;
        let start = Instant::now();
        let starts = batches
            .iter()
            .zip(&mut generators)
            .map(|(batch, generators)| {
                let noise = match options.latents {
                    Some(all) => Some(self.rows_of(all, batch.start, size)?),
                    None => None,
                };
                source.begin(noise, options.plan(&images[batch.start])?, generators)
            })
            .collect::<Result<Vec<_>, PipelineError>>()?;
        phases.encode += start.elapsed().as_secs_f64();
        Ok((starts, generators))
    }

    /// The last sample of a batch.
    fn denoise(
        &self,
        denoising: Denoising<'_>,
        mut conditioning: Conditioning,
        generators: &mut [NoiseGenerator],
        observer: &mut Observer<'_>,
        phases: &mut Phases,
    ) -> Result<HostTensor, PipelineError> {
        let Denoising {
            session,
            prepared,
            decoding,
            images,
            batch,
            start,
            options,
        } = denoising;
        let size = self.denoiser.batch();
        if self.guidance && options.zero_empty_prompts {
            let rows = batch.filled(images, size).into_iter().enumerate();
            let empty = rows.filter(|(_, image)| image.negative_is_empty);
            conditioning.zero(empty.map(|(row, _)| 2 * row));
        }
        let first = &images[batch.start];
        let plan = options.plan(first)?;
        let inputs = DenoiseInputs {
            conditioning: &conditioning,
            time_ids: &self.time_ids.repeat(size),
            generators,
            sample: &start.sample,
            inpainting: start.inpainting.as_ref(),
            controls: options.controls,
            guidance_scale: first.guidance_scale,
            guidance_rescale: options.guidance_rescale,
            plan,
        };
        enter(observer, Phase::Denoise)?;
        let mut previewing = 0.0;
        let mut after_step = |done: usize, predicted: &Array| {
            observer(Event::Step).map_err(PipelineError::Observer)?;
            // After the last step there is the image itself.
            if done == plan.steps.len()
                || !options
                    .preview_every
                    .is_some_and(|every| done.is_multiple_of(every))
            {
                return Ok(());
            }
            let start = Instant::now();
            let predicted = predicted.to_host(session.mesh())?;
            for row in 0..batch.count {
                let image = batch.start + row;
                enter(observer, Phase::Decode { image })?;
                let Some(preview) = self.image(session, decoding, &predicted, row)? else {
                    continue;
                };
                observer(Event::Preview {
                    image,
                    steps: done,
                    preview: &preview,
                })
                .map_err(PipelineError::Observer)?;
            }
            enter(observer, Phase::Denoise)?;
            previewing += start.elapsed().as_secs_f64();
            Ok(())
        };
        let start = Instant::now();
        let sample = self
            .denoiser
            .run(session, prepared, inputs, &mut after_step)?;
        phases.denoise += start.elapsed().as_secs_f64() - previewing;
        phases.decode += previewing;
        Ok(sample)
    }

    /// The image of one row of `sample`; none if another model continues with it.
    fn image(
        &self,
        session: &Session,
        decoding: Option<&Prepared<'_>>,
        sample: &HostTensor,
        row: usize,
    ) -> Result<Option<RgbImage>, PipelineError> {
        let sample = one_row(sample, row)?;
        match (&self.ending, decoding) {
            (Ending::Pixels, _) => pixels_to_image(&sample, self.pixel_unshuffle).map(Some),
            (Ending::Decoded(decoder), Some(prepared)) => {
                check_samples(&sample)?;
                let decoded = decoder.run(session, prepared, &sample)?;
                vae::check_finite(&decoded)?;
                decoded_to_image(&decoded).map(Some)
            }
            (Ending::Decoded(_), None) | (Ending::Handed, _) => Ok(None),
        }
    }

    /// The samples of another model's output, to continue with.
    fn go_on(
        &self,
        output: &ModelOutput,
        batches: usize,
    ) -> Result<Vec<BatchStart>, PipelineError> {
        let dims = self.denoiser.sample_dims();
        let found = output.samples.len();
        if found != batches {
            return Err(PipelineError::Request(format!(
                "{found} batches of samples to continue with, expected {batches}"
            )));
        }
        if let Some(other) = output.samples.iter().find(|s| s.shape.dims != dims) {
            return Err(PipelineError::Request(format!(
                "samples {} to continue with; this model takes {dims:?}",
                other.shape
            )));
        }
        let samples = output.samples.iter().cloned();
        let start = |sample| BatchStart {
            sample,
            inpainting: None,
        };
        Ok(samples.map(start).collect())
    }

    /// Rows `start..start + count` of given noise; rows that fill a batch up repeat its first.
    fn rows_of(
        &self,
        all: &HostTensor,
        start: usize,
        count: usize,
    ) -> Result<HostTensor, PipelineError> {
        let dims = self.denoiser.sample_dims();
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
}

/// Row `row` of a batch, with its first dimension.
fn one_row(batch: &HostTensor, row: usize) -> Result<HostTensor, PipelineError> {
    let mut shape = batch.shape.clone();
    let bytes = batch.data.len() / shape.dims[0].max(1);
    shape.dims[0] = 1;
    let data = batch.data[row * bytes..(row + 1) * bytes].to_vec();
    Ok(HostTensor::new(shape, data)?)
}

/// The inputs of the starts of all batches.
struct Starting<'a, 'w> {
    session: &'a Session,
    weights: &'a WeightSource<'w>,
    images: &'a [TokenizedImage],
    batches: &'a [Batch],
    options: &'a SamplingOptions<'a>,
}

/// The inputs of the steps of one batch.
struct Denoising<'a> {
    session: &'a Session,
    /// The denoiser's weights.
    prepared: &'a Prepared<'a>,
    /// The decoder's weights, where there are previews or several batches.
    decoding: Option<&'a Prepared<'a>>,
    images: &'a [TokenizedImage],
    batch: &'a Batch,
    start: &'a BatchStart,
    options: &'a SamplingOptions<'a>,
}
