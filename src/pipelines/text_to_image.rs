//! Text to image: tracing the programs that encode prompts and the one that takes a single denoising step.
//!
//! Everything that changes between two runs is an input of the programs: token ids, noise, guidance, and the
//! coefficients of each step. A new prompt, seed, scale or step count compiles nothing.

use crate::dtype::DType;
use crate::graph::{Builder, Comparison, GraphError, Reduction, Tensor};
use crate::lowering::Traced;
use crate::models::clip::vision::PIXEL_VALUES;
use crate::models::controlnet::{self, Control};
use crate::models::flux::FluxControl;
use crate::models::ip_adapter::image_tokens;
use crate::models::sd3::SkipLayers;
use crate::models::unet::{ImagePrompt, UNetInputs};
use crate::models::{
    ControlNet, DenoiserInputs, DenoiserKind, DiffusionModel, GuidanceKind, SeenImage,
};
use crate::quant::Policy;
use crate::shape::Shape;

use super::PipelineError;
use super::sampler_step::{SamplerStep, names as sampler_names};

/// Names of the programs' run-time inputs and results, beside the sampler's ([`super::sampler_step::names`]).
pub mod names {
    pub use crate::models::clip::INPUT_IDS;
    /// A scalar: that of classifier-free guidance, or an input of a denoiser that was distilled from guided samples.
    pub const GUIDANCE_SCALE: &str = "guidance_scale";
    /// A scalar: that of guidance of a denoiser that was distilled from guided samples.
    pub const TRUE_CFG_SCALE: &str = "true_cfg_scale";
    /// How much of the guided output's deviation is brought back to that of the prompt's alone.
    pub const GUIDANCE_RESCALE: &str = "guidance_rescale";
    /// Skip-layer guidance: a scalar, and whether a run leaves the layers out (1) or not (0).
    pub const SKIP_LAYER_GUIDANCE_SCALE: &str = "skip_layer_guidance_scale";
    pub const SKIP_LAYERS: &str = "skip_layers";
    /// The text encoders' results, which are the denoising step's conditioning.
    pub use crate::models::joint::names::POOLED_PROJECTIONS;
    pub use crate::models::pixart::names::ENCODER_ATTENTION_MASK;
    pub use crate::models::unet::names::{ENCODER_HIDDEN_STATES, TEXT_EMBEDS, TIME_IDS};
    /// The further inputs of an inpainting model: `f32[batch, 1, rows, columns]`, 1 where it draws, or with a channel for
    /// each of the mask's pixels, and the latents of the image without that part, of the sample's shape.
    pub const MASK: &str = "mask";
    pub const MASKED_IMAGE_LATENTS: &str = "masked_image_latents";
    /// The latents of an image that steers, of the sample's shape: FLUX.1 Canny and Depth, and its ControlNets, of which the
    /// names of further ones end in their number.
    pub const CONTROL_LATENTS: &str = "control_latents";
    /// The image that steers the first ControlNet, `f32[rows, 3, height, width]` in [0, 1], and how strongly. Those of
    /// further ones end in their number ([`numbered`]).
    pub const CONTROL_IMAGE: &str = "control_image";
    pub const CONTROL_SCALE: &str = "control_scale";
    /// The kind of the image, `s32[]`, for a ControlNet of several.
    pub const CONTROL_MODE: &str = "control_mode";

    /// The tokens of an IP-Adapter's image, `f32[rows, tokens, features]`, and how much attention to them counts.
    pub const IMAGE_TOKENS: &str = "image_tokens";
    pub const IMAGE_TOKENS_SCALE: &str = "image_tokens_scale";

    /// The result of one pass of [`super::Guidance::TwoPasses`], and what those of both are called afterwards.
    pub const PREDICTION: &str = "prediction";
    pub const WITHOUT_PROMPT: &str = "prediction_without_prompt";
    pub const WITH_PROMPT: &str = "prediction_with_prompt";
    pub const WITH_SKIPPED_LAYERS: &str = "prediction_with_skipped_layers";

    /// The name of ControlNet `which`'s input.
    pub fn numbered(name: &str, which: usize) -> String {
        match which {
            0 => name.to_string(),
            _ => format!("{name}_{which}"),
        }
    }

    /// The VAE's programs: samples to images, and images to samples.
    pub const LATENTS: &str = "latents";
    /// The standard deviation of latents that an image is encoded to.
    pub const LATENTS_DEVIATION: &str = "latents_deviation";
    pub const IMAGES: &str = "images";
}

/// How a step runs the model for classifier-free guidance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guidance {
    /// With the prompt alone.
    Off,
    /// Without and with the prompt as one batch of two rows for each image.
    OneBatch,
    /// Without the prompt, then with it: activations take half the memory.
    TwoPasses,
}

/// The options of the denoising program.
#[derive(Clone, Debug)]
pub struct DenoiseOptions {
    /// Images made at once, over all devices.
    pub batch: usize,
    /// Tokens of a prompt: a multiple of what a text encoder takes at once.
    pub tokens: usize,
    pub guidance: Guidance,
    /// Layers that skip-layer guidance leaves out in a third pass; only with [`Guidance::TwoPasses`].
    pub skip_layers: Vec<usize>,
    pub quantization: Option<Policy>,
}

impl DenoiseOptions {
    /// Rows of the model's batch.
    pub fn rows(&self) -> usize {
        match self.guidance {
            Guidance::Off | Guidance::TwoPasses => self.batch,
            Guidance::OneBatch => 2 * self.batch,
        }
    }

    /// Prompts of a batch: with guidance two for each image, the negative one and its own.
    pub fn prompts(&self) -> usize {
        match self.guidance {
            Guidance::Off => self.batch,
            Guidance::OneBatch | Guidance::TwoPasses => 2 * self.batch,
        }
    }
}

/// One denoising step: its programs as they were traced or, later, lowered.
#[derive(Clone, Debug)]
pub struct DenoiseStep<T> {
    /// All of it, or with [`Guidance::TwoPasses`] one pass: the model alone.
    pub model: T,
    /// With [`Guidance::TwoPasses`], the program that combines both passes.
    pub advance: Option<T>,
}

/// The inputs of the denoising step that are known before its first run, beside those of [`CONTROLS`].
const REQUEST: [&str; 8] = [
    names::ENCODER_ATTENTION_MASK,
    names::ENCODER_HIDDEN_STATES,
    names::IMAGE_TOKENS,
    names::MASK,
    names::MASKED_IMAGE_LATENTS,
    names::POOLED_PROJECTIONS,
    names::TEXT_EMBEDS,
    names::TIME_IDS,
];

/// What the names of inputs that steer begin with and that are known then too.
const CONTROLS: [&str; 3] = [
    names::CONTROL_IMAGE,
    names::CONTROL_LATENTS,
    names::CONTROL_MODE,
];

/// Traces one denoising step: the model on the scaled sample, then the sampler's update.
///
/// With [`Guidance::OneBatch`], the model's batch holds two rows for each image, without and with its prompt, one after
/// the other: wherever a device's images are, so are both rows. (diffusers puts all rows without prompts first; over a
/// sharded batch that sends every sample to another device.) With guidance, the model's output is
/// `without + guidance_scale * (with - without)` (Ho and Salimans 2022, equation 6, in diffusers' scale), then rescaled
/// by [`names::GUIDANCE_RESCALE`] (Lin et al. 2023, section 3.4; 0 leaves it as it is). Skip-layer guidance adds
/// `skip_layer_guidance_scale * (with - with_skipped_layers)`, as in diffusers' `StableDiffusion3Pipeline`.
///
/// # Errors
/// When the model's parts do not fit together, quantization is refused, or layers are to be skipped that cannot be.
pub fn trace_denoise(
    model: &DiffusionModel,
    options: &DenoiseOptions,
) -> Result<DenoiseStep<Traced>, PipelineError> {
    let b = Builder::new();
    let dims = model.sample_dims(options.batch);
    let [batch, channels, height, width] = dims;
    let axes = [Some("activation_batch"), None, None, None];
    let sampler = |b: &Builder| SamplerStep::declare(b, dims, model.scheduler.clip_sample);
    let mut advance = None;
    let scale = match model.family.spec().guidance {
        GuidanceKind::ClassifierFree => names::GUIDANCE_SCALE,
        GuidanceKind::Embedded | GuidanceKind::None => names::TRUE_CFG_SCALE,
    };
    match options.guidance {
        Guidance::Off => {
            let sampler = sampler(&b)?;
            let output = predict(&b, model, options, sampler.sample())?;
            sampler.advance(&b, output)?;
        }
        Guidance::OneBatch => {
            let sampler = sampler(&b)?;
            let output = predict(&b, model, options, sampler.sample())?;
            let pairs = b.reshape(output, &[batch, 2, channels, height, width])?;
            let row = |which: usize| {
                let row = b.slice_dim(pairs, 1, which, which + 1)?;
                b.reshape(row, &dims)
            };
            sampler.advance(&b, guide(&b, scale, [row(0)?, row(1)?])?)?;
        }
        Guidance::TwoPasses => {
            let shape = Shape::new(DType::F32, dims);
            let sample = b.input(sampler_names::SAMPLE, shape.clone(), &axes)?;
            let output = predict(&b, model, options, sample)?;
            b.output(names::PREDICTION, output, None)?;

            let b = Builder::new();
            let sampler = sampler(&b)?;
            let passes = [
                b.input(names::WITHOUT_PROMPT, shape.clone(), &axes)?,
                b.input(names::WITH_PROMPT, shape.clone(), &axes)?,
            ];
            let mut guided = guide(&b, scale, passes)?;
            if !options.skip_layers.is_empty() {
                let skipped = b.input(names::WITH_SKIPPED_LAYERS, shape, &axes)?;
                guided = away_from(&b, guided, passes[1], skipped)?;
            }
            sampler.advance(&b, guided)?;
            advance = Some(Traced::new("advance", b.finish()));
        }
    }
    let graph = b.finish();
    let inputs: Vec<String> = graph.inputs.iter().map(|i| i.name.clone()).collect();
    let is_control = |name: &&str| CONTROLS.iter().any(|control| name.starts_with(control));
    let controls = inputs.iter().map(String::as_str).filter(is_control);
    let takes_guidance = model.denoiser.takes_guidance();
    let guidance = takes_guidance.then_some(names::GUIDANCE_SCALE);
    Ok(DenoiseStep {
        model: Traced::new("denoise", graph)
            .quantized(options.quantization.as_ref())?
            .with_request_inputs(REQUEST.into_iter().chain(controls).chain(guidance))
            .with_scan_layers(model.scan_layers),
        advance,
    })
}

/// The model's output for `sample`, in `f32`, one row for each of [`DenoiseOptions::rows`]; declares its other inputs.
fn predict(
    b: &Builder,
    model: &DiffusionModel,
    options: &DenoiseOptions,
    sample: Tensor,
) -> Result<Tensor, PipelineError> {
    let scalar = |name: &str| b.input(name, Shape::scalar(DType::F32), &[]);
    let timestep = scalar(sampler_names::TIMESTEP)?;
    let in_scale = scalar(sampler_names::IN_SCALE)?;
    let rows = options.rows();
    let guidance = match model.denoiser.takes_guidance() {
        true => Some(b.broadcast_to(scalar(names::GUIDANCE_SCALE)?, &[rows])?),
        false => None,
    };
    let conditioning = model.declare_conditioning(b, rows, options.tokens, guidance)?;
    let scaled = b.mul(sample, in_scale)?;
    let [batch, _, height, width] = model.sample_dims(options.batch);
    let each_row = |x: Tensor| {
        if rows == batch {
            return Ok(x);
        }
        let channels = b.dims(x)[1];
        let pairs = b.broadcast_in_dim(x, &[0, 2, 3, 4], &[batch, 2, channels, height, width])?;
        b.reshape(pairs, &[rows, channels, height, width])
    };
    let timestep = b.broadcast_to(timestep, &[rows])?;
    let seen = seen_image(b, model, options.batch)?;
    let sample = match (&seen, model.denoiser.kind()) {
        // A UNet's after ControlNets, which see the sample alone.
        (Some(seen), DenoiserKind::Flux | DenoiserKind::Sd3 | DenoiserKind::PixArt) => {
            b.concatenate(&[&[scaled], seen.as_slice()].concat(), 1)?
        }
        (Some(_), DenoiserKind::Unet) | (None, _) => scaled,
    };
    let mut inputs = DenoiserInputs::new(each_row(sample)?, timestep, conditioning);
    match &mut inputs {
        DenoiserInputs::Unet(inputs) => {
            steer(b, model, rows, inputs)?;
            if let Some(seen) = seen {
                let seen = each_row(b.concatenate(&seen, 1)?)?;
                inputs.sample = b.concatenate(&[inputs.sample, seen], 1)?;
            }
        }
        DenoiserInputs::Flux(inputs) => {
            // diffusers' rows without the prompt have the residuals of those with it.
            if !model.controlnets.is_empty() && options.guidance != Guidance::Off {
                let what = "true guidance of FLUX.1 with ControlNets is not built";
                return Err(b.invalid(what).into());
            }
            inputs.controls = flux_controls(b, model, options.batch, &each_row)?;
        }
        DenoiserInputs::Sd3(_) | DenoiserInputs::PixArt(_) => {}
    }
    if !options.skip_layers.is_empty() {
        let skip = SkipLayers {
            layers: options.skip_layers.clone(),
            are_skipped: scalar(names::SKIP_LAYERS)?,
        };
        match (&mut inputs, options.guidance) {
            (DenoiserInputs::Sd3(inputs), Guidance::TwoPasses) => inputs.skip_layers = Some(skip),
            _ => {
                let what =
                    "skip-layer guidance is for Stable Diffusion 3 guided in passes of one row";
                return Err(b.invalid(what).into());
            }
        }
    }
    Ok(model.predict(b, inputs)?)
}

/// The further channels of a denoiser that sees an image beside the sample, each `f32[batch, .., rows, columns]`.
fn seen_image(
    b: &Builder,
    model: &DiffusionModel,
    batch: usize,
) -> Result<Option<Vec<Tensor>>, GraphError> {
    let [batch, channels, height, width] = model.sample_dims(batch);
    let input = |name: &str, channels: usize| {
        let dims = [batch, channels, height, width];
        let axes = [Some("activation_batch"), None, None, None];
        b.input(name, Shape::new(DType::F32, dims), &axes)
    };
    let latents = |name: &str| input(name, channels);
    Ok(match model.denoiser.seen_image() {
        None => None,
        Some(SeenImage::Masked) => Some(vec![
            input(names::MASK, 1)?,
            latents(names::MASKED_IMAGE_LATENTS)?,
        ]),
        Some(SeenImage::Filled { pixels }) => Some(vec![
            latents(names::MASKED_IMAGE_LATENTS)?,
            input(names::MASK, pixels)?,
        ]),
        Some(SeenImage::Control) => Some(vec![latents(names::CONTROL_LATENTS)?]),
    })
}

/// Adds what steers a UNet beside the text: ControlNets and an IP-Adapter. Declares their inputs.
fn steer(
    b: &Builder,
    model: &DiffusionModel,
    rows: usize,
    inputs: &mut UNetInputs,
) -> Result<(), GraphError> {
    let scalar = |name: &str| b.input(name, Shape::scalar(DType::F32), &[]);
    inputs.additional_residuals = model.control(b, inputs, |which, config| {
        let [image_height, image_width] = model.image_size;
        let channels = config.condition.conditioning_channels;
        let image = Shape::new(DType::F32, [rows, channels, image_height, image_width]);
        let axes = [Some("activation_batch"), None, None, None];
        Ok(Control {
            image: b.input(&names::numbered(names::CONTROL_IMAGE, which), image, &axes)?,
            scale: scalar(&names::numbered(names::CONTROL_SCALE, which))?,
        })
    })?;
    // After the ControlNet, which sees the sample and the text alone.
    if let Some(adapter) = &model.ip_adapter {
        let tokens = Shape::new(DType::F32, [rows, adapter.tokens, adapter.features]);
        let axes = [Some("activation_batch"), None, None];
        inputs.image_prompt = Some(ImagePrompt {
            tokens: b.input(names::IMAGE_TOKENS, tokens, &axes)?,
            scale: scalar(names::IMAGE_TOKENS_SCALE)?,
        });
    }
    Ok(())
}

/// The ControlNets of FLUX.1's transformer; declares their inputs, which `each_row` repeats for the rows of an image.
fn flux_controls(
    b: &Builder,
    model: &DiffusionModel,
    batch: usize,
    each_row: &dyn Fn(Tensor) -> Result<Tensor, GraphError>,
) -> Result<Vec<FluxControl>, GraphError> {
    let mut controls = Vec::with_capacity(model.controlnets.len());
    for (which, net) in model.controlnets.iter().enumerate() {
        let root = controlnet::root(which);
        let ControlNet::Flux(config) = net else {
            return Err(b
                .root(&root)
                .invalid("it is a ControlNet of another denoiser"));
        };
        let name = |name: &str| names::numbered(name, which);
        let scalar = |name: &str, dtype| b.input(name, Shape::scalar(dtype), &[]);
        let latents = Shape::new(DType::F32, model.sample_dims(batch));
        let axes = [Some("activation_batch"), None, None, None];
        let mode = config.num_mode;
        let mode = mode.map(|_| scalar(&name(names::CONTROL_MODE), DType::S32));
        controls.push(FluxControl {
            root,
            config: config.as_ref().clone(),
            latents: each_row(b.input(&name(names::CONTROL_LATENTS), latents, &axes)?)?,
            scale: scalar(&name(names::CONTROL_SCALE), DType::F32)?,
            mode: mode.transpose()?,
        });
    }
    Ok(controls)
}

/// Classifier-free guidance of the model's outputs without and with the prompt; declares its scales, the first of which
/// is the input `scale`.
fn guide(b: &Builder, scale: &str, [without, with]: [Tensor; 2]) -> Result<Tensor, GraphError> {
    let scale = b.input(scale, Shape::scalar(DType::F32), &[])?;
    let rescale = b.input(names::GUIDANCE_RESCALE, Shape::scalar(DType::F32), &[])?;
    let b = &b.root("guidance");
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

/// `guided` led away from the model's output without some layers; declares the scale.
fn away_from(
    b: &Builder,
    guided: Tensor,
    with: Tensor,
    skipped: Tensor,
) -> Result<Tensor, GraphError> {
    let scalar = Shape::scalar(DType::F32);
    let scale = b.input(names::SKIP_LAYER_GUIDANCE_SCALE, scalar, &[])?;
    let b = &b.root("guidance");
    b.add(guided, b.mul(b.sub(with, skipped)?, scale)?)
}

/// Traces the program that makes tokens of an IP-Adapter's image: `pixel_values` `f32[1, 3, side, side]` to
/// `f32[2, tokens, features]`, those of no image and those of the image; `None` without an adapter.
///
/// # Errors
/// When the configuration of the image encoder contradicts itself.
pub fn trace_image_tokens(model: &DiffusionModel) -> Result<Option<Traced>, GraphError> {
    let Some(adapter) = &model.ip_adapter else {
        return Ok(None);
    };
    let b = Builder::new();
    let side = adapter.vision.image_size;
    let pixels = Shape::new(DType::F32, [1, adapter.vision.num_channels, side, side]);
    let pixels = b.input(PIXEL_VALUES, pixels, &[])?;
    let tokens = image_tokens(&b, adapter, pixels, model.precision)?;
    b.output(names::IMAGE_TOKENS, b.convert(tokens, DType::F32)?, None)?;
    Ok(Some(Traced::new("encode_image_prompt", b.finish())))
}

/// Traces text encoder `which` for `rows` prompts.
///
/// # Errors
/// When the model has no such text encoder, or its configuration contradicts itself.
pub fn trace_encode(
    model: &DiffusionModel,
    which: usize,
    rows: usize,
) -> Result<Traced, GraphError> {
    let b = Builder::new();
    let ids = model.declare_input_ids(&b, which, rows)?;
    let encoded = model.encode(&b, which, ids)?;
    if let Some(hidden) = encoded.encoder_hidden_states {
        let hidden = b.convert(hidden, DType::F32)?;
        b.output(names::ENCODER_HIDDEN_STATES, hidden, None)?;
    }
    if let Some(mask) = encoded.mask {
        b.output(names::ENCODER_ATTENTION_MASK, mask, None)?;
    }
    if model.pooled_encoders()?.contains(&which)
        && let Some(embeds) = encoded.pooled
    {
        b.output(names::TEXT_EMBEDS, b.convert(embeds, DType::F32)?, None)?;
    }
    Ok(Traced::new("encode", b.finish()))
}
