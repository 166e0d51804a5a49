//! The values of one step, written as formulas.

use std::ops::{Add, Mul, Sub};

use super::{NOISE, OUTPUT, PredictionType, STATES, Step};

/// The column of what clipping adds to the predicted clean sample.
const CLIPPING: usize = STATES + 2;

/// A value that is linear in what a step has: its coefficients of the states, of the model's output, of fresh noise and
/// of what clipping adds to the predicted clean sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Value([f64; STATES + 3]);

/// The sample before the step.
pub(super) const SAMPLE: Value = Value::unit(0);
/// The model's output.
pub(super) const MODEL: Value = Value::unit(OUTPUT);
/// Fresh unit normal noise.
pub(super) const FRESH: Value = Value::unit(NOISE);

impl Value {
    const fn unit(column: usize) -> Value {
        let mut value = [0.0; STATES + 3];
        value[column] = 1.0;
        Value(value)
    }

    /// The value that an earlier step remembered in this slot.
    pub const fn remembered(slot: usize) -> Value {
        Value::unit(1 + slot)
    }

    /// This prediction of the clean sample after clipping, if there is any.
    pub fn clipped(self, clip: bool) -> Value {
        match clip {
            true => self + Value::unit(CLIPPING),
            false => self,
        }
    }
}

impl Add for Value {
    type Output = Value;

    fn add(self, other: Value) -> Value {
        Value(std::array::from_fn(|i| self.0[i] + other.0[i]))
    }
}

impl Sub for Value {
    type Output = Value;

    fn sub(self, other: Value) -> Value {
        Value(std::array::from_fn(|i| self.0[i] - other.0[i]))
    }
}

impl Mul<f64> for Value {
    type Output = Value;

    fn mul(self, factor: f64) -> Value {
        Value(self.0.map(|c| c * factor))
    }
}

impl Step {
    /// The step that predicts `clean` and goes to the states `next`, the sample first; the other states are not used
    /// again. `noised` is filled in by [`super::SamplingPlan::of_runs`].
    pub(super) fn new<const N: usize>(
        timestep: f64,
        in_scale: f64,
        clean: Value,
        next: [Value; N],
    ) -> Step {
        const {
            assert!(
                N <= STATES,
                "a sampler's memory is larger than its capacity"
            )
        };
        let mut step = Step {
            timestep: timestep as f32,
            in_scale: in_scale as f32,
            clean: [clean.0[0] as f32, clean.0[OUTPUT] as f32],
            clip: [0.0; STATES],
            update: [[0.0; STATES + 2]; STATES],
            noised: [0.0; 2],
        };
        for (state, Value(value)) in next.into_iter().enumerate() {
            step.clip[state] = value[CLIPPING] as f32;
            step.update[state] = std::array::from_fn(|column| value[column] as f32);
        }
        step
    }
}

/// The clean sample that a model of this kind predicts from `signal * clean + deviation * noise`.
pub(super) fn predicted_clean(kind: PredictionType, signal: f64, deviation: f64) -> Value {
    match kind {
        PredictionType::Epsilon => (SAMPLE - MODEL * deviation) * (1.0 / signal),
        PredictionType::Sample => MODEL,
        PredictionType::VPrediction => SAMPLE * signal - MODEL * deviation,
        PredictionType::FlowPrediction => {
            (SAMPLE - MODEL * deviation) * (1.0 / (signal + deviation))
        }
    }
}

/// The noise that it predicts.
pub(super) fn predicted_noise(kind: PredictionType, signal: f64, deviation: f64) -> Value {
    match kind {
        PredictionType::Epsilon => MODEL,
        PredictionType::Sample => (SAMPLE - MODEL * signal) * (1.0 / deviation),
        PredictionType::VPrediction => SAMPLE * deviation + MODEL * signal,
        PredictionType::FlowPrediction => (SAMPLE + MODEL * signal) * (1.0 / (signal + deviation)),
    }
}
