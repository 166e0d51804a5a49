//! Text to image: programs that encode prompts, one that takes a single denoising step, and one that decodes latents.
//!
//! Everything that changes between two runs is an input of the programs: token ids, noise, guidance, and the
//! coefficients of each step. A new prompt, seed, scale or step count compiles nothing.

use std::collections::HashMap;

use crate::dtype::DType;
use crate::emit::DotPrecision;
use crate::graph::{Builder, Comparison, Graph, GraphError, Reduction, Tensor};
use crate::host_tensor::{HostTensor, HostTensorError};
use crate::models::controlnet::Control;
use crate::models::unet::UNetInputs;
use crate::quant::{self, Decision, Policy, QuantError};
use crate::runtime::{Array, Prepared, ProgramOptions, RuntimeError, Session, StagedProgram};
use crate::schedulers::{HISTORY, SamplingPlan};
use crate::shape::Shape;
use crate::shard::PartitionSpec;

use super::model::DiffusionModel;
use super::noise::NoiseGenerator;
use super::sampler::{Sampler, names as sampler_names, step_inputs};
use super::tiling::TilingError;

/// Names of the programs' run-time inputs and results, beside the sampler's ([`super::sampler::names`]).
pub mod names {
    pub const INPUT_IDS: &str = "input_ids";
    pub const GUIDANCE_SCALE: &str = "guidance_scale";
    /// How much of the guided output's deviation is brought back to that of the prompt's alone.
    pub const GUIDANCE_RESCALE: &str = "guidance_rescale";
    /// The text encoders' results, which are the denoising step's conditioning.
    pub const ENCODER_HIDDEN_STATES: &str = "encoder_hidden_states";
    pub const TEXT_EMBEDS: &str = "text_embeds";
    pub const TIME_IDS: &str = "time_ids";
    /// What a model for inpainting also sees: `f32[batch, 1, rows, columns]`, 1 where it draws, and the latents of the
    /// picture without that part, of the sample's shape.
    pub const MASK: &str = "mask";
    pub const MASKED_IMAGE_LATENTS: &str = "masked_image_latents";
    /// The picture that steers the first ControlNet, `f32[rows, 3, height, width]` in [0, 1], and how strongly. Those of
    /// further ones end in their number ([`numbered`]).
    pub const CONTROL_IMAGE: &str = "control_image";
    pub const CONTROL_SCALE: &str = "control_scale";

    /// The name of ControlNet `which`'s input.
    pub fn numbered(name: &str, which: usize) -> String {
        match which {
            0 => name.to_string(),
            _ => format!("{name}_{which}"),
        }
    }

    /// What is decoded, and the pictures made of it; and the other way round.
    pub const LATENTS: &str = "latents";
    pub const IMAGES: &str = "images";
}

/// The inputs of the denoising step that are known before its first run, beside the pictures for ControlNets.
const REQUEST: [&str; 5] = [
    names::ENCODER_HIDDEN_STATES,
    names::MASK,
    names::MASKED_IMAGE_LATENTS,
    names::TEXT_EMBEDS,
    names::TIME_IDS,
];

/// Why images could not be made.
#[derive(Debug, thiserror::Error)]
pub enum PipelineError {
    #[error(transparent)]
    Graph(#[from] GraphError),
    #[error(transparent)]
    Quant(#[from] QuantError),
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    #[error(transparent)]
    HostTensor(#[from] HostTensorError),
    #[error(transparent)]
    Tiling(#[from] TilingError),
    #[error("{what}: expected {expected}, found {found}")]
    Shape {
        what: &'static str,
        expected: Shape,
        found: Shape,
    },
}

/// What the denoising program is traced for.
#[derive(Clone, Debug)]
pub struct DenoiseOptions {
    /// Images made at once, over all devices.
    pub batch: usize,
    /// Tokens of a prompt: a multiple of what a text encoder takes at once.
    pub tokens: usize,
    /// Whether each step runs the model with and without the prompt, as one doubled batch.
    pub guidance: bool,
    pub quantization: Option<Policy>,
}

impl DenoiseOptions {
    /// Rows of the model's batch: with guidance two for each image, without and with its prompt.
    pub fn rows(&self) -> usize {
        if self.guidance {
            2 * self.batch
        } else {
            self.batch
        }
    }
}

/// Traces one denoising step: the model on the scaled sample, then what the sampler makes of its output.
///
/// With guidance, the model's batch holds two rows for each image, without and with its prompt, one after the other:
/// wherever a device's images are, so are both rows. (diffusers puts all rows without prompts first; over a sharded
/// batch that sends every sample to another device.) The model's output is `without + guidance_scale *
/// (with - without)` (Ho and Salimans 2022, equation 6, in diffusers' scale), then rescaled by
/// [`names::GUIDANCE_RESCALE`] (Lin et al. 2023, section 3.4; 0 leaves it as it is).
///
/// # Errors
/// When the model's parts do not fit together, or quantization is refused.
pub fn trace_denoise(
    model: &DiffusionModel,
    options: &DenoiseOptions,
) -> Result<(Graph, Vec<Decision>), PipelineError> {
    let b = Builder::new();
    let batch = options.batch;
    let scalar = |name: &str| b.input(name, Shape::scalar(DType::F32), &[]);
    let sampler = Sampler::declare(&b, model.sample_dims(batch), model.scheduler.clip_sample)?;
    let timestep = scalar(sampler_names::TIMESTEP)?;
    let in_scale = scalar(sampler_names::IN_SCALE)?;
    let rows = options.rows();
    let (encoder_hidden_states, text_time) =
        model.declare_conditioning(&b, rows, options.tokens)?;
    let scaled = b.mul(sampler.sample(), in_scale)?;
    let [_, channels, height, width] = model.sample_dims(batch);
    let paired = |x: Tensor| {
        if !options.guidance {
            return Ok(x);
        }
        let channels = b.dims(x)[1];
        let pairs = b.broadcast_in_dim(x, &[0, 2, 3, 4], &[batch, 2, channels, height, width])?;
        b.reshape(pairs, &[rows, channels, height, width])
    };
    let mut inputs = UNetInputs {
        sample: paired(scaled)?,
        timestep: b.broadcast_to(timestep, &[rows])?,
        encoder_hidden_states,
        text_time,
        additional_residuals: None,
    };
    inputs.additional_residuals = model.control(&b, &inputs, |which, config| {
        let [image_height, image_width] = model.image_size;
        let channels = config.condition.conditioning_channels;
        let image = Shape::new(DType::F32, [rows, channels, image_height, image_width]);
        let axes = [Some("activation_batch"), None, None, None];
        Ok(Control {
            image: b.input(&names::numbered(names::CONTROL_IMAGE, which), image, &axes)?,
            scale: scalar(&names::numbered(names::CONTROL_SCALE, which))?,
        })
    })?;
    // After the ControlNet, which sees the sample alone.
    if model.is_inpainting() {
        let input = |name: &str, channels: usize| {
            let dims = [batch, channels, height, width];
            let axes = [Some("activation_batch"), None, None, None];
            b.input(name, Shape::new(DType::F32, dims), &axes)
        };
        let seen = [
            input(names::MASK, 1)?,
            input(names::MASKED_IMAGE_LATENTS, channels)?,
        ];
        let seen = paired(b.concatenate(&seen, 1)?)?;
        inputs.sample = b.concatenate(&[inputs.sample, seen], 1)?;
    }
    let mut output = model.predict(&b, inputs)?;
    if options.guidance {
        let scale = scalar(names::GUIDANCE_SCALE)?;
        let rescale = scalar(names::GUIDANCE_RESCALE)?;
        let pairs = b.reshape(output, &[batch, 2, channels, height, width])?;
        let row = |which: usize| {
            let row = b.slice_dim(pairs, 1, which, which + 1)?;
            b.reshape(row, &[batch, channels, height, width])
        };
        output = guide(&b.root("guidance"), [row(0)?, row(1)?], scale, rescale)?;
    }
    sampler.advance(&b, output)?;
    let decisions = match &options.quantization {
        None => Vec::new(),
        Some(policy) => quant::annotate(&b, policy)?,
    };
    let graph = b.finish();
    let graph = match options.quantization {
        None => graph,
        Some(_) => quant::lower(&graph)?,
    };
    Ok((graph, decisions))
}

/// Classifier-free guidance of the model's outputs without and with the prompt.
fn guide(
    b: &Builder,
    [without, with]: [Tensor; 2],
    scale: Tensor,
    rescale: Tensor,
) -> Result<Tensor, GraphError> {
    let guided = b.add(without, b.mul(b.sub(with, without)?, scale)?)?;
    // The deviation over each image, by PyTorch's unbiased estimate; its factor cancels in the quotient.
    let deviation = |x: Tensor| {
        let count = b.dims(x)[1..].iter().product::<usize>() as f64;
        let mean = b.mul_scalar(b.reduce_keep(Reduction::Sum, x, &[1, 2, 3])?, 1.0 / count)?;
        let squares = b.square(b.sub(x, mean)?)?;
        b.sqrt(b.reduce_keep(Reduction::Sum, squares, &[1, 2, 3])?)
    };
    let of_guided = deviation(guided)?;
    let zero = b.scalar(DType::F32, 0.0)?;
    let one = b.scalar(DType::F32, 1.0)?;
    let flat = b.compare(Comparison::Eq, of_guided, zero)?;
    let divisor = b.select(flat, one, of_guided)?;
    let factor = b.div(deviation(with)?, divisor)?;
    // rescale * factor + (1 - rescale), which is exactly 1 for rescale 0.
    let change = b.mul(rescale, b.sub(factor, one)?)?;
    b.mul(guided, b.add(change, one)?)
}

/// Traces text encoder `which` for `rows` prompts.
///
/// # Errors
/// When the model has no such text encoder, or its configuration contradicts itself.
pub fn trace_encode(
    model: &DiffusionModel,
    which: usize,
    rows: usize,
) -> Result<Graph, GraphError> {
    let b = Builder::new();
    let ids = model.declare_input_ids(&b, rows)?;
    let encoded = model.encode(&b, which, ids)?;
    let hidden = b.convert(encoded.encoder_hidden_states, DType::F32)?;
    b.output(names::ENCODER_HIDDEN_STATES, hidden, None)?;
    if model.pooled_encoder()? == Some(which)
        && let Some(embeds) = encoded.text_embeds
    {
        b.output(names::TEXT_EMBEDS, b.convert(embeds, DType::F32)?, None)?;
    }
    Ok(b.finish())
}

/// Gives the array of a weight by its full name, e.g. `unet/conv_in.weight`.
pub type WeightLookup<'a> = &'a dyn Fn(&str) -> Option<&'a Array>;

/// The prompts of one call as the UNet takes them, on the host.
#[derive(Clone, Debug)]
pub struct Conditioning {
    /// `f32[rows, tokens, features]`
    pub hidden: HostTensor,
    /// `f32[rows, projection_dim]`, for a UNet that takes pooled embeddings.
    pub pooled: Option<HostTensor>,
}

/// One text encoder for a fixed number of prompts.
pub struct Encoder {
    program: StagedProgram,
    rows: usize,
    tokens: usize,
}

impl Encoder {
    /// Compiles the program that [`trace_encode`] made for `rows` prompts of `tokens` tokens.
    ///
    /// # Errors
    /// When it does not compile.
    pub fn compile(
        session: &Session,
        graph: &Graph,
        [rows, tokens]: [usize; 2],
        precision: DotPrecision,
    ) -> Result<Encoder, PipelineError> {
        let options = ProgramOptions { precision };
        Ok(Encoder {
            program: StagedProgram::compile(session, graph, "encode", &[], &options)?,
            rows,
            tokens,
        })
    }

    /// The compiled program.
    pub fn program(&self) -> &StagedProgram {
        &self.program
    }

    /// Tokens of a sequence.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Encodes token ids: for each prompt as many sequences as every other, one after the other. The hidden states of
    /// a prompt's sequences stand one after the other; its pooled output is that of the first.
    ///
    /// # Errors
    /// When the ids do not divide into the prompts, a weight is missing, or the program fails.
    pub fn run(
        &self,
        session: &Session,
        weights: &Prepared<'_>,
        ids: &[i32],
    ) -> Result<Conditioning, PipelineError> {
        let sequences = ids.len() / (self.rows * self.tokens);
        if ids.len() != sequences * self.rows * self.tokens || sequences == 0 {
            return Err(PipelineError::Shape {
                what: names::INPUT_IDS,
                expected: Shape::new(DType::S32, [self.rows, sequences.max(1) * self.tokens]),
                found: Shape::new(DType::S32, [ids.len()]),
            });
        }
        let row_ids = sequences * self.tokens;
        let mut hidden: Vec<Vec<f32>> = vec![Vec::new(); self.rows];
        let mut features = 0;
        let mut pooled = None;
        for sequence in 0..sequences {
            let ids: Vec<i32> = (0..self.rows)
                .flat_map(|row| &ids[row * row_ids + sequence * self.tokens..][..self.tokens])
                .copied()
                .collect();
            let ids = HostTensor::from_i32([self.rows, self.tokens], &ids)?;
            let ids = put(session, &self.program, names::INPUT_IDS, &ids)?;
            let results = self.program.step().call(
                &|name| match name {
                    names::INPUT_IDS => Some(&ids),
                    _ => weights.get(name),
                },
                Vec::new(),
            )?;
            let mut results = results.iter();
            if let Some(states) = results.next() {
                let states = states.to_host(session.mesh())?;
                features = states.shape.dims[2];
                let values = states.to_f32_vec()?;
                for (row, values) in hidden.iter_mut().zip(values.chunks(self.tokens * features)) {
                    row.extend(values);
                }
            }
            if let (0, Some(embeds)) = (sequence, results.next()) {
                pooled = Some(embeds.to_host(session.mesh())?);
            }
        }
        Ok(Conditioning {
            hidden: HostTensor::from_f32([self.rows, row_ids, features], &hidden.concat())?,
            pooled,
        })
    }
}

impl Conditioning {
    /// The features of several encoders side by side, with the pooled embeddings of the last that has any.
    ///
    /// # Errors
    /// When they are not for as many prompts and tokens.
    pub fn join(parts: Vec<Conditioning>) -> Result<Option<Conditioning>, PipelineError> {
        let mut parts = parts.into_iter();
        let Some(mut joined) = parts.next() else {
            return Ok(None);
        };
        for part in parts {
            let (left, right) = (&joined.hidden.shape.dims, &part.hidden.shape.dims);
            if left[..2] != right[..2] {
                return Err(PipelineError::Shape {
                    what: names::ENCODER_HIDDEN_STATES,
                    expected: joined.hidden.shape,
                    found: part.hidden.shape,
                });
            }
            let dims = [left[0], left[1], left[2] + right[2]];
            let (a, b) = (joined.hidden.to_f32_vec()?, part.hidden.to_f32_vec()?);
            let values: Vec<f32> = a
                .chunks(left[2])
                .zip(b.chunks(right[2]))
                .flat_map(|(a, b)| a.iter().chain(b).copied())
                .collect();
            joined = Conditioning {
                hidden: HostTensor::from_f32(dims, &values)?,
                pooled: part.pooled.or(joined.pooled),
            };
        }
        Ok(Some(joined))
    }

    /// Sets everything of the rows in `rows` to zero: what SDXL was trained to take for no prompt at all.
    pub fn zero(&mut self, rows: impl Iterator<Item = usize>) {
        let rows: Vec<usize> = rows.collect();
        for tensor in [Some(&mut self.hidden), self.pooled.as_mut()]
            .into_iter()
            .flatten()
        {
            let bytes = tensor.data.len() / tensor.shape.dims[0].max(1);
            for row in &rows {
                tensor.data[row * bytes..(row + 1) * bytes].fill(0);
            }
        }
    }
}

/// How a part of a picture is kept. Masks are `f32[batch, 1, rows, columns]`: 1 where it is drawn anew, 0 where it is
/// kept; all else is `f32[batch, channels, rows, columns]`.
#[derive(Clone, Debug)]
pub enum Inpainting {
    /// For a model that knows nothing of masks: after each step what is kept is put back, with the noise of the next.
    PutBack {
        latents: HostTensor,
        /// Unit normal.
        noise: HostTensor,
        mask: HostTensor,
    },
    /// For a model made for it, which sees both in each step.
    Seen {
        mask: HostTensor,
        masked_image_latents: HostTensor,
    },
}

/// A picture that steers a ControlNet.
#[derive(Clone, Debug)]
pub struct ControlImage {
    /// `f32[1, 3, height, width]` in [0, 1].
    pub image: HostTensor,
    pub scale: f32,
    /// The share of the steps before which, and after which, it does not steer.
    pub range: [f64; 2],
}

impl ControlImage {
    /// The scale in step `step` of `steps`: diffusers' `control_guidance_start` and `control_guidance_end`.
    fn scale_at(&self, step: usize, steps: usize) -> f32 {
        let [start, end] = self.range;
        let share = |step: usize| step as f64 / steps as f64;
        match share(step) < start || share(step + 1) > end {
            true => 0.0,
            false => self.scale,
        }
    }
}

/// The images of one call: as many as the denoiser's batch.
#[derive(Debug)]
pub struct Request<'a> {
    /// With guidance, each image's row without its prompt goes before that with it.
    pub conditioning: &'a Conditioning,
    /// SDXL's time ids of each row.
    pub time_ids: &'a [f32],
    /// One for each image, for samplers that add noise: it depends on its seed alone.
    pub generators: &'a mut [NoiseGenerator],
    /// The sample before the first step, `f32[batch, channels, rows, columns]`.
    pub sample: &'a HostTensor,
    /// A model for inpainting needs [`Inpainting::Seen`].
    pub inpainting: Option<&'a Inpainting>,
    /// One for each of the model's ControlNets.
    pub controls: &'a [ControlImage],
    pub guidance_scale: f32,
    pub guidance_rescale: f32,
    pub plan: &'a SamplingPlan,
}

/// The compiled denoising step of one model, batch and guidance setting.
pub struct Denoiser {
    program: StagedProgram,
    sample_dims: [usize; 4],
}

impl Denoiser {
    /// Compiles the step that [`trace_denoise`] made for samples `sample_dims`.
    ///
    /// # Errors
    /// When it does not compile.
    pub fn compile(
        session: &Session,
        graph: &Graph,
        sample_dims: [usize; 4],
        precision: DotPrecision,
    ) -> Result<Denoiser, PipelineError> {
        let options = ProgramOptions { precision };
        let names = graph.inputs.iter().map(|input| input.name.as_str());
        let pictures = names.filter(|name| name.starts_with(names::CONTROL_IMAGE));
        let request: Vec<&str> = REQUEST.into_iter().chain(pictures).collect();
        Ok(Denoiser {
            program: StagedProgram::compile(session, graph, "denoise", &request, &options)?,
            sample_dims,
        })
    }

    /// The compiled program.
    pub fn program(&self) -> &StagedProgram {
        &self.program
    }

    /// Images made at once.
    pub fn batch(&self) -> usize {
        self.sample_dims[0]
    }

    /// `[batch, channels, rows, columns]`
    pub fn sample_dims(&self) -> [usize; 4] {
        self.sample_dims
    }

    /// Makes the samples of `request`: `f32[batch, channels, rows, columns]` in the model's own range.
    ///
    /// `after_step` is told the number of runs of the model that are done.
    ///
    /// # Errors
    /// When a weight is missing, something has another shape, or a program fails.
    pub fn run(
        &self,
        session: &Session,
        weights: &Prepared<'_>,
        request: Request<'_>,
        after_step: &mut dyn FnMut(usize),
    ) -> Result<HostTensor, PipelineError> {
        let mut inputs: HashMap<String, Array> = HashMap::new();
        let mut set = |name: &str, value: &HostTensor| -> Result<(), PipelineError> {
            let array = put(session, &self.program, name, value)?;
            inputs.insert(name.to_string(), array);
            Ok(())
        };
        let conditioning = request.conditioning;
        let rows = conditioning.hidden.shape.dims[0];
        set(names::ENCODER_HIDDEN_STATES, &conditioning.hidden)?;
        if let Some(pooled) = &conditioning.pooled {
            set(names::TEXT_EMBEDS, pooled)?;
            let ids = request.time_ids.len() / rows.max(1);
            set(
                names::TIME_IDS,
                &HostTensor::from_f32([rows, ids], request.time_ids)?,
            )?;
        }
        for (which, control) in request.controls.iter().enumerate() {
            let mut dims = control.image.shape.dims.clone();
            dims[0] = rows;
            let shape = control.image.shape.with_dims(dims);
            let data = control.image.data.repeat(rows);
            let name = names::numbered(names::CONTROL_IMAGE, which);
            set(&name, &HostTensor::new(shape, data)?)?;
        }
        if let Some(Inpainting::Seen {
            mask,
            masked_image_latents,
        }) = request.inpainting
        {
            set(names::MASK, mask)?;
            set(names::MASKED_IMAGE_LATENTS, masked_image_latents)?;
        }
        for (name, value) in [
            (names::GUIDANCE_SCALE, request.guidance_scale),
            (names::GUIDANCE_RESCALE, request.guidance_rescale),
        ] {
            set(name, &HostTensor::from_f32([], &[value])?)?;
        }
        let early = self
            .program
            .request(&|name| inputs.get(name).or_else(|| weights.get(name)))?;
        inputs.extend(early);

        let each: usize = self.sample_dims[1..].iter().product();
        let zeros = |dims: &[usize]| HostTensor::zeros(Shape::new(DType::F32, dims));
        let history = [[HISTORY].as_slice(), &self.sample_dims].concat();
        let mut state = vec![
            put(
                session,
                &self.program,
                sampler_names::SAMPLE,
                request.sample,
            )?,
            put(
                session,
                &self.program,
                sampler_names::HISTORY,
                &zeros(&history),
            )?,
        ];
        let silence = zeros(&self.sample_dims);
        let mut silent = false;
        for (done, step) in request.plan.steps.iter().enumerate() {
            let mut set = |name: &str, value: &HostTensor| -> Result<(), PipelineError> {
                let array = put(session, &self.program, name, value)?;
                inputs.insert(name.to_string(), array);
                Ok(())
            };
            for (name, value) in step_inputs(step)? {
                set(name, &value)?;
            }
            for (which, control) in request.controls.iter().enumerate() {
                let scale = control.scale_at(done, request.plan.steps.len());
                let name = names::numbered(names::CONTROL_SCALE, which);
                set(&name, &HostTensor::from_f32([], &[scale])?)?;
            }
            if step.is_noisy() {
                let fresh = request.generators.iter_mut();
                let fresh: Vec<f32> = fresh.flat_map(|g| g.normal(each)).collect();
                let fresh = HostTensor::from_f32(self.sample_dims, &fresh)?;
                set(sampler_names::NOISE, &fresh)?;
            } else if !silent {
                set(sampler_names::NOISE, &silence)?;
            }
            silent = !step.is_noisy();
            state = self.program.step().call(
                &|name| inputs.get(name).or_else(|| weights.get(name)),
                state,
            )?;
            // The predicted clean sample is the last result, and nothing follows on it.
            state.truncate(2);
            if let Some(Inpainting::PutBack {
                latents,
                noise,
                mask,
            }) = request.inpainting
            {
                let kept = mix(latents, noise, step.noised)?.to_f32_vec()?;
                let sample = state[0].to_host(session.mesh())?.to_f32_vec()?;
                let sample = masked(&sample, &kept, &mask.to_f32_vec()?, self.sample_dims);
                let sample = HostTensor::from_f32(self.sample_dims, &sample)?;
                state[0] = put(session, &self.program, sampler_names::SAMPLE, &sample)?;
            }
            after_step(done + 1);
        }
        Ok(state[0].to_host(session.mesh())?)
    }
}

/// `clean * coefficients[0] + noise * coefficients[1]`, for tensors of one shape.
pub(super) fn mix(
    clean: &HostTensor,
    noise: &HostTensor,
    [of_clean, of_noise]: [f32; 2],
) -> Result<HostTensor, HostTensorError> {
    let (clean_values, noise_values) = (clean.to_f32_vec()?, noise.to_f32_vec()?);
    let values: Vec<f32> = clean_values
        .iter()
        .zip(&noise_values)
        .map(|(clean, noise)| clean * of_clean + noise * of_noise)
        .collect();
    HostTensor::from_f32(clean.shape.dims.clone(), &values)
}

/// `sample` where the mask is 1, `kept` where it is 0; the mask has one channel.
fn masked(sample: &[f32], kept: &[f32], mask: &[f32], dims: [usize; 4]) -> Vec<f32> {
    let [_, channels, rows, columns] = dims;
    let plane = rows * columns;
    sample
        .iter()
        .zip(kept)
        .enumerate()
        .map(|(i, (sample, kept))| {
            let mask = mask[i / (channels * plane) * plane + i % plane];
            (1.0 - mask) * kept + mask * sample
        })
        .collect()
}

pub(super) fn put(
    session: &Session,
    program: &StagedProgram,
    name: &str,
    value: &HostTensor,
) -> Result<Array, PipelineError> {
    let spec = program.input(name).map_or_else(
        || PartitionSpec::replicated(value.shape.rank()),
        |slot| slot.spec.clone(),
    );
    Ok(session.put(value, &spec)?)
}
