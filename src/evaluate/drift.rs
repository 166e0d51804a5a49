//! How far the samples of two runs come apart from step to step.

use std::path::Path;

use super::{Drawn, EvaluateError};
use crate::host_tensor::HostTensor;
use crate::pipelines::image_file::{LATENTS, latents_path};
use crate::weights::Checkpoint;

/// The relative L2 distance `|x' - x| / |x|` of the samples after each step, the mean of all pairs. `None` unless both have
/// written theirs.
pub(super) fn drift(pairs: &[[&Drawn; 2]]) -> Result<Option<Vec<f64>>, EvaluateError> {
    let mut sums: Vec<f64> = Vec::new();
    for pair in pairs {
        let files = pair.map(|image| latents_path(&image.path));
        if !files.iter().all(|file| file.is_file()) {
            return Ok(None);
        }
        let [expected, found] = [read(&files[0])?, read(&files[1])?];
        if expected.shape != found.shape {
            return Err(EvaluateError::Samples {
                reference: files[0].clone(),
                path: files[1].clone(),
                expected: expected.shape.dims,
                found: found.shape.dims,
            });
        }
        let steps = expected.shape.dims.first().copied().unwrap_or(0);
        let [expected, found] = [expected.to_f32_vec()?, found.to_f32_vec()?];
        let size = (expected.len() / steps.max(1)).max(1);
        sums.resize(steps, 0.0);
        for (sum, (expected, found)) in sums
            .iter_mut()
            .zip(expected.chunks(size).zip(found.chunks(size)))
        {
            let both = expected.iter().zip(found);
            let difference: f64 = both.map(|(x, y)| f64::from(x - y).powi(2)).sum();
            let norm: f64 = expected.iter().map(|x| f64::from(*x).powi(2)).sum();
            *sum += (difference / norm.max(f64::MIN_POSITIVE)).sqrt();
        }
    }
    let count = pairs.len() as f64;
    Ok(Some(sums.into_iter().map(|sum| sum / count).collect()))
}

fn read(path: &Path) -> Result<HostTensor, EvaluateError> {
    Ok(Checkpoint::open(path)?.read(LATENTS)?)
}
