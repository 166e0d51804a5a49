//! Prompts to pictures: the programs of one model, run one after the other.

use std::time::Instant;

use image::RgbImage;

use crate::emit::DotPrecision;
use crate::graph::Graph;
use crate::host_tensor::HostTensor;
use crate::models::vae;
use crate::quant::Decision;
use crate::runtime::{Array, Prepared, Session, Slot, StagedProgram, StagedTimings, Value};
use crate::schedulers::SamplingPlan;

use super::latents::{Decoder, ImageEncoder, trace_decode, trace_encode_image};
use super::model::DiffusionModel;
use super::noise::NoiseGenerator;
use super::pixels::{RGB, to_pixels};
use super::prompt::{PromptTokens, apply_weights};
use super::text_to_image::{
    Conditioning, ControlImage, DenoiseOptions, Denoiser, Encoder, PipelineError, Request,
    StartImage, trace_denoise, trace_encode,
};

/// Why pictures could not be made; the sources of weights have errors of their own.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

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
    /// `f32[1, 1, rows, columns]` of latents: 1 where the picture is drawn anew.
    pub mask: Option<&'a HostTensor>,
    /// What steers the model's ControlNet.
    pub control: Option<&'a ControlImage>,
    /// Unit normal noise to start from, `f32[pictures, channels, rows, columns]`, in place of the seeds'.
    pub latents: Option<&'a HostTensor>,
}

/// Where weights are when a program needs them.
pub enum WeightSource<'a> {
    /// On the devices already.
    Devices(&'a dyn Fn(&str) -> Option<&'a Array>),
    /// In files: each is read when its program is prepared, and put on the devices.
    Files(&'a dyn Fn(&Slot) -> Result<Array, Failure>),
}

impl<'a> WeightSource<'a> {
    fn prepare(&self, program: &StagedProgram) -> Result<Prepared<'a>, Failure> {
        match self {
            WeightSource::Devices(lookup) => program.prepare(&mut |slot| {
                let array = lookup(&slot.name);
                let missing = || Failure::from(format!("no value for the weight {}", slot.name));
                Ok(Value::Borrow(array.ok_or_else(missing)?))
            }),
            WeightSource::Files(read) => {
                program.prepare(&mut |slot| Ok::<_, Failure>(Value::Donate(read(slot)?)))
            }
        }
    }
}

/// Seconds of each phase of making pictures.
#[derive(Clone, Copy, Debug, Default)]
pub struct Phases {
    /// Reading weights and preparing them.
    pub load: f64,
    pub encode: f64,
    pub denoise: f64,
    pub decode: f64,
}

/// The programs of one model, before they are compiled.
pub struct Traced {
    encoders: Vec<Graph>,
    denoise: Graph,
    decode: Option<Graph>,
    encode_image: Option<Graph>,
    /// What quantization decided for each contraction of the denoising step.
    pub decisions: Vec<Decision>,
    options: DenoiseOptions,
}

impl Traced {
    /// Traces every program of `model`; `from_image` asks for the one that encodes a picture to start from.
    ///
    /// # Errors
    /// When the model's parts do not fit together, or quantization is refused.
    pub fn new(
        model: &DiffusionModel,
        options: DenoiseOptions,
        from_image: bool,
    ) -> Result<Traced, PipelineError> {
        let encoders = (0..model.text_encoders.len())
            .map(|which| trace_encode(model, which, options.rows()))
            .collect::<Result<Vec<_>, _>>()?;
        let (denoise, decisions) = trace_denoise(model, &options)?;
        let decode = match &model.vae {
            Some(_) => {
                let [rows, columns] = model.decoded_at_once()?.tile();
                Some(trace_decode(model, [rows, columns])?)
            }
            None => None,
        };
        Ok(Traced {
            encoders,
            denoise,
            decode,
            encode_image: match from_image {
                true => Some(trace_encode_image(model)?),
                false => None,
            },
            decisions,
            options,
        })
    }

    /// All programs, each with the weights of one part of the model.
    pub fn graphs(&self) -> impl Iterator<Item = &Graph> {
        self.encoders
            .iter()
            .chain([&self.denoise])
            .chain(&self.decode)
            .chain(&self.encode_image)
    }
}

/// The compiled programs of one model.
pub struct Pipeline {
    encoders: Vec<Encoder>,
    denoiser: Denoiser,
    decoder: Option<Decoder>,
    image_encoder: Option<ImageEncoder>,
    guidance: bool,
    time_ids: Vec<f32>,
    pixel_unshuffle: usize,
}

/// What a call made, and the seconds it took.
pub struct Made {
    /// The UNet's last samples, `f32[batch, channels, rows, columns]` for each batch; those that fill the last batch up
    /// are among them.
    pub samples: Vec<HostTensor>,
    pub images: Vec<RgbImage>,
    pub phases: Phases,
}

impl Pipeline {
    /// Compiles every program that was traced of `model`. Samples of a model without a VAE are pictures of
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
    ) -> Result<Pipeline, PipelineError> {
        let Traced { options, .. } = traced;
        let sizes = [options.rows(), model.tokens];
        let encoders = traced
            .encoders
            .iter()
            .map(|graph| Encoder::compile(session, graph, sizes, precision))
            .collect::<Result<Vec<_>, _>>()?;
        let dims = model.sample_dims(options.batch);
        Ok(Pipeline {
            encoders,
            denoiser: Denoiser::compile(session, &traced.denoise, dims, precision)?,
            decoder: match &traced.decode {
                Some(graph) => {
                    let tiles = model.decoded_at_once()?;
                    Some(Decoder::compile(session, graph, tiles, precision)?)
                }
                None => None,
            },
            image_encoder: match &traced.encode_image {
                Some(graph) => {
                    let dims = model.sample_dims(1);
                    Some(ImageEncoder::compile(session, graph, dims, precision)?)
                }
                None => None,
            },
            guidance: options.guidance,
            time_ids: model.time_ids(),
            pixel_unshuffle,
        })
    }

    /// What compiling all programs took.
    pub fn timings(&self) -> StagedTimings {
        let encoders = self.encoders.iter().map(Encoder::program);
        let decoder = self.decoder.as_ref().map(Decoder::program);
        let image = self.image_encoder.as_ref().map(ImageEncoder::program);
        let mut all = self.denoiser.program().timings();
        for timings in encoders
            .chain(decoder)
            .chain(image)
            .map(StagedProgram::timings)
        {
            all.emit += timings.emit;
            all.compile += timings.compile;
            all.programs += timings.programs;
            all.from_cache += timings.from_cache;
        }
        all
    }

    /// How often the UNet runs for `pictures`.
    pub fn runs(&self, pictures: &[Picture], plans: &[SamplingPlan]) -> usize {
        batches(pictures, self.denoiser.batch())
            .iter()
            .filter_map(|batch| plans.get(pictures[batch.start].plan))
            .map(|plan| plan.steps.len())
            .sum()
    }

    /// Makes `pictures`, in batches of the pipeline's size. The weights of each program are let go before those of the
    /// next are read. `progress` is called after each run of the UNet: [`Pipeline::runs`] of them.
    ///
    /// # Errors
    /// When weights cannot be read, a program fails, or what it makes is not finite.
    pub fn run(
        &self,
        session: &Session,
        source: &WeightSource<'_>,
        pictures: &[Picture],
        options: &DrawOptions<'_>,
        progress: &mut dyn FnMut(),
    ) -> Result<Made, Failure> {
        let mut phases = Phases::default();
        let size = self.denoiser.batch();
        let batches = batches(pictures, size);
        let rows = |batch: &Batch| -> Vec<&Picture> {
            // A batch that is not full is filled up with its first picture; what that makes is dropped.
            let filled = |row| if row < batch.count { row } else { 0 };
            (0..size)
                .map(|row| &pictures[batch.start + filled(row)])
                .collect()
        };

        let mut parts: Vec<Vec<Conditioning>> = vec![Vec::new(); batches.len()];
        for (which, encoder) in self.encoders.iter().enumerate() {
            let start = Instant::now();
            let prepared = source.prepare(encoder.program())?;
            phases.load += start.elapsed().as_secs_f64();
            let start = Instant::now();
            for (batch, parts) in batches.iter().zip(&mut parts) {
                let batch = rows(batch);
                parts.push(self.encode(session, encoder, &prepared, which, &batch)?);
            }
            phases.encode += start.elapsed().as_secs_f64();
        }

        let mut generators: Vec<Vec<NoiseGenerator>> = batches
            .iter()
            .map(|batch| {
                let seeds = rows(batch).into_iter().map(|p| p.seed);
                seeds.map(NoiseGenerator::new).collect()
            })
            .collect();
        let mut starts = Vec::with_capacity(batches.len());
        if let (Some(image), Some(encoder)) = (options.image, &self.image_encoder) {
            let start = Instant::now();
            let prepared = source.prepare(encoder.program())?;
            phases.load += start.elapsed().as_secs_f64();
            let start = Instant::now();
            for generators in &mut generators {
                let mask = match options.mask {
                    Some(mask) => Some(repeat(mask, generators.len())?),
                    None => None,
                };
                let latents = encoder.run(session, &prepared, image, generators)?;
                starts.push(StartImage { latents, mask });
            }
            phases.encode += start.elapsed().as_secs_f64();
        }

        let start = Instant::now();
        let prepared = source.prepare(self.denoiser.program())?;
        phases.load += start.elapsed().as_secs_f64();
        let start = Instant::now();
        let mut samples = Vec::with_capacity(batches.len());
        for (index, (at, parts)) in batches.iter().zip(parts).enumerate() {
            let batch = rows(at);
            let first = &pictures[at.start];
            let plan = options
                .plans
                .get(first.plan)
                .ok_or("a picture names a sampler that is not there")?;
            let Some(mut conditioning) = Conditioning::join(parts)? else {
                return Err("the model has no text encoder".into());
            };
            if self.guidance && options.zero_empty_prompts {
                let rows = batch.iter().enumerate();
                let empty = rows.filter(|(_, p)| p.negative_is_empty);
                conditioning.zero(empty.map(|(row, _)| 2 * row));
            }
            let latents = match options.latents {
                Some(all) => Some(self.rows_of(all, at.start, batch.len())?),
                None => None,
            };
            let rows = conditioning.hidden.shape.dims[0];
            let request = Request {
                conditioning: &conditioning,
                time_ids: &self.time_ids.repeat(rows),
                generators: &mut generators[index],
                image: starts.get(index),
                control: options.control,
                latents: latents.as_ref(),
                guidance_scale: first.guidance_scale,
                guidance_rescale: options.guidance_rescale,
                plan,
            };
            let mut after_step = |_| progress();
            let sample = self
                .denoiser
                .run(session, &prepared, request, &mut after_step)?;
            samples.push(sample);
        }
        phases.denoise += start.elapsed().as_secs_f64();
        drop(prepared);

        let mut images = Vec::with_capacity(pictures.len());
        match &self.decoder {
            None => {
                for (batch, sample) in batches.iter().zip(&samples) {
                    let made = pixels_to_images(sample, self.pixel_unshuffle)?;
                    images.extend(made.into_iter().take(batch.count));
                }
            }
            Some(decoder) => {
                let start = Instant::now();
                let prepared = source.prepare(decoder.program())?;
                phases.load += start.elapsed().as_secs_f64();
                let start = Instant::now();
                for (batch, sample) in batches.iter().zip(&samples) {
                    check_samples(sample)?;
                    let decoded = decoder.run(session, &prepared, sample)?;
                    vae::check_finite(&decoded)?;
                    images.extend(decoded_to_images(&decoded)?.into_iter().take(batch.count));
                }
                phases.decode += start.elapsed().as_secs_f64();
            }
        }
        Ok(Made {
            samples,
            images,
            phases,
        })
    }

    /// Encodes the prompts of a batch by text encoder `which`; with guidance, the negative prompt before each prompt.
    fn encode(
        &self,
        session: &Session,
        encoder: &Encoder,
        prepared: &Prepared<'_>,
        which: usize,
        batch: &[&Picture],
    ) -> Result<Conditioning, Failure> {
        let (mut ids, mut weights) = (Vec::new(), Vec::new());
        for picture in batch {
            let negative = self.guidance.then(|| picture.negative.get(which)).flatten();
            for tokens in negative.into_iter().chain(picture.prompt.get(which)) {
                ids.extend(tokens.ids());
                weights.extend(tokens.weights());
            }
        }
        let mut encoded = encoder.run(session, prepared, &ids)?;
        if weights.iter().any(|weight| *weight != 1.0) {
            let mut hidden = encoded.hidden.to_f32_vec()?;
            apply_weights(&mut hidden, &weights, encoder.tokens())?;
            encoded.hidden = HostTensor::from_f32(encoded.hidden.shape.dims, &hidden)?;
        }
        Ok(encoded)
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

/// `count` copies of a tensor of one row.
fn repeat(row: &HostTensor, count: usize) -> Result<HostTensor, Failure> {
    let mut dims = row.shape.dims.clone();
    dims[0] = count;
    Ok(HostTensor::new(
        row.shape.with_dims(dims),
        row.data.repeat(count),
    )?)
}

/// Pictures that are made together: neighbours that differ in prompt and seed alone.
struct Batch {
    start: usize,
    count: usize,
}

fn batches(pictures: &[Picture], size: usize) -> Vec<Batch> {
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
