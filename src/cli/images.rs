//! Prompts to pictures, for `generate` and for the sample images of `train`.

use std::time::Instant;

use image::RgbImage;

use crate::config::Config;
use crate::data::Tokenizer;
use crate::emit::DotPrecision;
use crate::graph::Graph;
use crate::host_tensor::HostTensor;
use crate::models::vae;
use crate::pipelines::model::DiffusionModel;
use crate::pipelines::pixels::{RGB, to_pixels};
use crate::pipelines::text_to_image::{
    Conditioning, Decoder, DenoiseOptions, Denoiser, Encoder, PipelineError, Request, WeightLookup,
    trace_decode, trace_denoise, trace_encode,
};
use crate::quant::Decision;
use crate::runtime::{Array, Prepared, Session, Slot, StagedProgram, StagedTimings, Value};
use crate::schedulers::SamplingPlan;

/// One picture to make.
#[derive(Clone, Debug)]
pub struct Prompted {
    pub prompt: String,
    pub negative_prompt: String,
    pub seed: u64,
}

pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Where weights are when a program needs them.
pub enum WeightSource<'a> {
    /// On the devices already.
    Devices(WeightLookup<'a>),
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
    /// What quantization decided for each contraction of the denoising step.
    pub decisions: Vec<Decision>,
    options: DenoiseOptions,
}

impl Traced {
    /// Traces every program of `model`.
    ///
    /// # Errors
    /// When the model's parts do not fit together, or quantization is refused.
    pub fn new(model: &DiffusionModel, options: DenoiseOptions) -> Result<Traced, PipelineError> {
        let encoders = (0..model.text_encoders.len())
            .map(|which| trace_encode(model, which, options.rows()))
            .collect::<Result<Vec<_>, _>>()?;
        let (denoise, decisions) = trace_denoise(model, &options)?;
        Ok(Traced {
            encoders,
            denoise,
            decode: match model.vae {
                Some(_) => Some(trace_decode(model, model.sample_size)?),
                None => None,
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
    }
}

/// The compiled programs of one model.
pub struct Pipeline {
    encoders: Vec<Encoder>,
    denoiser: Denoiser,
    decoder: Option<Decoder>,
    guidance: bool,
    time_ids: [f32; 6],
    pixel_unshuffle: usize,
}

/// Pictures and the seconds they took.
pub struct Made {
    pub images: Vec<RgbImage>,
    pub phases: Phases,
}

impl Pipeline {
    /// Compiles every program that was traced of `model`.
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
                    let dims = model.sample_dims(1);
                    Some(Decoder::compile(session, graph, dims, precision)?)
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
        let mut all = self.denoiser.program().timings();
        for timings in encoders.chain(decoder).map(StagedProgram::timings) {
            all.emit += timings.emit;
            all.compile += timings.compile;
            all.programs += timings.programs;
        }
        all
    }

    /// Makes a picture for each of `prompts`, in batches of the pipeline's size. The weights of each program are let go
    /// before those of the next are read. `progress` is told the picture and the model's run that are done.
    ///
    /// # Errors
    /// When a prompt cannot be encoded, weights cannot be read, or a program fails.
    pub fn run(
        &self,
        session: &Session,
        source: &WeightSource<'_>,
        tokenizers: &[Tokenizer],
        prompts: &[Prompted],
        options: &DrawOptions<'_>,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Made, Failure> {
        let mut phases = Phases::default();
        let mut timed = |phase: fn(&mut Phases) -> &mut f64, start: Instant| {
            *phase(&mut phases) += start.elapsed().as_secs_f64();
        };
        let batch = self.denoiser.batch();
        // A last, smaller batch is filled up with its first prompt; those pictures are dropped.
        let batches: Vec<Vec<&Prompted>> = prompts
            .chunks(batch)
            .map(|chunk| {
                (0..batch)
                    .map(|row| chunk.get(row).unwrap_or(&chunk[0]))
                    .collect()
            })
            .collect();

        let mut parts: Vec<Vec<Conditioning>> = vec![Vec::new(); batches.len()];
        for (encoder, tokenizer) in self.encoders.iter().zip(tokenizers) {
            let start = Instant::now();
            let prepared = source.prepare(encoder.program())?;
            timed(|p| &mut p.load, start);
            let start = Instant::now();
            for (batch, parts) in batches.iter().zip(&mut parts) {
                let ids = self.token_ids(tokenizer, batch)?;
                parts.push(encoder.run(session, &prepared, &ids)?);
            }
            timed(|p| &mut p.encode, start);
        }

        let start = Instant::now();
        let prepared = source.prepare(self.denoiser.program())?;
        timed(|p| &mut p.load, start);
        let start = Instant::now();
        let mut samples = Vec::with_capacity(batches.len());
        for (index, (batch, parts)) in batches.iter().zip(parts).enumerate() {
            let Some(mut conditioning) = Conditioning::join(parts)? else {
                return Err("the model has no text encoder".into());
            };
            if self.guidance && options.zero_empty_prompts {
                let empty = batch
                    .iter()
                    .enumerate()
                    .filter(|(_, p)| p.negative_prompt.is_empty());
                conditioning.zero(empty.map(|(row, _)| 2 * row))?;
            }
            let seeds: Vec<u64> = batch.iter().map(|p| p.seed).collect();
            let rows = conditioning.hidden.shape.dims[0];
            let request = Request {
                conditioning: &conditioning,
                time_ids: &self.time_ids.repeat(rows),
                seeds: &seeds,
                latents: None,
                guidance_scale: options.guidance_scale,
                guidance_rescale: options.guidance_rescale,
                plan: options.plan,
            };
            let done = index * self.denoiser.batch();
            samples.push(
                self.denoiser
                    .run(session, &prepared, &request, &mut |step| {
                        progress(done, step)
                    })?,
            );
        }
        timed(|p| &mut p.denoise, start);
        drop(prepared);

        let mut images = Vec::with_capacity(prompts.len());
        match &self.decoder {
            None => {
                for sample in &samples {
                    images.extend(pixels_to_images(sample, self.pixel_unshuffle)?);
                }
            }
            Some(decoder) => {
                let start = Instant::now();
                let prepared = source.prepare(decoder.program())?;
                timed(|p| &mut p.load, start);
                let start = Instant::now();
                for sample in &samples {
                    let decoded = decoder.run(session, &prepared, sample)?;
                    vae::check_finite(&decoded)?;
                    images.extend(decoded_to_images(&decoded)?);
                }
                timed(|p| &mut p.decode, start);
            }
        }
        images.truncate(prompts.len());
        Ok(Made { images, phases })
    }

    /// The token ids of a batch: with guidance, the negative prompt's before each prompt's.
    fn token_ids(&self, tokenizer: &Tokenizer, batch: &[&Prompted]) -> Result<Vec<i32>, Failure> {
        let mut ids = Vec::new();
        let mut encode = |text: &str| -> Result<(), Failure> {
            let encoded = tokenizer.encode(text)?;
            for warning in encoded.warnings() {
                super::tell(&format!("warning: '{text}': {warning}"));
            }
            ids.extend(encoded.ids);
            Ok(())
        };
        for prompted in batch {
            if self.guidance {
                encode(&prompted.negative_prompt)?;
            }
            encode(&prompted.prompt)?;
        }
        Ok(ids)
    }
}

/// How a call makes its pictures; nothing of it compiles anything.
#[derive(Clone, Debug)]
pub struct DrawOptions<'a> {
    pub plan: &'a SamplingPlan,
    pub guidance_scale: f32,
    pub guidance_rescale: f32,
    /// Whether an empty negative prompt is zeros instead of the encoding of an empty text
    /// (`force_zeros_for_empty_prompt` of SDXL's `model_index.json`).
    pub zero_empty_prompts: bool,
}

impl<'a> DrawOptions<'a> {
    /// What the configuration says.
    pub fn new(config: &Config, plan: &'a SamplingPlan) -> DrawOptions<'a> {
        DrawOptions {
            plan,
            guidance_scale: config.guidance_scale as f32,
            guidance_rescale: config.guidance_rescale as f32,
            zero_empty_prompts: false,
        }
    }
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
    let values = sample.to_f32_vec()?;
    if values.iter().any(|v| !v.is_finite()) {
        return Err("the model's sample is not finite".into());
    }
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
