//! The denoising steps of a batch of images.

use crate::dtype::DType;
use crate::emit::DotPrecision;
use crate::host_tensor::{HostTensor, HostTensorError};
use crate::lowering::Lowered;
use crate::runtime::{Array, Prepared, ProgramOptions, RuntimeError, Session, StagedProgram};
use crate::schedulers::{HISTORY, SamplingPlan};
use crate::shape::Shape;

use super::PipelineError;
use super::conditioning::Conditioning;
use super::inputs::{Inputs, put};
use super::noise::NoiseGenerator;
use super::sampler_step::{names as sampler_names, step_inputs};
use super::text_to_image::{DenoiseStep, names};

/// How a part of an image is kept. Masks are `f32[batch, 1, rows, columns]`: 1 where it is generated anew, 0 where it
/// is kept; all else is `f32[batch, channels, rows, columns]`.
#[derive(Clone, Debug)]
pub enum Inpainting {
    /// For a model without a mask input: after each step the kept part is put back, with the noise of the next.
    PutBack {
        latents: HostTensor,
        /// Unit normal.
        noise: HostTensor,
        mask: HostTensor,
    },
    /// For an inpainting model, which sees both in each step.
    Seen {
        mask: HostTensor,
        masked_image_latents: HostTensor,
    },
}

/// The conditioning image of a ControlNet.
#[derive(Clone, Debug)]
pub struct ControlImage {
    /// `f32[1, 3, height, width]`: in [0, 1] for a ControlNet that sees pixels, in [-1, 1] for one that sees latents.
    pub image: HostTensor,
    /// The kind of the image, for a ControlNet of several.
    pub mode: Option<i32>,
    pub scale: f32,
    /// The fractions of the steps at which it starts and stops to act.
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

/// Skip-layer guidance: how strongly samples are led away from the model's output without some layers, and the fractions
/// of the steps between which they are (diffusers' `skip_layer_guidance_start` and `skip_layer_guidance_stop`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SkipLayerGuidance {
    pub scale: f32,
    pub start: f64,
    pub stop: f64,
}

impl Default for SkipLayerGuidance {
    /// diffusers' values, which Stability AI recommends for Stable Diffusion 3.5 medium.
    fn default() -> Self {
        SkipLayerGuidance {
            scale: 2.8,
            start: 0.01,
            stop: 0.2,
        }
    }
}

impl SkipLayerGuidance {
    /// Whether step `step` of `steps` is between the two.
    fn acts(self, step: usize, steps: usize) -> bool {
        let (step, steps) = (step as f64, steps as f64);
        step > steps * self.start && step < steps * self.stop
    }
}

/// The images of one batch: as many as the denoiser's.
#[derive(Debug)]
pub struct DenoiseInputs<'a> {
    /// With guidance, the unconditional row of each image comes before the conditional one.
    pub conditioning: &'a Conditioning,
    /// SDXL's time ids of each row.
    pub time_ids: &'a [f32],
    /// One for each image, for samplers that add noise: it depends on its seed alone.
    pub generators: &'a mut [NoiseGenerator],
    /// The sample before the first step, `f32[batch, channels, rows, columns]`.
    pub sample: &'a HostTensor,
    /// An inpainting model needs [`Inpainting::Seen`].
    pub inpainting: Option<&'a Inpainting>,
    /// For a model that sees an image that steers: its latents, of the sample's shape.
    pub control_latents: &'a [HostTensor],
    /// One for each of the model's ControlNets.
    pub controls: &'a [ControlImage],
    /// For a model with an IP-Adapter: its image's tokens `f32[prompts, tokens, features]`, and their scale.
    pub image_tokens: Option<(HostTensor, f32)>,
    pub guidance_scale: f32,
    /// Read by a denoiser that was distilled from guided samples and is guided again.
    pub true_cfg_scale: f32,
    pub guidance_rescale: f32,
    /// Read by a step that was traced with layers to skip.
    pub skip_layer_guidance: SkipLayerGuidance,
    pub plan: &'a SamplingPlan,
}

/// What a step leaves.
pub struct AfterStep<'a> {
    /// Finished steps.
    pub done: usize,
    /// The samples.
    pub sample: &'a Array,
    /// The predicted clean samples.
    pub predicted: &'a Array,
    /// What each run of the model's program told of its activations ([`crate::quant::watch`]).
    pub statistics: &'a [Vec<Array>],
}

/// Takes what each step leaves.
pub type StepObserver<'a> = dyn FnMut(AfterStep<'_>) -> Result<(), PipelineError> + 'a;

/// What one step gives the next.
struct SamplerState {
    sample: Array,
    history: Array,
}

/// The compiled denoising step of one model, batch and guidance setting.
pub struct Denoiser {
    program: StagedProgram,
    /// Combines the two passes of `program`; without it, one pass is the whole step.
    advance: Option<StagedProgram>,
    sample_dims: [usize; 4],
}

impl Denoiser {
    /// Compiles `step`, which was lowered for `session`, for samples `sample_dims`.
    ///
    /// # Errors
    /// When it does not compile.
    pub fn compile(
        session: &Session,
        step: DenoiseStep<Lowered>,
        sample_dims: [usize; 4],
        precision: DotPrecision,
    ) -> Result<Denoiser, PipelineError> {
        let options = ProgramOptions { precision };
        let compile = |lowered| StagedProgram::compile(session, lowered, &options);
        Ok(Denoiser {
            program: compile(step.model)?,
            advance: step.advance.map(compile).transpose()?,
            sample_dims,
        })
    }

    /// The compiled program of the model.
    pub fn program(&self) -> &StagedProgram {
        &self.program
    }

    /// All programs of a step.
    pub fn programs(&self) -> impl Iterator<Item = &StagedProgram> {
        [Some(&self.program), self.advance.as_ref()]
            .into_iter()
            .flatten()
    }

    /// Images in a batch.
    pub fn batch(&self) -> usize {
        self.sample_dims[0]
    }

    /// `[batch, channels, rows, columns]`
    pub fn sample_dims(&self) -> [usize; 4] {
        self.sample_dims
    }

    /// Makes the samples of `inputs`: `f32[batch, channels, rows, columns]` in the model's own range.
    ///
    /// # Errors
    /// When a weight is missing, an input has another shape, or a program fails; errors of `after_step`.
    pub fn run(
        &self,
        session: &Session,
        weights: &Prepared<'_>,
        inputs: DenoiseInputs<'_>,
        after_step: &mut StepObserver<'_>,
    ) -> Result<HostTensor, PipelineError> {
        let mut shared = self.request_inputs(session, &inputs)?;
        let passes = self.pass_inputs(session, weights, &inputs, &shared)?;
        let zeros = |dims: &[usize]| HostTensor::zeros(Shape::new(DType::F32, dims));
        let history = zeros(&[[HISTORY].as_slice(), &self.sample_dims].concat());
        let put = |name: &str, value: &HostTensor| put(session, self.programs(), name, value);
        let mut state = SamplerState {
            sample: put(sampler_names::SAMPLE, inputs.sample)?,
            history: put(sampler_names::HISTORY, &history)?,
        };
        let silence = zeros(&self.sample_dims);
        let mut silent = false;
        let steps = inputs.plan.steps.len();
        for (done, step) in inputs.plan.steps.iter().enumerate() {
            for (name, value) in step_inputs(step)? {
                shared.set(name, &value)?;
            }
            for (which, control) in inputs.controls.iter().enumerate() {
                let name = names::numbered(names::CONTROL_SCALE, which);
                let scale = control.scale_at(done, steps);
                shared.set(&name, &HostTensor::from_f32([], &[scale])?)?;
            }
            if step.is_noisy() {
                shared.set(sampler_names::NOISE, &self.noise(inputs.generators)?)?;
            } else if !silent {
                shared.set(sampler_names::NOISE, &silence)?;
            }
            silent = !step.is_noisy();
            let skips = self.skips() && inputs.skip_layer_guidance.acts(done, steps);
            if self.skips() {
                let scale = if skips {
                    inputs.skip_layer_guidance.scale
                } else {
                    0.0
                };
                let scale = HostTensor::from_f32([], &[scale])?;
                shared.set(names::SKIP_LAYER_GUIDANCE_SCALE, &scale)?;
            }
            let (predicted, statistics);
            (state, predicted, statistics) = self.step(weights, &shared, &passes, skips, state)?;
            if let Some(Inpainting::PutBack {
                latents,
                noise,
                mask,
            }) = inputs.inpainting
            {
                let kept = mix(latents, noise, step.noised)?.to_f32_vec()?;
                let sample = state.sample.to_host(session.mesh())?.to_f32_vec()?;
                let sample = masked(&sample, &kept, &mask.to_f32_vec()?, self.sample_dims);
                let sample = HostTensor::from_f32(self.sample_dims, &sample)?;
                state.sample = put(sampler_names::SAMPLE, &sample)?;
            }
            after_step(AfterStep {
                done: done + 1,
                sample: &state.sample,
                predicted: &predicted,
                statistics: &statistics,
            })?;
        }
        Ok(state.sample.to_host(session.mesh())?)
    }

    /// The inputs that all steps and passes of a batch share.
    fn request_inputs<'p>(
        &'p self,
        session: &'p Session,
        inputs: &DenoiseInputs<'_>,
    ) -> Result<Inputs<'p>, PipelineError> {
        let mut shared = Inputs::new(session, self.programs());
        let rows = inputs.conditioning.hidden.shape.dims[0] / self.passes();
        for (which, control) in inputs.controls.iter().enumerate() {
            let mut dims = control.image.shape.dims.clone();
            dims[0] = rows;
            let shape = control.image.shape.with_dims(dims);
            let data = control.image.data.repeat(rows);
            let name = names::numbered(names::CONTROL_IMAGE, which);
            shared.set(&name, &HostTensor::new(shape, data)?)?;
            if let Some(mode) = control.mode {
                let name = names::numbered(names::CONTROL_MODE, which);
                let data = mode.to_le_bytes().to_vec();
                shared.set(&name, &HostTensor::new(Shape::scalar(DType::S32), data)?)?;
            }
        }
        if let Some(Inpainting::Seen {
            mask,
            masked_image_latents,
        }) = inputs.inpainting
        {
            shared.set(names::MASK, mask)?;
            shared.set(names::MASKED_IMAGE_LATENTS, masked_image_latents)?;
        }
        for (which, latents) in inputs.control_latents.iter().enumerate() {
            shared.set(&names::numbered(names::CONTROL_LATENTS, which), latents)?;
        }
        if let Some((_, scale)) = inputs.image_tokens {
            let scale = HostTensor::from_f32([], &[scale])?;
            shared.set(names::IMAGE_TOKENS_SCALE, &scale)?;
        }
        if self.skips() {
            // Of the pass that leaves them out; the others have a value of their own.
            shared.set(names::SKIP_LAYERS, &HostTensor::from_f32([], &[1.0])?)?;
        }
        for (name, value) in [
            (names::GUIDANCE_SCALE, inputs.guidance_scale),
            (names::TRUE_CFG_SCALE, inputs.true_cfg_scale),
            (names::GUIDANCE_RESCALE, inputs.guidance_rescale),
        ] {
            shared.set(name, &HostTensor::from_f32([], &[value])?)?;
        }
        Ok(shared)
    }

    /// The inputs of each pass alone: its rows of the embeddings, and what is computed from them once for all steps.
    fn pass_inputs<'p>(
        &'p self,
        session: &'p Session,
        weights: &Prepared<'_>,
        inputs: &DenoiseInputs<'_>,
        shared: &Inputs<'_>,
    ) -> Result<Vec<Inputs<'p>>, PipelineError> {
        let conditioning = inputs.conditioning;
        let prompts = conditioning.hidden.shape.dims[0];
        let ids = inputs.time_ids.len() / prompts.max(1);
        let time_ids = HostTensor::from_f32([prompts, ids], inputs.time_ids)?;
        let count = self.passes();
        let mut passes = Vec::with_capacity(count);
        for pass in 0..count {
            let rows = |value: &HostTensor| every(value, count, pass);
            let mut own = Inputs::new(session, self.programs());
            own.set(names::ENCODER_HIDDEN_STATES, &rows(&conditioning.hidden)?)?;
            let takes = |name: &str| self.program.input(name).is_some();
            if let Some(pooled) = &conditioning.pooled {
                let name = match takes(names::POOLED_PROJECTIONS) {
                    true => names::POOLED_PROJECTIONS,
                    false => names::TEXT_EMBEDS,
                };
                own.set(name, &rows(pooled)?)?;
            }
            if let Some(mask) = &conditioning.mask {
                own.set(names::ENCODER_ATTENTION_MASK, &rows(mask)?)?;
            }
            if takes(names::TIME_IDS) {
                own.set(names::TIME_IDS, &rows(&time_ids)?)?;
            }
            if let Some((tokens, _)) = &inputs.image_tokens {
                own.set(names::IMAGE_TOKENS, &rows(tokens)?)?;
            }
            if self.skips() {
                own.set(names::SKIP_LAYERS, &HostTensor::from_f32([], &[0.0])?)?;
            }
            let early = self
                .program
                .request(&|name| find(weights, shared, &own, name))?;
            own.extend(early);
            passes.push(own);
        }
        Ok(passes)
    }

    /// Whether a further pass may leave layers out.
    fn skips(&self) -> bool {
        self.program.input(names::SKIP_LAYERS).is_some()
    }

    /// Rows of the embeddings for each image: the passes of a step, without one that leaves layers out.
    fn passes(&self) -> usize {
        1 + usize::from(self.advance.is_some())
    }

    /// Fresh noise for a step.
    fn noise(&self, generators: &mut [NoiseGenerator]) -> Result<HostTensor, PipelineError> {
        let each: usize = self.sample_dims[1..].iter().product();
        let fresh: Vec<f32> = generators.iter_mut().flat_map(|g| g.normal(each)).collect();
        Ok(HostTensor::from_f32(self.sample_dims, &fresh)?)
    }

    /// One step on `state`. Gives the next state, the predicted clean sample, and the statistics of each run of the model.
    fn step(
        &self,
        weights: &Prepared<'_>,
        shared: &Inputs<'_>,
        passes: &[Inputs<'_>],
        skips: bool,
        state: SamplerState,
    ) -> Result<(SamplerState, Array, Vec<Vec<Array>>), RuntimeError> {
        let SamplerState { sample, history } = state;
        let mut statistics = Vec::new();
        let mut without_statistics = |mut results: Vec<Array>, own: usize| {
            if results.len() > own {
                statistics.push(results.split_off(own));
            }
            results
        };
        let results = match &self.advance {
            None => {
                let find = |name: &str| find(weights, shared, &passes[0], name);
                let results = self.program.step().call(&find, vec![sample, history])?;
                without_statistics(results, 3)
            }
            Some(advance) => {
                let mut predictions = Vec::with_capacity(passes.len());
                for pass in passes {
                    let find = |name: &str| match name {
                        sampler_names::SAMPLE => Some(&sample),
                        _ => find(weights, shared, pass, name),
                    };
                    let results = self.program.step().call(&find, Vec::new())?;
                    predictions.extend(without_statistics(results, 1));
                }
                if let (true, Some(pass)) = (skips, passes.last()) {
                    let find = |name: &str| match name {
                        sampler_names::SAMPLE => Some(&sample),
                        names::SKIP_LAYERS => shared.get(name),
                        _ => find(weights, shared, pass, name),
                    };
                    let results = self.program.step().call(&find, Vec::new())?;
                    predictions.extend(without_statistics(results, 1));
                }
                let find = |name: &str| match name {
                    names::WITHOUT_PROMPT => predictions.first(),
                    names::WITH_PROMPT => predictions.get(1),
                    // Where no layer is left out, its scale is 0.
                    names::WITH_SKIPPED_LAYERS => predictions.last(),
                    _ => shared.get(name),
                };
                advance.step().call(&find, vec![sample, history])?
            }
        };
        let found = results.len();
        match <[Array; 3]>::try_from(results) {
            Ok([sample, history, predicted]) => {
                Ok((SamplerState { sample, history }, predicted, statistics))
            }
            Err(_) => Err(RuntimeError::ResultCount {
                program: "the denoising step",
                expected: 3,
                found,
            }),
        }
    }
}

/// The value of the input `name` of a pass.
fn find<'a>(
    weights: &'a Prepared<'_>,
    shared: &'a Inputs<'_>,
    pass: &'a Inputs<'_>,
    name: &str,
) -> Option<&'a Array> {
    let given = pass.get(name).or_else(|| shared.get(name));
    given.or_else(|| weights.get(name))
}

/// Every `step`-th row of `tensor`, from row `first` on.
fn every(tensor: &HostTensor, step: usize, first: usize) -> Result<HostTensor, HostTensorError> {
    let rows = tensor.shape.dims.first().copied().unwrap_or(1).max(1);
    let bytes = (tensor.data.len() / rows).max(1);
    let taken = tensor.data.chunks(bytes).skip(first).step_by(step);
    let mut dims = tensor.shape.dims.clone();
    dims[0] = rows / step;
    HostTensor::new(
        tensor.shape.with_dims(dims),
        taken.flatten().copied().collect(),
    )
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
