//! The inputs of training steps that come from the dataset.

use crate::data::{Batch, Batcher};
use crate::host_tensor::HostTensor;
use crate::models::clip::INPUT_IDS;
use crate::pipelines::pixels::{RGB, to_samples};

use super::encoded::{EncodedDataset, StepInputs};
use super::error::TrainError;
use super::step::names;

/// Makes the inputs of any step, from the step alone.
#[derive(Debug)]
pub(super) enum Feed {
    /// Pixels and token ids. `unshuffle x unshuffle` pixels are one position of a sample.
    Pixels {
        batcher: Box<Batcher>,
        unshuffle: usize,
    },
    /// Latents and text embeddings.
    Encoded(Box<EncodedDataset>),
}

impl Feed {
    /// Samples of a step.
    pub fn batch_size(&self) -> usize {
        match self {
            Feed::Pixels { batcher, .. } => batcher.options().batch_size,
            Feed::Encoded(dataset) => dataset.batch_size(),
        }
    }

    /// The inputs of batch `number`, by name, and which of the sizes its images have.
    ///
    /// # Errors
    /// When data cannot be read.
    pub fn inputs(&self, number: u64) -> Result<(usize, StepInputs), TrainError> {
        match self {
            Feed::Pixels { batcher, unshuffle } => {
                let [side, _] = batcher.dataset().size();
                let inputs = pixels(&batcher.batch(number)?, side, *unshuffle)?;
                Ok((0, inputs))
            }
            Feed::Encoded(dataset) => dataset.inputs(number),
        }
    }
}

/// The inputs of a batch of images of `side x side` pixels.
fn pixels(batch: &Batch, side: usize, unshuffle: usize) -> Result<StepInputs, TrainError> {
    let rows = batch.captions.len();
    let samples = to_samples(&batch.pixels, rows, side, unshuffle);
    let small = side / unshuffle;
    let dims = [rows, RGB * unshuffle * unshuffle, small, small];
    let tokens = batch.token_ids.len() / rows.max(1);
    Ok(StepInputs::from([
        (names::SAMPLE, HostTensor::from_f32(dims, &samples)?),
        (
            INPUT_IDS,
            HostTensor::from_i32([rows, tokens], &batch.token_ids)?,
        ),
    ]))
}
