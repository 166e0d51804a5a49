//! The compiled programs of one model, from prompts to images.

use std::time::Instant;

use image::RgbImage;

use crate::emit::DotPrecision;
use crate::host_tensor::HostTensor;
use crate::models::{ControlNet, DiffusionModel, SeenImage, vae};
use crate::runtime::{Prepared, Session, StagedProgram, StagedTimings};
use crate::schedulers::SamplingPlan;

use super::PipelineError;
use super::batch::{Batch, Phases, TokenizedImage, batches, one_row};
use super::conditioning::{Conditioning, Encoded, PromptEncoders};
use super::decoded::{check_samples, decoded_to_image, pixels_to_image};
use super::denoiser::{AfterStep, ControlImage, DenoiseInputs, SkipLayerGuidance};
use super::hires::{Hires, Place, noised};
use super::image_prompt::{ImagePrompt, ImageTokens, of_batch};
use super::interpolate::resize_and_crop;
use super::latents::{Decoder, ImageEncoder};
use super::noise::NoiseGenerator;
use super::observer::{Event, Observer, PassSteps, Phase};
use super::part_program::PartProgram;
use super::pass::Pass;
use super::progress::Progress;
use super::start::{BatchStart, StartEncoder, StartSource, rows_of};
use super::text_to_image::Guidance;
use super::tiling::TilePlan;
use super::traced::{Ending, LoweredModel};
use super::weights::WeightSource;

/// Run-time settings of generation: a change compiles nothing.
#[derive(Clone, Copy, Debug)]
pub struct SamplingOptions<'a> {
    /// The samplers of all images.
    pub plans: &'a [SamplingPlan],
    pub true_cfg_scale: f32,
    pub guidance_rescale: f32,
    pub skip_layer_guidance: SkipLayerGuidance,
    /// Whether an empty negative prompt is zeros: `force_zeros_for_empty_prompt` of SDXL's `model_index.json`.
    pub zero_empty_prompts: bool,
    /// The images to start from, each `f32[1, 3, height, width]` in [-1, 1]; the model must be traced for them.
    pub images: &'a [HostTensor],
    /// `f32[1, 1, height, width]` of these images: 1 where it is generated anew, 0 where it is kept.
    pub mask: Option<&'a HostTensor>,
    /// The image that steers a model that sees one, `f32[1, 3, height, width]` in [-1, 1].
    pub control_image: Option<&'a HostTensor>,
    /// The conditioning images of the model's ControlNets, one for each.
    pub controls: &'a [ControlImage],
    /// Unit normal noise to start from, `f32[images, channels, rows, columns]`, in place of the seeds'.
    pub latents: Option<&'a HostTensor>,
    /// The unfinished result of another model, for the same number of images in batches of the same size: the steps
    /// continue with its samples. Neither `images` nor `latents` are read then.
    pub continues: Option<&'a ModelOutput>,
    /// The image for the model's IP-Adapter, if it has one.
    pub image_prompt: Option<&'a ImagePrompt>,
    /// The second pass of a hi-res fix; the model must be traced for it.
    pub redraw: Option<Redraw<'a>>,
    /// Height and width that images are scaled and cropped to; without, they have the model's.
    pub image_size: Option<[usize; 2]>,
    /// Steps from one preview of an image to the next.
    pub preview_every: Option<usize>,
    /// Whether [`Event::Sample`] tells of every step's samples.
    pub tell_samples: bool,
}

impl<'a> SamplingOptions<'a> {
    /// From noise of the images' seeds, by these samplers.
    pub fn new(plans: &'a [SamplingPlan]) -> Self {
        SamplingOptions {
            plans,
            true_cfg_scale: 1.0,
            guidance_rescale: 0.0,
            skip_layer_guidance: SkipLayerGuidance::default(),
            zero_empty_prompts: false,
            images: &[],
            mask: None,
            control_image: None,
            controls: &[],
            latents: None,
            continues: None,
            image_prompt: None,
            redraw: None,
            image_size: None,
            preview_every: None,
            tell_samples: false,
        }
    }

    /// The image that `image` starts from, if there are any.
    fn image_of(&self, image: &TokenizedImage) -> Result<Option<&'a HostTensor>, PipelineError> {
        match self.images.get(image.init) {
            None if !self.images.is_empty() => Err(PipelineError::Request(format!(
                "an image starts from image {}, of {}",
                image.init,
                self.images.len()
            ))),
            found => Ok(found),
        }
    }
}

/// The settings of the second pass of a hi-res fix.
#[derive(Clone, Copy, Debug)]
pub struct Redraw<'a> {
    /// The samplers of all images.
    pub plans: &'a [SamplingPlan],
    /// The conditioning images of the model's ControlNets at the final size, one for each.
    pub controls: &'a [ControlImage],
}

/// The sampler of an image, of those of all.
fn plan_of<'a>(
    plans: &'a [SamplingPlan],
    image: &TokenizedImage,
) -> Result<&'a SamplingPlan, PipelineError> {
    plans.get(image.plan).ok_or_else(|| {
        PipelineError::Request(format!(
            "an image has sampler {}, of {} samplers",
            image.plan,
            plans.len()
        ))
    })
}

/// The result of one model, and the seconds it took.
#[derive(Debug)]
pub struct ModelOutput {
    /// The denoiser's last samples, `f32[batch, channels, rows, columns]` for each batch; those that fill the last
    /// batch up are among them.
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
    pass: Pass,
    /// The second pass of a hi-res fix.
    hires: Option<Hires>,
    ending: Ending<Decoder>,
    /// The decoder of previews, where it is not that of `ending`.
    preview: Option<Ending<Decoder>>,
    image_encoder: Option<ImageEncoder>,
    image_tokens: Option<ImageTokens>,
    guidance: bool,
    seen: Option<SeenImage>,
    /// Whether the ControlNets see latents.
    nets_see_latents: bool,
    pixel_unshuffle: usize,
}

impl ImageGenerator {
    /// Compiles the programs but for the text encoders. Samples of a model without a VAE are images of `pixel_unshuffle
    /// x pixel_unshuffle` pixels in each place.
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
            preview,
            encode_image,
            image_tokens,
            hires,
            options,
            ..
        } = lowered;
        let large = hires.as_ref().map_or(model, |hires| &hires.model);
        let tiles = TilePlan::of(large);
        let preview_tiles = large.previewing().map(|model| TilePlan::of(&model));
        let preview = || -> Result<Option<Ending<Decoder>>, PipelineError> {
            Ok(match (preview, preview_tiles) {
                (Some(decoder), Some(tiles)) => {
                    let decoder = Decoder::compile(session, decoder, tiles?, precision)?;
                    Some(Ending::Decoded(decoder))
                }
                _ => None,
            })
        };
        let ending = || -> Result<Ending<Decoder>, PipelineError> {
            ending.try_map(|decoder| Decoder::compile(session, decoder, tiles?, precision))
        };
        let image_encoder = || -> Result<Option<ImageEncoder>, PipelineError> {
            let dims = model.sample_dims(1);
            encode_image
                .map(|encoder| ImageEncoder::compile(session, encoder, dims, precision))
                .transpose()
        };
        let image_tokens = || {
            let compile = |lowered| ImageTokens::compile(session, lowered, precision);
            image_tokens.map(compile).transpose()
        };
        let second = || {
            let compile = |hires| Hires::compile(session, model, hires, &options, precision);
            hires.map(compile).transpose()
        };
        let ((pass, second), (((ending, preview), image_encoder), image_tokens)) = rayon::join(
            || {
                rayon::join(
                    || Pass::compile(session, model, denoise, &options, precision),
                    second,
                )
            },
            || {
                rayon::join(
                    || rayon::join(|| rayon::join(ending, preview), image_encoder),
                    image_tokens,
                )
            },
        );
        Ok(ImageGenerator {
            pass: pass?,
            hires: second?,
            ending: ending?,
            preview: preview?,
            image_encoder: image_encoder?,
            image_tokens: image_tokens?,
            guidance: options.guidance != Guidance::Off,
            seen: model.denoiser.seen_image(),
            nets_see_latents: model.controlnets.iter().any(ControlNet::sees_latents),
            pixel_unshuffle,
        })
    }

    fn programs(&self) -> impl Iterator<Item = &StagedProgram> {
        let endings = [Some(&self.ending), self.preview.as_ref()];
        let decoders = endings.into_iter().flatten().filter_map(Ending::program);
        let image = self.image_encoder.as_ref().map(ImageEncoder::program);
        let tokens = self.image_tokens.as_ref().map(ImageTokens::program);
        let parts = decoders.map(Decoder::program).chain(image).chain(tokens);
        let second = self.hires.iter().flat_map(Hires::programs);
        self.pass
            .denoiser
            .programs()
            .chain(second)
            .chain(parts.map(PartProgram::stages))
    }

    /// The steps that `images` take, all batches together.
    pub fn steps(
        &self,
        images: &[TokenizedImage],
        options: &SamplingOptions<'_>,
    ) -> Vec<PassSteps> {
        let batches = batches(images, self.pass.denoiser.batch());
        let steps_of = |pass: &Pass, plans: &[SamplingPlan]| {
            let plans = batches
                .iter()
                .filter_map(|batch| plans.get(images[batch.start].plan));
            PassSteps {
                steps: plans.map(|plan| plan.steps.len()).sum(),
                places: pass.places(),
            }
        };
        let second = self.hires.as_ref().zip(options.redraw);
        let second = second.map(|(hires, redraw)| steps_of(&hires.pass, redraw.plans));
        let first = steps_of(&self.pass, options.plans);
        [first].into_iter().chain(second).collect()
    }

    /// Makes `images`, whose prompts are `encoded`, in batches of the programs' size, and gives each image to
    /// `observer` as soon as it is decoded. The weights of each program are let go before those of the next are read;
    /// with previews or several batches those of the decoder are there while the denoiser runs. Samples that are handed
    /// on are not decoded, and there are no previews of them.
    ///
    /// With a hi-res fix all batches are drawn small before the first is drawn again. The denoiser's weights stay for
    /// the second pass if its program takes them in the same form, and are otherwise read anew.
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
            mut conditioning,
            phases,
        } = encoded;
        let mut progress = Progress { observer, phases };
        let progress = &mut progress;
        let batches = batches(images, self.pass.denoiser.batch());
        if self.guidance && options.zero_empty_prompts {
            self.zero_empty_prompts(images, &batches, &mut conditioning);
        }
        let image_tokens = self.encode_image_prompt(session, weights, options, progress)?;
        let call = Call {
            session,
            weights,
            images,
            batches: &batches,
            conditioning: &conditioning,
            image_tokens: image_tokens.as_ref(),
            options,
        };
        let (starts, mut generators) = match options.continues {
            Some(output) => (
                self.go_on(output, batches.len())?,
                output.generators.clone(),
            ),
            None => self.start(&call, progress)?,
        };
        let first = Steps {
            pass: &self.pass,
            plans: options.plans,
            controls: options.controls,
            starts,
            prepared: progress.prepare(weights, self.pass.denoiser.program())?,
        };
        let last = match &self.hires {
            None => first,
            Some(hires) => self.enlarge(&call, hires, first, &mut generators, progress)?,
        };
        let (samples, made) = self.finish_all(&call, last, &mut generators, progress)?;
        Ok(ModelOutput {
            samples,
            images: made,
            phases: progress.phases,
            generators,
        })
    }

    /// The tokens of no image and of the image for the model's IP-Adapter, and their scale.
    fn encode_image_prompt(
        &self,
        session: &Session,
        weights: &WeightSource<'_>,
        options: &SamplingOptions<'_>,
        progress: &mut Progress<'_, '_>,
    ) -> Result<Option<([HostTensor; 2], f32)>, PipelineError> {
        let Some(encoder) = &self.image_tokens else {
            return Ok(None);
        };
        let Some(prompt) = options.image_prompt else {
            return Err(PipelineError::Request(
                "an IP-Adapter takes an image".to_string(),
            ));
        };
        let prepared = progress.prepare(weights, encoder.program().stages())?;
        progress.enter(Phase::Encode)?;
        let start = Instant::now();
        let tokens = encoder.run(session, &prepared, &prompt.pixels)?;
        progress.phases.encode += start.elapsed().as_secs_f64();
        Ok(Some((tokens, prompt.scale)))
    }

    /// Takes the steps of the first pass of a hi-res fix, and gives those of the second.
    fn enlarge<'a, 'w>(
        &self,
        call: &Call<'a, 'w>,
        hires: &'a Hires,
        first: Steps<'a, 'w>,
        generators: &mut [Vec<NoiseGenerator>],
        progress: &mut Progress<'_, '_>,
    ) -> Result<Steps<'a, 'w>, PipelineError> {
        let Some(redraw) = call.options.redraw else {
            return Err(PipelineError::Request(
                "programs of a hi-res fix need the settings of its second pass".to_string(),
            ));
        };
        let mut samples = Vec::with_capacity(call.batches.len());
        for (at, generators) in generators.iter_mut().enumerate() {
            samples.push(self.denoise(call, &first, at, None, generators, progress)?);
        }
        let program = hires.pass.denoiser.program();
        let is_shared = program.takes_prepared_of(first.pass.denoiser.program());
        let kept = is_shared.then_some(first.prepared);
        let place = Place {
            session: call.session,
            weights: call.weights,
        };
        let latents = hires.upscale(&place, call.batches, &samples, generators, progress)?;
        let starts = call.batches.iter().zip(&latents).zip(generators);
        let starts = starts.map(|((batch, latents), generators)| {
            let plan = plan_of(redraw.plans, &call.images[batch.start])?;
            noised(latents, plan.noised, generators)
        });
        Ok(Steps {
            pass: &hires.pass,
            plans: redraw.plans,
            controls: redraw.controls,
            starts: starts.collect::<Result<_, _>>()?,
            prepared: match kept {
                Some(prepared) => prepared,
                None => progress.prepare(call.weights, program)?,
            },
        })
    }

    /// Takes the last pass's steps of every batch, and makes the images of their samples.
    fn finish_all(
        &self,
        call: &Call<'_, '_>,
        steps: Steps<'_, '_>,
        generators: &mut [Vec<NoiseGenerator>],
        progress: &mut Progress<'_, '_>,
    ) -> Result<(Vec<HostTensor>, Vec<RgbImage>), PipelineError> {
        let every = call.options.preview_every;
        let preview = self.preview.as_ref().filter(|_| every.is_some());
        let beside = every.is_some() && preview.is_none() || call.batches.len() > 1;
        let mut decoder = match beside {
            true => decoder_weights(&self.ending, call, progress)?,
            false => None,
        };
        let small = match preview {
            Some(preview) => decoder_weights(preview, call, progress)?,
            None => None,
        };
        let mut samples = Vec::with_capacity(call.batches.len());
        let mut made = Vec::with_capacity(call.images.len());
        for (at, generators) in generators.iter_mut().enumerate() {
            let previews = every.map(|every| Previews {
                every,
                ending: preview.unwrap_or(&self.ending),
                decoding: small.as_ref().or(decoder.as_ref()),
            });
            let sample = self.denoise(call, &steps, at, previews, generators, progress)?;
            if beside {
                made.extend(self.finish(call, decoder.as_ref(), at, &sample, progress)?);
            }
            samples.push(sample);
        }
        drop((steps, small));
        if !beside {
            decoder = decoder_weights(&self.ending, call, progress)?;
            for (at, sample) in samples.iter().enumerate() {
                made.extend(self.finish(call, decoder.as_ref(), at, sample, progress)?);
            }
        }
        Ok((samples, made))
    }

    /// Sets the conditioning of empty negative prompts to zero.
    fn zero_empty_prompts(
        &self,
        images: &[TokenizedImage],
        batches: &[Batch],
        conditioning: &mut [Conditioning],
    ) {
        let size = self.pass.denoiser.batch();
        for (batch, conditioning) in batches.iter().zip(conditioning) {
            let rows = batch.filled(images, size).into_iter().enumerate();
            let empty = rows.filter(|(_, image)| image.negative_is_empty);
            conditioning.zero(empty.map(|(row, _)| 2 * row));
        }
    }

    /// The images of batch `at`'s last sample. The observer gets each as soon as it is decoded.
    fn finish(
        &self,
        call: &Call<'_, '_>,
        decoding: Option<&Prepared<'_>>,
        at: usize,
        sample: &HostTensor,
        progress: &mut Progress<'_, '_>,
    ) -> Result<Vec<RgbImage>, PipelineError> {
        let batch = &call.batches[at];
        let mut images = Vec::with_capacity(batch.count);
        for row in 0..batch.count {
            let image = batch.start + row;
            if !matches!(self.ending, Ending::Handed) {
                progress.enter(Phase::Decode { image })?;
            }
            let start = Instant::now();
            let pixels = self.image(call, &self.ending, decoding, sample, row)?;
            progress.phases.decode += start.elapsed().as_secs_f64();
            let Some(pixels) = pixels else {
                continue;
            };
            progress.tell(Event::Image {
                image,
                pixels: &pixels,
            })?;
            images.push(pixels);
        }
        Ok(images)
    }

    /// The start of each batch, and the noise of each of its images.
    fn start(
        &self,
        call: &Call<'_, '_>,
        progress: &mut Progress<'_, '_>,
    ) -> Result<(Vec<BatchStart>, Vec<Vec<NoiseGenerator>>), PipelineError> {
        let Call {
            session,
            weights,
            images,
            batches,
            options,
            ..
        } = *call;
        let size = self.pass.denoiser.batch();
        let mut generators: Vec<Vec<NoiseGenerator>> = batches
            .iter()
            .map(|batch| {
                let seeds = batch.filled(images, size).into_iter().map(|i| i.seed);
                seeds.map(NoiseGenerator::new).collect()
            })
            .collect();
        let has_images = !options.images.is_empty();
        let sample_dims = self.pass.denoiser.sample_dims();
        let nets = options.controls.iter().filter(|_| self.nets_see_latents);
        let controls = options.control_image.into_iter();
        let controls: Vec<&HostTensor> = controls.chain(nets.map(|net| &net.image)).collect();
        let source = StartSource {
            has_images,
            encoder: match &self.image_encoder {
                Some(encoder) if has_images || !controls.is_empty() => Some(StartEncoder {
                    session,
                    encoder,
                    prepared: progress.prepare(weights, encoder.program().stages())?,
                }),
                _ => None,
            },
            controls,
            mask: options.mask,
            seen: self.seen,
            sample_dims,
        };
        progress.enter(Phase::Encode)?;
        let start = Instant::now();
        let starts = batches
            .iter()
            .zip(&mut generators)
            .map(|(batch, generators)| {
                let noise = match options.latents {
                    Some(all) => Some(rows_of(all, sample_dims, batch.start, size)?),
                    None => None,
                };
                let plan = plan_of(options.plans, &images[batch.start])?;
                let rows = batch.filled(images, size);
                let rows = rows.iter().map(|image| options.image_of(image));
                let images = rows.collect::<Result<Vec<_>, _>>()?;
                source.begin(&images, noise, plan, generators)
            })
            .collect::<Result<Vec<_>, PipelineError>>()?;
        progress.phases.encode += start.elapsed().as_secs_f64();
        Ok((starts, generators))
    }

    /// The last sample of batch `at`.
    fn denoise(
        &self,
        call: &Call<'_, '_>,
        steps: &Steps<'_, '_>,
        at: usize,
        previews: Option<Previews<'_>>,
        generators: &mut [NoiseGenerator],
        progress: &mut Progress<'_, '_>,
    ) -> Result<HostTensor, PipelineError> {
        let Call {
            session, options, ..
        } = *call;
        let (batch, start) = (&call.batches[at], &steps.starts[at]);
        let Pass { denoiser, time_ids } = steps.pass;
        let first = &call.images[batch.start];
        let plan = plan_of(steps.plans, first)?;
        let conditioning = &call.conditioning[at];
        let prompts = conditioning.hidden.shape.dims[0];
        let image_tokens = match call.image_tokens {
            None => None,
            Some((tokens, scale)) => Some((of_batch(tokens, prompts, self.guidance)?, *scale)),
        };
        let inputs = DenoiseInputs {
            conditioning,
            image_tokens,
            time_ids: &time_ids.repeat(denoiser.batch()),
            generators,
            sample: &start.sample,
            inpainting: start.inpainting.as_ref(),
            control_latents: &start.controls,
            controls: steps.controls,
            guidance_scale: first.guidance_scale,
            true_cfg_scale: options.true_cfg_scale,
            guidance_rescale: options.guidance_rescale,
            skip_layer_guidance: options.skip_layer_guidance,
            plan,
        };
        progress.enter(Phase::Denoise)?;
        let mut previewing = 0.0;
        let mut after_step = |after: AfterStep<'_>| {
            progress.tell_step(session, batch, &after, options.tell_samples)?;
            let done = after.done;
            // After the last step there is the image itself.
            let previews = previews
                .as_ref()
                .filter(|previews| done != plan.steps.len() && done.is_multiple_of(previews.every));
            let Some(previews) = previews else {
                return Ok(());
            };
            let start = Instant::now();
            let predicted = after.predicted.to_host(session.mesh())?;
            for row in 0..batch.count {
                let image = batch.start + row;
                progress.enter(Phase::Decode { image })?;
                let Previews {
                    ending, decoding, ..
                } = *previews;
                let Some(preview) = self.image(call, ending, decoding, &predicted, row)? else {
                    continue;
                };
                progress.tell(Event::Preview {
                    image,
                    steps: done,
                    preview: &preview,
                })?;
            }
            progress.enter(Phase::Denoise)?;
            previewing += start.elapsed().as_secs_f64();
            Ok(())
        };
        let start = Instant::now();
        let sample = denoiser.run(session, &steps.prepared, inputs, &mut after_step)?;
        progress.phases.denoise += start.elapsed().as_secs_f64() - previewing;
        progress.phases.decode += previewing;
        Ok(sample)
    }

    /// The image of one row of `sample` by `ending`; none if another model continues with it.
    fn image(
        &self,
        call: &Call<'_, '_>,
        ending: &Ending<Decoder>,
        decoding: Option<&Prepared<'_>>,
        sample: &HostTensor,
        row: usize,
    ) -> Result<Option<RgbImage>, PipelineError> {
        let sample = one_row(sample, row)?;
        match (ending, decoding) {
            (Ending::Pixels, _) => pixels_to_image(&sample, self.pixel_unshuffle).map(Some),
            (Ending::Decoded(decoder), Some(prepared)) => {
                check_samples(&sample)?;
                let mut decoded = decoder.run(call.session, prepared, &sample)?;
                vae::check_finite(&decoded)?;
                if let Some(size) = call.options.image_size {
                    decoded = resize_and_crop(&decoded, size)?;
                }
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
        let dims = self.pass.denoiser.sample_dims();
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
            controls: Vec::new(),
        };
        Ok(samples.map(start).collect())
    }
}

/// What all passes of a call have in common.
#[derive(Clone, Copy)]
struct Call<'a, 'w> {
    session: &'a Session,
    weights: &'a WeightSource<'w>,
    images: &'a [TokenizedImage],
    batches: &'a [Batch],
    /// The embeddings of each batch.
    conditioning: &'a [Conditioning],
    /// The tokens of no image and of that of an IP-Adapter, and their scale.
    image_tokens: Option<&'a ([HostTensor; 2], f32)>,
    options: &'a SamplingOptions<'a>,
}

/// The steps of one pass.
struct Steps<'a, 'w> {
    pass: &'a Pass,
    plans: &'a [SamplingPlan],
    controls: &'a [ControlImage],
    /// Those of each batch.
    starts: Vec<BatchStart>,
    /// The denoiser's weights.
    prepared: Prepared<'w>,
}

/// The weights of the decoder of `ending`, where there is one.
fn decoder_weights<'w>(
    ending: &Ending<Decoder>,
    call: &Call<'_, 'w>,
    progress: &mut Progress<'_, '_>,
) -> Result<Option<Prepared<'w>>, PipelineError> {
    let Some(decoder) = ending.program() else {
        return Ok(None);
    };
    let prepared = progress.prepare(call.weights, decoder.program().stages())?;
    Ok(Some(prepared))
}

/// When there are previews, what decodes them, and its weights.
struct Previews<'a> {
    every: usize,
    ending: &'a Ending<Decoder>,
    decoding: Option<&'a Prepared<'a>>,
}
