//! The draws of a step: clean samples, noise and timesteps, and the noisy samples that they make.

use crate::dtype::DType;
use crate::graph::random::{self, RandomKey};
use crate::graph::{Binary, Builder, Comparison, GraphError, Tensor};
use crate::host_tensor::HostTensor;
use crate::models::DiffusionModel;
use crate::shape::Shape;

use super::objective::{Objective, Timesteps};
use super::{CleanSamples, Draws, SAMPLE_AXES, StepError, StepOptions, names};

/// The stream of the step's key that dropout has; those before it are drawn from here.
pub(super) const DROPOUT: u32 = 5;

/// Declares the clean samples, or draws them from the distributions that are declared.
pub(super) fn clean_samples(
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
pub(super) struct Drawn {
    noise: Tensor,
    timestep: Tensor,
}

pub(super) fn draw(
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
            let of_timesteps = random::fold_in(b, key, 0)?;
            let normal = |b: &Builder| random::normal(b, random::fold_in(b, key, 1)?, &dims);
            match &options.objective {
                Objective::Ddpm(objective) => {
                    let uniform = random::uniform(b, of_timesteps, &[options.batch])?;
                    Drawn {
                        noise: with_offset(b, key, normal(b)?, objective.noise_offset)?,
                        timestep: draw_timesteps(b, uniform, steps, &objective.timesteps)?,
                    }
                }
                Objective::FlowMatching(objective) => {
                    let draws = match objective.weighting.is_normal() {
                        true => random::normal(b, of_timesteps, &[options.batch])?,
                        false => random::uniform(b, of_timesteps, &[options.batch])?,
                    };
                    let places = objective.weighting.density(b, draws)?;
                    Drawn {
                        noise: normal(b)?,
                        timestep: timesteps_at(b, places, steps)?,
                    }
                }
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

pub(super) struct Noised {
    pub sample: Tensor,
    pub timestep: Tensor,
    pub target: Tensor,
    /// The weight of each sample's error: `f32[batch]`.
    pub weight: Option<Tensor>,
}

/// The noisy samples of a batch, and what the model is to predict of them.
pub(super) fn add_noise(
    b: &Builder,
    model: &DiffusionModel,
    options: &StepOptions,
    clean: Tensor,
    Drawn { noise, timestep }: Drawn,
    key: RandomKey,
) -> Result<Noised, StepError> {
    let levels = options.objective.levels(&model.scheduler)?;
    let batch = options.batch;
    let of_rows = |column: &[f32]| -> Result<Tensor, GraphError> {
        let table = b.constant(HostTensor::from_f32([column.len()], column)?)?;
        b.take(table, timestep)
    };
    let pick = |column: &[f32]| b.reshape(of_rows(column)?, &[batch, 1, 1, 1]);
    let mix = |[of_sample, of_noise]: &[Vec<f32>; 2], noise: Tensor| {
        b.add(
            b.mul(pick(of_sample)?, clean)?,
            b.mul(pick(of_noise)?, noise)?,
        )
    };
    let seen = match &options.objective {
        Objective::Ddpm(objective) => perturbed(b, key, noise, objective.input_perturbation)?,
        Objective::FlowMatching(_) => noise,
    };
    let weights = levels.weights.as_deref();
    Ok(Noised {
        weight: weights.map(of_rows).transpose()?,
        sample: mix(&levels.input, seen)?,
        timestep: match levels.told {
            Some(told) => of_rows(&told)?,
            None => b.convert(timestep, DType::F32)?,
        },
        target: mix(&levels.target, noise)?,
    })
}

/// Integer timesteps `s32[batch]` at `places` `f32[batch]`: 0 is the last of `steps` timesteps, that of the most noise, and 1 the
/// first. [`WeightingScheme::density`](super::WeightingScheme::density) makes places.
///
/// # Errors
/// None: the shapes are those of the places.
pub fn timesteps_at(b: &Builder, places: Tensor, steps: usize) -> Result<Tensor, GraphError> {
    let last = steps as f64 - 1.0;
    let from_last = b.convert(b.mul_scalar(places, steps as f64)?, DType::S32)?;
    // A draw may lie beyond the last place, where diffusers' table of levels has no entry.
    let from_last = b.clamp(from_last, 0.0, last)?;
    b.sub(b.full(&b.shape(from_last), last)?, from_last)
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
            let passed = b.compare(Comparison::Ge, column, table)?;
            b.sum(b.convert(passed, DType::S32)?, &[1])?
        }
    };
    // f32 rounding may reach the upper end.
    let last = b.full(&b.shape(drawn), steps as f64 - 1.0)?;
    b.binary(Binary::Min, drawn, last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::evaluate;

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

    /// diffusers' indices count from the most noise; a draw beyond the table takes its end.
    #[test]
    fn places_are_timesteps_from_the_last() {
        let b = Builder::new();
        let places = [0.0f32, 0.0999, 0.5, 0.999, 1.0, 1.2, -0.3];
        let places = HostTensor::from_f32([7], &places).unwrap();
        let t = timesteps_at(&b, b.constant(places).unwrap(), 10).unwrap();
        b.output("t", b.convert(t, DType::F32).unwrap(), None)
            .unwrap();
        let found = evaluate(&b.finish(), &[]).unwrap()[0].to_f32_vec().unwrap();
        assert_eq!(found, [9.0, 9.0, 4.0, 0.0, 0.0, 0.0, 9.0]);
    }
}
