//! Text to image: a program that encodes prompts, and one that takes a single denoising step.
//!
//! Everything that changes between two runs is an input of the programs: token ids, noise, guidance, and the
//! coefficients of each step. A new prompt, seed, scale or step count compiles nothing.

use std::collections::HashMap;

use crate::dtype::DType;
use crate::emit::DotPrecision;
use crate::graph::{Builder, Graph, GraphError, Init};
use crate::host_tensor::{HostTensor, HostTensorError};
use crate::models::unet::UNetInputs;
use crate::quant::{self, Decision, Policy, QuantError};
use crate::runtime::{Array, Program, ProgramOptions, RuntimeError, Session, Value};
use crate::schedulers::SamplingPlan;
use crate::shape::Shape;
use crate::shard::PartitionSpec;

use super::model::DiffusionModel;

/// Names of the denoising step's run-time inputs, beside those of [`UNetInputs`].
pub mod names {
    /// `f32[batch, channels, rows, columns]`; the step's result takes its buffer over.
    pub const SAMPLE: &str = "sample";
    pub const TIMESTEP: &str = "timestep";
    /// Scales the sample before it enters the model.
    pub const IN_SCALE: &str = "in_scale";
    /// Coefficient of the sample in the next one.
    pub const SAMPLE_SCALE: &str = "sample_scale";
    /// Coefficient of the model's output in the next sample.
    pub const MODEL_SCALE: &str = "model_scale";
    pub const GUIDANCE_SCALE: &str = "guidance_scale";
    /// Coefficients of sample and model output in the predicted clean sample, and of that in the next sample: inputs
    /// of a program that clips.
    pub const CLEAN_SAMPLE_SCALE: &str = "clean_sample_scale";
    pub const CLEAN_MODEL_SCALE: &str = "clean_model_scale";
    pub const CLEAN_SCALE: &str = "clean_scale";
    /// The text encoder's results, which are the denoising step's conditioning.
    pub const ENCODER_HIDDEN_STATES: &str = "encoder_hidden_states";
    pub const TEXT_EMBEDS: &str = "text_embeds";
    pub const TIME_IDS: &str = "time_ids";
}

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
    #[error("{program}: no value for its input {name}")]
    MissingInput { program: &'static str, name: String },
    #[error("the sampler adds fresh noise in its steps, which this pipeline does not do")]
    NoisySampler,
}

/// What the denoising program is traced for.
#[derive(Clone, Debug)]
pub struct DenoiseOptions {
    /// Images made at once, over all devices.
    pub batch: usize,
    /// Whether each step runs the model with and without the prompt, as one doubled batch.
    pub guidance: bool,
    pub quantization: Option<Policy>,
}

/// Traces one denoising step: `sample' = sample_scale * sample + model_scale * model(in_scale * sample, timestep)`.
///
/// With guidance, the model's batch holds two rows for each image, without and with its prompt, one after the other:
/// wherever a device's images are, so are both rows. (diffusers puts all rows without prompts first; over a sharded
/// batch that sends every sample to another device.) The model's output is `without + guidance_scale *
/// (with - without)` (Ho and Salimans 2022, equation 6, in diffusers' scale). Where the scheduler has `clip_sample`, the
/// predicted clean sample is clipped to [-1, 1] on the way.
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
    let sample = b.input(
        names::SAMPLE,
        Shape::new(DType::F32, model.sample_dims(batch)),
        &[Some("activation_batch"), None, None, None],
    )?;
    let timestep = scalar(names::TIMESTEP)?;
    let in_scale = scalar(names::IN_SCALE)?;
    let sample_scale = scalar(names::SAMPLE_SCALE)?;
    let model_scale = scalar(names::MODEL_SCALE)?;
    let rows = if options.guidance { 2 * batch } else { batch };
    let (encoder_hidden_states, text_time) = model.declare_conditioning(&b, rows)?;
    let scaled = b.mul(sample, in_scale)?;
    let [_, channels, height, width] = model.sample_dims(batch);
    let model_sample = if options.guidance {
        let pairs =
            b.broadcast_in_dim(scaled, &[0, 2, 3, 4], &[batch, 2, channels, height, width])?;
        b.reshape(pairs, &[rows, channels, height, width])?
    } else {
        scaled
    };
    let mut output = model.predict(
        &b,
        UNetInputs {
            sample: model_sample,
            timestep: b.broadcast_to(timestep, &[rows])?,
            encoder_hidden_states,
            text_time,
            additional_residuals: None,
        },
    )?;
    if options.guidance {
        let guidance = scalar(names::GUIDANCE_SCALE)?;
        let pairs = b.reshape(output, &[batch, 2, channels, height, width])?;
        let row = |which: usize| {
            let row = b.slice_dim(pairs, 1, which, which + 1)?;
            b.reshape(row, &[batch, channels, height, width])
        };
        let (without, with) = (row(0)?, row(1)?);
        output = b.add(without, b.mul(b.sub(with, without)?, guidance)?)?;
    }
    let s = b.root("sampler");
    let mut next = s.add(s.mul(sample, sample_scale)?, s.mul(output, model_scale)?)?;
    if model.scheduler.clip_sample {
        let sample_part = s.mul(sample, scalar(names::CLEAN_SAMPLE_SCALE)?)?;
        let model_part = s.mul(output, scalar(names::CLEAN_MODEL_SCALE)?)?;
        let clean = s.add(sample_part, model_part)?;
        let change = s.sub(s.clamp(clean, -1.0, 1.0)?, clean)?;
        next = s.add(next, s.mul(change, scalar(names::CLEAN_SCALE)?)?)?;
    }
    let decisions = match &options.quantization {
        None => Vec::new(),
        Some(policy) => quant::annotate(&b, policy)?,
    };
    b.output(names::SAMPLE, next, Some(sample))?;
    let graph = b.finish();
    let graph = match options.quantization {
        None => graph,
        Some(_) => quant::lower(&graph)?,
    };
    Ok((graph, decisions))
}

/// Traces the text encoder for `batch` prompts.
///
/// # Errors
/// When the model has no text encoder, or its configuration contradicts itself.
pub fn trace_encode(model: &DiffusionModel, batch: usize) -> Result<Graph, GraphError> {
    let b = Builder::new();
    let ids = model.declare_input_ids(&b, batch)?;
    let encoded = model.encode(&b, ids)?;
    let hidden = b.convert(encoded.encoder_hidden_states, DType::F32)?;
    b.output(names::ENCODER_HIDDEN_STATES, hidden, None)?;
    if let Some(embeds) = encoded.text_embeds {
        b.output(names::TEXT_EMBEDS, b.convert(embeds, DType::F32)?, None)?;
    }
    Ok(b.finish())
}

/// Gives the array of a weight by its full name, e.g. `unet/conv_in.weight`.
pub type WeightLookup<'a> = &'a dyn Fn(&str) -> Option<&'a Array>;

/// The images of one call: as many as the pipeline's batch.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// Token ids of each image's prompt, `batch * tokens` in all.
    pub prompt_ids: &'a [i32],
    /// Token ids of each image's negative prompt; not read without guidance.
    pub negative_ids: &'a [i32],
    /// Each image's noise depends on its seed alone.
    pub seeds: &'a [u64],
    pub guidance_scale: f32,
    pub plan: &'a SamplingPlan,
}

/// Compiled programs of one model, batch and guidance setting.
pub struct TextToImage {
    encode: Program,
    denoise: Program,
    sample_dims: [usize; 4],
    tokens: usize,
    time_ids: [f32; 6],
    guidance: bool,
    /// What quantization decided for each contraction of the denoising step.
    pub decisions: Vec<Decision>,
}

impl TextToImage {
    /// Traces and compiles both programs.
    ///
    /// # Errors
    /// When the model's parts do not fit together, or a program does not compile.
    pub fn compile(
        session: &Session,
        model: &DiffusionModel,
        options: &DenoiseOptions,
        precision: DotPrecision,
    ) -> Result<TextToImage, PipelineError> {
        let program = ProgramOptions { precision };
        let rows = if options.guidance {
            2 * options.batch
        } else {
            options.batch
        };
        let encode = Program::compile(session, &trace_encode(model, rows)?, "encode", &program)?;
        let (graph, decisions) = trace_denoise(model, options)?;
        let denoise = Program::compile(session, &graph, "denoise", &program)?;
        Ok(TextToImage {
            encode,
            denoise,
            sample_dims: model.sample_dims(options.batch),
            tokens: model.tokens,
            time_ids: model.time_ids(),
            guidance: options.guidance,
            decisions,
        })
    }

    /// Images made at once.
    pub fn batch(&self) -> usize {
        self.sample_dims[0]
    }

    /// The denoising program.
    pub fn denoise(&self) -> &Program {
        &self.denoise
    }

    /// Makes the images of `request`: `f32[batch, channels, rows, columns]` in the model's own range.
    ///
    /// `after_step` is told the number of steps done.
    ///
    /// # Errors
    /// When a weight is missing, or a program fails.
    pub fn run(
        &self,
        session: &Session,
        weights: WeightLookup<'_>,
        request: &Request<'_>,
        after_step: &mut dyn FnMut(usize),
    ) -> Result<HostTensor, PipelineError> {
        if request.plan.steps.iter().any(|s| s.noise != 0.0) {
            return Err(PipelineError::NoisySampler);
        }
        let ids = match self.guidance {
            false => request.prompt_ids.to_vec(),
            true => {
                let negatives = request.negative_ids.chunks(self.tokens);
                let prompts = request.prompt_ids.chunks(self.tokens);
                negatives
                    .zip(prompts)
                    .flat_map(|(without, with)| [without, with].concat())
                    .collect()
            }
        };
        let rows = ids.len() / self.tokens;
        let ids = HostTensor::from_i32([rows, self.tokens], &ids)?;
        let mut inputs = HashMap::new();
        inputs.insert(
            "input_ids".to_string(),
            put(session, &self.encode, "input_ids", &ids)?,
        );
        let encoded = call("encode", &self.encode, weights, &inputs, None)?;

        let mut inputs = HashMap::new();
        let mut set = |name: &str, value: &HostTensor| -> Result<(), PipelineError> {
            let array = put(session, &self.denoise, name, value)?;
            inputs.insert(name.to_string(), array);
            Ok(())
        };
        for (array, name) in encoded
            .iter()
            .zip([names::ENCODER_HIDDEN_STATES, names::TEXT_EMBEDS])
        {
            set(name, &array.to_host(session.mesh())?)?;
        }
        if encoded.len() > 1 {
            let ids = self.time_ids.repeat(rows);
            set(names::TIME_IDS, &HostTensor::from_f32([rows, 6], &ids)?)?;
        }
        if self.guidance {
            set(names::GUIDANCE_SCALE, &scalar(request.guidance_scale)?)?;
        }
        let mut sample = put(
            session,
            &self.denoise,
            names::SAMPLE,
            &self.noise(request.seeds, request.plan.init_noise_sigma)?,
        )?;
        for (done, step) in request.plan.steps.iter().enumerate() {
            for (name, value) in [
                (names::TIMESTEP, step.timestep),
                (names::IN_SCALE, step.in_scale),
                (names::SAMPLE_SCALE, step.x),
                (names::MODEL_SCALE, step.model),
                (names::CLEAN_SAMPLE_SCALE, step.clean_x),
                (names::CLEAN_MODEL_SCALE, step.clean_model),
                (names::CLEAN_SCALE, step.clean),
            ] {
                let array = put(session, &self.denoise, name, &scalar(value)?)?;
                inputs.insert(name.to_string(), array);
            }
            sample = call("denoise", &self.denoise, weights, &inputs, Some(sample))?.swap_remove(0);
            after_step(done + 1);
        }
        Ok(sample.to_host(session.mesh())?)
    }

    fn noise(&self, seeds: &[u64], sigma: f32) -> Result<HostTensor, HostTensorError> {
        let each: usize = self.sample_dims[1..].iter().product();
        let values: Vec<f32> = seeds
            .iter()
            .flat_map(|seed| Init::Normal { std: sigma }.sample(*seed, "initial noise", each))
            .collect();
        HostTensor::from_f32(self.sample_dims, &values)
    }
}

fn scalar(value: f32) -> Result<HostTensor, HostTensorError> {
    HostTensor::from_f32([], &[value])
}

fn put(
    session: &Session,
    program: &Program,
    name: &str,
    value: &HostTensor,
) -> Result<Array, PipelineError> {
    let spec = program
        .inputs()
        .iter()
        .find(|slot| slot.name == name)
        .map_or_else(
            || PartitionSpec::replicated(value.shape.rank()),
            |slot| slot.spec.clone(),
        );
    Ok(session.put(value, &spec)?)
}

/// Runs a program. `sample`, when given, is the donated sample.
fn call(
    name: &'static str,
    program: &Program,
    weights: WeightLookup<'_>,
    inputs: &HashMap<String, Array>,
    mut sample: Option<Array>,
) -> Result<Vec<Array>, PipelineError> {
    let mut arguments = Vec::with_capacity(program.inputs().len());
    for slot in program.inputs() {
        let value = if slot.name == names::SAMPLE && sample.is_some() {
            sample.take().map(Value::Donate)
        } else {
            weights(&slot.name)
                .or_else(|| inputs.get(&slot.name))
                .map(Value::Borrow)
        };
        arguments.push(value.ok_or_else(|| PipelineError::MissingInput {
            program: name,
            name: slot.name.clone(),
        })?);
    }
    Ok(program.run(arguments)?)
}
