//! The sampler's part of the denoising program: what [`crate::schedulers::Step`] describes, with its numbers as inputs.

use crate::dtype::DType;
use crate::graph::{Builder, GraphError, Tensor};
use crate::host_tensor::{HostTensor, HostTensorError};
use crate::schedulers::{HISTORY, NOISE, OUTPUT, STATES, Step};
use crate::shape::Shape;

type Result<T> = std::result::Result<T, GraphError>;

/// Names of the sampler's inputs; [`names::SAMPLE`] and [`names::HISTORY`] are also those of its results.
pub mod names {
    /// `f32[batch, channels, rows, columns]`; the step's result takes its buffer over.
    pub const SAMPLE: &str = "sample";
    /// `f32[HISTORY, batch, channels, rows, columns]`, the same.
    pub const HISTORY: &str = "history";
    /// Fresh unit normal noise of the sample's shape.
    pub const NOISE: &str = "noise";
    pub const TIMESTEP: &str = "timestep";
    /// Scales the sample before it enters the model.
    pub const IN_SCALE: &str = "in_scale";
    /// `f32[STATES, STATES + 2]`
    pub const UPDATE: &str = "update";
    /// `f32[2]`
    pub const CLEAN: &str = "clean";
    /// `f32[STATES]`: an input of a program that clips.
    pub const CLIP: &str = "clip";
    /// The predicted clean sample, a result.
    pub const PREDICTED: &str = "predicted";
}

/// The inputs of one step, beside the model's own.
#[derive(Clone, Copy, Debug)]
pub struct SamplerStep {
    sample: Tensor,
    history: Tensor,
    noise: Tensor,
    update: Tensor,
    clean: Tensor,
    clip: Option<Tensor>,
}

impl SamplerStep {
    /// Declares the inputs for samples `dims`: `[batch, channels, rows, columns]`.
    ///
    /// # Errors
    /// When one of the names is taken.
    pub fn declare(b: &Builder, dims: [usize; 4], clip: bool) -> Result<SamplerStep> {
        let axes = [Some("activation_batch"), None, None, None];
        let sample = Shape::new(DType::F32, dims);
        let history = [[HISTORY].as_slice(), &dims].concat();
        let history_axes = [[None].as_slice(), &axes].concat();
        Ok(SamplerStep {
            sample: b.input(names::SAMPLE, sample.clone(), &axes)?,
            history: b.input(
                names::HISTORY,
                Shape::new(DType::F32, history),
                &history_axes,
            )?,
            noise: b.input(names::NOISE, sample, &axes)?,
            update: b.input(
                names::UPDATE,
                Shape::new(DType::F32, [STATES, STATES + 2]),
                &[],
            )?,
            clean: b.input(names::CLEAN, Shape::new(DType::F32, [2]), &[])?,
            clip: match clip {
                true => Some(b.input(names::CLIP, Shape::new(DType::F32, [STATES]), &[])?),
                false => None,
            },
        })
    }

    /// The sample before the step.
    pub fn sample(&self) -> Tensor {
        self.sample
    }

    /// The step itself: declares the next sample, the next history and the predicted clean sample as results.
    ///
    /// `output` is the model's output in `f32`, of the sample's shape.
    ///
    /// # Errors
    /// When the output has another shape.
    pub fn advance(&self, b: &Builder, output: Tensor) -> Result<()> {
        let b = b.root("sampler");
        let dims = b.dims(self.sample);
        let states = [[STATES].as_slice(), &dims].concat();
        let over_states = |value: Tensor| {
            let value = b.broadcast_in_dim(value, &[1, 2, 3, 4], &states)?;
            Ok::<_, GraphError>(value)
        };
        // A column of the matrix times the value it belongs to. A dot would round to bfloat16 on some hardware.
        let term = |column: usize, value: Tensor| {
            let column = b.slice_dim(self.update, 1, column, column + 1)?;
            let column = b.reshape(column, &[STATES])?;
            let column = b.broadcast_in_dim(column, &[0], &states)?;
            b.mul(column, over_states(value)?)
        };
        let mut next = term(0, self.sample)?;
        for state in 1..STATES {
            let value = b.slice_dim(self.history, 0, state - 1, state)?;
            let value = b.reshape(value, &dims)?;
            next = b.add(next, term(state, value)?)?;
        }
        next = b.add(next, term(OUTPUT, output)?)?;
        next = b.add(next, term(NOISE, self.noise)?)?;

        let coefficient = |index: usize| {
            let value = b.slice_dim(self.clean, 0, index, index + 1)?;
            b.reshape(value, &[])
        };
        let of_sample = b.mul(self.sample, coefficient(0)?)?;
        let of_output = b.mul(output, coefficient(1)?)?;
        let mut clean = b.add(of_sample, of_output)?;
        if let Some(clip) = self.clip {
            let clipped = b.clamp(clean, -1.0, 1.0)?;
            let change = over_states(b.sub(clipped, clean)?)?;
            let clip = b.broadcast_in_dim(clip, &[0], &states)?;
            next = b.add(next, b.mul(clip, change)?)?;
            clean = clipped;
        }

        let sample = b.slice_dim(next, 0, 0, 1)?;
        let sample = b.reshape(sample, &dims)?;
        let history = b.slice_dim(next, 0, 1, STATES)?;
        b.output(names::SAMPLE, sample, Some(self.sample))?;
        b.output(names::HISTORY, history, Some(self.history))?;
        b.output(names::PREDICTED, clean, None)
    }
}

/// The numbers of `step` as the program takes them, by name.
///
/// # Errors
/// None for a step of this crate: the sizes are fixed.
pub fn step_inputs(
    step: &Step,
) -> std::result::Result<[(&'static str, HostTensor); 5], HostTensorError> {
    let update: Vec<f32> = step.update.iter().flatten().copied().collect();
    Ok([
        (names::TIMESTEP, HostTensor::from_f32([], &[step.timestep])?),
        (names::IN_SCALE, HostTensor::from_f32([], &[step.in_scale])?),
        (
            names::UPDATE,
            HostTensor::from_f32([STATES, STATES + 2], &update)?,
        ),
        (names::CLEAN, HostTensor::from_f32([2], &step.clean)?),
        (names::CLIP, HostTensor::from_f32([STATES], &step.clip)?),
    ])
}
