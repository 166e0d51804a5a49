//! Prompts to pictures, for `generate` and for the sample images of `train`.

use image::RgbImage;

use crate::config::Config;
use crate::data::Tokenizer;
use crate::host_tensor::HostTensor;
use crate::pipelines::pixels::{RGB, to_pixels};
use crate::pipelines::text_to_image::{Request, TextToImage, WeightLookup};
use crate::runtime::Session;

use super::recipe;

/// One picture to make.
#[derive(Clone, Debug)]
pub struct Prompted {
    pub prompt: String,
    pub seed: u64,
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Makes a picture for each of `prompts`, in batches of the pipeline's size. `progress` is told the picture and the
/// step that are done.
///
/// # Errors
/// When a prompt cannot be encoded, or a program fails.
#[allow(clippy::too_many_arguments)]
pub fn make_images(
    session: &Session,
    pipeline: &TextToImage,
    weights: WeightLookup<'_>,
    tokenizer: &Tokenizer,
    prompts: &[Prompted],
    negative_prompt: &str,
    config: &Config,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Vec<RgbImage>, Failure> {
    let scheduler = recipe::scheduler(config)?;
    let plan = recipe::sampling_plan(config, &scheduler)?;
    let batch = pipeline.batch();
    let encode = |text: &str| -> Result<Vec<i32>, Failure> {
        let encoded = tokenizer.encode(text)?;
        for warning in encoded.warnings() {
            super::tell(&format!("warning: '{text}': {warning}"));
        }
        Ok(encoded.ids)
    };
    let negative = encode(negative_prompt)?;
    let mut images = Vec::with_capacity(prompts.len());
    for chunk in prompts.chunks(batch) {
        let mut prompt_ids = Vec::new();
        let mut negative_ids = Vec::new();
        let mut seeds = Vec::new();
        // A last, smaller batch is filled up with its first prompt; those pictures are dropped.
        for row in 0..batch {
            let prompted = chunk.get(row).unwrap_or(&chunk[0]);
            prompt_ids.extend(encode(&prompted.prompt)?);
            negative_ids.extend(&negative);
            seeds.push(prompted.seed);
        }
        let done = images.len();
        let sample = pipeline.run(
            session,
            weights,
            &Request {
                prompt_ids: &prompt_ids,
                negative_ids: &negative_ids,
                seeds: &seeds,
                guidance_scale: config.guidance_scale as f32,
                plan: &plan,
            },
            &mut |step| progress(done, step),
        )?;
        images.extend(
            to_images(&sample, config.pixel_unshuffle as usize)?
                .into_iter()
                .take(chunk.len()),
        );
    }
    Ok(images)
}

/// Pictures from samples in [-1, 1] of a model of pixels, `k x k` of them in each place.
fn to_images(sample: &HostTensor, k: usize) -> Result<Vec<RgbImage>, Failure> {
    let dims = &sample.shape.dims;
    if dims.len() != 4 || dims[1] != RGB * k * k || dims[2] != dims[3] {
        return Err(format!(
            "the model makes samples {}, not square RGB pictures (pixel_unshuffle={k}); decoding latents needs a VAE, \
             which is not here yet",
            sample.shape
        )
        .into());
    }
    let values = sample.to_f32_vec()?;
    if values.iter().any(|v| !v.is_finite()) {
        return Err("the model's sample is not finite".into());
    }
    let side = dims[2] * k;
    (0..dims[0])
        .map(|n| {
            let bytes = to_pixels(&values, n, side, k)
                .into_iter()
                .map(|v| ((v + 1.0) * 127.5).round().clamp(0.0, 255.0) as u8)
                .collect();
            RgbImage::from_raw(side as u32, side as u32, bytes)
                .ok_or_else(|| Failure::from("a picture has not as many bytes as pixels"))
        })
        .collect()
}
