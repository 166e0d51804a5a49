//! The training step as one program: noise, forward pass, loss, gradient and update.

mod noise;
mod objective;
mod rates;
mod reduce;
mod text;

use std::sync::Arc;

use crate::dtype::DType;
use crate::graph::random::RandomKey;
use crate::graph::{
    Builder, Comparison, Graph, GraphError, Input, Op, Tensor, grad, scopes, stacked,
};
use crate::host_tensor::HostTensor;
use crate::lowering::{Sums, Traced, Update};
use crate::models::{DenoiserInputs, DiffusionModel};
use crate::quant::{
    ActivationRanges, Dropout, FakeQuantization, Policy, QuantError, ROUNDING_KEY, is_log_scale,
    is_low_rank_factor,
};
use crate::schedulers::{PredictionType, SchedulerError};
use crate::shape::Shape;
use crate::weights::lora::{beside, beside_with_dropout};

use super::inversion::{InversionOptions, is_learned};
use super::lora::{LoraOptions, LoraTargetError, is_factor};
use super::optimizer::{self, OptimizerOptions, Trained, UpdateInputs};
use rates::Rates;

pub use noise::timesteps_at;
pub use objective::{
    DdpmObjective, FlowMatching, LossWeighting, Objective, Timesteps, WeightingScheme,
};

/// The logical axes of samples.
const SAMPLE_AXES: [Option<&str>; 4] = [Some("activation_batch"), None, None, None];

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
    /// Whether the low-rank factors beside weights that are stored quantized are trained, in place of the denoiser's weights.
    pub trains_low_rank: bool,
    pub optimizer: OptimizerOptions,
    /// The element type of the sums over the batch that gradients are; `None`: `f32`, which one device alone
    /// rounds to the type of the activations.
    pub gradient_reduce_dtype: Option<DType>,
    pub objective: Objective,
    /// The guidance scale that a denoiser is told which takes it.
    pub guidance_scale: f64,
    /// Whether each place of a sample has a weight of its own, an input: [`names::MASK`].
    pub masked: bool,
    /// With prior preservation, where every second row is a class image: how much its error counts.
    pub prior_loss_weight: Option<f64>,
    /// Whether the text encoders are trained.
    pub train_text_encoder: bool,
    pub quantization: Option<Policy>,
    /// How scales are found that are not found anew in every step.
    pub fake_quantization: Option<FakeQuantization>,
}

impl StepOptions {
    /// Whether the text encoders are a part of the step of `model`, which takes token ids then, as with pixels wherever there is
    /// an encoder. Otherwise it takes what they make of them.
    pub fn encodes_text(&self, model: &DiffusionModel) -> bool {
        let is_of_pixels =
            model.family.spec().published.is_none() && !model.text_encoders.is_empty();
        is_of_pixels || self.train_text_encoder || self.inversion.is_some()
    }

    /// Whether weights beside those of the model are trained in their place.
    fn trains_beside(&self) -> bool {
        self.lora.is_some() || self.inversion.is_some()
    }

    /// The program with the weights that are trained beside those of the model.
    fn beside(&self, mut graph: Graph) -> Result<Graph, StepError> {
        if let Some(lora) = &self.lora {
            let ranks = lora.ranks(&graph)?;
            graph = match lora.dropout > 0.0 {
                true => {
                    let dropout = Dropout {
                        share: lora.dropout,
                        key: names::KEY,
                        stream: noise::DROPOUT,
                    };
                    beside_with_dropout(&graph, &ranks, lora.scale(), dropout)?
                }
                false => beside(&graph, &ranks, lora.scale())?,
            };
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
    /// How much the error of each place counts, 0 to 1, in all channels: `f32[batch, 1, rows, columns]`.
    pub const MASK: &str = "loss_mask";
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
    /// Before the name of a group of weights: the norm of its gradient.
    pub const GROUP_NORM: &str = "grad_norm/";
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
/// The loss is the mean squared error of the model's prediction against the objective's target (noise, velocity or
/// sample, or of flow matching noise less sample) at timesteps drawn for each sample; Ho et al. 2020, equation 14, and
/// Salimans and Ho 2022, appendix D. With masks it is the mean of squared errors times masks over all elements, as in
/// `apply_masked_loss` of kohya's `library/custom_train_functions.py`: a masked sample counts as much less as its mask says.
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
    let mut predicted = predict(&b, model, options, key)?;
    if let Some(prior) = options.prior_loss_weight {
        let weight = with_prior(&b.root("loss"), batch, prior, predicted.weight)?;
        predicted.weight = Some(weight);
    }
    let loss = mean_squared_error(&b.root("loss"), &predicted)?;

    b.output(names::LOSS, loss, None)?;
    let mut traced =
        Traced::new("train_step", b.finish()).quantized(options.quantization.as_ref())?;
    traced.graph = options.beside(traced.graph)?;
    let counter = optimizer::updates_input();
    if let Some(fake) = &options.fake_quantization {
        let follow = ActivationRanges::Follow { updates: &counter };
        traced.graph = fake.apply(&traced.graph, follow)?;
    }
    let (beside, low_rank) = (options.trains_beside(), options.trains_low_rank);
    let settings = UpdateSettings {
        optimizer: options.optimizer,
        gradient_reduce_dtype: options.gradient_reduce_dtype,
        freeze: options.fake_quantization.and_then(|fake| fake.freeze_after),
        plus_ratio: options.lora.as_ref().map_or(1.0, |lora| lora.plus_ratio),
    };
    // Of a published text encoder the loss may not depend on all layers; those stay as they are.
    let is_published = model.family.spec().published.is_some();
    let buffers = buffers(model);
    let is_trained = move |name: &str, is_live: bool| {
        let is_wanted = match low_rank {
            true => is_low_rank_factor(name),
            false => !beside || is_factor(name) || is_learned(name),
        };
        is_wanted && (!is_published || is_live) && !buffers.contains(&name.to_owned())
    };
    // Scales that are learned start from the weights that they are of, each by its name.
    let takes_stacks = options.optimizer.takes_stacks() && options.fake_quantization.is_none();
    let update = Update {
        add: Arc::new(move |b: &Builder, sums: &Sums<'_>| update(b, settings, sums, &is_trained)),
        takes_stacks,
    };
    Ok(traced.with_scan_layers(model.scan_layers).trained(update))
}

/// Traces the mean squared errors of `rows` samples, which are inputs as noise and timesteps are: the loss of each without
/// weights of timesteps, and without what else changes noise. Masks count, if there are any.
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
        objective: options.objective.plain(),
        lora: options.lora.clone().map(|lora| LoraOptions {
            dropout: 0.0,
            ..lora
        }),
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
    let errors = squared_errors(&b.root("loss"), &predicted)?;
    let count = b.dims(predicted.target)[1..].iter().product::<usize>();
    b.output(names::LOSS, b.mul_scalar(errors, 1.0 / count as f64)?, None)?;
    let mut traced =
        Traced::new("validation", b.finish()).quantized(options.quantization.as_ref())?;
    traced.graph = options.beside(traced.graph)?;
    if let Some(fake) = &options.fake_quantization {
        traced.graph = fake.apply(&traced.graph, ActivationRanges::Stay)?;
    }
    Ok(traced)
}

/// What the model predicts of a batch, what it should have, and the weights of places and of rows.
struct Predicted {
    prediction: Tensor,
    target: Tensor,
    mask: Option<Tensor>,
    weight: Option<Tensor>,
}

fn predict(
    b: &Builder,
    model: &DiffusionModel,
    options: &StepOptions,
    key: RandomKey,
) -> Result<Predicted, StepError> {
    let batch = options.batch;
    let clean = noise::clean_samples(b, model, options, key)?;
    let conditioning = match options.encodes_text(model) {
        true => text::encoded_text(b, model, batch)?,
        false => {
            let guidance = match model.denoiser.takes_guidance() {
                true => Some(b.full(&Shape::new(DType::F32, [batch]), options.guidance_scale)?),
                false => None,
            };
            model.declare_conditioning(b, batch, model.tokens, guidance)?
        }
    };
    let drawn = noise::draw(b, model, options, key)?;
    let noised = noise::add_noise(&b.root("noise"), model, options, clean, drawn, key)?;
    let inputs = DenoiserInputs::new(noised.sample, noised.timestep, conditioning);
    let mask = match options.masked {
        true => {
            let [_, _, rows, columns] = model.sample_dims(batch);
            let shape = Shape::new(DType::F32, [batch, 1, rows, columns]);
            Some(b.input(names::MASK, shape, &SAMPLE_AXES)?)
        }
        false => None,
    };
    Ok(Predicted {
        prediction: model.predict(b, inputs)?,
        target: noised.target,
        mask,
        weight: noised.weight,
    })
}

/// The names of the weights that no trainer changes.
fn buffers(model: &DiffusionModel) -> Vec<String> {
    let root = model.denoiser.part();
    let keys = model.denoiser.buffers().iter();
    keys.map(|key| format!("{root}/{key}")).collect()
}

/// How a step changes weights.
#[derive(Clone, Copy)]
struct UpdateSettings {
    optimizer: OptimizerOptions,
    /// As [`StepOptions::gradient_reduce_dtype`] has it.
    gradient_reduce_dtype: Option<DType>,
    /// The number of updates that learned scales have; they stay after them.
    freeze: Option<u64>,
    /// How many times the learning rate of first factors that of second ones is.
    plus_ratio: f64,
}

/// Adds the gradient of the loss, which is the first output so far, and the optimizer's update of the weights that
/// `is_trained` chooses by their names and whether outputs depend on them. Further outputs are state that the forward pass
/// changes.
fn update(
    b: &Builder,
    settings: UpdateSettings,
    sums: &Sums<'_>,
    is_trained: &dyn Fn(&str, bool) -> bool,
) -> Result<(), GraphError> {
    let optimizer = &settings.optimizer;
    let live = b.with_graph(Graph::live_nodes);
    let mut outputs = b.take_outputs().into_iter();
    let Some((_, loss)) = outputs.next() else {
        return Err(b.invalid("a training step has an output before its update: the loss"));
    };
    let learning_rate = b.input(names::LEARNING_RATE, Shape::scalar(DType::F32), &[])?;
    let mut weights = weights(b, sums.may_narrow);
    weights.retain(|weight| is_trained(&weight.name, live[weight.tensor.index()]));
    let wrt: Vec<Tensor> = weights
        .iter()
        .flat_map(|weight| weight.entries.iter().copied())
        .collect();
    let mut gradients = grad(b, loss, &wrt)?;
    // In `f32` unless it says otherwise: the compiler moves a rounding behind the sum of several devices before it.
    let between_devices = sums.between_devices.then_some(DType::F32);
    if let Some(dtype) = settings.gradient_reduce_dtype.or(between_devices) {
        let may_narrow = weights
            .iter()
            .flat_map(|weight| weight.entries.iter().map(|_| weight.may_narrow));
        for (gradient, may_narrow) in gradients.iter_mut().zip(may_narrow) {
            *gradient = reduce::summed_in(b, *gradient, dtype, may_narrow)?;
        }
    }
    let mut gradients = gradients.into_iter();
    let of_scales = settings.freeze.map(|last| until(b, last, learning_rate));
    let of_scales = of_scales.transpose()?;
    let mut rates = Rates::new(learning_rate, settings.plus_ratio);
    let trained: Vec<Trained> = weights
        .into_iter()
        .map(|weight| {
            let of_entries: Vec<Tensor> = gradients.by_ref().take(weight.entries.len()).collect();
            let own_rate = match of_scales.filter(|_| is_log_scale(&weight.name)) {
                Some(rate) => Some(rate),
                None => rates.of(b, &weight.name)?,
            };
            Ok(Trained {
                learning_rate: own_rate,
                is_vector: b.dims(weight.entries[0]).len() <= 1,
                gradient: weight.gradient(b, &of_entries)?,
                name: weight.name,
                weight: weight.tensor,
                logical_axes: weight.logical_axes,
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
    for (group, norm) in &update.group_norms {
        b.output(&format!("{}{group}", names::GROUP_NORM), *norm, None)?;
    }
    b.output(names::FINITE, b.convert(update.finite, DType::F32)?, None)?;
    for (output, new) in outputs {
        let state = output
            .alias
            .map(|input| b.with_graph(|g| g.inputs[input].clone()));
        let Some(state) = state else {
            return Err(b.invalid(format!("{}: neither loss nor state", output.name)));
        };
        let old = b.declare(state)?;
        let finite = b.broadcast_to(update.finite, &b.dims(new))?;
        b.output(&output.name, b.select(finite, new, old)?, Some(old))?;
    }
    Ok(())
}

/// A weight of the program, or those of equal blocks as one input.
struct Weight {
    name: String,
    tensor: Tensor,
    /// The weight itself, or the weights of the stack in the order of their blocks.
    entries: Vec<Tensor>,
    logical_axes: Vec<Option<&'static str>>,
    /// Whether its gradient's sums may have fewer bits.
    may_narrow: bool,
}

impl Weight {
    /// The gradient, split over devices as the weight is, by those of the entries.
    fn gradient(&self, b: &Builder, of_entries: &[Tensor]) -> Result<Tensor, GraphError> {
        match (of_entries, stacked::is_stacked(&self.name)) {
            (&[gradient], false) => split_as_weight(b, gradient, &self.logical_axes),
            (entries, _) => {
                let axes = self.logical_axes.get(1..).unwrap_or_default();
                let entries = entries.iter().map(|entry| split_as_weight(b, *entry, axes));
                let entries = entries.collect::<Result<Vec<_>, _>>()?;
                let whole = stacked::stack(&b.root(scopes::OPTIMIZER), &entries)?;
                split_as_weight(b, whole, &self.logical_axes)
            }
        }
    }
}

/// A gradient, split over devices as its weight is. Where it is computed, so that loops over blocks stack parts of it.
fn split_as_weight(
    b: &Builder,
    gradient: Tensor,
    axes: &[Option<&'static str>],
) -> Result<Tensor, GraphError> {
    if axes.is_empty() {
        return Ok(gradient);
    }
    let path = b.with_graph(|g| g.path(&g.nodes[gradient.index()]).to_string());
    b.at(path).constrain(gradient, axes)
}

/// The learning rate in the first `last` updates, 0 after them.
fn until(b: &Builder, last: u64, learning_rate: Tensor) -> Result<Tensor, GraphError> {
    let updates = b.declare(optimizer::updates_input())?;
    let last = b.full(&b.shape(updates), last as f64)?;
    let goes_on = b.compare(Comparison::Lt, updates, last)?;
    b.select(
        goes_on,
        learning_rate,
        b.full(&b.shape(learning_rate), 0.0)?,
    )
}

/// All weights.
fn weights(b: &Builder, may_narrow: &dyn Fn(&Input) -> bool) -> Vec<Weight> {
    b.with_graph(|g| {
        let mut entries = stacked::entry_nodes(g);
        let nodes = g.nodes.iter().enumerate();
        let parameters = nodes.filter_map(|(id, node)| match node.op {
            Op::Parameter(i) => Some((id, &g.inputs[i])),
            _ => None,
        });
        let weights = parameters.filter(|(_, input)| input.is_weight());
        weights
            .map(|(id, input)| {
                let id = id as u32;
                let entries = entries.remove(&id).unwrap_or_else(|| vec![id]);
                Weight {
                    name: input.name.clone(),
                    tensor: b.tensor(id),
                    entries: entries.into_iter().map(|id| b.tensor(id)).collect(),
                    logical_axes: input.logical_axes.clone(),
                    may_narrow: may_narrow(input),
                }
            })
            .collect()
    })
}

fn rounding_key(b: &Builder) -> Result<Tensor, GraphError> {
    b.input(ROUNDING_KEY, Shape::new(DType::U32, [2]), &[])
}

/// The two words of `key`, `u32[2]`, as scalars.
fn random_key(b: &Builder, key: Tensor) -> Result<RandomKey, GraphError> {
    RandomKey::of_words(&b.root("noise"), key)
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

fn mean_squared_error(b: &Builder, predicted: &Predicted) -> Result<Tensor, GraphError> {
    let dims = b.dims(predicted.target);
    let mut errors = squared_errors(b, predicted)?;
    if let Some(weight) = predicted.weight {
        errors = b.mul(errors, weight)?;
    }
    let sum = b.sum(errors, &[0])?;
    b.mul_scalar(sum, 1.0 / dims.iter().product::<usize>() as f64)
}

/// The sum of the squared errors of each row, each times its mask.
fn squared_errors(b: &Builder, predicted: &Predicted) -> Result<Tensor, GraphError> {
    let (prediction, target) = (predicted.prediction, predicted.target);
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
    let mut squares = b.square(difference)?;
    if let Some(mask) = predicted.mask {
        squares = b.mul(squares, mask)?;
    }
    let features: Vec<usize> = (1..dims.len()).collect();
    b.sum(squares, &features)
}

#[cfg(test)]
mod tests {
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
            let predicted = Predicted {
                prediction,
                target: full(0.0),
                mask: None,
                weight: Some(weight),
            };
            let loss = mean_squared_error(&b, &predicted).unwrap();
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

    /// Loss and gradient of a prediction with a mask, one without, and row weights: [losses, gradients].
    fn masked(mask: Option<[f32; 8]>, weight: Option<[f32; 2]>) -> [Vec<f32>; 2] {
        let b = Builder::new();
        let dims = [2, 3, 2, 2];
        let values = |from: f32| {
            (0..24)
                .map(|i| from + (i as f32 * 0.7).sin())
                .collect::<Vec<_>>()
        };
        let given = |dims: &[usize], values: &[f32]| {
            let tensor = HostTensor::from_f32(dims.to_vec(), values).unwrap();
            b.constant(tensor).unwrap()
        };
        let prediction = given(&dims, &values(0.0));
        let predicted = Predicted {
            prediction,
            target: given(&dims, &values(0.3).into_iter().rev().collect::<Vec<_>>()),
            mask: mask.map(|mask| given(&[2, 1, 2, 2], &mask)),
            weight: weight.map(|weight| given(&[2], &weight)),
        };
        let loss = mean_squared_error(&b, &predicted).unwrap();
        let gradient = grad(&b, loss, &[prediction]).unwrap()[0];
        b.output("loss", loss, None).unwrap();
        b.output("gradient", gradient, None).unwrap();
        let found = evaluate(&b.finish(), &[]).unwrap();
        [0, 1].map(|i: usize| found[i].to_f32_vec().unwrap())
    }

    /// The mean over all elements, masked ones included, of squared errors times masks.
    #[test]
    fn masks_weigh_each_place_in_all_channels() {
        for weight in [None, Some([2.0, 0.5])] {
            let plain = masked(None, weight);
            assert_eq!(masked(Some([1.0; 8]), weight), plain);
            let mask = [0.0, 1.0, 0.0, 1.0, 0.25, 0.25, 0.0, 1.0];
            let [loss, gradient] = masked(Some(mask), weight);
            let value = |from: f32, at: usize| from + (at as f32 * 0.7).sin();
            let mut sum = 0.0;
            for (at, found) in gradient.iter().enumerate() {
                let row = at / 12;
                let share = mask[row * 4 + at % 4] * weight.map_or(1.0, |weight| weight[row]);
                let error = value(0.0, at) - value(0.3, 23 - at);
                sum += share * error * error / 24.0;
                assert!((found - share * 2.0 * error / 24.0).abs() < 1e-6, "{at}");
                assert!(share != 0.0 || *found == 0.0, "{at}: {found}");
            }
            assert!((loss[0] - sum).abs() < 1e-6, "{loss:?} {sum}");
        }
    }
}
