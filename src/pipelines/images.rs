//! Prompts to pictures: the programs of one model, run one after the other.

use std::ops::AddAssign;
use std::time::Instant;

use image::RgbImage;

use crate::emit::DotPrecision;
use crate::host_tensor::HostTensor;
use crate::models::{DiffusionModel, vae};
use crate::runtime::{
    Array, Prepared, RuntimeError, Session, Slot, StagedProgram, StagedTimings, Value,
};
use crate::schedulers::SamplingPlan;

use super::Failure;
use super::conditioning::{Encoded, PromptEncoders};
use super::denoiser::{ControlImage, Denoiser, Request};
use super::latents::{Decoder, ImageEncoder};
use super::noise::NoiseGenerator;
use super::pixels::{RGB, to_pixels};
use super::prompt::PromptTokens;
use super::start::{Begin, Pictured, Starts};
use super::text_to_image::{Guidance, PipelineError};
use super::tiling::TilePlan;
use super::traced::{Ending, Traced};

/// One picture to make.
#[derive(Clone, Debug)]
pub struct Picture {
    /// Which of [`DrawOptions::plans`] it is made by.
    pub plan: usize,
    pub guidance_scale: f32,
    /// The prompt as each text encoder takes it. All pictures' prompts and negative prompts have as many chunks.
    pub prompt: Vec<PromptTokens>,
    /// The negative prompt likewise; not read without guidance.
    pub negative: Vec<PromptTokens>,
    /// Whether the negative prompt is no text at all.
    pub negative_is_empty: bool,
    pub seed: u64,
}

/// How pictures are made; nothing of it compiles anything.
#[derive(Clone, Debug)]
pub struct DrawOptions<'a> {
    /// The samplers of all pictures.
    pub plans: &'a [SamplingPlan],
    pub guidance_rescale: f32,
    /// Whether an empty negative prompt is zeros instead of the encoding of an empty text
    /// (`force_zeros_for_empty_prompt` of SDXL's `model_index.json`).
    pub zero_empty_prompts: bool,
    /// The picture to start from, `f32[1, 3, height, width]` in [-1, 1]; the pipeline must be traced for one.
    pub image: Option<&'a HostTensor>,
    /// `f32[1, 1, height, width]` of that picture: 1 where it is drawn anew, 0 where it is kept.
    pub mask: Option<&'a HostTensor>,
    /// What steers the model's ControlNets, one for each.
    pub controls: &'a [ControlImage],
    /// Unit normal noise to start from, `f32[pictures, channels, rows, columns]`, in place of the seeds'.
    pub latents: Option<&'a HostTensor>,
    /// What another model made of as many pictures in batches of the same size, and did not finish: the steps go on with
    /// its samples as they are. Neither `image` nor `latents` is read then.
    pub continues: Option<&'a Made>,
}

/// Shows the arrays of weights, in their order.
pub type ReadWeights<'a> =
    dyn Fn(&[Slot], &mut dyn FnMut(Array) -> Result<(), Failure>) -> Result<(), Failure> + 'a;

/// Where weights are when a program needs them.
pub enum WeightSource<'a> {
    /// On the devices already.
    Devices(&'a dyn Fn(&str) -> Option<&'a Array>),
    /// In files: this reads the weights of a program, puts them on the devices and shows them in the order asked for.
    Files(&'a ReadWeights<'a>),
}

impl<'a> WeightSource<'a> {
    pub(super) fn prepare(&self, program: &StagedProgram) -> Result<Prepared<'a>, Failure> {
        let mut preparation = program.preparation();
        match self {
            WeightSource::Devices(lookup) => {
                for slot in program.weights() {
                    let Some(array) = lookup(&slot.name) else {
                        return Err(RuntimeError::MissingWeight(slot.name.clone()).into());
                    };
                    preparation.take(Value::Borrow(array))?;
                }
            }
            WeightSource::Files(read) => read(program.weights(), &mut |array| {
                Ok(preparation.take(Value::Donate(array))?)
            })?,
        }
        Ok(preparation.finish()?)
    }
}

/// Who is told while pictures are made.
pub struct Watcher<'a> {
    /// Called after each step: [`Pipeline::runs`] times.
    pub step: &'a mut dyn FnMut(),
    pub previews: Option<Previews<'a>>,
}

/// Pictures before they are finished: what the model takes each for by then.
pub struct Previews<'a> {
    /// Steps from one preview to the next.
    pub every: usize,
    pub show: &'a mut ShowPreview<'a>,
}

/// Takes the index of a picture, the number of steps it has had, and the picture.
pub type ShowPreview<'a> = dyn FnMut(usize, usize, &RgbImage) -> Result<(), Failure> + 'a;

/// Seconds of each phase of making pictures.
#[derive(Clone, Copy, Debug, Default)]
pub struct Phases {
    /// Reading weights and preparing them.
    pub load: f64,
    pub encode: f64,
    pub denoise: f64,
    /// With the decoding of previews.
    pub decode: f64,
}

impl AddAssign for Phases {
    fn add_assign(&mut self, other: Phases) {
        self.load += other.load;
        self.encode += other.encode;
        self.denoise += other.denoise;
        self.decode += other.decode;
    }
}

/// The compiled programs of one model.
pub struct Pipeline {
    encoders: PromptEncoders,
    drawer: Drawer,
}

impl Pipeline {
    /// Compiles every program that was traced of `model`, as [`Drawer::compile`].
    ///
    /// # Errors
    /// When a program does not compile.
    pub fn compile(
        session: &Session,
        model: &DiffusionModel,
        traced: &Traced,
        precision: DotPrecision,
        pixel_unshuffle: usize,
    ) -> Result<Pipeline, PipelineError> {
        let (drawer, encoders) = rayon::join(
            || Drawer::compile(session, model, traced, precision, pixel_unshuffle),
            || PromptEncoders::compile(session, model, traced, precision),
        );
        Ok(Pipeline {
            encoders: encoders?,
            drawer: drawer?,
        })
    }

    /// The part that draws.
    pub fn drawer(&self) -> &Drawer {
        &self.drawer
    }

    /// What compiling all programs took.
    pub fn timings(&self) -> StagedTimings {
        let programs = self.encoders.programs().chain(self.drawer.programs());
        let mut all = StagedTimings::default();
        for timings in programs.map(StagedProgram::timings) {
            all.emit += timings.emit;
            all.compile += timings.compile;
            all.programs += timings.programs;
        }
        all
    }

    /// Makes `pictures`: [`PromptEncoders::run`], then [`Drawer::run`].
    ///
    /// # Errors
    /// Theirs.
    pub fn run(
        &self,
        session: &Session,
        source: &WeightSource<'_>,
        pictures: &[Picture],
        options: &DrawOptions<'_>,
        watcher: Watcher<'_>,
    ) -> Result<Made, Failure> {
        let encoded = self.encoders.run(session, source, pictures)?;
        self.drawer
            .run(session, source, pictures, encoded, options, watcher)
    }
}

/// The programs that make pictures of encoded prompts.
pub struct Drawer {
    denoiser: Denoiser,
    ending: Ending<Decoder>,
    image_encoder: Option<ImageEncoder>,
    guidance: bool,
    is_inpainting: bool,
    /// SDXL's time ids of an image's rows, one after the other.
    time_ids: Vec<f32>,
    pixel_unshuffle: usize,
}

/// What a call made, and the seconds it took.
#[derive(Debug)]
pub struct Made {
    /// The UNet's last samples, `f32[batch, channels, rows, columns]` for each batch; those that fill the last batch up
    /// are among them.
    pub samples: Vec<HostTensor>,
    /// None where another model goes on.
    pub images: Vec<RgbImage>,
    pub phases: Phases,
    /// Where the noise of each image of each batch goes on.
    generators: Vec<Vec<NoiseGenerator>>,
}

impl Drawer {
    /// Compiles the programs. Samples of a model without a VAE are pictures of
    /// `pixel_unshuffle x pixel_unshuffle` pixels in each place.
    ///
    /// # Errors
    /// When a program does not compile.
    pub fn compile(
        session: &Session,
        model: &DiffusionModel,
        traced: &Traced,
        precision: DotPrecision,
        pixel_unshuffle: usize,
    ) -> Result<Drawer, PipelineError> {
        let Traced { options, .. } = traced;
        let guidance = options.guidance != Guidance::Off;
        let dims = model.sample_dims(options.batch);
        let [without, with] = model.time_ids();
        let ending = || -> Result<Ending<Decoder>, PipelineError> {
            Ok(match &traced.ending {
                Ending::Decoded(graph) => {
                    let tiles = TilePlan::of(model)?;
                    Ending::Decoded(Decoder::compile(session, graph, tiles, precision)?)
                }
                Ending::Pixels => Ending::Pixels,
                Ending::Handed => Ending::Handed,
            })
        };
        let image_encoder = || -> Result<Option<ImageEncoder>, PipelineError> {
            let graph = traced.encode_image.as_ref();
            let dims = model.sample_dims(1);
            graph
                .map(|graph| ImageEncoder::compile(session, graph, dims, precision))
                .transpose()
        };
        let (denoiser, (ending, image_encoder)) = rayon::join(
            || Denoiser::compile(session, &traced.denoise, dims, precision),
            || rayon::join(ending, image_encoder),
        );
        Ok(Drawer {
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
        self.denoiser.programs().chain(decoder).chain(image)
    }

    /// How many steps `pictures` take, batch by batch.
    pub fn runs(&self, pictures: &[Picture], plans: &[SamplingPlan]) -> usize {
        batches(pictures, self.denoiser.batch())
            .iter()
            .filter_map(|batch| plans.get(pictures[batch.start].plan))
            .map(|plan| plan.steps.len())
            .sum()
    }

    /// Makes `pictures`, whose prompts are `encoded`, in batches of the programs' size. The weights of each program are let
    /// go before those of the next are read; with previews those of the decoder are there while the UNet runs. Samples
    /// that are handed on are not decoded, and there are no previews of them.
    ///
    /// # Errors
    /// When weights cannot be read, a program fails, or what it makes is not finite; what `watcher` fails with.
    pub fn run(
        &self,
        session: &Session,
        source: &WeightSource<'_>,
        pictures: &[Picture],
        encoded: Encoded,
        options: &DrawOptions<'_>,
        mut watcher: Watcher<'_>,
    ) -> Result<Made, Failure> {
        let Encoded {
            conditioning,
            mut phases,
        } = encoded;
        let size = self.denoiser.batch();
        let batches = batches(pictures, size);
        let rows = |batch: &Batch| batch.filled(pictures, size);

        let plan = |batch: &Batch| {
            let plan = options.plans.get(pictures[batch.start].plan);
            plan.ok_or("a picture names a sampler that is not there")
        };
        let (begins, mut generators) = match options.continues {
            Some(made) => (self.go_on(made, batches.len())?, made.generators.clone()),
            None => {
                let mut generators: Vec<Vec<NoiseGenerator>> = batches
                    .iter()
                    .map(|batch| {
                        let seeds = rows(batch).into_iter().map(|p| p.seed);
                        seeds.map(NoiseGenerator::new).collect()
                    })
                    .collect();
                let start = Instant::now();
                let starts = Starts {
                    pictured: match (options.image, &self.image_encoder) {
                        (Some(image), Some(encoder)) => Some(Pictured {
                            session,
                            encoder,
                            prepared: source.prepare(encoder.program())?,
                            image,
                        }),
                        _ => None,
                    },
                    mask: options.mask,
                    is_inpainting: self.is_inpainting,
                    sample_dims: self.denoiser.sample_dims(),
                };
                phases.load += start.elapsed().as_secs_f64();
                let start = Instant::now();
                let begins = batches
                    .iter()
                    .zip(&mut generators)
                    .map(|(batch, generators)| {
                        let noise = match options.latents {
                            Some(all) => Some(self.rows_of(all, batch.start, size)?),
                            None => None,
                        };
                        starts.begin(noise, plan(batch)?, generators)
                    })
                    .collect::<Result<Vec<_>, Failure>>()?;
                phases.encode += start.elapsed().as_secs_f64();
                (begins, generators)
            }
        };

        let start = Instant::now();
        let prepared = source.prepare(self.denoiser.program())?;
        let mut decoding = match (&watcher.previews, &self.ending) {
            (Some(_), Ending::Decoded(decoder)) => Some(source.prepare(decoder.program())?),
            _ => None,
        };
        phases.load += start.elapsed().as_secs_f64();
        let start = Instant::now();
        let mut previewing = 0.0;
        let mut samples = Vec::with_capacity(batches.len());
        for (((at, mut conditioning), begin), generators) in batches
            .iter()
            .zip(conditioning)
            .zip(begins)
            .zip(&mut generators)
        {
            let batch = rows(at);
            let first = &pictures[at.start];
            if self.guidance && options.zero_empty_prompts {
                let rows = batch.iter().enumerate();
                let empty = rows.filter(|(_, p)| p.negative_is_empty);
                conditioning.zero(empty.map(|(row, _)| 2 * row));
            }
            let plan = plan(at)?;
            let request = Request {
                conditioning: &conditioning,
                time_ids: &self.time_ids.repeat(size),
                generators,
                sample: &begin.sample,
                inpainting: begin.inpainting.as_ref(),
                controls: options.controls,
                guidance_scale: first.guidance_scale,
                guidance_rescale: options.guidance_rescale,
                plan,
            };
            let mut after_step = |done: usize, predicted: &Array| {
                (watcher.step)();
                let Some(previews) = &mut watcher.previews else {
                    return Ok(());
                };
                // After the last step there is the picture itself.
                if !done.is_multiple_of(previews.every) || done == plan.steps.len() {
                    return Ok(());
                }
                let start = Instant::now();
                let predicted = predicted.to_host(session.mesh())?;
                let images = self.images(session, decoding.as_ref(), &predicted)?;
                for (row, image) in images.iter().take(at.count).enumerate() {
                    (previews.show)(at.start + row, done, image)?;
                }
                previewing += start.elapsed().as_secs_f64();
                Ok(())
            };
            let sample = self
                .denoiser
                .run(session, &prepared, request, &mut after_step)?;
            samples.push(sample);
        }
        phases.denoise += start.elapsed().as_secs_f64() - previewing;
        phases.decode += previewing;
        drop(prepared);

        if let (None, Ending::Decoded(decoder)) = (&decoding, &self.ending) {
            let start = Instant::now();
            decoding = Some(source.prepare(decoder.program())?);
            phases.load += start.elapsed().as_secs_f64();
        }
        let start = Instant::now();
        let mut images = Vec::with_capacity(pictures.len());
        for (batch, sample) in batches.iter().zip(&samples) {
            let made = self.images(session, decoding.as_ref(), sample)?;
            images.extend(made.into_iter().take(batch.count));
        }
        phases.decode += start.elapsed().as_secs_f64();
        Ok(Made {
            samples,
            images,
            phases,
            generators,
        })
    }

    /// The pictures of `sample`; none where another model goes on with it.
    fn images(
        &self,
        session: &Session,
        decoding: Option<&Prepared<'_>>,
        sample: &HostTensor,
    ) -> Result<Vec<RgbImage>, Failure> {
        match (&self.ending, decoding) {
            (Ending::Pixels, _) => pixels_to_images(sample, self.pixel_unshuffle),
            (Ending::Decoded(decoder), Some(prepared)) => {
                check_samples(sample)?;
                let decoded = decoder.run(session, prepared, sample)?;
                vae::check_finite(&decoded)?;
                decoded_to_images(&decoded)
            }
            (Ending::Decoded(_), None) | (Ending::Handed, _) => Ok(Vec::new()),
        }
    }

    /// The samples of `made`, to go on with.
    fn go_on(&self, made: &Made, batches: usize) -> Result<Vec<Begin>, Failure> {
        let dims = self.denoiser.sample_dims();
        if made.samples.len() != batches {
            let found = made.samples.len();
            return Err(format!("{found} batches of samples to go on with, for {batches}").into());
        }
        if let Some(other) = made.samples.iter().find(|s| s.shape.dims != dims) {
            return Err(format!(
                "samples {} to go on with; this model takes {dims:?}",
                other.shape
            )
            .into());
        }
        let samples = made.samples.iter().cloned();
        let begin = |sample| Begin {
            sample,
            inpainting: None,
        };
        Ok(samples.map(begin).collect())
    }

    /// Rows `start..start + count` of given noise; rows that fill a batch up repeat its first.
    fn rows_of(&self, all: &HostTensor, start: usize, count: usize) -> Result<HostTensor, Failure> {
        let dims = self.denoiser.sample_dims();
        let each: usize = dims[1..].iter().product();
        let values = all.to_f32_vec()?;
        let given = values.len() / each.max(1);
        if all.shape.dims.get(1..) != Some(&dims[1..]) || start >= given {
            return Err(format!(
                "latents {}; expected one of {:?} for each picture",
                all.shape,
                &dims[1..]
            )
            .into());
        }
        let rows: Vec<f32> = (start..start + count)
            .map(|row| if row < given { row } else { start })
            .flat_map(|row| values[row * each..(row + 1) * each].iter().copied())
            .collect();
        Ok(HostTensor::from_f32(dims, &rows)?)
    }
}

/// Pictures that are made together: neighbours that differ in prompt and seed alone.
pub(super) struct Batch {
    pub start: usize,
    pub count: usize,
}

impl Batch {
    /// Its pictures; one that is not full is filled up with its first picture, and what that makes is dropped.
    pub fn filled<'a>(&self, pictures: &'a [Picture], size: usize) -> Vec<&'a Picture> {
        let filled = |row| if row < self.count { row } else { 0 };
        (0..size)
            .map(|row| &pictures[self.start + filled(row)])
            .collect()
    }
}

pub(super) fn batches(pictures: &[Picture], size: usize) -> Vec<Batch> {
    let mut batches: Vec<Batch> = Vec::new();
    for (index, picture) in pictures.iter().enumerate() {
        match batches.last_mut() {
            Some(batch)
                if batch.count < size
                    && pictures[batch.start].plan == picture.plan
                    && pictures[batch.start].guidance_scale == picture.guidance_scale =>
            {
                batch.count += 1;
            }
            _ => batches.push(Batch {
                start: index,
                count: 1,
            }),
        }
    }
    batches
}

/// A value in [-1, 1] as a byte.
fn byte(value: f32) -> u8 {
    ((value + 1.0) * 127.5).round().clamp(0.0, 255.0) as u8
}

fn picture(width: usize, height: usize, bytes: Vec<u8>) -> Result<RgbImage, Failure> {
    RgbImage::from_raw(width as u32, height as u32, bytes)
        .ok_or_else(|| Failure::from("a picture has not as many bytes as pixels"))
}

/// Pictures of decoded `f32[batch, 3, height, width]`.
fn decoded_to_images(decoded: &HostTensor) -> Result<Vec<RgbImage>, Failure> {
    let &[_, channels, height, width] = decoded.shape.dims.as_slice() else {
        return Err(format!("decoded pictures {}", decoded.shape).into());
    };
    let values = decoded.to_f32_vec()?;
    let plane = height * width;
    values
        .chunks(channels * plane)
        .map(|values| {
            let bytes = (0..plane)
                .flat_map(|at| (0..RGB).map(move |c| byte(values[c * plane + at])))
                .collect();
            picture(width, height, bytes)
        })
        .collect()
}

/// Refuses a sample that would make a picture of nothing.
fn check_samples(sample: &HostTensor) -> Result<(), Failure> {
    if sample.to_f32_vec()?.iter().any(|v| !v.is_finite()) {
        return Err("the model's sample is not finite: no picture is made of it".into());
    }
    Ok(())
}

/// Pictures of samples in [-1, 1] of a model of pixels, `k x k` of them in each place.
fn pixels_to_images(sample: &HostTensor, k: usize) -> Result<Vec<RgbImage>, Failure> {
    let dims = &sample.shape.dims;
    if dims.len() != 4 || dims[1] != RGB * k * k || dims[2] != dims[3] {
        return Err(format!(
            "the model makes samples {}, not square RGB pictures (pixel_unshuffle={k})",
            sample.shape
        )
        .into());
    }
    check_samples(sample)?;
    let values = sample.to_f32_vec()?;
    let side = dims[2] * k;
    (0..dims[0])
        .map(|n| {
            let bytes = to_pixels(&values, n, side, k)
                .into_iter()
                .map(byte)
                .collect();
            picture(side, side, bytes)
        })
        .collect()
}
