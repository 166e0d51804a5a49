//! Batches of images.

use std::ops::AddAssign;

use crate::host_tensor::{HostTensor, HostTensorError};

use super::prompt::PromptTokens;

/// One image to generate, with its prompt as token ids.
#[derive(Clone, Debug)]
pub struct TokenizedImage {
    /// Its index in [`super::generator::SamplingOptions::plans`].
    pub plan: usize,
    pub guidance_scale: f32,
    /// The tokens for each text encoder. The prompts and negative prompts of all images have the same number of chunks.
    pub prompt: Vec<PromptTokens>,
    /// The same of the negative prompt; not read without guidance.
    pub negative: Vec<PromptTokens>,
    /// Whether the negative prompt is empty.
    pub negative_is_empty: bool,
    pub seed: u64,
    /// Which of the images it starts from, where there are any.
    pub init: usize,
}

/// Seconds of each phase of generation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Phases {
    /// Reading weights and preparing them.
    pub load: f64,
    pub encode: f64,
    pub denoise: f64,
    /// Includes decoding of previews.
    pub decode: f64,
}

impl AddAssign for Phases {
    fn add_assign(&mut self, other: Phases) {
        self.load += other.load;
        self.encode += other.encode;
        self.denoise += other.denoise;
        self.decode += other.decode;
    }
}

/// Neighbouring images that differ only in prompt and seed.
pub(super) struct Batch {
    pub start: usize,
    pub count: usize,
}

impl Batch {
    /// Its images. A batch that is not full is padded with its first image, and the padding's results are dropped.
    pub fn filled<'a>(&self, images: &'a [TokenizedImage], size: usize) -> Vec<&'a TokenizedImage> {
        let filled = |row| if row < self.count { row } else { 0 };
        (0..size)
            .map(|row| &images[self.start + filled(row)])
            .collect()
    }
}

/// The batches of `images`, of at most `size` each.
pub(super) fn batches(images: &[TokenizedImage], size: usize) -> Vec<Batch> {
    let mut batches: Vec<Batch> = Vec::new();
    for (index, image) in images.iter().enumerate() {
        match batches.last_mut() {
            Some(batch)
                if batch.count < size
                    && images[batch.start].plan == image.plan
                    && images[batch.start].guidance_scale == image.guidance_scale =>
            {
                batch.count += 1;
            }
            _ => batches.push(Batch {
                start: index,
                count: 1,
            }),
        }
    }
    batches
}

/// Row `row` of a batch, with its first dimension.
pub(super) fn one_row(batch: &HostTensor, row: usize) -> Result<HostTensor, HostTensorError> {
    let mut shape = batch.shape.clone();
    let bytes = batch.data.len() / shape.dims[0].max(1);
    shape.dims[0] = 1;
    let data = batch.data[row * bytes..(row + 1) * bytes].to_vec();
    HostTensor::new(shape, data)
}

/// Tensors of one row and one shape as a batch.
pub(super) fn joined(rows: &[HostTensor]) -> Result<HostTensor, HostTensorError> {
    let Some(first) = rows.first() else {
        return HostTensor::from_f32([0], &[]);
    };
    let mut shape = first.shape.clone();
    shape.dims[0] = rows.len();
    let data = rows.iter().flat_map(|row| row.data.iter().copied());
    HostTensor::new(shape, data.collect())
}
