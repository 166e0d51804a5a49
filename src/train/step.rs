//! The training step as one program: noise, forward pass, loss, gradient and update.

mod text;

use std::sync::Arc;

use crate::dtype::DType;
use crate::graph::random::{self, RandomKey};
use crate::graph::{Binary, Builder, Graph, GraphError, Op, Tensor, grad};
use crate::host_tensor::HostTensor;
use crate::lowering::Traced;
use crate::models::{DenoiserInputs, DiffusionModel};
use crate::quant::{Policy, QuantError, ROUNDING_KEY};
use crate::schedulers::{NoiseSchedule, PredictionType, SchedulerError};
use crate::shape::Shape;
use crate::weights::lora::beside;

use super::inversion::{InversionOptions, is_learned};
use super::lora::{LoraOptions, LoraTargetError, is_factor};
use super::optimizer::{self, OptimizerOptions, Trained, UpdateInputs};

/// The logical axes of samples.
const SAMPLE_AXES: [Option<&str>; 4] = [Some("activation_batch"), None, None, None];

/// Which timesteps training draws.
#[derive(Clone, Debug, PartialEq)]
pub enum Timesteps {
    /// All alike.
    Uniform,
    /// Timestep `t` with probability `weights[t] / sum(weights)`.
    Weighted(Vec<f64>),
}

/// The weight of a sample's error at its timestep.
///
/// Weights are of the squared error of the clean sample; that of another prediction is the clean sample's times `SNR`
/// (noise), `SNR + 1` (velocity) or `(sqrt(SNR) + 1)^2` (velocity of flow matching), with
/// `SNR = alphas_cumprod / (1 - alphas_cumprod)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LossWeighting {
    /// The squared error of what the model predicts, as it is.
    None,
    /// `min(SNR, gamma)`: Hang et al. 2023, section 3.4.
    MinSnr { gamma: f64 },
    /// `min(SNR, gamma) + 1`: the error of the velocity (Salimans and Ho 2022, section 4, "SNR+1"), capped alike. At
    /// high noise it does not vanish, as min-SNR's does.
    SnrPlusOne { gamma: f64 },
    /// The error of the noise times `1 / sqrt(SNR)`, that of the velocity times `1 / (SNR + 1)`, with the ratio capped at
    /// 1000: kohya's `debiased_estimation_loss`, after Yu et al., "Unmasking bias in diffusion model training", 2024.
    Debiased,
}

/// The cap of the ratio in [`LossWeighting::Debiased`].
const DEBIASED_CAP: f64 = 1000.0;

impl LossWeighting {
    /// The factor of the prediction's squared error where the schedule has `alpha_cumprod`; `None` for no weighting.
    fn factor(self, prediction: PredictionType, alpha_cumprod: f64) -> Option<f64> {
        let snr = alpha_cumprod / (1.0 - alpha_cumprod);
        let clean = match self {
            LossWeighting::None => return None,
            LossWeighting::MinSnr { gamma } => snr.min(gamma),
            LossWeighting::SnrPlusOne { gamma } => snr.min(gamma) + 1.0,
            LossWeighting::Debiased => {
                let snr = snr.min(DEBIASED_CAP);
                return Some(match prediction {
                    PredictionType::Epsilon => 1.0 / snr.sqrt(),
                    PredictionType::VPrediction => 1.0 / (snr + 1.0),
                    PredictionType::Sample | PredictionType::FlowPrediction => f64::NAN,
                });
            }
        };
        Some(match prediction {
            PredictionType::Sample => clean,
            // min(SNR, gamma) / SNR is 1 where SNR is 0; SnrPlusOne has no limit there.
            PredictionType::Epsilon if snr == 0.0 && clean == 0.0 => 1.0,
            PredictionType::Epsilon => clean / snr,
            PredictionType::VPrediction => clean / (snr + 1.0),
            PredictionType::FlowPrediction => clean / (snr.sqrt() + 1.0).powi(2),
        })
    }
}

/// The clean samples that a step is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CleanSamples {
    /// The samples themselves.
    Given,
    /// A normal distribution for each, such as a VAE encodes an image to: every step draws anew.
    Distributions,
}

/// Where the noise and the timesteps of a step come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Draws {
    /// The program draws them by the step's key.
    Program,
    /// They are inputs: to compare steps with those of other trainers.
    Inputs,
}

/// The settings of the step, beside the model.
#[derive(Clone, Debug)]
pub struct StepOptions {
    /// Samples of one step over all devices.
    pub batch: usize,
    pub clean: CleanSamples,
    pub draws: Draws,
    /// Low-rank updates to train in place of the denoiser's weights.
    pub lora: Option<LoraOptions>,
    /// The vectors of a new token to train, in place of the denoiser's weights or beside low-rank updates.
    pub inversion: Option<InversionOptions>,
    pub optimizer: OptimizerOptions,
    pub timesteps: Timesteps,
    pub loss_weighting: LossWeighting,
    /// The deviation of a constant that is added to the noise of each channel.
    pub noise_offset: f64,
    /// The deviation of noise that is added to the noise in the model's input alone.
    pub input_perturbation: f64,
    /// With prior preservation, where every second row is a class image: how much its error counts.
    pub prior_loss_weight: Option<f64>,
    /// Whether the text encoders are trained.
    pub train_text_encoder: bool,
    pub quantization: Option<Policy>,
}

impl StepOptions {
    /// Whether the text encoders are a part of the step, which takes token ids then. Otherwise it takes what they make of them.
    pub fn encodes_text(&self) -> bool {
        self.train_text_encoder || self.inversion.is_some()
    }

    /// Whether weights beside those of the model are trained in their place.
    fn trains_beside(&self) -> bool {
        self.lora.is_some() || self.inversion.is_some()
    }

    /// The program with the weights that are trained beside those of the model.
    fn beside(&self, mut graph: Graph) -> Result<Graph, StepError> {
        if let Some(lora) = &self.lora {
            let ranks = lora.ranks(&graph)?;
            graph = beside(&graph, &ranks, lora.scale())?;
        }
        if let Some(inversion) = &self.inversion {
            graph = inversion.beside(&graph)?;
        }
        Ok(graph)
    }
}

/// Names of the step's run-time inputs and of the results that are read on the host.
pub mod names {
    /// Noise-free samples in [-1, 1] or latents: `f32[batch, channels, rows, columns]`. Of distributions their means.
    pub const SAMPLE: &str = "clean_sample";
    /// The standard deviations of distributions, shaped as their means.
    pub const DEVIATION: &str = "clean_sample_deviation";
    /// With [`super::Draws::Inputs`]: unit normal noise of the samples' shape, and `s32[batch]`.
    pub const NOISE: &str = "noise";
    pub const TIMESTEP: &str = "timestep";
    /// The step's key for noise and timesteps: `u32[2]`.
    pub const KEY: &str = "key";
    pub const LEARNING_RATE: &str = "learning_rate";
    /// Those of text encoders, by the order of the model's encoders.
    pub const TEXT_LEARNING_RATES: [&str; 2] =
        ["learning_rate_text_encoder", "learning_rate_text_encoder_2"];
    /// That of the vectors of a new token.
    pub const TOKEN_LEARNING_RATE: &str = "learning_rate_token";
    /// Token ids for text encoders in the step, in the same order.
    pub const INPUT_IDS: [&str; 2] = [crate::models::clip::INPUT_IDS, "input_ids_2"];
    /// Whether the batch is the last one before an update, as `f32` 1 or 0.
    pub const IS_LAST: &str = "is_last_batch";
    pub const LOSS: &str = "loss";
    pub const GRAD_NORM: &str = "grad_norm";
    /// Whether loss and gradient were finite, as `f32` 1 or 0.
    pub const FINITE: &str = "finite";
}

/// Why a training step could not be traced.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    #[error(transparent)]
    Graph(#[from] GraphError),
    #[error(transparent)]
    Quant(#[from] QuantError),
    #[error(transparent)]
    Scheduler(#[from] SchedulerError),
    #[error(
        "this loss_weighting has no finite weight for a prediction of the noise at timestep {timestep}, which is pure noise: \
         predict the velocity, or leave rescale_zero_terminal_snr off"
    )]
    LossWeight { timestep: usize },
    #[error(
        "loss_weighting=debiased weighs predictions of the noise and of the velocity; this model predicts {0}"
    )]
    Debiased(PredictionType),
    #[error(transparent)]
    Lora(#[from] LoraTargetError),
}

/// Traces the training step: the forward pass and the loss, to which lowering adds the gradient and the update.
///
/// The loss is the mean squared error of the model's prediction against the schedule's target (noise, velocity or
/// sample) at timesteps drawn for each sample; Ho et al. 2020, equation 14, and Salimans and Ho 2022, appendix D.
///
/// # Errors
/// When the model's parts do not fit together, or quantization is refused.
pub fn trace(model: &DiffusionModel, options: &StepOptions) -> Result<Traced, StepError> {
    let b = Builder::new();
    let batch = options.batch;
    let key = b.input(names::KEY, Shape::new(DType::U32, [2]), &[])?;
    if options.quantization.is_some() || options.optimizer.rounds() {
        rounding_key(&b)?;
    }
    b.input(names::LEARNING_RATE, Shape::scalar(DType::F32), &[])?;
    if options.optimizer.accumulated > 1 {
        b.input(names::IS_LAST, Shape::scalar(DType::F32), &[])?;
    }
    let key = random_key(&b, key)?;
    let Predicted {
        prediction,
        target,
        weight,
    } = predict(&b, model, options, key)?;
    let weight = match options.prior_loss_weight {
        Some(prior) => Some(with_prior(&b.root("loss"), batch, prior, weight)?),
        None => weight,
    };
    let loss = mean_squared_error(&b.root("loss"), prediction, target, weight)?;

    b.output(names::LOSS, loss, None)?;
    let mut traced =
        Traced::new("train_step", b.finish()).quantized(options.quantization.as_ref())?;
    traced.graph = options.beside(traced.graph)?;
    let (optimizer, beside) = (options.optimizer, options.trains_beside());
    // Of a published text encoder the loss may not depend on all layers; those stay as they are.
    let is_published = model.family.spec().published.is_some();
    let add_update = move |b: &Builder| update(b, &optimizer, beside, is_published);
    Ok(traced
        .with_scan_layers(model.scan_layers)
        .trained(Arc::new(add_update)))
}

/// Traces the mean squared errors of `rows` samples, which are inputs as noise and timesteps are: the loss of each without
/// weights, and without what else changes noise.
///
/// # Errors
/// As [`trace`].
pub fn trace_validation(
    model: &DiffusionModel,
    options: &StepOptions,
    rows: usize,
) -> Result<Traced, StepError> {
    let options = &StepOptions {
        batch: rows,
        clean: CleanSamples::Given,
        draws: Draws::Inputs,
        loss_weighting: LossWeighting::None,
        input_perturbation: 0.0,
        ..options.clone()
    };
    let b = Builder::new();
    // Nothing is drawn.
    let word = b.scalar(DType::U32, 0.0)?;
    let key = RandomKey {
        high: word,
        low: word,
    };
    let predicted = predict(&b, model, options, key)?;
    let Predicted {
        prediction, target, ..
    } = predicted;
    let errors = squared_errors(&b.root("loss"), prediction, target)?;
    let count = b.dims(target)[1..].iter().product::<usize>();
    b.output(names::LOSS, b.mul_scalar(errors, 1.0 / count as f64)?, None)?;
    let mut traced =
        Traced::new("validation", b.finish()).quantized(options.quantization.as_ref())?;
    traced.graph = options.beside(traced.graph)?;
    Ok(traced)
}

/// What the model predicts of a batch, what it should have, and the weight of each row.
struct Predicted {
    prediction: Tensor,
    target: Tensor,
    weight: Option<Tensor>,
}

fn predict(
    b: &Builder,
    model: &DiffusionModel,
    options: &StepOptions,
    key: RandomKey,
) -> Result<Predicted, StepError> {
    let batch = options.batch;
    let clean = clean_samples(b, model, options, key)?;
    let conditioning = match options.encodes_text() {
        true => text::encoded_text(b, model, batch)?,
        false => model.declare_conditioning(b, batch, model.tokens, None)?,
    };
    let drawn = draw(b, model, options, key)?;
    let noised = add_noise(&b.root("noise"), model, options, clean, drawn, key)?;
    let inputs = DenoiserInputs::new(noised.sample, noised.timestep, conditioning);
    Ok(Predicted {
        prediction: model.predict(b, inputs)?,
        target: noised.target,
        weight: noised.weight,
    })
}

/// Adds the gradient of the loss, which is the only output so far, and the optimizer's update of all weights, or of those
/// beside the model's alone.
fn update(
    b: &Builder,
    optimizer: &OptimizerOptions,
    beside: bool,
    used_alone: bool,
) -> Result<(), GraphError> {
    let live = b.with_graph(Graph::live_nodes);
    let outputs = b.take_outputs();
    let [(_, loss)] = outputs[..] else {
        return Err(b.invalid("a training step has one output before its update: the loss"));
    };
    let learning_rate = b.input(names::LEARNING_RATE, Shape::scalar(DType::F32), &[])?;
    let mut weights = weights(b);
    weights.retain(|(name, weight, _)| {
        let is_wanted = !beside || is_factor(name) || is_learned(name);
        is_wanted && (!used_alone || live[weight.index()])
    });
    let wrt: Vec<Tensor> = weights.iter().map(|(_, t, _)| *t).collect();
    let gradients = grad(b, loss, &wrt)?;
    let trained: Vec<Trained> = weights
        .into_iter()
        .zip(gradients)
        .map(|((name, weight, logical_axes), gradient)| {
            Ok(Trained {
                learning_rate: text::learning_rate(b, &name)?,
                name,
                weight,
                gradient,
                logical_axes,
            })
        })
        .collect::<Result<_, GraphError>>()?;
    let rounding = match optimizer.rounds() {
        true => Some(random_key(b, rounding_key(b)?)?),
        false => None,
    };
    let is_last = match optimizer.accumulated > 1 {
        true => Some(b.input(names::IS_LAST, Shape::scalar(DType::F32), &[])?),
        false => None,
    };
    let inputs = UpdateInputs {
        loss,
        learning_rate,
        is_last,
        rounding,
    };
    let update = optimizer::update(b, &trained, inputs, optimizer)?;
    b.output(names::LOSS, loss, None)?;
    b.output(names::GRAD_NORM, update.grad_norm, None)?;
    b.output(names::FINITE, b.convert(update.finite, DType::F32)?, None)?;
    Ok(())
}

/// All weights with their logical axes.
fn weights(b: &Builder) -> Vec<(String, Tensor, Vec<Option<&'static str>>)> {
    b.with_graph(|g| {
        let nodes = g.nodes.iter().enumerate();
        let parameters = nodes.filter_map(|(id, node)| match node.op {
            Op::Parameter(i) => Some((id, &g.inputs[i])),
            _ => None,
        });
        let weights = parameters.filter(|(_, input)| input.is_weight());
        weights
            .map(|(id, input)| {
                let tensor = b.tensor(id as u32);
                (input.name.clone(), tensor, input.logical_axes.clone())
            })
            .collect()
    })
}

fn rounding_key(b: &Builder) -> Result<Tensor, GraphError> {
    b.input(ROUNDING_KEY, Shape::new(DType::U32, [2]), &[])
}

/// The two words of `key`, `u32[2]`, as scalars.
fn random_key(b: &Builder, key: Tensor) -> Result<RandomKey, GraphError> {
    let b = b.root("noise");
    let word = |i| b.reshape(b.slice_dim(key, 0, i, i + 1)?, &[]);
    Ok(RandomKey {
        high: word(0)?,
        low: word(1)?,
    })
}

/// Declares the clean samples, or draws them from the distributions that are declared.
fn clean_samples(
    b: &Builder,
    model: &DiffusionModel,
    options: &StepOptions,
    key: RandomKey,
) -> Result<Tensor, GraphError> {
    let dims = model.sample_dims(options.batch);
    let input = |name| b.input(name, Shape::new(DType::F32, dims), &SAMPLE_AXES);
    let mean = input(names::SAMPLE)?;
    match options.clean {
        CleanSamples::Given => Ok(mean),
        CleanSamples::Distributions => {
            let deviation = input(names::DEVIATION)?;
            let b = b.root("clean_sample");
            let noise = random::normal(&b, random::fold_in(&b, key, 2)?, &dims)?;
            b.add(mean, b.mul(deviation, noise)?)
        }
    }
}

/// The noise of a batch and its timesteps, `s32[batch]`.
struct Drawn {
    noise: Tensor,
    timestep: Tensor,
}

fn draw(
    b: &Builder,
    model: &DiffusionModel,
    options: &StepOptions,
    key: RandomKey,
) -> Result<Drawn, GraphError> {
    let dims = model.sample_dims(options.batch);
    Ok(match options.draws {
        Draws::Inputs => Drawn {
            noise: b.input(names::NOISE, Shape::new(DType::F32, dims), &SAMPLE_AXES)?,
            timestep: b.input(
                names::TIMESTEP,
                Shape::new(DType::S32, [options.batch]),
                &SAMPLE_AXES[..1],
            )?,
        },
        Draws::Program => {
            let b = &b.root("noise");
            let steps = model.scheduler.num_train_timesteps;
            let uniform = random::uniform(b, random::fold_in(b, key, 0)?, &[options.batch])?;
            Drawn {
                noise: {
                    let noise = random::normal(b, random::fold_in(b, key, 1)?, &dims)?;
                    with_offset(b, key, noise, options.noise_offset)?
                },
                timestep: draw_timesteps(b, uniform, steps, &options.timesteps)?,
            }
        }
    })
}

/// `noise`, with a constant of deviation `offset` on each channel of each sample.
fn with_offset(
    b: &Builder,
    key: RandomKey,
    noise: Tensor,
    offset: f64,
) -> Result<Tensor, GraphError> {
    if offset == 0.0 {
        return Ok(noise);
    }
    let dims = b.dims(noise);
    let constants = random::normal(b, random::fold_in(b, key, 3)?, &[dims[0], dims[1], 1, 1])?;
    b.add(noise, b.mul_scalar(constants, offset)?)
}

/// `noise` with more noise, of deviation `perturbation`.
fn perturbed(
    b: &Builder,
    key: RandomKey,
    noise: Tensor,
    perturbation: f64,
) -> Result<Tensor, GraphError> {
    if perturbation == 0.0 {
        return Ok(noise);
    }
    let more = random::normal(b, random::fold_in(b, key, 4)?, &b.dims(noise))?;
    b.add(noise, b.mul_scalar(more, perturbation)?)
}

struct Noised {
    sample: Tensor,
    timestep: Tensor,
    target: Tensor,
    /// The weight of each sample's error: `f32[batch]`.
    weight: Option<Tensor>,
}

fn add_noise(
    b: &Builder,
    model: &DiffusionModel,
    options: &StepOptions,
    clean: Tensor,
    Drawn { noise, timestep }: Drawn,
    key: RandomKey,
) -> Result<Noised, StepError> {
    let prediction = model.scheduler.prediction_type;
    if options.loss_weighting == LossWeighting::Debiased
        && !matches!(
            prediction,
            PredictionType::Epsilon | PredictionType::VPrediction
        )
    {
        return Err(StepError::Debiased(prediction));
    }
    let schedule = NoiseSchedule::new(&model.scheduler)?;
    let batch = options.batch;
    let steps = schedule.alphas_cumprod.len();

    let mut columns: [Vec<f32>; 4] = Default::default();
    let mut weights = Vec::new();
    for t in 0..steps {
        let alpha_cumprod = f64::from(schedule.alphas_cumprod[t]);
        if let Some(weight) = options.loss_weighting.factor(prediction, alpha_cumprod) {
            if !weight.is_finite() {
                return Err(StepError::LossWeight { timestep: t });
            }
            weights.push(weight as f32);
        }
        let (sample, noise) = schedule.noise_coefficients(t)?;
        let (target_sample, target_noise) = schedule.target_coefficients(t)?;
        for (column, value) in columns
            .iter_mut()
            .zip([sample, noise, target_sample, target_noise])
        {
            column.push(value);
        }
    }
    let pick = |column: &[f32]| -> Result<Tensor, GraphError> {
        let table = b.constant(HostTensor::from_f32([steps], column)?)?;
        b.reshape(b.take(table, timestep)?, &[batch, 1, 1, 1])
    };
    let weight = match weights.is_empty() {
        true => None,
        false => Some(b.reshape(pick(&weights)?, &[batch])?),
    };
    let mix = |first: &[f32], second: &[f32], noise: Tensor| {
        b.add(b.mul(pick(first)?, clean)?, b.mul(pick(second)?, noise)?)
    };
    let seen = perturbed(b, key, noise, options.input_perturbation)?;
    Ok(Noised {
        sample: mix(&columns[0], &columns[1], seen)?,
        timestep: b.convert(timestep, DType::F32)?,
        target: mix(&columns[2], &columns[3], noise)?,
        weight,
    })
}

/// Integer timesteps `s32[batch]` from uniform numbers in [0, 1).
fn draw_timesteps(
    b: &Builder,
    uniform: Tensor,
    steps: usize,
    timesteps: &Timesteps,
) -> Result<Tensor, GraphError> {
    let drawn = match timesteps {
        Timesteps::Uniform => {
            let scaled = b.mul_scalar(uniform, steps as f64)?;
            b.convert(scaled, DType::S32)?
        }
        Timesteps::Weighted(weights) => {
            // The number of cumulative probabilities at or below the uniform number.
            let total: f64 = weights.iter().sum();
            let mut sum = 0.0;
            let cumulative: Vec<f32> = weights
                .iter()
                .map(|w| {
                    sum += w;
                    (sum / total) as f32
                })
                .collect();
            let table = b.constant(HostTensor::from_f32([1, steps], &cumulative)?)?;
            let batch = b.dims(uniform)[0];
            let column = b.reshape(uniform, &[batch, 1])?;
            let passed = b.compare(crate::graph::Comparison::Ge, column, table)?;
            b.sum(b.convert(passed, DType::S32)?, &[1])?
        }
    };
    // f32 rounding may reach the upper end.
    let last = b.full(&b.shape(drawn), steps as f64 - 1.0)?;
    b.binary(Binary::Min, drawn, last)
}

/// The weights of rows of which every second is a class image's, so that the mean over all rows is that over the others and
/// `prior` times that over class images (Ruiz et al. 2022, equation 2).
fn with_prior(
    b: &Builder,
    batch: usize,
    prior: f64,
    weight: Option<Tensor>,
) -> Result<Tensor, GraphError> {
    let of_rows: Vec<f32> = (0..batch)
        .map(|row| {
            if row % 2 == 0 {
                2.0
            } else {
                2.0 * prior as f32
            }
        })
        .collect();
    let of_rows = b.constant(HostTensor::from_f32([batch], &of_rows)?)?;
    match weight {
        Some(weight) => b.mul(weight, of_rows),
        None => Ok(of_rows),
    }
}

fn mean_squared_error(
    b: &Builder,
    prediction: Tensor,
    target: Tensor,
    weight: Option<Tensor>,
) -> Result<Tensor, GraphError> {
    let dims = b.dims(target);
    let mut errors = squared_errors(b, prediction, target)?;
    if let Some(weight) = weight {
        errors = b.mul(errors, weight)?;
    }
    let sum = b.sum(errors, &[0])?;
    b.mul_scalar(sum, 1.0 / dims.iter().product::<usize>() as f64)
}

/// The sum of the squared errors of each row.
fn squared_errors(b: &Builder, prediction: Tensor, target: Tensor) -> Result<Tensor, GraphError> {
    let dims = b.dims(target);
    // A difference would broadcast.
    if b.dims(prediction) != dims {
        return Err(b.invalid(format!(
            "the model predicts {} for a target {}: the denoiser's out_channels must be its in_channels",
            b.shape(prediction),
            b.shape(target)
        )));
    }
    let difference = b.sub(prediction, target)?;
    let features: Vec<usize> = (1..dims.len()).collect();
    b.sum(b.square(difference)?, &features)
}

#[cfg(test)]
mod tests {
    use super::LossWeighting::{MinSnr, None as Unweighted, SnrPlusOne};
    use super::PredictionType::{Epsilon, Sample, VPrediction};
    use super::*;
    use crate::graph::evaluate;

    /// The loss is the mean over the even rows, and a share of the mean over the odd ones.
    #[test]
    fn class_images_count_by_their_weight() {
        let b = Builder::new();
        let full = |value: f64| {
            b.full(&Shape::new(DType::F32, [4, 1, 2, 2]), value)
                .unwrap()
        };
        let errors: Vec<f32> = [1.0, 2.0, 3.0, 5.0].iter().flat_map(|e| [*e; 4]).collect();
        let errors = HostTensor::from_f32([4, 1, 2, 2], &errors).unwrap();
        let prediction = b.constant(errors).unwrap();
        let rows = b
            .constant(HostTensor::from_f32([4], &[1.0, 1.0, 2.0, 1.0]).unwrap())
            .unwrap();
        for (name, weight) in [("plain", None), ("weighted", Some(rows))] {
            let weight = with_prior(&b, 4, 0.5, weight).unwrap();
            let loss = mean_squared_error(&b, prediction, full(0.0), Some(weight)).unwrap();
            b.output(name, loss, None).unwrap();
        }
        let found = evaluate(&b.finish(), &[]).unwrap();
        let found = [0, 1].map(|i: usize| found[i].to_f64_vec().unwrap()[0]);
        assert_eq!(
            found,
            [
                (1.0 + 9.0) / 2.0 + 0.5 * (4.0 + 25.0) / 2.0,
                (1.0 + 18.0) / 2.0 + 0.5 * (4.0 + 25.0) / 2.0
            ]
        );
    }

    /// Of 1,000 evenly spread uniform numbers, each timestep gets its share.
    #[test]
    fn timesteps_are_drawn_by_their_weights() {
        let drawn = |timesteps: &Timesteps| -> Vec<usize> {
            let b = Builder::new();
            let uniform = b
                .input("uniform", Shape::new(DType::F32, [1000]), &[])
                .unwrap();
            let t = draw_timesteps(&b, uniform, 5, timesteps).unwrap();
            b.output("t", b.convert(t, DType::F32).unwrap(), None)
                .unwrap();
            let grid: Vec<f32> = (0..1000).map(|i| (i as f32 + 0.5) / 1000.0).collect();
            let grid = HostTensor::from_f32([1000], &grid).unwrap();
            let values = evaluate(&b.finish(), &[grid]).unwrap()[0]
                .to_f32_vec()
                .unwrap();
            (0..5)
                .map(|t| values.iter().filter(|v| **v == t as f32).count())
                .collect()
        };
        assert_eq!(drawn(&Timesteps::Uniform), [200; 5]);
        let weights = Timesteps::Weighted(vec![1.0, 4.0, 4.0, 1.0, 0.0]);
        assert_eq!(drawn(&weights), [100, 400, 400, 100, 0]);
    }

    /// An offset is one number for each channel, a perturbation one for each element; both have the deviation asked for.
    #[test]
    fn offsets_and_perturbations_are_what_diffusers_adds() {
        let dims = [16, 4, 8, 8];
        let b = Builder::new();
        let word = |v: f64| b.scalar(DType::U32, v).unwrap();
        let key = RandomKey {
            high: word(3.0),
            low: word(5.0),
        };
        let noise = b.full(&Shape::new(DType::F32, dims), 0.25).unwrap();
        assert_eq!(with_offset(&b, key, noise, 0.0).unwrap(), noise);
        assert_eq!(perturbed(&b, key, noise, 0.0).unwrap(), noise);
        for (name, tensor) in [
            ("offset", with_offset(&b, key, noise, 0.1)),
            ("perturbed", perturbed(&b, key, noise, 0.1)),
        ] {
            b.output(name, tensor.unwrap(), None).unwrap();
        }
        let found = evaluate(&b.finish(), &[]).unwrap();
        let [offset, perturbed] = [0, 1].map(|i: usize| found[i].to_f64_vec().unwrap());
        assert!(
            offset
                .chunks(64)
                .all(|channel| channel.iter().all(|v| *v == channel[0]))
        );
        assert!(
            perturbed
                .chunks(64)
                .all(|channel| channel[1..].iter().all(|v| *v != channel[0]))
        );
        let constants: Vec<f64> = offset.chunks(64).map(|channel| channel[0]).collect();
        for (values, sigmas) in [(constants, 5.0), (perturbed, 5.0)] {
            let count = values.len() as f64;
            let square = values.iter().map(|v| (v - 0.25).powi(2)).sum::<f64>() / count;
            let deviation = square.sqrt() / 0.1 - 1.0;
            assert!(
                deviation.abs() < sigmas / (2.0 * count).sqrt(),
                "{deviation}"
            );
        }
    }

    /// The factors turn the error of any prediction into the same weighted error of the clean sample: with
    /// `x_t = a x + s n`, an error `e` of the sample is one of `e a / s` of the noise and of `e / s` of the velocity.
    #[test]
    fn weights_mean_the_same_for_every_prediction() {
        for alpha_cumprod in [0.01, 0.3, 0.5, 0.9, 0.999] {
            let snr: f64 = alpha_cumprod / (1.0 - alpha_cumprod);
            for weighting in [MinSnr { gamma: 5.0 }, SnrPlusOne { gamma: 5.0 }] {
                let of = |prediction| weighting.factor(prediction, alpha_cumprod).unwrap();
                let clean = of(Sample);
                assert!((of(Epsilon) * snr - clean).abs() < 1e-12);
                assert!((of(VPrediction) * (snr + 1.0) - clean).abs() < 1e-12);
            }
            let of = |weighting: super::LossWeighting| weighting.factor(Sample, alpha_cumprod);
            assert_eq!(of(Unweighted), None);
            assert_eq!(of(MinSnr { gamma: 5.0 }), Some(snr.min(5.0)));
            assert_eq!(of(SnrPlusOne { gamma: 5.0 }), Some(snr.min(5.0) + 1.0));
        }
        // Uncapped, SNR + 1 is the plain error of the velocity.
        let uncapped = SnrPlusOne {
            gamma: f64::INFINITY,
        };
        assert!((uncapped.factor(VPrediction, 0.9).unwrap() - 1.0).abs() < 1e-12);
        // kohya's apply_debiased_estimation.
        let debiased = |prediction, alpha| super::LossWeighting::Debiased.factor(prediction, alpha);
        assert!((debiased(Epsilon, 0.8).unwrap() - 0.5).abs() < 1e-12);
        assert!((debiased(VPrediction, 0.8).unwrap() - 0.2).abs() < 1e-12);
        assert_eq!(debiased(Epsilon, 1.0), Some(1.0 / 1000f64.sqrt()));
        assert!(!debiased(Epsilon, 0.0).unwrap().is_finite());
        // Pure noise: min-SNR has a limit for a prediction of the noise, SNR + 1 has none.
        assert_eq!(MinSnr { gamma: 5.0 }.factor(Epsilon, 0.0), Some(1.0));
        assert!(!uncapped.factor(Epsilon, 0.0).unwrap().is_finite());
    }
}
